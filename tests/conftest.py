"""Options and fixtures that every test may use: golden files, the simulated driver library and its state."""

import os
from collections.abc import Callable, Generator, Sequence
from pathlib import Path

import pytest
from hypothesis import settings
from xdist.scheduler import LoadFileScheduling

from tests import golden
from tests.nvml_sim import Gpu, Option, Sim, build, compiler

MakeSim = Callable[..., Sim]

# How long an example takes on a busy machine says nothing of the code.
settings.register_profile("oomwatch", deadline=None)
settings.load_profile("oomwatch")


def pytest_addoption(parser: pytest.Parser) -> None:
    golden.add_option(parser)


class ByFile(LoadFileScheduling):  # type: ignore[misc]  # xdist has no types
    """Keeps together, beside the tests of a file, those that need the demo's stories: they are made once."""

    def _split_scope(self, nodeid: str) -> str:
        file: str = super()._split_scope(nodeid)
        return "grafana" if file.startswith("tests/grafana/") else file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> ByFile:
    return ByFile(config, log)


def _missing(what: str) -> None:
    """Skip, or fail where the run promises to have everything (OOMWATCH_TESTS_REQUIRE=all)."""
    if os.environ.get("OOMWATCH_TESTS_REQUIRE") == "all":
        pytest.fail(f"OOMWATCH_TESTS_REQUIRE=all, and {what}")
    pytest.skip(what)


@pytest.fixture(scope="session")
def nvml_variant(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Builds the simulated driver library as a driver of the given age; each variant is compiled once."""
    if compiler() is None:
        _missing("gcc is not installed, and the simulated driver library is compiled with it")
    directory = tmp_path_factory.mktemp("nvml")
    return lambda variant: build(directory, variant)


@pytest.fixture(scope="session")
def nvml_library(nvml_variant: Callable[[str], Path]) -> Path:
    """The simulated libnvidia-ml.so.1 of a current driver."""
    return nvml_variant("default")


@pytest.fixture
def make_sim(tmp_path: Path) -> Generator[MakeSim]:
    """Makes a simulated driver with the given GPUs (a number or a list); hung calls are let go after the test."""
    made: list[Sim] = []

    def make(
        gpus: int | Sequence[Gpu] = 2, *, driver_version: str = "550.163.01", options: Option = Option.NONE
    ) -> Sim:
        made.append(Sim(tmp_path / f"nvml-state-{len(made)}", gpus, driver_version=driver_version, options=options))
        return made[-1]

    yield make
    for sim in made:
        sim.close()


@pytest.fixture
def sim(make_sim: MakeSim) -> Sim:
    """A simulated driver with two idle GPUs of 80 GiB."""
    return make_sim()
