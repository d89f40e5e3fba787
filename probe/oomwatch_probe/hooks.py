"""How the probe learns that an engine's scheduler was made, and when it works, without importing anything of vLLM."""

from __future__ import annotations

import contextlib
import functools
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

SCHEDULER_MODULE = "vllm.v1.core.sched.scheduler"
SCHEDULER_CLASS = "Scheduler"
STEP = "schedule"
# Whatever takes blocks or gives them back. The first two are in every version, the others in most.
NEEDED_CALLS = (STEP, "update_from_output")
OTHER_CALLS = ("finish_requests", "reset_prefix_cache")


class AfterImport(importlib.abc.MetaPathFinder):
    """Calls ``then`` with a module right after its first import, whoever imports it; at once when it is there.

    The import itself is left to those who would do it anyway, and goes on when ``then`` fails.
    """

    def __init__(self, name: str, then: Callable[[ModuleType], None]) -> None:
        self._name = name
        self._then = then
        module = sys.modules.get(name)
        if module is not None:
            self._tell(module)
        else:
            sys.meta_path.insert(0, self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._name:
            return None
        with contextlib.suppress(ValueError):
            sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        loader = spec.loader if spec is not None else None
        if spec is None or loader is None:
            return spec
        execute = loader.exec_module

        @functools.wraps(execute)
        def execute_and_tell(module: ModuleType) -> None:
            execute(module)
            self._tell(module)

        # A loader that does not let itself be changed is used as it is.
        with contextlib.suppress(AttributeError):
            loader.exec_module = execute_and_tell  # type: ignore[method-assign]  # of this one loader
        return spec

    def _tell(self, module: ModuleType) -> None:
        with contextlib.suppress(Exception):
            self._then(module)


def wrap_scheduler(scheduler_class: type[Any], made: Callable[[Any], None], reader: Callable[[Any], Any]) -> None:
    """Calls ``made`` with each new scheduler, and ``enter`` and ``leave`` of ``reader(scheduler)`` around its calls.

    ``enter`` is told whether the call is a new step. ``reader`` answers None for a scheduler that nobody reads. None of
    them may raise. Raises AttributeError, and leaves the class as it was, where it lacks one of the calls.
    """
    originals = {name: getattr(scheduler_class, name) for name in NEEDED_CALLS}
    originals.update({name: getattr(scheduler_class, name) for name in OTHER_CALLS if hasattr(scheduler_class, name)})
    initialise = scheduler_class.__init__

    @functools.wraps(initialise)
    def make(self: Any, *arguments: Any, **named: Any) -> None:
        initialise(self, *arguments, **named)
        made(self)

    def around(original: Callable[..., Any], is_step: bool) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(self: Any, *arguments: Any, **named: Any) -> Any:
            watching = reader(self)
            if watching is None:
                return original(self, *arguments, **named)
            watching.enter(is_step)
            try:
                return original(self, *arguments, **named)
            finally:
                watching.leave()

        return call

    scheduler_class.__init__ = make
    for name, original in originals.items():
        setattr(scheduler_class, name, around(original, name == STEP))
