"""The lines that vLLM and PyTorch write, one table: what a line says, in which releases, and how it is read.

Lines are searched, never matched from their beginning: prefixes, file names and line numbers change with releases and
loggers. Each shape names a literal that is in all of its lines, before any quotation mark of its sentence, so that
other lines cost next to nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from oomwatch.enginelog.events import (
    Budget,
    Died,
    Event,
    Fitted,
    KvPool,
    Load,
    OutOfMemory,
    Preempted,
    Ready,
    Refused,
    Settings,
    Slept,
    Start,
    Step,
    Stopped,
)

Release = tuple[int, ...]

# vLLM divides by 2^30 and wrote "GB" up to 0.8.2; PyTorch's units are binary as well.
_UNITS: Mapping[bytes, int] = {b"": 1, b"b": 1, b"k": 1 << 10, b"m": 1 << 20, b"g": 1 << 30, b"t": 1 << 40}

_NUMBER = r"-?\d+(?:\.\d+)?"
# What stands between braces in a template: {name:kind}.
_KINDS: Mapping[str, str] = {
    "size": rf"(?P<%s>{_NUMBER})(?: ?(?P<%s__unit>[KMGT]?i?B\b|bytes\b))?",
    "gib": rf"(?P<%s>{_NUMBER})",
    "number": rf"(?P<%s>{_NUMBER})",
    "percent": rf"(?P<%s>{_NUMBER})",
    "int": r"(?P<%s>-?[\d,]*\d)",
    "version": r"(?P<%s>\d+(?:\.\d+)+(?:\.?(?:a|b|rc|dev|post)\d+)*)",
}
_PLACE = re.compile(r"\{(\w+):(\w+)\}")


@dataclass(frozen=True)
class Shape:
    """One kind of line. ``since`` and ``until`` are the first and last release known to write it (None: unbounded).

    ``literal`` is in every such line. ``also`` are patterns that are searched in the rest of the line, each for what
    it finds; ``given`` are fields that the shape itself tells. ``raw`` marks lines of
    libraries, which no logger and no exception introduces.
    """

    event: type[Event]
    literal: bytes
    template: str
    since: Release | None = None
    until: Release | None = None
    also: tuple[str, ...] = ()
    given: Mapping[str, Any] = field(default_factory=dict)
    steps: Mapping[bytes, str] = field(default_factory=dict)
    raw: bool = False

    @property
    def error(self) -> bool:
        """Whether its lines tell of an error: their level, or the exception's name, says so."""
        return self.event in (Refused, OutOfMemory, Step, Died) and not self.raw

    def in_release(self, release: Release) -> bool:
        """Whether that release is within the known range."""
        return (self.since is None or release >= self.since) and (
            self.until is None or release[: len(self.until)] <= self.until
        )


def _steps() -> dict[bytes, str]:
    names = {
        "load": "load_model load_weights get_model initialize_model _initialize_model",
        "profile": "determine_available_memory determine_num_available_blocks profile_run profile_cudagraph_memory",
        "kv_pool": "initialize_from_config initialize_cache initialize_kv_cache _allocate_kv_cache_tensors "
        "_allocate_kv_cache",
        "warm_up": "compile_or_warm_up_model warming_up_model warm_up_model kernel_warmup _dummy_sampler_run",
        "graphs": "capture_model _capture_cudagraphs capture_graph",
        "serve": "run_busy_loop execute_model sample_tokens run_engine_loop engine_step",
    }
    return {name.encode(): step for step, listed in names.items() for name in listed.split()}


_STEPS = _steps()

_CORE_KEYS = tuple(
    rf"\b{key}={{{name}:int}}"
    for key, name in (
        ("max_seq_len", "max_model_len"),
        ("tensor_parallel_size", "tensor_parallel_size"),
        ("pipeline_parallel_size", "pipeline_parallel_size"),
        ("data_parallel_size", "data_parallel_size"),
    )
)
_ARGUMENTS = tuple(
    # 'key': value in a dictionary, key=value in a Namespace
    rf"\b{key}'?[:=] ?{{{name}:{kind}}}"
    for key, name, kind in (
        ("gpu_memory_utilization", "gpu_memory_utilization", "number"),
        ("max_model_len", "max_model_len", "int"),
        ("max_num_seqs", "max_num_seqs", "int"),
        ("max_num_batched_tokens", "max_num_batched_tokens", "int"),
        ("tensor_parallel_size", "tensor_parallel_size", "int"),
        ("pipeline_parallel_size", "pipeline_parallel_size", "int"),
        ("data_parallel_size", "data_parallel_size", "int"),
        ("kv_cache_memory_bytes", "kv_cache_memory", "int"),
    )
)
_OF_THE_SENTENCE = (
    r"this process has {in_use:size} memory in use",
    r"Of the allocated memory {allocated:size} is allocated by PyTorch",
    r"with {private_pools:size} allocated in private pools",
    r"{reserved:size} is reserved by PyTorch but unallocated",
)

