"""The page that a person reads at a glance: what is wrong first, then GPUs and engines.

Names of engines and titles of processes come from outside: all text goes through ``html.escape``.
"""

from __future__ import annotations

import base64
import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from html import escape
from importlib.resources import files

from oomwatch import __version__, units
from oomwatch.conclusions import (
    Incident,
    budget_text,
    confidence_text,
    evidence_text,
    incidents,
    silenced,
    statement,
    subject_text,
    time_left,
    unknown_by_reason,
)
from oomwatch.observations import (
    Absent,
    AllocatorReport,
    BlockOwners,
    EngineScrape,
    GpuPoll,
    Maybe,
    Memory,
    RankReading,
    known,
)
from oomwatch.snapshot import EngineView, GpuView, HeldMemory, MigView, Snapshot, SourceView, StartUpView
from oomwatch.status import OLD_AFTER, Problem, device_labels, gpu_label, problems
from oomwatch.verdicts import Verdict

_STYLE = files("oomwatch").joinpath("page.css").read_text(encoding="utf-8")
_SCRIPT = files("oomwatch").joinpath("page.js").read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return "'sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() + "'"


CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'none'",
        f"style-src {_hash(_STYLE)}",
        f"script-src {_hash(_SCRIPT)}",
        "connect-src 'self'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)

_ICONS = {"critical": "✖", "warning": "▲", "info": "●", "fine": "✔"}

_REASONS: Mapping[str, str] = {
    "AMBIGUOUS": "several values that contradict each other",
    "GPU_IS_LOST": "the GPU has fallen off the bus",
    "HUNG": "the driver does not answer",
    "IMPLAUSIBLE": "what was read contradicts itself",
    "MIG_ENABLED": "told by its slices",
    "NOT_EXPOSED": "not on its page",
    "NOT_FOUND": "the driver no longer lists it",
    "NOT_KNOWN": "not known",
    "NOT_READ": "not read yet",
    "NOT_SUPPORTED": "the driver does not tell",
    "NO_PERMISSION": "not allowed to read it",
    "STALE": "not read lately",
    "UNIFIED_MEMORY": "shared with the host's memory",
}

# Patterns tell the parts of a bar apart without colour: size of the pattern's tile, what is drawn on it.
_MARKS: Mapping[str, tuple[int, str]] = {
    "neighbour": (6, '<path d="M-1 1 1 -1M0 6 6 0M5 7 7 5" class="mark"/>'),
    "unknown": (6, '<circle cx="3" cy="3" r="1.4" class="dot"/>'),
    "unowned": (7, '<path d="M0 0 7 7M7 0 0 7" class="mark"/>'),
    "reserved": (4, '<path d="M0 0V4" class="mark"/>'),
}


def _pattern(kind: str, tile: int, mark: str) -> str:
    return (
        f'<pattern id="{kind}" width="{tile}" height="{tile}" patternUnits="userSpaceOnUse">'
        f'<rect width="{tile}" height="{tile}" class="of-{kind}"/>{mark}</pattern>'
    )


_PATTERNS = (
    '<svg class="defs" aria-hidden="true"><defs>'
    + "".join(_pattern(kind, tile, mark) for kind, (tile, mark) in _MARKS.items())
    + "</defs></svg>"
)


def render(snapshot: Snapshot, now: float, node: str) -> str:
    """The whole page for a node of that name, at unix time ``now``."""
    found = problems(snapshot, now)
    counts = Counter(problem.severity for problem in found)
    serious = counts["critical"] + counts["warning"]
    title = f"{f'({serious}) ' if serious else ''}{node} · oomwatch"
    body = (
        _header(snapshot, now, node),
        _problems_section(found, counts, snapshot, now),
        _gpus_section(snapshot, now),
        _engines_section(snapshot, found, now),
        _host_section(snapshot),
        _verdicts_section(snapshot),
        _sources_section(snapshot, now),
        _FOOTER,
    )
    return _document(title, "\n".join(body), f"<script>{_SCRIPT}</script>")


def not_found(paths: Iterable[str]) -> str:
    """A short page that links what there is."""
    links = "\n".join(f'<li><a href="{escape(path)}">{escape(path)}</a></li>' for path in paths)
    return _document("Not found · oomwatch", f"<h1>oomwatch has no such page</h1>\n<ul>\n{links}\n</ul>", "")


