"""How good a rule or detector was: recall and lead on faults, false alarms per GPU-week on what is healthy.

An alarm finds a fault when it starts within [onset, end] and is about the right rank. One that began before the onset
found nothing, even when it still fires. False alarms are counted on healthy runs alone; an alarm about a full pool is
not false there in hours in which the pool really was strained. Faults that were visible for less than an hour, and the
families reported apart, stand beside the figures and not in them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.detection.alarms import Alarm
from benchmarks.detection.families import APART, FAULT_CLASSES
from benchmarks.detection.statistics import clopper_pearson, poisson_rate, quantile
from benchmarks.detection.world import Label

VISIBLE = 3600.0
# What a class's lead is asked to be, in seconds, of faults visible at least twice that long.
LEADS = {"kv-leak": 1800.0, "gpu-leak": 7200.0, "host-leak": 21600.0}
# Classes that the marks count as one.
CAPACITY = ("exhaustion", "stuck", "stall", "orphan", "overrun")
_EARLY = 30.0  # a label's time is that of a sample, an alarm's may be a moment before it
# An alarm about strain may come a little before the label's ten minutes are full, and an hour after.
_STRAIN_BEFORE, _STRAIN_AFTER = 900.0, 3600.0


@dataclass(frozen=True)
class Outcome:
    """What came of one run, small enough to keep: one line of the results.

    Of a fault, ``hits`` has the seconds from the run's start at which each rule or level found it, None where it did
    not, and ``fired``, where the run was judged as a ``whole``, the classes of fault that each level saw between onset
    and end. Of a healthy run, ``false`` counts the alarms of each rule by class of fault. ``others`` counts those of
    verdicts that belong to no class.
    """

    set: str
    family: str
    number: int
    gpu_weeks: float
    label: Label | None
    whole: bool = True
    hits: Mapping[str, float | None] = field(default_factory=dict)
    fired: Mapping[str, Sequence[str]] = field(default_factory=dict)
    false: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    others: Mapping[str, int] = field(default_factory=dict)
    seconds: float = 0.0  # processor time

    def document(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of_document(cls, document: Mapping[str, Any]) -> Outcome:
        label = Label(**document["label"]) if document["label"] else None
        return cls(**{**document, "label": label})


Alarms = Mapping[str, Mapping[str, Sequence[Alarm]]]
"""By rule or level, then by class of fault."""


def hits(label: Label, alarms: Alarms) -> dict[str, float | None]:
    """When each rule that looks at the class of the fault found it."""
    return {
        rule: None if (hit := first_hit(label, by_class[label.fault])) is None else round(hit, 1)
        for rule, by_class in alarms.items()
        if label.fault in by_class
    }


def fired(label: Label, by_class: Mapping[str, Sequence[Alarm]]) -> list[str]:
    """Classes of fault with an alarm between onset and end."""
    return [fault for fault, alarms in by_class.items() if any(label.onset <= a.start <= label.end for a in alarms)]


def false_alarms(by_class: Mapping[str, Sequence[Alarm]], strained: Sequence[tuple[float, float]]) -> dict[str, int]:
    """How many alarms of a healthy run were false, by class; an alarm about a full pool in strained hours is right."""
    return {
        fault: sum(not (fault == "exhaustion" and _is_strained(alarm.start, strained)) for alarm in alarms)
        for fault, alarms in by_class.items()
    }


def _is_strained(t: float, strained: Sequence[tuple[float, float]]) -> bool:
    return any(begin - _STRAIN_BEFORE <= t <= end + _STRAIN_AFTER for begin, end in strained)


@dataclass
class Score:
    """Counts of one rule for one class of fault."""

    faults: int = 0
    found: int = 0
    visible: int = 0
    visible_found: int = 0
    asked: int = 0  # visible long enough for the lead that the class is asked for, and with an end to lead to
    in_time: int = 0
    leads: list[float] = field(default_factory=list)
    delays: list[float] = field(default_factory=list)
    healthy_weeks: float = 0.0
    false_alarms: int = 0

    def add_fault(self, label: Label, hit: float | None) -> None:
        self.faults += 1
        self.found += hit is not None
        long_enough = label.end - label.onset >= VISIBLE
        self.visible += long_enough
        self.visible_found += long_enough and hit is not None
        lead = LEADS.get(label.fault, 0.0)
        if label.oom and label.end - label.onset >= max(VISIBLE, 2 * lead):
            self.asked += 1
            self.in_time += hit is not None and label.end - hit >= lead
        if hit is not None:
            self.delays.append(hit - label.onset)
            if label.oom:
                self.leads.append(label.end - hit)

    def add_healthy(self, gpu_weeks: float, false: int) -> None:
        self.healthy_weeks += gpu_weeks
        self.false_alarms += false

    @property
    def recall(self) -> float:
        return self.visible_found / self.visible if self.visible else math.nan


def first_hit(label: Label, alarms: Sequence[Alarm]) -> float | None:
    """When the fault was found: the first alarm's start, None when it was not."""
    for alarm in alarms:
        right = label.rank is None or alarm.rank in (-1, label.rank)
        if right and label.onset - _EARLY <= alarm.start <= label.end:
            return max(alarm.start, label.onset)
    return None


