"""Xid events."""

from __future__ import annotations

import pynvml
import pytest
from structlog.testing import capture_logs

from oomwatch.observations import XidEvent
from oomwatch.sources.nvml import events
from tests.nvml_sim import Family
from tests.sources.nvml.conftest import Watch


def test_an_xid_is_published_with_its_device(watch: Watch) -> None:
    watched = watch(2, clock=lambda: 99.0)
    watched.sim.wait_calls(Family.EVENT_WAIT, 1)
    watched.sim.xid(1, 79)
    watched.sim.xid(0, 31)
    assert watched.seen.wait(XidEvent, 2) == [
        XidEvent(99.0, watched.uuid(1), 79),
        XidEvent(99.0, watched.uuid(0), 31),
    ]


def test_a_device_that_appears_later_is_listened_to(watch: Watch) -> None:
    watched = watch(1, deadline=0.5)
    slot = watched.sim.add_gpu()
    watched.cycle()
    watched.sim.wait_calls(Family.EVENTS, 1, device=slot)
    watched.sim.xid(slot, 48)
    assert [event.uuid for event in watched.seen.wait(XidEvent)] == [watched.uuid(slot)]


@pytest.mark.parametrize("code", [pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_UNKNOWN])
def test_a_device_that_cannot_be_registered_leaves_the_others(watch: Watch, code: int) -> None:
    watched = watch(2, deadline=0.5, start=False)
    watched.sim.fail(Family.EVENTS, code, 0)
    watched.cycle()
    watched.sim.wait_calls(Family.EVENT_WAIT, 3)
    assert watched.sim.calls(Family.EVENTS, 0) == 1, "it is remembered"
    watched.sim.xid(1, 13)
    assert [event.code for event in watched.seen.wait(XidEvent)] == [13]


def test_events_that_are_not_supported_at_all_are_asked_for_once(watch: Watch) -> None:
    watched = watch(1, deadline=0.5, start=False)
    watched.sim.fail(Family.EVENTS, pynvml.NVML_ERROR_NOT_SUPPORTED)
    watched.cycle(3)
    watched.sim.wait_calls(Family.EVENTS, 1)
    watched.source.release()
    assert watched.seen.driver().state == "released"
    assert watched.sim.calls(Family.EVENTS) == 1
    assert watched.sim.calls(Family.EVENT_WAIT) == 0


@pytest.fixture
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "_RETRY_AFTER", 0.01)
    monkeypatch.setattr(events, "_PAUSE", 0.01)


@pytest.mark.usefixtures("quick_retries")
def test_an_unknown_error_of_the_event_set_is_tried_again(watch: Watch) -> None:
    watched = watch(1, deadline=0.5, start=False)
    watched.sim.fail(Family.EVENTS, pynvml.NVML_ERROR_UNKNOWN, times=1)
    watched.cycle()
    watched.sim.wait_calls(Family.EVENT_WAIT, 1)
    watched.sim.xid(0, 79)
    assert [event.code for event in watched.seen.wait(XidEvent)] == [79]


@pytest.mark.usefixtures("quick_retries")
def test_an_unknown_error_of_a_registration_is_tried_again(watch: Watch) -> None:
    watched = watch(2, deadline=0.1, start=False)
    watched.sim.fail(Family.EVENTS, pynvml.NVML_ERROR_UNKNOWN, 0, times=1)
    watched.cycle()
    watched.sim.wait_calls(Family.EVENTS, 2, device=0)
    watched.sim.wait_calls(Family.EVENT_WAIT, 1, since=watched.sim.mark())
    watched.sim.xid(0, 79)
    assert [event.uuid for event in watched.seen.wait(XidEvent)] == [watched.uuid(0)]


@pytest.mark.usefixtures("quick_retries")
@pytest.mark.parametrize(("device", "gpu"), [(None, "all"), (0, "GPU-00000000-0000-4000-8000-000000000000")])
def test_what_lasts_is_logged_once(watch: Watch, device: int | None, gpu: str) -> None:
    watched = watch(1, deadline=0.1, start=False)
    watched.sim.fail(Family.EVENTS, pynvml.NVML_ERROR_UNKNOWN, device)
    with capture_logs() as lines:
        watched.cycle()
        watched.sim.wait_calls(Family.EVENTS, 3, device=device)
    told = [line for line in lines if line["event"] == "xid_events_unavailable"]
    assert [(line["gpu"], line["error"]) for line in told] == [(gpu, "UNKNOWN")]


def test_events_that_are_not_supported_at_all_are_logged(watch: Watch) -> None:
    watched = watch(1, deadline=0.5, start=False)
    watched.sim.fail(Family.EVENTS, pynvml.NVML_ERROR_NOT_SUPPORTED)
    with capture_logs() as lines:
        watched.cycle()
        watched.sim.wait_calls(Family.EVENTS, 1)
        watched.source.release()
    told = [line for line in lines if line["event"] == "xid_events_unavailable"]
    assert [(line["gpu"], line["error"]) for line in told] == [("all", "NOT_SUPPORTED")]


def test_waiting_for_events_of_a_lost_device_does_not_spin(watch: Watch) -> None:
    watched = watch(1, deadline=0.5)
    watched.sim.wait_calls(Family.EVENT_WAIT, 1)
    watched.sim.fail(Family.EVENT_WAIT, pynvml.NVML_ERROR_GPU_IS_LOST)
    watched.sim.wait_calls(Family.EVENT_WAIT, 3)
    mark = watched.sim.mark()
    watched.sim.wait_calls(Family.EVENT_WAIT, 1, since=mark)
    watched.sim.clear(Family.EVENT_WAIT)
    watched.sim.xid(0, 79)
    assert [event.code for event in watched.seen.wait(XidEvent)] == [79]
    stats = watched.source.call_stats()["nvmlEventSetWait_v2"]
    assert 1 <= stats.errors["GPU_IS_LOST"] <= 6


def test_silence_is_no_error(watch: Watch) -> None:
    watched = watch(1, deadline=0.1)
    watched.sim.wait_calls(Family.EVENT_WAIT, 4)
    assert watched.source.call_stats()["nvmlEventSetWait_v2"].errors == {}
