"""Reads a page of metrics: bytes and a content type in, the samples that this package knows out.

prometheus_client's parsers walk each line by character: 40 ms for a page of vLLM's (60 kB), 3 to 7 ms where only the
known lines reach them, which then leaves the rest unchecked. Here one regular expression checks each line, and labels
are taken apart only where the name is known: 2 to 3 ms for the whole page, a third less once its series have been seen.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from oomwatch.sources.vllm.names import LORA_REQUESTS, SAMPLE_NAMES, is_vllm

_NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
_STRING = r'"[^"\\]*(?:\\.[^"\\]*)*"'
_LABEL = rf"(?:[a-zA-Z_][a-zA-Z0-9_]*[ \t]*=[ \t]*{_STRING}|{_STRING}(?:[ \t]*=[ \t]*{_STRING})?)[ \t]*"
_LABELS = rf"\{{[ \t]*(?:{_LABEL}(?:,[ \t]*{_LABEL})*,?[ \t]*)?\}}"
_NUMBER = r"[+-]?(?:[0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?|\.[0-9]+(?:[eE][+-]?[0-9]+)?|[iI]nf(?:inity)?|[nN]a[nN])"
_SAMPLE = rf"[ \t]*({_NAME})?[ \t]*(?:({_LABELS})[ \t]*|[ \t])[ \t]*({_NUMBER})(?:[ \t]+{_NUMBER})?"
_TEXT_LINE = re.compile(rf"{_SAMPLE}[ \t]*")
_OPENMETRICS_LINE = re.compile(rf"{_SAMPLE}(?:[ \t]+#[ \t]+{_LABELS}[ \t]+{_NUMBER}(?:[ \t]+{_NUMBER})?)?[ \t]*")
# The same for a line as vLLM's servers write it, in a third of the time: no escapes, no odd spaces.
_USUAL = rf'({_NAME})(\{{(?:[a-zA-Z_][a-zA-Z0-9_]*="[^"\\]*"(?:,(?=[a-zA-Z_])|(?=\}})))*\}})?'
_USUAL_LINE = re.compile(rf"{_USUAL} ({_NUMBER})")
_USUAL_SERIES = re.compile(_USUAL)
_NUMBER_ALONE = re.compile(_NUMBER)
_LONGEST_REMEMBERED = 512  # characters of a line
_LONGEST_COUNT = 9  # digits
COUNTED_ADAPTERS = "adapters"  # the label in the place of adapters' names
_ONE_LABEL = re.compile(rf"(?:([a-zA-Z_][a-zA-Z0-9_]*)|({_STRING}))(?:[ \t]*=[ \t]*({_STRING}))?")
_SERIES = re.compile(rf"({_NAME})?({_LABELS})?")
_ESCAPE = re.compile(r'\\([\\n"])')
_UNESCAPED = {"\\": "\\", "n": "\n", '"': '"'}


class PageError(Exception):
    """The page cannot be used. ``state`` is one of observations.SCRAPE_STATES; the message says what and where."""

    def __init__(self, state: str, message: str) -> None:
        super().__init__(message)
        self.state = state


class Sample(NamedTuple):
    """One value. ``series`` is the text as exposed, ``name`` the spelling of the table of names."""

    series: str
    name: str
    labels: Mapping[str, str]
    value: float

    @property
    def identity(self) -> tuple[str, frozenset[tuple[str, str]]]:
        """The same for the same series, in whatever order its labels are written."""
        return self.name, frozenset(self.labels.items())


@dataclass(frozen=True)
class Page:
    """What a page holds for us: the known samples, and the names of everything that it exposes.

    NaN and infinities stand apart, so that whoever asks for such a series learns more than that there is none.
    """

    samples: tuple[Sample, ...] = ()
    names: frozenset[str] = field(default_factory=frozenset)
    not_finite: tuple[Sample, ...] = ()

    @property
    def of_vllm(self) -> bool:
        """Whether the page declares or exposes at least one of vLLM's own families."""
        return any(is_vllm(name) for name in self.names)


