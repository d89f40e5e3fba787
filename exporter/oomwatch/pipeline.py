"""The one way of the data: sources put observations in, one thread folds them, everyone else reads snapshots."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence

import structlog

from oomwatch.judge import Judge
from oomwatch.logs import Defects
from oomwatch.observations import Observation
from oomwatch.snapshot import EMPTY, Snapshot

_log = structlog.get_logger(__name__)

_POLL_SECONDS = 0.5  # how often the owner looks whether it should stop


class Pipeline:
    """Owns a :class:`Judge` in one thread.

    ``publish`` may be called from any thread and never blocks. ``current`` is the latest snapshot: immutable, and
    swapped by a single assignment, so that a reader never sees half of a cycle.
    """

    def __init__(
        self,
        judge: Judge,
        observers: Sequence[Callable[[Observation], None]] = (),
        defects: Defects | None = None,
    ) -> None:
        """Each of ``observers`` is told every observation after it was folded, in the owner's thread."""
        self._judge = judge
        self._observers = tuple(observers)
        self._queue: queue.SimpleQueue[Observation | Callable[[Judge], None]] = queue.SimpleQueue()
        self._swapped = threading.Condition()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pipeline", daemon=True)
        self.current: Snapshot = EMPTY
        self.defects = defects or Defects()
        self._swaps = 0

    def publish(self, observation: Observation) -> None:
        self._queue.put(observation)

    def on_judge(self, action: Callable[[Judge], None]) -> None:
        """Have the owner run ``action`` between two observations, for changes of settings."""
        self._queue.put(action)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Let the owner finish what is in the queue; waits two seconds at most."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(timeout=2.0)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def wait_for(self, condition: Callable[[Snapshot], bool], seconds: float) -> Snapshot | None:
        """The first snapshot that meets ``condition``, None when none did within ``seconds``."""
        deadline = time.monotonic() + seconds
        with self._swapped:
            while not condition(self.current):
                left = deadline - time.monotonic()
                if left <= 0:
                    return None
                self._swapped.wait(left)
            return self.current

    def flush(self, seconds: float) -> bool:
        """Wait until everything published before is in ``current``; False when that took longer than ``seconds``."""
        folded: list[int] = []
        self.on_judge(lambda _: folded.append(self._swaps))
        return self.wait_for(lambda _: bool(folded) and self._swaps > folded[0], seconds) is not None

    def _run(self) -> None:
        while True:
            try:
                first = self._queue.get(timeout=_POLL_SECONDS)
            except queue.Empty:
                if self._stopping.is_set():
                    return
                continue
            self._fold(first)
            for _ in range(self._queue.qsize()):
                self._fold(self._queue.get())
            self._swap()

    def _fold(self, item: Observation | Callable[[Judge], None]) -> None:
        try:
            if callable(item):
                item(self._judge)
                return
            self._judge.apply(item)
            for observer in self._observers:
                observer(item)
        except Exception as error:
            # One observation that cannot be folded must not end the daemon: what still works goes on.
            self.defects.met(_log, "could not fold an observation", error, kind=type(item).__name__)

    def _swap(self) -> None:
        try:
            snapshot = self._judge.snapshot()
        except Exception as error:
            self.defects.met(_log, "could not build a snapshot; showing nothing rather than the past", error)
            snapshot = EMPTY
        with self._swapped:
            self.current = snapshot
            self._swaps += 1
            self._swapped.notify_all()
