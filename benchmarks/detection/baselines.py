"""The rules that the field uses today, over the sampled series of a run, as Prometheus would evaluate them.

All of them look at a share of a limit: KV blocks of the pool, a process's device memory of the card, anonymous memory
of the cgroup. Prometheus knows nothing of restarts or of why a scrape is missing, and neither do these rules; a value
counts for five minutes after its scrape.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from benchmarks.detection.alarms import Alarm, firings, merged
from benchmarks.detection.jit import jit
from benchmarks.detection.spec import DEFERRED, RUNNING, USED, WAITING, Bools, Floats
from benchmarks.detection.world import Run

LOOKBACK = 300.0
HOUR = 3600.0
DAY = 24 * HOUR
_BIN = 300.0  # of the trend tests: 72 in six hours


class Watched(NamedTuple):
    """A series: shares of a limit at the times that were scraped, and whether the engine was idle then."""

    t: Floats
    share: Floats
    idle: Bools


class Baseline(NamedTuple):
    """``classes`` are the classes of fault whose series it is applied to."""

    name: str
    condition: Callable[[Watched], Bools]
    hold: float
    classes: tuple[str, ...] = ("kv-leak", "gpu-leak", "host-leak")


def series_of(run: Run, fault: str) -> list[Watched]:
    """What the rules of a class of fault look at, one for each rank, device or process."""
    if fault == "kv-leak":
        return [_watched(run, r, rank[USED] / run.scenario.engine.blocks) for r, rank in enumerate(run.ranks)]
    if fault == "gpu-leak":
        usable = run.scenario.gpu.total - run.scenario.gpu.reserved
        return [_watched(run, r, gpu.process / usable) for r, gpu in enumerate(run.gpus)]
    return [_watched(run, 0, run.host.anon / run.scenario.host.limit)]


def _watched(run: Run, rank: int, share: Floats) -> Watched:
    seen, series = run.scraped, run.ranks[rank]
    idle = (series[RUNNING] == 0) & (series[WAITING] + series[DEFERRED] == 0)
    return Watched(run.t[seen], share[seen], idle[seen])


def alarms(run: Run) -> Mapping[tuple[str, str], list[Alarm]]:
    """Alarms by class of fault and baseline."""
    found: dict[tuple[str, str], list[Alarm]] = {}
    for fault in ("kv-leak", "gpu-leak", "host-leak"):
        for rank, watched in enumerate(series_of(run, fault)):
            if len(watched.t) < 2:
                continue
            for baseline in BASELINES:
                if fault in baseline.classes:
                    fired = firings(_gaps_closed(baseline.condition(watched), watched.t), watched.t, baseline.hold)
                    found.setdefault((fault, baseline.name), []).extend(a._replace(rank=rank) for a in fired)
    return {key: merged(of_key) for key, of_key in found.items()}


def _gaps_closed(condition: Bools, t: Floats) -> Bools:
    """A condition does not outlive its data: it breaks where nothing was scraped for longer than the lookback."""
    return condition & (np.diff(t, prepend=t[0]) <= LOOKBACK)


def least_squares(t: Floats, values: Floats, window: float) -> tuple[Floats, Floats]:
    """Slope per second, and the line's value now, over the trailing window: deriv() and predict_linear(…, 0)."""
    x = (t - t[0]) / HOUR
    begin = np.searchsorted(t, t - window)
    n = np.arange(len(t)) + 1.0 - begin

    def total(v: Floats) -> Floats:
        sums = np.concatenate([[0.0], np.cumsum(v)])
        return np.asarray(sums[1:] - sums[begin], dtype=np.float64)

    sx, sy, sxx, sxy = total(x), total(values), total(x * x), total(x * values)
    spread = n * sxx - sx * sx
    slope = np.where(spread > 1e-9, (n * sxy - sx * sy) / np.maximum(spread, 1e-9), 0.0)
    return slope / HOUR, (sy - slope * sx) / n + slope * x


def _level(threshold: float) -> Callable[[Watched], Bools]:
    return lambda watched: np.asarray(watched.share > threshold, dtype=np.bool_)


def _predicted(window: float, ahead: float, above: float = 0.0) -> Callable[[Watched], Bools]:
    """predict_linear(share[window], ahead) > 1, where ``above`` of the limit is in use already."""

    def condition(watched: Watched) -> Bools:
        slope, now = least_squares(watched.t, watched.share, window)
        enough = watched.t - watched.t[0] >= window / 2
        return np.asarray((now + slope * ahead > 1) & enough & (watched.share > above), dtype=np.bool_)

    return condition


