"""Streams of samples for the leak detectors: engines, processes on devices and on the host, seen every few seconds."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from oomwatch.detectors.base import (
    LEVEL,
    AllocatorSample,
    Detector,
    Finding,
    HeldSample,
    HostSample,
    OwnersSample,
    RankSample,
    Sample,
    State,
    Subject,
)
from oomwatch.detectors.leak import (
    GpuMemoryLeak,
    GpuMemoryLeakSettings,
    HostMemoryLeak,
    HostMemoryLeakSettings,
    KvBlockLeak,
    KvBlockLeakSettings,
)
from oomwatch.observations import (
    NOT_EXPOSED,
    Absent,
    AllocatorReport,
    BlockOwners,
    EngineFacts,
    HostProcess,
    Maybe,
    Memory,
    Pool,
    RankReading,
)

MIB = 1 << 20
GIB = 1 << 30
MINUTE = 60.0
HOUR = 3600.0
DAY = 24 * HOUR

FACTS = EngineFacts("llama", max_model_len=8192)


@dataclass
class Rank:
    """An engine's rank as its page shows it; change its fields and read it. 4,096 blocks of 16 tokens."""

    blocks: int = 4096
    facts: EngineFacts = FACTS
    connector: bool = False
    segment: int = 1
    tokens: float = 1000.0
    finished: float = 10.0

    def reading(
        self,
        t: float,
        used: float,
        running: float = 0,
        waiting: float = 0,
        *,
        deferred: float = 0,
        sleep_level: Maybe[str] = NOT_EXPOSED,
    ) -> RankSample:
        """A page with ``used`` blocks in use. Tokens come out while requests run."""
        self.tokens += 100 * running
        self.finished += running
        return RankSample(
            t=t,
            engine="llama",
            reading=RankReading(
                "0",
                usage=used / self.blocks,
                running=running,
                waiting=waiting,
                waiting_capacity=waiting - deferred,
                waiting_deferred=deferred,
                prompt_tokens=self.tokens,
                generation_tokens=self.tokens,
                steps=self.tokens,
                finished={"stop": self.finished},
                sleep_level=sleep_level,
                pool=Pool(blocks=self.blocks, used=round(used), block_size=16, tokens=16 * self.blocks),
            ),
            facts=self.facts,
            segment=self.segment,
            segment_start=0.0,
            since=None,
            ready_since=0.0,
            version=(0, 32, 0),
            kv_connector=self.connector,
        )


def without(sample: RankSample, *names: str) -> RankSample:
    """The same page without some series."""
    absent: dict[str, Maybe[float]] = dict.fromkeys(names, NOT_EXPOSED)
    pool = Pool() if "usage" in names else sample.reading.pool
    return sample._replace(reading=replace(sample.reading, pool=pool, **absent))  # type: ignore[arg-type]  # by name


def kv_detector(**settings: float) -> KvBlockLeak:
    return KvBlockLeak(Subject(engine="llama", rank="0"), KvBlockLeakSettings.model_validate(settings))


def gpu_detector() -> GpuMemoryLeak:
    return GpuMemoryLeak(Subject(engine="llama", gpu="GPU-a", pid=7), GpuMemoryLeakSettings.model_validate({}))


def host_detector() -> HostMemoryLeak:
    return HostMemoryLeak(Subject(engine="llama", pid=7), HostMemoryLeakSettings.model_validate({}))


def held(t: float, used: float, *, total: int = 80 * GIB, segment: int = 1, asleep: bool = False) -> HeldSample:
    """What the driver lists for pid 7; the rest of the device is free."""
    granular = int(used) // (2 * MIB) * 2 * MIB
    return HeldSample(
        t=t,
        gpu="GPU-a",
        pid=7,
        engine="llama",
        used=granular,
        total=total,
        free=total - granular,
        segment=segment,
        asleep=asleep,
    )


