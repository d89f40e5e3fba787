"""Fleet: every node at a glance. Is something wrong, where, and which killer?"""

from __future__ import annotations

from grafana.build import variables
from grafana.build.board import Board, Row
from grafana.build.links import from_cell, to_board
from grafana.build.look import (
    BLUE,
    GREY,
    HOLDER_COLOURS,
    KILLER_COLOURS,
    LIGHT,
    NOT_WATCHED,
    ORANGE,
    SKY,
    STATES,
    VERMILLION,
)
from grafana.build.panels import Column, Query, bars, series, stat, table
from grafana.build.queries import JOB, NODES, SUBJECT, Scope, causes_first, of, or_zero, unsilenced, with_index
from grafana.build.verdicts import COLUMNS
from oomwatch.verdicts import KILLERS

S = Scope(NODES)
NODE = "job, instance"
ABOUT = f"{NODE}, {SUBJECT}"
STATE = unsilenced(S)
ALIVE = S("oomwatch_build_info")
_FLOORS = (
    f"(min by ({NODE}, gpu) ({S('oomwatch_device_free_floor_bytes')})"
    f" or min by ({NODE}, gpu) ({S('oomwatch_gpu_memory_free_bytes')}))"
)
RULES = "No data: load alerts/rules/oomwatch-fleet.yml into Prometheus"


# There is one for each verdict that is not clear: few, where there are tens of thousands of verdicts.
_RAISED = f"({S('oomwatch_incident_info')} unless on ({ABOUT}) {S('oomwatch_verdict_silenced')})"


def _of_raised(expr: str) -> str:
    return f"max by ({ABOUT}) ({expr} and on ({ABOUT}) {_RAISED})"


def _count(level: int) -> str:
    """Verdicts in that state, silenced ones and symptoms left out. Filtered by state first: most are clear."""
    own = f"({S('oomwatch_verdict_state')} == {level}) unless ignoring (reason) {S('oomwatch_verdict_silenced')}"
    return or_zero(f"count({own} unless ignoring (cause) {S('oomwatch_verdict_symptom')})", ALIVE)


def _by_killer(killer: str) -> str:
    """By the recording rule, which knows of no verdict that is unknown."""
    unknown = f"-max by ({NODE}) ({S('oomwatch_verdict_unknown', of(killer))})"
    return f"max by ({NODE}) ({S('instance_killer:oomwatch_verdict_state:max', of(killer))}) or {unknown}"


_now = Row(
    "",
    (
        stat(
            "Nodes",
            "Targets of Prometheus that answer, and that do not. Good: none that do not; a node that does not answer "
            "is not watched, whatever else this page says.",
            (
                Query(or_zero(f"sum({S('up')})", S("up")), "watched"),
                Query(or_zero(f"count({S('up')} == 0)", S("up")), "not watched", colour=VERMILLION),
            ),
            width=5,
        ),
        stat(
            "Verdicts",
            "Conclusions about engines, ranks, GPUs and processes by their state, symptoms of another one and planned "
            "silences left out. Good: no page and no ticket.",
            (
                Query(_count(3), "page", colour=VERMILLION),
                Query(_count(2), "ticket", colour=ORANGE),
                Query(_count(1), "info", colour=SKY),
                Query(or_zero(f"count({S('oomwatch_verdict_unknown')})", ALIVE), "unknown", colour=GREY),
            ),
            width=10,
        ),
        stat(
            "Open incidents by killer",
            "One root cause with all its symptoms is one incident. Good: 0 everywhere.",
            (Query(f"sum by (killer) ({S('oomwatch_incidents')})", "{{killer}}"),),
            width=9,
            steps=((None, BLUE), (1, ORANGE)),
        ),
    ),
)

_to_engine = from_cell("Engine", "oomwatch-engine", instance="Node", engine="Engine")
_to_gpu = from_cell("GPU", "oomwatch-gpu", instance="Node", gpu="GPU")
_to_self = from_cell("oomwatch on this node", "oomwatch-self", instance="Node")
_to_node = from_cell("Engines of this node", "oomwatch-engine", instance="Node")

