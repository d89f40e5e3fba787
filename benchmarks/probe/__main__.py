"""What the probe costs: ``python -m benchmarks.probe``.

vLLM's scheduler with the probe and without, in turn; then two real servers on the CPU, one with it and one without;
then each part of the probe by itself, in a process without vLLM. Writes RESULTS.md beside this file. Needs the vLLM of
the tests.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tests.e2e.engine import CPU_ENVIRONMENT, MODEL_NAME, Role, VllmEngine
from tests.e2e.model import ensure_tiny_model
from tests.e2e.probe import SOURCE, install_probe
from tests.e2e.tools import require_vllm

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[1]
REQUESTS, TOKENS = 8, 120
THREAD_NAME = "oomwatch-probe"
HOW = """\
## How

- The scheduler is that of vLLM 0.32.0, driven without a worker: the same loads of 6 requests in turn with the probe's
  calls around it and without, 120 times each, the first of a pair alternating. The model's part of a step comes on top.
- Servers, {rounds} rounds (0: left out, as they have to be where the machine has other work): two of vLLM 0.32.0 on the
  CPU with the tiny model of the tests, a processor each, and in turn, the first of a pair alternating. A turn is
  {requests} requests of {tokens} tokens at once. All columns are medians; ratio and difference are those of the pairs.
- The parts: a process without vLLM, a pool filled with requests of 400 blocks. Memory is RssAnon with thread and file,
  less that before the import. Times are CPU times of the thread that does it.
- A copy is made by the scheduler's thread between two steps, and only that stops it. Counting takes turns with it every
  2,000 blocks. With many blocks it happens less often, so that both stay below 0.05 % of the time.
- Not measured here, for want of a GPU: reading the allocator (once a second) and its snapshot (once a minute, or less
  often, so that it stays below 0.01 % of the time; it holds the interpreter while it is made).
"""


def probe_seconds(engine: VllmEngine) -> float:
    """CPU time of the probe's own thread since its start."""
    (core,) = (one for one in engine.processes() if one.role is Role.ENGINE_CORE)
    for task in Path(f"/proc/{core.pid}/task").iterdir():
        if (task / "comm").read_text(encoding="utf-8").strip() == THREAD_NAME:
            return int((task / "schedstat").read_text(encoding="ascii").split()[0]) / 1e9
    raise RuntimeError("the probe's thread is not there")


def serve(engine: VllmEngine) -> float:
    """Tokens a second."""
    began = time.monotonic()
    completions = engine.complete(REQUESTS, max_tokens=TOKENS)
    seconds = time.monotonic() - began
    assert [completion.completion_tokens for completion in completions] == [TOKENS] * REQUESTS
    return REQUESTS * TOKENS / seconds


def in_turn(rounds: int) -> tuple[list[float], list[float], float]:
    """Rounds without and with the probe, and the share of a core that its thread took meanwhile."""
    with ExitStack() as running:
        folder = Path(running.enter_context(tempfile.TemporaryDirectory()))
        installed = install_probe(folder / "installed")
        engines = []
        for name, path in (("without", ()), ("with", (installed,))):
            (folder / name).mkdir()
            environment = {"OOMWATCH_PROBE_DIR": str(folder / "run")}
            engine = VllmEngine(require_vllm(), folder / name, environment=environment, python_path=path)
            running.callback(engine.stop)
            engines.append(engine)
        with ThreadPoolExecutor(len(engines)) as starting:
            list(starting.map(VllmEngine.start, engines))
        without, probed = engines
        for engine in engines:
            serve(engine)
        processors = sorted(os.sched_getaffinity(0))
        began, before = time.monotonic(), probe_seconds(probed)
        found: tuple[list[float], list[float]] = ([], [])
        for index in range(rounds):
            # A processor each, or whoever has just served disturbs the other: their processes wait by looking again and
            # again. Every second round each is on the other's.
            for engine, processor in zip(engines, processors[index // 2 % 2 :] + processors[:1], strict=False):
                engine.run_on({processor})
            # Each is the first of the two as often as the other.
            for which in (0, 1) if index % 2 == 0 else (1, 0):
                found[which].append(serve((without, probed)[which]))
            print(f"round {index + 1}: {found[0][-1]:.0f} and {found[1][-1]:.0f} tokens/s", flush=True)
        share = (probe_seconds(probed) - before) / (time.monotonic() - began)
        return (*found, share)


def interval(ratios: list[float]) -> tuple[float, float, float]:
    """The median of ``ratios`` and the bounds between which it lies with 95 % (bootstrap)."""
    source = random.Random(1)
    medians = sorted(statistics.median(source.choices(ratios, k=len(ratios))) for _ in range(10_000))
    return statistics.median(ratios), medians[250], medians[-251]


def run(python: Path, module: str, *arguments: str, interval_s: float) -> dict[str, Any]:
    """What a program prints that has the probe on its path, and prints JSON."""
    with tempfile.TemporaryDirectory() as folder:
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
    more, low, high = interval([b - a for a, b in zip(without, probed, strict=True)])
    medians = f"{statistics.median(without) * 1e6:.1f} | {statistics.median(probed) * 1e6:.1f}"
    bounds = f"{low * 1e6:.1f} to {high * 1e6:.1f}"
    return [
        "| | without | with | difference | 95 % |",
        "|---|---:|---:|---:|---:|",
        f"| CPU time of a step of its thread, µs | {medians} | {more * 1e6:.1f} | {bounds} |",
        "",
        f"The worse end is {high / 0.01:.2%} of a step of 10 ms.",
    ]


def compared(name: str, without: list[float], probed: list[float]) -> str:
    middle, low, high = interval([b / a for a, b in zip(without, probed, strict=True)])
    medians = f"{statistics.median(without):.3f} | {statistics.median(probed):.3f}"
    return f"| {name} | {medians} | {middle:.4f} | {low:.4f} to {high:.4f} |"


def report(
    rounds: int, steps: dict[str, Any], found: tuple[list[float], list[float], float] | None, costs: dict[str, Any]
) -> str:
    heading = ["| | without | with | with / without | 95 % |", "|---|---:|---:|---:|---:|"]
    lines = [
        "# What the probe costs",
        "",
        f"Made by `python -m benchmarks.probe --rounds {rounds}`.",
        "",
        "## vLLM's scheduler",
        "",
        *added(steps["without"], steps["with"]),
        "",
    ]
    if found is not None:
        *servers, share = found
        lines += [
            "## A server",
            "",
            *heading,
            compared("tokens per second", *servers),
            "",
            f"The probe's thread took {share:.3%} of a core meanwhile.",
            "",
        ]
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
        HOW.format(rounds=rounds, requests=REQUESTS, tokens=TOKENS),
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.probe", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=12, help="loads for each of two servers; 0: none (default: 12)")
    parser.add_argument("--output", type=Path, default=HERE / "RESULTS.md", help="file to write")
    options = parser.parse_args()
    venv = require_vllm()
    steps = run(venv.python, "benchmarks.probe.steps", str(ensure_tiny_model(venv.models / MODEL_NAME)), interval_s=1)
    costs = run(Path(sys.executable), "benchmarks.probe.parts", interval_s=0.2)
    servers = in_turn(options.rounds) if options.rounds else None
    text = report(options.rounds, steps, servers, costs)
    options.output.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
