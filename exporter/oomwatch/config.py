"""The configuration: a YAML file, then environment variables, then flags; everything wrong is reported at once.

Durations are seconds, sizes bytes, shares 0-1. With no configuration at all every default holds, and vLLM engines
of this host are found by themselves.
"""

from __future__ import annotations

import hashlib
import re
import ssl
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import SplitResult, urlsplit, urlunsplit

from pydantic import AfterValidator, BeforeValidator, Field

from oomwatch.detection import DetectionConfig
from oomwatch.observations import EngineFacts
from oomwatch.settings import (
    ConfigError,
    Contradiction,
    Described,
    Duration,
    File,
    Folder,
    KeyPath,
    Kind,
    Layer,
    Origin,
    Problem,
    Section,
    Size,
    Texts,
    as_written,
    described,
    did_you_mean,
    dump_yaml,
    in_order,
    key_text,
    load_certificate,
    named_files,
    read_secret,
    read_text,
    read_yaml,
    read_yaml_value,
    resolve_files,
    sequence,
    validate,
)
from oomwatch.sources.vllm.transport import ScrapeOptions
from oomwatch.webconfig import check_web_config

# Prometheus' list of exporters' ports hands out 9100 to 9999, and all of it is taken or asked for.
DEFAULT_PORT = 18666

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@-]{0,127}")
_GPU = re.compile(r"(GPU|MIG)-[0-9A-Za-z/-]+")
_LABEL = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_OWN_LABELS = frozenset({"alertname", "severity", "killer", "verdict", "incident", "engine", "gpu", "mig"})
_HEADER = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")


def _checked_name(value: str) -> str:
    if not _NAME.fullmatch(value):
        raise ValueError("not usable as a label")
    return value


def _split_url(value: str) -> SplitResult:
    try:
        parts = urlsplit(value)
        if parts.scheme in ("http", "https") and parts.hostname and parts.port != 0 and not re.search(r"\s", value):
            return parts
    except ValueError as error:
        raise ValueError(f"not a URL of a server ({str(error).lower()})") from error
    raise ValueError("not a URL of a server")


def _checked_bare_url(value: str, shown_in: str, instead: str) -> str:
    parts = _split_url(value)
    if parts.username is not None or parts.password is not None:
        raise ValueError(
            f"the URL holds credentials, which would end up in {shown_in}. "
            "Take them out and use basic_auth with a password_file"
        )
    if parts.query or parts.fragment:
        raise ValueError(f"the URL has a query or a fragment. Give {instead}")
    return value


def _checked_engine_url(value: str) -> str:
    return _checked_bare_url(value, "logs and labels", "the server's base URL or its /metrics")


def _checked_server_url(value: str) -> str:
    return _checked_bare_url(value, "logs", "the server's base URL")


def _checked_webhook_url(value: str) -> str:
    parts = _split_url(value)
    if parts.username is not None or parts.password is not None or parts.fragment:
        raise ValueError("the URL holds credentials or a fragment. Credentials belong into url_file or basic_auth")
    return value


def _checked_labels(value: dict[str, str]) -> dict[str, str]:
    for name in value:
        if not _LABEL.fullmatch(name):
            raise ValueError(f'"{name}" is not the name of a label')
        if name in _OWN_LABELS:
            raise ValueError(f'"{name}" is a label that oomwatch sets itself')
    return value


def _checked_proxy_url(value: str) -> str:
    parts = _split_url(value)
    if parts.path not in ("", "/") or parts.query or parts.fragment:
        raise ValueError("a proxy's URL has no path")
    return value


def _checked_gpus(value: tuple[str, ...]) -> tuple[str, ...]:
    wrong = [f'"{uuid}"' for uuid in value if not _GPU.fullmatch(uuid)]
    if wrong:
        raise ValueError(f"no uuids of GPUs or MIG slices: {' and '.join(wrong)}")
    return value


def _checked_headers(value: dict[str, str]) -> dict[str, str]:
    for name, text in value.items():
        if not _HEADER.fullmatch(name):
            raise ValueError(f'"{name}" is not the name of an HTTP header')
        if re.search(r"[^\t\x20-\x7e\x80-\xff]", text) or text != text.strip():
            raise ValueError(f'the value of "{name}" has characters or outer spaces that HTTP forbids in a header')
    return value


