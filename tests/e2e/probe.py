"""The probe as a user installs it: a wheel, built from this repository, in a folder on the engine's import path."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread

from oomwatch.probe_layout import Absence, Report, decode
from tests.documents import REPOSITORY
from tests.e2e.processes import wait_for

SOURCE = REPOSITORY / "probe"


def install_probe(folder: Path) -> Path:
    """Builds the wheel and installs it into ``folder``, without looking for a dependency; returns the folder."""
    options = ["--quiet", "--disable-pip-version-check", "--no-deps", "--no-build-isolation", "--no-input"]
    command = [sys.executable, "-m", "pip", "install", *options, "--target", str(folder), str(SOURCE)]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    return folder


class ProbeFolder:
    """The files that the probes of an engine write, read as the daemon reads them."""

    def __init__(self, path: Path, interval_s: float = 0.05) -> None:
        self.path = path
        self.environment = {"OOMWATCH_PROBE_DIR": str(path), "OOMWATCH_PROBE_INTERVAL": str(interval_s)}

    def reports(self) -> list[Report]:
        return [decode(data) for path in self.path.glob("probe-*") if (data := path.read_bytes())]

    def core(self) -> Report:
        """That of the one engine core."""
        (report,) = (one for one in self.reports() if one.texts["scheduler"])
        return report

    def wait_for(self, condition: Callable[[Report], bool], what: str, timeout_s: float = 30) -> Report:
        """The first report of the engine core that meets ``condition``."""
        return wait_for(self.core, condition, timeout_s, what, interval_s=0.02)

    def wait_for_count(self, what: str = "the blocks were counted again") -> Report:
        """The first report whose blocks were counted after this call."""
        now = time.time_ns()
        return self.wait_for(lambda report: number(report, "blocks_time_ns") > now, what)

    @contextmanager
    def collected(self) -> Iterator[list[Report]]:
        """All counts of the engine core's blocks that are written meanwhile, each once."""
        times: set[int] = set()
        counts: list[Report] = []
        stop = Event()

        def collect() -> None:
            while not stop.wait(0.01):
                report = self.core()
                if number(report, "blocks_time_ns") not in times:
                    times.add(number(report, "blocks_time_ns"))
                    counts.append(report)

        thread = Thread(target=collect, daemon=True)
        thread.start()
        try:
            yield counts
        finally:
            stop.set()
            thread.join(30)


def number(report: Report, name: str) -> int:
    """A number that is there; -1 where it is absent."""
    value = report.numbers[name]
    return -1 if isinstance(value, Absence) else value
