"""Engine: one engine, its ranks and its GPUs. Which killer, since when, how long left, what now?"""

from __future__ import annotations

from grafana.build import variables
from grafana.build.annotations import annotation
from grafana.build.board import Board, Row
from grafana.build.links import from_cell, to_board
from grafana.build.look import (
    BLUE,
    GREY,
    HOLDER_COLOURS,
    LIGHT,
    ORANGE,
    PURPLE,
    REASON_COLOURS,
    ROLE_COLOURS,
    SKY,
    STATES,
    VERMILLION,
)
from grafana.build.panels import Column, Query, series, stat, table
from grafana.build.queries import (
    ENGINE,
    ENGINE_OR_ITS_GPUS,
    GPUS,
    JOB,
    NODE,
    RANKS,
    SUBJECT,
    Scope,
    causes_first,
    unsilenced,
    with_index,
)
from grafana.build.verdicts import COLUMNS, over_time, pages, worst_by_killer

E = Scope(ENGINE)
R = Scope(RANKS)
V = Scope(ENGINE_OR_ITS_GPUS)
G = Scope(GPUS)
EG = Scope(f'{ENGINE}, gpu=~"$gpu"')
N = Scope(NODE)
WRONG = f"{unsilenced(V)} > 0"
UNTOLD = "The engine does not tell, or no data: see State"
UNREAD = "The driver gives no numbers for these GPUs, or no data: see the dashboard GPU"
NOT_WARM = "No process is warm yet, the driver gives no number for each process, or no data"
UNPROBED = "No oomwatch-probe runs inside this engine, or no data: see State"
NOT_LEFT = {-1.0: ("nothing runs out", BLUE)}


def _evidence(*keys: str) -> str:
    return f"max by (verdict, key, rank) ({V('oomwatch_verdict_evidence', *keys)})"


_now = Row(
    "",
    (
        stat(
            "State",
            "Good: ok, or sleeping where that is meant. Frozen: there is work and no number moves. Dead: the engine "
            "core has ended and its front end still answers.",
            (Query(f"{E('oomwatch_engine_state')} == 1", "{{state}}"),),
            names={"ok": BLUE, "sleeping": SKY, "no_traffic_yet": SKY, "unknown": GREY},
            steps=((None, VERMILLION),),
            width=4,
        ),
        worst_by_killer(
            V,
            "About this engine, its ranks, processes and GPUs. Good: clear. Unknown: something that is needed is "
            "missing; the reasons are below.",
        ),
        stat(
            "Least time left",
            "Of the verdicts that are not clear: until the pool, the device or the host's memory runs out at its "
            "pace. Hours are time to act; minutes are often only a rising load.",
            (
                Query(
                    f"min({V('oomwatch_verdict_eta_seconds')} and {WRONG}) or -max({E('oomwatch_engine_up')} * 0 + 1)",
                    "least time left",
                ),
            ),
            unit="s",
            decimals=0,
            words=NOT_LEFT,
            steps=((None, VERMILLION), (3600, ORANGE), (43200, SKY), (604800, BLUE)),
            width=4,
        ),
        stat(
            "Requests",
            "Now, over the ranks chosen. Good: none waits for long.",
            (
                Query(f"sum({R('oomwatch_engine_running_requests')})", "running"),
                Query(f"sum({R('oomwatch_engine_waiting_requests')})", "waiting"),
            ),
            width=6,
            empty=UNTOLD,
        ),
    ),
)

