"""Rules on the watchers themselves: what is not seen raises no alarm, so somebody must be told that it is not seen."""

from __future__ import annotations

from collections.abc import Iterator

from alerts.build.fleet import LABELS
from alerts.build.links import Links
from alerts.build.model import Alert, Group, RuleFile
from oomwatch.families import VERDICT_LABELS

INTERVAL = "30s"

_BUILD = "oomwatch_build_info"
_BUILD_LABELS = ", ".join(LABELS[_BUILD])


def meta_rules(links: Links) -> RuleFile:
    return RuleFile(
        "oomwatch-meta.yml",
        "Alerts on oomwatch itself, for each Prometheus that scrapes it. What the daemon sees of its own sources it "
        "tells by verdicts: OomwatchSourceStale, OomwatchMetricsMissing, OomwatchGpuLost and OomwatchNvmlStuck are in "
        "oomwatch-verdicts.yml.",
        (Group("oomwatch-meta", INTERVAL, tuple(_alerts(links))),),
    )


def _alerts(links: Links) -> Iterator[Alert]:
    yield _alert(
        links,
        "OomwatchDown",
        f"""
        up{{job=~".*oomwatch.*"}} == 0
          or
        (up == 0 and ignoring ({_BUILD_LABELS}) last_over_time({_BUILD}[1d]))
        """,
        "critical",
        "5m",
        summary="oomwatch on {{ $labels.instance }} does not answer: its node is not watched",
        description="Prometheus could not scrape {{ $labels.instance }} (job {{ $labels.job }}) for 5 minutes. "
        "No leak, stuck engine or lost GPU on that node would be told. Engines may well be fine.",
        action="On the node run: systemctl status oomwatch (or look at its container), and read the end of its log.",
        comment="A target counts as oomwatch's by the name of its job, or because it was oomwatch within the last day.",
    )
    yield _alert(
        links,
        "OomwatchMetricsAbsent",
        f"""
        count by (cluster, job) (last_over_time({_BUILD}[1d]))
          unless
        count by (cluster, job) (up)
        """,
        "critical",
        "10m",
        summary="Prometheus has no target of job {{ $labels.job }} any more: no node of it is watched",
        description="{{ $value }} daemons were scraped within the last day, and now the job has no target at all: "
        "it was renamed, its service discovery finds nothing, or it was taken out of the configuration.",
        action="Look at Prometheus' page of targets, and at what changed in its scrape configuration.",
        comment="OomwatchDown cannot see a target that is no longer one. Quiet where oomwatch was never scraped.",
        about="job",
    )
    devices, engines = (", ".join(LABELS[name]) for name in ("oomwatch_gpu_info", "oomwatch_engine_info"))
    yield _alert(
        links,
        "OomwatchVerdictsAbsent",
        f"""
        (
          oomwatch_snapshot_timestamp_seconds
            and
          (
            max without ({devices}) (oomwatch_gpu_info)
              or
            max without ({engines}) (oomwatch_engine_info)
          )
        )
          unless
        max without ({", ".join(VERDICT_LABELS)}) (oomwatch_verdict_state_timestamp_seconds)
        """,
        "warning",
        "10m",
        summary="oomwatch on {{ $labels.instance }} sees engines or GPUs and concludes nothing",
        description="The page of {{ $labels.instance }} has GPUs or engines on it, and for 10 minutes no verdict at "
        "all, not even an unknown one. The alerts on verdicts cannot fire for this node.",
        action="Look at the daemon's page and log; check that your scrape configuration drops no oomwatch_verdict_*.",
        comment="Most often metric_relabel_configs that drop what the other rules need.",
    )
    yield _alert(
        links,
        "OomwatchIncidentsAbsent",
        "max without (killer, engine, rank, gpu, mig, pid) (oomwatch_verdict_state >= 2 "
        "unless ignoring (incident) oomwatch_incident_info)",
        "warning",
        "5m",
        summary="{{ $labels.verdict }} on {{ $labels.instance }} belongs to no incident, so no alert tells of it",
        description="oomwatch concludes {{ $labels.verdict }} (state {{ $value }}: 2 is ticket, 3 page), and the "
        "series oomwatch_incident_info that the alerts are made from is missing for it.",
        action="Look at the daemon's page for the verdict itself, and check that nothing drops oomwatch_incident_info.",
        comment="The other rules see verdicts by their incidents alone.",
    )
    yield _alert(
        links,
        "OomwatchSnapshotOld",
        "time() - oomwatch_snapshot_timestamp_seconds > 300",
        "warning",
        "1m",
        summary="oomwatch on {{ $labels.instance }} answers with a page that is {{ humanizeDuration $value }} old",
        description="The daemon serves its page and has taken up nothing new for {{ humanizeDuration $value }}: "
        "its verdicts are of that time. Or the clocks of the node and of Prometheus differ.",
        action="Compare the clocks (date on both); if they agree, save oomwatch's log and restart it.",
    )
    yield _alert(
        links,
        "OomwatchNotificationsWaiting",
        "oomwatch_notifications_waiting > 0",
        "warning",
        "15m",
        summary="oomwatch on {{ $labels.instance }} cannot tell {{ $labels.target }} of its alerts",
        description="For 15 minutes {{ $labels.target }} has not accepted all that oomwatch tells it directly: "
        "{{ $value }} alerts or ends of alerts wait. Who relies on direct mode hears of no leak and no stuck engine.",
        action="Read oomwatch's log for why it is not accepted; then run oomwatch alerts test on the node.",
        comment="Direct mode tries again after a minute at most, so what waits for long is no short absence.",
    )
    yield _alert(
        links,
        "OomwatchProbeSilent",
        'oomwatch_source_up{source="allocator"} == 0',
        "warning",
        "15m",
        summary="oomwatch-probe tells nothing to oomwatch on {{ $labels.instance }} ({{ $labels.target }})",
        description="For 15 minutes the files of oomwatch-probe in {{ $labels.target }} (an engine, or the folder of "
        "the files) were not written or could not be read: fragmentation of its memory cannot be seen.",
        action="Look at the daemon's page, under where it all comes from, for what is wrong with the files.",
        comment="An engine without a probe has no such series, and one that ended loses it.",
    )
    yield _alert(
        links,
        "OomwatchLogUnreadable",
        'oomwatch_source_up{source="log"} == 0',
        "warning",
        "15m",
        summary="oomwatch on {{ $labels.instance }} cannot read the log of {{ $labels.target }}",
        description="For 15 minutes the log of {{ $labels.target }} could not be read, though it is configured or its "
        "processes show where it is. A start that is refused and a shortage of memory are told there alone.",
        action="Look at the daemon's page, under where it all comes from, for why it cannot be read.",
        comment="An engine whose log nobody knows of has no such series, and one that ended loses it.",
    )
    yield _alert(
        links,
        "OomwatchHostUnreadable",
        'oomwatch_source_up{source=~"host|discovery"} == 0',
        "warning",
        "15m",
        summary="oomwatch on {{ $labels.instance }} cannot read its host's processes ({{ $labels.source }})",
        description="For 15 minutes oomwatch could not read /proc ({{ $labels.source }}): new engines are not found, "
        "growth of host memory is not seen, and it is not known whose the memory of the GPUs is.",
        action="Look at the daemon's page, under where it all comes from, for why /proc cannot be read.",
        comment="An engine that is configured is watched on, and so is each GPU.",
    )
    yield _alert(
        links,
        "OomwatchHistoryNotWritten",
        "oomwatch_history_up == 0",
        "warning",
        "15m",
        summary="oomwatch on {{ $labels.instance }} cannot write to its disk: a restart would forget what it learnt",
        description="For 15 minutes memory alone keeps what is observed. Nothing else changes until oomwatch is "
        "restarted: then slow leaks are sought anew, and the hours before cannot be replayed.",
        action="On the node look for a full or read-only disk under oomwatch's folder (df, mount), and read its log.",
        comment="The daemon tries again by itself. It has no such series where nothing is to be kept.",
    )
    yield _alert(
        links,
        "OomwatchInternalErrors",
        "increase(oomwatch_internal_errors_total[15m]) > 0",
        "warning",
        "1m",
        summary="oomwatch on {{ $labels.instance }} has a defect: it could not take up all that it observed",
        description="Within 15 minutes oomwatch failed inside: some of what it observed was left out, or its page was "
        "empty for a moment. Verdicts may be late, and some may be missing.",
        action="Save oomwatch's log of the last hour, which has the traceback, and report it with its version.",
        comment="What is left out is told nowhere else. A snapshot that cannot be built is no old one: it is empty.",
    )
    yield _alert(
        links,
        "OomwatchConfigReloadFailed",
        "oomwatch_config_last_reload_successful == 0",
        "warning",
        "5m",
        summary="oomwatch on {{ $labels.instance }} still runs with its older configuration: the new one is not valid",
        description="The last reload failed, and the configuration before it stays in use. A restart would fail.",
        action="Run oomwatch config check with the configuration's path: it names each line that is wrong.",
    )


def _alert(
    links: Links,
    name: str,
    expr: str,
    severity: str,
    wait: str,
    *,
    summary: str,
    description: str,
    action: str,
    comment: str = "",
    about: str = "instance",
) -> Alert:
    return Alert(
        alert=name,
        expr=expr,
        severity=severity,
        wait=wait,
        labels={"killer": "health"},
        annotations={
            "summary": summary,
            "description": f"{description}\nFirst: {action}",
            "action": action,
            "runbook_url": links.runbook(name),
            "dashboard": links.dashboard("oomwatch-self", **{about: about}),
        },
        comment=comment,
    )
