"""The real node as a feed of observations: NVML, the engines' pages, /proc, put together as the configuration says."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Protocol

import structlog

from oomwatch.config import Config, EngineConfig, EngineLogConfig, ProbeConfig, TlsConfig
from oomwatch.logs import Repeats
from oomwatch.observations import (
    Absent,
    EngineFacts,
    EngineUpdate,
    Observation,
    SourceRun,
    TargetRemoved,
    Tick,
    known,
)
from oomwatch.snapshot import Snapshot, SourceView, devices
from oomwatch.sources.allocator import FILE_STATES, AllocatorSource
from oomwatch.sources.discovery import Discovery, merge
from oomwatch.sources.ends import Ends
from oomwatch.sources.enginelog import ContainerFile, EngineLogSource, File, Journal, Place, Places
from oomwatch.sources.host import HostSource
from oomwatch.sources.nvml import CallStats, NvmlSource
from oomwatch.sources.proc import ProcessTable
from oomwatch.sources.vllm.client import EngineScraper
from oomwatch.sources.vllm.probe import EngineProbe
from oomwatch.sources.vllm.transport import ScrapeOptions

_log = structlog.get_logger(__name__)

# Conclusions come with the clock, and what falls silent is noticed by it: slow sources must not slow it down.
_SLOWEST_CLOCK = 15.0


@dataclass(frozen=True)
class Job:
    """Something to do every ``seconds``; ``jitter`` seconds at most before or after, to keep targets apart."""

    seconds: float
    action: Callable[[], None]
    jitter: float = 0.0


class Feed(Protocol):
    """Where a daemon's observations come from: the node, or the demo."""

    def jobs(self) -> Mapping[str, Job]:
        """What has to run now, by name; asked again after each job and reload."""

    def ready(self) -> str:
        """Empty once everything has been read once, else what is still missing."""

    def call_stats(self) -> CallStats: ...

    def probe_files(self) -> Mapping[str, int]:
        """How many files of oomwatch-probe were found at the last pass, by what became of them."""

    def release(self) -> str:
        """Give the driver's handles back; empty when done, else why not."""

    @property
    def released(self) -> bool:
        """Whether the driver's handles are given back now."""

    def resume(self) -> None: ...

    def configure(self, config: Config) -> None: ...

    def close(self) -> None: ...


@dataclass
class _Engine:
    """An engine that is watched. ``settings`` is what its scraper was made from."""

    facts: EngineFacts
    settings: object
    scraper: EngineScraper | None
    probe: EngineProbe | None
    probe_interval: float
    log: EngineLogSource | None = None
    turn: threading.Lock = field(default_factory=threading.Lock)  # of its scraper

    def close(self) -> None:
        for part in (self.scraper, self.probe, self.log):
            if part is not None:
                part.close()


