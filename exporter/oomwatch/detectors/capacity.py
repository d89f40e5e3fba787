"""The capacity killer, as it shows on an engine's page: pools that are full, queues that stand, engines that hang.

Saturation is read from what waits for capacity and from preemptions: a preempted request frees its blocks, so that
sampled usage of an overfull pool swings between 0.3 and 1.0 (measured on vLLM 0.32.0).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

from pydantic import Field

from oomwatch import units
from oomwatch.detectors.base import (
    CLEAR,
    EngineSample,
    Eta,
    Finding,
    LogSample,
    ProbeSample,
    ProcessEnd,
    RankSample,
    Sample,
    State,
    Subject,
    unknown,
)
from oomwatch.detectors.rates import CounterWindow, GaugeWindow
from oomwatch.detectors.standing import NO_PAGE, Freshness, Standing, Sustained
from oomwatch.enginelog.story import StartUp
from oomwatch.observations import RankReading, known
from oomwatch.settings import Duration, Section

_FORGIVE_S = 120.0  # gauges of an overfull pool flap from one poll to the next
_FAR_BELOW = 0.4  # of what is usual: no noise, however far the minutes lie apart
_NOISE = 0.02  # share of the pool by which usage moves to and fro while it rises
_RAMP_S = 150.0  # a single step of usage is an inflow for 2 min, and no ramp


def _queued(reading: RankReading) -> float | None:
    """Requests that wait for capacity; before 0.23 no reason is given, and all that wait count."""
    capacity = known(reading.waiting_capacity)
    return known(reading.waiting) if capacity is None else capacity


def _finished(reading: RankReading) -> float | None:
    by_reason = known(reading.finished)
    return None if by_reason is None else sum(by_reason.values())


def _requests(count: float) -> str:
    return f"{units.count(count)} request{'' if count == 1 else 's'}"


# --- kv-exhaustion -----------------------------------------------------------------------------------------------


class KvExhaustionSettings(Section):
    """When a full KV pool counts as hurting."""

    full_usage: float = Field(
        default=0.95, ge=0.5, le=1, description="Peak share of the pool in use from which it counts as full."
    )
    rate_window: Duration = Field(
        default=300.0, ge=10, le=3600, description="The pool is full for as long, and rates are taken over as long."
    )
    preemption_window: Duration = Field(
        default=600.0, ge=10, le=7200, description="Preemptions per finished request are counted over as long."
    )
    preemptions_per_finished: float = Field(
        default=0.5, gt=0, le=100, description="From here preemptions count as a sign of hurting."
    )
    least_preemptions: int = Field(
        default=5, ge=1, le=10000, description="Fewer preemptions in the window are no sign of anything."
    )
    rate_down_to: float = Field(
        default=0.7,
        gt=0,
        lt=1,
        description="Tokens and finished requests per second below this share of the engine's last hour of work count "
        "as down.",
    )
    wait: Duration = Field(
        default=120.0,
        gt=0,
        le=86400,
        description="Waiting for room so long hurts as well, when fewer tokens come out and fewer requests finish, "
        "though longer prompts keep the engine as busy as ever.",
    )
    waiting_rate_down_to: float = Field(
        default=0.85,
        gt=0,
        lt=1,
        description="Then tokens and finished requests per second below this share of the last hour of work are fewer.",
    )
    page_rate_down_to: float = Field(default=0.5, gt=0, lt=1, description="The same for a page.")
    after: Duration = Field(default=180.0, ge=0, le=86400, description="How long it hurts before it is a ticket.")
    page_after: Duration = Field(default=900.0, ge=0, le=86400, description="How long it hurts before it pages.")
    baseline_minutes: int = Field(
        default=15, ge=1, le=60, description="Minutes of work that the engine's own rate is learnt from, at least."
    )
    eta_info: Duration = Field(
        default=900.0, ge=0, le=86400, description="A pool that is full within this time is shown as info."
    )
    eta_usage: float = Field(
        default=0.8, ge=0, le=1, description="A pool that is less in use than this is not forecast as info."
    )
    page_hold: Duration = Field(default=900.0, ge=0, le=86400, description="How long a page outlasts its cause.")
    ticket_hold: Duration = Field(default=3600.0, ge=0, le=86400, description="How long a ticket outlasts its cause.")


@dataclass
class _Minute:
    """Counters at the beginning of a minute of the baseline, and how much of it had requests running."""

    t: float
    counters: tuple[float | None, ...]
    samples: int = 0
    busy: int = 0


class _Usual(NamedTuple):
    """A rate in the minutes of the last hour of work: the median, and what a tenth of them stayed below."""

    middle: float
    low: float


_NOTHING = _Usual(0.0, 0.0)


class _Share(NamedTuple):
    """The best of the rates as a share of what is usual, since a change of the mix of requests lowers not all of them.

    ``unusual``: each rate is below what a tenth of the minutes stayed below, so that it is more than their noise.
    ``out`` and ``out_unusual`` are the same of generated tokens and finished requests alone.
    """

    best: float
    unusual: bool
    out: float
    out_unusual: bool


_PROMPTS = "prompt tokens"
_RATES = ("generated tokens", "finished requests", _PROMPTS)


class _Throughput:
    """What an engine gets done per second, now and in its last hour of work.

    Three rates: generated tokens, finished requests, prompt tokens of finished requests. A prompt counts when its
    request finishes, since V0 counts a prompt again after each preemption. About 20 kB.
    """

    def __init__(self, window_s: float, least_minutes: int) -> None:
        self._window_s = window_s
        self._least = least_minutes
        self._now = tuple(CounterWindow(window_s) for _ in range(3))
        self._minute: _Minute | None = None
        self._hour: deque[tuple[float, tuple[float | None, ...]]] = deque(maxlen=60)
        self._usual: tuple[_Usual, ...] | None = None
        self._learnt = -math.inf  # when the last minute became one of the hour's, and for when what is usual was made
        self._usual_at = -math.inf
        self._counters: tuple[float | None, ...] | None = None
        self.moves = False  # whether anything came out since the page before

    def reset(self) -> None:
        self._counters = None
        for window in self._now:
            window.reset()
        self._minute = None
        self._hour.clear()
        self._usual = None
        self._learnt = self._usual_at = -math.inf

    def add(self, t: float, reading: RankReading, hurting: bool) -> None:
        """Take in a page. Minutes in which it hurts do not become what is usual."""
        counters = (
            known(reading.generation_tokens),
            _finished(reading),
            known(reading.request_prompt_tokens),
        )
        self.moves = self._counters is not None and counters != self._counters
        self._counters = counters
        for window, value in zip(self._now, counters, strict=True):
            window.add(t, value)
        minute = self._minute
        if minute is None or t - minute.t > self._window_s + 120.0:
            self._minute = _Minute(t, counters)
            return
        minute.samples += 1
        minute.busy += (known(reading.running) or 0.0) > 0
        if t - minute.t >= 60.0:
            if not hurting and 2 * minute.busy >= minute.samples:
                rates = tuple(_rate(a, b, t - minute.t) for a, b in zip(minute.counters, counters, strict=True))
                self._hour.append((t, rates))
                self._learnt = t
            self._minute = _Minute(t, counters)

    def _of_last_hour(self, t: float) -> tuple[_Usual, ...] | None:
        """Over the last hour of work before the present window; None before enough of it was seen."""
        minutes = [rates for end, rates in self._hour if end <= t - self._window_s]
        if len(minutes) < self._least:
            return None
        columns = (sorted(rate for rate in column if rate is not None) for column in zip(*minutes, strict=True))
        return tuple(_Usual(median(column), column[len(column) // 10]) if column else _NOTHING for column in columns)

    def present(self, t: float) -> _Share | None:
        """The present window against what is usual; None where too little is known."""
        if self._usual_at != self._learnt:
            self._usual, self._usual_at = self._of_last_hour(self._learnt), self._learnt
        if self._usual is None:
            return None
        shares = {
            name: (rate / usual.middle, rate < usual.low)
            for name, window, usual in zip(_RATES, self._now, self._usual, strict=True)
            if usual.middle > 0 and window.known and (rate := window.rate(t)) is not None
        }
        if not shares:
            return None
        out = [share for name, share in shares.items() if name != _PROMPTS] or list(shares.values())
        return _Share(*_best_of(shares.values()), *_best_of(out))

    def token_rate(self, t: float) -> float | None:
        """Generated tokens per second."""
        return self._now[0].rate(t) if self._now[0].known else None


def _best_of(shares: Iterable[tuple[float, bool]]) -> tuple[float, bool]:
    """The largest of some shares, and whether all of them are unusual."""
    listed = list(shares)
    return max(share for share, _ in listed), all(unusual for _, unusual in listed)


def _rate(before: float | None, now: float | None, seconds: float) -> float | None:
    return None if before is None or now is None or now < before else (now - before) / seconds


class _LoadClock:
    """Time until the pool is full at the net inflow of the last 2 min: free / inflow. About 7 kB.

    Valid while the inflow has been positive for at least 4 samples. It extrapolates a ramp of load, so it says
    nothing beyond minutes.
    """

    _SPAN_S = 120.0

    def __init__(self) -> None:
        self._usage: deque[tuple[float, float]] = deque(maxlen=60)
        self._inflows: deque[float] = deque(maxlen=8)  # the latest, as long as they are positive
        self._rising_since = 0.0

    def reset(self) -> None:
        self._usage.clear()
        self._inflows.clear()

    def add(self, t: float, usage: float | None) -> None:
        if usage is None:
            self.reset()
            return
        self._usage.append((t, usage))
        while len(self._usage) > 2 and t - self._usage[1][0] >= self._SPAN_S:
            self._usage.popleft()
        start, before = self._usage[0]
        inflow = (usage - before) / (t - start) if t > start else 0.0
        turned = usage < max(value for _, value in self._usage) - _NOISE
        if inflow <= 0 or turned:
            self._inflows.clear()
            return
        if not self._inflows:
            self._rising_since = t
        self._inflows.append(inflow)

    def eta(self) -> Eta | None:
        """Seconds from the last sample; the bounds are those of the latest inflows."""
        if len(self._inflows) < 4:
            return None
        free = 1.0 - self._usage[-1][1]
        if free <= 0:
            return None
        return Eta(free / self._inflows[-1], low=free / max(self._inflows), high=free / min(self._inflows))

    @property
    def rising_for(self) -> float:
        """Seconds for which the inflow has been positive."""
        return self._usage[-1][0] - self._rising_since if self._inflows else 0.0


class KvExhaustion:
    """The pool is full, and requests suffer from it.

    Full: usage peaks, or preemptions happen, and requests wait now, or usage is high now. Suffering: many preemptions
    per finished request, a queue that grows, or minutes of waiting for room; and all of tokens, finished requests and
    prompts per second below the engine's own last hour of work. Where requests wait for minutes, prompts do not count:
    ever longer ones keep an engine busy that gets less and less done. A full pool at good throughput is success. About
    45 kB a rank.
    """

    verdict = "kv-exhaustion"

    def __init__(self, subject: Subject, settings: KvExhaustionSettings) -> None:
        self.subject = subject
        self.settings = settings
        self._fresh = Freshness()
        self._standing = Standing(settings.page_hold, settings.ticket_hold)
        self._segment = -1
        self._usage = GaugeWindow(settings.rate_window)
        self._queue = GaugeWindow(2 * settings.rate_window)
        self._preemptions = CounterWindow(settings.preemption_window)
        self._finished = CounterWindow(settings.preemption_window)
        self._throughput = _Throughput(settings.rate_window, settings.baseline_minutes)
        self._clock = _LoadClock()
        self._full = Sustained(_FORGIVE_S)
        self._hurting = Sustained(_FORGIVE_S)
        self._severe = Sustained(_FORGIVE_S)
        self._filling = Sustained(_FORGIVE_S)
        self._hurts = False
        self._reading: RankReading | None = None
        self._preempted_before: float | None = None

    def observe(self, sample: Sample) -> None:
        if not isinstance(sample, RankSample):
            return
        if sample.segment != self._segment:
            self._begin(sample.segment)
        t, reading = sample.t, sample.reading
        self._fresh.seen(t)
        self._reading = reading
        self._usage.add(t, known(reading.usage))
        self._queue.add(t, _queued(reading))
        self._preemptions.add(t, known(reading.preemptions))
        self._finished.add(t, _finished(reading))
        self._throughput.add(t, reading, self._hurts)
        self._clock.add(t, known(reading.usage))
        full_for = self._full.update(t, self._is_full(t, reading))
        self._hurts, severe = False, False
        # Nothing at all coming out is an engine that hangs, and engine-stuck's to say.
        if full_for >= self.settings.rate_window and self._throughput.moves and self._pressed(t):
            share = self._throughput.present(t)
            if share is not None:
                down = share.unusual or share.best < _FAR_BELOW
                self._hurts = (down and share.best < self.settings.rate_down_to) or self._waits_for_less(t, share)
                severe = down and share.best < self.settings.page_rate_down_to
        self._hurting.update(t, self._hurts)
        self._severe.update(t, severe)
        self._filling.update(t, self._fills_soon())

    def _begin(self, segment: int) -> None:
        self._segment = segment
        for part in (self._usage, self._queue, self._preemptions, self._finished, self._throughput, self._clock):
            part.reset()
        for condition in (self._full, self._hurting, self._severe, self._filling, self._standing):
            condition.reset()
        self._hurts = False
        self._preempted_before = None

    def _is_full(self, t: float, reading: RankReading) -> bool:
        usage, preempted = known(reading.usage), known(reading.preemptions)
        before, self._preempted_before = self._preempted_before, preempted
        preempts = preempted is not None and before is not None and preempted > before
        recently = self._usage.peak(t) >= self.settings.full_usage or (
            self._preemptions.rise(t, min(self.settings.rate_window, self.settings.preemption_window)) > 0
        )
        now = preempts or (usage is not None and usage >= self.settings.full_usage) or (_queued(reading) or 0.0) > 0
        return recently and now

    def _pressed(self, t: float) -> bool:
        return (
            self._per_finished(t) > self.settings.preemptions_per_finished
            or self._queue_grows(t)
            or self._wait(t) >= self.settings.wait
        )

    def _wait(self, t: float) -> float:
        """Seconds that a request waits for room: Little's law, by the queue and the pace at which requests finish."""
        queue, finished = self._queue.mean(t, self.settings.rate_window), self._finished.rate(t)
        return queue / finished if queue and finished else 0.0

    def _waits_for_less(self, t: float, share: _Share) -> bool:
        down = share.out_unusual and share.out < self.settings.waiting_rate_down_to
        return down and self._wait(t) >= self.settings.wait

    def _per_finished(self, t: float) -> float:
        """Preemptions per finished request; with nothing finished, per one. 0 where there are too few to tell."""
        preemptions = self._preemptions.rise(t)
        if preemptions < self.settings.least_preemptions - 0.5:  # sums of shares are not whole
            return 0.0
        return preemptions / max(self._finished.rise(t), 1.0)

    def _queue_grows(self, t: float) -> bool:
        window = self.settings.rate_window
        before, now = self._queue.mean(t, window, before=window), self._queue.mean(t, window)
        return before is not None and now is not None and now > before + max(1.0, 0.1 * before)

    def _fills_soon(self) -> bool:
        eta = self._clock.eta()
        usage = known(self._reading.usage) if self._reading else None
        return (
            eta is not None
            and usage is not None
            and self.settings.eta_usage <= usage < self.settings.full_usage
            and eta.seconds <= self.settings.eta_info
            and self._clock.rising_for >= _RAMP_S
        )

    def conclude(self, t: float) -> Finding:
        if self._fresh.stale(t):
            return self._standing.settle(t, NO_PAGE)
        return self._standing.settle(t, self._now(t))

    def _now(self, t: float) -> Finding:
        reading = self._reading
        if reading is None or self._fresh.t is None:
            return NO_PAGE
        usage = known(reading.usage)
        if usage is None and not self._preemptions.known:
            return unknown("no usage and no preemptions on the page")
        at = self._fresh.t
        eta = self._clock.eta()
        present = self._throughput.present(at) if self._full.seconds > 0 else None
        waits_for_less = present is not None and self._waits_for_less(at, present)
        share = None if present is None else present.out if waits_for_less else present.best
        evidence = self._evidence(at, reading, share)
        if self._hurting.seconds >= max(self.settings.after, 1.0) and share is not None:
            state: State = "page" if self._severe.seconds >= self.settings.page_after else "ticket"
            depth = 1.0 - share / self.settings.rate_down_to
            confidence = min(1.0, 0.7 + 0.3 * max(0.0, depth))
            return Finding(state, confidence, self._hurting_summary(at, share), evidence, eta)
        if self._full.seconds >= self.settings.rate_window:
            return self._full_finding(at, share, evidence)
        if self._filling.seconds > 0 and eta is not None and usage is not None:
            summary = (
                f"The KV pool is {units.ratio(usage)} full and takes in more than it gives back: full in about "
                f"{units.duration(eta.seconds)} at the pace of the last 2 min."
            )
            return Finding("info", 0.5, summary, evidence, eta)
        return Finding("clear", evidence=evidence, eta=eta)

    def _full_finding(self, at: float, share: float | None, evidence: dict[str, float | int | str]) -> Finding:
        full_for = units.duration(self._full.seconds)
        if self._pressed(at) and share is None:
            summary = (
                f"The KV pool has been full for {full_for}, with {self._pressure(at)}; too little of the engine's own "
                "work was seen to say whether throughput suffers."
            )
            return Finding("info", 0.3, summary, evidence)
        at_usual = "" if share is None else f", throughput is {units.ratio(share)} of the last hour's"
        return Finding("clear", 0.8, f"The KV pool has been full for {full_for}{at_usual}: busy, not hurt.", evidence)

    def _pressure(self, at: float) -> str:
        per_finished = self._per_finished(at)
        parts = []
        if per_finished > self.settings.preemptions_per_finished:
            finished = self._finished.rise(at)
            parts.append(
                f"{units.count(round(self._preemptions.rise(at)))} preemptions for {_requests(round(finished))} "
                f"finished in {units.duration(self.settings.preemption_window)}"
            )
        if self._queue_grows(at):
            queue = self._queue.mean(at, self.settings.rate_window) or 0.0
            parts.append(f"a queue that grew to {_requests(round(queue))}")
        if self._wait(at) >= self.settings.wait:
            parts.append(f"a wait of about {units.duration(self._wait(at))} for room")
        return " and ".join(parts) or "a queue that stands"

    def _hurting_summary(self, at: float, share: float) -> str:
        rate = self._throughput.token_rate(at)
        tokens = "" if rate is None else f" ({units.count(round(rate, 1))} tokens/s)"
        return (
            f"The KV pool has been full for {units.duration(self._full.seconds)}, with {self._pressure(at)}, and "
            f"throughput is down to {units.ratio(share)} of the engine's last hour of work{tokens}."
        )

    def _evidence(self, at: float, reading: RankReading, share: float | None) -> dict[str, float | int | str]:
        evidence: dict[str, float | int | str] = {
            "peak_usage": self._usage.peak(at),
            "full_seconds": self._full.seconds,
        }
        counts = {
            "usage": known(reading.usage),
            "waiting": _queued(reading),
            "running": known(reading.running),
            "pool_blocks": known(reading.pool.blocks),
            "preemptions": round(self._preemptions.rise(at), 1) if self._preemptions.known else None,
            "finished": round(self._finished.rise(at), 1) if self._finished.known else None,
            "generation_tokens_per_second": self._throughput.token_rate(at),
            "throughput_share_of_usual": share,
            "wait_seconds": round(self._wait(at)) or None,
        }
        return evidence | {name: value for name, value in counts.items() if value is not None}


