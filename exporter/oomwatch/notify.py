"""Direct mode: what holds is told to Alertmanagers and webhooks by the daemon itself.

No queue of events is kept. Each target's thread compares what holds now, read from the snapshot, with what the target
has accepted, and tells the difference; what a target missed while it was away is told when it is back, if it still
holds. Nothing here is ever waited for by anything else.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from urllib.parse import quote, urlencode, urlsplit

import structlog

from oomwatch.alerts import alert_labels
from oomwatch.conclusions import (
    Incident,
    Plain,
    confidence_text,
    evidence_text,
    incidents,
    statement,
    subject_text,
    time_left,
    verdict_plain,
)
from oomwatch.config import DEFAULT_PORT, AlertingConfig, Config, WebhookConfig, split_address
from oomwatch.detectors.base import LEVEL
from oomwatch.logs import Defects, Repeats
from oomwatch.settings import read_secret
from oomwatch.snapshot import Snapshot
from oomwatch.sources.vllm.transport import Fetcher, FetchError, Location, ScrapeOptions
from oomwatch.status import device_labels
from oomwatch.verdicts import CATALOGUE

_log = structlog.get_logger(__name__)

_LOOK_SECONDS = 1.0
_FIRST_PAUSE = 1.0
_LONGEST_PAUSE = 60.0
_FORGOTTEN_AFTER = 4  # times resend; as Prometheus has it
_MOST_ALERTS = 1000  # in one post, the worst first
_KEEP_ENDED = 86400.0  # how long a webhook that is away is owed the end of an incident
_OLD_SNAPSHOT = 300.0
_ANSWER_BYTES = 1 << 20

TEST_ALERT = "OomwatchTest"

# The dashboard for what an alert is about; slices are shown with the GPUs of their node.
_BOARDS = {"engine": "engine", "gpu": "gpu", "mig": "gpu"}

Key = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Alert:
    """What Alertmanager is told. ``since`` is unix time; ``verdicts`` is what webhooks get on top."""

    labels: Mapping[str, str]
    annotations: Mapping[str, str]
    since: float
    verdicts: tuple[Plain, ...] = ()

    @property
    def key(self) -> Key:
        return tuple(sorted(self.labels.items()))

    @property
    def group(self) -> Key:
        """What stays the same when the severity changes."""
        return tuple(sorted((name, value) for name, value in self.labels.items() if name != "severity"))

    @property
    def severity(self) -> str:
        return self.labels["severity"]


@dataclass(frozen=True)
class Place:
    """Where this daemon is: the labels that say so, and the bases of links, empty where there is none."""

    labels: Mapping[str, str]
    page: str
    runbooks: str = ""
    grafana: str = ""

    @classmethod
    def of(cls, config: Config) -> Place:
        alerting = config.alerting
        port = (split_address(config.web.listen_address[0]) or ("", DEFAULT_PORT))[1]
        here = f"{socket.gethostname()}:{port}"
        return cls(
            {"instance": here, "job": "oomwatch", **alerting.labels},
            f"{(alerting.external_url or f'http://{here}').rstrip('/')}/",
            (alerting.runbooks or "").rstrip("/"),
            (alerting.grafana or "").rstrip("/"),
        )

    @property
    def name(self) -> str:
        return self.labels.get("instance") or self.labels.get("node") or socket.gethostname()

    def links(self, labels: Mapping[str, str]) -> dict[str, str]:
        """The annotations with links, under the names that the rules give them."""
        found = {"page": self.page}
        if self.runbooks:
            found["runbook_url"] = f"{self.runbooks}/{labels['alertname']}.md"
        if self.grafana:
            board = next((board for name, board in _BOARDS.items() if name in labels), "self")
            variables = {f"var-{name}": labels[name] for name in ("instance", "engine", "gpu") if name in labels}
            found["dashboard"] = f"{self.grafana}/d/oomwatch-{board}?{urlencode(variables, quote_via=quote)}"
        return found


# --- from incidents to alerts --------------------------------------------------------------------------------------


def alerts_of(snapshot: Snapshot, place: Place, now: float) -> tuple[Alert, ...]:
    """What holds now. An incident that pages is two alerts, as by the rules: the ticket stays when the page ends."""
    found: list[Alert] = []
    devices = device_labels(snapshot)
    for incident in incidents(snapshot.verdicts):
        if incident.severity == "info":
            continue
        labels = alert_labels(incident, place.labels)
        alert = Alert(
            labels,
            {**_annotations(incident, devices, place), **place.links(labels)},
            incident.since,
            tuple(verdict_plain(verdict) for verdict in incident.verdicts),
        )
        found.append(alert)
        if alert.severity == "critical":
            found.append(replace(alert, labels={**labels, "severity": "warning"}))
    if snapshot.t and now - snapshot.t > _OLD_SNAPSHOT:
        found.append(_old_snapshot(snapshot.t, place))
    return tuple(found[:_MOST_ALERTS])


def _annotations(incident: Incident, devices: Mapping[str, str], place: Place) -> dict[str, str]:
    cause = incident.cause
    left = time_left(cause.eta)
    numbers = "; ".join(f"{name} {text}" for name, text in evidence_text(cause, devices))
    seen = "; ".join(
        f"{one.name}, {subject_text(one.subject, devices)} ({one.state})"
        for one in incident.verdicts
        if not one.silenced and LEVEL[one.state] >= LEVEL["info"]
    )
    action = incident.advice[0] if incident.advice else "Open the daemon's page."
    pace = f" Time left: {left}." if left else ""
    lines = [
        f"{place.name}: {statement(cause, devices)}",
        f"Since {_rfc3339(incident.since)}. Sure: {confidence_text(cause.confidence)}.{pace}",
        *([f"Numbers: {numbers}."] if numbers else []),
        f"Seen in it: {seen}.",
        f"First: {action}",
    ]
    who = subject_text(replace(cause.subject, rank=None, pid=None), devices)
    return {
        "summary": f"{who} on {place.name}: {CATALOGUE[cause.name].says}{f', {left} left' if left else ''}",
        "description": "\n".join(lines),
        "action": action,
    }


def _old_snapshot(t: float, place: Place) -> Alert:
    labels = {
        **{name: value for name, value in place.labels.items() if value},
        "alertname": "OomwatchSnapshotOld",
        "killer": "health",
        "severity": "warning",
    }
    action = "Compare the clocks; if they are right, save oomwatch's log and restart it."
    annotations = {
        "summary": f"oomwatch on {place.name} has taken up nothing new for 5 minutes",
        "description": f"What oomwatch on {place.name} tells is of {_rfc3339(t)}.\nFirst: {action}",
        "action": action,
        **place.links(labels),
    }
    return Alert(labels, annotations, t + _OLD_SNAPSHOT)


class Ledger:
    """What holds, and what held until a while ago: an incident that pauses shortly is not told as ended."""

    def __init__(self, snapshot: Callable[[], Snapshot], place: Place, keep: float) -> None:
        self.place = place
        self._snapshot = snapshot
        self._keep = keep
        self._lock = threading.Lock()
        self._held: dict[Key, tuple[Alert, float]] = {}

    def holding(self, now: float) -> dict[Key, Alert]:
        """Each alert that holds, by its labels. May be asked by several threads."""
        fresh = alerts_of(self._snapshot(), self.place, now)
        with self._lock:
            for alert in fresh:
                old = self._held.get(alert.key)
                since = min(alert.since, old[0].since) if old else alert.since
                self._held[alert.key] = replace(alert, since=since), now
            self._held = {key: (alert, seen) for key, (alert, seen) in self._held.items() if now - seen <= self._keep}
            return {key: alert for key, (alert, _) in self._held.items()}

    def take_over(self, other: Ledger) -> None:
        """Keep what another ledger held, after a change of settings."""
        with other._lock:
            self._held = dict(other._held)


# --- targets -------------------------------------------------------------------------------------------------------


class CannotTell(Exception):
    """A target did not accept; the sentence says why."""


class Poster:
    """Posts JSON to one server within its timeout."""

    def __init__(self, options: ScrapeOptions) -> None:
        self._options = options
        self._fetcher: tuple[str, Fetcher] | None = None

    def post(self, url: str, body: object) -> bytes:
        return self._ask(url, json.dumps(body, allow_nan=False).encode())

    def get(self, url: str) -> bytes:
        return self._ask(url, None)

    def _ask(self, url: str, body: bytes | None) -> bytes:
        try:
            if self._fetcher is None or self._fetcher[0] != url:
                self.close()
                self._fetcher = url, Fetcher(Location.of(url), self._options)
            document = self._fetcher[1].fetch(url, time.monotonic() + self._options.timeout, _ANSWER_BYTES, body)
        except ValueError:
            raise CannotTell("its address is not a URL of a server") from None
        except FetchError as error:
            # The words for engines, which are the usual ones to be asked.
            said = str(error).replace(" (vLLM is down or still loading)", "").replace("an engine's URL", "a URL")
            raise CannotTell(said) from None
        if not 200 <= document.status < 300:
            raise CannotTell(f"HTTP status {document.status}{_STATUS_ADVICE.get(document.status, '')}")
        return document.body

    def close(self) -> None:
        if self._fetcher is not None:
            self._fetcher[1].close()
            self._fetcher = None


_STATUS_ADVICE = {
    400: ": it does not understand what is sent; is it an Alertmanager of 0.16 or newer?",
    401: ": credentials are wanted, or wrong",
    403: ": these credentials are not allowed to post",
    404: ": nothing is there; check the URL's path",
}


@dataclass(frozen=True)
class _Told:
    """An alert that Alertmanager accepted; it forgets it by itself at ``until``."""

    alert: Alert
    began: float
    until: float


class AlertmanagerTarget:
    """One Alertmanager, told all that holds every ``resend`` seconds, and at once what begins and ends."""

    def __init__(self, url: str, options: ScrapeOptions, resend: float, page: str) -> None:
        self.name = url
        self._alerts_url = f"{url.rstrip('/')}/api/v2/alerts"
        self._poster = Poster(options)
        self._resend = resend
        self._page = page
        self._told: dict[Key, _Told] = {}
        self._sure: frozenset[Key] = frozenset()  # pages accepted since the last failure
        self._last = float("-inf")

    def waiting(self, holding: Mapping[Key, Alert], now: float) -> int:
        """How many alerts, or ends of alerts, it has not accepted."""
        self._told = {key: told for key, told in self._told.items() if key in holding or told.until > now}
        return len(holding.keys() ^ self._told.keys())

    def tell(self, holding: Mapping[Key, Alert], now: float) -> bool:
        """Post if something is due. Whether something was posted; CannotTell when it was not accepted.

        A page is told before the ticket that it holds back, and ends after it: for as long as Alertmanager knew the
        ticket alone, it would send it.
        """
        if not self.waiting(holding, now) and (not holding or now - self._last < self._resend):
            return False
        until = now + _FORGOTTEN_AFTER * self._resend
        pages = {key: alert for key, alert in holding.items() if alert.severity == "critical"}
        unsure = {alert.group for key, alert in pages.items() if key not in self._sure}
        tickets = {
            key: alert for key, alert in holding.items() if alert.severity != "critical" and alert.group not in unsure
        }
        ended = {key: told for key, told in self._told.items() if key not in holding}
        try:
            for firing, over in ((pages, "warning"), (tickets, "critical")):
                ends = [told for told in ended.values() if told.alert.severity == over]
                self._post(
                    [
                        *(self._plain(alert, self._began(key, now), until) for key, alert in firing.items()),
                        *(self._plain(told.alert, told.began, now) for told in ends),
                    ]
                )
        except CannotTell:
            self._sure = frozenset()
            raise
        self._told = {key: _Told(alert, self._began(key, now), until) for key, alert in {**pages, **tickets}.items()}
        self._sure = frozenset(pages)
        self._last = now
        return True

    def _began(self, key: Key, now: float) -> float:
        """When it was first told. With an earlier time Alertmanager would send it at once, without its group_wait."""
        return self._told[key].began if key in self._told else now

    def _post(self, alerts: list[Plain]) -> None:
        if alerts:
            self._poster.post(self._alerts_url, alerts)

    def test(self, alert: Alert, now: float, until: float) -> str:
        """Post a test, and say what Alertmanager does with it."""
        self._poster.post(self._alerts_url, [self._plain(alert, alert.since, until)])
        query = urlencode([("filter", f"{name}={json.dumps(value)}") for name, value in alert.key])
        found = json.loads(self._poster.get(f"{self._alerts_url}?{query}"))
        if not found:
            return "accepted, and not among its alerts: does it relabel or drop alerts?"
        status = found[0]["status"]
        held = [name for key, name in (("silencedBy", "a silence"), ("inhibitedBy", "another alert")) if status[key]]
        receivers = ", ".join(one["name"] for one in found[0]["receivers"])
        return f"accepted, for the receiver {receivers}{f'; held back by {held[0]}' if held else ''}"

    def close(self) -> None:
        self._poster.close()

    def _plain(self, alert: Alert, begins: float, ends: float) -> Plain:
        return {
            "labels": dict(alert.labels),
            "annotations": dict(alert.annotations),
            "startsAt": _rfc3339(begins),
            "endsAt": _rfc3339(ends),
            "generatorURL": self._page,
        }


class WebhookTarget:
    """One address that gets each begin, change of severity and end of an incident once accepted, and no repeats."""

    def __init__(self, name: str, config: WebhookConfig) -> None:
        self.name = name
        self._config = config
        self._poster = Poster(config.options())
        self._told: dict[Key, Alert] = {}
        self._ended: dict[Key, float] = {}

    def waiting(self, holding: Mapping[Key, Alert], now: float) -> int:
        return len(self._due(holding, now))

    def tell(self, holding: Mapping[Key, Alert], now: float) -> bool:
        due = self._due(holding, now)
        for status, alert in due:
            self._poster.post(self._url(), webhook_document(alert, status, now))
            if status == "firing":
                self._told[alert.group] = alert
            else:
                del self._told[alert.group]
        return bool(due)

    def test(self, alert: Alert, now: float, until: float) -> str:
        del until
        self._poster.post(self._url(), webhook_document(alert, "firing", now))
        return "accepted"

    def close(self) -> None:
        self._poster.close()

    def _due(self, holding: Mapping[Key, Alert], now: float) -> list[tuple[str, Alert]]:
        worst: dict[Key, Alert] = {}
        for alert in holding.values():
            if alert.group not in worst or alert.severity == "critical":
                worst[alert.group] = alert
        ended = self._told.keys() - worst.keys()
        self._ended = {key: self._ended.get(key, now) for key in ended}
        for key, since in self._ended.items():
            if now - since > _KEEP_ENDED:
                del self._told[key]
        begun = [
            ("firing", alert)
            for key, alert in worst.items()
            if key not in self._told or self._told[key].severity != alert.severity
        ]
        return [*begun, *(("resolved", self._told[key]) for key in ended if key in self._told)]

    def _url(self) -> str:
        if self._config.url is not None:
            return self._config.url
        assert self._config.url_file is not None
        try:
            return read_secret(self._config.url_file)
        except (OSError, ValueError) as error:
            raise CannotTell(f"its url_file is not usable: {error}") from None


def webhook_document(alert: Alert, status: str, now: float) -> Plain:
    """What a webhook gets; docs/alerting.md explains it. ``key`` is the same for all that is told of one incident."""
    return {
        "version": 1,
        "status": status,
        "key": alert.labels.get("instance", "") + "/" + alert.labels.get("incident", alert.labels["alertname"]),
        "severity": alert.severity,
        "test": alert.labels["alertname"] == TEST_ALERT,
        "labels": dict(alert.labels),
        "annotations": dict(alert.annotations),
        "starts_at": _rfc3339(min(alert.since, now)),
        "ends_at": _rfc3339(now) if status == "resolved" else None,
        "verdicts": list(alert.verdicts),
    }


Target = AlertmanagerTarget | WebhookTarget


def targets_of(alerting: AlertingConfig, place: Place) -> tuple[Target, ...]:
    return (
        *(
            AlertmanagerTarget(server.url, server.options(), alerting.resend, place.page)
            for server in alerting.alertmanagers
        ),
        *(WebhookTarget(_webhook_name(index, hook), hook) for index, hook in enumerate(alerting.webhooks)),
    )


def _webhook_name(index: int, hook: WebhookConfig) -> str:
    """The webhook's server: path and query may be secret."""
    name = f"webhooks[{index}]"
    return name if hook.url is None else f"{name} {urlsplit(hook.url).netloc}"


