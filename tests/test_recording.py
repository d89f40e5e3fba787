"""Recordings hold everything that was observed, and say what is wrong with a line that they cannot read."""

import contextlib
import gzip
import io
import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oomwatch.observations import (
    HUNG,
    NOT_KNOWN,
    NOT_READ,
    SCRAPE_STATES,
    Absent,
    AllocationFailure,
    AllocatorReport,
    BlockOwners,
    DriverReport,
    EngineFacts,
    EngineScrape,
    EngineUpdate,
    Gap,
    GpuPoll,
    GpuProcess,
    HostMemory,
    HostProcess,
    LogLine,
    Memory,
    MigInstance,
    Observation,
    ProcessGone,
    RemappedRows,
    SourceRun,
    TargetRemoved,
    Tick,
    XidEvent,
)
from oomwatch.recording import (
    Decoder,
    Header,
    Recording,
    RecordingError,
    Writer,
    from_line,
    header_line,
    read,
    to_line,
)
from tests.sources.vllm.captures import PAGES, name_of

START = 1_793_491_200.0  # 2026-11-01T00:00:00Z
HEADER = '{"oomwatch_recording": 1, "start": "2026-11-01T00:00:00Z", "engines": [{"name": "llama-8b"}]}'


def recording(*lines: str, header: str = HEADER) -> Recording:
    return read(io.BytesIO("\n".join([header, *lines, ""]).encode()))


def only(line: str, header: str = HEADER) -> Observation:
    (observation,) = recording(line, header=header)
    return observation


def problem_of(*lines: str, header: str = HEADER) -> str:
    with pytest.raises(RecordingError) as caught:
        list(recording(*lines, header=header))
    return str(caught.value)


# --- the format, line by line ----------------------------------------------------------------------------------


def test_a_gpu_poll_is_read_as_the_format_shows_it() -> None:
    poll = only(
        '{"t": 15.0, "gpu": {"uuid": "GPU-aaaa", "index": 0, "name": "NVIDIA A100-SXM4-80GB", "memory": {"total": '
        '85899345920, "reserved": 629145600, "used": 77309411328, "free": 7960788992}, "processes": [{"pid": 4711, '
        '"used": 77000000000}], "errors": {}}}'
    )
    assert poll == GpuPoll(
        START + 15,
        "GPU-aaaa",
        0,
        "NVIDIA A100-SXM4-80GB",
        Memory(85899345920, 629145600, 77309411328, 7960788992),
        (GpuProcess(4711, 77000000000),),
    )


@pytest.mark.parametrize("reason", ["GPU_IS_LOST", "HUNG", "NVML_ERROR_GPU_IS_LOST"])
def test_what_failed_is_absent_with_its_reason(reason: str) -> None:
    poll = only(f'{{"t": 0, "gpu": {{"uuid": "GPU-a", "memory": null, "errors": {{"memory": "{reason}"}}}}}}')
    assert isinstance(poll, GpuPoll)
    assert poll.memory == Absent(reason.removeprefix("NVML_ERROR_"))


def test_a_list_that_was_not_asked_for_is_not_the_same_as_one_that_could_not_be_had() -> None:
    left_out = only('{"t": 0, "gpu": {"uuid": "GPU-a", "memory": null, "errors": {}}}')
    null = only('{"t": 0, "gpu": {"uuid": "GPU-a", "memory": null, "processes": null, "errors": {}}}')
    assert isinstance(left_out, GpuPoll)
    assert isinstance(null, GpuPoll)
    assert (left_out.processes, null.processes) == (NOT_READ, NOT_KNOWN)


def test_a_process_without_a_number_stays_without_one() -> None:
    poll = only('{"t": 0, "gpu": {"uuid": "G", "memory": null, "processes": [{"pid": 1, "used": null}], "errors": {}}}')
    assert isinstance(poll, GpuPoll)
    assert poll.processes == (GpuProcess(1, None),)


