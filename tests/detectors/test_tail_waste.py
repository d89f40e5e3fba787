"""Unused tails of last blocks: the estimate, its bounds, and when it is worth a word."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from oomwatch.detectors.base import Subject
from oomwatch.detectors.tail_waste import HYBRID, KvTailWaste, KvTailWasteSettings, TailWaste, tail_waste
from oomwatch.observations import NOT_EXPOSED, NOT_KNOWN, Pool, RankReading
from tests.detectors.rank_streams import Engine

HOUR = 3600.0


def reading(running: float = 16, used: int = 640, block_size: int = 16, tokens: int | None = None) -> RankReading:
    blocks = 8191
    size = (blocks + 1) * block_size if tokens is None else tokens
    return RankReading("0", running=running, pool=Pool(blocks=blocks, used=used, block_size=block_size, tokens=size))


def estimate(of: RankReading) -> TailWaste:
    waste = tail_waste(of)
    assert isinstance(waste, TailWaste)
    return waste


def test_the_estimate_by_hand() -> None:
    # 16 sequences waste 7.5 tokens each of 640 x 16 tokens: 120 of 10,240.
    waste = estimate(reading())
    assert waste.share == pytest.approx(120 / 10240)
    assert waste.most == pytest.approx(240 / 10240)
    # 1.96 x sqrt(16 x 255 / 12) = 36.1 tokens to each side
    assert waste.low == pytest.approx((120 - 36.14) / 10240, rel=1e-3)
    assert waste.high == pytest.approx((120 + 36.14) / 10240, rel=1e-3)
    assert not waste.assumed


@pytest.mark.parametrize("block_size", [16, 32, 128])
def test_the_bounds_hold_for_sequences_of_random_lengths(block_size: int) -> None:
    lots = random.Random(7)
    within = 0
    for _ in range(300):
        lengths = [lots.randint(100, 5000) for _ in range(32)]
        used = sum(-(-length // block_size) for length in lengths)
        true = 1 - sum(lengths) / (used * block_size)
        waste = estimate(reading(running=32, used=used, block_size=block_size))
        assert 0 <= true <= waste.most
        within += waste.low <= true <= waste.high
    assert within >= 0.9 * 300


def test_a_block_of_one_token_wastes_nothing() -> None:
    assert estimate(reading(block_size=1)).share == 0


def test_it_never_exceeds_what_is_used() -> None:
    waste = estimate(reading(running=80, used=32, block_size=128))
    assert waste.share == 1.0
    assert waste.most == 1.0


@pytest.mark.parametrize("running", [0, 1, 3])
def test_few_sequences_give_no_estimate(running: float) -> None:
    assert tail_waste(reading(running=running)) == NOT_KNOWN


def test_nothing_in_use_gives_no_estimate() -> None:
    assert tail_waste(reading(used=0)) == NOT_KNOWN


@pytest.mark.parametrize("field", ["used", "block_size"])
def test_a_missing_input_gives_no_estimate(field: str) -> None:
    of = reading()
    assert tail_waste(replace(of, pool=replace(of.pool, **{field: NOT_KNOWN}))) == NOT_KNOWN


def test_a_hybrid_model_has_none() -> None:
    assert tail_waste(reading(tokens=50_000)) == HYBRID


@pytest.mark.parametrize("blocks", [8191, 8192])
def test_tokens_may_count_the_null_block(blocks: int) -> None:
    assert isinstance(tail_waste(reading(tokens=blocks * 16)), TailWaste)


def test_where_the_page_does_not_tell_of_hybrids_the_estimate_says_so() -> None:
    of = reading()
    assert estimate(replace(of, pool=replace(of.pool, tokens=NOT_KNOWN))).assumed


# --- the verdict -------------------------------------------------------------------------------------------------


def engine(every: float = 15.0, **pool: int) -> Engine:
    made = Engine(KvTailWaste(Subject(engine="chat", rank="0"), KvTailWasteSettings()), every=every)
    sizes = {"blocks": 1000, "block_size": 128, "tokens": 128_000} | pool
    made.rank.pool = Pool(**sizes)
    return made


def test_more_than_a_tenth_for_an_hour_is_a_ticket_and_never_a_page() -> None:
    short = engine().load(running=32, usage=0.064)  # two blocks each: a quarter is waste
    short.run(HOUR)
    assert short.states() <= {"clear", "info"}
    assert short.state() == "info"
    short.run(6 * HOUR)
    assert short.state() == "ticket"
    assert short.now.evidence["waste_share"] == pytest.approx(0.248, abs=0.001)
    assert "24.8% of the used KV pool" in short.now.summary
    assert "page" not in short.states()


def test_up_to_a_tenth_is_silent() -> None:
    usual = engine().load(running=32, usage=0.17)
    usual.run(3 * HOUR)
    assert usual.states() == {"clear"}
    assert usual.now.evidence["waste_share"] == pytest.approx(0.093, abs=0.001)


def test_pauses_with_few_sequences_are_forgiven_and_longer_ones_begin_anew() -> None:
    short = engine()
    for _ in range(20):
        short.load(running=32, usage=0.064).run(600)
        short.load(running=2, usage=0.004).run(240)
    short.load(running=32, usage=0.064).run(30)
    assert short.state() == "ticket"
    paused = engine()
    for _ in range(20):
        paused.load(running=32, usage=0.064).run(600)
        paused.load(running=2, usage=0.004).run(400)
    assert "ticket" not in paused.states()


def test_without_the_size_in_tokens_it_is_an_info_at_most() -> None:
    unsure = engine()
    unsure.rank.pool = Pool(blocks=1000, block_size=128)
    unsure.load(running=32, usage=0.064).run(3 * HOUR)
    assert unsure.state() == "info"
    assert "ticket" not in unsure.states()
    assert "hybrid" in unsure.now.summary


def test_a_hybrid_model_is_unknown() -> None:
    hybrid = engine(tokens=90_000).load(running=32, usage=0.064)
    hybrid.run(HOUR)
    assert hybrid.states() == {"unknown"}
    assert "hybrid" in hybrid.now.reason


def test_idle_is_unknown_and_not_zero() -> None:
    idle = engine().load(running=0, usage=0.0)
    idle.run(HOUR)
    assert idle.states() == {"unknown"}
    assert idle.now.reason == "too few sequences run for an estimate"


def test_a_page_without_the_gauge_is_unknown() -> None:
    blind = engine().leave_out("running")
    blind.run(600)
    assert blind.now.reason == "no gauge of running requests on the page"
    assert blind.rank.reading().running == NOT_EXPOSED


def test_another_block_size_after_a_restart_is_judged_anew() -> None:
    short = engine().load(running=32, usage=0.064)
    short.run(2 * HOUR)
    short.restart().rank.pool = Pool(blocks=8000, block_size=16, tokens=128_000)
    short.run(30)
    assert short.state() == "clear"
