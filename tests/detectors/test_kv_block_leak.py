"""kv-block-leak: blocks that no request owns."""

import math
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from oomwatch.detectors.base import LEVEL, Finding, OwnersSample, RankSample, State
from oomwatch.detectors.leak import KvBlockLeak
from oomwatch.observations import NOT_KNOWN, Pool, known
from oomwatch.sources.vllm import meaning, pages
from tests.detectors.leaking import (
    DAY,
    FACTS,
    HOUR,
    MINUTE,
    Course,
    Rank,
    Traffic,
    kv_detector,
    owned,
    watch,
    without,
)

CAPTURES = Path(__file__).parent.parent / "data" / "captures"


def idle_with(share: float, minutes: float = 20, **settings: float) -> Course:
    rank = Rank(blocks=10_000)
    return watch(kv_detector(**settings), minutes * MINUTE, lambda t: rank.reading(t, 10_000 * share))


# --- nothing runs: used blocks must be 0 ---------------------------------------------------------------------------


def test_an_idle_engine_without_used_blocks_is_clear_and_says_so_in_numbers() -> None:
    course = idle_with(0)
    assert course.worst == "clear"
    assert course.last.evidence["floor_blocks"] == 0
    assert course.last.evidence["pool_blocks"] == 10_000


@pytest.mark.parametrize(
    ("share", "state"),
    [
        (0.0, "clear"),
        (0.0002, "clear"),
        (0.002, "info"),
        (0.029, "info"),
        (0.03, "ticket"),
        (0.149, "ticket"),
        (0.15, "page"),
    ],
)
def test_blocks_used_while_nothing_runs_are_lost_for_sure(share: float, state: State) -> None:
    assert idle_with(share).worst == state


def test_one_reading_alone_proves_nothing() -> None:
    detector, rank = kv_detector(), Rank()
    detector.observe(rank.reading(0, 2000))
    assert detector.conclude(0).state != "page"
    detector.observe(rank.reading(15, 2000))
    assert detector.conclude(15).state == "page"


def test_two_idle_moments_within_an_hour_confirm_each_other_however_busy_it_was_between() -> None:
    detector, rank = kv_detector(), Rank()

    def sample(t: float) -> RankSample:
        return rank.reading(t, 800) if t in (0, 1800) else rank.reading(t, 3000, running=40)

    course = watch(detector, 2000, sample)
    assert course.first("page") == 1800


def test_the_number_of_lost_blocks_its_pace_and_the_time_left() -> None:
    rank = Rank()

    def sample(t: float) -> RankSample:
        busy = t % 600 < 300
        return rank.reading(t, 100 * t / HOUR + (900 if busy else 0), running=9 if busy else 0)

    last = watch(kv_detector(), 6 * HOUR + 600, sample).last
    assert last.evidence["floor_blocks"] == pytest.approx(615, abs=6)
    assert last.evidence["slope_blocks_per_hour"] == pytest.approx(100, rel=0.05)
    assert last.eta is not None
    assert last.eta.seconds == pytest.approx((4096 - 615) / 100 * HOUR, rel=0.1)
    assert last.eta.low is not None
    assert last.eta.high is not None
    assert last.eta.low <= last.eta.seconds <= last.eta.high
    assert "of 4,096 KV blocks" in last.summary


def test_the_pace_of_a_loss_is_that_since_it_began() -> None:
    rank = Rank()

    def sample(t: float) -> RankSample:
        return rank.reading(t, max(0.0, t - 2 * DAY) / HOUR * 200)

    last = watch(kv_detector(), 2 * DAY + 3 * HOUR, sample, every=60).last
    assert last.eta is not None
    assert last.eta.seconds == pytest.approx((4096 - 600) / 200 * HOUR, rel=0.1)


def test_a_small_loss_pages_only_when_the_pool_is_gone_within_half_a_day() -> None:
    def growing(per_hour: float) -> Course:
        rank = Rank(blocks=10_000)
        return watch(kv_detector(), 10 * HOUR, lambda t: rank.reading(t, min(1400, per_hour * t / HOUR)), every=60)

    assert growing(1000).worst == "page"
    assert growing(130).worst == "ticket"


