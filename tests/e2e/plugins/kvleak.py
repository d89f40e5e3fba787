"""A general plugin for vLLM that makes the engine lose KV cache: every Nth freed block is never given back.

`KVLEAK_EVERY=N` turns it on; with `KVLEAK_WHILE=PATH` it leaks only while that file is there. Each block that is lost
is one line on the standard output of the engine core, which the server's log shows: `kvleak: 7 blocks lost`. Written
against the V1 block pool; seen to work with vLLM 0.32.0.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterable
from typing import Any


def register() -> None:
    """vLLM calls this once in each of its processes; the block pool lives in the engine core."""
    every = int(os.environ.get("KVLEAK_EVERY", "0"))
    path = os.environ.get("KVLEAK_WHILE")
    pool_class: Any = importlib.import_module("vllm.v1.core.block_pool").BlockPool
    if every == 0 or hasattr(pool_class, "forget_every"):
        return
    free_blocks = pool_class.free_blocks
    freed = 0
    lost: set[int] = set()  # a lost block may serve again by its cached prefix, and be lost once more

    def forgetful_free_blocks(self: Any, ordered_blocks: Iterable[Any], *arguments: Any, **named: Any) -> Any:
        nonlocal freed
        if path is not None and not os.path.exists(path):
            return free_blocks(self, ordered_blocks, *arguments, **named)
        given_back = []
        for block in ordered_blocks:
            freed += 1
            if freed % every:
                given_back.append(block)
            elif block.block_id not in lost:
                lost.add(block.block_id)
                print(f"kvleak: {len(lost)} blocks lost", flush=True)
        return free_blocks(self, given_back, *arguments, **named)

    pool_class.free_blocks = forgetful_free_blocks
    pool_class.forget_every = every
