"""The allocator source: files that oomwatch-probe writes inside vLLM's processes, for allocators and KV blocks.

A file is believed when its writer is found: the process with that pid in that pid namespace, that start time, and that
user. What lies in the directory besides is left alone, whatever it is.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from oomwatch import probe_layout as layout
from oomwatch.observations import (
    AllocationFailure,
    AllocatorReport,
    BlockOwners,
    Observation,
    SourceRun,
    TargetRemoved,
)
from oomwatch.sources.proc import (
    PROC,
    TICKS_PER_SECOND,
    ProcessTable,
    boot_time,
    pid_in_namespace,
    pid_namespace,
    read_stat,
    sees_host_pids,
    user_of,
)

FileState = Literal["told", "silent", "unreadable", "stranger", "left_over"]
FILE_STATES: tuple[FileState, ...] = ("told", "silent", "unreadable", "stranger", "left_over")

_NAME = re.compile(re.escape(layout.FILE_PREFIX) + r"(\d{1,20})-(\d{1,10})-(\d{1,20})" + re.escape(layout.FILE_SUFFIX))
_DEVICE = re.compile(r"(GPU|MIG)-[0-9A-Za-z/-]+")
_MOST_FILES = 1024  # of one directory; a node has a few dozen
_TRIES = 20  # a write takes microseconds
_SILENT_INTERVALS = 5
_SILENT_AT_LEAST = 15.0  # seconds: the writer's thread waits for the interpreter that the engine has
_LEFT_OVER_AFTER = 60.0  # seconds without a heartbeat, besides the certainty that nobody writes
_SEARCH_AGAIN = 15.0  # seconds until a writer that was not found is looked for again, as engines are by default
_LONGEST_COUNT = 600.0  # seconds after which a count of blocks is history
_LARGEST = 1 << 50  # bytes or blocks: more is no number of a GPU


@dataclass(frozen=True)
class Outcome:
    """What became of one file: ``why`` says in plain English what is wrong with it, empty where nothing is.

    ``note`` is the probe's own word on what it does not read in its process, empty where it reads all.
    """

    path: str
    state: FileState
    engine: str | None = None
    why: str = ""
    note: str = ""


@dataclass
class _Writer:
    """The process behind a file; ``engine`` is whose it was when that was last known."""

    pid: int
    start_ticks: int
    engine: str | None = None
    failed_ns: int = 0  # the last failure that was told


@dataclass
class _Directory:
    writers: dict[str, _Writer] = field(default_factory=dict)
    without_writer: frozenset[str] = frozenset()  # by the last search
    searched: float = 0.0  # when writers were last looked for
    engines: frozenset[str] = frozenset()  # that had a file at the last pass


class AllocatorSource:
    """Reads every probe's file once a pass, and publishes what each tells. Not for use by several threads at once.

    ``engine_of`` answers whose a process is, ``devices_of`` the devices that it uses by the GPUs' lists.
    """

    def __init__(
        self,
        directories: Sequence[Path],
        publish: Callable[[Observation], None],
        engine_of: Callable[[int], str | None],
        devices_of: Callable[[int], Sequence[str]],
        *,
        clock: Callable[[], float] = time.time,
        proc: Path = PROC,
        table: ProcessTable | None = None,
    ) -> None:
        self._directories = {directory: _Directory() for directory in directories}
        self._publish = publish
        self._engine_of = engine_of
        self._devices_of = devices_of
        self._clock = clock
        self._proc = str(proc)
        self._table = table or ProcessTable(proc)
        self._everyone = sees_host_pids(proc)
        self._namespace = pid_namespace(self._proc)
        self._boot: float | None = None
        self.outcomes: tuple[Outcome, ...] = ()  # of the last pass

    def read(self) -> None:
        """One pass over all directories; one that does not exist has nothing to tell."""
        outcomes: list[Outcome] = []
        for directory, known in self._directories.items():
            began, t = time.perf_counter(), self._clock()
            error = ""
            found: list[Outcome] = []
            try:
                found = list(self._read_directory(directory, known, t))
            except FileNotFoundError:
                if not known.writers and not known.engines:
                    continue
            except OSError as problem:
                error = f"{directory} cannot be read: {(problem.strerror or str(problem)).lower()}"
            self._tell_health(directory, known, found, error, t, time.perf_counter() - began)
            outcomes += found
        self.outcomes = tuple(outcomes)

    # --- one directory -------------------------------------------------------------------------------------------

    def _read_directory(self, directory: Path, known: _Directory, t: float) -> Iterator[Outcome]:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            names = sorted(name for name in os.listdir(descriptor) if _NAME.fullmatch(name))[:_MOST_FILES]
            known.writers = {name: writer for name, writer in known.writers.items() if name in names}
            self._find_writers(names, known, t)
            for name in names:
                yield self._read_file(descriptor, directory, name, known, t)
        finally:
            os.close(descriptor)

    def _find_writers(self, names: Sequence[str], known: _Directory, t: float) -> None:
        """Looks through the host's processes for the writers of new files; for those not found, now and then again.

        A writer is older than its file: what one search does not find, the next pass seldom does.
        """
        missing = frozenset(name for name in names if name not in known.writers)
        if missing <= known.without_writer and (not missing or abs(t - known.searched) < _SEARCH_AGAIN):
            return
        by_start: dict[int, list[int]] = {}
        for pid, entry in self._table.refresh().items():
            by_start.setdefault(entry.start_ticks, []).append(pid)
        for name in missing:
            namespace, pid, start_ticks = _identity(name)
            candidates = [
                found
                for found in by_start.get(start_ticks, ())
                if pid_in_namespace(self._proc, found) == pid and self._may_be_in(found, namespace)
            ]
            if len(candidates) == 1:
                known.writers[name] = _Writer(candidates[0], start_ticks)
        known.without_writer, known.searched = missing - known.writers.keys(), t

    def _may_be_in(self, pid: int, namespace: int) -> bool:
        """Only the process' own user and root may ask for its namespace; who may not believes pid and start time."""
        found = pid_namespace(self._proc, pid)
        return found is None or found == namespace

    def _read_file(self, descriptor: int, directory: Path, name: str, known: _Directory, t: float) -> Outcome:
        path = f"{directory}/{name}"
        try:
            data, owner = _contents(descriptor, name)
            report = _decoded(descriptor, name, data)
        except FileNotFoundError:
            return Outcome(path, "left_over")  # it went while we looked
        except OSError as error:
            return Outcome(path, "unreadable", why=(error.strerror or str(error)).lower())
        except layout.LayoutError as error:
            return Outcome(path, "unreadable", why=str(error))
        writer = known.writers.get(name)
        heartbeat, interval = (_seconds(report, what) for what in ("heartbeat_ns", "interval_ns"))
        silence = abs(t - heartbeat) if heartbeat is not None else float("inf")
        if writer is None or not _lives(self._proc, writer):
            self._last_word(report, writer, t)
            return self._without_writer(descriptor, path, name, silence)
        if not _same_user(self._proc, writer.pid, owner):
            return Outcome(path, "stranger", why="it belongs to another user than the process that it speaks for")
        writer.engine = self._engine_of(writer.pid) or writer.engine
        if writer.engine is None:
            return Outcome(path, "stranger", why=f"process {writer.pid} is no known engine's")
        if silence > max(_SILENT_AT_LEAST, _SILENT_INTERVALS * (interval or 0.0)):
            return Outcome(path, "silent", writer.engine, f"the probe in process {writer.pid} is silent")
        self._tell(report, writer, t)
        return Outcome(path, "told", writer.engine, note=_note(report))

    def _without_writer(self, descriptor: int, path: str, name: str, silence: float) -> Outcome:
        """A file whose writer is not there: removed where that is certain, and only then."""
        namespace, _, _ = _identity(name)
        if not self._everyone and namespace != self._namespace:
            return Outcome(
                path, "stranger", why="its process cannot be seen from here: run oomwatch with the host's pids"
            )
        if silence > _LEFT_OVER_AFTER:
            with contextlib.suppress(OSError):
                os.unlink(name, dir_fd=descriptor)
        return Outcome(path, "left_over")

    # --- what a file tells ---------------------------------------------------------------------------------------

    def _tell(self, report: layout.Report, writer: _Writer, t: float) -> None:
        said = self._allocator(report, writer, t)
        if said is not None:
            self._publish(said)
        owners = _owners(report, writer.pid, t)
        if owners is not None:
            self._publish(owners)

    def _last_word(self, report: layout.Report, writer: _Writer | None, t: float) -> None:
        """A process that failed an allocation and ended: its file still has the numbers of that moment."""
        if writer is None or writer.engine is None:
            return
        failed = report.numbers["oom_time_ns"]
        if not isinstance(failed, layout.Absence) and failed > writer.failed_ns:
            said = self._allocator(report, writer, t)
            if said is not None:
                self._publish(said)

    def _allocator(self, report: layout.Report, writer: _Writer, t: float) -> AllocatorReport | None:
        """None where the process has no allocator that could be read yet, or needs none."""
        if report.numbers["allocated_bytes"] == layout.Absence.NOT_YET:
            return None
        stats = {
            statistic: value for statistic, name in _STATISTICS.items() if (value := _number(report, name)) is not None
        }
        failed = report.numbers["oom_time_ns"]
        if not isinstance(failed, layout.Absence):
            writer.failed_ns = failed
        classes = tuple(
            (smallest, size)
            for smallest, index in _CLASSES
            if (size := _number(report, f"free_bytes_class_{index}")) is not None
        )
        backend = report.texts["allocator_backend"]
        return AllocatorReport(
            t,
            writer.pid,
            self._device(report, writer.pid),
            stats,
            largest_free_block=_number(report, "largest_free_block_bytes"),
            free=_number(report, "free_bytes"),
            releasable=_number(report, "releasable_bytes"),
            private_reserved=_number(report, "private_pools_reserved_bytes"),
            private_free=_number(report, "private_free_bytes"),
            free_by_size=classes,
            backend=backend if backend in _BACKENDS else None,
            expandable=_flag(_number(report, "expandable_segments")),
            max_split_size=_number(report, "max_split_size_bytes"),
            failure=_failure(report, t),
            engine=writer.engine,
            started=self._started(writer),
        )

    def _started(self, writer: _Writer) -> float | None:
        if self._boot is None:
            with contextlib.suppress(OSError, ValueError):
                self._boot = boot_time(self._proc)
        return None if self._boot is None else self._boot + writer.start_ticks / TICKS_PER_SECOND

    def _device(self, report: layout.Report, pid: int) -> str:
        """By the GPUs' lists where these know the process: a slice's uuid is told by them alone."""
        listed = self._devices_of(pid)
        told = report.texts["device_uuid"]
        if told in listed or len(listed) != 1:
            return told if _DEVICE.fullmatch(told) else ""
        return listed[0]

    # --- health --------------------------------------------------------------------------------------------------

    def _tell_health(
        self, directory: Path, known: _Directory, found: Sequence[Outcome], error: str, t: float, seconds: float
    ) -> None:
        """One run for the directory, and one for each engine with a probe in it."""
        unreadable = [f"{outcome.path}: {outcome.why}" for outcome in found if outcome.state == "unreadable"]
        whole = error or "; ".join(unreadable[:3])
        self._publish(SourceRun(t, "allocator", str(directory), not whole, seconds, whole))
        by_engine: dict[str, list[str]] = {}
        for outcome in found:
            if outcome.engine is not None:
                by_engine.setdefault(outcome.engine, []).append(outcome.why)
        for engine, reasons in by_engine.items():
            problem = "; ".join(sorted({why for why in reasons if why}))
            self._publish(SourceRun(t, "allocator", engine, not problem, seconds, problem))
        for engine in known.engines - by_engine.keys():
            self._publish(TargetRemoved(t, "allocator", engine))
        known.engines = frozenset(by_engine)


