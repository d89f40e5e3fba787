"""Hand-built snapshots for tests of what reads them. Sizes are bytes, times unix seconds around NOW."""

from __future__ import annotations

from dataclasses import replace

from oomwatch import units
from oomwatch.attribution import UNKNOWN, held_memory, unowned_memory
from oomwatch.detectors.base import Eta, Evidence, State, Subject, numbers
from oomwatch.enginelog.events import Budget, KvPool
from oomwatch.incidents import Incidents
from oomwatch.observations import (
    HUNG,
    NOT_EXPOSED,
    NOT_READ,
    STALE,
    Absent,
    Adapters,
    AllocationFailure,
    AllocatorReport,
    BlockOwners,
    DriverReport,
    EngineFacts,
    EngineScrape,
    GpuPoll,
    GpuProcess,
    HostMemory,
    HostProcess,
    Maybe,
    Memory,
    MigInstance,
    Pool,
    RankReading,
    RemappedRows,
)
from oomwatch.snapshot import (
    EngineView,
    GpuView,
    HeldProcess,
    Holder,
    MigView,
    Snapshot,
    SourceView,
    StartUpView,
    XidCount,
)
from oomwatch.verdicts import CATALOGUE, Verdict

NOW = 1_790_000_000.0
MIB = 1024**2
GIB = 1024**3


def gpu_uuid(index: int) -> str:
    return f"GPU-{index:08x}-aaaa-bbbb-cccc-000000000000"


def memory(total: int = 80 * GIB, used: int = 70 * GIB, reserved: int | None = 600 * MIB) -> Memory:
    return Memory(total, reserved, used, total - (reserved or 0) - used)


def engine_process(pid: int, used: int | None, engine: str) -> HeldProcess:
    return HeldProcess(pid, used, Holder("engine", engine), "VLLM::EngineCore")


def gpu(index: int = 0, processes: tuple[HeldProcess, ...] = (), read: Maybe[Memory] | None = None) -> GpuView:
    """A healthy device that was just polled; ``read`` is its memory where it differs."""
    shown = memory() if read is None else read
    poll = GpuPoll(
        t=NOW,
        uuid=gpu_uuid(index),
        index=index,
        name="NVIDIA H100 80GB HBM3",
        memory=shown,
        processes=tuple(GpuProcess(process.pid, process.used) for process in processes),
        mig_enabled=False,
        utilization=0.93,
        temperature=61.0,
        power=512.5,
        ecc_uncorrected=0,
        ecc_corrected=3,
        remapped_rows=RemappedRows(1, 0, pending=False, failed=False),
        recovery_action=0,
        pci_bus_id=f"00000000:{index + 0x41:02X}:00.0",
        seconds=0.004,
    )
    return GpuView(
        uuid=poll.uuid,
        index=index,
        name=poll.name,
        poll=poll,
        memory=shown,
        processes=processes,
        held=held_memory(processes),
        unowned=unowned_memory(shown, processes, sliced=False, unified=False),
        last_seen=NOW,
        last_memory=memory(),
    )


def sliced_gpu(index: int) -> GpuView:
    """A device in MIG mode whose own memory may not be read, with one slice that an engine uses and one that fails."""
    forbidden = Absent("NO_PERMISSION")
    process = engine_process(4810, 9 * GIB, "sliced")
    slices = (
        MigView(
            f"MIG-{index:08x}-0001", 7, 0, memory(20 * GIB, 9 * GIB, 64 * MIB), (process,), held_memory((process,)), 0
        ),
        MigView(f"MIG-{index:08x}-0002", 8, 0, Absent("UNKNOWN"), Absent("UNKNOWN"), Absent("UNKNOWN"), forbidden),
    )
    whole = gpu(index, read=forbidden)
    assert whole.poll is not None
    poll = replace(
        whole.poll,
        processes=forbidden,
        mig_enabled=True,
        utilization=Absent("NOT_SUPPORTED"),
        mig=tuple(MigInstance(mig.uuid, mig.gi, mig.ci, mig.memory) for mig in slices),
    )
    return replace(
        whole, poll=poll, processes=forbidden, held=forbidden, unowned=forbidden, mig=slices, last_memory=None
    )