def _document(title: str, main: str, end: str) -> str:
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<link rel="icon" href="data:,">
{'<noscript><meta http-equiv="refresh" content="15"></noscript>' if end else ""}
<style>{_STYLE}</style>
</head>
<body>
<div id="banner" role="alert" hidden></div>
{_PATTERNS}
<main id="main">
{main}
</main>
{end}
</body>
</html>
"""


# --- head and problems -----------------------------------------------------------------------------------------


def _header(snapshot: Snapshot, now: float, node: str) -> str:
    if not snapshot.t:
        age = '<p id="age">Nothing has been read yet</p>'
    else:
        seconds = max(0.0, now - snapshot.t)
        age = (
            f'<p id="age" data-age="{seconds:.1f}" data-old-after="{OLD_AFTER:.0f}">'
            f"<b{'' if seconds > OLD_AFTER else ' hidden'}>✖ NOT THE PRESENT: </b>"
            f"Data of {_time(snapshot.t)}, <span>{units.duration(int(seconds))} old</span></p>"
        )
    return f"<header><h1>{escape(node)} <small>oomwatch</small></h1>{age}</header>"


def _problems_section(found: tuple[Problem, ...], counts: Counter[str], snapshot: Snapshot, now: float) -> str:
    parts = [f"{counts['critical']} critical"] if counts["critical"] else []
    if counts["warning"]:
        parts.append("1 warning" if counts["warning"] == 1 else f"{counts['warning']} warnings")
    worst = "critical" if counts["critical"] else "warning" if counts["warning"] else "fine"
    verdict = " and ".join(parts) or "Nothing is wrong, as far as can be seen"
    if not snapshot.t:
        worst, verdict = "info", "Starting"
    elif worst == "fine" and not snapshot.gpus and not snapshot.engines:
        worst, verdict = "info", "Nothing to watch: no GPU and no vLLM server here"
    labels = device_labels(snapshot)
    by_id = {incident.id: incident for incident in incidents(snapshot.verdicts)}
    items = "\n".join(
        _incident(problem, by_id[problem.incident], labels, now) if problem.incident else _problem(problem, now)
        for problem in found
    )
    return (
        f'<section aria-label="What is wrong"><p class="verdict {worst}">{_ICONS[worst]} {verdict}</p>'
        + (f'<ol class="problems">\n{items}\n</ol>' if items else "")
        + "</section>"
    )


def _problem(problem: Problem, now: float) -> str:
    since = (
        f"<p><small>Well until {_time(problem.since)}, {escape(units.ago(problem.since, now))}</small></p>"
        if problem.since is not None
        else ""
    )
    action = f"<p>{escape(problem.action)}</p>" if problem.action else ""
    return (
        f'<li class="{problem.severity}"><span class="severity">{_ICONS[problem.severity]} {problem.severity}</span>'
        f"<strong>{escape(problem.text)}</strong>{action}{since}</li>"
    )


def _incident(problem: Problem, incident: Incident, labels: Mapping[str, str], now: float) -> str:
    """The worst cause with its numbers, then other causes and what all of it explains."""
    cause = incident.cause
    began = f"{_time(incident.since)}, {escape(units.ago(incident.since, now))}"
    facts = [("Since", began), ("How sure", escape(confidence_text(cause.confidence)))]
    left = time_left(cause.eta)
    if left:
        facts.insert(1, ("Time left", escape(left)))
    facts.append(("Killer", escape(cause.killer)))
    facts.append(("Incident", escape(incident.id)))
    advice = "".join(f"<li>{escape(action)}</li>" for action in incident.advice)
    return (
        f'<li class="{problem.severity} incident"><span class="severity">{_ICONS[problem.severity]} '
        f'{problem.severity}</span><span class="name">{escape(cause.name)}</span>'
        f"<strong>{escape(problem.text)}</strong>"
        f"<dl>{''.join(f'<div><dt>{name}</dt><dd>{value}</dd></div>' for name, value in facts)}</dl>"
        + (f'<p class="quiet">What to do:</p><ol class="advice">{advice}</ol>' if advice else "")
        + _numbers(cause, labels)
        + _told_list("The same elsewhere", incident.causes[1:], labels)
        + _told_list("What it explains", incident.symptoms, labels)
        + "</li>"
    )


def _numbers(verdict: Verdict, labels: Mapping[str, str]) -> str:
    rows = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(text)}</dd></div>" for name, text in evidence_text(verdict, labels)
    )
    return f'<p class="quiet">The numbers:</p><dl class="evidence">{rows}</dl>' if rows else ""


def _told_list(title: str, verdicts: Iterable[Verdict], labels: Mapping[str, str]) -> str:
    items = "".join(
        f'<li><span class="name">{escape(verdict.name)}</span>{escape(statement(verdict, labels))}</li>'
        for verdict in verdicts
    )
    return f'<p class="quiet">{title}:</p><ul class="told">{items}</ul>' if items else ""


# --- GPUs ------------------------------------------------------------------------------------------------------


def _gpus_section(snapshot: Snapshot, now: float) -> str:
    if not snapshot.gpus:
        return '<h2>GPUs</h2>\n<p class="quiet">None that can be read.</p>'
    rows = "\n".join(row for gpu in snapshot.gpus for row in _gpu_rows(gpu, now))
    head = "".join(
        f'<th scope="col" role="columnheader"{css}>{name}</th>'
        for name, css in (("GPU", ""), ("Memory", ' class="wide"'), ("Held by", ""), ("Condition", ""))
    )
    return f"""<h2>GPUs</h2>
