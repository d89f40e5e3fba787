"""What to do about a verdict: ordered actions, the first thing first, with the values that fit the case.

Nothing is advised that the engine's vLLM does not have; where its version is not known, the action says from which
version on it holds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from oomwatch import units
from oomwatch.detectors.base import Finding
from oomwatch.observations import EngineFacts
from oomwatch.sources.vllm.meaning import release

GIB = 1024**3

FLAGS: Mapping[str, tuple[int, ...]] = {
    "--gpu-memory-utilization": (),
    "--max-model-len": (),
    "--max-num-seqs": (),
    "--max-num-batched-tokens": (),
    "--kv-cache-dtype": (),
    "--tensor-parallel-size": (),
    "--block-size": (),
    "--enforce-eager": (),
    "--disable-log-stats": (),
    "--max-loras": (),
    "--kv-cache-memory-bytes": (0, 10, 2),
}
"""vLLM's flags that advice names, with the first release that has each; empty: all that are supported."""

_WATERMARK = (0, 24)  # the V1 scheduler's setting, off by default (PR #44594)
_STATISTICS_AFTER_ABORTS = (0, 10, 2)  # gauges are true again after the last request was aborted (PR #22995)
_NO_EXPANDABLE_WITH_CONNECTOR = (0, 21)  # vLLM refuses to start with both (PR #41237)


def advice(verdict: str, finding: Finding, facts: EngineFacts | None) -> tuple[str, ...]:
    """Actions for a person on call, with the values that fit this case."""
    return tuple(_TABLE[verdict](_Case(finding, facts)))


@dataclass(frozen=True)
class _Case:
    """A finding with what is known of the engine."""

    finding: Finding
    facts: EngineFacts | None

    def number(self, key: str) -> float | None:
        value = self.finding.evidence.get(key)
        return float(value) if isinstance(value, (int, float)) else None

    def listed(self, key: str) -> list[str]:
        value = self.finding.evidence.get(key)
        return [str(item) for item in value] if isinstance(value, list) else []

    def text(self, key: str) -> str:
        value = self.finding.evidence.get(key)
        return value if isinstance(value, str) else ""

    @property
    def pages(self) -> bool:
        return self.finding.state == "page"

    @property
    def utilization(self) -> float | None:
        told = self.number("utilization")
        return told if told is not None or self.facts is None else self.facts.gpu_memory_utilization

    @property
    def connector(self) -> bool:
        return bool(self.facts and self.facts.kv_connector)

    @property
    def expandable(self) -> str:
        """How to start with expandable segments, with what stands against it; empty where vLLM refuses it."""
        if self.connector and self.has(_NO_EXPANDABLE_WITH_CONNECTOR) is not False:
            return ""
        certain = self.connector or (self.facts is not None and self.facts.kv_connector is False)
        against = "sleep mode" if certain else "sleep mode or a KV connector"
        return f"start it with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, unless it uses {against}"

    def has(self, first: tuple[int, ...]) -> bool | None:
        """Whether the engine's vLLM is of that release or newer; None where its version is not known."""
        version = release(self.facts.vllm_version) if self.facts else None
        return True if not first else None if version is None else version >= first

    def since(self, first: tuple[int, ...]) -> str:
        """What to add to an action that needs a release, where the engine's is not known."""
        return "" if self.has(first) else f" (vLLM {'.'.join(map(str, first))} and newer)"

    def less(self, share: float) -> str:
        """``--gpu-memory-utilization`` lowered by a share of the device, rounded so that it suffices."""
        now = self.utilization
        if now is None:
            return f"--gpu-memory-utilization by {max(0.01, math.ceil(share * 100) / 100):.2f}"
        to = max(0.05, math.floor((now - share) * 100 + 1e-9) / 100)
        return f"--gpu-memory-utilization from {now:g} to {min(to, now - 0.01):.2f}"

    def before(self) -> str:
        """By when, with the earlier bound of the time left: `` within 5 h``, or nothing."""
        eta = self.finding.eta
        if eta is None or eta.seconds <= 0:
            return ""
        return f" within {units.duration(eta.low if eta.low is not None else eta.seconds)}"