_STATISTICS: Mapping[str, str] = {
    "allocated_bytes.all.current": "allocated_bytes",
    "allocated_bytes.all.peak": "allocated_bytes_peak",
    "reserved_bytes.all.current": "reserved_bytes",
    "reserved_bytes.all.peak": "reserved_bytes_peak",
    "active_bytes.all.current": "active_bytes",
    "active_bytes.all.peak": "active_bytes_peak",
    "inactive_split_bytes.all.current": "inactive_split_bytes",
    "inactive_split_bytes.all.peak": "inactive_split_bytes_peak",
    "requested_bytes.all.current": "requested_bytes",
    "requested_bytes.all.peak": "requested_bytes_peak",
    "segment.all.current": "segments",
    "segment.all.peak": "segments_peak",
    "num_alloc_retries": "alloc_retries",
    "num_ooms": "ooms",
    "num_device_alloc": "device_allocs",
    "num_device_free": "device_frees",
}
"""Statistics by PyTorch's names, and by the layout's."""

_CLASSES = (
    (0, 0),
    *((layout.FIRST_SIZE_CLASS_BYTES << (index - 1), index) for index in range(1, layout.SIZE_CLASSES)),
)
_BACKENDS = ("native", "cudaMallocAsync", "pluggable")


def _number(report: layout.Report, name: str) -> int | None:
    """A number of a file, None where it cannot be one of a GPU."""
    value = report.numbers[name]
    return None if isinstance(value, layout.Absence) or value > _LARGEST else value


