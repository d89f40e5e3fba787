"""The programs that are measured, each on a simulated driver of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.cost.engine import MARK
from benchmarks.cost.node import Node
from tests.e2e.daemon import OomwatchDaemon
from tests.e2e.processes import ServerProcess, free_port
from tests.nvml_sim import Sim, environment

WAIT_S = 60.0


@dataclass(frozen=True)
class Watcher:
    """A program at work. ``url`` is its page of metrics, None for one that has none."""

    name: str
    pid: int
    url: str | None
    sim: Sim


@contextmanager
def oomwatch(node: Node, interval: float) -> Iterator[Watcher]:
    """Every default interval in the same proportion to that of the GPUs, so that lists are read each fourth time.

    The engines are configured, for the sake of a header; discovery finds the same ones.
    """
    folder = _folder(node, "oomwatch")
    intervals = {"gpu": interval, "scrape": interval, "discovery": interval}
    slower = {"host": min(2 * interval, 3600), "processes": 4 * interval}
    config: dict[str, object] = {
        "intervals": {name: f"{seconds:g}s" for name, seconds in (intervals | slower).items()},
        "history": {"directory": str(folder)},
        "engines": [
            {"name": f"model-{number}", "url": f"http://127.0.0.1:{port}", "headers": {MARK: "yes"}}
            for number, port in enumerate(node.engine_ports)
        ],
    }
    with node.driver(folder.name) as sim:
        daemon = OomwatchDaemon(folder, config, environment=environment(node.library, sim))
        with daemon:
            yield Watcher("oomwatch", daemon.pid, f"{daemon.url}/metrics", sim)


@contextmanager
def nvitop_exporter(node: Node, interval: float, command: Path) -> Iterator[Watcher]:
    folder = _folder(node, "nvitop")
    port = free_port()
    url = f"http://127.0.0.1:{port}/metrics"
    arguments = ["--port", str(port), "--interval", f"{interval:g}", "--hostname", "benchmark"]
    with node.driver(folder.name) as sim:
        server = ServerProcess(
            [command, *arguments],
            log_path=folder / "log",
            ready_url=url,
            start_timeout_s=WAIT_S,
            environment={**os.environ, **environment(node.library, sim)},
        )
        with server:
            yield Watcher(f"nvitop-exporter at {interval:g} s", server.pid, url, sim)


@contextmanager
def xid_wait(node: Node) -> Iterator[Watcher]:
    """The simulated driver's own share: a program that waits for Xids and does nothing else."""
    with node.driver(_folder(node, "wait").name) as sim:
        process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.cost.xid_wait"],
            stdout=subprocess.PIPE,
            env={**os.environ, **environment(node.library, sim)},
        )
        try:
            assert process.stdout is not None
            process.stdout.readline()
            yield Watcher("wait for Xids only", process.pid, None, sim)
        finally:
            process.kill()
            process.communicate()


def _folder(node: Node, name: str) -> Path:
    folder = node.folder / f"{name}-{len(list(node.folder.glob(f'{name}-*')))}"
    folder.mkdir()
    return folder