_SAVE = (
    "Save its log, its page of metrics and what py-spy dump says of its engine process first: "
    "they are gone with the restart."
)
_FP8 = (
    "If the GPU and the attention backend support it, --kv-cache-dtype fp8 makes room for about twice the tokens, at a "
    "small loss of accuracy."
)


# --- capacity ----------------------------------------------------------------------------------------------------


def _startup_refused(case: _Case) -> Iterator[str]:
    yield "Look what else holds memory there (oomwatch check lists it by owner), and stop what does not belong there."
    largest = case.number("largest_passing_utilization")
    if largest is not None:
        now = case.utilization
        yield (
            f"As things are, it starts with --gpu-memory-utilization {math.floor(largest * 100) / 100:.2f} at most"
            f"{f' instead of {now:g}' if now is not None else ''}: the KV pool is smaller by the difference."
        )
    fitting = case.number("largest_max_model_len")
    if fitting is not None:
        yield (
            f"As things are, it starts with --max-model-len {fitting:.0f} at most: longer requests are then refused."
        )
    if largest is None and fitting is None:
        yield (
            "The end of its log says what was wanted and what was there: lower --gpu-memory-utilization to what is "
            "free, or --max-model-len to what the pool holds."
        )


def _startup_oom(case: _Case) -> Iterator[str]:
    yield "Read the end of its log: the step that ran out decides what helps."
    if case.number("least_free_bytes") is not None:
        yield "Look whether something else took memory on the device meanwhile: oomwatch check lists it by owner."
    yield "Ran out while loading weights: the model needs more GPUs (--tensor-parallel-size) or a quantized form."
    yield "Ran out while profiling or warming up: lower --max-num-batched-tokens or --max-num-seqs."
    yield (
        f"Ran out while capturing graphs: lower {case.less(0.02)}, or give up graphs with --enforce-eager, which costs "
        "speed."
    )


def _concurrency_low(case: _Case) -> Iterator[str]:
    tokens, longest = case.number("pool_tokens"), case.number("max_model_len")
    if tokens is not None and longest is not None and tokens >= 512:
        fitting = math.floor(min(tokens / 2, longest) / 256) * 256
        yield (
            f"If requests are shorter, lower --max-model-len from {longest:.0f} to {fitting:.0f} at the next restart: "
            "two of the longest then fit; longer ones are refused."
        )
    else:
        yield "If requests are shorter, lower --max-model-len at the next restart: longer ones are then refused."
    yield _FP8
    yield "Else it needs more memory for the pool: more GPUs (--tensor-parallel-size), or a smaller model."


def _budget_overrun(case: _Case) -> Iterator[str]:
    over, total = case.number("overrun_bytes"), case.number("total_bytes")
    yield (
        "Nothing is broken yet: contexts, NCCL and, in older versions, graphs come on top of the budget. Whoever else "
        "counts on the rest of the device has that much less."
    )
    if over is not None and total:
        yield (
            f"To keep the promise, lower {case.less(over / total)} at the next restart: the KV pool gets about "
            f"{units.size(over)} smaller."
        )
        yield (
            "If that is normal for this engine, tell so: detection.overrides with budget_overrun.allowance of "
            f"{math.ceil(over / 2**28) * 256}MiB."
        )
    if case.has((0, 10, 2)) is not False:
        yield (
            f"Where neighbours need a fixed share, --kv-cache-memory-bytes sets the pool{case.since((0, 10, 2))}; "
            "profiling is then left out, and what fits is up to you."
        )


def _margin_thin(case: _Case) -> Iterator[str]:
    fitting, now, floor = case.number("fitting_utilization"), case.utilization, case.number("free_floor_bytes")
    missing = max(0.0, GIB - floor) if floor is not None else None
    if fitting is not None and now is not None:
        yield (
            f"At the next restart set --gpu-memory-utilization to {fitting:g} instead of {now:g}: 1 GiB stays free"
            f"{f', and the KV pool gets about {units.size(missing)} smaller' if missing else ''}."
        )
    else:
        yield "At the next restart lower --gpu-memory-utilization so that 1 GiB stays free; the KV pool gets smaller."
    yield "Or lower --max-num-batched-tokens: a forward pass then asks for less at once, and long prompts take longer."
    yield "It need not be now: it has run like this since its start."


