"""Device memory against what was promised and what is left: margin, headroom, budget, and memory that nobody owns."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from pydantic import Field

from oomwatch import units
from oomwatch.attribution import unowned_memory
from oomwatch.detectors.base import (
    CLEAR,
    DeviceSample,
    EngineSample,
    Evidence,
    Finding,
    ProcessEnd,
    RankSample,
    Sample,
    State,
    Subject,
    unknown,
)
from oomwatch.detectors.service import GIB, MIB, Pace, Service, Services
from oomwatch.detectors.standing import Standing
from oomwatch.detectors.statistics import SlidingFloor
from oomwatch.observations import NOT_READ, Absent, Maybe, Memory, known
from oomwatch.settings import Duration, Section, Size
from oomwatch.snapshot import HeldProcess

_TITLE = "VLLM"  # how vLLM's processes call themselves since 0.10.2


def _low_mark(size: int, ratio: float, total: int) -> int:
    """Bytes below which free memory is low, on a device of ``total`` bytes."""
    return max(size, math.ceil(ratio * total))


def _usable_total(memory: Memory) -> int:
    """The total that an engine sees: without the driver's own part, where that is known."""
    return memory.total - (memory.reserved or 0)


class _Device:
    """A device and the engines on it, as detectors of free memory need them; about 4 KiB and 1 KiB an engine."""

    def __init__(self) -> None:
        self.sample: DeviceSample | None = None
        self._services = Services()
        self._pace = Pace()
        self._present: tuple[str, ...] = ()  # engines with a process on the latest list

    def observe(self, sample: Sample) -> None:
        """Follow the device and its engines."""
        self._services.observe(sample)
        if isinstance(sample, DeviceSample):
            self.sample = sample
            self._pace.seen(sample.t)
            if not isinstance(sample.processes, Absent):
                holders = {process.holder for process in sample.processes}
                self._present = tuple(sorted(holder.name for holder in holders if holder.kind == "engine"))

    def serving(self, t: float) -> dict[str, Service]:
        """The engines on the device that are up."""
        found = {name: self._services.get(name) for name in (self.sample.engines if self.sample else ())}
        return {name: service for name, service in found.items() if service.serves(t)}

    def silent(self, t: float) -> str:
        """Why nothing can be said of the device's free memory at ``t``; empty where it can."""
        if self.sample is None or self._pace.silence(t) > max(180.0, 3 * self._pace.interval):
            return "no fresh poll of this device"
        if self.sample.unified:
            return "the device shares the host's memory"
        if isinstance(self.sample.memory, Absent):
            return f"free memory cannot be read: {self.sample.memory.reason}"
        return "" if self.serving(t) else "no engine serves on this device"

    def starting(self, t: float) -> bool:
        """Whether an engine takes memory here before it has answered."""
        return any(not self._services.get(name).serves(t) for name in self._present)

    def free(self) -> int | None:
        """What is free while an engine is awake; None where that says nothing."""
        sample = self.sample
        if sample is None or self.silent(sample.t) or self.starting(sample.t) or not isinstance(sample.memory, Memory):
            return None
        awake = any(not service.asleep for service in self.serving(sample.t).values())
        return sample.memory.free if awake else None

    def warm(self, t: float) -> bool:
        """Whether every engine that serves here has warmed up."""
        return all(service.warm(t) for service in self.serving(t).values())

    def largest_budget(self, t: float) -> tuple[str, float] | None:
        """The serving engine that was given the largest share of the device, and the share."""
        budgets = [
            (share, name)
            for name, service in self.serving(t).items()
            if self.sample is not None and (share := _utilization(service, self.sample, name)) is not None
        ]
        return (max(budgets)[1], max(budgets)[0]) if budgets else None


def _utilization(service: Service, sample: DeviceSample, engine: str) -> float | None:
    """gpu_memory_utilization as the engine's page shows it, else as configured; None where the pool's size is set."""
    if service.pool_is_set:
        return None
    if service.utilization is not None:
        return service.utilization
    facts = sample.facts.get(engine)
    return facts.gpu_memory_utilization if facts else None


# --- margin-thin -------------------------------------------------------------------------------------------------


