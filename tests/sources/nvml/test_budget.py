"""What polling costs, in calls that reach the driver."""

from __future__ import annotations

from tests.nvml_sim import GIB, Family, Process
from tests.sources.nvml.conftest import Watch

GPUS = 8
CYCLES = 40


def test_at_most_three_calls_for_each_device_and_cycle(watch: Watch) -> None:
    """The average of a steady state with MIG off, enumeration and slower readings included."""
    watched = watch(GPUS)
    for slot in range(GPUS):
        watched.sim.set_processes(slot, [Process(1000 * slot + number + 1, used=GIB) for number in range(20)])
    mark = watched.sim.mark()
    watched.cycle(CYCLES)
    on_devices = sum(watched.sim.calls(None, slot, since=mark) for slot in range(GPUS))
    waits = watched.sim.calls(Family.EVENT_WAIT, since=mark)
    everything = watched.sim.calls(since=mark) - waits
    assert everything / GPUS / CYCLES <= 2.5
    assert on_devices / GPUS / CYCLES <= 2.5
    assert watched.sim.calls(Family.MEMORY, since=mark) == GPUS * CYCLES


def test_names_and_versions_are_read_once(watch: Watch) -> None:
    watched = watch(2)
    mark = watched.sim.mark()
    watched.cycle(8)
    assert watched.sim.calls(Family.IDENTITY, since=mark) == 0
    assert watched.sim.calls(Family.SYSTEM, since=mark) == 0
    assert watched.sim.calls(Family.INIT, since=mark) == 0
