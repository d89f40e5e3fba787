"""Every metric family of this exporter, in one table: /metrics, its HELP texts and docs/metrics.md are made from it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import groupby

from oomwatch.sources.vllm.names import BY_FIELD, CACHE_CONFIG, CONFIG_LABELS, Exposed

# Units as OpenMetrics knows them, and what else a name may end in to say what it counts.
BASE_UNITS = ("bytes", "seconds", "ratio", "celsius", "watts")
COUNTED = ("tokens", "blocks", "requests", "processes", "pids", "devices", "rows", "segments", "files", "incidents")
RATES = ("bytes_per_second", "blocks_per_second")

_SUFFIXES = {"counter": "_total", "info": "_info"}


@dataclass(frozen=True)
class Family:
    """One metric family.

    ``name`` is the exposed name of its samples, ``kind`` is ``gauge``, ``counter`` or ``info`` (a gauge of value 1).
    ``source`` names the NVML call or vLLM series that it comes from, ``versions`` where that exists, ``cadence`` when
    it is read. ``absent`` says when there is no sample.
    """

    name: str
    meaning: str
    source: str
    section: str
    cadence: str
    kind: str = "gauge"
    labels: tuple[str, ...] = ()
    versions: str = "all"
    absent: str = "never"

    @property
    def help(self) -> str:
        return f"{self.meaning} Source: {self.source}; {self.cadence}."

    @property
    def base_name(self) -> str:
        """The name without the suffix that the client library adds for the kind."""
        return self.name.removesuffix(_SUFFIXES.get(self.kind, ""))

    @property
    def unit(self) -> str:
        """What a sample counts, by the end of the name; empty for flags and plain counts."""
        rate = next((rate for rate in RATES if self.base_name.endswith(f"_{rate}")), "")
        last = rate or self.base_name.rpartition("_")[2]
        return last if last in (*BASE_UNITS, *COUNTED, *RATES) else ""


# When a value was read. Nothing is read during a scrape of /metrics.
AT_START = "known from the start"
AT_A_TICK = "concluded at every tick, at least every 15 s"
AS_IT_HAPPENS = "updated when it happens"
EVERY_RUN = "updated at each run of the source"
EVERY_GPU = "read every intervals.gpu, cached in between"
EVERY_PROCESSES = "read every intervals.processes, cached in between"
EVERY_SCRAPE = "read every intervals.scrape, cached in between"
EVERY_HOST = "read every intervals.host, cached in between"
EVERY_LOG = "read every engine_logs.interval, cached in between"
EVERY_PROBE = "read every probe.interval, cached in between"
EVERY_DISCOVERY = "read every intervals.discovery, cached in between"

_MEMORY_CALL = "nvmlDeviceGetMemoryInfo"
_LIST_CALL = "nvmlDeviceGetComputeRunningProcesses"
_FIELDS_CALL = "nvmlDeviceGetFieldValues"
_LIST_ABSENT = "the process list cannot be read or contradicts itself"
_SUM_ABSENT = f"{_LIST_ABSENT}, or an entry has no number"


def _daemon() -> Iterator[Family]:
    family = partial(Family, source="this program", section="The daemon", cadence=AS_IT_HAPPENS)
    yield family(
        "oomwatch_build_info",
        "Version of oomwatch and of its Python, as labels.",
        kind="info",
        cadence=AT_START,
        labels=("version", "python_version"),
    )
    yield family(
        "oomwatch_config_info", "SHA-256 of the configuration in use, as a label.", kind="info", labels=("sha256",)
    )
    yield family(
        "oomwatch_config_last_reload_successful",
        "1 when the last attempt to load the configuration succeeded, 0 when the older one stayed in use.",
    )
    yield family(
        "oomwatch_config_last_reload_success_timestamp_seconds",
        "Unix time at which the configuration in use was loaded.",
    )
    yield family(
        "oomwatch_snapshot_timestamp_seconds",
        "Unix time that this page is of: everything on it is of one moment.",
        absent="nothing was observed yet",
    )
    yield family(
        "oomwatch_internal_errors_total",
        "Observations that could not be folded, snapshots that could not be built, jobs that failed: defects of "
        "oomwatch; from 0.",
        kind="counter",
    )


def _history() -> Iterator[Family]:
    family = partial(
        Family,
        source="this program",
        section="The memory on disk",
        cadence=AS_IT_HAPPENS,
        absent="nothing is kept (history.enabled is false, or the demo)",
    )
    yield family("oomwatch_history_up", "1 while the database is written, 0 while memory alone keeps what is observed.")
    yield family("oomwatch_history_size_bytes", "Size of the database's files.")
    yield family(
        "oomwatch_history_oldest_timestamp_seconds",
        "Unix time of the oldest observation that is kept.",
        absent="nothing was written yet",
    )
    yield family(
        "oomwatch_history_last_write_timestamp_seconds",
        "Unix time of the last successful write.",
        absent="nothing was written yet",
    )
    yield family("oomwatch_history_write_seconds", "How long the last write took.", absent="nothing was written yet")
    yield family("oomwatch_history_waiting_bytes", "What memory holds until it can be written.")
    yield family("oomwatch_history_write_failures_total", "Writes that failed; from 0.", kind="counter")
    yield family(
        "oomwatch_history_lost_observations_total",
        "Observations that could not be kept, for want of a database for long; from 0.",
        kind="counter",
    )


def _notifications() -> Iterator[Family]:
    family = partial(
        Family,
        source="this program",
        section="Notifications",
        cadence=AS_IT_HAPPENS,
        labels=("target",),
        absent="alerting names no Alertmanager and no webhook",
    )
    yield family(
        "oomwatch_notifications_total",
        "Posts to an Alertmanager or a webhook that were accepted since oomwatch started.",
        kind="counter",
    )
    yield family(
        "oomwatch_notification_failures_total",
        "Posts that were not accepted; each is tried again as long as what it told holds.",
        kind="counter",
    )
    yield family(
        "oomwatch_notifications_waiting",
        "Alerts and ends of alerts that the target has not accepted yet.",
    )
    yield family(
        "oomwatch_notification_last_success_timestamp_seconds",
        "Unix time of the last accepted post.",
        absent="nothing was accepted yet, or alerting names no target",
    )


def _sources() -> Iterator[Family]:
    family = partial(
        Family,
        source="this program",
        section="Sources",
        cadence=EVERY_RUN,
        labels=("source", "target"),
        absent="before its first run",
    )
    yield family(
        "oomwatch_source_up",
        "1 when the source's last run for this target succeeded, 0 when it failed or the source has fallen silent.",
    )
    yield family(
        "oomwatch_source_last_run_timestamp_seconds",
        "Unix time of the source's last run for this target, whether or not it succeeded.",
    )
    yield family(
        "oomwatch_source_last_success_timestamp_seconds",
        "Unix time of the source's last successful run for this target.",
        absent="before its first success",
    )
    yield family(
        "oomwatch_source_duration_seconds",
        "How long the source's last run for this target took.",
        absent="before its first run, and while the source is silent",
    )
    yield family(
        "oomwatch_source_failures_total",
        "Failed runs of the source for this target since oomwatch started; from 0.",
        kind="counter",
        absent="never",
    )


def _nvml() -> Iterator[Family]:
    family = partial(Family, section="NVIDIA driver", cadence=EVERY_GPU)
    untold = "the driver library was never reached, or does not say"
    yield family(
        "oomwatch_nvml_state",
        "1 for the state that the driver library is in, 0 for every other.",
        "nvmlInitWithFlags and the errors of later calls",
        labels=("state",),
        absent="GPUs are not read (nvml.enabled)",
    )
    yield family(
        "oomwatch_nvml_info",
        "Versions of the driver, of NVML, and of CUDA as the driver supports it.",
        "nvmlSystemGetDriverVersion, nvmlSystemGetNVMLVersion, nvmlSystemGetCudaDriverVersion_v2",
        kind="info",
        labels=("driver_version", "nvml_version", "cuda_version"),
        absent=untold,
    )
    yield family(
        "oomwatch_nvml_devices",
        "GPUs that the driver counts; fewer than before means that one was lost.",
        "nvmlDeviceGetCount_v2",
        absent=untold,
    )
    yield family(
        "oomwatch_nvml_unresolved_pids",
        "Process ids in the GPUs' lists that this host's /proc does not have. "
        "Above 0 for long: oomwatch runs without the host's pid namespace.",
        f"{_LIST_CALL} and /proc",
        cadence=EVERY_PROCESSES,
        absent="no process of the host was read lately",
    )
    count = partial(
        family,
        source="this program",
        cadence=AS_IT_HAPPENS,
        kind="counter",
        labels=("call",),
        absent="GPUs are not read",
    )
    yield count("oomwatch_nvml_calls_total", "Calls into the driver library since oomwatch started, by function.")
    yield count("oomwatch_nvml_seconds_total", "Time spent in calls into the driver library, by function.")
    yield count(
        "oomwatch_nvml_errors_total",
        "Errors that calls into the driver library returned, by function and NVML's name of the error; the main "
        "functions' usual errors from 0.",
        labels=("call", "error"),
    )


def _memory(section: str, prefix: str, labels: tuple[str, ...]) -> Iterator[Family]:
    """What a device and a slice have in common."""
    unread = f"memory cannot be read ({prefix}_value_absent says why)"
    family = partial(Family, section=section, cadence=EVERY_GPU, labels=labels, absent=unread)
    listed = partial(family, cadence=EVERY_PROCESSES)
    ratio = "A used ratio is used / (total - reserved)."
    yield family(
        f"{prefix}_memory_total_bytes",
        f"Memory in all, the driver's reserve included. {ratio}",
        f"{_MEMORY_CALL}_v2, else {_MEMORY_CALL}",
    )
    yield family(
        f"{prefix}_memory_reserved_bytes",
        "Memory that the driver keeps for itself; no process can have it.",
        f"{_MEMORY_CALL}_v2",
        versions="driver 525 and newer",
        absent=f"{unread}, or only the older call answers",
    )
    yield family(
        f"{prefix}_memory_used_bytes",
        f"Memory in use, the driver's reserve left out. {ratio}",
        f"{_MEMORY_CALL}_v2; else {_MEMORY_CALL}, whose number includes the reserve",
    )
    yield family(
        f"{prefix}_memory_free_bytes",
        "Memory that a process can still have.",
        f"{_MEMORY_CALL}_v2, else {_MEMORY_CALL}",
    )
    yield family(
        f"{prefix}_memory_used_includes_reserved",
        f"1 where {prefix}_memory_used_bytes includes the driver's reserve as only the older call answers, else 0.",
        f"{_MEMORY_CALL}_v2",
    )
    yield listed(
        f"{prefix}_memory_held_bytes",
        "Memory held by all processes of one holder. holder_kind is engine, neighbour (named in the configuration) "
        "or unknown; holder is its name.",
        _LIST_CALL,
        labels=(*labels, "holder_kind", "holder"),
        absent=_SUM_ABSENT,
    )
    yield listed(
        f"{prefix}_memory_unowned_bytes",
        "Memory in use that no listed process accounts for. CUDA managed memory counts here.",
        f"{_MEMORY_CALL}_v2 less the sum of {_LIST_CALL}",
        versions="driver 525 and newer",
        absent=f"{unread}, or {_SUM_ABSENT}, or used includes the reserve, or memory is sliced or unified",
    )
    yield listed(f"{prefix}_processes", "Processes in the compute list.", _LIST_CALL, absent=_LIST_ABSENT)
    yield listed(
        f"{prefix}_process_memory_bytes",
        "Memory of one process; at most exposition.process_series_per_gpu, engines' processes first, then by size.",
        _LIST_CALL,
        labels=(*labels, "pid"),
        absent="the driver gives no number, or the process is beyond the limit",
    )
    yield listed(
        f"{prefix}_memory_overhead_bytes",
        "Memory that the engines' processes on this device hold beyond weights and KV pool (contexts, libraries, "
        "graphs): the sum over engines.",
        f"{_LIST_CALL} less the known components",
        absent="no engine is on the device, or the overhead of one of them is not known",
    )
    yield listed(
        f"{prefix}_process_memory_overhead_bytes",
        "Memory that one process of an engine holds beyond the weights and the KV pool of a rank; all of its memory, "
        "where these cannot be in it.",
        f"{_LIST_CALL} less the known components",
        labels=(*labels, "pid"),
        absent="it is no process of an engine, the engine's components are not known, or the process is beyond the "
        "limit",
    )
    yield listed(
        f"{prefix}_process_info",
        f"Name and holder of a process, to be joined with {prefix}_process_memory_bytes.",
        f"{_LIST_CALL} and /proc",
        kind="info",
        labels=(*labels, "pid", "process", "holder_kind", "holder"),
        absent="the process is beyond the limit",
    )
    yield listed(
        f"{prefix}_omitted_processes",
        "Processes in the compute list that exposition.process_series_per_gpu leaves out.",
        _LIST_CALL,
        absent=_LIST_ABSENT,
    )


def _gpus() -> Iterator[Family]:
    section = "GPUs"
    unsupported = "the device does not support it, or it cannot be read (oomwatch_gpu_value_absent says why)"
    family = partial(Family, section=section, cadence=EVERY_GPU, labels=("gpu",), absent=unsupported)
    yield family(
        "oomwatch_gpu_info",
        "Identity of a GPU, to be joined by gpu, its uuid.",
        "nvmlDeviceGetHandleByIndex_v2, nvmlDeviceGetUUID, nvmlDeviceGetName, nvmlDeviceGetPciInfo_v3",
        kind="info",
        cadence=AT_START,
        labels=("gpu", "index", "name", "pci_bus_id"),
        absent="the device was never read",
    )
    yield family(
        "oomwatch_gpu_last_seen_timestamp_seconds",
        "Unix time at which the device's memory was last read; stays when the device is lost.",
        f"{_MEMORY_CALL}_v2",
        absent="it was never read",
    )
    yield family(
        "oomwatch_gpu_value_absent",
        "1 for each reading of a device that has no value, with the reason: NVML's error without NVML_ERROR_, or HUNG, "
        "IMPLAUSIBLE, MIG_ENABLED, STALE.",
        "the NVML call of that reading",
        labels=("gpu", "reading", "reason"),
        absent="the reading has a value",
    )
    yield from _memory(section, "oomwatch_gpu", ("gpu",))
    yield family(
        "oomwatch_gpu_memory_unified",
        "1 where the device shares the host's memory: its total is then the host's, used the sum of its processes.",
        f"{_MEMORY_CALL} (NOT_SUPPORTED), /proc/meminfo",
        absent="the device was not read lately",
    )
    slow = partial(family, cadence=EVERY_PROCESSES)
    yield slow(
        "oomwatch_gpu_utilization_ratio",
        "Share of the driver's last sample period in which a kernel ran.",
        "nvmlDeviceGetUtilizationRates",
    )
    yield slow("oomwatch_gpu_temperature_celsius", "Temperature of the GPU.", "nvmlDeviceGetTemperature")
    yield slow(
        "oomwatch_gpu_power_watts",
        "Power that the device draws.",
        f"{_FIELDS_CALL}, field 186, else nvmlDeviceGetPowerUsage",
    )
    for severity, did, field in (("corrected", "corrected", 3), ("uncorrected", "could not correct", 4)):
        yield slow(
            f"oomwatch_gpu_ecc_{severity}_errors_total",
            f"Memory errors that ECC {did} since the driver was loaded.",
            f"{_FIELDS_CALL}, field {field}",
            kind="counter",
        )
    remapped = partial(slow, versions="Ampere and newer")
    yield remapped(
        "oomwatch_gpu_remapped_rows",
        "Rows of memory replaced in the device's life, by the cause: correctable or uncorrectable errors.",
        f"{_FIELDS_CALL}, fields 142 and 143",
        labels=("gpu", "cause"),
    )
    yield remapped(
        "oomwatch_gpu_row_remap_pending",
        "1 when a row waits for a GPU reset to be replaced, else 0.",
        f"{_FIELDS_CALL}, field 144",
    )
    yield remapped(
        "oomwatch_gpu_row_remap_failed", "1 when a row could not be replaced, else 0.", f"{_FIELDS_CALL}, field 145"
    )
    yield slow(
        "oomwatch_gpu_recovery_needed",
        "1 for the action that the driver asks for to recover the device, 0 for every other; all 0 if for none.",
        f"{_FIELDS_CALL}, field 230",
        labels=("gpu", "action"),
    )
    event = partial(family, source="nvmlEventSetWait_v2", cadence=AS_IT_HAPPENS, labels=("gpu", "code"))
    yield event(
        "oomwatch_gpu_xid_errors_total",
        "Xid errors that the driver reported since oomwatch started, by Xid code; well-known codes from 0. They stay 0 "
        "on a device for which the driver reports none (log event xid_events_unavailable).",
        kind="counter",
        absent="an Xid of another code was not reported yet",
    )
    yield event(
        "oomwatch_gpu_xid_last_timestamp_seconds",
        "Unix time at which an Xid of this code was last reported.",
        absent="it was not reported yet",
    )


def _mig() -> Iterator[Family]:
    family = partial(Family, section="MIG slices", cadence=EVERY_GPU)
    yield family(
        "oomwatch_mig_info",
        "Identity of a MIG slice, to be joined by mig, its uuid.",
        "nvmlDeviceGetMigDeviceHandleByIndex, nvmlDeviceGetUUID, nvmlDeviceGetGpuInstanceId, "
        "nvmlDeviceGetComputeInstanceId",
        kind="info",
        labels=("gpu", "mig", "gpu_instance", "compute_instance"),
        absent="the device was not read lately",
    )
    yield family(
        "oomwatch_mig_value_absent",
        "1 for each reading of a slice that has no value, with the reason, as in oomwatch_gpu_value_absent.",
        "the NVML call of that reading",
        labels=("gpu", "mig", "reading", "reason"),
        absent="the reading has a value",
    )
    yield from _memory("MIG slices", "oomwatch_mig", ("gpu", "mig"))


def _engines() -> Iterator[Family]:
    untold = "neither the page nor the configuration nor the command line tells"
    family = partial(Family, section="Engines", cadence=EVERY_SCRAPE, labels=("engine",), absent=untold)
    yield family(
        "oomwatch_engine_info",
        "Identity of an engine: the served model, vLLM's version, and whether configuration or discovery named it.",
        "label model_name of vLLM's series, /version",
        kind="info",
        labels=("engine", "model_name", "vllm_version", "origin"),
        absent="never; a label is empty while it is not known",
    )
    yield family(
        "oomwatch_engine_up",
        "1 when the last scrape of the engine was answered, else 0. Whether it works is oomwatch_engine_state.",
        "the engine's /metrics",
        absent="it was not scraped yet, or the scraper has fallen silent",
    )
    yield family(
        "oomwatch_engine_state",
        "1 for the state that the engine is in, 0 for every other.",
        "the engine's /metrics and /health, and its processes",
        labels=("engine", "state"),
        absent="never",
    )
    yield family(
        "oomwatch_engine_last_seen_timestamp_seconds",
        "Unix time of the last page that the engine answered; stays when the engine is gone.",
        "the engine's /metrics",
        absent="it never answered",
    )
    yield family(
        "oomwatch_engine_last_progress_timestamp_seconds",
        "Unix time at which a token, step or finished-request counter last moved, on the rank where that is longest "
        "ago; moves on while there is no work.",
        "vllm:prompt_tokens_total, vllm:generation_tokens_total, vllm:iteration_tokens_total_count, "
        "vllm:request_success_total",
        absent="it never answered",
    )
    yield family(
        "oomwatch_engine_restarts_total",
        "Restarts of the engine that were seen since oomwatch started; from 0.",
        "falling counters, process_start_time_seconds",
        kind="counter",
        absent="never",
    )
    yield family(
        "oomwatch_engine_gpu_memory_utilization_ratio",
        "Share of a device's memory that the engine was told to take (--gpu-memory-utilization).",
        "vllm:cache_config_info, else the configuration or the command line",
    )
    yield family(
        "oomwatch_engine_max_model_length_tokens",
        "Longest sequence that the engine accepts (--max-model-len).",
        "the configuration or the command line",
        cadence=EVERY_DISCOVERY,
    )
    yield family(
        "oomwatch_engine_prefix_caching_enabled",
        "1 when prefix caching is on, 0 when it is off.",
        "vllm:cache_config_info",
        absent="the engine does not answer, or its page does not tell",
    )
    yield family(
        "oomwatch_engine_kv_connector_enabled",
        "1 when a KV connector is in use, which may hold blocks of finished requests for a while, else 0.",
        "vllm:external_prefix_cache_queries_total and the connectors' series, else configuration or command line",
    )
    held = partial(family, cadence=EVERY_PROCESSES, labels=("engine", "gpu", "mig"))
    yield held(
        "oomwatch_engine_device_memory_bytes",
        "Device memory that the engine's processes hold; mig is empty but for a slice.",
        _LIST_CALL,
        absent=f"the engine's processes are not known, or {_SUM_ABSENT}",
    )
    yield held(
        "oomwatch_engine_device_memory_overhead_bytes",
        "Device memory that the engine's processes hold beyond weights and KV pool: contexts, libraries, graphs.",
        f"{_LIST_CALL} less the known components",
        absent="one of the components is not known",
    )


def _ranks() -> Iterator[Family]:
    no_series = "the engine does not answer, or its page has no such series (statistics disabled, no traffic yet)"
    no_config = (
        f"the engine does not answer, or {CACHE_CONFIG} is missing (Rust front-end) or says None (0.8.0 to 0.8.5)"
    )

    def read(name: str, field: str, meaning: str, kind: str = "gauge", label: str = "") -> Family:
        known = BY_FIELD[field]
        if kind == "counter":
            meaning += " Starts again from 0 with the engine."
        return Family(
            f"oomwatch_engine_{name}",
            meaning,
            (" plus " if known.add else ", else ").join(known.names),
            section="Ranks of engines",
            cadence=EVERY_SCRAPE,
            kind=kind,
            labels=("engine", "rank", label) if label else ("engine", "rank"),
            versions=_versions(known.exposed),
            absent=no_series,
        )

    def configured(name: str, key: str, meaning: str, otherwise: str = "") -> Family:
        label = CONFIG_LABELS[key]
        return Family(
            f"oomwatch_engine_kv_cache_{name}",
            meaning,
            f"{CACHE_CONFIG}, label {label.name}{otherwise}",
            section="Ranks of engines",
            cadence=EVERY_SCRAPE,
            labels=("engine", "rank"),
            versions=_versions((label,)),
            absent=no_config,
        )

    yield read(
        "kv_cache_usage_ratio",
        "usage",
        "Share of the rank's usable KV blocks that requests hold; blocks that are only cached count as free.",
    )
    yield configured(
        "capacity_blocks",
        "blocks",
        "Usable KV blocks of the rank: without the null block, and the rank's share of the sum over ranks.",
        "; else the configuration",
    )
    yield configured("used_blocks", "blocks", "KV blocks of the rank that requests hold.", " and the usage")
    yield configured(
        "capacity_tokens",
        "tokens",
        "Tokens that fit into the rank's KV blocks.",
        "; blocks x block size for V0",
    )
    yield configured("block_size_tokens", "block_size", "Tokens in one KV block.")
    yield configured(
        "max_concurrency_requests",
        "max_concurrency",
        "Requests of the longest length that fit into the rank's KV blocks at once.",
        "; else capacity in tokens / --max-model-len",
    )
    yield configured(
        "configured_bytes", "configured_bytes", "KV memory per GPU as the operator fixed it (--kv-cache-memory-bytes)."
    )
    yield read("running_requests", "running", "Requests in the batch of the rank.")
    yield read("waiting_requests", "waiting", "Requests that wait, whatever for.")
    yield read(
        "waiting_for_capacity_requests",
        "waiting_capacity",
        "Requests that wait for room in the batch or in the KV blocks.",
    )
    yield read(
        "waiting_deferred_requests",
        "waiting_deferred",
        "Requests that wait for anything but room: an adapter, a KV transfer, a blocked state.",
    )
    yield read("swapped_requests", "swapped", "Requests whose KV blocks were moved to the host's memory.")
    yield read(
        "preemptions_total",
        "preemptions",
        "Times that a request was thrown out of the batch for want of KV blocks.",
        "counter",
    )
    yield read("prompt_tokens_total", "prompt_tokens", "Prompt tokens processed.", "counter")
    yield read("generation_tokens_total", "generation_tokens", "Tokens generated.", "counter")
    yield read("steps_total", "steps", "Steps of the engine core.", "counter")
    yield read(
        "finished_requests_total", "finished", "Requests that ended, by vLLM's finished_reason.", "counter", "reason"
    )
    yield read(
        "prefix_cache_queries_total",
        "prefix_queries",
        "Look-ups in the prefix cache, in tokens from 0.9.0 on, in blocks before.",
        "counter",
    )
    yield read(
        "prefix_cache_hits_total",
        "prefix_hits",
        "Hits of the prefix cache, in tokens from 0.9.0 on, in blocks before.",
        "counter",
    )
    yield read(
        "kv_expired_requests_total",
        "kv_expired",
        "Finished requests whose KV blocks were held for a transfer that never came.",
        "counter",
    )
    yield read(
        "sleep_state",
        "sleep_level",
        "1 for the rank's level of sleep, 0 for every other: awake, paused, weights_offloaded, discard_all.",
        label="state",
    )


def _versions(exposed: tuple[Exposed, ...]) -> str:
    if len(exposed) == 1:
        return exposed[0].versions
    return ", ".join(f"{name.name} {name.versions}" for name in exposed)


def _processes() -> Iterator[Family]:
    none = "no process of the engine was found on this host"
    family = partial(
        Family,
        section="Host processes of engines",
        cadence=EVERY_HOST,
        labels=("engine", "role", "process_rank"),
        absent=none,
    )
    yield family(
        "oomwatch_engine_processes",
        "Processes of the engine by role (api_server, engine_core, worker, other) and the rank in their title.",
        "/proc",
    )
    yield family(
        "oomwatch_engine_process_resident_bytes",
        "Resident memory of the engine's processes of one role and rank; shared pages count in each.",
        "VmRSS in /proc/PID/status",
    )
    yield family(
        "oomwatch_engine_process_anonymous_bytes",
        "Anonymous memory of the engine's processes of one role and rank: page cache and shared files are left out.",
        "RssAnon in /proc/PID/status",
        absent=f"{none}, or it cannot be read for one of them",
    )
    yield family(
        "oomwatch_engine_process_start_timestamp_seconds",
        "Unix time at which the oldest of the engine's processes of one role and rank started.",
        "/proc/PID/stat",
    )
    yield family(
        "oomwatch_engine_host_memory_limit_bytes",
        "Smallest limit of host memory of the cgroups that the engine's processes are in.",
        "memory.max (cgroup v2), memory.limit_in_bytes (v1)",
        labels=("engine",),
        absent=f"{none}, or none is limited",
    )
    yield family(
        "oomwatch_engine_container_info",
        "Container id and pod uid of the engine's processes, to be joined with cAdvisor or kube-state-metrics.",
        "/proc/PID/cgroup",
        kind="info",
        labels=("engine", "container_id", "pod_uid"),
        absent=f"{none}, or they run in no container",
    )


STARTUP_COMPONENTS = {
    "weights": "weights",
    "non_torch": "non_torch",
    "weights_and_non_torch": "consumed",
    "activation_peak": "activation",
    "graphs": "graphs",
    "graphs_estimate": "graphs_estimate",
    "kv_pool": "kv_pool",
}
"""The components of a start's budget, by the label that the metrics give them, with the field of enginelog's Budget."""


def _logs() -> Iterator[Family]:
    none = "no log of the engine is read, its latest start has ended, or this release does not log it"
    family = partial(
        Family,
        section="What engines log",
        cadence=EVERY_LOG,
        labels=("engine", "rank", "worker"),
        absent=none,
    )
    yield family(
        "oomwatch_engine_startup_memory_bytes",
        "What one worker measured at its latest start. weights_and_non_torch is one figure from 0.27.1 on; "
        "graphs_estimate is what was set aside for graphs, graphs what they took.",
        "vLLM's log",
        labels=("engine", "rank", "worker", "component"),
    )
    yield family(
        "oomwatch_engine_startup_promised_bytes",
        "What one worker promised itself at its latest start: the share of the device times its total.",
        "vLLM's log",
        versions="V0 from 0.6.4, V1 from 0.10.2",
    )
    yield family(
        "oomwatch_engine_startup_free_bytes",
        "What was free on the worker's device at its latest start.",
        "vLLM's log",
        versions=">= 0.10.2",
    )
    yield family(
        "oomwatch_engine_startup_device_total_bytes",
        "Total memory of the worker's device, as the engine sees it: without the driver's reserve.",
        "vLLM's log",
        versions="V0 from 0.6.4, V1 from 0.10.2",
    )
    yield family(
        "oomwatch_engine_startup_kv_tokens",
        "Tokens that the rank's KV pool holds, as logged at its latest start.",
        "vLLM's log",
        labels=("engine", "rank"),
        versions=">= 0.8.2",
    )
    yield family(
        "oomwatch_engine_startup_max_concurrency_requests",
        "Requests of the longest length that the rank's KV pool holds at once, as logged at its latest start.",
        "vLLM's log",
        labels=("engine", "rank"),
    )
    yield family(
        "oomwatch_engine_startup_timestamp_seconds",
        "Unix time at which the engine's latest start began.",
        "vLLM's log",
        labels=("engine",),
        absent="no log of the engine is read, or its beginning was not",
    )
    yield family(
        "oomwatch_engine_out_of_memory_total",
        "Times that the allocator ran out, all ranks within a minute being one, by the killer that the error's numbers "
        "force, and by when: startup or runtime.",
        "vLLM's log",
        kind="counter",
        labels=("engine", "killer", "when"),
        absent="no log of the engine is read",
    )


ALLOCATOR_STATISTICS = {
    "allocated_bytes": "allocated_bytes.all.current",
    "allocated_peak_bytes": "allocated_bytes.all.peak",
    "reserved_bytes": "reserved_bytes.all.current",
    "reserved_peak_bytes": "reserved_bytes.all.peak",
    "active_bytes": "active_bytes.all.current",
    "requested_bytes": "requested_bytes.all.current",
    "inactive_split_bytes": "inactive_split_bytes.all.current",
    "segments": "segment.all.current",
    "retries_total": "num_alloc_retries",
    "failures_total": "num_ooms",
}
"""The families oomwatch_allocator_… that show a statistic of torch.cuda.memory_stats as it is, with its name there."""

BLOCK_OWNERSHIP = ("free", "living", "finished", "ownerless")


def _probes() -> Iterator[Family]:
    silent = (
        "no oomwatch-probe runs inside the process, it is silent, or it found a PyTorch or vLLM that it does not know"
    )
    family = partial(
        Family,
        section="Inside engines (oomwatch-probe)",
        cadence=EVERY_PROBE,
        labels=("engine", "process_rank", "gpu", "mig"),
        absent=silent,
    )
    meanings = {
        "allocated_bytes": "Device memory that PyTorch's allocator has handed out to tensors of one worker.",
        "allocated_peak_bytes": "The most that was handed out at once since the worker's own last reset of the peak.",
        "reserved_bytes": "Device memory that the allocator holds: handed out, and free for the next tensor.",
        "reserved_peak_bytes": "The most that was held at once since the worker's own last reset of the peak.",
        "active_bytes": "Device memory that is handed out, or still waits for a stream to be done with it.",
        "requested_bytes": "What tensors asked for, before the allocator rounds it up.",
        "inactive_split_bytes": "Free pieces beside a block in use: they cannot be given back to the driver.",
        "segments": "Pieces of device memory that the allocator got from the driver.",
        "retries_total": "Times that no piece fitted, so that the allocator gave its cache back to the driver and "
        "tried again. Starts again from 0 with the worker.",
        "failures_total": "Allocations that ended in an out-of-memory error. Starts again from 0 with the worker.",
    }
    for name, statistic in ALLOCATOR_STATISTICS.items():
        yield family(
            f"oomwatch_allocator_{name}",
            meanings[name],
            f"torch.cuda.memory_stats, {statistic}",
            kind="counter" if name.endswith("_total") else "gauge",
        )
    of_snapshot = partial(
        family, source="torch.cuda.memory_snapshot", absent=f"{silent}, or the snapshot has not been read yet"
    )
    pools = "outside the pools of graphs and of sleep mode"
    yield of_snapshot("oomwatch_allocator_largest_free_block_bytes", f"Largest piece that is free, {pools}.")
    yield of_snapshot(
        "oomwatch_allocator_free_bytes",
        f"Free pieces {pools}, by size: size_class is the smallest of its class, the next begins at twice it.",
        labels=("engine", "process_rank", "gpu", "mig", "size_class"),
    )
    yield of_snapshot(
        "oomwatch_allocator_releasable_bytes", f"Free memory {pools} that could be given back to the driver at once."
    )
    yield family(
        "oomwatch_allocator_private_reserved_bytes",
        "What the pools of graphs and of sleep mode hold: no other tensor gets any of it.",
        "torch.cuda.memory_stats",
    )
    yield of_snapshot("oomwatch_allocator_private_free_bytes", "Free memory in the pools of graphs and of sleep mode.")
    yield family(
        "oomwatch_allocator_info",
        "Which allocator of PyTorch the worker has, and whether its segments are expandable.",
        "torch.cuda.get_allocator_backend and the allocator's settings",
        kind="info",
        labels=("engine", "process_rank", "gpu", "mig", "backend", "expandable_segments"),
    )
    failed = partial(family, absent=f"{silent}, or no allocation has failed")
    yield failed(
        "oomwatch_allocator_last_failure_timestamp_seconds",
        "Unix time of the last allocation that ended in an out-of-memory error.",
        "PyTorch's observer of out-of-memory errors",
    )
    yield failed(
        "oomwatch_allocator_last_failure_bytes",
        "The numbers of that moment, by what: wanted, free (on the device, by the driver), allocated and reserved.",
        "PyTorch's observer of out-of-memory errors",
        labels=("engine", "process_rank", "gpu", "mig", "what"),
    )
    yield family(
        "oomwatch_probe_files",
        "Files of oomwatch-probe by what became of them: told (read and believed), silent (no heartbeat), unreadable, "
        "stranger (of no known engine's process), left_over (its process has ended; removed a minute later).",
        "/proc and the folders of the configuration",
        labels=("state",),
        absent="there is none",
    )
    core = partial(
        family,
        source="vLLM's block pool and scheduler, between two steps",
        labels=("engine", "rank"),
    )
    yield core(
        "oomwatch_kv_blocks",
        "Usable KV blocks of the rank by ownership: free, living (requests that exist), finished (requests whose "
        "blocks are freed later, for a KV connector), ownerless (held by nobody that exists: lost). In all, the pool.",
        labels=("engine", "rank", "ownership"),
    )
    yield core(
        "oomwatch_kv_cached_free_blocks",
        "Those of the free KV blocks that a prefix can still hit.",
        absent=f"{silent}, or they have not been counted yet",
    )


def _budgets() -> Iterator[Family]:
    family = partial(Family, section="Engines", cadence=EVERY_PROCESSES, labels=("engine", "gpu", "mig"))
    yield family(
        "oomwatch_engine_device_budget_bytes",
        "Device memory that the engine was told to take: utilization x (total - reserved).",
        f"{_MEMORY_CALL}_v2 and vllm:cache_config_info, else the configuration or the command line",
        absent="the utilization or the device's memory is not known, or --kv-cache-memory-bytes is set",
    )
    yield family(
        "oomwatch_engine_device_overrun_bytes",
        "What the engine's processes hold beyond oomwatch_engine_device_budget_bytes; negative while below.",
        f"{_LIST_CALL} less the budget",
        absent=f"the budget is not known, or {_SUM_ABSENT}",
    )
    yield family(
        "oomwatch_engine_device_memory_configured_bytes",
        "Device memory of the engine's weights or kv_pool on one GPU, as stated or logged; the rest is overhead.",
        "the configuration, vLLM's log, or vllm:cache_config_info",
        cadence=EVERY_SCRAPE,
        labels=("engine", "component"),
        absent="neither the configuration, the log nor the page tells",
    )


def _lengths() -> Iterator[Family]:
    for what in ("prompt", "generation"):
        for quantile, words in (("median", "half of"), ("p95", "19 of 20")):
            yield Family(
                f"oomwatch_engine_{what}_length_{quantile}_tokens",
                f"Length that the {what}s of {words} the requests finished since the engine started do not exceed, "
                "interpolated within vLLM's buckets.",
                BY_FIELD[f"{what}_lengths"].names[0],
                section="Ranks of engines",
                cadence=EVERY_SCRAPE,
                labels=("engine", "rank"),
                absent="the engine does not answer, no request has finished, or it lies beyond the last bucket",
            )


VERDICT_LABELS = ("verdict", "killer", "engine", "rank", "gpu", "mig", "pid")
"""What a verdict is about; labels that do not apply are empty."""


def _verdicts() -> Iterator[Family]:
    undecided = "there is no such subject, or the verdict is unknown (oomwatch_verdict_unknown says why)"
    family = partial(
        Family,
        source="this program",
        section="Verdicts",
        cadence=AT_A_TICK,
        labels=VERDICT_LABELS,
        absent=undecided,
    )
    yield family("oomwatch_verdict_state", "What is concluded: 0 clear, 1 info, 2 ticket, 3 page.")
    yield family(
        "oomwatch_verdict_unknown",
        "1 for each verdict that cannot be concluded, with the reason.",
        labels=(*VERDICT_LABELS, "reason"),
        absent="the verdict is known",
    )
    yield family(
        "oomwatch_verdict_state_timestamp_seconds",
        "Unix time at which the present state began, unknown among them.",
        absent="there is no such subject",
    )
    yield family("oomwatch_verdict_confidence_ratio", "How sure the state is right.")
    for bound, words in (("", ""), ("low_", "Lower bound of the "), ("high_", "Upper bound of the ")):
        meaning = "time until what the verdict is about runs out at the present pace"
        yield family(
            f"oomwatch_verdict_eta_{bound}seconds",
            f"{words}{meaning if words else meaning.capitalize()}"
            f"{'; it lies within the bounds with about 80 % probability' if not words else ''}.",
            absent="there is no pace toward an end",
        )
    yield family(
        "oomwatch_verdict_symptom",
        "1 for each verdict that another one explains; cause is that one's name. It should not alert by itself.",
        labels=(*VERDICT_LABELS, "cause"),
        absent="the verdict is clear, unknown, or a cause itself",
    )
    yield family(
        "oomwatch_verdict_silenced",
        "1 for each verdict that a planned silence of the configuration holds back, with its reason.",
        labels=(*VERDICT_LABELS, "reason"),
        absent="no planned silence holds",
    )
    yield family(
        "oomwatch_verdict_evidence",
        "The numbers that led to a verdict of info or more; the unit is in key: bytes, seconds, ratio, else a count.",
        labels=(*VERDICT_LABELS, "key"),
        absent="the verdict is clear or unknown",
    )
    yield family(
        "oomwatch_incidents",
        "Open incidents, by the killer of their cause; causes and symptoms together are one.",
        labels=("killer",),
        absent="nothing was observed yet",
    )
    yield family(
        "oomwatch_incident_info",
        "Which incident a verdict of info or more belongs to, to be joined.",
        kind="info",
        labels=("incident", *VERDICT_LABELS),
        absent="the verdict is clear or unknown",
    )


@dataclass(frozen=True)
class Derived:
    """A number that a detector works out from many readings, exported whatever its verdict says.

    ``key`` is its name in the detector's evidence; ``factor`` makes base units of it. Its labels come from the
    verdict's subject.
    """

    family: Family
    verdict: str
    key: str
    factor: float = 1.0


def _derived() -> Iterator[Derived]:
    on_rank = ("engine", "rank")
    on_process = ("engine", "pid")
    on_held = ("engine", "gpu", "mig", "pid")
    on_device = ("gpu", "mig")
    per_hour = 1 / 3600

    def of(name: str, verdict: str, key: str, labels: tuple[str, ...], meaning: str, factor: float = 1.0) -> Derived:
        family = Family(
            f"oomwatch_{name}",
            meaning,
            f"this program, detector {verdict}",
            section="Floors, slopes and other derived numbers",
            cadence=AT_A_TICK,
            labels=labels,
            absent="too little was seen yet, an input is missing, the engine has ended, or the verdict is switched off",
        )
        return Derived(family, verdict, key, factor)

    leak = "kv-block-leak"
    yield of(
        "engine_kv_floor_blocks", leak, "floor_blocks", on_rank, "KV blocks that are held and that no request can own."
    )
    yield of(
        "engine_kv_floor_ratio",
        leak,
        "floor_ratio",
        on_rank,
        "The same as a share of the rank's usable KV blocks.",
    )
    yield of(
        "engine_kv_floor_slope_blocks_per_second",
        leak,
        "slope_blocks_per_hour",
        on_rank,
        "Growth of the floor of KV blocks: median slope of its points.",
        per_hour,
    )
    waste = "kv-tail-waste"
    for key, name, meaning in (
        ("waste_share", "", "Share of the used KV memory that the unfilled ends of last blocks waste, estimated."),
        ("waste_low", "low_", "Lower 95 % bound of the wasted share of the used KV memory."),
        ("waste_high", "high_", "Upper 95 % bound of the wasted share of the used KV memory."),
        ("waste_most", "most_", "The wasted share if every last block held a single token: it cannot be more."),
    ):
        yield of(f"engine_kv_tail_waste_{name}ratio", waste, key, on_rank, meaning)
    yield of(
        "engine_preemptions_per_finished",
        "preemption-pressure",
        "preemptions_per_finished",
        on_rank,
        "Preemptions for each request that finished, within the window of preemption-pressure.",
    )
    gpu_leak = "gpu-memory-leak"
    held = "of one process of an engine on one device"
    for key, name, meaning, factor in (
        ("floor_bytes", "floor_bytes", f"Floor of the device memory {held}.", 1.0),
        ("baseline_bytes", "baseline_bytes", f"Device memory {held} at the end of its warm-up.", 1.0),
        (
            "growth_bytes",
            "growth_bytes",
            f"Growth of the device memory {held} since its warm-up that no record of load explains.",
            1.0,
        ),
        (
            "slope_bytes_per_hour",
            "slope_bytes_per_second",
            f"Pace of that growth of the device memory {held}.",
            per_hour,
        ),
        (
            "live_growth_bytes",
            "live_growth_bytes",
            f"Growth of what PyTorch has handed out of the device memory {held}; needs oomwatch-probe.",
            1.0,
        ),
        (
            "fragments_growth_bytes",
            "fragments_growth_bytes",
            f"Growth of what PyTorch reserves and does not hand out of the device memory {held}; needs oomwatch-probe.",
            1.0,
        ),
        ("asleep_floor_bytes", "asleep_floor_bytes", f"Device memory {held} at its least in the latest sleep.", 1.0),
    ):
        yield of(f"engine_process_device_memory_{name}", gpu_leak, key, on_held, meaning, factor)
    fragments = "allocator-fragmentation"
    yield of(
        "allocator_largest_transient_bytes",
        fragments,
        "largest_transient_bytes",
        on_held,
        "Largest single allocation that comes and goes in one process of an engine, as far as oomwatch-probe can tell.",
    )
    yield of(
        "allocator_reach_bytes",
        fragments,
        "reach_bytes",
        on_held,
        "Largest allocation that would succeed in one process: a free block of its allocator, or what the driver has.",
    )
    host_leak = "host-memory-leak"
    anonymous = "anonymous memory of one process of an engine"
    for key, name, meaning, factor in (
        ("floor_bytes", "floor_bytes", f"Floor of the {anonymous}.", 1.0),
        ("baseline_bytes", "baseline_bytes", f"The {anonymous} at the end of its warm-up.", 1.0),
        (
            "growth_bytes",
            "growth_bytes",
            f"Growth of the {anonymous} since its warm-up that no record of load explains.",
            1.0,
        ),
        ("slope_bytes_per_hour", "slope_bytes_per_second", f"Pace of that growth of the {anonymous}.", per_hour),
        (
            "left_bytes",
            "left_bytes",
            "Host memory left for one process of an engine: to its cgroup's limit or the host's, whichever is nearer.",
            1.0,
        ),
    ):
        yield of(f"engine_process_anonymous_{name}", host_leak, key, on_process, meaning, factor)
    yield of(
        "device_free_floor_bytes",
        "headroom-low",
        "free_floor_bytes",
        on_device,
        "Floor of the free device memory within the window of headroom-low.",
    )
    yield of(
        "device_free_level_bytes",
        "headroom-low",
        "level_bytes",
        on_device,
        "Floor of the free device memory until the end of the engines' warm-up: what they have lived with.",
    )
    yield of(
        "device_free_since_ready_floor_bytes",
        "margin-thin",
        "free_floor_bytes",
        on_device,
        "Floor of the free device memory from when its engines became ready to the end of their warm-up.",
    )


DERIVED: tuple[Derived, ...] = tuple(_derived())

FAMILIES: tuple[Family, ...] = (
    *_daemon(),
    *_history(),
    *_notifications(),
    *_sources(),
    *_nvml(),
    *_gpus(),
    *_mig(),
    *_engines(),
    *_budgets(),
    *_ranks(),
    *_lengths(),
    *_processes(),
    *_probes(),
    *_logs(),
    *_verdicts(),
    *(derived.family for derived in DERIVED),
)

_MARKDOWN_HEAD = """\
# Metrics