def test_traffic_that_undercuts_what_seemed_lost_takes_it_back() -> None:
    detector, rank = kv_detector(page_hold=60, ticket_hold=120), Rank()
    assert watch(detector, 600, lambda t: rank.reading(t, 2000)).last.state == "page"
    after = watch(detector, 1200, lambda t: rank.reading(t, 10, running=1), start=600)
    assert after.states() == ["page", "ticket", "clear"]


# --- more than all requests can own --------------------------------------------------------------------------------


@pytest.mark.parametrize(("used", "state"), [(1024, "unknown"), (1100, "info"), (1200, "ticket"), (2000, "page")])
def test_one_request_owns_at_most_the_longest_sequence(used: float, state: State) -> None:
    """8,192 tokens are 512 blocks; another request's worth is slack."""
    rank = Rank()
    assert watch(kv_detector(), 600, lambda t: rank.reading(t, used, running=1)).worst == state


def test_an_older_page_without_the_pools_tokens_needs_more_room_for_doubt() -> None:
    """A model with several kinds of attention takes blocks of each for the same token."""

    def course(used: float) -> Course:
        rank = Rank(blocks=16_000)

        def sample(t: float) -> RankSample:
            whole = rank.reading(t, used, running=1)
            return whole._replace(reading=replace(whole.reading, pool=replace(whole.reading.pool, tokens=NOT_KNOWN)))

        return watch(kv_detector(), 600, sample)

    assert LEVEL[course(3000).worst] < LEVEL["info"]
    assert course(6000).worst == "page"


def test_a_bound_that_requests_broke_once_is_not_used_again() -> None:
    detector, rank = kv_detector(page_hold=60, ticket_hold=60), Rank()
    assert watch(detector, 600, lambda t: rank.reading(t, 2000, running=1)).last.state == "page"
    watch(detector, 1200, lambda t: rank.reading(t, 0), start=600)
    assert watch(detector, 1800, lambda t: rank.reading(t, 2000, running=1), start=1200).last.state == "clear"
    assert watch(detector, 2400, lambda t: rank.reading(t, 1000), start=1800).last.state == "page"


def test_a_frozen_page_with_requests_on_it_is_no_evidence() -> None:
    """Before 0.10.2 the gauges stay where an abort that emptied the engine found them."""
    rank = Rank(facts=type(FACTS)("llama"))
    busy = watch(detector := kv_detector(), HOUR, lambda t: rank.reading(t, 40, running=1))
    assert busy.last.state == "clear"
    stuck = rank.reading(HOUR, 3900, running=1)
    assert watch(detector, 12 * HOUR, lambda t: stuck._replace(t=t), start=HOUR, every=60).worst == "clear"


def test_what_requests_can_own_is_not_known_without_their_longest_length() -> None:
    rank = Rank(facts=type(FACTS)("llama"))
    assert LEVEL[watch(kv_detector(), 600, lambda t: rank.reading(t, 4000, running=1)).worst] < LEVEL["info"]


def test_requests_that_wait_for_a_transfer_own_blocks_too() -> None:
    rank = Rank()
    course = watch(kv_detector(), 600, lambda t: rank.reading(t, 2000, running=1, waiting=5, deferred=5))
    assert LEVEL[course.worst] < LEVEL["info"]


# --- the end of it -------------------------------------------------------------------------------------------------


def test_an_engine_that_serves_no_more_for_lack_of_blocks_pages_after_two_minutes() -> None:
    rank = Rank(facts=type(FACTS)("llama"), connector=False)
    course = watch(kv_detector(), 600, lambda t: rank.reading(t, 3000, running=0, waiting=8))
    assert course.first("page") <= 150
    wedged = Rank(connector=True)
    slower = watch(kv_detector(), 1800, lambda t: wedged.reading(t, 3000, running=0, waiting=8))
    assert 600 <= slower.first("page") <= 700


def test_requests_that_wait_with_little_in_use_are_no_wedge() -> None:
    rank = Rank(connector=True)
    assert watch(kv_detector(), 1800, lambda t: rank.reading(t, 1000, running=0, waiting=8)).worst != "page"


def test_a_pool_that_flaps_full_while_requests_are_preempted_is_no_leak() -> None:
    rank = Rank()
    usage = [0.38, 0.91, 1.0, 0.56, 0.53, 1.0]

    def sample(t: float) -> RankSample:
        return rank.reading(t, 4096 * usage[int(t / 15) % 6], running=20, waiting=18)

    assert LEVEL[watch(kv_detector(), 12 * HOUR, sample).worst] < LEVEL["ticket"]


