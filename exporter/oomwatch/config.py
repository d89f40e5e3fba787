"""The configuration: a YAML file, then environment variables, then flags; everything wrong is reported at once.

Durations are seconds, sizes bytes, shares 0-1. With no configuration at all every default holds, and vLLM engines
of this host are found by themselves.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal
from urllib.parse import SplitResult, urlsplit, urlunsplit

from pydantic import AfterValidator, BeforeValidator, Field

from oomwatch.observations import EngineFacts
from oomwatch.settings import Contradiction, Duration, File, Kind, Section, Size, Texts, sequence

# Prometheus' list of exporters' ports hands out 9100 to 9999, and all of it is taken or asked for.
DEFAULT_PORT = 18666

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@-]{0,127}")
_GPU = re.compile(r"(GPU|MIG)-[0-9A-Za-z/-]+")
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


def _checked_engine_url(value: str) -> str:
    parts = _split_url(value)
    if parts.username is not None or parts.password is not None:
        raise ValueError(
            "the URL holds credentials, which would end up in logs and labels. "
            "Take them out and use basic_auth with a password_file"
        )
    if parts.query or parts.fragment:
        raise ValueError("the URL has a query or a fragment. Give the server's base URL or its /metrics")
    return value


def _checked_proxy_url(value: str) -> str:
    parts = _split_url(value)
    if parts.path not in ("", "/") or parts.query or parts.fragment:
        raise ValueError("a proxy's URL has no path")
    return value


def _checked_gpus(value: tuple[str, ...]) -> tuple[str, ...]:
    for uuid in value:
        if not _GPU.fullmatch(uuid):
            raise ValueError(f'"{uuid}" is not the uuid of a GPU or a MIG slice')
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
    for address in value:
        if split_address(address) is None:
            raise ValueError(f'"{address}" is not host:port')
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
Addresses = Annotated[
    Texts, AfterValidator(_checked_addresses), Kind("list of addresses", "host:port, :port or [IPv6]:port")
]


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
    headers: Headers = Field(default_factory=dict, description="Further headers to send. Shown masked.")
    proxy_url: ProxyUrl | None = Field(
        default=None,
        description="Proxy to go through. The environment's proxies are never used. Shown without credentials.",
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

    @classmethod
    def contradictions(cls, data: Mapping[str, Any]) -> Iterator[Contradiction]:
        if data.get("bearer_token_file") and data.get("basic_auth"):
            yield Contradiction(("bearer_token_file",), "basic_auth is set as well. Keep one of the two")
        headers = data.get("headers")
        if isinstance(headers, Mapping) and "authorization" in {str(name).lower() for name in headers}:
            yield Contradiction(("headers",), "Authorization belongs in bearer_token_file or basic_auth")
        if data.get("tls") and str(data.get("url", "")).lower().startswith("http://"):
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

    gpu: Duration = Field(default=15.0, ge=1, le=300, description="GPU memory and health by NVML.")
    processes: Duration = Field(
        default=60.0,
        ge=1,
        le=3600,
        description="The GPUs' process lists, which cost more; rounded to a multiple of intervals.gpu.",
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
        given = [key for key in ("process", "container", "pod_uid") if data.get(key)]
        if not given:
            yield Contradiction((), "one of process, container and pod_uid is required")
        if len(given) > 1:
            yield Contradiction((given[1],), f"{given[0]} is set as well. Keep one")


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


class WebConfig(Section):
    """The daemon's own HTTP server."""

    listen_address: Addresses = Field(
        default=(f":{DEFAULT_PORT}",), description="Where to listen; without a host, on every interface."
    )
    config_file: File | None = Field(
        default=None,
        description="Web configuration with TLS and basic authentication, in the form of Prometheus' exporters.",
    )
    enable_lifecycle: bool = Field(default=False, description="Whether POST /-/reload and /-/release are served.")
    max_requests: int = Field(default=40, ge=1, le=1000, description="Requests served at the same time; more wait.")


class Config(Section):
    """Everything that can be set."""

    engines: tuple[EngineConfig, ...] = Field(
        default=(), description="vLLM servers to scrape, beside those that are found."
    )
    discovery: DiscoveryConfig = Field(default=DiscoveryConfig())
    intervals: IntervalsConfig = Field(default=IntervalsConfig())
    nvml: NvmlConfig = Field(default=NvmlConfig())
    neighbours: tuple[NeighbourConfig, ...] = Field(
        default=(), description="Known users of GPU memory that are no engines."
    )
    exposition: ExpositionConfig = Field(default=ExpositionConfig())
    log: LogConfig = Field(default=LogConfig())
    web: WebConfig = Field(default=WebConfig())

    @classmethod
    def contradictions(cls, data: Mapping[str, Any]) -> Iterator[Contradiction]:
        for key in ("engines", "neighbours"):
            yield from _twice(data, key, "name")
        yield from _twice(data, "engines", "url")

    def timeout(self, engine: EngineConfig | None) -> float:
        """Seconds that a request to an engine may take; None stands for one that was found."""
        return min((engine or self.discovery).timeout, self.intervals.scrape)


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
