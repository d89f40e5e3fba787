"""What an engine's log says of its end: a start that was refused, an allocator that ran out. Its numbers decide.

Where no log is read, the probe inside a worker has the same numbers of an allocation that failed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from pydantic import Field

from oomwatch import units
from oomwatch.detectors.base import (
    CLEAR,
    AllocatorSample,
    EngineSample,
    Evidence,
    Finding,
    LogSample,
    ProcessEnd,
    Sample,
    State,
    Subject,
    unknown,
)
from oomwatch.detectors.service import ANSWERED, GIB
from oomwatch.detectors.standing import Standing
from oomwatch.enginelog.events import REFUSALS, Origin, OutOfMemory, Refused
from oomwatch.enginelog.killer import Cause, cause_of
from oomwatch.enginelog.story import SAME_FAILURE, Ended, Refusal, Shortage, StartUp
from oomwatch.settings import Duration, Section

_HOUR = 3600.0
_RANKS_KEPT = 64
_SILENT_AFTER = 180.0  # seconds without a probe's word, after which that nothing failed is not known any more

STEP_WORDS = {
    "load": "while loading weights",
    "profile": "while profiling its memory",
    "kv_pool": "while making its KV pool",
    "warm_up": "while warming up",
    "graphs": "while capturing graphs or warming up",
    "serve": "while serving",
}


class Log:
    """Whether an engine's log is read at all."""

    def __init__(self) -> None:
        self._readable: bool | None = None

    def observe(self, sample: LogSample) -> None:
        """It told something, or its source did."""
        self._readable = sample.readable

    @property
    def read(self) -> bool:
        return bool(self._readable)

    def silence(self) -> Finding:
        """What is concluded where the log told nothing."""
        if self._readable:
            return CLEAR
        return unknown("no log of the engine is read" if self._readable is None else "its log cannot be read")


def failed_inside(sample: AllocatorSample) -> Shortage | None:
    """The last allocation that failed in a worker, as its log would tell it, by the probe inside it."""
    failure = sample.report.failure
    if failure is None:
        return None
    unallocated = None
    if failure.reserved is not None and failure.allocated is not None:
        unallocated = failure.reserved - failure.allocated
    error = OutOfMemory(
        wanted=failure.wanted,
        free=failure.free,
        total=failure.total,
        allocated=failure.allocated,
        private_pools=sample.report.private_reserved,
        reserved=unallocated,
    )
    serving = sample.ready_since is not None and failure.t >= sample.ready_since
    return Shortage(failure.t, error, Origin("worker", sample.report.pid), None, serving)


def came_up(sample: Sample) -> float | None:
    """When the engine was up, where a sample says that it is."""
    if isinstance(sample, EngineSample) and sample.state in ANSWERED and sample.state != "dead":
        return sample.t
    if isinstance(sample, LogSample) and sample.start is not None and sample.start.phase == "serving":
        return sample.start.ready
    return None


# --- startup-refused ---------------------------------------------------------------------------------------------


class StartupRefusedSettings(Section):
    """How long a refusal counts."""

    within: Duration = Field(
        default=24 * _HOUR, gt=0, description="How long a refusal stands while the engine does not come up."
    )
    ticket_hold: Duration = Field(default=_HOUR, ge=0, description="How long it stands after a start succeeded.")