# --- connectors ----------------------------------------------------------------------------------------------------


def test_a_connector_may_hold_blocks_of_finished_requests_for_a_while() -> None:
    rank = Rank(connector=True)

    def sample(t: float) -> RankSample:
        return rank.reading(t, 3500 if 600 <= t < 1080 else 0)

    assert watch(kv_detector(), HOUR, sample).worst == "clear"


@pytest.mark.parametrize(("share", "state"), [(0.44, "clear"), (0.45, "ticket"), (0.49, "ticket"), (0.5, "page")])
def test_what_a_connector_holds_for_longer_is_lost_when_it_is_much(share: float, state: State) -> None:
    rank = Rank(blocks=4100, connector=True)
    course = watch(kv_detector(), HOUR, lambda t: rank.reading(t, 4100 * share))
    assert course.worst == state
    assert course.first("info") >= 600


def test_an_engine_that_once_gave_back_most_must_exceed_its_own_past_to_page() -> None:
    detector, rank = kv_detector(), Rank(connector=True)
    watch(detector, HOUR, lambda t: rank.reading(t, 4096 * 0.7))
    watch(detector, 3 * HOUR, lambda t: rank.reading(t, 0), start=HOUR)
    assert watch(detector, 5 * HOUR, lambda t: rank.reading(t, 4096 * 0.7), start=3 * HOUR).worst == "ticket"
    assert watch(detector, 7 * HOUR, lambda t: rank.reading(t, 4096 * 0.9), start=5 * HOUR).worst == "page"


# --- engines that are never idle -----------------------------------------------------------------------------------


def never_idle(
    days: float,
    lost_per_hour: float = 0.0,
    since: float = DAY,
    drift: Callable[[float], float] = lambda _t: 1.0,
    **settings: float,
) -> Course:
    rank = Rank(blocks=8000, facts=type(FACTS)("llama"))
    traffic = Traffic(seed=3, quiet=6, busy=60)

    def sample(t: float) -> RankSample:
        running, owned = traffic.step(t, drift(t))
        lost = max(0.0, t - since) / HOUR * lost_per_hour
        return rank.reading(t, min(8000, owned + lost), running=running)

    return watch(kv_detector(**settings), days * DAY, sample, every=45)


def test_traffic_that_never_stops_is_no_leak() -> None:
    course = never_idle(4)
    assert course.worst == "clear"
    assert course.last.state == "clear"


def test_requests_that_grow_longer_are_no_leak() -> None:
    assert never_idle(4, drift=lambda t: 1 + 0.3 * t / DAY).worst == "clear"


@pytest.mark.parametrize("per_hour", [100, 300])
def test_a_leak_shows_in_the_floor_under_low_load(per_hour: float) -> None:
    hours_to_full = 8000 / per_hour
    course = never_idle(1 + hours_to_full * 0.9 / 24, per_hour, unusual_for=100 * DAY)
    assert course.first("ticket") > DAY
    assert course.first("page") < DAY + 0.85 * hours_to_full * HOUR
    page = next(finding for _, finding in course.findings if finding.state == "page")
    assert page.evidence["method"] == "low load"


def a_busy_day(
    lost: Callable[[float], float] = lambda _t: 0.0,
    longer: Callable[[float], float] = lambda _t: 1.0,
    traffic: Traffic | None = None,
    connector: bool = False,
) -> Callable[[float], RankSample]:
    """A day of six to 60 requests at a time, and the next; ``longer`` makes all that come later longer."""
    rank = Rank(blocks=8000, facts=type(FACTS)("llama"), connector=connector)
    requests = traffic or Traffic(seed=5, quiet=6, busy=60)

    def sample(t: float) -> RankSample:
        running, owned = requests.step(t, longer(t))
        return rank.reading(t, min(8000, owned + lost(t)), running=running)

    return sample


def test_a_leak_within_an_hour_under_load_shows_in_blocks_that_so_many_requests_do_not_own() -> None:
    course = watch(kv_detector(), DAY + HOUR, a_busy_day(lost=lambda t: max(0.0, t - DAY) / HOUR * 6000))
    assert course.first("ticket") < DAY + 35 * MINUTE
    assert course.first("page") < DAY + 45 * MINUTE
    page = next(finding for _, finding in course.findings if finding.state == "page")
    assert page.evidence["method"] == "more than requests usually own"
    assert page.evidence["floor_ratio"] == pytest.approx(0.3, abs=0.05)
    assert "were in use for 10 min beyond 2 times what so many requests usually own" in page.summary
    assert page.eta is not None
    assert page.eta.seconds == pytest.approx(HOUR, rel=0.3)


