"""Measures how long each dashboard takes to load on a large fleet, in a real Prometheus on this machine.

All its variables are asked one after the other, then its panels, six at a time as a browser does, the queries of a
panel one after the other as Grafana's data source does.
"""

from __future__ import annotations

import argparse
import platform
import re
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from benchmarks.dashboards import block, fleet
from tests.e2e.prometheus import PrometheusServer, scrape_config
from tests.e2e.tools import require_tool
from tests.grafana.dashboards import ONE_NODE, UIDS, asked, board, filled, panels, queried, questions

AT_ONCE = 6
SCRAPE_S = 60
TIMEOUT_S = 120.0
CORES = psutil.cpu_count() or 1
# A wide screen has that many points for one of a dashboard's 24 columns, and Grafana rounds what a point stands for.
POINTS = 78
ROUNDED_S = ((90, 60), (180, 120), (450, 300), (750, 600), (1080, 900))


@dataclass(frozen=True)
class Asked:
    """One query and how long its answer took."""

    uid: str
    where: str
    seconds: float
    series: int


@dataclass(frozen=True)
class Opened:
    """A dashboard opened once, and each query.

    ``seconds`` until everything was there, ``cpu`` of the server, and the share of all processors that others took.
    """

    seconds: float
    cpu: float
    others: float
    queries: list[Asked]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.dashboards", description=__doc__)
    parser.add_argument("--engines", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--first", action="store_true", help="the server goes before all else on a busy machine (needs root)"
    )
    parser.add_argument("--results", type=Path, default=Path(__file__).with_name("RESULTS.md"))
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="oomwatch-dashboards-") as name:
        folder = Path(name)
        everywhere, once = names()
        series = dict(fleet.series(options.engines, everywhere, once))
        block.write(folder / "data", series, fleet.BEGIN_MS)
        size = fleet.stored(folder)
        count = len(series)
        series.clear()
        flags = ["--storage.tsdb.retention.time=100y", "--storage.tsdb.min-block-duration=7d"]
        with PrometheusServer(folder, scrape_config({}), arguments=flags) as server:
            if options.first:
                # Processes of one session share what they get; the server has a session of its own.
                Path(f"/proc/{server.pid}/autogroup").write_text("-19")
            (held,) = instant(server, "count({__name__!=''})")
            assert int(held["value"][1]) == count, (held, count)
            rounds = [{uid: opened(server, uid) for uid in UIDS} for _ in range(options.rounds)]
            memory = psutil.Process(server.pid).memory_info().rss
    options.results.write_text(report(options, count, size, memory, rounds), encoding="utf-8")
    print(options.results.read_text(encoding="utf-8"))


def names() -> tuple[frozenset[str], frozenset[str]]:
    """The names that dashboards ask of all nodes, and those that they ask of one."""
    everywhere: set[str] = set()
    once: set[str] = set()
    for uid in UIDS:
        found = once if uid in ONE_NODE else everywhere
        for question in questions(uid):
            found.update(re.findall(r"[a-z_]\w+(?::\w+)*(?=\{)|(?<=\()oomwatch_\w+", question.expr))
    return frozenset(everywhere), frozenset(once)


def opened(server: PrometheusServer, uid: str) -> Opened:
    """Open the dashboard, and see what that costs the server."""
    process = psutil.Process(server.pid)
    before, all_before = process.cpu_times(), psutil.cpu_times()
    seconds, found = load(server, uid)
    after = process.cpu_times()
    cpu = after.user + after.system - before.user - before.system
    return Opened(seconds, cpu, max(0.0, busy(psutil.cpu_times()) - busy(all_before) - cpu) / (seconds * CORES), found)


def busy(times: Any) -> float:
    """Seconds that all processors worked so far, for whomever."""
    return float(sum(times) - times.idle - getattr(times, "iowait", 0.0) - getattr(times, "guest", 0.0))


def load(server: PrometheusServer, uid: str) -> tuple[float, list[Asked]]:
    """The seconds until everything is there, and each query."""
    begin = time.perf_counter()
    values, found = choose(server, uid)
    with ThreadPoolExecutor(AT_ONCE) as browser:
        for answers in browser.map(lambda panel: fill(server, uid, panel, values), panels(uid)):
            found += answers
    return time.perf_counter() - begin, found


