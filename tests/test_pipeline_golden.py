"""Whole /metrics pages from the first byte to the last: the simulated driver and captured pages through real sources.

Nothing is handed over by the test itself: pynvml reads the simulated library, the scraper reads a page over HTTP, the
pipeline folds what they publish, and the page is rendered as it is served.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from oomwatch.judge import Judge
from oomwatch.node import Cadence, Node
from oomwatch.observations import EngineFacts, EngineUpdate, HostProcess, SourceRun
from oomwatch.pipeline import Pipeline
from oomwatch.snapshot import Snapshot
from oomwatch.sources.nvml import NvmlSource
from oomwatch.sources.vllm.client import EngineScraper
from tests.conftest import MakeSim
from tests.exposed import check_metrics, own_page
from tests.golden import GOLDEN, assert_golden
from tests.nvml_sim import GIB, MigSlice, Process, Sim, load_into_pynvml
from tests.sources.vllm.servers import Engine, FakeVllm

CAPTURES = Path(__file__).parent / "data" / "captures"
VERSIONS = sorted({path.parent.name for path in CAPTURES.glob("*/*saturated*.prom")})
NOW = 1_790_000_000.0

# Wall-clock values differ from one run to the next; that they are there is what the golden pages say.
_WALL_CLOCK = re.compile(r"^(oomwatch_(?:source_duration_seconds|nvml_(?:seconds|calls)_total)\b.*) \S+$", re.M)
_INSTALLATION = re.compile(r"^(oomwatch_build_info)\{.*\}", re.M)
_PORT = re.compile(r"127\.0\.0\.1:\d+")


def node_of(sim: Sim) -> None:
    """Three GPUs: one with an engine and a stranger, one idle, one cut into slices."""
    sim.set_processes(0, [Process(4711, 66 * GIB), Process(815, 2 * GIB, name="python3")], used=69 * GIB)
    sim.enable_mig(2)
    sim.add_mig(2, MigSlice(1, total=20 * GIB, used=3 * GIB))
    sim.add_mig(2, MigSlice(2, total=20 * GIB))


def page_of(library: Path, sim: Sim, capture: Path, version: str) -> str:
    """One cycle of every source, folded and rendered."""
    pipeline = Pipeline(Judge(Node(Cadence())))
    pipeline.start()
    facts = EngineFacts("llm", "http://127.0.0.1:8000/metrics", pids=(4711,), origin="discovery")
    pipeline.publish(EngineUpdate(NOW, facts))
    pipeline.publish(HostProcess(NOW, 4711, NOW - 3600, 8 * GIB, 6 * GIB, "VLLM::EngineCore", engine="llm"))
    with load_into_pynvml(library, sim), Engine(FakeVllm(capture.read_bytes(), version)) as server:
        nvml = NvmlSource(pipeline.publish, deadline=20.0, clock=lambda: NOW)
        scraper = EngineScraper("llm", server.url, clock=lambda: NOW)
        try:
            nvml.refresh()
            nvml.poll_all()
            scrape = scraper.scrape(facts)
        finally:
            scraper.close()
            nvml.close()
    pipeline.publish(scrape)
    pipeline.publish(SourceRun(NOW, "vllm", "llm", scrape.answered, scrape.seconds, scrape.error))
    assert pipeline.flush(20)
    snapshot: Snapshot = pipeline.current
    pipeline.stop()
    page = own_page(snapshot)
    assert check_metrics(page.encode()) == ""
    page = _INSTALLATION.sub(r'\1{python_version="…",version="…"}', page)
    return _PORT.sub("127.0.0.1:…", _WALL_CLOCK.sub(r"\1 …", page))


@pytest.mark.parametrize("version", VERSIONS)
def test_a_current_driver_and_a_busy_engine_of(
    version: str, nvml_library: Path, make_sim: MakeSim, request: pytest.FixtureRequest
) -> None:
    busy = next(path for path in sorted((CAPTURES / version).glob("*.prom")) if "saturated" in path.name)
    sim = make_sim(3)
    node_of(sim)
    page = page_of(nvml_library, sim, busy, version.partition("-")[0])
    assert_golden(GOLDEN / "pipeline" / f"{version}.prom", page, request)


@pytest.mark.parametrize("variant", ["470", "525", "535.54"])
def test_an_old_driver(
    variant: str, nvml_variant: Callable[[str], Path], make_sim: MakeSim, request: pytest.FixtureRequest
) -> None:
    sim = make_sim(3, driver_version=f"{variant}.99")
    node_of(sim)
    capture = CAPTURES / "0.32.0" / "07-tiny-pool-idle-after-prefix-on.prom"
    page = page_of(nvml_variant(variant), sim, capture, "0.32.0")
    assert_golden(GOLDEN / "pipeline" / f"driver-{variant}.prom", page, request)
