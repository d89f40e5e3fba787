"""Pools that are full and hurt, engines that hang, queues that stand: each side of each threshold."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import replace

import pytest

from oomwatch.detectors.base import EngineSample, LogSample, ProbeSample, ProcessEnd, Subject
from oomwatch.detectors.capacity import (
    AdmissionStall,
    AdmissionStallSettings,
    ConcurrencyLow,
    ConcurrencyLowSettings,
    EngineStuck,
    EngineStuckSettings,
    KvExhaustion,
    KvExhaustionSettings,
    PreemptionPressure,
    PreemptionPressureSettings,
    RanksUnbalanced,
    RanksUnbalancedSettings,
)
from oomwatch.enginelog.events import KvPool
from oomwatch.enginelog.story import StartUp
from oomwatch.observations import NOT_KNOWN, EngineFacts, Pool
from oomwatch.snapshot import Holder
from tests.detectors.rank_streams import START, Engine

HOUR = 3600.0
RANK = Subject(engine="chat", rank="0")
ENGINE = Subject(engine="chat")
QUIET = {"clear", "unknown"}
INTERVALS = pytest.mark.parametrize("every", [5.0, 15.0, 60.0, 90.0, (5.0, 90.0, 20.0, 47.0)])


# --- kv-exhaustion -----------------------------------------------------------------------------------------------


def exhaustion(every: float | tuple[float, ...] = 15.0, **settings: float) -> Engine:
    return Engine(KvExhaustion(RANK, KvExhaustionSettings.model_validate(settings)), every=every)


def thrash(engine: Engine, share: float = 0.2) -> Engine:
    """The pool is full, requests preempt each other, and throughput falls to a share of 500 tokens/s."""
    return engine.load(
        usage=0.97,
        waiting=8,
        rates={
            "generation_tokens": 500 * share,
            "finished": 1.0 * share,
            "request_prompt_tokens": 1000 * share,
            "prompt_tokens": 1000 * share,
            "preemptions": 0.9,
        },
    )


@INTERVALS
def test_a_full_pool_that_hurts_is_a_ticket_within_a_quarter_of_an_hour(every: float | tuple[float, ...]) -> None:
    engine = exhaustion(every)
    engine.run(HOUR)
    thrash(engine).run(840)
    assert engine.state() == "ticket"
    assert engine.now.evidence["throughput_share_of_usual"] == pytest.approx(0.2, abs=0.15)
    assert "throughput is down to" in engine.now.summary


@INTERVALS
def test_a_full_pool_at_good_throughput_is_success(every: float | tuple[float, ...]) -> None:
    engine = exhaustion(every)
    engine.run(HOUR)
    engine.load(usage=1.0, waiting=40, rates={"generation_tokens": 900, "finished": 1.8, "preemptions": 0.1})
    engine.run(HOUR)
    assert engine.states() <= QUIET
    assert "busy, not hurt" in engine.now.summary


def test_throughput_just_above_the_mark_stays_silent() -> None:
    engine = exhaustion()
    engine.run(HOUR)
    thrash(engine, share=0.75).run(HOUR)
    assert engine.states() <= QUIET


def test_throughput_just_below_the_mark_is_a_ticket_and_no_page() -> None:
    engine = exhaustion()
    engine.run(HOUR)
    thrash(engine, share=0.6).run(HOUR)
    assert engine.state() == "ticket"
    assert engine.first("page") is None


def test_throughput_at_less_than_half_pages_after_a_quarter_of_an_hour() -> None:
    engine = exhaustion()
    engine.run(HOUR)
    thrash(engine, share=0.3).run(1.5 * HOUR)
    ticket, page = engine.first("ticket"), engine.first("page")
    assert ticket is not None
    assert page is not None
    assert 900 <= page - HOUR <= 1800
    assert page > ticket
    assert engine.state() == "page"  # an hour of it does not become what is usual


def test_usage_that_flaps_between_polls_is_still_full() -> None:
    engine = exhaustion()
    engine.run(HOUR)
    thrash(engine)
    for _ in range(60):
        engine.load(usage=0.38).run(15)
        engine.load(usage=0.56).run(15)
        engine.load(usage=0.97).run(15)
    assert engine.state() in ("ticket", "page")


def test_low_throughput_with_room_in_the_pool_is_not_this() -> None:
    engine = exhaustion()
    engine.run(HOUR)
    thrash(engine).load(usage=0.32, rates={"preemptions": 0.0}).run(HOUR)
    assert engine.states() <= QUIET


@INTERVALS
def test_a_hung_engine_with_a_full_pool_is_left_to_engine_stuck(every: float | tuple[float, ...]) -> None:
    engine = exhaustion(every)
    engine.run(HOUR)
    thrash(engine, share=1.0).run(1200)
    engine.hang().run(HOUR)
    assert engine.states() <= QUIET


def test_a_full_pool_without_queue_and_preemptions_does_not_hurt() -> None:
    engine = exhaustion()
    engine.run(HOUR)
    engine.load(usage=0.99, waiting=0, rates={"generation_tokens": 50, "finished": 0.0, "request_prompt_tokens": 0})
    engine.run(HOUR)
    assert engine.states() <= QUIET


def test_a_growing_queue_without_preemptions_counts_as_suffering() -> None:
    engine = exhaustion()
    engine.run(HOUR)
    thrash(engine).load(rates={"preemptions": 0.0})
    for queue in range(0, 80, 2):
        engine.load(waiting=float(queue)).run(30)
    assert engine.first("ticket") is not None
    assert "a queue that grew" in engine.now.summary


def test_versions_that_give_no_reason_for_waiting_are_read_by_their_whole_queue() -> None:
    engine = exhaustion().leave_out("waiting_capacity", "waiting_deferred")
    engine.run(HOUR)
    thrash(engine).run(900)
    assert engine.state() == "ticket"


def test_another_mix_of_requests_lowers_not_all_rates() -> None:
    engine = exhaustion()
    engine.run(HOUR)
    # Longer prompts: fewer requests and fewer tokens come out, and more prompt tokens go in.
    thrash(engine).load(rates={"request_prompt_tokens": 2000})
    engine.run(HOUR)
    assert engine.states() <= QUIET


def test_minutes_of_waiting_for_room_while_less_comes_out_hurt_though_prompts_have_grown() -> None:
    engine = exhaustion()
    engine.run(HOUR)
    thrash(engine, share=0.7).load(waiting=200, rates={"request_prompt_tokens": 1600, "preemptions": 0.0})
    engine.run(1200)
    assert engine.state() == "ticket"
    assert engine.now.evidence["wait_seconds"] == pytest.approx(200 / 0.7, rel=0.1)
    assert "a wait of about" in engine.now.summary
    assert engine.first("page") is None


@pytest.mark.parametrize(("waiting", "share"), [(60, 0.7), (200, 0.9)])
def test_a_shorter_wait_or_as_much_coming_out_is_another_mix_of_requests(waiting: int, share: float) -> None:
    engine = exhaustion()
    engine.run(HOUR)
    thrash(engine, share=share).load(waiting=waiting, rates={"request_prompt_tokens": 1600, "preemptions": 0.0})
    engine.run(HOUR)
    assert engine.states() <= QUIET


def test_too_little_work_seen_before_is_an_info_at_most() -> None:
    engine = exhaustion()
    engine.run(60)
    thrash(engine).run(HOUR)
    assert "ticket" not in engine.states()
    assert "too little" in next(f.summary for _, f in engine.findings if f.state == "info")


def test_idle_time_does_not_lower_what_is_usual() -> None:
    engine = exhaustion()
    engine.run(HOUR)
    engine.hang().load(usage=0.0, running=0).run(5 * HOUR)
    engine.load(running=8)
    thrash(engine).run(900)
    assert engine.state() == "ticket"


def test_exhaustion_clears_after_an_hour_without_it() -> None:
    engine = exhaustion()
    engine.run(HOUR)
    thrash(engine, share=0.6).run(1200)
    engine.load(usage=0.4, waiting=0, rates={"generation_tokens": 500, "finished": 1, "preemptions": 0})
    engine.run(HOUR)
    assert engine.state() == "ticket"
    assert "it has eased" in engine.now.summary
    engine.run(1200)
    assert engine.state() == "clear"


def test_a_restart_begins_anew() -> None:
    engine = exhaustion()
    engine.run(HOUR)
    thrash(engine).run(900)
    engine.restart().load(usage=0.2, waiting=0).run(15)
    assert engine.state() == "clear"


def test_no_usage_and_no_preemptions_is_unknown() -> None:
    engine = exhaustion().leave_out("usage", "preemptions")
    engine.run(900)
    assert engine.states() == {"unknown"}


def test_silence_is_unknown_and_keeps_a_ticket() -> None:
    engine = exhaustion()
    engine.run(HOUR)
    engine.silent(600)
    assert engine.state() == "unknown"
    engine.run(HOUR)
    thrash(engine).run(900)
    engine.silent(900)
    assert engine.state() == "ticket"
    assert "no fresh page tells more" in engine.now.summary


def test_a_pool_that_fills_is_an_info_with_the_time_to_full() -> None:
    engine = exhaustion(every=10.0)
    engine.run(HOUR)
    for step in range(90):
        engine.load(usage=0.6 + 0.004 * step).run(10)  # 0.4 points every 10 s
        if engine.state() == "info":
            break
    assert engine.state() == "info"
    assert engine.rank.gauges["usage"] >= 0.8
    eta = engine.now.eta
    assert eta is not None
    assert eta.low is not None
    assert eta.high is not None
    assert eta.low <= eta.seconds <= eta.high
    assert eta.seconds == pytest.approx((1 - engine.rank.gauges["usage"]) / 0.0004, rel=0.05)


def test_the_load_clock_needs_four_samples_of_inflow() -> None:
    engine = exhaustion()
    engine.run(300)
    for step in range(1, 6):
        engine.load(usage=0.3 + 0.01 * step).run(15)
        assert (engine.now.eta is not None) == (step >= 4)
    engine.load(usage=0.2).run(15)
    assert engine.now.eta is None


def test_usage_that_has_turned_down_is_no_ramp() -> None:
    engine = exhaustion(every=10.0)
    engine.run(300)
    for usage in (0.1, 0.25, 0.5, 0.7, 0.95, 0.94, 0.93):
        engine.load(usage=usage).run(10)
    for _ in range(6):
        engine.load(usage=0.85).run(10)
        assert engine.now.eta is None


def test_a_ramp_far_from_full_says_nothing() -> None:
    engine = exhaustion()
    for step in range(60):
        engine.load(usage=0.01 * step).run(15)
    assert engine.states() <= QUIET


# --- preemption-pressure -----------------------------------------------------------------------------------------


def pressure(every: float | tuple[float, ...] = 15.0) -> Engine:
    engine = Engine(PreemptionPressure(RANK, PreemptionPressureSettings()), every=every)
    engine.load(usage=0.97, waiting=3)
    return engine


@INTERVALS
def test_more_than_half_a_preemption_per_finished_request_is_a_ticket(every: float | tuple[float, ...]) -> None:
    engine = pressure(every)
    engine.load(rates={"preemptions": 0.6}).run(1200)
    assert engine.state() == "ticket"
    assert engine.now.evidence["preemptions_per_finished"] == pytest.approx(0.6, abs=0.05)


@pytest.mark.parametrize("per_finished", [0.08, 0.37, 0.42, 0.48])
def test_a_pool_used_well_preempts_too(per_finished: float) -> None:
    engine = pressure()
    engine.load(rates={"preemptions": per_finished}).run(HOUR)
    assert engine.states() <= QUIET


def test_few_finished_requests_are_an_info() -> None:
    engine = pressure()
    engine.load(rates={"preemptions": 0.2, "finished": 0.1}).run(HOUR)  # 60 in 10 min
    assert engine.state() == "info"
    assert "ticket" not in engine.states()
    assert "too few finished" in engine.now.summary


def test_a_few_preemptions_are_no_sign() -> None:
    engine = pressure()
    engine.load(rates={"preemptions": 4 / 600, "finished": 0.0}).run(HOUR)
    assert engine.states() <= QUIET


def test_with_room_in_the_pool_it_is_not_this() -> None:
    engine = pressure().load(usage=0.85)
    engine.load(rates={"preemptions": 0.9}).run(HOUR)
    assert engine.states() <= QUIET


def test_the_window_must_be_full() -> None:
    engine = pressure().load(rates={"preemptions": 2.0})
    engine.run(510)
    assert engine.states() == {"unknown"}
    assert engine.now.reason == "warming up"
    engine.run(150)
    assert engine.state() == "clear"
    engine.run(150)
    assert engine.state() == "ticket"


def test_it_clears_an_hour_after_the_pressure() -> None:
    engine = pressure().load(rates={"preemptions": 2.0})
    engine.run(1200)
    engine.load(rates={"preemptions": 0.0}).run(3900)
    assert engine.state() == "ticket"
    engine.run(600)
    assert engine.state() == "clear"


def test_a_restart_forgets_the_counts() -> None:
    engine = pressure().load(rates={"preemptions": 2.0})
    engine.run(1200)
    engine.restart().load(rates={"preemptions": 0.0}).run(600)
    assert engine.state() in QUIET


def test_a_page_without_the_counter_is_unknown() -> None:
    engine = pressure().leave_out("preemptions")
    engine.run(900)
    assert engine.states() == {"unknown"}


# --- engine-stuck ------------------------------------------------------------------------------------------------


def stuck(every: float | tuple[float, ...] = 15.0, ranks: tuple[str, ...] = ("0",), **settings: float) -> Engine:
    return Engine(EngineStuck(ENGINE, EngineStuckSettings.model_validate(settings)), ranks, every=every)


@INTERVALS
@pytest.mark.parametrize(("running", "waiting"), [(2.0, 0.0), (0.0, 3.0), (5.0, 19.0)])
def test_work_without_a_token_for_three_minutes_pages(
    every: float | tuple[float, ...], running: float, waiting: float
) -> None:
    engine = stuck(every)
    engine.run(1200)
    assert engine.states() <= QUIET
    engine.hang().load(running=running, waiting=waiting).run(600)
    page = engine.first("page")
    assert page is not None
    assert 180 <= page - 1200 <= 180 + 2 * 95
    assert engine.now.evidence["running"] == running


def test_a_page_says_what_is_there() -> None:
    engine = stuck()
    engine.run(1200)
    engine.hang().load(running=1, waiting=2, usage=0.048).run(240)
    assert engine.now.summary == (
        "No token for 4 min although 1 request runs and 2 wait, 4.8% of the KV pool in use: "
        "no token or step counter moves."
    )


def stuck_before_0_10_2() -> Engine:
    """Of a version whose gauges may be those of requests that were aborted; a request finishes every 2 s."""
    engine = Engine(EngineStuck(ENGINE, EngineStuckSettings()), version=(0, 9, 2))
    engine.load(rates={"finished": 0.5}).run(1200)
    return engine


def test_before_0_10_2_one_request_may_be_left_over_from_an_abort() -> None:
    engine = stuck_before_0_10_2()
    engine.hang().load(running=1, waiting=0).run(12 * HOUR)
    assert engine.states() <= QUIET | {"info"}
    assert engine.now.summary == (
        "No token for 12 h although, by the gauges, 1 request runs. Before vLLM 0.10.2 they stay as they were when "
        "an abort ends the last request: it hangs, or nobody has sent anything since."
    )
    assert engine.now.evidence["requests_missed"] == pytest.approx(12 * 1800, rel=0.02)


def test_v0_looks_at_its_gauges_also_when_idle() -> None:
    engine = stuck_before_0_10_2()
    engine.hang().load(running=1, waiting=0, swapped=0).run(300)
    assert engine.state() == "page"


def test_before_0_10_2_several_requests_page_once_many_more_were_to_be_expected() -> None:
    engine = stuck_before_0_10_2()
    engine.hang().load(running=2, waiting=0).run(600)
    page = engine.first("page")
    assert page is not None
    assert page - 1200 == pytest.approx(180, abs=16)


def test_before_0_10_2_a_quiet_engine_is_given_as_long_as_many_requests_take() -> None:
    engine = Engine(EngineStuck(ENGINE, EngineStuckSettings()), version=(0, 9, 2))
    engine.load(rates={"finished": 0.01}).run(5 * HOUR)
    engine.hang().load(running=2, waiting=0).run(2 * HOUR)
    page = engine.first("page")
    assert page is not None
    assert page - 5 * HOUR == pytest.approx(50 / 0.01, rel=0.1)


def test_before_0_10_2_a_silence_such_as_there_was_before_is_none() -> None:
    engine = stuck_before_0_10_2()
    for _ in range(3):
        engine.hang().load(running=0, waiting=0).run(HOUR)
        engine.load(rates={"finished": 0.5, "generation_tokens": 100.0}, running=2).run(HOUR)
    engine.hang().load(running=2, waiting=0).run(1.5 * HOUR)
    assert engine.states() <= QUIET | {"info"}
    engine.run(3 * HOUR)
    assert engine.state() == "page"


def test_before_0_10_2_time_without_pages_is_no_silence() -> None:
    engine = stuck_before_0_10_2()
    engine.silent(HOUR)
    engine.run(600)
    engine.hang().load(running=2, waiting=0).run(300)
    assert engine.state() == "page"


def test_before_0_10_2_nothing_is_believed_before_the_pace_is_known() -> None:
    engine = Engine(EngineStuck(ENGINE, EngineStuckSettings()), version=(0, 9, 2))
    engine.load(rates={"finished": 0.01}).run(1200)
    engine.hang().load(running=2, waiting=0).run(HOUR)
    assert engine.states() <= QUIET | {"info"}
    assert "requests_missed" not in engine.now.evidence


def test_an_idle_engine_is_not_stuck() -> None:
    engine = stuck()
    engine.run(1200)
    engine.hang().load(running=0, waiting=0).run(6 * HOUR)
    assert engine.states() <= QUIET


@pytest.mark.parametrize("counter", ["generation_tokens", "prompt_tokens", "steps", "finished"])
def test_any_counter_that_moves_is_life(counter: str) -> None:
    engine = stuck()
    engine.run(1200)
    engine.hang().load(rates={counter: 0.1}).run(2 * HOUR)
    assert engine.states() <= QUIET


def test_one_token_within_three_minutes_is_life() -> None:
    engine = stuck()
    engine.run(1200)
    for _ in range(20):
        engine.hang().run(165)
        engine.load(rates={"generation_tokens": 0.1}).run(15)
    assert engine.states() <= QUIET


def test_one_generation_without_end_is_progress() -> None:
    engine = stuck()
    engine.run(600)
    engine.hang().load(running=1, rates={"generation_tokens": 3.0}).run(5 * HOUR)
    assert engine.states() <= QUIET


def test_aborts_and_preemptions_are_no_progress() -> None:
    engine = stuck()
    engine.run(1200)
    engine.hang().load(rates={"preemptions": 0.1}).run(600)
    assert engine.state() == "page"


def test_a_counter_that_does_not_exist_is_unknown_and_not_flat() -> None:
    engine = stuck().leave_out("generation_tokens", "prompt_tokens", "steps", "finished")
    engine.run(HOUR)
    assert engine.states() == {"unknown"}
    assert engine.now.reason == "no counter of tokens or steps on the page"


@pytest.mark.parametrize("counter", ["generation_tokens", "steps", "finished"])
def test_one_counter_is_enough(counter: str) -> None:
    others = {"generation_tokens", "prompt_tokens", "steps", "finished"} - {counter}
    engine = stuck().leave_out(*others)
    engine.run(1200)
    assert engine.states() == {"clear"}
    engine.hang().run(600)
    assert engine.state() == "page"


def test_pages_without_the_gauges_are_unknown() -> None:
    engine = stuck().leave_out("running", "waiting", "waiting_capacity")
    engine.run(HOUR)
    assert engine.states() == {"unknown"}


def test_before_the_first_token_it_may_compile() -> None:
    engine = stuck().hang().load(running=24, waiting=0)
    engine.run(590)
    assert engine.states() <= QUIET
    engine.run(60)
    assert engine.state() == "page"


def test_after_a_start_there_is_a_grace() -> None:
    engine = stuck()
    engine.run(30)
    engine.hang().run(265)
    assert engine.states() <= QUIET
    engine.run(30)
    assert engine.state() == "page"


def test_a_long_prompt_shows_by_rising_usage() -> None:
    engine = stuck()
    engine.run(1200)
    engine.hang().load(running=1)
    for step in range(50):
        engine.load(usage=0.3 + 0.005 * step).run(15)
    assert engine.states() <= QUIET
    engine.run(240)
    assert engine.state() == "page"


def test_rising_usage_without_tokens_does_not_excuse_for_ever() -> None:
    engine = stuck()
    engine.run(1200)
    engine.hang()
    for step in range(70):
        engine.load(usage=0.3 + 0.005 * step).run(15)
    assert engine.state() == "page"


def test_requests_that_wait_for_a_transfer_get_more_time() -> None:
    engine = stuck()
    engine.run(1200)
    engine.hang().load(running=0, waiting=4, waiting_capacity=0, waiting_deferred=4).run(870)
    assert engine.states() <= QUIET
    engine.run(120)
    assert engine.state() == "page"


def test_a_sleeping_engine_is_unknown() -> None:
    engine = stuck()
    engine.run(1200)
    engine.rank.sleep_level = "weights_offloaded"
    engine.hang().load(running=0, waiting=2).run(HOUR)
    assert engine.state() == "unknown"
    assert "page" not in engine.states()


def test_lost_scrapes_in_between_do_not_hide_it() -> None:
    engine = stuck()
    engine.run(1200)
    engine.hang().run(60)
    engine.silent(150)
    engine.run(15)
    assert engine.state() == "page"


def test_after_a_long_silence_the_clock_begins_anew() -> None:
    engine = stuck()
    engine.run(1200)
    engine.hang().run(60)
    engine.silent(3000)
    engine.run(165)
    assert "page" not in engine.states()
    engine.run(60)
    assert engine.state() == "page"


def test_a_page_stays_when_the_engine_stops_answering_too() -> None:
    engine = stuck()
    engine.run(1200)
    engine.hang().run(300)
    engine.silent(1800)
    assert engine.state() == "page"
    engine.silent(3 * HOUR)
    assert engine.state() == "unknown"


def test_a_page_ends_with_the_engine_s_processes() -> None:
    engine = stuck()
    engine.run(1200)
    engine.hang().run(300)
    engine.detector.observe(ProcessEnd(engine.t, 4711, Holder("engine", "chat")))
    engine.silent(300)
    assert engine.state() == "unknown"
    assert engine.now.reason == "its processes have ended"


def test_a_process_that_ends_behind_an_answering_page_changes_nothing() -> None:
    engine = stuck()
    engine.run(1200)
    engine.hang().run(60)
    engine.detector.observe(ProcessEnd(engine.t, 4712, Holder("engine", "chat")))
    engine.run(240)
    assert engine.state() == "page"


def test_a_restart_ends_it_at_once() -> None:
    engine = stuck()
    engine.run(1200)
    engine.hang().run(600)
    engine.restart().load(rates={"generation_tokens": 500.0}).run(15)
    assert engine.state() == "clear"


def test_a_page_lasts_a_quarter_of_an_hour_after_the_first_token() -> None:
    engine = stuck()
    engine.run(1200)
    engine.hang().run(300)
    engine.load(rates={"generation_tokens": 500.0}).run(870)
    assert engine.state() == "page"
    engine.run(120)
    assert engine.state() == "clear"


def test_one_hung_rank_among_working_ones_pages() -> None:
    engine = stuck(ranks=("0", "1", "2"))
    engine.run(1200)
    engine.load("1", rates=dict.fromkeys(("generation_tokens", "prompt_tokens", "steps", "finished"), 0.0)).run(300)
    assert engine.state() == "page"
    assert engine.now.evidence["ranks"] == ["1"]
    assert "on rank 1 of 3" in engine.now.summary


def test_a_dead_core_behind_a_front_end_that_answers_pages() -> None:
    engine = stuck()
    engine.run(1200)
    engine.hang().load(running=0, waiting=0)
    engine.answers = "dead"
    engine.run(165)
    assert "page" not in engine.states()
    engine.run(60)
    assert engine.state() == "page"
    assert "/health says 503" in engine.now.summary


def probe(engine: Engine, ok: bool) -> None:
    engine.detector.observe(ProbeSample(engine.t, "chat", ok, 30.0, "" if ok else "no answer within 30 s"))


def test_two_failed_probes_of_an_engine_that_looks_idle_page() -> None:
    engine = stuck()
    engine.run(1200)
    engine.hang().load(running=0, waiting=0, usage=0.0).run(60)
    probe(engine, ok=False)
    engine.run(300)
    assert engine.states() <= QUIET
    probe(engine, ok=False)
    engine.run(15)
    assert engine.state() == "page"
    assert "no answer within 30 s" in engine.now.summary
    probe(engine, ok=True)
    engine.run(960)
    assert engine.state() == "clear"


def test_probes_that_fail_while_tokens_come_out_prove_nothing() -> None:
    engine = stuck()
    engine.run(1200)
    for _ in range(10):
        probe(engine, ok=False)
        engine.run(60)
    assert engine.states() <= QUIET


def test_probes_of_an_engine_that_cannot_be_reached_prove_nothing() -> None:
    engine = stuck()
    engine.run(1200)
    engine.hang().load(running=0)
    engine.answers = "unreachable"
    engine.run(15)
    for _ in range(5):
        probe(engine, ok=False)
        engine.run(30)
    assert engine.states() <= QUIET


def test_probes_in_the_grace_of_a_start_prove_nothing() -> None:
    engine = stuck().hang().load(running=0)
    engine.run(60)
    for _ in range(3):
        probe(engine, ok=False)
        engine.run(60)
    assert engine.states() <= QUIET


def test_an_engine_without_statistics_is_judged_by_its_probe() -> None:
    detector = EngineStuck(ENGINE, EngineStuckSettings())
    for step in range(40):
        t = START + 15 * step
        detector.observe(EngineSample(t, "chat", "stats_disabled", "", EngineFacts(name="chat"), (), 1, START, ()))
    assert detector.conclude(START + 600).state == "unknown"
    for t in (START + 400, START + 500):
        detector.observe(ProbeSample(t, "chat", False, 30.0))
    assert detector.conclude(START + 600).state == "page"


# --- admission-stall ---------------------------------------------------------------------------------------------


def stall(every: float | tuple[float, ...] = 15.0) -> Engine:
    return Engine(AdmissionStall(RANK, AdmissionStallSettings()), every=every)


NO_ADMISSION = {"prompt_tokens": 0.0}


@INTERVALS
@pytest.mark.parametrize("running", [0.0, 2.0])
def test_a_queue_that_nobody_leaves_is_a_ticket(every: float | tuple[float, ...], running: float) -> None:
    engine = stall(every)
    engine.run(1200)
    engine.load(running=running, waiting=6, usage=0.64, rates=NO_ADMISSION).run(600)
    ticket = engine.first("ticket")
    assert ticket is not None
    assert 300 <= ticket - 1200 <= 300 + 2 * 95
    assert "6 requests wait and none was admitted" in engine.now.summary


def test_a_full_pool_is_no_stall() -> None:
    engine = stall()
    engine.run(1200)
    engine.load(waiting=6, usage=0.93, rates=NO_ADMISSION).run(HOUR)
    assert engine.states() <= QUIET


def test_a_pool_that_flaps_because_of_preemptions_is_no_stall() -> None:
    engine = stall()
    engine.run(1200)
    engine.load(waiting=6, usage=0.6, rates={"prompt_tokens": 0.0, "preemptions": 0.02}).run(HOUR)
    assert engine.states() <= QUIET


def test_a_queue_that_moves_is_no_stall() -> None:
    engine = stall()
    engine.run(1200)
    engine.load(waiting=500, usage=0.3).run(HOUR)
    assert engine.states() <= QUIET


def test_an_admission_within_five_minutes_begins_the_clock_anew() -> None:
    engine = stall()
    engine.run(1200)
    engine.load(running=2, waiting=6, usage=0.6)
    for _ in range(10):
        engine.load(rates=NO_ADMISSION).run(270)
        engine.load(rates={"prompt_tokens": 100.0}).run(15)
    assert engine.states() <= QUIET


def test_a_request_that_runs_was_admitted_before_its_prompt_is_counted() -> None:
    engine = stall()
    engine.run(1200)
    for running in range(20):
        engine.load(running=running, waiting=6, usage=0.6, rates=NO_ADMISSION).run(200)
    assert engine.states() <= QUIET


def test_as_many_running_as_ever_may_be_the_limit_on_sequences() -> None:
    engine = stall()
    engine.load(running=8).run(1200)
    engine.load(waiting=6, usage=0.5, rates=NO_ADMISSION).run(1200)
    assert engine.state() == "info"
    assert "limit on sequences" in engine.now.summary
    engine.load(running=7).run(30)
    assert engine.state() == "ticket"


def test_deferred_requests_get_more_time_and_are_named() -> None:
    engine = stall()
    engine.run(1200)
    engine.load(running=1, waiting=6, waiting_capacity=0, waiting_deferred=6, usage=0.4, rates=NO_ADMISSION).run(840)
    assert engine.states() <= QUIET
    engine.run(120)
    assert engine.state() == "ticket"
    assert "All are deferred" in engine.now.summary


def test_before_the_first_token_admission_may_take_long() -> None:
    engine = stall().hang().load(running=0, waiting=3, usage=0.0)
    engine.run(840)
    assert engine.states() <= QUIET


def test_a_page_without_prompt_tokens_is_unknown() -> None:
    engine = stall().leave_out("prompt_tokens")
    engine.load(waiting=6).run(HOUR)
    assert engine.states() == {"unknown"}


# --- ranks-unbalanced --------------------------------------------------------------------------------------------


def unbalanced(*ranks: str, every: float | tuple[float, ...] = 15.0) -> Engine:
    return Engine(RanksUnbalanced(ENGINE, RanksUnbalancedSettings()), ranks, every=every)


@INTERVALS
def test_a_long_queue_beside_a_half_empty_pool_is_a_ticket(every: float | tuple[float, ...]) -> None:
    engine = unbalanced("0", "1", "2", "3", every=every)
    engine.run(600)
    engine.load("2", usage=0.99, waiting=40).load("0", usage=0.4).run(870)
    assert "ticket" not in engine.states()
    engine.run(300)
    assert engine.state() == "ticket"
    assert (engine.now.evidence["rank"], engine.now.evidence["waiting"]) == ("2", 40.0)


def test_two_ranks_are_compared_with_each_other() -> None:
    engine = unbalanced("0", "1")
    engine.load("0", usage=1.0, waiting=12).load("1", usage=0.1).run(1200)
    assert engine.state() == "ticket"


def test_a_full_rank_with_a_short_queue_is_an_info() -> None:
    engine = unbalanced("0", "1")
    engine.load("0", usage=0.95, waiting=2).load("1", usage=0.3).run(HOUR)
    assert engine.state() == "info"
    assert "ticket" not in engine.states()


@pytest.mark.parametrize("usage", [0.55, 0.9])
def test_full_ranks_all_around_are_balanced(usage: float) -> None:
    engine = unbalanced("0", "1", "2")
    engine.load(usage=usage, waiting=3).load("0", usage=1.0, waiting=60).run(HOUR)
    assert engine.states() <= QUIET


def test_queues_everywhere_are_balanced() -> None:
    engine = unbalanced("0", "1", "2")
    engine.load(usage=0.4, waiting=10).load("0", usage=1.0, waiting=90).run(HOUR)
    assert engine.states() <= QUIET


def test_queues_that_change_places_are_no_imbalance() -> None:
    engine = unbalanced("0", "1")
    for _ in range(6):
        engine.load("0", usage=1.0, waiting=30).load("1", usage=0.2, waiting=0).run(240)
        engine.load("0", usage=0.2, waiting=0).load("1", usage=1.0, waiting=30).run(240)
    assert engine.states() <= QUIET


def test_one_poll_without_a_queue_does_not_end_it() -> None:
    engine = unbalanced("0", "1")
    engine.load("0", usage=1.0).load("1", usage=0.1)
    for _ in range(20):
        engine.load("0", waiting=20).run(60)
        engine.load("0", waiting=0).run(15)
    engine.load("0", waiting=20).run(15)
    assert engine.state() == "ticket"


def test_a_single_rank_has_nobody_to_be_compared_with() -> None:
    engine = unbalanced("0")
    engine.load(usage=1.0, waiting=90).run(HOUR)
    assert engine.states() == {"clear"}


def test_a_rank_without_gauges_makes_it_unknown() -> None:
    engine = unbalanced("0", "1")
    engine.ranks["1"].missing = frozenset({"usage"})
    engine.run(600)
    assert engine.states() == {"unknown"}


# --- concurrency-low ---------------------------------------------------------------------------------------------


def concurrency(pool: Pool, max_model_len: int | None = None) -> Engine:
    engine = Engine(
        ConcurrencyLow(ENGINE, ConcurrencyLowSettings()), facts=EngineFacts(name="chat", max_model_len=max_model_len)
    )
    engine.rank.pool = pool
    engine.run(30)
    return engine


@pytest.mark.parametrize(
    ("requests", "state"), [(0.89, "ticket"), (0.999, "ticket"), (1.0, "info"), (1.49, "info"), (1.5, "clear")]
)
def test_how_many_longest_requests_fit(requests: float, state: str) -> None:
    engine = concurrency(Pool(blocks=1000, max_concurrency=requests))
    assert engine.state() == state


def test_it_is_computed_from_tokens_and_the_longest_length() -> None:
    engine = concurrency(Pool(blocks=229, block_size=16, tokens=3664), max_model_len=4096)
    assert engine.state() == "ticket"
    assert engine.now.evidence == {
        "max_concurrency": pytest.approx(0.8945, abs=1e-4),
        "pool_tokens": 3664,
        "max_model_len": 4096,
    }
    assert engine.now.summary == (
        "The KV pool (3,664 tokens) holds 0.89 requests of the longest length: one such request cannot be served."
    )


def test_without_tokens_or_length_it_is_unknown() -> None:
    assert concurrency(Pool(blocks=229, block_size=16), max_model_len=4096).now.state == "unknown"
    assert concurrency(Pool(blocks=229, block_size=16, tokens=3664)).now.state == "unknown"


def started(t: float = START, **ranks: KvPool) -> StartUp:
    return StartUp(t, t, pools={name.removeprefix("r"): pool for name, pool in ranks.items()})


class TestConcurrencyByLog:
    """The engine prints how many of the longest requests fit while it starts, long before its first page."""

    def told(self, start: StartUp, t: float = START) -> ConcurrencyLow:
        detector = ConcurrencyLow(ENGINE, ConcurrencyLowSettings())
        detector.observe(LogSample(t, "chat", True, start=start))
        return detector

    @pytest.mark.parametrize(
        ("pool", "state"),
        [
            (KvPool(concurrency=0.89), "ticket"),
            (KvPool(tokens=150_745, max_model_len=124_000), "info"),
            (KvPool(tokens=150_745, max_model_len=8_000), "clear"),
            (KvPool(blocks=229), "unknown"),
        ],
    )
    def test_how_many_fit(self, pool: KvPool, state: str) -> None:
        assert self.told(started(r0=pool)).conclude(START + 1).state == state

    def test_the_smallest_rank_counts(self) -> None:
        start = started(r0=KvPool(concurrency=9.0), r1=KvPool(concurrency=0.9))
        assert self.told(start).conclude(START + 1).state == "ticket"

    def test_a_start_that_ended_holds_nothing(self) -> None:
        start = started(r0=KvPool(concurrency=0.9))
        start.died = START
        assert self.told(start).conclude(START + 1).state == "unknown"

    def test_another_start_is_judged_anew(self) -> None:
        detector = self.told(started(r0=KvPool(concurrency=0.9)))
        assert detector.conclude(START + 1).state == "ticket"
        detector.observe(LogSample(START + 60, "chat", True, start=started(START + 60, r0=KvPool(concurrency=9.0))))
        assert detector.conclude(START + 61).state == "clear"

    def test_the_page_goes_before_the_log_and_silence_of_it_is_silence(self) -> None:
        engine = concurrency(Pool(blocks=1000, max_concurrency=9.0))
        engine.detector.observe(LogSample(engine.t, "chat", True, start=started(r0=KvPool(concurrency=0.9))))
        assert engine.detector.conclude(engine.t).state == "clear"
        assert engine.detector.conclude(engine.t + 600).state == "unknown"


def test_the_smallest_rank_counts() -> None:
    engine = Engine(ConcurrencyLow(ENGINE, ConcurrencyLowSettings()), ("0", "1"))
    engine.ranks["0"].pool = Pool(blocks=1000, max_concurrency=8.0)
    engine.ranks["1"].pool = Pool(blocks=1000, max_concurrency=0.9)
    engine.run(30)
    assert engine.state() == "ticket"


def test_another_pool_after_a_restart_is_judged_anew() -> None:
    engine = concurrency(Pool(blocks=100, max_concurrency=0.9))
    engine.restart().rank.pool = Pool(blocks=1000, max_concurrency=9.0)
    engine.run(30)
    assert engine.state() == "clear"
    engine.restart().rank.pool = replace(engine.rank.pool, max_concurrency=NOT_KNOWN)
    engine.run(30)
    assert engine.state() == "unknown"


# --- all of them -------------------------------------------------------------------------------------------------

MAKERS: dict[str, Callable[[], Engine]] = {
    "kv-exhaustion": exhaustion,
    "preemption-pressure": pressure,
    "engine-stuck": stuck,
    "admission-stall": stall,
    "ranks-unbalanced": lambda: unbalanced("0", "1"),
    "concurrency-low": lambda: Engine(ConcurrencyLow(ENGINE, ConcurrencyLowSettings())),
}
ALL = pytest.mark.parametrize("verdict", MAKERS)


@ALL
def test_nothing_seen_is_unknown(verdict: str) -> None:
    finding = MAKERS[verdict]().detector.conclude(START)
    assert finding.state == "unknown"
    assert finding.reason


@ALL
def test_a_day_of_ordinary_service_is_silent(verdict: str) -> None:
    engine = MAKERS[verdict]()
    engine.every(60.0)
    for hour in range(24):
        load = (hour % 12) / 12
        engine.load(
            usage=0.9 * load,
            running=round(20 * load),
            waiting=max(0, round(12 * load) - 8),
            rates={
                "generation_tokens": 900 * load,
                "prompt_tokens": 2000 * load,
                "finished": load,
                "steps": 40 * load,
                "preemptions": 0.05 * load,
                "request_prompt_tokens": 2000 * load,
            },
        ).run(HOUR)
    assert engine.states() <= QUIET


@ALL
def test_concluding_twice_gives_the_same_answer(verdict: str) -> None:
    engine = MAKERS[verdict]()
    thrash(engine).run(1800)
    t = engine.t + 7
    assert engine.detector.conclude(t) == engine.detector.conclude(t)


@ALL
def test_a_restart_of_the_daemon_changes_no_conclusion(verdict: str) -> None:
    kept, saved = MAKERS[verdict](), MAKERS[verdict]()
    for engine in (kept, saved):
        engine.run(HOUR)
        thrash(engine).run(500)
    saved.detector = pickle.loads(pickle.dumps(saved.detector))
    for engine in (kept, saved):
        engine.run(1800)
    assert kept.findings == saved.findings


@ALL
def test_its_memory_does_not_grow(verdict: str) -> None:
    engine = MAKERS[verdict]()
    engine.run(2 * HOUR)
    early = len(pickle.dumps(engine.detector))
    thrash(engine).run(4 * HOUR)
    assert len(pickle.dumps(engine.detector)) < early + 1000
    assert len(pickle.dumps(engine.detector)) < 20_000
