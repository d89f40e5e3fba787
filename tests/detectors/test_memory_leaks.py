"""gpu-memory-leak and host-memory-leak: memory of a process that only grows."""

import math
import pickle
import random
from collections.abc import Callable

import pytest

from oomwatch.detectors.base import LEVEL, HeldSample, RankSample, State
from oomwatch.observations import Absent
from tests.detectors.leaking import (
    DAY,
    GIB,
    HOUR,
    MIB,
    MINUTE,
    Course,
    Rank,
    allocator,
    gpu_detector,
    held,
    host_detector,
    hosted,
    steady_load,
    watch,
)

Curve = Callable[[float], float]


def by_night(t: float) -> float:
    """Hours of work until ``t``, when work goes on for twelve hours of each day."""
    days, rest = divmod(t, DAY)
    return 12 * days + min(12.0, rest / HOUR)


# --- device memory -------------------------------------------------------------------------------------------------


def on_device(
    curve: Curve, days: float, *, total: int = 80 * GIB, load: Callable[[float], RankSample] | None = None
) -> Course:
    return watch(
        gpu_detector(), days * DAY, lambda t: held(t, curve(t), total=total), every=120, also=load or steady_load()
    )


def test_memory_that_does_not_grow_is_clear() -> None:
    course = on_device(lambda _t: 70 * GIB, 2)
    assert course.states() == ["unknown", "clear"]
    assert course.last.evidence["floor_bytes"] == 70 * GIB


@pytest.mark.parametrize(("mib_per_hour", "hours"), [(32, 24), (64, 12), (512, 7)])
def test_a_leak_is_a_ticket_long_before_the_device_is_full(mib_per_hour: float, hours: float) -> None:
    onset = 8 * HOUR
    course = on_device(lambda t: 60 * GIB + max(0.0, t - onset) / HOUR * mib_per_hour * MIB, 2)
    assert onset < course.first("ticket") < onset + hours * HOUR
    assert "leak or fragmentation" in course.last.summary
    assert course.last.evidence["slope_bytes_per_hour"] == pytest.approx(mib_per_hour * MIB, rel=0.15)


def test_growth_below_the_ticket_stays_silent() -> None:
    course = on_device(lambda t: 60 * GIB + min(200 * MIB, t / DAY * 100 * MIB), 4)
    assert course.worst == "clear"


def test_half_a_percent_of_a_big_device_is_more_than_256_mib() -> None:
    def grown(total: int) -> State:
        return on_device(
            lambda t: 20 * GIB + min(330 * MIB, max(0.0, t - 8 * HOUR) / HOUR * 32 * MIB), 0.8, total=total
        ).worst

    assert grown(24 * GIB) == "ticket"
    assert grown(80 * GIB) == "clear"


def test_it_pages_when_the_device_is_full_within_half_a_day() -> None:
    onset, free = 8 * HOUR, 12 * GIB
    course = on_device(lambda t: 68 * GIB + max(0.0, t - onset) / HOUR * 512 * MIB, 1.2)
    page = course.first("page")
    left = (onset + free / (512 * MIB) * HOUR - page) / HOUR
    assert 8 < left <= 13
    at_page = next(finding for t, finding in course.findings if t == page)
    assert at_page.eta is not None
    assert at_page.eta.seconds == pytest.approx(left * HOUR, rel=0.15)


def test_a_leak_that_sleeps_at_night_is_one_ticket() -> None:
    course = on_device(lambda t: 60 * GIB + by_night(t) * 100 * MIB, 4)
    assert course.states() == ["unknown", "clear", "info", "ticket"]


def test_what_is_allocated_while_warming_up_is_no_growth() -> None:
    course = on_device(lambda t: 50 * GIB + min(3 * GIB, t / (20 * MINUTE) * 3 * GIB), 1)
    assert course.worst == "clear"


def test_the_warm_up_lasts_until_the_engine_has_served_something() -> None:
    rank = Rank()

    def load(t: float) -> RankSample:
        return rank.reading(t, 10, running=5 if t > 3 * HOUR else 0)

    course = on_device(lambda t: 50 * GIB + (2 * GIB if t > 3 * HOUR + 600 else 0), 1, load=load)
    assert course.worst == "clear"


