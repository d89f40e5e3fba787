"""One token asked of an engine: what counts as its word, and what does not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from oomwatch.observations import Observation, ProbeResult, SourceRun
from oomwatch.sources.vllm.probe import EngineProbe
from oomwatch.sources.vllm.transport import ScrapeOptions
from tests.sources.vllm.servers import Answer, Engine, Request

ANSWER = json.dumps({"choices": [{"text": " a"}]}).encode()


def probed(answer: Answer, options: ScrapeOptions | None = None) -> list[Observation]:
    """What one probe of a server that answers so publishes."""
    published: list[Observation] = []
    with Engine(answer) as server:
        ask_once(server.url, published, options)
    return published


def ask_once(url: str, published: list[Observation], options: ScrapeOptions | None = None) -> None:
    probe = EngineProbe("llm", url, "tiny", options or ScrapeOptions(timeout=5), published.append, clock=lambda: 7.0)
    probe.probe()
    probe.close()


def result(observations: list[Observation]) -> ProbeResult | None:
    found = [o for o in observations if isinstance(o, ProbeResult)]
    assert len(found) <= 1
    return found[0] if found else None


def run(observations: list[Observation]) -> SourceRun:
    (found,) = [o for o in observations if isinstance(o, SourceRun)]
    return found


def test_a_token_is_the_engines_word() -> None:
    published = probed(lambda request: request.reply(ANSWER))
    found = result(published)
    assert found is not None
    assert (found.t, found.engine, found.ok, found.error) == (7.0, "llm", True, "")
    assert (run(published).source, run(published).ok) == ("probe", True)


def test_asks_for_one_token_of_the_configured_model() -> None:
    bodies: list[tuple[str, dict[str, object]]] = []

    def answer(request: Request) -> None:
        length = int(request.headers["Content-Length"])
        bodies.append((request.path, json.loads(request.rfile.read(length))))
        request.reply(ANSWER)

    probed(answer)
    ((path, body),) = bodies
    assert path == "/v1/completions"
    assert (body["model"], body["max_tokens"]) == ("tiny", 1)


def test_silence_until_the_deadline_is_the_engines_word() -> None:
    found = result(probed(lambda request: request.hang(), ScrapeOptions(timeout=0.3)))
    assert found is not None
    assert not found.ok
    assert found.seconds >= 0.3
    assert "0.3 s" in found.error


@pytest.mark.parametrize("status", [500, 503])
def test_an_error_of_the_server_is_the_engines_word(status: int) -> None:
    found = result(probed(lambda request: request.reply(b"", status)))
    assert found is not None
    assert not found.ok
    assert str(status) in found.error


@pytest.mark.parametrize("status", [400, 401, 404, 422])
def test_a_refusal_says_nothing_of_the_engine_and_what_to_check(status: int) -> None:
    published = probed(lambda request: request.reply(b"", status))
    assert result(published) is None
    assert not run(published).ok
    assert "probe.model" in run(published).error


def test_a_server_that_is_not_there_is_the_scrapers_business() -> None:
    with Engine(lambda request: request.reply(ANSWER)) as server:
        url = server.url
    published: list[Observation] = []
    ask_once(url, published)
    assert result(published) is None
    assert not run(published).ok


def test_the_key_goes_along_and_never_into_what_is_said(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("s3cret\n", encoding="utf-8")
    sent: list[str] = []

    def answer(request: Request) -> None:
        sent.append(request.headers["Authorization"])
        request.reply(b"", 401)

    published = probed(answer, ScrapeOptions(timeout=5, bearer_token_file=str(key)))
    assert sent == ["Bearer s3cret"]
    assert "s3cret" not in run(published).error