def choose(server: PrometheusServer, uid: str) -> tuple[Mapping[str, str], list[Asked]]:
    """Every variable asked, and the first node, its first engine and its first GPU chosen."""
    values = {"job": fleet.JOB, "rank": ".+", "gpu": "none"}
    values["instance"] = fleet.instance(0) if uid in ONE_NODE else ".+"
    found = []
    for variable in queried(uid):
        expr, label = asked(variable)
        expr = filled(expr, values)
        begin = time.perf_counter()
        if label:
            span = {"start": str(fleet.BEGIN_MS // 1000), "end": str(fleet.END_MS // 1000)}
            offered = server.api(f"label/{label}/values", TIMEOUT_S, **{"match[]": expr}, **span)
        else:
            offered = sorted(series["metric"]["gpu"] for series in instant(server, expr))
        found.append(Asked(uid, f"variable {variable['name']}", time.perf_counter() - begin, len(offered)))
        assert offered, (uid, expr)
        if variable["name"] in ("engine", "gpu"):
            values[variable["name"]] = "|".join(offered) if variable["multi"] else offered[0]
    return values, found


def step_of(panel: Mapping[str, Any]) -> int:
    """The seconds between two points, as Grafana chooses them for the panel's width."""
    exact = fleet.HOURS * 3600 / (panel["gridPos"]["w"] * POINTS)
    return max(SCRAPE_S, next(step for below, step in ROUNDED_S if exact < below))


def times(step: int) -> Mapping[str, str]:
    """Grafana's variables of time."""
    return {
        "__rate_interval": f"{max(step + SCRAPE_S, 4 * SCRAPE_S)}s",
        "__interval": f"{step}s",
        "__range": f"{fleet.HOURS}h",
    }


def fill(server: PrometheusServer, uid: str, panel: Mapping[str, Any], values: Mapping[str, str]) -> list[Asked]:
    found = []
    step = step_of(panel)
    for target in panel["targets"]:
        expr = filled(target["expr"], values, times(step))
        begin = time.perf_counter()
        if target["instant"]:
            answer = instant(server, expr)
        else:
            span = {"start": str(fleet.BEGIN_MS // 1000), "end": str(fleet.END_MS // 1000 - 60), "step": str(step)}
            answer = server.api("query_range", TIMEOUT_S, query=expr, **span)["result"]
        where = f"{panel['title']}, {target['refId']}"
        found.append(Asked(uid, where, time.perf_counter() - begin, len(answer)))
    return found


def instant(server: PrometheusServer, expr: str) -> list[dict[str, Any]]:
    return list(server.api("query", TIMEOUT_S, query=expr, time=str(fleet.END_MS // 1000 - 60))["result"])


Round = Mapping[str, Opened]


def report(options: argparse.Namespace, series: int, size: int, memory: int, rounds: Sequence[Round]) -> str:
    first, later = rounds[0], rounds[1:] or rounds
    given = f"--engines {options.engines} --rounds {options.rounds}{' --first' if options.first else ''}"
    lines = [
        "# How long the dashboards take to load",
        "",
        f"Made by `python -m benchmarks.dashboards {given}`.",
        "",
        f"| dashboard | queries | first, s | later: median of {len(later)}, s | slowest, s | processor, s | others |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for uid in UIDS:
        seconds = [found[uid].seconds for found in later]
        cpu, load = median(found[uid].cpu for found in later), median(found[uid].others for found in later)
        lines.append(
            f"| {board(uid)['title'].rpartition(' ')[2]} | {len(first[uid].queries)} | {first[uid].seconds:.2f} |"
            f" {median(seconds):.2f} | {max(seconds):.2f} | {cpu:.2f} | {load:.0%} |"
        )
    lines += [
        "",
        "## The slowest queries",
        "",
        "Medians of the later rounds, with the rest of their dashboard.",
    ]
    lines += ["", "| dashboard | panel and query | s | series in the answer |", "|---|---|---:|---:|"]
    lines += [
        f"| {board(uid)['title'].rpartition(' ')[2]} | {where} | {seconds:.2f} | {count} |"
        for uid, where, seconds, count in slowest(later)[:12]
    ]
    nodes = fleet.nodes(options.engines)
    how = f"""
## How

- {options.engines} engines on {nodes} nodes of 4 GPUs: the demo's pages in its stories' states, over {fleet.HOURS} h
  with a sample a minute. {series:,} series, {series * fleet.SAMPLES / 1e6:.0f} million samples,
  {size / 2**20:.0f} MiB on disk. Of all nodes there are only the names that Fleet and Self ask for, and of the node
  that Engine and GPU show what these ask for.
- {version()}, {memory / 2**20:.0f} MiB resident at the end, on {CORES} cores of {platform.machine()}.
  The whole time range of {fleet.HOURS} h, in the steps that Grafana takes on a wide screen: 2 or 5 minutes.
- Variables one after the other, then panels six at a time, the queries of a panel one after the other. Before
  the first round Prometheus was asked for a count alone. Drawing is not in it.
- "Processor" is what Prometheus itself took of the {CORES} cores, "others" the share of them that everything else on
  the machine took meanwhile: times are longer than they would be alone. With `--first` Prometheus went before it.
- Fleet's states by killer and its courses of verdicts, pools and tokens are read from recording rules
  (`alerts/rules/oomwatch-fleet.yml`): of tens of thousands of verdicts they were the slowest. What is wrong is found by
  the few series of `oomwatch_incident_info`.
"""
    return "\n".join(lines) + "\n" + how


def version() -> str:
    """As ``Prometheus 2.42.0``."""
    shown = subprocess.run([str(require_tool("prometheus")), "--version"], capture_output=True, text=True, check=True)
    found = re.search(r"version ([\d.]+)", shown.stdout + shown.stderr)
    return f"Prometheus {found[1] if found else 'of unknown version'}"


def slowest(rounds: Sequence[Round]) -> list[tuple[str, str, float, int]]:
    found: dict[tuple[str, str], list[Asked]] = {}
    for answers in rounds:
        for uid in UIDS:
            for answer in answers[uid].queries:
                found.setdefault((uid, answer.where), []).append(answer)
    ranked = [
        (uid, where, median(answer.seconds for answer in timed), timed[0].series)
        for (uid, where), timed in found.items()
    ]
    return sorted(ranked, key=lambda row: -row[2])


if __name__ == "__main__":
    main()
