"""The fragmentation killer, measured: memory that the allocator has, in pieces too small for what is asked for."""

from __future__ import annotations

import math
from collections import deque

from pydantic import Field

from oomwatch import units
from oomwatch.detectors.base import (
    AllocatorSample,
    Evidence,
    Finding,
    Sample,
    State,
    Subject,
    unknown,
)
from oomwatch.detectors.standing import Freshness, Standing
from oomwatch.observations import AllocatorReport
from oomwatch.settings import Duration, Section, Size

MIB = 1 << 20
HOUR = 3600.0


def unallocated(report: AllocatorReport) -> int | None:
    """Bytes that are reserved and free in pools that any allocation may use.

    Without the allocator's snapshot these are the reserved bytes less the allocated ones, as PyTorch's own error
    counts them, and less what private pools hold where that is known.
    """
    if report.free is not None:
        return report.free
    reserved, allocated = report.current("reserved_bytes"), report.current("allocated_bytes")
    if reserved is None or allocated is None:
        return None
    return max(0, reserved - allocated - (report.private_free or 0))


class AllocatorFragmentationSettings(Section):
    """When the free memory of an allocator counts as fragmented."""

    warm_up: Duration = Field(
        600.0, ge=0, description="Retries and sizes so soon after the engine first answered do not count."
    )
    retry_window: Duration = Field(900.0, gt=0, description="Width of the windows in which retries are looked for.")
    retry_windows: int = Field(
        2, ge=1, le=3, description="In how many of the last three windows retries have to occur."
    )
    least_transient: Size = Field(
        64 * MIB, ge=0, description="A largest transient below this is not worth a shortage of blocks."
    )
    shortage_time: Duration = Field(
        900.0, gt=0, description="How long no block may be large enough for the largest transient."
    )
    page_hold: Duration = Field(900.0, ge=0, description="How long a page stands after its condition ended.")
    ticket_hold: Duration = Field(HOUR, ge=0, description="How long a ticket stands after its condition ended.")


_WINDOWS = 3


class _Retries:
    """Allocations that succeeded only after the cache was given back to the driver, by windows of time."""

    def __init__(self, width: float) -> None:
        self._width = width
        self._last: tuple[int, int] | None = None
        self._windows: deque[int] = deque(maxlen=_WINDOWS)
        self.counted = 0

    def add(self, t: float, retries: int | None, failures: int, *, counts: bool) -> None:
        """Take in the counters. A retry that failed all the same is a lack of memory, whatever its kind."""
        if retries is None:
            return
        last, self._last = self._last, (retries, failures)
        if last is None or retries < last[0] or not counts:
            return
        solved = (retries - last[0]) - max(0, failures - last[1])
        if solved <= 0:
            return
        self.counted += solved
        window = math.floor(t / self._width)
        if not self._windows or self._windows[-1] != window:
            self._windows.append(window)

    def windows(self, t: float) -> int:
        """In how many of the last three windows there were any."""
        now = math.floor(t / self._width)
        return sum(now - window < _WINDOWS for window in self._windows)


class _Transient:
    """The largest single allocation that comes and goes, as far as can be told, in bytes.

    What was free in one piece was once asked for in one piece, or grew together from what was; and one allocation is
    never more than the peak of all of them rises above their floor, where the peak is told. The smaller of both bounds
    it; what a failed allocation asked for is exact.
    """

    def __init__(self) -> None:
        self._largest_free: int | None = None
        self._least_allocated: int | None = None
        self._peak: int | None = None
        self._asked = 0

    def add(self, report: AllocatorReport) -> None:
        allocated, peak = report.current("allocated_bytes"), report.stats.get("allocated_bytes.all.peak")
        if allocated is not None:
            least = self._least_allocated
            self._least_allocated = allocated if least is None else min(allocated, least)
        if peak is not None:
            self._peak = max(peak, self._peak or 0)
        if report.largest_free_block is not None:
            self._largest_free = max(report.largest_free_block, self._largest_free or 0)

    def asked(self, size: int) -> None:
        self._asked = max(self._asked, size)

    @property
    def bytes(self) -> int | None:
        most = self._largest_free
        if most is not None and self._peak is not None and self._least_allocated is not None:
            most = min(most, max(0, self._peak - self._least_allocated))
        return self._asked or None if most is None else max(self._asked, most)


