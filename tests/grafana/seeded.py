"""A real Prometheus that holds the demo's stories side by side, each up to the moment at which it is worth a look.

Every story is a node of its own, with the instance ``<story>:18666``. The clock and the seeds are fixed: whoever asks
at END gets the same answers each time. What is stored is what a scrape of the daemon's page would have stored, of the
names that dashboards and recording rules mention.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import re
import subprocess
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import yaml

from oomwatch import textformat
from oomwatch.attribution import Neighbour
from oomwatch.demo import DemoNode
from oomwatch.enginelog.events import Budget, Entry, Origin, Ready, Start
from oomwatch.enginelog.lines import line_of
from oomwatch.exposition import SnapshotCollector
from oomwatch.history import HistoryStatus
from oomwatch.judge import Judge
from oomwatch.node import Cadence, Node
from oomwatch.notify import TargetStatus
from oomwatch.observations import LogLine
from oomwatch.sources.nvml.calls import FunctionStats
from tests.documents import REPOSITORY
from tests.e2e.prometheus import PrometheusServer, scrape_config
from tests.e2e.tools import find_promtool
from tests.exposed import CONFIG
from tests.grafana import dashboards

RULES = REPOSITORY / "alerts" / "rules" / "oomwatch-fleet.yml"
JOB = "oomwatch"
END = 1_790_000_000.0
# Files of samples cannot say that a series ended, as a scrape does: what is gone lingers for so long.
LOOKBACK_S = 100
RULES_STEP_S = 90


@dataclass(frozen=True)
class Tale:
    """The demo's ``story``, ``stretch`` times as slow as there, read every ``interval`` seconds, until END.

    It has then come to its ``until``-th second, counted as in the demo. It is about an ``engine``, and shows on the
    GPU with the index ``gpu``.
    """

    story: str
    until: float
    stretch: float = 10.0
    interval: float = 30.0
    engine: str = "llama-70b"
    gpu: int = 0

    @property
    def instance(self) -> str:
        return f"{self.story}:18666"

    @property
    def begin(self) -> float:
        return END - self.until * self.stretch


# Leaks of memory take hours to conclude: those stories take most of a day.
TALES: Mapping[str, Tale] = {
    tale.story: tale
    for tale in (
        Tale("healthy", 330),
        Tale("capacity", 370),
        Tale("fragmentation", 305, 144, 90),
        Tale("leak", 420),
        Tale("memory-leak", 300, 144, 90, engine="mistral-7b", gpu=3),
        Tale("host-leak", 290, 80, 90),
        Tale("orphan", 230, gpu=1),
        Tale("stuck", 250),
        Tale("lost", 200, engine="qwen-7b", gpu=3),
        Tale("restart", 200, engine="qwen-7b"),
    )
}
# A node that Prometheus cannot reach.
DOWN = "down:18666"


@contextlib.contextmanager
def seeded(folder: Path) -> Iterator[PrometheusServer]:
    """The server, with its data in ``folder``; a few seconds for each story."""
    data = folder / "data"
    data.mkdir(parents=True, exist_ok=True)
    # A fork of a process with threads may hang.
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as workers:
        list(
            workers.map(
                partial(_store, folder=folder), sorted(TALES.values(), key=lambda tale: tale.stretch, reverse=True)
            )
        )
    _store_samples(folder, "down", [_line("up", _labels(DOWN), 0, t) for t in range(int(END) - 3600, int(END) + 1, 15)])
    flags = [f"--query.lookback-delta={LOOKBACK_S}s"]
    with PrometheusServer(folder, scrape_config({}), arguments=flags) as server:
        _store_rules(folder, server)
    # Started anew it reads what the rules made.
    with PrometheusServer(folder, scrape_config({}), arguments=flags) as server:
        yield server


# --- samples ---------------------------------------------------------------------------------------------------------


def _store(tale: Tale, folder: Path) -> None:
    _store_samples(folder, tale.story, list(_lines(tale)))


def _store_samples(folder: Path, name: str, lines: list[str]) -> None:
    file = folder / f"{name}.openmetrics"
    file.write_text("\n".join([*lines, "# EOF\n"]), encoding="utf-8")
    # In one block: it reads the file anew for each of the usual ones of two hours.
    _promtool("tsdb", "create-blocks-from", "openmetrics", "--max-block-duration=30h", file, folder / "data")
    file.unlink()


def _promtool(*arguments: object) -> None:
    command = [str(find_promtool()), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")


def _lines(tale: Tale) -> Iterator[str]:
    wanted = _mentioned()
    demo = DemoNode(tale.story, speed=1 / tale.stretch)
    judge = Judge(Node(Cadence(*[tale.interval] * 5), [Neighbour("embedder", process="tritonserver")]))
    steps = int(tale.until * tale.stretch / tale.interval)
    for step in range(steps + 1):
        t = END - (steps - step) * tale.interval
        for observation in demo.observations(t):
            judge.apply(observation)
        if step == 1:
            for said in _started(t):
                judge.apply(said)
        labels = _labels(tale.instance)
        page = textformat.openmetrics(_collector(judge, step, t, tale).collect())
        for line in page.decode().splitlines():
            series, _, value = line.rpartition(" ")
            name, _, more = series.partition("{")
            if name in wanted:
                yield f"{name}{{{labels}{',' + more if more else '}'} {value} {t:.3f}"
        for name, number in _around(step, t, tale).items():
            yield _line(name, labels, number, t)


def _started(t: float) -> Iterator[LogLine]:
    """What the workers of the demo's largest engine would have logged at their start: the demo has no logs."""
    gib = 1024**3
    budget = Budget(
        total=44 * gib,
        free=43 * gib,
        utilization=0.92,
        promised=41 * gib,
        consumed=34 * gib,
        activation=gib,
        graphs=gib // 2,
        kv_pool=5 * gib,
    )
    yield line_of(t, "llama-70b", Entry(Start(version="0.32.0"), Origin("api_server")))
    for worker in ("TP0", "TP1"):
        yield line_of(t, "llama-70b", Entry(budget, Origin("worker", worker=worker)))
    yield line_of(t, "llama-70b", Entry(Ready(server=True), Origin("api_server")))


