"""The node that is watched: engines as processes of their own, idle processes, and simulated drivers that list them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import requests

from benchmarks.cost.engine import REQUESTS_PATH
from tests.e2e.processes import free_port
from tests.nvml_sim import GIB, Process, Sim, build
from tests.sources.programs import Program, crowd

GPUS = 8
PROCESSES_PER_GPU = 20
ENGINES = 4  # two GPUs each, with a worker on either

_ROOT = Path(__file__).parents[2]
_ENGINE_SCRIPT = "from benchmarks.cost.engine import main\n\nmain()\n"


@dataclass(frozen=True)
class Node:
    """Engines by port, and the processes of each GPU: a worker of an engine, the others nobody's."""

    folder: Path
    library: Path
    engine_ports: tuple[int, ...]
    gpu_processes: tuple[tuple[Process, ...], ...]

    def driver(self, name: str) -> Sim:
        """Another simulated driver of the same state, so that each watcher's calls are counted apart."""
        sim = Sim(self.folder / f"driver-{name}", GPUS)
        for gpu, processes in enumerate(self.gpu_processes):
            sim.set_processes(gpu, processes)
        return sim

    def engine_requests(self) -> int:
        """HTTP requests of the measured daemon that the engines have answered so far."""
        urls = [f"http://127.0.0.1:{port}{REQUESTS_PATH}" for port in self.engine_ports]
        return sum(int(requests.get(url, timeout=10).text) for url in urls)


@contextmanager
def simulated_node(folder: Path) -> Iterator[Node]:
    """The node while the block runs; every process of it ends with the block."""
    script = folder / "bin" / "vllm"
    script.parent.mkdir()
    script.write_text(_ENGINE_SCRIPT)
    ports = tuple(free_port() for _ in range(ENGINES))
    path = os.pathsep.join([str(_ROOT), str(_ROOT / "exporter")])
    with ExitStack() as running:
        workers: list[int] = []
        for number, port in enumerate(ports):
            command = [sys.executable, str(script), "serve", f"bench/model-{number}", "--port", str(port)]
            engine = Program(command, environment={"PYTHONPATH": path})
            running.callback(engine.stop)
            workers.extend(engine.children[1:])
        others = running.enter_context(crowd(GPUS * PROCESSES_PER_GPU - len(workers)))
        idle = [child.pid for child in psutil.Process(others.pid).children()]
        share = PROCESSES_PER_GPU - 1
        yield Node(
            folder,
            build(folder),
            ports,
            tuple(
                (Process(worker, 40 * GIB), *(Process(pid, GIB) for pid in idle[gpu * share : (gpu + 1) * share]))
                for gpu, worker in enumerate(workers)
            ),
        )


def nvitop_command(cache: Path, version: str) -> Path:
    """nvitop-exporter of this version, in a virtual environment of its own below ``cache``; made at first use."""
    environment = cache / f"nvitop-exporter-{version}"
    command = environment / "bin" / "nvitop-exporter"
    if not command.exists():
        subprocess.run([sys.executable, "-m", "venv", environment], check=True, timeout=300)
        pip = [str(command.with_name("python")), "-m", "pip", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, "install", f"nvitop-exporter=={version}"], check=True, timeout=600)
    return command
