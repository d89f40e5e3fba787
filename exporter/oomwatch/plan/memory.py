"""From a model, a device and vLLM's flags to the budget of one rank, its KV pool, and whether it starts.

The rules are vLLM's own: ``vllm/v1/worker/gpu_worker.py`` for the budget, ``vllm/v1/core/kv_cache_utils.py`` and
``vllm/v1/kv_cache_interface.py`` for blocks, tokens and concurrency. What only a run can tell (activations, contexts,
graphs) is an estimate from start-ups that people published, with an error bar that held for all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from oomwatch.plan.model import Cache, Layer, Model, ModelError, Part

GIB = 1024**3

Version = tuple[int, ...]

# The releases from which a rule holds.
V1 = (0, 8)  # the V1 engine is the default
CONTEXT_OUTSIDE = (0, 7)  # the budget counts from what is taken once there is a context
BUDGET_CHECKED = (0, 9, 1)  # a budget above what is free is refused; before, others' memory shrank the pool
LARGER_DEFAULTS = (0, 9)  # batches and sequences by the size of the device
KV_BYTES = (0, 10, 2)  # --kv-cache-memory-bytes
NCCL_OUTSIDE = (0, 11)  # PR #25359
GRAPHS_INSIDE = (0, 20, 2)  # the graphs' estimate is part of the budget
UTILIZATION_092 = (0, 20, 2)  # the default was 0.9
TOKENS_BY_CONCURRENCY = (0, 21)  # "KV cache size" is concurrency times length; before, blocks by the number of groups
PREFIX_CACHES_STATES = (0, 20)  # two states for each request instead of one
CONSUMED = (0, 27)  # the budget counts what the device lost, cuBLAS' handles among it
NULL_BLOCK_RESERVED = (0, 32)


@dataclass(frozen=True)
class Figure:
    """A number with its error bar: it is between ``low`` and ``high``. ``source`` says where it is from."""

    value: float
    low: float
    high: float
    source: str

    @classmethod
    def exact(cls, value: float, source: str) -> Figure:
        return cls(value, value, value, source)

    def minus(self, others: Iterable[Figure], source: str) -> Figure:
        taken = tuple(others)
        return Figure(
            self.value - sum(one.value for one in taken),
            self.low - sum(one.high for one in taken),
            self.high - sum(one.low for one in taken),
            source,
        )

    def times(self, factor: float) -> Figure:
        return Figure(self.value * factor, self.low * factor, self.high * factor, self.source)


def total(figures: Iterable[Figure], source: str = "") -> Figure:
    listed = tuple(figures)
    return Figure(
        sum(one.value for one in listed), sum(one.low for one in listed), sum(one.high for one in listed), source
    )


@dataclass(frozen=True)
class Device:
    """One GPU as an engine sees it: ``total`` bytes, of which ``held`` are taken, by ``holders`` as far as known."""

    name: str
    total: Figure
    held: int = 0
    holders: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class Setup:
    """vLLM's flags, by their names; None: vLLM's default for this version, model and device."""

    version: Version
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    kv_cache_dtype: str = "auto"
    block_size: int | None = None
    gpu_memory_utilization: float | None = None
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    enforce_eager: bool = False
    kv_cache_memory_bytes: int | None = None
    num_gpu_blocks_override: int | None = None
    disable_hybrid_kv_cache_manager: bool = False
    enable_prefix_caching: bool = True

    @property
    def utilization(self) -> float:
        if self.gpu_memory_utilization is not None:
            return self.gpu_memory_utilization
        return 0.92 if self.version >= UTILIZATION_092 else 0.9

    @property
    def ranks(self) -> int:
        """GPUs of one engine (one data-parallel rank)."""
        return self.tensor_parallel_size * self.pipeline_parallel_size


@dataclass(frozen=True)
class Pool:
    """The KV pool of an engine, in blocks that all its ranks have."""

    block_bytes: int
    block_tokens: int
    blocks: Figure
    tokens: Figure
    concurrency: Figure
    request_bytes: int


@dataclass(frozen=True)
class Budget:
    """Bytes of the tightest rank."""

    requested: Figure
    weights: Figure
    activation: Figure
    non_torch: Figure
    graphs: Figure
    context: Figure
    pool: Figure

    graphs_inside: bool = True

    @property
    def inside(self) -> tuple[Figure, ...]:
        graphs = (self.graphs,) if self.graphs_inside else ()
        return (self.weights, self.activation, self.non_torch, *graphs)

    @property
    def outside(self) -> tuple[Figure, ...]:
        return (self.context,) if self.graphs_inside else (self.context, self.graphs)


Answer = Literal["yes", "perhaps", "no"]


@dataclass(frozen=True)
class Check:
    """One thing that a start needs: ``needed`` bytes of the ``there`` ones. ``refusal`` is what fails without it."""

    name: str
    needed: Figure
    there: Figure
    refusal: str

    @property
    def answer(self) -> Answer:
        if self.needed.high <= self.there.low:
            return "yes"
        return "no" if self.needed.low > self.there.high else "perhaps"


@dataclass(frozen=True)
class Limits:
    """What fits even at the worse ends of the error bars; None: nothing does.

    The lengths and sequences are those at ``utilization``.
    """

    utilization: float
    max_model_len: int | None
    max_num_seqs: int | None
    smallest_utilization: float | None
    largest_utilization: float | None


@dataclass(frozen=True)
class Plan:
    model: Model
    device: Device
    setup: Setup
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    budget: Budget
    pool: Pool | None
    checks: tuple[Check, ...]
    limits: Limits
    margin: int

    @property
    def starts(self) -> Answer:
        answers = {check.answer for check in self.checks}
        return "no" if "no" in answers else "perhaps" if "perhaps" in answers else "yes"


def plan(model: Model, device: Device, setup: Setup, *, margin: int = GIB) -> Plan:
    """The whole arithmetic. ``margin``: bytes of the device that the limits leave free.

    Raises ``ModelError`` where flags and model do not go together.
    """
    _consistent(model, setup)
    length = setup.max_model_len or model.max_len
    if length is None:
        raise ModelError("the configuration does not say how long a sequence may be: give --max-model-len")
    setup = replace(setup, max_model_len=length)
    budget, pool, checks = _reckon(model, device, setup)
    return Plan(
        model=model,
        device=device,
        setup=setup,
        max_model_len=length,
        max_num_seqs=sequences(setup, device),
        max_num_batched_tokens=batched_tokens(setup, device),
        budget=budget,
        pool=pool,
        checks=checks,
        limits=_limits(model, device, setup, margin),
        margin=margin,
    )


def _consistent(model: Model, setup: Setup) -> None:
    stages = setup.pipeline_parallel_size
    if stages > len(model.layers):
        raise ModelError(f"--pipeline-parallel-size {stages} is more than the {len(model.layers)} layers of the model")
    if model.heads % setup.tensor_parallel_size:
        raise ModelError(
            f"--tensor-parallel-size {setup.tensor_parallel_size} does not divide the {model.heads} attention heads of "
            "the model, so vLLM refuses it"
        )
    if not 0 < setup.utilization <= 1:
        raise ModelError(f"--gpu-memory-utilization {setup.utilization:g} is not above 0 and at most 1")
    if setup.kv_cache_memory_bytes is not None and setup.version < KV_BYTES:
        raise ModelError("--kv-cache-memory-bytes came with vLLM 0.10.2: give --vllm-version, or leave it out")
    cache_bytes(setup.kv_cache_dtype, 2)


# --- vLLM's defaults ---------------------------------------------------------------------------------------------


def sequences(setup: Setup, device: Device) -> int:
    """``--max-num-seqs`` (vllm/engine/arg_utils.py: ``get_batch_defaults``)."""
    if setup.max_num_seqs is not None:
        return setup.max_num_seqs
    return 1024 if setup.version >= LARGER_DEFAULTS and _large(device) else 256


def batched_tokens(setup: Setup, device: Device) -> int:
    """``--max-num-batched-tokens`` of a server, at least as many as it runs sequences."""
    if setup.max_num_batched_tokens is not None:
        return setup.max_num_batched_tokens
    length = setup.max_model_len or 2048
    if setup.version < V1:
        # V0 takes a prompt in one piece, and in pieces only from 32k on.
        return 2048 if length > 32_768 else max(length, 2048)
    if setup.version >= LARGER_DEFAULTS and _large(device):
        wide = device.total.value >= 160 * GIB and setup.version >= (0, 26)
        return max(16_384 if wide else 8_192, sequences(setup, device))
    return max(2_048, sequences(setup, device))


def _large(device: Device) -> bool:
    return device.total.value >= 70 * GIB and "a100" not in device.name.lower()


# --- the budget --------------------------------------------------------------------------------------------------


def _reckon(model: Model, device: Device, setup: Setup) -> tuple[Budget, Pool | None, tuple[Check, ...]]:
    """The tightest of the pipeline's stages decides, as all have the same number of blocks."""
    stages = [_stage_budget(model, device, setup, stage) for stage in range(setup.pipeline_parallel_size)]
    if not model.cache_known:
        budget = min(stages, key=lambda one: one.pool.value)
        return budget, None, _checks(model, device, setup, budget, None)
    pools = [pool_of(model, setup, device, one.pool, _layers(model, setup, at)) for at, one in enumerate(stages)]
    at = min(range(len(stages)), key=lambda index: pools[index].blocks.value)
    return stages[at], pools[at], _checks(model, device, setup, stages[at], pools[at])


