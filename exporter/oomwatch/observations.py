"""What the sources deliver: frozen dataclasses, data and health apart.

Every observation carries ``t``, unix time in seconds, set by its source; downstream of the sources no clock is
read, so that a recording replays to the same conclusions. Sizes are bytes, durations seconds, shares 0-1.

A field is three-valued: a value, or :class:`Absent` with the reason. Absent is never 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Absent:
    """No value, and why.

    ``reason`` is a constant word: NVML's error name without ``NVML_ERROR_`` (``NOT_SUPPORTED``, ``GPU_IS_LOST``),
    or one of the constants below.
    """

    reason: str


Maybe: TypeAlias = T | Absent

NOT_READ = Absent("NOT_READ")  # this source did not ask for it in this cycle (slower cadence)
HUNG = Absent("HUNG")  # a driver call has not returned within its deadline
IMPLAUSIBLE = Absent("IMPLAUSIBLE")  # the answer contradicts itself (scrambled process lists), or is no number (NaN)
NOT_EXPOSED = Absent("NOT_EXPOSED")  # the page has no such series
MIG_ENABLED = Absent("MIG_ENABLED")  # a parent's value would repeat or hide its slices'
NOT_KNOWN = Absent("NOT_KNOWN")  # nobody told us and it cannot be derived
STALE = Absent("STALE")  # the last value is too old to be shown as the present
AMBIGUOUS = Absent("AMBIGUOUS")  # several values that contradict each other


def known(value: Maybe[T]) -> T | None:
    """The value, or None where it is absent."""
    return None if isinstance(value, Absent) else value


# --- GPUs ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Memory:
    """Device memory in bytes, as nvmlDeviceGetMemoryInfo answers.

    With the v2 call ``reserved`` is the driver's own part and ``used`` excludes it. Where only v1 answers,
    ``reserved`` is None and ``used`` includes the driver's reserve.
    """

    total: int
    reserved: int | None
    used: int
    free: int

    @property
    def used_includes_reserved(self) -> bool:
        return self.reserved is None


@dataclass(frozen=True)
class GpuProcess:
    """A process in a device's compute list; ``pid`` is the host's, ``used`` bytes, None where the driver gives none."""

    pid: int
    used: int | None


@dataclass(frozen=True)
class MigInstance:
    """A MIG slice with its own memory and processes; ``gi`` and ``ci`` are the GPU and compute instance ids."""

    uuid: str
    gi: int
    ci: int
    memory: Maybe[Memory]
    processes: Maybe[tuple[GpuProcess, ...]] = NOT_READ


@dataclass(frozen=True)
class RemappedRows:
    """NVML's fields 142 to 145: rows remapped after correctable and uncorrectable errors; one pending; one failed."""

    correctable: int
    uncorrectable: int
    pending: bool
    failed: bool


@dataclass(frozen=True)
class GpuPoll:
    """One poll of one device. A device that the driver no longer lists has ``memory`` Absent("NOT_FOUND").

    ``processes`` is NOT_READ in the cycles that leave the list out. ``unified`` marks devices that share the host's
    memory (NVML answers NOT_SUPPORTED): their ``memory`` is the host's total and the sum of the device's processes.
    ``seconds`` is how long the poll took.
    """

    t: float
    uuid: str
    index: int
    name: str
    memory: Maybe[Memory]
    processes: Maybe[tuple[GpuProcess, ...]] = NOT_READ
    mig: tuple[MigInstance, ...] = ()
    mig_enabled: Maybe[bool] = NOT_READ
    unified: bool = False
    utilization: Maybe[float] = NOT_READ  # ratio of the last sample period in which a kernel ran
    temperature: Maybe[float] = NOT_READ  # degrees Celsius
    power: Maybe[float] = NOT_READ  # watts
    ecc_uncorrected: Maybe[int] = NOT_READ  # volatile: since the driver was loaded
    ecc_corrected: Maybe[int] = NOT_READ
    remapped_rows: Maybe[RemappedRows] = NOT_READ
    recovery_action: Maybe[int] = (
        NOT_READ  # NVML field 230: 0 none, 1 GPU reset, 2 node reboot, 3 drain P2P, 4 drain and reset
    )
    pci_bus_id: Maybe[str] = NOT_READ
    seconds: float = 0.0

    def errors(self) -> dict[str, str]:
        """Field name to reason for what failed; what was not asked for is no failure."""
        parts = {
            "memory": self.memory,
            "processes": self.processes,
            "utilization": self.utilization,
            "temperature": self.temperature,
            "power": self.power,
            "ecc": self.ecc_uncorrected,
            "remapped_rows": self.remapped_rows,
            "recovery_action": self.recovery_action,
        }
        return {name: part.reason for name, part in parts.items() if isinstance(part, Absent) and part != NOT_READ}


