"""What a benchmark's run leaves behind: a file of JSON lines, a header and one line for each run, added as it ends."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import oomwatch
from benchmarks.detection import sets
from benchmarks.detection.families import Scenario
from benchmarks.detection.score import Outcome


class ResultsError(Exception):
    """A file of results that cannot be read, or that another benchmark or other detectors made."""


@dataclass
class Results:
    """``harmless``: names of faulty runs that came to no harm."""

    header: Mapping[str, Any]
    outcomes: list[Outcome] = field(default_factory=list)
    harmless: list[str] = field(default_factory=list)


def header(real_traces: bool, detector: str, ticks: int) -> dict[str, Any]:
    """What has to be the same for runs to belong together."""
    return {
        "manifest": sets.MANIFEST_SHA256,
        "traffic": "public traces" if real_traces else "generator fitted to the public traces",
        "detector": detector,
        "ticks": ticks,
        "code": code(),
    }


def code() -> str:
    """SHA-256 of the detectors' source."""
    digest = hashlib.sha256()
    for path in sorted((Path(oomwatch.__file__).parent / "detectors").glob("*.py")):
        digest.update(path.name.encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def read(path: Path) -> Results:
    """A file's results. Raises ResultsError; a last line that breaks off, as an interrupted writer leaves it, is
    passed over."""
    lines = path.read_text(encoding="utf-8").split("\n")
    try:
        found = Results(json.loads(lines[0]))
        for line in lines[1:-1]:
            entry = json.loads(line)
            if "harmless" in entry:
                found.harmless.append(entry["harmless"])
            else:
                found.outcomes.append(Outcome.of_document(entry))
    except (ValueError, TypeError, KeyError) as error:
        raise ResultsError(f"{path} holds no results of this benchmark: {error}") from error
    return found


class Log:
    """Results as they come, in memory and, where a path is given, in its file, which is continued."""

    def __init__(self, head: Mapping[str, Any], path: Path | None) -> None:
        self.results = Results(head)
        self._file: IO[str] | None = None
        if path is None:
            return
        if path.exists() and path.stat().st_size:
            self.results = read(path)
            if self.results.header != head:
                raise ResultsError(
                    f"{path} was made with {self.results.header}, and this is {head}: give another --output"
                )
            _drop_torn_line(path)
            self._file = path.open("a", encoding="utf-8")
        else:
            self._file = path.open("w", encoding="utf-8")
            self._write(head)

    def __enter__(self) -> Log:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _tb: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()

    def has(self, scenario: Scenario) -> bool:
        return scenario.name in self.results.harmless or any(
            (o.set, o.family, o.number) == (scenario.set, scenario.family, scenario.number)
            for o in self.results.outcomes
        )

    def add(self, scenario: Scenario, outcome: Outcome | None) -> None:
        """Keep what came of a run; None where its fault came to no harm."""
        if outcome is None:
            self.results.harmless.append(scenario.name)
            self._write({"harmless": scenario.name})
        else:
            self.results.outcomes.append(outcome)
            self._write(outcome.document())

    def _write(self, entry: Mapping[str, Any]) -> None:
        if self._file is not None:
            self._file.write(json.dumps(entry, separators=(",", ":")) + "\n")
            self._file.flush()


def _drop_torn_line(path: Path) -> None:
    body = path.read_bytes()
    path.write_bytes(body[: body.rfind(b"\n") + 1])
