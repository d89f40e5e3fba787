"""What a snapshot shows on /metrics: a value or nothing, never a 0 for what is not known, never an old value."""

from __future__ import annotations

from dataclasses import replace

import pytest

from oomwatch.detectors.base import Subject
from oomwatch.exposition import WATCHED_XIDS, ConfigStatus, SnapshotCollector
from oomwatch.families import FAMILIES
from oomwatch.observations import IMPLAUSIBLE, NOT_EXPOSED, NOT_KNOWN, NOT_READ, STALE, Absent, Maybe, Memory, Pool
from oomwatch.snapshot import EMPTY, EngineView, GpuView, HeldProcess, Holder, Snapshot, SourceView, XidCount
from tests.exposed import collector, names, own_page, samples, values
from tests.snapshots import (
    GIB,
    MIB,
    NOW,
    bare,
    driver,
    engine,
    engine_process,
    full,
    gone,
    gpu,
    gpu_uuid,
    host_process,
    judged,
    leaking,
    memory,
    rank,
    sliced_gpu,
    unreachable,
)


def of_gpu(view: GpuView) -> Snapshot:
    return Snapshot(NOW, gpus=(view,))


def of_engine(view: EngineView) -> Snapshot:
    return Snapshot(NOW, engines=(view,))


def unread(reason: str) -> GpuView:
    """A device that was polled and did not tell its memory."""
    absent = Absent(reason)
    return replace(gpu(0, read=absent), processes=absent, held=absent, unowned=absent)


def test_a_full_snapshot_has_a_sample_of_every_family() -> None:
    assert names(full()) == {family.name for family in FAMILIES}


def test_before_the_first_observation_the_page_tells_of_the_daemon_alone() -> None:
    assert names(EMPTY) == {
        "oomwatch_build_info",
        "oomwatch_config_info",
        "oomwatch_config_last_reload_successful",
        "oomwatch_config_last_reload_success_timestamp_seconds",
        "oomwatch_internal_errors_total",
        *(family.name for family in FAMILIES if family.name.startswith(("oomwatch_history_", "oomwatch_notification"))),
        "oomwatch_nvml_calls_total",
        "oomwatch_nvml_errors_total",
        "oomwatch_nvml_seconds_total",
    }


def test_a_node_without_gpu_and_engine_says_so() -> None:
    assert values(bare(), "oomwatch_nvml_state", state="library_missing") == [1]
    assert "oomwatch_nvml_info" not in names(bare())
    assert "oomwatch_nvml_devices" not in names(bare())


def test_a_refused_configuration_shows_beside_the_one_in_use() -> None:
    status = ConfigStatus(successful=False, loaded_at=1_000.0, sha256="ab")
    refused = SnapshotCollector(lambda: EMPTY, process_series_per_gpu=lambda: 32, config=lambda: status)
    shown = {sample.name: sample for metric in refused.collect() for sample in metric.samples}
    assert shown["oomwatch_config_last_reload_successful"].value == 0
    assert shown["oomwatch_config_last_reload_success_timestamp_seconds"].value == 1_000
    assert shown["oomwatch_config_info"].labels == {"sha256": "ab"}


def test_the_collector_describes_every_family_without_reading_a_snapshot() -> None:
    described = [metric.name for metric in collector(EMPTY).describe()]
    assert described == [family.base_name for family in FAMILIES]


