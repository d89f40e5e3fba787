"""The tests' side of the simulated driver library: writes the state file, reads the counters."""

import ctypes
import mmap
import struct
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from tests.nvml_sim import layout
from tests.nvml_sim.layout import DeviceRecord, Family, FaultRecord, Kind, MigRecord, Option, StateRecord

MIB = 1 << 20
GIB = 1 << 30

GPU_IS_LOST = 15
UNINITIALIZED = 1
XID_EVENT = 8

_UNSUPPORTED_ON_H100 = frozenset({Family.RETIRED_PAGES, Family.NUMA_NODE})


@dataclass(frozen=True)
class Process:
    """One entry of a process list; `used` in bytes, None = the driver doesn't know."""

    pid: int
    used: int | None = GIB
    name: str | bytes = "VLLM::EngineCore"
    kinds: Kind = Kind.COMPUTE
    gpu_instance: int | None = None
    compute_instance: int | None = None
    hidden: bool = False
    """Holds memory and isn't listed: a process of another container."""
    cc_protected: int | None = 0
    sm_percent: int = 0
    memory_percent: int = 0
    encoder_percent: int = 0
    decoder_percent: int = 0
    sampled_us: int = 0
    """Time of the utilisation sample in microseconds; 0 = no sample."""


@dataclass(frozen=True)
class MigSlice:
    """A MIG compute instance with its own memory, in bytes; `used` is without `reserved`."""

    gpu_instance: int
    compute_instance: int = 0
    total: int = 10 * GIB
    reserved: int = 16 * MIB
    used: int = 0
    uuid: str | None = None
    multiprocessors: int = 16
    gpu_slices: int = 1
    compute_slices: int = 1


@dataclass(frozen=True)
class RetiredPage:
    """A page of GPU memory no longer in use; cause 0 = single bit errors, 1 = double bit error."""

    address: int
    cause: int
    timestamp: int = 0


@dataclass(frozen=True)
class Accounted:
    """What the driver's accounting kept of one process; memory in bytes."""

    pid: int
    max_memory: int | None = GIB
    running: bool = True
    gpu_percent: int = 0
    memory_percent: int = 0
    time_ms: int = 0
    started_us: int = 0


@dataclass(frozen=True)
class Gpu:
    """A GPU as it starts: an idle H100 with 80 GiB. Sizes in bytes, power in mW, energy in mJ, temperatures in °C.

    None for `uuid`, `serial`, `bus` and `minor` = one derived from the slot; an empty serial = not supported."""

    uuid: str | None = None
    name: str | bytes = "NVIDIA H100 80GB HBM3"
    serial: str | None = None
    domain: int = 0
    bus: int | None = None
    pci_device_id: int = 0x233010DE
    pci_subsystem_id: int = 0x16C110DE
    minor: int | None = None
    total: int = 80 * GIB
    reserved: int = 600 * MIB
    used: int = 0
    bar1_total: int = 128 * GIB
    bar1_used: int = 0
    temperature: int = 40
    memory_temperature: int = 45
    power_mw: int = 90_000
    power_limit_mw: int = 700_000
    energy_mj: int = 1_000_000
    ecc_enabled: bool = True
    mig_max: int = 7
    virtualization_mode: int = 0
    numa_node: int = 0
    addressing_mode: int = 0
    unsupported: frozenset[Family] = _UNSUPPORTED_ON_H100

    @staticmethod
    def consumer() -> "Gpu":
        """A GPU without ECC, MIG, a serial or a row remapper."""
        lacks = {Family.ECC_ERRORS, Family.ECC_MODE, Family.REMAPPED_ROWS, Family.PROCESS_DETAIL, Family.CONF_COMPUTE}
        return Gpu(
            name="NVIDIA GeForce RTX 4090",
            serial="",
            total=24 * GIB,
            bar1_total=32 * GIB,
            ecc_enabled=False,
            mig_max=0,
            unsupported=_UNSUPPORTED_ON_H100 | lacks,
        )

    @staticmethod
    def unified_memory() -> "Gpu":
        """A GPU that shares the host's memory (GB10): both memory calls answer NOT_SUPPORTED, processes are listed."""
        lacks = {Family.MEMORY, Family.BAR1, Family.ECC_ERRORS, Family.ECC_MODE, Family.REMAPPED_ROWS}
        return Gpu(
            name="NVIDIA GB10",
            serial="",
            total=0,
            reserved=0,
            bar1_total=0,
            ecc_enabled=False,
            mig_max=0,
            addressing_mode=2,
            unsupported=_UNSUPPORTED_ON_H100 | lacks,
        )


