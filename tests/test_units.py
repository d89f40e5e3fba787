"""Numbers as people read them."""

from __future__ import annotations

import pytest

from oomwatch import units


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 bytes"),
        (1, "1 byte"),
        (17, "17 bytes"),
        (1024, "1 KiB"),
        (1024**2 - 1, "1 MiB"),  # not 1024 KiB
        (512 * 1024**2, "512 MiB"),
        (85_520_809_984, "79.6 GiB"),
        (1024**3, "1 GiB"),
        (143_771 * 1024**2, "140 GiB"),
        (2 * 1024**4, "2 TiB"),
        (-1_610_612_736, "-1.5 GiB"),
    ],
)
def test_sizes_have_binary_units_and_three_digits(value: float, text: str) -> None:
    assert units.size(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0%"),
        (0.0004, "<0.1%"),
        (0.753, "75.3%"),
        (0.75, "75%"),
        (0.9996, ">99.9%"),
        (1.0, "100%"),
        (1.12, "112%"),
    ],
)
def test_a_ratio_is_never_rounded_to_nothing_or_to_everything(value: float, text: str) -> None:
    assert units.ratio(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), (1_234_567.0, "1,234,567"), (15.63, "15.6"), (float("inf"), "inf")]
)
def test_counts_have_separated_thousands(value: float, text: str) -> None:
    assert units.count(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (0.0042, "4 ms"),
        (0.9999, "1 s"),
        (1.5, "1.5 s"),
        (9.96, "10 s"),
        (59.6, "1 min"),
        (185, "3 min 5 s"),
        (7800, "2 h 10 min"),
        (7200, "2 h"),
        (442_800, "5 d 3 h"),
        (-12, "-12 s"),
    ],
)
def test_durations_have_two_units_at_most(seconds: float, text: str) -> None:
    assert units.duration(seconds) == text


@pytest.mark.parametrize(
    ("t", "text"),
    [(100.0, "just now"), (99.5, "just now"), (88.0, "12 s ago"), (100.4, "just now"), (160.0, "in 1 min")],
)
def test_an_age_tells_of_a_clock_that_runs_ahead(t: float, text: str) -> None:
    assert units.ago(t, now=100.0) == text


def test_moments_are_in_utc_and_say_so() -> None:
    assert units.moment(1_790_000_000.9) == "2026-09-21 14:13:20 UTC"
