"""Every detector, one line each: the verdict, what it is about, and the class with its settings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from oomwatch.detectors.base import Detector, Subject
from oomwatch.detectors.capacity import (
    AdmissionStall,
    AdmissionStallSettings,
    ConcurrencyLow,
    ConcurrencyLowSettings,
    EngineStuck,
    EngineStuckSettings,
    KvExhaustion,
    KvExhaustionSettings,
    PreemptionPressure,
    PreemptionPressureSettings,
    RanksUnbalanced,
    RanksUnbalancedSettings,
)
from oomwatch.detectors.fragmentation import AllocatorFragmentation, AllocatorFragmentationSettings
from oomwatch.detectors.health import (
    GpuLost,
    GpuLostSettings,
    MetricsMissing,
    MetricsMissingSettings,
    NvmlStuck,
    NvmlStuckSettings,
    SourceStale,
    SourceStaleSettings,
)
from oomwatch.detectors.leak import (
    GpuMemoryLeak,
    GpuMemoryLeakSettings,
    HostMemoryLeak,
    HostMemoryLeakSettings,
    KvBlockLeak,
    KvBlockLeakSettings,
)
from oomwatch.detectors.life import CrashLoop, CrashLoopSettings, StartupOom, StartupOomSettings
from oomwatch.detectors.memory import (
    BudgetOverrun,
    BudgetOverrunSettings,
    HeadroomLow,
    HeadroomLowSettings,
    MarginThin,
    MarginThinSettings,
    OrphanMemory,
    OrphanMemorySettings,
)
from oomwatch.detectors.outcomes import RuntimeOom, RuntimeOomSettings, StartupRefused, StartupRefusedSettings
from oomwatch.detectors.tail_waste import KvTailWaste, KvTailWasteSettings
from oomwatch.settings import Section

About = Literal["rank", "engine", "device", "held", "process"]
"""Which subject a detector has, and so which samples reach it; ``held`` is an engine's process on a device."""


@dataclass(frozen=True)
class Kind:
    """How to make the detector of ``verdict``; ``settings`` are its thresholds, all with defaults."""

    verdict: str
    about: About
    make: Callable[[Subject, Any], Detector]
    settings: type[Section]


KINDS: tuple[Kind, ...] = (
    Kind("kv-exhaustion", "rank", KvExhaustion, KvExhaustionSettings),
    Kind("preemption-pressure", "rank", PreemptionPressure, PreemptionPressureSettings),
    Kind("admission-stall", "rank", AdmissionStall, AdmissionStallSettings),
    Kind("ranks-unbalanced", "engine", RanksUnbalanced, RanksUnbalancedSettings),
    Kind("engine-stuck", "engine", EngineStuck, EngineStuckSettings),
    Kind("concurrency-low", "engine", ConcurrencyLow, ConcurrencyLowSettings),
    Kind("allocator-fragmentation", "held", AllocatorFragmentation, AllocatorFragmentationSettings),
    Kind("kv-tail-waste", "rank", KvTailWaste, KvTailWasteSettings),
    Kind("kv-block-leak", "rank", KvBlockLeak, KvBlockLeakSettings),
    Kind("gpu-memory-leak", "held", GpuMemoryLeak, GpuMemoryLeakSettings),
    Kind("host-memory-leak", "process", HostMemoryLeak, HostMemoryLeakSettings),
    Kind("margin-thin", "device", MarginThin, MarginThinSettings),
    Kind("headroom-low", "device", HeadroomLow, HeadroomLowSettings),
    Kind("budget-overrun", "engine", BudgetOverrun, BudgetOverrunSettings),
    Kind("orphan-memory", "device", OrphanMemory, OrphanMemorySettings),
    Kind("startup-refused", "engine", StartupRefused, StartupRefusedSettings),
    Kind("startup-oom", "engine", StartupOom, StartupOomSettings),
    Kind("runtime-oom", "engine", RuntimeOom, RuntimeOomSettings),
    Kind("crash-loop", "engine", CrashLoop, CrashLoopSettings),
    Kind("gpu-lost", "device", GpuLost, GpuLostSettings),
    Kind("nvml-stuck", "device", NvmlStuck, NvmlStuckSettings),
    # One class for both: what is about a device hears of no engine, and the other way round.
    Kind("source-stale", "device", SourceStale, SourceStaleSettings),
    Kind("source-stale", "engine", SourceStale, SourceStaleSettings),
    Kind("metrics-missing", "engine", MetricsMissing, MetricsMissingSettings),
)
