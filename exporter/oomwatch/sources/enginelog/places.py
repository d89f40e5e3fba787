"""Where an engine's log is: as configured, or as its processes show."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from oomwatch.sources.cgroups import membership
from oomwatch.sources.proc import PROC, read_bytes

DOCKER = Path("/var/lib/docker/containers")
KUBERNETES = Path("/var/log/containers")

_UNIT = re.compile(r"/([^/]+\.service)(?=/|$)")
_CONTAINER = re.compile(r"[0-9a-f]{12,64}\Z")


@dataclass(frozen=True)
class File:
    """A file, or a link to it such as /proc/PID/fd/1."""

    path: str


@dataclass(frozen=True)
class ContainerFile:
    """The log file that a container's runtime writes, found by the container's id."""

    container: str


@dataclass(frozen=True)
class Journal:
    """A unit of the systemd journal."""

    unit: str


Place: TypeAlias = File | ContainerFile | Journal


class Places:
    """Finds logs on this host. ``docker`` and ``kubernetes`` are the folders where runtimes write."""

    def __init__(self, docker: Path = DOCKER, kubernetes: Path = KUBERNETES, proc: Path = PROC) -> None:
        self._docker = docker
        self._kubernetes = kubernetes
        self._proc = proc

    def of_processes(self, pids: Sequence[int]) -> Place | None:
        """Where the first of ``pids`` that shows it writes its log; None where none does."""
        for pid in pids:
            place = self._of_process(pid)
            if place is not None:
                return place
        return None

    def container_file(self, container: str) -> str | None:
        """The log file of a container, by its id or the beginning of it."""
        if not _CONTAINER.match(container):
            return None
        found = [
            *self._listed(self._docker, f"{container}*/{container}*-json.log"),
            *self._listed(self._kubernetes, f"*-{container}*.log"),
        ]
        return str(found[0]) if found else None

    def _of_process(self, pid: int) -> Place | None:
        try:
            member = membership(read_bytes(f"{self._proc}/{pid}/cgroup").decode(errors="replace"))
        except OSError:
            return None
        if member.container is not None and self.container_file(member.container) is not None:
            return ContainerFile(member.container)
        targets = {path: self._target(path) for path in (f"{self._proc}/{pid}/fd/{number}" for number in (2, 1))}
        for path, target in targets.items():
            if target == "file":
                return File(path)
        units = _UNIT.findall(member.path or "")
        return Journal(units[-1]) if units and "socket" in targets.values() and member.container is None else None

    @staticmethod
    def _target(path: str) -> str:
        """``file``, ``socket`` or ``""``: what a process' output leads to."""
        try:
            if os.readlink(path).startswith("socket:"):
                return "socket"
            return "file" if stat.S_ISREG(os.stat(path).st_mode) else ""
        except OSError:
            return ""

    @staticmethod
    def _listed(folder: Path, pattern: str) -> Iterable[Path]:
        try:
            return sorted(folder.glob(pattern))
        except OSError:
            return ()
