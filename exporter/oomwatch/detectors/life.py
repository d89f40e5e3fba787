"""An engine's life: starts that fail, and deaths that repeat. From pages and processes, and its log where one is."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import pairwise

from pydantic import Field

from oomwatch import units
from oomwatch.detectors.base import (
    CLEAR,
    LEVEL,
    AllocatorSample,
    DeviceSample,
    EngineSample,
    Evidence,
    Finding,
    HostSample,
    LogSample,
    ProcessEnd,
    RankSample,
    Sample,
    State,
    Subject,
    unknown,
)
from oomwatch.detectors.outcomes import STEP_WORDS, failed_inside, shortage_evidence, shortage_text
from oomwatch.detectors.service import ANSWERED, GIB, MIB, Service
from oomwatch.detectors.standing import Standing
from oomwatch.detectors.statistics import median
from oomwatch.enginelog.killer import cause_of
from oomwatch.enginelog.story import SAME_FAILURE, Ended, News, Refusal, Shortage
from oomwatch.observations import Absent, Memory, RankReading, known
from oomwatch.settings import Duration, Section, Size
from oomwatch.snapshot import HeldProcess, Holder

_HOUR = 3600.0
_SURE_AFTER = 30.0  # seconds for which the processes of a start stay away before it counts as failed
_SHORTEST_START = 2.0  # seconds: what ends sooner never took a model's memory
_TRACE = 64 * MIB  # a listed process that never held more may be the list's noise
_KEPT = 64  # events that are remembered one by one


# --- starts ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FailedStart:
    """An engine's processes came and went without its page ever answering.

    ``peak`` is the most that one of them held on a device, ``least_free`` the least that was free there meanwhile;
    None where no device listed them. ``sure`` when they were known to be the engine's.
    """

    t: float
    seconds: float
    peak: int | None
    least_free: int | None
    total: int | None
    sure: bool


@dataclass
class _Start:
    """A start that goes on."""

    since: float
    last: float
    sure: bool = False
    root: int | None = None  # the first of its processes on the host, which starts the others
    peak: int | None = None
    least_free: int | None = None
    total: int | None = None


class Starts:
    """Tells starts that fail from those that end in an answered page. About 2 KiB and 100 bytes a process.

    A process belongs to a start when it is the engine's and was not there when the engine last answered; on a device
    of the engine alone, one that nobody owns and that appears while the engine is away is taken for it.
    """

    def __init__(self, engine: str) -> None:
        self._engine = engine
        self._service = Service()
        self._now: _Start | None = None
        self._pids: set[int] = set()  # of the present start, alive
        self._left: set[int] = set()  # of the present start, gone
        self._old: set[int] = set()  # those that were there when the engine last answered
        self._listed: dict[str, frozenset[int]] = {}  # by device: pids of its latest list
        self._empty_since: float | None = None

    def observe(self, sample: Sample) -> FailedStart | None:
        """Follow the engine; the start that turns out to have failed, if one does."""
        match sample:
            case RankSample():
                self._service.observe(sample)
            case EngineSample():
                self._service.observe(sample)
                if sample.state in ANSWERED and sample.state != "dead":
                    self._answered(sample)
                elif sample.state == "gone":
                    self._all_went(sample.t)
            case DeviceSample() if not isinstance(sample.processes, Absent):
                return self._device(sample, sample.processes)
            case HostSample() if not self._serves(sample.t):
                return self._host(sample)
            case ProcessEnd():
                self._went(sample.t, sample.pid)
        return self.settle(sample.t)

    def settle(self, t: float) -> FailedStart | None:
        """The start whose processes have stayed away by ``t``, if there is one."""
        if self._now is None or self._empty_since is None or t - self._empty_since < _SURE_AFTER:
            return None
        return self._close()

    @property
    def seen(self) -> bool:
        """Whether anything of the engine has been seen, be it that it does not answer."""
        return self._service.seen is not None or self._now is not None

    def _serves(self, t: float) -> bool:
        return self._service.refused_since is None and self._service.serves(t)

    def _answered(self, sample: EngineSample) -> None:
        self._old = {*sample.pids, *self._pids, *self._old}
        if len(self._old) > 16 * _KEPT:
            self._old &= set().union(*self._listed.values())
        self._forget()

    def _host(self, sample: HostSample) -> FailedStart | None:
        pid, now = sample.process.pid, self._now
        replaced: FailedStart | None = None
        stranger = sample.process.ppid not in self._pids | self._left
        if now is not None and now.root in self._left and pid not in self._pids | self._left | self._old and stranger:
            # A supervisor that starts anew at once does not wait for the last children of the start before.
            self._old |= self._pids
            replaced = self._close()
        failed = self._came(sample.t, pid, sure=True) or replaced
        if self._now is not None and self._now.root is None and pid in self._pids:
            self._now.root = pid
        return failed

    def _device(self, sample: DeviceSample, processes: tuple[HeldProcess, ...]) -> FailedStart | None:
        before = self._listed.get(sample.gpu)
        now = self._listed[sample.gpu] = frozenset(process.pid for process in processes)
        mine = [process for process in processes if process.holder == Holder("engine", self._engine)]
        if self._serves(sample.t):
            self._old.update(process.pid for process in mine)
            return None
        for pid in (before or frozenset()) - now:
            self._went(sample.t, pid)
        taken = mine
        if not mine and before is not None and sample.engines == (self._engine,):
            unknown_ones = (process for process in processes if process.holder.kind == "unknown")
            taken = [p for p in unknown_ones if p.pid not in before or p.pid in self._pids]
        failed: FailedStart | None = None
        for process in taken:
            if process.pid not in self._old:
                failed = self._came(sample.t, process.pid, sure=bool(mine)) or failed
                self._measure(process.used, sample)
        return failed or self.settle(sample.t)

    def _measure(self, used: int | None, sample: DeviceSample) -> None:
        now = self._now
        if now is None or used is None:
            return
        now.peak = used if now.peak is None else max(used, now.peak)
        if isinstance(sample.memory, Memory):
            now.total = sample.memory.total
            free = sample.memory.free
            now.least_free = free if now.least_free is None else min(free, now.least_free)

    def _came(self, t: float, pid: int, *, sure: bool) -> FailedStart | None:
        if pid in self._old:
            return None
        # Processes of another start follow one that is over; one that a list left out once is back.
        failed = self._close() if self._empty_since is not None and pid not in self._left else None
        if self._now is None:
            self._now = _Start(t, t)
        self._now.last = t
        self._now.sure |= sure
        self._pids.add(pid)
        self._empty_since = None
        return failed

    def _went(self, t: float, pid: int) -> None:
        self._old.discard(pid)
        if self._now is None or pid not in self._pids:
            return
        self._pids.discard(pid)
        self._left.add(pid)
        self._now.last = t
        if not self._pids:
            self._empty_since = t

    def _all_went(self, t: float) -> None:
        """The engine has ended: what its last processes do from now on is told as nobody's."""
        for pid in tuple(self._pids):
            self._went(t, pid)

    def _forget(self) -> None:
        self._now, self._empty_since = None, None
        self._pids.clear()
        self._left.clear()

    def _close(self) -> FailedStart | None:
        now = self._now
        self._forget()
        if (
            now is None
            or now.last - now.since < _SHORTEST_START
            or not (now.root is not None or (now.peak or 0) >= _TRACE)
        ):
            return None
        return FailedStart(now.last, now.last - now.since, now.peak, now.least_free, now.total, now.sure)


