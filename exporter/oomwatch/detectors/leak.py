"""The leak killer: KV blocks that no request owns, device memory and host memory that only grow."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from pydantic import Field

from oomwatch import units
from oomwatch.detectors.base import (
    LEVEL,
    AllocatorSample,
    Eta,
    Evidence,
    Finding,
    HeldSample,
    HostSample,
    OwnersSample,
    RankSample,
    Sample,
    State,
    Subject,
    unknown,
)
from oomwatch.detectors.rates import MAX_GAP_S
from oomwatch.detectors.standing import Standing
from oomwatch.detectors.statistics import (
    BinnedFloors,
    DailyQuantiles,
    DifferenceSlope,
    Forgetting,
    Point,
    SlidingFloor,
    SurpriseSteps,
    Thinned,
    Trend,
    halved,
    ratchet,
    seconds_until,
    theil_sen,
)
from oomwatch.observations import AllocatorReport, BlockOwners, Maybe, RankReading, known
from oomwatch.settings import Duration, Section, Size

MIB = 1 << 20
GIB = 1 << 30
HOUR = 3600.0
DAY = 24 * HOUR


class _Freshness:
    """When the last reading came, and whether that is recent for how often readings come."""

    _LONGEST = HOUR

    def __init__(self, stale_after: float) -> None:
        self._stale_after = stale_after
        self._interval = 0.0
        self.t: float | None = None

    def add(self, t: float) -> None:
        if self.t is not None:
            self._interval = t - self.t
        self.t = t

    def reason(self, t: float) -> str:
        """Why nothing is known at ``t``, empty when the reading is fresh."""
        if self.t is None:
            return "no reading yet"
        limit = max(self._stale_after, min(3 * self._interval, self._LONGEST))
        return "no fresh reading" if t - self.t > limit else ""


# --- KV blocks ---------------------------------------------------------------------------------------------------


class KvBlockLeakSettings(Section):
    """When blocks of the KV pool count as lost. Shares are of the pool's usable blocks."""

    ticket_share: float = Field(0.03, ge=0, le=1, description="Share of the pool that is surely lost, for a ticket.")
    page_share: float = Field(0.15, ge=0, le=1, description="Share of the pool that is surely lost, for a page.")
    page_growing_share: float = Field(
        0.05, ge=0, le=1, description="Share that is surely lost, for a page when the rest will be soon."
    )
    page_within: Duration = Field(
        12 * HOUR, gt=0, description="A growing loss pages when the pool is gone within this time."
    )
    connector_ticket_share: float = Field(
        0.45, ge=0, le=1, description="As ticket_share, where a KV connector may hold blocks by right."
    )
    connector_page_share: float = Field(
        0.50, ge=0, le=1, description="As page_share, where a KV connector may hold blocks by right."
    )
    hold_time: Duration = Field(
        600.0, gt=0, description="Longest time that a KV connector holds a finished request's blocks by right."
    )
    confirm_within: Duration = Field(
        HOUR, gt=0, description="Two readings at most this far apart confirm each other: one alone proves nothing."
    )
    wedge_share: float = Field(
        0.30, ge=0, le=1, description="Share in use while nothing runs and requests wait, for a page."
    )
    wedge_time: Duration = Field(120.0, gt=0, description="How long that has to last, with every counter still.")
    low_load_quantile: float = Field(
        0.2, gt=0, le=0.5, description="Readings with at most this quantile of the day's running requests are low load."
    )
    low_load_memory: Duration = Field(DAY, gt=0, description="How far back the quantile and the noise look.")
    low_load_windows: tuple[float, ...] = Field(
        (600.0, 3600.0, 21600.0), description="Widths in seconds of the windows whose floors have to rise."
    )
    low_load_rises: tuple[float, ...] = Field(
        (0.20, 0.10, 0.08), description="Share by which the floors have to rise in all, one for each width."
    )
    low_load_ticket_share: float = Field(0.05, ge=0, le=1, description="Floor under low load, for a ticket.")
    low_load_page_share: float = Field(0.25, ge=0, le=1, description="Floor under low load, for a page.")
    low_load_sigmas: float = Field(4.0, ge=0, description="How many deviations of the noise the rise has to exceed.")
    unusual_for: Duration = Field(
        600.0, gt=0, description="How long more blocks have to be in use than so many running requests usually own."
    )
    unusual_ticket_times: float = Field(
        1.5, ge=1, description="Blocks beyond this many times what requests usually own count, for a ticket."
    )
    unusual_ticket_share: float = Field(0.2, ge=0, le=1, description="Share in use beyond that, for a ticket.")
    unusual_page_times: float = Field(
        2.0, ge=1, description="As unusual_ticket_times, for a page without a loss that is known otherwise."
    )
    unusual_page_share: float = Field(0.3, ge=0, le=1, description="Share in use beyond that, for a page.")
    proof_stale_after: Duration = Field(
        120.0, gt=0, description="The probe's count of owners decides unless it is older than this."
    )
    stale_after: Duration = Field(300.0, gt=0, description="Without a reading for so long nothing is known.")
    page_hold: Duration = Field(900.0, ge=0, description="How long a page stands after its condition ended.")
    ticket_hold: Duration = Field(HOUR, ge=0, description="How long a ticket stands after its condition ended.")


_STEPS = 4  # floors that have to rise, one after the other
_RISE_TOLERANCE = 0.002  # of the pool: less is no rise
_AT_IDLE = "idle"
_BY_REQUESTS = "more than all requests can own"
_UNUSUAL = "more than requests usually own"
_LEAST_RISES = 3  # of what is lost for sure, to speak of growth: one loss is an accident
_LOOK_BACK = 10  # windows among which the rising ones are looked for
_REFRESH = 60.0  # seconds after which the numbers of a finding are made anew though nothing has changed
_FROZEN = 120.0  # seconds without a token while requests run, after which a page does not show the present
_GROUPS = 3  # at most, of blocks that one token takes in models with several kinds of attention
_HOLDS = 3  # times the hold time: a floor over so long is no connector's
_FEW = 10  # requests, below which their mean length tells little of what they own
_MEMORY_WINDOWS = 24  # widths of a window, among whose readings quiet ones are looked for
_LEAST_PAIRS = 200  # of readings between which requests came or went, to know what one usually owns
_LARGEST_GAP = 120.0  # between two readings whose difference still tells how blocks follow requests


@dataclass
class _LowLoadLeak:
    """What the floors under low load say: the share that seems lost, and its growth."""

    floor: float
    rise: float
    trend: Trend | None
    width: float
    t: float


class _QuietReadings:
    """Which readings have few running requests, by the quantile of those of the last ``memory`` seconds."""

    def __init__(self, share: float, memory: float) -> None:
        self._share = share
        self._running = DailyQuantiles(memory)
        self._most = 0.0
        self._renewed = -math.inf

    def add(self, t: float, running: float) -> bool:
        """Take in a reading; whether it is a quiet one."""
        self._running.add(t, running)
        if t - self._renewed >= _REFRESH:
            self._most, self._renewed = self._running.quantile(self._share) or 0.0, t
        return running <= self._most