class TestGpuMemory:
    def test_used_and_reserved_are_two_series(self) -> None:
        """An idle card is not in use, although its driver keeps some memory."""
        page = of_gpu(gpu(0, read=memory(used=0, reserved=308 * MIB)))
        assert values(page, "oomwatch_gpu_memory_used_bytes") == [0]
        assert values(page, "oomwatch_gpu_memory_reserved_bytes") == [308 * MIB]
        assert values(page, "oomwatch_gpu_memory_used_includes_reserved") == [0]

    def test_the_help_tells_how_a_used_ratio_is_made(self) -> None:
        page = own_page(of_gpu(gpu(0)))
        (help_line,) = [line for line in page.splitlines() if line.startswith("# HELP oomwatch_gpu_memory_used_bytes")]
        assert "used / (total - reserved)" in help_line

    def test_with_the_older_call_reserved_is_absent_and_used_is_marked(self) -> None:
        page = of_gpu(gpu(0, read=memory(used=308 * MIB, reserved=None)))
        assert not values(page, "oomwatch_gpu_memory_reserved_bytes")
        assert values(page, "oomwatch_gpu_memory_used_includes_reserved") == [1]
        assert not values(page, "oomwatch_gpu_memory_unowned_bytes")

    @pytest.mark.parametrize("reason", ["GPU_IS_LOST", "NOT_FOUND", "HUNG", "NO_PERMISSION"])
    def test_unread_memory_has_no_sample_but_a_reason_and_a_time(self, reason: str) -> None:
        page = of_gpu(unread(reason))
        assert not [name for name in names(page) if name.startswith("oomwatch_gpu_memory_") and name.endswith("_bytes")]
        assert values(page, "oomwatch_gpu_value_absent", reading="memory", reason=reason) == [1]
        assert values(page, "oomwatch_gpu_last_seen_timestamp_seconds") == [NOW]

    def test_a_device_that_fell_silent_keeps_its_identity_alone(self) -> None:
        silent = replace(gpu(0), poll=None, memory=STALE, processes=STALE, held=STALE, unowned=STALE)
        page = of_gpu(silent)
        assert "oomwatch_gpu_temperature_celsius" not in names(page)
        assert values(page, "oomwatch_gpu_value_absent", reason="STALE") == [1, 1]
        assert values(page, "oomwatch_gpu_info", gpu=gpu_uuid(0)) == [1]

    def test_unified_memory_is_flagged_and_its_used_has_no_reserve_in_it(self) -> None:
        view = gpu(0, read=Memory(128 * GIB, None, 40 * GIB, 88 * GIB))
        assert view.poll is not None
        page = of_gpu(replace(view, poll=replace(view.poll, unified=True)))
        assert values(page, "oomwatch_gpu_memory_unified") == [1]
        assert values(page, "oomwatch_gpu_memory_used_includes_reserved") == [0]

    def test_a_device_known_by_an_xid_alone_has_no_identity_yet(self) -> None:
        view = replace(gpu(0), index=-1, name="", poll=None, memory=NOT_READ, processes=NOT_READ, last_seen=None)
        page = of_gpu(replace(view, held=NOT_READ, unowned=NOT_READ, xids=(XidCount(79, 1, NOW),)))
        assert names(page) & {f.name for f in FAMILIES if f.section == "GPUs"} == {
            "oomwatch_gpu_xid_errors_total",
            "oomwatch_gpu_xid_last_timestamp_seconds",
        }


