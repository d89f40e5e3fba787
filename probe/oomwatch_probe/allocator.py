"""PyTorch's CUDA allocator in this process: its statistics, its snapshot, and the failure of an allocation.

Nothing here is called before ``torch.cuda.is_initialized()``, and nothing here asks the device: the numbers are the
allocator's own books. Names and their meaning: ``torch.cuda.memory_stats`` and ``memory_snapshot``; read in PyTorch
2.6 to 2.13.
"""

from __future__ import annotations

import inspect
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from oomwatch_probe.layout import FIRST_SIZE_CLASS_BYTES, SIZE_CLASSES, Absence

Numbers = dict[str, int | Absence]

# The number's name, and where it lies in memory_stats_as_nested_dict.
_STATISTICS: Mapping[str, tuple[str, ...]] = {
    "allocated_bytes": ("allocated_bytes", "all", "current"),
    "allocated_bytes_peak": ("allocated_bytes", "all", "peak"),
    "reserved_bytes": ("reserved_bytes", "all", "current"),
    "reserved_bytes_peak": ("reserved_bytes", "all", "peak"),
    "active_bytes": ("active_bytes", "all", "current"),
    "active_bytes_peak": ("active_bytes", "all", "peak"),
    "inactive_split_bytes": ("inactive_split_bytes", "all", "current"),
    "inactive_split_bytes_peak": ("inactive_split_bytes", "all", "peak"),
    "requested_bytes": ("requested_bytes", "all", "current"),
    "requested_bytes_peak": ("requested_bytes", "all", "peak"),
    "segments": ("segment", "all", "current"),
    "segments_peak": ("segment", "all", "peak"),
    "alloc_retries": ("num_alloc_retries",),
    "ooms": ("num_ooms",),
    "device_allocs": ("num_device_alloc",),
    "device_frees": ("num_device_free",),
}
_PRIVATE_POOLS = "reserved_bytes_by_private_pools"
_MAX_SPLIT_SIZE = "max_split_size"
# The pools that any allocation may use; every other id is a graph's, or one that the program made.
_ORDINARY_POOL = (0, 0)
_SETTINGS_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")

# A snapshot holds the interpreter while its lists are made: about a microsecond for each block.
SNAPSHOT_INTERVAL_S = 60.0
SNAPSHOT_AFTER_RETRY_S = 5.0
SNAPSHOT_SHARE = 1e-4
"""Of the time, at most, that snapshots may take."""

SLEEP_MODE_NOTE = (
    "sleep mode is on: its memory pool calls Python inside the allocator's lock, "
    "so that reading the allocator from a thread could stop the engine"
)


