"""The commands as people type them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import click
import pytest
import requests
import yaml
from click.testing import CliRunner, Result

from oomwatch import __version__
from oomwatch.cli import main
from tests.conftest import MakeSim
from tests.e2e.daemon import OomwatchDaemon
from tests.e2e.processes import wait_until
from tests.nvml_sim import GIB, Process, environment
from tests.nvml_sim.layout import Family
from tests.sources.vllm.servers import Engine, FakeVllm

CAPTURES = Path(__file__).parent / "data" / "captures"


COMMANDS = {  # each with what else it is given
    ("run",): (),
    ("check",): (),
    ("demo",): (),
    ("record",): (),
    ("replay",): ("recording.jsonl",),
    ("diagnose",): ("server.log",),
    ("plan",): ("--weights", "1GiB", "--kv-bytes-per-token", "64KiB"),
    ("alerts", "test"): (),
    ("config", "check"): (),
    ("config", "show"): (),
}


def typed(*arguments: str, env: Mapping[str, str] | None = None) -> Result:
    return CliRunner().invoke(main, arguments, env=dict(env or {}))


def run(arguments: Sequence[str | Path], env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "oomwatch.cli", *map(str, arguments)]
    return subprocess.run(
        command, env={**os.environ, **(env or {})}, capture_output=True, text=True, timeout=60, check=False
    )


@pytest.fixture
def config_file(tmp_path: Path) -> Callable[..., Path]:
    def write(**settings: object) -> Path:
        path = tmp_path / "oomwatch.yml"
        path.write_text(yaml.safe_dump(settings), encoding="utf-8")
        return path

    return write


class TestHelp:
    @pytest.mark.parametrize("command", [(), ("alerts",), ("config",), *COMMANDS])
    def test_every_command_explains_itself(self, command: tuple[str, ...]) -> None:
        result = typed(*command, "--help")
        assert result.exit_code == 0
        assert len(result.output.splitlines()) > 5

    def test_names_the_commands_and_the_order_of_settings(self) -> None:
        output = typed("--help").output
        for word in ("run", "check", "demo", "config", "--config.file", "OOMWATCH_"):
            assert word in output

    def test_demo_tells_its_stories(self) -> None:
        output = " ".join(typed("demo", "--help").output.split())
        for story in ("healthy", "capacity", "fragmentation", "leak"):
            assert story in output

    def test_version(self) -> None:
        assert typed("--version").output == f"oomwatch, version {__version__}\n"


def commands_of(group: click.Group) -> Iterator[tuple[str, ...]]:
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from ((name, *rest) for rest in commands_of(command))
        else:
            yield (name,)


class TestRefusals:
    """What is wrong with a configuration, where, and what to do: the same from every command."""

    def test_no_command_is_left_out(self) -> None:
        assert set(commands_of(main)) == set(COMMANDS)

    @pytest.mark.parametrize("command", COMMANDS)
    def test_every_mistake_of_a_file_is_told_in_a_line_of_its_own(
        self, tmp_path: Path, command: tuple[str, ...]
    ) -> None:
        path = tmp_path / "bad.yml"
        path.write_text("intervals:\n  scrape: never\nengins: []\n", encoding="utf-8")
        result = typed(*command, *COMMANDS[command], "--config.file", str(path))
        assert (result.exit_code, result.stdout) == (2, "")
        duration, unknown = result.stderr.splitlines()
        assert duration.startswith(
            f'oomwatch: {path}:2:3: intervals.scrape: "never" is not a duration. Allowed: 1s to 5m'
        )
        assert unknown == f'oomwatch: {path}:3:1: engins: unknown key. Did you mean "engines"?'

    @pytest.mark.parametrize("command", COMMANDS)
    def test_a_file_that_does_not_exist_and_a_bad_variable_are_told_together(
        self, tmp_path: Path, command: tuple[str, ...]
    ) -> None:
        path = tmp_path / "none.yml"
        env = {"OOMWATCH_CONFIG_FILE": str(path), "OOMWATCH_INTERVALS__SCRAPE": "never"}
        result = typed(*command, *COMMANDS[command], env=env)
        assert (result.exit_code, result.stdout) == (2, "")
        told = result.stderr.splitlines()
        assert f"oomwatch: {path}: cannot be read: no such file or directory." in told
        assert any(line.startswith("oomwatch: OOMWATCH_INTERVALS__SCRAPE: intervals.scrape: ") for line in told)

    @pytest.mark.parametrize("command", [("run",), ("demo",), ("config", "check")])
    def test_a_web_configuration_that_cannot_be_used_is_told_before_anything_is_served(
        self, config_file: Callable[..., Path], tmp_path: Path, command: tuple[str, ...]
    ) -> None:
        path = config_file(web={"config_file": "web.yml", "listen_address": "127.0.0.1:0"})
        (tmp_path / "web.yml").write_text("basic_auth_user: {}\n", encoding="utf-8")
        result = typed(*command, "--config.file", str(path), env={"OOMWATCH_HISTORY__ENABLED": "false"})
        assert (result.exit_code, result.stdout) == (2, "")
        problem = 'basic_auth_user: unknown key. Did you mean "basic_auth_users"?'
        assert result.stderr == f"oomwatch: {tmp_path / 'web.yml'}:1:1: {problem}\n"

    def test_what_goes_on_in_lines_below_is_indented(self, tmp_path: Path) -> None:
        result = typed("record", "--url", "http://127.0.0.1:1", env={"OOMWATCH_HISTORY__DIRECTORY": str(tmp_path)})
        first, *rest = result.stderr.splitlines()
        assert (result.exit_code, first) == (2, "oomwatch: there is nothing to record from.")
        assert rest
        assert all(line.startswith("  ") for line in rest)


class TestConfig:
    def test_check_accepts_a_good_file(self, config_file: Callable[..., Path]) -> None:
        path = config_file(engines=[{"name": "chat", "url": "http://127.0.0.1:8000"}])
        result = typed("config", "check", "--config.file", str(path))
        assert (result.exit_code, result.output) == (0, f"{path}: ok, 1 engine configured\n")

    def test_show_prints_what_is_in_force_with_flags_over_variables_over_the_file(
        self, config_file: Callable[..., Path]
    ) -> None:
        path = config_file(log={"level": "warn"}, intervals={"scrape": "20s"}, web={"max_requests": 7})
        result = typed(
            *("config", "show", "--config.file", str(path), "--log.level", "error"),
            env={"OOMWATCH_INTERVALS__SCRAPE": "9s", "OOMWATCH_LOG__LEVEL": "info"},
        )
        shown = yaml.safe_load(result.output)
        assert shown["log"]["level"] == "error"
        assert shown["intervals"]["scrape"] == "9s"
        assert shown["web"]["max_requests"] == 7
        assert shown["nvml"]["deadline"] == "5s"

    def test_show_masks_secrets(self, config_file: Callable[..., Path]) -> None:
        engine = {"name": "chat", "url": "http://127.0.0.1:8000", "headers": {"X-Key": "s3cret"}}
        result = typed("config", "show", "--config.file", str(config_file(engines=[engine])))
        assert result.exit_code == 0
        assert "s3cret" not in result.output


class TestCheck:
    def test_a_node_with_nothing_is_no_fault(self, config_file: Callable[..., Path]) -> None:
        result = run(["check", "--config.file", config_file(discovery={"enabled": False})])
        assert result.returncode == 0
        assert "GPUs: none" in result.stdout
        assert "Engines: none" in result.stdout
        assert result.stderr == ""

    def test_prints_the_sums_that_matter(
        self, config_file: Callable[..., Path], make_sim: MakeSim, nvml_library: Path
    ) -> None:
        sim = make_sim(1)
        sim.set_processes(0, [Process(os.getpid(), 60 * GIB)], used=64 * GIB)
        page = (CAPTURES / "0.32.0" / "06-tiny-pool-saturated-preempting.prom").read_bytes()
        with Engine(FakeVllm(page)) as server:
            facts = {"name": "llm", "url": server.url, "pids": [os.getpid()]}
            path = config_file(engines=[facts], discovery={"enabled": False})
            result = run(["check", "--config.file", path], environment(nvml_library, sim))
            as_json = run(["check", "--config.file", path, "--format", "json"], environment(nvml_library, sim))
        gpu, engine = (line for line in result.stdout.splitlines() if line.startswith(("GPU 0", "llm")))
        assert "80 GiB" in gpu
        assert "64 GiB" in gpu
        assert "60 GiB" in gpu  # the engine's
        assert "4 GiB" in gpu  # nobody's
        assert "32 of 32 blocks" in engine
        assert "60 GiB" in engine
        assert result.returncode == 1  # 4 GiB that nobody holds need a look
        plain = json.loads(as_json.stdout)
        assert plain["engines"][0]["ranks"][0]["kv_blocks_total"] == 32

    def test_a_lost_gpu_is_critical(
        self, config_file: Callable[..., Path], make_sim: MakeSim, nvml_library: Path
    ) -> None:
        sim = make_sim(2)
        path = config_file(discovery={"enabled": False}, nvml={"deadline": "1s"})
        sim.fail(Family.MEMORY, 15, device=1)
        result = run(["check", "--config.file", path], environment(nvml_library, sim))
        assert result.returncode == 2
        assert "critical" in result.stdout
        assert "GPU_IS_LOST" in result.stdout

    def test_a_hung_driver_does_not_keep_it(
        self, config_file: Callable[..., Path], make_sim: MakeSim, nvml_library: Path
    ) -> None:
        sim = make_sim(2)
        sim.hang(Family.MEMORY, device=0)
        path = config_file(discovery={"enabled": False}, nvml={"deadline": "1s"})
        result = run(["check", "--config.file", path], environment(nvml_library, sim))
        assert result.returncode == 2
        assert "hung" in result.stdout


class TestDemo:
    def test_serves_a_node_that_is_not_there(self, tmp_path: Path) -> None:
        arguments = ["--story", "healthy", "--interval", "1", "--speed", "5"]
        with OomwatchDaemon(tmp_path, command=("demo",), arguments=arguments) as daemon:
            page = daemon.wait_for(lambda page: len(page.series("oomwatch_engine_up")) == 3, "three engines")
            assert len(page.series("oomwatch_gpu_info")) == 4
            held = page.series("oomwatch_gpu_memory_held_bytes", holder_kind="neighbour")
            assert len(held) == 1
            assert requests.get(daemon.url, timeout=10).status_code == 200
            os.kill(daemon.pid, signal.SIGTERM)
            wait_until(lambda: daemon.exit_status() is not None, 10, "the demo ends")
            assert daemon.exit_status() == 0

    def test_an_unknown_story_is_refused_with_the_known_ones(self) -> None:
        result = typed("demo", "--story", "nothing")
        assert result.exit_code == 2
        assert "healthy" in result.stderr