def _stage_budget(model: Model, device: Device, setup: Setup, stage: int) -> Budget:
    requested = replace(
        _each(device.total.times(setup.utilization), math.ceil),
        source=f"{setup.utilization:g} of the device's total, whoever else is there (gpu_worker.py)",
    )
    budget = Budget(
        requested=requested,
        weights=weights(model, setup, stage),
        activation=activation(model, setup, device, stage),
        non_torch=_non_torch(setup),
        graphs=_graphs(model, setup, device),
        context=_context(setup),
        pool=requested,
        graphs_inside=setup.version >= GRAPHS_INSIDE,
    )
    if setup.kv_cache_memory_bytes is not None:
        pool = Figure.exact(setup.kv_cache_memory_bytes, "--kv-cache-memory-bytes; the budget is not looked at")
    else:
        others: tuple[Figure, ...] = ()
        if V1 <= setup.version < BUDGET_CHECKED and device.held:
            others = (Figure.exact(device.held, "held by others"),)
        pool = requested.minus((*budget.inside, *others), "what the budget leaves")
    return replace(budget, pool=pool)


def _layers(model: Model, setup: Setup, stage: int) -> tuple[Layer, ...]:
    """The layers of a pipeline stage (vllm/distributed/utils.py: ``get_pp_indices``)."""
    stages = setup.pipeline_parallel_size
    each, rest = divmod(len(model.layers), stages)
    counts = [each] * stages
    for back in range(2, rest + 2):
        counts[-back] += 1
    start = sum(counts[:stage])
    return model.layers[start : start + counts[stage]]


