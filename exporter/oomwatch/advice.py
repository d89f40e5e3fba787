"""What to do about a verdict: ordered actions, the first thing first, with the values that fit the case.

Nothing is advised that the engine's vLLM does not have; where its version is not known, the action says from which
version on it holds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from oomwatch import units
from oomwatch.detectors.base import Finding
from oomwatch.detectors.capacity import TRUE_AFTER_ABORTS
from oomwatch.observations import EngineFacts
from oomwatch.sources.vllm.meaning import release

GIB = 1024**3

FLAGS: Mapping[str, tuple[int, ...]] = {
    "--gpu-memory-utilization": (),
    "--max-model-len": (),
    "--max-num-seqs": (),
    "--max-num-batched-tokens": (),
    "--kv-cache-dtype": (),
    "--tensor-parallel-size": (),
    "--block-size": (),
    "--enforce-eager": (),
    "--disable-log-stats": (),
    "--max-loras": (),
    "--kv-cache-memory-bytes": (0, 10, 2),
}
"""vLLM's flags that advice names, with the first release that has each; empty: all that are supported."""

_WATERMARK = (0, 24)  # the V1 scheduler's setting, off by default (PR #44594)
_NO_EXPANDABLE_WITH_CONNECTOR = (0, 21)  # vLLM refuses to start with both (PR #41237)


@dataclass(frozen=True)
class Action:
    """One thing to do, as a sentence with its values.

    ``cost`` is what it takes for sure, ``risk`` what may go wrong; both are clauses, and empty where there is none.
    """

    do: str
    cost: str = ""
    risk: str = ""

    def __str__(self) -> str:
        cost = f" Cost: {self.cost}." if self.cost else ""
        return f"{self.do}{cost}{f' Risk: {self.risk}.' if self.risk else ''}"


def actions(verdict: str, finding: Finding, facts: EngineFacts | None) -> tuple[Action, ...]:
    """What to do, the first thing first, with the values that fit this case."""
    return tuple(one if isinstance(one, Action) else Action(one) for one in _TABLE[verdict](_Case(finding, facts)))


def advice(verdict: str, finding: Finding, facts: EngineFacts | None) -> tuple[str, ...]:
    """The actions for a person on call, each with its cost and risk."""
    return tuple(map(str, actions(verdict, finding, facts)))


_Advice: TypeAlias = "Iterator[str | Action]"

# What a change costs, in the same words wherever it is advised.
_SMALLER_POOL = "the KV pool holds fewer tokens"
_SHORTER = "longer requests are refused"
_QUEUE = "more requests wait in the queue"
_SLOWER_PROMPTS = "long prompts take longer"
_EAGER = "each token takes longer"
_MORE_GPUS = "one or more GPUs"
_RESTART = "it is away while it loads"
_LOST = "its running requests are lost, and it is away while it loads"


