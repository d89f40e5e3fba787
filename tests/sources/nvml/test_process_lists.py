"""Process lists: of every driver, of any length, and of drivers that scramble them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pynvml
import pytest

from oomwatch.observations import IMPLAUSIBLE, Absent, GpuProcess, Memory
from oomwatch.sources.nvml.calls import Nvml, ProcessLists
from tests.nvml_sim import GIB, MIB, VARIANTS, Family, Process, Sim, load_into_pynvml
from tests.sources.nvml.conftest import Watch

ENGINES = [Process(4711, used=30 * GIB), Process(5822, used=20 * GIB), Process(6933, used=10 * GIB)]
AS_LISTED = tuple(GpuProcess(process.pid, process.used) for process in ENGINES)


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_driver_gives_memory_and_processes(watch: Watch, variant: str) -> None:
    watched = watch(2, variant=variant, start=False)
    watched.sim.set_processes(0, ENGINES)
    watched.cycle(2)
    poll = watched.seen.polls(watched.uuid(0))[0]
    assert poll.processes == AS_LISTED
    old = variant == "470"
    assert poll.memory == Memory(
        total=80 * GIB,
        reserved=None if old else 600 * MIB,
        used=60 * GIB + (600 * MIB if old else 0),
        free=20 * GIB - 600 * MIB,
    )
    assert poll.errors().keys() <= {"recovery_action"}
    assert watched.seen.run(watched.uuid(0)).ok


def test_an_early_r535_driver_is_warned_about(watch: Watch) -> None:
    watched = watch(1, variant="535.54", driver={"driver_version": "535.54.03"})
    driver = watched.seen.driver()
    assert driver.state == "ok"
    assert "older than 535.104.05" in driver.detail
    assert watched.seen.run().ok


@pytest.mark.parametrize("version", ["535.104.05", "535.261.03", "550.163.01", "525.147.05"])
def test_other_drivers_are_not_warned_about(watch: Watch, version: str) -> None:
    assert watch(1, driver={"driver_version": version}).seen.driver().detail == ""


@pytest.mark.parametrize("count", [0, 1, 2, 200, 256])
@pytest.mark.parametrize("variant", ["default", "535.54"])
def test_a_list_of_any_length_is_one_call(watch: Watch, variant: str, count: int) -> None:
    watched = watch(1, variant=variant, start=False)
    watched.sim.set_processes(0, [Process(1000 + number, used=100 * MIB) for number in range(count)])
    watched.cycle()
    expected = tuple(GpuProcess(1000 + number, 100 * MIB) for number in range(count))
    assert watched.poll(0).processes == expected
    assert watched.sim.calls(Family.COMPUTE_PROCESSES, 0) == 1


def test_a_process_without_a_number_is_listed_without_one(watch: Watch) -> None:
    watched = watch(1, start=False)
    watched.sim.set_processes(0, [Process(9, used=None)])
    watched.cycle()
    assert watched.poll(0).processes == (GpuProcess(9, None),)


@pytest.mark.parametrize("growth", [7, 8])
def test_processes_that_come_between_two_calls_are_listed(
    make_sim: Callable[..., Sim], nvml_library: Path, growth: int
) -> None:
    """With a buffer that starts empty, so that the first call is the size probe after which they come."""
    sim = make_sim(1)
    sim.set_processes(0, ENGINES[:2])
    sim.grow_after_probe(0, growth)
    with load_into_pynvml(nvml_library, sim):
        pynvml.nvmlInit()
        lists = ProcessLists(Nvml(), capacity=0)
        read = lists.read(pynvml.nvmlDeviceGetHandleByIndex(0), Absent("NOT_READ"))
    assert not isinstance(read, Absent)
    assert len(read) == 2 + growth
    assert sim.calls(Family.COMPUTE_PROCESSES) == 3


def test_a_list_longer_than_the_buffer_is_read_with_one_retry(make_sim: Callable[..., Sim], nvml_library: Path) -> None:
    sim = make_sim(1)
    sim.set_processes(0, ENGINES)
    with load_into_pynvml(nvml_library, sim):
        pynvml.nvmlInit()
        lists = ProcessLists(Nvml(), capacity=2)
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        assert [lists.read(handle, Absent("NOT_READ")) for _ in range(2)] == [AS_LISTED] * 2
    assert sim.calls(Family.COMPUTE_PROCESSES) == 3, "the second list finds the grown buffer"


def test_a_list_that_never_fits_is_absent(make_sim: Callable[..., Sim], nvml_library: Path) -> None:
    sim = make_sim(1)
    sim.fail(Family.COMPUTE_PROCESSES, pynvml.NVML_ERROR_INSUFFICIENT_SIZE, 0)
    with load_into_pynvml(nvml_library, sim):
        pynvml.nvmlInit()
        read = ProcessLists(Nvml()).read(pynvml.nvmlDeviceGetHandleByIndex(0), Absent("NOT_READ"))
    assert read == Absent("INSUFFICIENT_SIZE")
    assert sim.calls(Family.COMPUTE_PROCESSES) == 3


def test_a_list_without_any_possible_pid_is_implausible(watch: Watch) -> None:
    watched = watch(1, start=False)
    watched.sim.set_processes(0, [Process(0, used=0), Process(4294967295, used=0)])
    watched.cycle()
    assert watched.poll(0).processes == IMPLAUSIBLE
    assert watched.seen.run(watched.uuid(0)).error == "processes: IMPLAUSIBLE"


def test_a_list_that_is_wrong_in_part_is_published_as_read(watch: Watch) -> None:
    """Whoever concludes from it judges it; a recording keeps what the driver said."""
    watched = watch(1, start=False)
    watched.sim.set_processes(0, [Process(4711, used=GIB), Process(4711, used=GIB)])
    watched.cycle()
    assert watched.poll(0).processes == (GpuProcess(4711, GIB), GpuProcess(4711, GIB))


def test_a_driver_without_process_lists_is_asked_once_and_no_failure(watch: Watch) -> None:
    watched = watch(1, process_every=1, start=False)
    watched.sim.fail(Family.COMPUTE_PROCESSES, pynvml.NVML_ERROR_NOT_SUPPORTED, 0)
    watched.cycle(3)
    assert watched.poll(0).processes == Absent("NOT_SUPPORTED")
    assert watched.sim.calls(Family.COMPUTE_PROCESSES, 0) == 1
    assert watched.seen.run(watched.uuid(0)).ok
