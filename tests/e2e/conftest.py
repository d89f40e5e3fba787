"""Fixtures that run the real programs: a vLLM server on the CPU, a Prometheus server."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Protocol

import pytest

from tests.e2e.engine import START_TIMEOUT_S, VllmEngine
from tests.e2e.prometheus import PrometheusServer
from tests.e2e.tools import require_vllm
from tests.e2e.vllm_setup import VllmVenv

StartPrometheus = Callable[[Mapping[str, object]], PrometheusServer]


class StartEngine(Protocol):
    """Starts an engine; takes VllmEngine's arguments of the same names."""

    def __call__(
        self,
        *,
        arguments: tuple[str, ...] = (),
        environment: Mapping[str, str] | None = None,
        plugins: tuple[Path, ...] = (),
        python_path: tuple[Path, ...] = (),
        start_timeout_s: float = START_TIMEOUT_S,
    ) -> VllmEngine: ...


@pytest.fixture(scope="session")
def vllm_venv() -> VllmVenv:
    return require_vllm()


@pytest.fixture(scope="module")
def start_vllm(vllm_venv: VllmVenv, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartEngine]:
    """A function that starts an engine; all are stopped after the module's last test."""
    with contextlib.ExitStack() as running:

        def start(
            *,
            arguments: tuple[str, ...] = (),
            environment: Mapping[str, str] | None = None,
            plugins: tuple[Path, ...] = (),
            python_path: tuple[Path, ...] = (),
            start_timeout_s: float = START_TIMEOUT_S,
        ) -> VllmEngine:
            engine = VllmEngine(
                vllm_venv,
                tmp_path_factory.mktemp("vllm"),
                arguments=arguments,
                environment=environment,
                plugins=plugins,
                python_path=python_path,
                start_timeout_s=start_timeout_s,
            )
            return running.enter_context(engine)

        yield start


@pytest.fixture(scope="module")
def vllm_engine(start_vllm: StartEngine) -> VllmEngine:
    """One engine with a pool of 33 blocks, shared by the tests of a module."""
    return start_vllm()


@pytest.fixture
def start_prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartPrometheus]:
    """A function that starts Prometheus with a configuration (see `scrape_config`); all are stopped after the test."""
    with contextlib.ExitStack() as running:

        def start(config: Mapping[str, object]) -> PrometheusServer:
            return running.enter_context(PrometheusServer(tmp_path_factory.mktemp("prometheus"), config))

        yield start
