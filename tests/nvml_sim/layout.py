"""The state file of sim.h as ctypes structures, field by field and in the same order."""

import ctypes
import enum
from ctypes import Array, c_char, c_int32, c_uint32, c_uint64
from typing import ClassVar

MAGIC = 0x4D49534C4D564E53
VERSION = 2

MAX_DEVICES = 16
MAX_MIG = 8
MAX_PROCESSES = 256
MAX_EVENTS = 64
MAX_FIELDS = 32
MAX_RETIRED = 64
MAX_ACCOUNTED = 32

NOT_AVAILABLE = 2**64 - 1
NO_INSTANCE = 2**32 - 1


class Family(enum.IntEnum):
    """Functions that answer one question: the unit of faults and of counters."""

    INIT = 0
    SHUTDOWN = 1
    SYSTEM = 2
    COUNT = 3
    HANDLE = 4
    IDENTITY = 5
    MEMORY = 6
    BAR1 = 7
    COMPUTE_PROCESSES = 8
    GRAPHICS_PROCESSES = 9
    MPS_PROCESSES = 10
    PROCESS_DETAIL = 11
    PROCESS_UTILIZATION = 12
    UTILIZATION = 13
    TEMPERATURE = 14
    POWER = 15
    POWER_LIMIT = 16
    ENERGY = 17
    PERFORMANCE_STATE = 18
    CLOCKS = 19
    ECC_ERRORS = 20
    ECC_MODE = 21
    RETIRED_PAGES = 22
    REMAPPED_ROWS = 23
    FIELD_VALUES = 24
    ACCOUNTING = 25
    VIRTUALIZATION = 26
    NUMA_NODE = 27
    ADDRESSING = 28
    MIG = 29
    EVENTS = 30
    EVENT_WAIT = 31
    PROCESS_NAME = 32
    CONF_COMPUTE = 33


class Option(enum.IntFlag):
    """Behaviours of which it isn't known which one a real driver has."""

    NONE = 0
    HANDLES_DIE_AT_INIT = 1
    MIG_HANDLES_REUSED = 2
    LIBRARY_PINNED = 4


class Kind(enum.IntFlag):
    """The lists a process is on."""

    COMPUTE = 1
    GRAPHICS = 2
    MPS = 4


class FaultRecord(ctypes.Structure):
    code: int
    remaining: int
    delay_ms: int
    hang: int
    _fields_: ClassVar = [("code", c_int32), ("remaining", c_int32), ("delay_ms", c_uint32), ("hang", c_uint32)]


class CounterRecord(ctypes.Structure):
    calls: Array[c_uint64]
    inflight: Array[c_uint32]
    _fields_: ClassVar = [("calls", c_uint64 * len(Family)), ("inflight", c_uint32 * len(Family))]


class ProcessRecord(ctypes.Structure):
    pid: int
    kinds: int
    hidden: int
    gpu_instance: int
    compute_instance: int
    sm_percent: int
    memory_percent: int
    encoder_percent: int
    decoder_percent: int
    reserved: int
    used: int
    cc_protected: int
    sampled_us: int
    name: bytes
    _fields_: ClassVar = [
        ("pid", c_uint32),
        ("kinds", c_uint32),
        ("hidden", c_uint32),
        ("gpu_instance", c_uint32),
        ("compute_instance", c_uint32),
        ("sm_percent", c_uint32),
        ("memory_percent", c_uint32),
        ("encoder_percent", c_uint32),
        ("decoder_percent", c_uint32),
        ("reserved", c_uint32),
        ("used", c_uint64),
        ("cc_protected", c_uint64),
        ("sampled_us", c_uint64),
        ("name", c_char * 64),
    ]


class MigRecord(ctypes.Structure):
    present: int
    generation: int
    gpu_instance: int
    compute_instance: int
    multiprocessors: int
    gpu_slices: int
    compute_slices: int
    reserved_: int
    total: int
    reserved: int
    used: int
    uuid: bytes
    faults: "Array[FaultRecord]"
    _fields_: ClassVar = [
        ("present", c_uint32),
        ("generation", c_uint32),
        ("gpu_instance", c_uint32),
        ("compute_instance", c_uint32),
        ("multiprocessors", c_uint32),
        ("gpu_slices", c_uint32),
        ("compute_slices", c_uint32),
        ("reserved_", c_uint32),
        ("total", c_uint64),
        ("reserved", c_uint64),
        ("used", c_uint64),
        ("uuid", c_char * 96),
        ("faults", FaultRecord * len(Family)),
    ]


class FieldRecord(ctypes.Structure):
    id: int
    scope: int
    code: int
    type: int
    bits: int
    _fields_: ClassVar = [
        ("id", c_uint32),
        ("scope", c_uint32),
        ("code", c_int32),
        ("type", c_uint32),
        ("bits", c_uint64),
    ]


class RetiredPageRecord(ctypes.Structure):
    address: int
    timestamp: int
    cause: int
    reserved: int
    _fields_: ClassVar = [
        ("address", c_uint64),
        ("timestamp", c_uint64),
        ("cause", c_uint32),
        ("reserved", c_uint32),
    ]


class AccountedRecord(ctypes.Structure):
    pid: int
    gpu_percent: int
    memory_percent: int
    running: int
    max_memory: int
    time_ms: int
    started_us: int
    _fields_: ClassVar = [
        ("pid", c_uint32),
        ("gpu_percent", c_uint32),
        ("memory_percent", c_uint32),
        ("running", c_uint32),
        ("max_memory", c_uint64),
        ("time_ms", c_uint64),
        ("started_us", c_uint64),
    ]