@dataclass(frozen=True)
class Mark:
    """The counters at one moment, for `Sim.calls(..., since=mark)`."""

    total: tuple[int, ...]
    devices: tuple[tuple[int, ...], ...] = field(repr=False)


class Sim:
    """The state behind one simulated driver, in a new file at `path` (FileExistsError when there is one).

    Every change is seen by the next call of every process that uses the file. A fault belongs to the whole driver
    (device None: calls on any GPU and on none), to a GPU, or to a MIG slice of a GPU (device and mig)."""

    def __init__(
        self,
        path: Path,
        gpus: int | Sequence[Gpu] = 2,
        *,
        driver_version: str = "550.163.01",
        nvml_version: str = "12.550.163.01",
        cuda_version: int = 12040,
        options: Option = Option.NONE,
    ) -> None:
        self.path = path
        size = ctypes.sizeof(StateRecord)
        with path.open("x+b") as file:
            file.truncate(size)
            self._map = mmap.mmap(file.fileno(), size)
        self._state = StateRecord.from_buffer(self._map)
        self._lock = threading.RLock()
        self._writers = 0
        with self.write() as state:
            state.version, state.size = layout.VERSION, size
            state.stale_code, state.options, state.cuda_version = UNINITIALIZED, options, cuda_version
            state.driver_version, state.nvml_version = driver_version.encode(), nvml_version.encode()
            for gpu in [Gpu()] * gpus if isinstance(gpus, int) else gpus:
                self.add_gpu(gpu)
        self._state.magic = layout.MAGIC

    def __enter__(self) -> "Sim":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let every hung call go; the file stays for processes that still read it."""
        self.clear_faults()

    @contextmanager
    def write(self) -> Generator[StateRecord]:
        """The raw state, for changes that a reader must see together; nests."""
        with self._lock:
            if self._writers == 0:
                self._state.sequence += 1
            self._writers += 1
            try:
                yield self._state
            finally:
                self._writers -= 1
                if self._writers == 0:
                    self._state.sequence += 1

    # GPUs

    def add_gpu(self, gpu: Gpu | None = None) -> int:
        """Put a GPU into the first free slot and return the slot; ValueError when all are taken."""
        gpu = gpu or Gpu()
        with self.write() as state:
            free = (slot for slot in range(layout.MAX_DEVICES) if not state.devices[slot].uuid)
            slot = next(free, None)
            if slot is None:
                raise ValueError(f"all {layout.MAX_DEVICES} slots hold a GPU")
            record = state.devices[slot]
            record.generation += 1
            record.uuid = _text(gpu.uuid or f"GPU-{slot:08x}-0000-4000-8000-{slot:012x}", 96)
            record.name = _text(gpu.name, 96)
            record.serial = _text(f"16509{slot:08d}" if gpu.serial is None else gpu.serial, 64)
            record.pci_domain, record.pci_bus = gpu.domain, 0x10 + slot if gpu.bus is None else gpu.bus
            record.pci_device_id, record.pci_subsystem_id = gpu.pci_device_id, gpu.pci_subsystem_id
            record.minor = slot if gpu.minor is None else gpu.minor
            record.total, record.reserved, record.used = gpu.total, gpu.reserved, gpu.used
            record.bar1_total, record.bar1_used = gpu.bar1_total, gpu.bar1_used
            record.temperature, record.memory_temperature = gpu.temperature, gpu.memory_temperature
            record.power_mw, record.power_limit_mw, record.energy_mj = gpu.power_mw, gpu.power_limit_mw, gpu.energy_mj
            record.clock_reasons = 1
            record.ecc_current = record.ecc_pending = int(gpu.ecc_enabled)
            record.mig_max, record.virtualization_mode = gpu.mig_max, gpu.virtualization_mode
            record.numa_node, record.addressing_mode = gpu.numa_node, gpu.addressing_mode
            record.unsupported = sum(1 << family for family in gpu.unsupported)
            record.absent_code = GPU_IS_LOST
            record.present = 1
            return slot

    def remove_gpu(self, device: int) -> None:
        """Take the GPU out for good and free its slot; handles to it answer INVALID_ARGUMENT once it is taken again."""
        with self.write() as state:
            record = state.devices[device]
            generation = record.generation
            counters = bytes(record.counters)
            ctypes.memset(ctypes.addressof(record), 0, ctypes.sizeof(record))
            ctypes.memmove(ctypes.addressof(record.counters), counters, len(counters))
            record.generation, record.absent_code = generation, GPU_IS_LOST

    def vanish(self, device: int, code: int = GPU_IS_LOST) -> None:
        """Take the GPU out of the count: later GPUs move down one index, and handles to it answer `code`."""
        with self.write() as state:
            state.devices[device].absent_code = code
            state.devices[device].present = 0

    def lose(self, device: int, code: int = GPU_IS_LOST) -> None:
        """Let every call on the GPU and its slices answer `code`; the count and the other GPUs stay as they are."""
        with self.write() as state:
            state.devices[device].lost_code = code

    def heal(self, device: int) -> None:
        """Undo `lose` and `vanish`, and clear the faults of the GPU and its slices; hung calls go on."""
        with self.write() as state:
            record = state.devices[device]
            record.lost_code, record.present = 0, int(bool(record.uuid))
            _clear_device(record)

    def uuid(self, device: int) -> str:
        """UUID of the GPU in this slot."""
        return self._state.devices[device].uuid.decode()

    def set_uuid(self, device: int, uuid: str) -> None:
        """Put another board into the slot: a new UUID, and old handles answer INVALID_ARGUMENT."""
        with self.write() as state:
            state.devices[device].uuid = _text(uuid, 96)
            state.devices[device].generation += 1

    def set_name(self, device: int, name: str | bytes) -> None:
        """Product name; bytes need not be UTF-8."""
        with self.write() as state:
            state.devices[device].name = _text(name, 96)

    def set_serial(self, device: int, serial: str | bytes) -> None:
        """Board serial; empty = NOT_SUPPORTED, 30 characters and more don't fit the buffer pynvml offers."""
        with self.write() as state:
            state.devices[device].serial = _text(serial, 64)

    def set_supported(self, device: int, family: Family, supported: bool = True) -> None:
        """Whether the GPU has what `family` asks for; otherwise NOT_SUPPORTED, which `heal` doesn't change."""
        with self.write() as state:
            record = state.devices[device]
            record.unsupported = record.unsupported & ~(1 << family) | (0 if supported else 1 << family)

    # Memory and processes

    def set_memory(
        self,
        device: int,
        *,
        mig: int | None = None,
        total: int | None = None,
        reserved: int | None = None,
        used: int | None = None,
        bar1_used: int | None = None,
    ) -> None:
        """Bytes of the GPU or of a slice; `used` is without `reserved`, as in version 2 of the call."""
        with self.write() as state:
            record: DeviceRecord | MigRecord = state.devices[device]
            if mig is not None:
                record = state.devices[device].mig[mig]
            _assign(record, total=total, reserved=reserved, used=used)
            _assign(state.devices[device], bar1_used=bar1_used)

    def set_processes(self, device: int, processes: Sequence[Process], used: int | None = None) -> None:
        """Replace the process list; `used` bytes of the GPU become the given number, or the sum over the list."""
        if len(processes) > layout.MAX_PROCESSES:
            raise ValueError(f"{len(processes)} processes, and the state file has room for {layout.MAX_PROCESSES}")
        with self.write() as state:
            record = state.devices[device]
            for target, process in zip(record.processes, processes):  # noqa: B905 (the array is longer)
                _fill_process(target, process)
            record.process_count, record.grown = len(processes), 0
            record.used = sum(process.used or 0 for process in processes) if used is None else used

    def grow_after_probe(self, device: int, by: int, probes: int | None = None) -> None:
        """Add `by` processes between each of the next `probes` (None: all) size probes and the read that follows."""
        with self.write() as state:
            record = state.devices[device]
            record.grow_by, record.grow_remaining, record.grown = by, -1 if probes is None else probes, 0

    def set_accounting(self, device: int, enabled: bool, processes: Sequence[Accounted] = (), buffer: int = 32) -> None:
        """Accounting mode and what it kept of each process."""
        with self.write() as state:
            record = state.devices[device]
            record.accounting_mode, record.accounting_buffer = int(enabled), buffer
            record.accounted_count = len(processes)
            for index, process in enumerate(processes):
                target = record.accounted[index]
                target.pid, target.running = process.pid, int(process.running)
                target.gpu_percent, target.memory_percent = process.gpu_percent, process.memory_percent
                target.max_memory = _or_not_available(process.max_memory)
                target.time_ms, target.started_us = process.time_ms, process.started_us

    # MIG

    def enable_mig(self, device: int, slices: Sequence[MigSlice] = ()) -> list[int]:
        """Turn MIG on and make these slices; returns their slots, which are their MIG indices."""
        with self.write() as state:
            state.devices[device].mig_current = state.devices[device].mig_pending = 1
            return [self.add_mig(device, slice_) for slice_ in slices]

    def add_mig(self, device: int, slice_: MigSlice, slot: int | None = None) -> int:
        """Make a slice in `slot`, or in the first free one; ValueError when it is taken."""
        with self.write() as state:
            record = state.devices[device]
            free = [index for index in range(record.mig_max) if not record.mig[index].present]
            chosen = slot if slot is not None else next(iter(free), None)
            if chosen is None or chosen not in free:
                raise ValueError(f"no free MIG slot on GPU {device} (wanted {slot}, free {free})")
            target = record.mig[chosen]
            target.gpu_instance, target.compute_instance = slice_.gpu_instance, slice_.compute_instance
            target.total, target.reserved, target.used = slice_.total, slice_.reserved, slice_.used
            target.multiprocessors = slice_.multiprocessors
            target.gpu_slices, target.compute_slices = slice_.gpu_slices, slice_.compute_slices
            default = f"MIG-{device:04x}{slice_.gpu_instance:04x}-{chosen:04x}-5000-8000-{target.generation:012x}"
            target.uuid = _text(slice_.uuid or default, 96)
            target.generation += 1
            target.present = 1
            return chosen

    def remove_mig(self, device: int, slot: int) -> None:
        """Destroy a slice: its handles answer INVALID_ARGUMENT, its index NOT_FOUND."""
        with self.write() as state:
            state.devices[device].mig[slot].present = 0

    def disable_mig(self, device: int) -> None:
        """Destroy all slices and turn MIG off."""
        with self.write() as state:
            record = state.devices[device]
            record.mig_current = record.mig_pending = 0
            for slot in range(layout.MAX_MIG):
                record.mig[slot].present = 0

    def mig_uuid(self, device: int, slot: int) -> str:
        """UUID of the slice in this slot."""
        return self._state.devices[device].mig[slot].uuid.decode()

    # Sensors and errors

    def set_sensors(
        self,
        device: int,
        *,
        gpu_percent: int | None = None,
        memory_percent: int | None = None,
        temperature: int | None = None,
        memory_temperature: int | None = None,
        power_mw: int | None = None,
        power_limit_mw: int | None = None,
        energy_mj: int | None = None,
        performance_state: int | None = None,
        clock_reasons: int | None = None,
    ) -> None:
        """Change the given readings and leave the others."""
        with self.write() as state:
            _assign(
                state.devices[device],
                gpu_percent=gpu_percent,
                memory_percent=memory_percent,
                temperature=temperature,
                memory_temperature=memory_temperature,
                power_mw=power_mw,
                power_limit_mw=power_limit_mw,
                energy_mj=energy_mj,
                performance_state=performance_state,
                clock_reasons=clock_reasons,
            )

    def set_ecc(
        self,
        device: int,
        *,
        enabled: bool | None = None,
        pending: bool | None = None,
        corrected_volatile: int | None = None,
        corrected_aggregate: int | None = None,
        uncorrected_volatile: int | None = None,
        uncorrected_aggregate: int | None = None,
    ) -> None:
        """ECC mode (the counters answer NOT_SUPPORTED while it is off) and error counts."""
        counts = ((corrected_volatile, corrected_aggregate), (uncorrected_volatile, uncorrected_aggregate))
        with self.write() as state:
            record = state.devices[device]
            _assign(
                record,
                ecc_current=None if enabled is None else int(enabled),
                ecc_pending=None if pending is None else int(pending),
            )
            for kind, by_kind in enumerate(counts):
                for counter, count in enumerate(by_kind):
                    if count is not None:
                        record.ecc_errors[kind][counter] = count

    def set_remapped_rows(
        self, device: int, correctable: int = 0, uncorrectable: int = 0, pending: bool = False, failure: bool = False
    ) -> None:
        """Rows of GPU memory that were replaced, or wait for a reset, or could not be."""
        with self.write() as state:
            record = state.devices[device]
            record.remapped_correctable, record.remapped_uncorrectable = correctable, uncorrectable
            record.remapped_pending, record.remapped_failure = int(pending), int(failure)

    def set_retired_pages(self, device: int, pages: Sequence[RetiredPage], pending: bool = False) -> None:
        """Pages taken out of use on GPUs older than Ampere; makes the GPU one that has them."""
        with self.write() as state:
            record = state.devices[device]
            for index, page in enumerate(pages):
                target = record.retired[index]
                target.address, target.timestamp, target.cause = page.address, page.timestamp, page.cause
            record.retired_count, record.retired_pending = len(pages), int(pending)
            self.set_supported(device, Family.RETIRED_PAGES)

    def set_recovery_action(self, device: int, action: int) -> None:
        """Field 230: 0 none, 1 reset the GPU, 2 reboot the node, 3 drain peers, 4 drain and reset."""
        with self.write() as state:
            state.devices[device].recovery_action = action

    def set_virtualization_mode(self, device: int, mode: int) -> None:
        """0 none, 1 passthrough, 2 vGPU guest, 3 vGPU host, 4 vSGA host."""
        with self.write() as state:
            state.devices[device].virtualization_mode = mode

    def set_numa_node(self, device: int, node: int) -> None:
        """The NUMA node the GPU's memory is; makes the GPU one that is a node."""
        with self.write() as state:
            state.devices[device].numa_node = node
            self.set_supported(device, Family.NUMA_NODE)

    def set_addressing_mode(self, device: int, mode: int) -> None:
        """0 none, 1 HMM, 2 ATS."""
        with self.write() as state:
            state.devices[device].addressing_mode = mode

    def set_field(self, device: int, field_id: int, value: int | float = 0, *, code: int = 0, scope: int = 0) -> None:
        """What FieldValues answers for one field, over what it would derive; `code` is the field's own return code."""
        with self.write() as state:
            record = state.devices[device]
            known = [
                i
                for i in range(record.field_count)
                if (record.fields[i].id, record.fields[i].scope) == (field_id, scope)
            ]
            index = known[0] if known else record.field_count
            target = record.fields[index]
            target.id, target.scope, target.code = field_id, scope, code
            target.type = 0 if isinstance(value, float) else 3
            packed = struct.pack("<d", value) if isinstance(value, float) else struct.pack("<Q", value)
            target.bits = int.from_bytes(packed, "little")
            record.field_count = max(record.field_count, index + 1)

    def xid(
        self, device: int, code: int, *, gpu_instance: int | None = None, compute_instance: int | None = None
    ) -> None:
        """Report a critical Xid error to every event set that registered for it before."""
        self.event(device, XID_EVENT, code, gpu_instance=gpu_instance, compute_instance=compute_instance)

    def event(
        self,
        device: int,
        kind: int,
        data: int,
        *,
        gpu_instance: int | None = None,
        compute_instance: int | None = None,
    ) -> None:
        """Report an event of NVML type `kind` (a bit) with its number."""
        with self.write() as state:
            record = state.events[state.event_count % layout.MAX_EVENTS]
            record.device, record.type, record.data = device, kind, data
            record.gpu_instance = _or_no_instance(gpu_instance)
            record.compute_instance = _or_no_instance(compute_instance)
            state.event_count += 1

    # The driver

    def reload_driver(self, version: str | None = None, *, stale_code: int = UNINITIALIZED) -> None:
        """Reload the kernel module, with a new version if given: calls answer `stale_code` until shutdown and init.

        With Option.LIBRARY_PINNED a process that knew another version then gets LIB_RM_VERSION_MISMATCH at init."""
        with self.write() as state:
            if version is not None:
                state.driver_version, state.nvml_version = version.encode(), f"12.{version}".encode()
            state.stale_code = stale_code
            state.driver_gen += 1

    # Faults

    def fail(
        self,
        family: Family,
        code: int,
        device: int | None = None,
        *,
        mig: int | None = None,
        times: int | None = None,
    ) -> None:
        """Let calls answer `code`, the next `times` of them or (None) until `clear`."""
        with self.write():
            fault = self._fault(family, device, mig)
            fault.code, fault.remaining = code, -1 if times is None else times

    def delay(self, family: Family, seconds: float, device: int | None = None, *, mig: int | None = None) -> None:
        """Let each call take this long before it answers."""
        with self.write():
            self._fault(family, device, mig).delay_ms = round(seconds * 1000)

    def hang(self, family: Family, device: int | None = None, *, mig: int | None = None) -> None:
        """Let calls wait until `release`, `clear`, `heal` or `close`."""
        with self.write():
            self._fault(family, device, mig).hang = 1

    def release(self, family: Family, device: int | None = None, *, mig: int | None = None) -> None:
        """Let the calls that hang go on; they answer as they would have."""
        with self.write():
            self._fault(family, device, mig).hang = 0

    def clear(self, family: Family, device: int | None = None, *, mig: int | None = None) -> None:
        """End `fail`, `delay` and `hang` of one family."""
        with self.write():
            _clear(self._fault(family, device, mig))

    def clear_faults(self) -> None:
        """End `fail`, `delay` and `hang` everywhere; `lose` and `vanish` stay."""
        with self.write() as state:
            for fault in state.faults:
                _clear(fault)
            for record in state.devices:
                _clear_device(record)

    def _fault(self, family: Family, device: int | None, mig: int | None) -> FaultRecord:
        if device is None:
            return self._state.faults[family]
        record = self._state.devices[device]
        return record.faults[family] if mig is None else record.mig[mig].faults[family]

    # Counters

    def mark(self) -> Mark:
        """The counters now."""
        devices = tuple(tuple(record.counters.calls) for record in self._state.devices)
        return Mark(tuple(self._state.counters.calls), devices)

    def calls(self, family: Family | None = None, device: int | None = None, *, since: Mark | None = None) -> int:
        """Calls that reached the driver: of one family or all, on one GPU (with its slices) or any and none."""
        now = self.mark()
        counts = _chosen(now, device)
        before = _chosen(since, device) if since else (0,) * len(counts)
        families = list(Family) if family is None else [family]
        return sum(counts[index] - before[index] for index in families)

    def calls_by_family(self, device: int | None = None, *, since: Mark | None = None) -> dict[Family, int]:
        """The families that were called, with their counts."""
        counts = {family: self.calls(family, device, since=since) for family in Family}
        return {family: count for family, count in counts.items() if count}

    def inflight(self, family: Family | None = None, device: int | None = None) -> int:
        """Calls that are inside the driver now."""
        counters = self._state.counters if device is None else self._state.devices[device].counters
        return sum(counters.inflight) if family is None else counters.inflight[family]

    def sessions(self) -> int:
        """Processes that hold the library initialised; one that was killed counts for ever."""
        return self._state.opened - self._state.closed

    def initialisations(self) -> int:
        """Times a process initialised the library that had it not initialised before."""
        return self._state.opened

    def wait_inflight(self, family: Family, count: int, deadline: float = 10.0, *, device: int | None = None) -> None:
        """Wait until at least `count` calls (0: none) are inside the driver; TimeoutError after `deadline` seconds."""

        def reached() -> bool:
            inside = self.inflight(family, device)
            return inside >= count if count else inside == 0

        where = "the driver" if device is None else f"GPU {device}"
        _wait(
            reached, deadline, lambda: f"{self.inflight(family, device)} of {count} {family.name} calls inside {where}"
        )

    def wait_calls(
        self,
        family: Family | None,
        count: int,
        deadline: float = 10.0,
        *,
        device: int | None = None,
        since: Mark | None = None,
    ) -> None:
        """Wait until at least `count` calls were made since the mark; TimeoutError after `deadline` seconds."""
        name = "" if family is None else f"{family.name} "
        _wait(
            lambda: self.calls(family, device, since=since) >= count,
            deadline,
            lambda: f"{self.calls(family, device, since=since)} of {count} {name}calls made",
        )


