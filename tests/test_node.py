"""The fold: what counts as the present, what as the past, and what as nothing at all."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest

from oomwatch.attribution import Neighbour
from oomwatch.node import Cadence, Node
from oomwatch.observations import (
    AMBIGUOUS,
    HUNG,
    IMPLAUSIBLE,
    MIG_ENABLED,
    NOT_EXPOSED,
    NOT_READ,
    STALE,
    Absent,
    AllocatorReport,
    BlockOwners,
    EngineFacts,
    EngineScrape,
    EngineUpdate,
    GpuPoll,
    GpuProcess,
    HostMemory,
    HostProcess,
    Memory,
    MigInstance,
    Observation,
    ProcessGone,
    RankReading,
    SourceRun,
    TargetRemoved,
    Tick,
    XidEvent,
)
from oomwatch.snapshot import EngineView, GpuView, HeldMemory, Holder, Snapshot

GIB = 1024**3
UUID = "GPU-1"
MEMORY = Memory(total=80 * GIB, reserved=GIB // 2, used=60 * GIB, free=80 * GIB - GIB // 2 - 60 * GIB)
CADENCE = Cadence(gpu=10, process=40, scrape=10, host=20, discovery=10)


def fold(*observations: Observation, neighbours: Iterable[Neighbour] = ()) -> Snapshot:
    node = Node(CADENCE, neighbours)
    for observation in observations:
        node.apply(observation)
    return node.snapshot()


def gpu(snapshot: Snapshot) -> GpuView:
    (view,) = snapshot.gpus
    return view


def engine(snapshot: Snapshot) -> EngineView:
    (view,) = snapshot.engines
    return view


def poll(t: float, *processes: GpuProcess, memory: Memory | Absent = MEMORY, listed: bool = True) -> GpuPoll:
    return GpuPoll(t, UUID, 0, "H100", memory, processes if listed else NOT_READ)


def rank(
    running: float = 0, waiting: float = 0, tokens: float = 0, name: str = "0", sleep: str = "awake"
) -> RankReading:
    return RankReading(
        rank=name,
        running=running,
        waiting=waiting,
        prompt_tokens=tokens,
        generation_tokens=tokens,
        steps=tokens,
        finished={"stop": 0.0},
        sleep_level=sleep,
    )


def scrape(t: float, *ranks: RankReading, state: str = "ok", error: str = "") -> EngineScrape:
    return EngineScrape(t, "llm", state, 0.01, error, ranks)


class TestTime:
    def test_is_the_latest_that_was_observed(self) -> None:
        assert fold(Tick(5), Tick(9)).t == 9

    def test_never_runs_backwards(self) -> None:
        assert fold(Tick(9), HostMemory(5, 1, 1)).t == 9


class TestDeviceMemory:
    def test_is_what_the_latest_poll_said(self) -> None:
        later = replace(MEMORY, used=61 * GIB)
        assert gpu(fold(poll(0), poll(10, memory=later))).memory == later

    def test_is_gone_at_the_first_failure_and_the_last_value_stands_apart(self) -> None:
        view = gpu(fold(poll(0), poll(10, memory=Absent("GPU_IS_LOST"))))
        assert view.memory == Absent("GPU_IS_LOST")
        assert view.last_memory == MEMORY
        assert view.last_seen == 0

    def test_is_gone_when_the_source_fell_silent(self) -> None:
        assert gpu(fold(poll(0), Tick(30))).memory == MEMORY
        silent = gpu(fold(poll(0), Tick(31)))
        assert silent.poll is None
        assert silent.memory == STALE

    def test_one_device_that_fails_changes_nothing_of_another(self) -> None:
        other = replace(poll(10), uuid="GPU-2", index=1)
        lost, fine = fold(poll(0), replace(other, t=0), poll(10, memory=HUNG), other).gpus
        assert lost.memory == HUNG
        assert fine == fold(replace(other, t=0), other).gpus[0]

    def test_devices_stand_in_the_order_of_their_index(self) -> None:
        views = fold(replace(poll(0), uuid="GPU-9", index=1), replace(poll(0), uuid="GPU-5", index=0)).gpus
        assert [view.uuid for view in views] == ["GPU-5", "GPU-9"]

    def test_a_device_that_is_watched_no_more_leaves(self) -> None:
        assert fold(poll(0), TargetRemoved(5, "nvml", UUID)).gpus == ()


class TestSlowReadings:
    first = replace(poll(0), temperature=40.0, power=90.0, mig_enabled=False)

    def test_stand_until_the_next_of_their_kind(self) -> None:
        view = gpu(fold(self.first, poll(10), replace(poll(20), temperature=50.0)))
        assert view.poll is not None
        assert (view.poll.temperature, view.poll.power) == (50.0, 90.0)

    def test_grow_too_old_at_the_pace_of_process_lists(self) -> None:
        view = gpu(fold(self.first, *(poll(t) for t in range(10, 140, 10))))
        assert view.poll is not None
        assert view.poll.temperature == NOT_READ

    def test_do_not_outlive_the_device(self) -> None:
        view = gpu(fold(self.first, poll(10, memory=Absent("GPU_IS_LOST"))))
        assert view.poll is not None
        assert view.poll.temperature == NOT_READ

    def test_stand_beside_memory_that_may_not_be_asked(self) -> None:
        view = gpu(fold(self.first, poll(10, memory=Absent("NO_PERMISSION"))))
        assert view.poll is not None
        assert view.poll.temperature == 40.0

    def test_a_failure_of_one_replaces_its_value(self) -> None:
        view = gpu(fold(self.first, replace(poll(10), temperature=Absent("UNKNOWN"))))
        assert view.poll is not None
        assert view.poll.temperature == Absent("UNKNOWN")


class TestProcessLists:
    mine = GpuProcess(4711, 50 * GIB)

    def test_outlive_the_cycles_that_leave_them_out(self) -> None:
        view = gpu(fold(poll(0, self.mine), poll(10, listed=False)))
        assert not isinstance(view.processes, Absent)
        assert [process.pid for process in view.processes] == [4711]

    def test_grow_stale_at_their_own_pace(self) -> None:
        polls = [poll(t, self.mine, listed=t == 0) for t in range(0, 140, 10)]
        assert not isinstance(gpu(fold(*polls[:13])).processes, Absent)
        assert gpu(fold(*polls)).processes == STALE

    def test_a_failure_replaces_the_list(self) -> None:
        failed = replace(poll(10), processes=Absent("NO_PERMISSION"))
        assert gpu(fold(poll(0, self.mine), failed)).processes == Absent("NO_PERMISSION")

    def test_a_list_that_contradicts_itself_is_implausible_and_memory_stays(self) -> None:
        scrambled = (GpuProcess(1000, GIB), GpuProcess(0, 5822), GpuProcess(4294967295, 7))
        view = gpu(fold(poll(0, *scrambled)))
        assert view.processes == IMPLAUSIBLE
        assert view.held == IMPLAUSIBLE
        assert view.unowned == IMPLAUSIBLE
        assert view.memory == MEMORY

    def test_what_no_process_holds_is_unowned(self) -> None:
        assert gpu(fold(poll(0, self.mine))).unowned == 10 * GIB

    def test_count_pids_that_the_host_does_not_know(self) -> None:
        known = HostProcess(0, 4711, 0, 1, 1, "python")
        stranger = GpuProcess(4712, GIB)
        assert fold(poll(0, self.mine, stranger), known).unresolved_gpu_pids == 1
        assert fold(poll(0, self.mine, stranger)).unresolved_gpu_pids == NOT_READ


class TestHolders:
    facts = EngineUpdate(0, EngineFacts("llm", "http://127.0.0.1:8000/metrics", pids=(100,)))

    def held(self, snapshot: Snapshot) -> dict[Holder, int]:
        held = gpu(snapshot).held
        assert not isinstance(held, Absent)
        return {one.holder: one.used for one in held}

    def test_a_worker_belongs_to_the_engine_that_it_descends_from(self) -> None:
        worker = HostProcess(0, 101, 0, 1, 1, "VLLM::Worker_TP0", ppid=100, engine="llm")
        snapshot = fold(self.facts, worker, poll(0, GpuProcess(101, 50 * GIB), GpuProcess(7, GIB)))
        assert self.held(snapshot) == {Holder("engine", "llm"): 50 * GIB, Holder("unknown"): GIB}
        assert engine(snapshot).gpu_memory == {UUID: 50 * GIB}

    def test_a_neighbour_of_the_configuration_is_named(self) -> None:
        snapshot = fold(
            poll(0, GpuProcess(7, GIB)),
            HostProcess(0, 7, 0, 1, 1, "Xorg"),
            neighbours=[Neighbour("desktop", process="Xorg")],
        )
        assert self.held(snapshot) == {Holder("neighbour", "desktop"): GIB}

    def test_the_workers_of_an_engine_that_ended_hold_memory_of_nobody(self) -> None:
        worker = HostProcess(0, 101, 0, 1, 1, "VLLM::Worker_TP0", ppid=100, engine="llm")
        gone = EngineUpdate(5, self.facts.facts, gone=True)
        snapshot = fold(self.facts, worker, poll(0, GpuProcess(101, 50 * GIB)), gone)
        assert self.held(snapshot) == {Holder("unknown"): 50 * GIB}

    def test_an_engine_that_starts_again_in_its_container_is_known_at_once(self) -> None:
        first = HostProcess(0, 100, 0, 1, 1, "python3", container="c1")
        second = replace(first, t=20, pid=200, start=19)
        before = (self.facts, first, poll(0, GpuProcess(100, GIB)))
        snapshot = fold(*before, ProcessGone(10, 100), second, poll(20, GpuProcess(200, GIB)))
        assert self.held(snapshot) == {Holder("engine", "llm"): GIB}

    def test_where_no_list_can_be_read_an_engines_memory_is_absent_not_zero(self) -> None:
        unreadable = replace(poll(0), processes=Absent("NO_PERMISSION"))
        assert engine(fold(self.facts, unreadable)).gpu_memory == Absent("NO_PERMISSION")

    def with_one_unreadable(self, gpus: tuple[str, ...] | None) -> EngineView:
        facts = replace(self.facts, facts=replace(self.facts.facts, gpus=gpus))
        lost = replace(poll(0, memory=Absent("GPU_IS_LOST")), uuid="GPU-2", index=1, processes=Absent("GPU_IS_LOST"))
        return engine(fold(facts, poll(0, GpuProcess(100, 50 * GIB)), lost))

    @pytest.mark.parametrize("gpus", [None, (UUID, "GPU-2")], ids=["any", "both"])
    def test_where_one_list_cannot_be_read_the_others_stand_and_there_is_no_sum(self, gpus: tuple[str, ...]) -> None:
        view = self.with_one_unreadable(gpus)
        assert view.gpu_memory == {UUID: 50 * GIB}
        assert view.gpu_memory_sum == Absent("GPU_IS_LOST")

    def test_a_device_that_is_not_the_engines_is_not_missed(self) -> None:
        assert self.with_one_unreadable((UUID,)).gpu_memory_sum == 50 * GIB


class TestMigSlices:
    slices = (
        MigInstance("MIG-1", 1, 0, replace(MEMORY, total=20 * GIB, used=8 * GIB), (GpuProcess(100, 7 * GIB),)),
        MigInstance("MIG-2", 2, 0, replace(MEMORY, total=20 * GIB, used=0), ()),
    )

    def view(self, memory: Memory | Absent = MEMORY) -> GpuView:
        facts = EngineUpdate(0, EngineFacts("llm", pids=(100,)))
        parent = replace(poll(0, GpuProcess(100, 7 * GIB), memory=memory), mig=self.slices, mig_enabled=True)
        return gpu(fold(facts, parent))

    def test_have_their_own_memory_and_holders(self) -> None:
        first, second = self.view().mig
        assert first.held == (HeldMemory(Holder("engine", "llm"), 7 * GIB),)
        assert first.unowned == GIB
        assert second.held == ()

    def test_the_parents_list_is_not_missed(self) -> None:
        facts = EngineUpdate(0, EngineFacts("llm", pids=(100,)))
        parent = replace(poll(0), mig=self.slices, mig_enabled=True)
        assert engine(fold(facts, parent)).gpu_memory_sum == 7 * GIB

    def test_the_parents_list_is_not_counted_a_second_time(self) -> None:
        assert self.view().processes == MIG_ENABLED
        assert self.view().unowned == MIG_ENABLED

    def test_a_parent_that_may_not_be_asked_is_still_seen(self) -> None:
        view = self.view(Absent("NO_PERMISSION"))
        assert view.memory == Absent("NO_PERMISSION")
        assert view.last_seen == 0
        assert len(view.mig) == 2

    def test_a_slice_that_is_destroyed_is_gone_with_the_next_poll(self) -> None:
        before = replace(poll(0), mig=self.slices, mig_enabled=True)
        assert len(gpu(fold(before, replace(before, t=10, mig=self.slices[1:]))).mig) == 1


def test_xids_are_counted_by_code_with_the_time_of_the_last() -> None:
    view = gpu(fold(poll(0), XidEvent(3, UUID, 31), XidEvent(4, UUID, 79), XidEvent(8, UUID, 31)))
    assert [(xid.code, xid.count, xid.last_t) for xid in view.xids] == [(31, 2, 8), (79, 1, 4)]


class TestEngineState:
    facts = EngineUpdate(0, EngineFacts("llm", "http://127.0.0.1:8000/metrics"))

    def test_is_unknown_before_the_first_scrape(self) -> None:
        assert engine(fold(self.facts)).state == "unknown"

    def test_says_why_there_is_nothing_to_scrape(self) -> None:
        view = engine(fold(EngineUpdate(0, EngineFacts("llm", no_address="it listens on a socket file"))))
        assert (view.state, view.error) == ("no_address", "it listens on a socket file")

    def test_is_the_scrapes(self) -> None:
        assert engine(fold(scrape(0, rank()))).state == "ok"
        assert engine(fold(scrape(0, state="stats_disabled"))).state == "stats_disabled"

    def test_a_failed_scrape_ends_the_present_and_keeps_the_past(self) -> None:
        view = engine(fold(scrape(0, rank(running=3)), scrape(10, state="unreachable", error="refused")))
        assert (view.state, view.error) == ("unreachable", "refused")
        assert view.scrape is None
        assert view.last_seen == 0
        assert view.last_answer is not None
        assert view.last_answer.ranks[0].running == 3

    def test_is_unknown_once_the_scraper_fell_silent(self) -> None:
        view = engine(fold(scrape(0, rank()), Tick(31)))
        assert view.state == "unknown"
        assert view.scrape is None

    def test_is_dead_when_health_says_so_behind_a_page_that_answers(self) -> None:
        assert engine(fold(replace(scrape(0, rank()), healthy=False))).state == "dead"

    def test_the_last_word_on_health_holds_between_the_rarer_questions(self) -> None:
        dead = replace(scrape(0, rank()), healthy=False)
        assert engine(fold(dead, scrape(10, rank()))).state == "dead"
        assert engine(fold(dead, replace(scrape(10, rank()), healthy=True))).state == "ok"

    def test_is_sleeping_when_any_rank_is(self) -> None:
        assert engine(fold(scrape(0, rank(), rank(name="1", sleep="discard_all")))).state == "sleeping"

    def test_paused_work_is_sleep_however_long_and_no_standstill(self) -> None:
        scrapes = [scrape(t, rank(running=3, tokens=7, sleep="paused")) for t in range(0, 100, 10)]
        assert engine(fold(*scrapes)).state == "sleeping"

    @pytest.mark.parametrize(("level", "without"), [("paused", False), ("weights_offloaded", True), ("awake", False)])
    def test_only_sleep_that_gives_memory_back_counts_as_sleep_without_it(self, level: str, without: bool) -> None:
        node = Node(CADENCE)
        node.apply(scrape(0, rank(sleep=level)))
        assert node.asleep("llm") is without

    def test_of_an_engine_whose_processes_ended_is_gone_until_it_returns(self) -> None:
        gone = EngineUpdate(20, self.facts.facts, gone=True)
        view = engine(fold(self.facts, scrape(10, rank()), gone))
        assert view.state == "gone"
        assert view.scrape is None
        assert view.last_seen == 10
        assert engine(fold(self.facts, gone, replace(self.facts, t=30), scrape(31, rank()))).state == "ok"

    def test_of_a_gone_engine_is_forgotten_after_a_day(self) -> None:
        gone = EngineUpdate(0, self.facts.facts, gone=True)
        assert len(fold(self.facts, gone, Tick(86_400)).engines) == 1
        assert fold(self.facts, gone, Tick(86_401)).engines == ()

    def test_an_engine_that_left_the_configuration_leaves_every_list(self) -> None:
        run = SourceRun(0, "vllm", "llm", True, 0.01)
        snapshot = fold(self.facts, scrape(0, rank()), run, TargetRemoved(5, "vllm", "llm"))
        assert snapshot.engines == ()
        assert snapshot.sources == ()


class TestProgress:
    def test_is_the_time_of_the_last_counter_that_moved(self) -> None:
        view = engine(fold(scrape(0, rank(1, tokens=5)), scrape(10, rank(1, tokens=9)), scrape(20, rank(1, tokens=9))))
        assert view.last_progress == 10

    def test_an_idle_engine_lacks_none(self) -> None:
        scrapes = [scrape(t, rank(tokens=5)) for t in range(0, 1000, 10)]
        view = engine(fold(*scrapes))
        assert view.last_progress == 990
        assert view.state == "ok"

    @pytest.mark.parametrize("work", [rank(running=1, tokens=5), rank(waiting=4, tokens=5)], ids=["running", "waiting"])
    def test_work_without_any_for_three_intervals_is_frozen(self, work: RankReading) -> None:
        scrapes = [scrape(t, work) for t in range(0, 40, 10)]
        assert engine(fold(*scrapes[:3])).state == "ok"
        view = engine(fold(*scrapes))
        assert (view.state, view.error) == ("frozen", "no counter has moved for 30 s")

    def test_a_rank_is_frozen_while_the_others_work(self) -> None:
        """A hung worker under data parallelism: its requests wait for ever, those of the other ranks do not."""
        hung = rank(running=3, tokens=70, name="1")
        view = engine(fold(*(scrape(t, rank(running=1, tokens=t), hung) for t in range(0, 50, 10))))
        assert (view.state, view.error) == ("frozen", "no counter of rank 1 has moved for 40 s")
        assert view.last_progress == 0

    def test_ranks_without_work_are_not(self) -> None:
        idle = rank(tokens=70, name="1")
        view = engine(fold(*(scrape(t, rank(running=1, tokens=t), idle) for t in range(0, 50, 10))))
        assert view.state == "ok"
        assert view.last_progress == 40

    def test_the_clock_starts_when_the_work_does(self) -> None:
        idle = [scrape(t, rank(tokens=5)) for t in range(0, 100, 10)]
        assert engine(fold(*idle, scrape(100, rank(running=1, tokens=5)))).state == "ok"

    def test_a_counter_that_fell_is_a_restart(self) -> None:
        view = engine(fold(scrape(0, rank(1, tokens=500)), scrape(10, rank(1, tokens=3))))
        assert view.restarts == 1
        assert view.last_progress == 10

    @pytest.mark.parametrize("reason", [AMBIGUOUS, NOT_EXPOSED, IMPLAUSIBLE], ids=lambda reason: reason.reason)
    def test_a_counter_that_cannot_be_read_for_a_while_is_none(self, reason: Absent) -> None:
        whole = rank(1, tokens=500)
        partly = replace(whole, steps=reason)
        view = engine(fold(scrape(0, whole), scrape(10, partly), scrape(20, whole)))
        assert view.restarts == 0

    def test_a_later_start_of_the_server_is_a_restart(self) -> None:
        first, second = (replace(scrape(t, rank()), process_start=start) for t, start in ((0, 100.0), (10, 109.0)))
        assert engine(fold(first, second)).restarts == 1

    def test_a_missing_page_between_is_none(self) -> None:
        assert (
            engine(fold(scrape(0, rank(tokens=5)), scrape(10, state="timeout"), scrape(20, rank(tokens=6)))).restarts
            == 0
        )

    def test_is_not_claimed_where_nothing_would_show_it(self) -> None:
        assert engine(fold(scrape(0, state="stats_disabled"))).last_progress is None
        assert engine(fold(scrape(0, RankReading("0", running=1.0)), Tick(30))).last_progress is None

    def test_ranks_are_followed_apart(self) -> None:
        before = scrape(0, rank(1, tokens=5), rank(1, tokens=900, name="1"))
        after = scrape(10, rank(1, tokens=6), rank(1, tokens=2, name="1"))
        assert engine(fold(before, after)).restarts == 1


class TestFacts:
    def test_what_is_given_replaces_and_what_is_not_stays(self) -> None:
        first = EngineUpdate(0, EngineFacts("llm", "http://a", pids=(1,), max_model_len=8192))
        second = EngineUpdate(1, EngineFacts("llm", pids=(2, 3)))
        facts = engine(fold(first, second)).facts
        assert (facts.target, facts.pids, facts.max_model_len) == ("http://a", (2, 3), 8192)

    def test_the_version_comes_with_the_scrape(self) -> None:
        view = engine(fold(replace(scrape(0, rank()), version="0.32.0")))
        assert view.facts.vllm_version == "0.32.0"


class TestHostProcesses:
    core = HostProcess(0, 100, 5.0, 10, 9, "VLLM::EngineCore", engine="llm", role="engine_core")
    facts = EngineUpdate(0, EngineFacts("llm"))

    def test_stand_with_their_engine(self) -> None:
        assert engine(fold(self.facts, self.core)).processes == (self.core,)

    def test_leave_when_they_end(self) -> None:
        assert engine(fold(self.facts, self.core, ProcessGone(5, 100))).processes == ()

    def test_leave_with_their_engine(self) -> None:
        """The search for servers sees the end first; the next look at the host's processes may be half a minute off."""
        gone = EngineUpdate(5, self.facts.facts, gone=True)
        assert engine(fold(self.facts, self.core, gone)).processes == ()

    def test_leave_when_the_host_source_fell_silent(self) -> None:
        assert engine(fold(self.facts, self.core, Tick(61))).processes == ()

    def test_leave_when_the_host_source_fails_and_so_does_the_hosts_memory(self) -> None:
        memory = HostMemory(4, 512 * GIB, 100 * GIB)
        failed = SourceRun(5, "host", "", False, 0.1, "cannot read /proc")
        snapshot = fold(self.facts, self.core, memory, failed)
        assert engine(snapshot).processes == ()
        assert snapshot.host is None


