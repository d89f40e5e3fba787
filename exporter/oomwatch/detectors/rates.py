"""Sums, means and peaks over the last seconds of a stream, whatever the polling interval.

Windows are rings of bins: constant memory, O(1) amortised per reading, plain lists for the saved state. Times are unix
seconds and never fall; a window reaches back from the time it is asked for, to within one bin.
"""

from __future__ import annotations

MAX_GAP_S = 400.0
"""Readings further apart than this say nothing of the time between them; the slowest polling interval is 300 s."""


class _Ring:
    """Amounts, and the seconds that they were seen over, in ``bins`` bins that cover ``window_s`` seconds."""

    def __init__(self, window_s: float, bins: int) -> None:
        self._bins = bins
        self._width = window_s / bins
        self._amounts = [0.0] * bins
        self._seconds = [0.0] * bins
        self._head = -1  # number of the newest bin, counted from time 0

    def roll(self, t: float) -> int:
        """The number of the bin of ``t``; bins that fell out of the window are emptied."""
        number = int(t // self._width)
        if number > self._head:
            bins, amounts, seconds = self._bins, self._amounts, self._seconds
            for passed in range(max(self._head + 1, number - bins + 1), number + 1):
                amounts[passed % bins] = 0.0
                seconds[passed % bins] = 0.0
            self._head = number
        return number

    def spread(self, start: float, end: float, amount: float) -> None:
        """``amount``, evenly over the time from ``start`` to ``end``; what lies before the window is left out."""
        width, bins = self._width, self._bins
        last = self.roll(end)
        if start >= last * width:
            self._amounts[last % bins] += amount
            self._seconds[last % bins] += end - start
            return
        density = amount / (end - start)
        for number in range(max(int(start // width), last - bins + 1), last + 1):
            seconds = min(end, (number + 1) * width) - max(start, number * width)
            self._amounts[number % bins] += density * seconds
            self._seconds[number % bins] += seconds

    def whole(self, t: float) -> tuple[float, float]:
        """Amount and seconds within the window."""
        self.roll(t)
        return sum(self._amounts), sum(self._seconds)

    def part(self, t: float, seconds: float, before: float = 0.0) -> tuple[float, float]:
        """Amount and seconds within the ``seconds`` that end ``before`` seconds ago."""
        last = self.roll(t) - round(before / self._width)
        first = max(last - round(seconds / self._width) + 1, self._head - self._bins + 1)
        places = [number % self._bins for number in range(first, last + 1)]
        return sum(self._amounts[place] for place in places), sum(self._seconds[place] for place in places)


class CounterWindow:
    """How much a counter rose within the last ``window_s`` seconds.

    A rise counts as spread evenly over the time since the reading before. A counter that fell began anew: what it
    shows is the rise since. Readings more than :data:`MAX_GAP_S` apart leave a gap. 20 bins take about 2 kB.
    """

    def __init__(self, window_s: float, bins: int = 20) -> None:
        self._window_s = window_s
        self._bins = bins
        self.reset()

    def reset(self) -> None:
        """Begin anew with the next reading."""
        self._ring = _Ring(self._window_s, self._bins)
        self._t: float | None = None
        self._value = 0.0

    def add(self, t: float, value: float | None) -> None:
        """Take in a reading; None, a page without the series, is passed over."""
        if value is None:
            return
        if self._t is not None and 0.0 < t - self._t <= MAX_GAP_S:
            self._ring.spread(self._t, t, value - self._value if value >= self._value else value)
        self._t, self._value = t, value

    @property
    def known(self) -> bool:
        """Whether the counter was ever read since the last reset."""
        return self._t is not None

    def rise(self, t: float, seconds: float | None = None) -> float:
        """By how much it rose in the ``seconds`` up to ``t``, the whole window by default."""
        return (self._ring.whole(t) if seconds is None else self._ring.part(t, seconds))[0]

    def covered(self, t: float) -> float:
        """For how many seconds of the window the rise is known."""
        return self._ring.whole(t)[1]

    def rate(self, t: float) -> float | None:
        """Rise per second of covered time, None where nothing is covered."""
        rise, covered = self._ring.whole(t)
        return rise / covered if covered > 0 else None


class GaugeWindow:
    """Mean by time and peak of a gauge, 0 or more, over the last ``window_s`` seconds.

    A reading counts for the time since the one before. Readings more than :data:`MAX_GAP_S` apart leave a gap.
    20 bins take about 3 kB.
    """

    def __init__(self, window_s: float, bins: int = 20) -> None:
        self._width = window_s / bins
        self._bins = bins
        self.reset()

    def reset(self) -> None:
        """Begin anew with the next reading."""
        self._ring = _Ring(self._width * self._bins, self._bins)
        self._peaks: list[tuple[int, float]] = []  # bin and highest reading: each lower than the one before it
        self._t: float | None = None

    def add(self, t: float, value: float | None) -> None:
        """Take in a reading; None, a page without the series, is passed over."""
        if value is None:
            return
        if self._t is not None and 0.0 < t - self._t <= MAX_GAP_S:
            self._ring.spread(self._t, t, value * (t - self._t))
        while self._peaks and self._peaks[-1][1] <= value:
            self._peaks.pop()
        number = int(t // self._width)
        if not self._peaks or self._peaks[-1][0] != number:
            self._peaks.append((number, value))
        self._expire(number)
        self._t = t

    def _expire(self, number: int) -> None:
        while self._peaks and self._peaks[0][0] <= number - self._bins:
            self._peaks.pop(0)

    def mean(self, t: float, seconds: float, before: float = 0.0) -> float | None:
        """The mean over the ``seconds`` that end ``before`` seconds ago; None where nothing is covered."""
        area, covered = self._ring.part(t, seconds, before)
        return area / covered if covered > 0 else None

    def peak(self, t: float) -> float:
        """The highest reading in the window, 0 where there is none."""
        self._expire(int(t // self._width))
        return self._peaks[0][1] if self._peaks else 0.0
