"""The demo's stories, told without a clock: what the fold makes of them, phase by phase."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

import pytest
from structlog.testing import capture_logs

from oomwatch.attribution import Neighbour
from oomwatch.config import Config, load
from oomwatch.configured import judge_of
from oomwatch.demo import SETTINGS, STORIES, TOUR, DemoFeed, DemoNode
from oomwatch.judge import Judge
from oomwatch.node import Cadence, Node
from oomwatch.observations import (
    Absent,
    AllocatorReport,
    EngineScrape,
    GpuPoll,
    HostProcess,
    Memory,
    Observation,
    RankReading,
    Tick,
    XidEvent,
    known,
)
from oomwatch.pipeline import Pipeline
from oomwatch.snapshot import EngineView, GpuView, Snapshot
from oomwatch.sources.vllm.names import CACHE_CONFIG
from oomwatch.sources.vllm.pages import Page, read, samples_from_recording

CAPTURES = Path(__file__).parent / "data" / "captures"
BEGIN = 1_790_000_000.0
INTERVAL = 5.0
LONGEST = 600.0
OVER = "the story is over, all is well"
ENGINES = ("llama-70b", "mistral-7b", "qwen-7b")
COUNTERS = ("preemptions", "prompt_tokens", "generation_tokens", "steps", "prefix_queries", "prefix_hits")
QUIET = ("healthy", "restart")


@dataclass(frozen=True)
class Moment:
    """What was delivered at one time, ``at`` seconds after the beginning, and the node's state then."""

    at: float
    phase: str
    text: str
    observations: tuple[Observation, ...]
    snapshot: Snapshot

    def engine(self, name: str) -> EngineView:
        return next(engine for engine in self.snapshot.engines if engine.name == name)

    def gpu(self, index: int) -> GpuView:
        return self.snapshot.gpus[index]

    def ranks(self, name: str) -> tuple[RankReading, ...]:
        scrape = self.engine(name).scrape
        return scrape.ranks if scrape is not None else ()

    def rank(self, name: str) -> RankReading:
        return self.ranks(name)[0]


@cache
def told(story: str, seed: int = 1) -> tuple[Moment, ...]:
    """A story from its beginning to 600 seconds later, read every five seconds."""
    demo = DemoNode(story, seed)
    node = Node(
        Cadence(INTERVAL, INTERVAL, INTERVAL, INTERVAL, INTERVAL), [Neighbour("embedder", process="tritonserver")]
    )
    moments = []
    for step in range(int(LONGEST / INTERVAL) + 1):
        t = BEGIN + step * INTERVAL
        observations = demo.observations(t)
        for observation in observations:
            node.apply(observation)
        moments.append(Moment(t - BEGIN, demo.phase(t)[1], demo.describe(t), observations, node.snapshot()))
    return tuple(moments)


def during(story: str, words: str) -> tuple[Moment, ...]:
    """The moments of the phases whose title has ``words``, without those in which it has just begun."""
    chosen = tuple(moment for moment in told(story) if words in moment.phase)
    assert chosen, f"no phase of {story} says {words!r}"
    return chosen[1:] if len(chosen) > 1 else chosen


def number(value: object) -> float:
    """A value that must be there."""
    assert isinstance(value, (int, float)), value
    return value


def memory(gpu: GpuView) -> Memory:
    assert isinstance(gpu.memory, Memory)
    return gpu.memory


def finished(rank: RankReading) -> float:
    assert not isinstance(rank.finished, Absent)
    return sum(rank.finished.values())


Kind = TypeVar("Kind", bound=Observation)


def of(kind: type[Kind], moments: Iterable[Moment]) -> Iterator[Kind]:
    return (observation for moment in moments for observation in moment.observations if isinstance(observation, kind))


def idle(rank: RankReading) -> bool:
    return rank.running == 0 and rank.waiting == 0


