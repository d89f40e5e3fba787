"""Recordings: what was observed, as JSON Lines, so that the detectors can run over it again. Both ways.

Line 1 is a header, every other line one observation; sizes are bytes, ``t`` counts seconds from the header's
``start`` (a first ``t`` that is itself a unix time, above 1e9, counts from nothing). Observations come out with unix
times, as live. The format's optional keys that only this package writes keep a rewritten recording equal in meaning.

A file that breaks off (a truncated gzip, half a line at its end) gives everything before the break, then an error.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import math
import statistics
import sys
import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from datetime import datetime, timezone
from pathlib import Path
from types import TracebackType
from typing import IO, Any, TypeVar, cast

from oomwatch.attribution import Attribution
from oomwatch.enginelog.events import plain
from oomwatch.enginelog.lines import entry_of
from oomwatch.errors import InputError
from oomwatch.observations import (
    NOT_KNOWN,
    NOT_READ,
    SCRAPE_STATES,
    Absent,
    AllocationFailure,
    AllocatorReport,
    BlockOwners,
    DriverReport,
    EngineFacts,
    EngineScrape,
    EngineUpdate,
    Gap,
    GpuPoll,
    GpuProcess,
    HostMemory,
    HostProcess,
    LogLine,
    Maybe,
    Memory,
    MigInstance,
    Observation,
    ProbeResult,
    ProcessGone,
    RemappedRows,
    SourceRun,
    TargetRemoved,
    Tick,
    XidEvent,
    known,
)
from oomwatch.sources.host import role_of
from oomwatch.sources.vllm.meaning import PageReading, read_page
from oomwatch.sources.vllm.pages import (
    Page,
    PageError,
    samples_for_recording,
    samples_from_recording,
)
from oomwatch.sources.vllm.pages import read as read_metrics

T = TypeVar("T")

MAJOR_VERSION = 1
_LONGEST_LINE = 64 * 1024**2
_LOOK_AHEAD_LINES = 20_000
_LOOK_AHEAD_BYTES = 64 * 1024**2
_UNIX_TIMES_FROM = 1e9
_SOURCES = frozenset({"gpu", "scrape", "process", "lists"})  # that have an interval
_DECIMALS = 6  # of a time: what a double holds of a unix time


class RecordingError(InputError):
    """A recording that cannot be read, or not to its end: which file and line, what is wrong, and what to do."""


class _Malformed(Exception):
    """What is wrong with one line."""


@dataclass(frozen=True)
class Header:
    """``start`` is the unix time from which the observations' times count, None where the file does not say.

    ``intervals`` are the polling intervals in seconds by source: ``gpu``, ``scrape``, ``process`` (processes of the
    host) and ``lists`` (the GPUs' process lists).
    """

    start: float | None = None
    note: str = ""
    engines: tuple[EngineFacts, ...] = ()
    intervals: Mapping[str, float] = field(default_factory=dict)


# --- writing ---------------------------------------------------------------------------------------------------


def header_line(header: Header) -> str:
    """The first line of a recording, without its end."""
    document: dict[str, Any] = {"oomwatch_recording": MAJOR_VERSION}
    if header.start is not None:
        start = datetime.fromtimestamp(header.start, timezone.utc)
        document["start"] = start.isoformat().replace("+00:00", "Z")
    if header.note:
        document["note"] = header.note
    if header.intervals:
        document["intervals"] = dict(header.intervals)
    document["engines"] = [_facts_document(facts) for facts in header.engines]
    return _json(document)


def to_line(observation: Observation, start: float = 0.0, *, log_text: bool = False) -> str | None:
    """One observation as a line without its end, its time counted from ``start``.

    None for the raw text of a log unless ``log_text`` asks for it: prompts may stand in it.
    """
    kind, document = _document(observation, log_text)
    return None if document is None else _json({"t": _seconds(observation.t - start), kind: document})


class Writer:
    """Writes a recording into ``stream`` (binary; a gzip file does as well): the header at once, then what comes.

    Observations have to come in the order of their times.
    """

    def __init__(self, stream: IO[bytes], header: Header, *, log_text: bool = False) -> None:
        self._stream = stream
        self._start = header.start or 0.0
        self._log_text = log_text
        self._put(header_line(header))

    def write(self, observation: Observation) -> None:
        line = to_line(observation, self._start, log_text=self._log_text)
        if line is not None:
            self._put(line)

    def _put(self, line: str) -> None:
        self._stream.write(line.encode() + b"\n")


def _json(document: Mapping[str, Any]) -> str:
    return json.dumps(document, separators=(",", ":"), allow_nan=False)


def _seconds(t: float) -> float:
    return round(t, _DECIMALS)


def _given(**values: Any) -> dict[str, Any]:
    """The keys whose values are something."""
    return {key: value for key, value in values.items() if value not in (None, "")}


def _document(observation: Observation, log_text: bool) -> tuple[str, dict[str, Any] | None]:
    match observation:
        case GpuPoll():
            return "gpu", _gpu_document(observation)
        case XidEvent():
            return "xid", {"uuid": observation.uuid, "code": observation.code}
        case EngineScrape():
            return "scrape", _scrape_document(observation)
        case HostProcess():
            return "process", _process_document(observation)
        case ProcessGone():
            return "process", {"pid": observation.pid, "gone": True}
        case ProbeResult():
            return "probe", {
                "engine": observation.engine,
                "ok": observation.ok,
                "seconds": observation.seconds,
                **_given(error=observation.error),
            }
        case HostMemory():
            return "host", {"memory_total": observation.total, "memory_available": observation.available}
        case EngineUpdate():
            return "engine", {**_facts_document(observation.facts), **({"gone": True} if observation.gone else {})}
        case LogLine():
            return "log", _log_document(observation, log_text)
        case AllocatorReport():
            return "allocator", _allocator_document(observation)
        case BlockOwners():
            return "owners", _owners_document(observation)
        case DriverReport():
            return "driver", _driver_document(observation)
        case SourceRun():
            return "run", _given(
                source=observation.source,
                target=observation.target,
                ok=observation.ok,
                seconds=_seconds(observation.seconds),
                error=observation.error,
            )
        case TargetRemoved():
            return "removed", {"source": observation.source, "target": observation.target}
        case Gap():
            return "gap", {"seconds": _seconds(observation.t - observation.since)}
        case Tick():
            return "tick", {}


def _facts_document(facts: EngineFacts) -> dict[str, Any]:
    document = {f.name: getattr(facts, f.name) for f in fields(facts) if getattr(facts, f.name) is not None}
    if facts.origin == "configuration":
        del document["origin"]
    return document


def _put_maybe(document: dict[str, Any], errors: dict[str, str], key: str, value: Maybe[Any]) -> None:
    """A value, or null with its reason among the errors; what was not asked for leaves no trace."""
    if value == NOT_READ:
        return
    if isinstance(value, Absent):
        document[key] = None
        errors[key] = value.reason
    else:
        document[key] = value


_GPU_READINGS = (
    "mig_enabled",
    "utilization",
    "temperature",
    "power",
    "ecc_uncorrected",
    "ecc_corrected",
    "recovery_action",
    "pci_bus_id",
)


def _gpu_document(poll: GpuPoll) -> dict[str, Any]:
    errors: dict[str, str] = {}
    document: dict[str, Any] = {"uuid": poll.uuid, "index": poll.index, "name": poll.name}
    _put_maybe(document, errors, "memory", _memory_document(poll.memory))
    _put_maybe(document, errors, "processes", _list_document(poll.processes))
    if poll.mig:
        document["mig"] = [_mig_document(mig) for mig in poll.mig]
    if poll.unified:
        document["unified"] = True
    for name in _GPU_READINGS:
        _put_maybe(document, errors, name, getattr(poll, name))
    rows = poll.remapped_rows
    _put_maybe(document, errors, "remapped_rows", rows if isinstance(rows, Absent) else vars(rows))
    if poll.seconds:
        document["seconds"] = _seconds(poll.seconds)
    document["errors"] = errors
    return document


def _mig_document(mig: MigInstance) -> dict[str, Any]:
    errors: dict[str, str] = {}
    document: dict[str, Any] = {"uuid": mig.uuid, "gi": mig.gi, "ci": mig.ci}
    _put_maybe(document, errors, "memory", _memory_document(mig.memory))
    _put_maybe(document, errors, "processes", _list_document(mig.processes))
    return {**document, "errors": errors} if errors else document


def _memory_document(memory: Maybe[Memory]) -> Maybe[dict[str, int | None]]:
    if isinstance(memory, Absent):
        return memory
    return {"total": memory.total, "reserved": memory.reserved, "used": memory.used, "free": memory.free}


def _list_document(processes: Maybe[tuple[GpuProcess, ...]]) -> Maybe[list[dict[str, int | None]]]:
    if isinstance(processes, Absent):
        return processes
    return [{"pid": process.pid, "used": process.used} for process in processes]


def _scrape_document(scrape: EngineScrape) -> dict[str, Any]:
    document = {"engine": scrape.engine, "ok": scrape.answered, "seconds": _seconds(scrape.seconds)}
    if scrape.state != "ok":
        document["state"] = scrape.state
    if not scrape.answered or scrape.error:
        document["error"] = scrape.error or scrape.state
    document.update(_given(version=known(scrape.version)))
    if scrape.healthy != NOT_READ:
        document["healthy"] = known(scrape.healthy)
    if scrape.answered or scrape.samples:
        document["samples"] = dict(scrape.samples)
    return document


def _process_document(process: HostProcess) -> dict[str, Any]:
    errors: dict[str, str] = {}
    document: dict[str, Any] = {"pid": process.pid, "start": process.start, "rss": process.rss}
    _put_maybe(document, errors, "anon", process.anon)
    document.update(
        name=process.name,
        container=process.container,
        pod_uid=process.pod_uid,
        memory_limit=process.memory_limit,
        engine=process.engine,
    )
    document.update(_given(ppid=process.ppid))
    if (process.role, process.rank) != role_of(process.name):
        document.update(role=process.role, rank=process.rank)
    return {**document, "errors": errors} if errors else document


def _log_document(line: LogLine, log_text: bool) -> dict[str, Any] | None:
    text = line.line if log_text else None
    if text is None and line.event is None:
        return None
    document = {
        "engine": line.engine,
        **_given(event=line.event),
        **({"fields": dict(line.fields)} if line.event else {}),
    }
    return document if text is None else {**document, "line": text}


_OWNERS = ("pid", "total", "free", "living", "finished")
_OWNERS_MAYBE = ("ownerless", "cached")
_ALLOCATOR_SIZES = ("free", "releasable", "private_reserved", "private_free", "max_split_size")
_ALLOCATOR_FACTS = ("backend", "expandable", "engine", "started")
_FAILURE_SIZES = tuple(f.name for f in fields(AllocationFailure) if f.name != "t")


def _owners_document(owners: BlockOwners) -> dict[str, Any]:
    counts = {name: getattr(owners, name) for name in (*_OWNERS, *_OWNERS_MAYBE)}
    # How long ago, so that the time does not depend on the header.
    return {"rank": owners.rank, "age": _seconds(owners.t - owners.counted), **_given(**counts)}


def _allocator_document(report: AllocatorReport) -> dict[str, Any]:
    failure = report.failure
    return {
        "pid": report.pid,
        "gpu": report.gpu,
        "stats": dict(report.stats),
        "largest_free_block": report.largest_free_block,
        **_given(
            **{name: getattr(report, name) for name in (*_ALLOCATOR_SIZES, *_ALLOCATOR_FACTS)},
            free_by_size=[list(one) for one in report.free_by_size] or None,
            # How long ago, so that the time does not depend on the header.
            failure=failure
            and {
                "ago": _seconds(report.t - failure.t),
                **_given(**{name: getattr(failure, name) for name in _FAILURE_SIZES}),
            },
        ),
    }


_DRIVER_READINGS = ("driver_version", "nvml_version", "cuda_version", "device_count")


def _driver_document(report: DriverReport) -> dict[str, Any]:
    errors: dict[str, str] = {}
    document: dict[str, Any] = {"state": report.state, **_given(detail=report.detail)}
    for name in _DRIVER_READINGS:
        _put_maybe(document, errors, name, getattr(report, name))
    return {**document, "errors": errors}


# --- reading ---------------------------------------------------------------------------------------------------


class _Fields:
    """A JSON object whose keys are taken out by type; what is wrong with one is said with its path."""

    def __init__(self, data: object, path: str) -> None:
        if not isinstance(data, dict):
            raise _Malformed(f"{path or 'the line'} is {_shown(data)}, and has to be an object {{…}}")
        self._data: dict[str, Any] = data
        self._path = path

    def __contains__(self, key: str) -> bool:
        return key in self._data

    def __iter__(self) -> Iterator[str]:
        return iter(self._data)

    def has(self, key: str) -> bool:
        """The key is there, and not null."""
        return self._data.get(key) is not None

    def place(self, key: str) -> str:
        return f"{self._path}.{key}" if self._path else key

    def text(self, key: str) -> str:
        return self._typed(key, str, "a text")

    def whole(self, key: str) -> int:
        value = self.number(key)
        if value != int(value):
            raise _Malformed(f"{self.place(key)} is {value}, and has to be a whole number")
        return int(value)

    def number(self, key: str) -> float:
        value = self._data.get(key)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise self._wrong(key, "a number")
        return value

    def boolean(self, key: str) -> bool:
        return self._typed(key, bool, "true or false")

    def section(self, key: str) -> _Fields:
        return _Fields(self._data.get(key, {}), self.place(key))

    def plain(self, key: str) -> dict[str, Any]:
        """An object as it is; an empty one where there is none."""
        return self._typed(key, dict, "an object {…}") if self.has(key) else {}

    def listed(self, key: str) -> list[Any]:
        return self._typed(key, list, "a list […]")

    def optional(self, key: str, take: Callable[[str], T]) -> T | None:
        return take(key) if self.has(key) else None

    def maybe(self, key: str, errors: Mapping[str, str], take: Callable[[str], T]) -> Maybe[T]:
        if self.has(key):
            return take(key)
        if key in errors:
            return Absent(errors[key])
        return NOT_KNOWN if key in self._data else NOT_READ

    def texts(self, key: str) -> tuple[str, ...]:
        return tuple(_Fields({key: item}, self._path).text(key) for item in self.listed(key))

    def wholes(self, key: str) -> tuple[int, ...]:
        return tuple(_Fields({key: item}, self._path).whole(key) for item in self.listed(key))

    def errors(self) -> dict[str, str]:
        errors = self.section("errors") if self.has("errors") else _Fields({}, "")
        return {name: errors.text(name).removeprefix("NVML_ERROR_") for name in errors if errors.has(name)}

    def _typed(self, key: str, kind: type[T], words: str) -> T:
        value = self._data.get(key)
        if not isinstance(value, kind):
            raise self._wrong(key, words)
        return value

    def _wrong(self, key: str, words: str) -> _Malformed:
        found = _shown(self._data[key]) if key in self._data else "missing"
        return _Malformed(f"{self.place(key)} is {found}, and has to be {words}")


def _shown(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}…"


class Decoder:
    """Turns lines into observations, in order. Keeps what the recording has told of engines and processes so far."""

    def __init__(self, start: float = 0.0, engines: Iterable[EngineFacts] = ()) -> None:
        self._start = start
        self._facts = {facts.name: facts for facts in engines}
        self._processes: dict[int, HostProcess] = {}

    def observation(self, line: str | bytes) -> Observation | None:
        """The observation of one line; None for a kind that this version does not know. Raises RecordingError."""
        try:
            found = self.decode(_parsed(line))
        except _Malformed as problem:
            raise RecordingError(str(problem)) from None
        return found if not isinstance(found, str) else None

    def decode(self, line: _Fields) -> Observation | str:
        """The observation; the name of its kind where that is not known."""
        t = round(line.number("t") + self._start, _DECIMALS)
        names = [name for name in line if name != "t"]
        for name in names:
            if name in _KINDS:
                return _KINDS[name](self, t, line.section(name))
        if not names:
            raise _Malformed("the line has a time and no observation")
        return names[0]

    # --- engines ---------------------------------------------------------------------------------------------

    def _engine(self, t: float, engine: _Fields) -> Observation:
        facts = _facts(engine)
        gone = bool(engine.optional("gone", engine.boolean))
        before = self._facts.get(facts.name)
        if gone:
            self._facts.pop(facts.name, None)
        else:
            self._facts[facts.name] = facts if before is None else merged_facts(before, facts)
        return EngineUpdate(t, facts, gone)

    def _scrape(self, t: float, scrape: _Fields) -> Observation:
        engine = scrape.text("engine")
        base = EngineScrape(
            t=t,
            engine=engine,
            state=self._failed_state(scrape),
            seconds=scrape.optional("seconds", scrape.number) or 0.0,
            error=scrape.optional("error", scrape.text) or "",
            version=scrape.optional("version", scrape.text) or NOT_KNOWN,
            healthy=scrape.maybe("healthy", {}, scrape.boolean),
        )
        ok = scrape.boolean("ok")
        if not ok and not scrape.has("samples") and not scrape.has("page"):
            return base
        short = not scrape.has("page")
        try:
            page = samples_from_recording(_samples(scrape)) if short else read_metrics(scrape.text("page").encode())
        except PageError as error:
            return replace(base, state=error.state, error=str(error))
        facts = self._facts.get(engine)
        version = known(base.version) or (facts.vllm_version if facts else None)
        return _read(base, page, read_page(page, version, facts), scrape.optional("state", scrape.text), ok, short)

    @staticmethod
    def _failed_state(scrape: _Fields) -> str:
        state = scrape.optional("state", scrape.text)
        if state in SCRAPE_STATES:
            return state
        return _state_of(scrape.optional("error", scrape.text) or "")

    def _log(self, t: float, log: _Fields) -> Observation:
        line = LogLine(
            t,
            log.text("engine"),
            line=log.optional("line", log.text),
            event=log.optional("event", log.text),
            fields=log.plain("fields"),
        )
        try:
            entry = entry_of(line)
        except ValueError as problem:
            raise _Malformed(f"log.fields: {problem}") from None
        # A raw line is read once, here: whoever records it anew without its text keeps its numbers.
        return replace(line, event=entry.event.name, fields=plain(entry)) if entry and line.event is None else line

    def _allocator(self, t: float, report: _Fields) -> Observation:
        stats = report.section("stats")
        return AllocatorReport(
            t,
            report.whole("pid"),
            report.text("gpu"),
            {name: stats.whole(name) for name in stats if stats.has(name)},
            report.optional("largest_free_block", report.whole),
            **{name: report.optional(name, report.whole) for name in _ALLOCATOR_SIZES},
            free_by_size=_classes(report),
            backend=report.optional("backend", report.text),
            expandable=report.optional("expandable", report.boolean),
            failure=_failure(t, report.section("failure")) if report.has("failure") else None,
            engine=report.optional("engine", report.text),
            started=report.optional("started", report.number),
        )

    def _owners(self, t: float, owners: _Fields) -> Observation:
        counts = {name: owners.whole(name) for name in _OWNERS}
        counted = _seconds(t - (owners.optional("age", owners.number) or 0.0))
        ownerless, cached = (owners.optional(name, owners.whole) for name in _OWNERS_MAYBE)
        return BlockOwners(t, rank=owners.text("rank"), counted=counted, ownerless=ownerless, cached=cached, **counts)

    # --- GPUs ------------------------------------------------------------------------------------------------

    def _gpu(self, t: float, gpu: _Fields) -> Observation:
        errors = gpu.errors()
        rows = gpu.maybe("remapped_rows", errors, gpu.section)
        return GpuPoll(
            t=t,
            uuid=gpu.text("uuid"),
            index=gpu.whole("index") if gpu.has("index") else -1,
            name=gpu.optional("name", gpu.text) or "",
            memory=gpu.maybe("memory", errors, lambda key: _memory(gpu.section(key))),
            processes=gpu.maybe("processes", errors, lambda key: _listed(gpu, key)),
            mig=tuple(_mig(_Fields(item, "gpu.mig")) for item in gpu.listed("mig")) if gpu.has("mig") else (),
            mig_enabled=gpu.maybe("mig_enabled", errors, gpu.boolean),
            unified=bool(gpu.optional("unified", gpu.boolean)),
            utilization=gpu.maybe("utilization", errors, gpu.number),
            temperature=gpu.maybe("temperature", errors, gpu.number),
            power=gpu.maybe("power", errors, gpu.number),
            ecc_uncorrected=gpu.maybe("ecc_uncorrected", errors, gpu.whole),
            ecc_corrected=gpu.maybe("ecc_corrected", errors, gpu.whole),
            remapped_rows=rows if isinstance(rows, Absent) else _remapped(rows),
            recovery_action=gpu.maybe("recovery_action", errors, gpu.whole),
            pci_bus_id=gpu.maybe("pci_bus_id", errors, gpu.text),
            seconds=gpu.optional("seconds", gpu.number) or 0.0,
        )

    def _xid(self, t: float, xid: _Fields) -> Observation:
        return XidEvent(t, xid.text("uuid"), xid.whole("code"))

    def _driver(self, t: float, driver: _Fields) -> Observation:
        errors = driver.errors()
        return DriverReport(
            t,
            driver.text("state"),
            driver.optional("detail", driver.text) or "",
            driver_version=driver.maybe("driver_version", errors, driver.text),
            nvml_version=driver.maybe("nvml_version", errors, driver.text),
            cuda_version=driver.maybe("cuda_version", errors, driver.text),
            device_count=driver.maybe("device_count", errors, driver.whole),
        )

    # --- the host --------------------------------------------------------------------------------------------

    def _process(self, t: float, process: _Fields) -> Observation:
        pid = process.whole("pid")
        if process.optional("gone", process.boolean):
            self._processes.pop(pid, None)
            return ProcessGone(t, pid)
        anon = process.maybe("anon", process.errors(), process.whole)
        name = process.optional("name", process.text) or ""
        role, rank = role_of(name)
        if process.has("role"):
            role, rank = process.text("role"), process.optional("rank", process.text)
        found = HostProcess(
            t=t,
            pid=pid,
            start=process.optional("start", process.number) or 0.0,
            # The anonymous part is the least that is resident.
            rss=process.whole("rss") if process.has("rss") else (known(anon) or 0),
            anon=anon,
            name=name,
            ppid=process.optional("ppid", process.whole),
            container=process.optional("container", process.text),
            pod_uid=process.optional("pod_uid", process.text),
            memory_limit=process.optional("memory_limit", process.whole),
            engine=process.optional("engine", process.text),
            role=role,
            rank=rank,
        )
        self._processes[pid] = found
        if "engine" not in process:
            holder = Attribution(self._facts.values(), self._processes).holder(pid)
            found = self._processes[pid] = replace(found, engine=holder.name if holder.kind == "engine" else None)
        return found

    def _probe(self, t: float, probe: _Fields) -> Observation:
        error = probe.optional("error", probe.text) or ""
        return ProbeResult(t, probe.text("engine"), probe.boolean("ok"), probe.number("seconds"), error)

    def _host(self, t: float, host: _Fields) -> Observation:
        return HostMemory(t, host.whole("memory_total"), host.whole("memory_available"))

    # --- time and health -------------------------------------------------------------------------------------

    def _run(self, t: float, run: _Fields) -> Observation:
        return SourceRun(
            t,
            run.text("source"),
            run.optional("target", run.text) or "",
            run.boolean("ok"),
            run.number("seconds"),
            run.optional("error", run.text) or "",
        )

    def _removed(self, t: float, removed: _Fields) -> Observation:
        return TargetRemoved(t, removed.text("source"), removed.text("target"))

    def _gap(self, t: float, gap: _Fields) -> Observation:
        return Gap(t, round(t - gap.number("seconds"), _DECIMALS))

    def _tick(self, t: float, _tick: _Fields) -> Observation:
        return Tick(t)


_KINDS: Mapping[str, Callable[[Decoder, float, _Fields], Observation]] = {
    "gpu": Decoder._gpu,
    "xid": Decoder._xid,
    "scrape": Decoder._scrape,
    "process": Decoder._process,
    "host": Decoder._host,
    "probe": Decoder._probe,
    "engine": Decoder._engine,
    "log": Decoder._log,
    "allocator": Decoder._allocator,
    "owners": Decoder._owners,
    "tick": Decoder._tick,
    "gap": Decoder._gap,
    "driver": Decoder._driver,
    "run": Decoder._run,
    "removed": Decoder._removed,
}


def _parsed(line: str | bytes) -> _Fields:
    try:
        return _Fields(json.loads(line, parse_constant=_refused), "")
    except RecursionError:
        raise _Malformed("it is nested too deeply") from None
    except UnicodeDecodeError:
        raise _Malformed("it is not UTF-8 text") from None
    except json.JSONDecodeError as error:
        raise _Malformed(f"it is not JSON: {error.msg.lower()} at character {error.pos + 1}") from None
    except ValueError as error:
        raise _Malformed(f"it is not JSON: {error}") from None


def _refused(word: str) -> float:
    raise ValueError(f"{word} is no number; a value that was not available is null")


def _facts(engine: _Fields) -> EngineFacts:
    return EngineFacts(
        name=engine.text("name"),
        target=engine.optional("target", engine.text),
        pids=engine.optional("pids", engine.wholes),
        gpus=engine.optional("gpus", engine.texts),
        gpu_memory_utilization=engine.optional("gpu_memory_utilization", engine.number),
        max_model_len=engine.optional("max_model_len", engine.whole),
        max_num_seqs=engine.optional("max_num_seqs", engine.whole),
        max_num_batched_tokens=engine.optional("max_num_batched_tokens", engine.whole),
        vllm_version=engine.optional("vllm_version", engine.text),
        kv_connector=engine.optional("kv_connector", engine.boolean),
        kv_pool_blocks=engine.optional("kv_pool_blocks", engine.whole),
        kv_pool_bytes=engine.optional("kv_pool_bytes", engine.whole),
        weights_bytes=engine.optional("weights_bytes", engine.whole),
        no_address=engine.optional("no_address", engine.text),
        origin=engine.optional("origin", engine.text) or "configuration",
    )


def merged_facts(before: EngineFacts, now: EngineFacts) -> EngineFacts:
    """What is given replaces what was known; what is not given stays."""
    return replace(before, **{f.name: getattr(now, f.name) for f in fields(now) if getattr(now, f.name) is not None})


def _samples(scrape: _Fields) -> dict[str, float]:
    samples = scrape.section("samples")
    return {series: samples.number(series) for series in samples if samples.has(series)}


def _read(
    base: EngineScrape, page: Page, reading: PageReading, recorded: str | None, ok: bool, short: bool
) -> EngineScrape:
    state, error = reading.state, base.error or reading.error
    if recorded in SCRAPE_STATES:
        state = recorded
    elif short and ok and state == "not_vllm":
        # The short form leaves out the families by which a vLLM without statistics is recognised.
        state, error = "stats_disabled", base.error or "vLLM answers, but shows no vllm: series"
    elif not ok:
        state = base.state
    return replace(
        base,
        state=state,
        error=error,
        ranks=reading.ranks,
        model_name=reading.model_name,
        process_start=reading.process_start,
        kv_connector=reading.kv_connector,
        adapters=reading.adapters,
        samples=samples_for_recording(page),
    )


_STATES_BY_WORDS = (
    (("timeout", "timed out"), "timeout"),
    (("401", "403", "unauthorized", "forbidden"), "unauthorized"),
    (("certificate", "tls", "ssl"), "tls_error"),
    (("redirect",), "redirected"),
    (("http ", "status "), "http_error"),
)


def _state_of(error: str) -> str:
    """One of SCRAPE_STATES by the free text of a failed scrape."""
    text = error.lower()
    if text.replace(" ", "_") in SCRAPE_STATES:
        return text.replace(" ", "_")
    return next((state for words, state in _STATES_BY_WORDS if any(word in text for word in words)), "unreachable")


def _failure(t: float, failure: _Fields) -> AllocationFailure:
    sizes = {name: failure.optional(name, failure.whole) for name in _FAILURE_SIZES}
    return AllocationFailure(_seconds(t - failure.number("ago")), **sizes)


def _classes(report: _Fields) -> tuple[tuple[int, int], ...]:
    """Pairs of a size and the free bytes in blocks up to it."""
    if not report.has("free_by_size"):
        return ()
    classes = [
        _Fields({"sizes": pair}, report.place("free_by_size")).wholes("sizes") for pair in report.listed("free_by_size")
    ]
    if any(len(pair) != 2 for pair in classes):
        raise _Malformed(f"{report.place('free_by_size')} has to be a list of pairs [size, bytes]")
    return tuple((pair[0], pair[1]) for pair in classes)


def _memory(memory: _Fields) -> Memory:
    return Memory(
        total=memory.whole("total"),
        reserved=memory.optional("reserved", memory.whole),
        used=memory.whole("used"),
        free=memory.whole("free"),
    )


def _listed(holder: _Fields, key: str) -> tuple[GpuProcess, ...]:
    found: list[GpuProcess] = []
    for item in holder.listed(key):
        process = _Fields(item, holder.place(key))
        found.append(GpuProcess(process.whole("pid"), process.optional("used", process.whole)))
    return tuple(found)


def _mig(mig: _Fields) -> MigInstance:
    errors = mig.errors()
    return MigInstance(
        uuid=mig.text("uuid"),
        gi=mig.whole("gi"),
        ci=mig.whole("ci"),
        memory=mig.maybe("memory", errors, lambda key: _memory(mig.section(key))),
        processes=mig.maybe("processes", errors, lambda key: _listed(mig, key)),
    )


def _remapped(rows: _Fields) -> RemappedRows:
    return RemappedRows(
        rows.whole("correctable"), rows.whole("uncorrectable"), rows.boolean("pending"), rows.boolean("failed")
    )


def from_line(line: str, engines: Iterable[EngineFacts] = (), start: float = 0.0) -> Observation | None:
    """One line alone, with what is known of the engines; None for an unknown kind. Raises RecordingError."""
    return Decoder(start, engines).observation(line)


# --- files -----------------------------------------------------------------------------------------------------


class _Lines:
    """The lines of a file with their numbers, some of which can be looked at before they are taken."""

    def __init__(self, stream: IO[bytes], name: str) -> None:
        self._stream = stream
        self._name = name
        self._number = 0
        self._ahead: deque[bytes] = deque()
        self._problem: RecordingError | None = None

    def __iter__(self) -> Iterator[tuple[int, bytes]]:
        while True:
            line = self._ahead.popleft() if self._ahead else self._read()
            if line is None:
                if self._problem is not None:
                    raise self._problem
                return
            self._number += 1
            yield self._number, line

    def look_ahead(self, lines: int = _LOOK_AHEAD_LINES) -> Iterable[bytes]:
        """The next lines, as many as may be kept in memory."""
        size = sum(map(len, self._ahead))
        while len(self._ahead) < lines and size < _LOOK_AHEAD_BYTES:
            line = self._read()
            if line is None:
                break
            self._ahead.append(line)
            size += len(line)
        return self._ahead

    def _read(self) -> bytes | None:
        """The next line; None at the end and at a problem, which is kept until everything before it was taken."""
        if self._problem is not None:
            return None
        try:
            return self._read_line() or None
        except RecordingError as problem:
            self._problem = problem
            return None

    def _read_line(self) -> bytes:
        place = f"{self._name}: after line {self._number + len(self._ahead)}"
        try:
            line = self._stream.readline(_LONGEST_LINE + 1)
        except EOFError:
            raise RecordingError(
                f"{place}: the gzip file breaks off (it was still being written, or was not copied whole). "
                "What stands before was read; copy it again for the rest"
            ) from None
        except (gzip.BadGzipFile, zlib.error) as error:
            raise RecordingError(
                f"{place}: the gzip file is damaged ({error}). What stands before was read; copy it again"
            ) from None
        except OSError as error:
            raise RecordingError(f"{place}: cannot be read: {(error.strerror or str(error)).lower()}") from None
        if len(line) > _LONGEST_LINE:
            raise RecordingError(f"{place}: the next line is longer than 64 MiB. This is no recording")
        return line


class Recording:
    """An open recording: its header, and its observations by iterating once. ``name`` is the file's, for messages.

    ``lines`` counts the observations that were read, ``ignored`` those among them whose kind is not known. ``start``
    is the unix time that ``t`` 0 of the file stands for.
    """

    def __init__(self, stream: IO[bytes], name: str) -> None:
        self.name = name
        self._source = stream
        stream = _unpacked(stream)
        self.lines = 0
        self.ignored: Counter[str] = Counter()
        self._stream = stream
        self._lines = _Lines(stream, name)
        self.header = self._read_header()
        self.start = self._start()
        self._last = -math.inf

    def __enter__(self) -> Recording:
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self._stream.close()
        self._source.close()

    def intervals(self) -> dict[str, float]:
        """Seconds between two readings of a source: as the header says, else the median distance that was seen.

        The median is over the next 20,000 lines; a source that is seen once there, or never, is left out.
        """
        seen = _Distances()
        for line in () if self.header.intervals.keys() >= _SOURCES else self._lines.look_ahead():
            with contextlib.suppress(_Malformed):  # reading says what is wrong, in its place
                seen.add(_parsed(line))
        return {**seen.medians(), **self.header.intervals}

    def __iter__(self) -> Iterator[Observation]:
        decoder = Decoder(self.start, self.header.engines)
        for number, line in self._lines:
            if not line.strip():
                continue
            try:
                fields_ = _parsed(line)
                t = fields_.number("t")
                if t < self._last:
                    raise _Malformed(
                        f"out of order: its time {t:g} s is before {self._last:g} s of the line before. "
                        "Sort the lines by t"
                    )
                found = decoder.decode(fields_)
            except _Malformed as problem:
                raise RecordingError(self._message(number, line, str(problem))) from None
            self._last = t
            self.lines += 1
            if isinstance(found, str):
                self.ignored[found] += 1
            else:
                yield found

    def _message(self, number: int, line: bytes, problem: str) -> str:
        if not line.endswith(b"\n") and "not JSON" in problem:
            problem = "the file breaks off in the middle of this line. What stands before was read"
        return f"{self.name}:{number}: {problem}"

    def _read_header(self) -> Header:
        number, line = next(iter(self._lines), (0, b""))
        if not number:
            raise RecordingError(f"{self.name}: the file is empty: this is no recording")
        try:
            return read_header(line)
        except RecordingError as error:
            raise RecordingError(f"{self.name}:1: {error}") from None

    def _start(self) -> float:
        if self.header.start is None:
            return 0.0
        for line in self._lines.look_ahead(1):
            with contextlib.suppress(_Malformed):
                return 0.0 if _parsed(line).number("t") >= _UNIX_TIMES_FROM else self.header.start
        return self.header.start


def read_header(line: str | bytes) -> Header:
    """The header of a recording. Raises RecordingError."""
    try:
        document = _parsed(line)
        if "oomwatch_recording" not in document:
            raise _Malformed("oomwatch_recording is missing")
        _check_version(document)
    except _Malformed as problem:
        raise RecordingError(
            f'no header of a recording ({problem}). The first line has to begin {{"oomwatch_recording": 1, …'
        ) from None
    try:
        return _header(document)
    except _Malformed as problem:
        raise RecordingError(str(problem)) from None


def _check_version(document: _Fields) -> None:
    version = document.text("oomwatch_recording") if _is_text(document) else document.number("oomwatch_recording")
    major = str(version).split(".", 1)[0]
    if major != str(MAJOR_VERSION):
        raise RecordingError(
            f"a recording of format {version}; this oomwatch reads format {MAJOR_VERSION}. Use a newer oomwatch for it"
        )


def _is_text(document: _Fields) -> bool:
    return isinstance(document._data.get("oomwatch_recording"), str)


def _header(document: _Fields) -> Header:
    intervals = document.section("intervals") if document.has("intervals") else _Fields({}, "")
    engines = document.listed("engines") if document.has("engines") else []
    return Header(
        start=_start_time(document.text("start")) if document.has("start") else None,
        note=document.optional("note", document.text) or "",
        engines=tuple(_facts(_Fields(engine, f"engines[{index}]")) for index, engine in enumerate(engines)),
        intervals={name: _positive(intervals, name) for name in intervals if intervals.has(name)},
    )


def _positive(intervals: _Fields, name: str) -> float:
    seconds = intervals.number(name)
    if seconds <= 0:
        raise _Malformed(f"{intervals.place(name)} is {seconds:g}, and has to be above 0 seconds")
    return seconds


def _start_time(text: str) -> float:
    try:
        return unix_time(text)
    except ValueError:
        raise _Malformed(f"start is {_shown(text)}, and has to be a time such as 2026-11-01T00:00:00Z") from None


def unix_time(text: str) -> float:
    """Unix time of a moment in ISO 8601, in UTC unless it says otherwise. Raises ValueError."""
    moment = datetime.fromisoformat(text.strip().replace("Z", "+00:00"))
    return (moment if moment.tzinfo else moment.replace(tzinfo=timezone.utc)).timestamp()


class _Distances:
    """Seconds between a source's observations of one target each."""

    def __init__(self) -> None:
        self._last: dict[tuple[str, str], float] = {}
        self._seen: dict[str, list[float]] = {}

    def add(self, line: _Fields) -> None:
        t = line.number("t")
        if "gpu" in line:
            gpu = line.section("gpu")
            self._put("gpu", gpu.text("uuid"), t)
            if gpu.has("processes") or any(
                _Fields(mig, "").has("processes") for mig in gpu.optional("mig", gpu.listed) or ()
            ):
                self._put("lists", gpu.text("uuid"), t)
        elif "scrape" in line:
            self._put("scrape", line.section("scrape").text("engine"), t)
        elif "process" in line and "gone" not in line.section("process"):
            self._put("process", str(line.section("process").whole("pid")), t)

    def _put(self, source: str, target: str, t: float) -> None:
        before = self._last.get((source, target))
        if before is not None and t > before:
            self._seen.setdefault(source, []).append(t - before)
        self._last[source, target] = t

    def medians(self) -> dict[str, float]:
        return {source: statistics.median(distances) for source, distances in self._seen.items()}


def read(source: Path | str | IO[bytes]) -> Recording:
    """Open a recording, plain or gzip; ``-`` is standard input. Raises RecordingError, also while it is iterated."""
    if isinstance(source, (str, Path)):
        name = str(source)
        if name == "-":
            return Recording(sys.stdin.buffer, "standard input")
        try:
            stream = Path(source).open("rb")  # noqa: SIM115 (the recording closes it)
        except OSError as error:
            raise RecordingError(f"{name}: cannot be read: {(error.strerror or str(error)).lower()}") from None
        try:
            return Recording(stream, name)
        except BaseException:
            stream.close()
            raise
    return Recording(source, str(getattr(source, "name", "recording")))


def _unpacked(stream: IO[bytes]) -> IO[bytes]:
    """The stream's text, decompressed where it begins like gzip."""
    buffered = io.BufferedReader(_Raw(stream))
    try:
        magic = buffered.peek(2)[:2]
    except OSError:
        magic = b""  # a folder opens and cannot be read: the first line says so
    plain: Any = gzip.GzipFile(fileobj=buffered, mode="rb") if magic == b"\x1f\x8b" else buffered
    return cast("IO[bytes]", plain)


class _Raw(io.RawIOBase):
    """A readable stream of any kind, as the raw part of a buffered one."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._stream.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)
