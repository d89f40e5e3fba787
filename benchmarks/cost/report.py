"""RESULTS.md: the numbers, how they were measured, and on what."""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from benchmarks.cost.engine import PAGE, captured_page
from benchmarks.cost.measure import Burst, Stretch
from benchmarks.cost.node import ENGINES, GPUS, PROCESSES_PER_GPU

MIB = 1 << 20
_PACKAGES = ("nvitop-exporter", "nvitop", "nvidia-ml-py", "prometheus-client", "psutil")

_METHOD = """\
- {gpus} simulated H100 with {each} processes each, MIG off: {processes} real, idle processes, so that /proc is read for
  each. The driver library is the C library of `tests/nvml_sim`, whose calls take no time of their own; the pynvml above
  it is the unmodified one.
- {engines} engines, each a process of its own that is configured and that discovery finds too, with an engine core and
  two workers that GPUs list. They serve `{page}` ({page_bytes:,} bytes, captured from
  a real vLLM), with counters that move from scrape to scrape. oomwatch reads all of them, and whatever else serves like
  vLLM on the machine during the run; nvitop-exporter knows no engines.
- oomwatch polls GPUs, engines and discovery every {interval:g} s, the host every {host:g} s, process lists every
  {lists:g} s: the default intervals in proportion. nvitop-exporter runs twice, with the same interval and with its
  default of 1 s.
- All run at the same time, each on a simulated driver of its own, and are scraped every {interval:g} s over one
  connection with the headers of Prometheus 3 (OpenMetrics, gzip). A round takes {seconds:.0f} s; the first begins
  {warm_up:g} s after the start.
- CPU is user and system time of /proc/PID/stat over the round, scrapes included. Memory is VmRSS, RssAnon and VmHWM of
  /proc/PID/status at the end of a round. Calls are counted inside the simulated driver.
- The simulated wait for Xids looks for events every 2 ms, where a real driver sleeps in the kernel. What that takes was
  measured at the same time with a program that does nothing else, and is taken off in the second line, the
  interpreter's share included. nvitop-exporter does not wait for Xids.
- The cost of one scrape was measured with watchers that had read everything once and then slept. What the wait for
  Xids takes meanwhile is in it."""

Loads = tuple[float, float, float]