def _owners(report: layout.Report, pid: int, t: float) -> BlockOwners | None:
    """None where the process has no block pool, or where its count is too old or contradicts itself."""
    counted = _seconds(report, "blocks_time_ns")
    total, free, living, finished = (
        _number(report, f"blocks_{name}") for name in ("total", "free", "living", "finished")
    )
    if counted is None or total is None or free is None or living is None or finished is None:
        return None
    ownerless, cached = _number(report, "blocks_ownerless"), _number(report, "blocks_free_cached")
    if t - counted > _LONGEST_COUNT or free + living + finished + (ownerless or 0) > total:
        return None
    rank = _number(report, "data_parallel_rank") or 0
    return BlockOwners(t, pid, str(rank), min(t, counted), total, free, living, finished, ownerless, cached)


def _failure(report: layout.Report, t: float) -> AllocationFailure | None:
    failed = _seconds(report, "oom_time_ns")
    if failed is None:
        return None
    return AllocationFailure(
        min(t, failed),
        wanted=_number(report, "oom_request_bytes"),
        free=_number(report, "oom_device_free_bytes"),
        allocated=_number(report, "oom_allocated_bytes"),
        reserved=_number(report, "oom_reserved_bytes"),
        total=_number(report, "oom_device_total_bytes"),
    )


