"""The end of a process is told when it comes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from oomwatch.sources.ends import Ends
from tests.e2e.processes import wait_until


@pytest.fixture
def told() -> list[int]:
    return []


@pytest.fixture
def ends(told: list[int]) -> Iterator[Ends]:
    watching = Ends(told.append)
    yield watching
    watching.close()


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as started:
        yield started
        started.kill()


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_it_is_told_once(ends: Ends, told: list[int], process: subprocess.Popen[bytes]) -> None:
    ends.watch([process.pid])
    process.kill()
    wait_until(lambda: bool(told), 5, "the end is told")
    process.wait(5)
    assert told == [process.pid]


def test_one_that_is_added_later_is_watched_as_well(ends: Ends, told: list[int]) -> None:
    ends.watch([os.getpid()])
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as later:
        ends.watch([os.getpid(), later.pid])
        later.kill()
        wait_until(lambda: told == [later.pid], 5, "the end is told")


def test_one_that_is_watched_no_more_is_not_told(ends: Ends, told: list[int], process: subprocess.Popen[bytes]) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        ends.watch([process.pid, other.pid])
        ends.watch([other.pid])
        process.kill()
        process.wait(5)
        other.kill()
        wait_until(lambda: bool(told), 5, "the other's end is told")
        assert told == [other.pid]


def test_one_that_is_not_there_is_left_to_the_polls(ends: Ends, told: list[int]) -> None:
    ends.watch([2**22 + 1])
    assert told == []


def test_nothing_stays_open(process: subprocess.Popen[bytes]) -> None:
    before = descriptors()
    watching = Ends(lambda _: None)
    watching.watch([process.pid, os.getpid()])
    watching.close()
    wait_until(lambda: descriptors() == before, 5, "all is closed")
    watching.close()
    watching.watch([process.pid])
    assert descriptors() == before
