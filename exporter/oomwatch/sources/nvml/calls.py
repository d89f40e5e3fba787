"""Calls into the driver library: an answer or Absent with NVML's error name, counted and timed.

pynvml's exceptions end here. They must not be compared or put into a set (``__eq__`` without ``__hash__``), and
NVMLLibraryMismatchError, which nvidia-ml-py raises from 12.560.30 on, is not one of them.
"""

from __future__ import annotations

import ctypes
import struct
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pynvml

from oomwatch.observations import IMPLAUSIBLE, Absent, GpuProcess, Maybe, Memory
from oomwatch.plausibility import plausible, possible_pid

T = TypeVar("T")
Handle = Any  # pynvml's pointer to a device

_LIBRARY_MISMATCH: type[Exception] | tuple[()] = getattr(pynvml, "NVMLLibraryMismatchError", ())

# nvmlReturn_t by number, so that the names do not depend on the version of the binding.
_NAMES = (
    "SUCCESS",
    "UNINITIALIZED",
    "INVALID_ARGUMENT",
    "NOT_SUPPORTED",
    "NO_PERMISSION",
    "ALREADY_INITIALIZED",
    "NOT_FOUND",
    "INSUFFICIENT_SIZE",
    "INSUFFICIENT_POWER",
    "DRIVER_NOT_LOADED",
    "TIMEOUT",
    "IRQ_ISSUE",
    "LIBRARY_NOT_FOUND",
    "FUNCTION_NOT_FOUND",
    "CORRUPTED_INFOROM",
    "GPU_IS_LOST",
    "RESET_REQUIRED",
    "OPERATING_SYSTEM",
    "LIB_RM_VERSION_MISMATCH",
    "IN_USE",
    "MEMORY",
    "NO_DATA",
    "VGPU_ECC_NOT_SUPPORTED",
    "INSUFFICIENT_RESOURCES",
    "FREQ_NOT_SUPPORTED",
    "ARGUMENT_VERSION_MISMATCH",
    "DEPRECATED",
    "NOT_READY",
    "GPU_NOT_FOUND",
    "INVALID_STATE",
    "RESET_TYPE_NOT_SUPPORTED",
)

# Series that exist with 0 from the start, so that a first error is an increase and not a new series.
_EXPECTED_ERRORS = (
    "UNINITIALIZED",
    "INVALID_ARGUMENT",
    "NOT_SUPPORTED",
    "NO_PERMISSION",
    "NOT_FOUND",
    "TIMEOUT",
    "FUNCTION_NOT_FOUND",
    "GPU_IS_LOST",
    "UNKNOWN",
)
_MAIN_FUNCTIONS: Mapping[str, tuple[str, ...]] = {
    "nvmlInitWithFlags": (
        "LIBRARY_NOT_FOUND",
        "DRIVER_NOT_LOADED",
        "NO_PERMISSION",
        "LIB_RM_VERSION_MISMATCH",
        "UNKNOWN",
    ),
    "nvmlDeviceGetCount_v2": ("UNINITIALIZED", "DRIVER_NOT_LOADED", "UNKNOWN"),
    "nvmlDeviceGetHandleByIndex_v2": _EXPECTED_ERRORS,
    "nvmlDeviceGetHandleByUUID": _EXPECTED_ERRORS,
    "nvmlDeviceGetMemoryInfo_v2": _EXPECTED_ERRORS,
    "nvmlDeviceGetMemoryInfo": _EXPECTED_ERRORS,
    "nvmlDeviceGetComputeRunningProcesses_v3": _EXPECTED_ERRORS,
}


def error_name(code: int) -> str:
    """NVML's name of an error code without ``NVML_ERROR_``; ``ERROR_<code>`` for one younger than this table."""
    if 0 <= code < len(_NAMES):
        return _NAMES[code]
    return "UNKNOWN" if code == 999 else f"ERROR_{code}"


@dataclass(frozen=True)
class FunctionStats:
    """Calls of one function of the library since start; ``errors`` by NVML's error name."""

    calls: int
    seconds: float
    errors: Mapping[str, int]


CallStats = Mapping[str, FunctionStats]


@dataclass
class _Tally:
    calls: int = 0
    seconds: float = 0.0
    errors: dict[str, int] = field(default_factory=dict)