TABLE: tuple[Shape, ...] = (
    # --- the life of an engine
    Shape(Start, b"vLLM API server version", r"vLLM API server version {version:version}", None, (0, 15)),
    Shape(Start, b"version ", r"\] [^A-Za-z0-9]*version {version:version}\S*\s*$", (0, 15)),
    Shape(
        Start,
        b"LLM engine (v",
        r"Initializing an? (?:V[01] )?LLM engine \(v{version:version}",
        also=_CORE_KEYS,
        given={"core": True},
    ),
    Shape(Settings, b"non-default args: ", r"non-default args: \{", (0, 9), also=_ARGUMENTS),
    Shape(Settings, b"args: Namespace(", r"\bargs: Namespace\(", None, (0, 10), also=_ARGUMENTS),
    Shape(
        Ready,
        b"init engine (profile",
        r"init engine \(profile, create kv cache, warmup model\) took {seconds:number} s",
        (0, 6, 4),
    ),
    Shape(Ready, b"Application startup complete", r"Application startup complete\.", given={"server": True}),
    Shape(Stopped, b"Shutting down FastAPI", r"Shutting down FastAPI HTTP server", (0, 5)),
    Shape(Stopped, b"API server: shutdown triggered", r"\[shutdown\] API server: shutdown triggered", (0, 20)),
    Shape(Slept, b"Sleep mode freed", r"Sleep mode freed {freed:size} memory, {in_use:size} memory is", (0, 7, 3)),
    # --- what a start takes
    Shape(Budget, b"model weights took", r"Loading model weights took {weights:size}", None, (0, 8, 1)),
    Shape(
        Budget, b"Model loading took", r"Model loading took {weights:size}(?: memory)? and {seconds:number} s", (0, 8)
    ),
    Shape(
        Budget,
        b"total_gpu_memory (",
        r"total_gpu_memory \({total:size}\) x gpu_memory_utilization \({utilization:number}\) = {promised:size}",
        (0, 6, 4),
        (0, 10),
    ),
    Shape(
        Budget,
        b"model weights take ",
        r"model weights take {weights:size}; non_torch_memory takes {non_torch:size}; PyTorch activation peak memory "
        r"takes {activation:size}; the rest of the memory reserved for KV Cache is {kv_pool:size}",
        (0, 6, 4),
        (0, 10),
    ),
    Shape(Budget, b"Available KV cache memory", r"Available KV cache memory: {kv_pool:size}", (0, 9, 1)),
    Shape(
        Budget,
        b"Desired GPU memory utilization is",
        r"Free memory on device \S*\s?\({free:gib}/{total:gib} GiB\) on startup\. Desired GPU memory utilization is "
        r"\({utilization:number}, {promised:size}\)\. Actual usage is {weights:size} for weight, {activation:size} for "
        r"peak activation, {non_torch:size} for non-torch memory, and {graphs:size} for CUDAGraph memory",
        (0, 10, 2),
        (0, 26),
        also=(r"Current kv cache memory in use is {kv_pool:size}",),
    ),
    Shape(
        Budget,
        b"Desired GPU memory utilization is",
        r"Free memory on device \S*\s?\({free:gib}/{total:gib} GiB\) on startup\. Desired GPU memory utilization is "
        r"\({utilization:number}, {promised:size}\)\. Actual usage is {consumed:size} for consumed memory "
        r"\(weights \+ non-torch\), {activation:size} for peak activation, and {graphs:size} for CUDAGraph memory",
        (0, 27),
        also=(r"Current kv cache memory in use is {kv_pool:size}",),
    ),
    Shape(
        Budget,
        b"as specified by kv_cache_memory_bytes",
        r"Initial free memory {free:size},? reserved {kv_pool:size} memory for KV Cache as specified by "
        r"kv_cache_memory_bytes",
        (0, 10, 2),
        given={"fixed": True},
    ),
    Shape(
        Budget,
        b"kv_cache_memory_bytes=",
        r"Applying persisted startup plan.*?kv_cache_memory_bytes={kv_pool:size}",
        (0, 26),
        given={"fixed": True},
    ),
    Shape(
        Budget,
        b"for KV cache on node",
        r"Explicitly set \({kv_pool:gib}/{total:gib}\) GiB for KV cache on node",
        (0, 16),
        given={"fixed": True},
    ),
    Shape(
        Budget,
        b"for KV cache on node",
        r"Auto set \({kv_pool:gib}/{total:gib}\) GiB for KV cache on node \d+, with {promised:size} requested",
        (0, 16),
    ),
    Shape(
        Budget,
        b"Graph capturing finished",
        r"Graph capturing finished in {seconds:number} secs?(?:, took {graphs:size})?",
    ),
    Shape(Budget, b"CUDA graph memory: ", r"Estimated CUDA graph memory: {graphs_estimate:size} total", (0, 18)),
    Shape(
        Budget,
        b"CUDA graph pool memory: ",
        r"CUDA graph pool memory: {graphs:size} \(actual\), {graphs_estimate:size} \(estimated\)",
        (0, 18),
    ),
    Shape(
        KvPool, b" blocks: ", r"# (?:GPU|cuda|cpu|hpu|neuron|xpu|rocm) blocks: {blocks:int}", None, (0, 10),
        also=(r"# CPU blocks: {cpu_blocks:int}",),
    ),
    Shape(
        KvPool,
        b" KV cache size: ",
        r"\w+(?: \+ host)? KV cache size: {tokens:int} tokens",
        (0, 8),
        also=(r"Maximum concurrency for {max_model_len:int} tokens per request: {concurrency:number}x",),
    ),
    Shape(
        KvPool,
        b"Maximum concurrency for",
        r"Maximum concurrency for {max_model_len:int} tokens per request: {concurrency:number}x",
        (0, 5),
    ),
    Shape(
        Fitted,
        b"Auto-fit max_model_len",
        r"Auto-fit max_model_len: reduced from {wanted_max_model_len:int} to {max_model_len:int}",
        (0, 14),
    ),
    # --- load
    Shape(
        Load,
        b" KV cache usage: ",
        r"Running: {running:int} reqs, (?:Swapped: {swapped:int} reqs, )?(?:Pending|Waiting): {waiting:int} reqs,"
        r"(?: Deferred: \d+ reqs,)?[^%]*?(?:Preemptions: {preemptions:int}, )?\w+ KV cache usage: {kv_usage:percent}%",
    ),
    Shape(Preempted, b"total_num_cumulative_preemption", r"total_num_cumulative_preemption={total:int}", None, (0, 10)),
    # --- refusals
    Shape(
        Refused,
        b"is less than desired GPU memory utilization",
        r"Free memory on device \S*\s?\({available:gib}/{total:gib} GiB\) on startup is less than desired GPU memory "
        r"utilization \({utilization:number}, {wanted:size}\)",
        (0, 9, 1),
        given={"reason": "budget_above_free"},
    ),
    Shape(
        Refused,
        b" on startup is less than the engine",
        r"Free memory on device \S*\s?\({available:gib}/{total:gib} GiB\) on startup is less than the engine's budget "
        r"after excluding external process's weights \({utilization:number}, {wanted:size}\)",
        (0, 32),
        given={"reason": "budget_above_free"},
    ),
    Shape(
        Refused,
        b"Externally held weights on device",
        r"Externally held weights on device \S* ?\({wanted:gib}/{total:gib} GiB\) exceed the desired GPU memory "
        r"utilization \({utilization:number}, {available:size}\)",
        (0, 32),
        given={"reason": "weights_above_budget"},
    ),
    Shape(
        Refused,
        b"No available memory for the cache blocks",
        r"No available memory for the cache blocks\.",
        given={"reason": "no_room"},
    ),
    Shape(
        Refused,
        b"The model's max seq len (",
        r"The model's max seq len \({max_model_len:int}\) is larger than the maximum number of tokens that can be "
        r"stored in KV cache \({tokens:int}\)",
        None,
        (0, 10),
        given={"reason": "context_too_long"},
    ),
    Shape(
        Refused,
        b"To serve at least one request with the model",
        r"To serve at least one request with the models?'s max seq len \({max_model_len:int}\), \(?{wanted:size} KV "
        r"cache is needed, which is larger than the available KV cache memory \({available:size}\)",
        (0, 7, 3),
        also=(r"estimated maximum model length is {fitting_max_model_len:int}",),
        given={"reason": "context_too_long"},
    ),
    Shape(
        Refused,
        b"Error in memory profiling",
        r"Error in memory profiling\. Initial (?:used memory|free memory {available:size}, current free memory "
        r"{free_now:size})",
        given={"reason": "profiling_disturbed"},
    ),
    Shape(
        Refused,
        b"exceeds available Mamba cache blocks",
        r"max_num_seqs \({max_num_seqs:int}\) exceeds available Mamba cache blocks \({blocks:int}\)",
        (0, 20),
        given={"reason": "too_many_sequences"},
    ),
    Shape(
        Refused,
        b"is less than requested memory for kv",
        r"Available memory on node \d+ \({available:gib}/{total:gib} GiB\) on kv cache allocation is less than "
        r"requested memory for kv \({wanted:gib}(?:/[\d.]+)? GiB\)",
        (0, 16),
        given={"reason": "host_memory"},
    ),
    Shape(
        Refused,
        b"is allocated for the swap space",
        r"{wanted:size} out of the {total:size} total CPU memory is allocated for the swap space",
        None,
        (0, 10),
        given={"reason": "swap_space"},
    ),
    # --- out of memory: the sentences are PyTorch's, whatever the release of vLLM
    Shape(
        OutOfMemory,
        b"out of memory. Tried to allocate",
        r"out of memory\. Tried to allocate {wanted:size}\. GPU {gpu:int} has a total capaci?ty of {total:size} of "
        r"which {free:size} is free\.",
        also=_OF_THE_SENTENCE,
    ),
    Shape(
        OutOfMemory,  # PyTorch before 2.1
        b"out of memory. Tried to allocate",
        r"out of memory\. Tried to allocate {wanted:size} \(GPU {gpu:int}; {total:size} total capacity; "
        r"{allocated:size} already allocated; {free:size} free; {reserved_in_all:size} reserved in total by PyTorch\)",
    ),
    Shape(
        OutOfMemory,
        b"out of memory occurred when warming up",
        r"out of memory occurred when warming up (?:sampler|pooler).*? with {dummy_requests:int} dummy requests",
        (0, 8),
    ),
    Shape(
        OutOfMemory,
        b"out of memory",
        r"(?:CUDA|HIP|XPU|NPU) (?:driver )?[Ee]rror: out of memory|"
        r"OutOfMemoryError(?:: |\(['\"])(?:CUDA|HIP|XPU|NPU) out of memory(?:\. Tried to allocate {wanted:size})?",
    ),
    Shape(OutOfMemory, b"Cuda failure", r"Cuda failure(?: \d+)? 'out of memory'", raw=True),
    Shape(OutOfMemory, b"CUBLAS_STATUS_ALLOC_FAILED", r"CUBLAS_STATUS_ALLOC_FAILED"),
    Shape(
        OutOfMemory,
        b"DefaultCPUAllocator: ",
        r"DefaultCPUAllocator: can't allocate memory: you tried to allocate {wanted:size}",
        given={"host": True},
    ),
    Shape(OutOfMemory, b"MemoryError", r"(?:^|\] )(?:numpy\S+_Array)?MemoryError\b", given={"host": True}),
    Shape(OutOfMemory, b"std::bad_alloc", r"std::bad_alloc", given={"host": True}, raw=True),
    Shape(
        Step,
        b"  File ",
        rf'File "[^"]*", line \d+, in (?P<step>{"|".join(sorted(map(re.escape, (n.decode() for n in _STEPS))))})\s*$',
        steps=_STEPS,
    ),
    # --- the end
    Shape(
        Died, b"EngineCore failed to start", r"EngineCore failed to start\.", (0, 8, 5),
        given={"how": "start_failed"},
    ),
    Shape(
        Died, b"ngine core initialization failed", r"Engine core initialization failed\.", (0, 8, 5),
        given={"how": "start_failed"},
    ),
    Shape(
        Died, b"Engine process failed to start", r"Engine process failed to start", (0, 6), (0, 10),
        given={"how": "start_failed"},
    ),
    Shape(
        Died, b"EngineCore encountered a", r"EngineCore encountered an? (?:fatal error|issue)\.", (0, 8, 5),
        given={"how": "fatal"},
    ),
    Shape(
        Died, b"EngineCore hit an exception", r"EngineCore hit an exception", (0, 7), (0, 8, 4),
        given={"how": "fatal"},
    ),
    Shape(
        Died,
        b" died unexpectedly",
        r"Worker proc \S+ died unexpectedly(?: \(exit code: (?:{exit_code:int}|None)\))?",
        (0, 8, 5),
        given={"how": "worker_died"},
    ),
    Shape(
        Died,
        b" died unexpectedly",
        r"Engine core proc(?:ess)? \S+ died unexpectedly",
        (0, 10),
        given={"how": "core_died"},
    ),
    Shape(
        Died, b"engine core exited unexpectedly", r"engine core exited unexpectedly", (0, 23),
        given={"how": "core_died"},
    ),
    Shape(
        Died, b" died, exit code: ", r"Worker \S+ pid \d+ died, exit code: {exit_code:int}", None, (0, 10),
        given={"how": "worker_died"},
    ),
    Shape(
        Died, b"Engine background task failed", r"Engine background task failed", None, (0, 10),
        given={"how": "loop_ended"},
    ),
    Shape(
        Died, b"Task finished unexpectedly", r"Task finished unexpectedly\. This should never happen", None, (0, 10),
        given={"how": "loop_ended"},
    ),
    Shape(
        Died, b"MQEngineDeadError", r"MQEngineDeadError", (0, 6), (0, 10),
        given={"how": "loop_ended"},
    ),
)  # fmt: skip


