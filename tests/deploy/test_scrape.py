"""The scrape configurations to paste are ones that Prometheus takes."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import yaml

from oomwatch.config import DEFAULT_PORT
from tests.documents import REPOSITORY
from tests.e2e.tools import program

FOLDER = REPOSITORY / "deploy" / "prometheus"


# Debian's 2.42 is built without the discovery of Kubernetes.
@pytest.mark.parametrize(
    ("name", "version"),
    [("scrape.yml", "installed"), ("scrape.yml", "newest"), ("scrape-kubernetes.yml", "newest")],
)
def test_prometheus_accepts_it(name: str, version: str) -> None:
    accepts(FOLDER / name, version)


def test_what_it_shows_for_tls_and_a_password_is_accepted_too(tmp_path: Path) -> None:
    lines = (FOLDER / "scrape.yml").read_text(encoding="utf-8").splitlines()
    shown = [re.sub(r"^    # (?=\w+:|  )", "    ", line) for line in lines if "Where the daemons have" not in line]
    assert "    basic_auth:" in shown
    (tmp_path / "scrape.yml").write_text("\n".join(shown), encoding="utf-8")
    accepts(tmp_path / "scrape.yml", "installed")


@pytest.mark.parametrize("name", ["scrape.yml", "scrape-kubernetes.yml"])
def test_the_job_and_the_port_are_the_daemons(name: str) -> None:
    text = (FOLDER / name).read_text(encoding="utf-8")
    (job,) = yaml.safe_load(text)["scrape_configs"]
    assert "oomwatch" in job["job_name"]
    assert set(re.findall(r"\b\d{5}\b", text)) == {str(DEFAULT_PORT)}


def accepts(path: Path, version: str) -> None:
    command = [str(program("promtool", version)), "check", "config", "--syntax-only", str(path)]
    answer = subprocess.run(command, check=False, capture_output=True, text=True, timeout=30)
    assert answer.returncode == 0, answer.stdout + answer.stderr
