"""What is wrong with the node, in words, and its state as plain data: for the page, the API and ``oomwatch check``."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace

from oomwatch import __version__, units
from oomwatch.conclusions import incident_plain, incidents, statement, verdict_plain
from oomwatch.detectors.base import LEVEL
from oomwatch.observations import (
    HUNG,
    IMPLAUSIBLE,
    NOT_READ,
    STALE,
    Absent,
    AllocatorReport,
    BlockOwners,
    EngineScrape,
    Maybe,
    Memory,
    RankReading,
    known,
)
from oomwatch.snapshot import (
    EngineView,
    GpuView,
    HeldMemory,
    HeldProcess,
    MigView,
    Snapshot,
    SourceView,
    StartUpView,
    devices,
)
from oomwatch.verdicts import Verdict

API_VERSION = 1

SEVERITIES = ("critical", "warning", "info")

# Ticks come every 15 s by default: data older than this means that nothing moves any more.
OLD_AFTER = 60.0

# Less than this without an owner is what the driver and its tools take in passing.
UNOWNED_LIMIT = 1024**3


@dataclass(frozen=True)
class Problem:
    """Something a person should know. ``severity`` is one of SEVERITIES; info asks for nothing.

    ``kind`` is ``node``, ``driver``, ``gpu``, ``engine`` or ``source``, ``name`` the uuid, the engine's name or the
    source's. ``since`` is unix time, the last at which all was well as far as is known; None where it is not.
    ``text`` says what is wrong, ``action`` what to do. ``incident`` is its id where detectors have concluded it, and
    ``since`` then when it began. ``verdicts`` are the names of those that tell of it, once they stand.
    """

    severity: str
    kind: str
    name: str
    text: str
    action: str = ""
    since: float | None = None
    incident: str = ""
    verdicts: tuple[str, ...] = ()


def problems(snapshot: Snapshot, now: float | None = None) -> tuple[Problem, ...]:
    """All that is wrong, the worst first. With ``now`` also whether the snapshot itself is too old to be trusted."""
    found = [*_of_the_data(snapshot, now), *_of_the_driver(snapshot)]
    for gpu in snapshot.gpus:
        found += _of_gpu(gpu)
        found += _of_unowned_memory(gpu, snapshot)
    for engine in snapshot.engines:
        found += _of_engine(engine)
    found += _of_process_lists(snapshot)
    told = {(p.kind, p.name) for p in found} | _subjects_of(snapshot.verdicts)
    for source in snapshot.sources:
        found += _of_source(source, snapshot, told)
    found += _of_an_empty_node(snapshot)
    rest = [_unless_planned(p, snapshot.verdicts) for p in found if not _standing(p, snapshot.verdicts)]
    found = [*_of_verdicts(snapshot, found), *rest]
    return tuple(sorted(found, key=lambda problem: SEVERITIES.index(problem.severity)))


def device_labels(snapshot: Snapshot) -> dict[str, str]:
    """Devices and slices by uuid, as people name them."""
    labels = {gpu.uuid: gpu_label(gpu) for gpu in snapshot.gpus}
    return labels | {
        mig.uuid: f"slice {mig.gi}/{mig.ci} of {gpu_label(gpu)}" for gpu in snapshot.gpus for mig in gpu.mig
    }


def gpu_label(gpu: GpuView) -> str:
    """A device as people name it: ``GPU 2``, or its uuid while its index is not known."""
    return f"GPU {gpu.index}" if gpu.index >= 0 else gpu.uuid


# --- what detectors conclude -----------------------------------------------------------------------------------


def _of_verdicts(snapshot: Snapshot, seen: Iterable[Problem]) -> Iterator[Problem]:
    """One for each incident that may alert. What is ``seen`` to be wrong at once may make it worse, and is not told
    twice: severity is the worse of both."""
    labels = device_labels(snapshot)
    for incident in incidents(snapshot.verdicts):
        if incident.silenced:
            continue
        same = [problem.severity for problem in seen if _standing(problem, incident.verdicts)]
        cause = incident.cause
        kind, name = _owner(cause)
        yield Problem(
            min([incident.severity, *same], key=SEVERITIES.index),
            kind,
            name,
            statement(cause, labels),
            " ".join(incident.advice),
            incident.since,
            incident.id,
            tuple(dict.fromkeys(verdict.name for verdict in incident.verdicts)),
        )


def _owner(verdict: Verdict) -> tuple[str, str]:
    subject = verdict.subject
    if subject.engine is not None:
        return "engine", subject.engine
    return ("gpu", subject.gpu) if subject.gpu is not None else ("node", "")


def _standing(problem: Problem, verdicts: Iterable[Verdict]) -> list[Verdict]:
    """The verdicts of info or more that tell the same as a problem."""
    return [
        verdict
        for verdict in verdicts
        if verdict.level >= LEVEL["info"]
        and verdict.name in problem.verdicts
        and problem.name in (verdict.subject.engine, verdict.subject.gpu)
    ]


def _unless_planned(problem: Problem, verdicts: Iterable[Verdict]) -> Problem:
    """The problem, no more than info while a planned silence holds back a verdict that would tell of it."""
    for verdict in verdicts:
        if verdict.silenced and verdict.name in problem.verdicts and problem.name == _owner(verdict)[1]:
            return replace(problem, severity="info", text=f"{problem.text} Planned silence: {verdict.silenced}.")
    return problem


def _subjects_of(verdicts: Iterable[Verdict]) -> set[tuple[str, str]]:
    """Engines and devices of which a verdict says that they cannot be read."""
    return {
        _owner(verdict)
        for verdict in verdicts
        if verdict.level >= LEVEL["info"] and verdict.name in ("source-stale", "gpu-lost", "nvml-stuck")
    }


# --- the data as a whole ---------------------------------------------------------------------------------------


def _of_the_data(snapshot: Snapshot, now: float | None) -> Iterator[Problem]:
    if now is None:
        return
    if not snapshot.t:
        yield Problem("info", "node", "", "Nothing has been read yet: oomwatch has just started.")
    elif now - snapshot.t > OLD_AFTER:
        yield Problem(
            "critical",
            "node",
            "",
            f"What is shown here is {units.duration(now - snapshot.t)} old: oomwatch has stopped reading.",
            "Read oomwatch's log and restart it. Trust nothing below until then.",
            snapshot.t,
        )


# --- driver ----------------------------------------------------------------------------------------------------

_DRIVER_TROUBLE: Mapping[str, tuple[str, str]] = {
    "library_missing": ("warning", "No GPU can be read"),
    "driver_not_loaded": ("warning", "No GPU can be read"),
    "no_permission": ("warning", "No GPU can be read"),
    "version_mismatch": ("warning", "No GPU can be read"),
    "released": ("info", "No GPU is read"),
    "hung": ("critical", "NVIDIA's driver does not answer"),
    "error": ("warning", "No GPU can be read"),
}


def _has_no_gpus_by_nature(snapshot: Snapshot) -> bool:
    """No library and nobody who would need one: a node without GPUs, which is nothing to worry about."""
    return (
        snapshot.driver is not None
        and snapshot.driver.state == "library_missing"
        and not snapshot.gpus
        and not any(engine.state != "gone" for engine in snapshot.engines)
    )


def _of_the_driver(snapshot: Snapshot) -> Iterator[Problem]:
    driver = snapshot.driver
    if driver is None:
        return
    if driver.state == "ok":
        if driver.detail:
            yield Problem("warning", "driver", "", f"NVIDIA's driver works, but {_clause(driver.detail)}.")
        return
    severity, text = _DRIVER_TROUBLE.get(driver.state, ("warning", f"NVIDIA's driver is in the state {driver.state}"))
    what, _, action = driver.detail.partition(". ")
    yield Problem(
        "info" if _has_no_gpus_by_nature(snapshot) else severity,
        "driver",
        "",
        f"{text}: {_clause(what)}." if what else f"{text}.",
        _sentence(action),
        max((gpu.last_seen for gpu in snapshot.gpus if gpu.last_seen is not None), default=None),
    )


def _of_an_empty_node(snapshot: Snapshot) -> Iterator[Problem]:
    if not snapshot.t:
        return
    driver_ok = snapshot.driver is not None and snapshot.driver.state == "ok"
    if driver_ok and not snapshot.gpus:
        yield Problem(
            "info",
            "node",
            "",
            "NVIDIA's driver works and lists no GPU.",
            "If this node should have GPUs, run nvidia-smi -L on the host; in a container, give it the devices.",
        )
    if not snapshot.engines:
        yield Problem(
            "info",
            "node",
            "",
            "No vLLM server was found on this node.",
            "One that starts here appears by itself. Name one that cannot be found under engines: in the "
            "configuration, with its name and url.",
        )


# --- GPUs ------------------------------------------------------------------------------------------------------

_DEVICE_TROUBLE: Mapping[str, tuple[str, str, str]] = {
    "GPU_IS_LOST": (
        "critical",
        "has fallen off the bus (GPU_IS_LOST)",
        "Drain the node, save nvidia-bug-report.sh's output, then reboot. If it happens again, replace the card.",
    ),
    "NOT_FOUND": (
        "critical",
        "is no longer listed by the driver",
        "Look for Xid lines in dmesg. Unless it was taken away on purpose, drain the node and reboot.",
    ),
    HUNG.reason: (
        "critical",
        "does not answer: a driver call has not returned",
        "Look for Xid lines in dmesg. What hangs in the driver cannot be killed: drain the node and reboot.",
    ),
    "RESET_REQUIRED": (
        "critical",
        "must be reset before it works again (RESET_REQUIRED)",
        "Stop what uses it and run nvidia-smi --gpu-reset, or reboot the node.",
    ),
    STALE.reason: (
        "warning",
        "has not been read for a while",
        "Read oomwatch's log; if it says nothing, restart oomwatch.",
    ),
}
_DEVICE_VERDICTS: Mapping[str, tuple[str, ...]] = {
    "GPU_IS_LOST": ("gpu-lost",),
    "NOT_FOUND": ("gpu-lost",),
    "RESET_REQUIRED": ("gpu-lost",),
    HUNG.reason: ("nvml-stuck", "gpu-lost"),
}
_RECOVERY: Mapping[int, str] = {
    1: "a reset (nvidia-smi --gpu-reset)",
    2: "a reboot of the node",
    3: "its peer-to-peer traffic drained",
    4: "to be drained and reset",
}


def _of_gpu(gpu: GpuView) -> Iterator[Problem]:
    label = gpu_label(gpu)
    reason = gpu.memory.reason if isinstance(gpu.memory, Absent) else ""
    if reason and not (_is_sliced(gpu) and reason in ("NO_PERMISSION", "MIG_ENABLED")):
        severity, text, action = _DEVICE_TROUBLE.get(
            reason, ("warning", f"does not tell its memory ({reason})", "Run nvidia-smi and look into dmesg.")
        )
        if gpu.last_seen is not None or reason != NOT_READ.reason:
            verdicts = _DEVICE_VERDICTS.get(reason, ("source-stale",))
            yield Problem(severity, "gpu", gpu.uuid, f"{label} {text}.", action, gpu.last_seen, verdicts=verdicts)
    for mig in gpu.mig:
        if isinstance(mig.memory, Absent):
            yield Problem(
                "warning",
                "gpu",
                mig.uuid,
                f"Slice {mig.gi}/{mig.ci} of {label} does not tell its memory ({mig.memory.reason}).",
                "In a container, give it the slice; else run nvidia-smi as root and look into dmesg.",
            )
    for view in devices((gpu,)):
        if view.processes == IMPLAUSIBLE:
            yield Problem(
                "warning",
                "gpu",
                view.uuid,
                f"The driver's list of processes on {label} contradicts itself, so that whose memory is whose is "
                "not known.",
                "Update the driver (before 535.104.05 lists may be scrambled), and nvidia-ml-py if it is pinned.",
            )
    yield from _of_gpu_health(gpu)


def _of_gpu_health(gpu: GpuView) -> Iterator[Problem]:
    if gpu.poll is None:
        return
    label = gpu_label(gpu)
    recovery = known(gpu.poll.recovery_action)
    if recovery:
        yield Problem(
            "critical",
            "gpu",
            gpu.uuid,
            f"{label} says that it needs {_RECOVERY.get(recovery, f'recovery (action {recovery})')}.",
            "Move its work elsewhere and do what it asks for.",
        )
    rows = known(gpu.poll.remapped_rows)
    if rows is not None and rows.failed:
        yield Problem(
            "critical",
            "gpu",
            gpu.uuid,
            f"{label} could not remap a faulty row of its memory.",
            "Take it out of service: this card has to be replaced.",
        )
    elif rows is not None and rows.pending:
        yield Problem(
            "warning",
            "gpu",
            gpu.uuid,
            f"{label} has a faulty row of memory that is remapped at its next reset.",
            "Reset it (nvidia-smi --gpu-reset) once its engines can be stopped.",
        )


def _is_sliced(gpu: GpuView) -> bool:
    return bool(gpu.mig) or (gpu.poll is not None and known(gpu.poll.mig_enabled) is True)


def _of_unowned_memory(gpu: GpuView, snapshot: Snapshot) -> Iterator[Problem]:
    for view in devices((gpu,)):
        unowned = known(view.unowned)
        if unowned is None or unowned < UNOWNED_LIMIT or not _hosts_an_engine(view, snapshot):
            continue
        where = gpu_label(gpu) if isinstance(view, GpuView) else f"Slice {view.gi}/{view.ci} of {gpu_label(gpu)}"
        yield Problem(
            "warning",
            "gpu",
            view.uuid,
            f"{where}: {units.size(unowned)} are used by no process that the driver lists, "
            "and are missing to the engine there.",
            "Look for processes of other containers or left-over ones (fuser -v /dev/nvidia*), and stop them.",
            verdicts=("orphan-memory",),
        )


def _hosts_an_engine(view: GpuView | MigView, snapshot: Snapshot) -> bool:
    held = known(view.held) or ()
    return any(part.holder.kind == "engine" for part in held) or any(
        view.uuid in (engine.facts.gpus or ()) for engine in snapshot.engines if engine.state != "gone"
    )


def _of_process_lists(snapshot: Snapshot) -> Iterator[Problem]:
    unresolved = known(snapshot.unresolved_gpu_pids)
    if unresolved:
        yield Problem(
            "warning",
            "node",
            "",
            f"{'1 process' if unresolved == 1 else f'{unresolved} processes'} on the GPUs cannot be seen in /proc, "
            "so that whose memory is whose is known in part only.",
            "In a container, share the host's process ids: hostPID: true in Kubernetes, --pid=host in Docker.",
        )


# --- engines ---------------------------------------------------------------------------------------------------

# state: severity once it has answered, severity before, what is wrong, what to do
_ENGINE_TROUBLE: Mapping[str, tuple[str, str, str, str]] = {
    "frozen": (
        "critical",
        "critical",
        "is frozen: it has requests and makes no progress",
        (
            "Its /health may well be green. Take it out of the load balancer, save its log and what py-spy dump says "
            "of its engine process, then restart it."
        ),
    ),
    "dead": (
        "critical",
        "critical",
        "is dead: its API server answers, its engine core does not run any more",
        "Read the end of its log for the cause, then restart it: it does not recover by itself.",
    ),
    "unreachable": (
        "critical",
        "warning",
        "cannot be reached",
        (
            "Look whether its process runs. One that is loading its model answers after some minutes; one that has "
            "crashed tells why at the end of its log."
        ),
    ),
    "timeout": (
        "critical",
        "warning",
        "does not answer in time",
        "Look at its load and its log. If a healthy one is just slow, raise its timeout in the configuration.",
    ),
    "http_error": ("warning", "warning", "answers with an error", "Look at its log, and at what stands before it."),
    "redirected": (
        "warning",
        "warning",
        "sends us elsewhere, which is not followed",
        "Put the address of vLLM itself into its url.",
    ),
    "unauthorized": (
        "warning",
        "warning",
        "refuses our credentials",
        "Set bearer_token_file or basic_auth of this engine in the configuration.",
    ),
    "too_large": (
        "warning",
        "warning",
        "has a page of metrics that is too large",
        "Raise max_page_bytes of this engine in the configuration, if the page is really vLLM's.",
    ),
    "not_metrics": ("warning", "warning", "has no page of metrics", "Check its url: it must be vLLM's own address."),
    "not_vllm": (
        "warning",
        "warning",
        "has a page of metrics that is not vLLM's",
        "Check its url: something else answers there.",
    ),
    "truncated": ("warning", "warning", "cuts its page of metrics short", "Look at its log and at proxies before it."),
    "duplicate_series": (
        "warning",
        "warning",
        "gives several values for one series",
        "Several API servers share one page there. Set PROMETHEUS_MULTIPROC_DIR for it, or start it anew.",
    ),
    "tls_error": ("warning", "warning", "has no trustworthy TLS connection", "Check its certificate, and tls.ca_file."),
    "bad_configuration": ("warning", "warning", "cannot be asked", "Correct the configuration."),
    "stats_disabled": (
        "warning",
        "warning",
        "exposes no statistics, so that its KV pool cannot be watched",
        "Start it without --disable-log-stats.",
    ),
    "no_address": (
        "warning",
        "warning",
        "runs here, but the address of its metrics is not known",
        "Name it under engines: in the configuration, with its url.",
    ),
    "gone": (
        "warning",
        "warning",
        "has ended",
        "If nobody stopped it, read the end of its log and dmesg (the kernel's OOM killer writes there).",
    ),
}


_DOWN = ("source-stale", "crash-loop", "runtime-oom", "startup-oom", "startup-refused")
_ENGINE_VERDICTS: Mapping[str, tuple[str, ...]] = {
    "frozen": ("engine-stuck",),
    "dead": ("engine-stuck", "runtime-oom", "crash-loop"),
    "unreachable": _DOWN,
    "timeout": (*_DOWN, "engine-stuck"),
    "gone": _DOWN,
    "stats_disabled": ("metrics-missing",),
    "not_vllm": ("metrics-missing", "source-stale"),
    "no_address": (),
}


def _of_engine(engine: EngineView) -> Iterator[Problem]:
    trouble = _ENGINE_TROUBLE.get(engine.state)
    since = engine.last_progress if engine.state == "frozen" else engine.last_seen
    if trouble is not None:
        after, before, text, action = trouble
        told = engine.state in ("dead", "gone", "no_address") or not engine.error
        yield Problem(
            before if engine.last_seen is None else after,
            "engine",
            engine.name,
            f"Engine {engine.name} {text}.{'' if told else f' {_sentence(engine.error)}'}",
            engine.facts.no_address or action if engine.state == "no_address" else action,
            None if engine.state in ("stats_disabled", "dead") else since,
            verdicts=_ENGINE_VERDICTS.get(engine.state, ("source-stale",)),
        )
    elif engine.state == "unknown" and engine.last_seen is not None:
        yield Problem(
            "warning",
            "engine",
            engine.name,
            f"Engine {engine.name} has not been asked lately: {engine.error}.",
            "Read oomwatch's log; if it says nothing, restart oomwatch.",
            since,
            verdicts=("source-stale",),
        )
    elif engine.state in ("ok", "frozen") and engine.scrape is not None and _misses_pool(engine.scrape):
        yield Problem(
            "warning",
            "engine",
            engine.name,
            f"Engine {engine.name} answers, but its page has no usage of the KV pool, which is what to watch.",
            "Its version may be newer than oomwatch knows: update oomwatch, and report the version.",
            verdicts=("metrics-missing",),
        )


def _misses_pool(scrape: EngineScrape) -> bool:
    return not scrape.ranks or any(isinstance(rank.usage, Absent) for rank in scrape.ranks)


# --- sources ---------------------------------------------------------------------------------------------------

SOURCE_NAMES: Mapping[str, str] = {
    "nvml": "Reading GPUs",
    "vllm": "Reading engines",
    "host": "Reading the host's processes and memory",
    "allocator": "Reading oomwatch-probe's files",
    "log": "Reading engines' logs",
    "discovery": "The search for vLLM servers",
    "probe": "Asking an engine for a token",
}


def _of_source(source: SourceView, snapshot: Snapshot, told: set[tuple[str, str]]) -> Iterator[Problem]:
    """A source that fails, unless what it reads has been told of by itself."""
    owner = {"nvml": "gpu" if source.target else "driver", "vllm": "engine"}.get(source.source, "source")
    if source.last_run is None or source.up or (owner, source.target) in told:
        return
    about = f" ({_target_label(source, snapshot)})" if source.target else ""
    verb = "fails" if source.up is False else "has fallen silent"
    yield Problem(
        "warning",
        "source",
        f"{source.source}:{source.target}" if source.target else source.source,
        f"{SOURCE_NAMES.get(source.source, source.source)}{about} {verb}"
        f"{f': {_clause(source.error)}' if source.error else ''}.",
        "Read oomwatch's log." if source.up is False else "Read oomwatch's log; if it says nothing, restart oomwatch.",
        source.last_success,
    )


def _target_label(source: SourceView, snapshot: Snapshot) -> str:
    for gpu in snapshot.gpus:
        if gpu.uuid == source.target:
            return gpu_label(gpu)
    return source.target


def _clause(text: str) -> str:
    return text.strip().rstrip(".")


def _sentence(text: str) -> str:
    text = text.strip()
    if not text:
        return ""
    # An address at the beginning is no word that could begin with a capital.
    begin = text[0] if text.startswith(("http://", "https://")) else text[0].upper()
    return begin + text[1:] + ("" if text.endswith((".", "!", "?")) else ".")


# --- as plain data ---------------------------------------------------------------------------------------------

Plain = dict[str, object]


def status(snapshot: Snapshot, now: float) -> Plain:
    """The snapshot as JSON-able data. In every object, a value that is null has its reason under ``absent``.

    Keys are only added within one ``api_version``. Sizes are bytes, times unix seconds, shares 0-1.
    """
    return {
        "api_version": API_VERSION,
        "version": __version__,
        "now": now,
        "snapshot_time": snapshot.t or None,
        "age_seconds": max(0.0, now - snapshot.t) if snapshot.t else None,
        "problems": [_problem(problem) for problem in problems(snapshot, now)],
        "incidents": [incident_plain(incident) for incident in incidents(snapshot.verdicts)],
        "verdicts": [verdict_plain(verdict) for verdict in snapshot.verdicts],
        "driver": _driver(snapshot),
        "gpus": [_gpu(gpu) for gpu in snapshot.gpus],
        "engines": [_engine(engine) for engine in snapshot.engines],
        "host": {"total_bytes": snapshot.host.total, "available_bytes": snapshot.host.available}
        if snapshot.host
        else None,
        "sources": [asdict(source) for source in snapshot.sources],
        **_values(unresolved_gpu_pids=snapshot.unresolved_gpu_pids),
    }


def _problem(problem: Problem) -> Plain:
    return {**asdict(problem), "verdicts": list(problem.verdicts)}


def _values(**fields: Maybe[object]) -> Plain:
    """Fields with null for what is absent, and the reasons beside."""
    return {
        **{name: None if isinstance(value, Absent) else _finite(value) for name, value in fields.items()},
        "absent": {name: value.reason for name, value in fields.items() if isinstance(value, Absent)},
    }


def _finite(value: object) -> object:
    """JSON has no NaN and no infinity."""
    if isinstance(value, Mapping):
        return {key: _finite(part) for key, part in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _mapped(value: Maybe[object], to_plain: Callable[..., object]) -> Maybe[object]:
    return value if isinstance(value, Absent) else to_plain(value)


def _driver(snapshot: Snapshot) -> Plain | None:
    report = snapshot.driver
    if report is None:
        return None
    return {
        "state": report.state,
        "detail": report.detail,
        **_values(
            driver_version=report.driver_version,
            nvml_version=report.nvml_version,
            cuda_version=report.cuda_version,
            device_count=report.device_count,
        ),
    }


def _memory(memory: Memory) -> Plain:
    return {
        "total_bytes": memory.total,
        "reserved_bytes": memory.reserved,
        "used_bytes": memory.used,
        "free_bytes": memory.free,
        "used_includes_reserved": memory.used_includes_reserved,
    }


def _held(held: Iterable[HeldMemory]) -> list[Plain]:
    return [{"kind": part.holder.kind, "name": part.holder.name, "used_bytes": part.used} for part in held]


def _processes(processes: Iterable[HeldProcess]) -> list[Plain]:
    return [
        {
            "pid": process.pid,
            "used_bytes": process.used,
            "kind": process.holder.kind,
            "holder": process.holder.name,
            "name": process.name,
        }
        for process in processes
    ]


def _device(view: GpuView | MigView, **more: Maybe[object]) -> Plain:
    return _values(
        memory=_mapped(view.memory, _memory),
        processes=_mapped(view.processes, _processes),
        held=_mapped(view.held, _held),
        unowned_bytes=view.unowned,
        **more,
    )


def _gpu(gpu: GpuView) -> Plain:
    poll = gpu.poll
    health: dict[str, Maybe[object]] = {
        "temperature_celsius": poll.temperature if poll else STALE,
        "power_watts": poll.power if poll else STALE,
        "utilization_ratio": poll.utilization if poll else STALE,
        "mig_enabled": poll.mig_enabled if poll else STALE,
        "ecc_uncorrected": poll.ecc_uncorrected if poll else STALE,
        "ecc_corrected": poll.ecc_corrected if poll else STALE,
        "remapped_rows": _mapped(poll.remapped_rows, asdict) if poll else STALE,
        "recovery_action": poll.recovery_action if poll else STALE,
        "pci_bus_id": poll.pci_bus_id if poll else STALE,
    }
    return {
        "uuid": gpu.uuid,
        "index": gpu.index if gpu.index >= 0 else None,
        "name": gpu.name,
        "unified_memory": poll.unified if poll else None,
        "last_seen": gpu.last_seen,
        "last_memory": _memory(gpu.last_memory) if gpu.last_memory else None,
        "xids": [asdict(xid) for xid in gpu.xids],
        "mig": [{"uuid": mig.uuid, "gi": mig.gi, "ci": mig.ci, **_device(mig)} for mig in gpu.mig],
        **_device(gpu, **health),
    }


def _engine(engine: EngineView) -> Plain:
    facts = engine.facts
    shown = engine.scrape or engine.last_answer
    last = engine.last_answer if engine.scrape is None else None
    return {
        "name": engine.name,
        "state": engine.state,
        "error": engine.error,
        "origin": facts.origin,
        "target": facts.target,
        "vllm_version": facts.vllm_version,
        "max_model_len": facts.max_model_len,
        "gpus": list(engine.gpus) if engine.gpus is not None else None,
        "restarts": engine.restarts,
        "last_seen": engine.last_seen,
        "last_progress": engine.last_progress,
        "ranks": [_rank(rank) for rank in engine.scrape.ranks] if engine.scrape else [],
        "last_answer": {"time": last.t, "ranks": [_rank(rank) for rank in last.ranks]} if last else None,
        "processes": [
            {
                "pid": process.pid,
                "role": process.role,
                "rank": process.rank,
                "name": process.name,
                "start": process.start,
                "rss_bytes": process.rss,
                "memory_limit_bytes": process.memory_limit,
                "container": process.container,
                "pod_uid": process.pod_uid,
                **_values(anon_bytes=process.anon),
            }
            for process in engine.processes
        ],
        "allocators": [_allocator(report) for report in engine.allocators],
        "kv_blocks": [_owners(owners) for owners in engine.owners],
        "startup": _startup(engine.startup) if engine.startup else None,
        "out_of_memory": [{"killer": killer, "when": when, "count": count} for killer, when, count in engine.ran_out],
        **_values(
            model_name=shown.model_name if shown else NOT_READ,
            kv_connector=shown.kv_connector if shown else NOT_READ,
            lora_adapters=_mapped(shown.adapters, asdict) if shown else NOT_READ,
            gpu_memory_bytes=_mapped(engine.gpu_memory, dict),
            gpu_memory_sum_bytes=engine.gpu_memory_sum,
            overhead_bytes=_mapped(engine.overhead_sum, dict),
            process_overhead_bytes=_mapped(engine.overhead, _by_pid),
        ),
    }


def _by_pid(overhead: Mapping[str, Mapping[int, int]]) -> Plain:
    return {device: {str(pid): size for pid, size in sizes.items()} for device, sizes in overhead.items()}


def _startup(start: StartUpView) -> Plain:
    """What the engine's log tells of its latest start; bytes under the names of the log's components."""
    return {
        "since": start.since,
        "phase": start.phase,
        "ready": start.ready,
        "version": start.version,
        "gpu_memory_utilization": start.utilization,
        "max_model_len": start.max_model_len,
        "budgets": [{"rank": rank, "worker": worker, **vars(budget)} for rank, worker, budget in start.budgets],
        "pools": [{"rank": rank, **vars(pool)} for rank, pool in start.pools],
    }


def _allocator(report: AllocatorReport) -> Plain:
    """What oomwatch-probe tells of a process; ``statistics`` have the names of torch.cuda.memory_stats."""
    failure = report.failure
    return {
        "pid": report.pid,
        "gpu": report.gpu or None,
        "statistics": dict(report.stats),
        "largest_free_block_bytes": report.largest_free_block,
        "free_bytes": report.free,
        "releasable_bytes": report.releasable,
        "private_reserved_bytes": report.private_reserved,
        "private_free_bytes": report.private_free,
        "backend": report.backend,
        "expandable_segments": report.expandable,
        "last_failure": failure
        and {
            "time": failure.t,
            "wanted_bytes": failure.wanted,
            "free_bytes": failure.free,
            "allocated_bytes": failure.allocated,
            "reserved_bytes": failure.reserved,
        },
    }


def _owners(owners: BlockOwners) -> Plain:
    """Whose the KV blocks of a rank are, as oomwatch-probe counts them."""
    return {
        "rank": owners.rank,
        "counted": owners.counted,
        "total": owners.total,
        "free": owners.free,
        "cached": owners.cached,
        "living": owners.living,
        "finished": owners.finished,
        "ownerless": owners.ownerless,
    }


def _rank(rank: RankReading) -> Plain:
    pool = rank.pool
    return {
        "rank": rank.rank,
        **_values(
            kv_usage_ratio=rank.usage,
            kv_blocks_total=pool.blocks,
            kv_blocks_used=pool.used,
            kv_block_size_tokens=pool.block_size,
            kv_pool_tokens=pool.tokens,
            kv_pool_configured_bytes=pool.configured_bytes,
            max_concurrency=pool.max_concurrency,
            requests_running=rank.running,
            requests_waiting=rank.waiting,
            requests_waiting_capacity=rank.waiting_capacity,
            requests_waiting_deferred=rank.waiting_deferred,
            requests_swapped=rank.swapped,
            preemptions_total=rank.preemptions,
            prompt_tokens_total=rank.prompt_tokens,
            generation_tokens_total=rank.generation_tokens,
            steps_total=rank.steps,
            finished_total=_mapped(rank.finished, dict),
            kv_expired_total=rank.kv_expired,
            sleep_level=rank.sleep_level,
            gpu_memory_utilization_ratio=rank.gpu_memory_utilization,
            prefix_caching=rank.prefix_caching,
        ),
    }