@pytest.mark.parametrize("hours", [1, 3, 8])
def test_a_cache_that_fills_up_and_stops_is_no_leak(hours: float) -> None:
    course = on_device(lambda t: 60 * GIB + 2 * GIB * (1 - math.exp(-t / (hours * HOUR))), 4)
    assert LEVEL[course.worst] < LEVEL["ticket"]
    assert course.last.state == "clear"


def test_growth_with_every_new_record_of_load_is_the_allocators_way() -> None:
    rank, dice = Rank(), random.Random(4)
    most = 0.0
    level = {"now": 60.0 * GIB}

    def load(t: float) -> RankSample:
        nonlocal most
        running = max(1.0, (4 + 40 * t / (4 * DAY)) * dice.uniform(0.3, 1.0))
        if running > most:
            level["now"] += (running - most) * 100 * MIB
            most = running
        return rank.reading(t, 100, running=running)

    assert LEVEL[on_device(lambda _t: level["now"], 4, load=load).worst] < LEVEL["ticket"]


def test_ever_rarer_jumps_of_an_allocator_are_no_leak() -> None:
    """Records of something that is not seen: the highest of exchangeable draws so far."""
    for seed in range(3):
        dice = random.Random(seed)
        peak = {"now": 0.0}

        def curve(_t: float, dice: random.Random = dice, peak: dict[str, float] = peak) -> float:
            peak["now"] = max(peak["now"], dice.lognormvariate(0, 0.6))
            return 60 * GIB + peak["now"] * 400 * MIB

        assert LEVEL[on_device(curve, 3).worst] < LEVEL["ticket"]


def test_one_jump_is_no_leak() -> None:
    course = on_device(lambda t: (60 if t < DAY else 63) * GIB, 3)
    assert LEVEL[course.worst] < LEVEL["ticket"]


def sleeping(floors: list[float], up: float = 60 * GIB) -> Course:
    """Half an hour awake, a quarter of an hour asleep, again and again."""

    def sample(t: float) -> object:
        cycle, at = divmod(t, 45 * MINUTE)
        asleep = at >= 30 * MINUTE
        used = floors[int(cycle)] if asleep else up
        return held(t, used, segment=2 * int(cycle) + asleep + 1, asleep=asleep)

    return watch(gpu_detector(), len(floors) * 45 * MINUTE, sample, every=15, also=steady_load())  # type: ignore[arg-type]  # held samples


def test_sleep_and_wake_is_no_growth() -> None:
    assert sleeping([4 * GIB] * 12).worst == "clear"


def test_what_is_held_asleep_is_a_series_of_its_own() -> None:
    course = sleeping(
        [4.1 * GIB, 11.5 * GIB, 25 * GIB, 23.3 * GIB, 24.8 * GIB, 23.4 * GIB, 24.4 * GIB, 24.6 * GIB, 23 * GIB]
    )
    assert course.first("info") == pytest.approx(75 * MINUTE, abs=60)
    assert course.first("ticket") == pytest.approx(120 * MINUTE, abs=60)
    assert course.last.state == "info"
    assert course.last.evidence["asleep_first_floor_bytes"] == pytest.approx(4.1 * GIB, rel=0.01)


def test_a_reload_begins_anew() -> None:
    detector = gpu_detector()
    load = steady_load()
    watch(detector, DAY, lambda t: held(t, 60 * GIB + t / HOUR * 100 * MIB), every=60, also=load)
    assert detector.conclude(DAY).state == "ticket"
    course = watch(detector, 2 * DAY, lambda t: held(t, 65 * GIB, segment=2), start=DAY, every=60, also=load)
    assert course.last.state == "clear"


def test_a_device_that_falls_silent_is_unknown() -> None:
    detector = gpu_detector()
    watch(detector, DAY, lambda t: held(t, 60 * GIB), every=60, also=steady_load())
    assert detector.conclude(DAY + 500).state == "clear"
    assert detector.conclude(DAY + 700).state == "unknown"


# --- with the probe inside the process ------------------------------------------------------------------------------


ONSET = 8 * HOUR
PACE = 512 * MIB / HOUR


