"""When each source of the node is read."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from oomwatch.config import Config
from oomwatch.feed import NodeFeed
from oomwatch.observations import (
    EngineFacts,
    EngineScrape,
    EngineUpdate,
    LogLine,
    Observation,
    SourceRun,
    TargetRemoved,
)
from oomwatch.snapshot import EMPTY, EngineView, Snapshot, SourceView
from oomwatch.sources.discovery import Discovery
from oomwatch.sources.vllm.probe import EngineProbe
from tests.e2e.processes import wait_until


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


def test_engines_that_cannot_be_looked_for_have_not_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host without descriptors to spare, for one, says nothing of who lives."""
    published: list[Observation] = []
    feed = NodeFeed(Config.model_validate({"nvml": {"enabled": False}}), published.append, lambda: EMPTY)
    found = EngineFacts("chat", target="http://127.0.0.1:1/metrics", origin="discovery")
    with monkeypatch.context() as looking:
        looking.setattr(Discovery, "find", lambda _: (found,))
        feed.find_engines()
    published.clear()

    def cannot(_: Discovery) -> tuple[EngineFacts, ...]:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(Discovery, "find", cannot)
    feed.find_engines()
    assert [(type(one), one.source, one.ok) for one in published if isinstance(one, SourceRun)] == [
        (SourceRun, "discovery", False)
    ]
    assert len(published) == 1
    assert feed.engine_names() == ("chat",)
    feed.close()


def test_an_engine_whose_process_ends_is_gone_before_the_next_look(monkeypatch: pytest.MonkeyPatch) -> None:
    published: list[Observation] = []
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        facts = EngineFacts("chat", target="http://127.0.0.1:1/metrics", origin="discovery", pids=(process.pid,))
        monkeypatch.setattr(Discovery, "find", lambda _: () if process.poll() is not None else (facts,))
        feed = NodeFeed(Config.model_validate({"nvml": {"enabled": False}}), published.append, lambda: EMPTY)
        feed.find_engines()
        process.kill()
        wait_until(lambda: feed.engine_names() == (), 5, "it is watched no more")
        feed.close()
    assert [one.facts.name for one in published if isinstance(one, EngineUpdate) and one.gone] == ["chat"]


def test_an_engine_that_is_configured_is_asked_at_once_when_its_process_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    published: list[Observation] = []
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        facts = EngineFacts("found", target="http://127.0.0.1:1/metrics", origin="discovery", pids=(process.pid,))
        monkeypatch.setattr(Discovery, "find", lambda _: () if process.poll() is not None else (facts,))
        settings = {"engines": [{"name": "chat", "url": "http://127.0.0.1:1"}], "nvml": {"enabled": False}}
        feed = NodeFeed(Config.model_validate(settings), published.append, lambda: EMPTY)
        feed.find_engines()
        process.kill()
        wait_until(lambda: any(isinstance(one, EngineScrape) for one in published), 5, "its page is asked")
        feed.close()
    (scrape,) = (one for one in published if isinstance(one, EngineScrape))
    assert (scrape.engine, scrape.answered) == ("chat", False)


def test_a_job_asks_the_engine_as_it_is_configured_now() -> None:
    """The job outlives a reload that leaves its interval as it was."""

    def configured(model: str) -> Config:
        probe = {"model": model, "interval": "60s"}
        engine = {"name": "chat", "url": "http://127.0.0.1:1", "probe": probe}
        return Config.model_validate({"engines": [engine], "nvml": {"enabled": False}, "discovery": {"enabled": False}})

    feed = NodeFeed(configured("old"), lambda _: None, lambda: EMPTY)
    asked: list[bytes] = []
    ask = feed.jobs()["probe chat"].action
    feed.configure(configured("new"))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(EngineProbe, "probe", lambda probe: asked.append(probe._body))
        ask()
    feed.close()
    assert [b'"model": "new"' in body for body in asked] == [True]


def test_what_a_new_configuration_has_nobody_read_any_more_is_no_source_that_fell_silent(tmp_path: Path) -> None:
    chat = {"name": "chat", "url": "http://127.0.0.1:1"}
    quiet = {"nvml": {"enabled": False}, "discovery": {"enabled": False}}
    told = (
        SourceView("nvml", "", True),
        SourceView("nvml", "GPU-1", True),
        SourceView("discovery", "", True),
        SourceView("host", "", True),
        SourceView("vllm", "chat", True),
        SourceView("log", "chat", True),
        SourceView("probe", "chat", True),
        SourceView("allocator", "/run/oomwatch", True),
    )
    published: list[Observation] = []
    read = {"log": {"file": str(tmp_path / "vllm.log")}, "probe": {"model": "m"}}
    before = Config.model_validate({"engines": [{**chat, **read}], "nvml": {"enabled": False}})
    feed = NodeFeed(before, published.append, lambda: Snapshot(t=1.0, sources=told), clock=lambda: 9.0)
    published.clear()
    feed.configure(before)
    assert {(one.source, one.target) for one in removed(published)} == {("nvml", ""), ("nvml", "GPU-1")}
    published.clear()
    after = {"engines": [chat], "engine_logs": {"enabled": False}, "probe": {"directory": [str(tmp_path)]}, **quiet}
    feed.configure(Config.model_validate(after))
    feed.close()
    assert {(one.source, one.target) for one in removed(published)} == {
        (one.source, one.target) for one in told if one.source not in ("host", "vllm")
    }


