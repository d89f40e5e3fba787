"""What a page means: one reading for each rank, in units that do not depend on the version of vLLM.

Pure: the same page, version and facts give the same readings, live and from a recording.

The KV pool's arithmetic, by version (vllm/v1/core/block_pool.py; measured on 0.8.5, 0.9.2, 0.10.2 and 0.32.0):

- V0 has no null block: usage = used / blocks.
- V1 takes block 0 away at start (the null block). Up to 0.10.1 it counts as used: usage = (used + 1) / blocks, so an
  idle pool of n blocks reads 1/n. From 0.10.2 it is left out: usage = used / (blocks - 1).

A reading's ``usage`` is used / usable blocks in every version, 0 at idle; where the pool's size is not known, it is
what vLLM shows.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TypeVar

from oomwatch.observations import (
    AMBIGUOUS,
    IMPLAUSIBLE,
    NOT_EXPOSED,
    NOT_KNOWN,
    Absent,
    Adapters,
    EngineFacts,
    Histogram,
    Maybe,
    Pool,
    RankReading,
    known,
)
from oomwatch.sources.vllm.names import BY_FIELD, CACHE_CONFIG, CONFIG_LABELS, LORA_REQUESTS, Meaning
from oomwatch.sources.vllm.pages import COUNTED_ADAPTERS, Page, Sample

Version = tuple[int, int, int]
Key = TypeVar("Key")

_VERSION = re.compile(r"v?(\d+)\.(\d+)(?:\.(\d+))?(?:\.?(dev|a|b|rc)\d*)?", re.ASCII)
_NULL_BLOCK_LEFT_OUT: Version = (0, 10, 2)
_MOST_SHOWN = 3  # series in a message
# Families that vLLM's HTTP layer puts on every page, statistics or not (prometheus-fastapi-instrumentator).
_HTTP_FAMILIES = frozenset({"http_request_duration_highr_seconds", "http_request_size_bytes", "http_requests_total"})


@dataclass(frozen=True)
class PageReading:
    """What one page says.

    ``state`` is ok, no_traffic_yet, stats_disabled or not_vllm; ``error`` explains the last two, and of the first two
    says which series are no number.
    """

    state: str
    error: str = ""
    ranks: tuple[RankReading, ...] = ()
    model_name: Maybe[str] = NOT_EXPOSED
    process_start: Maybe[float] = NOT_EXPOSED
    kv_connector: Maybe[bool] = NOT_KNOWN
    adapters: Maybe[Adapters] = NOT_EXPOSED


class Accounting(Enum):
    """How the usage gauge counts blocks."""

    V0 = "no null block"
    NULL_BLOCK_USED = "the null block is one of the used"
    NULL_BLOCK_LEFT_OUT = "the null block is left out"

    def usable(self, blocks: int) -> int:
        return blocks if self is Accounting.V0 else blocks - 1

    def used(self, usage: float, usable: int) -> float:
        if self is Accounting.NULL_BLOCK_USED:
            return max(0.0, usage * (usable + 1) - 1)
        return usage * usable


def release(version: str | None) -> Version | None:
    """The release as numbers, of ``0.10.2.post1`` or ``0.32.0+cpu``; None where it does not tell.

    Builds from source may carry a made-up ``0.1.dev…``; a pre-release may hold the next release's changes or not.
    """
    match = _VERSION.match(version or "")
    if match is None or match[4]:
        return None
    numbers = (int(match[1]), int(match[2]), int(match[3] or 0))
    return numbers if numbers >= (0, 4, 0) else None


def read_page(page: Page, version: str | None = None, facts: EngineFacts | None = None) -> PageReading:
    """Read a page. ``version`` is what /version answered, ``facts`` what configuration and discovery know.

    A page without vLLM's families is vLLM's own with its statistics off where ``version`` is known or vLLM's HTTP
    families are there; otherwise something else answers at that address.
    """
    process_start = _process_start(page)
    if not page.of_vllm:
        if version is not None or page.names & _HTTP_FAMILIES:
            error = "vLLM answers, but shows no vllm: series: restart it without --disable-log-stats"
            return PageReading("stats_disabled", error, process_start=process_start)
        error = "a page of metrics, but not vLLM's: no vllm: series and no trace of its HTTP server; check the port"
        return PageReading("not_vllm", error, process_start=process_start)
    groups = _by_rank((*page.samples, *page.not_finite))
    accounting = _accountings(page, release(version) or release(facts.vllm_version if facts else None))
    configs = {rank: _CacheConfig(samples.get(CACHE_CONFIG, ())) for rank, samples in groups.items()}
    names = _rank_names(groups)
    ranks = tuple(
        _rank_reading(names[rank], samples, _blocks_of(rank, configs), configs[rank], accounting, facts)
        for rank, samples in groups.items()
    )
    has_gauges = any(value != NOT_EXPOSED for rank in ranks for value in (rank.usage, rank.running, rank.waiting))
    return PageReading(
        "ok" if has_gauges else "no_traffic_yet",
        _not_finite(page),
        ranks=tuple(sorted(ranks, key=_rank_order)),
        model_name=_model_name(page.samples),
        process_start=process_start,
        kv_connector=_kv_connector(page, configs.values(), ranks, facts),
        adapters=_adapters(page),
    )


def _not_finite(page: Page) -> str:
    """Which series are no number, in a sentence; empty if none is."""
    odd = page.not_finite
    shown = ", ".join(f"{sample.series[:120]} is {sample.value:g}" for sample in odd[:_MOST_SHOWN])
    more = f", and {len(odd) - _MOST_SHOWN} more" if len(odd) > _MOST_SHOWN else ""
    return f"not finite: {shown}{more}" if odd else ""


# --- samples to ranks --------------------------------------------------------------------------------------------

_RankKey = tuple[str, str]  # Ray Serve's replica, "" elsewhere; vLLM's engine label
_RankSamples = Mapping[str, Sequence[Sample]]


def _by_rank(samples: Iterable[Sample]) -> dict[_RankKey, _RankSamples]:
    groups: dict[_RankKey, dict[str, list[Sample]]] = {}
    for sample in samples:
        if sample.name not in _PER_RANK_NAMES:
            continue
        rank = (sample.labels.get("ReplicaId", ""), sample.labels.get("engine") or "0")
        groups.setdefault(rank, defaultdict(list))[sample.name].append(sample)
    return {rank: dict(group) for rank, group in groups.items()}


_PER_RANK_NAMES = frozenset(name for meaning in BY_FIELD.values() if meaning.per_rank for name in meaning.names)


def _rank_names(groups: Iterable[_RankKey]) -> dict[_RankKey, str]:
    """vLLM's engine label, with the replica before it where one page shows several replicas."""
    keys = list(groups)
    several = len({replica for replica, _ in keys}) > 1
    return {key: f"{key[0]}/{key[1]}" if several else key[1] for key in keys}


