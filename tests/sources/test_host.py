"""Processes that engines own or GPUs list, and the host's memory."""

from __future__ import annotations

import mmap
import os
import resource
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from oomwatch.observations import Absent, HostMemory, HostProcess, Observation, ProcessGone, SourceRun
from oomwatch.sources.host import HostSource, role_of
from tests.sources.programs import FakeProc, Program, crowd, idle_program, vllm_server, wait_until

ID = "0123456789abcdef" * 4
UID = "6f1c6d4e-1111-2222-3333-444455556666"


@dataclass
class Heard:
    """A source with what it has published, and a clock that a test moves."""

    proc: Path = Path("/proc")
    cgroup_root: Path = Path("/sys/fs/cgroup")
    now: float = 1000.0
    observations: list[Observation] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.source = HostSource(
            self.observations.append, clock=lambda: self.now, proc=self.proc, cgroup_root=self.cgroup_root
        )

    def read(self, engines: dict[str, tuple[int, ...]], gpu_pids: tuple[int, ...] = ()) -> dict[int, HostProcess]:
        """One pass, and the processes of it."""
        self.observations.clear()
        self.source.read(engines, gpu_pids)
        return {o.pid: o for o in self.observations if isinstance(o, HostProcess)}

    def gone(self) -> list[int]:
        return [o.pid for o in self.observations if isinstance(o, ProcessGone)]

    def run(self) -> SourceRun:
        return next(o for o in self.observations if isinstance(o, SourceRun))


@pytest.fixture
def fake(tmp_path: Path) -> FakeProc:
    return FakeProc(tmp_path / "proc")


@pytest.fixture
def heard(fake: FakeProc, tmp_path: Path) -> Heard:
    (tmp_path / "cgroup").mkdir()
    return Heard(proc=fake.root, cgroup_root=tmp_path / "cgroup")


# --- real processes ------------------------------------------------------------------------------------------------


def test_the_tree_of_an_engine_with_roles_and_ranks(tmp_path: Path) -> None:
    titles = ("VLLM::EngineCore", "VLLM::Worker_DP0_TP1", "python3")
    with vllm_server(tmp_path, "org/m", "--port", "0", titles=titles) as server:
        processes = Heard().read({"m": (server.pid,)})
        core, worker, other = (processes[pid] for pid in server.children)
        assert processes.keys() == {server.pid, *server.children}
        assert (processes[server.pid].role, core.role, worker.role, other.role) == (
            "api_server",
            "engine_core",
            "worker",
            "other",
        )
        assert (core.name, core.rank, worker.rank) == ("VLLM::EngineCore", None, "DP0_TP1")
        assert {process.engine for process in processes.values()} == {"m"}
        assert {process.ppid for process in (core, worker, other)} == {server.pid}


def test_memory_and_start_are_those_of_the_process() -> None:
    """Beside a mebibyte of a file, which is mapped and resident but not anonymous, 64 MiB of its own."""
    code = "import sys; b = bytearray(64 << 20); b[::4096] = b'x' * len(b[::4096]); print('up', flush=True); input()"
    program = Program([sys.executable, "-c", code])
    try:
        process = Heard().read({}, (program.pid,))[program.pid]
        assert isinstance(process.anon, int)
        assert 64 << 20 <= process.anon <= process.rss <= 200 << 20
        assert process.start == pytest.approx(psutil.Process(program.pid).create_time(), abs=0.011)
    finally:
        program.stop()


