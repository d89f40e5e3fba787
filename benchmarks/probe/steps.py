"""vLLM's scheduler with and without the probe, in turn, in one process: ``python -m benchmarks.probe.steps MODEL``.

Runs in an environment with vLLM. What a step costs the thread that does it is its CPU time, which other work on the
machine moves little. Prints one JSON object; benchmarks.probe runs it.
"""

from __future__ import annotations

import importlib
import json
import random
import sys
import time
from typing import Any

from oomwatch_probe import probe
from oomwatch_probe.hooks import NEEDED_CALLS, OTHER_CALLS
from tests.e2e.every_step import Driver

REQUESTS = 6
PAIRS = 120


class Uncounted(Driver):
    def count(self) -> None:
        """The probe does it, or nobody."""


def main(model: str) -> None:
    probe.prepare()
    driver = Uncounted("Scheduler", 1, model)
    scheduler_class: Any = importlib.import_module("vllm.v1.core.sched.scheduler").Scheduler
    names = [name for name in (*NEEDED_CALLS, *OTHER_CALLS) if hasattr(getattr(scheduler_class, name), "__wrapped__")]
    wrapped = {name: getattr(scheduler_class, name) for name in names}
    bare = {name: call.__wrapped__ for name, call in wrapped.items()}

    def seconds_of_a_step(calls: dict[str, Any], seed: int) -> float:
        for name, call in calls.items():
            setattr(scheduler_class, name, call)
        driver._random = random.Random(seed)  # the same load for both
        driver.scheduler.reset_prefix_cache()
        driver.add(REQUESTS)
        before, began = driver.seen["steps"], time.thread_time()
        driver.run()
        return (time.thread_time() - began) / (driver.seen["steps"] - before)

    seconds_of_a_step(bare, 0)
    found: tuple[list[float], list[float]] = ([], [])
    for index in range(PAIRS):
        for which in (0, 1) if index % 2 == 0 else (1, 0):
            found[which].append(seconds_of_a_step((bare, wrapped)[which], index))
    print(json.dumps({"without": found[0], "with": found[1], "calls": names}))


if __name__ == "__main__":
    main(*sys.argv[1:])
