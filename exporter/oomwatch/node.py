"""The fold: observations in, in order; the node's present as an immutable snapshot out.

One thread owns a :class:`Node`. It reads no clock but the observations', so a recording replays to the same snapshots.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from operator import attrgetter
from typing import Any, TypeVar

from oomwatch import units
from oomwatch.attribution import Attribution, Neighbour, engine_overhead, held_memory, unowned_memory
from oomwatch.enginelog.lines import entry_of, told_facts
from oomwatch.enginelog.story import News, StartUp, Story
from oomwatch.observations import (
    IMPLAUSIBLE,
    MIG_ENABLED,
    NOT_READ,
    STALE,
    Absent,
    AllocatorReport,
    BlockOwners,
    DriverReport,
    EngineFacts,
    EngineScrape,
    EngineUpdate,
    Gap,
    GpuPoll,
    GpuProcess,
    HostMemory,
    HostProcess,
    LogLine,
    Maybe,
    Memory,
    MigInstance,
    Observation,
    ProcessGone,
    RankReading,
    SourceRun,
    TargetRemoved,
    Tick,
    XidEvent,
    known,
)
from oomwatch.plausibility import plausible
from oomwatch.snapshot import (
    EngineView,
    GpuView,
    HeldMemory,
    HeldProcess,
    Holder,
    MigView,
    Snapshot,
    SourceView,
    StartUpView,
    XidCount,
    devices,
)

_Told = TypeVar("_Told", AllocatorReport, BlockOwners)


@dataclass(frozen=True)
class Cadence:
    """Polling intervals in seconds, and how many of them may pass before a value no longer counts as the present."""

    gpu: float = 15.0
    process: float = 60.0
    scrape: float = 15.0
    host: float = 30.0
    discovery: float = 15.0
    probe: float = 360.0
    allocator: float = 15.0
    log: float = 15.0
    intervals_to_stale: float = 3.0
    forget_after: float = 24 * 3600.0

    def limit(self, source: str) -> float:
        """Seconds after which the last word of ``source`` is stale."""
        interval: float = getattr(self, _INTERVAL_OF[source])
        return interval * self.intervals_to_stale


_INTERVAL_OF = {
    "nvml": "gpu",
    "process": "process",
    "vllm": "scrape",
    "host": "host",
    "discovery": "discovery",
    "probe": "probe",
    "allocator": "allocator",
    "log": "log",
}


@dataclass(frozen=True)
class _Held:
    """A device's process list as attribution reads it, kept while neither of the two is another."""

    listed: tuple[GpuProcess, ...]
    attribution: Attribution
    processes: tuple[HeldProcess, ...]
    memory: Maybe[tuple[HeldMemory, ...]]


@dataclass
class _Gpu:
    poll: GpuPoll
    processes: Maybe[tuple[GpuProcess, ...]] = NOT_READ
    processes_t: float = 0.0
    mig_processes: dict[str, tuple[float, Maybe[tuple[GpuProcess, ...]]]] = field(default_factory=dict)
    carried: dict[str, tuple[float, Any]] = field(default_factory=dict)  # what polls read at a slower pace
    last_seen: float | None = None
    last_memory: Memory | None = None
    xids: dict[int, XidCount] = field(default_factory=dict)
    held: dict[str, _Held] = field(default_factory=dict)  # by uuid of the device and its slices


@dataclass
class _Engine:
    facts: EngineFacts
    scrape: EngineScrape | None = None
    last_answer: EngineScrape | None = None
    healthy: Maybe[bool] = NOT_READ
    progress: dict[str, tuple[float, ...]] = field(default_factory=dict)  # by rank: counters that only work moves
    progressed: dict[str, float] = field(default_factory=dict)  # by rank: when these last moved, or work was lacking
    restarts: int = 0
    gone_at: float | None = None
    story: Story = field(default_factory=Story)  # its log's


# Read in each few polls of a device; a value stands until the next or until process lists would be stale.
_SLOW = (
    "mig_enabled",
    "utilization",
    "temperature",
    "power",
    "ecc_uncorrected",
    "ecc_corrected",
    "remapped_rows",
    "recovery_action",
    "pci_bus_id",
)
# Memory may be withheld from a device that is well; any other reason means that nothing of it is the present.
_WITHHELD = ("NO_PERMISSION", "NOT_SUPPORTED")


