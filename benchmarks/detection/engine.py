"""The fast engine: vLLM V1's scheduler with counted blocks, jumping over steps in which nothing happens.

The rules are those of :mod:`benchmarks.detection.exact`, which keeps every block apart and makes every step; a test
holds them together. What is coarser here: blocks have no identity, so that of the prefix cache only shared prefixes
are known, and whether one is still cached follows from how many blocks were taken since it was left.

Rules (vllm/v1/core/sched/scheduler.py, kv_cache_manager.py, block_pool.py of 0.33): running requests are served first,
in order of admission; whoever finds no block preempts the last admitted, which is computed anew; nothing is admitted in
a step that preempted; a prompt is computed in chunks within the token budget; a finished request's blocks are free at
once even when still cached; statistics are pushed at the end of a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np

from benchmarks.detection.jit import jit
from benchmarks.detection.spec import (
    ASLEEP,
    COUNTERS,
    DEFERRED,
    DOWN,
    FINISHED_LENGTH,
    FINISHED_STOP,
    GENERATION_TOKENS,
    HANG,
    HEAD_AGE,
    HELD,
    KV_EXPIRED,
    LENGTH_BOUNDS,
    LOST,
    OWNED,
    PEAK_RUNNING,
    PEAK_TOKENS,
    POOL_LIMITED,
    PREEMPTIONS,
    PREFIX_HITS,
    PREFIX_QUERIES,
    PROMPT_TOKENS,
    REQUEST_GENERATION,
    REQUEST_PROMPT,
    RESTART,
    RUNNING,
    SLEEP,
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
    Ints,
    KvFault,
    Lengths,
    RankSeries,
    Words,
    Workload,
)

DEAD_AFTER = 120.0  # nothing runs, something waits, nothing fits: the engine is as good as dead
STAYS_UP = 1800.0  # how long a dead engine is watched before the run ends
LENGTH_SHARE = 0.1  # of finished requests that end by their length limit

T = TypeVar("T", EngineSpec, Holds, KvFault)

# The engine's scalars: whole numbers in one array, so that small functions can share them.
_FREE, _LOST, _HELD, _KEPT, _TAKEN, _ONE_OFF, _N = range(7)
# Queues of held blocks: transfers, and those whose reader never comes.
_TRANSFER, _STUCK = range(2)
_QUEUE = 1 << 16


def simulate(
    engine: EngineSpec,
    workload: Workload,
    sample_times: Floats,
    *,
    holds: Holds | None = None,
    fault: KvFault | None = None,
    events: Sequence[Event] = (),
    seed: int = 0,
) -> RankSeries:
    """Run until the last sample, or until half an hour after the engine died of lost blocks."""
    ordered = sorted(events)
    engine, holds, fault = _typed(engine), _typed(holds or Holds()), _typed(fault or KvFault())
    table, lengths, marks, rows = _run(
        engine,
        holds,
        fault,
        np.array([event.begin for event in ordered], dtype=np.float64),
        np.array([event.end for event in ordered], dtype=np.float64),
        np.array([event.kind for event in ordered], dtype=np.int64),
        workload.arrival,
        workload.prompt,
        workload.output,
        workload.leave_after,
        workload.group,
        workload.group_tokens if len(workload.group_tokens) else np.zeros(1, dtype=np.int64),
        sample_times,
        LENGTH_BOUNDS,
        seed,
    )
    return RankSeries(
        sample_times[:rows], table[:rows], lengths[:rows], float(marks[0]), float(marks[1]), float(marks[2])
    )


def _typed(parameters: T) -> T:
    """The same with each field's own type: to numba, 1 in place of 1.0 is another program to compile."""
    defaults = type(parameters)._field_defaults
    return parameters._replace(**{name: type(defaults[name])(getattr(parameters, name)) for name in defaults})


@jit
def _random(state: Words) -> float:
    """Uniform in [0, 1): xorshift64*, so that a seed means the same with every numba version."""
    x = state[0]
    x ^= x >> np.uint64(12)
    x ^= x << np.uint64(25)
    x ^= x >> np.uint64(27)
    state[0] = x
    return float((x * np.uint64(2685821657736338717)) >> np.uint64(11)) / 9007199254740992.0


