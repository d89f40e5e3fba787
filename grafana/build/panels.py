"""Panels with everything set that the SDK leaves at defaults of its own: legends, reducers, what empty means.

A panel that may be empty says when, in words of its own: ``empty``. Where there is none, emptiness is a failure and
Grafana's "No data" stands.
"""

from __future__ import annotations

import string
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from grafana_foundation_sdk.builders import bargauge as bargauges
from grafana_foundation_sdk.builders import common as commons
from grafana_foundation_sdk.builders import stat as stats
from grafana_foundation_sdk.builders import table as tables
from grafana_foundation_sdk.builders import timeseries as many_series
from grafana_foundation_sdk.models import common, dashboard, prometheus

from grafana.build.board import SOURCE
from grafana.build.look import BLUE, ORDER, PLAIN, STATES, Words, mapping, nothing, thresholds

NONE = "-"
"""What an empty cell of a table shows."""


@dataclass(frozen=True)
class Query:
    """PromQL, the name of its series, and how these are drawn; dashed ones are never stacked."""

    expr: str
    legend: str = "__auto"
    colour: str = ""
    unit: str = ""
    dashed: bool = False
    filled: bool = False
    right: bool = False


@dataclass(frozen=True)
class Column:
    """A column of values of a table; its expression has the labels that make the rows, which may be all that counts."""

    title: str
    expr: str
    unit: str = "none"
    words: Words = field(default_factory=dict)
    width: int = 0
    decimals: int | None = None
    shown: bool = True


@dataclass(frozen=True)
class Link:
    """Where a click on a column's cell leads."""

    title: str
    url: str


def stat(
    title: str,
    description: str,
    queries: Sequence[Query],
    *,
    unit: str = "none",
    width: int = 4,
    height: int = 4,
    words: Words | None = None,
    steps: Sequence[tuple[float | None, str]] = ((None, BLUE),),
    empty: str = "",
    names: Mapping[str, str] | None = None,
    decimals: int | None = None,
) -> dashboard.Panel:
    """The newest values, large. A query's colour is that of its values from 1 on. With ``names`` the series' names
    are shown and not their values: which colours they have, others that of ``steps``."""
    named = len(queries) > 1 or "{{" in queries[0].legend
    mode = common.BigValueTextMode.VALUE_AND_NAME if named else common.BigValueTextMode.VALUE
    judged = words or names or len(steps) > 1 or any(query.colour for query in queries)
    shown = common.BigValueColorMode.BACKGROUND_SOLID if judged else common.BigValueColorMode.NONE
    if steps[0][1] == PLAIN:
        shown = common.BigValueColorMode.VALUE
    panel = (
        stats.Panel()
        .color_mode(shown)
        .graph_mode(common.BigValueGraphMode.NONE)
        .text_mode(common.BigValueTextMode.NAME if names else mode)
        .reduce_options(commons.ReduceDataOptions().calcs(["lastNotNull"]))
        .build()
    )
    panel = _finished(
        panel, title, description, queries, unit, width, height, words, steps, empty, instant=True, decimals=decimals
    )
    for letter, query in _lettered(queries):
        if query.colour:
            marked = thresholds((None, BLUE), (1, query.colour))
            _add_override(panel, "byFrameRefID", letter, {"thresholds": marked})
    for name, colour in (names or {}).items():
        _add_override(panel, "byName", name, {"thresholds": thresholds((None, colour))})
    return panel


def bars(
    title: str,
    description: str,
    queries: Sequence[Query],
    *,
    unit: str,
    width: int = 8,
    height: int = 8,
    steps: Sequence[tuple[float | None, str]] = ((None, BLUE),),
    highest: float | None = None,
    empty: str = "",
) -> dashboard.Panel:
    """The newest values as bars, one below the other."""
    panel = (
        bargauges.Panel()
        .orientation(common.VizOrientation.HORIZONTAL)
        .display_mode(common.BarGaugeDisplayMode.BASIC)
        .text(commons.VizTextDisplayOptions().title_size(13).value_size(15))
        .reduce_options(commons.ReduceDataOptions().calcs(["lastNotNull"]))
        .build()
    )
    panel = _finished(panel, title, description, queries, unit, width, height, None, steps, empty, instant=True)
    defaults = _defaults(panel)
    defaults.min_val, defaults.max_val = 0, highest
    return panel


