"""The immutable picture of the node that every output reads: /metrics, the page, the API, ``check``.

Views hold the present only: what has gone silent is Absent or None here, and its last value stands apart under a name
that says so (``last_…``), with its time. All times are unix seconds, sizes bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from oomwatch.enginelog.events import Budget, KvPool
from oomwatch.observations import (
    NOT_KNOWN,
    NOT_READ,
    Absent,
    AllocatorReport,
    BlockOwners,
    DriverReport,
    EngineFacts,
    EngineScrape,
    GpuPoll,
    HostMemory,
    HostProcess,
    Maybe,
    Memory,
)

if TYPE_CHECKING:  # verdicts are about what stands here
    from oomwatch.verdicts import Verdict


@dataclass(frozen=True)
class Holder:
    """Who holds device memory. ``kind`` is ``engine``, ``neighbour`` (named in the configuration) or ``unknown``.

    ``name`` is the engine's or the neighbour's; empty for unknown.
    """

    kind: str
    name: str = ""


@dataclass(frozen=True)
class HeldProcess:
    """A process on a device with its holder; ``used`` bytes, None where the driver gives none; ``name`` its title."""

    pid: int
    used: int | None
    holder: Holder
    name: str = ""


@dataclass(frozen=True)
class HeldMemory:
    """Bytes on one device held by all processes of one holder."""

    holder: Holder
    used: int


@dataclass(frozen=True)
class MigView:
    uuid: str
    gi: int
    ci: int
    memory: Maybe[Memory]
    processes: Maybe[tuple[HeldProcess, ...]]
    held: Maybe[tuple[HeldMemory, ...]]
    unowned: Maybe[int]


@dataclass(frozen=True)
class XidCount:
    code: int
    count: int
    last_t: float


@dataclass(frozen=True)
class GpuView:
    """One device. ``poll`` is its latest poll, None once that is too old; ``processes`` have their own, slower pace.

    ``unowned`` is used memory that no listed process accounts for; Absent unless it can be computed honestly.
    ``last_seen`` is when its memory was last read; ``last_memory`` what was read then, for people only.
    """

    uuid: str
    index: int
    name: str
    poll: GpuPoll | None
    memory: Maybe[Memory]
    processes: Maybe[tuple[HeldProcess, ...]]
    held: Maybe[tuple[HeldMemory, ...]]
    unowned: Maybe[int]
    mig: tuple[MigView, ...] = ()
    xids: tuple[XidCount, ...] = ()
    last_seen: float | None = None
    last_memory: Memory | None = None


def devices(gpus: Iterable[GpuView]) -> Iterator[GpuView | MigView]:
    """Each GPU, followed by its MIG slices."""
    for gpu in gpus:
        yield gpu
        yield from gpu.mig


ENGINE_STATES = (
    "ok",
    "sleeping",
    "frozen",  # requests run or wait on a rank, and none of its counters has moved for a while
    "dead",  # the page answers, /health says 503: the engine core has died
    "stats_disabled",
    "no_traffic_yet",
    "unreachable",
    "timeout",
    "http_error",
    "redirected",
    "unauthorized",
    "too_large",
    "not_metrics",
    "not_vllm",
    "truncated",
    "duplicate_series",
    "tls_error",
    "bad_configuration",
    "no_address",  # its processes were found, not how to reach its page
    "gone",  # its processes have ended
    "unknown",  # not scraped yet, or the scraper itself fell silent
)


@dataclass(frozen=True)
class StartUpView:
    """An engine's latest start as its log tells it; ``since`` and ``ready`` unix time, ``phase`` of enginelog.story.

    ``budgets`` are by data-parallel rank and worker (``0``, ``TP1``, ``PP0_TP1``), ``pools`` by rank.
    """

    since: float
    phase: str
    ready: float | None
    version: str | None
    utilization: float | None
    max_model_len: int | None
    budgets: tuple[tuple[str, str, Budget], ...] = ()
    pools: tuple[tuple[str, KvPool], ...] = ()


@dataclass(frozen=True)
class EngineView:
    """One engine. ``scrape`` is the latest answered scrape, None as soon as one fails or grows too old.

    ``state`` is one of ENGINE_STATES, ``error`` the sentence that goes with it. ``last_answer`` keeps the last page's
    readings for people, whatever happened since; ``last_seen`` is its time. ``last_progress`` is when a token, step or
    finished-request counter last moved, on the rank where that is longest ago. ``gpu_memory`` is held device memory in
    bytes by device (or MIG) uuid, Absent where no list could be read; ``gpu_memory_missing`` is why one of a device
    that may be the engine's could not. ``overhead`` is what its processes hold beyond the known components, by device
    and pid.
    ``allocators`` and ``owners`` are what the probes inside its processes say now. ``startup`` and ``ran_out`` are what
    its log told: the latest start, and how often the allocator ran out, by killer and by ``startup`` or ``runtime``.
    """

    facts: EngineFacts
    state: str
    error: str
    scrape: EngineScrape | None
    last_answer: EngineScrape | None = None
    last_seen: float | None = None
    last_progress: float | None = None
    restarts: int = 0
    processes: tuple[HostProcess, ...] = ()
    gpu_memory: Maybe[Mapping[str, int]] = NOT_READ
    gpu_memory_missing: Absent | None = None
    overhead: Maybe[Mapping[str, Mapping[int, int]]] = NOT_KNOWN
    allocators: tuple[AllocatorReport, ...] = ()
    owners: tuple[BlockOwners, ...] = ()
    startup: StartUpView | None = None
    ran_out: tuple[tuple[str, str, int], ...] = ()

    @property
    def name(self) -> str:
        return self.facts.name

    @property
    def gpus(self) -> tuple[str, ...] | None:
        """Uuids of its devices or MIG slices: as configured, else those that list its processes; None: not known."""
        if self.facts.gpus is not None or isinstance(self.gpu_memory, Absent):
            return self.facts.gpus
        return tuple(sorted(self.gpu_memory))

    @property
    def gpu_memory_sum(self) -> Maybe[int]:
        """Bytes on all devices; a sum that may lack a device is none."""
        if isinstance(self.gpu_memory, Absent):
            return self.gpu_memory
        return self.gpu_memory_missing or sum(self.gpu_memory.values())

    @property
    def overhead_sum(self) -> Maybe[Mapping[str, int]]:
        """Bytes by device, the sum over the engine's processes there."""
        if isinstance(self.overhead, Absent):
            return self.overhead
        return {device: sum(by_pid.values()) for device, by_pid in self.overhead.items()}


@dataclass(frozen=True)
class SourceView:
    """Health of one source for one target. ``up`` is None before its first run and once it has fallen silent."""

    source: str
    target: str
    up: bool | None
    last_run: float | None = None
    last_success: float | None = None
    seconds: float | None = None
    failures: int = 0
    error: str = ""


@dataclass(frozen=True)
class Snapshot:
    """Everything that is known at time ``t``."""

    t: float
    driver: DriverReport | None = None
    gpus: tuple[GpuView, ...] = ()
    engines: tuple[EngineView, ...] = ()
    host: HostMemory | None = None
    sources: tuple[SourceView, ...] = ()
    unresolved_gpu_pids: Maybe[int] = NOT_READ  # pids that a GPU lists and this host's /proc does not have
    verdicts: tuple[Verdict, ...] = ()  # as of the last tick


EMPTY = Snapshot(t=0.0)
