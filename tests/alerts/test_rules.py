"""The rule files: made from the catalogue, right on both sides of each threshold, and about series that exist."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from prometheus_client.parser import text_string_to_metric_families
from promql_parser import AggregateExpr, BinaryExpr, Call, MatrixSelector, NumberLiteral, ParenExpr

from alerts.build.__main__ import main
from alerts.build.files import made
from alerts.build.links import Links
from alerts.build.verdicts import SEVERITIES, worst_of_incident
from oomwatch.alerts import alert_labels
from oomwatch.conclusions import incidents
from oomwatch.detectors.base import LEVEL, State, Subject
from oomwatch.families import FAMILIES
from oomwatch.incidents import TABLE
from oomwatch.snapshot import Snapshot
from oomwatch.status import SOURCE_NAMES
from oomwatch.verdicts import CATALOGUE
from tests.alerts.promql import (
    RULES,
    Rule,
    labels_of,
    loaded,
    matched,
    nodes,
    queries,
    rules,
    selectors,
    series,
)
from tests.documents import REPOSITORY
from tests.e2e.tools import VERSIONS, program
from tests.exposed import own_page
from tests.grafana.dashboards import variables
from tests.snapshots import NOW, alarming, full, judged, verdict

ALERTS = REPOSITORY / "alerts"
TEST_FILES = sorted((ALERTS / "tests").glob("*.yml"))
Labels = frozenset[tuple[str, str]]

alerting_rules = pytest.mark.parametrize("rule", [rule for rule in rules() if rule.is_alert], ids=str)
every_rule = pytest.mark.parametrize("rule", rules(), ids=str)


@pytest.fixture(scope="module", params=VERSIONS)
def promtool(request: pytest.FixtureRequest) -> Path:
    """Debian bookworm's 2.42, which is the oldest that the rules are for, and the newest that Debian has."""
    return program("promtool", request.param)


def run(promtool: Path, *arguments: str | Path) -> str:
    """What promtool says when it is not content; empty when it is."""
    answer = subprocess.run([promtool, *arguments], capture_output=True, text=True, timeout=100, check=False)
    return "" if answer.returncode == 0 else answer.stdout + answer.stderr


class TestFiles:
    def test_they_are_as_they_would_be_made_now(self) -> None:
        answer = CliRunner().invoke(main, ["--check"])
        assert answer.exit_code == 0, answer.output

    def test_a_file_that_is_out_of_date_is_told(self, tmp_path: Path) -> None:
        assert CliRunner().invoke(main, ["--folder", str(tmp_path)]).exit_code == 0
        stale = tmp_path / "alerts" / "rules" / "vllm-plain.yml"
        stale.write_text(stale.read_text().replace("0.03", "0.3"))
        answer = CliRunner().invoke(main, ["--folder", str(tmp_path), "--check"])
        assert answer.exit_code == 1
        assert f"{stale} is out of date" in answer.output

    def test_links_lead_where_the_owner_says(self, tmp_path: Path) -> None:
        told = ["--runbooks", "https://wiki.example.net/ooms", "--grafana", "https://graphs.example.net/"]
        page = ["--page", "https://{{ $labels.node }}:9841/"]
        assert CliRunner().invoke(main, ["--folder", str(tmp_path), *told, *page]).exit_code == 0
        text = (tmp_path / "alerts" / "rules" / "oomwatch-verdicts.yml").read_text()
        assert "runbook_url: https://wiki.example.net/ooms/OomwatchKvBlockLeak.md\n" in text
        assert "{{ if $labels.engine }}https://graphs.example.net/d/oomwatch-engine?" in text
        assert "page: https://{{ $labels.node }}:9841/\n" in text
        assert "example.org" not in text

    def test_the_manifest_has_the_same_groups(self) -> None:
        manifest = loaded(REPOSITORY / "deploy" / "kubernetes" / "prometheusrule.yaml")
        assert (manifest["apiVersion"], manifest["kind"]) == ("monitoring.coreos.com/v1", "PrometheusRule")
        groups = [
            group
            for name in made(Links())
            if name.startswith("alerts/rules/")
            for group in loaded(REPOSITORY / name)["groups"]
        ]
        assert manifest["spec"]["groups"] == groups

    def test_promtool_finds_nothing_wrong(self, promtool: Path) -> None:
        assert run(promtool, "check", "rules", "--lint=all", "--lint-fatal", *sorted(RULES.glob("*.yml"))) == ""

    @pytest.mark.parametrize("path", TEST_FILES, ids=lambda path: path.stem)
    def test_promtools_own_tests_pass(self, promtool: Path, path: Path) -> None:
        assert run(promtool, "test", "rules", path) == ""


