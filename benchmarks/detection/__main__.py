"""The detection benchmark: ``python -m benchmarks.detection --help``."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, cast

from benchmarks.detection import baselines, score, sets
from benchmarks.detection.alarms import LEVELS, Alarm, Detector, alarms_of, firings, merged
from benchmarks.detection.families import APART, FAMILIES, FAULT_CLASSES, Scenario
from benchmarks.detection.render import EPOCH, observations
from benchmarks.detection.score import Outcome
from benchmarks.detection.traffic import Traces
from benchmarks.detection.world import Run, build, strained

BESIDE_THE_REPOSITORY = Path(__file__).resolve().parents[2].parent / "shared" / "traces"
QUICK = ("idle_nights", "missing_scrapes", "kv_finish", "gpu_steady", "host_steady", "stuck_engine")
QUICK_DAYS = 2.0
OURS = "benchmarks.detection.ours:detect"


@dataclass(frozen=True)
class Options:
    """What a worker is told."""

    traces: Path | None
    detector: str | None
    ticks: int
    with_baselines: bool


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    traces = Traces(options.traces)
    if options.write_manifest:
        sets.MANIFEST.write_text(sets.freeze(traces), encoding="utf-8")
        print(f"{sets.MANIFEST} written; now write its SHA-256 into {sets.__file__}", file=sys.stderr)
        return 0
    begin = time.monotonic()
    if options.rescore:
        document = json.loads(options.rescore.read_text(encoding="utf-8"))
    else:
        document = _run(options, traces)
        document["seconds"] = time.monotonic() - begin
        if options.output:
            options.output.write_text(json.dumps(document), encoding="utf-8")
    text = report(document)
    if options.markdown:
        options.markdown.write_text(text, encoding="utf-8")
    else:
        print(text)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.detection", description=sets.__doc__)
    parser.add_argument("--set", dest="sets", action="append", choices=("tune", "test", "ood"), help="default: test")
    parser.add_argument("--family", action="append", choices=sorted(FAMILIES), help="only these; may be repeated")
    parser.add_argument("--at-most", type=int, metavar="N", help="runs of each family")
    parser.add_argument("--quick", action="store_true", help="one short run of a few families, about a minute")
    parser.add_argument("--workers", type=int, default=2, help="processes (default 2)")
    parser.add_argument(
        "--traces",
        type=Path,
        default=Path(os.environ.get("OOMWATCH_TRACES") or BESIDE_THE_REPOSITORY),
        help="folder of the public traces (default OOMWATCH_TRACES, or shared/traces beside the repository); "
        "without them traffic is made up by a generator fitted to them",
    )
    parser.add_argument("--detector", default=OURS, metavar="MODULE:FUNCTION", help=f"default {OURS}")
    parser.add_argument("--no-detector", action="store_true", help="only the baselines")
    parser.add_argument("--no-baselines", action="store_true")
    parser.add_argument("--ticks", type=int, default=4, metavar="N", help="conclude after every N samples (default 4)")
    parser.add_argument("--output", type=Path, help="JSON of every run's alarms")
    parser.add_argument("--markdown", type=Path, help="tables; default: standard output")
    parser.add_argument("--rescore", type=Path, metavar="JSON", help="make the tables of an earlier --output anew")
    parser.add_argument("--write-manifest", action="store_true", help="freeze other sets of runs: another benchmark")
    return parser


def _run(options: argparse.Namespace, traces: Traces) -> dict[str, Any]:
    known = sets.load()
    chosen = options.sets or (["tune"] if options.quick else ["test"])
    scenarios: list[Scenario] = []
    for name in chosen:
        sets.check(known[name])
        families = tuple(options.family or (QUICK if options.quick else ()))
        drawn = list(known[name].scenarios(families, options.at_most))
        scenarios += _shortest(drawn) if options.quick else drawn
    work = Options(
        options.traces if traces.real else None,
        None if options.no_detector else options.detector,
        options.ticks,
        not options.no_baselines,
    )
    # The longest first, so that no worker is left alone with one at the end.
    scenarios.sort(key=lambda s: -s.days * s.ranks)
    outcomes = []
    harmless: list[str] = []
    for done, (scenario, outcome) in enumerate(_outcomes(scenarios, work, options.workers), 1):
        if outcome is None:
            harmless.append(scenario.name)
        else:
            outcomes.append(outcome)
        if done % 10 == 0 or done == len(scenarios):
            print(f"{done} of {len(scenarios)} runs", file=sys.stderr)
    return {
        "sets": chosen,
        "traces": "public traces" if traces.real else "generator fitted to the public traces",
        "manifest_sha256": sets.MANIFEST_SHA256,
        "harmless": sorted(harmless),
        "outcomes": [outcome.document() for outcome in sorted(outcomes, key=lambda o: (o.set, o.family, o.number))],
    }


def _shortest(scenarios: Sequence[Scenario]) -> list[Scenario]:
    """One run of each family: the shortest, and of healthy ones the first days."""
    by_family: dict[str, Scenario] = {}
    for scenario in sorted(scenarios, key=lambda s: s.days * s.ranks):
        by_family.setdefault(scenario.family, scenario)
    return [s if s.fault else s._replace(days=min(s.days, QUICK_DAYS)) for s in by_family.values()]


def _outcomes(scenarios: Sequence[Scenario], work: Options, workers: int) -> Iterable[tuple[Scenario, Outcome | None]]:
    if workers <= 1:
        for scenario in scenarios:
            yield scenario, outcome_of(scenario, work)
        return
    with ProcessPoolExecutor(workers) as pool:
        futures = {pool.submit(outcome_of, scenario, work): scenario for scenario in scenarios}
        for future in as_completed(futures):
            yield futures[future], future.result()


def outcome_of(scenario: Scenario, work: Options) -> Outcome | None:
    """Simulate a run and let everything look at it; None where a fault came to no harm."""
    begin = time.process_time()
    run = build(scenario, Traces(work.traces))
    built = time.process_time()
    if run is None:
        return None
    alarms: dict[str, dict[str, list[Alarm]]] = {}
    if work.with_baselines:
        for (fault, rule), found in baselines.alarms(run).items():
            alarms.setdefault(rule, {})[fault] = found
    judged = time.process_time()
    others: dict[str, int] = {}
    if work.detector:
        detector = _detector(work.detector)
        by_verdict = alarms_of(detector(observations(run, ticks=work.ticks)), EPOCH, float(run.t[-1]))
        for level in LEVELS:
            alarms[f"oomwatch, {level}"] = _by_class(by_verdict, level, healthy=run.label is None)
        of_classes = {verdict for verdicts in FAULT_CLASSES.values() for verdict in verdicts}
        others = {
            f"{verdict}, {level}": len(found)
            for (verdict, level), found in by_verdict.items()
            if verdict not in of_classes
        }
    return Outcome(
        scenario.set,
        scenario.family,
        scenario.number,
        run.gpu_weeks,
        run.label,
        _strained(run) if run.label is None else (),
        alarms,
        others,
        {"simulate": built - begin, "baselines": judged - built, "detect": time.process_time() - judged},
        len(run.t) * len(run.ranks),
    )


def _detector(name: str) -> Detector:
    module, _, function = name.partition(":")
    return cast(Detector, getattr(import_module(module), function))


def _by_class(by_verdict: dict[tuple[str, str], list[Alarm]], level: str, healthy: bool) -> dict[str, list[Alarm]]:
    """Alarms by class of fault. On healthy runs each verdict counts for one class, the first that names it."""
    found: dict[str, list[Alarm]] = {}
    counted: set[str] = set()
    for fault, verdicts in FAULT_CLASSES.items():
        of_class = [verdict for verdict in verdicts if not (healthy and verdict in counted)]
        counted.update(of_class)
        found[fault] = merged(alarm for verdict in of_class for alarm in by_verdict.get((verdict, level), []))
    return found


def _strained(run: Run) -> tuple[tuple[float, float], ...]:
    stretches = [alarm for rank in run.ranks for alarm in firings(strained(rank), rank.t)]
    return tuple((alarm.start, alarm.end) for alarm in merged(stretches))


def report(document: dict[str, Any]) -> str:
    """The tables, in markdown."""
    outcomes = [Outcome.of_document(entry) for entry in document["outcomes"]]
    healthy = [o for o in outcomes if o.label is None and o.family not in APART]
    source = f"Sets: {', '.join(document['sets'])} (manifest {document['manifest_sha256'][:12]})."
    size = f"{len(healthy)} healthy runs of {sum(o.gpu_weeks for o in healthy):.0f} GPU-weeks"
    parts = [
        f"{source} Traffic: {document['traces']}.",
        f"{size}, {sum(o.label is not None for o in outcomes)} faults.",
        f"Left out because they came to no harm: {', '.join(document['harmless']) or 'none'}.",
        _cost(outcomes, document.get("seconds")),
        "Bounds are two-sided 95 %: Clopper-Pearson for shares, exact Poisson for rates.",
        score.table(score.scores(outcomes)),
    ]
    together = score.capacity_together(score.scores(outcomes))
    if together:
        named = {(rule, "capacity"): found for rule, found in together.items()}
        parts += ["All classes of capacity as one:", score.table(named)]
    rules = [f"oomwatch, {level}" for level in LEVELS]
    for rule in rules:
        families = score.scores_by_family(outcomes, rule)
        if families:
            parts += [f"### {rule}, by family", score.family_table(families)]
            parts += [f"### {rule}: what else fires during a fault", score.confusion_table(outcomes, rule)]
    apart = score.scores(outcomes, apart=True)
    if apart:
        parts += [f"### Apart: {', '.join(sorted(APART))}", score.table(apart)]
    if any(outcome.others for outcome in outcomes):
        parts += ["### Verdicts that no class of fault asks for", score.others_table(outcomes)]
    return "\n\n".join(parts) + "\n"


def _cost(outcomes: Sequence[Outcome], seconds: float | None) -> str:
    samples = max(1, sum(outcome.samples for outcome in outcomes))
    each = [
        f"{part} {sum(outcome.seconds.get(part, 0.0) for outcome in outcomes) / samples * 1e6:.0f}"
        for part in ("simulate", "baselines", "detect")
    ]
    wall = f" {seconds / 60:.0f} min in all." if seconds else ""
    return f"Processor time in µs a sample of one rank: {', '.join(each)} (with the making of observations).{wall}"


if __name__ == "__main__":
    sys.exit(main())