def series(
    title: str,
    description: str,
    queries: Sequence[Query],
    *,
    unit: str,
    width: int = 12,
    height: int = 8,
    stacked: bool = False,
    stepped: bool = False,
    words: Words | None = None,
    lowest: float | None = None,
    highest: float | None = None,
    line: float | None = None,
    colours: Mapping[str, str] | None = None,
    empty: str = "",
    decimals: int | None = None,
) -> dashboard.Panel:
    """Values over time. ``line`` draws a mark at a value, in the colour of what is bad; ``colours`` are by name."""
    interpolation = common.LineInterpolation.STEP_AFTER if stepped else common.LineInterpolation.LINEAR
    builder = (
        many_series.Panel()
        .legend(
            commons.VizLegendOptions()
            .show_legend(True)
            .display_mode(common.LegendDisplayMode.LIST)
            .placement(common.LegendPlacement.BOTTOM)
        )
        .tooltip(commons.VizTooltipOptions().mode(common.TooltipDisplayMode.MULTI).sort(common.SortOrder.DESCENDING))
        .line_interpolation(interpolation)
        .line_width(1 if stacked else 2)
        .fill_opacity(60 if stacked else 0)
        .show_points(common.VisibilityMode.NEVER)
        .span_nulls(False)
    )
    if stacked:
        builder = builder.stacking(commons.StackingConfig().mode(common.StackingMode.NORMAL).group("A"))
    steps: Sequence[tuple[float | None, str]] = ((None, BLUE),)
    if line is not None:
        steps = ((None, "transparent"), (line, STATES[2][1]))
        builder = builder.thresholds_style(
            commons.GraphThresholdsStyleConfig().mode(common.GraphThresholdsStyleMode.DASHED)
        )
    panel = _finished(
        builder.build(), title, description, queries, unit, width, height, words, steps, empty, decimals=decimals
    )
    defaults = _defaults(panel)
    defaults.min_val, defaults.max_val = lowest, highest
    free = [colour for colour in ORDER if colour not in {query.colour for query in queries}]
    for letter, query in _lettered(queries):
        colour = query.colour or free.pop(0)
        _add_override(panel, "byFrameRefID", letter, {"color": _coloured(colour, query.legend), **_drawn(query)})
    for name, colour in (colours or {}).items():
        _add_override(panel, "byRegexp", f"/^{name}/", {"color": _coloured(colour, name)})
    return panel


def table(
    title: str,
    description: str,
    columns: Sequence[Column],
    labels: Mapping[str, str],
    *,
    sort: str,
    width: int = 24,
    height: int = 8,
    links: Mapping[str, Sequence[Link]] | None = None,
    widths: Mapping[str, int] | None = None,
    order: Sequence[str] = (),
    empty: str = "",
) -> dashboard.Panel:
    """One row for each set of ``labels`` (label to title), the highest of ``sort`` first; ``order`` names columns."""
    panel = tables.Panel().cell_height(common.TableCellHeight.SM).build()
    queries = [Query(column.expr) for column in columns]
    panel = _finished(
        panel, title, description, queries, "none", width, height, None, ((None, BLUE),), empty, instant=True, rows=True
    )
    # Grafana names the values of a single query without its letter.
    letters = [f"Value #{letter}" for letter in string.ascii_uppercase] if len(columns) > 1 else ["Value"]
    values = dict(zip(letters, columns, strict=False))
    shown = {name: column.title for name, column in values.items() if column.shown}
    hidden = {name: column.title for name, column in values.items() if not column.shown}
    renamed = {**labels, **shown}
    places = {name: place for place, name in enumerate(order or (*labels.values(), *shown.values()))}
    # By the name that the field has before it is hidden or gets its title.
    by = next(name for name, title in {**renamed, **hidden}.items() if title == sort)
    panel.transformations = [
        dashboard.DataTransformerConfig(id_val="merge", options={}),
        dashboard.DataTransformerConfig(id_val="sortBy", options={"fields": {}, "sort": [{"field": by, "desc": True}]}),
        dashboard.DataTransformerConfig(
            id_val="organize",
            options={
                "excludeByName": dict.fromkeys(("Time", *hidden), True),
                "indexByName": {name: places[title] for name, title in renamed.items() if title in places},
                "renameByName": renamed,
            },
        ),
    ]
    # Else Grafana writes what is said of the whole panel into every empty cell.
    _add_override(panel, "byRegexp", "/.*/", {"noValue": NONE})
    for column in columns:
        if column.shown:
            _add_override(panel, "byName", column.title, _cell(column))
    for name, found in (links or {}).items():
        plain = [{"title": link.title, "url": link.url} for link in found]
        _add_override(panel, "byName", name, {"links": plain})
    for name, size in (widths or {}).items():
        _add_override(panel, "byName", name, {"custom.width": size})
    return panel


