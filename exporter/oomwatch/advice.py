"""What to do about a verdict: ordered actions, the first thing first."""

from __future__ import annotations

from oomwatch.detectors.base import Finding
from oomwatch.observations import EngineFacts


def advice(verdict: str, finding: Finding, facts: EngineFacts | None) -> tuple[str, ...]:
    """Actions for a person on call, with the values that fit this case."""
    return ()
