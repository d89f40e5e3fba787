"""A busy server's log of 100 MB, read as the daemon reads it: ``python -m benchmarks.enginelog``.

The log is made up of the lines that fill real ones: accesses, logged requests with prompts, the periodic statistics, a
traceback now and then, and a whole start-up. Exit status 1 when it takes 2 s of processor time or 50 MB of memory.
"""

from __future__ import annotations

import argparse
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from oomwatch.enginelog.reader import read

MB = 1_000_000
LIMIT_SECONDS = 2.0
LIMIT_BYTES = 50 * MB

START = """\
(APIServer pid=1) INFO 11-30 09:00:00 [utils.py:1] vLLM API server version 0.11.0
(EngineCore_DP0 pid=2) INFO 11-30 09:00:09 [core.py:1] Initializing a V1 LLM engine (v0.11.0) with config: a=1
(EngineCore_DP0 pid=2) INFO 11-30 09:00:40 [gpu_model_runner.py:1] Model loading took 14.99 GiB and 20.1 seconds
(EngineCore_DP0 pid=2) INFO 11-30 09:00:50 [gpu_worker.py:1] Available KV cache memory: 50.88 GiB
(EngineCore_DP0 pid=2) INFO 11-30 09:00:51 [kv_cache_utils.py:1] GPU KV cache size: 416,832 tokens
(APIServer pid=1) INFO:     Application startup complete.
"""


def lines(size: int) -> Iterator[str]:
    """The log, about ``size`` bytes of it."""
    chance = random.Random(1)
    words = ["the", "memory", "of", "an", "engine", "version", ",", "in", "words", "that", "a", "prompt", "has"]
    written = len(START)
    yield START
    number = 0
    while written < size:
        number += 1
        clock = f"11-{1 + number // 86400 % 28:02d} {number // 3600 % 24:02d}:{number // 60 % 60:02d}:{number % 60:02d}"
        kind = chance.random()
        if kind < 0.75:
            line = f'(APIServer pid=1) INFO:     10.0.0.7:{30000 + number % 9999} - "POST /v1/completions" 200\n'
        elif kind < 0.9:
            prompt = " ".join(chance.choices(words, k=chance.randint(20, 400)))
            line = f"(APIServer pid=1) INFO {clock} [logger.py:43] Received request cmpl-{number}: prompt: '{prompt}'\n"
        elif kind < 0.95:
            line = f"(APIServer pid=1) INFO {clock} [async_llm.py:300] Added request cmpl-{number}.\n"
        elif kind < 0.999:
            line = (
                f"(APIServer pid=1) INFO {clock} [loggers.py:248] Engine 000: Avg prompt throughput: 98.0 tokens/s, "
                f"Avg generation throughput: 194.7 tokens/s, Running: {number % 40} reqs, Waiting: {number % 7} reqs, "
                f"GPU KV cache usage: {number % 1000 / 10}%, Prefix cache hit rate: 0.0%\n"
            )
        else:
            line = (
                f'(EngineCore_DP0 pid=2) ERROR {clock} [core.py:1]   File "x.py", line {number}, in execute_model\n'
                * 30
            )
        written += len(line)
        yield line


def _peak() -> int:
    """Bytes of memory that this process has had at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measured(path: Path) -> bool:
    """Read the file in this process, and print what it took; whether that is within the limits."""
    before = _peak()
    begin = time.process_time()
    with path.open("rb") as log:
        found = Counter(entry.event.name for entry in read(log))
    seconds = time.process_time() - begin
    peak = _peak()
    print(
        f"{path.stat().st_size / MB:.0f} MB read in {seconds:.2f} s of processor time, {peak / MB:.0f} MB of memory "
        f"at the peak ({before / MB:.0f} MB before): {found.total()} events, {dict(found.most_common())}"
    )
    return seconds <= LIMIT_SECONDS and peak <= LIMIT_BYTES


def main() -> int:
    """Make the log and read it in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=float, default=100, help="in MB")
    parser.add_argument("--read", type=Path, help="read this file instead, in this process")
    options = parser.parse_args()
    if options.read is not None:
        return 0 if measured(options.read) else 1
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "vllm.log"
        with path.open("w") as log:
            log.writelines(lines(int(options.size * MB)))
        command = [sys.executable, "-m", "benchmarks.enginelog", "--read", str(path)]
        return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
