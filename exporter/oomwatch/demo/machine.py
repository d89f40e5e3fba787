"""The simulated machine: GPUs, processes, and vLLM servers that start, serve, sleep, hang and die.

Time is the simulation's, in seconds from 0. Four NVIDIA L40S carry three servers, so that every shape of a node occurs:
tensor parallel over two GPUs, data parallel over two, several holders on one.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from oomwatch.demo.queueing import Load, Pace, Rank
from oomwatch.demo.series import RELEASES, RankSeries
from oomwatch.observations import EngineFacts

MIB = 1024**2
GIB = 1024**3

GPU_NAME = "NVIDIA L40S"
GPU_TOTAL = 46068 * MIB
GPU_RESERVED = 613 * MIB
GPU_VISIBLE = GPU_TOTAL - GPU_RESERVED  # what CUDA programs see as the total
GPUS = 4
_UNLISTED = 3 * MIB  # in use without any process, as on real devices
_LARGEST_PAGE = 2 * MIB  # device memory is handed out in these

HOST_TOTAL = 512 * GIB
_HOST_REST = 22 * GIB  # of the operating system and its services

TICK = 0.5
DAY = 150.0  # seconds of one cycle of traffic; the night, when nobody asks anything, is the last part of it
_NIGHT = 45.0

# A server's start, in seconds from its launch.
_CONTEXT_AT, _LOADING_AT, _PROFILING_AT, _POOL_AT, _GRAPHS_AT, START_SECONDS = 3.0, 4.0, 15.0, 18.0, 20.0, 26.0
_REFUSAL_SECONDS = 4.0
_CONTEXT = 480 * MIB
_ENGINE_DEATH_WATCHDOG = 5.0  # the API server outlives its engine by this much at most

Demand = Callable[[float], float]


def daily(offset: float = 0.0) -> Demand:
    """The share of the peak rate over a day: quiet, busy, quiet, and nothing at night."""

    def demand(now: float) -> float:
        hour = (now + offset) % DAY
        return 0.0 if hour >= DAY - _NIGHT else 0.2 + 0.8 * math.sin(math.pi * hour / (DAY - _NIGHT))

    return demand


def steady(share: float) -> Demand:
    return lambda _now: share


def batches(begin: float, every: float, busy: float) -> Demand:
    """Work that comes in batches: the full rate for ``busy`` seconds of ``every``, from ``begin`` on."""
    return lambda now: 1.0 if (now - begin) % every < busy else 0.0


@dataclass(frozen=True)
class EngineSpec:
    """A vLLM server. ``gpus`` has each worker's device; ``ranks`` are data-parallel: as many as workers, or one."""

    name: str
    model_name: str
    version: str
    port: int
    gpus: tuple[int, ...]
    ranks: int
    utilization: float
    max_model_len: int
    weights: int  # bytes per GPU
    blocks: int  # usable ones of a rank
    block_bytes: int  # per GPU
    runtime: int  # bytes per GPU: graphs, activations, libraries
    prefix_tokens: int
    load: Load
    pace: Pace
    memory_limit: int
    container: str | None = None
    pod_uid: str | None = None

    @property
    def pool(self) -> int:
        """Bytes of the KV pool on one GPU, with its null block."""
        return (self.blocks + 1) * self.block_bytes

    @property
    def budget(self) -> int:
        """Bytes of a GPU that vLLM wants to find free when it starts."""
        return math.ceil(GPU_VISIBLE * self.utilization)