# --- compiled ----------------------------------------------------------------------------------------------------

Convert = Callable[[bytes, bytes], Any]

_CONVERT: Mapping[str, Convert] = {
    "size": lambda text, unit: round(float(text) * _UNITS[b"" if unit == b"bytes" else unit[:1].lower()]),
    "gib": lambda text, _: round(float(text) * (1 << 30)),
    "number": lambda text, _: float(text),
    "percent": lambda text, _: float(text) / 100,
    "int": lambda text, _: int(text.replace(b",", b"")),
    "version": lambda text, _: text.decode("ascii"),
}


@dataclass(frozen=True)
class Pattern:
    """A template as a regular expression, with how its groups become fields."""

    regex: re.Pattern[bytes]
    kinds: Mapping[str, str]

    def fields(self, match: re.Match[bytes]) -> dict[str, Any]:
        """The values of the groups that took part."""
        found: dict[str, Any] = {}
        for name, kind in self.kinds.items():
            text = match.group(name)
            if text is not None:
                unit = match.group(f"{name}__unit") or b"" if kind == "size" else b""
                found[name] = _CONVERT[kind](text, unit)
        return found


def compiled(template: str) -> Pattern:
    """The regular expression of a template."""
    kinds = dict(_PLACE.findall(template))
    text = _PLACE.sub(lambda place: _KINDS[place[2]].replace("%s", place[1]), template)
    return Pattern(re.compile(text.encode()), kinds)


