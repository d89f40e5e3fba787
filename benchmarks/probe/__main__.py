"""What the probe costs: ``python -m benchmarks.probe``.

vLLM's scheduler with the probe and without, in turn; real servers on the CPU, each with it and without, in turn; then
each part of the probe by itself, in a process without vLLM. Writes RESULTS.md beside this file. Needs the vLLM of the
tests.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

from benchmarks.probe.probe_switch import STEPS
from tests.e2e.engine import CPU_ENVIRONMENT, MODEL_NAME, Role, VllmEngine
from tests.e2e.model import ensure_tiny_model
from tests.e2e.probe import SOURCE, install_probe
from tests.e2e.processes import wait_until
from tests.e2e.tools import require_vllm

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[1]
REQUESTS, TOKENS = 8, 400
BLOCKS = 256  # so that all requests fit, and no step has to make room
CONTROL_S = 1e-4  # the delay of each step with the probe in one more server: the method has to find it
# What is drawn again and again for a bound: one pair resembles its neighbours.
STRETCH = 50
RESAMPLES = 10_000
One = TypeVar("One")
THREAD_NAME = "oomwatch-probe"
HOW = """\
## How

- The scheduler is that of vLLM 0.32.0, driven without a worker: the same loads of 6 requests in turn with the probe's
  calls around it and without, 120 times each, the first of a pair alternating. The model's part of a step comes on top.
- Servers, {servers} of them (0: left out, as they have to be where the machine has other work), {loads} loads of
  {requests} requests with {tokens} tokens each: vLLM 0.32.0 on the CPU with the tiny model of the tests. In each server
  the probe is taken out, calls and thread, and put back, {turn} steps each, the first of a pair by lot
  (`benchmarks/probe/probe_switch.py`): two servers differ by more than it costs, and so does a machine from one second
  to the next. Only pairs count in which no request came or went. Tokens a second are those of all steps by the time of
  all; the bounds are of stretches of {stretch} pairs. One more server waits for {control:.0f} µs in each step with the
  probe: that has to be found.
- The parts: a process without vLLM, a pool filled with requests of 400 blocks. Memory is RssAnon with thread and file,
  less that before the import. Times are CPU times of the thread that does it.
- A copy is made by the scheduler's thread between two steps, and only that stops it. Counting takes turns with it every
  2,000 blocks. With many blocks it happens less often, so that both stay below 0.05 % of the time.
- Not measured here, for want of a GPU: reading the allocator (once a second) and its snapshot (once a minute, or less
  often, so that it stays below 0.01 % of the time; it holds the interpreter while it is made).
"""


def probe_seconds(core: int) -> float:
    """CPU time of the probe's own thread since its start."""
    for task in Path(f"/proc/{core}/task").iterdir():
        if (task / "comm").read_text(encoding="utf-8").strip() == THREAD_NAME:
            return int((task / "schedstat").read_text(encoding="ascii").split()[0]) / 1e9
    raise RuntimeError("the probe's thread is not there")


@dataclass(frozen=True)
class Turns:
    """The same tokens without the probe and with it, and what they took."""

    tokens: int
    without_s: float
    probed_s: float

    @property
    def rates(self) -> tuple[float, float]:
        """Tokens a second without the probe and with it."""
        return self.tokens / self.without_s, self.tokens / self.probed_s


@dataclass(frozen=True)
class Pair(Turns):
    """Two turns of one server, and what the probe's thread did in the one with it."""

    thread_worked: bool
    thread_late: bool


@dataclass(frozen=True)
class Served:
    """What one server did: its pairs, and the seconds of CPU time that the probe's thread took in them."""

    pairs: list[Pair]
    thread_s: float

    @property
    def thread_share(self) -> float:
        return self.thread_s / sum(pair.probed_s for pair in self.pairs)


