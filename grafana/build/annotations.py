"""Marks on every panel over time: what happened when."""

from __future__ import annotations

from grafana_foundation_sdk.models import dashboard

from grafana.build.board import SOURCE

STEP = "15s"
"""The finest; Grafana takes a coarser one for a long time range, and the queries look back by what it takes."""


def annotation(name: str, expr: str, text: str, colour: str, *, at_value: bool = False) -> dashboard.AnnotationQuery:
    """A mark where ``expr`` has a value above 0; with ``at_value`` at the time that is its value, in milliseconds."""
    return dashboard.AnnotationQuery(
        name=name,
        datasource=SOURCE,
        enable=True,
        hide=False,
        icon_color=colour,
        expr=expr,
        step=STEP,
        title_format=name,
        text_format=text,
        use_value_for_time=at_value,
    )
