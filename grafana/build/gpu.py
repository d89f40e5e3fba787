"""GPU: one device. Who holds what, how much is left, and is it healthy?"""

from __future__ import annotations

from grafana.build import variables
from grafana.build.annotations import annotation
from grafana.build.board import Board, Row
from grafana.build.links import from_cell, to_board
from grafana.build.look import (
    BLUE,
    GREY,
    HOLDER_COLOURS,
    LIGHT,
    NOT_READ,
    ORANGE,
    PLAIN,
    SKY,
    VERMILLION,
)
from grafana.build.panels import Column, Query, series, stat, table
from grafana.build.queries import GPU, JOB, NODE, Scope
from grafana.build.verdicts import over_time, pages, worst_by_killer

D = Scope(GPU)
N = Scope(NODE)
UNREAD = "The driver gives no number, or no data: see What has no value"


def _or_why(expr: str, reading: str) -> str:
    """-1 where the device does not support it, -2 where it could not be read."""
    absent = "oomwatch_gpu_value_absent"
    unsupported = D(absent, f'reading="{reading}"', 'reason="NOT_SUPPORTED"')
    unreadable = D(absent, f'reading="{reading}"', 'reason!="NOT_SUPPORTED"')
    return f"{expr} or -max({unsupported}) or -2 * max({unreadable})"


_now = Row(
    "",
    (
        worst_by_killer(D, "About this device, and what the engines' processes do on it. Good: clear."),
        stat(
            "Free now",
            "What a process can still have. Small is normal beside vLLM: what counts is that it does not shrink.",
            (Query(_or_why(f"max({D('oomwatch_gpu_memory_free_bytes')})", "memory"), "free"),),
            unit="bytes",
            words=NOT_READ,
            steps=((None, PLAIN),),
            width=4,
        ),
        stat(
            "Headroom floor",
            "The least that was free within the window of headroom-low. Good: near what the engines have lived with.",
            (
                Query(f"min({D('oomwatch_device_free_floor_bytes')})", "floor"),
                Query(f"min({D('oomwatch_device_free_level_bytes')})", "lived with"),
            ),
            unit="bytes",
            width=6,
            empty="Too little was seen yet, or no data",
        ),
        stat(
            "Unowned",
            "In use, and no listed process accounts for it. Good: some MiB; CUDA managed memory counts here.",
            (Query(D("oomwatch_gpu_memory_unowned_bytes"), "unowned"),),
            unit="bytes",
            steps=((None, BLUE), (1024**3, ORANGE)),
            width=4,
            empty="The driver does not say (older than 525, MIG, unified), or no data",
        ),
    ),
)

_holders = Row(
    "Who holds what",
    (
        series(
            "Memory by holder",
            "Everything on the card: together it is the total. Good: every byte has a known owner, and no band grows.",
            (
                Query(
                    f"sum by (holder_kind, holder) ({D('oomwatch_gpu_memory_held_bytes')})",
                    "{{holder_kind}} {{holder}}",
                ),
                Query(
                    f"sum by (mig, holder_kind, holder) ({D('oomwatch_mig_memory_held_bytes')})",
                    "{{mig}} {{holder_kind}} {{holder}}",
                ),
                Query(f"sum({D('oomwatch_gpu_memory_unowned_bytes')})", "no process", colour=VERMILLION),
                Query(f"sum({D('oomwatch_gpu_memory_reserved_bytes')})", "driver", colour=GREY),
                Query(f"sum({D('oomwatch_gpu_memory_free_bytes')})", "free", colour=LIGHT),
            ),
            colours=HOLDER_COLOURS,
            unit="bytes",
            stacked=True,
            lowest=0,
            height=9,
            width=14,
            empty=UNREAD,
        ),
        table(
            "Processes",
            "In the driver's compute list; names and holders of /proc and the configuration. Unknown holders: name "
            "them as neighbours, or end them.",
            (
                Column(
                    "Memory",
                    f"max by (pid, process, holder_kind, holder) ({D('oomwatch_gpu_process_memory_bytes')}"
                    f" * on (job, instance, gpu, pid) group_left (process, holder_kind, holder)"
                    f" {D('oomwatch_gpu_process_info')})",
                    "bytes",
                    width=110,
                ),
            ),
            {"holder_kind": "Kind", "holder": "Holder", "process": "Process", "pid": "Pid"},
            sort="Memory",
            order=("Memory", "Kind", "Holder", "Process", "Pid"),
            links={"Holder": (from_cell("Engine", "oomwatch-engine", kept=("instance",), engine="Holder"),)},
            widths={"Pid": 80, "Kind": 90},
            height=9,
            width=10,
            empty="No process is on this GPU, the list cannot be read, or no data",
        ),
        series(
            "Headroom",
            "Free memory, its floor, and the floor that the engines have lived with since their start (dashed). Good: "
            "the floor stays at that level.",
            (
                Query(D("oomwatch_gpu_memory_free_bytes"), "free", colour=BLUE),
                Query(f"sum by (mig) ({D('oomwatch_device_free_floor_bytes')})", "floor {{mig}}", colour=ORANGE),
                Query(
                    f"sum by (mig) ({D('oomwatch_device_free_level_bytes')})",
                    "lived with {{mig}}",
                    colour=GREY,
                    dashed=True,
                ),
                Query(f"sum by (mig) ({D('oomwatch_mig_memory_free_bytes')})", "free {{mig}}"),
            ),
            unit="bytes",
            lowest=0,
            width=14,
            empty=UNREAD,
        ),
        table(
            "Engines on this GPU",
            "What they hold, what of it is overhead, and by how much it exceeds their budget (negative: below).",
            (
                Column("Held", f"max by (engine) ({D('oomwatch_engine_device_memory_bytes')})", "bytes"),
                Column("Overhead", f"max by (engine) ({D('oomwatch_engine_device_memory_overhead_bytes')})", "bytes"),
                Column("Beyond budget", f"max by (engine) ({D('oomwatch_engine_device_overrun_bytes')})", "bytes"),
            ),
            {"engine": "Engine"},
            sort="Held",
            links={"Engine": (from_cell("Engine", "oomwatch-engine", kept=("instance",), engine="Engine"),)},
            width=10,
            empty="No engine is on this GPU, its processes are not known, or no data",
        ),
    ),
)

