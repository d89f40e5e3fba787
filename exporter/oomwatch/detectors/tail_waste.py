"""Fragmentation inside the KV pool: the unused tails of each running sequence's last block.

External fragmentation does not exist there: any free block serves any request.
"""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import Field

from oomwatch import units
from oomwatch.detectors.base import Finding, RankSample, Sample, Subject, unknown
from oomwatch.detectors.standing import NO_PAGE, Freshness, Standing, Sustained
from oomwatch.observations import NOT_KNOWN, Absent, Maybe, RankReading, known
from oomwatch.settings import Duration, Section

HYBRID = Absent("HYBRID")  # layers of several kinds share the pool: a block is no fixed number of tokens


@dataclass(frozen=True)
class TailWaste:
    """Wasted share of the used KV memory (0-1): the estimate, its 95 % bounds, and the most that is possible.

    ``assumed`` when the page does not tell whether the model is a hybrid one, and it is taken for none.
    """

    share: float
    low: float
    high: float
    most: float
    assumed: bool


def tail_waste(reading: RankReading, least_running: int = 4) -> Maybe[TailWaste]:
    """What the last blocks of running sequences waste: R(B-1)/(2BU), within [0, R(B-1)/(BU)].

    R running sequences, B tokens a block, U blocks in use. The unused part of a last block is uniform over 0 to B-1
    tokens for lengths that spread over more than a block: mean (B-1)/2, variance (B²-1)/12. Absent where an input is
    missing, below ``least_running`` sequences (the estimate would be noise), and for hybrid models.
    """
    running, used, size = known(reading.running), known(reading.pool.used), known(reading.pool.block_size)
    blocks, tokens = known(reading.pool.blocks), known(reading.pool.tokens)
    if running is None or not used or not size or running < least_running:
        return NOT_KNOWN
    # kv_cache_size_tokens counts the null block too.
    if tokens is not None and blocks is not None and tokens not in (blocks * size, (blocks + 1) * size):
        return HYBRID
    in_use = float(used * size)
    mean = running * (size - 1) / 2
    spread = 1.96 * (running * (size**2 - 1) / 12) ** 0.5
    most = min(1.0, running * (size - 1) / in_use)
    return TailWaste(
        share=min(most, mean / in_use),
        low=max(0.0, (mean - spread) / in_use),
        high=min(most, (mean + spread) / in_use),
        most=most,
        assumed=tokens is None,
    )


class KvTailWasteSettings(Section):
    """When the waste of half-filled blocks is worth a word."""

    share: float = Field(default=0.1, gt=0, lt=1, description="Above this share of the used pool it counts.")
    after: Duration = Field(default=3600.0, ge=1, le=86400, description="For this long: ticket.")
    info_after: Duration = Field(default=300.0, ge=0, le=86400, description="For this long: info.")
    least_running: int = Field(
        default=4,
        ge=1,
        le=1000,
        description="With fewer running sequences there is no estimate, for it would be noise.",
    )
    hold: Duration = Field(default=3600.0, ge=0, le=86400, description="How long a ticket outlasts its cause.")


class KvTailWaste:
    """The block size is large for the lengths that are served. It is small, and it never pages. About 8 kB a rank."""

    verdict = "kv-tail-waste"

    def __init__(self, subject: Subject, settings: KvTailWasteSettings) -> None:
        self.subject = subject
        self.settings = settings
        self._fresh = Freshness()
        self._standing = Standing(settings.hold, settings.hold)
        self._segment = -1
        self._wasteful = Sustained(forgive_s=300.0)  # a moment with few sequences is no end of it
        self._waste: Maybe[TailWaste] = NOT_KNOWN
        self._reading: RankReading | None = None

    def observe(self, sample: Sample) -> None:
        if not isinstance(sample, RankSample):
            return
        if sample.segment != self._segment:
            self._segment = sample.segment
            self._wasteful.reset()
            self._standing.reset()
        self._fresh.seen(sample.t)
        self._reading = sample.reading
        self._waste = tail_waste(sample.reading, self.settings.least_running)
        wasteful = isinstance(self._waste, TailWaste) and self._waste.share > self.settings.share
        self._wasteful.update(sample.t, wasteful)

    def conclude(self, t: float) -> Finding:
        now = NO_PAGE if self._fresh.stale(t) else self._now()
        return self._standing.settle(t, now)

    def _now(self) -> Finding:
        reading, waste = self._reading, self._waste
        if reading is None:
            return NO_PAGE
        if waste == HYBRID:
            return unknown("a hybrid model: a block holds no fixed number of tokens")
        if isinstance(waste, Absent):
            return self._without_estimate(reading)
        evidence = {
            "waste_share": waste.share,
            "waste_low": waste.low,
            "waste_high": waste.high,
            "waste_most": waste.most,
            "running": known(reading.running) or 0.0,
            "used_blocks": known(reading.pool.used) or 0,
            "block_size": known(reading.pool.block_size) or 0,
            "wasteful_seconds": self._wasteful.seconds,
        }
        if waste.share <= self.settings.share or self._wasteful.seconds < self.settings.info_after:
            return Finding("clear", evidence=evidence)
        summary = (
            f"Unused ends of last blocks waste {units.ratio(waste.share)} of the used KV pool (between "
            f"{units.ratio(waste.low)} and {units.ratio(waste.high)}) for {units.duration(self._wasteful.seconds)}: "
            f"blocks of {units.count(evidence['block_size'])} tokens are large for these lengths."
        )
        if waste.assumed:
            return Finding("info", 0.4, f"{summary} This holds unless the model is a hybrid one.", evidence)
        return Finding("ticket" if self._wasteful.seconds >= self.settings.after else "info", 0.9, summary, evidence)

    def _without_estimate(self, reading: RankReading) -> Finding:
        if known(reading.running) is None:
            return unknown("no gauge of running requests on the page")
        if known(reading.pool.used) is None or known(reading.pool.block_size) is None:
            return unknown("the blocks in use or their size are not known")
        return unknown("too few sequences run for an estimate")
