"""The file of a process: readable by others, written without danger, removed when its process has ended."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from oomwatch_probe import mailbox
from oomwatch_probe.layout import FILE_SIZE, decode, encode, file_name
from oomwatch_probe.mailbox import Mailbox, own_identity, remove_leftovers

DATA = encode(1, {"pid": 5}, {})


def test_the_identity_is_that_of_proc() -> None:
    identity = own_identity()
    assert identity.pid == os.getpid()
    assert identity.pid_namespace == os.stat("/proc/self/ns/pid").st_ino
    boot = psutil.boot_time()
    started = psutil.Process().create_time() - boot
    assert identity.start_ticks / os.sysconf("SC_CLK_TCK") == pytest.approx(started, abs=1.5)


class TestTheFile:
    def test_is_readable_by_everybody_whatever_the_umask(self, tmp_path: Path) -> None:
        before = os.umask(0o077)
        try:
            box = Mailbox(tmp_path / "run" / "oomwatch", own_identity())
        finally:
            os.umask(before)
        assert stat.S_IMODE(box.path.stat().st_mode) == 0o644
        assert stat.S_IMODE(box.path.parent.stat().st_mode) == 0o1777
        box.remove()

    def test_of_a_folder_that_was_there_leaves_its_mode(self, tmp_path: Path) -> None:
        tmp_path.chmod(0o750)
        Mailbox(tmp_path, own_identity()).remove()
        assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o750

    def test_holds_what_was_written_last(self, tmp_path: Path) -> None:
        box = Mailbox(tmp_path, own_identity())
        box.write(DATA)
        box.write(encode(2, {"pid": 6}, {}))
        data = box.path.read_bytes()
        assert (len(data), decode(data).sequence, decode(data).numbers["pid"]) == (FILE_SIZE, 2, 6)
        box.remove()
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize("closed_by", ["itself", "somebody else"])
    def test_once_closed_it_leaves_the_file_that_gets_its_number(self, tmp_path: Path, closed_by: str) -> None:
        number = os.open(tmp_path, os.O_RDONLY)
        os.close(number)
        box = Mailbox(tmp_path / "run", own_identity())
        if closed_by == "itself":
            box.close()
        else:
            os.close(number)
        with (tmp_path / "precious").open("wb", buffering=0) as precious:
            assert precious.fileno() == number
            assert not box.exists()
            with pytest.raises(OSError, match="is closed"):
                box.write(DATA)
            box.close()
            precious.write(b"still open")
        assert (tmp_path / "precious").read_bytes() == b"still open"

    def test_does_not_follow_a_link_that_lies_in_its_place(self, tmp_path: Path) -> None:
        identity = own_identity()
        victim = tmp_path / "victim"
        victim.write_text("precious", encoding="utf-8")
        name = file_name(identity.pid_namespace, identity.pid, identity.start_ticks)
        (tmp_path / name).symlink_to(victim)
        box = Mailbox(tmp_path, identity)
        box.write(DATA)
        assert victim.read_text(encoding="utf-8") == "precious"
        assert not box.path.is_symlink()
        box.remove()

    def test_that_was_cut_off_is_whole_after_the_next_write(self, tmp_path: Path) -> None:
        """A mapping of it would end the process here."""
        box = Mailbox(tmp_path, own_identity())
        box.write(DATA)
        os.truncate(box.path, 0)
        box.write(DATA)
        assert decode(box.path.read_bytes()).numbers["pid"] == 5
        box.remove()

    def test_knows_that_its_name_is_gone(self, tmp_path: Path) -> None:
        box = Mailbox(tmp_path, own_identity())
        assert box.exists()
        box.path.unlink()
        assert not box.exists()
        box.remove()

    def test_that_cannot_be_written_whole_is_an_error_with_its_cause(self, tmp_path: Path) -> None:
        code = (
            "import resource, sys; from pathlib import Path;"
            "from oomwatch_probe.mailbox import Mailbox, own_identity;"
            "box = Mailbox(Path(sys.argv[1]), own_identity());"
            "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000));"
            "box.write(bytes(4096))"
        )
        environment = {**os.environ, "PYTHONPATH": str(Path(mailbox.__file__).parents[1])}
        answer = subprocess.run(
            [sys.executable, "-c", code, tmp_path], capture_output=True, text=True, env=environment, check=False
        )
        assert answer.stderr.splitlines()[-1].startswith("OSError: 1000 of 4096 bytes written to ")


class TestLeftovers:
    def test_of_processes_that_have_ended_are_removed(self, tmp_path: Path) -> None:
        identity = own_identity()
        with subprocess.Popen(["true"]) as ended:
            pass
        gone = replace(identity, pid=ended.pid)
        another_life = replace(identity, start_ticks=identity.start_ticks - 1)
        for one in (gone, another_life):
            (tmp_path / file_name(one.pid_namespace, one.pid, one.start_ticks)).write_bytes(DATA)
        remove_leftovers(tmp_path, identity.pid_namespace)
        assert list(tmp_path.iterdir()) == []

    def test_of_living_processes_stay(self, tmp_path: Path) -> None:
        identity = own_identity()
        own = tmp_path / file_name(identity.pid_namespace, identity.pid, identity.start_ticks)
        own.write_bytes(DATA)
        remove_leftovers(tmp_path, identity.pid_namespace)
        assert own.exists()

    def test_of_another_container_stay(self, tmp_path: Path) -> None:
        """Its pids mean nothing here."""
        identity = own_identity()
        other = tmp_path / file_name(identity.pid_namespace + 1, 1, 1)
        other.write_bytes(DATA)
        remove_leftovers(tmp_path, identity.pid_namespace)
        assert other.exists()

    def test_nothing_else_is_touched(self, tmp_path: Path) -> None:
        names = ["probe-1-2.oomwatch", "probe-1-2-3", "state.db", f"x{file_name(1, 2, 3)}"]
        for name in names:
            (tmp_path / name).touch()
        (tmp_path / file_name(1, 2**70, 3)).mkdir()
        remove_leftovers(tmp_path, 1)
        assert len(list(tmp_path.iterdir())) == len(names) + 1

    def test_a_folder_that_is_not_there_is_no_error(self, tmp_path: Path) -> None:
        remove_leftovers(tmp_path / "missing", 1)
