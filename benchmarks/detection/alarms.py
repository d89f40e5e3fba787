"""Firings of a rule or detector, and how they become alarms that a person would be called for."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import NamedTuple, TypeAlias

import numpy as np

from benchmarks.detection.spec import Bools, Floats
from oomwatch.observations import Observation

MERGED = 3600.0  # firings closer than this are one alarm

Change: TypeAlias = tuple[float, str, str, Mapping[str, str]]
"""When (unix time), which verdict, its new state (clear, info, ticket, page, unknown), and what it is about."""

Detector: TypeAlias = Callable[[Iterable[Observation], Collection[str]], Iterable[Change]]
"""What is under test: it reads a run's observations in order and tells each change of a verdict as it happens, at least
of those that are asked for."""


class Alarm(NamedTuple):
    """A stretch in which something fired, in seconds from the run's start; ``rank`` -1 where it names none."""

    start: float
    end: float
    rank: int = -1


def firings(condition: Bools, t: Floats, hold: float = 0.0) -> list[Alarm]:
    """Stretches in which ``condition`` has held for at least ``hold`` seconds, as Prometheus' ``for`` has it."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], condition, [False]]).astype(np.int8)))
    found = []
    for begin, end in zip(edges[::2], edges[1::2], strict=True):
        start, last = float(t[begin]) + hold, float(t[end - 1])
        if last >= start:
            found.append(Alarm(start, last))
    return found


def merged(alarms: Iterable[Alarm]) -> list[Alarm]:
    """One alarm for firings less than an hour apart."""
    result: list[Alarm] = []
    for alarm in sorted(alarms):
        if result and alarm.start - result[-1].end < MERGED:
            last = result[-1]
            result[-1] = last._replace(end=max(last.end, alarm.end), rank=last.rank if last.rank == alarm.rank else -1)
        else:
            result.append(alarm)
    return result


LEVELS = {"ticket": ("ticket", "page"), "page": ("page",)}


def alarms_of(changes: Iterable[Change], epoch: float, end: float) -> dict[tuple[str, str], list[Alarm]]:
    """Alarms by verdict and level, of changes in order of time; what still fires ends with the run."""
    active: dict[tuple[str, str, str], tuple[float, int]] = {}
    found: dict[tuple[str, str], list[Alarm]] = {}
    for t, verdict, state, subject in changes:
        about = ",".join(f"{key}={value}" for key, value in sorted(subject.items()))
        for level, states in LEVELS.items():
            key = (verdict, level, about)
            if state in states:
                active.setdefault(key, (t - epoch, _rank(subject)))
            elif key in active:
                start, rank = active.pop(key)
                found.setdefault((verdict, level), []).append(Alarm(start, t - epoch, rank))
    for (verdict, level, _), (start, rank) in active.items():
        found.setdefault((verdict, level), []).append(Alarm(start, end, rank))
    return {key: merged(alarms) for key, alarms in found.items()}


def _rank(subject: Mapping[str, str]) -> int:
    """The rank that a subject names by itself or by its device; devices are numbered like ranks."""
    if subject.get("rank", "").isdigit():
        return int(subject["rank"])
    device = subject.get("gpu", "")
    return int(device.split("-")[1], 16) if device.startswith("GPU-") else -1