<table role="table" class="gpus">
<caption>Device memory, whose it is, and the devices' condition</caption>
<thead><tr role="row">{head}</tr></thead>
<tbody>
{rows}
</tbody>
</table>"""


def _gpu_rows(gpu: GpuView, now: float) -> Iterator[str]:
    label = gpu_label(gpu)
    last = ""
    if gpu.poll is None or isinstance(gpu.memory, Absent):
        last = _last_memory(gpu, now)
    yield _gpu_row(
        "",
        f'<strong>{escape(label)}</strong> {escape(gpu.name)}<br><small class="uuid">{escape(gpu.uuid)}</small>',
        _memory_cell(gpu, label) + last,
        _held_cell(gpu),
        _condition_cell(gpu, now),
    )
    for mig in gpu.mig:
        name = f"Slice {mig.gi}/{mig.ci} of {label}"
        yield _gpu_row(
            "slice",
            f'<strong>{escape(name)}</strong><small class="uuid">{escape(mig.uuid)}</small>',
            _memory_cell(mig, name),
            _held_cell(mig),
            "",
        )


def _gpu_row(css: str, name: str, memory: str, held: str, condition: str) -> str:
    return (
        f'<tr role="row" class="{css}"><th scope="row" role="rowheader">{name}</th><td role="cell">{memory}</td>'
        f'<td role="cell">{held}</td><td role="cell">{condition}</td></tr>'
    )


def _memory_cell(view: GpuView | MigView, label: str) -> str:
    memory = view.memory
    if isinstance(memory, Absent):
        return f"<p>Not known: {_reason(memory)}</p>"
    share = memory.used / memory.total if memory.total else 0.0
    text = f"{units.size(memory.used)} of {units.size(memory.total)} used ({units.ratio(share)})"
    rest = f"{units.size(memory.free)} free"
    if memory.reserved is not None:
        rest += f", {units.size(memory.reserved)} reserved by the driver"
    else:
        rest += "; used includes the driver's reserve"
    return f"{_memory_bar(view, memory, f'{label}: {text}')}<p>{text}<br><small>{rest}</small></p>"


def _memory_bar(view: GpuView | MigView, memory: Memory, label: str) -> str:
    parts: list[tuple[str, int]] = []
    held = known(view.held)
    if held is None:
        parts.append(("used", memory.used))
    else:
        parts += [
            (kind, sum(part.used for part in held if part.holder.kind == kind))
            for kind in ("engine", "neighbour", "unknown")
        ]
        accounted = sum(size for _, size in parts)
        parts.append(("unowned", max(0, memory.used - accounted)) if view.unowned else ("used", 0))
    parts.append(("reserved", memory.reserved or 0))
    return _bar([(kind, size / memory.total if memory.total else 0.0) for kind, size in parts], label)


def _bar(parts: Iterable[tuple[str, float]], label: str) -> str:
    """A bar of shares one after the other; what is over 1 is cut off."""
    at = 0.0
    drawn = []
    for kind, share in parts:
        width = min(max(share, 0.0), 1.0 - at)
        if width > 0:
            drawn.append(f'<rect x="{at:.2%}" width="{width:.2%}" height="100%" {_fill(kind)}/>')
            at += width
    return f'<svg class="bar" role="img" aria-label="{escape(label)}">{"".join(drawn)}</svg>'


def _fill(kind: str) -> str:
    return f'class="of-{kind}"' if kind in ("engine", "used") else f'fill="url(#{kind})"'


def _swatch(kind: str) -> str:
    return f'<svg class="swatch" aria-hidden="true"><rect width="100%" height="100%" {_fill(kind)}/></svg>'


def _held_cell(view: GpuView | MigView) -> str:
    if isinstance(view.held, Absent):
        return "" if view.held.reason == "MIG_ENABLED" else f'<p class="quiet">Not known: {_reason(view.held)}</p>'
    items = [f"<li>{_swatch(part.holder.kind)}{_holder(part)}</li>" for part in view.held]
    unowned = known(view.unowned)
    if unowned:
        items.append(f"<li>{_swatch('unowned')}no listed process: {units.size(unowned)}</li>")
    if not items:
        return '<p class="quiet">nobody</p>'
    return f'<ul class="plain">{"".join(items)}</ul>'


def _holder(part: HeldMemory) -> str:
    names = {
        "engine": f"engine {part.holder.name}",
        "neighbour": f"neighbour {part.holder.name}",
        "unknown": "unknown processes",
    }
    return f"{escape(names.get(part.holder.kind, part.holder.name))}: {units.size(part.used)}"


def _last_memory(gpu: GpuView, now: float) -> str:
    if gpu.last_memory is None or gpu.last_seen is None:
        return ""
    last = gpu.last_memory
    return (
        f"<p><small>Last seen: {units.size(last.used)} of {units.size(last.total)} used, "
        f"at {_time(gpu.last_seen)}, {escape(units.ago(gpu.last_seen, now))}</small></p>"
    )


def _condition_cell(gpu: GpuView, now: float) -> str:
    items = list(_condition(gpu.poll)) if gpu.poll is not None else []
    items += [
        f"Xid {xid.code}{f', {xid.count} times' if xid.count > 1 else ''}, {escape(units.ago(xid.last_t, now))}"
        for xid in gpu.xids
    ]
    return f'<ul class="plain">{"".join(f"<li>{item}</li>" for item in items)}</ul>' if items else ""


def _condition(poll: GpuPoll) -> Iterator[str]:
    temperature, power, busy = known(poll.temperature), known(poll.power), known(poll.utilization)
    now = [
        *([f"{temperature:.0f} °C"] if temperature is not None else []),
        *([f"{power:.0f} W"] if power is not None else []),
        *([f"busy {units.ratio(busy)}"] if busy is not None else []),
    ]
    if now:
        yield ", ".join(now)
    if known(poll.mig_enabled):
        yield "divided into slices (MIG)"
    if poll.unified:
        yield "shares the host's memory"
    uncorrected = known(poll.ecc_uncorrected)
    if uncorrected:
        yield f"{uncorrected} uncorrected memory errors"
    rows = known(poll.remapped_rows)
    if rows is not None and (rows.uncorrectable or rows.pending or rows.failed):
        yield f"rows remapped after uncorrectable errors: {rows.uncorrectable}"


# --- engines ---------------------------------------------------------------------------------------------------


def _engines_section(snapshot: Snapshot, found: Iterable[Problem], now: float) -> str:
    if not snapshot.engines:
        return '<h2>Engines</h2>\n<p class="quiet">No vLLM server is known here.</p>'
    worst_last = reversed(tuple(problem for problem in found if problem.kind == "engine"))
    severities = {problem.name: problem.severity for problem in worst_last}
    labels = device_labels(snapshot)
    engines = "\n".join(_engine(engine, severities.get(engine.name, ""), labels, now) for engine in snapshot.engines)
    return f"<h2>Engines</h2>\n{engines}"


def _engine(engine: EngineView, severity: str, labels: Mapping[str, str], now: float) -> str:
    calm = "info" if severity else "fine"  # it works, and something else is wrong with it
    css = calm if engine.state == "ok" else severity or "info"
    state = f'<span class="state {css}">{_ICONS[css]} {escape(engine.state.replace("_", " "))}</span>'
    error = f"<span>{escape(engine.error)}</span>" if engine.error and engine.state != "ok" else ""
    facts = "".join(
        f"<div><dt>{name}</dt><dd>{escape(value)}</dd></div>" for name, value in _engine_facts(engine, labels, now)
    )
    return f"""<section class="engine {severity}">
