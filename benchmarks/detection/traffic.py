"""Who asks when, and for how much: arrivals and lengths from public traces, else from a generator fitted to them.

The traces are read where they lie (``--traces``, or OOMWATCH_TRACES) and never copied. Rates and burstiness are
ServeGen's (Alibaba, per client in windows of ten minutes), lengths are Azure's of 2023 (conversation, code) and
Mooncake's. Each set of runs has clients and rows of its own, so that nothing tuned on one set has seen another's.
"""

from __future__ import annotations

import csv
import gzip
import json
import os
from collections import defaultdict
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.detection.spec import DAY, EngineSpec, Floats, Ints, Workload

_BESIDE_THE_REPOSITORY = Path(__file__).resolve().parents[2].parent / "shared" / "traces"
TRACES = Path(os.environ.get("OOMWATCH_TRACES") or _BESIDE_THE_REPOSITORY)
"""The folder of the public traces."""

WINDOW = 600.0  # seconds of one of ServeGen's windows
PER_DAY = 144

RATE_FILES = {
    "m-small": "servegen_msmall_rates_14d.csv.gz",
    "m-large": "servegen_mlarge_top40_rates_14d.csv.gz",
    "r1": "servegen_deepseek_r1_rates_1d.csv.gz",
}
LENGTH_FILES = {
    "conversation": "azure_llm_2023_conv.csv.gz",
    "code": "azure_llm_2023_code.csv.gz",
    "long": "mooncake_fast25_conversation.jsonl.gz",
}


class RateFit(NamedTuple):
    """What a client of a ServeGen model looks like; pairs are quartiles over its clients, single figures medians."""

    amplitude: tuple[float, float]  # (max - min) / (max + min) of the mean day, by hours in which the client sends
    deviation: float  # of the logarithm of the rate about that day, in windows in which the client sends
    correlation: float  # of that from one window to the next
    present: float  # share of windows in which the client sends
    weekend: tuple[float, float]  # quietest day / busiest day
    cv: tuple[float, float]  # of the time between two requests


# Fitted to the files of RATE_FILES; one day of r1 tells neither its correlation nor its weekends: m-small's, and none.
RATE_FITS = {
    "m-small": RateFit((0.40, 0.97), 0.89, 0.87, 0.28, (0.0, 0.19), (1.11, 2.09)),
    "m-large": RateFit((0.28, 0.89), 1.01, 0.87, 0.91, (0.0, 0.29), (1.04, 1.6)),
    "r1": RateFit((0.09, 0.85), 0.35, 0.87, 0.17, (1.0, 1.0), (0.99, 3.9)),
}
QUANTILES = (0.0, 0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1.0)
# Tokens of prompts and of outputs at these quantiles; between them the logarithm is linear. Prompt and output lengths
# of a request hardly hang together (correlation of logarithms 0.09 and 0.00 in Azure's).
LENGTH_FITS = {
    "conversation": (
        (2, 29, 181, 207, 396, 1020, 1189, 2734, 4083, 4142, 14050),
        (7, 16, 41, 54, 85, 129, 395, 424, 451, 601, 1000),
    ),
    "code": (
        (3, 17, 75, 147, 578, 1469, 2744, 5187, 7303, 7436, 7437),
        (6, 6, 6, 7, 9, 13, 24, 55, 90, 251, 1899),
    ),
    "long": (
        (891, 894, 901, 964, 2306, 6909, 15367, 27367, 39550, 85400, 126195),
        (1, 3, 10, 24, 156, 350, 472, 597, 698, 1118, 2000),
    ),
}


class Traffic(NamedTuple):
    """What one engine is asked. ``load`` is the share of the pool that the busiest hours are to fill."""

    source: str = "m-small"
    clients: tuple[int, ...] = (0,)
    shift: int = 0  # windows by which the trace is turned
    lengths: str = "conversation"
    rows: str = "all"  # first, second: halves of the trace's rows; all
    longest: int = 8192  # max_model_len
    load: float = 0.5
    floor: float = 0.0  # of the busiest hours, always there
    growth: float = 0.0  # per day, of the rate
    idle_hours: float = 0.0  # of each night
    burst_cv: float = 0.0  # in place of the trace's
    constant: bool = False
    leave_share: float = 0.04  # clients that disconnect while they read
    prefixes: int = 0  # shared prefixes
    prefix_tokens: int = 1024
    prefix_share: float = 0.0  # of requests that begin with one
    prefixes_arrive: bool = False  # tenants come over time, instead of being there from the start
    prompt_growth: float = 0.0  # per day, of prompt lengths
    output_scale: float = 1.0
    noisy: float = 0.0  # a tenant that comes for an hour now and then, times the load
    growth_from: float = 0.0  # day from which it grows
    rate_cap: float = 6.0  # requests a second at most in the busiest hours
    prefill_cap: float = 0.4  # of the time, spent on prompts in the busiest hours at most
    held_seconds: float = 0.0  # blocks stay so long after the end, by a connector


