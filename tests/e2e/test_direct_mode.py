"""Without Prometheus: the daemon itself tells a real Alertmanager of what happens on its (simulated) node."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.alerts.alertmanagers import Alertmanager, inbox, shipped_config, to_webhooks
from tests.e2e.daemon import OomwatchDaemon, Page

STORY_TIMEOUT_S = 90.0


def accepted(page: Page, target: str) -> bool:
    return bool(page.value("oomwatch_notifications_total", target=target))


def test_a_lost_gpu_is_one_page_and_a_reload_adds_a_webhook(tmp_path: Path) -> None:
    with inbox() as box, Alertmanager(tmp_path, to_webhooks(shipped_config(), box.url)) as alertmanager:
        alerting: dict[str, Any] = {
            "alertmanagers": [{"url": alertmanager.url}],
            "labels": {"cluster": "demo", "instance": "n1:1"},
            "resend": "2s",
        }
        daemon = OomwatchDaemon(
            tmp_path,
            {"alerting": alerting},
            command=("demo",),
            arguments=("--story", "lost", "--speed", "3", "--interval", "1"),
        )
        with daemon:
            (page,) = box.wait_for("/page", 1, STORY_TIMEOUT_S)
            assert page["groupLabels"]["instance"] == "n1:1"
            assert [alert["labels"]["alertname"] for alert in page["alerts"]] == ["OomwatchGpuLost"]
            assert page["alerts"][0]["annotations"]["action"].startswith("Drain the node")
            shown = daemon.wait_for(lambda page: accepted(page, alertmanager.url), "the posts are counted")
            assert shown.value("oomwatch_notification_failures_total", target=alertmanager.url) == 0
            hook = {"url": f"{box.url}/hook"}
            daemon.write_config({"alerting": {**alerting, "webhooks": [hook]}})
            assert daemon.post("/-/reload").ok
            (told,) = box.wait_for("/hook", 1)
            assert told["labels"]["alertname"] == "OomwatchGpuLost"
        assert len(box.to("/page")) == 1
        assert box.to("/ticket") == []
