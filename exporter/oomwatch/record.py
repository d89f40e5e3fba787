"""``oomwatch record``: takes what the daemon's flight recorder holds, from the daemon or from its database.

The daemon hands its recording out in parts: each names the block behind which the next one begins, and an empty part
says that there is nothing more yet.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol, cast
from urllib.parse import urlencode

from oomwatch.config import DEFAULT_PORT, Config, split_address
from oomwatch.database import FILE, Archive, Piece, Unusable
from oomwatch.errors import InputError
from oomwatch.history import default_directory, facts_in
from oomwatch.recording import Header, from_line, header_line, to_line
from oomwatch.settings import parse_duration
from oomwatch.sources.vllm.transport import Fetcher, FetchError, Location, ScrapeOptions

PATH = "/api/v1/recording"
NEXT, START = "X-Oomwatch-Next", "X-Oomwatch-Start"
PATIENT = ScrapeOptions(timeout=60.0, max_page_bytes=256 * 1024**2)
"""For servers that are asked for hours or days at once."""
_PART_BYTES = 16 * 1024**2  # of text, before compression
_POLL_SECONDS = 5.0


class CannotRecord(InputError):
    """There is nothing to record from; the message says where it was looked for, and what to do."""


@dataclass(frozen=True)
class Part:
    """Lines of a recording, the first part's with its header. ``start`` is the unix time of their second 0."""

    lines: bytes
    next: int
    start: float


def part(archive: Archive, since: float, after: int | None, start: float | None, *, log_text: bool = False) -> Part:
    """The next part behind block ``after``; the first one, with its header, where that is None."""
    pieces = archive.pieces(since, after or 0)
    first = next(pieces, None)
    if start is None:
        start = first.first if first is not None else since
    lines: list[bytes] = []
    if after is None:
        lines.append(_header(archive, first, start))
        after = archive.newest() or 0 if first is None else 0
    size = 0
    piece = first
    while piece is not None:
        size += len(piece.text)
        lines.extend(_retimed(line, start, log_text) for line in piece.text.splitlines())
        after = piece.number
        piece = next(pieces, None) if size < _PART_BYTES else None
    return Part(b"".join(line + b"\n" for line in lines if line), after, start)


def _header(archive: Archive, first: Piece | None, start: float) -> bytes:
    newest = first.number if first is not None else archive.newest()
    engines = facts_in(archive.facts(newest)) if newest else ()
    intervals = json.loads(archive.meta("intervals") or "{}")
    return header_line(Header(start=start, engines=engines, intervals=intervals)).encode()


_T = b'{"t":'


def _retimed(line: bytes, start: float, log_text: bool) -> bytes:
    """A line of the flight recorder, its unix time counted from ``start``; empty for text that is not wanted."""
    if not log_text and b'"log":' in line and b'"line":' in line:
        observation = from_line(line.decode())
        stripped = to_line(observation) if observation is not None else None
        if stripped is None:
            return b""
        line = stripped.encode()
    number, comma, rest = line.removeprefix(_T).partition(b",")
    return _T + repr(round(float(number) - start, 6)).encode() + comma + rest


def answer(path: Path, query: Mapping[str, str], now: float) -> Part:
    """What the daemon answers to a query. ValueError where it asks for nonsense; Unusable without a database."""
    unknown = query.keys() - {"last", "after", "start", "log_text"}
    if unknown:
        raise ValueError(f"unknown parameter: {', '.join(sorted(unknown))}. There are last, after, start and log_text")
    last = query.get("last", "24h")
    try:
        seconds = parse_duration(last)
    except ValueError:
        raise ValueError(f'last is "{last[:40]}", and has to be a duration such as 2h or 30m') from None
    after, start = query.get("after"), query.get("start")
    if (after is None) != (start is None):
        raise ValueError("after and start belong together, as the part before named them")
    try:
        behind = int(after) if after is not None else None
        zero = float(start) if start is not None else None
    except ValueError:
        raise ValueError("after is the number of a block, start a unix time") from None
    with Archive(path) as archive:
        since = now - seconds if behind is None else 0.0
        return part(archive, since, behind, zero, log_text=query.get("log_text") == "1")


# --- where it comes from ---------------------------------------------------------------------------------------