class _Scale:
    """Floors of quiet readings in windows of one width, and the noise of such readings."""

    def __init__(self, width: float, rise: float, memory: float) -> None:
        self.floors = BinnedFloors(width, _LOOK_BACK)
        self.rise = rise
        self._hourly = Forgetting(min(memory, HOUR))
        self._noise = Forgetting(memory)

    def add(self, t: float, rest: float) -> bool:
        """Take in what a quiet reading leaves unexplained; whether a window closed."""
        self._hourly.add(t, rest)
        self._noise.add(t, rest - self._hourly.mean)
        return self.floors.add(t, rest) is not None

    def leak(self, t: float, sigmas: float) -> _LowLoadLeak | None:
        """What the last floors come to, None when they do not rise one after the other, or by too little."""
        points = self.floors.floors()
        values = [value for _, value in points]
        if not ratchet(values, _STEPS, max(self.rise, sigmas * self._noise.deviation), _RISE_TOLERANCE):
            return None
        trend = theil_sen(points[-_STEPS:])
        return _LowLoadLeak(values[-1], values[-1] - values[-_STEPS], trend, self.floors.width, t)


class _RequestLength:
    """How much longer finished requests are of late than those that the blocks of a request were learnt from."""

    def __init__(self, memory: float) -> None:
        self._late = Forgetting(min(HOUR, memory))
        self._learnt = Forgetting(memory)
        self._last: tuple[float, float] | None = None

    def add(self, t: float, reading: RankReading, learning: bool) -> None:
        """Take in the counters of finished requests, where there are any."""
        prompt, generated = known(reading.request_prompt_tokens), known(reading.request_generation_tokens)
        finished = known(reading.finished)
        if prompt is None or generated is None or finished is None:
            return
        total = (prompt + generated, sum(finished.values()))
        last, self._last = self._last, total
        if last is not None and total[1] > last[1] and total[0] >= last[0]:
            mean = (total[0] - last[0]) / (total[1] - last[1])
            self._late.add(t, mean)
            if learning:
                self._learnt.add(t, mean)

    @property
    def growth(self) -> float:
        """A factor of at least 1."""
        return max(1.0, self._late.mean / self._learnt.mean) if self._learnt.mean > 0 else 1.0


class _LengthOfLate:
    """How much longer requests are of late than those of the time that blocks were learnt from, running ones included.

    Long before requests that are longer than ever finish, their prompts are computed and their tokens come out.
    """

    _LATE_S = 300.0

    def __init__(self, memory: float) -> None:
        self._last: tuple[float, float, float, float, float] | None = None
        self._prompts = _FadingRatio(self._LATE_S, memory)
        self._generations = _FadingRatio(self._LATE_S, memory)

    def add(self, t: float, reading: RankReading) -> None:
        """Take in the counters of tokens, and how many requests were admitted and finished."""
        prompt, generated = known(reading.prompt_tokens), known(reading.generation_tokens)
        by_reason, running = known(reading.finished), known(reading.running)
        if prompt is None or generated is None or by_reason is None or running is None:
            return
        finished = sum(by_reason.values())
        last, self._last = self._last, (t, prompt, generated, running, finished)
        if last is None:
            return
        seconds, more_prompt, more_generated, more_running, more_finished = (
            now - before for now, before in zip(self._last, last, strict=True)
        )
        if more_prompt >= 0 and more_generated >= 0:
            self._prompts.add(seconds, more_prompt, more_finished + more_running)
            self._generations.add(seconds, more_generated, more_finished)

    @property
    def growth(self) -> float:
        """A factor of at least 1."""
        return max(1.0, self._prompts.growth, self._generations.growth)


class _FadingRatio:
    """The ratio of two sums that fade, of late and since long."""

    def __init__(self, late: float, long: float) -> None:
        self._spans = (late, long)
        self._sums = [[0.0, 0.0], [0.0, 0.0]]

    def add(self, seconds: float, upper: float, lower: float) -> None:
        for span, sums in zip(self._spans, self._sums, strict=True):
            keep = math.exp(-seconds / span)
            sums[0] = sums[0] * keep + upper
            sums[1] = sums[1] * keep + lower

    @property
    def growth(self) -> float:
        """The ratio of late to that since long: 1 where next to nothing came since long, as if one had come of late."""
        (upper, lower), (usual, count) = self._sums
        return upper / max(1.0, lower) / (usual / count) if count >= 1 and usual > 0 else 1.0


class _Unusual:
    """What is in use beyond a multiple of what so many running requests usually own, for as long as they are served.

    Shares of the pool. Those that run now may be longer than usual; they are not for long, while others come and go.
    """

    def __init__(self, times: float, span: float) -> None:
        self.times = times
        self.span = span
        self._floor = SlidingFloor(span)
        self._history = Thinned(span / 10)
        self._last: float | None = None

    def add(self, t: float, used: float, each: float, running: float) -> None:
        """Take in a reading; a gap between two begins anew."""
        if self._last is not None and t - self._last > MAX_GAP_S:
            self._floor.clear()
        self._last = t
        self._floor.add(t, used - self.times * each * max(running, _FEW / 2))
        floor = self.floor(t)
        if floor is None or floor <= 0:
            self._history.clear()
        else:
            self._history.add(t, floor)

    def floor(self, t: float) -> float | None:
        """What it was at least in the whole span; None while less is known."""
        return self._floor.value(t) if self._floor.full(t) else None

    def trend(self) -> Trend | None:
        """How the floor has grown since it was above 0."""
        return _growth(self._history.points)


class _LowLoad:
    """Floors of what running requests do not explain, for engines that are never idle. Shares of the pool.

    Used blocks follow running requests by a factor that differences of neighbouring readings give, and that grows with
    the length of requests; what is left has a floor when few requests run. Traffic moves that floor up and down; a leak
    only up. Short windows look for quiet readings among those of the last hours, so that a leak of a busy day need not
    wait for the night.
    """

    def __init__(self, settings: KvBlockLeakSettings) -> None:
        self._sigmas = settings.low_load_sigmas
        memory = settings.low_load_memory
        self._factor = DifferenceSlope(memory, _LARGEST_GAP)
        self._length = _RequestLength(memory)
        self._quiet: dict[float, _QuietReadings] = {}
        self._scales: list[tuple[float, _Scale]] = []
        for width, rise in zip(settings.low_load_windows, settings.low_load_rises, strict=True):
            span = min(memory, _MEMORY_WINDOWS * width)
            self._quiet.setdefault(span, _QuietReadings(settings.low_load_quantile, span))
            self._scales.append((span, _Scale(width, rise, span)))
        self.leak: _LowLoadLeak | None = None
        self._of_late = _LengthOfLate(memory)
        self.unusual = _Unusual(settings.unusual_ticket_times, settings.unusual_for)
        self.very_unusual = _Unusual(settings.unusual_page_times, settings.unusual_for)
        self.outlasting = _Unusual(settings.unusual_page_times, _HOLDS * settings.hold_time)

    def add(self, t: float, used: float, reading: RankReading, longest: float | None) -> bool:
        """Take in a reading; whether it may have changed what is concluded. ``longest`` request's share of the pool."""
        before = self.leak
        if before is not None and used < 0.8 * before.floor:
            self.leak = None  # less in use than seemed lost
        running = known(reading.running) or 0.0
        waiting = bool(known(reading.waiting))
        self._length.add(t, reading, learning=not waiting)
        self._of_late.add(t, reading)
        if not waiting:
            self._factor.add(t, running, used)  # in a full pool blocks do not follow requests
        quiet = {span: readings.add(t, running) for span, readings in self._quiet.items()}
        factor = self._factor.slope
        if factor is None:
            return self.leak is not before
        each = max(0.0, factor) * self._length.growth
        self._follow_unusual(t, used, max(each, max(0.0, factor) * self._of_late.growth), running)
        rest = used - self._owned(each, running, longest)
        for index, (span, scale) in enumerate(self._scales):
            if waiting and index == 0:
                continue  # an overfull pool wavers within minutes as requests push each other out
            if quiet[span] and scale.add(t, rest):
                self.leak = scale.leak(t, self._sigmas) or self.leak
        return self.leak is not before

    def _follow_unusual(self, t: float, used: float, each: float, running: float) -> None:
        if self._factor.pairs >= _LEAST_PAIRS:
            for unusual in (self.unusual, self.very_unusual, self.outlasting):
                unusual.add(t, used, each, running)

    def _owned(self, each: float, running: float, longest: float | None) -> float:
        """What requests own by their number; a few may be much longer than the mean, but not than the longest."""
        if running >= _FEW:
            return each * running
        most = running * longest if longest is not None else math.inf
        return min(most, each * _FEW) if running else 0.0

    @property
    def windows(self) -> int:
        """How many floors there are at the finest scale."""
        return len(self._scales[0][1].floors.closed)


