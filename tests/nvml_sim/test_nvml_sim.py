"""The simulated driver library as the unmodified pynvml sees it."""

import ctypes
import importlib.metadata
import inspect
import itertools
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pynvml
import pytest

from tests.nvml_sim import (
    GIB,
    MIB,
    VARIANTS,
    Accounted,
    Family,
    Gpu,
    Kind,
    MigSlice,
    Option,
    Process,
    RetiredPage,
    Sim,
    environment,
    layout,
    load_into_pynvml,
)
from tests.nvml_sim.library import SOURCES

DEADLINE = 20.0
NOT_SUPPORTED, NO_PERMISSION, INVALID_ARGUMENT, DRIVER_NOT_LOADED, LOST, UNKNOWN = 3, 4, 2, 9, 15, 999


@pytest.fixture
def nvml(nvml_library: Path, sim: Sim) -> Generator[Any]:
    """pynvml, initialised on the simulated driver of `sim`."""
    with load_into_pynvml(nvml_library, sim):
        pynvml.nvmlInit()
        yield pynvml


def answer(call: Callable[..., Any], *arguments: Any) -> Any:
    """What the call returns, or the number of the NVML error it raises."""
    try:
        return call(*arguments)
    except pynvml.NVMLError as error:
        return error.value


def offered(name: str) -> Callable[..., Any]:
    """The wrapper of this name; the oldest pynvml we support doesn't have them all."""
    wrapper: Callable[..., Any] | None = getattr(pynvml, name, None)
    if wrapper is None:
        pytest.skip(f"{name} is not in this pynvml")
    return wrapper


def memory(handle: Any) -> Any:
    return pynvml.nvmlDeviceGetMemoryInfo(handle, pynvml.nvmlMemory_v2)


def processes(handle: Any) -> Any:
    return pynvml.nvmlDeviceGetComputeRunningProcesses(handle)


def start(program: str, library: Path, sim: Sim) -> subprocess.Popen[str]:
    variables = os.environ | environment(library, sim)
    return subprocess.Popen([sys.executable, "-c", program], env=variables, stdout=subprocess.PIPE, text=True)


def uuids() -> list[str]:
    return [
        pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByIndex(index))
        for index in range(pynvml.nvmlDeviceGetCount())
    ]


# ---- the interface between the three sides: C, Python, pynvml ----

PYNVML_STRUCTURES = {
    "nvmlPciInfo_t": "nvmlPciInfo_t",
    "nvmlMemory_t": "c_nvmlMemory_t",
    "nvmlMemory_v2_t": "c_nvmlMemory_v2_t",
    "nvmlBAR1Memory_t": "c_nvmlBAR1Memory_t",
    "nvmlProcessInfo_t": "c_nvmlProcessInfo_t",
    "nvmlProcessDetail_v1_t": "c_nvmlProcessDetail_v1_t",
    "nvmlProcessDetailList_t": "c_nvmlProcessDetailList_t",
    "nvmlProcessUtilizationSample_t": "c_nvmlProcessUtilizationSample_t",
    "nvmlProcessUtilizationInfo_v1_t": "c_nvmlProcessUtilizationInfo_v1_t",
    "nvmlProcessesUtilizationInfo_t": "c_nvmlProcessesUtilizationInfo_v1_t",
    "nvmlUtilization_t": "c_nvmlUtilization_t",
    "nvmlTemperature_t": "c_nvmlTemperature_v1_t",
    "nvmlDeviceAttributes_t": "c_nvmlDeviceAttributes",
    "nvmlEventData_t": "c_nvmlEventData_t",
    "nvmlAccountingStats_t": "c_nvmlAccountingStats_t",
    "nvmlFieldValue_t": "c_nvmlFieldValue_t",
    "nvmlConfComputeMemSizeInfo_t": "c_nvmlConfComputeMemSizeInfo_t",
    "nvmlDeviceAddressingMode_t": "c_nvmlDeviceAddressingMode_t",
}

C_RECORDS = {
    "struct sim_fault": layout.FaultRecord,
    "struct sim_counters": layout.CounterRecord,
    "struct sim_process": layout.ProcessRecord,
    "struct sim_mig": layout.MigRecord,
    "struct sim_field": layout.FieldRecord,
    "struct sim_retired_page": layout.RetiredPageRecord,
    "struct sim_accounted": layout.AccountedRecord,
    "struct sim_device": layout.DeviceRecord,
    "struct sim_event": layout.EventRecord,
    "struct sim_state": layout.StateRecord,
}


def same_layout(c_type: str, structure: type[ctypes.Structure]) -> list[str]:
    """C assertions that hold when the C type has the size, and the fields the offsets, of the ctypes structure."""
    fields = []
    for name, *_ in structure._fields_:
        place = getattr(structure, name)
        same = f"offsetof({c_type}, {name}) == {place.offset} && sizeof((({c_type} *)0)->{name}) == {place.size}"
        fields.append(f'_Static_assert({same}, "{c_type}.{name}");')
    return [f'_Static_assert(sizeof({c_type}) == {ctypes.sizeof(structure)}, "{c_type}");', *fields]