def removed(published: Sequence[Observation]) -> list[TargetRemoved]:
    return [one for one in published if isinstance(one, TargetRemoved)]


@pytest.mark.parametrize(
    ("log", "told"),
    [({}, set()), ({"log": {"file": "/nonexistent/vllm.log"}}, {False})],
    ids=["not-known", "configured"],
)
def test_a_log_that_nobody_knows_of_is_no_source_and_one_that_is_configured_fails(
    log: dict[str, object], told: set[bool]
) -> None:
    settings = {
        "engines": [{"name": "chat", "url": "http://127.0.0.1:1", **log}],
        "nvml": {"enabled": False},
        "discovery": {"enabled": False},
    }
    published: list[Observation] = []
    feed = NodeFeed(Config.model_validate(settings), published.append, lambda: EMPTY)
    feed.read_log("chat")
    feed.close()
    assert {one.ok for one in published if isinstance(one, SourceRun) and one.source == "log"} == told


WRITES = "import sys; print('ERROR 11-30 09:00:00 [x.py:1] EngineCore failed to start.', flush=True); sys.stdin.read()"


@contextmanager
def writing_to(log: Path) -> Iterator[int]:
    """A process whose output goes to a file, after it has written a line."""
    with log.open("a") as output:
        size = log.stat().st_size
        process = subprocess.Popen([sys.executable, "-c", WRITES], stdin=subprocess.PIPE, stdout=output, stderr=output)
    try:
        wait_until(lambda: log.stat().st_size > size, 20, "its line is written", interval_s=0.01)
        yield process.pid
    finally:
        process.communicate(b"", timeout=10)


def test_the_log_of_an_engine_is_found_by_its_processes_and_followed_through_its_next_start(tmp_path: Path) -> None:
    published: list[Observation] = []

    def config(pid: int, enabled: bool = True) -> Config:
        return Config.model_validate(
            {
                "engines": [{"name": "chat", "url": "http://127.0.0.1:1", "pids": [pid]}],
                "engine_logs": {"enabled": enabled},
                "nvml": {"enabled": False},
                "discovery": {"enabled": False},
            }
        )

    def told() -> int:
        published.clear()
        feed.read_log("chat")
        return sum(isinstance(one, LogLine) for one in published)

    log = tmp_path / "vllm.log"
    with writing_to(log) as first:
        feed = NodeFeed(config(first), published.append, lambda: EMPTY)
        assert "log chat" in feed.jobs()
        assert told() == 1
    with writing_to(log) as second:
        feed.configure(config(second))
        assert told() == 1  # the same file goes on: nothing is told twice
    feed.configure(config(second, enabled=False))
    assert "log chat" not in feed.jobs()
    feed.close()


@pytest.mark.parametrize(
    "change",
    [{"url": "http://127.0.0.1:2"}, {"probe": {"model": "m"}}, {"log_text": True}],
    ids=["address", "probe", "text-is-kept"],
)
def test_a_log_is_followed_through_changes_of_everything_else(tmp_path: Path, change: dict[str, Any]) -> None:
    published: list[Observation] = []
    log = tmp_path / "vllm.log"
    line = "ERROR 11-30 09:00:00 [x.py:1] EngineCore failed to start.\n"
    log.write_text(line)

    def config(url: str = "http://127.0.0.1:1", log_text: bool = False, **engine: object) -> Config:
        return Config.model_validate(
            {
                "engines": [{"name": "chat", "url": url, "log": {"file": str(log)}, **engine}],
                "history": {"log_text": log_text},
                "nvml": {"enabled": False},
                "discovery": {"enabled": False},
            }
        )

    def told() -> list[LogLine]:
        published.clear()
        feed.read_log("chat")
        return [one for one in published if isinstance(one, LogLine)]

    feed = NodeFeed(config(), published.append, lambda: EMPTY)
    assert len(told()) == 1
    feed.configure(config(**change))
    with log.open("a") as more:
        more.write(line)
    (only,) = told()
    assert only.line == (line.rstrip() if "log_text" in change else None)
    feed.close()
