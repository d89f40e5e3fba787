"""Verdicts and incidents for people: causes before symptoms, numbers with units, doubt and time left in words.

The page, ``oomwatch check`` and the API show the same incidents, made here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from oomwatch import units
from oomwatch.detectors.base import LEVEL, Eta, State, Subject
from oomwatch.enginelog.events import Budget
from oomwatch.verdicts import Verdict

SEVERITY_OF: Mapping[State, str] = {"page": "critical", "ticket": "warning", "info": "info"}

_SAY_WHY = ("startup-refused", "startup-oom", "runtime-oom")


@dataclass(frozen=True)
class Incident:
    """What belongs together: the worst cause first, and what the causes explain.

    ``silenced`` is the reason of a planned silence that holds all of it back, empty while any of it may alert.
    ``since`` is unix time.
    """

    id: str
    causes: tuple[Verdict, ...]
    symptoms: tuple[Verdict, ...]

    @property
    def cause(self) -> Verdict:
        return self.causes[0]

    @property
    def verdicts(self) -> tuple[Verdict, ...]:
        return self.causes + self.symptoms

    @property
    def advice(self) -> tuple[str, ...]:
        """What to do. Of a cause that says only that something happens again, what says why goes first."""
        if self.cause.name != "crash-loop":
            return self.cause.advice
        why = [verdict for verdict in self.symptoms if verdict.name in _SAY_WHY and verdict.advice]
        latest = max(why, key=lambda verdict: (verdict.level, verdict.since), default=None)
        return self.cause.advice if latest is None else (*latest.advice, *self.cause.advice)

    @property
    def since(self) -> float:
        return min(verdict.since for verdict in self.verdicts)

    @property
    def silenced(self) -> str:
        loud = [verdict for verdict in self.verdicts if not verdict.silenced]
        return "" if loud else self.cause.silenced

    @property
    def severity(self) -> str:
        """``critical``, ``warning`` or ``info``, by the worst of it that no planned silence holds back."""
        worst = max((v for v in self.verdicts if not v.silenced), key=lambda v: v.level, default=None)
        return "info" if worst is None else SEVERITY_OF[worst.state]


def incidents(verdicts: Iterable[Verdict]) -> tuple[Incident, ...]:
    """All that are open, the worst first."""
    by_id: dict[str, list[Verdict]] = {}
    for verdict in verdicts:
        if verdict.incident and verdict.level >= LEVEL["info"]:
            by_id.setdefault(verdict.incident, []).append(verdict)
    found = [_incident(name, members) for name, members in by_id.items()]
    return tuple(sorted(found, key=lambda one: (bool(one.silenced), -max(v.level for v in one.verdicts), one.since)))


def _incident(name: str, members: list[Verdict]) -> Incident:
    worst_first = sorted(members, key=lambda verdict: (-verdict.level, verdict.since))
    # Verdicts that explain one another in a circle are all causes: an incident has one at least.
    causes = tuple(verdict for verdict in worst_first if verdict.symptom_of is None) or tuple(worst_first)
    symptoms = tuple(verdict for verdict in worst_first if verdict not in causes)
    return Incident(name, causes, symptoms)


# --- in words ----------------------------------------------------------------------------------------------------


def subject_text(subject: Subject, devices: Mapping[str, str]) -> str:
    """``Engine chat, rank 0``, ``Engine chat, process 4711 on GPU 0``, ``GPU 2``; ``devices`` names uuids."""
    device = devices.get(subject.gpu, subject.gpu) if subject.gpu is not None else ""
    if subject.engine is None:
        return _capital(device) or (f"Host {subject.host}" if subject.host else "The node")
    parts = [f"Engine {subject.engine}"]
    if subject.rank is not None:
        parts.append(f"rank {subject.rank}")
    if subject.pid is not None:
        parts.append(f"process {subject.pid}{f' on {device}' if device else ''}")
    elif device:
        parts.append(f"on {device}")
    return ", ".join(parts)


def statement(verdict: Verdict, devices: Mapping[str, str]) -> str:
    """Whom it is about and what was found, as one sentence; devices are named as people name them."""
    said = verdict.summary or f"{verdict.name} ({verdict.state})."
    for uuid, name in devices.items():
        said = said.replace(uuid, name)
    about = subject_text(verdict.subject, devices)
    if said.startswith(f"{about} "):
        return said
    if verdict.subject.engine is not None and said.startswith(f"{verdict.subject.engine} "):
        return f"Engine {said}"
    return f"{about}: {said}"


def confidence_text(confidence: float) -> str:
    """How sure a verdict is: ``nearly certain (97%)``."""
    words = next(text for least, text in _CONFIDENCE if confidence >= least)
    return f"{words} ({units.ratio(confidence)})"


_CONFIDENCE = ((0.95, "nearly certain"), (0.8, "very likely"), (0.6, "likely"), (0.4, "perhaps"), (-math.inf, "a hint"))


def time_left(eta: Eta | None) -> str:
    """``about 6 h, between 5 h and 8 h``; empty where there is no pace toward an end."""
    if eta is None or not math.isfinite(eta.seconds):
        return ""
    if eta.seconds <= 0:
        return "none"
    text = f"about {units.duration(eta.seconds)}"
    low, high = (value if value is not None and math.isfinite(value) else None for value in (eta.low, eta.high))
    if low is not None and high is not None:
        return f"{text}, between {units.duration(low)} and {units.duration(high)}"
    if low is not None:
        return f"{text}, at least {units.duration(low)}"
    return f"{text}, at most {units.duration(high)}" if high is not None else text


def evidence_text(verdict: Verdict, devices: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """The numbers behind a verdict, each with its name, as people read them."""
    return tuple(
        (_name_of(key), text)
        for key, value in verdict.evidence.items()
        if (text := _value_text(key, value, devices)) != ""
    )


# What a key ends in, and how a number of it is read; the ending is left out of its name where the unit says it.
_ENDINGS = (
    ("_bytes_per_hour", lambda value: f"{units.size(value)} an hour"),
    ("_blocks_per_hour", lambda value: f"{units.count(round(value, 1))} blocks an hour"),
    ("_tokens_per_second", lambda value: f"{units.count(round(value, 1))} tokens/s"),
    ("_bytes", units.size),
    ("_seconds", units.duration),
)
_TIMES = ("last_seen", "last_death", "first_death", "last_failure")
_SHARES = ("usage", "peak_usage", "waste_share", "waste_low", "waste_high", "waste_most", "free_share")


def _name_of(key: str) -> str:
    ending = next((ending for ending, _ in _ENDINGS if key.endswith(ending)), "")
    return (key.removesuffix(ending).removesuffix("_ratio") or key).replace("_", " ")


def _value_text(key: str, value: object, devices: Mapping[str, str]) -> str:
    if isinstance(value, str):
        return devices.get(value, value)
    if isinstance(value, list):
        read = units.size if key.startswith("bytes_") else str
        return ", ".join(read(item) for item in value)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return ""
    if key in _TIMES or key.endswith("_since"):
        return units.moment(value)
    if key in _SHARES or key.endswith(("_ratio", "_of_usual")):
        return units.ratio(value)
    for ending, read_number in _ENDINGS:
        if key.endswith(ending):
            return read_number(value)
    return units.count(value) if float(value).is_integer() else f"{value:.3g}"


def budget_text(budget: Budget) -> str:
    """What a worker promised itself at its start, and what took it, as far as its log says."""
    parts = [
        (budget.weights, "weights"),
        (budget.consumed if budget.weights is None else None, "weights and other"),
        (budget.non_torch, "outside PyTorch"),
        (budget.activation, "peak of activations"),
        (budget.graphs, "graphs"),
        (budget.kv_pool, "KV pool"),
    ]
    listed = ", ".join(f"{units.size(size)} {name}" for size, name in parts if size is not None)
    if budget.promised is None:
        return listed or "not told"
    of = f" of {units.size(budget.total)}" if budget.total is not None else ""
    return f"{units.size(budget.promised)}{of} promised{f': {listed}' if listed else ''}"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


# --- what is not known, and what is held back --------------------------------------------------------------------


def unknown_by_reason(verdicts: Iterable[Verdict]) -> dict[tuple[str, str], list[Verdict]]:
    """Verdicts that cannot be concluded, by name and reason, in the order of the catalogue's names."""
    grouped: dict[tuple[str, str], list[Verdict]] = {}
    for verdict in sorted(verdicts, key=lambda one: (one.name, one.reason)):
        if verdict.state == "unknown":
            grouped.setdefault((verdict.name, verdict.reason), []).append(verdict)
    return grouped