class MarginThinSettings(Section):
    """What has to be free on a device once its engine is ready, for a forward pass to take."""

    info_below: Size = Field(default=GIB, gt=0, description="Free memory below this is a hint.")
    info_below_ratio: float = Field(
        default=0.015, ge=0, lt=1, description="The same as a share of the device; the larger of the two holds."
    )
    ticket_below: Size = Field(default=384 * MIB, gt=0, description="Free memory below this is a ticket.")
    settle_time: Duration = Field(
        default=600.0,
        ge=0,
        description="How long after an engine became ready nothing is said: first requests allocate.",
    )


class MarginThin:
    """From the start the free memory left is thinner than what a forward pass may ask for.

    The floor of free memory since the engine became ready, up to the end of its warm-up: what is lost later is
    headroom-low's. A standing hint, once per start. About 8 KiB with one engine on the device.
    """

    verdict = "margin-thin"

    def __init__(self, subject: Subject, settings: MarginThinSettings) -> None:
        self.subject = subject
        self.settings = settings
        self._device = _Device()
        self._lives: tuple[tuple[str, float | None], ...] = ()
        self._floor: int | None = None

    def observe(self, sample: Sample) -> None:
        """Keep the floor of free memory of the present lives."""
        self._device.observe(sample)
        if not isinstance(sample, DeviceSample):
            return
        lives = self._present_lives(sample.t)
        if lives and lives != self._lives:
            self._lives, self._floor = lives, None
        free = self._device.free()
        if free is not None and (self._floor is None or not self._device.warm(sample.t)):
            self._floor = free if self._floor is None else min(free, self._floor)

    def _present_lives(self, t: float) -> tuple[tuple[str, float | None], ...]:
        return tuple((name, service.ready) for name, service in sorted(self._device.serving(t).items()))

    def conclude(self, t: float) -> Finding:
        """Compare the floor with the marks."""
        silent = self._device.silent(t)
        if silent:
            return unknown(silent)
        if self._present_lives(t) != self._lives:
            return unknown("warming up")
        ready = max((ready or 0.0 for _, ready in self._lives), default=0.0)
        sample = self._device.sample
        if self._floor is None or sample is None or not isinstance(sample.memory, Memory):
            return unknown("free memory has not been read since an engine became ready")
        if t - ready < self.settings.settle_time:
            return unknown("warming up")
        state = self._state(self._floor, sample.memory.total)
        evidence: dict[str, float | int | str | list[int] | list[str]] = {
            "free_floor_bytes": self._floor,
            "total_bytes": sample.memory.total,
            "ready_since": ready,
        }
        if state == "clear":
            return Finding("clear", evidence=evidence)
        names = ", ".join(name for name, _ in self._lives)
        summary = f"Since {names} became ready, only {units.size(self._floor)} of {units.size(sample.memory.total)} "
        summary += "are left free at the least: a forward pass that asks for more fails."
        budget = self._device.largest_budget(t)
        if budget is not None:
            name, share = budget
            usable = _usable_total(sample.memory)
            fitting = math.floor(100 * (share - (GIB - self._floor) / usable)) / 100
            evidence["utilization"] = share
            if 0 < fitting < share:
                evidence["fitting_utilization"] = fitting
                summary += f" gpu_memory_utilization {fitting:g} instead of {share:g} for {name} would leave 1 GiB."
        return Finding(state, 0.9 if self._device.warm(t) else 0.7, summary, evidence)

    def _state(self, floor: int, total: int) -> State:
        if floor < self.settings.ticket_below:
            return "ticket"
        low = _low_mark(self.settings.info_below, self.settings.info_below_ratio, total)
        return "info" if floor < low else "clear"


# --- headroom-low ------------------------------------------------------------------------------------------------


class HeadroomLowSettings(Section):
    """When free memory has fallen too low, against the level that the engines had after their warm-up."""

    window: Duration = Field(default=600.0, ge=60, le=7200, description="The floor of this much time is what counts.")
    ticket_below: Size = Field(
        default=GIB, gt=0, description="Floor below this, and below the engines' own level: a ticket."
    )
    ticket_below_ratio: float = Field(
        default=0.015, ge=0, lt=1, description="The same as a share of the device; the larger of the two holds."
    )
    page_below: Size = Field(default=512 * MIB, gt=0, description="Floor below this while it falls: a page.")
    fall: Size = Field(default=128 * MIB, gt=0, description="How far below the engines' own level it has to be.")
    falling_for: Duration = Field(
        default=6 * 3600.0,
        gt=0,
        description="Longest time since the floor last fell for which a page stands; then a ticket.",
    )
    warm_up: Duration = Field(
        default=1800.0,
        ge=0,
        description="Least time from which the engines' own level is learnt, after each start or wake-up.",
    )
    page_hold: Duration = Field(default=900.0, ge=0, description="How long a page stands after its condition ended.")
    ticket_hold: Duration = Field(
        default=3600.0, ge=0, description="How long a ticket stands after its condition ended."
    )


