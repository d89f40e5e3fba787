"""The host source: processes that engines own or GPUs list, and the host's memory, from /proc."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from oomwatch.observations import Absent, HostMemory, HostProcess, Maybe, Observation, ProcessGone, SourceRun
from oomwatch.sources.cgroups import CGROUP_ROOT, Membership, membership, memory_limit
from oomwatch.sources.proc import (
    PROC,
    TICKS_PER_SECOND,
    ProcessTable,
    Stat,
    boot_time,
    children_of,
    descendants,
    read_arguments,
    read_bytes,
    read_stat,
    sees_host_pids,
    shown_title,
)
from oomwatch.sources.vllm_command import is_server

_LINGER_SECONDS = 300.0
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")

_ROLES = {"APIServer": "api_server", "EngineCore": "engine_core", "Worker": "worker"}
# VLLM_PROCESS_NAME_PREFIX replaces the first part; the second has DP, PP, PCP, TP, DCP and EP ranks behind it.
_VLLM_TITLE = re.compile(r"[\w.-]+::(APIServer|EngineCore|Worker)(?:_([A-Z]+\d+(?:_[A-Z]+\d+)*))?(?:_\d+)?$")
_RESIDENT = re.compile(rb"^(VmRSS|RssAnon):\s*(\d+) kB$", re.MULTILINE)
_RAY_WORKER = "ray::RayWorker"


def role_of(title: str) -> tuple[str, str | None]:
    """Role and rank by a process's title: ``VLLM::Worker_DP0_TP1`` is ("worker", "DP0_TP1")."""
    if title.startswith(_RAY_WORKER):
        return "worker", None
    match = _VLLM_TITLE.match(title)
    return (_ROLES[match.group(1)], match.group(2)) if match else ("other", None)


@dataclass(frozen=True)
class _Identity:
    name: str
    role: str
    rank: str | None


@dataclass
class _Followed:
    start_ticks: int
    start: float
    wanted_at: float
    identity: _Identity | None = None


class _Limits:
    """Memberships and memory limits during one pass: most processes share a few cgroups."""

    def __init__(self, own: str, root: Path) -> None:
        self._own = membership(own)
        self._root = root
        self._known: dict[str, tuple[Membership, int | None]] = {}

    def of(self, cgroup: str) -> tuple[Membership, int | None]:
        if cgroup not in self._known:
            member = membership(cgroup)
            self._known[cgroup] = member, memory_limit(member, self._own, self._root)
        return self._known[cgroup]


@dataclass(frozen=True)
class _Memory:
    rss: int
    anon: Maybe[int]


