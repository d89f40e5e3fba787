"""What a healthy device's poll contains."""

from __future__ import annotations

import pynvml
import pytest

from oomwatch.observations import NOT_READ, Absent, GpuProcess, Memory, RemappedRows
from tests.nvml_sim import GIB, MIB, Family, Gpu, Process
from tests.sources.nvml.conftest import Watch


def test_a_device_is_described_by_what_the_driver_says(watch: Watch) -> None:
    watched = watch(start=False, clock=lambda: 1234.5)
    sim = watched.sim
    sim.set_processes(1, [Process(4711, used=60 * GIB), Process(4712, used=None)], used=61 * GIB)
    sim.set_sensors(1, gpu_percent=87, temperature=71, power_mw=512_250)
    sim.set_ecc(1, corrected_volatile=3, uncorrected_volatile=1)
    sim.set_remapped_rows(1, correctable=2, uncorrectable=1, pending=True)
    sim.set_recovery_action(1, 1)
    watched.cycle()

    poll = watched.poll(1)
    assert (poll.t, poll.index, poll.name) == (1234.5, 1, "NVIDIA H100 80GB HBM3")
    assert poll.memory == Memory(
        total=80 * GIB, reserved=600 * MIB, used=61 * GIB, free=80 * GIB - 600 * MIB - 61 * GIB
    )
    assert poll.processes == (GpuProcess(4711, 60 * GIB), GpuProcess(4712, None))
    assert (poll.utilization, poll.temperature, poll.power) == (0.87, 71.0, 512.25)
    assert (poll.ecc_corrected, poll.ecc_uncorrected, poll.recovery_action) == (3, 1, 1)
    assert poll.remapped_rows == RemappedRows(correctable=2, uncorrectable=1, pending=True, failed=False)
    assert (poll.mig_enabled, poll.mig, poll.unified) == (False, (), False)
    assert poll.pci_bus_id == "00000000:11:00.0"
    assert poll.errors() == {}


def test_success_is_reported_for_the_driver_and_each_device(watch: Watch) -> None:
    watched = watch()
    driver = watched.seen.driver()
    assert (driver.state, driver.detail, driver.device_count) == ("ok", "", 2)
    assert (driver.driver_version, driver.nvml_version, driver.cuda_version) == ("550.163.01", "12.550.163.01", "12.4")
    assert watched.source.targets() == (watched.uuid(0), watched.uuid(1))
    assert all(watched.seen.run(target).ok for target in ("", *watched.source.targets()))