# --- the daemon's part ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TargetStatus:
    """How telling a target goes. ``waiting`` counts what it has not accepted; ``last_success`` is unix time."""

    name: str
    sent: int = 0
    failures: int = 0
    waiting: int = 0
    last_success: float | None = None


@dataclass
class _Sender:
    """One target with its thread."""

    target: Target
    ledger: Ledger
    clock: Callable[[], float]
    status: TargetStatus
    defects: Defects
    repeats: Repeats = field(default_factory=Repeats)
    stopping: threading.Event = field(default_factory=threading.Event)
    pause: float = 0.0
    again_at: float = 0.0

    def start(self) -> None:
        threading.Thread(target=self._run, name=f"notify-{self.target.name}", daemon=True).start()

    def _run(self) -> None:
        while not self.stopping.wait(_LOOK_SECONDS):
            self._guarded_step()
        self.target.close()

    def _guarded_step(self) -> None:
        """A step that cannot end the thread: what it raises is a defect of ours."""
        try:
            self.step()
        except Exception as error:
            self.defects.met(_log, "telling of alerts failed; it is tried again", error, target=self.target.name)
            self.again_at = time.monotonic() + _LONGEST_PAUSE

    def step(self) -> None:
        now = self.clock()
        holding = self.ledger.holding(now)
        if time.monotonic() < self.again_at:
            self.status = replace(self.status, waiting=self.target.waiting(holding, now))
            return
        try:
            sent = self.target.tell(holding, now)
        except CannotTell as error:
            event = "alerts cannot be told; tried again until it works"
            self.repeats.failed(_log, "tell", event, str(error), target=self.target.name)
            self.pause = min(_LONGEST_PAUSE, max(_FIRST_PAUSE, 2 * self.pause))
            self.again_at = time.monotonic() + self.pause
            waiting = self.target.waiting(holding, now)
            self.status = replace(self.status, failures=self.status.failures + 1, waiting=waiting)
            return
        if not sent:
            return
        self.repeats.recovered(_log, "tell", "alerts are told again", target=self.target.name)
        self.pause = 0.0
        waiting = self.target.waiting(holding, now)
        self.status = replace(self.status, sent=self.status.sent + 1, waiting=waiting, last_success=now)


