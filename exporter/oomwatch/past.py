"""The past as a Prometheus server holds it, read as observations: for a backtest, or for what a daemon did not see.

Samples are asked for as they were scraped (a range selector in an instant query), so that each scrape comes back whole
and no value is repeated for one that failed; with a step, by query_range. Of GPUs there is what oomwatch itself
exported: device memory, without processes.
"""

from __future__ import annotations

import json
import math
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import urlencode, urlsplit

from oomwatch.config import Config
from oomwatch.errors import InputError
from oomwatch.observations import EngineFacts, EngineScrape, GpuPoll, Memory, Observation
from oomwatch.sources.vllm.meaning import read_page
from oomwatch.sources.vllm.names import LORA_REQUESTS, SAMPLE_NAMES
from oomwatch.sources.vllm.pages import PageError, samples_for_recording, samples_from_recording
from oomwatch.sources.vllm.transport import Fetcher, FetchError, Location, ScrapeOptions

_LONGEST_CHUNK = 3600.0
_SHORTEST_CHUNK = 60.0
_SCRAPES = "up"
_GPU_SERIES: Mapping[str, str] = {
    "oomwatch_gpu_memory_total_bytes": "total",
    "oomwatch_gpu_memory_reserved_bytes": "reserved",
    "oomwatch_gpu_memory_used_bytes": "used",
    "oomwatch_gpu_memory_free_bytes": "free",
}
_ADDED_BY_PROMETHEUS = frozenset({"__name__", "job", "instance"})


class PrometheusError(InputError):
    """The server cannot be asked, or answers nonsense; what, and what to do."""


@dataclass(frozen=True)
class Target:
    """What Prometheus scraped: the engine of a job's instance."""

    job: str
    instance: str

    @property
    def matcher(self) -> str:
        return f"job={json.dumps(self.job)},instance={json.dumps(self.instance)}"


Points = Sequence[tuple[float, float]]
Series = tuple[Mapping[str, str], Points]


class PrometheusServer:
    """Asks a Prometheus server (or one that speaks its API) by GET. Raises PrometheusError."""

    def __init__(self, url: str, options: ScrapeOptions) -> None:
        self._url = url.rstrip("/")
        self._options = options
        try:
            self._fetcher = Fetcher(Location.of(self._url), options)
        except ValueError as error:
            raise PrometheusError(f"{url}: {error}") from None

    def samples(self, selector: str, since: float, until: float) -> list[Series]:
        """Every stored sample of the series from ``since`` (left out) to ``until``."""
        query = f"{selector}[{max(1, math.ceil((until - since) * 1000))}ms]"
        found = self._matrix("query", {"query": query, "time": f"{until:.3f}"})
        return [(metric, [(t, value) for t, value in points if t > since]) for metric, points in found]

    def steps(self, selector: str, since: float, until: float, step: float) -> list[Series]:
        """Values every ``step`` seconds."""
        parameters = {"query": selector, "start": f"{since + step:.3f}", "end": f"{until:.3f}", "step": f"{step:g}"}
        return self._matrix("query_range", parameters)

    def _matrix(self, kind: str, parameters: Mapping[str, str]) -> list[Series]:
        deadline = time.monotonic() + self._options.timeout
        address = f"{self._url}/api/v1/{kind}?{urlencode(parameters)}"
        try:
            document = self._fetcher.fetch(address, deadline, self._options.max_page_bytes)
        except FetchError as error:
            if error.state == "too_large":
                raise _TooMuch from None
            raise PrometheusError(f"{self._url}: {error}") from None
        if document.status == 422:
            raise _TooMuch  # more samples than the server loads for one query
        if document.status != 200:
            raise PrometheusError(f"{self._url}: HTTP {document.status}{_HINTS.get(document.status, '')}")
        try:
            answer = json.loads(document.body)
            return [
                (dict(series["metric"]), [(float(t), float(value)) for t, value in series.get("values", ())])
                for series in answer["data"]["result"]
            ]
        except (ValueError, KeyError, TypeError):
            raise PrometheusError(f"{self._url}: the answer is none of Prometheus' API: check the URL") from None


