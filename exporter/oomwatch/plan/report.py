"""A plan for people, and as plain data."""

from __future__ import annotations

from collections.abc import Iterator

from oomwatch import units
from oomwatch.plan.memory import Check, Figure, Plan, total
from oomwatch.plan.model import kinds

EXIT_STATUS = {"yes": 0, "perhaps": 1, "no": 1}

_HEADLINES = {
    "yes": "It starts.",
    "perhaps": "It may start or not: the error bars decide.",
    "no": "It does not start.",
}


def text(plan: Plan) -> str:
    return "\n".join((*_head(plan), "", *_budget(plan), "", *_cache(plan), "", *_checks(plan), "", *_limits(plan)))


def _head(plan: Plan) -> Iterator[str]:
    model, setup = plan.model, plan.setup
    version = ".".join(map(str, setup.version))
    count = f"{model.parameters / 1e9:.3g} billion parameters" if model.parameters else "sizes as given"
    spread = "".join(
        f", {name} {number}"
        for name, number in (
            ("tensor parallel", setup.tensor_parallel_size),
            ("pipeline parallel", setup.pipeline_parallel_size),
            ("data parallel", setup.data_parallel_size),
        )
        if number > 1
    )
    holders = ", ".join(f"{name} {units.size(size)}" for name, size in plan.device.holders)
    who = f" ({holders})" if holders else ""
    held = f", of which others hold {units.size(plan.device.held)}{who}" if plan.device.held else ""
    yield f"{model.name} ({model.family}, {count}, quantization {model.quantization.name}) with vLLM {version}{spread}"
    yield f"on {plan.device.name}: {units.size(plan.device.total.value)}{held}"
    yield (
        f"--max-model-len {plan.max_model_len}, --max-num-seqs {plan.max_num_seqs}, "
        f"--max-num-batched-tokens {plan.max_num_batched_tokens}"
    )
    yield ""
    yield _HEADLINES[plan.starts]
    for check in plan.checks:
        if check.answer != "yes":
            yield f"  {_sentence(check)}"


def _sentence(check: Check) -> str:
    needed, there = check.needed.value, max(0.0, check.there.value)
    short = units.size(needed - there) + " too little" if needed > there else "within the error bars"
    word = "Not" if check.answer == "no" else "Perhaps not"
    sizes = f"{units.size(needed)} of {units.size(there)}, {short}"
    return f'{word}: {check.name} ({sizes}); vLLM would say "{check.refusal}".'


def _rows(plan: Plan) -> Iterator[tuple[str, Figure]]:
    budget = plan.budget
    yield "budget", budget.requested
    for name, figure in named(plan):
        yield f"  {name}", figure
    yield "  KV pool", budget.pool
    yield "outside the budget", total(budget.outside, "")
    for name, figure in outside(plan):
        yield f"  {name}", figure


def named(plan: Plan) -> Iterator[tuple[str, Figure]]:
    """What the budget is for, apart from the pool."""
    budget = plan.budget
    yield "weights", budget.weights
    yield "activations", budget.activation
    yield "other than torch", budget.non_torch
    if budget.graphs_inside:
        yield "CUDA graphs", budget.graphs


def outside(plan: Plan) -> Iterator[tuple[str, Figure]]:
    yield "context", plan.budget.context
    if not plan.budget.graphs_inside:
        yield "CUDA graphs", plan.budget.graphs


def _budget(plan: Plan) -> Iterator[str]:
    where = " of the tightest rank" if plan.setup.ranks > 1 else ""
    yield f"{f'Bytes{where}':<26}{'likely':>10}  between"
    for name, figure in _rows(plan):
        source = f"  {figure.source}" if figure.source else ""
        yield f"{name:<26}{units.size(figure.value):>10}  {_between(figure):<22}{source}".rstrip()


def _between(figure: Figure) -> str:
    if figure.low == figure.high:
        return "exactly"
    return f"{units.size(figure.low)} and {units.size(figure.high)}"


def _cache(plan: Plan) -> Iterator[str]:
    pool = plan.pool
    if pool is None:
        yield "KV cache: not known"
        return
    layers = ", ".join(f"{count} of {kind}" for kind, count in kinds(plan.model))
    each = " of each data-parallel rank" if plan.setup.data_parallel_size > 1 else ""
    yield f"KV cache{each}"
    yield f"  layers: {layers}"
    yield f"  blocks: {_number(pool.blocks)}, {units.size(pool.block_bytes)} for {pool.block_tokens} tokens of a layer"
    yield f"  tokens: {_number(pool.tokens)}; {pool.tokens.source}"
    yield f"  requests of {plan.max_model_len:,} tokens at once: {_number(pool.concurrency, '.2f')}"