def weights(model: Model, setup: Setup, stage: int = 0) -> Figure:
    """Bytes of the weights on one rank: counted from the configuration, and scaled to the files where they are."""
    layers = _layers(model, setup, stage)
    parts = [part for layer in layers for part in layer.parts]
    last = stage == setup.pipeline_parallel_size - 1
    if stage == 0 or (last and model.head is None):
        parts.append(model.embedding)
    if last and model.head is not None:
        parts.append(model.head)
    if stage == 0 and model.encoder is not None:
        parts.append(model.encoder)
    mine = sum(model.part_bytes(part) * _share(part, setup) for part in parts)
    counted = sum(model.part_bytes(part) for part in model.parts())
    if model.files_bytes is not None:
        if not counted:
            share = 1 / setup.ranks
            return _around(model.files_bytes * share, 0.02, "the size given")
        unloaded = model.layers[len(model.layers) - model.unloaded :]
        on_disk = counted + sum(model.part_bytes(part) for layer in unloaded for part in layer.parts)
        source = "the size of its files, spread as the configuration says"
        return _around(model.files_bytes * mine / on_disk, 0.03, source)
    if not model.quantization.sure:
        return Figure(
            mine, mine * 0.2, mine, f"counted from the configuration; {model.quantization.name} may shrink it"
        )
    plain = model.quantization.bytes_per_parameter is None
    # What 4-bit floats and bitsandbytes hold depends on kernels that pad; the others follow their checkpoints.
    error = 0.04 if plain else 0.05 if model.quantization.name.startswith(("fp8", "awq", "gptq")) else 0.12
    return _around(mine, error + (0.05 if model.encoder else 0), "counted from the configuration")


