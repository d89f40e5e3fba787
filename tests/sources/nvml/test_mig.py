"""MIG slices: walked in each poll while MIG is on."""

from __future__ import annotations

import pynvml
import pytest

from oomwatch.observations import NOT_READ, Absent, GpuProcess, Memory, MigInstance
from tests.nvml_sim import GIB, MIB, Family, MigSlice, Option, Process
from tests.sources.nvml.conftest import Watch, Watched

TWO_SLICES = [MigSlice(7, used=4 * GIB), MigSlice(8, compute_instance=1, used=5 * GIB)]
PROCESSES = [
    Process(71, used=3 * GIB, gpu_instance=7, compute_instance=0),
    Process(81, used=2 * GIB, gpu_instance=8, compute_instance=1),
]


def sliced(watch: Watch, **options: object) -> Watched:
    watched = watch(2, start=False, **options)
    watched.sim.enable_mig(0, TWO_SLICES)
    watched.sim.set_processes(0, PROCESSES, used=9 * GIB)
    watched.cycle()
    return watched


def slice_memory(used: int) -> Memory:
    return Memory(total=10 * GIB, reserved=16 * MIB, used=used, free=10 * GIB - 16 * MIB - used)


def test_each_slice_has_its_own_memory_and_processes(watch: Watch) -> None:
    watched = sliced(watch)
    poll = watched.poll(0)
    assert poll.mig_enabled is True
    assert poll.mig == (
        MigInstance(watched.sim.mig_uuid(0, 0), 7, 0, slice_memory(4 * GIB), (GpuProcess(71, 3 * GIB),)),
        MigInstance(watched.sim.mig_uuid(0, 1), 8, 1, slice_memory(5 * GIB), (GpuProcess(81, 2 * GIB),)),
    )
    assert (watched.poll(1).mig_enabled, watched.poll(1).mig) == (False, ())


def test_the_memory_of_slices_is_read_each_time_their_processes_each_nth_time(watch: Watch) -> None:
    watched = sliced(watch, process_every=3)
    watched.sim.set_memory(0, mig=0, used=6 * GIB)
    watched.cycle(3)
    polls = watched.seen.polls(watched.uuid(0))
    assert [poll.mig[0].memory for poll in polls[1:]] == [slice_memory(6 * GIB)] * 3
    assert [poll.mig[0].processes == NOT_READ for poll in polls] == [False, True, True, False]
    assert all(poll.mig_enabled is True for poll in polls)


def test_a_parent_that_may_not_be_read_is_no_failure(watch: Watch) -> None:
    watched = watch(1, start=False)
    watched.sim.enable_mig(0, TWO_SLICES)
    for family in (Family.MEMORY, Family.COMPUTE_PROCESSES):
        watched.sim.fail(family, pynvml.NVML_ERROR_NO_PERMISSION, 0)
    watched.cycle(2)
    poll = watched.poll(0)
    assert poll.memory == Absent("NO_PERMISSION")
    assert [part.gi for part in poll.mig] == [7, 8]
    assert watched.seen.run(watched.uuid(0)).ok


def test_slices_come_and_go_and_leave_holes(watch: Watch) -> None:
    watched = sliced(watch)
    watched.sim.remove_mig(0, 0)
    watched.cycle()
    assert [part.gi for part in watched.poll(0).mig] == [8]
    watched.sim.add_mig(0, MigSlice(9), slot=4)
    watched.cycle()
    assert [(part.gi, part.processes) for part in watched.poll(0).mig] == [(8, NOT_READ), (9, ())]
    assert watched.seen.run(watched.uuid(0)).ok


def test_a_slice_made_where_another_was_is_never_taken_for_it(watch: Watch) -> None:
    watched = sliced(watch, driver={"options": Option.MIG_HANDLES_REUSED})
    before = watched.poll(0).mig[0].uuid
    watched.sim.remove_mig(0, 0)
    watched.sim.add_mig(0, MigSlice(11, compute_instance=2, used=GIB), slot=0)
    watched.cycle()
    part = watched.poll(0).mig[0]
    assert part.uuid != before
    assert (part.gi, part.ci, part.memory) == (11, 2, slice_memory(GIB))


def test_a_slice_that_fails_leaves_the_other(watch: Watch) -> None:
    watched = sliced(watch)
    watched.sim.fail(Family.MEMORY, pynvml.NVML_ERROR_UNKNOWN, 0, mig=0)
    watched.cycle()
    assert [part.memory for part in watched.poll(0).mig] == [Absent("UNKNOWN"), slice_memory(5 * GIB)]


def test_switching_mig_on_is_noticed_with_the_next_full_poll_and_off_at_once(watch: Watch) -> None:
    watched = watch(1, process_every=2, start=False)
    watched.sim.set_sensors(0, gpu_percent=50)
    watched.cycle()
    assert watched.poll(0).utilization == 0.5
    watched.sim.enable_mig(0, TWO_SLICES)
    watched.cycle(2)
    assert [part.gi for part in watched.poll(0).mig] == [7, 8]
    assert watched.poll(0).utilization == Absent("NOT_SUPPORTED")

    watched.sim.disable_mig(0)
    watched.cycle()
    assert (watched.poll(0).mig_enabled, watched.poll(0).mig) == (False, ())
    watched.cycle()
    assert watched.poll(0).utilization == 0.5, "what a device lacks with MIG on is asked for again with MIG off"


