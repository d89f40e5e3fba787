"""What command lines of vLLM servers tell."""

from __future__ import annotations

import pytest

from oomwatch.sources.vllm_command import (
    ServerCommand,
    engine_name,
    human_int,
    is_server,
    parse_server,
    server_arguments,
)


def _no_file(path: str) -> bytes:
    raise FileNotFoundError(path)


def _parse(line: str, config: str | None = None) -> ServerCommand:
    return parse_server(line.split(), _no_file if config is None else lambda _: config.encode())


@pytest.mark.parametrize(
    "line",
    [
        "vllm serve m",
        "/opt/venv/bin/vllm serve m",
        "/opt/venv/bin/python3.12 /opt/venv/bin/vllm serve m",
        "python -m vllm.entrypoints.openai.api_server --model m",
        "python3 -u -X faulthandler -W ignore -m vllm.entrypoints.openai.api_server --model m",
        "python3 -mvllm.entrypoints.openai.api_server --model m",
        "python3 -m vllm.entrypoints.api_server --model m",
        "python3 -m vllm.entrypoints.cli.main serve m",
        "python3 /src/vllm/entrypoints/openai/api_server.py --model m",
    ],
)
def test_servers(line: str) -> None:
    arguments = server_arguments(line.split())
    assert arguments is not None
    assert parse_server(arguments, _no_file).name == "m"
    assert is_server(b"\0".join(line.encode().split()) + b"\0")


@pytest.mark.parametrize(
    "line",
    [
        "vllm bench serve --model m",
        "vllm chat",
        "vllm run-batch -i in -o out --model m",
        "vllm launch render m",
        "vllm serve --help",
        "vllm",
        "python3 -m vllm.entrypoints.openai.run_batch",
        "python3 -c vllm serve",
        "python3 train.py vllm serve",
        "grep vllm serve",
        "VLLM::EngineCore",
        "docker run image vllm serve m",
        "python3",
        "",
    ],
)
def test_no_servers(line: str) -> None:
    assert server_arguments(line.split()) is None


def test_a_shell_that_runs_a_server_is_none() -> None:
    assert server_arguments(["bash", "-c", "vllm serve m"]) is None


@pytest.mark.parametrize(
    ("line", "port"),
    [
        ("m", 8000),
        ("m --port 8001", 8001),
        ("m --port=8001", 8001),
        ("m --port 8001 --port 8002", 8002),
        ("m --port abc", 8000),
    ],
)
def test_the_port(line: str, port: int) -> None:
    assert _parse(line).port == port


def test_facts() -> None:
    command = _parse(
        "org/model --host 0.0.0.0 --gpu_memory_utilization 0.85 --max-model-len 8k --max-num-seqs 64 "
        "--max-num-batched-tokens 16K --ssl-keyfile k --ssl-certfile c "
        '--kv-transfer-config {"kv_connector":"NixlConnector"} --served-model-name chat other --enforce-eager'
    )
    assert command == ServerCommand(
        name="chat",
        host="0.0.0.0",
        https=True,
        gpu_memory_utilization=0.85,
        max_model_len=8000,
        max_num_seqs=64,
        max_num_batched_tokens=16384,
        kv_connector=True,
    )


def test_what_is_not_given_is_not_known() -> None:
    command = _parse("m")
    assert (command.gpu_memory_utilization, command.max_model_len, command.host) == (None, None, None)
    assert command.kv_connector is False


@pytest.mark.parametrize("line", ["m --kv-transfer-config.kv_connector X", "m --kv-offloading-size 10"])
def test_other_ways_to_a_connector(line: str) -> None:
    assert _parse(line).kv_connector is True


def test_abbreviated_options_count_as_argparse_takes_them() -> None:
    assert _parse("m --gpu-memory-util 0.8 --max-model 4096").gpu_memory_utilization == 0.8


@pytest.mark.parametrize(
    ("line", "flag"),
    [
        ("m --headless", "headless"),
        ("m --grpc", "grpc"),
        ("m --data-parallel-multi-port-external-lb", "multi_port"),
        ("m --distributed-executor-backend ray", "ray"),
    ],
)
def test_flags(line: str, flag: str) -> None:
    assert getattr(_parse(line), flag) is True
    assert getattr(_parse("m"), flag) is False


def test_a_model_behind_options_is_found() -> None:
    assert _parse("--port 8001 org/model").name == "model"


def test_the_configuration_file_is_read_and_the_command_line_goes_before_it() -> None:
    config = (
        "model: org/from-file\nport: 9000\nmax_model_len: 4096\nheadless: false\nkv-transfer-config: {kv_role: x}\n"
    )
    command = _parse("--config c.yaml --port 9001", config)
    assert (command.name, command.port, command.port_known) == ("from-file", 9001, True)
    assert (command.max_model_len, command.headless, command.kv_connector) == (4096, False, True)


@pytest.mark.parametrize("config", [None, "- a list", "{", "a: [1"])
def test_an_unreadable_configuration_file_leaves_the_port_unknown(config: str | None) -> None:
    command = _parse("m --config c.yaml", config)
    assert (command.port_known, command.kv_connector) == (False, None)
    assert _parse("m --config c.yaml --port 9001", config).port_known


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("4096", 4096),
        ("1k", 1000),
        ("1K", 1024),
        ("25.6k", 25600),
        ("2m", 2_000_000),
        ("1.5K", None),
        ("auto", None),
        ("-1", None),
        (None, None),
    ],
)
def test_whole_numbers_for_people(text: str | None, value: int | None) -> None:
    assert human_int(text) == value


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", "Llama-3.1-8B-Instruct"),
        ("/models/llama/", "llama"),
        ("/models/hub/models--Qwen--Qwen3-0.6B/snapshots/0123abcd", "Qwen3-0.6B"),
        ("s3://bucket/model?signature=s3cret", "model"),
        ("org/repo:Q4_K_M", "repo-Q4_K_M"),
        ("a model, so called", "a-model-so-called"),
        ("..", "vllm"),
        ("", "vllm"),
        ("x" * 200, "x" * 64),
    ],
)
def test_names_of_engines(model: str, name: str) -> None:
    assert engine_name(model) == name
