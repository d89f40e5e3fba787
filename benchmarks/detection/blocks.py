"""vLLM V1's block pool with every block apart: reference counts, the prefix cache, and free blocks in LRU order.

After vllm/v1/core/block_pool.py: block 0 is the null block and never handed out; a block whose last reference goes
is appended to the free queue and stays in the prefix cache until it is handed out again; the usage gauge counts it as
free.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence


class BlockPool:
    """``total`` counts the null block, as vLLM's num_gpu_blocks does."""

    def __init__(self, total: int) -> None:
        self.usable = total - 1
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, total))
        self._references = [0] * total
        self._key_of: dict[int, Hashable] = {}
        self._cached: dict[Hashable, int] = {}

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def usage(self) -> float:
        """From 0.10.2 on: without the null block."""
        return 1.0 - self.free / self.usable

    def referenced(self) -> int:
        return sum(count > 0 for count in self._references)

    def cached_prefix(self, keys: Sequence[Hashable]) -> list[int]:
        """The blocks of the longest run of ``keys`` from the start that the cache has."""
        found = []
        for key in keys:
            block = self._cached.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def unreferenced(self, blocks: Iterable[int]) -> int:
        """How many of ``blocks`` would leave the free queue when touched."""
        return sum(self._references[block] == 0 for block in blocks)

    def touch(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            if self._references[block] == 0:
                del self._free[block]
            self._references[block] += 1

    def take(self, count: int) -> list[int]:
        """The least recently used free blocks, forgotten by the prefix cache. Raises ValueError when too few are."""
        if count > self.free:
            raise ValueError(f"{count} blocks wanted, {self.free} free")
        taken = []
        for _ in range(count):
            block, _ = self._free.popitem(last=False)
            key = self._key_of.pop(block, None)
            if key is not None:
                del self._cached[key]
            self._references[block] = 1
            taken.append(block)
        return taken

    def remember(self, block: int, key: Hashable) -> None:
        """A full, computed block enters the prefix cache unless its content is there already."""
        if key not in self._cached and block not in self._key_of:
            self._cached[key] = block
            self._key_of[block] = key

    def give_back(self, blocks: Sequence[int]) -> None:
        """Drop one reference each, last block first, so that the ends of sequences are evicted before their starts."""
        for block in reversed(blocks):
            self._references[block] -= 1
            if self._references[block] == 0:
                self._free[block] = None

    def reset_prefix_cache(self) -> None:
        self._cached.clear()
        self._key_of.clear()