<!-- Made from exporter/oomwatch/families.py by python -m oomwatch.docs: change the table there, not this file. -->

Everything below is served at `/metrics`. Nothing is read during a scrape of it: each source runs at its own interval
(`intervals` in the configuration), and a page shows what was read last, all of it of one moment. A value that is not
known has no sample. It is never 0 and never an old value: when a source fails or falls silent, its series are gone at
the next scrape, and `oomwatch_source_up`, `oomwatch_engine_up` and the `last_seen` timestamps say what happened.

- Sizes are bytes, durations seconds, times Unix time, shares 0-1.
- `gpu` is a GPU's uuid, `mig` a MIG slice's, `engine` an engine's configured or discovered name, `rank` what vLLM's own
  label `engine` says (the data-parallel rank). The node is Prometheus' `instance`.
- Identity stands in `_info` series of value 1, to be joined:
  `oomwatch_gpu_memory_used_bytes * on (gpu) group_left (name) oomwatch_gpu_info`. No label holds a measured value.
- A state is one series for each possible state, 1 for the present one: `oomwatch_engine_state{state="frozen"} == 1`.
- vLLM's counters pass through unchanged: they start again from 0 with the engine, as `rate()` and `increase()` expect.

The Prometheus client library adds `process_*` (oomwatch's own memory, CPU and file descriptors) and `python_info`. The
host's CPU, memory and disks are not here: node_exporter has them.
"""


def metrics_markdown() -> str:
    """docs/metrics.md: every family with its meaning, labels, origin, versions and when it is absent."""
    parts = [_MARKDOWN_HEAD]
    for section, families in groupby(FAMILIES, key=lambda family: family.section):
        parts.append(f"\n## {section}\n")
        parts += [_family_markdown(family) for family in families]
    return "".join(parts)


def _family_markdown(family: Family) -> str:
    labels = ", ".join(f"`{label}`" for label in family.labels) or "none"
    unit = f", {family.unit}" if family.unit else ""
    return (
        f"\n### `{family.name}`\n\n{family.meaning}\n\n"
        f"- Type: {family.kind}{unit}\n"
        f"- Labels: {labels}\n"
        f"- Source: {family.source}; {family.cadence}\n"
        f"- Versions: {family.versions}\n"
        f"- Absent: {family.absent}\n"
    )
