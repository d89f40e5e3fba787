"""Only waits for Xids, as oomwatch's thread for them does: what the simulated driver spends on that by itself.

The simulated nvmlEventSetWait looks for events every 2 ms; a real driver sleeps in the kernel.
"""

from __future__ import annotations

import contextlib

import pynvml

_TIMEOUT_MS = 2000


def main() -> None:
    pynvml.nvmlInit()
    events = pynvml.nvmlEventSetCreate()
    for index in range(pynvml.nvmlDeviceGetCount()):
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        pynvml.nvmlDeviceRegisterEvents(handle, pynvml.nvmlEventTypeXidCriticalError, events)
    print("up", flush=True)
    while True:
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlEventSetWait_v2(events, _TIMEOUT_MS)


if __name__ == "__main__":
    main()
