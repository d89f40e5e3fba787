"""The families of runs: what is healthy and must stay silent, and what is broken and must be found.

A scenario is drawn from a family by a seed and holds every parameter of a run in plain numbers, so that a set of runs
is fixed by its manifest. Families are those of the project's notes on detection, section 4.2.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import numpy as np

from benchmarks.detection.memory import GIB, MIB, GpuFault, GpuSpec, HostSpec
from benchmarks.detection.spec import DAY, HANG, NEVER, RESTART, SLEEP, STALL, EngineSpec, Event, Holds
from benchmarks.detection.traffic import Traffic

HOUR = 3600.0


class SetSpec(NamedTuple):
    """What a set of runs may draw from. Clients and rows of one set are no other's."""

    name: str
    seed: int
    clients: dict[str, tuple[int, ...]]  # by source of rates
    lengths: tuple[str, ...]
    rows: str


class KvLeak(NamedTuple):
    """A leak of blocks, in words: made into probabilities once the requests are known.

    ``hours`` is how long the pool would last; for a one-off loss ``share`` of the pool goes at once.
    """

    kind: str = ""  # abort, finish, hold, one-off
    onset: float = NEVER
    hours: float = 0.0
    share: float = 0.0
    blocks: float = 1.0  # of an abort: how many times the least that it takes are lost, correspondingly seldom


class Sampling(NamedTuple):
    """How the node is watched. Seconds and shares."""

    interval: float = 15.0
    jitter: float = 0.3
    lost: float = 0.002  # scrapes that fail
    outages: int = 0  # of the network, 5 to 30 minutes each


class Scenario(NamedTuple):
    """One run, before it is simulated: every parameter in plain numbers."""

    set: str
    family: str
    number: int
    seed: int
    fault: str = ""  # class of fault, by FAULT_CLASSES; empty when healthy
    days: float = 14.0
    ranks: int = 1
    version: str = "0.32.0"
    engine: EngineSpec = EngineSpec()
    traffic: Traffic = Traffic()
    holds: Holds = Holds()
    connector: bool = False
    leak: KvLeak = KvLeak()
    events: tuple[Event, ...] = ()
    gpu: GpuSpec = GpuSpec()
    gpu_fault: GpuFault = GpuFault()
    host: HostSpec = HostSpec()
    host_hours: float = 0.0  # a leak that reaches the limit so long after its onset
    host_onset: float = NEVER
    host_per_request: bool = True
    sampling: Sampling = Sampling()

    @property
    def name(self) -> str:
        return f"{self.set}/{self.family}/{self.number}"


# A class of fault, and what a detector must say to have found it.
FAULT_CLASSES: dict[str, tuple[str, ...]] = {
    "kv-leak": ("kv-block-leak",),
    "gpu-leak": ("gpu-memory-leak", "unaccounted-growth"),
    "host-leak": ("host-memory-leak",),
    "exhaustion": ("kv-exhaustion", "preemption-pressure"),
    "stuck": ("engine-stuck",),
    "stall": ("admission-stall", "engine-stuck"),
    "orphan": ("orphan-memory",),
    "overrun": ("budget-overrun",),
}

Draw: TypeAlias = np.random.Generator
Family: TypeAlias = Callable[[Scenario, Draw], Scenario]

CARDS = (
    ("NVIDIA A10", 24.0),
    ("NVIDIA A100-SXM4-40GB", 40.0),
    ("NVIDIA L40S", 48.0),
    ("NVIDIA A100-SXM4-80GB", 80.0),
    ("NVIDIA H100 80GB HBM3", 80.0),
    ("NVIDIA H200", 141.0),
)
VERSIONS = ("0.10.2", "0.16.0", "0.20.2", "0.23.0", "0.27.1", "0.32.0", "0.32.0", "0.32.0")


def draw(family: str, spec: SetSpec, index: int) -> Scenario:
    """The scenario of this family and index in a set: the same at each call, whatever else is drawn."""
    seed = int(np.random.SeedSequence([spec.seed, _number(family), index]).generate_state(1)[0])
    rng = np.random.default_rng(seed)
    return FAMILIES[family](_base(Scenario(spec.name, family, index, seed), spec, rng), rng)


