"""One device: what is read of it, how often, and what it was found to lack.

Calls into the library with MIG off, where n is ``process_every``:

====================  =============================================================================
each poll             memory
each n-th poll        process list, MIG mode, utilisation, temperature, and one call for all fields
                      (power, ECC, remapped rows, recovery action)
====================  =============================================================================

That is 2.25 a poll with n = 4. A poll after a failure reads everything. With MIG on, the slices are walked in each
poll, since a slice's handle dies with it and may come to mean another one. A call that a device or its driver does not
have (FUNCTION_NOT_FOUND, NOT_SUPPORTED) is made once, until the driver is initialised anew or MIG is switched.
"""

from __future__ import annotations

import ctypes
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pynvml

from oomwatch.observations import (
    NOT_READ,
    Absent,
    GpuPoll,
    GpuProcess,
    Maybe,
    Memory,
    MigInstance,
    RemappedRows,
    known,
)
from oomwatch.sources.nvml.calls import Handle, Nvml, ProcessLists, error_name

# The device does not answer, or not by this handle: what else could be asked of it would fail too.
GONE = frozenset(
    {
        "UNINITIALIZED",
        "INVALID_ARGUMENT",
        "NOT_FOUND",
        "DRIVER_NOT_LOADED",
        "GPU_IS_LOST",
        "GPU_NOT_FOUND",
        "LIB_RM_VERSION_MISMATCH",
    }
)
_LACKING = frozenset({"FUNCTION_NOT_FOUND", "NOT_SUPPORTED"})

# Devices without memory of their own; only for these does NOT_SUPPORTED mean the host's. Grace Hopper has its own.
_INTEGRATED = re.compile(r"\b(GB10|N1X|Orin|Tegra|Thor|Xavier)\b", re.IGNORECASE)

_POWER_INSTANT, _ECC_CORRECTED, _ECC_UNCORRECTED, _RECOVERY_ACTION = 186, 3, 4, 230
_REMAPPED = (142, 143, 144, 145)  # correctable, uncorrectable, pending, failure
_HEALTH_FIELDS = (_ECC_CORRECTED, _ECC_UNCORRECTED, *_REMAPPED, _RECOVERY_ACTION)
_UNKNOWN_FIELD = _LACKING | {"INVALID_ARGUMENT"}
_VALUE_MEMBERS = {0: "dVal", 2: "ulVal", 3: "ullVal", 4: "sllVal"}  # nvmlValueType_t; the others fit uiVal


def address(handle: Handle) -> int | None:
    """What makes two of pynvml's handles the same one; the objects themselves never compare equal."""
    return ctypes.cast(handle, ctypes.c_void_p).value


@dataclass(frozen=True)
class Identity:
    """Who sits at an index: the uuid is what lasts, index and handle may change with any enumeration."""

    uuid: str
    index: int
    handle: Handle
    name: str
    pci_bus_id: Maybe[str]


