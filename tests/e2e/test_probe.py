"""The probe inside a real vLLM: it knows who holds each block, at each moment, and the engine does not notice.

One server serves all tests, in their order: healthy first, then leaking, then robbed of its probe, then killed.
"""

from __future__ import annotations

import shutil
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path

import psutil
import pytest
import requests

from oomwatch.detectors.base import LEVEL
from oomwatch.probe_layout import Absence, Report
from oomwatch_probe.mailbox import own_identity, remove_leftovers
from tests.e2e import kvleak
from tests.e2e.conftest import StartEngine
from tests.e2e.daemon import OomwatchDaemon, Page, intervals
from tests.e2e.engine import MODEL_NAME, POOL_BLOCKS, Role, VllmEngine
from tests.e2e.model import FIRST_BYTE_TOKEN
from tests.e2e.probe import ProbeFolder, install_probe, number
from tests.e2e.processes import wait_until

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]

USABLE_BLOCKS = POOL_BLOCKS - 1
WATCHED = "watched"
MOST_LOADS = 20  # a fast machine is through with one before it is counted often
SHARED_PREFIX_TOKENS = 96  # three blocks of 32


@dataclass(frozen=True)
class Probed:
    engine: VllmEngine
    probe: ProbeFolder
    installed: Path
    leaking: Path
    """The engine leaks while this file is there."""

    def complete_with_shared_prefix(self, n: int) -> int:
        """How many of ``n`` requests at once, whose prompts begin alike, were served."""
        prompt = [FIRST_BYTE_TOKEN + index % 7 for index in range(SHARED_PREFIX_TOKENS)]
        bodies = [
            {"model": MODEL_NAME, "prompt": [*prompt, FIRST_BYTE_TOKEN + index], "max_tokens": 60, "ignore_eos": True}
            for index in range(n)
        ]

        def post(body: dict[str, object]) -> bool:
            return (
                requests.post(f"{self.engine.url}/v1/completions", json=body, timeout=60).status_code == HTTPStatus.OK
            )

        with ThreadPoolExecutor(n) as pool:
            return sum(pool.map(post, bodies))


@pytest.fixture(scope="module")
def probed(start_vllm: StartEngine, tmp_path_factory: pytest.TempPathFactory) -> Probed:
    folder = tmp_path_factory.mktemp("probe")
    installed = install_probe(folder / "installed")
    probe = ProbeFolder(folder / "run")
    leaking = folder / "leaking"
    engine = start_vllm(
        environment={**probe.environment, **kvleak.ENVIRONMENT, "KVLEAK_WHILE": str(leaking)},
        plugins=(kvleak.PLUGIN,),
        python_path=(installed,),
    )
    return Probed(engine, probe, installed, leaking)


def while_busy(counts: list[Report]) -> list[Report]:
    return [report for report in counts if number(report, "requests_living") > 0]


def owners(report: Report) -> tuple[int, int, int]:
    return number(report, "blocks_living"), number(report, "blocks_finished"), number(report, "blocks_ownerless")


def test_the_probe_is_installed_with_nothing_else(probed: Probed) -> None:
    packages = sorted(path.name.partition("-")[0] for path in probed.installed.iterdir())
    assert packages == ["oomwatch_probe", "oomwatch_probe"]
    (metadata,) = probed.installed.glob("*.dist-info/METADATA")
    assert "Requires-Dist" not in metadata.read_text(encoding="utf-8")