def test_beside_a_loss_that_is_known_less_of_it_pages() -> None:
    def lost(t: float) -> float:
        return 400 + max(0.0, t - DAY) / HOUR * 1500

    rank, busy, detector = Rank(blocks=8000, facts=type(FACTS)("llama")), a_busy_day(lost), kv_detector()
    watch(detector, DAY - HOUR, busy)
    assert watch(detector, DAY, lambda t: rank.reading(t, lost(t)), start=DAY - HOUR).last.state == "ticket"
    course = watch(detector, DAY + 2 * HOUR, busy, start=DAY)
    page = course.first("page")
    assert page < DAY + 75 * MINUTE
    assert lost(page) < 0.3 * 8000


@pytest.mark.parametrize("longer", ["prompts", "generations", "neither"])
def test_requests_that_are_longer_than_ever_tell_so_before_they_end(longer: str) -> None:
    busy = a_busy_day(longer=lambda t: 6.0 if t > DAY else 1.0, traffic=Traffic(seed=5, quiet=20, busy=40))
    prompts = generated = 0.0

    def sample(t: float) -> RankSample:
        nonlocal prompts, generated
        page = busy(t)
        running = known(page.reading.running) or 0.0
        prompts += (600 if longer == "prompts" and t > DAY else 100) * running
        generated += (600 if longer == "generations" and t > DAY else 100) * running
        return page._replace(reading=replace(page.reading, prompt_tokens=prompts, generation_tokens=generated))

    assert (watch(kv_detector(), DAY + HOUR, sample).worst == "clear") == (longer != "neither")


def test_what_is_in_use_before_and_after_a_gap_was_not_so_all_the_time() -> None:
    def lost(t: float) -> float:
        return 5000 if DAY - 2 * MINUTE < t < DAY + 15 * MINUTE else 0

    assert watch(kv_detector(), DAY + HOUR, a_busy_day(lost)).worst == "page"
    busy, detector = a_busy_day(lost), kv_detector()
    assert watch(detector, DAY, busy).worst == "clear"
    assert watch(detector, DAY + HOUR, busy, start=DAY + 13 * MINUTE).worst == "clear"


def test_where_a_connector_holds_blocks_half_of_the_pool_counts_and_for_longer() -> None:
    def with_lost(share: float) -> Course:
        busy = a_busy_day(lost=lambda t: share * 8000 if t > DAY else 0, connector=True)
        return watch(kv_detector(), DAY + HOUR, busy)

    assert with_lost(0.45).worst == "clear"
    assert DAY + 29 * MINUTE <= with_lost(0.65).first("page") < DAY + 35 * MINUTE


def test_a_leak_that_keeps_the_pool_full_shows_in_how_few_requests_fill_it() -> None:
    """Requests wait all day and the gauge stands at 98 %; what falls is the number that runs."""
    rank = Rank(blocks=8000, facts=type(FACTS)("llama"))
    traffic = Traffic(seed=7, quiet=10, busy=60)

    def sample(t: float) -> RankSample:
        if t < DAY:
            running, owned = traffic.step(t)
            return rank.reading(t, owned, running=running)
        lost = (t - DAY) / HOUR * 250
        room = (0.98 * 8000 - lost) / 33
        return rank.reading(t, 0.98 * 8000, running=round(max(3, room + 4 * math.sin(t))), waiting=12)

    course = watch(kv_detector(), DAY + 24 * HOUR, sample, every=45)
    assert DAY < course.first("page") < DAY + 22 * HOUR


