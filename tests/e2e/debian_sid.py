"""The newest of Debian's programs, beside the system's own: fetched once, never installed.

The packages are unpacked below `.cache` with apt's state kept in there too, so that neither the system's packages nor
its list of sources change.
"""

from __future__ import annotations

import fcntl
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
FOLDER = REPOSITORY / ".cache" / "prometheus-sid"
COMPOSE_FOLDER = REPOSITORY / ".cache" / "docker-compose-sid"
PACKAGES = ("prometheus", "promtool", "prometheus-alertmanager")
PROGRAMS = ("prometheus", "promtool", "prometheus-alertmanager", "amtool")
SOURCES = Path("/etc/apt/sources.list.d/debian.sources")
TIMEOUT_S = 90


class CannotFetch(RuntimeError):
    """The packages cannot be had here; the message says why."""


def sid_programs(folder: Path = FOLDER) -> Path:
    """The folder with Prometheus, Alertmanager and their tools."""
    return unpacked(folder, PACKAGES, "usr/bin", PROGRAMS)


def sid_compose(folder: Path = COMPOSE_FOLDER) -> Path:
    """Docker's compose plugin, which also runs by itself."""
    return unpacked(folder, ["docker-compose"], "usr/libexec/docker/cli-plugins", ["docker-compose"]) / "docker-compose"


def unpacked(folder: Path, packages: Sequence[str], where: str, expected: Sequence[str]) -> Path:
    """The folder ``where`` of the packages, which has the ``expected`` files; fetched if they are not there yet.

    One process fetches, others wait for it. Raises CannotFetch.
    """
    programs = folder / "root" / where
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "complete").exists():
            _fetch(folder, packages)
            missing = [name for name in expected if not (programs / name).is_file()]
            if missing:
                raise CannotFetch(f"the packages of sid do not have {', '.join(missing)}")
            (folder / "complete").touch()
    return programs


def _fetch(folder: Path, packages: Sequence[str]) -> None:
    if shutil.which("apt-get") is None or shutil.which("dpkg") is None:
        raise CannotFetch("this is no Debian system: apt-get and dpkg are needed to fetch sid's packages")
    for name in ("lists/partial", "archives/partial", "packages", "root"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    (folder / "status").touch()
    (folder / "sid.sources").write_text(sid_source(SOURCES), encoding="utf-8")
    options = {
        "Dir::Etc::sourcelist": folder / "sid.sources",
        "Dir::Etc::sourceparts": "/dev/null",
        "Dir::Etc::PreferencesParts": "/dev/null",
        "Dir::State::lists": folder / "lists",
        "Dir::State::status": folder / "status",
        "Dir::Cache": folder,
        "Dir::Cache::archives": folder / "archives",
        "APT::Get::List-Cleanup": "0",
        "APT::Sandbox::User": "root",
    }
    apt = ["apt-get", "-q", *(part for key, value in options.items() for part in ("-o", f"{key}={value}"))]
    _run([*apt, "update"], folder)
    _run([*apt, "download", *packages], folder / "packages")
    for package in (folder / "packages").glob("*.deb"):
        _run(["dpkg", "-x", str(package), str(folder / "root")], folder)
    for name in ("lists", "archives", "packages"):
        shutil.rmtree(folder / name)


def sid_source(path: Path) -> str:
    """The first entry of the system's own sources, for the suite sid."""
    if not path.is_file():
        raise CannotFetch(f"{path} is not there: sid's packages are fetched from where it says the system's come from")
    first = path.read_text(encoding="utf-8").strip().split("\n\n")[0]
    kept = [line for line in first.splitlines() if re.match(r"(Types|URIs|Signed-By):", line)]
    return "\n".join((*kept, "Suites: sid", "Components: main")) + "\n"


def _run(command: list[str], folder: Path) -> None:
    try:
        answer = subprocess.run(
            command,
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired as error:
        raise CannotFetch(f"{command[0]} did not end within {TIMEOUT_S} s") from error
    if answer.returncode:
        raise CannotFetch(f"{' '.join(command[:1])} failed: {(answer.stderr or answer.stdout).strip()[-500:]}")
