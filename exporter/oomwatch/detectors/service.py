"""What detectors about devices, budgets and lives remember of an engine, and how often a source speaks."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from oomwatch.detectors.base import DeviceSample, EngineSample, RankSample, Sample
from oomwatch.observations import RankReading, known

MIB = 1024**2
GIB = 1024**3

# States of snapshot.ENGINE_STATES in which a page came back.
ANSWERED = frozenset({"ok", "sleeping", "frozen", "dead", "stats_disabled", "no_traffic_yet"})
ENDED = frozenset({"dead", "gone"})  # the engine core, or everything of it
REFUSED = "unreachable"  # nothing listens any more; a timeout is no proof of that

_GAPS_TO_TELL = 3
DOWN_AFTER = 60.0  # seconds of refused connections after which an engine is taken to be down
_SILENT_AFTER = 900.0  # seconds without any word of an engine after which nobody says that it serves
_WARM_SECONDS = 1800.0
_WARM_REQUESTS = 1000
_WARM_UNCOUNTED = 3600.0  # where requests are not counted
_WARM_AT_LATEST = 6 * 3600.0


class Pace:
    """How often a source speaks, in seconds; about 400 bytes.

    The second longest of its last nine distances: sources slow down and hurry, and one lost reading is no new pace.
    """

    def __init__(self, first_guess: float = 100.0) -> None:
        self.last: float | None = None
        self._gaps: deque[float] = deque(maxlen=9)
        self.interval = first_guess  # until three distances are known

    def seen(self, t: float) -> None:
        """It spoke at ``t``."""
        if self.last is not None and t > self.last:
            self._gaps.append(t - self.last)
            if len(self._gaps) >= _GAPS_TO_TELL:
                self.interval = sorted(self._gaps)[-2]
        self.last = t

    def silence(self, t: float) -> float:
        """Seconds since it last spoke; 0 before its first word."""
        return 0.0 if self.last is None else max(0.0, t - self.last)


@dataclass
class Service:
    """One engine as its pages show it; about 1 KiB.

    ``ready`` is when its present life first answered, None before. ``utilization`` and ``pool_is_set`` are what the
    last page said of its budget.
    """

    state: str = "unknown"
    seen: float | None = None  # any scrape
    answered: float | None = None
    refused_since: float | None = None
    ready: float | None = None
    segment: int = 0
    asleep: bool = False
    utilization: float | None = None
    pool_is_set: bool = False
    had_work: bool | None = None  # requests ran or waited on the last page; None where it does not tell
    _finished: dict[str, tuple[float, float]] = field(default_factory=dict)  # by rank: in this life first, and now

    def observe(self, sample: RankSample | EngineSample) -> None:
        """Follow the engine."""
        if isinstance(sample, RankSample):
            self._rank(sample)
        else:
            self._engine(sample)

    def serves(self, t: float) -> bool:
        """Whether the engine is up, as far as anyone says."""
        return self.ready is not None and self.seen is not None and t - self.seen <= _SILENT_AFTER and not self.down(t)

    def down(self, t: float) -> bool:
        """Whether it has ended: the page says so, or its connections have been refused for a while."""
        return self.state in ENDED or (self.refused_since is not None and t - self.refused_since >= DOWN_AFTER)

    def warm(self, t: float) -> bool:
        """Whether memory that only first requests allocate has been allocated."""
        if self.ready is None:
            return False
        age = t - self.ready
        if not self._finished:
            return age >= _WARM_UNCOUNTED
        finished = sum(now - first for first, now in self._finished.values())
        return age >= _WARM_AT_LATEST or (age >= _WARM_SECONDS and finished >= _WARM_REQUESTS)

    def _rank(self, sample: RankSample) -> None:
        begun = sample.t if self.down(sample.t) else sample.ready_since
        if self.ready is None or begun > self.ready:
            self.ready = begun
            self._finished.clear()
            self.refused_since = None
        self.segment = sample.segment
        reading = sample.reading
        finished = known(reading.finished)
        if finished is not None:
            count = sum(finished.values())
            first, _ = self._finished.get(reading.rank, (count, count))
            self._finished[reading.rank] = (min(first, count), count)
        self.utilization = known(reading.gpu_memory_utilization)
        self.pool_is_set = known(reading.pool.configured_bytes) is not None

    def _engine(self, sample: EngineSample) -> None:
        self.seen = sample.t
        if sample.state in ANSWERED:
            if self.ready is None or self.down(sample.t):
                self.ready = sample.t
                self._finished.clear()
            self.answered, self.refused_since = sample.t, None
            self.asleep = sample.state == "sleeping"
            self.had_work = _has_work(sample.ranks)
        elif sample.state == REFUSED:
            self.refused_since = sample.t if self.refused_since is None else self.refused_since
        self.state = sample.state


def _has_work(ranks: Iterable[RankReading]) -> bool | None:
    counts = [known(count) for rank in ranks for count in (rank.running, rank.waiting)]
    stated = [count for count in counts if count is not None]
    return any(stated) if stated else None


class Services:
    """The engines that a detector hears of, by name."""

    def __init__(self) -> None:
        self._by_name: dict[str, Service] = {}

    def observe(self, sample: Sample) -> None:
        """Follow whichever engine the sample is about."""
        if isinstance(sample, (RankSample, EngineSample)):
            self._by_name.setdefault(sample.engine, Service()).observe(sample)

    def get(self, name: str) -> Service:
        """What is known of an engine; nothing, where nobody has spoken of it."""
        return self._by_name.get(name) or Service()

    def serving(self, sample: DeviceSample) -> dict[str, Service]:
        """The engines of a device that are up."""
        found = {name: self.get(name) for name in sample.engines}
        return {name: service for name, service in found.items() if service.serves(sample.t)}
