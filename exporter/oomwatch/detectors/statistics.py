"""Streaming statistics that the detectors share: O(1) amortised per value, bounded, and plain data to save.

Times are unix seconds. Values that arrive late or twice never move a statistic backwards.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

Point = tuple[float, float]
"""Time in seconds, and a value."""

MAX_POINTS = 48  # the slopes of all pairs of so many are 1,128: under a millisecond


# --- floors ------------------------------------------------------------------------------------------------------


@dataclass
class Bin:
    """The lowest value of one stretch of time; ``index`` counts stretches from the epoch."""

    index: int
    low: float


class BinnedFloors:
    """Floors of a series in bins of ``width`` seconds; ``keep`` closed bins stay, about 100 bytes each.

    Bins without a value do not exist: a gap leaves no floor of 0.
    """

    def __init__(self, width: float, keep: int) -> None:
        self.width = width
        self.closed: deque[Bin] = deque(maxlen=keep)
        self.open: Bin | None = None

    def add(self, t: float, value: float) -> Bin | None:
        """Take in a value; the bin that closed by it, if one did."""
        index = math.floor(t / self.width)
        now = self.open
        if now is not None and index <= now.index:
            now.low = min(now.low, value)
            return None
        self.open = Bin(index, value)
        if now is not None:
            self.closed.append(now)
        return now

    def floors(self) -> list[Point]:
        """The floors of the closed bins, oldest first, at the middle of their bins."""
        return [((one.index + 0.5) * self.width, one.low) for one in self.closed]


class SlidingFloor:
    """The lowest value of the last ``span`` seconds, by a monotonic queue of cells of ``span / cells`` seconds.

    At most ``cells + 1`` entries. ``full`` says whether values cover the whole span, up to one cell.
    """

    def __init__(self, span: float, cells: int = 60) -> None:
        self.span = span
        self._cell = span / cells
        self._low: deque[Point] = deque()
        self._since: float | None = None

    def add(self, t: float, value: float) -> None:
        """Take in a value."""
        if self._since is None:
            self._since = t
        while self._low and self._low[-1][1] >= value:
            self._low.pop()
        if not self._low or t - self._low[-1][0] >= self._cell:
            self._low.append((t, value))
        self._expire(t)

    def value(self, t: float) -> float | None:
        """The floor at ``t``, None where the span holds no value."""
        self._expire(t)
        return self._low[0][1] if self._low else None

    def full(self, t: float) -> bool:
        return self._since is not None and t - self._since >= self.span - self._cell

    def clear(self) -> None:
        self._low.clear()
        self._since = None

    def _expire(self, t: float) -> None:
        while self._low and t - self._low[0][0] > self.span:
            self._low.popleft()


# --- trends ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trend:
    """A slope per second with the bounds between which it lies with the probability that was asked for."""

    slope: float
    low: float
    high: float


_NORMAL_QUANTILE = {0.8: 1.2816, 0.9: 1.6449, 0.95: 1.96}


def theil_sen(points: Sequence[Point], probability: float = 0.8) -> Trend | None:
    """The median of the slopes of all pairs, with Sen's bounds; None below three points or without distance in time.

    ``probability`` is one of 0.8, 0.9 and 0.95. The bounds take the points for independent, so give it floors of
    bins, not samples. More than ``MAX_POINTS`` are refused: the work grows with the square.
    """
    n = len(points)
    if n > MAX_POINTS:
        raise ValueError(f"{n} points are too many for all pairs: bin them to at most {MAX_POINTS}")
    slopes = sorted(
        (later[1] - earlier[1]) / (later[0] - earlier[0])
        for i, earlier in enumerate(points)
        for later in points[i + 1 :]
        if later[0] > earlier[0]
    )
    if n < 3 or not slopes:
        return None
    count = len(slopes)
    spread = _NORMAL_QUANTILE[probability] * math.sqrt(n * (n - 1) * (2 * n + 5) / 18)
    low = max(0, math.floor((count - spread) / 2))
    high = min(count - 1, math.ceil((count + spread) / 2))
    return Trend(_median_of_sorted(slopes), slopes[low], slopes[high])


def halved(floors: Sequence[Point]) -> Sequence[Point]:
    """Floors of pairs of bins where there are many: a quarter of the work for a trend."""
    if len(floors) < MAX_POINTS // 2:
        return floors
    pairs = zip(floors[::2], floors[1::2], strict=False)
    return [((a[0] + b[0]) / 2, min(a[1], b[1])) for a, b in pairs]


def median(values: Sequence[float]) -> float:
    """The median of at least one value."""
    return _median_of_sorted(sorted(values))


def _median_of_sorted(values: Sequence[float]) -> float:
    middle = len(values) // 2
    return values[middle] if len(values) % 2 else (values[middle - 1] + values[middle]) / 2


def ratchet(floors: Sequence[float], steps: int, rise: float, tolerance: float = 0.0) -> bool:
    """Whether the last ``steps`` floors each rise by more than ``tolerance``, and by ``rise`` in all.

    Traffic lowers a floor sooner or later; what is lost never comes back.
    """
    last = floors[-steps:]
    if len(last) < steps:
        return False
    return last[-1] - last[0] >= rise and all(b - a > tolerance for a, b in pairwise(last))


class SurpriseSteps:
    """Counts rises of a floor above everything before it that no record of load explains, in the last ``span`` s.

    In a series without drift records come ever more rarely: of exchangeable bins, ln(n / (n - w)) fall into the last
    w of n. ``least`` is the smallest rise that counts.
    """

    def __init__(self, least: float, span: float) -> None:
        self._least = least
        self._span = span
        self.highest: float | None = None
        self.steps: deque[Point] = deque(maxlen=4 * MAX_POINTS)  # time, and by how much it rose
        self.total = 0.0  # of all surprising rises

    def add(self, t: float, floor: float, explained: bool) -> float:
        """Take in the floor of a bin; by how much it rose in a way that counts."""
        if self.highest is None:
            self.highest = floor
            return 0.0
        rise = floor - self.highest
        if rise < self._least:
            return 0.0
        self.highest = floor
        if explained:
            return 0.0
        self.steps.append((t, rise))
        self.total += rise
        return rise

    def recent(self, t: float) -> list[Point]:
        """The steps within the span before ``t``."""
        while self.steps and t - self.steps[0][0] > self._span:
            self.steps.popleft()
        return list(self.steps)


class Thinned:
    """A series of at most ``MAX_POINTS`` points over any span: when it is full every other one goes.

    Points are taken at least ``spacing`` seconds apart, and the spacing doubles with each thinning. The newest value
    always stands at the end.
    """

    def __init__(self, spacing: float) -> None:
        self._first_spacing = spacing
        self.spacing = spacing
        self.points: list[Point] = []

    def add(self, t: float, value: float) -> bool:
        """Take in a value; whether it made a new point. Until the spacing is reached it replaces the last one."""
        if len(self.points) >= 2 and t - self.points[-2][0] < self.spacing:
            self.points[-1] = (t, value)
            return False
        self.points.append((t, value))
        if len(self.points) > MAX_POINTS:
            self.spacing *= 2
            self.points = [*self.points[:-1:2], self.points[-1]]
        return True

    def clear(self) -> None:
        self.points = []
        self.spacing = self._first_spacing


# --- load --------------------------------------------------------------------------------------------------------


class Forgetting:
    """Mean and variance that forget with a time constant of ``tau`` seconds."""

    def __init__(self, tau: float) -> None:
        self._tau = tau
        self._t: float | None = None
        self.weight = 0.0
        self.mean = 0.0
        self.variance = 0.0

    def add(self, t: float, value: float) -> None:
        """Take in a value; each weighs the same when it comes, whatever the interval."""
        if self._t is not None:
            self.weight *= math.exp(-max(0.0, t - self._t) / self._tau)
        self._t = t
        self.weight += 1.0
        share = 1.0 / self.weight
        delta = value - self.mean
        self.mean += share * delta
        self.variance = (1.0 - share) * (self.variance + share * delta * delta)

    @property
    def deviation(self) -> float:
        return math.sqrt(self.variance)


class DifferenceSlope:
    """How much y changes per change of x from one sample to the next, forgetting with ``tau`` seconds.

    Differences, so that a slow drift of y leaves no trace. Pairs more than ``longest`` seconds apart do not count.
    """

    def __init__(self, tau: float, longest: float) -> None:
        self._tau = tau
        self._longest = longest
        self._last: tuple[float, float, float] | None = None
        self.pairs = 0.0
        self._xx = 0.0
        self._xy = 0.0

    def add(self, t: float, x: float, y: float) -> None:
        """Take in a sample."""
        last, self._last = self._last, (t, x, y)
        if last is None or not 0 < t - last[0] <= self._longest:
            return
        keep = math.exp(-(t - last[0]) / self._tau)
        dx, dy = x - last[1], y - last[2]
        self.pairs = self.pairs * keep + (dx != 0)
        self._xx = self._xx * keep + dx * dx
        self._xy = self._xy * keep + dx * dy

    @property
    def slope(self) -> float | None:
        """y per x, None while x has not moved."""
        return self._xy / self._xx if self._xx > 0 else None


def _bucket_bounds() -> tuple[float, ...]:
    """0, 1, 2 … 16, then eighths of an octave: at most 9 % apart up to a million."""
    low = [float(n) for n in range(17)]
    return tuple(low + [16 * 2 ** (n / 8) for n in range(1, 129)])


_BOUNDS = _bucket_bounds()


class DailyQuantiles:
    """Quantiles of a non-negative number over the last ``span`` seconds, kept as ``parts`` histograms.

    O(1) per value; whole numbers up to 16 are exact, above that a quantile is up to 9 % too high. About 30 KiB.
    """

    def __init__(self, span: float, parts: int = 24) -> None:
        self._part = span / parts
        self._parts = parts
        self._histograms: deque[tuple[int, dict[int, int]]] = deque()
        self._sum = [0] * len(_BOUNDS)
        self.count = 0

    def add(self, t: float, value: float) -> None:
        """Take in a value."""
        index = math.floor(t / self._part)
        if not self._histograms or index > self._histograms[-1][0]:
            self._histograms.append((index, {}))
            while index - self._histograms[0][0] >= self._parts:
                for old, n in self._histograms.popleft()[1].items():
                    self._sum[old] -= n
                    self.count -= n
        bucket = min(bisect_left(_BOUNDS, value), len(_BOUNDS) - 1)
        histogram = self._histograms[-1][1]
        histogram[bucket] = histogram.get(bucket, 0) + 1
        self._sum[bucket] += 1
        self.count += 1

    def quantile(self, share: float) -> float | None:
        """The value that ``share`` of all do not exceed, None without values."""
        if not self.count:
            return None
        wanted, seen = share * self.count, 0
        for bound, n in zip(_BOUNDS, self._sum, strict=True):
            seen += n
            if n and seen >= wanted:
                return bound
        return _BOUNDS[-1]


def seconds_until(target: float, value: float, slope: float) -> float | None:
    """When ``value`` reaches ``target`` at ``slope`` per second; 0 beyond it, None when it never does."""
    if value >= target:
        return 0.0
    return (target - value) / slope if slope > 0 else None
