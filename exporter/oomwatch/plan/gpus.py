"""The GPUs that a plan is made for: by name, by size, or the ones of this node with what is held on them now."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from oomwatch.observations import Absent
from oomwatch.plan.memory import GIB, Device, Figure
from oomwatch.plan.model import ModelError
from oomwatch.settings import parse_size
from oomwatch.snapshot import GpuView, HeldMemory, Snapshot
from oomwatch.status import gpu_label

TOTALS: Mapping[str, float] = {
    "T4": 14.6,
    "L4": 22.0,
    "A10": 22.0,
    "A10G": 22.0,
    "V100 16GB": 15.77,
    "V100 32GB": 31.74,
    "A30": 23.5,
    "A40": 44.4,
    "A100 40GB": 39.49,
    "A100 80GB": 79.25,
    "A800 80GB": 79.25,
    "A6000": 47.4,
    "RTX 3090": 23.58,
    "RTX 4090": 23.53,
    "RTX 5090": 31.36,
    "RTX 6000 Ada": 47.38,
    "RTX PRO 6000": 95.0,
    "L40": 44.4,
    "L40S": 44.4,
    "H20": 95.1,
    "H100": 79.19,
    "H100 NVL": 93.1,
    "H800": 79.19,
    "H200": 139.8,
    "GH200": 94.5,
    "B200": 178.35,
    "B300": 268.0,
}
"""GiB that CUDA reports of a card (driver's total less what it keeps), from vLLM's own lines in published logs."""

_ERROR = 0.01  # cards of a name differ by this much, with ECC, driver and form


def named(given: str, held: int) -> Device:
    """The device of a name such as ``H100`` or ``A100 80GB``, or of a size such as ``79.2GiB``.

    Raises ``ModelError`` where it is neither.
    """
    if re.match(r"\s*\d", given):
        try:
            size = parse_size(given)
        except ValueError:
            raise ModelError(f"--gpu {given} is no size. Write one such as 79.2GiB, or a name such as H100") from None
        return Device(f"a GPU of {given}", Figure.exact(size, "the size given"), held)
    words = set(_words(given))
    fitting = [name for name in TOTALS if set(_words(name)) <= words]
    if not fitting:
        alike = [name for name in TOTALS if words <= set(_words(name))]
        if len(alike) != 1:
            which = f"could be {' or '.join(alike)}" if alike else f"is not one of {', '.join(TOTALS)}"
            raise ModelError(f"--gpu {given} {which}. A size such as 79.2GiB does too")
        fitting = alike
    name = max(fitting, key=lambda one: len(_words(one)))
    total = TOTALS[name] * GIB
    return Device(name, Figure(total, total * (1 - _ERROR), total * (1 + _ERROR), "published logs of such cards"), held)


def _words(name: str) -> list[str]:
    """``NVIDIA H100 80GB HBM3`` as ``h100``, ``80gb`` …; the words that a card's name is known by."""
    return re.findall(r"[a-z0-9]+", re.sub(r"(\d+)\s*(gb|gib)\b", r"\1gb", name.lower().replace("geforce", "")))


def of_node(snapshot: Snapshot, count: int, chosen: Iterable[str] = ()) -> Device:
    """The tightest of the GPUs that an engine would run on.

    ``chosen`` has indices or uuids; without it the emptiest are taken. Raises ``ModelError`` where there are too few.
    """
    wanted = [one.strip() for one in chosen]
    listed = [gpu for gpu in snapshot.gpus if not wanted or str(gpu.index) in wanted or gpu.uuid in wanted]
    readable = [device for gpu in listed if (device := _device(gpu)) is not None]
    if len(readable) < count:
        have = f"{len(readable)} of this node's can be read" if snapshot.gpus else "this node has none to read"
        raise ModelError(
            f"the engine needs {count} GPU{'' if count == 1 else 's'}, and {have}. "
            "Say which GPU to plan for, with --gpu H100 or --gpu 79.2GiB"
        )
    return sorted(readable, key=lambda device: device.held - device.total.value)[count - 1]


def _device(gpu: GpuView) -> Device | None:
    if isinstance(gpu.memory, Absent):
        return None
    # An engine sees the total less what the driver reserves (cudaMemGetInfo).
    seen = gpu.memory.total - (gpu.memory.reserved or 0)
    holders = () if isinstance(gpu.held, Absent) else tuple((_holder(part), part.used) for part in gpu.held)
    return Device(
        f"{gpu_label(gpu)}, {gpu.name}", Figure.exact(seen, "NVML: total less reserved"), gpu.memory.used, holders
    )


def _holder(part: HeldMemory) -> str:
    holder = part.holder
    return f"{holder.kind} {holder.name}" if holder.name else "processes that are not known"
