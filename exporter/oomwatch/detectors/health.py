"""Whether the sources can be trusted: devices that fell off, calls that hang, silence, and pages without our series."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pydantic import Field

from oomwatch import units
from oomwatch.detectors.base import (
    CLEAR,
    DeviceSample,
    EngineSample,
    Evidence,
    Finding,
    HostSample,
    ProcessEnd,
    Resumed,
    Sample,
    Subject,
    unknown,
)
from oomwatch.detectors.service import ANSWERED, Pace
from oomwatch.detectors.standing import Standing
from oomwatch.observations import HUNG, NOT_READ, Absent, RankReading
from oomwatch.settings import Duration, Section

_LOST = {
    "GPU_IS_LOST": "has fallen off the bus",
    "GPU_NOT_FOUND": "is counted no more",
    "NOT_FOUND": "is counted no more",
    "RESET_REQUIRED": "needs a reset before it can be used again",
}
# The device answers, and withholds its memory: a MIG parent, a device that shares the host's memory.
_WITHHELD = frozenset({"NO_PERMISSION", "NOT_SUPPORTED", "MIG_ENABLED"})
RELEASED = "RELEASED"  # the driver was given back on request: silence that was asked for

_GAPS = 3  # of its own intervals without a fresh sample, and a source is stale
_LEAST_GAP = 30.0


def _reason(sample: DeviceSample) -> str:
    """Why the device's memory is not known; empty where it is."""
    return sample.memory.reason if isinstance(sample.memory, Absent) else ""


def _stale_after(pace: Pace) -> float:
    return max(_LEAST_GAP, _GAPS * pace.interval)


# --- gpu-lost ----------------------------------------------------------------------------------------------------


class GpuLostSettings(Section):
    """When a device counts as lost."""

    confirm: Duration = Field(default=30.0, ge=0, description="How long no poll may have found it again.")
    page_hold: Duration = Field(default=300.0, ge=0, description="How long a page stands after the device came back.")


class GpuLost:
    """A device fell off the bus, is counted no more, or asks for a reset. About 4 KiB."""

    verdict = "gpu-lost"

    def __init__(self, subject: Subject, settings: GpuLostSettings) -> None:
        self.subject = subject
        self.settings = settings
        self._pace = Pace()
        self._standing = Standing(settings.page_hold, settings.page_hold)
        self._reason = ""
        self._since = 0.0
        self._last_good: float | None = None
        self._engines: tuple[str, ...] = ()

    def observe(self, sample: Sample) -> None:
        """Note what the poll met."""
        if not isinstance(sample, DeviceSample):
            return
        self._pace.seen(sample.t)
        reason = _reason(sample)
        if reason in _LOST:
            if not self._reason:
                self._since = sample.t
            self._reason = reason
        elif not reason or reason in _WITHHELD:
            # Only an answer of the device takes it back: a driver that is down says nothing about it.
            self._reason, self._last_good = "", sample.t
        if sample.engines:
            self._engines = sample.engines

    def conclude(self, t: float) -> Finding:
        """Lost until it answers again, polled or not."""
        if self._reason and t - self._since >= self.settings.confirm:
            evidence: dict[str, float | int | str | list[int] | list[str]] = {
                "error": self._reason,
                "lost_since": self._since,
                "engines": list(self._engines),
            }
            if self._last_good is not None:
                evidence["last_seen"] = self._last_good
            hit = f" It ran {', '.join(self._engines)}." if self._engines else ""
            summary = (
                f"{self.subject.gpu} {_LOST[self._reason]} ({self._reason}) since {units.moment(self._since)}.{hit}"
            )
            return self._standing.settle(t, Finding("page", 0.95, summary, evidence))
        if self._pace.last is None or self._last_good is None:
            return unknown("the device has not answered yet")
        if self._pace.silence(t) > _stale_after(self._pace):
            return self._standing.settle(t, unknown("no fresh poll of this device"))
        return self._standing.settle(t, CLEAR)


