"""What the command line of a vLLM server tells. Read in vLLM 0.5.5 to 0.33: `vllm serve` and the modules before it."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

DEFAULT_PORT = 8000

_PYTHON = re.compile(r"(python|pypy)[\d.]*t?$")
_PYTHON_OPTIONS_WITH_VALUE = ("-X", "-W", "--check-hash-based-pycs")
_SERVER_MODULES = (
    "vllm.entrypoints.openai.api_server",
    "vllm.entrypoints.api_server",
    "vllm.entrypoints.launchers.api_server.entry",
)
_CLI_MODULES = ("vllm", "vllm.entrypoints.cli.main", "vllm.scripts")
_SERVER_SCRIPTS = tuple(module.replace(".", "/") + ".py" for module in _SERVER_MODULES)

_FLAGS = frozenset({"headless", "grpc", "data-parallel-multi-port-external-lb", "help"})
_LISTS = frozenset({"served-model-name"})
_VALUES = frozenset(
    {
        "config",
        "distributed-executor-backend",
        "gpu-memory-utilization",
        "host",
        "kv-offloading-size",
        "kv-transfer-config",
        "max-model-len",
        "max-num-batched-tokens",
        "max-num-seqs",
        "model",
        "port",
        "ssl-certfile",
        "ssl-keyfile",
        "uds",
    }
)
_SHORTEST_ABBREVIATION = 4

_HUMAN = re.compile(r"(\d+)(\.\d+)?([kKmMgGtT])")
_POWERS = {"k": 1, "m": 2, "g": 3, "t": 4}

_HUB_CACHE = re.compile(r"models--[^/]*?--([^/]+)/snapshots/[^/]+/?$")
_UNFIT_FOR_NAME = re.compile(r"[^A-Za-z0-9._-]+")
_LONGEST_NAME = 64


@dataclass(frozen=True)
class ServerCommand:
    """A vLLM server as its command line describes it; None where it says nothing.

    ``port_known`` is False where a ``--config`` file that may name a port could not be read.
    """

    name: str
    host: str | None = None
    port: int = DEFAULT_PORT
    port_known: bool = True
    uds: str | None = None
    https: bool = False
    headless: bool = False
    grpc: bool = False
    multi_port: bool = False  # one API server per data-parallel rank, on ports from ``port`` on
    ray: bool = False
    gpu_memory_utilization: float | None = None
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    kv_connector: bool | None = None


def is_server(arguments: bytes) -> bool:
    """Whether /proc/PID/cmdline is a vLLM server's."""
    if b"vllm" not in arguments:
        return False
    argv = [part.decode(errors="replace") for part in arguments.rstrip(b"\0").split(b"\0")]
    return server_arguments(argv) is not None


def server_arguments(argv: Sequence[str]) -> tuple[str, ...] | None:
    """The arguments behind ``vllm serve`` or the server's module; None where this is no vLLM server.

    ``vllm bench``, ``vllm chat`` and the like are none, nor are shells that have such a command in one argument.
    """
    if not argv:
        return None
    python = _PYTHON.match(os.path.basename(argv[0])) is not None
    kind, rest = _python_program(argv) if python else (_script_kind(argv[0]), argv[1:])
    if kind == "cli" and rest and rest[0] == "serve":
        rest = rest[1:]
    elif kind != "server":
        return None
    return None if any(word in ("-h", "--help") or word.startswith("--help=") for word in rest) else tuple(rest)


def _python_program(argv: Sequence[str]) -> tuple[str, Sequence[str]]:
    position = 1
    while position < len(argv):
        word = argv[position]
        if word in _PYTHON_OPTIONS_WITH_VALUE:
            position += 2
        elif word.startswith("-m"):
            module, rest = (word[2:], argv[position + 1 :]) if len(word) > 2 else ("", argv[position + 1 :])
            if not module:
                module, rest = (rest[0], rest[1:]) if rest else ("", ())
            kind = "server" if module in _SERVER_MODULES else "cli" if module in _CLI_MODULES else ""
            return kind, rest
        elif word.startswith("-c") or word == "-":
            return "", ()
        elif word.startswith("-"):
            position += 1
        else:
            return _script_kind(word), argv[position + 1 :]
    return "", ()


def _script_kind(path: str) -> str:
    if os.path.basename(path) == "vllm":
        return "cli"
    return "server" if path.endswith(_SERVER_SCRIPTS) else ""


