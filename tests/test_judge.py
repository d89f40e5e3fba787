"""What detectors are told, and what becomes of their answers. The detectors here are written down by the test."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TypeVar

import pytest

from oomwatch.detectors.base import (
    AllocatorSample,
    DeviceSample,
    EngineSample,
    Finding,
    HeldSample,
    HostSample,
    OwnersSample,
    ProcessEnd,
    RankSample,
    Sample,
    Subject,
)
from oomwatch.detectors.registry import About, Kind
from oomwatch.judge import Defaults, Judge
from oomwatch.node import Cadence, Node
from oomwatch.observations import (
    NOT_EXPOSED,
    NOT_READ,
    Absent,
    Adapters,
    AllocatorReport,
    BlockOwners,
    DriverReport,
    EngineFacts,
    EngineScrape,
    EngineUpdate,
    GpuPoll,
    GpuProcess,
    HostProcess,
    Maybe,
    Memory,
    MigInstance,
    Observation,
    Pool,
    ProcessGone,
    RankReading,
    TargetRemoved,
    Tick,
)
from oomwatch.settings import Section
from oomwatch.verdicts import Verdict

GIB = 1024**3
MEMORY = Memory(80 * GIB, GIB, 60 * GIB, 19 * GIB)
VERDICTS: dict[About, str] = {
    "rank": "kv-block-leak",
    "engine": "engine-stuck",
    "device": "headroom-low",
    "held": "gpu-memory-leak",
    "process": "host-memory-leak",
}


class Level(Section):
    level: int = 0


Told = TypeVar("Told", bound=Sample)


@dataclass
class Witness:
    """A detector that writes down what it is told, and concludes what the test wants."""

    subject: Subject
    settings: Level
    told: list[Sample] = field(default_factory=list)
    answer: Finding = field(default_factory=lambda: Finding("clear"))

    def observe(self, sample: Sample) -> None:
        self.told.append(sample)

    def conclude(self, _t: float) -> Finding:
        return self.answer


class Court:
    """A judge with one witness for each subject of each kind."""

    def __init__(self, *abouts: About, policy: Defaults | None = None) -> None:
        kinds = tuple(Kind(VERDICTS[about], about, Witness, Level) for about in abouts or VERDICTS)
        self.judge = Judge(Node(Cadence(gpu=10, process=10, scrape=10, host=10, discovery=10)), policy, kinds)

    def hear(self, *observations: Observation) -> Court:
        for observation in observations:
            self.judge.apply(observation)
        return self

    def witnesses(self) -> dict[Subject, Witness]:
        seats = (seat for seats in self.judge.memory.seats.values() for seat in seats)
        return {seat.subject: seat.detector for seat in seats if isinstance(seat.detector, Witness)}

    def witness(self, subject: Subject) -> Witness:
        return self.witnesses()[subject]

    def told(self, subject: Subject, kind: type[Told]) -> list[Told]:
        return [sample for sample in self.witness(subject).told if isinstance(sample, kind)]

    def verdict(self) -> Verdict:
        (verdict,) = self.judge.verdicts()
        return verdict


def rank(name: str = "0", tokens: float = 5.0, sleep: str = "awake", blocks: int = 100) -> RankReading:
    return RankReading(name, running=1.0, prompt_tokens=tokens, sleep_level=sleep, pool=Pool(blocks=blocks))


def scrape(t: float, *ranks: RankReading, state: str = "ok", engine: str = "llm") -> EngineScrape:
    return EngineScrape(t, engine, state, 0.01, "" if ranks else "refused", ranks)


def poll(t: float, *processes: GpuProcess, uuid: str = "GPU-1") -> GpuPoll:
    return GpuPoll(t, uuid, 0, "H100", MEMORY, processes)


FACTS = EngineUpdate(0, EngineFacts("llm", "http://127.0.0.1:8000/metrics", pids=(100,)))
LLM, RANK, DEVICE = Subject(engine="llm"), Subject(engine="llm", rank="0"), Subject(gpu="GPU-1")
HELD = Subject(engine="llm", gpu="GPU-1", pid=100)


class TestWhoIsTold:
    def test_each_rank_its_own_reading(self) -> None:
        court = Court("rank").hear(FACTS, scrape(10, rank("0", 5), rank("1", 9)))
        (sample,) = court.told(Subject(engine="llm", rank="1"), RankSample)
        assert (sample.t, sample.engine, sample.rank, sample.reading.prompt_tokens) == (10, "llm", "1", 9)

    def test_an_engine_all_its_ranks_and_each_scrape_answered_or_not(self) -> None:
        court = Court("engine").hear(FACTS, scrape(10, rank("0"), rank("1")), scrape(20, state="timeout"))
        assert len(court.told(LLM, RankSample)) == 2
        states = [s.state for s in court.told(LLM, EngineSample)]
        assert states == ["ok", "timeout"]

    def test_a_process_on_a_device_what_its_allocator_tells_with_the_devices_memory(self) -> None:
        report = AllocatorReport(20, 100, "GPU-1", {"num_ooms": 0})
        court = Court("held").hear(FACTS, poll(5, GpuProcess(100, 50 * GIB)), scrape(10, rank()), report)
        (sample,) = court.told(HELD, AllocatorSample)
        assert (sample.report, sample.memory, sample.ready_since) == (report, MEMORY, 10)

    def test_no_allocator_the_memory_of_a_device_that_has_fallen_silent(self) -> None:
        late = 5 + 4 * Cadence().gpu
        court = Court("held").hear(FACTS, poll(5, GpuProcess(100, 50 * GIB)), AllocatorReport(late, 100, "GPU-1", {}))
        (sample,) = court.told(HELD, AllocatorSample)
        assert sample.memory is None

    @pytest.mark.parametrize(("started", "ready_since"), [(None, 10), (9.0, 10), (11.0, None)])
    def test_an_engine_that_answered_before_the_process_began_is_not_ready(
        self, started: float | None, ready_since: float | None
    ) -> None:
        court = Court("held").hear(
            FACTS, poll(5), scrape(10, rank()), AllocatorReport(20, 100, "GPU-1", started=started)
        )
        (sample,) = court.told(HELD, AllocatorSample)
        assert sample.ready_since == ready_since

    def test_nobody_what_the_allocator_of_a_stranger_tells(self) -> None:
        assert not Court("held").hear(FACTS, AllocatorReport(20, 999, "GPU-1")).witnesses()

    def test_an_engine_the_last_word_of_a_process_of_it_that_has_ended(self) -> None:
        report = AllocatorReport(20, 999, "GPU-1", engine="llm")
        court = Court("engine", "held").hear(FACTS, scrape(10, rank()), report)
        assert [type(sample) for sample in court.witness(LLM).told][-1] is AllocatorSample
        assert court.witnesses().keys() == {LLM}

    def test_a_rank_whose_its_blocks_are(self) -> None:
        owners = BlockOwners(20, 100, "1", 19, total=10, free=5, living=3, finished=1, ownerless=1)
        court = Court("rank").hear(FACTS, owners)
        (sample,) = court.told(Subject(engine="llm", rank="1"), OwnersSample)
        assert sample.owners == owners

    def test_a_device_its_polls_and_the_load_of_the_engines_on_it(self) -> None:
        court = Court("device").hear(FACTS, poll(5, GpuProcess(100, 50 * GIB)), scrape(10, rank()))
        (sample,) = court.told(DEVICE, DeviceSample)
        assert (sample.memory, sample.engines) == (MEMORY, ("llm",))
        assert len(court.told(DEVICE, RankSample)) == 1

    def test_no_engine_of_another_device(self) -> None:
        court = Court("device").hear(FACTS, poll(5, GpuProcess(100, GIB)), poll(5, uuid="GPU-2"), scrape(10, rank()))
        assert court.told(Subject(gpu="GPU-2"), RankSample) == []

    def test_an_engines_process_on_a_device_what_it_holds_and_its_engines_load(self) -> None:
        court = Court("held").hear(FACTS, poll(5, GpuProcess(100, 50 * GIB), GpuProcess(7, GIB)), scrape(10, rank()))
        assert list(court.witnesses()) == [HELD]
        (sample,) = court.told(HELD, HeldSample)
        assert (sample.used, sample.total, sample.free) == (50 * GIB, 80 * GIB, 19 * GIB)
        assert len(court.told(HELD, RankSample)) == 1

    def test_polls_that_leave_the_list_out_say_so(self) -> None:
        without = replace(poll(10), processes=NOT_READ)
        court = Court("device", "held").hear(FACTS, poll(5, GpuProcess(100, GIB)), without)
        samples = court.told(DEVICE, DeviceSample)
        assert [isinstance(sample.processes, Absent) for sample in samples] == [False, True]
        assert samples[1].engines == ("llm",)
        assert len(court.told(HELD, HeldSample)) == 1

    def test_a_slice_is_a_device(self) -> None:
        mig = MigInstance("MIG-1", 1, 0, replace(MEMORY, total=10 * GIB), (GpuProcess(100, 7 * GIB),))
        sliced = replace(poll(5), mig=(mig,), mig_enabled=True)
        court = Court("device", "held").hear(FACTS, sliced)
        (sample,) = court.told(Subject(engine="llm", gpu="MIG-1", pid=100), HeldSample)
        assert (sample.used, sample.total) == (7 * GIB, 10 * GIB)
        assert len(court.told(Subject(gpu="MIG-1"), DeviceSample)) == 1

    def test_a_host_process_of_an_engine_its_memory(self) -> None:
        process = HostProcess(5, 100, 1.0, 9 * GIB, 8 * GIB, "VLLM::EngineCore", engine="llm")
        court = Court("process").hear(FACTS, process, HostProcess(5, 7, 1.0, GIB, GIB, "Xorg"))
        (subject,) = court.witnesses()
        assert subject == Subject(engine="llm", pid=100)
        (sample,) = court.told(subject, HostSample)
        assert sample.process is process

    def test_an_engine_and_its_device_the_end_of_a_process(self) -> None:
        process = HostProcess(5, 100, 1.0, GIB, GIB, "VLLM::EngineCore", engine="llm")
        court = Court("engine", "device").hear(FACTS, process, poll(5, GpuProcess(100, GIB)), ProcessGone(9, 100))
        for subject in (LLM, DEVICE):
            (end,) = court.told(subject, ProcessEnd)
            assert (end.pid, end.holder.name) == (100, "llm")

    def test_what_was_about_a_process_that_ended_is_over(self) -> None:
        court = Court("held").hear(FACTS, poll(5, GpuProcess(100, GIB)), poll(15))
        assert court.witnesses() == {}

    def test_a_device_that_was_given_back_on_request_that_it_was(self) -> None:
        court = Court("device").hear(poll(5), DriverReport(10, "released"))
        samples = court.told(DEVICE, DeviceSample)
        assert [sample.memory for sample in samples] == [MEMORY, Absent("RELEASED")]

    def test_nobody_of_a_slice_that_was_destroyed(self) -> None:
        mig = MigInstance("MIG-1", 1, 0, MEMORY, ())
        sliced = replace(poll(5), mig=(mig,), mig_enabled=True)
        court = Court("device").hear(sliced, replace(poll(15), mig_enabled=True))
        assert list(court.witnesses()) == [DEVICE]

    def test_an_engine_that_its_processes_have_ended(self) -> None:
        court = Court("engine").hear(FACTS, scrape(10, rank()), replace(FACTS, t=15, gone=True))
        states = [s.state for s in court.told(LLM, EngineSample)]
        assert states == ["ok", "gone"]

    def test_nobody_of_an_engine_that_ended_long_ago(self) -> None:
        court = Court("rank", "engine").hear(FACTS, scrape(10, rank()), replace(FACTS, t=15, gone=True))
        assert set(court.hear(Tick(15 + 86_400)).witnesses()) == {LLM, RANK}
        assert court.hear(Tick(16 + 86_400)).witnesses() == {}

    def test_nobody_of_an_engine_that_left_the_configuration(self) -> None:
        court = Court("rank", "engine").hear(FACTS, scrape(10, rank()), TargetRemoved(11, "vllm", "llm"))
        assert court.witnesses() == {}


class TestLives:
    def segments(self, *observations: Observation) -> list[int]:
        court = Court("rank").hear(FACTS, *observations)
        return [s.segment for s in court.told(RANK, RankSample)]

    def test_one_life_is_one_segment(self) -> None:
        assert self.segments(scrape(10, rank(tokens=5)), scrape(20, rank(tokens=9))) == [1, 1]

    def test_a_missing_page_between_changes_nothing(self) -> None:
        assert self.segments(scrape(10, rank(tokens=5)), scrape(20, state="timeout"), scrape(30, rank(tokens=6))) == [
            1,
            1,
        ]

    @pytest.mark.parametrize(
        "after",
        [rank(tokens=1), rank(tokens=9, sleep="discard_all"), rank(tokens=9, blocks=50)],
        ids=["a restart", "sleep", "another pool"],
    )
    def test_a_new_one_begins_with(self, after: RankReading) -> None:
        assert self.segments(scrape(10, rank(tokens=5)), scrape(20, after)) == [1, 2]

    def test_a_new_one_begins_when_its_processes_had_ended(self) -> None:
        gone = EngineUpdate(15, FACTS.facts, gone=True)
        assert self.segments(scrape(10, rank(tokens=5)), gone, replace(FACTS, t=18), scrape(20, rank(tokens=6))) == [
            1,
            2,
        ]

    def test_gauges_that_come_with_the_first_traffic_begin_none(self) -> None:
        early = RankReading("0", prompt_tokens=0.0)
        assert self.segments(scrape(10, early), scrape(20, rank(tokens=5))) == [1, 1]

    def test_the_previous_reading_is_told_within_a_segment_only(self) -> None:
        court = Court("rank").hear(
            FACTS, scrape(10, rank(tokens=5)), scrape(20, rank(tokens=6)), scrape(30, rank(tokens=1))
        )
        samples = court.told(RANK, RankSample)
        assert [sample.since for sample in samples] == [None, 10, None]
        assert [sample.segment_start for sample in samples] == [10, 10, 30]


class TestAdapters:
    """Of LoRA. The load of one begins a new segment of memory, and of nothing else."""

    def course(self, *pages: Maybe[Adapters] | int, slots: int = 3) -> Court:
        """A scrape and a poll for each; a number is that of adapters seen."""
        court = Court("rank", "held").hear(FACTS)
        for number, page in enumerate(pages):
            adapters = Adapters(page, slots) if isinstance(page, int) else page
            t = 10.0 * (number + 1)
            court.hear(replace(scrape(t, rank(tokens=t)), adapters=adapters), poll(t, GpuProcess(100, GIB)))
        return court

    def loads(self, *pages: Maybe[Adapters] | int, slots: int = 3) -> list[bool]:
        """For each page but the first whether a new segment of memory began with it."""
        segments = [sample.segment for sample in self.course(*pages, slots=slots).told(HELD, HeldSample)]
        return [now > before for before, now in pairwise(segments)]

    def test_one_that_was_never_seen_is_a_load(self) -> None:
        assert self.loads(0, 1, 1, 2) == [True, False, True]

    def test_several_at_once_are_one(self) -> None:
        assert self.loads(0, 3, 3) == [True, False]

    def test_those_of_the_first_page_are_known(self) -> None:
        assert self.loads(2, 2, 3) == [False, True]

    def test_once_all_slots_are_taken_a_new_one_takes_anothers_place(self) -> None:
        assert self.loads(2, 3, *range(4, 1000)) == [True, *[False] * 996]

    def test_where_more_were_seen_than_there_are_slots_none_is_a_load(self) -> None:
        assert self.loads(7, 8, 9) == [False, False]

    def test_a_page_that_does_not_tell_changes_nothing(self) -> None:
        assert self.loads(NOT_EXPOSED, 1, NOT_EXPOSED, 1, 2) == [False, False, False, True]

    def test_a_count_that_falls_brings_no_load_when_it_rises_again(self) -> None:
        """Servers whose series do not stay on the page, as several behind one address."""
        assert self.loads(0, 2, 1, 2, 0, 2) == [True, False, False, False, False]

    def test_an_engine_without_slots_loads_none(self) -> None:
        assert self.loads(0, 1, slots=0) == [False]

    def test_a_restarted_engine_begins_anew(self) -> None:
        court = self.course(0, 3)
        for t, seen in ((30.0, 1), (40.0, 2)):
            page = replace(scrape(t, rank(tokens=t - 29)), adapters=Adapters(seen, 3))
            court.hear(page, poll(t, GpuProcess(100, GIB)))
        segments = [sample.segment for sample in court.told(HELD, HeldSample)]
        assert segments == sorted(set(segments)), "one of the restart, and one of the load after it"

    def test_the_account_of_the_kv_pool_goes_on(self) -> None:
        assert {sample.segment for sample in self.course(0, 1, 2, 3).told(RANK, RankSample)} == {1}

    def test_a_process_on_the_host_is_told_how_many_took_memory(self) -> None:
        process = HostProcess(40, 100, 1.0, GIB, GIB, "VLLM::EngineCore", engine="llm")
        court = Court("process").hear(FACTS)
        for t, seen in ((10.0, 0), (20.0, 1), (30.0, 2)):
            court.hear(replace(scrape(t, rank(tokens=t)), adapters=Adapters(seen, 8)))
        (told,) = court.hear(process).told(Subject(engine="llm", pid=100), HostSample)
        assert told.loads == 2

    def test_an_allocator_is_told_of_in_the_segment_of_its_process_and_in_the_life_of_its_engine(self) -> None:
        court = self.course(0, 1).hear(AllocatorReport(30, 100, "GPU-1"))
        (told,), (*_, held) = court.told(HELD, AllocatorSample), court.told(HELD, HeldSample)
        assert (told.segment, told.life, told.life_start) == (held.segment, 1, 10)


class TestVerdicts:
    def concluded(self, *answers: tuple[float, Finding], policy: Defaults | None = None) -> list[Verdict]:
        court = Court("rank", policy=policy).hear(FACTS, scrape(10, rank()))
        verdicts: list[Verdict] = []
        for t, answer in answers:
            court.witness(RANK).answer = answer
            verdicts.append(court.hear(Tick(t)).verdict())
        return verdicts

    def test_change_at_ticks_only(self) -> None:
        court = Court("rank").hear(FACTS, scrape(10, rank()))
        assert court.judge.verdicts() == ()
        court.hear(Tick(10))
        court.witness(RANK).answer = Finding("page")
        assert court.hear(scrape(20, rank())).verdict().state == "clear"
        assert court.hear(Tick(20)).verdict().state == "page"

    def test_carry_what_the_detector_said(self) -> None:
        finding = Finding("ticket", 0.8, "11 blocks are lost", {"floor_blocks": 11})
        (verdict,) = self.concluded((20, finding))
        assert (verdict.name, verdict.killer, verdict.state) == ("kv-block-leak", "leak", "ticket")
        assert (verdict.confidence, verdict.summary, verdict.evidence) == (
            0.8,
            "11 blocks are lost",
            {"floor_blocks": 11},
        )

    def test_remember_since_when_the_state_holds(self) -> None:
        answers = [(20.0, Finding("ticket")), (30.0, Finding("ticket")), (40.0, Finding("page"))]
        assert [verdict.since for verdict in self.concluded(*answers)] == [20, 20, 40]

    def test_stand_under_the_name_that_the_detector_gives(self) -> None:
        court = Court("held").hear(FACTS, poll(5, GpuProcess(100, 50 * GIB)), scrape(10, rank()))
        told = []
        for t, name in ((20.0, None), (30.0, "unaccounted-growth"), (40.0, "unaccounted-growth")):
            court.witness(HELD).answer = Finding("ticket", verdict=name, killer="fragmentation" if name else None)
            verdict = court.hear(Tick(t)).verdict()
            told.append((verdict.name, verdict.killer, verdict.since))
        assert told == [
            ("gpu-memory-leak", "leak", 20),
            ("unaccounted-growth", "fragmentation", 30),
            ("unaccounted-growth", "fragmentation", 30),
        ]

    def test_belong_to_an_incident_while_they_stand(self) -> None:
        answers = [(20.0, Finding("ticket")), (30.0, Finding("clear"))]
        assert [verdict.incident for verdict in self.concluded(*answers)] == ["llm/1", ""]

    def test_show_in_the_snapshot(self) -> None:
        court = Court("rank").hear(FACTS, scrape(10, rank()), Tick(10))
        assert court.judge.snapshot().verdicts == court.judge.verdicts()


class Quiet(Defaults):
    def silence(self, _verdict: str, _subject: Subject, t: float) -> str:
        return "maintenance" if t < 30 else ""


class Off(Defaults):
    def settings(self, _kind: Kind, _subject: Subject) -> Section | None:
        return None


class OffInItsPlace(Defaults):
    def is_off(self, verdict: str, _subject: Subject) -> bool:
        return verdict == "unaccounted-growth"


class Higher(Defaults):
    def settings(self, _kind: Kind, _subject: Subject) -> Section | None:
        return Level(level=7)


class TestPolicy:
    def test_a_planned_silence_shows_and_the_verdict_stands(self) -> None:
        court = Court("rank", policy=Quiet()).hear(FACTS, scrape(10, rank()))
        court.witness(RANK).answer = Finding("page")
        assert [(court.hear(Tick(t)).verdict().state, court.verdict().silenced) for t in (20, 30)] == [
            ("page", "maintenance"),
            ("page", ""),
        ]

    def test_a_verdict_that_is_switched_off_is_unknown_never_clear(self) -> None:
        verdict = Court("rank", policy=Off()).hear(FACTS, scrape(10, rank()), Tick(10)).verdict()
        assert (verdict.state, verdict.reason) == ("unknown", "switched off")

    def test_one_that_would_stand_in_anothers_place_can_be_switched_off_alone(self) -> None:
        court = Court("held", policy=OffInItsPlace()).hear(FACTS, poll(5, GpuProcess(100, 50 * GIB)))
        court.witness(HELD).answer = Finding("ticket", verdict="unaccounted-growth", evidence={"growth_bytes": 5})
        verdict = court.hear(Tick(10)).verdict()
        assert (verdict.name, verdict.state, verdict.reason) == ("gpu-memory-leak", "unknown", "switched off")
        assert verdict.gauges == {"growth_bytes": 5}
        court.witness(HELD).answer = Finding("ticket")
        assert court.hear(Tick(20)).verdict().state == "ticket"

    def test_other_thresholds_begin_a_detector_anew_and_the_same_ones_do_not(self) -> None:
        court = Court("rank").hear(FACTS, scrape(10, rank()))
        before = court.witness(RANK)
        court.judge.configure(Defaults())
        assert court.witness(RANK) is before
        court.judge.configure(Higher())
        assert court.witness(RANK) is not before
        assert court.witness(RANK).settings == Level(level=7)


def test_the_same_observations_give_the_same_verdicts() -> None:
    def run(observations: Iterable[Observation]) -> list[tuple[Verdict, ...]]:
        court = Court()
        course: list[tuple[Verdict, ...]] = []
        for observation in observations:
            court.hear(observation)
            course.append(court.judge.verdicts())
        return course

    observations: list[Observation] = [FACTS]
    for t in range(10, 200, 10):
        observations += [poll(t, GpuProcess(100, t * GIB // 10)), scrape(t, rank(tokens=t)), Tick(t)]
    assert run(observations) == run(observations)
