"""What several dashboards show of the verdicts within their scope."""

from __future__ import annotations

from collections.abc import Mapping

from grafana_foundation_sdk.models import dashboard

from grafana.build.annotations import annotation
from grafana.build.look import GREY, STATES, VERDICT_COLOURS, VERMILLION
from grafana.build.panels import Query, series, stat
from grafana.build.queries import Scope, of, unsilenced, worst
from oomwatch.verdicts import KILLERS

COLUMNS: Mapping[str, str] = {
    "killer": "Killer",
    "verdict": "Verdict",
    "engine": "Engine",
    "rank": "Rank",
    "gpu": "GPU",
    "mig": "MIG",
    "pid": "Pid",
    "cause": "Symptom of",
}
"""The labels of a table of verdicts and its columns' titles."""


def worst_by_killer(scope: Scope, description: str) -> dashboard.Panel:
    """The worst state of each killer."""
    queries = [Query(worst(scope, of(killer)), killer) for killer in KILLERS]
    return stat("Worst verdict by killer", description, queries, words=STATES, width=10)


def over_time(scope: Scope, description: str, *labels: str, width: int) -> dashboard.Panel:
    """The worst state of all, and that of each verdict that is not clear, told apart by these labels."""
    return series(
        "Verdicts over time",
        description,
        (
            Query(worst(scope), "worst of all", colour=GREY, dashed=True),
            Query(
                f"max by ({', '.join(labels)}) ({unsilenced(scope)}) > 0",
                " ".join(f"{{{{{label}}}}}" for label in labels),
            ),
        ),
        unit="none",
        stepped=True,
        words=STATES,
        lowest=-1,
        highest=3,
        decimals=0,
        colours=VERDICT_COLOURS,
        width=width,
    )


def pages(scope: Scope, text: str) -> dashboard.AnnotationQuery:
    """Marks where a verdict that pages now began to."""
    since, state = scope("oomwatch_verdict_state_timestamp_seconds"), scope("oomwatch_verdict_state")
    return annotation("Pages", f"{since} * 1000 and {state} == 3", text, VERMILLION, at_value=True)
