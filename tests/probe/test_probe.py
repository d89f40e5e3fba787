"""The probe in a process: where it begins, where it keeps quiet, and that it leaves its process alone.

The processes are real; their vLLM is a scheduler of a few lines in a module of vLLM's name.
"""

from __future__ import annotations

import importlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import pytest

import oomwatch
import oomwatch_probe
from oomwatch.probe_layout import Absence, Report, decode
from tests.e2e.processes import wait_until
from tests.probe.torch_shapes import MIB

REPOSITORY = Path(__file__).parents[2]
WAIT = "import time\nwhile True: time.sleep(0.01)"
MAKE = "import vllm.v1.core.sched.scheduler as module; scheduler = module.Scheduler(65); scheduler.admit('a', 3)"
REGISTER = "import oomwatch_probe; oomwatch_probe.register()"


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def environment(tmp_path: Path, run_folder: Path) -> dict[str, str]:
    """A process in it finds the probe, and a vLLM that is a scheduler alone."""
    module = tmp_path / "path" / "vllm" / "v1" / "core" / "sched" / "scheduler.py"
    module.parent.mkdir(parents=True)
    module.write_text("from tests.probe.engine_core import Scheduler\n", encoding="utf-8")
    (tmp_path / "path" / "vllm" / "version.py").write_text("__version__ = '0.99.0'\n", encoding="utf-8")
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(tmp_path / "path"), str(REPOSITORY), str(REPOSITORY / "probe")]),
        "OOMWATCH_PROBE_DIR": str(run_folder),
        "OOMWATCH_PROBE_INTERVAL": "0.05",
    }


