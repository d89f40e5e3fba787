"""From a node to the person on call: daemon, Prometheus with our rules, Alertmanager with our configuration, receiver.

Everything happens at once, under both versions: a story of each killer, a healthy node, an engine of eight ranks, one
that flaps. In the middle each program is restarted. Each test then reads what the receivers were told.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e.alert_chain import CLUSTER, RESEND_S, AlertChain, Notification
from tests.e2e.daemon import OomwatchDaemon
from tests.e2e.tools import VERSIONS
from tests.sources.vllm.captures import capture
from tests.sources.vllm.servers import Engine, FakeVllm, Request

pytestmark = pytest.mark.timeout(900)

SPEED = "4"
# A page of a full pool needs two minutes of the engine's own work before, which a story must leave it; and none may
# come round to its next page before all have been told.
SPEEDS = {"capacity": "2", "leak": "2"}
RANKS = 8
FROZEN_S, MOVING_S = 7.0, 4.0
FLAPS = 3
# As short as they may be; what they compare is as shipped, but for numbers of requests in a window.
THRESHOLDS = {
    "kv_exhaustion": {
        "rate_window": "10s",
        "preemption_window": "20s",
        "after": "5s",
        "page_after": "10s",
        "baseline_minutes": 1,
    },
    "preemption_pressure": {"window": "20s", "after": "10s", "least_finished": 10, "hold": "0s"},
    "allocator_fragmentation": {"warm_up": "5s", "retry_window": "5s", "shortage_time": "10s"},
    "engine_stuck": {"after": "2s", "start_grace": "1s", "hold": "0s"},
}

# What each story is told as: receivers and alerts in their order.
STORIES: Mapping[str, tuple[tuple[str, str], ...]] = {
    "capacity": (("ticket", "OomwatchKvExhaustion"), ("page", "OomwatchKvExhaustion")),
    "fragmentation": (("ticket", "OomwatchAllocatorFragmentation"), ("page", "OomwatchRuntimeOom")),
    "leak": (("ticket", "OomwatchKvBlockLeak"), ("page", "OomwatchKvBlockLeak")),
}


def page_of_ranks(page: bytes, ranks: int) -> bytes:
    """The page of a server with one rank as one with several has it: each series once for each of them."""
    lines = []
    for line in page.decode().splitlines():
        copies = ranks if 'engine="0"' in line else 1
        lines += [line.replace('engine="0"', f'engine="{rank}"') for rank in range(copies)]
    text = "\n".join(lines) + "\n"
    # With data parallelism vLLM shows the sum over the ranks on each of them.
    return re.sub(r'num_gpu_blocks="(\d+)"', lambda found: f'num_gpu_blocks="{int(found[1]) * ranks}"', text).encode()


class FlappingVllm:
    """A server with requests whose counters stand still for a while, move for a while, and so on until ``calm``."""

    def __init__(self) -> None:
        self._page = capture("0.32.0/03").decode()
        self._began = time.monotonic()
        self.calm = False

    def __call__(self, request: Request) -> None:
        FakeVllm(self._now().encode())(request)

    def _now(self) -> str:
        periods, rest = divmod(time.monotonic() - self._began, FROZEN_S + MOVING_S)
        moved = periods * MOVING_S + max(0.0, rest - FROZEN_S)
        tokens = round(1000 * (time.monotonic() if self.calm else moved))
        return re.sub(
            r"^(vllm:(?:generation_tokens_total|iteration_tokens_total_count)\{.*\}) (\S+)$",
            lambda found: f"{found[1]} {float(found[2]) + tokens}",
            self._page,
            flags=re.MULTILINE,
        )


@dataclass(frozen=True)
class Outcome:
    """What one chain's receivers were told, by instance, and numbers that its Prometheus saw."""

    told: Mapping[str, tuple[Notification, ...]]
    patient: bool
    flaps: float
    fullest_pool: float
    posted_directly: float

    def firing(self, instance: str) -> tuple[tuple[str, str], ...]:
        """The receiver and the alert, for each time that somebody was told that an alert fires."""
        found = (one for one in self.told[instance] if one.status == "firing")
        return tuple((one.receiver, name) for one in found for name in one.alerts)

    def about(self, engine: str) -> list[tuple[str, str, tuple[str, ...]]]:
        """Receiver, status and alerts of what was told of one engine of the node with pages.

        An Alertmanager that does not wait after its own restart may send a ticket before it knows of the page again.
        """
        mine = (one for one in self.told["pages"] if one.labels.get("engine") == engine)
        return [(one.receiver, one.status, one.alerts) for one in mine if self.patient or one.receiver == "page"]


def demo(folder: Path, story: str, **more: object) -> OomwatchDaemon:
    config = {"detection": {"thresholds": THRESHOLDS}, **more}
    arguments = ("--story", story, "--speed", SPEEDS.get(story, SPEED), "--interval", "1")
    return OomwatchDaemon(folder, config, command=("demo",), arguments=arguments)