def rank(name: str = "0") -> RankReading:
    return RankReading(
        rank=name,
        usage=0.75,
        running=64.0,
        waiting=12.0,
        waiting_capacity=10.0,
        waiting_deferred=2.0,
        swapped=0.0,
        preemptions=7.0,
        prompt_tokens=1_234_567.0,
        generation_tokens=765_432.0,
        steps=98_765.0,
        finished={"stop": 4_000.0, "length": 120.0, "abort": 3.0},
        prompt_lengths=((100.0, 2_000.0), (1_000.0, 3_900.0), (10_000.0, 4_100.0), (float("inf"), 4_123.0)),
        generation_lengths=((200.0, 3_000.0), (1_000.0, 4_120.0), (float("inf"), 4_123.0)),
        prefix_queries=900_000.0,
        prefix_hits=300_000.0,
        kv_expired=1.0,
        sleep_level="awake",
        gpu_memory_utilization=0.9,
        prefix_caching=True,
        pool=Pool(
            blocks=8_000,
            used=6_000,
            block_size=16,
            tokens=128_000,
            max_concurrency=15.6,
            configured_bytes=48 * GIB,
        ),
    )


def engine(name: str = "llama-8b", ranks: tuple[RankReading, ...] = ()) -> EngineView:
    """A working engine that nothing is known of on the host."""
    scrape = EngineScrape(
        t=NOW, engine=name, state="ok", seconds=0.012, ranks=ranks or (rank(),), model_name="org/llama-8b",
        kv_connector=False, adapters=Adapters(seen=3, slots=4),
    )  # fmt: skip
    return EngineView(
        facts=EngineFacts(name, target="http://127.0.0.1:8000/metrics", max_model_len=8192, vllm_version="0.32.0"),
        state="ok",
        error="",
        scrape=scrape,
        last_answer=scrape,
        last_seen=NOW,
        last_progress=NOW - 1,
    )


def unreachable(view: EngineView) -> EngineView:
    """The same engine once a scrape has failed."""
    return replace(view, state="unreachable", error="connection refused", scrape=None)


def host_process(pid: int, role: str, title_rank: str | None = None, anon: Maybe[int] = 6 * GIB) -> HostProcess:
    return HostProcess(
        t=NOW,
        pid=pid,
        start=NOW - 86_400,
        rss=8 * GIB,
        anon=anon,
        name=f"VLLM::{role}",
        container="f" * 64,
        pod_uid="0b9a2c1e-1111-2222-3333-444455556666",
        memory_limit=64 * GIB,
        engine="llama-8b",
        role=role,
        rank=title_rank,
    )


def allocator(pid: int) -> AllocatorReport:
    """A worker whose free memory is in small pieces, and in which an allocation has failed."""
    statistics = {
        "allocated_bytes.all.current": 60 * GIB,
        "allocated_bytes.all.peak": 62 * GIB,
        "reserved_bytes.all.current": 65 * GIB,
        "reserved_bytes.all.peak": 65 * GIB,
        "active_bytes.all.current": 60 * GIB + 64 * MIB,
        "requested_bytes.all.current": 60 * GIB - 30 * MIB,
        "inactive_split_bytes.all.current": 3 * GIB,
        "segment.all.current": 412,
        "num_alloc_retries": 7,
        "num_ooms": 1,
    }
    return AllocatorReport(
        NOW,
        pid,
        gpu_uuid(0),
        statistics,
        largest_free_block=300 * MIB,
        free=4 * GIB,
        releasable=GIB,
        private_reserved=900 * MIB,
        private_free=20 * MIB,
        free_by_size=((0, 512 * MIB), (MIB, 3 * GIB), (256 * MIB, 512 * MIB)),
        backend="native",
        expandable=False,
        failure=AllocationFailure(NOW - 900, 2 * GIB, 400 * MIB, 61 * GIB, 65 * GIB, 80 * GIB),
    )


