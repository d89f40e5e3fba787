"""A dashboard: its variables, annotations, rows and panels, laid out from left to right and top to bottom."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common, dashboard

COLUMNS = 24
TAG = "oomwatch"
SOURCE = common.DataSourceRef(type_val="prometheus", uid="${datasource}")


@dataclass(frozen=True)
class Row:
    """Panels under a heading that can be folded away; the first row of a dashboard needs no heading."""

    title: str
    panels: Sequence[dashboard.Panel]


@dataclass(frozen=True)
class Board:
    """``uid`` makes the address; alerts link to it. ``links`` lead to the other dashboards."""

    uid: str
    title: str
    description: str
    variables: Sequence[dashboard.VariableModel]
    rows: Sequence[Row]
    links: Sequence[dashboard.DashboardLink]
    annotations: Sequence[dashboard.AnnotationQuery] = ()

    def built(self) -> dashboard.Dashboard:
        for shown in (*self.links, *self.annotations):
            shown.placement = None  # the SDK hides both in a menu
        return dashboard.Dashboard(
            uid=self.uid,
            title=self.title,
            description=self.description,
            tags=[TAG],
            editable=False,
            graph_tooltip=dashboard.DashboardCursorSync.CROSSHAIR,
            time=dashboard.DashboardDashboardTime(from_val="now-6h", to="now"),
            refresh="1m",
            templating=dashboard.DashboardDashboardTemplating(list_val=list(self.variables)),
            annotations=dashboard.AnnotationContainer(list_val=list(self.annotations)),
            links=list(self.links),
            panels=self._laid_out(),
        )

    def text(self) -> str:
        return str(JSONEncoder(sort_keys=True, indent=2).encode(self.built())) + "\n"

    def _laid_out(self) -> list[dashboard.Panel | dashboard.RowPanel]:
        found: list[dashboard.Panel | dashboard.RowPanel] = []
        y = 0
        for row in self.rows:
            if row.title:
                place = dashboard.GridPos(x=0, y=y, w=COLUMNS, h=1)
                found.append(dashboard.RowPanel(title=row.title, collapsed=False, grid_pos=place, panels=[]))
                y += 1
            x = height = 0
            for panel in row.panels:
                place = panel.grid_pos or dashboard.GridPos()
                if x + place.w > COLUMNS:
                    x, y, height = 0, y + height, 0
                place.x, place.y = x, y
                x, height = x + place.w, max(height, place.h)
                found.append(panel)
            y += height
        for number, panel_or_row in enumerate(found, start=1):
            panel_or_row.id_val = number
        return found