def _checked_addresses(value: tuple[str, ...]) -> tuple[str, ...]:
    if not value:
        raise ValueError("empty: give one address at least")
    wrong = [f'"{address}"' for address in value if split_address(address) is None]
    if wrong:
        raise ValueError(f"{' and '.join(wrong)} cannot be listened on")
    return value


def split_address(address: str) -> tuple[str, int] | None:
    """Host and port of ``host:port``, ``:port`` (every interface: host "") or ``[IPv6]:port``; None otherwise."""
    match = re.fullmatch(r"(?:\[(?P<six>[0-9A-Fa-f:.%a-z]+)\]|(?P<host>[^\s:/\[\]]*)):(?P<port>\d{1,5})", address)
    if match is None or int(match["port"]) > 65535:
        return None
    return match["six"] or match["host"], int(match["port"])


def _lower(value: object) -> object:
    return {"warning": "warn"}.get(value.lower(), value.lower()) if isinstance(value, str) else value


Name = Annotated[
    str,
    AfterValidator(_checked_name),
    Kind("name", "1 to 128 letters, digits and . _ : / @ -, the first a letter or a digit"),
]
EngineUrl = Annotated[str, AfterValidator(_checked_engine_url), Kind("URL", "http:// or https://, base or /metrics")]
ProxyUrl = Annotated[str, AfterValidator(_checked_proxy_url), Kind("URL", "http:// or https://", secret=True)]
Gpus = Annotated[
    tuple[str, ...],
    AfterValidator(_checked_gpus),
    Kind("list of uuids", "GPU-… or MIG-…, as nvidia-smi -L prints them"),
]
Headers = Annotated[dict[str, str], AfterValidator(_checked_headers), Kind("headers", "name: value", secret=True)]
ServerUrl = Annotated[str, AfterValidator(_checked_server_url), Kind("URL", "http:// or https://")]
WebhookUrl = Annotated[
    str, AfterValidator(_checked_webhook_url), Kind("URL", "http:// or https://, with path and query", secret=True)
]
Labels = Annotated[dict[str, str], AfterValidator(_checked_labels), Kind("labels", "name: value")]
Addresses = Annotated[
    Texts, AfterValidator(_checked_addresses), Kind("list of addresses", "host:port, :port or [IPv6]:port")
]


def _checked_folders(value: tuple[str, ...]) -> tuple[str, ...]:
    for folder in value:
        if not folder.startswith("/"):
            raise ValueError(f'"{folder}" is not absolute. Write the whole path, such as /run/oomwatch')
    return value


Folders = Annotated[Texts, AfterValidator(_checked_folders), Kind("list of folders", "absolute paths")]


class TlsConfig(Section):
    """How a server's certificate is checked, and what is shown to it."""

    ca_file: File | None = Field(default=None, description="Certificates (PEM) to trust instead of the system's.")
    cert_file: File | None = Field(default=None, description="Client certificate (PEM) for servers that ask for one.")
    key_file: File | None = Field(
        default=None, description="Key (PEM) of the client certificate, where cert_file lacks it."
    )
    insecure_skip_verify: bool = Field(
        default=False, description="Accept any certificate. Anyone on the way can then pose as the engine."
    )

    @classmethod
    def contradictions(cls, data: Mapping[str, Any]) -> Iterator[Contradiction]:
        if data.get("key_file") and not data.get("cert_file"):
            yield Contradiction(("key_file",), "a key without cert_file. Give both")
        if data.get("insecure_skip_verify") is True and data.get("ca_file"):
            yield Contradiction(("insecure_skip_verify",), "ca_file would be of no effect. Keep one of the two")


class BasicAuthConfig(Section):
    """A user's name and the file with the password."""

    username: str = Field(description="The user's name, without a colon.", min_length=1, pattern=r"^[^:]+$")
    password_file: File = Field(
        description="File that holds the password and nothing else; a line end at its end is left out. Read anew "
        "when it changes."
    )


class ProbeConfig(Section):
    """Asking an engine for one token now and then: it notices one that hung while idle, which no series shows."""

    model: str = Field(min_length=1, description="A model that the engine serves, by the name that clients use.")
    interval: Duration = Field(default=300.0, ge=10, le=86400, description="How often a token is asked for.")
    timeout: Duration = Field(
        default=60.0, ge=1, le=600, description="How long a token may take, waiting in the engine's queue included."
    )
    bearer_token_file: File | None = Field(
        default=None, description="File that holds the API key and nothing else. Read anew when it changes."
    )


