"""The file by which a process of vLLM tells the daemon about its memory: one of 4096 bytes for each process.

The probe writes it, the daemon reads it; both have this module, byte for byte. All of it is little-endian: the header,
the count of writes, the numbers of ``NUMBERS`` as signed 64-bit integers, the texts of ``TEXTS`` in UTF-8 padded with
NUL, and zeros. A negative number is an ``Absence``: there is no value, and that is why. A change of any of this raises
``VERSION``.

A file is replaced by one write of all its bytes. Whoever reads it in the middle of one sees a wrong checksum, and reads
again; ``sequence`` tells two writes apart.
"""

from __future__ import annotations

import enum
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

MAGIC = b"OOMWATCH"
VERSION = 1
FILE_SIZE = 4096
FILE_PREFIX = "probe-"
FILE_SUFFIX = ".oomwatch"

SIZE_CLASSES = 16
FIRST_SIZE_CLASS_BYTES = 1 << 20
"""Free blocks below this are the first size class; each further class begins where the one before ends and ends at
twice its beginning; the last one (from 16 GiB) has no end."""


class Absence(enum.Enum):
    """Why there is no number."""

    NOT_YET = 1
    """It was not read until now: the process has no allocator or no block pool yet, or no OOM happened."""
    NOT_PROVIDED = 2
    """PyTorch or vLLM do not have it in this version."""
    NOT_APPLICABLE = 3
    """It means nothing here: a rank of an engine without ranks, a limit that is not set, another allocator backend."""
    FAILED = 4
    """Reading it failed; the note of its part says how."""
    SWITCHED_OFF = 5
    """The probe found something that it does not know, and reads this part no more; the note says what."""


_PROCESS = (
    "heartbeat_ns",  # unix time of this write; the thread that writes lives as long as the process
    "interval_ns",  # time from one write to the next
    "pid",  # as the process itself sees it, in its own pid namespace
    "pid_namespace",  # the inode of /proc/self/ns/pid
    "process_start_ticks",  # field 22 of /proc/self/stat: clock ticks since the machine's boot
    "uid",
    "rank",  # of the worker in its engine
    "local_rank",
    "tensor_parallel_rank",
    "pipeline_parallel_rank",
    "data_parallel_rank",
)
_ALLOCATOR = (
    "stats_time_ns",  # unix time of the reading of what follows: torch.cuda.memory_stats, all pools
    "device_index",  # CUDA's number of the device in this process
    "allocated_bytes",
    "allocated_bytes_peak",
    "reserved_bytes",
    "reserved_bytes_peak",
    "active_bytes",
    "active_bytes_peak",
    "inactive_split_bytes",
    "inactive_split_bytes_peak",
    "requested_bytes",
    "requested_bytes_peak",
    "segments",
    "segments_peak",
    "alloc_retries",  # since the process began, like the three that follow
    "ooms",
    "device_allocs",
    "device_frees",
    "private_pools_reserved_bytes",  # CUDA graphs, and sleep mode's own pool
    "max_split_size_bytes",
    "expandable_segments",  # 0 or 1
    "sleep_mode",  # 0 or 1: vLLM's own pool for weights and KV cache was made
)
_SNAPSHOT = (
    "snapshot_time_ns",  # unix time of the reading of what follows: torch.cuda.memory_snapshot
    "snapshot_cost_ns",
    "snapshot_blocks",
    "free_bytes",  # reserved and free, in pools that any allocation may use; like all up to the histogram
    "free_blocks",
    "largest_free_block_bytes",
    "releasable_bytes",  # in segments that are wholly free: empty_cache gives them back
    "unreleasable_bytes",  # beside a block in use of the same segment
    "awaiting_free_bytes",  # freed, and not usable until another stream is done
    "private_pools",
    "private_free_bytes",
    "private_largest_free_block_bytes",
    "snapshot_expandable_segments",
    *(f"free_bytes_class_{index}" for index in range(SIZE_CLASSES)),
)
_OOM = (
    "oom_time_ns",  # unix time of the last allocation that failed
    "oom_observed",  # 1: read while it failed; 0: noticed afterwards, the numbers are of that time
    "oom_request_bytes",
    "oom_device_total_bytes",  # or the limit that was set for the process
    "oom_device_free_bytes",
    "oom_allocated_bytes",
    "oom_reserved_bytes",
    "oom_active_bytes",
    "oom_inactive_split_bytes",
    "oom_private_pools_reserved_bytes",
    "oom_alloc_retries",
    "oom_free_bytes",
    "oom_largest_free_block_bytes",
)
_BLOCKS = (
    "steps",  # of the scheduler, since it was made
    "last_step_ns",  # unix time at which the probe last saw that it works
    "blocks_time_ns",  # unix time at which the pool was as follows
    "blocks_cost_ns",  # processor time that the copy took of the thread that made it, mostly the scheduler's own
    "blocks_total",  # without the null block, which vLLM keeps for itself
    "blocks_free",
    "blocks_referenced",  # total - free = living + finished + ownerless
    "blocks_living",  # held by requests that exist and have not finished
    "blocks_finished",  # held by finished ones: a connector still reads them, or their return waits for a step
    "blocks_ownerless",  # held by nobody that exists
    "requests_living",
    "requests_finished",  # finished, and still kept for their blocks
    "blocks_cached_time_ns",
    "blocks_free_cached",  # of the free ones: those that a prefix can still hit
)