class StartupRefused:
    """An engine refused to start, and its log says why and by how much. About 4 kB."""

    verdict = "startup-refused"

    def __init__(self, subject: Subject, settings: StartupRefusedSettings) -> None:
        self.subject = subject
        self.settings = settings
        self._log = Log()
        self._standing = Standing(ticket_s=settings.ticket_hold)
        self._last: Refusal | None = None
        self._evidence: Evidence = {}
        self._count = 0
        self._up: float | None = None

    def observe(self, sample: Sample) -> None:
        """Follow refusals and starts that succeed."""
        if isinstance(sample, LogSample):
            self._log.observe(sample)
            if isinstance(sample.news, Refusal):
                self._refused(sample.news, sample.start)
        up = came_up(sample)
        if up is not None and (self._up is None or up > self._up):
            self._up = up

    def _refused(self, refusal: Refusal, start: StartUp | None) -> None:
        again = self._last is not None and not self._came_up_since(self._last.t)
        if self._last is None or refusal.t - self._last.t > SAME_FAILURE:
            self._count = self._count + 1 if again else 1
        self._last = refusal
        self._evidence = refusal_evidence(refusal.refused, start)

    def _came_up_since(self, t: float) -> bool:
        return self._up is not None and self._up > t

    def conclude(self, t: float) -> Finding:
        """Judge the last refusal."""
        return self._standing.settle(t, self._now(t))

    def _now(self, t: float) -> Finding:
        last = self._last
        if last is None or self._came_up_since(last.t) or t - last.t > self.settings.within:
            return self._log.silence()
        evidence = {**self._evidence, "refused_starts": self._count, "last_failure": last.t}
        times = f", {self._count} times in a row" if self._count > 1 else ""
        summary = (
            f"{self.subject.engine} refused to start{times}, the last {units.ago(last.t, t)}: "
            f"{refusal_text(last.refused)}."
        )
        return Finding("ticket", 0.95, summary, evidence)


def refusal_text(refused: Refused) -> str:
    """Why, with the numbers that its sentence has."""
    return f"{REFUSALS[refused.reason]}{_numbers_of(refused)}"


def _numbers_of(refused: Refused) -> str:
    wanted, available = refused.wanted, refused.available
    match refused.reason:
        case "budget_above_free" | "weights_above_budget" | "host_memory" if wanted and available is not None:
            of = f" of {units.size(refused.total)}" if refused.total else ""
            return f" ({units.size(wanted)}{of} wanted, {units.size(available)} there)"
        case "context_too_long" if refused.tokens is not None:
            return f" ({units.count(refused.max_model_len or 0)} tokens wanted, {units.count(refused.tokens)} there)"
        case "context_too_long" if wanted and available is not None:
            of = f" for {units.count(refused.max_model_len)} tokens" if refused.max_model_len else ""
            return f" ({units.size(wanted)}{of} wanted, {units.size(available)} there)"
        case "context_too_long" if refused.max_model_len and refused.fitting_max_model_len is not None:
            there = units.count(refused.fitting_max_model_len)
            return f" ({units.count(refused.max_model_len)} tokens wanted, {there} there)"
        case "profiling_disturbed" if available is not None and refused.free_now is not None:
            return f" ({units.size(available)} were free at first, {units.size(refused.free_now)} later)"
        case "too_many_sequences":
            return f" ({refused.max_num_seqs} sequences, {refused.blocks} blocks)"
        case "swap_space" if wanted and refused.total is not None:
            return f" ({units.size(wanted)} wanted, {units.size(refused.total)} in all)"
    return ""


def refusal_evidence(refused: Refused, start: StartUp | None) -> Evidence:
    """The numbers of a refusal, and the settings that would have passed under stable names.

    ``largest_passing_utilization`` is what was free over the total; ``smallest_passing_utilization`` what would make
    room for one request of the longest length, where that much was free.
    """
    utilization = refused.utilization if refused.utilization is not None else start.utilization if start else None
    numbers = {
        # 0.0 GiB is what a small size was rounded to.
        "wanted_bytes": refused.wanted or None,
        "available_bytes": None if refused.wanted == 0 else refused.available,
        "free_now_bytes": refused.free_now,
        "total_bytes": refused.total,
        "utilization": utilization,
        "max_model_len": refused.max_model_len or (start.max_model_len if start else None),
        "pool_tokens": refused.tokens,
        "largest_passing_utilization": _largest_utilization(refused),
        "smallest_passing_utilization": _smallest_utilization(refused, start, utilization),
        "largest_max_model_len": _largest_length(refused),
        "largest_max_num_seqs": refused.blocks if refused.reason == "too_many_sequences" else None,
    }
    return {"reason": refused.reason, **{name: value for name, value in numbers.items() if value is not None}}


def _largest_utilization(refused: Refused) -> float | None:
    if refused.reason != "budget_above_free" or not refused.total or refused.available is None:
        return None
    # What another process holds of the weights counts into the budget, and is not free (0.32 and newer).
    elsewhere = (refused.utilization or 0.0) * refused.total - (refused.wanted or 0)
    held = elsewhere if elsewhere > GIB / 50 else 0.0
    return min(1.0, (refused.available + held) / refused.total)