<div><h3>{escape(engine.name)}</h3>{state}{error}</div>
<dl>{facts}</dl>
{_ranks(engine, now)}
</section>"""


def _engine_facts(engine: EngineView, labels: Mapping[str, str], now: float) -> Iterator[tuple[str, str]]:
    shown = engine.scrape or engine.last_answer
    model = known(shown.model_name) if shown else None
    if model:
        yield "Model", model
    if engine.facts.vllm_version:
        yield "vLLM", engine.facts.vllm_version
    if engine.facts.target:
        yield "Address", engine.facts.target
    held = known(engine.gpu_memory)
    if held:
        yield "GPU memory", ", ".join(f"{units.size(used)} on {labels.get(on, on)}" for on, used in held.items())
    if engine.processes:
        anon = [known(process.anon) for process in engine.processes]
        total = sum(size or 0 for size in anon)
        least = "at least " if None in anon else ""
        yield "Host memory", f"{least}{units.size(total)} in {len(anon)} process{'es' if len(anon) > 1 else ''}"
    if engine.startup is not None:
        yield "Latest start", _startup(engine.startup, now)
        for rank, worker, budget in engine.startup.budgets:
            yield f"Its budget, rank {rank}, worker {worker}", budget_text(budget)
    for killer, when, count in engine.ran_out:
        yield "Ran out of memory", f"{count} {'time' if count == 1 else 'times'} at {when}, by its numbers {killer}"
    if engine.allocators:
        yield "PyTorch's memory", "; ".join(_allocator(engine, report, labels) for report in engine.allocators)
    if engine.owners:
        yield "KV blocks' owners", "; ".join(_owners(owners) for owners in engine.owners)
    if engine.last_progress is not None and engine.state not in ("sleeping", "no_traffic_yet", "stats_disabled"):
        yield "Last progress", units.ago(engine.last_progress, now)
    if engine.restarts:
        yield "Restarts seen", str(engine.restarts)


def _startup(start: StartUpView, now: float) -> str:
    words = {"starting": "still starting", "serving": "serves", "over": "has ended"}[start.phase]
    took = f" after {units.duration(start.ready - start.since)}" if start.ready and start.ready > start.since else ""
    pools = [
        f"rank {rank}: {units.count(pool.tokens)} tokens"
        f"{f', {pool.concurrency:.1f} of the longest requests' if pool.concurrency is not None else ''}"
        for rank, pool in start.pools
        if pool.tokens is not None
    ]
    return "; ".join([f"{units.ago(start.since, now)}, {words}{took if start.phase == 'serving' else ''}", *pools])


def _allocator(engine: EngineView, report: AllocatorReport, labels: Mapping[str, str]) -> str:
    rank = next((process.rank for process in engine.processes if process.pid == report.pid), None)
    on = labels.get(report.gpu, report.gpu)
    where = f"{rank or f'process {report.pid}'}{f' on {on}' if on else ''}"
    allocated, reserved = report.current("allocated_bytes"), report.current("reserved_bytes")
    if allocated is None or reserved is None:
        return f"{where}: not told"
    text = f"{where}: {units.size(allocated)} of {units.size(reserved)} in use"
    if report.largest_free_block is not None:
        text += f", largest free piece {units.size(report.largest_free_block)}"
    return text


def _owners(owners: BlockOwners) -> str:
    held = f"rank {owners.rank}: {units.count(owners.living)} of living requests"
    if owners.finished:
        held += f", {units.count(owners.finished)} of finished ones"
    lost = "not known" if owners.ownerless is None else units.count(owners.ownerless)
    return f"{held}, {lost} of nobody"


def _ranks(engine: EngineView, now: float) -> str:
    if engine.scrape is not None:
        return (
            _rank_table(engine.name, engine.scrape, "The KV pool and requests, by rank") if engine.scrape.ranks else ""
        )
    if engine.last_answer is None or not engine.last_answer.ranks:
        return ""
    when = f"Not the present: last seen {_time(engine.last_answer.t)}, {escape(units.ago(engine.last_answer.t, now))}"
    return f'<div class="past">{_rank_table(engine.name, engine.last_answer, when)}</div>'


def _rank_table(name: str, scrape: EngineScrape, caption: str) -> str:
    rows = "\n".join(_rank_row(name, rank) for rank in scrape.ranks)
    return f"""<table role="table">