# --- every verdict at every state --------------------------------------------------------------------------------


def as_input(page: str, instance: str) -> Iterator[dict[str, str]]:
    """A page as promtool's test takes it: what was scraped from ``instance`` for ten minutes without a change."""
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            labels = {"instance": instance, "job": "oomwatch", **sample.labels}
            text = ",".join(f"{name}={json.dumps(value)}" for name, value in labels.items())
            yield {"series": f"{sample.name}{{{text}}}", "values": f"{sample.value!r}x40"}


def firing(labels: Iterable[Mapping[str, str]]) -> list[dict[str, Any]]:
    return [
        {"labels": "ALERTS" + "{" + ",".join(f"{k}={json.dumps(v)}" for k, v in one.items()) + "}", "value": 1}
        for one in ({"alertstate": "firing", **one} for one in labels)
    ]


def promtool_test(tmp_path: Path, inputs: list[dict[str, str]], expected: list[dict[str, Any]]) -> Path:
    path = tmp_path / "test.yml"
    test = {
        "interval": "15s",
        "input_series": inputs,
        "promql_expr_test": [
            {"expr": 'ALERTS{alertstate="firing"}', "eval_time": "15s", "exp_samples": []},
            {"expr": 'ALERTS{alertstate="firing"}', "eval_time": "30s", "exp_samples": expected},
        ],
    }
    document = {
        "rule_files": [str(RULES / "oomwatch-verdicts.yml")],
        "evaluation_interval": "15s",
        "tests": [test],
    }
    path.write_text(json.dumps(document))
    return path


def expected_of(snapshot: Snapshot, instance: str) -> Iterator[dict[str, str]]:
    """The alerts that a page must raise: one for each incident, and a ticket beside a page."""
    for incident in incidents(snapshot.verdicts):
        labels = alert_labels(incident, {"instance": instance, "job": "oomwatch"})
        if labels["severity"] == "critical":
            yield labels
        if labels["severity"] in ("critical", "warning"):
            yield {**labels, "severity": "warning"}


def states_of(worst: State) -> list[State]:
    states: tuple[State, ...] = ("clear", "info", "ticket", "page")
    return [state for state in states if LEVEL[state] <= LEVEL[worst]]


def test_each_verdict_alerts_from_a_ticket_on_and_not_before(promtool: Path, tmp_path: Path) -> None:
    inputs: list[dict[str, str]] = []
    expected: list[dict[str, str]] = []
    for entry in CATALOGUE.values():
        for state in states_of(entry.worst):
            instance = f"{entry.name}-{state}"
            shown = Snapshot(NOW, verdicts=judged(verdict(entry.name, state, Subject(engine="chat", rank="0"))))
            inputs += as_input(own_page(shown), instance)
            alerts = list(expected_of(shown, instance))
            assert len(alerts) == max(0, LEVEL[state] - LEVEL["info"])
            expected += alerts
    assert {labels["alertname"] for labels in expected} == {entry.alert for entry in CATALOGUE.values()}
    assert run(promtool, "test", "rules", promtool_test(tmp_path, inputs, firing(expected))) == ""


def silenced_cause() -> Snapshot:
    whole = full()
    return replace(
        whole,
        verdicts=tuple(
            replace(one, silenced="maintenance") if one.name == "kv-block-leak" else one for one in whole.verdicts
        ),
    )


