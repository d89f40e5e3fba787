"""The simulated node: a machine and a story in, observations out."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

from oomwatch.demo.machine import (
    GPU_NAME,
    GPU_RESERVED,
    GPU_TOTAL,
    HOST_TOTAL,
    MIB,
    TICK,
    Gpu,
    Machine,
    Process,
    Server,
)
from oomwatch.demo.probes import probed
from oomwatch.demo.stories import check_story, tell
from oomwatch.observations import (
    Absent,
    DriverReport,
    EngineFacts,
    EngineScrape,
    EngineUpdate,
    GpuPoll,
    GpuProcess,
    HostMemory,
    HostProcess,
    Memory,
    Observation,
    ProcessGone,
    RemappedRows,
    SourceRun,
    Tick,
    XidEvent,
)
from oomwatch.sources.vllm.meaning import read_page
from oomwatch.sources.vllm.pages import samples_from_recording

_LOST = Absent("GPU_IS_LOST")
_LONGEST_LEAP = 1200.0  # seconds of simulation made up for at once, such as after a suspended laptop


class DemoNode:
    """A node on which ``story`` happens, ``speed`` times as fast as real time.

    The same story, seed and times give the same observations; the first time given is the story's beginning. Raises
    ValueError for a story that is none. Not thread-safe.
    """

    def __init__(self, story: str, seed: int = 1, speed: float = 1.0) -> None:
        check_story(story)
        self._story = story
        self._seed = seed
        self._speed = speed
        self._rng = random.Random(f"{seed}/readings")
        self._run: _Run | None = None
        self._facts: dict[str, EngineFacts] = {}
        self._last_t = -math.inf

    def observations(self, t: float) -> tuple[Observation, ...]:
        """Everything that the sources would deliver at ``t`` (unix time), all of it stamped so."""
        self._advance(t)
        return tuple(self._observations(self._last_t))

    def describe(self, t: float) -> str:
        """What is happening at ``t``, as ``leak: each batch …; 37 of 2211 blocks lost, …``."""
        run = self._advance(t)
        detail = run.phase.detail()
        return f"{run.story}: {run.phase.title}" + (f"; {detail}" if detail else "")

    def phase(self, t: float) -> tuple[str, str]:
        """The story and the title of its phase at ``t``."""
        run = self._advance(t)
        return run.story, run.phase.title

    def _advance(self, t: float) -> _Run:
        """Bring the machine to ``t``; a clock that was set back stands still until it is there again."""
        self._last_t = t = max(t, self._last_t)
        if self._run is None:
            self._run = _Run(self._story, self._seed, self._speed, t)
        self._run.advance(t)
        return self._run

    # --- observations ----------------------------------------------------------------------------------------

    def _observations(self, t: float) -> Iterator[Observation]:
        assert self._run is not None
        machine = self._run.machine
        yield DriverReport(
            t,
            "ok",
            driver_version="575.57.08",
            nvml_version="12.575.57.08",
            cuda_version="12.9",
            device_count=len(machine.gpus),
        )
        yield SourceRun(t, "nvml", "", True, self._took(0.0004))
        for index, code in machine.xids:
            yield XidEvent(t, machine.gpus[index].uuid, code)
        machine.xids.clear()
        for gpu in machine.gpus:
            yield from self._gpu(t, machine, gpu)
        yield SourceRun(t, "discovery", "", True, self._took(0.012))
        for server in machine.servers:
            facts = server.facts()
            if self._facts.get(server.name) != facts:
                self._facts[server.name] = facts
                yield EngineUpdate(t, facts)
        for pid in machine.ended:
            yield ProcessGone(t, pid)
        machine.ended.clear()
        for process in machine.processes.values():
            yield _host_process(t, process)
        yield HostMemory(t, HOST_TOTAL, machine.host_available)
        yield SourceRun(t, "host", "", True, self._took(0.006))
        yield from probed(machine, machine.llama, t)
        for server in machine.servers:
            scrape = self._scrape(t, server)
            yield scrape
            yield SourceRun(t, "vllm", server.name, scrape.answered, scrape.seconds, scrape.error)
        yield Tick(t)

    def _gpu(self, t: float, machine: Machine, gpu: Gpu) -> Iterator[Observation]:
        seconds = self._took(0.003)
        if gpu.lost:
            yield GpuPoll(
                t,
                gpu.uuid,
                gpu.index,
                GPU_NAME,
                memory=_LOST,
                processes=_LOST,
                utilization=_LOST,
                temperature=_LOST,
                power=_LOST,
                ecc_uncorrected=_LOST,
                ecc_corrected=_LOST,
                remapped_rows=_LOST,
                recovery_action=_LOST,
                pci_bus_id=gpu.bus,
                seconds=seconds,
            )
            error = "GPU_IS_LOST: the device has fallen off the bus. Drain the node, read dmesg, reset or reboot"
            yield SourceRun(t, "nvml", gpu.uuid, False, seconds, error)
            return
        used = machine.gpu_used(gpu.index)
        yield GpuPoll(
            t,
            gpu.uuid,
            gpu.index,
            GPU_NAME,
            memory=Memory(GPU_TOTAL, GPU_RESERVED, used, GPU_TOTAL - GPU_RESERVED - used),
            processes=tuple(
                GpuProcess(process.pid, process.gpu_bytes)
                for process in machine.processes.values()
                if process.gpu == gpu.index and process.gpu_bytes
            ),
            mig_enabled=False,
            utilization=round(gpu.utilization, 2),
            temperature=float(round(gpu.temperature)),
            power=round(36 + 280 * gpu.utilization + 0.2 * gpu.temperature, 1),
            ecc_uncorrected=0,
            ecc_corrected=0,
            remapped_rows=RemappedRows(0, 0, pending=False, failed=False),
            recovery_action=0,
            pci_bus_id=gpu.bus,
            seconds=seconds,
        )
        yield SourceRun(t, "nvml", gpu.uuid, True, seconds)

    def _scrape(self, t: float, server: Server) -> EngineScrape:
        if not server.answers:
            where = f"http://127.0.0.1:{server.spec.port}/metrics"
            error = f"{where}: connection refused: nothing listens there (vLLM is down or still loading)"
            return EngineScrape(t, server.name, "unreachable", self._took(0.001), error)
        page = samples_from_recording(server.samples())
        reading = read_page(page, server.spec.version, self._facts[server.name])
        return EngineScrape(
            t=t,
            engine=server.name,
            state=reading.state,
            seconds=self._took(0.009),
            error=reading.error,
            ranks=reading.ranks,
            model_name=reading.model_name,
            version=server.spec.version,
            process_start=reading.process_start,
            kv_connector=reading.kv_connector,
            adapters=reading.adapters,
            healthy=server.state != "dead",
            samples={sample.series: sample.value for sample in page.samples},
        )

    def _took(self, usual: float) -> float:
        return round(usual * self._rng.uniform(0.7, 1.6), 6)


class _Run:
    """A story that is being told on a machine."""

    def __init__(self, story: str, seed: int, speed: float, begin: float) -> None:
        self._speed = speed
        self._begin = begin  # unix time at which the simulation stood at 0
        self.machine = Machine(seed, lambda now: self._begin + now / speed)
        self._script = tell(story, self.machine)
        self._next_phase()

    def _next_phase(self) -> None:
        self.story, self.phase = next(self._script)
        self._phase_end = self.machine.now + self.phase.seconds

    def advance(self, t: float) -> None:
        ahead = (t - self._begin) * self._speed - self.machine.now
        if ahead > _LONGEST_LEAP:
            self._begin += (ahead - _LONGEST_LEAP) / self._speed
            ahead = _LONGEST_LEAP
        for _ in range(int(ahead / TICK + 1e-6)):
            self.machine.tick()
            if self.machine.now >= self._phase_end or (self.phase.until is not None and self.phase.until()):
                self._next_phase()


def _host_process(t: float, process: Process) -> HostProcess:
    # No process of a busy machine holds exactly the same for long.
    wobble = int(2 * MIB * (1 + math.sin(t / 23 + process.pid)))
    anon = process.anon + wobble
    return HostProcess(
        t=t,
        pid=process.pid,
        start=process.start,
        rss=anon + process.mapped,
        anon=anon,
        name=process.name,
        ppid=process.ppid,
        container=process.container,
        pod_uid=process.pod_uid,
        memory_limit=process.memory_limit,
        engine=process.engine,
        role=process.role,
        rank=process.rank,
    )
