"""Self: the daemon and its sources. Is what the other dashboards show worth believing?"""

from __future__ import annotations

from grafana.build import variables
from grafana.build.board import Board, Row
from grafana.build.links import to_board
from grafana.build.look import BLUE, ERROR_COLOURS, ORANGE, SKY, SOURCE_COLOURS, UP, VERMILLION
from grafana.build.panels import Column, Query, series, stat, table
from grafana.build.queries import JOB, NODES, Scope

S = Scope(NODES)
NODE = "job, instance"
NO_DRIVER = "No GPU is read on these nodes (nvml.enabled, or the demo), or no data: see Nodes"
NOT_KEPT = "Nothing is kept (history.enabled is false, or the demo), or no data: see Nodes"

_now = Row(
    "",
    (
        stat(
            "Nodes",
            "Targets of Prometheus that answer, and that do not. Good: none that do not.",
            (
                Query(f"sum({S('up')})", "answer"),
                Query(f"count({S('up')} == 0) or 0 * count({S('up')})", "do not answer", colour=VERMILLION),
            ),
            width=6,
        ),
        stat(
            "Oldest snapshot",
            "Age of the oldest page that is served. Good: below a minute; the daemon makes one every 15 s at least.",
            (Query(f"max(time() - {S('oomwatch_snapshot_timestamp_seconds')})", "age"),),
            unit="s",
            decimals=0,
            steps=((None, BLUE), (60, ORANGE), (180, VERMILLION)),
        ),
        stat(
            "Sources that fail",
            "A source for one target that failed or fell silent. Good: none. What hangs on it is unknown meanwhile.",
            (
                Query(
                    f"count({S('oomwatch_source_up')} == 0) or 0 * count({S('oomwatch_source_up')})",
                    "fail",
                    colour=ORANGE,
                ),
            ),
        ),
        stat(
            "Configuration",
            "Whether the last reload succeeded everywhere. Good: yes; else an older one is in use.",
            (Query(f"min({S('oomwatch_config_last_reload_successful')})", "in use"),),
            words={0: ("an older one", VERMILLION), 1: ("in use", BLUE)},
        ),
        stat(
            "Defects",
            "Observations or snapshots that oomwatch itself could not handle, in the time shown. Good: none; report "
            "them.",
            (Query(f"sum(increase({S('oomwatch_internal_errors_total')}[$__range]))", "defects", colour=VERMILLION),),
            decimals=0,
            width=6,
            empty="No data in the time shown",
        ),
    ),
)

_daemons = Row(
    "Daemons",
    (
        table(
            "Each node",
            "Version, age of the page, cost. Good: one version, ages below a minute.",
            (
                Column("Answers", f"max by ({NODE}) ({S('up')})", words=UP, width=90),
                Column(
                    "Page age",
                    f"max by ({NODE}) (time() - {S('oomwatch_snapshot_timestamp_seconds')})",
                    "s",
                    decimals=0,
                ),
                Column("Sources down", f"count by ({NODE}) ({S('oomwatch_source_up')} == 0)"),
                Column("Memory", f"max by ({NODE}) ({S('process_resident_memory_bytes')})", "bytes"),
                Column("Runs since", f"max by ({NODE}) ({S('process_start_time_seconds')}) * 1000", "dateTimeFromNow"),
                Column("", f"max by ({NODE}, version) ({S('oomwatch_build_info')})", shown=False),
            ),
            {"instance": "Node", "job": "Job", "version": "Version"},
            sort="Page age",
            order=("Node", "Answers", "Page age", "Sources down", "Memory", "Runs since", "Version", "Job"),
            widths={"Node": 200},
        ),
    ),
)

_sources = Row(
    "Sources",
    (
        table(
            "Sources, worst first",
            "Each source and target: whether the last run succeeded, since when not, how long it takes. Good: yes, and "
            "far below its interval.",
            (
                Column(
                    "Fails",
                    f"max by ({NODE}, source, target) (1 - {S('oomwatch_source_up')})",
                    words={0: ("no", BLUE), 1: ("yes", VERMILLION)},
                    width=80,
                ),
                Column(
                    "Last success",
                    f"max by ({NODE}, source, target) ({S('oomwatch_source_last_success_timestamp_seconds')}) * 1000",
                    "dateTimeFromNow",
                ),
                Column("Took", f"max by ({NODE}, source, target) ({S('oomwatch_source_duration_seconds')})", "s"),
                Column(
                    "Failures in 1 h",
                    f"sum by ({NODE}, source, target) (increase({S('oomwatch_source_failures_total')}[1h]))",
                    decimals=0,
                ),
            ),
            {"source": "Source", "target": "Target", "instance": "Node", "job": "Job"},
            sort="Fails",
            order=("Fails", "Source", "Target", "Node", "Last success", "Took", "Failures in 1 h", "Job"),
            width=24,
            height=9,
        ),
        series(
            "Failed runs",
            "A second, by source. Good: none.",
            (Query(f"sum by (source) (rate({S('oomwatch_source_failures_total')}[$__rate_interval]))", "{{source}}"),),
            colours=SOURCE_COLOURS,
            unit="cps",
            lowest=0,
            width=12,
        ),
        series(
            "Longest run",
            "By source. Good: far below the source's interval.",
            (Query(f"max by (source) ({S('oomwatch_source_duration_seconds')})", "{{source}}"),),
            colours=SOURCE_COLOURS,
            unit="s",
            lowest=0,
            width=12,
            empty="No source has run lately, or no data: see Nodes",
        ),
    ),
)