# --- startup-oom -------------------------------------------------------------------------------------------------


class StartupOomSettings(Section):
    """When starts that fail are taken for a lack of memory, where no log tells."""

    climbs_to: Size = Field(
        default=GIB, gt=0, description="What a start has to hold at its peak to have loaded anything."
    )
    tight_ratio: float = Field(
        default=0.05,
        ge=0,
        le=1,
        description="Free share of the device at the peak below which a lack of memory is likely.",
    )
    ticket_after: int = Field(
        default=2, ge=1, description="Failed starts in a row, no page between them, for a ticket."
    )
    within: Duration = Field(default=6 * _HOUR, gt=0, description="How long a failed start counts.")
    info_hold: Duration = Field(default=_HOUR, ge=0, description="How long a single failed start shows.")
    ticket_hold: Duration = Field(default=_HOUR, ge=0, description="How long a ticket stands after a start succeeded.")


class StartupOom:
    """The engine ran out of memory before it served: by its log, whose word goes before all others.

    Of starts that no log tells of, pages and processes do: memory climbs and vanishes without a page. The cause is not
    known then, and the evidence says so, unless a probe inside a worker told of an allocation that failed in such a
    start. About 12 KiB.
    """

    verdict = "startup-oom"

    def __init__(self, subject: Subject, settings: StartupOomSettings) -> None:
        self.subject = subject
        self.settings = settings
        self._starts = Starts(subject.engine or "")
        self._failed: deque[FailedStart] = deque(maxlen=_KEPT)  # since a page was last answered
        self._standing = Standing(ticket_s=settings.ticket_hold)
        self._last: FailedStart | None = None
        self._told: float | None = None  # when the log last told of a start
        self._ran_out: list[Shortage] = []  # of the last start that ran out by its log
        self._ran_out_starts = 0  # in a row
        self._inside: Shortage | None = None  # the last failure that a probe told of before the engine served

    def observe(self, sample: Sample) -> None:
        """Count failed starts until one succeeds."""
        if isinstance(sample, LogSample):
            if sample.start is not None:
                self._told = sample.start.last
            if isinstance(sample.news, Shortage) and sample.news.serving is False:
                self._told_of(sample.news)
            elif isinstance(sample.news, Ended) and sample.news.ready is None and sample.start is not None:
                for shortage in sample.start.shortages:  # that the end of the start showed to be of it
                    if shortage.serving is False and shortage not in self._ran_out:
                        self._told_of(shortage)
            return
        if isinstance(sample, AllocatorSample):
            inside = failed_inside(sample)
            if inside is not None and not inside.serving:
                self._inside = inside
        self._note(self._starts.observe(sample))
        if isinstance(sample, EngineSample) and sample.state in ANSWERED and sample.state != "dead":
            self._failed.clear()
            self._ran_out_starts = 0

    def _told_of(self, shortage: Shortage) -> None:
        if not self._ran_out or shortage.t - self._ran_out[-1].t > SAME_FAILURE:
            self._ran_out = []
            self._ran_out_starts += 1
        if len(self._ran_out) < _KEPT:
            self._ran_out.append(shortage)

    def _note(self, failed: FailedStart | None) -> None:
        if failed is None or (self._told is not None and self._told >= failed.t - failed.seconds - SAME_FAILURE):
            return  # none, or one of which the log has told what there is to tell
        inside = self._inside
        if inside is not None and failed.t - failed.seconds <= inside.t <= failed.t + SAME_FAILURE:
            self._told_of(inside)
        self._failed.append(failed)
        self._last = failed

    def conclude(self, t: float) -> Finding:
        """Judge the failed starts since the last page."""
        self._note(self._starts.settle(t))
        return self._standing.settle(t, self._now(t))

    def _by_log(self, t: float) -> Finding | None:
        if not self._ran_out or not self._ran_out_starts or t - self._ran_out[-1].t > self.settings.within:
            return None
        first, count = self._ran_out[0], self._ran_out_starts
        cause = cause_of(first.error)
        evidence = {**shortage_evidence(self._ran_out, cause), "failed_starts": count, "last_failure": first.t}
        times = f", {count} times in a row" if count > 1 else ""
        step = f" {STEP_WORDS[first.step]}" if first.step is not None else " while starting"
        summary = (
            f"{self.subject.engine} ran out of memory{step}{times}, the last {units.ago(first.t, t)}: "
            f"{shortage_text(first, cause)}."
        )
        return Finding("ticket", max(0.8, cause.confidence), summary, evidence, killer=cause.killer)

    def _now(self, t: float) -> Finding:
        told = self._by_log(t)
        if told is not None:
            return told
        last = self._last
        if not self._starts.seen:
            return CLEAR if self._told is not None else unknown("the engine has not been seen yet")
        if last is None or t - last.t > self.settings.within:
            return CLEAR
        recent = [failed for failed in self._failed if t - failed.t <= self.settings.within]
        climbed = [failed for failed in recent if failed.sure and (failed.peak or 0) >= self.settings.climbs_to]
        if len(climbed) < self.settings.ticket_after and t - last.t > self.settings.info_hold:
            return CLEAR
        state: State = "ticket" if len(climbed) >= self.settings.ticket_after else "info"
        count = max(1, len(recent))
        evidence: dict[str, float | int | str | list[int] | list[str]] = {
            "failed_starts": count,
            "last_failure": last.t,
            "start_seconds": last.seconds,
            "cause": "unknown",
        }
        numbers = {
            "peak_bytes": last.peak,
            "least_free_bytes": last.least_free,
            "total_bytes": last.total,
        }
        evidence |= {name: value for name, value in numbers.items() if value is not None}
        times = "A start" if count == 1 else f"{count} starts in a row"
        summary = f"{times} of {self.subject.engine} failed without a page, the last {units.ago(last.t, t)} after "
        summary += f"{units.duration(last.seconds)}"
        if last.peak is not None:
            summary += f", at {units.size(last.peak)} of device memory"
        if last.least_free is not None:
            summary += f" with {units.size(last.least_free)} free"
        return Finding(state, self._confidence(last), f"{summary}. Its log tells the cause.", evidence)

    def _confidence(self, failed: FailedStart) -> float:
        if failed.least_free is None or not failed.total:
            return 0.2
        return 0.5 if failed.least_free < self.settings.tight_ratio * failed.total else 0.3