_verdicts = Row(
    "What is wrong, and the numbers that say so",
    (
        over_time(
            V,
            "Every verdict that is not clear, and the worst of all; -1 is unknown; coloured by killer. Good: the "
            "worst one stays at clear. Marks: restarts, sleep, the beginning of pages.",
            "verdict",
            width=12,
        ),
        table(
            "Evidence",
            "The numbers that led to a verdict. docs/detection.md has the formulas.",
            (
                Column("Bytes", _evidence('key=~".*bytes"'), "bytes", width=90),
                Column("Share", _evidence('key=~".*(ratio|share)"'), "percentunit", width=70, decimals=1),
                Column("Seconds", _evidence('key=~".*seconds"'), "s", width=80, decimals=0),
                Column("Number", _evidence('key!~".*(bytes|ratio|share|seconds)"'), "short", width=80, decimals=1),
            ),
            {"verdict": "Verdict", "key": "What", "rank": "Rank"},
            sort="Verdict",
            order=("Verdict", "What", "Bytes", "Share", "Seconds", "Number", "Rank"),
            widths={"Verdict": 150, "Rank": 50},
            empty="Every verdict is clear or unknown, or no data: see Worst verdict by killer",
            width=12,
        ),
        table(
            "Verdicts",
            "A symptom is explained by its cause: act on the cause. What to do stands in the runbook of the alert.",
            (
                Column("State", f"max by ({SUBJECT}) ({WRONG}) or max({unsilenced(V)}) == 0", words=STATES, width=90),
                Column(
                    "Since",
                    f"max by ({SUBJECT}) ({V('oomwatch_verdict_state_timestamp_seconds')} * 1000 and {WRONG})",
                    "dateTimeFromNow",
                ),
                Column(
                    "Time left",
                    f"max by ({SUBJECT}) ({V('oomwatch_verdict_eta_seconds')} and {WRONG})",
                    "s",
                    decimals=0,
                    width=90,
                ),
                Column(
                    "At least",
                    f"max by ({SUBJECT}) ({V('oomwatch_verdict_eta_low_seconds')} and {WRONG})",
                    "s",
                    decimals=0,
                    width=90,
                ),
                Column(
                    "Sure",
                    f"max by ({SUBJECT}) ({V('oomwatch_verdict_confidence_ratio')} and {WRONG})",
                    "percentunit",
                    decimals=0,
                    width=70,
                ),
                Column("", f"max by ({SUBJECT}, cause) ({V('oomwatch_verdict_symptom')})", shown=False),
                Column("order", causes_first(f"max by ({SUBJECT}) ({WRONG})", V, SUBJECT), shown=False),
            ),
            COLUMNS,
            sort="order",
            order=(
                "State",
                "Verdict",
                "Time left",
                "Since",
                "GPU",
                "Rank",
                "Symptom of",
                "At least",
                "Sure",
                "Killer",
                "Pid",
                "MIG",
                "Engine",
            ),
            links={"GPU": (from_cell("GPU", "oomwatch-gpu", kept=("instance",), gpu="GPU"),)},
            widths={"Rank": 60, "Pid": 80, "Verdict": 170},
            width=14,
        ),
        table(
            "What cannot be concluded, and why",
            "A verdict without its inputs is unknown and never clear. Not supported is no fault; a source that is "
            "silent is.",
            (Column("Unknown", f"count by (verdict, reason) ({V('oomwatch_verdict_unknown')})", width=90),),
            {"verdict": "Verdict", "reason": "Reason"},
            sort="Unknown",
            widths={"Verdict": 170},
            order=("Verdict", "Reason", "Unknown"),
            empty="Everything can be concluded, or no data: see State",
            width=10,
        ),
    ),
)

_pool = Row(
    "KV pool",
    (
        series(
            "KV pool in use, and what no request can own",
            "By rank. Good: use follows the load and falls to 0 % when nothing runs; the floor stays at 0 %. A floor "
            "that rises is a leak of blocks, a pool that is full is only busy.",
            (
                Query(R("oomwatch_engine_kv_cache_usage_ratio"), "rank {{rank}} in use"),
                Query(
                    R("oomwatch_engine_kv_floor_ratio"),
                    "rank {{rank}} owned by no request",
                    colour=VERMILLION,
                    filled=True,
                ),
            ),
            unit="percentunit",
            lowest=0,
            highest=1,
            empty=UNTOLD,
        ),
        series(
            "Running and waiting requests",
            "By rank. Good: the queue empties. Running at 0 while requests wait: a stall, a leak or a hang.",
            (
                Query(R("oomwatch_engine_running_requests"), "rank {{rank}} running"),
                Query(R("oomwatch_engine_waiting_requests"), "rank {{rank}} waiting", dashed=True),
                Query(
                    R("oomwatch_engine_waiting_for_capacity_requests"),
                    "rank {{rank}} waiting for capacity",
                    colour=ORANGE,
                    dashed=True,
                ),
            ),
            unit="none",
            lowest=0,
            empty=UNTOLD,
        ),
        series(
            "Preemptions",
            "A second, and for each request that finished. Good: below 0.5 for each; some are no harm.",
            (
                Query(
                    f"sum by (rank) (rate({R('oomwatch_engine_preemptions_total')}[$__rate_interval]))",
                    "rank {{rank}} a second",
                    dashed=True,
                ),
                Query(R("oomwatch_engine_preemptions_per_finished"), "rank {{rank}} for each finished", colour=ORANGE),
            ),
            unit="none",
            lowest=0,
            line=0.5,
            width=8,
            empty=UNTOLD,
        ),
        series(
            "Growth of the floor, and time left",
            "Blocks an hour that no request owns any more, and when the pool is gone at that pace. Good: no growth.",
            (
                Query(
                    f"{R('oomwatch_engine_kv_floor_slope_blocks_per_second')} * 3600", "rank {{rank}} blocks an hour"
                ),
                Query(
                    R("oomwatch_verdict_eta_seconds", 'verdict="kv-block-leak"'),
                    "rank {{rank}} time left",
                    colour=VERMILLION,
                    unit="s",
                    right=True,
                ),
            ),
            unit="none",
            width=8,
            empty="No floor yet: needs hours of work, and moments without; or no data: see State",
        ),
        series(
            "Waste of last blocks",
            "Share of the used pool that unfilled ends of last blocks take, with 95 % bounds: the pool's only "
            "fragmentation. Good: below 10 %; 1 % is usual with blocks of 16 tokens.",
            (
                Query(R("oomwatch_engine_kv_tail_waste_ratio"), "rank {{rank}}", colour=PURPLE),
                Query(R("oomwatch_engine_kv_tail_waste_high_ratio"), "rank {{rank}} at most", colour=GREY, dashed=True),
            ),
            unit="percentunit",
            lowest=0,
            line=0.1,
            width=8,
            empty="Fewer than 4 sequences run, the model is hybrid, or no data: see State",
        ),
    ),
)

