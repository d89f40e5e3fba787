"""The daemon's memory survives restarts, kills, full disks and files that are not its own."""

from __future__ import annotations

import json
import os
import pickle
import sqlite3
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from oomwatch import savedstate
from oomwatch.database import FILE, Archive, Block, Database, Limits, Unusable, opened
from oomwatch.history import History, default_directory
from oomwatch.judge import Judge
from oomwatch.node import Node
from oomwatch.observations import (
    EngineFacts,
    EngineScrape,
    EngineUpdate,
    GpuPoll,
    HostMemory,
    Memory,
    Observation,
    RankReading,
    Tick,
)
from oomwatch.recording import from_line
from oomwatch.verdicts import Verdict

T0 = 1_790_000_000.0
DEADLINE_S = 20.0
PACE = 50  # minutes told at a stretch: a disk of any speed keeps up, where a node takes as many minutes to tell them
GIB = 1024**3


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
        threading.Event().wait(0.01)


class Clock:
    """The time, as a test sets it."""

    def __init__(self, now: float = T0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def minute(t: float) -> Iterator[Observation]:
    """What a node tells within one interval."""
    yield GpuPoll(t, "GPU-a", 0, "NVIDIA H100", Memory(80 * GIB, GIB // 2, 70 * GIB, 9 * GIB), ())
    samples = {"kv_cache_usage_perc": 0.5, "num_requests_running": 3, "num_requests_waiting": 0}
    samples |= {"generation_tokens_total": 100 * (t - T0), "num_preemptions_total": 0}
    named = {f'vllm:{name}{{engine="0",model_name="m"}}': value for name, value in samples.items()}
    scrape = from_line(json.dumps({"t": t, "scrape": {"engine": "chat", "ok": True, "samples": named}}))
    assert scrape is not None
    yield scrape
    yield HostMemory(t, 512 * GIB, 100 * GIB)
    yield Tick(t)


class Life:
    """One life of a daemon's memory, with the judge that it belongs to."""

    def __init__(self, folder: Path, clock: Clock, limits: Limits | None = None, save_every: float = 300.0) -> None:
        self.clock = clock
        self.judge = Judge(Node())
        self.history = History(
            folder, limits, intervals={"gpu": 15.0}, clock=clock, retry_every=0.0, save_every=save_every
        )
        self.history.start()
        self.history.restore(self.judge)

    def see(self, observations: Iterable[Observation]) -> None:
        for observation in observations:
            self.clock.now = max(self.clock.now, observation.t)
            self.judge.apply(observation)
            self.history.observe(observation)

    def minutes(self, count: int, *, step: float = 15.0) -> None:
        start = self.clock.now + step
        self.see(EngineUpdate(start, EngineFacts("chat", target="http://127.0.0.1:8000/metrics")) for _ in range(1))
        for index in range(count):
            self.see(minute(start + index * step))
            if index % PACE == PACE - 1 and index + 1 < count:
                self.written()

    def written(self) -> None:
        """Wait until everything that was seen is on disk."""
        wait_until(lambda: self.history.status.last_write == self.clock.now)


@contextmanager
def life(folder: Path, clock: Clock, limits: Limits | None = None) -> Iterator[Life]:
    living = Life(folder, clock, limits)
    try:
        yield living
    finally:
        living.history.stop()


def lines_of(folder: Path) -> list[dict[str, object]]:
    with Archive(folder / FILE) as archive:
        return [json.loads(line) for piece in archive.pieces() for line in piece.text.splitlines()]


def states(verdicts: Iterable[Verdict]) -> dict[tuple[object, ...], str]:
    return {(verdict.name, verdict.subject): verdict.state for verdict in verdicts}


# --- an ordinary restart ---------------------------------------------------------------------------------------


def test_after_a_restart_the_judge_knows_what_it_knew(tmp_path: Path) -> None:
    clock = Clock()
    with life(tmp_path, clock) as first:
        first.minutes(60)
        knew = first.judge.snapshot()
    clock.now += 120
    with life(tmp_path, clock) as second:
        snapshot = second.judge.snapshot()
        assert states(snapshot.verdicts) == states(knew.verdicts)
        assert [engine.facts for engine in snapshot.engines] == [engine.facts for engine in knew.engines]
        assert second.history.status.restored == "from the saved state, and 0 observations after it"


def test_the_gap_between_two_lives_is_marked(tmp_path: Path) -> None:
    clock = Clock()
    with life(tmp_path, clock) as first:
        first.minutes(10)
        last = clock.now
    clock.now += 600
    with life(tmp_path, clock) as second:
        second.minutes(1)
    gaps = [line for line in lines_of(tmp_path) if "gap" in line]
    assert gaps == [{"t": last + 600, "gap": {"seconds": 600.0}}]


def test_a_restart_is_no_silence_of_the_sources(tmp_path: Path) -> None:
    clock = Clock()
    with life(tmp_path, clock) as first:
        first.minutes(40)
    clock.now += 1800
    with life(tmp_path, clock) as second:
        second.see([Tick(clock.now)])
        stale = [verdict for verdict in second.judge.verdicts() if verdict.name == "source-stale"]
        assert stale
        assert {verdict.state for verdict in stale} == {"clear"}


def test_what_came_after_the_last_saved_state_is_replayed(tmp_path: Path) -> None:
    clock = Clock()
    first = Life(tmp_path, clock, save_every=1e9)
    first.minutes(1)  # the first tick saves a state
    first.written()
    first.minutes(40)
    first.written()
    knew = first.judge.snapshot()
    abandon(first)
    with life(tmp_path, clock) as second:
        assert second.history.status.restored.startswith("from the saved state, and 16")
        assert states(second.judge.verdicts()) == states(knew.verdicts)


def abandon(living: Life) -> None:
    """Let go of the file as a killed process does: without a word."""
    database = living.history._database
    assert database is not None
    os.close(database._lock)


def test_a_state_of_another_version_is_made_anew_from_the_flight_recorder(tmp_path: Path) -> None:
    clock = Clock()
    with life(tmp_path, clock) as first:
        first.minutes(60)
        knew = first.judge.snapshot()
    with sqlite3.connect(tmp_path / FILE) as connection:
        connection.execute("UPDATE state SET fingerprint = 'another'")
    connection.close()
    with life(tmp_path, clock) as second:
        assert second.history.status.restored == "by replaying the flight recorder"
        assert states(second.judge.verdicts()).keys() == states(knew.verdicts).keys()


@pytest.mark.parametrize("age", [25 * 3600.0, -3600.0])
def test_a_state_that_is_too_old_or_in_the_future_is_not_used(tmp_path: Path, age: float) -> None:
    clock = Clock()
    with life(tmp_path, clock) as first:
        first.minutes(5)
    clock.now += age
    with life(tmp_path, clock) as second:
        assert second.history.status.restored == ""
        assert second.judge.verdicts() == ()


def test_nothing_but_our_own_data_is_loaded_from_a_state() -> None:
    for evil in (os.system, print, subprocess.Popen, Path, pickle.loads, savedstate.load):
        data = zlib.compress(pickle.dumps(evil))
        with pytest.raises(savedstate.CannotRestore, match="none of oomwatch's data"):
            savedstate.load(data)


@pytest.mark.parametrize("data", [b"", b"garbage", zlib.compress(b"garbage"), zlib.compress(b"N.")])
def test_damaged_states_are_refused(data: bytes) -> None:
    with pytest.raises(savedstate.CannotRestore):
        savedstate.load(data)


# --- kill -9 ---------------------------------------------------------------------------------------------------

WRITER = """
import sys
from pathlib import Path
from tests.test_history import Clock, Life
clock = Clock(float(sys.argv[2]))
life = Life(Path(sys.argv[1]), clock, save_every=15.0)
while True:
    life.minutes(1)
    life.written()
    print(clock.now, file=sys.stderr, flush=True)
"""


def test_a_kill_in_the_middle_of_writing_loses_nothing_that_was_written(tmp_path: Path) -> None:
    clock = Clock()
    for _ in range(3):
        written = killed_while_writing(tmp_path, clock.now)
        clock.now = written + 30
        with life(tmp_path, clock) as after:
            assert after.history.status.problem == ""
            assert after.history.status.restored.startswith(("from the saved state", "by replaying"))
            assert after.judge.node.t == clock.now
        assert written in [line["t"] for line in lines_of(tmp_path) if "tick" in line]
        assert not list(tmp_path.glob("*set-aside*"))


def killed_while_writing(folder: Path, start: float) -> float:
    """Time of the last interval that a writer knew to be on disk when it was killed."""
    command = [sys.executable, "-c", WRITER, str(folder), str(start)]
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, cwd=Path(__file__).parents[1]
    ) as process:
        assert process.stderr is not None
        told = [process.stderr.readline() for _ in range(20)]
        process.kill()
        told += process.stderr.readlines()
    return float(told[-1])


# --- files that cannot be used ---------------------------------------------------------------------------------


def torn(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 3] + os.urandom(len(data) // 3))


def cut_off(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:5000])


def foreign(path: Path) -> None:
    path.unlink()
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE customers (name TEXT)")
    connection.close()


def no_database(path: Path) -> None:
    path.write_bytes(b"Dear diary, " * 1000)


def newer(path: Path) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version = 99")
    connection.close()


@pytest.mark.parametrize("spoil", [torn, cut_off, foreign, no_database, newer])
def test_a_file_that_cannot_be_used_is_set_aside_and_a_new_one_begins(
    tmp_path: Path, spoil: Callable[[Path], None]
) -> None:
    clock = Clock()
    with life(tmp_path, clock) as first:
        first.minutes(200)
    with sqlite3.connect(tmp_path / FILE) as connection:  # as after a crash, so that it is looked through
        connection.execute("UPDATE meta SET value = '0' WHERE key = 'clean'")
    connection.close()
    spoil(tmp_path / FILE)
    spoilt = (tmp_path / FILE).read_bytes()
    with life(tmp_path, clock) as second:
        second.minutes(5)
        second.written()
        assert second.history.status.problem == ""
    (kept,) = tmp_path.glob("history.db.set-aside-*")
    assert kept.read_bytes() == spoilt
    assert len([line for line in lines_of(tmp_path) if "tick" in line]) == 5


def test_a_second_daemon_keeps_its_history_in_memory_and_says_who_has_the_file(tmp_path: Path) -> None:
    clock = Clock()
    with life(tmp_path, clock) as first:
        first.minutes(2)
        second = Life(tmp_path, Clock())
        second.minutes(3)
        wait_until(lambda: second.history.status.waiting_bytes > 0)
        assert second.history.status.problem == (
            f"another oomwatch (pid {os.getpid()}) keeps its history in {tmp_path}. Give each its own history.directory"
        )
        first.written()
        assert first.history.status.problem == ""
    second.minutes(1)  # the first has let go of it
    second.written()
    assert second.history.status.problem == ""
    second.history.stop()
    assert len([line for line in lines_of(tmp_path) if "tick" in line]) == 2 + 4


def test_a_file_that_another_program_holds_is_written_later(tmp_path: Path) -> None:
    with life(tmp_path, Clock()) as first:
        first.minutes(1)
        first.written()
        holder = sqlite3.connect(tmp_path / FILE, isolation_level=None)
        holder.execute("BEGIN EXCLUSIVE")
        first.minutes(2)
        wait_until(lambda: "locked" in first.history.status.problem)
        holder.execute("ROLLBACK")
        holder.close()
        first.minutes(1)
        first.written()
        assert first.history.status.problem == ""
        assert first.history.status.lost_observations == 0
    assert len([line for line in lines_of(tmp_path) if "tick" in line]) == 4


def test_a_folder_that_cannot_be_made_switches_it_off_with_the_reason() -> None:
    with life(Path("/proc/oomwatch"), Clock()) as first:
        first.minutes(2)
        assert first.history.status.problem == "/proc/oomwatch cannot be made: no such file or directory"
        assert first.judge.node.t == first.clock.now


FULL_DISK = """
import resource, sys
from pathlib import Path
from tests.test_history import Clock, Life, wait_until
life = Life(Path(sys.argv[1]), Clock())
life.minutes(3)
life.written()
resource.setrlimit(resource.RLIMIT_FSIZE, (64, resource.RLIM_INFINITY))
life.minutes(50)
wait_until(lambda: life.history.status.problem)
print(life.history.status.problem, flush=True)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
life.minutes(1)
life.written()
assert life.history.status.problem == "", life.history.status
assert life.history.status.lost_observations == 0, life.history.status
life.history.stop()
"""


def test_a_disk_that_takes_no_more_is_told_and_written_again_once_it_does(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(tmp_path)],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
        cwd=Path(__file__).parents[1],
    )
    assert done.returncode == 0, done.stderr
    assert any(words in done.stdout for words in ("disk I/O error", "full"))
    ticks = [line["t"] for line in lines_of(tmp_path) if "tick" in line]
    assert len(ticks) == 54
    assert not list(tmp_path.glob("*set-aside*"))


# --- bounds ----------------------------------------------------------------------------------------------------


def test_what_is_older_than_the_configuration_keeps_goes(tmp_path: Path) -> None:
    with life(tmp_path, Clock(), Limits(keep=3600.0)) as first:
        first.minutes(600)
        first.written()
        oldest = first.history.status.oldest
        assert oldest is not None
        assert first.clock.now - 3600 - 15 <= oldest <= first.clock.now - 3600 + 15


def test_the_oldest_goes_where_the_bytes_do_not_suffice(tmp_path: Path) -> None:
    limit = 200_000
    database = opened(tmp_path, Limits(max_bytes=limit))
    for number in range(300):
        block = Block.of([os.urandom(4000).hex()], T0 + number, T0 + number)
        database.write([block], T0 + number)
    database.close()
    with sqlite3.connect(tmp_path / FILE) as connection:
        ((held, oldest),) = connection.execute("SELECT SUM(LENGTH(data)), MIN(first) FROM blocks")
    connection.close()
    assert limit * 0.9 <= held <= limit
    assert (tmp_path / FILE).stat().st_size < limit * 2.5
    assert oldest > T0 + 250


def test_floors_and_maxima_of_each_half_hour_are_kept(tmp_path: Path) -> None:
    clock = Clock(T0 - T0 % 1800)
    begin = clock.now
    with life(tmp_path, clock) as first:
        for index, free in enumerate((5, 3, 9, 7)):
            memory = Memory(80 * GIB, 0, (80 - free) * GIB, free * GIB)
            first.see([GpuPoll(begin + 1000 * index, "GPU-a", 0, "H100", memory), Tick(begin + 1000 * index)])
    with Archive(tmp_path / FILE) as archive:
        assert archive.bins('gpu_memory_free_bytes{gpu="GPU-a"}') == (
            (begin, 3 * GIB, 5 * GIB),
            (begin + 1800, 7 * GIB, 9 * GIB),
        )
        assert archive.series() == ('gpu_memory_free_bytes{gpu="GPU-a"}',)


def test_late_observations_are_written_in_order(tmp_path: Path) -> None:
    with life(tmp_path, Clock()) as first:
        first.see([Tick(T0 + 10), HostMemory(T0 + 4, 2, 1), Tick(T0 + 20)])
    assert [line["t"] for line in lines_of(tmp_path)] == [T0 + 10, T0 + 10, T0 + 20]


def test_nothing_in_the_pipelines_way_waits_for_the_disk(tmp_path: Path) -> None:
    with life(tmp_path, Clock()) as first:
        first.minutes(1)
        first.written()
        holder = sqlite3.connect(tmp_path / FILE, isolation_level=None)
        holder.execute("BEGIN EXCLUSIVE")
        observation = HostMemory(first.clock.now, 2, 1)
        begin = time.process_time()
        for _ in range(1000):
            first.history.observe(observation)
            first.history.observe(Tick(observation.t))
        assert time.process_time() - begin < 5
        wait_until(lambda: first.history.status.lost_observations > 0)
        assert "its disk hangs or is too slow" in first.history.status.problem
        holder.execute("ROLLBACK")
        holder.close()
        first.minutes(2)
        wait_until(lambda: not first.history.status.problem)


def test_a_defect_of_its_own_is_told_and_goes_on_with_what_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with life(tmp_path, Clock()) as first:
        first.minutes(1)
        first.written()
        with monkeypatch.context() as broken:
            broken.setattr(Database, "size", lambda _: 1 // 0)
            first.minutes(1)
            wait_until(lambda: first.history.status.failures > 0)
            assert first.history.status.problem.startswith("a defect of oomwatch: ZeroDivisionError")
        first.minutes(1)
        wait_until(lambda: not first.history.status.problem)


# --- where it is kept ------------------------------------------------------------------------------------------


def test_the_directory_is_systemds_or_the_users(tmp_path: Path) -> None:
    assert default_directory({"STATE_DIRECTORY": "/a:/b"}) == Path("/a")
    system = default_directory({"XDG_STATE_HOME": "/x"})
    assert system in (Path("/var/lib/oomwatch"), Path("/x/oomwatch"))


def test_a_database_that_is_not_there_is_told_to_readers(tmp_path: Path) -> None:
    with pytest.raises(Unusable, match="no oomwatch has kept a history in this directory"):
        Archive(tmp_path / FILE)


# --- what fills a gap ------------------------------------------------------------------------------------------


def test_a_gap_is_filled_from_elsewhere_before_it_is_marked(tmp_path: Path) -> None:
    clock = Clock()
    with life(tmp_path, clock) as first:
        first.minutes(10)
        last = clock.now
    clock.now += 600
    asked: list[tuple[list[str], float, float]] = []

    def fill(engines: Iterable[EngineFacts], since: float, until: float) -> Iterator[Observation]:
        asked.append(([facts.name for facts in engines], since, until))
        yield EngineScrape(since + 100, "chat", "ok", 0.0, ranks=(RankReading("0", usage=0.25),))

    judge = Judge(Node())
    history = History(tmp_path, clock=clock, fill=fill)
    history.start()
    history.restore(judge)
    history.stop()
    assert asked == [(["chat"], last, last + 600)]
    kinds = [next(key for key in line if key != "t") for line in lines_of(tmp_path)][-2:]
    assert kinds == ["scrape", "gap"]
    assert judge.node.engine("chat").last_seen == last + 100
