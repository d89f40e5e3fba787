"""Compiles the simulated libnvidia-ml.so.1 and puts it where a process, or this one's pynvml, finds it."""

import ctypes
import os
import shutil
import subprocess
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pynvml

from tests.nvml_sim.control import Sim

LIBRARY_NAME = "libnvidia-ml.so.1"
SOURCES = Path(__file__).parent
STATE_VARIABLE = "NVML_SIM_STATE"
VISIBLE_VARIABLE = "NVML_SIM_VISIBLE_DEVICES"

_SINCE_580 = ("NO_ADDRESSING", "NO_TEMPERATURE_V", "FIELD_LIMIT=230")
_SINCE_550 = ("NO_PROCESSES_UTILIZATION", "NO_NUMA_NODE", *_SINCE_580)
_SINCE_535 = ("NO_PROC_DETAIL", "NO_EVENT_REASONS", "NO_CONF_COMPUTE", "NVML_VERSION_NEEDS_INIT", *_SINCE_550)
_SINCE_525 = ("NO_MEM_V2", "NO_PROC_V3", *_SINCE_535)

VARIANTS: dict[str, tuple[str, ...]] = {
    "default": (),
    "550": _SINCE_580,
    "535": _SINCE_550,
    # Early 535: entries of 32 bytes from the symbols that stand for 24, and no detail list.
    "535.54": ("STRIDE32", "NO_PROC_DETAIL", *_SINCE_550),
    # 535.98 dropped the v3 lists for a while.
    "535.98": ("NO_PROC_V3", "NO_PROC_DETAIL", *_SINCE_550),
    "525": _SINCE_535,
    "470": _SINCE_525,
}
"""Drivers by the symbols they lack (from the symbol tables of the real libraries 470, 525, 535 and 550)."""


def compiler() -> str | None:
    """Path of gcc, or None when this machine has none."""
    return shutil.which("gcc")


def build(directory: Path, variant: str = "default") -> Path:
    """Compile one variant below `directory` and return the path of libnvidia-ml.so.1; compiled once for each directory.

    Raises KeyError for an unknown variant and subprocess.CalledProcessError when gcc refuses the source."""
    library = directory / f"driver-{variant}" / LIBRARY_NAME
    if library.exists():
        return library
    library.parent.mkdir(parents=True, exist_ok=True)
    unfinished = library.with_suffix(f".{os.getpid()}")
    command = [
        compiler() or "gcc",
        *("-std=gnu11", "-O1", "-fPIC", "-shared", "-fvisibility=hidden", "-pthread", "-Wall", "-Wextra", "-Werror"),
        *(f"-D{define}" for define in VARIANTS[variant]),
        f"-Wl,-soname,{LIBRARY_NAME}",
        *("-o", str(unfinished), str(SOURCES / "sim.c")),
    ]
    subprocess.run(command, check=True, timeout=60)
    unfinished.replace(library)
    return library


def environment(library: Path, sim: Sim | None, visible: Sequence[str] | None = None) -> dict[str, str]:
    """Variables that make a new process find `library` (the file or its directory) and read the state of `sim`.

    `sim` None stands for a library without a driver. `visible` narrows what that process sees to GPUs of these UUIDs,
    as device cgroups do."""
    directory = library if library.is_dir() else library.parent
    search = [str(directory), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
    variables = {"LD_LIBRARY_PATH": ":".join(search), STATE_VARIABLE: str(sim.path) if sim else ""}
    if visible is not None:
        variables[VISIBLE_VARIABLE] = ",".join(visible) or "none"
    return variables


@contextmanager
def load_into_pynvml(library: Path, sim: Sim | None, visible: Sequence[str] | None = None) -> Generator[None]:
    """Let this process's pynvml use `library` with the state of `sim`, and put back what was there before.

    The arguments are those of `environment`. The library isn't initialised on entry, and is shut down on
    exit however often the block initialised it; faults of `sim` are cleared on exit, so that no call stays behind."""
    variables: dict[str, str | None] = {VISIBLE_VARIABLE: None, **environment(library, sim, visible)}
    del variables["LD_LIBRARY_PATH"]  # the loader reads it once, at exec
    loaded = ctypes.CDLL(str(library))
    before = pynvml.nvmlLib, pynvml._nvmlLib_refcount
    with _environment_set(variables):
        _use(loaded, 0)
        try:
            yield
        finally:
            if sim is not None:
                sim.clear_faults()
            _shut_down(loaded)
            _use(*before)


@contextmanager
def _environment_set(variables: dict[str, str | None]) -> Generator[None]:
    before = {name: os.environ.get(name) for name in variables}
    _set_environment(variables)
    try:
        yield
    finally:
        _set_environment(before)


def _set_environment(variables: dict[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _use(library: ctypes.CDLL | None, references: int) -> None:
    with pynvml.libLoadLock:
        pynvml.nvmlLib = library
        pynvml._nvmlLib_refcount = references
        pynvml._nvmlGetFunctionPointer_cache.clear()


def _shut_down(library: ctypes.CDLL) -> None:
    for _ in range(1000):
        if library.nvmlShutdown() != 0:
            return
    raise AssertionError("the simulated library was initialised more than 1000 times and never shut down")