class HostSource:
    """Publishes one :class:`HostProcess` per process and pass, and :class:`ProcessGone` once for each that ended.

    A process that neither an engine owns nor a GPU lists any more is followed for five minutes, because lists of GPUs
    can fail for a while; then it counts as gone. Not for use by several threads at once.
    """

    def __init__(
        self,
        publish: Callable[[Observation], None],
        *,
        clock: Callable[[], float] = time.time,
        proc: Path = PROC,
        cgroup_root: Path = CGROUP_ROOT,
        table: ProcessTable | None = None,
    ) -> None:
        self._publish = publish
        self._clock = clock
        self._proc = proc
        self._root = str(proc)  # formatting a Path costs more than a small file of /proc
        self._cgroup_root = cgroup_root
        self._table = table or ProcessTable(proc)
        self._followed: dict[int, _Followed] = {}

    def read(self, engines: Mapping[str, Collection[int]], gpu_pids: Collection[int]) -> None:
        """One pass. ``engines`` has the known pids of each engine; their descendants are found here."""
        t = self._clock()
        started = time.perf_counter()
        error = ""
        try:
            self._read_processes(t, engines, gpu_pids)
            self._publish(self._host_memory(t))
        except (OSError, ValueError) as problem:
            error = f"cannot read {self._proc}: {problem}. Run oomwatch with /proc mounted and readable"
        self._publish(SourceRun(t, "host", "", not error, time.perf_counter() - started, error))

    def _read_processes(self, t: float, engines: Mapping[str, Collection[int]], gpu_pids: Collection[int]) -> None:
        entries = self._table.refresh()
        children = children_of(entries)
        owner: dict[int, str] = {}
        for engine, roots in engines.items():
            for pid in descendants(entries, roots, children):
                owner.setdefault(pid, engine)
        # Elsewhere than in the host's pid namespace a GPU's pid would name some other process of the container.
        listed = set(gpu_pids) if sees_host_pids(self._proc) else set()
        wanted = owner.keys() | listed
        limits = _Limits(self._text("self/cgroup"), self._cgroup_root)
        processes = [
            process
            for pid in sorted(wanted | self._followed.keys())
            if (stat := self._follow(pid, t, wanted=pid in wanted)) is not None
            and (process := self._process(t, pid, stat, owner.get(pid), limits)) is not None
        ]
        for process in _roles_of_launchers(processes):
            self._publish(process)

    def _follow(self, pid: int, t: float, *, wanted: bool) -> Stat | None:
        """Look whether a process is still the one that was followed, and whether it still should be."""
        stat = read_stat(self._root, pid)
        followed = self._followed.get(pid)
        if followed is not None:
            lost = not wanted and t - followed.wanted_at > _LINGER_SECONDS
            if stat is None or stat.start_ticks != followed.start_ticks or lost:
                self._end(pid, t)
                followed = None
        if stat is None or (followed is None and not wanted):
            return None
        if followed is None:
            start = boot_time(self._root) + stat.start_ticks / TICKS_PER_SECOND
            followed = self._followed[pid] = _Followed(stat.start_ticks, start, t)
        if wanted:
            followed.wanted_at = t
        return stat

    def _end(self, pid: int, t: float) -> None:
        del self._followed[pid]
        self._publish(ProcessGone(t, pid))

    def _process(self, t: float, pid: int, stat: Stat, engine: str | None, limits: _Limits) -> HostProcess | None:
        memory = self._memory(pid, zombie=stat.state == "Z")
        if memory is None:
            self._end(pid, t)
            return None
        followed = self._followed[pid]
        arguments = read_arguments(self._root, pid)
        if followed.identity is None or arguments:  # one that has ended has lost its title, not what it was
            followed.identity = self._identity(pid, stat, arguments, engine)
        identity = followed.identity
        member, limit = limits.of(self._text(f"{pid}/cgroup"))
        return HostProcess(
            t=t,
            pid=pid,
            start=followed.start,
            rss=memory.rss,
            anon=memory.anon,
            name=identity.name,
            ppid=stat.ppid,
            container=member.container,
            pod_uid=member.pod_uid,
            memory_limit=limit,
            engine=engine,
            role=identity.role,
            rank=identity.rank,
        )

    def _identity(self, pid: int, stat: Stat, arguments: bytes, engine: str | None) -> _Identity:
        title = shown_title(self._root, pid, stat.comm, arguments)
        role, rank = role_of(title)
        if role == "other" and engine is not None and is_server(arguments):
            role = "api_server"
        return _Identity(title, role, rank)

    def _memory(self, pid: int, *, zombie: bool) -> _Memory | None:
        """Resident and anonymous bytes from /proc/PID/status (RssAnon: Linux 4.5), else from statm.

        smaps_rollup would be exact, but walks the page tables of a process of many gigabytes under its lock.
        """
        if zombie:
            return _Memory(0, 0)
        try:
            fields = dict(_RESIDENT.findall(read_bytes(f"{self._root}/{pid}/status")))
            if b"VmRSS" in fields and b"RssAnon" in fields:
                return _Memory(int(fields[b"VmRSS"]) * 1024, int(fields[b"RssAnon"]) * 1024)
            pages = read_bytes(f"{self._root}/{pid}/statm").split()
            rss, shared = int(pages[1]) * _PAGE_BYTES, int(pages[2]) * _PAGE_BYTES
            return _Memory(rss, rss - shared if 0 < shared <= rss else Absent("NOT_SUPPORTED"))
        except (OSError, IndexError):
            return None

    def _host_memory(self, t: float) -> HostMemory:
        fields = _kilobytes(read_bytes(f"{self._proc}/meminfo"))
        try:
            return HostMemory(t, fields[b"MemTotal"], fields[b"MemAvailable"])
        except KeyError as missing:
            raise ValueError(f"meminfo has no {missing}") from None

    def _text(self, path: str) -> str:
        try:
            return read_bytes(f"{self._root}/{path}").decode(errors="replace")
        except OSError:
            return ""


def _kilobytes(raw: bytes) -> dict[bytes, int]:
    """Lines such as ``VmRSS:     1234 kB``, in bytes."""
    fields: dict[bytes, int] = {}
    for line in raw.splitlines():
        name, _, value = line.partition(b":")
        if value.endswith(b" kB"):
            fields[name] = int(value[:-3]) * 1024
    return fields


def _roles_of_launchers(processes: Collection[HostProcess]) -> list[HostProcess]:
    """With several API servers, which carry titles, the first process only launches them."""
    titled = {p.engine for p in processes if p.role == "api_server" and role_of(p.name)[0] == "api_server"}
    return [
        replace(p, role="other")
        if p.role == "api_server" and p.engine in titled and role_of(p.name)[0] != "api_server"
        else p
        for p in processes
    ]
