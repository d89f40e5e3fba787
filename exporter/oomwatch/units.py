"""Numbers as people read them. Prometheus and the JSON API get base units instead."""

from __future__ import annotations

import math
from datetime import datetime, timezone

_SIZES = ((1024**4, "TiB"), (1024**3, "GiB"), (1024**2, "MiB"), (1024, "KiB"))


def size(value: float) -> str:
    """Bytes in binary units with three digits or so: ``79.6 GiB``, ``512 MiB``, ``17 bytes``."""
    for unit, name in _SIZES:
        # What would round to 1024 of a unit is one of the next.
        if abs(value) >= unit - unit / 2048:
            return f"{_short(value / unit)} {name}"
    return "1 byte" if value == 1 else f"{value:.0f} bytes"


def ratio(value: float) -> str:
    """A share of 1 in percent; only nothing is 0% and only everything is 100%."""
    if 0 < value < 0.001:
        return "<0.1%"
    if 0.999 < value < 1:
        return ">99.9%"
    return f"{_short(value * 100)}%"


def count(value: float) -> str:
    """A number of things with separated thousands: ``1,234,567``."""
    return f"{value:,.0f}" if math.isfinite(value) and float(value).is_integer() else f"{value:,.1f}"


def duration(seconds: float) -> str:
    """Seconds in at most two units: ``4 ms``, ``12 s``, ``3 min 5 s``, ``2 h 10 min``, ``5 d 3 h``."""
    if seconds < 0:
        return f"-{duration(-seconds)}"
    if not seconds:
        return "0 s"
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 9.95:
        return f"{seconds:.1f}".removesuffix(".0") + " s"
    whole = round(seconds)
    for unit, name, part, part_name in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= unit:
            rest = whole % unit // part
            return f"{whole // unit} {name} {rest} {part_name}" if rest else f"{whole // unit} {name}"
    return f"{whole} s"


def ago(t: float, now: float) -> str:
    """How long before ``now`` unix time ``t`` was; clocks that disagree a little give ``just now``."""
    seconds = now - t
    if seconds < -1:
        return f"in {duration(-seconds)}"
    return "just now" if seconds < 1 else f"{duration(math.floor(seconds))} ago"


def moment(t: float) -> str:
    """Unix time as ``2026-09-21 14:13:20 UTC``."""
    return f"{datetime.fromtimestamp(t, timezone.utc):%Y-%m-%d %H:%M:%S} UTC"


def _short(value: float) -> str:
    """Three digits at most, without a useless zero behind the point."""
    decimals = 0 if abs(value) >= 99.95 else 1
    text = f"{value:.{decimals}f}"
    return text.removesuffix(".0") if decimals else text