_where = Row(
    "Where",
    (
        table(
            "Nodes, worst first",
            "The worst verdict of each node, by killer (made of a recording rule). Good: clear everywhere. Unknown: "
            "something that is needed to conclude is missing, or the rules are not loaded; the dashboard Engine says "
            "what.",
            (
                Column(
                    "State",
                    f"max by ({NODE}) ({STATE}) or max by ({NODE}) (({S('up')} == 0) + {NOT_WATCHED})"
                    f" or -max by ({NODE}) ({S('oomwatch_verdict_unknown')})",
                    words=STATES,
                    width=110,
                ),
                *(Column(killer, _by_killer(killer), words=STATES, width=120) for killer in KILLERS),
                Column("Unknown", f"count by ({NODE}) ({S('oomwatch_verdict_unknown')})", width=100),
                Column(
                    "Time left", f"min by ({NODE}) ({_of_raised(S('oomwatch_verdict_eta_seconds'))})", "s", decimals=0
                ),
                Column("Least headroom", f"min by ({NODE}) ({_FLOORS})", "bytes"),
                Column("Fullest pool", f"max by ({NODE}) ({S('oomwatch_engine_kv_cache_usage_ratio')})", "percentunit"),
                Column("Engines", f"count by ({NODE}) ({S('oomwatch_engine_info')})"),
                Column("GPUs", f"count by ({NODE}) ({S('oomwatch_gpu_info')})"),
            ),
            {"instance": "Node", "job": "Job"},
            sort="State",
            links={"Node": (_to_node, _to_self)},
            widths={"Node": 200, "Job": 110},
            order=(
                "State",
                "Node",
                *KILLERS,
                "Time left",
                "Least headroom",
                "Fullest pool",
                "Unknown",
                "Engines",
                "GPUs",
                "Job",
            ),
            height=8,
        ),
        table(
            "What is wrong, worst first",
            "Every verdict that is not clear. One line that says clear and nothing else: nothing is wrong. A symptom "
            "is explained by another verdict: look at that one first. A click on the engine or the GPU leads on.",
            (
                Column(
                    "State",
                    f"{_of_raised(S('oomwatch_verdict_state'))} or on () (0 * max({S('oomwatch_incidents')}))",
                    words=STATES,
                    width=110,
                ),
                Column(
                    "Since", f"{_of_raised(S('oomwatch_verdict_state_timestamp_seconds'))} * 1000", "dateTimeFromNow"
                ),
                Column("Time left", _of_raised(S("oomwatch_verdict_eta_seconds")), "s", decimals=0),
                Column("", f"max by ({ABOUT}, cause) ({S('oomwatch_verdict_symptom')})", shown=False),
                Column("order", causes_first(_of_raised(S("oomwatch_verdict_state")), S, ABOUT), shown=False),
            ),
            {"instance": "Node", "job": "Job", **COLUMNS},
            sort="order",
            links={"Engine": (_to_engine,), "GPU": (_to_gpu,)},
            widths={"Node": 180, "Verdict": 180, "Rank": 70, "Pid": 90},
            order=(
                "State",
                "Killer",
                "Verdict",
                "Node",
                "Engine",
                "Rank",
                "GPU",
                "Time left",
                "Since",
                "Symptom of",
                "MIG",
                "Pid",
                "Job",
            ),
            height=8,
        ),
    ),
)

_trends = Row(
    "Since when",
    (
        series(
            "Open incidents",
            "By killer, over all nodes. Good: flat at 0.",
            (Query(f"sum by (killer) ({S('oomwatch_incidents')})", "{{killer}}"),),
            colours=KILLER_COLOURS,
            unit="none",
            stepped=True,
            stacked=True,
            lowest=0,
            decimals=0,
        ),
        series(
            "Nodes whose worst verdict is a ticket or a page",
            "By killer. Good: flat at 0. Made of a recording rule.",
            (
                Query(
                    f"sum by (killer) ({S('instance_killer:oomwatch_verdict_state:max')} >= bool 2)",
                    "{{killer}}",
                ),
            ),
            colours=KILLER_COLOURS,
            unit="none",
            stepped=True,
            lowest=0,
            decimals=0,
            empty=RULES,
        ),
    ),
)

