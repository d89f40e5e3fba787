"""Prometheus' rules for exporters, one test for each that concerns a page of metrics.

From Prometheus' own documents: writing exporters; metric and label naming; instrumentation. Each class is one subject
of theirs; what they say of servers, rules and alerts is tested where those are.
"""

from __future__ import annotations

import functools
import re
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry

from oomwatch import textformat
from oomwatch.detectors.base import Eta
from oomwatch.exposition import SnapshotCollector, registry, render
from oomwatch.families import BASE_UNITS, COUNTED, FAMILIES, RATES, Family
from oomwatch.observations import DRIVER_STATES, SCRAPE_STATES, Absent, HostMemory, Memory
from oomwatch.snapshot import ENGINE_STATES, Snapshot
from tests.exposed import CALLS, CONFIG, check_metrics, everything, names, own_page, samples, strictly_parsed, values
from tests.snapshots import GIB, NOW, bare, crowded, engine, full, gpu, gpu_uuid, host_process, unreachable, verdict

OPENMETRICS = "application/openmetrics-text;version=1.0.0"

every_family = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)


class TestNames:
    @every_family
    def test_a_name_has_the_application_s_prefix_and_no_colon(self, family: Family) -> None:
        assert re.fullmatch(r"oomwatch_[a-z][a-z0-9_]*[a-z0-9]", family.name)

    @every_family
    def test_no_name_has_a_scaled_unit_or_a_percentage(self, family: Family) -> None:
        scaled = {
            "ms",
            "us",
            "mib",
            "gib",
            "kib",
            "mb",
            "gb",
            "kb",
            "percent",
            "milliseconds",
            "milliwatts",
            "megabytes",
        }
        assert scaled.isdisjoint(family.name.split("_"))

    @every_family
    def test_a_unit_is_in_the_plural_and_stands_last(self, family: Family) -> None:
        rate = next((rate for rate in RATES if family.base_name.endswith(rate)), "")
        words = family.base_name.removesuffix(rate).rstrip("_").split("_")
        singular = {"byte", "second", "watt", "token", "block"}
        assert not singular & {words[-1]}
        assert not set(BASE_UNITS) & set(words[:-1])

    @every_family
    def test_total_ends_the_names_of_counters_and_of_nothing_else(self, family: Family) -> None:
        assert family.name.endswith("_total") == (family.kind == "counter")

    @every_family
    def test_no_name_ends_as_a_part_of_a_histogram(self, family: Family) -> None:
        assert not family.name.endswith(("_sum", "_count", "_bucket"))

    @every_family
    def test_info_ends_the_names_of_identity_and_of_nothing_else(self, family: Family) -> None:
        assert family.name.endswith("_info") == (family.kind == "info")

    def test_no_name_is_there_twice(self) -> None:
        assert len({family.name for family in FAMILIES}) == len(FAMILIES)

    @every_family
    def test_a_timestamp_says_so_and_nothing_is_seconds_since(self, family: Family) -> None:
        assert ("Unix time" in family.meaning) == family.name.endswith("_timestamp_seconds")
        assert not family.name.endswith(("_age_seconds", "_ago_seconds", "_since_seconds"))


class TestLabels:
    @every_family
    def test_no_label_is_a_target_label_or_reserved(self, family: Family) -> None:
        reserved = {"type", "le", "quantile", "owner", "region", "zone", "cluster", "env", "service"}
        target = {"instance", "job", "host", "hostname", "node", "namespace", "pod"}
        assert (reserved | target).isdisjoint(family.labels)
        assert all(re.fullmatch(r"[a-z][a-z0-9_]*", label) for label in family.labels)

    @every_family
    def test_a_name_does_not_repeat_its_labels(self, family: Family) -> None:
        """The subject (gpu, engine, source, …) comes first in name and labels; a state is what its family is of."""
        words = family.name.split("_")[2:]
        repeated = set(words) & set(family.labels)
        assert repeated <= {"state", "process"} if family.name.endswith(("_state", "_process_info")) else not repeated

    def test_no_label_is_on_every_family(self) -> None:
        assert not set.intersection(*(set(family.labels) for family in FAMILIES))

    def test_identity_stands_in_info_series_of_value_one(self) -> None:
        identity = {"name", "index", "pci_bus_id", "model_name", "vllm_version", "container_id", "pod_uid", "process"}
        assert {family.kind for family in FAMILIES if identity & set(family.labels)} == {"info"}
        assert {value for (name, _), value in samples(full()).items() if name.endswith("_info")} == {1.0}

    def test_no_label_holds_a_measured_value(self) -> None:
        """The same node with other numbers has the same series."""
        before = full()
        (first, *rest), (serving, *other) = before.gpus, before.engines
        assert isinstance(first.processes, tuple)
        assert first.poll is not None
        assert serving.scrape is not None
        moved = replace(
            before,
            t=NOW + 15,
            gpus=(
                replace(
                    first,
                    last_seen=NOW + 15,
                    poll=replace(first.poll, utilization=0.5, temperature=70.0, power=100.25, ecc_corrected=9),
                    processes=tuple(replace(process, used=(process.used or 0) + 1) for process in first.processes),
                ),
                *rest,
            ),
            engines=(
                replace(
                    serving,
                    scrape=replace(
                        serving.scrape,
                        t=NOW + 15,
                        ranks=tuple(replace(rank, usage=0.1, running=1.0) for rank in serving.scrape.ranks),
                    ),
                ),
                *other,
            ),
            verdicts=tuple(
                replace(
                    one,
                    confidence=one.confidence / 2,
                    evidence={
                        key: value * 2 if isinstance(value, float) else value for key, value in one.evidence.items()
                    },
                    eta=Eta(1.0, 0.5, 2.0) if one.eta else None,
                    summary="other numbers",
                )
                for one in before.verdicts
            ),
        )
        assert samples(moved).keys() == samples(before).keys()
        assert samples(moved) != samples(before)


