"""What oomwatch-probe tells inside the demo's engines: allocators of workers, and whose KV blocks are."""

from __future__ import annotations

from collections.abc import Iterator

from oomwatch.demo.machine import GPU_VISIBLE, MIB, LastWord, Machine, Process, Server
from oomwatch.observations import AllocationFailure, AllocatorReport, BlockOwners, Observation

_OUTSIDE = 740 * MIB  # of a worker's memory: context and NCCL, which PyTorch does not know of
_GRAPHS = 320 * MIB  # in a pool of their own
_LIVE = 260 * MIB  # beside weights and KV pool
_TRANSIENT = 512 * MIB  # activations of the largest batch, in one piece while nothing is wrong
_PIECE = 24 * MIB  # what growth leaves behind, between blocks in use
_SEGMENT = 20 * MIB


def probed(machine: Machine, server: Server, t: float) -> Iterator[Observation]:
    """All that the probes of a server tell now, and the last words of those that have ended."""
    for word in server.last_words:
        yield _report(machine, server, word.process, t, word)
    server.last_words.clear()
    if server.state not in ("serving", "frozen"):
        return
    for worker in server.workers:
        yield _report(machine, server, worker, t, None)
    rank = server.ranks[0]
    lost = rank.lost
    cached = min(rank.free, rank.blocks // 3)
    yield BlockOwners(t, server.core.pid, "0", t, rank.blocks, rank.free, rank.used - lost, 0, lost, cached)


def _report(machine: Machine, server: Server, worker: Process, t: float, last: LastWord | None) -> AllocatorReport:
    """``server.fragments`` bytes of the worker lie in small pieces."""
    assert worker.gpu is not None
    fragments = last.fragments if last else server.fragments
    reserved = worker.gpu_bytes - _OUTSIDE
    allocated = server.spec.weights + server.spec.pool + _GRAPHS + _LIVE
    # The large block is broken up as soon as others begin to stay between its parts.
    largest = _TRANSIENT if not fragments else max(_PIECE * 2, _TRANSIENT - fragments)
    free = reserved - allocated
    whole = max(0, free - fragments - largest)
    pieces = free - whole - largest
    failure = None
    if last is not None:
        failure = AllocationFailure(last.t, _TRANSIENT, last.free, allocated, reserved, GPU_VISIBLE)
    return AllocatorReport(
        t,
        worker.pid,
        machine.gpus[worker.gpu].uuid,
        {
            "allocated_bytes.all.current": allocated,
            "allocated_bytes.all.peak": allocated + _TRANSIENT,
            "reserved_bytes.all.current": reserved,
            "reserved_bytes.all.peak": reserved,
            "active_bytes.all.current": allocated,
            "requested_bytes.all.current": allocated - 9 * MIB,
            "inactive_split_bytes.all.current": pieces,
            "segment.all.current": reserved // _SEGMENT,
            "num_alloc_retries": server.retries + (last is not None),
            "num_ooms": int(last is not None),
        },
        largest_free_block=largest,
        free=free,
        releasable=whole,
        private_reserved=_GRAPHS,
        private_free=6 * MIB,
        free_by_size=((16 * MIB, pieces), (_class_of(largest), largest + whole)),
        backend="native",
        expandable=False,
        failure=failure,
        engine=server.name,
        started=worker.start,
    )


def _class_of(size: int) -> int:
    """The smallest size of its class: a power of two."""
    return 1 << (size.bit_length() - 1)
