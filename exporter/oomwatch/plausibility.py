"""Whether a driver's process list can be true.

R535 drivers before 535.104.05 write 32 bytes an entry where every other driver writes 24; read with the wrong step the
list looks like ``1000, 0, 4294967295, …`` and no call reports an error.
"""

from __future__ import annotations

from collections.abc import Sequence

from oomwatch.observations import Absent, GpuProcess, Maybe, Memory

PID_LIMIT = 2**22  # the kernel's PID_MAX_LIMIT on 64 bits


def possible_pid(pid: int) -> bool:
    return 0 < pid < PID_LIMIT


def plausible(processes: Sequence[GpuProcess], memory: Maybe[Memory]) -> bool:
    """False when the list contradicts itself or ``memory``.

    That is: an impossible pid, a pid listed twice, more memory than the device has, or more than is in use by over half
    of the device. The margin is for memory allocated between the two calls.
    """
    pids = {process.pid for process in processes}
    if len(pids) < len(processes) or not all(map(possible_pid, pids)):
        return False
    if isinstance(memory, Absent):
        return True
    claimed = sum(process.used or 0 for process in processes)
    return claimed <= min(memory.total, memory.used + memory.total // 2)
