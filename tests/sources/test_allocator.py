"""Files of oomwatch-probe: who is believed, what is absent with a reason, and what is cleared away."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from oomwatch import probe_layout as layout
from oomwatch.observations import (
    AllocationFailure,
    AllocatorReport,
    BlockOwners,
    Observation,
    SourceRun,
    TargetRemoved,
)
from oomwatch.probe_layout import Absence
from oomwatch.sources.allocator import AllocatorSource, Outcome
from tests.sources.programs import FakeProc, wait_until

GIB = 1 << 30
NOW = 1_790_000_000.0
HOST_NAMESPACE, CONTAINER = 4026531836, 4026532999
PID, TICKS, USER = 4712, 777, os.getuid()
GPU = "GPU-5a3f0c1e-93b1-4d6e-8f0a-2b7c9d1e4f60"

Numbers = dict[str, int | Absence]

WORKER: Numbers = {
    "allocated_bytes": 60 * GIB,
    "allocated_bytes_peak": 61 * GIB,
    "reserved_bytes": 63 * GIB,
    "inactive_split_bytes": 2 * GIB,
    "alloc_retries": 3,
    "ooms": 0,
    "private_pools_reserved_bytes": GIB,
    "expandable_segments": 0,
    "free_bytes": 2 * GIB,
    "largest_free_block_bytes": GIB // 2,
    "releasable_bytes": GIB // 4,
    "free_bytes_class_0": 0,
    "free_bytes_class_1": GIB,
    "free_bytes_class_10": GIB,
}
CORE: Numbers = {
    "blocks_total": 1000,
    "blocks_free": 700,
    "blocks_living": 250,
    "blocks_finished": 30,
    "blocks_ownerless": 20,
    "blocks_free_cached": 100,
    "data_parallel_rank": 1,
}


def ns(t: float) -> int:
    return round(t * 1e9)


class Node:
    """A directory, a /proc, and a source that reads both; a clock that a test moves."""

    def __init__(self, folder: Path) -> None:
        self.directory = folder / "run"
        self.directory.mkdir()
        self.proc = folder / "proc"
        self.fake = FakeProc(self.proc)
        self.now = NOW
        self.engines: dict[int, str] = {PID: "llm"}
        self.devices: Sequence[str] = ()
        self.published: list[Observation] = []
        self._namespace_of("self", HOST_NAMESPACE)
        self.source = self.new_source()

    def new_source(self) -> AllocatorSource:
        return AllocatorSource(
            [self.directory],
            self.published.append,
            self.engines.get,
            lambda _pid: self.devices,
            clock=lambda: self.now,
            proc=self.proc,
        )

    def _namespace_of(self, pid: int | str, namespace: int) -> None:
        folder = self.fake.root / str(pid) / "ns"
        folder.mkdir()
        (folder / "pid").symlink_to(f"pid:[{namespace}]")

    def process(
        self, pid: int = PID, inner: int | None = None, namespace: int | None = HOST_NAMESPACE, ticks: int = TICKS
    ) -> None:
        pids = str(pid) if inner is None else f"{pid}\t{inner}"
        self.fake.add(pid, "VLLM::Worker_TP0", ticks=ticks, status=f"Name:\tx\nUid:\t7\t{USER}\t7\t7\nNSpid:\t{pids}\n")
        if namespace is not None:
            self._namespace_of(pid, namespace)

    def write(
        self,
        numbers: Numbers,
        texts: dict[str, str] | None = None,
        *,
        pid: int = PID,
        namespace: int = HOST_NAMESPACE,
        ticks: int = TICKS,
        ago: float = 0.0,
    ) -> Path:
        told = ns(self.now - ago)
        written: Numbers = {"heartbeat_ns": told, "interval_ns": ns(1.0), "blocks_time_ns": told, **numbers}
        path = self.directory / layout.file_name(namespace, pid, ticks)
        path.write_bytes(layout.encode(1, written, {"device_uuid": GPU, **(texts or {})}))
        return path

    def read(self) -> list[Observation]:
        self.published.clear()
        self.source.read()
        return [one for one in self.published if isinstance(one, (AllocatorReport, BlockOwners))]

    def outcome(self) -> Outcome:
        self.read()
        (outcome,) = self.source.outcomes
        return outcome

    def runs(self) -> dict[str, str]:
        """Errors of the source's runs by target."""
        return {one.target: one.error for one in self.published if isinstance(one, SourceRun)}


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