def _around(value: float, error: float, source: str) -> Figure:
    # What a loader keeps besides (padding, scales, buffers) was up to 0.15 GiB in published start-ups.
    return Figure(value, value * (1 - error), value * (1 + error) + 0.15 * GIB, source)


def _share(part: Part, setup: Setup) -> float:
    """The part of all parameters of a kind that one rank holds."""
    if part.spread == "none":
        return 1.0
    if part.spread == "expert":
        return 1 / (setup.tensor_parallel_size * setup.data_parallel_size)
    return 1 / setup.tensor_parallel_size


_SAMPLER_BYTES = 38
"""Bytes for each sequence and entry of the vocabulary while the sampler is profiled: logits in two types, their sort
with its indices, probabilities. From published peaks of vLLM 0.6 to 0.32, which it meets within 10 % up to 0.17."""


def activation(model: Model, setup: Setup, device: Device, stage: int = 0) -> Figure:
    """The peak while profiling: the widest layer's step on a full batch, or the sampler on as many sequences as run.

    Both are dummy runs (vllm/v1/worker/gpu_model_runner.py: ``profile_run``).
    """
    tokens = batched_tokens(setup, device)
    running = min(sequences(setup, device), tokens)
    ranks = setup.tensor_parallel_size
    widest = max(
        (split / ranks + whole for layer in _layers(model, setup, stage) for split, whole in layer.widths), default=0.0
    )
    forward = tokens * widest * model.dtype_bytes
    last = stage == setup.pipeline_parallel_size - 1
    sampler = running * model.vocabulary * _SAMPLER_BYTES if last else 0
    value = max(forward, sampler)
    if not model.hidden:
        return Figure(1.5 * GIB, 0.2 * GIB, 6 * GIB, "a guess: no configuration tells")
    what = f"the sampler on {running:,} sequences" if sampler > forward else f"a step on {tokens:,} tokens"
    unsure = 2.0 * GIB if model.encoder is not None else 0.25 * GIB
    # Kernels that fuse need less than the sum of what a layer makes; V0 keeps no logits on ranks but the first.
    low = 0.45 * (min(value, forward) if setup.version < V1 and ranks > 1 else value)
    return Figure(value, low, 1.4 * value + unsure, f"{what} (profile_run)")


def _non_torch(setup: Setup) -> Figure:
    """What a rank takes beside torch once it is measured: NCCL's buffers, attention's and cuBLAS' workspaces."""
    if setup.version < CONTEXT_OUTSIDE:
        context = Figure(0.35, 0.1, 0.7, "")
    elif setup.version >= CONSUMED:
        context = Figure(0.3, 0.05, 0.8, "")
    else:
        context = Figure(0.06, 0.0, 0.35, "")
    several = Figure(0.5, 0.1, 2.3, "") if setup.ranks > 1 else Figure(0, 0, 0, "")
    return replace(total((context, several)).times(GIB), source="published start-ups of this version and kind")


