"""/metrics: a snapshot rendered as metric families. No I/O, no driver call, no network: memory in, text out."""

from __future__ import annotations

import math
import platform
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from operator import attrgetter
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from prometheus_client import CollectorRegistry, Metric, PlatformCollector, ProcessCollector
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from oomwatch import __version__, textformat, units
from oomwatch.attribution import once_each
from oomwatch.detectors.base import LEVEL, Subject, numbers
from oomwatch.families import (
    ALLOCATOR_STATISTICS,
    BASE_UNITS,
    BLOCK_OWNERSHIP,
    DERIVED,
    FAMILIES,
    STARTUP_COMPONENTS,
    VERDICT_LABELS,
)
from oomwatch.observations import (
    DRIVER_STATES,
    NOT_READ,
    Absent,
    AllocatorReport,
    GpuPoll,
    Histogram,
    HostProcess,
    Maybe,
    RankReading,
    known,
)
from oomwatch.snapshot import (
    ENGINE_STATES,
    EngineView,
    GpuView,
    HeldProcess,
    MigView,
    Snapshot,
    SourceView,
    devices,
)
from oomwatch.verdicts import CATALOGUE, KILLERS, Verdict

if TYPE_CHECKING:
    from oomwatch.history import HistoryStatus
    from oomwatch.notify import TargetStatus
    from oomwatch.sources.nvml.calls import CallStats

T = TypeVar("T")

SLEEP_LEVELS = ("awake", "paused", "weights_offloaded", "discard_all")

# NVML field 230. What a newer driver may add is "other", so that a need is never hidden.
RECOVERY_ACTIONS = {1: "gpu_reset", 2: "node_reboot", 3: "drain_p2p", 4: "drain_and_reset"}

# Exposed from 0, so that increase() sees the first event of each: memory (31, 48, 63, 64, 94, 95), engines and
# applications (13, 43, 45), the board and its firmware (62, 74, 79, 119, 120).
WATCHED_XIDS = (13, 31, 43, 45, 48, 62, 63, 64, 74, 79, 94, 95, 119, 120)


@dataclass(frozen=True)
class ConfigStatus:
    """``successful`` tells of the last attempt to load; ``loaded_at`` (unix time) and ``sha256`` of what is in use."""

    successful: bool
    loaded_at: float
    sha256: str


class SnapshotCollector(Collector):
    """Builds every family anew at each scrape, from one snapshot, so that what is gone is gone and nothing is torn.

    The callables are asked once a scrape; they must answer at once, from memory.
    """

    def __init__(
        self,
        snapshot: Callable[[], Snapshot],
        *,
        process_series_per_gpu: Callable[[], int],
        config: Callable[[], ConfigStatus],
        nvml_calls: Callable[[], CallStats] = dict,
        probe_files: Callable[[], Mapping[str, int]] = dict,
        history: Callable[[], HistoryStatus | None] = lambda: None,
        notifications: Callable[[], Iterable[TargetStatus]] = tuple,
        internal_errors: Callable[[], int] = int,
    ) -> None:
        self._snapshot = snapshot
        self._process_series_per_gpu = process_series_per_gpu
        self._config = config
        self._nvml_calls = nvml_calls
        self._probe_files = probe_files
        self._history = history
        self._notifications = notifications
        self._internal_errors = internal_errors

    def describe(self) -> Iterator[Metric]:
        return _Page().families()

    def collect(self) -> Iterator[Metric]:
        page = _Page()
        snapshot = self._snapshot()
        _put_daemon(page, snapshot, self._config(), self._internal_errors())
        _put_history(page, self._history())
        for target in self._notifications():
            _put_notifications(page, target)
        for source in snapshot.sources:
            _put_source(page, source)
        _put_driver(page, snapshot)
        _put_calls(page, self._nvml_calls())
        for state, count in self._probe_files().items():
            page.put("oomwatch_probe_files", count, state)
        most = self._process_series_per_gpu()
        overheads = _overheads(snapshot.engines)
        for gpu in snapshot.gpus:
            _put_gpu(page, gpu, most, overheads)
        places = _Places(snapshot)
        for engine in snapshot.engines:
            _put_engine(page, engine, places)
        ended = {engine.name for engine in snapshot.engines if engine.state == "gone"}
        for verdict in snapshot.verdicts:
            _put_verdict(page, verdict, places)
            if verdict.subject.engine not in ended:
                _put_derived(page, verdict, places)
        _put_incidents(page, snapshot)
        return (table for table in page.families() if table.rows)