class AllocatorReader:
    """Reads the allocator of the one device that this process uses."""

    def __init__(self, torch: Any, clock: Callable[[], float] = time.monotonic) -> None:
        self._torch = torch
        self._clock = clock
        self._device: int | None = None
        self._snapshot: Numbers = {}
        self._next_snapshot = clock()
        self._next_snapshot_of_retry = clock()
        self._next_snapshot_of_oom = clock()
        self._retries = 0
        self._ooms = 0
        self._oom: Numbers = {}
        self._current: Numbers = {}
        self.texts: dict[str, str] = {"torch_version": str(getattr(torch, "__version__", "")), **settings(os.environ)}

    @property
    def numbers(self) -> Numbers:
        """What was read last; the last failure stays whatever comes after it."""
        return {**self._current, **self._snapshot, **self._oom}

    def read(self) -> None:
        """Brings ``numbers`` and ``texts`` up to date. Never raises: what fails is absent, and the note says why."""
        try:
            self.texts["allocator_note"] = ""
            self._read()
        except Exception as error:
            self._give_up_reading(Absence.FAILED, f"{type(error).__name__}: {error}")

    def observe_oom(self, device: int, request: int, total: int, free: int) -> None:
        """An allocation fails at this moment, in the thread that asked for it; the lock is free again.

        ``request`` bytes were wanted; ``total`` is the device's memory or the limit set for the process; ``free`` what
        the driver had left.
        """
        stats = self._stats(device)
        values = statistics(stats)
        if self._clock() >= self._next_snapshot_of_oom:
            self._take_snapshot(device)
            # A library may try smaller and smaller workspaces, each of which fails.
            self._next_snapshot_of_oom = self._clock() + SNAPSHOT_AFTER_RETRY_S
        self._ooms = max(self._ooms, _count(values["ooms"]))
        self._oom = {
            "oom_time_ns": time.time_ns(),
            "oom_observed": 1,
            "oom_request_bytes": request,
            "oom_device_total_bytes": total,
            "oom_device_free_bytes": free,
            **self._oom_values(values),
        }

    def _read(self) -> None:
        backend = self._torch.cuda.get_allocator_backend()
        self.texts["allocator_backend"] = backend
        if backend == "pluggable":
            self._give_up_reading(Absence.NOT_APPLICABLE, "another program's allocator is in PyTorch's place")
            return
        if sleep_mode_is_on():
            self._give_up_reading(Absence.SWITCHED_OFF, SLEEP_MODE_NOTE)
            self._current["sleep_mode"] = 1
            return
        device = self._find_device()
        if device is None:
            return
        stats = self._stats(device)
        values = statistics(stats)
        now = self._clock()
        retries, ooms = _count(values["alloc_retries"]), _count(values["ooms"])
        retried = retries > self._retries and now >= self._next_snapshot_of_retry
        if now >= self._next_snapshot or retried:
            self._take_snapshot(device)
            self._retries = retries
        if ooms > self._ooms:
            # Where PyTorch calls no observer, or the failure came before it was there.
            self._ooms = ooms
            self._oom = {"oom_time_ns": time.time_ns(), "oom_observed": 0, **self._oom_values(values)}
        self._current = {
            "stats_time_ns": time.time_ns(),
            "device_index": device,
            "sleep_mode": 0,
            "expandable_segments": int("expandable_segments:true" in self.texts["allocator_settings"].lower()),
            **values,
        }

    def _give_up_reading(self, reason: Absence, note: str) -> None:
        """What was read before does not stay."""
        self._snapshot = {}
        self._current = dict.fromkeys(("stats_time_ns", *_STATISTICS), reason)
        self.texts["allocator_note"] = note

    def _find_device(self) -> int | None:
        """The device that this process has most reserved on. CUDA's current device is each thread's own."""
        if self._device is None:
            reserved = {
                index: size
                for index in range(self._torch.cuda.device_count())
                if (size := _count(statistics(self._stats(index))["reserved_bytes"])) > 0
            }
            if not reserved:
                return None
            self._device = max(reserved, key=lambda index: reserved[index])
            self.texts.update(device_texts(self._torch.cuda.get_device_properties(self._device)))
        return self._device

    def _stats(self, device: int) -> Mapping[str, Any]:
        stats: Mapping[str, Any] = self._torch.cuda.memory_stats_as_nested_dict(device)
        return stats

    def _take_snapshot(self, device: int) -> None:
        memory_snapshot = self._torch.cuda.memory_snapshot
        options: dict[str, Any] = {}
        if "include_traces" in inspect.signature(memory_snapshot).parameters:
            options["include_traces"] = False
        elif self._history_is_recorded():
            # It would be copied with the snapshot, and may be long.
            self._next_snapshot = self._clock() + SNAPSHOT_INTERVAL_S
            return
        started = self._clock()
        segments = memory_snapshot(**options)
        summary = summarise(segment for segment in segments if segment.get("device", device) == device)
        cost = self._clock() - started
        self._snapshot = {"snapshot_time_ns": time.time_ns(), "snapshot_cost_ns": int(cost * 1e9), **summary}
        pause = cost / SNAPSHOT_SHARE
        self._next_snapshot = self._clock() + max(SNAPSHOT_INTERVAL_S, pause)
        self._next_snapshot_of_retry = self._clock() + max(SNAPSHOT_AFTER_RETRY_S, pause)

    def _history_is_recorded(self) -> bool:
        enabled = getattr(self._torch._C, "_cuda_isHistoryEnabled", None)
        return enabled is None or bool(enabled())

    def _oom_values(self, values: Numbers) -> Numbers:
        names = ("allocated_bytes", "reserved_bytes", "active_bytes", "inactive_split_bytes", "alloc_retries")
        kept: Numbers = {f"oom_{name}": values[name] for name in (*names, "private_pools_reserved_bytes")}
        for name in ("free_bytes", "largest_free_block_bytes"):
            kept[f"oom_{name}"] = self._snapshot.get(name, Absence.NOT_YET)
        return kept