# --- preemption-pressure -----------------------------------------------------------------------------------------


class PreemptionPressureSettings(Section):
    """How many preemptions are too many."""

    window: Duration = Field(default=600.0, ge=10, le=7200, description="Preemptions and finishes are counted over it.")
    preemptions_per_finished: float = Field(
        default=0.5, gt=0, le=100, description="Above this it is a ticket. 0.08 was seen on a healthy busy engine."
    )
    usage: float = Field(default=0.9, ge=0, le=1, description="Peak share of the pool in use that must be exceeded.")
    after: Duration = Field(default=180.0, ge=0, le=86400, description="How long it must stay so.")
    least_finished: int = Field(
        default=100, ge=1, le=100000, description="Fewer finished requests in the window: info."
    )
    least_preemptions: int = Field(
        default=5, ge=1, le=10000, description="Fewer preemptions in the window are no sign of anything."
    )
    hold: Duration = Field(default=3600.0, ge=0, le=86400, description="How long a ticket outlasts its cause.")


class PreemptionPressure:
    """Requests are preempted, and computed anew, again and again for each one that finishes. About 11 kB a rank."""

    verdict = "preemption-pressure"

    def __init__(self, subject: Subject, settings: PreemptionPressureSettings) -> None:
        self.subject = subject
        self.settings = settings
        self._fresh = Freshness()
        self._standing = Standing(settings.hold, settings.hold)
        self._segment = -1
        self._usage = GaugeWindow(settings.window)
        self._preemptions = CounterWindow(settings.window)
        self._finished = CounterWindow(settings.window)
        self._high = Sustained()

    def observe(self, sample: Sample) -> None:
        if not isinstance(sample, RankSample):
            return
        if sample.segment != self._segment:
            self._segment = sample.segment
            for part in (self._usage, self._preemptions, self._finished, self._high, self._standing):
                part.reset()
        self._fresh.seen(sample.t)
        self._usage.add(sample.t, known(sample.reading.usage))
        self._preemptions.add(sample.t, known(sample.reading.preemptions))
        self._finished.add(sample.t, _finished(sample.reading))
        self._high.update(sample.t, self._is_high(sample.t))

    def _is_high(self, t: float) -> bool:
        preemptions = self._preemptions.rise(t)
        return (
            self._preemptions.covered(t) >= 0.9 * self.settings.window
            and self._finished.known
            and preemptions > self.settings.least_preemptions - 0.5  # sums of shares are not whole
            and preemptions > self.settings.preemptions_per_finished * max(self._finished.rise(t), 1.0)
            and self._usage.peak(t) > self.settings.usage
        )

    def conclude(self, t: float) -> Finding:
        now = NO_PAGE if self._fresh.stale(t) else self._now(self._fresh.t or t)
        return self._standing.settle(t, now)

    def _now(self, at: float) -> Finding:
        if not self._preemptions.known:
            return unknown("no counter of preemptions on the page")
        if self._preemptions.covered(at) < 0.9 * self.settings.window:
            return unknown("warming up")
        preemptions = self._preemptions.rise(at)
        if not self._finished.known:
            return unknown("no counter of finished requests on the page") if preemptions else CLEAR
        finished = self._finished.rise(at)
        usage = self._usage.peak(at)
        ratio = preemptions / max(finished, 1.0)
        evidence = {
            "preemptions": round(preemptions, 1),
            "finished": round(finished, 1),
            "preemptions_per_finished": ratio,
            "peak_usage": usage,
        }
        if self._high.seconds < max(self.settings.after, 1.0):
            return Finding("clear", evidence=evidence)
        enough = finished >= self.settings.least_finished
        summary = (
            f"{units.count(round(preemptions))} preemptions for {_requests(round(finished))} finished within "
            f"{units.duration(self.settings.window)}, {ratio:.2g} each, at up to {units.ratio(usage)} of the KV pool"
            f"{'' if enough else '; too few finished to be sure'}."
        )
        strength = min(1.0, ratio / (4 * self.settings.preemptions_per_finished))
        return Finding("ticket" if enough else "info", (0.7 if enough else 0.2) + 0.3 * strength, summary, evidence)


