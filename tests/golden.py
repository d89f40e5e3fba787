"""Expected outputs in files: compared byte for byte, written anew by --update-golden; the diff is the review."""

from __future__ import annotations

from pathlib import Path

import pytest

GOLDEN = Path(__file__).parent / "data" / "golden"


def assert_golden(path: Path, text: str, request: pytest.FixtureRequest) -> None:
    """``text`` is what the file holds; under --update-golden it becomes that."""
    if request.config.getoption("--update-golden"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode())
        return
    assert path.is_file(), f"{path} is missing: make golden writes it"
    assert text == path.read_bytes().decode(), f"differs from {path}: if it should, run make golden and review the diff"
