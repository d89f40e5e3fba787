"""The dashboards as files: made by the code, legal, linked, and told apart where numbers are missing."""

from __future__ import annotations

import contextlib
import functools
import itertools
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import parse_qsl, urlsplit

import promql_parser
import pytest
import yaml
from click.testing import CliRunner
from promql_parser import Call, MatrixSelector, VectorSelector

from oomwatch.notify import Place
from tests.alerts.promql import labels_of, nodes, rules, selectors, series
from tests.documents import REPOSITORY
from tests.grafana.dashboards import (
    FOLDER,
    ONE_NODE,
    UIDS,
    Target,
    asked,
    board,
    filled,
    marks,
    panels,
    queried,
    questions,
    variables,
)

# What Prometheus itself and its client library add to a target's series.
AROUND = {
    name: frozenset({"job", "instance"})
    for name in (
        "up",
        "scrape_duration_seconds",
        "process_cpu_seconds_total",
        "process_resident_memory_bytes",
        "process_start_time_seconds",
    )
}
# Okabe and Ito's colours; greys, the text's and none.
COLOURS = {"#0072B2", "#56B4E9", "#009E73", "#E69F00", "#D55E00", "#CC79A7", "#F0E442"}
COLOURS |= {"#8C8C8C", "#C8C8C8", "text", "transparent"}
# Grafana's names (packages/grafana-data, valueFormats) of those that are used.
UNITS = {"none", "short", "percentunit", "bytes", "s", "dateTimeFromNow", "reqps", "cps", "ops", "celsius", "watt"}
Case = TypeVar("Case", Target, dict[str, Any])

every_board = pytest.mark.parametrize("uid", UIDS)


def _title(case: Target | dict[str, Any]) -> str:
    return case.where if isinstance(case, Target) else str(case["title"])


@contextlib.contextmanager
def _named(name: str) -> Iterator[None]:
    try:
        yield
    except AssertionError as error:
        raise AssertionError(f"{name}: {error}") from error


def for_each(find: Callable[[str], Iterable[Case]]) -> Callable[[Callable[[str, Case], None]], Callable[[str], None]]:
    """Makes a test for each dashboard of what must hold for each of its panels or queries."""

    def of_board(check: Callable[[str, Case], None]) -> Callable[[str], None]:
        @functools.wraps(check)
        def test(uid: str) -> None:
            for case in find(uid):
                with _named(_title(case)):
                    check(uid, case)

        del test.__wrapped__  # pytest would ask it for its arguments
        marked: Callable[[str], None] = every_board(test)
        return marked

    return of_board


def parsed(question: Target) -> Any:
    return promql_parser.parse(filled(question.expr))


def known_series() -> dict[str, frozenset[str]]:
    return {**series(), **AROUND}


# --- made by the code ------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Prefer using dashboardv2:DeprecationWarning")  # which Grafana 11 cannot read
def test_the_committed_files_are_what_the_code_makes(tmp_path: Path) -> None:
    pytest.importorskip("grafana_foundation_sdk", reason="grafana-foundation-sdk needs Python 3.11")
    from grafana.build.__main__ import main

    assert CliRunner().invoke(main, ["--folder", str(tmp_path)]).exit_code == 0
    made = {path.name: path.read_text(encoding="utf-8") for path in tmp_path.iterdir()}
    assert made == {path.name: path.read_text(encoding="utf-8") for path in FOLDER.iterdir()}
    assert CliRunner().invoke(main, ["--folder", str(tmp_path), "--check"]).exit_code == 0
    next(tmp_path.iterdir()).write_text("{}", encoding="utf-8")
    old = CliRunner().invoke(main, ["--folder", str(tmp_path), "--check"])
    assert (old.exit_code, "is out of date: python -m grafana.build writes it anew" in old.output) == (1, True)


def test_there_are_four() -> None:
    assert sorted(path.stem for path in FOLDER.iterdir()) == sorted(UIDS)
    assert [board(uid)["uid"] for uid in UIDS] == list(UIDS)


# --- legal, on Grafana 11 to 13 --------------------------------------------------------------------------------------


