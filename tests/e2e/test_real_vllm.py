"""The daemon beside a real vLLM server: it is told nothing but how often to look.

The tests of a class share one server, which the last of them kills. The server's pool has 33 blocks of 32 tokens, one
of which vLLM keeps for itself.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import requests

from tests.e2e.conftest import StartEngine
from tests.e2e.daemon import OomwatchDaemon, Page, intervals
from tests.e2e.engine import BLOCK_TOKENS, POOL_BLOCKS, REQUEST_TIMEOUT_S, Role, VllmEngine
from tests.e2e.processes import wait_until
from tests.e2e.prometheus import PrometheusServer, scrape_config
from tests.e2e.vllm_setup import VllmVenv

INTERVAL_S = 2.0
TWO_INTERVALS_S = 2 * INTERVAL_S
# Frozen means: no counter moved for three intervals. Up to one more passes until the scrape that sees the last move,
# and up to one until the scrape that ends the third, or two where the jitter of scrapes makes the third too short by a
# hair. The last one is for a machine that is busy with the server itself.
FROZEN_WITHIN_S = 7 * INTERVAL_S
CONFIG: dict[str, object] = {"intervals": intervals(f"{INTERVAL_S:g}s")}
# Two ranks are eight processes, each of which reads vLLM's modules for 13 s of processor time before it answers.
ENGINE_START_TIMEOUT_S = 480.0
USABLE_BLOCKS = POOL_BLOCKS - 1
PROMPT_TOKENS = 62

READINGS = (
    "kv_cache_usage_ratio",
    "kv_cache_used_blocks",
    "kv_cache_capacity_blocks",
    "running_requests",
    "waiting_requests",
    "waiting_for_capacity_requests",
    "preemptions_total",
    "prompt_tokens_total",
    "generation_tokens_total",
    "steps_total",
)
# What stays of an engine that has ended: who it was, how it is, and when it was last seen.
KEPT_WHEN_GONE = {
    f"oomwatch_engine_{name}"
    for name in (
        "info",
        "up",
        "state",
        "last_seen_timestamp_seconds",
        "last_progress_timestamp_seconds",
        "restarts_total",
    )
}


@dataclass(frozen=True)
class Watched:
    """A server that started beside a daemon that was there before, and what was seen meanwhile."""

    engine: VllmEngine
    daemon: OomwatchDaemon
    prometheus: PrometheusServer
    name: str
    page_before: str
    status_before: dict[str, Any]
    seconds_to_appear: float

    def status(self) -> dict[str, Any]:
        return status_of(self.daemon, self.engine)

    def html(self) -> str:
        return requests.get(self.daemon.url, timeout=10).text

    def state(self, page: Page) -> str:
        (present,) = (
            dict(labels)["state"]
            for labels, value in page.series("oomwatch_engine_state", engine=self.name).items()
            if value
        )
        return present

    def value(self, page: Page, name: str, **labels: str) -> float | None:
        return page.value(f"oomwatch_engine_{name}", engine=self.name, **labels)

    def number(self, page: Page, name: str, rank: int = 0) -> float:
        """The value of a series of a rank, below every other where there is none."""
        value = self.value(page, name, rank=str(rank))
        return float("-inf") if value is None else value

    def ranks(self, page: Page, name: str) -> dict[str, float]:
        """By rank: the values of one family."""
        found = page.series(f"oomwatch_engine_{name}", engine=self.name)
        return {dict(labels)["rank"]: value for labels, value in found.items()}

    def families(self, page: Page) -> set[str]:
        """Names of what is said of the engine itself, its verdicts left out."""
        return {
            name
            for name, labels in page.identities()
            if name.startswith("oomwatch_engine_") and ("engine", self.name) in labels
        }

    def readings(self, page: Page) -> dict[str, dict[str, float]]:
        """What the pages of the server said of its ranks."""
        return {name: values for name in READINGS if (values := self.ranks(page, name))}

    def wait_until_idle(self) -> Page:
        def idle(page: Page) -> bool:
            return (
                set(self.ranks(page, "kv_cache_used_blocks").values()) == {0}
                and set(self.ranks(page, "running_requests").values()) == {0}
                and set(self.ranks(page, "waiting_requests").values()) == {0}
            )

        return self.daemon.wait_for(idle, "no request and no used block is left", 30)


def status_of(daemon: OomwatchDaemon, engine: VllmEngine) -> dict[str, Any]:
    """What the API says of the server; there may be others on this machine."""
    (found,) = (each for each in daemon.status()["engines"] if each["target"] == engine.metrics_url)
    return dict(found)


@pytest.fixture(scope="class")
def watched(
    request: pytest.FixtureRequest, start_vllm: StartEngine, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Watched]:
    """A daemon, a Prometheus that scrapes it, then a server with the ``arguments`` of the class."""
    folder = tmp_path_factory.mktemp("daemon")
    (folder / "prometheus").mkdir()
    with contextlib.ExitStack() as running:
        daemon = running.enter_context(OomwatchDaemon(folder, CONFIG))
        jobs = {"oomwatch": [daemon.url.removeprefix("http://")]}
        prometheus = running.enter_context(PrometheusServer(folder / "prometheus", scrape_config(jobs)))
        status_before, page_before = daemon.status(), requests.get(daemon.url, timeout=10).text
        engine = start_vllm(arguments=request.cls.arguments, start_timeout_s=ENGINE_START_TIMEOUT_S)
        running.callback(engine.stop)
        answering_since = time.monotonic()
        name = status_of(daemon, engine)["name"]
        daemon.wait_for(lambda page: page.value("oomwatch_engine_up", engine=name) == 1, "the engine is up")
        seconds = time.monotonic() - answering_since
        yield Watched(engine, daemon, prometheus, name, page_before, status_before, seconds)


@pytest.mark.real
@pytest.mark.timeout(600)
class TestOneEngine:
    arguments = ()

    def test_is_found_without_being_named(self, watched: Watched) -> None:
        none_before = watched.status_before["engines"] == []
        assert none_before == ("No vLLM server was found on this node" in watched.page_before)
        assert watched.engine.metrics_url not in watched.page_before
        assert watched.engine.metrics_url in watched.html()
        assert watched.status()["origin"] == "discovery"

    def test_appears_within_two_intervals_of_its_first_answer(self, watched: Watched) -> None:
        assert watched.seconds_to_appear <= TWO_INTERVALS_S
        page = watched.daemon.page()
        failures = page.value("oomwatch_source_failures_total", source="vllm", target=watched.name)
        assert failures, "it was found while it was loading"
        assert watched.state(page) == "ok"

    def test_tells_its_version_and_how_it_was_started(self, watched: Watched, vllm_venv: VllmVenv) -> None:
        page = watched.daemon.page()
        version = vllm_venv.vllm_version
        assert watched.value(page, "info", vllm_version=version, model_name="tiny", origin="discovery") == 1
        assert watched.value(page, "max_model_length_tokens") == 512
        assert watched.value(page, "kv_cache_block_size_tokens") == BLOCK_TOKENS
        assert watched.value(page, "prefix_caching_enabled") == 1

    def test_has_its_processes_with_roles_and_memory(self, watched: Watched) -> None:
        roles = {"api_server": Role.MAIN, "engine_core": Role.ENGINE_CORE, "worker": Role.WORKER}
        page = watched.daemon.wait_for(
            lambda page: all(watched.value(page, "processes", role=role) == 1 for role in roles), "all have a role"
        )
        real = {process.role: process for process in watched.engine.processes()}
        by_pid = {process["pid"]: process for process in watched.status()["processes"]}
        for name, role in roles.items():
            resident = watched.value(page, "process_resident_bytes", role=name)
            anonymous = watched.value(page, "process_anonymous_bytes", role=name)
            assert resident is not None
            assert anonymous is not None
            assert resident == pytest.approx(real[role].rss_bytes, rel=0.2)
            assert 50e6 < anonymous < resident
            assert by_pid[real[role].pid]["role"] == name

    def test_has_its_log_found_and_its_start_read(self, watched: Watched) -> None:
        """The server's output goes to a file, which its processes show."""

        def told() -> bool:
            startup = watched.status().get("startup")
            return startup is not None and bool(startup["pools"]) and bool(startup["budgets"])

        wait_until(told, 30, "the log is read")
        startup = watched.status()["startup"]
        assert startup["phase"] == "serving"
        (pool,) = startup["pools"]
        assert (pool["rank"], pool["tokens"]) == ("0", POOL_BLOCKS * BLOCK_TOKENS)
        assert [budget["kv_pool"] for budget in startup["budgets"]] == [1 << 30]
        tokens = watched.daemon.page().value("oomwatch_engine_startup_kv_tokens", engine=watched.name, rank="0")
        assert tokens == POOL_BLOCKS * BLOCK_TOKENS

    def test_shows_a_pool_that_is_too_small_for_the_load(self, watched: Watched) -> None:
        load = watched.engine.start_load(72, concurrency=36)

        def overloaded(page: Page) -> bool:
            return (
                watched.number(page, "kv_cache_usage_ratio") >= 0.9
                and watched.number(page, "running_requests") > 0
                and watched.number(page, "waiting_for_capacity_requests") > 0
                and watched.number(page, "preemptions_total") > 0
            )

        page = watched.daemon.wait_for(overloaded, "the pool is full, requests wait and displace each other", 60)
        used = watched.number(page, "kv_cache_used_blocks")
        assert watched.state(page) == "ok"
        assert watched.number(page, "kv_cache_capacity_blocks") == USABLE_BLOCKS
        assert 0 < used <= USABLE_BLOCKS
        assert used == pytest.approx(watched.number(page, "kv_cache_usage_ratio") * USABLE_BLOCKS)
        assert watched.number(page, "waiting_requests") >= watched.number(page, "waiting_for_capacity_requests")
        assert watched.number(page, "generation_tokens_total") > 0
        assert all(completion.succeeded for completion in load.results())

    def test_prometheus_sees_the_same(self, watched: Watched) -> None:
        of = f'{{engine="{watched.name}",job="oomwatch"}}'
        watched.engine.start_load(12).results()
        (full,) = watched.prometheus.wait_for(f"max_over_time(oomwatch_engine_kv_cache_usage_ratio{of}[5m]) >= 0.6")
        (rate,) = watched.prometheus.wait_for(f"rate(oomwatch_engine_generation_tokens_total{of}[1m]) > 0")
        (blocks,) = watched.prometheus.wait_for(f"oomwatch_engine_kv_cache_capacity_blocks{of}")
        assert (full.labels["rank"], full.labels["engine"]) == ("0", watched.name)
        assert full.value <= 1
        assert rate.labels["rank"] == "0"
        assert blocks.value == USABLE_BLOCKS

    def test_is_idle_afterwards_with_every_token_counted(self, watched: Watched) -> None:
        before = watched.wait_until_idle()
        counters = ("prompt_tokens_total", "generation_tokens_total", "finished_requests_total")
        watched.engine.complete(4, prompt_tokens=PROMPT_TOKENS, max_tokens=16)

        def grown(page: Page) -> list[float]:
            return [
                sum(page.series(f"oomwatch_engine_{name}", engine=watched.name).values())
                - sum(before.series(f"oomwatch_engine_{name}", engine=watched.name).values())
                for name in counters
            ]

        watched.daemon.wait_for(lambda page: grown(page) == [4 * PROMPT_TOKENS, 4 * 16, 4], "all tokens are counted")
        page = watched.wait_until_idle()
        assert watched.number(page, "kv_cache_usage_ratio") == 0
        assert watched.state(page) == "ok"

    def test_keeps_no_block_of_clients_that_hung_up(self, watched: Watched) -> None:
        before = watched.number(watched.wait_until_idle(), "generation_tokens_total")
        assert watched.engine.stream_and_disconnect(8) == 8
        watched.daemon.wait_for(
            lambda page: watched.number(page, "generation_tokens_total") > before, "the streams were served"
        )
        page = watched.wait_until_idle()
        assert watched.number(page, "kv_cache_usage_ratio") == 0
        assert watched.number(page, "generation_tokens_total") < before + 8 * 300

    def test_is_frozen_while_its_worker_hangs_behind_a_green_health_check(self, watched: Watched) -> None:
        load = watched.engine.hang_under_load()
        try:
            stopped = time.monotonic()
            page = watched.daemon.wait_for(lambda page: watched.state(page) == "frozen", "frozen", 2 * FROZEN_WITHIN_S)
            assert time.monotonic() - stopped <= FROZEN_WITHIN_S
            assert watched.engine.says_healthy()
            later = watched.daemon.wait_for(
                lambda later: (
                    (watched.value(later, "last_seen_timestamp_seconds") or 0)
                    > (watched.value(page, "last_seen_timestamp_seconds") or 0)
                ),
                "one more scrape",
            )
            assert watched.value(later, "up") == 1
            assert watched.readings(later) == watched.readings(page)
            assert f"Engine {watched.name} is frozen" in watched.html()
        finally:
            watched.engine.sigcont_worker()
        continued = time.monotonic()
        page = watched.daemon.wait_for(lambda page: watched.state(page) == "ok", "ok again", 2 * TWO_INTERVALS_S)
        assert time.monotonic() - continued <= TWO_INTERVALS_S
        assert all(completion.succeeded for completion in load.results())
        assert watched.value(page, "restarts_total") == 0

    # The last test of the class: it ends the engine.
    def test_is_gone_within_a_second_of_its_end_and_its_last_values_stay(self, watched: Watched) -> None:
        watched.wait_until_idle()  # the last page may still tell of the requests of the test before
        for tokens in (300, 170):  # more than it lives to serve, and never all at their end at once
            watched.engine.start_load(50, concurrency=2, max_tokens=tokens)
        watched.daemon.wait_for(lambda page: watched.number(page, "running_requests") > 0, "requests run")
        killed_at = time.time()
        watched.engine.kill_worker()
        # vLLM's own end takes up to a second.
        wait_until(lambda: watched.engine.exit_status() is not None, 30, "the server has ended", interval_s=0.02)
        ended = time.monotonic()
        watched.daemon.wait_for(lambda page: not watched.readings(page), "no rank has a value", 2 * TWO_INTERVALS_S)
        assert time.monotonic() - ended <= 1

        gone = watched.daemon.wait_for(lambda page: watched.state(page) == "gone", "its processes have ended")
        assert watched.families(gone) == KEPT_WHEN_GONE
        assert watched.value(gone, "up") == 0
        last_seen = watched.value(gone, "last_seen_timestamp_seconds")
        assert last_seen is not None
        assert killed_at - TWO_INTERVALS_S <= last_seen <= killed_at + 1

        status = watched.status()
        assert (status["state"], status["ranks"], status["processes"]) == ("gone", [], [])
        assert status["last_answer"]["time"] == status["last_seen"] == pytest.approx(last_seen)
        (rank,) = status["last_answer"]["ranks"]
        assert rank["requests_running"] > 0
        assert 0 < rank["kv_blocks_used"] <= rank["kv_blocks_total"] == USABLE_BLOCKS
        page = watched.html()
        assert f"Engine {watched.name} has ended." in page
        assert "Not the present: last seen" in page
        of = f'{{engine="{watched.name}"}}'
        watched.prometheus.wait_for(f"absent(oomwatch_engine_kv_cache_usage_ratio{of})")
        (since,) = watched.prometheus.wait_for(f"time() - oomwatch_engine_last_seen_timestamp_seconds{of}")
        assert 0 < since.value < 60


