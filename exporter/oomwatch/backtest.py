"""``oomwatch replay --prometheus``: what the detectors would have said of the past, and how often rightly."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase

from oomwatch import units
from oomwatch.config import Config
from oomwatch.configured import cadence_of, judge_of
from oomwatch.detectors.base import LEVEL, State
from oomwatch.observations import EngineFacts, EngineScrape, Observation, RankReading, known
from oomwatch.past import Past, PrometheusError, Target, of_this_host
from oomwatch.replay import Course, Row, subject_text

_RESTART_COUNTERS = ("steps", "generation_tokens", "prompt_tokens", "preemptions")
_A_DAY = 24 * 3600.0
_JUST_CLEARED = 600.0  # an alert that ended so shortly before a restart is one that warned of it


@dataclass(frozen=True)
class Restart:
    """An engine came back as another process at ``t``. ``warned`` are alerts about it that stood then."""

    t: float
    engine: str
    warned: tuple[tuple[float, str, str], ...] = ()  # since, verdict, state


@dataclass
class Alert:
    """A verdict at ticket or page, from its begin to its end; ``end`` None: to the end of what was read."""

    row: Row
    worst: State
    end: float | None = None


@dataclass
class Backtest:
    """What a backtest comes to: alerts in order, and restarts; complete once ``following`` has ended."""

    alerts: list[Alert] = field(default_factory=list)
    restarts: list[Restart] = field(default_factory=list)

    def candidates(self) -> list[Alert]:
        """Alerts after which no restart came within a day: false alarms, or troubles that healed by themselves."""
        return [
            alert
            for alert in self.alerts
            if not any(
                restart.engine == alert.row.verdict.subject.engine
                and alert.row.t <= restart.t <= (alert.end or math.inf) + _A_DAY
                for restart in self.restarts
            )
        ]

    def following(self, course: Course) -> Iterator[Row]:
        """The course's rows, while it is taken down which of them are alerts and how long they last."""
        standing: dict[tuple[object, ...], Alert] = {}
        for row in course:
            key = row.verdict.name, row.verdict.subject
            level = LEVEL[row.verdict.state]
            if level >= LEVEL["ticket"] and row.verdict.symptom_of is None:
                alert = standing.get(key)
                if alert is None:
                    alert = standing[key] = Alert(row, row.verdict.state)
                    self.alerts.append(alert)
                elif level > LEVEL[alert.worst]:
                    alert.worst = row.verdict.state
            elif key in standing:
                standing.pop(key).end = row.t
            yield row
        self.restarts = [
            replace(restart, t=round(restart.t - course.start, 6), warned=_warnings(self.alerts, restart, course.start))
            for restart in self.restarts
        ]

    def lines(self, start: float) -> Iterator[str]:
        """The backtest for people."""
        yield f"Would have paged {_count(self.alerts, 'page')}, and raised {_count(self.alerts, 'ticket')}."
        for alert in self.alerts:
            lasted = units.duration(alert.end - alert.row.t) if alert.end is not None else "to the end"
            subject = subject_text(alert.row.verdict.subject)
            yield (
                f"  {units.moment(start + alert.row.t)}  {alert.worst.upper():6} {alert.row.verdict.name} {subject} "
                f"({lasted}): {alert.row.verdict.summary}"
            )
        yield f"Restarts of engines: {len(self.restarts) or 'none'}"
        for restart in self.restarts:
            warned = ", ".join(
                f"{state} of {verdict} {units.duration(restart.t - since)} before"
                for since, verdict, state in restart.warned
            )
            yield f"  {units.moment(start + restart.t)}  {restart.engine}: {warned or 'no warning'}"
        candidates = self.candidates()
        yield f"Alerts with no restart within a day after them (false-alarm candidates): {len(candidates) or 'none'}"
        for alert in candidates:
            subject = subject_text(alert.row.verdict.subject)
            yield f"  {units.moment(start + alert.row.t)}  {alert.worst} of {alert.row.verdict.name} {subject}"

    def document(self) -> dict[str, object]:
        """As the second last line of ``replay --format json``."""
        candidates = {id(alert) for alert in self.candidates()}
        return {
            "backtest": {
                "alerts": [
                    {
                        "t": alert.row.t,
                        "end": alert.end,
                        "verdict": alert.row.verdict.name,
                        "state": alert.worst,
                        "subject": alert.row.verdict.subject.labels(),
                        "false_alarm_candidate": id(alert) in candidates,
                    }
                    for alert in self.alerts
                ],
                "restarts": [
                    {
                        "t": restart.t,
                        "engine": restart.engine,
                        "warned": [
                            {"verdict": verdict, "state": state, "lead_seconds": round(restart.t - since, 6)}
                            for since, verdict, state in restart.warned
                        ],
                    }
                    for restart in self.restarts
                ],
            }
        }