def test_a_full_pool_of_longer_requests_is_no_leak() -> None:
    """Fewer run because each is longer, and those that finish say so."""
    rank = Rank(blocks=8000, facts=type(FACTS)("llama"))
    traffic = Traffic(seed=7, quiet=10, busy=60)
    tokens = {"prompt": 0.0, "finished": 0.0}

    def sample(t: float) -> RankSample:
        length = 1.0 if t < DAY else 1 + 2 * min(1.0, (t - DAY) / (8 * HOUR))
        tokens["prompt"] += 10 * 33 * 16 * length
        tokens["finished"] += 10
        if t < DAY:
            running, owned = traffic.step(t)
            whole = rank.reading(t, owned, running=running)
        else:
            whole = rank.reading(t, 7840, running=round(7840 / 33 / length + 4 * math.sin(t)), waiting=12)
        counters = replace(
            whole.reading,
            request_prompt_tokens=tokens["prompt"],
            request_generation_tokens=0.0,
            finished={"stop": tokens["finished"]},
        )
        return whole._replace(reading=counters)

    assert LEVEL[watch(kv_detector(), 2 * DAY, sample, every=45).worst] < LEVEL["ticket"]


def test_waiting_requests_own_nothing_unless_a_connector_loads_for_them() -> None:
    facts = replace(FACTS, kv_connector=False)
    rank = Rank(facts=facts)

    def old(sample: RankSample) -> RankSample:
        return without(sample, "waiting_deferred", "waiting_capacity")

    seen = watch(kv_detector(), 60, lambda t: old(rank.reading(t, 1000, running=0, waiting=3)))
    assert seen.last.state == "page"
    untold = Rank()
    unsure = watch(kv_detector(), 60, lambda t: old(untold.reading(t, 1000, running=0, waiting=3)))
    assert LEVEL[unsure.worst] < LEVEL["info"]


# --- lives, gaps, missing series -----------------------------------------------------------------------------------


def test_nothing_is_known_before_the_first_reading() -> None:
    assert kv_detector().conclude(0).state == "unknown"


@pytest.mark.parametrize("series", ["usage", "running", "waiting"])
def test_without_a_series_nothing_is_known(series: str) -> None:
    rank = Rank()
    course = watch(kv_detector(), HOUR, lambda t: without(rank.reading(t, 0), series))
    assert course.states() == ["unknown"]
    assert course.last.reason


def test_an_engine_that_is_always_full_is_unknown_until_there_are_floors() -> None:
    rank = Rank(facts=type(FACTS)("llama"))
    course = watch(kv_detector(), 600, lambda t: rank.reading(t, 4000, running=50, waiting=9))
    assert course.last.state == "unknown"
    assert course.last.reason == "warming up"


def test_the_share_alone_will_do_where_the_number_of_blocks_is_not_known() -> None:
    rank = Rank()

    def sample(t: float) -> RankSample:
        whole = rank.reading(t, 800)
        return whole._replace(reading=replace(whole.reading, pool=Pool()))

    last = watch(kv_detector(), 600, sample).last
    assert last.state == "page"
    assert "floor_blocks" not in last.evidence
    assert "of the KV pool" in last.summary


def test_a_restart_gives_every_block_back() -> None:
    detector, rank = kv_detector(), Rank()
    assert watch(detector, 600, lambda t: rank.reading(t, 2000)).last.state == "page"
    rank.segment = 2
    assert watch(detector, 700, lambda t: rank.reading(t, 0), start=600).states() == ["clear"]


def test_asleep_and_silent_engines_are_unknown() -> None:
    detector, rank = kv_detector(), Rank()
    watch(detector, 600, lambda t: rank.reading(t, 2000))
    assert detector.conclude(585 + 299).state == "page"
    assert detector.conclude(585 + 301).state == "unknown"
    detector.observe(rank.reading(1000, 0, sleep_level="discard_all"))
    assert detector.conclude(1000).reason == "asleep"


def test_a_page_outlasts_its_condition_by_a_quarter_of_an_hour() -> None:
    detector, rank = kv_detector(), Rank()
    watch(detector, 600, lambda t: rank.reading(t, 2000))
    after = watch(detector, 3 * HOUR, lambda t: rank.reading(t, 10, running=1), start=600)
    assert after.states() == ["page", "ticket", "clear"]
    assert [t for t, finding in after.findings if finding.state == "page"][-1] == pytest.approx(600 + 900, abs=30)


@pytest.mark.parametrize("interval", [5, 15, 40, 90])
def test_the_polling_interval_does_not_matter(interval: float) -> None:
    rank = Rank()
    course = watch(kv_detector(), HOUR, lambda t: rank.reading(t, 500 * t / HOUR), every=interval)
    assert course.first("ticket") == pytest.approx(0.03 * 4096 / 500 * HOUR, abs=3 * interval)


