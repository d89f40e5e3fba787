"""The probe in one process: it waits for a scheduler or an initialised CUDA, and then writes the file at an interval.

A process that gets neither (an API server) has no thread and no file. A forked one begins anew, for vLLM does not load
its plugins again there.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import ModuleType
from typing import Any

from oomwatch_probe import __version__
from oomwatch_probe.allocator import AllocatorReader
from oomwatch_probe.blocks import CoreReader
from oomwatch_probe.hooks import SCHEDULER_CLASS, SCHEDULER_MODULE, AfterImport, wrap_scheduler
from oomwatch_probe.layout import Absence, encode
from oomwatch_probe.mailbox import DEFAULT_DIRECTORY, Identity, Mailbox, own_identity

Numbers = dict[str, int | Absence]

DEFAULT_INTERVAL_S = 1.0
SHORTEST_INTERVAL_S = 0.05
THREAD_NAME = "oomwatch-probe"

logger = logging.getLogger("oomwatch_probe")


class Probe:
    """Everything that the probe has in this process."""

    def __init__(self) -> None:
        self.core: CoreReader | None = None
        self.allocator: AllocatorReader | None = None
        self._interval_s = interval_s()
        self._starting = threading.Lock()
        self._writing = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._mailbox: Mailbox | None = None
        self._sequence = 0
        self._said: set[str] = set()

    # --- called by vLLM's own threads: none of it raises, none of it waits ------------------------------------------

    def scheduler_made(self, scheduler: Any) -> None:
        try:
            self.core = CoreReader(scheduler, self._interval_s)
            self._begin()
        except Exception as error:
            self._say(f"cannot watch the scheduler: {type(error).__name__}: {error}")

    def cuda_initialised(self) -> None:
        try:
            torch = sys.modules["torch"]
            if self.allocator is None:
                self.allocator = AllocatorReader(torch)
                self._begin()
        except Exception as error:
            self._say(f"cannot watch the allocator: {type(error).__name__}: {error}")

    def allocation_failed(self, device: int, request: int, total: int, free: int) -> None:
        try:
            if self.allocator is not None:
                self.allocator.observe_oom(device, request, total, free)
                # The process may be about to end.
                if self._writing.acquire(timeout=0.1):
                    try:
                        self._write()
                    finally:
                        self._writing.release()
        except Exception as error:
            self._say(f"cannot tell of a failed allocation: {type(error).__name__}: {error}")

    def _begin(self) -> None:
        with self._starting:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=THREAD_NAME, daemon=True)
                self._thread.start()

    # --- the probe's own thread ------------------------------------------------------------------------------------

    def _run(self) -> None:
        # The engine's signals are for the engine's threads.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        # So that top and the benchmark see which thread it is.
        with contextlib.suppress(OSError):
            Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(THREAD_NAME, encoding="ascii")
        try:
            identity = own_identity()
            directory = Path(os.environ.get("OOMWATCH_PROBE_DIR") or DEFAULT_DIRECTORY)
            self._mailbox = Mailbox(directory, identity)
        except OSError as error:
            self._say(f"cannot make its file: {error}. Make the folder, or name another one in OOMWATCH_PROBE_DIR.")
            return
        call_at_exit(self.end)
        observing = False
        while True:
            try:
                if self.allocator is not None and torch_is_ready():
                    if not observing:
                        self._observe()
                        observing = True
                    self.allocator.read()
                if self.core is not None:
                    self.core.read()
                    if self.core.switched_off:
                        self._say(f"does not read the block pool: {self.core.texts['blocks_note']}")
                    if self.core.gone:
                        self.core = None
                with self._writing:
                    if self._stop.is_set():
                        return
                    if not self._mailbox.exists():
                        gone, self._mailbox = self._mailbox, Mailbox(directory, identity)
                        gone.close()
                    self._write()
            except Exception as error:
                self._say(f"{type(error).__name__}: {error}")
            if self._stop.wait(self._interval_s):
                return

    def _observe(self) -> None:
        attach = getattr(sys.modules["torch"]._C, "_cuda_attach_out_of_memory_observer", None)
        if attach is not None:
            attach(self.allocation_failed)

    def _write(self) -> None:
        """Hold the lock."""
        if self._mailbox is None:
            return
        self._sequence += 1
        numbers: Numbers = {
            "heartbeat_ns": time.time_ns(),
            "interval_ns": int(self._interval_s * 1e9),
            **identity_numbers(self._mailbox.identity),
            **ranks(),
        }
        texts = {"probe_version": __version__, "vllm_version": version_of("vllm.version")}
        for part in (self.core, self.allocator):
            if part is not None:
                numbers.update(part.numbers)
                texts.update(part.texts)
        self._mailbox.write(encode(self._sequence, numbers, texts))

    def _say(self, what: str) -> None:
        """Once for each thing."""
        if what not in self._said and len(self._said) < 10:
            self._said.add(what)
            logger.warning("oomwatch-probe in process %d: %s", os.getpid(), what)

    # --- the end ---------------------------------------------------------------------------------------------------

    def end(self) -> None:
        """The process ends in order: its file goes."""
        self._stop.set()
        with self._writing:
            mailbox, self._mailbox = self._mailbox, None
            if mailbox is not None:
                mailbox.remove()

    def forget(self) -> None:
        """In a forked child: the file is the parent's, and what its thread held stays held. ``end`` may still come."""
        self._writing = threading.Lock()
        mailbox, self._mailbox = self._mailbox, None
        if mailbox is not None:
            mailbox.close()


