"""Starts a server program for a test, waits until it answers, and ends it with everything that it started."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from pathlib import Path
from types import TracebackType
from typing import TypeVar

import psutil
import requests
from requests.adapters import HTTPAdapter
from urllib3.util import Retry

STOP_TIMEOUT_S = 20.0
LOG_LINES_IN_ERRORS = 30

_Server = TypeVar("_Server", bound="ServerProcess")
_Value = TypeVar("_Value")


class ServerError(RuntimeError):
    """The program ended early, or did not answer in time; the message carries the end of its log."""


def free_port() -> int:
    """A port of 127.0.0.1 that nothing listened on just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def wait_until(condition: Callable[[], bool], timeout_s: float, what: str, interval_s: float = 0.1) -> None:
    """Returns as soon as the condition holds; raises TimeoutError naming `what` when it does not within the time."""
    wait_for(condition, bool, timeout_s, what, interval_s)


def wait_for(
    read: Callable[[], _Value],
    condition: Callable[[_Value], bool],
    timeout_s: float,
    what: str,
    interval_s: float = 0.1,
) -> _Value:
    """The first value read that meets the condition; raises TimeoutError naming `what` when none does in time."""
    deadline = time.monotonic() + timeout_s
    while not condition(value := read()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"after {timeout_s:g} s still not: {what}")
        time.sleep(interval_s)
    return value


def patient_get(url: str, *, each_s: float = 10.0, times: int = 6) -> requests.Response:
    """The answer of a server that is not under test, which may say nothing for `each_s` up to `times` - 1 times.

    Raises requests.ConnectionError when it never answers, and at once when nothing listens.
    """
    with requests.Session() as session:
        session.mount("http://", HTTPAdapter(max_retries=Retry(connect=0, read=times - 1)))
        return session.get(url, timeout=each_s)


class ServerProcess:
    """One program in a session of its own. Use it as a context manager, or call `start` and `stop`."""

    def __init__(
        self,
        command: Sequence[str | Path],
        *,
        log_path: Path,
        ready_url: str,
        start_timeout_s: float,
        environment: Mapping[str, str] | None = None,
        stop_signal: signal.Signals = signal.SIGTERM,
    ) -> None:
        self.log_path = log_path
        self._command = [str(part) for part in command]
        self._ready_url = ready_url
        self._start_timeout_s = start_timeout_s
        self._environment = environment
        self._stop_signal = stop_signal
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self: _Server) -> _Server:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        """Process, process group and session id alike."""
        if self._process is None:
            raise ServerError(f"{self._command[0]} was not started")
        return self._process.pid

    def start(self) -> None:
        """Starts the program and returns when its ready URL answers 200. On failure nothing is left running."""
        with self.log_path.open("wb") as log:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._environment,
                start_new_session=True,
            )
        try:
            wait_until(self._ready_or_ended, self._start_timeout_s, f"{self._ready_url} answers", interval_s=0.2)
            if self.exit_status() is not None:
                raise ServerError(f"{self._command[0]} ended with status {self.exit_status()}\n{self._log_end()}")
        except TimeoutError as error:
            self.stop()
            raise ServerError(f"{error}\n{self._log_end()}") from None
        except BaseException:
            self.stop()
            raise

    def exit_status(self) -> int | None:
        """The program's exit status (negative: the signal that ended it), None while it runs."""
        return None if self._process is None else self._process.poll()

    def stop(self) -> None:
        """Asks the program to end, then kills whatever of its session is left. Harmless when it already ended."""
        if self._process is None:
            return
        members = self.session()
        if self._process.poll() is None:
            # A stopped process would only act on the signal once continued.
            os.killpg(self._process.pid, signal.SIGCONT)
            os.killpg(self._process.pid, self._stop_signal)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=STOP_TIMEOUT_S)
        children = [member for member in {*members, *self.session()} if member.pid != self._process.pid]
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        # Before the children are waited for: one that hangs takes no note of their end.
        self._process.kill()
        self._process.wait(timeout=10)
        psutil.wait_procs(children, timeout=10)

    def session(self) -> list[psutil.Process]:
        """The program and every living process that it started, oldest first (zombies left out)."""
        members = [process for process in psutil.process_iter() if _session_id(process.pid) == self.pid]
        started = [(_start_time(process), process) for process in members]
        alive = [(time_s, process.pid, process) for time_s, process in started if time_s is not None]
        return [process for _, _, process in sorted(alive, key=lambda entry: entry[:2])]

    def log(self) -> str:
        return self.log_path.read_text(encoding="utf-8", errors="replace")

    def _log_end(self) -> str:
        return "\n".join(self.log().splitlines()[-LOG_LINES_IN_ERRORS:])

    def _ready_or_ended(self) -> bool:
        if self.exit_status() is not None:
            return True
        try:
            return requests.get(self._ready_url, timeout=5).status_code == HTTPStatus.OK
        except requests.RequestException:
            return False


def _session_id(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except (ProcessLookupError, PermissionError):
        return None


def _start_time(process: psutil.Process) -> float | None:
    """Unix time; None for a process that ended, waited for or not."""
    try:
        if process.status() == psutil.STATUS_ZOMBIE:
            return None
        return float(process.create_time())
    except psutil.NoSuchProcess:
        return None
