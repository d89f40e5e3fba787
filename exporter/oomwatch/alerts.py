"""How an incident shows as an alert: the same labels whether Prometheus' rules or the daemon itself sends it."""

from __future__ import annotations

from collections.abc import Mapping

from oomwatch.conclusions import Incident
from oomwatch.verdicts import CATALOGUE

NODE = "node"
"""The owner of an incident that is about no engine and no device."""

DEVICE_PREFIXES = ("GPU-", "MIG-")


def alert_labels(incident: Incident, static: Mapping[str, str]) -> dict[str, str]:
    """The labels of an incident's alert; ``static`` are those that say where: cluster, instance and the like.

    ``incident`` is OWNER/CAUSE: the same for one trouble however often the daemon restarts or numbers it anew.
    """
    cause = incident.cause
    owner = owner_of(incident.id)
    about = {"gpu": "", "mig": "", "engine": ""}
    if owner.startswith(DEVICE_PREFIXES):
        about["gpu" if owner.startswith("GPU-") else "mig"] = owner
    elif owner != NODE:
        about["engine"] = owner
    labels = {
        **static,
        **about,
        "alertname": CATALOGUE[cause.name].alert,
        "incident": f"{owner}/{cause.name}",
        "killer": cause.killer,
        "severity": incident.severity,
        "verdict": cause.name,
    }
    return {name: value for name, value in labels.items() if value}


def owner_of(incident: str) -> str:
    """Whom an incident is named after: ``chat`` for ``chat/3``."""
    return incident.rpartition("/")[0]
