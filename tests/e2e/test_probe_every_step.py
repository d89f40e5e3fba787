"""The probe beside vLLM's real schedulers, driven step by step: its count is right before and after each call."""

from __future__ import annotations

import json
import os
import subprocess
from typing import Any

import pytest

from tests.documents import REPOSITORY
from tests.e2e.engine import CPU_ENVIRONMENT, MODEL_NAME
from tests.e2e.every_step import BLOCKS
from tests.e2e.model import ensure_tiny_model
from tests.e2e.vllm_setup import VllmVenv

USABLE_BLOCKS = BLOCKS - 1


@pytest.mark.real
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("scheduler", "in_flight"), [("Scheduler", 1), ("AsyncScheduler", 2)])
def test_every_block_has_its_holder_at_every_step(scheduler: str, in_flight: int, vllm_venv: VllmVenv) -> None:
    found = drive(vllm_venv, scheduler, in_flight)
    healthy, leaking = found["healthy"], found["leaking"]
    assert healthy["most"] == USABLE_BLOCKS
    assert healthy["preemptions"] > 20
    assert healthy["hits"] > 0
    assert healthy["counts"] > 3 * healthy["steps"] > 1000
    assert healthy["wrong"] == 0
    assert found["lost"] > 1
    assert leaking["counts"] - healthy["counts"] > 1000
    assert leaking["wrong"] == 0


def drive(venv: VllmVenv, scheduler: str, in_flight: int) -> dict[str, Any]:
    model = ensure_tiny_model(venv.models / MODEL_NAME)
    environment = {
        **os.environ,
        **CPU_ENVIRONMENT,
        "VLLM_CACHE_ROOT": str(venv.cache),
        "PYTHONPATH": os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "probe")]),
    }
    command = [str(venv.python), "-W", "ignore", "-m", "tests.e2e.every_step", scheduler, str(in_flight), str(model)]
    answer = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert answer.returncode == 0, answer.stderr[-3000:]
    found: dict[str, Any] = json.loads(answer.stdout.splitlines()[-1])
    return found
