"""The driver as a whole: missing, arriving, reloaded, mismatched, given back."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pynvml
import pytest

from oomwatch.observations import HUNG, Absent, GpuPoll, Memory, XidEvent
from tests.nvml_sim import Family, Option, Sim, environment
from tests.sources.nvml.conftest import Watch, Watched, until


def assert_reading(watched: Watched, *slots: int) -> None:
    assert watched.seen.driver().state == "ok"
    for slot in slots:
        assert isinstance(watched.poll(slot).memory, Memory)


ARRIVAL = """
import os, shutil, sys
from oomwatch.sources.nvml import NvmlSource
seen = []
source = NvmlSource(seen.append)
def report():
    source.refresh()
    driver = [o for o in seen if type(o).__name__ == "DriverReport"][-1]
    print(driver.state, "|", driver.detail, "|", len(source.targets()))
report()
shutil.copy(sys.argv[1], sys.argv[2])
report()
source.close()
"""


def test_a_driver_that_is_installed_later_is_found(
    make_sim: Callable[..., Sim], nvml_library: Path, tmp_path: Path
) -> None:
    directory = tmp_path / "lib"
    directory.mkdir()
    sim = make_sim(3)
    command = [sys.executable, "-c", ARRIVAL, str(nvml_library), str(directory / nvml_library.name)]
    variables = os.environ | environment(directory, sim)
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=60, check=True)
    missing, arrived = [line for line in done.stdout.splitlines() if line.count("|") == 2]
    assert missing.startswith("library_missing | the driver library cannot be loaded (libnvidia-ml.so.1: cannot open")
    assert arrived == "ok |  | 3"


@pytest.mark.parametrize(
    ("code", "state", "advice"),
    [
        (pynvml.NVML_ERROR_DRIVER_NOT_LOADED, "driver_not_loaded", "the kernel module is not loaded"),
        (pynvml.NVML_ERROR_NO_PERMISSION, "no_permission", "/dev/nvidiactl"),
        (pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH, "version_mismatch", "Restart this daemon"),
        (pynvml.NVML_ERROR_UNKNOWN, "error", "restart the container"),
        (pynvml.NVML_ERROR_IRQ_ISSUE, "error", "IRQ_ISSUE"),
    ],
)
def test_a_driver_that_does_not_start_is_tried_again_each_time(
    watch: Watch, code: int, state: str, advice: str
) -> None:
    watched = watch(2, start=False)
    watched.sim.fail(Family.INIT, code, times=2)
    watched.cycle(2)
    driver = watched.seen.driver()
    assert driver.state == state
    assert advice in driver.detail
    assert driver.device_count == Absent("NOT_KNOWN")
    run = watched.seen.run()
    assert (run.ok, run.error) == (False, driver.detail)
    assert watched.seen.all(GpuPoll) == []

    watched.cycle()
    assert_reading(watched, 0, 1)


def test_a_reloaded_driver_is_initialised_anew(watch: Watch) -> None:
    watched = watch(2, driver={"options": Option.HANDLES_DIE_AT_INIT})
    watched.sim.reload_driver("560.35.03")
    watched.cycle()
    assert_reading(watched, 0, 1)
    assert watched.seen.driver().driver_version == "560.35.03"
    assert watched.sim.sessions() == 1, "each initialisation is given back"


@pytest.mark.parametrize("code", [pynvml.NVML_ERROR_UNKNOWN, pynvml.NVML_ERROR_GPU_IS_LOST])
def test_a_reload_is_survived_whatever_the_old_session_answers(watch: Watch, code: int) -> None:
    watched = watch(2)
    watched.sim.reload_driver(stale_code=code)
    watched.cycle()
    assert_reading(watched, 0, 1)


def test_a_reload_that_a_poll_notices_first_is_over_with_the_next_refresh(watch: Watch) -> None:
    watched = watch(1)
    watched.sim.reload_driver()
    watched.source.poll_all()
    assert watched.poll(0).memory == Absent("UNINITIALIZED")
    watched.cycle()
    assert_reading(watched, 0)


def test_after_a_reload_with_another_library_a_new_process_is_asked_for(watch: Watch) -> None:
    watched = watch(2, driver={"options": Option.LIBRARY_PINNED})
    watched.sim.reload_driver("560.35.03")
    watched.cycle(2)
    driver = watched.seen.driver()
    assert driver.state == "version_mismatch"
    assert "Restart this daemon" in driver.detail
    assert driver.driver_version == Absent("NOT_KNOWN"), "the version read before is no longer true"
    assert watched.poll(0).memory == Absent("LIB_RM_VERSION_MISMATCH")
    assert not watched.seen.run(watched.uuid(0)).ok


def test_a_driver_that_is_unloaded_and_loaded_again_needs_no_restart(watch: Watch) -> None:
    watched = watch(2)
    watched.sim.reload_driver()
    watched.sim.fail(Family.INIT, pynvml.NVML_ERROR_DRIVER_NOT_LOADED)
    watched.cycle()
    assert watched.seen.driver().state == "driver_not_loaded"
    assert watched.poll(1).memory == Absent("DRIVER_NOT_LOADED")
    watched.sim.clear(Family.INIT)
    watched.cycle()
    assert_reading(watched, 0, 1)


def test_what_a_device_lacked_is_asked_for_again_after_a_reload(watch: Watch) -> None:
    watched = watch(1, start=False)
    watched.sim.set_supported(0, Family.UTILIZATION, False)
    watched.cycle()
    assert watched.poll(0).utilization == Absent("NOT_SUPPORTED")
    watched.sim.set_supported(0, Family.UTILIZATION)
    watched.sim.reload_driver()
    watched.cycle()
    assert watched.poll(0).utilization == 0.0


def test_an_initialisation_that_hangs_is_bounded_and_reported(watch: Watch) -> None:
    watched = watch(1, deadline=0.3, start=False)
    watched.sim.hang(Family.INIT)
    begin = time.monotonic()
    watched.cycle(3)
    assert time.monotonic() - begin < 1.5
    driver = watched.seen.driver()
    assert (driver.state, driver.detail.split(" for ")[0]) == ("hung", "nvmlInitWithFlags has not returned")
    assert watched.sim.calls(Family.INIT) == 1, "no second call is piled upon it"

    watched.sim.release(Family.INIT)
    until(lambda: _state_after_cycle(watched) == "ok")
    assert_reading(watched, 0)


def _state_after_cycle(watched: Watched) -> str:
    watched.cycle()
    return watched.seen.driver().state


def test_a_count_that_hangs_leaves_the_devices_readable(watch: Watch) -> None:
    watched = watch(2, deadline=0.3)
    watched.sim.hang(Family.COUNT)
    watched.seen.clear()
    watched.cycle()
    assert watched.seen.driver().state == "hung"
    assert [watched.seen.run(watched.uuid(slot)).ok for slot in (0, 1)] == [True, True]


def test_known_devices_are_hung_while_the_driver_hangs_at_a_new_start(watch: Watch) -> None:
    watched = watch(1, deadline=0.3)
    watched.sim.reload_driver()
    watched.sim.hang(Family.INIT)
    watched.cycle()
    assert watched.seen.driver().state == "hung"
    assert watched.poll(0).memory == HUNG


# --- given back on request -----------------------------------------------------------------------------------------


def test_release_gives_the_driver_back_and_resume_takes_it_again(watch: Watch) -> None:
    watched = watch(2)
    assert watched.source.release() == ""
    assert watched.sim.sessions() == 0
    assert watched.seen.driver().state == "released"

    watched.seen.clear()
    mark = watched.sim.mark()
    watched.cycle(2)
    assert watched.sim.calls(since=mark) == 0
    assert [report.state for report in watched.seen.all(type(watched.seen.driver()))] == ["released"] * 2
    assert watched.seen.all(GpuPoll) == [], "released on purpose is no failure of a device"

    watched.source.resume()
    watched.source.poll_all()
    assert_reading(watched, 0, 1)


def test_mig_can_be_configured_during_a_release(watch: Watch) -> None:
    watched = watch(1)
    watched.source.release()
    watched.sim.enable_mig(0)
    watched.source.resume()
    watched.cycle()
    assert watched.poll(0).mig_enabled is True


def test_a_release_can_end_by_itself(watch: Watch) -> None:
    watched = watch(1)
    watched.source.release(0.2)
    assert watched.sim.sessions() == 0
    until(lambda: _state_after_cycle(watched) == "ok")
    assert_reading(watched, 0)


def test_events_are_waited_for_again_after_a_release(watch: Watch) -> None:
    watched = watch(1, deadline=0.5)
    watched.sim.wait_calls(Family.EVENT_WAIT, 1)
    watched.source.release()
    mark = watched.sim.mark()
    watched.source.resume()
    watched.sim.wait_calls(Family.EVENT_WAIT, 1, since=mark)
    watched.sim.xid(0, 63)
    assert [event.code for event in watched.seen.wait(XidEvent)] == [63]


def test_the_driver_is_not_shut_down_beneath_a_call_that_hangs(watch: Watch) -> None:
    watched = watch(2, deadline=0.5)
    watched.sim.hang(Family.MEMORY, 1)
    watched.source.poll_all()
    problem = watched.source.release()
    driver = watched.seen.driver()
    assert driver.state == "hung"
    assert driver.detail.startswith("the driver cannot be given back: nvmlDeviceGetMemoryInfo_v2 has not returned for")
    assert problem == driver.detail
    assert watched.source.released, "each refresh tries again"
    assert watched.sim.sessions() == 1

    watched.sim.release(Family.MEMORY, 1)
    until(lambda: _state_after_cycle(watched) == "released")
    assert watched.sim.sessions() == 0


def test_a_release_taken_back_while_a_call_hangs_leaves_the_others_readable(watch: Watch) -> None:
    watched = watch(2, deadline=0.5)
    watched.sim.hang(Family.MEMORY, 1)
    watched.source.poll_all()
    watched.source.release()
    watched.source.resume()
    watched.source.poll_all()
    assert_reading(watched, 0)
    assert watched.poll(1).memory == HUNG


def test_a_reload_while_a_call_hangs_leaves_the_driver_alone(watch: Watch) -> None:
    watched = watch(2, deadline=0.5)
    watched.sim.hang(Family.MEMORY, 1)
    watched.source.poll_all()
    watched.sim.fail(Family.COUNT, pynvml.NVML_ERROR_UNKNOWN)
    watched.cycle()
    assert watched.seen.driver().state == "hung"
    assert watched.sim.initialisations() == 1
    watched.sim.clear(Family.COUNT)
    watched.cycle()
    assert_reading(watched, 0)


def test_a_release_is_in_force_until_it_is_taken_back(watch: Watch) -> None:
    watched = watch(1)
    assert not watched.source.released
    watched.source.release()
    assert watched.source.released
    watched.source.resume()
    assert not watched.source.released


def test_a_release_while_the_driver_hangs_says_which_call(watch: Watch) -> None:
    watched = watch(1, deadline=0.3)
    watched.sim.hang(Family.COUNT)
    watched.cycle()
    assert watched.source.release().startswith(
        "the driver cannot be given back: nvmlDeviceGetCount_v2 has not returned for"
    )


def test_a_release_that_does_not_get_its_turn_says_so(watch: Watch) -> None:
    watched = watch(1, deadline=0.1)
    with watched.source._refreshing:  # as another refresh does that takes too long
        problem = watched.source.release()
    assert problem == "the driver cannot be given back: it is still being asked whether it works"
    watched.cycle()
    assert watched.seen.driver().state == "released", "the next refresh does it"


def test_a_source_that_is_closed_gives_nothing_back(watch: Watch) -> None:
    watched = watch(1)
    watched.source.close()
    assert watched.source.release() == "the driver cannot be given back: the source is closed"


def test_a_release_is_carried_on_by_the_source_that_takes_over(watch: Watch) -> None:
    first = watch(1)
    first.source.release()
    first.source.close()
    second = watch(1, released_until=first.source.released_until)
    assert second.source.released
    assert second.seen.driver().state == "released"
    assert second.sim.initialisations() == 0
    second.source.resume()
    second.source.poll_all()
    assert_reading(second, 0)


def test_closing_gives_the_driver_back(watch: Watch) -> None:
    watched = watch(2)
    watched.source.close()
    until(lambda: watched.sim.sessions() == 0)


def test_a_source_without_a_driver_can_be_closed(watch: Watch) -> None:
    watched = watch(1, start=False)
    watched.source.close()
    assert watched.sim.calls() == 0