@jit
def _blocks_for(tokens: int, block_size: int) -> int:
    return (tokens + block_size - 1) // block_size


@jit
def _take(pool: Ints, blocks: int) -> None:
    pool[_FREE] -= blocks
    pool[_TAKEN] += blocks


@jit
def _make_room(pool: Ints, need: int) -> bool:
    """Whether ``need`` blocks are free; a store connector gives back what it kept when they are not."""
    if pool[_FREE] < need and pool[_KEPT] > 0:
        pool[_FREE] += pool[_KEPT]
        pool[_KEPT] = 0
    return bool(pool[_FREE] >= need)


@jit
def _lose(pool: Ints, marks: Floats, now: float, blocks: int) -> None:
    pool[_LOST] += blocks
    if blocks > 0 and marks[0] == np.inf:
        marks[0] = now


@jit
def _leave_prefix(pool: Ints, group: int, group_blocks: Ints, refs: Ints, taken_at: Ints, ahead: Ints) -> None:
    """A request that began with a shared prefix ends: the last one frees it, and it stays cached until evicted."""
    refs[group] -= 1
    if refs[group] == 0:
        ahead[group] = pool[_FREE]
        taken_at[group] = pool[_TAKEN]
        pool[_FREE] += group_blocks[group]


@jit
def _give_back(
    pool: Ints,
    marks: Floats,
    now: float,
    blocks: int,
    aborted: bool,
    engine: EngineSpec,
    holds: Holds,
    fault: KvFault,
    rng: Words,
    expiry: Floats,
    amount: Ints,
    ends: Ints,
) -> None:
    """A request's own blocks, when it ends: freed, held by a connector, or lost."""
    if now >= fault.onset:
        lost = 0
        if aborted:
            if fault.abort_blocks > 0 and _random(rng) < fault.abort_probability:
                lost = min(blocks, fault.abort_blocks)
        elif fault.finish_probability > 0 and _random(rng) < fault.finish_probability:
            lost = blocks
        if pool[_ONE_OFF] > 0:
            lost = min(blocks, pool[_ONE_OFF])
            pool[_ONE_OFF] -= lost
        _lose(pool, marks, now, lost)
        blocks -= lost
    if not aborted and holds.share > 0 and _random(rng) < holds.share:
        if now >= fault.onset and _random(rng) < fault.hold_probability:
            _lose(pool, marks, now, blocks)
            return
        which = _STUCK if _random(rng) < holds.stuck_share else _TRANSFER
        at = ends[which, 1] % _QUEUE
        if ends[which, 1] - ends[which, 0] < _QUEUE:
            expiry[which, at] = now + (holds.timeout if which == _STUCK else holds.seconds)
            amount[which, at] = blocks
            ends[which, 1] += 1
            pool[_HELD] += blocks
            return
    if not aborted and holds.kept_share > 0 and _random(rng) < holds.kept_share:
        kept = min(blocks, int(holds.kept_cap * engine.blocks) - pool[_KEPT])
        if kept > 0:
            pool[_KEPT] += kept
            blocks -= kept
    pool[_FREE] += blocks


@jit
def _expire_holds(pool: Ints, row: Floats, now: float, expiry: Floats, amount: Ints, ends: Ints) -> None:
    for which in range(2):
        while ends[which, 0] < ends[which, 1] and expiry[which, ends[which, 0] % _QUEUE] <= now:
            blocks = amount[which, ends[which, 0] % _QUEUE]
            pool[_HELD] -= blocks
            pool[_FREE] += blocks
            ends[which, 0] += 1
            if which == _STUCK:
                row[KV_EXPIRED] += 1


@jit
def _next_expiry(expiry: Floats, ends: Ints) -> float:
    first = np.inf
    for which in range(2):
        if ends[which, 0] < ends[which, 1]:
            first = min(first, expiry[which, ends[which, 0] % _QUEUE])
    return first