def _number(name: str) -> int:
    return int.from_bytes(name.encode(), "big") % (1 << 61)


def _base(scenario: Scenario, spec: SetSpec, rng: Draw) -> Scenario:
    source = str(rng.choice(sorted(spec.clients)))
    clients = spec.clients[source]
    count = min(int(rng.integers(2, 9)), len(clients))
    lengths = str(rng.choice(spec.lengths))
    version = str(rng.choice(VERSIONS))
    name, size = CARDS[int(rng.integers(len(CARDS)))]
    blocks = {"conversation": (2000, 12000), "code": (3000, 10000), "long": (20000, 60000)}[lengths]
    engine = EngineSpec(
        blocks=int(_log_uniform(rng, *blocks)),
        block_size=16,
        max_num_seqs=int(rng.choice([128, 256])),
        max_batched_tokens=int(rng.choice([2048, 8192, 16384])),
        step_seconds=_rounded(rng.uniform(0.012, 0.05)),
        seconds_per_seq=_rounded(rng.uniform(5e-5, 2e-4)),
        seconds_per_prefill_token=_rounded(rng.uniform(2e-5, 5e-5) * (1 if lengths == "long" else 2)),
        patience=_rounded(rng.uniform(30, 300)),
    )
    traffic = Traffic(
        source=source,
        clients=tuple(sorted(int(c) for c in rng.choice(clients, count, replace=False))),
        shift=int(rng.integers(0, 2016)),
        lengths=lengths,
        rows=spec.rows,
        longest=131072 if lengths == "long" else 16384,
        load=_rounded(rng.uniform(0.15, 0.6)),
        leave_share=_rounded(rng.uniform(0.01, 0.08)),
        prefixes=int(rng.choice([0, 0, 20])),
        prefix_tokens=int(rng.choice([500, 1500])),
        prefix_share=_rounded(rng.uniform(0.2, 0.6)),
    )
    gpu = GpuSpec(
        name=name,
        total=size * GIB,
        reserved=size * 0.007 * GIB,
        utilization=float(rng.choice([0.85, 0.9, 0.9, 0.92])),
        weights=0.4 * size * GIB,
        overhead=float(rng.integers(300, 600)) * MIB,
        activations=float(rng.integers(20, 45)) / 1000 * size * GIB,
    )
    host = HostSpec(
        base=float(rng.integers(3, 12)) * GIB,
        limit=float(rng.choice([32, 64, 128])) * GIB,
        warmup=_rounded(rng.uniform(0.2, 2.5)) * GIB,
        warmup_requests=_rounded(rng.uniform(500, 10000)),
        arenas=_rounded(rng.uniform(0.05, 0.6)) * GIB,
        cache=float(rng.choice([0, 0, 2, 4])) * GIB,
        cache_requests=_rounded(rng.uniform(5e3, 2e5)),
        files=_rounded(rng.uniform(1, 4)) * GIB,
    )
    ranks = int(rng.choice([1, 1, 1, 2]))
    drawn = scenario._replace(engine=engine, traffic=traffic, gpu=gpu, host=host, ranks=ranks)
    return with_version(drawn, version)


def with_version(scenario: Scenario, version: str) -> Scenario:
    """What an engine of this version does: when its gauges move, and how it admits."""
    at = tuple(int(part) for part in version.split("."))
    engine = scenario.engine._replace(
        stats_after_abort=at >= (0, 10, 2),
        reserve_full_prompt=at >= (0, 19),
        polls_holds=at >= (0, 22),
    )
    return scenario._replace(version=version, engine=engine)


def _traffic(scenario: Scenario, **changes: object) -> Scenario:
    return scenario._replace(traffic=scenario.traffic._replace(**changes))  # type: ignore[arg-type] # by field name


def _log_uniform(rng: Draw, low: float, high: float) -> float:
    return float(np.exp(rng.uniform(np.log(low), np.log(high))))


def _rounded(value: float) -> float:
    """Four digits: enough for a parameter, and the same in every manifest."""
    return float(f"{value:.4g}")