def each_others_symptoms() -> Snapshot:
    lost = Subject(gpu="GPU-00000000-aaaa-bbbb-cccc-000000000000")
    return Snapshot(NOW, verdicts=judged(verdict("gpu-lost", "page", lost), verdict("nvml-stuck", "ticket", lost)))


SHOWN: dict[str, Callable[[], Snapshot]] = {
    "full": full,
    "alarming": alarming,
    "a silenced cause": silenced_cause,
    "each other's symptoms": each_others_symptoms,
}


@pytest.mark.parametrize("name", SHOWN)
def test_rules_and_daemon_give_an_incident_the_same_labels(name: str, promtool: Path, tmp_path: Path) -> None:
    snapshot = SHOWN[name]()
    expected = list(expected_of(snapshot, "n1:9841"))
    assert expected
    inputs = list(as_input(own_page(snapshot), "n1:9841"))
    assert run(promtool, "test", "rules", promtool_test(tmp_path, inputs, firing(expected))) == ""


class TestWhatAnIncidentCanBe:
    def test_a_ticket_whose_symptom_pages_can_page(self) -> None:
        assert CATALOGUE["orphan-memory"].worst == "ticket"
        assert worst_of_incident(CATALOGUE["orphan-memory"]) == "page"

    def test_what_causes_nothing_is_no_worse_than_itself(self) -> None:
        causes = {row.cause for row in TABLE}
        for entry in CATALOGUE.values():
            if entry.name not in causes:
                assert worst_of_incident(entry) == entry.worst

    def test_each_alert_has_a_rule_for_each_severity_it_can_have(self) -> None:
        found = {
            (r.name, r.data["labels"]["severity"]) for r in rules() if r.file == "oomwatch-verdicts.yml" and r.is_alert
        }
        assert found == {
            (entry.alert, severity)
            for entry in CATALOGUE.values()
            for state, severity in SEVERITIES
            if LEVEL[state] <= LEVEL[worst_of_incident(entry)]
        }


# --- what each alert must have -----------------------------------------------------------------------------------


@cache
def fired_in_tests() -> Mapping[str, frozenset[str]]:
    """The severities that the tests in alerts/tests see firing, by alert."""
    found: dict[str, set[str]] = {}
    for path in TEST_FILES:
        for test in loaded(path)["tests"]:
            for query in test.get("promql_expr_test", ()):
                for sample in query["exp_samples"]:
                    labels = dict(re.findall(r'(\w+)="([^"]*)"', sample["labels"]))
                    if "alertname" in labels and "ALERTS" in query["expr"]:
                        found.setdefault(labels["alertname"], set()).add(labels["severity"])
    return {name: frozenset(severities) for name, severities in found.items()}


def silent_in_tests(alert: str) -> bool:
    """Whether a test that is named after the alert has an engine or node that it stays silent about."""
    for path in TEST_FILES:
        for test in loaded(path)["tests"]:
            if test["name"].startswith(f"{alert}:"):
                there = {instance for one in test["input_series"] for instance in _INSTANCE.findall(one["series"])}
                for query in test["promql_expr_test"]:
                    fired = [one["labels"] for one in query["exp_samples"] if f'"{alert}"' in one["labels"]]
                    if fired and there - {instance for labels in fired for instance in _INSTANCE.findall(labels)}:
                        return True
    return False


_INSTANCE = re.compile(r'instance="([^"]*)"')