def test_slices_have_memory_and_processes_of_their_own() -> None:
    poll = only(
        '{"t": 0, "gpu": {"uuid": "GPU-a", "memory": null, "errors": {"memory": "NO_PERMISSION"}, "mig": [{"uuid": '
        '"MIG-b", "gi": 1, "ci": 0, "memory": {"total": 9, "reserved": 0, "used": 4, "free": 5}, "processes": []}]}}'
    )
    assert isinstance(poll, GpuPoll)
    assert poll.mig == (MigInstance("MIG-b", 1, 0, Memory(9, 0, 4, 5), ()),)


def test_events_the_host_and_the_end_of_a_process() -> None:
    assert only('{"t": 16.2, "xid": {"uuid": "GPU-aaaa", "code": 79}}') == XidEvent(START + 16.2, "GPU-aaaa", 79)
    assert only('{"t": 15.0, "host": {"memory_total": 10, "memory_available": 9}}') == HostMemory(START + 15, 10, 9)
    assert only('{"t": 99.0, "process": {"pid": 4711, "gone": true}}') == ProcessGone(START + 99, 4711)
    assert only('{"t": 30.0, "tick": {}}') == Tick(START + 30)


def test_a_scrape_in_short_reads_as_a_page_does() -> None:
    scrape = only(
        '{"t": 15.1, "scrape": {"engine": "llama-8b", "ok": true, "seconds": 0.012, "samples": '
        '{"vllm:kv_cache_usage_perc{engine=\\"0\\",model_name=\\"m\\"}": 0.42, '
        '"vllm:num_requests_running{engine=\\"0\\",model_name=\\"m\\"}": 7}}}'
    )
    assert isinstance(scrape, EngineScrape)
    assert (scrape.state, scrape.seconds, scrape.model_name) == ("ok", 0.012, "m")
    (rank,) = scrape.ranks
    assert (rank.rank, rank.usage, rank.running) == ("0", 0.42, 7)


@pytest.mark.parametrize("capture", PAGES, ids=name_of)
def test_a_whole_page_means_what_its_short_form_means(capture: Path) -> None:
    page = capture.read_text()
    long = only(json.dumps({"t": 1.5, "scrape": {"engine": "e", "ok": True, "seconds": 0.5, "page": page}}))
    assert isinstance(long, EngineScrape)
    short = to_line(long, START)
    assert short is not None
    assert only(short) == long


@pytest.mark.parametrize(
    ("error", "state"),
    [
        ("timeout", "timeout"),
        ("read timed out", "timeout"),
        ("connection refused", "unreachable"),
        ("HTTP 503: the server is not ready", "http_error"),
        ("HTTP 401", "unauthorized"),
        ("too_large", "too_large"),
        ("certificate verify failed", "tls_error"),
        ("", "unreachable"),
    ],
)
def test_the_words_of_a_failed_scrape_tell_its_state(error: str, state: str) -> None:
    scrape = only(json.dumps({"t": 30.1, "scrape": {"engine": "llama-8b", "ok": False, "error": error}}))
    assert isinstance(scrape, EngineScrape)
    assert (scrape.state, scrape.error, scrape.answered) == (state, error, False)


def test_an_answer_in_short_without_any_series_of_vllm_is_one_with_statistics_off() -> None:
    scrape = only('{"t": 1, "scrape": {"engine": "e", "ok": true, "seconds": 0.1, "samples": {}}}')
    assert isinstance(scrape, EngineScrape)
    assert scrape.state == "stats_disabled"


def test_the_pool_is_counted_by_the_version_that_the_header_names() -> None:
    """Up to 0.10.1 the null block counts as used: 1 of 100 at idle is nothing used of 99."""
    line = (
        '{"t": 1, "scrape": {"engine": "e", "ok": true, "samples": {"vllm:kv_cache_usage_perc{engine=\\"0\\"}": 0.01, '
        '"vllm:cache_config_info{engine=\\"0\\",num_gpu_blocks=\\"100\\"}": 1}}}'
    )
    old, new = (
        only(line, f'{{"oomwatch_recording": 1, "engines": [{{"name": "e", "vllm_version": "{version}"}}]}}')
        for version in ("0.10.1", "0.10.2")
    )
    assert isinstance(old, EngineScrape)
    assert isinstance(new, EngineScrape)
    assert (old.ranks[0].pool.used, new.ranks[0].pool.used) == (0, 1)


