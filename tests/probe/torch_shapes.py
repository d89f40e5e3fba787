"""What PyTorch's allocator answers, in its own form: ``memory_stats_as_nested_dict`` and ``memory_snapshot``.

The shapes are those of public reports; sizes that a report does not give are made up to fit it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

MIB = 1 << 20
Segment = dict[str, Any]


def statistic(current: int, peak: int | None = None) -> dict[str, dict[str, int]]:
    values = {"current": current, "peak": current if peak is None else peak, "allocated": current, "freed": 0}
    return {"all": values, "large_pool": values, "small_pool": dict.fromkeys(values, 0)}


def stats_of(segments: Sequence[Segment], *, retries: int = 0, ooms: int = 0) -> dict[str, Any]:
    """The statistics that fit a snapshot."""
    blocks = [block for segment in segments for block in segment["blocks"]]
    allocated = sum(block["size"] for block in blocks if block["state"] == "active_allocated")
    reserved = sum(segment["total_size"] for segment in segments)
    split = sum(
        block["size"]
        for segment in segments
        for block in segment["blocks"]
        if block["state"] == "inactive" and block["size"] != segment["total_size"]
    )
    pools = {
        pool: statistic(sum(one["total_size"] for one in segments if one["segment_pool_id"] == pool))
        for pool in {segment["segment_pool_id"] for segment in segments}
    }
    return {
        "allocated_bytes": statistic(allocated, allocated + 7),
        "reserved_bytes": statistic(reserved, reserved + 8),
        "active_bytes": statistic(allocated, allocated + 9),
        "inactive_split_bytes": statistic(split, split + 10),
        "requested_bytes": statistic(allocated - 1, allocated),
        "segment": statistic(len(segments)),
        "num_alloc_retries": retries,
        "num_ooms": ooms,
        "num_device_alloc": len(segments),
        "num_device_free": 0,
        "max_split_size": -1,
        "reserved_bytes_by_private_pools": pools,
    }


def segment(*blocks: tuple[int, str], pool: tuple[int, int] = (0, 0), expandable: bool = False) -> Segment:
    """``blocks`` are sizes in MiB and states; a state is ``active_allocated``, ``active_pending_free`` or inactive."""
    return {
        "device": 0,
        "address": 0x7F0000000000,
        "total_size": sum(size for size, _ in blocks) * MIB,
        "stream": 0,
        "segment_type": "large",
        "segment_pool_id": pool,
        "is_expandable": expandable,
        "blocks": [{"size": size * MIB, "requested_size": size * MIB, "state": state} for size, state in blocks],
    }


USED, FREE, AWAITING = "active_allocated", "inactive", "active_pending_free"

# After profiling: the activations' memory is cached in whole segments. Much is free, and all of it can be had.
HEALTHY_SLACK = [segment((2048, USED)), segment((1024, FREE)), segment((512, FREE)), segment((20, FREE))]

# vllm-project/vllm PR #37428: 384 MiB were wanted, 402 MiB reserved and free, in pieces that are smaller.
PIECES = [
    *(segment((900, USED), (100, FREE)) for _ in range(3)),
    segment((412, USED), (62, FREE), (500, USED)),
    segment((980, USED), (40, FREE)),
]
PIECES_REQUEST = 384 * MIB

# PR #41268: what is left of weights that were loaded and converted: remainders of 260 MiB beside what stays.
REMAINDERS = [segment((252, USED), (260, FREE)) for _ in range(12)]

# CUDA graphs keep a pool of their own, from which nothing else is served.
GRAPHS = [segment((2048, USED), (8, FREE)), segment((300, USED), (724, FREE), pool=(0, 1))]

# expandable_segments:True: one segment for each stream, whose free ends were given back to the driver.
EXPANDABLE = [segment((4000, USED), (16, FREE), (2000, USED), expandable=True)]

ANOTHER_STREAM = [segment((100, AWAITING), (156, USED))]


class Torch:
    """Answers as PyTorch does on a machine with two devices, of which the process uses the second."""

    def __init__(self, segments: Sequence[Segment] = HEALTHY_SLACK) -> None:
        self.stats = stats_of(segments)
        self.segments = segments
        self.snapshots = 0
        self.backend = "native"
        self.cuda: Any = self
        self.initialised = False
        self.waiting: list[Callable[[], object]] = []
        self.observers: list[Callable[[int, int, int, int], object]] = []
        self._C = SimpleNamespace(
            _cuda_isHistoryEnabled=lambda: False, _cuda_attach_out_of_memory_observer=self.observers.append
        )

    __version__ = "2.13.0"

    def is_initialized(self) -> bool:
        return self.initialised

    def _lazy_call(self, call: Callable[[], object]) -> None:
        self.waiting.append(call)

    def initialise(self) -> None:
        """As the first use of a device does it."""
        for call in self.waiting:
            call()
        self.initialised = True

    def fail(self, request: int) -> None:
        """As an allocation does that finds no memory: the observers come before the error."""
        self.stats["num_ooms"] += 1
        for observer in self.observers:
            observer(1, request, 80 << 30, 5 * MIB)

    def device_count(self) -> int:
        return 2

    def get_allocator_backend(self) -> str:
        return self.backend

    def get_device_properties(self, index: int) -> Any:
        assert index == 1
        return SimpleNamespace(uuid="6a0c1d2e", pci_domain_id=0, pci_bus_id=0x1B, pci_device_id=0)

    def memory_stats_as_nested_dict(self, device: int) -> dict[str, Any]:
        return self.stats if device == 1 else stats_of([])

    def memory_snapshot(self, mempool_id: object = None, include_traces: bool = True) -> list[Segment]:
        assert not include_traces
        self.snapshots += 1
        return [{**one, "device": device} for device in (0, 1) for one in (self.segments if device else ())]