# --- nvml-stuck --------------------------------------------------------------------------------------------------


class NvmlStuckSettings(Section):
    """When a driver call that does not return is worth a ticket."""

    ticket_after: Duration = Field(
        default=60.0, ge=0, description="How long no call about the device may have returned."
    )
    ticket_hold: Duration = Field(default=300.0, ge=0, description="How long a ticket stands after calls return again.")


class NvmlStuck:
    """A driver call about a device has not returned. About 4 KiB."""

    verdict = "nvml-stuck"

    def __init__(self, subject: Subject, settings: NvmlStuckSettings) -> None:
        self.subject = subject
        self.settings = settings
        self._pace = Pace()
        self._standing = Standing(ticket_s=settings.ticket_hold)
        self._since: float | None = None
        self._last_good: float | None = None

    def observe(self, sample: Sample) -> None:
        """Note whether the poll came back."""
        if not isinstance(sample, DeviceSample):
            return
        self._pace.seen(sample.t)
        if HUNG in (sample.memory, sample.processes):
            self._since = sample.t if self._since is None else self._since
        elif sample.processes != NOT_READ or not isinstance(sample.memory, Absent):
            self._since, self._last_good = None, sample.t

    def conclude(self, t: float) -> Finding:
        """Stuck until a call returns, polled or not."""
        if self._since is not None:
            seconds = t - self._since
            evidence: dict[str, float | int | str | list[int] | list[str]] = {
                "hung_seconds": seconds,
                "hung_since": self._since,
            }
            if self._last_good is not None:
                evidence["last_seen"] = self._last_good
            summary = f"A driver call about {self.subject.gpu} has not returned for {units.duration(seconds)}."
            late = seconds >= self.settings.ticket_after
            return self._standing.settle(t, Finding("ticket" if late else "info", 0.95, summary, evidence))
        if self._pace.last is None:
            return unknown("the device has not been polled yet")
        if self._pace.silence(t) > _stale_after(self._pace):
            return self._standing.settle(t, unknown("no fresh poll of this device"))
        return self._standing.settle(t, CLEAR)


# --- source-stale ------------------------------------------------------------------------------------------------


class SourceStaleSettings(Section):
    """How long a source may say nothing."""

    ticket_after: Duration = Field(default=300.0, gt=0, description="Silence from which on it is a ticket.")
    start_grace: Duration = Field(
        default=900.0,
        gt=0,
        description="The same for an engine that has not answered yet, or whose processes have just started: loading a "
        "model takes time.",
    )
    ended_after: Duration = Field(
        default=72 * 3600.0,
        gt=0,
        description="An engine whose processes have ended and that has not come back for so long was taken away on "
        "purpose: a hint remains.",
    )