@dataclass(frozen=True)
class Results:
    """Everything that was measured; the first name of ``stretches`` is oomwatch, the last what the simulator takes."""

    interval: float
    stretches: dict[str, list[Stretch]]
    bursts: dict[str, list[Burst]]
    requests_to_engines: int
    loads: tuple[Loads, Loads]
    nvitop_python: Path
    command: str


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Mean, and the least and greatest where there are several."""
    mean = f"{statistics.mean(values):.{digits}f}"
    return mean if len(values) == 1 else f"{mean} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def write(results: Results, path: Path) -> None:
    path.write_text("\n".join(_lines(results)) + "\n", encoding="utf-8")


def _lines(results: Results) -> list[str]:
    names = list(results.stretches)
    wait = names[-1]
    seconds = results.stretches[names[0]][0].seconds
    rounds = len(results.stretches[names[0]])
    per_scrape = results.bursts
    return [
        "# What oomwatch costs",
        "",
        f"Made by `{results.command}`.",
        f"A cell holds the mean of {rounds} rounds and, in parentheses, the least and the greatest.",
        "",
        "| | " + " | ".join(names) + " |",
        "|---|" + "---:|" * len(names),
        _row(results, "CPU, % of one core", lambda s: s.share * 100),
        _net_row(results, wait),
        _row(results, "resident memory at the end, MiB", lambda s: s.memory.rss / MIB, 1),
        _row(results, "of it anonymous, MiB", lambda s: s.memory.anon / MIB, 1),
        _row(results, "most that was ever resident, MiB", lambda s: s.memory.peak / MIB, 1),
        _row(
            results,
            f"driver calls per device and {results.interval:g} s",
            lambda s: s.calls_per_device(results.interval),
        ),
        _row(
            results,
            "of them on the device itself",
            lambda s: statistics.mean(s.device_calls) * results.interval / s.seconds,
        ),
        "| samples; bytes; bytes sent | "
        + " | ".join(
            f"{last.page.samples}; {last.page.size}; {last.page.sent}" if last.page else "-"
            for last in (runs[-1] for runs in results.stretches.values())
        )
        + " |",
        _row(results, "engines on the page", lambda s: s.page.engines if s.page else 0, 0),
        "",
        f"| {per_scrape['oomwatch'][0].count} scrapes in a row | " + " | ".join(per_scrape) + " |",
        "|---|" + "---:|" * len(per_scrape),
        "| CPU per scrape, ms | "
        + " | ".join(spread([run.cpu_per_scrape * 1000 for run in runs]) for runs in per_scrape.values())
        + " |",
        "| driver calls meanwhile, waiting for Xids apart | "
        + " | ".join(str(sum(sum(run.driver_calls.values()) for run in runs)) for runs in per_scrape.values())
        + " |",
        f"| HTTP requests to engines meanwhile | {results.requests_to_engines} | - |",
        "",
        "## Driver calls by function",
        "",
        f"In {results.interval:g} s, for all {GPUS} GPUs together.",
        "",
        *_calls(results),
        "",
        "## How",
        "",
        *_method(results, seconds),
        "",
        "## On what",
        "",
        *_machine(results),
    ]


def _row(results: Results, title: str, of: Callable[[Stretch], float], digits: int = 2) -> str:
    cells = (spread([of(stretch) for stretch in runs], digits) for runs in results.stretches.values())
    return f"| {title} | " + " | ".join(cells) + " |"


def _net_row(results: Results, wait: str) -> str:
    simulator = results.stretches[wait]
    cells = []
    for name, runs in results.stretches.items():
        waits = "EVENT_WAIT" in runs[0].calls and name != wait
        net = [(run.share - alone.share) * 100 for run, alone in zip(runs, simulator, strict=True)]
        cells.append(spread(net) if waits else "-" if name == wait else spread([run.share * 100 for run in runs]))
    return "| without the simulator's wait for Xids | " + " | ".join(cells) + " |"


def _calls(results: Results) -> list[str]:
    families = sorted({family for runs in results.stretches.values() for run in runs for family in run.calls})
    lines = ["| | " + " | ".join(results.stretches) + " |", "|---|" + "---:|" * len(results.stretches)]
    for family in families:
        means = [
            statistics.mean(run.calls.get(family, 0) * results.interval / run.seconds for run in runs)
            for runs in results.stretches.values()
        ]
        lines.append(f"| {family} | " + " | ".join(f"{mean:.2f}" if mean else "" for mean in means) + " |")
    return lines


def _method(results: Results, seconds: float) -> list[str]:
    return _METHOD.format(
        gpus=GPUS,
        each=PROCESSES_PER_GPU,
        processes=GPUS * PROCESSES_PER_GPU,
        engines=ENGINES,
        page=PAGE,
        page_bytes=len(captured_page()),
        interval=results.interval,
        host=2 * results.interval,
        lists=4 * results.interval,
        seconds=seconds,
        warm_up=6 * results.interval,
    ).splitlines()


def _machine(results: Results) -> list[str]:
    loads = " and ".join(", ".join(f"{load:.2f}" for load in loads) for loads in results.loads)
    own = ", ".join(f"{name} {version(name)}" for name in ("prometheus-client", "nvidia-ml-py", "psutil", "cheroot"))
    return [
        f"- {_processor()}, {os.cpu_count()} cores, shared with other work.",
        f"- Load averages (1, 5, 15 minutes) at the beginning and at the end: {loads}.",
        f"- Linux {platform.release()}, Python {platform.python_version()}, {own}.",
        f"- {_nvitop_versions(results.nvitop_python)}.",
    ]


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def _nvitop_versions(python: Path) -> str:
    program = "from importlib.metadata import version; import sys; print(*(version(n) for n in sys.argv[1:]))"
    command = [str(python), "-c", program, *_PACKAGES]
    versions = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout.split()
    return ", ".join(f"{name} {number}" for name, number in zip(_PACKAGES, versions, strict=True))
