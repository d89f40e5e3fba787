"""Loads that change from one minute to the next: ``python -m benchmarks.detection.shifts``.

Healthy engines, with the clients of the set for tuning, to which at once much longer prompts or answers come, all of
them or one in ten; as long as the engine's longest at most, so that many more requests wait than before. No set has
such runs. What ``kv-block-leak`` says of them is wrong.
"""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import product
from typing import NamedTuple

import numpy as np

from benchmarks.detection import sets
from benchmarks.detection.families import draw
from benchmarks.detection.ours import detect
from benchmarks.detection.render import observations
from benchmarks.detection.spec import DAY, Workload
from benchmarks.detection.traffic import TRACES, traces_in
from benchmarks.detection.world import build

FAMILIES = ("diurnal", "always_busy", "bursts", "idle_nights")
DRAWS = range(3)
AT = 1.5 * DAY
LONGEST_PROMPT, LONGEST_ANSWER = 9000, 6000  # together below the 16,384 tokens that these engines take


class Shift(NamedTuple):
    """By how much lengths grow at once, for which share of the requests."""

    name: str
    prompt: int
    answer: int
    share: float = 1.0

    def of(self, before: Workload) -> Workload:
        later = (before.arrival > AT) & (np.random.default_rng(7).random(len(before)) < self.share)
        return replace(
            before,
            prompt=np.where(later, np.minimum(before.prompt * self.prompt, LONGEST_PROMPT), before.prompt),
            output=np.where(later, np.minimum(before.output * self.answer, LONGEST_ANSWER), before.output),
        )


SHIFTS = (
    Shift("answers 8 times as long", 1, 8),
    Shift("prompts 10 times as long", 10, 1),
    Shift("both 6 times as long", 6, 6),
    Shift("one answer in ten 30 times as long", 1, 30, 0.1),
    Shift("one prompt in ten 30 times as long", 30, 1, 0.1),
)


def worst(run: tuple[str, int, Shift]) -> str:
    """The worst state of ``kv-block-leak`` in a run: clear, ticket or page."""
    family, number, shift = run
    scenario = draw(family, sets.load()["tune"].spec, number)._replace(days=2.5, ranks=1)
    built = build(scenario, traces_in(TRACES), shift.of)
    assert built is not None
    changes = detect(observations(built, lengths=False, ticks=4, devices=False, host=False), {"kv-block-leak"})
    states = {state for _, _, state, _ in changes}
    return next((state for state in ("page", "ticket") if state in states), "clear")


def main() -> None:
    runs = list(product(FAMILIES, DRAWS, SHIFTS))
    with ProcessPoolExecutor(2) as workers:
        found = Counter(zip((shift for *_, shift in runs), workers.map(worst, runs), strict=True))
    for shift in SHIFTS:
        of_all = sum(found[shift, state] for state in ("clear", "ticket", "page"))
        print(f"{shift.name}: {found[shift, 'ticket']} tickets and {found[shift, 'page']} pages in {of_all} runs")


if __name__ == "__main__":
    main()
