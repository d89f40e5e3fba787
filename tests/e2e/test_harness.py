"""The real programs behave as the tests built on them assume."""

from __future__ import annotations

import contextlib
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import requests

from oomwatch.diagnose.postmortem import of_log
from oomwatch.plan.memory import Device, Figure, Setup, plan
from oomwatch.plan.model import read_model
from tests.e2e.conftest import StartPrometheus
from tests.e2e.engine import BLOCK_TOKENS, MAX_MODEL_LEN, MODEL_NAME, POOL_BLOCKS, Role, VllmEngine
from tests.e2e.processes import ServerError, ServerProcess, free_port, patient_get, wait_until
from tests.e2e.prometheus import PrometheusError, scrape_config
from tests.e2e.vllm_setup import VllmVenv

USAGE = "vllm:kv_cache_usage_perc"
PREEMPTIONS = "vllm:num_preemptions_total"


@pytest.mark.real
@pytest.mark.timeout(420)
class TestVllmEngine:
    def test_runs_as_server_scheduler_and_worker(self, vllm_engine: VllmEngine) -> None:
        roles = [process.role for process in vllm_engine.processes() if process.role is not Role.OTHER]

        assert roles == [Role.MAIN, Role.ENGINE_CORE, Role.WORKER]
        assert vllm_engine.processes()[0].pid == vllm_engine.pid

    def test_prints_the_pool_that_plan_reckons(self, vllm_engine: VllmEngine, vllm_venv: VllmVenv) -> None:
        model = read_model(vllm_venv.models / MODEL_NAME)
        device = Device("CPU", Figure.exact(16 * 1024**3, "a test"))
        setup = Setup((0, 32, 0), max_model_len=MAX_MODEL_LEN, block_size=BLOCK_TOKENS, kv_cache_memory_bytes=1024**3)
        whole = plan(model, device, setup).pool
        cut = plan(model, device, replace(setup, num_gpu_blocks_override=POOL_BLOCKS)).pool

        assert whole is not None
        assert cut is not None
        log = vllm_engine.log()
        assert f"Overriding num_gpu_blocks={whole.blocks.value:.0f} with num_gpu_blocks_override={POOL_BLOCKS}" in log
        assert f"KV cache size: {cut.tokens.value:,.0f} tokens" in log
        assert f"for {MAX_MODEL_LEN} tokens per request: {cut.concurrency.value:.2f}x" in log
        assert sum(model.part_bytes(part) for part in model.parts()) == pytest.approx(model.files_bytes, rel=0.01)

    def test_its_log_has_nothing_wrong_after_the_fact(self, vllm_engine: VllmEngine) -> None:
        with vllm_engine.log_path.open("rb") as log:
            told = of_log("vllm.log", log, time.time())

        assert not told.found
        (start,) = told.story.starts
        assert start.version == "0.32.0"
        assert start.ready is not None
        assert start.pools["0"].tokens == POOL_BLOCKS * BLOCK_TOKENS

    def test_24_requests_fill_the_pool_and_preempt_each_other(self, vllm_engine: VllmEngine) -> None:
        load = vllm_engine.start_load(24)
        highest = 0.0
        while not load.finished:
            highest = max(highest, vllm_engine.metric(USAGE, engine="0") or 0.0)
            time.sleep(0.05)
        completions = load.results()

        assert [(completion.status, completion.completion_tokens) for completion in completions] == [(200, 300)] * 24
        assert highest > 0.9  # looked at 20 times a second at most: the moment when all is used may be missed
        assert (vllm_engine.metric(PREEMPTIONS, engine="0") or 0.0) > 20

    def test_returns_to_an_empty_pool_when_idle(self, vllm_engine: VllmEngine) -> None:
        vllm_engine.complete(4, max_tokens=16)

        wait_until(lambda: vllm_engine.metric(USAGE, engine="0") == 0.0, 10, "the pool is empty")
        assert vllm_engine.metric("vllm:num_requests_running", engine="0") == 0.0

    def test_clients_that_hang_up_leave_no_request_behind(self, vllm_engine: VllmEngine) -> None:
        assert vllm_engine.stream_and_disconnect(8) == 8

        wait_until(lambda: vllm_engine.metric("vllm:num_requests_running") == 0.0, 10, "no request is left")

    def test_a_stopped_worker_freezes_the_engine_behind_a_healthy_answer(self, vllm_engine: VllmEngine) -> None:
        vllm_engine.sigstop_worker()
        load = vllm_engine.start_load(2, max_tokens=8, timeout_s=60)
        try:
            with pytest.raises(TimeoutError, match="2 of 2 requests still open"):
                load.results(2)
            assert vllm_engine.says_healthy()
        finally:
            vllm_engine.sigcont_worker()

        assert all(completion.succeeded for completion in load.results(60))

    def test_prometheus_scrapes_the_engine(self, vllm_engine: VllmEngine, start_prometheus: StartPrometheus) -> None:
        prometheus = start_prometheus(scrape_config({"vllm": [f"127.0.0.1:{vllm_engine.port}"]}))

        (series,) = prometheus.wait_for('vllm:cache_config_info{num_gpu_blocks="33"}')

        assert series.labels["instance"] == f"127.0.0.1:{vllm_engine.port}"
        assert series.value == 1.0

    # The last test of the class: it ends the engine.
    def test_ends_as_a_whole_when_its_scheduler_is_killed(self, vllm_engine: VllmEngine) -> None:
        vllm_engine.kill_engine_core()

        wait_until(lambda: vllm_engine.exit_status() is not None, 60, "the server has ended")
        vllm_engine.stop()
        assert vllm_engine.session() == []