class _Proof:
    """Blocks that the engine core itself finds to be nobody's, by the probe inside it. Shares of the pool.

    Two counts confirm each other: what one of them missed is in neither.
    """

    def __init__(self, settings: KvBlockLeakSettings) -> None:
        self._stale_after = settings.proof_stale_after
        self._before: BlockOwners | None = None
        self._history = Thinned(settings.confirm_within / 60)
        self.owners: BlockOwners | None = None
        self.share = 0.0
        self.trend: Trend | None = None

    def add(self, owners: BlockOwners) -> None:
        """Take in a count; one that was told before tells nothing new."""
        if owners.ownerless is None or not owners.total or (self.owners and owners.counted <= self.owners.counted):
            return
        self._before, self.owners = self.owners, owners
        sure = min(owners.ownerless, (self._before.ownerless or 0) if self._before else 0)
        self.share = sure / owners.total
        if not sure:
            self._history.clear()
            self.trend = None
        elif self._history.add(owners.counted, self.share):
            self.trend = _growth(self._history.points)

    def stands(self, t: float) -> bool:
        """Whether there are two counts, and the latest is of now."""
        return self._before is not None and self.owners is not None and t - self.owners.counted <= self._stale_after


class KvBlockLeak:
    """Blocks that no request owns: they are lost until the engine restarts.

    Physics first: with nothing running, used blocks must be 0, and R running requests of at most L tokens cannot own
    more than R x L tokens; what is used beyond that is owned by nobody. Both give a lower bound for the loss, at once
    and without any trend. Every reading is an upper bound, so a loss that traffic undercuts is taken back. Engines
    that are never so quiet are judged by their floors under low load. Where a KV connector holds blocks of finished
    requests by right, the loss is what stays for longer than it may hold them. About 70 KB per rank.
    """

    verdict = "kv-block-leak"

    def __init__(self, subject: Subject, settings: KvBlockLeakSettings) -> None:
        self.subject = subject
        self.settings = settings
        self._standing = Standing(settings.page_hold, settings.ticket_hold)
        self._segment: int | None = None
        self._freshness = _Freshness(settings.stale_after)
        self._clear()

    def _clear(self) -> None:
        """A new life: blocks that were lost are free again."""
        settings = self.settings
        self._standing.reset()
        self._finding: Finding | None = None
        self._judged = -math.inf
        self._missing = ""
        self._asleep = False
        self._connector = False
        self._reclaims = False
        self._reclaimed_from = 0.0
        self._blocks: int | None = None
        self._lost = 0.0  # share that is lost for sure
        self._how = ""
        self._bound_holds = True  # until blocks come back that requests seemed unable to own
        self._candidate: Point | None = None
        self._beyond_holds = SlidingFloor(_HOLDS * settings.hold_time)
        self._idle_times: deque[float] = deque()
        self._history = Thinned(settings.confirm_within / 60)
        self._trend: Trend | None = None
        self._low_load = _LowLoad(settings)
        self._proof = _Proof(settings)
        self._ruled_out: float | None = None  # when a reading last showed that next to nothing is lost
        self._idle_since: float | None = None
        self._idle_floor: float | None = None
        self._progress: tuple[float | None, ...] = ()
        self._moved: float | None = None
        self._wedged_since: float | None = None
        self._wedged = 0.0
        self._running = 0.0
        self._since: float | None = None

    # --- readings ------------------------------------------------------------------------------------------------

    def observe(self, sample: Sample) -> None:
        """Takes in readings of its rank, and counts of its blocks; everything else tells it nothing."""
        if not isinstance(sample, (RankSample, OwnersSample)):
            return
        if sample.segment != self._segment:
            self._clear()
            self._segment = sample.segment
        if isinstance(sample, OwnersSample):
            self._count(sample)
            return
        t, reading = sample.t, sample.reading
        self._freshness.add(t)
        self._asleep = sample.asleep
        used, running, waiting = _share(reading), known(reading.running), known(reading.waiting)
        self._missing = _what_is_missing(used, running, waiting)
        if used is None or running is None or waiting is None or self._asleep:
            return
        if self._since is None:
            self._since = t
            self._finding = None
        self._blocks = known(reading.pool.blocks)
        self._connector = sample.kv_connector
        self._running = running
        waiting += known(reading.swapped) or 0.0
        self._take_in(t, used, running, waiting, sample)

    def _count(self, sample: OwnersSample) -> None:
        if self._proof.owners is not None and self._proof.owners.pid != sample.owners.pid:
            self._clear()
        self._proof.add(sample.owners)

    def _take_in(self, t: float, used: float, running: float, waiting: float, sample: RankSample) -> None:
        self._follow_progress(t, sample.reading)
        self._undercut(used)
        if used < self.settings.ticket_share:
            self._ruled_out = t
        self._follow_idle(t, used, running + waiting == 0)
        self._follow_wedge(t, used, running, waiting, sample.reading)
        if self._holding:
            self._beyond_holds.add(t, used)
        if running > 0 and self._moved is not None and t - self._moved > _FROZEN:
            return  # before 0.10.2 gauges stay as they were when an abort empties the engine, and a hung one freezes
        longest = _share_of_longest(sample)
        owned = self._most_owned(running, waiting, sample, longest)
        if owned is not None:
            self._bound(t, used - owned, owned == 0)
        if self._low_load.add(t, used, sample.reading, longest):
            self._finding = None

    @property
    def _holding(self) -> bool:
        """Whether blocks may be held by right although no request runs."""
        return self._connector or self._reclaims

    def _follow_progress(self, t: float, reading: RankReading) -> None:
        finished = known(reading.finished)
        progress = (
            known(reading.prompt_tokens),
            known(reading.generation_tokens),
            known(reading.steps),
            sum(finished.values()) if finished is not None else None,
        )
        if progress != self._progress:
            self._progress, self._moved = progress, t

    def _undercut(self, used: float) -> None:
        """Less in use than seemed lost: blocks came back, which lost ones never do."""
        if self._candidate is not None and used < self._candidate[1]:
            self._candidate = (self._candidate[0], used)
        if used >= self._lost:
            return
        if self._how == _BY_REQUESTS:
            self._bound_holds = False
        elif self._lost - used > max(0.05, 0.5 * self._lost):
            self._reclaims = True
            self._reclaimed_from = max(self._reclaimed_from, self._lost)
            self._history.clear()
            self._trend = None
        self._finding = None
        self._lost = used

    def _follow_idle(self, t: float, used: float, idle: bool) -> None:
        if not idle:
            self._idle_since = None
            return
        if self._idle_since is None:
            self._idle_since = t
        self._idle_floor = used

    def _follow_wedge(self, t: float, used: float, running: float, waiting: float, reading: RankReading) -> None:
        """Nothing runs, requests wait, and the pool is not empty: what is used keeps the engine from serving."""
        waits_for_room = (known(reading.waiting_capacity) or 0.0) > 0 if self._holding else waiting > 0
        if running > 0 or not waits_for_room or used < self.settings.wedge_share:
            self._wedged_since = None
            return
        if self._wedged_since is None:
            self._wedged_since = t
        self._wedged = used

    def _most_owned(self, running: float, waiting: float, sample: RankSample, longest: float | None) -> float | None:
        """The largest share that the requests can own, None where that is not known. One request more is slack.

        Waiting requests own blocks only while a connector loads for them, which vLLM counts as deferred (0.20+).
        """
        deferred = known(sample.reading.waiting_deferred)
        if deferred is None:
            deferred = waiting if self._holding or not _told_of_connector(sample) else 0.0
        holders = running + deferred
        if holders == 0:
            return 0.0
        return None if longest is None or not self._bound_holds else (holders + 1) * longest

    def _bound(self, t: float, excess: float, idle: bool) -> None:
        """A reading in which at least ``excess`` belongs to no request."""
        if not self._holding:
            if excess <= 0 and not idle:
                return
            before, self._candidate = self._candidate, (t, excess)
            if before is None or not 0 < t - before[0] <= self.settings.confirm_within:
                return
            sure = min(before[1], excess)
        elif idle:
            sure = self._outlasting_holds(t)
        else:
            return
        if sure > self._lost:
            self._finding = None
            self._lost, self._how = sure, _AT_IDLE if idle else _BY_REQUESTS
        if not idle:
            return
        if self._lost <= _RISE_TOLERANCE:
            self._history.clear()  # the trend of a loss begins with it, not with the days without one
            self._trend = None
        if self._history.add(t, self._lost):
            self._trend = _growth(self._history.points)

    def _outlasting_holds(self, t: float) -> float:
        """What was never free between two idle readings that lie further apart than a connector may hold blocks."""
        times = self._idle_times
        if not times or t - times[-1] >= self.settings.hold_time / 20:
            times.append(t)
        while t - times[0] > _HOLDS * self.settings.hold_time:
            times.popleft()
        return (self._beyond_holds.value(t) or 0.0) if t - times[0] >= self.settings.hold_time else 0.0

    # --- conclusions ---------------------------------------------------------------------------------------------

    def conclude(self, t: float) -> Finding:
        """What stands at ``t``."""
        missing = self._freshness.reason(t) or ("asleep" if self._asleep else self._missing)
        if self._proof.stands(t):
            return self._standing.settle(t, self._proved(t, page=not missing))
        if missing:
            return unknown(missing)
        if self._finding is None or self._wedged_since is not None or t - self._judged >= _REFRESH:
            self._finding, self._judged = self._judge(t), t
        return self._standing.settle(t, self._finding)

    def _proved(self, t: float, *, page: bool) -> Finding:
        """By the count of owners.

        What is inferred says more only of a pool that keeps the engine from serving, and of blocks whose owners exist
        and never give them back.
        """
        proof, owners = self._proof, self._proof.owners
        assert owners is not None
        self._blocks = owners.total
        eta = self._eta(proof.share, proof.trend)
        state = self._state_of(proof.share, eta, holding=False)
        evidence = {
            **self._evidence(t, proof.trend),
            "floor_ratio": proof.share,
            "floor_blocks": round(proof.share * owners.total),
            "method": "owners",
            "living_blocks": owners.living,
            "finished_blocks": owners.finished,
        }
        if LEVEL[state] < LEVEL["page"] and page:
            if self._is_wedged(t):
                return self._wedge_finding(t, evidence)
            if self._may_be_held_for_ever(owners):
                inferred = self._judge(t)
                if LEVEL[inferred.state] > LEVEL[state]:
                    return inferred
        if not owners.ownerless:
            return Finding("clear", 1.0, "", evidence)
        shown: State = "info" if state == "clear" and proof.share else state
        return Finding(shown, 0.99, self._summary(proof.share, eta), evidence, eta)

    def _may_be_held_for_ever(self, owners: BlockOwners) -> bool:
        """Finished requests of a connector that never comes, or living ones although none runs and none waits."""
        if self._holding and owners.finished >= self.settings.connector_ticket_share * owners.total:
            return True
        idle = self._idle_since is not None and self._how == _AT_IDLE
        return idle and owners.living >= self.settings.ticket_share * owners.total

    def _judge(self, t: float) -> Finding:
        trend = self._trend
        eta = self._eta(self._lost, trend)
        certain = self._state_of(self._lost, eta, holding=self._holding)
        evidence = self._evidence(t, trend)
        if self._wedged_since is not None and self._is_wedged(t):
            return self._wedge_finding(t, evidence)
        low = self._low_load_state()
        unusual, found = self._unusual_state(t, certain, low)
        if LEVEL[unusual] > max(LEVEL[certain], LEVEL[low]):
            return self._unusual_finding(t, unusual, found, evidence)
        if LEVEL[low] > LEVEL[certain]:
            return self._low_load_finding(low, evidence)
        if certain == "clear":
            if self._nothing_known(t):
                return unknown("warming up", evidence)
            return Finding("clear", 1.0, "", evidence)
        return Finding(certain, self._confidence(), self._summary(self._lost, eta), evidence, eta)

    def _state_of(self, lost: float, eta: Eta | None, *, holding: bool) -> State:
        """The state of a share that is surely lost."""
        settings = self.settings
        ticket, page = settings.ticket_share, settings.page_share
        if holding:
            ticket, page = settings.connector_ticket_share, self._held_page_share
        soon = eta is not None and eta.high is not None and eta.seconds <= settings.page_within
        if lost >= page or (not holding and soon and lost >= settings.page_growing_share):
            return "page"
        if lost >= ticket:
            return "ticket"
        at_least = max(0.001, 1.5 / self._blocks) if self._blocks else 0.01
        return "info" if lost >= at_least and not holding else "clear"

    @property
    def _held_page_share(self) -> float:
        """What pages where blocks may be held by right: more than was ever given back."""
        page = self.settings.connector_page_share
        return max(page, 1.2 * self._reclaimed_from) if self._reclaims else page

    def _is_wedged(self, t: float) -> bool:
        if self._wedged_since is None or self._moved is None:
            return False
        needed = max(self.settings.wedge_time, self.settings.hold_time if self._holding else 0.0)
        return t - self._wedged_since >= needed and t - self._moved >= needed

    def _unusual_state(self, t: float, certain: State, low: State) -> tuple[State, _Unusual]:
        """What so many requests do not usually own: much of the pool, or less of it beside a loss known otherwise."""
        settings, load = self.settings, self._low_load
        if self._holding:
            share = load.outlasting.floor(t) or 0.0
            return "page" if share >= self._held_page_share else "clear", load.outlasting
        if (load.very_unusual.floor(t) or 0.0) >= settings.unusual_page_share:
            return "page", load.very_unusual
        page = 1.0
        if LEVEL[certain] >= LEVEL["ticket"]:
            page = settings.page_share
        elif LEVEL[low] >= LEVEL["ticket"]:
            page = settings.low_load_page_share
        share = load.unusual.floor(t) or 0.0
        state: State = "page" if share >= page else "ticket" if share >= settings.unusual_ticket_share else "clear"
        return state, load.unusual

    def _unusual_finding(self, t: float, state: State, found: _Unusual, evidence: Evidence) -> Finding:
        floor = found.floor(t) or 0.0
        eta = self._eta(floor, found.trend())
        summary = (
            f"{self._amount(floor)} ({units.ratio(floor)}) were in use for {units.duration(found.span)} beyond "
            f"{found.times:g} times what so many requests usually own{_until(eta)}."
        )
        return Finding(state, 0.8, summary, {**evidence, **self._inferred(floor, _UNUSUAL)}, eta)

    def _low_load_state(self) -> State:
        leak = self._low_load.leak
        if leak is None:
            return "clear"
        settings = self.settings
        ticket, page = settings.low_load_ticket_share, settings.low_load_page_share
        if self._holding:
            ticket, page = settings.connector_ticket_share, settings.connector_page_share
        eta = self._eta(leak.floor, leak.trend)
        soon = eta is not None and eta.seconds <= settings.page_within
        if leak.floor >= page and (soon or leak.floor >= 0.5):
            return "page"
        return "ticket" if leak.floor >= ticket else "clear"

    def _nothing_known(self, t: float) -> bool:
        """Neither a reading that rules a loss out nor enough floors."""
        ruled_out = self._ruled_out is not None and t - self._ruled_out <= self.settings.confirm_within
        return not ruled_out and self._idle_floor is None and self._low_load.windows < _STEPS

    def _eta(self, floor: float, trend: Trend | None) -> Eta | None:
        if trend is None:
            return None
        seconds = seconds_until(1.0, floor, trend.slope)
        if seconds is None:
            return None
        return Eta(seconds, seconds_until(1.0, floor, trend.high), seconds_until(1.0, floor, trend.low))

    def _confidence(self) -> float:
        return 0.6 if self._holding else 0.97

    def _evidence(self, t: float, trend: Trend | None) -> Evidence:
        evidence: dict[str, float | int | str | list[int] | list[str]] = {"floor_ratio": round(self._lost, 6)}
        if self._blocks:
            evidence["pool_blocks"] = self._blocks
            evidence["floor_blocks"] = round(max(0.0, self._lost) * self._blocks)
            if self._history.points:
                evidence["slope_blocks_per_hour"] = (trend.slope if trend else 0.0) * HOUR * self._blocks
        if self._idle_since is not None:
            evidence["idle_seconds"] = t - self._idle_since
        if self._since is not None:
            evidence["data_seconds"] = t - self._since
        if self._how:
            evidence["method"] = self._how
        return evidence

    def _inferred(self, floor: float, method: str) -> Evidence:
        """What takes the place of what is lost for sure."""
        found: dict[str, float | int | str] = {"floor_ratio": floor, "method": method}
        return {**found, "floor_blocks": round(floor * self._blocks)} if self._blocks else found

    def _amount(self, share: float) -> str:
        if self._blocks:
            return f"{units.count(round(share * self._blocks))} of {units.count(self._blocks)} KV blocks"
        return f"{units.ratio(share)} of the KV pool"

    def _summary(self, lost: float, eta: Eta | None) -> str:
        return f"{self._amount(lost)} ({units.ratio(lost)}) belong to no request{_until(eta)}."

    def _wedge_finding(self, t: float, evidence: Evidence) -> Finding:
        since = t - (self._wedged_since or t)
        return Finding(
            "page",
            0.95,
            f"{self._amount(self._wedged)} are taken while nothing runs, and requests have waited for "
            f"{units.duration(since)}: the engine serves no more.",
            {**evidence, "floor_ratio": self._wedged, "method": "wedge", "wedged_seconds": since},
            Eta(0.0),
        )

    def _low_load_finding(self, state: State, evidence: Evidence) -> Finding:
        leak = self._low_load.leak
        assert leak is not None
        eta = self._eta(leak.floor, leak.trend)
        return Finding(
            state,
            0.8,
            f"{self._amount(leak.floor)} stay taken when few requests run, {units.ratio(leak.rise)} of the pool more "
            f"than {units.duration(_STEPS * leak.width)} before.",
            {**evidence, **self._inferred(leak.floor, "low load")},
            eta,
        )


