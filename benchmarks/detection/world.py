"""From a scenario to a run: requests, engines, memory, and the labels that say what is wrong from when to when."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from benchmarks.detection.alarms import firings, merged
from benchmarks.detection.engine import STAYS_UP, simulate
from benchmarks.detection.families import KvLeak, Scenario
from benchmarks.detection.memory import GpuFault, GpuSeries, HostFault, HostSeries, gpu_memory, host_memory
from benchmarks.detection.spec import (
    DAY,
    DOWN,
    FINISHED_LENGTH,
    FINISHED_STOP,
    GENERATION_TOKENS,
    HEAD_AGE,
    LOST,
    NEVER,
    POOL_LIMITED,
    PREEMPTIONS,
    RUNNING,
    STALL,
    STARTED,
    STATE,
    WAITING,
    Bools,
    Floats,
    KvFault,
    RankSeries,
    Workload,
)
from benchmarks.detection.traffic import Traces, workload

HURT_BELOW = 0.75  # of the last hour's throughput
HURT_FOR = 600.0


@dataclass(frozen=True)
class Label:
    """What is wrong with a run. ``rank`` where it is one rank's; ``end`` the OOM, the repair, or the run's end.

    ``onset`` is the first lost block, the first leaked byte, the start of the hurt.
    """

    fault: str
    onset: float
    end: float
    oom: bool
    rank: int | None = None


@dataclass(frozen=True)
class Run:
    """A simulated run: seconds from its start, everything sampled at ``t``. ``scraped`` false: no page came back."""

    scenario: Scenario
    t: Floats
    ranks: tuple[RankSeries, ...]
    gpus: tuple[GpuSeries, ...]
    host: HostSeries
    scraped: Bools
    label: Label | None

    @property
    def gpu_weeks(self) -> float:
        return len(self.ranks) * float(self.t[-1]) / (7 * DAY)


def build(
    scenario: Scenario, traces: Traces, reshaped: Callable[[Workload], Workload] = lambda requests: requests
) -> Run | None:
    """Simulate; None where a fault's scenario came to no harm (the loss never happened, the storm never hurt).

    ``reshaped`` makes other requests of those of each rank.
    """
    rng = np.random.default_rng([scenario.seed, 1])
    t = _sample_times(scenario, rng)
    ranks = []
    for rank in range(scenario.ranks):
        requests = reshaped(workload(scenario.traffic, scenario.engine, scenario.days, traces, rng))
        faulty = rank == 0
        ranks.append(
            simulate(
                scenario.engine,
                requests,
                t,
                holds=scenario.holds,
                fault=_kv_fault(scenario.leak, requests, scenario) if faulty else None,
                events=scenario.events,
                seed=scenario.seed + rank,
            )
        )
    end = min(float(rank.t[-1]) for rank in ranks)
    ranks = [rank.upto(end) for rank in ranks]
    sound = GpuFault()
    gpus = [
        gpu_memory(rank, scenario.gpu, sound if i else _gpu_fault(scenario, rank), rng) for i, rank in enumerate(ranks)
    ]
    host = host_memory(ranks[0], scenario.host, _host_fault(scenario, ranks[0]), rng)
    end = min(end, gpus[0].exhausted, host.exhausted, pool_gone(ranks[0], scenario.engine.blocks) + STAYS_UP)
    ranks = [rank.upto(end) for rank in ranks]
    n = len(ranks[0].t)
    gpus = [GpuSeries(g.process[:n], g.orphan[:n], g.neighbour[:n], g.first_leak, g.exhausted) for g in gpus]
    host = HostSeries(host.rss[:n], host.anon[:n], host.first_leak, host.exhausted)
    label = _label(scenario, ranks[0], gpus[0], host)
    if scenario.fault and label is None:
        return None
    scraped = _scraped(scenario, ranks[0], rng)
    return Run(scenario, ranks[0].t, tuple(ranks), tuple(gpus), host, scraped, label)


def _sample_times(scenario: Scenario, rng: np.random.Generator) -> Floats:
    every = scenario.sampling.interval
    t = np.arange(every, scenario.days * DAY, every)
    return np.asarray(t + np.clip(rng.normal(0, scenario.sampling.jitter, len(t)), -1, 1), dtype=np.float64)


def _scraped(scenario: Scenario, rank: RankSeries, rng: np.random.Generator) -> Bools:
    scraped = (rng.random(len(rank.t)) >= scenario.sampling.lost) & (rank[STATE] != DOWN)
    for begin in rng.uniform(0, rank.t[-1], scenario.sampling.outages):
        scraped &= ~((rank.t >= begin) & (rank.t < begin + rng.uniform(300, 1800)))
    return np.asarray(scraped, dtype=np.bool_)


def _kv_fault(leak: KvLeak, requests: Workload, scenario: Scenario) -> KvFault:
    """Probabilities and sizes by which the pool is gone ``leak.hours`` after the onset, with these requests."""
    if not leak.kind:
        return KvFault()
    if leak.kind == "one-off":
        return KvFault(leak.onset, one_off=leak.share)
    engine = scenario.engine
    inside = (requests.arrival >= leak.onset) & (requests.arrival < leak.onset + leak.hours * 3600)
    leaves = requests.leave_after >= 0
    own = (requests.prompt + np.where(leaves, requests.leave_after, requests.output)) / engine.block_size
    if leak.kind == "abort":
        leavers = own[inside & leaves]
        each = engine.blocks / max(1, len(leavers))
        blocks = max(1, round(leak.blocks * max(1.0, each)))
        return KvFault(leak.onset, abort_blocks=blocks, abort_probability=min(1.0, each / blocks))
    finished = float(own[inside & ~leaves].sum())
    probability = min(1.0, engine.blocks / max(1.0, finished))
    if leak.kind == "hold":
        return KvFault(leak.onset, hold_probability=min(1.0, probability / max(1e-6, scenario.holds.share)))
    return KvFault(leak.onset, finish_probability=probability)


def _gpu_fault(scenario: Scenario, rank: RankSeries) -> GpuFault:
    fault = scenario.gpu_fault
    if not fault.per_request:
        return fault
    served = _served_after(rank, fault.onset)
    hours = max(1.0, (float(rank.t[-1]) - fault.onset) / 3600)
    return fault._replace(per_hour=0.0, per_request=fault.per_hour * hours / max(1.0, served))


def _host_fault(scenario: Scenario, rank: RankSeries) -> HostFault:
    if not scenario.host_hours:
        return HostFault()
    host = scenario.host
    room = host.limit - host.base - host.warmup - host.arenas - host.cache
    per_hour = room / scenario.host_hours
    if not scenario.host_per_request:
        return HostFault(scenario.host_onset, per_hour=per_hour)
    hours = max(1.0, (float(rank.t[-1]) - scenario.host_onset) / 3600)
    return HostFault(
        scenario.host_onset, per_request=per_hour * hours / max(1.0, _served_after(rank, scenario.host_onset))
    )


def _served_after(rank: RankSeries, onset: float) -> float:
    started = rank[STARTED]
    return float(started[-1] - started[min(len(started) - 1, int(np.searchsorted(rank.t, onset)))])


def _label(scenario: Scenario, rank: RankSeries, gpu: GpuSeries, host: HostSeries) -> Label | None:
    last = float(rank.t[-1])
    fault = scenario.fault
    if fault == "kv-leak" and rank.first_lost < last:
        dead = pool_gone(rank, scenario.engine.blocks)
        return Label(fault, rank.first_lost, min(dead, last), dead <= last, 0)
    if fault == "gpu-leak" and gpu.first_leak < last:
        return Label(fault, gpu.first_leak, min(gpu.exhausted, last), gpu.exhausted <= last, 0)
    if fault == "host-leak" and host.first_leak < last:
        return Label(fault, host.first_leak, min(host.exhausted, last), host.exhausted <= last, 0)
    if fault in ("orphan", "overrun"):
        return Label(fault, gpu.first_leak, last, False, 0) if gpu.first_leak < last else None
    if fault == "stuck" and rank.hung < last:
        return Label(fault, rank.hung, min(last, scenario.events[0].end), False, 0)
    if fault == "stall":
        return _stalled(scenario, rank)
    if fault == "exhaustion":
        begin = hurt_from(rank)
        return Label(fault, begin, last, False, 0) if begin < last else None
    return None


def _stalled(scenario: Scenario, rank: RankSeries) -> Label | None:
    stall = next(event for event in scenario.events if event.kind == STALL)
    during = (rank.t >= stall.begin) & (rank.t <= stall.end) & (rank[WAITING] > 0) & (rank[RUNNING] == 0)
    found = np.flatnonzero(during)
    return Label("stall", float(rank.t[found[0]]), stall.end, False, 0) if len(found) else None


def pool_gone(rank: RankSeries, blocks: int) -> float:
    """When a leak left nothing to work with: nothing runs and something waits for 120 s, or nine tenths are lost."""
    gone = np.flatnonzero(rank[LOST] >= 0.9 * blocks)
    return min(rank.dead, float(rank.t[gone[0]]) if len(gone) else NEVER)


def hurt_from(rank: RankSeries) -> float:
    """When a full pool began to hurt, NEVER when it did not: the beginning of the strain that came to it.

    What is seen over ten minutes began ten minutes before; strain excuses an alarm on a healthy run just so.
    """
    found = np.flatnonzero(hurting(rank))
    if not len(found):
        return NEVER
    hurt = float(rank.t[found[0]])
    before = [alarm.start for alarm in merged(firings(strained(rank), rank.t)) if alarm.start <= hurt]
    return max(0.0, before[-1] - HURT_FOR)


def hurting(rank: RankSeries) -> Bools:
    """Whether a full pool hurts, by what only the simulator knows.

    For the last ten minutes the first of the queue does not fit and waits longer than half a minute, and fewer tokens
    come out than three quarters of the best ten minutes of the hour before.
    """
    n = _samples_in(HURT_FOR, rank.t)
    if len(rank.t) < 8 * n:
        return np.zeros(len(rank.t), dtype=np.bool_)
    rate = _increase(rank[GENERATION_TOKENS], n)
    best = np.array([rate[max(0, i - 7 * n) : max(1, i - n)].max() for i in range(0, len(rate), n)])
    starved = _mean((rank[HEAD_AGE] > 30).astype(np.float64), n)
    limited = _mean(rank[POOL_LIMITED], n)
    return (rate < HURT_BELOW * np.repeat(best, n)[: len(rate)]) & (starved > 0.9) & (limited > 0.5)


def strained(rank: RankSeries) -> Bools:
    """Hurting, or more than one preemption for every second finished request over ten minutes.

    Healthy families have such hours too when the simulated load happens to be too much; an alarm about a full pool
    is right there.
    """
    n = _samples_in(HURT_FOR, rank.t)
    finished = _increase(rank[FINISHED_STOP] + rank[FINISHED_LENGTH], n)
    preempted = _increase(rank[PREEMPTIONS], n)
    return hurting(rank) | ((preempted > 0.5 * finished) & (preempted >= 5))


def _samples_in(seconds: float, t: Floats) -> int:
    return max(1, round(seconds / float(np.median(np.diff(t)))))


def _increase(counter: Floats, n: int) -> Floats:
    """Over the last ``n`` samples; 0 across a restart."""
    result = np.zeros(len(counter))
    result[n:] = np.maximum(0.0, counter[n:] - counter[:-n])
    return result


def _mean(values: Floats, n: int) -> Floats:
    total = np.concatenate([[0.0], np.cumsum(values)])
    result = np.zeros(len(values))
    result[n - 1 :] = (total[n:] - total[:-n]) / n
    return result
