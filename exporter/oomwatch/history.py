"""The daemon's memory: a flight recorder of the last hours, what the detectors know, and floors and maxima of weeks.

All of it is written by one thread beside the pipeline, one transaction an interval at most. Whatever happens to the
disk, the daemon goes on: what cannot be written is kept in memory up to a bound, and written once that works again.

Bounds: the database holds ``history.max_bytes`` of compressed recording, 500,000 bins (about 30 MB) and one state of
the detectors; memory holds 16 MiB of what waits to be written, and 64 intervals that wait to be compressed.
"""

from __future__ import annotations

import json
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import structlog

from oomwatch import savedstate, units
from oomwatch.database import FILE, Archive, Block, Damaged, Database, Limits, Unusable, opened
from oomwatch.judge import Judge, Saved
from oomwatch.judge import Memory as Knowledge
from oomwatch.logs import Repeats
from oomwatch.node import Node
from oomwatch.observations import (
    Absent,
    EngineFacts,
    EngineScrape,
    EngineUpdate,
    Gap,
    GpuPoll,
    HostProcess,
    Memory,
    Observation,
    TargetRemoved,
    Tick,
    known,
)
from oomwatch.recording import Decoder, Header, RecordingError, header_line, merged_facts, read_header, to_line

_log = structlog.get_logger(__name__)

_WAITING_BATCHES = 64
_WAITING_BYTES = 16 * 1024**2
_LARGEST_BATCH = 20_000  # observations without a tick in between
_SAVE_EVERY = 300.0  # seconds between two states; what came after one is in the flight recorder
_RETRY_EVERY = 30.0
_MOST_SET_ASIDE = 3  # in one life of the daemon: a disk that damages every file is better left alone
_BIN_SECONDS = 1800
_MOST_SERIES = 512
_STOP_SECONDS = 5.0
_REPLAYED_BYTES = 8 * 1024**2  # of text at most, where the state is made anew: some 10 s of one core
_CLOCKS_APART = 5.0

Fill = Callable[[Iterable[EngineFacts], float, float], Iterable[Observation]]
"""Observations of engines in a stretch of time from elsewhere, for what nobody watched."""


@dataclass(frozen=True)
class HistoryStatus:
    """How the memory fares. ``problem`` is empty while it is written, else says why not and what to do.

    ``oldest`` and ``last_write`` are unix times, ``waiting_bytes`` what memory holds until it can be written,
    ``lost_observations`` what was given up since the start.
    """

    enabled: bool
    path: str = ""
    problem: str = ""
    size_bytes: int = 0
    oldest: float | None = None
    last_write: float | None = None
    write_seconds: float | None = None
    failures: int = 0
    waiting_bytes: int = 0
    lost_observations: int = 0
    restored: str = ""


@dataclass
class _Batch:
    """What was observed up to a tick, and with it at times what the detectors know."""

    observations: list[Observation] = field(default_factory=list)
    saves: bool = False
    state: tuple[float, str, bytes] | None = None  # time, fingerprint, data
    last: bool = False


def default_directory(environment: dict[str, str] | None = None) -> Path:
    """systemd's state directory, else /var/lib/oomwatch where that can be written, else the user's own."""
    env = os.environ if environment is None else environment
    if env.get("STATE_DIRECTORY"):
        return Path(env["STATE_DIRECTORY"].split(":")[0])
    system = Path("/var/lib/oomwatch")
    if os.access(system if system.exists() else system.parent, os.W_OK):
        return system
    own = env.get("XDG_STATE_HOME") or str(Path(env.get("HOME") or "/") / ".local/state")
    return Path(own) / "oomwatch"