class AllocatorFragmentation:
    """An allocator that has enough free memory, and not in one piece. Only the probe inside the process can tell.

    Slack is no fragmentation: free blocks that are used again and again are how a caching allocator works. Two things
    are: retries, by which PyTorch gives its whole cache back to the driver because no piece fitted, again and again;
    and a largest transient for which neither a free block nor the driver's free memory is large enough, while all free
    blocks together would be. Both at once page. About 1 KB per process.
    """

    verdict = "allocator-fragmentation"

    def __init__(self, subject: Subject, settings: AllocatorFragmentationSettings) -> None:
        self.subject = subject
        self.settings = settings
        self._standing = Standing(settings.page_hold, settings.ticket_hold)
        self._freshness = Freshness()
        self._life: int | None = None
        self._begin()

    def _begin(self) -> None:
        self._standing.reset()
        self._retries = _Retries(self.settings.retry_window)
        self._transient = _Transient()
        self._short_since: float | None = None
        self._short_last = 0.0
        self._ready = False
        self._sample: AllocatorSample | None = None

    def observe(self, sample: Sample) -> None:
        """Takes in what the allocator tells; everything else tells it nothing."""
        if not isinstance(sample, AllocatorSample):
            return
        if sample.life != self._life:
            self._begin()
            self._life = sample.life
        self._freshness.seen(sample.t)
        self._sample = sample
        report, ready = sample.report, sample.ready_since
        self._ready = ready is not None and sample.t - ready >= self.settings.warm_up and not sample.asleep
        self._retries.add(
            sample.t, report.stats.get("num_alloc_retries"), report.stats.get("num_ooms", 0), counts=self._ready
        )
        if not self._ready:
            return
        self._transient.add(report)
        failure = report.failure
        if failure is not None and failure.wanted is not None and failure.t >= sample.life_start:
            self._transient.asked(failure.wanted)
        self._compare(sample)

    def _compare(self, sample: AllocatorSample) -> None:
        """Whether the largest transient would fit now. While it is in use itself, that cannot be told."""
        wanted, reach, free = self._transient.bytes, self._reach(sample), unallocated(sample.report)
        if wanted is None or reach is None or free is None:
            return
        if wanted < self.settings.least_transient or reach >= wanted:
            self._short_since = None
        elif free >= wanted:
            if self._short_since is None:
                self._short_since = sample.t
            self._short_last = sample.t

    @staticmethod
    def _reach(sample: AllocatorSample) -> int | None:
        """The largest allocation that would succeed now.

        The block at the end of an expandable segment grows by what the driver has. Without such segments an allocation
        is served by one free block, or by the driver alone, once the allocator gave back what lies in segments that are
        wholly free (c10/cuda/CUDACachingAllocator.cpp); where that is not known, both together are the kinder number.
        """
        report, memory = sample.report, sample.memory
        largest = report.largest_free_block
        if largest is None or memory is None:
            return None
        if report.expandable is not False or report.releasable is None:
            return largest + memory.free
        return min(largest + memory.free, max(largest, memory.free + report.releasable))

    def conclude(self, t: float) -> Finding:
        """What stands at ``t``."""
        sample = self._sample
        if sample is None:
            return unknown("no probe inside this process")
        if self._freshness.stale(t):
            return unknown("the probe inside this process is silent")
        return self._standing.settle(t, self._now(t, sample))

    def _now(self, t: float, sample: AllocatorSample) -> Finding:
        report, evidence = sample.report, self._evidence(t, sample)
        if not report.current("reserved_bytes"):
            return unknown("the allocator tells nothing of its blocks")
        if sample.asleep:
            return unknown("asleep", evidence)
        if not self._ready:
            return unknown("warming up", evidence)
        repeated = self._retries.windows(t) >= self.settings.retry_windows
        short = self._short_for >= self.settings.shortage_time >= t - self._short_last
        if not repeated and not short:
            return Finding("clear", 0.9 if self._transient.bytes is not None else 0.6, "", evidence)
        state: State = "page" if repeated and short else "ticket"
        return Finding(state, 0.95 if state == "page" else 0.8, self._summary(sample, repeated, short), evidence)

    @property
    def _short_for(self) -> float:
        return 0.0 if self._short_since is None else self._short_last - self._short_since

    def _summary(self, sample: AllocatorSample, repeated: bool, short: bool) -> str:
        free = unallocated(sample.report)
        said = []
        if repeated:
            said.append(
                f"PyTorch gave its cache back {units.count(self._retries.counted)} times since the warm-up, because no "
                "free block was large enough"
            )
        wanted, reach = self._transient.bytes, self._reach(sample)
        if short and free is not None and wanted is not None and reach is not None:
            said.append(
                f"{units.size(free)} are reserved and free, and not in one piece: at most {units.size(reach)} can be "
                f"had at once, and up to {units.size(wanted)} are asked for"
            )
        return "; ".join(said) + "."

    def _evidence(self, t: float, sample: AllocatorSample) -> Evidence:
        report = sample.report
        found = {
            "allocated_bytes": report.current("allocated_bytes"),
            "reserved_bytes": report.current("reserved_bytes"),
            "unallocated_bytes": unallocated(report),
            "unreleasable_bytes": report.current("inactive_split_bytes"),
            "releasable_bytes": report.releasable,
            "largest_free_block_bytes": report.largest_free_block,
            "driver_free_bytes": sample.memory.free if sample.memory else None,
            "reach_bytes": self._reach(sample),
            "largest_transient_bytes": self._transient.bytes,
            "retries": self._retries.counted,
            "windows_with_retries": self._retries.windows(t),
            "short_seconds": self._short_for,
        }
        return {name: value for name, value in found.items() if value is not None}
