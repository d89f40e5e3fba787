"""Gauges that an abort leaves up, before vLLM 0.10.2: ``python -m benchmarks.detection.left_over``.

Draws of ``stale_gauges``, which are healthy, and of ``stuck_engine`` with version 0.9.2, as many as an argument says
(default 20), with the clients of the set for tuning: the frozen sets hold no engine of that version that hangs. How
many of each ``engine-stuck`` pages, and how long after the hang.
"""

from __future__ import annotations

import sys
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from statistics import median

from benchmarks.detection import sets
from benchmarks.detection.families import draw, with_version
from benchmarks.detection.ours import detect
from benchmarks.detection.render import EPOCH, observations
from benchmarks.detection.traffic import TRACES, traces_in
from benchmarks.detection.world import build

VERSION = "0.9.2"


def first_page(family: str, number: int) -> tuple[float, float | None] | None:
    """GPU-weeks of a run, and seconds from the hang (or the start) to its first page; None where it came to no harm."""
    run = build(with_version(draw(family, sets.load()["tune"].spec, number), VERSION), traces_in(TRACES))
    if run is None:
        return None
    onset = run.label.onset if run.label else 0.0
    changes = detect(observations(run, lengths=False, ticks=4, devices=False, host=False), {"engine-stuck"})
    pages = (t - EPOCH - onset for t, _, state, _ in changes if state == "page")
    return run.gpu_weeks, next((after for after in pages if after >= 0), None)


def main(count: int) -> None:
    with ProcessPoolExecutor(2) as workers:
        for family in ("stale_gauges", "stuck_engine"):
            runs = [run for run in workers.map(partial(first_page, family), range(count)) if run]
            pages = [page for _, page in runs if page is not None]
            weeks = sum(weeks for weeks, _ in runs)
            after = (
                f", in the middle {median(pages):.0f} s after the hang" if pages and family == "stuck_engine" else ""
            )
            print(f"{family}: {len(pages)} of {len(runs)} runs page, in {weeks:.0f} GPU-weeks{after}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 20)
