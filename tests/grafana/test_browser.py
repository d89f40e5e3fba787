"""Every dashboard, in every story, drawn with Grafana's own panels: no error, nothing empty that should not be."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Error

from tests.e2e.prometheus import PrometheusServer
from tests.e2e.tools import cannot_run
from tests.grafana import view_setup
from tests.grafana.boards import BOARDS, LAPTOP, WIDE, board, show
from tests.grafana.seeded import END, TALES
from tests.grafana.viewer import Panel, Viewer, opened

# The first test also waits for the stories to be told.
pytestmark = pytest.mark.timeout(600)

# Those that are drawn at both widths.
KILLERS = ("healthy", "capacity", "fragmentation", "leak", "memory-leak", "host-leak")
# What the stories come to, as Fleet lists it.
SAID = {
    "capacity": "kv-exhaustion",
    "fragmentation": "headroom-low",
    "leak": "kv-block-leak",
    "memory-leak": "gpu-memory-leak",
    "host-leak": "host-memory-leak",
    "orphan": "orphan-memory",
    "stuck": "engine-stuck",
    "lost": "gpu-lost",
}


@pytest.fixture(scope="module")
def viewer(stories: PrometheusServer) -> Iterator[Viewer]:
    path = view_setup.built()
    if path is None:
        cannot_run("the page that draws dashboards is not built: run python -m tests.grafana.view_setup")
    with opened(path, stories.url) as viewer:
        yield viewer


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where pictures are left for people to look at."""
    folder = tmp_path_factory.getbasetemp() / "dashboards"
    folder.mkdir(exist_ok=True)
    return folder


def wrong(viewer: Viewer, dashboard: Mapping[str, Any], panels: list[Panel]) -> list[str]:
    """What is wrong with a drawn dashboard, in words; empties the list of what the browser complained of."""
    empty = {panel["title"]: panel["fieldConfig"]["defaults"].get("noValue") for panel in _data_panels(dashboard)}
    found = [f"the browser says {complaint}" for complaint in dict.fromkeys(viewer.complaints)]
    viewer.complaints.clear()
    found += [f"${name}: {error}" for name, error in viewer.variable_errors().items()]
    if viewer.overflows():
        found.append("it has to be scrolled sideways")
    for panel in panels:
        if panel.error or panel.state != "Done" or panel.badge:
            found.append(f"{panel.title}: {panel.state} {panel.error}")
        elif not panel.drawn:
            found.append(f"{panel.title}: nothing is drawn")
        elif panel.title in empty and not panel.points:
            said = empty[panel.title]
            if not said:
                found.append(f"{panel.title}: no data, which it has no words for")
            elif " ".join(said.split()) not in " ".join(panel.text.split()):
                found.append(f"{panel.title}: no data, and {panel.text!r} in place of {said!r}")
    return found


def unsaid(story: str, panels: list[Panel]) -> list[str]:
    """What Fleet should say of a story, and does not."""
    texts = {panel.title: panel.text for panel in panels}
    if story not in SAID:
        counts = texts["Verdicts"].split()
        wanted = ["page", "0", "ticket", "0"]
        return [] if counts[:4] == wanted else [f"Verdicts: {counts[:4]} where nothing is wrong"]
    wrong_here = texts["What is wrong, worst first"]
    return [] if SAID[story] in wrong_here else [f"{SAID[story]} is not in {wrong_here!r}"]


