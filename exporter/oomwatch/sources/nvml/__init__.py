"""GPUs through NVIDIA's driver library; see :mod:`oomwatch.sources.nvml.source`."""

from oomwatch.sources.nvml.calls import CallStats, FunctionStats
from oomwatch.sources.nvml.source import NvmlSource

__all__ = ["CallStats", "FunctionStats", "NvmlSource"]
