"""scripts/recapture.py tells what a vLLM version changed on /metrics, and captures the pages of an installed one."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from scripts.recapture import CAPTURES, main, previous_version, read_pages, scrub
from tests.e2e.vllm_setup import VllmVenv

PAGE = """\
# HELP vllm:num_requests_running Running.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0"} 4.0
# HELP vllm:num_preemptions_total Preemptions.
# TYPE vllm:num_preemptions_total counter
vllm:num_preemptions_total{engine="0"} 7.0
# HELP vllm:num_preemptions_created Preemptions.
# TYPE vllm:num_preemptions_created gauge
vllm:num_preemptions_created{engine="0"} 1.7e+09
"""


def folder_with(path: Path, **pages: str) -> Path:
    path.mkdir()
    for name, page in pages.items():
        (path / f"{name}.prom").write_text(page, encoding="utf-8")
    return path


def test_finds_what_the_real_versions_changed(capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["--compare", str(CAPTURES / "0.10.2-fakeworker"), str(CAPTURES / "0.11.2-fakeworker")])

    assert status == 1
    assert capsys.readouterr().out.splitlines()[1:] == [
        "  removed  vllm:gpu_cache_usage_perc",
        "  removed  vllm:gpu_prefix_cache_hits_total",
        "  removed  vllm:gpu_prefix_cache_queries_total",
        "  added    vllm:engine_sleep_state",
        "  added    vllm:external_prefix_cache_hits_total",
        "  added    vllm:external_prefix_cache_queries_total",
        "  added    vllm:mm_cache_hits_total",
        "  added    vllm:mm_cache_queries_total",
        "  added    vllm:request_time_per_output_token_seconds",
        (
            "  labels   vllm:cache_config_info: "
            "-swap_space_bytes +kv_offloading_backend +kv_offloading_size +mamba_block_size"
        ),
    ]


def test_finds_the_engine_label_that_came_with_v1(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--compare", str(CAPTURES / "0.8.5-V0-fakeworker"), str(CAPTURES / "0.9.2-V1-fakeworker")])

    assert "  labels   vllm:num_preemptions_total: +engine\n" in capsys.readouterr().out


def test_a_changed_type_is_a_change(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = folder_with(tmp_path / "1.0", page=PAGE)
    after = folder_with(tmp_path / "2.0", page=PAGE.replace("running gauge", "running untyped"))

    assert main(["--compare", str(before), str(after)]) == 1
    assert "  type     vllm:num_requests_running: gauge -> untyped\n" in capsys.readouterr().out


def test_values_and_the_order_of_pages_are_no_change(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = folder_with(tmp_path / "1.0", first=PAGE, second="")
    after = folder_with(tmp_path / "2.0", first="", second=PAGE.replace(" 4.0", " 0.0"))

    assert main(["--compare", str(before), str(after)]) == 0
    assert capsys.readouterr().out == f"{before} -> {after}: no metric, type or label changed\n"


def test_a_metric_without_samples_has_not_lost_its_labels(tmp_path: Path) -> None:
    without_sample = PAGE.replace('vllm:num_requests_running{engine="0"} 4.0\n', "")
    before = folder_with(tmp_path / "1.0", page=PAGE)
    after = folder_with(tmp_path / "2.0", page=without_sample)

    assert main(["--compare", str(before), str(after)]) == 0


def test_our_own_plugins_gauge_is_not_part_of_a_version(tmp_path: Path) -> None:
    own = '# TYPE oomwatch:total_blocks gauge\noomwatch:total_blocks{engine="0"} 33.0\n'
    folder = folder_with(tmp_path / "1.0", page=PAGE + own)

    assert set(read_pages(folder).types) == {"vllm:num_requests_running", "vllm:num_preemptions_total"}


@pytest.mark.parametrize(
    ("page", "complaint"),
    [
        (None, "holds no .prom file"),
        ("vllm:num_requests_running{engine=\n", "is not a page in Prometheus' text format"),
    ],
)
def test_says_which_folder_or_page_is_unusable(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], page: str | None, complaint: str
) -> None:
    good = folder_with(tmp_path / "1.0", page=PAGE)
    bad = folder_with(tmp_path / "2.0", **({} if page is None else {"page": page}))

    assert main(["--compare", str(good), str(bad)]) == 2
    assert complaint in capsys.readouterr().err
    assert main(["--compare", str(bad), str(good)]) == 2


@pytest.mark.parametrize(
    ("version", "expected"),
    [("0.33.0", "0.32.0"), ("0.32.0", "0.27.1"), ("0.10.2", "0.9.2-V1-fakeworker"), ("0.8.5", None)],
)
def test_compares_with_the_newest_older_version(version: str, expected: str | None) -> None:
    found = previous_version(CAPTURES, version)

    assert (found.name if found else None) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("/v/lib/site-packages/vllm/x.py:3", "<site-packages>/vllm/x.py:3"),
        ("/v/bin/vllm", "<venv>/bin/vllm"),
        ("'/v-models/tiny'", "'<models>/tiny'"),
        ("/var/tmp", "/var/tmp"),
        ("192.0.2.1 192.0.2.1:80 192.0.2.10", "<ip> <ip>:80 192.0.2.10"),
    ],
)
def test_replaces_what_names_the_machine(text: str, expected: str) -> None:
    replacements = {
        "/v": "<venv>",
        "/v/lib/site-packages": "<site-packages>",
        "/v-models": "<models>",
        "192.0.2.1": "<ip>",
    }

    assert scrub(text, replacements) == expected


@pytest.mark.real
@pytest.mark.timeout(420)
def test_captures_an_installed_version_and_compares_it(
    vllm_venv: VllmVenv, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(CAPTURES / "0.27.1", tmp_path / "0.27.1")

    assert main(["--venv", str(vllm_venv.path), "--into", str(tmp_path)]) == 0

    folder = tmp_path / vllm_venv.vllm_version
    pages = {path.name: path.read_text(encoding="utf-8") for path in folder.iterdir()}
    assert sorted(pages) == [
        "01-start-no-requests.prom",
        "02-tiny-pool-saturated.prom",
        "03-idle-after.prom",
        "04-idle-after-aborts.prom",
        "server.log",
    ]
    usage = 'vllm:kv_cache_usage_perc{engine="0",model_name="tiny"}'
    assert f"{usage} 0.0\n" in pages["01-start-no-requests.prom"]
    assert f"{usage} 1.0\n" in pages["02-tiny-pool-saturated.prom"]
    assert f"{usage} 0.0\n" in pages["03-idle-after.prom"]
    assert all(str(Path.home()) not in page and str(vllm_venv.path) not in page for page in pages.values())
    assert "  added    vllm:admission_rejections_total\n" in capsys.readouterr().out

    assert main(["--venv", str(vllm_venv.path), "--into", str(tmp_path)]) == 2
    assert "exists: remove it" in capsys.readouterr().err
