"""The dashboards as they are committed, and how a viewer draws one of them in a story."""

from __future__ import annotations

from typing import Any

from oomwatch.demo.machine import Machine
from tests.grafana import dashboards
from tests.grafana.seeded import END, Tale
from tests.grafana.viewer import Panel, Viewer

LAPTOP, WIDE = 1280, 1920
BOARDS = tuple(uid.removeprefix("oomwatch-") for uid in dashboards.UIDS)
UUIDS = [gpu.uuid for gpu in Machine(1, float).gpus]


def board(name: str) -> dict[str, Any]:
    return dashboards.board(f"oomwatch-{name}")


def chosen(name: str, tale: Tale) -> dict[str, str]:
    """The variables' values, as the links from an alert about this story would set them."""
    values = {"instance": tale.instance}
    if name == "engine":
        values["engine"] = tale.engine
    if name == "gpu":
        values["gpu"] = UUIDS[tale.gpu]
    return values


def show(viewer: Viewer, name: str, tale: Tale, theme: str = "dark") -> list[Panel]:
    return viewer.show(
        board(name),
        begin=tale.begin,
        end=END,
        variables=chosen(name, tale),
        scrape_interval=tale.interval,
        width=LAPTOP,
        theme=theme,
    )