# --- work that does not get on -----------------------------------------------------------------------------------


class EngineStuckSettings(Section):
    """How long an engine with work may go without a token."""

    after: Duration = Field(default=180.0, ge=1, le=86400, description="Without a token for this long: page.")
    slow_after: Duration = Field(
        default=900.0,
        ge=1,
        le=86400,
        description="The same while usage of the pool still rises (a long prompt is computed) or all requests wait for "
        "something else than capacity (KV transfers, LoRA adapters).",
    )
    first_token_after: Duration = Field(
        default=600.0,
        ge=1,
        le=86400,
        description="The same before the engine's first token: it may compile or warm up.",
    )
    start_grace: Duration = Field(
        default=300.0, ge=0, le=86400, description="Nothing is concluded in the first time after a start or wake-up."
    )
    probe_failures: int = Field(
        default=2, ge=1, le=100, description="Active probes that fail in a row, while nothing else moves: page."
    )
    missed: int = Field(
        default=50,
        ge=1,
        le=100_000,
        description="Before vLLM 0.10.2, where V1 leaves gauges up after an abort: page only where more than one "
        "request runs or waits, and so many would have finished at the pace before the silence, and twice as "
        "many as in any silence that ended by itself.",
    )
    hold: Duration = Field(default=900.0, ge=0, le=86400, description="How long a page outlasts its cause.")