def read(body: bytes, content_type: str | None = None) -> Page:
    """Read a whole page in the Prometheus text format (0.0.4, 1.0.0) or in OpenMetrics (by its content type).

    A series that comes twice with one value counts once; with two values it is an error, as is a malformed line
    anywhere on the page. Raises PageError.
    """
    openmetrics = _is_openmetrics(body, content_type)
    text = _decode(body).replace("\r\n", "\n")
    lines = text.split("\n")
    if lines.pop():
        if not (openmetrics and text.endswith("\n# EOF")):
            raise PageError(
                "truncated", f"the page ends in the middle of line {len(lines) + 1}, after {len(body)} bytes"
            )
    elif openmetrics and (not lines or lines.pop() != "# EOF"):
        raise PageError("truncated", f"the page ends after {len(body)} bytes without OpenMetrics' closing # EOF")
    return _read_lines(lines, _OPENMETRICS_LINE if openmetrics else _TEXT_LINE, openmetrics)


def _is_openmetrics(body: bytes, content_type: str | None) -> bool:
    kind = (content_type or "").partition(";")[0].strip().lower()
    if kind == "application/openmetrics-text":
        return True
    if kind == "text/html" or body[:256].lstrip()[:1] == b"<":
        raise PageError("not_metrics", "the answer is a web page (HTML), not metrics: check the port and the path")
    if kind not in ("", "text/plain"):
        raise PageError("not_metrics", f"the answer's content type is {kind[:80]!r}, not a Prometheus text format")
    return False


def _decode(body: bytes) -> str:
    try:
        return body.decode("utf-8")
    except UnicodeDecodeError as error:
        line = body.count(b"\n", 0, error.start) + 1
        raise PageError(
            "not_metrics", f"byte {error.start} (line {line}) is not UTF-8 text: the answer is no page of metrics"
        ) from None


def _read_lines(lines: list[str], grammar: re.Pattern[str], openmetrics: bool) -> Page:
    known: list[Sample] = []
    names: set[str] = set()
    for number, line in enumerate(lines, 1):
        if line.startswith("#"):
            words = line.split(None, 3)
            if len(words) > 2 and words[1] == "TYPE":
                names.add(words[2].strip('"'))
            elif openmetrics and line == "# EOF":
                raise PageError("not_metrics", f"line {number} is # EOF, but the page goes on: two pages in one")
            continue
        if len(line) <= _LONGEST_REMEMBERED:
            series, _, number_text = line.rpartition(" ")
            stranger = _stranger(series)
            if stranger and _NUMBER_ALONE.fullmatch(number_text):
                names.add(stranger)
                continue
        match = _USUAL_LINE.fullmatch(line) or grammar.fullmatch(line)
        if match is None:
            if not line.strip(" \t"):
                continue
            raise PageError("not_metrics", f"line {number} is not in the Prometheus text format: {_shown(line)}")
        name, labels, value = match.groups()
        if name is None or name in SAMPLE_NAMES:
            try:
                sample = _sample(name, labels, float(value))
            except ValueError as error:
                raise PageError("not_metrics", f"line {number}: {error}: {_shown(line)}") from None
            names.add(sample.name)
            if sample.name in SAMPLE_NAMES:
                known.append(sample)
        else:
            names.add(name)
    return _page(known, names)


def _page(known: list[Sample], names: set[str]) -> Page:
    finite = [sample for sample in known if math.isfinite(sample.value)]
    # What a series of adapters has to say is in its labels, and these are counted, never kept.
    odd = (s for s in known if s.name != LORA_REQUESTS and not math.isfinite(s.value))
    return Page(_unique(finite), frozenset(names), tuple({sample.identity: sample for sample in odd}.values()))


@lru_cache(16384)
def _stranger(series: str) -> str:
    """The name in a series of the usual form that is none of ours; else empty.

    Nine in ten lines of a page are such, buckets mostly, and the same ones at each scrape: only their number is new.
    """
    match = _USUAL_SERIES.fullmatch(series)
    return match[1] if match is not None and match[1] not in SAMPLE_NAMES else ""