def _merge(old: EngineFacts, new: EngineFacts) -> EngineFacts:
    """What is given replaces what was known; what is not given stays."""
    given = {f.name: getattr(new, f.name) for f in fields(new) if getattr(new, f.name) is not None}
    if old.origin == "configuration":
        given["origin"] = "configuration"
    return replace(old, **given)


def _progress_counters(rank: RankReading) -> tuple[float, ...]:
    """The counters that move if and only if the engine works, in a fixed order."""
    finished = known(rank.finished)
    readings = (
        known(rank.prompt_tokens),
        known(rank.generation_tokens),
        known(rank.steps),
        sum(finished.values()) if finished else None,
    )
    return tuple(-1.0 if value is None else value for value in readings)


def _fell(before: Sequence[float], now: Sequence[float]) -> bool:
    """Whether a counter fell; one that cannot be read now, or could not be before, tells nothing."""
    return any(0 <= new < old for new, old in zip(now, before, strict=True))


def _has_work(rank: RankReading) -> bool:
    return (known(rank.running) or 0.0) + (known(rank.waiting) or 0.0) > 0


class Node:
    """What is known of the node, folded from observations. Not thread-safe: its owner alone calls it."""

    def __init__(self, cadence: Cadence | None = None, neighbours: Iterable[Neighbour] = ()) -> None:
        self._cadence = cadence or Cadence()
        self._neighbours = tuple(neighbours)
        self._t = 0.0
        self._driver: DriverReport | None = None
        self._gpus: dict[str, _Gpu] = {}
        self._engines: dict[str, _Engine] = {}
        self._processes: dict[int, HostProcess] = {}
        self._allocators: dict[tuple[int, str], AllocatorReport] = {}  # by pid and device
        self._owners: dict[tuple[int, str], BlockOwners] = {}  # by pid and rank
        self._host: HostMemory | None = None
        self._sources: dict[tuple[str, str], SourceView] = {}
        self._containers: Mapping[str, str] = {}  # engine by container
        self._attribution_made: Attribution | None = None  # None: what it was made from has changed

    # --- what a judge asks -----------------------------------------------------------------------------------

    @property
    def t(self) -> float:
        """The time of the latest observation."""
        return self._t

    @property
    def cadence(self) -> Cadence:
        return self._cadence

    @property
    def host(self) -> HostMemory | None:
        """The host's memory, None once the reading is stale or has failed."""
        if self._host is None or self._host_has_failed() or not self._fresh(self._host.t, "host"):
            return None
        return self._host

    def holder(self, pid: int) -> Holder:
        """Who holds what ``pid`` holds."""
        return self._attribution().holder(pid)

    def facts(self) -> Iterator[EngineFacts]:
        """Of every engine that has not ended."""
        return (engine.facts for engine in self._engines.values() if engine.gone_at is None)

    def engine_names(self) -> Iterable[str]:
        """Of every engine that is known, ended ones that are not yet forgotten among them."""
        return self._engines.keys()

    def gpu(self, uuid: str) -> GpuView:
        """The present of one device that has been polled."""
        return self._gpu_view(self._gpus[uuid], self._attribution())

    def memory_of(self, uuid: str) -> Memory | None:
        """Of a device or a slice, by its latest poll; None where that could not read it, or is stale."""
        for gpu in self._gpus.values():
            read: tuple[GpuPoll | MigInstance, ...] = (gpu.poll, *gpu.poll.mig)
            for one in read:
                if one.uuid == uuid:
                    return known(one.memory) if self._fresh(gpu.poll.t, "nvml") else None
        return None

    def engine(self, name: str) -> EngineView:
        """The present of one engine, without its device memory; one that is not known has the state unknown."""
        return self._engine_view(self._engines.get(name) or _Engine(EngineFacts(name=name)), ())

    def facts_of(self, name: str) -> EngineFacts:
        """What is known of one engine's make-up; its name alone, where it is not known."""
        engine = self._engines.get(name)
        return EngineFacts(name=name) if engine is None else engine.facts

    def asleep(self, name: str) -> bool:
        """Whether one engine sleeps without its memory, by its latest page: one that is merely paused keeps it."""
        engine = self._engines.get(name)
        if engine is None or engine.scrape is None or self._engine_state(engine)[0] != "sleeping":
            return False
        return any(known(rank.sleep_level) not in (None, "awake", "paused") for rank in engine.scrape.ranks)

    def read_log(self, line: LogLine) -> News | None:
        """Fold a line of an engine's log in; what is new about how the engine fares."""
        self._t = max(self._t, line.t)
        entry = entry_of(line)
        if entry is None:
            return None
        engine = self._heard_of(line.engine)
        facts = told_facts(engine.facts, entry)
        if facts != engine.facts:
            self._attribution_made = None
            engine.facts = facts
        return engine.story.apply(line.t - entry.age, entry)

    def story(self, name: str) -> Story:
        """What the log of an engine has told; nothing where none was read."""
        engine = self._engines.get(name)
        return Story() if engine is None else engine.story

    def list_is_new(self, uuid: str) -> bool:
        """Whether the latest poll of a device (or of a slice's parent) read its process list."""
        for gpu in self._gpus.values():
            if gpu.poll.uuid == uuid:
                return gpu.poll.processes != NOT_READ
            for mig in gpu.poll.mig:
                if mig.uuid == uuid:
                    return mig.processes != NOT_READ
        return False

    # --- life ------------------------------------------------------------------------------------------------

    def take_over(self, other: Node) -> None:
        """Go on from what another node knows, under this one's settings. The other is not to be used any more."""
        cadence, neighbours = self._cadence, self._neighbours
        vars(self).update(vars(other))
        self.configure(cadence, neighbours)

    def configure(self, cadence: Cadence, neighbours: Iterable[Neighbour]) -> None:
        """Take over new settings; what is known stays known."""
        self._cadence = cadence
        self._neighbours = tuple(neighbours)
        self._attribution_made = None

    def apply(self, observation: Observation) -> None:
        """Fold one observation in. Time never runs backwards: a late one counts as of now."""
        self._t = max(self._t, observation.t)
        match observation:
            case GpuPoll():
                self._apply_gpu_poll(observation)
            case EngineScrape():
                self._apply_scrape(observation)
            case SourceRun():
                self._apply_run(observation)
            case HostProcess():
                if not _same_place(self._processes.get(observation.pid), observation):
                    self._attribution_made = None
                self._processes[observation.pid] = observation
            case ProcessGone():
                self._attribution()  # whose container it was is remembered beyond its end
                self._processes.pop(observation.pid, None)
                self._silence(observation.pid)
                self._attribution_made = None
            case AllocatorReport():
                self._allocators[observation.pid, observation.gpu] = observation
            case BlockOwners():
                self._owners[observation.pid, observation.rank] = observation
            case HostMemory():
                self._host = observation
            case EngineUpdate():
                self._apply_facts(observation)
            case LogLine():
                self.read_log(observation)
            case XidEvent():
                self._apply_xid(observation)
            case DriverReport():
                self._driver = observation
            case TargetRemoved():
                self._remove(observation.source, observation.target)
            case Gap():
                self._resume()
            case Tick():
                self._forget()

    def snapshot(self) -> Snapshot:
        """The present, as of the latest observation."""
        attribution = self._attribution()
        gpus = tuple(
            sorted(
                (self._gpu_view(gpu, attribution) for gpu in self._gpus.values()), key=lambda gpu: (gpu.index, gpu.uuid)
            )
        )
        return Snapshot(
            t=self._t,
            driver=self._driver,
            gpus=gpus,
            engines=tuple(self._engine_view(self._engines[name], gpus) for name in sorted(self._engines)),
            host=self.host,
            sources=tuple(self._source_view(self._sources[key]) for key in sorted(self._sources)),
            unresolved_gpu_pids=self._unresolved(gpus),
        )

    # --- folding ---------------------------------------------------------------------------------------------

    def _apply_gpu_poll(self, poll: GpuPoll) -> None:
        gpu = self._gpus.get(poll.uuid)
        if gpu is None:
            gpu = self._gpus[poll.uuid] = _Gpu(poll)
        gpu.poll = poll
        if isinstance(poll.memory, Absent) and poll.memory.reason not in _WITHHELD:
            gpu.carried.clear()
        gpu.carried.update({name: (self._t, value) for name in _SLOW if (value := getattr(poll, name)) != NOT_READ})
        if poll.processes != NOT_READ:
            gpu.processes, gpu.processes_t = _judged(poll.processes, poll.memory), self._t
        gpu.mig_processes = {
            mig.uuid: (self._t, _judged(mig.processes, mig.memory))
            if mig.processes != NOT_READ
            else gpu.mig_processes.get(mig.uuid, (0.0, NOT_READ))
            for mig in poll.mig
        }
        gpu.held = {uuid: held for uuid, held in gpu.held.items() if uuid == poll.uuid or uuid in gpu.mig_processes}
        if isinstance(poll.memory, Memory):
            gpu.last_seen, gpu.last_memory = self._t, poll.memory
        elif any(isinstance(mig.memory, Memory) for mig in poll.mig):
            gpu.last_seen = self._t

    def _apply_xid(self, event: XidEvent) -> None:
        gpu = self._gpus.get(event.uuid)
        if gpu is None:
            gpu = self._gpus[event.uuid] = _Gpu(GpuPoll(event.t, event.uuid, -1, "", NOT_READ))
        count = gpu.xids[event.code].count + 1 if event.code in gpu.xids else 1
        gpu.xids[event.code] = XidCount(event.code, count, self._t)

    def _apply_facts(self, update: EngineUpdate) -> None:
        self._attribution_made = None
        engine = self._engines.get(update.facts.name)
        if engine is None:
            engine = self._engines[update.facts.name] = _Engine(update.facts)
        else:
            engine.facts = _merge(engine.facts, update.facts)
        if update.gone:
            engine.gone_at, engine.scrape = self._t, None
            self._forget_sources(update.facts.name)
            return
        engine.gone_at = None
        if update.facts.target is not None:  # its failures are counted from 0, also when the first read fails
            self._sources.setdefault(("vllm", update.facts.name), SourceView("vllm", update.facts.name, up=None))

    def _heard_of(self, name: str) -> _Engine:
        """An engine that something was read of; nothing but its name is known of one that is new."""
        engine = self._engines.get(name)
        if engine is None:
            self._attribution_made = None
            engine = self._engines[name] = _Engine(EngineFacts(name=name))
        return engine

    def _apply_scrape(self, scrape: EngineScrape) -> None:
        engine = self._heard_of(scrape.engine)
        engine.scrape = scrape
        if scrape.healthy != NOT_READ or not scrape.answered:
            engine.healthy = scrape.healthy
        if not scrape.answered:
            return
        if not isinstance(scrape.version, Absent) and scrape.version != engine.facts.vllm_version:
            engine.facts = replace(engine.facts, vllm_version=scrape.version)
        self._follow_progress(engine, scrape)
        engine.story.answered(self._t, engine.restarts)
        engine.last_answer = scrape

    def _follow_progress(self, engine: _Engine, scrape: EngineScrape) -> None:
        counters = {rank.rank: _progress_counters(rank) for rank in scrape.ranks}
        before = engine.last_answer
        restarted = before is not None and (
            any(_fell(engine.progress[rank], now) for rank, now in counters.items() if rank in engine.progress)
            or (
                isinstance(scrape.process_start, float)
                and isinstance(before.process_start, float)
                and scrape.process_start > before.process_start
            )
        )
        if restarted:
            engine.restarts += 1
        engine.progressed = {
            rank.rank: engine.progressed.get(rank.rank, self._t)
            # Waiting for work is no lack of progress: the clock runs only while there is work.
            if not restarted and _has_work(rank) and counters[rank.rank] == engine.progress.get(rank.rank)
            else self._t
            for rank in scrape.ranks
            if any(value >= 0 for value in counters[rank.rank])  # else nothing that would show progress is exposed
        }
        engine.progress = counters

    def _apply_run(self, run: SourceRun) -> None:
        key = (run.source, run.target)
        old = self._sources.get(key, SourceView(run.source, run.target, up=None))
        self._sources[key] = replace(
            old,
            up=run.ok,
            last_run=self._t,
            last_success=self._t if run.ok else old.last_success,
            seconds=run.seconds,
            failures=old.failures + (not run.ok),
            error="" if run.ok else run.error,
        )

    def _remove(self, source: str, target: str) -> None:
        self._attribution_made = None
        self._sources.pop((source, target), None)
        if source == "nvml":
            self._gpus.pop(target, None)
        if source == "vllm":
            self._engines.pop(target, None)
            self._forget_sources(target)

    def _forget_sources(self, engine: str) -> None:
        """What reads an engine from outside has ended with it."""
        for source in ("vllm", "probe", "log"):
            self._sources.pop((source, engine), None)

    def _silence(self, pid: int) -> None:
        """What a process told of itself ends with it."""
        self._allocators = {key: report for key, report in self._allocators.items() if key[0] != pid}
        self._owners = {key: owners for key, owners in self._owners.items() if key[0] != pid}

    def _resume(self) -> None:
        """Nobody was watching: what went unseen is no silence of a source and no standstill of an engine."""
        self._sources = {key: replace(view, up=None, last_run=None) for key, view in self._sources.items()}
        for engine in self._engines.values():
            engine.progressed.clear()

    def _forget(self) -> None:
        limit = self._cadence.limit("host")
        silent = [pid for pid, process in self._processes.items() if self._t - process.t > limit]
        for pid in silent:
            del self._processes[pid]
            self._attribution_made = None
        self._allocators = {key: one for key, one in self._allocators.items() if self._fresh(one.t, "allocator")}
        self._owners = {key: one for key, one in self._owners.items() if self._fresh(one.t, "allocator")}
        ended = [
            name
            for name, engine in self._engines.items()
            if engine.gone_at is not None and self._t - engine.gone_at > self._cadence.forget_after
        ]
        for name in ended:
            self._remove("vllm", name)

    # --- viewing ---------------------------------------------------------------------------------------------

    def _fresh(self, t: float, source: str) -> bool:
        return self._t - t <= self._cadence.limit(source)

    def _attribution(self) -> Attribution:
        if self._attribution_made is None:
            self._attribution_made = Attribution(
                self.facts(), self._live_processes(), self._neighbours, self._containers
            )
            self._containers = self._attribution_made.containers
        return self._attribution_made

    def _live_processes(self) -> dict[int, HostProcess]:
        limit = self._cadence.limit("host")
        return {pid: process for pid, process in self._processes.items() if self._t - process.t <= limit}

    def _unresolved(self, gpus: Iterable[GpuView]) -> Maybe[int]:
        if not any(self._fresh(process.t, "host") for process in self._processes.values()):
            return NOT_READ
        listed = {
            process.pid
            for view in devices(gpus)
            if not isinstance(view.processes, Absent)
            for process in view.processes
        }
        return len(listed - self._processes.keys())

    def _whole_poll(self, gpu: _Gpu) -> GpuPoll:
        """The latest poll, with what it left out from the polls before."""
        values = {
            name: value
            for name, (t, value) in gpu.carried.items()
            if value is not getattr(gpu.poll, name) and self._fresh(t, "process")
        }
        return replace(gpu.poll, **values) if values else gpu.poll

    def _gpu_view(self, gpu: _Gpu, attribution: Attribution) -> GpuView:
        poll = self._whole_poll(gpu)
        fresh = self._fresh(poll.t, "nvml")
        # A parent's list repeats what its slices' lists say, where it may be read at all.
        sliced = known(poll.mig_enabled) is True or bool(poll.mig)
        listed: Maybe[tuple[GpuProcess, ...]] = MIG_ENABLED if sliced else gpu.processes
        processes, held = self._listed(gpu, poll.uuid, fresh, gpu.processes_t, listed, attribution)
        memory = poll.memory if fresh else STALE
        return GpuView(
            uuid=poll.uuid,
            index=poll.index,
            name=poll.name,
            poll=poll if fresh else None,
            memory=memory,
            processes=processes,
            held=held,
            unowned=unowned_memory(memory, processes, sliced=sliced, unified=poll.unified),
            mig=tuple(self._mig_view(gpu, mig, attribution) for mig in poll.mig) if fresh else (),
            xids=tuple(gpu.xids[code] for code in sorted(gpu.xids)),
            last_seen=gpu.last_seen,
            last_memory=gpu.last_memory,
        )

    def _mig_view(self, gpu: _Gpu, mig: MigInstance, attribution: Attribution) -> MigView:
        processes, held = self._listed(gpu, mig.uuid, True, *gpu.mig_processes[mig.uuid], attribution)
        return MigView(
            uuid=mig.uuid,
            gi=mig.gi,
            ci=mig.ci,
            memory=mig.memory,
            processes=processes,
            held=held,
            unowned=unowned_memory(mig.memory, processes, sliced=False, unified=False),
        )

    def _listed(
        self,
        gpu: _Gpu,
        uuid: str,
        fresh: bool,
        t: float,
        listed: Maybe[tuple[GpuProcess, ...]],
        attribution: Attribution,
    ) -> tuple[Maybe[tuple[HeldProcess, ...]], Maybe[tuple[HeldMemory, ...]]]:
        """The processes of a device or slice with their holders, and what each holder has of its memory."""
        if isinstance(listed, Absent):
            return listed, listed
        if not fresh or not self._fresh(t, "process"):
            return STALE, STALE
        made = gpu.held.get(uuid)
        if made is None or made.listed is not listed or made.attribution is not attribution:
            processes = tuple(attribution.held(process) for process in listed)
            made = gpu.held[uuid] = _Held(listed, attribution, processes, held_memory(processes))
        return made.processes, made.memory

    def _engine_view(self, engine: _Engine, gpus: tuple[GpuView, ...]) -> EngineView:
        state, error = self._engine_state(engine)
        scrape = engine.scrape
        answered = scrape is not None and scrape.answered and self._fresh(scrape.t, "vllm")
        gone = engine.gone_at is not None
        memory: Maybe[Mapping[str, int]] = NOT_READ
        missing: Absent | None = None
        if not gone:
            memory, missing = _engine_memory(engine.facts, gpus)
        return EngineView(
            facts=engine.facts,
            state=state,
            error=error,
            scrape=scrape if answered else None,
            last_answer=engine.last_answer,
            last_seen=engine.last_answer.t if engine.last_answer else None,
            last_progress=min(engine.progressed.values(), default=None),
            restarts=engine.restarts,
            processes=() if gone else self._processes_of(engine.facts.name),
            gpu_memory=memory,
            gpu_memory_missing=missing,
            overhead=engine_overhead(engine.facts, memory, gpus),
            allocators=() if gone else self._told_by(engine.facts.name, self._allocators),
            owners=() if gone else self._told_by(engine.facts.name, self._owners),
            startup=None if gone or self._log_is_silent(engine.facts.name) else _startup_view(engine.story.now),
            ran_out=tuple((killer, when, count) for (killer, when), count in sorted(engine.story.ran_out.items())),
        )

    def _log_is_silent(self, engine: str) -> bool:
        """Whether the log's source has failed or fallen silent; a recording may have none."""
        source = self._sources.get(("log", engine))
        return source is not None and self._source_view(source).up is not True

    def _told_by(self, engine: str, told: Mapping[tuple[int, str], _Told]) -> tuple[_Told, ...]:
        """What the probes inside an engine's processes say, as far as it is of now."""
        holder = Holder("engine", engine)
        return tuple(
            told[key] for key in sorted(told) if self.holder(key[0]) == holder and self._fresh(told[key].t, "allocator")
        )

    def _host_has_failed(self) -> bool:
        source = self._sources.get(("host", ""))
        return source is not None and source.up is False

    def _processes_of(self, engine: str) -> tuple[HostProcess, ...]:
        if self._host_has_failed():
            return ()
        mine = (process for process in self._processes.values() if process.engine == engine)
        return tuple(sorted((process for process in mine if self._fresh(process.t, "host")), key=lambda p: p.pid))

    def _engine_state(self, engine: _Engine) -> tuple[str, str]:
        scrape = engine.scrape
        if engine.gone_at is not None:
            return "gone", "its processes have ended"
        if scrape is None:
            if engine.facts.target is None:
                return "no_address", engine.facts.no_address or "where its /metrics is reached is not known"
            return "unknown", "not scraped yet"
        if not self._fresh(scrape.t, "vllm"):
            return "unknown", f"no scrape for {self._t - scrape.t:.0f} s"
        if not scrape.answered:
            return scrape.state, scrape.error
        if known(engine.healthy) is False:
            return "dead", "the API server answers, but its /health says that the engine core has died"
        if any(known(rank.sleep_level) not in (None, "awake") for rank in scrape.ranks):
            return "sleeping", ""
        frozen = self._frozen(engine, scrape)
        return ("frozen", frozen) if frozen else (scrape.state, scrape.error)

    def _frozen(self, engine: _Engine, scrape: EngineScrape) -> str:
        """What stands still although it has requests: one rank may, while the others work on. Empty if none does."""
        still = {
            rank.rank: self._t - engine.progressed.get(rank.rank, self._t) for rank in scrape.ranks if _has_work(rank)
        }
        frozen = {rank: seconds for rank, seconds in still.items() if seconds >= self._cadence.limit("vllm")}
        if not frozen:
            return ""
        whose = f" of rank {' or '.join(frozen)}" if len(scrape.ranks) > 1 else ""
        return f"no counter{whose} has moved for {units.duration(round(min(frozen.values())))}"

    def _source_view(self, source: SourceView) -> SourceView:
        if source.last_run is not None and not self._fresh(source.last_run, source.source):
            return replace(source, up=None, error=f"silent for {self._t - source.last_run:.0f} s")
        return source