@jit
def _run(
    engine: EngineSpec,
    holds: Holds,
    fault: KvFault,
    event_begin: Floats,
    event_end: Floats,
    event_kind: Ints,
    arrival: Floats,
    prompt: Ints,
    output: Ints,
    leave_after: Ints,
    group: Ints,
    group_tokens: Ints,
    sample_t: Floats,
    bounds: Floats,
    seed: int,
) -> tuple[Floats, Lengths, Floats, int]:
    n_samples, n_requests, n_events = len(sample_t), len(arrival), len(event_begin)
    n_bounds = len(bounds) + 1
    table = np.zeros((n_samples, STATE + 1))
    lengths = np.zeros((n_samples, 2 * n_bounds), dtype=np.int32)
    histogram = np.zeros(2 * n_bounds, dtype=np.int32)
    row = np.zeros(STATE + 1)  # what a scrape would show now
    marks = np.full(3, np.inf)
    pool = np.zeros(_N, dtype=np.int64)
    pool[_FREE] = engine.blocks
    pool[_ONE_OFF] = int(fault.one_off * engine.blocks)
    rng = np.empty(1, dtype=np.uint64)
    rng[0] = np.uint64(seed) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(0x632BE59BD9B4E019)
    for _ in range(8):
        _random(rng)
    expiry = np.zeros((2, _QUEUE))
    amount = np.zeros((2, _QUEUE), dtype=np.int64)
    ends = np.zeros((2, 2), dtype=np.int64)
    group_blocks = group_tokens // engine.block_size
    refs = np.zeros(len(group_tokens), dtype=np.int64)
    taken_at = np.full(len(group_tokens), -1, dtype=np.int64)
    ahead = np.zeros(len(group_tokens), dtype=np.int64)
    # Running requests in order of admission.
    req = np.zeros(engine.max_num_seqs, dtype=np.int64)
    computed = np.zeros(engine.max_num_seqs, dtype=np.int64)
    known = np.zeros(engine.max_num_seqs, dtype=np.int64)  # tokens of prompt and output so far
    own = np.zeros(engine.max_num_seqs, dtype=np.int64)  # blocks not shared with others
    shared = np.zeros(engine.max_num_seqs, dtype=np.int64)
    left = np.zeros(engine.max_num_seqs, dtype=np.int64)  # tokens until it ends, by itself or by its client
    new = np.zeros(engine.max_num_seqs, dtype=np.int64)
    running = 0
    # Waiting: those preempted, the last one first, then arrivals first to ready - 1; arrived ones may not be ready yet.
    preempted = np.zeros(engine.max_num_seqs + 1, dtype=np.int64)
    n_preempted = 0
    preempted_left = np.zeros(engine.max_num_seqs + 1, dtype=np.int64)
    preempted_known = np.zeros(engine.max_num_seqs + 1, dtype=np.int64)
    first, ready, arrived = 0, 0, 0

    now = 0.0
    next_sample, next_event = 0, 0
    stalled_until, hang_until = -1.0, -1.0
    watermark = int(engine.watermark * engine.blocks)
    dead_since = np.inf
    end = sample_t[n_samples - 1]
    block_size = engine.block_size

    while next_sample < n_samples and now <= end:
        # --- what the operator or a fault does
        if next_event < n_events and event_begin[next_event] <= now:
            kind, until = event_kind[next_event], event_end[next_event]
            next_event += 1
            if kind == STALL:
                stalled_until = until
            elif kind == HANG:
                hang_until = until
            elif kind in (RESTART, SLEEP):
                for j in range(running):
                    pool[_FREE] += own[j]
                    if group[req[j]] >= 0:
                        _leave_prefix(pool, group[req[j]], group_blocks, refs, taken_at, ahead)
                running, n_preempted = 0, 0
                taken_at[:] = -1
                pool[_FREE] += pool[_KEPT]
                pool[_KEPT] = 0
                if kind == RESTART:
                    pool[_FREE] += pool[_LOST] + pool[_HELD]
                    pool[_LOST], pool[_HELD] = 0, 0
                    ends[:, :] = 0
                    row[COUNTERS] = 0
                    row[USED], row[RUNNING], row[WAITING], row[DEFERRED] = 0, 0, 0, 0
                    histogram[:] = 0
                    hang_until, stalled_until = -1.0, -1.0
                row[LOST], row[HELD], row[OWNED] = pool[_LOST], pool[_HELD], 0
                row[HEAD_AGE], row[POOL_LIMITED], row[PEAK_RUNNING], row[PEAK_TOKENS] = 0, 0, 0, 0
                row[STATE] = DOWN if kind == RESTART else ASLEEP
                while next_sample < n_samples and sample_t[next_sample] <= until:
                    table[next_sample] = row
                    lengths[next_sample] = histogram
                    next_sample += 1
                row[STATE] = UP
                while arrived < n_requests and arrival[arrived] <= until:
                    arrived += 1
                first, ready = arrived, arrived
                dead_since = np.inf
                now = max(now, until)
            continue

        if hang_until > now and running > 0:
            # No step any more: every gauge and counter stays, and nobody sees who comes.
            if marks[2] == np.inf:
                marks[2] = now
            while next_sample < n_samples and sample_t[next_sample] <= hang_until:
                row[HEAD_AGE] = sample_t[next_sample] - now
                table[next_sample] = row
                lengths[next_sample] = histogram
                next_sample += 1
            now = hang_until
            continue

        limit = sample_t[next_sample]
        if next_event < n_events:
            limit = min(limit, event_begin[next_event])

        # --- who comes and who has gone
        while arrived < n_requests and arrival[arrived] <= now:
            arrived += 1
        while ready < arrived and arrival[ready] + engine.defer_seconds <= now:
            ready += 1
        while first < ready and now - arrival[first] > engine.patience:
            first += 1
        if running + n_preempted + (arrived - first) > 0 or engine.polls_holds:
            _expire_holds(pool, row, now, expiry, amount, ends)
        waiting = n_preempted + ready - first
        next_arrival = np.inf
        if arrived < n_requests:
            next_arrival = arrival[arrived]
        next_ready = np.inf
        if ready < arrived:
            next_ready = arrival[ready] + engine.defer_seconds

        # --- can the first of the queue be admitted?
        blocked = False
        may_admit = waiting > 0 and running < engine.max_num_seqs and now >= stalled_until
        if may_admit:
            head = preempted[n_preempted - 1] if n_preempted > 0 else first
            tokens = preempted_known[n_preempted - 1] if n_preempted > 0 else prompt[first]
            head_shared = 0
            need = 0
            if group[head] >= 0:
                head_shared = group_blocks[group[head]]
                if refs[group[head]] == 0:
                    need = head_shared
            if not engine.reserve_full_prompt:
                tokens = min(tokens, head_shared * block_size + engine.max_batched_tokens)
            need += max(0, _blocks_for(tokens, block_size) - head_shared)
            if running > 0:
                need += watermark
            blocked = not _make_room(pool, need)
            may_admit = not blocked

        decoding = running > 0 and running <= engine.max_batched_tokens
        steps = 1 << 40
        for j in range(running):
            if known[j] - computed[j] != 1:
                decoding = False
                break
            steps = min(steps, left[j])

        row[POOL_LIMITED] = 1.0 if blocked else 0.0
        row[HEAD_AGE] = now - arrival[first] if first < ready else 0.0
        if running == 0 and not may_admit:
            # --- nothing to compute
            if blocked:
                dead_since = min(dead_since, now)
                if now - dead_since >= DEAD_AFTER and marks[1] == np.inf:
                    marks[1] = dead_since + DEAD_AFTER
                if now > marks[1] + STAYS_UP:
                    break
            until = min(limit, next_arrival, next_ready)
            if waiting > 0 or engine.polls_holds:
                until = min(until, _next_expiry(expiry, ends))
            if first < ready:
                until = min(until, max(now, arrival[first] + engine.patience) + 1e-3)
            if arrived > first or n_preempted > 0 or (engine.polls_holds and row[USED] > 0):
                row[USED] = engine.blocks - pool[_FREE]
                row[RUNNING], row[WAITING], row[DEFERRED] = 0, waiting, arrived - ready
            row[LOST], row[HELD], row[OWNED] = pool[_LOST], pool[_HELD] + pool[_KEPT], 0
            while next_sample < n_samples and sample_t[next_sample] <= until:
                table[next_sample] = row
                lengths[next_sample] = histogram
                next_sample += 1
                row[PEAK_RUNNING], row[PEAK_TOKENS] = 0, 0
            now = max(until, now)
            continue
        dead_since = np.inf

        step_tokens, seconds = 0, 0.0
        if decoding and not may_admit:
            # --- every running request makes a token a step, and nothing else happens
            seconds = engine.step_seconds + engine.seconds_per_seq * running
            soonest = np.inf
            if now < stalled_until:
                soonest = min(soonest, stalled_until)
            if waiting == 0:
                soonest = min(soonest, next_arrival, next_ready)
            else:
                soonest = min(soonest, _next_expiry(expiry, ends))
            # Past what comes, but not past a sample: a scrape sees what the last step before it pushed.
            steps = min(steps, int((soonest - now) / seconds) + 1, int((limit - now) / seconds))
            steps = max(1, steps)
            while True:
                need = 0
                for j in range(running):
                    new[j] = max(0, _blocks_for(computed[j] + steps, block_size) - shared[j]) - own[j]
                    need += new[j]
                if _make_room(pool, need):
                    break
                steps //= 2
                if steps == 0:
                    break
            if steps > 0:
                for j in range(running):
                    own[j] += new[j]
                    computed[j] += steps
                _take(pool, need)
                step_tokens = running
                seconds *= steps
        else:
            steps = 0
        if steps == 0:
            # --- one step as the scheduler makes it
            steps = 1
            budget = engine.max_batched_tokens
            preempting = False
            prefill = 0
            j = 0
            while j < running:
                new[j] = min(known[j] - computed[j], budget)
                need = max(0, _blocks_for(computed[j] + new[j], block_size) - shared[j]) - own[j]
                while not _make_room(pool, need):
                    preempting = True
                    running -= 1
                    pool[_FREE] += own[running]
                    if group[req[running]] >= 0:
                        _leave_prefix(pool, group[req[running]], group_blocks, refs, taken_at, ahead)
                    row[PREEMPTIONS] += 1
                    preempted[n_preempted] = req[running]
                    preempted_left[n_preempted] = left[running]
                    preempted_known[n_preempted] = known[running]
                    n_preempted += 1
                    if running == j:
                        break
                if running == j:
                    break
                _take(pool, need)
                own[j] += need
                budget -= new[j]
                if known[j] - computed[j] > 1:
                    prefill += new[j]
                j += 1
            while (
                not preempting
                and now >= stalled_until
                and budget > 0
                and running < engine.max_num_seqs
                and n_preempted + ready - first > 0
            ):
                again = n_preempted > 0
                head = preempted[n_preempted - 1] if again else first
                tokens = preempted_known[n_preempted - 1] if again else prompt[head]
                prefix = group[head]
                head_shared, hit, prefix_need = 0, 0, 0
                if prefix >= 0:
                    head_shared = group_blocks[prefix]
                    cached = taken_at[prefix] >= 0 and pool[_TAKEN] - taken_at[prefix] <= ahead[prefix]
                    if refs[prefix] > 0 or cached:
                        hit = min(head_shared * block_size, tokens - 1)
                    if refs[prefix] == 0:
                        prefix_need = head_shared
                chunk = min(tokens - hit, budget)
                own_need = max(0, _blocks_for(hit + chunk, block_size) - head_shared)
                whole_need = max(0, _blocks_for(tokens, block_size) - head_shared)
                need = prefix_need + (whole_need if engine.reserve_full_prompt else own_need)
                if running > 0:
                    need += watermark
                if not _make_room(pool, need):
                    blocked = True
                    break
                _take(pool, prefix_need + own_need)
                if prefix >= 0:
                    refs[prefix] += 1
                if again:
                    n_preempted -= 1
                    left[running] = preempted_left[n_preempted]
                else:
                    first += 1
                    gone = leave_after[head]
                    left[running] = output[head] if gone < 0 or gone > output[head] else gone
                    row[STARTED] += 1
                    row[PREFIX_QUERIES] += tokens
                    row[PREFIX_HITS] += hit
                req[running] = head
                computed[running] = hit
                known[running] = tokens
                shared[running] = head_shared
                own[running] = own_need
                new[running] = chunk
                budget -= chunk
                if tokens - hit > 1:
                    prefill += chunk
                running += 1
            seconds = (
                engine.step_seconds + engine.seconds_per_seq * running + engine.seconds_per_prefill_token * prefill
            )
            for j in range(running):
                computed[j] += new[j]
            step_tokens = engine.max_batched_tokens - budget
            row[POOL_LIMITED] = 1.0 if blocked or preempting else 0.0

        # --- the step ends: until now a scrape saw what the one before had pushed
        now += seconds
        while next_sample < n_samples and sample_t[next_sample] < now:
            table[next_sample] = row
            lengths[next_sample] = histogram
            next_sample += 1
            row[PEAK_RUNNING], row[PEAK_TOKENS] = 0, 0
        made, kept, leavers = 0, 0, 0
        for j in range(running):
            if computed[j] == known[j] + steps - 1:
                request = req[j]
                if known[j] == prompt[request]:
                    row[PROMPT_TOKENS] += prompt[request]
                known[j] += steps
                left[j] -= steps
                made += steps
                if left[j] <= 0:
                    stays = leave_after[request] < 0 or leave_after[request] > output[request]
                    if stays:
                        if group[request] >= 0:
                            _leave_prefix(pool, group[request], group_blocks, refs, taken_at, ahead)
                        _give_back(pool, marks, now, own[j], False, engine, holds, fault, rng, expiry, amount, ends)
                        row[FINISHED_LENGTH if _random(rng) < LENGTH_SHARE else FINISHED_STOP] += 1
                        row[REQUEST_PROMPT] += prompt[request]
                        row[REQUEST_GENERATION] += output[request]
                        histogram[np.searchsorted(bounds, prompt[request])] += 1
                        histogram[n_bounds + np.searchsorted(bounds, output[request])] += 1
                        continue
                    leavers += 1
            if kept != j:
                req[kept], computed[kept], known[kept] = req[j], computed[j], known[j]
                own[kept], shared[kept], left[kept] = own[j], shared[j], left[j]
            kept += 1
        running = kept
        row[GENERATION_TOKENS] += made
        if made > 0:
            row[STEPS] += steps
        row[PEAK_RUNNING] = max(row[PEAK_RUNNING], running)
        row[PEAK_TOKENS] = max(row[PEAK_TOKENS], step_tokens)
        row[USED] = engine.blocks - pool[_FREE]
        row[RUNNING], row[WAITING], row[DEFERRED] = running, n_preempted + ready - first, arrived - ready
        if leavers > 0:
            # --- clients that have read enough disconnect between two steps
            kept = 0
            for j in range(running):
                if left[j] <= 0:
                    if group[req[j]] >= 0:
                        _leave_prefix(pool, group[req[j]], group_blocks, refs, taken_at, ahead)
                    _give_back(pool, marks, now, own[j], True, engine, holds, fault, rng, expiry, amount, ends)
                    continue
                if kept != j:
                    req[kept], computed[kept], known[kept] = req[j], computed[j], known[j]
                    own[kept], shared[kept], left[kept] = own[j], shared[j], left[j]
                kept += 1
            running = kept
            if engine.stats_after_abort:
                row[USED] = engine.blocks - pool[_FREE]
                row[RUNNING] = running
        row[LOST], row[HELD] = pool[_LOST], pool[_HELD] + pool[_KEPT]
        row[OWNED] = engine.blocks - pool[_FREE] - pool[_LOST] - pool[_HELD] - pool[_KEPT]
    return table, lengths, marks, next_sample