def compile_c(lines: list[str], directory: Path, *options: str) -> subprocess.CompletedProcess[str]:
    source = directory / "check.c"
    source.write_text("\n".join(lines) + "\n")
    command = ["gcc", "-std=gnu11", "-fsyntax-only", "-Werror", f"-I{SOURCES}", *options, str(source)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def pynvml_layouts() -> list[str]:
    known = {c_type: getattr(pynvml, name, None) for c_type, name in PYNVML_STRUCTURES.items()}
    return [line for c_type, structure in known.items() if structure for line in same_layout(c_type, structure)]


@pytest.mark.usefixtures("nvml_library")
def test_python_and_c_agree_on_the_state_file(tmp_path: Path) -> None:
    constants = {
        "SIM_MAGIC": layout.MAGIC,
        "SIM_VERSION": layout.VERSION,
        "SIM_FAMILY_COUNT": len(Family),
        **{f"SIM_{family.name}": family.value for family in Family},
        **{f"SIM_{option.name}": option.value for option in Option if option},
        **{f"SIM_{kind.name}": kind.value for kind in Kind},
    }
    lines = ["#include <stddef.h>", '#include "sim.h"']
    lines += [f'_Static_assert({name} == {value}, "{name}");' for name, value in constants.items()]
    lines += [line for c_type, record in C_RECORDS.items() for line in same_layout(c_type, record)]
    assert compile_c(lines, tmp_path).stderr == ""


@pytest.mark.usefixtures("nvml_library")
def test_structures_have_the_layout_that_pynvml_reads(tmp_path: Path) -> None:
    lines = ["#include <stddef.h>", '#include "nvml_types.h"', *pynvml_layouts()]
    assert compile_c(lines, tmp_path).stderr == ""


def vendor_header() -> Path | None:
    for package in ("nvidia-nvml-dev", "nvidia-nvml-dev-cu12"):
        try:
            files = importlib.metadata.files(package) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        for file in files:
            if file.name == "nvml.h":
                return Path(str(file.locate()))
    return None


@pytest.mark.usefixtures("nvml_library")
def test_prototypes_and_structures_are_those_of_the_vendors_header(tmp_path: Path) -> None:
    header = vendor_header()
    if header is None:
        pytest.skip("nvidia-nvml-dev is not installed (the vendor's nvml.h, to compare prototypes with)")
    options = ["-DSIM_VENDOR_HEADER", f"-I{header.parent}", "-Wall", "-Wextra"]
    if "nvmlDeviceGetAddressingMode" in header.read_text():
        options.append("-Wmissing-prototypes")
    result = compile_c(["#include <stddef.h>", '#include "sim.c"', *pynvml_layouts()], tmp_path, *options)
    assert result.stderr == ""


def exported(library: Path) -> set[str]:
    command = ["nm", "--dynamic", "--defined-only", "--format=posix", str(library)]
    symbols = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    return {line.split()[0] for line in symbols.splitlines()}


def test_every_exported_symbol_is_one_that_pynvml_asks_for(nvml_library: Path) -> None:
    asked = set(re.findall(r'_nvmlGetFunctionPointer\("(\w+)"\)', inspect.getsource(pynvml)))
    if "nvmlDeviceGetAddressingMode" not in asked:
        pytest.skip("this pynvml is older than the driver simulated by default")
    assert exported(nvml_library) - asked == set()


V3_LISTS = {
    "nvmlDeviceGetComputeRunningProcesses_v3",
    "nvmlDeviceGetGraphicsRunningProcesses_v3",
    "nvmlDeviceGetMPSComputeRunningProcesses_v3",
}
NOT_IN_550 = {"nvmlDeviceGetAddressingMode", "nvmlDeviceGetTemperatureV"}
NOT_IN_535 = NOT_IN_550 | {"nvmlDeviceGetProcessesUtilizationInfo", "nvmlDeviceGetNumaNodeId"}
DETAIL_LIST = {"nvmlDeviceGetRunningProcessDetailList"}
NOT_IN_525 = (
    NOT_IN_535 | DETAIL_LIST | {"nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetConfComputeMemSizeInfo"}
)


@pytest.mark.parametrize(
    ("variant", "missing"),
    [
        ("550", NOT_IN_550),
        ("535", NOT_IN_535),
        ("535.54", NOT_IN_535 | DETAIL_LIST),
        ("535.98", NOT_IN_535 | DETAIL_LIST | V3_LISTS),
        ("525", NOT_IN_525),
        ("470", NOT_IN_525 | V3_LISTS | {"nvmlDeviceGetMemoryInfo_v2"}),
    ],
)
def test_an_older_driver_lacks_symbols(
    nvml_library: Path, nvml_variant: Callable[[str], Path], variant: str, missing: set[str]
) -> None:
    assert exported(nvml_library) - exported(nvml_variant(variant)) == missing


# ---- without a driver ----


def test_a_library_without_a_driver_initialises_nothing(nvml_library: Path) -> None:
    with load_into_pynvml(nvml_library, None):
        assert answer(pynvml.nvmlInit) == DRIVER_NOT_LOADED
        assert answer(pynvml.nvmlInit) == DRIVER_NOT_LOADED
        for call in (pynvml.nvmlDeviceGetCount, pynvml.nvmlSystemGetDriverVersion, pynvml.nvmlEventSetCreate):
            with pytest.raises(pynvml.NVMLError_Uninitialized):
                call()
        with pytest.raises(pynvml.NVMLError_Uninitialized):
            pynvml.nvmlDeviceGetHandleByIndex(0)
        assert pynvml.nvmlSystemGetNVMLVersion() == "12.550.163.01"
        pynvml.nvmlShutdown()


def test_an_old_library_without_a_driver_does_not_tell_its_version(nvml_variant: Callable[[str], Path]) -> None:
    with load_into_pynvml(nvml_variant("525"), None), pytest.raises(pynvml.NVMLError_Uninitialized):
        pynvml.nvmlSystemGetNVMLVersion()


def test_a_state_file_of_another_layout_is_refused(nvml_library: Path, sim: Sim) -> None:
    with sim.write() as state:
        state.version += 1
    with load_into_pynvml(nvml_library, sim), pytest.raises(pynvml.NVMLError_LibRmVersionMismatch):
        pynvml.nvmlInit()


@pytest.mark.parametrize("code", [DRIVER_NOT_LOADED, NO_PERMISSION, 18, UNKNOWN])
def test_init_fails_as_told_and_then_works(nvml_library: Path, sim: Sim, code: int) -> None:
    sim.fail(Family.INIT, code, times=1)
    with load_into_pynvml(nvml_library, sim):
        assert answer(pynvml.nvmlInit) == code
        pynvml.nvmlInit()
        assert pynvml.nvmlDeviceGetCount() == 2


def test_error_texts_are_the_librarys(nvml_library: Path) -> None:
    with load_into_pynvml(nvml_library, None):
        assert pynvml.nvmlErrorString(15) == "GPU is lost"
        assert [pynvml.nvmlErrorString(code) for code in (30, 999, -1)] == ["Unknown Error"] * 3


# ---- a subprocess, the way the daemon runs ----


def test_a_new_process_finds_the_library_by_the_loader_path(nvml_library: Path, sim: Sim) -> None:
    program = "import pynvml as n; n.nvmlInit(); print(n.nvmlDeviceGetCount(), n.nvmlSystemGetDriverVersion())"
    variables = os.environ | environment(nvml_library, sim)
    printed = subprocess.run(
        [sys.executable, "-c", program], env=variables, capture_output=True, text=True, timeout=DEADLINE, check=True
    )
    assert printed.stdout == "2 550.163.01\n"
    assert sim.initialisations() == 1


def test_a_process_may_see_some_of_the_gpus_only(nvml_library: Path, make_sim: Callable[..., Sim]) -> None:
    sim = make_sim(3)
    with load_into_pynvml(nvml_library, sim, visible=[sim.uuid(1), sim.uuid(2)]):
        pynvml.nvmlInit()
        assert uuids() == [sim.uuid(1), sim.uuid(2)]
        assert answer(pynvml.nvmlDeviceGetHandleByUUID, sim.uuid(0)) == 6
    with load_into_pynvml(nvml_library, sim, visible=[]):
        pynvml.nvmlInit()
        assert uuids() == []


# ---- identity ----


def test_a_gpu_tells_who_it_is(nvml: Any, sim: Sim) -> None:
    handle = nvml.nvmlDeviceGetHandleByUUID(sim.uuid(1))
    pci = nvml.nvmlDeviceGetPciInfo(handle)
    bus_id = pci.busId.decode() if isinstance(pci.busId, bytes) else pci.busId
    assert nvml.nvmlDeviceGetIndex(handle) == 1
    assert nvml.nvmlDeviceGetMinorNumber(handle) == 1
    assert nvml.nvmlDeviceGetName(handle) == "NVIDIA H100 80GB HBM3"
    assert nvml.nvmlDeviceGetSerial(handle) == "1650900000001"
    assert bus_id == "00000000:11:00.0"
    assert nvml.nvmlSystemGetCudaDriverVersion() == 12040


def test_an_index_outside_the_count_is_refused(nvml: Any) -> None:
    with pytest.raises(nvml.NVMLError_InvalidArgument):
        nvml.nvmlDeviceGetHandleByIndex(2)


@pytest.mark.parametrize(("serial", "code"), [("", NOT_SUPPORTED), ("1" * 30, 7)])
def test_a_serial_may_be_missing_or_too_long(nvml: Any, sim: Sim, serial: str, code: int) -> None:
    sim.set_serial(0, serial)
    assert answer(nvml.nvmlDeviceGetSerial, nvml.nvmlDeviceGetHandleByIndex(0)) == code


def test_a_name_may_be_no_utf8(nvml: Any, sim: Sim) -> None:
    sim.set_name(0, b"Tesla \xae\xff")
    with pytest.raises(UnicodeDecodeError):
        nvml.nvmlDeviceGetName(nvml.nvmlDeviceGetHandleByIndex(0))


# ---- memory ----


def test_version_1_counts_reserved_as_used_and_version_2_does_not(nvml: Any, sim: Sim) -> None:
    sim.set_memory(0, total=80 * GIB, reserved=GIB, used=70 * GIB, bar1_used=3 * MIB)
    handle = nvml.nvmlDeviceGetHandleByIndex(0)
    first, second, bar1 = nvml.nvmlDeviceGetMemoryInfo(handle), memory(handle), nvml.nvmlDeviceGetBAR1MemoryInfo(handle)
    assert (first.total, first.used, first.free) == (80 * GIB, 71 * GIB, 9 * GIB)
    assert (second.total, second.used, second.reserved, second.free) == (80 * GIB, 70 * GIB, GIB, 9 * GIB)
    assert (bar1.bar1Used, bar1.bar1Free) == (3 * MIB, 128 * GIB - 3 * MIB)


def test_a_change_is_seen_by_the_next_call(nvml: Any, sim: Sim) -> None:
    handle = nvml.nvmlDeviceGetHandleByIndex(0)
    for used in (GIB, 2 * GIB, 0):
        sim.set_memory(0, used=used)
        assert memory(handle).used == used


def test_memory_version_2_needs_its_version(nvml: Any) -> None:
    with pytest.raises(nvml.NVMLError_ArgumentVersionMismatch):
        nvml.nvmlDeviceGetMemoryInfo(nvml.nvmlDeviceGetHandleByIndex(0), 0x02000018)


def test_a_reader_waits_for_the_end_of_a_change(nvml: Any, sim: Sim) -> None:
    handle = nvml.nvmlDeviceGetHandleByIndex(0)
    with ThreadPoolExecutor(1) as pool:
        with sim.write():
            sim.set_memory(0, used=GIB)
            reading = pool.submit(memory, handle)
            sim.wait_inflight(Family.MEMORY, 1, DEADLINE)
            sim.set_memory(0, reserved=2 * GIB)
        assert (reading.result(DEADLINE).used, reading.result().reserved) == (GIB, 2 * GIB)


def test_a_reader_in_another_process_never_sees_half_a_change(nvml_library: Path, sim: Sim) -> None:
    program = """
import pynvml
pynvml.nvmlInit()
handle = pynvml.nvmlDeviceGetHandleByIndex(0)
reads = (pynvml.nvmlDeviceGetMemoryInfo(handle, pynvml.nvmlMemory_v2) for _ in range(30_000))
seen = {(now.total, now.reserved, now.used) for now in reads}
print(len(seen) > 1, [now for now in seen if now != (4 * now[2], now[2], now[2])])
"""
    units = itertools.cycle(range(1, 1000))
    sim.set_memory(0, total=4, reserved=1, used=1)
    with start(program, nvml_library, sim) as process:
        try:
            give_up = time.monotonic() + DEADLINE
            while process.poll() is None and time.monotonic() < give_up:
                unit = next(units)
                sim.set_memory(0, total=4 * unit, reserved=unit, used=unit)
            assert process.communicate(timeout=1)[0] == "True []\n"
        finally:
            process.kill()


def test_unified_memory_has_processes_but_no_memory_figures(nvml_library: Path, make_sim: Callable[..., Sim]) -> None:
    sim = make_sim([Gpu.unified_memory()])
    sim.set_processes(0, [Process(100, 5 * GIB)])
    with load_into_pynvml(nvml_library, sim):
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        assert answer(memory, handle) == NOT_SUPPORTED
        assert answer(pynvml.nvmlDeviceGetMemoryInfo, handle) == NOT_SUPPORTED
        assert [process.usedGpuMemory for process in processes(handle)] == [5 * GIB]


# ---- processes ----


@pytest.mark.parametrize("count", [0, 2, 200])
def test_the_list_has_every_process(nvml: Any, sim: Sim, count: int) -> None:
    sim.set_processes(0, [Process(1000 + i, MIB) for i in range(count)])
    handle = nvml.nvmlDeviceGetHandleByIndex(0)
    assert [process.pid for process in processes(handle)] == [1000 + i for i in range(count)]
    assert memory(handle).used == count * MIB


def test_a_process_is_on_the_lists_of_its_kinds(nvml: Any, sim: Sim) -> None:
    sim.set_processes(0, [Process(1), Process(2, kinds=Kind.GRAPHICS), Process(3, kinds=Kind.MPS | Kind.COMPUTE)])
    handle = nvml.nvmlDeviceGetHandleByIndex(0)
    lists = (
        processes(handle),
        nvml.nvmlDeviceGetGraphicsRunningProcesses(handle),
        nvml.nvmlDeviceGetMPSComputeRunningProcesses(handle),
    )
    assert [[process.pid for process in entries] for entries in lists] == [[1, 3], [2], [3]]


def test_memory_the_driver_does_not_know_is_none(nvml: Any, sim: Sim) -> None:
    sim.set_processes(0, [Process(1, used=None)])
    [process] = processes(nvml.nvmlDeviceGetHandleByIndex(0))
    assert process.usedGpuMemory is None


def test_a_hidden_process_holds_memory_and_is_not_listed(nvml: Any, sim: Sim) -> None:
    sim.set_processes(0, [Process(1, GIB), Process(2, 3 * GIB, hidden=True)])
    handle = nvml.nvmlDeviceGetHandleByIndex(0)
    assert [process.pid for process in processes(handle)] == [1]
    assert memory(handle).used == 4 * GIB
    assert answer(nvml.nvmlSystemGetProcessName, 2) == 6


def test_a_process_has_a_name(nvml: Any, sim: Sim) -> None:
    sim.set_processes(0, [Process(7, name="VLLM::Worker_TP1")])
    assert nvml.nvmlSystemGetProcessName(7) == "VLLM::Worker_TP1"
    assert answer(nvml.nvmlSystemGetProcessName, 8) == 6


def test_a_list_may_outgrow_the_buffer_of_the_size_probe(nvml: Any, sim: Sim) -> None:
    handle = nvml.nvmlDeviceGetHandleByIndex(0)
    sim.set_processes(0, [Process(1), Process(2)])
    sim.grow_after_probe(0, 7, probes=1)
    assert len(processes(handle)) == 9  # pynvml offers twice the probe and 5
    sim.set_processes(0, [Process(1), Process(2)])
    sim.grow_after_probe(0, 8, probes=1)
    with pytest.raises(nvml.NVMLError_InsufficientSize):
        processes(handle)
    assert len(processes(handle)) == 10


def test_the_detail_list_has_protected_memory(nvml: Any, sim: Sim) -> None:
    """By the symbol: pynvml 12.535.108 returns the probe's code, and 13.615.71 fails on memory that is not known."""
    sim.set_processes(0, [Process(1, 5 * GIB, cc_protected=2 * GIB), Process(2, None), Process(3, kinds=Kind.GRAPHICS)])
    request = nvml.c_nvmlProcessDetailList_t(version=0x01000018, mode=0)
    call, handle = nvml.nvmlLib.nvmlDeviceGetRunningProcessDetailList, nvml.nvmlDeviceGetHandleByIndex(0)
    assert (call(handle, ctypes.byref(request)), request.numProcArrayEntries) == (7, 2)
    entries = (nvml.c_nvmlProcessDetail_v1_t * 2)()
    request.procArray = ctypes.cast(entries, ctypes.POINTER(nvml.c_nvmlProcessDetail_v1_t))
    assert call(handle, ctypes.byref(request)) == 0
    found = [(entry.pid, entry.usedGpuMemory, entry.usedGpuCcProtectedMemory) for entry in entries]
    assert found == [(1, 5 * GIB, 2 * GIB), (2, layout.NOT_AVAILABLE, 0)]


def test_process_utilization_has_the_samples_since_a_time(nvml: Any, sim: Sim) -> None:
    handle = nvml.nvmlDeviceGetHandleByIndex(0)
    assert answer(nvml.nvmlDeviceGetProcessUtilization, handle, 0) == 6
    sim.set_processes(0, [Process(1, sm_percent=90, sampled_us=10), Process(2, sampled_us=20), Process(3)])
    samples = nvml.nvmlDeviceGetProcessUtilization(handle, 0)
    assert [(sample.pid, sample.smUtil) for sample in samples] == [(1, 90), (2, 0)]
    assert [sample.pid for sample in nvml.nvmlDeviceGetProcessUtilization(handle, 10)] == [2]
    assert answer(nvml.nvmlDeviceGetProcessUtilization, handle, 20) == 6
    newer = offered("nvmlDeviceGetProcessesUtilizationInfo")
    assert [sample.pid for sample in newer(handle, 10)] == [2]


def test_accounting_keeps_ended_processes(nvml: Any, sim: Sim) -> None:
    handle = nvml.nvmlDeviceGetHandleByIndex(0)
    assert nvml.nvmlDeviceGetAccountingMode(handle) == 0
    assert answer(nvml.nvmlDeviceGetAccountingPids, handle) == NOT_SUPPORTED
    sim.set_accounting(0, True, [Accounted(5, 9 * GIB, running=False, time_ms=70_000), Accounted(6, None)])
    assert nvml.nvmlDeviceGetAccountingMode(handle) == 1
    assert nvml.nvmlDeviceGetAccountingPids(handle) == [5, 6]
    ended = nvml.nvmlDeviceGetAccountingStats(handle, 5)
    assert (ended.maxMemoryUsage, ended.time, ended.isRunning) == (9 * GIB, 70_000, 0)
    assert answer(nvml.nvmlDeviceGetAccountingStats, handle, 7) == 6


# ---- sensors and errors ----


def test_sensors_read_what_was_set(nvml: Any, sim: Sim) -> None:
    sim.set_sensors(
        0,
        gpu_percent=91,
        memory_percent=55,
        temperature=70,
        power_mw=650_000,
        power_limit_mw=600_000,
        energy_mj=2**40,
        performance_state=2,
        clock_reasons=0x44,
    )
    handle = nvml.nvmlDeviceGetHandleByIndex(0)
    rates = nvml.nvmlDeviceGetUtilizationRates(handle)
    assert (rates.gpu, rates.memory) == (91, 55)
    assert nvml.nvmlDeviceGetTemperature(handle, 0) == 70
    assert nvml.nvmlDeviceGetPowerUsage(handle) == 650_000
    assert nvml.nvmlDeviceGetEnforcedPowerLimit(handle) == 600_000
    assert nvml.nvmlDeviceGetTotalEnergyConsumption(handle) == 2**40
    assert nvml.nvmlDeviceGetPerformanceState(handle) == 2
    assert nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle) == 0x44
    assert nvml.nvmlDeviceGetCurrentClocksEventReasons(handle) == 0x44
    assert offered("nvmlDeviceGetTemperatureV")(handle, 0) == 70