class History:
    """Observer of a pipeline. ``observe`` and ``restore`` belong to the pipeline's thread, all else to any.

    In order: ``start``, ``restore`` before the first observation, ``observe`` with each, ``stop`` once the pipeline
    has ended.
    """

    def __init__(
        self,
        directory: Path,
        limits: Limits | None = None,
        *,
        intervals: dict[str, float] | None = None,
        log_text: bool = False,
        fill: Fill | None = None,
        clock: Callable[[], float] = time.time,
        retry_every: float = _RETRY_EVERY,
        save_every: float = _SAVE_EVERY,
    ) -> None:
        self.directory = directory
        self.path = directory / FILE
        self._limits = limits or Limits()
        self._intervals = intervals or {}
        self._fill = fill
        self._clock = clock
        self._retry_every = retry_every
        self._save_every = save_every
        self._judge: Judge | None = None
        self._batch = _Batch()
        self._saved_at: float | None = None
        self._queue: queue.Queue[_Batch] = queue.Queue(_WAITING_BATCHES)
        self._encoder = _Encoder(log_text)
        self._waiting: deque[Block] = deque()
        self._database: Database | None = None
        self._retry_at = 0.0
        self._set_aside = 0
        self._repeats = Repeats()
        self._thread = threading.Thread(target=self._run, name="history", daemon=True)
        self._looked = threading.Event()  # the database was opened, or could not be
        self._setting = threading.Lock()
        self._status = HistoryStatus(enabled=True, path=str(self.path))

    @property
    def status(self) -> HistoryStatus:
        return self._status

    # --- in the pipeline's thread ----------------------------------------------------------------------------

    def restore(self, judge: Judge) -> None:
        """Bring the judge to where it was, mark the gap since then, and follow it from now on.

        Waits a few seconds for a disk that does not answer, and goes on without what it holds.
        """
        self._judge = judge
        began = time.monotonic()
        if not self._looked.wait(_STOP_SECONDS):
            _log.warning("history not restored", error="the disk does not answer")
        elif self._database is not None:
            try:
                self._restore_from(self._database, judge, self._clock())
            except Unusable as problem:
                _log.warning("history not restored", error=str(problem))
        now = self._clock()
        for observation in self._filled(tuple(judge.node.facts()), judge.node.t, now):
            self._apply(judge, observation)
            self.observe(observation)
        since = judge.node.t
        if since:
            gap = Gap(max(now, since), since)
            self._apply(judge, gap)
            self.observe(gap)
            _log.info(
                "history restored",
                how=self._status.restored,
                gap=units.duration(max(0.0, now - since)),
                took=units.duration(time.monotonic() - began),
            )

    def observe(self, observation: Observation) -> None:
        """Keep one observation; at a tick what has come is handed on to be written. Never waits."""
        self._batch.observations.append(observation)
        if isinstance(observation, Tick) or len(self._batch.observations) >= _LARGEST_BATCH:
            self._hand_on(observation.t)

    def _hand_on(self, t: float, *, last: bool = False) -> None:
        batch, self._batch = self._batch, _Batch()
        batch.last = last
        batch.saves = last or self._saved_at is None or t - self._saved_at >= self._save_every
        if batch.saves:
            self._saved_at = t
            batch.state = self._state(self._judge) if self._judge is not None else None
        try:
            self._queue.put(batch, block=last, timeout=_STOP_SECONDS if last else None)
        except queue.Full:
            problem = f"{self.path} does not take what comes: its disk hangs or is too slow, observations are lost"
            self._set(problem=problem, lost=len(batch.observations))
            self._repeats.failed(_log, "slow", "history cannot keep up", problem)

    def _state(self, judge: Judge) -> tuple[float, str, bytes] | None:
        try:
            return judge.node.t, savedstate.fingerprint(), savedstate.dump(judge)
        except Exception as error:  # a detector that cannot be pickled must cost no more than its memory
            self._repeats.failed(_log, "state", "the detectors' state cannot be saved", str(error))
            return None

    # --- restoring -------------------------------------------------------------------------------------------

    def _restore_from(self, database: Database, judge: Judge, now: float) -> None:
        after, how = 0, "by replaying the flight recorder"
        state = database.state()
        if state is not None:
            problem = self._unusable_state(state.t, state.fingerprint, now)
            if not problem:
                try:
                    judge.restore(savedstate.load(state.data))
                    after, how = state.block, "from the saved state"
                except savedstate.CannotRestore as error:
                    problem = str(error)
                except Exception as error:  # a state that fits the code and not itself
                    problem = repr(error)
                    judge.restore(Saved(Node(), Knowledge(), {}, {}))
            if problem:
                _log.info("the detectors' state is made anew from the flight recorder", because=problem)
                database.drop_state()
        with Archive(database.path) as archive:
            begin = after if after else archive.newest_within(_REPLAYED_BYTES, 0)
            replayed = self._replay(archive, judge, begin, now, after_state=bool(after))
            newest = archive.newest()
            self._encoder.knows(archive.facts(newest) if newest else None)
        if after or replayed:
            self._set(restored=f"{how}, and {units.count(replayed)} observations after it" if after else how)

    def _unusable_state(self, t: float, fingerprint: str, now: float) -> str:
        if fingerprint != savedstate.fingerprint():
            return "it was written by another version of oomwatch"
        if t > now + _CLOCKS_APART:
            return f"it is {units.duration(t - now)} in the future: the clock was set back"
        if now - t > self._limits.keep:
            return f"it is {units.duration(now - t)} old"
        return ""

    def _replay(self, archive: Archive, judge: Judge, after: int, now: float, *, after_state: bool) -> int:
        count = 0
        decoder: Decoder | None = None
        for piece in archive.pieces(now - self._limits.keep, after):
            if piece.first > now + _CLOCKS_APART:
                break
            if decoder is None:
                for facts in () if after_state else facts_in(archive.facts(piece.number)):
                    self._apply(judge, EngineUpdate(piece.first, facts))
                decoder = Decoder(0.0, judge.node.facts())
            for line in piece.text.splitlines():
                try:
                    observation = decoder.observation(line)
                except RecordingError as error:
                    _log.warning("a line of the flight recorder is left out", error=str(error))
                    continue
                if observation is not None:
                    self._apply(judge, observation)
                    count += 1
        return count

    def _apply(self, judge: Judge, observation: Observation) -> None:
        try:
            judge.apply(observation)
        except Exception as error:  # as in the pipeline: one that cannot be folded must not end the daemon
            kind = type(observation).__name__
            self._repeats.failed(_log, "apply", "could not fold an observation again", repr(error), kind=kind)

    def _filled(self, engines: Iterable[EngineFacts], since: float, now: float) -> Iterator[Observation]:
        if self._fill is None:
            return
        try:
            yield from self._fill(engines, max(since, now - self._limits.keep), now)
        except Exception as error:
            _log.warning("the gap is not filled from the Prometheus server", error=str(error))

    # --- life ------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Open the database and begin to write what comes, in a thread of its own."""
        self._thread.start()

    def stop(self) -> None:
        """Write what has come and what the detectors know; waits five seconds at most for a slow disk."""
        if self._thread.is_alive():
            self._hand_on(self._clock(), last=True)
            self._thread.join(_STOP_SECONDS)
            if self._thread.is_alive():
                _log.warning("history not written to its end: the disk does not answer")

    def _open(self) -> None:
        self._retry_at = time.monotonic() + self._retry_every
        try:
            database = opened(self.directory, self._limits)
            database.set("intervals", json.dumps(self._intervals))
        except Unusable as problem:
            self._failed(problem)
            return
        self._database = database
        self._encoder.tell_facts()

    def _failed(self, problem: Unusable) -> None:
        self._set(problem=str(problem), failed=1)
        self._repeats.failed(_log, "write", "history is kept in memory only", str(problem))
        if isinstance(problem, Damaged) and self._database is not None:
            self._database.close(clean=False)
            self._database = None
            self._set_aside += 1
            # A file that has just turned bad is set aside as it is opened again.
            self._retry_at = 0.0 if self._set_aside <= _MOST_SET_ASIDE else float("inf")

    # --- in the writer's thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._open()
        finally:
            self._looked.set()
        while True:
            batch = self._queue.get()
            try:
                self._write(batch)
            except Exception as error:
                problem = f"a defect of oomwatch: {type(error).__name__}: {error}"
                self._set(problem=problem, failed=1)
                self._repeats.failed(_log, "defect", "history could not be written", problem, exc_info=error)
                self._trim()
            if batch.last:
                if self._database is not None:
                    self._database.close(clean=not self._waiting)
                return

    def _write(self, batch: _Batch) -> None:
        block = self._encoder.block(batch.observations)
        if block is not None:
            self._waiting.append(block)
        if self._database is None and time.monotonic() >= self._retry_at:
            self._open()
        if self._database is None:
            self._trim()
            return
        began = time.monotonic()
        now = self._clock()
        bins = self._encoder.bins if batch.saves else None
        try:
            self._database.write(self._waiting, now, facts=self._encoder.changed_facts(), state=batch.state, bins=bins)
            size, oldest = self._database.size(), self._database.oldest()
        except Unusable as problem:
            self._failed(problem)
            self._trim()
            return
        self._waiting.clear()
        self._encoder.written(with_bins=bins is not None)
        self._set(
            problem="",
            size_bytes=size,
            oldest=oldest,
            last_write=now,
            write_seconds=time.monotonic() - began,
            waiting_bytes=0,
        )
        self._repeats.recovered(_log, "write", "history is written to disk again")

    def _trim(self) -> None:
        """Give up the oldest of what waits, beyond what memory may hold."""
        waiting = sum(len(block.data) for block in self._waiting)
        lost = 0
        while waiting > _WAITING_BYTES:
            block = self._waiting.popleft()
            waiting -= len(block.data)
            lost += block.observations
        self._set(waiting_bytes=waiting, lost=lost)

    def _set(self, *, lost: int = 0, failed: int = 0, **changes: object) -> None:
        """From the pipeline's thread and from the writer's: counts are added, so that none of them gets lost."""
        with self._setting:
            self._status = replace(
                self._status,
                lost_observations=self._status.lost_observations + lost,
                failures=self._status.failures + failed,
                **changes,  # type: ignore[arg-type]  # names and types stand in callers
            )


