"""Runs as a vLLM server would: serves a captured page whose counters move, with the processes of an engine below it.

Started by benchmarks.cost.node as ``python …/bin/vllm serve MODEL --port PORT``, so that oomwatch finds it by itself.
Says "up", then the pids of its children; ends, and they with it, when its input is closed.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.sources.vllm.servers import Engine, FakeVllm, Request

PAGE = "0.32.0/06-tiny-pool-saturated-preempting.prom"
CAPTURES = Path(__file__).parents[2] / "tests" / "data" / "captures"
REQUESTS_PATH = "/requests"
"""Answers how many requests had the header MARK, as those of the measured daemon have: others may look around too."""
MARK = "X-Measured"

_COUNTER = re.compile(rb"^(vllm:\w+(?:_total|_count|_sum|_bucket)\{[^\n]*\} )([0-9.e+]+)$", re.MULTILINE)
_TITLES = ("VLLM::EngineCore", "VLLM::Worker_TP0", "VLLM::Worker_TP1")


def captured_page() -> bytes:
    return (CAPTURES / PAGE).read_bytes()


def later(page: bytes, steps: int) -> bytes:
    """The page as it might be after so many more scrapes of steady load: a thousandth more each time."""
    factor = 1 + steps / 1000
    return _COUNTER.sub(lambda match: b"%s%a" % (match[1], float(match[2]) * factor), page)


def main() -> None:
    port = int(sys.argv[sys.argv.index("--port") + 1])
    captured = captured_page()
    vllm = FakeVllm(captured)

    def answer(request: Request) -> None:
        if request.path == REQUESTS_PATH:
            request.reply(b"%d" % sum(MARK in headers for headers in engine.headers))
            return
        vllm.page = later(captured, engine.paths.count("/metrics"))
        vllm(request)

    with Engine(answer, port) as engine:
        children = [
            subprocess.Popen(
                [title, "-c", "import sys; sys.stdin.read()"], executable=sys.executable, stdin=subprocess.PIPE
            )
            for title in _TITLES
        ]
        print("up", *(child.pid for child in children), flush=True)
        sys.stdin.read()
        for child in children:
            child.communicate()


if __name__ == "__main__":
    main()