class TestValues:
    def test_no_ratio_lies_outside_zero_and_one(self) -> None:
        shown = {name: value for (name, _), value in samples(full()).items() if name.endswith("_ratio")}
        assert len(shown) == sum(family.name.endswith("_ratio") for family in FAMILIES)
        assert all(0 <= value <= 1 for value in shown.values())

    @pytest.mark.parametrize("impossible", [-0.01, 1.01, float("nan"), float("inf")])
    def test_an_impossible_ratio_has_no_sample(self, impossible: float) -> None:
        view = gpu(0)
        assert view.poll is not None
        view = replace(view, poll=replace(view.poll, utilization=impossible))
        assert "oomwatch_gpu_utilization_ratio" not in names(Snapshot(NOW, gpus=(view,)))

    def test_no_family_holds_the_sum_of_its_own_series(self) -> None:
        totals = {"total", "all", "sum", "any"}
        assert [series for series in samples(full()) for _, value in series[1] if value in totals] == []

    def test_waiting_for_a_reason_is_apart_from_all_that_wait(self) -> None:
        """Both in one family would count a request twice."""
        assert values(full(), "oomwatch_engine_waiting_requests", engine="sliced") == [12]
        assert values(full(), "oomwatch_engine_waiting_for_capacity_requests", engine="sliced") == [10]
        assert values(full(), "oomwatch_engine_waiting_deferred_requests", engine="sliced") == [2]

    def test_no_sample_has_a_timestamp(self) -> None:
        lines = [line for line in own_page(full()).splitlines() if not line.startswith("#")]
        assert [line for line in lines if not re.fullmatch(r"[a-z0-9_]+(\{.*\})? [0-9.e+-]+", line)] == []

    def test_what_node_exporter_has_is_not_here(self) -> None:
        with_host, without = full(), replace(full(), host=None)
        assert with_host.host == HostMemory(NOW, 1024 * GIB, 512 * GIB)
        assert samples(with_host) == samples(without)
        client_library = {name for name in names_of(everything(full())) if not name.startswith("oomwatch_")}
        assert {name.partition("_")[0] for name in client_library} == {"process", "python"}
        assert "process_resident_memory_bytes" in client_library

    def test_the_build_is_an_info_with_version_and_python_version(self) -> None:
        (labels,) = [dict(labels) for name, labels in samples(bare()) if name == "oomwatch_build_info"]
        assert labels.keys() == {"version", "python_version"}
        assert labels["python_version"] == ".".join(str(part) for part in sys.version_info[:3])


class TestHelp:
    @every_family
    def test_it_names_the_origin_and_when_it_is_read(self, family: Family) -> None:
        assert family.help.startswith(family.meaning)
        assert f"Source: {family.source}; {family.cadence}." in family.help
        assert re.search(
            r"nvml[A-Z]|NVML|vllm:|vLLM's|torch\.|PyTorch|/metrics|/proc|label |memory\.max|configuration|counters|"
            r"this program",
            family.source,
        )

    def test_it_is_one_text_whatever_the_values_are(self) -> None:
        assert help_lines(own_page(bare())) <= help_lines(own_page(full()))

    def test_every_family_on_a_page_has_one(self) -> None:
        page = own_page(full())
        assert {line.split()[2] for line in help_lines(page)} == {family.name for family in FAMILIES}

    @every_family
    def test_what_it_counts_is_known_from_the_name(self, family: Family) -> None:
        assert family.unit in {"", *BASE_UNITS, *COUNTED, *RATES}