# --- every story ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("story", STORIES)
def test_a_story_begins_and_ends_well_within_ten_minutes(story: str) -> None:
    moments = told(story)
    assert moments[-1].phase == OVER
    for moment in (moments[0], moments[4], moments[-1]):
        assert [engine.state for engine in moment.snapshot.engines] == ["ok", "ok", "ok"]
    # Whatever went wrong began after a healthy minute.
    assert all(engine.state == "ok" for moment in moments if moment.at < 60 for engine in moment.snapshot.engines)


@pytest.mark.parametrize("story", STORIES)
def test_the_end_is_as_the_beginning(story: str) -> None:
    first, last = told(story)[0], told(story)[-1]
    for before, after in zip(first.snapshot.gpus, last.snapshot.gpus, strict=True):
        assert memory(after) == memory(before)
    for name in ENGINES:
        roles = [[process.role for process in moment.engine(name).processes] for moment in (first, last)]
        assert roles[0] == roles[1]


@pytest.mark.parametrize("story", STORIES)
def test_device_memory_adds_up(story: str) -> None:
    for poll in of(GpuPoll, told(story)):
        if isinstance(poll.memory, Absent):
            continue
        assert poll.memory.reserved is not None
        assert poll.memory.total == poll.memory.reserved + poll.memory.used + poll.memory.free
        assert poll.memory.free >= 0
        assert not isinstance(poll.processes, Absent)
        assert 0 <= poll.memory.used - sum(number(process.used) for process in poll.processes) < 16 * 2**20


@pytest.mark.parametrize("story", STORIES)
def test_a_pool_s_numbers_agree(story: str) -> None:
    for moment in told(story):
        for name in ENGINES:
            for rank in moment.ranks(name):
                if isinstance(rank.usage, Absent):
                    continue
                blocks, used = number(rank.pool.blocks), number(rank.pool.used)
                assert 0 <= used <= blocks
                assert rank.usage == pytest.approx(used / blocks)
                assert rank.pool.block_size == 16
                assert isinstance(rank.pool.tokens, Absent) or rank.pool.tokens == (blocks + 1) * 16
                # A running request has a block for each 16 tokens, at least one.
                assert number(rank.running) <= used
                if story != "leak" and idle(rank):
                    assert used == 0
                if not isinstance(rank.waiting_capacity, Absent):
                    assert rank.waiting == rank.waiting_capacity + number(rank.waiting_deferred)


@pytest.mark.parametrize("story", STORIES)
def test_counters_only_grow_while_a_server_lives(story: str) -> None:
    for name in ENGINES:
        before: dict[str, tuple[float, ...]] = {}
        pids: tuple[int, ...] = ()
        for moment in told(story):
            now = tuple(process.pid for process in moment.engine(name).processes if process.role == "api_server")
            if now != pids:
                before, pids = {}, now
            for rank in moment.ranks(name):
                counters = (*(number(getattr(rank, counter)) for counter in COUNTERS), finished(rank))
                assert all(new >= old for new, old in zip(counters, before.get(rank.rank, counters), strict=True))
                before[rank.rank] = counters


@pytest.mark.parametrize("story", STORIES)
def test_counters_agree_with_one_another(story: str) -> None:
    for moment in told(story)[::6]:
        for name in ENGINES:
            for rank in moment.ranks(name):
                for lengths, total in (
                    (rank.prompt_lengths, rank.request_prompt_tokens),
                    (rank.generation_lengths, rank.request_generation_tokens),
                ):
                    assert not isinstance(lengths, Absent)
                    counts = [count for _, count in lengths]
                    assert counts == sorted(counts)
                    assert counts[-1] == finished(rank)
                    # Each request lies in its bucket: the sum is between the sums of lower and of upper bounds.
                    each = [new - old for new, old in zip(counts, [0.0, *counts], strict=False)]
                    bounds = [bound for bound, _ in lengths]
                    lowest = sum(n * low for n, low in zip(each[1:], bounds, strict=False))
                    assert number(total) >= lowest
                    if not each[-1]:
                        assert number(total) <= sum(n * high for n, high in zip(each, bounds, strict=True) if n)
                assert number(rank.request_prompt_tokens) <= number(rank.prompt_tokens)
                assert number(rank.request_generation_tokens) <= number(rank.generation_tokens)
                assert number(rank.prefix_hits) <= number(rank.prefix_queries)
                assert number(rank.prompt_tokens) <= number(rank.prefix_queries)