<caption>{caption}</caption>
<thead><tr role="row"><th scope="col" role="columnheader">Rank</th>\
<th scope="col" role="columnheader" class="pool">KV pool</th>\
<th scope="col" role="columnheader" class="number">Running</th>\
<th scope="col" role="columnheader" class="number">Waiting</th>\
<th scope="col" role="columnheader" class="number">Preemptions</th></tr></thead>
<tbody>
{rows}
</tbody>
</table>"""


def _rank_row(engine: str, rank: RankReading) -> str:
    waiting = _number(rank.waiting)
    if known(rank.waiting_capacity):
        waiting += f" <small>({_number(rank.waiting_capacity)} for lack of blocks)</small>"
    numbers = (("Running", _number(rank.running)), ("Waiting", waiting), ("Preemptions", _number(rank.preemptions)))
    cells = "".join(
        f'<td role="cell" class="number" data-label="{name}"><span>{text}</span></td>' for name, text in numbers
    )
    return (
        f'<tr role="row"><th scope="row" role="rowheader" data-label="Rank">{escape(rank.rank)}</th>'
        f'<td role="cell">{_pool_cell(engine, rank)}</td>{cells}</tr>'
    )


def _pool_cell(engine: str, rank: RankReading) -> str:
    pool = rank.pool
    usage, used, blocks, tokens = known(rank.usage), known(pool.used), known(pool.blocks), known(pool.tokens)
    parts = []
    if blocks is not None:
        parts.append(
            f"{units.count(used)} of {units.count(blocks)} blocks"
            if used is not None
            else f"{units.count(blocks)} blocks"
        )
    if tokens is not None:
        parts.append(f"room for {units.count(tokens)} tokens")
    sleep = known(rank.sleep_level)
    if sleep not in (None, "awake"):
        parts.append(f"asleep ({sleep.replace('_', ' ')})")
    if usage is None:
        text = f"usage {_reason(rank.usage)}"
        return f"<p>{text}<br><small>{escape(', '.join(parts))}</small></p>" if parts else f"<p>{text}</p>"
    text = f"{units.ratio(usage)} used"
    bar = _bar([("used", usage)], f"KV pool of {engine}, rank {rank.rank}: {text}")
    return f"{bar}<p>{text} <small>{escape(', '.join(parts))}</small></p>"


def _number(value: Maybe[float]) -> str:
    return f"<small>{_reason(value)}</small>" if isinstance(value, Absent) else units.count(value)


# --- host, sources, foot ---------------------------------------------------------------------------------------


def _host_section(snapshot: Snapshot) -> str:
    host = snapshot.host
    if host is None:
        return ""
    used = host.total - host.available
    share = used / host.total if host.total else 0.0
    text = f"{units.size(host.available)} of {units.size(host.total)} available ({units.ratio(share)} used)"
    return f"<h2>Host memory</h2>\n{_bar([('used', share)], f'Host memory: {text}')}<p>{text}</p>"


def _verdicts_section(snapshot: Snapshot) -> str:
    """What is held back by plan, and what cannot be concluded: shown, and quiet."""
    if not snapshot.verdicts:
        return ""
    labels = device_labels(snapshot)
    unknown = unknown_by_reason(snapshot.verdicts)
    planned = silenced(snapshot.verdicts)
    count = sum(map(len, unknown.values()))
    parts = [f"{len(snapshot.verdicts) - count} concluded", f"{count} not known"]
    if planned:
        parts.append(f"{len(planned)} held back by a planned silence")
    rows = [_quiet_row(one.name, f"planned silence: {one.silenced}", statement(one, labels)) for one in planned]
    rows += [
        _quiet_row(name, reason, ", ".join(subject_text(one.subject, labels) for one in members))
        for (name, reason), members in unknown.items()
    ]
    if not rows:
        return f'<p class="quiet">Verdicts: {", ".join(parts[:1])}, none unknown.</p>'
    head = "".join(f'<th scope="col" role="columnheader">{name}</th>' for name in ("Verdict", "Why", "About"))
    return f"""<details id="verdicts">
