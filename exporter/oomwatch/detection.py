"""Settings of the detection: thresholds, for everything or for some; verdicts switched off; planned silence."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import datetime, time, timedelta, timezone, tzinfo
from fnmatch import fnmatchcase
from typing import Annotated, Any, Literal
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from pydantic import AfterValidator, Field, create_model

from oomwatch.detectors.base import Subject
from oomwatch.detectors.registry import KINDS
from oomwatch.detectors.registry import Kind as DetectorKind
from oomwatch.settings import Contradiction, Kind, Section, Texts, did_you_mean
from oomwatch.verdicts import CATALOGUE

Day = Literal["mon", "tue", "wed", "thu", "fri", "sat", "sun"]
_DAYS: tuple[Day, ...] = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")


def _checked_verdicts(value: tuple[str, ...]) -> tuple[str, ...]:
    for pattern in value:
        if not any(fnmatchcase(name, pattern) for name in CATALOGUE):
            hint = did_you_mean(pattern, CATALOGUE) or f" There are: {', '.join(CATALOGUE)}."
            raise ValueError(f'"{pattern}" is no verdict and fits none.{hint} "*" is all of them')
    return value


def _checked_moment(value: str) -> str:
    try:
        moment = datetime.fromisoformat(value.replace("Z", "+00:00"))
    except ValueError as error:
        raise ValueError("not a moment. Write it as 2026-11-30T02:00:00Z") from error
    if moment.tzinfo is None:
        raise ValueError("a moment without a time zone. Add Z for UTC, or an offset as +01:00")
    return value


def _checked_clock(value: str) -> str:
    try:
        clock = time.fromisoformat(value)
    except ValueError as error:
        raise ValueError("not a time of day. Write it as 02:00") from error
    if clock.tzinfo is not None:
        raise ValueError("a time of day with a time zone. Write it as 02:00, and the zone under zone")
    return value


def _checked_zone(value: str) -> str:
    try:
        _zone(value)
    except (ZoneInfoNotFoundError, ValueError, OSError) as error:
        raise ValueError("not a known time zone. Write it as Europe/Berlin, or UTC") from error
    return value


def _zone(name: str) -> tzinfo:
    """UTC is known even where the host has no tz database."""
    return timezone.utc if name == "UTC" else ZoneInfo(name)


Verdicts = Annotated[
    Texts, AfterValidator(_checked_verdicts), Kind("list of verdicts", "names of verdicts, with * and ? as in files")
]
Moment = Annotated[str, AfterValidator(_checked_moment), Kind("moment", "ISO 8601 with a time zone")]
Clock = Annotated[str, AfterValidator(_checked_clock), Kind("time of day", "such as 02:00 or 23:30:00")]
Zone = Annotated[str, AfterValidator(_checked_zone), Kind("time zone", "a name of the tz database")]
Days = Annotated[tuple[Day, ...], Kind("list of days", "mon, tue, wed, thu, fri, sat, sun")]
Pattern = Annotated[str, Kind("pattern", "with * and ? as in file names")]


def field_name(verdict: str) -> str:
    """The key of a verdict's thresholds: ``kv-block-leak`` is kv_block_leak."""
    return verdict.replace("-", "_")


def _thresholds() -> type[Section]:
    fields: dict[str, Any] = {
        field_name(kind.verdict): (
            kind.settings,
            Field(default=kind.settings(), description=f"For {kind.verdict}: {CATALOGUE[kind.verdict].says}."),
        )
        for kind in KINDS
    }
    model: type[Section] = create_model(
        "Thresholds", __base__=Section, __doc__="Thresholds and durations of each verdict.", **fields
    )
    return model


Thresholds = _thresholds()
"""A section made from the registry: one section of thresholds for each detector."""


class _Some(Section):
    """Which engines and devices something is about; what is left out is about all."""

    engine: Pattern | None = Field(default=None, description="Engines by name.")
    gpu: Pattern | None = Field(default=None, description="Devices or MIG slices by uuid.")

    def fits(self, subject: Subject) -> bool:
        """Whether ``subject`` is meant. A pattern for engines does not fit what is about a device alone."""
        return all(
            pattern is None or (value is not None and fnmatchcase(value, pattern))
            for pattern, value in ((self.engine, subject.engine), (self.gpu, subject.gpu))
        )


class OverrideConfig(_Some):
    """Other thresholds for some engines or devices; later ones win, and what is not given stays."""

    thresholds: Thresholds = Field(description="Only the keys that differ.")  # type: ignore[valid-type] # made above

    @classmethod
    def contradictions(cls, data: Mapping[str, Any]) -> Iterator[Contradiction]:
        if not data.get("engine") and not data.get("gpu"):
            yield Contradiction((), "engine or gpu is required. What is for all belongs in detection.thresholds")


