"""An engine for detectors of ranks and engines: gauges as a test sets them, counters that rise at rates it gives."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import cycle

from oomwatch.detectors.base import Detector, EngineSample, Finding, RankSample, State
from oomwatch.observations import NOT_EXPOSED, EngineFacts, Maybe, Pool, RankReading

START = 1_760_000_000.0  # a time of day like any other
COUNTERS = ("generation_tokens", "prompt_tokens", "steps", "preemptions", "finished", "request_prompt_tokens")


@dataclass
class Rank:
    """One rank: what its gauges show, and by how much its counters rise a second."""

    name: str = "0"
    gauges: dict[str, float] = field(
        default_factory=lambda: {"usage": 0.3, "running": 4.0, "waiting": 0.0, "waiting_capacity": 0.0}
    )
    rates: dict[str, float] = field(
        default_factory=lambda: {
            "generation_tokens": 500.0,
            "prompt_tokens": 1000.0,
            "steps": 40.0,
            "finished": 1.0,
            "request_prompt_tokens": 1000.0,
        }
    )
    counts: dict[str, float] = field(default_factory=lambda: dict.fromkeys(COUNTERS, 0.0))
    missing: frozenset[str] = frozenset()
    pool: Pool = field(default_factory=lambda: Pool(blocks=1000, block_size=16, tokens=16000))
    sleep_level: str = "awake"

    def pass_time(self, seconds: float) -> None:
        for name in COUNTERS:
            self.counts[name] += self.rates.get(name, 0.0) * seconds

    def reading(self) -> RankReading:
        """The page's view of it now; whole counts, as vLLM has them."""
        counts = {name: float(int(value)) for name, value in self.counts.items()}
        finished = {"stop": counts.pop("finished"), "abort": 0.0}
        used = round(self.gauges["usage"] * self.pool.blocks) if isinstance(self.pool.blocks, int) else self.pool.used
        reading = RankReading(
            rank=self.name,
            finished=finished,
            sleep_level=self.sleep_level,
            pool=replace(self.pool, used=used),
        )
        shown: dict[str, Maybe[float]] = {**self.gauges, **counts, **dict.fromkeys(self.missing, NOT_EXPOSED)}
        return replace(reading, **shown)  # type: ignore[arg-type] # the names are those of fields that are numbers


class Engine:
    """Plays time for a detector: a scrape every few seconds, and a conclusion after each."""

    def __init__(
        self,
        detector: Detector,
        ranks: Iterable[str] = ("0",),
        *,
        every: float | Iterable[float] = 15.0,
        facts: EngineFacts | None = None,
        version: tuple[int, ...] | None = None,
    ) -> None:
        self.detector = detector
        self.ranks = {name: Rank(name) for name in ranks}
        self.t = START
        self.segment = 1
        self.segment_start = START
        self.answers = "ok"
        self.facts = facts or EngineFacts(name="chat")
        self.version = version
        self.findings: list[tuple[float, Finding]] = []
        self.every(every)

    def every(self, seconds: float | Iterable[float]) -> None:
        """The distance of scrapes from now on; several take turns."""
        self._intervals = cycle([seconds] if isinstance(seconds, float) else list(seconds))

    @property
    def rank(self) -> Rank:
        """The first rank."""
        return next(iter(self.ranks.values()))

    @property
    def now(self) -> Finding:
        """The latest conclusion."""
        return self.findings[-1][1]

    def load(self, rank: str | None = None, rates: Mapping[str, float] | None = None, **gauges: float) -> Engine:
        """What a rank's (or every rank's) gauges show and its counters do from now on."""
        for one in [self.ranks[rank]] if rank is not None else self.ranks.values():
            one.gauges.update(gauges)
            if "waiting" in gauges and "waiting_capacity" not in gauges and "waiting_deferred" not in gauges:
                one.gauges["waiting_capacity"] = gauges["waiting"]
            one.rates.update(rates or {})
        return self

    def hang(self) -> Engine:
        """No counter moves any more."""
        return self.load(rates=dict.fromkeys(COUNTERS, 0.0))

    def leave_out(self, *names: str) -> Engine:
        """Series that the page does not have."""
        for rank in self.ranks.values():
            rank.missing |= set(names)
        return self

    def restart(self) -> Engine:
        """A new process: the counters begin anew, and so does a segment."""
        self.segment += 1
        self.segment_start = self.t + 1
        for rank in self.ranks.values():
            rank.counts = dict.fromkeys(COUNTERS, 0.0)
        return self

    def run(self, seconds: float) -> list[Finding]:
        """Serve for a while; what was concluded meanwhile."""
        return self._pass(seconds, answered=True)

    def silent(self, seconds: float) -> list[Finding]:
        """Time passes for the engine, and no scrape succeeds."""
        return self._pass(seconds, answered=False)

    def _pass(self, seconds: float, answered: bool) -> list[Finding]:
        end, begun = self.t + seconds, len(self.findings)
        while (t := self.t + next(self._intervals)) <= end:
            for rank in self.ranks.values():
                rank.pass_time(t - self.t)
            self.t = t
            if answered:
                self._scrape()
            self.findings.append((t, self.detector.conclude(t)))
        for rank in self.ranks.values():
            rank.pass_time(end - self.t)
        self.t = end
        return [finding for _, finding in self.findings[begun:]]

    def _scrape(self) -> None:
        readings = tuple(rank.reading() for rank in self.ranks.values())
        for reading in readings:
            self.detector.observe(
                RankSample(
                    t=self.t,
                    engine="chat",
                    reading=reading,
                    facts=self.facts,
                    segment=self.segment,
                    segment_start=self.segment_start,
                    since=None,
                    ready_since=self.segment_start,
                    version=self.version,
                )
            )
        self.detector.observe(
            EngineSample(
                self.t, "chat", self.answers, "", self.facts, readings, self.segment, self.segment_start, pids=()
            )
        )

    def first(self, state: State) -> float | None:
        """Seconds from the beginning to the first conclusion of that state."""
        return next((t - START for t, finding in self.findings if finding.state == state), None)

    def state(self) -> State:
        """The latest state."""
        return self.now.state

    def states(self) -> set[State]:
        """Every state that was ever concluded."""
        return {finding.state for _, finding in self.findings}
