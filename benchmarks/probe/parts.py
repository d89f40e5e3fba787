"""The parts of the probe's cost, each by itself, in a process without vLLM: ``python -m benchmarks.probe.parts``.

Prints one JSON object; benchmarks.probe runs it.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from tests.probe.engine_core import Scheduler

POOLS = (1_000, 10_000, 100_000)
BLOCKS_OF_A_REQUEST = 400  # 6,400 tokens in blocks of 16
STEPS = 100_000
TICKS = 20


def anonymous_bytes() -> int:
    status = Path("/proc/self/status").read_text(encoding="ascii")
    (kibibytes,) = re.findall(r"^RssAnon:\s+(\d+) kB", status, re.MULTILINE)
    return int(kibibytes) * 1024


def best_of(function: Callable[[], None], calls: int, rounds: int = 5) -> float:
    """Seconds for one call, in the quietest of several rounds."""

    def seconds() -> float:
        began = time.thread_time()
        for _ in range(calls):
            function()
        return (time.thread_time() - began) / calls

    return min(seconds() for _ in range(rounds))


def full(blocks: int) -> Scheduler:
    scheduler = Scheduler(blocks + 1)
    for number in range(max(1, blocks // BLOCKS_OF_A_REQUEST)):
        scheduler.admit(str(number), min(blocks, BLOCKS_OF_A_REQUEST))
    return scheduler


def step_seconds(scheduler: Scheduler) -> float:
    def step() -> None:
        scheduler.schedule()
        scheduler.update_from_output()

    return best_of(step, STEPS // 5)


def main() -> None:
    scheduler = full(POOLS[0])
    bare = step_seconds(scheduler)

    before = anonymous_bytes()
    from oomwatch_probe import probe  # noqa: PLC0415 - what this brings is measured
    from oomwatch_probe.blocks import Copy, Pool  # noqa: PLC0415 - what this brings is measured

    sys.modules["vllm.v1.core.sched.scheduler"] = sys.modules[Scheduler.__module__]
    probe.prepare()
    scheduler = full(POOLS[0])
    (thread,) = (one for one in threading.enumerate() if one.name == probe.THREAD_NAME)
    assert probe._probe is not None
    while probe._probe._sequence < TICKS:
        time.sleep(0.1)
    memory = anonymous_bytes() - before
    schedstat = Path(f"/proc/self/task/{thread.native_id}/schedstat").read_text(encoding="ascii")
    tick = int(schedstat.split()[0]) / 1e9 / probe._probe._sequence

    probed = step_seconds(scheduler)

    copies, counts = {}, {}
    for blocks in POOLS:
        pool = Pool(full_scheduler := full(blocks))
        copied = [copy for _ in range(7) if (copy := pool.copy()) is not None]
        copies[blocks] = statistics.median(copy.cost_ns for copy in copied) / 1e9

        def count(pool: Pool = pool, copy: Copy = copied[0]) -> None:
            pool.count(copy)
            pool.count_cached()

        counts[blocks] = best_of(count, 1, rounds=3)
        del full_scheduler
    print(
        json.dumps(
            {
                "memory_bytes": memory,
                "tick_s": tick,
                "step_s": probed - bare,
                "copy_s": copies,
                "count_s": counts,
            }
        )
    )


if __name__ == "__main__":
    main()
