"""Every detector, one line each: the verdict, what it is about, and the class with its settings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from oomwatch.detectors.base import Detector, Subject
from oomwatch.detectors.leak import (
    GpuMemoryLeak,
    GpuMemoryLeakSettings,
    HostMemoryLeak,
    HostMemoryLeakSettings,
    KvBlockLeak,
    KvBlockLeakSettings,
)
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
    Kind("kv-block-leak", "rank", KvBlockLeak, KvBlockLeakSettings),
    Kind("gpu-memory-leak", "held", GpuMemoryLeak, GpuMemoryLeakSettings),
    Kind("host-memory-leak", "process", HostMemoryLeak, HostMemoryLeakSettings),
)
