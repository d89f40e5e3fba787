"""A run as the daemon sees it: observations in order of time, lines of a recording, or pages of /metrics.

Times become unix times from EPOCH on. A scrape and a poll of each device come every 15 s, the process lists every
minute, the host's processes every 30 s, as the daemon's defaults have it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import IO, Any, TypeVar

import numpy as np

from benchmarks.detection.spec import (
    ASLEEP,
    DEFERRED,
    DOWN,
    FINISHED_LENGTH,
    FINISHED_STOP,
    GENERATION_TOKENS,
    KV_EXPIRED,
    LENGTH_BOUNDS,
    PREEMPTIONS,
    PREFIX_HITS,
    PREFIX_QUERIES,
    PROMPT_TOKENS,
    REQUEST_GENERATION,
    REQUEST_PROMPT,
    RUNNING,
    STATE,
    STEPS,
    USED,
    WAITING,
)
from benchmarks.detection.world import Run
from oomwatch.observations import (
    NOT_EXPOSED,
    NOT_KNOWN,
    NOT_READ,
    EngineFacts,
    EngineScrape,
    EngineUpdate,
    GpuPoll,
    GpuProcess,
    HostMemory,
    HostProcess,
    Memory,
    Observation,
    Pool,
    ProcessGone,
    RankReading,
    Tick,
)
from oomwatch.recording import Header, Writer
from oomwatch.sources.host import role_of

EPOCH = 1_790_000_000.0
ENGINE = "engine"
MODEL = "model"
API_PID, CORE_PID, ORPHAN_PID, NEIGHBOUR_PID = 4000, 4100, 9100, 9200
PIDS_PER_LIFE = 50  # a restarted engine's processes have new pids
HOST_TOTAL = 1024 * 1024**3
_EVERY_PROCESS_LIST = 4
_EVERY_HOST = 2

T = TypeVar("T")


class Prototype:
    """Copies of a frozen dataclass's instance with some fields changed, in a third of the constructor's time.

    A run has some hundred thousand observations of up to thirty fields each; dataclasses.replace and frozen
    constructors, which set field by field, would cost more than the simulation.
    """

    def __init__(self, instance: object) -> None:
        self._values = dict(vars(instance))

    def having(self, kind: type[T], **changes: Any) -> T:
        made = object.__new__(kind)
        made.__dict__.update(self._values)
        made.__dict__.update(changes)
        return made


def facts(run: Run) -> EngineFacts:
    """What an operator's configuration and discovery know at the start; of a connector only what no page tells."""
    scenario = run.scenario
    return EngineFacts(
        name=ENGINE,
        target="http://127.0.0.1:8000/metrics",
        pids=_pids(run, 0),
        gpus=tuple(uuid(i) for i in range(len(run.ranks))),
        gpu_memory_utilization=scenario.gpu.utilization,
        max_model_len=scenario.traffic.longest,
        vllm_version=scenario.version,
        kv_connector=True if scenario.connector and _version(run) < (0, 11, 1) else None,
    )


def uuid(rank: int) -> str:
    return f"GPU-{rank:08x}-0000-0000-0000-000000000000"


def observations(
    run: Run,
    *,
    lengths: bool = True,
    samples: bool = False,
    ticks: int = 1,
    devices: bool = True,
    host: bool = True,
) -> Iterator[Observation]:
    """A run's observations. ``lengths``: with histograms; ``samples``: with the series as exposed, for recordings; a
    tick after every so many samples; without ``devices`` or ``host``, nothing of these is observed."""
    yield EngineUpdate(EPOCH, facts(run))
    scrapes = _scrapes(run, lengths, samples)
    polls = [_polls(run, i) for i in range(len(run.ranks))] if devices else []
    hosts = _hosts(run)
    tick = Prototype(Tick(0.0))
    life = 0
    lives = _lives(run)
    for i, t in enumerate((EPOCH + run.t).tolist()):
        if lives[i] != life:
            life = lives[i]
            yield EngineUpdate(t, EngineFacts(name=ENGINE, pids=_pids(run, life)))
        yield next(scrapes)
        for poll in polls:
            yield next(poll)
        if host and i % _EVERY_HOST == 0:
            yield from next(hosts)
        if i % ticks == 0:
            yield tick.having(Tick, t=t + 0.2)


def header(run: Run) -> Header:
    return Header(
        start=EPOCH,
        note=f"simulated: {run.scenario.name}",
        engines=(facts(run),),
        intervals={"gpu": 15.0, "scrape": 15.0, "process": 30.0, "lists": 60.0},
    )


