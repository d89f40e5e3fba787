"""Following a file that is written to: rotation, truncation, copies that truncate, and a long history before it."""

from __future__ import annotations

import os
import stat
import time
from contextlib import suppress
from dataclasses import dataclass

CHUNK = 256 * 1024
_LOOK_BACK = 256 * 1024**2  # bytes before the end that are searched for the last start
_START_BYTES = 8 * 1024**2  # of a start that are read, when much was written since
_END_BYTES = 1024**2  # before the end that are read in any case
_BEFORE_START = 64 * 1024  # of the lines that the server writes before its engine core's first
_LONGEST_BACKLOG = 64 * 1024**2
_START = b"LLM engine (v"  # of every release, in the engine core's first line
_BLOCK = 1024**2


class CannotRead(Exception):
    """A log that cannot be read: what is wrong, and what to do."""


@dataclass(frozen=True)
class Piece:
    """Bytes of a log. ``age`` is how many seconds ago the file was written last, where they are history.

    ``apart`` where lines before it were left out, or the file is another one: no line goes on from the piece before.
    """

    data: bytes
    history: bool = False
    age: float = 0.0
    apart: bool = False


class FollowedFile:
    """One file from its last start on. ``path`` may be a link (/proc/PID/fd/1): what it leads to now is the file.

    What cannot be read for a while is read on where reading stopped. Memory is one piece. Not for use by several
    threads at once.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._file: int | None = None
        self._identity: tuple[int, int] | None = None
        self._at = 0
        self._history: list[tuple[int, int]] = []  # parts of what was there at first, still to be read
        self._age = 0.0
        self._apart = True
        self._torn = False  # what is read next begins in the middle of a line, which is left out
        self._failures = 0  # to read what is open, one after the other

    def read(self) -> Piece | None:
        """The next piece; None where nothing more is there now. Raises CannotRead."""
        try:
            piece = self._read()
        except OSError as problem:
            self._failures += 1
            raise CannotRead(f"{self.path} cannot be read: {_why(problem)}") from None
        self._failures = 0
        return piece

    def _read(self) -> Piece | None:
        if self._failures:
            self._open_again()
        file = self._open() if self._file is None else self._file
        if self._history:
            return self._next_of_history(file)
        piece = self._next(file)
        if piece is None and self._moved():
            # What was written to the one before the other was there comes first.
            piece = self._next(file) or self._next(self._open())
        return piece

    @property
    def in_history(self) -> bool:
        """Whether something of what was there at first is still to be read."""
        return bool(self._history)

    def identity(self) -> tuple[int, int] | None:
        """Device and inode of the file that is read, None where none is."""
        return self._identity

    def close(self) -> None:
        """Give the file back. Not to be read any more."""
        if self._file is not None:
            os.close(self._file)
            self._file = self._identity = None

    # --- reading ---------------------------------------------------------------------------------------------

    def _next(self, file: int) -> Piece | None:
        size = os.fstat(file).st_size
        if size < self._at:
            self._at, self._apart, self._torn = 0, True, False  # truncated, or copied and truncated
        if size - self._at > _LONGEST_BACKLOG:
            self._at, self._apart, self._torn = size - _END_BYTES, True, True
        data = os.pread(file, CHUNK, self._at)
        if not data:
            return None
        self._at += len(data)
        return self._piece(data)

    def _piece(self, data: bytes, *, history: bool = False) -> Piece:
        if self._torn:
            # What is left of a line may be of a request's text: without its beginning nobody can tell.
            end = data.find(b"\n") + 1
            data, self._torn = (data[end:], False) if end else (b"", True)
        apart, self._apart = self._apart, False
        return Piece(data, history, self._age if history else 0.0, apart)

    def _next_of_history(self, file: int) -> Piece | None:
        begin, end = self._history[0]
        data = os.pread(file, min(CHUNK, end - begin), begin)
        piece = self._piece(data, history=True)
        if data and begin + len(data) < end:
            self._history[0] = begin + len(data), end
        else:
            self._history.pop(0)
            self._apart = self._torn = bool(self._history)
        return piece

    # --- which file ------------------------------------------------------------------------------------------

    def _open(self) -> int:
        """Read what the path leads to now: the first file from its last start on, any other from its beginning."""
        file = self._file_at_path()
        try:
            status = os.fstat(file)
            history = self._parts(file, status.st_size) if self._identity is None else []
        except OSError:
            os.close(file)
            raise
        self._at, self._apart, self._torn, self._history = 0, True, False, history
        if self._identity is None:
            self._at = status.st_size
            self._age = max(0.0, time.time() - status.st_mtime)
            self._torn = bool(history and history[0][0])
        self._identity = _identity(status)
        return self._replace(file)

    def _replace(self, file: int) -> int:
        if self._file is not None:
            os.close(self._file)
        self._file = file
        return file

    def _open_again(self) -> None:
        """After a failure: the same file anew, as after its file system was away; another one when both were tried."""
        if self._identity is not None and self._identity == identity_at(self.path):
            with suppress(CannotRead):
                self._replace(self._file_at_path())
        elif self._failures > 1 and self._moved():
            self._open()

    def _file_at_path(self) -> int:
        try:
            # The path may be anybody's choice: opening a pipe or a device must neither wait nor do anything.
            file = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
        except OSError as problem:
            raise CannotRead(f"{self.path} cannot be opened: {_why(problem)}") from None
        if not stat.S_ISREG(os.fstat(file).st_mode):
            os.close(file)
            raise CannotRead(f"{self.path} is no file. Name the file that the engine's log is written to")
        return file

    def _moved(self) -> bool:
        """Whether the path leads to another file by now. Until something is in that, the writer is not there yet."""
        try:
            status = os.stat(self.path)
        except OSError:
            return False  # moved away, and nothing new yet: what is open is read on
        return _identity(status) != self._identity and (status.st_size > 0 or not stat.S_ISREG(status.st_mode))

    def _parts(self, file: int, size: int) -> list[tuple[int, int]]:
        """What of a file of ``size`` bytes tells of its last start, and of now."""
        if not size:
            return []
        start = self._last_start(file, size)
        recent = max(0, size - _END_BYTES)
        if start is None or start >= recent:
            return [(recent, size)]
        if size - start <= _START_BYTES + _END_BYTES:
            return [(start, size)]
        return [(start, start + _START_BYTES), (recent, size)]

    def _last_start(self, file: int, size: int) -> int | None:
        end = size
        while end > max(0, size - _LOOK_BACK):
            begin = max(0, end - _BLOCK)
            at = os.pread(file, end - begin + len(_START), begin).rfind(_START)
            if at >= 0:
                return max(0, begin + at - _BEFORE_START)
            end = begin
        return None


def identity_at(path: str) -> tuple[int, int] | None:
    """Device and inode of what is at a path, None where nothing is."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return _identity(status)


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def _why(problem: OSError) -> str:
    text = (problem.strerror or str(problem)).lower()
    if isinstance(problem, PermissionError):
        return f"{text}. Let oomwatch's user read it"
    if isinstance(problem, FileNotFoundError):
        return f"{text}. Check the path, and that it is mounted where oomwatch runs"
    return text
