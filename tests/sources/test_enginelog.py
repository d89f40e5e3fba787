"""Engines' logs, followed where they are written: files through rotation, containers' files, the journal."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from oomwatch.enginelog.lines import entry_of
from oomwatch.enginelog.story import Story, tell
from oomwatch.observations import LogLine, Observation, SourceRun
from oomwatch.sources.enginelog import ContainerFile, EngineLogSource, File, Journal, Place, Places
from oomwatch.sources.enginelog.files import CannotRead, FollowedFile, Piece
from oomwatch.sources.enginelog.journal import FollowedJournal
from tests.sources.programs import wait_until

START = (
    "(EngineCore pid=1) INFO {clock} [core.py:1] Initializing a V1 LLM engine (v0.32.0) with config: max_seq_len=512\n"
)
POOL = "(EngineCore pid=1) INFO {clock} [x.py:1] GPU KV cache size: 1,040 tokens\n"
FAILED = "(EngineCore pid=1) ERROR {clock} [core.py:1] EngineCore failed to start.\n"
LOAD = (
    "(APIServer pid=2) INFO {clock} [loggers.py:1] Engine 000: Avg prompt throughput: 1.0 tokens/s, "
    "Avg generation throughput: 1.0 tokens/s, Running: 1 reqs, Waiting: 0 reqs, GPU KV cache usage: 1.0%, "
    "Prefix cache hit rate: 0.0%\n"
)
FRAME = '(EngineCore pid=1) ERROR {clock} [core.py:1]   File "/x/v1/worker/gpu_worker.py", line 1, in load_model\n'
RAN_OUT = (
    "(EngineCore pid=1) ERROR {clock} [core.py:1] torch.OutOfMemoryError: CUDA out of memory. Tried to allocate "
    "2.00 GiB. GPU 0 has a total capacity of 79.10 GiB of which 1.00 GiB is free.\n"
)
NOISE = '(APIServer pid=2) INFO:     127.0.0.1:1 - "POST /v1/completions HTTP/1.1" 200 OK\n'
NOW = 1_800_000_000.0


def at(line: str, clock: str = "11-30 09:00:00") -> str:
    return line.format(clock=clock)


class Source:
    """A source over a place, and what it told."""

    def __init__(self, place: Place, places: Places | None = None) -> None:
        self.told: list[Observation] = []
        self.now = NOW
        self.source = EngineLogSource("chat", place, places or Places(), self.told.append, clock=lambda: self.now)

    def read(self) -> list[str]:
        """One pass: the events that it told."""
        before = len(self.told)
        self.error = self.source.read()
        return [one.event or "" for one in self.told[before:] if isinstance(one, LogLine)]

    def read_on(self, count: int) -> list[str]:
        """As many passes as it takes for that many events: what takes a busy machine long is read in several."""
        events = self.read()
        deadline = time.monotonic() + 30
        while len(events) < count and time.monotonic() < deadline:
            events += self.read()
        return events

    def ages(self) -> list[float]:
        entries = [entry_of(one) for one in self.told if isinstance(one, LogLine)]
        return [entry.age for entry in entries if entry is not None]

    def story(self) -> Story:
        lines = [one for one in self.told if isinstance(one, LogLine)]
        return tell((one.t - entry.age, entry) for one in lines if (entry := entry_of(one)) is not None)

    @property
    def up(self) -> bool:
        return next(one.ok for one in reversed(self.told) if isinstance(one, SourceRun))


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "vllm.log"
    path.write_text("")
    return path


@pytest.fixture
def source(log: Path) -> Iterator[Source]:
    source = Source(File(str(log)))
    assert source.read() == []
    yield source
    source.source.close()


def append(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


def break_reading(path: Path) -> None:
    """Make reads of a file by the descriptor that this process has of it fail from now on."""
    (mine,) = (int(link.name) for link in Path("/proc/self/fd").iterdir() if os.path.realpath(link) == str(path))
    write_only = os.open(path, os.O_WRONLY)
    os.dup2(write_only, mine)
    os.close(write_only)


# --- files -------------------------------------------------------------------------------------------------------


def test_lines_are_told_as_they_are_written_in_whatever_pieces(log: Path, source: Source) -> None:
    whole = at(POOL)
    append(log, NOISE + whole[:50])
    assert source.read() == []
    append(log, whole[50:] + at(FAILED))
    assert source.read() == ["kv_pool", "died"]
    assert source.read() == []
    assert source.up


def test_a_rotated_file_is_read_to_its_end_and_the_new_one_from_its_beginning(log: Path, source: Source) -> None:
    append(log, at(POOL))
    log.rename(log.with_suffix(".1"))
    append(log.with_suffix(".1"), at(FAILED))
    assert source.read() == ["kv_pool", "died"]
    log.write_text(at(START))
    assert source.read() == ["start"]


def test_a_file_that_is_copied_and_truncated_goes_on_from_its_beginning(log: Path, source: Source) -> None:
    append(log, at(POOL) * 3)
    assert source.read() == ["kv_pool"] * 3
    os.truncate(log, 0)
    append(log, at(FAILED))
    assert source.read() == ["died"]


def test_half_a_line_of_a_file_that_is_gone_does_not_run_into_the_next_file(log: Path, source: Source) -> None:
    append(log, "INFO prompt: 'half a line")
    assert source.read() == []
    log.unlink()
    log.write_text(at(POOL))
    assert source.read() == ["kv_pool"]


def test_what_was_written_before_is_read_back_to_the_last_start_with_its_age(log: Path) -> None:
    log.write_text(
        at(FAILED, "11-30 07:00:00")
        + NOISE * 20_000  # 1.6 MB
        + at(START, "11-30 09:00:00")
        + at(POOL, "11-30 09:00:20")
        + NOISE * 10
        + "INFO 11-30 09:01:00 [x.py:1] something\n"
    )
    written = time.time() - 600
    os.utime(log, (written, written))
    source = Source(File(str(log)))
    assert source.read_on(2) == ["start", "kv_pool"]
    assert source.ages() == pytest.approx([660, 640], abs=5)
    append(log, at(FAILED))
    assert source.read() == ["died"]
    assert source.ages()[-1] == 0.0
    source.source.close()


def test_of_gigabytes_of_history_a_bounded_part_is_read(log: Path) -> None:
    log.write_text(at(START) + at(POOL))
    os.truncate(log, 6 * 1024**3)  # a hole, which costs no disk
    append(log, "\n" + at(FAILED))
    source = Source(File(str(log)))
    begin = time.process_time()
    assert source.read_on(1) == ["died"]
    assert time.process_time() - begin < 2.0
    source.source.close()


def test_between_the_last_start_and_the_end_of_a_long_file_the_middle_is_left_out(log: Path) -> None:
    log.write_text(at(START) + at(POOL) + NOISE * 100 + "x" * 20_000_000 + "\n" + at(FAILED))
    source = Source(File(str(log)))
    assert source.read_on(3) == ["start", "kv_pool", "died"]
    source.source.close()


def test_where_reading_begins_in_the_middle_of_a_line_its_rest_is_left_out(log: Path) -> None:
    log.write_text("INFO prompt: '" + "x" * 3_000_000 + at(FAILED).strip() + "\n" + at(POOL))
    source = Source(File(str(log)))
    assert source.read_on(1) == ["kv_pool"]
    source.source.close()


def test_a_log_that_cannot_be_read_is_told_and_tried_again(tmp_path: Path) -> None:
    source = Source(File(str(tmp_path / "not-there.log")))
    assert source.read() == []
    assert not source.up
    assert "no such file" in source.error
    assert "Check the path" in source.error
    (tmp_path / "not-there.log").write_text(at(POOL))
    assert source.read() == ["kv_pool"]
    assert source.up


def test_what_cannot_be_read_for_a_while_is_read_on_where_it_was(log: Path, source: Source) -> None:
    append(log, at(POOL) + at(FAILED)[:50])
    assert source.read() == ["kv_pool"]
    break_reading(log)
    append(log, at(FAILED)[50:])
    assert source.read() == []
    assert not source.up
    assert f"{log} cannot be read: bad file descriptor" in source.error
    assert source.read() == ["died"]
    assert source.up


def test_a_file_that_can_never_be_read_again_gives_way_to_the_one_in_its_place(log: Path, source: Source) -> None:
    break_reading(log)
    log.rename(log.with_suffix(".1"))
    log.write_text(at(FAILED))
    assert [source.read() for _ in range(3)] == [[], [], ["died"]]


def test_a_new_file_that_cannot_be_opened_at_first_is_read_from_its_beginning(log: Path, source: Source) -> None:
    old, new = log.with_suffix(".1"), log.with_suffix(".new")
    log.rename(old)
    (log / "in the way").mkdir(parents=True)
    assert source.read() == []
    assert "is no file" in source.error
    append(old, at(POOL))
    assert source.read() == ["kv_pool"]
    assert not source.up
    new.write_text(at(FAILED) + NOISE * 20_000)  # more than is read back of a file that was there before
    shutil.rmtree(log)
    new.rename(log)
    assert source.read_on(1) == ["died"]
    assert source.ages() == [0.0, 0.0]


def test_a_file_that_was_away_is_not_read_twice(log: Path, source: Source) -> None:
    append(log, at(FAILED))
    assert source.read() == ["died"]
    log.rename(log.with_suffix(".1"))
    (log / "in the way").mkdir(parents=True)
    source.read()
    assert not source.up
    shutil.rmtree(log)
    log.with_suffix(".1").rename(log)
    assert source.read() == []
    assert source.up


def test_a_writer_that_goes_on_in_the_old_file_is_followed_until_there_is_something_in_the_new(
    log: Path, source: Source
) -> None:
    log.rename(log.with_suffix(".1"))
    log.write_text("")
    assert source.read() == []
    append(log.with_suffix(".1"), at(POOL))
    assert source.read() == ["kv_pool"]
    append(log.with_suffix(".1"), at(FAILED))
    append(log, at(START))
    assert source.read() == ["died", "start"]


def test_the_start_is_read_back_however_many_statistics_follow_it(log: Path) -> None:
    log.write_text(at(START) + at(POOL) + at(LOAD) * 3000)
    source = Source(File(str(log)))
    assert source.read_on(3) == ["start", "kv_pool", "load"]
    source.source.close()


def test_a_pipe_or_a_folder_is_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path):
        with pytest.raises(CannotRead, match="is no file"):
            FollowedFile(str(path)).read()


def test_closing_reads_what_is_left(log: Path, source: Source) -> None:
    append(log, at(FAILED))
    source.source.close()
    assert [one.event for one in source.told if isinstance(one, LogLine)] == ["died"]
    assert source.read() == []


def test_memory_stays_small_however_fast_it_is_written(log: Path, source: Source) -> None:
    append(log, NOISE * 1000 + "x" * 90_000_000)  # more than is read on: the rest is left out
    append(log, "\n" + at(FAILED))
    assert source.read_on(1) == ["died"]


# --- tracebacks --------------------------------------------------------------------------------------------------


def test_of_a_traceback_each_telling_line_is_told_once(log: Path, source: Source) -> None:
    append(log, at(FRAME) * 3 + at(RAN_OUT))
    assert source.read() == ["step", "out_of_memory"]


@pytest.mark.parametrize("seconds", [6, 11, 3600])
def test_a_later_traceback_tells_what_the_engine_was_doing_again(log: Path, source: Source, seconds: float) -> None:
    append(log, at(FRAME))
    assert source.read() == ["step"]
    source.now += seconds
    append(log, at(FRAME) + at(RAN_OUT))
    assert source.read() == ["step", "out_of_memory"]
    (shortage,) = source.story().starts[-1].shortages
    assert (shortage.step, shortage.traced) == ("load", True)


def test_so_do_those_that_were_written_before(log: Path) -> None:
    log.write_text(at(FRAME, "11-30 09:00:00") + at(FRAME, "11-30 09:10:00") + at(RAN_OUT, "11-30 09:10:00"))
    source = Source(File(str(log)))
    assert source.read_on(3) == ["step", "step", "out_of_memory"]
    (shortage,) = source.story().starts[-1].shortages
    assert (shortage.step, shortage.traced) == ("load", True)
    source.source.close()


# --- what is told of it ------------------------------------------------------------------------------------------

SECRET = "sk-f00dcafe"


def test_nothing_of_the_text_is_published(log: Path, source: Source) -> None:
    append(log, f"INFO 11-30 09:00:00 [x.py:1] Received request a: prompt: '{SECRET} {at(FAILED).strip()}'\n")
    append(log, f"INFO 11-30 09:00:00 [x.py:1] args: Namespace(api_key='{SECRET}', max_model_len=512)\n")
    append(log, f"({SECRET} pid=1) ERROR 11-30 09:00:00 [x.py:1] EngineCore failed to start. {SECRET}\n")
    assert source.read() == ["settings", "died"]
    assert SECRET not in repr(source.told)


@pytest.mark.parametrize("keep", [True, False])
def test_the_raw_lines_of_what_was_read_are_given_only_where_they_are_asked_for(log: Path, keep: bool) -> None:
    log.write_text(NOISE + at(POOL))
    told: list[Observation] = []
    source = EngineLogSource("chat", File(str(log)), Places(), told.append, clock=lambda: NOW, keep_text=keep)
    source.read()
    append(log, NOISE + at(FAILED))
    source.close()
    texts = [one.line for one in told if isinstance(one, LogLine)]
    assert texts == ([at(POOL).rstrip(), at(FAILED).rstrip()] if keep else [None, None])


# --- containers --------------------------------------------------------------------------------------------------

CONTAINER = "f" * 64


def test_docker_s_json_file_is_read(tmp_path: Path) -> None:
    folder = tmp_path / CONTAINER
    folder.mkdir()
    path = folder / f"{CONTAINER}-json.log"
    path.write_text("")
    source = Source(ContainerFile(CONTAINER[:12]), Places(docker=tmp_path, kubernetes=tmp_path / "none"))
    assert source.read() == []
    lines = (at(POOL), 'ERROR 11-30 09:00:00 [x.py:1]   File "/x.py", line 1, in load_model\n', at(FAILED))
    append(
        path,
        "".join(json.dumps({"log": line, "stream": "stderr", "time": "2026-11-30T09:00:00Z"}) + "\n" for line in lines),
    )
    assert source.read() == ["kv_pool", "step", "died"]
    source.source.close()


def test_a_kubelet_s_link_to_a_cri_file_is_read_and_followed_to_the_next(tmp_path: Path) -> None:
    links = tmp_path / "links"
    links.mkdir()
    first = tmp_path / "0.log"
    first.write_text("")
    link = links / f"vllm-0_default_server-{CONTAINER}.log"
    link.symlink_to(first)
    source = Source(ContainerFile(CONTAINER), Places(docker=tmp_path / "none", kubernetes=links))
    assert source.read() == []
    append(first, "2026-11-30T09:00:00.123456789Z stdout F " + at(POOL))
    assert source.read() == ["kv_pool"]
    second = tmp_path / "1.log"
    second.write_text("2026-11-30T09:10:00.123456789Z stderr F " + at(FAILED))
    link.unlink()
    link.symlink_to(second)
    assert source.read() == ["died"]
    source.source.close()


def test_a_container_without_a_log_file_is_told_with_what_it_needs(tmp_path: Path) -> None:
    source = Source(ContainerFile(CONTAINER), Places(docker=tmp_path, kubernetes=tmp_path))
    source.read()
    assert not source.up
    assert "json-file driver" in source.error


# --- where a process writes --------------------------------------------------------------------------------------


def test_a_process_shows_the_file_that_its_output_goes_to(log: Path) -> None:
    with log.open("a") as output:
        process = subprocess.Popen(
            [sys.executable, "-c", f"import sys; print({at(POOL)!r}, end='', flush=True); sys.stdin.read()"],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
        )
    try:
        place = Places().of_processes([process.pid])
        assert place == File(f"/proc/{process.pid}/fd/2")
        source = Source(place)
        wait_until(lambda: source.read() == ["kv_pool"], "the line is told")
        assert source.source.follows_the_same(File(str(log)))
        assert not source.source.follows_the_same(File("/dev/null"))
        append(log, at(FAILED))
        assert source.read() == ["died"]
        source.source.close()
    finally:
        process.communicate(b"", timeout=10)


def test_a_process_without_a_file_shows_nothing() -> None:
    process = subprocess.Popen(["sleep", "60"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    try:
        assert Places().of_processes([process.pid, 2**22 + 1]) is None
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    ("cgroup", "output", "place"),
    [
        ("0::/system.slice/vllm@a.service", "socket:[1]", Journal("vllm@a.service")),
        ("0::/system.slice/vllm.service/worker", "socket:[1]", Journal("vllm.service")),
        ("0::/system.slice/vllm.service", "/dev/null", None),
        ("0::/user.slice/session-1.scope", "socket:[1]", None),
        (f"0::/system.slice/docker-{CONTAINER}.scope", "pipe:[1]", ContainerFile(CONTAINER)),
        ("0::/system.slice/docker-" + "e" * 64 + ".scope", "pipe:[1]", None),
    ],
)
def test_units_write_to_the_journal_and_containers_to_their_runtime(
    tmp_path: Path, cgroup: str, output: str, place: Place | None
) -> None:
    (tmp_path / "proc/7/fd").mkdir(parents=True)
    (tmp_path / "proc/7/cgroup").write_text(cgroup + "\n")
    for descriptor in ("1", "2"):
        (tmp_path / "proc/7/fd" / descriptor).symlink_to(output)
    (tmp_path / f"docker/{CONTAINER}").mkdir(parents=True)
    (tmp_path / f"docker/{CONTAINER}/{CONTAINER}-json.log").write_text("")
    places = Places(tmp_path / "docker", tmp_path / "kubernetes", tmp_path / "proc")
    assert places.of_processes([7]) == place


# --- the journal -------------------------------------------------------------------------------------------------


@pytest.fixture
def journal() -> Iterator[tuple[str, Callable[[str], None]]]:
    """A real journal of its own, and how the unit vllm.service writes to it."""
    daemon = Path("/usr/lib/systemd/systemd-journald")
    if not daemon.exists() or os.geteuid() != 0 or shutil.which("journalctl") is None:
        pytest.skip("needs systemd (Debian: systemd) and root")
    namespace = f"oomwatch-{os.getpid()}"
    runtime = Path(f"/run/systemd/journal.{namespace}")
    runtime.parent.mkdir(exist_ok=True)
    process = subprocess.Popen([str(daemon), namespace], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    writer = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)

    def write(line: str) -> None:
        fields = f"MESSAGE={line.rstrip()}\nOBJECT_SYSTEMD_UNIT=vllm.service\nSYSLOG_IDENTIFIER=vllm\n"
        writer.sendto(fields.encode(), str(runtime / "socket"))

    try:
        wait_until((runtime / "socket").exists, "the journal listens")
        yield namespace, write
    finally:
        writer.close()
        process.terminate()
        process.wait(10)
        for folder in (
            runtime,
            *Path("/var/log/journal").glob(f"*.{namespace}"),
            *Path("/run/log/journal").glob(f"*.{namespace}"),
        ):
            shutil.rmtree(folder, ignore_errors=True)


class Followed:
    """A followed journal with a clock that a test moves, and what it gave."""

    def __init__(self, namespace: str | None = None) -> None:
        self.now = 0.0
        self.journal = FollowedJournal("vllm.service", namespace, clock=lambda: self.now)
        self.seen = b""
        self.pieces: list[Piece] = []

    def read(self) -> str:
        """One read; what is wrong, if it is."""
        try:
            piece = self.journal.read()
        except CannotRead as problem:
            return str(problem)
        if piece is not None:
            self.pieces.append(piece)
            self.seen += piece.data
        return ""

    def read_until(self, line: str) -> None:
        def has() -> bool:
            assert self.read() == ""
            return line.encode() in self.seen

        wait_until(has, f"read: {line}")

    def end_journalctl(self) -> None:
        (process,) = (child for child in psutil.Process().children() if child.name() == "journalctl")
        process.kill()
        wait_until(lambda: process.status() == psutil.STATUS_ZOMBIE, "journalctl has ended")


@pytest.fixture
def followed(journal: tuple[str, Callable[[str], None]]) -> Iterator[Followed]:
    followed = Followed(journal[0])
    yield followed
    followed.journal.close()


def test_a_unit_s_lines_in_the_journal_are_told(journal: tuple[str, Callable[[str], None]], followed: Followed) -> None:
    _, write = journal
    write(at(POOL))
    followed.read_until(at(POOL))
    write(at(FAILED))
    followed.read_until(at(FAILED))
    assert followed.seen.decode() == at(POOL) + at(FAILED)


def test_when_journalctl_has_ended_each_line_is_told_once_and_none_is_lost(
    journal: tuple[str, Callable[[str], None]], followed: Followed
) -> None:
    _, write = journal
    write("before")
    followed.read_until("before\n")
    write("with it")
    followed.read_until("with it\n")
    followed.end_journalctl()
    wait_until(lambda: "journalctl ended for unit vllm.service" in followed.read(), "its end is told")
    write("without it")
    assert "journalctl ended for unit vllm.service" in followed.read()
    followed.now += 61
    followed.read_until("without it\n")
    write("with another")
    followed.read_until("with another\n")
    assert followed.seen == b"before\nwith it\nwithout it\nwith another\n"


def test_all_that_is_read_back_is_there_before_nothing_is(
    journal: tuple[str, Callable[[str], None]], followed: Followed
) -> None:
    namespace, write = journal
    for _ in range(3000):
        write(NOISE)
    write("the last")
    followed.read_until("the last\n")
    another = Followed(namespace)
    wait_until(lambda: another.read() == "" and another.seen != b"", "the first lines are read")
    while (piece := another.journal.read()) is not None:
        another.seen += piece.data
    another.journal.close()
    assert another.seen == NOISE.encode() * 3000 + b"the last\n"


def test_lines_of_any_bytes_come_whole(journal: tuple[str, Callable[[str], None]], followed: Followed) -> None:
    namespace, _ = journal
    message = b"\x1b[31mred\x1b[0m\nsecond \xff line " + b"x" * 1000
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as writer:
        fields = b"MESSAGE\n" + len(message).to_bytes(8, "little") + message + b"\nOBJECT_SYSTEMD_UNIT=vllm.service\n"
        writer.sendto(fields, f"/run/systemd/journal.{namespace}/socket")
    wait_until(lambda: followed.read() == "" and followed.seen != b"", "the line is read")
    assert followed.seen == message + b"\n"


@pytest.fixture
def followed_here() -> Iterator[Followed]:
    followed = Followed()
    yield followed
    followed.journal.close()


def entry(line: str, t: float, number: int = 1) -> str:
    """A line as journalctl exports it."""
    return f"__CURSOR=s=a;i={number}\n__REALTIME_TIMESTAMP={t * 1e6:.0f}\nMESSAGE={line.rstrip()}\n\n"


class StandIn:
    """A program in journalctl's place, which does what a test cannot have the real one do."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._program = folder / "bin" / "journalctl"
        self._program.parent.mkdir()
        self._starts = folder / "starts"
        self._starts.touch()
        monkeypatch.setenv("PATH", str(self._program.parent))

    def does(self, script: str) -> None:
        self._program.write_text(f'#!/bin/sh\necho "$@" >> {self._starts}\n{script}\n')
        self._program.chmod(0o755)

    def writes_and_stays(self, *entries: str) -> None:
        self.does("/bin/cat << 'END'\n" + "".join(entries) + "END\nexec /bin/sleep 60")

    @property
    def starts(self) -> list[str]:
        """The arguments of each."""
        return self._starts.read_text().splitlines()


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    return StandIn(tmp_path, monkeypatch)


