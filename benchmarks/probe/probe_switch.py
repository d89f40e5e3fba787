"""A general plugin for vLLM that takes the probe out of a running engine core and puts it back, every other step.

Two servers differ by more than the probe costs, and so does a machine from one second to the next: here one server does
both, milliseconds apart. Without: the scheduler's calls are vLLM's own, and the probe's thread sleeps. With: all is as
installed, and its thread works once for each interval of the time with it. Begins at SIGUSR1; each pair of turns is a
line of JSON in the file that OOMWATCH_BENCHMARK_TURNS names: the tokens of each, seconds without and with, and whether
the probe's thread worked in the one with it, and until after its end.

OOMWATCH_BENCHMARK_DELAY makes each step with the probe so many seconds longer: a difference that has to be found.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
import time
from typing import Any

STEPS = 2
WITHOUT, WITH = 0, 1


class Gate:
    """In the place of the event that ends the probe's thread: it wakes when it is told to, and not by the clock."""

    def __init__(self) -> None:
        self.rests = False
        self._ended = False
        self._awake = threading.Event()

    def set(self) -> None:
        self._ended = True
        self._awake.set()

    def is_set(self) -> bool:
        return self._ended

    def wake(self) -> None:
        self.rests = False
        self._awake.set()

    def wait(self, _seconds: float) -> bool:
        self.rests = True
        self._awake.wait()
        self._awake.clear()
        return self._ended


class Switch:
    """Takes turns of STEPS steps, in pairs. A turn in which a request comes or goes begins a new pair."""

    def __init__(self, hooks: Any, probe: Any) -> None:
        scheduler_class = getattr(sys.modules[hooks.SCHEDULER_MODULE], hooks.SCHEDULER_CLASS)
        with_probe = {name: getattr(scheduler_class, name) for name in (*hooks.NEEDED_CALLS, *hooks.OTHER_CALLS)}
        without = {name: call.__wrapped__ for name, call in with_probe.items()}
        self._calls = {WITHOUT: without, WITH: with_probe}
        self._steps = {which: calls.pop(hooks.STEP) for which, calls in self._calls.items()}
        self._class = scheduler_class
        self._interval_s = probe.interval_s()
        self._delay_s = float(os.environ["OOMWATCH_BENCHMARK_DELAY"])
        self._with_s = 0.0
        self._gate = Gate()
        probe._probe._stop = self._gate
        self._random = random.Random(1)
        self._file = open(os.environ["OOMWATCH_BENCHMARK_TURNS"], "a", encoding="ascii")  # noqa: SIM115 - to the end
        self._running = 0
        self._woken = self._late = False
        self._begin_pair()

        def step(scheduler: Any, *arguments: Any) -> Any:
            return self._step(scheduler, *arguments)

        setattr(scheduler_class, hooks.STEP, step)

    def _step(self, scheduler: Any, *arguments: Any) -> Any:
        if len(scheduler.running) != self._running:
            self._running = len(scheduler.running)
            self._begin_pair()
        elif self._left == 0:
            self._end_turn()
        self._left -= 1
        if self._turns[0] == WITH:
            until = time.perf_counter() + self._delay_s
            while time.perf_counter() < until:
                pass
        output = self._steps[self._turns[0]](scheduler, *arguments)
        if output.total_num_scheduled_tokens != self._running:
            self._running = 0
        return output

    def _begin_pair(self) -> None:
        self._turns = self._random.sample((WITHOUT, WITH), 2)
        self._seconds: dict[int, float] = {}
        self._begin_turn()

    def _begin_turn(self) -> None:
        which = self._turns[0]
        for name, call in self._calls[which].items():
            setattr(self._class, name, call)
        if which == WITH:
            self._woken = self._with_s >= self._interval_s
            if self._woken:
                self._with_s -= self._interval_s
                self._gate.wake()
        self._left = STEPS
        self._began = time.perf_counter()

    def _end_turn(self) -> None:
        which = self._turns.pop(0)
        self._seconds[which] = time.perf_counter() - self._began
        if which == WITH:
            self._with_s += self._seconds[which]
            self._late = self._woken and not self._gate.rests
        if self._turns:
            self._begin_turn()
            return
        seconds = [self._seconds[which] for which in (WITHOUT, WITH)]
        self._file.write(f"{json.dumps([STEPS * self._running, *seconds, self._woken, self._late])}\n")
        self._file.flush()
        self._begin_pair()


def begin() -> None:
    from oomwatch_probe import hooks, probe  # noqa: PLC0415 - once the probe is there

    Switch(hooks, probe)


def register() -> None:
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGUSR1, lambda *_: begin())