def test_memory_is_read_each_time_and_the_rest_each_nth_time(watch: Watch) -> None:
    watched = watch(1, process_every=3)
    for used in range(1, 7):
        watched.sim.set_processes(0, [Process(100 + used)], used=used * GIB)
        watched.cycle()
    polls = watched.seen.polls(watched.uuid(0))
    assert [poll.memory.used // GIB for poll in polls if isinstance(poll.memory, Memory)] == [0, 1, 2, 3, 4, 5, 6]
    assert [poll.processes != NOT_READ for poll in polls] == [True, False, False, True, False, False, True]
    assert polls[1].utilization == polls[1].temperature == polls[1].mig_enabled == NOT_READ


def test_one_device_alone_can_be_polled(watch: Watch) -> None:
    watched = watch()
    watched.source.poll(watched.uuid(1))
    assert [len(watched.seen.polls(watched.uuid(slot))) for slot in (0, 1)] == [1, 2]


def test_polling_an_unknown_device_publishes_nothing(watch: Watch) -> None:
    watched = watch()
    watched.seen.clear()
    watched.source.poll("GPU-of-yesterday")
    assert watched.seen.all(object) == []


def test_what_a_consumer_card_lacks_is_absent_and_no_failure(watch: Watch) -> None:
    watched = watch([Gpu.consumer()])
    poll = watched.poll(0)
    assert poll.ecc_uncorrected == poll.remapped_rows == poll.mig_enabled == Absent("NOT_SUPPORTED")
    assert isinstance(poll.memory, Memory)
    assert watched.seen.run(watched.uuid(0)).ok


def test_what_a_device_lacks_is_asked_for_once(watch: Watch) -> None:
    watched = watch(1, process_every=1, start=False)
    for family in (Family.UTILIZATION, Family.TEMPERATURE, Family.MIG, Family.FIELD_VALUES, Family.POWER):
        watched.sim.fail(family, pynvml.NVML_ERROR_NOT_SUPPORTED, 0)
    watched.cycle(4)
    calls = watched.sim.calls_by_family(0)
    assert [
        calls[family]
        for family in (Family.UTILIZATION, Family.TEMPERATURE, Family.MIG, Family.FIELD_VALUES, Family.POWER)
    ] == [1] * 5
    assert calls[Family.MEMORY] == 4
    assert watched.poll(0).power == Absent("NOT_SUPPORTED")


def test_a_field_that_the_driver_does_not_know_leaves_the_others(watch: Watch) -> None:
    watched = watch(1, start=False)
    watched.sim.set_field(0, 230, code=pynvml.NVML_ERROR_INVALID_ARGUMENT)
    watched.sim.set_field(0, 186, code=pynvml.NVML_ERROR_NOT_SUPPORTED)
    watched.sim.set_sensors(0, power_mw=100_000)
    watched.cycle()
    poll = watched.poll(0)
    assert poll.recovery_action == Absent("INVALID_ARGUMENT")
    assert poll.power == 100.0
    assert poll.ecc_uncorrected == 0


def test_a_transient_failure_of_an_optional_call_is_not_remembered(watch: Watch) -> None:
    watched = watch(1, process_every=1, start=False)
    watched.sim.fail(Family.TEMPERATURE, pynvml.NVML_ERROR_UNKNOWN, 0, times=1)
    watched.cycle()
    assert watched.poll(0).temperature == Absent("UNKNOWN")
    assert watched.seen.run(watched.uuid(0)).ok
    watched.cycle()
    assert watched.poll(0).temperature == 40.0


def test_health_can_be_left_out(watch: Watch) -> None:
    poll = watch(1, collect_health=False).poll(0)
    assert poll.ecc_corrected == poll.ecc_uncorrected == poll.remapped_rows == poll.recovery_action == NOT_READ
    assert poll.power == 90.0


def test_a_name_that_is_not_utf8_is_shown_as_far_as_it_can_be(watch: Watch) -> None:
    watched = watch(1, start=False)
    watched.sim.set_name(0, b"NVIDIA \xff\xfe A100")
    watched.cycle()
    assert watched.poll(0).name == "NVIDIA \ufffd\ufffd A100"


@pytest.mark.parametrize("name", ["NVIDIA GB10", "Orin (nvgpu)", "NVIDIA Thor"])
def test_a_device_without_memory_of_its_own_uses_the_hosts(watch: Watch, name: str) -> None:
    watched = watch([Gpu.unified_memory()], start=False, host_memory=lambda: (128 * GIB, 40 * GIB))
    watched.sim.set_name(0, name)
    watched.sim.set_processes(0, [Process(11, used=50 * GIB), Process(12, used=8 * GIB)])
    watched.cycle(2)
    poll = watched.poll(0)
    assert poll.unified
    assert poll.memory == Memory(total=128 * GIB, reserved=None, used=58 * GIB, free=40 * GIB)
    assert poll.processes == (GpuProcess(11, 50 * GIB), GpuProcess(12, 8 * GIB))
    assert watched.seen.run(watched.uuid(0)).ok
    assert watched.sim.calls(Family.MEMORY, 0) == 2  # version 2 and version 1, once


def test_shared_memory_is_absent_when_a_process_has_no_number(watch: Watch) -> None:
    watched = watch([Gpu.unified_memory()], start=False, host_memory=lambda: (128 * GIB, 40 * GIB))
    watched.sim.set_processes(0, [Process(11, used=50 * GIB), Process(12, used=None)])
    watched.cycle()
    assert watched.poll(0).memory == Absent("NOT_SUPPORTED")


@pytest.mark.parametrize("name", ["NVIDIA GH200 480GB", "NVIDIA GB200", "NVIDIA H100 80GB HBM3"])
def test_a_device_with_its_own_memory_is_never_taken_for_one_without(watch: Watch, name: str) -> None:
    watched = watch(1, start=False)
    watched.sim.set_name(0, name)
    watched.sim.fail(Family.MEMORY, pynvml.NVML_ERROR_NOT_SUPPORTED, 0)
    watched.cycle()
    poll = watched.poll(0)
    assert (poll.unified, poll.memory) == (False, Absent("NOT_SUPPORTED"))
    assert not watched.seen.run(watched.uuid(0)).ok


def test_a_lost_device_without_memory_of_its_own_is_lost(watch: Watch) -> None:
    watched = watch([Gpu.unified_memory()], host_memory=lambda: (128 * GIB, 40 * GIB))
    watched.sim.lose(0)
    watched.cycle(2)
    assert watched.poll(0).memory == Absent("GPU_IS_LOST")