class NodeFeed:
    """Reads this node. ``snapshot`` answers the present, for the pids that GPUs list."""

    def __init__(
        self,
        config: Config,
        publish: Callable[[Observation], None],
        snapshot: Callable[[], Snapshot],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._config = config
        self._publish = publish
        self._snapshot = snapshot
        self._clock = clock
        self._repeats = Repeats()
        self._lock = threading.Lock()  # over the engines: found by one job, scraped by others
        self._engines: dict[str, _Engine] = {}
        self._found: tuple[EngineFacts, ...] = ()
        self._finding = threading.Lock()
        self._ends = Ends(self._engine_process_ended)
        table = ProcessTable()
        self._discovery = Discovery(table=table)
        self._host = HostSource(publish, clock=clock, table=table)
        self._host_turn = threading.Lock()
        self._table = table
        self._probes = self._new_probes()
        self._probe_notes: set[tuple[str, str]] = set()
        self._places = self._new_places()
        self._nvml = self._new_nvml()
        self._first: set[str] = {"GPUs", "engines", "host"}
        self._seen_pids: frozenset[int] = frozenset()
        self._watch(self._found)

    # --- what runs -------------------------------------------------------------------------------------------

    def jobs(self) -> Mapping[str, Job]:
        every = self._config.intervals
        jobs = {
            "gpus": Job(every.gpu, self.read_gpus),
            "engines": Job(every.discovery, self.find_engines),
            "host": Job(every.host, self.read_host),
            "probes": Job(self._config.probe.interval, self.read_probes),
            "clock": Job(min(every.gpu, every.scrape, _SLOWEST_CLOCK), lambda: self._publish(Tick(self._clock()))),
        }
        with self._lock:
            for name, engine in self._engines.items():
                if engine.scraper is not None:
                    scrape = partial(self.scrape, name)
                    jobs[f"engine {name}"] = Job(every.scrape, scrape, min(1.0, every.scrape * 0.05))
                if engine.probe is not None:
                    jobs[f"probe {name}"] = Job(engine.probe_interval, partial(self.ask, name))
                if engine.log is not None:
                    jobs[f"log {name}"] = Job(self._config.engine_logs.interval, partial(self.read_log, name))
        return jobs

    def read_gpus(self) -> None:
        """One cycle over all devices; returns within the driver's deadlines."""
        if self._nvml is not None:
            self._nvml.refresh()
            self._nvml.poll_all()
        self._first.discard("GPUs")
        listed = self._listed_pids()
        if not listed <= self._seen_pids:
            # Whose memory a new process holds is worth telling before the host's own, slower turn.
            self.read_host()

    def find_engines(self) -> None:
        """Looks for engines on this host, and brings what is watched up to date."""
        with self._finding:
            self._find_engines()

    def _find_engines(self) -> None:
        begin = time.monotonic()
        error = ""
        if self._config.discovery.enabled:
            try:
                self._found = self._discovery.find()
            except OSError as problem:
                error = f"cannot look through the host's processes: {problem}"
            self._publish(SourceRun(self._clock(), "discovery", "", not error, time.monotonic() - begin, error))
            self._note("discovery", "discovery", error)
        else:
            self._found = ()
        if not error:  # engines that cannot be looked for have not ended
            self._watch(self._found)
            self._end_the_unfound()
        self._first.discard("engines")

    def _engine_process_ended(self, pid: int) -> None:
        """Its series go now, and not at the next look."""
        with self._lock:
            names = [name for name, engine in self._engines.items() if pid in (engine.facts.pids or ())]
        try:
            self.find_engines()
            for name in names:
                self.scrape(name)
        except Exception as error:  # a defect, which the next turns of these jobs count
            self._repeats.failed(_log, "end", "the end of an engine was not followed up", repr(error), exc_info=error)

    def scrape(self, name: str) -> None:
        """Scrapes one engine; returns within its timeout."""
        with self._lock:
            engine = self._engines.get(name)
        if engine is None or engine.scraper is None:
            return
        with engine.turn:
            scrape = engine.scraper.scrape(engine.facts)
        with self._lock:
            if self._engines.get(name) is not engine:
                return  # it left the list meanwhile: what was read is nobody's
        self._publish(scrape)
        self._publish(SourceRun(scrape.t, "vllm", name, scrape.answered, scrape.seconds, scrape.error))
        self._note(f"engine {name}", "engine", "" if scrape.answered else scrape.error, engine=name)

    def ask(self, name: str) -> None:
        """Asks one engine for a token; returns within the probe's timeout."""
        with self._lock:
            engine = self._engines.get(name)
        if engine is not None and engine.probe is not None:
            engine.probe.probe()

    def read_host(self) -> None:
        """Reads the processes of engines and of the GPUs' lists, and the host's memory."""
        with self._lock:
            roots = {name: engine.facts.pids or () for name, engine in self._engines.items()}
        with self._host_turn:
            listed = self._listed_pids()
            self._host.read(roots, listed)
            self._seen_pids = listed
        self._first.discard("host")

    def read_probes(self) -> None:
        """Reads the files of the probes inside the engines' processes."""
        source = self._probes
        source.read()
        faults = [f"{one.path}: {one.why}" for one in source.outcomes if one.state in ("silent", "unreadable")]
        self._note("probes", "files of oomwatch-probe", "; ".join(faults[:3]))
        notes = {(one.path, one.note) for one in source.outcomes if one.note}
        for path, note in sorted(notes - self._probe_notes):
            _log.info("oomwatch-probe does not read all of its process", file=path, why=note)
        self._probe_notes = notes

    def read_log(self, name: str) -> None:
        """Reads what is new in the log of one engine; returns within seconds."""
        with self._lock:
            engine = self._engines.get(name)
        if engine is not None and engine.log is not None:
            self._note(f"log {name}", "log of the engine", engine.log.read(), engine=name)

    def engine_names(self) -> tuple[str, ...]:
        """Engines that have a page to scrape."""
        with self._lock:
            return tuple(name for name, engine in self._engines.items() if engine.scraper is not None)

    def logged_names(self) -> tuple[str, ...]:
        """Engines whose log is known."""
        with self._lock:
            return tuple(name for name, engine in self._engines.items() if engine.log is not None)

    # --- life ------------------------------------------------------------------------------------------------

    def ready(self) -> str:
        return f"not read yet: {', '.join(sorted(self._first))}" if self._first else ""

    def call_stats(self) -> CallStats:
        return self._nvml.call_stats() if self._nvml is not None else {}

    def probe_files(self) -> Mapping[str, int]:
        found = self._probes.outcomes
        return {state: sum(outcome.state == state for outcome in found) for state in FILE_STATES} if found else {}

    def release(self) -> str:
        if self._nvml is None:
            return "GPUs are not read (nvml.enabled is false), so there is nothing to give back"
        problem = self._nvml.release(self._config.nvml.release_for)
        if problem:
            _log.warning("driver not released", error=problem)
            return problem
        report = self._snapshot().driver
        _log.info(
            "driver released", seconds=self._config.nvml.release_for, before=report.state if report else "unknown"
        )
        return ""

    @property
    def released(self) -> bool:
        return self._nvml is not None and self._nvml.released

    def resume(self) -> None:
        if self._nvml is not None:
            self._nvml.resume()

    def configure(self, config: Config) -> None:
        """Takes over a new configuration; what did not change goes on undisturbed."""
        before, self._config = self._config, config
        if config.nvml != before.nvml or config.intervals.processes_every != before.intervals.processes_every:
            released_until = -math.inf
            if self._nvml is not None:
                released_until = self._nvml.released_until
                self._nvml.close()
            self._nvml = self._new_nvml(released_until)
        if config.probe.directory != before.probe.directory:
            self._probes = self._new_probes()
        if config.engine_logs != before.engine_logs:
            self._places = self._new_places()
        self._watch(self._found if config.discovery.enabled else ())
        for source in self._snapshot().sources:
            if not self._is_read(source, before):
                self._publish(TargetRemoved(self._clock(), source.source, source.target))

    def _is_read(self, source: SourceView, before: Config) -> bool:
        """Whether a source that told something under the configuration before is read under that of now."""
        with self._lock:
            engine = self._engines.get(source.target)
        match source.source:
            case "nvml":
                return self._nvml is not None
            case "discovery":
                return self._config.discovery.enabled
            case "allocator":
                return self._config.probe.directory == before.probe.directory
            case "log":
                return engine is not None and engine.log is not None
            case "probe":
                return engine is not None and engine.probe is not None
            case _:
                return True

    def close(self) -> None:
        self._ends.close()
        if self._nvml is not None:
            self._nvml.close()
        with self._lock:
            engines, self._engines = list(self._engines.values()), {}
        for engine in engines:
            engine.close()

    # --- engines ---------------------------------------------------------------------------------------------

    def _watch(self, found: Sequence[EngineFacts]) -> None:
        configured = {engine.name: engine for engine in self._config.engines}
        wanted = merge([engine.facts() for engine in configured.values()], found)
        with self._lock:
            for facts in wanted:
                self._watch_one(self._with_reason(facts), configured.get(facts.name))
            for name in self._engines.keys() - {facts.name for facts in wanted}:
                self._unwatch(name)
            pids = [pid for engine in self._engines.values() for pid in engine.facts.pids or ()]
        self._ends.watch(pids)

    def _end_the_unfound(self) -> None:
        """Engines that are known from before a restart of oomwatch and are neither configured nor found any more."""
        with self._lock:
            watched = frozenset(self._engines)
        for engine in self._snapshot().engines:
            if engine.name in watched or engine.state == "gone":
                continue
            if engine.facts.origin == "discovery":
                self._publish(EngineUpdate(self._clock(), engine.facts, gone=True))
            else:
                self._publish(TargetRemoved(self._clock(), "vllm", engine.name))

    def _with_reason(self, facts: EngineFacts) -> EngineFacts:
        return (
            facts if facts.target is not None else replace(facts, no_address=self._discovery.problems.get(facts.name))
        )

    def _watch_one(self, facts: EngineFacts, settings: EngineConfig | None) -> None:
        old = self._engines.get(facts.name)
        options = self._options(settings)
        asked = settings.probe if settings else None
        made_from = (facts.target, options, asked)
        if old is not None and old.settings == made_from:
            if old.facts != facts:
                old.facts = facts
                self._publish(EngineUpdate(self._clock(), facts))
            self._follow_log(old, settings)
            return
        log = None
        if old is not None:
            log, old.log = old.log, None  # it goes on: a page that is asked differently is written by the same engine
            old.close()
        scraper = EngineScraper(facts.name, facts.target, options, self._clock) if facts.target else None
        probe = self._probe(facts, asked, options) if asked is not None and facts.target else None
        engine = _Engine(facts, made_from, scraper, probe, asked.interval if asked else 0.0, log)
        self._engines[facts.name] = engine
        self._publish(EngineUpdate(self._clock(), facts))
        self._follow_log(engine, settings)
        if old is None:
            _log.info("engine watched", engine=facts.name, target=facts.target, origin=facts.origin)

    def _follow_log(self, engine: _Engine, settings: EngineConfig | None) -> None:
        """Follow the log where it is written now; where nothing shows that, go on where it was."""
        if not self._config.engine_logs.enabled:
            place = None
        elif settings is not None and settings.log is not None:
            place = _place(settings.log)
        else:
            place = self._places.of_processes(engine.facts.pids or ())
            if place is None and engine.log is not None:
                return
        old = engine.log
        text = self._config.history.log_text
        if old is not None and place is not None and old.follows_the_same(place):
            old.keep_text = text
            return
        engine.log = None
        if place is not None:
            name, publish = engine.facts.name, self._publish
            engine.log = EngineLogSource(name, place, self._places, publish, self._clock, keep_text=text)
        if old is not None:
            old.close()

    def _unwatch(self, name: str) -> None:
        engine = self._engines.pop(name)
        engine.close()
        for what in ("engine", "log"):
            self._repeats.forget(f"{what} {name}")
        if engine.facts.origin == "discovery":
            self._publish(EngineUpdate(self._clock(), engine.facts, gone=True))
            _log.info("engine ended", engine=name)
        else:
            self._publish(TargetRemoved(self._clock(), "vllm", name))
            _log.info("engine no longer configured", engine=name)

    def _probe(self, facts: EngineFacts, asked: ProbeConfig, options: ScrapeOptions) -> EngineProbe:
        """As the page is asked for, but with the API's own key, where there is one."""
        if asked.bearer_token_file is not None:
            options = replace(
                options, bearer_token_file=str(asked.bearer_token_file), username=None, password_file=None
            )
        options = replace(options, timeout=asked.timeout)
        return EngineProbe(facts.name, facts.target or "", asked.model, options, self._publish, self._clock)

    def _options(self, settings: EngineConfig | None) -> ScrapeOptions:
        tls: TlsConfig = settings.tls if settings else self._config.discovery.tls
        basic = settings.basic_auth if settings else None
        return ScrapeOptions(
            timeout=self._config.timeout(settings),
            max_page_bytes=(settings or self._config.discovery).max_page_bytes,
            bearer_token_file=_path(settings.bearer_token_file) if settings else None,
            username=basic.username if basic else None,
            password_file=_path(basic.password_file) if basic else None,
            headers=dict(settings.headers) if settings else {},
            ca_file=_path(tls.ca_file),
            cert_file=_path(tls.cert_file),
            key_file=_path(tls.key_file),
            insecure_skip_verify=tls.insecure_skip_verify,
            proxy_url=settings.proxy_url if settings else None,
        )

    # --- the rest --------------------------------------------------------------------------------------------

    def _new_nvml(self, released_until: float = -math.inf) -> NvmlSource | None:
        if not self._config.nvml.enabled:
            return None
        return NvmlSource(
            self._publish,
            deadline=self._config.nvml.deadline,
            process_every=self._config.intervals.processes_every,
            clock=self._clock,
            released_until=released_until,
        )

    def _new_probes(self) -> AllocatorSource:
        return AllocatorSource(
            [Path(folder) for folder in self._config.probe.directory],
            self._publish,
            self._engine_of,
            self._devices_of,
            clock=self._clock,
            table=self._table,
        )

    def _new_places(self) -> Places:
        return Places(self._config.engine_logs.docker_directory, self._config.engine_logs.kubernetes_directory)

    def _engine_of(self, pid: int) -> str | None:
        for engine in self._snapshot().engines:
            if pid in (engine.facts.pids or ()) or any(process.pid == pid for process in engine.processes):
                return engine.name
        return None

    def _devices_of(self, pid: int) -> tuple[str, ...]:
        return tuple(
            view.uuid
            for view in devices(self._snapshot().gpus)
            if any(process.pid == pid for process in known(view.processes) or ())
        )

    def _listed_pids(self) -> frozenset[int]:
        return frozenset(
            process.pid
            for view in devices(self._snapshot().gpus)
            if not isinstance(view.processes, Absent)
            for process in view.processes
        )

    def _note(self, key: str, what: str, error: str, **fields: object) -> None:
        if error:
            self._repeats.failed(_log, key, f"{what} cannot be read", error, **fields)
        else:
            self._repeats.recovered(_log, key, f"{what} can be read again", **fields)


def _place(log: EngineLogConfig) -> Place:
    """Where a log is, as configured."""
    if log.file is not None:
        return File(str(log.file))
    return Journal(log.journal) if log.journal is not None else ContainerFile(log.container or "")


def _path(file: object) -> str | None:
    return None if file is None else str(file)