class EngineLogConfig(Section):
    """Where an engine's log is. One of file, journal and container says it."""

    file: File | None = Field(default=None, description="The file that it is written to, through rotation.")
    journal: str | None = Field(
        default=None,
        min_length=1,
        max_length=256,
        description="The systemd unit that it runs as, such as vllm.service.",
    )
    container: str | None = Field(
        default=None,
        pattern=r"^[0-9a-f]{12,64}$",
        description="The container's id, or the beginning of it; its runtime's log file is read.",
    )

    @classmethod
    def contradictions(cls, data: Mapping[str, Any]) -> Iterator[Contradiction]:
        yield from _one_of(data, "file", "journal", "container")


class EngineConfig(Section):
    """A vLLM server to scrape, and what is known of it."""

    name: Name = Field(description="The engine's name in labels, alerts and pages; unique on this node.")
    url: EngineUrl = Field(description="The server's base URL, or its /metrics in full.")
    timeout: Duration = Field(
        default=5.0, ge=0.1, le=60, description="How long one request may take; never longer than intervals.scrape."
    )
    max_page_bytes: Size = Field(
        default=16 * 1024**2, ge=64 * 1024, le=1024**3, description="A page larger than this is not read to its end."
    )
    bearer_token_file: File | None = Field(
        default=None, description="File that holds a bearer token and nothing else. Read anew when it changes."
    )
    basic_auth: BasicAuthConfig | None = Field(default=None, description="User name and password for the server.")
    tls: TlsConfig = Field(default=TlsConfig(), description="For https:// URLs.")
    headers: Headers = Field(default_factory=dict, repr=False, description="Further headers to send. Shown masked.")
    proxy_url: ProxyUrl | None = Field(
        default=None,
        repr=False,
        description="Proxy to go through. The environment's proxies are never used. Shown without credentials.",
    )
    probe: ProbeConfig | None = Field(
        default=None, description="Ask for one token now and then. Off unless given; every probe costs a request."
    )
    gpu_memory_utilization: float | None = Field(
        default=None, gt=0, le=1, description="vLLM's --gpu-memory-utilization, where the page does not tell it."
    )
    max_model_len: int | None = Field(default=None, ge=1, description="vLLM's --max-model-len in tokens.")
    kv_connector: bool | None = Field(
        default=None,
        description="Whether a KV connector (NIXL, Mooncake, LMCache) may hold blocks of finished requests.",
    )
    kv_pool_blocks: int | None = Field(default=None, ge=1, description="Usable KV blocks of one rank.")
    kv_pool_bytes: Size | None = Field(default=None, ge=1, description="Memory of the KV pool on one GPU.")
    weights_bytes: Size | None = Field(default=None, ge=1, description="Memory of the model's weights on one GPU.")
    pids: tuple[Annotated[int, Field(ge=1)], ...] | None = Field(
        default=None,
        description="The engine's processes on this host, for the rare case that they cannot be found by port.",
    )
    gpus: Gpus | None = Field(
        default=None, description="The engine's GPUs or MIG slices, where its processes cannot be found."
    )
    log: EngineLogConfig | None = Field(
        default=None, description="The engine's log, where its processes do not show where they write it."
    )

    @classmethod
    def contradictions(cls, data: Mapping[str, Any]) -> Iterator[Contradiction]:
        if data.get("bearer_token_file") and data.get("basic_auth"):
            yield Contradiction(("bearer_token_file",), "basic_auth is set as well. Keep one of the two")
        headers = data.get("headers")
        if isinstance(headers, Mapping) and "authorization" in {str(name).lower() for name in headers}:
            yield Contradiction(("headers",), "Authorization belongs in bearer_token_file or basic_auth")
        tls = data.get("tls")
        used = isinstance(tls, Mapping) and any(tls.values())
        if used and str(data.get("url", "")).lower().startswith("http://"):
            yield Contradiction(("tls",), "of no effect with an http:// URL. Make it https:// or take tls out")

    @property
    def base_url(self) -> str:
        """The server's URL without /metrics and without a slash at its end."""
        parts = urlsplit(self.url)
        path = parts.path.rstrip("/")
        path = path[: -len("/metrics")] if path.endswith("/metrics") else path
        return urlunsplit((parts.scheme, parts.netloc, path.rstrip("/"), "", ""))

    @property
    def metrics_url(self) -> str:
        """The URL of the page of metrics."""
        return f"{self.base_url}/metrics"

    def facts(self) -> EngineFacts:
        """What the operator states of the engine."""
        return EngineFacts(
            name=self.name,
            target=self.metrics_url,
            pids=self.pids,
            gpus=self.gpus,
            gpu_memory_utilization=self.gpu_memory_utilization,
            max_model_len=self.max_model_len,
            kv_connector=self.kv_connector,
            kv_pool_blocks=self.kv_pool_blocks,
            kv_pool_bytes=self.kv_pool_bytes,
            weights_bytes=self.weights_bytes,
        )