def backtest(
    past: Past, since: float, until: float, config: Config, wanted: Sequence[str] = ()
) -> tuple[Course, Backtest]:
    """The course of the verdicts over a server's past, and the report that fills while it is iterated.

    ``wanted`` are patterns for instances, as for file names; empty for all. Raises PrometheusError, also later.
    """
    targets = [
        target
        for target in past.targets(since, until)
        if not wanted or any(fnmatchcase(target.instance, pattern) for pattern in wanted)
    ]
    if not targets:
        raise PrometheusError(
            "no vLLM engine in this stretch of time"
            + (f" whose instance fits {' or '.join(wanted)}" if wanted else "")
            + ": is the server right, and does it scrape vLLM's /metrics?"
        )
    engines = _named(targets, config)
    interval = past.scrape_interval(targets[0], since, until)
    cadence = cadence_of(config)
    scrape = interval or cadence.scrape
    judge = judge_of(config, replace(cadence, scrape=scrape, gpu=max(cadence.gpu, scrape)))
    report = Backtest()
    observations = _with_restarts(past.observations(engines, since, until), report)
    course = Course(observations, judge, scrape, since, engines.values())
    return course, report


def _named(targets: Sequence[Target], config: Config) -> dict[Target, EngineFacts]:
    """Facts of each target: those of the configured engine at this address, else only its name."""
    several = Counter(target.instance for target in targets)
    configured = of_this_host(targets, [engine.facts() for engine in config.engines])
    return {
        target: configured.get(target)
        or EngineFacts(target.instance if several[target.instance] == 1 else f"{target.job}/{target.instance}")
        for target in targets
    }


def _with_restarts(observations: Iterable[Observation], report: Backtest) -> Iterator[Observation]:
    last: dict[str, EngineScrape] = {}
    for observation in observations:
        if isinstance(observation, EngineScrape) and observation.answered:
            before = last.get(observation.engine)
            if before is not None and _restarted(before, observation):
                report.restarts.append(Restart(observation.t, observation.engine))
            last[observation.engine] = observation
        yield observation


def _restarted(before: EngineScrape, now: EngineScrape) -> bool:
    """Another process answers: it started later, or a counter fell."""
    starts = known(before.process_start), known(now.process_start)
    if None not in starts and starts[0] != starts[1]:
        return True
    earlier = {rank.rank: rank for rank in before.ranks}
    return any(_fell(earlier[rank.rank], rank) for rank in now.ranks if rank.rank in earlier)


def _fell(before: RankReading, now: RankReading) -> bool:
    pairs = ((known(getattr(before, name)), known(getattr(now, name))) for name in _RESTART_COUNTERS)
    return any(old is not None and new is not None and new < old for old, new in pairs)


def _warnings(alerts: Iterable[Alert], restart: Restart, start: float) -> tuple[tuple[float, str, str], ...]:
    t = restart.t - start
    return tuple(
        (alert.row.t, alert.row.verdict.name, alert.worst)
        for alert in alerts
        if alert.row.verdict.subject.engine == restart.engine
        and alert.row.t <= t
        and t - (alert.end if alert.end is not None else t) <= _JUST_CLEARED
    )


def _count(alerts: Iterable[Alert], state: str) -> str:
    number = sum(alert.worst == state for alert in alerts)
    return (
        f"{number} time{'' if number == 1 else 's'}"
        if state == "page"
        else f"{number} ticket{'' if number == 1 else 's'}"
    )
