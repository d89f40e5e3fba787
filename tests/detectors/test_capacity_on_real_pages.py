"""Pages of real vLLM servers, served over and over: what hangs is found, what works is left alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from oomwatch.detectors.base import State
from oomwatch.detectors.registry import KINDS
from oomwatch.judge import Judge
from oomwatch.node import Node
from oomwatch.observations import EngineFacts, EngineScrape, EngineUpdate, Tick
from oomwatch.sources.vllm.meaning import read_page
from oomwatch.sources.vllm.pages import Page, read
from oomwatch.verdicts import Verdict

CAPTURES = Path(__file__).parents[1] / "data" / "captures"
VERDICTS = (
    "kv-exhaustion",
    "preemption-pressure",
    "admission-stall",
    "ranks-unbalanced",
    "engine-stuck",
    "concurrency-low",
    "kv-tail-waste",
)
NEW = "0.32.0"
ALL_PAGES = sorted(path.relative_to(CAPTURES).as_posix() for path in CAPTURES.glob("*/*.prom"))


def page(name: str) -> Page:
    return read((CAPTURES / name).read_bytes())


def version_of(name: str) -> str:
    """0.8.5 of 0.8.5-V0-fakeworker/03-idle-after.prom."""
    return Path(name).parts[0].partition("-")[0]


class Server:
    """A server whose page changes as told; scraped every 15 s, judged after each scrape."""

    def __init__(self, version: str, max_model_len: int = 512) -> None:
        self._judge = Judge(Node(), kinds=tuple(kind for kind in KINDS if kind.verdict in VERDICTS))
        self._facts = EngineFacts(name="tiny", vllm_version=version, max_model_len=max_model_len)
        self._judge.apply(EngineUpdate(0.0, self._facts))
        self.t = 0.0
        self.worst: dict[str, State] = {}

    def show(self, name: str, seconds: float) -> None:
        body = page(name)
        for _ in range(int(seconds / 15)):
            self.t += 15.0
            meaning = read_page(body, self._facts.vllm_version, self._facts)
            scrape = EngineScrape(self.t, "tiny", meaning.state, 0.01, ranks=meaning.ranks)
            self._judge.apply(scrape)
            self._judge.apply(Tick(self.t))
            for verdict in self._judge.verdicts():
                if verdict.level > 1:
                    self.worst[verdict.name] = max(self.worst.get(verdict.name, "clear"), verdict.state, key=_level)

    def verdicts(self) -> tuple[Verdict, ...]:
        return self._judge.verdicts()

    def verdict(self, name: str) -> Verdict:
        return next(verdict for verdict in self._judge.verdicts() if verdict.name == name)


def _level(state: State) -> int:
    return ("unknown", "clear", "info", "ticket", "page").index(state)


def test_a_stopped_worker_under_load_is_a_stuck_engine() -> None:
    server = Server(NEW)
    server.show("0.32.0/05-tiny-pool-start.prom", 600)
    server.show("0.32.0/60-worker-sigstopped-16s.prom", 180)
    assert server.worst == {}
    server.show("0.32.0/60-worker-sigstopped-16s.prom", 60)
    found = server.verdict("engine-stuck")
    assert found.state == "page"
    assert (found.evidence["running"], found.evidence["waiting"]) == (5.0, 19.0)


def test_a_pool_that_leaked_until_nothing_fits_is_a_stuck_engine() -> None:
    server = Server(NEW)
    server.show("0.32.0/05-tiny-pool-start.prom", 600)
    server.show("0.32.0/80-kvleak-exhausted-deadlock.prom", 240)
    found = server.verdict("engine-stuck")
    assert found.state == "page"
    assert (found.evidence["running"], found.evidence["waiting"]) == (0.0, 8.0)
    # The pool is full: what waits is not stalled beside a pool with room.
    assert "admission-stall" not in server.worst


def test_requests_sent_to_an_engine_that_hung_while_idle_show_nowhere() -> None:
    server = Server(NEW)
    server.show("0.32.0/61-worker-stopped-while-idle-then-24-requests.prom", 3600)
    assert server.worst == {}


def test_a_first_batch_that_stalls_is_within_the_grace() -> None:
    server = Server("0.27.1")
    server.show("0.27.1/01-start-no-requests.prom", 60)
    server.show("0.27.1/02-first-batch-stalled-gauges-read-zero.prom", 300)
    server.show("0.27.1/03-idle-after.prom", 600)
    assert server.worst == {}


def test_a_saturated_pool_is_no_stuck_engine_for_two_minutes() -> None:
    server = Server(NEW)
    server.show("0.32.0/05-tiny-pool-start.prom", 600)
    server.show("0.32.0/06-tiny-pool-saturated-preempting.prom", 150)
    server.show("0.32.0/07-tiny-pool-idle-after-prefix-on.prom", 3600)
    assert server.worst == {}


def test_a_frozen_rank_beside_a_working_one_is_found() -> None:
    server = Server(NEW)
    server.show("0.32.0/31-dp2-saturated.prom", 15)
    server.show("0.32.0/33-dp2-one-enginecore-killed.prom", 600)
    assert server.verdict("engine-stuck").state == "page"
    assert server.verdict("engine-stuck").evidence["ranks"] == ["1"]


def test_statistics_switched_off_are_unknown() -> None:
    server = Server(NEW)
    server.show("0.32.0/52-disable-log-stats.prom", 900)
    assert server.verdict("engine-stuck").state == "unknown"


def test_a_concurrency_of_two_requests_is_fine() -> None:
    server = Server(NEW)
    server.show("0.32.0/05-tiny-pool-start.prom", 60)
    assert server.verdict("concurrency-low").state == "clear"
    assert server.verdict("concurrency-low").evidence["max_concurrency"] == pytest.approx(1056 / 512, abs=0.01)


@pytest.mark.parametrize("name", [name for name in ALL_PAGES if "idle" in name and "stopped" not in name])
def test_an_idle_server_of_any_version_is_silent_for_an_hour(name: str) -> None:
    server = Server(version_of(name))
    server.show(name, 3600)
    assert server.worst == {}


@pytest.mark.parametrize("name", ALL_PAGES)
def test_every_page_says_why_a_verdict_is_unknown(name: str) -> None:
    server = Server(version_of(name))
    server.show(name, 45)
    for verdict in server.verdicts():
        assert verdict.state != "unknown" or verdict.reason
