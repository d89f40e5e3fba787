"""Every query of every dashboard, asked of a real Prometheus that holds the demo's stories."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest

from tests.e2e.daemon import OomwatchDaemon
from tests.e2e.prometheus import PrometheusServer, scrape_config
from tests.grafana.dashboards import ONE_NODE, UIDS, asked, filled, marks, panels, queried, targets, variables
from tests.grafana.seeded import DOWN, END, JOB, TALES, Tale

# Telling all stories is most of it, and takes minutes on a machine that does much else.
pytestmark = pytest.mark.timeout(600)

WINDOW = 6 * 3600
STEP = 180
TIMEOUT_S = 30.0


class Server:
    """Asks as Grafana's data source does, at END unless another clock is given."""

    def __init__(self, prometheus: PrometheusServer, now: Callable[[], float] = lambda: END) -> None:
        self._prometheus = prometheus
        self._now = now

    def query(self, expr: str, *, instant: bool) -> list[dict[str, Any]]:
        """The series of the answer."""
        end = self._now()
        span = {"time": str(end)} if instant else {"start": str(end - WINDOW), "end": str(end), "step": str(STEP)}
        answer = self._prometheus.api("query" if instant else "query_range", TIMEOUT_S, query=expr, **span)
        return list(answer["result"])

    def choices(self, variable: Mapping[str, Any], values: Mapping[str, str], part: str = "value") -> list[str]:
        """What a variable offers, as its values; as its texts when ``part`` says so."""
        expr, label = asked(variable)
        expr = filled(expr, values)
        if not label:
            texts = [_as_text(series["metric"]) for series in self.query(expr, instant=True)]
            pattern = re.sub(r"\(\?<", "(?P<", variable["regex"].strip("/"))
            return sorted(found[part] for text in texts if (found := re.search(pattern, text)))
        span = {"start": str(self._now() - WINDOW), "end": str(self._now())}
        return list(self._prometheus.api(f"label/{label}/values", TIMEOUT_S, **{"match[]": expr}, **span))


def _as_text(metric: Mapping[str, str]) -> str:
    """A series as Grafana writes it for a variable's regular expression: labels in the order of the answer."""
    inside = ",".join(f'{name}="{value}"' for name, value in metric.items() if name != "__name__")
    return f"{metric.get('__name__', '')}{{{inside}}} 1 0"


# Beside the engine that a story restarts another one sleeps: that one is looked at.
LOOKED_AT: Mapping[str, Tale] = {
    tale.instance: tale for tale in (*TALES.values(), replace(TALES["restart"], engine="mistral-7b", gpu=3))
}
# No GPU of the demo is sliced.
NOT_IN_THE_DEMO = {
    ("oomwatch-gpu", "oomwatch_mig_memory_held_bytes"),
    ("oomwatch-gpu", "oomwatch_mig_memory_free_bytes"),
}


@pytest.fixture(scope="module")
def server(stories: PrometheusServer) -> Server:
    return Server(stories)


def chosen(server: Server, uid: str, instance: str) -> dict[str, str]:
    """The dashboard's variables, set to the story of that node."""
    tale = LOOKED_AT.get(instance, TALES["healthy"])
    values = {"job": JOB, "instance": instance, "engine": tale.engine, "rank": ".+"}
    known = {variable["name"]: variable for variable in variables(uid)}
    if uid == "oomwatch-engine":
        values["gpu"] = "|".join(server.choices(known["gpu"], values))
    if uid == "oomwatch-gpu":
        values["gpu"] = [*server.choices(known["gpu"], values), "none"][tale.gpu]
    return values


