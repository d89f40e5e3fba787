"""A post-mortem for people, and as plain data. Only numbers and our own words: no text of a log is in it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields

from oomwatch import units
from oomwatch.conclusions import (
    Incident,
    confidence_text,
    evidence_text,
    incident_plain,
    statement,
    time_left,
    verdict_plain,
)
from oomwatch.diagnose.postmortem import PostMortem
from oomwatch.enginelog.events import DEATHS, REFUSALS, Budget, KvPool, OutOfMemory, known_fields
from oomwatch.enginelog.killer import Cause, cause_of
from oomwatch.enginelog.story import Refusal, Shortage, StartUp

_SHOWN = 5  # of many starts the latest

_STEPS = {
    "load": "while it loaded the weights",
    "profile": "while it profiled its memory",
    "kv_pool": "while it made the KV pool",
    "warm_up": "while it warmed up",
    "graphs": "while it captured graphs",
    "serve": "while it served",
}


def text(found: Iterable[PostMortem]) -> str:
    return "\n\n".join("\n".join(_postmortem(one)) for one in found)


def _postmortem(one: PostMortem) -> Iterator[str]:
    starts = list(one.story.starts)
    yield f"{one.name}, from {one.source}: {_overview(starts)}"
    if one.cut:
        yield f"It could be read up to here only: {one.cut}"
    left_out = len(starts) - _SHOWN
    if left_out > 0:
        yield f"  {left_out} earlier {'start is' if left_out == 1 else 'starts are'} left out"
    for number, start in enumerate(starts, 1):
        if number > left_out:
            yield ""
            yield from _start(number, start)
    if one.unexplained:
        yield ""
        yield from _UNEXPLAINED
    elif not one.incidents:
        yield ""
        yield "Nothing is wrong with its memory, as far as this tells."
    for incident in one.incidents:
        yield ""
        yield from _incident(incident)


_UNEXPLAINED = (
    "It ended, and nothing that was read says that memory was the reason.",
    "  A process that dies without a word may have been killed for the host's memory: journalctl -k tells, and so does",
    "  memory.events of its cgroup (oom_kill). Otherwise read the first traceback before the end.",
)


def _overview(starts: Sequence[StartUp]) -> str:
    if not starts:
        return "no log of it was read"
    version = next((start.version for start in reversed(starts) if start.version), None)
    count = "1 start" if len(starts) == 1 else f"{len(starts)} starts"
    return f"{count} of vLLM{f' {version}' if version else ', of a version that it does not tell'}"


# --- one start ---------------------------------------------------------------------------------------------------


def _start(number: int, start: StartUp) -> Iterator[str]:
    when = units.moment(start.since)
    begun = f"Start {number}, {when}" if start.seen_from_start else f"Start {number}, seen from {when} on"
    yield f"{begun}: {_outcome(start)}"
    yield from _promised(start)
    for refusal in start.refusals:
        yield from _refusal(refusal)
    for shortages in _together(start.shortages):
        yield from _shortage(shortages)


def _outcome(start: StartUp) -> str:
    parts = []
    if start.ready is not None:
        parts.append(f"served from {units.moment(start.ready)}")
    if start.refusals:
        parts.append("refused to start")
    if start.shortages:
        steps = {_STEPS[one.step] for one in start.shortages if one.step is not None}
        parts.append(f"ran out of memory{f' {min(steps)}' if len(steps) == 1 else ''}")
    if start.died is not None:
        parts.append(f"ended {units.moment(start.died)}, as {_how(start)}")
    elif start.stopped is not None:
        parts.append(f"was asked to stop {units.moment(start.stopped)}")
    return ", ".join(parts) or "no word of how it went on"


def _how(start: StartUp) -> str:
    """The first report is the nearest to the cause."""
    if not start.deaths:
        return "an error ended it"
    first = start.deaths[0]
    code = next((death.exit_code for death in start.deaths if death.exit_code is not None), None)
    killed = " (killed: the kernel does that where the host's memory ends)" if code == -9 else ""
    return f"{DEATHS[first.how]}{f' with exit code {code}{killed}' if code is not None else ''}"


def _promised(start: StartUp) -> Iterator[str]:
    """What the budget was to be, what went into it, and what was left; ranks that differ stand apart."""
    alike: dict[Budget, list[str]] = {}
    for place, budget in start.budgets.items():
        alike.setdefault(budget, []).append(_place(*place))
    for budget, places in alike.items():
        ranks = f" of {', '.join(places)}" if len(start.budgets) > 1 else ""
        if (promise := _promise(budget, start)) != "":
            yield f"  promised{ranks}: {promise}"
        taken = [f"{name} {units.size(size)}" for name, size in _parts(budget) if size is not None]
        if taken:
            yield f"  taken{ranks}: {', '.join(taken)}"
    pools: dict[str, list[str]] = {}
    for rank, pool in start.pools.items():
        pools.setdefault(_pool(pool), []).append(rank)
    for pool_text, in_ranks in pools.items():
        ranks = f" of rank {', '.join(in_ranks)}" if len(pools) > 1 else ""
        if pool_text:
            yield f"  KV cache{ranks}: {pool_text}"
    if start.fitted is not None:
        fitted = start.fitted
        yield f"  lowered by itself: --max-model-len from {fitted.wanted_max_model_len:,} to {fitted.max_model_len:,}"


def _place(rank: str, worker: str) -> str:
    return f"rank {rank}" if worker == "0" else worker if rank == "0" else f"rank {rank} {worker}"


def _promise(budget: Budget, start: StartUp) -> str:
    parts = []
    share = budget.utilization if budget.utilization is not None else start.utilization
    if share is not None:
        parts.append(f"--gpu-memory-utilization {share:g}")
    if budget.promised is not None:
        parts.append(f"{units.size(budget.promised)}")
    if budget.total is not None and parts:
        parts.append(f"of {units.size(budget.total)} in all")
    if budget.free is not None:
        parts.append(f"{units.size(budget.free)} free at the start")
    return ", ".join(parts)


def _parts(budget: Budget) -> Iterator[tuple[str, int | None]]:
    weights, consumed = budget.weights, budget.consumed
    if weights is None:
        yield "weights and other than torch", consumed
    else:
        yield "weights", weights
        yield "other than torch", budget.non_torch if consumed is None else max(0, consumed - weights)
    yield "activations", budget.activation
    yield "graphs", budget.graphs
    yield "set aside for graphs", budget.graphs_estimate
    yield "KV pool", budget.kv_pool


def _pool(pool: KvPool) -> str:
    parts = []
    if pool.tokens is not None:
        parts.append(f"{pool.tokens:,} tokens")
    if pool.blocks is not None:
        parts.append(f"{pool.blocks:,} blocks")
    if pool.concurrency is not None and pool.max_model_len is not None:
        parts.append(f"{pool.concurrency:.2f} requests of {pool.max_model_len:,} tokens at once")
    return ", ".join(parts)


# --- how it failed -----------------------------------------------------------------------------------------------


def _refusal(refusal: Refusal) -> Iterator[str]:
    said = refusal.refused
    yield f"  refused: {REFUSALS[said.reason]}"
    if said.wanted and said.available is not None:  # 0.0 GiB is what a small one was rounded to
        yield f"    wanted {units.size(said.wanted)}, there {units.size(said.available)}"
    if said.reason == "profiling_disturbed" and said.available is not None and said.free_now is not None:
        yield f"    free first {units.size(said.available)}, afterwards {units.size(said.free_now)}"
    if said.max_model_len is not None:
        fits = said.fitting_max_model_len or said.tokens
        yield f"    wanted for {said.max_model_len:,} tokens{f', there for {fits:,}' if fits is not None else ''}"
    if said.max_num_seqs is not None and said.blocks is not None:
        yield f"    wanted {said.max_num_seqs:,} sequences, there {said.blocks:,} blocks"
    if (wrong := _BOILERPLATE_OF_REFUSALS.get(said.reason)) is not None:
        yield f"    {wrong}"


_BOILERPLATE_OF_REFUSALS = {
    "no_room": "The message advises a higher utilization: that helps only where memory outside the budget is free.",
    "budget_above_free": "Nothing is wrong with the model: others hold what is missing, or the share is too large.",
    "profiling_disturbed": "No setting helps: start it again while no neighbour starts or stops.",
}


def _together(shortages: Iterable[Shortage]) -> Iterator[list[Shortage]]:
    """Errors with the same numbers and step: the ranks of one engine meet the same one."""
    alike: dict[object, list[Shortage]] = {}
    for one in shortages:
        numbers = tuple(getattr(one.error, f.name) for f in fields(OutOfMemory) if f.name != "gpu")
        alike.setdefault((numbers, one.step), []).append(one)
    yield from alike.values()


def _shortage(shortages: list[Shortage]) -> Iterator[str]:
    first = shortages[0]
    error, cause = first.error, cause_of(first.error)
    step = f" {_STEPS[first.step]}" if first.step is not None else ""
    ranks = sorted({_place(one.origin.rank, one.origin.worker) for one in shortages})
    times = f", on {', '.join(ranks)}" if len(ranks) > 1 else f", {len(shortages)} times" if len(shortages) > 1 else ""
    yield f"  out of {'host ' if error.host else ''}memory{step}, {units.moment(first.t)}{times}"
    if error.dummy_requests is not None:
        yield f"    it warmed up with {error.dummy_requests:,} requests at once"
    numbers = [
        f"{name} {units.size(size)}"
        for name, size in (
            ("asked for", error.wanted),
            ("free", error.free),
            ("reserved by PyTorch but unallocated", error.reserved),
            ("held by itself", error.in_use),
            ("by others", error.others or None),
            ("of", error.total),
        )
        if size is not None
    ]
    if numbers:
        yield f"    {', '.join(numbers)}"
    yield f"    {killer_text(error, cause)}"


def killer_text(error: OutOfMemory, cause: Cause) -> str:
    """Which killer, how sure, by which numbers, and what the error's text gets wrong."""
    if error.host:
        return "capacity: the host's memory ran out, not the GPU's."
    if error.wanted is None or error.free is None:
        return f"{cause.killer}, {confidence_text(cause.confidence)}: the error has no numbers, so the step decides."
    wanted, free = units.size(error.wanted), units.size(error.free)
    reach = units.size(error.free + (error.reserved or 0))
    head = f"{cause.killer}, {confidence_text(cause.confidence)}"
    if cause.how == "race":
        return (
            f"{head}: {free} were free and only {wanted} asked for: sizes were rounded, or another took it meanwhile."
        )
    times = f"{cause.strength:.2f} times what was asked for" if cause.strength is not None else ""
    if cause.how == "in_pieces":
        return (
            f"{head}: {free} free < {wanted} asked for <= {reach} free and unallocated, {times}. "
            "It was there, in pieces: here the error's hint at expandable segments is right."
        )
    if error.reserved is None:
        return f"{head}: {free} free < {wanted} asked for; the error does not tell what was unallocated."
    return (
        f"{head}: {reach} free and unallocated < {wanted} asked for, {times}. "
        "The error's hint at fragmentation does not help: the sum is too small."
    )


