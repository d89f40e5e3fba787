"""A source on the simulated driver library, and what it published."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

import pytest

from oomwatch.observations import DriverReport, GpuPoll, Observation, SourceRun
from oomwatch.sources.nvml import NvmlSource
from tests.nvml_sim import Sim, load_into_pynvml

T = TypeVar("T")


class Published:
    """What a source published, in order; waits instead of sleeping."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._observations: list[Observation] = []

    def __call__(self, observation: Observation) -> None:
        with self._changed:
            self._observations.append(observation)
            self._changed.notify_all()

    def all(self, kind: type[T]) -> list[T]:
        with self._changed:
            return self._of(kind)

    def polls(self, uuid: str) -> list[GpuPoll]:
        return [poll for poll in self.all(GpuPoll) if poll.uuid == uuid]

    def poll(self, uuid: str) -> GpuPoll:
        return self.polls(uuid)[-1]

    def driver(self) -> DriverReport:
        return self.all(DriverReport)[-1]

    def run(self, target: str = "") -> SourceRun:
        return [run for run in self.all(SourceRun) if run.target == target][-1]

    def wait(self, kind: type[T], count: int = 1, deadline: float = 10.0) -> list[T]:
        with self._changed:
            reached = self._changed.wait_for(lambda: len(self._of(kind)) >= count, deadline)
            assert reached, f"{len(self._of(kind))} of {count} {kind.__name__} after {deadline} s"
            return self._of(kind)

    def _of(self, kind: type[T]) -> list[T]:
        return [observation for observation in self._observations if isinstance(observation, kind)]

    def clear(self) -> None:
        with self._changed:
            self._observations.clear()


class Watched:
    """A source on a simulated driver, polled by hand."""

    def __init__(self, sim: Sim, source: NvmlSource, seen: Published) -> None:
        self.sim = sim
        self.source = source
        self.seen = seen

    def cycle(self, count: int = 1) -> None:
        """What the scheduler does each interval."""
        for _ in range(count):
            self.source.refresh()
            self.source.poll_all()

    def uuid(self, slot: int) -> str:
        return self.sim.uuid(slot)

    def poll(self, slot: int) -> GpuPoll:
        return self.seen.poll(self.sim.uuid(slot))


Watch = Callable[..., Watched]


@pytest.fixture
def watch(
    make_sim: Callable[..., Sim], nvml_variant: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Watch]:
    """Makes a source on a simulated driver with the given GPUs; ``start=False`` leaves the first cycle to the test."""
    with ExitStack() as stack:

        def make(
            gpus: Any = 2,
            *,
            variant: str = "default",
            driver: dict[str, Any] | None = None,
            start: bool = True,
            **options: Any,
        ) -> Watched:
            sim = make_sim(gpus, **(driver or {}))
            stack.enter_context(load_into_pynvml(nvml_variant(variant), sim))
            seen = Published()
            source = NvmlSource(seen, **({"deadline": 3.0} | options))
            stack.callback(_end, sim, source)
            watched = Watched(sim, source, seen)
            if start:
                watched.cycle()
            return watched

        yield make


def _end(sim: Sim, source: NvmlSource) -> None:
    """Closes the source and waits until none of its threads is inside the library any more."""
    sim.clear_faults()
    source.close()
    until(lambda: not any(thread.name.startswith("nvml-") for thread in threading.enumerate()))


def until(condition: Callable[[], bool], deadline: float = 10.0) -> None:
    end = time.monotonic() + deadline
    while not condition():
        assert time.monotonic() < end, f"not reached within {deadline} s"
        time.sleep(0.005)
