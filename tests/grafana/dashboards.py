"""The dashboards as they are committed, for tests: their panels, queries and variables."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from tests.documents import REPOSITORY

FOLDER = REPOSITORY / "grafana" / "dashboards"
UIDS = ("oomwatch-fleet", "oomwatch-engine", "oomwatch-gpu", "oomwatch-self")
ONE_NODE = ("oomwatch-engine", "oomwatch-gpu")
"""Those that show one node at a time; the others show all."""

# What stands for the variables where a query is only read.
EXAMPLES: Mapping[str, str] = {
    "datasource": "prometheus",
    "job": "oomwatch",
    "instance": "node-1:18666",
    "engine": "chat",
    "rank": "0",
    "gpu": "GPU-0",
}
TIMES: Mapping[str, str] = {"__rate_interval": "8m", "__interval": "2m", "__range": "6h"}


@dataclass(frozen=True)
class Target:
    """One query of a panel, a variable or an annotation."""

    board: str
    where: str
    expr: str
    instant: bool = False


@cache
def board(uid: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((FOLDER / f"{uid}.json").read_text(encoding="utf-8"))
    return found


def panels(uid: str) -> list[dict[str, Any]]:
    """Without rows."""
    return [panel for panel in board(uid)["panels"] if panel["type"] != "row"]


def variables(uid: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = board(uid)["templating"]["list"]
    return found


def marks(uid: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = board(uid)["annotations"].get("list", [])
    return found


def targets(uid: str) -> Iterator[Target]:
    """Every query of the panels."""
    for panel in panels(uid):
        for target in panel.get("targets", []):
            yield Target(uid, f"{panel['title']}, {target['refId']}", target["expr"], target["instant"])


def questions(uid: str) -> Iterator[Target]:
    """Every query of panels, annotations and variables, a variable's function taken off."""
    yield from targets(uid)
    for annotation in marks(uid):
        yield Target(uid, f"annotation {annotation['name']}", annotation["expr"])
    for variable in queried(uid):
        yield Target(uid, f"variable {variable['name']}", asked(variable)[0], instant=True)


def queried(uid: str) -> list[dict[str, Any]]:
    """The variables whose choices are asked of Prometheus."""
    return [variable for variable in variables(uid) if variable["type"] == "query"]


def asked(variable: Mapping[str, Any]) -> tuple[str, str]:
    """The PromQL of a variable's query, and the label whose values it takes; empty where it takes whole series."""
    found = re.fullmatch(r"label_values\((.*), *(\w+)\)|query_result\((.*)\)", variable["query"])
    assert found, variable
    return found[1] or found[3], found[2] or ""


def filled(expr: str, values: Mapping[str, str] = EXAMPLES, times: Mapping[str, str] = TIMES) -> str:
    """The query as Grafana would send it; several values are given as a pattern."""
    known = {**times, **values}

    def value(found: re.Match[str]) -> str:
        name = found[1] or found[2]
        assert name in known, f"${name} in {expr}"
        return known[name]

    return re.sub(r"\$\{(\w+)(?::\w+)?\}|\$(\w+)", value, expr)
