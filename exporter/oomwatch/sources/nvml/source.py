"""The GPUs of this node through NVIDIA's driver library (NVML).

Threads: one for each device, one for what concerns the driver as a whole, one that waits for Xids, and while devices
are enumerated one for each index. All are daemon threads, and every call into the library is made in one of them, never
in the caller's: a call that hangs in the driver cannot be killed, so nobody may have to wait for it. A device whose
call hangs is published as HUNG and left alone until the call returns.

The driver's life: initialised when it answers, given back and initialised anew when it does not (a reload), given back
for good on request. nvmlShutdown is never called beneath a running call.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import psutil
import pynvml
import structlog

from oomwatch.observations import (
    HUNG,
    NOT_KNOWN,
    Absent,
    DriverReport,
    GpuPoll,
    Maybe,
    Observation,
    SourceRun,
    TargetRemoved,
)
from oomwatch.sources.nvml.calls import CallStats, Nvml
from oomwatch.sources.nvml.device import GONE, Device, Identity, address
from oomwatch.sources.nvml.driver_states import state_after, warning_about
from oomwatch.sources.nvml.events import XidWatcher
from oomwatch.sources.nvml.threads import Attempt, Gate, Worker

log = structlog.get_logger(__name__)

_CANNOT_GIVE_BACK = "the driver cannot be given back"

# A device that leaves or comes changes the count; one that is exchanged between two refreshes is noticed this often.
_ENUMERATE_EVERY = 20


@dataclass(frozen=True)
class _DriverAnswer:
    """What the driver as a whole said: ``reason`` is empty when it works, ``fresh`` if it was initialised just now."""

    reason: str = ""
    count: int = 0
    fresh: bool = False
    blocked: str = ""  # the call that keeps the driver from being given back


class NvmlSource:
    """Polls the node's GPUs and publishes GpuPoll, DriverReport, XidEvent, SourceRun and TargetRemoved.

    ``publish`` is called from several threads at once. ``deadline`` is in seconds, for each of :meth:`refresh`,
    :meth:`poll` and :meth:`poll_all`. Process lists and what else changes slowly are read in each ``process_every``-th
    poll of a device. ``host_memory`` answers total and available bytes, for devices that share the host's memory.
    ``released_until`` carries on a release of the source before this one, by the property of that name.
    """

    def __init__(
        self,
        publish: Callable[[Observation], None],
        *,
        deadline: float = 5.0,
        process_every: int = 4,
        collect_health: bool = True,
        host_memory: Callable[[], tuple[int, int]] | None = None,
        clock: Callable[[], float] = time.time,
        released_until: float = -math.inf,
    ) -> None:
        self._publish = publish
        self._deadline = deadline
        self._process_every = process_every
        self._collect_health = collect_health
        self._host_memory = host_memory or _host_memory
        self._clock = clock

        self._nvml = Nvml()
        self._gate = Gate()
        self._driver: Worker[_DriverAnswer] = Worker("nvml-driver")
        self._event_wait = min(2.0, deadline * 0.4)
        self._events = XidWatcher(
            self._nvml, self._gate, self._known_devices, publish, wait=self._event_wait, clock=clock
        )
        self._refreshing = threading.Lock()
        self._closed = False
        self._released_until = released_until

        # Belong to the driver's thread.
        self._initialised = False
        self._versions: dict[str, Maybe[str]] = {}

        # Belong to whoever refreshes; the dictionary of devices is replaced, never changed, as polls read it meanwhile.
        self._devices: dict[str, Device] = {}
        self._workers: dict[str, Worker[GpuPoll | None]] = {}
        self._resolvers: dict[int, Worker[Maybe[Identity]]] = {}
        self._uuid_at: dict[int, str] = {}
        self._count = 0
        self._refreshes = 0
        self._down = Absent("UNINITIALIZED")  # why no device can be read while the gate is closed
        self._logged_state = ""

        # Set by polls, consumed by the next refresh.
        self._enumerate_next = threading.Event()
        self._initialise_next = threading.Event()
        self._failures: dict[str, str] = {}  # by uuid, empty when well

    # --- for the scheduler -----------------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Initialises the driver and enumerates the devices where needed, and publishes how the driver is.

        Cheap when nothing changed: one call. Returns within the deadline.
        """
        self._refresh_in_turn()

    def targets(self) -> tuple[str, ...]:
        """The uuids of the devices known now, in the order of their indices."""
        return tuple(device.uuid for device in sorted(self._devices.values(), key=lambda device: device.index))

    def poll(self, uuid: str) -> None:
        """Reads one device and publishes a GpuPoll and a SourceRun; returns within the deadline."""
        device = self._devices.get(uuid)
        if device is not None:
            self._poll([device])

    def poll_all(self) -> None:
        """Reads all devices side by side; each is published when it has been read, all within one deadline."""
        self._poll(list(self._devices.values()))

    def release(self, seconds: float = math.inf) -> str:
        """Gives the driver back, so that MIG can be reconfigured or the driver unloaded, until :meth:`resume`.

        Empty when it was given back, else why not: then each refresh tries again. With ``seconds``, the first refresh
        after that time takes the driver again.
        """
        self._released_until = time.monotonic() + seconds
        report = self._refresh_in_turn()
        if report is None:
            what = "the source is closed" if self._closed else "it is still being asked whether it works"
            return f"{_CANNOT_GIVE_BACK}: {what}"
        if report.state == "released":
            return ""
        return report.detail or f"{_CANNOT_GIVE_BACK}: the release ended before that"

    @property
    def released(self) -> bool:
        """Whether a release is in force, even if the driver could not be given back yet."""
        return time.monotonic() < self._released_until

    @property
    def released_until(self) -> float:
        """When a release ends, in monotonic seconds; in the past when none is in force."""
        return self._released_until

    def resume(self) -> None:
        """Ends a release; the driver is initialised at once."""
        self._released_until = -math.inf
        self.refresh()

    def close(self) -> None:
        """Gives the driver back if that takes no more than a second; what hangs is left behind in daemon threads."""
        self._closed = True
        self._events.stop()
        attempt, new = self._driver.start(self._let_go, _discard)
        if new:
            attempt.wait(time.monotonic() + 1.0)
        self._driver.stop()
        for worker in self._workers.values():
            worker.stop()
        for resolver in self._resolvers.values():
            resolver.stop()

    def call_stats(self) -> CallStats:
        """Calls into the library by function since the start: how many, how long, and errors by name."""
        return self._nvml.stats()

    # --- the driver as a whole -------------------------------------------------------------------------------------

    def _refresh_in_turn(self) -> DriverReport | None:
        """What a refresh published about the driver; None when there was none, as another one takes too long."""
        if self._closed or not self._refreshing.acquire(timeout=self._deadline):
            return None
        try:
            return self._refresh()
        finally:
            self._refreshing.release()

    def _refresh(self) -> DriverReport:
        begin = time.monotonic()
        end = begin + self._deadline
        released = self.released
        answer = self._ask_driver(released, end)
        ok = False
        if answer is None:
            hanging = self._hanging(self._driver)
            state, detail = "hung", f"{_CANNOT_GIVE_BACK}: {hanging}" if released else hanging
            self._down = HUNG
            self._enumerate_next.set()
        elif answer.blocked:
            state, detail = "hung", f"{_CANNOT_GIVE_BACK}: {answer.blocked}"
        elif released:
            state, detail = "released", "the driver was given back on request"
        elif answer.reason:
            state, detail = state_after(answer.reason, self._nvml.loader_error)
            self._down = Absent(answer.reason)
        else:
            self._events.start()
            problems = self._enumerate(answer, end)
            ok = all(reason == "NO_PERMISSION" for reason in problems.values())
            remarks = [f"the device at index {index} cannot be identified: {problems[index]}" for index in problems]
            warning = warning_about(self._versions.get("driver_version", NOT_KNOWN))
            state, detail = "ok", ". ".join((*remarks, *warning))
        t = self._clock()
        count = answer.count if answer is not None and state == "ok" else NOT_KNOWN
        report = DriverReport(t, state, detail, device_count=count, **(self._versions if state == "ok" else {}))
        self._publish(report)
        self._publish(SourceRun(t, "nvml", "", ok, time.monotonic() - begin, "" if ok else detail))
        if state != self._logged_state:
            log.info("nvml_driver_state", state=state, before=self._logged_state, detail=detail)
            self._logged_state = state
        return report

    def _ask_driver(self, released: bool, end: float) -> _DriverAnswer | None:
        """The driver's answer; None when it does not come in time."""
        answers: list[_DriverAnswer] = []
        again = self._initialise_next.is_set()
        self._initialise_next.clear()
        attempt, new = self._driver.start(self._let_go if released else partial(self._reach, again), answers.append)
        if new and not attempt.wait(end):
            attempt.give_up()
        return answers[0] if answers else None

    def _reach(self, again: bool) -> _DriverAnswer:
        """Initialises the driver if needed and counts the devices, in the driver's thread."""
        fresh = not self._initialised
        count: Maybe[int] = Absent("UNINITIALIZED")
        if self._initialised and not again:
            count = self._count_devices()
        if isinstance(count, Absent):
            if self._initialised:
                answer = self._let_go()
                if answer.blocked:
                    self._gate.open()
                    return _DriverAnswer(reason=count.reason, blocked=answer.blocked)
                fresh = True
            failure = self._initialise()
            if failure:
                return _DriverAnswer(reason=failure)
            count = self._count_devices()
            if isinstance(count, Absent):
                self._let_go()
                return _DriverAnswer(reason=count.reason)
        self._gate.open()
        return _DriverAnswer(count=count, fresh=fresh)

    def _count_devices(self) -> Maybe[int]:
        return self._nvml.call("nvmlDeviceGetCount_v2", pynvml.nvmlDeviceGetCount)

    def _initialise(self) -> str:
        """The error's name, or nothing."""
        answer: Maybe[None] = self._nvml.call("nvmlInitWithFlags", pynvml.nvmlInit)
        if isinstance(answer, Absent):
            return answer.reason
        self._initialised = True
        ask = self._nvml.text
        cuda = self._nvml.call("nvmlSystemGetCudaDriverVersion_v2", pynvml.nvmlSystemGetCudaDriverVersion_v2)
        self._versions = {
            "driver_version": ask("nvmlSystemGetDriverVersion", pynvml.nvmlSystemGetDriverVersion),
            "nvml_version": ask("nvmlSystemGetNVMLVersion", pynvml.nvmlSystemGetNVMLVersion),
            "cuda_version": cuda if isinstance(cuda, Absent) else f"{cuda // 1000}.{cuda % 1000 // 10}",
        }
        for device in self._devices.values():
            device.handle = None
            device.forget()
        return ""

    def _let_go(self) -> _DriverAnswer:
        """Shuts the driver down once no call runs any more, in the driver's thread."""
        if not self._gate.close(self._event_wait + self._deadline * 0.4):
            running = self._nvml.running()
            return _DriverAnswer(reason="HUNG", blocked=_sentence(running))
        if self._initialised:
            self._initialised = False
            self._nvml.call("nvmlShutdown", pynvml.nvmlShutdown)
        return _DriverAnswer(reason="UNINITIALIZED")

    def _hanging(self, worker: Worker[_DriverAnswer] | Worker[GpuPoll | None] | Worker[Maybe[Identity]]) -> str:
        return _sentence(self._nvml.running(worker.thread) if worker.thread is not None else None)

    # --- who is there ----------------------------------------------------------------------------------------------

    def _known_devices(self) -> Iterable[Device]:
        return self._devices.values()

    def _enumerate(self, answer: _DriverAnswer, end: float) -> dict[int, str]:
        """Resolves indices to devices where something may have changed.

        Returns the reasons of indices that could not be resolved and whose device is not known from before.
        """
        self._refreshes += 1
        full = (
            answer.fresh
            or answer.count != self._count
            or self._enumerate_next.is_set()
            or self._refreshes % _ENUMERATE_EVERY == 0
        )
        self._enumerate_next.clear()
        self._count = answer.count
        if full:
            self._uuid_at = {}
        open_indices = [index for index in range(answer.count) if index not in self._uuid_at]
        problems = {}
        for index, found in self._resolve(open_indices, end).items():
            if isinstance(found, Absent):
                problems[index] = found.reason
            else:
                self._uuid_at[index] = found.uuid
                self._adopt(found)
        if full and not problems:
            listed = set(self._uuid_at.values())
            for device in self._devices.values():
                if device.uuid not in listed:
                    device.handle = None
        explained = {device.index for device in self._devices.values() if device.uuid not in self._uuid_at.values()}
        return {index: reason for index, reason in problems.items() if index not in explained}

    def _resolve(self, indices: list[int], end: float) -> dict[int, Maybe[Identity]]:
        """Who sits at these indices, each asked in a thread of its own; HUNG for those that do not answer in time."""
        found: dict[int, Maybe[Identity]] = {}
        attempts: dict[int, Attempt[Maybe[Identity]]] = {}
        for index in indices:
            worker = self._resolvers.setdefault(index, Worker(f"nvml-index-{index}"))
            attempt, new = worker.start(partial(self._identify, index), partial(found.__setitem__, index))
            if new:
                attempts[index] = attempt
        for attempt in attempts.values():
            if not attempt.wait(end):
                attempt.give_up()
        for index in indices:
            found.setdefault(index, HUNG)
            if index in attempts and attempts[index].returned:
                self._resolvers.pop(index).stop()
        return found

    def _identify(self, index: int) -> Maybe[Identity]:
        with self._gate.inside() as inside:
            if not inside:
                return Absent("UNINITIALIZED")
            handle = self._nvml.call("nvmlDeviceGetHandleByIndex_v2", pynvml.nvmlDeviceGetHandleByIndex, index)
            if isinstance(handle, Absent):
                return handle
            uuid = self._nvml.text("nvmlDeviceGetUUID", pynvml.nvmlDeviceGetUUID, handle)
            if isinstance(uuid, Absent):
                return uuid
            device = self._devices.get(uuid)
            if device is not None:
                return Identity(uuid, index, handle, device.name, device.pci_bus_id)
            name = self._nvml.text("nvmlDeviceGetName", pynvml.nvmlDeviceGetName, handle)
            pci = self._nvml.call("nvmlDeviceGetPciInfo_v3", pynvml.nvmlDeviceGetPciInfo, handle)
            return Identity(
                uuid,
                index,
                handle,
                "" if isinstance(name, Absent) else name,
                pci if isinstance(pci, Absent) else _text(pci.busId),
            )

    def _adopt(self, identity: Identity) -> None:
        device = self._devices.get(identity.uuid)
        if device is not None:
            device.index = identity.index
            if device.handle is None or address(device.handle) != address(identity.handle):
                device.handle = identity.handle
            return
        for other in list(self._devices.values()):
            if other.pci_bus_id == identity.pci_bus_id and not isinstance(other.pci_bus_id, Absent):
                self._forget(other)
        self._devices = {
            **self._devices,
            identity.uuid: Device(
                self._nvml,
                identity,
                process_every=self._process_every,
                collect_health=self._collect_health,
                host_memory=self._host_memory,
                clock=self._clock,
            ),
        }
        self._workers = {**self._workers, identity.uuid: Worker(f"nvml-gpu-{identity.index}")}
        log.info("gpu_found", gpu=identity.uuid, index=identity.index, name=identity.name)

    def _forget(self, device: Device) -> None:
        """Another device sits in this one's PCI slot: it was replaced."""
        self._devices = {uuid: other for uuid, other in self._devices.items() if uuid != device.uuid}
        workers = dict(self._workers)
        workers.pop(device.uuid).stop()
        self._workers = workers
        self._failures.pop(device.uuid, None)
        self._publish(TargetRemoved(self._clock(), "nvml", device.uuid))
        log.warning("gpu_replaced", gpu=device.uuid, pci_bus_id=device.pci_bus_id)

    # --- polls -----------------------------------------------------------------------------------------------------

    def _poll(self, devices: Iterable[Device]) -> None:
        if self._closed:
            return
        end = time.monotonic() + self._deadline
        attempts = []
        for device in devices:
            worker = self._workers.get(device.uuid)
            if worker is None:
                continue
            attempt, new = worker.start(partial(self._read, device), partial(self._deliver, device))
            if new or not attempt.given_up:
                attempts.append((device, worker, attempt))
            else:
                self._report_hung(device, worker, attempt)
        for device, worker, attempt in attempts:
            if not attempt.wait(end) and attempt.give_up():
                self._report_hung(device, worker, attempt)

    def _read(self, device: Device) -> GpuPoll | None:
        """A poll, in the device's thread; None while the driver is given back on request."""
        with self._gate.inside() as inside:
            if inside:
                return device.poll()
        return None if self.released else device.describe(self._down, self._down, seconds=0.0)

    def _deliver(self, device: Device, poll: GpuPoll | None) -> None:
        if poll is None:
            return
        error = device.failure_of(poll)
        reason = poll.memory.reason if isinstance(poll.memory, Absent) else ""
        if error and error != self._failures.get(device.uuid):
            if reason in GONE:
                self._enumerate_next.set()
            if reason == "UNINITIALIZED" and self._gate.is_open:
                self._initialise_next.set()
        self._publish_poll(poll, error, error)

    def _report_hung(self, device: Device, worker: Worker[GpuPoll | None], attempt: Attempt[GpuPoll | None]) -> None:
        device.read_all_next()
        self._publish_poll(device.describe(HUNG, HUNG, seconds=attempt.age), self._hanging(worker), "hung")

    def _publish_poll(self, poll: GpuPoll, error: str, problem: str) -> None:
        self._publish(poll)
        self._publish(SourceRun(poll.t, "nvml", poll.uuid, not error, poll.seconds, error))
        before = self._failures.get(poll.uuid, "")
        self._failures[poll.uuid] = problem
        if problem and problem != before:
            log.warning("gpu_poll_failed", gpu=poll.uuid, index=poll.index, error=error)
        elif before and not problem:
            log.info("gpu_poll_recovered", gpu=poll.uuid, index=poll.index, before=before)


def _host_memory() -> tuple[int, int]:
    memory = psutil.virtual_memory()
    return memory.total, memory.available


def _sentence(running: tuple[str, float] | None) -> str:
    if running is None:
        return "a driver call has not returned in time"
    function, seconds = running
    return f"{function} has not returned for {seconds:.0f} s"


def _text(value: bytes | str) -> str:
    return value.decode("ascii", "replace") if isinstance(value, bytes) else value


def _discard(_: object) -> None:
    pass
