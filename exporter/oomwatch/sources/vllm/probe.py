"""The active probe: one token asked of an engine, to notice one that hung while idle, which no series shows."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace

from oomwatch.observations import Observation, ProbeResult, SourceRun
from oomwatch.sources.vllm.transport import Fetcher, FetchError, Location, ScrapeOptions

_LARGEST_ANSWER = 64 * 1024
# What fails before or beside the engine: the scraper tells of it, and it says nothing of the engine's work.
_NOT_THE_ENGINE = ("unreachable", "tls_error", "bad_configuration", "redirected", "unauthorized", "too_large")


class EngineProbe:
    """Asks one engine for one token at a time. Not for use by several threads at once, so never two are in flight.

    ``target`` is the URL of the server or of its page, ``model`` the name it serves. ``options.timeout`` is how long a
    token may take, in seconds; leaving ends the request on the server, too.
    """

    def __init__(
        self,
        name: str,
        target: str,
        model: str,
        options: ScrapeOptions,
        publish: Callable[[Observation], None],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._name = name
        self._options = options
        self._publish = publish
        self._clock = clock
        location = Location.of(target)
        self._fetcher = Fetcher(location, replace(options, max_page_bytes=_LARGEST_ANSWER))
        self._url = location.sibling("v1/completions")
        # A prompt of one token that no prefix cache can answer for, and an answer of one.
        self._body = json.dumps({"model": model, "prompt": "1", "max_tokens": 1, "temperature": 0}).encode()

    def probe(self) -> None:
        """One probe. Publishes a ProbeResult where the engine had its say, and a SourceRun in any case."""
        start = time.monotonic()
        ok, error, of_the_engine = self._ask(start + self._options.timeout)
        seconds = time.monotonic() - start
        t = self._clock()
        if of_the_engine:
            self._publish(ProbeResult(t, self._name, ok, seconds, error))
        self._publish(SourceRun(t, "probe", self._name, ok, seconds, error))

    def close(self) -> None:
        self._fetcher.close()

    def _ask(self, deadline: float) -> tuple[bool, str, bool]:
        """Whether a token came, what went wrong, and whether that says anything of the engine."""
        try:
            document = self._fetcher.fetch(self._url, deadline, _LARGEST_ANSWER, self._body)
        except FetchError as problem:
            return False, str(problem), problem.state not in _NOT_THE_ENGINE
        if document.status == 200:
            return True, "", True
        if document.status >= 500:
            return False, f"the server answered {document.status}", True
        return (
            False,
            f"the server refused the probe with {document.status}. Check probe.model and the probe's credentials",
            False,
        )