def test_asking_twice_changes_nothing() -> None:
    detector, rank = kv_detector(), Rank()
    watch(detector, 600, lambda t: rank.reading(t, 2000))
    assert detector.conclude(600) == detector.conclude(600)


def test_what_was_learnt_outlives_the_daemon() -> None:
    detector, rank = kv_detector(), Rank()
    watch(detector, 600, lambda t: rank.reading(t, 2000))
    revived: KvBlockLeak = pickle.loads(pickle.dumps(detector))
    assert revived.conclude(610) == detector.conclude(610)


def test_a_rank_takes_little_memory() -> None:
    detector, rank = kv_detector(), Rank(blocks=8000, facts=type(FACTS)("llama"))
    traffic = Traffic(seed=5, quiet=0, busy=200)

    def sample(t: float) -> RankSample:
        running, owned = traffic.step(t)
        return rank.reading(t, owned, running=running)

    watch(detector, 2 * DAY, sample, every=60)
    assert len(pickle.dumps(detector)) < 60_000


# --- pages of real engines -----------------------------------------------------------------------------------------


def page_of(capture: str, t: float, version: str) -> RankSample:
    body = (CAPTURES / capture).read_bytes()
    reading = meaning.read_page(pages.read(body), version)
    return RankSample(
        t=t,
        engine="tiny",
        reading=reading.ranks[0],
        facts=FACTS,
        segment=1,
        segment_start=0.0,
        since=None,
        ready_since=0.0,
        version=meaning.release(version),
    )


def test_a_real_engine_that_forgets_every_40th_block_is_seen_block_by_block() -> None:
    detector = kv_detector()
    course: list[tuple[State, object]] = []
    t = 0.0
    for capture in (
        "05-tiny-pool-start",
        "71-kvleak-idle-after-batch-1",
        "74-kvleak-idle-after-batch-4",
        "78-kvleak-idle-after-batch-8",
    ):
        for _ in range(3):
            detector.observe(page_of(f"0.32.0/{capture}.prom", t, "0.32.0"))
            t += 5
        finding = detector.conclude(t)
        course.append((finding.state, finding.evidence["floor_blocks"]))
    assert course == [("clear", 0), ("info", 2), ("ticket", 10), ("page", 21)]


def test_the_deadlock_of_a_real_engine_without_blocks_pages() -> None:
    detector = kv_detector()
    for t in range(0, 180, 5):
        detector.observe(page_of("0.32.0/80-kvleak-exhausted-deadlock.prom", float(t), "0.32.0"))
    assert detector.conclude(180).state == "page"
    assert detector.conclude(180).evidence["method"] == "wedge"


@pytest.mark.parametrize(
    ("capture", "version"),
    [
        ("0.9.2-V1-fakeworker/03-idle-after.prom", "0.9.2"),
        ("0.10.2-fakeworker/04-idle-after-aborts.prom", "0.10.2"),
        ("0.23.0-fakeworker/04-idle-after-aborts.prom", "0.23.0"),
        ("0.32.0/07-tiny-pool-idle-after-prefix-on.prom", "0.32.0"),
        ("0.32.0/11-idle-15s-after-abort.prom", "0.32.0"),
    ],
)
def test_real_healthy_engines_own_no_block_at_idle_whatever_their_version_counts(capture: str, version: str) -> None:
    detector = kv_detector()
    for t in range(0, 1200, 15):
        detector.observe(page_of(capture, float(t), version))
    finding = detector.conclude(1200)
    assert (finding.state, finding.evidence["floor_blocks"]) == ("clear", 0)


# --- the probe inside the engine core counts whose each block is ----------------------------------------------------


def counted(*samples: OwnersSample, detector: KvBlockLeak | None = None) -> Finding:
    detector = detector or kv_detector()
    for sample in samples:
        detector.observe(sample)
    return detector.conclude(samples[-1].t)


@pytest.mark.parametrize(
    ("ownerless", "state"),
    [(0, "clear"), (1, "info"), (299, "info"), (300, "ticket"), (1499, "ticket"), (1500, "page")],
)
def test_blocks_without_an_owner_are_lost_however_busy_the_engine_is(ownerless: int, state: State) -> None:
    finding = counted(*(owned(t, ownerless, living=5000, blocks=10_000) for t in (0, 5)))
    assert finding.state == state
    assert finding.evidence["floor_blocks"] == ownerless
    assert finding.evidence["method"] == "owners"


