"""How long a condition has held, how old the last word is, and what still stands."""

from __future__ import annotations

from oomwatch.detectors.base import CLEAR, Finding, unknown
from oomwatch.detectors.standing import Freshness, Standing, Sustained

PAGE = Finding("page", 0.9, "It hangs.", {"n": 1})
TICKET = Finding("ticket", 0.9, "It hurts.", {"n": 1})


def test_a_condition_is_timed_from_its_first_sample() -> None:
    held = Sustained()
    assert held.update(0, True) == 0
    assert held.update(40, True) == 40
    assert held.update(55, False) == 0


def test_a_short_interruption_is_forgiven() -> None:
    held = Sustained(forgive_s=60)
    held.update(0, True)
    held.update(30, True)
    assert held.update(60, False) == 30
    assert held.update(90, True) == 90
    assert held.update(151, False) == 0


def test_a_long_silence_ends_a_condition() -> None:
    held = Sustained(forgive_s=60)
    held.update(0, True)
    held.update(100, True)
    assert held.update(501, True) == 0


def test_a_page_is_fresh_for_three_minutes_or_a_few_polls() -> None:
    fresh = Freshness()
    assert fresh.stale(0)
    fresh.seen(0)
    fresh.seen(15)
    assert not fresh.stale(195)
    assert fresh.stale(196)
    fresh.seen(200)
    fresh.seen(490)
    assert not fresh.stale(1000)
    assert fresh.stale(490 + 730)


def test_what_was_raised_stays_with_its_numbers_until_it_has_been_well_for_long_enough() -> None:
    standing = Standing(page_s=900, ticket_s=900)
    assert standing.settle(0, PAGE) == PAGE
    later = standing.settle(300, CLEAR)
    assert (later.state, later.evidence) == ("page", {"n": 1})
    assert later.summary == "It hangs. For 5 min it has eased."
    assert standing.settle(901, CLEAR) == CLEAR


def test_silence_does_not_take_a_page_back() -> None:
    standing = Standing(page_s=900, ticket_s=900)
    standing.settle(0, PAGE)
    assert standing.settle(600, unknown("no fresh page of metrics")).summary == (
        "It hangs. For 10 min no fresh page tells more."
    )
    assert standing.settle(901, unknown("no fresh page of metrics")).state == "unknown"


def test_a_page_that_eases_to_a_ticket_shows_the_ticket_s_numbers_after_its_hold() -> None:
    standing = Standing(page_s=900, ticket_s=3600)
    standing.settle(0, PAGE)
    assert standing.settle(100, TICKET).state == "page"
    assert standing.settle(1000, TICKET) == TICKET


def test_a_new_life_clears_what_stood() -> None:
    standing = Standing()
    standing.settle(0, PAGE)
    standing.reset()
    assert standing.settle(1, CLEAR) == CLEAR


def test_asking_twice_changes_nothing() -> None:
    standing = Standing()
    standing.settle(0, TICKET)
    assert standing.settle(60, CLEAR) == standing.settle(60, CLEAR)