def registry(collector: SnapshotCollector) -> CollectorRegistry:
    """What /metrics serves: the snapshot, and the client library's own process_* and python_info."""
    everything = CollectorRegistry()
    everything.register(collector)
    ProcessCollector(registry=everything)
    PlatformCollector(registry=everything)
    return everything


def render(source: CollectorRegistry, accept_header: str) -> tuple[bytes, str]:
    """A page in the best format that the client accepts, and its content type: OpenMetrics, text 1.0.0 or 0.0.4."""
    try:
        _, chosen = choose_encoder(accept_header)
    except TypeError:  # a version that is no number, such as version=x
        chosen = ""
    if chosen.startswith("application/openmetrics-text"):
        return textformat.openmetrics(source.collect()), textformat.OPENMETRICS
    return textformat.text(source.collect()), textformat.TEXT_1 if "version=1" in chosen else textformat.TEXT_0


# --- a page in the making --------------------------------------------------------------------------------------

_BY_NAME = {family.name: family for family in FAMILIES}
# What the text format wants to know of a family, worked out once: name, help, kind, unit, name of samples, labels.
_SHAPES = {
    family.name: (
        family.base_name,
        family.help,
        family.kind,
        family.unit if family.unit in BASE_UNITS else "",
        family.name,
        family.labels,
    )
    for family in FAMILIES
}
_RATIOS = frozenset(family.name for family in FAMILIES if family.unit == "ratio")


class _Page:
    """The samples of one scrape, by family and label values: no series can be there twice."""

    def __init__(self) -> None:
        self._samples: dict[str, dict[tuple[str, ...], float]] = {name: {} for name in _BY_NAME}

    def put(self, name: str, value: Maybe[float] | None, *labels: str) -> None:
        """Add a sample; what is absent, not a number, or a ratio outside 0-1 is left out."""
        if value is None or isinstance(value, Absent) or not math.isfinite(value):
            return
        if name in _RATIOS and not 0 <= value <= 1:
            return
        self._samples[name][labels] = float(value)

    def put_state(self, name: str, states: Iterable[str], present: str, *labels: str) -> None:
        """One sample for each state, 1 for the present one."""
        for state in states:
            self.put(name, state == present, *labels, state)

    def families(self) -> Iterator[textformat.Table]:
        for name, samples in self._samples.items():
            yield textformat.Table(*_SHAPES[name], samples)


class _Places:
    """Devices by uuid: a slice's GPU, and what an engine there sees of the memory."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._parents = {mig.uuid: gpu.uuid for gpu in snapshot.gpus for mig in gpu.mig}
        self._memory = {view.uuid: known(view.memory) for view in devices(snapshot.gpus)}

    def labels(self, device: str | None) -> tuple[str, str]:
        """The labels gpu and mig of a device's or a slice's uuid."""
        if device is None or not device.startswith("MIG-"):
            return device or "", ""
        return self._parents.get(device, ""), device

    def usable(self, device: str) -> int | None:
        """Bytes without the driver's reserve, which no engine sees."""
        memory = self._memory.get(device)
        return memory.total - (memory.reserved or 0) if memory else None


# --- daemon, sources, driver -----------------------------------------------------------------------------------


