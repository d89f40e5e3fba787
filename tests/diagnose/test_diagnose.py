"""A post-mortem from nothing but a log: what happened, by which numbers, and what to change."""

from __future__ import annotations

import gzip
import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from oomwatch.cli import main
from oomwatch.database import FILE, Block, Limits, opened
from oomwatch.diagnose.report import killer_text
from oomwatch.enginelog.events import Entry as LogEntry
from oomwatch.enginelog.events import Origin, OutOfMemory, Refused
from oomwatch.enginelog.killer import cause_of
from oomwatch.enginelog.lines import line_of
from oomwatch.recording import to_line

DATA = Path(__file__).parents[1] / "data"
CAPTURED = sorted(path for path in (DATA / "captures").glob("*/*.log") if path.name != "pip-freeze.log")
GIB, MIB = 1024**3, 1024**2

OOM = (
    "(EngineCore_DP0 pid=7) ERROR 11-30 09:00:00 [core.py:710] torch.OutOfMemoryError: CUDA out of memory. Tried to "
    "allocate {wanted}. GPU 0 has a total capacity of 79.25 GiB of which {free} is free. Including non-PyTorch memory, "
    "this process has 78.10 GiB memory in use. Of the allocated memory 76.00 GiB is allocated by PyTorch, and "
    "{reserved} is reserved by PyTorch but unallocated. If reserved but unallocated memory is large try setting "
    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
)
START = """\
(APIServer pid=1) INFO 11-30 08:00:00 [api_server.py:1287] vLLM API server version 0.27.1
(EngineCore_DP0 pid=7) INFO 11-30 08:00:10 [core.py:121] Initializing a V1 LLM engine (v0.27.1) with config: \
model='m', max_seq_len=32768, tensor_parallel_size=1
(EngineCore_DP0 pid=7) INFO 11-30 08:01:00 [gpu_model_runner.py:5405] Model loading took 15.0 GiB memory and 5.4 seconds
(EngineCore_DP0 pid=7) INFO 11-30 08:01:20 [kv_cache_utils.py:2235] GPU KV cache size: 460,496 tokens
(EngineCore_DP0 pid=7) INFO 11-30 08:01:20 [kv_cache_utils.py:2236] Maximum concurrency for 32,768 tokens per request: \
14.05x
(EngineCore_DP0 pid=7) INFO 11-30 08:01:30 [gpu_worker.py:955] Free memory on device (78.84/79.25 GiB) on startup. \
Desired GPU memory utilization is (0.92, 72.91 GiB). Actual usage is 15.26 GiB for consumed memory (weights + \
non-torch), 1.44 GiB for peak activation, and 0.23 GiB for CUDAGraph memory. Replace gpu_memory_utilization config \
with `--kv-cache-memory=59000000000` (54.95 GiB) to fit into requested memory, or `--kv-cache-memory=65000000000` \
(60.54 GiB) to fully utilize gpu memory. Current kv cache memory in use is 56.21 GiB.
(APIServer pid=1) INFO:     Application startup complete.
(APIServer pid=1) INFO 11-30 08:30:00 [loggers.py:248] Engine 000: Avg prompt throughput: 1.0 tokens/s, Avg generation \
throughput: 2.0 tokens/s, Running: 3 reqs, Waiting: 0 reqs, GPU KV cache usage: 7.2%, Prefix cache hit rate: 0.0%
"""
DEATH = "(EngineCore_DP0 pid=7) ERROR 11-30 09:00:01 [core.py:710] EngineCore encountered a fatal error.\n"


def oom(wanted: str, free: str, reserved: str) -> str:
    return START + OOM.format(wanted=wanted, free=free, reserved=reserved) + "\n" + DEATH


@pytest.fixture
def log(tmp_path: Path) -> Callable[[str], Path]:
    def write(text: str) -> Path:
        path = tmp_path / "server.log"
        path.write_text(text, encoding="utf-8")
        return path

    return write


def typed(*arguments: str | Path, stdin: bytes | str | None = None) -> Result:
    return CliRunner().invoke(main, ["diagnose", *map(str, arguments)], input=stdin)


def as_json(*arguments: str | Path) -> Any:
    return json.loads(typed(*arguments, "--format", "json").stdout)


