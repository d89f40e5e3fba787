"""The detection benchmark: ``python -m benchmarks.detection --help``.

Runs are made in an order that mixes the families evenly, and each is written down as it ends: whatever was done when
the time was over is a balanced part of the set, and the same command goes on from there.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import cast

from benchmarks.detection import baselines, results, score, sets
from benchmarks.detection.alarms import LEVELS, Alarm, Change, Detector, alarms_of, firings, merged
from benchmarks.detection.families import APART, FAMILIES, FAULT_CLASSES, HEALTHY, Scenario
from benchmarks.detection.render import EPOCH, observations
from benchmarks.detection.results import Results
from benchmarks.detection.score import Outcome
from benchmarks.detection.traffic import TRACES, Traces, traces_in
from benchmarks.detection.world import Label, Run, build, strained

QUICK = ("idle_nights", "missing_scrapes", "kv_finish", "gpu_steady", "host_steady", "stuck_engine")
QUICK_DAYS = 2.0
# Of the runs of a faulty family, one in so many is judged as a whole. The others are asked for the verdicts of their
# own class alone, until that has ticketed and paged: no detector knows of another one, so the class's own figures are
# the same.
WHOLE = 10
ASKED = frozenset(verdict for verdicts in FAULT_CLASSES.values() for verdict in verdicts)
# What a class's detectors are told of nothing but the engine's pages.
WITHOUT_DEVICES = frozenset({"kv-leak", "exhaustion", "host-leak"})
WITHOUT_HOST = frozenset({"kv-leak", "exhaustion", "gpu-leak"})
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
    try:
        found = results.read(options.rescore) if options.rescore else _run(options, traces)
    except results.ResultsError as error:
        print(error, file=sys.stderr)
        return 1
    text = report(found)
    if options.markdown:
        options.markdown.write_text(text, encoding="utf-8")
    if options.document:
        page = options.document.read_text(encoding="utf-8")
        options.document.write_text(between_the_marks(page, text), encoding="utf-8")
    if not options.markdown and not options.document:
        print(text)
    return 0


_BEGIN, _END = "<!-- measured: python -m benchmarks.detection -->", "<!-- measured: end -->"


def between_the_marks(page: str, text: str) -> str:
    """A document with ``text`` between its two marks in place of what stood there."""
    before, begin, rest = page.partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if not begin or not end:
        raise ValueError(f"the document has no part from {_BEGIN} to {_END}")
    return f"{before}{begin}\n\n{text}\n{end}{after}"


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
        default=TRACES,
        help="folder of the public traces (default OOMWATCH_TRACES, or shared/traces beside the repository); "
        "without them traffic is made up by a generator fitted to them",
    )
    parser.add_argument("--detector", default=OURS, metavar="MODULE:FUNCTION", help=f"default {OURS}")
    parser.add_argument("--no-detector", action="store_true", help="only the baselines")
    parser.add_argument("--no-baselines", action="store_true")
    parser.add_argument("--ticks", type=int, default=4, metavar="N", help="conclude after every N samples (default 4)")
    parser.add_argument(
        "--output", type=Path, help="a line of JSON for each run, as it ends; runs in it are not repeated"
    )
    parser.add_argument("--markdown", type=Path, help="tables; default: standard output")
    parser.add_argument("--document", type=Path, help="a document whose marked part the tables replace")
    parser.add_argument("--rescore", type=Path, metavar="FILE", help="only the tables of an earlier --output")
    parser.add_argument("--write-manifest", action="store_true", help="freeze other sets of runs: another benchmark")
    return parser


def _run(options: argparse.Namespace, traces: Traces) -> Results:
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
    header = results.header(traces.real, work.detector or "", options.ticks)
    with results.Log(header, options.output) as log:
        left = [s for s in balanced(scenarios) if not log.has(s)]
        try:
            for done, (scenario, outcome) in enumerate(_outcomes(left, work, options.workers), 1):
                log.add(scenario, outcome)
                if done % 10 == 0 or done == len(left):
                    print(f"{done} of {len(left)} runs", file=sys.stderr, flush=True)
        except KeyboardInterrupt:
            print("interrupted: the tables are of what is done", file=sys.stderr)
    return log.results


def balanced(scenarios: Iterable[Scenario]) -> list[Scenario]:
    """In an order of which every beginning has about the same share of each family."""
    listed = list(scenarios)
    of_family = Counter((s.set, s.family) for s in listed)
    seen: Counter[tuple[str, str]] = Counter()
    places = []
    for scenario in listed:
        key = (scenario.set, scenario.family)
        places.append(((seen[key] + 0.5) / of_family[key], scenario.name, scenario))
        seen[key] += 1
    return [scenario for _, _, scenario in sorted(places, key=lambda place: place[:2])]


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
    pool = ProcessPoolExecutor(workers)
    try:
        futures = {pool.submit(outcome_of, scenario, work): scenario for scenario in scenarios}
        for future in as_completed(futures):
            yield futures[future], future.result()
    finally:
        pool.shutdown(cancel_futures=True)


def outcome_of(scenario: Scenario, work: Options, whole: bool | None = None) -> Outcome | None:
    """Simulate a run and let everything look at it; None where a fault came to no harm.

    ``whole``: ask for every verdict until the end; of faults, one run in :data:`WHOLE` unless said.
    """
    begin = time.process_time()
    run = build(scenario, traces_in(work.traces))
    if run is None:
        return None
    if whole is None:
        whole = run.label is None or scenario.number % WHOLE == 0
    label = run.label
    alarms: dict[str, dict[str, list[Alarm]]] = {}
    if work.with_baselines:
        for (fault, rule), found in baselines.alarms(run).items():
            alarms.setdefault(rule, {})[fault] = found
    levels: dict[str, dict[str, list[Alarm]]] = {}
    others: dict[str, int] = {}
    if work.detector:
        by_verdict = alarms_of(_changes(run, _detector(work.detector), work.ticks, whole), EPOCH, float(run.t[-1]))
        classes = list(FAULT_CLASSES) if whole or label is None else [label.fault]
        for level in LEVELS:
            levels[f"oomwatch, {level}"] = _by_class(by_verdict, level, classes, healthy=label is None)
        others = {
            f"{verdict}, {level}": len(found) for (verdict, level), found in by_verdict.items() if verdict not in ASKED
        }
    alarms |= levels
    hurt = _strained(run) if label is None else ()
    return Outcome(
        scenario.set,
        scenario.family,
        scenario.number,
        round(run.gpu_weeks, 4),
        label,
        whole,
        score.hits(label, alarms) if label else {},
        {rule: score.fired(label, by_class) for rule, by_class in levels.items()} if label and whole else {},
        {} if label else {rule: score.false_alarms(by_class, hurt) for rule, by_class in alarms.items()},
        others,
        round(time.process_time() - begin, 1),
    )


def _detector(name: str) -> Detector:
    module, _, function = name.partition(":")
    return cast(Detector, getattr(import_module(module), function))


def _changes(run: Run, detector: Detector, ticks: int, whole: bool) -> Iterator[Change]:
    if whole or run.label is None:
        return iter(detector(observations(run, lengths=False, ticks=ticks), ASKED))
    fault = run.label.fault
    seen = observations(
        run, lengths=False, ticks=ticks, devices=fault not in WITHOUT_DEVICES, host=fault not in WITHOUT_HOST
    )
    asked = FAULT_CLASSES[fault]
    return _until_found((change for change in detector(seen, asked) if change[1] in asked), run.label)


def _until_found(changes: Iterable[Change], label: Label) -> Iterator[Change]:
    """Changes of the verdicts of a fault's class, until every level has found it: more would change no figure."""
    seen: list[Change] = []
    for change in changes:
        seen.append(change)
        yield change
        t = change[0] - EPOCH
        if t >= label.onset and change[2] in LEVELS["ticket"]:
            found = alarms_of(seen, EPOCH, t)
            if all(
                score.first_hit(label, _by_class(found, level, [label.fault], healthy=False)[label.fault]) is not None
                for level in LEVELS
            ):
                return