@pytest.mark.parametrize("story", STORIES)
def test_every_number_is_finite_and_every_time_is_the_reading_s(story: str) -> None:
    for moment in told(story):
        assert {observation.t for observation in moment.observations} == {BEGIN + moment.at}
        assert isinstance(moment.observations[-1], Tick)
    for scrape in of(EngineScrape, told(story)):
        assert all(map(math.isfinite, scrape.samples.values()))


@pytest.mark.parametrize("story", STORIES)
def test_processes_stay_within_their_limits(story: str) -> None:
    for moment in told(story):
        host = moment.snapshot.host
        assert host is not None
        assert 0 < host.available < host.total
        for engine in moment.snapshot.engines:
            limits = {process.memory_limit for process in engine.processes}
            assert len(limits) <= 1
            assert sum(number(process.anon) for process in engine.processes) <= min(map(number, limits), default=0)
            assert all(number(process.anon) <= process.rss for process in engine.processes)


@pytest.mark.parametrize("story", STORIES)
def test_every_process_on_a_gpu_is_known_to_the_host(story: str) -> None:
    for moment in told(story):
        assert moment.snapshot.unresolved_gpu_pids == 0
        pids = [o.pid for o in moment.observations if isinstance(o, HostProcess)]
        assert len(pids) == len(set(pids))


@pytest.mark.parametrize("story", QUIET)
def test_where_nothing_is_wrong_no_number_is_alarming(story: str) -> None:
    for moment in told(story):
        for gpu in moment.snapshot.gpus:
            assert memory(gpu).free > max(2**30, 0.015 * memory(gpu).total)
            assert not isinstance(gpu.held, Absent)
            for held in gpu.held:
                assert held.holder.kind != "unknown" or held.used < 2**30
            assert not gpu.xids
    first, last = told(story)[0], told(story)[-1]
    for new, old in zip(last.ranks("llama-70b"), first.ranks("llama-70b"), strict=True):
        preempted = number(new.preemptions) - number(old.preemptions)
        assert preempted < 0.2 * (finished(new) - finished(old))


@pytest.mark.parametrize("story", [story for story in STORIES if story not in ("fragmentation", "memory-leak")])
def test_no_engine_s_processes_hold_much_more_than_its_budget_unless_memory_leaks(story: str) -> None:
    for moment in told(story):
        for engine in moment.snapshot.engines:
            assert not isinstance(engine.gpu_memory, Absent) or story == "lost"
            for uuid, held in (known(engine.gpu_memory) or {}).items():
                gpu = next(gpu for gpu in moment.snapshot.gpus if gpu.uuid == uuid)
                visible = memory(gpu).total - number(memory(gpu).reserved)
                assert held - number(engine.facts.gpu_memory_utilization) * visible < 256 * 2**20


# --- one by one ----------------------------------------------------------------------------------------------------


def test_healthy_days_fill_the_pool_and_nights_empty_it() -> None:
    readings = [moment.rank("llama-70b") for moment in told("healthy")]
    assert sum(number(rank.usage) > 0.9 for rank in readings) >= 5
    nights = [idle(rank) for rank in readings]
    assert sum(not before and after for before, after in pairwise(nights)) >= 3
    # Full or not, the engine gets its work done: no minute of the day passes without finished requests.
    busy = [rank for rank in readings if number(rank.running) > 20]
    assert busy
    for before, after in zip(readings, readings[12:], strict=False):
        if number(before.running) > 20:
            assert finished(after) - finished(before) > 20