_V1 = (0, 7)  # releases before it are V0 unless asked otherwise, which looks at its gauges every 10 s
TRUE_AFTER_ABORTS = (0, 10, 2)
"""vLLM's first release whose V1 pushes statistics when an abort ends the last request (PR #22995)."""


class _Pace:
    """How many requests a silence has cost, at the pace before it: a measure of silences that fits any traffic.

    The pace is the slower one of two averages, so that neither a burst nor a quiet night makes a silence look long.
    """

    _SHORT_S = 900.0
    _LONG_S = 4 * 3600.0
    _KNOWN_AFTER = 20  # requests

    def __init__(self) -> None:
        self._finished: float | None = None
        self._began = 0.0
        self._t = 0.0  # when requests were last seen to finish
        self._seen = 0.0
        self._short = 0.0
        self._long = 0.0
        self.worst = 0.0  # requests missed in the worst silence that ended by itself

    def add(self, t: float, finished: float | None) -> None:
        """Take in a counter of finished requests."""
        if finished is None:
            return
        if self._finished is None or finished < self._finished:
            self._finished, self._began, self._t = finished, t, t
            self._seen = self._short = self._long = 0.0
            return
        more = finished - self._finished
        if more <= 0:
            return
        # What came after a gap between readings was not missed.
        self.worst = max(self.worst, (self.missed(t - self._t) or 0.0) - more)
        self._short = self._short * math.exp((self._t - t) / self._SHORT_S) + more
        self._long = self._long * math.exp((self._t - t) / self._LONG_S) + more
        self._finished, self._t, self._seen = finished, t, self._seen + more

    def missed(self, seconds: float) -> float | None:
        """Requests that would have finished in a silence of so many seconds; None until the pace is known."""
        if self._seen < self._KNOWN_AFTER or self._t <= self._began:
            return None
        return min(self._rate(self._short, self._SHORT_S), self._rate(self._long, self._LONG_S)) * seconds

    def _rate(self, weight: float, time_constant: float) -> float:
        """Per second, of an average that began empty."""
        return weight / (time_constant * -math.expm1((self._began - self._t) / time_constant))