_WEIGHTS = E("oomwatch_engine_device_memory_configured_bytes", 'component="weights"')
_POOL = E("oomwatch_engine_device_memory_configured_bytes", 'component="kv_pool"')
_OTHERS = G("oomwatch_gpu_memory_held_bytes", 'holder!="$engine"')
_held = "oomwatch_engine_device_memory"
_devices = f"count({EG(f'{_held}_bytes')})"
_device = Row(
    "Device memory of the GPUs chosen",
    (
        series(
            "By component and owner",
            "Everything on this engine's GPUs, summed. Good: steady since the start. The overhead or an owner that "
            "grows is what a leak looks like; vLLM's own share is meant to be large.",
            (
                Query(f"sum({_WEIGHTS}) * {_devices}", "weights", colour=BLUE),
                Query(f"sum({_POOL}) * {_devices}", "KV pool", colour=SKY),
                Query(f"sum({EG(f'{_held}_overhead_bytes')})", "overhead", colour=ORANGE),
                Query(
                    f"sum({EG(f'{_held}_bytes')}) unless sum({EG(f'{_held}_overhead_bytes')})",
                    "this engine, parts not known",
                    colour=BLUE,
                ),
                Query(f"sum by (holder_kind, holder) ({_OTHERS})", "{{holder_kind}} {{holder}}", PURPLE),
                Query(f"sum({G('oomwatch_gpu_memory_unowned_bytes')})", "no process", colour=VERMILLION),
                Query(f"sum({G('oomwatch_gpu_memory_reserved_bytes')})", "driver", colour=GREY),
                Query(f"sum({G('oomwatch_gpu_memory_free_bytes')})", "free", colour=LIGHT),
            ),
            unit="bytes",
            stacked=True,
            colours={**HOLDER_COLOURS, "engine": PURPLE},
            lowest=0,
            height=9,
            empty=UNREAD,
        ),
        series(
            "Headroom",
            "Free memory of each GPU, its floor within the window, and the floor it has lived with (dashed). Good: the "
            "floor stays at that level.",
            (
                Query(with_index(G("oomwatch_gpu_memory_free_bytes"), N), "GPU {{index}} free"),
                Query(with_index(G("oomwatch_device_free_floor_bytes"), N), "GPU {{index}} floor", colour=ORANGE),
                Query(
                    with_index(G("oomwatch_device_free_level_bytes"), N),
                    "GPU {{index}} lived with",
                    colour=GREY,
                    dashed=True,
                ),
            ),
            unit="bytes",
            lowest=0,
            height=9,
            empty=UNREAD,
        ),
        series(
            "Floor of each process, against the end of its warm-up",
            "What each process holds at least, and what it held when warm (dashed). Good: both lie together.",
            (
                Query(EG("oomwatch_engine_process_device_memory_floor_bytes"), "pid {{pid}} floor"),
                Query(
                    EG("oomwatch_engine_process_device_memory_baseline_bytes"),
                    "pid {{pid}} when warm",
                    dashed=True,
                    colour=GREY,
                ),
            ),
            unit="bytes",
            width=8,
            empty=NOT_WARM,
        ),
        series(
            "Growth that no load explains, and time left",
            "Since the warm-up, by process. Good: 0. Below 256 MiB it is within what caches do.",
            (
                Query(
                    EG("oomwatch_engine_process_device_memory_growth_bytes"),
                    "pid {{pid}} growth",
                    colour=ORANGE,
                    filled=True,
                ),
                Query(
                    EG("oomwatch_verdict_eta_seconds", 'verdict=~"gpu-memory-leak|unaccounted-growth"'),
                    "pid {{pid}} time left",
                    colour=VERMILLION,
                    unit="s",
                    right=True,
                ),
            ),
            unit="bytes",
            lowest=0,
            width=8,
            empty=NOT_WARM,
        ),
        series(
            "Beyond its budget",
            "What the engine holds beyond utilization x (total - reserve), by GPU. Good: below 768 MiB: context, NCCL "
            "and in older versions graphs are outside of it by design.",
            (Query(with_index(EG("oomwatch_engine_device_overrun_bytes"), N), "GPU {{index}}"),),
            unit="bytes",
            line=768 * 1024**2,
            width=8,
            empty="The budget is not known (--kv-cache-memory-bytes, or no utilization), or no data",
        ),
    ),
)