def test_errors_of_memory_read_what_was_set(nvml: Any, sim: Sim) -> None:
    sim.set_ecc(
        0, pending=False, corrected_volatile=1, corrected_aggregate=2, uncorrected_volatile=3, uncorrected_aggregate=4
    )
    sim.set_remapped_rows(0, 5, 6, pending=True)
    sim.set_retired_pages(1, [RetiredPage(0x1000, 0), RetiredPage(0x2000, 1), RetiredPage(0x3000, 1, 77)], pending=True)
    first, second = nvml.nvmlDeviceGetHandleByIndex(0), nvml.nvmlDeviceGetHandleByIndex(1)
    counts = [nvml.nvmlDeviceGetTotalEccErrors(first, kind, span) for kind, span in itertools.product((0, 1), (0, 1))]
    assert counts == [1, 2, 3, 4]
    assert nvml.nvmlDeviceGetEccMode(first) == [1, 0]
    assert list(nvml.nvmlDeviceGetRemappedRows(first)) == [5, 6, 1, 0]
    assert answer(nvml.nvmlDeviceGetRetiredPages, first, 0) == NOT_SUPPORTED
    assert nvml.nvmlDeviceGetRetiredPages(second, 0) == [0x1000]
    assert nvml.nvmlDeviceGetRetiredPages_v2(second, 1) == [
        {"address": 0x2000, "timestamp": 0},
        {"address": 0x3000, "timestamp": 77},
    ]
    assert nvml.nvmlDeviceGetRetiredPagesPendingStatus(second) == 1
    sim.set_ecc(0, enabled=False)
    assert answer(nvml.nvmlDeviceGetTotalEccErrors, first, 1, 0) == NOT_SUPPORTED