@pytest.mark.real
@pytest.mark.timeout(600)
class TestTwoDataParallelRanks:
    arguments = ("--data-parallel-size=2",)

    def test_are_one_engine(self, watched: Watched) -> None:
        ours = {process.pid for process in watched.engine.processes()}
        owners = {
            engine["name"]
            for engine in watched.daemon.status()["engines"]
            if ours & {process["pid"] for process in engine["processes"]}
        }
        assert owners == {watched.name}
        page = watched.daemon.page()
        assert watched.value(page, "processes", role="api_server") == 2
        assert watched.value(page, "processes", role="worker") == 2
        for rank in ("DP0", "DP1"):
            assert watched.value(page, "processes", role="engine_core", process_rank=rank) == 1

    def test_leave_a_processor_to_the_programs_around_them(self, watched: Watched) -> None:
        every = os.sched_getaffinity(0)
        theirs = {one for process in watched.engine.processes() for one in os.sched_getaffinity(process.pid)}
        assert theirs < every or len(every) != 2

    def test_have_no_gauge_before_the_first_request(self, watched: Watched) -> None:
        page = watched.daemon.page()
        assert watched.state(page) == "no_traffic_yet"
        assert watched.value(page, "up") == 1
        assert watched.ranks(page, "preemptions_total") == {"0": 0, "1": 0}
        for gauge in ("kv_cache_usage_ratio", "kv_cache_used_blocks", "running_requests", "waiting_requests"):
            assert watched.ranks(page, gauge) == {}, f"{gauge} is not known, which is not 0"
        assert [rank["kv_usage_ratio"] for rank in watched.status()["ranks"]] == [None, None]

    def test_have_a_pool_each(self, watched: Watched) -> None:
        """vLLM says 66 blocks for both, the sum over the ranks."""
        page = watched.daemon.page()
        assert watched.ranks(page, "kv_cache_capacity_blocks") == {"0": USABLE_BLOCKS, "1": USABLE_BLOCKS}

    def test_are_counted_apart_and_never_summed(self, watched: Watched) -> None:
        # Long enough for several readings: usage swings while requests are preempted.
        load = watched.engine.start_load(64, concurrency=32)
        page = watched.daemon.wait_for(
            lambda page: all(
                watched.number(page, "kv_cache_usage_ratio", rank) >= 0.5
                and watched.number(page, "running_requests", rank) > 0
                for rank in (0, 1)
            ),
            "both pools are half full at least",
            60,
        )
        ratios, used = watched.ranks(page, "kv_cache_usage_ratio"), watched.ranks(page, "kv_cache_used_blocks")
        assert ratios.keys() == used.keys() == {"0", "1"}
        for rank, ratio in ratios.items():
            assert ratio <= 1
            assert used[rank] == pytest.approx(ratio * USABLE_BLOCKS)
        assert watched.state(page) == "ok"
        completions = load.results(64 // 32 * REQUEST_TIMEOUT_S)
        assert all(completion.succeeded for completion in completions)
        tokens = sum(completion.completion_tokens for completion in completions)
        watched.daemon.wait_for(
            lambda page: sum(watched.ranks(page, "generation_tokens_total").values()) == tokens, "all are counted"
        )
        assert watched.ranks(watched.wait_until_idle(), "kv_cache_usage_ratio") == {"0": 0, "1": 0}

    def test_are_frozen_one_by_one(self, watched: Watched) -> None:
        """The other rank works on, and so does the server's health check."""
        hanging = watched.engine.hang_under_load(rank=1)
        try:
            stopped = time.monotonic()
            working = watched.engine.start_load(200, concurrency=1, rank=0)
            page = watched.daemon.wait_for(lambda page: watched.state(page) == "frozen", "frozen", 2 * FROZEN_WITHIN_S)
            assert time.monotonic() - stopped <= FROZEN_WITHIN_S
            assert not working.finished
            assert "of rank 1" in watched.status()["error"]
            later = watched.daemon.wait_for(
                lambda later: (
                    watched.number(later, "generation_tokens_total") > watched.number(page, "generation_tokens_total")
                ),
                "rank 0 makes progress",
            )
            assert watched.state(later) == "frozen"
            assert watched.number(later, "steps_total", 1) == watched.number(page, "steps_total", 1)
        finally:
            watched.engine.sigcont_worker(rank=1)
        assert all(completion.succeeded for completion in hanging.results())
        watched.daemon.wait_for(lambda page: watched.state(page) == "ok", "ok again")

    # The last test of the class: it ends the engine.
    def test_end_together_when_one_scheduler_is_killed(self, watched: Watched) -> None:
        watched.engine.kill_engine_core(1)
        gone = watched.daemon.wait_for(lambda page: watched.state(page) == "gone", "the engine has ended", 60)
        assert watched.families(gone) == KEPT_WHEN_GONE
        ranks = watched.status()["last_answer"]["ranks"]
        assert [(rank["rank"], rank["kv_blocks_total"]) for rank in ranks] == [
            ("0", USABLE_BLOCKS),
            ("1", USABLE_BLOCKS),
        ]