def test_mig_without_slices_is_on_and_well(watch: Watch) -> None:
    watched = watch(1, start=False)
    watched.sim.enable_mig(0)
    watched.cycle()
    assert (watched.poll(0).mig_enabled, watched.poll(0).mig) == (True, ())
    assert watched.seen.run(watched.uuid(0)).ok


def test_a_mode_that_cannot_be_read_is_not_taken_for_mig_off(watch: Watch) -> None:
    watched = sliced(watch, process_every=3)
    watched.sim.fail(Family.MIG, pynvml.NVML_ERROR_UNKNOWN, 0, times=2)  # the slices' count, then the mode
    watched.cycle()
    assert watched.poll(0).mig_enabled == Absent("UNKNOWN")
    watched.cycle()
    assert watched.poll(0).mig_enabled is True
    assert [part.gi for part in watched.poll(0).mig] == [7, 8]


def test_a_slice_whose_uuid_cannot_be_read_is_missing_for_a_reason(watch: Watch) -> None:
    watched = sliced(watch)
    watched.sim.fail(Family.IDENTITY, pynvml.NVML_ERROR_UNKNOWN, 0, mig=1)
    watched.cycle()
    assert [part.gi for part in watched.poll(0).mig] == [7]
    run = watched.seen.run(watched.uuid(0))
    assert (run.ok, run.error) == (False, "slice at index 1: UNKNOWN")

    watched.sim.clear(Family.IDENTITY, 0, mig=1)
    watched.cycle()
    assert [part.gi for part in watched.poll(0).mig] == [7, 8]
    assert watched.seen.run(watched.uuid(0)).ok


def test_a_new_slice_whose_instance_ids_cannot_be_read_is_missing_for_a_reason(watch: Watch) -> None:
    watched = sliced(watch)
    watched.sim.add_mig(0, MigSlice(9), slot=4)
    watched.sim.fail(Family.MIG, pynvml.NVML_ERROR_NO_PERMISSION, 0, mig=4)
    watched.cycle()
    assert [part.gi for part in watched.poll(0).mig] == [7, 8]
    assert watched.seen.run(watched.uuid(0)).error == "slice at index 4: NO_PERMISSION"


@pytest.mark.parametrize(
    ("code", "error"),
    [
        (pynvml.NVML_ERROR_UNKNOWN, "slice at index 0: UNKNOWN"),
        (pynvml.NVML_ERROR_NOT_FOUND, ""),
        (pynvml.NVML_ERROR_INVALID_ARGUMENT, ""),
    ],
)
def test_only_a_slice_that_is_not_there_is_missing_without_a_reason(
    watch: Watch, monkeypatch: pytest.MonkeyPatch, code: int, error: str
) -> None:
    watched = sliced(watch)

    def refuse(*_: object) -> None:
        raise pynvml.NVMLError(code)

    monkeypatch.setattr(pynvml, "nvmlDeviceGetMigDeviceHandleByIndex", refuse)
    watched.cycle()
    assert watched.poll(0).mig == ()
    assert watched.seen.run(watched.uuid(0)).error == error


def test_slices_that_cannot_be_counted_are_missing_for_a_reason(watch: Watch) -> None:
    watched = sliced(watch)
    watched.sim.fail(Family.MIG, pynvml.NVML_ERROR_UNKNOWN, 0)
    watched.cycle()
    assert watched.seen.run(watched.uuid(0)).error == "slices: UNKNOWN"


def test_a_count_that_fails_once_leaves_no_slice_out(watch: Watch) -> None:
    watched = sliced(watch)
    watched.sim.fail(Family.MIG, pynvml.NVML_ERROR_UNKNOWN, 0, times=1)
    watched.cycle()
    assert [part.gi for part in watched.poll(0).mig] == [7, 8]
    assert watched.seen.run(watched.uuid(0)).ok


def test_a_count_that_fails_as_mig_is_switched_off_is_no_failure(watch: Watch) -> None:
    watched = sliced(watch)
    watched.sim.disable_mig(0)
    watched.sim.fail(Family.MIG, pynvml.NVML_ERROR_NOT_SUPPORTED, 0, times=1)
    watched.cycle()
    assert (watched.poll(0).mig_enabled, watched.poll(0).mig) == (False, ())
    assert watched.seen.run(watched.uuid(0)).ok


def test_a_slice_that_has_no_process_list_is_asked_for_it_once(watch: Watch) -> None:
    watched = watch(1, process_every=1, start=False)
    watched.sim.enable_mig(0, TWO_SLICES)
    watched.sim.fail(Family.COMPUTE_PROCESSES, pynvml.NVML_ERROR_NOT_SUPPORTED, 0, mig=0)
    watched.cycle(3)
    lists = [part.processes for part in watched.poll(0).mig]
    assert lists == [Absent("NOT_SUPPORTED"), ()]
    assert watched.sim.calls(Family.COMPUTE_PROCESSES, 0) == 1 + 3 + 3, "the slice once; the GPU and the other slice"