@dataclass(frozen=True)
class Traces:
    """``folder`` None, or without the files: the fitted generator speaks instead."""

    folder: Path | None = None
    _rates: dict[str, dict[int, tuple[Floats, Floats]]] = field(default_factory=dict)

    @cached_property
    def real(self) -> bool:
        names = [*RATE_FILES.values(), *LENGTH_FILES.values()]
        return self.folder is not None and all((self.folder / name).is_file() for name in names)

    def clients(self, source: str) -> tuple[int, ...]:
        """The clients of a source, busiest first; the generator's are numbered like ServeGen's."""
        if not self.real:
            return tuple(range({"m-small": 43, "m-large": 40, "r1": 73}[source]))
        read = self._source(source)
        return tuple(sorted(read, key=lambda client: -float(read[client][0].sum())))

    def rates(self, traffic: Traffic, days: float) -> tuple[Floats, Floats]:
        """Requests a second by window, 1 in the busiest hours, and the CV of the time between two, of ``days``."""
        n = int(np.ceil(days * PER_DAY))
        if traffic.constant:
            return np.ones(n), np.full(n, traffic.burst_cv or 1.0)
        rate, weighted = np.zeros(n), np.zeros(n)
        for client in traffic.clients:
            values, cv = self._source(traffic.source)[client] if self.real else _made_up(traffic.source, client)
            # Clients differ by a factor of thousand: without their own scale the busiest would hide the others.
            values = values / max(1e-9, float(np.quantile(values, 0.98)) or float(values.max()))
            turned = np.resize(np.roll(values, -traffic.shift), n)
            rate += turned
            weighted += turned * np.resize(np.roll(cv, -traffic.shift), n)
        cv = np.where(rate > 0, weighted / np.maximum(rate, 1e-12), 1.0)
        scale = float(np.quantile(rate, 0.98)) or 1.0
        return np.minimum(rate / scale, 1.5), np.full(n, traffic.burst_cv) if traffic.burst_cv else np.minimum(cv, 2.5)

    def lengths(self, traffic: Traffic, n: int, rng: np.random.Generator) -> tuple[Ints, Ints]:
        """Prompt and output lengths of ``n`` requests, as rows of the trace drawn with replacement."""
        if self.real and self.folder is not None:
            prompt, output = _read_lengths(self.folder / LENGTH_FILES[traffic.lengths])
            half = len(prompt) // 2
            rows = {"first": (0, half), "second": (half, len(prompt)), "all": (0, len(prompt))}[traffic.rows]
            picked = rng.integers(*rows, n)
            return prompt[picked], output[picked]
        prompts, outputs = LENGTH_FITS[traffic.lengths]
        return _by_quantiles(prompts, rng.random(n)), _by_quantiles(outputs, rng.random(n))

    def _source(self, source: str) -> dict[int, tuple[Floats, Floats]]:
        if source not in self._rates and self.folder is not None:
            self._rates[source] = _read_rates(self.folder / RATE_FILES[source])
        return self._rates[source]


def workload(traffic: Traffic, engine: EngineSpec, days: float, traces: Traces, rng: np.random.Generator) -> Workload:
    """The requests of ``days``, dense enough to fill ``load`` of the engine's pool in the busiest hours."""
    rate, cv = traces.rates(traffic, days)
    rate = _shaped(rate, traffic, rng) * _busiest_rate(traffic, engine, traces, rng)
    arrival = _arrivals(rate, cv, days, rng)
    n = len(arrival)
    prompt, output = traces.lengths(traffic, n, rng)
    day = arrival / DAY
    prompt = (prompt * (1 + traffic.prompt_growth * np.maximum(0.0, day - traffic.growth_from))).astype(np.int64)
    output = np.maximum(1, (output * traffic.output_scale).astype(np.int64))
    group = np.full(n, -1, dtype=np.int64)
    group_tokens = np.zeros(0, dtype=np.int64)
    if traffic.prefixes:
        group, group_tokens = _prefixes(traffic, day / days, rng)
        prompt = prompt + np.where(group >= 0, group_tokens[group], 0)
    prompt = np.clip(prompt, 1, traffic.longest - 64)
    output = np.minimum(output, traffic.longest - prompt)
    group = np.where((group >= 0) & (prompt > traffic.prefix_tokens * 4), -1, group)
    leave = np.where(rng.random(n) < traffic.leave_share, rng.integers(1, np.maximum(2, output)), -1)
    return Workload(arrival, prompt, output, leave.astype(np.int64), group, group_tokens)