class DiscoveryConfig(Section):
    """Finding vLLM servers of this host by themselves. Nothing outside the host is looked at."""

    enabled: bool = Field(
        default=True, description="Whether vLLM servers that the configuration does not name are found."
    )
    timeout: Duration = Field(
        default=5.0,
        ge=0.1,
        le=60,
        description="How long one request to a found engine may take; never longer than intervals.scrape.",
    )
    max_page_bytes: Size = Field(
        default=16 * 1024**2,
        ge=64 * 1024,
        le=1024**3,
        description="A found engine's page larger than this is not read to its end.",
    )
    tls: TlsConfig = Field(default=TlsConfig(), description="For found servers that speak https.")


class IntervalsConfig(Section):
    """How often each source is read."""

    gpu: Duration = Field(default=15.0, ge=1, le=300, description="GPU memory by NVML.")
    processes: Duration = Field(
        default=60.0,
        ge=1,
        le=3600,
        description="The GPUs' process lists and health, which cost more; rounded to a multiple of intervals.gpu.",
    )
    scrape: Duration = Field(default=15.0, ge=1, le=300, description="The engines' pages of metrics.")
    host: Duration = Field(default=30.0, ge=1, le=3600, description="Host processes of engines and the host's memory.")
    discovery: Duration = Field(default=15.0, ge=1, le=3600, description="The search for vLLM servers on this host.")

    @property
    def processes_every(self) -> int:
        """In every how many GPU cycles the process lists are read."""
        return max(1, round(self.processes / self.gpu))


class NvmlConfig(Section):
    """Reading GPUs through NVIDIA's management library."""

    enabled: bool = Field(default=True, description="Whether GPUs are read at all.")
    deadline: Duration = Field(
        default=5.0,
        ge=0.1,
        le=60,
        description="A device that has not answered after this counts as hung; the others go on.",
    )
    release_for: Duration = Field(
        default=600.0,
        ge=1,
        le=86400,
        description="How long the driver stays given back after /-/release or SIGUSR1, unless it is taken back before.",
    )


class EngineLogsConfig(Section):
    """Reading the engines' own logs. Only numbers are kept of them, never text."""

    enabled: bool = Field(
        default=True,
        description="Whether engines' logs are read: where their processes write them, or where engines.log says.",
    )
    interval: Duration = Field(default=10.0, ge=1, le=300, description="How often they are looked at.")
    docker_directory: Folder = Field(
        default=Path("/var/lib/docker/containers"), description="Where Docker keeps its containers' log files."
    )
    kubernetes_directory: Folder = Field(
        default=Path("/var/log/containers"), description="Where the kubelet links its containers' log files."
    )


class InsideConfig(Section):
    """What oomwatch-probe, the plugin inside vLLM, writes about allocators and KV blocks (docs/probe.md)."""

    directory: Folders = Field(
        default=("/run/oomwatch",),
        description="Where its files lie: a folder, or several that containers share. One that is missing is no fault.",
    )
    interval: Duration = Field(default=5.0, ge=1, le=300, description="How often they are read.")


class NeighbourConfig(Section):
    """Something else that is known to use GPU memory on this node. One of process, container and pod_uid says what."""

    name: Name = Field(description="Its name in labels; unique among neighbours.")
    process: str | None = Field(
        default=None, min_length=1, description="Name of its processes, with * and ? as in file names, such as dcgm*."
    )
    container: str | None = Field(default=None, min_length=1, description="Its container's id, or the beginning of it.")
    pod_uid: str | None = Field(default=None, min_length=1, description="Its Kubernetes pod's uid.")

    @classmethod
    def contradictions(cls, data: Mapping[str, Any]) -> Iterator[Contradiction]:
        yield from _one_of(data, "process", "container", "pod_uid")