class TestGpuProcesses:
    def test_memory_by_holder_adds_up_what_each_holds(self) -> None:
        """Three engines share a card in turns: one series of the device's memory, one of each engine's part."""
        listed = tuple(engine_process(pid, size * MIB, f"e{pid}") for pid, size in ((1, 24797), (2, 19968), (3, 13600)))
        page = of_gpu(gpu(0, listed, memory(used=58491 * MIB)))
        assert values(page, "oomwatch_gpu_memory_used_bytes") == [58491 * MIB]
        assert values(page, "oomwatch_gpu_memory_held_bytes", holder_kind="engine") == [
            24797 * MIB,
            19968 * MIB,
            13600 * MIB,
        ]
        assert values(page, "oomwatch_gpu_memory_unowned_bytes") == [126 * MIB]

    def test_a_scrambled_list_costs_its_own_series_alone(self) -> None:
        listed = replace(gpu(0), processes=IMPLAUSIBLE, held=IMPLAUSIBLE, unowned=IMPLAUSIBLE)
        page = of_gpu(listed)
        assert not [name for name, labels in samples(page) if "pid" in dict(labels)]
        assert values(page, "oomwatch_gpu_value_absent", reading="processes", reason="IMPLAUSIBLE") == [1]
        assert not values(page, "oomwatch_gpu_processes")
        assert values(page, "oomwatch_gpu_memory_used_bytes") == [70 * GIB]

    def test_a_process_without_a_number_is_listed_and_has_no_memory(self) -> None:
        page = of_gpu(gpu(0, (HeldProcess(42, None, Holder("unknown"), "python3"),)))
        assert values(page, "oomwatch_gpu_process_info", pid="42", process="python3") == [1]
        assert not values(page, "oomwatch_gpu_process_memory_bytes")
        assert not values(page, "oomwatch_gpu_memory_held_bytes")
        assert not values(page, "oomwatch_gpu_memory_unowned_bytes")

    def test_a_process_listed_twice_is_one_series_with_the_sum(self) -> None:
        page = of_gpu(gpu(0, (engine_process(42, GIB, "a"), engine_process(42, 2 * GIB, "a"))))
        assert values(page, "oomwatch_gpu_process_memory_bytes", pid="42") == [3 * GIB]
        assert values(page, "oomwatch_gpu_processes") == [1]

    def test_a_name_that_is_no_text_does_not_cost_the_page(self) -> None:
        """A process may call itself anything: bytes that are no UTF-8, quotes, line ends."""
        name = '\udcff"\\\n'
        page = of_gpu(gpu(0, (HeldProcess(42, GIB, Holder("unknown"), name),)))
        assert values(page, "oomwatch_gpu_process_info", process='?"\\\n') == [1]

    def test_the_overhead_of_a_device_is_the_sum_over_its_engines(self) -> None:
        listed = (engine_process(1, 30 * GIB, "a"), engine_process(2, 30 * GIB, "b"))
        engines = (
            replace(engine("a"), overhead={gpu_uuid(0): {1: 300}}),
            replace(engine("b"), overhead={gpu_uuid(0): {2: 40}}),
        )
        page = Snapshot(NOW, gpus=(gpu(0, listed),), engines=engines)
        assert values(page, "oomwatch_gpu_memory_overhead_bytes") == [340]

    def test_each_process_of_an_engine_has_its_overhead_and_the_engine_their_sum(self) -> None:
        listed = (engine_process(1, 30 * GIB, "a"), engine_process(2, GIB, "a"), engine_process(3, GIB, "b"))
        engines = (replace(engine("a"), overhead={gpu_uuid(0): {1: 300, 2: GIB}}), engine("b"))
        page = Snapshot(NOW, gpus=(gpu(0, listed),), engines=engines)
        by_pid = {pid: values(page, "oomwatch_gpu_process_memory_overhead_bytes", pid=pid) for pid in ("1", "2", "3")}
        assert by_pid == {"1": [300], "2": [GIB], "3": []}
        assert values(page, "oomwatch_engine_device_memory_overhead_bytes", engine="a") == [GIB + 300]

    def test_a_slice_has_the_overhead_of_its_engines_and_their_processes(self) -> None:
        page = full()
        assert values(page, "oomwatch_mig_memory_overhead_bytes") == [300 * MIB]
        assert values(page, "oomwatch_mig_process_memory_overhead_bytes") == [300 * MIB]

    def test_it_is_absent_where_one_engine_s_is_not_known(self) -> None:
        listed = (engine_process(1, 30 * GIB, "a"), engine_process(2, 30 * GIB, "b"))
        engines = (replace(engine("a"), overhead={gpu_uuid(0): {1: 300}}), engine("b"))
        page = Snapshot(NOW, gpus=(gpu(0, listed),), engines=engines)
        assert not values(page, "oomwatch_gpu_memory_overhead_bytes")


class TestGpuHealth:
    def test_an_xid_that_nobody_knew_has_a_series_once_it_came(self) -> None:
        page = of_gpu(replace(gpu(0), xids=(XidCount(79, 2, NOW - 5), XidCount(999, 1, NOW))))
        assert values(page, "oomwatch_gpu_xid_errors_total", code="79") == [2]
        assert values(page, "oomwatch_gpu_xid_errors_total", code="999") == [1]
        assert values(page, "oomwatch_gpu_xid_last_timestamp_seconds", code="79") == [NOW - 5]
        assert len(values(page, "oomwatch_gpu_xid_errors_total")) == len(WATCHED_XIDS) + 1

    @pytest.mark.parametrize(
        ("action", "needed"),
        [(0, None), (1, "gpu_reset"), (2, "node_reboot"), (3, "drain_p2p"), (4, "drain_and_reset"), (17, "other")],
    )
    def test_a_recovery_that_the_driver_asks_for(self, action: int, needed: str | None) -> None:
        view = gpu(0)
        assert view.poll is not None
        page = of_gpu(replace(view, poll=replace(view.poll, recovery_action=action)))
        shown = {dict(labels)["action"]: value for (name, labels), value in samples(page).items() if "recovery" in name}
        assert {name for name, value in shown.items() if value} == ({needed} if needed else set())
        assert len(shown) == 5

    def test_what_a_device_does_not_support_has_no_sample_but_a_reason(self) -> None:
        view, absent = gpu(0), Absent("NOT_SUPPORTED")
        assert view.poll is not None
        page = of_gpu(replace(view, poll=replace(view.poll, ecc_corrected=absent, ecc_uncorrected=absent)))
        assert not values(page, "oomwatch_gpu_ecc_uncorrected_errors_total")
        assert values(page, "oomwatch_gpu_value_absent", reading="ecc", reason="NOT_SUPPORTED") == [1]