_verdicts = Row(
    "What is wrong, and what cannot be known",
    (
        over_time(
            D,
            "Every verdict about this device that is not clear, and the worst of all; -1 is unknown. Good: clear.",
            "verdict",
            "engine",
            width=14,
        ),
        table(
            "What has no value, and why",
            "NOT_SUPPORTED is how this device is; anything else is a fault of the driver or of the access to it.",
            (Column("Absent", f"count by (reading, reason) ({D('oomwatch_gpu_value_absent')})", width=80),),
            {"reading": "Reading", "reason": "Reason"},
            sort="Absent",
            order=("Reading", "Reason", "Absent"),
            width=10,
            empty="Everything can be read, or no data: see Last read",
        ),
    ),
)

_health = Row(
    "Health",
    (
        stat(
            "Last read",
            "Since the device's memory was last read. Good: below a minute. A device that is lost stops here.",
            (Query(f"time() - {D('oomwatch_gpu_last_seen_timestamp_seconds')}", "ago"),),
            unit="s",
            decimals=0,
            steps=((None, BLUE), (60, ORANGE), (300, VERMILLION)),
            width=4,
        ),
        stat(
            "Errors",
            "Xid errors and memory errors that ECC could not correct, in the time shown. Good: none.",
            (
                Query(f"sum(increase({D('oomwatch_gpu_xid_errors_total')}[$__range]))", "Xid", colour=VERMILLION),
                Query(
                    f"sum(increase({D('oomwatch_gpu_ecc_uncorrected_errors_total')}[$__range]))",
                    "ECC uncorrected",
                    colour=VERMILLION,
                ),
            ),
            decimals=0,
            width=7,
            empty="Not supported, or no data",
        ),
        stat(
            "Rows of memory",
            "A row that waits for a reset is mended by one; one that could not be replaced means a new card. Good: no.",
            (
                Query(
                    _or_why(f"max({D('oomwatch_gpu_row_remap_pending')})", "remapped_rows"),
                    "waits for a reset",
                    colour=ORANGE,
                ),
                Query(
                    _or_why(f"max({D('oomwatch_gpu_row_remap_failed')})", "remapped_rows"),
                    "not replaced",
                    colour=VERMILLION,
                ),
            ),
            words={**NOT_READ, 0: ("no", BLUE), 1: ("yes", VERMILLION)},
            width=7,
        ),
        stat(
            "Recovery",
            "What the driver asks for to recover the device. Good: none.",
            (Query(_or_why(f"sum({D('oomwatch_gpu_recovery_needed')})", "recovery_action"), "asked for"),),
            words={**NOT_READ, 0: ("none", BLUE), 1: ("needed", VERMILLION)},
            width=6,
        ),
        series(
            "Utilization",
            "Share of the time in which a kernel ran. No measure of memory, and none of efficiency.",
            (Query(D("oomwatch_gpu_utilization_ratio"), "utilization", colour=BLUE),),
            unit="percentunit",
            lowest=0,
            highest=1,
            width=6,
            empty=UNREAD,
        ),
        series(
            "Temperature",
            "Good: below what the card throttles at, mostly 85 to 90 °C.",
            (Query(D("oomwatch_gpu_temperature_celsius"), "temperature", colour=ORANGE),),
            unit="celsius",
            width=6,
            empty=UNREAD,
        ),
        series(
            "Power",
            "What the device draws.",
            (Query(D("oomwatch_gpu_power_watts"), "power", colour=BLUE),),
            unit="watt",
            lowest=0,
            width=6,
            empty=UNREAD,
        ),
        series(
            "Memory errors",
            "A second. Good: none; corrected ones that go on announce worse.",
            (
                Query(
                    f"rate({D('oomwatch_gpu_ecc_corrected_errors_total')}[$__rate_interval])", "corrected", colour=SKY
                ),
                Query(
                    f"rate({D('oomwatch_gpu_ecc_uncorrected_errors_total')}[$__rate_interval])",
                    "uncorrected",
                    colour=VERMILLION,
                ),
            ),
            unit="cps",
            lowest=0,
            width=6,
            empty=UNREAD,
        ),
    ),
)

BOARD = Board(
    uid="oomwatch-gpu",
    title="oomwatch / GPU",
    description="One GPU: who holds what, how much is left, is it healthy?",
    variables=(
        variables.data_source(),
        variables.job(),
        variables.node(Scope(JOB)),
        variables.gpu(N),
    ),
    rows=(_now, _holders, _verdicts, _health),
    links=(
        to_board("Fleet", "oomwatch-fleet"),
        to_board("Engine", "oomwatch-engine", "instance"),
        to_board("Self", "oomwatch-self", "instance"),
    ),
    annotations=(
        annotation(
            "Xid",
            f"increase({D('oomwatch_gpu_xid_errors_total')}[$__rate_interval]) > 0",
            "Xid {{code}}",
            VERMILLION,
        ),
        pages(D, "{{verdict}} {{engine}} pages"),
    ),
)
