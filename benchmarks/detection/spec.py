"""What both engines are told and what they answer. Times in seconds from the run's start, tokens and blocks counted."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

Floats: TypeAlias = npt.NDArray[np.float64]
Ints: TypeAlias = npt.NDArray[np.int64]
Words: TypeAlias = npt.NDArray[np.uint64]
Lengths: TypeAlias = npt.NDArray[np.int32]
Bools: TypeAlias = npt.NDArray[np.bool_]

NEVER = math.inf
DAY = 86400.0


class EngineSpec(NamedTuple):
    """One rank of a vLLM V1 engine: scheduler settings, how long a step takes, and habits of its version."""

    blocks: int = 4096  # usable: without the null block
    block_size: int = 16  # tokens
    max_num_seqs: int = 256
    max_batched_tokens: int = 8192  # the token budget of a step
    watermark: float = 0.0  # share of the pool that an admission leaves free (0.24+, off by default)
    reserve_full_prompt: bool = True  # scheduler_reserve_full_isl: admit only what fits whole (0.19+)
    step_seconds: float = 0.015  # an empty batch
    seconds_per_seq: float = 1e-4
    seconds_per_prefill_token: float = 5e-5
    patience: float = 120.0  # a client leaves after waiting so long for admission
    stats_after_abort: bool = True  # 0.10.2+: gauges move when an abort empties the engine
    polls_holds: bool = True  # 0.22+: an idle engine looks after blocks that a connector holds
    defer_seconds: float = 0.0  # a KV connector loads so long before a request may be admitted


class Holds(NamedTuple):
    """Blocks of finished requests that a KV connector keeps by right."""

    share: float = 0.0  # of finished requests whose blocks are read by another engine
    seconds: float = 2.0  # a transfer
    stuck_share: float = 0.0  # of those, whose reader never comes
    timeout: float = 480.0  # NIXL's and Mooncake's before leases; 30 with leases
    kept_share: float = 0.0  # of finished requests that a store keeps until the pool needs the room
    kept_cap: float = 0.0  # of the pool


class KvFault(NamedTuple):
    """Ways to lose blocks for ever, from ``onset`` on."""

    onset: float = NEVER
    abort_probability: float = 0.0
    abort_blocks: int = 0  # lost of each aborted request, at most
    finish_probability: float = 0.0  # a finished request loses all its own blocks
    hold_probability: float = 0.0  # a connector never gives back
    one_off: float = 0.0  # share of the pool, lost by the next requests that end


RESTART, HANG, STALL, SLEEP = range(4)


class Event(NamedTuple):
    """RESTART: down until ``end``. HANG: no step from ``begin``, or from the next load on. STALL: no admission."""

    begin: float
    end: float
    kind: int


@dataclass(frozen=True)
class Workload:
    """Requests in order of arrival.

    ``leave_after`` is the number of tokens after which the client disconnects, -1 for those that stay. ``group`` is
    the prefix that the prompt begins with, -1 for none; ``group_tokens`` the length of each prefix.
    """

    arrival: Floats
    prompt: Ints
    output: Ints
    leave_after: Ints
    group: Ints
    group_tokens: Ints

    def __len__(self) -> int:
        return len(self.arrival)

    def select(self, keep: Bools) -> Workload:
        return Workload(
            self.arrival[keep],
            self.prompt[keep],
            self.output[keep],
            self.leave_after[keep],
            self.group[keep],
            self.group_tokens,
        )


# Columns of a rank's table. The gauges are those last pushed by the engine, not the truth of the moment.
COLUMNS = (
    "used",
    "running",
    "waiting",
    "deferred",
    "preemptions",
    "prompt_tokens",
    "generation_tokens",
    "steps",
    "finished_stop",
    "finished_length",
    "request_prompt",
    "request_generation",
    "prefix_queries",
    "prefix_hits",
    "kv_expired",
    # what only the simulator knows
    "lost",
    "held",
    "owned",  # blocks of requests that are really there
    "head_age",  # how long the first of the queue has waited
    "pool_limited",  # 1: the first of the queue does not fit
    "peak_running",  # since the last sample
    "peak_tokens",  # of one step, since the last sample
    "started",  # requests ever admitted; restarts do not reset it
    "state",
)
(
    USED,
    RUNNING,
    WAITING,
    DEFERRED,
    PREEMPTIONS,
    PROMPT_TOKENS,
    GENERATION_TOKENS,
    STEPS,
    FINISHED_STOP,
    FINISHED_LENGTH,
    REQUEST_PROMPT,
    REQUEST_GENERATION,
    PREFIX_QUERIES,
    PREFIX_HITS,
    KV_EXPIRED,
    LOST,
    HELD,
    OWNED,
    HEAD_AGE,
    POOL_LIMITED,
    PEAK_RUNNING,
    PEAK_TOKENS,
    STARTED,
    STATE,
) = range(len(COLUMNS))
COUNTERS = slice(PREEMPTIONS, KV_EXPIRED + 1)

UP, DOWN, ASLEEP = range(3)

# vLLM's buckets for lengths: 1-2-5 steps (vllm/v1/metrics/loggers.py, build_1_2_5_buckets).
LENGTH_BOUNDS = np.array([m * 10.0**e for e in range(6) for m in (1, 2, 5)])


@dataclass(frozen=True)
class RankSeries:
    """One rank, sampled: COLUMNS, and counts of prompt and then of generation lengths by LENGTH_BOUNDS and above."""

    t: Floats
    table: Floats
    lengths: Lengths
    first_lost: float  # time of the first lost block, NEVER when none
    dead: float  # nothing runs and something waits for blocks for 120 s; NEVER when that did not happen
    hung: float  # when the engine really stopped stepping, NEVER when it did not

    def __getitem__(self, column: int) -> Floats:
        return np.asarray(self.table[:, column], dtype=np.float64)

    def upto(self, end: float) -> RankSeries:
        n = int(np.searchsorted(self.t, end, side="right"))
        return RankSeries(self.t[:n], self.table[:n], self.lengths[:n], self.first_lost, self.dead, self.hung)