_host = Row(
    "Host memory",
    (
        series(
            "Anonymous memory by role",
            "What leaks on the host: without page cache and mapped files. Good: steady after the warm-up, far from "
            "the limit.",
            (
                Query(
                    f"sum by (role, process_rank) ({E('oomwatch_engine_process_anonymous_bytes')})",
                    "{{role}} {{process_rank}}",
                ),
                Query(E("oomwatch_engine_host_memory_limit_bytes"), "limit", colour=VERMILLION, dashed=True),
            ),
            colours=ROLE_COLOURS,
            unit="bytes",
            lowest=0,
            empty="No process of the engine was found on this node, or no data: see State",
        ),
        series(
            "Growth on the host that no load explains, and what is left",
            "By process, since its warm-up. Good: 0.",
            (
                Query(
                    E("oomwatch_engine_process_anonymous_growth_bytes"),
                    "pid {{pid}} growth",
                    colour=ORANGE,
                    filled=True,
                ),
                Query(E("oomwatch_engine_process_anonymous_left_bytes"), "pid {{pid}} left", dashed=True),
            ),
            unit="bytes",
            lowest=0,
            empty="No process is warm yet, none was found on this node, or no data: see State",
        ),
    ),
)

_traffic = Row(
    "Traffic",
    (
        series(
            "Tokens",
            "A second, over the ranks chosen. Good: follows the demand. Generation that falls while the queue grows is "
            "what suffering looks like.",
            (
                Query(
                    f"sum(rate({R('oomwatch_engine_generation_tokens_total')}[$__rate_interval]))",
                    "generated",
                    colour=BLUE,
                ),
                Query(
                    f"sum(rate({R('oomwatch_engine_prompt_tokens_total')}[$__rate_interval]))",
                    "prompt",
                    colour=SKY,
                    right=True,
                ),
            ),
            unit="short",
            lowest=0,
            width=8,
            empty=UNTOLD,
        ),
        series(
            "Requests finished",
            "A second, by vLLM's reason. Good: stop and length; errors and aborts are rare.",
            (
                Query(
                    f"sum by (reason) (rate({R('oomwatch_engine_finished_requests_total')}[$__rate_interval]))",
                    "{{reason}}",
                ),
            ),
            colours=REASON_COLOURS,
            unit="reqps",
            lowest=0,
            width=8,
            empty=UNTOLD,
        ),
        series(
            "Hits of the prefix cache",
            "Share of the prompt that was cached. No measure of health: it says how alike the prompts are.",
            (
                Query(
                    f"sum(rate({R('oomwatch_engine_prefix_cache_hits_total')}[$__rate_interval]))"
                    f" / (sum(rate({R('oomwatch_engine_prefix_cache_queries_total')}[$__rate_interval])) > 0)",
                    "hits",
                ),
            ),
            unit="percentunit",
            lowest=0,
            highest=1,
            width=8,
            empty="No look-ups, or no data: see State",
        ),
    ),
)