def driver(state: str = "ok") -> DriverReport:
    return DriverReport(NOW, state, "", "580.82.07", "13.580.82.07", "13.0", 3)


def started() -> StartUpView:
    """A start that both ways of logging a budget made."""
    measured = Budget(
        total=79 * GIB,
        free=78 * GIB,
        utilization=0.9,
        promised=71 * GIB,
        weights=15 * GIB,
        non_torch=200 * MIB,
        activation=5 * GIB,
        graphs=600 * MIB,
        graphs_estimate=500 * MIB,
        kv_pool=50 * GIB,
    )
    newer = replace(measured, weights=None, non_torch=None, consumed=15 * GIB)
    pool = KvPool(tokens=439_408, max_model_len=8192, concurrency=53.6)
    return StartUpView(
        NOW - 3600,
        "serving",
        NOW - 3540,
        "0.26.0",
        0.9,
        8192,
        budgets=(("0", "TP0", measured), ("0", "TP1", newer)),
        pools=(("0", pool),),
    )


def full() -> Snapshot:
    """A snapshot with a sample of every family."""
    processes = (
        engine_process(4711, 66 * GIB, "llama-8b"),
        HeldProcess(4712, 512 * MIB, Holder("neighbour", "dcgm"), "dcgm-exporter"),
    )
    without_number = (HeldProcess(4713, None, UNKNOWN, "python3"),)
    first = replace(gpu(0, processes), xids=(XidCount(31, 2, NOW - 60), XidCount(137, 1, NOW - 30)))
    serving = replace(
        engine(ranks=(rank("0"), rank("1"))),
        restarts=1,
        processes=(
            host_process(4700, "api_server"),
            host_process(4711, "engine_core", "DP0"),
            host_process(4714, "worker", "DP0_TP0"),
            host_process(4715, "worker", "DP0_TP1", anon=Absent("NO_PERMISSION")),
        ),
        gpu_memory={gpu_uuid(0): 66 * GIB},
        overhead={gpu_uuid(0): {4711: 900 * MIB}},
        allocators=(allocator(4714),),
        owners=(BlockOwners(NOW, 4711, "0", NOW - 1, 27_462, 26_000, 800, 150, ownerless=512, cached=9_000),),
        startup=started(),
        ran_out=(("capacity", "runtime", 2), ("fragmentation", "runtime", 1)),
    )
    without_fixed_pool = replace(rank(), pool=replace(rank().pool, configured_bytes=NOT_EXPOSED))
    on_a_slice = engine("sliced", ranks=(without_fixed_pool,))
    on_a_slice = replace(
        on_a_slice,
        facts=replace(on_a_slice.facts, weights_bytes=4 * GIB, kv_pool_bytes=4 * GIB),
        gpu_memory={"MIG-00000002-0001": 9 * GIB},
        overhead={"MIG-00000002-0001": {4810: 300 * MIB}},
    )
    return Snapshot(
        t=NOW,
        driver=driver(),
        gpus=(first, gpu(1, without_number), sliced_gpu(2)),
        engines=(serving, on_a_slice),
        host=HostMemory(NOW, 1024 * GIB, 512 * GIB),
        sources=(
            SourceView("nvml", gpu_uuid(0), True, NOW, NOW, 0.004),
            SourceView("nvml", gpu_uuid(1), False, NOW, NOW - 600, 5.0, 40, "nvmlDeviceGetMemoryInfo has not returned"),
            SourceView("vllm", "llama-8b", True, NOW, NOW, 0.012),
            SourceView("host", "", None, NOW - 300, NOW - 300, 0.02, 2, "silent for 300 s"),
            SourceView("discovery", "", None),
        ),
        unresolved_gpu_pids=1,
        verdicts=judged(
            leaking(Subject(engine="llama-8b", rank="0")),
            stuck(),
            verdict("kv-block-leak", "unknown", Subject(engine="llama-8b", rank="1"), reason="warming up"),
            verdict("kv-block-leak", "clear", Subject(engine="sliced", rank="0"), confidence=0.95),
            verdict(
                "kv-tail-waste",
                "clear",
                Subject(engine="llama-8b", rank="0"),
                evidence={"waste_share": 0.005, "waste_low": 0.004, "waste_high": 0.006, "waste_most": 0.01},
            ),
            verdict(
                "preemption-pressure",
                "ticket",
                Subject(engine="sliced", rank="0"),
                silenced="weekly batch",
                summary="120 preemptions for 150 requests finished within 10 min, 0.8 each.",
                evidence={"preemptions_per_finished": 0.8, "preemptions": 120, "finished": 150, "peak_usage": 0.97},
            ),
            growing(Subject(engine="llama-8b", gpu=gpu_uuid(0), pid=4711)),
            fragmented(Subject(engine="llama-8b", gpu=gpu_uuid(0), pid=4714)),
            verdict(
                "host-memory-leak",
                "info",
                Subject(engine="llama-8b", pid=4700),
                confidence=0.75,
                summary="Anonymous memory has grown by 640 MiB since the warm-up, by 40 MiB an hour now.",
                evidence={
                    "baseline_bytes": 5 * GIB,
                    "floor_bytes": 5 * GIB + 640 * MIB,
                    "growth_bytes": 640 * MIB,
                    "slope_bytes_per_hour": 40.0 * MIB,
                    "left_bytes": 58 * GIB,
                },
            ),
            verdict(
                "headroom-low",
                "clear",
                Subject(gpu=gpu_uuid(0)),
                evidence={"free_floor_bytes": 9 * GIB, "level_bytes": 9 * GIB},
            ),
            verdict("margin-thin", "clear", Subject(gpu="MIG-00000002-0001"), evidence={"free_floor_bytes": 10 * GIB}),
        ),
    )