def _until(eta: Eta | None) -> str:
    return "" if eta is None else f"; at this pace the pool is gone in {units.duration(eta.seconds)}"


def _growth(points: Sequence[Point]) -> Trend | None:
    """The trend of what is lost, None before it has grown often enough to be called growth."""
    rises = sum(b[1] - a[1] > _RISE_TOLERANCE for a, b in pairwise(points))
    return theil_sen(points) if rises >= _LEAST_RISES else None


def _share(reading: RankReading) -> float | None:
    """Used blocks as a share of the usable ones, without vLLM's null block."""
    blocks, used = known(reading.pool.blocks), known(reading.pool.used)
    if blocks and used is not None:
        return used / blocks
    return known(reading.usage)


def _what_is_missing(used: float | None, running: float | None, waiting: float | None) -> str:
    if used is None:
        return "the page has no KV usage"
    if running is None or waiting is None:
        return "the page does not tell how many requests run and wait"
    return ""


def _told_of_connector(sample: RankSample) -> bool:
    """Whether it is known that there is a KV connector or none; before 0.11.1 no series tells."""
    return sample.facts.kv_connector is not None or known(sample.reading.external_prefix_queries) is not None


def _share_of_longest(sample: RankSample) -> float | None:
    """The most that one request takes of the pool: what vLLM says (0.24+), else by its tokens.

    Where a version does not tell the pool's tokens, a model may have several kinds of attention, each with blocks of
    its own for the same token (vllm/v1/core/kv_cache_utils.py).
    """
    pool = sample.reading.pool
    fit: Maybe[float] = pool.max_concurrency
    concurrency = known(fit)
    if concurrency:
        return 1.0 / concurrency
    longest, tokens = sample.facts.max_model_len, known(pool.tokens)
    if longest and tokens:
        return longest / tokens
    blocks, block_size = known(pool.blocks), known(pool.block_size)
    if longest and blocks and block_size:
        return _GROUPS * math.ceil(longest / block_size) / blocks
    return None