def _shaped(rate: Floats, traffic: Traffic, rng: np.random.Generator) -> Floats:
    window = np.arange(len(rate))
    rate = traffic.floor + (1 - traffic.floor) * rate
    rate = rate * (1 + traffic.growth) ** np.maximum(0.0, window / PER_DAY - traffic.growth_from)
    if traffic.idle_hours:
        hour = (window % PER_DAY) / 6
        rate = np.where(hour < traffic.idle_hours, 0.0, rate)
    if traffic.noisy:
        visits = rng.random(len(rate) // 6 + 1) < 0.04
        rate = rate + traffic.noisy * np.repeat(visits, 6)[: len(rate)]
    return rate


def _busiest_rate(traffic: Traffic, engine: EngineSpec, traces: Traces, rng: np.random.Generator) -> float:
    """The rate at which requests of these lengths hold ``load`` of the pool, by Little's law."""
    prompt, output = traces.lengths(traffic, 2000, rng)
    prompt = np.clip(prompt, 1, traffic.longest - 64)
    output = np.maximum(1, output * traffic.output_scale)
    blocks = (prompt + output / 2) / engine.block_size + 0.5
    at_once = min(engine.max_num_seqs, traffic.load * engine.blocks / float(blocks.mean()))
    step = engine.step_seconds + engine.seconds_per_seq * at_once
    prefill = engine.seconds_per_prefill_token * prompt
    most = min(traffic.prefill_cap / float(prefill.mean()), traffic.rate_cap)
    rate = most
    for _ in range(5):
        # Whoever decodes waits for the prompts of others.
        slowed = step / (1 - rate * float(prefill.mean()))
        held = float((blocks * (output * slowed + prefill + traffic.held_seconds)).mean())
        rate = min(most, 0.5 * (rate + traffic.load * engine.blocks / held))
    return rate


def _arrivals(rate: Floats, cv: Floats, days: float, rng: np.random.Generator) -> Floats:
    """Counts in bins of ten seconds, as dispersed as the CV says (variance/mean = CV squared), spread evenly inside."""
    width = 10.0
    mean = np.repeat(rate, int(WINDOW / width)) * width
    excess = np.repeat(np.maximum(cv, 0.0) ** 2 - 1, int(WINDOW / width))
    bursty = (excess > 0.05) & (mean > 0)
    mean[bursty] = rng.gamma(mean[bursty] / excess[bursty], excess[bursty])
    counts = rng.poisson(mean)
    begin = np.repeat(np.arange(len(mean)) * width, counts)
    times = np.sort(begin + rng.uniform(0, width, len(begin)))
    return np.asarray(times[times < days * DAY], dtype=np.float64)


def _prefixes(traffic: Traffic, progress: Floats, rng: np.random.Generator) -> tuple[Ints, Ints]:
    tokens = rng.integers(traffic.prefix_tokens // 2, traffic.prefix_tokens * 2, traffic.prefixes)
    # A few tenants make most of the requests.
    picked = (traffic.prefixes * rng.random(len(progress)) ** 2).astype(np.int64)
    if traffic.prefixes_arrive:
        picked = (picked * np.clip(0.1 + progress, 0, 1)).astype(np.int64)
    return np.where(rng.random(len(progress)) < traffic.prefix_share, picked, -1), tokens


def _by_quantiles(values: tuple[int, ...], u: Floats) -> Ints:
    return np.exp(np.interp(u, QUANTILES, np.log(values))).astype(np.int64)


@lru_cache(maxsize=1)
def traces_in(folder: Path | None) -> Traces:
    """Those of a folder, which are read once in each process."""
    return Traces(folder)


@lru_cache(maxsize=256)
def _made_up(source: str, client: int) -> tuple[Floats, Floats]:
    """Two weeks of a client of the fitted generator, the same at each call."""
    fit = RATE_FITS[source]
    rng = np.random.default_rng([len(source), ord(source[-1]), client])
    n = 14 * PER_DAY
    hour = np.arange(n) / 6
    amplitude = rng.uniform(*fit.amplitude)
    day = 1 + amplitude * np.cos(2 * np.pi * (hour - rng.uniform(0, 24)) / 24)
    weekend = np.where((hour // 24) % 7 >= 5, rng.uniform(*fit.weekend), 1.0)
    noise = np.empty(n)
    noise[0] = rng.normal()
    steps = rng.normal(size=n) * np.sqrt(1 - fit.correlation**2)
    for i in range(1, n):
        noise[i] = fit.correlation * noise[i - 1] + steps[i]
    present = np.repeat(rng.random(n // 36 + 1) < np.clip(fit.present * rng.uniform(0.5, 1.6), 0, 1), 36)[:n]
    rate = day * weekend * np.exp(fit.deviation * noise) * present
    return rate if rate.any() else day, np.full(n, rng.uniform(*fit.cv))


def _read_rates(path: Path) -> dict[int, tuple[Floats, Floats]]:
    by_client: dict[int, list[tuple[float, float, float]]] = defaultdict(list)
    with gzip.open(path, "rt", encoding="utf-8") as file:
        for line in csv.DictReader(file):
            row = (float(line["window_start_s"]), float(line["rate_rps"] or 0), float(line["interarrival_cv"] or 1))
            by_client[int(line["client"])].append(row)
    found = {}
    for client, rows in by_client.items():
        table = np.array(sorted(rows))
        if table[:, 1].any():
            found[client] = (table[:, 1], table[:, 2])
    return found


@lru_cache(maxsize=8)
def _read_lengths(path: Path) -> tuple[Ints, Ints]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        if path.name.endswith(".jsonl.gz"):
            rows = [(row["i"], row["o"]) for row in map(json.loads, file)]
        else:
            rows = [(int(line["context_tokens"]), int(line["generated_tokens"])) for line in csv.DictReader(file)]
    table = np.array(rows, dtype=np.int64)
    return np.maximum(1, table[:, 0]), np.maximum(1, table[:, 1])