def test_file_pages_are_not_anonymous(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(os.urandom(16 << 20))
    heard = Heard()
    before = heard.read({}, (os.getpid(),))[os.getpid()]
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        assert sum(mapped[i] for i in range(0, len(mapped), resource.getpagesize())) > 0
        after = heard.read({}, (os.getpid(),))[os.getpid()]
    assert isinstance(before.anon, int)
    assert isinstance(after.anon, int)
    assert after.rss - before.rss > 12 << 20
    assert after.anon - before.anon < 4 << 20


def test_a_process_that_ends_is_told_once() -> None:
    heard = Heard()
    with idle_program() as program:
        assert program.pid in heard.read({}, (program.pid,))
        assert heard.gone() == []
    assert heard.read({}, (program.pid,)) == {}
    assert heard.gone() == [program.pid]
    heard.read({}, (program.pid,))
    assert heard.gone() == []


def test_a_zombie_is_there_and_holds_no_memory() -> None:
    """A GPU may list it still."""
    with subprocess.Popen(["true"]) as child:
        wait_until(lambda: psutil.Process(child.pid).status() == psutil.STATUS_ZOMBIE, "the child has ended")
        process = Heard().read({}, (child.pid,))[child.pid]
    assert (process.rss, process.anon) == (0, 0)


def test_a_zombie_keeps_the_role_it_had(fake: FakeProc, heard: Heard) -> None:
    """The kernel knows 15 bytes of a title: what is left of VLLM::EngineCore_DP1 would be no role at all."""
    title = "VLLM::EngineCore_DP1"
    fake.add(70, title, comm=title[:15])
    living = heard.read({"m": (70,)})[70]
    fake.add(70, comm=title[:15], state="Z")
    zombie = heard.read({"m": (70,)})[70]
    assert (living.role, living.rank, living.name) == ("engine_core", "DP1", title)
    assert (zombie.role, zombie.rank, zombie.name, zombie.anon) == ("engine_core", "DP1", title, 0)


def test_arguments_are_nowhere() -> None:
    with (
        idle_program("VLLM::Worker_TP0", "--api-key=s3cret") as worker,
        idle_program(sys.executable, "s3cret") as other,
    ):
        heard = Heard()
        processes = heard.read({"m": (worker.pid,)}, (other.pid,))
        assert processes[worker.pid].name == "VLLM::Worker_TP0"
        assert "s3cret" not in str(heard.observations)


def test_the_hosts_memory() -> None:
    heard = Heard()
    heard.read({})
    memory = next(o for o in heard.observations if isinstance(o, HostMemory))
    assert memory.total == psutil.virtual_memory().total
    assert 0 < memory.available < memory.total
    assert (heard.run().ok, heard.run().error, heard.run().target) == (True, "", "")


def test_160_processes_cost_little() -> None:
    """Eight GPUs with twenty processes each."""
    with crowd(159) as program:
        heard = Heard()
        heard.read({"m": (program.pid,)})
        before = time.process_time()
        processes = heard.read({"m": (program.pid,)})
        cost = time.process_time() - before
    assert len(processes) == 160
    assert cost < 0.2, "CPU seconds; about 0.02 where this was written"


# --- what a test machine does not have -----------------------------------------------------------------------------


def test_a_pid_that_comes_back_is_another_process(fake: FakeProc, heard: Heard) -> None:
    fake.add(70, comm="job", ticks=100)
    assert heard.read({}, (70,))[70].start == 1_700_000_001.0
    fake.add(70, comm="shell", ticks=900)
    process = heard.read({}, (70,))[70]
    assert (process.name, process.start) == ("shell", 1_700_000_009.0)
    kinds = [type(o) for o in heard.observations if isinstance(o, (HostProcess, ProcessGone))]
    assert kinds == [ProcessGone, HostProcess], "the old one ends before the new one begins"


def test_a_pid_that_comes_back_off_the_gpu_is_not_followed(fake: FakeProc, heard: Heard) -> None:
    fake.add(70, comm="job", ticks=100)
    heard.read({}, (70,))
    fake.add(70, comm="shell", ticks=900)
    assert heard.read({}, ()) == {}
    assert heard.gone() == [70]


def test_a_start_does_not_move_when_the_clock_is_set(fake: FakeProc, heard: Heard) -> None:
    fake.add(70)
    before = heard.read({}, (70,))[70].start
    (fake.root / "stat").write_text("btime 1700003600\n")
    assert heard.read({}, (70,))[70].start == before
    assert heard.gone() == []


def test_a_process_missing_in_a_list_for_a_while_is_still_followed(fake: FakeProc, heard: Heard) -> None:
    """Lists of GPUs fail; five minutes later it counts as gone from the GPU."""
    fake.add(70)
    heard.read({}, (70,))
    heard.now += 200
    assert 70 in heard.read({}, ())
    heard.now += 200
    assert 70 not in heard.read({}, ())
    assert heard.gone() == [70]


def test_containers_pods_and_limits(fake: FakeProc, heard: Heard, tmp_path: Path) -> None:
    path = f"kubepods/burstable/pod{UID}/{ID}"
    (tmp_path / "cgroup" / path).mkdir(parents=True)
    (tmp_path / "cgroup" / path / "memory.max").write_text("max\n")
    (tmp_path / "cgroup" / path).parent.joinpath("memory.max").write_text("68719476736\n")
    fake.add(70, cgroup=f"0::/{path}\n")
    process = heard.read({}, (70,))[70]
    assert (process.container, process.pod_uid, process.memory_limit) == (ID, UID, 64 << 30)


def test_an_old_kernel_tells_anonymous_memory_by_subtraction(fake: FakeProc, heard: Heard) -> None:
    fake.add(70, status="VmRSS:\t 2000 kB\n")
    process = heard.read({}, (70,))[70]
    assert process.anon == process.rss - 100 * resource.getpagesize()


def test_a_kernel_that_does_not_tell_shared_memory_leaves_anonymous_memory_unknown(
    fake: FakeProc, heard: Heard
) -> None:
    fake.add(70, status="VmRSS:\t 2000 kB\n").joinpath("statm").write_text("900 500 0 1 0 1 0\n")
    assert heard.read({}, (70,))[70].anon == Absent("NOT_SUPPORTED")


def test_in_a_container_with_its_own_pids_no_process_is_taken_for_the_gpus(fake: FakeProc, heard: Heard) -> None:
    fake.add(2, comm="sh")
    fake.add(70)
    fake.add(71, "VLLM::EngineCore")
    assert heard.read({"m": (71,)}, (70,)).keys() == {71}


def test_with_titled_api_servers_the_first_process_only_launches(fake: FakeProc, heard: Heard) -> None:
    fake.add(50, "vllm", "serve", "m", comm="vllm")
    fake.add(51, "VLLM::APIServer_0", ppid=50)
    fake.add(52, "VLLM::APIServer_1", ppid=50)
    roles = {pid: process.role for pid, process in heard.read({"m": (50,)}).items()}
    assert roles == {50: "other", 51: "api_server", 52: "api_server"}


def test_without_proc_the_run_fails_and_says_what_to_do(tmp_path: Path) -> None:
    heard = Heard(proc=tmp_path / "nothing")
    assert heard.read({"m": (1,)}, (2,)) == {}
    assert not heard.run().ok
    assert "Run oomwatch with /proc mounted" in heard.run().error


@pytest.mark.parametrize(
    ("title", "role"),
    [
        ("VLLM::APIServer", ("api_server", None)),
        ("VLLM::APIServer_3", ("api_server", None)),
        ("VLLM::APIServer_DP1", ("api_server", "DP1")),
        ("VLLM::EngineCore", ("engine_core", None)),
        ("VLLM::EngineCore_DP0", ("engine_core", "DP0")),
        ("VLLM::Worker", ("worker", None)),
        ("VLLM::Worker_TP0", ("worker", "TP0")),
        ("VLLM::Worker_DP0_PP1_TP3_EP7", ("worker", "DP0_PP1_TP3_EP7")),
        ("mine::Worker_TP0", ("worker", "TP0")),
        ("ray::RayWorkerWrapper.execute_method", ("worker", None)),
        ("VLLM::DPCoordinator", ("other", None)),
        ("python3", ("other", None)),
    ],
)
def test_roles_and_ranks_by_title(title: str, role: tuple[str, str | None]) -> None:
    assert role_of(title) == role
