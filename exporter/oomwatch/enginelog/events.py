"""What a line of an engine's log can tell: one frozen dataclass each. Numbers and our own words, no text of the log.

Sizes are bytes, durations seconds, shares 0-1. A field that its line does not have is None: releases differ.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias, get_args

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

REFUSALS: Mapping[str, str] = {
    "budget_above_free": "its budget is larger than the memory that was free",
    "weights_above_budget": "the weights that another process holds leave nothing of its budget",
    "no_room": "its budget leaves no room for the KV cache",
    "context_too_long": "the KV cache does not hold one request of the longest length",
    "profiling_disturbed": "another process gave memory back while it measured its own",
    "too_many_sequences": "there are fewer Mamba cache blocks than sequences at once",
    "host_memory": "the host has less memory free than the KV cache wants",
    "swap_space": "the host has less memory than the swap space wants",
}
"""Why an engine refuses to start, by our words for it."""

STEPS = ("load", "profile", "kv_pool", "warm_up", "graphs", "serve")
"""What an engine was doing, in the order of its life."""

DEATHS: Mapping[str, str] = {
    "start_failed": "the engine core failed to start",
    "fatal": "the engine core met a fatal error",
    "worker_died": "a worker process died",
    "core_died": "the engine core's process died",
    "loop_ended": "the engine's loop ended",
}
"""How an engine ended, by our words for it."""


@dataclass(frozen=True)
class Start:
    """A process of an engine begins: its API server (``core`` False) or an engine core. ``version`` is vLLM's."""

    name: ClassVar[str] = "start"
    core: bool = False
    version: str | None = None
    max_model_len: int | None = None
    tensor_parallel_size: int | None = None
    pipeline_parallel_size: int | None = None
    data_parallel_size: int | None = None


@dataclass(frozen=True)
class Settings:
    """The arguments that a server was started with, as far as they differ from the defaults."""

    name: ClassVar[str] = "settings"
    gpu_memory_utilization: float | None = None
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    tensor_parallel_size: int | None = None
    pipeline_parallel_size: int | None = None
    data_parallel_size: int | None = None
    kv_cache_memory: int | None = None


@dataclass(frozen=True)
class Budget:
    """What one worker measured and promised itself on its device, as far as one line says. Bytes.

    ``total`` is the device's, ``free`` what was free at the start, ``promised`` utilisation x total, ``consumed``
    weights and non-torch together (0.27 and newer do not tell them apart), ``activation`` the peak beyond them,
    ``graphs`` what capturing took, ``graphs_estimate`` what was set aside for it, ``kv_pool`` what is left for the KV
    cache; ``fixed`` where the operator set that.
    """

    name: ClassVar[str] = "budget"
    total: int | None = None
    free: int | None = None
    utilization: float | None = None
    promised: int | None = None
    weights: int | None = None
    non_torch: int | None = None
    consumed: int | None = None
    activation: int | None = None
    graphs: int | None = None
    graphs_estimate: int | None = None
    kv_pool: int | None = None
    fixed: bool | None = None
    seconds: float | None = None


@dataclass(frozen=True)
class KvPool:
    """The KV pool of one engine core. ``concurrency`` is how many requests of ``max_model_len`` fit at once."""

    name: ClassVar[str] = "kv_pool"
    tokens: int | None = None
    blocks: int | None = None
    cpu_blocks: int | None = None
    max_model_len: int | None = None
    concurrency: float | None = None


@dataclass(frozen=True)
class Fitted:
    """vLLM lowered the longest length by itself so that one request fits (0.14.1 and newer)."""

    name: ClassVar[str] = "fitted"
    wanted_max_model_len: int
    max_model_len: int


@dataclass(frozen=True)
class Ready:
    """The engine serves: ``server`` once its API does, else its core is done; ``seconds`` of the core's last steps."""

    name: ClassVar[str] = "ready"
    server: bool = False
    seconds: float | None = None


@dataclass(frozen=True)
class Load:
    """The periodic line of statistics. ``preemptions`` are those since the line before; V0 has ``swapped``."""

    name: ClassVar[str] = "load"
    running: int
    waiting: int
    kv_usage: float | None = None
    swapped: int | None = None
    preemptions: int | None = None


@dataclass(frozen=True)
class Preempted:
    """V0 tells each 50th preemption: ``total`` since the start."""

    name: ClassVar[str] = "preempted"
    total: int


@dataclass(frozen=True)
class Refused:
    """An engine refuses to start. ``reason`` is a key of REFUSALS; the numbers are those of its sentence.

    ``wanted`` is what it needs and ``available`` what there is, ``total`` of the device; ``fitting_max_model_len`` is
    vLLM's own estimate of the length that fits, ``tokens`` the pool's. Of a disturbed profile ``available`` is what
    was free first and ``wanted`` None.
    """

    name: ClassVar[str] = "refused"
    reason: str
    wanted: int | None = None
    available: int | None = None
    total: int | None = None
    utilization: float | None = None
    max_model_len: int | None = None
    fitting_max_model_len: int | None = None
    tokens: int | None = None
    free_now: int | None = None
    max_num_seqs: int | None = None
    blocks: int | None = None


