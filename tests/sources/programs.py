"""Programs that stand in for vLLM's processes, and trees of files that stand in for /proc."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

DEADLINE_S = 20.0

# `vllm serve …` as a console script starts it: listens on its port, and has the children that a test asks for.
VLLM_SCRIPT = """
import os, socket, subprocess, sys
arguments = sys.argv[1:]
def option(name, default):
    return arguments[arguments.index(name) + 1] if name in arguments else default
listener = socket.socket()
listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
listener.bind((option("--host", "127.0.0.1"), int(option("--port", "8000"))))
listener.listen()
wait = "import sys; print('up', flush=True); sys.stdin.read()"
children = [
    subprocess.Popen([title, "-c", wait], executable=sys.executable, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    for title in os.environ.get("TITLES", "").split()
]
for child in children:
    child.stdout.readline()
print("up", *(child.pid for child in children), flush=True)
sys.stdin.read()
for child in children:
    child.communicate()
"""


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"after {DEADLINE_S:g} s still not: {what}"
        time.sleep(0.01)


class Program:
    """A child of the test that has said that it is up; ends when its input is closed."""

    def __init__(
        self, command: Sequence[str], *, executable: str | None = None, environment: Mapping[str, str] | None = None
    ) -> None:
        self.process = subprocess.Popen(
            command,
            executable=executable,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **(environment or {})},
        )
        assert self.process.stdout is not None
        words = self.process.stdout.readline().split()
        assert words[:1] == ["up"], f"{command} did not start"
        self.children = [int(word) for word in words[1:]]

    @property
    def pid(self) -> int:
        return self.process.pid

    def stop(self) -> None:
        """Close its input and wait; what does not end by that is killed."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.communicate(timeout=DEADLINE_S)
            return
        self.process.kill()
        self.process.communicate()


@contextlib.contextmanager
def vllm_server(
    folder: Path, *arguments: str, titles: Sequence[str] = (), before: Sequence[str] = ()
) -> Iterator[Program]:
    """A process whose command line is ``python …/bin/vllm serve <arguments>``, with children of such titles."""
    script = folder / "bin" / "vllm"
    script.parent.mkdir(exist_ok=True)
    script.write_text(VLLM_SCRIPT)
    program = Program(
        [*before, sys.executable, str(script), "serve", *arguments], environment={"TITLES": " ".join(titles)}
    )
    try:
        yield program
    finally:
        program.stop()


@contextlib.contextmanager
def idle_program(title: str = sys.executable, *arguments: str) -> Iterator[Program]:
    """An idle process whose command line begins with ``title``, as setproctitle leaves it, and has such arguments."""
    code = "import sys; print('up', flush=True); sys.stdin.read()"
    program = Program([title, "-c", code, *arguments], executable=sys.executable)
    try:
        yield program
    finally:
        program.stop()


@contextlib.contextmanager
def crowd(size: int) -> Iterator[Program]:
    """A program with so many idle children, all of which end with it."""
    code = (
        "import ctypes, os, signal, sys\n"
        "libc = ctypes.CDLL(None)\n"
        "for _ in range(int(sys.argv[1])):\n"
        "    if os.fork() == 0:\n"
        "        libc.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG\n"
        "        signal.pause()\n"
        "print('up', flush=True); sys.stdin.read()\n"
    )
    program = Program([sys.executable, "-c", code, str(size)])
    try:
        yield program
    finally:
        program.stop()


class FakeProc:
    """A tree of files in the form of /proc, of a host (its pid 2 is kthreadd) with this process's own files as self."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "self" / "net").mkdir(parents=True)
        (root / "stat").write_text("cpu  1 2 3\nbtime 1700000000\n")
        (root / "meminfo").write_text("MemTotal:  1000 kB\nMemFree:  1 kB\nMemAvailable:  600 kB\n")
        self.add(2, comm="kthreadd", flags=0x00200000)

    def add(
        self,
        pid: int,
        *argv: str,
        ppid: int = 1,
        comm: str = "python3",
        state: str = "S",
        flags: int = 0,
        ticks: int = 100,
        status: str = "Name:\tx\nUid:\t1000\t1000\t1000\t1000\nVmRSS:\t    2000 kB\nRssAnon:\t    1500 kB\n",
        cgroup: str = "0::/\n",
    ) -> Path:
        folder = self.root / str(pid)
        (folder / "net").mkdir(parents=True, exist_ok=True)
        numbers = " ".join(["0"] * 12)
        (folder / "stat").write_text(f"{pid} ({comm}) {state} {ppid} 0 0 0 0 {flags} {numbers} {ticks} 0 0\n")
        (folder / "cmdline").write_bytes(b"".join(part.encode() + b"\0" for part in argv))
        (folder / "status").write_text(status)
        (folder / "cgroup").write_text(cgroup)
        (folder / "statm").write_text("900 500 100 1 0 1 0\n")
        return folder

    def remove(self, pid: int) -> None:
        folder = self.root / str(pid)
        for path in sorted(folder.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
        folder.rmdir()

    def listen(self, pid: int | str, *sockets: tuple[str, int, int, int]) -> None:
        """Give the network namespace of a process these listeners: address, port, uid, inode."""
        rows = [
            f"   {n}: {_hex(address)}:{port:04X} 00000000:0000 0A "
            f"00000000:00000000 00:00000000 00000000 {uid} 0 {inode} 1"
            for n, (address, port, uid, inode) in enumerate(sockets)
        ]
        (self.root / str(pid) / "net" / "tcp").write_text("\n".join(["  sl  local_address", *rows, ""]))


def _hex(address: str) -> str:
    return "".join(f"{int(part):02X}" for part in reversed(address.split(".")))