class Access(Section):
    """How a server that is no engine is asked: credentials, certificates, proxy."""

    timeout: Duration = Field(default=10.0, ge=1, le=600, description="How long one request may take.")
    bearer_token_file: File | None = Field(
        default=None, description="File that holds a bearer token and nothing else. Read anew when it changes."
    )
    basic_auth: BasicAuthConfig | None = Field(default=None, description="User name and password for the server.")
    tls: TlsConfig = Field(default=TlsConfig(), description="For https:// URLs.")
    headers: Headers = Field(default_factory=dict, repr=False, description="Further headers to send. Shown masked.")
    proxy_url: ProxyUrl | None = Field(
        default=None, repr=False, description="Proxy to go through. Shown without credentials."
    )

    @classmethod
    def contradictions(cls, data: Mapping[str, Any]) -> Iterator[Contradiction]:
        if data.get("bearer_token_file") and data.get("basic_auth"):
            yield Contradiction(("bearer_token_file",), "basic_auth is set as well. Keep one of the two")

    def options(self) -> ScrapeOptions:
        """How the server is asked."""
        return ScrapeOptions(
            timeout=self.timeout,
            max_page_bytes=64 * 1024**2,
            bearer_token_file=_text(self.bearer_token_file),
            username=self.basic_auth.username if self.basic_auth else None,
            password_file=_text(self.basic_auth.password_file) if self.basic_auth else None,
            headers=dict(self.headers),
            ca_file=_text(self.tls.ca_file),
            cert_file=_text(self.tls.cert_file),
            key_file=_text(self.tls.key_file),
            insecure_skip_verify=self.tls.insecure_skip_verify,
            proxy_url=self.proxy_url,
        )


def _text(file: Path | None) -> str | None:
    return None if file is None else str(file)


class PrometheusConfig(Access):
    """A Prometheus server that scrapes the engines, to ask after a start for what was not seen itself."""

    url: EngineUrl | None = Field(
        default=None, description="The server's base URL, without /api/v1. Nothing is asked without it."
    )
    timeout: Duration = Field(default=30.0, ge=1, le=600, description="How long all questions together may take.")


class AlertmanagerConfig(Access):
    """An Alertmanager to post to. Of a cluster name every member: each is told everything."""

    url: ServerUrl = Field(description="Its base URL, without /api/v2.")


class WebhookConfig(Access):
    """An address that each change of an incident is posted to, as JSON. One of url and url_file says where."""

    url: WebhookUrl | None = Field(default=None, description="Where to post. Shown without what follows the ?.")
    url_file: File | None = Field(
        default=None, description="File that holds the URL and nothing else, where the URL itself is a secret."
    )

    @classmethod
    def contradictions(cls, data: Mapping[str, Any]) -> Iterator[Contradiction]:
        yield from super().contradictions(data)
        given = [key for key in ("url", "url_file") if data.get(key)]
        if not given:
            yield Contradiction((), "one of url and url_file is required")
        if len(given) > 1:
            yield Contradiction(("url_file",), "url is set as well. Keep one of the two")


class AlertingConfig(Section):
    """Direct mode: the daemon tells of incidents by itself, for a host without Prometheus or beside it.

    Labels equal those of alerts/rules, so that both together make one alert, if ``labels`` has what Prometheus adds.
    """

    alertmanagers: tuple[AlertmanagerConfig, ...] = Field(default=(), description="Alertmanagers to post to.")
    webhooks: tuple[WebhookConfig, ...] = Field(default=(), description="Where else changes are posted to, as JSON.")
    labels: Labels = Field(
        default_factory=dict,
        description="Labels that say where, on every alert: those that Prometheus puts onto this target and its "
        "external labels, such as cluster. instance is this host's name and the port, job is oomwatch unless given "
        "here; an empty text takes one away.",
    )
    resend: Duration = Field(
        default=60.0,
        ge=1,
        le=600,
        description="How often Alertmanager is told what holds; it forgets after four times.",
    )
    keep_firing_for: Duration = Field(
        default=300.0, ge=0, le=86400, description="How long an alert still holds after its incident ended or paused."
    )
    external_url: ServerUrl | None = Field(
        default=None, description="Where people reach the daemon's page; this host's name and the port by default."
    )
    runbooks: ServerUrl | None = Field(default=None, description="Where alerts/runbooks is served; linked if given.")
    grafana: ServerUrl | None = Field(
        default=None, description="Where Grafana answers; dashboards are linked if given."
    )


