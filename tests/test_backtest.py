"""The past of a real Prometheus server, judged as the daemon would have judged it."""

from __future__ import annotations

import json
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from click.testing import CliRunner

from oomwatch.cli import main
from oomwatch.config import Config
from oomwatch.observations import EngineFacts, EngineScrape, GpuPoll, Memory
from oomwatch.past import Past, PrometheusError, PrometheusServer, Target, filler, of_this_host
from oomwatch.sources.vllm.transport import ScrapeOptions
from tests.e2e.prometheus import PrometheusServer as RunningPrometheus
from tests.e2e.prometheus import scrape_config
from tests.e2e.tools import require_tool

HOUR = 3600
INTERVAL = 15
INSTANCE = "gpu-7:8000"
GIB = 1024**3


@dataclass(frozen=True)
class Story:
    """Work for two hours; a standstill from ``stuck`` to ``restart``, at which another process begins anew."""

    begin: int
    stuck: int
    restart: int
    end: int


def samples(story: Story) -> Iterator[tuple[str, float, int]]:
    """Series, value and time as Prometheus would have scraped them; a scrape fails at the restart."""
    labels = f'job="vllm",instance="{INSTANCE}"'
    of_rank = f'{labels},engine="0",model_name="m"'
    tokens = 0
    for t in range(story.begin, story.end, INTERVAL):
        up = not story.restart <= t < story.restart + 60
        yield f"up{{{labels}}}", float(up), t
        yield 'oomwatch_gpu_memory_total_bytes{job="oomwatch",instance="gpu-7:18666",gpu="GPU-a"}', 80.0 * GIB, t
        yield 'oomwatch_gpu_memory_used_bytes{job="oomwatch",instance="gpu-7:18666",gpu="GPU-a"}', 70.0 * GIB, t
        yield 'oomwatch_gpu_memory_free_bytes{job="oomwatch",instance="gpu-7:18666",gpu="GPU-a"}', 9.5 * GIB, t
        if not up:
            tokens = 0
            continue
        tokens += 0 if story.stuck <= t < story.restart else 100
        start = story.begin - 1000 if t < story.restart else story.restart
        yield f"process_start_time_seconds{{{labels}}}", float(start), t
        yield f"vllm:num_requests_running{{{of_rank}}}", 3.0, t
        yield f"vllm:num_requests_waiting{{{of_rank}}}", 0.0, t
        yield f"vllm:kv_cache_usage_perc{{{of_rank}}}", 0.25, t
        yield f"vllm:generation_tokens_total{{{of_rank}}}", float(tokens), t
        yield f"vllm:iteration_tokens_total_count{{{of_rank}}}", float(tokens), t
        yield f'vllm:cache_config_info{{{labels},engine="0",num_gpu_blocks="4097",block_size="16"}}', 1.0, t


def backfill(folder: Path, points: Sequence[tuple[str, float, int]]) -> None:
    """Put samples into a storage that Prometheus then starts on."""
    by_family = sorted(points, key=lambda point: (point[0].partition("{")[0], point[0], point[2]))
    text = "".join(f"{series} {value!r} {t}\n" for series, value, t in by_family) + "# EOF\n"
    (folder / "past.txt").write_text(text, encoding="utf-8")
    arguments = ["tsdb", "create-blocks-from", "openmetrics", "past.txt", "data"]
    promtool = str(require_tool("promtool"))
    subprocess.run([promtool, *arguments], cwd=folder, check=True, capture_output=True, timeout=120)


@pytest.fixture(scope="module")
def story() -> Story:
    begin = (int(time.time()) // HOUR - 6) * HOUR
    return Story(begin, begin + HOUR, begin + HOUR + 900, begin + 2 * HOUR)


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory, story: Story) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("prometheus")
    backfill(folder, list(samples(story)))
    with RunningPrometheus(folder, scrape_config({})) as server:
        yield server.url


@pytest.fixture
def past(prometheus: str) -> Past:
    return Past(PrometheusServer(prometheus, ScrapeOptions(timeout=30.0)))


TARGET = Target("vllm", INSTANCE)


def test_engines_are_found_by_what_they_show(past: Past, story: Story) -> None:
    assert past.targets(story.begin, story.end) == (TARGET,)
    assert past.scrape_interval(TARGET, story.begin, story.end) == INTERVAL


def test_each_scrape_comes_back_whole_and_once(past: Past, story: Story) -> None:
    found = list(past.observations({TARGET: EngineFacts("chat")}, story.begin - 1, story.end))
    scrapes = [one for one in found if isinstance(one, EngineScrape)]
    assert [scrape.t for scrape in scrapes] == [float(t) for t in range(story.begin, story.end, INTERVAL)]
    failed = [scrape.t for scrape in scrapes if not scrape.answered]
    assert failed == [story.restart, story.restart + 15, story.restart + 30, story.restart + 45]
    (rank,) = scrapes[10].ranks
    assert (rank.running, rank.usage, rank.generation_tokens, rank.pool.blocks) == (3.0, 0.25, 1100.0, 4096)
    polls = [one for one in found if isinstance(one, GpuPoll)]
    assert polls[0].memory == Memory(80 * GIB, None, 70 * GIB, int(9.5 * GIB))
    assert [one.t for one in found] == sorted(one.t for one in found)