def _sample(name: str | None, braces: str | None, value: float) -> Sample:
    """Take a matched line apart. Raises ValueError where a label is given twice or the metric has no name."""
    # Sets of adapters are so many that they would push everything else out.
    remembered = len(braces or "") <= _LONGEST_REMEMBERED and SAMPLE_NAMES.get(name or "") != LORA_REQUESTS
    named, labels = _remembered_parts(name, braces) if remembered else _parts(name, braces)
    return Sample(named + (braces or ""), SAMPLE_NAMES.get(named, named), labels, value)


def _parts(name: str | None, braces: str | None) -> tuple[str, Mapping[str, str]]:
    labels: dict[str, str] = {}
    if braces:
        for bare, quoted, text in _ONE_LABEL.findall(braces):
            if not text:
                if name is not None:
                    raise ValueError("the metric is named twice")
                name = _unquote(quoted)
                continue
            label = bare or _unquote(quoted)
            if label in labels:
                raise ValueError(f"label {label!r} is given twice")
            labels[label] = _unquote(text)
    if not name:
        raise ValueError("the metric has no name")
    return name, labels


_remembered_parts = lru_cache(4096)(_parts)


def _unquote(text: str) -> str:
    inner = text[1:-1]
    return _ESCAPE.sub(lambda match: _UNESCAPED[match[1]], inner) if "\\" in inner else inner


def _shown(line: str) -> str:
    """The beginning of a line for a message; nothing of one that may have names of adapters."""
    return f"a line of {LORA_REQUESTS}" if "lora_requests_info" in line else repr(line[:80])


def _unique(samples: list[Sample]) -> tuple[Sample, ...]:
    first: dict[tuple[str, frozenset[tuple[str, str]]], Sample] = {}
    for sample in _with_adapters_counted(samples):
        earlier = first.setdefault(sample.identity, sample)
        if earlier.value != sample.value:
            raise PageError(
                "duplicate_series",
                f"{sample.series[:200]} comes twice, with the values {earlier.value:g} and {sample.value:g}: "
                "two servers seem to write one page",
            )
    return tuple(first.values())


def _with_adapters_counted(samples: list[Sample]) -> list[Sample]:
    """The samples, all those of LoRA adapters as one that counts them: their names are the tenants', and end here."""
    rest = [sample for sample in samples if sample.name != LORA_REQUESTS]
    if len(rest) == len(samples):
        return samples
    found = [sample.labels for sample in samples if sample.name == LORA_REQUESTS]
    names = {name for labels in found for name in labels.get("running_lora_adapters", "").split(",") if name}
    seen = max([len(names), *_whole_numbers(found, COUNTED_ADAPTERS)])
    slots = max(_whole_numbers(found, "max_lora"), default=None)
    labels = {} if slots is None else {"max_lora": str(slots)}
    labels[COUNTED_ADAPTERS] = str(seen)
    shown = ",".join(f'{label}="{value}"' for label, value in labels.items())
    return [*rest, Sample(f"{LORA_REQUESTS}{{{shown}}}", LORA_REQUESTS, labels, 1.0)]


def _whole_numbers(labelled: list[Mapping[str, str]], label: str) -> list[int]:
    texts = (labels.get(label, "") for labels in labelled)
    return [int(text) for text in texts if text.isdecimal() and len(text) <= _LONGEST_COUNT]


def samples_for_recording(page: Page) -> dict[str, float]:
    """The known samples as recordings hold them: ``name{label="value",…}`` to the value.

    Recordings are JSON, which has no NaN: a series that was not finite is one that is not there.
    """
    return {sample.series: sample.value for sample in page.samples}


def samples_from_recording(recorded: Mapping[str, float]) -> Page:
    """The page that a recording's samples stand for; what this version does not know is left out.

    Raises PageError for a key that is no series, and for a series that comes twice with different values.
    """
    known: list[Sample] = []
    names: set[str] = set()
    for series, value in recorded.items():
        match = _SERIES.fullmatch(series)
        try:
            if match is None:
                raise ValueError("this is no series")
            sample = _sample(match[1], match[2], float(value))
        except ValueError as error:
            raise PageError("not_metrics", f"{error}: {_shown(series)}") from None
        names.add(sample.name)
        if sample.name in SAMPLE_NAMES:
            known.append(sample)
    return _page(known, names)
