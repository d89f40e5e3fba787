"""What the processes of an engine hold: device memory as NVML shows it, and the host's, over the samples of a run.

Device memory (``reference`` figures: vLLM's memory profiling of 0.9 to 0.33, PyTorch's caching allocator): context and
NCCL outside the budget, weights, the KV pool and graphs from the start, and the allocator's reserve, which grows when
a new load record is set (batch, running requests, a LoRA adapter) and then stays. NVML answers in steps of 2 MiB.
Host memory: a warm-up that flattens, arenas that follow the load, caches that fill, and noise.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from benchmarks.detection.jit import jit
from benchmarks.detection.spec import (
    ASLEEP,
    DAY,
    DOWN,
    NEVER,
    PEAK_RUNNING,
    PEAK_TOKENS,
    STARTED,
    STATE,
    Bools,
    Floats,
    RankSeries,
)

MIB = 1024.0**2
GIB = 1024.0**3
NVML_STEP = 2 * MIB
SEGMENT = 20 * MIB  # of PyTorch's allocator, for blocks of 1 to 10 MiB
STARTUP = 180.0  # loading weights, profiling, capturing graphs


class GpuSpec(NamedTuple):
    """One device and what its engine holds of it. Bytes."""

    name: str = "NVIDIA H100 80GB HBM3"
    total: float = 80 * GIB
    reserved: float = 0.6 * GIB  # the driver's
    utilization: float = 0.9
    weights: float = 16 * GIB
    overhead: float = 0.5 * GIB  # context, NCCL, graphs outside the budget
    activations: float = 2 * GIB  # of the budget, reserved by the allocator as load comes
    lora_bytes: float = 0.0  # each new adapter
    lora_interval: float = 0.0  # seconds between new adapters, 0 for none
    neighbour: float = 0.0  # a neighbour that comes and goes
    neighbour_interval: float = DAY
    reload_spread: float = 0.0  # how much smaller another start's model may be


class GpuFault(NamedTuple):
    """Growth from ``onset`` on: bytes an hour, bytes a request, or allocator steps of 2 to 20 MiB at random times."""

    onset: float = NEVER
    per_hour: float = 0.0
    per_request: float = 0.0
    steps_per_hour: float = 0.0
    overrun: float = 0.0  # a block outside the budget, at once
    orphan: float = 0.0  # held by a process that is no engine's, at once


class HostSpec(NamedTuple):
    """The engine core's memory. Bytes; rates per request ever started."""

    base: float = 6 * GIB
    limit: float = 64 * GIB  # of the cgroup
    warmup: float = 1.5 * GIB  # reached with warmup_requests
    warmup_requests: float = 5000.0
    arenas: float = 0.3 * GIB  # with a full batch
    cache: float = 0.0  # a multimodal cache that fills and stays
    cache_requests: float = 50000.0
    files: float = 2 * GIB  # mapped files: in RSS, not in anonymous memory
    noise: float = 8 * MIB


class HostFault(NamedTuple):
    onset: float = NEVER
    per_hour: float = 0.0
    per_request: float = 0.0


class GpuSeries(NamedTuple):
    """``process`` is the engine's, 0 while it is down; ``orphan`` and ``neighbour`` are others'."""

    process: Floats
    orphan: Floats
    neighbour: Floats
    first_leak: float  # NEVER when none
    exhausted: float  # nothing free any more, NEVER when not reached


class HostSeries(NamedTuple):
    rss: Floats
    anon: Floats
    first_leak: float
    exhausted: float


