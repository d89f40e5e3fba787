"""The demo's stories in one Prometheus, made once for all tests of the dashboards."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.prometheus import PrometheusServer
from tests.grafana.seeded import seeded


@pytest.fixture(scope="session")
def stories(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrometheusServer]:
    """A Prometheus that holds every story up to `seeded.END`."""
    with seeded(tmp_path_factory.mktemp("stories")) as server:
        yield server
