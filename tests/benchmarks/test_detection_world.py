"""The simulated world of the detection benchmark: what must hold in every run, and that labels tell the truth."""

from __future__ import annotations

import io
import itertools
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from benchmarks.detection import sets
from benchmarks.detection.__main__ import OURS, Options, balanced, between_the_marks, main, outcome_of
from benchmarks.detection.alarms import Alarm, alarms_of, firings, merged
from benchmarks.detection.as_text import shortened, through_the_daemon, without_text
from benchmarks.detection.baselines import least_squares
from benchmarks.detection.blocks import BlockPool
from benchmarks.detection.engine import simulate
from benchmarks.detection.exact import simulate_exactly
from benchmarks.detection.families import FAMILIES, FAULT_CLASSES, Scenario, SetSpec, draw
from benchmarks.detection.render import EPOCH, facts, observations, page, write_recording
from benchmarks.detection.score import Outcome, first_hit, marks_table, scores
from benchmarks.detection.spec import (
    COUNTERS,
    DAY,
    HELD,
    LOST,
    OWNED,
    PREEMPTIONS,
    RESTART,
    RUNNING,
    SLEEP,
    STATE,
    UP,
    USED,
    WAITING,
    EngineSpec,
    Event,
    Holds,
    KvFault,
    RankSeries,
    Workload,
)
from benchmarks.detection.statistics import clopper_pearson, poisson_rate
from benchmarks.detection.traffic import LENGTH_FITS, Traces, Traffic, workload
from benchmarks.detection.world import Label, Run, build
from oomwatch import recording
from oomwatch.observations import EngineScrape, GpuPoll, known
from oomwatch.sources.vllm.meaning import read_page
from oomwatch.sources.vllm.pages import read

MADE_UP = Traces()
CLIENTS = SetSpec("tune", 7, {"m-small": (0, 1, 2, 3), "m-large": (0, 1, 2, 3)}, ("conversation", "code"), "all")
ENGINE = EngineSpec(blocks=4000)


def requests(rate: float, seconds: float, *, stay: float = 0.96, prefixes: int = 0, longer: float = 1.0) -> Workload:
    rng = np.random.default_rng(1)
    n = int(rate * seconds)
    output = np.clip(rng.lognormal(5.0, 0.86, n) * longer, 1, 3000).astype(np.int64)
    return Workload(
        np.sort(rng.uniform(0, seconds * 0.9, n)),
        np.clip(rng.lognormal(6.6, 1, n), 1, 4000).astype(np.int64) + (512 if prefixes else 0),
        output,
        np.where(rng.random(n) < stay, -1, rng.integers(1, np.maximum(2, output))).astype(np.int64),
        rng.integers(0, prefixes, n) if prefixes else np.full(n, -1, dtype=np.int64),
        np.full(prefixes, 512, dtype=np.int64),
    )


def times(seconds: float, every: float = 5.0) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    return np.arange(every, seconds, every)


def quiet(rank: RankSeries) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    return np.asarray((rank[RUNNING] == 0) & (rank[WAITING] == 0) & (rank[STATE] == UP))


def run_of(family: str, days: float | None = None, number: int = 0) -> Run:
    scenario = draw(family, CLIENTS, number)
    run = build(scenario if days is None else scenario._replace(days=days), MADE_UP)
    assert run is not None
    return run


# --- blocks ------------------------------------------------------------------------------------------------------


def test_a_cached_block_without_references_is_free_and_evicted_in_order_of_disuse() -> None:
    pool = BlockPool(5)  # four usable
    first, second = pool.take(2)
    pool.remember(first, "a")
    pool.remember(second, "b")
    pool.give_back([first, second])
    assert (pool.free, pool.usage) == (4, 0.0)
    assert pool.cached_prefix(["a", "b", "c"]) == [first, second]
    pool.take(3)  # the two that were never used, then the end of the sequence
    assert pool.cached_prefix(["a", "b"]) == [first]


