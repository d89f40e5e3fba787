"""Between the log's entries and the observations that carry them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

from oomwatch.enginelog.events import Budget, Entry, Settings, Start, from_plain, plain
from oomwatch.enginelog.reader import parse
from oomwatch.observations import EngineFacts, LogLine


def line_of(t: float, engine: str, entry: Entry, text: str | None = None) -> LogLine:
    """The observation at ``t`` of an entry of an engine's log, with its raw text where that was asked for."""
    return LogLine(t, engine, line=text, event=entry.event.name, fields=plain(entry))


def entry_of(line: LogLine) -> Entry | None:
    """What a line says: its event, or what its text would have been read to.

    Raises ValueError where the fields of its event cannot be.
    """
    if line.event is not None:
        return from_plain(line.event, cast("Mapping[str, Any]", line.fields))
    return parse(line.line.encode()) if line.line is not None else None


def told_facts(before: EngineFacts, entry: Entry) -> EngineFacts:
    """What is known of an engine once an entry of its log was read: what it measured goes before what was set."""
    event = entry.event
    given: dict[str, Any] = {}
    if isinstance(event, Start):
        given = {"vllm_version": event.version, "max_model_len": event.max_model_len}
    elif isinstance(event, Settings):
        names = ("gpu_memory_utilization", "max_model_len", "max_num_seqs", "max_num_batched_tokens")
        given = {name: getattr(event, name) for name in names}
    elif isinstance(event, Budget):
        given = {"gpu_memory_utilization": event.utilization}
        if "PP" not in entry.origin.worker:  # the stages of a pipeline hold different parts
            given |= {"weights_bytes": event.weights, "kv_pool_bytes": event.kv_pool if _positive(event) else None}
    known = {name: value for name, value in given.items() if value is not None}
    return replace(before, **known) if known else before


def _positive(budget: Budget) -> bool:
    return budget.kv_pool is not None and budget.kv_pool > 0
