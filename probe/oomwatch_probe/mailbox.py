"""The file of this process: where it lies, how it is written, and when those of others are removed."""

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import dataclass
from pathlib import Path

from oomwatch_probe.layout import FILE_PREFIX, FILE_SIZE, FILE_SUFFIX, file_name

DEFAULT_DIRECTORY = "/run/oomwatch"
# Processes of several users may share it, as they do /tmp: each removes its own files only.
DIRECTORY_MODE = 0o1777
# The daemon may run as another user, in another container.
FILE_MODE = 0o644

_FILE_NAME = re.compile(re.escape(FILE_PREFIX) + r"(\d+)-(\d+)-(\d+)" + re.escape(FILE_SUFFIX))


@dataclass(frozen=True)
class Identity:
    """Which process this is, on the whole machine: ``start_ticks`` are clock ticks since the machine's boot."""

    pid_namespace: int
    pid: int
    start_ticks: int


def own_identity() -> Identity:
    """Raises OSError where /proc cannot be read."""
    pid = os.getpid()
    return Identity(_own_pid_namespace(), pid, _start_ticks(pid))


class Mailbox:
    """One file that is written again and again.

    It is written by ``pwrite`` and not through a mapping of its own: where somebody cuts the file off, or its file
    system is full, a write fails, and a mapping would kill the process. Once its descriptor is closed, by whomever, the
    number may be that of a file of the engine's, which is neither written nor closed.
    """

    def __init__(self, directory: Path, identity: Identity) -> None:
        """Raises OSError where the file cannot be made."""
        if not directory.is_dir():
            directory.mkdir(parents=True, exist_ok=True)
            directory.chmod(DIRECTORY_MODE)
        remove_leftovers(directory, identity.pid_namespace)
        self.identity = identity
        self.path = directory / file_name(identity.pid_namespace, identity.pid, identity.start_ticks)
        with contextlib.suppress(FileNotFoundError):
            self.path.unlink()
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        self._descriptor = os.open(self.path, flags, FILE_MODE)
        opened = os.fstat(self._descriptor)
        self._file = (opened.st_dev, opened.st_ino)
        try:
            os.fchmod(self._descriptor, FILE_MODE)  # whatever the umask is
        except OSError:
            self.close()
            raise

    def exists(self) -> bool:
        """Whether it still has a name: a daemon's restart may have emptied the folder."""
        status = self._status()
        return status is not None and status.st_nlink > 0

    def write(self, data: bytes) -> None:
        """All of the file at once; raises OSError."""
        if self._status() is None:
            raise OSError(f"{self.path} is closed")
        written = os.pwrite(self._descriptor, data, 0)
        if written != FILE_SIZE:
            raise OSError(f"{written} of {FILE_SIZE} bytes written to {self.path}: is its file system full?")

    def remove(self) -> None:
        """The process ends in order."""
        with contextlib.suppress(OSError):
            self.path.unlink()
        self.close()

    def close(self) -> None:
        """The file stays: it is the parent's, or the last word of a process that is about to end."""
        if self._status() is not None:
            os.close(self._descriptor)
        self._descriptor = -1

    def _status(self) -> os.stat_result | None:
        """Of the open file; None where the descriptor is closed, or another file's by now."""
        try:
            status = os.fstat(self._descriptor)
        except OSError:
            return None
        return status if (status.st_dev, status.st_ino) == self._file else None


def remove_leftovers(directory: Path, pid_namespace: int) -> None:
    """Removes the files of processes that have ended.

    Those of other pid namespaces stay, for nobody can tell from here whether their processes live.
    """
    try:
        names = os.listdir(directory)
    except OSError:
        return
    for name in names:
        found = _FILE_NAME.fullmatch(name)
        if not found or int(found[1]) != pid_namespace:
            continue
        try:
            lives = _start_ticks(int(found[2])) == int(found[3])
        except FileNotFoundError:
            lives = False
        except OSError:
            continue
        if not lives:
            with contextlib.suppress(OSError):
                (directory / name).unlink()


def _own_pid_namespace() -> int:
    return int(os.readlink("/proc/self/ns/pid").partition("[")[2].rstrip("]"))


def _start_ticks(pid: int) -> int:
    """Field 22 of /proc/PID/stat; the name in field 2 may hold blanks and parentheses."""
    stat = Path(f"/proc/{pid}/stat").read_bytes()
    return int(stat[stat.rindex(b")") + 2 :].split()[19])