class TestSources:
    def test_of_an_engine_with_a_page_has_failed_no_time_before_it_is_read(self) -> None:
        facts = EngineFacts("llm", target="http://127.0.0.1:8000/metrics")
        (view,) = fold(EngineUpdate(0, facts)).sources
        assert (view.source, view.target, view.up, view.failures) == ("vllm", "llm", None, 0)
        assert fold(EngineUpdate(0, EngineFacts("llm"))).sources == ()
        assert fold(EngineUpdate(0, facts), EngineUpdate(5, facts, gone=True)).sources == ()

    def test_health_stands_apart_from_data(self) -> None:
        fine, failed = SourceRun(0, "nvml", UUID, True, 0.2), SourceRun(10, "nvml", UUID, False, 5.0, "hung")
        (view,) = fold(fine, failed).sources
        assert (view.up, view.last_success, view.seconds, view.failures, view.error) == (False, 0, 5.0, 1, "hung")

    def test_a_recovery_clears_the_error_and_keeps_the_count(self) -> None:
        runs = [SourceRun(t, "vllm", "llm", ok, 0.1, "" if ok else "refused") for t, ok in ((0, False), (10, True))]
        (view,) = fold(*runs).sources
        assert (view.up, view.failures, view.error) == (True, 1, "")

    def test_one_that_fell_silent_is_neither_up_nor_down(self) -> None:
        (view,) = fold(SourceRun(0, "host", "", True, 0.1), Tick(61)).sources
        assert view.up is None
        assert view.error == "silent for 61 s"