class TestCardinality:
    def test_sixteen_gpus_with_64_processes_stay_bounded(self) -> None:
        gpus, processes, engines, shown = 16, 64, 4, 32
        count = len(samples(crowded(gpus, processes, engines), process_series=shown))
        per_gpu = 40 + 2 * shown + 2 * engines
        per_engine = 40 + 4 * 40 + 4 * gpus + 2 * gpus
        assert count < gpus * per_gpu + engines * per_engine + 100

    def test_more_processes_do_not_make_more_series(self) -> None:
        many, more = (len(samples(crowded(16, processes, 4))) for processes in (64, 640))
        assert many == more

    def test_per_process_series_can_be_switched_off(self) -> None:
        page = samples(crowded(2, 64, 4), process_series=0)
        assert not [name for name, labels in page if "pid" in dict(labels)]

    def test_engine_processes_come_first_then_the_largest_and_the_rest_is_counted(self) -> None:
        snapshot = crowded(1, 64, 4)
        shown = [
            dict(labels)["pid"] for name, labels in samples(snapshot, 6) if name == "oomwatch_gpu_process_memory_bytes"
        ]
        assert set(shown) == {"0", "1", "2", "3", "63", "62"}
        assert values(samples(snapshot, 6), "oomwatch_gpu_omitted_processes") == [58]
        assert values(samples(snapshot, 6), "oomwatch_gpu_processes") == [64]

    def test_the_processes_of_an_engine_are_summed_by_role_and_rank(self) -> None:
        helpers = tuple(replace(host_process(5000 + n, "other"), start=NOW - n) for n in range(200))
        view = replace(engine(), processes=(host_process(1, "api_server"), *helpers))
        snapshot = Snapshot(NOW, engines=(view,))
        assert values(snapshot, "oomwatch_engine_processes", role="other") == [200]
        assert values(snapshot, "oomwatch_engine_process_resident_bytes", role="other") == [200 * 8 * GIB]
        assert values(snapshot, "oomwatch_engine_process_start_timestamp_seconds", role="other") == [NOW - 199]
        assert len(values(snapshot, "oomwatch_engine_container_info")) == 1


class TestKnownSeriesExistFromTheStart:
    def test_failures_of_a_source_that_never_failed(self) -> None:
        assert values(full(), "oomwatch_source_failures_total", source="discovery") == [0]

    def test_errors_of_the_driver_that_never_came(self) -> None:
        assert values(full(), "oomwatch_nvml_errors_total", error="GPU_IS_LOST") == [0]

    def test_well_known_xids(self) -> None:
        snapshot = Snapshot(NOW, gpus=(gpu(0),))
        assert values(snapshot, "oomwatch_gpu_xid_errors_total", code="79") == [0]
        assert set(values(snapshot, "oomwatch_gpu_xid_errors_total")) == {0}
        assert not values(snapshot, "oomwatch_gpu_xid_last_timestamp_seconds")

    def test_incidents_of_every_killer(self) -> None:
        shown = {
            killer: values(bare(), "oomwatch_incidents", killer=killer)
            for killer in ("capacity", "fragmentation", "leak", "health")
        }
        assert set(map(tuple, shown.values())) == {(0,)}

    def test_restarts_of_an_engine(self) -> None:
        assert values(full(), "oomwatch_engine_restarts_total", engine="sliced") == [0]

    def test_every_way_in_which_a_scrape_can_end(self) -> None:
        assert set(SCRAPE_STATES) <= set(ENGINE_STATES)

    def test_every_state_of_an_engine_and_of_the_driver(self) -> None:
        assert len(values(full(), "oomwatch_engine_state", engine="sliced")) == len(ENGINE_STATES)
        assert len(values(bare(), "oomwatch_nvml_state")) == len(DRIVER_STATES)
        assert sum(values(bare(), "oomwatch_nvml_state")) == 1
        assert values(bare(), "oomwatch_nvml_state", state="library_missing") == [1]


