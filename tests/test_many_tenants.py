"""An engine with LoRA adapters of many tenants: what fills its slots is no leak, and a leak is found beside them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from oomwatch.detectors.base import LEVEL, State
from oomwatch.detectors.registry import KINDS
from oomwatch.judge import Judge
from oomwatch.node import Node
from oomwatch.observations import (
    Adapters,
    EngineFacts,
    EngineScrape,
    EngineUpdate,
    GpuPoll,
    GpuProcess,
    Memory,
    RankReading,
    Tick,
)

MIB, GIB = 1 << 20, 1 << 30
HOUR, DAY = 3600.0, 86_400.0
EVERY = 120.0
DEVICE = 80 * GIB
ENGINE = EngineFacts("chat", pids=(7,))
LEAKS = tuple(kind for kind in KINDS if kind.verdict == "gpu-memory-leak")

Curve = Callable[[float], float]


def course(days: float, adapters: Callable[[float], int], slots: int, held: Curve) -> list[tuple[float, State]]:
    """When the verdict about the engine's process on its device took which state, under a steady load."""
    judge = Judge(Node(), kinds=LEAKS)
    judge.apply(EngineUpdate(0, ENGINE))
    states: list[tuple[float, State]] = []
    for number in range(1, round(days * DAY / EVERY)):
        t = number * EVERY
        served = 30.0 * number
        rank = RankReading(
            "0", usage=0.5, running=8.0, waiting=0.0, prompt_tokens=500 * served, finished={"stop": served}
        )
        page = EngineScrape(t, "chat", "ok", 0.01, ranks=(rank,), adapters=Adapters(adapters(t), slots))
        used = round(held(t))
        memory = Memory(DEVICE, 0, used, DEVICE - used)
        for observation in (page, GpuPoll(t, "GPU-1", 0, "H100", memory, (GpuProcess(7, used),)), Tick(t)):
            judge.apply(observation)
        (verdict,) = judge.verdicts()
        if not states or states[-1][1] != verdict.state:
            states.append((t, verdict.state))
    return states


def worst(states: list[tuple[float, State]]) -> State:
    return max((state for _, state in states), key=lambda state: LEVEL[state])


def a_new_one_every(seconds: float, most: float = float("inf")) -> Callable[[float], int]:
    return lambda t: int(min(most, 1 + t // seconds))


def test_a_leak_is_found_beside_a_thousand_tenants_that_come_and_go() -> None:
    states = course(2, a_new_one_every(170), 4, lambda t: 60 * GIB + t / HOUR * 64 * MIB)
    assert next(t for t, state in states if state == "ticket") < 14 * HOUR


@pytest.mark.parametrize("slots", [8, 16])
def test_adapters_that_fill_the_slots_are_no_leak(slots: int) -> None:
    every = 3 * HOUR
    loaded = a_new_one_every(every, slots)
    states = course(3, loaded, slots, lambda t: 60 * GIB + 200 * MIB * loaded(t))
    assert worst(states) == "clear"
