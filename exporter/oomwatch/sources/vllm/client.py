"""Scrapes one engine: its page of metrics each time, its version after a restart, its health now and then."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from urllib.parse import urlsplit

from oomwatch.observations import (
    NOT_KNOWN,
    NOT_READ,
    EngineFacts,
    EngineScrape,
    Maybe,
    RankReading,
    known,
)
from oomwatch.sources.vllm.meaning import PageReading, read_page
from oomwatch.sources.vllm.pages import Page, PageError, read, samples_for_recording
from oomwatch.sources.vllm.transport import Document, Fetcher, FetchError, Location, ScrapeOptions

__all__ = ["EngineScraper", "ScrapeOptions"]

_SMALL_DOCUMENT = 64 * 1024
_HEALTH_EVERY = 4  # scrapes; each costs the engine's front-end a request
_VERSION_RETRY = 8  # scrapes until a version that could not be had is asked for again
_COUNTERS = ("steps", "generation_tokens", "prompt_tokens", "preemptions")


class EngineScraper:
    """Scrapes one engine. ``scrape`` never raises for what the engine does, and must not run twice at once."""

    def __init__(
        self, name: str, target: str, options: ScrapeOptions | None = None, clock: Callable[[], float] = time.time
    ) -> None:
        """``target`` is the server's base URL or the URL of its page; ``clock`` gives unix time."""
        self.name = name
        self._options = options or ScrapeOptions()
        self._clock = clock
        self._fetcher: Fetcher | None = None
        self._location: Location | None = None
        self._mistake = ""
        try:
            self._location = Location.of(target)
            self._fetcher = Fetcher(self._location, self._options)
        except ValueError as error:
            self._mistake = f"the engine's URL cannot be used: {error}"
        self._scrapes = 0
        self._version: str | None = None
        self._version_asked: int | None = None  # number of the scrape; None while a new server has not been asked
        self._last: PageReading | None = None  # of the last scrape, None when it failed

    def scrape(self, facts: EngineFacts | None = None) -> EngineScrape:
        """Ask the engine once. What could not be read has its reason in ``state`` and ``error``."""
        t, start = self._clock(), time.monotonic()
        deadline = start + self._options.timeout
        if self._location is None or self._fetcher is None:
            return EngineScrape(t, self.name, "bad_configuration", 0.0, self._mistake)
        try:
            page = self._page(self._fetcher, self._location, deadline)
        except (FetchError, PageError) as error:
            self._last, self._version_asked = None, None
            message = f"{self._location.shown}: {error}"
            return EngineScrape(t, self.name, error.state, time.monotonic() - start, message)
        reading = read_page(page, self._version, facts)
        if self._last is None or _restarted(self._last, reading):
            self._version_asked = None
        if self._version_due() and self._ask_version(self._fetcher, self._location, deadline):
            reading = read_page(page, self._version, facts)
        healthy: Maybe[bool] = NOT_READ
        if reading.state != "not_vllm" and self._health_due(reading):
            healthy = self._ask_health(self._fetcher, self._location, deadline)
        self._scrapes += 1
        self._last = reading
        return EngineScrape(
            t=t,
            engine=self.name,
            state=reading.state,
            seconds=time.monotonic() - start,
            error=f"{self._location.shown}: {reading.error}" if reading.error else "",
            ranks=reading.ranks,
            model_name=reading.model_name,
            version=self._version or NOT_KNOWN,
            process_start=reading.process_start,
            kv_connector=reading.kv_connector,
            adapters=reading.adapters,
            healthy=healthy,
            samples=samples_for_recording(page),
        )

    def close(self) -> None:
        """Close the connection. A later scrape opens a new one."""
        if self._fetcher is not None:
            self._fetcher.close()

    def _page(self, fetcher: Fetcher, location: Location, deadline: float) -> Page:
        document = fetcher.fetch(location.metrics, deadline, self._options.max_page_bytes)
        if document.status != 200:
            raise _refusal(document)
        return read(document.body, document.content_type)

    def _version_due(self) -> bool:
        asked = self._version_asked
        return asked is None or (self._version is None and self._scrapes - asked >= _VERSION_RETRY)

    def _ask_version(self, fetcher: Fetcher, location: Location, deadline: float) -> bool:
        """Ask for the version; whether it is another one than before. An answer of any other kind is "not known"."""
        before = self._version
        self._version_asked = self._scrapes
        try:
            document = fetcher.fetch(location.sibling("version"), deadline, _SMALL_DOCUMENT)
            self._version = _version_in(document) if document.status == 200 else None
        except FetchError:
            self._version = None
        return self._version != before

    def _health_due(self, reading: PageReading) -> bool:
        return self._scrapes % _HEALTH_EVERY == 0 or (self._last is not None and _stands_still(self._last, reading))

    def _ask_health(self, fetcher: Fetcher, location: Location, deadline: float) -> Maybe[bool]:
        try:
            status = fetcher.fetch(location.sibling("health"), deadline, _SMALL_DOCUMENT).status
        except FetchError:
            return NOT_KNOWN
        return {200: True, 503: False}.get(status, NOT_KNOWN)


def _counters(reading: RankReading) -> Mapping[str, float]:
    values = {name: known(getattr(reading, name)) for name in _COUNTERS}
    return {name: value for name, value in values.items() if value is not None}


def _restarted(before: PageReading, now: PageReading) -> bool:
    """Whether another server process answers: its start differs, or a counter fell."""
    if len({start for page in (before, now) if (start := known(page.process_start)) is not None}) > 1:
        return True
    earlier = {rank.rank: _counters(rank) for rank in before.ranks}
    return any(
        value < earlier.get(rank.rank, {}).get(name, 0.0)
        for rank in now.ranks
        for name, value in _counters(rank).items()
    )


def _stands_still(before: PageReading, now: PageReading) -> bool:
    """Whether a rank has requests while none of its counters moved."""
    earlier = {rank.rank: _counters(rank) for rank in before.ranks}
    return any(
        (known(rank.running) or 0) + (known(rank.waiting) or 0) > 0 and _counters(rank) == earlier.get(rank.rank)
        for rank in now.ranks
    )


def _version_in(document: Document) -> str | None:
    try:
        answer = json.loads(document.body)
    except ValueError:
        return None
    version = answer.get("version") if isinstance(answer, dict) else None
    return version if isinstance(version, str) and 0 < len(version) <= 100 and version.isprintable() else None


def _refusal(document: Document) -> FetchError:
    status = document.status
    if status in (401, 403):
        return FetchError(
            "unauthorized", f"HTTP {status}: credentials are missing or wrong; set bearer_token_file or basic_auth"
        )
    if 300 <= status < 400:
        to = _without_secrets(document.redirect)
        return FetchError("redirected", f"HTTP {status} to {to}: redirects are not followed; give the final URL")
    hint = {
        404: ": no page of metrics at this path",
        500: ": the server failed; see vLLM's log",
        502: ": a proxy answers, and vLLM behind it does not",
        503: ": the server is not ready or its engine is dead; see vLLM's log",
    }.get(status, "")
    return FetchError("http_error", f"HTTP {status}{hint}")


def _without_secrets(location: str) -> str:
    try:
        parts = urlsplit(location)
    except ValueError:
        return "another address"
    shown = (f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}" if parts.netloc else "") + parts.path
    return shown[:200] if shown.isprintable() and shown else "another address"