def field_answers(handle: Any, fields: list[Any]) -> list[tuple[int, int]]:
    values = pynvml.nvmlDeviceGetFieldValues(handle, fields)
    return [(value.nvmlReturn, value.value.ullVal) for value in values]


def test_each_field_value_has_its_own_return_code(nvml: Any, sim: Sim) -> None:
    sim.set_sensors(0, memory_temperature=88)
    sim.set_remapped_rows(0, 1, 2, pending=True, failure=True)
    sim.set_recovery_action(0, 2)
    sim.set_field(0, 400 - 1, 12, scope=3)
    sim.set_field(0, 83, code=LOST)
    handle = nvml.nvmlDeviceGetHandleByIndex(0)
    fields = [82, 142, 143, 144, 145, 230, (399, 3)]
    assert field_answers(handle, fields) == [(0, 88), (0, 1), (0, 2), (0, 1), (0, 1), (0, 2), (0, 12)]
    assert [code for code, _ in field_answers(handle, [83, 29, 399, 5000])] == [LOST, 3, 3, 2]
    sim.set_field(0, 82, 36.5)
    [celsius] = nvml.nvmlDeviceGetFieldValues(handle, [82])
    assert (celsius.valueType, celsius.value.dVal) == (0, 36.5)


def test_a_driver_before_the_recovery_action_refuses_the_field(nvml_variant: Callable[[str], Path], sim: Sim) -> None:
    with load_into_pynvml(nvml_variant("550"), sim):
        pynvml.nvmlInit()
        answers = field_answers(pynvml.nvmlDeviceGetHandleByIndex(0), [82, 230])
        assert [code for code, _ in answers] == [0, INVALID_ARGUMENT]