def _startup_view(start: StartUp | None) -> StartUpView | None:
    """What the log told of a start; None where it told nothing."""
    if start is None or not (start.seen_from_start or start.budgets or start.pools or start.refusals):
        return None
    return StartUpView(
        since=start.since,
        phase=start.phase,
        ready=start.ready,
        version=start.version,
        utilization=start.utilization,
        max_model_len=start.max_model_len,
        budgets=tuple((rank, worker, budget) for (rank, worker), budget in sorted(start.budgets.items())),
        pools=tuple(sorted(start.pools.items())),
    )


def _same_place(before: HostProcess | None, now: HostProcess) -> bool:
    """Whether attribution comes out the same: memory may change, kinship and names not."""
    return before is not None and _PLACE(before) == _PLACE(now)


_PLACE = attrgetter(*(f.name for f in fields(HostProcess) if f.name not in ("t", "rss", "anon")))


def _judged(processes: Maybe[tuple[GpuProcess, ...]], memory: Maybe[Memory]) -> Maybe[tuple[GpuProcess, ...]]:
    if not isinstance(processes, Absent) and not plausible(processes, memory):
        return IMPLAUSIBLE
    return processes


def _engine_memory(facts: EngineFacts, gpus: Iterable[GpuView]) -> tuple[Maybe[Mapping[str, int]], Absent | None]:
    """Bytes by device (or slice) that the engine's processes hold, and why a list that may name them is missing.

    Absent where they are in no list, and one could not be read.
    """
    by_device: dict[str, int] = {}
    missing: Absent | None = None
    mine = Holder("engine", facts.name)
    for view in devices(gpus):
        if isinstance(view.held, Absent):
            if _may_be_used(view, facts):
                missing = missing or view.held
            continue
        for held in view.held:
            if held.holder == mine:
                by_device[view.uuid] = held.used
    return missing if missing is not None and not by_device else by_device, missing


def _may_be_used(view: GpuView | MigView, facts: EngineFacts) -> bool:
    """Whether memory of the engine may be in a device's own list; that of a sliced one is in its slices'."""
    if isinstance(view, GpuView) and view.mig:
        return False
    return facts.gpus is None or view.uuid in facts.gpus