LLAMA = EngineSpec(
    name="llama-70b",
    model_name="meta-llama/Llama-3.3-70B-Instruct-FP8",
    version="0.32.0",
    port=8000,
    gpus=(0, 1),
    ranks=1,
    utilization=0.92,
    max_model_len=16384,
    weights=34_600 * MIB,
    blocks=2211,
    block_bytes=2560 * 1024,
    runtime=1_440 * MIB,
    prefix_tokens=512,
    load=Load(rate=1.4, prompt=800, answer=260),
    pace=Pace(prefill=1900, step=0.030, step_per_request=0.0002),
    memory_limit=64 * GIB,
)
QWEN = EngineSpec(
    name="qwen-7b",
    model_name="Qwen/Qwen2.5-7B-Instruct",
    version="0.32.0",
    port=8001,
    gpus=(2, 3),
    ranks=2,
    utilization=0.5,
    max_model_len=32768,
    weights=14_530 * MIB,
    blocks=7167,
    block_bytes=896 * 1024,
    runtime=1_600 * MIB,
    prefix_tokens=256,
    load=Load(rate=3.0, prompt=1800, answer=300),
    pace=Pace(prefill=16000, step=0.019, step_per_request=0.0002),
    memory_limit=48 * GIB,
    container="5f0c9a7e1b3d42a68c1d0e9f7a6b5c4d3e2f1a0b9c8d7e6f5a4b3c2d1e0f9a8b",
    pod_uid="7d3f6c1e-52aa-4f0b-9a8e-0c4f1d2b6e55",
)
MISTRAL = EngineSpec(
    name="mistral-7b",
    model_name="mistralai/Mistral-7B-Instruct-v0.3",
    version="0.11.2",
    port=8002,
    gpus=(3,),
    ranks=1,
    utilization=0.42,
    max_model_len=8192,
    weights=13_830 * MIB,
    blocks=1983,
    block_bytes=2 * MIB,
    runtime=1_000 * MIB,
    prefix_tokens=128,
    load=Load(rate=1.9, prompt=700, answer=350),
    pace=Pace(prefill=14000, step=0.021, step_per_request=0.0002),
    memory_limit=40 * GIB,
    container="c2a9d8e7f6b5a4c3d2e1f0a9b8c7d6e5f4a3b2c1d0e9f8a7b6c5d4e3f2a1b0c9",
)


@dataclass(eq=False)
class Process:
    """A process of the machine. ``gpu`` is the device it has memory on, ``gpu_bytes`` how much; ``start`` unix time."""

    pid: int
    start: float
    name: str
    anon: int
    mapped: int = 600 * MIB  # resident pages of files and libraries
    ppid: int = 1
    engine: str | None = None
    role: str = "other"
    rank: str | None = None
    gpu: int | None = None
    gpu_bytes: int = 0
    container: str | None = None
    pod_uid: str | None = None
    memory_limit: int | None = None


@dataclass
class Gpu:
    index: int
    lost: bool = False
    utilization: float = 0.0
    temperature: float = 38.0

    @property
    def uuid(self) -> str:
        return f"GPU-{0x3A91F0C2 + self.index * 0x11:08x}-7c1e-4d52-9b0a-{0x6E2D5C10B7 + self.index:012x}"

    @property
    def bus(self) -> str:
        return f"00000000:{0x31 + 0x10 * self.index:02X}:00.0"


class Machine:
    """All of it, after a first day of traffic. ``tick`` lets TICK seconds pass; ``unix`` gives a time's unix time."""

    def __init__(self, seed: int, unix: Callable[[float], float]) -> None:
        self.now = -DAY
        self.unix = unix
        self.rng = random.Random(f"{seed}/machine")
        self.gpus = tuple(Gpu(index) for index in range(GPUS))
        self.processes: dict[int, Process] = {}
        self.ended: list[int] = []  # pids, until they are reported
        self.xids: list[tuple[int, int]] = []  # device index and code, until they are reported
        self._next_pid = 21_400 + self.rng.randrange(400)
        self.llama, self.qwen, self.mistral = (
            Server(spec, self, seed, demand)
            for spec, demand in ((LLAMA, daily()), (QWEN, daily(60.0)), (MISTRAL, daily(105.0)))
        )
        self.servers = (self.llama, self.qwen, self.mistral)
        self._boot()
        while self.now < 0:
            self.tick()

    def _boot(self) -> None:
        uptime = 6 * 3600.0
        neighbour = self.spawn("tritonserver", anon=5 * GIB, age=40 * uptime)
        neighbour.gpu, neighbour.gpu_bytes = 2, 9_400 * MIB
        neighbour.container = "0b7e4f1d9c2a83e6b5d40f7c1a9e8d3b6f2c5a4e7d0b9f8c1e3a6d5b4c7f2e90"
        notebook = self.spawn("python3", anon=1_300 * MIB, age=9 * uptime)
        notebook.gpu, notebook.gpu_bytes = 2, 620 * MIB
        for server in self.servers:
            server.launch(age=uptime / 8)
            server.skip_start()

    def spawn(self, name: str, anon: int, age: float = 0.0) -> Process:
        self._next_pid += 1 + self.rng.randrange(40)
        process = Process(self._next_pid, self.unix(self.now) - age, name, anon)
        self.processes[process.pid] = process
        return process

    def end(self, processes: Iterable[Process]) -> None:
        for process in processes:
            if self.processes.pop(process.pid, None) is not None:
                self.ended.append(process.pid)

    def gpu_used(self, index: int) -> int:
        """Bytes in use on a device, the driver's reserve left out."""
        return _UNLISTED + sum(process.gpu_bytes for process in self.processes.values() if process.gpu == index)

    def gpu_free(self, index: int) -> int:
        return GPU_VISIBLE - self.gpu_used(index)

    @property
    def host_available(self) -> int:
        return HOST_TOTAL - _HOST_REST - sum(process.anon for process in self.processes.values())

    def tick(self) -> None:
        self.now += TICK
        for server in self.servers:
            server.tick()
        for gpu in self.gpus:
            self._warm(gpu)

    def lose(self, index: int) -> None:
        """A device falls off the bus; whoever works on it dies."""
        self.gpus[index].lost = True
        self.xids.append((index, 79))
        for server in self.servers:
            if index in server.spec.gpus:
                server.crash()

    def _warm(self, gpu: Gpu) -> None:
        busy = 0.0 if gpu.lost else max((server.busy_on(gpu.index) for server in self.servers), default=0.0)
        gpu.utilization += (busy - gpu.utilization) * 0.25
        gpu.temperature += (36 + 38 * gpu.utilization - gpu.temperature) * 0.02