_driver = Row(
    "NVIDIA driver",
    (
        stat(
            "Driver library",
            "How many nodes are in which state. Good: ok everywhere.",
            (Query(f"sum by (state) ({S('oomwatch_nvml_state')}) > 0", "{{state}}"),),
            names={"ok": BLUE},
            steps=((None, VERMILLION),),
            width=6,
            height=7,
            empty=NO_DRIVER,
        ),
        series(
            "Calls into the driver",
            "A second, over all nodes. Good: steady.",
            (Query(f"sum(rate({S('oomwatch_nvml_calls_total')}[$__rate_interval]))", "calls", colour=BLUE),),
            unit="ops",
            lowest=0,
            width=6,
            height=7,
            empty=NO_DRIVER,
        ),
        series(
            "Time of a call",
            "The mean, by function: the slowest five. Good: milliseconds; seconds mean a driver that hangs.",
            (
                Query(
                    f"topk(5, sum by (call) (rate({S('oomwatch_nvml_seconds_total')}[$__rate_interval]))"
                    f" / sum by (call) (rate({S('oomwatch_nvml_calls_total')}[$__rate_interval])))",
                    "{{call}}",
                ),
            ),
            unit="s",
            lowest=0,
            width=6,
            height=7,
            empty=NO_DRIVER,
        ),
        series(
            "Errors of the driver",
            "A second, by NVML's name. NOT_SUPPORTED is no fault; GPU_IS_LOST and TIMEOUT are.",
            (Query(f"sum by (error) (rate({S('oomwatch_nvml_errors_total')}[$__rate_interval])) > 0", "{{error}}"),),
            colours=ERROR_COLOURS,
            unit="cps",
            lowest=0,
            width=6,
            height=7,
            empty="No error, no GPU is read, or no data: see Calls into the driver",
        ),
    ),
)

_cost = Row(
    "Cost of oomwatch",
    (
        series(
            "Processor time",
            "Cores of the busiest daemon and their mean. Good: below 0.05.",
            (
                Query(f"max(rate({S('process_cpu_seconds_total')}[$__rate_interval]))", "busiest", colour=ORANGE),
                Query(f"avg(rate({S('process_cpu_seconds_total')}[$__rate_interval]))", "mean", colour=BLUE),
            ),
            unit="none",
            lowest=0,
            width=8,
        ),
        series(
            "Memory",
            "Resident, of the largest daemon and their mean. Good: steady, below 150 MiB.",
            (
                Query(f"max({S('process_resident_memory_bytes')})", "largest", colour=ORANGE),
                Query(f"avg({S('process_resident_memory_bytes')})", "mean", colour=BLUE),
            ),
            unit="bytes",
            lowest=0,
            width=8,
        ),
        series(
            "Scrapes by Prometheus",
            "How long the slowest takes. Good: below 0.1 s: a scrape reads a finished page.",
            (Query(f"max({S('scrape_duration_seconds')})", "slowest", colour=BLUE),),
            unit="s",
            lowest=0,
            width=8,
        ),
    ),
)

_kept = Row(
    "What is kept on disk, and what is sent",
    (
        stat(
            "Database",
            "Whether it is written everywhere. Good: yes; else memory alone keeps what is observed.",
            (Query(f"min({S('oomwatch_history_up')})", "written"),),
            words=UP,
            width=4,
            height=7,
            empty=NOT_KEPT,
        ),
        series(
            "Size of the databases",
            "The largest. Good: below its limit (history.max_bytes).",
            (Query(f"max({S('oomwatch_history_size_bytes')})", "largest", colour=BLUE),),
            unit="bytes",
            lowest=0,
            width=6,
            height=7,
            empty=NOT_KEPT,
        ),
        series(
            "Writes",
            "Failed ones and observations lost, a second. Good: none.",
            (
                Query(
                    f"sum(rate({S('oomwatch_history_write_failures_total')}[$__rate_interval]))",
                    "failed writes",
                    colour=ORANGE,
                ),
                Query(
                    f"sum(rate({S('oomwatch_history_lost_observations_total')}[$__rate_interval]))",
                    "lost observations",
                    colour=VERMILLION,
                ),
            ),
            unit="cps",
            lowest=0,
            width=6,
            height=7,
            empty=NOT_KEPT,
        ),
        series(
            "Notifications",
            "Accepted, refused and waiting, by target. Good: none refused and none waiting.",
            (
                Query(
                    f"sum by (target) (rate({S('oomwatch_notifications_total')}[$__rate_interval]))",
                    "{{target}} accepted a second",
                    colour=BLUE,
                ),
                Query(
                    f"sum by (target) (rate({S('oomwatch_notification_failures_total')}[$__rate_interval]))",
                    "{{target}} refused a second",
                    colour=VERMILLION,
                ),
                Query(f"sum by (target) ({S('oomwatch_notifications_waiting')})", "{{target}} waiting", colour=SKY),
            ),
            unit="none",
            lowest=0,
            width=8,
            height=7,
            empty="alerting names no target, or no data: see Nodes",
        ),
    ),
)

BOARD = Board(
    uid="oomwatch-self",
    title="oomwatch / Self",
    description="The daemons and their sources: is what the other dashboards show worth believing?",
    variables=(variables.data_source(), variables.job(), variables.nodes(Scope(JOB))),
    rows=(_now, _daemons, _sources, _driver, _cost, _kept),
    links=(
        to_board("Fleet", "oomwatch-fleet"),
        to_board("Engine", "oomwatch-engine"),
        to_board("GPU", "oomwatch-gpu"),
    ),
)