def test_every_kind_of_holder_is_on_the_gpus() -> None:
    gpus = told("healthy")[3].snapshot.gpus
    holders = [{(held.holder.kind, held.holder.name) for held in known(gpu.held) or ()} for gpu in gpus]
    assert holders == [
        {("engine", "llama-70b")},
        {("engine", "llama-70b")},
        {("engine", "qwen-7b"), ("neighbour", "embedder"), ("unknown", "")},
        {("engine", "qwen-7b"), ("engine", "mistral-7b")},
    ]


def test_overhead_is_what_a_process_holds_beyond_weights_and_pool() -> None:
    for engine in told("healthy")[3].snapshot.engines:
        assert not isinstance(engine.overhead_sum, Absent)
        assert len(engine.overhead_sum) == len(engine.facts.gpus or ())
        assert all(2**30 < size < 2.5 * 2**30 for size in engine.overhead_sum.values())


def test_capacity_fills_the_pool_and_hurts() -> None:
    full = during("capacity", "the KV pool is full")
    assert full[-1].at - full[0].at >= 200
    first, last = full[0].rank("llama-70b"), full[-1].rank("llama-70b")
    seconds = full[-1].at - full[0].at
    assert sum(number(moment.rank("llama-70b").usage) >= 0.95 for moment in full) > 0.7 * len(full)
    assert number(first.waiting_capacity) < 60
    assert number(last.waiting_capacity) > 100
    done = finished(last) - finished(first)
    assert done >= 20
    assert number(last.preemptions) - number(first.preemptions) > 0.5 * done
    before = during("capacity", "many short questions")
    begin, end = before[0].rank("llama-70b"), before[-1].rank("llama-70b")
    usual = before[-1].at - before[0].at
    assert done / seconds < 0.2 * (finished(end) - finished(begin)) / usual
    tokens, usual_tokens = (
        number(b.generation_tokens) - number(a.generation_tokens) for a, b in ((first, last), (begin, end))
    )
    assert tokens / seconds < 0.5 * usual_tokens / usual


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_capacity_told_ten_times_as_slowly_comes_to_a_page(seed: int) -> None:
    """A page takes a quarter of an hour of knowing the engine, and another one of suffering."""
    demo, judge = DemoNode("capacity", seed, speed=0.1), Judge(Node(Cadence(*[30.0] * 5)))
    states = []
    for step in range(200):
        for observation in demo.observations(BEGIN + 30 * step):
            judge.apply(observation)
        states += [
            verdict.state
            for verdict in judge.verdicts()
            if (verdict.name, verdict.subject.engine) == ("kv-exhaustion", "llama-70b")
        ]
    assert states.index("ticket") < states.index("page")


