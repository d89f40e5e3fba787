"""Which killer an out-of-memory error names by its numbers. Its text always advises against fragmentation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from oomwatch.enginelog.events import OutOfMemory

How = Literal["too_little", "in_pieces", "race", "unknown"]

_LARGE = 1 << 30
_MIB = 1 << 20


@dataclass(frozen=True)
class Cause:
    """``killer`` as in the catalogue of verdicts, and the numbers that say so.

    ``how``: ``too_little`` where free and reserve together are less than what was wanted, ``in_pieces`` where they
    would have been enough, ``race`` where more was free than wanted (somebody else took it for a moment, or sizes were
    rounded), ``unknown`` where the error has no numbers. ``strength`` is (free + reserve) / wanted; ``missing`` bytes
    that were short of what was wanted, not below 0. ``confidence`` 0-1.
    """

    killer: Literal["capacity", "fragmentation"]
    how: How
    confidence: float
    strength: float | None = None
    missing: int | None = None


def cause_of(error: OutOfMemory) -> Cause:
    """The killer that the numbers of an error force.

    PyTorch gives back its cached blocks and tries again before it raises (c10/cuda/CUDACachingAllocator.cpp): what is
    still reserved and unallocated is in pieces of segments in use, so it counts only where all of it would have been
    enough.
    """
    wanted, free, reserved = error.wanted, error.free, error.reserved
    if wanted is None or free is None or wanted <= 0:
        return Cause("capacity", "unknown", 0.5)
    doubt = _rounding(wanted) + _rounding(free) + _rounding(reserved or 0)
    if free >= wanted:
        return Cause("capacity", "race", 0.4, (free + (reserved or 0)) / wanted, 0)
    missing = wanted - free
    if reserved is None:
        return Cause("capacity", "too_little", 0.6, free / wanted, missing)
    strength = (free + reserved) / wanted
    margin = abs(free + reserved - wanted)
    if free + reserved < wanted:
        return Cause("capacity", "too_little", 0.95 if margin > doubt else 0.6, strength, missing)
    # More of a reserve than was missing makes it likelier that only its pieces were too small.
    sure = 0.5 if margin <= doubt else 0.7 if strength < 1.2 else 0.85
    return Cause("fragmentation", "in_pieces", sure, strength, missing)


def _rounding(size: int) -> int:
    """Half of the last digit that a size was printed with: two decimals of GiB, MiB or KiB."""
    unit = _LARGE if size >= _LARGE else _MIB
    return unit // 200