class Notifier:
    """Keeps every target told. ``configure`` may be called at any time, from any thread."""

    def __init__(
        self,
        snapshot: Callable[[], Snapshot],
        clock: Callable[[], float] = time.time,
        defects: Defects | None = None,
    ) -> None:
        self._defects = defects or Defects()
        self._snapshot = snapshot
        self._clock = clock
        self._senders: tuple[_Sender, ...] = ()
        self._used: tuple[AlertingConfig, Place] | None = None
        self._ledger: Ledger | None = None

    def configure(self, config: Config) -> None:
        """Begin with these settings; what was already told is resent by the new ones, which does no harm."""
        alerting, place = config.alerting, Place.of(config)
        if self._used == (alerting, place):
            return
        self.stop()
        self._used = alerting, place
        ledger = Ledger(self._snapshot, place, alerting.keep_firing_for)
        if self._ledger is not None and self._ledger.place == place:
            ledger.take_over(self._ledger)
        self._ledger = ledger
        self._senders = tuple(
            _Sender(target, ledger, self._clock, TargetStatus(target.name), self._defects)
            for target in targets_of(alerting, place)
        )
        for sender in self._senders:
            sender.start()

    def stop(self) -> None:
        """Tell nothing more. Alertmanager forgets what holds after four times resend, unless a daemon starts again."""
        for sender in self._senders:
            sender.stopping.set()

    def status(self) -> tuple[TargetStatus, ...]:
        return tuple(sender.status for sender in self._senders)