# --- memory of a process -----------------------------------------------------------------------------------------


class _LoadRecords:
    """When an engine last had more to do than ever before: more requests running, or prompts coming in faster."""

    _SHORTEST = 5.0  # seconds between two readings that a rate is taken from

    def __init__(self) -> None:
        self.last: float | None = None
        self.finished = 0.0
        self._running: dict[str, float] = {}
        self._rate: dict[str, float] = {}
        self._prompt: dict[str, Point] = {}
        self._finished: dict[str, float] = {}

    def add(self, sample: RankSample) -> None:
        rank, t = sample.rank, sample.t
        running = known(sample.reading.running)
        if running is not None and running > self._running.get(rank, 0.0):
            self._running[rank] = running
            self.last = t
        self._follow_prompts(rank, t, known(sample.reading.prompt_tokens))
        finished = known(sample.reading.finished)
        if finished is not None:
            total = sum(finished.values())
            self.finished += max(0.0, total - self._finished.get(rank, total))
            self._finished[rank] = total

    def _follow_prompts(self, rank: str, t: float, tokens: float | None) -> None:
        if tokens is None:
            return
        before = self._prompt.get(rank)
        if before is not None and t - before[0] < self._SHORTEST:
            return
        self._prompt[rank] = (t, tokens)
        if before is None or tokens <= before[1]:
            return
        rate = (tokens - before[1]) / (t - before[0])
        if rate > self._rate.get(rank, 0.0):
            self._rate[rank] = rate
            self.last = t


@dataclass(frozen=True)
class _Growth:
    """How a process' memory has grown since its warm-up, in bytes and seconds.

    ``trend`` is the middle one of several windows, ``fastest`` the steepest: by day a leak of requests is faster than
    its average. ``steady`` is false where it slows down or came in one jump, and where it has fallen by as much before.
    """

    grown: float
    trend: Trend
    fastest: Trend
    steps: int
    steady: bool
    first_step: float
    last_step: float

    def runs_out(self, room: float | None, within: float) -> bool:
        """Whether ``room`` bytes are full within so many seconds at the fastest pace, and at the usual in twice."""
        return room is not None and self.fastest.slope * within >= room and self.trend.slope * 2 * within >= room


