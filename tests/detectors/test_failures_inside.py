"""runtime-oom where no log is read: by the probes inside the workers, whose numbers decide as those of a log would."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest

from oomwatch.detectors.base import AllocatorSample, EngineSample, Finding, LogSample, ProcessEnd, Sample, Subject
from oomwatch.detectors.outcomes import RuntimeOom, RuntimeOomSettings
from oomwatch.observations import AllocationFailure
from oomwatch.snapshot import Holder
from tests.detectors.leaking import FACTS, GIB, HOUR, MIB, allocator

T = 2 * HOUR
# vllm-project/vllm PR #37428: 384 MiB wanted, 329.87 MiB free, 402.27 MiB reserved and not allocated.
IN_PIECES = AllocationFailure(T, 384 * MIB, 330 * MIB, 75 * GIB - 402 * MIB, 75 * GIB, 80 * GIB)
TOO_LITTLE = replace(IN_PIECES, wanted=GIB)
RACE = replace(IN_PIECES, wanted=300 * MIB)


def told(
    failure: AllocationFailure | None, t: float = T + 5, pid: int = 7, ready_since: float | None = 0.0
) -> AllocatorSample:
    sample = allocator(t, 74 * GIB, 75 * GIB, ready_since=ready_since, failure=failure)
    return replace(sample, report=replace(sample.report, pid=pid))


def ended(t: float, pid: int = 7) -> ProcessEnd:
    return ProcessEnd(t, pid, Holder("engine", "llama"))


def concluded(samples: Iterable[Sample], t: float = T + 10) -> Finding:
    detector = RuntimeOom(Subject(engine="llama"), RuntimeOomSettings.model_validate({}))
    for sample in samples:
        detector.observe(sample)
    return detector.conclude(t)


@pytest.mark.parametrize(
    ("failure", "killer", "cause"),
    [
        (IN_PIECES, "fragmentation", "in_pieces"),
        (TOO_LITTLE, "capacity", "too_little"),
        (RACE, "capacity", "race"),
        (AllocationFailure(T), "capacity", "unknown"),
    ],
)
def test_the_numbers_of_the_failure_name_the_killer(failure: AllocationFailure, killer: str, cause: str) -> None:
    finding = concluded([told(None, T - 5), told(failure)])
    assert (finding.state, finding.killer, finding.evidence["cause"]) == ("ticket", killer, cause)


def test_its_evidence_is_that_of_a_log() -> None:
    evidence = concluded([told(IN_PIECES)]).evidence
    assert evidence["wanted_bytes"] == 384 * MIB
    assert evidence["free_bytes"] == 330 * MIB
    assert evidence["reserved_unallocated_bytes"] == 402 * MIB
    assert evidence["total_bytes"] == 80 * GIB
    assert evidence["last_failure"] == T


def test_it_pages_when_the_worker_ends_of_it() -> None:
    assert concluded([told(IN_PIECES), ended(T + 8)]).state == "page"


def test_it_pages_when_the_end_is_noticed_before_the_last_word_is_read() -> None:
    assert concluded([told(None, T - 5), ended(T + 3), told(IN_PIECES)]).state == "page"


def test_it_pages_when_the_engine_core_dies() -> None:
    dead = EngineSample(T + 8, "llama", "dead", "", FACTS, (), 1, 0.0, ())
    assert concluded([told(IN_PIECES), dead]).state == "page"


def test_the_end_of_another_process_is_not_its_death() -> None:
    assert concluded([told(IN_PIECES), ended(T + 8, pid=99)]).state == "ticket"


def test_the_ranks_of_an_engine_are_one_failure() -> None:
    finding = concluded([told(IN_PIECES), told(replace(IN_PIECES, t=T + 1), pid=8)])
    assert finding.evidence["workers"] == 2


def test_what_is_told_again_is_one_failure() -> None:
    assert concluded([told(IN_PIECES, T + at) for at in (5, 10, 15)]).evidence["workers"] == 1


def test_a_failure_of_hours_ago_that_is_seen_for_the_first_time_is_history() -> None:
    assert concluded([told(replace(IN_PIECES, t=T - HOUR))]).state == "clear"


@pytest.mark.parametrize("ready_since", [None, T + 1])
def test_one_before_the_engine_served_is_none_of_a_serving_engine(ready_since: float | None) -> None:
    assert concluded([told(IN_PIECES, ready_since=ready_since)]).state == "clear"


def test_a_log_that_is_read_has_the_word() -> None:
    assert concluded([LogSample(T, "llama", True), told(IN_PIECES)]).state == "clear"


def test_without_failures_it_is_clear_while_a_probe_tells_and_unknown_without_one() -> None:
    assert concluded([]).state == "unknown"
    assert concluded([told(None)]).state == "clear"
    assert concluded([told(None)], T + 190).state == "unknown"


def test_a_probe_that_cannot_read_the_allocator_tells_nothing() -> None:
    silent = told(None)
    assert concluded([replace(silent, report=replace(silent.report, stats={}))]).state == "unknown"