@dataclass(frozen=True)
class Compiled:
    """A shape with its patterns."""

    shape: Shape
    pattern: Pattern
    also: tuple[Pattern, ...]

    def read(self, line: bytes) -> tuple[Event, int] | None:
        """The event of a line and where in it its sentence begins; None where it is another line."""
        match = self.pattern.regex.search(line)
        if match is None:
            return None
        found = {**self.shape.given, **self.pattern.fields(match)}
        for pattern in self.also:
            more = pattern.regex.search(line, match.start())
            if more is not None:
                found.update(pattern.fields(more))
        if self.shape.steps:
            found["step"] = self.shape.steps[match["step"]]
        if self.shape.event is OutOfMemory:
            _complete(found, line)
        return self.shape.event(**found), match.start()


_OTHER_PROCESS = compiled(r"Process \d+ has {size:size} memory in use")


def _complete(found: dict[str, Any], line: bytes) -> None:
    """What the sentence of an out-of-memory error says in a roundabout way.

    ``0 bytes memory in use`` is what PyTorch writes where the driver does not tell: no figure. Processes that it
    lists by number are others only where it has named itself; a process in a container does not know its own number.
    """
    whole = found.pop("reserved_in_all", None)
    if whole is not None:
        found["reserved"] = max(0, whole - found["allocated"])
    if found.get("in_use") == 0:
        del found["in_use"]
    if "in_use" not in found:
        return
    sizes = [_OTHER_PROCESS.fields(match)["size"] for match in _OTHER_PROCESS.regex.finditer(line)]
    if all(sizes):
        found["others"] = sum(sizes)


SHAPES = tuple(
    Compiled(shape, compiled(shape.template), tuple(compiled(also) for also in shape.also)) for shape in TABLE
)
