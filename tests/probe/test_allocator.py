"""What the probe makes of PyTorch's allocator: its names are PyTorch's, and its sums are the snapshot's."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from oomwatch_probe import allocator
from oomwatch_probe.allocator import AllocatorReader, statistics, summarise
from oomwatch_probe.layout import NUMBERS, SIZE_CLASSES, TEXTS, Absence
from tests.e2e.tools import require_vllm
from tests.probe.torch_shapes import (
    ANOTHER_STREAM,
    EXPANDABLE,
    GRAPHS,
    HEALTHY_SLACK,
    MIB,
    PIECES,
    PIECES_REQUEST,
    REMAINDERS,
    Segment,
    Torch,
    segment,
    stats_of,
)

PROBE = Path(allocator.__file__).parents[1]


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def torch() -> Torch:
    return Torch()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def reader(torch: Torch, clock: Clock) -> AllocatorReader:
    return AllocatorReader(torch, clock)


@pytest.fixture(scope="module")
def documentation() -> str:
    """What the PyTorch of the tests' vLLM says of its own names."""
    code = (
        "import json, torch, oomwatch_probe; oomwatch_probe.register(); memory = torch.cuda.memory;"
        "waiting = [call.__module__ for call, _ in torch.cuda._queued_calls];"
        "print(json.dumps([memory.memory_stats.__doc__, memory._snapshot.__doc__, *waiting,"
        " f'initialised: {torch.cuda.is_initialized()}']))"
    )
    command = [str(require_vllm().python), "-c", code]
    environment = {**os.environ, "PYTHONPATH": str(PROBE)}
    answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60, env=environment)
    return "\n".join(json.loads(answer.stdout.splitlines()[-1]))


def test_it_waits_for_somebody_else_to_initialise_cuda(documentation: str) -> None:
    assert documentation.splitlines()[-2:] == ["oomwatch_probe.probe", "initialised: False"]


class TestNames:
    def test_every_statistic_is_one_of_pytorchs(self, documentation: str) -> None:
        known = set(re.findall(r'``"([a-z_]+)(?:\.[^"]*)?"``', documentation))
        assert {path[0] for path in allocator._STATISTICS.values()} <= known
        assert {allocator._PRIVATE_POOLS, allocator._MAX_SPLIT_SIZE} <= known

    def test_every_field_of_a_segment_is_one_of_pytorchs(self, documentation: str) -> None:
        for name in ("total_size", "segment_pool_id", "blocks", "size", "state", "inactive", "active_allocated"):
            assert name in documentation

    def test_every_number_has_its_place_in_the_file(self, reader: AllocatorReader) -> None:
        reader.read()
        reader.observe_oom(1, 5, 6, 7)
        assert set(reader.numbers) <= set(NUMBERS)
        assert set(reader.texts) <= set(TEXTS)
        written = {name for name in NUMBERS if re.match(r"(free|largest|releasable|private|oom|stats|snapshot)", name)}
        assert written <= set(reader.numbers)


class TestStatistics:
    def test_are_taken_as_they_are(self) -> None:
        values = statistics(stats_of(HEALTHY_SLACK, retries=3, ooms=1))
        assert values["allocated_bytes"] == 2048 * MIB
        assert values["allocated_bytes_peak"] == 2048 * MIB + 7
        assert values["reserved_bytes"] == 3604 * MIB
        assert values["inactive_split_bytes"] == 0
        assert (values["alloc_retries"], values["ooms"], values["segments"]) == (3, 1, 4)

    def test_keep_the_pools_of_graphs_apart(self) -> None:
        assert statistics(stats_of(GRAPHS))["private_pools_reserved_bytes"] == 1024 * MIB

    def test_are_absent_where_this_pytorch_has_no_such_name(self) -> None:
        values = statistics({"allocated_bytes": {"all": {"current": 5}}})
        assert values["allocated_bytes"] == 5
        assert set(values.values()) == {5, Absence.NOT_PROVIDED}

    @pytest.mark.parametrize(
        ("told", "value"), [(-1, Absence.NOT_APPLICABLE), (2**64 - 1, Absence.NOT_APPLICABLE), (20 * MIB, 20 * MIB)]
    )
    def test_a_split_size_that_is_not_set_is_no_number(self, told: int, value: object) -> None:
        assert statistics({"max_split_size": told})["max_split_size_bytes"] == value