@dataclass
class _Progress:
    """Where one rank stands: since when it has work and no counter of it has moved."""

    segment: int
    counters: dict[str, float] = field(default_factory=dict)
    flat_since: float | None = None
    t: float = 0.0
    patience: float = 0.0
    running: float = 0.0
    waiting: float = 0.0
    usage: float | None = None
    usage_rose: float = float("-inf")
    problem: str = ""  # why it cannot be judged
    pace: _Pace = field(default_factory=_Pace)
    left_over: bool = False  # whether its gauges may be those of requests that were aborted

    @property
    def flat_seconds(self) -> float:
        return 0.0 if self.flat_since is None else self.t - self.flat_since


def _progress_counters(reading: RankReading) -> dict[str, float]:
    """The counters that move only when tokens come out; aborts and errors do not count."""
    counters = {
        "prompt_tokens": known(reading.prompt_tokens),
        "generation_tokens": known(reading.generation_tokens),
        "steps": known(reading.steps),
    }
    finished = known(reading.finished)
    if finished is not None:
        counters["finished"] = sum(n for reason, n in finished.items() if reason not in ("abort", "error"))
    return {name: value for name, value in counters.items() if value is not None}


def _deferred_only(reading: RankReading) -> bool:
    """Nothing runs, and what waits does not wait for capacity."""
    capacity = known(reading.waiting_capacity)
    return not known(reading.running) and capacity == 0 and (known(reading.waiting_deferred) or 0.0) > 0