@dataclass
class _Loss:
    """What goes wrong a little with each finished request: bytes that are never given back."""

    gpu: int = 0
    host: int = 0
    gpu_owed: int = field(default=0, init=False)


@dataclass(frozen=True)
class LastWord:
    """An allocation that failed and ended a worker: unix time, what lay in pieces then, what the driver had free."""

    process: Process
    t: float
    fragments: int
    free: int


class Server:
    """A vLLM server and its processes.

    ``state`` is ``down``, ``starting``, ``serving``, ``frozen`` (the workers hang, the API server does not), ``dead``
    (the engine core has died, the API server has not yet) or ``sleeping``.
    """

    def __init__(self, spec: EngineSpec, machine: Machine, seed: int, demand: Demand) -> None:
        self.spec = spec
        self.state = "down"
        self.demand = self._usual_demand = demand
        self.load = spec.load
        self.loss = _Loss()
        self.fragments = 0  # bytes of each worker that lie in small pieces
        self.retries = 0  # times that its allocators gave their caches back
        self.last_words: list[LastWord] = []  # until they are reported
        self.started_unix = 0.0
        self.ranks: tuple[Rank, ...] = ()
        self._machine = machine
        self._seed = seed
        self._since = 0.0
        self._launches = 0
        self._fits = True
        self._counted = 0  # finished requests that losses were counted for
        self._series = tuple(
            RankSeries(
                RELEASES[spec.version],
                spec.model_name,
                str(rank),
                ranks=spec.ranks,
                utilization=spec.utilization,
                max_model_len=spec.max_model_len,
                blocks=spec.blocks,
            )
            for rank in range(spec.ranks)
        )

    # --- what can be seen ------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def processes(self) -> list[Process]:
        return [process for process in self._machine.processes.values() if process.engine == self.name]

    @property
    def workers(self) -> list[Process]:
        """Those with memory on a GPU."""
        return [process for process in self.processes if process.gpu is not None]

    @property
    def core(self) -> Process:
        return next(process for process in self.processes if process.role == "engine_core")

    @property
    def finished(self) -> int:
        return sum(rank.finished_in_all for rank in self.ranks)

    @property
    def idle(self) -> bool:
        return all(rank.idle for rank in self.ranks)

    @property
    def answers(self) -> bool:
        return self.state in ("serving", "frozen", "dead", "sleeping")

    def facts(self) -> EngineFacts:
        """What the operator's configuration and the search for processes know together."""
        spec = self.spec
        return EngineFacts(
            name=spec.name,
            target=f"http://127.0.0.1:{spec.port}/metrics",
            pids=tuple(sorted(process.pid for process in self.processes)),
            gpus=tuple(self._machine.gpus[index].uuid for index in spec.gpus),
            gpu_memory_utilization=spec.utilization,
            max_model_len=spec.max_model_len,
            kv_pool_bytes=spec.pool,
            weights_bytes=spec.weights,
        )

    def samples(self) -> dict[str, float]:
        """The page of metrics, as far as it is read."""
        page: dict[str, float] = {}
        if self.spec.ranks == 1:  # several API servers expose no process_ series
            page["process_start_time_seconds"] = self.started_unix
        sleep_state = "weights_offloaded" if self.state == "sleeping" else "awake"
        for series, rank in zip(self._series, self.ranks, strict=True):
            page.update(series.samples(rank, sleep_state))
        return page

    def busy_on(self, gpu: int) -> float:
        if self.state == "frozen":
            return 1.0 if gpu in self.spec.gpus else 0.0  # a collective that waits spins
        if self.state == "starting" and gpu in self.spec.gpus:
            return 0.6 if self._machine.now - self._since >= _PROFILING_AT else 0.0
        if self.state != "serving":
            return 0.0
        return max(
            (rank.busy for rank, device in zip(self._rank_of_gpus(), self.spec.gpus, strict=True) if device == gpu),
            default=0.0,
        )

    def _rank_of_gpus(self) -> tuple[Rank, ...]:
        return self.ranks if self.spec.ranks > 1 else self.ranks * len(self.spec.gpus)

    # --- what happens to it ----------------------------------------------------------------------------------

    def launch(self, age: float = 0.0) -> None:
        """Start the processes; the page answers START_SECONDS later, unless the start is refused."""
        machine, spec = self._machine, self.spec
        self.state, self._since = "starting", machine.now
        self.started_unix = machine.unix(machine.now) - age
        self._launches += 1
        self._fits = True
        root = self._spawn("vllm", "api_server", 1_900 * MIB, age)
        if spec.ranks > 1:
            root.role, root.anon = "other", 900 * MIB
            for number in range(spec.ranks):
                self._spawn(f"VLLM::APIServer_{number}", "api_server", 1_700 * MIB, age, root)
            for number in range(spec.ranks):
                self._spawn(f"VLLM::EngineCore_DP{number}", "engine_core", 6_100 * MIB, age, root, spec.gpus[number])
        elif len(spec.gpus) > 1:
            core = self._spawn("VLLM::EngineCore", "engine_core", 3_200 * MIB, age, root)
            for number, gpu in enumerate(spec.gpus):
                worker = self._spawn(f"VLLM::Worker_TP{number}", "worker", 5_600 * MIB, age, core, gpu)
                worker.rank = f"TP{number}"
        else:
            self._spawn("VLLM::EngineCore", "engine_core", 5_900 * MIB, age, root, spec.gpus[0])

    def skip_start(self) -> None:
        """As if the start lay long behind."""
        for worker in self.workers:
            worker.gpu_bytes = self._loaded()
        self._serve()

    def stop(self) -> None:
        """All its processes end at once."""
        self._machine.end(self.processes)
        self.state, self.ranks, self.loss = "down", (), _Loss()
        self.fragments = self.retries = 0

    def crash(self, orphan: Process | None = None) -> None:
        """The engine dies and takes the server with it; ``orphan`` stays behind, with its memory and without parent."""
        if orphan is not None:
            orphan.engine, orphan.ppid = None, 1
        self.stop()

    def die(self) -> None:
        """Allocations of its workers fail: they and the engine core die, the API server says so and goes as well."""
        t = self._machine.unix(self._machine.now)
        self.last_words += [
            LastWord(worker, t, self.fragments, self._machine.gpu_free(worker.gpu))
            for worker in self.workers
            if worker.gpu is not None
        ]
        self._machine.end([process for process in self.processes if process.role in ("engine_core", "worker")])
        self.state, self._since = "dead", self._machine.now

    def freeze(self) -> None:
        self.state = "frozen"

    def sleep(self) -> None:
        """Level 1: weights go to the host's memory, the KV pool is dropped."""
        self.state = "sleeping"
        for worker in self.workers:
            worker.gpu_bytes -= self.spec.weights + self.spec.pool
            worker.anon += self.spec.weights
        for rank in self.ranks:
            rank.forget_prefixes()

    def wake(self) -> None:
        self.state = "serving"
        for worker in self.workers:
            worker.gpu_bytes += self.spec.weights + self.spec.pool
            worker.anon -= self.spec.weights

    def grow(self, size: int) -> None:
        """Each worker takes ``size`` more bytes of its GPU."""
        for worker in self.workers:
            worker.gpu_bytes += size

    def fragment(self, size: int) -> None:
        """As grow, and what is taken lies in small pieces that nothing fits; near the end caches are given back."""
        self.grow(size)
        self.fragments += size
        if min(self._machine.gpu_free(gpu) for gpu in self.spec.gpus) < 1_024 * MIB:
            self.retries += 1

    def as_usual(self) -> None:
        """The usual traffic again, and nothing that goes wrong."""
        self.demand, self.load, self.loss = self._usual_demand, self.spec.load, _Loss()
        for rank in self.ranks:
            rank.leak = 0.0

    def tick(self) -> None:
        machine = self._machine
        age = machine.now - self._since
        if self.state == "starting":
            self._start(age)
        elif self.state == "dead" and age >= _ENGINE_DEATH_WATCHDOG:
            self.stop()
        elif self.state == "serving":
            rate = self.load.rate * self.demand(machine.now) / len(self.ranks)
            for rank in self.ranks:
                rank.tick(TICK, self.load, rate)
            self._lose()

    def _start(self, age: float) -> None:
        if not self._fits and age >= _CONTEXT_AT + _REFUSAL_SECONDS:
            self.stop()
            return
        for worker in self.workers:
            worker.gpu_bytes = self._loading(age)
        if _CONTEXT_AT <= age < _LOADING_AT:
            # vLLM refuses where less than its budget is free beside its own context (vllm/v1/worker/utils.py).
            self._fits = all(self._machine.gpu_free(gpu) >= self.spec.budget for gpu in self.spec.gpus)
        if age >= START_SECONDS:
            self._serve()

    def _serve(self) -> None:
        spec = self.spec
        self.state = "serving"
        self._counted = 0
        self.ranks = tuple(
            Rank(
                spec.blocks,
                spec.max_model_len,
                spec.prefix_tokens,
                spec.pace,
                random.Random(f"{self._seed}/{spec.name}/{number}/{self._launches}"),
            )
            for number in range(spec.ranks)
        )

    def _loaded(self) -> int:
        spec = self.spec
        return _whole_pages(_CONTEXT + spec.weights + spec.pool + spec.runtime)

    def _loading(self, age: float) -> int:
        """Bytes of a worker ``age`` seconds after its launch."""
        spec = self.spec
        if age < _CONTEXT_AT:
            return 0
        if age < _LOADING_AT or not self._fits:
            return _CONTEXT
        if age < _PROFILING_AT:
            share = (age - _LOADING_AT) / (_PROFILING_AT - _LOADING_AT)
            return _whole_pages(_CONTEXT + int(spec.weights * share))
        if age < _POOL_AT:
            return _whole_pages(_CONTEXT + spec.weights + spec.runtime * 5 // 4)
        if age < _GRAPHS_AT:
            return _whole_pages(_CONTEXT + spec.weights + spec.pool + spec.runtime // 2)
        return self._loaded()

    def _lose(self) -> None:
        finished = self.finished
        new, self._counted = finished - self._counted, finished
        if not new:
            return
        loss = self.loss
        if loss.host:
            self.core.anon += new * loss.host
        if loss.gpu:
            loss.gpu_owed += new * loss.gpu
            grown = _whole_pages(loss.gpu_owed)
            loss.gpu_owed -= grown
            self.grow(grown)

    def _spawn(
        self, name: str, role: str, anon: int, age: float, parent: Process | None = None, gpu: int | None = None
    ) -> Process:
        process = self._machine.spawn(name, anon, age)
        process.engine, process.role, process.gpu = self.name, role, gpu
        process.ppid = parent.pid if parent is not None else 1
        process.container, process.pod_uid = self.spec.container, self.spec.pod_uid
        process.memory_limit = self.spec.memory_limit
        return process


def _whole_pages(size: int) -> int:
    return size // _LARGEST_PAGE * _LARGEST_PAGE