def _uniform(rng: Draw, low: float, high: float) -> float:
    return _rounded(rng.uniform(low, high))


# --- healthy -------------------------------------------------------------------------------------------------------


def diurnal(s: Scenario, rng: Draw) -> Scenario:
    return _traffic(s, load=_uniform(rng, 0.3, 0.7))


def overload(s: Scenario, rng: Draw) -> Scenario:
    """More than it can serve in the busy hours, at full throughput: success, not a fault."""
    s = s._replace(engine=s.engine._replace(patience=_uniform(rng, 20, 90)))
    return with_version(_traffic(s, load=_uniform(rng, 1.1, 1.8), rate_cap=20.0, prefill_cap=0.8), "0.32.0")


def traffic_growth(s: Scenario, rng: Draw) -> Scenario:
    growth = _uniform(rng, 0.03, 0.1)
    return _traffic(s, growth=growth, load=_rounded(0.85 / (1 + growth) ** s.days))


def always_busy(s: Scenario, rng: Draw) -> Scenario:
    return _traffic(s, floor=_uniform(rng, 0.4, 0.8), load=_uniform(rng, 0.3, 0.7))


def idle_nights(s: Scenario, rng: Draw) -> Scenario:
    return _traffic(s, idle_hours=_uniform(rng, 4, 9))


def prefix_tenants(s: Scenario, rng: Draw) -> Scenario:
    return _traffic(
        s,
        prefixes=int(rng.integers(20, 120)),
        prefix_share=_uniform(rng, 0.5, 0.95),
        prefix_tokens=int(rng.integers(500, 3000)),
        prefixes_arrive=True,
    )


def connector_hold(s: Scenario, rng: Draw) -> Scenario:
    s = with_version(s, str(rng.choice(["0.16.0", "0.23.0", "0.32.0"])))
    timeout = 30.0 if s.engine.polls_holds else float(rng.choice([120.0, 480.0]))
    holds = Holds(1.0, _uniform(rng, 0.3, 5), _uniform(rng, 0.005, 0.1), timeout)
    held = holds.seconds + holds.stuck_share * timeout
    return _traffic(s._replace(holds=holds, connector=True), load=_uniform(rng, 0.2, 0.6), held_seconds=_rounded(held))


def reclaimable_hold(s: Scenario, rng: Draw) -> Scenario:
    """A store keeps up to four tenths of the pool, and gives it back when the room is needed."""
    holds = Holds(kept_share=_uniform(rng, 0.02, 1.0), kept_cap=_uniform(rng, 0.15, 0.4))
    return s._replace(holds=holds, connector=True)


def daily_restarts(s: Scenario, rng: Draw) -> Scenario:
    hour, down = rng.uniform(0, 24), rng.uniform(60, 400)
    begins = [day * DAY + hour * HOUR + rng.uniform(-300, 300) for day in range(int(s.days))]
    return s._replace(events=tuple(Event(round(b, 1), round(b + down, 1), RESTART) for b in begins if b > 0))


def context_drift(s: Scenario, rng: Draw) -> Scenario:
    return _traffic(s, prompt_growth=_uniform(rng, 0.03, 0.12), load=_uniform(rng, 0.2, 0.45))


def bursts(s: Scenario, rng: Draw) -> Scenario:
    return _traffic(s, burst_cv=_uniform(rng, 3, 6), load=_uniform(rng, 0.2, 0.6))


def lora_churn(s: Scenario, rng: Draw) -> Scenario:
    gpu = s.gpu._replace(
        lora_interval=_rounded(_log_uniform(rng, HOUR, DAY)), lora_bytes=float(rng.integers(10, 60)) * MIB
    )
    return s._replace(gpu=gpu)


def sleep_wake(s: Scenario, rng: Draw) -> Scenario:
    s = with_version(s, "0.32.0")
    begin, hours = rng.uniform(0.5, 2), rng.uniform(2, 5)
    nights = [day * DAY + begin * HOUR for day in range(int(s.days))]
    events = tuple(Event(round(b, 1), round(b + hours * HOUR, 1), SLEEP) for b in nights)
    return _traffic(s._replace(events=events), idle_hours=_rounded(begin + hours + 0.5))