class HistoryConfig(Section):
    """The daemon's memory on disk: a flight recorder, what the detectors have learnt, and floors of weeks.

    Settings here take effect at the next start.
    """

    enabled: bool = Field(
        default=True, description="Whether anything is kept on disk. Without it, a restart forgets everything."
    )
    directory: Folder | None = Field(
        default=None,
        description="Where it is kept. Else systemd's StateDirectory, /var/lib/oomwatch where that can be written, or "
        "oomwatch under $XDG_STATE_HOME.",
    )
    keep: Duration = Field(
        default=86400.0, ge=600, le=14 * 86400, description="How long the flight recorder keeps what was observed."
    )
    max_bytes: Size = Field(
        default=256 * 1024**2,
        ge=1024**2,
        le=64 * 1024**3,
        description="What the flight recorder takes on disk at most; the oldest goes first.",
    )
    keep_floors: Duration = Field(
        default=30 * 86400.0,
        ge=86400,
        le=400 * 86400,
        description="How long floors and maxima of each half hour are kept.",
    )
    log_text: bool = Field(
        default=False, description="Whether raw lines of engines' logs are kept; prompts may stand in them."
    )
    prometheus: PrometheusConfig = Field(default=PrometheusConfig())


class ExpositionConfig(Section):
    """What /metrics shows."""

    process_series_per_gpu: int = Field(
        default=32,
        ge=0,
        le=1024,
        description="The largest processes of each GPU that get their own series; 0 switches these off.",
    )
    stale_after_intervals: int = Field(
        default=3, ge=1, le=100, description="A source silent for this many of its intervals shows no values any more."
    )
    forget_after: Duration = Field(
        default=86400.0,
        ge=60,
        le=30 * 86400,
        description="Engines found by themselves and devices that are gone leave every list after this.",
    )


class LogConfig(Section):
    """The daemon's own log, on standard error."""

    level: Annotated[Literal["debug", "info", "warn", "error"], BeforeValidator(_lower)] = Field(
        default="info", description="The least severe messages that are written."
    )
    format: Annotated[Literal["console", "json"], BeforeValidator(_lower)] = Field(
        default="console", description="For people, or one JSON object a line."
    )


class ServerConfig(Section):
    """The daemon's own HTTP server."""

    listen_address: Addresses = Field(
        default=(f":{DEFAULT_PORT}",), description="Where to listen; without a host, on every interface."
    )
    config_file: File | None = Field(
        default=None,
        description="Web configuration with TLS and basic authentication, in the form of Prometheus' exporters.",
    )
    enable_lifecycle: bool = Field(default=False, description="Whether POST /-/reload and /-/release are served.")
    max_requests: int = Field(
        default=40,
        ge=1,
        le=1000,
        description="Requests served at the same time; beyond it they are answered 503 with Retry-After.",
    )


class Config(Section):
    """Everything that can be set."""

    engines: tuple[EngineConfig, ...] = Field(
        default=(), description="vLLM servers to scrape, beside those that are found."
    )
    discovery: DiscoveryConfig = Field(default=DiscoveryConfig())
    intervals: IntervalsConfig = Field(default=IntervalsConfig())
    nvml: NvmlConfig = Field(default=NvmlConfig())
    probe: InsideConfig = Field(default=InsideConfig())
    engine_logs: EngineLogsConfig = Field(default=EngineLogsConfig())
    neighbours: tuple[NeighbourConfig, ...] = Field(
        default=(), description="Known users of GPU memory that are no engines."
    )
    detection: DetectionConfig = Field(default=DetectionConfig())
    history: HistoryConfig = Field(default=HistoryConfig())
    alerting: AlertingConfig = Field(default=AlertingConfig())
    exposition: ExpositionConfig = Field(default=ExpositionConfig())
    log: LogConfig = Field(default=LogConfig())
    web: ServerConfig = Field(default=ServerConfig())

    @classmethod
    def contradictions(cls, data: Mapping[str, Any]) -> Iterator[Contradiction]:
        for key in ("engines", "neighbours"):
            yield from _twice(data, key, "name")
        yield from _twice(data, "engines", "url")

    def timeout(self, engine: EngineConfig | None) -> float:
        """Seconds that a request to an engine may take; None stands for one that was found."""
        return min((engine or self.discovery).timeout, self.intervals.scrape)


def _one_of(data: Mapping[str, Any], *keys: str) -> Iterator[Contradiction]:
    given = [key for key in keys if data.get(key)]
    if not given:
        yield Contradiction((), f"one of {', '.join(keys[:-1])} and {keys[-1]} is required")
    if len(given) > 1:
        yield Contradiction((given[1],), f"{given[0]} is set as well. Keep one")


