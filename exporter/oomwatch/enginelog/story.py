"""The story that a log tells: start after start, what each took and how it ended.

One fold for a live engine, a replay and a post-mortem. It keeps the last starts only, and of each a bounded number of
refusals and errors.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias, TypeVar

from oomwatch.enginelog.events import (
    YEAR,
    Budget,
    Died,
    Entry,
    Fitted,
    KvPool,
    Load,
    Origin,
    OutOfMemory,
    Preempted,
    Ready,
    Refused,
    Settings,
    Slept,
    Start,
    Step,
    Stopped,
    known_fields,
)
from oomwatch.enginelog.killer import cause_of

Part = TypeVar("Part", Budget, KvPool, Settings)

STARTS_KEPT = 64
_ERRORS_KEPT = 64
SAME_FAILURE = 60.0  # seconds within which ranks, and the reports of one failure by several processes, belong together
_INTERLEAVED = 10.0  # seconds that lines of several processes may be out of order
_LONGEST_STEP = 3600.0  # seconds that a step of a start may take: large models are loaded from slow disks
FRAMES_LAST = 10.0  # seconds that a traceback's lines may stand before its error

Phase = Literal["starting", "serving", "over"]


@dataclass(frozen=True)
class Shortage:
    """An out-of-memory error with its circumstances.

    ``step`` is what the engine was doing and ``serving`` whether it had started; None where the log does not tell.
    ``traced`` when the error's own traceback says so.
    """

    t: float
    error: OutOfMemory
    origin: Origin
    step: str | None
    serving: bool | None
    traced: bool = False


@dataclass(frozen=True)
class Refusal:
    """A start that was refused."""

    t: float
    refused: Refused
    origin: Origin


@dataclass(frozen=True)
class Ended:
    """An engine ended by an error; ``ready`` is when it had begun to serve, None where it never did."""

    t: float
    died: Died
    ready: float | None


News: TypeAlias = Refusal | Shortage | Ended


@dataclass
class StartUp:
    """One start of an engine, from its first line to its end, as far as its lines tell. Times are unix seconds.

    ``budgets`` are by (data-parallel rank, worker), ``pools`` by rank. ``ready`` is when it served, by the log or by
    an answered page; ``died`` when it ended by an error, ``stopped`` when it was asked to stop.
    """

    since: float
    last: float
    seen_from_start: bool = False
    version: str | None = None
    core: Start | None = None
    settings: Settings = field(default_factory=Settings)
    budgets: dict[tuple[str, str], Budget] = field(default_factory=dict)
    pools: dict[str, KvPool] = field(default_factory=dict)
    fitted: Fitted | None = None
    refusals: list[Refusal] = field(default_factory=list)
    shortages: list[Shortage] = field(default_factory=list)
    ready: float | None = None
    died: float | None = None
    deaths: list[Died] = field(default_factory=list)
    stopped: float | None = None
    load: tuple[float, Load] | None = None
    preempted: int | None = None
    slept: Slept | None = None
    cores: set[str] = field(default_factory=set)
    life: int | None = None  # of the engine, by its pages
    ready_by_page: bool = False  # an answered page came before the log's own word, which is read more slowly
    progressed: float = 0.0  # when it last told of a step of its start

    def serves(self, t: float) -> None:
        """Its log says so at ``t``, perhaps not for the first time."""
        if self.ready is None:
            self.ready = t

    @property
    def phase(self) -> Phase:
        if self.died is not None or self.stopped is not None:
            return "over"
        return "starting" if self.ready is None else "serving"

    @property
    def failed(self) -> bool:
        """It ended by an error before it served."""
        return self.ready is None and (self.died is not None or bool(self.refusals))

    @property
    def utilization(self) -> float | None:
        """The share of the device that was promised: as measured, else as the arguments say."""
        measured = (budget.utilization for budget in self.budgets.values())
        return next((value for value in measured if value is not None), self.settings.gpu_memory_utilization)

    @property
    def max_model_len(self) -> int | None:
        """The longest length in tokens that this start was made for."""
        if self.fitted is not None:
            return self.fitted.max_model_len
        core = self.core.max_model_len if self.core is not None else None
        pools = (pool.max_model_len for pool in self.pools.values())
        return core or next((value for value in pools if value is not None), None) or self.settings.max_model_len


class Story:
    """Folds the entries of one engine's log, in their order. ``starts`` are the latest, the present one last.

    ``ran_out`` counts failures of the allocator by killer and by what it did to the engine (``startup``, ``runtime``):
    one for all ranks that ran out within a minute.
    """

    def __init__(self) -> None:
        self.starts: deque[StartUp] = deque(maxlen=STARTS_KEPT)
        self.ran_out: Counter[tuple[str, str]] = Counter()
        self._told = 0.0  # the time of the latest entry
        self._steps: dict[int | None, tuple[float, str]] = {}  # by pid: the last telling line of a traceback

    @property
    def now(self) -> StartUp | None:
        """The latest start, ended or not."""
        return self.starts[-1] if self.starts else None

    def answered(self, t: float, life: int = 0) -> None:
        """The engine's page was answered at ``t``: it serves, whatever of its log was read.

        ``life`` counts its restarts, as far as its pages tell them. A front end may go on answering for a dead engine.
        """
        now = self.now
        # Of a restart that no line told, nothing that was told before holds.
        if now is None or (now.phase != "starting" and now.life is not None and now.life != life):
            now = StartUp(t, t, ready=t)
            self.starts.append(now)
        if now.phase == "starting":
            now.ready, now.ready_by_page = t, True
        if now.phase == "serving":
            now.life = life

    def apply(self, t: float, entry: Entry) -> News | None:
        """Fold one entry in; ``t`` is unix time, or any clock that the whole log shares.

        Gives what is new about how the engine fares: what another process only repeats is None.
        """
        event, origin = entry.event, entry.origin
        if entry.age and t < self._told - _INTERLEAVED:
            return None  # read back once more, by another run of the daemon
        self._told = max(self._told, t)
        if isinstance(event, Step):
            self._step(t, origin.pid, event.step)
            return None
        now = self._start_of(t, entry)
        now.last = t
        if isinstance(event, (Start, Settings, Budget, KvPool, Fitted)):
            now.progressed = t
        match event:
            case Start():
                self._started(now, event, origin)
            case Settings():
                now.settings = merged(now.settings, event)
            case Budget():
                place = origin.rank, origin.worker
                now.budgets[place] = merged(now.budgets.get(place, Budget()), replace(event, seconds=None))
            case KvPool():
                now.pools[origin.rank] = merged(now.pools.get(origin.rank, KvPool()), event)
            case Fitted():
                now.fitted = event
            case Ready() if event.server:
                now.serves(t)
            case Load():
                now.load = t, event
                now.serves(t)
            case Preempted():
                now.preempted = event.total
                now.serves(t)
            case Refused():
                return self._refused(t, now, event, origin)
            case OutOfMemory():
                return self._ran_out(t, now, event, origin)
            case Died():
                return self._died(t, now, event)
            case Stopped() if now.died is None:
                now.stopped = t if now.stopped is None else now.stopped
            case Slept():
                now.slept = event
        return None

    # --- which start -----------------------------------------------------------------------------------------

    def _start_of(self, t: float, entry: Entry) -> StartUp:
        now = self.now
        if now is None or self._begins(t, now, entry):
            now = StartUp(t, t, seen_from_start=isinstance(entry.event, Start))
            self.starts.append(now)
            if now.seen_from_start:
                self._steps.clear()
        return now

    @staticmethod
    def _begins(t: float, now: StartUp, entry: Entry) -> bool:
        """Whether an entry is the first of another start."""
        event, origin = entry.event, entry.origin
        over = now.phase == "over" or bool(now.refusals)
        if isinstance(event, Start):
            if over or now.ready is not None:
                return True
            # A start that was killed leaves no word: the next one's server, or the same rank's core, tells.
            return origin.rank in now.cores and _progressed(now) if event.core else bool(now.cores or _progressed(now))
        if isinstance(event, (Budget, KvPool)):
            late = now.seen_from_start and now.ready_by_page and t - (now.ready or t) <= SAME_FAILURE
            return (over or (now.ready is not None and not late)) and t - now.last > _INTERLEAVED
        if now.ready is not None and (isinstance(event, Refused) or _ends_a_start(event)):
            return not over or t - now.last > SAME_FAILURE  # of a start whose lines were not read
        if isinstance(event, (Load, Ready, OutOfMemory, Refused, Died)):
            return over and t - now.last > SAME_FAILURE
        return False

    @staticmethod
    def _started(now: StartUp, event: Start, origin: Origin) -> None:
        now.version = event.version or now.version
        if event.core:
            now.core = event
            now.cores.add(origin.rank)

    # --- how it ends -----------------------------------------------------------------------------------------

    def _step(self, t: float, pid: int | None, step: str) -> None:
        # V0 profiles by a forward pass: within a start's steps, serving's are no more than that.
        if step != "serve" or self._step_of(t, pid) in (None, "serve"):
            self._steps[pid] = t, step

    def _step_of(self, t: float, pid: int | None) -> str | None:
        told, step = self._steps.get(pid, (-math.inf, None))
        return step if t - told <= FRAMES_LAST else None

    def _refused(self, t: float, now: StartUp, event: Refused, origin: Origin) -> Refusal | None:
        self._steps.pop(origin.pid, None)
        said = any(refusal.refused == event and t - refusal.t <= SAME_FAILURE for refusal in now.refusals)
        if said or len(now.refusals) >= _ERRORS_KEPT:
            return None
        now.refusals.append(Refusal(t, event, origin))
        return now.refusals[-1]

    def _ran_out(self, t: float, now: StartUp, event: OutOfMemory, origin: Origin) -> Shortage | None:
        step = self._step_of(t, origin.pid)
        self._steps.pop(origin.pid, None)
        traced = step is not None
        if step is None and event.dummy_requests is not None:
            step = "warm_up"
        step = step or ("serve" if now.ready is not None else self._step_by_budget(t, now))
        serving = None if step is None else step == "serve"
        if serving is None and any(_ends_a_start(death) for death in now.deaths):
            serving = False
        recent = [one for one in now.shortages if t - one.t <= SAME_FAILURE]
        if any(_repeats(one, event, origin) for one in recent):
            return None
        if not recent:
            self.ran_out[cause_of(event).killer, "startup" if serving is False else "runtime"] += 1
        if len(now.shortages) >= _ERRORS_KEPT:
            del now.shortages[0]
        now.shortages.append(Shortage(t, event, origin, step, serving, traced))
        return now.shortages[-1]

    def _was_starting(self, t: float, now: StartUp) -> None:
        """What ran out just before a start failed was of that start, unless its own traceback says otherwise."""
        for start in list(self.starts)[-2:]:
            told = [one for one in start.shortages if _of_a_start(t, one)]
            for one in told:
                start.shortages.remove(one)
            now.shortages += [replace(one, serving=False, step=None) for one in told]

    @staticmethod
    def _step_by_budget(t: float, now: StartUp) -> str | None:
        """What comes next after the lines that were read; long after them the log left out that it served."""
        if t - now.progressed > _LONGEST_STEP or (not now.seen_from_start and not _progressed(now)):
            return None
        budgets = tuple(now.budgets.values())
        if now.pools:
            return "graphs"
        if any(budget.kv_pool is not None for budget in budgets):
            return "kv_pool"
        return "profile" if any(budget.weights is not None for budget in budgets) else "load"

    def _died(self, t: float, now: StartUp, event: Died) -> Ended | None:
        if _ends_a_start(event):
            self._was_starting(t, now)
        if now.stopped is not None:
            return None  # a server that is told to stop reports the end of its parts as an error
        if event not in now.deaths and len(now.deaths) < _ERRORS_KEPT:
            now.deaths.append(event)
        if now.died is not None:
            return None
        now.died = t
        return Ended(t, event, now.ready)


def _of_a_start(t: float, one: Shortage) -> bool:
    return one.serving is not False and not one.traced and t - one.t <= SAME_FAILURE


def _ends_a_start(event: object) -> bool:
    return isinstance(event, Died) and event.how == "start_failed"


def _progressed(now: StartUp) -> bool:
    return bool(now.budgets or now.pools)


def _repeats(one: Shortage, error: OutOfMemory, origin: Origin) -> bool:
    """Whether an error is told again by another process, or wraps one of the same process."""
    if one.error == error:
        return one.origin.pid == origin.pid or None in (one.origin.pid, origin.pid) or origin.role != "worker"
    return error.wanted is None and error.dummy_requests is None


def merged(before: Part, now: Part) -> Part:
    """What is given replaces what was known; what is not given stays."""
    return replace(before, **known_fields(now))


def tell(entries: Iterable[tuple[float, Entry]]) -> Story:
    """The story of a whole log."""
    story = Story()
    for t, entry in entries:
        story.apply(t, entry)
    return story


def clocked(entries: Iterable[Entry]) -> Iterator[tuple[float, Entry]]:
    """Entries with a time for each, from the clocks of their lines: seconds since the year of the log began.

    A line without a clock has the time of the one before. A new year goes on from the old one.
    """
    last, turned = 0.0, 0.0
    for entry in entries:
        if entry.clock is not None:
            if entry.clock + turned < last - YEAR / 2:
                turned += YEAR
            last = max(last, entry.clock + turned)
        yield last, entry