class TestEachAlert:
    @alerting_rules
    def test_has_a_known_severity_and_killer(self, rule: Rule) -> None:
        assert rule.data["labels"]["severity"] in {severity for _, severity in SEVERITIES}
        killers = {entry.killer for entry in CATALOGUE.values()}
        assert rule.data["labels"].get("killer") in killers or "killer" in labels_of(rule.expr, series())

    @alerting_rules
    def test_says_what_and_what_to_do_first(self, rule: Rule) -> None:
        annotations = rule.data["annotations"]
        assert {"summary", "description", "action", "runbook_url"} <= set(annotations)
        assert all(text.strip() for text in annotations.values())
        assert f"First: {annotations['action']}" in annotations["description"]

    @alerting_rules
    def test_has_a_runbook_of_its_name(self, rule: Rule) -> None:
        assert rule.data["annotations"]["runbook_url"].endswith(f"/{rule.name}.md")
        assert (ALERTS / "runbooks" / f"{rule.name}.md").is_file()

    @alerting_rules
    def test_is_tested(self, rule: Rule) -> None:
        """Those on verdicts by the catalogue, above; the others on both sides in alerts/tests."""
        if rule.file != "oomwatch-verdicts.yml":
            assert rule.data["labels"]["severity"] in fired_in_tests()[rule.name]
            assert silent_in_tests(rule.name)

    @alerting_rules
    def test_on_a_verdict_waits_for_two_evaluations_and_no_longer(self, rule: Rule) -> None:
        if rule.file == "oomwatch-verdicts.yml":
            assert rule.data["for"] == "30s"

    @alerting_rules
    def test_links_to_dashboards_by_variables_that_they_have_where_there_is_a_daemon(self, rule: Rule) -> None:
        if rule.file != "vllm-plain.yml":
            linked = re.findall(r"/d/([\w-]+)\?(.*?)(?=\{\{ e|$)", rule.data["annotations"]["dashboard"])
            assert linked
            for uid, query in linked:
                assert set(re.findall(r"var-(\w+)=", query)) <= {one["name"] for one in variables(uid)}

    @alerting_rules
    def test_on_a_verdict_links_to_the_daemons_page(self, rule: Rule) -> None:
        if rule.file == "oomwatch-verdicts.yml":
            assert rule.data["annotations"]["page"] == "http://{{ $labels.instance }}/"


class TestTheDaemonsOwnHealth:
    """What is not seen raises no alarm, so that each way not to see has one of its own."""

    def test_each_source_that_fails_is_told(self) -> None:
        by_verdicts = {"nvml", "vllm", "probe"}  # gpu-lost, nvml-stuck, source-stale, engine-stuck
        told = [
            matcher
            for rule in rules()
            for selector in selectors(rule.expr)
            if selector.name == "oomwatch_source_up"
            for matcher in selector.matchers.matchers
            if matcher.name == "source"
        ]
        by_rules = {source for source in SOURCE_NAMES for one in told if re.fullmatch(one.value, source)}
        assert by_verdicts | by_rules == set(SOURCE_NAMES)
        assert not by_verdicts & by_rules

    def test_each_number_of_it_that_can_be_bad_is_told(self) -> None:
        own = {family.name for family in FAMILIES if family.section in OWN_SECTIONS}
        can_be_bad = {name for name in own if re.search(r"_(up|successful|waiting|internal_errors_total)$", name)}
        assert can_be_bad
        assert can_be_bad <= {str(selector.name) for rule in rules() for selector in selectors(rule.expr)}


OWN_SECTIONS = {"The daemon", "The memory on disk", "Notifications", "Sources"}


# --- lint --------------------------------------------------------------------------------------------------------


