"""The daemon's own detectors under test: the class that live, replay and demo run, with default thresholds."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from benchmarks.detection.alarms import Change
from oomwatch.detectors.base import Subject
from oomwatch.detectors.registry import KINDS
from oomwatch.judge import Judge
from oomwatch.node import Node
from oomwatch.observations import Observation, Tick


def detect(observations: Iterable[Observation], asked: Collection[str]) -> Iterator[Change]:
    """Only the verdicts that are asked for: detectors know nothing of one another, and less is concluded sooner."""
    return _changes(Judge(Node(), kinds=tuple(kind for kind in KINDS if kind.verdict in asked)), observations)


def detect_all(observations: Iterable[Observation], _asked: Collection[str]) -> Iterator[Change]:
    """Every verdict."""
    return _changes(Judge(Node()), observations)


def _changes(judge: Judge, observations: Iterable[Observation]) -> Iterator[Change]:
    """Each change of a verdict's state, at the tick that concluded it.

    At a tick the judge's detectors are asked as the judge itself asks them; what it makes of their findings for people
    (advice, incidents) is left out, which nobody reads here.
    """
    known: dict[tuple[str, Subject], str] = {}
    for observation in observations:
        if not isinstance(observation, Tick):
            judge.apply(observation)
            continue
        judge.node.apply(observation)
        for seats in judge.memory.seats.values():
            for seat in seats:
                state = seat.detector.conclude(observation.t).state
                if known.get((seat.verdict, seat.subject), "clear") != state:
                    known[seat.verdict, seat.subject] = state
                    yield observation.t, seat.verdict, state, seat.subject.labels()
