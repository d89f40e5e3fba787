"""A scheduler with a block pool, small enough to see through, with the names that vLLM 0.9.2 to 0.32 give them.

The real one is in tests/e2e/test_probe.py.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass
class Block:
    block_id: int
    ref_cnt: int = 0
    block_hash: bytes | None = None


class Queue:
    def __init__(self, blocks: Iterable[Block]) -> None:
        self.blocks = deque(blocks)

    @property
    def num_free_blocks(self) -> int:
        return len(self.blocks)


class BlockPool:
    def __init__(self, blocks: int) -> None:
        self.num_gpu_blocks = blocks
        self.blocks = [Block(number) for number in range(blocks)]
        self.free_block_queue = Queue(self.blocks)
        self.null_block = self.free_block_queue.blocks.popleft()

    def take(self, n: int) -> list[Block]:
        taken = [self.free_block_queue.blocks.popleft() for _ in range(n)]
        for block in taken:
            block.ref_cnt = 1
            block.block_hash = None
        return taken

    def touch(self, blocks: Iterable[Block]) -> None:
        for block in blocks:
            block.ref_cnt += 1

    def free_blocks(self, blocks: Iterable[Block]) -> None:
        for block in blocks:
            block.ref_cnt -= 1
            if block.ref_cnt == 0:
                self.free_block_queue.blocks.append(block)


class FullAttentionManager:
    def __init__(self) -> None:
        self.req_to_blocks: defaultdict[str, list[Block]] = defaultdict(list)


class HiSparseSourceManager(FullAttentionManager):
    """One that the probe does not know."""


class Coordinator:
    def __init__(self, managers: Sequence[Any]) -> None:
        self.single_type_managers = tuple(managers)


class KVCacheManager:
    def __init__(self, pool: BlockPool, managers: Sequence[Any]) -> None:
        self.block_pool = pool
        self.coordinator = Coordinator(managers)


class Request:
    def __init__(self) -> None:
        self.finished = False

    def is_finished(self) -> bool:
        return self.finished


class Scheduler:
    """``forgets`` blocks instead of giving them back when it leaks."""

    def __init__(self, blocks: int = 33, managers: Sequence[Any] | None = None) -> None:
        self.pool = BlockPool(blocks)
        self.managers = [FullAttentionManager()] if managers is None else list(managers)
        self.kv_cache_manager = KVCacheManager(self.pool, self.managers)
        self.requests: dict[str, Request] = {}
        self.connector: Any = None
        self.deferred_frees: deque[tuple[int, list[Block]]] = deque()

    def schedule(self) -> None:
        pass

    def update_from_output(self) -> None:
        pass

    def admit(self, name: str, blocks: int, prefix_of: str | None = None) -> None:
        self.requests[name] = Request()
        for manager in self.managers:
            shared = list(manager.req_to_blocks[prefix_of][:1]) if prefix_of is not None else []
            self.pool.touch(shared)
            manager.req_to_blocks[name].extend([*shared, *self.pool.take(blocks)])

    def finish(self, name: str, *, keep: bool = False, later: bool = False, forget: int = 0) -> None:
        """``keep``: a connector still reads its blocks. ``later``: they go back after a step."""
        self.requests[name].finished = True
        if keep:
            return
        del self.requests[name]
        for manager in self.managers:
            blocks = manager.req_to_blocks.pop(name, [])[forget:]
            if later:
                self.deferred_frees.append((1, blocks))
            else:
                self.pool.free_blocks(blocks)