# --- a test of the chain -------------------------------------------------------------------------------------------


def send_test(config: Config, severity: str, now: float, seconds: float) -> Iterator[tuple[str, str, bool]]:
    """Post a marked test to each target: its name, what became of it, and whether it was accepted.

    Alertmanager takes it as ended after ``seconds``.
    """
    place = Place.of(config)
    labels = {
        **{name: value for name, value in place.labels.items() if value},
        "alertname": TEST_ALERT,
        "incident": "test/oomwatch",
        "killer": "health",
        "severity": severity,
    }
    action = "Nothing. Whoever started the test wants to hear that this arrived."
    annotations = {
        "summary": f"TEST of the alerts of oomwatch on {place.name}: nothing is wrong",
        "description": f"Somebody ran oomwatch alerts test on {place.name}. No engine and no GPU has a problem.\n"
        f"First: {action}",
        "action": action,
        "page": place.page,
    }
    alert = Alert(labels, annotations, now)
    for target in targets_of(config.alerting, place):
        text, accepted = _tested(target, alert, now, now + seconds)
        yield target.name, text, accepted


def _tested(target: Target, alert: Alert, now: float, until: float) -> tuple[str, bool]:
    try:
        return target.test(alert, now, until), True
    except CannotTell as error:
        return f"not accepted: {error}", False
    finally:
        target.close()


def _rfc3339(t: float) -> str:
    return datetime.fromtimestamp(t, timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")