_left = Row(
    "How long left",
    (
        bars(
            "Least device headroom",
            "Floor of the free memory of the ten GPUs with the least; what is free now where there is no floor yet. "
            "Good: steady, whatever its size; see Engine and GPU for what each has lived with.",
            (
                Query(
                    f"bottomk(10, {with_index(_FLOORS, S)})",
                    "{{instance}} GPU {{index}}",
                ),
            ),
            unit="bytes",
        ),
        bars(
            "Fullest KV pools",
            "The ten engines whose fullest rank uses most of its KV pool. A full pool is what it is for: it is bad "
            "only where requests suffer from it.",
            (
                Query(
                    f"topk(10, max by ({NODE}, engine) ({S('oomwatch_engine_kv_cache_usage_ratio')}))",
                    "{{instance}} {{engine}}",
                ),
            ),
            unit="percentunit",
            highest=1,
        ),
        bars(
            "Most preemptions for each finished request",
            "The ten engines with most. Good: below 0.5.",
            (
                Query(
                    f"topk(10, max by ({NODE}, engine) ({S('oomwatch_engine_preemptions_per_finished')}))",
                    "{{instance}} {{engine}}",
                ),
            ),
            unit="none",
            steps=((None, BLUE), (0.5, ORANGE)),
            empty="No request has finished lately, or no data: see Nodes",
        ),
    ),
)

_load = Row(
    "Load of all engines",
    (
        series(
            "KV pools in use",
            "Share of the pool of the fullest, the median and the emptiest engine. A full one is no emergency.",
            (
                Query(f"max({S('engine:oomwatch_engine_kv_cache_usage_ratio:max')})", "fullest", colour=ORANGE),
                Query(f"quantile(0.5, {S('engine:oomwatch_engine_kv_cache_usage_ratio:max')})", "median", colour=BLUE),
                Query(f"min({S('engine:oomwatch_engine_kv_cache_usage_ratio:max')})", "emptiest", colour=GREY),
            ),
            unit="percentunit",
            width=8,
            lowest=0,
            highest=1,
            empty=RULES,
        ),
        series(
            "Tokens generated",
            "Over all engines. Good: follows the demand. A fall while requests wait is what an engine that hangs or "
            "preempts looks like.",
            (Query(f"sum({S('engine:oomwatch_engine_generation_tokens:rate5m')})", "tokens/s", colour=BLUE),),
            unit="short",
            width=8,
            lowest=0,
            empty=RULES,
        ),
        series(
            "Device memory of all GPUs",
            "Who holds it. Good: nothing held by unknown processes or by none.",
            (
                Query(f"sum by (holder_kind) ({S('oomwatch_gpu_memory_held_bytes')})", "{{holder_kind}}"),
                Query(f"sum({S('oomwatch_gpu_memory_unowned_bytes')})", "no process", colour=VERMILLION),
                Query(f"sum({S('oomwatch_gpu_memory_free_bytes')})", "free", colour=LIGHT),
            ),
            colours=HOLDER_COLOURS,
            unit="bytes",
            width=8,
            stacked=True,
            lowest=0,
        ),
    ),
)

BOARD = Board(
    uid="oomwatch-fleet",
    title="oomwatch / Fleet",
    description="All nodes, worst first: is something wrong, where, and which of the out-of-memory killers?",
    variables=(variables.data_source(), variables.job(), variables.nodes(Scope(JOB))),
    rows=(_now, _where, _trends, _left, _load),
    links=(
        to_board("Engine", "oomwatch-engine"),
        to_board("GPU", "oomwatch-gpu"),
        to_board("Self", "oomwatch-self"),
    ),
)