def _headroom_low(case: _Case) -> Iterator[str]:
    floor, level = case.number("free_floor_bytes"), case.number("level_bytes")
    gone = f" the {units.size(level - floor)}" if floor is not None and level is not None else " what"
    yield f"Look who took{gone} that were free before: oomwatch check lists the device's memory by owner."
    yield "A neighbour or a left-over process: stop it."
    if case.pages:
        yield (
            "The engine itself: take it out of the load balancer, let it finish its requests and restart it, before an "
            "allocation fails and ends it in the middle of them."
        )
    else:
        yield "The engine itself: restart it at a quiet moment. The first allocation that fails ends it."


def _kv_exhaustion(case: _Case) -> Iterator[str]:
    yield "Send less to this engine: move load to others, add a replica, or turn some requests away."
    yield from _fewer_at_once(case)
    yield _FP8
    yield "Look whether few requests hold most of it (very long outputs): limit max_tokens where clients allow it."


def _preemption_pressure(case: _Case) -> Iterator[str]:
    yield "No emergency: each preempted request is computed anew, which costs time and throughput."
    yield from _fewer_at_once(case)
    yield "If it stays like this at usual load, the pool is too small for it: add a replica or GPUs."


def _fewer_at_once(case: _Case) -> Iterator[str]:
    watermark = case.has(_WATERMARK) is not False
    if watermark:
        yield (
            "At the next restart set the scheduler's watermark to 0.02: new requests are let in later, and far fewer "
            f"running ones are thrown out{case.since(_WATERMARK)}."
        )
    running = case.number("running")
    bound = f" to about {running:.0f}, as many as run now" if running is not None and running >= 2 else ""
    lower = "Or lower" if watermark else "At the next restart lower"
    yield f"{lower} --max-num-seqs{bound}: the rest waits in the queue instead of being computed twice."


def _admission_stall(case: _Case) -> Iterator[str]:
    running = case.number("running")
    if running:
        yield (
            f"If --max-num-seqs is {running:.0f}, that is the limit, not memory: raise it at the next restart, for the "
            "pool has room."
        )
    else:
        yield "Look in its log for a request that can never fit, and abort it."
    if case.connector:
        yield "Look at the other side of the KV transfer: requests that wait for it are not admitted."
    yield "Requests for more LoRA adapters at once than --max-loras allows wait for one to be done."
    yield f"If nothing moves, take it out of the load balancer and restart it. {_SAVE}"


def _ranks_unbalanced(case: _Case) -> Iterator[str]:
    rank, roomy = case.text("rank"), case.text("free_rank")
    which = f" (rank {rank} is full, rank {roomy} has room)" if rank and roomy else ""
    yield (
        f"Look at what spreads requests over the ranks{which}: taking turns ignores their length, and sessions that "
        "stick to a rank pile up."
    )
    yield "Have it choose by queue or by KV usage of each rank; both are on this page and in the metrics."
    yield "Nothing has to be restarted: there is room, in the wrong place."


def _engine_stuck(case: _Case) -> Iterator[str]:
    yield "Take it out of the load balancer: its /health may well be green."
    yield _SAVE
    ranks = case.listed("ranks")
    several = f" Rank {', '.join(ranks)} hangs; all ranks have to be restarted together." if len(ranks) > 1 else ""
    yield f"Restart it: it does not recover by itself.{several}"


def _orphan_memory(case: _Case) -> Iterator[str]:
    pids = case.listed("pids")
    if pids:
        yield f"Look what they are: ps -o pid,ppid,lstart,user,args -p {','.join(pids[:10])}."
        yield "Workers that a dead engine left behind: kill them, with kill -9 if they stay. Nothing else frees it."
        yield "If they belong there, name them under neighbours in the configuration."
    else:
        yield (
            "No listed process holds it: look for one of another container with fuser -v /dev/nvidia* on the host, and "
            "end it."
        )
        yield "If there is none, reset the GPU (nvidia-smi -r) once its engines are stopped."