class Process:
    def __init__(self, lines: Sequence[str], environment: dict[str, str]) -> None:
        self.popen = subprocess.Popen(
            [sys.executable, "-c", "\n".join(lines)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
            start_new_session=True,
        )

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        if self.popen.poll() is None:
            os.killpg(self.popen.pid, signal.SIGKILL)
        self.popen.communicate(timeout=30)

    def go_on(self) -> None:
        """It waits for a line."""
        assert self.popen.stdin is not None
        self.popen.stdin.write("\n")
        self.popen.stdin.flush()

    def line(self) -> str:
        """The next that it writes."""
        assert self.popen.stdout is not None
        return self.popen.stdout.readline()

    def end(self) -> tuple[str, str]:
        """Its standard output and standard error, when it has ended well."""
        out, error = self.popen.communicate(timeout=30)
        assert self.popen.returncode == 0, error
        return out, error


def reports(folder: Path) -> dict[int, Report]:
    """By the pid in each file."""
    found = {}
    for path in folder.glob("probe-*.oomwatch"):
        data = path.read_bytes()
        if data:
            report = decode(data)
            pid = report.numbers["pid"]
            assert not isinstance(pid, Absence)
            found[pid] = report
    return found


def wait_for_number(folder: Path, name: str, n: int = 1) -> dict[int, Report]:
    """The reports, as soon as ``n`` of them have this number."""

    def there() -> bool:
        values = [report.numbers[name] for report in reports(folder).values()]
        return sum(not isinstance(value, Absence) for value in values) >= n

    wait_until(there, 30, f"{n} processes tell of {name}", interval_s=0.01)
    return reports(folder)


def test_it_is_released_with_the_daemon() -> None:
    assert oomwatch_probe.__version__ == oomwatch.__version__
    assert (REPOSITORY / "probe" / "LICENSE").read_bytes() == (REPOSITORY / "LICENSE").read_bytes()


class TestWhereItBegins:
    def test_a_process_with_a_scheduler_tells_of_its_blocks(
        self, environment: dict[str, str], run_folder: Path
    ) -> None:
        with Process([REGISTER, "import vllm.version", MAKE, WAIT], environment) as process:
            wait_for_number(run_folder, "blocks_living")
            # The first count may have been before the request.
            wait_until(lambda: reports(run_folder)[process.popen.pid].numbers["blocks_living"] != 0, 30, "a request")
            report = reports(run_folder)[process.popen.pid]
        assert (report.numbers["blocks_total"], report.numbers["blocks_living"]) == (64, 3)
        assert report.numbers["allocated_bytes"] is Absence.NOT_YET
        assert report.numbers["uid"] == os.getuid()
        assert (report.texts["scheduler"], report.texts["vllm_version"]) == ("Scheduler", "0.99.0")

    def test_one_without_has_no_thread_and_no_file(self, environment: dict[str, str], run_folder: Path) -> None:
        lines = [REGISTER, "import threading; print([thread.name for thread in threading.enumerate()])"]
        with Process(lines, environment) as process:
            assert process.end() == ("['MainThread']\n", "")
        assert not run_folder.exists()

    def test_turned_off_it_does_nothing(self, environment: dict[str, str], run_folder: Path) -> None:
        lines = [REGISTER, MAKE, "import sys; print('oomwatch_probe.probe' in sys.modules)"]
        with Process(lines, {**environment, "OOMWATCH_PROBE": "0"}) as process:
            assert process.end() == ("False\n", "")
        assert not run_folder.exists()

    def test_loaded_several_times_it_is_there_once(self, environment: dict[str, str], run_folder: Path) -> None:
        lines = [
            REGISTER,
            REGISTER,
            MAKE,
            REGISTER,
            "import threading; print(threading.active_count(), flush=True)",
            WAIT,
        ]
        with Process(lines, environment) as process:
            assert process.line() == "2\n"
            assert len(wait_for_number(run_folder, "blocks_living")) == 1

    def test_a_forked_process_tells_of_itself(self, environment: dict[str, str], run_folder: Path) -> None:
        """vLLM forks its processes where it can, and does not load its plugins there again."""
        with Process([REGISTER, MAKE, "import os; os.fork()", MAKE.partition("; ")[2], WAIT], environment) as process:
            found = wait_for_number(run_folder, "blocks_living", 2)
        assert process.popen.pid in found
        assert len(found) == 2

    def test_a_forked_process_without_a_scheduler_leaves_its_parents_file(
        self, environment: dict[str, str], run_folder: Path
    ) -> None:
        """It ends as an interpreter does, with what the parent had registered for that."""
        fork = "input()\nimport os\nif os.fork() == 0: raise SystemExit\nos.wait()\nprint('done', flush=True)"
        with Process([REGISTER, MAKE, fork, WAIT], environment) as process:
            wait_for_number(run_folder, "blocks_living")
            (path,) = run_folder.iterdir()
            before = path.stat().st_ino
            process.go_on()
            assert process.line() == "done\n"
            written = reports(run_folder)[process.popen.pid].sequence
            wait_until(
                lambda: reports(run_folder)[process.popen.pid].sequence > written + 1, 30, "it goes on", interval_s=0.01
            )
            assert path.stat().st_ino == before

    def test_the_entry_point_is_the_one_that_vllm_looks_for(self) -> None:
        lines = (REPOSITORY / "probe" / "pyproject.toml").read_text(encoding="utf-8").splitlines()
        name, _, value = lines[lines.index('[project.entry-points."vllm.general_plugins"]') + 1].partition(" = ")
        point = metadata.EntryPoint(name, value.strip('"'), "vllm.general_plugins")
        assert point.load() is importlib.import_module("oomwatch_probe").register


class TestAWorker:
    TORCH = "import sys; from tests.probe.torch_shapes import Torch; torch = sys.modules['torch'] = Torch()"

    def test_tells_of_its_allocator_once_cuda_is_initialised(
        self, environment: dict[str, str], run_folder: Path
    ) -> None:
        lines = [self.TORCH, REGISTER, "input(); torch.initialise()", WAIT]
        with Process(lines, environment) as process:
            assert not run_folder.exists()
            process.go_on()
            report = wait_for_number(run_folder, "free_bytes")[process.popen.pid]
        assert (report.numbers["reserved_bytes"], report.numbers["device_index"]) == (3604 * MIB, 1)
        assert report.numbers["blocks_total"] is Absence.NOT_YET
        assert report.texts["torch_version"] == "2.13.0"

    def test_has_told_of_a_failed_allocation_before_it_dies_of_it(
        self, environment: dict[str, str], run_folder: Path
    ) -> None:
        die = f"input(); torch.fail({384 * MIB}); import os; os.kill(os.getpid(), 9)"
        environment["OOMWATCH_PROBE_INTERVAL"] = "0.5"
        with Process([self.TORCH, REGISTER, "torch.initialise()", die], environment) as process:
            wait_for_number(run_folder, "stats_time_ns")
            process.go_on()
            assert process.popen.wait(30) == -signal.SIGKILL
            numbers = reports(run_folder)[process.popen.pid].numbers
        assert (numbers["oom_observed"], numbers["oom_request_bytes"]) == (1, 384 * MIB)
        assert (numbers["oom_device_free_bytes"], numbers["oom_reserved_bytes"]) == (5 * MIB, 3604 * MIB)
        assert numbers["oom_largest_free_block_bytes"] == 1024 * MIB


class TestItsEnd:
    def test_a_process_that_ends_takes_its_file_along(self, environment: dict[str, str], run_folder: Path) -> None:
        with Process([REGISTER, MAKE, "input()"], environment) as process:
            wait_for_number(run_folder, "blocks_living")
            process.go_on()
            assert process.end() == ("", "")
        assert list(run_folder.iterdir()) == []

    def test_so_does_a_child_of_multiprocessing(self, environment: dict[str, str], run_folder: Path) -> None:
        """Which ends without the interpreter's own goodbye."""
        lines = [
            "import multiprocessing, sys, time",
            "def core(told):",
            f"    {REGISTER}; {MAKE}",
            "    told.recv()",
            "ours, theirs = multiprocessing.Pipe()",
            "child = multiprocessing.get_context('fork').Process(target=core, args=(theirs,)); child.start()",
            "input(); ours.send(1); child.join(); print(child.exitcode)",
        ]
        with Process(lines, environment) as process:
            wait_for_number(run_folder, "blocks_living")
            process.go_on()
            assert process.end() == ("0\n", "")
        assert list(run_folder.iterdir()) == []

    def test_the_file_of_a_killed_process_goes_with_the_next_one(
        self, environment: dict[str, str], run_folder: Path
    ) -> None:
        with Process([REGISTER, MAKE, WAIT], environment) as killed:
            wait_for_number(run_folder, "blocks_living")
        assert set(reports(run_folder)) == {killed.popen.pid}
        with Process([REGISTER, MAKE, WAIT], environment) as process:
            wait_until(lambda: set(reports(run_folder)) == {process.popen.pid}, 30, "the next one is alone", 0.01)

    def test_signals_are_the_programs_own(self, environment: dict[str, str], run_folder: Path) -> None:
        handler = "import signal; signal.signal(signal.SIGTERM, lambda *_: exit(7))"
        with Process([REGISTER, handler, MAKE, WAIT], environment) as process:
            wait_for_number(run_folder, "blocks_living")
            process.popen.send_signal(signal.SIGTERM)
            assert process.popen.wait(30) == 7

    def test_a_folder_that_could_not_be_made_again_for_a_while_gets_its_file(
        self, environment: dict[str, str], run_folder: Path
    ) -> None:
        with Process([REGISTER, MAKE, WAIT], environment) as process:
            wait_for_number(run_folder, "blocks_living")
            shutil.rmtree(run_folder)
            run_folder.write_text("no folder", encoding="utf-8")
            assert process.popen.stderr is not None
            assert str(run_folder) in process.popen.stderr.readline()
            run_folder.unlink()
            wait_for_number(run_folder, "blocks_living")

    def test_a_folder_that_was_emptied_gets_its_file_again(self, environment: dict[str, str], run_folder: Path) -> None:
        """As the restart of a service does with its own folder below /run."""
        with Process([REGISTER, MAKE, WAIT], environment):
            wait_for_number(run_folder, "blocks_living")
            for path in run_folder.iterdir():
                path.unlink()
            run_folder.rmdir()
            wait_for_number(run_folder, "blocks_living")


class TestWhatItDoesNotKnow:
    GO_ON = "scheduler.schedule(); scheduler.update_from_output(); print('goes on')"

    def test_a_folder_that_cannot_be_made_is_one_line(self, environment: dict[str, str], tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        environment["OOMWATCH_PROBE_DIR"] = str(tmp_path / "file" / "run")
        lines = [REGISTER, MAKE, "import threading, time", "while threading.active_count() > 1: time.sleep(0.01)"]
        with Process([*lines, self.GO_ON], environment) as process:
            out, error = process.end()
        assert out == "goes on\n"
        (line,) = error.splitlines()
        assert f"in process {process.popen.pid}: cannot make its file: " in line
        assert line.endswith("Make the folder, or name another one in OOMWATCH_PROBE_DIR.")

    def test_a_scheduler_without_its_calls_is_one_line(self, environment: dict[str, str], run_folder: Path) -> None:
        spoil = "import tests.probe.engine_core as core; del core.Scheduler.update_from_output"
        with Process([REGISTER, spoil, MAKE, "print('goes on')"], environment) as process:
            out, error = process.end()
        assert out == "goes on\n"
        (line,) = error.splitlines()
        assert line.startswith("oomwatch-probe does not read the block pool, this vLLM's scheduler is unknown to it: ")
        assert not run_folder.exists()

    def test_a_scheduler_that_is_built_otherwise_is_one_line(
        self, environment: dict[str, str], run_folder: Path
    ) -> None:
        spoil = (
            "import tests.probe.engine_core as core; init = core.KVCacheManager.__init__; "
            "core.KVCacheManager.__init__ = lambda self, *made: (init(self, *made), delattr(self, 'coordinator'))[0]"
        )
        make = MAKE.partition("; scheduler.admit")[0]
        with Process([REGISTER, spoil, make, "input()", self.GO_ON], environment) as process:
            wait_until(
                lambda: any(report.texts["blocks_note"] for report in reports(run_folder).values()),
                30,
                "the note is there",
                interval_s=0.01,
            )
            (report,) = reports(run_folder).values()
            process.go_on()
            out, error = process.end()
        assert out == "goes on\n"
        (line,) = error.splitlines()
        assert line.endswith("not a scheduler that the probe knows: KVCacheManager has no coordinator")
        assert report.numbers["blocks_ownerless"] is Absence.SWITCHED_OFF

    @pytest.mark.parametrize("value", ["", "soon", "0", "-3"])
    def test_an_interval_that_is_none_is_not_used(self, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
        probe = importlib.import_module("oomwatch_probe.probe")
        monkeypatch.setenv("OOMWATCH_PROBE_INTERVAL", value)
        assert probe.interval_s() >= probe.SHORTEST_INTERVAL_S
