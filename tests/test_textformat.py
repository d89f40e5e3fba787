"""The same bytes as the client library's, for everything that oomwatch ever exposes."""

from __future__ import annotations

import math

import pytest
from prometheus_client import CollectorRegistry, Metric
from prometheus_client import exposition as client_text
from prometheus_client.openmetrics import exposition as client_openmetrics
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from oomwatch import textformat
from oomwatch.snapshot import Snapshot
from tests.exposed import collector
from tests.snapshots import bare, crowded, full


class Fixed(Collector):
    """Always the same families."""

    def __init__(self, *families: Metric) -> None:
        self._families = families

    def collect(self) -> tuple[Metric, ...]:
        return self._families


def of(source: Collector) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(source)
    return registry


def one(value: float, label: str = "plain", help_text: str = "Help.", kind: str = "gauge") -> Fixed:
    family = Metric("oomwatch_some", help_text, kind)
    suffix = {"counter": "_total", "info": "_info"}.get(kind, "")
    family.samples = [Sample(f"oomwatch_some{suffix}", {"second": label, "first": "x"}, value)]
    return Fixed(family)


ODD_TEXTS = ["", '"', "\\", "\\n", "\n", "é 漢 🙂", '\\"\n', "a=b,c{}"]
ODD_NUMBERS = [0.0, 1, 1e6, 1234567.0, 0.1, 1e-9, -3.5, 2.0**70, 1.79e9 + 0.123, math.inf, -math.inf, math.nan]


def pages() -> list[Collector]:
    return [
        *(collector(snapshot) for snapshot in (Snapshot(0.0), bare(), full(), crowded(2, 40, 2))),
        *(one(1.0, label=text) for text in ODD_TEXTS),
        *(one(1.0, help_text=text) for text in ODD_TEXTS),
        *(one(number) for number in ODD_NUMBERS),
        *(one(1.0, kind=kind) for kind in ("counter", "info", "unknown", "stateset")),
        Fixed(Metric("oomwatch_empty_bytes", "No samples.", "gauge", "bytes")),
    ]


@pytest.mark.parametrize("source", pages())
def test_text(source: Collector) -> None:
    assert textformat.text(source.collect()) == client_text.generate_latest(of(source))


@pytest.mark.parametrize("source", pages())
def test_openmetrics(source: Collector) -> None:
    expected = client_openmetrics.generate_latest(of(source))  # type: ignore[no-untyped-call]  # not annotated there
    assert textformat.openmetrics(source.collect()) == expected