def test_blocks_are_free_or_referenced_and_nothing_else() -> None:
    pool = BlockPool(11)
    held = pool.take(4)
    pool.touch(held[:2])
    assert pool.free + pool.referenced() == pool.usable
    pool.give_back(held)
    assert pool.free + pool.referenced() == pool.usable
    assert pool.referenced() == 2
    with pytest.raises(ValueError, match="9 blocks wanted, 8 free"):
        pool.take(9)


# --- the two engines ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("holds", "fault", "defer"),
    [
        (Holds(), KvFault(), 0.0),
        (Holds(kept_share=1, kept_cap=0.4), KvFault(), 0.0),
        (Holds(), KvFault(onset=100, abort_probability=1, abort_blocks=7), 0.0),
        (Holds(), KvFault(), 3.0),
    ],
    ids=["calm", "store connector", "leak by aborts", "remote loads"],
)
def test_the_fast_engine_shows_what_the_exact_one_shows(holds: Holds, fault: KvFault, defer: float) -> None:
    asked, t = requests(2, 300), times(400)
    engine = ENGINE._replace(defer_seconds=defer)
    fast = simulate(engine, asked, t, holds=holds, fault=fault)
    exact = simulate_exactly(engine, asked, t, holds=holds, fault=fault)
    # Which of the two reasons a request ends by is drawn, and by other dice.
    same = [c for c in range(OWNED + 1) if c not in (8, 9)]
    np.testing.assert_array_equal(fast.table[:, same], exact.table[:, same])


def test_under_pressure_the_engines_agree_in_the_mean() -> None:
    asked, t = requests(2, 300, longer=3), times(400)
    engine = EngineSpec(blocks=1000, reserve_full_prompt=False)
    fast, exact = simulate(engine, asked, t), simulate_exactly(engine, asked, t)
    assert exact[PREEMPTIONS][-1] > 100
    assert fast[PREEMPTIONS][-1] == pytest.approx(exact[PREEMPTIONS][-1], rel=0.2)
    assert fast[USED].mean() == pytest.approx(exact[USED].mean(), rel=0.1)


@pytest.mark.parametrize("exactly", [False, True], ids=["fast", "exact"])
def test_a_leak_shows_at_idle_to_the_block(exactly: bool) -> None:
    leak = KvFault(onset=50, abort_probability=1, abort_blocks=5)
    asked, t = requests(1, 400), times(600)
    rank = simulate_exactly(ENGINE, asked, t, fault=leak) if exactly else simulate(ENGINE, asked, t, fault=leak)
    idle = quiet(rank)
    assert rank[LOST][-1] > 0
    np.testing.assert_array_equal(rank[USED][idle], rank[LOST][idle])
    assert rank.first_lost == pytest.approx(float(rank.t[rank[LOST] > 0][0]), abs=5.0)


def test_a_pool_that_is_lost_leaves_requests_waiting_for_ever() -> None:
    rank = simulate(ENGINE, requests(2, 900), times(900), fault=KvFault(onset=100, one_off=0.999))
    assert rank.first_lost < rank.dead < 900
    assert rank[WAITING][-1] > 0
    assert rank[RUNNING][-1] == 0


def test_gauges_stay_where_they_were_when_an_abort_empties_an_old_engine() -> None:
    asked = requests(0.2, 600, stay=0.0)
    new = simulate(ENGINE, asked, times(700))
    old = simulate(ENGINE._replace(stats_after_abort=False, polls_holds=False), asked, times(700))
    assert (new[USED][-1], new[RUNNING][-1]) == (0, 0)
    assert old[USED][-1] > 0
    assert old[RUNNING][-1] > 0
    assert old[OWNED][-1] == 0


def test_an_aborted_request_leaves_no_trace_in_the_counters_of_finished_ones() -> None:
    rank = simulate(ENGINE, requests(1, 300, stay=0.0), times(400))
    np.testing.assert_array_equal(rank.table[-1, 8:12], 0)
    assert rank.table[-1, 6] > 0