def gpu_memory(rank: RankSeries, gpu: GpuSpec, fault: GpuFault, rng: np.random.Generator) -> GpuSeries:
    t, state = rank.t, rank[STATE]
    lives, age = _lives(t, state)
    budget = (gpu.total - gpu.reserved) * gpu.utilization
    smaller = gpu.reload_spread * rng.random(int(lives[-1]) + 1)
    base = budget - gpu.activations + gpu.overhead - smaller[lives.astype(np.int64)]
    reserve = _reserve(rank, lives, age, gpu, rng)
    if gpu.lora_interval:
        # Adapters load into slots that are there from the start; what grows is the first use of a rank's kernels.
        loads = np.minimum(8, (t // gpu.lora_interval).astype(np.int64))
        reserve = reserve + _since_start(loads.astype(np.float64), lives) * gpu.lora_bytes
    leak = _leak(rank, lives, fault.onset, fault.per_hour, fault.per_request)
    leak = leak + _steps(t, lives, fault, rng)
    overrun = np.where(t >= fault.onset, fault.overrun, 0.0)
    process = base + np.minimum(reserve, gpu.activations) + leak + overrun
    process = np.where((age < STARTUP) & (lives > 0), base * np.clip(age / STARTUP, 0.05, 1.0), process)
    asleep = state == ASLEEP
    # Sleep gives back weights and pool; context, graphs and what was allocated outside the pool's tags stay.
    process = np.where(asleep, gpu.overhead + 0.4 * GIB + leak, process)
    process = np.where(state == DOWN, 0.0, process)
    orphan = np.where(t >= fault.onset, fault.orphan, 0.0)
    neighbour = np.zeros_like(t)
    if gpu.neighbour:
        # Jobs of a few minutes to an hour of somebody else's, which leave again.
        phase = t % gpu.neighbour_interval
        neighbour = np.where(phase < 0.04 * gpu.neighbour_interval, gpu.neighbour, 0.0)
    process = np.ceil(process / NVML_STEP) * NVML_STEP
    room = gpu.total - gpu.reserved - process - orphan - neighbour
    return GpuSeries(process, orphan, neighbour, _first(t, leak + overrun + orphan > 0), _first(t, room <= 0))


def host_memory(rank: RankSeries, host: HostSpec, fault: HostFault, rng: np.random.Generator) -> HostSeries:
    t, state = rank.t, rank[STATE]
    lives, _ = _lives(t, state)
    served = _since_start(rank[STARTED], lives)
    warm = host.warmup * (1 - np.exp(-served / host.warmup_requests))
    cache = host.cache * (1 - np.exp(-served / host.cache_requests))
    peak = np.maximum(1.0, rank[PEAK_RUNNING].max())
    arenas = host.arenas * _slowly_down(rank[PEAK_RUNNING] / peak)
    leak = _leak(rank, lives, fault.onset, fault.per_hour, fault.per_request)
    anon = host.base + warm + cache + arenas + leak + rng.normal(0, host.noise, len(t))
    anon = np.where(state == DOWN, 0.0, np.floor(anon / 4096) * 4096)
    rss = np.where(state == DOWN, 0.0, anon + host.files)
    return HostSeries(rss, anon, _first(t, leak > 0), _first(t, anon >= host.limit))


def _lives(t: Floats, state: Floats) -> tuple[Floats, Floats]:
    """Which life of the engine a sample is in, from 0, and how old that life is; the first began long ago."""
    starts = np.flatnonzero((state[1:] != DOWN) & (state[:-1] == DOWN)) + 1
    lives = np.searchsorted(starts, np.arange(len(t)), side="right").astype(np.float64)
    begin = np.concatenate([[-DAY], t[starts]])
    return lives, t - begin[lives.astype(np.int64)]


def _since_start(total: Floats, lives: Floats) -> Floats:
    """A running total, counted from the start of each life."""
    first = np.flatnonzero(np.diff(lives, prepend=-1.0))
    return np.asarray(total - total[first][lives.astype(np.int64)], dtype=np.float64)


def _reserve(rank: RankSeries, lives: Floats, age: Floats, gpu: GpuSpec, rng: np.random.Generator) -> Floats:
    """The allocator's reserve: it follows the records of batch and running requests, in whole segments.

    A new shape of batch costs a segment now and then while the engine is young, however loaded.
    """
    batch, width = rank[PEAK_TOKENS], rank[PEAK_RUNNING]
    result = np.zeros_like(batch)
    most_tokens, most_running = max(1.0, float(batch.max())), max(1.0, float(width.max()))
    for life in np.unique(lives):
        mine = lives == life
        record = 0.7 * np.maximum.accumulate(batch[mine]) / most_tokens
        record = record + 0.3 * np.maximum.accumulate(width[mine]) / most_running
        young = rng.random(int(mine.sum())) < 0.02 * np.exp(-np.maximum(0.0, age[mine]) / 3600)
        result[mine] = np.floor(0.8 * gpu.activations * record / SEGMENT) * SEGMENT + np.cumsum(young) * SEGMENT / 2
    return result


def _leak(rank: RankSeries, lives: Floats, onset: float, per_hour: float, per_request: float) -> Floats:
    """A restart gives everything back."""
    t = rank.t
    if not (t >= onset).any():
        return np.zeros_like(t)
    since = np.maximum(0.0, t - onset)
    served = np.maximum(0.0, rank[STARTED] - rank[STARTED][np.searchsorted(t, onset)])
    return _since_start(since / 3600 * per_hour + served * per_request, lives)


def _steps(t: Floats, lives: Floats, fault: GpuFault, rng: np.random.Generator) -> Floats:
    """Fragmentation: segments that no request fits into any more, 2 to 20 MiB each, at random times."""
    if not fault.steps_per_hour:
        return np.zeros_like(t)
    width = np.diff(t, prepend=t[0])
    count = rng.poisson(np.where(t >= fault.onset, width / 3600 * fault.steps_per_hour, 0.0))
    sizes = count * rng.integers(1, 11, len(t)) * NVML_STEP
    return _since_start(np.cumsum(sizes), lives)


@jit
def _slowly_down(load: Floats) -> Floats:
    """Arenas grow with the load at once and shrink over an hour (about 240 samples)."""
    result: Floats = load.copy()
    keep = float(np.exp(-1 / 240))
    for i in range(1, len(result)):
        result[i] = max(result[i], result[i - 1] * keep)
    return result


def _first(t: Floats, condition: Bools) -> float:
    found = np.flatnonzero(condition)
    return float(t[found[0]]) if len(found) else NEVER
