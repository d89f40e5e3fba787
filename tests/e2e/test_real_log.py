"""A real engine that refuses to start beside a daemon that is told nothing of it: its processes show the log."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.conftest import StartEngine
from tests.e2e.daemon import OomwatchDaemon, intervals
from tests.e2e.engine import BLOCK_TOKENS, MODEL_NAME, POOL_BLOCKS
from tests.e2e.processes import ServerError, wait_for

SECRET = "sk-f00dcafe-of-the-operator"
CONFIG = {
    "engine_logs": {"interval": "1s"},
    "intervals": intervals("1s"),
}


@pytest.fixture(scope="module")
def refused(start_vllm: StartEngine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OomwatchDaemon]:
    """A daemon that was there while an engine gave up because its pool holds no request of the longest length."""
    with OomwatchDaemon(tmp_path_factory.mktemp("oomwatch"), CONFIG) as daemon:
        with pytest.raises(ServerError):
            start_vllm(arguments=("--max-model-len=4096", f"--api-key={SECRET}"))
        yield daemon


@pytest.mark.real
@pytest.mark.timeout(400)
def test_its_refusal_is_read_to_the_verdict_and_the_length_that_fits(refused: OomwatchDaemon) -> None:
    def told(name: str) -> dict[str, Any]:
        return refused.verdict(name, engine=MODEL_NAME)

    verdict = wait_for(
        lambda: told("startup-refused"), lambda one: one["state"] == "ticket", 20, "the refusal is concluded"
    )
    evidence = verdict["evidence"]
    assert evidence["reason"] == "context_too_long"
    assert evidence["max_model_len"] == 4096
    assert evidence["largest_max_model_len"] == (POOL_BLOCKS - 1) * BLOCK_TOKENS  # vLLM keeps one block for itself
    assert any("--max-model-len" in action for action in verdict["advice"])
    assert told("startup-oom")["state"] == "clear"


@pytest.mark.real
def test_nothing_of_its_log_s_text_is_shown_anywhere(refused: OomwatchDaemon) -> None:
    shown = [refused.page().text, str(refused.status()), refused.log_path.read_text()]
    assert all(SECRET not in text for text in shown)
