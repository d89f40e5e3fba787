"""Windows over streams, whatever the polling interval."""

from __future__ import annotations

import pickle
import random

import pytest

from oomwatch.detectors.rates import CounterWindow, GaugeWindow

T = 1_760_000_000.0


def fed(window: CounterWindow, rate: float, seconds: float, every: float, start: float = T) -> float:
    """Let a counter rise; the time of the last reading."""
    steps = int(seconds / every)
    for step in range(steps + 1):
        window.add(start + step * every, rate * step * every)
    return start + steps * every


@pytest.mark.parametrize("every", [1.0, 5.0, 15.0, 37.0, 90.0])
def test_a_steady_rate_is_read_at_any_interval(every: float) -> None:
    window = CounterWindow(600)
    t = fed(window, 7.0, 3600, every)
    assert window.rate(t) == pytest.approx(7.0)
    assert window.rise(t) == pytest.approx(7.0 * 600, rel=0.06)  # to within a bin
    assert window.covered(t) == pytest.approx(600, rel=0.06)


def test_jitter_and_lost_polls_change_nothing() -> None:
    window, lots, t = CounterWindow(600), random.Random(1), T
    for _ in range(400):
        t += lots.uniform(5, 90)
        window.add(t, 3.0 * (t - T))
    assert window.rate(t) == pytest.approx(3.0)


def test_what_is_older_than_the_window_is_forgotten() -> None:
    window = CounterWindow(600)
    t = fed(window, 100.0, 1200, 15)
    for step in range(1, 50):
        window.add(t + 15 * step, 120_000.0)
    assert window.rise(t + 15 * 49) == 0
    assert window.rate(t + 15 * 49) == 0


def test_a_part_of_the_window_can_be_asked_for() -> None:
    window = CounterWindow(600)
    t = fed(window, 1.0, 600, 10)
    assert window.rise(t, 300) == pytest.approx(300, abs=31)


def test_a_counter_that_fell_began_anew() -> None:
    window = CounterWindow(600)
    window.add(T, 1000.0)
    window.add(T + 15, 1030.0)
    window.add(T + 30, 12.0)
    assert window.rise(T + 30) == pytest.approx(42)


def test_a_long_silence_is_a_gap_and_no_rate() -> None:
    window = CounterWindow(600)
    window.add(T, 0.0)
    window.add(T + 401, 1e6)
    assert window.rate(T + 401) is None
    window.add(T + 416, 1e6 + 15)
    assert window.rate(T + 416) == pytest.approx(1.0)


def test_a_page_without_the_series_is_passed_over() -> None:
    window = CounterWindow(600)
    window.add(T, None)
    assert not window.known
    window.add(T + 15, 5.0)
    window.add(T + 30, None)
    window.add(T + 45, 8.0)
    assert window.known
    assert window.rise(T + 45) == pytest.approx(3.0)


def test_one_reading_is_no_rate() -> None:
    window = CounterWindow(600)
    window.add(T, 5.0)
    assert window.rate(T) is None


def test_after_a_reset_nothing_is_known() -> None:
    window = CounterWindow(600)
    t = fed(window, 1.0, 600, 15)
    window.reset()
    window.add(t + 15, 0.0)
    assert window.rise(t + 15) == 0
    assert window.rate(t + 15) is None


def test_a_mean_is_weighted_by_time() -> None:
    gauge = GaugeWindow(600)
    gauge.add(T, 0.0)
    gauge.add(T + 90, 10.0)
    gauge.add(T + 100, 0.0)
    assert gauge.mean(T + 100, 600) == pytest.approx(9.0)


def test_the_mean_of_an_earlier_part() -> None:
    gauge = GaugeWindow(600)
    for step in range(41):
        gauge.add(T + 15 * step, 2.0 if step <= 20 else 8.0)
    assert gauge.mean(T + 600, 300, before=300) == pytest.approx(2.0, abs=0.7)
    assert gauge.mean(T + 600, 300) == pytest.approx(8.0, abs=0.7)


def test_a_gap_has_no_mean() -> None:
    gauge = GaugeWindow(600)
    gauge.add(T, 4.0)
    assert gauge.mean(T, 600) is None
    gauge.add(T + 500, 4.0)
    assert gauge.mean(T + 500, 600) is None


def test_a_peak_lasts_as_long_as_the_window() -> None:
    gauge = GaugeWindow(300)
    gauge.add(T, 0.99)
    for step in range(1, 22):
        gauge.add(T + 15 * step, 0.2)
        assert gauge.peak(T + 15 * step) == (0.99 if step < 20 else 0.2)


def test_windows_do_not_grow_and_can_be_saved() -> None:
    window = CounterWindow(600)
    fed(window, 1.0, 600, 1)
    early = len(pickle.dumps(window))
    t = fed(window, 1.0, 40_000, 1, start=T + 601)
    assert len(pickle.dumps(window)) <= early + 50
    assert len(pickle.dumps(window)) < 1500
    again = pickle.loads(pickle.dumps(window))
    assert again.rate(t) == window.rate(t)