@dataclass(frozen=True)
class XidEvent:
    """An Xid that the driver reported for a device (nvmlEventTypeXidCriticalError)."""

    t: float
    uuid: str
    code: int


@dataclass(frozen=True)
class DriverReport:
    """The driver library as a whole.

    ``state`` is one of DRIVER_STATES; ``detail`` says in plain English what is wrong and what to do, empty when ok.
    """

    t: float
    state: str
    detail: str = ""
    driver_version: Maybe[str] = NOT_KNOWN
    nvml_version: Maybe[str] = NOT_KNOWN
    cuda_version: Maybe[str] = NOT_KNOWN
    device_count: Maybe[int] = NOT_KNOWN


DRIVER_STATES = (
    "ok",
    "library_missing",  # no libnvidia-ml.so.1 on the loader's path
    "driver_not_loaded",
    "no_permission",
    "version_mismatch",  # the library is newer than the kernel module; a new process or a reboot is needed
    "released",  # handles given back on request
    "hung",
    "error",
)


# --- engines ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EngineFacts:
    """What configuration or discovery knows of an engine; None where it does not. Later facts replace known ones.

    ``origin`` is ``configuration`` or ``discovery``. ``target`` is the URL of the engine's /metrics. ``pids`` are the
    engine's processes on this host, ``gpus`` uuids of its devices (MIG uuids for slices).
    """

    name: str
    target: str | None = None
    pids: tuple[int, ...] | None = None
    gpus: tuple[str, ...] | None = None
    gpu_memory_utilization: float | None = None
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    vllm_version: str | None = None
    kv_connector: bool | None = None
    kv_pool_blocks: int | None = None  # usable blocks of one rank, where an operator states them
    kv_pool_bytes: int | None = None  # per GPU
    weights_bytes: int | None = None  # per GPU
    no_address: str | None = None  # why ``target`` is not known, and what to do
    origin: str = "configuration"


@dataclass(frozen=True)
class EngineUpdate:
    """Facts learnt at ``t``; ``gone`` when a discovered engine has ended and left the list."""

    t: float
    facts: EngineFacts
    gone: bool = False


# (upper bound, cumulative count), ascending; the last bound is infinite
Histogram: TypeAlias = tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Pool:
    """The KV block pool of one rank.

    ``blocks`` are usable ones: without the null block of V1, and one rank's share where vLLM's label holds the sum
    over data-parallel ranks. ``used`` is in the same unit. ``tokens`` comes from ``kv_cache_size_tokens`` (0.24+), or
    blocks x block size where the model is known not to be hybrid.
    """

    blocks: Maybe[int] = NOT_KNOWN
    used: Maybe[int] = NOT_KNOWN
    block_size: Maybe[int] = NOT_KNOWN  # tokens
    tokens: Maybe[int] = NOT_KNOWN
    max_concurrency: Maybe[float] = NOT_KNOWN  # requests of the longest length that fit at once
    configured_bytes: Maybe[int] = NOT_KNOWN  # kv_cache_memory_bytes, when the operator set it


