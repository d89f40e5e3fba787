"""Which runs there are: three sets, fixed by a manifest whose hash is written down here.

``tune`` is for choosing thresholds, ``test`` for the published table, ``ood`` (out of distribution) has another kind of
load: a reasoning model's clients and long contexts. No two sets share a client, a row of the length traces or a seed.
The manifest holds the SHA-256 of every scenario's parameters, so that no change of the families goes unnoticed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.detection.families import FAULTY, HEALTHY, Scenario, SetSpec, draw
from benchmarks.detection.traffic import Traces

MANIFEST = Path(__file__).with_name("manifest.json")
# Of the file above. Whoever changes it after detectors were tuned has another benchmark, and says so.
MANIFEST_SHA256 = "ad4d0aa8a5f1945bb17511d14b0e11611a9293a2ef25255ef809d95f48289bc3"

_TEST_FAULTS = {
    "kv_abort": 95,
    "kv_finish": 95,
    "kv_connector": 75,
    "kv_one_off": 60,
    "kv_saturated": 25,
    "gpu_steady": 56,
    "gpu_per_request": 56,
    "gpu_fragmentation": 56,
    "gpu_slow": 20,
    "host_requests": 82,
    "host_steady": 82,
    "preemption_storm": 36,
    "stuck_engine": 34,
    "admission_stall": 34,
    "orphan_memory": 32,
    "budget_overrun": 32,
}
_HEALTHY_RUNS = 10  # of two weeks each, on one or two GPUs


class ManifestError(Exception):
    """The manifest, or what it says of the scenarios, is not what was frozen."""


@dataclass(frozen=True)
class RunSet:
    """``counts``: runs by family. ``digest``: SHA-256 of all its scenarios."""

    spec: SetSpec
    counts: dict[str, int]
    digest: str

    def scenarios(self, families: tuple[str, ...] = (), at_most: int | None = None) -> Iterator[Scenario]:
        for family, count in self.counts.items():
            if not families or family in families:
                for number in range(count if at_most is None else min(count, at_most)):
                    yield draw(family, self.spec, number)


def load(path: Path = MANIFEST, sha256: str | None = None) -> dict[str, RunSet]:
    """The sets by name. Raises ManifestError when the file is not the frozen one."""
    body = path.read_bytes()
    expected = MANIFEST_SHA256 if sha256 is None else sha256
    found = hashlib.sha256(body).hexdigest()
    if found != expected:
        raise ManifestError(f"{path} has SHA-256 {found}, and {expected} was written down for it")
    sets = {}
    for name, entry in json.loads(body)["sets"].items():
        clients = {source: tuple(ids) for source, ids in entry["clients"].items()}
        spec = SetSpec(name, entry["seed"], clients, tuple(entry["lengths"]), entry["rows"])
        sets[name] = RunSet(spec, entry["families"], entry["scenarios_sha256"])
    return sets


def digest(run_set: RunSet) -> str:
    """SHA-256 of every parameter of every scenario of a set."""
    sha = hashlib.sha256()
    for scenario in run_set.scenarios():
        sha.update(json.dumps(_plain(scenario), sort_keys=True).encode())
    return sha.hexdigest()


def check(run_set: RunSet) -> None:
    """Raises ManifestError when the families draw other scenarios than when the set was frozen."""
    found = digest(run_set)
    if found != run_set.digest:
        raise ManifestError(
            f"the scenarios of {run_set.spec.name} have SHA-256 {found}, and {run_set.digest} was written down for them"
        )


def freeze(traces: Traces) -> str:
    """A new manifest, as text. Clients are told apart by their place in the order of volume."""
    small, large, reasoning = (traces.clients(source) for source in ("m-small", "m-large", "r1"))
    specs = [
        SetSpec("tune", 101, {"m-small": small[:24:2], "m-large": large[::2]}, ("code", "conversation"), "first"),
        SetSpec("test", 202, {"m-small": small[1:24:2], "m-large": large[1::2]}, ("code", "conversation"), "second"),
        SetSpec("ood", 303, {"r1": reasoning[:24]}, ("long",), "all"),
    ]
    parts = {"tune": 0.25, "test": 1.0, "ood": 0.25}
    sets: dict[str, Any] = {}
    for spec in specs:
        part = parts[spec.name]
        counts = dict.fromkeys(HEALTHY, max(2, round(_HEALTHY_RUNS * part)))
        counts |= {family: max(3, round(_TEST_FAULTS[family] * part)) for family in FAULTY}
        run_set = RunSet(spec, counts, "")
        sets[spec.name] = {
            "seed": spec.seed,
            "clients": {source: list(ids) for source, ids in spec.clients.items()},
            "lengths": list(spec.lengths),
            "rows": spec.rows,
            "families": counts,
            "scenarios_sha256": digest(run_set),
        }
    return json.dumps({"manifest": 1, "sets": sets}, indent=1) + "\n"


def _plain(value: Any) -> Any:
    """Named tuples as objects, so that the names of parameters count too."""
    if hasattr(value, "_asdict"):
        return {key: _plain(part) for key, part in value._asdict().items()}
    return [_plain(part) for part in value] if isinstance(value, tuple | list) else value
