"""Wiring and life of the daemon: scheduled jobs, signals, start and stop."""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from queue import SimpleQueue
from types import FrameType

import structlog
from apscheduler.executors.pool import ThreadPoolExecutor
from apscheduler.schedulers.background import BackgroundScheduler
from apscheduler.triggers.interval import IntervalTrigger

from oomwatch import __version__, logs
from oomwatch.config import Config, config_hash
from oomwatch.configured import cadence_of, configure, judge_of
from oomwatch.database import Limits
from oomwatch.exposition import ConfigStatus, SnapshotCollector, registry, render
from oomwatch.feed import Feed, Job
from oomwatch.history import History, default_directory
from oomwatch.logs import Defects
from oomwatch.notify import Notifier
from oomwatch.observations import Observation
from oomwatch.past import filler
from oomwatch.pipeline import Pipeline
from oomwatch.server import WebServer
from oomwatch.settings import ConfigError

_log = structlog.get_logger(__name__)

# Jobs wait for the network or the driver, never for the processor: threads are cheap, and one engine that hangs until
# its timeout must not take the turn of another.
_THREADS = 64


def new_pipeline(
    config: Config, observers: Sequence[Callable[[Observation], None]] = (), defects: Defects | None = None
) -> Pipeline:
    return Pipeline(judge_of(config), observers, defects)


def history_of(config: Config, clock: Callable[[], float] = time.time) -> History | None:
    """The daemon's memory on disk; None where the configuration wants none."""
    settings = config.history
    if not settings.enabled:
        return None
    cadence = cadence_of(config)
    return History(
        settings.directory or default_directory(),
        Limits(settings.keep, settings.max_bytes, settings.keep_floors),
        intervals={
            "gpu": cadence.gpu,
            "scrape": cadence.scrape,
            "process": cadence.host,
            "lists": cadence.process,
        },
        log_text=settings.log_text,
        fill=filler(config),
        clock=clock,
    )


