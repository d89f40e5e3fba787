"""What a detector is told, and what it answers.

A detector is deterministic: it learns of the world by samples, which carry the observations' time, and reads no clock
and no file. One object stands for one verdict about one subject. Work per sample is O(1).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

from oomwatch.enginelog.story import News, StartUp
from oomwatch.observations import (
    AllocatorReport,
    BlockOwners,
    EngineFacts,
    HostProcess,
    Maybe,
    Memory,
    RankReading,
)
from oomwatch.snapshot import HeldProcess, Holder

State = Literal["unknown", "clear", "info", "ticket", "page"]
STATES: tuple[State, ...] = ("unknown", "clear", "info", "ticket", "page")
LEVEL: Mapping[State, int] = {"unknown": -1, "clear": 0, "info": 1, "ticket": 2, "page": 3}

Evidence = Mapping[str, "float | int | str | list[int] | list[str]"]


@dataclass(frozen=True)
class Subject:
    """What a verdict is about; only the fields that apply are set. ``rank`` is vLLM's engine label."""

    engine: str | None = None
    rank: str | None = None
    gpu: str | None = None
    pid: int | None = None
    host: str | None = None

    def labels(self) -> dict[str, str]:
        """The fields that are set, as text."""
        pairs = (
            ("engine", self.engine),
            ("rank", self.rank),
            ("gpu", self.gpu),
            ("pid", self.pid),
            ("host", self.host),
        )
        return {name: str(value) for name, value in pairs if value is not None}


@dataclass(frozen=True)
class Eta:
    """Seconds until it runs out, with the bounds between which it lies with about 80 % probability."""

    seconds: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Finding:
    """What a detector concludes now.

    ``confidence`` is 0-1: how sure it is that the state is right. ``evidence`` are the numbers that led to it, in base
    units, under stable names. ``summary`` is one sentence with the numbers that matter, for a person on call.
    ``reason`` says why the state is unknown. ``killer`` is set where it differs from the catalogue's, ``verdict`` where
    another of the catalogue stands in the detector's own place. ``gauges`` are the numbers that are exported whatever
    the state, None for those of the evidence; a finding that outlasts its cause keeps the evidence of then and gives
    the gauges of now.
    """

    state: State
    confidence: float = 1.0
    summary: str = ""
    evidence: Evidence = field(default_factory=dict)
    eta: Eta | None = None
    reason: str = ""
    killer: str | None = None
    verdict: str | None = None
    gauges: Mapping[str, float] | None = None

    def present(self) -> Mapping[str, float]:
        """The numbers of now, by the names of the evidence."""
        return numbers(self.evidence) if self.gauges is None else self.gauges


def numbers(evidence: Evidence) -> dict[str, float]:
    """What of the evidence is a number."""
    return {name: float(value) for name, value in evidence.items() if isinstance(value, (int, float))}


def unknown(reason: str, evidence: Evidence | None = None) -> Finding:
    """Not enough data, or a source fell silent; ``reason`` is a short constant phrase."""
    return Finding("unknown", confidence=0.0, reason=reason, evidence=evidence or {})


CLEAR = Finding("clear")


# --- samples ---------------------------------------------------------------------------------------------------


class RankSample(NamedTuple):
    """A fresh reading of one rank of an engine.

    ``segment`` counts the engine's lives: a restart, sleep, wake-up or reload begins a new one at ``segment_start``
    (time of its first sample), and what was learnt of levels before does not hold any more. ``since`` is the time of
    the rank's previous fresh reading, None for the first of a segment. ``ready_since`` is when the engine first
    answered in this life.
    """

    t: float
    engine: str
    reading: RankReading
    facts: EngineFacts
    segment: int
    segment_start: float
    since: float | None
    ready_since: float
    version: tuple[int, ...] | None = None  # of vLLM, as far as known
    kv_connector: bool = False

    @property
    def rank(self) -> str:
        return self.reading.rank

    @property
    def asleep(self) -> bool:
        return self.reading.sleep_level in ("paused", "weights_offloaded", "discard_all")


class EngineSample(NamedTuple):
    """One scrape of an engine, answered or not, with all ranks side by side. ``state`` is of snapshot.ENGINE_STATES."""

    t: float
    engine: str
    state: str
    error: str
    facts: EngineFacts
    ranks: tuple[RankReading, ...]
    segment: int
    segment_start: float
    pids: tuple[int, ...]  # of its processes that live, as far as known


class DeviceSample(NamedTuple):
    """One poll of a device or a MIG slice (``gpu`` is its uuid then).

    ``processes`` is NOT_READ in polls that leave the list out. ``engines`` are those with processes on it now, by the
    latest list. ``unified`` devices share the host's memory. ``facts`` are those of the engines on it.
    """

    t: float
    gpu: str
    memory: Maybe[Memory]
    processes: Maybe[tuple[HeldProcess, ...]]
    engines: tuple[str, ...]
    facts: Mapping[str, EngineFacts]
    unified: bool = False


