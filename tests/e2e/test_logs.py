"""The daemon follows engines' logs: captured ones of real engines, with a secret and a prompt among their lines."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import requests

from tests.e2e.daemon import OomwatchDaemon
from tests.e2e.processes import wait_for
from tests.sources.vllm.captures import CAPTURES

FOLDER = CAPTURES / "0.32.0"
SECRET = "sk-f00dcafe"
PROMPT = "the patient's name is"
LOGS = {
    "too-long": FOLDER / "failure-max-model-len-too-large.log",
    "no-host-memory": FOLDER / "failure-kv-space-exceeds-memory.log",
    "wrong-blocks": FOLDER / "failure-block-size-16.log",
    "serving": FOLDER / "kvleak.log",
}
RAN_OUT = (
    "(Worker_TP0 pid=9) ERROR 11-29 17:10:00 [multiproc_executor.py:932] torch.OutOfMemoryError: CUDA out of "
    "memory. Tried "
    "to allocate 384.00 MiB. GPU 0 has a total capacity of 19.53 GiB of which 329.87 MiB is free. Of the "
    "allocated memory "
    "18.40 GiB is allocated by PyTorch, and 402.27 MiB is reserved by PyTorch but unallocated.\n"
    "(EngineCore pid=8) ERROR 11-29 17:10:00 [core.py:1] EngineCore encountered a fatal error.\n"
)
NOISE = (
    f"(APIServer pid=1) INFO 11-29 17:00:00 [api.py:1] non-default args: {{'api_key': ['{SECRET}']}}\n"
    f"(APIServer pid=1) INFO 11-29 17:00:00 [logger.py:43] Received request cmpl-{SECRET}: prompt: '{PROMPT} "
    f"{SECRET}'\n"
)


@dataclass
class Followed:
    """A daemon and the logs that it follows."""

    daemon: OomwatchDaemon
    folder: Path

    def append(self, engine: str, text: str) -> None:
        with (self.folder / f"{engine}.log").open("a") as log:
            log.write(text)

    def verdict(self, engine: str, name: str) -> dict[str, Any]:
        return self.daemon.verdict(name, engine=engine)

    def wait(self, engine: str, name: str, state: str) -> dict[str, Any]:
        return wait_for(
            lambda: self.verdict(engine, name), lambda one: one["state"] == state, 30, f"{name} of {engine} is {state}"
        )


@pytest.fixture(scope="module")
def followed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Followed]:
    folder = tmp_path_factory.mktemp("logs")
    for name in LOGS:
        (folder / f"{name}.log").touch()
    config = {
        "engines": [
            {"name": name, "url": f"http://127.0.0.1:{port}", "log": {"file": str(folder / f"{name}.log")}}
            for port, name in enumerate(LOGS, 2)
        ],
        "engine_logs": {"interval": "1s"},
        "intervals": {"scrape": "1s", "gpu": "1s"},
        "discovery": {"enabled": False},
        "nvml": {"enabled": False},
    }
    with OomwatchDaemon(folder, config) as daemon:
        followed = Followed(daemon, folder)
        for name, log in LOGS.items():
            text = log.read_text(errors="replace")
            followed.append(name, NOISE + (text.partition("[shutdown]")[0] if name == "serving" else text))
        followed.append("serving", "\n" + RAN_OUT)
        yield followed


def test_a_context_that_the_pool_does_not_hold_is_told_with_the_length_that_fits(followed: Followed) -> None:
    verdict = followed.wait("too-long", "startup-refused", "ticket")
    assert verdict["evidence"]["reason"] == "context_too_long"
    assert verdict["evidence"]["largest_max_model_len"] == 1024
    assert any("1024" in action for action in verdict["advice"])


def test_a_pool_larger_than_the_host_s_memory_is_told_with_both(followed: Followed) -> None:
    evidence = followed.wait("no-host-memory", "startup-refused", "ticket")["evidence"]
    assert evidence["reason"] == "host_memory"
    assert evidence["wanted_bytes"] == 100 * 2**30
    assert evidence["available_bytes"] == pytest.approx(12.92 * 2**30, rel=1e-6)


def test_a_start_that_fails_for_another_reason_is_no_shortage(followed: Followed) -> None:
    followed.wait("wrong-blocks", "startup-refused", "clear")
    assert followed.verdict("wrong-blocks", "startup-oom")["state"] == "clear"


def test_an_error_while_serving_pages_with_the_killer_of_its_numbers(followed: Followed) -> None:
    verdict = followed.wait("serving", "runtime-oom", "page")
    assert verdict["killer"] == "fragmentation"
    assert verdict["evidence"]["strength"] == pytest.approx(1.91, abs=0.01)
    page = followed.daemon.page()
    counted = page.value(
        "oomwatch_engine_out_of_memory_total", engine="serving", killer="fragmentation", when="runtime"
    )
    assert counted == 1
    assert page.value("oomwatch_source_up", source="log", target="serving") == 1


def test_nothing_of_any_log_s_text_is_to_be_found_anywhere(followed: Followed) -> None:
    followed.wait("serving", "runtime-oom", "page")
    url = followed.daemon.url
    shown = [
        requests.get(f"{url}{path}", timeout=10).content
        for path in ("/metrics", "/api/v1/status", "/", "/api/v1/recording?last=3600&log_text=1")
    ]
    assert all(shown)
    assert b'"event":"out_of_memory"' in shown[-1]  # its numbers are recorded
    kept = [path.read_bytes() for path in (followed.folder / "state").rglob("*") if path.is_file()]
    for text in (*shown, *kept, followed.daemon.log_path.read_bytes()):
        assert SECRET.encode() not in text
        assert PROMPT.encode() not in text


def test_a_log_that_goes_away_and_comes_back_harms_nothing(followed: Followed) -> None:
    path = followed.folder / "wrong-blocks.log"
    path.unlink()
    path.mkdir()
    page = followed.daemon.wait_for(
        lambda page: page.value("oomwatch_source_up", source="log", target="wrong-blocks") == 0, "the log is down"
    )
    assert page.value("oomwatch_source_up", source="log", target="too-long") == 1
    path.rmdir()
    path.touch()
    followed.daemon.wait_for(
        lambda page: page.value("oomwatch_source_up", source="log", target="wrong-blocks") == 1, "the log is back"
    )


def test_check_says_why_an_engine_refused_and_what_would_pass(followed: Followed) -> None:
    command = [sys.executable, "-m", "oomwatch.cli", "check", "--config.file", str(followed.daemon.config_path)]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert answer.returncode == 2, answer.stderr  # one of them died of an error
    assert "Engine too-long refused to start" in answer.stdout
    assert "--max-model-len 1024 at most" in answer.stdout
    assert "Latest starts, by their logs" in answer.stdout
    assert SECRET not in answer.stdout + answer.stderr