@dataclass(frozen=True)
class RankReading:
    """What one page says of one rank (vLLM's ``engine`` label, "0" where a version has none). Counters are raw."""

    rank: str
    usage: Maybe[float] = NOT_EXPOSED
    running: Maybe[float] = NOT_EXPOSED
    waiting: Maybe[float] = NOT_EXPOSED
    waiting_capacity: Maybe[float] = NOT_EXPOSED
    waiting_deferred: Maybe[float] = NOT_EXPOSED
    swapped: Maybe[float] = NOT_EXPOSED  # V0
    preemptions: Maybe[float] = NOT_EXPOSED
    prompt_tokens: Maybe[float] = NOT_EXPOSED
    generation_tokens: Maybe[float] = NOT_EXPOSED
    steps: Maybe[float] = NOT_EXPOSED  # iteration_tokens_total_count
    finished: Maybe[Mapping[str, float]] = NOT_EXPOSED  # by vLLM's finished_reason
    request_prompt_tokens: Maybe[float] = NOT_EXPOSED  # sum over finished requests
    request_generation_tokens: Maybe[float] = NOT_EXPOSED
    prompt_lengths: Maybe[Histogram] = NOT_EXPOSED
    generation_lengths: Maybe[Histogram] = NOT_EXPOSED
    prefix_queries: Maybe[float] = NOT_EXPOSED  # unit by version: blocks to 0.8.5, tokens from 0.9.0
    prefix_hits: Maybe[float] = NOT_EXPOSED
    external_prefix_queries: Maybe[float] = NOT_EXPOSED  # a KV connector is asked
    kv_expired: Maybe[float] = NOT_EXPOSED  # requests whose held blocks expired (NIXL, Mooncake)
    sleep_level: Maybe[str] = NOT_EXPOSED  # awake, paused, weights_offloaded, discard_all
    gpu_memory_utilization: Maybe[float] = NOT_EXPOSED
    prefix_caching: Maybe[bool] = NOT_EXPOSED
    pool: Pool = field(default_factory=Pool)


@dataclass(frozen=True)
class Adapters:
    """LoRA adapters of an engine: ``seen`` are the distinct ones that its page has named since its start.

    ``slots`` is how many can be on the device at once (--max-loras). Their names are the tenants', and are not kept.
    """

    seen: int
    slots: int


SCRAPE_STATES = (
    "ok",
    "stats_disabled",  # the page has no vllm: series at all (--disable-log-stats)
    "no_traffic_yet",  # vLLM's page, but its gauges have no series yet
    "unreachable",  # connection refused, reset, no route, name not found
    "timeout",
    "http_error",
    "redirected",
    "unauthorized",
    "too_large",
    "not_metrics",  # not text, or not a Prometheus exposition
    "not_vllm",  # a page of metrics, but of something else than vLLM
    "truncated",
    "duplicate_series",
    "tls_error",
    "bad_configuration",  # a credentials file cannot be read, …
)


@dataclass(frozen=True)
class EngineScrape:
    """One scrape of one engine's /metrics. ``state`` is one of SCRAPE_STATES; ``error`` a sentence when not fine.

    ``samples`` are the series that this package knows, as exposed (``name{label="value",…}`` to value), for
    recordings; ``ranks`` is their meaning. Both are empty unless a page was read.
    """

    t: float
    engine: str
    state: str
    seconds: float
    error: str = ""
    ranks: tuple[RankReading, ...] = ()
    model_name: Maybe[str] = NOT_EXPOSED
    version: Maybe[str] = NOT_KNOWN  # from /version
    process_start: Maybe[float] = NOT_EXPOSED  # unix time, of the API server
    kv_connector: Maybe[bool] = NOT_KNOWN
    adapters: Maybe[Adapters] = NOT_EXPOSED
    healthy: Maybe[bool] = NOT_READ  # /health: 200 or 503
    samples: Mapping[str, float] = field(default_factory=dict)

    @property
    def answered(self) -> bool:
        """A well-formed page of metrics came back."""
        return self.state in ("ok", "stats_disabled", "no_traffic_yet")


@dataclass(frozen=True)
class ProbeResult:
    """The outcome of one active probe of an engine at its end ``t``: whether one token came, after how many seconds.

    ``error`` says why none came: a timeout, a broken connection, an answer of 5xx.
    """

    t: float
    engine: str
    ok: bool
    seconds: float
    error: str = ""


# --- the host --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HostProcess:
    """A process of the host that an engine owns or a GPU lists. Bytes; ``start`` unix time.

    ``anon`` is anonymous memory (page cache and shared files left out), ``memory_limit`` its cgroup's. ``role`` is
    ``api_server``, ``engine_core``, ``worker`` or ``other`` by vLLM's process titles, ``rank`` the worker's where
    its title tells.
    """

    t: float
    pid: int
    start: float
    rss: int
    anon: Maybe[int]
    name: str
    ppid: int | None = None
    container: str | None = None
    pod_uid: str | None = None
    memory_limit: int | None = None
    engine: str | None = None
    role: str = "other"
    rank: str | None = None


@dataclass(frozen=True)
class ProcessGone:
    t: float
    pid: int