class TestWhatProbesTell:
    FACTS = EngineUpdate(0, EngineFacts("llm", pids=(100,)))
    REPORT = AllocatorReport(10, 101, "GPU-1", {"num_ooms": 0})
    OWNERS = BlockOwners(10, 100, "0", 9, total=10, free=9, living=1, finished=0, ownerless=0)
    WORKER = HostProcess(5, 101, 0, 1, 1, "VLLM::Worker_TP0", ppid=100, engine="llm")

    def told(self, *observations: Observation) -> tuple[int, int]:
        view = engine(fold(self.FACTS, self.WORKER, *observations))
        return len(view.allocators), len(view.owners)

    def test_stands_with_the_engine_whose_process_it_is(self) -> None:
        assert self.told(self.REPORT, self.OWNERS) == (1, 1)

    def test_is_nothing_of_an_engine_where_the_process_is_a_strangers(self) -> None:
        assert self.told(replace(self.REPORT, pid=999)) == (0, 0)

    def test_is_the_latest_of_each_device_and_rank(self) -> None:
        assert self.told(self.REPORT, replace(self.REPORT, t=15), replace(self.OWNERS, rank="1"), self.OWNERS) == (1, 2)

    def test_ends_with_the_process(self) -> None:
        assert self.told(self.REPORT, self.OWNERS, ProcessGone(12, 101)) == (0, 1)

    @pytest.mark.parametrize(("t", "told"), [(55, (1, 0)), (56, (0, 0))])
    def test_is_the_present_for_three_of_its_intervals(self, t: float, told: tuple[int, int]) -> None:
        assert self.told(self.REPORT, replace(self.WORKER, t=t), Tick(t)) == told