class OffConfig(_Some):
    """Verdicts that are not to be concluded at all; they show as unknown, with this as the reason."""

    verdicts: Verdicts = Field(description="Which verdicts.")


class WindowConfig(_Some):
    """A planned silence: verdicts are concluded and shown, and do not alert. Once (start, end), or every week."""

    verdicts: Verdicts = Field(default=("*",), description="Which verdicts; all of them unless given.")
    reason: str = Field(default="maintenance", min_length=1, max_length=200, description="Shown wherever it holds.")
    start: Moment | None = Field(default=None, description="When it begins.")
    end: Moment | None = Field(default=None, description="When it ends.")
    days: Days = Field(default=_DAYS, description="Days on which a weekly one begins.")
    begins: Clock | None = Field(default=None, description="Time of day at which a weekly one begins.")
    ends: Clock | None = Field(default=None, description="Time of day at which it ends; earlier is the next day.")
    zone: Zone = Field(default="UTC", description="Time zone of begins and ends.")

    @classmethod
    def contradictions(cls, data: Mapping[str, Any]) -> Iterator[Contradiction]:
        once = [key for key in ("start", "end") if data.get(key)]
        weekly = [key for key in ("begins", "ends") if data.get(key)]
        if len(once) == 1 or len(weekly) == 1:
            yield Contradiction((), "half a window. Give start and end, or begins and ends")
        elif bool(once) == bool(weekly):
            yield Contradiction((), "give either start and end (once) or begins and ends (every week)")
        if len(once) == 2 and _ends_first(data["start"], data["end"]):
            yield Contradiction(("end",), "not later than start")

    def holds(self, t: float) -> bool:
        """Whether unix time ``t`` lies in it."""
        if self.start is not None and self.end is not None:
            return _unix(self.start) <= t < _unix(self.end)
        if self.begins is None or self.ends is None:
            return False
        begins, ends = time.fromisoformat(self.begins), time.fromisoformat(self.ends)
        here = datetime.fromtimestamp(t, timezone.utc).astimezone(_zone(self.zone))
        now = here.time()
        today, yesterday = _DAYS[here.weekday()], _DAYS[(here - timedelta(days=1)).weekday()]
        if begins < ends:
            return today in self.days and begins <= now < ends
        return (today in self.days and now >= begins) or (yesterday in self.days and now < ends)


class DetectionConfig(Section):
    """What is concluded, from which numbers on, and what stays quiet. detection.md says what each verdict means."""

    thresholds: Thresholds = Field(default=Thresholds(), description="For every engine and device.")  # type: ignore[valid-type] # made above
    overrides: tuple[OverrideConfig, ...] = Field(
        default=(), description="Other thresholds for some engines or devices."
    )
    off: tuple[OffConfig, ...] = Field(default=(), description="Verdicts that are switched off.")
    windows: tuple[WindowConfig, ...] = Field(default=(), description="Planned silence.")


class ConfiguredPolicy:
    """The configuration's word on detection, for the judge."""

    def __init__(self, config: DetectionConfig) -> None:
        self._config = config

    def settings(self, kind: DetectorKind, subject: Subject) -> Section | None:
        """The thresholds that hold for a subject; None where the verdict is switched off."""
        if self.is_off(kind.verdict, subject):
            return None
        name = field_name(kind.verdict)
        settings: Section = getattr(self._config.thresholds, name)
        for override in self._config.overrides:
            given: Section = getattr(override.thresholds, name)
            if override.fits(subject) and given.model_fields_set:
                changed = {key: getattr(given, key) for key in given.model_fields_set}
                settings = settings.model_copy(update=changed)
        return settings

    def is_off(self, verdict: str, subject: Subject) -> bool:
        """Whether a verdict about a subject is not to be concluded."""
        return any(off.fits(subject) and _names(off.verdicts, verdict) for off in self._config.off)

    def silence(self, verdict: str, subject: Subject, t: float) -> str:
        """Why a verdict is held back at ``t``; empty when it is not."""
        for window in self._config.windows:
            if window.fits(subject) and _names(window.verdicts, verdict) and window.holds(t):
                return window.reason
        return ""


def _names(patterns: tuple[str, ...], verdict: str) -> bool:
    return any(fnmatchcase(verdict, pattern) for pattern in patterns)


def _ends_first(start: object, end: object) -> bool:
    """Whether two moments are the wrong way round; what is no moment at all is reported by itself."""
    try:
        return _unix(str(end)) <= _unix(str(start))
    except ValueError:
        return False


def _unix(moment: str) -> float:
    return datetime.fromisoformat(moment.replace("Z", "+00:00")).timestamp()