def _twice(data: Mapping[str, Any], key: str, field: str) -> Iterator[Contradiction]:
    first: dict[str, int] = {}
    for index, item in enumerate(sequence(data.get(key))):
        value = getattr(item, field, None) if isinstance(item, Section) else None
        value = item.get(field) if isinstance(item, Mapping) else value
        if not isinstance(value, str):
            continue
        plain = value.rstrip("/").removesuffix("/metrics").rstrip("/") if field == "url" else value
        if plain in first:
            yield Contradiction((key, index, field), f"the same {field} as {key}[{first[plain]}]. Each needs its own")
        first.setdefault(plain, index)


# --- where settings come from ----------------------------------------------------------------------------------

PREFIX = "OOMWATCH_"

FLAGS: Mapping[str, KeyPath] = {
    "web.listen-address": ("web", "listen_address"),
    "web.config.file": ("web", "config_file"),
    "web.enable-lifecycle": ("web", "enable_lifecycle"),
    "web.max-requests": ("web", "max_requests"),
    "log.level": ("log", "level"),
    "log.format": ("log", "format"),
}
"""Flags without their dashes, and the keys that they set."""

OTHER_VARIABLES: Mapping[str, str] = {"OOMWATCH_CONFIG_FILE": "The configuration file, as --config.file names it."}
"""Variables that begin like settings and are read elsewhere, with their meaning."""

_TESTS = "OOMWATCH_TESTS_"  # what the project's own tests are told, and hand on to the daemons that they start

# Kubernetes adds these for every Service whose name begins with oomwatch.
_SERVICE_LINK = re.compile(
    r"OOMWATCH_(?:\w+_)?(?:SERVICE_HOST|SERVICE_PORT(?:_\w+)?|PORT_\d+_(?:TCP|UDP|SCTP)(?:_(?:PROTO|PORT|ADDR))?)"
)
_SERVICE_ADDRESS = re.compile(r"(?:tcp|udp|sctp)://")


@dataclass(frozen=True)
class Setting:
    """One key that can be set alone, in the file or by an environment variable."""

    path: tuple[str, ...]
    field: Described

    @property
    def variable(self) -> str:
        return PREFIX + "__".join(self.path).upper()


def settings(section: type[Section] | None = None, path: tuple[str, ...] = ()) -> Iterator[Setting]:
    """Every key outside lists of sections, in the order of the models."""
    for name, found in described(section or Config).items():
        if found.section:
            yield from settings(found.section, (*path, name))
        else:
            yield Setting((*path, name), found)


@dataclass(frozen=True)
class Loaded:
    """A configuration, and where each of its keys was written."""

    config: Config
    places: Layer


def load(
    path: Path | None,
    env: Mapping[str, str],
    flags: Mapping[str, object],
    defaults: Mapping[str, Any] | None = None,
) -> Config:
    """The configuration from a file (None: no file), then OOMWATCH_ variables, then flags; later ones win.

    ``defaults`` is a document under all of them. ``flags`` has the names of FLAGS; None and empty tuples count as not
    given. Raises ConfigError with every problem.
    """
    return load_with_places(path, env, flags, defaults).config


def load_with_places(
    path: Path | None,
    env: Mapping[str, str],
    flags: Mapping[str, object],
    defaults: Mapping[str, Any] | None = None,
) -> Loaded:
    """As load, with the places of keys for check_files."""
    layer = Layer(dict(defaults or {}))
    problems: list[Problem] = []
    if path is not None:
        try:
            from_file, problems = read_yaml(read_text(path), str(path))
            resolve_files(Config, from_file.data, path.parent)
            layer = layer.overlaid(from_file)
        except ConfigError as error:
            problems.extend(error.problems)
    from_env, more = _from_environment(env)
    layer = layer.overlaid(from_env).overlaid(_from_flags(flags))
    config, invalid = validate(Config, layer, Origin(str(path or "configuration")))
    problems += [*more, *invalid]
    if problems or config is None:
        raise ConfigError(in_order(problems))
    return Loaded(config, layer)