def _smallest_utilization(refused: Refused, start: StartUp | None, now: float | None) -> float | None:
    if start is None or now is None or refused.reason not in ("context_too_long", "no_room"):
        return None
    for budget in start.budgets.values():
        if not budget.total:
            continue
        missing = None
        if refused.wanted is not None and refused.available is not None:
            missing = refused.wanted - refused.available
        elif refused.tokens and refused.max_model_len and budget.kv_pool:
            missing = round(budget.kv_pool * (refused.max_model_len / refused.tokens - 1))
        elif budget.kv_pool is not None and budget.kv_pool <= 0:
            missing = -budget.kv_pool
        if not missing or missing < 0:
            continue
        needed = now + missing / budget.total
        fits = needed <= 1.0 if budget.free is None else needed * budget.total <= budget.free
        return needed if fits else None
    return None


def _largest_length(refused: Refused) -> int | None:
    if refused.reason != "context_too_long":
        return None
    if refused.fitting_max_model_len is not None or refused.tokens is not None:
        return refused.fitting_max_model_len or refused.tokens
    if not refused.wanted or refused.available is None or refused.max_model_len is None:
        return None
    # The sentence has two decimals of GiB: the estimate is on the safe side of them.
    rounding = GIB / 200
    share = (refused.available - rounding) / (refused.wanted + rounding)
    return max(1, int(refused.max_model_len * share)) if share > 0 else None


# --- runtime-oom -------------------------------------------------------------------------------------------------


class RuntimeOomSettings(Section):
    """How long an out-of-memory error of a serving engine counts."""

    down_within: Duration = Field(
        default=6 * _HOUR, gt=0, description="How long a page stands while the engine does not come back."
    )
    page_hold: Duration = Field(default=900.0, ge=0, description="How long a page stands after the engine is back.")
    ticket_hold: Duration = Field(default=_HOUR, ge=0, description="How long a ticket stands after the error.")