class Device:
    """Reads one device. :meth:`poll` belongs to the device's thread; the rest may be called from others."""

    def __init__(
        self,
        nvml: Nvml,
        identity: Identity,
        *,
        process_every: int,
        collect_health: bool,
        host_memory: Callable[[], tuple[int, int]],
        clock: Callable[[], float],
    ) -> None:
        self.uuid = identity.uuid
        self.name = identity.name
        self.index = identity.index
        self.pci_bus_id = identity.pci_bus_id
        self.handle: Handle | None = identity.handle
        self._nvml = nvml
        self._process_every = process_every
        self._collect_health = collect_health
        self._host_memory = host_memory
        self._clock = clock
        self.forget()

    def forget(self) -> None:
        """Asks everything anew at the next poll."""
        self._lists = ProcessLists(self._nvml)
        self._lacks: dict[str, Absent] = {}
        self._lacks_field: dict[int, Absent] = {}
        self._memory_v2 = True
        self._unified = False
        self._mig = False
        self._slices: dict[str, tuple[int, int]] = {}
        self._missing_slices = ""  # why slices that may be there are not in the poll
        self._until_full = 0  # polls
        self._full_next = False

    def read_all_next(self) -> None:
        """Whatever the poll that runs now may find, the next one leaves nothing out."""
        self._full_next = True

    def poll(self) -> GpuPoll:
        begin = time.monotonic()
        full = self._until_full <= 0 or self._full_next
        self._full_next = False
        self._missing_slices = ""
        memory = self._read_memory()
        if isinstance(memory, Absent) and (memory.reason in GONE or self.handle is None):
            self._until_full = 0
            return self.describe(memory, memory, seconds=time.monotonic() - begin)
        mig_enabled, slices = self._read_mig(full)
        processes: Maybe[tuple[GpuProcess, ...]] = NOT_READ
        if full or self._unified:
            processes = self._read_processes(memory)
        if self._unified:
            memory = self._shared_memory(processes)
        readings = self._read_optional() if full else {}
        poll = self.describe(
            memory,
            processes,
            mig=slices,
            mig_enabled=mig_enabled,
            unified=self._unified,
            seconds=time.monotonic() - begin,
            **readings,
        )
        if isinstance(processes, Absent) and processes.reason in GONE:
            self.handle = None
        self._until_full = 0 if self.failure_of(poll) else (self._process_every if full else self._until_full) - 1
        return poll

    def failure_of(self, poll: GpuPoll) -> str:
        """What went wrong in the last poll, in short; empty when nothing did."""
        return failure_of(poll) or self._missing_slices

    def describe(
        self, memory: Maybe[Memory], processes: Maybe[tuple[GpuProcess, ...]], *, seconds: float, **readings: Any
    ) -> GpuPoll:
        """A poll of this device with these contents, as of now."""
        return GpuPoll(
            t=self._clock(),
            uuid=self.uuid,
            index=self.index,
            name=self.name,
            memory=memory,
            processes=processes,
            pci_bus_id=self.pci_bus_id,
            seconds=seconds,
            **readings,
        )

    # --- memory --------------------------------------------------------------------------------------------------

    def _read_memory(self) -> Maybe[Memory]:
        """Memory by the handle at hand; if that fails as a stale one would, by the handle that the uuid has now."""
        lost = False
        if self.handle is not None:
            answer = self._memory_of(self.handle)
            if not isinstance(answer, Absent) or answer.reason not in GONE - {"UNINITIALIZED"}:
                return answer
            lost = answer.reason == "GPU_IS_LOST"
        found = self._nvml.call("nvmlDeviceGetHandleByUUID", pynvml.nvmlDeviceGetHandleByUUID, self.uuid)
        if not isinstance(found, Absent):
            self.handle = found
            return self._memory_of(found)
        if lost:
            return Absent("GPU_IS_LOST")
        self.handle = None
        return found

    def _memory_of(self, handle: Handle) -> Maybe[Memory]:
        if self._unified:
            return Absent("NOT_SUPPORTED")
        answer: Any = Absent("FUNCTION_NOT_FOUND")
        if self._memory_v2:
            answer = self._nvml.call(
                "nvmlDeviceGetMemoryInfo_v2", pynvml.nvmlDeviceGetMemoryInfo, handle, pynvml.nvmlMemory_v2
            )
            if not isinstance(answer, Absent):
                return Memory(answer.total, answer.reserved, answer.used, answer.free)
            if answer.reason not in _LACKING | {"ARGUMENT_VERSION_MISMATCH"}:
                return answer
            self._memory_v2 = answer.reason != "FUNCTION_NOT_FOUND"
        answer = self._nvml.call("nvmlDeviceGetMemoryInfo", pynvml.nvmlDeviceGetMemoryInfo, handle)
        if not isinstance(answer, Absent):
            self._memory_v2 = False
            return Memory(answer.total, None, answer.used, answer.free)
        self._unified = answer.reason == "NOT_SUPPORTED" and _INTEGRATED.search(self.name) is not None
        return answer

    def _shared_memory(self, processes: Maybe[tuple[GpuProcess, ...]]) -> Maybe[Memory]:
        """The host's memory, of which the device's processes use the sum of what they are listed with."""
        if isinstance(processes, Absent):
            return processes
        used = [process.used for process in processes]
        if None in used:
            return Absent("NOT_SUPPORTED")
        total, available = self._host_memory()
        return Memory(total=total, reserved=None, used=sum(part or 0 for part in used), free=available)

    def _read_processes(self, memory: Maybe[Memory]) -> Maybe[tuple[GpuProcess, ...]]:
        answer: Maybe[tuple[GpuProcess, ...]] = self._remembered(
            "nvmlDeviceGetComputeRunningProcesses_v3", lambda: self._lists.read(self.handle, memory)
        )
        return answer

    # --- MIG -----------------------------------------------------------------------------------------------------

    def _read_mig(self, full: bool) -> tuple[Maybe[bool], tuple[MigInstance, ...]]:
        """Whether MIG is on, and the slices: walked in each poll while it is on."""
        slices = self._walk(full) if self._mig else None
        if slices is not None:
            return True, slices
        if not full and not self._mig:
            return NOT_READ, ()
        mode = self._ask("nvmlDeviceGetMigMode", pynvml.nvmlDeviceGetMigMode, self.handle)
        if isinstance(mode, Absent):  # not known is not off: what is remembered of the slices stays
            return mode, ()
        on = mode[0] == pynvml.NVML_DEVICE_MIG_ENABLE
        if not on:
            self._missing_slices = ""
        if on != self._mig:
            self._mig = on
            self._lacks.clear()
            self._lacks_field.clear()
            self._slices = {}
        return on, (self._walk(full) or ()) if on else ()

    def _walk(self, full: bool) -> tuple[MigInstance, ...] | None:
        """The slices there are; None when MIG turns out to be off."""
        self._missing_slices = ""
        slots = self._nvml.call("nvmlDeviceGetMaxMigDeviceCount", pynvml.nvmlDeviceGetMaxMigDeviceCount, self.handle)
        if isinstance(slots, Absent) or not slots:
            self._miss("slices", slots)
            return None
        found = []
        for slot in range(slots):
            handle = self._nvml.call(
                "nvmlDeviceGetMigDeviceHandleByIndex",
                pynvml.nvmlDeviceGetMigDeviceHandleByIndex,
                self.handle,
                slot,
                normal="NOT_FOUND",
            )
            if isinstance(handle, Absent):
                self._miss(f"slice at index {slot}", handle)
            else:
                found.append(self._read_slice(slot, handle, full))
        slices = tuple(part for part in found if part is not None)
        self._slices = {part.uuid: (part.gi, part.ci) for part in slices}
        return slices

    def _read_slice(self, slot: int, handle: Handle, full: bool) -> MigInstance | None:
        """A slice; None when it goes away meanwhile. The processes of one that is new are read at once."""
        uuid = self._nvml.text("nvmlDeviceGetUUID", pynvml.nvmlDeviceGetUUID, handle)
        if isinstance(uuid, Absent):
            self._miss(f"slice at index {slot}", uuid)
            return None
        ids = self._slices.get(uuid) or self._instance_ids(handle)
        if isinstance(ids, Absent):
            self._miss(f"slice at index {slot}", ids)
            return None
        memory = self._memory_of(handle)
        processes: Maybe[tuple[GpuProcess, ...]] = NOT_READ
        if full or uuid not in self._slices:
            processes = self._remembered(f"processes of {uuid}", lambda: self._lists.read(handle, memory))
        return MigInstance(uuid, *ids, memory, processes)

    def _instance_ids(self, handle: Handle) -> Maybe[tuple[int, int]]:
        gi = self._nvml.call("nvmlDeviceGetGpuInstanceId", pynvml.nvmlDeviceGetGpuInstanceId, handle)
        if isinstance(gi, Absent):
            return gi
        ci = self._nvml.call("nvmlDeviceGetComputeInstanceId", pynvml.nvmlDeviceGetComputeInstanceId, handle)
        return ci if isinstance(ci, Absent) else (gi, ci)

    def _miss(self, what: str, answer: Maybe[object]) -> None:
        """Keeps why slices are left out, unless they are just gone; of several reasons the first."""
        if isinstance(answer, Absent) and answer.reason not in GONE and not self._missing_slices:
            self._missing_slices = f"{what}: {answer.reason}"

    # --- what is good to have ------------------------------------------------------------------------------------

    def _read_optional(self) -> dict[str, Any]:
        fields = self._read_fields()
        rates = self._ask("nvmlDeviceGetUtilizationRates", pynvml.nvmlDeviceGetUtilizationRates, self.handle)
        degrees = self._ask(
            "nvmlDeviceGetTemperature", pynvml.nvmlDeviceGetTemperature, self.handle, pynvml.NVML_TEMPERATURE_GPU
        )
        milliwatts = fields[_POWER_INSTANT]
        if isinstance(milliwatts, Absent):
            milliwatts = self._ask("nvmlDeviceGetPowerUsage", pynvml.nvmlDeviceGetPowerUsage, self.handle)
        readings: dict[str, Any] = {
            "utilization": rates if isinstance(rates, Absent) else rates.gpu / 100,
            "temperature": degrees if isinstance(degrees, Absent) else float(degrees),
            "power": milliwatts if isinstance(milliwatts, Absent) else milliwatts / 1000,
        }
        if self._collect_health:
            readings["ecc_corrected"] = fields[_ECC_CORRECTED]
            readings["ecc_uncorrected"] = fields[_ECC_UNCORRECTED]
            readings["recovery_action"] = fields[_RECOVERY_ACTION]
            readings["remapped_rows"] = _remapped_rows([fields[field_id] for field_id in _REMAPPED])
        return readings

    def _read_fields(self) -> dict[int, Maybe[int]]:
        wanted = (_POWER_INSTANT, *(_HEALTH_FIELDS if self._collect_health else ()))
        ask = [field_id for field_id in wanted if field_id not in self._lacks_field]
        fields: dict[int, Maybe[int]] = dict(self._lacks_field)
        if not ask:
            return fields
        values = self._ask("nvmlDeviceGetFieldValues", pynvml.nvmlDeviceGetFieldValues, self.handle, ask)
        if isinstance(values, Absent):
            return fields | dict.fromkeys(ask, values)
        for field_id, value in zip(ask, values, strict=True):
            if not value.nvmlReturn:
                fields[field_id] = int(getattr(value.value, _VALUE_MEMBERS.get(value.valueType, "uiVal")))
                continue
            lack = Absent(error_name(value.nvmlReturn))
            fields[field_id] = lack
            if lack.reason in _UNKNOWN_FIELD:
                self._lacks_field[field_id] = lack
        return fields

    def _ask(self, function: str, do: Callable[..., Any], *arguments: object) -> Any:
        return self._remembered(function, lambda: self._nvml.call(function, do, *arguments))

    def _remembered(self, function: str, ask: Callable[[], Any]) -> Any:
        """The answer; of a function that this device lacks, the refusal of the first time."""
        if function in self._lacks:
            return self._lacks[function]
        answer = ask()
        if isinstance(answer, Absent) and answer.reason in _LACKING:
            self._lacks[function] = answer
        return answer


def _remapped_rows(fields: list[Maybe[int]]) -> Maybe[RemappedRows]:
    for field_value in fields:
        if isinstance(field_value, Absent):
            return field_value
    correctable, uncorrectable, pending, failed = (known(field_value) or 0 for field_value in fields)
    return RemappedRows(correctable, uncorrectable, bool(pending), bool(failed))


def failure_of(poll: GpuPoll) -> str:
    """What went wrong as the poll itself shows it, in short; empty when nothing did.

    A MIG parent that may not be read (its slices may) and a list that the platform does not have are no failures.
    """
    allowed = _LACKING | ({"NO_PERMISSION"} if poll.mig_enabled is True else frozenset())
    if isinstance(poll.memory, Absent) and not (poll.mig_enabled is True and poll.memory.reason == "NO_PERMISSION"):
        return f"memory: {poll.memory.reason}"
    if isinstance(poll.processes, Absent) and poll.processes != NOT_READ and poll.processes.reason not in allowed:
        return f"processes: {poll.processes.reason}"
    return ""