def _context(setup: Setup) -> Figure:
    """What a process takes before its budget counts: the CUDA context, and NCCL's buffers from 0.11 on."""
    if setup.ranks > 1 and setup.version >= NCCL_OUTSIDE:
        return Figure(0.9, 0.3, 2.6, "published start-ups: context and NCCL").times(GIB)
    return Figure(0.45, 0.15, 0.75, "published start-ups: context").times(GIB)


def _graphs(model: Model, setup: Setup, device: Device) -> Figure:
    if setup.enforce_eager:
        return Figure.exact(0, "--enforce-eager: none are captured")
    most = 5.0 if model.experts or model.mixed else 1.3
    value = 0.5 if sequences(setup, device) > 32 else 0.35
    return Figure(value * GIB, 0.05 * GIB, most * GIB, "published start-ups: captured or estimated graphs")


# --- the pool ----------------------------------------------------------------------------------------------------


def cache_bytes(kv_dtype: str, dtype_bytes: int) -> float:
    """Bytes for each element of keys and values. Raises ``ModelError`` for a type that is not in this arithmetic."""
    if kv_dtype in ("auto", "bfloat16", "float16", "half"):
        return dtype_bytes if kv_dtype == "auto" else 2
    if kv_dtype.startswith("fp8") or kv_dtype in ("int8", "int8_per_token_head"):
        return 1
    if kv_dtype == "nvfp4":
        return 0.5 + 1 / 16
    raise ModelError(f"--kv-cache-dtype {kv_dtype} is not in this arithmetic: give --kv-bytes-per-token")


@dataclass(frozen=True)
class _Page:
    """What one block of one layer takes, and how many tokens are in it."""

    cache: Cache
    tokens: int
    bytes: int


