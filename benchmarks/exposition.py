"""What one scrape of /metrics costs: ``python -m benchmarks.exposition``.

Renders the snapshot of a node with 8 GPUs of 20 processes each and 4 engines of 4 ranks, as the server does, and
prints CPU time and size by format. No source and no network takes part: only what a scrape itself does.
"""

from __future__ import annotations

import gzip
import statistics
import time
from collections.abc import Callable
from functools import partial

from oomwatch.exposition import render
from tests.exposed import everything
from tests.snapshots import crowded

REPETITIONS = 200
FORMATS = {"text 0.0.4": "", "OpenMetrics 1.0.0": "application/openmetrics-text;version=1.0.0"}


def milliseconds(action: Callable[[], object]) -> tuple[float, float]:
    """Median and 95th percentile of the CPU time of one run."""
    times = []
    for _ in range(REPETITIONS):
        begin = time.thread_time()
        action()
        times.append((time.thread_time() - begin) * 1000)
    return statistics.median(times), statistics.quantiles(times, n=20)[-1]


def main() -> None:
    served = everything(crowded(gpus=8, processes=20, engines=4))
    print(f"{'format':<20}{'samples':>9}{'bytes':>9}{'gzip':>8}{'median ms':>11}{'p95 ms':>9}")
    for name, accept in FORMATS.items():
        page = render(served, accept)[0]
        count = sum(not line.startswith(b"#") for line in page.splitlines())
        median, high = milliseconds(partial(render, served, accept))
        print(f"{name:<20}{count:>9}{len(page):>9}{len(gzip.compress(page)):>8}{median:>11.2f}{high:>9.2f}")
    median, high = milliseconds(lambda: list(served.collect()))
    print(f"{'of it, the families':<46}{median:>11.2f}{high:>9.2f}")


if __name__ == "__main__":
    main()