def test_platform_facts_read_what_was_set(nvml: Any, sim: Sim) -> None:
    handle = nvml.nvmlDeviceGetHandleByIndex(0)
    assert answer(nvml.nvmlDeviceGetVirtualizationMode, handle) == 0
    sim.set_virtualization_mode(0, 1)
    assert nvml.nvmlDeviceGetVirtualizationMode(handle) == 1
    numa, addressing = offered("nvmlDeviceGetNumaNodeId"), offered("nvmlDeviceGetAddressingMode")
    assert answer(numa, handle) == NOT_SUPPORTED
    sim.set_numa_node(0, 9)
    sim.set_addressing_mode(0, 2)
    assert (numa(handle), addressing(handle)) == (9, 2)


def test_a_consumer_gpu_lacks_what_data_centres_have(nvml_library: Path, make_sim: Callable[..., Sim]) -> None:
    with load_into_pynvml(nvml_library, make_sim([replace(Gpu.consumer(), total=16 * GIB)])):
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        assert memory(handle).total == 16 * GIB
        for call in (
            pynvml.nvmlDeviceGetSerial,
            pynvml.nvmlDeviceGetEccMode,
            pynvml.nvmlDeviceGetRemappedRows,
            pynvml.nvmlDeviceGetMigMode,
        ):
            assert answer(call, handle) == NOT_SUPPORTED
        assert [code for code, _ in field_answers(handle, [1, 82, 142])] == [3, 0, 3]


# ---- faults ----


def test_a_lost_gpu_fails_alone(nvml: Any, sim: Sim) -> None:
    lost, neighbour = nvml.nvmlDeviceGetHandleByIndex(0), nvml.nvmlDeviceGetHandleByIndex(1)
    sim.lose(0)
    for call in (
        memory,
        processes,
        nvml.nvmlDeviceGetUUID,
        nvml.nvmlDeviceGetTemperature and nvml.nvmlDeviceGetPowerUsage,
    ):
        with pytest.raises(nvml.NVMLError_GpuIsLost):
            call(lost)
    with pytest.raises(nvml.NVMLError_GpuIsLost):
        nvml.nvmlDeviceGetHandleByIndex(0)
    assert memory(neighbour).total == 80 * GIB
    assert nvml.nvmlDeviceGetCount() == 2
    sim.heal(0)
    assert memory(lost).total == 80 * GIB


def test_a_gpu_that_vanishes_moves_the_others_down(nvml_library: Path, make_sim: Callable[..., Sim]) -> None:
    sim = make_sim(3)
    with load_into_pynvml(nvml_library, sim):
        pynvml.nvmlInit()
        gone, last = pynvml.nvmlDeviceGetHandleByIndex(1), pynvml.nvmlDeviceGetHandleByIndex(2)
        sim.vanish(1)
        assert uuids() == [sim.uuid(0), sim.uuid(2)]
        assert pynvml.nvmlDeviceGetIndex(last) == 1
        assert answer(memory, gone) == LOST
        assert answer(pynvml.nvmlDeviceGetHandleByUUID, sim.uuid(1)) == 6
        sim.heal(1)
        assert uuids() == [sim.uuid(0), sim.uuid(1), sim.uuid(2)]