def test_an_idle_engine_before_0_22_does_not_look_after_held_blocks() -> None:
    asked, holds = requests(1, 200), Holds(share=1.0, seconds=30.0)
    old = simulate(ENGINE._replace(polls_holds=False), asked, times(600), holds=holds)
    new = simulate(ENGINE, asked, times(600), holds=holds)
    assert old[USED][-1] == old[HELD][-1] > 0
    assert new[USED][-1] == 0


def test_a_restart_zeroes_the_counters_and_gives_back_what_was_lost() -> None:
    leak = KvFault(onset=0, abort_probability=1, abort_blocks=50)
    events = [Event(200, 260, RESTART)]
    rank = simulate(ENGINE, requests(1, 400), times(600), fault=leak, events=events)
    down = rank[STATE] != UP
    assert rank[LOST][~down & (rank.t < 200)][-1] > 0
    np.testing.assert_array_equal(rank.table[down][:, COUNTERS], 0)
    np.testing.assert_array_equal(rank[LOST][down], 0)


# --- families ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - {"saturated", "kv_saturated", "overload", "always_busy"}))
def test_what_holds_in_every_family(family: str) -> None:
    scenario = draw(family, CLIENTS, 1)
    rank = _first_day(scenario)
    blocks = scenario.engine.blocks
    assert rank[USED].max() <= blocks
    assert (rank[USED] >= 0).all()
    present = rank[STATE] == UP
    assert (rank[OWNED] + rank[LOST] + rank[HELD] <= blocks).all()
    segments = np.flatnonzero(~present)
    counters = rank.table[:, COUNTERS]
    falls = np.flatnonzero((np.diff(counters, axis=0) < 0).any(axis=1))
    assert all(fall + 1 in segments for fall in falls)
    if not scenario.fault and not scenario.connector and scenario.engine.stats_after_abort:
        np.testing.assert_array_equal(rank[USED][quiet(rank)], 0)


def _first_day(scenario: Scenario) -> RankSeries:
    rng = np.random.default_rng(scenario.seed)
    asked = workload(scenario.traffic, scenario.engine, 0.5, MADE_UP, rng)
    t = np.arange(15.0, 0.5 * DAY, 15.0)
    return simulate(scenario.engine, asked, t, holds=scenario.holds, events=scenario.events, seed=scenario.seed)


@pytest.mark.parametrize(
    "family", ["kv_finish", "kv_abort", "gpu_steady", "host_requests", "stuck_engine", "orphan_memory"]
)
def test_a_label_begins_with_the_fault_and_ends_within_the_run(family: str) -> None:
    run = run_of(family)
    label = run.label
    assert label is not None
    assert label.fault in FAULT_CLASSES
    assert 0.3 * DAY < label.onset < label.end <= run.t[-1]
    before = run.t < label.onset
    assert (run.ranks[0][LOST][before] == 0).all()
    assert (run.gpus[0].orphan[before] == 0).all()


def test_healthy_runs_have_no_label_and_lose_nothing() -> None:
    run = run_of("idle_nights", days=1.5)
    assert run.label is None
    assert all((rank[LOST] == 0).all() for rank in run.ranks)
    assert all((gpu.orphan == 0).all() for gpu in run.gpus)
    assert run.gpu_weeks == pytest.approx(len(run.ranks) * 1.5 / 7, rel=0.01)


def test_a_seed_is_a_run() -> None:
    one, again, other = (run_of("bursts", 0.3, number) for number in (0, 0, 1))
    np.testing.assert_array_equal(one.ranks[0].table, again.ranks[0].table)
    np.testing.assert_array_equal(one.host.anon, again.host.anon)
    assert one.scenario.traffic != other.scenario.traffic


def test_sleep_gives_weights_and_pool_back_and_wakes_with_the_same() -> None:
    run = run_of("sleep_wake", days=1.0)
    asleep = run.ranks[0][STATE] == 2
    assert any(event.kind == SLEEP for event in run.scenario.events)
    assert asleep.any()
    assert run.gpus[0].process[asleep].max() < 0.2 * run.gpus[0].process[~asleep].max()


