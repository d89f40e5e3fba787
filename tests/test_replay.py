"""A replay is the daemon's own judgement with the recording's clock."""

import io
import json
import subprocess
import sys
from collections.abc import Iterable, Iterator
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from oomwatch.cli import main
from oomwatch.enginelog.lines import line_of
from oomwatch.enginelog.reader import parse
from oomwatch.observations import Gap, HostMemory, Observation, Tick
from oomwatch.recording import read, to_line
from oomwatch.replay import json_lines, replay, text_lines, with_ticks

HEADER = {
    "oomwatch_recording": 1,
    "start": "2026-11-01T00:00:00Z",
    "engines": [{"name": "llama-8b", "target": "http://127.0.0.1:8000/metrics"}],
}


def scrape(t: float, *, running: float, tokens: float) -> dict[str, Any]:
    samples = {"kv_cache_usage_perc": 0.4, "num_requests_running": running, "num_requests_waiting": 0}
    samples |= {"generation_tokens_total": tokens, "iteration_tokens_total_count": tokens}
    named = {f'vllm:{name}{{engine="0",model_name="m"}}': value for name, value in samples.items()}
    named['vllm:cache_config_info{engine="0",num_gpu_blocks="4097",block_size="16"}'] = 1
    return {"t": t, "scrape": {"engine": "llama-8b", "ok": True, "seconds": 0.01, "samples": named}}


def stuck_for_ten_minutes() -> list[dict[str, Any]]:
    """An hour of work, then the counters stand still although a request runs, then work again."""
    lines: list[dict[str, Any]] = []
    tokens = 0.0
    for t in range(0, 2 * 3600, 15):
        tokens += 0 if 3600 <= t < 4200 else 100
        lines.append(scrape(float(t), running=3, tokens=tokens))
    return lines


def refused_starts(count: int) -> Iterator[dict[str, Any]]:
    """The log of an engine that is started every five minutes, and whose budget does not fit."""
    lines = (
        b"(APIServer pid=1) INFO 11-01 00:00:00 [x.py:1] vLLM API server version 0.9.1",
        (
            b"ValueError: Free memory on device (31.44/47.38 GiB) on startup is less than desired GPU memory "
            b"utilization (0.95, 45.01 GiB). Decrease GPU memory utilization or reduce GPU memory used by other "
            b"processes."
        ),
        b"(EngineCore_0 pid=2) ERROR 11-01 00:00:00 [x.py:1] EngineCore failed to start.",
    )
    for t, line in product(range(0, 300 * count, 300), lines):
        entry = parse(line)
        assert entry is not None
        yield json.loads(to_line(line_of(float(t), "llama-8b", entry)) or "")


def file_of(lines: Iterable[dict[str, Any]], header: dict[str, Any] | None = None) -> bytes:
    return "".join(json.dumps(line) + "\n" for line in [header or HEADER, *lines]).encode()


def rows_of(lines: Iterable[dict[str, Any]], header: dict[str, Any] | None = None) -> list[dict[str, Any]]:
    return [json.loads(line) for line in json_lines(replay(read(io.BytesIO(file_of(lines, header)))))]


def test_one_row_for_each_change_of_a_verdicts_state_and_a_summary_at_the_end() -> None:
    *rows, last = rows_of(stuck_for_ten_minutes())
    course = [(row["state"], row["t"]) for row in rows if row["verdict"] == "engine-stuck"]
    states = [state for state, _ in course]
    assert states[-2:] == ["page", "clear"]
    assert all(one != next_one for one, next_one in pairwise(states))
    (page,) = [t for state, t in course if state == "page"]
    assert 3585 + 180 <= page <= 3585 + 300  # the last token came at 3585 s
    assert last["summary"]["observations"] == 480
    assert last["summary"]["seconds"] == 7185
    assert last["summary"]["verdicts"]["engine-stuck"] == "page"


def test_a_row_has_every_field_of_the_format() -> None:
    row = next(row for row in rows_of(stuck_for_ten_minutes()) if row.get("state") == "page")
    assert row.keys() >= {
        "t", "verdict", "killer", "state", "subject", "eta_seconds", "confidence", "evidence", "summary", "incident",
        "symptom_of", "advice",
    }  # fmt: skip
    assert (row["killer"], row["subject"], row["symptom_of"]) == ("capacity", {"engine": "llama-8b"}, None)
    assert row["incident"] == "llama-8b/1"
    assert 0 <= row["confidence"] <= 1
    assert row["summary"]


def test_times_are_the_recordings_own() -> None:
    """The same course, whether ``t`` counts from a start, from nothing, or is unix time."""
    plain = rows_of(stuck_for_ten_minutes())
    unix = [{**line, "t": line["t"] + 1_793_491_200} for line in stuck_for_ten_minutes()]
    shifted = rows_of(unix)
    assert [row.get("t") for row in shifted] == [row["t"] + 1_793_491_200 if "t" in row else None for row in plain]


# --- ticks -----------------------------------------------------------------------------------------------------


def observed(*times: float) -> list[Observation]:
    return [HostMemory(t, 2, 1) for t in times]