class _TooMuch(PrometheusError):
    def __init__(self) -> None:
        super().__init__("the server refuses to give so much at once, even for a minute: raise its limits")


_HINTS = {
    400: ": it does not understand the query. Is it Prometheus 2 or newer?",
    401: ": credentials are missing or wrong",
    403: ": credentials are missing or wrong",
    404: ": there is no API below this URL; give the base URL, without /api/v1",
}


class Past:
    """What a server holds, as observations in order. ``step`` None takes samples as they were scraped."""

    def __init__(self, server: PrometheusServer, *, step: float | None = None) -> None:
        self._server = server
        self._step = step

    def targets(self, since: float, until: float) -> tuple[Target, ...]:
        """Every instance that showed a page of vLLM."""
        step = max(60.0, (until - since) / 1000)
        selector = f'count by (job, instance) ({{__name__=~"{_any_of(_SIGNS)}"}})'
        found = self._server.steps(selector, since - step, until, step)
        return tuple(sorted({Target(m.get("job", ""), m.get("instance", "")) for m, _ in found}, key=_order))

    def scrape_interval(self, target: Target, since: float, until: float) -> float | None:
        """Median seconds between two scrapes; None where there are fewer than two."""
        end = min(until, since + _LONGEST_CHUNK)
        for begin in (since, max(since, until - _LONGEST_CHUNK)):
            times = [t for _, points in self._read(f"{_SCRAPES}{{{target.matcher}}}", begin, end) for t, _ in points]
            if len(times) > 1:
                distances = sorted(b - a for a, b in zip(sorted(times), sorted(times)[1:], strict=False))
                return distances[len(distances) // 2]
            end = until
        return None

    def observations(
        self, engines: Mapping[Target, EngineFacts], since: float, until: float, *, gpus: bool = True
    ) -> Iterator[Observation]:
        """Scrapes of the engines and polls of GPUs, by time."""
        for begin, end in self._chunks(since, until):
            yield from sorted(self._chunk(engines, begin, end, gpus), key=lambda found: found.t)

    def _chunks(self, since: float, until: float) -> Iterator[tuple[float, float]]:
        begin = since
        while begin < until:
            end = min(until, begin + _LONGEST_CHUNK)
            yield begin, end
            begin = end

    def _chunk(
        self, engines: Mapping[Target, EngineFacts], begin: float, end: float, gpus: bool
    ) -> Iterator[Observation]:
        for target, facts in engines.items():
            yield from self._scrapes(target, facts, begin, end)
        if gpus:
            yield from self._polls(begin, end)

    def _scrapes(self, target: Target, facts: EngineFacts, begin: float, end: float) -> Iterator[EngineScrape]:
        pages: dict[float, dict[str, float]] = {}
        names = _any_of({*_ASKED_FOR, _SCRAPES})
        fine: dict[float, bool] = {}
        for metric, points in self._read(f'{{__name__=~"{names}",{target.matcher}}}', begin, end):
            if metric.get("__name__") == _SCRAPES:
                fine.update((t, value == 1) for t, value in points)
                continue
            series = _series(metric)
            for t, value in points:
                if math.isfinite(value):
                    pages.setdefault(t, {})[series] = value
        for t in sorted(fine.keys() | pages.keys()):
            if fine.get(t, True):
                yield _scrape(t, facts, pages.get(t, {}))
            else:
                yield EngineScrape(t, facts.name, "unreachable", 0.0, "Prometheus could not scrape it")

    def _polls(self, begin: float, end: float) -> Iterator[GpuPoll]:
        polls: dict[tuple[float, str], dict[str, float]] = {}
        for metric, points in self._read(f'{{__name__=~"{_any_of(_GPU_SERIES)}"}}', begin, end):
            part = _GPU_SERIES.get(metric.get("__name__", ""))
            if part is not None:
                for t, value in points:
                    polls.setdefault((t, metric.get("gpu", "")), {})[part] = value
        for (t, uuid), parts in polls.items():
            if {"total", "used", "free"} <= parts.keys():
                reserved = int(parts["reserved"]) if "reserved" in parts else None
                memory = Memory(int(parts["total"]), reserved, int(parts["used"]), int(parts["free"]))
                yield GpuPoll(t, uuid, -1, "", memory)

    def _read(self, selector: str, begin: float, end: float) -> list[Series]:
        """The series of a chunk, in halves where the server refuses so much at once."""
        try:
            if self._step is not None:
                return self._server.steps(selector, begin, end, self._step)
            return self._server.samples(selector, begin, end)
        except _TooMuch:
            if end - begin <= _SHORTEST_CHUNK:
                raise
            middle = (begin + end) / 2
            return [*self._read(selector, begin, middle), *self._read(selector, middle, end)]


# Adapters have very many series, and matter to the memory of processes, which Prometheus does not have.
_ASKED_FOR = tuple(name for name, plain in SAMPLE_NAMES.items() if plain != LORA_REQUESTS)
_SIGNS = tuple(
    name
    for name, plain in SAMPLE_NAMES.items()
    if plain in ("vllm:num_requests_running", "vllm:kv_cache_usage_perc", "vllm:generation_tokens_total")
)


def _order(target: Target) -> tuple[str, str]:
    return target.job, target.instance


def _any_of(names: Iterable[str]) -> str:
    return "|".join(sorted(names))


def _series(metric: Mapping[str, str]) -> str:
    """A series as a page shows it."""
    labels = ",".join(
        f"{name}={json.dumps(value, ensure_ascii=False)}"
        for name, value in sorted(metric.items())
        if name not in _ADDED_BY_PROMETHEUS
    )
    return f"{metric['__name__']}{{{labels}}}" if labels else metric["__name__"]


def _scrape(t: float, facts: EngineFacts, samples: Mapping[str, float]) -> EngineScrape:
    try:
        page = samples_from_recording(samples)
    except PageError as error:
        return EngineScrape(t, facts.name, error.state, 0.0, str(error))
    reading = read_page(page, facts.vllm_version, facts)
    if reading.state == "not_vllm":
        return EngineScrape(t, facts.name, "stats_disabled", 0.0, "the page had no vllm: series")
    return EngineScrape(
        t=t,
        engine=facts.name,
        state=reading.state,
        seconds=0.0,
        ranks=reading.ranks,
        model_name=reading.model_name,
        process_start=reading.process_start,
        kv_connector=reading.kv_connector,
        samples=samples_for_recording(page),
    )


# --- what a daemon did not see -----------------------------------------------------------------------------------


def filler(config: Config) -> Callable[[Iterable[EngineFacts], float, float], Iterator[Observation]] | None:
    """Observations of this host's engines from the configured Prometheus server; None where none is configured."""
    settings = config.history.prometheus
    if settings.url is None:
        return None
    url = settings.url

    def fill(engines: Iterable[EngineFacts], since: float, until: float) -> Iterator[Observation]:
        deadline = time.monotonic() + settings.timeout
        configured = [engine.facts() for engine in config.engines]
        facts = {engine.name: engine for engine in (*configured, *engines)}
        past = Past(PrometheusServer(url, settings.options()))
        targets = of_this_host(past.targets(since, until), facts.values())
        for observation in past.observations(targets, since, until, gpus=False):
            if time.monotonic() > deadline:
                raise PrometheusError(f"{url}: not all of it came within {settings.timeout:g} s")
            yield observation

    return fill


def of_this_host(targets: Iterable[Target], engines: Iterable[EngineFacts]) -> dict[Target, EngineFacts]:
    """Targets whose instance is an engine's address: the same host and port, or this host by one of its names."""
    found: dict[Target, EngineFacts] = {}
    listed, own_names = tuple(targets), _own_names()
    for facts in engines:
        parts = urlsplit(facts.target or "")
        hosts = {parts.hostname} | (own_names if parts.hostname in _LOCAL else frozenset())
        for target in listed:
            host, _, port = target.instance.rpartition(":")
            if host.strip("[]").lower() in hosts and port == str(parts.port):
                found.setdefault(target, facts)
                break
    return found


_LOCAL = frozenset({"localhost", "127.0.0.1", "::1"})


def _own_names() -> frozenset[str]:
    name = socket.gethostname().lower()
    return frozenset({name, name.partition(".")[0], *_LOCAL})