_FALL_STEP = 32 * MIB  # a floor that falls by less stands still
_Segment = tuple[str, float | None, int, bool]  # an engine, since when it is ready, its segment, whether it sleeps


class HeadroomLow:
    """Free memory has fallen below what the engines on the device have lived with.

    The level is the floor of free memory from their start (or wake-up) to the end of their warm-up; an engine that
    was set to live low has a low level, and this stays silent. About 10 KiB with one engine on the device.
    """

    verdict = "headroom-low"

    def __init__(self, subject: Subject, settings: HeadroomLowSettings) -> None:
        self.subject = subject
        self.settings = settings
        self._device = _Device()
        self._window = SlidingFloor(settings.window)
        self._standing = Standing(settings.page_hold, settings.ticket_hold)
        self._lives: tuple[_Segment, ...] = ()
        self._begun = 0.0
        self._level: int | None = None
        self._level_stands = False
        self._lowest = 0.0
        self._fell_at = 0.0

    def observe(self, sample: Sample) -> None:
        """Learn the level, then keep the window's floor."""
        self._device.observe(sample)
        if not isinstance(sample, DeviceSample):
            return
        lives = self._present_lives(sample.t)
        if lives and lives != self._lives:
            self._begin(sample.t, lives)
        free = self._device.free()
        if free is None:
            return
        if not self._level_stands:
            self._level = free if self._level is None else min(free, self._level)
            self._lowest, self._fell_at = float(self._level), sample.t
            self._level_stands = self._device.warm(sample.t) and sample.t - self._begun >= self.settings.warm_up
            return
        self._window.add(sample.t, free)
        if free <= self._lowest - _FALL_STEP:
            self._lowest, self._fell_at = float(free), sample.t
        floor = self._window.value(sample.t)
        if floor is not None and self._level is not None and self._level - floor < self.settings.fall:
            self._lowest = float(self._level)  # it has recovered: the next fall is a new one

    def _present_lives(self, t: float) -> tuple[_Segment, ...]:
        serving = sorted(self._device.serving(t).items())
        return tuple((name, service.ready, service.segment, service.asleep) for name, service in serving)

    def _begin(self, t: float, lives: tuple[_Segment, ...]) -> None:
        self._lives, self._begun = lives, t
        self._level, self._level_stands = None, False
        self._window.clear()
        self._standing.reset()

    def conclude(self, t: float) -> Finding:
        """Compare the window's floor with the level and the marks."""
        silent = self._device.silent(t)
        if not silent and self._device.starting(t):
            silent = "an engine is starting on this device"
        if silent:
            return unknown(silent)
        lives = self._present_lives(t)
        if all(asleep for _, _, _, asleep in lives):
            return unknown("the engine sleeps")
        if lives != self._lives:
            return unknown("warming up")
        floor = self._window.value(t)
        sample = self._device.sample
        if not self._level_stands or self._level is None or sample is None or not isinstance(sample.memory, Memory):
            return unknown("warming up")
        if floor is None:
            return unknown("no fresh poll of this device")
        state = self._state(t, floor, sample.memory.total)
        evidence: Evidence = {
            "free_floor_bytes": int(floor),
            "level_bytes": self._level,
            "window_seconds": self.settings.window,
            "total_bytes": sample.memory.total,
        }
        if state == "clear":
            return self._standing.settle(t, Finding("clear", evidence=evidence))
        summary = (
            f"Within {units.duration(self.settings.window)} free memory has been down to {units.size(floor)} of "
            f"{units.size(sample.memory.total)}; after their warm-up the engines here left {units.size(self._level)}."
        )
        return self._standing.settle(t, Finding(state, 0.9, summary, evidence))

    def _state(self, t: float, floor: float, total: int) -> State:
        settings = self.settings
        if self._level is None or self._level - floor < settings.fall:
            return "clear"
        if floor < settings.page_below and t - self._fell_at <= settings.falling_for:
            return "page"
        low = _low_mark(settings.ticket_below, settings.ticket_below_ratio, total)
        return "ticket" if floor < low else "clear"