def directly(chains: Mapping[str, AlertChain], instance: str) -> dict[str, object]:
    """Direct mode beside the rules, with the labels that Prometheus has on the target."""
    return {
        "alertmanagers": [{"url": chain.alertmanager.url} for chain in chains.values()],
        "labels": {"cluster": CLUSTER, "instance": instance},
        "keep_firing_for": "30s",
        "resend": f"{RESEND_S}s",
    }


def firing(**labels: str) -> str:
    return "ALERTS{" + ",".join(f'{k}="{v}"' for k, v in {"alertstate": "firing", **labels}.items()) + "}"


FLAPPED = 'changes(oomwatch_verdict_state{instance="pages",engine="flapping",verdict="engine-stuck"}[5m])'
FULLEST = 'max(max_over_time(oomwatch_engine_kv_cache_usage_ratio{instance="healthy"}[5m]))'


def posted_to(chain: AlertChain) -> str:
    return f'oomwatch_notifications_total{{instance="leak",target="{chain.alertmanager.url}"}}'


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, Outcome]]:
    with contextlib.ExitStack() as running:
        chains = {version: AlertChain(tmp_path_factory.mktemp(version), version) for version in VERSIONS}
        for chain in chains.values():
            running.enter_context(chain)
        flapping = FlappingVllm()
        eight = FakeVllm(page_of_ranks(capture("0.32.0/78"), RANKS))
        engines = {"eight": running.enter_context(Engine(eight)), "flapping": running.enter_context(Engine(flapping))}
        pages = OomwatchDaemon(
            tmp_path_factory.mktemp("pages"),
            {
                "engines": [{"name": name, "url": engine.url} for name, engine in engines.items()],
                "discovery": {"enabled": False},
                "intervals": dict.fromkeys(("gpu", "processes", "scrape", "host", "discovery"), "1s"),
                "detection": {"thresholds": THRESHOLDS},
            },
        )
        daemons = {
            **{story: demo(tmp_path_factory.mktemp(story), story) for story in ("capacity", "fragmentation")},
            "leak": demo(tmp_path_factory.mktemp("leak"), "leak", alerting=directly(chains, "leak")),
            "healthy": demo(tmp_path_factory.mktemp("healthy"), "healthy"),
            "pages": pages,
        }
        for daemon in daemons.values():
            running.enter_context(daemon)
        targets = {instance: f"127.0.0.1:{daemon.port}" for instance, daemon in daemons.items()}
        servers = {version: chain.scrape(targets) for version, chain in chains.items()}

        for chain in chains.values():
            chain.wait_for("pages", "page")
            chain.wait_for("leak", "page")
        for server in servers.values():
            server.stop()
            server.start()
        for server in servers.values():
            server.wait_for(firing(instance="leak", severity="critical"))
        for chain in chains.values():
            chain.alertmanager.stop()
            chain.alertmanager.start()
        for chain in chains.values():
            chain.wait_until_known("OomwatchKvBlockLeak", "leak")
        pages.stop()
        pages.start()
        for version, chain in chains.items():
            for story, told in STORIES.items():
                chain.wait_for(story, told[-1][0])
            servers[version].wait_for(f"{FLAPPED} >= {2 * FLAPS}", 60)
            chain.wait_until_known("OomwatchEngineStuck", "pages")
        flapping.calm = True
        for chain in chains.values():
            chain.wait_for("pages", "page", "resolved")
        yield {
            version: Outcome(
                {instance: tuple(chain.notifications(instance)) for instance in daemons},
                chain.patient,
                *(servers[version].query(asked)[0].value for asked in (FLAPPED, FULLEST, posted_to(chain))),
            )
            for version, chain in chains.items()
        }


@pytest.fixture(params=VERSIONS)
def outcome(request: pytest.FixtureRequest, outcomes: Mapping[str, Outcome]) -> Outcome:
    return outcomes[request.param]


@pytest.mark.parametrize("story", STORIES)
def test_each_killer_s_story_is_told_once(outcome: Outcome, story: str) -> None:
    assert outcome.firing(story) == STORIES[story]


def test_rules_and_direct_mode_together_make_one_notification(outcome: Outcome) -> None:
    """The node with the leak is told of by both, through restarts of Prometheus and Alertmanager."""
    assert outcome.posted_directly > 0
    assert outcome.firing("leak") == STORIES["leak"]


def test_a_healthy_busy_day_is_silent(outcome: Outcome) -> None:
    assert outcome.fullest_pool > 0.95
    assert outcome.told["healthy"] == ()


def test_eight_ranks_are_one_notification_through_restarts_of_everything(outcome: Outcome) -> None:
    assert outcome.about("eight") == [("page", "firing", ("OomwatchKvBlockLeak",))]


def test_an_engine_that_flaps_is_told_once_and_resolved_once(outcome: Outcome) -> None:
    assert outcome.flaps >= 2 * FLAPS
    assert outcome.about("flapping") == [
        ("page", "firing", ("OomwatchEngineStuck",)),
        ("page", "resolved", ("OomwatchEngineStuck",)),
    ]
