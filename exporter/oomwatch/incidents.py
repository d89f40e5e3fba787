"""What belongs together: one root cause is one incident, however many verdicts, ranks and devices show it.

The table below is the only place that knows; page, API, replay, alerts' inhibition and notifications are made from it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from oomwatch.detectors.base import LEVEL, Subject
from oomwatch.verdicts import Verdict

Scope = Literal["device", "engine", "rank", "engine-and-devices"]


@dataclass(frozen=True)
class Rule:
    """``cause`` explains each of ``symptoms`` (empty: every verdict) about the same ``scope``.

    ``engine-and-devices`` is the engine, its ranks, and every device that it runs on.
    """

    cause: str
    symptoms: tuple[str, ...]
    scope: Scope


_OF_GROWTH = ("budget-overrun", "headroom-low", "allocator-fragmentation")

TABLE = (
    Rule("gpu-lost", (), "device"),
    Rule("nvml-stuck", (), "device"),
    Rule("crash-loop", ("startup-refused", "startup-oom", "runtime-oom", "source-stale"), "engine"),
    Rule(
        "runtime-oom",
        ("engine-stuck", "source-stale", "orphan-memory", "allocator-fragmentation"),
        "engine-and-devices",
    ),
    Rule("kv-block-leak", ("kv-exhaustion", "engine-stuck", "admission-stall", "preemption-pressure"), "rank"),
    Rule("engine-stuck", ("admission-stall", "ranks-unbalanced"), "engine"),
    Rule("gpu-memory-leak", _OF_GROWTH, "engine-and-devices"),
    Rule("unaccounted-growth", _OF_GROWTH, "engine-and-devices"),
    Rule("kv-exhaustion", ("preemption-pressure",), "rank"),
    Rule("orphan-memory", ("headroom-low", "startup-refused"), "device"),
)


def explains(rule: Rule, name: str) -> bool:
    """Whether ``rule`` takes a verdict for a symptom. Of two that explain everything, the earlier one is the cause."""
    if rule.symptoms:
        return name in rule.symptoms
    earlier = TABLE[: TABLE.index(rule) + 1]
    return name not in {other.cause for other in earlier if not other.symptoms}


_SYMPTOM_AT_LEAST = LEVEL["info"]


class Incidents:
    """Numbers incidents as they come: ``NAME/1``, ``NAME/2`` …, by the engine or device that the cause is about.

    One incident lasts while anything of it is at least info.
    """

    def __init__(self) -> None:
        self._open: dict[tuple[str, str], str] = {}
        self._numbers: dict[str, int] = {}

    def assign(
        self, verdicts: Iterable[Verdict], devices: Mapping[str, frozenset[str]] | None = None
    ) -> tuple[Verdict, ...]:
        """The verdicts, fresh from the judge, with their incident and cause.

        ``devices`` has the uuids that each engine runs on.
        """
        listed = tuple(verdicts)
        standing = [verdict for verdict in listed if verdict.level >= _SYMPTOM_AT_LEAST]
        causes = {id(verdict): _cause_of(verdict, standing, devices or {}) for verdict in standing}
        numbered: list[Verdict] = []
        used: set[tuple[str, str]] = set()
        for verdict in listed:
            if id(verdict) not in causes:
                numbered.append(verdict)
                continue
            cause = causes[id(verdict)]
            root = _root(verdict, causes)
            key = (_owner(root.subject, devices or {}), root.name)
            used.add(key)
            incident = self._open.get(key) or self._new(key)
            numbered.append(replace(verdict, incident=incident, symptom_of=cause.name if cause else None))
        self._open = {key: incident for key, incident in self._open.items() if key in used}
        return tuple(numbered)

    def _new(self, key: tuple[str, str]) -> str:
        owner = key[0]
        self._numbers[owner] = self._numbers.get(owner, 0) + 1
        self._open[key] = f"{owner}/{self._numbers[owner]}"
        return self._open[key]


def _cause_of(symptom: Verdict, standing: Iterable[Verdict], devices: Mapping[str, frozenset[str]]) -> Verdict | None:
    """The first cause, in the table's order, that stands and explains ``symptom``.

    What is only info explains no ticket and no page: it comes and goes, and would rename what somebody was told of.
    """
    least = min(symptom.level, LEVEL["ticket"])
    candidates = [verdict for verdict in standing if verdict is not symptom and verdict.level >= least]
    for rule in TABLE:
        if not explains(rule, symptom.name):
            continue
        for cause in candidates:
            if cause.name == rule.cause and _about_the_same(rule.scope, cause.subject, symptom.subject, devices):
                return cause
    return None


def _root(verdict: Verdict, causes: Mapping[int, Verdict | None]) -> Verdict:
    seen: set[int] = set()
    while id(verdict) not in seen:
        seen.add(id(verdict))
        cause = causes.get(id(verdict))
        if cause is None:
            return verdict
        verdict = cause
    return verdict


def _about_the_same(scope: Scope, cause: Subject, symptom: Subject, devices: Mapping[str, frozenset[str]]) -> bool:
    same_engine = cause.engine is not None and cause.engine == symptom.engine
    if scope == "engine":
        return same_engine
    if scope == "rank":
        return same_engine and (None in (cause.rank, symptom.rank) or cause.rank == symptom.rank)
    if scope == "device":
        return cause.gpu is not None and (
            cause.gpu == symptom.gpu
            or (symptom.gpu is None and symptom.engine is not None and cause.gpu in devices.get(symptom.engine, ()))
        )
    on_its_devices = (
        cause.engine is not None and symptom.engine is None and symptom.gpu in devices.get(cause.engine, frozenset())
    )
    return same_engine or on_its_devices


def _owner(subject: Subject, devices: Mapping[str, frozenset[str]]) -> str:
    """Whom an incident is named after: an engine, its own or the only one of its device; else the device."""
    if subject.engine is not None:
        return subject.engine
    engines = [engine for engine, uuids in devices.items() if subject.gpu in uuids]
    return engines[0] if len(engines) == 1 else subject.gpu or subject.host or "node"
