"""The catalogue: every conclusion has one name, used in gauges, alerts, runbooks, dashboards, replays and the pages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from oomwatch.detectors.base import LEVEL, Eta, Evidence, State, Subject

KILLERS = ("capacity", "fragmentation", "leak", "health")


@dataclass(frozen=True)
class Entry:
    """A verdict of the catalogue. ``worst`` is the highest state that it ever takes; ``says`` is what it means.

    ``instead_of`` names the verdict in whose place it stands when its detector knows more; empty for one of its own.
    """

    name: str
    killer: str
    worst: State
    says: str
    instead_of: str = ""

    @property
    def alert(self) -> str:
        """The name of its alert and its runbook: ``kv-block-leak`` is OomwatchKvBlockLeak."""
        return "Oomwatch" + "".join(part.capitalize() for part in self.name.split("-"))


_ENTRIES = (
    Entry("startup-refused", "capacity", "ticket", "the engine refused to start: its memory budget does not fit"),
    Entry("startup-oom", "capacity", "ticket", "the engine ran out of memory while it started"),
    Entry("concurrency-low", "capacity", "ticket", "the KV pool holds less than a few requests of the longest length"),
    Entry("budget-overrun", "capacity", "ticket", "the engine's processes hold more than the share they were given"),
    Entry("margin-thin", "capacity", "ticket", "since the start less is free than a forward pass may ask for"),
    Entry("headroom-low", "capacity", "page", "free device memory has fallen below what the engine has lived with"),
    Entry("kv-exhaustion", "capacity", "page", "the KV pool is full, and requests suffer from it"),
    Entry("preemption-pressure", "capacity", "ticket", "many requests are preempted for each one that finishes"),
    Entry("admission-stall", "capacity", "ticket", "requests wait and none is admitted although the pool has room"),
    Entry("ranks-unbalanced", "capacity", "ticket", "some data-parallel ranks are full while others idle"),
    Entry("engine-stuck", "capacity", "page", "there is work, and no token comes out"),
    Entry("orphan-memory", "capacity", "ticket", "device memory is held by no known engine or neighbour"),
    Entry("runtime-oom", "capacity", "page", "the allocator ran out of memory while the engine served"),
    Entry("crash-loop", "capacity", "page", "the same engine dies again and again"),
    Entry(
        "allocator-fragmentation",
        "fragmentation",
        "page",
        "free memory of the allocator lies in pieces that are too small for what is asked for",
    ),
    Entry("kv-tail-waste", "fragmentation", "ticket", "unused tails of last blocks waste a share of the used pool"),
    Entry(
        "unaccounted-growth",
        "fragmentation",
        "page",
        "an engine's device memory grows in fragments: the allocator reserves more and more and hands out no more",
        instead_of="gpu-memory-leak",
    ),
    Entry("kv-block-leak", "leak", "page", "KV blocks are held that no request owns"),
    Entry("gpu-memory-leak", "leak", "page", "an engine's device memory grows without new load: leak or fragmentation"),
    Entry("host-memory-leak", "leak", "page", "anonymous host memory of an engine's process grows toward its limit"),
    Entry("metrics-missing", "health", "ticket", "the engine answers, and series that are needed are not there"),
    Entry("source-stale", "health", "ticket", "a source has delivered nothing for a while"),
    Entry("gpu-lost", "health", "page", "a device fell off, or is counted no more"),
    Entry("nvml-stuck", "health", "ticket", "a driver call has not returned"),
)

CATALOGUE: Mapping[str, Entry] = {entry.name: entry for entry in _ENTRIES}


@dataclass(frozen=True)
class Verdict:
    """A conclusion about a subject, as every output shows it.

    ``since`` is when this state began. ``symptom_of`` names the verdict that causes it, None for a cause.
    ``incident`` is the same for all that belongs together; empty while clear or unknown. ``silenced`` says which
    planned silence holds it back from alerting, empty when none does. ``gauges`` are the detector's numbers of now,
    whatever the state.
    """

    name: str
    killer: str
    state: State
    subject: Subject
    since: float
    confidence: float = 1.0
    summary: str = ""
    evidence: Evidence = field(default_factory=dict)
    eta: Eta | None = None
    reason: str = ""
    advice: tuple[str, ...] = ()
    incident: str = ""
    symptom_of: str | None = None
    silenced: str = ""
    gauges: Mapping[str, float] = field(default_factory=dict)

    @property
    def level(self) -> int:
        return LEVEL[self.state]