def _note(report: layout.Report) -> str:
    notes = (report.texts["allocator_note"], report.texts["blocks_note"])
    return "; ".join("".join(char for char in note if char.isprintable()) for note in notes if note)


def _seconds(report: layout.Report, name: str) -> float | None:
    value = report.numbers[name]
    return None if isinstance(value, layout.Absence) else value / 1e9


def _flag(value: int | None) -> bool | None:
    return None if value is None else bool(value)


def _identity(name: str) -> tuple[int, int, int]:
    """Pid namespace, pid in it, and start time in clock ticks since boot."""
    found = _NAME.fullmatch(name)
    assert found is not None
    return int(found[1]), int(found[2]), int(found[3])


# --- files and processes -----------------------------------------------------------------------------------------


def _contents(descriptor: int, name: str) -> tuple[bytes, int]:
    """A file's bytes and its user. Raises OSError, LayoutError for what is no plain file of the layout's size."""
    # Opening a pipe would wait for its other end, and a link might lead anywhere.
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    opened = os.open(name, flags, dir_fd=descriptor)
    try:
        about = os.fstat(opened)
        if not stat.S_ISREG(about.st_mode):
            raise layout.LayoutError("no plain file")
        if about.st_size != layout.FILE_SIZE:
            raise layout.LayoutError(f"{about.st_size} bytes, and {layout.FILE_SIZE} were expected")
        return os.pread(opened, layout.FILE_SIZE, 0), about.st_uid
    finally:
        os.close(opened)


def _decoded(descriptor: int, name: str, data: bytes) -> layout.Report:
    for _ in range(_TRIES):
        with contextlib.suppress(layout.TornReadError):
            return layout.decode(data)
        data, _ = _contents(descriptor, name)
    return layout.decode(data)


def _lives(proc: str, writer: _Writer) -> bool:
    found = read_stat(proc, writer.pid)
    return found is not None and found.start_ticks == writer.start_ticks and found.state != "Z"


def _same_user(proc: str, pid: int, owner: int) -> bool:
    """Whether a file's user is the process' own, or root, who may write whatever it wants anyway."""
    return owner in (0, user_of(proc, pid))
