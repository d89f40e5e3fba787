"""The way of an alert to a person: Prometheus with the shipped rules, Alertmanager with the shipped configuration.

Both are shipped to wait for minutes; here they wait for seconds.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import yaml

from oomwatch.settings import parse_duration
from tests.alerts.alertmanagers import Alertmanager, inbox, shipped_config, to_webhooks
from tests.documents import REPOSITORY
from tests.e2e.processes import wait_until
from tests.e2e.prometheus import PrometheusServer, scrape_config

RULES = REPOSITORY / "alerts" / "rules"
CLUSTER = "demo"
SHORTENED = {"interval": 15, "for": 15, "keep_firing_for": 10}
"""By what factor the durations of rules are; what is kept has to outlast the restart of a daemon on a busy machine."""

WAIT = "1s"
"""Of Alertmanager, for a group and between two notifications of it."""

RESEND_S = 10
"""Each alert is told Alertmanager anew so often, which forgets it after four times as long."""


LOOKBACK_S = 20
"""A series that ends while Prometheus restarts is not marked as ended: its alert goes on so long (5 min by default)."""


@dataclass(frozen=True)
class Notification:
    """What a receiver got. ``t`` is when it arrived, unix time; ``alerts`` are the names of those in it."""

    t: float
    receiver: str
    status: str
    labels: Mapping[str, str]
    alerts: tuple[str, ...]

    @classmethod
    def of(cls, t: float, path: str, body: Mapping[str, Any]) -> Notification:
        names = tuple(alert["labels"]["alertname"] for alert in body["alerts"])
        return cls(t, path.strip("/"), body["status"], {**body["groupLabels"], **body["commonLabels"]}, names)


class AlertChain:
    """One Alertmanager whose receivers all lead here, and behind ``scrape`` one Prometheus that sends to it."""

    def __init__(self, folder: Path, version: str) -> None:
        self._folder = folder
        self._version = version
        self._running = contextlib.ExitStack()
        self.inbox = self._running.enter_context(inbox())
        config = to_webhooks(shipped_config(), self.inbox.url, wait=WAIT)
        self.patient = version == "newest"
        """Whether Alertmanager waits after its own restart until it was told all again, which 0.25 cannot."""
        arguments = [f"--dispatch.start-delay={RESEND_S + 2}s"] if self.patient else []
        self.alertmanager = Alertmanager(folder, config, version, arguments=arguments)
        self.prometheus: PrometheusServer | None = None

    def __enter__(self) -> AlertChain:
        self._running.enter_context(self.alertmanager)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._running.close()

    def scrape(self, targets: Mapping[str, str]) -> PrometheusServer:
        """Start a Prometheus that scrapes each "host:port" under the name of an instance, every second."""
        rules = [shortened(path, self._folder) for path in sorted(RULES.glob("oomwatch-*.yml"))]
        static = [
            {"targets": [address], "labels": {"cluster": CLUSTER, "instance": instance}}
            for instance, address in targets.items()
        ]
        alertmanagers = [{"static_configs": [{"targets": [f"127.0.0.1:{self.alertmanager.port}"]}]}]
        config = {
            **scrape_config({}, rule_files=rules),
            "scrape_configs": [{"job_name": "oomwatch", "static_configs": static}],
            "alerting": {"alertmanagers": alertmanagers},
        }
        arguments = [f"--rules.alert.resend-delay={RESEND_S}s", f"--query.lookback-delta={LOOKBACK_S}s"]
        server = PrometheusServer(self._folder, config, version=self._version, arguments=arguments)
        self.prometheus = self._running.enter_context(server)
        return server

    def notifications(self, instance: str) -> list[Notification]:
        """Everything that anybody was told of an instance, in order."""
        told = [
            Notification.of(t, path, body)
            for t, (path, body) in zip(self.inbox.times, self.inbox.received, strict=False)
        ]
        return [one for one in told if one.labels.get("instance", instance) == instance]

    def wait_for(self, instance: str, receiver: str, status: str = "firing", timeout_s: float = 120.0) -> None:
        """Until a receiver was told something about an instance."""
        wait_until(
            lambda: any((one.receiver, one.status) == (receiver, status) for one in self.notifications(instance)),
            timeout_s,
            f"{receiver} is told of something {status} on {instance} ({self._version})",
        )

    def wait_until_known(self, alert: str, instance: str, timeout_s: float = 60.0) -> None:
        """Until Alertmanager holds an alert as active, which it does not after its own restart until it is told."""

        def known() -> bool:
            found = [one["labels"] for one in self.alertmanager.alerts()]
            return any((one["alertname"], one.get("instance")) == (alert, instance) for one in found)

        wait_until(known, timeout_s, f"Alertmanager ({self._version}) knows {alert} of {instance}")


def shortened(path: Path, folder: Path) -> Path:
    """A copy of a file of rules that waits for seconds; what expressions look back over stays."""
    document = yaml.safe_load(path.read_text(encoding="utf-8"))
    for group in document["groups"]:
        for entry in (group, *group["rules"]):
            for key in SHORTENED.keys() & entry.keys():
                entry[key] = f"{round(parse_duration(entry[key]) * 1000 / SHORTENED[key])}ms"
    copy = folder / path.name
    copy.write_text(yaml.safe_dump(document, sort_keys=False), encoding="utf-8")
    return copy