def verdict(
    name: str,
    state: State,
    subject: Subject,
    *,
    since: float = NOW - 1_800,
    confidence: float = 1.0,
    summary: str = "",
    evidence: Evidence | None = None,
    eta: Eta | None = None,
    reason: str = "",
    advice: tuple[str, ...] = (),
    silenced: str = "",
) -> Verdict:
    """What a detector concluded, as the judge hands it on; incidents come by judged()."""
    return Verdict(
        name,
        CATALOGUE[name].killer,
        state,
        subject,
        since,
        confidence=0.0 if state == "unknown" else confidence,
        summary=summary,
        evidence=evidence or {},
        eta=eta,
        reason=reason,
        advice=advice,
        silenced=silenced,
        gauges=numbers(evidence or {}),
    )


def judged(*verdicts: Verdict) -> tuple[Verdict, ...]:
    """Verdicts with their incidents; engine llama-8b runs on the first GPU."""
    return Incidents().assign(verdicts, {"llama-8b": frozenset({gpu_uuid(0)})})


def leaking(subject: Subject, state: State = "page") -> Verdict:
    """A quarter of the pool is lost, and the rest will be within hours."""
    return verdict(
        "kv-block-leak",
        state,
        subject,
        since=NOW - 3 * 3_600,
        confidence=0.97,
        summary="2,000 of 8,000 KV blocks (25%) belong to no request; at this pace the pool is gone in 6 h.",
        evidence={
            "floor_blocks": 2_000,
            "floor_ratio": 0.25,
            "pool_blocks": 8_000,
            "slope_blocks_per_hour": 1_000.0,
            "idle_seconds": 45.0,
            "method": "idle",
        },
        eta=Eta(6 * 3_600.0, 5 * 3_600.0, 8 * 3_600.0),
        advice=("Restart the engine at a quiet moment within 5 h.", "Save its page of metrics and its log first."),
    )


