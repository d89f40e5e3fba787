"""A device, an engine and a clock: what detectors about devices and lives are told, poll by poll."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from oomwatch.detectors.base import (
    Detector,
    DeviceSample,
    EngineSample,
    Finding,
    HostSample,
    ProcessEnd,
    RankSample,
)
from oomwatch.observations import (
    NOT_KNOWN,
    NOT_READ,
    Absent,
    EngineFacts,
    HostProcess,
    Maybe,
    Memory,
    Pool,
    RankReading,
)
from oomwatch.snapshot import HeldProcess, Holder

MIB = 1 << 20
GIB = 1 << 30
MINUTE = 60.0
HOUR = 3600.0

GPU = "GPU-1"
TOTAL = 80 * GIB
RESERVED = 1 * GIB

LLAMA = Holder("engine", "llama")
STRANGER = Holder("unknown")
NEIGHBOUR = Holder("neighbour", "dcgm")


def held(pid: int, used: float | None, holder: Holder = LLAMA, name: str = "python3") -> HeldProcess:
    """A process on the device, with so many GiB."""
    return HeldProcess(pid, None if used is None else round(used * GIB), holder, name)


@dataclass
class Scene:
    """An engine ``llama`` on a device, polled every ``interval`` seconds; what is set holds for the polls to come.

    ``free`` and ``used`` are GiB; ``processes`` the device's list, read at each poll.
    """

    detector: Detector
    t: float = 0.0
    interval: float = 15.0
    gpu: str = GPU
    free: float = 8.0
    total: int = TOTAL
    reserved: int | None = RESERVED
    used: float | None = None  # in use on the device; None: all that is not free
    memory: Maybe[Memory] | None = None  # instead of free and used
    processes: Maybe[tuple[HeldProcess, ...]] = NOT_READ
    unified: bool = False
    engines: tuple[str, ...] = ("llama",)
    state: str = "ok"  # of the engine's page; empty: it is not scraped
    pids: tuple[int, ...] = (10,)
    facts: EngineFacts = field(default_factory=lambda: EngineFacts("llama", gpu_memory_utilization=0.9))
    reading: RankReading = field(default_factory=lambda: RankReading("0", usage=0.5, running=1.0, waiting=0.0))
    finished: float | None = 0.0
    per_poll: float = 100.0  # requests that finish between two polls
    segment: int = 1
    ready_since: float | None = None
    pool_bytes: int | None = None

    def poll(self, seconds: float = 0.0) -> Finding:
        """Polls for so long, or once; the finding at the end."""
        end = self.t + seconds
        while True:
            self.t += self.interval
            self.page()
            self.device()
            finding = self.detector.conclude(self.t)
            if self.t >= end:
                return finding

    def wait(self, seconds: float) -> Finding:
        """Time in which nothing comes."""
        self.t += seconds
        return self.detector.conclude(self.t)

    def page(self) -> None:
        """One scrape of the engine."""
        if not self.state:
            return
        answered = self.state in ("ok", "sleeping", "no_traffic_yet", "stats_disabled", "frozen", "dead")
        if answered and self.ready_since is None:
            self.ready_since = self.t
        finished: Maybe[dict[str, float]] = Absent("NOT_EXPOSED")
        if self.finished is not None:
            self.finished += self.per_poll
            finished = {"stop": self.finished}
        reading = replace(
            self.reading,
            finished=finished,
            pool=Pool(blocks=1000, block_size=16, configured_bytes=self.pool_bytes or NOT_KNOWN)
            if self.reading.pool == Pool()
            else self.reading.pool,
            sleep_level="discard_all" if self.state == "sleeping" else "awake",
        )
        if answered and self.state != "stats_disabled":
            self.detector.observe(
                RankSample(
                    t=self.t,
                    engine="llama",
                    reading=reading,
                    facts=self.facts,
                    segment=self.segment,
                    segment_start=0.0,
                    since=None,
                    ready_since=self.ready_since or 0.0,
                )
            )
        self.detector.observe(
            EngineSample(
                t=self.t,
                engine="llama",
                state=self.state,
                error="" if answered else "connection refused",
                facts=self.facts,
                ranks=(reading,) if answered and self.state != "stats_disabled" else (),
                segment=self.segment,
                segment_start=0.0,
                pids=self.pids,
            )
        )

    def device(self) -> None:
        """One poll of the device."""
        memory = self.memory
        if memory is None:
            usable = self.total - (self.reserved or 0)
            free = round(self.free * GIB)
            used = usable - free if self.used is None else round(self.used * GIB)
            memory = Memory(self.total, self.reserved, used, free)
        self.detector.observe(
            DeviceSample(
                t=self.t,
                gpu=self.gpu,
                memory=memory,
                processes=self.processes,
                engines=self.engines,
                facts=dict.fromkeys(self.engines, self.facts),
                unified=self.unified,
            )
        )

    def host(self, pid: int, parent: int | None = None) -> None:
        """A reading of one of the engine's processes."""
        process = HostProcess(self.t, pid, self.t, 0, NOT_KNOWN, "VLLM::EngineCore", engine="llama", ppid=parent)
        self.detector.observe(HostSample(self.t, "llama", process, None, None))

    def ends(self, pid: int, holder: Holder = LLAMA) -> None:
        """A process has ended."""
        self.detector.observe(ProcessEnd(self.t, pid, holder))

    def restart(self) -> None:
        """The next page is another life's, with counters from 0."""
        self.ready_since = None
        self.segment += 1
        if self.finished is not None:
            self.finished = 0.0
