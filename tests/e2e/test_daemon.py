"""The daemon as a whole, on the simulated driver and on pages that real engines gave.

Each part that is killed, hung or lost changes its own series and its own health, and nothing else.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import psutil
import pytest
import requests

from oomwatch.families import DERIVED
from tests.conftest import MakeSim
from tests.e2e.daemon import OomwatchDaemon, Page
from tests.e2e.processes import wait_until
from tests.nvml_sim import Process, Sim, environment
from tests.nvml_sim.layout import Family
from tests.sources.vllm.servers import Engine, FakeVllm, Request

CAPTURES = Path(__file__).parents[1] / "data" / "captures"
BUSY = CAPTURES / "0.32.0" / "06-tiny-pool-saturated-preempting.prom"
IDLE = CAPTURES / "0.32.0" / "07-tiny-pool-idle-after-prefix-on.prom"

GIB = 1024**3
FAST: dict[str, object] = {"gpu": "1s", "processes": "2s", "scrape": "1s", "host": "2s", "discovery": "1s"}

StartDaemon = Callable[..., OomwatchDaemon]


@pytest.fixture
def start_daemon(tmp_path: Path, nvml_library: Path) -> Iterator[StartDaemon]:
    """Starts a daemon that loads the simulated driver library; ``sim`` None: the library without a driver."""
    with contextlib.ExitStack() as running:

        def start(
            sim: Sim | None,
            engines: Mapping[str, str] | None = None,
            library: Path | None = nvml_library,
            discovery: bool = False,
            **more: object,
        ) -> OomwatchDaemon:
            folder = tmp_path / f"daemon-{len(list(tmp_path.glob('daemon-*')))}"
            folder.mkdir()
            config: dict[str, object] = {
                "engines": [{"name": name, "url": url, "timeout": "1s"} for name, url in (engines or {}).items()],
                "discovery": {"enabled": discovery},
                "intervals": FAST,
                "nvml": {"deadline": "1s"},
                **more,
            }
            variables = environment(library, sim) if library is not None else {}
            return running.enter_context(OomwatchDaemon(folder, config, environment=variables))

        yield start


# What is concluded of a subject comes by and by, whatever happens to another.
CONCLUDED = ("oomwatch_verdict_", "oomwatch_incident", *(derived.family.name for derived in DERIVED))

Identity = tuple[str, tuple[tuple[str, str], ...]]


def read_of(page: Page, label: str, value: str) -> set[Identity]:
    """Names and labels of the series that were read of one subject, without what was concluded of it."""
    return {
        (name, labels)
        for name, labels in page.identities()
        if (label, value) in labels and not name.startswith(CONCLUDED)
    }


def engines_of(page: Page, engine: str) -> set[Identity]:
    return read_of(page, "engine", engine)


def of_gpu(page: Page, uuid: str) -> set[Identity]:
    return read_of(page, "gpu", uuid)


def told_of(page: Page, uuid: str) -> set[Identity]:
    """What is told of a GPU, but for its index: one that leaves the count moves that of those behind it."""
    return {(name, labels) for name, labels in of_gpu(page, uuid) if name != "oomwatch_gpu_info"}


def used(page: Page, uuid: str) -> float | None:
    return page.value("oomwatch_gpu_memory_used_bytes", gpu=uuid)


class TestNodeWithoutAnything:
    def test_says_so_plainly_and_is_healthy(self, start_daemon: StartDaemon) -> None:
        daemon = start_daemon(None, library=None)
        page = daemon.wait_for(
            lambda page: page.value("oomwatch_nvml_state", state="library_missing") == 1, "the state is told"
        )
        assert not page.series("oomwatch_gpu_info")
        text = requests.get(daemon.url, timeout=10).text
        assert "driver library cannot be loaded" in text
        assert "No vLLM server was found" in text
        assert requests.get(f"{daemon.url}/-/healthy", timeout=10).status_code == 200

    def test_a_driver_that_arrives_later_needs_no_restart(self, start_daemon: StartDaemon, make_sim: MakeSim) -> None:
        sim = make_sim(1)
        sim.fail(Family.INIT, 9)
        daemon = start_daemon(sim)
        assert daemon.page().value("oomwatch_nvml_state", state="driver_not_loaded") == 1
        sim.clear(Family.INIT)
        page = daemon.wait_for(lambda page: used(page, sim.uuid(0)) is not None, "the GPU appears")
        assert page.value("oomwatch_nvml_state", state="ok") == 1


class TestDevices:
    def test_show_what_the_driver_says(self, start_daemon: StartDaemon, make_sim: MakeSim) -> None:
        sim = make_sim(2)
        sim.set_processes(0, [Process(os.getpid(), 3 * GIB)])
        page = start_daemon(sim).wait_for(lambda page: used(page, sim.uuid(0)) == 3 * GIB, "memory of GPU 0")
        assert used(page, sim.uuid(1)) == 0
        assert page.value("oomwatch_gpu_memory_total_bytes", gpu=sim.uuid(0)) == 80 * GIB
        assert page.value("oomwatch_gpu_memory_unowned_bytes", gpu=sim.uuid(0)) == 0

    @pytest.mark.parametrize("fault", ["lose", "vanish", "hang"])
    def test_one_that_fails_takes_only_its_own_series(
        self, start_daemon: StartDaemon, make_sim: MakeSim, fault: str
    ) -> None:
        sim = make_sim(3)
        broken, well = sim.uuid(1), (sim.uuid(0), sim.uuid(2))
        daemon = start_daemon(sim)
        before = daemon.wait_for(lambda page: len(page.series("oomwatch_gpu_memory_used_bytes")) == 3, "three GPUs")
        if fault == "hang":
            sim.hang(Family.MEMORY, device=1)
        else:
            getattr(sim, fault)(1)
        sim.set_memory(0, used=5 * GIB)
        daemon.wait_for(
            lambda page: used(page, broken) is None and used(page, well[0]) == 5 * GIB, f"GPU 1 is gone, after {fault}"
        )
        # On a busy machine a call about another GPU may miss its deadline once.
        after = daemon.wait_for(
            lambda page: all(told_of(page, uuid) == told_of(before, uuid) for uuid in well), "the others tell as before"
        )
        assert after.value("oomwatch_source_up", source="nvml", target=broken) == 0
        for uuid in well:
            assert after.value("oomwatch_source_up", source="nvml", target=uuid) == 1
        assert after.value("oomwatch_gpu_last_seen_timestamp_seconds", gpu=broken) is not None
        if fault == "hang":
            sim.release(Family.MEMORY, device=1)
        else:
            sim.heal(1)
        daemon.wait_for(lambda page: used(page, broken) is not None, "GPU 1 returns")

    def test_a_hung_call_delays_neither_pages_nor_the_end(self, start_daemon: StartDaemon, make_sim: MakeSim) -> None:
        sim = make_sim(2)
        daemon = start_daemon(sim)
        daemon.wait_for(lambda page: used(page, sim.uuid(0)) is not None, "GPU 0")
        sim.hang(Family.MEMORY, device=0)
        sim.wait_inflight(Family.MEMORY, 1, 10)
        before = time.monotonic()
        assert daemon.page().value("oomwatch_build_info") == 1
        assert time.monotonic() - before < 2
        before = time.monotonic()
        os.kill(daemon.pid, signal.SIGTERM)
        wait_until(lambda: daemon.exit_status() is not None, 10, "the daemon ends")
        assert daemon.exit_status() == 0
        assert time.monotonic() - before < 8

    def test_a_driver_that_hangs_as_a_whole_leaves_the_engines(
        self, start_daemon: StartDaemon, make_sim: MakeSim
    ) -> None:
        sim = make_sim(1)
        with Engine(FakeVllm(BUSY.read_bytes())) as server:
            daemon = start_daemon(sim, {"llm": server.url})
            daemon.wait_for(lambda page: used(page, sim.uuid(0)) is not None, "the GPU")
            sim.hang(Family.COUNT)
            page = daemon.wait_for(lambda page: page.value("oomwatch_nvml_state", state="hung") == 1, "hung", 30)
            assert page.value("oomwatch_engine_up", engine="llm") == 1
            sim.release(Family.COUNT)
            daemon.wait_for(lambda page: page.value("oomwatch_nvml_state", state="ok") == 1, "the driver returns", 30)

    def test_a_reload_of_the_driver_needs_no_restart(self, start_daemon: StartDaemon, make_sim: MakeSim) -> None:
        sim = make_sim(1)
        daemon = start_daemon(sim)
        daemon.wait_for(lambda page: used(page, sim.uuid(0)) is not None, "the GPU")
        sim.reload_driver("580.82.07")
        page = daemon.wait_for(
            lambda page: bool(page.series("oomwatch_nvml_info", driver_version="580.82.07")), "the new driver"
        )
        assert used(page, sim.uuid(0)) is not None

    def test_handles_are_given_back_and_taken_again(self, start_daemon: StartDaemon, make_sim: MakeSim) -> None:
        sim = make_sim(1)
        daemon = start_daemon(sim)
        daemon.wait_for(lambda page: used(page, sim.uuid(0)) is not None, "the GPU")
        assert daemon.post("/-/release").status_code == 200
        wait_until(lambda: sim.sessions() == 0, 10, "no session of the driver is open")
        page = daemon.wait_for(lambda page: used(page, sim.uuid(0)) is None, "its series are gone")
        assert page.value("oomwatch_nvml_state", state="released") == 1
        os.kill(daemon.pid, signal.SIGUSR1)
        daemon.wait_for(lambda page: used(page, sim.uuid(0)) is not None, "a second signal takes them back")
        os.kill(daemon.pid, signal.SIGUSR1)
        wait_until(lambda: sim.sessions() == 0, 10, "the signal gives them back, too")


class TestEngines:
    def test_one_that_fails_takes_only_its_own_series(self, start_daemon: StartDaemon, make_sim: MakeSim) -> None:
        first, second = FakeVllm(BUSY.read_bytes()), FakeVllm(IDLE.read_bytes())
        with Engine(first) as one, Engine(second) as two:
            daemon = start_daemon(make_sim(1), {"one": one.url, "two": two.url})
            before = daemon.wait_for(lambda page: len(page.series("oomwatch_engine_up")) == 2, "both engines")
            assert before.value("oomwatch_engine_kv_cache_usage_ratio", engine="one", rank="0") == 1
            first.page = b"<html>not metrics</html>\n"
            after = daemon.wait_for(lambda page: page.value("oomwatch_engine_up", engine="one") == 0, "one is down")
        assert after.value("oomwatch_engine_state", engine="one", state="not_metrics") == 1
        assert after.value("oomwatch_engine_kv_cache_usage_ratio", engine="one", rank="0") is None
        assert after.value("oomwatch_engine_last_seen_timestamp_seconds", engine="one") is not None
        assert engines_of(after, "two") == engines_of(before, "two")

    def test_one_that_does_not_answer_in_time_delays_no_other(
        self, start_daemon: StartDaemon, make_sim: MakeSim
    ) -> None:
        with Engine(FakeVllm(IDLE.read_bytes())) as server, Engine(lambda request: request.hang()) as silent:
            daemon = start_daemon(make_sim(1), {"silent": silent.url, "well": server.url})
            page = daemon.wait_for(
                lambda page: page.value("oomwatch_engine_state", engine="silent", state="timeout") == 1, "a timeout"
            )
            assert page.value("oomwatch_engine_up", engine="well") == 1

    def test_the_past_of_an_engine_stays_for_people_only(self, start_daemon: StartDaemon, make_sim: MakeSim) -> None:
        with Engine(FakeVllm(BUSY.read_bytes())) as server:
            daemon = start_daemon(make_sim(1), {"llm": server.url})
            daemon.wait_for(lambda page: page.value("oomwatch_engine_up", engine="llm") == 1, "the engine")
        daemon.wait_for(lambda page: page.value("oomwatch_engine_up", engine="llm") == 0, "it is gone")
        (engine,) = daemon.status()["engines"]
        assert engine["state"] == "unreachable"
        assert engine["last_answer"]["ranks"][0]["kv_usage_ratio"] == 1
        assert "last seen" in requests.get(daemon.url, timeout=10).text.lower()


class TestReload:
    def test_takes_over_a_new_configuration(self, start_daemon: StartDaemon, make_sim: MakeSim) -> None:
        with Engine(FakeVllm(IDLE.read_bytes())) as server:
            daemon = start_daemon(make_sim(1))
            daemon.write_config(
                {
                    "engines": [{"name": "new", "url": server.url}],
                    "discovery": {"enabled": False},
                    "intervals": FAST,
                }
            )
            assert daemon.post("/-/reload").status_code == 200
            daemon.wait_for(lambda page: page.value("oomwatch_engine_up", engine="new") == 1, "the new engine")
            daemon.write_config({"discovery": {"enabled": False}, "intervals": FAST})
            os.kill(daemon.pid, signal.SIGHUP)
            daemon.wait_for(lambda page: not engines_of(page, "new"), "the engine left")

    def test_a_bad_file_keeps_the_old_one_and_says_why(self, start_daemon: StartDaemon, make_sim: MakeSim) -> None:
        with Engine(FakeVllm(IDLE.read_bytes())) as server:
            daemon = start_daemon(make_sim(1), {"llm": server.url})
            daemon.wait_for(lambda page: page.value("oomwatch_engine_up", engine="llm") == 1, "the engine")
            good = daemon.config_path.read_text(encoding="utf-8")
            daemon.config_path.write_text("intervals: {scrape: never}\nengin: []\n", encoding="utf-8")
            answer = daemon.post("/-/reload")
            assert answer.status_code == 500
            assert "intervals.scrape" in answer.text
            assert "engin" in answer.text
            page = daemon.page()
            assert page.value("oomwatch_config_last_reload_successful") == 0
            assert page.value("oomwatch_engine_up", engine="llm") == 1
            daemon.config_path.write_text(good, encoding="utf-8")
            assert daemon.post("/-/reload").status_code == 200
            assert daemon.page().value("oomwatch_config_last_reload_successful") == 1


def test_a_scrape_calls_neither_the_driver_nor_an_engine(start_daemon: StartDaemon, make_sim: MakeSim) -> None:
    sim = make_sim(2)
    asked: list[str] = []
    vllm = FakeVllm(IDLE.read_bytes())

    def counting(request: Request) -> None:
        asked.append(request.path)
        vllm(request)

    slow = dict.fromkeys(FAST, "300s")
    with Engine(counting) as server:
        daemon = start_daemon(sim, {"llm": server.url}, intervals=slow)
        daemon.wait_for(lambda page: page.value("oomwatch_engine_up", engine="llm") == 1, "the engine")
        daemon.wait_for(lambda page: used(page, sim.uuid(1)) is not None, "the GPUs")
        waits = {Family.EVENT_WAIT}
        mark, requests_before = sim.mark(), len(asked)
        for _ in range(20):
            daemon.page()
        calls = {family: count for family, count in sim.calls_by_family(since=mark).items() if count}
        assert not calls.keys() - waits
        assert len(asked) == requests_before


def test_a_port_that_is_taken_is_a_clear_error(start_daemon: StartDaemon, tmp_path: Path) -> None:
    first = start_daemon(None)
    folder = tmp_path / "second"
    folder.mkdir()
    command = ["--web.listen-address", f"127.0.0.1:{first.port}"]
    second = OomwatchDaemon(folder, {"discovery": {"enabled": False}}, arguments=command)
    with contextlib.suppress(Exception):
        second.start()
    wait_until(lambda: second.exit_status() is not None, 15, "the second daemon ends")
    assert second.exit_status() == 2
    assert str(first.port) in second.log()
    assert "--web.listen-address" in second.log()


def test_the_end_leaves_nothing_behind(start_daemon: StartDaemon, make_sim: MakeSim) -> None:
    sim = make_sim(1)
    daemon = start_daemon(sim)
    daemon.wait_for(lambda page: used(page, sim.uuid(0)) is not None, "the GPU")
    pid = daemon.pid
    os.kill(pid, signal.SIGINT)
    wait_until(lambda: daemon.exit_status() is not None, 10, "the daemon ends")
    assert daemon.exit_status() == 0
    assert sim.sessions() == 0
    assert not psutil.pid_exists(pid)