def stuck() -> Verdict:
    """What the leak above ends in."""
    return verdict(
        "engine-stuck",
        "page",
        Subject(engine="llama-8b"),
        since=NOW - 240,
        confidence=0.9,
        summary="No token for 4 min although 3 requests wait: no token or step counter moves.",
        evidence={"flat_seconds": 240.0, "running": 0.0, "waiting": 3.0, "ranks": ["0"]},
        advice=("Take it out of the load balancer.", "Restart it."),
    )


def growing(subject: Subject, state: State = "ticket") -> Verdict:
    """Device memory that grows without more load."""
    return verdict(
        "gpu-memory-leak",
        state,
        subject,
        since=NOW - 7_200,
        confidence=0.85,
        summary="The process has grown by 1.5 GiB since its warm-up, by 96 MiB an hour now, without more load: leak or "
        "fragmentation; the device is full in 4 d.",
        evidence={
            "baseline_bytes": 64 * GIB,
            "floor_bytes": 64 * GIB + 1536 * MIB,
            "growth_bytes": 1536 * MIB,
            "slope_bytes_per_hour": 96.0 * MIB,
            "free_bytes": 9 * GIB,
            "asleep_floor_bytes": 2 * GIB,
            "live_growth_bytes": 1400 * MIB,
            "fragments_growth_bytes": 136 * MIB,
        },
        eta=Eta(96 * 3_600.0, 80 * 3_600.0, 120 * 3_600.0),
        advice=("Plan a restart within 3 d.",),
    )


def fragmented(subject: Subject) -> Verdict:
    """Free memory of the allocator in pieces that are too small."""
    return verdict(
        "allocator-fragmentation",
        "ticket",
        subject,
        since=NOW - 900,
        confidence=0.8,
        summary="4 GiB are reserved and free, and not in one piece: at most 700 MiB can be had at once, and up to "
        "2 GiB are asked for.",
        evidence={
            "unallocated_bytes": 4 * GIB,
            "largest_free_block_bytes": 300 * MIB,
            "driver_free_bytes": 400 * MIB,
            "reach_bytes": 700 * MIB,
            "largest_transient_bytes": 2 * GIB,
            "retries": 7,
            "windows_with_retries": 1,
            "short_seconds": 1_200.0,
        },
        advice=("Restart it at a quiet moment.",),
    )


def bare() -> Snapshot:
    """A node without GPU and without engine."""
    detail = "the driver library cannot be loaded. Install NVIDIA's driver; in a container, use the NVIDIA runtime"
    return Snapshot(t=NOW, driver=DriverReport(NOW, "library_missing", detail))


def crowded(gpus: int, processes: int, engines: int) -> Snapshot:
    """Many devices with many processes each; every engine has four ranks and a process on every device."""
    views = []
    for index in range(gpus):
        listed = tuple(
            engine_process(1000 * index + number, GIB, f"engine-{number}")
            if number < engines
            else HeldProcess(1000 * index + number, number * 1024, UNKNOWN, "python3")
            for number in range(processes)
        )
        views.append(gpu(index, listed))
    serving = tuple(
        replace(
            engine(f"engine-{number}", ranks=tuple(rank(str(name)) for name in range(4))),
            gpu_memory={gpu_uuid(index): GIB for index in range(gpus)},
            overhead={gpu_uuid(index): {1000 * index + number: 100 * MIB} for index in range(gpus)},
            processes=tuple(
                replace(host_process(number * 100 + tp, "worker", f"TP{tp}"), engine=f"engine-{number}")
                for tp in range(gpus)
            ),
        )
        for number in range(engines)
    )
    sources = tuple(SourceView("nvml", gpu_uuid(index), True, NOW, NOW, 0.004) for index in range(gpus))
    return Snapshot(t=NOW, driver=driver(), gpus=tuple(views), engines=serving, sources=sources, unresolved_gpu_pids=0)