class Answers:
    """Which queries of a dashboard have an answer, story by story, each asked once."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._found: dict[tuple[str, str], dict[tuple[str, str], int]] = {}

    def of(self, uid: str, instance: str) -> Mapping[tuple[str, str], int]:
        """Panel and letter to the number of series."""
        if (uid, instance) not in self._found:
            values = chosen(self._server, uid, instance)
            self._found[uid, instance] = {
                (panel["title"], target["refId"]): len(
                    self._server.query(filled(target["expr"], values), instant=target["instant"])
                )
                for panel in panels(uid)
                for target in panel["targets"]
            }
        return self._found[uid, instance]

    def filled_panels(self, uid: str, instance: str) -> set[str]:
        return {title for (title, _), count in self.of(uid, instance).items() if count}


@pytest.fixture(scope="module")
def answers(server: Server) -> Answers:
    return Answers(server)


def nodes() -> list[str]:
    return [tale.instance for tale in TALES.values()]


def must_be_filled(uid: str) -> set[str]:
    """The panels for which emptiness is a failure."""
    return {panel["title"] for panel in panels(uid) if "noValue" not in panel["fieldConfig"]["defaults"]}


every_board = pytest.mark.parametrize("uid", UIDS)


@every_board
def test_a_panel_without_an_empty_state_has_data_in_every_story(uid: str, answers: Answers) -> None:
    for instance in nodes():
        assert must_be_filled(uid) - answers.filled_panels(uid, instance) == set(), instance


@every_board
def test_every_query_has_data_in_some_story(uid: str, answers: Answers) -> None:
    found = [answers.of(uid, instance) for instance in nodes()]
    never = {key for key in found[0] if not any(answer[key] for answer in found)}
    expected = {
        (panel["title"], target["refId"])
        for panel in panels(uid)
        for target in panel["targets"]
        if any((uid, name) in NOT_IN_THE_DEMO for name in re.findall(r"\w+", target["expr"]))
    }
    assert never == expected


@every_board
def test_nothing_looks_calm_on_a_node_that_is_not_watched(uid: str, answers: Answers) -> None:
    """Only what Prometheus itself knows of it is shown: that it does not answer."""
    shown = {
        "oomwatch-fleet": {"Nodes", "Nodes, worst first"},
        "oomwatch-self": {"Nodes", "Each node"},
    }
    assert answers.filled_panels(uid, DOWN) == shown.get(uid, set())


def test_a_node_that_does_not_answer_is_the_worst(server: Server) -> None:
    (panel,) = (panel for panel in panels("oomwatch-fleet") if panel["title"] == "Nodes, worst first")
    everywhere = {"job": JOB, "instance": ".+"}
    found = server.query(filled(panel["targets"][0]["expr"], everywhere), instant=True)
    states = {series["metric"]["instance"]: float(series["value"][1]) for series in found}
    assert states[DOWN] == 4 == max(states.values())
    assert states["leak:18666"] == 3
    assert states["healthy:18666"] <= 1


def test_a_number_and_one_that_cannot_be_read_are_told_apart(server: Server) -> None:
    (panel,) = (panel for panel in panels("oomwatch-gpu") if panel["title"] == "Free now")
    words = panel["fieldConfig"]["defaults"]["mappings"][0]["options"]

    def shown(story: str) -> float:
        values = chosen(server, "oomwatch-gpu", f"{story}:18666")
        (found,) = server.query(filled(panel["targets"][0]["expr"], values), instant=True)
        return float(found["value"][1])

    assert shown("healthy") > 1024**3
    assert shown("lost") == -2
    assert (words["-2"]["text"], words["-1"]["text"]) == ("cannot be read", "not supported")


def test_a_fleet_is_shown_at_once(answers: Answers, server: Server) -> None:
    everywhere = {"job": JOB, "instance": ".+"}
    for uid in set(UIDS) - set(ONE_NODE):
        for target in targets(uid):
            assert server.query(filled(target.expr, everywhere), instant=target.instant), target.where


@every_board
def test_variables_offer_what_there_is(uid: str, server: Server) -> None:
    values = {"job": JOB, "instance": "healthy:18666", "engine": "llama-70b"}
    for variable in queried(uid):
        offered = server.choices(variable, values)
        if variable["name"] == "job":
            assert offered == [JOB]
        elif variable["name"] == "instance":
            assert offered == sorted(nodes())
        elif variable["name"] == "engine":
            assert offered == ["llama-70b", "mistral-7b", "qwen-7b"]
        elif variable["name"] == "rank":
            assert offered == ["0"]
        else:
            assert len(offered) == (2 if uid == "oomwatch-engine" else 4)


def test_a_gpu_is_offered_by_index_and_name(server: Server) -> None:
    (variable,) = (variable for variable in variables("oomwatch-gpu") if variable["name"] == "gpu")
    texts = server.choices(variable, {"job": JOB, "instance": "healthy:18666"}, "text")
    assert texts == [f"{index} NVIDIA L40S" for index in range(4)]


def test_restarts_sleep_pages_and_xids_are_marked(server: Server) -> None:
    def marked(uid: str, name: str, story: str, **others: str) -> int:
        (mark,) = (mark for mark in marks(uid) if mark["name"] == name)
        values = {**chosen(server, uid, f"{story}:18666"), **others}
        return len(server.query(filled(mark["expr"], values), instant=False))

    assert marked("oomwatch-engine", "Sleep", "restart")
    assert marked("oomwatch-engine", "Restarts", "restart", engine="qwen-7b")
    assert marked("oomwatch-engine", "Pages", "leak")
    assert marked("oomwatch-gpu", "Pages", "lost")
    assert marked("oomwatch-gpu", "Xid", "lost")
    for name in ("Restarts", "Sleep", "Pages"):
        assert not marked("oomwatch-engine", name, "healthy")


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, str]]:
    """A Prometheus that scrapes the demo as it runs, and the demo's instance."""
    folder = tmp_path_factory.mktemp("live")
    with OomwatchDaemon(folder, command=("demo",), arguments=("--interval", "1")) as demo:
        target = f"127.0.0.1:{demo.port}"
        with PrometheusServer(folder, scrape_config({JOB: [target]})) as prometheus:
            prometheus.wait_for("count_over_time(oomwatch_build_info[1m]) >= 3")
            yield Server(prometheus, time.time), target


@every_board
def test_what_prometheus_scrapes_from_the_demo_fills_the_dashboards(uid: str, live: tuple[Server, str]) -> None:
    server, target = live
    answers = Answers(server)
    assert must_be_filled(uid) - answers.filled_panels(uid, target) == set()