def scores(outcomes: Iterable[Outcome], apart: bool = False) -> dict[tuple[str, str], Score]:
    """By rule and class of fault; with ``apart`` of the families that are reported apart."""
    result: dict[tuple[str, str], Score] = {}
    for outcome in outcomes:
        if (outcome.family in APART) == apart:
            _add(outcome, result)
    return result


def scores_by_family(outcomes: Iterable[Outcome], rule: str) -> dict[str, dict[str, Score]]:
    """Of one rule, by family and class."""
    families: dict[str, dict[tuple[str, str], Score]] = {}
    for outcome in outcomes:
        _add(outcome, families.setdefault(outcome.family, {}))
    return {
        family: {fault: score for (of_rule, fault), score in found.items() if of_rule == rule}
        for family, found in families.items()
    }


def _add(outcome: Outcome, result: dict[tuple[str, str], Score]) -> None:
    if outcome.label is not None:
        for rule, hit in outcome.hits.items():
            result.setdefault((rule, outcome.label.fault), Score()).add_fault(outcome.label, hit)
    for rule, by_class in outcome.false.items():
        for fault, count in by_class.items():
            result.setdefault((rule, fault), Score()).add_healthy(outcome.gpu_weeks, count)


# --- tables ----------------------------------------------------------------------------------------------------------

_HEAD = (
    "| class | rule | faults | recall (visible ≥ 1 h) | of those asked for a lead, in time | median lead | p10 lead |"
    " median delay | false alarms | per GPU-week |\n|---|---|---|---|---|---|---|---|---|---|"
)


def table(found: Mapping[tuple[str, str], Score]) -> str:
    """A markdown table by class and rule; bounds are two-sided 95 %."""
    order = [*FAULT_CLASSES, "capacity"]
    lines = [_HEAD]
    for (rule, fault), score in sorted(found.items(), key=lambda item: (order.index(item[0][1]), item[0][0])):
        lines.append("| " + " | ".join([fault, rule, *_cells(score)]) + " |")
    return "\n".join(lines)


@dataclass(frozen=True)
class Mark:
    """What a class of fault asks of a level: recall, false alarms per GPU-week, and leads in seconds."""

    fault: str
    level: str
    recall: float
    false_alarms: float
    median_lead: float = 0.0


MARKS = (
    Mark("kv-leak", "page", 0.97, 0.02, 8 * 3600.0),
    Mark("kv-leak", "ticket", 0.98, 0.1),
    Mark("gpu-leak", "ticket", 0.98, 0.05),
    Mark("host-leak", "ticket", 0.98, 0.05),
    Mark("capacity", "ticket", 0.98, 0.1),
)
_IN_TIME = 0.95  # of those that are asked for a lead


