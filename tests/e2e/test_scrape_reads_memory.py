"""A scrape of /metrics is answered from memory: it neither calls the driver nor asks an engine."""

from __future__ import annotations

from pathlib import Path

from tests.conftest import MakeSim
from tests.e2e.daemon import OomwatchDaemon, intervals
from tests.e2e.processes import wait_until
from tests.nvml_sim import environment
from tests.nvml_sim.layout import Family
from tests.sources.vllm.captures import capture
from tests.sources.vllm.servers import Engine, FakeVllm


def test_a_scrape_calls_neither_driver_nor_engine(tmp_path: Path, nvml_library: Path, make_sim: MakeSim) -> None:
    sim = make_sim(2)
    with Engine(FakeVllm(capture("0.32.0/06"))) as engine:
        config = {
            "engines": [{"name": "chat", "url": engine.url}],
            "discovery": {"enabled": False},
            "intervals": intervals("300s"),
            "history": {"directory": str(tmp_path)},
        }
        with OomwatchDaemon(tmp_path, config, environment=environment(nvml_library, sim)) as daemon:
            daemon.wait_for(
                lambda page: page.value("oomwatch_source_up", source="vllm", target="chat") == 1, "the engine is read"
            )
            wait_until(lambda: "/health" in engine.paths, 10, "its first scrape is over")
            mark, asked = sim.mark(), len(engine.paths)
            pages = [daemon.page() for _ in range(20)]
            assert pages[-1].value("oomwatch_gpu_memory_total_bytes", gpu=sim.uuid(1)) is not None
            assert sim.calls_by_family(since=mark).keys() <= {Family.EVENT_WAIT}  # the thread that waits for Xids
            assert len(engine.paths) == asked
