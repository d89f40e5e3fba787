"""Colours and the words for numbers, the same on every dashboard.

The colours are Okabe and Ito's (2008), which people of every colour vision tell apart, on light and on dark. No colour
stands alone: a state is always written out as well.
"""

from __future__ import annotations

from collections.abc import Mapping

from grafana_foundation_sdk.models import dashboard

from oomwatch.verdicts import CATALOGUE

BLUE, SKY, GREEN = "#0072B2", "#56B4E9", "#009E73"
ORANGE, VERMILLION, PURPLE, YELLOW = "#E69F00", "#D55E00", "#CC79A7", "#F0E442"
GREY, LIGHT = "#8C8C8C", "#C8C8C8"

ORDER = (BLUE, ORANGE, GREEN, PURPLE, SKY, VERMILLION, GREY)
"""Which colour queries have that name none, so that neighbours differ in lightness too."""

PLAIN = "text"
"""Grafana's colour of text: for numbers that are neither good nor bad."""

KILLER_COLOURS: Mapping[str, str] = {"capacity": SKY, "fragmentation": PURPLE, "leak": ORANGE, "health": GREEN}

Words = Mapping[float, tuple[str, str]]
"""What numbers are shown as: a word, in a colour."""

UNKNOWN, NOT_WATCHED = -1, 4
STATES: Words = {
    UNKNOWN: ("unknown", GREY),
    0: ("clear", BLUE),
    1: ("info", SKY),
    2: ("ticket", ORANGE),
    3: ("page", VERMILLION),
    NOT_WATCHED: ("not watched", VERMILLION),
}
UP: Words = {0: ("no", VERMILLION), 1: ("yes", BLUE)}
VERDICT_COLOURS: Mapping[str, str] = {name: KILLER_COLOURS[entry.killer] for name, entry in CATALOGUE.items()}
HOLDER_COLOURS: Mapping[str, str] = {"engine": BLUE, "neighbour": GREEN, "unknown": YELLOW}
ROLE_COLOURS: Mapping[str, str] = {"api_server": SKY, "engine_core": ORANGE, "worker": BLUE, "other": GREY}
REASON_COLOURS: Mapping[str, str] = {"stop": BLUE, "length": SKY, "abort": ORANGE, "error": VERMILLION}
SOURCE_COLOURS: Mapping[str, str] = {
    "nvml": BLUE,
    "vllm": ORANGE,
    "host": GREEN,
    "discovery": PURPLE,
    "probe": SKY,
    "allocator": YELLOW,
    "log": GREY,
}
ERROR_COLOURS: Mapping[str, str] = {"GPU_IS_LOST": VERMILLION, "TIMEOUT": ORANGE, "NOT_SUPPORTED": GREY}
NOT_READ: Words = {-2: ("cannot be read", VERMILLION), -1: ("not supported", GREY)}


def mapping(words: Words) -> dashboard.ValueMap:
    """Numbers shown as words, in a colour."""
    return dashboard.ValueMap(
        options={
            f"{number:g}": dashboard.ValueMappingResult(text=text, color=colour, index=index)
            for index, (number, (text, colour)) in enumerate(words.items())
        }
    )


def nothing(text: str) -> dashboard.SpecialValueMap:
    """What stands in place of a number that is not there: in grey, not in the colour of what is well."""
    return dashboard.SpecialValueMap(
        options=dashboard.DashboardSpecialValueMapOptions(
            match=dashboard.SpecialValueMatch.NULL_AND_NAN,
            result=dashboard.ValueMappingResult(text=text, color=GREY),
        )
    )


def thresholds(*steps: tuple[float | None, str]) -> dashboard.ThresholdsConfig:
    """Colours from a value on; the first one's value is None."""
    return dashboard.ThresholdsConfig(
        mode=dashboard.ThresholdsMode.ABSOLUTE,
        steps=[dashboard.Threshold(value=value, color=colour) for value, colour in steps],
    )