def _rank_order(reading: RankReading) -> tuple[int, int, str]:
    return (0, int(reading.rank), "") if reading.rank.isascii() and reading.rank.isdigit() else (1, 0, reading.rank)


def _rank_reading(
    name: str,
    samples: _RankSamples,
    blocks: Maybe[int],
    config: _CacheConfig,
    accounting: tuple[Accounting, ...],
    facts: EngineFacts | None,
) -> RankReading:
    def value(field: str) -> Maybe[float]:
        return _value(samples, BY_FIELD[field])

    usage, pool = _usage_and_pool(_ratio(value("usage")), blocks, config, accounting, facts)
    return RankReading(
        rank=name,
        usage=usage,
        running=value("running"),
        waiting=value("waiting"),
        waiting_capacity=value("waiting_capacity"),
        waiting_deferred=value("waiting_deferred"),
        swapped=value("swapped"),
        preemptions=value("preemptions"),
        prompt_tokens=value("prompt_tokens"),
        generation_tokens=value("generation_tokens"),
        steps=value("steps"),
        finished=_by_label(samples, BY_FIELD["finished"], "finished_reason"),
        request_prompt_tokens=value("request_prompt_tokens"),
        request_generation_tokens=value("request_generation_tokens"),
        prompt_lengths=_histogram(samples, BY_FIELD["prompt_lengths"]),
        generation_lengths=_histogram(samples, BY_FIELD["generation_lengths"]),
        prefix_queries=value("prefix_queries"),
        prefix_hits=value("prefix_hits"),
        external_prefix_queries=value("external_prefix_queries"),
        kv_expired=value("kv_expired"),
        sleep_level=_sleep_level(samples),
        gpu_memory_utilization=config.number("gpu_memory_utilization"),
        prefix_caching=config.boolean("prefix_caching"),
        pool=pool,
    )


def _value(samples: _RankSamples, meaning: Meaning) -> Maybe[float]:
    found = [_one_value(of_name) for name in meaning.names if (of_name := _selected(samples.get(name, ()), meaning))]
    if not found:
        return NOT_EXPOSED
    if not meaning.add:
        return found[0]
    counts = _all_certain(dict(enumerate(found)))
    return counts if isinstance(counts, Absent) else math.fsum(counts.values())


