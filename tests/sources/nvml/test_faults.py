"""A device that fails changes what is published about itself, and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pynvml
import pytest

from oomwatch.observations import HUNG, Absent, GpuPoll, GpuProcess, Memory, TargetRemoved
from tests.nvml_sim import GIB, Family, Gpu, Process, Sim, environment
from tests.sources.nvml.conftest import Watch, Watched, until


def assert_well(watched: Watched, *slots: int) -> None:
    for slot in slots:
        assert watched.poll(slot).errors() == {}, f"GPU {slot}"
        assert isinstance(watched.poll(slot).memory, Memory)
        assert watched.seen.run(watched.uuid(slot)).ok


def test_a_lost_device_is_reported_as_lost_while_the_others_go_on(watch: Watch) -> None:
    watched = watch(3)
    watched.sim.lose(1)
    watched.cycle(2)
    poll = watched.poll(1)
    assert poll.memory == poll.processes == Absent("GPU_IS_LOST")
    run = watched.seen.run(watched.uuid(1))
    assert (run.ok, run.error) == (False, "memory: GPU_IS_LOST")
    assert (watched.seen.driver().state, watched.seen.driver().detail) == ("ok", "")
    assert watched.seen.run().ok
    assert_well(watched, 0, 2)


def test_a_device_that_comes_back_is_read_in_full_at_once(watch: Watch) -> None:
    watched = watch(2)
    watched.sim.lose(1)
    watched.cycle()
    watched.sim.heal(1)
    watched.sim.set_processes(1, [Process(5)])
    watched.cycle()
    assert_well(watched, 1)
    assert watched.poll(1).processes != Absent("NOT_READ")


@pytest.mark.parametrize("code", [pynvml.NVML_ERROR_NO_PERMISSION, pynvml.NVML_ERROR_UNKNOWN, 31])
def test_a_memory_call_that_fails_leaves_the_process_list(watch: Watch, code: int) -> None:
    watched = watch(2, start=False)
    watched.sim.set_processes(0, [Process(7)])
    watched.sim.fail(Family.MEMORY, code, 0)
    watched.cycle()
    name = {4: "NO_PERMISSION", 999: "UNKNOWN", 31: "ERROR_31"}[code]
    poll = watched.poll(0)
    assert poll.errors() == {"memory": name}
    assert poll.processes == (GpuProcess(7, GIB),)
    assert watched.seen.run(watched.uuid(0)).error == f"memory: {name}"
    assert_well(watched, 1)


def test_a_failure_of_one_call_is_over_with_the_next_poll(watch: Watch) -> None:
    watched = watch(1)
    watched.sim.fail(Family.MEMORY, pynvml.NVML_ERROR_UNKNOWN, 0, times=1)
    watched.cycle()
    assert watched.poll(0).memory == Absent("UNKNOWN")
    watched.cycle()
    assert_well(watched, 0)


def test_a_process_list_that_fails_is_asked_for_again_in_the_next_poll(watch: Watch) -> None:
    watched = watch(1, start=False)
    watched.sim.fail(Family.COMPUTE_PROCESSES, pynvml.NVML_ERROR_NO_PERMISSION, 0, times=1)
    watched.cycle()
    assert watched.poll(0).errors() == {"processes": "NO_PERMISSION"}
    assert watched.seen.run(watched.uuid(0)).error == "processes: NO_PERMISSION"
    watched.cycle()
    assert watched.poll(0).processes == ()


def test_a_hung_device_delays_neither_the_others_nor_the_caller(watch: Watch) -> None:
    watched = watch(3, deadline=1.5)
    watched.sim.hang(Family.MEMORY, 1)
    watched.seen.clear()
    begin = time.monotonic()
    poller = threading.Thread(target=watched.source.poll_all, daemon=True)
    poller.start()
    first_two = watched.seen.wait(GpuPoll, 2)
    assert time.monotonic() - begin < 1.5, "published before the deadline of the hung one"
    assert {poll.uuid for poll in first_two} == {watched.uuid(0), watched.uuid(2)}
    poller.join(10)
    assert 1.5 <= time.monotonic() - begin < 4.0
    poll = watched.poll(1)
    assert poll.memory == poll.processes == HUNG
    assert_well(watched, 0, 2)


def test_a_device_that_hangs_already_is_reported_at_once_and_asked_nothing_more(watch: Watch) -> None:
    watched = watch(2, deadline=0.5)
    watched.sim.hang(Family.MEMORY, 1)
    watched.source.poll_all()
    mark = watched.sim.mark()
    begin = time.monotonic()
    for _ in range(5):
        watched.source.poll_all()
        watched.source.poll(watched.uuid(1))
    assert time.monotonic() - begin < 2.0, "ten polls, none of which waits for its deadline"
    assert watched.sim.calls(None, 1, since=mark) == 0
    assert len([poll for poll in watched.seen.polls(watched.uuid(1)) if poll.memory == HUNG]) == 11
    run = watched.seen.run(watched.uuid(1))
    assert (run.ok, run.error.split(" for ")[0]) == (False, "nvmlDeviceGetMemoryInfo_v2 has not returned")
    assert run.seconds >= 0.5
    assert watched.seen.driver().state == "ok"


def test_a_hung_device_is_read_again_once_its_call_has_returned(watch: Watch) -> None:
    watched = watch(1, deadline=0.3)
    watched.sim.hang(Family.MEMORY, 0)
    watched.source.poll_all()
    late = len(watched.seen.all(GpuPoll))
    watched.sim.release(Family.MEMORY, 0)
    until(lambda: watched.sim.inflight() == watched.sim.inflight(Family.EVENT_WAIT))
    until(lambda: _poll_anew(watched))
    polls = watched.seen.all(GpuPoll)
    assert all(poll.memory == HUNG for poll in polls[late:-1]), "what was read during the hang is dropped"
    assert_well(watched, 0)
    assert polls[-1].processes == ()


def _poll_anew(watched: Watched) -> bool:
    watched.source.poll_all()
    return watched.poll(0).memory != HUNG


@pytest.mark.parametrize(
    "family", [Family.COMPUTE_PROCESSES, Family.MIG, Family.UTILIZATION, Family.TEMPERATURE, Family.FIELD_VALUES]
)
def test_any_call_that_hangs_is_bounded(watch: Watch, family: Family) -> None:
    watched = watch(2, deadline=0.3, start=False)
    watched.sim.hang(family, 0)
    begin = time.monotonic()
    watched.cycle(2)
    assert time.monotonic() - begin < 2.0
    assert watched.poll(0).memory == HUNG
    assert_well(watched, 1)


def test_closing_waits_for_no_hung_call(watch: Watch) -> None:
    watched = watch(2, deadline=0.3)
    watched.sim.hang(Family.MEMORY, 0)
    watched.sim.hang(Family.EVENT_WAIT)
    watched.source.poll_all()
    begin = time.monotonic()
    watched.source.close()
    assert time.monotonic() - begin < 2.5


def test_a_process_ends_while_a_call_hangs(make_sim: Callable[..., Sim], nvml_library: Path) -> None:
    sim = make_sim(1)
    sim.hang(Family.MEMORY, 0)
    program = (
        "from oomwatch.sources.nvml import NvmlSource\n"
        "source = NvmlSource(lambda _: None, deadline=0.3)\n"
        "source.refresh(); source.poll_all(); source.close()\n"
    )
    variables = os.environ | environment(nvml_library, sim)
    subprocess.run([sys.executable, "-c", program], env=variables, timeout=20, check=True)
    assert sim.calls(Family.MEMORY, 0) == 1


def test_a_closed_source_does_nothing_more(watch: Watch) -> None:
    watched = watch(1)
    watched.source.close()
    until(lambda: watched.sim.sessions() == 0)
    watched.seen.clear()
    watched.cycle()
    assert watched.seen.all(object) == []
    assert watched.sim.initialisations() == 1


@pytest.mark.parametrize("code", [pynvml.NVML_ERROR_GPU_IS_LOST, pynvml.NVML_ERROR_INVALID_ARGUMENT])
def test_a_device_that_leaves_the_count_is_not_found_as_long_as_it_is_away(watch: Watch, code: int) -> None:
    watched = watch(3)
    watched.sim.vanish(1, code)
    watched.cycle(3)
    assert [poll.memory for poll in watched.seen.polls(watched.uuid(1))[1:]] == [Absent("NOT_FOUND")] * 3
    assert watched.seen.driver().device_count == 2
    assert_well(watched, 0, 2)
    assert watched.poll(2).index == 1, "the one behind it moved up"

    watched.sim.heal(1)
    watched.cycle()
    assert_well(watched, 0, 1, 2)
    assert [watched.poll(slot).index for slot in (0, 1, 2)] == [0, 1, 2]


def test_the_memory_of_a_device_whose_index_moved_stays_its_own(watch: Watch) -> None:
    watched = watch(3)
    for slot in range(3):
        watched.sim.set_memory(slot, used=(slot + 1) * GIB)
    watched.sim.vanish(0)
    watched.cycle()
    assert [poll.memory.used for poll in map(watched.poll, (1, 2)) if isinstance(poll.memory, Memory)] == [
        2 * GIB,
        3 * GIB,
    ]


def test_a_new_device_appears_by_itself(watch: Watch) -> None:
    watched = watch(1)
    slot = watched.sim.add_gpu(Gpu(name="NVIDIA L4"))
    watched.cycle()
    assert watched.source.targets() == (watched.uuid(0), watched.uuid(slot))
    assert_well(watched, 0, slot)
    assert watched.seen.all(TargetRemoved) == []


def test_a_device_replaced_in_its_slot_is_removed_and_the_new_one_watched(watch: Watch) -> None:
    watched = watch(2)
    old = watched.uuid(1)
    watched.sim.set_uuid(1, "GPU-new")
    watched.cycle(2)
    assert [removed.target for removed in watched.seen.all(TargetRemoved)] == [old]
    assert watched.source.targets() == (watched.uuid(0), "GPU-new")
    assert_well(watched, 0, 1)


def test_a_device_that_was_lost_before_the_start_is_named_by_its_index(watch: Watch) -> None:
    watched = watch(3, start=False)
    watched.sim.lose(1)
    watched.cycle()
    driver = watched.seen.driver()
    assert (driver.state, driver.device_count) == ("ok", 3)
    assert driver.detail == "the device at index 1 cannot be identified: GPU_IS_LOST"
    assert not watched.seen.run().ok
    assert_well(watched, 0, 2)

    watched.sim.heal(1)
    watched.cycle()
    assert watched.seen.driver().detail == ""
    assert_well(watched, 0, 1, 2)


def test_a_device_that_hangs_at_the_start_keeps_none_of_the_others_away(watch: Watch) -> None:
    watched = watch(3, deadline=0.3, start=False)
    watched.sim.hang(Family.HANDLE, 0)
    watched.cycle(2)
    assert watched.source.targets() == (watched.uuid(1), watched.uuid(2))
    assert watched.seen.driver().detail == "the device at index 0 cannot be identified: HUNG"
    assert_well(watched, 1, 2)

    watched.sim.release(Family.HANDLE, 0)
    until(lambda: _enumerate_anew(watched) == 3)
    assert_well(watched, 0, 1, 2)


def _enumerate_anew(watched: Watched) -> int:
    watched.cycle()
    return len(watched.source.targets())


def test_a_device_this_user_may_not_see_is_no_failure(watch: Watch) -> None:
    watched = watch(2, start=False)
    watched.sim.fail(Family.HANDLE, pynvml.NVML_ERROR_NO_PERMISSION, 0)
    watched.cycle()
    assert watched.source.targets() == (watched.uuid(1),)
    assert watched.seen.driver().detail == "the device at index 0 cannot be identified: NO_PERMISSION"
    assert watched.seen.run().ok


def test_calls_are_counted_with_their_errors_by_name(watch: Watch) -> None:
    watched = watch(2)
    before = watched.source.call_stats()["nvmlDeviceGetMemoryInfo_v2"]
    assert (before.calls, before.errors["GPU_IS_LOST"]) == (2, 0)
    assert before.seconds > 0
    watched.sim.fail(Family.MEMORY, pynvml.NVML_ERROR_UNKNOWN, 0, times=1)
    watched.cycle()
    after = watched.source.call_stats()["nvmlDeviceGetMemoryInfo_v2"]
    assert (after.calls, after.errors["UNKNOWN"]) == (4, 1)
