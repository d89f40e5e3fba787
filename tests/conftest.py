"""What every test may use."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

CheckGolden = Callable[[Path, str], None]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden", action="store_true", help="write the expected outputs anew instead of comparing with them"
    )


@pytest.fixture
def check_golden(request: pytest.FixtureRequest) -> CheckGolden:
    """A function that compares a text with the file of the expected one, or writes it under --update-golden."""
    update = bool(request.config.getoption("--update-golden"))

    def check(path: Path, text: str) -> None:
        if update:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(text.encode())
            return
        assert path.is_file(), f"{path} is missing: make golden writes it"
        assert text == path.read_bytes().decode(), (
            f"differs from {path}: if it should, run make golden and review the diff"
        )

    return check