def _selected(samples: Sequence[Sample], meaning: Meaning) -> Sequence[Sample]:
    if meaning.select is None:
        return samples
    label, wanted = meaning.select
    return [sample for sample in samples if sample.labels.get(label) == wanted]


def _one_value(samples: Sequence[Sample]) -> Maybe[float]:
    """The value that the series agree on; the highest where each API server process has its own (``pid``).

    vLLM 0.9.2 to 0.11.0 gave the usage gauge a pid label with several API servers: those that did not see the last
    step read 0.
    """
    if not all(math.isfinite(sample.value) for sample in samples):
        return IMPLAUSIBLE
    if any("pid" in sample.labels for sample in samples):
        return max(sample.value for sample in samples)
    values = {sample.value for sample in samples}
    return values.pop() if len(values) == 1 else AMBIGUOUS


def _by_label(samples: _RankSamples, meaning: Meaning, label: str) -> Maybe[Mapping[str, float]]:
    for name in meaning.names:
        found = samples.get(name)
        if found:
            values: dict[str, list[Sample]] = defaultdict(list)
            for sample in found:
                values[sample.labels.get(label, "")].append(sample)
            return _all_certain({key: _one_value(of_key) for key, of_key in values.items()})
    return NOT_EXPOSED


def _all_certain(values: Mapping[Key, Maybe[float]]) -> Maybe[Mapping[Key, float]]:
    """All of the values, or why one of them is missing."""
    certain: dict[Key, float] = {}
    for key, value in values.items():
        if isinstance(value, Absent):
            return value
        certain[key] = value
    return certain


def _histogram(samples: _RankSamples, meaning: Meaning) -> Maybe[Histogram]:
    buckets = _by_label(samples, meaning, "le")
    if isinstance(buckets, Absent):
        return buckets
    try:
        histogram = tuple(sorted((float(bound), count) for bound, count in buckets.items()))
    except ValueError:
        return IMPLAUSIBLE
    return histogram if histogram[-1][0] == math.inf else IMPLAUSIBLE


def _sleep_level(samples: _RankSamples) -> Maybe[str]:
    """The state that reads 1; ``paused`` where vLLM names none and is not awake.

    That is level 0 (scheduling pauses, memory stays) and a KV pool that was released on its own (0.31+).
    """
    states = _by_label(samples, BY_FIELD["sleep_level"], "sleep_state")
    if isinstance(states, Absent):
        return states
    current = [state for state, value in states.items() if value == 1]
    if not current and states.get("awake") == 0:
        return "paused"
    return current[0] if len(current) == 1 else AMBIGUOUS


def _ratio(value: Maybe[float]) -> Maybe[float]:
    """Within 0-1; vLLM subtracts floating-point numbers, so that a hair outside is rounding and not an error."""
    if isinstance(value, Absent):
        return value
    return min(1.0, max(0.0, value)) if -1e-6 <= value <= 1 + 1e-6 else IMPLAUSIBLE


# --- the pool ----------------------------------------------------------------------------------------------------


class _CacheConfig:
    """The labels of cache_config_info of one rank.

    After a restart over an old PROMETHEUS_MULTIPROC_DIR the former label sets stay beside the present ones: those
    that know the number of blocks are preferred, and labels that then contradict each other are ambiguous.
    """

    def __init__(self, series: Sequence[Sample]) -> None:
        blocks = CONFIG_LABELS["blocks"].name
        shown = [sample.labels for sample in series if math.isfinite(sample.value)]
        self._label_sets = [labels for labels in shown if labels.get(blocks, "").isdecimal()] or shown

    def _text(self, key: str) -> Maybe[str]:
        label = CONFIG_LABELS[key].name
        values = {labels[label] for labels in self._label_sets if label in labels}
        if not values:
            return NOT_EXPOSED
        values.discard("None")
        if not values:
            return NOT_KNOWN
        return values.pop() if len(values) == 1 else AMBIGUOUS

    def number(self, key: str) -> Maybe[float]:
        text = self._text(key)
        if isinstance(text, Absent):
            return text
        try:
            value = float(text)
        except ValueError:
            return NOT_KNOWN
        return value if math.isfinite(value) and value >= 0 else NOT_KNOWN

    def whole(self, key: str) -> Maybe[int]:
        value = self.number(key)
        return value if isinstance(value, Absent) else int(value)

    def boolean(self, key: str) -> Maybe[bool]:
        text = self._text(key)
        return text if isinstance(text, Absent) else {"True": True, "False": False}.get(text, NOT_KNOWN)

    @property
    def exposed(self) -> bool:
        return bool(self._label_sets)