def _put_daemon(page: _Page, snapshot: Snapshot, config: ConfigStatus, internal_errors: int) -> None:
    page.put("oomwatch_build_info", 1, __version__, platform.python_version())
    page.put("oomwatch_config_info", 1, config.sha256)
    page.put("oomwatch_config_last_reload_successful", config.successful)
    page.put("oomwatch_config_last_reload_success_timestamp_seconds", config.loaded_at)
    page.put("oomwatch_snapshot_timestamp_seconds", snapshot.t or None)
    page.put("oomwatch_internal_errors_total", internal_errors)


def _put_history(page: _Page, history: HistoryStatus | None) -> None:
    if history is None:
        return
    page.put("oomwatch_history_up", history.enabled and not history.problem)
    page.put("oomwatch_history_size_bytes", history.size_bytes)
    page.put("oomwatch_history_oldest_timestamp_seconds", history.oldest)
    page.put("oomwatch_history_last_write_timestamp_seconds", history.last_write)
    page.put("oomwatch_history_write_seconds", history.write_seconds)
    page.put("oomwatch_history_waiting_bytes", history.waiting_bytes)
    page.put("oomwatch_history_write_failures_total", history.failures)
    page.put("oomwatch_history_lost_observations_total", history.lost_observations)


def _put_notifications(page: _Page, target: TargetStatus) -> None:
    page.put("oomwatch_notifications_total", target.sent, target.name)
    page.put("oomwatch_notification_failures_total", target.failures, target.name)
    page.put("oomwatch_notifications_waiting", target.waiting, target.name)
    page.put("oomwatch_notification_last_success_timestamp_seconds", target.last_success, target.name)


def _put_source(page: _Page, source: SourceView) -> None:
    labels = (source.source, source.target)
    silent = source.up is None and source.last_run is not None
    page.put("oomwatch_source_up", False if silent else source.up, *labels)
    page.put("oomwatch_source_last_run_timestamp_seconds", source.last_run, *labels)
    page.put("oomwatch_source_last_success_timestamp_seconds", source.last_success, *labels)
    page.put("oomwatch_source_duration_seconds", None if silent else source.seconds, *labels)
    page.put("oomwatch_source_failures_total", source.failures, *labels)


def _put_driver(page: _Page, snapshot: Snapshot) -> None:
    page.put("oomwatch_nvml_unresolved_pids", snapshot.unresolved_gpu_pids)
    driver = snapshot.driver
    if driver is None:
        return
    page.put_state("oomwatch_nvml_state", DRIVER_STATES, driver.state)
    versions = [known(version) or "" for version in (driver.driver_version, driver.nvml_version, driver.cuda_version)]
    if any(versions):
        page.put("oomwatch_nvml_info", 1, *versions)
    page.put("oomwatch_nvml_devices", driver.device_count)


def _put_calls(page: _Page, stats: CallStats) -> None:
    for function, counts in stats.items():
        page.put("oomwatch_nvml_calls_total", counts.calls, function)
        page.put("oomwatch_nvml_seconds_total", counts.seconds, function)
        for error, count in counts.errors.items():
            page.put("oomwatch_nvml_errors_total", count, function, error)


# --- GPUs and slices -------------------------------------------------------------------------------------------


_Overheads: TypeAlias = Mapping[str, Mapping[int, int]]
"""Bytes by device and pid."""


def _overheads(engines: Iterable[EngineView]) -> _Overheads:
    by_device: dict[str, dict[int, int]] = {}
    for engine in engines:
        for device, by_pid in (known(engine.overhead) or {}).items():
            by_device.setdefault(device, {}).update(by_pid)
    return by_device


