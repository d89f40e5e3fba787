"""What a failing driver means and what to do about it, in words for people."""

from __future__ import annotations

import re

from oomwatch.observations import Absent, Maybe

_REMEDIES = {
    "LIBRARY_NOT_FOUND": (
        "library_missing",
        (
            "the driver library cannot be loaded{loader}. Install NVIDIA's driver; in a container, start it with the "
            "NVIDIA runtime and NVIDIA_DRIVER_CAPABILITIES=utility"
        ),
    ),
    "DRIVER_NOT_LOADED": (
        "driver_not_loaded",
        "the kernel module is not loaded. Run nvidia-smi on the host and read dmesg",
    ),
    "NO_PERMISSION": (
        "no_permission",
        "this user may not open /dev/nvidiactl. Run as a user who may, or correct the permissions of /dev/nvidia*",
    ),
    "LIB_RM_VERSION_MISMATCH": (
        "version_mismatch",
        (
            "the driver library and the loaded kernel module have different versions, as after an upgrade. Restart "
            "this daemon (its container, if it runs in one); if that does not help, reboot the node"
        ),
    ),
    "UNKNOWN": (
        "error",
        (
            "the driver library fails with error 999 (UNKNOWN). In a container: restart the container, its devices "
            "were detached (systemd's daemon-reload does that). On a host: read dmesg"
        ),
    ),
}


def state_after(reason: str, loader_error: str = "") -> tuple[str, str]:
    """State and detail of a DriverReport, after the library as a whole answered with this error."""
    state, remedy = _REMEDIES.get(reason, ("error", "the driver library fails with {reason}. Read dmesg"))
    return state, remedy.format(reason=reason, loader=f" ({loader_error})" if loader_error else "")


def warning_about(driver_version: Maybe[str]) -> tuple[str, ...]:
    """What is known to be wrong with a driver of this version, though it works."""
    if isinstance(driver_version, Absent):
        return ()
    numbers = tuple(map(int, re.findall(r"\d+", driver_version)))
    if (535,) <= numbers < (535, 104, 5):
        return ("this driver is older than 535.104.05 and may scramble process lists. Update it",)
    return ()