def _blocks_of(rank: _RankKey, configs: Mapping[_RankKey, _CacheConfig]) -> Maybe[int]:
    """The blocks of one rank, the null block included.

    With data parallelism vLLM sums num_gpu_blocks over the ranks that the API server serves and shows the sum on each
    of them. No other label tells a rank's own: kv_cache_size_tokens (0.24+) is the first rank's that answered, on all
    of them, and context parallelism multiplies it (vllm/v1/engine/core_client.py, _apply_ready_response).
    """
    peers = {key: config for key, config in configs.items() if key[0] == rank[0] and config.exposed}
    if rank not in peers:
        return NOT_EXPOSED
    shown = peers[rank].whole("blocks")
    if isinstance(shown, Absent) or shown == 0:
        return shown if isinstance(shown, Absent) else NOT_KNOWN
    if len(peers) == 1 or any(known(config.whole("blocks")) != shown for config in peers.values()):
        return shown
    return shown // len(peers) if shown % len(peers) == 0 else AMBIGUOUS


def _accountings(page: Page, version: Version | None) -> tuple[Accounting, ...]:
    """How this page's usage gauge counts; several where neither the version nor the page tells them apart."""
    names = {sample.name for sample in page.samples}
    config_labels: set[str] = set()
    for sample in page.samples:
        if sample.name == CACHE_CONFIG:
            config_labels.update(sample.labels)
    v1 = (
        any("engine" in sample.labels for sample in page.samples)  # 0.8.5+
        or not names.isdisjoint(BY_FIELD["prefix_queries"].names)  # 0.7.3+
        or (version is not None and version >= (0, 11, 0))
    )
    if not v1:
        v0 = _cpu_blocks_numbered(page) or (version is not None and version < (0, 8, 0))
        return (Accounting.V0,) if v0 else tuple(Accounting)
    if version is not None:
        return (Accounting.NULL_BLOCK_USED if version < _NULL_BLOCK_LEFT_OUT else Accounting.NULL_BLOCK_LEFT_OUT,)
    new_name, old_name = BY_FIELD["usage"].names
    if CONFIG_LABELS["configured_bytes"].name in config_labels or (new_name in names and old_name not in names):
        return (Accounting.NULL_BLOCK_LEFT_OUT,)
    if old_name in names and new_name not in names:
        return (Accounting.NULL_BLOCK_USED,)
    return (Accounting.NULL_BLOCK_LEFT_OUT, Accounting.NULL_BLOCK_USED)


def _cpu_blocks_numbered(page: Page) -> bool:
    label = CONFIG_LABELS["cpu_blocks"].name
    return any(s.labels.get(label, "").isdecimal() for s in page.samples if s.name == CACHE_CONFIG)


def _usage_and_pool(
    shown: Maybe[float],
    blocks: Maybe[int],
    config: _CacheConfig,
    accounting: tuple[Accounting, ...],
    facts: EngineFacts | None,
) -> tuple[Maybe[float], Pool]:
    usable = _usable(blocks, accounting, facts)
    usage, used = _usage_and_used(shown, usable, accounting)
    tokens = config.whole("tokens")
    block_size = config.whole("block_size")
    if isinstance(tokens, Absent):
        tokens = _tokens_by_blocks(usable, block_size, accounting)
    return usage, Pool(
        blocks=usable,
        used=used,
        block_size=_or_not_known(block_size),
        tokens=tokens,
        max_concurrency=_max_concurrency(config, tokens, facts),
        configured_bytes=_or_not_known(config.whole("configured_bytes")),
    )


def _usable(blocks: Maybe[int], accounting: tuple[Accounting, ...], facts: EngineFacts | None) -> Maybe[int]:
    """Usable blocks: as the operator states, else the page's without the null block."""
    if facts is not None and facts.kv_pool_blocks is not None:
        return facts.kv_pool_blocks
    if isinstance(blocks, Absent):
        return AMBIGUOUS if blocks == AMBIGUOUS else NOT_KNOWN
    candidates = {way.usable(blocks) for way in accounting}
    if len(candidates) > 1:
        return AMBIGUOUS
    usable = candidates.pop()
    return usable if usable > 0 else NOT_KNOWN


