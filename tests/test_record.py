"""``oomwatch record`` takes what the daemon has observed: from it while it runs, from its database when it is down."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
from click.testing import CliRunner

from oomwatch.cli import main
from oomwatch.database import FILE, Archive, Block, Limits, opened
from oomwatch.observations import EngineFacts, EngineScrape, HostMemory, LogLine, Observation, Tick
from oomwatch.record import answer, part
from oomwatch.recording import Header, header_line, read, to_line
from tests.e2e.daemon import OomwatchDaemon
from tests.e2e.processes import wait_until

T0 = 1_790_000_000.0
QUIET = {"nvml": {"enabled": False}, "discovery": {"enabled": False}}


def filled(folder: Path, count: int = 10, *, log_text: bool = False) -> Path:
    """A database of ``count`` blocks, a minute apart."""
    database = opened(folder, Limits(keep=1e9))
    database.set("intervals", json.dumps({"gpu": 15.0}))
    for number in range(count):
        t = T0 + 60 * number
        text = LogLine(t, "chat", line="INFO the prompt was …", event="x", fields={"n": 1})
        told: tuple[Observation, ...] = (HostMemory(t, 2, 1), text, Tick(t))
        lines = [line for one in told if (line := to_line(one, log_text=log_text))]
        facts = header_line(Header(engines=(EngineFacts(f"chat-{number // 5}"),))) if number % 5 == 0 else None
        database.write([Block.of(lines, t, t)], t, facts=facts)
    database.close()
    return folder / FILE


def record(*arguments: object) -> tuple[int, str, str]:
    nowhere = {"OOMWATCH_WEB__LISTEN_ADDRESS": "127.0.0.1:1"}
    done = CliRunner().invoke(main, ["record", *map(str, arguments)], env=nowhere)
    return done.exit_code, done.stdout, done.stderr


# --- parts -----------------------------------------------------------------------------------------------------


def test_a_part_counts_its_times_from_the_first_observation_and_knows_the_engines_of_then(tmp_path: Path) -> None:
    with Archive(filled(tmp_path)) as archive:
        whole = part(archive, T0 + 120, None, None)
        header, *lines = [json.loads(line) for line in whole.lines.splitlines()]
        late = part(archive, T0 + 360, None, None)
    assert (header["start"], header["intervals"]) == ("2026-09-21T14:15:20Z", {"gpu": 15.0})
    assert header["engines"] == [{"name": "chat-0"}]
    assert [line["t"] for line in lines if "tick" in line] == [60.0 * n for n in range(8)]
    assert json.loads(late.lines.splitlines()[0])["engines"] == [{"name": "chat-1"}]


def test_parts_follow_one_another_without_a_gap_or_a_repetition(tmp_path: Path) -> None:
    path = filled(tmp_path)
    first = answer(path, {"last": "10m"}, T0 + 600)
    assert answer(path, {"after": str(first.next), "start": repr(first.start)}, T0 + 600).lines == b""
    half = answer(path, {"after": "4", "start": repr(first.start)}, T0 + 600)
    assert first.lines.endswith(half.lines)
    assert half.lines.count(b'"tick"') == 6


@pytest.mark.parametrize(
    ("query", "problem"),
    [
        ({"last": "often"}, 'last is "often", and has to be a duration such as 2h or 30m'),
        ({"after": "1"}, "after and start belong together, as the part before named them"),
        ({"after": "x", "start": "1"}, "after is the number of a block, start a unix time"),
        ({"lats": "2h"}, "unknown parameter: lats. There are last, after, start and log_text"),
    ],
)
def test_a_query_that_makes_no_sense_is_refused(tmp_path: Path, query: dict[str, str], problem: str) -> None:
    with pytest.raises(ValueError, match="^" + problem.replace("?", r"\?") + "$"):
        answer(filled(tmp_path), query, T0)


@pytest.mark.parametrize("wanted", [False, True])
def test_the_text_of_logs_leaves_only_on_request(tmp_path: Path, wanted: bool) -> None:
    with Archive(filled(tmp_path, log_text=True)) as archive:
        text = part(archive, T0, None, None, log_text=wanted).lines
    assert (b"the prompt" in text) == wanted
    assert b'"event":"x"' in text


# --- from the database -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["out.jsonl", "out.jsonl.gz"])
def test_without_a_daemon_the_database_is_read(tmp_path: Path, name: str) -> None:
    filled(tmp_path / "state")
    config = tmp_path / "oomwatch.yml"
    config.write_text(f"history: {{directory: {tmp_path / 'state'}}}\n")
    out = tmp_path / name
    status, told, _ = record("--config.file", config, "--output", out, "--last", "10000d")
    assert (status, told) == (0, f"{out} written\n")
    assert (out.read_bytes()[:2] == b"\x1f\x8b") == name.endswith(".gz")
    with read(out) as recording:
        assert len([one for one in recording if isinstance(one, Tick)]) == 10


def test_with_neither_both_are_told(tmp_path: Path) -> None:
    config = tmp_path / "oomwatch.yml"
    config.write_text(f"history: {{directory: {tmp_path / 'none'}}}\n")
    status, _, err = record("--config.file", config, "--output", tmp_path / "out.jsonl")
    assert status == 2
    assert "the daemon at http://127.0.0.1:1: " in err
    assert f"its database: {tmp_path / 'none' / FILE} is not there" in err


def test_a_file_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    filled(tmp_path / "state")
    config = tmp_path / "oomwatch.yml"
    config.write_text(f"history: {{directory: {tmp_path / 'state'}}}\n")
    status, _, err = record("--config.file", config, "--output", "/nonexistent/out.jsonl")
    assert (status, err) == (2, "oomwatch: /nonexistent/out.jsonl cannot be written: no such file or directory\n")


# --- from the daemon -------------------------------------------------------------------------------------------


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[OomwatchDaemon]:
    engines = [{"name": "chat", "url": "http://127.0.0.1:1"}]
    intervals = dict.fromkeys(("gpu", "scrape", "host"), "1s")
    with OomwatchDaemon(tmp_path, {**QUIET, "engines": engines, "intervals": intervals}) as running:
        yield running


def lines_of(daemon: OomwatchDaemon, query: str = "") -> list[dict[str, Any]]:
    answered = requests.get(f"{daemon.url}/api/v1/recording{query}", timeout=10)
    return [json.loads(line) for line in answered.text.splitlines()] if answered.ok else []


def test_a_running_daemon_hands_out_what_it_observed(daemon: OomwatchDaemon, tmp_path: Path) -> None:
    wait_until(lambda: len([line for line in lines_of(daemon) if "scrape" in line]) >= 2, 20, "something is recorded")
    out = tmp_path / "out.jsonl.gz"
    status, _, err = record("--url", daemon.url, "--output", out, "--last", "1h")
    assert (status, err) == (0, "")
    with read(out) as recording:
        assert [facts.name for facts in recording.header.engines] == ["chat"]
        assert recording.header.intervals["scrape"] == 1.0
        scrapes = [one for one in recording if isinstance(one, EngineScrape)]
    assert len(scrapes) >= 2
    assert {scrape.state for scrape in scrapes} == {"unreachable"}


def test_what_comes_is_followed_for_a_while(daemon: OomwatchDaemon, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    status, _, err = record("--url", daemon.url, "--output", out, "--for", "6s")
    assert (status, err) == (0, "")
    with read(out) as recording:
        times = [one.t for one in recording if isinstance(one, Tick)]
    assert len(times) >= 3
    assert times[-1] - times[0] <= 12


def test_the_api_answers_packed_and_refuses_nonsense(daemon: OomwatchDaemon) -> None:
    wait_until(lambda: bool(lines_of(daemon)), 20, "something is recorded")
    packed = requests.get(
        f"{daemon.url}/api/v1/recording", headers={"Accept-Encoding": "gzip"}, timeout=10, stream=True
    )
    assert packed.headers["Content-Type"] == "application/jsonl"
    body = packed.raw.read()
    assert b"oomwatch_recording" in (gzip.decompress(body) if body[:2] == b"\x1f\x8b" else body)
    refused = requests.get(f"{daemon.url}/api/v1/recording?last=often", timeout=10)
    assert (refused.status_code, refused.text) == (400, 'last is "often", and has to be a duration such as 2h or 30m\n')


def test_a_daemon_without_history_says_so(tmp_path: Path) -> None:
    with OomwatchDaemon(tmp_path, {**QUIET, "history": {"enabled": False}}) as running:
        answered = requests.get(f"{running.url}/api/v1/recording", timeout=10)
        assert (answered.status_code, answered.text) == (503, "No history is kept on disk (history.enabled).\n")
