"""The log: one stream, lines that machines and people can read, and no flood when something stays broken."""

from __future__ import annotations

import io
import json
import logging
import re
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog

from oomwatch.logs import Repeats, configure, log_uncaught

PASSWORD = "s3cret"


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level, hooks = root.handlers[:], root.level, (sys.excepthook, threading.excepthook)
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    sys.excepthook, threading.excepthook = hooks
    structlog.reset_defaults()
    for name in ("apscheduler", "urllib3"):
        logging.getLogger(name).setLevel(logging.NOTSET)


class Output(io.StringIO):
    """A stream whose lines are JSON."""

    def objects(self) -> list[dict[str, Any]]:
        return [json.loads(line, parse_constant=pytest.fail) for line in self.getvalue().splitlines()]


@pytest.fixture
def output() -> Output:
    stream = Output()
    configure("info", "json", stream)
    return stream


def test_a_json_line_begins_with_time_level_and_event(output: Output) -> None:
    structlog.get_logger("oomwatch").warning("scrape failed", engine="chat", seconds=1.5)
    (line,) = output.objects()
    assert list(line)[:3] == ["timestamp", "level", "event"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d+Z", line.pop("timestamp"))
    assert line == {"level": "warn", "event": "scrape failed", "engine": "chat", "seconds": 1.5}


def test_values_that_json_lacks_are_written_as_text(output: Output) -> None:
    structlog.get_logger().info("odd", nan=float("nan"), nested={1: float("inf")}, path=Path("/x"), pair=(1, 2))
    (line,) = output.objects()
    assert (line["nan"], line["nested"], line["path"], line["pair"]) == ("nan", {"1": "inf"}, "/x", [1, 2])


def test_an_exception_is_one_line_of_json_and_shows_no_variables(output: Output) -> None:
    def fail(password: str) -> None:
        raise ValueError(f"{len(password)} characters")

    try:
        fail(PASSWORD)
    except ValueError:
        structlog.get_logger().exception("went wrong")
        logging.getLogger("cheroot").exception("went wrong")
    first, second = output.objects()
    assert first["exception"].endswith("ValueError: 6 characters")
    assert second["exception"] == first["exception"]
    assert PASSWORD not in output.getvalue()


def test_the_console_shows_plain_lines_without_variables() -> None:
    stream = io.StringIO()
    configure("info", "console", stream)

    def fail(password: str) -> None:
        raise ValueError(f"{len(password)} characters")

    try:
        fail(PASSWORD)
    except ValueError:
        structlog.get_logger().exception("went wrong", engine="chat")
    text = stream.getvalue()
    assert re.match(r"\d{4}-\d\d-\d\dT[\d:.]+Z \[error +\] went wrong +engine=chat\n", text)
    assert text.endswith("ValueError: 6 characters\n")
    assert PASSWORD not in text
    assert "\x1b" not in text, "colours are for terminals"


def test_lines_of_libraries_take_the_same_way(output: Output) -> None:
    logging.getLogger("cheroot.server").warning("odd request from %s", "10.0.0.1", extra={"port": 7})
    (line,) = output.objects()
    assert (line["event"], line["logger"], line["level"], line["port"]) == (
        "odd request from 10.0.0.1",
        "cheroot.server",
        "warn",
        7,
    )


def test_talkative_libraries_are_heard_from_warnings_on(output: Output) -> None:
    for name in ("apscheduler.executors.default", "urllib3.connectionpool"):
        logging.getLogger(name).info("every job, every connection")
        logging.getLogger(name).warning("a missed run")
    assert [line["event"] for line in output.objects()] == ["a missed run", "a missed run"]


def test_debug_lets_them_speak() -> None:
    stream = Output()
    configure("debug", "json", stream)
    logging.getLogger("apscheduler.scheduler").debug("added job")
    assert [line["event"] for line in stream.objects()] == ["added job"]


@pytest.mark.parametrize(("level", "heard"), [("debug", 4), ("info", 3), ("warn", 2), ("error", 1)])
def test_the_level_decides(level: str, heard: int) -> None:
    stream = Output()
    configure(level, "json", stream)
    log = structlog.get_logger()
    log.debug("1")
    log.info("2")
    log.warning("3")
    log.error("4")
    assert len(stream.objects()) == heard


def test_a_new_configuration_holds_for_loggers_that_exist() -> None:
    before, after = Output(), Output()
    configure("error", "json", before)
    log = structlog.get_logger("oomwatch")
    log.info("unheard")
    configure("info", "json", after)
    log.info("heard")
    assert before.getvalue() == ""
    assert [line["event"] for line in after.objects()] == ["heard"]


def test_the_end_of_a_thread_by_an_error_is_logged(output: Output) -> None:
    log_uncaught()
    thread = threading.Thread(target=lambda: 1 / 0, name="poll-gpu-3")
    thread.start()
    thread.join(timeout=10)
    (line,) = output.objects()
    assert (line["event"], line["thread"]) == ("a thread ended by an error", "poll-gpu-3")
    assert line["exception"].endswith("ZeroDivisionError: division by zero")


# --- errors that repeat ----------------------------------------------------------------------------------------


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Watched:
    """An engine that is scraped every 15 seconds, and the lines that this makes."""

    def __init__(self, output: Output) -> None:
        self.output = output
        self.clock = Clock()
        self.repeats = Repeats(self.clock)
        self.log = structlog.get_logger()

    def fails(self, error: str, times: int = 1) -> None:
        for _ in range(times):
            self.repeats.failed(self.log, "chat", "cannot scrape", error, engine="chat")
            self.clock.now += 15

    def works(self, times: int = 1) -> None:
        for _ in range(times):
            self.repeats.recovered(self.log, "chat", "scraped again", engine="chat")
            self.clock.now += 15

    def lines(self) -> list[dict[str, Any]]:
        lines = [{k: v for k, v in line.items() if k not in ("timestamp", "engine")} for line in self.output.objects()]
        self.output.seek(0)
        self.output.truncate()
        return lines


@pytest.fixture
def watched(output: Output) -> Watched:
    return Watched(output)


REFUSED = {"level": "warn", "event": "cannot scrape", "error": "refused"}


def test_an_error_is_logged_at_once_and_then_every_ten_minutes(watched: Watched) -> None:
    watched.fails("refused")
    assert watched.lines() == [REFUSED]
    watched.fails("refused", times=39)
    assert watched.lines() == []
    watched.fails("refused")
    assert watched.lines() == [REFUSED | {"not_logged": 39}]


def test_another_error_is_logged_at_once(watched: Watched) -> None:
    watched.fails("refused")
    watched.fails("timeout")
    assert [line["error"] for line in watched.lines()] == ["refused", "timeout"]
    watched.fails("refused")
    watched.fails("timeout")
    assert watched.lines() == [], "both are known by now"


def test_recovery_is_logged_once_with_count_and_duration(watched: Watched) -> None:
    watched.fails("refused", times=4)
    watched.works(times=3)
    assert watched.lines() == [REFUSED, {"level": "info", "event": "scraped again", "failures": 4, "seconds": 60.0}]


def test_what_never_failed_does_not_recover(watched: Watched) -> None:
    watched.works(times=3)
    assert watched.lines() == []


def test_a_new_failure_after_recovery_is_news(watched: Watched) -> None:
    watched.fails("refused")
    watched.works()
    watched.lines()
    watched.fails("refused")
    assert watched.lines() == [REFUSED]


def test_flapping_does_not_flood_the_log(watched: Watched) -> None:
    for _ in range(40):
        watched.fails("refused")
        watched.works()
    lines = watched.lines()
    assert len(lines) <= 2 * 2 * Repeats.MOST_LINES, "twenty minutes of 80 events"
    pairs = [line["event"] for line in lines]
    assert pairs == ["cannot scrape", "scraped again"] * (len(lines) // 2), "the last line is always the truth"


def test_ever_new_texts_do_not_flood_the_log(watched: Watched) -> None:
    for number in range(40):
        watched.fails(f"timed out after {number} ms")
    assert len(watched.lines()) == Repeats.MOST_LINES


def test_a_lasting_failure_after_flapping_is_told_in_the_end(watched: Watched) -> None:
    for _ in range(10):
        watched.fails("refused")
        watched.works()
    watched.lines()
    watched.fails("refused", times=40)
    assert watched.lines()[0] == REFUSED | {"not_logged": pytest.approx(30, abs=15)}


def test_what_is_forgotten_begins_anew(watched: Watched) -> None:
    watched.fails("refused")
    watched.repeats.forget("chat")
    watched.works()
    watched.fails("refused")
    assert watched.lines() == [REFUSED, REFUSED]


def test_keys_do_not_meet(output: Output) -> None:
    repeats = Repeats(Clock())
    for key in ("a", "b", "a", "b"):
        repeats.failed(structlog.get_logger(), key, "cannot scrape", "refused", engine=key)
    assert [line["engine"] for line in output.objects()] == ["a", "b"]


def test_many_threads_make_one_line(output: Output) -> None:
    repeats = Repeats(Clock())
    start = threading.Barrier(8)

    def fail() -> None:
        start.wait(timeout=10)
        for _ in range(50):
            repeats.failed(structlog.get_logger(), "k", "cannot scrape", "refused")

    threads = [threading.Thread(target=fail) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    repeats.recovered(structlog.get_logger(), "k", "scraped again")
    first, second = output.objects()
    assert first["event"] == "cannot scrape"
    assert second["failures"] == 400