def test_another_board_in_the_slot_has_another_uuid_and_new_handles(nvml: Any, sim: Sim) -> None:
    old = nvml.nvmlDeviceGetHandleByIndex(1)
    sim.remove_gpu(1)
    assert sim.add_gpu(Gpu(uuid="GPU-new", total=40 * GIB)) == 1
    assert answer(memory, old) == INVALID_ARGUMENT
    new = nvml.nvmlDeviceGetHandleByIndex(1)
    assert (nvml.nvmlDeviceGetUUID(new), memory(new).total) == ("GPU-new", 40 * GIB)


def test_a_fault_may_end_by_itself(nvml: Any, sim: Sim) -> None:
    handle = nvml.nvmlDeviceGetHandleByIndex(0)
    sim.fail(Family.MEMORY, UNKNOWN, device=0, times=2)
    assert [answer(memory, handle) for _ in range(2)] == [UNKNOWN, UNKNOWN]
    assert memory(handle).used == 0


def test_a_fault_is_of_one_family_and_one_gpu(nvml: Any, sim: Sim) -> None:
    first, second = nvml.nvmlDeviceGetHandleByIndex(0), nvml.nvmlDeviceGetHandleByIndex(1)
    sim.fail(Family.COMPUTE_PROCESSES, NO_PERMISSION, device=0)
    assert [answer(processes, handle) for handle in (first, second)] == [NO_PERMISSION, []]
    assert memory(first).used == 0
    sim.clear(Family.COMPUTE_PROCESSES, device=0)
    sim.fail(Family.COMPUTE_PROCESSES, 17)
    assert [answer(processes, handle) for handle in (first, second)] == [17, 17]


def test_a_delayed_call_takes_that_long(nvml: Any, sim: Sim) -> None:
    handle = nvml.nvmlDeviceGetHandleByIndex(0)
    sim.delay(Family.MEMORY, 0.2, device=0)
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(memory, handle)
        sim.wait_inflight(Family.MEMORY, 1, DEADLINE, device=0)
        assert memory(nvml.nvmlDeviceGetHandleByIndex(1)).used == 0
        assert slow.result(DEADLINE).used == 0
    sim.wait_inflight(Family.MEMORY, 0, DEADLINE)


def test_a_hung_call_returns_when_released_and_others_go_on(nvml: Any, sim: Sim) -> None:
    handle, neighbour = nvml.nvmlDeviceGetHandleByIndex(0), nvml.nvmlDeviceGetHandleByIndex(1)
    sim.hang(Family.MEMORY, device=0)
    with ThreadPoolExecutor(1) as pool:
        hung = pool.submit(memory, handle)
        try:
            sim.wait_inflight(Family.MEMORY, 1, DEADLINE, device=0)
            for _ in range(100):
                assert memory(neighbour).used == 0
            assert processes(handle) == []
            assert sim.inflight(Family.MEMORY, 0) == 1
            assert not hung.done()
            sim.set_memory(0, used=GIB)
        finally:
            sim.release(Family.MEMORY, device=0)
        assert hung.result(DEADLINE).used == GIB
    assert sim.inflight() == 0


def test_a_signal_waits_for_a_call_that_hangs_in_the_main_thread(nvml_library: Path, sim: Sim) -> None:
    program = """
import pynvml, signal
signal.signal(signal.SIGTERM, lambda *_: print("handled", flush=True))
pynvml.nvmlInit()
pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(0))
"""
    sim.hang(Family.MEMORY)
    with start(program, nvml_library, sim) as process:
        try:
            sim.wait_inflight(Family.MEMORY, 1, DEADLINE)
            process.send_signal(signal.SIGTERM)
            assert process.stdout is not None
            assert select.select([process.stdout], [], [], 0.2)[0] == []
            sim.release(Family.MEMORY)
            assert process.stdout.readline() == "handled\n"
            assert process.wait(DEADLINE) == 0
        finally:
            process.kill()


def test_a_process_whose_daemon_thread_hangs_can_end(nvml_library: Path, sim: Sim) -> None:
    program = """
import pynvml, threading
pynvml.nvmlInit()
handle = pynvml.nvmlDeviceGetHandleByIndex(0)
threading.Thread(target=pynvml.nvmlDeviceGetMemoryInfo, args=(handle,), daemon=True).start()
input()
"""
    sim.hang(Family.MEMORY)
    variables = os.environ | environment(nvml_library, sim)
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, env=variables, stdin=subprocess.PIPE, text=True) as process:
        try:
            sim.wait_inflight(Family.MEMORY, 1, DEADLINE)
            process.communicate("\n", timeout=DEADLINE)
            assert process.returncode == 0
        finally:
            process.kill()


# ---- MIG ----


@pytest.fixture
def sliced(sim: Sim) -> Sim:
    """GPU 0 cut into two of seven possible slices, each with one process."""
    slices = [MigSlice(7, total=10 * GIB, used=3 * GIB), MigSlice(8, total=20 * GIB, used=4 * GIB)]
    sim.enable_mig(0, slices)
    own = [
        Process(71, 3 * GIB, gpu_instance=7, compute_instance=0),
        Process(81, 4 * GIB, gpu_instance=8, compute_instance=0),
    ]
    sim.set_processes(0, own)
    return sim


def slices_of(handle: Any) -> list[Any]:
    found = (
        answer(pynvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, index)
        for index in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(handle))
    )
    return [slice_ for slice_ in found if not isinstance(slice_, int)]


def test_each_slice_has_its_own_memory_and_processes(nvml: Any, sliced: Sim) -> None:
    parent = nvml.nvmlDeviceGetHandleByIndex(0)
    first, second = slices_of(parent)
    assert nvml.nvmlDeviceGetMigMode(parent) == [1, 1]
    assert nvml.nvmlDeviceGetMaxMigDeviceCount(parent) == 7
    assert answer(nvml.nvmlDeviceGetMigDeviceHandleByIndex, parent, 2) == 6
    assert answer(nvml.nvmlDeviceGetMigDeviceHandleByIndex, parent, 7) == INVALID_ARGUMENT
    assert [nvml.nvmlDeviceGetUUID(handle) for handle in (first, second)] == [sliced.mig_uuid(0, i) for i in (0, 1)]
    assert [nvml.nvmlDeviceGetGpuInstanceId(handle) for handle in (first, second)] == [7, 8]
    assert [memory(handle).used for handle in (parent, first, second)] == [7 * GIB, 3 * GIB, 4 * GIB]
    assert [[p.pid for p in processes(handle)] for handle in (parent, first, second)] == [[71, 81], [71], [81]]
    assert nvml.nvmlDeviceGetAttributes(second).memorySizeMB == 20 * 1024
    assert [bool(nvml.nvmlDeviceIsMigDeviceHandle(handle)) for handle in (parent, first)] == [False, True]
    back = nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(second)
    assert nvml.nvmlDeviceGetUUID(back) == sliced.uuid(0)
    by_uuid = nvml.nvmlDeviceGetHandleByUUID(sliced.mig_uuid(0, 1))
    assert nvml.nvmlDeviceGetIndex(by_uuid) == 1