@dataclass(frozen=True)
class _Case:
    """A finding with what is known of the engine."""

    finding: Finding
    facts: EngineFacts | None

    def number(self, key: str) -> float | None:
        value = self.finding.evidence.get(key)
        return float(value) if isinstance(value, (int, float)) else None

    def listed(self, key: str) -> list[str]:
        value = self.finding.evidence.get(key)
        return [str(item) for item in value] if isinstance(value, list) else []

    def text(self, key: str) -> str:
        value = self.finding.evidence.get(key)
        return value if isinstance(value, str) else ""

    @property
    def pages(self) -> bool:
        return self.finding.state == "page"

    @property
    def utilization(self) -> float | None:
        told = self.number("utilization")
        return told if told is not None or self.facts is None else self.facts.gpu_memory_utilization

    @property
    def connector(self) -> bool:
        return bool(self.facts and self.facts.kv_connector)

    @property
    def expandable(self) -> str:
        """How to start with expandable segments, with what stands against it; empty where vLLM refuses it."""
        if self.connector and self.has(_NO_EXPANDABLE_WITH_CONNECTOR) is not False:
            return ""
        certain = self.connector or (self.facts is not None and self.facts.kv_connector is False)
        against = "sleep mode" if certain else "sleep mode or a KV connector"
        return f"start it with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, unless it uses {against}"

    def has(self, first: tuple[int, ...]) -> bool | None:
        """Whether the engine's vLLM is of that release or newer; None where its version is not known."""
        version = release(self.facts.vllm_version) if self.facts else None
        return True if not first else None if version is None else version >= first

    def since(self, first: tuple[int, ...]) -> str:
        """What to add to an action that needs a release, where the engine's is not known."""
        return "" if self.has(first) else f" (vLLM {'.'.join(map(str, first))} and newer)"

    def less(self, share: float) -> str:
        """``--gpu-memory-utilization`` lowered by a share of the device, rounded so that it suffices."""
        now = self.utilization
        if now is None:
            return f"--gpu-memory-utilization by {max(0.01, math.ceil(share * 100) / 100):.2f}"
        to = max(0.05, math.floor((now - share) * 100 + 1e-9) / 100)
        return f"--gpu-memory-utilization from {now:g} to {min(to, now - 0.01):.2f}"

    @property
    def smaller_batches(self) -> str:
        """``--max-num-batched-tokens``, halved where it is known: not below what a step of decoding needs."""
        now = self.facts.max_num_batched_tokens if self.facts else None
        return f"--max-num-batched-tokens{f' from {now} to {now // 2}' if now is not None and now >= 1024 else ''}"

    @property
    def sequences(self) -> int | None:
        return self.facts.max_num_seqs if self.facts else None

    def before(self) -> str:
        """By when, with the earlier bound of the time left: `` within 5 h``, or nothing."""
        eta = self.finding.eta
        if eta is None or eta.seconds <= 0:
            return ""
        return f" within {units.duration(eta.low if eta.low is not None else eta.seconds)}"


_SAVE = (
    "Save its log, its page of metrics and what py-spy dump says of its engine process first: "
    "they are gone with the restart."
)
_FP8 = Action(
    "At the next restart set --kv-cache-dtype fp8, which makes room for about twice the tokens.",
    cost="a small loss of accuracy",
    risk="GPUs and attention backends that do not support it refuse to start",
)


# --- capacity ----------------------------------------------------------------------------------------------------


def _startup_refused(case: _Case) -> _Advice:
    largest, fitting = case.number("largest_passing_utilization"), case.number("largest_max_model_len")
    reason = case.text("reason")
    if reason == "profiling_disturbed":
        yield "Start it again while no neighbour starts or stops: others' memory changed while it measured its own."
        yield "Let a supervisor wait for 30 s between tries; engines that share a GPU start one after another."
        return
    if reason in ("host_memory", "swap_space"):
        yield "Free memory on the host, or raise the memory limit of its container."
        yield Action("Or give it less host memory for its cache or swap space.", cost="fewer tokens are held there")
        return
    if reason == "too_many_sequences":
        most = case.number("largest_max_num_seqs")
        to = f" to {most:.0f} at most" if most is not None else ""
        yield Action(f"Lower --max-num-seqs{to}: each sequence needs a Mamba block of its own.", cost=_QUEUE)
        yield "Or give the pool more room: more of the device's memory, if it is free, or more GPUs."
        return
    if reason not in ("no_room", "context_too_long"):
        yield (
            "Look what else holds memory there (oomwatch check lists it by owner), and stop what does not belong there."
        )
    if largest is not None and reason != "no_room":
        now = case.utilization
        instead = f" instead of {now:g}" if now is not None and now > largest else ""
        share = f"{math.floor(largest * 100) / 100:.2f}"
        yield Action(
            f"As things are, it starts with --gpu-memory-utilization {share} at most{instead}.",
            cost="the KV pool is smaller by the difference",
        )
    if fitting is not None:
        yield Action(f"As things are, it starts with --max-model-len {fitting:.0f} at most.", cost=_SHORTER)
    yield from _more_room(case)
    if reason == "no_room":
        yield from _no_room()
    elif largest is None and fitting is None:
        yield Action(
            "The end of its log says what was wanted and what was there: lower --gpu-memory-utilization to what is "
            "free, or --max-model-len to what the pool holds.",
            cost=f"{_SMALLER_POOL}, or {_SHORTER}",
        )