_inside = Row(
    "Inside the engine, where oomwatch-probe runs",
    (
        series(
            "Whose the KV blocks are",
            "Counted by the engine core itself. Good: none that are held by nobody. Those of finished requests wait "
            "for a KV connector.",
            (Query(f"sum by (ownership) ({R('oomwatch_kv_blocks')})", "{{ownership}}"),),
            unit="none",
            stacked=True,
            lowest=0,
            colours={"free": LIGHT, "living": BLUE, "finished": SKY, "ownerless": VERMILLION},
            empty=UNPROBED,
        ),
        series(
            "PyTorch's allocator",
            "What each worker's allocator holds, and what of it tensors have. Good: both steady. A gap that grows is "
            "free memory that others cannot have.",
            (
                Query(EG("oomwatch_allocator_reserved_bytes"), "{{process_rank}} held", colour=ORANGE),
                Query(EG("oomwatch_allocator_allocated_bytes"), "{{process_rank}} in tensors", colour=BLUE),
            ),
            unit="bytes",
            empty=UNPROBED,
        ),
        series(
            "Free memory of the allocator",
            "Good: the largest piece is nearly all that is free. Pieces between blocks in use can be neither used for "
            "something larger nor given back: fragmentation.",
            (
                Query(EG("oomwatch_allocator_largest_free_block_bytes"), "{{process_rank}} largest piece", colour=BLUE),
                Query(EG("oomwatch_allocator_inactive_split_bytes"), "{{process_rank}} in pieces", colour=PURPLE),
                Query(EG("oomwatch_allocator_releasable_bytes"), "{{process_rank}} could be given back", colour=GREY),
            ),
            unit="bytes",
            lowest=0,
            empty=UNPROBED,
        ),
        series(
            "Allocations that did not fit at once",
            "Retried after the cache was given back, and failed: out of memory. Good: none; retries come before "
            "failures.",
            (
                Query(
                    f"increase({EG('oomwatch_allocator_retries_total')}[$__rate_interval])",
                    "{{process_rank}} retried",
                    colour=ORANGE,
                ),
                Query(
                    f"increase({EG('oomwatch_allocator_failures_total')}[$__rate_interval])",
                    "{{process_rank}} failed",
                    colour=VERMILLION,
                ),
            ),
            unit="short",
            lowest=0,
            empty=UNPROBED,
        ),
    ),
)

_facts = Row(
    "What the engine is, and how it started",
    (
        stat(
            "What it promised itself, and what it took",
            "At its latest start, by its log: of one worker, the largest of each. Good: all that it took together lies "
            "below what it promised itself, and that below what was free.",
            (
                Query(f"max({E('oomwatch_engine_startup_device_total_bytes')})", "device"),
                Query(f"max({E('oomwatch_engine_startup_free_bytes')})", "free at the start"),
                Query(f"max({E('oomwatch_engine_startup_promised_bytes')})", "promised"),
                Query(f"max by (component) ({E('oomwatch_engine_startup_memory_bytes')})", "{{component}}"),
            ),
            unit="bytes",
            width=24,
            height=5,
            decimals=1,
            empty="No log of this engine is read, or no data: see State",
        ),
        table(
            "Identity",
            "The served model and vLLM's version; empty while not known.",
            (Column("", f"count by (model_name, vllm_version, origin) ({E('oomwatch_engine_info')})", shown=False),),
            {"model_name": "Model", "vllm_version": "vLLM", "origin": "Found by"},
            sort="Model",
            order=("Model", "vLLM", "Found by"),
            width=10,
            height=4,
        ),
        stat(
            "Pool and limits",
            "Of each rank: the pool in tokens, and how many requests of the longest length fit at once. Good: above "
            "1.5.",
            (
                Query(f"min({R('oomwatch_engine_kv_cache_capacity_tokens')})", "tokens"),
                Query(f"min({R('oomwatch_engine_kv_cache_block_size_tokens')})", "tokens a block"),
                Query(f"min({R('oomwatch_engine_kv_cache_max_concurrency_requests')})", "longest requests"),
            ),
            unit="short",
            width=14,
            empty=UNTOLD,
        ),
    ),
)

_ASLEEP = R("oomwatch_engine_sleep_state", 'state!="awake"')

BOARD = Board(
    uid="oomwatch-engine",
    title="oomwatch / Engine",
    description="One engine, its ranks and GPUs: which killer, since when, how long left?",
    variables=(
        variables.data_source(),
        variables.job(),
        variables.node(Scope(JOB)),
        variables.engine(N),
        variables.ranks(E),
        variables.gpus_of_engine(E),
    ),
    rows=(_now, _verdicts, _pool, _device, _inside, _host, _traffic, _facts),
    links=(
        to_board("Fleet", "oomwatch-fleet"),
        to_board("GPU", "oomwatch-gpu", "instance"),
        to_board("Self", "oomwatch-self", "instance"),
    ),
    annotations=(
        annotation(
            "Restarts",
            f"changes({E('oomwatch_engine_restarts_total')}[$__rate_interval]) > 0",
            "{{engine}} was restarted",
            PURPLE,
        ),
        annotation(
            "Sleep",
            f"max by (engine, state) (max_over_time({_ASLEEP}[$__rate_interval])) > 0",
            "{{engine}} sleeps: {{state}}",
            SKY,
        ),
        pages(V, "{{verdict}} pages"),
    ),
)