class SourceStale:
    """No fresh sample of a device, or of an engine's page, for three of its own intervals. About 3 KiB.

    A found engine that has ended is no source any more; a configured one is expected back.
    """

    verdict = "source-stale"

    def __init__(self, subject: Subject, settings: SourceStaleSettings) -> None:
        self.subject = subject
        self.settings = settings
        self._pace = Pace()
        self._first: float | None = None
        self._fresh: float | None = None
        self._why = ""
        self._released = False
        self._found = False  # by discovery: nobody stated that it should be there
        self._started: float | None = None  # when a process of its present start was first seen
        self._pids: set[int] = set()  # its processes that live
        self._ended: float | None = None  # when the last of them ended

    def observe(self, sample: Sample) -> None:
        """Note when the source last brought something fresh."""
        match sample:
            case DeviceSample() if sample.gpu == self.subject.gpu:
                self._device(sample)
            case EngineSample() if sample.engine == self.subject.engine:
                self._engine(sample)
            case Resumed():
                self._resume(sample)
            case HostSample() if sample.engine == self.subject.engine:
                self._lives(sample.t, sample.process.pid)
            case ProcessEnd() if self.subject.engine is not None and sample.pid in self._pids:
                self._pids.discard(sample.pid)
                if not self._pids:
                    self._ended, self._started = sample.t, None

    def _resume(self, sample: Resumed) -> None:
        """Silence is counted only while somebody listens."""
        unseen = sample.t - sample.since
        self._first = None if self._first is None else self._first + unseen
        self._fresh = None if self._fresh is None else self._fresh + unseen
        self._started = None if self._started is None else self._started + unseen

    def _device(self, sample: DeviceSample) -> None:
        reason = _reason(sample)
        self._released = reason == RELEASED
        if self._released:
            return
        self._first = sample.t if self._first is None else self._first
        self._pace.seen(sample.t)
        self._why = reason
        if not reason or reason in _WITHHELD:
            self._fresh = sample.t

    def _engine(self, sample: EngineSample) -> None:
        self._first = sample.t if self._first is None else self._first
        self._pace.seen(sample.t)
        self._found = sample.facts.origin == "discovery"
        self._why = "" if sample.state in ANSWERED else sample.error or sample.state.replace("_", " ")
        if sample.state in ANSWERED:
            self._fresh, self._started, self._ended = sample.t, None, None
            self._pids = set(sample.pids)
        elif sample.state == "gone":
            self._pids.clear()
            self._ended = sample.t if self._ended is None else self._ended

    def _lives(self, t: float, pid: int) -> None:
        if pid not in self._pids:
            self._pids.add(pid)
            self._started = t if self._started is None else self._started
            self._ended = None

    def conclude(self, t: float) -> Finding:
        """Compare the silence with the source's own interval."""
        if self._released:
            return unknown("the driver was given back on request")
        if self._first is None:
            return unknown("not read yet")
        since = self._first if self._fresh is None else self._fresh
        silence = t - since
        if silence <= _stale_after(self._pace):
            return CLEAR if self._fresh is not None else unknown("nothing read yet")
        return self._stale(t, since, silence)

    def _stale(self, t: float, since: float, silence: float) -> Finding:
        evidence: Evidence = {
            "silent_seconds": silence,
            "silent_since": since,
            "interval_seconds": self._pace.interval,
            "reason": self._why,
        }
        name = self.subject.engine or self.subject.gpu
        what = f"No page of {name} has been read" if self.subject.engine else f"{name} has not been read"
        told = f": {self._why}" if self._why else ""
        summary = f"{what} for {units.duration(silence)}{told}."
        late = silence >= max(self.settings.ticket_after, _stale_after(self._pace))
        if self._ended is not None:
            summary += f" Its processes ended {units.ago(self._ended, t)}."
            if self._found and self._pace.silence(t) > _stale_after(self._pace):
                return unknown("the engine has ended", evidence)
            late = late and t - self._ended < self.settings.ended_after
        elif self._started is not None:
            summary += f" It has been starting for {units.duration(t - self._started)}."
            late = late and t - self._started >= self.settings.start_grace
        elif self._fresh is None and self.subject.engine is not None:
            late = silence >= self.settings.start_grace
        return Finding("ticket" if late else "info", 0.9, summary, evidence)


# --- metrics-missing ---------------------------------------------------------------------------------------------


class MetricsMissingSettings(Section):
    """How long series that are needed may be missing from a page that is answered."""

    after: Duration = Field(
        default=120.0, ge=0, description="How long they have to be missing: a start shows them by and by."
    )
    no_traffic: Duration = Field(
        default=24 * 3600.0,
        ge=0,
        description="How long a page without gauges passes for one that has seen no request yet.",
    )
    ticket_hold: Duration = Field(
        default=300.0, ge=0, description="How long a ticket stands after they have come back."
    )


_NEEDED: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("usage of the KV pool (vllm:kv_cache_usage_perc, vllm:gpu_cache_usage_perc)", ("usage",)),
    ("running requests (vllm:num_requests_running)", ("running",)),
    ("waiting requests (vllm:num_requests_waiting)", ("waiting",)),
    (
        "tokens (vllm:prompt_tokens_total, vllm:generation_tokens_total)",
        ("prompt_tokens", "generation_tokens"),
    ),
)
_POOL = "size of the KV pool (vllm:cache_config_info, num_gpu_blocks)"


