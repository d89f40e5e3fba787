"""One configuration makes one judge, whoever asks: the daemon, a check, a replay, a post-mortem."""

from __future__ import annotations

from oomwatch.config import Config, load
from oomwatch.configured import cadence_of, configure, judge_of
from oomwatch.judge import Judge
from oomwatch.node import Cadence
from oomwatch.observations import EngineFacts, EngineScrape, EngineUpdate, Tick

STUCK_IS_OFF = {"OOMWATCH_DETECTION__OFF": "[{verdicts: [engine-stuck]}]"}


def configured(**variables: str) -> Config:
    return load(None, variables, {})


def reason(judge: Judge, t: float) -> str:
    """Why nothing is concluded of whether an engine is stuck."""
    judge.apply(EngineUpdate(t, EngineFacts("chat", target="http://127.0.0.1:8000/metrics")))
    judge.apply(EngineScrape(t, "chat", "refused", 0.01))
    judge.apply(Tick(t))
    (found,) = (verdict for verdict in judge.verdicts() if verdict.name == "engine-stuck")
    return found.reason


def test_lists_of_processes_come_with_a_whole_number_of_readings_of_the_gpus() -> None:
    cadence = cadence_of(configured(OOMWATCH_INTERVALS__GPU="4s", OOMWATCH_INTERVALS__PROCESSES="12s"))
    assert (cadence.gpu, cadence.process) == (4, 12)


def test_a_judge_obeys_the_configuration_and_at_work_the_next_one() -> None:
    judge = judge_of(configured(**STUCK_IS_OFF))
    assert reason(judge, 10.0) == "switched off"
    configure(judge, Config())
    assert reason(judge, 20.0) not in ("", "switched off")


def test_another_cadence_than_the_configurations_can_be_given() -> None:
    config = configured(OOMWATCH_INTERVALS__SCRAPE="15s")
    for judge, still_known in ((judge_of(config), False), (judge_of(config, Cadence(scrape=600)), True)):
        judge.apply(EngineUpdate(0.0, EngineFacts("chat", target="http://127.0.0.1:8000/metrics")))
        judge.apply(EngineScrape(0.0, "chat", "ok", 0.01))
        judge.apply(Tick(600.0))
        (engine,) = judge.snapshot().engines
        assert (engine.scrape is not None) is still_known
