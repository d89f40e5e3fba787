"""The project's files agree with one another, and what is built from them is complete."""

from __future__ import annotations

import ast
import functools
import importlib
import io
import os
import re
import shutil
import subprocess
import sys
import tokenize
import venv
import zipfile
from collections.abc import Iterator
from email.message import Message
from email.parser import Parser
from importlib import metadata
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from packaging.requirements import Requirement

import oomwatch
from tests.documents import (
    REPOSITORY,
    Command,
    local_links,
    markdown_files,
    name_of,
    shown_commands,
    tracked_files,
    tracked_texts,
)

PACKAGE = REPOSITORY / "exporter" / "oomwatch"

# Lists of exact files: with the addresses they came from they would tie the project to one registry.
LOCK_FILES = frozenset(
    {
        "Pipfile.lock",
        "npm-shrinkwrap.json",
        "package-lock.json",
        "pdm.lock",
        "poetry.lock",
        "pnpm-lock.yaml",
        "pylock.toml",
        "uv.lock",
        "yarn.lock",
    }
)


def commands(program: str) -> list[Command]:
    return sorted({command for path in markdown_files() for command in shown_commands(path, program)}, key=str)


class TestMakefile:
    def test_clean_removes_what_python_left_in_each_folder_of_ours_and_keeps_the_cache(self, tmp_path: Path) -> None:
        shutil.copy(REPOSITORY / "Makefile", tmp_path)
        folders = {path.relative_to(REPOSITORY).parts[0] for path in tracked_files() if path.suffix == ".py"}
        for folder in {".cache", *folders}:
            (tmp_path / folder / "inner" / "__pycache__").mkdir(parents=True)
        subprocess.run(["make", "clean"], cwd=tmp_path, check=True, capture_output=True)
        assert list(tmp_path.rglob("__pycache__")) == [tmp_path / ".cache" / "inner" / "__pycache__"]


