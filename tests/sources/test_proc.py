"""The table of processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from oomwatch.sources.proc import (
    ProcessEntry,
    ProcessTable,
    ancestors,
    descendants,
    read_stat,
    sees_host_pids,
)
from tests.sources.programs import FakeProc, idle_program, wait_until

PASSES_UNTIL_ALL_WAS_READ = 12


def _entry(pid: int, ppid: int) -> ProcessEntry:
    return ProcessEntry(pid, ppid, 0, "x")


def test_the_table_has_this_process_with_its_parent() -> None:
    entry = ProcessTable().refresh()[os.getpid()]
    assert entry.ppid == os.getppid()


def test_a_name_with_parentheses_and_spaces_does_not_shift_the_fields(tmp_path: Path) -> None:
    proc = FakeProc(tmp_path)
    proc.add(7, ppid=3, comm="a) S 9 (b", ticks=55)
    stat = read_stat(tmp_path, 7)
    assert stat is not None
    assert (stat.comm, stat.ppid, stat.start_ticks) == ("a) S 9 (b", 3, 55)


@pytest.mark.parametrize(
    ("argv", "comm", "title"),
    [
        (["VLLM::EngineCore"], "VLLM::EngineCor", "VLLM::EngineCore"),
        (["VLLM::Worker_DP0_TP1   "], "VLLM::Worker_DP", "VLLM::Worker_DP0_TP1"),
        (["ray::RayWorkerWrapper.execute_method"], "ray::RayWorkerW", "ray::RayWorkerWrapper.execute_method"),
        (["python3", "train.py", "--token=s3cret"], "python3", "python3"),
        (["x::y --token=s3cret"], "python3", "x::y"),
        (["/opt/bin/python3.11 --token=s3cret"], "pt_main_thread", "python3.11"),
    ],
)
def test_a_title_never_has_arguments(tmp_path: Path, argv: list[str], comm: str, title: str) -> None:
    FakeProc(tmp_path).add(7, *argv, comm=comm)
    assert ProcessTable(tmp_path).refresh()[7].title == title


def test_arguments_are_kept_of_possible_servers_only(tmp_path: Path) -> None:
    proc = FakeProc(tmp_path)
    proc.add(7, "python3", "train.py", "--token=s3cret")
    proc.add(8, "vllm", "serve", "model")
    table = ProcessTable(tmp_path).refresh()
    assert table[7].argv == ()
    assert table[8].argv == ("vllm", "serve", "model")


def test_a_long_command_line_is_read_to_its_end(tmp_path: Path) -> None:
    FakeProc(tmp_path).add(7, "vllm", "serve", "model", "x" * 8192, "--port", "8001")
    assert ProcessTable(tmp_path).refresh()[7].argv[-2:] == ("--port", "8001")


def test_a_process_that_executes_another_program_is_seen_as_that(tmp_path: Path) -> None:
    """Entry points of containers wait, and then become the server: same pid, same start."""
    proc = FakeProc(tmp_path)
    proc.add(7, "/bin/sh", "entrypoint.sh", comm="sh")
    table = ProcessTable(tmp_path)
    assert table.refresh()[7].argv == ()
    proc.add(7, "vllm", "serve", "model", comm="vllm")
    seen = [table.refresh()[7].argv for _ in range(PASSES_UNTIL_ALL_WAS_READ)]
    assert seen[-1] == ("vllm", "serve", "model")


def test_a_new_process_that_executes_a_program_is_seen_in_the_next_pass(tmp_path: Path) -> None:
    proc = FakeProc(tmp_path)
    table = ProcessTable(tmp_path)
    table.refresh()
    proc.add(7, "/bin/sh", comm="sh")
    table.refresh()
    proc.add(7, "vllm", "serve", "model", comm="vllm")
    assert table.refresh()[7].argv == ("vllm", "serve", "model")


def test_a_child_whose_parent_ends_gets_its_new_parent() -> None:
    code = (
        "import subprocess, sys; child = subprocess.Popen([sys.executable, '-c', 'input()']); "
        "print(child.pid, flush=True); input()"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    assert parent.stdin is not None
    child = int(parent.stdout.readline())
    try:
        table = ProcessTable()
        wait_until(lambda: child in table.refresh(), "the child is listed")
        assert table.refresh()[child].ppid == parent.pid
        parent.kill()
        parent.wait(timeout=10)
        assert table.refresh()[child].ppid != parent.pid
    finally:
        parent.stdin.close()  # the child's input is the same pipe: it ends with it
        parent.stdout.close()
        wait_until(lambda: (stat := read_stat("/proc", child)) is None or stat.state == "Z", "the child has ended")


def test_a_process_that_ends_leaves_the_table() -> None:
    table = ProcessTable()
    with idle_program() as program:
        assert program.pid in table.refresh()
    assert program.pid not in table.refresh()


def test_a_tree_has_its_roots_first_and_every_generation() -> None:
    table = {e.pid: e for e in (_entry(1, 0), _entry(10, 1), _entry(30, 10), _entry(20, 30), _entry(40, 1))}
    assert descendants(table, [10, 99]) == (10, 20, 30)
    assert ancestors(table, 20) == [30, 10, 1]


def test_a_circle_of_parents_ends() -> None:
    table = {e.pid: e for e in (_entry(10, 20), _entry(20, 10))}
    assert descendants(table, [10]) == (10, 20)
    assert ancestors(table, 10) == [20]


def test_the_namespace_of_a_container_is_not_the_hosts(tmp_path: Path) -> None:
    """There pid 7 exists, and is another process than the one the driver means."""
    proc = FakeProc(tmp_path)
    proc.add(7)
    proc.add(2, comm="sh")
    assert not sees_host_pids(tmp_path)
