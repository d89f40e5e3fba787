"""What the daemon does with defects of its own: it lives on, and tells of them."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
from structlog.testing import capture_logs

from oomwatch.config import Config
from oomwatch.daemon import Daemon
from oomwatch.feed import Job
from tests.e2e.processes import wait_until

SETTINGS: dict[str, Any] = {"web": {"listen_address": ["127.0.0.1:0"]}, "history": {"enabled": False}}


class Feed:
    """Reads nothing; each test says what goes wrong."""

    released = False

    def __init__(self) -> None:
        self.wanted: dict[str, Job] = {}
        self.release_answer: Callable[[], str] = str
        self.take_over: Callable[[Config], None] = lambda _: None
        self.released_times = 0

    def jobs(self) -> Mapping[str, Job]:
        return self.wanted

    def ready(self) -> str:
        return ""

    def call_stats(self) -> dict[str, Any]:
        return {}

    def probe_files(self) -> dict[str, int]:
        return {}

    def release(self) -> str:
        self.released_times += 1
        return self.release_answer()

    def resume(self) -> None:
        """Nothing to do."""

    def configure(self, config: Config) -> None:
        self.take_over(config)

    def close(self) -> None:
        """Nothing is open."""


def daemon_of(feed: Feed, *more: dict[str, Any]) -> Daemon:
    """One whose configuration is SETTINGS at first, and then ``more`` in turn."""
    documents = iter([SETTINGS, *({**SETTINGS, **one} for one in more)])
    return Daemon(lambda: Config.model_validate(next(documents)), lambda *_: feed)


@contextmanager
def running(daemon: Daemon) -> Iterator[Daemon]:
    daemon.start()
    try:
        yield daemon
    finally:
        daemon.stop()


def internal_errors(daemon: Daemon) -> int:
    return daemon.pipeline.defects.count


def fails() -> None:
    raise RuntimeError("no such luck")


def test_a_job_that_fails_is_counted_each_time_logged_once_and_runs_again() -> None:
    feed = Feed()
    feed.wanted = {"broken": Job(0.02, fails)}
    with capture_logs() as lines, running(daemon_of(feed)) as daemon:
        wait_until(lambda: internal_errors(daemon) >= 3, 10, "the job ran three times")
    told = [line for line in lines if line["event"].startswith("a job failed")]
    assert [(line["job"], line["log_level"], line["error"]) for line in told] == [
        ("broken", "error", "RuntimeError('no such luck')")
    ]


def test_a_job_that_takes_longer_than_its_interval_runs_once_at_a_time_and_makes_up_for_nothing() -> None:
    feed = Feed()
    at_once, most, turns = 0, 0, 0
    end = threading.Event()

    def slow() -> None:
        nonlocal at_once, most, turns
        at_once += 1
        most, turns = max(most, at_once), turns + 1
        end.wait(0.2)
        at_once -= 1

    feed.wanted = {"slow": Job(0.02, slow)}
    began = time.monotonic()
    with running(daemon_of(feed)):
        wait_until(lambda: turns >= 3, 10, "three turns")
        assert turns <= 1 + (time.monotonic() - began) / 0.2
        end.set()
    assert most == 1


def test_a_signal_that_cannot_be_obeyed_does_not_end_it() -> None:
    feed = Feed()
    feed.release_answer = lambda: str(1 // 0)
    daemon = daemon_of(feed)
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}
    more = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGHUP)}

    def asked(times: int) -> bool:
        return feed.released_times == times

    def ask() -> None:
        wait_until(lambda: signal.getsignal(signal.SIGUSR1) is not before[signal.SIGUSR1], 10, "it obeys signals")
        for times in (1, 2):
            os.kill(os.getpid(), signal.SIGUSR1)
            wait_until(partial(asked, times), 10, "the signal is obeyed")
        os.kill(os.getpid(), signal.SIGTERM)

    asking = threading.Thread(target=ask, daemon=True)
    try:
        asking.start()
        with capture_logs() as lines:
            daemon.run()
    finally:
        for number, handler in (before | more).items():
            signal.signal(number, handler)
    assert internal_errors(daemon) == 2
    assert [line["signal"] for line in lines if line["event"] == "a signal could not be obeyed"] == ["SIGUSR1"]


class TestReload:
    def test_that_cannot_be_taken_over_says_so(self) -> None:
        feed = Feed()
        feed.take_over = lambda _: fails()
        daemon = daemon_of(feed, {"intervals": {"gpu": "7s"}})
        assert daemon.reload().startswith("taken over in part only")
        assert not daemon._status.successful
        assert internal_errors(daemon) == 1

    @pytest.mark.parametrize(
        "change", [{"history": {"enabled": True}}, {"web": {"listen_address": ["127.0.0.1:0", "[::1]:0"]}}]
    )
    def test_says_what_takes_effect_at_the_next_start_only(self, change: dict[str, Any]) -> None:
        daemon = daemon_of(Feed(), change)
        with capture_logs() as lines:
            assert daemon.reload() == ""
        (line,) = (line for line in lines if "next start only" in line["event"])
        assert line["section"] == next(iter(change))