_RECENT = 3  # bins whose lowest floor is what a process needs at least


class _GrowthTest:
    """Floors of a process' memory in bins, and whether they rise without an end that the load explains.

    A healthy process grows when it meets more load than ever, ever more rarely; a leak rises on and on. What counts is
    growth in bins without a record of load, in several steps, that does not slow down.
    """

    _LEAST_STEP = 8 * MIB
    _WINDOWS = (12, 24, 48)  # bins
    _LATE_SHARE = 0.43  # of the growth, in the later half of the time: a leak has half, what fills up has less

    def __init__(self, bin_width: float, least_steps: int) -> None:
        self._least_steps = least_steps
        self._bins = BinnedFloors(bin_width, 48)
        self._long = BinnedFloors(4 * bin_width, 48)
        self._steps = SurpriseSteps(self._LEAST_STEP, 48 * 4 * bin_width)
        self._history = Thinned(bin_width)
        self._peak = -math.inf
        self._drop = 0.0
        self.baseline: float | None = None
        self.growth: _Growth | None = None
        self.slope: float | None = None  # bytes per second of late, whether that is growth or not

    @property
    def floor(self) -> float | None:
        """The lowest value of the last bins, None before the first has closed."""
        last = list(self._bins.closed)[-_RECENT:]
        return min(one.low for one in last) if last else None

    @property
    def grown(self) -> float:
        """Bytes of growth since the warm-up that no record of load explains, and that are still there."""
        floor = self.floor
        return (
            0.0 if floor is None or self.baseline is None else max(0.0, min(self._steps.total, floor - self.baseline))
        )

    @property
    def steps(self) -> int:
        """How many steps there were of late."""
        return len(self._steps.steps)

    def evidence(self) -> dict[str, float | int | str | list[int] | list[str]]:
        """The numbers that a person can check, under the names that both memory leaks share."""
        evidence: dict[str, float | int | str | list[int] | list[str]] = {}
        if self.baseline is not None:
            evidence["baseline_bytes"] = int(self.baseline)
        if self.floor is not None:
            evidence["floor_bytes"] = int(self.floor)
        if self.floor is not None and self.baseline is not None:
            evidence["growth_bytes"] = int(self.grown)
            evidence["surprise_steps"] = self.steps
        if self.slope is not None:
            evidence["slope_bytes_per_hour"] = self.slope * HOUR
        return evidence

    def add(self, t: float, value: float, last_record: float | None) -> None:
        """Take in a value."""
        self._long.add(t, value)
        closed = self._bins.add(t, value)
        if closed is None:
            return
        width = self._bins.width
        begin = closed.index * width
        middle = begin + width / 2
        if self.baseline is None:
            self.baseline = closed.low
        explained = last_record is not None and begin - width <= last_record < begin + width
        self._steps.add(middle, closed.low, explained)
        self._peak = max(self._peak, closed.low)
        self._drop = max(self._drop, self._peak - closed.low)
        self._history.add(middle, closed.low)
        trends = self._trends()
        self.growth = self._judge(t, trends)
        self.slope = self.growth.trend.slope if self.growth else trends[-1].slope if trends else None

    def _judge(self, t: float, trends: list[Trend]) -> _Growth | None:
        steps, grown = self._steps.recent(t), self.grown
        trends = sorted((trend for trend in trends if trend.low > 0), key=lambda one: one.slope)
        if len(steps) < self._least_steps or not trends or grown <= 0:
            return None
        steady = self._keeps_on(steps) and max(rise for _, rise in steps) <= 0.6 * grown and grown >= 1.5 * self._drop
        return _Growth(grown, trends[len(trends) // 2], trends[-1], len(steps), steady, steps[0][0], steps[-1][0])

    def _trends(self) -> list[Trend]:
        fine, coarse = self._bins.floors(), self._long.floors()
        series = [fine[-n:] for n in self._WINDOWS if len(fine) >= n]
        series += [coarse[-n:] for n in self._WINDOWS[1:] if len(coarse) >= n]
        return [trend for points in series if (trend := theil_sen(halved(points), 0.9)) is not None]

    def _keeps_on(self, steps: list[Point]) -> bool:
        """Whether the later half of the time since the warm-up has its share of the growth, and of the steps.

        Of records of a series without drift, less than one is expected there.
        """
        points = self._history.points
        halfway = (points[0][0] + points[-1][0]) / 2
        middle = next(value for t, value in points if t >= halfway)
        total = points[-1][1] - points[0][1]
        late = sum(t >= halfway for t, _ in steps)
        return late >= self._least_steps and total > 0 and points[-1][1] - middle >= self._LATE_SHARE * total


_BIN = 900.0
_LEAST_SLEEP_RISE = 64 * MIB


class GpuMemoryLeakSettings(Section):
    """When the device memory of an engine's process counts as leaking."""

    ticket_growth: Size = Field(256 * MIB, ge=0, description="Growth after the warm-up, for a ticket.")
    ticket_growth_share: float = Field(
        0.005, ge=0, le=1, description="The same as a share of the device's memory; the larger of both counts."
    )
    page_within: Duration = Field(12 * HOUR, gt=0, description="The device is full within this time, for a page.")
    warm_up: Duration = Field(0.5 * HOUR, ge=0, description="What is allocated so soon after a start is no growth.")
    warm_up_requests: int = Field(1000, ge=0, description="Nor what comes before so many requests have finished …")
    warm_up_longest: Duration = Field(
        6 * HOUR, ge=0, description="… but the warm-up ends after this time at the latest."
    )
    bin_width: Duration = Field(_BIN, gt=0, description="Width of the bins whose floors are compared.")
    least_steps: int = Field(4, ge=2, description="Rises without a record of load that growth has to consist of.")
    watched: Duration = Field(
        6 * HOUR,
        ge=0,
        description="A ticket needs growth for so long, or for a quarter of the time left: caches fill up and stop.",
    )
    fragments_share: float = Field(
        0.5,
        gt=0,
        le=1,
        description="Share of the growth that the probe finds reserved and not handed out, for unaccounted-growth.",
    )
    sleep_growth: Size = Field(
        GIB, ge=0, description="Growth from sleep to sleep of what the engine holds while asleep, for a ticket."
    )
    forget_after: Duration = Field(DAY, gt=0, description="Growth that has not gone on for so long has ended.")
    stale_after: Duration = Field(600.0, gt=0, description="Without a reading for so long nothing is known.")
    page_hold: Duration = Field(900.0, ge=0, description="How long a page stands after its condition ended.")
    ticket_hold: Duration = Field(HOUR, ge=0, description="How long a ticket stands after its condition ended.")


@dataclass(frozen=True)
class _Split:
    """What a process' growth is made of, in bytes: tensors that live, free pieces between them, and the rest."""

    live: float
    fragments: float
    outside: float

    @property
    def share(self) -> float:
        """Of the fragments in all growth."""
        grown = self.live + self.fragments + self.outside
        return self.fragments / grown if grown > 0 else 0.0

    def evidence(self) -> Evidence:
        return {
            "live_growth_bytes": int(self.live),
            "fragments_growth_bytes": int(self.fragments),
            "outside_growth_bytes": int(self.outside),
        }


class _Composition:
    """What a process holds, what PyTorch's allocator in it has reserved of that, and what it has handed out of that.

    Floors of the same bins are compared, so that what comes and goes within a step counts as free.
    """

    def __init__(self, bin_width: float) -> None:
        self._held = BinnedFloors(bin_width, _RECENT)
        self._reserved = BinnedFloors(bin_width, _RECENT)
        self._allocated = BinnedFloors(bin_width, _RECENT)
        self._baseline: tuple[float, float, float] | None = None

    def add(self, t: float, held: int, report: AllocatorReport) -> None:
        """Take in what the process holds by the driver's list, and what its allocator tells."""
        allocated, reserved = report.current("allocated_bytes"), report.current("reserved_bytes")
        if not allocated or not reserved:
            return
        self._held.add(t, held)
        self._reserved.add(t, reserved)
        self._allocated.add(t, allocated)
        if self._baseline is None and len(self._allocated.closed) == _RECENT:
            self._baseline = self._floors()

    def _floors(self) -> tuple[float, float, float]:
        held, reserved, allocated = (
            min(one.low for one in floors.closed) for floors in (self._held, self._reserved, self._allocated)
        )
        return held, reserved, allocated

    @property
    def split(self) -> _Split | None:
        """None before a few bins have closed."""
        if self._baseline is None:
            return None
        held, reserved, allocated = (now - then for now, then in zip(self._floors(), self._baseline, strict=True))
        return _Split(allocated, reserved - allocated, held - reserved)


class _WarmUp:
    """Whether a process still fills its caches: for a while, and until it has served some requests."""

    def __init__(self, shortest: float, requests: float, longest: float) -> None:
        self._shortest, self._requests, self._longest = shortest, requests, longest

    def over(self, age: float, finished: float) -> bool:
        return age >= self._longest or (age >= self._shortest and finished >= self._requests)


class GpuMemoryLeak:
    """An engine process' device memory that grows after the warm-up without new records of load.

    From outside a leak and fragmentation look the same: the allocator asks the driver for more and more. The probe
    inside the process tells them apart: growth that is mostly reserved and not handed out is ``unaccounted-growth``.
    What the process holds while asleep is a series of its own, one floor for each sleep. About 40 KB per process.
    """

    verdict = "gpu-memory-leak"

    def __init__(self, subject: Subject, settings: GpuMemoryLeakSettings) -> None:
        self.subject = subject
        self.settings = settings
        self._standing = Standing(settings.page_hold, settings.ticket_hold)
        self._warm_up = _WarmUp(settings.warm_up, settings.warm_up_requests, settings.warm_up_longest)
        self._segment: int | None = None
        self._freshness = _Freshness(settings.stale_after)
        self._total: int | None = None
        self._free: int | None = None
        self._asleep = False
        self._sleeps: deque[Point] = deque(maxlen=48)
        self._load = _LoadRecords()
        self._begin()

    def _begin(self) -> None:
        self._test = _GrowthTest(self.settings.bin_width, self.settings.least_steps)
        self._composition = _Composition(self.settings.bin_width)
        self._probed: float | None = None  # when the probe last told
        self._used: int | None = None  # what the process holds, None until its warm-up is over
        self._fragments = False  # what the growth was last found to be
        self._finding: Finding | None = None
        self._since: float | None = None
        self._finished_before = self._load.finished
        self._ticketed: _Growth | None = None

    def observe(self, sample: Sample) -> None:
        """Takes in what the process holds, its engine's load, and what the probe inside it tells."""
        if isinstance(sample, RankSample):
            self._load.add(sample)
        elif isinstance(sample, AllocatorSample):
            if self._used is not None and not sample.asleep and sample.segment == self._segment:
                self._composition.add(sample.t, self._used, sample.report)
                self._probed = sample.t
        elif isinstance(sample, HeldSample):
            self._held(sample)

    def _held(self, sample: HeldSample) -> None:
        if sample.segment != self._segment or sample.asleep != self._asleep:
            self._begin()
            if sample.asleep:
                self._sleeps.append((sample.t, float(sample.used)))
        self._segment, self._asleep = sample.segment, sample.asleep
        self._finding = None
        self._freshness.add(sample.t)
        self._total, self._free = sample.total, sample.free
        if sample.asleep:
            if sample.used < self._sleeps[-1][1]:
                self._sleeps[-1] = (sample.t, float(sample.used))
            return
        if self._since is None:
            self._since = sample.t
        if self._warm_up.over(sample.t - self._since, self._load.finished - self._finished_before):
            self._test.add(sample.t, sample.used, self._load.last)
            self._used = sample.used

    def conclude(self, t: float) -> Finding:
        """What stands at ``t``."""
        if reason := self._freshness.reason(t):
            return unknown(reason)
        if self._finding is None:
            self._finding = max((self._awake(t), self._sleeping()), key=lambda one: LEVEL[one.state])
        return self._standing.settle(t, self._finding)

    # --- awake ---------------------------------------------------------------------------------------------------

    def _awake(self, t: float) -> Finding:
        split = self._split(t)
        evidence = {**self._evidence(), **(split.evidence() if split else {})}
        if self._test.floor is None:
            return unknown("asleep" if self._asleep else "warming up", evidence)
        growth = self._test.growth or self._ticketed
        least = max(float(self.settings.ticket_growth), self.settings.ticket_growth_share * (self._total or 0))
        if growth is None or growth.grown < least or t - growth.last_step > self.settings.forget_after:
            self._ticketed = None
            return Finding("clear", 0.9, "", evidence)
        eta = self._eta(growth)
        seen = t - growth.first_step
        enough = min(self.settings.watched, eta.seconds / 4) if eta else self.settings.watched
        if self._ticketed is None and (not growth.steady or seen < enough):
            return self._named(Finding("info", 0.4, self._summary(growth, None, split), evidence))
        self._ticketed = growth
        soon = growth.steady and growth.runs_out(self._free, self.settings.page_within)
        state: State = "page" if soon else "ticket"
        confidence = min(0.95, 0.6 + 0.05 * growth.steps)
        return self._named(Finding(state, confidence, self._summary(growth, eta, split), evidence, eta))

    def _split(self, t: float) -> _Split | None:
        """What the growth is made of, while the probe tells; what it was last found to be stays."""
        split = self._composition.split
        if split is None or self._probed is None or t - self._probed > self.settings.stale_after:
            return None
        # A growth that is about half of each does not change its name back and forth.
        self._fragments = split.share >= self.settings.fragments_share * (0.8 if self._fragments else 1.0)
        return split

    def _named(self, finding: Finding) -> Finding:
        if not self._fragments:
            return finding
        return replace(finding, verdict="unaccounted-growth", killer="fragmentation")

    def _eta(self, growth: _Growth) -> Eta | None:
        if self._free is None:
            return None
        free, trend = float(self._free), growth.trend
        return Eta(free / trend.slope, free / trend.high, free / trend.low if trend.low > 0 else None)

    def _summary(self, growth: _Growth, eta: Eta | None, split: _Split | None) -> str:
        text = (
            f"The process has grown by {units.size(growth.grown)} since its warm-up, by "
            f"{units.size(growth.trend.slope * HOUR)} an hour now, without more load: "
        )
        if split is None:
            text += "leak or fragmentation"
        else:
            live, fragments = (units.size(max(0.0, size)) for size in (split.live, split.fragments))
            text += f"tensors that live have grown by {live}, free pieces between them by {fragments}"
        return text + (f"; the device is full in {units.duration(eta.seconds)}." if eta else ".")

    # --- asleep --------------------------------------------------------------------------------------------------

    def _sleeping(self) -> Finding:
        floors = [value for _, value in self._sleeps]
        if len(floors) < 2:
            return unknown("no two sleeps yet")
        evidence = self._evidence()
        grown = floors[-1] - floors[0]
        text = (
            f"While asleep the process holds {units.size(floors[-1])}, {units.size(max(0.0, grown))} more than in the "
            f"first of {len(floors)} sleeps: leak or fragmentation."
        )
        records = [value for i, value in enumerate(floors) if i == 0 or value >= max(floors[:i]) + _LEAST_SLEEP_RISE]
        if records[-3:] == floors[-3:] and len(floors) >= 3 and records[-1] - records[-3] >= self.settings.sleep_growth:
            return Finding("ticket", 0.7, text, evidence)
        if grown >= self.settings.sleep_growth:
            return Finding("info", 0.7, text, evidence)
        return Finding("clear", 0.9, "", evidence)

    def _evidence(self) -> Evidence:
        evidence = self._test.evidence()
        if self._free is not None:
            evidence["free_bytes"] = self._free
        if self._sleeps:
            evidence["asleep_floor_bytes"] = int(self._sleeps[-1][1])
            evidence["asleep_first_floor_bytes"] = int(self._sleeps[0][1])
            evidence["sleeps"] = len(self._sleeps)
        return evidence


# --- host memory -------------------------------------------------------------------------------------------------


class HostMemoryLeakSettings(Section):
    """When the anonymous memory of an engine's process on the host counts as leaking."""

    info_growth: Size = Field(128 * MIB, ge=0, description="Growth after the warm-up that is shown.")
    info_growth_share: float = Field(
        0.01, ge=0, le=1, description="The same as a share of the limit; the larger of both counts."
    )
    ticket_growth: Size = Field(256 * MIB, ge=0, description="Growth after the warm-up, for a ticket.")
    ticket_growth_share: float = Field(
        0.125,
        ge=0,
        le=1,
        description="Growth as a share of what was left when it began, for a ticket: caches fill up and stop.",
    )
    ticket_within: Duration = Field(7 * DAY, gt=0, description="The limit is reached within this time, for a ticket.")
    page_within: Duration = Field(12 * HOUR, gt=0, description="The limit is reached within this time, for a page.")
    warm_up: Duration = Field(HOUR, ge=0, description="What is allocated so soon after a start is no growth.")
    warm_up_requests: int = Field(200, ge=0, description="Nor what comes before so many requests have finished …")
    warm_up_longest: Duration = Field(
        3 * HOUR, ge=0, description="… but the warm-up ends after this time at the latest."
    )
    bin_width: Duration = Field(_BIN, gt=0, description="Width of the bins whose floors are compared.")
    least_steps: int = Field(4, ge=2, description="Rises without a record of load that growth has to consist of.")
    forget_after: Duration = Field(DAY, gt=0, description="Growth that has not gone on for so long has ended.")
    stale_after: Duration = Field(600.0, gt=0, description="Without a reading for so long nothing is known.")
    page_hold: Duration = Field(900.0, ge=0, description="How long a page stands after its condition ended.")
    ticket_hold: Duration = Field(HOUR, ge=0, description="How long a ticket stands after its condition ended.")


class HostMemoryLeak:
    """Anonymous memory of an engine's process that grows toward its cgroup's limit or the host's.

    Page cache and mapped files are no part of it. About 40 KB per process.
    """

    verdict = "host-memory-leak"

    def __init__(self, subject: Subject, settings: HostMemoryLeakSettings) -> None:
        self.subject = subject
        self.settings = settings
        self._standing = Standing(settings.page_hold, settings.ticket_hold)
        self._warm_up = _WarmUp(settings.warm_up, settings.warm_up_requests, settings.warm_up_longest)
        self._load = _LoadRecords()
        self._start: float | None = None
        self._loads = 0
        self._freshness = _Freshness(settings.stale_after)
        self._begin(0.0)

    def _begin(self, first: float) -> None:
        self._test = _GrowthTest(self.settings.bin_width, self.settings.least_steps)
        self._finding: Finding | None = None
        self._first = first
        self._finished_before = self._load.finished
        self._anon: float | None = None
        self._left: float | None = None
        self._limit: float | None = None
        self._ticketed: _Growth | None = None

    def observe(self, sample: Sample) -> None:
        """Takes in readings of the process, and its engine's load."""
        if isinstance(sample, RankSample):
            self._load.add(sample)
        elif isinstance(sample, HostSample):
            self._host(sample)

    def _host(self, sample: HostSample) -> None:
        process, t = sample.process, sample.t
        if process.start != self._start:
            self._standing.reset()
            self._begin(t)
        elif sample.loads != self._loads:
            self._begin(t)
        self._start, self._loads = process.start, sample.loads
        self._finding = None
        self._freshness.add(t)
        self._anon = known(process.anon)
        if self._anon is None:
            return
        rooms: list[tuple[float, float]] = []
        if process.memory_limit is not None:
            rooms.append((process.memory_limit - self._anon, float(process.memory_limit)))
        if sample.available is not None and sample.host_total is not None:
            rooms.append((float(sample.available), float(sample.host_total)))
        self._left, self._limit = min(rooms) if rooms else (None, None)
        if self._warm_up.over(t - self._first, self._load.finished - self._finished_before):
            self._test.add(t, self._anon, self._load.last)

    def conclude(self, t: float) -> Finding:
        """What stands at ``t``."""
        if reason := self._freshness.reason(t):
            return unknown(reason)
        if self._anon is None:
            return unknown("the process' anonymous memory cannot be read")
        if self._finding is None:
            self._finding = self._judge(t)
        return self._standing.settle(t, self._finding)

    def _judge(self, t: float) -> Finding:
        settings, evidence = self.settings, self._evidence()
        growth = self._test.growth or self._ticketed
        if self._test.floor is None:
            return unknown("warming up", evidence)
        shown = max(float(settings.info_growth), settings.info_growth_share * (self._limit or 0.0))
        if growth is None or growth.grown < shown or t - growth.last_step > settings.forget_after:
            self._ticketed = None
            return Finding("clear", 0.9, "", evidence)
        eta = self._eta(growth)
        if not growth.steady and self._ticketed is None:
            return Finding("clear", 0.5, "", evidence)
        confidence = min(0.95, 0.6 + 0.05 * growth.steps)
        summary = self._summary(growth, eta)
        if eta is None or self._left is None or eta.seconds > settings.ticket_within:
            return Finding("info", confidence, summary, evidence, eta)
        least = max(float(settings.ticket_growth), settings.ticket_growth_share * (growth.grown + self._left))
        if growth.grown < least and self._ticketed is None:
            return Finding("info", confidence, summary, evidence, eta)
        self._ticketed = growth
        soon = growth.steady and growth.runs_out(self._left, settings.page_within)
        return Finding(
            "page" if soon else "ticket",
            confidence,
            summary,
            evidence,
            eta,
        )

    def _eta(self, growth: _Growth) -> Eta | None:
        if self._left is None:
            return None
        left, trend = max(0.0, self._left), growth.trend
        return Eta(left / trend.slope, left / trend.high, left / trend.low if trend.low > 0 else None)

    def _summary(self, growth: _Growth, eta: Eta | None) -> str:
        text = (
            f"Anonymous memory has grown by {units.size(growth.grown)} since the warm-up, by "
            f"{units.size(growth.trend.slope * HOUR)} an hour now"
        )
        return text + (f"; its limit is reached in {units.duration(eta.seconds)}." if eta else ".")

    def _evidence(self) -> Evidence:
        evidence = self._test.evidence()
        if self._left is not None:
            evidence["left_bytes"] = int(self._left)
        return evidence
