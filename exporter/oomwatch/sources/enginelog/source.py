"""One engine's log as a source: follows it where it is written, and publishes what its lines say."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace

from oomwatch.enginelog.events import YEAR, Entry, Load, Step
from oomwatch.enginelog.lines import line_of
from oomwatch.enginelog.reader import Reader, last_clock
from oomwatch.enginelog.story import FRAMES_LAST
from oomwatch.observations import Observation, SourceRun
from oomwatch.sources.enginelog.files import CannotRead, FollowedFile, Piece, identity_at
from oomwatch.sources.enginelog.journal import FollowedJournal
from oomwatch.sources.enginelog.places import ContainerFile, File, Journal, Place, Places

_SECONDS_A_PASS = 1.0
_ENTRIES_A_PASS = 2000
_HISTORY_KEPT = 2000  # entries of what was written before
_TAIL = 64 * 1024  # of a piece, in which its last clock is looked for
_WAIT_TO_CLOSE = 2.0
_LONGEST_TEXT = 4096  # bytes of a raw line
_STEPS_KEPT = 64


class EngineLogSource:
    """Follows one engine's log. Not for use by several threads at once.

    Each pass takes about a second at most; what is left is read in the next. A log that cannot be read is told in a
    SourceRun, and tried again from where reading stopped.
    """

    def __init__(
        self,
        engine: str,
        place: Place,
        places: Places,
        publish: Callable[[Observation], None],
        clock: Callable[[], float] = time.time,
        *,
        keep_text: bool = False,
    ) -> None:
        self.place = place
        self.keep_text = keep_text
        self._engine = engine
        self._places = places
        self._publish = publish
        self._clock = clock
        self._followed: FollowedFile | FollowedJournal | None = None
        self._reader = Reader()
        self._history: deque[tuple[Entry, str | None]] = deque(maxlen=_HISTORY_KEPT)
        self._history_age = 0.0
        self._last_clock: float | None = None
        self._loaded = False
        self._steps: dict[int | None, tuple[float, str]] = {}  # by pid: the last that was told, and when
        self._turn = threading.Lock()
        self._closed = False

    def read(self) -> str:
        """One pass. Publishes a LogLine for each line that says something, and a SourceRun; what is wrong, if it is."""
        with self._turn:
            return "" if self._closed else self._read()

    def _read(self) -> str:
        begin = time.monotonic()
        error = ""
        try:
            self._pass(begin + _SECONDS_A_PASS)
        except CannotRead as problem:
            error = str(problem)
        self._publish(SourceRun(self._clock(), "log", self._engine, not error, time.monotonic() - begin, error))
        return error

    def follows_the_same(self, place: Place) -> bool:
        """Whether another place leads to what is read already: an engine started anew goes on in the same file."""
        if place == self.place:
            return True
        if not isinstance(place, File) or not isinstance(self._followed, FollowedFile):
            return False
        identity = self._followed.identity()
        return identity is not None and identity == identity_at(place.path)

    def close(self) -> None:
        """Read what is left, and give everything back. A reader that hangs is left alone."""
        if not self._turn.acquire(timeout=_WAIT_TO_CLOSE):
            return
        try:
            if not self._closed:
                self._closed = True
                if self._followed is not None:
                    self._read()
                self._give_back()
        finally:
            self._turn.release()

    def _give_back(self) -> None:
        followed, self._followed = self._followed, None
        if followed is not None:
            followed.close()

    # --- one pass --------------------------------------------------------------------------------------------

    def _pass(self, deadline: float) -> None:
        followed = self._followed = self._followed or self._new()
        try:
            self._tell_on(followed, deadline)
        finally:
            if not followed.in_history:
                self._tell_history()

    def _tell_on(self, followed: FollowedFile | FollowedJournal, deadline: float) -> None:
        told = 0
        while time.monotonic() < deadline and told < _ENTRIES_A_PASS:
            piece = followed.read()
            if piece is None:
                return
            if not piece.history:
                self._tell_history()  # it is older
            if piece.apart:
                told += self._tell(self._reader.finish(), piece)
            told += self._tell(self._reader.feed(piece.data), piece)

    def _new(self) -> FollowedFile | FollowedJournal:
        match self.place:
            case File(path):
                return FollowedFile(path)
            case Journal(unit):
                return FollowedJournal(unit)
            case ContainerFile(container):
                found = self._places.container_file(container)
                if found is None:
                    raise CannotRead(
                        f"no log file of container {container[:12]} was found. It needs Docker's json-file driver, or "
                        "Kubernetes' /var/log/containers, to be seen from where oomwatch runs"
                    )
                return FollowedFile(found)

    def _tell(self, entries: Iterator[Entry], piece: Piece) -> int:
        new = ((entry, self._text()) for entry in entries if not self._is_repeated_load(entry))
        if piece.history:
            found = last_clock(piece.data[-_TAIL:])
            self._last_clock = found if found is not None else self._last_clock
            self._history_age = piece.age
            self._history.extend(new)
            return 0
        return sum(self._tell_one(entry, text) for entry, text in new)

    def _text(self) -> str | None:
        """The raw text of the entry that the reader gave last, where it is to be kept."""
        return self._reader.line[:_LONGEST_TEXT].decode(errors="replace").rstrip() if self.keep_text else None

    def _tell_history(self) -> None:
        """What was written before: each line as old as its clock says against the last line, written when the file was.

        The log's time zone is not known, and need not be.
        """
        history, self._history = self._history, deque(maxlen=_HISTORY_KEPT)
        for entry, text in history:
            age = self._history_age
            if entry.clock is not None and self._last_clock is not None:
                before = self._last_clock - entry.clock
                age += before if before >= 0 else before + YEAR if before < -YEAR / 2 else 0.0
            self._tell_one(replace(entry, age=age), text)

    def _tell_one(self, entry: Entry, text: str | None) -> bool:
        """Publish an entry, and whether that was worth it."""
        t = self._clock()
        if self._is_repeated_step(entry, t - entry.age):
            return False
        self._publish(line_of(t, self._engine, entry, text))
        return True

    # --- what says nothing new -------------------------------------------------------------------------------

    def _is_repeated_load(self, entry: Entry) -> bool:
        """Of periodic statistics the first says that the engine serves."""
        if isinstance(entry.event, Step):
            return False
        before, self._loaded = self._loaded, isinstance(entry.event, Load)
        return before and self._loaded

    def _is_repeated_step(self, entry: Entry, t: float) -> bool:
        """Of a traceback each telling line counts once, and again long before the story forgets it."""
        if not isinstance(entry.event, Step):
            self._steps.clear()
            return False
        told, step = self._steps.get(entry.origin.pid, (-math.inf, ""))
        if step == entry.event.step and abs(t - told) <= FRAMES_LAST / 2:
            return True
        if len(self._steps) > _STEPS_KEPT:
            self._steps.clear()
        self._steps[entry.origin.pid] = t, entry.event.step
        return False