DENIED = "No journal files were opened due to insufficient permissions."


def test_a_journalctl_that_ends_at_once_is_started_once_a_minute_and_no_more(stand_in: StandIn) -> None:
    stand_in.does(f"echo '{DENIED}' >&2; exit 1")
    source = Source(Journal("vllm.service"))
    errors = set()
    for _ in range(5):
        assert source.read() == []
        errors.add(source.error)
    assert not source.up
    assert errors == {f"journalctl ended for unit vllm.service: {DENIED} Let oomwatch's user read the journal"}
    assert len(stand_in.starts) == 1
    source.source.close()
    assert len(stand_in.starts) == 1


def test_one_that_is_not_there_yet_or_cannot_be_started_is_tried_again(
    stand_in: StandIn, followed_here: Followed, tmp_path: Path
) -> None:
    followed = followed_here
    assert "journalctl is not installed here" in followed.read()
    stand_in.writes_and_stays(entry("told", time.time()))
    assert "journalctl is not installed here" in followed.read()
    (tmp_path / "bin" / "journalctl").write_text("#!/not/there\n")
    followed.now += 61
    assert "journalctl cannot be started: no such file or directory" in followed.read()
    stand_in.writes_and_stays(entry("told", time.time()))
    followed.now += 61
    followed.read_until("told\n")


