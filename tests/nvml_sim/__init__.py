"""A simulated NVIDIA driver library for the unmodified pynvml, and the hand that steers it.

    library = build(directory)                       # libnvidia-ml.so.1
    with Sim(directory / "state", gpus=2) as sim:    # the state file it reads
        sim.set_memory(0, used=70 * GIB)
        sim.hang(Family.MEMORY, device=1)
        subprocess.Popen(command, env=os.environ | environment(library, sim))

A GPU is named by its slot, which never changes; its NVML index is its place among the GPUs that are present."""

from tests.nvml_sim.control import GIB, MIB, Accounted, Gpu, Mark, MigSlice, Process, RetiredPage, Sim
from tests.nvml_sim.layout import Family, Kind, Option
from tests.nvml_sim.library import LIBRARY_NAME, VARIANTS, build, compiler, environment, load_into_pynvml

__all__ = [
    "GIB",
    "LIBRARY_NAME",
    "MIB",
    "VARIANTS",
    "Accounted",
    "Family",
    "Gpu",
    "Kind",
    "Mark",
    "MigSlice",
    "Option",
    "Process",
    "RetiredPage",
    "Sim",
    "build",
    "compiler",
    "environment",
    "load_into_pynvml",
]