def statistics(stats: Mapping[str, Any]) -> Numbers:
    """The numbers in what ``torch.cuda.memory_stats_as_nested_dict`` answers; absent where it has no such name."""
    values: Numbers = {name: _at(stats, path) for name, path in _STATISTICS.items()}
    pools = stats.get(_PRIVATE_POOLS)
    values["private_pools_reserved_bytes"] = (
        Absence.NOT_PROVIDED
        if pools is None
        else sum(_count(_at(pool, ("all", "current"))) for name, pool in pools.items() if name != _ORDINARY_POOL)
    )
    split = stats.get(_MAX_SPLIT_SIZE, Absence.NOT_PROVIDED)
    values["max_split_size_bytes"] = Absence.NOT_APPLICABLE if split in (-1, (1 << 64) - 1) else split
    return values


def summarise(segments: Iterable[Mapping[str, Any]]) -> Numbers:
    """Adds up the segments that ``torch.cuda.memory_snapshot`` lists: one pass over all blocks."""
    classes = [0] * SIZE_CLASSES
    blocks = free_blocks = free = largest = releasable = awaiting = expandable = 0
    private_free = private_largest = 0
    private_pools = set()
    for segment in segments:
        private = tuple(segment.get("segment_pool_id", _ORDINARY_POOL)) != _ORDINARY_POOL
        if private:
            private_pools.add(tuple(segment["segment_pool_id"]))
        expandable += bool(segment.get("is_expandable", False))
        free_here = 0
        for block in segment["blocks"]:
            blocks += 1
            size, state = block["size"], block["state"]
            if state != "inactive":
                # active_pending_free, or active_awaiting_free: another stream is not done with it.
                awaiting += size if state != "active_allocated" else 0
            elif private:
                private_free += size
                private_largest = max(private_largest, size)
            else:
                free_here += size
                free_blocks += 1
                largest = max(largest, size)
                classes[size_class(size)] += size
        free += free_here
        releasable += free_here if free_here == segment["total_size"] else 0
    return {
        "snapshot_blocks": blocks,
        "free_bytes": free,
        "free_blocks": free_blocks,
        "largest_free_block_bytes": largest,
        "releasable_bytes": releasable,
        "unreleasable_bytes": free - releasable,
        "awaiting_free_bytes": awaiting,
        "private_pools": len(private_pools),
        "private_free_bytes": private_free,
        "private_largest_free_block_bytes": private_largest,
        "snapshot_expandable_segments": expandable,
        **{f"free_bytes_class_{index}": size for index, size in enumerate(classes)},
    }


def size_class(size: int) -> int:
    """The index of a free block's size class, see ``layout.FIRST_SIZE_CLASS_BYTES``."""
    return min((size // FIRST_SIZE_CLASS_BYTES).bit_length(), SIZE_CLASSES - 1)


def settings(environment: Mapping[str, str]) -> dict[str, str]:
    """The allocator's settings as the process was given them; PyTorch 2.9 and newer read the first name first."""
    given = (environment[name] for name in _SETTINGS_VARIABLES if environment.get(name))
    return {"allocator_settings": next(given, "")}


def device_texts(properties: Any) -> dict[str, str]:
    """Which device it is, by the names that NVML uses; what this PyTorch does not tell is left out."""
    texts = {}
    uuid = getattr(properties, "uuid", None)
    if uuid is not None:
        texts["device_uuid"] = f"GPU-{uuid}"
    if hasattr(properties, "pci_bus_id"):
        domain, bus, device = properties.pci_domain_id, properties.pci_bus_id, properties.pci_device_id
        texts["device_pci_bus_id"] = f"{domain:08x}:{bus:02x}:{device:02x}.0"
    return texts


def sleep_mode_is_on() -> bool:
    """Whether vLLM's pool for sleep mode was made: PyTorch's allocator then calls Python while it holds its lock.

    A thread that holds the interpreter and waits for that lock would wait for ever. Read in vLLM 0.9 to 0.32,
    ``device_allocator/cumem.py``.
    """
    module = sys.modules.get("vllm.device_allocator.cumem")
    return getattr(getattr(module, "CuMemAllocator", None), "instance", None) is not None


def _count(value: int | Absence) -> int:
    """What is not told did not happen."""
    return 0 if isinstance(value, Absence) else value


def _at(stats: Mapping[str, Any], path: tuple[str, ...]) -> int | Absence:
    value: Any = stats
    for name in path:
        value = value.get(name) if isinstance(value, Mapping) else None
    return value if isinstance(value, int) else Absence.NOT_PROVIDED