class TestMig:
    def test_a_slice_has_its_own_memory_and_its_parent_has_none(self) -> None:
        page = of_gpu(sliced_gpu(0))
        uuid = gpu_uuid(0)
        assert values(page, "oomwatch_mig_memory_total_bytes", gpu=uuid, mig="MIG-00000000-0001") == [20 * GIB]
        assert not values(page, "oomwatch_gpu_memory_total_bytes")
        assert values(page, "oomwatch_gpu_value_absent", reading="memory", reason="NO_PERMISSION") == [1]

    def test_it_is_placed_by_its_instances(self) -> None:
        page = of_gpu(sliced_gpu(0))
        wanted = {"gpu": gpu_uuid(0), "mig": "MIG-00000000-0001", "gpu_instance": "7", "compute_instance": "0"}
        assert values(page, "oomwatch_mig_info", **wanted) == [1]

    def test_one_that_cannot_be_read_leaves_the_other_alone(self) -> None:
        page = of_gpu(sliced_gpu(0))
        assert values(page, "oomwatch_mig_value_absent", mig="MIG-00000000-0002", reading="memory") == [1]
        assert values(page, "oomwatch_mig_process_memory_bytes", mig="MIG-00000000-0001", pid="4810") == [9 * GIB]

    def test_an_engine_s_memory_on_a_slice_names_slice_and_parent(self) -> None:
        slice_user = replace(engine("a"), gpu_memory={"MIG-00000000-0001": GIB, gpu_uuid(1): 2 * GIB})
        page = Snapshot(NOW, gpus=(sliced_gpu(0), gpu(1)), engines=(slice_user,))
        on_slice = values(page, "oomwatch_engine_device_memory_bytes", gpu=gpu_uuid(0), mig="MIG-00000000-0001")
        assert on_slice == [GIB]
        assert values(page, "oomwatch_engine_device_memory_bytes", gpu=gpu_uuid(1)) == [2 * GIB]