class Tap(Protocol):
    """Gives the parts of a recording one after another."""

    def take(self, before: Part | None) -> Part: ...


class DaemonTap:
    """A running daemon, by its HTTP API. Raises FetchError."""

    def __init__(self, url: str, options: ScrapeOptions, last: float, *, log_text: bool) -> None:
        self._location = Location.of(url)
        self._options = options
        self._fetcher = Fetcher(self._location, options)
        self._last = last
        self._log_text = log_text

    def take(self, before: Part | None) -> Part:
        query = {"last": f"{self._last:g}", "log_text": str(int(self._log_text))}
        if before is not None:
            query |= {"after": str(before.next), "start": repr(before.start)}
        base = self._location.origin + self._location.path.rstrip("/").removesuffix("/metrics")
        deadline = time.monotonic() + self._options.timeout
        document = self._fetcher.fetch(f"{base}{PATH}?{urlencode(query)}", deadline, self._options.max_page_bytes)
        if document.status != 200:
            raise FetchError("http_error", _refusal(document.status))
        try:
            return Part(document.body, int(document.headers[NEXT]), float(document.headers[START]))
        except (KeyError, ValueError):
            raise FetchError("not_metrics", "something else than oomwatch answers there") from None


def _refusal(status: int) -> str:
    return {
        401: "HTTP 401: give --username and --password-file, as the daemon's web configuration has them",
        404: "HTTP 404: an older oomwatch, or something else, answers there",
        503: "HTTP 503: the daemon keeps no history on disk now, or serves as many requests as it may",
    }.get(status, f"HTTP {status}")


class DatabaseTap:
    """The database of a daemon, running or not. Raises Unusable."""

    def __init__(self, path: Path, last: float, *, log_text: bool, clock: Callable[[], float] = time.time) -> None:
        self._path = path
        self._since = clock() - last
        self._log_text = log_text

    def take(self, before: Part | None) -> Part:
        with Archive(self._path) as archive:
            after, start = (before.next, before.start) if before is not None else (None, None)
            return part(archive, self._since, after, start, log_text=self._log_text)


def tap(
    config: Config, last: float, url: str | None = None, options: ScrapeOptions = PATIENT, *, log_text: bool = False
) -> tuple[Tap, Part]:
    """The daemon at ``url``, or the one of this host's configuration, else its database; with its first part.

    Raises CannotRecord with what was wrong with both.
    """
    url = url or _own_url(config)
    path = (config.history.directory or default_directory()) / FILE
    try:
        daemon = DaemonTap(url, options, last, log_text=log_text)
        return daemon, daemon.take(None)
    except (FetchError, ValueError) as error:
        no_daemon = f"the daemon at {url}: {error}"
    try:
        database = DatabaseTap(path, last, log_text=log_text)
        return database, database.take(None)
    except Unusable as error:
        raise CannotRecord(f"there is nothing to record from.\n  {no_daemon}\n  its database: {error}") from None


def _own_url(config: Config) -> str:
    """Where the daemon of this host's configuration answers."""
    host, port = split_address(config.web.listen_address[0]) or ("", DEFAULT_PORT)
    return f"http://{f'[{host}]' if ':' in host else host or '127.0.0.1'}:{port}"


def parts(source: Tap, first: Part, seconds: float) -> Iterator[Part]:
    """All parts there are, then what comes during ``seconds``. Raises CannotRecord when the source goes away."""
    deadline = time.monotonic() + seconds
    latest = first
    while True:
        if latest.lines:
            yield latest
        else:
            left = deadline - time.monotonic()
            if left <= 0:
                return
            time.sleep(min(_POLL_SECONDS, left))
        try:
            latest = source.take(latest)
        except (FetchError, Unusable) as error:
            raise CannotRecord(f"the recording ends early: {error}") from None


@contextlib.contextmanager
def destination(output: str) -> Iterator[IO[bytes]]:
    """The file to write to: packed where its name ends in .gz, standard output for -."""
    if output == "-":
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
    elif output.endswith(".gz"):
        with gzip.open(output, "wb", compresslevel=6) as packed:
            yield cast("IO[bytes]", packed)
    else:
        with Path(output).open("wb") as plain:
            yield plain