@dataclass
class _Missing:
    """Series that are not there, and since when."""

    names: tuple[str, ...]
    since: float


class MetricsMissing:
    """The engine answers, and series that the verdicts need are not on its page. About 5 KiB.

    Some front ends never show the pool's size (the Rust one; 0.8's "None"): that is a hint.
    """

    verdict = "metrics-missing"

    def __init__(self, subject: Subject, settings: MetricsMissingSettings) -> None:
        self.subject = subject
        self.settings = settings
        self._pace = Pace()
        self._standing = Standing(ticket_s=settings.ticket_hold)
        self._state = ""
        self._needed: _Missing | None = None
        self._pool: _Missing | None = None
        self._quiet_since: float | None = None

    def observe(self, sample: Sample) -> None:
        """Look through an answered page."""
        if not isinstance(sample, EngineSample) or sample.state not in ANSWERED:
            return
        self._pace.seen(sample.t)
        self._state = sample.state
        missing: tuple[str, ...] = ()
        pool: tuple[str, ...] = ()
        if sample.state == "stats_disabled":
            missing = ("every vllm: series",)
        elif sample.state != "no_traffic_yet":
            missing = _missing(sample.ranks)
            pool = () if all(not isinstance(rank.pool.blocks, Absent) for rank in sample.ranks) else (_POOL,)
        quiet = sample.state == "no_traffic_yet"
        self._quiet_since = (sample.t if self._quiet_since is None else self._quiet_since) if quiet else None
        self._needed = _since(self._needed, missing, sample.t)
        self._pool = _since(self._pool, pool, sample.t)

    def conclude(self, t: float) -> Finding:
        """Judge the latest answered page, while it is fresh."""
        if self._pace.last is None:
            return unknown("no page has been read yet")
        if self._pace.silence(t) > max(180.0, _stale_after(self._pace)):
            return self._standing.settle(t, unknown("no fresh page of metrics"))
        return self._standing.settle(t, self._now(t))

    def _now(self, t: float) -> Finding:
        if self._needed is not None and t - self._needed.since >= self.settings.after:
            return self._finding("ticket", self._needed, t)
        if self._quiet_since is not None:
            quiet = t - self._quiet_since
            if quiet < self.settings.no_traffic:
                return unknown("no request has come yet, and its gauges show only then")
            summary = f"{self.subject.engine} has shown no gauges for {units.duration(quiet)}: no request has come, or "
            return Finding("info", 0.5, summary + "its statistics are lost.", {"quiet_seconds": quiet})
        if self._pool is not None and t - self._pool.since >= self.settings.after:
            return self._finding("info", self._pool, t)
        if self._needed is not None:
            return unknown("series are missing, for a moment yet")
        return CLEAR

    def _finding(self, state: str, missing: _Missing, t: float) -> Finding:
        seconds = t - missing.since
        evidence: Evidence = {"missing": list(missing.names), "missing_seconds": seconds, "page": self._state}
        what = "; ".join(missing.names)
        summary = f"{self.subject.engine} answers, and its page lacks: {what}."
        if self._state == "stats_disabled":
            summary = f"{self.subject.engine} answers with its statistics disabled: looked for {what}."
        return Finding("ticket" if state == "ticket" else "info", 0.95, summary, evidence)


def _missing(ranks: Iterable[RankReading]) -> tuple[str, ...]:
    """What some rank lacks altogether, in words with vLLM's names."""
    listed = tuple(ranks)
    return tuple(
        words
        for words, fields in _NEEDED
        if not listed or any(all(isinstance(getattr(rank, field), Absent) for field in fields) for rank in listed)
    )


def _since(before: _Missing | None, names: tuple[str, ...], t: float) -> _Missing | None:
    if not names:
        return None
    return _Missing(names, t if before is None else before.since)
