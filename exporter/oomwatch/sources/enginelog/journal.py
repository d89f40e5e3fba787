"""Following a unit's lines in the systemd journal, by journalctl: its library need not be installed."""

from __future__ import annotations

import os
import re
import selectors
import shutil
import subprocess
import time
from contextlib import suppress

from oomwatch.sources.enginelog.files import CannotRead, Piece

_LINES_BACK = 20_000
_CHUNK = 256 * 1024
_WAIT_FOR_FIRST = 2.0  # seconds that journalctl may take for its first lines in one pass
_HISTORY_FROM = 60.0  # seconds of age from which a line counts as read back
_RESTART_AFTER = 60.0  # seconds between two tries
_STAMP = re.compile(rb"^(\d{9,11}\.\d+) \S+ \S+: ", re.MULTILINE)
_UNIT = re.compile(r"[\w@:.\\-]+\Z")


class FollowedJournal:
    """The lines of one unit, the last 20,000 first. One journalctl runs as long as this object is in use.

    ``namespace`` is the journal's, of units with LogNamespace=.
    """

    def __init__(self, unit: str, namespace: str | None = None) -> None:
        if not _UNIT.match(unit):
            raise CannotRead(f"{unit!r} is no unit's name")
        self.unit = unit
        self._namespace = namespace
        self._process: subprocess.Popen[bytes] | None = None
        self._tried = -_RESTART_AFTER
        self._rest = b""
        self._seen_any = False
        self.in_history = False

    def read(self) -> Piece | None:
        """The next whole lines, without the journal's own prefix; None where none are there now. Raises CannotRead."""
        process = self._running()
        data = self._available(process)
        if data is None:
            return None
        if not data:
            self._ended(process)
        lines, end, self._rest = (self._rest + data).rpartition(b"\n")
        if not end:
            return None
        stamps = _STAMP.findall(lines)
        age = max(0.0, time.time() - float(stamps[-1])) if stamps else 0.0
        return Piece(_STAMP.sub(b"", lines + end), history=age > _HISTORY_FROM, age=age)

    def close(self) -> None:
        """End journalctl."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for stream in (process.stdout, process.stderr):
                if stream is not None:
                    stream.close()

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is not None:
            return self._process
        if time.monotonic() - self._tried < _RESTART_AFTER:
            raise CannotRead(f"journalctl ended for unit {self.unit}. It is tried again within a minute")
        self._tried = time.monotonic()
        program = shutil.which("journalctl")
        if program is None:
            raise CannotRead(
                "journalctl is not installed here. Name the log's file instead, or run oomwatch on the host"
            )
        lines = _LINES_BACK if not self._seen_any else 0
        command = [program, "--no-pager", "--follow", f"--lines={lines}", "--output=short-unix", f"--unit={self.unit}"]
        command += [f"--namespace={self._namespace}"] if self._namespace else []
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        for stream in (self._process.stdout, self._process.stderr):
            if stream is not None:
                os.set_blocking(stream.fileno(), False)
        return self._process

    def _available(self, process: subprocess.Popen[bytes]) -> bytes | None:
        """What it wrote; empty when it has ended, None when nothing is there."""
        if process.stdout is None:
            return b""
        wait = 0.0 if self._seen_any else _WAIT_FOR_FIRST
        self._seen_any = True
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            if not selector.select(wait):
                return None
        return os.read(process.stdout.fileno(), _CHUNK)

    def _ended(self, process: subprocess.Popen[bytes]) -> None:
        said = b""
        if process.stderr is not None:
            with suppress(BlockingIOError):
                said = os.read(process.stderr.fileno(), 4096)
        self.close()
        told = said.decode(errors="replace").strip().splitlines()
        why = told[-1] if told else f"exit status {process.returncode}"
        raise CannotRead(f"journalctl ended for unit {self.unit}: {why}. Let oomwatch's user read the journal")