class Daemon:
    """One feed, one pipeline, one scheduler, one web server.

    ``load`` reads the configuration anew, raising ConfigError; ``make_feed`` builds the feed on the pipeline. Without
    ``keep_history`` nothing is kept on disk, whatever the configuration says.
    """

    def __init__(
        self,
        load: Callable[[], Config],
        make_feed: Callable[[Config, Pipeline], Feed],
        clock: Callable[[], float] = time.time,
        *,
        keep_history: bool = False,
    ) -> None:
        self._load = load
        self._clock = clock
        self._config = load()
        self._status = ConfigStatus(True, clock(), config_hash(self._config))
        self._reloading = threading.Lock()
        self._jobs: dict[str, Job] = {}
        self._scheduling = threading.Lock()
        self._signals: SimpleQueue[int] = SimpleQueue()
        self._defects = Defects()
        self.history = history_of(self._config, clock) if keep_history else None
        self.pipeline = new_pipeline(self._config, [self.history.observe] if self.history else [], self._defects)
        if self.history is not None:
            self.pipeline.on_judge(self.history.restore)
        self._feed = make_feed(self._config, self.pipeline)
        self._scheduler = _new_scheduler()
        self._notifier = Notifier(lambda: self.pipeline.current, clock, self._defects)
        collector = SnapshotCollector(
            lambda: self.pipeline.current,
            process_series_per_gpu=lambda: self._config.exposition.process_series_per_gpu,
            config=lambda: self._status,
            nvml_calls=self._feed.call_stats,
            probe_files=self._feed.probe_files,
            notifications=self._notifier.status,
            history=lambda: self.history.status if self.history else None,
            internal_errors=lambda: self._defects.count,
        )
        everything = registry(collector)
        web = self._config.web
        self.web = WebServer(
            listen=web.listen_address,
            web_config=web.config_file,
            enable_lifecycle=web.enable_lifecycle,
            max_requests=web.max_requests,
            snapshot=lambda: self.pipeline.current,
            render=lambda accept: render(everything, accept),
            healthy=self.unhealthy,
            ready=self.unready,
            reload=self.reload,
            release=self.release,
            history=self.history.path if self.history else None,
            clock=clock,
            defects=self._defects,
        )

    def start(self) -> None:
        """Serve first, so that a slow driver never looks like a dead daemon; then read."""
        if self.history is not None:
            self.history.start()
        self.pipeline.start()
        self.web.start()
        self._scheduler.start()
        self._schedule()
        self._notifier.configure(self._config)
        _log.info("oomwatch started", version=__version__, pages=list(self.web.urls), config=self._status.sha256)

    def stop(self) -> None:
        """Everything let go within a few seconds, whatever hangs."""
        self._notifier.stop()
        self._scheduler.shutdown(wait=False)
        self.web.stop(timeout=2.0)
        self._feed.close()
        self.pipeline.stop()
        if self.history is not None:
            self.history.stop()
        _log.info("oomwatch stopped")

    def run(self) -> None:
        """Start, obey signals, and return once one asks to stop."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
            signal.signal(number, self._on_signal)
        self.start()
        try:
            self._obey()
        finally:
            self.stop()

    def reload(self) -> str:
        """Read the configuration anew; a bad one is refused whole. Empty when it is in use now, else what is wrong."""
        with self._reloading:
            try:
                config = self._load()
            except ConfigError as error:
                self._status = replace(self._status, successful=False)
                _log.error("configuration not reloaded, the one in use stays", error=str(error))
                return str(error)
            for section in ("web", "history"):
                if getattr(config, section) != getattr(self._config, section):
                    _log.warning("changed settings take effect at the next start only", section=section)
            self._config = config
            try:
                self._apply(config)
            except Exception as error:
                self._defects.met(_log, "configuration taken over in part only: restart oomwatch", error)
                self._status = replace(self._status, successful=False)
                return f"taken over in part only, by a defect of oomwatch: {error!r}. Restart it"
            self._status = ConfigStatus(True, self._clock(), config_hash(config))
            _log.info("configuration reloaded", config=self._status.sha256)
            return ""

    def _apply(self, config: Config) -> None:
        logs.configure(config.log.level, config.log.format)
        self.pipeline.on_judge(lambda judge: configure(judge, config))
        self._feed.configure(config)
        self._notifier.configure(config)
        self._schedule()

    def release(self) -> str:
        """Give the driver's handles back for a while, so that MIG can be reconfigured or the driver unloaded."""
        return self._feed.release()

    def unhealthy(self) -> str:
        """Empty while the daemon itself works."""
        if not self.pipeline.alive:
            return "the thread that folds observations has ended: restart oomwatch"
        if not self._scheduler.running:
            return "the scheduler is not running: restart oomwatch"
        return ""

    def unready(self) -> str:
        """Empty once everything has been read once."""
        return self._feed.ready()

    # --- signals ---------------------------------------------------------------------------------------------

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self._signals.put(number)

    def _obey(self) -> None:
        while True:
            number = self._signals.get()
            if number in (signal.SIGTERM, signal.SIGINT):
                _log.info("stopping", signal=signal.Signals(number).name)
                return
            try:
                self._do(number)
            except Exception as error:
                self._defects.met(_log, "a signal could not be obeyed", error, signal=signal.Signals(number).name)

    def _do(self, number: int) -> None:
        if number == signal.SIGHUP:
            self.reload()
        elif self._feed.released:
            self._feed.resume()
        else:
            self.release()

    # --- jobs ------------------------------------------------------------------------------------------------

    def _schedule(self) -> None:
        """Bring the scheduler to what the feed wants to run now."""
        with self._scheduling:
            wanted = dict(self._feed.jobs())
            for name in self._jobs.keys() - wanted.keys():
                self._scheduler.remove_job(name)
            for name, job in wanted.items():
                old = self._jobs.get(name)
                if old is None or (old.seconds, old.jitter) != (job.seconds, job.jitter):
                    self._scheduler.add_job(
                        _Guarded(name, job.action, self._schedule_if_changed, self._defects),
                        IntervalTrigger(seconds=job.seconds, jitter=job.jitter or None, timezone=timezone.utc),
                        id=name,
                        name=name,
                        replace_existing=True,
                        next_run_time=datetime.now(timezone.utc),
                    )
            self._jobs = wanted

    def _schedule_if_changed(self) -> None:
        if _timing(self._feed.jobs()) != _timing(self._jobs):
            self._schedule()


def _timing(jobs: Mapping[str, Job]) -> dict[str, tuple[float, float]]:
    return {name: (job.seconds, job.jitter) for name, job in jobs.items()}


class _Guarded:
    """A job that cannot end the daemon: what it raises is a defect of ours, logged, and the next turn comes."""

    def __init__(self, name: str, action: Callable[[], None], afterwards: Callable[[], None], defects: Defects) -> None:
        self._defects = defects
        self._name = name
        self._action = action
        self._afterwards = afterwards

    def __call__(self) -> None:
        try:
            self._action()
            self._afterwards()
        except Exception as error:
            self._defects.met(_log, "a job failed; it runs again at its next turn", error, job=self._name)


def _new_scheduler() -> BackgroundScheduler:
    # A target that answers slower than its interval is told by its own health; "skipped" lines would say it again.
    logging.getLogger("apscheduler").setLevel(logging.ERROR)
    return BackgroundScheduler(
        executors={"default": ThreadPoolExecutor(_THREADS)},
        job_defaults={"coalesce": True, "max_instances": 1, "misfire_grace_time": None},
        timezone=timezone.utc,
        daemon=True,
    )