<summary id="verdicts-summary">Verdicts: {", ".join(parts)}</summary>
<table role="table">
<caption>Not known is not well: what is missing, and what is held back</caption>
<thead><tr role="row">{head}</tr></thead>
<tbody>
{chr(10).join(rows)}
</tbody>
</table>
</details>"""


def _quiet_row(name: str, why: str, about: str) -> str:
    return (
        f'<tr role="row"><th scope="row" role="rowheader">{escape(name)}</th>'
        f'<td role="cell">{escape(why)}</td><td role="cell">{escape(about)}</td></tr>'
    )


def _sources_section(snapshot: Snapshot, now: float) -> str:
    if not snapshot.sources:
        return ""
    labels = {gpu.uuid: gpu_label(gpu) for gpu in snapshot.gpus}
    failing = [source for source in snapshot.sources if source.last_run is not None and not source.up]
    rows = "\n".join(_source_row(source, labels, now) for source in snapshot.sources)
    summary = f"{len(failing)} of {len(snapshot.sources)} fail" if failing else f"all {len(snapshot.sources)} work"
    head = "".join(
        f'<th scope="col" role="columnheader">{name}</th>'
        for name in ("Source", "State", "Last success", "Took", "Failures so far")
    )
    return f"""<details id="sources"{" open" if failing else ""}>
