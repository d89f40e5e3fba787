"""A leak in a real vLLM server, and what is none: the same load on a healthy server, a hung worker, a failed start.

One daemon watches all of it. It looks once a second, and its thresholds are the defaults but for durations, which would
take minutes.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import requests

from tests.e2e import kvleak
from tests.e2e.alert_chain import AlertChain
from tests.e2e.conftest import StartEngine
from tests.e2e.daemon import OomwatchDaemon, intervals
from tests.e2e.engine import Completion, Load, VllmEngine
from tests.e2e.processes import ServerError, wait_for, wait_until
from tests.e2e.vllm_setup import VllmVenv

INTERVAL_S = 1.0
STUCK_AFTER_S = 10.0
CONFIG: dict[str, object] = {
    "intervals": intervals(f"{INTERVAL_S:g}s"),
    "detection": {
        "thresholds": {
            "kv_block_leak": {"confirm_within": "1m"},
            "engine_stuck": {"after": f"{STUCK_AFTER_S:g}s", "slow_after": "15s", "start_grace": "5s"},
        }
    },
}
# From the last move: up to an interval until the scrape that first sees it, as much until the scrape that ends the
# time, and until the tick that concludes; the rest is for a machine that is busy.
STUCK_WITHIN_S = STUCK_AFTER_S + 5 * INTERVAL_S
START_TIMEOUT_S = 400.0
FAILED_START_SEEN_WITHIN_S = 60.0  # its processes have to stay away for 30 s

POOL_ARGUMENT = "--num-gpu-blocks-override=65"
USABLE_BLOCKS = 64
TICKET_BLOCKS, PAGE_BLOCKS = 0.03 * USABLE_BLOCKS, 0.15 * USABLE_BLOCKS
# A request of a batch takes 4 blocks, so that all of them fit and none is preempted: 48 blocks are freed, 2 or 3 lost.
BATCH_REQUESTS, BATCH_TOKENS = 12, 64
MOST_BATCHES = 8
# A request of the long load takes 16 blocks: when 49 are lost, none gets to its end.
LONG_LOAD_REQUESTS, LONG_LOAD_CONCURRENCY, LONG_LOAD_TOKENS = 100, 12, 440
HEALTHY_LONG_LOAD_REQUESTS = 24
LOAD_TIMEOUT_S = 120.0

NODE = "node"  # the instance, as Prometheus calls it

Verdict = dict[str, Any]
Change = tuple[str, str, float]
"""A verdict, its state, and since when (unix time)."""


def verdicts_of(daemon: OomwatchDaemon, engine: str) -> dict[str, Verdict]:
    """By name. Those about one of its processes are left out, for there are several of a name."""
    return {
        verdict["verdict"]: verdict
        for verdict in daemon.status()["verdicts"]
        if verdict["subject"].get("engine") == engine and "pid" not in verdict["subject"]
    }


class Alarms:
    """The tickets and pages about an engine that rise from now on, as the daemon's API shows them, in their order."""

    def __init__(self, daemon: OomwatchDaemon, engine: str) -> None:
        self.began = time.time()
        self.changes: list[Change] = []
        self._daemon = daemon
        self._engine = engine
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="alarms", daemon=True)

    def __enter__(self) -> Alarms:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(30)

    def counts(self, state: str, since: float) -> bool:
        return state in ("ticket", "page") and since >= self.began

    def _follow(self) -> None:
        while not self._stop.wait(INTERVAL_S / 5):
            with contextlib.suppress(requests.RequestException):
                for name, verdict in verdicts_of(self._daemon, self._engine).items():
                    change = (name, verdict["state"], verdict["since"])
                    if change not in self.changes and self.counts(*change[1:]):
                        self.changes.append(change)