# --- traffic -----------------------------------------------------------------------------------------------------


def test_made_up_lengths_have_the_quantiles_they_were_fitted_to() -> None:
    prompt, output = MADE_UP.lengths(Traffic(lengths="code"), 20000, np.random.default_rng(0))
    assert np.median(prompt) == pytest.approx(LENGTH_FITS["code"][0][5], rel=0.05)
    assert np.median(output) == pytest.approx(LENGTH_FITS["code"][1][5], rel=0.1)


def test_traffic_fills_the_share_of_the_pool_that_was_asked_for() -> None:
    traffic = Traffic(constant=True, load=0.5, leave_share=0.0, rate_cap=50.0)
    asked = workload(traffic, ENGINE, 0.2, MADE_UP, np.random.default_rng(3))
    rank = simulate(ENGINE, asked, np.arange(15.0, 0.2 * DAY, 15.0))
    assert rank[USED][200:].mean() / ENGINE.blocks == pytest.approx(0.5, abs=0.15)


# --- what the daemon sees ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["diurnal", "stale_gauges", "connector_hold", "sleep_wake", "daily_restarts"])
def test_an_observation_says_what_the_page_of_that_moment_says(family: str) -> None:
    run = run_of(family, days=0.4)
    scrapes = [o for o in observations(run) if isinstance(o, EngineScrape)]
    compared = 0
    for i in range(3, len(run.t), 487):
        text = page(run, i)
        if text is None:
            assert not scrapes[i].ranks
            continue
        reading = read_page(read(text.encode()), run.scenario.version, facts(run))
        assert [r.pool for r in reading.ranks] == [r.pool for r in scrapes[i].ranks]
        for told, shown in zip(reading.ranks, scrapes[i].ranks, strict=True):
            assert told.usage == pytest.approx(shown.usage)
            assert (told.running, told.waiting, told.finished) == (shown.running, shown.waiting, shown.finished)
            assert (told.waiting_capacity, told.kv_expired) == (shown.waiting_capacity, shown.kv_expired)
            assert (told.prompt_lengths, told.steps) == (shown.prompt_lengths, shown.steps)
            assert (told.sleep_level, told.external_prefix_queries) == (
                shown.sleep_level,
                shown.external_prefix_queries,
            )
        assert reading.process_start == scrapes[i].process_start
        compared += 1
    assert compared >= 2


def test_observations_come_in_order_of_time() -> None:
    run = run_of("missing_scrapes", days=0.3)
    moments = [o.t for o in observations(run)]
    assert moments == sorted(moments)
    assert moments[0] == EPOCH
    failed = [o for o in observations(run) if isinstance(o, EngineScrape) and not o.answered]
    assert len(failed) == int((~run.scraped).sum()) > 0


def test_device_memory_comes_in_the_drivers_steps_and_within_the_card() -> None:
    run = run_of("gpu_steady")
    polls = [o for o in itertools.islice(observations(run), 40000) if isinstance(o, GpuPoll)]
    for poll in polls[::97]:
        memory = known(poll.memory)
        assert memory is not None
        assert memory.used + memory.free + (memory.reserved or 0) == memory.total
        assert memory.used % (2 << 20) == 0 or memory.free == 0


# --- sets and scores ---------------------------------------------------------------------------------------------


def test_the_sets_share_no_client_no_row_and_no_seed() -> None:
    for one, other in itertools.combinations(sets.load().values(), 2):
        for source in one.spec.clients.keys() & other.spec.clients.keys():
            assert not set(one.spec.clients[source]) & set(other.spec.clients[source])
        shared_lengths = set(one.spec.lengths) & set(other.spec.lengths)
        assert not shared_lengths or {one.spec.rows, other.spec.rows} == {"first", "second"}
        assert one.spec.seed != other.spec.seed