def _more_room(case: _Case) -> _Advice:
    """The only time to raise the share: the pool is too small for a start, and memory beyond the budget was free."""
    enough, now = case.number("smallest_passing_utilization"), case.utilization
    if enough is not None and now is not None:
        to = min(1.0, math.ceil(enough * 100 - 1e-9) / 100)
        yield Action(
            f"Or raise --gpu-memory-utilization from {now:g} to {to:.2f}: so much was free when it started.",
            risk="what a forward pass takes beyond its estimate has less room",
        )


def _no_room() -> _Advice:
    yield "Weights and activations take all of its budget: a larger one helps only where more of the device is free."
    yield Action(
        "Lower --max-num-seqs or --max-num-batched-tokens: activations take less.",
        cost=f"{_QUEUE}, or {_SLOWER_PROMPTS}",
    )
    yield Action("Else use more GPUs (--tensor-parallel-size) or a quantized form of the model.", cost=_MORE_GPUS)


def _startup_oom(case: _Case) -> _Advice:
    step = case.text("step")
    if step not in _OF_STEPS:
        yield "Read the end of its log: the step that ran out decides what helps."
    if step in ("load", "kv_pool") or case.number("least_free_bytes") is not None or case.number("others_bytes"):
        yield "Look whether something else took memory on the device meanwhile: oomwatch check lists it by owner."
    for one in (step,) if step in _OF_STEPS else ("load", "profile", "graphs"):
        yield from _OF_STEPS[one](case)


def _loading(_case: _Case) -> _Advice:
    yield Action(
        "Ran out while loading weights: use more GPUs (--tensor-parallel-size) or a quantized form of the model.",
        cost=_MORE_GPUS,
    )


def _profiling(case: _Case) -> _Advice:
    so, requests = "Ran out while profiling or warming up", case.number("dummy_requests")
    if requests is not None and requests > 1:
        to = f"from {requests:.0f} to {max(1, requests // 4):.0f}"
        yield Action(f"{so}: lower --max-num-seqs {to}, as the sampler is tried on so many at once.", cost=_QUEUE)
        yield Action(f"Or lower {case.less(_short_share(case) or 0.02)}.", cost=_SMALLER_POOL)
    else:
        cost = f"{_SLOWER_PROMPTS}, or {_QUEUE}"
        yield Action(f"{so}: lower {case.smaller_batches}, or --max-num-seqs.", cost=cost)
        if case.text("step"):
            yield Action("Or use more GPUs (--tensor-parallel-size) or a quantized form of the model.", cost=_MORE_GPUS)


def _making_the_pool(case: _Case) -> _Advice:
    yield Action(
        f"Ran out while making the KV pool: lower {case.less(0.02)}, as another took what it had measured as free.",
        cost=_SMALLER_POOL,
    )


def _capturing(case: _Case) -> _Advice:
    less = case.less(_short_share(case) or 0.02)
    yield Action(f"Ran out while capturing graphs: lower {less}.", cost=_SMALLER_POOL)
    yield Action("Or give up graphs with --enforce-eager.", cost=_EAGER)


_OF_STEPS: Mapping[str, Callable[[_Case], _Advice]] = {
    "load": _loading,
    "profile": _profiling,
    "warm_up": _profiling,
    "kv_pool": _making_the_pool,
    "graphs": _capturing,
}


def _short_share(case: _Case) -> float | None:
    """What an allocation lacked, and a quarter of a GiB besides, as a share of the device; None where not known."""
    wanted, free, total = case.number("wanted_bytes"), case.number("free_bytes"), case.number("total_bytes")
    if wanted is None or free is None or not total or wanted <= free:
        return None
    return (wanted - free + GIB / 4) / total


