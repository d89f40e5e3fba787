"""Exact bounds for shares and rates, two-sided, 95 % unless said."""

from __future__ import annotations

import math
from collections.abc import Callable


def clopper_pearson(hits: int, of: int, confidence: float = 0.95) -> tuple[float, float]:
    """Bounds of a probability of which ``hits`` of ``of`` trials came true."""
    tail = (1 - confidence) / 2
    low = 0.0 if hits == 0 else _root(lambda p: 1 - _binomial_cdf(hits - 1, of, p) - tail, 0.0, 1.0)
    high = 1.0 if hits == of else _root(lambda p: tail - _binomial_cdf(hits, of, p), 0.0, 1.0)
    return low, high


def poisson_rate(events: int, exposure: float, confidence: float = 0.95) -> tuple[float, float]:
    """Bounds of a rate at which ``events`` happened within ``exposure``."""
    tail = (1 - confidence) / 2
    most = 10 * (events + 5.0)
    low = 0.0 if events == 0 else _root(lambda m: 1 - _poisson_cdf(events - 1, m) - tail, 0.0, most)
    high = _root(lambda m: tail - _poisson_cdf(events, m), 0.0, most)
    return low / exposure, high / exposure


def quantile(values: list[float], q: float) -> float:
    """Linear between the two nearest; NaN of nothing."""
    if not values:
        return math.nan
    ordered = sorted(values)
    at = q * (len(ordered) - 1)
    below = math.floor(at)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (at - below)


def _root(rising: Callable[[float], float], low: float, high: float) -> float:
    for _ in range(80):
        middle = (low + high) / 2
        if rising(middle) < 0:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _binomial_cdf(k: int, n: int, p: float) -> float:
    if p <= 0:
        return 1.0
    if p >= 1:
        return 0.0 if k < n else 1.0
    whole = math.lgamma(n + 1)
    terms = (
        whole - math.lgamma(i + 1) - math.lgamma(n - i + 1) + i * math.log(p) + (n - i) * math.log1p(-p)
        for i in range(k + 1)
    )
    return min(1.0, math.fsum(math.exp(term) for term in terms))


def _poisson_cdf(k: int, mean: float) -> float:
    if mean <= 0:
        return 1.0
    return min(1.0, math.fsum(math.exp(i * math.log(mean) - mean - math.lgamma(i + 1)) for i in range(k + 1)))