def _rising(window: float) -> Callable[[Watched], Bools]:
    # A thousandth of a percent of the limit an hour: rounding of a constant series is no slope.
    return lambda w: np.asarray(least_squares(w.t, w.share, window)[0] > 1e-5 / HOUR, dtype=np.bool_)


def _trend(corrected: bool) -> Callable[[Watched], Bools]:
    """Mann-Kendall at 1 % over six hours, and full within a day by the Theil-Sen slope; looked at every ten minutes."""

    def condition(watched: Watched) -> Bools:
        edges = np.arange(watched.t[0], watched.t[-1] + _BIN, _BIN)
        at = np.searchsorted(watched.t, edges)
        sums = np.concatenate([[0.0], np.cumsum(watched.share)])
        count = np.diff(at)
        means = np.where(count > 0, np.diff(sums[at]) / np.maximum(count, 1), np.nan)
        firing = _trends(means, 72, 2, DAY / _BIN, corrected)
        index = np.clip(((watched.t - watched.t[0]) / _BIN).astype(np.int64) - 1, 0, len(firing) - 1)
        return np.asarray(firing[index], dtype=np.bool_)

    return condition


@jit
def _trends(means: Floats, window: int, every: int, horizon: float, corrected: bool) -> Bools:
    firing = np.zeros(len(means), dtype=np.bool_)
    values = np.empty(window)
    for end in range(window, len(means) + 1, every):
        n = 0
        for value in means[end - window : end]:
            if not np.isnan(value):
                values[n] = value
                n += 1
        if n >= window // 2 and _mann_kendall(values[:n], corrected) > 2.326:
            slope = _theil_sen(values[:n])
            fires = slope > 0 and (1 - values[n - 1]) / slope < horizon
            firing[end - 1 : end - 1 + every] = fires
    return firing


@jit
def _mann_kendall(values: Floats, corrected: bool) -> float:
    """z of the test; ``corrected`` for serial correlation after Hamed and Rao (1998)."""
    n = len(values)
    s = 0.0
    for i in range(n):
        for j in range(i + 1, n):
            s += np.sign(values[j] - values[i])
    variance = n * (n - 1) * (2 * n + 5) / 18.0
    if corrected:
        slope = _theil_sen(values)
        ranks = np.argsort(np.argsort(values - slope * np.arange(n))).astype(np.float64)
        ranks -= ranks.mean()
        power = (ranks * ranks).sum()
        factor = 0.0
        for lag in range(1, n - 2):
            rho = (ranks[lag:] * ranks[: n - lag]).sum() / power
            if abs(rho) > 1.96 / np.sqrt(n):
                factor += (n - lag) * (n - lag - 1) * (n - lag - 2) * rho
        variance *= max(0.05, 1 + 2 * factor / (n * (n - 1) * (n - 2)))
    return float((s - np.sign(s)) / np.sqrt(variance))


@jit
def _theil_sen(values: Floats) -> float:
    n = len(values)
    slopes = np.empty(n * (n - 1) // 2)
    k = 0
    for i in range(n):
        for j in range(i + 1, n):
            slopes[k] = (values[j] - values[i]) / (j - i)
            k += 1
    return float(np.median(slopes))


def _idle_and_used(watched: Watched) -> Bools:
    return watched.idle & (watched.share > 0.02)


BASELINES = (
    Baseline("used > 0.9 for 5m", _level(0.9), 300),
    Baseline("predict_linear 1h→4h for 10m", _predicted(HOUR, 4 * HOUR), 600),
    Baseline("predict_linear 6h→24h for 30m", _predicted(6 * HOUR, DAY), 1800),
    Baseline("used > 0.85 and 6h→4d for 1h", _predicted(6 * HOUR, 4 * DAY, above=0.85), HOUR),
    Baseline("deriv(1h) > 0 for 1h", _rising(HOUR), HOUR),
    Baseline("Theil-Sen + Mann-Kendall 6h", _trend(False), 0),
    Baseline("the same, Hamed-Rao", _trend(True), 0),
    Baseline("idle 15m and used > 2 %", _idle_and_used, 900, ("kv-leak",)),
)