_probe: Probe | None = None


def prepare() -> None:
    """Once for each process; the second time does nothing."""
    global _probe  # noqa: PLW0603 - vLLM gives a plugin no place of its own
    if _probe is not None:
        return
    _probe = Probe()
    os.register_at_fork(after_in_child=_begin_anew)
    AfterImport(SCHEDULER_MODULE, _scheduler_imported)
    # vLLM has imported it long before it loads plugins, but without initialising CUDA: this neither.
    torch = sys.modules.get("torch")
    if torch is not None:
        # As torch.manual_seed does it: called when CUDA is initialised, whoever initialises it.
        torch.cuda._lazy_call(_cuda_initialised)


def _scheduler_imported(module: ModuleType) -> None:
    try:
        wrap_scheduler(getattr(module, SCHEDULER_CLASS), _scheduler_made, _core_of)
    except AttributeError as error:
        logger.warning("oomwatch-probe does not read the block pool, this vLLM's scheduler is unknown to it: %s", error)


def _scheduler_made(scheduler: Any) -> None:
    if _probe is not None:
        _probe.scheduler_made(scheduler)


def _core_of(scheduler: object) -> CoreReader | None:
    """Called twice in each step, and written to be short."""
    core = None if _probe is None else _probe.core
    return core if core is not None and core.scheduler() is scheduler else None


def _cuda_initialised() -> None:
    if _probe is not None:
        _probe.cuda_initialised()


def _begin_anew() -> None:
    global _probe  # noqa: PLW0603 - vLLM gives a plugin no place of its own
    if _probe is not None:
        _probe.forget()
        _probe = Probe()


def call_at_exit(function: Any) -> None:
    """When the interpreter ends; in a child of multiprocessing, which ends without, when that says goodbye."""
    atexit.register(function)
    util = sys.modules.get("multiprocessing.util")
    if util is not None:
        util.Finalize(None, function, exitpriority=0)


def interval_s() -> float:
    """``OOMWATCH_PROBE_INTERVAL`` in seconds."""
    with contextlib.suppress(ValueError):
        return max(SHORTEST_INTERVAL_S, float(os.environ.get("OOMWATCH_PROBE_INTERVAL", "")))
    return DEFAULT_INTERVAL_S


def torch_is_ready() -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.cuda.is_initialized())


def version_of(module: str) -> str:
    return str(getattr(sys.modules.get(module), "__version__", ""))


def identity_numbers(identity: Identity) -> Numbers:
    return {
        "pid": identity.pid,
        "pid_namespace": identity.pid_namespace,
        "process_start_ticks": identity.start_ticks,
        "uid": os.getuid(),
    }


def ranks() -> Numbers:
    """Where this process stands among the engine's, as far as vLLM has told it (``distributed/parallel_state.py``)."""
    state = sys.modules.get("vllm.distributed.parallel_state")
    places = {
        "rank": ("_WORLD", "rank"),
        "local_rank": ("_WORLD", "local_rank"),
        "tensor_parallel_rank": ("_TP", "rank_in_group"),
        "pipeline_parallel_rank": ("_PP", "rank_in_group"),
        "data_parallel_rank": ("_DP", "rank_in_group"),
    }
    found: Numbers = {}
    for name, (group, attribute) in places.items():
        value = getattr(getattr(state, group, None), attribute, None)
        if isinstance(value, int):
            found[name] = value
    return found
