"""Alertmanager's configuration: routes and receivers to fill in, and inhibition made from the incident table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from alerts.build.model import HEAD, comment_lines
from oomwatch.incidents import TABLE, Rule, explains
from oomwatch.verdicts import CATALOGUE

PLANNED_WORK = "OomwatchPlannedWork"

WHERE = ("cluster", "instance")


@dataclass(frozen=True)
class Inhibition:
    """While an alert fits ``source``, those that fit ``target`` and agree with it in ``equal`` are held back."""

    comment: str
    source: tuple[str, ...]
    target: tuple[str, ...]
    equal: tuple[str, ...]

    def lines(self) -> Iterator[str]:
        yield from comment_lines(self.comment, 2)
        yield f"  - source_matchers: [{_flow(self.source)}]"
        yield f"    target_matchers: [{_flow(self.target)}]"
        yield f"    equal: [{', '.join(self.equal)}]"


def _flow(matchers: tuple[str, ...]) -> str:
    return ", ".join(f"'{matcher}'" for matcher in matchers)


def alertmanager() -> str:
    """The whole file; alertmanager.in.yml is the part that no table knows."""
    written = Path(__file__).with_name("alertmanager.in.yml").read_text(encoding="utf-8")
    head = [
        *comment_lines("Alertmanager's configuration for oomwatch, complete but for addresses and secrets.", 0),
        *comment_lines(HEAD, 0),
    ]
    lines = [*head, written.strip(), "", "inhibit_rules:"]
    for number, inhibition in enumerate(inhibitions()):
        if number:
            lines.append("")
        lines += inhibition.lines()
    return "\n".join(lines) + "\n"


def inhibitions() -> Iterator[Inhibition]:
    """Every rule of inhibition, those of the incident table last and in its order."""
    yield Inhibition(
        "A page holds the ticket of the same incident back.",
        ('severity="critical"', 'incident!=""'),
        ('severity="warning"',),
        (*WHERE, "incident"),
    )
    yield Inhibition(
        "The same for alerts that belong to no incident.",
        ('severity="critical"', 'incident=""', 'alertname=~"(Oomwatch|Vllm).+"'),
        ('severity="warning"', 'incident=""'),
        (*WHERE, "alertname", "job", "model_name"),
    )
    yield Inhibition(
        "A daemon that is down: what else its node tells of its own health follows from that. Pages are left alone.",
        ('alertname="OomwatchDown"',),
        ('killer="health"', 'severity="warning"'),
        WHERE,
    )
    yield Inhibition(
        "A restart or a sleep that you know of: amtool alert add "
        f"{PLANNED_WORK} severity=none cluster=gpu-east instance=gpu-node-1:18666 engine=chat "
        "--end=2026-01-01T03:00:00Z holds that engine's alerts back. Windows that repeat belong in detection.windows "
        "of oomwatch's configuration.",
        (f'alertname="{PLANNED_WORK}"', 'engine!=""'),
        ('alertname=~"(Oomwatch|Vllm).+"', 'severity!="none"'),
        (*WHERE, "engine"),
    )
    yield Inhibition(
        "The same without engine: the whole node.",
        (f'alertname="{PLANNED_WORK}"', 'engine=""'),
        ('alertname=~"(Oomwatch|Vllm).+"', 'severity!="none"'),
        WHERE,
    )
    explained = symptoms_by_rule()
    for rule in TABLE:
        yield from _of_rule(rule, explained[rule])


def _of_rule(rule: Rule, symptoms: tuple[str, ...]) -> Iterator[Inhibition]:
    """A cause holds its symptoms of the same severity back: a ticket never hides a page.

    Alerts know no rank: what explains a rank explains the engine's one alert.
    """
    says = f"{rule.cause} explains {', '.join(symptoms) if rule.symptoms else 'what else is'}"
    target = _fits(rule, symptoms)
    yield Inhibition(
        f"{says} about the same engine.",
        (f'verdict="{rule.cause}"', 'engine!=""'),
        target,
        (*WHERE, "engine", "severity"),
    )
    if rule.scope == "device":
        for label, words in (("gpu", "GPU"), ("mig", "MIG slice")):
            yield Inhibition(
                f"{says} about the same {words}.",
                (f'verdict="{rule.cause}"', f'{label}!=""'),
                target,
                (*WHERE, label, "severity"),
            )


def _fits(rule: Rule, symptoms: tuple[str, ...]) -> tuple[str, ...]:
    if rule.symptoms:
        return (f'verdict=~"{"|".join(symptoms)}"' if len(symptoms) > 1 else f'verdict="{symptoms[0]}"',)
    others = [name for name in CATALOGUE if name not in symptoms]
    return 'verdict!=""', f'verdict!~"{"|".join(others)}"'


def symptoms_by_rule() -> Mapping[Rule, tuple[str, ...]]:
    """What each row of the table may hold back, in the table's order, or the catalogue's where a row names none."""
    return {rule: tuple(name for name in rule.symptoms or CATALOGUE if explains(rule, name)) for rule in TABLE}