def test_what_mig_does_not_support(nvml: Any, sliced: Sim) -> None:
    parent, whole = nvml.nvmlDeviceGetHandleByIndex(0), nvml.nvmlDeviceGetHandleByIndex(1)
    for call in (nvml.nvmlDeviceGetUtilizationRates, nvml.nvmlDeviceGetRemappedRows):
        assert answer(call, parent) == NOT_SUPPORTED
    assert answer(nvml.nvmlDeviceGetProcessUtilization, parent, 0) == NOT_SUPPORTED
    assert nvml.nvmlDeviceGetMaxMigDeviceCount(whole) == 0
    assert answer(nvml.nvmlDeviceGetMigDeviceHandleByIndex, whole, 0) == NOT_SUPPORTED
    assert sliced.calls(Family.MIG, 1) == 2


def test_a_container_may_read_its_slice_and_be_refused_the_gpu(nvml: Any, sliced: Sim) -> None:
    parent = nvml.nvmlDeviceGetHandleByIndex(0)
    sliced.fail(Family.MEMORY, NO_PERMISSION, device=0)
    sliced.fail(Family.COMPUTE_PROCESSES, NO_PERMISSION, device=0, mig=1)
    first, second = slices_of(parent)
    assert [answer(memory, parent), memory(first).used, memory(second).used] == [NO_PERMISSION, 3 * GIB, 4 * GIB]
    assert [len(processes(first)), answer(processes, second)] == [1, NO_PERMISSION]


def test_the_handle_of_a_destroyed_slice_is_refused_even_after_the_next(nvml: Any, sliced: Sim) -> None:
    parent = nvml.nvmlDeviceGetHandleByIndex(0)
    [stale, _] = slices_of(parent)
    sliced.remove_mig(0, 0)
    assert answer(memory, stale) == INVALID_ARGUMENT
    assert len(slices_of(parent)) == 1
    sliced.add_mig(0, MigSlice(9, used=GIB), slot=0)
    assert answer(memory, stale) == INVALID_ARGUMENT
    assert memory(slices_of(parent)[0]).used == GIB


def test_a_driver_may_reuse_the_handle_of_a_destroyed_slice(nvml_library: Path, make_sim: Callable[..., Sim]) -> None:
    sim = make_sim(1, options=Option.MIG_HANDLES_REUSED)
    sim.enable_mig(0, [MigSlice(7, used=GIB)])
    with load_into_pynvml(nvml_library, sim):
        pynvml.nvmlInit()
        [handle] = slices_of(pynvml.nvmlDeviceGetHandleByIndex(0))
        before = pynvml.nvmlDeviceGetUUID(handle)
        sim.remove_mig(0, 0)
        sim.add_mig(0, MigSlice(9, used=2 * GIB))
        assert memory(handle).used == 2 * GIB
        assert pynvml.nvmlDeviceGetUUID(handle) != before


def test_a_lost_gpu_takes_its_slices_along(nvml: Any, sliced: Sim) -> None:
    [first, _] = slices_of(nvml.nvmlDeviceGetHandleByIndex(0))
    sliced.lose(0)
    assert answer(memory, first) == LOST


# ---- events ----


def test_an_xid_reaches_the_sets_that_registered_before(nvml: Any, sim: Sim) -> None:
    handle = nvml.nvmlDeviceGetHandleByIndex(1)
    sim.xid(1, 13)
    sets = [nvml.nvmlEventSetCreate() for _ in range(2)]
    for event_set in sets:
        nvml.nvmlDeviceRegisterEvents(handle, nvml.nvmlEventTypeXidCriticalError, event_set)
    assert answer(nvml.nvmlEventSetWait, sets[0], 0) == 10
    sim.xid(0, 48)
    sim.event(1, 1, 5)
    sim.xid(1, 79, gpu_instance=7, compute_instance=0)
    for event_set in sets:
        event = nvml.nvmlEventSetWait(event_set, 0)
        assert (event.eventType, event.eventData, event.gpuInstanceId) == (8, 79, 7)
        assert nvml.nvmlDeviceGetUUID(event.device) == sim.uuid(1)
        assert answer(nvml.nvmlEventSetWait, event_set, 0) == 10
        nvml.nvmlEventSetFree(event_set)


def test_a_wait_ends_when_the_event_comes(nvml: Any, sim: Sim) -> None:
    event_set = nvml.nvmlEventSetCreate()
    nvml.nvmlDeviceRegisterEvents(nvml.nvmlDeviceGetHandleByIndex(0), nvml.nvmlEventTypeXidCriticalError, event_set)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(nvml.nvmlEventSetWait, event_set, 60_000)
        sim.wait_inflight(Family.EVENT_WAIT, 1, DEADLINE)
        sim.xid(0, 31)
        assert waiting.result(DEADLINE).eventData == 31


def test_only_the_latest_events_are_kept(nvml: Any, sim: Sim) -> None:
    event_set = nvml.nvmlEventSetCreate()
    nvml.nvmlDeviceRegisterEvents(nvml.nvmlDeviceGetHandleByIndex(0), nvml.nvmlEventTypeXidCriticalError, event_set)
    for number in range(layout.MAX_EVENTS + 6):
        sim.xid(0, number)
    received = [nvml.nvmlEventSetWait(event_set, 0).eventData for _ in range(layout.MAX_EVENTS)]
    assert received == list(range(6, layout.MAX_EVENTS + 6))
    assert answer(nvml.nvmlEventSetWait, event_set, 0) == 10


# ---- driver reload, shutdown, init ----


def test_a_reloaded_driver_wants_shutdown_and_init(nvml: Any, sim: Sim) -> None:
    handle = nvml.nvmlDeviceGetHandleByIndex(0)
    sim.reload_driver("560.35.03")
    with pytest.raises(nvml.NVMLError_Uninitialized):
        memory(handle)
    assert answer(nvml.nvmlDeviceGetCount) == 1
    nvml.nvmlShutdown()
    nvml.nvmlInit()
    assert (nvml.nvmlSystemGetDriverVersion(), nvml.nvmlSystemGetNVMLVersion()) == ("560.35.03", "12.560.35.03")
    assert memory(handle).total == 80 * GIB