class TestSeriesAndLabels:
    @every_rule
    def test_each_series_is_served_or_recorded(self, rule: Rule) -> None:
        assert {str(selector.name) for selector in selectors(rule.expr)} <= set(series())

    @every_rule
    def test_each_label_that_is_matched_is_on_its_series(self, rule: Rule) -> None:
        for selector in selectors(rule.expr):
            for matcher in selector.matchers.matchers:
                assert matcher.name in series()[str(selector.name)], f"{selector.name} has no label {matcher.name}"

    @every_rule
    def test_each_label_that_is_aggregated_is_there(self, rule: Rule) -> None:
        for node in nodes(rule.expr):
            if isinstance(node, AggregateExpr) and node.modifier is not None:
                assert set(node.modifier.labels) <= labels_of(node.expr, series())

    @every_rule
    def test_both_sides_of_a_match_have_the_same_labels(self, rule: Rule) -> None:
        """Else nothing would ever match, or everything would."""
        for node in nodes(rule.expr):
            if isinstance(node, BinaryExpr) and str(node.op) != "or":
                left, right = labels_of(node.lhs, series()), labels_of(node.rhs, series())
                if left and right:
                    assert matched(node, left) == matched(node, right), f"{node}"

    @alerting_rules
    def test_each_label_that_an_annotation_shows_is_on_the_alert(self, rule: Rule) -> None:
        shown = set(re.findall(r"\$labels\.(\w+)", json.dumps(rule.data["annotations"])))
        assert shown <= labels_of(rule.expr, series()) | set(rule.data["labels"])

    @alerting_rules
    def test_each_query_of_an_annotation_is_about_what_is_there(self, rule: Rule) -> None:
        for text in rule.data["annotations"].values():
            asked = queries(text)
            for expr in asked:
                for selector in selectors(expr):
                    assert str(selector.name) in series()
                    labels = series()[str(selector.name)]
                    assert {matcher.name for matcher in selector.matchers.matchers} <= labels
                for node in nodes(expr):
                    if isinstance(node, BinaryExpr):
                        left, right = labels_of(node.lhs, series()), labels_of(node.rhs, series())
                        assert matched(node, left) == matched(node, right)
            shown = set(re.findall(r"(?<!\$)\.Labels\.(\w+)", text))
            assert shown <= frozenset().union(*(labels_of(expr, series()) for expr in asked))


class TestExpressions:
    @alerting_rules
    def test_an_alert_compares(self, rule: Rule) -> None:
        compared = [node for node in nodes(rule.expr) if isinstance(node, BinaryExpr) and str(node.op) in COMPARISONS]
        # One for something that is missing asks for what is not there instead.
        assert compared or any(isinstance(n, BinaryExpr) and str(n.op) == "unless" for n in nodes(rule.expr))

    @every_rule
    def test_nothing_is_divided_by_what_may_be_zero(self, rule: Rule) -> None:
        for node in nodes(rule.expr):
            if isinstance(node, BinaryExpr) and str(node.op) in ("/", "%"):
                assert above_zero(node.rhs), f"{node.rhs} may be 0, and the result no number, which no threshold sees"

    @every_rule
    def test_only_counters_have_rates(self, rule: Rule) -> None:
        for node in nodes(rule.expr):
            if isinstance(node, Call) and node.func.name in ("rate", "increase", "irate"):
                (selected,) = node.args
                assert isinstance(selected, MatrixSelector)
                assert is_counter(str(selected.vector_selector.name))

    @every_rule
    def test_a_window_holds_two_scrapes_of_the_slowest_at_least(self, rule: Rule) -> None:
        for node in nodes(rule.expr):
            if isinstance(node, MatrixSelector):
                assert node.range.total_seconds() >= 4 * 60

    def test_names_of_recorded_series_say_level_metric_operations(self) -> None:
        for rule in rules():
            if not rule.is_alert:
                assert re.fullmatch(r"[a-z_]+:[a-z_0-9]+:[a-z_0-9]+", rule.name)
                assert not rule.name.split(":")[1].endswith("_total")

    def test_no_two_rules_are_the_same(self) -> None:
        seen = [(rule.name, json.dumps(rule.data.get("labels"), sort_keys=True)) for rule in rules()]
        assert len(seen) == len(set(seen))

    def test_no_rule_asks_more_of_prometheus_than_its_oldest_version_has(self) -> None:
        for path in RULES.glob("*.yml"):
            for group in loaded(path)["groups"]:
                assert set(group) == {"name", "interval", "rules"}


COMPARISONS = (">", "<", ">=", "<=", "==", "!=")


def above_zero(expr: Any) -> bool:
    """Whether it reads ``(... > 0)``, which leaves out what is 0."""
    inner = expr.expr if isinstance(expr, ParenExpr) else expr
    return (
        isinstance(inner, BinaryExpr)
        and str(inner.op) == ">"
        and isinstance(inner.rhs, NumberLiteral)
        and inner.rhs.val == 0
    )


def is_counter(name: str) -> bool:
    ours = {family.name for family in FAMILIES if family.kind == "counter"}
    return name in ours or (name.startswith("vllm:") and name.endswith(("_total", "_count")))
