"""One way for the data: observations in, one owner, immutable snapshots out."""

from __future__ import annotations

import threading
from collections.abc import Generator
from typing import cast

import pytest

from oomwatch.judge import Judge
from oomwatch.node import Node
from oomwatch.observations import HostMemory, Observation, Tick
from oomwatch.pipeline import Pipeline
from oomwatch.snapshot import EMPTY


@pytest.fixture
def pipeline() -> Generator[Pipeline]:
    running = Pipeline(Judge(Node()))
    running.start()
    yield running
    running.stop()


def test_an_observation_shows_in_the_next_snapshot(pipeline: Pipeline) -> None:
    pipeline.publish(HostMemory(t=100.0, total=64, available=32))
    snapshot = pipeline.wait_for(lambda s: s.host is not None, 5)
    assert snapshot is not None
    assert snapshot.host == HostMemory(100.0, 64, 32)
    assert snapshot.t == 100.0


def test_a_reader_keeps_the_snapshot_it_took(pipeline: Pipeline) -> None:
    pipeline.publish(HostMemory(t=100.0, total=64, available=32))
    before = pipeline.wait_for(lambda s: s.host is not None, 5)
    pipeline.publish(HostMemory(t=110.0, total=64, available=16))
    assert pipeline.wait_for(lambda s: s.t == 110.0, 5) is not None
    assert before is not None
    assert before.host == HostMemory(100.0, 64, 32)


def test_an_observation_that_cannot_be_folded_does_not_end_the_owner(pipeline: Pipeline) -> None:
    pipeline.publish(cast(Observation, "not an observation"))
    pipeline.publish(Tick(t=5.0))
    assert pipeline.wait_for(lambda s: s.t == 5.0, 5) is not None
    assert pipeline.alive
    assert pipeline.defects.count == 1


def test_settings_change_between_two_observations(pipeline: Pipeline) -> None:
    owner: list[str] = []
    pipeline.on_judge(lambda _judge: owner.append(threading.current_thread().name))
    assert pipeline.flush(5)
    assert owner == ["pipeline"]


def test_an_observer_is_told_everything_that_was_folded() -> None:
    told: list[Observation] = []
    pipeline = Pipeline(Judge(Node()), [told.append])
    pipeline.start()
    pipeline.publish(cast(Observation, "not an observation"))
    pipeline.publish(Tick(t=5.0))
    assert pipeline.flush(5)
    assert told == [Tick(t=5.0)]
    pipeline.stop()


def test_flush_waits_for_everything_published_before(pipeline: Pipeline) -> None:
    for second in range(1, 2001):
        pipeline.publish(Tick(t=float(second)))
    assert pipeline.flush(10)
    assert pipeline.current.t == 2000.0


def test_waiting_for_what_never_comes_ends_at_its_deadline(pipeline: Pipeline) -> None:
    assert pipeline.wait_for(lambda s: s.t == 1.0, 0.01) is None


def test_a_stop_folds_what_was_published_before(pipeline: Pipeline) -> None:
    assert pipeline.current is EMPTY
    pipeline.publish(Tick(t=7.0))
    pipeline.stop()
    assert not pipeline.alive
    assert pipeline.current.t == 7.0


def test_a_snapshot_that_cannot_be_built_shows_nothing_rather_than_the_past(monkeypatch: pytest.MonkeyPatch) -> None:
    judge = Judge(Node())
    pipeline = Pipeline(judge)
    pipeline.start()
    pipeline.publish(Tick(t=1.0))
    assert pipeline.wait_for(lambda s: s.t == 1.0, 5) is not None
    monkeypatch.setattr(judge, "snapshot", lambda: 1 / 0)
    pipeline.publish(Tick(t=2.0))
    assert pipeline.wait_for(lambda s: s is EMPTY, 5) is EMPTY
    assert pipeline.alive
    pipeline.stop()