def parse_server(arguments: Sequence[str], read_config: Callable[[str], bytes]) -> ServerCommand:
    """Read a server's arguments as vLLM does: the file of --config first, then the command line over it.

    ``read_config`` returns the file's text, or raises OSError. What vLLM itself would refuse counts as not given.
    """
    model, options = _options(arguments)
    from_config = _config_options(options["config"][-1], read_config) if "config" in options else {}
    config_read = from_config is not None
    given = {**(from_config or {}), **options}

    def text(name: str) -> str | None:
        values = given.get(name)
        return values[-1] if values else None

    port = _number(text("port"), int)
    utilization = _number(text("gpu-memory-utilization"), float)
    served = given.get("served-model-name", [])
    connector = "kv-transfer-config" in given or "kv-offloading-size" in given
    return ServerCommand(
        name=engine_name(served[0] if served else model or text("model") or ""),
        host=text("host"),
        port=DEFAULT_PORT if port is None else port,
        port_known=port is not None or config_read,
        uds=text("uds"),
        https="ssl-keyfile" in given or "ssl-certfile" in given,
        headless="headless" in given,
        grpc="grpc" in given,
        multi_port="data-parallel-multi-port-external-lb" in given,
        ray=text("distributed-executor-backend") == "ray",
        gpu_memory_utilization=utilization if utilization is not None and 0 < utilization <= 1 else None,
        max_model_len=human_int(text("max-model-len")),
        max_num_seqs=human_int(text("max-num-seqs")),
        max_num_batched_tokens=human_int(text("max-num-batched-tokens")),
        kv_connector=True if connector else False if config_read else None,
    )


def _options(arguments: Sequence[str]) -> tuple[str | None, dict[str, list[str]]]:
    """The positional model and the options that matter here, by name without dashes; a repeated one: the last."""
    model: str | None = None
    options: dict[str, list[str]] = {}
    position = 0
    while position < len(arguments):
        word = arguments[position]
        position += 1
        if not word.startswith("-"):
            model = model or word
            continue
        spelled, equals, value = word.partition("=")
        name = _option_name(spelled)
        if name == "config" and equals:
            continue  # vLLM reads the file only where the name stands apart
        if name in _FLAGS:
            options[name] = []
        elif equals:
            values = [value]
            options.update({name: values} if name else {})
        else:
            values = []
            while position < len(arguments) and not arguments[position].startswith("-"):
                if values and name not in _LISTS:
                    break
                values.append(arguments[position])
                position += 1
            options.update({name: values} if name else {})
    return model, options


def _option_name(spelled: str) -> str | None:
    """vLLM takes underscores for dashes, ``--option.key`` for a part of a JSON option, and unique abbreviations."""
    name = spelled.lstrip("-").split(".", 1)[0].replace("_", "-")
    ours = _FLAGS | _LISTS | _VALUES
    if not spelled.startswith("--") or name in ours:
        return name if spelled.startswith("--") else None
    longer = [option for option in ours if option.startswith(name)]
    return longer[0] if len(name) >= _SHORTEST_ABBREVIATION and len(longer) == 1 else None


def _config_options(path: str, read_config: Callable[[str], bytes]) -> dict[str, list[str]] | None:
    """Options by name from the file of --config; None when it cannot be read."""
    try:
        loaded: Any = yaml.safe_load(read_config(path))
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return None
    if not isinstance(loaded, Mapping):
        return None
    options: dict[str, list[str]] = {}
    for key, value in loaded.items():
        name = str(key).replace("_", "-")
        if value is False or value is None or value == []:
            continue
        options[name] = [str(item) for item in value] if isinstance(value, list) else [str(value)]
    return options


def _number(text: str | None, kind: type[float]) -> Any:
    try:
        return None if text is None else kind(text)
    except ValueError:
        return None


def human_int(text: str | None) -> int | None:
    """vLLM's whole numbers: "1k" is 1000, "1K" 1024, "25.6k" 25600. None for "auto", -1 and what vLLM refuses."""
    if text is None:
        return None
    match = _HUMAN.fullmatch(text.strip())
    if match is None:
        return int(text) if text.strip().isdigit() else None
    whole, fraction, suffix = match.groups()
    power = _POWERS[suffix.lower()]
    if suffix.islower():
        return int(float(whole + (fraction or "")) * 1000**power)
    return None if fraction else int(whole) * 1024**power


def engine_name(model: str) -> str:
    """A label for a model: the last part of its name or path, without characters that are awkward in labels.

    A snapshot in Hugging Face's cache is named after its model, not its commit. Query strings, which may hold
    signatures, are cut off.
    """
    plain = re.split(r"[?#]", model, maxsplit=1)[0]
    cached = _HUB_CACHE.search(plain)
    last = cached.group(1) if cached else plain.rstrip("/").rsplit("/", 1)[-1]
    return _UNFIT_FOR_NAME.sub("-", last).strip("-._")[:_LONGEST_NAME] or "vllm"
