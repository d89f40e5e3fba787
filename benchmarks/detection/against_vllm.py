"""How far the simulator's step is from a real vLLM's: ``python -m benchmarks.detection.against_vllm``.

The same requests arrive at the same steps in vLLM, stepped by hand with the tests' tiny model on the CPU, and in the
exact engine. After each step both say how many run and wait, how many blocks are in use, and how often requests were
preempted. Arguments choose some of the loads: calm, busy, overfull. Needs the vLLM of the tests, which
``python -m tests.e2e.vllm_setup`` makes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.detection.exact import ExactEngine, Request
from benchmarks.detection.spec import FINISHED_LENGTH, FINISHED_STOP, NEVER, PREEMPTIONS, EngineSpec, Floats
from tests.e2e.engine import CPU_ENVIRONMENT
from tests.e2e.model import FIRST_BYTE_TOKEN, ensure_tiny_model
from tests.e2e.tools import require_vllm

BLOCK_SIZE = 32  # of the CPU's attention
PREFIX = 64  # tokens that the requests of one group begin with
ENVIRONMENT = {**os.environ, **CPU_ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "WARNING"}
COLUMNS = ("running", "waiting", "used blocks", "preemptions", "finished")


class Arrival(NamedTuple):
    """A request: the step that it comes at, its lengths in tokens, and its prefix' number, -1 for none."""

    step: int
    prompt: int
    output: int
    prefix: int


@dataclass(frozen=True)
class Case:
    """Requests for so many steps at a mean rate per step, in a pool of so many usable blocks."""

    name: str
    steps: int
    blocks: int
    rate: float
    max_num_seqs: int = 24
    max_batched_tokens: int = 256
    seed: int = 1

    @property
    def spec(self) -> EngineSpec:
        return EngineSpec(
            blocks=self.blocks,
            block_size=BLOCK_SIZE,
            max_num_seqs=self.max_num_seqs,
            max_batched_tokens=self.max_batched_tokens,
            patience=NEVER,
        )

    def arrivals(self) -> list[Arrival]:
        rng = np.random.default_rng(self.seed)
        counts = rng.poisson(self.rate, self.steps - self.steps // 5)  # the last fifth empties the engine
        return [
            Arrival(step, int(rng.integers(70, 400)), int(rng.integers(5, 110)), int(rng.integers(-2, 4)))
            for step, count in enumerate(counts)
            for _ in range(count)
        ]


CASES = (
    Case("calm: a third of the pool", 900, 400, 0.12),
    Case("busy: the batch is full and requests wait", 900, 400, 0.6),
    Case("overfull: requests push each other out", 250, 60, 0.3),
)


def simulated(case: Case) -> Floats:
    """COLUMNS after each step, of the exact engine."""
    engine = ExactEngine(case.spec)
    arrivals = [
        Request(i, a.step, a.prompt, a.output, -1, max(a.prefix, -1), PREFIX if a.prefix >= 0 else 0)
        for i, a in enumerate(case.arrivals())
    ]
    rows = []
    for step in range(case.steps):
        while arrivals and arrivals[0].arrival <= step:
            engine.add(arrivals.pop(0))
        if engine.step(step) is not None:
            engine.finish_step(step + 0.5)
        row = engine.row
        used = engine.pool.usable - engine.pool.free
        finished = row[FINISHED_STOP] + row[FINISHED_LENGTH]
        rows.append([len(engine.running), len(engine.waiting), used, row[PREEMPTIONS], finished])
    return np.array(rows, dtype=np.float64)


def real(case: Case) -> Floats:
    """The same of vLLM."""
    venv = require_vllm()
    asked = {
        "model": str(ensure_tiny_model(venv.models / "tiny")),
        "engine": {
            "dtype": "bfloat16",
            "max_model_len": 1024,
            "enforce_eager": True,
            "block_size": BLOCK_SIZE,
            "num_gpu_blocks_override": case.blocks + 1,
            "max_num_seqs": case.max_num_seqs,
            "max_num_batched_tokens": case.max_batched_tokens,
            "async_scheduling": False,
        },
        "requests": [[a.step, _tokens(i, a), a.output] for i, a in enumerate(case.arrivals())],
        "steps": case.steps,
    }
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "rows.json"
        script = Path(__file__).with_name("vllm_steps.py")
        command = [str(venv.python), "-P", str(script), str(answer)]
        done = subprocess.run(
            command, input=json.dumps(asked), text=True, capture_output=True, check=False, env=ENVIRONMENT
        )
        if done.returncode:
            raise RuntimeError(f"vLLM did not step to the end:\n{done.stderr}")
        return np.array(json.loads(answer.read_text(encoding="utf-8")), dtype=np.float64)


def _tokens(number: int, arrival: Arrival) -> list[int]:
    """A prompt that shares its first tokens with those of the same prefix, and nothing with any other."""
    own = np.random.default_rng([2, number]).integers(0, 256, arrival.prompt)
    if arrival.prefix >= 0:
        own[:PREFIX] = np.random.default_rng([3, arrival.prefix]).integers(0, 256, PREFIX)
    return [FIRST_BYTE_TOKEN + int(token) for token in own]


def distances(case: Case, ours: Floats, theirs: Floats) -> list[str]:
    """A row of the table for each column: the largest values, the mean and largest distance, and the share of steps
    that are the same."""
    lines = []
    for i, column in enumerate(COLUMNS):
        apart = np.abs(ours[:, i] - theirs[:, i])
        lines.append(
            f"| {case.name} | {column} | {theirs[:, i].max():.0f} | {ours[:, i].max():.0f} | {apart.mean():.3g} | "
            f"{apart.max():.0f} | {np.mean(apart == 0):.1%} |"
        )
    return lines


def main() -> int:
    chosen = [case for case in CASES if len(sys.argv) < 2 or case.name.split(":")[0] in sys.argv[1:]]
    print("| load | | vLLM's largest | simulator's largest | mean distance | largest distance | steps alike |")
    print("|---|---|---|---|---|---|---|")
    for case in chosen:
        for line in distances(case, simulated(case), real(case)):
            print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
