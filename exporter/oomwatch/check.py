"""``oomwatch check``: read once, print what is there, and say by the exit status whether it needs a look."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Sequence

from oomwatch import units
from oomwatch.conclusions import (
    Incident,
    budget_text,
    confidence_text,
    evidence_text,
    incidents,
    silenced,
    statement,
    time_left,
    unknown_by_reason,
)
from oomwatch.config import Config
from oomwatch.daemon import new_pipeline
from oomwatch.feed import NodeFeed
from oomwatch.observations import Absent, Maybe, Memory, RankReading, Tick, known
from oomwatch.snapshot import EngineView, GpuView, MigView, Snapshot, devices
from oomwatch.status import device_labels, gpu_label, problems, status

EXIT_STATUS = {"info": 0, "warning": 1, "critical": 2}


def read_once(config: Config, wait: float = 0.0) -> Snapshot:
    """One reading of GPUs, engines and host; with ``wait`` a second one so many seconds later.

    Two readings tell more: only they show whether an engine with requests makes progress.
    """
    pipeline = new_pipeline(config)
    pipeline.start()
    feed = NodeFeed(config, pipeline.publish, lambda: pipeline.current)
    limit = config.nvml.deadline * 2 + config.intervals.scrape
    _read(feed)
    pipeline.flush(limit)
    feed.read_host()  # now that it is known which processes the GPUs list
    pipeline.flush(limit)
    feed.read_probes()  # now that it is known whose each process is
    if wait:
        time.sleep(wait)
        _read(feed)
        feed.read_probes()
    pipeline.publish(Tick(time.time()))  # what can be concluded of one look is
    pipeline.flush(limit)
    snapshot = pipeline.current
    feed.close()
    pipeline.stop()
    return snapshot


def _read(feed: NodeFeed) -> None:
    """Everything side by side, each part bounded by its own deadline."""
    feed.find_engines()
    threads = [threading.Thread(target=feed.read_gpus, daemon=True)]
    threads += [threading.Thread(target=feed.scrape, args=(name,), daemon=True) for name in feed.engine_names()]
    threads += [threading.Thread(target=feed.read_log, args=(name,), daemon=True) for name in feed.logged_names()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def exit_status(snapshot: Snapshot) -> int:
    """0 all is well, 1 something needs a look, 2 something is broken."""
    return max((EXIT_STATUS[problem.severity] for problem in problems(snapshot)), default=0)


def report(snapshot: Snapshot, form: str) -> str:
    """The snapshot as ``text`` for people or as ``json`` (the same as /api/v1/status)."""
    if form == "json":
        return json.dumps(status(snapshot, snapshot.t), indent=2)
    return "\n\n".join(
        "\n".join(block) for block in (_gpus(snapshot), _engines(snapshot.engines), _problems(snapshot)) if block
    )


# --- GPUs ------------------------------------------------------------------------------------------------------

_GPU_COLUMNS = ("GPU", "name", "total", "reserved", "used", "free", "engines", "neighbours", "unknown", "unowned")


def _gpus(snapshot: Snapshot) -> list[str]:
    rows = [_gpu_row(view, gpu) for gpu in snapshot.gpus for view in devices((gpu,))]
    return _table("GPUs", _GPU_COLUMNS, rows) if rows else ["GPUs: none"]


def _gpu_row(view: GpuView | MigView, gpu: GpuView) -> tuple[str, ...]:
    label, name = (gpu_label(gpu), gpu.name) if isinstance(view, GpuView) else (f"  slice {view.gi}/{view.ci}", "")
    memory: Maybe[Memory] = view.memory
    if isinstance(memory, Absent):
        sizes: tuple[str, ...] = (_reason(memory), "-", "-", "-")
    else:
        reserved = "in used" if memory.reserved is None else units.size(memory.reserved)
        sizes = (units.size(memory.total), reserved, units.size(memory.used), units.size(memory.free))
    return (label, name, *sizes, *_held(view), _size(view.unowned))


def _held(view: GpuView | MigView) -> tuple[str, str, str]:
    if isinstance(view.held, Absent):
        return (_reason(view.held), "-", "-")
    sums = dict.fromkeys(("engine", "neighbour", "unknown"), 0)
    for part in view.held:
        sums[part.holder.kind] += part.used
    return (units.size(sums["engine"]), units.size(sums["neighbour"]), units.size(sums["unknown"]))


# --- engines ---------------------------------------------------------------------------------------------------

_ENGINE_COLUMNS = (
    "engine",
    "state",
    "vLLM",
    "rank",
    "KV used",
    "KV pool",
    "tokens",
    "fits",
    "running",
    "waiting",
    "GPU memory",
    "host memory",
)


def _engines(engines: Sequence[EngineView]) -> list[str]:
    rows = [row for engine in engines for row in _engine_rows(engine)]
    return [*_table("Engines", _ENGINE_COLUMNS, rows), *_startups(engines)] if rows else ["Engines: none"]


def _startups(engines: Sequence[EngineView]) -> list[str]:
    """What each worker promised itself at its latest start, by its log."""
    rows = [
        (engine.name, rank, worker, budget_text(budget))
        for engine in engines
        if engine.startup is not None
        for rank, worker, budget in engine.startup.budgets
    ]
    return ["", *_table("Latest starts, by their logs", ("engine", "rank", "worker", "memory"), rows)] if rows else []


def _engine_rows(engine: EngineView) -> Iterator[tuple[str, ...]]:
    head = (engine.name, engine.state, engine.facts.vllm_version or "-")
    tail = (_gpu_memory(engine), _host_memory(engine))
    ranks = engine.scrape.ranks if engine.scrape else ()
    if not ranks:
        yield (*head, "-", "-", "-", "-", "-", "-", "-", *tail)
    for index, rank in enumerate(ranks):
        yield (*(head if index == 0 else ("", "", "")), *_rank(rank), *(tail if index == 0 else ("", "")))


def _gpu_memory(engine: EngineView) -> str:
    held = engine.gpu_memory
    return _reason(held) if isinstance(held, Absent) else _sum(held.values(), engine.gpu_memory_missing is None)


def _host_memory(engine: EngineView) -> str:
    anonymous = [known(process.anon) for process in engine.processes]
    return _sum([size for size in anonymous if size is not None], None not in anonymous)


def _sum(sizes: Collection[int], complete: bool) -> str:
    if not sizes:
        return "-"
    return f"{'' if complete else 'at least '}{units.size(sum(sizes))}"


def _rank(rank: RankReading) -> tuple[str, ...]:
    usage, used, blocks = known(rank.usage), known(rank.pool.used), known(rank.pool.blocks)
    concurrency = known(rank.pool.max_concurrency)
    return (
        rank.rank,
        "-" if usage is None else units.ratio(usage),
        "-" if blocks is None else f"{'?' if used is None else units.count(used)} of {units.count(blocks)} blocks",
        _count(rank.pool.tokens),
        "-" if concurrency is None else f"{concurrency:.1f} requests",
        _count(rank.running),
        _count(rank.waiting),
    )


# --- the rest --------------------------------------------------------------------------------------------------


def _problems(snapshot: Snapshot) -> list[str]:
    found = problems(snapshot)
    by_id = {incident.id: incident for incident in incidents(snapshot.verdicts)}
    lines: list[str] = []
    for problem in found:
        lines.append(f"{problem.severity}: {problem.text}")
        if problem.incident:
            lines += _incident(by_id[problem.incident], snapshot)
        elif problem.action:
            lines.append(f"  {problem.action}")
    return [*(lines or ["Nothing is wrong."]), *_quiet(snapshot)]


def _incident(incident: Incident, snapshot: Snapshot) -> Iterator[str]:
    labels, cause = device_labels(snapshot), incident.cause
    left = time_left(cause.eta)
    began = f"since {units.moment(incident.since)}"
    yield (
        f"  {cause.name} ({cause.killer}), incident {incident.id}, {began}, {confidence_text(cause.confidence)}"
        f"{f', time left: {left}' if left else ''}"
    )
    for number, action in enumerate(incident.advice, 1):
        yield f"  {number}. {action}"
    for name, text in evidence_text(cause, labels):
        yield f"    {name}: {text}"
    for title, verdicts in (("the same elsewhere", incident.causes[1:]), ("explains", incident.symptoms)):
        for verdict in verdicts:
            yield f"  {title}: {verdict.name}: {statement(verdict, labels)}"


def _quiet(snapshot: Snapshot) -> Iterator[str]:
    labels = device_labels(snapshot)
    for verdict in silenced(snapshot.verdicts):
        yield f"held back ({verdict.silenced}): {verdict.name}: {statement(verdict, labels)}"
    count = sum(map(len, unknown_by_reason(snapshot.verdicts).values()))
    if count:
        yield f"{count} of {len(snapshot.verdicts)} verdicts are not known: most need a daemon that watches longer."


def _reason(absent: Absent) -> str:
    return absent.reason.lower().replace("_", " ")


def _size(value: Maybe[int]) -> str:
    return _reason(value) if isinstance(value, Absent) else units.size(value)


def _count(value: Maybe[int] | Maybe[float]) -> str:
    return "-" if isinstance(value, Absent) else units.count(value)


def _table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [tuple(columns), *(tuple(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(columns))]
    return [
        title,
        *("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines),
    ]