def _finished(
    panel: dashboard.Panel,
    title: str,
    description: str,
    queries: Sequence[Query],
    unit: str,
    width: int,
    height: int,
    words: Words | None,
    steps: Sequence[tuple[float | None, str]],
    empty: str,
    *,
    instant: bool = False,
    rows: bool = False,
    decimals: int | None = None,
) -> dashboard.Panel:
    panel.title, panel.description, panel.datasource = title, description, SOURCE
    panel.grid_pos = dashboard.GridPos(w=width, h=height)
    panel.targets = [
        prometheus.Dataquery(
            ref_id=letter,
            datasource=SOURCE,
            expr=query.expr,
            legend_format=query.legend,
            instant=instant,
            range_val=not instant,
            format_val=prometheus.PromQueryFormat.TABLE if rows else prometheus.PromQueryFormat.TIME_SERIES,
            editor_mode=prometheus.QueryEditorMode.CODE,
        )
        for letter, query in _lettered(queries)
    ]
    if panel.field_config is None:
        panel.field_config = dashboard.FieldConfigSource()
    defaults = _defaults(panel)
    defaults.unit, defaults.no_value, defaults.decimals = unit, empty or None, decimals
    defaults.thresholds = thresholds(*steps)
    defaults.color = dashboard.FieldColor(mode=dashboard.FieldColorModeId.THRESHOLDS)
    defaults.mappings = [mapping(words)] if words else []
    if panel.type_val == "stat" and empty:
        defaults.mappings.append(nothing(empty))
    return panel


def _lettered(queries: Sequence[Query]) -> Iterator[tuple[str, Query]]:
    """Each with the letter that Grafana calls it by."""
    return zip(string.ascii_uppercase, queries, strict=False)


def _coloured(colour: str, legend: str) -> dict[str, str]:
    """Several series of one query are told apart by how light they are."""
    return {"mode": "shades" if "{{" in legend else "fixed", "fixedColor": colour}


def _drawn(query: Query) -> dict[str, object]:
    """How the series of one query differ from the others of their panel."""
    found: dict[str, object] = {}
    if query.unit:
        found["unit"] = query.unit
    if query.right:
        found["custom.axisPlacement"] = "right"
    if query.dashed:
        found["custom.lineStyle"] = {"fill": "dash", "dash": [8, 6]}
        found["custom.fillOpacity"] = 0
        found["custom.stacking"] = {"mode": "none", "group": "B"}
    if query.filled:
        found["custom.fillOpacity"] = 30
    return found


def _cell(column: Column) -> dict[str, object]:
    found: dict[str, object] = {"unit": column.unit}
    if column.words:
        found["mappings"] = [mapping(column.words), nothing(NONE)]
        found["custom.cellOptions"] = {"type": "color-background", "mode": "basic"}
    if column.width:
        found["custom.width"] = column.width
    if column.decimals is not None:
        found["decimals"] = column.decimals
    return found


def _defaults(panel: dashboard.Panel) -> dashboard.FieldConfig:
    assert panel.field_config is not None
    return panel.field_config.defaults


def _add_override(panel: dashboard.Panel, matcher: str, what: str, properties: Mapping[str, object]) -> None:
    if not properties:
        return
    assert panel.field_config is not None
    panel.field_config.overrides.append(
        dashboard.DashboardFieldConfigSourceOverrides(
            matcher=dashboard.MatcherConfig(id_val=matcher, options=what),
            properties=[dashboard.DynamicConfigValue(id_val=name, value=value) for name, value in properties.items()],
        )
    )
