"""The unit: systemd takes it, it is hardened, and it starts what is documented."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from oomwatch.cli import main
from oomwatch.config import Config
from tests.documents import REPOSITORY
from tests.e2e.tools import require_tool

UNIT = REPOSITORY / "deploy" / "systemd" / "oomwatch.service"
PROGRAM = "/opt/oomwatch/bin/oomwatch"
# 0 is locked up, 10 is open. What is left is the network, /proc and the devices, which it is there to read.
MOST_EXPOSED = 2.5


def settings() -> dict[str, str]:
    return dict(re.findall(r"^(\w+)=(.*)$", UNIT.read_text(encoding="utf-8"), re.MULTILINE))


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """The unit with a program that is there on this machine."""
    unit = tmp_path / UNIT.name
    unit.write_text(UNIT.read_text(encoding="utf-8").replace(PROGRAM, sys.executable), encoding="utf-8")
    return unit


def analyze(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [str(require_tool("systemd-analyze")), *arguments]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=30, stdin=subprocess.DEVNULL)


def test_systemd_finds_nothing_wrong(installed: Path) -> None:
    answer = analyze("verify", "--man=no", str(installed))
    assert [line for line in answer.stderr.splitlines() if UNIT.name in line] == []
    assert answer.returncode == 0, answer.stderr


def test_it_is_hardened(installed: Path) -> None:
    answer = analyze("security", "--offline=true", f"--threshold={round(MOST_EXPOSED * 10)}", str(installed))
    assert answer.returncode == 0, answer.stdout


def test_it_starts_a_command_that_the_daemon_knows() -> None:
    program, *arguments = shlex.split(settings()["ExecStart"])
    assert program == PROGRAM
    assert CliRunner().invoke(main, [*arguments, "--help"]).exit_code == 0


def test_engines_of_any_user_find_the_folder_that_the_daemon_looks_into() -> None:
    (folder,) = Config().probe.directory
    assert f"/run/{settings()['RuntimeDirectory']}" == folder
    assert (settings()["RuntimeDirectoryMode"], settings()["RuntimeDirectoryPreserve"]) == ("1777", "yes")


def test_it_is_started_again_whenever_it_ends() -> None:
    assert settings()["Restart"] == "always"
    assert settings()["StartLimitIntervalSec"] == "0"


def test_the_guide_to_operations_installs_the_same_files() -> None:
    text = (REPOSITORY / "docs" / "operations.md").read_text(encoding="utf-8")
    for expected in (
        "python3 -m venv /opt/oomwatch",
        f"useradd --system --no-create-home --shell /usr/sbin/nologin {settings()['User']}",
        settings()["ExecStart"].rpartition(" ")[2],
        UNIT.relative_to(REPOSITORY).as_posix(),
    ):
        assert expected in text


def test_the_daemons_libraries_work_where_memory_is_never_writable_and_executable() -> None:
    """MemoryDenyWriteExecute= by the call that systemd makes where the kernel has it (6.3)."""
    program = """
import ctypes, mmap, sys
if ctypes.CDLL(None).prctl(65, 1, 0, 0, 0) != 0:
    sys.exit(77)
try:
    mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
except PermissionError:
    pass
else:
    sys.exit("the kernel denies nothing")
import bcrypt, cheroot.server, pydantic, pynvml, sqlite3, ssl
import oomwatch.daemon
assert bcrypt.checkpw(b"a", bcrypt.hashpw(b"a", bcrypt.gensalt(4)))
"""
    answer = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, text=True, timeout=60)
    if answer.returncode == 77:
        pytest.skip("this kernel is older than 6.3 and cannot deny it")
    assert answer.returncode == 0, answer.stderr