def _mentioned() -> set[str]:
    """Every word of the dashboards and the recording rules, the names of metrics among them."""
    files = [RULES, *dashboards.FOLDER.glob("*.json")]
    return {word for file in files for word in re.findall(r"\w+", file.read_text(encoding="utf-8"))}


def _labels(instance: str) -> str:
    return f'job="{JOB}",instance="{instance}"'


def _line(name: str, labels: str, value: float, t: float) -> str:
    return f"{name}{{{labels}}} {value} {t:.3f}"


def _collector(judge: Judge, step: int, t: float, tale: Tale) -> SnapshotCollector:
    """What the daemon tells of itself, beside what its judge concluded."""
    calls = FunctionStats(calls=step * 24, seconds=step * 0.01, errors={"GPU_IS_LOST": 0, "TIMEOUT": step // 100})
    history = HistoryStatus(
        enabled=True, size_bytes=(4 << 20) + step * 900, oldest=tale.begin, last_write=t, write_seconds=0.004
    )
    return SnapshotCollector(
        judge.snapshot,
        process_series_per_gpu=lambda: 32,
        config=lambda: CONFIG,
        nvml_calls=lambda: {"nvmlDeviceGetMemoryInfo_v2": calls},
        history=lambda: history,
        notifications=lambda: (TargetStatus("https://alertmanager.example.org", step // 10, 0, 0, t),),
    )


def _around(step: int, t: float, tale: Tale) -> dict[str, float]:
    """What Prometheus adds to a scrape, and the client library of the daemon's own process."""
    return {
        "up": 1,
        "scrape_duration_seconds": 0.02 + 0.002 * (step % 5),
        "process_cpu_seconds_total": 2 + step * tale.interval * 0.004,
        "process_resident_memory_bytes": 61e6 + 5e4 * (step % 7),
        "process_start_time_seconds": tale.begin - 5,
    }


# --- recording rules -------------------------------------------------------------------------------------------------


def _store_rules(folder: Path, server: PrometheusServer) -> None:
    """The recording rules' series, of queries to the server that has what they are made of."""
    begin = int(min(tale.begin for tale in TALES.values()))
    lines = []
    for name, query in _rules().items():
        answer = server.api("query_range", query=query, start=str(begin), end=str(int(END)), step=str(RULES_STEP_S))
        for series in answer["result"]:
            labels = ",".join(f"{label}={json.dumps(value)}" for label, value in series["metric"].items())
            lines += [f"{name}{{{labels}}} {value} {t}" for t, value in series["values"]]
    _store_samples(folder, "rules", lines)


def _rules() -> dict[str, str]:
    """Each rule's query by its name; names of earlier rules in it have given way to their queries."""
    queries: dict[str, str] = {}

    def replaced(name: re.Match[str]) -> str:
        return f"({queries[name[0]]})" if name[0] in queries else name[0]

    for group in yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]:
        for rule in group["rules"]:
            queries[rule["record"]] = re.sub(r"\b[a-z_]+(?::\w+)+", replaced, rule["expr"])
    return queries