def _put_gpu(page: _Page, gpu: GpuView, most: int, overheads: _Overheads) -> None:
    uuid, poll = gpu.uuid, gpu.poll
    if gpu.index >= 0:
        bus = known(poll.pci_bus_id) if poll else None
        page.put("oomwatch_gpu_info", 1, uuid, str(gpu.index), gpu.name, bus or "")
    page.put("oomwatch_gpu_last_seen_timestamp_seconds", gpu.last_seen, uuid)
    _put_memory(page, "oomwatch_gpu", gpu, (uuid,))
    _put_processes(page, "oomwatch_gpu", gpu, most, overheads, (uuid,))
    if poll:
        _put_poll(page, poll)
    failed = (poll.errors() if poll else {}) | _reasons(gpu)
    for reading, reason in failed.items():
        page.put("oomwatch_gpu_value_absent", 1, uuid, reading, reason)
    counts = dict.fromkeys(WATCHED_XIDS, 0) | {xid.code: xid.count for xid in gpu.xids}
    for code, count in sorted(counts.items()):
        page.put("oomwatch_gpu_xid_errors_total", count, uuid, str(code))
    for xid in gpu.xids:
        page.put("oomwatch_gpu_xid_last_timestamp_seconds", xid.last_t, uuid, str(xid.code))
    for mig in gpu.mig:
        _put_mig(page, uuid, mig, most, overheads)


def _put_poll(page: _Page, poll: GpuPoll) -> None:
    uuid = poll.uuid
    page.put("oomwatch_gpu_memory_unified", poll.unified, uuid)
    page.put("oomwatch_gpu_utilization_ratio", poll.utilization, uuid)
    page.put("oomwatch_gpu_temperature_celsius", poll.temperature, uuid)
    page.put("oomwatch_gpu_power_watts", poll.power, uuid)
    page.put("oomwatch_gpu_ecc_corrected_errors_total", poll.ecc_corrected, uuid)
    page.put("oomwatch_gpu_ecc_uncorrected_errors_total", poll.ecc_uncorrected, uuid)
    rows = known(poll.remapped_rows)
    if rows:
        page.put("oomwatch_gpu_remapped_rows", rows.correctable, uuid, "correctable")
        page.put("oomwatch_gpu_remapped_rows", rows.uncorrectable, uuid, "uncorrectable")
        page.put("oomwatch_gpu_row_remap_pending", rows.pending, uuid)
        page.put("oomwatch_gpu_row_remap_failed", rows.failed, uuid)
    action = known(poll.recovery_action)
    if action is not None:
        needed = RECOVERY_ACTIONS.get(action, "other" if action else "none")
        page.put_state("oomwatch_gpu_recovery_needed", (*RECOVERY_ACTIONS.values(), "other"), needed, uuid)


def _put_mig(page: _Page, gpu: str, mig: MigView, most: int, overheads: _Overheads) -> None:
    labels = (gpu, mig.uuid)
    page.put("oomwatch_mig_info", 1, *labels, str(mig.gi), str(mig.ci))
    _put_memory(page, "oomwatch_mig", mig, labels)
    _put_processes(page, "oomwatch_mig", mig, most, overheads, labels)
    for reading, reason in _reasons(mig).items():
        page.put("oomwatch_mig_value_absent", 1, *labels, reading, reason)


def _reasons(view: GpuView | MigView) -> dict[str, str]:
    """Why memory and process list are absent, where that was not on purpose."""
    readings: dict[str, Maybe[object]] = {"memory": view.memory, "processes": view.processes}
    return {name: value.reason for name, value in readings.items() if isinstance(value, Absent) and value != NOT_READ}


def _put_memory(page: _Page, prefix: str, view: GpuView | MigView, labels: tuple[str, ...]) -> None:
    memory = known(view.memory)
    if memory:
        unified = isinstance(view, GpuView) and view.poll is not None and view.poll.unified
        page.put(f"{prefix}_memory_total_bytes", memory.total, *labels)
        page.put(f"{prefix}_memory_reserved_bytes", memory.reserved, *labels)
        page.put(f"{prefix}_memory_used_bytes", memory.used, *labels)
        page.put(f"{prefix}_memory_free_bytes", memory.free, *labels)
        page.put(f"{prefix}_memory_used_includes_reserved", memory.used_includes_reserved and not unified, *labels)
    for held in known(view.held) or ():
        page.put(f"{prefix}_memory_held_bytes", held.used, *labels, held.holder.kind, held.holder.name)
    page.put(f"{prefix}_memory_unowned_bytes", view.unowned, *labels)