# --- crash-loop --------------------------------------------------------------------------------------------------


class CrashLoopSettings(Section):
    """How often an engine may die."""

    deaths: int = Field(default=3, ge=2, description="Deaths within the time that page.")
    within: Duration = Field(default=6 * _HOUR, gt=0, description="The time for a page.")
    ticket_within: Duration = Field(
        default=24 * _HOUR, gt=0, description="The time in which as many deaths are a ticket."
    )
    least_survival: Duration = Field(
        default=_HOUR,
        gt=0,
        description="A loop is over when the engine lives twice its period, and this long at least.",
    )


@dataclass
class _Death:
    """The end of a life. ``had_work`` None where the last page does not tell; ``start``: it never answered."""

    t: float
    start: bool
    had_work: bool | None
    certain: bool  # a process was seen to end, or another life followed


_Shape = tuple[object, ...]


class CrashLoop:
    """The same engine dies again and again: one incident with its count and period.

    A life ends when the engine's page is refused for a minute or its processes end; a start that fails is one as well.
    Not counted is an end after which another version or other settings came up, and of a series of failed starts the
    stop before it. Ends of an engine without work look like stops: those alone never page. About 10 KiB.
    """

    verdict = "crash-loop"

    def __init__(self, subject: Subject, settings: CrashLoopSettings) -> None:
        self.subject = subject
        self.settings = settings
        self._starts = Starts(subject.engine or "")
        self._service = Service()
        self._deaths: deque[_Death] = deque(maxlen=_KEPT)
        self._life: float | None = None  # since when the present life is ready, as its pages tell
        self._followed: float | None = None  # the life whose end has not been counted yet, or was the last to be
        self._alive = False
        self._pids: set[int] = set()
        self._had_work: bool | None = None
        self._shape: _Shape | None = None
        self._shape_is_new = False
        self._worst: State = "clear"
        self._told_end: float | None = None  # the last end that the log told of
        self._told_life: float | None = None  # the life that ended then, whose front end may go on answering

    def observe(self, sample: Sample) -> None:
        """Follow lives and count their ends."""
        if isinstance(sample, LogSample):
            self._told(sample.news)
            if sample.start is not None and self._told_end is not None and sample.start.since > self._told_end:
                self._told_life = None  # another start has begun
            return
        self._failed(self._starts.observe(sample))
        match sample:
            case RankSample():
                self._service.observe(sample)
                self._life = sample.ready_since
            case EngineSample():
                self._service.observe(sample)
                if sample.state in ANSWERED and sample.state != "dead":
                    self._answered(sample)
                else:
                    self._told_life = None  # what answers next is no front end of a dead engine
                    if sample.state in ("dead", "gone"):
                        self._die(sample.t, certain=True)
            case HostSample() if self._alive:
                self._pids.add(sample.process.pid)
            case ProcessEnd():
                self._went(sample.t, sample.pid)

    def _told(self, news: News | None) -> None:
        if not isinstance(news, (Ended, Refusal)):
            return
        t = news.t
        if self._told_end is not None and abs(t - self._told_end) <= SAME_FAILURE:
            return  # a refusal and the end that follows
        if self._alive and self._followed is not None:
            self._told_end, self._told_life = t, self._followed
            self._die(t, certain=True)
        elif not self._deaths or t - self._deaths[-1].t > SAME_FAILURE:
            self._told_end = t
            self._deaths.append(_Death(t, start=True, had_work=None, certain=True))

    def _failed(self, failed: FailedStart | None) -> None:
        if failed is None or not failed.sure:
            return
        if self._told_end is not None and failed.t - failed.seconds <= self._told_end <= failed.t + SAME_FAILURE:
            return  # the log has told of it
        self._deaths.append(_Death(failed.t, start=True, had_work=None, certain=True))

    def _answered(self, sample: EngineSample) -> None:
        if self._told_life is not None and self._life == self._told_life:
            return
        another = self._followed is not None and self._life != self._followed
        if another:
            self._die(sample.t, certain=True)
        elif not self._alive and self._deaths and not self._deaths[-1].start and not self._deaths[-1].certain:
            self._deaths.pop()  # it was away, and the same life has come back
        self._shape_is_new |= another or not self._alive
        self._followed, self._alive = self._life, True
        self._pids = set(sample.pids)
        self._had_work = self._service.had_work
        if sample.state == "ok":
            self._compare(_shape(sample))

    def _compare(self, shape: _Shape) -> None:
        if self._shape_is_new and self._shape is not None and shape != self._shape:
            last = next((death for death in reversed(self._deaths) if not death.start), None)
            if last is not None:
                self._deaths.remove(last)
        self._shape, self._shape_is_new = shape, False

    def _went(self, t: float, pid: int) -> None:
        if pid not in self._pids:
            return
        self._pids.discard(pid)
        if self._service.refused_since is not None or not self._pids:
            self._die(t, certain=True)

    def _die(self, t: float, *, certain: bool) -> None:
        if self._alive:
            self._alive = False
            self._deaths.append(_Death(t, start=False, had_work=self._had_work, certain=certain))

    def conclude(self, t: float) -> Finding:
        """Count the deaths within the times."""
        self._failed(self._starts.settle(t))
        if self._service.down(t) and self._service.refused_since is not None:
            self._die(self._service.refused_since, certain=False)
        if self._deaths and t - self._deaths[-1].t > self._survival():
            self._deaths.clear()
            self._worst = "clear"
        if not self._starts.seen and self._told_end is None:
            return unknown("the engine has not been seen yet")
        state = self._state(t)
        # A loop whose deaths lie further apart than it took to tell is the same loop still.
        self._worst = max(self._worst, state, key=lambda one: LEVEL[one])
        return CLEAR if self._worst == "clear" else self._finding(t, self._worst)

    def _state(self, t: float) -> State:
        recent = [death for death in self._deaths if t - death.t <= self.settings.within]
        if _count(recent) >= self.settings.deaths:
            return "ticket" if all(death.had_work is False for death in recent) else "page"
        day = [death for death in self._deaths if t - death.t <= self.settings.ticket_within]
        if _count(day) >= self.settings.deaths:
            return "ticket"
        return "info" if _count(recent) >= 2 else "clear"

    def _period(self) -> float | None:
        times = [death.t for death in self._deaths]
        return median([later - earlier for earlier, later in pairwise(times)]) if times[1:] else None

    def _survival(self) -> float:
        period = self._period()
        if period is None:
            return self.settings.ticket_within
        return min(self.settings.ticket_within, max(self.settings.least_survival, 2 * period))

    def _finding(self, t: float, state: State) -> Finding:
        deaths = list(self._deaths)
        period = self._period() or 0.0
        starts = sum(death.start for death in deaths)
        evidence: Evidence = {
            "deaths": len(deaths),
            "failed_starts": starts,
            "period_seconds": period,
            "first_death": deaths[0].t,
            "last_death": deaths[-1].t,
        }
        of_starts = f", {starts} of them before it answered" if starts else ""
        summary = (
            f"{self.subject.engine} has died {len(deaths)} times{of_starts} within "
            f"{units.duration(deaths[-1].t - deaths[0].t)}, about every {units.duration(period)}; "
            f"the last time {units.ago(deaths[-1].t, t)}."
        )
        return Finding(state, 0.9 if state == "page" else 0.7, summary, evidence)


def _count(deaths: list[_Death]) -> int:
    """How many deaths speak for a loop: where starts fail after a life, that life may have been ended on purpose."""
    starts = sum(death.start for death in deaths)
    lives = len(deaths) - starts
    return max(starts, lives, starts + lives - 1) if starts and lives else len(deaths)


def _shape(sample: EngineSample) -> _Shape:
    """What makes an engine the same one after a restart: version, settings, and which series its version shows."""
    return sample.facts.vllm_version, tuple(_rank_shape(rank) for rank in sample.ranks)


def _rank_shape(rank: RankReading) -> _Shape:
    return (
        known(rank.gpu_memory_utilization),
        known(rank.prefix_caching),
        known(rank.pool.block_size),
        isinstance(rank.waiting_capacity, Absent),
        isinstance(rank.sleep_level, Absent),
    )