def healthy() -> Snapshot:
    """Four GPUs and two engines on two of them each, all well."""
    first = replace(
        engine("llama-70b", ranks=(rank("0"),)),
        gpu_memory={gpu_uuid(0): 69 * GIB, gpu_uuid(1): 69 * GIB},
        processes=(host_process(4700, "api_server"), host_process(4711, "worker", "TP0")),
    )
    second = replace(
        engine("qwen-32b", ranks=(replace(rank("0"), usage=0.12, waiting=0.0, preemptions=0.0), rank("1"))),
        gpu_memory={gpu_uuid(2): 69 * GIB, gpu_uuid(3): 69 * GIB},
    )
    names = ("llama-70b", "llama-70b", "qwen-32b", "qwen-32b")
    gpus = tuple(
        replace(gpu(index, (engine_process(4711 + index, 69 * GIB, name),)), unowned=0)
        for index, name in enumerate(names)
    )
    watched = (*((("nvml", view.uuid)) for view in gpus), ("vllm", "llama-70b"), ("vllm", "qwen-32b"), ("host", ""))
    return Snapshot(
        t=NOW,
        driver=driver(),
        gpus=gpus,
        engines=(first, second),
        host=HostMemory(NOW, 1024 * GIB, 512 * GIB),
        sources=tuple(SourceView(source, target, True, NOW, NOW, 0.004) for source, target in watched),
        unresolved_gpu_pids=0,
    )


def lost(index: int) -> GpuView:
    """A device that fell off the bus ten minutes ago."""
    reason = Absent("GPU_IS_LOST")
    fallen = gpu(index, read=reason)
    assert fallen.poll is not None
    poll = replace(
        fallen.poll, processes=reason, utilization=reason, temperature=reason, power=reason, ecc_uncorrected=reason
    )
    return replace(
        fallen, poll=poll, processes=reason, held=reason, last_seen=NOW - 600, xids=(XidCount(79, 1, NOW - 600),)
    )


def gone(view: EngineView, seconds: float = 660) -> EngineView:
    """The same engine so long after its processes have ended."""
    assert view.last_answer is not None
    return replace(
        view,
        state="gone",
        error="its processes have ended",
        scrape=None,
        last_answer=replace(view.last_answer, t=NOW - seconds),
        last_seen=NOW - seconds,
        last_progress=NOW - seconds - 1,
        gpu_memory=NOT_READ,
    )


def frozen(view: EngineView, seconds: float = 240) -> EngineView:
    """The same engine with requests and no progress for so long."""
    return replace(
        view,
        state="frozen",
        error=f"no counter has moved for {units.duration(seconds)}",
        last_progress=NOW - seconds,
    )


def troubled() -> Snapshot:
    """A bad night: a lost and a silent device, memory without owner, and engines in every kind of trouble."""
    leaking = replace(gpu(0, (engine_process(4711, 60 * GIB, "llama-8b"),)), unowned=10 * GIB)
    silent = replace(gpu(2), poll=None, memory=STALE, processes=STALE, held=STALE, unowned=STALE, last_seen=NOW - 120)
    hung = replace(gpu(3, read=HUNG), processes=HUNG, held=HUNG, last_seen=NOW - 45)
    quiet = engine("no-statistics", ranks=(RankReading("0"),))
    engines = (
        frozen(engine("llama-8b")),
        gone(engine("mixtral")),
        replace(unreachable(engine("qwen-7b")), last_seen=NOW - 30),
        replace(unreachable(engine("loading")), last_seen=None, last_answer=None, last_progress=None),
        replace(quiet, state="stats_disabled", error="the page has no vllm: series"),
        replace(
            engine("hidden-port"),
            facts=EngineFacts("hidden-port", no_address="Name it under engines: with its url.", origin="discovery"),
            state="no_address",
            error="its processes run here, but where its /metrics is reached is not known",
            scrape=None,
            last_answer=None,
            last_seen=None,
        ),
    )
    return Snapshot(
        t=NOW,
        driver=driver(),
        gpus=(leaking, lost(1), silent, hung),
        engines=engines,
        host=HostMemory(NOW, 256 * GIB, 9 * GIB),
        sources=(
            SourceView("nvml", gpu_uuid(0), True, NOW, NOW, 0.004),
            SourceView("nvml", gpu_uuid(1), False, NOW, NOW - 600, 0.001, 40, "GPU_IS_LOST"),
            SourceView("vllm", "qwen-7b", False, NOW, NOW - 30, 0.001, 2, "connection refused"),
            SourceView("host", "", None, NOW - 300, NOW - 300, 0.02, 2, "silent for 300 s"),
            SourceView("discovery", "", False, NOW, None, 0.02, 9, "/proc cannot be read"),
        ),
        unresolved_gpu_pids=3,
    )