class TestEngines:
    def test_what_the_page_does_not_have_has_no_sample(self) -> None:
        silent = replace(rank(), usage=NOT_EXPOSED, swapped=NOT_EXPOSED, finished=NOT_EXPOSED, sleep_level=NOT_EXPOSED)
        page = of_engine(engine(ranks=(silent,)))
        assert names(page).isdisjoint(
            {
                "oomwatch_engine_kv_cache_usage_ratio",
                "oomwatch_engine_swapped_requests",
                "oomwatch_engine_finished_requests_total",
                "oomwatch_engine_sleep_state",
            }
        )
        assert values(page, "oomwatch_engine_running_requests") == [64]

    def test_a_pool_of_unknown_size_has_no_blocks_and_keeps_its_usage(self) -> None:
        """vLLM 0.8.2 says None for the number of blocks, the Rust front-end says nothing."""
        page = of_engine(engine(ranks=(replace(rank(), pool=Pool()),)))
        capacity = {name for name in names(page) if name.startswith("oomwatch_engine_kv_cache_")}
        assert capacity == {"oomwatch_engine_kv_cache_usage_ratio"}

    def test_each_rank_has_its_own_series(self) -> None:
        ranks = (replace(rank("0"), usage=0.25), replace(rank("1"), usage=0.75))
        page = of_engine(engine(ranks=ranks))
        assert values(page, "oomwatch_engine_kv_cache_usage_ratio", rank="0") == [0.25]
        assert values(page, "oomwatch_engine_kv_cache_usage_ratio", rank="1") == [0.75]

    def test_counters_pass_through_as_vllm_shows_them(self) -> None:
        """One that starts again from 0 is a restart, which rate() understands."""
        restarted = replace(rank(), generation_tokens=0.0, preemptions=0.0)
        page = of_engine(replace(engine(ranks=(restarted,)), restarts=1))
        assert values(page, "oomwatch_engine_generation_tokens_total") == [0]
        assert values(page, "oomwatch_engine_restarts_total") == [1]

    def test_a_failed_scrape_leaves_identity_state_and_times(self) -> None:
        page = of_engine(unreachable(engine()))
        assert not [name for name, labels in samples(page) if "rank" in dict(labels)]
        assert values(page, "oomwatch_engine_up") == [0]
        assert values(page, "oomwatch_engine_state", state="unreachable") == [1]
        assert sum(values(page, "oomwatch_engine_state")) == 1
        assert values(page, "oomwatch_engine_last_seen_timestamp_seconds") == [NOW]
        assert values(page, "oomwatch_engine_info", model_name="org/llama-8b", vllm_version="0.32.0") == [1]

    def test_one_that_was_never_scraped_is_neither_up_nor_down(self) -> None:
        waiting = replace(engine(), state="unknown", scrape=None, last_answer=None, last_seen=None, last_progress=None)
        page = of_engine(waiting)
        assert not values(page, "oomwatch_engine_up")
        assert values(page, "oomwatch_engine_state", state="unknown") == [1]
        assert values(page, "oomwatch_engine_info", model_name="") == [1]

    def test_statistics_that_are_off_are_a_state_and_no_zero(self) -> None:
        view = engine()
        assert view.scrape is not None
        page = of_engine(replace(view, state="stats_disabled", scrape=replace(view.scrape, ranks=())))
        assert values(page, "oomwatch_engine_up") == [1]
        assert values(page, "oomwatch_engine_state", state="stats_disabled") == [1]
        assert not values(page, "oomwatch_engine_kv_cache_usage_ratio")

    def test_frozen_shows_although_the_page_answers(self) -> None:
        page = of_engine(replace(engine(), state="frozen", last_progress=NOW - 600))
        assert values(page, "oomwatch_engine_up") == [1]
        assert values(page, "oomwatch_engine_state", state="frozen") == [1]
        assert values(page, "oomwatch_engine_last_progress_timestamp_seconds") == [NOW - 600]

    @pytest.mark.parametrize(
        ("on_the_page", "configured", "shown"),
        [(0.92, 0.5, [0.92]), (NOT_KNOWN, 0.5, [0.5]), (NOT_KNOWN, None, [])],
    )
    def test_the_page_knows_the_budget_better_than_the_configuration(
        self, on_the_page: Maybe[float], configured: float | None, shown: list[float]
    ) -> None:
        view = engine(ranks=(replace(rank(), gpu_memory_utilization=on_the_page),))
        view = replace(view, facts=replace(view.facts, gpu_memory_utilization=configured))
        assert values(of_engine(view), "oomwatch_engine_gpu_memory_utilization_ratio") == shown

    def test_what_a_gone_engine_was_told_is_no_present(self) -> None:
        ended = gone(engine())
        ended = replace(ended, facts=replace(ended.facts, gpu_memory_utilization=0.9))
        assert not values(of_engine(ended), "oomwatch_engine_gpu_memory_utilization_ratio")

    def test_the_derived_numbers_of_a_gone_engine_go_with_it_and_its_verdicts_stay(self) -> None:
        concluded = judged(leaking(Subject(engine="llama-8b", rank="0")))
        for view, floors in ((engine("llama-8b"), [2000]), (gone(engine("llama-8b")), [])):
            page = replace(of_engine(view), verdicts=concluded)
            assert values(page, "oomwatch_engine_kv_floor_blocks") == floors
            assert values(page, "oomwatch_verdict_state", verdict="kv-block-leak") == [3]

    def test_sleep_is_one_hot(self) -> None:
        page = of_engine(engine(ranks=(replace(rank(), sleep_level="weights_offloaded"),)))
        assert values(page, "oomwatch_engine_sleep_state", state="weights_offloaded") == [1]
        assert values(page, "oomwatch_engine_sleep_state") == [0, 0, 1, 0]