# --- what is concluded -------------------------------------------------------------------------------------------


def _incident(incident: Incident) -> Iterator[str]:
    cause = incident.cause
    left = time_left(cause.eta)
    yield f"{cause.state}: {cause.name} ({cause.killer}, {confidence_text(cause.confidence)})"
    yield f"  {statement(cause, {})}"
    if left:
        yield f"  time left: {left}"
    for name, value in evidence_text(cause, {}):
        yield f"  {name}: {value}"
    for title, verdicts in (("the same elsewhere", incident.causes[1:]), ("explains", incident.symptoms)):
        for verdict in verdicts:
            yield f"  {title}: {verdict.name}: {statement(verdict, {})}"
    yield "  What to do"
    for number, action in enumerate(incident.advice, 1):
        yield f"  {number}. {action}"


# --- as plain data -----------------------------------------------------------------------------------------------


def plain(found: Iterable[PostMortem]) -> dict[str, object]:
    """Bytes, tokens, unix seconds and ratios."""
    return {"engines": [_plain(one) for one in found]}


def _plain(one: PostMortem) -> dict[str, object]:
    return {
        "name": one.name,
        "source": one.source,
        "cut": one.cut or None,
        "starts": [_start_plain(start) for start in one.story.starts],
        "incidents": [incident_plain(incident) for incident in one.incidents],
        "verdicts": [verdict_plain(verdict) for incident in one.incidents for verdict in incident.verdicts],
    }


def _start_plain(start: StartUp) -> dict[str, object]:
    return {
        "since": start.since,
        "seen_from_start": start.seen_from_start,
        "vllm_version": start.version,
        "ready": start.ready,
        "died": start.died,
        "deaths": [known_fields(death) for death in start.deaths],
        "stopped": start.stopped,
        "utilization": start.utilization,
        "max_model_len": start.max_model_len,
        "budgets": [
            {"rank": rank, "worker": worker, **known_fields(budget)} for (rank, worker), budget in start.budgets.items()
        ],
        "pools": [{"rank": rank, **known_fields(pool)} for rank, pool in start.pools.items()],
        "refusals": [{"t": one.t, **known_fields(one.refused)} for one in start.refusals],
        "shortages": [
            {
                "t": one.t,
                "step": one.step,
                "rank": one.origin.rank,
                "worker": one.origin.worker,
                **known_fields(one.error),
                "cause": known_fields(cause_of(one.error)),
            }
            for one in start.shortages
        ],
    }
