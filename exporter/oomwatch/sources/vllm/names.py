"""What is read from a vLLM page: one row for each meaning, with every name that vLLM gave it.

The page reader keeps the series named here and no others; :mod:`oomwatch.sources.vllm.meaning` reads them by these
rows; the documentation is made from them. Version bounds are the first and last release whose source or live page
showed the name; None as ``since`` stands for "older than 0.5.5, or not determined", None as ``until`` for "still
there in 0.33". ``_created`` series are never read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Exposed:
    """One name of a sample on the page, and the releases that show it."""

    name: str
    since: str | None = None
    until: str | None = None
    note: str = ""

    @property
    def versions(self) -> str:
        """The range as people write it: ``0.9.2 to 0.10.x``, ``from 0.11.1``, ``all``."""
        if self.since and self.until:
            return f"{self.since} to {self.until}"
        if self.since:
            return f"from {self.since}"
        return f"up to {self.until}" if self.until else "all"


@dataclass(frozen=True)
class Meaning:
    """What one field holds: ``exposed`` newest first, of which the first that a page has is read.

    ``kind`` is ``gauge``, ``counter``, ``histogram`` (its buckets) or ``info`` (a gauge of 1 whose labels matter).
    ``select`` keeps the series with that label value; ``add`` sums the names instead of taking the first, for events
    that several parts of vLLM count apart. ``per_rank`` is false for what belongs to the whole server.
    """

    field: str
    kind: str
    unit: str
    exposed: tuple[Exposed, ...]
    labels: tuple[str, ...] = ("engine", "model_name")
    select: tuple[str, str] | None = None
    add: bool = False
    per_rank: bool = True
    note: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(exposed.name for exposed in self.exposed)


CACHE_CONFIG = "vllm:cache_config_info"
LORA_REQUESTS = "vllm:lora_requests_info"

MEANINGS: tuple[Meaning, ...] = (
    Meaning(
        "usage",
        "gauge",
        "ratio",
        (
            Exposed("vllm:kv_cache_usage_perc", "0.9.2", note="carries a pid label with several API servers to 0.11.0"),
            Exposed("vllm:gpu_cache_usage_perc", None, "0.11.2", "0.11.0 to 0.11.2 only with hidden metrics shown"),
        ),
        note="V1 up to 0.10.1 counts the null block as used: an idle pool of n blocks reads 1/n",
    ),
    Meaning("running", "gauge", "requests", (Exposed("vllm:num_requests_running"),)),
    Meaning(
        "waiting",
        "gauge",
        "requests",
        (Exposed("vllm:num_requests_waiting"),),
        note="from 0.20 the sum of both reasons below",
    ),
    Meaning(
        "waiting_capacity",
        "gauge",
        "requests",
        (Exposed("vllm:num_requests_waiting_by_reason", "0.20.2"),),
        ("engine", "model_name", "reason"),
        select=("reason", "capacity"),
    ),
    Meaning(
        "waiting_deferred",
        "gauge",
        "requests",
        (Exposed("vllm:num_requests_waiting_by_reason", "0.20.2"),),
        ("engine", "model_name", "reason"),
        select=("reason", "deferred"),
        note="held back by a LoRA budget, a KV transfer or another passing constraint",
    ),
    Meaning(
        "swapped",
        "gauge",
        "requests",
        (Exposed("vllm:num_requests_swapped", None, "0.9.0", "V0; 0.8 and 0.9.0 only with hidden metrics shown"),),
        ("model_name",),
    ),
    Meaning(
        "preemptions",
        "counter",
        "preemptions",
        (Exposed("vllm:num_preemptions_total"),),
    ),
    Meaning(
        "prompt_tokens",
        "counter",
        "tokens",
        (Exposed("vllm:prompt_tokens_total"),),
        note="V0 counts prefills that a preemption repeats, V1 does not",
    ),
    Meaning("generation_tokens", "counter", "tokens", (Exposed("vllm:generation_tokens_total"),)),
    Meaning(
        "steps",
        "counter",
        "engine steps",
        (Exposed("vllm:iteration_tokens_total_count"),),
        note="the count of a histogram, in spite of its name",
    ),
    Meaning(
        "finished",
        "counter",
        "requests",
        (Exposed("vllm:request_success_total"),),
        ("engine", "model_name", "finished_reason"),
        note="clients that disconnect leave no trace here (seen from 0.10.2 to 0.32.0)",
    ),
    Meaning("request_prompt_tokens", "counter", "tokens", (Exposed("vllm:request_prompt_tokens_sum"),)),
    Meaning("request_generation_tokens", "counter", "tokens", (Exposed("vllm:request_generation_tokens_sum"),)),
    Meaning(
        "prompt_lengths",
        "histogram",
        "tokens",
        (Exposed("vllm:request_prompt_tokens_bucket"),),
        ("engine", "model_name", "le"),
    ),
    Meaning(
        "generation_lengths",
        "histogram",
        "tokens",
        (Exposed("vllm:request_generation_tokens_bucket"),),
        ("engine", "model_name", "le"),
    ),
    Meaning(
        "prefix_queries",
        "counter",
        "tokens; blocks up to 0.8.5",
        (
            Exposed("vllm:prefix_cache_queries_total", "0.9.2"),
            Exposed("vllm:gpu_prefix_cache_queries_total", "0.7.3", "0.11.2", "hidden in 0.11"),
        ),
        note="up to 0.10.2 every scheduling retry of a waiting request counts again",
    ),
    Meaning(
        "prefix_hits",
        "counter",
        "tokens; blocks up to 0.8.5",
        (
            Exposed("vllm:prefix_cache_hits_total", "0.9.2"),
            Exposed("vllm:gpu_prefix_cache_hits_total", "0.7.3", "0.11.2", "hidden in 0.11"),
        ),
    ),
    Meaning(
        "external_prefix_queries",
        "counter",
        "tokens",
        (Exposed("vllm:external_prefix_cache_queries_total", "0.11.1"),),
        note="counts only where a KV connector is in use; without one it stays 0",
    ),
    Meaning(
        "kv_expired",
        "counter",
        "requests",
        (
            Exposed("vllm:nixl_num_kv_expired_reqs_total", "0.16"),
            Exposed("vllm:mooncake_num_kv_expired_reqs_total", "0.33"),
        ),
        add=True,
    ),
    Meaning(
        "sleep_level",
        "gauge",
        "0 or 1 for each state",
        (Exposed("vllm:engine_sleep_state", "0.11.1"),),
        ("engine", "model_name", "sleep_state"),
        note="all states read 0 while scheduling is paused (sleep level 0) or the KV pool alone is released (0.31+)",
    ),
    Meaning(
        "pool",
        "info",
        "labels",
        (Exposed(CACHE_CONFIG),),
        ("engine",),
        note="the Rust front-end (0.22.1 to 0.33, experimental) has no such series",
    ),
    Meaning(
        "kv_connector",
        "gauge",
        "sign of a KV connector",
        (
            Exposed("vllm:num_requests_kv_fetch_by_stage", "0.32.0"),
            Exposed("vllm:nixl_xfer_time_seconds_count", "0.11.1"),
            Exposed("vllm:nixl_num_failed_transfers_total", "0.11.1"),
            Exposed("vllm:mooncake_num_failed_transfers_total", "0.33"),
            Exposed("vllm:kv_offload_cpu_cache_usage_perc", "0.24"),
            Exposed("vllm:kv_offload_total_bytes_total", "0.16"),
            Exposed("vllm:hisparse_host_cache_usage_perc", "0.32.0"),
            Exposed("vllm:simple_kv_offload_used_blocks", "0.33"),
        ),
        note="only that one of them is there matters, not its value",
    ),
    Meaning(
        "adapters",
        "info",
        "labels",
        (Exposed(LORA_REQUESTS, "0.6.6", note="V1 only with --enable-lora; V0 always, with max_lora 0 without it"),),
        ("max_lora", "running_lora_adapters"),
        per_rank=False,
        note="a series for each set of adapters that ever ran together, none ever taken away; its value, a unix time, "
        "is a sum with several API servers; V1 lists those that run and those that wait under both labels",
    ),
    Meaning(
        "process_start",
        "gauge",
        "seconds, unix time",
        (Exposed("process_start_time_seconds"),),
        (),
        per_rank=False,
        note="of the API server; not exposed with several API servers, thus with data parallelism from 0.16",
    ),
)

BY_FIELD: Mapping[str, Meaning] = {meaning.field: meaning for meaning in MEANINGS}

# Labels of cache_config_info: the series carries every attribute of vLLM's CacheConfig, as text, None as "None".
CONFIG_LABELS: Mapping[str, Exposed] = {
    "blocks": Exposed(
        "num_gpu_blocks",
        note='with the null block of V1; the sum over data-parallel ranks, on each rank; "None" in V1 up to 0.8.5',
    ),
    "block_size": Exposed("block_size", note="tokens; of a hybrid model only the smallest, and stale up to 0.22"),
    "tokens": Exposed("kv_cache_size_tokens", "0.24", note="of one rank, the null block included"),
    "max_concurrency": Exposed("kv_cache_max_concurrency", "0.24"),
    "configured_bytes": Exposed("kv_cache_memory_bytes", "0.10.2"),
    "gpu_memory_utilization": Exposed("gpu_memory_utilization"),
    "prefix_caching": Exposed("enable_prefix_caching", note='V0 writes "None" for off'),
    "cpu_blocks": Exposed("num_cpu_blocks", note='a number tells V0; V1 writes "None"'),
    "kv_offloading_size": Exposed("kv_offloading_size", "0.11.1", note="a number tells a KV connector"),
}


def _spellings(name: str, kind: str) -> Iterator[str]:
    """The name, and how Ray Serve spells it: sanitised, with or without Ray's prefix and a counter's suffix."""
    yield name
    if not name.startswith("vllm:"):
        return
    plain = "vllm_" + name.removeprefix("vllm:")
    yield from (plain, "ray_" + plain)
    if kind == "counter" and name.endswith("_total"):
        yield from (plain.removesuffix("_total"), "ray_" + plain.removesuffix("_total"))


# Every spelling of a sample's name on a page, to the name as in the rows above.
SAMPLE_NAMES: Mapping[str, str] = {
    spelling: name for meaning in MEANINGS for name in meaning.names for spelling in _spellings(name, meaning.kind)
}


def is_vllm(name: str) -> bool:
    """Whether a family or a sample is one of vLLM's own, also as Ray spells it."""
    return name.startswith(("vllm:", "vllm_", "ray_vllm_"))