def write_recording(run: Run, stream: IO[bytes]) -> None:
    writer = Writer(stream, header(run))
    for observation in observations(run, samples=True):
        writer.write(observation)


def page(run: Run, sample: int) -> str | None:
    """The text of /metrics at this sample; None where nothing answers."""
    if not run.scraped[sample]:
        return None
    shown = _exposed(run, sample)
    lines = []
    for name in dict.fromkeys(series.split("{")[0] for series in shown):
        family = name.removesuffix("_bucket").removesuffix("_count").removesuffix("_sum")
        kind = "counter" if name.endswith("_total") else "gauge" if family == name else "histogram"
        lines.append(f"# TYPE {family} {kind}")
        lines += [f"{series} {value}" for series, value in shown.items() if series.split("{")[0] == name]
    return "\n".join(dict.fromkeys(lines)) + "\n"


# --- the engine's page -----------------------------------------------------------------------------------------------


def _scrapes(run: Run, lengths: bool, samples: bool) -> Iterator[EngineScrape]:
    scenario = run.scenario
    at = _version(run)
    told = scenario.connector or at >= (0, 11, 1)
    connector = scenario.connector if told else NOT_KNOWN
    ok = Prototype(
        EngineScrape(
            0.0, ENGINE, "ok", 0.01, model_name=MODEL, version=scenario.version, healthy=True, kv_connector=connector
        )
    )
    down = EngineScrape(0.0, ENGINE, "unreachable", 0.0, error="connection refused")
    failed = {True: Prototype(down), False: Prototype(EngineScrape(0.0, ENGINE, "timeout", 10.0, error="timeout"))}
    ranks = [_readings(run, i, lengths) for i in range(len(run.ranks))]
    starts = _starts(run, at)
    is_down = (run.ranks[0][STATE] == DOWN).tolist()
    scraped = run.scraped.tolist()
    for i, t in enumerate((EPOCH + run.t).tolist()):
        readings = tuple([next(rank) for rank in ranks])
        if not scraped[i]:
            yield failed[is_down[i]].having(EngineScrape, t=t)
            continue
        shown = _exposed(run, i) if samples else {}
        yield ok.having(EngineScrape, t=t, ranks=readings, process_start=starts[i], samples=shown)


def _version(run: Run) -> tuple[int, ...]:
    return tuple(int(part) for part in run.scenario.version.split("."))


def _starts(run: Run, at: tuple[int, ...]) -> list[Any]:
    """When the API server started; with several of them, which data parallelism brings from 0.16, nobody says."""
    if len(run.ranks) > 1 and at >= (0, 16):
        return [NOT_EXPOSED] * len(run.t)
    lives = _lives(run)
    begin = {life: EPOCH + float(run.t[lives.index(life)]) if life else EPOCH - 86400 for life in set(lives)}
    return [begin[life] for life in lives]


def _readings(run: Run, rank: int, lengths: bool) -> Iterator[RankReading]:
    """One rank's readings, one a sample. The pool's blocks and usage are cleared of the null block, as the page's
    reader does."""
    series, scenario, at = run.ranks[rank], run.scenario, _version(run)
    engine = scenario.engine
    tokens: Any = (engine.blocks + 1) * engine.block_size if at >= (0, 24) else NOT_KNOWN
    pool = Prototype(
        Pool(
            blocks=engine.blocks,
            block_size=engine.block_size,
            tokens=tokens,
            max_concurrency=tokens / scenario.traffic.longest if at >= (0, 24) else NOT_KNOWN,
        )
    )
    reading = Prototype(
        RankReading(
            rank=str(rank),
            sleep_level="awake" if at >= (0, 11, 1) else NOT_EXPOSED,
            gpu_memory_utilization=scenario.gpu.utilization,
            prefix_caching=True,
            external_prefix_queries=0.0 if at >= (0, 11, 1) else NOT_EXPOSED,
        )
    )
    columns = series.table[:, : KV_EXPIRED + 1].tolist()
    counts = _cumulative(series.lengths) if lengths else []
    bounds = [*LENGTH_BOUNDS.tolist(), float("inf")]
    by_reason = at >= (0, 20, 2)
    connector = scenario.connector and at >= (0, 11, 1)
    sleeps = at >= (0, 11, 1)
    asleep = (series[STATE] == ASLEEP).tolist()
    for i, row in enumerate(columns):
        used = int(row[USED])
        changes: dict[str, Any] = {
            "usage": used / engine.blocks,
            "running": row[RUNNING],
            "waiting": row[WAITING] + row[DEFERRED],
            "preemptions": row[PREEMPTIONS],
            "prompt_tokens": row[PROMPT_TOKENS],
            "generation_tokens": row[GENERATION_TOKENS],
            "steps": row[STEPS],
            "finished": {"stop": row[FINISHED_STOP], "length": row[FINISHED_LENGTH], "abort": 0.0},
            "request_prompt_tokens": row[REQUEST_PROMPT],
            "request_generation_tokens": row[REQUEST_GENERATION],
            "prefix_queries": row[PREFIX_QUERIES],
            "prefix_hits": row[PREFIX_HITS],
            "pool": pool.having(Pool, used=used),
        }
        if by_reason:
            changes["waiting_capacity"], changes["waiting_deferred"] = row[WAITING], row[DEFERRED]
        if connector:
            changes["external_prefix_queries"], changes["kv_expired"] = row[PREFIX_QUERIES], row[KV_EXPIRED]
        if sleeps and asleep[i]:
            changes["sleep_level"] = "weights_offloaded"
        if lengths:
            prompt, generation = counts[0][i], counts[1][i]
            changes["prompt_lengths"] = tuple(zip(bounds, prompt, strict=True))
            changes["generation_lengths"] = tuple(zip(bounds, generation, strict=True))
        yield reading.having(RankReading, **changes)


