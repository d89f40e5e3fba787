"""The daemon's log: structlog and the standard library's loggers in one stream, for people or as JSON lines.

Errors that repeat go through Repeats: on change, then at most once in ten minutes.
"""

from __future__ import annotations

import json
import logging
import math
import sys
import threading
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, TextIO

import structlog
from structlog.typing import EventDict, FilteringBoundLogger, Processor, WrappedLogger

LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warn": logging.WARNING, "error": logging.ERROR}

# Their INFO lines tell of every job and every connection.
_TALKATIVE = ("apscheduler", "urllib3")

_FIRST = ("timestamp", "level", "event")


def configure(level: str, format: str, stream: TextIO | None = None) -> None:  # noqa: A002 - as the setting is named
    """Sends all logging to a stream (standard error), from a level of LEVELS on, as ``console`` or ``json``.

    May be called again, for a new configuration.
    """
    stream = stream or sys.stderr
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        _short_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*shared, structlog.stdlib.ExtraAdder(), _logger_name],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *_rendering(format, stream)],
        )
    )
    root = logging.getLogger()
    for old in [old for old in root.handlers if getattr(old, "of_oomwatch", False)]:
        root.removeHandler(old)
    handler.of_oomwatch = True  # type: ignore[attr-defined]  # the mark by which the next call finds it
    root.addHandler(handler)
    root.setLevel(LEVELS[level])
    for name in _TALKATIVE:
        logging.getLogger(name).setLevel(logging.DEBUG if level == "debug" else logging.WARNING)
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        # Loggers made before a reload must follow the new level and format.
        cache_logger_on_first_use=False,
    )


def _rendering(form: str, stream: TextIO) -> list[Processor]:
    if form == "json":
        return [structlog.processors.format_exc_info, _ordered, structlog.processors.JSONRenderer(serializer=_json)]
    # The default traceback of the console shows local variables, secrets among them.
    plain = structlog.dev.plain_traceback
    return [structlog.dev.ConsoleRenderer(colors=stream.isatty(), exception_formatter=plain)]


def _short_level(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    event["level"] = {"warning": "warn", "critical": "error"}.get(event["level"], event["level"])
    return event


def _logger_name(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    event["logger"] = event["_record"].name
    return event


def _ordered(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    return {key: event[key] for key in _FIRST if key in event} | {k: v for k, v in event.items() if k not in _FIRST}


def _json(event: EventDict, **_options: object) -> str:
    return json.dumps({key: _plain(value) for key, value in event.items()}, default=str)


def _plain(value: Any) -> Any:
    """JSON has no NaN and no infinity."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(item) for item in value]
    return value


def log_uncaught() -> None:
    """Exceptions that end a thread or the program are logged as every other error is."""
    log = structlog.get_logger("oomwatch")

    def in_thread(args: threading.ExceptHookArgs) -> None:
        if args.exc_value is not None:
            log.error("a thread ended by an error", thread=getattr(args.thread, "name", ""), exc_info=args.exc_value)

    def in_program(kind: type[BaseException], error: BaseException, _traceback: object) -> None:
        if issubclass(kind, KeyboardInterrupt):
            return
        log.error("ended by an error", exc_info=error)

    threading.excepthook = in_thread
    sys.excepthook = in_program


# --- errors that repeat ----------------------------------------------------------------------------------------


@dataclass
class _Trouble:
    """One thing that fails: since when, how often, and what has been logged of it."""

    since: float = 0.0
    failures: int = 0
    unsaid: int = 0
    logged: dict[str, float] = field(default_factory=dict)  # error text to time, of the present trouble
    lines: list[float] = field(default_factory=list)  # times of lines, of earlier trouble as well


class Repeats:
    """Logs a failing thing when its error changes, then at most every ten minutes, and its recovery once.

    Something that fails and recovers all the time, or with ever new texts, gets ``MOST_LINES`` warnings in ten
    minutes at most; the next one tells how many failures were left out. Threads may share an object.
    """

    MOST_LINES = 6

    def __init__(self, clock: Callable[[], float] = time.monotonic, every: float = 600.0) -> None:
        self._clock = clock
        self._every = every
        self._lock = threading.Lock()
        self._troubles: dict[Hashable, _Trouble] = {}

    def failed(self, log: FilteringBoundLogger, key: Hashable, event: str, error: str = "", **fields: object) -> None:
        """A failure of ``key``. ``event`` and ``error`` decide what counts as the same one; ``fields`` may vary.

        One with ``exc_info`` is an error of oomwatch's own, and logged as one.
        """
        with self._lock:
            now = self._clock()
            trouble = self._troubles.setdefault(key, _Trouble())
            trouble.since = trouble.since if trouble.failures else now
            trouble.failures += 1
            trouble.lines = [at for at in trouble.lines if now - at < self._every]
            text = f"{event}: {error}"
            said = trouble.logged.get(text)
            if (said is not None and now - said < self._every) or len(trouble.lines) >= self.MOST_LINES:
                trouble.unsaid += 1
                return
            trouble.logged = {text: at for text, at in trouble.logged.items() if now - at < self._every}
            trouble.logged[text] = now
            trouble.lines.append(now)
            unsaid, trouble.unsaid = trouble.unsaid, 0
        if error:
            fields["error"] = error
        if unsaid:
            fields["not_logged"] = unsaid
        say = log.error if "exc_info" in fields else log.warning
        say(event, **fields)

    def recovered(self, log: FilteringBoundLogger, key: Hashable, event: str, **fields: object) -> None:
        """``key`` is fine again: logged where its failure was, with how many there were and for how many seconds."""
        with self._lock:
            trouble = self._troubles.get(key)
            if trouble is None or not trouble.failures:
                return
            failures, seconds, said = trouble.failures, self._clock() - trouble.since, bool(trouble.logged)
            trouble.failures = 0
            trouble.logged = {}
        if said:
            log.info(event, failures=failures, seconds=round(seconds, 3), **fields)

    def forget(self, key: Hashable) -> None:
        """``key`` is not watched any more."""
        with self._lock:
            self._troubles.pop(key, None)


class Defects:
    """Errors of oomwatch's own, which end nothing: counted, and logged with their traceback as Repeats does it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._repeats = Repeats()
        self.count = 0

    def met(self, log: FilteringBoundLogger, event: str, error: Exception, **fields: object) -> None:
        with self._lock:
            self.count += 1
        self._repeats.failed(log, (event, *sorted(fields.items())), event, repr(error), exc_info=error, **fields)