def test_log_lines_and_allocator_statistics() -> None:
    assert only('{"t": 3.0, "log": {"engine": "e", "event": "kv_pool", "fields": {"tokens": 86432}}}') == LogLine(
        START + 3, "e", event="kv_pool", fields={"tokens": 86432}
    )
    assert only('{"t": 3.0, "log": {"engine": "e", "line": "INFO x"}}') == LogLine(START + 3, "e", line="INFO x")
    assert only(
        '{"t": 15.0, "allocator": {"pid": 4712, "gpu": "GPU-aaaa", "stats": {"num_ooms": 0}, '
        '"largest_free_block": 123}}'
    ) == AllocatorReport(START + 15, 4712, "GPU-aaaa", {"num_ooms": 0}, 123)


def test_whose_the_blocks_of_a_rank_are() -> None:
    owners = only(
        '{"t": 5.0, "owners": {"pid": 4711, "rank": "1", "age": 2, "total": 100, "free": 95, "living": 3, '
        '"finished": 0, "ownerless": 2, "cached": 5}}'
    )
    assert owners == BlockOwners(START + 5, 4711, "1", START + 3, 100, 95, living=3, finished=0, ownerless=2, cached=5)


def test_classes_of_free_blocks_are_pairs() -> None:
    with pytest.raises(RecordingError, match=r"allocator\.free_by_size has to be a list of pairs"):
        only('{"t": 1, "allocator": {"pid": 1, "gpu": "GPU-a", "stats": {}, "free_by_size": [[1, 2, 3]]}}')


def test_the_text_of_logs_is_written_only_when_asked_for() -> None:
    line = LogLine(1.0, "e", line="INFO the prompt was …", event="kv_pool", fields={"tokens": 1})
    assert "prompt" not in (to_line(line) or "")
    assert to_line(replace(line, event=None, fields={})) is None
    assert "the prompt" in (to_line(line, log_text=True) or "")


# --- whose a process is ----------------------------------------------------------------------------------------


def engines_of(*lines: str, header: str) -> list[str | None]:
    return [found.engine for found in recording(*lines, header=header) if isinstance(found, HostProcess)]


def process_line(t: float, pid: int, **more: object) -> str:
    return json.dumps({"t": t, "process": {"pid": pid, "start": 1.0, "rss": 1, "anon": 1, "name": "p", **more}})


def test_a_process_belongs_to_the_engine_that_names_its_pid_or_its_parents_or_shares_its_container() -> None:
    assert engines_of(
        process_line(0, 10, container="c"),
        process_line(0, 11, ppid=10),
        process_line(0, 12, container="c"),
        process_line(0, 13, container="d"),
        header='{"oomwatch_recording": 1, "engines": [{"name": "a", "pids": [10]}, {"name": "b", "pids": [20]}]}',
    ) == ["a", "a", "a", None]


def test_pids_that_are_learnt_later_replace_those_of_the_header() -> None:
    assert engines_of(
        process_line(0, 10),
        '{"t": 1, "engine": {"name": "a", "pids": [11]}}',
        process_line(2, 10),
        process_line(2, 11),
        header='{"oomwatch_recording": 1, "engines": [{"name": "a", "pids": [10]}]}',
    ) == ["a", None, "a"]


def test_roles_are_read_from_titles() -> None:
    process = only(process_line(0, 1, name="VLLM::Worker_TP1"))
    assert isinstance(process, HostProcess)
    assert (process.role, process.rank) == ("worker", "TP1")


# --- times -----------------------------------------------------------------------------------------------------


