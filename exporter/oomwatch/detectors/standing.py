"""What detectors share about time: how long a condition has held, how old the last word is, and what still stands."""

from __future__ import annotations

from dataclasses import replace

from oomwatch import units
from oomwatch.detectors.base import LEVEL, Finding, Latch, unknown
from oomwatch.detectors.rates import MAX_GAP_S


class Sustained:
    """For how long a condition has held, by the samples' times.

    Interruptions of up to ``forgive_s`` seconds do not end it, since gauges flap between polls; silence longer than
    :data:`MAX_GAP_S` does.
    """

    def __init__(self, forgive_s: float = 0.0) -> None:
        self._forgive_s = forgive_s
        self._since: float | None = None
        self._met = 0.0  # when it last held
        self._seen = 0.0

    def update(self, t: float, holds: bool) -> float:
        """Take in the condition at ``t``; seconds from its beginning to when it last held, 0 when it has ended."""
        silent = t - self._seen > MAX_GAP_S
        if self._since is not None and (silent or (not holds and t - self._met > self._forgive_s)):
            self._since = None
        if holds:
            if self._since is None:
                self._since = t
            self._met = t
        self._seen = t
        return self.seconds

    @property
    def seconds(self) -> float:
        return 0.0 if self._since is None else self._met - self._since

    def reset(self) -> None:
        """It does not hold."""
        self._since = None


class Freshness:
    """Whether the last page is recent enough to speak for now: not older than a few polls, and 3 min at least."""

    def __init__(self) -> None:
        self.t: float | None = None
        self._interval = 0.0

    def seen(self, t: float) -> None:
        """A page came at ``t``."""
        if self.t is not None and 0.0 < t - self.t <= MAX_GAP_S:
            self._interval = t - self.t
        self.t = t

    def stale(self, t: float) -> bool:
        return self.t is None or t - self.t > max(180.0, 2.5 * self._interval)


NO_PAGE = unknown("no fresh page of metrics")


class Standing:
    """A latch that remembers what raised it: while a state outlasts its condition, its numbers stay readable."""

    def __init__(self, page_s: float = 900.0, ticket_s: float = 3600.0) -> None:
        self._latch = Latch(page_s, ticket_s)
        self._raised: Finding | None = None
        self._met = 0.0

    def settle(self, t: float, now: Finding) -> Finding:
        """The finding that stands at ``t``, when ``now`` is what the numbers say."""
        state = self._latch.update(t, now.state)
        if LEVEL[now.state] >= LEVEL[state] or self._raised is None:
            if LEVEL[now.state] >= LEVEL["ticket"]:
                self._raised, self._met = now, t
            return now
        since = units.duration(max(0.0, t - self._met))
        eased = "no fresh page tells more" if now.state == "unknown" else "it has eased"
        summary = f"{self._raised.summary} For {since} {eased}."
        return replace(self._raised, state=state, eta=None, summary=summary, gauges=now.present())

    def reset(self) -> None:
        """A new life has begun: nothing stands."""
        self._latch.reset()
        self._raised = None