NUMBERS = (*_PROCESS, *_ALLOCATOR, *_SNAPSHOT, *_OOM, *_BLOCKS)
TEXTS = {
    "probe_version": 16,
    "vllm_version": 32,
    "torch_version": 32,
    "device_uuid": 48,  # as NVML writes it: GPU-…
    "device_pci_bus_id": 24,  # as NVML writes it: 00000000:01:00.0
    "allocator_backend": 24,  # native, cudaMallocAsync, or pluggable
    "allocator_settings": 256,  # PYTORCH_ALLOC_CONF or PYTORCH_CUDA_ALLOC_CONF, as it is set
    "scheduler": 96,  # the class
    "kv_connector": 96,  # the class; empty without one
    "allocator_note": 256,  # why the allocator's numbers are absent; empty when all is well
    "blocks_note": 256,  # why the pool's numbers are absent; empty when all is well
}

# Magic, version, size, checksum of the body, and four bytes to the next multiple of 8.
_HEADER = struct.Struct("<8sIII4x")
_BODY = struct.Struct("<" + f"{1 + len(NUMBERS)}q" + "".join(f"{width}s" for width in TEXTS.values()))
_PADDING = bytes(FILE_SIZE - _HEADER.size - _BODY.size)


class LayoutError(ValueError):
    """What was read is not a whole file of this layout; the message says why."""


class TornReadError(LayoutError):
    """The file was read in the middle of a write: read it again. Or it is damaged."""


@dataclass(frozen=True)
class Report:
    """What a file says: all of ``NUMBERS`` and ``TEXTS`` by name."""

    sequence: int
    numbers: Mapping[str, int | Absence]
    texts: Mapping[str, str]


def file_name(pid_namespace: int, pid: int, start_ticks: int) -> str:
    """The same pid may live in several containers, and again after its process has ended."""
    return f"{FILE_PREFIX}{pid_namespace}-{pid}-{start_ticks}{FILE_SUFFIX}"


def encode(sequence: int, numbers: Mapping[str, int | Absence], texts: Mapping[str, str]) -> bytes:
    """The file's bytes. What is not in ``numbers`` is not yet read; texts are cut to their width.

    Raises KeyError for a name that the layout does not have.
    """
    values: list[int | bytes] = list(_NOTHING)
    values[0] = sequence
    for name, value in numbers.items():
        values[_PLACE_OF_NUMBER[name]] = _encoded(value)
    for name, text in texts.items():
        values[_PLACE_OF_TEXT[name]] = _cut(text, TEXTS[name])
    body = _BODY.pack(*values)
    header = _HEADER.pack(MAGIC, VERSION, FILE_SIZE, zlib.crc32(body))
    return header + body + _PADDING


def decode(data: bytes) -> Report:
    """Reads a file's bytes; raises LayoutError or, where a second reading may help, TornReadError."""
    if data[: len(MAGIC)] != MAGIC[: len(data)] or not data:
        raise LayoutError("not a file of oomwatch's probe")
    if len(data) < _HEADER.size:
        raise LayoutError(f"cut off after {len(data)} of {FILE_SIZE} bytes")
    _, version, size, checksum = _HEADER.unpack_from(data)
    if version != VERSION:
        raise LayoutError(f"layout version {version}; this is a reader of version {VERSION}")
    if size != FILE_SIZE or len(data) != FILE_SIZE:
        raise LayoutError(f"{len(data)} bytes, and {FILE_SIZE} were expected")
    body = data[_HEADER.size : _HEADER.size + _BODY.size]
    if zlib.crc32(body) != checksum:
        raise TornReadError("the checksum is wrong: read in the middle of a write, or damaged")
    sequence, *values = _BODY.unpack(body)
    numbers = {name: _decoded(value) for name, value in zip(NUMBERS, values[: len(NUMBERS)], strict=True)}
    texts = {
        name: raw.rstrip(b"\0").decode("utf-8", "replace")
        for name, raw in zip(TEXTS, values[len(NUMBERS) :], strict=True)
    }
    return Report(sequence, numbers, texts)


_PLACE_OF_NUMBER = {name: place for place, name in enumerate(NUMBERS, start=1)}
_PLACE_OF_TEXT = {name: place for place, name in enumerate(TEXTS, start=1 + len(NUMBERS))}
_NOTHING: tuple[int | bytes, ...] = (0, *(-Absence.NOT_YET.value for _ in NUMBERS), *(b"" for _ in TEXTS))
_LARGEST = (1 << 63) - 1


def _encoded(value: int | Absence) -> int:
    return -value.value if isinstance(value, Absence) else min(max(value, 0), _LARGEST)


def _decoded(value: int) -> int | Absence:
    if value >= 0:
        return value
    try:
        return Absence(-value)
    except ValueError:
        return Absence.NOT_PROVIDED


def _cut(text: str, width: int) -> bytes:
    """Whole characters only."""
    return text.encode("utf-8", "replace")[:width].decode("utf-8", "ignore").encode()
