"""What the detectors cost: ``python -m benchmarks.detection.cost``.

One busy engine on one GPU is watched for 48 h at the daemon's default intervals, with every detector at work and a
conclusion at every sample. What each detector was told is then told to a new one by itself, and its processor time
counted by the engine's samples, in the first and in the last twelve hours, so that work which grows with the history
would show; then its memory.
"""

from __future__ import annotations

import sys
import time
from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence

from benchmarks.detection.render import observations
from benchmarks.detection.sets import load
from benchmarks.detection.spec import DAY
from benchmarks.detection.traffic import Traces
from benchmarks.detection.world import Run, build
from oomwatch.detectors.base import Detector, Finding, Sample
from oomwatch.detectors.registry import KINDS
from oomwatch.judge import Judge, Seat
from oomwatch.node import Node

DAYS = 2.0
EDGE_S = 12 * 3600.0
ENGINES = 64


class Recorder:
    """Stands in front of a detector and keeps what it is told and asked."""

    def __init__(self, seat: Seat) -> None:
        self.seat = seat
        self.detector = seat.detector
        self.calls: list[Sample | float] = []  # a time is a question

    def observe(self, sample: Sample) -> None:
        self.calls.append(sample)
        self.detector.observe(sample)

    def conclude(self, t: float) -> Finding:
        self.calls.append(t)
        return self.detector.conclude(t)

    def seconds(self) -> tuple[float, float]:
        """Processor time of a new detector that is told the same, in the first and the last twelve hours."""
        kind = next(kind for kind in KINDS if kind.verdict == self.seat.verdict)
        detector = kind.make(self.seat.subject, self.seat.settings)
        begin = _time(self.calls[0])
        edge = bisect_left(self.calls, begin + EDGE_S, key=_time)
        other_edge = bisect_left(self.calls, begin + DAYS * DAY - EDGE_S, key=_time)
        first = _seconds(detector, self.calls[:edge])
        _seconds(detector, self.calls[edge:other_edge])
        return first, _seconds(detector, self.calls[other_edge:])


def _seconds(detector: Detector, calls: Sequence[Sample | float]) -> float:
    started = time.thread_time()
    for call in calls:
        if isinstance(call, float):
            detector.conclude(call)
        else:
            detector.observe(call)
    return time.thread_time() - started


def _time(call: Sample | float) -> float:
    return call if isinstance(call, float) else call.t


def busy_run() -> Run:
    scenario = next(load()["tune"].scenarios(("always_busy",), 1))._replace(days=DAYS, ranks=1)
    run = build(scenario, Traces())
    assert run is not None
    return run


def watched(run: Run) -> list[Recorder]:
    """Every detector of a judge that saw the run, with all that it was told."""
    judge = Judge(Node())
    recorders: dict[int, Recorder] = {}
    for observation in observations(run):
        judge.apply(observation)
        for seats in judge.memory.seats.values():
            for seat in seats:
                if id(seat) not in recorders:
                    recorders[id(seat)] = recorder = Recorder(seat)
                    seat.detector = recorder
    return list(recorders.values())


def _size(thing: object, seen: set[int]) -> int:
    """Bytes of an object and of all that only it leads to, without classes, settings and small constants."""
    if id(thing) in seen or isinstance(thing, (type, bool, type(None))):
        return 0
    seen.add(id(thing))
    size = sys.getsizeof(thing)
    if isinstance(thing, Mapping):
        size += sum(_size(key, seen) + _size(value, seen) for key, value in thing.items())
    elif isinstance(thing, (list, tuple, set, frozenset, deque)):
        size += sum(_size(one, seen) for one in thing)
    elif hasattr(thing, "__dict__") and not hasattr(thing, "model_fields_set"):
        size += _size(vars(thing), seen)
    return size


def main() -> int:
    run = busy_run()
    samples = EDGE_S / run.scenario.sampling.interval
    first: dict[str, float] = defaultdict(float)
    last: dict[str, float] = defaultdict(float)
    size: dict[str, int] = defaultdict(int)
    for recorder in watched(run):
        verdict = recorder.seat.verdict
        begin, end = recorder.seconds()
        first[verdict] += begin / samples * 1e6
        last[verdict] += end / samples * 1e6
        size[verdict] += _size(recorder.detector, set())
    print(f"{len(run.t)} samples of one engine on one GPU in {DAYS:g} days, a conclusion at each.\n")
    print("| verdict | µs a sample, first 12 h | last 12 h | bytes |\n|---|---|---|---|")
    for verdict, each in sorted(last.items(), key=lambda item: -item[1]):
        print(f"| `{verdict}` | {first[verdict]:.1f} | {each:.1f} | {size[verdict]:,} |")
    print(f"| all | {sum(first.values()):.0f} | {sum(last.values()):.0f} | {sum(size.values()):,} |")
    print(f"\n{ENGINES} such engines: {ENGINES * sum(size.values()) / 1e6:.0f} MB.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
