"""Documents that are made from the code: ``python -m oomwatch.docs`` writes them, ``--check`` tells which are old.

Some are made as a whole; in others, which people write, the parts between marks are.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import click

from oomwatch.config import DEFAULT_PORT, FLAGS, OTHER_VARIABLES, PREFIX, Config
from oomwatch.detection import Thresholds, field_name
from oomwatch.detectors.registry import KINDS
from oomwatch.families import DERIVED, metrics_markdown
from oomwatch.incidents import TABLE
from oomwatch.settings import DURATION, FILE, FOLDER, SIZE, Described, Section, described, key_text
from oomwatch.verdicts import CATALOGUE, Entry
from oomwatch.webconfig import CIPHER_SUITES, WebConfig

EXAMPLE = f"""\
engines:
  - name: chat
    url: http://127.0.0.1:8000
    log:
      container: 7d4e0b6a1f22
  - name: embeddings
    url: https://gpu-7.example.org:8443/metrics
    timeout: 3s
    max_page_bytes: 32MiB
    basic_auth:
      username: metrics
      password_file: secrets/embeddings-password
    tls:
      ca_file: tls/ca.pem
      cert_file: tls/client.pem
      key_file: tls/client.key
    headers:
      X-Scope: node
    gpu_memory_utilization: 0.9
    max_model_len: 8192
    kv_connector: false
    weights_bytes: 15.25GiB
    log:
      file: /var/log/vllm/embeddings.log
  - name: batch
    url: http://127.0.0.1:8001
    bearer_token_file: secrets/batch-token
    probe:
      model: llama-3.1-8b
      interval: 10m
      timeout: 2m
      bearer_token_file: secrets/batch-api-key
    proxy_url: http://proxy.example.org:3128
    kv_pool_blocks: 27000
    kv_pool_bytes: 48GiB
    gpus: [GPU-5a3f0c1e-93b1-4d6e-8f0a-2b7c9d1e4f60]
    log:
      journal: vllm-batch.service

discovery:
  enabled: true
  timeout: 5s

intervals:
  gpu: 15s
  processes: 1m
  scrape: 15s
  host: 30s
  discovery: 15s

nvml:
  enabled: true
  deadline: 5s
  release_for: 5m

probe:
  directory: [/run/oomwatch, /srv/vllm/probe]
  interval: 5s

engine_logs:
  enabled: true
  interval: 10s
  docker_directory: /var/lib/docker/containers
  kubernetes_directory: /var/log/containers

neighbours:
  - name: dcgm
    process: dcgm*
  - name: notebooks
    container: 3f2a91c07d5e

detection:
  thresholds:
    kv_block_leak:
      ticket_share: 0.04
  overrides:
    - engine: prefill-*
      thresholds:
        kv_block_leak:
          hold_time: 20m
    - gpu: GPU-5a3f0c1e-93b1-4d6e-8f0a-2b7c9d1e4f60
      thresholds:
        gpu_memory_leak:
          ticket_growth: 1GiB
  off:
    - engine: embeddings
      verdicts: [kv-*, preemption-pressure]
  windows:
    - reason: driver update
      start: 2026-11-30T02:00:00Z
      end: 2026-11-30T04:00:00Z
    - reason: weekly restart of the batch engines
      engine: batch*
      verdicts: [engine-stuck, source-stale]
      days: [sun]
      begins: "23:30"
      ends: "01:00"
      zone: Europe/Berlin

history:
  enabled: true
  directory: /var/lib/oomwatch
  keep: 1d
  max_bytes: 256MiB
  keep_floors: 30d
  prometheus:
    url: http://prometheus.example.org:9090
    bearer_token_file: secrets/prometheus-token

alerting:
  alertmanagers:
    - url: https://alertmanager.example.org
      basic_auth:
        username: oomwatch
        password_file: secrets/alertmanager-password
      tls:
        ca_file: tls/ca.pem
  webhooks:
    - url_file: secrets/webhook-url
  labels:
    cluster: gpu-east
    instance: gpu-node-1:18666
  external_url: http://gpu-node-1.example.org:18666
  runbooks: https://runbooks.example.org/oomwatch

