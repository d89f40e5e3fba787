"""A fleet made of the demo's nodes: what a scrape of each would have stored over two days.

A node's series are those of the demo in one of its stories, with their labels and last values. Over time counters grow,
what moves with the load goes up and down, and states stay.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

from prometheus_client.samples import Sample

from benchmarks.dashboards.block import PER_CHUNK, STEP_MS, Encoded, Labels, encode
from oomwatch.demo import DemoNode
from oomwatch.judge import Judge
from oomwatch.node import Cadence, Node
from oomwatch.verdicts import KILLERS
from tests.exposed import collector

HOURS = 48
SAMPLES = HOURS * 60
JOB = "oomwatch"
END_MS = 1_790_000_000_000 // (PER_CHUNK * STEP_MS) * PER_CHUNK * STEP_MS
BEGIN_MS = END_MS - SAMPLES * STEP_MS
# Most nodes are well; how far each story has come, in its own seconds.
STORIES: Mapping[str, float] = {"healthy": 240, "capacity": 380, "leak": 400, "fragmentation": 280}
SHARES = ("healthy",) * 12 + ("capacity", "leak", "fragmentation")
SHAPES = 16
"""Different courses of each kind: neighbouring series are not alike, and making them takes seconds."""

ENGINES = ("llama-70b", "qwen-7b", "mistral-7b")
# What the recording rules make of a node: name to the label besides the node's, and its values.
RECORDED: Mapping[str, tuple[str, Sequence[str]]] = {
    "instance_killer:oomwatch_verdict_state:max": ("killer", KILLERS),
    "engine:oomwatch_engine_kv_cache_usage_ratio:max": ("engine", ENGINES),
    "engine:oomwatch_engine_generation_tokens:rate5m": ("engine", ENGINES),
}
AROUND: Mapping[str, float] = {
    "up": 1.0,
    "scrape_duration_seconds": 0.01,
    "process_cpu_seconds_total": 900.0,
    "process_resident_memory_bytes": 75e6,
    "process_start_time_seconds": BEGIN_MS / 1000 - 60,
}


@cache
def page(story: str) -> tuple[Sample, ...]:
    """What the node shows at its last moment."""
    demo = DemoNode(story)
    judge = Judge(Node(Cadence(*[5.0] * 5)))
    begin = END_MS / 1000 - STORIES[story]
    for step in range(int(STORIES[story] / 5) + 1):
        for observation in demo.observations(begin + 5 * step):
            judge.apply(observation)
    own = [sample for metric in collector(judge.snapshot()).collect() for sample in metric.samples]
    added = [Sample(name, {}, value) for name, value in AROUND.items()]
    recorded = [Sample(name, {label: value}, 0.4) for name, (label, values) in RECORDED.items() for value in values]
    return (*own, *added, *recorded)


def nodes(engines: int) -> int:
    """How many nodes there are for so many engines."""
    return math.ceil(engines / len(ENGINES))


def instance(number: int) -> str:
    return f"gpu-node-{number:04d}.example.org:18666"


def series(engines: int, everywhere: frozenset[str], once: frozenset[str]) -> Iterator[tuple[Labels, Encoded]]:
    """The names in ``everywhere`` of all nodes, those in ``once`` of the first alone: others are never asked for."""
    draw = random.Random(1)
    for number in range(nodes(engines)):
        # The first is the one that Engine and GPU show.
        for sample in page("leak" if number == 0 else SHARES[number % len(SHARES)]):
            if sample.name in everywhere or (number == 0 and sample.name in once):
                labels = {"__name__": sample.name, "instance": instance(number), "job": JOB}
                labels |= {name: value for name, value in sample.labels.items() if value}
                yield tuple(sorted(labels.items())), course(sample, draw.randrange(SHAPES))


def course(sample: Sample, shape: int) -> Encoded:
    if sample.name.endswith("_total"):
        return _counter(shape) if sample.value else _constant(0.0)
    if sample.name == "oomwatch_snapshot_timestamp_seconds":
        return _clock()
    if re.search(r"(usage_ratio|_requests|rate5m|duration_seconds|resident|anonymous|used_blocks)", sample.name):
        return _moving(shape, 10 ** round(math.log10(max(sample.value, 0.01))))
    if re.search(r"(free|held|device_memory|floor).*_bytes$", sample.name):
        return _stepping(shape, sample.value)
    return _constant(sample.value)


@cache
def _constant(value: float) -> Encoded:
    return encode([value] * SAMPLES, BEGIN_MS)


@cache
def _clock() -> Encoded:
    return encode([(BEGIN_MS + step * STEP_MS) / 1000 - 5 for step in range(SAMPLES)], BEGIN_MS)


@cache
def _counter(shape: int) -> Encoded:
    draw = random.Random(f"counter {shape}")
    total, values = 0.0, []
    for _ in range(SAMPLES):
        total += draw.randrange(40 * (shape + 1))
        values.append(total)
    return encode(values, BEGIN_MS)


@cache
def _moving(shape: int, scale: float) -> Encoded:
    draw = random.Random(f"moving {shape}")
    day = 24 * 60
    return encode(
        [
            scale * (0.5 + 0.4 * math.sin(2 * math.pi * (step + 90 * shape) / day) + 0.1 * draw.random())
            for step in range(SAMPLES)
        ],
        BEGIN_MS,
    )


@cache
def _stepping(shape: int, value: float) -> Encoded:
    """Memory: the same for a while, then some pages more or less."""
    draw = random.Random(f"stepping {shape}")
    now, values = value, []
    for _ in range(SAMPLES):
        if draw.random() < 0.02:
            now = max(0.0, now + draw.randrange(-8, 9) * 2 * 1024**2)
        values.append(now)
    return encode(values, BEGIN_MS)


def stored(folder: Path) -> int:
    """Bytes below the folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