def serve(loads: int, delay_s: float) -> Served:
    """A fresh server under load, which takes the probe out and puts it back every other step."""
    with TemporaryDirectory() as name, ExitStack() as running:
        folder = Path(name)
        turns = folder / "turns"
        engine = VllmEngine(
            require_vllm(),
            folder,
            arguments=[f"--num-gpu-blocks-override={BLOCKS}"],
            environment={
                "OOMWATCH_PROBE_DIR": str(folder / "run"),
                "OOMWATCH_BENCHMARK_TURNS": str(turns),
                "OOMWATCH_BENCHMARK_DELAY": str(delay_s),
            },
            plugins=[HERE / "probe_switch.py"],
            python_path=[install_probe(folder / "installed")],
        )
        running.callback(engine.stop)
        engine.start()
        load(engine)
        (core,) = (one.pid for one in engine.processes() if one.role is Role.ENGINE_CORE)
        os.kill(core, signal.SIGUSR1)
        wait_until(turns.exists, 10, "the switch works")
        before = probe_seconds(core)
        for _ in range(loads):
            load(engine)
        thread_s = probe_seconds(core) - before
        return Served([Pair(*json.loads(line)) for line in turns.read_text(encoding="ascii").splitlines()], thread_s)


def load(engine: VllmEngine) -> None:
    completions = engine.complete(REQUESTS, max_tokens=TOKENS)
    assert [completion.completion_tokens for completion in completions] == [TOKENS] * REQUESTS


def total(parts: Sequence[Turns]) -> Turns:
    return Turns(
        sum(part.tokens for part in parts),
        sum(part.without_s for part in parts),
        sum(part.probed_s for part in parts),
    )


def ratio(parts: Sequence[Turns]) -> float:
    without, probed = total(parts).rates
    return probed / without


def stretches(pairs: Sequence[Pair]) -> list[Turns]:
    return [total(pairs[begin : begin + STRETCH]) for begin in range(0, len(pairs), STRETCH)]


