"""Control groups, v1 and v2: which container and pod a process is in, and how much memory it may take."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

CGROUP_ROOT = Path("/sys/fs/cgroup")

# Container ids as docker, containerd, CRI-O and podman place them: a path component of its own, or with the runtime's
# name before it and .scope behind it. A conmon scope holds the container's monitor, not the container.
_CONTAINER = re.compile(r"(?<![0-9a-f])(?<!conmon-)([0-9a-f]{64})(?:\.scope)?(?=/|$)")
# Pods' uids are UUIDs, with underscores under systemd; of static pods, 32 hexadecimal digits.
_POD = re.compile(r"pod([0-9a-f]{8}(?:[-_]?[0-9a-f]{4}){3}[-_]?[0-9a-f]{12})(?![0-9a-f])")
_V1_UNLIMITED = 1 << 62  # v1 says "no limit" by the largest multiple of the page size


@dataclass(frozen=True)
class Membership:
    """``path`` is the memory controller's cgroup within its hierarchy, of version 2 where ``unified``."""

    container: str | None = None
    pod_uid: str | None = None
    path: str | None = None
    unified: bool = True


def membership(text: str) -> Membership:
    """What /proc/PID/cgroup tells."""
    by_controller: dict[str, str] = {}
    for line in text.splitlines():
        _, _, rest = line.partition(":")
        controllers, separator, path = rest.partition(":")
        if separator:
            by_controller.update(dict.fromkeys(controllers.split(","), path))
    unified = "memory" not in by_controller
    memory_path = by_controller.get("" if unified else "memory")
    paths = [memory_path or "", *by_controller.values()]
    containers = [found for found in map(_CONTAINER.findall, paths) if found]
    pods = [found for found in map(_POD.findall, paths) if found]
    return Membership(
        container=containers[0][-1] if containers else None,
        pod_uid=pods[0][-1].replace("_", "-") if pods else None,
        path=memory_path,
        unified=unified,
    )


def memory_limit(member: Membership, own: Membership, root: Path = CGROUP_ROOT) -> int | None:
    """The smallest memory limit in bytes from the process's cgroup up to the root; None for none, or none visible.

    ``own`` is this process's membership: where the mounted tree is that of this container only, its root is known to
    apply to the members of the same cgroup and to nobody else.
    """
    if member.path is None or member.path.startswith("/.."):
        return None
    base, name = (root, "memory.max") if member.unified else (root / "memory", "memory.limit_in_bytes")
    leaf = PurePosixPath(os.path.normpath(member.path.lstrip("/") or "."))
    if (base / leaf).is_dir():
        steps = (leaf, *leaf.parents)
    elif member.path == own.path and member.unified == own.unified:
        steps = (PurePosixPath("."),)
    else:
        return None
    limits = [limit for limit in (_limit(base / step / name) for step in dict.fromkeys(steps)) if limit is not None]
    return min(limits, default=None)


def _limit(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() and int(text) < _V1_UNLIMITED else None
