"""When each source of the node is read."""

from __future__ import annotations

import pytest

from oomwatch.config import Config
from oomwatch.feed import NodeFeed
from oomwatch.observations import EngineFacts, EngineUpdate, Observation, TargetRemoved
from oomwatch.snapshot import EMPTY, EngineView, Snapshot


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


def test_engines_from_before_a_restart_that_are_not_found_any_more_have_ended() -> None:
    """A restored history knows engines that ended, or left the configuration, while nobody was watching."""
    before = tuple(
        EngineView(EngineFacts(name, origin=origin), state, "", None)
        for name, origin, state in (
            ("found-once", "discovery", "unknown"),
            ("named-once", "configuration", "unknown"),
            ("ended-long-ago", "discovery", "gone"),
            ("chat", "configuration", "unknown"),
        )
    )
    published: list[Observation] = []
    settings = {
        "engines": [{"name": "chat", "url": "http://127.0.0.1:1"}],
        "nvml": {"enabled": False},
        "discovery": {"enabled": False},
    }
    feed = NodeFeed(
        Config.model_validate(settings), published.append, lambda: Snapshot(t=1.0, engines=before), clock=lambda: 9.0
    )
    published.clear()
    feed.find_engines()
    feed.close()
    assert published == [
        EngineUpdate(9.0, before[0].facts, gone=True),
        TargetRemoved(9.0, "vllm", "named-once"),
    ]
