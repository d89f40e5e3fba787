"""The exact engine: vLLM V1's scheduler step by step over a pool that keeps every block apart.

Slow (some ten thousand steps a second) and plain: the standard for the fast engine, and what is compared with a real
vLLM. Events and queues follow the rules listed in :mod:`benchmarks.detection.engine`.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np

from benchmarks.detection.blocks import BlockPool
from benchmarks.detection.engine import DEAD_AFTER, LENGTH_SHARE, STAYS_UP
from benchmarks.detection.spec import (
    ASLEEP,
    COLUMNS,
    COUNTERS,
    DEFERRED,
    DOWN,
    FINISHED_LENGTH,
    FINISHED_STOP,
    GENERATION_TOKENS,
    HANG,
    HELD,
    KV_EXPIRED,
    LENGTH_BOUNDS,
    LOST,
    NEVER,
    OWNED,
    PEAK_RUNNING,
    PEAK_TOKENS,
    PREEMPTIONS,
    PREFIX_HITS,
    PREFIX_QUERIES,
    PROMPT_TOKENS,
    REQUEST_GENERATION,
    REQUEST_PROMPT,
    RESTART,
    RUNNING,
    STALL,
    STARTED,
    STATE,
    STEPS,
    UP,
    USED,
    WAITING,
    EngineSpec,
    Event,
    Floats,
    Holds,
    KvFault,
    Lengths,
    RankSeries,
    Workload,
)


@dataclass(eq=False)
class Request:
    """One request in the engine; ``keys`` name the contents of its full blocks, from the first."""

    id: int
    arrival: float
    prompt: int
    output: int
    leave_after: int
    prefix: int  # -1 for none
    prefix_tokens: int
    admitted: bool = False  # who was once admitted waits without an end
    generated: int = 0
    computed: int = 0
    blocks: list[int] = field(default_factory=list)

    @property
    def known(self) -> int:
        return self.prompt + self.generated

    def key(self, index: int, block_size: int) -> Hashable:
        """What the block of this index holds: the shared prefix, or something of its own."""
        if self.prefix >= 0 and (index + 1) * block_size <= self.prefix_tokens:
            return ("prefix", self.prefix, index)
        return ("request", self.id, index)


class ExactEngine:
    """``step`` schedules and computes one batch; ``row`` holds what the engine pushed last, by COLUMNS."""

    def __init__(
        self, spec: EngineSpec, holds: Holds | None = None, fault: KvFault | None = None, seed: int = 0
    ) -> None:
        self.spec = spec
        self.holds = holds or Holds()
        self.fault = fault or KvFault()
        self._random = random.Random(seed)
        self.pool = BlockPool(spec.blocks + 1)
        self.running: list[Request] = []
        self.waiting: deque[Request] = deque()
        self.deferred: deque[Request] = deque()
        self.lost: list[int] = []
        self._held: deque[tuple[float, list[int]]] = deque()
        self._stuck: deque[tuple[float, list[int]]] = deque()
        self._kept: list[int] = []
        self._one_off = int(self.fault.one_off * spec.blocks)
        self.row = np.zeros(len(COLUMNS))
        self.lengths = np.zeros(2 * (len(LENGTH_BOUNDS) + 1), dtype=np.int32)
        self.first_lost = NEVER
        self.may_admit = True
        self._batch: list[tuple[Request, int]] = []

    def add(self, request: Request) -> None:
        (self.deferred if self.spec.defer_seconds > 0 else self.waiting).append(request)

    def settle(self, now: float) -> None:
        """What happens between two steps: deferred requests become ready, clients lose patience, holds expire."""
        while self.deferred and self.deferred[0].arrival + self.spec.defer_seconds <= now:
            self.waiting.append(self.deferred.popleft())
        patient = [r for r in self.waiting if r.admitted or now - r.arrival <= self.spec.patience]
        self.waiting = deque(patient)
        if self.running or self.waiting or self.deferred or self.spec.polls_holds:
            for queue in (self._held, self._stuck):
                while queue and queue[0][0] <= now:
                    self.pool.give_back(queue.popleft()[1])
                    self.row[KV_EXPIRED] += queue is self._stuck

    def next_expiry(self) -> float:
        return min((queue[0][0] for queue in (self._held, self._stuck) if queue), default=NEVER)

    def step(self, now: float) -> float | None:
        """Schedule and compute one batch. Its duration, None when there is nothing to compute."""
        self.settle(now)
        batch, prefill = self._schedule()
        if not batch:
            if self.waiting or self.deferred or self.spec.polls_holds:
                self.push()
            return None
        seconds = (
            self.spec.step_seconds
            + self.spec.seconds_per_seq * len(batch)
            + self.spec.seconds_per_prefill_token * prefill
        )
        self._batch = batch
        return seconds

    def finish_step(self, now: float) -> None:
        """The batch's tokens come out, the finished leave, statistics are pushed, and clients may disconnect."""
        tokens = sum(new for _, new in self._batch)
        made = 0
        leavers = []
        for request, new in self._batch:
            self._compute(request, new)
            if request.computed < request.known:
                continue
            self.row[PROMPT_TOKENS] += request.prompt if request.generated == 0 else 0
            request.generated += 1
            made += 1
            leaves = 0 <= request.leave_after <= request.output
            if leaves and request.generated >= request.leave_after:
                leavers.append(request)
            elif request.generated >= request.output:
                self._finish(request, now)
        self.row[GENERATION_TOKENS] += made
        self.row[STEPS] += made > 0
        self.row[PEAK_RUNNING] = max(self.row[PEAK_RUNNING], len(self.running))
        self.row[PEAK_TOKENS] = max(self.row[PEAK_TOKENS], tokens)
        self.push()
        for request in leavers:
            self.running.remove(request)
            self._release(request, now, aborted=True)
        if leavers and self.spec.stats_after_abort:
            self.push()
        self._truth()

    def push(self) -> None:
        self.row[USED] = self.pool.usable - self.pool.free
        self.row[RUNNING] = len(self.running)
        self.row[WAITING] = len(self.waiting)
        self.row[DEFERRED] = len(self.deferred)
        self._truth()

    def drop_all(self) -> None:
        """Sleep, or the first half of a restart."""
        for request in self.running:
            self.pool.give_back(request.blocks)
        self.running.clear()
        self.waiting.clear()
        self.deferred.clear()
        self.pool.give_back(self._kept)
        self._kept = []
        self.pool.reset_prefix_cache()

    def restart(self) -> None:
        self.drop_all()
        self.pool = BlockPool(self.spec.blocks + 1)
        self.lost.clear()
        self._held.clear()
        self._stuck.clear()
        self.row[COUNTERS] = 0
        self.lengths[:] = 0
        self.push()

    # --- the scheduler ---------------------------------------------------------------------------------------------

    def _schedule(self) -> tuple[list[tuple[Request, int]], int]:
        budget = self.spec.max_batched_tokens
        batch: list[tuple[Request, int]] = []
        prefill = 0
        preempting = False
        index = 0
        while index < len(self.running):
            request = self.running[index]
            missing = request.known - request.computed
            new = min(missing, budget)
            need = self._missing_blocks(request, request.computed + new)
            while not self._room(need):
                preempting = True
                victim = self.running.pop()
                self._preempt(victim)
                if victim is request:
                    break
            if index >= len(self.running):
                break
            request.blocks += self.pool.take(need)
            budget -= new
            prefill += new if missing > 1 else 0
            if new:
                batch.append((request, new))
            index += 1
        while (
            not preempting
            and self.may_admit
            and budget > 0
            and self.waiting
            and len(self.running) < self.spec.max_num_seqs
        ):
            admitted = self._admit(self.waiting[0], budget)
            if admitted is None:
                break
            request, missing, new = admitted
            budget -= new
            prefill += new if missing > 1 else 0
            batch.append((request, new))
        return batch, prefill

    def _admit(self, request: Request, budget: int) -> tuple[Request, int, int] | None:
        size = self.spec.block_size
        full = (request.known - 1) // size  # a prompt that is cached whole computes its last block again
        hits = self.pool.cached_prefix([request.key(i, size) for i in range(full)])
        missing = request.known - len(hits) * size
        new = min(missing, budget)
        to_take = -(-(len(hits) * size + new) // size) - len(hits)
        whole = -(-request.known // size) - len(hits)
        need = (whole if self.spec.reserve_full_prompt else to_take) + self.pool.unreferenced(hits)
        if self.running:
            need += int(self.spec.watermark * self.spec.blocks)
        if not self._room(need):
            return None
        self.pool.touch(hits)
        request.blocks = hits + self.pool.take(to_take)
        request.computed = len(hits) * size
        self.waiting.popleft()
        self.running.append(request)
        if not request.admitted:
            request.admitted = True
            self.row[STARTED] += 1
            self.row[PREFIX_QUERIES] += request.known
            self.row[PREFIX_HITS] += request.computed
        return request, missing, new

    def _missing_blocks(self, request: Request, tokens: int) -> int:
        return max(0, -(-tokens // self.spec.block_size) - len(request.blocks))

    def _room(self, need: int) -> bool:
        if self.pool.free < need and self._kept:
            self.pool.give_back(self._kept)
            self._kept = []
        return self.pool.free >= need

    def _preempt(self, victim: Request) -> None:
        self.pool.give_back(victim.blocks)
        victim.blocks = []
        victim.computed = 0
        self.waiting.appendleft(victim)
        self.row[PREEMPTIONS] += 1

    def _compute(self, request: Request, new: int) -> None:
        size = self.spec.block_size
        before = request.computed // size
        request.computed += new
        for index in range(before, request.computed // size):
            self.pool.remember(request.blocks[index], request.key(index, size))

    # --- the end of a request ----------------------------------------------------------------------------------------

    def _finish(self, request: Request, now: float) -> None:
        self.running.remove(request)
        self._release(request, now, aborted=False)
        self.row[FINISHED_LENGTH if self._random.random() < LENGTH_SHARE else FINISHED_STOP] += 1
        self.row[REQUEST_PROMPT] += request.prompt
        self.row[REQUEST_GENERATION] += request.output
        self.lengths[np.searchsorted(LENGTH_BOUNDS, request.prompt)] += 1
        self.lengths[len(LENGTH_BOUNDS) + 1 + np.searchsorted(LENGTH_BOUNDS, request.output)] += 1

    def _release(self, request: Request, now: float, aborted: bool) -> None:
        shared = request.prefix_tokens // self.spec.block_size if request.prefix >= 0 else 0
        own = request.blocks[shared:]
        self.pool.give_back(request.blocks[:shared])
        lost = self._lost_of(len(own), now, aborted)
        if lost:
            self.first_lost = min(self.first_lost, now)
            self.lost += own[len(own) - lost :]
            own = own[: len(own) - lost]
        if not aborted and self.holds.share > 0 and self._random.random() < self.holds.share:
            if now >= self.fault.onset and self._random.random() < self.fault.hold_probability:
                self.first_lost = min(self.first_lost, now)
                self.lost += own
                return
            stuck = self._random.random() < self.holds.stuck_share
            queue, seconds = (self._stuck, self.holds.timeout) if stuck else (self._held, self.holds.seconds)
            queue.append((now + seconds, own))
            return
        if not aborted and self.holds.kept_share > 0 and self._random.random() < self.holds.kept_share:
            kept = min(len(own), int(self.holds.kept_cap * self.spec.blocks) - len(self._kept))
            self._kept += own[:kept]
            own = own[kept:]
        self.pool.give_back(own)

    def _lost_of(self, own: int, now: float, aborted: bool) -> int:
        fault = self.fault
        if now < fault.onset:
            return 0
        lost = 0
        if aborted and fault.abort_blocks > 0 and self._random.random() < fault.abort_probability:
            lost = min(own, fault.abort_blocks)
        elif not aborted and fault.finish_probability > 0 and self._random.random() < fault.finish_probability:
            lost = own
        if self._one_off > 0:
            lost = min(own, self._one_off)
            self._one_off -= lost
        return lost

    def _truth(self) -> None:
        held = sum(len(blocks) for queue in (self._held, self._stuck) for _, blocks in queue) + len(self._kept)
        self.row[LOST], self.row[HELD] = len(self.lost), held
        self.row[OWNED] = self.pool.usable - self.pool.free - len(self.lost) - held


def simulate_exactly(
    spec: EngineSpec,
    workload: Workload,
    sample_times: Floats,
    *,
    holds: Holds | None = None,
    fault: KvFault | None = None,
    events: Sequence[Event] = (),
    seed: int = 0,
) -> RankSeries:
    """The same as :func:`benchmarks.detection.engine.simulate`, step by step."""
    return _Run(ExactEngine(spec, holds, fault, seed), workload, sample_times, sorted(events)).go()


class _Run:
    """The clock around an engine: arrivals, events and samples."""

    def __init__(self, engine: ExactEngine, workload: Workload, sample_times: Floats, events: list[Event]) -> None:
        self._engine = engine
        self._arrivals = deque(_requests(workload))
        self._t = sample_times
        self._events = deque(events)
        self._rows: list[Floats] = []
        self._lengths: list[Lengths] = []
        self._now = 0.0
        self._hang_until = self._stalled_until = -1.0
        self._hung = self._dead = self._dead_since = NEVER

    def go(self) -> RankSeries:
        engine = self._engine
        while len(self._rows) < len(self._t) and self._now <= self._dead + STAYS_UP:
            if self._events and self._events[0].begin <= self._now:
                self._happen(self._events.popleft())
            elif engine.running and self._now < self._hang_until:
                self._hung = min(self._hung, self._now)
                self._sample(self._hang_until)
                self._now = self._hang_until
            else:
                self._turn()
        n = len(self._rows)
        table, lengths = np.array(self._rows), np.array(self._lengths)
        return RankSeries(self._t[:n], table, lengths, engine.first_lost, self._dead, self._hung)

    def _turn(self) -> None:
        engine = self._engine
        engine.may_admit = self._now >= self._stalled_until
        while self._arrivals and self._arrivals[0].arrival <= self._now:
            engine.add(self._arrivals.popleft())
        seconds = engine.step(self._now)
        if seconds is not None:
            self._dead_since = NEVER
            self._now += seconds
            self._sample(self._now, before=True)
            engine.finish_step(self._now)
            return
        self._dead_since = min(self._dead_since, self._now) if engine.waiting and engine.may_admit else NEVER
        if self._now - self._dead_since >= DEAD_AFTER:
            self._dead = min(self._dead, self._dead_since + DEAD_AFTER)
        until = min(self._limit(), self._next_change())
        self._sample(until)
        self._now = max(self._now, until)

    def _limit(self) -> float:
        return min(float(self._t[len(self._rows)]), self._events[0].begin if self._events else NEVER)

    def _next_change(self) -> float:
        engine = self._engine
        changes = [self._arrivals[0].arrival if self._arrivals else NEVER]
        if engine.deferred:
            changes.append(engine.deferred[0].arrival + engine.spec.defer_seconds)
        changes += [r.arrival + engine.spec.patience + 1e-3 for r in engine.waiting if not r.admitted][:1]
        if engine.waiting or engine.spec.polls_holds:
            changes.append(engine.next_expiry())
        return max(self._now, min(changes))

    def _happen(self, event: Event) -> None:
        engine = self._engine
        if event.kind == STALL:
            self._stalled_until = event.end
            return
        if event.kind == HANG:
            self._hang_until = event.end
            return
        if event.kind == RESTART:
            engine.restart()
            self._hang_until = self._stalled_until = -1.0
        else:
            engine.drop_all()
            engine.push()
        engine.row[STATE] = DOWN if event.kind == RESTART else ASLEEP
        self._sample(event.end)
        engine.row[STATE] = UP
        while self._arrivals and self._arrivals[0].arrival <= event.end:
            self._arrivals.popleft()
        self._now = max(self._now, event.end)

    def _sample(self, until: float, before: bool = False) -> None:
        """What scrapes up to ``until`` see; ``before`` leaves out one at that very moment."""
        while len(self._rows) < len(self._t):
            t = self._t[len(self._rows)]
            if t > until or (before and t == until):
                return
            self._rows.append(self._engine.row.copy())
            self._lengths.append(self._engine.lengths.copy())
            self._engine.row[PEAK_RUNNING] = self._engine.row[PEAK_TOKENS] = 0


def _requests(workload: Workload) -> list[Request]:
    return [
        Request(
            id=i,
            arrival=float(workload.arrival[i]),
            prompt=int(workload.prompt[i]),
            output=int(workload.output[i]),
            leave_after=int(workload.leave_after[i]),
            prefix=int(workload.group[i]),
            prefix_tokens=int(workload.group_tokens[workload.group[i]]) if workload.group[i] >= 0 else 0,
        )
        for i in range(len(workload))
    ]