def test_times_count_from_the_headers_start_unless_they_are_unix_times() -> None:
    assert only('{"t": 1.25, "tick": {}}') == Tick(START + 1.25)
    assert only(f'{{"t": {START + 1.25}, "tick": {{}}}}') == Tick(START + 1.25)
    assert only('{"t": 1.25, "tick": {}}', header='{"oomwatch_recording": 1}') == Tick(1.25)


def test_equal_times_are_in_order_and_earlier_ones_are_an_error_with_their_line() -> None:
    assert len(list(recording('{"t": 5, "tick": {}}', '{"t": 5, "tick": {}}'))) == 2
    assert problem_of('{"t": 5, "tick": {}}', '{"t": 4, "tick": {}}') == (
        "recording:3: out of order: its time 4 s is before 5 s of the line before. Sort the lines by t"
    )


def test_intervals_are_the_headers_or_the_median_distance_of_a_targets_observations() -> None:
    lines = [
        line
        for t in (0, 10, 20, 50)
        for line in (
            f'{{"t": {t}, "gpu": {{"uuid": "A", "memory": null, "processes": [], "errors": {{}}}}}}',
            f'{{"t": {t}, "gpu": {{"uuid": "B", "memory": null, "errors": {{}}}}}}',
            f'{{"t": {t}, "scrape": {{"engine": "e", "ok": false}}}}',
        )
    ]
    assert recording(*lines).intervals() == {"gpu": 10, "scrape": 10, "lists": 10}
    stated = '{"oomwatch_recording": 1, "intervals": {"gpu": 15, "process": 60}}'
    assert recording(*lines, header=stated).intervals() == {"gpu": 15, "scrape": 10, "lists": 10, "process": 60}


def test_looking_ahead_for_intervals_loses_no_observation() -> None:
    opened = recording('{"t": 0, "tick": {}}', '{"t": 1, "tick": {}}')
    opened.intervals()
    assert [found.t - START for found in opened] == [0, 1]


# --- what cannot be read, and what is passed over --------------------------------------------------------------


def test_unknown_keys_are_ignored_and_unknown_kinds_counted() -> None:
    opened = recording(
        '{"t": 0, "colour": {"red": 1}}', '{"t": 1, "tick": {"new": 1}, "more": 2}', '{"t": 2, "colour": {}}'
    )
    assert [type(found) for found in opened] == [Tick]
    assert opened.ignored == {"colour": 2}


@pytest.mark.parametrize("version", ["2", '"2.0"', "2.5", "0"])
def test_another_major_version_is_refused(version: str) -> None:
    assert "reads format 1. Use a newer oomwatch for it" in problem_of(header=f'{{"oomwatch_recording": {version}}}')


def test_another_minor_version_is_read() -> None:
    assert list(recording(header='{"oomwatch_recording": 1.1}')) == []


@pytest.mark.parametrize("header", ['{"t": 0, "tick": {}}', "[]", "hello", "", '{"oomwatch_recording": "x"}'])
def test_a_file_without_a_header_is_refused(header: str) -> None:
    assert "recording:1: " in problem_of(header=header)