def interval(found: Sequence[One], statistic: Callable[[Sequence[One]], float]) -> tuple[float, float, float]:
    """The statistic of ``found`` and the bounds between which it lies with 95 % (bootstrap)."""
    source = random.Random(1)
    drawn = sorted(statistic(source.choices(found, k=len(found))) for _ in range(RESAMPLES))
    return statistic(found), drawn[RESAMPLES // 40], drawn[-RESAMPLES // 40 - 1]


def run(python: Path, module: str, *arguments: str, interval_s: float) -> dict[str, Any]:
    """What a program prints that has the probe on its path, and prints JSON."""
    with TemporaryDirectory() as folder:
        environment = {
            **os.environ,
            **CPU_ENVIRONMENT,
            "PYTHONPATH": os.pathsep.join([str(REPOSITORY), str(SOURCE)]),
            "OOMWATCH_PROBE_DIR": folder,
            "OOMWATCH_PROBE_INTERVAL": str(interval_s),
        }
        command = [str(python), "-W", "ignore", "-m", module, *arguments]
        answer = subprocess.run(
            command, env=environment, cwd=REPOSITORY, check=True, stdout=subprocess.PIPE, text=True, timeout=300
        )
    found: dict[str, Any] = json.loads(answer.stdout.splitlines()[-1])
    return found


def added(without: list[float], probed: list[float]) -> list[str]:
    """What the probe adds to a step of the scheduler's thread."""
    more, low, high = interval([b - a for a, b in zip(without, probed, strict=True)], statistics.median)
    medians = f"{statistics.median(without) * 1e6:.1f} | {statistics.median(probed) * 1e6:.1f}"
    bounds = f"{low * 1e6:.1f} to {high * 1e6:.1f}"
    return [
        "| | without | with | difference | 95 % |",
        "|---|---:|---:|---:|---:|",
        f"| CPU time of a step of its thread, µs | {medians} | {more * 1e6:.1f} | {bounds} |",
        "",
        f"The worse end is {high / 0.01:.2%} of a step of 10 ms.",
    ]


def compared(name: str, servers: Sequence[Served]) -> str:
    pairs = [pair for served in servers for pair in served.pairs]
    without, probed = total(pairs).rates
    middle, low, high = interval([part for served in servers for part in stretches(served.pairs)], ratio)
    return f"| {name} | {len(pairs):,} | {without:.1f} | {probed:.1f} | {middle:.4f} | {low:.4f} to {high:.4f} |"


def served_in_turn(servers: Sequence[Served], control: Served) -> list[str]:
    worked = [pair for served in servers for pair in served.pairs if pair.thread_worked]
    late = sum(pair.thread_late for pair in worked)
    share = statistics.mean(served.thread_share for served in servers)
    return [
        "## Servers",
        "",
        "Tokens a second.",
        "",
        "| server | pairs | without | with | with / without | 95 % |",
        "|---|---:|---:|---:|---:|---:|",
        *(compared(str(number), [served]) for number, served in enumerate(servers, start=1)),
        compared("all", servers),
        compared(f"one with {CONTROL_S * 1e6:.0f} µs more in each step with the probe", [control]),
        "",
        f"The probe's thread took {share:.3%} of a core. It worked in {len(worked):,} turns, {late:,} times too long.",
        "",
    ]


def report(options: argparse.Namespace, steps: dict[str, Any], servers: list[Served], costs: dict[str, Any]) -> str:
    lines = [
        "# What the probe costs",
        "",
        f"Made by `python -m benchmarks.probe --servers {options.servers} --loads {options.loads}`.",
        "",
        "## vLLM's scheduler",
        "",
        *added(steps["without"], steps["with"]),
        "",
    ]
    if servers:
        lines += served_in_turn(servers[:-1], servers[-1])
    lines += [
        "## Its parts",
        "",
        "| | |",
        "|---|---:|",
        f"| memory, at most | {costs['memory_bytes'] / 1e6:.1f} MB |",
        f"| its thread, once a second, pool of 1,000 blocks | {costs['tick_s'] * 1e6:.0f} µs |",
        f"| each step of the scheduler | {costs['step_s'] * 1e9:.0f} ns |",
    ]
    for blocks in costs["copy_s"]:
        copy, count = costs["copy_s"][blocks], costs["count_s"][blocks]
        pause = max(1.0, (copy + count) / 5e-4)
        name = f"{int(blocks):,} blocks in use"
        lines.append(f"| {name}: the copy between two steps | {copy * 1e6:,.0f} µs |")
        lines.append(f"| {name}: counting, in its thread, every {pause:.0f} s | {count * 1e3:.1f} ms |")
    lines += [
        "",
        HOW.format(
            servers=options.servers,
            loads=options.loads,
            requests=REQUESTS,
            tokens=TOKENS,
            turn=STEPS,
            stretch=STRETCH,
            control=CONTROL_S * 1e6,
        ),
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.probe", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--servers", type=int, default=4, help="servers, and one for control; 0: none (default: 4)")
    parser.add_argument("--loads", type=int, default=30, help="loads for each server (default: 30)")
    parser.add_argument("--output", type=Path, default=HERE / "RESULTS.md", help="file to write")
    options = parser.parse_args()
    venv = require_vllm()
    steps = run(venv.python, "benchmarks.probe.steps", str(ensure_tiny_model(venv.models / MODEL_NAME)), interval_s=1)
    costs = run(Path(sys.executable), "benchmarks.probe.parts", interval_s=0.2)
    delays = [0.0] * options.servers + [CONTROL_S] if options.servers else []
    servers = []
    for number, delay_s in enumerate(delays, start=1):
        servers.append(serve(options.loads, delay_s))
        print(f"server {number} of {len(delays)}: {ratio(servers[-1].pairs):.4f}", flush=True)
    text = report(options, steps, servers, costs)
    options.output.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
