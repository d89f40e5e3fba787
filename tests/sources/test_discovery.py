"""vLLM servers are found by themselves, and matched with those that the configuration names."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
import structlog

from oomwatch.observations import EngineFacts
from oomwatch.sources.discovery import Discovery, merge, own_hosts
from oomwatch.sources.proc import PROC, read_stat
from tests.sources.programs import FakeProc, crowd, vllm_server


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        number: int = probe.getsockname()[1]
        return number


@pytest.fixture
def proc(tmp_path: Path) -> FakeProc:
    """A host on which nothing runs but what a test adds. Its processes are another user's: no open files to look at."""
    fake = FakeProc(tmp_path / "proc")
    fake.listen("self")
    return fake


def _found(discovery: Discovery, model: str) -> EngineFacts:
    """The engine of a test's own model: other vLLM servers may run on the machine."""
    return next(facts for facts in discovery.find() if facts.name == model)


def _serve(proc: FakeProc, pid: int, line: str, *, ticks: int = 100, ppid: int = 1) -> None:
    """A server that listens, as another user's process in our network namespace."""
    words = line.split()
    listening_port = int(words[words.index("--port") + 1]) if "--port" in words else 8000
    proc.add(pid, "vllm", "serve", *words, comm="vllm", ticks=ticks, ppid=ppid)
    row = ("0.0.0.0", listening_port, 1000, 70_000 + pid)
    proc.listen(pid, row)
    rows = [("0.0.0.0", 22, 0, 1), row]
    proc.listen("self", *rows)


# --- real processes ------------------------------------------------------------------------------------------------


def test_a_running_server_is_found_with_its_port_and_its_processes(tmp_path: Path, port: int) -> None:
    titles = ("VLLM::EngineCore", "VLLM::Worker_TP0", "VLLM::Worker_TP1")
    with vllm_server(tmp_path, "org/found-8b", "--port", str(port), "--max-model-len", "8k", titles=titles) as server:
        facts = _found(Discovery(), "found-8b")
        assert facts == EngineFacts(
            name="found-8b",
            target=f"http://127.0.0.1:{port}/metrics",
            pids=(server.pid, *sorted(server.children)),
            max_model_len=8000,
            kv_connector=False,
            origin="discovery",
        )


def test_a_server_that_ends_is_no_longer_found_and_keeps_its_name_when_it_comes_back(tmp_path: Path, port: int) -> None:
    discovery = Discovery()
    arguments = ("org/restarted", "--port", str(port))
    with vllm_server(tmp_path, *arguments) as first:
        assert _found(discovery, "restarted").pids == (first.pid,)
    assert "restarted" not in [facts.name for facts in discovery.find()]
    with vllm_server(tmp_path, *arguments) as second:
        assert _found(discovery, "restarted").pids == (second.pid,)


def test_a_configuration_file_beside_the_server_is_read(tmp_path: Path, port: int) -> None:
    config = tmp_path / "engine.yaml"
    config.write_text(f"served-model-name: by-file\nport: {port}\ngpu-memory-utilization: 0.7\n")
    with vllm_server(tmp_path, "m", "--port", str(port), "--config", str(config)):
        facts = _found(Discovery(), "by-file")
        assert facts.target == f"http://127.0.0.1:{port}/metrics"
        assert facts.gpu_memory_utilization == 0.7