def _wait(reached: Callable[[], bool], seconds: float, found: Callable[[], str]) -> None:
    end = time.monotonic() + seconds
    while not reached():
        if time.monotonic() > end:
            raise TimeoutError(f"after {seconds:g} s: {found()}")
        time.sleep(0.002)


def _chosen(mark: Mark, device: int | None) -> tuple[int, ...]:
    return mark.total if device is None else mark.devices[device]


def _text(value: str | bytes, room: int) -> bytes:
    encoded = value.encode() if isinstance(value, str) else value
    if len(encoded) >= room:
        raise ValueError(f"{value!r} has {len(encoded)} bytes, and there is room for {room - 1}")
    return encoded


def _or_not_available(value: int | None) -> int:
    return layout.NOT_AVAILABLE if value is None else value


def _or_no_instance(value: int | None) -> int:
    return layout.NO_INSTANCE if value is None else value


def _assign(record: ctypes.Structure, **values: int | None) -> None:
    for name, value in values.items():
        if value is not None:
            setattr(record, name, value)


def _fill_process(target: layout.ProcessRecord, process: Process) -> None:
    target.pid, target.kinds, target.hidden = process.pid, int(process.kinds), int(process.hidden)
    target.gpu_instance = _or_no_instance(process.gpu_instance)
    target.compute_instance = _or_no_instance(process.compute_instance)
    target.sm_percent, target.memory_percent = process.sm_percent, process.memory_percent
    target.encoder_percent, target.decoder_percent = process.encoder_percent, process.decoder_percent
    target.used, target.cc_protected = _or_not_available(process.used), _or_not_available(process.cc_protected)
    target.sampled_us = process.sampled_us
    target.name = _text(process.name, 64)


def _clear(fault: FaultRecord) -> None:
    fault.code = fault.remaining = fault.delay_ms = fault.hang = 0


def _clear_device(record: DeviceRecord) -> None:
    for fault in record.faults:
        _clear(fault)
    for slice_ in record.mig:
        for fault in slice_.faults:
            _clear(fault)