def _concurrency_low(case: _Case) -> _Advice:
    tokens, longest = case.number("pool_tokens"), case.number("max_model_len")
    if tokens is not None and longest is not None and tokens >= 512:
        fitting = math.floor(min(tokens / 2, longest) / 256) * 256
        yield Action(
            f"If requests are shorter, lower --max-model-len from {longest:.0f} to {fitting:.0f} at the next restart: "
            "two of the longest then fit.",
            cost=_SHORTER,
        )
    else:
        yield Action("If requests are shorter, lower --max-model-len at the next restart.", cost=_SHORTER)
    yield _FP8
    yield Action("Else use more GPUs (--tensor-parallel-size), or a smaller model.", cost=_MORE_GPUS)


def _budget_overrun(case: _Case) -> _Advice:
    over, total = case.number("overrun_bytes"), case.number("total_bytes")
    yield (
        "Nothing is broken yet: contexts, NCCL and, in older versions, graphs come on top of the budget. Whoever else "
        "counts on the rest of the device has that much less."
    )
    if over is not None and total:
        yield Action(
            f"To keep the promise, lower {case.less(over / total)} at the next restart.",
            cost=f"the KV pool gets about {units.size(over)} smaller",
        )
        yield (
            "If that is normal for this engine, tell so: detection.overrides with budget_overrun.allowance of "
            f"{math.ceil(over / 2**28) * 256}MiB."
        )
    fixed = FLAGS["--kv-cache-memory-bytes"]
    if case.has(fixed) is not False:
        yield Action(
            f"Where neighbours need a fixed share, --kv-cache-memory-bytes sets the pool{case.since(fixed)}.",
            risk="profiling is then left out, and what fits is up to you",
        )


def _margin_thin(case: _Case) -> _Advice:
    fitting, now, floor = case.number("fitting_utilization"), case.utilization, case.number("free_floor_bytes")
    missing = max(0.0, GIB - floor) if floor is not None else None
    if fitting is not None and now is not None:
        yield Action(
            f"At the next restart set --gpu-memory-utilization to {fitting:g} instead of {now:g}: 1 GiB stays free.",
            cost=f"the KV pool gets about {units.size(missing)} smaller" if missing else _SMALLER_POOL,
        )
    else:
        yield Action("At the next restart lower --gpu-memory-utilization so that 1 GiB stays free.", cost=_SMALLER_POOL)
    yield Action(f"Or lower {case.smaller_batches}: a forward pass then asks for less at once.", cost=_SLOWER_PROMPTS)
    yield "It need not be now: it has run like this since its start."


def _headroom_low(case: _Case) -> _Advice:
    floor, level = case.number("free_floor_bytes"), case.number("level_bytes")
    gone = f" the {units.size(level - floor)}" if floor is not None and level is not None else " what"
    yield f"Look who took{gone} that were free before: oomwatch check lists the device's memory by owner."
    yield "A neighbour or a left-over process: stop it."
    if case.pages:
        yield Action(
            "The engine itself: take it out of the load balancer, let it finish its requests and restart it, before an "
            "allocation fails and ends it in the middle of them.",
            cost=_RESTART,
        )
    else:
        yield Action(
            "The engine itself: restart it at a quiet moment. The first allocation that fails ends it.", cost=_RESTART
        )


def _kv_exhaustion(case: _Case) -> _Advice:
    yield "Send less to this engine: move load to others, add a replica, or turn some requests away."
    yield from _fewer_at_once(case)
    yield _FP8
    yield "Look whether few requests hold most of it (very long outputs): limit max_tokens where clients allow it."


def _preemption_pressure(case: _Case) -> _Advice:
    yield "No emergency: each preempted request is computed anew, which costs time and throughput."
    yield from _fewer_at_once(case)
    yield "If it stays like this at usual load, the pool is too small for it: add a replica or GPUs."


