"""The block that the dashboards' benchmark writes, as a real Prometheus reads it."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.e2e.prometheus import PrometheusServer, scrape_config

pytest.importorskip("numba", reason="the benchmarks' own packages are not installed")

from benchmarks.dashboards.block import PER_CHUNK, STEP_MS, Encoded, Labels, encode, write

BEGIN_MS = 1_789_920_000_000
MINUTES = 3 * PER_CHUNK
DRAW = random.Random(1)
COURSES: dict[str, list[float]] = {
    "constant": [7.0] * MINUTES,
    "zero": [0.0] * MINUTES,
    "counter": [float(3 * minute) for minute in range(MINUTES)],
    "noise": [DRAW.random() for _ in range(MINUTES)],
    "steps": [40e9 + 2**21 * (minute // 50) for minute in range(MINUTES)],
    "signs": [(-1.0) ** minute * 1e-300 for minute in range(MINUTES)],
}


def test_prometheus_reads_every_value_and_label_back(tmp_path: Path) -> None:
    series: dict[Labels, Encoded] = {
        (("__name__", name), ("instance", 'a "node"'), ("job", "ümlaut")): encode(values, BEGIN_MS)
        for name, values in COURSES.items()
    }
    write(tmp_path / "data", series, BEGIN_MS)
    with PrometheusServer(tmp_path, scrape_config({}), arguments=["--storage.tsdb.retention.time=100y"]) as server:
        begin, end = BEGIN_MS // 1000, BEGIN_MS // 1000 + 60 * (MINUTES - 1)
        for name, values in COURSES.items():
            (found,) = server.api("query_range", query=name, start=str(begin), end=str(end), step="60")["result"]
            assert found["metric"] == {"__name__": name, "instance": 'a "node"', "job": "ümlaut"}
            assert [float(value) for _, value in found["values"]] == values
            assert [at for at, _ in found["values"]] == list(range(begin, end + 1, STEP_MS // 1000))
        assert server.api("label/instance/values", start=str(begin), end=str(end)) == ['a "node"']
