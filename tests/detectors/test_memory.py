"""Margin, headroom, budget and memory without an owner: both sides of each threshold, and what must stay silent."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest

from oomwatch.detectors.base import Subject
from oomwatch.detectors.memory import (
    BudgetOverrun,
    BudgetOverrunSettings,
    HeadroomLow,
    HeadroomLowSettings,
    MarginThin,
    MarginThinSettings,
    OrphanMemory,
    OrphanMemorySettings,
)
from oomwatch.observations import IMPLAUSIBLE, MIG_ENABLED, NOT_READ, Absent, EngineFacts, RankReading
from oomwatch.snapshot import HeldProcess, Holder
from tests.detectors.node_streams import (
    GIB,
    GPU,
    HOUR,
    MIB,
    MINUTE,
    NEIGHBOUR,
    RESERVED,
    STRANGER,
    TOTAL,
    Scene,
    held,
)

EMBED = Holder("engine", "embed")
USABLE = TOTAL - RESERVED
LOW = 1.5 * 80 / 100  # GiB: 1.5 % of the device, which is more than 1 GiB


def margin(**changes: Any) -> Scene:
    return Scene(MarginThin(Subject(gpu=GPU), MarginThinSettings()), **changes)


def headroom(**changes: Any) -> Scene:
    return Scene(HeadroomLow(Subject(gpu=GPU), HeadroomLowSettings()), **changes)


def budget(allowance: int = 0, **changes: Any) -> Scene:
    settings = BudgetOverrunSettings(allowance=allowance)
    return Scene(BudgetOverrun(Subject(engine="llama"), settings), **changes)


def orphans(**changes: Any) -> Scene:
    return Scene(OrphanMemory(Subject(gpu=GPU), OrphanMemorySettings()), **changes)


class TestMarginThin:
    @pytest.mark.parametrize(
        ("free", "state"),
        [(LOW + 0.01, "clear"), (LOW - 0.01, "info"), (385 / 1024, "info"), (383 / 1024, "ticket"), (0.0, "ticket")],
    )
    def test_what_is_left_free_decides(self, free: float, state: str) -> None:
        assert margin(free=free).poll(15 * MINUTE).state == state

    def test_on_a_small_device_one_gib_is_the_mark(self) -> None:
        small = margin(total=24 * GIB, reserved=0, free=1.01)
        assert small.poll(15 * MINUTE).state == "clear"
        small = margin(total=24 * GIB, reserved=0, free=0.99)
        assert small.poll(15 * MINUTE).state == "info"

    def test_the_lowest_reading_since_ready_counts(self) -> None:
        scene = margin(free=8.0)
        scene.poll(5 * MINUTE)
        scene.free = 0.3
        scene.poll()
        scene.free = 8.0
        finding = scene.poll(10 * MINUTE)
        assert finding.state == "ticket"
        assert finding.evidence["free_floor_bytes"] == round(0.3 * GIB)

    def test_it_says_which_utilisation_leaves_one_gib(self) -> None:
        finding = margin(free=0.21, total=80 * GIB, reserved=0).poll(15 * MINUTE)
        # 0.9 of 80 GiB, less the 0.79 GiB that are short: 0.8901
        assert finding.evidence["fitting_utilization"] == 0.89
        assert "gpu_memory_utilization 0.89 instead of 0.9 for llama" in finding.summary

    def test_a_set_pool_size_has_no_utilisation_to_lower(self) -> None:
        finding = margin(free=0.2, pool_bytes=GIB).poll(15 * MINUTE)
        assert finding.state == "ticket"
        assert "fitting_utilization" not in finding.evidence

    def test_nothing_is_said_in_the_first_minutes_of_service(self) -> None:
        scene = margin(free=0.2)
        assert scene.poll(9 * MINUTE).state == "unknown"
        assert scene.poll(2 * MINUTE).state == "ticket"

    def test_loading_does_not_count(self) -> None:
        """While an engine starts, its memory peaks; it is judged by what it leaves once it answers."""
        scene = margin(state="unreachable", free=0.1, processes=(held(10, 70),))
        assert scene.poll(5 * MINUTE).reason == "no engine serves on this device"
        scene.state, scene.free = "ok", 8.0
        assert scene.poll(15 * MINUTE).state == "clear"

    def test_what_is_lost_after_the_warm_up_is_not_its_affair(self) -> None:
        scene = margin(free=3.0)
        scene.poll(HOUR)
        scene.free = 0.1
        assert scene.poll(HOUR).state == "clear"

    def test_a_restart_begins_anew_and_waits_again(self) -> None:
        scene = margin(free=0.2)
        assert scene.poll(15 * MINUTE).state == "ticket"
        scene.restart()
        scene.free = 8.0
        assert scene.poll().reason == "warming up"
        assert scene.poll(15 * MINUTE).state == "clear"

    def test_a_dead_engine_leaves_no_hint_behind(self) -> None:
        scene = margin(free=0.2)
        scene.poll(15 * MINUTE)
        scene.state = "unreachable"
        assert scene.poll(2 * MINUTE).reason == "no engine serves on this device"

    def test_sleep_takes_no_part(self) -> None:
        """A trainer may fill the card while the engine sleeps: no forward pass runs then."""
        scene = margin(free=8.0)
        scene.poll(5 * MINUTE)
        scene.state, scene.free = "sleeping", 0.1
        scene.poll(5 * MINUTE)
        scene.state, scene.free = "ok", 8.0
        assert scene.poll(10 * MINUTE).state == "clear"

    def test_memory_shared_with_the_host_says_nothing(self) -> None:
        assert margin(free=0.1, unified=True).poll(15 * MINUTE).reason == "the device shares the host's memory"

    def test_silence_is_not_clear(self) -> None:
        scene = margin(free=8.0)
        scene.poll(15 * MINUTE)
        assert scene.wait(4 * MINUTE).reason == "no fresh poll of this device"
        scene.memory = Absent("NO_PERMISSION")
        assert scene.poll().reason == "free memory cannot be read: NO_PERMISSION"

    @pytest.mark.parametrize("interval", [5.0, 15.0, 60.0, 90.0])
    def test_the_polling_interval_does_not_matter(self, interval: float) -> None:
        scene = margin(free=0.2, interval=interval)
        assert scene.poll(9 * MINUTE - interval).state == "unknown"
        assert scene.poll(5 * MINUTE).state == "ticket"


class TestHeadroomLow:
    def warmed_up(self, free: float, **changes: Any) -> Scene:
        scene = headroom(free=free, **changes)
        scene.poll(40 * MINUTE)
        return scene

    @pytest.mark.parametrize(
        ("level", "free", "state"),
        [
            (8.0, LOW + 0.01, "clear"),
            (8.0, LOW - 0.01, "ticket"),
            (8.0, 513 / 1024, "ticket"),
            (8.0, 511 / 1024, "page"),
            (0.5 + 126 / 1024, 0.5 - 1 / 1024, "clear"),  # 127 MiB below the level: the level it has lived with
            (0.5 + 128 / 1024, 0.5 - 1 / 1024, "page"),  # 129 MiB
        ],
    )
    def test_level_and_fall_decide_together(self, level: float, free: float, state: str) -> None:
        scene = self.warmed_up(level)
        scene.free = free
        assert scene.poll(5 * MINUTE).state == state

    @pytest.mark.parametrize("level", [0.05, 0.21, 0.4, 1.1])
    def test_an_engine_that_lives_low_is_left_alone(self, level: float) -> None:
        scene = self.warmed_up(level)
        assert scene.poll(12 * HOUR).state == "clear"

    def test_nothing_is_known_before_the_warm_up_is_over(self) -> None:
        scene = headroom(free=8.0)
        scene.poll(20 * MINUTE)
        scene.free = 0.3
        assert scene.poll(5 * MINUTE).reason == "warming up"
        assert scene.poll(HOUR).state == "clear"  # and this is the level from now on

    def test_the_first_thousand_requests_belong_to_the_warm_up(self) -> None:
        scene = headroom(free=8.0, per_poll=1.0)
        scene.poll(2 * HOUR)
        scene.free = 0.3
        assert scene.poll(10 * MINUTE).reason == "warming up"

    def test_an_engine_that_counts_no_requests_is_warm_after_an_hour(self) -> None:
        scene = headroom(free=8.0, finished=None)
        assert scene.poll(50 * MINUTE).reason == "warming up"
        assert scene.poll(20 * MINUTE).state == "clear"

    def test_one_dip_stands_for_the_window_and_the_latch(self) -> None:
        scene = self.warmed_up(8.0)
        scene.free = 0.3
        assert scene.poll().state == "page"
        scene.free = 8.0
        assert scene.poll(24 * MINUTE).state == "page"
        assert scene.poll(10 * MINUTE).state == "ticket"
        assert scene.poll(HOUR).state == "clear"

    def test_a_fall_that_ended_hours_ago_wakes_nobody(self) -> None:
        scene = self.warmed_up(8.0)
        scene.free = 0.3
        assert scene.poll(5 * HOUR).state == "page"
        assert scene.poll(2 * HOUR).state == "ticket"

    def test_a_second_fall_pages_again(self) -> None:
        scene = self.warmed_up(8.0)
        scene.free = 0.3
        scene.poll(8 * HOUR)
        scene.free = 8.0
        scene.poll(2 * HOUR)
        scene.free = 0.3
        assert scene.poll().state == "page"

    @pytest.mark.parametrize("change", ["restart", "sleep"])
    def test_a_new_segment_learns_its_own_level(self, change: str) -> None:
        scene = self.warmed_up(8.0)
        if change == "restart":
            scene.restart()
        else:
            scene.state = "sleeping"
            scene.segment += 1
            assert scene.poll(MINUTE).reason == "the engine sleeps"
            scene.state = "ok"
            scene.segment += 1
        scene.free = 0.3
        assert scene.poll(10 * MINUTE).reason == "warming up"
        assert scene.poll(2 * HOUR).state == "clear"

    def test_another_engine_that_starts_takes_what_it_was_given(self) -> None:
        scene = self.warmed_up(30.0)
        scene.engines = ("llama", "embed")
        scene.processes = (held(10, 40), held(20, 25, EMBED))
        scene.free = 0.3
        assert scene.poll(5 * MINUTE).reason == "an engine is starting on this device"

    def test_without_an_engine_free_memory_means_nothing(self) -> None:
        scene = self.warmed_up(8.0)
        scene.state = "unreachable"
        scene.free = 0.1
        assert scene.poll(2 * MINUTE).reason == "no engine serves on this device"

    def test_memory_shared_with_the_host_says_nothing(self) -> None:
        scene = headroom(free=0.1, unified=True)
        assert scene.poll(2 * HOUR).reason == "the device shares the host's memory"

    def test_a_lost_poll_now_and_then_changes_nothing(self) -> None:
        scene = self.warmed_up(8.0, interval=30.0)
        scene.free = 0.9
        scene.poll()
        scene.wait(80.0)
        assert scene.poll().state == "ticket"


class TestBudgetOverrun:
    SHARE = 0.9 * USABLE / GIB  # GiB: what 0.9 of the device comes to

    @pytest.mark.parametrize(
        ("over_mib", "state"),
        [(-33, "clear"), (255, "clear"), (257, "info"), (767, "info"), (769, "ticket"), (8000, "ticket")],
    )
    def test_what_is_held_beyond_the_share_decides(self, over_mib: int, state: str) -> None:
        scene = budget(processes=(held(10, self.SHARE + over_mib / 1024),))
        finding = scene.poll(20 * MINUTE)
        assert finding.state == state
        assert finding.evidence["overrun_bytes"] == pytest.approx(over_mib * MIB, abs=2)
        assert finding.evidence["gpu"] == GPU

    def test_a_ticket_takes_ten_minutes(self) -> None:
        scene = budget(processes=(held(10, self.SHARE),))
        scene.poll(20 * MINUTE)
        scene.processes = (held(10, self.SHARE + 1),)
        assert scene.poll(9 * MINUTE).state == "info"
        assert scene.poll(2 * MINUTE).state == "ticket"

    def test_a_dip_below_begins_the_ten_minutes_anew(self) -> None:
        scene = budget(processes=(held(10, self.SHARE),))
        scene.poll(20 * MINUTE)
        for _ in range(3):
            scene.processes = (held(10, self.SHARE + 1),)
            scene.poll(8 * MINUTE)
            scene.processes = (held(10, self.SHARE),)
            assert scene.poll().state == "clear"

    def test_the_page_knows_the_share_better_than_the_configuration(self) -> None:
        scene = budget(processes=(held(10, 78.0),))
        scene.reading = RankReading("0", usage=0.5, running=1.0, waiting=0.0, gpu_memory_utilization=0.98)
        assert scene.poll(20 * MINUTE).state == "info"  # 0.98 x 79 GiB = 77.42; 0.9 of it would be far over

    def test_unknown_reserve_takes_the_smaller_overrun(self) -> None:
        """The old memory call counts the driver's part as used: its total is larger than what the engine sees."""
        used = (held(10, 0.9 * TOTAL / GIB + 0.2),)  # 205 MiB over 0.9 of all, 1.1 GiB over 0.9 of what is usable
        assert budget(processes=used, reserved=None).poll(20 * MINUTE).state == "clear"
        assert budget(processes=used).poll(20 * MINUTE).state == "ticket"

    def test_several_processes_of_the_engine_add_up(self) -> None:
        scene = budget(processes=(held(10, self.SHARE - 0.5), held(11, 0.9), held(12, 0.5)))
        assert scene.poll(20 * MINUTE).state == "ticket"

    def test_other_engines_and_strangers_do_not(self) -> None:
        processes = (held(10, 30), held(20, 30, EMBED), held(30, 15, STRANGER))
        assert budget(processes=processes).poll(20 * MINUTE).state == "clear"

    def test_the_allowance_is_taken_off(self) -> None:
        over = (held(10, self.SHARE + 2),)
        assert budget(processes=over).poll(20 * MINUTE).state == "ticket"
        assert budget(allowance=2 * GIB, processes=over).poll(20 * MINUTE).state == "clear"

    def test_without_a_share_there_is_no_budget(self) -> None:
        over = (held(10, 79),)
        assert budget(processes=over, pool_bytes=GIB).poll(20 * MINUTE).reason.startswith("no budget")
        scene = budget(processes=over, facts=EngineFacts("llama"))
        assert scene.poll(20 * MINUTE).reason == "gpu_memory_utilization is not known"

    def test_asleep_there_is_none_and_a_ticket_stands(self) -> None:
        scene = budget(processes=(held(10, self.SHARE + 1),))
        assert scene.poll(20 * MINUTE).state == "ticket"
        scene.state, scene.processes = "sleeping", (held(10, 4),)
        assert scene.poll(20 * MINUTE).state == "ticket"
        assert scene.poll(2 * HOUR).reason == "the engine sleeps"

    def test_time_asleep_is_no_time_over(self) -> None:
        scene = budget(processes=(held(10, self.SHARE),))
        scene.poll(20 * MINUTE)
        for _ in range(4):
            scene.state, scene.processes = "ok", (held(10, self.SHARE + 1),)
            assert scene.poll(6 * MINUTE).state == "info"
            scene.state = "sleeping"
            scene.poll(6 * MINUTE)

    def test_a_start_is_no_overrun(self) -> None:
        scene = budget(state="unreachable", processes=(held(10, 79),))
        assert scene.poll(20 * MINUTE).reason == "the engine does not serve"
        scene.state = "ok"
        assert scene.poll(5 * MINUTE).reason == "warming up"

    @pytest.mark.parametrize("reason", ["NO_PERMISSION", "IMPLAUSIBLE", "NOT_SUPPORTED"])
    def test_an_unreadable_list_is_unknown(self, reason: str) -> None:
        assert budget(processes=Absent(reason)).poll(20 * MINUTE).reason.endswith(reason)

    def test_a_process_without_a_figure_is_unknown(self) -> None:
        assert budget(processes=(held(10, None),)).poll(20 * MINUTE).reason.endswith("NOT_SUPPORTED")

    def test_lists_that_come_seldom_do_as_well(self) -> None:
        scene = budget(processes=NOT_READ)
        states = []
        for _ in range(8):
            scene.processes = NOT_READ
            scene.poll(4 * MINUTE)
            scene.processes = (held(10, self.SHARE + 1),)
            states.append(scene.poll().state)
        assert states[0] == "unknown"
        assert states[-1] == "ticket"

    def test_alone_on_its_device_the_one_large_process_is_the_engines(self) -> None:
        scene = budget(processes=(held(10, self.SHARE + 1, STRANGER),), pids=())
        assert scene.poll(20 * MINUTE).state == "ticket"
        scene = budget(processes=(held(10, self.SHARE + 1, STRANGER), held(11, 2, STRANGER)), pids=())
        assert scene.poll(20 * MINUTE).state == "unknown"

    def test_a_restart_clears_what_stood(self) -> None:
        scene = budget(processes=(held(10, self.SHARE + 1),))
        assert scene.poll(20 * MINUTE).state == "ticket"
        scene.restart()
        scene.processes = (held(11, self.SHARE - 1),)
        assert scene.poll().state == "unknown"
        assert scene.poll(15 * MINUTE).state == "clear"


