from __future__ import annotations

import pytest

from oomwatch.observations import NOT_READ, GpuProcess, Memory
from oomwatch.plausibility import plausible

GIB = 1 << 30
MEMORY = Memory(total=80 * GIB, reserved=GIB, used=40 * GIB, free=39 * GIB)


@pytest.mark.parametrize(
    "processes",
    [
        (),
        (GpuProcess(4711, 40 * GIB),),
        (GpuProcess(4711, 20 * GIB), GpuProcess(4712, None)),
        (GpuProcess(2**22 - 1, GIB),),
    ],
)
def test_lists_that_can_be_true(processes: tuple[GpuProcess, ...]) -> None:
    assert plausible(processes, MEMORY)


def test_memory_taken_between_the_two_calls_is_allowed_for() -> None:
    assert plausible([GpuProcess(4711, 70 * GIB)], MEMORY)


@pytest.mark.parametrize(
    "processes",
    [
        (GpuProcess(4711, 38 * GIB), GpuProcess(0, 5822), GpuProcess(4294967295, 0)),
        (GpuProcess(0, GIB),),
        (GpuProcess(2**22, GIB),),
        (GpuProcess(4711, GIB), GpuProcess(4711, GIB)),
        (GpuProcess(4711, 81 * GIB),),
    ],
    ids=["a scrambled list", "pid 0", "a pid beyond the kernel's limit", "a pid twice", "more than the device has"],
)
def test_lists_that_cannot(processes: tuple[GpuProcess, ...]) -> None:
    assert not plausible(processes, MEMORY)


def test_more_than_what_is_in_use_by_over_half_of_the_device() -> None:
    idle = Memory(total=80 * GIB, reserved=GIB, used=GIB, free=78 * GIB)
    assert plausible([GpuProcess(4711, 41 * GIB)], idle)
    assert not plausible([GpuProcess(4711, 42 * GIB)], idle)


def test_without_memory_the_pids_alone_are_judged() -> None:
    assert plausible([GpuProcess(4711, 2**62)], NOT_READ)
    assert not plausible([GpuProcess(0, GIB)], NOT_READ)
