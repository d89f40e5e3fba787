"""What the daemon costs on a full node, beside nvitop-exporter: ``python -m benchmarks.cost``.

Eight simulated GPUs with 20 processes each, four engines that serve a real page of 57 kB. All watchers run at the same
time, each on a simulated driver of its own, and are scraped as Prometheus scrapes. Writes RESULTS.md beside this file.
Needs Linux, gcc, and for nvitop-exporter either a package registry or what an earlier run left in .cache.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

from benchmarks.cost.measure import Burst, Stretch, burst, watch
from benchmarks.cost.node import Node, nvitop_command, simulated_node
from benchmarks.cost.report import Results, write
from benchmarks.cost.watchers import nvitop_exporter, oomwatch, xid_wait
from tests.e2e.processes import wait_until

NVITOP_VERSION = "1.7.2"
NEVER = 300.0  # seconds between polls, the most that both watchers allow: longer than a burst of scrapes takes
HERE = Path(__file__).parent


def long_run(node: Node, nvitop: Path, rounds: int, seconds: float, interval: float) -> dict[str, list[Stretch]]:
    with ExitStack() as running:
        watchers = [
            running.enter_context(oomwatch(node, interval)),
            running.enter_context(nvitop_exporter(node, interval, nvitop)),
            running.enter_context(nvitop_exporter(node, 1.0, nvitop)),
            running.enter_context(xid_wait(node)),
        ]
        stretches: dict[str, list[Stretch]] = {watcher.name: [] for watcher in watchers}
        watch(watchers, 6 * interval, interval)  # what a start costs is not what running costs
        for number in range(1, rounds + 1):
            for watcher, stretch in zip(watchers, watch(watchers, seconds, interval), strict=True):
                stretches[watcher.name].append(stretch)
                print(f"round {number}  {watcher.name:<26}{stretch.share * 100:7.2f} % of a core", flush=True)
        return stretches


def bursts(node: Node, nvitop: Path, rounds: int, scrapes: int) -> tuple[dict[str, list[Burst]], int]:
    """Bursts of scrapes by watcher, and the HTTP requests that engines got during those of oomwatch."""
    found: dict[str, list[Burst]] = {"oomwatch": [], "nvitop-exporter": []}
    requests_to_engines = 0
    with oomwatch(node, NEVER) as watcher:
        _wait_until_quiet(node)
        before = node.engine_requests()
        for _ in range(rounds):
            found["oomwatch"].append(burst(watcher, scrapes))
        requests_to_engines = node.engine_requests() - before
    with nvitop_exporter(node, NEVER, nvitop) as watcher:
        for _ in range(rounds):
            found["nvitop-exporter"].append(burst(watcher, scrapes))
    for name, runs in found.items():
        print(f"{name}: " + ", ".join(f"{run.cpu_per_scrape * 1000:.2f}" for run in runs) + " ms CPU per scrape")
    return found, requests_to_engines


def _wait_until_quiet(node: Node) -> None:
    """The first scrapes of engines come up to a second after one another."""
    counts: list[int] = []

    def same_for_three_seconds() -> bool:
        counts.append(node.engine_requests())
        return len(counts) > 6 and len(set(counts[-6:])) == 1

    wait_until(same_for_three_seconds, 60, "no engine is asked any more", interval_s=0.5)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cost", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3, help="how often everything is measured (default: 3)")
    parser.add_argument("--seconds", type=float, default=180.0, help="length of a round (default: 180)")
    parser.add_argument("--interval", type=float, default=5.0, help="of polls and scrapes, in seconds (default: 5)")
    parser.add_argument("--scrapes", type=int, default=200, help="in a row, for the cost of one (default: 200)")
    parser.add_argument("--output", type=Path, default=HERE / "RESULTS.md", help="file to write")
    options = parser.parse_args()
    nvitop = nvitop_command(HERE.parents[1] / ".cache", NVITOP_VERSION)
    load_before = os.getloadavg()
    with tempfile.TemporaryDirectory(prefix="oomwatch-cost-") as folder, simulated_node(Path(folder)) as node:
        scrapes, requests_to_engines = bursts(node, nvitop, options.rounds, options.scrapes)
        stretches = long_run(node, nvitop, options.rounds, options.seconds, options.interval)
    results = Results(
        interval=options.interval,
        stretches=stretches,
        bursts=scrapes,
        requests_to_engines=requests_to_engines,
        loads=(load_before, os.getloadavg()),
        nvitop_python=nvitop.with_name("python"),
        command=" ".join(["python -m benchmarks.cost", *sys.argv[1:]]),
    )
    write(results, options.output)
    print(f"written: {options.output}")


if __name__ == "__main__":
    main()
