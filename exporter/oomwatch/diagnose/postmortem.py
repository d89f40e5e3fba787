"""Reads what is left of an engine, and has the daemon's own fold and detectors judge it.

A log becomes the observations that a daemon beside the engine would have made of it; so a post-mortem, the daemon and
a replay say the same.
"""

from __future__ import annotations

import gzip
import io
import re
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import IO, cast

from oomwatch.conclusions import Incident
from oomwatch.config import Config
from oomwatch.configured import judge_of
from oomwatch.enginelog.events import YEAR, Entry, Load
from oomwatch.enginelog.lines import line_of
from oomwatch.enginelog.reader import read
from oomwatch.enginelog.story import Story, clocked
from oomwatch.errors import InputError
from oomwatch.observations import Observation
from oomwatch.recording import Recording
from oomwatch.replay import Course, cadence_in

_TICK = 60.0  # seconds: an engine's log says what happened, and few detectors need more than its events


class NothingToRead(InputError):
    """There is nothing to diagnose; the message says what was looked at, and what to do."""


@dataclass(frozen=True)
class PostMortem:
    """What is known of one engine. Times are unix seconds; a log's clock is taken for UTC, in its latest year.

    ``source`` is where it was read from; ``cut`` says why that could not be read to its end, and is empty when it was.
    """

    source: str
    name: str
    story: Story
    incidents: tuple[Incident, ...]
    cut: str = ""

    @property
    def unexplained(self) -> bool:
        """Whether a start ended by an error of which the log says nothing that has to do with memory."""
        return any(start.died is not None and not start.refusals and not start.shortages for start in self.story.starts)

    @property
    def found(self) -> bool:
        """Whether anything went wrong that somebody has to look at."""
        return self.unexplained or any(incident.severity != "info" for incident in self.incidents)


def of_stream(source: str, stream: IO[bytes], written: float, config: Config | None = None) -> list[PostMortem]:
    """Post-mortems of a log, or of a recording's engines; both plain or gzip. ``written``: unix time of its last line.

    Raises NothingToRead where no line tells of memory, and RecordingError for a recording that cannot be read.
    """
    peeking = stream if hasattr(stream, "peek") else cast("IO[bytes]", io.BufferedReader(cast("io.RawIOBase", stream)))
    if _begins(peeking, b"\x1f\x8b"):
        peeking = cast("IO[bytes]", _Unpacked(fileobj=peeking))
    if _begins(peeking, b'{"oomwatch_recording"'):
        return of_recording(Recording(peeking, source), config)
    return [of_log(source, peeking, written, config)]


class _Unpacked(gzip.GzipFile):
    """Gives all that could be unpacked before it fails: the end of a log that is still written may be missing."""

    def read(self, size: int | None = -1) -> bytes:
        return self.read1(-1 if size is None else size)


def _begins(stream: IO[bytes], magic: bytes) -> bool:
    try:
        return bool(cast("io.BufferedReader", stream).peek(len(magic))[: len(magic)] == magic)
    except (OSError, EOFError, zlib.error):
        return False


def of_log(source: str, stream: IO[bytes], written: float, config: Config | None = None) -> PostMortem:
    """The post-mortem of one engine's log."""
    name = re.sub(r"(\.(log|txt|gz|out|err))+$", "", Path(source).name) or source
    log = _Log(name, stream, written)
    judge = judge_of(config or Config())
    found = _worst(Course(log.observations(), judge, _TICK))
    if not log.entries:
        raise NothingToRead(
            f"{source}: nothing in it tells of an engine's memory. Is it the log of a vLLM server, of level INFO, with "
            f"its start?{f' It could be read up to here only: {log.cut}.' if log.cut else ''}"
        )
    return PostMortem(source, name, judge.node.story(name), found, log.cut)


def of_recording(recording: Recording, config: Config | None = None) -> list[PostMortem]:
    """The post-mortems of the engines of a recording. Raises RecordingError where it cannot be read."""
    config = config or Config()
    cadence = cadence_in(recording.intervals(), config)
    judge = judge_of(config, cadence)
    with recording:
        found = _worst(Course(recording, judge, cadence.scrape, recording.start, recording.header.engines))
    engines = [view.name for view in judge.node.snapshot().engines]
    told = [PostMortem(recording.name, name, judge.node.story(name), _about(name, found)) for name in engines]
    rest = tuple(one for one in found if not any(one in engine.incidents for engine in told))
    return told + ([PostMortem(recording.name, "the node", Story(), rest)] if rest else [])


def _about(engine: str, found: Iterable[Incident]) -> tuple[Incident, ...]:
    return tuple(one for one in found if any(verdict.subject.engine == engine for verdict in one.verdicts))


def _worst(course: Course) -> tuple[Incident, ...]:
    """Every incident of a course, run to its end."""
    for _ in course:
        pass
    return course.incidents()


@dataclass
class _Log:
    """A log as observations. ``entries`` are counted while they pass; ``cut`` is why it could not be read on."""

    name: str
    stream: IO[bytes]
    written: float
    entries: int = 0
    cut: str = ""

    def observations(self) -> Iterator[Observation]:
        told = False
        dated: _Dated | None = None
        for clock, entry in clocked(self._read()):
            self.entries += 1
            dated = dated or _Dated(clock, entry.clock is not None, self.written)
            t = dated.unix(clock)
            # Of the periodic statistics the first after something else says all that matters here: that it serves.
            repeated = isinstance(entry.event, Load) and told
            told = isinstance(entry.event, Load)
            if not repeated:
                yield line_of(t, self.name, entry)

    def _read(self) -> Iterator[Entry]:
        try:
            yield from read(self.stream)
        except (OSError, EOFError, zlib.error) as error:
            self.cut = str(error)


class _Dated:
    """Unix time of a log's clock, which has no year: the latest in which its first line is not of the future."""

    def __init__(self, first: float, told: bool, written: float) -> None:
        self._written = written
        self._told = told
        self._year = datetime.fromtimestamp(written, timezone.utc).year
        if told and self.unix(first) > written + _DAY:
            self._year -= 1

    def unix(self, clock: float) -> float:
        """The time of seconds since a leap year began; of a log without a clock, when it was last written to."""
        if not self._told:
            return self._written + clock
        years, rest = divmod(clock, YEAR)
        moment = _LEAP + timedelta(seconds=rest)
        try:
            return moment.replace(year=self._year + int(years)).timestamp()
        except ValueError:  # the 29th of February
            return moment.replace(year=self._year + int(years), month=3, day=1).timestamp()


_DAY = 86400.0
_LEAP = datetime(2000, 1, 1, tzinfo=timezone.utc)
