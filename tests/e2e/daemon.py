"""The daemon under test as its users run it: a process of its own, asked through its pages and signals."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import requests
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.processes import ServerProcess, free_port, wait_for

START_TIMEOUT_S = 30.0


def intervals(each: str) -> dict[str, str]:
    """The same one for everything that the daemon looks at, as its configuration has it."""
    return dict.fromkeys(("gpu", "processes", "scrape", "host", "discovery"), each)


@dataclass(frozen=True)
class Page:
    """A page of the daemon's metrics: series to value, the labels in the order of their names."""

    text: str

    def series(self, name: str, **labels: str) -> dict[tuple[tuple[str, str], ...], float]:
        """The samples of ``name`` whose labels include ``labels``."""
        return {
            tuple(sorted(sample.labels.items())): sample.value
            for family in text_string_to_metric_families(self.text)
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        }

    def value(self, name: str, **labels: str) -> float | None:
        """The only sample of ``name`` with these labels; None where there is none."""
        found = self.series(name, **labels)
        assert len(found) <= 1, f"{name} {labels}: {found}"
        return next(iter(found.values()), None)

    def identities(self) -> set[tuple[str, tuple[tuple[str, str], ...]]]:
        """Name and labels of every sample."""
        return {
            (sample.name, tuple(sorted(sample.labels.items())))
            for family in text_string_to_metric_families(self.text)
            for sample in family.samples
        }


class OomwatchDaemon(ServerProcess):
    """``oomwatch run`` (or ``demo``) on a free port of 127.0.0.1, with a configuration given as plain data."""

    def __init__(
        self,
        folder: Path,
        config: Mapping[str, object] | None = None,
        *,
        command: Sequence[str] = ("run",),
        arguments: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.port = free_port()
        self.config_path = folder / "oomwatch.yml"
        self.write_config(config or {})
        super().__init__(
            [
                *(sys.executable, "-m", "oomwatch.cli", *command),
                *("--config.file", self.config_path),
                *("--web.listen-address", f"127.0.0.1:{self.port}", "--web.enable-lifecycle"),
                *arguments,
            ],
            log_path=folder / "oomwatch.log",
            ready_url=f"{self.url}/-/ready",
            start_timeout_s=START_TIMEOUT_S,
            environment={**os.environ, "STATE_DIRECTORY": str(folder / "state"), **(environment or {})},
        )

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def write_config(self, config: Mapping[str, object]) -> None:
        self.config_path.write_text(yaml.safe_dump(dict(config)), encoding="utf-8")

    def page(self) -> Page:
        answer = requests.get(f"{self.url}/metrics", timeout=10)
        answer.raise_for_status()
        return Page(answer.text)

    def status(self) -> dict[str, Any]:
        answer = requests.get(f"{self.url}/api/v1/status", timeout=10)
        answer.raise_for_status()
        plain: dict[str, Any] = answer.json()
        return plain

    def verdict(self, name: str, **subject: str) -> dict[str, Any]:
        """The only verdict ``name`` about ``subject`` or more; its state is "none yet" before there is one."""
        found: list[dict[str, Any]] = [
            one
            for one in self.status()["verdicts"]
            if one["verdict"] == name and subject.items() <= one["subject"].items()
        ]
        assert len(found) <= 1, f"{name} {subject}: {found}"
        return found[0] if found else {"state": "none yet"}

    def post(self, path: str) -> requests.Response:
        return requests.post(f"{self.url}{path}", timeout=30)

    def wait_for(self, condition: Callable[[Page], bool], what: str, timeout_s: float = 20.0) -> Page:
        """The first page that meets ``condition``."""
        return wait_for(self.page, condition, timeout_s, what)