def alarming() -> Snapshot:
    """A night with conclusions: a leak that has ended in a stuck engine, growth beside it, a lost card, a planned
    silence, and what is not known."""
    base = healthy()
    serving = frozen(replace(base.engines[0], facts=replace(base.engines[0].facts, name="llama-8b")), 240)
    fallen = lost(3)
    verdicts = judged(
        leaking(Subject(engine="llama-8b", rank="0")),
        leaking(Subject(engine="llama-8b", rank="1"), "ticket"),
        stuck(),
        growing(Subject(engine="qwen-32b", gpu=gpu_uuid(2), pid=4713)),
        verdict(
            "gpu-lost",
            "page",
            Subject(gpu=gpu_uuid(3)),
            since=NOW - 590,
            confidence=0.95,
            summary=f"{gpu_uuid(3)} has fallen off the bus (GPU_IS_LOST) since 10 min. It ran qwen-32b.",
            evidence={"error": "GPU_IS_LOST", "lost_since": NOW - 600, "engines": ["qwen-32b"]},
            advice=("Drain the node.", "Reboot it."),
        ),
        verdict(
            "preemption-pressure",
            "ticket",
            Subject(engine="qwen-32b", rank="0"),
            summary="120 preemptions for 150 requests finished within 10 min, 0.8 each.",
            silenced="weekly batch",
        ),
        verdict("host-memory-leak", "unknown", Subject(engine="qwen-32b", pid=4713), reason="warming up"),
        verdict("host-memory-leak", "unknown", Subject(engine="llama-8b", pid=4711), reason="warming up"),
        verdict("kv-tail-waste", "clear", Subject(engine="llama-8b", rank="0")),
    )
    return replace(base, gpus=(*base.gpus[:3], fallen), engines=(serving, base.engines[1]), verdicts=verdicts)


def hostile() -> Snapshot:
    """Every text that comes from outside tries to be markup."""
    markup = '<img src=x onerror="window.owned=1">'
    serving = engine(markup)
    assert serving.scrape is not None
    scrape = replace(serving.scrape, model_name=markup, ranks=(rank(markup),))
    serving = replace(
        serving,
        facts=EngineFacts(markup, target=markup, vllm_version=markup),
        state="unreachable",
        error=markup,
        scrape=None,
        last_answer=scrape,
        gpu_memory={markup: GIB},
    )
    process = HeldProcess(1, GIB, Holder("neighbour", markup), markup)
    card = replace(gpu(0, (process,)), uuid=markup, name=markup, last_seen=NOW)
    return Snapshot(
        t=NOW,
        driver=DriverReport(NOW, "error", markup),
        gpus=(card, replace(card, index=1, memory=Absent(markup), held=Absent(markup))),
        engines=(serving,),
        sources=(SourceView(markup, markup, False, NOW, NOW, 0.1, 1, markup),),
        verdicts=judged(
            verdict(
                "kv-block-leak",
                "page",
                Subject(engine=markup, rank=markup),
                summary=markup,
                evidence={"method": markup, markup: 1, "names": [markup]},
                advice=(markup,),
            ),
            verdict("engine-stuck", "page", Subject(engine=markup), summary=markup),
            verdict("metrics-missing", "unknown", Subject(engine=markup), reason=markup),
            verdict("budget-overrun", "ticket", Subject(engine="other"), summary=markup, silenced=markup),
        ),
    )