def test_an_unreadable_configuration_file_is_made_up_for_by_the_socket(tmp_path: Path, port: int) -> None:
    """The file, which held the port, is gone by now: what the process listens on tells it."""
    code = (
        "import socket, sys; s = socket.socket(); s.bind(('127.0.0.1', int(sys.argv[-1]))); s.listen(); "
        "print('up', flush=True); sys.stdin.read()"
    )
    script = tmp_path / "vllm"
    script.write_text(code)
    command = [sys.executable, str(script), "serve", "org/by-socket", "--config", "gone.yaml", "--seed", str(port)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        assert server.stdout.readline() == "up\n"
        assert _found(Discovery(), "by-socket").target == f"http://127.0.0.1:{port}/metrics"
        server.communicate(timeout=20)


def test_a_port_that_another_process_holds_is_not_taken_for_the_servers(tmp_path: Path, port: int) -> None:
    with socket.socket() as other, vllm_server(tmp_path, "org/elsewhere", "--port", "0") as server:
        other.bind(("127.0.0.1", port))
        other.listen()
        fake = FakeProc(tmp_path / "proc")
        fake.add(server.pid, "vllm", "serve", "org/elsewhere", "--port", str(port), comm="vllm")
        for pid in (str(server.pid), "self"):
            (fake.root / pid / "net").rmdir()
            (fake.root / pid / "net").symlink_to(PROC / "self" / "net")
        (fake.root / str(server.pid) / "fd").symlink_to(PROC / str(server.pid) / "fd")
        discovery = Discovery(proc=fake.root)
        assert _found(discovery, "elsewhere").target is None
        assert f"another process listens on its port {port}" in discovery.problems["elsewhere"]


@pytest.fixture
def own_network() -> tuple[str, ...]:
    prefix = ("unshare", "--net", "--")
    try:
        subprocess.run([*prefix, "true"], check=True, capture_output=True, timeout=20)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("this machine lets nobody make network namespaces")
    return prefix


def test_a_server_in_another_network_is_not_mistaken_for_one_of_this(
    tmp_path: Path, port: int, own_network: tuple[str, ...]
) -> None:
    """Same port here, in use by another program: scraping it would show that one's numbers."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", port))
        other.listen()
        with vllm_server(tmp_path, "org/boxed", "--host", "0.0.0.0", "--port", str(port), before=own_network):
            discovery = Discovery()
            assert _found(discovery, "boxed").target is None
            assert f"its port {port} cannot be reached from here. Add it to engines:" in discovery.problems["boxed"]


def test_a_container_that_can_be_reached_is_asked_at_its_own_address(
    tmp_path: Path, port: int, own_network: tuple[str, ...]
) -> None:
    """Two namespaces with a cable between them, as on a container host's bridge."""
    here, there, network = f"oo{os.getpid()}a", f"oo{os.getpid()}b", "10.213.47"
    code = (
        "import os, subprocess, sys, time\n"
        "def ip(*words): return subprocess.run(['ip', *words], capture_output=True).returncode == 0\n"
        "print(os.getpid(), file=sys.stderr, flush=True)\n"
        "deadline = time.monotonic() + 20\n"
        f"while not ip('address', 'add', '{network}.2/24', 'dev', '{there}') and time.monotonic() < deadline: pass\n"
        f"ip('link', 'set', '{there}', 'up')\n"
        "os.execv(sys.argv[1], sys.argv[1:])\n"
    )
    script = tmp_path / "enter.py"
    script.write_text(code)

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True, timeout=20)

    try:
        ip("link", "add", here, "type", "veth", "peer", "name", there)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("this machine has no virtual network cables")
    with ExitStack() as cleanup:
        cleanup.callback(subprocess.run, ["ip", "link", "delete", here], capture_output=True, timeout=20, check=False)
        ip("address", "add", f"{network}.1/24", "dev", here)
        ip("link", "set", here, "up")
        mover = subprocess.Popen(
            [sys.executable, "-c", _MOVE, str(script), there], stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        cleanup.callback(mover.wait, 20)
        before = (*own_network, sys.executable, str(script))
        with vllm_server(tmp_path, "org/bridged", "--host", "0.0.0.0", "--port", str(port), before=before):
            discovery = Discovery()
            assert _found(discovery, "bridged").target == f"http://{network}.2:{port}/metrics"
            assert discovery.problems == {}


# Moves one end of the cable into the namespace of the process that runs a script, as soon as that runs.
_MOVE = """
import subprocess, sys, time
from pathlib import Path
script, device = sys.argv[1:]
deadline = time.monotonic() + 20
while time.monotonic() < deadline:
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\\0")
        except OSError:
            continue
        if len(words) > 1 and words[1].decode() == script:
            subprocess.run(["ip", "link", "set", device, "netns", path.parent.name], check=True)
            sys.exit()
    time.sleep(0.02)
"""


# --- another user's processes, which tell no more than their command line ---------------------------------------------


def test_another_users_server_is_found_by_its_command_line(proc: FakeProc) -> None:
    _serve(proc, 50, "org/theirs --port 8100")
    assert _found(Discovery(proc=proc.root), "theirs").target == "http://127.0.0.1:8100/metrics"


def test_a_port_of_yet_another_user_is_not_taken_for_the_servers(proc: FakeProc) -> None:
    proc.add(50, "vllm", "serve", "org/theirs", "--port", "8100")
    for pid in (50, "self"):
        proc.listen(pid, ("0.0.0.0", 8100, 33, 1))
    discovery = Discovery(proc=proc.root)
    assert _found(discovery, "theirs").target is None
    assert "another process" in discovery.problems["theirs"]


def test_a_server_that_still_loads_its_model_has_an_address_already(proc: FakeProc) -> None:
    proc.add(50, "vllm", "serve", "org/loading", "--port", "8100")
    for pid in (50, "self"):
        proc.listen(pid, ("0.0.0.0", 22, 0, 1))
    assert _found(Discovery(proc=proc.root), "loading").target == "http://127.0.0.1:8100/metrics"


def test_a_loading_server_in_another_network_has_no_address_and_no_blame(proc: FakeProc) -> None:
    proc.add(50, "vllm", "serve", "org/loading", "--port", "8100")
    proc.listen(50)
    proc.listen("self", ("0.0.0.0", 22, 0, 1))
    discovery = Discovery(proc=proc.root)
    assert _found(discovery, "loading").target is None
    assert discovery.problems == {}


@pytest.mark.parametrize(
    ("bound", "arguments", "url"),
    [
        ("0.0.0.0", "", "http://127.0.0.1:8000/metrics"),
        ("10.1.2.3", "--host 10.1.2.3", "http://10.1.2.3:8000/metrics"),
        ("127.0.0.1", "--ssl-keyfile k --ssl-certfile c", "https://127.0.0.1:8000/metrics"),
        ("127.0.0.1", "--root-path /llm", "http://127.0.0.1:8000/metrics"),
    ],
)
def test_the_address_is_the_one_that_the_socket_is_bound_to(
    proc: FakeProc, bound: str, arguments: str, url: str
) -> None:
    proc.add(50, "vllm", "serve", "m", *arguments.split())
    for pid in (50, "self"):
        proc.listen(pid, (bound, 8000, 1000, 1))
    assert _found(Discovery(proc=proc.root), "m").target == url


@pytest.mark.parametrize(
    ("host", "expected"),
    [("::", "[::1]"), ("0.0.0.0", "127.0.0.1"), ("fd00::5", "[fd00::5]"), ("node7", "node7")],
)
def test_before_it_listens_the_host_option_tells_the_address(proc: FakeProc, host: str, expected: str) -> None:
    proc.add(50, "vllm", "serve", "m", "--host", host)
    assert _found(Discovery(proc=proc.root), "m").target == f"http://{expected}:8000/metrics"


def test_a_port_that_docker_publishes_is_the_way_into_a_container(proc: FakeProc) -> None:
    proc.add(50, "vllm", "serve", "org/docked")
    proc.listen(50, ("0.0.0.0", 8000, 0, 5))
    (proc.root / "50" / "status").write_text("Uid:\t0\t0\t0\t0\nVmRSS:\t 1 kB\nRssAnon:\t 1 kB\n")
    (proc.root / "50" / "net" / "fib_trie").write_text("  |-- 172.17.0.2\n     /32 host LOCAL\n")
    proxy = "docker-proxy -proto tcp -host-ip 0.0.0.0 -host-port 8808 -container-ip 172.17.0.2 -container-port 8000"
    proc.add(40, *proxy.split(), comm="docker-proxy")
    proc.listen("self", ("0.0.0.0", 8808, 0, 9))
    assert _found(Discovery(proc=proc.root), "docked").target == "http://127.0.0.1:8808/metrics"


@pytest.mark.parametrize(("option", "word"), [("--uds /run/v.sock", "Unix socket"), ("--grpc", "gRPC")])
def test_a_server_without_a_page_is_named_with_the_reason(proc: FakeProc, option: str, word: str) -> None:
    proc.add(50, "vllm", "serve", "m", *option.split())
    discovery = Discovery(proc=proc.root)
    assert _found(discovery, "m").target is None
    assert word in discovery.problems["m"]


def test_a_problem_is_logged_once_and_the_command_line_never(proc: FakeProc) -> None:
    proc.add(50, "vllm", "serve", "m", "--grpc", "--api-key", "s3cret")
    discovery = Discovery(proc=proc.root)
    with structlog.testing.capture_logs() as logs:
        discovery.find()
        discovery.find()
    assert [(entry["engine"], entry["pid"]) for entry in logs] == [("m", 50)]
    assert "s3cret" not in str(logs)


# --- several processes, one engine -----------------------------------------------------------------------------------


def test_several_api_servers_and_ranks_are_one_engine(proc: FakeProc) -> None:
    _serve(proc, 50, "org/dp --api-server-count 2 --data-parallel-size 2")
    titles = ["VLLM::APIServer_0", "VLLM::APIServer_1", "VLLM::EngineCore_DP0", "VLLM::EngineCore_DP1"]
    for pid, title in enumerate(titles, start=51):
        proc.add(pid, title, ppid=50)
    proc.add(60, "VLLM::Worker_DP1", ppid=54)
    assert [facts.pids for facts in Discovery(proc=proc.root).find()] == [(50, 51, 52, 53, 54, 60)]


def test_a_child_that_still_has_its_parents_command_line_is_no_second_server(proc: FakeProc) -> None:
    _serve(proc, 50, "org/forked")
    proc.add(51, "vllm", "serve", "org/forked", ppid=50)
    assert [facts.pids for facts in Discovery(proc=proc.root).find()] == [(50, 51)]


def test_a_wrapper_around_a_server_is_none(proc: FakeProc) -> None:
    proc.add(49, "bash", "-c", "vllm serve org/wrapped")
    _serve(proc, 50, "org/wrapped", ppid=49)
    assert [facts.pids for facts in Discovery(proc=proc.root).find()] == [(50,)]


def test_each_rank_with_a_port_of_its_own_is_a_page_of_its_own(proc: FakeProc) -> None:
    proc.add(50, "vllm", "serve", "m", "--data-parallel-multi-port-external-lb", "--port", "8100")
    rows = [("0.0.0.0", 8100 + rank, 1000, rank) for rank in range(2)]
    for rank in range(2):
        proc.add(51 + rank, f"VLLM::APIServer_DP{rank}", ppid=50)
        proc.listen(51 + rank, *rows)
        proc.add(61 + rank, "VLLM::EngineCore", ppid=51 + rank)
    proc.listen("self", *rows)
    assert [(facts.target, facts.pids) for facts in Discovery(proc=proc.root).find()] == [
        ("http://127.0.0.1:8100/metrics", (51, 61)),
        ("http://127.0.0.1:8101/metrics", (52, 62)),
    ]


def test_a_headless_node_has_processes_and_no_page(proc: FakeProc) -> None:
    proc.add(50, "vllm", "serve", "m", "--headless")
    proc.add(51, "VLLM::EngineCore_DP1", ppid=50)
    discovery = Discovery(proc=proc.root)
    facts = _found(discovery, "m")
    assert (facts.target, facts.pids) == (None, (50, 51))
    assert discovery.problems == {}


def test_workers_of_ray_belong_to_the_one_server_that_uses_ray(proc: FakeProc) -> None:
    _serve(proc, 50, "m --distributed-executor-backend ray")
    proc.add(30, "raylet")
    proc.add(31, "ray::RayWorkerWrapper.execute_method", ppid=30)
    proc.add(32, "ray::IDLE", ppid=30)
    discovery = Discovery(proc=proc.root)
    assert _found(discovery, "m").pids == (50, 31)
    _serve(proc, 70, "other --distributed-executor-backend ray --port 8001")
    assert _found(discovery, "m").pids == (50,), "with two servers on Ray, whose worker it is cannot be told"


# --- names -----------------------------------------------------------------------------------------------------------


def _names(discovery: Discovery) -> dict[int, str]:
    return {facts.pids[0]: facts.name for facts in discovery.find() if facts.pids}


def test_two_servers_of_one_model_are_told_apart_by_port(proc: FakeProc) -> None:
    _serve(proc, 60, "org/m --port 8001", ticks=1)
    _serve(proc, 50, "org/m --port 8000", ticks=2)
    for _ in range(2):
        assert _names(Discovery(proc=proc.root)) == {50: "m", 60: "m-8001"}, "whichever came first"


def test_a_restart_changes_no_name(proc: FakeProc) -> None:
    _serve(proc, 50, "org/m --port 8000")
    _serve(proc, 60, "org/m --port 8001")
    discovery = Discovery(proc=proc.root)
    assert _names(discovery) == {50: "m", 60: "m-8001"}
    proc.remove(50)
    proc.remove(60)
    assert _names(discovery) == {}
    _serve(proc, 61, "org/m --port 8001", ticks=900)
    assert _names(discovery) == {61: "m-8001"}
    _serve(proc, 51, "org/m --port 8000", ticks=901)
    assert _names(discovery) == {61: "m-8001", 51: "m"}


def test_pods_with_the_same_model_and_port_get_numbers(proc: FakeProc) -> None:
    for pid in (50, 60, 70):
        proc.add(pid, "vllm", "serve", "org/m", ticks=pid)
        proc.listen(pid, ("0.0.0.0", 8000, 1000, pid))
    assert _names(Discovery(proc=proc.root)) == {50: "m", 60: "m-8000", 70: "m-8000-2"}


def test_a_name_given_by_combination_is_not_given_twice(proc: FakeProc) -> None:
    _serve(proc, 40, "org/m-8001 --port 7000")
    _serve(proc, 50, "org/m --port 8000")
    _serve(proc, 60, "org/m --port 8001")
    assert _names(Discovery(proc=proc.root)) == {40: "m-8001", 50: "m", 60: "m-8001-2"}


# --- what others make of it ------------------------------------------------------------------------------------------

FOUND = EngineFacts("m", "http://127.0.0.1:8000/metrics", pids=(1, 2), max_model_len=512, origin="discovery")


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]", "NODE7", "10.0.0.7", "0.0.0.0"])
def test_a_configured_engine_is_not_found_twice_and_gets_its_processes(host: str) -> None:
    configured = EngineFacts("chat", f"http://{host}:8000/metrics", gpu_memory_utilization=0.9)
    assert merge([configured], [FOUND], hosts=("node7", "10.0.0.7")) == (
        EngineFacts("chat", f"http://{host}:8000/metrics", pids=(1, 2), gpu_memory_utilization=0.9, max_model_len=512),
    )