class EngineStuck:
    """There is work and no token comes out: a hung worker, a deadlock, a front end that outlived its engine.

    A hung engine freezes all its gauges behind a green health check, so counters are compared with themselves.
    Requests sent to an engine that hung while idle show nowhere: for them there are the active probe's samples.
    A counter that does not exist is unknown, not flat. About 4 kB, and 2 kB a rank.
    """

    verdict = "engine-stuck"

    _STALE_HOLD_S = 3600.0  # a page of an engine that then stops answering stays this long

    def __init__(self, subject: Subject, settings: EngineStuckSettings) -> None:
        self.subject = subject
        self.settings = settings
        self._fresh = Freshness()
        self._standing = Standing(settings.hold, settings.hold)
        self._ranks: dict[str, _Progress] = {}
        self._segment = -1
        self._segment_start = 0.0
        self._scrape = Freshness()
        self._state = "unknown"
        self._dead = Sustained()
        self._ended: float | None = None  # when a process of the engine last ended
        self._probe_failures = 0
        self._probe_error = ""

    def observe(self, sample: Sample) -> None:
        match sample:
            case RankSample():
                self._read(sample)
            case EngineSample():
                self._scraped(sample)
            case ProbeSample():
                self._probed(sample)
            case ProcessEnd():
                self._ended = sample.t

    def _begin(self, segment: int, t: float) -> None:
        self._segment, self._segment_start = segment, t
        self._ranks.clear()
        self._standing.reset()
        self._dead.reset()
        self._probe_failures = 0

    def _read(self, sample: RankSample) -> None:
        if sample.segment != self._segment:
            self._begin(sample.segment, sample.segment_start)
        reading = sample.reading
        rank = self._ranks.setdefault(sample.rank, _Progress(sample.segment))
        self._fresh.seen(sample.t)
        counters = _progress_counters(reading)
        moved = any(rank.counters.get(name, 0.0) != value for name, value in counters.items())
        if moved and rank.t:
            self._probe_failures = 0
        silent = sample.t - rank.t > max(400.0, 2 * self.settings.after)
        rank.running = (known(reading.running) or 0.0) + (known(reading.swapped) or 0.0)
        rank.waiting = known(reading.waiting) or 0.0
        has_work = rank.running + rank.waiting > 0 and not sample.asleep
        if not has_work:
            rank.flat_since = None
        elif moved or silent or rank.flat_since is None:
            rank.flat_since = sample.t
        usage = known(reading.usage)
        if usage is not None and rank.usage is not None and usage > rank.usage and rank.running:
            rank.usage_rose = sample.t
        rank.problem = _why_not_judged(reading, counters, sample.asleep)
        rank.left_over = _may_be_left_over(sample)
        rank.pace.add(sample.t, counters.get("finished"))
        rank.t, rank.usage, rank.counters = sample.t, usage, counters
        rank.patience = self._patience(sample.t, rank, reading)

    def _patience(self, t: float, rank: _Progress, reading: RankReading) -> float:
        patience = self.settings.after
        if t - rank.usage_rose < self.settings.after or _deferred_only(reading):
            patience = max(patience, self.settings.slow_after)
        if not any(rank.counters.values()):
            patience = max(patience, self.settings.first_token_after)
        return patience

    def _scraped(self, sample: EngineSample) -> None:
        if sample.ranks and sample.segment != self._segment:
            self._begin(sample.segment, sample.segment_start)
        self._scrape.seen(sample.t)
        self._state = sample.state
        self._dead.update(sample.t, sample.state == "dead")
        if sample.state not in _PROBED_STATES:
            self._probe_failures = 0

    def _probed(self, sample: ProbeSample) -> None:
        if sample.ok:
            self._probe_failures = 0
        elif self._state in _PROBED_STATES and sample.t >= self._segment_start + self.settings.start_grace:
            self._probe_failures += 1
            self._probe_error = sample.error

    def conclude(self, t: float) -> Finding:
        now = self._now(t)
        last = self._fresh.t
        if now is not NO_PAGE or last is None:
            return self._standing.settle(t, now)
        if self._ended is not None and self._ended >= last:
            self._standing.reset()
            return unknown("its processes have ended")
        # Silence after a hang is no recovery: what stands does not age until a page of metrics comes again.
        return self._standing.settle(t if t - last >= self._STALE_HOLD_S else last, now)

    def _now(self, t: float) -> Finding:
        probed = self._by_probe()
        if probed is not None:
            return probed
        if self._dead.seconds >= self.settings.after and not self._scrape.stale(t):
            summary = (
                f"The engine core has been dead for {units.duration(self._dead.seconds)} behind a front end that "
                "still answers: /health says 503."
            )
            return Finding("page", 0.95, summary, {"dead_seconds": self._dead.seconds})
        if self._fresh.stale(t):
            return NO_PAGE
        silent = {name: rank for name, rank in self._ranks.items() if self._is_silent(rank)}
        stuck = {name: rank for name, rank in silent.items() if self._is_believed(rank)}
        if stuck:
            return self._stuck(stuck)
        if silent:
            return _unbelieved(silent)
        problems = sorted({rank.problem for rank in self._ranks.values() if rank.problem})
        if problems:
            return unknown(problems[0])
        evidence = {"flat_seconds": max((rank.flat_seconds for rank in self._ranks.values()), default=0.0)}
        return Finding("clear", evidence=evidence)

    def _is_silent(self, rank: _Progress) -> bool:
        """Whether it has shown work and no token for too long."""
        return (
            not rank.problem
            and rank.flat_since is not None
            and rank.flat_seconds >= rank.patience
            and rank.t >= self._segment_start + self.settings.start_grace
        )

    def _is_believed(self, rank: _Progress) -> bool:
        """Whether there is work behind the gauges. Where they may be left over: more than one request, for two seldom
        end by an abort at once, and a silence that has cost more than any before."""
        if not rank.left_over:
            return True
        missed = rank.pace.missed(rank.flat_seconds)
        several = rank.running + rank.waiting > 1
        return several and missed is not None and missed >= max(self.settings.missed, 2 * rank.pace.worst)

    def _stuck(self, stuck: dict[str, _Progress]) -> Finding:
        running = sum(rank.running for rank in stuck.values())
        waiting = sum(rank.waiting for rank in stuck.values())
        longest = max(stuck.values(), key=lambda rank: rank.flat_seconds)
        several = f" on rank {', '.join(sorted(stuck))} of {len(self._ranks)}" if len(self._ranks) > 1 else ""
        usage = "" if longest.usage is None else f", {units.ratio(longest.usage)} of the KV pool in use"
        summary = (
            f"No token for {units.duration(longest.flat_seconds)}{several} although {_work(running, waiting)}"
            f"{usage}: no token or step counter moves."
        )
        evidence: dict[str, float | int | str | list[int] | list[str]] = {
            "flat_seconds": longest.flat_seconds,
            "running": running,
            "waiting": waiting,
            "ranks": sorted(stuck),
            **longest.counters,
        }
        if longest.usage is not None:
            evidence["usage"] = longest.usage
        confidence = 1.0 - 0.2 * min(1.0, longest.patience / longest.flat_seconds)
        return Finding("page", confidence, summary, evidence)

    def _by_probe(self) -> Finding | None:
        if self._probe_failures < self.settings.probe_failures:
            return None
        why = f" (the last: {self._probe_error})" if self._probe_error else ""
        summary = (
            f"{self._probe_failures} probes in a row brought no token{why}, and no token or step counter has moved "
            "meanwhile."
        )
        watched = any(not rank.problem for rank in self._ranks.values())
        return Finding("page", 0.9 if watched else 0.7, summary, {"probe_failures": self._probe_failures})


def _may_be_left_over(sample: RankSample) -> bool:
    """Whether its gauges may be those of requests that were aborted. Only V0 counts swapped requests."""
    version = sample.version
    return version is not None and _V1 <= version < TRUE_AFTER_ABORTS and known(sample.reading.swapped) is None


def _unbelieved(silent: dict[str, _Progress]) -> Finding:
    longest = max(silent.values(), key=lambda rank: rank.flat_seconds)
    work = _work(sum(rank.running for rank in silent.values()), sum(rank.waiting for rank in silent.values()))
    summary = (
        f"No token for {units.duration(longest.flat_seconds)} although, by the gauges, {work}. Before vLLM 0.10.2 they "
        "stay as they were when an abort ends the last request: it hangs, or nobody has sent anything since."
    )
    evidence: dict[str, float | int | str | list[int] | list[str]] = {
        "flat_seconds": longest.flat_seconds,
        "ranks": sorted(silent),
    }
    missed = longest.pace.missed(longest.flat_seconds)
    if missed is not None:
        evidence["requests_missed"] = missed
    return Finding("info", 0.2, summary, evidence)


# Where the engine's front end is there, or hangs with it; a probe of a stopped or sleeping engine proves nothing.
_PROBED_STATES = ("ok", "frozen", "dead", "stats_disabled", "no_traffic_yet", "timeout")


def _run(count: float) -> str:
    return "runs" if count == 1 else "run"


def _work(running: float, waiting: float) -> str:
    """``2 requests run``, ``3 requests wait``, or ``1 request runs and 3 wait``."""
    if not running:
        return f"{_requests(waiting)} {_wait(waiting)}"
    more = f" and {units.count(waiting)} {_wait(waiting)}" if waiting else ""
    return f"{_requests(running)} {_run(running)}{more}"


def _wait(count: float) -> str:
    return "waits" if count == 1 else "wait"


def _why_not_judged(reading: RankReading, counters: dict[str, float], asleep: bool) -> str:
    if asleep:
        return "the engine sleeps"
    if known(reading.running) is None and known(reading.waiting) is None:
        return "no gauge of running or waiting requests on the page"
    return "" if counters else "no counter of tokens or steps on the page"