exposition:
  process_series_per_gpu: 32
  stale_after_intervals: 3
  forget_after: 1d

log:
  level: info
  format: json

web:
  listen_address: ["127.0.0.1:{DEFAULT_PORT}", "[::1]:{DEFAULT_PORT}"]
  config_file: web.yml
  enable_lifecycle: true
  max_requests: 40
"""

WEB_EXAMPLE = """\
tls_server_config:
  cert_file: tls/server.pem
  key_file: tls/server.key
  client_auth_type: RequireAndVerifyClientCert
  client_ca_file: tls/clients-ca.pem
  client_allowed_sans: [prometheus.example.org]
  min_version: TLS13

http_server_config:
  headers:
    Strict-Transport-Security: max-age=31536000
    X-Content-Type-Options: nosniff

basic_auth_users:
  # The password is "correct horse". Make your own: htpasswd -nBC 10 ""
  prometheus: $2b$10$BLl4KBGUt0lB8MSfmh6OxeDaSpDbli.J.VIlvhwvqJuIjikXW6xim

rate_limit:
  interval: 50ms
  burst: 20
"""


def configuration_markdown() -> str:
    """docs/configuration.md."""
    parts = [
        _INTRODUCTION,
        "## Example\n\nEvery section, as a file:\n",
        f"```yaml\n{EXAMPLE}```\n",
        _WRITING,
        "## Keys\n",
        *_sections(),
        "## Flags\n",
        _table(("Flag", "Sets"), ((f"`--{flag}`", f"`{key_text(path)}`") for flag, path in FLAGS.items())),
        "## Other environment variables\n",
        _table(("Variable", "Meaning"), ((f"`{name}`", text) for name, text in OTHER_VARIABLES.items())),
        _WEB_INTRODUCTION,
        f"```yaml\n{WEB_EXAMPLE}```\n",
        _keys(WebConfig),
        f"Cipher suites: {', '.join(f'`{name}`' for name in CIPHER_SUITES)}.\n",
    ]
    return "\n".join(parts)


_INTRODUCTION = f"""\
# Configuration

<!-- Made from exporter/oomwatch/config.py by python -m oomwatch.docs: change the models, not this file. -->

No configuration is needed: without one, GPUs are read, vLLM engines on this host are found by themselves, and the
server listens on port {DEFAULT_PORT}.

Settings come from three places. A later one wins over an earlier one:

1. the YAML file that `--config.file` names;
2. environment variables: `{PREFIX}`, then the key in capitals with two underscores between its parts, such as
   `{PREFIX}INTERVALS__SCRAPE=5s`. An empty variable counts as not set. Lists of sections are given whole, as YAML:
   `{PREFIX}ENGINES='[{{name: chat, url: "http://127.0.0.1:8000"}}]'`; a list of texts also with commas in between;
3. flags.

A section that stands in several places is put together key by key; a list is replaced as a whole. An unknown key or
variable is an error. Variables that Kubernetes makes for a service called oomwatch are left alone.

`oomwatch config check` prints everything that is wrong at once, one a line, with file, line, column, key, and what is
allowed; `oomwatch config show` prints what holds, defaults included, with secrets masked. On SIGHUP or
`POST /-/reload` the file is read again; a bad one changes nothing and is reported in the log and in a metric.
"""

_WRITING = """\
## How values are written

- **duration**: `15s`, `1m30s`, `250ms`, `2h`, `1d`, or a plain number of seconds.
- **size**: `16MiB`, `1.5GiB` (powers of 1024), `80GB` (powers of 1000), or a plain number of bytes.
- **file**: a path. In a file it is relative to that file's folder, elsewhere to the working directory.
- A key without a value counts as absent. The YAML is version 1.2's: `yes` and `1:30` are texts, a key may stand once.
"""

_WEB_INTRODUCTION = """\
## Web configuration file