def test_this_hosts_own_name_counts_as_this_host() -> None:
    configured = EngineFacts("chat", f"http://{socket.gethostname()}:8000/metrics")
    assert merge([configured], [FOUND])[0].pids == (1, 2)
    assert "127.0.0.1" in own_hosts()


def test_the_configurations_word_goes_before_what_was_found() -> None:
    configured = EngineFacts("chat", FOUND.target, pids=(7,), max_model_len=1024)
    assert merge([configured], [FOUND], hosts=()) == (configured,)


def test_an_engine_on_another_host_has_no_processes_here() -> None:
    configured = EngineFacts("far", "http://10.9.9.9:8000/metrics")
    assert merge([configured], [FOUND], hosts=()) == (configured, FOUND)


def test_a_local_engine_whose_processes_are_gone_has_none() -> None:
    """Not None, which would leave the pids of before standing."""
    configured = EngineFacts("chat", "http://localhost:8000/metrics")
    assert merge([configured], [], hosts=())[0].pids == ()


def test_a_found_server_without_an_address_is_the_configured_one_of_its_name() -> None:
    found = EngineFacts("m", None, pids=(1,), origin="discovery")
    configured = EngineFacts("m", "http://172.18.0.5:8000/metrics")
    assert merge([configured], [found], hosts=()) == (EngineFacts("m", configured.target, pids=(1,)),)


def test_a_found_server_does_not_take_a_configured_name() -> None:
    configured = EngineFacts("m", "http://10.9.9.9:8000/metrics")
    assert [facts.name for facts in merge([configured], [FOUND], hosts=())] == ["m", "m-8000"]


# --- cost ------------------------------------------------------------------------------------------------------------


def test_a_pass_over_a_crowded_host_costs_little() -> None:
    with crowd(1000) as program:
        discovery = Discovery()
        discovery.find()
        passes = 12
        before = time.process_time()
        for _ in range(passes):
            discovery.find()
        cost = (time.process_time() - before) / passes
        assert read_stat(PROC, program.pid) is not None
    assert cost < 0.05, "CPU seconds; about 0.005 where this was written"
