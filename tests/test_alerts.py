"""An incident's labels as an alert: stable, and about an engine, a device, a slice or the node."""

from __future__ import annotations

from oomwatch.alerts import alert_labels
from oomwatch.conclusions import Incident
from oomwatch.detectors.base import State, Subject
from tests.snapshots import verdict

WHERE = {"cluster": "east", "instance": "n1:9841"}


def labels(incident: str, state: State = "ticket", subject: Subject | None = None) -> dict[str, str]:
    cause = verdict("source-stale", state, subject or Subject())
    return alert_labels(Incident(incident, (cause,), ()), WHERE)


def test_an_engines_incident() -> None:
    assert labels("chat/3", subject=Subject(engine="chat", rank="1")) == {
        "alertname": "OomwatchSourceStale",
        "cluster": "east",
        "engine": "chat",
        "incident": "chat/source-stale",
        "instance": "n1:9841",
        "killer": "health",
        "severity": "warning",
        "verdict": "source-stale",
    }


def test_a_device_of_one_engine_is_the_engines() -> None:
    assert labels("chat/3", subject=Subject(gpu="GPU-1"))["engine"] == "chat"
    assert "gpu" not in labels("chat/3", subject=Subject(gpu="GPU-1"))


def test_a_device_a_slice_and_the_node_have_no_engine() -> None:
    for owner, about in (("GPU-1", {"gpu": "GPU-1"}), ("MIG-2", {"mig": "MIG-2"}), ("node", {})):
        found = labels(f"{owner}/1")
        assert {name: found[name] for name in ("engine", "gpu", "mig") if name in found} == about
        assert found["incident"] == f"{owner}/source-stale"


def test_another_number_of_the_same_trouble_is_the_same_alert() -> None:
    assert labels("chat/3") == labels("chat/1")


def test_an_engine_with_a_slash_in_its_name() -> None:
    assert labels("org/chat/12")["engine"] == "org/chat"


def test_the_severity_is_that_of_the_worst_verdict_that_is_not_silenced() -> None:
    assert labels("chat/1", "page")["severity"] == "critical"