def _from_environment(env: Mapping[str, str]) -> tuple[Layer, list[Problem]]:
    known = {setting.variable: setting for setting in settings()}
    layer = Layer()
    problems: list[Problem] = []
    for variable, text in env.items():
        if not variable.startswith(PREFIX) or variable in OTHER_VARIABLES or not text.strip():
            continue
        if variable.startswith(_TESTS):
            continue
        if variable in known:
            problems += _put_variable(layer, known[variable], text)
        elif not _SERVICE_LINK.fullmatch(variable) and not _SERVICE_ADDRESS.match(text):
            problems.append(Problem(Origin(variable), "", _unknown_variable(variable, known)))
    return layer, problems


def _unknown_variable(variable: str, known: Mapping[str, Setting]) -> str:
    for name, setting in known.items():
        if variable.startswith(f"{name}__") and setting.field.sections:
            return f"items of a list cannot be set alone. Put the whole list into {name}, as YAML."
    inside = [name for name in known if name.startswith(f"{variable}__")]
    if inside:
        return f"a section cannot be set as a whole. Its keys can: {', '.join(inside)}."
    hint = did_you_mean(variable.removeprefix(PREFIX), [name.removeprefix(PREFIX) for name in known])
    hint = hint.replace('"', f'"{PREFIX}', 1)
    return f"unknown variable.{hint or ' docs/configuration.md lists all of them.'}"


def _put_variable(layer: Layer, setting: Setting, text: str) -> list[Problem]:
    if setting.field.sections:
        value, inner, problems = read_yaml_value(text, setting.variable, setting.path)
        if not problems:
            layer.put(setting.path, value, Origin(setting.variable))
            layer.where.update(inner.where)
        return problems
    value = text.strip()
    given: object = value
    if setting.field.many or setting.field.type_name in ("headers", "labels"):
        given = read_yaml_value(value, setting.variable)[0]
    if setting.field.many and not isinstance(given, list):
        given = [part.strip() for part in value.split(",")]
    layer.put(setting.path, given, Origin(setting.variable))
    return []


def _from_flags(flags: Mapping[str, object]) -> Layer:
    layer = Layer()
    for name, value in flags.items():
        if value is not None and value != ():
            layer.put(FLAGS[name], value, Origin(f"--{name}"))
    return layer


# --- what a configuration says ---------------------------------------------------------------------------------


def effective(config: Config) -> str:
    """All settings with their defaults as YAML, secrets masked."""
    return dump_yaml(as_written(config))


def config_hash(config: Config) -> str:
    """16 hexadecimal digits that are equal where all settings are; masked secrets and files' contents do not count."""
    return hashlib.sha256(effective(config).encode()).hexdigest()[:16]


# --- files that the configuration names ------------------------------------------------------------------------


def check_files(config: Config, places: Layer | None = None) -> list[Problem]:
    """What is wrong with the files that a configuration names; they are read, nothing is sent anywhere."""
    places = places or Layer()
    faults = {path: _file_fault(path, file) for path, file in named_files(config)}
    tls: dict[KeyPath, TlsConfig] = {("discovery", "tls"): config.discovery.tls}
    tls.update({("engines", index, "tls"): engine.tls for index, engine in enumerate(config.engines)})
    tls["history", "prometheus", "tls"] = config.history.prometheus.tls
    for kind, servers in (("alertmanagers", config.alerting.alertmanagers), ("webhooks", config.alerting.webhooks)):
        tls.update({("alerting", kind, index, "tls"): server.tls for index, server in enumerate(servers)})
    for section, setting in tls.items():
        pair = (*section, "cert_file"), (*section, "key_file")
        if setting.cert_file and not any(faults.get(path) for path in pair):
            faults[pair[0]] = load_certificate(ssl.create_default_context(), setting.cert_file, setting.key_file)
    problems = [
        Problem(places.origin(path, Origin("configuration")), key_text(path), f"{fault}.")
        for path, fault in faults.items()
        if fault
    ]
    if config.web.config_file and not faults["web", "config_file"]:
        problems += check_web_config(config.web.config_file)
    return in_order(problems)


def _file_fault(path: KeyPath, file: Path) -> str:
    try:
        if path[-1] in ("bearer_token_file", "password_file", "url_file"):
            read_secret(file)
        elif path[-1] == "ca_file":
            ssl.create_default_context(cafile=str(file))
        else:
            with file.open("rb") as readable:
                readable.read(1)
    except ssl.SSLError:
        return f"{file} holds no certificate in PEM form"
    except OSError as error:
        return f"{file} cannot be read: {(error.strerror or str(error)).lower()}"
    except ValueError as error:
        return f"{file} is not usable: {error}"
    return ""
