"""When each source of the node is read."""

from __future__ import annotations

import pytest

from oomwatch.config import Config
from oomwatch.feed import NodeFeed
from oomwatch.snapshot import EMPTY


@pytest.mark.parametrize(
    ("gpu", "scrape", "clock"), [("5s", "10s", 5), ("60s", "10s", 10), ("60s", "300s", 15), ("15s", "15s", 15)]
)
def test_the_clock_keeps_pace_with_the_fastest_source_and_is_never_slow(gpu: str, scrape: str, clock: float) -> None:
    settings = {
        "intervals": {"gpu": gpu, "scrape": scrape},
        "nvml": {"enabled": False},
        "discovery": {"enabled": False},
    }
    feed = NodeFeed(Config.model_validate(settings), lambda _: None, lambda: EMPTY)
    try:
        assert feed.jobs()["clock"].seconds == clock
    finally:
        feed.close()