class TestCollection:
    def test_families_are_built_at_each_scrape_so_a_gone_engine_s_series_are_gone(self) -> None:
        present = {"snapshot": full()}
        served = registry(collector_of(present))
        before = render(served, "")[0].decode()
        verdicts = tuple(one for one in full().verdicts if one.subject.engine == "sliced")
        present["snapshot"] = replace(full(), engines=(engine("sliced"),), verdicts=verdicts)
        after = render(served, "")[0].decode()
        assert 'engine="llama-8b"' in before
        assert 'engine="llama-8b"' not in after
        assert 'engine="sliced"' in after

    def test_a_gone_gpu_s_series_are_gone(self) -> None:
        assert values(full(), "oomwatch_gpu_info", gpu=gpu_uuid(1)) == [1]
        without = replace(full(), gpus=full().gpus[:1])
        assert not [name for name, labels in samples(without) if ("gpu", gpu_uuid(1)) in labels]

    def test_parallel_scrapes_are_each_of_one_moment(self) -> None:
        """While snapshots are swapped under them, no page mixes two: all numbers on it belong to the same one."""
        alternatives = [of_one_number(number) for number in range(1, 9)]
        present = {"snapshot": alternatives[0]}
        served = registry(collector_of(present))
        stop = threading.Event()

        def swap() -> None:
            while not stop.is_set():
                for snapshot in alternatives:
                    present["snapshot"] = snapshot

        swapper = threading.Thread(target=swap, daemon=True)
        swapper.start()
        try:
            with ThreadPoolExecutor(4) as scrapers:
                pages = list(scrapers.map(lambda _: render(served, "")[0].decode(), range(40)))
        finally:
            stop.set()
            swapper.join(5)
        seen = [set(re.findall(r"^oomwatch_gpu_memory_used_bytes.* (\S+)$", page, re.MULTILINE)) for page in pages]
        assert all(len(numbers) == 1 for numbers in seen)
        assert len(set.union(*seen)) > 1

    def test_a_scrape_does_no_io(self) -> None:
        """No file, no socket, no library: Python's audit events of this thread during a scrape."""
        snapshot = full()
        events = audited(lambda: list(collector_of({"snapshot": snapshot}).collect()))
        assert [
            event for event in events if event.startswith(("open", "os.", "socket.", "subprocess.", "ctypes."))
        ] == []

    def test_the_audit_above_would_see_a_file(self) -> None:
        assert "open" in audited(lambda: open(__file__).close())

    def test_a_failed_source_is_down_and_the_rest_is_served(self) -> None:
        snapshot = replace(full(), engines=(unreachable(full().engines[0]), full().engines[1]))
        assert values(snapshot, "oomwatch_engine_up", engine="llama-8b") == [0]
        assert values(snapshot, "oomwatch_engine_up", engine="sliced") == [1]
        assert values(snapshot, "oomwatch_source_up", source="nvml", target=gpu_uuid(1)) == [0]
        assert values(snapshot, "oomwatch_gpu_memory_used_bytes", gpu=gpu_uuid(0))

    def test_total_failure_returns_no_old_value(self) -> None:
        stale = Absent("STALE")
        gpus = tuple(
            replace(view, poll=None, memory=stale, processes=stale, held=stale, unowned=stale, mig=())
            for view in full().gpus
        )
        engines = tuple(
            replace(unreachable(view), processes=(), gpu_memory=stale, overhead=stale, startup=None)
            for view in full().engines
        )
        verdicts = tuple(verdict(one.name, "unknown", one.subject, reason="no fresh page") for one in full().verdicts)
        left = names(replace(full(), gpus=gpus, engines=engines, unresolved_gpu_pids=stale, verdicts=verdicts))
        ours = ("oomwatch_gpu_", "oomwatch_mig_", "oomwatch_engine_", "oomwatch_device_", "oomwatch_verdict_")
        assert {name for name in left if name.startswith(ours)} == {
            "oomwatch_verdict_state_timestamp_seconds",
            "oomwatch_verdict_unknown",
            "oomwatch_engine_device_memory_configured_bytes",
            "oomwatch_gpu_info",
            "oomwatch_gpu_last_seen_timestamp_seconds",
            "oomwatch_gpu_value_absent",
            "oomwatch_gpu_xid_errors_total",
            "oomwatch_gpu_xid_last_timestamp_seconds",
            "oomwatch_engine_info",
            "oomwatch_engine_up",
            "oomwatch_engine_state",
            "oomwatch_engine_last_seen_timestamp_seconds",
            "oomwatch_engine_last_progress_timestamp_seconds",
            "oomwatch_engine_restarts_total",
            "oomwatch_engine_out_of_memory_total",
            "oomwatch_engine_max_model_length_tokens",
        }

    def test_each_source_shows_success_times_and_duration_as_gauges(self) -> None:
        kinds = {family.name: family.kind for family in FAMILIES if family.name.startswith("oomwatch_source_")}
        assert kinds == {
            "oomwatch_source_up": "gauge",
            "oomwatch_source_last_run_timestamp_seconds": "gauge",
            "oomwatch_source_last_success_timestamp_seconds": "gauge",
            "oomwatch_source_duration_seconds": "gauge",
            "oomwatch_source_failures_total": "counter",
        }