class TestSnapshot:
    def test_slack_that_can_be_had_is_releasable(self) -> None:
        found = summarise(HEALTHY_SLACK)
        assert found["free_bytes"] == found["releasable_bytes"] == 1556 * MIB
        assert (found["unreleasable_bytes"], found["largest_free_block_bytes"]) == (0, 1024 * MIB)

    def test_pieces_add_up_to_more_than_the_largest_of_them(self) -> None:
        found = summarise(PIECES)
        free, largest = found["free_bytes"], found["largest_free_block_bytes"]
        assert not isinstance(free, Absence)
        assert not isinstance(largest, Absence)
        assert largest < PIECES_REQUEST < free
        assert found["unreleasable_bytes"] == free
        assert (found["free_blocks"], found["snapshot_blocks"]) == (5, 11)

    def test_remainders_are_in_their_size_class(self) -> None:
        found = summarise(REMAINDERS)
        classes = [found[f"free_bytes_class_{index}"] for index in range(SIZE_CLASSES)]
        assert classes == [0] * 9 + [12 * 260 * MIB] + [0] * 6

    @pytest.mark.parametrize(
        ("size", "index"),
        [(512, 0), (MIB - 1, 0), (MIB, 1), (2 * MIB - 1, 1), (2 * MIB, 2), (16 << 30, 15), (1 << 40, 15)],
    )
    def test_a_size_class_ends_where_the_next_begins(self, size: int, index: int) -> None:
        assert allocator.size_class(size) == index

    def test_what_is_free_for_graphs_only_is_no_free_memory(self) -> None:
        found = summarise(GRAPHS)
        assert (found["free_bytes"], found["private_free_bytes"], found["private_pools"]) == (8 * MIB, 724 * MIB, 1)
        assert found["private_largest_free_block_bytes"] == 724 * MIB

    def test_an_expandable_segment_is_one(self) -> None:
        found = summarise(EXPANDABLE)
        assert (found["snapshot_expandable_segments"], found["free_bytes"]) == (1, 16 * MIB)

    def test_what_another_stream_still_uses_is_not_free(self) -> None:
        found = summarise(ANOTHER_STREAM)
        assert (found["free_bytes"], found["awaiting_free_bytes"]) == (0, 100 * MIB)


