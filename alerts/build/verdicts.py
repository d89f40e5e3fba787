"""Rules on the daemon's verdicts: each incident is one alert, named after its cause, as urgent as its worst verdict."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from alerts.build.links import Links
from alerts.build.model import Alert, Group, Recording, RuleFile
from oomwatch.advice import advice
from oomwatch.detectors.base import LEVEL, Finding, State
from oomwatch.families import VERDICT_LABELS
from oomwatch.incidents import TABLE
from oomwatch.verdicts import CATALOGUE, Entry

INTERVAL = "15s"
TWO_EVALUATIONS = "30s"
# A page goes on for two evaluations longer than its ticket. If both ended at once, Alertmanager could hear of the end
# of the page first, and would send the ticket that it no longer holds back.
KEEP: Mapping[State, str] = {"page": "5m30s", "ticket": "5m"}

SEVERITIES: tuple[tuple[State, str], ...] = (("page", "critical"), ("ticket", "warning"))

MEMBERS = "incident_verdict:oomwatch_verdict_state:unsilenced"
CAUSES = "incident_cause:oomwatch_incident_info:max"
INCIDENTS = "incident:oomwatch_verdict_state:max"
WORST = "incident_subject:oomwatch_verdict_state:topk"

_SUBJECT = ", ".join(VERDICT_LABELS)


def worst_of_incident(entry: Entry) -> State:
    """The worst that an incident with this cause can be: a cause that is a ticket may have symptoms that page."""
    reached = {entry.name}
    while True:
        more = {
            symptom
            for rule in TABLE
            if rule.cause in reached
            for symptom in (rule.symptoms or CATALOGUE)
            if symptom not in reached
        }
        if not more:
            break
        reached |= more
    return max((CATALOGUE[name].worst for name in reached), key=lambda state: LEVEL[state])


def verdict_rules(links: Links) -> RuleFile:
    return RuleFile(
        "oomwatch-verdicts.yml",
        "Alerts on what oomwatch concludes. One incident is one alert, whatever the number of its ranks, GPUs and "
        "symptoms: it is named after its cause, and its severity is that of the worst verdict in it that no planned "
        "silence holds back.\n"
        "How long something must last before it counts is the daemon's affair (detection.thresholds in its "
        "configuration); here nothing waits longer than two evaluations.",
        (Group("oomwatch-verdicts", INTERVAL, (*_recordings(), *_alerts(links))),),
    )


def _recordings() -> Iterator[Recording]:
    yield Recording(
        MEMBERS,
        """
        oomwatch_incident_info
          * ignoring (incident) group_left ()
        (oomwatch_verdict_state unless ignoring (reason) oomwatch_verdict_silenced)
        """,
        "Every verdict of an incident that no planned silence holds back.",
    )
    yield Recording(
        CAUSES,
        f"""
        max without (engine, rank, gpu, mig, pid) (
          (oomwatch_incident_info unless ignoring (incident, cause) oomwatch_verdict_symptom)
            or
          (
            oomwatch_incident_info
              unless ignoring ({_SUBJECT})
            (oomwatch_incident_info unless ignoring (incident, cause) oomwatch_verdict_symptom)
          )
        )
        """,
        "The cause of each incident: the verdict in it that is no symptom. An incident in which each is a symptom of "
        "another has all of them as causes, so that it alerts.",
    )
    yield Recording(
        INCIDENTS,
        f"""
        max without (number, owner) (
          label_replace(
          label_replace(
          label_replace(
          label_replace(
          label_join(
          label_replace(
          label_replace(
            {CAUSES}
              * ignoring (verdict, killer) group_left ()
            max without ({_SUBJECT}) ({MEMBERS}),
          "number", "$1", "incident", ".+/([0-9]+)"),
          "owner", "$1", "incident", "(.+)/[0-9]+"),
          "incident", "/", "owner", "verdict"),
          "engine", "$1", "owner", "(.+)"),
          "engine", "", "owner", "(GPU-|MIG-).*|node"),
          "gpu", "$1", "owner", "(GPU-.*)"),
          "mig", "$1", "owner", "(MIG-.*)")
        )
        """,
        "The worst state in each incident. incident becomes OWNER/CAUSE, with the engine, device or node that it is "
        "about as the owner: the same for one trouble however often the daemon numbers it anew.",
    )
    yield Recording(
        WORST,
        f"""
        topk without (engine, rank, gpu, mig, pid) (1,
          label_join(
          label_replace(
          label_replace(
            (oomwatch_incident_info * ignoring (incident) group_left () oomwatch_verdict_state)
              and ignoring (engine, rank, gpu, mig, pid)
            {CAUSES},
          "number", "$1", "incident", ".+/([0-9]+)"),
          "owner", "$1", "incident", "(.+)/[0-9]+"),
          "incident", "/", "owner", "verdict")
        )
        """,
        "Of each incident's cause, the rank, device or process that is worst off: its numbers are the evidence.",
    )


def _alerts(links: Links) -> Iterator[Alert]:
    for entry in CATALOGUE.values():
        worst = worst_of_incident(entry)
        for state, severity in SEVERITIES:
            if LEVEL[state] <= LEVEL[worst]:
                yield _alert(entry, state, severity, links)


def _alert(entry: Entry, state: State, severity: str, links: Links) -> Alert:
    return Alert(
        alert=entry.alert,
        # A ticket stays while it pages, so that it need not come again; Alertmanager holds it back meanwhile.
        expr=f'{INCIDENTS}{{verdict="{entry.name}"}} >= {LEVEL[state]}',
        wait=TWO_EVALUATIONS,
        keep=KEEP[state],
        severity=severity,
        annotations={
            "summary": f"{_SELECT}{_WHO} on {{{{ $labels.instance }}}}: {entry.says}{_TIME_LEFT_SHORT}",
            "description": _description(entry, state),
            "action": _first_action(entry, state),
            "runbook_url": links.runbook(entry.alert),
            "dashboard": _dashboard(links),
            "page": links.page,
        },
    )


def _first_action(entry: Entry, state: State) -> str:
    """What the daemon advises first where it knows nothing of the case; for the case itself, its page does."""
    own = state if LEVEL[state] <= LEVEL[entry.worst] else entry.worst
    return advice(entry.name, Finding(own), None)[0]


def _dashboard(links: Links) -> str:
    """That of the engine, device or node that the incident is about; slices are shown with the GPUs of their node."""
    engine = links.dashboard("oomwatch-engine", instance="instance", engine="engine")
    gpu = links.dashboard("oomwatch-gpu", instance="instance", gpu="gpu")
    mig = links.dashboard("oomwatch-gpu", instance="instance")
    node = links.dashboard("oomwatch-self", instance="instance")
    return (
        f"{{{{ if $labels.engine }}}}{engine}{{{{ else if $labels.gpu }}}}{gpu}"
        f"{{{{ else if $labels.mig }}}}{mig}{{{{ else }}}}{node}{{{{ end }}}}"
    )


# --- templates ---------------------------------------------------------------------------------------------------

_WHO = (
    "{{ if $labels.engine }}Engine {{ $labels.engine }}{{ else if $labels.mig }}MIG slice {{ $labels.mig }}"
    "{{ else if $labels.gpu }}GPU {{ $labels.gpu }}{{ else }}The node{{ end }}"
)

_SELECT = (
    f"{{{{ $worst := printf `{WORST}{{instance=%q,job=%q,cluster=%q,incident=%q}}` "
    "$labels.instance $labels.job $labels.cluster $labels.incident }}"
)


def _each(series: str, text: str, more: str = "", order: str = "") -> str:
    """``text`` for each sample of a series of the verdict that the alert is named after."""
    sort = f" | sortByLabel `{order}`" if order else ""
    query = f"printf `{series} and ignoring ({more}incident, number, owner) %s` $worst | query{sort}"
    return f"{{{{ range {query} }}}}{text}{{{{ end }}}}"


_TIME_LEFT_SHORT = _each(
    "oomwatch_verdict_eta_seconds",
    "{{ if and (gt .Value 0.0) (lt .Value 1e9) }}, about {{ humanizeDuration .Value }} left{{ end }}",
)

_VALUE = (
    "{{ if match `_bytes(_per_hour)?$` .Labels.key }}{{ humanize1024 .Value }}B"
    "{{ else if match `^(first|last)_(seen|death|failure)$|_since$` .Labels.key }}{{ toTime .Value }}"
    "{{ else if match `_seconds$` .Labels.key }}{{ humanizeDuration .Value }}"
    "{{ else if match `(_ratio|_of_usual|_share|usage)$` .Labels.key }}{{ humanizePercentage .Value }}"
    "{{ else }}{{ humanize .Value }}{{ end }}"
)


_SEEN = (
    f"{{{{ range printf `{MEMBERS} and on (cluster, job, instance, incident) "
    'label_join(%s, "incident", "/", "owner", "number")` $worst | query | sortByLabel `verdict` }}'
    " {{ .Labels.verdict }}"
    "{{ if .Labels.rank }} of rank {{ .Labels.rank }}{{ end }}"
    "{{ if .Labels.gpu }} on {{ .Labels.gpu }}{{ end }}"
    "{{ if ge .Value 3.0 }} (page){{ else if ge .Value 2.0 }} (ticket){{ else }} (info){{ end }};{{ end }}"
)


def _description(entry: Entry, state: State) -> str:
    lines = [
        f"{_SELECT}{_WHO} on {{{{ $labels.instance }}}}: {entry.says}.",
        "{{ range query $worst }}About"
        "{{ if .Labels.engine }} engine {{ .Labels.engine }}{{ end }}"
        "{{ if .Labels.rank }} rank {{ .Labels.rank }}{{ end }}"
        "{{ if .Labels.pid }} process {{ .Labels.pid }}{{ end }}"
        "{{ if .Labels.gpu }} GPU {{ .Labels.gpu }}{{ end }}"
        "{{ if .Labels.mig }} slice {{ .Labels.mig }}{{ end }}.{{ end }}"
        + _each("oomwatch_verdict_confidence_ratio", " Sure by {{ humanizePercentage .Value }}.")
        + _each("oomwatch_verdict_eta_seconds", " Time left at the present pace: about {{ humanizeDuration .Value }}")
        + _each("oomwatch_verdict_eta_low_seconds", ", at least {{ humanizeDuration .Value }}")
        + _each("oomwatch_verdict_eta_high_seconds", ", at most {{ humanizeDuration .Value }}"),
        f"Numbers:{_each('oomwatch_verdict_evidence', f' {{{{ .Labels.key }}}} {_VALUE};', 'key, ', 'key')}",
        f"Seen in it:{_SEEN}",
        f"First: {_first_action(entry, state)}",
    ]
    return "\n".join(lines)