def _fewer_at_once(case: _Case) -> _Advice:
    watermark = case.has(_WATERMARK) is not False
    if watermark:
        yield Action(
            "At the next restart set the scheduler's watermark to 0.02: far fewer running requests are thrown out"
            f"{case.since(_WATERMARK)}.",
            cost="new requests are let in later",
        )
    running = case.number("running")
    limit, fewer = case.sequences, running is not None and running >= 2
    fewer = fewer and (limit is None or limit > (running or 0))
    bound = f"{f' from {limit}' if limit else ''} to about {running:.0f}, as many as run now" if fewer else ""
    lower = "Or lower" if watermark else "At the next restart lower"
    yield Action(f"{lower} --max-num-seqs{bound}, so that fewer are computed twice.", cost=_QUEUE)


def _admission_stall(case: _Case) -> _Advice:
    running = case.number("running")
    if running and case.sequences in (None, round(running)):
        yield Action(
            f"If --max-num-seqs is {running:.0f}, that is the limit, not memory: raise it at the next restart, for the "
            "pool has room.",
            cost="activations take more of the budget",
        )
    else:
        yield "Look in its log for a request that can never fit, and abort it."
    if case.connector:
        yield "Look at the other side of the KV transfer: requests that wait for it are not admitted."
    yield "Requests for more LoRA adapters at once than --max-loras allows wait for one to be done."
    yield Action(f"If nothing moves, take it out of the load balancer and restart it. {_SAVE}", cost=_LOST)


def _ranks_unbalanced(case: _Case) -> _Advice:
    rank, roomy = case.text("rank"), case.text("free_rank")
    which = f" (rank {rank} is full, rank {roomy} has room)" if rank and roomy else ""
    yield (
        f"Look at what spreads requests over the ranks{which}: taking turns ignores their length, and sessions that "
        "stick to a rank pile up."
    )
    yield "Have it choose by queue or by KV usage of each rank; both are on this page and in the metrics."
    yield "Nothing has to be restarted: there is room, in the wrong place."


def _engine_stuck(case: _Case) -> _Advice:
    if case.finding.state == "info":
        yield "Send it one request: if it is answered, the gauges were left over from an abort, and all is well."
        yield "If it is not answered, it hangs: take it out of the load balancer and restart it."
        return
    yield "Take it out of the load balancer: its /health may well be green."
    yield _SAVE
    ranks = case.listed("ranks")
    several = f" Rank {', '.join(ranks)} hangs; all ranks have to be restarted together." if len(ranks) > 1 else ""
    yield Action(f"Restart it: it does not recover by itself.{several}", cost=_LOST)


def _orphan_memory(case: _Case) -> _Advice:
    pids = case.listed("pids")
    if pids:
        yield f"Look what they are: ps -o pid,ppid,lstart,user,args -p {','.join(pids[:10])}."
        yield Action(
            "Workers that a dead engine left behind: kill them, with kill -9 if they stay. Nothing else frees it.",
            risk="what belongs to somebody dies: look first",
        )
        yield "If they belong there, name them under neighbours in the configuration."
    else:
        yield (
            "No listed process holds it: look for one of another container with fuser -v /dev/nvidia* on the host, and "
            "end it."
        )
        yield Action(
            "If there is none, reset the GPU (nvidia-smi -r) once its engines are stopped.",
            cost="everything on that GPU is stopped",
        )


def _runtime_oom(case: _Case) -> _Advice:
    if case.pages or case.finding.killer == "fragmentation":
        does = "if nothing does: it does not come back by itself" if case.pages else "at a quiet moment"
        yield Action(f"Restart the engine {does}.", cost=_RESTART)
    if case.text("cause") == "race":
        yield "More was free than it asked for: look whether a neighbour takes memory now and then, and keep it off."
    elif case.finding.killer == "fragmentation":
        yield "There was enough memory, in pieces too small: that restart puts it together, for a while."
        if case.expandable:
            yield f"At that restart, {case.expandable}: the driver then puts pieces together."
    else:
        yield "There was too little memory, whatever the error's text says of fragmentation: its hint does not help."
    wanted, free, share = case.number("wanted_bytes"), case.number("free_bytes"), _short_share(case)
    missing = f": {units.size(wanted - free)} were missing" if share and wanted is not None and free is not None else ""
    yield Action(
        f"Lower {case.less(share or 0.02)}{missing}. What is outside the KV pool gets room.", cost=_SMALLER_POOL
    )
    yield _smaller_allocations(case)


