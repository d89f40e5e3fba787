"""Finds the programs that tests run for real. Without one the test is skipped, or fails where all must be there."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import NoReturn

import pytest

from tests.e2e import vllm_setup
from tests.e2e.debian_sid import CannotFetch, sid_programs

REQUIRE_VARIABLE = "OOMWATCH_TESTS_REQUIRE"
VERSIONS = ("installed", "newest")

_DEBIAN_PACKAGES = {
    "alertmanager": "prometheus-alertmanager",
    "amtool": "prometheus-alertmanager",
    "chromium": "chromium",
    "gcc": "gcc and libc6-dev",
    "prometheus": "prometheus",
    "promtool": "prometheus",
    "systemd-analyze": "systemd",
}
# Debian installs Alertmanager under the name of its package.
_OTHER_NAMES = {
    "alertmanager": ("prometheus-alertmanager",),
    "chromium": ("chromium-browser", "google-chrome", "google-chrome-stable"),
}


def find_tool(name: str) -> Path | None:
    """The program on PATH, also under the other names that distributions give it."""
    for candidate in (name, *_OTHER_NAMES.get(name, ())):
        found = shutil.which(candidate)
        if found is not None:
            return Path(found)
    return None


def require_tool(name: str) -> Path:
    """The program's path; a test that asks for a missing one is skipped, or fails under OOMWATCH_TESTS_REQUIRE=all."""
    found = find_tool(name)
    if found is None:
        package = _DEBIAN_PACKAGES.get(name)
        cannot_run(f"{name} is not on PATH" + (f": install {package} (Debian's name)" if package else ""))
    return found


def program(name: str, version: str) -> Path:
    """Prometheus, Alertmanager or a tool of theirs as the system has it, or the newest that Debian has."""
    if version == "installed":
        return require_tool(name)
    try:
        return sid_programs() / {"alertmanager": "prometheus-alertmanager"}.get(name, name)
    except CannotFetch as error:
        cannot_run(str(error))


def find_promtool() -> Path:
    return require_tool("promtool")


def find_chromium() -> Path:
    return require_tool("chromium")


def require_vllm() -> vllm_setup.VllmVenv:
    """The environment with the pinned vLLM; skips or fails like `require_tool` when it was not made."""
    path = vllm_setup.default_venv_path()
    venv = vllm_setup.installed(path)
    if venv is None:
        cannot_run(
            f"vLLM {vllm_setup.required_vllm_version()} is not installed in {path}: run python -m tests.e2e.vllm_setup"
        )
    return venv


def cannot_run(reason: str) -> NoReturn:
    """Ends the test as skipped, or as failed where OOMWATCH_TESTS_REQUIRE=all says that every tool must be there."""
    if os.environ.get(REQUIRE_VARIABLE) == "all":
        pytest.fail(f"{reason} ({REQUIRE_VARIABLE}=all)", pytrace=False)
    pytest.skip(reason)