def marks_table(found: Mapping[tuple[str, str], Score]) -> str:
    """What was asked for and what came out, with two-sided 95 % bounds."""
    lines = [
        "| class, level | recall (visible ≥ 1 h) | asked | false alarms per GPU-week | asked | in time | median lead |",
        "|---|---|---|---|---|---|---|",
    ]
    for mark in MARKS:
        score = found.get((f"oomwatch, {mark.level}", mark.fault), Score())
        lead = LEADS.get(mark.fault)
        in_time = "-" if lead is None else f"{_share(score.in_time, score.asked)} by {_duration(lead)}"
        median_lead = _duration(quantile(score.leads, 0.5)) if lead is not None else "-"
        if mark.median_lead:
            in_time += f", asked of {_IN_TIME}"
            median_lead += f", ≥ {_duration(mark.median_lead)} asked"
        cells = [
            f"{mark.fault}, {mark.level}",
            _share(score.visible_found, score.visible),
            f"≥ {mark.recall}",
            f"{_rate(score.false_alarms, score.healthy_weeks)}, {score.false_alarms} in {score.healthy_weeks:.0f}",
            f"≤ {mark.false_alarms}",
            in_time,
            median_lead,
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def capacity_together(found: Mapping[tuple[str, str], Score]) -> dict[str, Score]:
    """Classes of capacity as one, by rule: the faults of all, the false alarms of all on the same healthy weeks."""
    result: dict[str, Score] = {}
    for (rule, fault), score in found.items():
        if fault in CAPACITY:
            sum_ = result.setdefault(rule, Score())
            for name in ("faults", "found", "visible", "visible_found", "asked", "in_time", "false_alarms"):
                setattr(sum_, name, getattr(sum_, name) + getattr(score, name))
            sum_.delays += score.delays
            sum_.healthy_weeks = max(sum_.healthy_weeks, score.healthy_weeks)
    return result


def family_table(families: Mapping[str, Mapping[str, Score]]) -> str:
    """A rule by family: recall where the family is a fault, false alarms by class where it is healthy."""
    lines = ["| family | class | recall (visible ≥ 1 h) | in time | median lead | false alarms | per GPU-week |"]
    lines.append("|---|---|---|---|---|---|---|")
    for family, by_class in families.items():
        for fault, score in by_class.items():
            if score.faults or score.false_alarms:
                cells = _cells(score)
                lines.append("| " + " | ".join([family, fault, cells[1], cells[2], cells[3], *cells[-2:]]) + " |")
    silent = [
        f for f, by_class in families.items() if all(not s.faults and not s.false_alarms for s in by_class.values())
    ]
    weeks = sum(max((s.healthy_weeks for s in families[f].values()), default=0.0) for f in silent)
    if silent:
        lines.append(f"\nSilent throughout ({weeks:.0f} GPU-weeks): {', '.join(silent)}.")
    return "\n".join(lines)


def confusion_table(outcomes: Iterable[Outcome], rule: str) -> str:
    """What else fired during a fault: runs of each class of fault with an alarm of each class between onset and end."""
    classes = list(FAULT_CLASSES)
    runs = dict.fromkeys(classes, 0)
    fired = {fault: dict.fromkeys(classes, 0) for fault in classes}
    for outcome in outcomes:
        label = outcome.label
        if label is None or not outcome.whole or outcome.family in APART:
            continue
        runs[label.fault] += 1
        for fault in outcome.fired.get(rule, ()):
            fired[label.fault][fault] += 1
    lines = [f"| fault | runs | {' | '.join(classes)} |", "|---|---|" + "---|" * len(classes)]
    lines += [
        f"| {fault} | {runs[fault]} | {' | '.join(str(fired[fault][c]) for c in classes)} |"
        for fault in classes
        if runs[fault]
    ]
    return "\n".join(lines)


def others_table(outcomes: Iterable[Outcome]) -> str:
    """Alarms on healthy runs of verdicts that belong to no class of fault."""
    weeks, counts = 0.0, dict[str, int]()
    for outcome in outcomes:
        if outcome.label is None and outcome.family not in APART:
            weeks += outcome.gpu_weeks
            for verdict, count in outcome.others.items():
                counts[verdict] = counts.get(verdict, 0) + count
    lines = ["| verdict and level | alarms on healthy runs | per GPU-week |", "|---|---|---|"]
    lines += [f"| {verdict} | {count} | {_rate(count, weeks)} |" for verdict, count in sorted(counts.items())]
    return "\n".join(lines)


def _cells(score: Score) -> list[str]:
    return [
        f"{score.faults}",
        _share(score.visible_found, score.visible),
        _share(score.in_time, score.asked),
        _duration(quantile(score.leads, 0.5)),
        _duration(quantile(score.leads, 0.1)),
        _duration(quantile(score.delays, 0.5)),
        f"{score.false_alarms} in {score.healthy_weeks:.0f}" if score.healthy_weeks else "-",
        _rate(score.false_alarms, score.healthy_weeks),
    ]


def _share(hits: int, of: int) -> str:
    if not of:
        return "-"
    low, high = clopper_pearson(hits, of)
    return f"{hits / of:.3f} ({low:.3f} to {high:.3f}), {hits}/{of}"


def _rate(events: int, weeks: float) -> str:
    if not weeks:
        return "-"
    low, high = poisson_rate(events, weeks)
    return f"{events / weeks:.3g} ({low:.2g} to {high:.2g})"


def _duration(seconds: float) -> str:
    if math.isnan(seconds):
        return "-"
    return f"{seconds / 3600:.1f} h" if seconds >= 3600 else f"{seconds / 60:.0f} min"