def ticks(observations: Iterable[Observation], interval: float = 10) -> list[float]:
    return [found.t for found in with_ticks(observations, interval) if isinstance(found, Tick)]


def test_ticks_are_added_once_an_interval_and_at_the_end() -> None:
    assert ticks(observed(0, 5, 25, 31)) == [10, 20, 30, 31]


def test_a_tick_stands_behind_everything_of_its_own_time() -> None:
    found = list(with_ticks(observed(0, 10, 10, 12), 10))
    assert [(type(one).__name__, one.t) for one in found][3:5] == [("Tick", 10), ("HostMemory", 12)]


def test_ticks_that_are_there_are_kept_and_only_missing_ones_added() -> None:
    there = [*observed(0), Tick(10), *observed(11), Tick(21), *observed(58), Tick(60)]
    assert ticks(there) == [10, 21, 36, 46, 56, 60]


def test_no_time_passes_while_nobody_watches() -> None:
    assert ticks([*observed(0), Tick(10), Gap(500, 10), *observed(505)]) == [10, 505]


def test_a_silence_of_days_is_not_ticked_through_to_its_end() -> None:
    many = ticks(observed(0, 1e9), interval=15)
    assert len(many) < 6000
    assert many[-1] == 1e9


def test_nothing_gives_no_tick() -> None:
    assert list(with_ticks([], 10)) == []


# --- for people ------------------------------------------------------------------------------------------------


def test_the_text_tells_the_course_then_the_incidents_then_what_stayed_quiet() -> None:
    text = "\n".join(text_lines(replay(read(io.BytesIO(file_of(stuck_for_ten_minutes()))))))
    assert "2026-11-01 01:0" in text
    assert "PAGE" in text
    assert "engine-stuck llama-8b" in text
    assert "Incidents: 1" in text
    assert "llama-8b/1: engine-stuck llama-8b (page)" in text
    assert text.endswith("480 observations over 1 h 59 min")


def test_a_crash_loops_advice_begins_with_why_the_engine_dies() -> None:
    told = list(text_lines(replay(read(io.BytesIO(file_of(refused_starts(4)))))))
    incident = told.index("Incidents: 1")
    assert "crash-loop llama-8b (page)" in told[incident + 1]
    advice = [line for line in told if line.startswith("      do: ")]
    assert "--gpu-memory-utilization" in advice[1]
    assert any("Undo what changed" in line for line in advice[2:])


# --- the command -----------------------------------------------------------------------------------------------


def command(*arguments: str, stdin: bytes | None = None) -> tuple[int, str, str]:
    done = CliRunner().invoke(main, ["replay", *arguments], input=stdin)
    return done.exit_code, done.stdout, done.stderr


def test_the_command_prints_json_and_nothing_else(tmp_path: Path) -> None:
    file = tmp_path / "recording.jsonl"
    file.write_bytes(file_of(stuck_for_ten_minutes()))
    status, out, err = command(str(file), "--format", "json")
    assert (status, err) == (0, "")
    assert [json.loads(line) for line in out.splitlines()] == rows_of(stuck_for_ten_minutes())


def test_a_recording_that_breaks_off_is_judged_so_far_and_ends_with_2(tmp_path: Path) -> None:
    file = tmp_path / "recording.jsonl"
    file.write_bytes(file_of(stuck_for_ten_minutes())[:-20])
    status, out, err = command(str(file), "--format", "json")
    assert status == 2
    assert "breaks off in the middle of this line" in err
    assert "page" in [json.loads(line)["state"] for line in out.splitlines()]
    assert '{"summary": {' not in out


@pytest.mark.parametrize("arguments", [(), ("file", "--prometheus", "http://127.0.0.1:1")])
def test_either_a_recording_or_a_server_is_wanted(arguments: tuple[str, ...]) -> None:
    status, _, err = command(*arguments)
    assert (status, err) == (2, "oomwatch: give either a recording or --prometheus\n")


def test_a_file_that_is_not_there_ends_with_2() -> None:
    status, out, err = command("/nonexistent/recording.jsonl")
    assert (status, out) == (2, "")
    assert err == "oomwatch: /nonexistent/recording.jsonl: cannot be read: no such file or directory\n"


def test_thresholds_come_from_the_configuration(tmp_path: Path) -> None:
    recording, config = tmp_path / "recording.jsonl", tmp_path / "oomwatch.yml"
    recording.write_bytes(file_of(stuck_for_ten_minutes()))
    config.write_text("detection: {off: [{verdicts: [engine-stuck]}]}\n")
    status, out, _ = command(str(recording), "--format", "json", "--config.file", str(config))
    assert status == 0
    assert json.loads(out.splitlines()[-1])["summary"]["verdicts"]["engine-stuck"] == "unknown"


def test_standard_input_is_read_for_a_dash() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "oomwatch.cli", "replay", "-", "--format", "json"],
        input=file_of(stuck_for_ten_minutes()[:5]),
        capture_output=True,
        timeout=60,
        check=True,
    )
    assert json.loads(done.stdout.splitlines()[-1])["summary"]["observations"] == 5