class TestStory:
    def test_it_tells_what_was_promised_taken_and_asked_for(self, log: Callable[[str], Path]) -> None:
        result = typed(log(oom("3.82 GiB", "1.10 GiB", "312.44 MiB")))
        assert result.exit_code == 1
        for said in (
            "1 start of vLLM 0.27.1",
            "promised: --gpu-memory-utilization 0.92, 72.9 GiB, of 79.2 GiB in all, 78.8 GiB free at the start",
            "activations 1.4 GiB",
            "KV pool 56.2 GiB",
            "460,496 tokens, 14.05 requests of 32,768 tokens at once",
            "asked for 3.8 GiB, free 1.1 GiB, reserved by PyTorch but unallocated 312 MiB",
            "out of memory while it served",
            "page: runtime-oom (capacity",
            "--gpu-memory-utilization from 0.92 to 0.88",
        ):
            assert said in result.stdout, said

    def test_the_hint_of_the_error_is_contradicted_where_the_sum_is_too_small(self, log: Callable[[str], Path]) -> None:
        text = typed(log(oom("3.82 GiB", "1.10 GiB", "312.44 MiB"))).stdout
        assert "1.4 GiB free and unallocated < 3.8 GiB asked for, 0.37 times what was asked for" in text
        assert "The error's hint at fragmentation does not help" in text
        assert "PYTORCH_CUDA_ALLOC_CONF" not in text

    def test_and_upheld_where_it_would_have_been_enough(self, log: Callable[[str], Path]) -> None:
        text = typed(log(oom("384.00 MiB", "329.87 MiB", "402.27 MiB"))).stdout
        assert "330 MiB free < 384 MiB asked for <= 732 MiB free and unallocated, 1.91 times" in text
        assert "page: runtime-oom (fragmentation" in text
        assert "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True" in text

    def test_a_healthy_log_has_nothing_wrong(self, log: Callable[[str], Path]) -> None:
        result = typed(log(START))
        assert result.exit_code == 0
        assert "Nothing is wrong with its memory" in result.stdout

    def test_the_year_that_a_log_leaves_out_is_its_latest(self, log: Callable[[str], Path]) -> None:
        """A log of November that was last written to in January is of the year before."""
        path = log(START)
        os.utime(path, (1_767_700_000, 1_767_700_000))  # 2026-01-06
        assert "Start 1, 2025-11-30 08:00:00 UTC" in typed(path).stdout

    @pytest.mark.parametrize(
        ("error", "said"),
        [
            (OutOfMemory(wanted=GIB, free=2 * GIB, reserved=0), "sizes were rounded, or another took it meanwhile"),
            (OutOfMemory(wanted=GIB, free=GIB // 2), "does not tell what was unallocated"),
            (OutOfMemory(dummy_requests=1024), "the error has no numbers"),
            (OutOfMemory(wanted=GIB, host=True), "the host's memory ran out"),
        ],
    )
    def test_every_kind_of_error_is_said_in_its_own_words(self, error: OutOfMemory, said: str) -> None:
        assert said in killer_text(error, cause_of(error))


class TestCaptures:
    """Logs of real engines."""

    @pytest.mark.parametrize("path", CAPTURED, ids=lambda path: f"{path.parent.name}/{path.stem}")
    def test_each_is_read_without_an_error(self, path: Path) -> None:
        result = typed(path)
        assert result.exit_code in (0, 1) or "nothing in it tells" in result.stderr
        assert result.exception is None or isinstance(result.exception, SystemExit)

    def test_a_context_that_is_too_long_is_told_what_fits(self) -> None:
        text = typed(DATA / "captures" / "0.32.0" / "failure-max-model-len-too-large.log").stdout
        assert "ticket: startup-refused (capacity" in text
        assert "it starts with --max-model-len 1024 at most" in text

    def test_an_end_that_the_log_does_not_explain_is_not_called_healthy(self) -> None:
        result = typed(DATA / "captures" / "0.32.0" / "worker-sigkilled.log")
        assert result.exit_code == 1
        assert "a worker process died" in result.stdout
        assert "journalctl -k" in result.stdout
        assert "Nothing is wrong" not in result.stdout

    def test_host_memory_that_is_too_small(self) -> None:
        text = typed(DATA / "captures" / "0.32.0" / "failure-kv-space-exceeds-memory.log").stdout
        assert "refused: the host has less memory free than the KV cache wants" in text
        assert "Free memory on the host" in text


class TestSources:
    def test_standard_input(self) -> None:
        result = typed("-", stdin=oom("3.82 GiB", "1.10 GiB", "312.44 MiB"))
        assert result.exit_code == 1
        assert "standard input, from standard input" in result.stdout

    def test_gzip_docker_and_several_at_once(self, tmp_path: Path, log: Callable[[str], Path]) -> None:
        text = oom("3.82 GiB", "1.10 GiB", "312.44 MiB")
        packed, docker = tmp_path / "old.log.gz", tmp_path / "docker.json"
        packed.write_bytes(gzip.compress(text.encode()))
        docker.write_text(
            "".join(json.dumps({"log": f"{line}\n", "stream": "stderr"}) + "\n" for line in text.splitlines())
        )
        engines = as_json(log(START), packed, docker)["engines"]
        assert [engine["name"] for engine in engines] == ["server", "old", "docker.json"]
        verdicts = [[one["verdict"] for one in engine["verdicts"]] for engine in engines]
        assert verdicts == [[], ["runtime-oom"], ["runtime-oom"]]

    def test_a_recording_says_what_its_case_says(self) -> None:
        case = next((DATA / "cases").glob("003-*")) / "recording.jsonl.gz"
        (engine,) = as_json(case)["engines"]
        assert engine["name"] == "llm"
        assert {one["verdict"] for one in engine["verdicts"]} >= {"startup-refused"}
        assert engine["starts"][0]["refusals"][0]["reason"] == "budget_above_free"

    def test_a_recording_comes_through_standard_input_too(self) -> None:
        packed = (next((DATA / "cases").glob("003-*")) / "recording.jsonl.gz").read_bytes()
        for content in (packed, gzip.decompress(packed)):
            result = typed("-", stdin=content)
            assert result.exit_code == 1
            assert "llm, from standard input: 1 start of vLLM 0.9.1" in result.stdout

    def test_what_the_daemon_observed(self, tmp_path: Path) -> None:
        t0 = 1_790_000_000.0
        database = opened(tmp_path, Limits(keep=1e12))
        entry = LogEntry(Refused("no_room"), Origin("engine_core", 7))
        written = to_line(line_of(t0, "chat", entry))
        assert written is not None
        database.write([Block.of([written], t0, t0)], t0)
        database.close()
        config = tmp_path / "oomwatch.yml"
        config.write_text(f"history: {{directory: {tmp_path}}}\nweb: {{listen_address: ['127.0.0.1:1']}}\n")
        result = typed("--last", "20000d", "--config.file", config)
        assert (tmp_path / FILE).exists()
        assert "refused: its budget leaves no room for the KV cache" in result.stdout, result.output
        assert result.exit_code == 1

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            ([], "give either logs"),
            (["-", "--last", "2h"], "give either logs"),
            (["--last", "often"], "often is no duration"),
            (["/nowhere.log"], "/nowhere.log: cannot be read: no such file or directory"),
            (["/tmp"], "/tmp: cannot be read: is a directory"),
        ],
    )
    def test_what_cannot_be_read_is_said_with_status_2(self, arguments: list[str], said: str) -> None:
        result = typed(*arguments)
        assert result.exit_code == 2
        assert said in result.stderr

    @pytest.mark.parametrize("content", [b"", b"\0" * 4096, b"hello\nworld\n", b"\x1f\x8bnot gzip at all", b"{" * 9999])
    def test_so_is_a_file_that_tells_nothing_and_the_others_are_printed(
        self, tmp_path: Path, log: Callable[[str], Path], content: bytes
    ) -> None:
        odd = tmp_path / "odd.log"
        odd.write_bytes(content)
        result = typed(odd, log(START))
        assert result.exit_code == 2
        assert f"{odd}: nothing in it tells of an engine's memory" in result.stderr
        assert "1 start of vLLM 0.27.1" in result.stdout

    @pytest.mark.parametrize("end", [b"", b"\xff" * 60])
    def test_a_packed_log_that_is_cut_off_or_damaged_is_told_up_to_there(self, tmp_path: Path, end: bytes) -> None:
        noise = random.Random(1).randbytes(300_000)
        packed = gzip.compress(oom("3.82 GiB", "1.10 GiB", "312.44 MiB").encode() + noise)
        (tmp_path / "cut.gz").write_bytes(packed[:-60] + end)
        result = typed(tmp_path / "cut.gz")
        assert "It could be read up to here only" in result.stdout


def test_nothing_of_a_prompt_or_a_secret_is_printed(log: Callable[[str], Path]) -> None:
    secret = "sk-TOPSECRET"
    lines = (
        f"(APIServer pid=1) INFO 11-30 08:10:00 [logger.py:39] Received request cmpl-1: prompt: '{secret} CUDA out of "
        "memory. Tried to allocate 9.00 GiB.', params: SamplingParams(n=1)\n"
        f"(APIServer pid=1) INFO 11-30 08:10:01 [api_utils.py:286] non-default args: {{'api_key': ['{secret}'], "
        f"'model': '{secret}', 'gpu_memory_utilization': 0.92}}\n"
        f"(EngineCore_DP0 pid=7) ERROR 11-30 08:10:02 [core.py:1] ValueError: {secret}\n"
    )
    path = log(START + lines + OOM.format(wanted="3.82 GiB", free="1.10 GiB", reserved="312.44 MiB") + "\n" + DEATH)
    for result in (typed(path), typed(path, "--format", "json")):
        assert secret not in result.output
        assert "asked for 9 GiB" not in result.output
        assert result.exit_code == 1