class AdmissionStallSettings(Section):
    """How long requests may wait while the pool has room."""

    after: Duration = Field(default=300.0, ge=1, le=86400, description="None admitted for this long: ticket.")
    deferred_after: Duration = Field(
        default=900.0,
        ge=1,
        le=86400,
        description="The same when all that wait are deferred (KV transfers, LoRA adapters), or before a first token.",
    )
    usage: float = Field(default=0.9, gt=0, le=1, description="The pool has room while less of it is in use.")
    hold: Duration = Field(default=3600.0, ge=0, le=86400, description="How long a ticket outlasts its cause.")


class AdmissionStall:
    """Requests wait, none is admitted, and the pool is not full.

    As many running as ever before may be the limit on sequences (max_num_seqs, which no metric tells) under long
    generations: that is shown as info until one of them ends without another taking its place. About 8 kB a rank.
    """

    verdict = "admission-stall"

    def __init__(self, subject: Subject, settings: AdmissionStallSettings) -> None:
        self.subject = subject
        self.settings = settings
        self._fresh = Freshness()
        self._standing = Standing(settings.hold, settings.hold)
        self._segment = -1
        self._most_running = 0.0
        self._before: RankReading | None = None
        self._stalled = Sustained()
        self._deferred = Sustained()
        self._problem = ""

    def observe(self, sample: Sample) -> None:
        if not isinstance(sample, RankSample):
            return
        if sample.segment != self._segment:
            self._segment = sample.segment
            self._most_running = 0.0
            self._before = None
            for part in (self._stalled, self._deferred, self._standing):
                part.reset()
        reading, before = sample.reading, self._before
        self._fresh.seen(sample.t)
        self._before = reading
        self._problem = _why_no_stall(reading, sample.asleep)
        self._most_running = max(self._most_running, known(reading.running) or 0.0)
        usage = known(reading.usage)
        waits = (
            not self._problem
            and (known(reading.waiting) or 0.0) > 0
            and usage is not None
            and usage < self.settings.usage
        )
        if before is not None and _admitted(before, reading):
            # That ends a stall at once; those who still wait are counted from here.
            self._stalled.reset()
            self._deferred.reset()
        self._stalled.update(sample.t, waits)
        self._deferred.update(sample.t, waits and known(reading.waiting_capacity) == 0)

    def conclude(self, t: float) -> Finding:
        now = NO_PAGE if self._fresh.stale(t) else self._now()
        return self._standing.settle(t, now)

    def _now(self) -> Finding:
        reading = self._before
        if reading is None:
            return NO_PAGE
        if self._problem:
            return unknown(self._problem)
        seconds = self._stalled.seconds
        waiting, running = known(reading.waiting) or 0.0, known(reading.running) or 0.0
        usage = known(reading.usage) or 0.0
        evidence: dict[str, float | int | str] = {
            "stalled_seconds": seconds,
            "waiting": waiting,
            "running": running,
            "usage": usage,
        }
        deferred = seconds > 0 and self._deferred.seconds >= seconds
        started = bool(known(reading.generation_tokens) or known(reading.prompt_tokens))
        if seconds < (self.settings.deferred_after if deferred or not started else self.settings.after):
            return Finding("clear", evidence=evidence)
        kind = " All are deferred: they wait for a KV transfer or a LoRA adapter, not for room." if deferred else ""
        summary = (
            f"{_requests(waiting)} {_wait(waiting)} and none was admitted for {units.duration(seconds)}, while "
            f"{units.count(running) if running else 'none'} {_run(running)} and only {units.ratio(usage)} of the KV "
            f"pool is in use.{kind}"
        )
        if 0 < running >= self._most_running:
            limit = f" {units.count(running)} is the most that ever ran: it may be the limit on sequences."
            return Finding("info", 0.4, summary + limit, evidence)
        return Finding("ticket", 0.7 if deferred else 0.9, summary, evidence)


def _admitted(before: RankReading, now: RankReading) -> bool:
    """Whether a request got in between two pages: its prompt was counted, or more run. A preemption means no room."""
    return (
        known(before.prompt_tokens) != known(now.prompt_tokens)
        or (known(now.running) or 0.0) > (known(before.running) or 0.0)
        or known(before.preemptions) != known(now.preemptions)
    )


def _why_no_stall(reading: RankReading, asleep: bool) -> str:
    if asleep:
        return "the engine sleeps"
    if known(reading.waiting) is None:
        return "no gauge of waiting requests on the page"
    if known(reading.usage) is None:
        return "no usage of the KV pool on the page"
    return "" if known(reading.prompt_tokens) is not None else "no counter of prompt tokens on the page"


# --- ranks side by side ------------------------------------------------------------------------------------------


class RanksUnbalancedSettings(Section):
    """When data-parallel ranks count as unevenly loaded."""

    times_the_median: float = Field(
        default=10.0, ge=1, le=1000, description="A rank's queue above this many times the median of the others' …"
    )
    free: float = Field(default=0.5, gt=0, le=1, description="… while another rank has this share of its pool free …")
    after: Duration = Field(default=900.0, ge=1, le=86400, description="… for this long: ticket.")
    full_usage: float = Field(default=0.9, ge=0, le=1, description="A rank with a queue at this usage …")
    info_after: Duration = Field(
        default=300.0, ge=1, le=86400, description="… beside one with room and no queue for this long: info."
    )
    hold: Duration = Field(default=3600.0, ge=0, le=86400, description="How long a ticket outlasts its cause.")


