"""Public reports as small recordings: what must, and must not, be concluded from each."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from oomwatch.recording import read
from oomwatch.replay import json_lines, replay

CASES = Path(__file__).parent / "data" / "cases"
FOLDERS = sorted(path.parent for path in CASES.glob("*/expected.json"))


def _check() -> ModuleType:
    spec = importlib.util.spec_from_file_location("cases_check", CASES / "check.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


CHECK = _check()


def rows_of(folder: Path) -> list[dict[str, Any]]:
    with read(next(folder.glob("recording.jsonl*"))) as recording:
        return [json.loads(line) for line in json_lines(replay(recording))]


def problems_of(folder: Path, rows: list[dict[str, Any]]) -> list[str]:
    """What is wrong with the rows, as check.py finds it."""
    expected = json.loads((folder / "expected.json").read_text())
    verdicts = [row for row in rows if "verdict" in row]
    problems: list[str] = []
    for want in expected["must"]:
        options = [CHECK.failure_of_must(verdicts, one) for one in want.get("any_of", [want])]
        if all(options):
            problems.append(" / ".join(options))
    return problems + [p for want in expected["must_not"] if (p := CHECK.failure_of_must_not(verdicts, want))]


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_a_case_is_judged_as_its_numbers_force(folder: Path) -> None:
    rows = rows_of(folder)
    assert rows[-1]["summary"]["observations"] > 0
    assert problems_of(folder, rows) == []


@pytest.mark.parametrize("number", ["073", "139"])
def test_the_command_says_what_the_replay_within_says(number: str) -> None:
    (folder,) = CASES.glob(f"{number}-*")
    command = f"{sys.executable} -m oomwatch.cli replay {{recording}} --format json"
    assert CHECK.replay(command, next(folder.glob("recording.jsonl*"))) == rows_of(folder)