def probed(live: float, fragments: float, outside: float = 0.0, *, until: float = 20 * HOUR) -> Course:
    """Growth of 512 MiB an hour, of which these shares are tensors, free pieces, and none of PyTorch's affair."""
    load = steady_load()
    detector = gpu_detector()

    def used(t: float) -> tuple[float, float, float]:
        grown = max(0.0, t - ONSET) * PACE
        allocated = 50 * GIB + live * grown
        reserved = 52 * GIB + (live + fragments) * grown
        return allocated, reserved, 60 * GIB + (live + fragments + outside) * grown

    def sample(t: float) -> HeldSample:
        allocated, reserved, process = used(t)
        detector.observe(allocator(t, allocated + (MIB * 700 if t % 1200 else 0), reserved))
        return held(t, process)

    return watch(detector, until, sample, every=300, also=load)


@pytest.mark.parametrize(
    ("live", "fragments", "outside", "verdict", "killer"),
    [
        (1.0, 0.0, 0.0, None, None),
        (0.55, 0.45, 0.0, None, None),
        (0.45, 0.55, 0.0, "unaccounted-growth", "fragmentation"),
        (0.0, 1.0, 0.0, "unaccounted-growth", "fragmentation"),
        (0.0, 0.0, 1.0, None, None),
    ],
)
def test_growth_is_a_leak_or_fragmentation_by_what_most_of_it_is(
    live: float, fragments: float, outside: float, verdict: str | None, killer: str | None
) -> None:
    course = probed(live, fragments, outside)
    assert course.worst in ("ticket", "page")
    assert {(one.verdict, one.killer) for _, one in course.findings if LEVEL[one.state] >= LEVEL["info"]} == {
        (verdict, killer)
    }
    grown = course.last.evidence["growth_bytes"]
    assert isinstance(grown, int)
    for name, share in (("live", live), ("fragments", fragments), ("outside", outside)):
        assert course.last.evidence[f"{name}_growth_bytes"] == pytest.approx(share * grown, abs=300 * MIB)
    assert "leak or fragmentation" not in course.last.summary


def test_without_a_word_of_the_probe_it_stays_leak_or_fragmentation() -> None:
    course = on_device(lambda t: 60 * GIB + max(0.0, t - ONSET) * PACE, 0.8)
    assert course.worst in ("ticket", "page")
    assert course.last.verdict is None
    assert "live_growth_bytes" not in course.last.evidence
    assert "leak or fragmentation" in course.last.summary


# --- host memory ---------------------------------------------------------------------------------------------------


def on_host(
    curve: Curve, days: float, *, limit: int | None = 32 * GIB, noise: float = 20 * MIB, every: float = 120.0
) -> Course:
    dice = random.Random(2)
    return watch(
        host_detector(),
        days * DAY,
        lambda t: hosted(t, curve(t) + dice.uniform(0, noise), limit=limit),
        every=every,
        also=steady_load(),
    )


def test_host_memory_in_a_band_is_clear() -> None:
    course = on_host(lambda _t: 6.1 * GIB, 3, noise=0.35 * GIB)
    assert course.states() == ["unknown", "clear"]


@pytest.mark.parametrize("days_to_limit", [0.7, 2, 6])
def test_a_leak_that_reaches_the_limit_within_a_week_is_a_ticket_early(days_to_limit: float) -> None:
    onset, room = 6 * HOUR, 24 * GIB
    course = on_host(
        lambda t: 8 * GIB + min(room, max(0.0, t - onset) / (days_to_limit * DAY) * room), 0.25 + days_to_limit
    )
    ticket = course.first("ticket")
    assert onset < ticket < onset + 0.3 * days_to_limit * DAY
    at_ticket = next(finding for t, finding in course.findings if t == ticket)
    assert at_ticket.eta is not None
    assert at_ticket.eta.seconds == pytest.approx(onset + days_to_limit * DAY - ticket, rel=0.25)
    assert course.first("page") < onset + days_to_limit * DAY - 6 * HOUR


def test_a_leak_that_takes_longer_than_a_week_is_only_shown() -> None:
    course = on_host(lambda t: 4 * GIB + t / HOUR * 46 * MIB, 3, limit=16 * GIB)
    assert course.worst == "info"
    assert course.last.eta is not None
    assert course.last.eta.seconds > 7 * DAY