@dataclass(frozen=True)
class Watched:
    """A server with a pool of 64 usable blocks, beside a daemon that has found it."""

    engine: VllmEngine
    daemon: OomwatchDaemon
    name: str
    alarms: Alarms

    def verdicts(self) -> dict[str, Verdict]:
        return verdicts_of(self.daemon, self.name)

    def wait_for(
        self, condition: Callable[[dict[str, Verdict]], bool], what: str, timeout_s: float
    ) -> dict[str, Verdict]:
        """The first verdicts that meet ``condition``."""
        return wait_for(self.verdicts, condition, timeout_s, what)

    def serve_batch(self) -> list[Completion]:
        """Requests that come together, and then an idle gap: until the daemon has read the idle server twice."""
        load = self.engine.start_load(BATCH_REQUESTS, max_tokens=BATCH_TOKENS, timeout_s=LOAD_TIMEOUT_S)
        completions = load.results(LOAD_TIMEOUT_S)
        for _ in range(2):
            self.wait_for_scrape()
        return completions

    def wait_for_scrape(self) -> None:
        now = time.time()
        wait_until(lambda: self._last_seen() > now, 30, "the daemon reads the server again")

    def start_long_load(self, n: int) -> Load:
        return self.engine.start_load(
            n, concurrency=LONG_LOAD_CONCURRENCY, max_tokens=LONG_LOAD_TOKENS, timeout_s=LOAD_TIMEOUT_S
        )

    def _last_seen(self) -> float:
        (engine,) = (one for one in self.daemon.status()["engines"] if one["name"] == self.name)
        return float(engine["last_seen"] or 0.0)


# --- what runs -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory, vllm_venv: VllmVenv) -> Iterator[OomwatchDaemon]:
    """It needs no server, but without vLLM there is nothing to watch."""
    # What the log of the refused start says has tests of its own: here it is what is seen of it without one.
    with OomwatchDaemon(tmp_path_factory.mktemp("daemon"), CONFIG | {"engine_logs": {"enabled": False}}) as running:
        yield running


@pytest.fixture(scope="module")
def chain(daemon: OomwatchDaemon, tmp_path_factory: pytest.TempPathFactory) -> Iterator[AlertChain]:
    """Prometheus, Alertmanager and a receiver behind the daemon."""
    with AlertChain(tmp_path_factory.mktemp("chain"), "installed") as running:
        running.scrape({NODE: f"127.0.0.1:{daemon.port}"})
        yield running


@pytest.fixture(scope="module")
def refused(
    daemon: OomwatchDaemon, vllm_venv: VllmVenv, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[VllmEngine, Future[list[str]]]]:
    """A server whose context is longer than its pool, and what comes of two starts in a row."""
    engine = VllmEngine(
        vllm_venv,
        tmp_path_factory.mktemp("vllm"),
        arguments=(POOL_ARGUMENT, "--max-model-len=4096"),
        start_timeout_s=START_TIMEOUT_S,
    )
    with ThreadPoolExecutor(1, thread_name_prefix="supervisor") as supervisor:
        try:
            yield engine, supervisor.submit(_errors_of_starts, engine, 2)
        finally:
            engine.stop()


def _errors_of_starts(engine: VllmEngine, n: int) -> list[str]:
    errors = []
    for _ in range(n):
        with pytest.raises(ServerError) as refusal:
            engine.start()
        errors.append(str(refusal.value) + engine.log())
    return errors


@pytest.fixture(scope="class")
def watched(
    request: pytest.FixtureRequest,
    daemon: OomwatchDaemon,
    refused: object,
    start_vllm: StartEngine,
) -> Iterator[Watched]:
    """A server with the ``plugins`` of the class. The starts of ``refused`` go on meanwhile, which saves their time."""
    engine = start_vllm(
        arguments=(POOL_ARGUMENT,),
        environment=kvleak.ENVIRONMENT,
        plugins=request.cls.plugins,
        start_timeout_s=START_TIMEOUT_S,
    )
    try:
        wait_until(lambda: _name_of(daemon, engine) is not None, 30, "the daemon has found the server")
        name = _name_of(daemon, engine) or ""
        with Alarms(daemon, name) as alarms:
            server = Watched(engine, daemon, name, alarms)
            server.wait_for(lambda found: "kv-block-leak" in found, "a first verdict", 30)
            server.wait_for(lambda found: found["kv-block-leak"]["state"] == "clear", "nothing is lost", 30)
            yield server
    finally:
        engine.stop()