def test_the_test_set_is_as_large_as_it_says_and_the_one_that_was_frozen() -> None:
    frozen = sets.load()["test"]
    sets.check(frozen)
    weeks, faults = 0.0, dict.fromkeys(FAULT_CLASSES, 0)
    for scenario in frozen.scenarios():
        if scenario.fault and scenario.family not in ("kv_saturated", "gpu_slow"):
            faults[scenario.fault] += 1
        elif not scenario.fault and scenario.family != "saturated":
            weeks += scenario.ranks * scenario.days / 7
    assert weeks >= 400
    assert faults["kv-leak"] >= 300
    assert min(faults["gpu-leak"], faults["host-leak"]) >= 150
    assert sum(faults[name] for name in ("exhaustion", "stuck", "stall", "orphan", "overrun")) >= 150


def test_another_manifest_is_refused() -> None:
    with pytest.raises(sets.ManifestError, match="has SHA-256"):
        sets.load(sha256="0" * 64)


def test_bounds_are_the_textbooks() -> None:
    assert clopper_pearson(9, 10) == pytest.approx((0.5550, 0.9975), abs=1e-4)
    assert clopper_pearson(10, 10) == pytest.approx((0.6915, 1.0), abs=1e-4)
    assert poisson_rate(0, 1.0) == pytest.approx((0.0, 3.6889), abs=1e-4)
    assert poisson_rate(3, 373.0) == pytest.approx((0.6187 / 373, 8.7673 / 373), abs=1e-5)


def test_a_line_through_points_is_predict_linear() -> None:
    t = np.arange(0.0, 7200.0, 15.0)
    slope, now = least_squares(t, 0.1 + 1e-5 * t, 3600.0)
    assert slope[-1] == pytest.approx(1e-5)
    assert now[-1] == pytest.approx(0.1 + 1e-5 * t[-1])


def test_firings_within_an_hour_are_one_alarm() -> None:
    t = np.arange(0.0, 20000.0, 10.0)
    condition = ((t >= 1000) & (t < 2000)) | ((t >= 4000) & (t < 5000)) | ((t >= 12000) & (t < 12100))
    found = merged(firings(condition, t, hold=300.0))
    assert [(alarm.start, alarm.end) for alarm in found] == [(1300.0, 4990.0)]


def test_an_alarm_before_the_onset_finds_nothing() -> None:
    label = Label("kv-leak", 1000.0, 9000.0, True, 0)
    assert first_hit(label, [Alarm(500.0, 9000.0)]) is None
    assert first_hit(label, [Alarm(500.0, 600.0), Alarm(2000.0, 9000.0, 1)]) is None
    assert first_hit(label, [Alarm(500.0, 600.0), Alarm(2000.0, 9000.0, 0)]) == 2000.0


def test_states_become_alarms_by_level() -> None:
    rank = {"engine": "engine", "rank": "1"}
    changes = [
        (EPOCH + 10, "kv-block-leak", "ticket", rank),
        (EPOCH + 20, "kv-block-leak", "page", rank),
        (EPOCH + 30, "kv-block-leak", "clear", rank),
    ]
    found = alarms_of(changes, EPOCH, 100.0)
    assert found["kv-block-leak", "ticket"] == [Alarm(10.0, 30.0, 1)]
    assert found["kv-block-leak", "page"] == [Alarm(20.0, 30.0, 1)]


def test_a_baseline_finds_what_it_should_and_the_outcome_survives_json() -> None:
    outcome = outcome_of(draw("kv_one_off", CLIENTS, 0), Options(None, None, 4, True))
    assert outcome is not None
    assert outcome.hits["deriv(1h) > 0 for 1h"] is not None
    assert type(outcome).of_document(json.loads(json.dumps(outcome.document()))) == outcome


@pytest.mark.parametrize("family", ["kv_one_off", "orphan_memory"])
def test_a_fault_s_own_figures_are_the_same_whether_its_class_or_everything_is_asked_for(family: str) -> None:
    scenario = shortened(draw(family, CLIENTS, 0), hours=7.2)
    work = Options(None, OURS, 4, False)
    whole, part = outcome_of(scenario, work, whole=True), outcome_of(scenario, work, whole=False)
    assert whole is not None
    assert part is not None
    assert part.hits == whole.hits
    assert part.hits["oomwatch, ticket"] is not None