class HeldSample(NamedTuple):
    """What one process of an engine holds on one device, in bytes, by the driver's list.

    ``segment`` is that of memory: the load of a LoRA adapter begins a new one as well.
    """

    t: float
    gpu: str
    pid: int
    engine: str
    used: int
    total: int | None  # of the device, in bytes
    free: int | None
    segment: int
    asleep: bool


@dataclass(frozen=True)
class AllocatorSample:
    """What PyTorch's allocator tells of itself in one process of an engine, by the probe inside it.

    ``memory`` is that of the process' device by NVML's latest poll, None where it is not known. ``segment`` is a
    HeldSample's, ``life`` and ``life_start`` are the segment of a RankSample. ``ready_since`` is when the engine first
    answered in this life, None before.
    """

    t: float
    engine: str
    report: AllocatorReport
    memory: Memory | None
    segment: int
    life: int
    life_start: float
    ready_since: float | None
    asleep: bool


@dataclass(frozen=True)
class OwnersSample:
    """Whose the KV blocks of one rank are, by the probe inside its engine core."""

    t: float
    engine: str
    owners: BlockOwners
    segment: int


class HostSample(NamedTuple):
    """One reading of a process of an engine on the host; ``loads`` is of LoRA adapters that took memory."""

    t: float
    engine: str
    process: HostProcess
    available: int | None  # bytes of the host that are available
    host_total: int | None
    loads: int = 0


@dataclass(frozen=True)
class LogSample:
    """What an engine's log told, or only whether it can be read (``readable``).

    ``news`` is what is new of how the engine fares; ``start`` is its latest start as it stands, to be looked at and
    not to be kept: it goes on changing.
    """

    t: float
    engine: str
    readable: bool
    news: News | None = None
    start: StartUp | None = None


@dataclass(frozen=True)
class ProcessEnd:
    """A process that a GPU listed or an engine owned has ended. ``holder`` is whose it was."""

    t: float
    pid: int
    holder: Holder


@dataclass(frozen=True)
class ProbeSample:
    """The outcome of one active probe: a request for one token to an engine.

    ``ok`` when a token came back. Not ``ok`` means that the engine brought none: a timeout, a broken connection, an
    answer of 5xx; ``error`` says which. A refusal of the request itself (4xx: a wrong model name, no permission) says
    nothing of the engine and is no sample. ``seconds`` is how long it took; ``t`` is its end.
    """

    t: float
    engine: str
    ok: bool
    seconds: float
    error: str = ""


@dataclass(frozen=True)
class Resumed:
    """Nobody was watching from ``since`` until ``t`` (oomwatch itself was down): no silence of a source, no standstill.

    Every detector is told. Counters and levels that are read afterwards are as true as ever.
    """

    t: float
    since: float


Sample = (
    LogSample
    | RankSample
    | EngineSample
    | DeviceSample
    | HeldSample
    | AllocatorSample
    | OwnersSample
    | HostSample
    | ProcessEnd
    | ProbeSample
    | Resumed
)


class Detector(Protocol):
    """Concludes one verdict about one subject.

    ``observe`` is called with every sample that concerns the subject, in the order of time; what a detector does not
    need it ignores. ``conclude`` is called once an interval with the time of the clock's tick; it may not change its
    answer when called twice for the same time.
    """

    def observe(self, sample: Sample) -> None: ...

    def conclude(self, t: float) -> Finding: ...


_HELD: tuple[State, ...] = ("page", "ticket")


class Latch:
    """Hysteresis: up at once, down only after the condition has been false for a while.

    A page lasts ``page_s`` seconds beyond its condition, a ticket ``ticket_s``, an info not at all. Meanwhile the
    higher state stays.
    """

    def __init__(self, page_s: float = 900.0, ticket_s: float = 3600.0) -> None:
        self._hold: Mapping[State, float] = {"page": page_s, "ticket": ticket_s}
        self.state: State = "clear"
        self._met: dict[State, float] = {}  # when each state's condition last held

    def update(self, t: float, wanted: State) -> State:
        """The state that stands at ``t``, when ``wanted`` is what the numbers say."""
        for state in _HELD:
            if LEVEL[wanted] >= LEVEL[state]:
                self._met[state] = t
        standing = [s for s in _HELD if s in self._met and t - self._met[s] <= self._hold[s]]
        self.state = max([wanted, *standing], key=lambda state: LEVEL[state])
        return self.state

    def reset(self) -> None:
        """Forget everything: a new life has begun."""
        self.state = "clear"
        self._met.clear()
