"""A rank's numbers as the series of a vLLM page, names and labels as the release in question exposes them.

Only the series that this package reads; a test holds them against pages captured from those releases.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from oomwatch.demo.queueing import BLOCK_TOKENS, Lengths, Rank

# Labels of cache_config_info beside those that tell something here.
_CONFIG_0_11_2 = {
    "calculate_kv_scales": "False",
    "cpu_kvcache_space_bytes": "None",
    "cpu_offload_gb": "0.0",
    "kv_offloading_backend": "None",
    "mamba_page_size_padded": "None",
    "swap_space": "4.0",
}
_CONFIG_0_32_0 = {
    "_block_size_resolved": "True",
    "cache_hit_alignment_tokens": "None",
    "effective_attention_block_size": str(BLOCK_TOKENS),
    "enable_mamba_shared_prefix_checkpoint": "False",
    "hash_block_size": "None",
    "kv_cache_dtype_skip_layers": "[]",
    "kv_cache_layout": "None",
    "kv_offloading_backend": "native",
    "mamba_cache_mode": "none",
    "mamba_page_size_padded": "None",
    "prefix_cache_retention_interval": "0",
    "prefix_match_unit": "None",
    "replayssm_buffer_len": "16",
    "skip_page_size_padded": "None",
    "swa_bounded_replay": "True",
    "use_kda_recoverssm": "False",
    "use_replayssm": "False",
    "user_specified_block_size": "False",
}
_CONFIG_EVERYWHERE = {
    "block_size": str(BLOCK_TOKENS),
    "cache_dtype": "auto",
    "enable_prefix_caching": "True",
    "is_attention_free": "False",
    "kv_cache_memory_bytes": "None",
    "kv_offloading_size": "None",
    "kv_sharing_fast_prefill": "False",
    "mamba_block_size": "None",
    "mamba_cache_dtype": "auto",
    "mamba_ssm_cache_dtype": "auto",
    "num_cpu_blocks": "None",
    "num_gpu_blocks_override": "None",
    "prefix_caching_hash_algo": "sha256",
    "sliding_window": "None",
}
SLEEP_STATES = ("awake", "weights_offloaded", "discard_all")


@dataclass(frozen=True)
class Release:
    """What differs between the releases of vLLM that the demo runs."""

    version: str
    config: dict[str, str]
    finished_reasons: tuple[str, ...]
    waiting_by_reason: bool
    pool_in_tokens: bool  # kv_cache_size_tokens and kv_cache_max_concurrency


RELEASES = {
    release.version: release
    for release in (
        Release("0.11.2", _CONFIG_0_11_2, ("stop", "length", "abort"), waiting_by_reason=False, pool_in_tokens=False),
        Release(
            "0.32.0",
            _CONFIG_0_32_0,
            ("stop", "length", "abort", "error", "repetition"),
            waiting_by_reason=True,
            pool_in_tokens=True,
        ),
    )
}


class RankSeries:
    """Renders one rank. ``ranks`` is how many the server has: from two on its gauges wait for the first request."""

    def __init__(
        self,
        release: Release,
        model_name: str,
        label: str,
        *,
        ranks: int,
        utilization: float,
        max_model_len: int,
        blocks: int,
    ) -> None:
        self._release = release
        self._several = ranks > 1
        self._labels = {"engine": label, "model_name": model_name}
        self._config = self._key(
            "vllm:cache_config_info", **self._config_labels(ranks, utilization, max_model_len, blocks)
        )

    def samples(self, rank: Rank, sleep_state: str) -> dict[str, float]:
        """``name{label="value",…}`` to value, as on the page."""
        return dict(self._samples(rank, sleep_state))

    def _samples(self, rank: Rank, sleep_state: str) -> Iterator[tuple[str, float]]:
        if rank.stepped or not self._several:
            yield from self._gauges(rank)
        for state in SLEEP_STATES:
            yield self._key("vllm:engine_sleep_state", **self._labels, sleep_state=state), float(state == sleep_state)
        yield self._config, 1.0
        counters = {
            "vllm:num_preemptions_total": rank.preemptions,
            "vllm:prompt_tokens_total": rank.prompt_tokens,
            "vllm:generation_tokens_total": rank.generation_tokens,
            "vllm:iteration_tokens_total_count": rank.steps,
            "vllm:prefix_cache_queries_total": rank.prefix_queries,
            "vllm:prefix_cache_hits_total": rank.prefix_hits,
            "vllm:external_prefix_cache_queries_total": 0,
        }
        for name, value in counters.items():
            yield self._key(name, **self._labels), float(value)
        for reason in self._release.finished_reasons:
            key = self._key("vllm:request_success_total", **self._labels, finished_reason=reason)
            yield key, float(rank.finished.get(reason, 0))
        yield from self._histogram("vllm:request_prompt_tokens", rank.prompt_lengths)
        yield from self._histogram("vllm:request_generation_tokens", rank.generation_lengths)

    def _gauges(self, rank: Rank) -> Iterator[tuple[str, float]]:
        yield self._key("vllm:kv_cache_usage_perc", **self._labels), rank.used / rank.blocks
        yield self._key("vllm:num_requests_running", **self._labels), float(len(rank.running))
        waiting = float(len(rank.waiting))
        yield self._key("vllm:num_requests_waiting", **self._labels), waiting
        if self._release.waiting_by_reason:
            for reason, value in (("capacity", waiting), ("deferred", 0.0)):
                yield self._key("vllm:num_requests_waiting_by_reason", **self._labels, reason=reason), value

    def _histogram(self, name: str, lengths: Lengths) -> Iterator[tuple[str, float]]:
        bounds = (*(f"{bound:.1f}" for bound in lengths.bounds), "+Inf")
        for bound, count in zip(bounds, lengths.cumulative(), strict=True):
            yield self._key(f"{name}_bucket", **self._labels, le=bound), float(count)
        yield self._key(f"{name}_sum", **self._labels), float(lengths.total)

    def _config_labels(self, ranks: int, utilization: float, max_model_len: int, blocks: int) -> dict[str, str]:
        # The null block counts here; with data parallelism vLLM shows the sum over the ranks on each of them.
        with_null = blocks + 1
        labels = {
            **_CONFIG_EVERYWHERE,
            **self._release.config,
            "engine": self._labels["engine"],
            "gpu_memory_utilization": str(utilization),
            "num_gpu_blocks": str(with_null * ranks),
        }
        if self._release.pool_in_tokens:
            tokens = with_null * BLOCK_TOKENS
            labels["kv_cache_size_tokens"] = str(tokens)
            labels["kv_cache_max_concurrency"] = str(tokens / max_model_len)
        return labels

    @staticmethod
    def _key(name: str, **labels: str) -> str:
        inside = ",".join(f'{label}="{labels[label]}"' for label in sorted(labels))
        return f"{name}{{{inside}}}"
