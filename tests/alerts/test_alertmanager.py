"""The shipped Alertmanager configuration, read and run by real Alertmanagers."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from alerts.build.alertmanager import PLANNED_WORK, alertmanager, symptoms_by_rule
from oomwatch.incidents import TABLE, Rule
from oomwatch.verdicts import CATALOGUE
from tests.alerts.alertmanagers import CONFIG, Alertmanager, inbox, shipped_config, to_webhooks
from tests.e2e.processes import wait_until
from tests.e2e.tools import VERSIONS, program

RULES = CONFIG.parent / "rules"
WHERE = {"cluster": "gpu-east", "job": "oomwatch"}
Labels = dict[str, str]


def _shipped_alerts() -> Iterator[Labels]:
    """The labels that each alert of the shipped rules brings, verdicts' in full."""
    by_name = {entry.alert: entry for entry in CATALOGUE.values()}
    for path in sorted(RULES.glob("*.yml")):
        for group in yaml.safe_load(path.read_text(encoding="utf-8"))["groups"]:
            for rule in group["rules"]:
                if "alert" not in rule:
                    continue
                labels = {**WHERE, "instance": "n:1", "alertname": rule["alert"], **rule["labels"]}
                entry = by_name.get(rule["alert"])
                if entry:
                    labels |= {"verdict": entry.name, "engine": "chat", "incident": f"chat/{entry.name}"}
                yield labels


def _verdict(name: str, instance: str, severity: str = "critical", **about: str) -> Labels:
    entry = CATALOGUE[name]
    owner = "".join(about.values())
    return {
        **WHERE,
        **about,
        "instance": instance,
        "alertname": entry.alert,
        "incident": f"{owner}/{name}",
        "killer": entry.killer,
        "severity": severity,
        "verdict": name,
    }


def test_the_file_is_what_the_incident_table_makes_it() -> None:
    assert CONFIG.read_text(encoding="utf-8") == alertmanager(), "python -m alerts.build writes it anew"