class TestReading:
    def test_is_of_the_device_that_the_process_uses(self, reader: AllocatorReader) -> None:
        reader.read()
        assert reader.numbers["device_index"] == 1
        assert reader.numbers["reserved_bytes"] == 3604 * MIB
        assert reader.numbers["free_bytes"] == 1556 * MIB
        assert reader.texts["device_uuid"] == "GPU-6a0c1d2e"
        assert reader.texts["device_pci_bus_id"] == "00000000:1b:00.0"

    def test_waits_until_something_is_reserved(self, torch: Torch, reader: AllocatorReader) -> None:
        torch.stats = stats_of([])
        reader.read()
        assert reader.numbers == {}
        torch.stats = stats_of(HEALTHY_SLACK)
        reader.read()
        assert reader.numbers["device_index"] == 1

    def test_takes_a_snapshot_once_a_minute(self, torch: Torch, clock: Clock, reader: AllocatorReader) -> None:
        for second in range(121):
            clock.now = float(second)
            reader.read()
        assert torch.snapshots == 3

    def test_takes_one_at_once_when_the_allocator_had_to_try_again(
        self, torch: Torch, clock: Clock, reader: AllocatorReader
    ) -> None:
        reader.read()
        torch.stats = stats_of(PIECES, retries=1)
        torch.segments = PIECES
        clock.now = 6.0
        reader.read()
        assert reader.numbers["largest_free_block_bytes"] == 100 * MIB
        for clock.now in (7.0, 8.0, 9.0):
            torch.stats["num_alloc_retries"] += 1
            reader.read()
        assert torch.snapshots == 2

    def test_takes_them_less_often_where_they_cost_more(
        self, torch: Torch, clock: Clock, reader: AllocatorReader, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def slow(segments: object) -> dict[str, int | Absence]:
            list(segments)  # type: ignore[call-overload]  # it is an iterator
            clock.now += 0.1
            return {}

        monkeypatch.setattr(allocator, "summarise", slow)
        for second in range(0, 2000, 10):
            clock.now = max(clock.now, float(second))
            reader.read()
        assert torch.snapshots == 2
        assert pytest.approx(torch.snapshots * 0.1) == 2000 * allocator.SNAPSHOT_SHARE

    def test_takes_none_where_a_recorded_history_would_come_with_it(self, clock: Clock) -> None:
        class Older(Torch):
            def memory_snapshot(self, mempool_id: object = None) -> list[Segment]:  # type: ignore[override]  # as before 2.10
                self.snapshots += 1
                return list(self.segments)

        torch = Older()
        torch._C._cuda_isHistoryEnabled = lambda: True
        reader = AllocatorReader(torch, clock)
        reader.read()
        assert (torch.snapshots, "free_bytes" in reader.numbers) == (0, False)
        torch._C._cuda_isHistoryEnabled = lambda: False
        clock.now = 60.0
        reader.read()
        assert (torch.snapshots, "free_bytes" in reader.numbers) == (1, True)

    def test_is_switched_off_while_sleep_modes_pool_is_there(
        self, torch: Torch, reader: AllocatorReader, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        reader.read()
        pool = SimpleNamespace(instance=None)
        monkeypatch.setitem(sys.modules, "vllm.device_allocator.cumem", SimpleNamespace(CuMemAllocator=pool))
        reader.read()
        assert reader.numbers["sleep_mode"] == 0
        pool.instance = object()
        torch.memory_stats_as_nested_dict = None  # type: ignore[assignment]  # it would wait for ever
        reader.read()
        assert reader.numbers["allocated_bytes"] is Absence.SWITCHED_OFF
        assert reader.numbers["sleep_mode"] == 1
        assert "free_bytes" not in reader.numbers
        assert "sleep mode is on" in reader.texts["allocator_note"]

    def test_is_of_pytorchs_own_allocator_only(self, torch: Torch, reader: AllocatorReader) -> None:
        torch.backend = "pluggable"
        reader.read()
        assert reader.numbers["reserved_bytes"] is Absence.NOT_APPLICABLE
        assert "another program's allocator" in reader.texts["allocator_note"]

    def test_that_fails_says_so_and_goes_on_with_the_next(self, torch: Torch, reader: AllocatorReader) -> None:
        reader.read()
        stats, torch.stats = torch.stats, None  # type: ignore[assignment]  # whatever it is that fails
        reader.read()
        assert dict(reader.numbers)["reserved_bytes"] is Absence.FAILED
        assert reader.texts["allocator_note"].startswith("AttributeError: ")
        torch.stats = stats
        reader.read()
        assert dict(reader.numbers)["reserved_bytes"] == 3604 * MIB
        assert reader.texts["allocator_note"] == ""

    @pytest.mark.parametrize(
        ("environment", "settings", "expandable"),
        [
            ({}, "", 0),
            ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, "expandable_segments:True", 1),
            ({"PYTORCH_ALLOC_CONF": "a:1", "PYTORCH_CUDA_ALLOC_CONF": "b:2"}, "a:1", 0),
        ],
    )
    def test_knows_the_settings(
        self,
        environment: dict[str, str],
        settings: str,
        expandable: int,
        torch: Torch,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
            monkeypatch.delenv(name, raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        reader = AllocatorReader(torch)
        reader.read()
        assert (reader.texts["allocator_settings"], reader.numbers["expandable_segments"]) == (settings, expandable)


class TestAFailedAllocation:
    def test_keeps_the_numbers_of_its_moment(self, torch: Torch, reader: AllocatorReader) -> None:
        reader.read()
        torch.stats, torch.segments = stats_of(PIECES, retries=1, ooms=1), PIECES
        reader.observe_oom(1, PIECES_REQUEST, 80 << 30, 329 * MIB)
        # The engine dies, or goes on and frees: what is told of the failure stays as it was.
        torch.stats, torch.segments = stats_of(HEALTHY_SLACK, retries=1, ooms=1), HEALTHY_SLACK
        reader.read()
        numbers = reader.numbers
        assert (numbers["oom_observed"], numbers["oom_request_bytes"]) == (1, PIECES_REQUEST)
        assert (numbers["oom_device_total_bytes"], numbers["oom_device_free_bytes"]) == (80 << 30, 329 * MIB)
        assert numbers["oom_free_bytes"] == 402 * MIB
        assert numbers["oom_largest_free_block_bytes"] == 100 * MIB
        assert numbers["oom_alloc_retries"] == 1
        assert numbers["reserved_bytes"] == 3604 * MIB

    def test_that_nobody_saw_is_noticed_afterwards(self, torch: Torch, reader: AllocatorReader) -> None:
        reader.read()
        torch.stats = stats_of(PIECES, ooms=1)
        reader.read()
        assert (reader.numbers["oom_observed"], "oom_request_bytes" in reader.numbers) == (0, False)
        assert reader.numbers["oom_reserved_bytes"] == reader.numbers["reserved_bytes"]

    def test_of_many_in_a_row_takes_few_snapshots(self, torch: Torch, clock: Clock, reader: AllocatorReader) -> None:
        for tenth in range(40):
            clock.now = tenth / 10
            torch.stats["num_ooms"] += 1
            reader.observe_oom(1, MIB, 80 << 30, 0)
        assert torch.snapshots == 1
        reader.read()
        assert reader.numbers["oom_observed"] == 1


def test_nothing_of_pytorch_is_imported_by_the_probe() -> None:
    code = "import sys, oomwatch_probe.probe as probe; probe.prepare(); print('torch' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": str(PROBE)}
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert answer.stdout.strip() == "False"


def test_a_segment_without_a_pool_is_an_ordinary_one() -> None:
    """Before PyTorch 2.1 a segment does not name its pool."""
    one = segment((1, "inactive"))
    del one["segment_pool_id"]
    assert summarise([one])["free_bytes"] == MIB
