"""What happens on the demo's node: one script for each story, told in phases.

A script changes the machine, and says with each phase how long things then go on as they are. All times are the
simulation's seconds; no story takes more than 600 of them, and each leaves the machine as it found it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from oomwatch.demo.machine import MIB, START_SECONDS, Machine, Server, batches, steady
from oomwatch.demo.queueing import Load

TOUR = "tour"
_PAUSE = 60.0


@dataclass(frozen=True)
class Phase:
    """Nothing new for ``seconds``, or until ``until`` holds. ``title`` and ``detail`` say what can be seen."""

    title: str
    seconds: float
    detail: Callable[[], str] = str
    until: Callable[[], bool] | None = None


Script = Callable[[Machine], Iterator[Phase]]


def _gib(size: float) -> str:
    return f"{size / 1024**3:.1f} GiB"


def _calm(seconds: float, title: str = "all is well") -> Phase:
    return Phase(title, seconds)


def _restart(server: Server, title: str) -> Iterator[Phase]:
    """Launch a stopped server and wait until it serves."""
    server.launch()
    yield Phase(
        title,
        START_SECONDS + 5,
        lambda: f"{server.name}: {_gib(sum(worker.gpu_bytes for worker in server.workers))} of GPU memory loaded",
        until=lambda: server.state == "serving",
    )


def _healthy(machine: Machine) -> Iterator[Phase]:
    rank = machine.llama.ranks[0]
    yield Phase(
        "three busy days with quiet nights; the pool of llama-70b is full at noon, at full throughput",
        450,
        lambda: f"llama-70b uses {rank.used} of {rank.blocks} blocks, {len(rank.waiting)} requests wait",
    )


def _capacity(machine: Machine) -> Iterator[Phase]:
    llama = machine.llama
    rank = llama.ranks[0]

    def pressure() -> str:
        return (
            f"llama-70b uses {rank.used} of {rank.blocks} blocks, {len(rank.waiting)} requests wait for capacity, "
            f"{rank.preemptions} preemptions and {rank.finished_in_all} finished requests so far"
        )

    llama.load = Load(rate=3.0, prompt=150, answer=300)
    llama.demand = steady(0.85)
    yield _calm(120, "all is well: many short questions and answers")
    # So few fit at once that less comes out than before, and one that is preempted is computed anew.
    llama.load = Load(rate=0.8, prompt=2500, answer=2000, spread=0.4)
    llama.demand = steady(1.0)
    yield Phase("long documents with long answers come: the KV pool fills", 60, pressure, until=lambda: rank.free < 64)
    yield Phase("the KV pool is full, requests push each other out, few come to an end", 250, pressure)
    rank.abandon()
    llama.demand = steady(0.0)
    yield Phase("clients gave up; what runs comes to its end", 60, pressure, until=lambda: rank.idle)
    llama.as_usual()
    yield _calm(75, "all is well again")


def _fragmentation(machine: Machine) -> Iterator[Phase]:
    llama = machine.llama
    gpus = llama.spec.gpus
    llama.demand = steady(0.6)
    yield _calm(75)
    grown = 0

    def memory() -> str:
        return (
            f"each worker of llama-70b holds {grown // MIB} MiB more than at its start, "
            f"{machine.gpu_free(gpus[0]) // MIB} MiB of GPU 0 are free, and {llama.fragments // MIB} MiB lie in pieces"
        )

    while True:
        step = machine.rng.randrange(192, 321, 2) * MIB
        if step > min(machine.gpu_free(gpu) for gpu in gpus) - 64 * MIB:
            break
        llama.fragment(step)
        grown += step
        yield Phase("GPU memory of llama-70b grows in steps, at an even KV usage", 18, memory)
    llama.die()
    yield Phase("an allocation failed: the engine is dead, its API server still answers", 10, until=_down(llama))
    yield Phase("llama-70b is gone, nothing answers", 25)
    yield from _restart(llama, "llama-70b starts again")
    llama.as_usual()
    yield _calm(90, "all is well again")


def _leak(machine: Machine) -> Iterator[Phase]:
    llama = machine.llama
    rank = llama.ranks[0]
    every, busy = 40.0, 18.0
    llama.demand = batches(machine.now, every, busy)
    llama.load = replace(llama.spec.load, rate=1.6)

    def lost() -> str:
        return f"{rank.lost} of {rank.blocks} blocks lost, {len(rank.running)} requests run, {len(rank.waiting)} wait"

    yield Phase("work comes in batches, and the pool is empty between them", 2 * every, lost)
    rank.leak = 1 / 7
    yield Phase("each batch leaves blocks behind that no request owns", 4 * every, lost)
    rank.leak = 1 / 2
    yield Phase(
        "too few blocks are left for a request", 60, lost, until=lambda: bool(not rank.running and rank.waiting)
    )
    llama.demand = steady(0.05)
    yield Phase("deadlock: nothing runs, requests wait, /health is green", 190, lost)
    llama.stop()
    yield Phase("llama-70b is restarted by hand", 10)
    yield from _restart(llama, "llama-70b starts again")
    llama.as_usual()
    yield _calm(60, "all is well again")


def _memory_leak(machine: Machine) -> Iterator[Phase]:
    mistral = machine.mistral
    mistral.demand = steady(0.6)
    yield _calm(75)
    gpu = mistral.spec.gpus[0]
    before = mistral.workers[0].gpu_bytes
    mistral.loss.gpu = 6 * MIB
    yield Phase(
        "GPU memory of mistral-7b grows a little with each request",
        330,
        lambda: (
            f"the engine core of mistral-7b holds {(mistral.workers[0].gpu_bytes - before) // MIB} MiB more than at "
            f"first, {machine.gpu_free(gpu) // MIB} MiB of GPU {gpu} are free"
        ),
        until=lambda: machine.gpu_free(gpu) < 640 * MIB,
    )
    mistral.stop()
    yield Phase("mistral-7b is restarted by hand", 10)
    yield from _restart(mistral, "mistral-7b starts again")
    mistral.as_usual()
    yield _calm(75, "all is well again")


def _host_leak(machine: Machine) -> Iterator[Phase]:
    llama = machine.llama
    limit = llama.spec.memory_limit
    llama.demand = steady(0.6)
    yield _calm(75)
    llama.loss.host = 160 * MIB

    def held() -> int:
        return sum(process.anon for process in llama.processes)

    yield Phase(
        "host memory of llama-70b's engine core grows with each request",
        330,
        lambda: f"the engine core holds {_gib(llama.core.anon)}, all of llama-70b {_gib(held())} of {_gib(limit)}",
        until=lambda: held() > 0.94 * limit,
    )
    llama.stop()
    yield Phase("llama-70b is restarted by hand, just in time", 10)
    yield from _restart(llama, "llama-70b starts again")
    llama.as_usual()
    yield _calm(75, "all is well again")


def _orphan(machine: Machine) -> Iterator[Phase]:
    llama = machine.llama
    llama.demand = steady(0.6)
    yield _calm(60)
    worker = llama.workers[-1]
    llama.crash(orphan=worker)

    def left() -> str:
        return f"{worker.name} (pid {worker.pid}) of a dead engine holds {_gib(worker.gpu_bytes)} of GPU {worker.gpu}"

    for pause in (15.0, 45.0, 45.0):
        yield Phase("llama-70b was killed, and one of its workers stays with its memory", pause, left)
        llama.launch()
        yield Phase("llama-70b starts again and is refused: too little memory is free", 15, left, until=_down(llama))
    yield Phase("llama-70b was killed, and one of its workers stays with its memory", 45, left)
    machine.end([worker])
    yield Phase("the worker that stayed behind is killed by hand", 5)
    yield from _restart(llama, "llama-70b starts again")
    llama.as_usual()
    yield _calm(75, "all is well again")


def _stuck(machine: Machine) -> Iterator[Phase]:
    llama = machine.llama
    rank = llama.ranks[0]
    llama.demand = steady(0.6)
    yield _calm(75)
    # From outside a hang shows only while something runs.
    yield Phase("all is well", 30, until=lambda: len(rank.running) >= 4)
    llama.freeze()
    yield Phase(
        "a worker of llama-70b hangs: every number stands still, /health is green",
        240,
        lambda: f"{len(rank.running)} requests run, {rank.generation_tokens} tokens came so far",
    )
    llama.stop()
    yield Phase("llama-70b is restarted by hand", 10)
    yield from _restart(llama, "llama-70b starts again")
    llama.as_usual()
    yield _calm(75, "all is well again")


def _lost(machine: Machine) -> Iterator[Phase]:
    yield _calm(60)
    machine.lose(3)
    yield Phase(
        "GPU 3 has fallen off the bus (Xid 79); qwen-7b and mistral-7b, which work on it, are dead",
        210,
        lambda: "the driver answers GPU_IS_LOST for GPU 3",
    )
    machine.gpus[3].lost = False
    yield Phase("GPU 3 is back after a reset", 15)
    machine.mistral.launch()
    yield from _restart(machine.qwen, "qwen-7b and mistral-7b start again")
    machine.qwen.as_usual()
    machine.mistral.as_usual()
    yield _calm(90, "all is well again")


def _restarts(machine: Machine) -> Iterator[Phase]:
    qwen, mistral = machine.qwen, machine.mistral
    yield _calm(60)
    qwen.stop()
    yield Phase("qwen-7b is rolled out anew", 8)
    yield from _restart(qwen, "qwen-7b starts")
    yield _calm(60)
    mistral.demand = steady(0.0)
    yield Phase("mistral-7b is drained", 40, until=lambda: mistral.idle)
    yield Phase("mistral-7b is drained", 5)
    mistral.sleep()
    yield Phase("mistral-7b sleeps: its weights are in the host's memory", 90)
    mistral.wake()
    mistral.as_usual()
    yield _calm(75, "all is well: mistral-7b is awake again")


def _down(server: Server) -> Callable[[], bool]:
    return lambda: server.state == "down"


_SCRIPTS: Mapping[str, tuple[str, Script]] = {
    "healthy": ("busy days with quiet nights, nothing wrong", _healthy),
    "capacity": ("the KV pool is full and it hurts", _capacity),
    "fragmentation": ("GPU memory grows in steps beyond the budget until an allocation fails", _fragmentation),
    "leak": ("KV blocks are lost until nothing can run", _leak),
    "memory-leak": ("an engine's GPU memory grows with each request", _memory_leak),
    "host-leak": ("an engine's host memory grows toward its limit", _host_leak),
    "orphan": ("a worker outlives its engine and keeps the next start from succeeding", _orphan),
    "stuck": ("a worker hangs while /health stays green", _stuck),
    "lost": ("a GPU falls off the bus", _lost),
    "restart": ("an engine restarts, another sleeps and wakes, nothing wrong", _restarts),
}

# Name to a line that says what happens, for --help.
STORIES: Mapping[str, str] = {name: line for name, (line, _) in _SCRIPTS.items()}


def check_story(story: str) -> None:
    """Raises ValueError for a story that is none."""
    if story != TOUR and story not in STORIES:
        raise ValueError(f"there is no story {story!r}. There are: {', '.join((TOUR, *STORIES))}")


def tell(story: str, machine: Machine) -> Iterator[tuple[str, Phase]]:
    """The phases of a story with its name, then calm without end; the tour tells all, again and again."""
    if story != TOUR:
        for phase in _SCRIPTS[story][1](machine):
            yield story, phase
        yield story, _calm(math.inf, "the story is over, all is well")
    while True:
        for name, (_, script) in _SCRIPTS.items():
            for phase in script(machine):
                yield name, phase
            yield name, _calm(_PAUSE, "the story is over, all is well")