class RanksUnbalanced:
    """Some data-parallel ranks are full with a queue while others idle.

    An empty median counts as half a request: a queue of 5 on one rank is none yet. About 3 kB, and 1 kB a rank.
    """

    verdict = "ranks-unbalanced"

    def __init__(self, subject: Subject, settings: RanksUnbalancedSettings) -> None:
        self.subject = subject
        self.settings = settings
        self._fresh = Freshness()
        self._standing = Standing(settings.hold, settings.hold)
        self._segment = -1
        self._long: dict[str, Sustained] = {}
        self._full: dict[str, Sustained] = {}
        self._queues: dict[str, float] = {}
        self._usages: dict[str, float] = {}
        self._ranks = 0

    def observe(self, sample: Sample) -> None:
        if not isinstance(sample, EngineSample) or not sample.ranks:
            return
        if sample.segment != self._segment:
            self._segment = sample.segment
            self._long, self._full = {}, {}
            self._standing.reset()
        self._fresh.seen(sample.t)
        self._ranks = len(sample.ranks)
        self._queues = {rank.rank: queue for rank in sample.ranks if (queue := _queued(rank)) is not None}
        self._usages = {rank.rank: usage for rank in sample.ranks if (usage := known(rank.usage)) is not None}
        for name, queue in self._queues.items():
            roomy = self._roomiest_beside(name)
            room = roomy is not None and self._usages[roomy] <= 1 - self.settings.free
            others = [other for rank, other in self._queues.items() if rank != name]
            long = bool(others) and queue > self.settings.times_the_median * max(median(others), 0.5)
            full = queue > 0 and self._usages.get(name, 0.0) >= self.settings.full_usage
            idle_beside = roomy is not None and not self._queues.get(roomy, 0.0)
            self._long.setdefault(name, Sustained(_FORGIVE_S)).update(sample.t, room and long)
            self._full.setdefault(name, Sustained(_FORGIVE_S)).update(sample.t, room and full and idle_beside)

    def _roomiest_beside(self, name: str) -> str | None:
        others = [rank for rank in self._usages if rank != name]
        return min(others, key=lambda rank: self._usages[rank], default=None)

    def conclude(self, t: float) -> Finding:
        now = NO_PAGE if self._fresh.stale(t) else self._now()
        return self._standing.settle(t, now)

    def _now(self) -> Finding:
        if self._ranks < 2:
            return CLEAR
        if len(self._queues) < self._ranks or len(self._usages) < self._ranks:
            return unknown("not every rank shows its queue and its usage")
        long, long_for = self._longest(self._long)
        full, full_for = self._longest(self._full)
        if long_for >= self.settings.after:
            return self._unbalanced("ticket", 0.9, long, long_for)
        if max(long_for, full_for) >= self.settings.info_after:
            return self._unbalanced("info", 0.6, *((long, long_for) if long_for >= full_for else (full, full_for)))
        return CLEAR

    def _longest(self, conditions: dict[str, Sustained]) -> tuple[str, float]:
        """The rank of the present page for which a condition has held longest, and for how long."""
        return max(((name, conditions[name].seconds) for name in self._queues), key=lambda pair: pair[1])

    def _unbalanced(self, state: State, confidence: float, name: str, seconds: float) -> Finding:
        roomy = self._roomiest_beside(name) or ""
        queue, usage, room = self._queues[name], self._usages[name], 1 - self._usages[roomy]
        summary = (
            f"{_requests(queue)} {_wait(queue)} on rank {name} (pool {units.ratio(usage)} full) while rank {roomy} has "
            f"{units.ratio(room)} of its pool free, for {units.duration(seconds)}."
        )
        evidence: dict[str, float | int | str] = {
            "rank": name,
            "waiting": queue,
            "median_waiting": median(other for rank, other in self._queues.items() if rank != name),
            "free_rank": roomy,
            "free_share": room,
            "unbalanced_seconds": seconds,
        }
        return Finding(state, confidence, summary, evidence)


# --- concurrency-low ---------------------------------------------------------------------------------------------


class ConcurrencyLowSettings(Section):
    """How many requests of the longest length the pool should hold."""

    ticket_below: float = Field(default=1.0, ge=0, le=1000, description="Fewer than this: ticket.")
    info_below: float = Field(default=1.5, ge=0, le=1000, description="Fewer than this: info.")
    hold: Duration = Field(default=3600.0, ge=0, le=86400, description="How long a ticket outlasts its cause.")


class ConcurrencyLow:
    """The KV pool holds less than a few requests of the longest length: exact, from one page. About 3 kB.

    What its log said while it started stands in for ranks whose page does not tell, and before the first page.
    """

    verdict = "concurrency-low"

    def __init__(self, subject: Subject, settings: ConcurrencyLowSettings) -> None:
        self.subject = subject
        self.settings = settings
        self._fresh = Freshness()
        self._standing = Standing(settings.hold, settings.hold)
        self._segment = -1
        self._held: dict[str, tuple[float, int | None]] = {}  # by rank: requests that fit, tokens
        self._told: dict[str, tuple[float, int | None]] = {}  # the same, by the log
        self._started: float | None = None  # the start that it told of
        self._max_len: int | None = None

    def observe(self, sample: Sample) -> None:
        if isinstance(sample, LogSample) and sample.start is not None:
            self._told_of(sample.start)
        if not isinstance(sample, RankSample):
            return
        if sample.segment != self._segment:
            self._segment = sample.segment
            self._held.clear()
            self._standing.reset()
        self._fresh.seen(sample.t)
        pool = sample.reading.pool
        tokens = known(pool.tokens)
        self._max_len = sample.facts.max_model_len
        concurrency = _concurrency(known(pool.max_concurrency), tokens, self._max_len)
        if concurrency is not None:
            self._held[sample.rank] = (concurrency, tokens)

    def _told_of(self, start: StartUp) -> None:
        if start.since != self._started:
            self._started = start.since
            if self._fresh.t is None:
                self._standing.reset()
        self._told.clear()
        if start.phase == "over" or start.refusals:
            return
        for rank, pool in start.pools.items():
            concurrency = _concurrency(pool.concurrency, pool.tokens, pool.max_model_len or start.max_model_len)
            if concurrency is not None:
                self._told[rank] = (concurrency, pool.tokens)
        if self._max_len is None:
            self._max_len = start.max_model_len

    def conclude(self, t: float) -> Finding:
        silent = self._fresh.stale(t) and (self._fresh.t is not None or not self._told)
        return self._standing.settle(t, NO_PAGE if silent else self._now())

    def _now(self) -> Finding:
        known_ranks = {**self._told, **self._held}
        if not known_ranks:
            return unknown("the pool's tokens or the longest sequence are not known")
        concurrency, tokens = min(known_ranks.values(), key=lambda held: held[0])
        evidence: dict[str, float | int | str] = {"max_concurrency": concurrency}
        if tokens is not None:
            evidence["pool_tokens"] = tokens
        if self._max_len:
            evidence["max_model_len"] = self._max_len
        if concurrency >= self.settings.info_below:
            return Finding("clear", evidence=evidence)
        low = concurrency < self.settings.ticket_below
        size = f" ({units.count(tokens)} tokens)" if tokens is not None else ""
        means = "one such request cannot be served" if concurrency < 1 else "one such request starves the rest"
        summary = f"The KV pool{size} holds {concurrency:.2f} requests of the longest length: {means}."
        return Finding("ticket" if low else "info", 1.0, summary, evidence)


def _concurrency(told: float | None, tokens: int | None, length: int | None) -> float | None:
    """How many requests of the longest length a pool holds: as it is told, else by the pool's tokens."""
    if told is None and tokens is not None and length:
        return tokens / length
    return told
