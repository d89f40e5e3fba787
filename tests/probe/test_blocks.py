"""Who holds the blocks of the KV cache: counted from the scheduler's tables, between two of its calls."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oomwatch_probe.blocks import SHARE, CoreReader, Pool, UnknownSchedulerError
from oomwatch_probe.layout import NUMBERS, TEXTS, Absence
from tests.probe.engine_core import BlockPool, FullAttentionManager, HiSparseSourceManager, Scheduler

Owners = tuple[object, object, object, object]


def owners(scheduler: Scheduler) -> Owners:
    """Referenced blocks, and how many of them are held by living requests, finished ones, and nobody."""
    pool = Pool(scheduler)
    copied = pool.copy()
    assert copied is not None
    counted = pool.count(copied)
    return tuple(counted[f"blocks_{name}"] for name in ("referenced", "living", "finished", "ownerless"))  # type: ignore[return-value]  # there are four


class TestOwners:
    def test_of_an_idle_pool_there_are_none(self) -> None:
        assert owners(Scheduler()) == (0, 0, 0, 0)

    def test_a_request_that_exists_holds_its_blocks(self) -> None:
        scheduler = Scheduler()
        scheduler.admit("a", 3)
        scheduler.admit("b", 4)
        assert owners(scheduler) == (7, 7, 0, 0)

    def test_a_block_of_two_requests_is_one_block(self) -> None:
        scheduler = Scheduler()
        scheduler.admit("a", 3)
        scheduler.admit("b", 2, prefix_of="a")
        assert owners(scheduler) == (5, 5, 0, 0)

    def test_what_a_connector_still_reads_is_held_by_a_finished_request(self) -> None:
        scheduler = Scheduler()
        scheduler.admit("a", 3)
        scheduler.finish("a", keep=True)
        assert owners(scheduler) == (3, 0, 3, 0)

    def test_what_waits_for_a_step_is_held_by_a_finished_request(self) -> None:
        scheduler = Scheduler()
        scheduler.admit("a", 3)
        scheduler.finish("a", later=True)
        assert owners(scheduler) == (3, 0, 3, 0)

    def test_a_block_that_was_not_given_back_is_nobodys(self) -> None:
        scheduler = Scheduler()
        scheduler.admit("a", 3)
        scheduler.admit("b", 3)
        scheduler.finish("a", forget=2)
        assert owners(scheduler) == (5, 3, 0, 2)

    def test_a_table_of_a_request_that_is_gone_is_nobodys(self) -> None:
        scheduler = Scheduler()
        scheduler.admit("a", 3)
        del scheduler.requests["a"]
        assert owners(scheduler) == (3, 0, 0, 3)

    def test_the_null_block_is_nobodys_in_particular(self) -> None:
        """A sliding window puts it in place of what it has left behind."""
        scheduler = Scheduler()
        scheduler.admit("a", 3)
        scheduler.managers[0].req_to_blocks["a"].insert(0, scheduler.pool.null_block)
        assert owners(scheduler) == (3, 3, 0, 0)

    def test_the_groups_of_a_hybrid_model_share_the_pool(self) -> None:
        scheduler = Scheduler(managers=[FullAttentionManager(), FullAttentionManager()])
        scheduler.admit("a", 3)
        assert owners(scheduler) == (6, 6, 0, 0)

    def test_attention_sinks_are_taken_out_of_the_pool(self) -> None:
        """vLLM 0.14 to 0.23 take them from the free queue and never give them back."""
        scheduler = Scheduler()
        manager: Any = scheduler.managers[0]
        manager.sink_blocks = [scheduler.pool.free_block_queue.blocks.popleft() for _ in range(4)]
        pool = Pool(scheduler)
        copied = pool.copy()
        assert copied is not None
        assert pool.count(copied)["blocks_total"] == 28
        assert owners(scheduler) == (0, 0, 0, 0)

    @given(
        st.lists(
            st.tuples(st.sampled_from(["admit", "share", "finish", "keep", "later", "leak"]), st.integers(0, 5)),
            max_size=40,
        )
    )
    def test_add_up_whatever_happens(self, events: list[tuple[str, int]]) -> None:
        scheduler = Scheduler(400)
        living: list[str] = []
        lost = 0
        for number, (event, n) in enumerate(events):
            if event in ("admit", "share"):
                scheduler.admit(str(number), n, prefix_of=living[0] if event == "share" and living else None)
                living.append(str(number))
            elif living and event == "leak":
                # Only where the forgotten ones are nobody else's.
                name = living.pop()
                forget = min(n, len([b for b in scheduler.managers[0].req_to_blocks[name] if b.ref_cnt == 1]))
                blocks = scheduler.managers[0].req_to_blocks[name]
                blocks.sort(key=lambda block: block.ref_cnt)
                scheduler.finish(name, forget=forget)
                lost += forget
            elif living:
                scheduler.finish(living.pop(), keep=event == "keep", later=event == "later")
        referenced, held, finished, ownerless = owners(scheduler)
        assert (held, finished, ownerless) == (referenced - finished - lost, finished, lost)  # type: ignore[operator]  # all are numbers


class TestASchedulerThatIsNotAsExpected:
    @pytest.mark.parametrize(
        ("path", "message"),
        [
            ("kv_cache_manager", "Scheduler has no kv_cache_manager"),
            ("kv_cache_manager.block_pool", "KVCacheManager has no block_pool"),
            ("kv_cache_manager.coordinator", "KVCacheManager has no coordinator"),
            ("kv_cache_manager.coordinator.single_type_managers", "Coordinator has no single_type_managers"),
            ("pool.free_block_queue", "BlockPool has no free_block_queue"),
            ("pool.null_block", "BlockPool has no null_block"),
            ("requests", "Scheduler has no requests"),
        ],
    )
    def test_is_refused_before_it_works(self, path: str, message: str) -> None:
        scheduler: Any = Scheduler()
        *parents, name = path.split(".")
        thing = scheduler
        for parent in parents:
            thing = getattr(thing, parent)
        delattr(thing, name)
        with pytest.raises(UnknownSchedulerError, match=message):
            Pool(scheduler)

    def test_of_an_unknown_kind_of_cache_the_owners_are_absent(self) -> None:
        scheduler = Scheduler(managers=[FullAttentionManager(), HiSparseSourceManager()])
        scheduler.admit("a", 3)
        assert owners(scheduler) == (6, 6, 0, Absence.NOT_APPLICABLE)
        assert "HiSparseSourceManager" in Pool(scheduler).owners_note

    def test_of_a_connector_with_blocks_of_its_own_the_ownerless_are_absent(self) -> None:
        scheduler = Scheduler()
        scheduler.connector = connector(SimpleNamespace(pools=[]))
        assert Pool(scheduler).owners_note == ""
        scheduler.connector = connector(part(gpu_block_pool=scheduler.pool))
        assert Pool(scheduler).owners_note == "Connector takes blocks of its own beside those of requests"
        assert owners(scheduler)[-1] is Absence.NOT_APPLICABLE

    def test_a_connector_that_was_given_the_cache_manager_has_none(self) -> None:
        scheduler = Scheduler()
        scheduler.connector = connector(part(_kv_cache_manager=scheduler.kv_cache_manager))
        assert Pool(scheduler).owners_note == ""


def part(**attributes: Any) -> Any:
    kind = type("Part", (), {"__module__": "vllm.distributed.kv_transfer.parts"})
    made = kind()
    vars(made).update(attributes)
    return made


def connector(inner: Any) -> Any:
    made = type("Connector", (), {"__module__": "vllm.distributed.kv_transfer.kv_connector.v1.some"})()
    vars(made)["_connectors"] = [inner]
    return made


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class TestReading:
    @pytest.fixture
    def scheduler(self) -> Scheduler:
        return Scheduler()

    @pytest.fixture
    def clock(self) -> Clock:
        return Clock()

    @pytest.fixture
    def reader(self, scheduler: Scheduler, clock: Clock) -> CoreReader:
        return CoreReader(scheduler, 1.0, clock)

    def step(self, reader: CoreReader) -> None:
        for is_step in (True, False):
            reader.enter(is_step)
            reader.leave()

    def test_every_number_has_its_place_in_the_file(self, reader: CoreReader) -> None:
        self.step(reader)
        for _ in range(2):
            reader.read()
        assert set(reader.numbers) <= set(NUMBERS)
        assert set(reader.texts) <= set(TEXTS)
        assert {name for name in NUMBERS if name.startswith(("blocks_", "requests_"))} <= set(reader.numbers)

    def test_a_scheduler_that_rests_is_read_without_it(self, reader: CoreReader, scheduler: Scheduler) -> None:
        scheduler.admit("a", 3)
        reader.read()
        assert reader.numbers["blocks_living"] == 3

    def test_one_that_works_makes_the_copy_between_two_of_its_calls(
        self, reader: CoreReader, scheduler: Scheduler
    ) -> None:
        self.step(reader)
        reader.read()
        assert "blocks_living" not in reader.numbers
        scheduler.admit("a", 3)
        reader.enter(True)
        scheduler.admit("b", 4)
        reader.leave()
        reader.read()
        assert (reader.numbers["blocks_living"], reader.numbers["requests_living"]) == (3, 1)

    def test_one_that_hangs_in_the_middle_of_its_work_is_not_read(self, reader: CoreReader) -> None:
        reader.enter(True)
        for _ in range(5):
            reader.read()
        assert "blocks_living" not in reader.numbers
        reader.leave()
        reader.read()
        reader.read()
        assert reader.numbers["blocks_living"] == 0

    def test_a_call_within_another_is_no_rest(self, reader: CoreReader) -> None:
        reader.enter(True)
        reader.enter(False)
        reader.leave()
        for _ in range(5):
            reader.read()
        assert "blocks_living" not in reader.numbers

    def test_a_copy_is_thrown_away_when_a_request_is_aborted_meanwhile(
        self, reader: CoreReader, scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        scheduler.admit("a", 3)
        copy = Pool.copy

        def interrupted(pool: Pool) -> object:
            copied = copy(pool)
            scheduler.finish("a")
            return copied

        with monkeypatch.context() as patch:
            patch.setattr(Pool, "copy", interrupted)
            reader.read()
        assert "blocks_living" not in reader.numbers
        reader.read()
        assert (reader.numbers["blocks_living"], reader.numbers["blocks_ownerless"]) == (0, 0)

    def test_steps_are_counted(self, reader: CoreReader) -> None:
        for _ in range(5):
            self.step(reader)
        reader.read()
        assert reader.numbers["steps"] == 5
        assert isinstance(reader.numbers["last_step_ns"], int)

    def test_a_large_pool_is_counted_less_often(self, clock: Clock) -> None:
        """As often as its cost allows: SHARE of the time."""
        scheduler = Scheduler(200_001)
        scheduler.admit("a", 200_000)
        reader = CoreReader(scheduler, 0.0, clock)
        reader.read()
        assert reader.numbers["blocks_living"] == 200_000
        assert reader._due > 0.001 / SHARE

    def test_free_blocks_that_a_prefix_can_hit_are_counted(self, reader: CoreReader, scheduler: Scheduler) -> None:
        scheduler.admit("a", 5)
        for block in scheduler.managers[0].req_to_blocks["a"][:4]:
            block.block_hash = b"hash"
        reader.read()
        assert (reader.numbers["blocks_free_cached"], reader.numbers["blocks_free"]) == (0, 27)
        scheduler.finish("a")
        reader._due = 0.0
        reader.read()
        assert (reader.numbers["blocks_free_cached"], reader.numbers["blocks_free"]) == (4, 32)

    def test_a_block_that_is_free_and_held_at_once_is_no_leak(self, reader: CoreReader, scheduler: Scheduler) -> None:
        scheduler.admit("a", 3)
        scheduler.pool.free_blocks(scheduler.managers[0].req_to_blocks["a"][:1])
        reader.read()
        assert reader.numbers["blocks_ownerless"] is Absence.FAILED
        assert reader.texts["blocks_note"] == "1 blocks are held by requests and free at the same time"

    def test_one_that_it_does_not_know_is_switched_off_for_good(self, clock: Clock) -> None:
        scheduler: Any = Scheduler()
        del scheduler.kv_cache_manager.coordinator
        reader = CoreReader(scheduler, 1.0, clock)
        for _ in range(3):
            reader.read()
            self.step(reader)
        assert reader.switched_off
        assert reader.numbers["blocks_ownerless"] is Absence.SWITCHED_OFF
        assert reader.texts["blocks_note"] == (
            "not a scheduler that the probe knows: KVCacheManager has no coordinator"
        )

    def test_one_that_changes_under_way_does_not_stop_the_engine(
        self, reader: CoreReader, scheduler: Scheduler
    ) -> None:
        self.step(reader)
        reader.read()
        vars(scheduler).pop("requests")
        self.step(reader)
        reader.read()
        assert reader.switched_off
        assert reader.texts["blocks_note"].startswith("AttributeError")

    def test_the_engine_is_not_kept_alive(self) -> None:
        scheduler = Scheduler()
        reader = CoreReader(scheduler, 1.0)
        reader.read()
        del scheduler
        gc.collect()
        assert reader.gone
        reader.read()

    def test_the_rank_is_the_engines_own(self, scheduler: Any) -> None:
        scheduler.vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(data_parallel_rank=2))
        assert CoreReader(scheduler, 1.0).numbers["data_parallel_rank"] == 2
        scheduler.vllm_config.parallel_config.data_parallel_index = 3
        assert CoreReader(scheduler, 1.0).numbers["data_parallel_rank"] == 3


def test_the_pool_of_the_tests_gives_back_what_it_took() -> None:
    pool = BlockPool(5)
    pool.free_blocks(pool.take(4))
    assert pool.free_block_queue.num_free_blocks == 4