def test_fragmentation_takes_memory_in_steps_until_the_engine_dies_of_it() -> None:
    grows = during("fragmentation", "grows in steps")
    for index in (0, 1):
        free = [memory(moment.gpu(index)).free for moment in grows]
        assert free == sorted(free, reverse=True)
        assert len(set(free)) >= 8
        assert free[-1] < 512 * 2**20
    usage = [number(moment.rank("llama-70b").usage) for moment in grows]
    assert sum(usage[: len(usage) // 2]) / (len(usage) // 2) == pytest.approx(
        sum(usage[-(len(usage) // 2) :]) / (len(usage) // 2), abs=0.2
    )
    states = [moment.engine("llama-70b").state for moment in told("fragmentation")]
    order = [state for state, before in zip(states, ["", *states], strict=False) if state != before]
    assert order == ["ok", "dead", "unreachable", "ok"]
    gone = during("fragmentation", "nothing answers")
    assert all(memory(moment.gpu(0)).used < 2**30 for moment in gone)
    assert all(not moment.engine("llama-70b").processes for moment in gone)
    assert told("fragmentation")[-1].engine("llama-70b").restarts == 1


def test_the_probes_see_how_the_growth_lies_in_ever_more_pieces_until_none_is_large_enough() -> None:
    grows = during("fragmentation", "grows in steps")
    reports = [moment.engine("llama-70b").allocators for moment in grows]
    assert all(len(told) == 2 for told in reports)
    free = [number(told[0].free) for told in reports]
    assert free == sorted(free)
    assert free[-1] - free[0] > 2 * 2**30
    last = reports[-1][0]
    assert number(last.largest_free_block) + memory(grows[-1].gpu(0)).free < 512 * 2**20 < number(last.free)
    assert last.stats["num_alloc_retries"] >= 2
    (failure, *_) = [one.failure for one in of(AllocatorReport, told("fragmentation")) if one.failure is not None]
    free_in_all = number(failure.free) + number(failure.reserved) - number(failure.allocated)
    assert number(failure.free) < number(failure.wanted) <= free_in_all
    assert told("fragmentation")[-1].engine("llama-70b").allocators[0].failure is None


@pytest.mark.parametrize("story", STORIES)
def test_every_block_has_its_owner_but_those_that_are_lost(story: str) -> None:
    for moment in told(story):
        for owners in moment.engine("llama-70b").owners:
            assert owners.free + owners.living + owners.finished + number(owners.ownerless) == owners.total
            assert story == "leak" or owners.ownerless == 0
    lost = [number(one.ownerless) for moment in told("leak") for one in moment.engine("llama-70b").owners]
    assert max(lost) > 1000


def test_a_leak_raises_the_idle_floor_batch_by_batch_until_nothing_runs() -> None:
    assert all(
        moment.rank("llama-70b").pool.used == 0
        for moment in during("leak", "the pool is empty between them")
        if idle(moment.rank("llama-70b"))
    )
    floors = [
        number(moment.rank("llama-70b").pool.used)
        for moment in during("leak", "each batch leaves blocks behind")
        if idle(moment.rank("llama-70b"))
    ]
    assert floors == sorted(floors)
    assert len(set(floors)) >= 3
    assert floors[-1] > 0.3 * number(told("leak")[0].rank("llama-70b").pool.blocks)
    stuck = during("leak", "deadlock")[4:]
    assert stuck[-1].at - stuck[0].at >= 150
    for moment in stuck:
        rank = moment.rank("llama-70b")
        assert rank.running == 0
        assert number(rank.waiting_capacity) > 0
        assert number(rank.usage) > 0.8
        assert rank.generation_tokens == stuck[0].rank("llama-70b").generation_tokens
        assert moment.engine("llama-70b").state in ("ok", "frozen")
        scrape = moment.engine("llama-70b").scrape
        assert scrape is not None
        assert scrape.healthy is True


@pytest.mark.parametrize("seed", [2, 3])
def test_a_leak_comes_to_its_deadlock_with_any_seed(seed: int) -> None:
    moments = [moment for moment in told("leak", seed) if "deadlock" in moment.phase]
    assert moments[-1].rank("llama-70b").running == 0
    assert told("leak", seed)[-1].phase == OVER


def test_only_the_leak_raises_an_idle_floor() -> None:
    for story in STORIES:
        floors = {
            number(rank.pool.used)
            for moment in told(story)
            for name in ENGINES
            for rank in moment.ranks(name)
            if idle(rank)
        }
        assert (floors != {0}) == (story == "leak")


def test_a_memory_leak_grows_with_the_requests() -> None:
    grows = during("memory-leak", "grows a little with each request")

    def held(moment: Moment) -> float:
        by_gpu = moment.engine("mistral-7b").gpu_memory
        assert not isinstance(by_gpu, Absent)
        return sum(by_gpu.values())

    sizes = [held(moment) for moment in grows]
    assert sizes == sorted(sizes)
    requests = finished(grows[-1].rank("mistral-7b")) - finished(grows[0].rank("mistral-7b"))
    assert (sizes[-1] - sizes[0]) / requests == pytest.approx(6 * 2**20, rel=0.02)
    assert sizes[-1] - sizes[0] > 1.5 * 2**30
    assert held(told("memory-leak")[-1]) == held(told("memory-leak")[0])


def test_a_host_leak_brings_the_engine_near_its_limit() -> None:
    grows = during("host-leak", "grows with each request")

    def anonymous(moment: Moment, role: str) -> float:
        return sum(number(p.anon) for p in moment.engine("llama-70b").processes if p.role == role)

    first, last = grows[0], grows[-1]
    assert anonymous(last, "engine_core") > 5 * anonymous(first, "engine_core")
    assert anonymous(last, "worker") == pytest.approx(anonymous(first, "worker"), rel=0.01)
    held = sum(number(process.anon) for process in last.engine("llama-70b").processes)
    assert 0.6 < held / number(last.engine("llama-70b").processes[0].memory_limit) < 1


def test_an_orphan_belongs_to_no_engine_and_keeps_the_next_starts_from_succeeding() -> None:
    left = [moment for moment in told("orphan") if "stays with its memory" in moment.phase]
    assert left[-1].at - left[0].at >= 150
    for moment in left:
        holders = {held.holder.kind: held.used for held in known(moment.gpu(1).held) or ()}
        assert holders == {"unknown": pytest.approx(41 * 2**30, rel=0.05)}
        assert memory(moment.gpu(0)).used < 2**30
        assert moment.engine("llama-70b").state == "unreachable"
        (process,) = known(moment.gpu(1).processes) or ()
        assert process.name == "VLLM::Worker_TP1"
    tries = [moment for moment in told("orphan") if "is refused" in moment.phase]
    assert any(moment.engine("llama-70b").processes for moment in tries)
    assert all(moment.engine("llama-70b").state == "unreachable" for moment in tries)


def test_a_stuck_engine_stands_still_and_calls_itself_healthy() -> None:
    stuck = during("stuck", "hangs")
    assert stuck[-1].at - stuck[0].at >= 220
    scrapes = [moment.engine("llama-70b").scrape for moment in stuck]
    assert all(scrape is not None and scrape.samples == stuck_samples(scrapes) for scrape in scrapes)
    assert all(scrape is not None and scrape.healthy is True for scrape in scrapes)
    assert number(stuck[0].rank("llama-70b").running) > 0
    assert all(moment.engine("llama-70b").state == "frozen" for moment in stuck[4:])


def stuck_samples(scrapes: Iterable[EngineScrape | None]) -> object:
    first = next(iter(scrapes))
    assert first is not None
    return first.samples


def test_a_lost_gpu_takes_its_engines_with_it_and_no_other() -> None:
    lost = during("lost", "has fallen off the bus")
    for moment in lost:
        assert moment.gpu(3).memory == Absent("GPU_IS_LOST")
        assert moment.gpu(3).processes == Absent("GPU_IS_LOST")
        assert moment.engine("llama-70b").state == "ok"
        assert moment.engine("qwen-7b").state == moment.engine("mistral-7b").state == "unreachable"
        assert [xid.code for xid in moment.gpu(3).xids] == [79]
        (device,) = (s for s in moment.snapshot.sources if s.source == "nvml" and s.target == moment.gpu(3).uuid)
        assert device.up is False
        assert "GPU_IS_LOST" in device.error
        assert memory(moment.gpu(2)).used < 12 * 2**30
    assert len(list(of(XidEvent, told("lost")))) == 1


def test_a_restart_counts_and_a_sleeping_engine_gives_its_memory_back() -> None:
    last = told("restart")[-1]
    assert {name: last.engine(name).restarts for name in ENGINES} == {"llama-70b": 0, "mistral-7b": 0, "qwen-7b": 1}
    awake, asleep = told("restart")[0], during("restart", "sleeps")
    for moment in asleep:
        assert moment.engine("mistral-7b").state == "sleeping"
        assert memory(awake.gpu(3)).used - memory(moment.gpu(3)).used > 16 * 2**30
        assert moment.rank("mistral-7b").sleep_level == "weights_offloaded"
    before, after = (
        sum(number(p.anon) for p in moment.engine("mistral-7b").processes) for moment in (awake, asleep[0])
    )
    assert after - before > 13 * 2**30


def test_each_start_climbs_from_nothing_and_answers_only_at_its_end() -> None:
    starts = during("fragmentation", "starts again")
    used = [memory(moment.gpu(0)).used for moment in starts]
    assert used == sorted(used)
    assert len(set(used)) >= 4
    assert all(moment.engine("llama-70b").state == "unreachable" for moment in starts)


# --- pages -----------------------------------------------------------------------------------------------------------


def shape(page: Page) -> set[tuple[str, frozenset[str]]]:
    return {(sample.name, frozenset(sample.labels)) for sample in page.samples}


def label_values(page: Page, label: str) -> set[str]:
    return {s.labels[label] for s in page.samples if label in s.labels and s.name != CACHE_CONFIG}


@pytest.mark.parametrize(
    ("engine", "capture"),
    [
        ("llama-70b", "0.32.0/06-tiny-pool-saturated-preempting.prom"),
        ("qwen-7b", "0.32.0/31-dp2-saturated.prom"),
        ("mistral-7b", "0.11.2-fakeworker/02-tiny-pool-saturated.prom"),
    ],
)
def test_series_and_labels_are_those_of_real_pages(engine: str, capture: str) -> None:
    real = read((CAPTURES / capture).read_bytes())
    scrape = told("healthy")[3].engine(engine).scrape
    assert scrape is not None
    ours = samples_from_recording(scrape.samples)
    assert shape(ours) == shape(real)
    for label in ("engine", "finished_reason", "reason", "sleep_state"):
        assert label_values(ours, label) == label_values(real, label)
    # The real page's model takes 512 tokens: its buckets are the first ones of ours.
    assert label_values(real, "le") <= label_values(ours, "le")


def test_data_parallel_ranks_share_a_sum_of_blocks_and_read_as_their_own() -> None:
    scrape = told("healthy")[3].engine("qwen-7b").scrape
    assert scrape is not None
    assert [rank.rank for rank in scrape.ranks] == ["0", "1"]
    assert [rank.pool.blocks for rank in scrape.ranks] == [7167, 7167]
    assert {
        s.labels["num_gpu_blocks"] for s in samples_from_recording(scrape.samples).samples if s.name == CACHE_CONFIG
    } == {"14336"}


# --- time and chance -------------------------------------------------------------------------------------------------


def run(story: str, seed: int, times: Iterable[float], speed: float = 1.0) -> list[tuple[Observation, ...]]:
    node = DemoNode(story, seed, speed)
    return [node.observations(BEGIN + t) for t in times]


def test_the_same_seed_and_times_tell_the_same() -> None:
    times = (0, 3.7, 5, 60, 61, 200)
    assert run("fragmentation", 7, times) == run("fragmentation", 7, times)
    assert run("fragmentation", 7, times) != run("fragmentation", 8, times)


def test_speed_shortens_a_story() -> None:
    node = DemoNode("lost", speed=4)
    node.observations(BEGIN)
    assert "fallen off the bus" in node.describe(BEGIN + 20)
    assert OVER in node.describe(BEGIN + 110)


def test_a_clock_that_is_set_back_stands_still() -> None:
    first, second = run("healthy", 1, (100, 20))
    assert {observation.t for observation in second} == {BEGIN + 100}
    assert [o.samples for o in second if isinstance(o, EngineScrape)] == [
        o.samples for o in first if isinstance(o, EngineScrape)
    ]


def test_after_a_long_silence_the_story_goes_on_instead_of_catching_up() -> None:
    node = DemoNode(TOUR)
    node.observations(BEGIN)
    node.observations(BEGIN + 30 * 86400)
    # Twenty minutes at most are made up for: healthy and capacity are over by then, not all the rest.
    assert node.phase(BEGIN + 30 * 86400)[0] in ("capacity", "fragmentation")


def test_the_tour_tells_every_story_in_turn_and_begins_again() -> None:
    node = DemoNode(TOUR)
    heard: list[str] = []
    for minute in range(120):
        story = node.phase(BEGIN + 60 * minute)[0]
        if not heard or heard[-1] != story:
            heard.append(story)
        if len(heard) > len(STORIES):
            break
    assert heard == [*STORIES, next(iter(STORIES))]


def test_what_happens_is_told_with_numbers() -> None:
    text = during("leak", "each batch leaves blocks behind")[-1].text
    assert text.startswith("leak: each batch leaves blocks behind that no request owns; ")
    assert "of 2211 blocks lost" in text


def test_an_unknown_story_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"no story 'flood'\. There are: tour, healthy, capacity"):
        DemoNode("flood")
    assert TOUR not in STORIES


# --- in the daemon ---------------------------------------------------------------------------------------------------


def config(**seconds: float) -> Config:
    environment = {f"OOMWATCH_INTERVALS__{name.upper()}": str(value) for name, value in seconds.items()}
    return load(None, environment, {}, SETTINGS)


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize(
    ("story", "verdict", "state", "before_s"),
    [
        ("capacity", "kv-exhaustion", "page", 300),
        # The engine dies of it after 280 s or more, which pages by itself.
        ("fragmentation", "allocator-fragmentation", "ticket", 280),
        ("fragmentation", "runtime-oom", "page", 400),
        ("leak", "kv-block-leak", "page", 300),
    ],
)
def test_each_killer_is_told_within_minutes_as_the_command_begins(
    story: str, verdict: str, state: str, before_s: int, seed: int
) -> None:
    demo, judge = DemoNode(story, seed), judge_of(config(gpu=5, scrape=5, host=5, processes=5))
    told: dict[tuple[str, str], int] = {}
    for seconds in range(0, before_s, 5):
        for observation in demo.observations(BEGIN + seconds):
            judge.apply(observation)
        for one in judge.verdicts():
            told.setdefault((one.name, one.state), seconds)
    assert (verdict, state) in told


def test_the_users_own_thresholds_and_neighbours_win(tmp_path: Path) -> None:
    own = tmp_path / "oomwatch.yml"
    own.write_text("neighbours: []\ndetection: {thresholds: {kv_exhaustion: {after: 7m}}}\n", encoding="utf-8")
    found = load(own, {}, {}, SETTINGS)
    assert found.neighbours == ()
    thresholds = found.model_dump()["detection"]["thresholds"]["kv_exhaustion"]
    assert (thresholds["after"], thresholds["page_after"]) == (420, 20)


def test_the_feed_has_one_job_at_the_interval_of_scrapes_and_is_ready_after_it() -> None:
    pipeline = Pipeline(Judge(Node()))
    pipeline.start()
    try:
        feed = DemoFeed(config(scrape=5), pipeline.publish, clock=lambda: BEGIN, story="healthy")
        ((name, job),) = feed.jobs().items()
        assert (name, job.seconds) == ("demo", 5)
        assert feed.ready() == "not read yet: the demo's node"
        job.action()
        assert feed.ready() == ""
        snapshot = pipeline.wait_for(lambda snapshot: len(snapshot.engines) == 3, seconds=10)
        assert snapshot is not None
        assert len(snapshot.gpus) == 4
        feed.configure(config(scrape=30))
        assert feed.jobs()["demo"].seconds == 30
        feed.close()
    finally:
        pipeline.stop()


def test_the_feed_logs_each_phase_once() -> None:
    now = [BEGIN]
    feed = DemoFeed(config(), lambda _: None, clock=lambda: now[0], story="lost", speed=2)
    with capture_logs() as lines:
        for _ in range(10):
            feed.step()
            now[0] += 5
    told_so_far = [line["now"] for line in lines if line["event"] == "demo"]
    assert told_so_far[0] == "lost: all is well"
    assert told_so_far[1].startswith("lost: GPU 3 has fallen off the bus (Xid 79)")
    assert len(told_so_far) == 2


def test_the_demo_has_no_driver_to_give_back() -> None:
    feed = DemoFeed(config(), lambda _: None, story="healthy")
    assert "no driver" in feed.release()
    feed.resume()
    assert feed.call_stats() == {}


def test_the_settings_name_the_demo_s_neighbour() -> None:
    (neighbour,) = config().neighbours
    assert (neighbour.name, neighbour.process) == ("embedder", "tritonserver")