# --- budget-overrun ----------------------------------------------------------------------------------------------


class BudgetOverrunSettings(Section):
    """How much more than its share an engine's processes may hold on a device."""

    allowance: Size = Field(default=0, ge=0, description="Bytes beyond the share that are normal for this engine.")
    info_above: Size = Field(
        default=256 * MIB, gt=0, description="Overrun above this, beyond the allowance, is a hint."
    )
    ticket_above: Size = Field(
        default=768 * MIB, gt=0, description="Overrun above this, beyond the allowance, is a ticket."
    )
    ticket_after: Duration = Field(
        default=600.0, ge=0, description="How long it has to last for a ticket, while awake."
    )
    settle_time: Duration = Field(
        default=600.0, ge=0, description="How long after the engine became ready nothing is said."
    )
    ticket_hold: Duration = Field(
        default=3600.0, ge=0, description="How long a ticket stands after its condition ended."
    )


@dataclass
class _Held:
    """What the engine holds on one device, against its budget there."""

    t: float
    used: int
    budget: float | None
    total: int
    over: float = 0.0  # beyond budget and allowance; negative where it keeps to them
    lasting: float = 0.0  # seconds for which it has been over the ticket's mark, while awake


class BudgetOverrun:
    """The engine's processes hold more of a device than gpu_memory_utilization times what the engine sees of it.

    What the engine sees is the driver's total less the driver's reserve; where that is unknown the total counts, so
    that the overrun is the smaller of the two. An engine that is asleep, starting, or whose kv_cache_memory_bytes is
    set has no budget. About 6 KiB and 300 bytes a device.
    """

    verdict = "budget-overrun"

    def __init__(self, subject: Subject, settings: BudgetOverrunSettings) -> None:
        self.subject = subject
        self.settings = settings
        self._service = Service()
        self._pace = Pace()
        self._held: dict[str, _Held] = {}
        self._unreadable: dict[str, str] = {}
        self._standing = Standing(ticket_s=settings.ticket_hold)
        self._ready: float | None = None

    def observe(self, sample: Sample) -> None:
        """Follow the engine and what it holds."""
        match sample:
            case RankSample() | EngineSample():
                self._service.observe(sample)
                if self._service.ready != self._ready:
                    self._ready = self._service.ready
                    self._held.clear()
                    self._standing.reset()
            case DeviceSample() if sample.processes != NOT_READ and self._service.refused_since is None:
                self._list(sample)

    def _list(self, sample: DeviceSample) -> None:
        used = _used_by(self.subject.engine or "", sample.processes)
        if not used and sample.engines == (self.subject.engine,) and self._service.serves(sample.t):
            used = _only_stranger(sample.processes)
        if isinstance(used, Absent) or isinstance(sample.memory, Absent):
            reason = used.reason if isinstance(used, Absent) else known_reason(sample.memory)
            self._unreadable[sample.gpu] = reason
            self._held.pop(sample.gpu, None)
            return
        self._unreadable.pop(sample.gpu, None)
        before = self._held.pop(sample.gpu, None)
        if not used:
            return
        self._pace.seen(sample.t)
        share = _utilization(self._service, sample, self.subject.engine or "")
        budget = None if share is None else share * _usable_total(sample.memory)
        now = _Held(sample.t, used, budget, sample.memory.total)
        self._held[sample.gpu] = now
        if budget is None or self._service.asleep or not self._service.serves(sample.t):
            return
        now.over = used - budget - self.settings.allowance
        if now.over > self.settings.ticket_above and before is not None and before.over > self.settings.ticket_above:
            now.lasting = before.lasting + sample.t - before.t

    def conclude(self, t: float) -> Finding:
        """Judge the device on which the engine is furthest over."""
        service = self._service
        if service.ready is None or not service.serves(t):
            return unknown("the engine does not serve")
        if service.refused_since is not None:
            return self._standing.settle(t, unknown("the engine does not answer"))
        if service.pool_is_set:
            return unknown("no budget: kv_cache_memory_bytes is set")
        limit = max(300.0, 3 * self._pace.interval)
        fresh = {gpu: held for gpu, held in self._held.items() if t - held.t <= limit}
        if not fresh:
            reasons = sorted(set(self._unreadable.values()))
            why = f": {reasons[0]}" if reasons else ""
            return self._standing.settle(t, unknown(f"what the engine's processes hold is not known{why}"))
        budgets = {gpu: held for gpu, held in fresh.items() if held.budget is not None}
        if not budgets:
            return unknown("gpu_memory_utilization is not known")
        if service.asleep:
            return self._standing.settle(t, unknown("the engine sleeps"))
        if t - service.ready < self.settings.settle_time:
            return unknown("warming up")
        gpu, worst = max(budgets.items(), key=lambda item: (item[1].over, item[0]))
        return self._standing.settle(
            t, self._finding(gpu, worst, sum(self._is_over(held) for held in budgets.values()))
        )

    def _is_over(self, held: _Held) -> bool:
        return held.over > self.settings.info_above

    def _finding(self, gpu: str, held: _Held, devices_over: int) -> Finding:
        budget = held.budget or 0.0
        evidence: Evidence = {
            "gpu": gpu,
            "used_bytes": held.used,
            "budget_bytes": round(budget),
            "overrun_bytes": round(held.used - budget),
            "allowance_bytes": self.settings.allowance,
            "total_bytes": held.total,
            "devices_over": devices_over,
        }
        if not self._is_over(held):
            return Finding("clear", evidence=evidence)
        ticket = held.over > self.settings.ticket_above and held.lasting >= self.settings.ticket_after
        where = f"{gpu} and {devices_over - 1} more" if devices_over > 1 else gpu
        summary = (
            f"The processes of {self.subject.engine} hold {units.size(held.used)} on {where}, "
            f"{units.size(held.used - budget)} more than their budget of {units.size(budget)}."
        )
        return Finding("ticket" if ticket else "info", 0.95, summary, evidence)


