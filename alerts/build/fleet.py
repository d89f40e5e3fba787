"""Recording rules for fleets: few series for each node and engine, for dashboards and for Thanos or Mimir."""

from __future__ import annotations

from collections.abc import Iterator

from alerts.build.model import Group, Recording, RuleFile
from oomwatch.families import FAMILIES

INTERVAL = "30s"

LABELS = {family.name: family.labels for family in FAMILIES}


def fleet_rules() -> RuleFile:
    return RuleFile(
        "oomwatch-fleet.yml",
        "What a fleet is watched by: one series for each node or engine instead of one for each rank, GPU and verdict. "
        "Keep these and drop the rest where storage is dear. level:metric:operations, aggregated by without, so that "
        "the labels of your targets stay; cluster is an external label of each Prometheus, or one of its targets.",
        (
            Group("oomwatch-fleet-verdicts", INTERVAL, tuple(_verdicts())),
            Group("oomwatch-fleet-engines", INTERVAL, tuple(_engines())),
            Group("oomwatch-fleet-devices", INTERVAL, tuple(_devices())),
            Group("oomwatch-fleet-vllm", INTERVAL, tuple(_vllm())),
        ),
    )


def _without(family: str, *kept: str) -> str:
    """The labels of a family to aggregate away, all but ``kept``."""
    return ", ".join(label for label in LABELS[family] if label not in kept)


def _aggregated(how: str, level: str, family: str, operation: str, comment: str, *kept: str) -> Recording:
    gone = _without(family, *kept)
    return Recording(f"{level}:{family}:{operation}", f"{how} without ({gone}) ({family})", comment)


def _verdicts() -> Iterator[Recording]:
    state = "oomwatch_verdict_state"
    loud = f"({state} unless ignoring (reason) oomwatch_verdict_silenced)"
    yield Recording(
        f"engine_killer:{state}:max",
        f"max without ({_without(state, 'killer', 'engine')}) {loud}",
        "The worst verdict about each engine by killer, planned silences left out: 0 clear, 1 info, 2 ticket, 3 page.",
    )
    yield Recording(
        f"instance_killer:{state}:max",
        f"max without (engine) (engine_killer:{state}:max)",
        "The same for each node.",
    )
    yield Recording(
        f"cluster_killer:{state}:max",
        f"max by (cluster, killer) (instance_killer:{state}:max)",
        "The same for each cluster.",
    )
    yield Recording(
        "cluster_killer:oomwatch_incidents:sum",
        "sum by (cluster, killer) (oomwatch_incidents)",
        "Open incidents of a cluster, by the killer of their cause.",
    )
    yield Recording(
        "instance_verdict:oomwatch_verdict_unknown:count",
        f"count without ({_without('oomwatch_verdict_unknown', 'verdict')}) (oomwatch_verdict_unknown)",
        "For how many ranks, devices or processes of a node a verdict cannot be concluded.",
    )


def _engines() -> Iterator[Recording]:
    used, blocks = "oomwatch_engine_kv_cache_used_blocks", "oomwatch_engine_kv_cache_capacity_blocks"
    yield _aggregated("sum", "engine", used, "sum", "KV blocks in use, over the ranks of an engine.", "engine")
    yield _aggregated("sum", "engine", blocks, "sum", "KV blocks that there are.", "engine")
    yield Recording(
        "engine:oomwatch_engine_kv_cache_usage:ratio",
        f"engine:{used}:sum / (engine:{blocks}:sum > 0)",
        "The share of the pool in use: sums of both, as the mean of the ranks' shares would hide a full one.",
    )
    usage = "oomwatch_engine_kv_cache_usage_ratio"
    yield _aggregated("max", "engine", usage, "max", "The fullest rank.", "engine")
    for family, words in (
        ("oomwatch_engine_running_requests", "Requests that run."),
        ("oomwatch_engine_waiting_requests", "Requests that wait."),
    ):
        yield _aggregated("sum", "engine", family, "sum", words, "engine")
    for family, words in (
        ("oomwatch_engine_generation_tokens_total", "Tokens generated a second."),
        ("oomwatch_engine_preemptions_total", "Preemptions a second."),
        ("oomwatch_engine_finished_requests_total", "Requests finished a second, whatever the reason."),
    ):
        base = family.removesuffix("_total")
        yield Recording(
            f"engine:{base}:rate5m", f"sum without ({_without(family, 'engine')}) (rate({family}[5m]))", words
        )
    yield Recording(
        "engine:oomwatch_engine_preemptions_per_finished:ratio_rate5m",
        "engine:oomwatch_engine_preemptions:rate5m / (engine:oomwatch_engine_finished_requests:rate5m > 0)",
        "Preemptions for each finished request; no sample while nothing finishes.",
    )
    floor = "oomwatch_engine_kv_floor_ratio"
    yield _aggregated(
        "max", "engine", floor, "max", "The largest share of a rank's pool that no request can own.", "engine"
    )


def _devices() -> Iterator[Recording]:
    for family, words in (
        ("oomwatch_gpu_memory_free_bytes", "The least free memory of any GPU of a node."),
        ("oomwatch_device_free_floor_bytes", "The headroom floor of a node: the least of its devices' floors."),
    ):
        yield _aggregated("min", "instance", family, "min", words)
    yield _aggregated(
        "sum", "instance", "oomwatch_gpu_memory_unowned_bytes", "sum", "Memory that no listed process accounts for."
    )
    for family, words in (
        ("oomwatch_gpu_memory_total_bytes", "Device memory of a node."),
        ("oomwatch_gpu_memory_used_bytes", "Device memory in use on a node."),
    ):
        yield _aggregated("sum", "instance", family, "sum", words)
    yield Recording(
        "instance:oomwatch_gpu:count",
        f"count without ({_without('oomwatch_gpu_memory_total_bytes')}) (oomwatch_gpu_memory_total_bytes)",
        "GPUs of a node whose memory can be read.",
    )


def _vllm() -> Iterator[Recording]:
    yield Recording(
        "rank:vllm_kv_cache_usage:ratio",
        """
        label_replace(
        label_replace(
          vllm:kv_cache_usage_perc or vllm:gpu_cache_usage_perc,
        "rank", "$1", "engine", "(.+)"),
        "engine", "", "engine", ".*")
        """,
        "vLLM's own KV usage, with its label engine (the data-parallel rank) named rank as oomwatch names it, so that "
        "both can be shown side by side. Before 0.9 the metric had another name, and engines of V0 have no rank.",
    )
