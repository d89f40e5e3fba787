"""Threads that a driver call may hang without hanging anything else."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

import structlog

T = TypeVar("T")
log = structlog.get_logger(__name__)


class Attempt(Generic[T]):
    """One run of a job: it ends by delivering its result or by being given up, whichever comes first, never by both."""

    def __init__(self, job: Callable[[], T], deliver: Callable[[T], None]) -> None:
        self._job = job
        self._deliver = deliver
        self._lock = threading.Lock()
        self._delivered = False
        self._given_up = False
        self._begin = time.monotonic()
        self._returned = threading.Event()

    @property
    def age(self) -> float:
        """Seconds since it was asked for."""
        return time.monotonic() - self._begin

    @property
    def returned(self) -> bool:
        return self._returned.is_set()

    @property
    def given_up(self) -> bool:
        return self._given_up

    def run(self) -> None:
        try:
            result = self._job()
            with self._lock:
                if not self._given_up:
                    self._delivered = True
                    self._deliver(result)
        except Exception:
            log.exception("nvml_thread_failed")
        finally:
            self._returned.set()

    def wait(self, until: float) -> bool:
        """Whether it has returned by ``until`` (monotonic seconds)."""
        return self._returned.wait(max(0.0, until - time.monotonic()))

    def give_up(self) -> bool:
        """Drops the result, and says so; False when it was delivered before."""
        with self._lock:
            self._given_up = not self._delivered
            return self._given_up


class Worker(Generic[T]):
    """A daemon thread that runs one job at a time and queues none."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._wake = threading.Condition()
        self._attempt: Attempt[T] | None = None
        self._stopping = False
        self._thread: threading.Thread | None = None

    @property
    def thread(self) -> int | None:
        return self._thread.ident if self._thread else None

    def start(self, job: Callable[[], T], deliver: Callable[[T], None]) -> tuple[Attempt[T], bool]:
        """A new attempt and True, or the one that still runs and False."""
        with self._wake:
            if self._attempt is not None and not self._attempt.returned:
                return self._attempt, False
            self._attempt = Attempt(job, deliver)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            self._wake.notify()
            return self._attempt, True

    def stop(self) -> None:
        """Ends the thread once its job has returned."""
        with self._wake:
            self._stopping = True
            self._wake.notify()

    def _run(self) -> None:
        done: Attempt[T] | None = None
        while True:
            with self._wake:
                while self._attempt is done and not self._stopping:
                    self._wake.wait()
                attempt = self._attempt
            if attempt is None or attempt is done:
                return
            attempt.run()
            done = attempt


class Gate:
    """Open while the driver is initialised. It knows who is inside, so that nothing is shut down beneath a call."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._open = False
        self._inside = 0

    @property
    def is_open(self) -> bool:
        return self._open

    @contextmanager
    def inside(self, wait: float = 0.0) -> Iterator[bool]:
        """True inside the gate; False when it does not open within ``wait`` seconds."""
        with self._changed:
            entered = self._changed.wait_for(lambda: self._open, wait)
            self._inside += entered
        try:
            yield entered
        finally:
            with self._changed:
                self._inside -= entered
                self._changed.notify_all()

    def open(self) -> None:
        with self._changed:
            self._open = True
            self._changed.notify_all()

    def close(self, wait: float) -> bool:
        """Lets nobody in any more; True when all have left within ``wait`` seconds."""
        with self._changed:
            self._open = False
            self._changed.notify_all()
            return self._changed.wait_for(lambda: not self._inside, wait)

    def wait_for_closing(self, wait: float | None) -> None:
        """Returns when the gate closes, or after ``wait`` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: not self._open, wait)