def test_what_it_wrote_before_it_ended_is_told(stand_in: StandIn) -> None:
    stand_in.does(f"echo '{entry(at(POOL), time.time() - 300)}'")
    source = Source(Journal("vllm.service"))
    assert source.read_on(1) == ["kv_pool"]
    wait_until(lambda: source.read() == [] and not source.up, "its end is told")
    source.source.close()


def test_the_next_goes_on_behind_the_last_line_that_was_there_whole(stand_in: StandIn, followed_here: Followed) -> None:
    followed = followed_here
    whole, torn = entry(at(POOL), NOW, 7), entry(at(FAILED), NOW, 8)
    stand_in.does(f"printf %s '{whole + torn[:40]}'")
    followed.read_until(at(POOL))
    wait_until(lambda: "exit status 0" in followed.read(), "its end is told")
    stand_in.writes_and_stays(torn)
    followed.now += 61
    followed.read_until(at(FAILED))
    assert followed.seen.decode() == at(POOL) + at(FAILED)
    first, second = stand_in.starts
    assert "--lines=20000" in first
    assert "--after-cursor=s=a;i=7 --no-tail" in second


def test_old_lines_are_told_with_their_age_before_new_ones_though_they_come_together(stand_in: StandIn) -> None:
    begun = time.time()
    stand_in.writes_and_stays(
        entry(at(START, "11-30 08:50:00"), begun - 600, 1),
        entry(at(POOL, "11-30 08:59:30"), begun - 30, 2),
        entry(at(FAILED, "11-30 09:00:10"), begun + 10, 3),
    )
    source = Source(Journal("vllm.service"))
    assert source.read_on(3) == ["start", "kv_pool", "died"]
    assert source.ages() == pytest.approx([600, 30, 0], abs=5)
    assert source.ages()[-1] == 0.0
    source.source.close()