def _put_processes(
    page: _Page, prefix: str, view: GpuView | MigView, most: int, overheads: _Overheads, labels: tuple[str, ...]
) -> None:
    if isinstance(view.processes, Absent):
        return
    processes, overhead = once_each(view.processes), overheads.get(view.uuid, {})
    page.put(f"{prefix}_memory_overhead_bytes", _overhead_of_engines(processes, overhead), *labels)
    page.put(f"{prefix}_processes", len(processes), *labels)
    page.put(f"{prefix}_omitted_processes", max(0, len(processes) - most), *labels)
    first = sorted(processes, key=lambda process: (process.holder.kind != "engine", -(process.used or 0), process.pid))
    for process in first[:most]:
        pid, holder = str(process.pid), process.holder
        page.put(f"{prefix}_process_memory_bytes", process.used, *labels, pid)
        page.put(f"{prefix}_process_memory_overhead_bytes", overhead.get(process.pid), *labels, pid)
        page.put(f"{prefix}_process_info", 1, *labels, pid, process.name, holder.kind, holder.name)


def _overhead_of_engines(processes: Iterable[HeldProcess], overhead: Mapping[int, int]) -> int | None:
    """The sum over the engines on a device; None when one is not known, as a part would pass for the whole."""
    engines = {process.pid for process in processes if process.holder.kind == "engine"}
    return sum(overhead[pid] for pid in engines) if engines and engines <= overhead.keys() else None


# --- engines ---------------------------------------------------------------------------------------------------

_RANK_GAUGES_AND_COUNTERS = {
    name: attrgetter(path)
    for name, path in (
        ("oomwatch_engine_kv_cache_usage_ratio", "usage"),
        ("oomwatch_engine_kv_cache_capacity_blocks", "pool.blocks"),
        ("oomwatch_engine_kv_cache_used_blocks", "pool.used"),
        ("oomwatch_engine_kv_cache_capacity_tokens", "pool.tokens"),
        ("oomwatch_engine_kv_cache_block_size_tokens", "pool.block_size"),
        ("oomwatch_engine_kv_cache_max_concurrency_requests", "pool.max_concurrency"),
        ("oomwatch_engine_kv_cache_configured_bytes", "pool.configured_bytes"),
        ("oomwatch_engine_running_requests", "running"),
        ("oomwatch_engine_waiting_requests", "waiting"),
        ("oomwatch_engine_waiting_for_capacity_requests", "waiting_capacity"),
        ("oomwatch_engine_waiting_deferred_requests", "waiting_deferred"),
        ("oomwatch_engine_swapped_requests", "swapped"),
        ("oomwatch_engine_preemptions_total", "preemptions"),
        ("oomwatch_engine_prompt_tokens_total", "prompt_tokens"),
        ("oomwatch_engine_generation_tokens_total", "generation_tokens"),
        ("oomwatch_engine_steps_total", "steps"),
        ("oomwatch_engine_prefix_cache_queries_total", "prefix_queries"),
        ("oomwatch_engine_prefix_cache_hits_total", "prefix_hits"),
        ("oomwatch_engine_kv_expired_requests_total", "kv_expired"),
    )
}