class TestHostProcesses:
    def test_memory_is_summed_by_role_and_rank(self) -> None:
        members = (host_process(1, "worker", "TP0"), host_process(2, "worker", "TP0"), host_process(3, "worker", "TP1"))
        page = of_engine(replace(engine(), processes=members))
        anonymous = "oomwatch_engine_process_anonymous_bytes"
        assert values(page, anonymous, role="worker", process_rank="TP0") == [12 * GIB]
        assert values(page, anonymous, role="worker", process_rank="TP1") == [6 * GIB]

    def test_a_sum_with_an_unknown_part_is_unknown(self) -> None:
        members = (host_process(1, "other"), host_process(2, "other", anon=Absent("NO_PERMISSION")))
        page = of_engine(replace(engine(), processes=members))
        assert not values(page, "oomwatch_engine_process_anonymous_bytes")
        assert values(page, "oomwatch_engine_process_resident_bytes") == [16 * GIB]

    def test_the_tightest_limit_counts(self) -> None:
        members = (host_process(1, "api_server"), replace(host_process(2, "worker"), memory_limit=GIB))
        unlimited = replace(host_process(3, "other"), memory_limit=None)
        page = of_engine(replace(engine(), processes=(*members, unlimited)))
        assert values(page, "oomwatch_engine_host_memory_limit_bytes") == [GIB]

    def test_container_and_pod_are_labels_of_an_info_series_alone(self) -> None:
        page = of_engine(replace(engine(), processes=(host_process(1, "api_server"), host_process(2, "worker"))))
        with_container = {name for name, labels in samples(page) if "container_id" in dict(labels)}
        assert with_container == {"oomwatch_engine_container_info"}
        assert values(page, "oomwatch_engine_container_info", container_id="f" * 64) == [1]

    def test_without_a_container_there_is_no_such_series(self) -> None:
        outside = replace(host_process(1, "api_server"), container=None, pod_uid=None, memory_limit=None)
        page = of_engine(replace(engine(), processes=(outside,)))
        assert "oomwatch_engine_container_info" not in names(page)
        assert "oomwatch_engine_host_memory_limit_bytes" not in names(page)


class TestSources:
    def test_one_that_has_fallen_silent_is_down_and_has_no_duration(self) -> None:
        page = Snapshot(NOW, sources=(SourceView("host", "", None, NOW - 300, NOW - 300, 0.02, 0, "silent"),))
        assert values(page, "oomwatch_source_up") == [0]
        assert not values(page, "oomwatch_source_duration_seconds")
        assert values(page, "oomwatch_source_last_success_timestamp_seconds") == [NOW - 300]

    def test_one_that_has_not_run_yet_is_neither_up_nor_down(self) -> None:
        page = Snapshot(NOW, sources=(SourceView("host", "", None),))
        assert not values(page, "oomwatch_source_up")
        assert values(page, "oomwatch_source_failures_total") == [0]


class TestDriver:
    def test_versions_and_count_of_devices(self) -> None:
        page = Snapshot(NOW, driver=driver())
        versions = {"driver_version": "580.82.07", "nvml_version": "13.580.82.07", "cuda_version": "13.0"}
        assert values(page, "oomwatch_nvml_info", **versions) == [1]
        assert values(page, "oomwatch_nvml_devices") == [3]

    def test_calls_their_errors_and_their_time_by_function(self) -> None:
        function = "nvmlDeviceGetMemoryInfo_v2"
        assert values(bare(), "oomwatch_nvml_calls_total", call=function) == [300]
        assert values(bare(), "oomwatch_nvml_seconds_total", call=function) == [0.125]
        assert values(bare(), "oomwatch_nvml_errors_total", call=function, error="TIMEOUT") == [4]

    def test_pids_that_the_host_does_not_have(self) -> None:
        assert values(Snapshot(NOW, unresolved_gpu_pids=3), "oomwatch_nvml_unresolved_pids") == [3]
        assert not values(Snapshot(NOW), "oomwatch_nvml_unresolved_pids")
