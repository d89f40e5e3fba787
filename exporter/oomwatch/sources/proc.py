"""Reading /proc: the table of all processes, and the few files that more than one source reads.

Arguments of processes may hold secrets. Only those of likely vLLM servers are kept, and none is ever shown.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")

_READ_LIMIT = 256 * 1024
_READ_AT_ONCE = 4096  # a large buffer costs five times what the read costs
_KERNEL_THREAD = 0x00200000  # PF_KTHREAD
# A process keeps its pid when it executes another program, and nothing that is cheap to read tells. So what is
# cached is read again: of processes that have just appeared in each pass, of the others once in so many passes.
_YOUNG_PASSES = 4
_PASSES_TO_READ_ALL = 12
_KEEP_ARGUMENTS_WITH = (b"vllm", b"docker-proxy")

# vLLM and Ray put a title where the arguments were ("VLLM::Worker_TP0", "ray::RayWorkerWrapper.execute_method").
_TITLE = re.compile(r"([A-Za-z][\w.-]*::[\w.:-]{1,64})(?:[\s\0]|$)")
_INNER_PID = re.compile(rb"^NSpid:.*?(\d+)$", re.MULTILINE)
_EFFECTIVE_UID = re.compile(rb"^Uid:\t\d+\t(\d+)", re.MULTILINE)
_USELESS_NAMES = frozenset({"pt_main_thread"})  # PyTorch calls the main thread of every program that


@dataclass(frozen=True)
class Stat:
    """/proc/PID/stat. ``start_ticks`` counts from boot: with the pid it identifies a process for good."""

    comm: str
    state: str
    ppid: int
    flags: int
    start_ticks: int

    @property
    def kernel_thread(self) -> bool:
        return bool(self.flags & _KERNEL_THREAD)


@dataclass(frozen=True)
class ProcessEntry:
    """A process in the table. ``title`` is safe to show; ``argv`` is empty unless it may be a server's."""

    pid: int
    ppid: int
    start_ticks: int
    title: str
    argv: tuple[str, ...] = ()


def read_bytes(path: str, limit: int = _READ_LIMIT) -> bytes:
    """The beginning of a file of /proc. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        raw = part = os.read(descriptor, _READ_AT_ONCE)
        while part and len(raw) % _READ_AT_ONCE == 0 and len(raw) < limit:
            part = os.read(descriptor, _READ_AT_ONCE)
            raw += part
        return raw
    finally:
        os.close(descriptor)


def read_stat(proc: Path | str, pid: int) -> Stat | None:
    """None when there is no such process, or it is hidden from this user."""
    try:
        raw = read_bytes(f"{proc}/{pid}/stat")
        opened, closed = raw.index(b"("), raw.rindex(b")")  # the name itself may hold parentheses
        fields = raw[closed + 2 :].split()
        return Stat(
            comm=raw[opened + 1 : closed].decode(errors="replace"),
            state=fields[0].decode(),
            ppid=int(fields[1]),
            flags=int(fields[6]),
            start_ticks=int(fields[19]),
        )
    except (OSError, ValueError, IndexError):
        return None


def read_arguments(proc: Path | str, pid: int) -> bytes:
    """/proc/PID/cmdline; empty for kernel threads, zombies and what this user may not read."""
    try:
        return read_bytes(f"{proc}/{pid}/cmdline")
    except OSError:
        return b""


def shown_title(proc: Path | str, pid: int, comm: str, arguments: bytes) -> str:
    """A name without arguments: the title that vLLM or Ray set, else the kernel's name, else the program's."""
    title = _TITLE.match(arguments[:200].decode(errors="replace"))
    if title is not None:
        return title.group(1)
    if comm not in _USELESS_NAMES:
        return comm
    try:
        return os.path.basename(os.readlink(f"{proc}/{pid}/exe")).removesuffix(" (deleted)") or comm
    except OSError:
        return os.path.basename(arguments.split(b"\0", 1)[0]).decode(errors="replace").split(" ")[0] or comm


def boot_time(proc: Path | str) -> float:
    """Unix time from which start times of processes count. Raises OSError, ValueError."""
    for line in read_bytes(f"{proc}/stat", 16 * 1024 * 1024).splitlines():
        if line.startswith(b"btime "):
            return float(line.split()[1])
    raise ValueError("stat has no btime")


def pid_namespace(proc: Path | str, pid: int | str = "self") -> int | None:
    """The inode of a process' pid namespace; None when it may not be asked for, as another user's."""
    try:
        return int(os.readlink(f"{proc}/{pid}/ns/pid").partition("[")[2].rstrip("]"))
    except (OSError, ValueError):
        return None


def pid_in_namespace(proc: Path | str, pid: int) -> int | None:
    """A process' pid as it sees it itself: the last of NSpid in /proc/PID/status (Linux 4.1)."""
    return _in_status(proc, pid, _INNER_PID)


def user_of(proc: Path | str, pid: int) -> int | None:
    """A process' effective uid. The owner of /proc/PID is root instead where a process may not be dumped."""
    return _in_status(proc, pid, _EFFECTIVE_UID)