class DeviceRecord(ctypes.Structure):
    present: int
    generation: int
    lost_code: int
    absent_code: int
    unsupported: int
    uuid: bytes
    name: bytes
    serial: bytes
    pci_domain: int
    pci_bus: int
    pci_device: int
    pci_device_id: int
    pci_subsystem_id: int
    minor: int
    mig_current: int
    mig_pending: int
    mig_max: int
    reserved_: int
    total: int
    reserved: int
    used: int
    bar1_total: int
    bar1_used: int
    gpu_percent: int
    memory_percent: int
    temperature: int
    memory_temperature: int
    power_mw: int
    power_limit_mw: int
    performance_state: int
    virtualization_mode: int
    energy_mj: int
    clock_reasons: int
    ecc_current: int
    ecc_pending: int
    ecc_errors: "Array[Array[c_uint64]]"
    remapped_correctable: int
    remapped_uncorrectable: int
    remapped_pending: int
    remapped_failure: int
    recovery_action: int
    numa_node: int
    addressing_mode: int
    retired_pending: int
    retired_count: int
    field_count: int
    accounting_mode: int
    accounting_buffer: int
    accounted_count: int
    process_count: int
    grow_by: int
    grow_remaining: int
    grown: int
    reserved2_: int
    retired: "Array[RetiredPageRecord]"
    fields: "Array[FieldRecord]"
    accounted: "Array[AccountedRecord]"
    processes: "Array[ProcessRecord]"
    mig: "Array[MigRecord]"
    faults: "Array[FaultRecord]"
    counters: CounterRecord
    _fields_: ClassVar = [
        ("present", c_uint32),
        ("generation", c_uint32),
        ("lost_code", c_int32),
        ("absent_code", c_int32),
        ("unsupported", c_uint64),
        ("uuid", c_char * 96),
        ("name", c_char * 96),
        ("serial", c_char * 64),
        ("pci_domain", c_uint32),
        ("pci_bus", c_uint32),
        ("pci_device", c_uint32),
        ("pci_device_id", c_uint32),
        ("pci_subsystem_id", c_uint32),
        ("minor", c_uint32),
        ("mig_current", c_uint32),
        ("mig_pending", c_uint32),
        ("mig_max", c_uint32),
        ("reserved_", c_uint32),
        ("total", c_uint64),
        ("reserved", c_uint64),
        ("used", c_uint64),
        ("bar1_total", c_uint64),
        ("bar1_used", c_uint64),
        ("gpu_percent", c_uint32),
        ("memory_percent", c_uint32),
        ("temperature", c_uint32),
        ("memory_temperature", c_uint32),
        ("power_mw", c_uint32),
        ("power_limit_mw", c_uint32),
        ("performance_state", c_uint32),
        ("virtualization_mode", c_uint32),
        ("energy_mj", c_uint64),
        ("clock_reasons", c_uint64),
        ("ecc_current", c_uint32),
        ("ecc_pending", c_uint32),
        ("ecc_errors", c_uint64 * 2 * 2),
        ("remapped_correctable", c_uint32),
        ("remapped_uncorrectable", c_uint32),
        ("remapped_pending", c_uint32),
        ("remapped_failure", c_uint32),
        ("recovery_action", c_uint32),
        ("numa_node", c_uint32),
        ("addressing_mode", c_uint32),
        ("retired_pending", c_uint32),
        ("retired_count", c_uint32),
        ("field_count", c_uint32),
        ("accounting_mode", c_uint32),
        ("accounting_buffer", c_uint32),
        ("accounted_count", c_uint32),
        ("process_count", c_uint32),
        ("grow_by", c_uint32),
        ("grow_remaining", c_int32),
        ("grown", c_uint32),
        ("reserved2_", c_uint32),
        ("retired", RetiredPageRecord * MAX_RETIRED),
        ("fields", FieldRecord * MAX_FIELDS),
        ("accounted", AccountedRecord * MAX_ACCOUNTED),
        ("processes", ProcessRecord * MAX_PROCESSES),
        ("mig", MigRecord * MAX_MIG),
        ("faults", FaultRecord * len(Family)),
        ("counters", CounterRecord),
    ]


class EventRecord(ctypes.Structure):
    device: int
    gpu_instance: int
    compute_instance: int
    reserved: int
    type: int
    data: int
    _fields_: ClassVar = [
        ("device", c_uint32),
        ("gpu_instance", c_uint32),
        ("compute_instance", c_uint32),
        ("reserved", c_uint32),
        ("type", c_uint64),
        ("data", c_uint64),
    ]


class StateRecord(ctypes.Structure):
    magic: int
    version: int
    size: int
    sequence: int
    driver_gen: int
    stale_code: int
    options: int
    cuda_version: int
    opened: int
    closed: int
    reserved_: int
    event_count: int
    driver_version: bytes
    nvml_version: bytes
    events: "Array[EventRecord]"
    faults: "Array[FaultRecord]"
    counters: CounterRecord
    devices: "Array[DeviceRecord]"
    _fields_: ClassVar = [
        ("magic", c_uint64),
        ("version", c_uint32),
        ("size", c_uint32),
        ("sequence", c_uint32),
        ("driver_gen", c_uint32),
        ("stale_code", c_int32),
        ("options", c_uint32),
        ("cuda_version", c_int32),
        ("opened", c_uint32),
        ("closed", c_uint32),
        ("reserved_", c_uint32),
        ("event_count", c_uint64),
        ("driver_version", c_char * 96),
        ("nvml_version", c_char * 96),
        ("events", EventRecord * MAX_EVENTS),
        ("faults", FaultRecord * len(Family)),
        ("counters", CounterRecord),
        ("devices", DeviceRecord * MAX_DEVICES),
    ]