class TestWhatIsTold:
    def test_an_allocators_statistics_under_pytorchs_names(self, node: Node) -> None:
        node.process()
        node.write(WORKER, {"allocator_backend": "native"})
        (report,) = node.read()
        assert isinstance(report, AllocatorReport)
        assert report.stats == {
            "allocated_bytes.all.current": 60 * GIB,
            "allocated_bytes.all.peak": 61 * GIB,
            "reserved_bytes.all.current": 63 * GIB,
            "inactive_split_bytes.all.current": 2 * GIB,
            "num_alloc_retries": 3,
            "num_ooms": 0,
        }
        assert (report.t, report.pid, report.gpu, report.engine) == (NOW, PID, GPU, "llm")
        assert report.started == 1_700_000_000 + TICKS / os.sysconf("SC_CLK_TCK")
        assert (report.largest_free_block, report.free, report.releasable) == (GIB // 2, 2 * GIB, GIB // 4)
        assert report.free_by_size == ((0, 0), (1 << 20, GIB), (1 << 29, GIB))
        assert (report.private_reserved, report.private_free, report.expandable) == (GIB, None, False)
        assert (report.backend, report.max_split_size, report.failure) == ("native", None, None)

    def test_whose_the_blocks_of_a_rank_are_and_when_they_were_counted(self, node: Node) -> None:
        node.process()
        node.write(CORE, ago=2)
        assert node.read() == [BlockOwners(NOW, PID, "1", NOW - 2, 1000, 700, 250, 30, 20, 100)]

    def test_both_where_the_worker_lives_in_the_engine_core(self, node: Node) -> None:
        node.process()
        node.write(WORKER | CORE)
        assert len(node.read()) == 2

    def test_the_numbers_of_an_allocation_that_failed(self, node: Node) -> None:
        node.process()
        failed: Numbers = {
            "oom_time_ns": ns(NOW - 60),
            "oom_request_bytes": GIB,
            "oom_device_free_bytes": GIB // 2,
            "oom_allocated_bytes": 60 * GIB,
            "oom_reserved_bytes": 63 * GIB,
            "oom_device_total_bytes": 80 * GIB,
        }
        node.write(WORKER | failed)
        (report,) = node.read()
        assert isinstance(report, AllocatorReport)
        assert report.failure == AllocationFailure(NOW - 60, GIB, GIB // 2, 60 * GIB, 63 * GIB, 80 * GIB)

    def test_an_allocator_that_cannot_be_read_tells_that_it_is_there(self, node: Node) -> None:
        node.process()
        node.write({"allocated_bytes": Absence.SWITCHED_OFF})
        (report,) = node.read()
        assert isinstance(report, AllocatorReport)
        assert report.stats == {}

    def test_nothing_before_the_process_has_an_allocator_or_a_pool(self, node: Node) -> None:
        node.process()
        node.write({})
        assert node.read() == []
        assert node.source.outcomes[0].state == "told"

    def test_what_the_probe_does_not_read_with_its_own_words(self, node: Node) -> None:
        node.process()
        node.write(CORE, {"allocator_note": "sleep mode is on\x1b[31m", "blocks_note": "unknown scheduler"})
        outcome = node.outcome()
        assert (outcome.state, outcome.why) == ("told", "")
        assert outcome.note == "sleep mode is on[31m; unknown scheduler"

    def test_owners_that_cannot_be_told_leave_the_other_counts(self, node: Node) -> None:
        node.process()
        node.write(CORE | {"blocks_ownerless": Absence.NOT_APPLICABLE})
        (owners,) = node.read()
        assert isinstance(owners, BlockOwners)
        assert (owners.ownerless, owners.free) == (None, 700)

    def test_counts_that_contradict_each_other_are_none(self, node: Node) -> None:
        node.process()
        node.write(CORE | {"blocks_free": 900})
        assert node.read() == []

    def test_numbers_that_no_gpu_has_are_absent(self, node: Node) -> None:
        node.process()
        node.write(WORKER | {"reserved_bytes": 1 << 60, "largest_free_block_bytes": (1 << 63) - 1})
        (report,) = node.read()
        assert isinstance(report, AllocatorReport)
        assert report.largest_free_block is None
        assert "reserved_bytes.all.current" not in report.stats

    @pytest.mark.parametrize(
        ("listed", "told", "device"),
        [
            ((), GPU, GPU),
            ((GPU,), GPU, GPU),
            (("MIG-1",), GPU, "MIG-1"),  # PyTorch does not tell a slice's uuid
            (("GPU-1",), "", "GPU-1"),
            (("GPU-1", "GPU-2"), "", ""),
            ((), 'GPU-"} 1', ""),
        ],
    )
    def test_the_device_is_the_one_that_lists_the_process(
        self, node: Node, listed: Sequence[str], told: str, device: str
    ) -> None:
        node.process()
        node.devices = listed
        node.write(WORKER, {"device_uuid": told})
        (report,) = node.read()
        assert isinstance(report, AllocatorReport)
        assert report.gpu == device


class TestWhoIsBelieved:
    def test_a_process_of_a_container_by_its_pid_there(self, node: Node) -> None:
        node.process(PID, inner=7, namespace=CONTAINER)
        node.write(WORKER, pid=7, namespace=CONTAINER)
        (report,) = node.read()
        assert isinstance(report, AllocatorReport)
        assert report.pid == PID

    def test_of_two_containers_with_the_same_pid_and_start_the_right_one(self, node: Node) -> None:
        node.process(PID + 1, inner=7, namespace=CONTAINER + 1)
        node.process(PID, inner=7, namespace=CONTAINER)
        node.write(WORKER, pid=7, namespace=CONTAINER)
        (report,) = node.read()
        assert isinstance(report, AllocatorReport)
        assert report.pid == PID

    def test_another_users_process_whose_namespace_may_not_be_asked_for(self, node: Node) -> None:
        node.process(PID, inner=7, namespace=None)
        node.write(WORKER, pid=7, namespace=CONTAINER)
        assert len(node.read()) == 1

    def test_not_a_process_that_took_the_pid_over(self, node: Node) -> None:
        node.process(ticks=TICKS + 1)
        node.write(WORKER)
        assert node.read() == []
        assert node.source.outcomes[0].state == "left_over"

    def test_no_process_of_no_engine(self, node: Node) -> None:
        node.process()
        node.engines.clear()
        node.write(WORKER)
        outcome = node.outcome()
        assert (outcome.state, outcome.why) == ("stranger", f"process {PID} is no known engine's")

    @pytest.mark.skipif(os.getuid() != 0, reason="only root can write a file for another user")
    def test_no_file_of_another_user_than_the_process_is(self, node: Node) -> None:
        node.process()
        os.chown(node.write(WORKER), 12345, -1)
        outcome = node.outcome()
        assert (outcome.state, outcome.why) == (
            "stranger",
            "it belongs to another user than the process that it speaks for",
        )

    def test_without_the_hosts_pids_only_those_of_its_own_namespace(self, tmp_path: Path) -> None:
        node = Node(tmp_path)
        node.fake.remove(2)  # kthreadd
        node.source = node.new_source()
        node.process()
        node.write(WORKER)
        foreign = node.write(WORKER, namespace=CONTAINER, ago=3600)
        assert len(node.read()) == 1
        assert {outcome.state for outcome in node.source.outcomes} == {"told", "stranger"}
        assert foreign.exists()


class TestLookingForWriters:
    """A pass over all processes costs more than one over the files: it is made where it may find something."""

    @pytest.fixture
    def stranger(self, node: Node) -> Path:
        """A file whose writer was not found, and can be found from now on."""
        path = node.write(WORKER)
        assert node.outcome().state == "left_over"
        node.process()
        return path

    @pytest.mark.usefixtures("stranger")
    def test_one_that_was_not_found_is_looked_for_again_after_fifteen_seconds(self, node: Node) -> None:
        node.now += 14
        assert node.outcome().state == "left_over"
        node.now += 1
        node.write(WORKER)
        assert node.outcome().state == "told"

    @pytest.mark.usefixtures("stranger")
    def test_a_new_file_has_all_of_them_looked_for_at_once(self, node: Node) -> None:
        node.process(PID + 1)
        node.engines[PID + 1] = "other"
        node.write(WORKER, pid=PID + 1)
        assert len(node.read()) == 2

    def test_a_writer_that_is_known_is_looked_for_no_more(self, node: Node) -> None:
        node.process()
        node.write(WORKER)
        node.read()
        node.process(PID + 1, inner=PID)  # a second candidate, which a search could not tell from the first
        node.now += 60
        node.write(WORKER)
        assert node.outcome().state == "told"


class TestSilence:
    @pytest.mark.parametrize(("ago", "state"), [(15, "told"), (16, "silent"), (-16, "silent")])
    def test_a_heartbeat_older_than_fifteen_seconds_tells_nothing(self, node: Node, ago: float, state: str) -> None:
        node.process()
        node.write(WORKER, ago=ago)
        assert node.outcome().state == state

    def test_a_slow_probe_has_five_of_its_intervals(self, node: Node) -> None:
        node.process()
        node.write(WORKER | {"interval_ns": ns(60)}, ago=299)
        assert node.outcome().state == "told"

    def test_is_a_failure_of_the_source_for_the_engine_and_says_so(self, node: Node) -> None:
        node.process()
        node.write(WORKER, ago=30)
        node.read()
        assert node.runs() == {str(node.directory): "", "llm": f"the probe in process {PID} is silent"}

    def test_a_count_of_ten_minutes_ago_is_history(self, node: Node) -> None:
        node.process()
        node.write(CORE | {"blocks_time_ns": ns(NOW - 601)})
        assert node.read() == []

    def test_an_engine_without_files_any_more_leaves_the_sources(self, node: Node) -> None:
        node.process()
        path = node.write(WORKER)
        node.read()
        path.unlink()
        node.read()
        assert TargetRemoved(NOW, "allocator", "llm") in node.published


class TestLeftOvers:
    def test_a_file_whose_process_has_ended_goes_a_minute_after_its_last_word(self, node: Node) -> None:
        path = node.write(WORKER, ago=59)
        assert node.outcome().state == "left_over"
        assert path.exists()
        node.now += 2
        node.read()
        assert not path.exists()

    def test_a_process_that_is_only_silent_keeps_its_file(self, node: Node) -> None:
        node.process()
        path = node.write(WORKER, ago=7200)
        assert node.outcome().state == "silent"
        assert path.exists()

    def test_a_zombie_has_ended(self, node: Node) -> None:
        node.process()
        node.write(WORKER)
        node.read()
        node.fake.add(PID, ticks=TICKS, state="Z")
        assert node.outcome().state == "left_over"

    def test_the_failure_that_a_process_ended_with_is_told_once_more_with_whose_it_was(self, node: Node) -> None:
        node.process()
        node.write(WORKER)
        node.read()
        node.write(WORKER | {"oom_time_ns": ns(NOW + 1), "oom_request_bytes": GIB})
        node.fake.remove(PID)
        node.engines.clear()
        node.now += 5
        (report,) = node.read()
        assert isinstance(report, AllocatorReport)
        assert report.engine == "llm"
        assert report.failure is not None
        assert report.failure.wanted == GIB
        assert node.read() == []


class TestWhatElseLiesThere:
    """None of it is believed, opened for longer than a look, or removed."""

    def test_files_of_other_names_are_not_looked_at(self, node: Node) -> None:
        for name in ("probe-1-2.oomwatch", "notes", "probe-1-2-3.oomwatch~", f"probe-{'9' * 40}-1-1.oomwatch"):
            (node.directory / name).write_bytes(b"x")
        node.read()
        assert node.source.outcomes == ()
        assert len(list(node.directory.iterdir())) == 4

    @pytest.mark.parametrize(
        ("content", "why"),
        [
            (b"", "0 bytes, and 4096 were expected"),
            (b"\0" * layout.FILE_SIZE, "not a file of oomwatch's probe"),
            (layout.encode(1, {}, {})[:100], "100 bytes, and 4096 were expected"),
            (layout.encode(1, {}, {}) + b"x", "4097 bytes, and 4096 were expected"),
            (b"OOMWATCH\x02" + layout.encode(1, {}, {})[9:], "layout version 2; this is a reader of version 1"),
            (layout.encode(1, {}, {})[:500] + b"x" + layout.encode(1, {}, {})[501:], "the checksum is wrong"),
        ],
    )
    def test_a_file_that_is_none_of_ours_is_named_and_stays(self, node: Node, content: bytes, why: str) -> None:
        path = node.directory / layout.file_name(HOST_NAMESPACE, PID, TICKS)
        path.write_bytes(content)
        outcome = node.outcome()
        assert outcome.state == "unreadable"
        assert outcome.why.startswith(why)
        assert path.exists()
        assert node.runs()[str(node.directory)].startswith(f"{path}: {why}")

    def test_a_file_of_a_terabyte_is_not_read(self, node: Node) -> None:
        path = node.directory / layout.file_name(HOST_NAMESPACE, PID, TICKS)
        with path.open("wb") as file:
            file.truncate(1 << 40)
        assert node.outcome().state == "unreadable"

    def test_a_link_a_pipe_a_socket_and_a_folder_are_left_alone(self, node: Node) -> None:
        secret = node.directory.parent / "secret"
        secret.write_bytes(layout.encode(1, WORKER, {}))
        node.process()
        paths = [node.directory / layout.file_name(HOST_NAMESPACE, PID, ticks) for ticks in (TICKS, 1, 2, 3)]
        paths[0].symlink_to(secret)
        os.mkfifo(paths[1])
        with socket.socket(socket.AF_UNIX) as listening:
            # The path of a socket may have 108 bytes.
            before = os.getcwd()
            os.chdir(node.directory)
            listening.bind(paths[2].name)
            os.chdir(before)
            paths[3].mkdir()
            assert node.read() == []
            assert [outcome.state for outcome in node.source.outcomes] == ["unreadable"] * 4
        assert all(path.is_symlink() or path.exists() for path in paths)

    def test_a_thousand_files_and_no_more_are_looked_at(self, node: Node) -> None:
        for ticks in range(1100):
            (node.directory / layout.file_name(HOST_NAMESPACE, 1, ticks)).touch()
        node.read()
        assert len(node.source.outcomes) == 1024

    def test_a_good_file_among_them_is_read(self, node: Node) -> None:
        node.process()
        node.write(WORKER)
        (node.directory / layout.file_name(1, 1, 1)).write_bytes(b"garbage")
        assert len(node.read()) == 1


class TestTheDirectory:
    def test_one_that_is_missing_is_no_fault_and_no_source(self, tmp_path: Path) -> None:
        published: list[Observation] = []
        AllocatorSource([tmp_path / "none"], published.append, lambda _: None, lambda _: ()).read()
        assert published == []

    def test_one_that_is_none_is_a_failure_with_the_reason(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        published: list[Observation] = []
        AllocatorSource([tmp_path / "file"], published.append, lambda _: None, lambda _: ()).read()
        (run,) = published
        assert isinstance(run, SourceRun)
        assert (run.ok, run.error) == (False, f"{tmp_path / 'file'} cannot be read: not a directory")

    def test_one_that_was_emptied_and_went_away_is_told(self, node: Node) -> None:
        node.process()
        path = node.write(WORKER)
        node.read()
        path.unlink()
        node.directory.rmdir()
        node.read()
        assert TargetRemoved(NOW, "allocator", "llm") in node.published

    def test_several_are_read(self, node: Node, tmp_path: Path) -> None:
        node.process()
        node.process(PID + 1)
        node.engines[PID + 1] = "other"
        node.write(WORKER)
        second = tmp_path / "second"
        second.mkdir()
        node.write(WORKER, pid=PID + 1).rename(second / layout.file_name(HOST_NAMESPACE, PID + 1, TICKS))
        source = AllocatorSource(
            [node.directory, second],
            node.published.append,
            node.engines.get,
            lambda _: (),
            clock=lambda: NOW,
            proc=node.proc,
        )
        source.read()
        assert {one.engine for one in node.published if isinstance(one, AllocatorReport)} == {"llm", "other"}


WRITER = """
import sys, time
from pathlib import Path
from oomwatch_probe.layout import encode
from oomwatch_probe.mailbox import Mailbox, own_identity
identity = own_identity()
now = {"heartbeat_ns": time.time_ns(), "interval_ns": 10**9, "allocated_bytes": 5, "reserved_bytes": 9}
Mailbox(Path(sys.argv[1]), identity).write(encode(1, now, {}))
print(identity.pid, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize(
    "before",
    [
        pytest.param((), id="as-it-is"),
        pytest.param(("unshare", "--pid", "--fork", "--kill-child", "--mount-proc"), id="in-a-pid-namespace"),
        pytest.param(("setpriv", "--reuid=12345", "--regid=12345", "--clear-groups"), id="of-another-user"),
    ],
)
def test_a_real_process_is_found_and_its_end_noticed(before: tuple[str, ...]) -> None:
    """The probe's own mailbox in a process of its own, read through the real /proc."""
    if before and os.getuid() != 0:
        pytest.skip("only root may change namespaces and users")
    with tempfile.TemporaryDirectory() as folder:  # pytest's own folders are for one user
        os.chmod(folder, 0o1777)
        child = subprocess.Popen(
            [*before, sys.executable, "-c", WRITER, folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd="/",
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "probe")},
        )
        published: list[Observation] = []
        source = AllocatorSource([Path(folder)], published.append, lambda _: "llm", lambda _: (), clock=time.time)
        try:
            assert child.stdout is not None
            said = child.stdout.readline()
            if not said and before:
                pytest.skip("this machine does not let Python run in another namespace or as another user")
            inner = int(said)
            source.read()
            (report,) = (one for one in published if isinstance(one, AllocatorReport))
            assert (report.engine, report.current("reserved_bytes")) == ("llm", 9)
            assert (report.pid == inner) == ("--pid" not in before)
            assert report.started == pytest.approx(time.time(), abs=60)
        finally:
            child.kill()
            child.communicate()

        def noticed() -> bool:
            source.read()
            return [outcome.state for outcome in source.outcomes if outcome.state == "told"] == []

        wait_until(noticed, "the end was not noticed")
