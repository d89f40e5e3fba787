"""allocator-fragmentation: enough free memory, and none of it in one piece. Both sides of every threshold."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import pytest

from oomwatch.detectors.base import AllocatorSample, Finding, State, Subject
from oomwatch.detectors.fragmentation import AllocatorFragmentation, AllocatorFragmentationSettings, unallocated
from oomwatch.observations import AllocationFailure, AllocatorReport
from tests.detectors.leaking import GIB, HOUR, MIB, MINUTE, Course, allocator, watch

WARM = 10 * MINUTE


def detector(**settings: float) -> AllocatorFragmentation:
    subject = Subject(engine="llama", gpu="GPU-a", pid=7)
    return AllocatorFragmentation(subject, AllocatorFragmentationSettings.model_validate(settings))


def healthy(t: float, *, retries: int = 0, ooms: int = 0, ready_since: float | None = 0.0) -> AllocatorSample:
    """1 GiB of activations that comes and goes, in a block that stays reserved for it."""
    return allocator(
        t,
        60 * GIB,
        61 * GIB,
        peak=61 * GIB,
        largest=GIB,
        driver_free=0.2 * GIB,
        retries=retries,
        ooms=ooms,
        ready_since=ready_since,
    )


def broken_up(t: float, *, largest: float = 100 * MIB, driver_free: float = 0.2 * GIB, **more: Any) -> AllocatorSample:
    """3 GiB are reserved and free."""
    return allocator(t, 60 * GIB, 63 * GIB, peak=61 * GIB, largest=largest, driver_free=driver_free, **more)


def retried(*times: float, ooms: int = 0, until: float = 2 * HOUR) -> Course:
    """Retries at these times."""
    return watch(
        detector(), until, lambda t: healthy(t, retries=sum(t >= at for at in times), ooms=ooms if t >= times[0] else 0)
    )


class TestWithoutTrouble:
    def test_free_blocks_that_are_used_again_are_no_fragmentation(self) -> None:
        course = watch(detector(), 2 * HOUR, healthy)
        assert course.states() == ["unknown", "clear"]
        assert course.last.evidence["largest_transient_bytes"] == GIB
        assert course.last.evidence["unallocated_bytes"] == GIB

    def test_any_slack_is_healthy_while_a_block_is_large_enough(self) -> None:
        course = watch(detector(), 2 * HOUR, lambda t: broken_up(t, largest=GIB))
        assert course.states() == ["unknown", "clear"]

    def test_a_block_that_is_in_use_each_time_but_one_in_a_quarter_of_an_hour_is_there(self) -> None:
        def sample(t: float) -> AllocatorSample:
            return broken_up(t, largest=GIB if t % 600 < 15 else 100 * MIB)

        assert watch(detector(), 3 * HOUR, sample).worst == "clear"

    def test_a_process_without_a_probe_is_unknown(self) -> None:
        finding = detector().conclude(100)
        assert (finding.state, finding.reason) == ("unknown", "no probe inside this process")

    def test_a_probe_that_fell_silent_is_unknown_and_never_clear(self) -> None:
        one = detector()
        watch(one, HOUR, healthy)
        assert one.conclude(HOUR + 2 * MINUTE).state == "clear"
        finding = one.conclude(HOUR + 4 * MINUTE)
        assert (finding.state, finding.reason) == ("unknown", "the probe inside this process is silent")

    def test_an_allocator_of_another_kind_that_counts_nothing_is_unknown(self) -> None:
        finding = watch(detector(), HOUR, lambda t: allocator(t, 0, 0)).last
        assert (finding.state, finding.reason) == ("unknown", "the allocator tells nothing of its blocks")

    def test_an_engine_asleep_is_unknown(self) -> None:
        finding = watch(detector(), HOUR, lambda t: allocator(t, GIB, 2 * GIB, asleep=True)).last
        assert (finding.state, finding.reason) == ("unknown", "asleep")


class TestRetries:
    def test_a_single_one_is_an_accident(self) -> None:
        assert retried(WARM + 60).worst == "clear"

    @pytest.mark.parametrize(
        ("second", "state"),
        [
            (15 * MINUTE + 14 * MINUTE, "clear"),  # the same window
            (15 * MINUTE + 16 * MINUTE, "ticket"),  # the next
            (15 * MINUTE + 40 * MINUTE, "ticket"),  # the one after
            (15 * MINUTE + 46 * MINUTE, "clear"),  # too late
        ],
    )
    def test_two_windows_of_three_are_a_ticket(self, second: float, state: State) -> None:
        course = retried(15 * MINUTE, second)
        assert course.worst == state

    def test_those_of_the_warm_up_do_not_count(self) -> None:
        assert retried(60, 9 * MINUTE, 16 * MINUTE).worst == "clear"

    def test_the_warm_up_begins_with_the_first_answer(self) -> None:
        def sample(t: float) -> AllocatorSample:
            ready = None if t < HOUR else HOUR
            return healthy(t, retries=sum(t >= at for at in (20 * MINUTE, 40 * MINUTE, 65 * MINUTE)), ready_since=ready)

        assert watch(detector(), 2 * HOUR, sample).worst == "clear"

    def test_one_that_failed_all_the_same_is_a_lack_of_memory(self) -> None:
        course = watch(
            detector(),
            2 * HOUR,
            lambda t: healthy(t, retries=int(t // 1200), ooms=int(t // 1200)),
        )
        assert course.worst == "clear"

    def test_counters_that_begin_anew_are_no_retries(self) -> None:
        course = watch(detector(), 2 * HOUR, lambda t: healthy(t, retries=5 if t < HOUR else 0))
        assert course.worst == "clear"

    def test_the_ticket_stands_for_an_hour_after_the_last(self) -> None:
        course = retried(15 * MINUTE, 31 * MINUTE, until=4 * HOUR)
        (end,) = (t for (t, one), (_, before) in zip(course.findings[1:], course.findings, strict=False)
                  if one.state == "clear" and before.state == "ticket")  # fmt: skip
        assert 60 * MINUTE + HOUR - 30 <= end <= 60 * MINUTE + HOUR + 30
        assert course.findings[-200][1].state == "clear"


class TestNoBlockIsLargeEnough:
    def course(self, **more: Any) -> Course:
        """Healthy for half an hour, then in pieces."""
        return watch(detector(), 2 * HOUR, lambda t: healthy(t) if t < HOUR / 2 else broken_up(t, **more))

    def test_a_ticket_after_a_quarter_of_an_hour(self) -> None:
        course = self.course()
        assert course.worst == "ticket"
        assert 45 * MINUTE <= course.first("ticket") <= 46 * MINUTE
        assert course.last.evidence["largest_transient_bytes"] == GIB
        assert course.last.evidence["reach_bytes"] == 100 * MIB + int(0.2 * GIB)
        assert "3 GiB are reserved and free, and not in one piece" in course.last.summary

    @pytest.mark.parametrize(("free", "state"), [(GIB - 100 * MIB - 1, "ticket"), (GIB - 100 * MIB, "clear")])
    def test_what_the_driver_has_counts(self, free: float, state: State) -> None:
        assert self.course(driver_free=free).worst == state

    @pytest.mark.parametrize(
        ("largest", "driver_free", "releasable", "expandable", "state"),
        [
            # One block, or the driver alone, has to do: both together do not.
            (500 * MIB, 600 * MIB, 0, False, "ticket"),
            (500 * MIB, 600 * MIB, 424 * MIB - 1, False, "ticket"),
            (500 * MIB, 600 * MIB, 424 * MIB, False, "clear"),
            (GIB, 0, 0, False, "clear"),
            (0, GIB, 0, False, "clear"),
            # A block at the end of its segment grows.
            (500 * MIB, 600 * MIB, 0, True, "clear"),
            (500 * MIB, 500 * MIB, 0, True, "ticket"),
            # What is not known is taken kindly.
            (500 * MIB, 600 * MIB, 0, None, "clear"),
            (500 * MIB, 600 * MIB, None, False, "clear"),
            # What can be had by giving all of the cache back costs a standstill each time.
            (200 * MIB, 600 * MIB, GIB, False, "ticket"),
        ],
    )
    def test_how_an_allocation_is_served_decides(
        self, largest: int, driver_free: int, releasable: int | None, expandable: bool | None, state: State
    ) -> None:
        more: dict[str, Any] = {"largest": largest, "driver_free": driver_free}
        assert self.course(**more, releasable=releasable, expandable=expandable).worst == state

    @pytest.mark.parametrize(("reserved", "state"), [(61 * GIB, "ticket"), (61 * GIB - 1, "clear")])
    def test_where_all_pieces_together_would_not_do_it_is_no_fragmentation(self, reserved: int, state: State) -> None:
        def sample(t: float) -> AllocatorSample:
            return healthy(t) if t < HOUR / 2 else allocator(t, 60 * GIB, reserved, largest=MIB, driver_free=0)

        assert watch(detector(), 2 * HOUR, sample).worst == state

    @pytest.mark.parametrize(("transient", "state"), [(64 * MIB, "ticket"), (64 * MIB - 1, "clear")])
    def test_small_transients_are_not_worth_it(self, transient: int, state: State) -> None:
        def sample(t: float) -> AllocatorSample:
            largest = transient if t < HOUR / 2 else MIB
            return allocator(t, 60 * GIB, 61 * GIB, peak=61 * GIB, largest=largest, driver_free=0)

        assert watch(detector(), 2 * HOUR, sample).worst == state

    @pytest.mark.parametrize(
        ("peak", "state"), [(60 * GIB + 300 * MIB, "clear"), (61 * GIB, "ticket"), (None, "ticket")]
    )
    def test_one_allocation_is_no_more_than_all_rise_above_their_floor(self, peak: int | None, state: State) -> None:
        """A block of 1 GiB that was free once may have grown together from smaller ones."""

        def sample(t: float) -> AllocatorSample:
            shown = healthy(t) if t < HOUR / 2 else broken_up(t)
            stats = {**shown.report.stats, "allocated_bytes.all.peak": peak or 0}
            if peak is None:
                del stats["allocated_bytes.all.peak"]
            return replace(shown, report=replace(shown.report, stats=stats))

        assert watch(detector(), 2 * HOUR, sample).worst == state

    def test_without_the_devices_free_memory_it_is_not_claimed(self) -> None:
        def sample(t: float) -> AllocatorSample:
            return allocator(t, 60 * GIB, 63 * GIB, peak=61 * GIB, largest=GIB if t < HOUR / 2 else MIB)

        assert watch(detector(), 2 * HOUR, sample).worst == "clear"

    def test_together_with_retries_it_pages(self) -> None:
        def sample(t: float) -> AllocatorSample:
            retries = int(max(0.0, t - HOUR / 2) // 900)
            return healthy(t) if t < HOUR / 2 else broken_up(t, retries=retries)

        course = watch(detector(), 2 * HOUR, sample)
        assert course.last.state == "page"
        assert course.last.confidence == 0.95
        assert "gave its cache back" in course.last.summary

    def test_a_new_life_begins_without_what_was_learnt(self) -> None:
        one = detector()
        watch(one, HOUR, lambda t: healthy(t) if t < HOUR / 2 else broken_up(t))
        one.observe(broken_up(HOUR, segment=2, ready_since=HOUR))
        assert one.conclude(HOUR).state == "unknown"

    def test_a_failed_allocation_says_exactly_what_is_asked_for(self) -> None:
        failure = AllocationFailure(20 * MINUTE, wanted=2 * GIB)

        def sample(t: float) -> AllocatorSample:
            return broken_up(t, largest=GIB, failure=failure if t >= 20 * MINUTE else None)

        course = watch(detector(), 2 * HOUR, sample)
        assert course.last.state == "ticket"
        assert course.last.evidence["largest_transient_bytes"] == 2 * GIB


STATS = {"allocated_bytes.all.current": 60, "reserved_bytes.all.current": 100}


class TestWhatIsFree:
    def test_the_snapshots_own_count(self) -> None:
        assert unallocated(AllocatorReport(0, 1, "", STATS, free=30)) == 30

    def test_else_reserved_less_allocated_as_in_pytorchs_error(self) -> None:
        assert unallocated(AllocatorReport(0, 1, "", STATS)) == 40

    def test_without_what_graphs_and_sleep_mode_keep_for_themselves(self) -> None:
        assert unallocated(AllocatorReport(0, 1, "", STATS, private_free=15)) == 25

    def test_nothing_where_the_numbers_are_missing(self) -> None:
        assert unallocated(AllocatorReport(0, 1, "", {})) is None


def test_its_state_survives_a_restart_of_the_daemon() -> None:
    one = detector()
    watch(one, HOUR, lambda t: healthy(t) if t < HOUR / 2 else broken_up(t))
    again: AllocatorFragmentation = pickle.loads(pickle.dumps(one))
    found: list[Finding] = []
    for copy in (one, again):
        copy.observe(broken_up(HOUR))
        found.append(copy.conclude(HOUR))
    assert found[0] == found[1]
    assert len(pickle.dumps(one)) < 4096