@pytest.mark.parametrize("version", VERSIONS)
def test_amtool_accepts_the_file(version: str) -> None:
    command = [str(program("amtool", version)), "check-config", str(CONFIG)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_amlint_finds_nothing_that_is_not_meant() -> None:
    command = [
        str(Path(sys.executable).with_name("amlint")),
        "check",
        "--format=json",
        f"--rules={RULES / '*.yml'}",
        str(CONFIG),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    found = json.loads(done.stdout)
    findings = found["findings"] if isinstance(found, dict) else found
    meant = {
        "empty-receiver",  # nobody, for alerts that only hold others back
        "inhibit-unknown-alertname",  # planned work is told by hand
        "inhibit-same-match",  # the severities tell the two sides apart
    }
    assert [one for one in findings if one["code"] not in meant] == []


def _expected_receiver(labels: Labels) -> str:
    if labels["severity"] == "none":
        return "nobody"
    urgent = labels["severity"] == "critical"
    if labels.get("team") == "search":
        return "search-page" if urgent else "search-ticket"
    return "page" if urgent else "ticket"


@pytest.mark.parametrize("version", VERSIONS)
def test_each_alert_reaches_the_receiver_of_its_severity_and_team(version: str) -> None:
    shipped = list(_shipped_alerts())
    wanted = [
        *shipped,
        *({**labels, "team": "search"} for labels in shipped[:2]),
        {"alertname": PLANNED_WORK, "severity": "none"},
    ]
    assert {labels["severity"] for labels in shipped} == {"critical", "warning"}
    for labels in wanted:
        command = [
            str(program("amtool", version)),
            "config",
            "routes",
            "test",
            f"--config.file={CONFIG}",
            f"--verify.receivers={_expected_receiver(labels)}",
            *(f"{name}={value}" for name, value in labels.items()),
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
        assert done.returncode == 0, f"{labels}: {done.stdout}{done.stderr}"


def test_what_holds_back_is_never_held_back_by_it() -> None:
    edges = {rule.cause: set(symptoms) for rule, symptoms in symptoms_by_rule().items()}
    for start in edges:
        reached: set[str] = set()
        todo = [start]
        while todo:
            for name in edges.get(todo.pop(), set()) - reached:
                reached.add(name)
                todo.append(name)
        assert start not in reached


# --- inhibition, by a running Alertmanager -----------------------------------------------------------------------


@pytest.fixture(scope="module", params=VERSIONS)
def running(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Alertmanager]:
    folder = tmp_path_factory.mktemp("inhibition")
    with inbox() as box, Alertmanager(folder, to_webhooks(shipped_config(), box.url), request.param) as server:
        yield server


def _held_back(server: Alertmanager, posted: list[Labels]) -> dict[str, list[str]]:
    """For each posted alert, by alertname and severity, the alertnames that hold it back."""
    server.post(posted)
    here = posted[0]["instance"]

    def settled() -> list[dict[str, Any]]:
        found = [one for one in server.alerts() if one["labels"]["instance"] == here]
        done = len(found) == len(posted) and all(one["status"]["state"] != "unprocessed" for one in found)
        return found if done else []

    wait_until(lambda: bool(settled()), 30, f"{len(posted)} alerts of {here} are processed")
    found = settled()
    names = {one["fingerprint"]: one["labels"]["alertname"] for one in found}
    return {
        f"{one['labels']['alertname']} {one['labels']['severity']}": sorted(
            names[source] for source in one["status"]["inhibitedBy"]
        )
        for one in found
    }


@pytest.mark.parametrize("rule", TABLE, ids=lambda rule: rule.cause)
def test_a_cause_holds_its_symptoms_back(running: Alertmanager, rule: Rule) -> None:
    symptoms = symptoms_by_rule()[rule]
    instance = f"engine-{rule.cause}:1"
    cause = _verdict(rule.cause, instance, engine="chat")
    for symptom in symptoms:
        where = f"{instance}{symptom}"
        alone = _verdict(symptom, where, engine="other")
        # Two engines would be two alerts of one name here; the other one has a severity of its own to be told apart.
        alone["severity"] = "warning"
        held = _held_back(running, [{**cause, "instance": where}, _verdict(symptom, where, engine="chat"), alone])
        assert held == {
            f"{cause['alertname']} critical": [],
            f"{alone['alertname']} critical": [cause["alertname"]],
            f"{alone['alertname']} warning": [],
        }


@pytest.mark.parametrize("about", ["gpu", "mig"])
@pytest.mark.parametrize("rule", [rule for rule in TABLE if rule.scope == "device"], ids=lambda rule: rule.cause)
def test_a_device_holds_back_what_is_about_it(running: Alertmanager, rule: Rule, about: str) -> None:
    instance = f"{about}-{rule.cause}:1"
    symptom = symptoms_by_rule()[rule][0]
    uuid = f"{about.upper()}-1"
    held = _held_back(
        running, [_verdict(rule.cause, instance, **{about: uuid}), _verdict(symptom, instance, **{about: uuid})]
    )
    assert held[f"{CATALOGUE[symptom].alert} critical"] == [CATALOGUE[rule.cause].alert]


def test_a_ticket_never_holds_a_page_back(running: Alertmanager) -> None:
    cause = _verdict("kv-block-leak", "ticket:1", "warning", engine="chat")
    held = _held_back(running, [cause, _verdict("kv-exhaustion", "ticket:1", engine="chat")])
    assert held == {"OomwatchKvBlockLeak warning": [], "OomwatchKvExhaustion critical": []}


def test_a_page_holds_the_ticket_of_its_incident_back(running: Alertmanager) -> None:
    both = [_verdict("kv-block-leak", "both:1", severity, engine="chat") for severity in ("critical", "warning")]
    assert _held_back(running, both) == {
        "OomwatchKvBlockLeak critical": [],
        "OomwatchKvBlockLeak warning": ["OomwatchKvBlockLeak"],
    }


def test_a_daemon_that_is_down_holds_its_own_health_back_and_no_page(running: Alertmanager) -> None:
    held = _held_back(
        running,
        [
            {**WHERE, "instance": "down:1", "alertname": "OomwatchDown", "severity": "critical", "killer": "health"},
            _verdict("source-stale", "down:1", "warning", engine="chat"),
            _verdict("engine-stuck", "down:1", engine="chat"),
        ],
    )
    assert held == {
        "OomwatchDown critical": [],
        "OomwatchSourceStale warning": ["OomwatchDown"],
        "OomwatchEngineStuck critical": [],
    }


@pytest.mark.parametrize("engine", ["chat", ""])
def test_planned_work_holds_an_engine_or_a_node_back(running: Alertmanager, engine: str) -> None:
    instance = f"planned-{engine}:1"
    work = {**WHERE, "instance": instance, "alertname": PLANNED_WORK, "severity": "none"}
    held = _held_back(
        running,
        [
            {**work, "engine": engine} if engine else work,
            _verdict("engine-stuck", instance, engine="chat"),
            _verdict("kv-exhaustion", instance, engine="other"),
        ],
    )
    assert held[f"{CATALOGUE['engine-stuck'].alert} critical"] == [PLANNED_WORK]
    assert held[f"{CATALOGUE['kv-exhaustion'].alert} critical"] == ([] if engine else [PLANNED_WORK])


# --- what people get -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", VERSIONS)
def test_each_kind_of_receiver_shows_evidence_first_action_and_links(version: str, tmp_path: Path) -> None:
    summary = "Engine chat on n1:9841: KV blocks are held that no request owns, about 6 h left"
    annotations = {
        "summary": summary,
        "description": "Numbers: floor blocks 2,000.\nFirst: Restart the engine at a quiet moment.",
        "runbook_url": "https://runbooks.example.org/OomwatchKvBlockLeak.md",
        "page": "http://n1:9841/",
        "dashboard": "https://grafana.example.org/d/oomwatch-engine",
    }
    everything = (annotations["runbook_url"], annotations["page"], "Numbers: floor blocks 2,000.", "First: Restart")
    with inbox() as box:
        for name, secret in (("pagerduty-routing-key", "k"), ("slack-url", f"{box.url}/slack"), ("opsgenie-key", "k")):
            (tmp_path / name).write_text(secret, encoding="utf-8")
        text = CONFIG.read_text(encoding="utf-8").replace("/etc/alertmanager/secrets", str(tmp_path))
        config = yaml.safe_load(text.replace("group_wait: 10s", "group_wait: 1s"))
        config["templates"] = [str(CONFIG.parent / "templates" / "*.tmpl")]
        config["global"] |= {"pagerduty_url": f"{box.url}/pagerduty", "opsgenie_api_url": f"{box.url}/opsgenie/"}
        with Alertmanager(tmp_path, config, version) as server:
            page = _verdict("kv-block-leak", "n1:9841", engine="chat")
            server.post([page, {**page, "team": "search", "engine": "batch"}], annotations)
            (slack,) = box.wait_for("/slack", 1)
            (pagerduty,) = box.wait_for("/pagerduty", 1)
            (opsgenie,) = box.wait_for("/opsgenie/v2/alerts", 1)
    attachment = slack["attachments"][0]
    assert attachment["title"] == f"CRITICAL: {summary} [gpu-east]"
    for part in (*everything, annotations["dashboard"]):
        assert part in attachment["text"] + attachment["title_link"]
    assert pagerduty["payload"]["summary"] == f"CRITICAL: {summary} [gpu-east]"
    assert pagerduty["client_url"] == annotations["page"]
    assert [link["href"] for link in pagerduty["links"]] == [annotations["runbook_url"]]
    for part in everything:
        assert part in pagerduty["payload"]["custom_details"]["what"]
        assert part in opsgenie["description"]
    assert opsgenie["message"] == f"CRITICAL: {summary} [gpu-east]"


@pytest.mark.parametrize("version", VERSIONS)
def test_mail_shows_evidence_and_links(version: str, tmp_path: Path) -> None:
    alert = {
        "status": "firing",
        "labels": {"alertname": "OomwatchKvBlockLeak", "severity": "critical"},
        "annotations": {"summary": "Engine <chat> leaks", "description": "First: restart", "page": "http://n1:9841/"},
        "startsAt": "2026-11-01T02:10:00Z",
        "endsAt": "0001-01-01T00:00:00Z",
    }
    data = tmp_path / "data.json"
    data.write_text(json.dumps({"status": "firing", "alerts": [alert]}), encoding="utf-8")
    command = [
        str(program("amtool", version)),
        "template",
        "render",
        f"--template.glob={CONFIG.parent / 'templates' / '*.tmpl'}",
        f"--template.data={data}",
        "--template.type=html",
        '--template.text={{ template "oomwatch.mail.html" . }}',
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stderr
    for part in ("Engine &lt;chat&gt; leaks", "First: restart", 'href="http://n1:9841/"', "2026-11-01 02:10:00 UTC"):
        assert part in done.stdout