def pool_of(model: Model, setup: Setup, device: Device, memory: Figure, layers: Sequence[Layer]) -> Pool:
    """Blocks, tokens and concurrency that ``memory`` bytes give, as vLLM groups the layers."""
    pages = _pages(model, setup, layers)
    groups = _groups(pages)
    size = max(len(group) for group in groups)
    uniform = len(groups) == 1
    block_bytes = sum(page.bytes for page in groups[0]) if uniform else size * max(page.bytes for page in pages)
    length = setup.max_model_len or 1
    needed = sum(_blocks_for(group[0], length, setup, device) for group in groups)
    override = setup.num_gpu_blocks_override
    if override is not None:
        blocks = Figure.exact(override, "--num-gpu-blocks-override")
    else:
        blocks = replace(
            _each(memory, lambda size: max(0, size // block_bytes)), source=f"whole blocks of {block_bytes:,} bytes"
        )
    concurrency = replace(blocks.times(1 / needed), source="blocks by those of a request of --max-model-len")
    block_tokens = min(page.tokens for page in pages if page.tokens)
    if setup.version >= TOKENS_BY_CONCURRENCY and not uniform:
        tokens = replace(concurrency.times(length), source="concurrency times length, as vLLM 0.21 and newer print it")
    else:
        tokens = replace(
            _each(blocks, lambda count: count // len(groups) * block_tokens),
            source="blocks times tokens of each, shared by the groups of layers",
        )
    return Pool(block_bytes, block_tokens, blocks, tokens, concurrency, needed * block_bytes)


def _each(figure: Figure, change: Callable[[float], float]) -> Figure:
    return Figure(change(figure.value), change(figure.low), change(figure.high), figure.source)


def _pages(model: Model, setup: Setup, layers: Sequence[Layer]) -> list[_Page]:
    ranks, size = setup.tensor_parallel_size, setup.block_size or 16
    element = cache_bytes(setup.kv_cache_dtype, model.dtype_bytes)
    caches = [cache for layer in layers for cache in layer.caches]
    if setup.disable_hybrid_kv_cache_manager:
        caches = [replace(one, kind="full", window=0) if one.kind in ("sliding", "chunked") else one for one in caches]
    if not caches:
        raise ModelError("no layer of the model keeps a cache")

    def token(cache: Cache) -> int:
        if cache.extra and cache.width and setup.kv_cache_dtype.startswith("fp8"):
            return 656 + cache.extra  # fp8_ds_mla: 512 fp8, 4 float32 scales, 64 bfloat16 (FlashMLA sparse)
        return math.ceil(max(1, cache.heads // ranks) * cache.width * element) + cache.extra

    states = [_state_bytes(cache, model, ranks) for cache in caches if cache.kind == "state"]
    tokens = [token(cache) for cache in caches if cache.kind != "state"]
    if min((*states, *tokens)) <= 0:
        raise ModelError("the configuration gives a layer a cache of 0 bytes: give --kv-bytes-per-token")
    if states and tokens:
        # A block of attention is made as large as a state (platforms/interface.py: _align_hybrid_block_size).
        size = max(size, 16 * math.ceil(max(states) / max(tokens) / 16))
    page = max((size * one for one in tokens), default=0)
    mixed = len({(one.kind, one.window) for one in caches}) > 1
    pages = []
    for cache in caches:
        if cache.kind == "state":
            # Without attention a block is as long as a request.
            pages.append(_Page(cache, 0 if tokens else setup.max_model_len or 1, max(page, *states)))
        else:
            each = token(cache)
            # Smaller layers get more tokens in a block of the same size where that comes out even, else padding.
            grown = size * (page // (size * each)) if mixed and page % (size * each) == 0 else size
            pages.append(_Page(cache, grown, page if mixed else size * each))
    return pages


def _state_bytes(cache: Cache, model: Model, ranks: int) -> int:
    return math.ceil(cache.short / ranks) * model.dtype_bytes + math.ceil(cache.long / ranks) * (
        cache.long_bytes or model.dtype_bytes
    )


def _groups(pages: Sequence[_Page]) -> list[list[_Page]]:
    """Layers that share a block table (kv_cache_utils.py: ``_get_kv_cache_groups_uniform_page_size``)."""
    alike: dict[tuple[object, ...], list[_Page]] = {}
    for page in pages:
        kind = ("state",) if page.cache.kind == "state" else (page.cache.kind, page.cache.window, page.tokens)
        alike.setdefault(kind, []).append(page)
    if len(alike) == 1:
        return [list(pages)]
    counts = [len(those) for those in alike.values()]
    size = max(counts) if max(counts) < 1.5 * min(counts) else min(counts)
    return [
        padded
        for those in alike.values()
        for at in range(math.ceil(len(those) / size))
        if (padded := those[at :: math.ceil(len(those) / size)])
    ]


def _blocks_for(page: _Page, tokens: int, setup: Setup, device: Device) -> int:
    """Blocks of one group that a request of so many tokens holds at most."""
    cache = page.cache
    if cache.kind == "state":
        return 2 if setup.enable_prefix_caching and setup.version >= PREFIX_CACHES_STATES else 1
    if cache.kind == "full" or not cache.window:
        return math.ceil(tokens / page.tokens)
    ahead = batched_tokens(setup, device)
    if cache.kind == "chunked":
        return math.ceil(min(cache.window + ahead, tokens) / page.tokens)
    return math.ceil(min(cache.window - 1 + ahead, tokens) / page.tokens) + 1


# --- does it start -----------------------------------------------------------------------------------------------

ONE_REQUEST = "one request of --max-model-len fits the pool"


def _checks(model: Model, device: Device, setup: Setup, budget: Budget, pool: Pool | None) -> tuple[Check, ...]:
    held = Figure.exact(device.held, "held by others")
    free = device.total.minus((held, budget.context), "what is free once the process has its context")
    checks = []
    fixed = setup.kv_cache_memory_bytes is not None
    if setup.version >= BUDGET_CHECKED and not fixed:
        checks.append(Check("the budget is free when it starts", budget.requested, free,
                            "Free memory on device … is less than desired GPU memory utilization"))  # fmt: skip
    if pool is not None:
        one = Figure.exact(pool.request_bytes, "blocks of a request of --max-model-len")
        blocks = pool.blocks.times(pool.block_bytes)
        reserved = pool.block_bytes if setup.version >= NULL_BLOCK_RESERVED else 0
        there = budget.pool if setup.num_gpu_blocks_override is None else blocks
        checks.append(Check(ONE_REQUEST, one,
                            there.minus((Figure.exact(reserved, "the null block"),), there.source),
                            "To serve at least one request with the model's max seq len …"))  # fmt: skip
    elif not fixed:
        checks.append(Check("something is left for the pool", Figure.exact(0, ""), budget.pool,
                            "No available memory for the cache blocks"))  # fmt: skip
    checks.append(Check("all of it fits the device", _taken(budget, pool), device.total.minus((held,), "the device"),
                        "CUDA out of memory, while it profiles or captures graphs"))  # fmt: skip
    return tuple(checks)


def _taken(budget: Budget, pool: Pool | None) -> Figure:
    """All that the tightest rank takes of its device."""
    return total((*budget.inside, *budget.outside, _pool_taken(budget, pool)))


def _pool_taken(budget: Budget, pool: Pool | None) -> Figure:
    """The pool as part of a sum with what else the budget holds: together they are the budget, whatever each is."""
    if pool is not None and pool.blocks.low == pool.blocks.high:
        return pool.blocks.times(pool.block_bytes)
    inside = total(budget.inside)
    if budget.pool.low == budget.pool.high:
        return budget.pool
    return Figure(
        max(0.0, budget.requested.value - inside.value),
        max(0.0, budget.requested.low - inside.low),
        max(0.0, budget.requested.high - inside.high),
        "the rest of the budget",
    )


# --- the other way round -----------------------------------------------------------------------------------------


def _limits(model: Model, device: Device, setup: Setup, margin: int) -> Limits:
    """Utilization first: the others hold at the one that was asked for, or at the largest below it that fits."""
    length = setup.max_model_len or 1

    def fits(changed: Setup, *, at_least_one: bool = True, running: int = 0) -> bool:
        budget, pool, checks = _reckon(model, device, changed)
        needed = [check for check in checks if at_least_one or check.name != ONE_REQUEST]
        if any(check.answer != "yes" for check in needed) or _free(device, budget, pool) < margin:
            return False
        return not running or (pool is not None and pool.concurrency.low >= running)

    if setup.kv_cache_memory_bytes is not None:
        smallest = largest = None
        there = setup
    else:

        def at(hundredth: int) -> Setup:
            return replace(setup, gpu_memory_utilization=hundredth / 100)

        largest = _largest(lambda n: fits(at(n), at_least_one=False), 100)
        serves = largest is not None and fits(at(largest))
        fewer = _largest(lambda n: not fits(at(n)), largest) if serves and largest is not None else None
        smallest = None if not serves else 1 if fewer is None else fewer + 1
        asked = math.floor(setup.utilization * 100 + 1e-9)
        there = setup if largest is None or asked <= largest else at(largest)
    return Limits(
        utilization=there.utilization,
        max_model_len=_largest(lambda n: fits(replace(there, max_model_len=n)), max(length, model.max_len or length)),
        max_num_seqs=_largest(lambda n: fits(replace(there, max_num_seqs=n), running=n), 65_536),
        smallest_utilization=None if smallest is None else smallest / 100,
        largest_utilization=None if smallest is None or largest is None else largest / 100,
    )


def _free(device: Device, budget: Budget, pool: Pool | None) -> float:
    """Bytes that stay free on the device at the worse ends."""
    return device.total.low - device.held - _taken(budget, pool).high


def _largest(fits: Callable[[int], bool], most: int) -> int | None:
    """The largest number from 1 to ``most`` that fits, where all below it do."""
    if not fits(1):
        return None
    low, high = 1, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low
