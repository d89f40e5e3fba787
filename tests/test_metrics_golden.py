"""Whole /metrics pages, byte for byte: hand-built snapshots, and the real pages of every captured vLLM version."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from oomwatch.node import Node
from oomwatch.observations import (
    STALE,
    DriverReport,
    EngineFacts,
    EngineScrape,
    EngineUpdate,
    GpuPoll,
    GpuProcess,
    HostProcess,
    SourceRun,
)
from oomwatch.snapshot import GpuView, Snapshot
from oomwatch.sources.vllm.meaning import read_page
from oomwatch.sources.vllm.pages import read
from tests.exposed import check_metrics, own_page
from tests.golden import GOLDEN, assert_golden
from tests.snapshots import GIB, NOW, bare, crowded, full, gpu, gpu_uuid, memory, unreachable

CAPTURES = Path(__file__).parent / "data" / "captures"
# Of the version with many captures, one page of each shape.
OF_0_32 = ("01", "03", "06", "21", "31", "33", "52", "80")


def captured_pages(version: str) -> list[Path]:
    pages = sorted((CAPTURES / version).glob("*.prom"))
    return [page for page in pages if version != "0.32.0" or page.name.startswith(OF_0_32)]


def golden_page(snapshot: Snapshot) -> str:
    """The page without what differs from one installation to the next."""
    return re.sub(
        r"^(oomwatch_build_info)\{.*\}", r'\1{python_version="…",version="…"}', own_page(snapshot), flags=re.M
    )


def node_with(version: str) -> Snapshot:
    """A node whose engines each answer with one captured page; the first holds most of the only device."""
    node = Node()
    node.apply(DriverReport(NOW, "ok", "", "580.82.07", "13.580.82.07", "13.0", 1))
    for number, path in enumerate(captured_pages(version)):
        name, release = path.stem, version.partition("-")[0]
        facts = EngineFacts(name, f"http://127.0.0.1:{8000 + number}/metrics", origin="discovery")
        reading = read_page(read(path.read_bytes()), release, facts)
        node.apply(EngineUpdate(NOW, facts))
        node.apply(
            EngineScrape(
                NOW,
                name,
                reading.state,
                0.012,
                reading.error,
                reading.ranks,
                reading.model_name,
                release,
                reading.process_start,
                reading.kv_connector,
                healthy=True,
            )
        )
        node.apply(SourceRun(NOW, "vllm", name, True, 0.012))
    first = captured_pages(version)[0].stem
    node.apply(
        HostProcess(NOW, 4711, NOW - 3600, 8 * GIB, 6 * GIB, "VLLM::EngineCore", engine=first, role="engine_core")
    )
    poll = gpu(0).poll
    assert isinstance(poll, GpuPoll)
    held = (GpuProcess(4711, 66 * GIB),)
    node.apply(GpuPoll(NOW, gpu_uuid(0), 0, poll.name, memory(), held, mig_enabled=False, pci_bus_id=poll.pci_bus_id))
    node.apply(SourceRun(NOW, "nvml", gpu_uuid(0), True, 0.004))
    return node.snapshot()


def without_answer(view: GpuView) -> GpuView:
    """A device that is still known and that the driver says nothing of."""
    return replace(view, poll=None, memory=STALE, processes=STALE, held=STALE, unowned=STALE, mig=())


def half_down() -> Snapshot:
    """Everything was there, and one engine and two devices no longer answer."""
    whole = full()
    first, second, sliced = whole.gpus
    serving, on_a_slice = whole.engines
    return Snapshot(
        NOW,
        driver=whole.driver,
        gpus=(without_answer(first), second, without_answer(sliced)),
        engines=(
            replace(unreachable(serving), gpu_memory=STALE, overhead=STALE),
            replace(on_a_slice, gpu_memory=STALE, overhead=STALE),
        ),
        sources=whole.sources,
        unresolved_gpu_pids=STALE,
    )


HAND_BUILT: dict[str, Callable[[], Snapshot]] = {
    "bare": bare,
    "full": full,
    "half-down": half_down,
    "many-processes": lambda: crowded(1, 40, 2),
}


@pytest.mark.parametrize("name", HAND_BUILT)
def test_a_hand_built_node(name: str, request: pytest.FixtureRequest) -> None:
    assert_golden(GOLDEN / "metrics" / f"{name}.prom", golden_page(HAND_BUILT[name]()), request)


@pytest.mark.parametrize("version", sorted(path.name for path in CAPTURES.iterdir() if path.is_dir()))
def test_the_pages_of_a_vllm_version(version: str, request: pytest.FixtureRequest) -> None:
    page = golden_page(node_with(version))
    assert check_metrics(page.encode()) == ""
    assert_golden(GOLDEN / "metrics" / f"vllm-{version}.prom", page, request)