def test_an_empty_file_is_refused() -> None:
    with pytest.raises(RecordingError, match="the file is empty: this is no recording"):
        read(io.BytesIO(b""))


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("hello", "it is not JSON: expecting value at character 1"),
        ("[1]", "the line is [1], and has to be an object {…}"),
        ('{"tick": {}}', "t is missing, and has to be a number"),
        ('{"t": "1", "tick": {}}', 't is "1", and has to be a number'),
        ('{"t": true, "tick": {}}', "t is true, and has to be a number"),
        ('{"t": NaN, "tick": {}}', "it is not JSON: NaN is no number; a value that was not available is null"),
        ('{"t": 1e999, "tick": {}}', "t is Infinity, and has to be a number"),
        ('{"t": 1}', "the line has a time and no observation"),
        ('{"t": 1, "gpu": {}}', "gpu.uuid is missing, and has to be a text"),
        ('{"t": 1, "gpu": {"uuid": "A", "memory": 7}}', "gpu.memory is 7, and has to be an object {…}"),
        (
            '{"t": 1, "gpu": {"uuid": "A", "memory": {"total": 1.5}}}',
            "gpu.memory.total is 1.5, and has to be a whole number",
        ),
        (
            '{"t": 1, "gpu": {"uuid": "A", "memory": null, "processes": [{"pid": "x"}]}}',
            'gpu.processes.pid is "x", and has to be a number',
        ),
        ('{"t": 1, "scrape": {"engine": "e"}}', "scrape.ok is missing, and has to be true or false"),
        (
            '{"t": 1, "scrape": {"engine": "e", "ok": true, "samples": {"x": "1"}}}',
            'scrape.samples.x is "1", and has to be a number',
        ),
        ('{"t": 1, "engine": {"name": 3}}', "engine.name is 3, and has to be a text"),
    ],
)
def test_a_wrong_line_is_named_with_what_is_wrong(line: str, problem: str) -> None:
    assert problem_of('{"t": 0, "tick": {}}', line) == f"recording:3: {problem}"


def test_deep_nesting_is_an_error_like_any_other() -> None:
    assert problem_of('{"t": 1, "x": ' + "[" * 200_000) == "recording:2: it is nested too deeply"


@pytest.mark.parametrize(
    ("header", "problem"),
    [
        (
            '{"oomwatch_recording": 1, "start": "yesterday"}',
            'recording:1: start is "yesterday", and has to be a time such as 2026-11-01T00:00:00Z',
        ),
        (
            '{"oomwatch_recording": 1, "intervals": {"gpu": 0}}',
            "recording:1: intervals.gpu is 0, and has to be above 0 seconds",
        ),
        (
            '{"oomwatch_recording": 1, "engines": [{"name": "a"}, {}]}',
            "recording:1: engines[1].name is missing, and has to be a text",
        ),
    ],
)
def test_a_wrong_header_is_named_with_what_is_wrong(header: str, problem: str) -> None:
    assert problem_of(header=header) == problem


# --- files -----------------------------------------------------------------------------------------------------


def ticks(count: int) -> bytes:
    return "\n".join([HEADER, *(json.dumps({"t": t, "tick": {"n": hash(t)}}) for t in range(count)), ""]).encode()


def test_plain_and_gzip_are_told_apart_by_what_they_hold(tmp_path: Path) -> None:
    for name, data in (("a.jsonl.gz", ticks(5)), ("b.jsonl", gzip.compress(ticks(5)))):
        (tmp_path / name).write_bytes(data)
        with read(tmp_path / name) as opened:
            assert len(list(opened)) == 5


def read_until_the_break(data: bytes) -> tuple[int, str]:
    read_so_far: list[Observation] = []
    with pytest.raises(RecordingError) as caught:
        read_so_far.extend(read(io.BytesIO(data)))
    return len(read_so_far), str(caught.value)


