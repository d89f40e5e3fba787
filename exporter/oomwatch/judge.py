"""From observations to verdicts: folds them, tells the detectors what concerns them, and asks them once an interval.

The same observations give the same verdicts, live, in a replay and in the demo, which all run this one class.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Protocol

from oomwatch.advice import advice
from oomwatch.detectors.base import (
    AllocatorSample,
    Detector,
    DeviceSample,
    EngineSample,
    Finding,
    HeldSample,
    HostSample,
    LogSample,
    OwnersSample,
    ProbeSample,
    ProcessEnd,
    RankSample,
    Resumed,
    Sample,
    State,
    Subject,
    unknown,
)
from oomwatch.detectors.health import RELEASED
from oomwatch.detectors.registry import KINDS, About, Kind
from oomwatch.incidents import Incidents
from oomwatch.node import Node
from oomwatch.observations import (
    NOT_READ,
    Absent,
    Adapters,
    AllocatorReport,
    BlockOwners,
    DriverReport,
    EngineFacts,
    EngineScrape,
    EngineUpdate,
    Gap,
    GpuPoll,
    HostProcess,
    LogLine,
    Maybe,
    Observation,
    ProbeResult,
    ProcessGone,
    SourceRun,
    TargetRemoved,
    Tick,
    known,
)
from oomwatch.settings import Section
from oomwatch.snapshot import GpuView, HeldProcess, Holder, MigView, Snapshot, devices
from oomwatch.verdicts import CATALOGUE, Verdict


class Policy(Protocol):
    """What the configuration says of detection."""

    def settings(self, kind: Kind, subject: Subject) -> Section | None:
        """The thresholds that hold for a subject; None where the verdict is switched off."""

    def is_off(self, verdict: str, subject: Subject) -> bool:
        """Whether a verdict about a subject is switched off."""

    def silence(self, verdict: str, subject: Subject, t: float) -> str:
        """Why this verdict is held back at ``t``; empty when it is not."""


class Defaults:
    """A policy without any configuration."""

    def settings(self, kind: Kind, _subject: Subject) -> Section | None:
        return kind.settings()

    def is_off(self, _verdict: str, _subject: Subject) -> bool:
        return False

    def silence(self, _verdict: str, _subject: Subject, _t: float) -> str:
        return ""


class SwitchedOff:
    """Stands in for the detector of a verdict that the configuration switches off."""

    def observe(self, sample: Sample) -> None:
        """Learn nothing."""

    def conclude(self, _t: float) -> Finding:
        return unknown("switched off")


@dataclass
class Life:
    """How far an engine has come: each restart, sleep, wake-up or reload begins a new segment."""

    segment: int = 0
    segment_start: float = 0.0
    adapters: int | None = None  # distinct ones that have been seen in this life, None before the first word of them
    loads: int = 0  # of adapters that took memory
    ready_since: float = 0.0
    restarts: int = 0
    last: dict[str, float] = field(default_factory=dict)  # by rank: time of its last reading
    signature: dict[tuple[str, str], object] = field(default_factory=dict)
    away: bool = False  # its processes ended since the last page

    @property
    def memory_segment(self) -> int:
        """Of what its processes hold: the load of a LoRA adapter, which leaves the KV pool as it is, begins one too."""
        return self.segment + self.loads


@dataclass
class Seat:
    """A detector at work, and what it concluded last."""

    verdict: str
    subject: Subject
    detector: Detector
    settings: Section | None
    finding: Finding = field(default_factory=lambda: unknown("no data yet"))
    since: float = 0.0


Key = tuple[About, str, str, int]
"""What a group of detectors is about: the kind of subject, then engine, rank or device, and pid, as they apply."""


@dataclass
class Memory:
    """Everything that outlives a restart of the daemon: plain data and detectors."""

    lives: dict[str, Life] = field(default_factory=dict)
    seats: dict[Key, list[Seat]] = field(default_factory=dict)
    incidents: Incidents = field(default_factory=Incidents)
    slices: dict[str, frozenset[str]] = field(default_factory=dict)  # MIG uuids by parent, of its latest poll


@dataclass
class Saved:
    """Everything that a judge knows at one time, for another one to go on from."""

    node: Node
    memory: Memory
    devices_of: dict[str, set[str]]
    listed: dict[str, dict[int, Holder]]


class Judge:
    """Owns the fold and the detectors. Not thread-safe: the pipeline's thread alone calls it."""

    def __init__(self, node: Node, policy: Policy | None = None, kinds: tuple[Kind, ...] = KINDS) -> None:
        self.node = node
        self._policy = policy or Defaults()
        self._kinds = kinds
        self.memory = Memory()
        self._verdicts: tuple[Verdict, ...] = ()
        self._devices_of: dict[str, set[str]] = {}
        self._listed: dict[str, dict[int, Holder]] = {}  # by device: pids of its latest list

    def configure(self, policy: Policy) -> None:
        """Take over new settings. Detectors whose thresholds changed begin anew."""
        self._policy = policy
        kinds = {kind.verdict: kind for kind in self._kinds}
        for seats in self.memory.seats.values():
            for seat in seats:
                settings = policy.settings(kinds[seat.verdict], seat.subject)
                if settings != seat.settings:
                    seat.settings = settings
                    seat.detector = _detector(kinds[seat.verdict], seat.subject, settings)

    def saved(self) -> Saved:
        """What is known now; it changes with the next observation, so it is to be written down at once."""
        return Saved(self.node, self.memory, self._devices_of, self._listed)

    def restore(self, saved: Saved) -> None:
        """Go on from there, under the settings of now. What is saved is not to be used any more."""
        self.node.take_over(saved.node)
        self.memory, self._devices_of, self._listed = saved.memory, saved.devices_of, saved.listed
        self.configure(self._policy)
        self._conclude()

    def verdicts(self) -> tuple[Verdict, ...]:
        """What was concluded at the last tick."""
        return self._verdicts

    def snapshot(self) -> Snapshot:
        """The present of the node, with what was concluded of it."""
        return replace(self.node.snapshot(), verdicts=self._verdicts)

    def apply(self, observation: Observation) -> None:
        """Fold one observation in and tell the detectors. At a tick, conclude."""
        if isinstance(observation, LogLine):
            self._read_log(observation)
            return
        holder = self.node.holder(observation.pid) if isinstance(observation, ProcessGone) else None
        self.node.apply(observation)
        match observation:
            case EngineScrape():
                self._scraped(observation)
            case GpuPoll():
                self._polled(observation.uuid)
            case HostProcess():
                self._host_process(observation)
            case ProbeResult():
                self._probed(observation)
            case AllocatorReport():
                self._allocator(observation)
            case BlockOwners():
                self._counted(observation)
            case SourceRun() if observation.source == "log":
                self._tell_engine(LogSample(self.node.t, observation.target, observation.ok))
            case ProcessGone() if holder is not None:
                self._ended(observation.pid, holder)
            case EngineUpdate() if observation.gone:
                self._gone(observation.facts.name)
            case DriverReport() if observation.state == "released":
                self._released()
            case TargetRemoved():
                self._removed(observation)
            case Gap():
                self._resume(observation)
            case Tick():
                self._conclude()

    # --- engines ---------------------------------------------------------------------------------------------

    def _life(self, engine: str) -> Life:
        return self.memory.lives.setdefault(engine, Life())

    def _scraped(self, scrape: EngineScrape) -> None:
        name, t = scrape.engine, self.node.t
        life = self._life(name)
        view = self.node.engine(name)
        facts = view.facts
        if scrape.answered:
            self._follow(life, scrape, view.restarts, t)
        sample = EngineSample(
            t=t,
            engine=name,
            state=view.state,
            error=view.error,
            facts=facts,
            ranks=scrape.ranks if scrape.answered else (),
            segment=life.segment,
            segment_start=life.segment_start,
            pids=tuple(process.pid for process in view.processes) or facts.pids or (),
        )
        if scrape.answered:
            version = _version(facts.vllm_version)
            connector = known(scrape.kv_connector)
            for reading in scrape.ranks:
                self._tell_rank(
                    RankSample(
                        t=t,
                        engine=name,
                        reading=reading,
                        facts=facts,
                        segment=life.segment,
                        segment_start=life.segment_start,
                        since=life.last.get(reading.rank),
                        ready_since=life.ready_since,
                        version=version,
                        kv_connector=bool(facts.kv_connector if connector is None else connector),
                    )
                )
                life.last[reading.rank] = t
        self._tell_engine(sample)

    def _probed(self, result: ProbeResult) -> None:
        sample = ProbeSample(self.node.t, result.engine, result.ok, result.seconds, result.error)
        self._tell(self._seats("engine", result.engine), sample)

    def _gone(self, engine: str) -> None:
        life = self._life(engine)
        life.away = True
        facts = self.node.facts_of(engine)
        self._tell_engine(
            EngineSample(self.node.t, engine, "gone", "", facts, (), life.segment, life.segment_start, pids=())
        )

    def _follow(self, life: Life, scrape: EngineScrape, restarts: int, t: float) -> None:
        signature = _signature(scrape)
        restarted = restarts != life.restarts or life.away
        changed = any(life.signature.get(key, value) != value for key, value in signature.items())
        if life.segment == 0 or restarted or changed:
            life.segment += 1
            life.segment_start = t
            life.last.clear()
        self._follow_adapters(life, None if restarted else life.adapters, scrape.adapters)
        if restarted or not life.ready_since:
            life.ready_since = t
        # What a page leaves out (gauges without traffic yet) is no change: the last known value stays.
        life.signature = signature if restarted else {**life.signature, **signature}
        life.restarts, life.away = restarts, False

    @staticmethod
    def _follow_adapters(life: Life, before: int | None, adapters: Maybe[Adapters]) -> None:
        """Those of the first page were there before us; once all slots are taken, a new one takes another's place."""
        life.adapters = before
        if isinstance(adapters, Absent):
            return
        if before is not None and before < min(adapters.seen, adapters.slots):
            life.loads += 1
        life.adapters = max(adapters.seen, before or 0)

    def _tell_rank(self, sample: RankSample) -> None:
        self._tell(self._seats("rank", sample.engine, sample.rank), sample)
        self._tell(self._seats("engine", sample.engine), sample)
        self._tell(self._concerned(sample.engine), sample)

    def _tell_engine(self, sample: EngineSample | LogSample) -> None:
        self._tell(self._seats("engine", sample.engine), sample)
        for key, seats in self.memory.seats.items():
            if key[0] == "rank" and key[1] == sample.engine:
                self._tell(seats, sample)
        self._tell(self._concerned(sample.engine), sample)

    def _concerned(self, engine: str) -> Iterator[Seat]:
        """Detectors about processes and devices of an engine, for which its load is the context."""
        on = self._devices_of.get(engine, ())
        for key, seats in self.memory.seats.items():
            if (key[0] in ("held", "process") and key[1] == engine) or (key[0] == "device" and key[2] in on):
                yield from seats

    # --- devices ---------------------------------------------------------------------------------------------

    def _polled(self, uuid: str) -> None:
        gpu = self.node.gpu(uuid)
        slices = frozenset(mig.uuid for mig in gpu.mig)
        for gone in self.memory.slices.get(uuid, frozenset()) - slices:
            self._forget_device(gone)
        self.memory.slices[uuid] = slices
        for view in devices((gpu,)):
            self._device(view)

    def _released(self) -> None:
        """Devices that nobody reads because somebody asked for it are not silent."""
        for key, seats in self.memory.seats.items():
            if key[0] == "device":
                self._tell(seats, DeviceSample(self.node.t, key[2], Absent(RELEASED), NOT_READ, (), {}))

    def _forget_device(self, uuid: str) -> None:
        self.memory.seats = {key: seats for key, seats in self.memory.seats.items() if key[2] != uuid}
        self._listed.pop(uuid, None)
        for on in self._devices_of.values():
            on.discard(uuid)

    def _device(self, view: GpuView | MigView) -> None:
        t = self.node.t
        read = not isinstance(view.processes, Absent) and self.node.list_is_new(view.uuid)
        processes = view.processes if read or isinstance(view.processes, Absent) else NOT_READ
        engines = self._engines_on(view)
        sample = DeviceSample(
            t=t,
            gpu=view.uuid,
            memory=view.memory,
            processes=processes,
            engines=tuple(sorted(engines)),
            facts={name: self.node.facts_of(name) for name in engines},
            unified=isinstance(view, GpuView) and view.poll is not None and view.poll.unified,
        )
        self._tell(self._seats("device", "", view.uuid), sample)
        for engine in engines:
            self._tell(self._seats("engine", engine), sample)
        for key, seats in self.memory.seats.items():
            if key[0] == "held" and key[2] == view.uuid:
                self._tell(seats, sample)
        if not isinstance(processes, Absent):
            self._held(view, processes)

    def _engines_on(self, view: GpuView | MigView) -> set[str]:
        held = known(view.held) or ()
        named = {part.holder.name for part in held if part.holder.kind == "engine"}
        named |= {facts.name for facts in self.node.facts() if view.uuid in (facts.gpus or ())}
        for name in named:
            self._devices_of.setdefault(name, set()).add(view.uuid)
        return named

    def _held(self, view: GpuView | MigView, processes: tuple[HeldProcess, ...]) -> None:
        memory = known(view.memory)
        now = {process.pid: process.holder for process in processes}
        for pid, holder in self._listed.get(view.uuid, {}).items():
            if pid not in now:
                self._ended(pid, holder)
        self._listed[view.uuid] = now
        for process in processes:
            if process.holder.kind != "engine" or process.used is None:
                continue
            engine = process.holder.name
            life = self._life(engine)
            sample = HeldSample(
                t=self.node.t,
                gpu=view.uuid,
                pid=process.pid,
                engine=engine,
                used=process.used,
                total=memory.total if memory else None,
                free=memory.free if memory else None,
                segment=life.memory_segment,
                asleep=self.node.asleep(engine),
            )
            self._tell(self._seats("held", engine, view.uuid, process.pid), sample)
            self._tell(self._seats("engine", engine), sample)

    # --- what the engines' own processes tell ------------------------------------------------------------------

    def _read_log(self, line: LogLine) -> None:
        news = self.node.read_log(line)
        now = self.node.story(line.engine).now
        if now is not None:
            self._tell_engine(LogSample(self.node.t, line.engine, True, news, now))

    def _allocator(self, report: AllocatorReport) -> None:
        holder = self.node.holder(report.pid)
        engine = holder.name if holder.kind == "engine" else report.engine
        if engine is None:
            return
        life = self._life(engine)
        sample = AllocatorSample(
            t=self.node.t,
            engine=engine,
            report=report,
            memory=self.node.memory_of(report.gpu),
            segment=life.memory_segment,
            life=life.segment,
            life_start=life.segment_start,
            # The engine may have answered in a life before that of this process.
            ready_since=life.ready_since if life.ready_since > (report.started or 0.0) else None,
            asleep=self.node.asleep(engine),
        )
        if holder.kind == "engine":  # else it is the last word of a process that has ended
            self._tell(self._seats("held", engine, report.gpu, report.pid), sample)
        self._tell(self._seats("engine", engine), sample)

    def _counted(self, owners: BlockOwners) -> None:
        holder = self.node.holder(owners.pid)
        if holder.kind != "engine":
            return
        sample = OwnersSample(self.node.t, holder.name, owners, self._life(holder.name).segment)
        self._tell(self._seats("rank", holder.name, owners.rank), sample)

    # --- the host --------------------------------------------------------------------------------------------

    def _host_process(self, process: HostProcess) -> None:
        holder = self.node.holder(process.pid)
        if holder.kind != "engine":
            return
        host = self.node.host
        sample = HostSample(
            self.node.t,
            holder.name,
            process,
            host.available if host else None,
            host.total if host else None,
            self._life(holder.name).loads,
        )
        self._tell(self._seats("process", holder.name, "", process.pid), sample)
        self._tell(self._seats("engine", holder.name), sample)

    def _ended(self, pid: int, holder: Holder) -> None:
        end = ProcessEnd(self.node.t, pid, holder)
        for key, seats in list(self.memory.seats.items()):
            if key[0] in ("held", "process") and key[3] == pid:
                del self.memory.seats[key]
            elif key[0] == "device" or (key[0] == "engine" and holder == Holder("engine", key[1])):
                self._tell(seats, end)

    def _resume(self, gap: Gap) -> None:
        resumed = Resumed(self.node.t, gap.since)
        for seats in self.memory.seats.values():
            self._tell(seats, resumed)

    def _removed(self, removed: TargetRemoved) -> None:
        if removed.source == "vllm":
            self.memory.seats = {key: seats for key, seats in self.memory.seats.items() if key[1] != removed.target}
            self._devices_of.pop(removed.target, None)
        elif removed.source == "nvml":
            for uuid in (removed.target, *self.memory.slices.pop(removed.target, ())):
                self._forget_device(uuid)

    # --- concluding ------------------------------------------------------------------------------------------

    def _seats(self, about: About, engine: str, place: str = "", pid: int = 0) -> list[Seat]:
        key: Key = (about, engine, place, pid)
        seats = self.memory.seats.get(key)
        if seats is None:
            seats = self.memory.seats[key] = []
            subject = _subject(*key)
            for kind in self._kinds:
                if kind.about == about:
                    settings = self._policy.settings(kind, subject)
                    detector = _detector(kind, subject, settings)
                    seats.append(Seat(kind.verdict, subject, detector, settings, since=self.node.t))
        return seats

    def _tell(self, seats: Iterable[Seat], sample: Sample) -> None:
        for seat in seats:
            seat.detector.observe(sample)

    def _conclude(self) -> None:
        t = self.node.t
        forgotten = {key[1] for key in self.memory.seats} - {"", *self.node.engine_names()}
        if forgotten:
            self.memory.seats = {key: seats for key, seats in self.memory.seats.items() if key[1] not in forgotten}
        verdicts = [self._verdict(seat, t) for seats in self.memory.seats.values() for seat in seats]
        on = {engine: frozenset(uuids) for engine, uuids in self._devices_of.items()}
        self._verdicts = self.memory.incidents.assign(verdicts, on)

    def _verdict(self, seat: Seat, t: float) -> Verdict:
        finding = seat.detector.conclude(t)
        if finding.verdict is not None and self._policy.is_off(finding.verdict, seat.subject):
            finding = replace(SwitchedOff().conclude(t), gauges=finding.present())
        if (finding.state, finding.verdict) != (seat.finding.state, seat.finding.verdict):
            seat.since = t
        seat.finding = finding
        name = finding.verdict or seat.verdict
        entry = CATALOGUE[name]
        return Verdict(
            name=name,
            killer=finding.killer or entry.killer,
            state=finding.state,
            subject=seat.subject,
            since=seat.since,
            confidence=finding.confidence,
            summary=finding.summary,
            evidence=finding.evidence,
            eta=finding.eta,
            reason=finding.reason,
            advice=advice(name, finding, self._facts_of(seat.subject)) if finding.state not in _QUIET else (),
            silenced=self._policy.silence(name, seat.subject, t),
            gauges=finding.present(),
        )

    def _facts_of(self, subject: Subject) -> EngineFacts | None:
        return self.node.facts_of(subject.engine) if subject.engine is not None else None


def _subject(about: About, engine: str, place: str, pid: int) -> Subject:
    rank, gpu = (place, None) if about == "rank" else (None, place or None)
    return Subject(engine=engine or None, rank=rank, gpu=gpu, pid=pid or None)


def _detector(kind: Kind, subject: Subject, settings: Section | None) -> Detector:
    return SwitchedOff() if settings is None else kind.make(subject, settings)


_QUIET: tuple[State, ...] = ("clear", "unknown")


@lru_cache(maxsize=64)
def _version(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    numbers: list[int] = []
    for part in text.split("+", 1)[0].split("."):
        digits = "".join(char for char in part if char.isdigit())
        if not digits or not part[0].isdigit():
            break
        numbers.append(int(digits))
    return tuple(numbers) or None


def _signature(scrape: EngineScrape) -> dict[tuple[str, str], object]:
    """What stays the same while an engine lives on, as far as the page tells."""
    values: dict[tuple[str, str], Maybe[object]] = {("", "model"): scrape.model_name}
    for rank in scrape.ranks:
        values[rank.rank, "sleep"] = rank.sleep_level
        values[rank.rank, "blocks"] = rank.pool.blocks
    return {key: value for key, value in values.items() if not isinstance(value, Absent)}