def _smaller_allocations(case: _Case) -> Action:
    return Action(
        f"Or lower {case.smaller_batches}, which makes the largest single allocation smaller.", cost=_SLOWER_PROMPTS
    )


def _crash_loop(case: _Case) -> _Advice:
    first = case.number("first_death")
    when = f" of {units.moment(first)}" if first is not None else ""
    yield f"Read the end of its log before the first death{when}: later ones often only repeat it."
    yield "Undo what changed before that: version, flags, model, driver, neighbours on the GPU."
    yield Action(
        "Until the cause is found keep requests away from it: each restart takes its requests with it.",
        cost="others have to serve them",
    )


# --- fragmentation and leaks -------------------------------------------------------------------------------------


def _restarted(when: str, why: str) -> Action:
    return Action(f"Let it finish its requests and restart it{when or ' at a quiet moment'}: {why}.", cost=_RESTART)


def _allocator_fragmentation(case: _Case) -> _Advice:
    when = "Let it finish its requests and restart it now" if case.pages else "Restart it at a quiet moment"
    yield Action(
        f"{when}: the pieces are then one again, for a while. The next large request may fail otherwise.", cost=_RESTART
    )
    if case.expandable:
        yield f"At that restart, {case.expandable}: the driver then puts pieces together."
    wanted, reach = case.number("largest_transient_bytes"), case.number("reach_bytes")
    if wanted is not None and reach is not None and wanted > reach:
        yield Action(
            f"Or lower {case.less(0.02)}: {units.size(wanted - reach)} are missing in one piece, and what is outside "
            "the KV pool gets room.",
            cost=_SMALLER_POOL,
        )
    else:
        yield Action(f"Or lower {case.less(0.02)}: what is outside the KV pool gets room.", cost=_SMALLER_POOL)
    yield _smaller_allocations(case)


def _unaccounted_growth(case: _Case) -> _Advice:
    when = case.before()
    yield _restarted(when, "that gives all of it back")
    if case.expandable:
        yield f"At that restart, {case.expandable}: the pieces are then used again, and the growth ends."
    yield "Look what asks for ever other sizes: multimodal requests, prompts of very different lengths, LoRA adapters."
    if not case.pages:
        yield Action(f"To win time, lower {case.less(0.02)} at that restart.", cost=_SMALLER_POOL)


def _kv_tail_waste(case: _Case) -> _Advice:
    size = case.number("block_size")
    if size is not None and size >= 32:
        yield Action(
            f"At the next restart lower --block-size from {size:.0f} to {size / 2:.0f}: the waste halves.",
            risk="attention backends that cannot use it refuse to start",
        )
    else:
        yield "The blocks are as small as they get: nothing is to be done."
    yield "It is no danger: it makes the pool a little smaller than it looks, and cannot grow."


def _kv_block_leak(case: _Case) -> _Advice:
    if case.text("method") == "wedge":
        yield "Take it out of the load balancer: it serves no more."
        yield _SAVE
        yield Action("Restart it now: blocks that are lost come back by nothing else.", cost=_LOST)
    else:
        yield _SAVE
        when = case.before()
        yield _restarted(when, "blocks that are lost come back by nothing else")
    if case.has(TRUE_AFTER_ABORTS) is False:
        yield (
            "Before that send it one request: releases before 0.10.2 may show old numbers after an abort, and if they "
            "fall to 0 nothing was lost."
        )
    if case.connector:
        yield (
            "Look at the other side of the KV transfer: transfers that were aborted or never fetched hold blocks. If "
            "they are held by right for longer, raise detection's kv_block_leak.hold_time for this engine."
        )
    yield "Look in its log for what was aborted or failed when the floor rose. Update vLLM: such bugs were fixed."