def known_reason(value: Maybe[Memory]) -> str:
    """Why memory is not known."""
    return value.reason if isinstance(value, Absent) else ""


def _used_by(engine: str, processes: Maybe[tuple[HeldProcess, ...]]) -> Maybe[int]:
    """Bytes that all processes of an engine hold together."""
    if isinstance(processes, Absent):
        return processes
    total = 0
    for process in processes:
        if process.holder.kind == "engine" and process.holder.name == engine:
            if process.used is None:
                return Absent("NOT_SUPPORTED")
            total += process.used
    return total


def _only_stranger(processes: Maybe[tuple[HeldProcess, ...]]) -> Maybe[int]:
    """Bytes of the one large process that nobody owns; 0 where there is none or several.

    An engine that answers holds memory somewhere: alone on its device and with no process known, this is it.
    """
    if isinstance(processes, Absent):
        return processes
    used = [process.used or 0 for process in processes if process.holder.kind == "unknown"]
    large = [size for size in used if size >= GIB]
    return large[0] if len(large) == 1 else 0


# --- orphan-memory -----------------------------------------------------------------------------------------------


class OrphanMemorySettings(Section):
    """When device memory that no engine and no configured neighbour holds is worth a ticket."""

    at_least: Size = Field(default=GIB, gt=0, description="Memory without an owner from which on it is a ticket.")
    lasting: Duration = Field(
        default=120.0, ge=0, description="How long a process has to hold it: starts and stops are short."
    )
    engine_within: Duration = Field(
        default=3600.0, ge=0, description="Only on devices where an engine runs or ran within this time."
    )
    start_grace: Duration = Field(
        default=900.0,
        ge=0,
        description="How long a new process may be an engine's start, where an engine that should be here does not "
        "answer and none of its processes is known.",
    )
    longest_start: Duration = Field(
        default=3600.0,
        ge=0,
        description="The same for a process whose memory still changes, as it does while a model loads.",
    )
    gone_hold: Duration = Field(
        default=300.0, ge=0, description="How long a ticket stands after the processes that held it have left."
    )
    ticket_hold: Duration = Field(
        default=3600.0,
        ge=0,
        description="The same while they are still there with less: a trainer between its steps comes back.",
    )