def _data_panels(dashboard: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [panel for panel in dashboard["panels"] if panel.get("targets")]


@pytest.mark.parametrize("name", BOARDS)
def test_every_panel_is_drawn_in_every_story_at_two_widths(viewer: Viewer, pictures: Path, name: str) -> None:
    dashboard = board(name)
    found: list[str] = []
    never = {panel["title"] for panel in _data_panels(dashboard)}
    for tale in TALES.values():
        panels = show(viewer, name, tale)
        for width in (LAPTOP, WIDE) if tale.story in KILLERS else (LAPTOP,):
            if width != LAPTOP:
                panels = viewer.resize(width)
            viewer.picture(pictures / f"{name}-{tale.story}-{width}.png")
            faults = wrong(viewer, dashboard, panels)
            if name == "fleet":
                faults += unsaid(tale.story, panels)
            found += [f"{tale.story} at {width}: {fault}" for fault in faults]
        never -= {panel.title for panel in panels if panel.points}
    found += [f"{title}: has data in no story" for title in sorted(never)]
    assert not found, "\n".join(["", *dict.fromkeys(found)])


@pytest.mark.parametrize("name", BOARDS)
def test_it_is_drawn_in_the_light_theme_too(viewer: Viewer, pictures: Path, name: str) -> None:
    panels = show(viewer, name, TALES["memory-leak"], theme="light")
    viewer.picture(pictures / f"{name}-memory-leak-light.png")
    assert not wrong(viewer, board(name), panels)


def test_a_fleet_of_all_nodes_is_drawn(viewer: Viewer, pictures: Path) -> None:
    panels = viewer.show(board("fleet"), begin=END - 4000, end=END, variables={}, width=WIDE)
    viewer.picture(pictures / "fleet-all.png")
    assert not wrong(viewer, board("fleet"), panels)
    (nodes,) = (panel.text.split() for panel in panels if panel.title == "Nodes")
    assert nodes == ["watched", str(len(TALES)), "not", "watched", "1"]


def test_a_picture_can_be_repeated(viewer: Viewer, tmp_path: Path) -> None:
    for number in range(2):
        show(viewer, "gpu", TALES["leak"])
        viewer.picture(tmp_path / f"{number}.png")
    assert (tmp_path / "0.png").read_bytes() == (tmp_path / "1.png").read_bytes()


class TestTheViewer:
    """What it must not let pass, shown by dashboards with one fault each."""

    def faults(self, viewer: Viewer, *, variables: list[dict[str, Any]] | None = None, **changes: Any) -> list[str]:
        panel = {
            "id": 1,
            "title": "it",
            "type": "stat",
            "gridPos": {"x": 0, "y": 0, "w": 12, "h": 5},
            "datasource": {"type": "prometheus", "uid": "prometheus"},
            "targets": [{"refId": "A", "expr": "up", "instant": True}],
            "fieldConfig": {"defaults": {}, "overrides": []},
            **changes,
        }
        dashboard = {"title": "one fault", "panels": [panel], "templating": {"list": variables or []}}
        drawn = viewer.show(dashboard, begin=END - 3600, end=END, variables={})
        return wrong(viewer, dashboard, drawn)

    def test_nothing_is_wrong_with_the_dashboard_that_the_others_change(self, viewer: Viewer) -> None:
        assert self.faults(viewer) == []

    def test_a_query_that_prometheus_refuses(self, viewer: Viewer) -> None:
        faults = self.faults(viewer, targets=[{"refId": "A", "expr": "up{"}])
        assert any(fault.startswith("it: Error") and "parse error" in fault for fault in faults)

    def test_a_query_without_data_and_without_words_for_it(self, viewer: Viewer) -> None:
        targets = [{"refId": "A", "expr": "no_such_metric"}]
        assert self.faults(viewer, targets=targets) == ["it: no data, which it has no words for"]
        for kind in ("stat", "timeseries", "table", "bargauge"):
            defaults = {"noValue": "nothing is wrong"}
            assert not self.faults(
                viewer, type=kind, targets=targets, fieldConfig={"defaults": defaults, "overrides": []}
            )

    def test_a_data_source_that_is_not_there(self, viewer: Viewer) -> None:
        faults = self.faults(viewer, datasource={"type": "prometheus", "uid": "${DS_PROMETHEUS}"})
        assert any("Datasource ${DS_PROMETHEUS} was not found" in fault for fault in faults)

    def test_a_variable_whose_query_fails(self, viewer: Viewer) -> None:
        variable = {
            "name": "job",
            "type": "query",
            "datasource": {"uid": "prometheus"},
            "query": "label_values(up{, job)",
        }
        faults = self.faults(viewer, variables=[variable])
        assert any(fault.startswith("$job: ") for fault in faults)

    @pytest.mark.parametrize(
        ("what", "changes"),
        [
            ("panel type flowchart", {"type": "flowchart"}),
            ("repeat", {"repeat": "gpu"}),
            ("another data source", {"targets": [{"refId": "A", "expr": "up", "datasource": {"uid": "other"}}]}),
        ],
    )
    def test_what_it_cannot_draw(self, viewer: Viewer, what: str, changes: dict[str, Any]) -> None:
        with pytest.raises(Error, match=f"cannot be drawn: .*{what}"):
            self.faults(viewer, **changes)
        viewer.complaints.clear()
