"""Following a unit's lines in the systemd journal, by journalctl: its library need not be installed.

The form is journalctl's export, systemd's "Journal Export Formats": what has bytes that a terminal does not show comes
whole, and each entry with its cursor. Its choice of fields needs systemd 236.
"""

from __future__ import annotations

import math
import os
import re
import selectors
import shutil
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile
from typing import IO

from oomwatch.sources.enginelog.files import CHUNK, CannotRead, Piece

_LINES_BACK = 20_000
_WAIT_FOR_FIRST = 2.0  # seconds that journalctl may take for its first lines in one pass
_WAIT_FOR_HISTORY = 1.0  # seconds that it may take for the next, while it reads back
_RESTART_AFTER = 60.0  # seconds between two tries
_SAID_KEPT = 4096  # bytes of what journalctl complains of
_UNIT = re.compile(r"[\w@:.\\-]+\Z")
_FIELDS = "--output-fields=MESSAGE,_STREAM_ID,_LINE_BREAK"
_FIELD = re.compile(rb"[A-Z0-9_]+\Z")


@dataclass(frozen=True)
class _Line:
    t: float  # unix time at which the journal received it
    text: bytes


class FollowedJournal:
    """The lines of one unit, the last 20,000 first, each once. One journalctl runs as long as this object is in use.

    One that ends is started again, once a minute at most, and goes on behind the last line that was read.
    ``namespace`` is the journal's, of units with LogNamespace=; ``clock`` counts seconds.
    """

    in_history = False

    def __init__(self, unit: str, namespace: str | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        if not _UNIT.match(unit):
            raise CannotRead(f"{unit!r} is no unit's name")
        self.unit = unit
        self._namespace = namespace
        self._clock = clock
        self._process: subprocess.Popen[bytes] | None = None
        self._tried = -math.inf
        self._problem = ""  # why none runs
        self._began = 0.0  # unix time from which on the present journalctl has been there
        self._wait = 0.0
        self._said = b""
        self._rest = b""  # of an entry that is not there whole
        self._broken: set[bytes] = set()  # streams whose line was cut by the journal, and goes on in the next entry
        self._lines: deque[_Line] = deque()
        self._cursor: str | None = None

    def read(self) -> Piece | None:
        """The next whole lines; None where none are there now. Raises CannotRead."""
        while not self._lines:
            if not self._fetch():
                return None
        return self._piece()

    def close(self) -> None:
        """End journalctl."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for stream in (process.stdout, process.stderr):
                if stream is not None:
                    stream.close()

    # --- lines -----------------------------------------------------------------------------------------------

    def _piece(self) -> Piece:
        """What comes next of one kind: what was there before journalctl was, or what is new."""
        history = self._was_there(self._lines[0])
        lines = list(takewhile(lambda line: self._was_there(line) == history, self._lines))
        for _ in lines:
            self._lines.popleft()
        age = max(0.0, time.time() - lines[-1].t) if history else 0.0
        return Piece(b"".join(line.text for line in lines), history, age)

    def _was_there(self, line: _Line) -> bool:
        return line.t < self._began

    def _fetch(self) -> bool:
        """Take what journalctl wrote; False where that is nothing."""
        process = self._running()
        data = self._available(process)
        if data is None:
            self._wait = 0.0
            if self._said and self._cursor is None:
                raise CannotRead(f"journalctl shows no line of unit {self.unit}: {_last(self._said)}. {_ADVICE}")
            return False
        if not data:
            raise self._ended(process)
        self._lines.extend(self._cut(self._rest + data))
        if self._lines:
            self._wait = _WAIT_FOR_HISTORY if self._was_there(self._lines[-1]) else 0.0
        return True

    def _cut(self, data: bytes) -> Iterator[_Line]:
        """The lines of all entries that are there whole."""
        at = 0
        while (found := _entry(data, at)) is not None:
            fields, at = found
            if b"__CURSOR" in fields:
                self._cursor = fields[b"__CURSOR"].decode(errors="replace")
                yield _Line(int(fields.get(b"__REALTIME_TIMESTAMP", b"0")) / 1e6, self._text(fields))
        self._rest = data[at:]

    def _text(self, fields: Mapping[bytes, bytes]) -> bytes:
        """The line of an entry; nothing of one that only goes on: without its beginning nobody can tell what it is."""
        stream = fields.get(b"_STREAM_ID", b"")
        goes_on = stream in self._broken
        if fields.get(b"_LINE_BREAK") == b"line-max":  # LineMax= of journald.conf, 48 KiB
            self._broken.add(stream)
        else:
            self._broken.discard(stream)
        return b"" if goes_on else fields.get(b"MESSAGE", b"") + b"\n"

    # --- journalctl ------------------------------------------------------------------------------------------

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            if self._clock() - self._tried < _RESTART_AFTER:
                raise CannotRead(self._problem)
            self._tried = self._clock()
            self._process = self._start()
        return self._process

    def _start(self) -> subprocess.Popen[bytes]:
        program = shutil.which("journalctl")
        if program is None:
            raise self._because(
                "journalctl is not installed here. Name the log's file instead, or run oomwatch on the host"
            )
        command = [program, "--no-pager", "--follow", "--output=export", _FIELDS]
        command += [f"--unit={self.unit}"]
        command += [f"--namespace={self._namespace}"] if self._namespace else []
        command += [f"--after-cursor={self._cursor}", "--no-tail"] if self._cursor else [f"--lines={_LINES_BACK}"]
        self._began, self._wait, self._said, self._rest = time.time(), _WAIT_FOR_FIRST, b"", b""
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
            )
        except OSError as problem:
            raise self._because(f"journalctl cannot be started: {(problem.strerror or str(problem)).lower()}") from None
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                os.set_blocking(stream.fileno(), False)
        return process

    def _available(self, process: subprocess.Popen[bytes]) -> bytes | None:
        """What it wrote; empty when it has ended, None when nothing is there."""
        if process.stdout is None:
            return b""
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            ready = selector.select(self._wait)
        self._listen(process.stderr)
        return os.read(process.stdout.fileno(), CHUNK) if ready else None

    def _listen(self, stream: IO[bytes] | None) -> None:
        """Take what it complains of: it would wait where nobody does."""
        if stream is not None:
            with suppress(BlockingIOError):
                self._said = (self._said + os.read(stream.fileno(), CHUNK))[-_SAID_KEPT:]

    def _ended(self, process: subprocess.Popen[bytes]) -> CannotRead:
        self._listen(process.stderr)
        self.close()
        why = _last(self._said) or f"exit status {process.returncode}"
        return self._because(f"journalctl ended for unit {self.unit}: {why}. {_ADVICE}")

    def _because(self, problem: str) -> CannotRead:
        """What is wrong until the next try."""
        self._problem = problem
        return CannotRead(problem)


_ADVICE = "Let oomwatch's user read the journal"


def _last(said: bytes) -> str:
    """The last thing that was said; what is indented only goes on from it."""
    lines = [line for line in said.decode(errors="replace").splitlines() if line.strip() and not line[0].isspace()]
    return lines[-1].strip().rstrip(".") if lines else ""


def _entry(data: bytes, at: int) -> tuple[dict[bytes, bytes], int] | None:
    """The fields of the entry that begins at a place, and where it ends; None where it is not there whole."""
    fields: dict[bytes, bytes] = {}
    while (end := data.find(b"\n", at)) > at:
        name, text, value = data[at:end].partition(b"=")
        if not text and _FIELD.match(name):  # of any bytes: their number in eight, and they
            begin = end + 9
            end = begin + int.from_bytes(data[end + 1 : begin], "little")
            if end >= len(data):
                return None
            value = data[begin:end]
        fields[name] = value
        at = end + 1
    return None if end < 0 else (fields, end + 1)