def _in_status(proc: Path | str, pid: int, pattern: re.Pattern[bytes]) -> int | None:
    try:
        found = pattern.search(read_bytes(f"{proc}/{pid}/status"))
    except OSError:
        return None
    return int(found.group(1)) if found else None


def sees_host_pids(proc: Path = PROC) -> bool:
    """Whether this /proc lists the host's processes, whose pids NVML reports.

    In a pid namespace of its own a container has no kernel threads; on the host pid 2 is always kthreadd. Without the
    host's pids a GPU's pid is either missing here or, worse, another process's.
    """
    stat = read_stat(proc, 2)
    return stat is not None and stat.comm == "kthreadd"


def children_of(entries: Mapping[int, ProcessEntry]) -> Mapping[int, list[int]]:
    """The children of each process that has any."""
    children: dict[int, list[int]] = {}
    for entry in entries.values():
        children.setdefault(entry.ppid, []).append(entry.pid)
    return children


def descendants(
    entries: Mapping[int, ProcessEntry], roots: Iterable[int], children: Mapping[int, list[int]] | None = None
) -> tuple[int, ...]:
    """``roots`` that exist and all their children's children: roots first, then by pid.

    Who asks several times gives what :func:`children_of` answers, which is most of the work.
    """
    children = children_of(entries) if children is None else children
    first = [pid for pid in dict.fromkeys(roots) if pid in entries]
    found = set(first)
    open_ends = list(first)
    while open_ends:
        for child in children.get(open_ends.pop(), ()):
            if child not in found:
                found.add(child)
                open_ends.append(child)
    return (*first, *sorted(found - set(first)))


def ancestors(entries: Mapping[int, ProcessEntry], pid: int) -> list[int]:
    """The parent, its parent, and so on; without end only in theory, so a circle ends it."""
    chain: list[int] = []
    entry = entries.get(pid)
    while entry is not None and entry.ppid in entries and entry.ppid not in chain and entry.ppid != pid:
        chain.append(entry.ppid)
        entry = entries.get(entry.ppid)
    return chain


@dataclass(frozen=True)
class _Cached:
    inode: int
    first_pass: int
    kernel_thread: bool
    arguments: int  # their hash
    entry: ProcessEntry


class ProcessTable:
    """All processes, cheaply: one listing of /proc, and reads for what is new, young, re-parented or due.

    The inode of /proc/PID, which the listing brings for nothing, changes when a pid is given to another process.
    May be shared by sources in several threads.
    """

    def __init__(self, proc: Path = PROC) -> None:
        self.proc = str(proc)  # formatting a Path costs more than a small file of /proc
        self._lock = threading.Lock()
        self._passes = 0
        self._cache: dict[int, _Cached] = {}

    def refresh(self) -> Mapping[int, ProcessEntry]:
        """The processes of now by pid. Raises OSError when /proc cannot be listed."""
        with self._lock:
            self._passes += 1
            with os.scandir(self.proc) as listing:
                inodes = {int(item.name): item.inode() for item in listing if item.name.isdigit()}
            # The children of one that has ended, or has ended while it was looked at, have another parent.
            parents = {pid for pid, cached in self._cache.items() if inodes.get(pid) == cached.inode}
            cache: dict[int, _Cached] = {}
            for pid, inode in inodes.items():
                cached = self._cache.get(pid)
                if cached is None or cached.inode != inode or cached.entry.ppid not in parents or self._other(cached):
                    cached = self._read(pid, inode)
                if cached is not None:
                    cache[pid] = cached
            self._cache = cache
            return {pid: cached.entry for pid, cached in cache.items()}

    def _other(self, cached: _Cached) -> bool:
        """Whether a process, if its turn has come, has other arguments than before."""
        # What the first pass found has been there for some time.
        young = cached.first_pass > 1 and self._passes - cached.first_pass <= _YOUNG_PASSES
        if not young and (self._passes - cached.entry.pid) % _PASSES_TO_READ_ALL:
            return False
        return not cached.kernel_thread and hash(read_arguments(self.proc, cached.entry.pid)) != cached.arguments

    def _read(self, pid: int, inode: int) -> _Cached | None:
        stat = read_stat(self.proc, pid)
        if stat is None:
            return None
        arguments = b"" if stat.kernel_thread else read_arguments(self.proc, pid)
        keep = any(word in arguments for word in _KEEP_ARGUMENTS_WITH)
        before = self._cache.get(pid)
        same = before is not None and before.entry.start_ticks == stat.start_ticks
        return _Cached(
            inode=inode,
            first_pass=before.first_pass if before is not None and same else self._passes,
            kernel_thread=stat.kernel_thread,
            arguments=hash(arguments),
            entry=ProcessEntry(
                pid=pid,
                ppid=stat.ppid,
                start_ticks=stat.start_ticks,
                title=shown_title(self.proc, pid, stat.comm, arguments),
                argv=_split(arguments) if keep else (),
            ),
        )


def _split(arguments: bytes) -> tuple[str, ...]:
    return tuple(part.decode(errors="replace") for part in arguments.rstrip(b"\0").split(b"\0"))