def _runtime_oom(case: _Case) -> Iterator[str]:
    wanted, free, total = case.number("wanted_bytes"), case.number("free_bytes"), case.number("total_bytes")
    if case.pages:
        yield "Restart the engine if nothing does: it does not come back by itself."
    if case.finding.killer == "fragmentation":
        yield "There was enough memory, in pieces too small: a restart puts it together, for a while."
        if case.expandable:
            yield f"At that restart, {case.expandable}: the driver then puts pieces together."
    else:
        yield "There was too little memory, whatever the error's text says of fragmentation: its hint does not help."
    short = (wanted - free) if wanted is not None and free is not None else None
    if short is not None and short > 0 and total:
        share, size = (short + GIB / 4) / total, f": {units.size(short)} were missing"
    else:
        share, size = 0.02, ""
    yield f"Lower {case.less(share)}{size}. The KV pool gets smaller, and what is outside gets room."
    yield "Or lower --max-num-batched-tokens, which makes the largest single allocation smaller; prompts take longer."


def _crash_loop(case: _Case) -> Iterator[str]:
    first = case.number("first_death")
    when = f" of {units.moment(first)}" if first is not None else ""
    yield f"Read the end of its log before the first death{when}: later ones often only repeat it."
    yield "Undo what changed before that: version, flags, model, driver, neighbours on the GPU."
    yield "Until the cause is found keep requests away from it: each restart takes its requests with it."


# --- fragmentation and leaks -------------------------------------------------------------------------------------


def _allocator_fragmentation(case: _Case) -> Iterator[str]:
    when = "Let it finish its requests and restart it now" if case.pages else "Restart it at a quiet moment"
    yield f"{when}: the pieces are then one again, for a while. The next large request may fail otherwise."
    if case.expandable:
        yield f"At that restart, {case.expandable}: the driver then puts pieces together."
    wanted, reach = case.number("largest_transient_bytes"), case.number("reach_bytes")
    if wanted is not None and reach is not None and wanted > reach:
        yield (
            f"Or lower {case.less(0.02)}: {units.size(wanted - reach)} are missing in one piece, and what is outside "
            "the KV pool gets room."
        )
    else:
        yield f"Or lower {case.less(0.02)}: what is outside the KV pool gets room."
    yield "Or lower --max-num-batched-tokens, which makes the largest single allocation smaller; prompts take longer."


def _unaccounted_growth(case: _Case) -> Iterator[str]:
    when = case.before()
    yield f"Let it finish its requests and restart it{when or ' at a quiet moment'}: that gives all of it back."
    if case.expandable:
        yield f"At that restart, {case.expandable}: the pieces are then used again, and the growth ends."
    yield "Look what asks for ever other sizes: multimodal requests, prompts of very different lengths, LoRA adapters."
    if not case.pages:
        yield f"To win time, lower {case.less(0.02)} at that restart; the KV pool gets smaller."


def _kv_tail_waste(case: _Case) -> Iterator[str]:
    size = case.number("block_size")
    if size is not None and size >= 32:
        yield (
            f"At the next restart lower --block-size from {size:.0f} to {size / 2:.0f}, if the attention backend can: "
            "the waste halves."
        )
    else:
        yield "The blocks are as small as they get: nothing is to be done."
    yield "It is no danger: it makes the pool a little smaller than it looks, and cannot grow."


def _kv_block_leak(case: _Case) -> Iterator[str]:
    if case.text("method") == "wedge":
        yield "Take it out of the load balancer: it serves no more."
        yield _SAVE
        yield "Restart it now: blocks that are lost come back by nothing else."
    else:
        yield _SAVE
        when = case.before()
        yield (
            f"Let it finish its requests and restart it{when or ' at a quiet moment'}: blocks that are lost "
            "come back by nothing else."
        )
    if case.has(_STATISTICS_AFTER_ABORTS) is False:
        yield (
            "Before that send it one request: releases before 0.10.2 may show old numbers after an abort, and if they "
            "fall to 0 nothing was lost."
        )
    if case.connector:
        yield (
            "Look at the other side of the KV transfer: transfers that were aborted or never fetched hold blocks. If "
            "they are held by right for longer, raise detection's kv_block_leak.hold_time for this engine."
        )
    yield "Look in its log for what was aborted or failed when the floor rose. Update vLLM: such bugs were fixed."