class TestPage:
    @pytest.mark.parametrize(
        "snapshot", [Snapshot(0.0), bare(), full(), crowded(2, 40, 2)], ids=["empty", "bare", "full", "crowded"]
    )
    def test_promtool_finds_nothing(self, snapshot: Snapshot) -> None:
        assert check_metrics(render(everything(snapshot), "")[0]) == ""

    def test_promtool_would_find_something(self) -> None:
        assert "counter" in check_metrics(b"# HELP a_bytes A.\n# TYPE a_bytes counter\na_bytes 1\n")

    @pytest.mark.parametrize(
        ("accept", "content_type"),
        [
            ("", textformat.TEXT_0),
            ("*/*", textformat.TEXT_0),
            ("text/plain;version=0.0.4", textformat.TEXT_0),
            ("text/plain;version=1.0.0;escaping=underscores", textformat.TEXT_1),
            ("text/plain;version=1.0.0;escaping=dots", textformat.TEXT_1),
            ("application/openmetrics-text;version=1.0.0", textformat.OPENMETRICS),
            ("application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,*/*;q=0.1", textformat.OPENMETRICS),
            ("application/openmetrics-text;version=7", textformat.OPENMETRICS),
            ("application/openmetrics-text;version=0.0.1,text/plain;version=0.0.4;q=0.2,*/*;q=0.1", textformat.TEXT_0),
            ("application/openmetrics-text;version=x, text/plain;version=y", textformat.TEXT_0),
        ],
    )
    def test_the_format_is_what_the_client_accepts(self, accept: str, content_type: str) -> None:
        page, told = render(everything(bare()), accept)
        assert told == content_type
        assert page.endswith(b"# EOF\n") == (content_type == textformat.OPENMETRICS)

    @pytest.mark.parametrize("snapshot", [bare(), full()], ids=["bare", "full"])
    def test_the_strict_openmetrics_parser_accepts_it(self, snapshot: Snapshot) -> None:
        page = render(everything(snapshot), OPENMETRICS)[0]
        assert page.endswith(b"# EOF\n")
        shown = {family.name for family in strictly_parsed(page) if family.samples}
        assert {family.base_name for family in FAMILIES if family.name in names(snapshot)} <= shown

    def test_openmetrics_names_the_units(self) -> None:
        units = {family.name: family.unit for family in strictly_parsed(render(everything(full()), OPENMETRICS)[0])}
        assert units["oomwatch_gpu_memory_used_bytes"] == "bytes"
        assert units["oomwatch_nvml_seconds"] == "seconds"
        assert units["oomwatch_gpu_utilization_ratio"] == "ratio"

    def test_both_formats_tell_the_same(self) -> None:
        told = {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in strictly_parsed(render(everything(full()), OPENMETRICS)[0])
            for sample in family.samples
            if sample.name.startswith("oomwatch_")
        }
        assert told == samples(full())


def collector_of(present: dict[str, Snapshot]) -> SnapshotCollector:
    return SnapshotCollector(
        lambda: present["snapshot"], process_series_per_gpu=lambda: 32, config=lambda: CONFIG, nvml_calls=lambda: CALLS
    )


def of_one_number(number: int) -> Snapshot:
    """Several devices that all have the same memory in use."""
    views = [gpu(index) for index in range(4)]
    return Snapshot(NOW, gpus=tuple(replace(view, memory=replace_used(view.memory, number * GIB)) for view in views))


def replace_used(memory: object, used: int) -> Memory:
    assert isinstance(memory, Memory)
    return replace(memory, used=used)


def names_of(served: CollectorRegistry) -> set[str]:
    return {sample.name for family in served.collect() for sample in family.samples}


def help_lines(page: str) -> set[str]:
    return {line for line in page.splitlines() if line.startswith("# HELP ")}


_audited: list[str] = []
_auditing = threading.local()


def _audit(event: str, _arguments: object) -> None:
    if getattr(_auditing, "on", False):
        _audited.append(event)


@functools.cache
def _install_audit() -> None:
    """Once: an audit hook cannot be taken away, so it is told when to look."""
    sys.addaudithook(_audit)


def audited(action: Callable[[], object]) -> list[str]:
    """The audit events of this thread while ``action`` runs."""
    _install_audit()
    _audited.clear()
    _auditing.on = True
    try:
        action()
    finally:
        _auditing.on = False
    return list(_audited)