_CHANGE = 64 * MIB  # a process whose memory moves by less stands still
_STILL_FOR = 300.0  # seconds without such a change
_CELLS = 8


@dataclass
class _Stranger:
    """A process on the device whose holder is not known."""

    since: float
    appeared: bool  # under our eyes, not with the first list
    mark: int  # its memory when it last changed
    changed: float
    floor: SlidingFloor  # what it held at the least for as long as an orphan has to


@dataclass(frozen=True)
class _Piece:
    """Memory that may have no owner; ``pid`` None for what no listed process accounts for."""

    used: int
    since: float
    pid: int | None
    name: str


class OrphanMemory:
    """Device memory is held by no known engine: neighbours, zombies, workers of engines that have died.

    An engine that answers holds memory somewhere: where none of its processes is known, the largest piece without an
    owner may be its own, and only the rest counts. About 5 KiB, and 700 bytes a process on the device.
    """

    verdict = "orphan-memory"

    def __init__(self, subject: Subject, settings: OrphanMemorySettings) -> None:
        self.subject = subject
        self.settings = settings
        self._services = Services()
        self._pace = Pace()
        self._standing = Standing(ticket_s=settings.ticket_hold)
        self._raised: frozenset[int] = frozenset()  # pids of the ticket that stands
        self._left: float | None = None  # since when none of them is there any more
        self._listed: tuple[HeldProcess, ...] | None = None
        self._unreadable = ""
        self._strangers: dict[int, _Stranger] = {}
        self._owned: dict[int, float] = {}  # when an engine's process was first listed
        self._unowned: Maybe[int] = NOT_READ
        self._unowned_since: float | None = None
        self._engines: tuple[str, ...] = ()
        self._engine_t: float | None = None  # when an engine was last known to be here
        self._memory: Memory | None = None

    def observe(self, sample: Sample) -> None:
        """Follow the device's processes."""
        self._services.observe(sample)
        if isinstance(sample, ProcessEnd):
            self._ended(sample.pid)
        if not isinstance(sample, DeviceSample):
            return
        self._engines = sample.engines
        self._memory = known(sample.memory)
        if sample.engines:
            self._engine_t = sample.t
        if sample.processes == NOT_READ:
            return
        if isinstance(sample.processes, Absent):
            self._unreadable = sample.processes.reason
            return
        self._unreadable = ""
        self._pace.seen(sample.t)
        self._list(sample.t, sample.processes)
        self._unowned = unowned_memory(sample.memory, sample.processes, sliced=False, unified=sample.unified)
        if isinstance(self._unowned, Absent) or self._unowned < self.settings.at_least:
            self._unowned_since = None
        elif self._unowned_since is None:
            self._unowned_since = sample.t

    def _ended(self, pid: int) -> None:
        self._strangers.pop(pid, None)
        self._owned.pop(pid, None)
        if self._listed is not None:
            self._listed = tuple(process for process in self._listed if process.pid != pid)

    def _list(self, t: float, processes: tuple[HeldProcess, ...]) -> None:
        strangers: dict[int, _Stranger] = {}
        owned: dict[int, float] = {}
        for process in processes:
            if process.holder.kind == "engine":
                owned[process.pid] = self._owned.get(process.pid, t)
            elif process.holder.kind == "unknown":
                used = process.used or 0
                stranger = self._strangers.get(process.pid)
                if stranger is None:
                    floor = SlidingFloor(self.settings.lasting, _CELLS)
                    stranger = _Stranger(t, self._listed is not None, used, t, floor)
                stranger.floor.add(t, used)
                if abs(used - stranger.mark) >= _CHANGE:
                    stranger.mark, stranger.changed = used, t
                strangers[process.pid] = stranger
        self._strangers, self._owned, self._listed = strangers, owned, processes

    def conclude(self, t: float) -> Finding:
        """Add up what has no owner."""
        now = self._now(t)
        if now.state == "clear" and self._raised.isdisjoint(self._strangers):
            self._left = t if self._left is None else self._left
            if t - self._left > self.settings.gone_hold:
                self._standing.reset()
        else:
            self._left = None
        return self._standing.settle(t, now)

    def _now(self, t: float) -> Finding:
        if self._unreadable:
            return unknown(f"the process list cannot be read: {self._unreadable}")
        listed_t = self._pace.last
        if self._listed is None or listed_t is None:
            return unknown("the process list has not been read")
        if t - listed_t > max(180.0, 3 * self._pace.interval):
            return unknown("no fresh process list of this device")
        if any(process.used is None for process in self._listed if process.holder.kind == "unknown"):
            return unknown("the driver gives no memory per process")
        pieces = sorted(self._pieces(t, listed_t), key=lambda piece: piece.used, reverse=True)
        claimed = self._unseen_engines(t)
        spared, rest = pieces[:claimed], pieces[claimed:]
        orphans = [piece for piece in rest if listed_t - piece.since >= self.settings.lasting]
        total = sum(piece.used for piece in orphans)
        if total >= self.settings.at_least:
            if self._engine_t is None or t - self._engine_t > self.settings.engine_within:
                return unknown("no engine is known to run on this device")
            return self._finding(total, orphans)
        if sum(piece.used for piece in spared) >= self.settings.at_least:
            return unknown("memory may be that of an engine whose processes are not known")
        return CLEAR

    def _pieces(self, t: float, listed_t: float) -> Iterator[_Piece]:
        may_start = self._absent_engine(t)
        for process in self._listed or ():
            used = process.used or 0
            if process.pid in self._strangers:
                stranger = self._strangers[process.pid]
                if not (may_start and self._may_be_a_start(listed_t, process.name, stranger)):
                    least = stranger.floor.value(listed_t)
                    yield _Piece(used if least is None else int(least), stranger.since, process.pid, process.name)
            elif process.holder.kind == "engine":
                died = self._died(t, process)
                if died is not None:
                    yield _Piece(used, died, process.pid, process.name)
        if self._unowned_since is not None and not isinstance(self._unowned, Absent):
            yield _Piece(self._unowned, self._unowned_since, None, "")

    def _died(self, t: float, process: HeldProcess) -> float | None:
        """Since when the process is one that its engine left behind; None where it is not."""
        service = self._services.get(process.holder.name)
        if not service.down(t) or service.refused_since is None or service.answered is None:
            return None
        return service.refused_since if self._owned.get(process.pid, t) <= service.answered else None

    def _here(self) -> set[str]:
        return {process.holder.name for process in self._listed or () if process.holder.kind == "engine"}

    def _unseen_engines(self, t: float) -> int:
        """How many engines answer that should be here, and have no known process here."""
        here = self._here()
        return sum(name not in here and self._services.get(name).serves(t) for name in self._engines)

    def _absent_engine(self, t: float) -> bool:
        """Whether an engine that should be here does not answer and has no known process here."""
        here = self._here()
        return any(name not in here and not self._services.get(name).serves(t) for name in self._engines)

    def _may_be_a_start(self, listed_t: float, name: str, stranger: _Stranger) -> bool:
        age = listed_t - stranger.since
        if age < self.settings.start_grace and (stranger.appeared or name.startswith(_TITLE)):
            return True
        return age < self.settings.longest_start and listed_t - stranger.changed < _STILL_FOR

    def _finding(self, total: int, orphans: list[_Piece]) -> Finding:
        listed = [piece for piece in orphans if piece.pid is not None]
        self._raised = frozenset(piece.pid for piece in listed if piece.pid is not None)
        unlisted = sum(piece.used for piece in orphans if piece.pid is None)
        evidence: dict[str, float | int | str | list[int] | list[str]] = {
            "orphan_bytes": total,
            "unlisted_bytes": unlisted,
            "pids": [piece.pid for piece in listed if piece.pid is not None],
            "names": [piece.name for piece in listed],
            "bytes_by_pid": [piece.used for piece in listed],
            "engines": list(self._engines),
        }
        if self._memory is not None:
            evidence["free_bytes"] = self._memory.free
            evidence["total_bytes"] = self._memory.total
        who = [f"pid {piece.pid} ({piece.name or 'name not known'}) {units.size(piece.used)}" for piece in listed[:5]]
        if len(listed) > 5:
            who.append(f"{len(listed) - 5} more processes")
        if unlisted:
            who.append(f"no listed process {units.size(unlisted)}")
        summary = f"{units.size(total)} are held by no known engine or neighbour: {', '.join(who)}."
        return Finding("ticket", 0.9 if listed else 0.7, summary, evidence)