def _cumulative(lengths: Any) -> tuple[list[list[float]], list[list[float]]]:
    n = len(LENGTH_BOUNDS) + 1
    whole = lengths.astype(np.float64)
    return np.cumsum(whole[:, :n], axis=1).tolist(), np.cumsum(whole[:, n:], axis=1).tolist()


def _exposed(run: Run, i: int) -> dict[str, float]:
    """The series of a page, as vLLM of this version names and counts them."""
    at = _version(run)
    scenario, engine = run.scenario, run.scenario.engine
    shown: dict[str, float] = {}
    null_block_used = at < (0, 10, 2)
    total = (engine.blocks + 1) * len(run.ranks)
    for rank, series in enumerate(run.ranks):
        row = series.table[i]
        labels = f'engine="{rank}",model_name="{MODEL}"'

        def put(name: str, value: float, more: str = "", labels: str = labels) -> None:
            shown[f"vllm:{name}{{{labels}{more}}}"] = float(value)

        usage = row[USED] / engine.blocks if not null_block_used else (row[USED] + 1) / (engine.blocks + 1)
        put("kv_cache_usage_perc", usage)
        put("num_requests_running", row[RUNNING])
        put("num_requests_waiting", row[WAITING] + row[DEFERRED])
        if at >= (0, 20, 2):
            put("num_requests_waiting_by_reason", row[WAITING], ',reason="capacity"')
            put("num_requests_waiting_by_reason", row[DEFERRED], ',reason="deferred"')
        put("num_preemptions_total", row[PREEMPTIONS])
        put("prompt_tokens_total", row[PROMPT_TOKENS])
        put("generation_tokens_total", row[GENERATION_TOKENS])
        put("iteration_tokens_total_count", row[STEPS])
        put("request_success_total", row[FINISHED_STOP], ',finished_reason="stop"')
        put("request_success_total", row[FINISHED_LENGTH], ',finished_reason="length"')
        put("request_success_total", 0.0, ',finished_reason="abort"')
        put("prefix_cache_queries_total", row[PREFIX_QUERIES])
        put("prefix_cache_hits_total", row[PREFIX_HITS])
        put("request_prompt_tokens_sum", row[REQUEST_PROMPT])
        put("request_generation_tokens_sum", row[REQUEST_GENERATION])
        histograms = _cumulative(series.lengths[i : i + 1])
        for name, counts in zip(("request_prompt_tokens", "request_generation_tokens"), histograms, strict=True):
            bounds = [*(f"{bound:.1f}" for bound in LENGTH_BOUNDS), "+Inf"]
            for bound, count in zip(bounds, counts[0], strict=True):
                put(f"{name}_bucket", count, f',le="{bound}"')
        if at >= (0, 11, 1):
            put("external_prefix_cache_queries_total", row[PREFIX_QUERIES] if scenario.connector else 0.0)
            asleep = row[STATE] == ASLEEP
            for state, value in (("awake", not asleep), ("weights_offloaded", asleep), ("discard_all", False)):
                put("engine_sleep_state", value, f',sleep_state="{state}"')
        if scenario.connector and at >= (0, 16):
            put("nixl_num_kv_expired_reqs_total", row[KV_EXPIRED])
        config = {
            "block_size": engine.block_size,
            "enable_prefix_caching": True,
            "engine": rank,
            "gpu_memory_utilization": scenario.gpu.utilization,
            "kv_cache_memory_bytes": None,
            "num_cpu_blocks": None,
            "num_gpu_blocks": total,
        }
        if at >= (0, 24):
            config["kv_cache_size_tokens"] = (engine.blocks + 1) * engine.block_size
        if null_block_used:
            del config["kv_cache_memory_bytes"]
        shown["vllm:cache_config_info{" + ",".join(f'{k}="{v}"' for k, v in sorted(config.items())) + "}"] = 1.0
    start = _starts(run, at)[i] if len(run.ranks) == 1 or at < (0, 16) else None
    if start is not None:
        shown["process_start_time_seconds"] = float(start)
    return shown