class RuntimeOom:
    """The allocator ran out while the engine served: a page when it died of it. One for all ranks. About 6 kB.

    By the engine's log; where none is read, by the probes inside its workers.
    """

    verdict = "runtime-oom"

    def __init__(self, subject: Subject, settings: RuntimeOomSettings) -> None:
        self.subject = subject
        self.settings = settings
        self._log = Log()
        self._standing = Standing(settings.page_hold, settings.ticket_hold)
        self._ranks: list[Shortage] = []  # of the last failure
        self._died: float | None = None  # the last death
        self._back: float | None = None  # when it was up after that
        self._inside: dict[int, float] = {}  # by pid: the failure that a probe last told of
        self._probed: float | None = None  # when a probe last told
        self._ends: deque[tuple[int, float]] = deque(maxlen=_RANKS_KEPT)  # of its processes

    def observe(self, sample: Sample) -> None:
        """Follow errors, deaths and returns."""
        if isinstance(sample, LogSample):
            self._log.observe(sample)
            if isinstance(sample.news, Shortage) and sample.news.serving is not False:
                self._ran_out(sample.news)
            elif isinstance(sample.news, Ended):
                self._died, self._back = sample.news.t, None
                if sample.news.ready is None:
                    self._not_of(sample.start)
        elif isinstance(sample, AllocatorSample):
            self._told_inside(sample)
        elif isinstance(sample, ProcessEnd):
            self._ends.append((sample.pid, sample.t))
            if sample.pid in self._inside:
                self._ended(sample.t)
        elif isinstance(sample, EngineSample) and sample.state in ("dead", "gone"):
            self._ended(sample.t)
        up = came_up(sample)
        if up is not None and self._died is not None and up - self._died > SAME_FAILURE:
            self._back = self._back or up

    def _told_inside(self, sample: AllocatorSample) -> None:
        pid, shortage = sample.report.pid, failed_inside(sample)
        if sample.report.stats:
            self._probed = sample.t
        if shortage is None or self._inside.get(pid) == shortage.t or self._log.read:
            return
        self._inside[pid] = shortage.t
        if len(self._inside) > _RANKS_KEPT:
            del self._inside[next(iter(self._inside))]
        if not shortage.serving or sample.t - shortage.t > SAME_FAILURE:
            return
        self._ran_out(shortage)
        for ended, t in self._ends:
            if ended == pid:  # its last word was read after its end was noticed
                self._ended(t)

    def _ran_out(self, shortage: Shortage) -> None:
        if not self._ranks or shortage.t - self._ranks[-1].t > SAME_FAILURE:
            self._ranks = []
        if len(self._ranks) < _RANKS_KEPT:
            self._ranks.append(shortage)

    def _not_of(self, start: StartUp | None) -> None:
        """A start failed: what was taken for an error of a serving engine, since nothing told otherwise, was its."""
        told = [(one.t, one.origin) for one in (start.shortages if start else ()) if one.serving is False]
        left = [one for one in self._ranks if (one.t, one.origin) not in told]
        if left != self._ranks:
            self._ranks = left
            self._standing.reset()

    def _ended(self, t: float) -> None:
        again = self._died is None or self._back is not None
        if self._ranks and again and abs(t - self._ranks[-1].t) <= SAME_FAILURE:
            self._died, self._back = t, None

    def conclude(self, t: float) -> Finding:
        """Judge the last failure."""
        return self._standing.settle(t, self._now(t))

    def _now(self, t: float) -> Finding:
        if not self._ranks:
            return self._silence(t)
        first, last = self._ranks[0], self._ranks[-1]
        died = self._died is not None and abs(self._died - last.t) <= SAME_FAILURE
        if died and self._back is None and t - last.t <= self.settings.down_within:
            return self._finding(t, "page", first, died=True)
        if t - last.t <= SAME_FAILURE:
            return self._finding(t, "page" if died else "ticket", first, died=died)
        return self._silence(t)

    def _silence(self, t: float) -> Finding:
        told = self._probed is not None and t - self._probed <= _SILENT_AFTER
        return CLEAR if told else self._log.silence()

    def _finding(self, t: float, state: State, first: Shortage, *, died: bool) -> Finding:
        cause = cause_of(first.error)
        evidence = {**shortage_evidence(self._ranks, cause), "last_failure": first.t}
        what = "ran out of memory and died" if died else "ran out of memory"
        summary = f"{self.subject.engine} {what} {units.ago(first.t, t)}: {shortage_text(first, cause)}."
        return Finding(state, cause.confidence, summary, evidence, killer=cause.killer)


def shortage_text(shortage: Shortage, cause: Cause) -> str:
    """What was wanted and what was there, and what follows from it."""
    error = shortage.error
    if error.host:
        size = f" of {units.size(error.wanted)}" if error.wanted is not None else ""
        return f"an allocation{size} of host memory failed"
    if error.dummy_requests is not None:
        return f"warming up for {error.dummy_requests} requests at once did not fit"
    if error.wanted is None or error.free is None:
        return "there are no numbers of it"
    reserved = f" and {units.size(error.reserved)} reserved but unallocated" if error.reserved is not None else ""
    numbers = f"it wanted {units.size(error.wanted)} with {units.size(error.free)} free{reserved}"
    match cause.how:
        case "too_little":
            return f"{numbers}, too little whatever its text says of fragmentation"
        case "in_pieces":
            return f"{numbers}, enough but in pieces"
        case "race":
            return f"{numbers}: more was free than wanted, so sizes were rounded or somebody took it for a moment"
    return numbers


def shortage_evidence(ranks: Iterable[Shortage], cause: Cause) -> Evidence:
    """The numbers of the first error of a failure, under stable names, and how many workers it met."""
    listed = list(ranks)
    error = listed[0].error
    numbers = {
        "step": listed[0].step,
        "wanted_bytes": error.wanted,
        "free_bytes": error.free,
        "reserved_unallocated_bytes": error.reserved,
        "total_bytes": error.total,
        "in_use_bytes": error.in_use,
        "others_bytes": error.others or None,
        "private_pools_bytes": error.private_pools,
        "missing_bytes": cause.missing,
        "strength": cause.strength,
        "dummy_requests": error.dummy_requests,
        "workers": len(listed),
    }
    return {"cause": cause.how, **{name: value for name, value in numbers.items() if value is not None}}
