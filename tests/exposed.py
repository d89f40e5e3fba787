"""What a snapshot looks like on /metrics, for tests."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families

from oomwatch.exposition import ConfigStatus, SnapshotCollector, registry, render
from oomwatch.history import HistoryStatus
from oomwatch.notify import TargetStatus
from oomwatch.snapshot import Snapshot
from oomwatch.sources.nvml.calls import CallStats, FunctionStats
from tests.e2e.tools import require_tool

CONFIG = ConfigStatus(successful=True, loaded_at=1_789_990_000.0, sha256="5" * 64)
PROBE_FILES = {"told": 3, "silent": 1, "unreadable": 0, "stranger": 0, "left_over": 0}
CALLS: CallStats = {
    "nvmlDeviceGetMemoryInfo_v2": FunctionStats(calls=300, seconds=0.125, errors={"GPU_IS_LOST": 0, "TIMEOUT": 4})
}
HISTORY = HistoryStatus(
    enabled=True, size_bytes=4 << 20, oldest=1_789_900_000.0, last_write=1_789_999_990.0, write_seconds=0.004
)
NOTIFICATIONS = (TargetStatus("https://alertmanager.example.org", 12, 1, 0, 1_789_999_980.0),)
Series = tuple[str, frozenset[tuple[str, str]]]


def collector(snapshot: Snapshot, process_series: int = 32) -> SnapshotCollector:
    return SnapshotCollector(
        lambda: snapshot,
        process_series_per_gpu=lambda: process_series,
        config=lambda: CONFIG,
        nvml_calls=lambda: CALLS,
        probe_files=lambda: PROBE_FILES if snapshot.engines else {},
        history=lambda: HISTORY,
        notifications=lambda: NOTIFICATIONS,
    )


def everything(snapshot: Snapshot, process_series: int = 32) -> CollectorRegistry:
    """What the daemon serves, the client library's own families among it."""
    return registry(collector(snapshot, process_series))


def own_page(snapshot: Snapshot, process_series: int = 32) -> str:
    """The families of this package alone: what does not change from one process to the next."""
    own = CollectorRegistry()
    own.register(collector(snapshot, process_series))
    return render(own, "")[0].decode()


def samples(snapshot: Snapshot, process_series: int = 32) -> Mapping[Series, float]:
    """Every series on the page with its value."""
    families = text_string_to_metric_families(own_page(snapshot, process_series))
    return {(s.name, frozenset(s.labels.items())): s.value for family in families for s in family.samples}


def strictly_parsed(openmetrics_page: bytes) -> list[Metric]:
    """The families of an OpenMetrics page; a ValueError for whatever breaks its rules."""
    return list(parse_openmetrics(openmetrics_page.decode()))  # type: ignore[no-untyped-call]  # not annotated there


def values(page: Snapshot | Mapping[Series, float], name: str, /, **labels: str) -> list[float]:
    """The values of the series of that name that have these labels at least."""
    shown = samples(page) if isinstance(page, Snapshot) else page
    return [value for (series, own), value in shown.items() if series == name and labels.items() <= own]


def names(snapshot: Snapshot) -> set[str]:
    return {name for name, _ in samples(snapshot)}


def check_metrics(page: bytes) -> str:
    """What promtool finds wrong with a page; empty when nothing."""
    answer = subprocess.run(
        [require_tool("promtool"), "check", "metrics"], input=page, capture_output=True, timeout=30, check=False
    )
    findings = (answer.stdout + answer.stderr).decode().strip()
    return findings or ("" if answer.returncode == 0 else f"exit status {answer.returncode}")