class TestOrphanMemory:
    def scene(self, **changes: Any) -> Scene:
        scene = orphans(used=60.0, free=19.0, processes=(held(10, 60.0),), **changes)
        assert scene.poll(5 * MINUTE).state == "clear"
        return scene

    def add(self, scene: Scene, *strangers: HeldProcess) -> None:
        processes = (held(10, 60.0), *strangers)
        scene.processes = processes
        scene.used = sum(process.used or 0 for process in processes) / GIB

    @pytest.mark.parametrize(("used", "state"), [(1023 / 1024, "clear"), (1.0, "ticket"), (16.0, "ticket")])
    def test_one_gib_without_an_owner_is_a_ticket(self, used: float, state: str) -> None:
        scene = self.scene()
        self.add(scene, held(77, used, STRANGER))
        assert scene.poll(3 * MINUTE).state == state

    def test_pids_names_and_bytes_are_listed(self) -> None:
        scene = self.scene()
        self.add(scene, held(77, 3.0, STRANGER, "notebook"), held(78, 0.5, STRANGER, ""))
        finding = scene.poll(3 * MINUTE)
        assert finding.evidence["pids"] == [77, 78]
        assert finding.evidence["names"] == ["notebook", ""]
        assert finding.evidence["orphan_bytes"] == round(3.5 * GIB)
        assert "pid 77 (notebook) 3 GiB" in finding.summary
        assert "pid 78 (name not known) 512 MiB" in finding.summary

    @pytest.mark.parametrize("interval", [5.0, 15.0, 60.0])
    def test_it_takes_two_minutes(self, interval: float) -> None:
        scene = self.scene(interval=interval)
        self.add(scene, held(77, 3.0, STRANGER))
        scene.poll()
        assert scene.poll(2 * MINUTE - interval).state == "clear"
        assert scene.poll().state == "ticket"

    def test_short_jobs_one_after_the_other_are_no_orphans(self) -> None:
        scene = self.scene()
        for pid in range(100, 130):
            self.add(scene, held(pid, 3.0, STRANGER))
            assert scene.poll(90.0).state == "clear"

    def test_old_memory_that_only_now_became_large_waits_too(self) -> None:
        scene = self.scene()
        self.add(scene, held(77, 0.5, STRANGER))
        scene.poll(HOUR)
        self.add(scene, held(77, 40.0, STRANGER))
        assert scene.poll(MINUTE).state == "clear"
        assert scene.poll(2 * MINUTE).state == "ticket"

    def test_it_leaves_with_the_process(self) -> None:
        scene = self.scene()
        self.add(scene, held(77, 3.0, STRANGER))
        assert scene.poll(5 * MINUTE).state == "ticket"
        scene.ends(77, STRANGER)
        self.add(scene)
        assert scene.poll(4 * MINUTE).state == "ticket"
        assert scene.poll(2 * MINUTE).state == "clear"

    def test_a_neighbour_that_comes_and_goes_is_one_ticket(self) -> None:
        """A trainer takes the card while the engine sleeps, and keeps a little between its steps."""
        scene = self.scene()
        states = set()
        for step in range(8):
            self.add(scene, held(77, 18.0 if step % 2 == 0 else 0.5, STRANGER, "trainer"))
            states.add(scene.poll(20 * MINUTE).state)
        assert states == {"ticket"}
        assert scene.poll(HOUR).state == "clear"

    def test_named_neighbours_are_silent(self) -> None:
        scene = self.scene()
        self.add(scene, held(77, 30.0, NEIGHBOUR))
        assert scene.poll(HOUR).state == "clear"

    def test_used_memory_of_no_listed_process_counts_too(self) -> None:
        """Mappings that another node's process made, or a process out of sight."""
        scene = self.scene()
        scene.used = 63.0
        finding = scene.poll(3 * MINUTE)
        assert finding.state == "ticket"
        assert finding.evidence["unlisted_bytes"] == 3 * GIB
        assert "no listed process 3 GiB" in finding.summary

    def test_the_drivers_reserve_is_no_orphan(self) -> None:
        """The old call counts it as used; then nothing can be subtracted."""
        scene = self.scene()
        scene.reserved, scene.used = None, 62.0
        assert scene.poll(HOUR).state == "clear"

    def test_a_start_that_nobody_knows_yet_is_spared(self) -> None:
        scene = self.scene()
        scene.state, scene.processes, scene.used = "unreachable", (), 0.0
        scene.poll(3 * MINUTE)
        for minute in range(14):
            scene.processes = (held(90, 4.0 * (minute + 1), STRANGER, "VLLM::EngineCore"),)
            scene.used = 4.0 * (minute + 1)
            assert scene.poll(MINUTE).state == "clear"
        scene.state = "ok"  # it answers: the memory is its own, as far as anyone can tell
        assert scene.poll(HOUR).reason == "memory may be that of an engine whose processes are not known"

    def test_a_start_that_never_ends_is_an_orphan(self) -> None:
        scene = self.scene()
        scene.state, scene.processes, scene.used = "unreachable", (), 0.0
        scene.poll(3 * MINUTE)
        scene.processes, scene.used = (held(90, 40.0, STRANGER),), 40.0
        assert scene.poll(14 * MINUTE).state == "clear"
        assert scene.poll(2 * MINUTE).state == "ticket"

    def test_what_was_there_before_us_and_stands_still_is_an_orphan_within_minutes(self) -> None:
        """An engine that is configured here has not started, and something else has the memory."""
        scene = orphans(state="unreachable", used=16.0, free=60.0, processes=(held(22, 16.0, STRANGER),))
        assert scene.poll(4 * MINUTE).state == "clear"
        assert scene.poll(2 * MINUTE).state == "ticket"

    def test_an_answering_engine_without_known_processes_claims_the_largest_only(self) -> None:
        processes = (held(50, 60.0, STRANGER), held(51, 5.0, STRANGER))
        finding = orphans(used=65.0, free=14.0, processes=processes).poll(5 * MINUTE)
        assert finding.state == "ticket"
        assert finding.evidence["pids"] == [51]

    def test_in_a_container_that_shows_no_processes_nothing_is_known(self) -> None:
        finding = orphans(used=65.0, free=14.0, processes=()).poll(HOUR)
        assert finding.reason == "memory may be that of an engine whose processes are not known"

    def test_a_normal_stop_does_not_fire(self) -> None:
        scene = self.scene()
        scene.state = "unreachable"
        assert scene.poll(90.0).state == "clear"  # the worker takes its time
        scene.processes, scene.used = (), 0.0
        assert scene.poll(HOUR).state == "clear"

    def test_workers_that_a_dead_engine_left_behind_fire(self) -> None:
        scene = self.scene()
        scene.state = "unreachable"
        finding = scene.poll(4 * MINUTE)
        assert finding.state == "ticket"
        assert finding.evidence["pids"] == [10]

    def test_an_engine_that_only_times_out_is_not_dead(self) -> None:
        scene = self.scene()
        scene.state = "timeout"
        assert scene.poll(14 * MINUTE).state == "clear"

    def test_a_restarted_engines_new_processes_are_its_own(self) -> None:
        scene = self.scene()
        scene.state, scene.processes, scene.used = "unreachable", (), 0.0
        scene.poll(MINUTE)
        scene.processes, scene.used = (held(11, 30.0),), 30.0
        assert scene.poll(12 * MINUTE).state == "clear"

    def test_where_no_engine_runs_it_is_nobodys_business(self) -> None:
        scene = orphans(engines=(), state="", used=30.0, processes=(held(77, 30.0, STRANGER),))
        assert scene.poll(HOUR).reason == "no engine is known to run on this device"
        scene = orphans(engines=(), state="", used=0.0, processes=())
        assert scene.poll(HOUR).state == "clear"

    def test_an_engine_within_the_hour_is_enough(self) -> None:
        scene = self.scene()
        scene.engines, scene.state = (), ""
        scene.processes, scene.used = (held(77, 30.0, STRANGER),), 30.0
        assert scene.poll(30 * MINUTE).state == "ticket"
        assert scene.poll(2 * HOUR).state == "unknown"

    @pytest.mark.parametrize("reason", [IMPLAUSIBLE, MIG_ENABLED, Absent("NO_PERMISSION"), Absent("HUNG")])
    def test_a_list_that_cannot_be_read_or_be_true_is_unknown(self, reason: Absent) -> None:
        scene = self.scene()
        scene.processes = reason
        assert scene.poll(5 * MINUTE).state == "unknown"

    def test_a_stranger_without_a_figure_is_unknown(self) -> None:
        scene = self.scene()
        self.add(scene, held(77, None, STRANGER))
        assert scene.poll(5 * MINUTE).reason == "the driver gives no memory per process"

    def test_old_lists_are_no_evidence(self) -> None:
        scene = self.scene()
        scene.processes = NOT_READ
        assert scene.poll(10 * MINUTE).reason == "no fresh process list of this device"

    def test_a_sum_above_what_is_used_proves_nothing(self) -> None:
        scene = self.scene()
        scene.used = 40.0
        assert scene.poll(HOUR).state == "clear"


@pytest.mark.parametrize("make", [margin, headroom, budget, orphans])
def test_state_survives_a_restart_of_the_daemon(make: Callable[..., Scene]) -> None:
    """Saved in the middle and restored, a detector concludes the same as one that went on."""
    scene = make(free=0.3, used=60.0, processes=(held(10, 60.0), held(77, 14.0, STRANGER)))
    scene.poll(HOUR)
    again = Scene(**{**scene.__dict__, "detector": pickle.loads(pickle.dumps(scene.detector))})
    assert again.poll(HOUR) == scene.poll(HOUR)
    assert scene.detector.conclude(scene.t) == scene.detector.conclude(scene.t)


def test_memory_that_is_absent_is_never_taken_for_none() -> None:
    scene = budget(processes=(held(10, 79.0),), memory=Absent("GPU_IS_LOST"))
    assert scene.poll(20 * MINUTE).state == "unknown"