class TestPrometheusServer:
    def test_answers_queries_about_what_it_scraped(self, start_prometheus: StartPrometheus) -> None:
        unused = free_port()
        prometheus = start_prometheus(scrape_config({"gone": [f"127.0.0.1:{unused}"]}, interval_s=0.2))

        (up,) = prometheus.wait_for("up")

        assert up.labels["job"] == "gone"
        assert up.value == 0.0
        assert [series.value for series in prometheus.query("scalar(vector(7))")] == [7.0]

    def test_evaluates_rules(self, start_prometheus: StartPrometheus, tmp_path: Path) -> None:
        rules = tmp_path / "rules.yml"
        rules.write_text("groups: [{name: g, rules: [{record: always, expr: vector(3)}]}]\n", encoding="utf-8")
        prometheus = start_prometheus(scrape_config({}, interval_s=0.2, rule_files=[rules]))

        (always,) = prometheus.wait_for("always")

        assert always.value == 3.0

    def test_names_the_fault_of_a_bad_query(self, start_prometheus: StartPrometheus) -> None:
        prometheus = start_prometheus(scrape_config({}))

        with pytest.raises(PrometheusError, match="parse error"):
            prometheus.query("sum(")


class TestServerProcess:
    def test_a_program_that_ends_at_once_is_reported_with_its_output(self, tmp_path: Path) -> None:
        server = ServerProcess(
            ["sh", "-c", "echo no such device >&2; exit 3"],
            log_path=tmp_path / "log",
            ready_url=f"http://127.0.0.1:{free_port()}/",
            start_timeout_s=10,
        )

        with pytest.raises(ServerError, match=r"ended with status 3\nno such device"):
            server.start()

    def test_a_program_that_never_answers_is_ended_with_its_children(self, tmp_path: Path) -> None:
        server = ServerProcess(
            ["sh", "-c", "sleep 60 & sleep 60"],
            log_path=tmp_path / "log",
            ready_url=f"http://127.0.0.1:{free_port()}/",
            start_timeout_s=0.5,
        )

        with pytest.raises(ServerError, match=r"after 0\.5 s still not: http"):
            server.start()

        assert server.session() == []


class TestPatientGet:
    @staticmethod
    def answer_the_last(listening: socket.socket, requests_made: int) -> None:
        """Reads each request, and keeps its connection open without a word but for the last."""
        with contextlib.ExitStack() as open_until_the_end:
            for number in range(1, requests_made + 1):
                connection = open_until_the_end.enter_context(listening.accept()[0])
                connection.recv(4096)
                if number == requests_made:
                    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nlate")

    def test_asks_again_when_no_answer_comes_in_time(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listening, ThreadPoolExecutor(1) as server:
            served = server.submit(self.answer_the_last, listening, 3)

            answer = patient_get(f"http://127.0.0.1:{listening.getsockname()[1]}/", each_s=0.1, times=3)

            served.result(timeout=10)
        assert answer.text == "late"

    def test_gives_up_after_so_many_silences(self) -> None:
        with (
            socket.create_server(("127.0.0.1", 0)) as silent,
            pytest.raises(requests.ConnectionError, match="timed out"),
        ):
            patient_get(f"http://127.0.0.1:{silent.getsockname()[1]}/", each_s=0.1, times=2)

    def test_does_not_wait_for_a_server_that_is_gone(self) -> None:
        with pytest.raises(requests.ConnectionError, match="refused"):
            patient_get(f"http://127.0.0.1:{free_port()}/")
