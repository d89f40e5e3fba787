"""Direct mode: what holds is told once to real Alertmanagers and to webhooks, whatever is away in between."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import bcrypt
import pytest
import yaml
from click.testing import CliRunner

from oomwatch.alerts import alert_labels
from oomwatch.cli import main
from oomwatch.conclusions import incidents
from oomwatch.config import Config
from oomwatch.detectors.base import State, Subject
from oomwatch.notify import Ledger, Notifier, Place, alerts_of
from oomwatch.snapshot import EMPTY, Snapshot
from oomwatch.verdicts import Verdict
from tests.alerts.alertmanagers import Alertmanager, Inbox, inbox, shipped_config, to_webhooks
from tests.certificates import make_certificates
from tests.e2e.processes import wait_until
from tests.e2e.tools import VERSIONS
from tests.snapshots import NOW, gpu_uuid, judged, leaking, stuck, verdict

RULE_TESTS = Path(__file__).resolve().parents[1] / "alerts" / "tests" / "verdicts.yml"
DOCUMENT = RULE_TESTS.parents[2] / "docs" / "alerting.md"
PLACE = Place({"cluster": "gpu-east", "instance": "n1:9841", "job": "oomwatch"}, "http://n1:9841/")
ENGINE = Subject(engine="llama-8b")
RANK = Subject(engine="llama-8b", rank="0")


def node(*verdicts: Verdict, t: float = NOW) -> Snapshot:
    return Snapshot(t=t, verdicts=judged(*verdicts))


def eight_ranks(state: State = "page") -> tuple[Verdict, ...]:
    return tuple(leaking(Subject(engine="llama-8b", rank=str(rank)), state) for rank in range(8))


def severities(snapshot: Snapshot) -> list[str]:
    return [alert.severity for alert in alerts_of(snapshot, PLACE, NOW)]


# --- what holds ----------------------------------------------------------------------------------------------------


def test_eight_ranks_and_their_symptom_are_one_incident_in_both_severities() -> None:
    found = alerts_of(node(*eight_ranks(), stuck()), PLACE, NOW)
    assert [(alert.labels["alertname"], alert.severity) for alert in found] == [
        ("OomwatchKvBlockLeak", "critical"),
        ("OomwatchKvBlockLeak", "warning"),
    ]
    assert len({alert.group for alert in found}) == 1


def test_a_ticket_is_one_alert_and_a_hint_or_a_planned_silence_none() -> None:
    assert severities(node(leaking(RANK, "ticket"))) == ["warning"]
    assert severities(node(verdict("kv-tail-waste", "info", RANK))) == []
    assert severities(node(replace(leaking(RANK), silenced="driver update"))) == []
    assert severities(EMPTY) == []


def test_a_snapshot_that_stands_still_is_told() -> None:
    (alert,) = alerts_of(node(), PLACE, NOW + 301)
    assert (alert.labels["alertname"], alert.severity) == ("OomwatchSnapshotOld", "warning")
    assert alerts_of(node(), PLACE, NOW + 299) == ()


def test_an_alert_says_what_how_sure_how_long_and_what_first() -> None:
    alert = alerts_of(node(leaking(RANK)), replace(PLACE, runbooks="https://r", grafana="https://g"), NOW)[0]
    notes = alert.annotations
    assert notes["summary"].startswith("Engine llama-8b on n1:9841: KV blocks are held that no request owns, about ")
    for part in ("Sure: nearly certain (97%)", "Time left: ", "floor blocks 2,000", f"First: {notes['action']}"):
        assert part in notes["description"]
    assert notes["runbook_url"] == "https://r/OomwatchKvBlockLeak.md"
    assert notes["dashboard"] == "https://g/d/oomwatch-engine?var-instance=n1%3A9841&var-engine=llama-8b"
    assert notes["page"] == "http://n1:9841/"


@pytest.mark.parametrize(
    ("about", "dashboard"),
    [
        (Subject(gpu="GPU-1"), "oomwatch-gpu?var-instance=n1%3A9841&var-gpu=GPU-1"),
        (Subject(gpu="MIG-2"), "oomwatch-gpu?var-instance=n1%3A9841"),
        (Subject(), "oomwatch-self?var-instance=n1%3A9841"),
    ],
    ids=["gpu", "mig", "node"],
)
def test_the_dashboard_is_that_of_what_the_alert_is_about(about: Subject, dashboard: str) -> None:
    (alert,) = alerts_of(node(verdict("source-stale", "ticket", about)), replace(PLACE, grafana="https://g"), NOW)
    assert alert.annotations["dashboard"] == f"https://g/d/{dashboard}"


def test_labels_are_those_of_the_rules() -> None:
    """What promtool expects of the rules for a leak of the engine chat, by their own test."""
    expected = next(
        alert["exp_labels"]
        for case in yaml.safe_load(RULE_TESTS.read_text(encoding="utf-8"))["tests"]
        for check in case.get("alert_rule_test", ())
        if check["alertname"] == "OomwatchKvBlockLeak"
        for alert in check.get("exp_alerts", ())
        if alert["exp_labels"]["severity"] == "critical" and alert["exp_labels"].get("engine") == "chat"
    )
    (incident,) = incidents(judged(leaking(Subject(engine="chat", rank="0"))))
    where = {name: expected[name] for name in ("instance", "job", "cluster") if name in expected}
    assert alert_labels(incident, where) == {**expected, "alertname": "OomwatchKvBlockLeak"}


def test_of_two_that_explain_everything_the_cause_is_told() -> None:
    device = Subject(gpu=gpu_uuid(5))
    found = alerts_of(node(verdict("gpu-lost", "page", device), verdict("nvml-stuck", "ticket", device)), PLACE, NOW)
    assert {alert.labels["verdict"] for alert in found} == {"gpu-lost"}


def test_an_incident_that_pauses_for_less_than_it_is_kept_goes_on() -> None:
    now = [node(leaking(RANK))]
    ledger = Ledger(lambda: now[0], PLACE, keep=300)
    first = ledger.holding(NOW)
    now[0] = node(t=NOW + 299)
    assert ledger.holding(NOW + 299) == first
    later = replace(leaking(RANK), since=NOW + 300)
    now[0] = node(later, t=NOW + 300)
    assert [alert.since for alert in ledger.holding(NOW + 300).values()] == [alert.since for alert in first.values()]
    now[0] = node(t=NOW + 601)
    assert ledger.holding(NOW + 601) == {}


def test_the_place_is_this_host_unless_the_configuration_says_otherwise() -> None:
    config = Config.model_validate({"web": {"listen_address": ["127.0.0.1:7"]}})
    here = Place.of(config)
    assert re.fullmatch(r"http://.+:7/", here.page)
    assert here.labels == {"instance": here.page[7:-1], "job": "oomwatch"}
    labels = {"instance": "gpu-1:18666", "job": "", "cluster": "east"}
    told = Place.of(Config.model_validate({"alerting": {"labels": labels}}))
    (alert,) = alerts_of(node(leaking(RANK, "ticket")), told, NOW)
    assert (alert.labels["instance"], alert.labels["cluster"]) == ("gpu-1:18666", "east")
    assert "job" not in alert.labels


@pytest.mark.parametrize("name", ["alertname", "severity", "incident", "0x", "a-b"])
def test_labels_that_would_break_the_grouping_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="label"):
        Config.model_validate({"alerting": {"labels": {name: "x"}}})


# --- told to servers -------------------------------------------------------------------------------------------------


class Told:
    """A notifier whose snapshot the test sets."""

    def __init__(self, alerting: Mapping[str, Any]) -> None:
        self.verdicts: tuple[Verdict, ...] = ()
        self.notifier = Notifier(lambda: Snapshot(t=time.time(), verdicts=self.verdicts))
        labels = {"cluster": "gpu-east", "instance": "n1:9841"}
        settings = {"resend": 1, "keep_firing_for": 0, "labels": labels, **alerting}
        self.config = Config.model_validate({"alerting": settings})

    def shows(self, *verdicts: Verdict) -> None:
        self.verdicts = judged(*verdicts)


@contextmanager
def telling(alerting: Mapping[str, Any]) -> Iterator[Told]:
    told = Told(alerting)
    told.notifier.configure(told.config)
    try:
        yield told
    finally:
        told.notifier.stop()


def status_of(told: Told, condition: str) -> None:
    wait_until(lambda: all(eval(condition, {"s": s}) for s in told.notifier.status()), 20, condition)


@pytest.fixture(scope="module", params=VERSIONS)
def chain(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Alertmanager, Inbox]]:
    """An Alertmanager with the shipped routes and inhibition, and what its receivers got."""
    folder = tmp_path_factory.mktemp("alertmanager")
    with inbox() as box, Alertmanager(folder, to_webhooks(shipped_config(), box.url), request.param) as server:
        yield server, box


def firing(server: Alertmanager, instance: str) -> set[tuple[str, str]]:
    return {
        (one["labels"]["alertname"], one["labels"]["severity"])
        for one in server.alerts()
        if one["labels"]["instance"] == instance
    }


def pages(box: Inbox, instance: str, status: str) -> list[Any]:
    return [
        body for body in box.to("/page") if body["status"] == status and body["groupLabels"]["instance"] == instance
    ]


BOTH = {("OomwatchKvBlockLeak", "critical"), ("OomwatchKvBlockLeak", "warning")}


def test_eight_ranks_are_one_notification_that_outlives_its_end_and_a_restart(
    chain: tuple[Alertmanager, Inbox],
) -> None:
    server, box = chain
    here = {"cluster": "gpu-east", "instance": "story:1"}
    with telling({"alertmanagers": [{"url": server.url}], "labels": here}) as told:
        told.shows(*eight_ranks(), stuck())
        wait_until(lambda: len(pages(box, "story:1", "firing")) == 1, 30, "one page")
        begun = time.monotonic()
        server.stop()
        server.start()
        # Alertmanager forgets after four times resend what is not told again.
        wait_until(lambda: time.monotonic() - begun > 6 and firing(server, "story:1") == BOTH, 30, "still firing")
        assert len(pages(box, "story:1", "firing")) == 1
        told.shows()
        wait_until(lambda: len(pages(box, "story:1", "resolved")) == 1, 30, "one end")
        assert firing(server, "story:1") == set()
    assert len(pages(box, "story:1", "firing")) == 1
    tickets = [body for body in box.to("/ticket") if body["groupLabels"]["instance"] == "story:1"]
    assert tickets == [], "the page holds its ticket back"


def test_rules_and_direct_mode_together_are_one_alert(chain: tuple[Alertmanager, Inbox]) -> None:
    server, box = chain
    where = {"cluster": "gpu-east", "instance": "both:1", "job": "oomwatch"}
    (incident,) = incidents(judged(*eight_ranks()))
    by_rules = alert_labels(incident, where)
    with telling({"alertmanagers": [{"url": server.url}], "labels": where}) as told:
        told.shows(*eight_ranks())
        server.post([by_rules, {**by_rules, "severity": "warning"}])
        wait_until(lambda: bool(pages(box, "both:1", "firing")), 30, "a page")
        status_of(told, "s.sent >= 3")
        assert firing(server, "both:1") == BOTH
        assert len([one for one in server.alerts() if one["labels"]["instance"] == "both:1"]) == 2
        assert len(pages(box, "both:1", "firing")) == 1


def test_what_still_holds_is_told_once_alertmanager_is_there(tmp_path: Path) -> None:
    with inbox() as box:
        server = Alertmanager(tmp_path, to_webhooks(shipped_config(), box.url))
        with telling({"alertmanagers": [{"url": server.url}]}) as told:
            told.shows(leaking(RANK), verdict("concurrency-low", "ticket", Subject(engine="gone")))
            status_of(told, "s.failures > 0 and s.waiting == 3")
            told.shows(leaking(RANK))
            status_of(told, "s.waiting == 2")
            with server:
                status_of(told, "s.sent > 0 and s.waiting == 0 and s.last_success")
                assert firing(server, "n1:9841") == BOTH


def test_one_alertmanager_that_is_away_delays_no_other(tmp_path: Path) -> None:
    with inbox() as box, Alertmanager(tmp_path, to_webhooks(shipped_config(), box.url)) as server:
        away = {"url": "http://127.0.0.1:1"}
        with telling({"alertmanagers": [away, {"url": server.url}]}) as told:
            told.shows(leaking(RANK))
            wait_until(lambda: firing(server, "n1:9841") == BOTH, 20, "told to the one that is there")
            wait_until(lambda: told.notifier.status()[0].failures > 0, 20, "the other one failed")
            assert [status.name for status in told.notifier.status()] == ["http://127.0.0.1:1", server.url]


def test_tls_and_a_password(tmp_path: Path) -> None:
    certificates = make_certificates(tmp_path / "tls")
    (tmp_path / "password").write_text("correct horse\n", encoding="utf-8")
    (tmp_path / "wrong").write_text("battery\n", encoding="utf-8")
    hashed = bcrypt.hashpw(b"correct horse", bcrypt.gensalt(4)).decode()
    web = tmp_path / "web.yml"
    tls = {"cert_file": str(certificates.server), "key_file": str(certificates.server_key)}
    web.write_text(yaml.safe_dump({"tls_server_config": tls, "basic_auth_users": {"me": hashed}}), encoding="utf-8")
    with inbox() as box, _SecretAlertmanager(tmp_path, to_webhooks(shipped_config(), box.url), web=web) as server:
        url = f"https://127.0.0.1:{server.port}"
        trust = {"ca_file": str(certificates.ca)}
        for password, tls_settings, accepted in (
            ("password", trust, True),
            ("wrong", trust, False),
            ("password", {}, False),
        ):
            basic = {"username": "me", "password_file": str(tmp_path / password)}
            with telling({"alertmanagers": [{"url": url, "basic_auth": basic, "tls": tls_settings}]}) as told:
                told.shows(leaking(RANK))
                status_of(told, "s.sent > 0" if accepted else "s.failures > 0")


class _SecretAlertmanager(Alertmanager):
    """Ready once it answers at all: 401 without credentials."""

    def _ready_or_ended(self) -> bool:
        import socket

        if self.exit_status() is not None:
            return True
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0


# --- webhooks --------------------------------------------------------------------------------------------------------


def test_a_webhook_gets_each_change_once() -> None:
    with inbox() as box, telling({"webhooks": [{"url": f"{box.url}/hook?token=x"}]}) as told:
        told.shows(*eight_ranks("ticket"))
        box.wait_for("/hook?token=x", 1)
        told.shows(*eight_ranks("page"))
        box.wait_for("/hook?token=x", 2)
        told.shows()
        bodies = box.wait_for("/hook?token=x", 3)
        assert [(body["status"], body["severity"]) for body in bodies] == [
            ("firing", "warning"),
            ("firing", "critical"),
            ("resolved", "critical"),
        ]
        assert {body["key"] for body in bodies} == {"n1:9841/llama-8b/kv-block-leak"}
        assert len(bodies[1]["verdicts"]) == 8
        documented = re.findall(
            r"^\| `(\w+)` \|", DOCUMENT.read_text(encoding="utf-8").partition("| Key ")[2], re.MULTILINE
        )
        assert documented == list(bodies[1])
        assert bodies[0]["ends_at"] is None
        assert bodies[2]["ends_at"] > bodies[2]["starts_at"]
        assert "token" not in told.notifier.status()[0].name


def test_a_webhook_that_refuses_is_told_later_what_still_holds(tmp_path: Path) -> None:
    with inbox() as box:
        (tmp_path / "url").write_text(f"{box.url}/secret\n", encoding="utf-8")
        box.status = 503
        with telling({"webhooks": [{"url_file": str(tmp_path / "url")}]}) as told:
            told.shows(leaking(RANK), verdict("concurrency-low", "ticket", Subject(engine="gone")))
            status_of(told, "s.failures > 0 and s.waiting == 2")
            told.shows(leaking(RANK))
            box.status = 204
            box.wait_for("/secret", 1)
            status_of(told, "s.sent == 1 and s.waiting == 0")
    assert [body["labels"]["verdict"] for body in box.to("/secret")] == ["kv-block-leak"]


def test_other_settings_tell_the_same_alerts_on() -> None:
    with inbox() as box, telling({"webhooks": [{"url": f"{box.url}/one"}]}) as told:
        told.shows(leaking(RANK))
        box.wait_for("/one", 1)
        alerting = told.config.alerting.model_copy(
            update={"webhooks": (told.config.alerting.webhooks[0].model_copy(update={"url": f"{box.url}/two"}),)}
        )
        told.notifier.configure(told.config)
        told.notifier.configure(told.config.model_copy(update={"alerting": alerting}))
        box.wait_for("/two", 1)
    assert len(box.to("/one")) == 1


# --- the command -----------------------------------------------------------------------------------------------------


def run_test(tmp_path: Path, alerting: Mapping[str, Any], *flags: str) -> tuple[int, str]:
    path = tmp_path / "oomwatch.yaml"
    path.write_text(yaml.safe_dump({"alerting": dict(alerting)}), encoding="utf-8")
    done = CliRunner().invoke(main, ["alerts", "test", f"--config.file={path}", *flags])
    return done.exit_code, done.output


def test_the_command_sends_a_marked_test_through_the_chain(tmp_path: Path, chain: tuple[Alertmanager, Inbox]) -> None:
    server, box = chain
    alerting = {
        "alertmanagers": [{"url": server.url}],
        "webhooks": [{"url": f"{box.url}/hook"}],
        "labels": {"cluster": "test", "instance": "test:1"},
    }
    code, output = run_test(tmp_path, alerting, "--severity=critical")
    assert (code, output.splitlines()[0]) == (0, f"{server.url}: accepted, for the receiver page")
    wait_until(
        lambda: any(b["groupLabels"].get("alertname") == "OomwatchTest" for b in box.to("/page")), 30, "the test"
    )
    (body,) = box.wait_for("/hook", 1)[-1:]
    assert body["test"] is True
    assert body["annotations"]["summary"].startswith("TEST of the alerts of oomwatch on test:1")


def test_the_command_says_who_did_not_accept(tmp_path: Path) -> None:
    code, output = run_test(tmp_path, {"alertmanagers": [{"url": "http://127.0.0.1:1"}]})
    assert code == 1
    assert output == "http://127.0.0.1:1: not accepted: connection refused: nothing listens there\n"
    assert run_test(tmp_path, {})[0] == 2