def test_a_reloaded_driver_may_answer_with_another_code(nvml: Any, sim: Sim) -> None:
    sim.reload_driver(stale_code=UNKNOWN)
    assert answer(nvml.nvmlDeviceGetCount) == UNKNOWN


def test_a_pinned_library_needs_a_new_process_after_upgrade(nvml_library: Path, make_sim: Callable[..., Sim]) -> None:
    sim = make_sim(1, options=Option.LIBRARY_PINNED)
    with load_into_pynvml(nvml_library, sim):
        pynvml.nvmlInit()
        sim.reload_driver("560.35.03")
        pynvml.nvmlShutdown()
        with pytest.raises(pynvml.NVMLError_LibRmVersionMismatch):
            pynvml.nvmlInit()
        program = "import pynvml as n; n.nvmlInit(); print(n.nvmlSystemGetDriverVersion())"
        with start(program, nvml_library, sim) as process:
            assert process.communicate(timeout=DEADLINE)[0] == "560.35.03\n"


def test_handles_may_die_at_init(nvml_library: Path, make_sim: Callable[..., Sim]) -> None:
    with load_into_pynvml(nvml_library, make_sim(1, options=Option.HANDLES_DIE_AT_INIT)):
        pynvml.nvmlInit()
        old = pynvml.nvmlDeviceGetHandleByIndex(0)
        pynvml.nvmlShutdown()
        pynvml.nvmlInit()
        assert answer(memory, old) == INVALID_ARGUMENT
        assert memory(pynvml.nvmlDeviceGetHandleByIndex(0)).used == 0


def test_init_is_counted_and_the_last_shutdown_closes(nvml: Any, sim: Sim) -> None:
    nvml.nvmlInit()
    nvml.nvmlShutdown()
    assert (nvml.nvmlDeviceGetCount(), sim.sessions()) == (2, 1)
    nvml.nvmlShutdown()
    assert answer(nvml.nvmlDeviceGetCount) == 1
    assert answer(nvml.nvmlShutdown) == 1
    assert (sim.sessions(), sim.initialisations()) == (0, 1)


def test_one_library_reads_the_state_of_the_test_that_uses_it(nvml_library: Path, make_sim: Callable[..., Sim]) -> None:
    for gpus in (1, 4):
        with load_into_pynvml(nvml_library, make_sim(gpus)):
            pynvml.nvmlInit()
            assert pynvml.nvmlDeviceGetCount() == gpus


# ---- counters ----


def test_calls_are_counted_by_family_and_gpu(nvml: Any, sim: Sim) -> None:
    first, second = nvml.nvmlDeviceGetHandleByIndex(0), nvml.nvmlDeviceGetHandleByIndex(1)
    mark = sim.mark()
    memory(first), memory(first), memory(second), processes(second), nvml.nvmlDeviceGetCount()
    sim.wait_calls(Family.MEMORY, 3, DEADLINE, since=mark)
    assert sim.calls(Family.MEMORY, since=mark) == 3
    assert sim.calls_by_family(1, since=mark) == {Family.MEMORY: 1, Family.COMPUTE_PROCESSES: 1}
    assert (sim.calls(since=mark), sim.calls(device=0, since=mark)) == (5, 2)
    assert sim.calls(Family.HANDLE) == 2


def test_a_wait_for_calls_that_never_come_ends(sim: Sim) -> None:
    with pytest.raises(TimeoutError, match=r"after 0\.01 s: 0 of 1 MEMORY calls made"):
        sim.wait_calls(Family.MEMORY, 1, 0.01)
    with pytest.raises(TimeoutError, match="0 of 1 MEMORY calls inside GPU 0"):
        sim.wait_inflight(Family.MEMORY, 1, 0.01, device=0)


# ---- old drivers, through the newest pynvml as through the oldest ----


def test_a_470_driver_has_neither_memory_version_2_nor_process_list_version_3(
    nvml_variant: Callable[[str], Path], sim: Sim
) -> None:
    sim.set_processes(0, [Process(1, 2 * GIB)])
    missing = tuple(filter(None, [pynvml.NVMLError, getattr(pynvml, "NVMLLibraryMismatchError", None)]))
    with load_into_pynvml(nvml_variant("470"), sim):
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        assert answer(memory, handle) == 13
        assert pynvml.nvmlDeviceGetMemoryInfo(handle).used == 2 * GIB + 600 * MIB
        with pytest.raises(missing):
            processes(handle)
        assert answer(pynvml.nvmlDeviceGetCurrentClocksEventReasons, handle) == 13
        assert pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle) == 1
        assert [process.pid for process in offered("nvmlDeviceGetComputeRunningProcesses_v2")(handle)] == [1]


def test_an_early_535_driver_scrambles_the_list(nvml_variant: Callable[[str], Path], sim: Sim) -> None:
    sim.set_processes(0, [Process(1000 + i) for i in range(4)])
    with load_into_pynvml(nvml_variant("535.54"), sim):
        pynvml.nvmlInit()
        pids = [process.pid for process in processes(pynvml.nvmlDeviceGetHandleByIndex(0))]
        assert pids == [1000, 0, 2**32 - 1, 2**30]


def test_every_variant_answers_the_questions_all_drivers_know(nvml_variant: Callable[[str], Path], sim: Sim) -> None:
    for variant in VARIANTS:
        with load_into_pynvml(nvml_variant(variant), sim):
            pynvml.nvmlInit()
            assert pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(0)).total == 80 * GIB, variant


# ---- the tests' own side ----


def test_what_does_not_fit_is_refused(sim: Sim) -> None:
    with pytest.raises(ValueError, match="room for 95"):
        sim.set_name(0, "x" * 96)
    with pytest.raises(ValueError, match="257 processes"):
        sim.set_processes(0, [Process(pid) for pid in range(257)])
    for _ in range(layout.MAX_DEVICES - 2):
        sim.add_gpu()
    with pytest.raises(ValueError, match="all 16 slots"):
        sim.add_gpu()
    sim.enable_mig(0, [MigSlice(i) for i in range(7)])
    with pytest.raises(ValueError, match="no free MIG slot"):
        sim.add_mig(0, MigSlice(8))


def test_a_state_file_is_not_written_over(sim: Sim) -> None:
    with pytest.raises(FileExistsError):
        Sim(sim.path)
