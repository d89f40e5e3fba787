"""The ends of processes, told at once: the kernel knows them before any poll does (``pidfd_open``, Linux 5.3)."""

from __future__ import annotations

import os
import selectors
import threading
from collections.abc import Callable, Collection
from contextlib import suppress


class Ends:
    """Calls ``then`` with the pid of each watched process that has ended, in a thread of its own.

    What cannot be watched, for want of permission, descriptors or a newer kernel, is left to the polls.
    """

    def __init__(self, then: Callable[[int], None]) -> None:
        self._then = then
        self._lock = threading.Lock()
        self._descriptors: dict[int, int] = {}  # by pid
        self._selector = selectors.DefaultSelector()
        self._closed = False
        self._woken, self._waker = os.pipe()  # only to end the wait: processes are added while it lasts
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._thread: threading.Thread | None = None

    def watch(self, pids: Collection[int]) -> None:
        """Watch these processes from now on, and no others."""
        with self._lock:
            if self._closed:
                return
            wanted = set(pids)
            for pid in self._descriptors.keys() - wanted:
                self._leave(pid)
            for pid in wanted - self._descriptors.keys():
                self._add(pid)
            if self._descriptors and self._thread is None:
                self._thread = threading.Thread(target=self._run, name="ends", daemon=True)
                self._thread.start()

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for pid in tuple(self._descriptors):
                self._leave(pid)
            os.write(self._waker, b"x")
            running = self._thread is not None
        if not running:
            self._release()

    def _add(self, pid: int) -> None:
        with suppress(OSError, AttributeError):
            descriptor = os.pidfd_open(pid)
            self._descriptors[pid] = descriptor
            self._selector.register(descriptor, selectors.EVENT_READ, pid)

    def _leave(self, pid: int) -> None:
        descriptor = self._descriptors.pop(pid)
        with suppress(KeyError, OSError):
            self._selector.unregister(descriptor)
        os.close(descriptor)

    def _run(self) -> None:
        while True:
            for key, _ in self._selector.select():
                pid = key.data
                with self._lock:
                    if self._closed:
                        break
                    if pid in self._descriptors:
                        self._leave(pid)
                self._then(pid)
            if self._closed:
                self._release()
                return

    def _release(self) -> None:
        self._selector.close()
        os.close(self._woken)
        os.close(self._waker)