def allocator(
    t: float,
    allocated: float,
    reserved: float,
    *,
    peak: float | None = None,
    largest: float | None = None,
    retries: int = 0,
    ooms: int = 0,
    driver_free: float | None = None,
    segment: int = 1,
    asleep: bool = False,
    ready_since: float | None = 0.0,
    **more: Any,
) -> AllocatorSample:
    """What the allocator of pid 7 tells, with ``driver_free`` bytes of the device free."""
    stats = {
        "allocated_bytes.all.current": int(allocated),
        "allocated_bytes.all.peak": int(allocated if peak is None else peak),
        "reserved_bytes.all.current": int(reserved),
        "num_alloc_retries": retries,
        "num_ooms": ooms,
    }
    memory = None if driver_free is None else Memory(80 * GIB, 0, 80 * GIB - int(driver_free), int(driver_free))
    report = AllocatorReport(t, 7, "GPU-a", stats, None if largest is None else int(largest), **more)
    return AllocatorSample(t, "llama", report, memory, segment, segment, 0.0, ready_since, asleep)


def owned(
    t: float, ownerless: int, living: int = 0, finished: int = 0, *, blocks: int = 4096, segment: int = 1, pid: int = 7
) -> OwnersSample:
    """Whose the blocks of rank 0 are."""
    free = blocks - ownerless - living - finished
    return OwnersSample(t, "llama", BlockOwners(t, pid, "0", t, blocks, free, living, finished, ownerless), segment)


def hosted(
    t: float,
    anon: float | Absent,
    *,
    limit: int | None = 32 * GIB,
    available: int | None = None,
    host_total: int | None = None,
    start: float = 0.0,
    loads: int = 0,
) -> HostSample:
    """A reading of pid 7 on the host."""
    process = HostProcess(
        t=t,
        pid=7,
        start=start,
        rss=40 * GIB,
        anon=anon if isinstance(anon, Absent) else int(anon),
        name="VLLM::EngineCore",
        memory_limit=limit,
    )
    return HostSample(t, "llama", process, available, host_total, loads)


@dataclass
class Course:
    """What a detector said over time."""

    findings: list[tuple[float, Finding]]

    @property
    def worst(self) -> State:
        return max((finding.state for _, finding in self.findings), key=lambda state: LEVEL[state])

    @property
    def last(self) -> Finding:
        return self.findings[-1][1]

    def first(self, state: State) -> float:
        """When it was at least ``state``; infinity for never."""
        reached = (t for t, finding in self.findings if LEVEL[finding.state] >= LEVEL[state])
        return next(reached, float("inf"))

    def states(self) -> list[State]:
        """The states in their order, each once until it changes."""
        course: list[State] = []
        for _, finding in self.findings:
            if not course or course[-1] != finding.state:
                course.append(finding.state)
        return course


def watch(
    detector: Detector,
    until: float,
    sample: Callable[[float], Sample],
    *,
    start: float = 0.0,
    every: float = 15.0,
    also: Callable[[float], Sample] | None = None,
) -> Course:
    """Show a detector a sample every so often, and hear what it says."""
    findings = []
    t = start
    while t < until:
        if also is not None:
            detector.observe(also(t))
        detector.observe(sample(t))
        findings.append((t, detector.conclude(t)))
        t += every
    return Course(findings)


def steady_load(seed: int = 1) -> Callable[[float], RankSample]:
    """Requests come and go around the same level all day."""
    dice, rank = random.Random(seed), Rank()
    return lambda t: rank.reading(t, 1000, running=dice.randint(4, 12))


class Traffic:
    """Requests that come and go, day and night, with lengths that vary; blocks that they own, exactly.

    ``quiet`` is how many run at least, ``busy`` how many at most on average, ``mean`` blocks of a request.
    """

    def __init__(self, seed: int, quiet: float, busy: float, mean: float = 40.0) -> None:
        self._dice = random.Random(seed)
        self._quiet, self._busy, self._mean = quiet, busy, mean
        self._sizes: list[float] = []
        self.mood = 1.0

    def step(self, t: float, drift: float = 1.0) -> tuple[int, int]:
        """How many run now, and the blocks that they own."""
        day = 0.5 - 0.5 * abs((t % DAY) / (DAY / 2) - 1) * 2 + 0.5  # a triangle from 0 to 1
        self.mood += 0.05 * (1 - self.mood) + self._dice.gauss(0, 0.08)
        wanted = max(self._quiet, (self._quiet + (self._busy - self._quiet) * day) * max(0.2, self.mood))
        self._sizes = [size for size in self._sizes if self._dice.random() > 0.3]
        while len(self._sizes) < round(wanted):
            self._sizes.append(min(500.0, drift * self._mean * self._dice.lognormvariate(-0.3, 0.8)))
        del self._sizes[round(wanted) :]
        return len(self._sizes), round(sum(self._sizes))