def test_every_beginning_of_the_order_has_its_share_of_each_family() -> None:
    test_set = sets.load()["test"]
    order = balanced(test_set.scenarios())
    beginning = Counter(scenario.family for scenario in order[: len(order) // 3])
    assert all(abs(beginning[family] - count / 3) <= 1 for family, count in test_set.counts.items())


def test_a_run_that_was_interrupted_goes_on_where_it_was(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "results.jsonl"
    arguments = ["--quick", "--family", "orphan_memory", "--no-detector", "--workers", "1", "--traces", "/nonexistent"]
    assert main([*arguments, "--output", str(file)]) == 0
    first = capsys.readouterr().out
    file.write_text(file.read_text() + '{"set": "tune", "fam')  # as a process leaves it that is killed while it writes
    assert main([*arguments, "--output", str(file)]) == 0
    assert capsys.readouterr().out == first
    assert len(file.read_text().splitlines()) == 2
    assert main([*arguments, "--ticks", "1", "--output", str(file)]) == 1
    assert "give another --output" in capsys.readouterr().err


def test_a_recording_of_a_run_can_be_read_again() -> None:
    run = run_of("noisy_tenant", days=0.05)
    stream = io.BytesIO()
    write_recording(run, stream)
    stream.seek(0)
    again = [o for o in recording.read(stream) if isinstance(o, EngineScrape)]
    scrapes = [o for o in observations(run) if isinstance(o, EngineScrape)]
    assert [o.state for o in again] == [o.state for o in scrapes]
    assert [r.pool for r in again[-1].ranks] == [r.pool for r in scrapes[-1].ranks]


def test_the_command_scores_a_few_runs(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--quick", "--family", "orphan_memory", "--no-detector", "--workers", "1", "--traces", "/nonexistent"]
    assert main(arguments) == 0
    shown = capsys.readouterr().out
    assert "generator fitted to the public traces" in shown
    assert "| kv-leak |" in shown or "faults." in shown


def test_a_run_s_pages_as_text_lead_to_the_same_verdicts_through_the_daemon() -> None:
    run = build(shortened(draw("orphan_memory", CLIENTS, 0), hours=2.2), MADE_UP)
    assert run is not None
    changes, pages = through_the_daemon(run)
    assert changes == without_text(run)
    assert "orphan-memory" in {verdict for _, verdict, state, _ in changes if state == "ticket"}
    assert pages


def test_the_results_stand_beside_what_was_asked_for() -> None:
    label = Label("kv-leak", 0.0, 100 * 3600.0, True, 0)
    found = Outcome("test", "kv_finish", 0, 1.0, label, hits={"oomwatch, page": 3600.0, "oomwatch, ticket": None})
    healthy = Outcome("test", "diurnal", 0, 10.0, None, false={"oomwatch, page": {"kv-leak": 1}})
    page, ticket, *others = marks_table(scores([found, healthy])).splitlines()[2:]
    assert page.startswith("| kv-leak, page | 1.000 (0.025 to 1.000), 1/1 | ≥ 0.97 | 0.1 (0.0025 to 0.56), 1 in 10 |")
    assert "1/1 by 30 min" in page
    assert "| 99.0 h, ≥ 8.0 h asked |" in page
    assert ticket.startswith("| kv-leak, ticket | 0.000")
    assert all("| - | ≥ 0.98 |" in line for line in others)


def test_only_what_stands_between_the_marks_is_replaced() -> None:
    page = "by hand\n<!-- measured: python -m benchmarks.detection -->\nold\n<!-- measured: end -->\nby hand too\n"
    made = between_the_marks(page, "new")
    assert made.startswith("by hand\n")
    assert made.endswith("by hand too\n")
    assert "old" not in made
    assert between_the_marks(made, "new") == made
    with pytest.raises(ValueError, match="has no part"):
        between_the_marks("nothing", "new")
