"""How long it takes from a verdict to its notification: ``python -m benchmarks.notification``.

One daemon watches engines that begin to leak one after another. Prometheus runs the shipped rules and Alertmanager the
shipped configuration, with the intervals that they are shipped with; another Alertmanager is told by the daemon itself.
The times are those from the ``since`` of the verdict to the arrival of the page at a webhook. Takes three minutes.
"""

from __future__ import annotations

import contextlib
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from tests.alerts.alertmanagers import Alertmanager, Inbox, inbox, shipped_config, to_webhooks
from tests.documents import REPOSITORY
from tests.e2e.daemon import OomwatchDaemon
from tests.e2e.processes import wait_for, wait_until
from tests.e2e.prometheus import PrometheusServer, scrape_config
from tests.e2e.tools import VERSIONS
from tests.sources.vllm.captures import capture
from tests.sources.vllm.servers import Engine, FakeVllm

ENGINES = 24
SCRAPE_S = 15.0
SPREAD_S = 120.0  # over which the leaks begin, so that they meet every phase of scrapes and evaluations
MOST_S = 120.0
SEED = 1

HEALTHY, LEAKED = capture("0.32.0/05"), capture("0.32.0/78")


def main() -> None:
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as running:
        folder = Path(name)
        ways = {f"rules, {version} Prometheus and Alertmanager": version for version in VERSIONS}
        boxes = {way: running.enter_context(inbox()) for way in (*ways, "direct mode")}
        managers: dict[str, Alertmanager] = {}
        for way, box in boxes.items():
            own = folder / f"way-{len(managers)}"
            own.mkdir()
            config = to_webhooks(shipped_config(), box.url, wait="10s")
            managers[way] = running.enter_context(Alertmanager(own, config, ways.get(way, VERSIONS[0])))
        engines = [FakeVllm(HEALTHY) for _ in range(ENGINES)]
        urls = [running.enter_context(Engine(engine)).url for engine in engines]
        daemon = OomwatchDaemon(
            folder,
            {
                "engines": [{"name": f"engine-{number}", "url": url} for number, url in enumerate(urls)],
                "discovery": {"enabled": False},
                # As often as it may, so that verdicts begin in every phase of Prometheus' scrapes.
                "intervals": {"scrape": "1s"},
                "alerting": {"alertmanagers": [{"url": managers["direct mode"].url}]},
            },
        )
        running.enter_context(daemon)
        for way, version in ways.items():
            running.enter_context(_prometheus(folder / f"prometheus-{version}", version, daemon, managers[way]))
        _leak_one_by_one(engines)
        began = _begins(daemon)
        for way, box in boxes.items():
            _wait_for_all(box, way)
            taken = sorted(t - began[engine] for engine, t in _arrivals(box).items())
            print(f"{way:45} {_summary(taken)}")


def _prometheus(folder: Path, version: str, daemon: OomwatchDaemon, alertmanager: Alertmanager) -> PrometheusServer:
    folder.mkdir()
    rules = sorted((REPOSITORY / "alerts" / "rules").glob("oomwatch-*.yml"))
    config = scrape_config({"oomwatch": [f"127.0.0.1:{daemon.port}"]}, interval_s=SCRAPE_S, rule_files=rules)
    alerting = {"alertmanagers": [{"static_configs": [{"targets": [f"127.0.0.1:{alertmanager.port}"]}]}]}
    return PrometheusServer(folder, {**config, "alerting": alerting}, version=version)


def _leak_one_by_one(engines: Sequence[FakeVllm]) -> None:
    randomness = random.Random(SEED)
    for engine in engines:
        engine.page = LEAKED
        time.sleep(randomness.uniform(0, 2 * SPREAD_S / ENGINES))


def _begins(daemon: OomwatchDaemon) -> dict[str, float]:
    """Since when each engine's leak has been a page, unix time."""

    def found() -> dict[str, float]:
        return {
            verdict["subject"]["engine"]: verdict["since"]
            for verdict in daemon.status()["verdicts"]
            if (verdict["verdict"], verdict["state"]) == ("kv-block-leak", "page")
        }

    return wait_for(found, lambda begins: len(begins) == ENGINES, MOST_S, "every leak is a verdict")


def _arrivals(box: Inbox) -> dict[str, float]:
    told = zip(box.times, list(box.received), strict=False)
    return {body["groupLabels"]["engine"]: t for t, (path, body) in told if path == "/page"}


def _wait_for_all(box: Inbox, way: str) -> None:
    wait_until(lambda: len(_arrivals(box)) == ENGINES, MOST_S, f"every leak is told by {way}")


def _summary(seconds: Sequence[float]) -> str:
    return f"shortest {seconds[0]:5.1f} s, median {median(seconds):5.1f} s, longest {seconds[-1]:5.1f} s"


if __name__ == "__main__":
    main()