def _gpu_memory_leak(case: _Case) -> Iterator[str]:
    when = case.before()
    yield (f"Let it finish its requests and restart it{when or ' at a quiet moment'}: that gives all of it back.")
    if case.number("sleeps"):
        yield "What is left after each sleep adds up: have whatever sends it to sleep restart it every so many times."
    elif case.expandable and case.number("fragments_growth_bytes") is None:
        yield f"To learn which it is, {case.expandable}: if the growth ends, it was fragmentation."
    yield "Look what came with the growth: multimodal requests, new LoRA adapters, sleep and wake-up, longer prompts."
    if not case.pages:
        yield f"To win time, lower {case.less(0.02)} at that restart; the KV pool gets smaller."


def _host_memory_leak(case: _Case) -> Iterator[str]:
    when = case.before()
    yield f"Let it finish its requests and restart it{when or ' at a quiet moment'}, before the kernel kills it."
    left = case.number("left_bytes")
    room = f" ({units.size(left)} are left)" if left is not None else ""
    yield f"To win time, raise the memory limit of its container, or free memory on the host{room}."
    yield "Look which process grows, and report it with py-spy's or memray's view of it; update vLLM."


# --- health ------------------------------------------------------------------------------------------------------


def _metrics_missing(case: _Case) -> Iterator[str]:
    if case.text("page") == "stats_disabled":
        yield "Start it without --disable-log-stats: without statistics its KV pool cannot be watched."
        return
    yield "Look whether its version is newer than oomwatch knows: update oomwatch, and report the version."
    yield "If it runs vLLM's Rust front-end, which does not have all series, go back to the Python one where you can."
    yield "Until then the verdicts that need these series are unknown, not clear."


def _source_stale(case: _Case) -> Iterator[str]:
    if case.facts is not None:
        yield "Look whether its process runs, and read the end of its log."
        if "refused" in case.text("reason"):
            yield "If it runs, look whether it listens at the address that oomwatch asks: nothing does now."
        else:
            yield "If it runs and is only slow to answer, raise its timeout in the configuration."
    else:
        yield "Run nvidia-smi on the node and look for Xid lines in dmesg."
    yield "If all of that is well, read oomwatch's own log."


def _gpu_lost(_case: _Case) -> Iterator[str]:
    yield "Drain the node: its engines on that device are dead or will be."
    yield "Look for Xid lines in dmesg and save the output of nvidia-bug-report.sh."
    yield "Reboot the node. If it happens again, have the card replaced."


def _nvml_stuck(_case: _Case) -> Iterator[str]:
    yield "Look for Xid lines in dmesg, and whether nvidia-smi hangs too; more calls only add processes that hang."
    yield "If engines on that device still answer, let them finish; then drain the node and reboot it."
    yield "What hangs in the driver cannot be killed, and oomwatch goes on reading the other devices."


_TABLE: Mapping[str, Callable[[_Case], Iterator[str]]] = {
    "startup-refused": _startup_refused,
    "startup-oom": _startup_oom,
    "concurrency-low": _concurrency_low,
    "budget-overrun": _budget_overrun,
    "margin-thin": _margin_thin,
    "headroom-low": _headroom_low,
    "kv-exhaustion": _kv_exhaustion,
    "preemption-pressure": _preemption_pressure,
    "admission-stall": _admission_stall,
    "ranks-unbalanced": _ranks_unbalanced,
    "engine-stuck": _engine_stuck,
    "orphan-memory": _orphan_memory,
    "runtime-oom": _runtime_oom,
    "crash-loop": _crash_loop,
    "allocator-fragmentation": _allocator_fragmentation,
    "unaccounted-growth": _unaccounted_growth,
    "kv-tail-waste": _kv_tail_waste,
    "kv-block-leak": _kv_block_leak,
    "gpu-memory-leak": _gpu_memory_leak,
    "host-memory-leak": _host_memory_leak,
    "metrics-missing": _metrics_missing,
    "source-stale": _source_stale,
    "gpu-lost": _gpu_lost,
    "nvml-stuck": _nvml_stuck,
}