class TestAHealthyServer:
    def test_tells_of_its_pool_before_the_first_request(self, probed: Probed) -> None:
        report = probed.probe.wait_for(lambda report: number(report, "blocks_total") > 0, "the pool is counted")
        (core,) = (one for one in probed.engine.processes() if one.role is Role.ENGINE_CORE)
        assert number(report, "pid") == core.pid
        assert number(report, "blocks_total") == number(report, "blocks_free") == USABLE_BLOCKS
        assert owners(report) == (0, 0, 0)
        assert (report.texts["vllm_version"], report.texts["kv_connector"]) == ("0.32.0", "")

    def test_has_no_file_for_a_process_that_has_nothing_to_tell(self, probed: Probed) -> None:
        assert len(probed.probe.reports()) == 1

    def test_of_its_blocks_each_is_held_by_a_living_request_at_every_count(self, probed: Probed) -> None:
        engine = probed.engine
        with probed.probe.collected() as counts:
            for _ in range(MOST_LOADS):
                load = engine.start_load(24)
                assert engine.stream_and_disconnect(6) == 6
                assert probed.complete_with_shared_prefix(6) == 6
                assert all(completion.succeeded for completion in load.results())
                if len(while_busy(counts)) > 20 and (engine.metric("vllm:num_preemptions_total") or 0) > 0:
                    break
            probed.probe.wait_for(
                lambda report: number(report, "requests_living") == 0 and owners(report) == (0, 0, 0), "it is idle"
            )
        assert (engine.metric("vllm:prefix_cache_hits_total") or 0) > 0
        assert (engine.metric("vllm:num_preemptions_total") or 0) > 0
        busy = while_busy(counts)
        assert len(busy) > 20
        assert max(number(report, "blocks_referenced") for report in busy) > 0.9 * USABLE_BLOCKS
        for report in counts:
            assert number(report, "blocks_total") == USABLE_BLOCKS
            assert number(report, "blocks_referenced") == USABLE_BLOCKS - number(report, "blocks_free")
            assert owners(report) == (number(report, "blocks_referenced"), 0, 0)

    def test_keeps_what_a_prefix_can_hit_among_its_free_blocks(self, probed: Probed) -> None:
        assert probed.complete_with_shared_prefix(1) == 1
        report = probed.probe.wait_for_count()
        cached = number(report, "blocks_free_cached")
        assert SHARED_PREFIX_TOKENS / 32 <= cached <= number(report, "blocks_free") == USABLE_BLOCKS
        hits = probed.engine.metric("vllm:prefix_cache_hits_total") or 0
        assert probed.complete_with_shared_prefix(1) == 1
        assert probed.engine.metric("vllm:prefix_cache_hits_total") == hits + SHARED_PREFIX_TOKENS

    def test_has_no_allocator_to_tell_of_without_a_gpu(self, probed: Probed) -> None:
        assert probed.probe.core().numbers["allocated_bytes"] is Absence.NOT_YET


class TestALeakingServer:
    def test_its_lost_blocks_are_counted_exactly(self, probed: Probed) -> None:
        probed.leaking.touch()
        counted = []
        for _ in range(3):
            load = probed.engine.start_load(8, max_tokens=64)
            assert all(completion.succeeded for completion in load.results())
            report = probed.probe.wait_for(lambda report: number(report, "requests_living") == 0, "it is idle")
            report = probed.probe.wait_for_count()
            assert owners(report) == (0, 0, kvleak.lost_blocks(probed.engine))
            counted.append(kvleak.lost_blocks(probed.engine))
        assert 0 < counted[0] < counted[1] < counted[2]

    def test_they_are_told_apart_from_those_of_living_requests(self, probed: Probed) -> None:
        lost = kvleak.lost_blocks(probed.engine)
        probed.leaking.unlink()
        with probed.probe.collected() as counts:
            assert all(completion.succeeded for completion in probed.engine.start_load(6, max_tokens=100).results())
        busy = [report for report in counts if number(report, "blocks_living") > 0]
        assert busy
        assert {number(report, "blocks_ownerless") for report in counts} == {lost}


@pytest.fixture(scope="module")
def daemon(probed: Probed, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OomwatchDaemon]:
    config = {
        "intervals": intervals("1s"),
        "probe": {"directory": str(probed.probe.path), "interval": "1s"},
        "engines": [{"name": WATCHED, "url": probed.engine.url}],  # others may run on this host
    }
    with OomwatchDaemon(tmp_path_factory.mktemp("daemon"), config) as daemon:
        yield daemon


