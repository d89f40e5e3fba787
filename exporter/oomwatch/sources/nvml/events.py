"""Xid events: one thread that waits for the driver to report them."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import pynvml
import structlog

from oomwatch.observations import Absent, XidEvent
from oomwatch.sources.nvml.calls import Nvml
from oomwatch.sources.nvml.device import Device, address
from oomwatch.sources.nvml.threads import Gate

log = structlog.get_logger(__name__)

_LASTING = frozenset({"FUNCTION_NOT_FOUND", "NOT_SUPPORTED", "NO_PERMISSION"})
_RETRY_AFTER = 60.0  # seconds, for what failed but may work one day
_PAUSE = 1.0  # seconds, where there is nothing to wait for


class XidWatcher:
    """Publishes an XidEvent for each Xid of the given devices while the gate is open.

    ``wait`` is the timeout of one wait in seconds: that long the driver cannot be given back.
    """

    def __init__(
        self,
        nvml: Nvml,
        gate: Gate,
        devices: Callable[[], Iterable[Device]],
        publish: Callable[[XidEvent], None],
        *,
        wait: float,
        clock: Callable[[], float],
    ) -> None:
        self._nvml = nvml
        self._gate = gate
        self._devices = devices
        self._publish = publish
        self._wait_ms = max(1, round(wait * 1000))
        self._clock = clock
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="nvml-events", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        self._stopping.set()

    def _run(self) -> None:
        while not self._stopping.is_set():
            with self._gate.inside(_PAUSE) as inside:
                if inside:
                    self._refused: dict[tuple[str, int | None], float] = {}
                    self._told: dict[str, str] = {}  # the last refusal that was logged, by what was refused
                    self._watch_while_open()

    def _watch_while_open(self) -> None:
        """One life of the driver: event sets are freed before the gate is left, so none outlives a shutdown."""
        while self._gate.is_open and not self._stopping.is_set():
            events = self._nvml.call("nvmlEventSetCreate", pynvml.nvmlEventSetCreate)
            if isinstance(events, Absent):
                self._tell("all", events.reason)
                self._gate.wait_for_closing(None if events.reason in _LASTING else _RETRY_AFTER)
                continue
            self._told.pop("all", None)
            try:
                self._watch(events)
            except Exception:
                log.exception("nvml_events_failed")
                self._gate.wait_for_closing(_RETRY_AFTER)
            finally:
                self._nvml.call("nvmlEventSetFree", pynvml.nvmlEventSetFree, events)

    def _watch(self, events: Any) -> None:
        """Waits on one event set, until the gate closes or the set becomes unusable."""
        registered: dict[int | None, str] = {}
        while self._gate.is_open and not self._stopping.is_set():
            if not self._register(events, registered):
                return
            if not registered:
                self._gate.wait_for_closing(_PAUSE)
                continue
            event = self._nvml.call(
                "nvmlEventSetWait_v2", pynvml.nvmlEventSetWait_v2, events, self._wait_ms, normal="TIMEOUT"
            )
            if not isinstance(event, Absent):
                self._report(event, registered)
            elif event.reason == "INVALID_ARGUMENT":
                self._gate.wait_for_closing(_PAUSE)
                return
            elif event.reason != "TIMEOUT":
                self._gate.wait_for_closing(_PAUSE)

    def _register(self, events: Any, registered: dict[int | None, str]) -> bool:
        """Adds devices that are new; False when NVML leaves the set in an undefined state."""
        for device in self._devices():
            handle = device.handle
            if handle is None:
                continue
            key = (device.uuid, address(handle))
            if registered.get(key[1]) == device.uuid or self._refused.get(key, 0.0) > time.monotonic():
                continue
            answer = self._nvml.call(
                "nvmlDeviceRegisterEvents",
                pynvml.nvmlDeviceRegisterEvents,
                handle,
                pynvml.nvmlEventTypeXidCriticalError,
                events,
            )
            if not isinstance(answer, Absent):
                registered[key[1]] = device.uuid
                self._told.pop(device.uuid, None)
                continue
            lasting = answer.reason in _LASTING
            self._refused[key] = math.inf if lasting else time.monotonic() + _RETRY_AFTER
            self._tell(device.uuid, answer.reason)
            if answer.reason == "UNKNOWN":
                return False
        return True

    def _tell(self, gpu: str, reason: str) -> None:
        """Logs that Xids go unnoticed; what is tried again and lasts is logged once."""
        if self._told.get(gpu) != reason:
            self._told[gpu] = reason
            log.warning("xid_events_unavailable", gpu=gpu, error=reason)

    def _report(self, event: Any, registered: dict[int | None, str]) -> None:
        if event.eventType != pynvml.nvmlEventTypeXidCriticalError:
            return
        uuid = registered.get(address(event.device))
        if uuid is None:
            found = self._nvml.text("nvmlDeviceGetUUID", pynvml.nvmlDeviceGetUUID, event.device)
            if isinstance(found, Absent):
                log.warning("xid_of_unknown_device", xid=int(event.eventData), error=found.reason)
                return
            uuid = found
        self._publish(XidEvent(self._clock(), uuid, int(event.eventData)))
