"""Devices that fall off, calls that hang, sources that fall silent, pages that lack what is needed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from oomwatch.detectors.base import Subject
from oomwatch.detectors.health import (
    RELEASED,
    GpuLost,
    GpuLostSettings,
    MetricsMissing,
    MetricsMissingSettings,
    NvmlStuck,
    NvmlStuckSettings,
    SourceStale,
    SourceStaleSettings,
)
from oomwatch.observations import HUNG, NOT_EXPOSED, NOT_KNOWN, Absent, EngineFacts, Pool, RankReading
from tests.detectors.node_streams import GPU, HOUR, MINUTE, Scene


def lost(**changes: Any) -> Scene:
    return Scene(GpuLost(Subject(gpu=GPU), GpuLostSettings()), **changes)


def stuck(**changes: Any) -> Scene:
    return Scene(NvmlStuck(Subject(gpu=GPU), NvmlStuckSettings()), **changes)


def stale_device(**changes: Any) -> Scene:
    return Scene(SourceStale(Subject(gpu=GPU), SourceStaleSettings()), **changes)


def stale_engine(**changes: Any) -> Scene:
    return Scene(SourceStale(Subject(engine="llama"), SourceStaleSettings()), **changes)


def missing(**changes: Any) -> Scene:
    return Scene(MetricsMissing(Subject(engine="llama"), MetricsMissingSettings()), **changes)


class TestGpuLost:
    @pytest.mark.parametrize("reason", ["GPU_IS_LOST", "NOT_FOUND", "GPU_NOT_FOUND", "RESET_REQUIRED"])
    def test_a_device_that_fell_off_or_is_counted_no_more_pages(self, reason: str) -> None:
        scene = lost()
        assert scene.poll(5 * MINUTE).state == "clear"
        scene.memory = Absent(reason)
        finding = scene.poll(MINUTE)
        assert finding.state == "page"
        assert finding.evidence["error"] == reason
        assert finding.evidence["engines"] == ["llama"]

    @pytest.mark.parametrize("reason", ["NO_PERMISSION", "NOT_SUPPORTED", "HUNG", "UNKNOWN", "DRIVER_NOT_LOADED"])
    def test_other_errors_do_not(self, reason: str) -> None:
        scene = lost()
        scene.poll(5 * MINUTE)
        scene.memory = Absent(reason)
        assert scene.poll(HOUR).state == "clear"

    def test_one_odd_answer_is_not_enough(self) -> None:
        scene = lost()
        scene.poll(5 * MINUTE)
        scene.memory = Absent("NOT_FOUND")
        assert scene.poll().state == "clear"
        scene.memory = None
        assert scene.poll(HOUR).state == "clear"

    def test_lost_at_the_first_poll_is_lost(self) -> None:
        assert lost(memory=Absent("GPU_IS_LOST")).poll(MINUTE).state == "page"

    def test_it_stays_lost_when_nobody_asks_any_more(self) -> None:
        scene = lost()
        scene.poll(5 * MINUTE)
        scene.memory = Absent("GPU_IS_LOST")
        scene.poll()
        assert scene.wait(12 * HOUR).state == "page"

    def test_a_driver_that_goes_down_takes_nothing_back(self) -> None:
        scene = lost()
        scene.memory = Absent("GPU_IS_LOST")
        scene.poll(MINUTE)
        scene.memory = Absent("UNINITIALIZED")
        assert scene.poll(HOUR).state == "page"

    def test_it_is_over_when_the_device_answers_for_a_while(self) -> None:
        scene = lost(memory=Absent("GPU_IS_LOST"))
        scene.poll(HOUR)
        scene.memory = None
        assert scene.poll(4 * MINUTE).state == "page"
        assert scene.poll(2 * MINUTE).state == "clear"

    def test_a_mig_parent_that_withholds_its_memory_is_there(self) -> None:
        assert lost(memory=Absent("NO_PERMISSION")).poll(HOUR).state == "clear"

    def test_a_device_that_has_never_answered_is_unknown(self) -> None:
        assert lost(memory=Absent("UNKNOWN")).poll(HOUR).reason == "the device has not answered yet"

    def test_silence_is_unknown(self) -> None:
        scene = lost()
        scene.poll(HOUR)
        assert scene.wait(5 * MINUTE).state == "unknown"


class TestNvmlStuck:
    @pytest.mark.parametrize("field", ["memory", "processes"])
    def test_a_call_that_has_not_returned_for_a_minute_is_a_ticket(self, field: str) -> None:
        scene = stuck(interval=5.0)
        assert scene.poll(MINUTE).state == "clear"
        setattr(scene, field, HUNG)
        assert scene.poll(55.0).state == "info"
        finding = scene.poll(15.0)
        assert finding.state == "ticket"
        assert finding.evidence["hung_seconds"] >= 60.0  # type: ignore[operator]  # a number

    def test_it_stands_without_further_polls(self) -> None:
        scene = stuck()
        scene.poll(MINUTE)
        scene.memory = HUNG
        scene.poll()
        assert scene.wait(HOUR).state == "ticket"

    def test_a_call_that_returns_ends_it(self) -> None:
        scene = stuck(memory=HUNG)
        scene.poll(5 * MINUTE)
        scene.memory = None
        assert scene.poll(4 * MINUTE).state == "ticket"
        assert scene.poll(2 * MINUTE).state == "clear"

    def test_short_hangs_do_not_add_up(self) -> None:
        scene = stuck(interval=15.0)
        for _ in range(20):
            scene.memory = HUNG
            assert scene.poll(45.0).state == "info"
            scene.memory = None
            assert scene.poll().state == "clear"

    def test_other_failures_are_no_hang(self) -> None:
        scene = stuck(memory=Absent("GPU_IS_LOST"))
        assert scene.poll(HOUR).state == "clear"


class TestSourceStaleOfADevice:
    @pytest.mark.parametrize("interval", [5.0, 15.0, 60.0])
    def test_three_intervals_are_a_hint_and_five_minutes_a_ticket(self, interval: float) -> None:
        scene = stale_device(interval=interval)
        assert scene.poll(20 * MINUTE).state == "clear"
        assert scene.wait(max(29.0, 2.9 * interval)).state == "clear"
        assert scene.wait(max(2.0, 0.2 * interval)).state == "info"
        assert scene.wait(300.0).state == "ticket"

    def test_slow_polling_needs_longer_than_five_minutes(self) -> None:
        scene = stale_device(interval=300.0)
        scene.poll(2 * HOUR)
        assert scene.wait(10 * MINUTE).state == "clear"
        assert scene.wait(10 * MINUTE).state == "ticket"

    @pytest.mark.parametrize("reason", ["HUNG", "GPU_IS_LOST", "UNKNOWN", "UNINITIALIZED"])
    def test_polls_that_fail_are_not_fresh(self, reason: str) -> None:
        scene = stale_device()
        scene.poll(5 * MINUTE)
        scene.memory = Absent(reason)
        finding = scene.poll(6 * MINUTE)
        assert finding.state == "ticket"
        assert finding.evidence["reason"] == reason
        scene.memory = None
        assert scene.poll().state == "clear"

    def test_a_mig_parent_that_withholds_its_memory_is_fresh(self) -> None:
        assert stale_device(memory=Absent("NO_PERMISSION")).poll(HOUR).state == "clear"

    def test_a_lost_poll_now_and_then_is_nothing(self) -> None:
        scene = stale_device()
        for _ in range(20):
            scene.poll(MINUTE)
            assert scene.wait(40.0).state == "clear"

    def test_a_driver_given_back_on_request_is_silent(self) -> None:
        scene = stale_device()
        scene.poll(5 * MINUTE)
        scene.memory = Absent(RELEASED)
        scene.poll()
        assert scene.wait(HOUR).reason == "the driver was given back on request"
        scene.memory = None
        assert scene.poll().state == "clear"

    def test_an_engine_does_not_make_its_device_stale(self) -> None:
        assert stale_device(state="unreachable").poll(HOUR).state == "clear"


class TestSourceStaleOfAnEngine:
    def test_a_page_that_fails_for_five_minutes_is_a_ticket_with_the_reason(self) -> None:
        scene = stale_engine()
        assert scene.poll(10 * MINUTE).state == "clear"
        scene.state = "unreachable"
        assert scene.poll(2 * MINUTE).state == "info"
        finding = scene.poll(4 * MINUTE)
        assert finding.state == "ticket"
        assert finding.evidence["reason"] == "connection refused"
        assert "connection refused" in finding.summary

    def test_a_slow_phase_with_answers_between_is_nothing(self) -> None:
        scene = stale_engine()
        for _ in range(10):
            scene.state = "ok"
            scene.poll(30.0)
            scene.state = "timeout"
            assert scene.poll().state == "clear"

    @pytest.mark.parametrize("state", ["ok", "sleeping", "frozen", "dead", "stats_disabled", "no_traffic_yet"])
    def test_any_page_that_came_back_is_fresh(self, state: str) -> None:
        assert stale_engine(state=state).poll(HOUR).state == "clear"

    def test_a_start_takes_its_time(self) -> None:
        scene = stale_engine(interval=15.0)
        scene.poll(10 * MINUTE)
        scene.state = "unreachable"
        scene.ends(10)
        scene.poll(MINUTE)
        scene.host(11)
        assert scene.poll(13 * MINUTE).state == "info"
        assert scene.poll(3 * MINUTE).state == "ticket"

    def test_the_first_start_takes_its_time_too(self) -> None:
        scene = stale_engine(state="unreachable")
        assert scene.poll(14 * MINUTE).state == "info"
        assert scene.poll(2 * MINUTE).state == "ticket"

    def test_a_dead_engine_has_no_grace(self) -> None:
        scene = stale_engine()
        scene.poll(10 * MINUTE)
        scene.state = "unreachable"
        scene.ends(10)
        assert scene.poll(6 * MINUTE).state == "ticket"

    def test_a_configured_engine_that_ended_is_no_ticket_for_ever(self) -> None:
        scene = stale_engine(interval=60.0)
        scene.poll(10 * MINUTE)
        scene.state = "unreachable"
        scene.ends(10)
        assert scene.poll(71 * HOUR).state == "ticket"
        assert scene.poll(2 * HOUR).state == "info"

    def test_a_found_engine_that_ended_is_no_source_any_more(self) -> None:
        scene = stale_engine(facts=EngineFacts("llama", origin="discovery"))
        scene.poll(10 * MINUTE)
        scene.ends(10)
        assert scene.wait(HOUR).reason == "the engine has ended"

    def test_a_found_engine_whose_processes_live_is_one(self) -> None:
        scene = stale_engine(facts=EngineFacts("llama", origin="discovery"))
        scene.poll(10 * MINUTE)
        assert scene.wait(HOUR).state == "ticket"


class TestMetricsMissing:
    def test_statistics_disabled_is_a_ticket(self) -> None:
        scene = missing(state="stats_disabled")
        assert scene.poll(MINUTE).state == "unknown"
        finding = scene.poll(2 * MINUTE)
        assert finding.state == "ticket"
        assert finding.evidence["missing"] == ["every vllm: series"]

    @pytest.mark.parametrize(
        ("reading", "name"),
        [
            (RankReading("0", running=1.0, waiting=0.0, prompt_tokens=1.0), "vllm:kv_cache_usage_perc"),
            (RankReading("0", usage=0.5, waiting=0.0, prompt_tokens=1.0), "vllm:num_requests_running"),
            (RankReading("0", usage=0.5, running=1.0, prompt_tokens=1.0), "vllm:num_requests_waiting"),
        ],
    )
    def test_a_gauge_that_is_not_there_is_a_ticket_that_names_it(self, reading: RankReading, name: str) -> None:
        finding = missing(reading=reading).poll(3 * MINUTE)
        assert finding.state == "ticket"
        assert name in finding.summary

    def test_one_of_both_token_counters_is_enough(self) -> None:
        assert missing(reading=replace(FULL, prompt_tokens=NOT_EXPOSED)).poll(HOUR).state == "clear"
        neither = replace(FULL, prompt_tokens=NOT_EXPOSED, generation_tokens=NOT_EXPOSED)
        assert missing(reading=neither).poll(HOUR).state == "ticket"

    @pytest.mark.parametrize("reason", [NOT_EXPOSED, NOT_KNOWN])
    def test_a_front_end_without_the_pools_size_is_a_hint(self, reason: Absent) -> None:
        """The Rust front end has no cache_config_info; 0.8 wrote "None" into it."""
        finding = missing(reading=replace(FULL, pool=Pool(blocks=reason, block_size=16))).poll(3 * MINUTE)
        assert finding.state == "info"
        assert "vllm:cache_config_info" in finding.summary

    def test_no_gauges_before_the_first_request_is_no_fault(self) -> None:
        scene = missing(state="no_traffic_yet", interval=60.0)
        assert scene.poll(23 * HOUR).state == "unknown"
        assert scene.poll(2 * HOUR).state == "info"
        scene.state, scene.reading = "ok", FULL
        assert scene.poll().state == "clear"

    def test_a_page_that_lacks_them_for_a_moment_is_nothing(self) -> None:
        scene = missing(reading=FULL)
        for _ in range(20):
            scene.reading = FULL
            scene.poll(MINUTE)
            scene.reading = replace(FULL, usage=NOT_EXPOSED)
            assert scene.poll(MINUTE).state != "ticket"

    def test_an_engine_that_does_not_answer_is_unknown(self) -> None:
        scene = missing(reading=FULL)
        scene.poll(10 * MINUTE)
        scene.state = "unreachable"
        assert scene.poll(10 * MINUTE).reason == "no fresh page of metrics"
        assert missing(state="unreachable").poll(HOUR).reason == "no page has been read yet"

    def test_it_ends_with_the_restart_that_shows_them(self) -> None:
        scene = missing(state="stats_disabled")
        scene.poll(HOUR)
        scene.state, scene.reading = "ok", FULL
        assert scene.poll(6 * MINUTE).state == "clear"


FULL = RankReading(
    "0",
    usage=0.5,
    running=1.0,
    waiting=0.0,
    prompt_tokens=1.0,
    generation_tokens=1.0,
    pool=Pool(blocks=1000, block_size=16),
)