@dataclass(frozen=True)
class HostMemory:
    """The host's memory in bytes (/proc/meminfo: MemTotal, MemAvailable)."""

    t: float
    total: int
    available: int


# --- what the engines' own processes tell --------------------------------------------------------------------------


@dataclass(frozen=True)
class LogLine:
    """What was read from an engine's log: an ``event`` with the numbers of its ``fields``, or the raw ``line``."""

    t: float
    engine: str
    line: str | None = None
    event: str | None = None
    fields: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class AllocationFailure:
    """An allocation that ended in PyTorch's out-of-memory error, with the numbers of that moment, in bytes.

    ``free`` is what the driver had left on the device, ``total`` the device's memory.
    """

    t: float
    wanted: int | None = None
    free: int | None = None
    allocated: int | None = None
    reserved: int | None = None
    total: int | None = None


@dataclass(frozen=True)
class AllocatorReport:
    """Statistics of PyTorch's caching allocator in a worker, under the names of torch.cuda.memory_stats: bytes, counts.

    ``gpu`` is the device's or MIG slice's uuid, empty where it is not known. The fields that follow come from the
    allocator's snapshot, None where it was not read: of what is reserved, free, and outside the private pools of graphs
    and sleep mode, ``largest_free_block`` in bytes, ``free`` bytes in all, those ``releasable`` to the driver at once,
    and ``free_by_size``: bytes by the smallest size of each class, ascending. ``private_reserved`` and ``private_free``
    are what these pools hold, and what of it is free. ``backend`` is PyTorch's name of the allocator, ``expandable``
    whether its segments can grow, ``max_split_size`` the size in bytes from which on blocks are not split. ``engine``
    and ``started`` (unix time) are whose process it is and when that began, where whoever read it knows: the last word
    of a process that has ended would else be nobody's.
    """

    t: float
    pid: int
    gpu: str
    stats: Mapping[str, int] = field(default_factory=dict)
    largest_free_block: int | None = None
    free: int | None = None
    releasable: int | None = None
    private_reserved: int | None = None
    private_free: int | None = None
    free_by_size: tuple[tuple[int, int], ...] = ()
    backend: str | None = None
    expandable: bool | None = None
    max_split_size: int | None = None
    failure: AllocationFailure | None = None  # the last one
    engine: str | None = None
    started: float | None = None

    def current(self, name: str) -> int | None:
        """A statistic such as ``reserved_bytes`` as it is now, over all pools."""
        return self.stats.get(f"{name}.all.current")


@dataclass(frozen=True)
class BlockOwners:
    """Whose the ``total`` usable KV blocks of one rank are, counted between two steps of its engine core.

    Every block is one of four: ``free``; held by requests that are ``living``; held by ``finished`` ones, whose blocks
    are freed later, because a KV connector still reads them; ``ownerless``, held by nobody that exists, None where that
    cannot be told. ``cached`` are those of the free ones that a prefix can still hit, None where that was not counted.
    ``counted`` is when: a count of many blocks is made less often than it is told.
    """

    t: float
    pid: int
    rank: str
    counted: float
    total: int
    free: int
    living: int
    finished: int
    ownerless: int | None = None
    cached: int | None = None


# --- time and health -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SourceRun:
    """One run of a source against a target: whether it succeeded, and how long it took in seconds.

    ``source`` is ``nvml``, ``vllm``, ``probe``, ``allocator``, ``log``, ``host`` or ``discovery``; ``target`` a
    device's uuid, an engine's name, a directory, or empty.
    """

    t: float
    source: str
    target: str
    ok: bool
    seconds: float
    error: str = ""


@dataclass(frozen=True)
class TargetRemoved:
    """A source stopped watching a target for good (an engine left the configuration, a device was replaced)."""

    t: float
    source: str
    target: str


@dataclass(frozen=True)
class Gap:
    """Nobody was watching from ``since`` until ``t``: that nothing was observed in between says nothing of anybody."""

    t: float
    since: float


@dataclass(frozen=True)
class Tick:
    """Time passed, and nothing else may have happened."""

    t: float


Observation: TypeAlias = (
    GpuPoll
    | XidEvent
    | DriverReport
    | EngineUpdate
    | EngineScrape
    | ProbeResult
    | HostProcess
    | ProcessGone
    | HostMemory
    | SourceRun
    | TargetRemoved
    | LogLine
    | AllocatorReport
    | BlockOwners
    | Gap
    | Tick
)