class Nvml:
    """The one door to the driver library; safe to use from many threads."""

    def __init__(self) -> None:
        self.loader_error = ""  # the dynamic loader's text, which LIBRARY_NOT_FOUND itself does not carry
        self._lock = threading.Lock()
        self._tallies = {name: _Tally(errors=dict.fromkeys(errors, 0)) for name, errors in _MAIN_FUNCTIONS.items()}
        self._running: dict[int, tuple[str, float]] = {}  # by thread

    def call(self, function: str, do: Callable[..., T], *arguments: object, normal: str = "") -> Maybe[T]:
        """What ``do`` answers, counted as ``function``. ``normal`` is an error that means nothing is wrong."""
        thread = threading.get_ident()
        begin = time.monotonic()
        self._running[thread] = (function, begin)
        answer: Maybe[T]
        try:
            answer = do(*arguments)
        except pynvml.NVMLError as error:
            answer = Absent(error_name(error.value))
            if isinstance(error.__context__, OSError):
                self.loader_error = str(error.__context__)
        except _LIBRARY_MISMATCH:
            answer = Absent("FUNCTION_NOT_FOUND")
        finally:
            del self._running[thread]
        failed = isinstance(answer, Absent) and answer.reason != normal
        with self._lock:
            tally = self._tallies.setdefault(function, _Tally())
            tally.calls += 1
            tally.seconds += time.monotonic() - begin
            if failed and isinstance(answer, Absent):
                tally.errors[answer.reason] = tally.errors.get(answer.reason, 0) + 1
        return answer

    def text(self, function: str, do: Callable[..., str], *arguments: object) -> Maybe[str]:
        """As :meth:`call`, for strings: what is not UTF-8 is replaced, where pynvml would fail."""

        def tolerant() -> str:
            try:
                return do(*arguments)
            except UnicodeDecodeError as error:
                return error.object.decode("utf-8", "replace")

        return self.call(function, tolerant)

    def stats(self) -> CallStats:
        with self._lock:
            return {
                name: FunctionStats(tally.calls, tally.seconds, dict(tally.errors))
                for name, tally in self._tallies.items()
            }

    def running(self, thread: int | None = None) -> tuple[str, float] | None:
        """Function and age in seconds of the call that ``thread`` is in; without a thread, of the oldest call."""
        now = time.monotonic()
        running = self._running.copy()
        found = [entry for ident, entry in running.items() if thread is None or ident == thread]
        if not found:
            return None
        function, begin = min(found, key=lambda entry: entry[1])
        return function, now - begin


class ProcessLists:
    """Reads compute process lists, for one thread.

    One raw call with a kept buffer stands for pynvml's two (a size probe, then a fresh array): half the calls into the
    driver, a quarter of the time, no race between probe and fill, and no dependence on which of the versioned wrappers
    the installed pynvml has. The buffer has room for 32-byte entries, so that early R535 drivers do not write past it.
    """

    _FUNCTIONS = ("nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetComputeRunningProcesses_v2")
    _ENTRY = struct.Struct("@IQ")  # pid and usedGpuMemory; instance ids follow
    _STEPS = (24, 32)
    _NOT_AVAILABLE = 2**64 - 1

    def __init__(self, nvml: Nvml, capacity: int = 256) -> None:
        self._nvml = nvml
        self._functions = list(self._FUNCTIONS)
        self._resize(capacity)

    def read(self, handle: Handle, memory: Maybe[Memory]) -> Maybe[tuple[GpuProcess, ...]]:
        """The list; of two ways to read it, the one that agrees with ``memory``. IMPLAUSIBLE if no pid is possible."""
        count = self._fill(handle)
        if isinstance(count, Absent):
            return count
        readings = [self._parse(count, step) for step in self._STEPS]
        for processes in readings:
            if plausible(processes, memory):
                return processes
        as_read = readings[0]
        return as_read if any(possible_pid(process.pid) for process in as_read) else IMPLAUSIBLE

    def _fill(self, handle: Handle) -> Maybe[int]:
        answer: Maybe[int] = Absent("FUNCTION_NOT_FOUND")
        while self._functions:
            for _ in range(3):  # the kept buffer, a grown one, and once more for processes that came meanwhile
                need = ctypes.c_uint(self._capacity)
                answer = self._nvml.call(self._functions[0], self._call, handle, need, normal="INSUFFICIENT_SIZE")
                if answer != Absent("INSUFFICIENT_SIZE"):
                    break
                self._resize(max(need.value, self._capacity) * 2)
            if answer != Absent("FUNCTION_NOT_FOUND"):
                return answer
            del self._functions[0]
        return answer

    def _call(self, handle: Handle, count: ctypes.c_uint) -> int:
        function = getattr(pynvml.nvmlLib, self._functions[0], None)
        if function is None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
        code = function(handle, ctypes.byref(count), self._buffer)
        if code:
            raise pynvml.NVMLError(code)
        return min(count.value, self._capacity)

    def _resize(self, capacity: int) -> None:
        self._capacity = capacity
        self._buffer = ctypes.create_string_buffer(capacity * max(self._STEPS))

    def _parse(self, count: int, step: int) -> tuple[GpuProcess, ...]:
        entries = (self._ENTRY.unpack_from(self._buffer, index * step) for index in range(count))
        return tuple(GpuProcess(pid, None if used == self._NOT_AVAILABLE else used) for pid, used in entries)
