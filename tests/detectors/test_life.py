"""Starts that fail and deaths that repeat, told from pages and processes without a log."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import pytest

from oomwatch.detectors.base import Finding, Subject
from oomwatch.detectors.life import CrashLoop, CrashLoopSettings, StartupOom, StartupOomSettings
from oomwatch.observations import AllocationFailure, EngineFacts
from tests.detectors.leaking import allocator
from tests.detectors.node_streams import GIB, HOUR, LLAMA, MINUTE, STRANGER, Scene, held


def startup(**changes: Any) -> Scene:
    return Scene(StartupOom(Subject(engine="llama"), StartupOomSettings()), processes=(), **changes)


def loop(**changes: Any) -> Scene:
    return Scene(CrashLoop(Subject(engine="llama"), CrashLoopSettings()), processes=(), **changes)


def failing_start(scene: Scene, pid: int, peak: float = 70.0, stranger: bool = False) -> Finding:
    """A process whose memory climbs to ``peak`` GiB within two minutes and is gone, and a minute of nothing."""
    scene.state, scene.pids = "unreachable", ()
    holder = STRANGER if stranger else LLAMA
    for step in range(1, 9):
        scene.processes = (held(pid, peak * step / 8, holder),)
        scene.free = 79.0 - peak * step / 8
        scene.poll()
    scene.ends(pid, holder)
    scene.processes, scene.free = (), 79.0
    return scene.poll(MINUTE)


def life(scene: Scene, pid: int, seconds: float) -> Finding:
    """The engine starts, serves for so long, and dies with requests running."""
    scene.restart()
    scene.state, scene.pids, scene.processes = "ok", (pid,), (held(pid, 70.0),)
    scene.poll(seconds)
    return death(scene, pid)


def death(scene: Scene, pid: int) -> Finding:
    scene.state, scene.processes = "unreachable", ()
    scene.poll()
    scene.ends(pid)
    return scene.poll(2 * MINUTE)


class TestStartupOom:
    def test_one_failed_start_is_a_hint_of_unknown_cause(self) -> None:
        scene = startup(state="unreachable")
        scene.poll(MINUTE)
        finding = failing_start(scene, 20)
        assert finding.state == "info"
        assert finding.evidence["cause"] == "unknown"
        assert finding.evidence["peak_bytes"] == 70 * GIB
        assert finding.evidence["least_free_bytes"] == 9 * GIB
        assert "Its log tells the cause" in finding.summary

    def test_an_allocation_that_failed_in_it_by_the_probe_inside_is_its_cause(self) -> None:
        scene = startup(state="unreachable")
        scene.poll(MINUTE)
        scene.processes = (held(20, 70.0),)
        scene.poll(MINUTE)
        failure = AllocationFailure(scene.t, wanted=2 * GIB, free=GIB, allocated=69 * GIB, reserved=70 * GIB)
        scene.detector.observe(allocator(scene.t, 69 * GIB, 70 * GIB, ready_since=None, failure=failure))
        scene.ends(20)
        scene.processes = ()
        finding = scene.poll(MINUTE)
        assert (finding.state, finding.killer) == ("ticket", "fragmentation")
        assert finding.evidence["wanted_bytes"] == 2 * GIB
        assert "ran out of memory while starting" in finding.summary

    def test_again_and_again_is_one_ticket_with_the_count(self) -> None:
        scene = startup(state="unreachable")
        scene.poll(MINUTE)
        states = [failing_start(scene, pid).state for pid in range(20, 26)]
        assert states == ["info", *["ticket"] * 5]
        assert scene.poll().evidence["failed_starts"] == 6

    def test_the_tighter_the_device_was_the_surer(self) -> None:
        wide, tight = startup(state="unreachable"), startup(state="unreachable")
        for scene in (wide, tight):
            scene.poll(MINUTE)
        assert failing_start(tight, 20, peak=78.0).confidence > failing_start(wide, 20, peak=60.0).confidence

    def test_a_start_that_succeeds_is_none(self) -> None:
        scene = startup(state="unreachable")
        scene.poll(MINUTE)
        for step in range(1, 9):
            scene.processes = (held(20, 8.0 * step),)
            scene.poll()
        scene.state, scene.pids = "ok", (20,)
        assert scene.poll(HOUR).state == "clear"

    def test_the_death_of_an_engine_that_served_is_none(self) -> None:
        scene = startup()
        assert life(scene, 20, HOUR).state == "clear"
        assert scene.poll(HOUR).state == "clear"

    def test_a_success_ends_the_row(self) -> None:
        scene = startup(state="unreachable")
        scene.poll(MINUTE)
        failing_start(scene, 20)
        life(scene, 21, HOUR)
        assert failing_start(scene, 22).state == "info"

    def test_after_a_success_a_ticket_stands_for_an_hour(self) -> None:
        scene = startup(state="unreachable")
        scene.poll(MINUTE)
        failing_start(scene, 20)
        failing_start(scene, 21)
        scene.state, scene.processes, scene.pids = "ok", (held(22, 70.0),), (22,)
        assert scene.poll(50 * MINUTE).state == "ticket"
        assert scene.poll(30 * MINUTE).state == "clear"

    def test_starts_that_took_no_memory_stay_a_hint(self) -> None:
        """A wrong argument, or a budget above what is free: the process ends before it loads anything."""
        scene = startup(state="unreachable")
        scene.poll(MINUTE)
        assert {failing_start(scene, pid, peak=0.5).state for pid in range(20, 26)} == {"info"}

    def test_memory_that_nobody_owns_is_never_more_than_a_hint(self) -> None:
        scene = startup(state="unreachable")
        scene.poll(MINUTE)
        assert {failing_start(scene, pid, stranger=True).state for pid in range(20, 26)} == {"info"}

    def test_jobs_of_others_beside_a_serving_engine_are_none(self) -> None:
        scene = startup()
        scene.pids = (10,)
        for pid in range(20, 30):
            scene.processes = (held(10, 40.0), held(pid, 20.0, STRANGER))
            scene.poll(MINUTE)
            scene.processes = (held(10, 40.0),)
            assert scene.poll(MINUTE).state == "clear"

    def test_a_list_that_leaves_a_process_out_once_is_no_failure(self) -> None:
        scene = startup(state="unreachable")
        scene.poll(MINUTE)
        for _ in range(5):
            scene.processes = (held(20, 30.0),)
            scene.poll(MINUTE)
            scene.processes = ()
            assert scene.poll().state == "clear"

    def test_ranks_on_one_device_are_one_start(self) -> None:
        scene = startup(state="unreachable")
        scene.poll(MINUTE)
        scene.processes = tuple(held(pid, 9.0) for pid in range(20, 28))
        scene.poll(MINUTE)
        scene.processes = tuple(held(pid, 9.0) for pid in range(24, 28))
        scene.poll(MINUTE)
        scene.processes = ()
        assert scene.poll(MINUTE).evidence["failed_starts"] == 1

    def test_without_any_gpu_the_hosts_processes_tell(self) -> None:
        scene = startup(state="unreachable", engines=(), pids=())
        scene.poll(MINUTE)
        scene.host(20)
        scene.poll(MINUTE)
        scene.host(20)
        scene.ends(20)
        finding = scene.poll(MINUTE)
        assert finding.state == "info"
        assert "peak_bytes" not in finding.evidence

    def test_a_start_is_over_when_the_engine_has_ended_though_no_more_is_heard_of_its_processes(self) -> None:
        scene = startup(state="unreachable", engines=(), pids=())
        for started in (20, 21):
            scene.state = "unreachable"
            scene.host(started)
            scene.poll(MINUTE)
            scene.host(started)
            scene.state = "gone"
            scene.poll()
            scene.ends(started, STRANGER)
        scene.state = "unreachable"
        assert scene.poll(MINUTE).evidence["failed_starts"] == 2

    def test_a_supervisor_that_starts_anew_before_the_last_child_has_ended_makes_two_starts(self) -> None:
        scene = startup(state="unreachable", engines=(), pids=())
        for root in (20, 30):
            scene.host(root)
            scene.host(root + 1, parent=root)
            scene.poll(MINUTE)
            scene.ends(root)
        scene.host(21, parent=1)
        scene.ends(21)
        scene.ends(31)
        finding = scene.poll(MINUTE)
        assert finding.evidence["failed_starts"] == 2
        assert finding.evidence["start_seconds"] == pytest.approx(MINUTE, abs=15)

    def test_a_hint_fades_after_an_hour(self) -> None:
        scene = startup(state="unreachable")
        scene.poll(MINUTE)
        failing_start(scene, 20)
        assert scene.poll(50 * MINUTE).state == "info"
        assert scene.poll(20 * MINUTE).state == "clear"

    def test_an_engine_that_nobody_has_seen_is_unknown(self) -> None:
        assert startup(state="").wait(MINUTE).state == "unknown"


class TestCrashLoop:
    def test_the_third_death_within_six_hours_pages(self) -> None:
        scene = loop()
        assert [life(scene, pid, HOUR).state for pid in (10, 11, 12)] == ["clear", "info", "page"]

    def test_it_is_one_incident_with_count_and_period(self) -> None:
        scene = loop()
        finding = [life(scene, pid, HOUR) for pid in range(10, 18)][-1]
        assert finding.evidence["deaths"] == 8
        assert finding.evidence["period_seconds"] == pytest.approx(HOUR, rel=0.1)
        assert "died 8 times" in finding.summary

    def test_three_deaths_in_a_day_that_lie_further_apart_are_a_ticket(self) -> None:
        scene = loop(interval=60.0)
        assert [life(scene, pid, 4 * HOUR).state for pid in (10, 11, 12)] == ["clear", "info", "ticket"]

    def test_one_death_a_day_is_no_loop(self) -> None:
        scene = loop(interval=60.0)
        assert {life(scene, pid, 25 * HOUR).state for pid in range(10, 15)} == {"clear"}

    def test_it_stays_until_the_engine_outlives_its_period_twice(self) -> None:
        scene = loop()
        for pid in (10, 11, 12):
            life(scene, pid, HOUR)
        scene.restart()
        scene.state, scene.pids, scene.processes = "ok", (13,), (held(13, 70.0),)
        assert scene.poll(1.9 * HOUR).state == "page"
        assert scene.poll(0.4 * HOUR).state == "clear"

    def test_starts_that_fail_are_deaths(self) -> None:
        scene = loop(state="unreachable")
        scene.poll(MINUTE)
        assert [failing_start(scene, pid).state for pid in (20, 21, 22)] == ["clear", "info", "page"]

    def test_a_stop_and_two_failed_starts_are_not_three_crashes(self) -> None:
        """An upgrade: the engine is stopped on purpose, and comes up at the third attempt."""
        scene = loop()
        life(scene, 10, HOUR)
        failing_start(scene, 20)
        assert failing_start(scene, 21).state == "info"

    def test_an_engine_that_came_up_with_other_settings_was_restarted_by_someone(self) -> None:
        scene = loop()
        for pid, version in enumerate(("0.9.2", "0.10.2", "0.9.2", "0.11.0", "0.9.2"), start=10):
            scene.facts = EngineFacts("llama", vllm_version=version)
            life(scene, pid, HOUR)
        scene.restart()
        scene.state = "ok"
        scene.facts = EngineFacts("llama", vllm_version="0.11.0")
        assert scene.poll(MINUTE).state == "clear"

    def test_ends_without_work_look_like_stops_and_do_not_page(self) -> None:
        scene = loop()
        scene.reading = replace(scene.reading, running=0.0, waiting=0.0)
        assert [life(scene, pid, HOUR).state for pid in (10, 11, 12)] == ["clear", "info", "ticket"]

    def test_a_restart_between_two_scrapes_is_seen_by_its_new_life(self) -> None:
        scene = loop()
        states = []
        for _ in range(4):
            scene.restart()
            states.append(scene.poll(HOUR).state)
        assert states == ["clear", "clear", "info", "page"]

    def test_a_network_that_fails_is_no_death(self) -> None:
        scene = loop(pids=())
        for _ in range(6):
            scene.state = "ok"
            scene.poll(10 * MINUTE)
            scene.state = "unreachable"
            scene.poll(5 * MINUTE)
        scene.state = "ok"
        assert scene.poll().state == "clear"

    def test_timeouts_are_no_death(self) -> None:
        scene = loop()
        for _ in range(6):
            scene.state = "ok"
            scene.poll(10 * MINUTE)
            scene.state = "timeout"
            assert scene.poll(5 * MINUTE).state == "clear"

    def test_an_engine_core_that_died_behind_its_front_end_counts_once(self) -> None:
        scene = loop()
        for pid in (10, 11, 12):
            scene.restart()
            scene.state, scene.pids = "ok", (pid,)
            scene.poll(HOUR)
            scene.state = "dead"
            scene.poll(MINUTE)
            death(scene, pid)
        assert scene.poll().evidence["deaths"] == 3

    def test_a_found_engine_that_is_dropped_when_it_ends_counts(self) -> None:
        scene = loop()
        for pid in (10, 11, 12):
            scene.restart()
            scene.state, scene.pids = "ok", (pid,)
            scene.poll(HOUR)
            scene.ends(pid)
        assert scene.wait(MINUTE).state == "page"

    def test_helpers_that_come_and_go_are_no_deaths(self) -> None:
        scene = loop()
        for pid in range(100, 120):
            scene.host(pid)
            scene.poll(MINUTE)
            scene.ends(pid)
            assert scene.poll(MINUTE).state == "clear"

    def test_sleep_is_no_death(self) -> None:
        scene = loop()
        for _ in range(6):
            scene.state = "ok"
            scene.segment += 1
            scene.poll(10 * MINUTE)
            scene.state = "sleeping"
            scene.segment += 1
            assert scene.poll(10 * MINUTE).state == "clear"


@pytest.mark.parametrize("make", [startup, loop])
def test_state_survives_a_restart_of_the_daemon(make: Any) -> None:
    """A loop goes on where it was counted to; asked twice for one time, the answer is the same."""
    scene: Scene = make()
    life(scene, 10, HOUR)
    failing_start(scene, 20)
    again = Scene(**{**scene.__dict__, "detector": pickle.loads(pickle.dumps(scene.detector))})
    assert failing_start(again, 21) == failing_start(scene, 21)
    assert scene.detector.conclude(scene.t) == scene.detector.conclude(scene.t)