def facts_in(document: str | None) -> tuple[EngineFacts, ...]:
    """Engines' facts as the database keeps them: as the header of a recording."""
    return read_header(document).engines if document else ()


class _Encoder:
    """Turns observations into blocks, and keeps what goes with them: engines' facts and bins."""

    def __init__(self, log_text: bool) -> None:
        self._log_text = log_text
        self._t = 0.0
        self._facts: dict[str, EngineFacts] = {}
        self._facts_changed = False
        self.bins: dict[tuple[str, int], tuple[float, float]] = {}

    def knows(self, document: str | None) -> None:
        """Go on from what the database says of the engines."""
        self._facts.update({facts.name: facts for facts in facts_in(document) if facts.name not in self._facts})

    def tell_facts(self) -> None:
        """What is known of the engines stands nowhere yet: a new file has begun."""
        self._facts_changed = bool(self._facts)

    def block(self, observations: Iterable[Observation]) -> Block | None:
        lines: list[str] = []
        first: float | None = None
        for observation in observations:
            # As the fold does it: time never runs backwards, a late observation counts as of now.
            self._t = max(self._t, observation.t)
            line = to_line(_at(observation, self._t), log_text=self._log_text)
            self._follow(observation)
            if line is not None:
                first = self._t if first is None else first
                lines.append(line)
        return None if first is None else Block.of(lines, first, self._t)

    def changed_facts(self) -> str | None:
        return header_line(Header(engines=tuple(self._facts.values()))) if self._facts_changed else None

    def written(self, *, with_bins: bool) -> None:
        self._facts_changed = False
        if with_bins:
            self.bins = {}

    def _follow(self, observation: Observation) -> None:
        match observation:
            case EngineUpdate(facts=facts, gone=gone):
                before = self._facts.get(facts.name)
                if gone:
                    self._facts.pop(facts.name, None)
                else:
                    self._facts[facts.name] = facts if before is None else merged_facts(before, facts)
                self._facts_changed |= self._facts.get(facts.name) != before
            case TargetRemoved(source="vllm", target=target):
                self._facts_changed |= self._facts.pop(target, None) is not None
            case _:
                for name, value in key_series(observation):
                    self._put(name, value)

    def _put(self, name: str, value: float) -> None:
        key = name, int(self._t // _BIN_SECONDS) * _BIN_SECONDS
        low, high = self.bins.get(key, (value, value))
        if key in self.bins or len(self.bins) < 2 * _MOST_SERIES:
            self.bins[key] = min(low, value), max(high, value)


def key_series(observation: Observation) -> Iterator[tuple[str, float]]:
    """Names and values of what is kept for weeks: device and process memory, KV pools, queues, host memory."""
    match observation:
        case GpuPoll():
            for uuid, memory, processes in (
                (observation.uuid, observation.memory, observation.processes),
                *((mig.uuid, mig.memory, mig.processes) for mig in observation.mig),
            ):
                if isinstance(memory, Memory):
                    yield f'gpu_memory_free_bytes{{gpu="{uuid}"}}', float(memory.free)
                for process in () if isinstance(processes, Absent) else processes:
                    if process.used is not None:
                        yield f'gpu_process_memory_bytes{{gpu="{uuid}",pid="{process.pid}"}}', float(process.used)
        case EngineScrape():
            for rank in observation.ranks:
                labels = f'{{engine="{observation.engine}",rank="{rank.rank}"}}'
                for name in ("usage", "running", "waiting"):
                    value = known(getattr(rank, name))
                    if value is not None:
                        yield f"engine_{name}{labels}", float(value)
        case HostProcess() if observation.engine is not None and not isinstance(observation.anon, Absent):
            yield (
                f'host_anonymous_bytes{{engine="{observation.engine}",pid="{observation.pid}"}}',
                float(observation.anon),
            )


def _at(observation: Observation, t: float) -> Observation:
    return observation if observation.t == t else replace(observation, t=t)