@dataclass(frozen=True)
class OutOfMemory:
    """The allocator could not give what was wanted. Bytes; all but ``host`` as the error's sentence says.

    ``gpu`` is the process's own index of the device. ``in_use`` is what the process holds there, ``others`` what the
    sentence says of other processes. ``reserved`` is reserved by PyTorch but unallocated. ``dummy_requests`` where
    the warm-up for so many requests ran out. ``host`` where it was the host's memory.
    """

    name: ClassVar[str] = "out_of_memory"
    wanted: int | None = None
    free: int | None = None
    total: int | None = None
    gpu: int | None = None
    in_use: int | None = None
    others: int | None = None
    allocated: int | None = None
    private_pools: int | None = None
    reserved: int | None = None
    dummy_requests: int | None = None
    host: bool = False


@dataclass(frozen=True)
class Step:
    """A line of a traceback that tells what the engine was doing; ``step`` is one of STEPS."""

    name: ClassVar[str] = "step"
    step: str


@dataclass(frozen=True)
class Died:
    """The engine, or a part that it cannot live without, ended by an error. ``how`` is a key of DEATHS."""

    name: ClassVar[str] = "died"
    how: str
    exit_code: int | None = None


@dataclass(frozen=True)
class Stopped:
    """The server was asked to stop (a signal), and does."""

    name: ClassVar[str] = "stopped"


@dataclass(frozen=True)
class Slept:
    """A worker went to sleep and gave memory back; ``in_use`` is what it still holds."""

    name: ClassVar[str] = "slept"
    freed: int | None = None
    in_use: int | None = None


Event: TypeAlias = (
    Start
    | Settings
    | Budget
    | KvPool
    | Fitted
    | Ready
    | Load
    | Preempted
    | Refused
    | OutOfMemory
    | Step
    | Died
    | Stopped
    | Slept
)

KINDS: Mapping[str, type[Event]] = {kind.name: kind for kind in get_args(Event)}


@dataclass(frozen=True)
class Origin:
    """Which process wrote a line, as far as its prefix tells.

    ``role`` is ``api_server``, ``engine_core``, ``worker`` or ``""``; ``rank`` the data-parallel rank (vLLM's engine
    label), ``worker`` the tensor- and pipeline-parallel place such as ``TP1`` or ``PP0_TP1``, ``0`` where there is one.
    """

    role: str = ""
    pid: int | None = None
    rank: str = "0"
    worker: str = "0"


YEAR = 366 * 86400.0
"""Seconds of a year by the clocks of lines, which tell none: each is taken for a leap year."""


@dataclass(frozen=True)
class Entry:
    """An event with its origin.

    ``clock`` is the line's own time, seconds since a leap year began, in the log's zone. ``age`` is how many seconds
    before its observation the line was written, where it was read back.
    """

    event: Event
    origin: Origin = Origin()
    clock: float | None = None
    age: float = 0.0


# --- as plain data -----------------------------------------------------------------------------------------------


def known_fields(told: DataclassInstance) -> dict[str, Any]:
    """The fields that are not None, by name."""
    return {f.name: value for f in fields(told) if (value := getattr(told, f.name)) is not None}


def plain(entry: Entry) -> dict[str, Any]:
    """The fields of an entry that are known, for a recording or an API. The event's name stands apart."""
    origin = {f.name: value for f in fields(Origin) if (value := getattr(entry.origin, f.name)) != f.default}
    return {
        **known_fields(entry.event),
        **{f"from_{name}": value for name, value in origin.items()},
        **({"age": round(entry.age, 3)} if entry.age else {}),
    }


def from_plain(name: str, data: Mapping[str, Any]) -> Entry | None:
    """The entry of plain data; None for an event that this version does not know.

    Raises ValueError where a field is missing or of a wrong type; fields that are not known are left out.
    """
    kind = KINDS.get(name)
    if kind is None:
        return None
    given, origin = _fields_in(data, kind), _fields_in(data, Origin, "from_")
    try:
        return Entry(kind(**given), Origin(**origin), age=_checked("age", data.get("age", 0.0), "float"))
    except TypeError as error:
        raise ValueError(f"the event {name} is incomplete: {error}") from None


def _fields_in(data: Mapping[str, Any], kind: type[DataclassInstance], prefix: str = "") -> dict[str, Any]:
    return {
        f.name: _checked(f.name, value, str(f.type))
        for f in fields(kind)
        if (value := data.get(f"{prefix}{f.name}")) is not None
    }


_TYPES: Mapping[str, tuple[type, ...]] = {"int": (int,), "float": (int, float), "bool": (bool,), "str": (str,)}
# The few texts that an entry may have: our own words, numbers with dots, and vLLM's names of ranks.
_TEXTS: Mapping[str, re.Pattern[str]] = {
    "version": re.compile(r"\d+(\.[0-9a-z]+){1,5}"),
    "reason": re.compile("|".join(REFUSALS)),
    "step": re.compile("|".join(STEPS)),
    "how": re.compile("|".join(DEATHS)),
    "role": re.compile("api_server|engine_core|worker"),
    "rank": re.compile(r"\d{1,5}"),
    "worker": re.compile(r"\d{1,5}|[A-Z]{2,3}\d{1,5}(_[A-Z]{2,3}\d{1,5}){0,2}"),
}


def _checked(name: str, value: Any, annotation: str) -> Any:
    kind = annotation.split(" ", 1)[0]
    if kind == "int" and isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, _TYPES[kind]) or (isinstance(value, bool) and kind != "bool"):
        raise ValueError(f"{name} has to be of type {kind}")
    if isinstance(value, str) and not _TEXTS[name].fullmatch(value):
        raise ValueError(f"{name} has a value that is not known")
    return value