`web.config_file` (`--web.config.file`) names a file with TLS, basic authentication and a rate limit for the server, in
the form that [Prometheus' exporters share](https://github.com/prometheus/exporter-toolkit/blob/master/docs/web-configuration.md).
It is read again when it or a certificate changes, without a restart; a bad change keeps what was good and is reported.
TLS itself can be switched on and off by a restart only.

Three things differ from exporters written in Go. Each is an error that says so, never ignored: clients' certificates
that are asked for are always verified (no `RequestClientCert`, no `RequireAnyClientCert`), `client_ca_file` is
required for that, and `curve_preferences` holds one curve at most. HTTP/2 is not spoken; `http2: true` is accepted,
because it is the default and clients fall back by themselves.

The password in this example is "correct horse":
"""


def _sections() -> Iterable[str]:
    for name, found in described(Config).items():
        if found.section or found.sections:
            yield from _section((name,), found)


def _section(path: tuple[str, ...], found: Described) -> Iterable[str]:
    """A heading, what the section is, its keys in a table, and below it what has a heading of its own."""
    section = found.section or found.sections
    assert section is not None
    about = inspect.getdoc(section) if len(path) < 3 else found.info.description
    yield f"{'#' * (len(path) + 2)} {'.'.join(path)}\n\n{about}\n"
    if found.sections:
        yield f"A list, as a whole in `{PREFIX}{'__'.join(path).upper()}`. Each item:\n"
        yield _keys(section)
        return
    below = {name: inner for name, inner in described(section).items() if inner.sections or _is_chapter(inner)}
    if len(below) < len(described(section)):
        yield _keys(section, path)
    for name, inner in below.items():
        yield from _section((*path, name), inner)


def _is_chapter(found: Described) -> bool:
    """Whether a section is too much for rows in a table: the thresholds, with a section for each verdict."""
    return found.section is Thresholds or found.name in _VERDICTS_KEYS


_VERDICTS_KEYS = frozenset(described(Thresholds))


def _keys(section: type[Section], variable: tuple[str, ...] | None = None) -> str:
    """A table of a section's keys; ``variable`` begins their environment variables, None where they have none."""
    headings = ["Key", "Type", "Default", "Allowed", "Meaning"]
    if variable:
        headings.insert(4, "Environment variable")
    rows = []
    for path, found in _leaves(section):
        default = _default(found, inside=path[:-1])
        row = [f"`{'.'.join(path)}`", found.type_name, default, _allowed(found), found.info.description or ""]
        if variable:
            row.insert(4, f"`{PREFIX}{'__'.join((*variable, *path)).upper()}`")
        rows.append(row)
    return _table(headings, rows)


def _leaves(section: type[Section], path: tuple[str, ...] = ()) -> Iterable[tuple[tuple[str, ...], Described]]:
    for name, found in described(section).items():
        if found.section and not _is_chapter(found):
            yield from _leaves(found.section, (*path, name))
        elif not found.sections:
            yield (*path, name), found


def _default(found: Described, inside: tuple[str, ...]) -> str:
    if found.section:
        return ""  # a chapter, whose own tables tell
    if found.info.is_required():
        return f"required in {'.'.join(inside)}" if inside else "required"
    value = found.info.get_default(call_default_factory=True)
    text = found.shown(value)
    return f"`{text}`" if text and text not in ("[]", "{}") else ""


def _allowed(found: Described) -> str:
    """Without what the types' own paragraph says."""
    if found.section:
        return "keys of detection.thresholds"
    return found.limits if found.kind in (DURATION, SIZE, FILE, FOLDER) else found.allowed


def _table(headings: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    headings = list(headings)
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines) + "\n"


# --- parts of documents that people write ------------------------------------------------------------------------

_ABOUT = {
    "rank": "a rank of an engine",
    "engine": "an engine",
    "device": "a GPU or a MIG slice",
    "held": "a process of an engine on a device",
    "process": "a host process of an engine",
}


def _verdicts_table() -> str:
    rows = []
    for entry in CATALOGUE.values():
        about = [_ABOUT[kind.about] for kind in KINDS if kind.verdict == entry.name]
        thresholds = f"[thresholds](configuration.md#detectionthresholds{field_name(entry.name)})" if about else ""
        told = " and ".join(about) or _instead(entry)
        rows.append((f"`{entry.name}`", entry.killer, entry.worst, told, f"{entry.says}", thresholds))
    return _table(("Verdict", "Killer", "At worst", "About", "Says", ""), rows)


def _instead(entry: Entry) -> str:
    return f"in the place of `{entry.instead_of}`" if entry.instead_of else "not concluded yet"


_SCOPES = {
    "device": "on the same device",
    "engine": "of the same engine",
    "rank": "of the same rank",
    "engine-and-devices": "of the same engine, its ranks and its devices",
}


def _incidents_table() -> str:
    rows = (
        (
            f"`{rule.cause}`",
            ", ".join(f"`{name}`" for name in rule.symptoms) or "every verdict",
            _SCOPES[rule.scope],
        )
        for rule in TABLE
    )
    return _table(("Cause", "Explains", "Where"), rows)


def _derived_table() -> str:
    rows = (
        (f"`{derived.family.name}`", f"`{derived.verdict}`", f"`{derived.key}`", derived.family.meaning)
        for derived in DERIVED
    )
    return _table(("Metric", "Detector", "Evidence", "Meaning"), rows)


PARTS: Mapping[str, Mapping[str, Callable[[], str]]] = {
    "detection.md": {"verdicts": _verdicts_table, "incidents": _incidents_table, "derived": _derived_table},
}
"""File names in docs/ that people write, with the functions that make what stands between their marks."""


def filled(name: str, text: str) -> str:
    """A document with its made parts as the code has them: ``<!-- made: NAME -->`` to ``<!-- end -->``."""

    def part(match: re.Match[str]) -> str:
        return f"<!-- made: {match[1]} -->\n\n{PARTS[name][match[1]]()}\n<!-- end -->"

    return re.sub(r"<!-- made: (\w+) -->.*?<!-- end -->", part, text, flags=re.DOTALL)


DOCUMENTS: Mapping[str, Callable[[], str]] = {
    "configuration.md": configuration_markdown,
    "metrics.md": metrics_markdown,
}
"""File names in docs/, and the functions that make their text."""


def made(folder: Path) -> dict[Path, str]:
    """The text of every document in a folder; one that people write is left out where it is not there."""
    written = (folder / name for name in PARTS)
    return {
        **{folder / name: make() for name, make in DOCUMENTS.items()},
        **{path: filled(path.name, _read(path)) for path in written if path.is_file()},
    }


def outdated(texts: Mapping[Path, str]) -> list[Path]:
    """The files that are missing or have another text."""
    return [path for path, text in texts.items() if not path.is_file() or _read(path) != text]


def write(texts: Mapping[Path, str], *, check: bool, module: str) -> None:
    """Write the files that are out of date and say so; with ``check`` write none, name them and exit with 1.

    ``module`` is the one whose command makes them.
    """
    old = outdated(texts)
    for path in old:
        if check:
            click.echo(f"{path} is out of date: python -m {module} writes it anew.", err=True)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(texts[path], encoding="utf-8")
            click.echo(f"{path} written.")
    if check and old:
        raise SystemExit(1)


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@click.command(help="Writes the documents that are made from the code.")
@click.option("--check", is_flag=True, help="Write nothing; exit 1 and name the documents that are out of date.")
@click.option(
    "--folder",
    type=click.Path(path_type=Path),
    default=Path("docs"),
    show_default=True,
    help="Where the documents are.",
)
def main(check: bool, folder: Path) -> None:
    write(made(folder), check=check, module="oomwatch.docs")


if __name__ == "__main__":
    main()
