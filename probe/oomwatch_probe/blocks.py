"""The KV cache's block pool in the engine core: how many blocks there are, and who holds each of them.

A request's blocks lie in a table of its own, a finished one's that wait for a step in a queue; what is neither free nor
in one of these is held by nobody. The tables change while the scheduler works, so that they are copied between two of
its calls: by its own thread on its way, or, when none comes by, by the probe's thread, which throws its copy away when
the scheduler worked meanwhile. Only the references are copied; who holds how many is counted in the probe's thread.

Read in vLLM 0.9.2 to 0.32 (``v1/core``), where all of it has the same names; a version that differs is refused.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from oomwatch_probe.layout import Absence

Numbers = dict[str, int | Absence]

# What the tables of these kinds of attention hold is all that they hold. HiSparse has pools of its own.
KNOWN_MANAGERS = frozenset(
    {
        "ChunkedLocalAttentionManager",
        "CircularBufferManager",
        "CrossAttentionManager",
        "FullAttentionManager",
        "MambaManager",
        "RSWAManager",
        "SinkFullAttentionManager",
        "SlidingWindowManager",
    }
)
COUNTS = (
    "blocks_total",
    "blocks_free",
    "blocks_referenced",
    "blocks_living",
    "blocks_finished",
    "blocks_ownerless",
    "blocks_free_cached",
    "requests_living",
    "requests_finished",
)
SHARE = 5e-4
"""Of the time, at most, that counting may take: with many blocks it happens less often."""
# Between so many blocks the interpreter is offered to the engine's own threads: less than a tenth of a millisecond.
CHUNK_BLOCKS = 2000
# A connector is looked through so deep for a reference to the pool.
_CONNECTOR_DEPTH = 4


class UnknownSchedulerError(Exception):
    """The scheduler is not built as this module knows it; the message says what is missing."""


@dataclass(frozen=True)
class Copy:
    """The pool at one moment: the references, not yet counted."""

    time_ns: int
    cost_ns: int
    total: int
    free: int
    living: Sequence[Sequence[Any]]
    finished: Sequence[Sequence[Any]]
    requests_living: int
    requests_finished: int


class Pool:
    """What this module knows of one scheduler. The scheduler itself is not kept alive by it."""

    def __init__(self, scheduler: Any) -> None:
        """Raises UnknownSchedulerError."""
        manager = _attribute(scheduler, "kv_cache_manager")
        pool = _attribute(manager, "block_pool")
        managers = _attribute(_attribute(manager, "coordinator"), "single_type_managers")
        self._scheduler, self._pool = weakref.ref(scheduler), weakref.ref(pool)
        # Refused before the engine's first step rather than in one of them.
        _attribute(_attribute(pool, "free_block_queue"), "num_free_blocks")
        for name in ("blocks", "null_block", "num_gpu_blocks"):
            _attribute(pool, name)
        for name in ("block_id", "ref_cnt", "block_hash"):
            _attribute(pool.null_block, name)
        for one in managers:
            _attribute(one, "req_to_blocks")
        _attribute(scheduler, "requests")
        connector = getattr(scheduler, "connector", None)
        self.texts = {
            "scheduler": type(scheduler).__name__,
            "kv_connector": "" if connector is None else type(connector).__name__,
        }
        # Blocks that are taken out for good, like the null block: attention sinks, in 0.14 to 0.23.
        self._set_aside = 1 + sum(len(getattr(one, "sink_blocks", ())) for one in managers)
        unknown = [type(one).__name__ for one in managers if type(one).__name__ not in KNOWN_MANAGERS]
        self.owners_note = ""
        if unknown:
            self.owners_note = f"the probe does not know how {', '.join(sorted(set(unknown)))} keeps its blocks"
        elif _reaches(connector, pool, _CONNECTOR_DEPTH):
            self.owners_note = f"{self.texts['kv_connector']} takes blocks of its own beside those of requests"

    def copy(self) -> Copy | None:
        """The pool now; None when its engine is gone. Call it between two calls of the scheduler.

        Takes some nanoseconds for each block that is held, and some hundred for each request.
        """
        started = time.thread_time_ns()
        scheduler, pool = self._scheduler(), self._pool()
        if scheduler is None or pool is None:
            return None
        requests = scheduler.requests
        finished = {name for name, request in requests.items() if request.is_finished()}
        tables_living: list[Sequence[Any]] = []
        tables_finished: list[Sequence[Any]] = [tuple(blocks) for _, blocks in getattr(scheduler, "deferred_frees", ())]
        for manager in scheduler.kv_cache_manager.coordinator.single_type_managers:
            for name, blocks in manager.req_to_blocks.items():
                if name in finished:
                    tables_finished.append(tuple(blocks))
                elif name in requests:
                    tables_living.append(tuple(blocks))
        return Copy(
            time_ns=time.time_ns(),
            total=pool.num_gpu_blocks - self._set_aside,
            free=pool.free_block_queue.num_free_blocks,
            living=tables_living,
            finished=tables_finished,
            requests_living=len(requests) - len(finished),
            requests_finished=len(finished),
            cost_ns=time.thread_time_ns() - started,
        )

    def state(self) -> tuple[int, int] | None:
        """What changes when requests come, end or are aborted between two calls of the scheduler."""
        scheduler, pool = self._scheduler(), self._pool()
        if scheduler is None or pool is None:
            return None
        return pool.free_block_queue.num_free_blocks, len(scheduler.requests)

    def count(self, copy: Copy) -> Numbers:
        """Who held how many blocks when the copy was made. Runs beside the engine, in small pieces."""
        pool = self._pool()
        null = None if pool is None else id(pool.null_block)
        living = _distinct(copy.living)
        living.discard(null)
        finished = {block for block in _distinct(copy.finished) if block != null and block not in living}
        referenced = copy.total - copy.free
        ownerless: int | Absence = referenced - len(living) - len(finished)
        if self.owners_note:
            ownerless = Absence.NOT_APPLICABLE
        return {
            "blocks_time_ns": copy.time_ns,
            "blocks_cost_ns": copy.cost_ns,
            "blocks_total": copy.total,
            "blocks_free": copy.free,
            "blocks_referenced": referenced,
            "blocks_living": len(living),
            "blocks_finished": len(finished),
            "blocks_ownerless": ownerless,
            "requests_living": copy.requests_living,
            "requests_finished": copy.requests_finished,
        }

    def count_cached(self) -> Numbers:
        """The free blocks that a prefix can still hit, block by block while the engine works: exact when it is idle."""
        pool = self._pool()
        if pool is None:
            return {}
        cached = 0
        for begin in range(0, len(pool.blocks), CHUNK_BLOCKS):
            chunk = pool.blocks[begin : begin + CHUNK_BLOCKS]
            cached += sum(1 for block in chunk if block.ref_cnt == 0 and block.block_hash is not None)
            time.sleep(0)
        return {"blocks_cached_time_ns": time.time_ns(), "blocks_free_cached": cached}


class CoreReader:
    """Reads the pool of one scheduler, again and again. ``enter`` and ``leave`` are called around its calls."""

    def __init__(self, scheduler: Any, interval_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.scheduler = weakref.ref(scheduler)
        self._interval_s = interval_s
        self._clock = clock
        self._due = clock()
        self._pool: Pool | None = None
        # Written by the scheduler's thread: its calls begun and ended, those under way (one may call another), steps.
        self._activity = 0
        self._depth = 0
        self._steps = 0
        self._activity_before = 0
        self._wanted = False
        self._copied: Copy | None = None
        self._failure: Exception | None = None
        self.numbers: Numbers = {"steps": 0, **_data_parallel_rank(scheduler)}
        self.texts: dict[str, str] = {}
        self.switched_off = False

    @property
    def gone(self) -> bool:
        """The engine was shut down, and its process lives on."""
        return self.scheduler() is None

    def enter(self, is_step: bool) -> None:
        """The scheduler is about to work; what it did before is whole. Takes some hundred nanoseconds. Never raises."""
        if self._wanted and self._depth == 0:
            self._copy_in_passing()
        self._depth += 1
        self._activity += 1
        self._steps += is_step

    def leave(self) -> None:
        """The scheduler has worked. Never raises."""
        self._activity += 1
        self._depth -= 1
        if self._wanted and self._depth == 0:
            self._copy_in_passing()

    def read(self) -> None:
        """Brings ``numbers`` and ``texts`` up to date. Never raises: what fails is absent, and the note says why."""
        if self.switched_off:
            return
        try:
            self._read()
        except UnknownSchedulerError as error:
            self._switch_off(f"not a scheduler that the probe knows: {error}")
        except Exception as error:
            self._switch_off(f"{type(error).__name__}: {error}")

    def _read(self) -> None:
        if self._pool is None:
            scheduler = self.scheduler()
            if scheduler is None:
                return
            self._pool = Pool(scheduler)
            self.texts = {**self._pool.texts, "blocks_note": self._pool.owners_note}
        if self._failure is not None:
            raise self._failure
        activity = self._activity
        worked = activity != self._activity_before
        self._activity_before = activity
        self.numbers = {**self.numbers, "steps": self._steps}
        if worked:
            self.numbers["last_step_ns"] = time.time_ns()
        copied, self._copied = self._copied, None
        if copied is None and self._clock() >= self._due:
            if worked:
                self._wanted = True
                return
            # Nobody came by since the last time: the scheduler has nothing to do, or waits for its model.
            self._wanted = False
            copied = self._copy_at_rest()
        if copied is not None:
            self._count(copied)

    def _copy_in_passing(self) -> None:
        self._wanted = False
        try:
            if self._pool is not None:
                self._copied = self._pool.copy()
        except Exception as error:
            self._failure = error

    def _copy_at_rest(self) -> Copy | None:
        """None where the scheduler works, or began to while the tables were copied."""
        assert self._pool is not None
        activity, state = self._activity, self._pool.state()
        if self._depth > 0:
            return None
        try:
            copied = self._pool.copy()
        except RuntimeError:  # a table changed its size
            return None
        if (self._activity, self._pool.state()) != (activity, state):
            return None
        return copied

    def _count(self, copied: Copy) -> None:
        assert self._pool is not None
        started = time.thread_time()
        counted = self._pool.count(copied)
        ownerless = counted["blocks_ownerless"]
        if not isinstance(ownerless, Absence) and ownerless < 0:
            counted["blocks_ownerless"] = Absence.FAILED
            self.texts["blocks_note"] = f"{-ownerless} blocks are held by requests and free at the same time"
        else:
            self.texts["blocks_note"] = self._pool.owners_note
        self.numbers.update(counted)
        self.numbers.update(self._pool.count_cached())
        cost = time.thread_time() - started + copied.cost_ns / 1e9
        self._due = self._clock() + max(self._interval_s, cost / SHARE)

    def _switch_off(self, note: str) -> None:
        self.switched_off = True
        self._wanted = False
        self.numbers = dict.fromkeys(("blocks_time_ns", "blocks_cached_time_ns", *COUNTS), Absence.SWITCHED_OFF)
        self.texts = {**self.texts, "blocks_note": note}


def _data_parallel_rank(scheduler: Any) -> Numbers:
    """Newer versions count engines that share nothing by an index, and call each of them rank 0."""
    parallel = getattr(getattr(scheduler, "vllm_config", None), "parallel_config", None)
    rank = getattr(parallel, "data_parallel_index", getattr(parallel, "data_parallel_rank", None))
    return {"data_parallel_rank": rank} if isinstance(rank, int) else {}


def _attribute(thing: Any, name: str) -> Any:
    try:
        return getattr(thing, name)
    except AttributeError:
        raise UnknownSchedulerError(f"{type(thing).__name__} has no {name}") from None


def _distinct(tables: Sequence[Sequence[Any]]) -> set[int | None]:
    """The identities of the blocks in the tables: blocks have no hash, and requests share those of a common prefix."""
    found: set[int | None] = set()
    since_pause = 0
    for blocks in tables:
        for begin in range(0, len(blocks), CHUNK_BLOCKS):
            chunk = blocks[begin : begin + CHUNK_BLOCKS]
            found.update(map(id, chunk))
            since_pause += len(chunk)
            if since_pause >= CHUNK_BLOCKS:
                since_pause = 0
                time.sleep(0)
    return found


def _reaches(thing: Any, target: object, depth: int) -> bool:
    """Whether an object of vLLM's connectors leads to the target by its attributes and by lists in them.

    A connector that was given the pool (``bind_gpu_block_pool``, from 0.20 on) may hold blocks beside the requests.
    """
    if thing is None or depth == 0:
        return False
    if isinstance(thing, (list, tuple)):
        members = list(thing)
    elif hasattr(thing, "__dict__"):
        # The pool is reachable from the cache manager, which every connector may be given: not what is asked.
        members = [value for name, value in vars(thing).items() if "kv_cache_manager" not in name]
    else:
        return False
    return any(
        member is target or (_belongs_to_a_connector(member) and _reaches(member, target, depth - 1))
        for member in members
    )


def _belongs_to_a_connector(thing: object) -> bool:
    if isinstance(thing, (list, tuple)):
        return len(thing) < 100
    module = type(thing).__module__
    return "kv_connector" in module or "kv_transfer" in module or "kv_offload" in module or "lmcache" in module