# --- devices and host ------------------------------------------------------------------------------------------------


def _lives(run: Run) -> list[int]:
    down = run.ranks[0][STATE] == DOWN
    starts = np.concatenate([[False], down[:-1] & ~down[1:]])
    return [int(life) for life in np.cumsum(starts)]


def _pids(run: Run, life: int) -> tuple[int, ...]:
    shift = life * PIDS_PER_LIFE
    return (API_PID + shift, *(CORE_PID + shift + i for i in range(len(run.ranks))))


def _polls(run: Run, rank: int) -> Iterator[GpuPoll]:
    gpu, spec = run.gpus[rank], run.scenario.gpu
    total, reserved = int(spec.total), int(spec.reserved)
    poll = Prototype(GpuPoll(0.0, uuid(rank), rank, spec.name, NOT_READ))
    memory = Prototype(Memory(total, reserved, 0, 0))
    lives = _lives(run)
    process, orphan, neighbour = (x.astype(np.int64).tolist() for x in (gpu.process, gpu.orphan, gpu.neighbour))
    for i, t in enumerate((EPOCH + run.t).tolist()):
        used = min(total - reserved, process[i] + orphan[i] + neighbour[i])
        listed: Any = NOT_READ
        if i % _EVERY_PROCESS_LIST == 0:
            pid = CORE_PID + lives[i] * PIDS_PER_LIFE + rank
            holders = ((pid, process[i]), (ORPHAN_PID, orphan[i]), (NEIGHBOUR_PID, neighbour[i]))
            listed = tuple([GpuProcess(holder, held) for holder, held in holders if held])
        state = memory.having(Memory, used=used, free=total - reserved - used)
        yield poll.having(GpuPoll, t=t + 0.05, memory=state, processes=listed)


def _hosts(run: Run) -> Iterator[list[Observation]]:
    """The host's processes of each second sample: the API server, and an engine core for each rank."""
    scenario, host = run.scenario, run.host
    lives = _lives(run)
    limit, calm = int(scenario.host.limit), int(scenario.host.base)
    process = Prototype(
        HostProcess(0.0, 0, 0.0, 0, NOT_READ, "", memory_limit=limit, engine=ENGINE, container="c0ffee")
    )
    api = Prototype(process.having(HostProcess, rss=calm // 4, anon=calm // 5, name="vllm", role="api_server"))
    down = (run.ranks[0][STATE] == DOWN).tolist()
    rss, anon = host.rss.astype(np.int64).tolist(), host.anon.astype(np.int64).tolist()
    starts = [begin if isinstance(begin, float) else EPOCH for begin in _starts(run, (0,))]
    present = True
    times = (EPOCH + run.t).tolist()
    for i in range(0, len(times), _EVERY_HOST):
        t = times[i] + 0.1
        seen: list[Observation] = [HostMemory(t, HOST_TOTAL, HOST_TOTAL - rss[i] - len(run.ranks) * calm)]
        pids = _pids(run, lives[i])
        if down[i] and present:
            seen += [ProcessGone(t, pid) for pid in pids]
        present = not down[i]
        if present:
            seen.append(api.having(HostProcess, t=t, pid=pids[0], start=starts[i]))
            for rank, pid in enumerate(pids[1:]):
                name = "VLLM::EngineCore" if len(run.ranks) == 1 else f"VLLM::EngineCore_DP{rank}"
                role, rank_name = role_of(name)
                core = process.having(
                    HostProcess, t=t, pid=pid, start=starts[i], ppid=pids[0], name=name, role=role, rank=rank_name
                )
                held = (rss[i], anon[i]) if rank == 0 else (calm, calm)
                seen.append(Prototype(core).having(HostProcess, rss=held[0], anon=held[1]))
        yield seen
