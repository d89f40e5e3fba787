"""Every out-of-memory sentence of the cases: its numbers force a killer, and its text suggests another one."""

from __future__ import annotations

import gzip
import io
import json
import re
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

import pytest

from oomwatch.diagnose.postmortem import of_log
from oomwatch.enginelog.events import OutOfMemory
from oomwatch.enginelog.killer import cause_of
from oomwatch.enginelog.reader import parse

CASES = Path(__file__).parents[1] / "data" / "cases"
WRITTEN = 1_794_000_000.0  # in November 2026
UNITS = {"bytes": 1, "KiB": 1024, "MiB": 1024**2, "GiB": 1024**3}


def lines_of(case: Path, holding: str = "Tried to allocate") -> Iterator[str]:
    with gzip.open(case / "recording.jsonl.gz", "rt", encoding="utf-8") as recording:
        for line in recording:
            log = json.loads(line).get("log")
            if log is not None and holding in log["line"]:
                yield log["line"]


def size(pattern: str, line: str) -> Fraction:
    found = re.search(pattern.replace("SIZE", r"([\d.]+) (bytes|[KMG]iB)"), line)
    assert found is not None
    return Fraction(found[1]) * UNITS[found[2]]


def forced(line: str) -> str:
    """By hand: free < wanted <= free + reserved is fragmentation, all else is not."""
    wanted, free = size("Tried to allocate SIZE", line), size("of which SIZE is free", line)
    reserved = size("SIZE is reserved by PyTorch but unallocated", line)
    return "fragmentation" if free < wanted <= free + reserved else "capacity"


SENTENCES = [
    (case, line) for case in sorted(CASES.glob("*-*")) if case.is_dir() for line in dict.fromkeys(lines_of(case))
]
OF_CASES = sorted({case for case, _ in SENTENCES})


def test_there_are_both_kinds() -> None:
    assert {forced(line) for _, line in SENTENCES} == {"capacity", "fragmentation"}
    assert len(OF_CASES) >= 8


@pytest.mark.parametrize(("case", "line"), SENTENCES, ids=lambda value: value.name if isinstance(value, Path) else "")
def test_the_killer_is_the_one_that_the_numbers_force(case: Path, line: str) -> None:
    entry = parse(line.encode())
    assert entry is not None
    assert isinstance(entry.event, OutOfMemory)
    cause = cause_of(entry.event)
    assert cause.killer == forced(line), case.name
    assert cause.confidence >= 0.5
    assert cause.strength is not None
    assert (cause.strength >= 1) == (cause.killer == "fragmentation")


@pytest.mark.parametrize("case", OF_CASES, ids=lambda case: case.name)
def test_so_is_the_verdicts(case: Path) -> None:
    """Of a post-mortem of the case's log; the verdicts of its recording are held against the case itself elsewhere."""
    lines = list(lines_of(case))
    found = of_log(case.name, io.BytesIO("\n".join(lines_of(case, "")).encode()), WRITTEN)
    about = [verdict for one in found.incidents for verdict in one.verdicts if verdict.name.endswith("-oom")]
    assert {verdict.killer for verdict in about} == {forced(line) for line in lines}
    assert all(verdict.advice for verdict in about)
    told = " ".join(line for verdict in about for line in verdict.advice)
    assert ("expandable_segments" in told) <= (about[0].killer == "fragmentation")
