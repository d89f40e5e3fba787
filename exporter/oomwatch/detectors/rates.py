"""Sums, means and peaks over the last seconds of a stream, whatever the polling interval.

Windows are rings of bins: constant memory, O(1) amortised per reading, plain lists for the saved state. Times are unix
seconds and never fall; a window reaches back from the time it is asked for, to within one bin.
"""

from __future__ import annotations

MAX_GAP_S = 400.0
"""Readings further apart than this say nothing of the time between them; the slowest polling interval is 300 s."""


class _Ring:
    """Amounts by time, in ``bins`` bins of ``width`` seconds."""

    def __init__(self, bins: int, width: float) -> None:
        self._width = width
        self._amounts = [0.0] * bins
        self._head = -1  # number of the newest bin, counted from time 0

    def roll(self, t: float) -> int:
        """The number of the bin of ``t``; bins that fell out of the window are emptied."""
        number = int(t // self._width)
        size = len(self._amounts)
        if number > self._head:
            if self._head < 0 or number - self._head >= size:
                self._amounts = [0.0] * size
            else:
                for passed in range(self._head + 1, number + 1):
                    self._amounts[passed % size] = 0.0
            self._head = number
        return number

    def spread(self, start: float, end: float, amount: float) -> None:
        """``amount``, evenly over the time from ``start`` to ``end``; what lies before the window is left out."""
        last = self.roll(end)
        size = len(self._amounts)
        first = max(int(start // self._width), last - size + 1)
        if first == last and start >= first * self._width:
            self._amounts[last % size] += amount
            return
        density = amount / (end - start)
        for number in range(first, last + 1):
            low, high = max(start, number * self._width), min(end, (number + 1) * self._width)
            self._amounts[number % size] += density * (high - low)

    def raise_to(self, t: float, amount: float) -> None:
        place = self.roll(t) % len(self._amounts)
        self._amounts[place] = max(self._amounts[place], amount)

    def newest(self, t: float, seconds: float, before: float = 0.0) -> list[float]:
        """The bins of the ``seconds`` that end ``before`` seconds ago."""
        size = len(self._amounts)
        last = self.roll(t) - round(before / self._width)
        first = max(last - round(seconds / self._width) + 1, self._head - size + 1, 0)
        return [self._amounts[number % size] for number in range(first, last + 1)]


class CounterWindow:
    """How much a counter rose within the last ``window_s`` seconds.

    A rise counts as spread evenly over the time since the reading before. A counter that fell began anew: what it
    shows is the rise since. Readings more than :data:`MAX_GAP_S` apart leave a gap. 20 bins take about 700 bytes.
    """

    def __init__(self, window_s: float, bins: int = 20) -> None:
        self._window_s = window_s
        self._bins = bins
        self.reset()

    def reset(self) -> None:
        """Begin anew with the next reading."""
        self._rises = _Ring(self._bins, self._window_s / self._bins)
        self._seconds = _Ring(self._bins, self._window_s / self._bins)
        self._t: float | None = None
        self._value = 0.0

    def add(self, t: float, value: float | None) -> None:
        """Take in a reading; None, a page without the series, is passed over."""
        if value is None:
            return
        if self._t is not None and 0.0 < t - self._t <= MAX_GAP_S:
            self._rises.spread(self._t, t, value - self._value if value >= self._value else value)
            self._seconds.spread(self._t, t, t - self._t)
        self._t, self._value = t, value

    @property
    def known(self) -> bool:
        """Whether the counter was ever read since the last reset."""
        return self._t is not None

    def rise(self, t: float, seconds: float | None = None) -> float:
        """By how much it rose in the ``seconds`` up to ``t``, the whole window by default."""
        return sum(self._rises.newest(t, self._window_s if seconds is None else seconds))

    def covered(self, t: float) -> float:
        """For how many seconds of the window the rise is known."""
        return sum(self._seconds.newest(t, self._window_s))

    def rate(self, t: float) -> float | None:
        """Rise per second of covered time, None where nothing is covered."""
        covered = self.covered(t)
        return self.rise(t) / covered if covered > 0 else None


class GaugeWindow:
    """Mean by time and peak of a gauge over the last ``window_s`` seconds.

    A reading counts for the time since the one before. Readings more than :data:`MAX_GAP_S` apart leave a gap.
    20 bins take about 1 kB.
    """

    def __init__(self, window_s: float, bins: int = 20) -> None:
        self._window_s = window_s
        self._bins = bins
        self.reset()

    def reset(self) -> None:
        """Begin anew with the next reading."""
        width = self._window_s / self._bins
        self._areas = _Ring(self._bins, width)
        self._seconds = _Ring(self._bins, width)
        self._peaks = _Ring(self._bins, width)
        self._t: float | None = None

    def add(self, t: float, value: float | None) -> None:
        """Take in a reading that is 0 or more; None, a page without the series, is passed over."""
        if value is None:
            return
        if self._t is not None and 0.0 < t - self._t <= MAX_GAP_S:
            self._areas.spread(self._t, t, value * (t - self._t))
            self._seconds.spread(self._t, t, t - self._t)
        self._peaks.raise_to(t, value)
        self._t = t

    def mean(self, t: float, seconds: float | None = None, before: float = 0.0) -> float | None:
        """The mean over the ``seconds`` that end ``before`` seconds ago; None where nothing is covered."""
        span = self._window_s if seconds is None else seconds
        covered = sum(self._seconds.newest(t, span, before))
        return sum(self._areas.newest(t, span, before)) / covered if covered > 0 else None

    def peak(self, t: float) -> float:
        """The highest reading in the window, 0 where there is none."""
        return max(self._peaks.newest(t, self._window_s), default=0.0)
