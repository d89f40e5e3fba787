"""What is wrong, in words, and the state as plain data."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from oomwatch.observations import (
    HUNG,
    IMPLAUSIBLE,
    NOT_EXPOSED,
    NOT_READ,
    STALE,
    Absent,
    DriverReport,
    EngineFacts,
    RankReading,
    RemappedRows,
)
from oomwatch.snapshot import ENGINE_STATES, EngineView, GpuView, Snapshot, SourceView
from oomwatch.status import SEVERITIES, Problem, problems, status
from tests import golden, snapshots
from tests.snapshots import GIB, NOW, driver, engine, engine_process, gpu, gpu_uuid

WORKING = engine()


def with_gpu(view: GpuView) -> Snapshot:
    return Snapshot(t=NOW, driver=driver(), gpus=(view,), engines=(WORKING,))


def with_engine(view: EngineView) -> Snapshot:
    return Snapshot(t=NOW, driver=driver(), gpus=(replace(gpu(), unowned=0),), engines=(view,))


def only(snapshot: Snapshot, key: str) -> dict[str, Any]:
    """The one GPU or engine of a status, as a client reads it."""
    (found,) = json.loads(json.dumps(status(snapshot, NOW)))[key]
    assert isinstance(found, dict)
    return found


def the_problem(snapshot: Snapshot) -> Problem:
    (problem,) = problems(snapshot)
    return problem


def test_a_healthy_node_has_no_problem() -> None:
    assert problems(snapshots.healthy(), now=NOW + 10) == ()


def test_the_worst_comes_first_and_everything_says_what_to_do() -> None:
    found = problems(snapshots.troubled())
    order = [SEVERITIES.index(problem.severity) for problem in found]
    assert order == sorted(order)
    assert {problem.severity for problem in found} == {"critical", "warning"}
    for problem in found:
        assert problem.action, problem
        for sentence in (problem.text, problem.action):
            assert sentence[0].isupper() or sentence[0].isdigit(), sentence
            assert sentence.endswith("."), sentence


def test_each_subject_is_told_of_once() -> None:
    subjects = [(problem.kind, problem.name) for problem in problems(snapshots.troubled())]
    assert len(subjects) == len(set(subjects))


class TestData:
    def test_a_daemon_that_has_just_started_says_so(self) -> None:
        (problem,) = problems(Snapshot(t=0.0), now=NOW)
        assert (problem.severity, problem.kind) == ("info", "node")
        assert "just started" in problem.text

    @pytest.mark.parametrize(("age", "severities"), [(59, []), (61, ["critical"])])
    def test_old_data_is_critical(self, age: float, severities: list[str]) -> None:
        found = problems(snapshots.healthy(), now=NOW + age)
        assert [problem.severity for problem in found] == severities
        assert all(problem.since == NOW for problem in found)


class TestDriver:
    def test_a_node_without_gpu_and_engine_is_no_emergency(self) -> None:
        found = problems(snapshots.bare())
        assert [problem.severity for problem in found] == ["info", "info"]
        assert "No GPU can be read: the driver library cannot be loaded." in found[0].text
        assert found[0].action.startswith("Install NVIDIA's driver")
        assert "No vLLM server" in found[1].text

    def test_a_missing_library_matters_where_an_engine_runs(self) -> None:
        assert the_problem(replace(snapshots.bare(), engines=(WORKING,))).severity == "warning"

    @pytest.mark.parametrize(
        ("state", "severity"), [("hung", "critical"), ("version_mismatch", "warning"), ("released", "info")]
    )
    def test_states_of_the_driver(self, state: str, severity: str) -> None:
        problem = the_problem(Snapshot(t=NOW, driver=DriverReport(NOW, state, "why. Do that"), engines=(WORKING,)))
        assert (problem.severity, problem.kind, problem.action) == (severity, "driver", "Do that.")

    def test_a_working_driver_may_come_with_a_warning(self) -> None:
        old = DriverReport(NOW, "ok", "this driver is older than 535.104.05 and may scramble process lists. Update it")
        assert "older than 535.104.05" in the_problem(replace(snapshots.healthy(), driver=old)).text

    def test_a_driver_without_gpus_is_told(self) -> None:
        assert "lists no GPU" in the_problem(Snapshot(t=NOW, driver=driver(), engines=(WORKING,))).text


class TestGpus:
    @pytest.mark.parametrize(
        ("reason", "severity", "words"),
        [
            (Absent("GPU_IS_LOST"), "critical", "GPU 0 has fallen off the bus"),
            (Absent("NOT_FOUND"), "critical", "no longer listed"),
            (HUNG, "critical", "does not answer"),
            (STALE, "warning", "has not been read"),
            (Absent("UNKNOWN"), "warning", "does not tell its memory (UNKNOWN)"),
        ],
    )
    def test_a_device_that_cannot_be_read(self, reason: Absent, severity: str, words: str) -> None:
        problem = the_problem(with_gpu(replace(gpu(read=reason), last_seen=NOW - 60)))
        assert (problem.severity, problem.kind, problem.name, problem.since) == (
            severity,
            "gpu",
            gpu_uuid(0),
            NOW - 60,
        )
        assert words in problem.text

    def test_a_device_that_is_not_read_yet_is_none(self) -> None:
        assert problems(with_gpu(replace(gpu(read=NOT_READ), last_seen=None))) == ()

    def test_the_parent_of_slices_may_be_forbidden(self) -> None:
        sliced = snapshots.sliced_gpu(0)
        healthy_slice = replace(sliced, mig=sliced.mig[:1])
        assert problems(with_gpu(healthy_slice)) == ()
        assert "Slice 8/0 of GPU 0" in the_problem(with_gpu(sliced)).text

    def test_a_list_that_contradicts_itself(self) -> None:
        problem = the_problem(with_gpu(replace(gpu(), processes=IMPLAUSIBLE, held=IMPLAUSIBLE, unowned=IMPLAUSIBLE)))
        assert "contradicts itself" in problem.text

    @pytest.mark.parametrize(("unowned", "told"), [(GIB - 1, False), (GIB, True)])
    def test_memory_without_owner_beside_an_engine(self, unowned: int, told: bool) -> None:
        beside = replace(gpu(0, (engine_process(1, 60 * GIB, "llama-8b"),)), unowned=unowned)
        alone = replace(gpu(0), unowned=unowned)
        assert [problem.text.startswith("GPU 0: 1 GiB") for problem in problems(with_gpu(beside))] == [True] * told
        assert problems(with_gpu(alone)) == (), "what nobody misses is no problem"

    def test_memory_without_owner_where_the_configuration_puts_an_engine(self) -> None:
        placed = replace(WORKING, facts=replace(WORKING.facts, gpus=(gpu_uuid(0),)))
        snapshot = replace(with_gpu(replace(gpu(0), unowned=2 * GIB)), engines=(placed,))
        assert "2 GiB" in the_problem(snapshot).text
        assert problems(replace(snapshot, engines=(snapshots.gone(placed), WORKING)))[0].kind == "engine"

    def test_a_need_of_recovery_or_replacement(self) -> None:
        view = gpu()
        assert view.poll is not None
        reset = replace(view, unowned=0, poll=replace(view.poll, recovery_action=1))
        assert "nvidia-smi --gpu-reset" in the_problem(with_gpu(reset)).text
        failed = replace(view, unowned=0, poll=replace(view.poll, remapped_rows=RemappedRows(0, 8, False, True)))
        assert (the_problem(with_gpu(failed)).severity, the_problem(with_gpu(failed)).kind) == ("critical", "gpu")
        pending = replace(view, unowned=0, poll=replace(view.poll, remapped_rows=RemappedRows(0, 1, True, False)))
        assert the_problem(with_gpu(pending)).severity == "warning"

    def test_processes_that_proc_does_not_have(self) -> None:
        problem = the_problem(replace(snapshots.healthy(), unresolved_gpu_pids=3))
        assert "3 processes" in problem.text
        assert "hostPID" in problem.action


class TestEngines:
    @pytest.mark.parametrize("state", sorted(set(ENGINE_STATES) - {"ok", "sleeping", "no_traffic_yet", "unknown"}))
    def test_every_state_of_trouble_is_told(self, state: str) -> None:
        problem = the_problem(with_engine(replace(WORKING, state=state, error="why", scrape=None)))
        assert (problem.kind, problem.name) == ("engine", "llama-8b")
        assert problem.severity in ("critical", "warning")
        assert problem.text.startswith("Engine llama-8b ")

    @pytest.mark.parametrize("state", ["ok", "sleeping", "no_traffic_yet"])
    def test_other_states_are_none(self, state: str) -> None:
        assert problems(with_engine(replace(WORKING, state=state))) == ()

    def test_one_that_never_answered_may_still_be_loading(self) -> None:
        lost = snapshots.unreachable(WORKING)
        assert the_problem(with_engine(lost)).severity == "critical"
        assert the_problem(with_engine(lost)).text == "Engine llama-8b cannot be reached. Connection refused."
        assert the_problem(with_engine(replace(lost, last_seen=None, last_answer=None))).severity == "warning"

    def test_an_address_is_told_as_it_is(self) -> None:
        refused = replace(snapshots.unreachable(WORKING), error="http://127.0.0.1:8000/metrics: connection refused")
        assert the_problem(with_engine(refused)).text.endswith("http://127.0.0.1:8000/metrics: connection refused.")

    def test_a_frozen_one_tells_since_when(self) -> None:
        problem = the_problem(with_engine(snapshots.frozen(WORKING, 240)))
        assert (problem.severity, problem.since) == ("critical", NOW - 240)
        assert "No counter has moved for 4 min." in problem.text

    def test_one_that_ended_tells_when_it_was_last_seen(self) -> None:
        problem = the_problem(with_engine(snapshots.gone(WORKING, 660)))
        assert (problem.text, problem.since) == ("Engine llama-8b has ended.", NOW - 660)

    def test_one_without_address_tells_what_discovery_says(self) -> None:
        hidden = replace(WORKING, state="no_address", facts=EngineFacts("llama-8b", no_address="Give it --port."))
        assert the_problem(with_engine(hidden)).action == "Give it --port."

    def test_a_page_without_the_pool_is_told(self) -> None:
        assert WORKING.scrape is not None
        for ranks in ((), (RankReading("0", usage=NOT_EXPOSED),)):
            odd = replace(WORKING, scrape=replace(WORKING.scrape, ranks=ranks))
            assert "no usage of the KV pool" in the_problem(with_engine(odd)).text

    def test_one_not_asked_lately_is_told_and_one_not_asked_yet_is_not(self) -> None:
        silent = replace(WORKING, state="unknown", error="no scrape for 50 s", scrape=None)
        assert "no scrape for 50 s" in the_problem(with_engine(silent)).text
        fresh = replace(silent, error="not scraped yet", last_seen=None, last_answer=None)
        assert problems(with_engine(fresh)) == ()


class TestSources:
    def test_failing_and_silent_ones_are_told(self) -> None:
        sources = (
            SourceView("discovery", "", False, NOW, NOW - 90, 0.1, 9, "/proc cannot be read"),
            SourceView("host", "", None, NOW - 300, NOW - 300, 0.1, 0, "silent for 300 s"),
            SourceView("nvml", gpu_uuid(0), False, NOW, None, 0.1, 1, "TIMEOUT"),
            SourceView("vllm", "not-run-yet", None),
        )
        found = problems(replace(snapshots.healthy(), sources=sources))
        assert [(problem.name, problem.since) for problem in found] == [
            ("discovery", NOW - 90),
            ("host", NOW - 300),
            (f"nvml:{gpu_uuid(0)}", None),
        ]
        assert "Reading GPUs (GPU 0) fails: TIMEOUT." in found[2].text

    def test_what_a_device_or_an_engine_tells_itself_is_not_repeated(self) -> None:
        down = snapshots.unreachable(WORKING)
        source = SourceView("vllm", "llama-8b", False, NOW, NOW - 30, 0.1, 3, "connection refused")
        assert the_problem(replace(with_engine(down), sources=(source,))).kind == "engine"


# --- as data ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["full", "troubled", "alarming", "bare", "healthy", "hostile"])
def test_the_status_is_json_without_nan(name: str) -> None:
    plain = status(getattr(snapshots, name)(), NOW + 3)
    assert json.loads(json.dumps(plain, allow_nan=False)) == plain


def test_numbers_that_json_does_not_have_are_null() -> None:
    odd = replace(snapshots.rank(), usage=float("nan"), finished={"stop": float("inf")})
    text = json.dumps(status(with_engine(engine(ranks=(odd,))), NOW), allow_nan=False)
    assert json.loads(text)["engines"][0]["ranks"][0]["finished_total"] == {"stop": None}


def test_every_null_of_a_reading_has_its_reason() -> None:
    device = only(with_gpu(snapshots.lost(0)), "gpus")
    assert device["memory"] is None
    assert device["absent"]["memory"] == "GPU_IS_LOST"
    assert device["last_memory"]["total_bytes"] == 80 * GIB
    assert {name for name in device["absent"] if device[name] is not None} == set()


def test_devices_that_can_be_read_stand_without_a_sum_where_another_cannot() -> None:
    held = {gpu_uuid(0): 50 * GIB}
    told = only(with_engine(replace(engine(), gpu_memory=held, gpu_memory_missing=HUNG)), "engines")
    assert (told["gpu_memory_bytes"], told["gpu_memory_sum_bytes"]) == (held, None)
    assert told["absent"]["gpu_memory_sum_bytes"] == "HUNG"


@pytest.mark.parametrize(
    ("configured", "held", "told"),
    [
        (None, {gpu_uuid(1): GIB, gpu_uuid(0): GIB}, [gpu_uuid(0), gpu_uuid(1)]),
        (None, {}, []),
        (None, NOT_READ, None),
        ((gpu_uuid(2),), NOT_READ, [gpu_uuid(2)]),
        ((gpu_uuid(2),), {gpu_uuid(0): GIB}, [gpu_uuid(2)]),
    ],
)
def test_an_engine_is_on_its_configured_gpus_else_on_those_that_list_its_processes(
    configured: tuple[str, ...] | None, held: dict[str, int] | Absent, told: list[str] | None
) -> None:
    view = replace(WORKING, facts=replace(WORKING.facts, gpus=configured), gpu_memory=held)
    assert only(with_engine(view), "engines")["gpus"] == told


def test_last_values_stand_apart_from_the_present() -> None:
    ended = only(with_engine(snapshots.gone(WORKING)), "engines")
    assert ended["ranks"] == []
    assert ended["last_answer"]["time"] == NOW - 660
    assert ended["last_answer"]["ranks"][0]["kv_usage_ratio"] == 0.75
    assert only(with_engine(WORKING), "engines")["last_answer"] is None


def test_keys_of_the_api_stay(request: pytest.FixtureRequest) -> None:
    text = json.dumps(status(snapshots.full(), NOW + 3), indent=1) + "\n"
    golden.assert_golden(Path(golden.GOLDEN) / "status" / "full.json", text, request)