<summary id="sources-summary">Where this comes from: {summary}</summary>
<table role="table">
<caption>What oomwatch reads, and how that goes</caption>
<thead><tr role="row">{head}</tr></thead>
<tbody>
{rows}
</tbody>
</table>
</details>"""


def _source_row(source: SourceView, labels: Mapping[str, str], now: float) -> str:
    css, word = {True: ("fine", "works"), False: ("warning", "fails"), None: ("warning", "silent")}[source.up]
    if source.last_run is None:
        css, word = "info", "not read yet"
    state = f'<span class="state {css}">{_ICONS[css]} {word}</span>'
    if source.error and not source.up:
        state += f"<br><small>{escape(source.error)}</small>"
    success = escape(units.ago(source.last_success, now)) if source.last_success is not None else "never"
    took = units.duration(source.seconds) if source.seconds is not None else ""
    name = f"{escape(source.source)} {escape(labels.get(source.target, source.target))}"
    return (
        f'<tr role="row"><th scope="row" role="rowheader">{name}</th><td role="cell">{state}</td>'
        f'<td role="cell" data-label="Last success">{success}</td><td role="cell" data-label="Took">{took}</td>'
        f'<td role="cell" data-label="Failures so far">{source.failures}</td></tr>'
    )


_FOOTER = (
    '<footer><a id="to-metrics" href="metrics">Metrics</a><a id="to-status" href="api/v1/status">Status as JSON</a>'
    '<a id="to-healthy" href="-/healthy">Healthy?</a><a id="to-ready" href="-/ready">Ready?</a>'
    f"<span>oomwatch {escape(__version__)}</span></footer>"
)


def _time(t: float) -> str:
    text = units.moment(t)
    return f'<time datetime="{text[:10]}T{text[11:19]}Z">{text}</time>'


def _reason(absent: Maybe[object]) -> str:
    reason = absent.reason if isinstance(absent, Absent) else ""
    return escape(_REASONS.get(reason, reason))
