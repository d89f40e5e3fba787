"""Runs the detectors over what was observed before, with the observations' clock.

It is the daemon's own fold and detectors that run; only the ticks that a recording lacks are added.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Protocol

from oomwatch import units
from oomwatch.conclusions import Incident, incidents
from oomwatch.config import Config
from oomwatch.configured import cadence_of, judge_of
from oomwatch.detectors.base import LEVEL, State, Subject
from oomwatch.judge import Judge
from oomwatch.node import Cadence
from oomwatch.observations import EngineFacts, EngineUpdate, Gap, Observation, Tick
from oomwatch.recording import Recording
from oomwatch.verdicts import Verdict

_SHORTEST_TICK = 1.0
_LONGEST_SILENCE = 24 * 3600.0

VerdictKey = tuple[str, Subject]


@dataclass(frozen=True)
class Row:
    """A verdict's state changed at ``t``, in seconds of the recording. ``before`` is None at its first word."""

    t: float
    verdict: Verdict
    before: State | None

    def document(self) -> dict[str, object]:
        """As one line of ``replay --format json``."""
        verdict = self.verdict
        document: dict[str, object] = {
            "t": self.t,
            "verdict": verdict.name,
            "killer": verdict.killer,
            "state": verdict.state,
            "subject": _subject_document(verdict.subject),
            "eta_seconds": verdict.eta.seconds if verdict.eta else None,
            "confidence": verdict.confidence,
            "evidence": _finite(verdict.evidence),
            "summary": verdict.summary or verdict.reason,
            "incident": verdict.incident or None,
            "symptom_of": verdict.symptom_of,
            "advice": list(verdict.advice),
        }
        if verdict.eta and (verdict.eta.low is not None or verdict.eta.high is not None):
            document["eta_bounds_seconds"] = [verdict.eta.low, verdict.eta.high]
        if verdict.reason:
            document["reason"] = verdict.reason
        if verdict.silenced:
            document["silenced"] = verdict.silenced
        return document


@dataclass
class Summary:
    """What a replay comes to: observations, seconds between the first and the last, worst state by verdict.

    ``ignored`` are observations of kinds that this version does not know, which ``observations`` leaves out.
    """

    observations: int = 0
    seconds: float = 0.0
    verdicts: dict[str, State] = field(default_factory=dict)
    ignored: Mapping[str, int] = field(default_factory=dict)

    def document(self) -> dict[str, object]:
        """As the last line of ``replay --format json``."""
        document: dict[str, object] = {
            "observations": self.observations + sum(self.ignored.values()),
            "seconds": self.seconds,
            "verdicts": dict(sorted(self.verdicts.items())),
        }
        if self.ignored:
            document["ignored"] = dict(sorted(self.ignored.items()))
        return {"summary": document}


class Course:
    """The course of the verdicts over observations: rows by iterating once, then ``summary`` and ``last``.

    ``engines`` is what was known of them at the first observation, ``start`` the unix time of second 0. ``last`` has
    every verdict as it stood when it was above clear the last time, so that what belongs together can be told.
    """

    def __init__(
        self,
        observations: Iterable[Observation],
        judge: Judge,
        interval: float,
        start: float = 0.0,
        engines: Iterable[EngineFacts] = (),
    ) -> None:
        self.start = start
        self.summary = Summary()
        self.last: dict[VerdictKey, Verdict] = {}
        self._observations = with_ticks(_after(engines, self._counted(observations)), interval)
        self._judge = judge
        self._states: dict[VerdictKey, Verdict] = {}

    def __iter__(self) -> Iterator[Row]:
        first: float | None = None
        for observation in self._observations:
            first = observation.t if first is None else first
            self._judge.apply(observation)
            if isinstance(observation, Tick):
                yield from self._changes(observation.t)
            self.summary.seconds = round(observation.t - first, 6)

    def incidents(self) -> tuple[Incident, ...]:
        """Every incident so far, as it stood at last, the worst first."""
        return incidents(self.last.values())

    def _counted(self, observations: Iterable[Observation]) -> Iterator[Observation]:
        for observation in observations:
            self.summary.observations += 1
            yield observation

    def _changes(self, t: float) -> Iterator[Row]:
        now = {(verdict.name, verdict.subject): verdict for verdict in self._judge.verdicts()}
        for key, verdict in self._states.items():
            if key not in now and verdict.state != "unknown":
                now[key] = _ended(verdict, t)
        for key, verdict in now.items():
            before = self._states.get(key)
            self._states[key] = verdict
            if LEVEL[verdict.state] > LEVEL["clear"]:
                self.last[key] = verdict
            if before is not None and (before.state, before.killer) == (verdict.state, verdict.killer):
                continue
            worst = self.summary.verdicts.get(verdict.name, "unknown")
            self.summary.verdicts[verdict.name] = max(worst, verdict.state, key=lambda state: LEVEL[state])
            yield Row(round(t - self.start, 6), verdict, before.state if before else None)


def _ended(verdict: Verdict, t: float) -> Verdict:
    return replace(
        verdict,
        state="unknown",
        since=t,
        confidence=0.0,
        summary="",
        reason="what it was about is gone",
        evidence={},
        eta=None,
        advice=(),
        incident="",
        symptom_of=None,
    )


