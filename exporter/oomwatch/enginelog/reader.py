"""From bytes to events: finds the few lines of a log that say something, and reads them.

Work is bounded whatever the log holds: a line counts up to 64 KiB, memory is one chunk. Nothing of a line leaves but
the numbers of its event, the process it names, and its clock.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import IO

from oomwatch.enginelog.cuts import STREAMS, is_cut, record_of
from oomwatch.enginelog.events import Entry, Event, Origin
from oomwatch.enginelog.shapes import SHAPES, Compiled

LONGEST_LINE = 64 * 1024
_CHUNK = 1024 * 1024
_LONGEST_HEAD = 512  # of what may stand before a sentence: prefixes, a logger's file, an exception's name

_ESCAPE = b"\x1b["
_COLOURS = re.compile(rb"\x1b\[[\d;]*m")
_PROCESS = re.compile(rb"\(([A-Za-z]\w*?)((?:_(?:[A-Z]+)?\d+)*)(?:-(\d+))?(?: rank=(\d+))? pid=(\d+)[^()]*\)")
_QUOTED_ERROR = re.compile(rb"(?:\w(?:Error|Exception)\(|failed with error )['\"]")
_PLACES = re.compile(rb"_([A-Z]+)?(\d+)")
_CLOCK = re.compile(rb"(?<!\d)(?:\d{4}-)?(\d\d)-(\d\d)[T ](\d\d):(\d\d):(\d\d)")
_DAYS_BEFORE = (0, 31, 60, 91, 121, 152, 182, 213, 244, 274, 305, 335)  # the months of a leap year
_ROLES = {
    b"APIServer": "api_server",
    b"ApiServer": "api_server",
    b"MainProcess": "api_server",
    b"EngineCore": "engine_core",
    b"Worker": "worker",
    b"VllmWorker": "worker",
    b"VllmWorkerProcess": "worker",
    b"WorkerProc": "worker",
    b"RayWorkerWrapper": "worker",
    b"RayWorkerProc": "worker",
    b"RayTrainWorker": "worker",
}
_MESSAGES = ("message", "msg", "log", "event", "text", "exc_info", "exception", "stack")  # in JSON of a logger


# Texts that several literals share, and that are long enough to be found fast and rare enough in other lines.
_SHARED = (b" KV cache ", b" weights ", b"kv_cache_memory_bytes", b"CUDA graph ")
_ERRORS = (b"rror", b"RROR")  # a level or an exception's name


def _by_marker() -> dict[bytes, tuple[Compiled, ...]]:
    """Texts of which every line that says something has one, each with the shapes of its lines."""
    grouped = dict.fromkeys(_ERRORS, tuple(shape for shape in SHAPES if shape.shape.error))
    left = [shape for shape in SHAPES if not shape.shape.error]
    for marker in (*_SHARED, *(shape.shape.literal for shape in left)):
        mine = tuple(shape for shape in left if marker in shape.shape.literal)
        if mine:
            grouped[marker] = mine
            left = [shape for shape in left if shape not in mine]
    return grouped


_BY_MARKER = _by_marker()


def parse(line: bytes) -> Entry | None:
    """What one line says; None for almost all of them. The line may have its end, colours, and any bytes."""
    return _parse(line[:LONGEST_LINE], SHAPES)


def _parse(line: bytes, shapes: Iterable[Compiled]) -> Entry | None:
    if line.lstrip()[:1] == b"{":
        return _parse_json(line)
    if _ESCAPE in line[:_LONGEST_HEAD]:
        line = _COLOURS.sub(b"", line)
    for shape in shapes:
        at = line.find(shape.shape.literal)
        if at >= 0 and _may_begin(line, at):
            found = shape.read(line)
            if found is not None:
                return _entry(found[0], line[: found[1] + 1])
    return None


def _parse_json(line: bytes) -> Entry | None:
    try:
        document = json.loads(line)
    except (ValueError, RecursionError):
        return None
    texts = [document[key] for key in _MESSAGES if isinstance(document.get(key), str)]
    for text in texts:
        for part in text.encode(errors="replace").splitlines():
            if part.lstrip()[:1] != b"{" and (entry := parse(part)) is not None:
                return entry
    return None


def _may_begin(line: bytes, at: int) -> bool:
    """Whether a sentence around ``at`` is a logger's or an exception's: text of a request is quoted, or far behind.

    An exception that is shown as Python does, or told on by another process, quotes its own sentence.
    """
    if at > _LONGEST_HEAD:
        return False
    quotes = line.count(b"'", 0, at) + line.count(b'"', 0, at)
    return not quotes or (quotes == 1 and _QUOTED_ERROR.search(line, 0, at) is not None)


def _entry(event: Event, head: bytes) -> Entry:
    return Entry(event, _origin(head[: head.rfind(b")") + 1]), _clock(head))


@lru_cache(maxsize=256)
def _origin(head: bytes) -> Origin:
    prefixes = _PROCESS.findall(head)
    if not prefixes:
        return Origin()
    name, places, index, rank_given, pid = prefixes[-1]  # of two that ran together the latter is the line's
    ranks = {kind.decode(): number.decode() for kind, number in _PLACES.findall(places)}
    role = _ROLES.get(name, "")
    worker = "_".join(f"{kind}{ranks[kind]}" for kind in ("PP", "PCP", "TP") if kind in ranks)
    given = rank_given or index
    return Origin(
        role,
        int(pid),
        # EngineCore_0 was a data-parallel rank's name in 0.9
        ranks.get("DP") or (ranks.get("", "0") if role == "engine_core" else "0"),
        worker or (given.decode() if given and role == "worker" else "0"),
    )


def _clock(head: bytes) -> float | None:
    found = _CLOCK.search(head)
    if found is None:
        return None
    month, day, hour, minute, second = map(int, found.groups())
    if not 1 <= month <= len(_DAYS_BEFORE):
        return None
    return float((((_DAYS_BEFORE[month - 1] + day - 1) * 24 + hour) * 60 + minute) * 60 + second)


def last_clock(data: bytes) -> float | None:
    """The last clock of a line in a piece of a log, as an entry has it; None where there is none."""
    found = list(_CLOCK.finditer(data))
    return _clock(found[-1].group()) if found else None


class Reader:
    """Cuts a stream of bytes into lines and parses those that may say something. One stream, one reader.

    ``line`` is the raw line of the entry that was given last, for those who were asked to keep it.
    """

    line = b""

    def __init__(self) -> None:
        self._rest = b""
        self._too_long = False  # the present line is beyond its limit, and is left out up to its end
        self._cut: frozenset[bytes] = frozenset()  # streams of a container whose line goes on in their next record

    def feed(self, data: bytes) -> Iterator[Entry]:
        """The events of all lines that end in ``data``."""
        end = data.rfind(b"\n") + 1
        if not end:
            self._keep(data)
            return
        begin = 0
        if self._too_long or self._rest:
            begin = data.find(b"\n") + 1
            self._keep(data[:begin])
            yield from self._parsed(self._rest)
            self._look_for_cuts(self._rest, 0, len(self._rest))
        self._rest, self._too_long = b"", False
        for entry, start, stop in _entries(data, begin, end):
            self.line = data[start:stop]
            if not self._goes_on(data, begin, start):
                yield entry
        self._look_for_cuts(data, begin, end)
        self._keep(data[end:])

    def finish(self) -> Iterator[Entry]:
        """The event of a last line without an end."""
        rest, self._rest, self._too_long = self._rest, b"", False
        yield from self._parsed(rest)
        self._cut = frozenset()

    def _keep(self, part: bytes) -> None:
        if not self._too_long:
            self._rest += part[: LONGEST_LINE - len(self._rest)]
            self._too_long = len(self._rest) >= LONGEST_LINE

    def _parsed(self, line: bytes) -> Iterator[Entry]:
        self.line = line
        entry = parse(line)
        if entry is not None and not self._goes_on(line, 0, 0):
            yield entry

    def _goes_on(self, data: bytes, begin: int, start: int) -> bool:
        """Whether ``line``, which begins at ``start``, is a record that goes on with another's line."""
        record = record_of(self.line)
        return record is not None and is_cut(data, begin, start, record.stream, self._cut)

    def _look_for_cuts(self, data: bytes, begin: int, end: int) -> None:
        self._cut = frozenset(stream for stream in STREAMS if is_cut(data, begin, end, stream, self._cut))


def _entries(data: bytes, begin: int, end: int) -> Iterator[tuple[Entry, int, int]]:
    """The entries of the lines of ``data`` between two places, in order, each with its line's beginning and end."""
    found: dict[int, tuple[Entry, int, int]] = {}
    for marker, shapes in _BY_MARKER.items():
        at = data.find(marker, begin, end)
        while at >= 0:
            stop = data.find(b"\n", at, end)
            start = max(data.rfind(b"\n", begin, at) + 1, begin)
            entry = _parse(data[start : min(stop, start + LONGEST_LINE)], shapes)
            if entry is not None:
                found.setdefault(start, (entry, start, stop))
            at = data.find(marker, stop, end)
    for start in sorted(found):
        yield found[start]


def read(stream: IO[bytes]) -> Iterator[Entry]:
    """The events of a whole log. A stream that begins with a mark of UTF-16 is read as such (Windows writes it)."""
    reader = Reader()
    data = stream.read(_CHUNK)
    recoded = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    decoder = codecs.getincrementaldecoder("utf-16")(errors="replace") if recoded else None
    while data:
        yield from reader.feed(decoder.decode(data).encode() if decoder is not None else data)
        data = stream.read(_CHUNK)
    yield from reader.finish()