def _put_engine(page: _Page, engine: EngineView, places: _Places) -> None:
    name, facts, scrape = engine.name, engine.facts, engine.scrape
    model = known(engine.last_answer.model_name) if engine.last_answer else None
    page.put("oomwatch_engine_info", 1, name, model or "", facts.vllm_version or "", facts.origin)
    page.put("oomwatch_engine_up", None if engine.state == "unknown" else scrape is not None, name)
    page.put_state("oomwatch_engine_state", ENGINE_STATES, engine.state, name)
    page.put("oomwatch_engine_last_seen_timestamp_seconds", engine.last_seen, name)
    page.put("oomwatch_engine_last_progress_timestamp_seconds", engine.last_progress, name)
    page.put("oomwatch_engine_restarts_total", engine.restarts, name)
    if engine.state != "gone":
        _put_settings(page, engine)
        _put_budgets(page, engine, places)
    for rank in scrape.ranks if scrape else ():
        _put_rank(page, name, rank)
    for family, by_device in (
        ("oomwatch_engine_device_memory_bytes", engine.gpu_memory),
        ("oomwatch_engine_device_memory_overhead_bytes", engine.overhead_sum),
    ):
        for device, value in (known(by_device) or {}).items():
            page.put(family, value, name, *places.labels(device))
    _put_host_processes(page, name, engine.processes)
    ranks = {process.pid: process.rank or "" for process in engine.processes}
    for report in engine.allocators:
        _put_allocator(page, report, (name, ranks.get(report.pid, ""), *places.labels(report.gpu)))
    for owners in engine.owners:
        for ownership in BLOCK_OWNERSHIP:
            page.put("oomwatch_kv_blocks", getattr(owners, ownership), name, owners.rank, ownership)
        page.put("oomwatch_kv_cached_free_blocks", owners.cached, name, owners.rank)
    _put_log(page, engine)


def _put_log(page: _Page, engine: EngineView) -> None:
    """What the engine's log told: of its latest start while that goes on, and how often the allocator ran out."""
    name, start = engine.name, engine.startup
    if start is not None or engine.ran_out:
        counts = dict.fromkeys(product(("capacity", "fragmentation"), ("startup", "runtime")), 0)
        for (killer, when), count in (counts | {(k, w): count for k, w, count in engine.ran_out}).items():
            page.put("oomwatch_engine_out_of_memory_total", count, name, killer, when)
    if start is None:
        return
    page.put("oomwatch_engine_startup_timestamp_seconds", start.since, name)
    if start.phase == "over":
        return
    for rank, worker, budget in start.budgets:
        for component, field_name in STARTUP_COMPONENTS.items():
            value = getattr(budget, field_name)
            page.put("oomwatch_engine_startup_memory_bytes", value, name, rank, worker, component)
        page.put("oomwatch_engine_startup_promised_bytes", budget.promised, name, rank, worker)
        page.put("oomwatch_engine_startup_free_bytes", budget.free, name, rank, worker)
        page.put("oomwatch_engine_startup_device_total_bytes", budget.total, name, rank, worker)
    for rank, pool in start.pools:
        page.put("oomwatch_engine_startup_kv_tokens", pool.tokens, name, rank)
        page.put("oomwatch_engine_startup_max_concurrency_requests", pool.concurrency, name, rank)


def _put_settings(page: _Page, engine: EngineView) -> None:
    """What the engine was told: by its page where that answers, else as configuration or discovery know it."""
    name, facts, scrape = engine.name, engine.facts, engine.scrape
    ranks = scrape.ranks if scrape else ()
    page.put("oomwatch_engine_gpu_memory_utilization_ratio", _utilization(engine), name)
    page.put("oomwatch_engine_max_model_length_tokens", facts.max_model_len, name)
    page.put("oomwatch_engine_prefix_caching_enabled", _first(rank.prefix_caching for rank in ranks), name)
    connector = known(scrape.kv_connector) if scrape else None
    page.put("oomwatch_engine_kv_connector_enabled", facts.kv_connector if connector is None else connector, name)


def _utilization(engine: EngineView) -> float | None:
    told = _first(rank.gpu_memory_utilization for rank in (engine.scrape.ranks if engine.scrape else ()))
    return engine.facts.gpu_memory_utilization if told is None else told