def _number(figure: Figure, form: str = ",.0f") -> str:
    value = f"{figure.value:{form}}"
    return value if figure.low == figure.high else f"{value} (between {figure.low:{form}} and {figure.high:{form}})"


def _checks(plan: Plan) -> Iterator[str]:
    yield "To start it needs"
    for check in plan.checks:
        needed, there = units.size(check.needed.value), units.size(max(0.0, check.there.value))
        yield f"  {check.answer:<8}{check.name}: {needed} of {there}"


def _limits(plan: Plan) -> Iterator[str]:
    limits = plan.limits
    yield f"What fits at the worse ends of all error bars, with {units.size(plan.margin)} of the device left free"
    low, high = limits.smallest_utilization, limits.largest_utilization
    at = ""
    if plan.setup.kv_cache_memory_bytes is None:
        share = "nothing" if low is None or high is None else f"{low:.2f} to {high:.2f}"
        yield f"  --gpu-memory-utilization  {share}"
        at = f" at {limits.utilization:g}"
    yield f"  --max-model-len           {_up_to(limits.max_model_len)}{at}"
    yield f"  --max-num-seqs            {_up_to(limits.max_num_seqs)}{at}, so that none is ever preempted"
    for line in plan.model.unsure:
        yield f"Not sure: {line}."


def _up_to(number: int | None) -> str:
    return "nothing" if number is None else f"up to {number}"


# --- as plain data -----------------------------------------------------------------------------------------------


def plain(plan: Plan) -> dict[str, object]:
    """Bytes, tokens and ratios; each figure with its error bar and source."""
    pool, limits, setup = plan.pool, plan.limits, plan.setup
    return {
        "model": {
            "name": plan.model.name,
            "family": plan.model.family,
            "parameters": plan.model.parameters or None,
            "quantization": plan.model.quantization.name,
            "unsure": list(plan.model.unsure),
        },
        "device": {
            "name": plan.device.name,
            "total_bytes": _figure(plan.device.total),
            "held_bytes": plan.device.held,
            "holders": [{"name": name, "bytes": size} for name, size in plan.device.holders],
        },
        "vllm_version": ".".join(map(str, setup.version)),
        "flags": {
            "tensor_parallel_size": setup.tensor_parallel_size,
            "pipeline_parallel_size": setup.pipeline_parallel_size,
            "data_parallel_size": setup.data_parallel_size,
            "gpu_memory_utilization": setup.utilization,
            "kv_cache_dtype": setup.kv_cache_dtype,
            "max_model_len": plan.max_model_len,
            "max_num_seqs": plan.max_num_seqs,
            "max_num_batched_tokens": plan.max_num_batched_tokens,
        },
        "starts": plan.starts,
        "budget_bytes": _figure(plan.budget.requested),
        "inside_bytes": {name: _figure(figure) for name, figure in named(plan)},
        "pool_bytes": _figure(plan.budget.pool),
        "outside_bytes": {name: _figure(figure) for name, figure in outside(plan)},
        "kv_cache": None
        if pool is None
        else {
            "block_bytes": pool.block_bytes,
            "block_tokens": pool.block_tokens,
            "request_bytes": pool.request_bytes,
            "blocks": _figure(pool.blocks),
            "tokens": _figure(pool.tokens),
            "concurrency": _figure(pool.concurrency),
        },
        "checks": [
            {
                "check": check.name,
                "answer": check.answer,
                "needed_bytes": _figure(check.needed),
                "there_bytes": _figure(check.there),
                "refusal": check.refusal,
            }
            for check in plan.checks
        ],
        "margin_bytes": plan.margin,
        "limits": {
            "gpu_memory_utilization": limits.utilization,
            "max_model_len": limits.max_model_len,
            "max_num_seqs": limits.max_num_seqs,
            "smallest_gpu_memory_utilization": limits.smallest_utilization,
            "largest_gpu_memory_utilization": limits.largest_utilization,
        },
    }


def _figure(figure: Figure) -> dict[str, object]:
    return {"value": figure.value, "low": figure.low, "high": figure.high, "source": figure.source}
