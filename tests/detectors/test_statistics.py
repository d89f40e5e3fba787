"""Streaming statistics against their plain definitions."""

import math
import random
import statistics
import time

import pytest

from oomwatch.detectors.statistics import (
    MAX_POINTS,
    BinnedFloors,
    DailyQuantiles,
    DifferenceSlope,
    Forgetting,
    SlidingFloor,
    SurpriseSteps,
    Thinned,
    halved,
    ratchet,
    seconds_until,
    theil_sen,
)


def test_floors_of_bins_and_no_floor_for_a_gap() -> None:
    floors = BinnedFloors(10, keep=2)
    closed = [floors.add(t, value) for t, value in [(1, 5), (4, 3), (12, 7), (45, 9), (55, 1)]]
    assert [one is not None for one in closed] == [False, False, True, True, True]
    assert floors.floors() == [(15, 7), (45, 9)]


def test_a_late_value_counts_to_the_open_bin() -> None:
    floors = BinnedFloors(10, keep=4)
    floors.add(25, 5)
    floors.add(12, 2)
    floors.add(31, 9)
    assert floors.floors() == [(25, 2)]


def test_a_sliding_floor_is_the_least_of_the_span_up_to_one_cell() -> None:
    dice = random.Random(1)
    floor = SlidingFloor(600, cells=60)
    seen: list[tuple[float, float]] = []
    t = 0.0
    for _ in range(2000):
        t += dice.uniform(1, 60)
        seen.append((t, dice.random()))
        floor.add(*seen[-1])
        inner = min(value for at, value in seen if t - at <= 590)
        outer = min(value for at, value in seen if t - at <= 610)
        now = floor.value(t)
        assert now is not None
        assert outer <= now <= inner
        assert len(floor._low) <= 62
    assert floor.value(t + 700) is None


def test_a_sliding_floor_is_full_when_it_has_seen_the_span() -> None:
    floor = SlidingFloor(600)
    floor.add(0, 1)
    assert not floor.full(500)
    assert floor.full(600)


def test_the_trend_of_a_line_and_of_a_line_with_outliers() -> None:
    line = [(t * 60.0, 5 + 2.0 * t) for t in range(30)]
    trend = theil_sen(line)
    assert trend is not None
    assert (trend.low, trend.slope, trend.high) == pytest.approx((1 / 30, 1 / 30, 1 / 30))
    spoilt = [(t, value + (500 if i % 7 == 3 else 0)) for i, (t, value) in enumerate(line)]
    trend = theil_sen(spoilt)
    assert trend is not None
    assert trend.slope == pytest.approx(1 / 30, rel=0.1)


def test_the_bounds_of_a_trend_hold_as_often_as_they_say() -> None:
    dice = random.Random(3)
    inside = 0
    for _ in range(300):
        trend = theil_sen([(float(t), 0.5 * t + dice.gauss(0, 3)) for t in range(20)], 0.8)
        assert trend is not None
        inside += trend.low <= 0.5 <= trend.high
    assert 0.72 <= inside / 300 <= 0.9


def test_two_points_and_points_of_one_time_have_no_trend() -> None:
    assert theil_sen([(0, 1), (1, 2)]) is None
    assert theil_sen([(5, 1), (5, 2), (5, 3)]) is None


def test_more_points_than_are_quick_are_refused() -> None:
    with pytest.raises(ValueError, match="bin them to at most 48"):
        theil_sen([(float(t), 0.0) for t in range(MAX_POINTS + 1)])


def test_many_floors_are_paired_and_few_are_not() -> None:
    few = [(float(t), float(t)) for t in range(12)]
    assert halved(few) == few
    many = [(float(t), float(-t)) for t in range(48)]
    assert halved(many)[:2] == [(0.5, -1.0), (2.5, -3.0)]
    assert len(halved(many)) == 24


@pytest.mark.parametrize(
    ("floors", "rises"),
    [
        ([0, 1, 2, 3], True),
        ([9, 0, 1, 2, 3], True),
        ([0, 1, 2, 2.9], False),
        ([0, 2, 1, 4], False),
        ([0, 0, 0, 4], False),
        ([1, 2, 4], False),
    ],
)
def test_a_ratchet_rises_at_each_of_its_steps_and_enough_in_all(floors: list[float], rises: bool) -> None:
    assert ratchet(floors, steps=4, rise=3, tolerance=0.1) is rises