class TestTheDaemonBesideIt:
    """By now blocks are lost, and the daemon has just come."""

    def test_shows_whose_each_block_is(self, probed: Probed, daemon: OomwatchDaemon) -> None:
        page = daemon.wait_for(lambda page: page.value("oomwatch_probe_files", state="told") == 1, "the probe is read")
        page = daemon.wait_for(lambda page: bool(page.series("oomwatch_kv_blocks")), "the blocks are shown")
        series = page.series("oomwatch_kv_blocks", engine=WATCHED)
        blocks = {dict(labels)["ownership"]: value for labels, value in series.items()}
        assert sum(blocks.values()) == USABLE_BLOCKS
        assert blocks["ownerless"] == kvleak.lost_blocks(probed.engine)
        assert page.value("oomwatch_source_up", source="allocator", target=str(probed.probe.path)) == 1

    def test_proves_the_loss_within_seconds_while_requests_run(self, probed: Probed, daemon: OomwatchDaemon) -> None:
        lost = kvleak.lost_blocks(probed.engine)
        assert lost > 0.03 * USABLE_BLOCKS
        with ThreadPoolExecutor(1) as pool:
            busy = pool.submit(probed.engine.start_load(12, max_tokens=200).results)

            def proved(page: Page) -> bool:
                floor = page.value("oomwatch_engine_kv_floor_blocks", engine=WATCHED)
                state = page.value("oomwatch_verdict_state", verdict="kv-block-leak", engine=WATCHED)
                return floor == lost and (state or 0) >= LEVEL["ticket"]

            daemon.wait_for(proved, "the loss is proved", timeout_s=15)
            assert all(completion.succeeded for completion in busy.result())
        verdict = daemon.verdict("kv-block-leak", engine=WATCHED)
        assert verdict["evidence"]["method"] == "owners"
        assert verdict["confidence"] == 0.99


class TestAServerThatIsRobbedOfItsProbe:
    def serves(self, probed: Probed) -> None:
        assert all(completion.succeeded for completion in probed.engine.start_load(2, max_tokens=20).results())

    def test_does_not_notice_that_its_folder_was_removed(self, probed: Probed) -> None:
        shutil.rmtree(probed.probe.path)
        self.serves(probed)
        wait_until(lambda: len(probed.probe.reports()) == 1, 10, "the file is there again")

    def test_does_not_notice_that_the_probe_was_uninstalled(self, probed: Probed) -> None:
        shutil.rmtree(probed.installed)
        before = probed.probe.core().sequence
        self.serves(probed)
        probed.probe.wait_for(lambda report: report.sequence > before + 2, "the probe goes on until the process ends")

    def test_does_not_notice_that_it_was_installed_anew(self, probed: Probed) -> None:
        install_probe(probed.installed)
        self.serves(probed)

    def test_has_had_nothing_to_say_of_it(self, probed: Probed) -> None:
        assert "oomwatch" not in probed.engine.log().replace("oomwatch_probe -> oomwatch_probe:register", "")


class TestAServerThatEnds:
    def test_is_ended_by_a_signal_as_ever(self, probed: Probed) -> None:
        psutil.Process(probed.engine.pid).send_signal(signal.SIGINT)
        wait_until(lambda: probed.engine.exit_status() is not None, 30, "the server ends")
        assert probed.engine.exit_status() == 0
        wait_until(lambda: probed.engine.session() == [], 30, "its processes end")

    def test_leaves_no_file_that_the_next_one_does_not_remove(self, probed: Probed) -> None:
        """vLLM kills its engine core as soon as it ends itself (seen with 0.32.0)."""
        remove_leftovers(probed.probe.path, own_identity().pid_namespace)
        assert list(probed.probe.path.iterdir()) == []
