"""Whose device memory is whose: engines', configured neighbours', or unknown. Pure functions over observations."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from oomwatch.observations import (
    IMPLAUSIBLE,
    MIG_ENABLED,
    NOT_KNOWN,
    Absent,
    EngineFacts,
    GpuProcess,
    HostProcess,
    Maybe,
    Memory,
)
from oomwatch.snapshot import GpuView, HeldMemory, HeldProcess, Holder, devices

UNKNOWN = Holder("unknown")


@dataclass(frozen=True)
class Neighbour:
    """Something that the configuration knows to use GPU memory; a process is its when one of the patterns fits.

    ``process`` is a pattern for process names as for file names, ``container`` the beginning of a container's id.
    """

    name: str
    process: str | None = None
    container: str | None = None
    pod_uid: str | None = None

    def owns(self, process: HostProcess) -> bool:
        return (
            (self.process is not None and fnmatchcase(process.name, self.process))
            or (self.container is not None and (process.container or "").startswith(self.container))
            or (self.pod_uid is not None and process.pod_uid == self.pod_uid.replace("_", "-"))
        )


class Attribution:
    """Tells the holder of a process from what is known of engines, host processes and neighbours at one time.

    In this order: an engine's known pids; what the host source found in an engine's tree; an ancestor in one; a
    neighbour's pattern; the container of exactly one engine. A title alone is no proof: the workers of a dead engine
    keep theirs.
    """

    def __init__(
        self,
        engines: Iterable[EngineFacts],
        processes: Mapping[int, HostProcess],
        neighbours: Iterable[Neighbour] = (),
        containers: Mapping[str, str] | None = None,
    ) -> None:
        """``containers`` has the engine of each container that once held exactly one's: a restart stays in it."""
        facts = tuple(engines)
        self._processes = processes
        self._neighbours = tuple(neighbours)
        self._names = frozenset(engine.name for engine in facts)
        self._by_pid = {pid: engine.name for engine in facts for pid in engine.pids or ()}
        remembered = {id_: name for id_, name in (containers or {}).items() if name in self._names}
        self.containers: Mapping[str, str] = self._engines_of_containers(remembered)

    def holder(self, pid: int) -> Holder:
        """Who holds what ``pid`` holds."""
        process = self._processes.get(pid)
        engine = self._engine_by_tree(pid)
        if engine is None and process is not None:
            for neighbour in self._neighbours:
                if neighbour.owns(process):
                    return Holder("neighbour", neighbour.name)
            engine = self.containers.get(process.container or "")
        return UNKNOWN if engine is None else Holder("engine", engine)

    def held(self, process: GpuProcess) -> HeldProcess:
        """A process of a device's list with its holder, and with its title where /proc tells it."""
        host = self._processes.get(process.pid)
        return HeldProcess(process.pid, process.used, self.holder(process.pid), host.name if host else "")

    def _direct(self, pid: int) -> str | None:
        if pid in self._by_pid:
            return self._by_pid[pid]
        process = self._processes.get(pid)
        return process.engine if process is not None and process.engine in self._names else None

    def _engine_by_tree(self, pid: int) -> str | None:
        seen: set[int] = set()
        current: int | None = pid
        while current is not None and current not in seen:
            engine = self._direct(current)
            if engine is not None:
                return engine
            seen.add(current)
            process = self._processes.get(current)
            current = process.ppid if process is not None else None
        return None

    def _engines_of_containers(self, remembered: Mapping[str, str]) -> dict[str, str]:
        """Containers with processes of exactly one engine; of none now, the one remembered."""
        engines: dict[str, set[str]] = {}
        for pid, process in self._processes.items():
            engine = self._direct(pid)
            if engine is not None and process.container is not None:
                engines.setdefault(process.container, set()).add(engine)
        kept = {container: engine for container, engine in remembered.items() if container not in engines}
        return {**kept, **{container: names.pop() for container, names in engines.items() if len(names) == 1}}


def held_memory(processes: Iterable[HeldProcess]) -> Maybe[tuple[HeldMemory, ...]]:
    """Bytes by holder on one device, engines first. Absent when the driver gives no number for some process."""
    used: dict[Holder, int] = {}
    for process in processes:
        if process.used is None:
            return Absent("NOT_SUPPORTED")
        used[process.holder] = used.get(process.holder, 0) + process.used
    return tuple(HeldMemory(holder, used[holder]) for holder in sorted(used, key=lambda h: (h.kind, h.name)))


def once_each(listed: Iterable[HeldProcess]) -> list[HeldProcess]:
    """One entry for each pid: the driver lists a process once for each of its contexts or instances."""
    by_pid: dict[int, HeldProcess] = {}
    for process in listed:
        before = by_pid.get(process.pid)
        if before:
            both = None if before.used is None or process.used is None else before.used + process.used
            process = replace(before, used=both)  # noqa: PLW2901 the merged entry takes the place of the listed one
        by_pid[process.pid] = process
    return list(by_pid.values())


def unowned_memory(
    memory: Maybe[Memory], processes: Maybe[tuple[HeldProcess, ...]], *, sliced: bool, unified: bool
) -> Maybe[int]:
    """Used device memory in bytes that no listed process accounts for: managed memory, or a process out of sight.

    Absent where the subtraction means nothing: MIG (``sliced``: ask for each slice), memory shared with the host
    (``unified``), used memory that includes the driver's reserve (before nvmlDeviceGetMemoryInfo_v2), a process
    without a number, or a sum above what is used.
    """
    if isinstance(memory, Absent):
        return memory
    if isinstance(processes, Absent):
        return processes
    if unified:
        return Absent("UNIFIED_MEMORY")
    if sliced:
        return MIG_ENABLED
    if memory.used_includes_reserved:
        return Absent("NOT_SUPPORTED")
    total = 0
    for process in processes:
        if process.used is None:
            return Absent("NOT_SUPPORTED")
        total += process.used
    return memory.used - total if total <= memory.used else IMPLAUSIBLE


def engine_overhead(
    facts: EngineFacts, memory: Maybe[Mapping[str, int]], gpus: Iterable[GpuView]
) -> Maybe[Mapping[str, Mapping[int, int]]]:
    """Bytes by device and pid that an engine's processes hold beyond weights and KV pool: contexts, libraries, graphs.

    Needs ``weights_bytes`` and ``kv_pool_bytes``, both per GPU. Each process that is large enough holds a rank's
    components, and each other one is overhead as a whole; what they have on a device adds up. A device where none is
    large enough is left out: the engine still loads, or sleeps.
    """
    if isinstance(memory, Absent):
        return memory
    if facts.weights_bytes is None or facts.kv_pool_bytes is None:
        return NOT_KNOWN
    components = facts.weights_bytes + facts.kv_pool_bytes
    overhead: dict[str, Mapping[int, int]] = {}
    for view in devices(gpus):
        used = _used_by(facts.name, view.processes) if view.uuid in memory else {}
        if any(size >= components for size in used.values()):
            overhead[view.uuid] = {pid: process_overhead(size, components) for pid, size in used.items()}
    return overhead


def process_overhead(used: int, components: int) -> int:
    """What a process of an engine holds beyond a rank's components; all of it where they cannot be in it."""
    return used - components if used >= components else used


def _used_by(engine: str, processes: Maybe[tuple[HeldProcess, ...]]) -> Mapping[int, int]:
    """Bytes by pid."""
    mine = Holder("engine", engine)
    listed = () if isinstance(processes, Absent) else processes
    ours = once_each(process for process in listed if process.holder == mine)
    return {process.pid: process.used for process in ours if process.used is not None}