def _by_class(
    by_verdict: dict[tuple[str, str], list[Alarm]], level: str, classes: Collection[str], healthy: bool
) -> dict[str, list[Alarm]]:
    """Alarms by class of fault. On healthy runs each verdict counts for one class, the first that names it."""
    found: dict[str, list[Alarm]] = {}
    counted: set[str] = set()
    for fault in classes:
        of_class = [verdict for verdict in FAULT_CLASSES[fault] if not (healthy and verdict in counted)]
        counted.update(of_class)
        found[fault] = merged(alarm for verdict in of_class for alarm in by_verdict.get((verdict, level), []))
    return found


def _strained(run: Run) -> tuple[tuple[float, float], ...]:
    stretches = [alarm for rank in run.ranks for alarm in firings(strained(rank), rank.t)]
    return tuple((alarm.start, alarm.end) for alarm in merged(stretches))


def report(found: Results) -> str:
    """The tables, in markdown."""
    outcomes = list(found.outcomes)
    made = (
        f"Manifest {sets.MANIFEST_SHA256[:12]}, detectors {found.header['code'][:12]}, traffic: "
        f"{found.header['traffic']}, a tick every {found.header['ticks']} samples."
    )
    parts = [
        made,
        _coverage(found),
        f"Left out because they came to no harm: {', '.join(sorted(found.harmless)) or 'none'}.",
        f"{sum(outcome.seconds for outcome in outcomes) / 3600:.1f} h of processor time.",
        "Bounds are two-sided 95 %: Clopper-Pearson for shares, exact Poisson for rates.",
    ]
    by_class = score.scores(outcomes)
    together = {(rule, "capacity"): of_rule for rule, of_rule in score.capacity_together(by_class).items()}
    parts += ["### What was asked for", score.marks_table({**by_class, **together})]
    parts += ["### Beside the rules of the field", score.table({**by_class, **together})]
    rules = [f"oomwatch, {level}" for level in LEVELS]
    for rule in rules:
        families = score.scores_by_family(outcomes, rule)
        if families:
            parts += [f"### {rule}, by family", score.family_table(families)]
            parts += [f"### {rule}: what else fires during a fault", score.confusion_table(outcomes, rule)]
    apart = {
        (rule, fault): found_apart
        for (rule, fault), found_apart in score.scores(outcomes, apart=True).items()
        if rule in rules and found_apart.faults
    }
    if apart:
        parts += [f"### Apart: {', '.join(sorted(APART))}", score.table(apart)]
    if any(outcome.others for outcome in outcomes):
        parts += ["### Verdicts that no class of fault asks for", score.others_table(outcomes)]
    return "\n\n".join(parts) + "\n"


def _coverage(found: Results) -> str:
    """How much of the frozen sets the results have: of the healthy runs, and of the faulty ones."""
    lines = []
    for name, run_set in sets.load().items():
        of_set = [o for o in found.outcomes if o.set == name]
        harmless = sum(done.startswith(f"{name}/") for done in found.harmless)
        if not of_set and not harmless:
            continue
        healthy = [o for o in of_set if o.label is None]
        frozen = list(run_set.scenarios(tuple(HEALTHY)))
        weeks = sum(o.gpu_weeks for o in healthy)
        lines.append(
            f"Set {name}: {len(healthy)} of {len(frozen)} healthy runs, {weeks:.0f} of "
            f"{sum(s.days * s.ranks for s in frozen) / 7:.0f} GPU-weeks; {len(of_set) - len(healthy) + harmless} of "
            f"{sum(run_set.counts.values()) - len(frozen)} faulty runs."
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