def _put_budgets(page: _Page, engine: EngineView, places: _Places) -> None:
    ranks = engine.scrape.ranks if engine.scrape else ()
    configured = _first(rank.pool.configured_bytes for rank in ranks)
    pool = configured if engine.facts.kv_pool_bytes is None else engine.facts.kv_pool_bytes
    page.put("oomwatch_engine_device_memory_configured_bytes", engine.facts.weights_bytes, engine.name, "weights")
    page.put("oomwatch_engine_device_memory_configured_bytes", pool, engine.name, "kv_pool")
    utilization = _utilization(engine)
    if utilization is None or configured is not None:
        return
    for device, used in (known(engine.gpu_memory) or {}).items():
        usable = places.usable(device)
        if usable is not None:
            labels = (engine.name, *places.labels(device))
            page.put("oomwatch_engine_device_budget_bytes", utilization * usable, *labels)
            page.put("oomwatch_engine_device_overrun_bytes", used - utilization * usable, *labels)


def _put_rank(page: _Page, engine: str, rank: RankReading) -> None:
    labels = (engine, rank.rank)
    for name, read in _RANK_GAUGES_AND_COUNTERS.items():
        page.put(name, read(rank), *labels)
    for reason, count in (known(rank.finished) or {}).items():
        page.put("oomwatch_engine_finished_requests_total", count, *labels, reason)
    level = known(rank.sleep_level)
    if level is not None:
        page.put_state("oomwatch_engine_sleep_state", SLEEP_LEVELS, level, *labels)
    for what, lengths in (("prompt", rank.prompt_lengths), ("generation", rank.generation_lengths)):
        for name, share in (("median", 0.5), ("p95", 0.95)):
            page.put(f"oomwatch_engine_{what}_length_{name}_tokens", quantile(known(lengths) or (), share), *labels)


def quantile(histogram: Histogram, share: float) -> float | None:
    """The value that ``share`` of what was counted do not exceed, interpolated as Prometheus does.

    None for an empty histogram, and where it lies beyond the last finite bound.
    """
    wanted = share * histogram[-1][1] if histogram else 0.0
    if wanted <= 0:
        return None
    low, before = 0.0, 0.0
    for bound, count in histogram:
        if count >= wanted:
            return low + (bound - low) * (wanted - before) / (count - before) if math.isfinite(bound) else None
        low, before = bound, count
    return None


def _put_host_processes(page: _Page, engine: str, processes: Iterable[HostProcess]) -> None:
    groups: dict[tuple[str, str], list[HostProcess]] = {}
    for process in processes:
        groups.setdefault((process.role, process.rank or ""), []).append(process)
    for labels, group in groups.items():
        anonymous = [known(process.anon) for process in group]
        counted = [size for size in anonymous if size is not None]
        page.put("oomwatch_engine_processes", len(group), engine, *labels)
        page.put("oomwatch_engine_process_resident_bytes", sum(process.rss for process in group), engine, *labels)
        if len(counted) == len(group):
            page.put("oomwatch_engine_process_anonymous_bytes", sum(counted), engine, *labels)
        start = min(process.start for process in group)
        page.put("oomwatch_engine_process_start_timestamp_seconds", start, engine, *labels)
    members = [process for group in groups.values() for process in group]
    limits = [process.memory_limit for process in members if process.memory_limit is not None]
    page.put("oomwatch_engine_host_memory_limit_bytes", min(limits, default=None), engine)
    for process in members:
        if process.container or process.pod_uid:
            page.put("oomwatch_engine_container_info", 1, engine, process.container or "", process.pod_uid or "")


