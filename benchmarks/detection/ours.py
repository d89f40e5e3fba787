"""The daemon's own detectors under test: the class that live, replay and demo run, with default thresholds."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from benchmarks.detection.alarms import Change
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
    """Each change of a verdict's state, at the tick that concluded it."""
    known: dict[tuple[str, str], str] = {}
    for observation in observations:
        judge.apply(observation)
        if not isinstance(observation, Tick):
            continue
        for verdict in judge.verdicts():
            subject = verdict.subject.labels()
            key = (verdict.name, repr(subject))
            if known.get(key, "clear") != verdict.state:
                known[key] = verdict.state
                yield observation.t, verdict.name, verdict.state, subject
