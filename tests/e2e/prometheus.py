"""A real Prometheus server for a test: its own port, its own storage, gone afterwards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import requests
import yaml

from tests.e2e.processes import ServerProcess, free_port, wait_for
from tests.e2e.tools import program

START_TIMEOUT_S = 60.0


class PrometheusError(RuntimeError):
    """Prometheus refused a request; the message is Prometheus' own."""


@dataclass(frozen=True)
class Series:
    """One result of an instant query: the labels (`__name__` included where there is one) and the value."""

    labels: Mapping[str, str]
    value: float


def scrape_config(
    jobs: Mapping[str, Sequence[str]], *, interval_s: float = 1.0, rule_files: Sequence[Path] = ()
) -> dict[str, object]:
    """A configuration: each job's "host:port" targets are scraped, and the rules run, every `interval_s` seconds."""
    interval = f"{round(interval_s * 1000)}ms"
    return {
        "global": {"scrape_interval": interval, "scrape_timeout": interval, "evaluation_interval": interval},
        "rule_files": [str(path.absolute()) for path in rule_files],
        "scrape_configs": [
            {"job_name": job, "static_configs": [{"targets": list(targets)}]} for job, targets in jobs.items()
        ],
    }


class PrometheusServer(ServerProcess):
    """Runs Prometheus with `config` (see `scrape_config`); configuration, storage and log lie in `folder`."""

    def __init__(
        self,
        folder: Path,
        config: Mapping[str, object],
        *,
        version: str = "installed",
        arguments: Sequence[str] = (),
    ) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        config_path = folder / "prometheus.yml"
        config_path.write_text(yaml.safe_dump(dict(config), sort_keys=False), encoding="utf-8")
        super().__init__(
            [
                program("prometheus", version),
                f"--config.file={config_path}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
                "--log.level=warn",
                *arguments,
            ],
            log_path=folder / "prometheus.log",
            ready_url=f"{self.url}/-/ready",
            start_timeout_s=START_TIMEOUT_S,
        )

    def query(self, expression: str) -> list[Series]:
        """The instant vector (or the one scalar) that the expression gives now; PrometheusError on bad PromQL."""
        data = self.api("query", query=expression)
        if data["resultType"] == "scalar":
            return [Series({}, float(data["result"][1]))]
        return [Series(entry["metric"], float(entry["value"][1])) for entry in data["result"]]

    def wait_for(self, expression: str, timeout_s: float = 30.0) -> list[Series]:
        """The result of the expression as soon as it is not empty; raises TimeoutError when it stays empty."""
        return wait_for(lambda: self.query(expression), bool, timeout_s, f"{expression} has a result", interval_s=0.25)

    def api(self, path: str, timeout_s: float = 10.0, /, **parameters: str) -> Any:
        """The `data` of GET /api/v1/<path>: "alerts", "rules", "targets", "query_range" and so on."""
        answer = requests.get(f"{self.url}/api/v1/{path}", params=parameters, timeout=timeout_s)
        body = answer.json()
        if body["status"] != "success":
            raise PrometheusError(f"{body['errorType']}: {body['error']} (asked {path} {parameters})")
        return body["data"]