def _usage_and_used(
    shown: Maybe[float], usable: Maybe[int], accounting: tuple[Accounting, ...]
) -> tuple[Maybe[float], Maybe[int]]:
    if isinstance(shown, Absent):
        return shown, NOT_KNOWN
    if isinstance(usable, Absent):
        return shown, usable
    if len(accounting) == 1:
        used = round(accounting[0].used(shown, usable))
        return (used / usable if accounting[0] is Accounting.NULL_BLOCK_USED else shown), used
    fitting = {round(count) for way in accounting if _is_whole(count := way.used(shown, usable), usable)}
    if len(fitting) != 1:
        return shown, AMBIGUOUS
    used = fitting.pop()
    return used / usable, used


def _is_whole(count: float, usable: int) -> bool:
    """Whether a count is a whole number of blocks: the other way to count is at least 1/usable off it."""
    return abs(count - round(count)) < 0.25 / usable


def _tokens_by_blocks(usable: Maybe[int], block_size: Maybe[int], accounting: tuple[Accounting, ...]) -> Maybe[int]:
    """Blocks x block size, for V0 alone.

    V1 shares one pool between layers of several kinds, and no label tells whether a model has them: sliding_window
    reads "None" for models that mix windowed and full attention (vllm/engine/arg_utils.py).
    """
    if accounting != (Accounting.V0,) or isinstance(usable, Absent) or isinstance(block_size, Absent):
        return NOT_KNOWN
    return usable * block_size


def _max_concurrency(config: _CacheConfig, tokens: Maybe[int], facts: EngineFacts | None) -> Maybe[float]:
    shown = config.number("max_concurrency")
    if not isinstance(shown, Absent):
        return shown
    if isinstance(tokens, Absent) or facts is None or not facts.max_model_len:
        return NOT_KNOWN
    return tokens / facts.max_model_len


def _or_not_known(value: Maybe[int]) -> Maybe[int]:
    return NOT_KNOWN if value == NOT_EXPOSED else value


# --- the whole server --------------------------------------------------------------------------------------------


def _process_start(page: Page) -> Maybe[float]:
    name = BY_FIELD["process_start"].names[0]
    starts = [sample for sample in (*page.samples, *page.not_finite) if sample.name == name]
    return _one_value(starts) if starts else NOT_EXPOSED


def _model_name(samples: Iterable[Sample]) -> Maybe[str]:
    """The served model: the gauges' label where they agree, since counters of a former model may outlive it."""
    gauges = {name for field in ("usage", "running", "waiting") for name in BY_FIELD[field].names}
    everywhere: set[str] = set()
    on_gauges: set[str] = set()
    for sample in samples:
        if name := sample.labels.get("model_name"):
            everywhere.add(name)
            if sample.name in gauges:
                on_gauges.add(name)
    names = on_gauges or everywhere
    if not names:
        return NOT_EXPOSED
    return names.pop() if len(names) == 1 else AMBIGUOUS


def _kv_connector(
    page: Page, configs: Iterable[_CacheConfig], ranks: Iterable[RankReading], facts: EngineFacts | None
) -> Maybe[bool]:
    """Whether a KV connector holds blocks of finished requests: it shows on the page, or we were told, or it does not.

    That it shows goes before what we were told: discovery says "none" where it sees no flag for one, which is no proof.

    The scheduler records an external query for each request that it admits when it has a connector, and none when it
    has not (vllm/v1/core/sched/scheduler.py, 0.11.1+): prompts without external queries tell that there is none.
    """
    if any(sample.name in BY_FIELD["kv_connector"].names for sample in page.samples):
        return True
    if any((known(config.number("kv_offloading_size")) or 0) > 0 for config in configs):
        return True
    asked = _sum(rank.external_prefix_queries for rank in ranks)
    if asked:
        return True
    if facts is not None and facts.kv_connector is not None:
        return facts.kv_connector
    if asked is None:
        return NOT_KNOWN
    return False if (_sum(rank.prompt_tokens for rank in ranks) or 0) > 0 else NOT_KNOWN


def _adapters(page: Page) -> Maybe[Adapters]:
    for sample in page.samples:
        if sample.name == LORA_REQUESTS:
            slots = sample.labels.get("max_lora")
            return NOT_KNOWN if slots is None else Adapters(int(sample.labels[COUNTED_ADAPTERS]), int(slots))
    return NOT_EXPOSED


def _sum(values: Iterable[Maybe[float]]) -> float | None:
    present = [value for value in values if not isinstance(value, Absent)]
    return math.fsum(present) if present else None