class TestDocuments:
    def test_the_readme_begins_with_how_to_run_and_how_to_test(self) -> None:
        first_two = list(shown_commands(REPOSITORY / "README.md", "make"))[:2]
        assert [command.arguments for command in first_two] == [("run",), ("test",)]

    @pytest.mark.parametrize("command", commands("make"), ids=str)
    def test_a_make_command_names_a_target(self, command: Command) -> None:
        targets = set(re.findall(r"^([a-z]+):", (REPOSITORY / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
        assert {word for word in command.arguments if "=" not in word} <= targets

    @pytest.mark.parametrize("command", commands("oomwatch"), ids=str)
    def test_an_oomwatch_command_is_one_the_program_knows(self, command: Command) -> None:
        result = CliRunner().invoke(main_command(), arguments_with_help(command.arguments))
        assert result.exit_code == 0, result.output

    @pytest.mark.parametrize("document", markdown_files(), ids=name_of)
    def test_links_to_files_of_the_project_lead_somewhere(self, document: Path) -> None:
        assert [target for target in local_links(document) if not (document.parent / target).exists()] == []


def main_command() -> click.Command:
    main = importlib.import_module("oomwatch.cli").main
    assert isinstance(main, click.Command)
    return main


def arguments_with_help(arguments: tuple[str, ...]) -> list[str]:
    """--help right after the last subcommand: everything is parsed, nothing is run."""
    command: click.Command = main_command()
    position = 0
    for word in arguments:
        if not isinstance(command, click.Group):
            break
        position += 1
        command = command.commands.get(word, command)
    return [*arguments[:position], "--help", *arguments[position:]]


class TestWhatIsCommitted:
    def test_no_file_names_a_package_registry(self) -> None:
        pattern = re.compile("|".join(re.escape(host) for host in registry_hosts()))
        assert [f"{name}: {hit}" for name, text in tracked_texts() for hit in pattern.findall(text)] == []

    def test_no_file_names_a_path_of_one_machine(self) -> None:
        folders = "|".join(("home", "root", "work", "Users"))
        pattern = re.compile(rf"(?<![\w.<>*-])/(?:{folders})/[\w.-]+")
        assert [f"{name}: {hit}" for name, text in tracked_texts() for hit in pattern.findall(text)] == []

    def test_no_lock_file_records_download_addresses(self) -> None:
        locks = [path for path in tracked_files() if path.name in LOCK_FILES]
        recorded = [
            f"{name_of(path)}: {line.strip()}"
            for path in locks
            for line in path.read_text("utf-8").splitlines()
            if '"resolved"' in line or re.search(r"://\S+(/-/|\.(tgz|whl|tar\.gz))|://(registry|files|pypi)\b", line)
        ]
        assert recorded == []

    def test_every_suppression_of_a_check_gives_its_reason(self) -> None:
        assert [place for path in tracked_files() if path.suffix == ".py" for place in bare_suppressions(path)] == []

    @pytest.mark.parametrize(
        ("comment", "is_bare"),
        [
            ("# type: ignore[misc]", True),
            ("# noqa: PLR0913", True),
            ("# type: ignore[misc]  # noqa: PLR0913", True),
            ("# type: ignore[misc]  # the stub lacks this class", False),
            ("# noqa: B008 click wants the call in the signature", False),
            ("# an ordinary comment", False),
        ],
    )
    def test_a_suppression_is_bare_without_words_after_it(self, comment: str, is_bare: bool) -> None:
        assert is_bare_suppression(comment) == is_bare

    def test_the_script_of_ci_can_be_executed(self) -> None:
        script = REPOSITORY / ".ci" / "run"
        assert os.access(script, os.X_OK)
        subprocess.run(["bash", "-n", str(script)], check=True, timeout=10)


@functools.cache
def registry_hosts() -> frozenset[str]:
    """The hosts of the public registries and of those that this machine's pip, npm and apt are told to use."""
    settings = [
        " ".join(value for name, value in os.environ.items() if name.startswith(("PIP_", "npm_config_", "UV_")))
    ]
    settings.append(output_of([sys.executable, "-m", "pip", "config", "list"]))
    if shutil.which("npm"):
        settings.append(output_of(["npm", "config", "get", "registry"]))
    apt = Path("/etc/apt")
    sources = (apt / "sources.list", *apt.glob("sources.list.d/*"))
    settings += [path.read_text(encoding="utf-8") for path in sources if path.is_file()]
    configured = re.findall(r"https?://(?:[^/@\s'\"]+@)?([^/:\s'\"]+)", "\n".join(settings))
    # In parts, so that this file names none of them either.
    public = [("pypi", "org"), ("pythonhosted", "org"), ("npmjs", "org"), ("npmjs", "com"), ("deb", "debian", "org")]
    return frozenset(configured) - {"localhost", "127.0.0.1"} | {".".join(parts) for parts in public}


def output_of(command: list[str]) -> str:
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=60, cwd="/").stdout


def bare_suppressions(path: Path) -> Iterator[str]:
    for token in tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline):
        if token.type == tokenize.COMMENT and is_bare_suppression(token.string):
            yield f"{name_of(path)}:{token.start[0]}: {token.string}"


def is_bare_suppression(comment: str) -> bool:
    rest, suppressions = re.subn(r"type:\s*ignore(\[[^\]]*\])?|noqa(:\s*[A-Z]+\d+(,\s*[A-Z]+\d+)*)?", "", comment)
    return suppressions > 0 and len(re.findall(r"\w+", rest)) < 2


class TestVersions:
    def test_the_installed_distribution_has_the_version_of_the_source(self) -> None:
        assert metadata.version("oomwatch") == oomwatch.__version__

    def test_the_changelog_tells_of_this_version_first(self) -> None:
        changelog = (REPOSITORY / "CHANGELOG.md").read_text(encoding="utf-8")
        versions = re.findall(r"^(?:## \[|To be released as )(\d+\.\d+\.\d+)", changelog, re.MULTILINE)
        assert versions[:1] == [oomwatch.__version__]

    def test_every_dependency_is_pinned_to_a_version_that_it_allows(self) -> None:
        pins = pinned_versions()
        for text in metadata.requires("oomwatch") or []:
            requirement = Requirement(text)
            assert pins[normalised(requirement.name)], f"{requirement.name} has no pin in constraints.txt"
            for version in pins[normalised(requirement.name)]:
                assert requirement.specifier.contains(version), f"{requirement} does not allow the pinned {version}"


def pinned_versions() -> dict[str, list[str]]:
    """The pins of constraints.txt by name; a package may have one for older Pythons. A line of another form fails."""
    pins: dict[str, list[str]] = {}
    for line in (REPOSITORY / "constraints.txt").read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            pin = re.fullmatch(r"([\w.-]+)==([\w.]+)(?: ; python_version [<>=]+ \"[\d.]+\")?", line)
            assert pin, f"constraints.txt: not NAME==VERSION: {line}"
            pins.setdefault(normalised(pin[1]), []).append(pin[2])
    return pins


def normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_every_folder_with_python_code_is_type_checked() -> None:
    settings = (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8")
    (checked,) = re.findall(r"^files = (\[.*\])$", settings, re.MULTILINE)
    folders = {name_of(path).partition("/")[0] for path in tracked_files() if path.suffix == ".py"}
    assert folders == set(ast.literal_eval(checked))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from what git tracks, so that nothing is in it by the luck of this working tree."""
    source, built = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("built")
    for path in tracked_files():
        if not name_of(path).startswith("tests/"):
            copy = source / path.relative_to(REPOSITORY)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, copy)
    pip("wheel", "--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir", str(built), str(source))
    (wheel,) = built.glob("*.whl")
    return wheel


def pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments]
    subprocess.run(command, check=True, timeout=100)


class TestWheel:
    def test_it_holds_every_file_of_the_package(self, wheel: Path) -> None:
        shipped = set(zipfile.ZipFile(wheel).namelist())
        tracked = {
            path.relative_to(PACKAGE.parent).as_posix() for path in tracked_files() if path.is_relative_to(PACKAGE)
        }
        assert "oomwatch/py.typed" in tracked
        assert {name for name in shipped if ".dist-info/" not in name} == tracked

    def test_it_says_who_may_use_it_and_on_which_python(self, wheel: Path) -> None:
        described = description(wheel)
        assert described["License-Expression"] == "Apache-2.0"
        assert described["License-File"] == "LICENSE"
        assert described["Requires-Python"] == ">=3.10"
        assert member(wheel, "licenses/LICENSE") == (REPOSITORY / "LICENSE").read_text(encoding="utf-8")

    def test_installed_elsewhere_it_brings_the_command(self, wheel: Path, tmp_path: Path) -> None:
        venv.create(tmp_path, with_pip=False, symlinks=True)
        python = tmp_path / "bin" / "python"
        pip("--python", str(python), "install", "--no-deps", "--no-index", str(wheel))
        # The dependencies come from this environment, oomwatch itself from the new one: its folder comes first.
        (own,) = tmp_path.glob("lib/python*/site-packages")
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(own), *sys.path[1:]))}
        answer = subprocess.run(
            [tmp_path / "bin" / "oomwatch", "--version"],
            cwd=tmp_path,
            env=environment,
            check=False,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert answer.returncode == 0, answer.stderr
        assert oomwatch.__version__ in answer.stdout


def member(wheel: Path, name: str) -> str:
    return zipfile.ZipFile(wheel).read(f"oomwatch-{oomwatch.__version__}.dist-info/{name}").decode()


def description(wheel: Path) -> Message:
    return Parser().parsestr(member(wheel, "METADATA"))
