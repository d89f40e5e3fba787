"""Runs as real text through the whole daemon: ``python -m benchmarks.detection.as_text``.

Of every family a run of some hours, with its fault two hours after the start: each of the engine's pages is written as
the text of /metrics, read by the daemon's own reader, folded and judged with every verdict in the daemon's pipeline,
and what the daemon then exposes is read back as Prometheus would. All that is compared with the observations that the
benchmark makes without any text.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial

from prometheus_client.parser import text_string_to_metric_families

from benchmarks.detection.alarms import Change
from benchmarks.detection.families import FAMILIES, Scenario
from benchmarks.detection.ours import detect_all
from benchmarks.detection.render import facts, observations, page
from benchmarks.detection.sets import load
from benchmarks.detection.traffic import Traces
from benchmarks.detection.world import Run, build
from oomwatch.detectors.base import Subject
from oomwatch.exposition import ConfigStatus, SnapshotCollector, registry, render
from oomwatch.judge import Judge
from oomwatch.node import Node
from oomwatch.observations import EngineScrape, Observation, Tick
from oomwatch.pipeline import Pipeline
from oomwatch.sources.vllm.meaning import read_page
from oomwatch.sources.vllm.pages import read
from oomwatch.verdicts import Verdict

ONSET = 2 * 3600.0
TICKS = 4  # a conclusion after so many samples


def shortened(scenario: Scenario, hours: float) -> Scenario:
    """The scenario's first hours on one GPU, with its fault at ONSET and as fast as it may be."""
    shift = ONSET - (scenario.events[0].begin if scenario.events else 0.0)
    return scenario._replace(
        days=hours / 24,
        ranks=1,
        leak=scenario.leak._replace(onset=ONSET, hours=hours / 2),
        gpu_fault=scenario.gpu_fault._replace(onset=ONSET),
        host_onset=ONSET,
        host_hours=min(scenario.host_hours, hours),
        events=tuple(e._replace(begin=e.begin + shift, end=e.end + shift) for e in scenario.events),
        traffic=scenario.traffic._replace(growth_from=ONSET / 86400),
    )


def from_text(run: Run) -> Iterator[Observation]:
    """The run's observations, with the engine's pages read from text."""
    known, i = facts(run), -1
    for observation in observations(run, ticks=TICKS):
        if not isinstance(observation, EngineScrape):
            yield observation
            continue
        i += 1
        text = page(run, i)
        if text is None:
            yield observation
            continue
        reading = read_page(read(text.encode()), run.scenario.version, known)
        yield replace(
            observation,
            state=reading.state,
            error=reading.error,
            ranks=reading.ranks,
            model_name=reading.model_name,
            process_start=reading.process_start,
            kv_connector=reading.kv_connector,
        )


def without_text(run: Run) -> list[Change]:
    """Changes of verdicts' states as the benchmark finds them, in an order of their own."""
    return sorted(detect_all(observations(run, ticks=TICKS), ()), key=repr)


def through_the_daemon(run: Run) -> tuple[list[Change], int]:
    """The same changes in the pipeline, in the same order, and how many of the daemon's own pages were read back."""
    pipeline = Pipeline(Judge(Node()))
    status = ConfigStatus(True, 0.0, "")
    collector = registry(
        SnapshotCollector(lambda: pipeline.current, process_series_per_gpu=lambda: 64, config=lambda: status)
    )
    states: dict[tuple[str, Subject], str] = {}
    changes: list[Change] = []
    pages = 0
    pipeline.start()
    for observation in from_text(run):
        pipeline.publish(observation)
        if not isinstance(observation, Tick):
            continue
        assert pipeline.flush(60.0)
        assert not pipeline.defects.count
        for verdict in pipeline.current.verdicts:
            key = (verdict.name, verdict.subject)
            if states.get(key, "clear") != verdict.state:
                states[key] = verdict.state
                changes.append((observation.t, verdict.name, str(verdict.state), verdict.subject.labels()))
        if changes and changes[-1][0] == observation.t:
            _compare(render(collector, "")[0].decode(), pipeline.current.verdicts)
            pages += 1
    pipeline.stop()
    return sorted(changes, key=repr), pages


def _compare(text: str, verdicts: Iterable[Verdict]) -> None:
    """Every verdict that is known is exposed with its state, and no other."""
    families = {family.name: family for family in text_string_to_metric_families(text)}
    shown = sorted((s.labels["verdict"], s.value) for s in families["oomwatch_verdict_state"].samples)
    assert shown == sorted((verdict.name, float(verdict.level)) for verdict in verdicts if verdict.state != "unknown")


def compared(family: str, hours: float) -> tuple[bool, str]:
    """Whether text through the daemon changed nothing in the family's run, and what there was to compare."""
    run = build(shortened(next(load()["tune"].scenarios((family,), 1)), hours), Traces())
    if run is None:
        return True, "came to no harm"
    changes, pages = through_the_daemon(run)
    same = changes == without_text(run)
    return same, (
        f"{int(run.scraped.sum())} pages of text, {len(changes)} changes of verdicts, "
        f"{pages} own pages read back: {'the same' if same else 'NOT the same'}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.detection.as_text", description=__doc__)
    parser.add_argument("--hours", type=float, default=24.0)
    parser.add_argument("--family", action="append", choices=sorted(FAMILIES))
    parser.add_argument("--workers", type=int, default=2, help="processes (default 2)")
    options = parser.parse_args()
    families = options.family or list(FAMILIES)
    alike = True
    with ProcessPoolExecutor(options.workers) as workers:
        found = workers.map(partial(compared, hours=options.hours), families)
        for family, (same, told) in zip(families, found, strict=True):
            alike &= same
            print(f"{family}: {told}", flush=True)
    return 0 if alike else 1


if __name__ == "__main__":
    sys.exit(main())
