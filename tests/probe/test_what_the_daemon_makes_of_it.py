"""From PyTorch's own numbers through the probe's file and the daemon's source to what is concluded."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from oomwatch.detectors.base import AllocatorSample, State, Subject
from oomwatch.detectors.fragmentation import AllocatorFragmentation, AllocatorFragmentationSettings
from oomwatch.observations import AllocatorReport, Memory
from oomwatch_probe.allocator import statistics, summarise
from oomwatch_probe.layout import Absence, encode
from tests.detectors.leaking import Course
from tests.probe.torch_shapes import (
    EXPANDABLE,
    FREE,
    GRAPHS,
    HEALTHY_SLACK,
    MIB,
    PIECES,
    REMAINDERS,
    USED,
    Segment,
    segment,
    stats_of,
)
from tests.sources.test_allocator import GPU, Node, ns

HALF_AN_HOUR = 1800.0
PEAK = 80 << 30  # of what was allocated at once: it bounds the largest transient, and not here
# vllm-project/vllm PR #37428: what the driver had left.
FREE_OF_37428 = 330 * MIB


def course(
    folder: Path, before: Sequence[Segment], after: Sequence[Segment], driver_free: int, every: float = 60.0
) -> Course:
    """Half an hour as ``before``, half an hour as ``after``, both read from the file that the probe would write."""
    node = Node(folder)
    node.process()
    begin = node.now
    detector = AllocatorFragmentation(
        Subject(engine="llm", gpu="GPU-1", pid=4712), AllocatorFragmentationSettings.model_validate({})
    )
    findings = []
    while (age := node.now - begin) <= 2 * HALF_AN_HOUR:
        shape = before if age < HALF_AN_HOUR else after
        path = node.write({})
        stats = statistics(stats_of(shape))
        stats["allocated_bytes_peak"] = PEAK
        now = ns(node.now)
        clock: dict[str, int | Absence] = {"heartbeat_ns": now, "interval_ns": ns(1), "expandable_segments": 0}
        path.write_bytes(encode(1, {**clock, **stats, **summarise(shape)}, {"device_uuid": GPU}))
        (report,) = node.read()
        assert isinstance(report, AllocatorReport)
        memory = Memory(80 << 30, 0, (80 << 30) - driver_free, driver_free)
        detector.observe(AllocatorSample(node.now, "llm", report, memory, 1, 1, begin, begin - HALF_AN_HOUR, False))
        findings.append((age, detector.conclude(node.now)))
        node.now += every
    return Course(findings)


@pytest.mark.parametrize("shape", [HEALTHY_SLACK, PIECES, REMAINDERS, GRAPHS, EXPANDABLE])
def test_a_shape_that_stays_as_it_is_is_clear_whatever_its_slack(tmp_path: Path, shape: Sequence[Segment]) -> None:
    """What nobody has asked for in one piece is not missing."""
    assert course(tmp_path, shape, shape, FREE_OF_37428).worst == "clear"


# PR #37428 before its memory broke up: the same sizes, with what is free in one piece.
IN_ONE_PIECE = [segment((4592, USED)), segment((402, FREE))]


@pytest.mark.parametrize(
    ("driver_free", "state"),
    [
        (FREE_OF_37428, "ticket"),  # and 384 MiB were wanted: the request failed
        (402 * MIB - 1, "ticket"),
        (402 * MIB, "clear"),
    ],
)
def test_free_memory_that_broke_up_until_what_was_served_before_fits_nowhere(
    tmp_path: Path, driver_free: int, state: State
) -> None:
    found = course(tmp_path, IN_ONE_PIECE, PIECES, driver_free)
    assert found.worst == state
    assert found.last.evidence["unallocated_bytes"] == 402 * MIB
    assert found.last.evidence["largest_free_block_bytes"] == 100 * MIB
    assert found.last.evidence["releasable_bytes"] == 0