def _name_of(daemon: OomwatchDaemon, engine: VllmEngine) -> str | None:
    return next((one["name"] for one in daemon.status()["engines"] if one["target"] == engine.metrics_url), None)


def _oomwatch(*arguments: str | Path) -> str:
    command = [sys.executable, "-m", "oomwatch.cli", *map(str, arguments)]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=300).stdout


# --- a leak ----------------------------------------------------------------------------------------------------


@pytest.mark.real
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("chain")
class TestALeakingServer:
    """Each test goes on where the one before stopped; the last one leaves the server in its deadlock."""

    plugins = (kvleak.PLUGIN,)

    def test_is_a_ticket_as_soon_as_a_share_of_its_pool_is_lost(self, watched: Watched) -> None:
        found = self.serve_until("ticket", watched)
        assert TICKET_BLOCKS <= found["kv-block-leak"]["evidence"]["floor_blocks"] < PAGE_BLOCKS

    def test_is_a_page_while_every_request_is_still_served(self, watched: Watched) -> None:
        found = self.serve_until("page", watched)
        assert found["engine-stuck"]["state"] == "clear"
        assert watched.engine.metric("vllm:num_requests_waiting") == 0
        eta = found["kv-block-leak"]["eta"]
        assert eta["low"] <= eta["seconds"] <= eta["high"]

    def test_is_stuck_of_its_leak_once_no_request_fits_any_more(self, watched: Watched) -> None:
        incident = watched.verdicts()["kv-block-leak"]["incident"]
        load = watched.start_long_load(LONG_LOAD_REQUESTS)
        found = watched.wait_for(
            lambda found: found["engine-stuck"]["state"] == "page", "the deadlock is seen", 2 * LOAD_TIMEOUT_S
        )
        assert not load.finished
        assert found["engine-stuck"]["evidence"]["running"] == 0
        assert found["engine-stuck"]["evidence"]["waiting"] > 0
        assert found["engine-stuck"]["symptom_of"] == "kv-block-leak"
        assert found["kv-block-leak"]["symptom_of"] is None
        assert found["engine-stuck"]["incident"] == found["kv-block-leak"]["incident"] == incident
        assert watched.engine.says_healthy()
        self.wait_until_counted(watched)

    def test_was_told_once_as_a_ticket_and_once_as_a_page_until_its_deadlock(
        self, watched: Watched, chain: AlertChain
    ) -> None:
        chain.wait_for(NODE, "page")
        told = [one for one in chain.notifications(NODE) if one.labels.get("engine") == watched.name]
        assert [(one.receiver, one.status, one.alerts) for one in told] == [
            (receiver, "firing", ("OomwatchKvBlockLeak",)) for receiver in ("ticket", "page")
        ]

    def test_goes_the_same_way_when_its_recording_is_replayed(self, watched: Watched, tmp_path: Path) -> None:
        config, recording = watched.daemon.config_path, tmp_path / "session.jsonl.gz"
        _oomwatch("record", "--config.file", config, "--url", watched.daemon.url, "--output", recording)
        replayed = _oomwatch("replay", "--config.file", config, "--format", "json", recording)
        with gzip.open(recording, "rt", encoding="utf-8") as lines:
            start = datetime.fromisoformat(json.loads(lines.readline())["start"].replace("Z", "+00:00")).timestamp()
        rows = [row for row in map(json.loads, replayed.splitlines()) if "t" in row]
        ours = [row for row in rows if row["subject"].get("engine") == watched.name and "pid" not in row["subject"]]
        again = [(row["verdict"], row["state"], start + row["t"]) for row in ours]
        again = [change for change in again if watched.alarms.counts(*change[1:])]
        live = watched.alarms.changes
        assert [change[:2] for change in again] == [change[:2] for change in live]
        assert [since for *_, since in again] == pytest.approx([since for *_, since in live], abs=INTERVAL_S)
        assert live[0][:2] == ("kv-block-leak", "ticket")

    def serve_until(self, state: str, watched: Watched) -> dict[str, Verdict]:
        """Batches, and after each the number of lost blocks, until the leak is as bad as ``state``."""
        for _ in range(MOST_BATCHES):
            assert all(completion.succeeded for completion in watched.serve_batch())
            found = self.wait_until_counted(watched)
            if found["kv-block-leak"]["state"] == state:
                return found
        raise AssertionError(f"no {state} after {kvleak.lost_blocks(watched.engine)} lost blocks")

    def wait_until_counted(self, watched: Watched) -> dict[str, Verdict]:
        lost = kvleak.lost_blocks(watched.engine)

        def counted(found: dict[str, Verdict]) -> bool:
            evidence = found["kv-block-leak"]["evidence"]
            return bool(evidence["pool_blocks"] == USABLE_BLOCKS and abs(evidence["floor_blocks"] - lost) <= 1)

        return watched.wait_for(counted, f"{lost} blocks are said to be lost, or one more or less", 15)