def test_a_gzip_that_breaks_off_gives_everything_before_the_break_and_then_an_error() -> None:
    whole = gzip.compress(ticks(50_000), mtime=0)
    got, problem = read_until_the_break(whole[: len(whole) // 2])
    assert 10_000 < got < 40_000
    assert problem.startswith(f"recording: after line {got + 1}: the gzip file breaks off")


def test_a_line_that_breaks_off_is_told_as_such() -> None:
    got, problem = read_until_the_break(ticks(10)[:-5])
    assert (got, problem) == (
        9,
        "recording:11: the file breaks off in the middle of this line. What stands before was read",
    )


def test_a_damaged_gzip_is_an_error() -> None:
    damaged = bytearray(gzip.compress(ticks(1000), mtime=0))
    damaged[len(damaged) // 2] ^= 0xFF
    assert "damaged" in read_until_the_break(bytes(damaged))[1]


def test_a_file_that_is_not_there_or_a_folder_is_an_error_with_its_name(tmp_path: Path) -> None:
    for path, words in ((tmp_path / "none", "no such file or directory"), (tmp_path, "is a directory")):
        with pytest.raises(RecordingError, match=f"{path}: cannot be read: {words}"):
            read(path)


# --- both ways -------------------------------------------------------------------------------------------------

TIMES = st.integers(0, 10**13).map(lambda microseconds: microseconds / 1e6)
TEXTS = st.text(max_size=20)
NAMES = st.text(min_size=1, max_size=12)
BYTES = st.integers(0, 2**48)
PIDS = st.integers(1, 2**22)
NUMBERS = st.floats(0, 1e9, allow_nan=False)
MICROSECONDS = st.integers(0, 10**9).map(lambda value: value / 1e6)
REASONS = st.sampled_from(["GPU_IS_LOST", "NOT_SUPPORTED", "IMPLAUSIBLE", "NOT_KNOWN"]).map(Absent) | st.just(HUNG)


T = TypeVar("T")


def maybe(values: st.SearchStrategy[T]) -> st.SearchStrategy[T | Absent]:
    return st.one_of(values, REASONS, st.just(NOT_READ))


def optional(values: st.SearchStrategy[T]) -> st.SearchStrategy[T | None]:
    return st.one_of(st.none(), values)


MEMORIES = st.builds(Memory, BYTES, optional(BYTES), BYTES, BYTES)
LISTS = st.lists(st.builds(GpuProcess, PIDS, optional(BYTES)), max_size=4).map(tuple)
SLICES = st.builds(MigInstance, NAMES, st.integers(0, 20), st.integers(0, 20), maybe(MEMORIES), maybe(LISTS))
POLLS = st.builds(
    GpuPoll,
    TIMES,
    NAMES,
    st.integers(-1, 64),
    TEXTS,
    maybe(MEMORIES),
    maybe(LISTS),
    mig=st.lists(SLICES, max_size=3).map(tuple),
    mig_enabled=maybe(st.booleans()),
    unified=st.booleans(),
    utilization=maybe(NUMBERS),
    temperature=maybe(NUMBERS),
    power=maybe(NUMBERS),
    ecc_uncorrected=maybe(BYTES),
    ecc_corrected=maybe(BYTES),
    remapped_rows=maybe(st.builds(RemappedRows, BYTES, BYTES, st.booleans(), st.booleans())),
    recovery_action=maybe(st.integers(0, 4)),
    pci_bus_id=maybe(TEXTS),
    seconds=MICROSECONDS,
)
FACTS = st.builds(
    EngineFacts,
    NAMES,
    target=optional(TEXTS),
    pids=optional(st.lists(PIDS, max_size=3).map(tuple)),
    gpus=optional(st.lists(NAMES, max_size=3).map(tuple)),
    gpu_memory_utilization=optional(NUMBERS),
    max_model_len=optional(BYTES),
    vllm_version=optional(TEXTS),
    kv_connector=optional(st.booleans()),
    kv_pool_blocks=optional(BYTES),
    kv_pool_bytes=optional(BYTES),
    weights_bytes=optional(BYTES),
    no_address=optional(TEXTS),
    origin=st.sampled_from(["configuration", "discovery"]),
)
HOST_PROCESSES = st.builds(
    HostProcess,
    TIMES,
    PIDS,
    NUMBERS,
    BYTES,
    maybe(BYTES),
    st.one_of(TEXTS, st.just("VLLM::Worker_TP1")),
    ppid=optional(PIDS),
    container=optional(TEXTS),
    pod_uid=optional(TEXTS),
    memory_limit=optional(BYTES),
    engine=optional(NAMES),
    role=st.sampled_from(["api_server", "engine_core", "worker", "other"]),
    rank=optional(NAMES),
)
DRIVERS = st.builds(
    DriverReport,
    TIMES,
    NAMES,
    TEXTS,
    driver_version=maybe(TEXTS),
    nvml_version=maybe(TEXTS),
    cuda_version=maybe(TEXTS),
    device_count=maybe(BYTES),
)
FAILED_SCRAPES = st.builds(
    EngineScrape,
    TIMES,
    NAMES,
    st.sampled_from([state for state in SCRAPE_STATES if state not in ("ok", "stats_disabled", "no_traffic_yet")]),
    MICROSECONDS,
    st.text(min_size=1, max_size=20),
    healthy=st.sampled_from([True, False, NOT_READ, NOT_KNOWN]),
)
SIMPLE = st.one_of(
    st.builds(XidEvent, TIMES, NAMES, BYTES),
    st.builds(ProcessGone, TIMES, PIDS),
    st.builds(HostMemory, TIMES, BYTES, BYTES),
    st.builds(SourceRun, TIMES, NAMES, TEXTS, st.booleans(), MICROSECONDS, TEXTS),
    st.builds(TargetRemoved, TIMES, NAMES, NAMES),
    st.builds(Tick, TIMES),
    st.builds(lambda t, seconds: Gap(t, round(t - seconds, 6)), TIMES, MICROSECONDS),
    st.builds(LogLine, TIMES, NAMES, line=st.none(), event=NAMES, fields=st.dictionaries(NAMES, BYTES, max_size=3)),
    st.builds(
        lambda t, age, *rest: BlockOwners(t, rest[0], rest[1], round(t - age, 6), *rest[2:]),
        *(TIMES, MICROSECONDS, PIDS, NAMES, BYTES, BYTES, BYTES, BYTES, optional(BYTES), optional(BYTES)),
    ),
    st.builds(EngineUpdate, TIMES, FACTS, st.booleans()),
)
FAILURES = st.builds(
    AllocationFailure,
    TIMES,
    *[optional(BYTES)] * 5,
)
ALLOCATORS = st.builds(
    AllocatorReport,
    TIMES,
    PIDS,
    NAMES,
    st.dictionaries(NAMES, BYTES, max_size=3),
    *[optional(BYTES)] * 5,
    free_by_size=st.lists(st.tuples(BYTES, BYTES), max_size=3).map(tuple),
    backend=optional(NAMES),
    expandable=optional(st.booleans()),
    max_split_size=optional(BYTES),
    engine=optional(NAMES),
    started=optional(TIMES),
    failure=optional(FAILURES),
)
OBSERVATIONS = st.one_of(POLLS, HOST_PROCESSES, DRIVERS, FAILED_SCRAPES, ALLOCATORS, SIMPLE)


@given(OBSERVATIONS)
def test_what_is_written_is_read_again(observation: Observation) -> None:
    line = to_line(observation)
    assert line is not None
    assert "\n" not in line
    assert from_line(line) == observation


@given(st.lists(OBSERVATIONS, max_size=6), st.lists(FACTS, max_size=2), st.booleans())
def test_a_file_read_and_written_again_is_equal_in_meaning(
    observations: list[Observation], engines: list[EngineFacts], packed: bool
) -> None:
    in_order = sorted(observations, key=lambda found: found.t)
    header = Header(START, "note", tuple(engines), {"gpu": 15.0})
    first = written([replace(found, t=round(found.t + START, 6)) for found in in_order], header)
    opened = read(io.BytesIO(gzip.compress(first) if packed else first))
    assert opened.header == header
    again = list(opened)
    assert written(again, header) == first


def written(observations: Iterable[Observation], header: Header) -> bytes:
    stream = io.BytesIO()
    writer = Writer(stream, header)
    for observation in observations:
        writer.write(observation)
    return stream.getvalue()


@settings(max_examples=200)
@given(st.binary(max_size=200))
def test_no_line_whatever_it_holds_ends_in_anything_but_an_observation_or_a_recording_error(line: bytes) -> None:
    with contextlib.suppress(RecordingError):
        Decoder().observation(line)


def test_a_header_says_only_what_is_known() -> None:
    assert json.loads(header_line(Header(START, engines=(EngineFacts("a", pids=(1, 2)),)))) == {
        "oomwatch_recording": 1,
        "start": "2026-11-01T00:00:00Z",
        "engines": [{"name": "a", "pids": [1, 2]}],
    }