def test_of_a_line_that_the_journal_cut_the_parts_after_the_first_are_left_out(stand_in: StandIn) -> None:
    now = time.time() + 1

    def part(text: str, number: int, stream: str, broken: bool) -> str:
        more = f"_STREAM_ID={stream}\n" + ("_LINE_BREAK=line-max\n" if broken else "")
        return entry(text, now, number)[:-1] + more + "\n"

    stand_in.writes_and_stays(
        part("INFO prompt: 'x", 1, "a", broken=True),
        part(at(FAILED), 2, "a", broken=True),
        part(at(POOL), 3, "b", broken=False),
        part(at(FAILED), 4, "a", broken=False),
        part(at(START), 5, "a", broken=False),
    )
    source = Source(Journal("vllm.service"))
    assert source.read_on(2) == ["kv_pool", "start"]
    source.source.close()


def test_one_that_shows_nothing_but_a_complaint_is_a_failure_and_stays(stand_in: StandIn) -> None:
    hint = "Hint: You are currently not seeing messages from other users and the system.\n      Pass -q to turn it off."
    stand_in.does(f"echo '{hint}' >&2; exec /bin/sleep 60")
    source = Source(Journal("vllm.service"))
    wait_until(lambda: source.read() == [] and not source.up, "the complaint is told")
    assert "Hint: You are currently not seeing messages from other users and the system. Let" in source.error
    assert len(stand_in.starts) == 1
    source.source.close()


def test_a_journal_that_cannot_be_followed_is_told() -> None:
    with pytest.raises(CannotRead, match="no unit's name"):
        FollowedJournal("--vacuum-size=1")
    source = Source(Journal("no such unit"))
    source.read()
    assert not source.up