def _gpu_memory_leak(case: _Case) -> _Advice:
    when = case.before()
    yield _restarted(when, "that gives all of it back")
    if case.number("sleeps"):
        yield "What is left after each sleep adds up: have whatever sends it to sleep restart it every so many times."
    elif case.expandable and case.number("fragments_growth_bytes") is None:
        yield f"To learn which it is, {case.expandable}: if the growth ends, it was fragmentation."
    yield "Look what came with the growth: multimodal requests, new LoRA adapters, sleep and wake-up, longer prompts."
    if not case.pages:
        yield Action(f"To win time, lower {case.less(0.02)} at that restart.", cost=_SMALLER_POOL)


def _host_memory_leak(case: _Case) -> _Advice:
    when = case.before()
    yield _restarted(when, "else the kernel kills it")
    left = case.number("left_bytes")
    room = f" ({units.size(left)} are left)" if left is not None else ""
    yield f"To win time, raise the memory limit of its container, or free memory on the host{room}."
    yield "Look which process grows, and report it with py-spy's or memray's view of it; update vLLM."


# --- health ------------------------------------------------------------------------------------------------------


def _metrics_missing(case: _Case) -> _Advice:
    if case.text("page") == "stats_disabled":
        yield Action(
            "Start it without --disable-log-stats: without statistics its KV pool cannot be watched.", cost=_RESTART
        )
        return
    yield "Look whether its version is newer than oomwatch knows: update oomwatch, and report the version."
    yield "If it runs vLLM's Rust front-end, which does not have all series, go back to the Python one where you can."
    yield "Until then the verdicts that need these series are unknown, not clear."


def _source_stale(case: _Case) -> _Advice:
    if case.facts is not None:
        yield "Look whether its process runs, and read the end of its log."
        if "refused" in case.text("reason"):
            yield "If it runs, look whether it listens at the address that oomwatch asks: nothing does now."
        else:
            yield "If it runs and is only slow to answer, raise its timeout in the configuration."
    else:
        yield "Run nvidia-smi on the node and look for Xid lines in dmesg."
    yield "If all of that is well, read oomwatch's own log."


def _gpu_lost(_case: _Case) -> _Advice:
    yield "Drain the node: its engines on that device are dead or will be."
    yield "Look for Xid lines in dmesg and save the output of nvidia-bug-report.sh."
    yield Action(
        "Reboot the node. If it happens again, have the card replaced.", cost="everything on the node is stopped"
    )


def _nvml_stuck(_case: _Case) -> _Advice:
    yield "Look for Xid lines in dmesg, and whether nvidia-smi hangs too; more calls only add processes that hang."
    yield Action(
        "If engines on that device still answer, let them finish; then drain the node and reboot it.",
        cost="everything on the node is stopped",
    )
    yield "What hangs in the driver cannot be killed, and oomwatch goes on reading the other devices."


_TABLE: Mapping[str, Callable[[_Case], _Advice]] = {
    "startup-refused": _startup_refused,
    "startup-oom": _startup_oom,
    "concurrency-low": _concurrency_low,
    "budget-overrun": _budget_overrun,
    "margin-thin": _margin_thin,
    "headroom-low": _headroom_low,
    "kv-exhaustion": _kv_exhaustion,
    "preemption-pressure": _preemption_pressure,
    "admission-stall": _admission_stall,
    "ranks-unbalanced": _ranks_unbalanced,
    "engine-stuck": _engine_stuck,
    "orphan-memory": _orphan_memory,
    "runtime-oom": _runtime_oom,
    "crash-loop": _crash_loop,
    "allocator-fragmentation": _allocator_fragmentation,
    "unaccounted-growth": _unaccounted_growth,
    "kv-tail-waste": _kv_tail_waste,
    "kv-block-leak": _kv_block_leak,
    "gpu-memory-leak": _gpu_memory_leak,
    "host-memory-leak": _host_memory_leak,
    "metrics-missing": _metrics_missing,
    "source-stale": _source_stale,
    "gpu-lost": _gpu_lost,
    "nvml-stuck": _nvml_stuck,
}
