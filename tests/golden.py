"""Golden files: what a test expects, kept beside the data; ``pytest --update-golden`` writes them anew, to be read."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from oomwatch.observations import Absent

GOLDEN = Path(__file__).parent / "data" / "golden"
OPTION = "--update-golden"


def add_option(parser: pytest.Parser) -> None:
    parser.addoption(OPTION, action="store_true", help="write the golden files anew instead of comparing with them")


def check(config: pytest.Config, path: Path, found: object) -> None:
    """Compare with the JSON file at ``path``, or write it when asked to."""
    text = json.dumps(plain(found), indent=1, allow_nan=False) + "\n"
    if config.getoption(OPTION):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert path.is_file(), f"{path} is missing: write it with pytest {OPTION} and look at it"
    assert json.loads(text) == json.loads(path.read_text())


def assert_golden(path: Path, text: str, request: pytest.FixtureRequest) -> None:
    """Compare with the text file at ``path`` byte for byte, or write it when asked to."""
    if request.config.getoption(OPTION):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode())
    assert path.is_file(), f"{path} is missing: write it with pytest {OPTION} and look at it"
    assert text == path.read_bytes().decode(), f"differs from {path}: should it, write it with pytest {OPTION}"


def plain(value: object) -> Any:
    """An observation as JSON: absent values as ``{"absent": reason}``, histograms on one line, whole floats short."""
    if isinstance(value, Absent):
        return {"absent": value.reason}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, tuple) and value and all(isinstance(item, tuple) and len(item) == 2 for item in value):
        return " ".join(f"{bound:g}:{count:g}" for bound, count in value)
    if isinstance(value, (list, tuple, frozenset)):
        return [plain(item) for item in value]
    if isinstance(value, float):
        return int(value) if math.isfinite(value) and value.is_integer() else value
    return value