def model_reload(s: Scenario, rng: Draw) -> Scenario:
    begins = np.sort(rng.uniform(0.3, s.days, int(rng.integers(2, 7)))) * DAY
    events = tuple(Event(round(float(b), 1), round(float(b + rng.uniform(200, 900)), 1), RESTART) for b in begins)
    return s._replace(events=events, gpu=s.gpu._replace(reload_spread=_uniform(rng, 0.2, 2) * GIB))


def noisy_tenant(s: Scenario, rng: Draw) -> Scenario:
    gpu = s.gpu._replace(
        neighbour=float(rng.integers(100, 700)) * MIB, neighbour_interval=_rounded(rng.uniform(0.2, 2) * DAY)
    )
    return _traffic(s._replace(gpu=gpu), noisy=_uniform(rng, 0.5, 1.5), load=_uniform(rng, 0.3, 0.6))


def missing_scrapes(s: Scenario, rng: Draw) -> Scenario:
    return s._replace(sampling=Sampling(lost=_uniform(rng, 0.03, 0.2), outages=int(rng.integers(3, 15))))


def stale_gauges(s: Scenario, rng: Draw) -> Scenario:
    """Before 0.10.2 the gauges stay where they were when an abort empties the engine."""
    s = with_version(s, "0.9.2")
    return _traffic(s, leave_share=_uniform(rng, 0.1, 0.5), load=_uniform(rng, 0.1, 0.5), prefixes=0)


def saturated(s: Scenario, rng: Draw) -> Scenario:
    """Never idle and never below its usual load: batches are always full and somebody always waits."""
    engine = s.engine._replace(max_num_seqs=int(rng.choice([16, 32, 48])), patience=_uniform(rng, 60, 180))
    blocks = int(engine.max_num_seqs * rng.uniform(1.3, 2.5) * {"long": 800, "code": 130}.get(s.traffic.lengths, 85))
    s = s._replace(engine=engine._replace(blocks=max(blocks, 8300 if s.traffic.lengths == "long" else 1100)), days=7.0)
    return _traffic(s, constant=True, load=_uniform(rng, 1.5, 2.0), rate_cap=20.0)


HEALTHY: dict[str, Family] = {
    f.__name__: f
    for f in (
        diurnal,
        overload,
        traffic_growth,
        always_busy,
        idle_nights,
        prefix_tenants,
        connector_hold,
        reclaimable_hold,
        daily_restarts,
        context_drift,
        bursts,
        lora_churn,
        sleep_wake,
        model_reload,
        noisy_tenant,
        missing_scrapes,
        stale_gauges,
        saturated,
    )
}

# What goes on while a fault grows. Restarts and sleep are left out: they end a leak, and with it the label.
BACKGROUNDS = (
    diurnal,
    traffic_growth,
    always_busy,
    idle_nights,
    prefix_tenants,
    context_drift,
    bursts,
    lora_churn,
    noisy_tenant,
    missing_scrapes,
)


def _on_background(s: Scenario, rng: Draw) -> Scenario:
    s = BACKGROUNDS[int(rng.integers(len(BACKGROUNDS)))](s, rng)
    return s._replace(ranks=2 if rng.random() < 0.1 else 1)


# --- leaks of blocks -------------------------------------------------------------------------------------------------


def _leaking(s: Scenario, rng: Draw, kind: str) -> Scenario:
    onset, hours = rng.uniform(1, 2.5) * DAY, _log_uniform(rng, 1, 240)
    leak = KvLeak(kind, round(onset, 1), _rounded(hours), blocks=_uniform(rng, 1, 6))
    return s._replace(fault="kv-leak", leak=leak, days=_rounded(min(14.0, onset / DAY + 1 + 1.5 * hours / 24)))


def kv_abort(s: Scenario, rng: Draw) -> Scenario:
    """Each aborted request loses some blocks."""
    s = _on_background(s, rng)
    return _leaking(_traffic(s, leave_share=max(0.03, s.traffic.leave_share)), rng, "abort")


