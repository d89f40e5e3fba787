"""The numbers of an out-of-memory error decide its killer; its text has no say."""

import pytest

from oomwatch.enginelog.events import OutOfMemory
from oomwatch.enginelog.killer import cause_of

MIB = 1 << 20
GIB = 1 << 30


@pytest.mark.parametrize(
    ("wanted", "free", "reserved", "killer", "how", "strength"),
    [
        (384.0, 329.87, 402.27, "fragmentation", "in_pieces", 1.9),
        (1925.12, 1320.96, 1351.68, "fragmentation", "in_pieces", 1.39),
        (524.0, 137.12, 121.0, "capacity", "too_little", 0.49),
        (304.0, 218.81, 41.55, "capacity", "too_little", 0.86),
        (256.0, 300.0, 10.0, "capacity", "race", 1.21),
        (256.0, 256.0, 0.0, "capacity", "race", 1.0),
    ],
)
def test_free_and_reserve_against_what_was_wanted(
    wanted: float, free: float, reserved: float, killer: str, how: str, strength: float
) -> None:
    cause = cause_of(OutOfMemory(int(wanted * MIB), int(free * MIB), 24 * GIB, reserved=int(reserved * MIB)))
    assert (cause.killer, cause.how) == (killer, how)
    assert cause.strength == pytest.approx(strength, abs=0.01)
    assert cause.missing == max(0, int(wanted * MIB) - int(free * MIB))


def test_within_the_rounding_of_the_sentence_it_is_less_sure() -> None:
    def sure(reserved: int) -> float:
        return cause_of(OutOfMemory(4 * GIB, 3 * GIB, reserved=reserved)).confidence

    assert sure(GIB - 100 * MIB) == 0.95
    assert sure(GIB - 4 * MIB) < 0.7
    assert sure(GIB + 4 * MIB) < 0.7
    assert sure(3 * GIB) == 0.85


@pytest.mark.parametrize("error", [OutOfMemory(), OutOfMemory(dummy_requests=1024), OutOfMemory(wanted=GIB)])
def test_without_numbers_fragmentation_is_never_claimed(error: OutOfMemory) -> None:
    assert (cause_of(error).killer, cause_of(error).how) == ("capacity", "unknown")


def test_without_the_reserve_it_is_capacity_with_doubt() -> None:
    cause = cause_of(OutOfMemory(wanted=GIB, free=MIB))
    assert (cause.killer, cause.how) == ("capacity", "too_little")
    assert cause.confidence < 0.7