def with_ticks(observations: Iterable[Observation], interval: float) -> Iterator[Observation]:
    """The observations with a tick every ``interval`` seconds where they have none, and one at the end.

    A tick stands behind everything of its own time. Ticks that are there are kept; one is missing when it is half an
    interval late. Where nobody was watching no time passed for the detectors; of a silence of more than a day only the
    first day is ticked through.
    """
    interval = max(interval, _SHORTEST_TICK)
    due: float | None = None
    t = ticked = 0.0
    for observation in observations:
        if due is None:
            due = observation.t + interval
        if isinstance(observation, Gap):
            due = observation.t + interval
        elif observation.t > due:
            silent_until = t + _LONGEST_SILENCE
            while due < observation.t and due <= silent_until:
                yield Tick(due)
                ticked = due
                due += interval
            due = max(due, observation.t)
        t = observation.t
        if isinstance(observation, Tick):
            ticked, due = t, t + 1.5 * interval
        yield observation
    if due is not None and ticked < t:
        yield Tick(t)


def _after(engines: Iterable[EngineFacts], observations: Iterator[Observation]) -> Iterator[Observation]:
    """The observations, and before them what was known of the engines when the first was made."""
    first = next(observations, None)
    if first is None:
        return
    for facts in engines:
        yield EngineUpdate(first.t, facts)
    yield from chain((first,), observations)


def replay(recording: Recording, config: Config | None = None) -> Course:
    """The course of the verdicts over a recording. Iterating raises RecordingError where the file cannot be read."""
    config = config or Config()
    cadence = cadence_in(recording.intervals(), config)
    interval = min(cadence.gpu, cadence.scrape)
    course = Course(recording, judge_of(config, cadence), interval, recording.start, recording.header.engines)
    course.summary.ignored = recording.ignored
    return course


def cadence_in(intervals: Mapping[str, float], config: Config) -> Cadence:
    """Polling intervals of a recording. Processes of the host that were read once only never grow stale."""
    configured = cadence_of(config)
    return replace(
        configured,
        gpu=intervals.get("gpu", configured.gpu),
        scrape=intervals.get("scrape", configured.scrape),
        process=intervals.get("lists", configured.process),
        host=intervals.get("process", math.inf),
    )


def _subject_document(subject: Subject) -> dict[str, str | int]:
    values = vars(subject)
    return {name: value for name, value in values.items() if value is not None}


def _finite(evidence: Mapping[str, object]) -> dict[str, object]:
    return {name: value for name, value in evidence.items() if not isinstance(value, float) or math.isfinite(value)}


class Report(Protocol):
    """Something that is made of a course while its rows pass, and printed behind them."""

    def following(self, course: Course) -> Iterator[Row]: ...

    def lines(self, start: float) -> Iterator[str]: ...

    def document(self) -> dict[str, object]: ...


# --- for people ------------------------------------------------------------------------------------------------


def json_lines(course: Course, report: Report | None = None) -> Iterator[str]:
    """One JSON object a line; the summary comes last, and only when everything could be read."""
    for row in course if report is None else report.following(course):
        yield json.dumps(row.document())
    if report is not None:
        yield json.dumps(report.document())
    yield json.dumps(course.summary.document())


def text_lines(course: Course, report: Report | None = None) -> Iterator[str]:
    """A timeline of what rose above clear and what of it cleared, then the incidents, then what stayed quiet."""
    for row in course if report is None else report.following(course):
        if LEVEL[row.verdict.state] > LEVEL["clear"] or LEVEL[row.before or "clear"] > LEVEL["clear"]:
            yield _timeline(row, course.start)
    yield ""
    yield from _incidents(course)
    yield from report.lines(course.start) if report is not None else ()
    yield from _quiet(course.summary)
    yield _span(course.summary)


def _timeline(row: Row, start: float) -> str:
    verdict = row.verdict
    when = f"{units.moment(start + row.t)}  " if start else ""
    why = f" (symptom of {verdict.symptom_of})" if verdict.symptom_of else ""
    text = verdict.summary or verdict.reason
    return (
        f"{when}{'+' + units.duration(row.t):>13}  {verdict.state.upper():7} "
        f"{verdict.name} {subject_text(verdict.subject)}{why}{': ' + text if text else ''}"
    )


def subject_text(subject: Subject) -> str:
    """``llama-8b rank 0``, ``GPU-aaaa``, ``llama-8b pid 4712 on GPU-aaaa``."""
    parts = [
        subject.engine,
        f"rank {subject.rank}" if subject.rank is not None else None,
        f"pid {subject.pid}" if subject.pid is not None else None,
        (f"on {subject.gpu}" if subject.engine else subject.gpu) if subject.gpu is not None else None,
        subject.host,
    ]
    return " ".join(part for part in parts if part)


def _incidents(course: Course) -> Iterator[str]:
    found = course.incidents()
    yield f"Incidents: {len(found) or 'none'}"
    for incident in found:
        cause, *others = map(_standing, incident.verdicts)
        yield f"  {incident.id}: {cause}"
        yield from (f"      do: {action}" for action in incident.advice)
        yield from (f"    {other}" for other in others)


def _standing(verdict: Verdict) -> str:
    return f"{verdict.name} {subject_text(verdict.subject)} ({verdict.state}) {verdict.summary}".rstrip()


def _quiet(summary: Summary) -> Iterator[str]:
    for state, words in (("clear", "Clear"), ("unknown", "Not known")):
        names = sorted(name for name, worst in summary.verdicts.items() if worst == state)
        if names:
            yield f"{words}: {', '.join(names)}"


def _span(summary: Summary) -> str:
    ignored = sum(summary.ignored.values())
    more = f", and {units.count(ignored)} of kinds that this version does not know" if ignored else ""
    return f"{units.count(summary.observations)} observations over {units.duration(summary.seconds)}{more}"


FORMS: Mapping[str, Callable[[Course, Report | None], Iterator[str]]] = {"text": text_lines, "json": json_lines}
