"""`oomwatch plan` as people type it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from oomwatch.cli import main
from oomwatch.plan.gpus import TOTALS, named
from oomwatch.plan.memory import GIB
from oomwatch.plan.model import ModelError
from tests.conftest import MakeSim
from tests.nvml_sim import Process, environment
from tests.plan.startups import LLAMA31_8B


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "llama-8b"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA31_8B))
    return folder


def typed(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, ["plan", *map(str, arguments)])


def test_it_says_first_whether_it_starts_and_then_why(model: Path) -> None:
    result = typed(model, "--gpu", "H100")
    assert result.exit_code == 0
    assert "It starts." in result.output
    assert "--max-model-len 131072, --max-num-seqs 1024" in result.output
    for word in ("weights", "activations", "KV pool", "tokens:", "--gpu-memory-utilization  0."):
        assert word in result.output


def test_a_start_that_fails_names_the_error_that_vllm_would_print(model: Path) -> None:
    result = typed(model, "--gpu", "RTX 4090")
    assert result.exit_code == 1
    assert "It does not start." in result.output
    assert "To serve at least one request with the model's max seq len" in result.output


def test_json_has_every_figure_with_its_bar_and_source(model: Path) -> None:
    result = typed(model / "config.json", "--gpu", "80GiB", "--vllm-version", "0.11.2", "--format", "json", "-tp", "2")
    made = json.loads(result.output)
    assert made["starts"] == "yes"
    assert made["flags"]["tensor_parallel_size"] == 2
    figures = [
        made["budget_bytes"],
        made["pool_bytes"],
        *made["inside_bytes"].values(),
        *made["outside_bytes"].values(),
    ]
    for figure in figures:
        assert figure["low"] <= figure["value"] <= figure["high"]
        assert figure["source"]
    assert set(made["outside_bytes"]) == {"context", "CUDA graphs"}


def test_sizes_do_in_place_of_a_model() -> None:
    result = typed("--weights", "16GiB", "--kv-bytes-per-token", "128KiB", "--gpu", "H100", "--max-model-len", "8192")
    assert result.exit_code == 0
    assert "requests of 8,192 tokens at once" in result.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["/nowhere", "--gpu", "H100"], "/nowhere is not there"),
        (["--gpu", "H100"], "give a model's folder or config.json, or its size with --weights"),
        (["--weights", "1GiB", "--gpu", "H100"], "give --max-model-len"),
        (["--weights", "1GiB", "--gpu", "H1000"], "--gpu H1000 is not one of T4, L4"),
        (["--weights", "1GiB", "--gpu", "A100"], "could be A100 40GB or A100 80GB"),
        (["--weights", "1GiB", "--gpu", "80Q"], "--gpu 80Q is no size"),
        (["--weights", "16G"], "16G is no size"),
        (["--max-model-len", "long"], "long is no number of tokens"),
        (["--max-model-len", "0"], "0 is no number of tokens"),
        (["--weights", "1GiB", "--gpu", "H100", "--vllm-version", "new"], "new is no release of vLLM"),
    ],
)
def test_what_is_missing_or_wrong_is_said_with_status_2(arguments: list[str], said: str) -> None:
    result = typed(*arguments)
    assert result.exit_code == 2
    assert said in result.output


@pytest.mark.parametrize(("given", "tokens"), [("32768", 32768), ("32k", 32000), ("32K", 32768), ("1.5k", 1500)])
def test_lengths_are_read_as_vllm_reads_them(model: Path, given: str, tokens: int) -> None:
    result = typed(model, "--gpu", "H200", "--max-model-len", given, "--format", "json")
    assert json.loads(result.output)["flags"]["max_model_len"] == tokens


class TestGpus:
    @pytest.mark.parametrize("name", TOTALS)
    def test_every_name_is_its_own(self, name: str) -> None:
        assert named(name, 0).name == name

    @pytest.mark.parametrize(
        ("given", "name"),
        [
            ("NVIDIA H100 80GB HBM3", "H100"),
            ("nvidia a100-sxm4-80gb", "A100 80GB"),
            ("NVIDIA GeForce RTX 4090", "RTX 4090"),
            ("h100 nvl", "H100 NVL"),
            ("Tesla T4", "T4"),
        ],
    )
    def test_the_drivers_names_are_known(self, given: str, name: str) -> None:
        assert named(given, 0).name == name

    def test_a_size_is_taken_as_it_is(self) -> None:
        assert named("79.5GiB", 3).total.value == 79.5 * GIB
        with pytest.raises(ModelError, match="no size"):
            named("80 elephants", 0)


def test_without_a_gpu_named_those_of_the_node_are_read_with_what_is_held_there(
    model: Path, make_sim: MakeSim, nvml_library: Path
) -> None:
    sim = make_sim(2)
    sim.set_processes(0, [Process(os.getpid(), 30 * GIB)], used=30 * GIB)
    command = [sys.executable, "-m", "oomwatch.cli", "plan", str(model), "--format", "json", "-tp", "2"]
    environ = {**os.environ, **environment(nvml_library, sim)}

    def run(*more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*command, *more], env=environ, capture_output=True, text=True, timeout=60, check=False)

    result = run()
    made = json.loads(result.stdout)
    assert made["device"]["held_bytes"] >= 30 * GIB
    assert json.loads(run("--held", "0").stdout)["device"]["held_bytes"] == 0
    assert result.returncode == 1
    assert made["starts"] == "no"