def kv_finish(s: Scenario, rng: Draw) -> Scenario:
    """Now and then a finished request loses all its blocks."""
    return _leaking(_on_background(s, rng), rng, "finish")


def kv_connector(s: Scenario, rng: Draw) -> Scenario:
    """The connector that holds blocks of finished requests never gives some of them back."""
    return _leaking(connector_hold(_on_background(s, rng), rng), rng, "hold")


def kv_one_off(s: Scenario, rng: Draw) -> Scenario:
    """One large loss, and nothing after it."""
    s = _leaking(_on_background(s, rng), rng, "one-off")
    leak = s.leak._replace(share=_uniform(rng, 0.3, 0.95), hours=0.0)
    return s._replace(leak=leak, days=_rounded(leak.onset / DAY + 2))


def kv_saturated(s: Scenario, rng: Draw) -> Scenario:
    """A leak in an engine that shows no quiet moment."""
    return _leaking(saturated(s, rng), rng, "finish")


# --- leaks of device and host memory ---------------------------------------------------------------------------------


def _gpu_leak(s: Scenario, rng: Draw, low: float, high: float) -> tuple[Scenario, float, float]:
    s = _on_background(s, rng)
    onset, per_hour = round(rng.uniform(1, 2.5) * DAY, 1), _rounded(_log_uniform(rng, low, high) * MIB)
    room = (1 - s.gpu.utilization) * s.gpu.total - s.gpu.overhead + s.gpu.activations
    days = min(10.0, onset / DAY + 0.3 + 1.2 * room / per_hour / 24)
    return s._replace(fault="gpu-leak", days=_rounded(days)), onset, per_hour


def gpu_steady(s: Scenario, rng: Draw) -> Scenario:
    s, onset, per_hour = _gpu_leak(s, rng, 32, 512)
    return s._replace(gpu_fault=GpuFault(onset, per_hour=per_hour))


def gpu_per_request(s: Scenario, rng: Draw) -> Scenario:
    """``per_hour`` is what it comes to on average: the requests after the onset share it."""
    s, onset, per_hour = _gpu_leak(s, rng, 32, 512)
    return s._replace(gpu_fault=GpuFault(onset, per_hour=per_hour, per_request=1.0))


def gpu_fragmentation(s: Scenario, rng: Draw) -> Scenario:
    s, onset, per_hour = _gpu_leak(s, rng, 32, 256)
    return s._replace(gpu_fault=GpuFault(onset, steps_per_hour=_rounded(per_hour / (11 * MIB))))


def gpu_slow(s: Scenario, rng: Draw) -> Scenario:
    """Below what a class of its own asks for: 4 to 32 MiB an hour."""
    s, onset, per_hour = _gpu_leak(s, rng, 4, 32)
    return s._replace(gpu_fault=GpuFault(onset, per_hour=per_hour))


def _host_leak(s: Scenario, rng: Draw, per_request: bool) -> Scenario:
    s = _on_background(s, rng)
    onset, hours = round(rng.uniform(1, 2.5) * DAY, 1), _rounded(_log_uniform(rng, 10, 168))
    days = min(14.0, onset / DAY + 0.3 + 1.3 * hours / 24)
    return s._replace(
        fault="host-leak", host_hours=hours, host_onset=onset, host_per_request=per_request, days=_rounded(days)
    )


def host_requests(s: Scenario, rng: Draw) -> Scenario:
    return _host_leak(s, rng, True)


def host_steady(s: Scenario, rng: Draw) -> Scenario:
    return _host_leak(s, rng, False)


# --- capacity --------------------------------------------------------------------------------------------------------


def _onset(rng: Draw) -> float:
    return float(round(rng.uniform(0.4, 1.6) * DAY, 1))