def test_a_server_that_refuses_so_much_at_once_is_asked_for_less(tmp_path: Path, prometheus: str, story: Story) -> None:
    small = PrometheusServer(prometheus, ScrapeOptions(timeout=30.0, max_page_bytes=64 * 1024))
    found = list(Past(small).observations({TARGET: EngineFacts("chat")}, story.begin - 1, story.end, gpus=False))
    assert len(found) == 2 * HOUR / INTERVAL


def test_a_step_thins_the_past(prometheus: str, story: Story) -> None:
    past = Past(PrometheusServer(prometheus, ScrapeOptions(timeout=30.0)), step=60.0)
    found = list(past.observations({TARGET: EngineFacts("chat")}, story.begin, story.begin + HOUR, gpus=False))
    assert [one.t for one in found] == [story.begin + 60.0 * n for n in range(1, 61)]


def replayed(*arguments: object) -> tuple[int, str, str]:
    done = CliRunner().invoke(main, ["replay", *map(str, arguments)])
    return done.exit_code, done.stdout, done.stderr


def test_the_backtest_tells_alerts_and_how_long_before_the_restart_they_came(prometheus: str, story: Story) -> None:
    status, out, err = replayed(
        "--prometheus", prometheus, "--from", story.begin - 1, "--to", story.end, "--format", "json"
    )
    assert (status, err) == (0, "")
    *rows, report, summary = [json.loads(line) for line in out.splitlines()]
    assert any(row["verdict"] == "engine-stuck" and row["state"] == "page" for row in rows)
    (restart,) = report["backtest"]["restarts"]
    assert restart["engine"] == INSTANCE
    assert restart["t"] == story.restart + 60 - (story.begin - 1)
    leads = {warned["verdict"]: warned["lead_seconds"] for warned in restart["warned"]}
    assert 900 - 300 <= leads["engine-stuck"] <= 900
    (stuck,) = [alert for alert in report["backtest"]["alerts"] if alert["verdict"] == "engine-stuck"]
    assert (stuck["state"], stuck["false_alarm_candidate"]) == ("page", False)
    assert summary["summary"]["verdicts"]["engine-stuck"] == "page"


def test_the_backtest_is_told_in_words(prometheus: str, story: Story) -> None:
    status, out, _ = replayed("--prometheus", prometheus, "--from", story.begin, "--to", story.end, "--engine", "gpu-*")
    assert status == 0
    assert "Would have paged 1 time" in out
    assert "Restarts of engines: 1" in out
    assert "page of engine-stuck" in out


def test_what_cannot_be_had_ends_with_2_and_says_why(prometheus: str, story: Story) -> None:
    nobody = replayed("--prometheus", prometheus, "--from", story.begin, "--to", story.end, "--engine", "other:*")
    assert nobody[0] == 2
    assert "no vLLM engine in this stretch of time whose instance fits other:*" in nobody[2]
    nothing = replayed("--prometheus", "http://127.0.0.1:1", "--from", "1h")
    assert nothing[0] == 2
    assert "http://127.0.0.1:1" in nothing[2]
    wrong = replayed("--prometheus", f"{prometheus}/wrong", "--from", "1h")
    assert wrong[0] == 2
    assert "HTTP 404" in wrong[2]
    when = replayed("--prometheus", prometheus, "--from", "yesterday")
    assert "--from yesterday is no time" in when[2]


# --- what a daemon did not see -----------------------------------------------------------------------------------


def test_a_gap_is_filled_with_the_scrapes_of_this_hosts_engines(prometheus: str, story: Story) -> None:
    config = Config.model_validate(
        {
            "engines": [{"name": "chat", "url": f"http://{INSTANCE}"}, {"name": "other", "url": "http://gpu-8:8000"}],
            "history": {"prometheus": {"url": prometheus}},
        }
    )
    fill = filler(config)
    assert fill is not None
    found = list(fill((), story.begin, story.begin + 600))
    assert {(type(one), getattr(one, "engine", "")) for one in found} == {(EngineScrape, "chat")}
    assert [one.t for one in found] == [story.begin + 15.0 * n for n in range(1, 41)]


def test_nothing_is_asked_without_a_server() -> None:
    assert filler(Config()) is None


def test_a_server_that_is_not_there_is_an_error() -> None:
    fill = filler(Config.model_validate({"history": {"prometheus": {"url": "http://127.0.0.1:1"}}}))
    assert fill is not None
    with pytest.raises(PrometheusError, match=r"http://127\.0\.0\.1:1"):
        list(fill((), 0.0, 60.0))


def test_an_engine_on_the_loopback_interface_is_this_hosts_by_any_of_its_names() -> None:
    own = Target("vllm", f"{socket.gethostname()}:8000")
    others = [Target("vllm", "another-host:8000"), Target("vllm", f"{socket.gethostname()}:8001")]
    facts = EngineFacts("chat", target="http://127.0.0.1:8000/metrics")
    assert of_this_host([*others, own], [facts]) == {own: facts}