def test_surprising_steps_are_records_of_enough_that_nothing_explains() -> None:
    steps = SurpriseSteps(least=5, span=100)
    for t, floor, explained in [(0, 10, False), (10, 14, False), (20, 16, False), (30, 12, False), (40, 30, True)]:
        steps.add(t, floor, explained)
    assert steps.recent(50) == [(20, 6)]
    assert steps.total == 6
    steps.add(60, 36, False)
    assert steps.recent(125) == [(60, 6)]


def test_records_of_a_series_without_drift_grow_rare() -> None:
    late = []
    for seed in range(200):
        dice = random.Random(seed)
        steps = SurpriseSteps(least=1e-9, span=24)
        for t in range(96):
            steps.add(t, dice.random(), False)
        late.append(len(steps.recent(95)))
    assert sum(late) / 200 == pytest.approx(math.log(96 / 72), abs=0.12)
    assert sum(n >= 4 for n in late) <= 1


def test_a_thinned_series_keeps_its_ends_and_its_bound() -> None:
    series = Thinned(spacing=60)
    for t in range(0, 30 * 86400, 30):
        series.add(float(t), float(t))
    assert len(series.points) <= MAX_POINTS
    assert series.points[0] == (0, 0)
    assert series.points[-1] == (30 * 86400 - 30, 30 * 86400 - 30)


def test_mean_and_deviation_forget() -> None:
    memory, dice = Forgetting(tau=1000), random.Random(5)
    for t in range(5000):
        memory.add(t, dice.gauss(10, 2))
    assert memory.mean == pytest.approx(10, abs=0.5)
    assert memory.deviation == pytest.approx(2, rel=0.15)
    for t in range(5000, 10_000):
        memory.add(t, 50)
    assert memory.mean == pytest.approx(50, abs=1)


def test_the_slope_of_differences_does_not_see_a_slow_drift() -> None:
    slope, dice = DifferenceSlope(tau=86400, longest=120), random.Random(6)
    assert slope.slope is None
    for i in range(3000):
        x = dice.randint(0, 50)
        slope.add(i * 15.0, x, 7 * x + i * 0.5 + dice.gauss(0, 10))
    assert slope.slope == pytest.approx(7, rel=0.02)


def test_pairs_across_a_gap_tell_nothing() -> None:
    slope = DifferenceSlope(tau=86400, longest=120)
    for i in range(10):
        slope.add(i * 500.0, i % 2, i * 100)
    assert slope.slope is None


@pytest.mark.parametrize("scale", [10, 300])
def test_quantiles_of_a_day(scale: float) -> None:
    quantiles, dice = DailyQuantiles(86400), random.Random(7)
    values: list[tuple[float, float]] = []
    for i in range(12_000):
        t = i * 15.0
        value = float(round(dice.expovariate(1 / scale) + (40 if t < 60_000 else 0)))
        quantiles.add(t, value)
        values.append((t, value))
    day = sorted(value for t, value in values if t >= values[-1][0] - 86400)
    for share in (0.2, 0.5, 0.9):
        exact = statistics.quantiles(day, n=100)[int(share * 100) - 1]
        found = quantiles.quantile(share)
        assert found is not None
        assert exact - 1 <= found <= exact * 1.1 + 1


def test_no_value_no_quantile() -> None:
    assert DailyQuantiles(86400).quantile(0.5) is None


@pytest.mark.parametrize(("slope", "seconds"), [(2, 45), (0, None), (-1, None)])
def test_the_time_until_a_target(slope: float, seconds: float | None) -> None:
    assert seconds_until(100, 10, slope) == seconds
    assert seconds_until(100, 120, slope) == 0


def test_the_trend_of_as_many_points_as_are_allowed_is_quick() -> None:
    points = [(float(t), math.sin(t)) for t in range(MAX_POINTS)]
    begin = time.process_time()
    for _ in range(20):
        theil_sen(points)
    assert (time.process_time() - begin) / 20 < 0.02