@pytest.mark.parametrize("hours", [2, 6, 12])
def test_a_cache_of_the_host_that_fills_up_is_no_leak(hours: float) -> None:
    course = on_host(lambda t: 6 * GIB + 4 * GIB * (1 - math.exp(-t / (hours * HOUR))), 4, limit=64 * GIB)
    assert LEVEL[course.worst] < LEVEL["ticket"]
    assert course.last.state == "clear"


def test_teeth_of_a_collector_are_no_leak() -> None:
    course = on_host(lambda t: 6 * GIB + (t % (5 * HOUR)) / (5 * HOUR) * 1.5 * GIB, 4)
    assert LEVEL[course.worst] < LEVEL["ticket"]


def test_the_host_is_the_limit_where_the_cgroup_has_none_or_more() -> None:
    def course(available: int) -> Course:
        return watch(
            host_detector(),
            1.5 * DAY,
            lambda t: hosted(
                t,
                8 * GIB + t / HOUR * 200 * MIB,
                limit=None,
                available=int(available - t / HOUR * 200 * MIB),
                host_total=64 * GIB,
            ),
            every=60,
            also=steady_load(),
        )

    assert course(9 * GIB).worst == "page"
    assert course(60 * GIB).worst == "info"


def test_without_any_limit_growth_is_shown_without_a_time() -> None:
    course = on_host(lambda t: 8 * GIB + t / HOUR * 300 * MIB, 1, limit=None)
    assert course.worst == "info"
    assert course.last.eta is None


def test_memory_that_cannot_be_read_is_unknown() -> None:
    course = watch(host_detector(), HOUR, lambda t: hosted(t, Absent("NO_PERMISSION")), every=60)
    assert course.states() == ["unknown"]


def test_adapters_that_fill_the_hosts_cache_are_no_leak() -> None:
    def loads(t: float) -> int:
        return min(16, int(t // (3 * HOUR)))

    def growing(known: bool) -> Course:
        return watch(
            host_detector(),
            4 * DAY,
            lambda t: hosted(t, 8 * GIB + 400 * MIB * loads(t), limit=18 * GIB, loads=loads(t) if known else 0),
            every=120,
            also=steady_load(),
        )

    assert growing(known=True).worst == "clear"
    assert LEVEL[growing(known=False).worst] >= LEVEL["ticket"]


def test_the_same_pid_with_another_start_is_another_process() -> None:
    detector = host_detector()
    load = steady_load()
    watch(detector, DAY, lambda t: hosted(t, 8 * GIB + t / HOUR * 600 * MIB), every=60, also=load)
    assert LEVEL[detector.conclude(DAY).state] >= LEVEL["ticket"]
    course = watch(detector, 1.5 * DAY, lambda t: hosted(t, 3 * GIB, start=DAY), start=DAY, every=60, also=load)
    assert course.states() == ["unknown", "clear"]


@pytest.mark.parametrize("every", [15, 60, 300])
def test_the_pace_of_readings_does_not_matter(every: float) -> None:
    course = on_host(lambda t: 8 * GIB + t / HOUR * 500 * MIB, 1, every=every)
    assert 3 * HOUR < course.first("ticket") < 12 * HOUR


def test_slow_readings_are_no_silence() -> None:
    course = on_host(lambda _t: 8 * GIB, 1, every=900)
    assert "unknown" not in course.states()[1:]


def test_what_was_learnt_outlives_the_daemon_and_is_small() -> None:
    gpu, host = gpu_detector(), host_detector()
    load = steady_load()
    watch(gpu, 3 * DAY, lambda t: held(t, 60 * GIB + t / HOUR * 100 * MIB), every=60, also=load)
    watch(host, 3 * DAY, lambda t: hosted(t, 8 * GIB + t / HOUR * 100 * MIB), every=60, also=load)
    for detector in (gpu, host):
        saved = pickle.dumps(detector)
        assert len(saved) < 40_000
        assert pickle.loads(saved).conclude(3 * DAY) == detector.conclude(3 * DAY)