def test_one_count_alone_proves_nothing() -> None:
    assert counted(owned(0, 2000)).state == "unknown"


def test_what_only_one_of_two_counts_found_is_not_lost() -> None:
    assert counted(owned(0, 0), owned(5, 2000)).state == "clear"
    assert counted(owned(0, 2000), owned(5, 0)).state == "clear"


def test_ten_seconds_suffice_for_what_takes_hours_from_outside() -> None:
    detector, rank = kv_detector(), Rank()
    busy = watch(detector, 60, lambda t: rank.reading(t, 3000, running=40))
    assert busy.worst == "unknown"
    assert counted(owned(65, 700, living=2300), owned(70, 700, living=2300), detector=detector).state == "page"


def test_the_count_decides_against_what_is_inferred() -> None:
    """Finished requests whose blocks are freed later look like lost blocks from outside."""
    detector, rank = kv_detector(), Rank()
    assert watch(detector, 60, lambda t: rank.reading(t, 2000)).worst == "page"
    detector = kv_detector()
    course = watch(detector, 60, lambda t: rank.reading(t, 2000), also=lambda t: owned(t, 0, finished=2000))
    assert course.findings[1][1].state == "clear"
    assert course.worst == "clear"


def test_a_count_that_is_too_old_leaves_the_word_to_the_page() -> None:
    detector, rank = kv_detector(), Rank()
    counted(owned(0, 0), owned(5, 0), detector=detector)
    course = watch(detector, 200, lambda t: rank.reading(t, 2000), start=10)
    assert 120 < course.first("page") < 150


def test_requests_that_cannot_be_served_are_a_page_whoever_owns_the_blocks() -> None:
    detector, rank = kv_detector(), Rank()
    course = watch(detector, 300, lambda t: rank.reading(t, 2000, waiting=3), also=lambda t: owned(t, 0, finished=2000))
    assert course.last.state == "page"
    assert course.last.evidence["method"] == "wedge"


def test_a_connector_that_never_gives_blocks_back_is_found_beside_the_count() -> None:
    detector, rank = kv_detector(), Rank(connector=True)
    course = watch(detector, HOUR, lambda t: rank.reading(t, 2200), also=lambda t: owned(t, 0, finished=2200))
    assert course.last.state == "page"
    assert course.last.evidence["method"] == "idle"


def test_requests_that_live_and_neither_run_nor_wait_keep_their_blocks_for_ever() -> None:
    """One that was aborted while it waited for a transfer, and is never told of its end (vLLM issue #46283)."""
    detector, rank = kv_detector(), Rank()
    course = watch(detector, 300, lambda t: rank.reading(t, 700), also=lambda t: owned(t, 0, living=700))
    assert course.last.state == "page"
    assert course.last.evidence["method"] == "idle"


def test_living_requests_that_run_keep_their_blocks_by_right() -> None:
    detector, rank = kv_detector(), Rank()
    course = watch(detector, 300, lambda t: rank.reading(t, 700, running=4), also=lambda t: owned(t, 0, living=700))
    assert course.worst == "clear"


def test_a_restart_begins_a_new_count() -> None:
    detector = kv_detector()
    assert counted(owned(0, 2000), owned(5, 2000), detector=detector).state == "page"
    assert counted(owned(10, 0, pid=8), owned(15, 0, pid=8), detector=detector).state == "clear"


def test_the_pace_of_a_proven_loss_and_the_time_left() -> None:
    detector = kv_detector()
    course = watch(detector, 1800, lambda t: owned(t, int(t / 15) * 4, living=100), every=15)
    eta = course.last.eta
    assert eta is not None
    assert eta.seconds == pytest.approx((4096 - 480) / 4 * 15, rel=0.1)


def test_a_count_that_is_told_again_confirms_nothing() -> None:
    told = owned(0, 2000)
    assert counted(told, replace(told, t=5.0)).state == "unknown"


def test_a_core_that_cannot_tell_who_owns_nothing_leaves_the_word_to_the_page() -> None:
    rank, detector = Rank(), kv_detector()
    unclear = [replace(one, owners=replace(one.owners, ownerless=None)) for one in (owned(0, 0), owned(5, 0))]
    counted(*unclear, detector=detector)
    assert watch(detector, 60, lambda t: rank.reading(t, 2000), start=10).last.state == "page"