def _put_allocator(page: _Page, report: AllocatorReport, labels: tuple[str, ...]) -> None:
    for name, statistic in ALLOCATOR_STATISTICS.items():
        page.put(f"oomwatch_allocator_{name}", report.stats.get(statistic), *labels)
    page.put("oomwatch_allocator_largest_free_block_bytes", report.largest_free_block, *labels)
    for smallest, size in report.free_by_size:
        page.put("oomwatch_allocator_free_bytes", size, *labels, units.size(smallest))
    page.put("oomwatch_allocator_releasable_bytes", report.releasable, *labels)
    page.put("oomwatch_allocator_private_reserved_bytes", report.private_reserved, *labels)
    page.put("oomwatch_allocator_private_free_bytes", report.private_free, *labels)
    if report.backend is not None:
        expandable = "" if report.expandable is None else str(report.expandable).lower()
        page.put("oomwatch_allocator_info", 1, *labels, report.backend, expandable)
    failure = report.failure
    if failure is not None:
        page.put("oomwatch_allocator_last_failure_timestamp_seconds", failure.t, *labels)
        for what in ("wanted", "free", "allocated", "reserved"):
            page.put("oomwatch_allocator_last_failure_bytes", getattr(failure, what), *labels, what)


def _first(values: Iterable[Maybe[T]]) -> T | None:
    """The first known value: ranks of one engine share their settings."""
    return next((value for value in values if not isinstance(value, Absent)), None)


# --- verdicts --------------------------------------------------------------------------------------------------


def _put_verdict(page: _Page, verdict: Verdict, places: _Places) -> None:
    labels = _verdict_labels(verdict, places)
    page.put("oomwatch_verdict_state_timestamp_seconds", verdict.since, *labels)
    if verdict.silenced:
        page.put("oomwatch_verdict_silenced", 1, *labels, verdict.silenced)
    if verdict.state == "unknown":
        page.put("oomwatch_verdict_unknown", 1, *labels, verdict.reason)
        return
    page.put("oomwatch_verdict_state", verdict.level, *labels)
    page.put("oomwatch_verdict_confidence_ratio", verdict.confidence, *labels)
    if verdict.eta is not None:
        page.put("oomwatch_verdict_eta_seconds", verdict.eta.seconds, *labels)
        page.put("oomwatch_verdict_eta_low_seconds", verdict.eta.low, *labels)
        page.put("oomwatch_verdict_eta_high_seconds", verdict.eta.high, *labels)
    if verdict.level < LEVEL["info"]:
        return
    if verdict.symptom_of is not None:
        page.put("oomwatch_verdict_symptom", 1, *labels, verdict.symptom_of)
    if verdict.incident:
        page.put("oomwatch_incident_info", 1, verdict.incident, *labels)
    for key, value in numbers(verdict.evidence).items():
        page.put("oomwatch_verdict_evidence", value, *labels, key)


def _put_derived(page: _Page, verdict: Verdict, places: _Places) -> None:
    for derived in DERIVED:
        if derived.verdict in (verdict.name, CATALOGUE[verdict.name].instead_of) and derived.key in verdict.gauges:
            about = _subject_labels(verdict.subject, derived.family.labels, places)
            page.put(derived.family.name, verdict.gauges[derived.key] * derived.factor, *about)


def _put_incidents(page: _Page, snapshot: Snapshot) -> None:
    """One for each that is open, by the killer of its cause; each killer from 0."""
    if not snapshot.t:
        return
    causes = {verdict.incident: verdict.killer for verdict in snapshot.verdicts if verdict.symptom_of is None}
    causes.pop("", None)
    for killer in KILLERS:
        page.put("oomwatch_incidents", sum(of == killer for of in causes.values()), killer)


def _verdict_labels(verdict: Verdict, places: _Places) -> tuple[str, ...]:
    return verdict.name, verdict.killer, *_subject_labels(verdict.subject, VERDICT_LABELS[2:], places)


def _subject_labels(subject: Subject, wanted: Iterable[str], places: _Places) -> tuple[str, ...]:
    """The labels of a verdict's subject that a family has; empty where one does not apply."""
    gpu, mig = places.labels(subject.gpu)
    labels = {**subject.labels(), "gpu": gpu, "mig": mig}
    return tuple(labels.get(name, "") for name in wanted)