@every_board
def test_it_needs_nothing_from_an_import(uid: str) -> None:
    text = (FOLDER / f"{uid}.json").read_text(encoding="utf-8")
    assert "__inputs" not in text
    assert "DS_PROMETHEUS" not in text
    # Grafana migrates older ones upwards by itself; 42 is what 12 and 13 write, and 11 shows it.
    assert board(uid)["schemaVersion"] == 42
    assert "id" not in board(uid)


@every_board
def test_panels_are_numbered_and_named_apart(uid: str) -> None:
    everything = board(uid)["panels"]
    assert [panel["id"] for panel in everything] == list(range(1, len(everything) + 1))
    titles = [panel["title"] for panel in everything]
    assert sorted(set(titles)) == sorted(titles)


@every_board
def test_panels_lie_on_the_grid_and_not_on_each_other(uid: str) -> None:
    taken: set[tuple[int, int]] = set()
    for panel in board(uid)["panels"]:
        place = panel["gridPos"]
        cells = set(
            itertools.product(range(place["x"], place["x"] + place["w"]), range(place["y"], place["y"] + place["h"]))
        )
        assert place["x"] + place["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells


@for_each(panels)
def test_it_is_of_a_type_that_grafana_11_to_13_have(uid: str, panel: dict[str, Any]) -> None:
    assert panel["type"] in {"stat", "bargauge", "table", "timeseries"}


@for_each(panels)
def test_each_query_is_named_and_read_as_code(uid: str, panel: dict[str, Any]) -> None:
    for letter, target in zip("ABCDEFGHIJKLMNOPQRSTUVWXYZ", panel["targets"], strict=False):
        assert (target["refId"], target["editorMode"]) == (letter, "code")
        assert target["instant"] is not target["range"]
        assert target["format"] == ("table" if panel["type"] == "table" else "time_series")


@for_each(panels)
def test_overrides_and_columns_name_what_is_there(uid: str, panel: dict[str, Any]) -> None:
    letters = {target["refId"] for target in panel["targets"]}
    shown = {*(target["legendFormat"] for target in panel["targets"]), *renamed(panel).values()}
    for override in panel["fieldConfig"]["overrides"]:
        matcher = override["matcher"]
        if matcher["id"] == "byFrameRefID":
            assert matcher["options"] in letters
        elif matcher["id"] == "byName" and panel["type"] == "table":
            assert matcher["options"] in shown
    for name in renamed(panel):
        letter = name.removeprefix("Value #")
        assert letter == name or letter in letters


# --- what dashboard-linter checks ------------------------------------------------------------------------------------


@every_board
def test_the_data_source_is_a_variable(uid: str) -> None:
    first = variables(uid)[0]
    assert (first["type"], first["name"], first["label"], first["query"]) == (
        "datasource",
        "datasource",
        "Data source",
        "prometheus",
    )
    assert [v["name"] for v in variables(uid) if v["type"] == "datasource"] == ["datasource"]


@every_board
def test_job_and_node_are_variables(uid: str) -> None:
    found = {variable["name"]: variable for variable in variables(uid)}
    assert found["job"]["label"] == "Job"
    assert found["job"]["multi"]
    # Not ".+", as the linter wants: ``up`` of every other job would count as oomwatch's.
    assert "allValue" not in found["job"]
    # "Node", where the linter wants "Instance", and one at a time where one engine or GPU is shown.
    assert found["instance"]["label"] == "Node"
    assert found["instance"]["multi"] is (uid not in ONE_NODE)
    assert found["instance"].get("allValue") == (None if uid in ONE_NODE else ".+")


@every_board
def test_variables_are_asked_anew_for_another_time(uid: str) -> None:
    for variable in queried(uid):
        assert variable["refresh"] == 2
        assert variable["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        assert variable["definition"] == variable["query"]


@every_board
def test_it_cannot_be_edited_in_place(uid: str) -> None:
    assert board(uid)["editable"] is False


@for_each(panels)
def test_a_panel_asks_the_data_source_chosen(uid: str, panel: dict[str, Any]) -> None:
    for asking in (panel, *panel["targets"]):
        assert asking["datasource"] == {"type": "prometheus", "uid": "${datasource}"}


@for_each(panels)
def test_a_panel_has_a_title_and_says_what_good_looks_like(uid: str, panel: dict[str, Any]) -> None:
    assert panel["title"]
    assert len(panel["description"]) > 20
    assert panel["description"].endswith(".")


@for_each(panels)
def test_a_panel_has_queries_and_a_unit(uid: str, panel: dict[str, Any]) -> None:
    assert panel["targets"]
    defaults = panel["fieldConfig"]["defaults"]
    units = [defaults["unit"], *(value for name, value in properties(panel) if name == "unit")]
    assert set(units) <= UNITS


@for_each(questions)
def test_a_query_is_promql(uid: str, question: Target) -> None:
    assert parsed(question) is not None


@for_each(questions)
def test_a_query_keeps_to_the_job_and_the_node(uid: str, question: Target) -> None:
    for selector in selectors(promql_parser.parse(marked(question.expr))):
        found = {(m.name, str(m.op).rpartition(".")[2], m.value) for m in selector.matchers.matchers}
        if question.where == "variable job":
            continue
        assert ("job", "Re", "JOB") in found, selector
        if question.where == "variable instance":
            continue
        operator = "Equal" if question.board in ONE_NODE else "Re"
        assert ("instance", operator, "INSTANCE") in found, selector


@for_each(questions)
def test_ranges_are_grafanas(uid: str, question: Target) -> None:
    for found in re.findall(r"\[(.*?)\]", question.expr):
        assert found in ("$__rate_interval", "$__range", "1h")
    for node in nodes(parsed(question)):
        if isinstance(node, Call) and node.func.name in ("rate", "irate"):
            assert re.search(rf"{node.func.name}\([^\[]*\[\$__rate_interval\]", question.expr)


@for_each(questions)
def test_counters_are_read_by_how_they_grow(uid: str, question: Target) -> None:
    expr = parsed(question)
    grown = {
        str(child.vector_selector.name)
        for node in nodes(expr)
        if isinstance(node, Call) and node.func.name in ("rate", "increase", "changes")
        for child in node.args
        if isinstance(child, MatrixSelector)
    }
    for selector in selectors(expr):
        assert not str(selector.name).endswith("_total") or str(selector.name) in grown


def marked(expr: str) -> str:
    """With the variables as words that can be found again."""
    values = {name: name.upper() for name in ("job", "instance", "engine", "rank", "gpu")}
    return filled(expr, values)


def renamed(panel: dict[str, Any]) -> dict[str, str]:
    """The columns of a table: the names of its fields, and the titles that they get."""
    steps = (step["options"] for step in panel.get("transformations", []))
    return {name: title for options in steps for name, title in options.get("renameByName", {}).items()}


def properties(panel: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for override in panel["fieldConfig"]["overrides"]:
        for item in override["properties"]:
            yield item["id"], item.get("value")


# --- only what is there ----------------------------------------------------------------------------------------------


@for_each(questions)
def test_a_query_reads_only_series_that_are_served_or_recorded(uid: str, question: Target) -> None:
    names = {str(selector.name) for selector in selectors(parsed(question))}
    assert names
    assert names <= set(known_series())


@for_each(questions)
def test_a_query_reads_only_labels_that_its_series_have(uid: str, question: Target) -> None:
    known = known_series()
    for selector in selectors(parsed(question)):
        assert {matcher.name for matcher in selector.matchers.matchers} <= known[str(selector.name)]


@for_each(panels)
def test_legends_and_columns_are_labels_of_the_result(uid: str, panel: dict[str, Any]) -> None:
    for target in panel["targets"]:
        labels = labels_of(promql_parser.parse(filled(target["expr"])), known_series())
        assert set(re.findall(r"{{(\w+)}}", target["legendFormat"])) <= labels
    if panel["type"] == "table":
        everything = frozenset().union(
            *(labels_of(promql_parser.parse(filled(target["expr"])), known_series()) for target in panel["targets"])
        )
        # Each label has its column: none stands there by its raw name.
        assert {name for name in renamed(panel) if not name.startswith("Value")} == everything


def test_every_family_of_verdicts_and_floors_is_on_a_dashboard() -> None:
    used = {
        str(selector.name) for uid in UIDS for question in questions(uid) for selector in selectors(parsed(question))
    }
    missing = {
        name
        for name in series()
        if name.startswith(("oomwatch_verdict_", "oomwatch_device_", "oomwatch_incidents")) and name not in used
    }
    assert missing == {"oomwatch_verdict_eta_high_seconds", "oomwatch_device_free_since_ready_floor_bytes"}


# --- nothing is calm by accident, and nobody needs to see red ---------------------------------------------------------


@for_each(panels)
def test_an_empty_panel_says_when_that_is_right_and_where_to_look_when_not(uid: str, panel: dict[str, Any]) -> None:
    text = panel["fieldConfig"]["defaults"].get("noValue")
    if text is not None:
        assert "no data" in text.lower()


@for_each(panels)
def test_colours_are_told_apart_by_everybody(uid: str, panel: dict[str, Any]) -> None:
    assert set(colours_of(panel)) <= COLOURS


@for_each(panels)
def test_numbers_are_mapped_as_grafana_writes_them(uid: str, panel: dict[str, Any]) -> None:
    defaults = panel["fieldConfig"]["defaults"]
    for mapping in itertools.chain(defaults.get("mappings", ()), *(v for n, v in properties(panel) if n == "mappings")):
        if mapping["type"] == "value":
            assert all(re.fullmatch(r"-?\d+", number) for number in mapping["options"])


@for_each(panels)
def test_series_over_time_have_a_legend_and_gaps_stay_gaps(uid: str, panel: dict[str, Any]) -> None:
    if panel["type"] == "timeseries":
        assert panel["options"]["legend"]["showLegend"] is True
        assert panel["fieldConfig"]["defaults"]["custom"]["spanNulls"] is False


@for_each(panels)
def test_numbers_shown_are_the_newest(uid: str, panel: dict[str, Any]) -> None:
    if panel["type"] in ("stat", "bargauge"):
        assert panel["options"]["reduceOptions"]["calcs"] == ["lastNotNull"]
        assert all(target["instant"] for target in panel["targets"])


def colours_of(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for name, inner in value.items():
            if name in ("color", "fixedColor") and isinstance(inner, str):
                yield inner
            else:
                yield from colours_of(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from colours_of(inner)


# --- ways between the dashboards and from the alerts -----------------------------------------------------------------


def links(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if isinstance(value.get("url"), str):
            yield value["url"]
        for inner in value.values():
            yield from links(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from links(inner)


def variables_given(query: str) -> set[str]:
    return set(re.findall(r"\${(\w+):queryparam}", query)) | {
        name.removeprefix("var-") for name, _ in parse_qsl(query) if name.startswith("var-")
    }


@every_board
def test_each_leads_to_the_three_others(uid: str) -> None:
    led = {urlsplit(link["url"]).path.removeprefix("/d/") for link in board(uid)["links"]}
    assert led == set(UIDS) - {uid}
    assert all(link["keepTime"] and "placement" not in link for link in board(uid)["links"])


@every_board
def test_links_fill_variables_that_are_there(uid: str) -> None:
    for url in links(board(uid)):
        address = urlsplit(url)
        target = address.path.removeprefix("/d/")
        given = variables_given(address.query)
        assert {"datasource", "job"} <= given
        assert given <= {variable["name"] for variable in variables(target)}
        here = set(re.findall(r"\${(\w+):queryparam}", address.query))
        assert here <= {variable["name"] for variable in variables(uid)}


@for_each(panels)
def test_links_of_cells_are_filled_from_columns_that_are_there(uid: str, panel: dict[str, Any]) -> None:
    columns = set(renamed(panel).values())
    for url in links(panel):
        assert set(re.findall(r"__data\.fields\.(\w+):percentencode", url)) <= columns
        assert "${__url_time_range}" in url


def test_alerts_lead_to_dashboards_and_fill_their_variables() -> None:
    led = set()
    for rule in rules():
        plain = re.sub(r"{{.*?}}", " ", rule.data.get("annotations", {}).get("dashboard", "").replace(")) }}", "}}"))
        for uid, query in re.findall(r"/d/([\w-]+)\?(.*?)(?=https?://|$)", plain):
            assert set(re.findall(r"var-(\w+)=", query)) <= {variable["name"] for variable in variables(uid)}
            led.add(uid)
    assert {"oomwatch-engine", "oomwatch-gpu"} <= led


def test_the_daemons_own_notifications_lead_there_too() -> None:
    place = Place({"instance": "node-1:18666", "job": "oomwatch"}, "http://node-1:18666/", grafana="https://graphs")
    for about in (("engine",), ("gpu",), ("engine", "gpu"), ()):
        labels = {"alertname": "OomwatchKvBlockLeak", "instance": "node-1:18666", **dict.fromkeys(about, "one")}
        address = urlsplit(place.links(labels)["dashboard"])
        uid = address.path.rpartition("/")[2]
        assert uid == f"oomwatch-{about[0] if about else 'self'}"
        assert variables_given(address.query) <= {variable["name"] for variable in variables(uid)}


# --- annotations -----------------------------------------------------------------------------------------------------


def test_restarts_sleep_and_pages_are_marked() -> None:
    assert [annotation["name"] for annotation in marks("oomwatch-engine")] == ["Restarts", "Sleep", "Pages"]
    assert [annotation["name"] for annotation in marks("oomwatch-gpu")] == ["Xid", "Pages"]
    for uid in UIDS:
        for annotation in marks(uid):
            assert annotation["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
            labels = labels_of(promql_parser.parse(filled(annotation["expr"])), known_series())
            assert set(re.findall(r"{{(\w+)}}", annotation["textFormat"])) <= labels


# --- provisioning ----------------------------------------------------------------------------------------------------


def test_the_dashboards_are_provisioned_into_a_folder_of_their_own() -> None:
    text = (REPOSITORY / "grafana" / "provisioning" / "dashboards" / "oomwatch.yml").read_text(encoding="utf-8")
    (provider,) = yaml.safe_load(text)["providers"]
    assert (provider["type"], provider["folder"]) == ("file", "oomwatch")
    mounts = yaml.safe_load((REPOSITORY / "docker-compose.yml").read_text(encoding="utf-8"))["services"]["grafana"][
        "volumes"
    ]
    assert f"./grafana/dashboards:{provider['options']['path']}:ro" in mounts


def test_provisioning_has_only_keys_that_grafana_knows() -> None:
    """Those of its documentation (administration/provisioning): it has no schema of them, and ignores others."""
    folder = REPOSITORY / "grafana" / "provisioning"
    providers = yaml.safe_load((folder / "dashboards" / "oomwatch.yml").read_text(encoding="utf-8"))
    assert set(providers) == {"apiVersion", "providers"}
    known = {"name", "orgId", "folder", "folderUid", "type", "disableDeletion", "updateIntervalSeconds"}
    for provider in providers["providers"]:
        assert set(provider) <= known | {"allowUiUpdates", "options"}
        assert set(provider["options"]) <= {"path", "foldersFromFilesStructure"}
    sources = yaml.safe_load((folder / "datasources" / "oomwatch.yml").read_text(encoding="utf-8"))
    assert set(sources) <= {"apiVersion", "datasources", "deleteDatasources", "prune"}
    for source in sources["datasources"]:
        assert set(source) <= {"name", "uid", "type", "access", "url", "isDefault", "editable", "version", "jsonData"}
        assert set(source["jsonData"]) <= {"httpMethod", "prometheusType", "prometheusVersion", "timeInterval"}


def test_a_variable_asks_by_a_function_of_grafana() -> None:
    for uid in UIDS:
        for variable in queried(uid):
            expr, _ = asked(variable)
            assert expr


def test_a_selector_without_a_name_would_be_seen() -> None:
    (found,) = selectors(promql_parser.parse('{job="x"}'))
    assert isinstance(found, VectorSelector)
    assert str(found.name) not in known_series()