def silenced(verdicts: Iterable[Verdict]) -> tuple[Verdict, ...]:
    """Verdicts that would show, and that a planned silence holds back."""
    return tuple(one for one in verdicts if one.silenced and one.level >= LEVEL["info"])


# --- as plain data -----------------------------------------------------------------------------------------------

Plain = dict[str, object]


def verdict_plain(verdict: Verdict) -> Plain:
    """A verdict as JSON-able data; numbers that JSON does not have are null."""
    eta = verdict.eta
    return {
        "verdict": verdict.name,
        "killer": verdict.killer,
        "state": verdict.state,
        "subject": verdict.subject.labels(),
        "since": verdict.since,
        "confidence": None if verdict.state == "unknown" else verdict.confidence,
        "summary": verdict.summary,
        "reason": verdict.reason,
        "evidence": {key: _finite(value) for key, value in verdict.evidence.items()},
        "eta": None
        if eta is None
        else {"seconds": _finite(eta.seconds), "low": _finite(eta.low), "high": _finite(eta.high)},
        "advice": list(verdict.advice),
        "incident": verdict.incident,
        "symptom_of": verdict.symptom_of,
        "silenced": verdict.silenced,
    }


def incident_plain(incident: Incident) -> Plain:
    """An incident as JSON-able data; its verdicts stand in full among ``verdicts``."""
    return {
        "id": incident.id,
        "severity": incident.severity,
        "since": incident.since,
        "killer": incident.cause.killer,
        "advice": list(incident.advice),
        "silenced": incident.silenced,
        "causes": [_named(verdict) for verdict in incident.causes],
        "symptoms": [_named(verdict) for verdict in incident.symptoms],
    }


def _named(verdict: Verdict) -> Plain:
    return {"verdict": verdict.name, "state": verdict.state, "subject": verdict.subject.labels()}


def _finite(value: object) -> object:
    return None if isinstance(value, float) and not math.isfinite(value) else value