def preemption_storm(s: Scenario, rng: Draw) -> Scenario:
    """Within hours prompts grow beyond what the pool can hold side by side: fewer run, they push each other out, and
    throughput falls while the queue grows."""
    day = _rounded(_onset(rng) / DAY)
    engine = s.engine._replace(
        blocks=int(rng.integers(2000, 6000)),
        max_num_seqs=256,
        patience=_uniform(rng, 120, 600),
        seconds_per_prefill_token=_uniform(rng, 5e-5, 2e-4),
    )
    s = s._replace(engine=engine, ranks=1, fault="exhaustion", days=_rounded(day + 0.8))
    return _traffic(
        with_version(s, str(rng.choice(["0.16.0", "0.32.0"]))),
        lengths="conversation",
        longest=16384,
        constant=True,
        load=_uniform(rng, 0.45, 0.75),
        growth=_uniform(rng, 0, 2),
        growth_from=day,
        prompt_growth=_uniform(rng, 15, 80),
        output_scale=_uniform(rng, 1, 3),
        rate_cap=20.0,
        prefixes=0,
    )


def stuck_engine(s: Scenario, rng: Draw) -> Scenario:
    """No step any more under load; the operator restarts it later."""
    begin = _onset(rng)
    end = round(begin + rng.uniform(0.5, 3) * HOUR, 1)
    s = _traffic(_on_background(s, rng), floor=0.1)
    events = (Event(begin, end, HANG), Event(end, round(end + 300, 1), RESTART))
    return s._replace(fault="stuck", events=events, ranks=1, days=_rounded(end / DAY + 0.2))


def admission_stall(s: Scenario, rng: Draw) -> Scenario:
    """The scheduler admits nobody although the pool has room."""
    begin = _onset(rng)
    end = round(begin + rng.uniform(0.5, 3) * HOUR, 1)
    s = _traffic(_on_background(s, rng), floor=0.2, load=_uniform(rng, 0.3, 0.7))
    s = s._replace(engine=s.engine._replace(patience=_uniform(rng, 120, 600)))
    events = (Event(begin, end, STALL), Event(end, round(end + 300, 1), RESTART))
    return s._replace(fault="stall", events=events, ranks=1, days=_rounded(end / DAY + 0.2))


def _free_room(s: Scenario) -> float:
    return (s.gpu.total - s.gpu.reserved) * (1 - s.gpu.utilization) - s.gpu.overhead


def _roomy(s: Scenario, rng: Draw) -> Scenario:
    """On a card where something else fits beside the engine."""
    name, size = CARDS[int(rng.integers(2, len(CARDS)))]
    gpu = s.gpu._replace(name=name, total=size * GIB, utilization=float(rng.choice([0.8, 0.85, 0.9])))
    return s._replace(gpu=gpu._replace(reserved=size * 0.007 * GIB, activations=_rounded(size * 0.025 * GIB)), ranks=1)


def orphan_memory(s: Scenario, rng: Draw) -> Scenario:
    """Somebody else's process, or a dead engine's worker, sits on the device."""
    s = _roomy(_on_background(s, rng), rng)
    size = 1.2 * GIB + rng.random() * max(0.0, 0.8 * _free_room(s) - 1.2 * GIB)
    onset = _onset(rng)
    fault = GpuFault(onset, orphan=_rounded(size))
    return s._replace(fault="orphan", gpu_fault=fault, days=_rounded(onset / DAY + 1))


def budget_overrun(s: Scenario, rng: Draw) -> Scenario:
    """A block outside the budget: graphs captured late, a second context."""
    s = _roomy(_on_background(s, rng), rng)
    onset = _onset(rng)
    size = s.gpu.activations + 0.8 * GIB + rng.random() * 0.7 * max(0.0, _free_room(s) - 0.8 * GIB)
    fault = GpuFault(onset, overrun=_rounded(size))
    return s._replace(fault="overrun", gpu_fault=fault, days=_rounded(onset / DAY + 1))


FAULTY: dict[str, Family] = {
    f.__name__: f
    for f in (
        kv_abort,
        kv_finish,
        kv_connector,
        kv_one_off,
        kv_saturated,
        gpu_steady,
        gpu_per_request,
        gpu_fragmentation,
        gpu_slow,
        host_requests,
        host_steady,
        preemption_storm,
        stuck_engine,
        admission_stall,
        orphan_memory,
        budget_overrun,
    )
}
FAMILIES: dict[str, Family] = {**HEALTHY, **FAULTY}
# Reported apart: no class's mark counts them.
APART = frozenset({"saturated", "kv_saturated", "gpu_slow"})