# --- none ------------------------------------------------------------------------------------------------------


@pytest.mark.real
@pytest.mark.timeout(900)
class TestAHealthyServer:
    plugins = ()

    def test_stays_silent_under_the_same_load(self, watched: Watched) -> None:
        before = watched.verdicts()["kv-block-leak"]
        for _ in range(MOST_BATCHES):
            assert all(completion.succeeded for completion in watched.serve_batch())
        load = watched.start_long_load(HEALTHY_LONG_LOAD_REQUESTS)
        assert all(completion.succeeded for completion in load.results(2 * LOAD_TIMEOUT_S))
        watched.wait_for_scrape()
        after = watched.verdicts()["kv-block-leak"]
        assert (after["state"], after["since"]) == ("clear", before["since"])
        assert watched.alarms.changes == []

    def test_is_stuck_when_its_worker_hangs_under_load(self, watched: Watched) -> None:
        load = watched.engine.hang_under_load()
        try:
            stopped = time.monotonic()
            found = watched.wait_for(
                lambda found: found["engine-stuck"]["state"] == "page", "the hang is seen", 2 * STUCK_WITHIN_S
            )
            assert time.monotonic() - stopped <= STUCK_WITHIN_S
        finally:
            watched.engine.sigcont_worker()
        assert found["engine-stuck"]["evidence"]["running"] > 0
        assert found["engine-stuck"]["symptom_of"] is None
        assert found["kv-block-leak"]["state"] == "clear"
        assert all(completion.succeeded for completion in load.results())


@pytest.mark.real
@pytest.mark.timeout(900)
def test_a_start_that_is_refused_is_a_failed_start_of_unknown_cause(
    daemon: OomwatchDaemon, refused: tuple[VllmEngine, Future[list[str]]]
) -> None:
    engine, starts = refused
    errors = starts.result(2 * START_TIMEOUT_S)
    assert len(errors) == 2
    assert all("max seq len (4096)" in error for error in errors), "it failed for another reason than it should"
    name = _name_of(daemon, engine) or ""

    def failed_starts() -> int:
        verdict = verdicts_of(daemon, name).get("startup-oom")
        return int(verdict["evidence"].get("failed_starts", 0)) if verdict else 0

    wait_until(lambda: failed_starts() == len(errors), FAILED_START_SEEN_WITHIN_S, "both starts count as failed")
    found = verdicts_of(daemon, name)["startup-oom"]
    assert found["state"] == "info"
    assert found["evidence"]["cause"] == "unknown"
    assert "2 starts in a row" in found["summary"]
