"""Every captured page of every version means what the run that made it was known to be doing."""

from __future__ import annotations

from pathlib import Path

import pytest

from oomwatch.observations import NOT_EXPOSED, NOT_KNOWN, Adapters, EngineFacts, Maybe, known
from oomwatch.sources.vllm.meaning import read_page
from oomwatch.sources.vllm.names import LORA_REQUESTS, SAMPLE_NAMES
from oomwatch.sources.vllm.pages import read, samples_for_recording, samples_from_recording
from tests import golden
from tests.sources.vllm.captures import DATA, PAGES, capture, name_of, version_of

every_page = pytest.mark.parametrize("page", PAGES, ids=name_of)


def test_pages_of_eight_versions_are_there() -> None:
    assert {version_of(page) for page in PAGES} >= {
        "0.8.5", "0.9.2", "0.10.2", "0.11.2", "0.16.0", "0.23.0", "0.27.1", "0.32.0",
    }  # fmt: skip


@every_page
def test_the_reading_is_the_golden_one(page: Path, pytestconfig: pytest.Config) -> None:
    reading = read_page(read(page.read_bytes()), version_of(page))
    golden.check(pytestconfig, DATA / "readings" / page.parent.name / f"{page.stem}.json", reading)


@every_page
def test_the_page_alone_tells_what_the_version_would(page: Path) -> None:
    parsed = read(page.read_bytes())
    without, with_version = read_page(parsed), read_page(parsed, version_of(page))
    assert without == with_version


@every_page
def test_a_recording_of_the_samples_reads_like_the_page(page: Path) -> None:
    parsed = read(page.read_bytes())
    replayed = samples_from_recording(samples_for_recording(parsed))
    assert replayed.samples == parsed.samples
    assert read_page(replayed, version_of(page)) == read_page(parsed, version_of(page))


@every_page
def test_prometheus_clients_own_parser_finds_the_same_samples(page: Path) -> None:
    from prometheus_client.parser import text_string_to_metric_families

    theirs = {
        (SAMPLE_NAMES[sample.name], frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(page.read_text())
        for sample in family.samples
        if sample.name in SAMPLE_NAMES
    }
    ours = {sample.identity: sample.value for sample in read(page.read_bytes()).samples}
    # The series of adapters are counted, and their names are not kept.
    assert {key: value for key, value in ours.items() if key[0] != LORA_REQUESTS} == {
        key: value for key, value in theirs.items() if key[0] != LORA_REQUESTS
    }


# What the captures' notes say of each page: usage, running, waiting, preemptions, usable blocks and used ones, by rank.
FACTS: dict[str, list[tuple[float, ...]]] = {
    "0.8.5-V0-fakeworker/02": [(64 / 65, 4, 18, 44, 65, 64)],
    "0.8.5-V0-fakeworker/03": [(0, 0, 0, 257, 65, 0)],
    "0.9.2-V1-fakeworker/01": [(0, 0, 0, 0, 64, 0)],
    "0.9.2-V1-fakeworker/02": [(63 / 64, 5, 1, 24, 64, 63)],
    "0.9.2-V1-fakeworker/03": [(0, 0, 0, 27, 64, 0)],
    "0.10.2-fakeworker/02": [(1, 4, 17, 7, 64, 64)],
    "0.10.2-fakeworker/04": [(0, 0, 0, 73, 64, 0)],
    "0.11.2-fakeworker/02": [(62 / 64, 7, 1, 18, 64, 62)],
    "0.16.0-fakeworker/02": [(1, 6, 12, 17, 64, 64)],
    "0.23.0-fakeworker/02": [(1, 6, 12, 16, 64, 64)],
    "0.27.1/05": [(1, 4, 13, 19, 32, 32)],
    "0.32.0/03": [(256 / 8191, 64, 0, 0, 8191, 256)],
    "0.32.0/06": [(1, 4, 15, 12, 32, 32)],
    "0.32.0/07": [(0, 0, 0, 64, 32, 0)],
    "0.32.0/09": [(0, 0, 0, 64, 32, 0)],
    "0.32.0/21": [(1, 4, 12, 23, 32, 32)],
    "0.32.0/31": [(1, 5, 5, 32, 32, 32), (1, 4, 6, 31, 32, 32)],
    "0.32.0/32": [(0, 0, 0, 50, 32, 0), (0, 0, 0, 50, 32, 0)],
    "0.32.0/33": [(0, 0, 0, 56, 32, 0), (31 / 32, 4, 3, 56, 32, 31)],
    "0.32.0/60": [(30 / 32, 5, 19, 0, 32, 30)],
    "0.32.0/61": [(0, 0, 0, 64, 32, 0)],
    "0.32.0/71": [(2 / 128, 0, 0, 0, 128, 2)],
    "0.32.0/74": [(10 / 128, 0, 0, 0, 128, 10)],
    "0.32.0/78": [(21 / 128, 0, 0, 0, 128, 21)],
    "0.32.0/80": [(31 / 32, 0, 8, 13, 32, 31)],
}


@pytest.mark.parametrize("name", FACTS)
def test_the_numbers_are_those_of_the_run(name: str) -> None:
    reading = read_page(read(capture(name)))
    found = [
        (rank.usage, rank.running, rank.waiting, rank.preemptions, rank.pool.blocks, rank.pool.used)
        for rank in reading.ranks
    ]
    assert reading.state == "ok"
    for rank, expected in zip(found, FACTS[name], strict=True):
        assert rank == pytest.approx(expected)


@pytest.mark.parametrize("name", ["0.8.5-V0-fakeworker/01", "0.32.0/20", "0.32.0/30"])
def test_gauges_without_series_are_absent_and_not_zero(name: str) -> None:
    reading = read_page(read(capture(name)))
    assert reading.state == "no_traffic_yet"
    for rank in reading.ranks:
        assert (rank.usage, rank.running, rank.waiting) == (NOT_EXPOSED, NOT_EXPOSED, NOT_EXPOSED)
        assert rank.pool.used == NOT_KNOWN
        assert known(rank.pool.blocks)


def test_statistics_switched_off_are_a_state_of_their_own() -> None:
    reading = read_page(read(capture("0.32.0/52")))
    assert (reading.state, reading.ranks) == ("stats_disabled", ())
    assert "--disable-log-stats" in reading.error
    assert known(reading.process_start) == 1795971340.34


def test_waiting_is_told_apart_by_reason_where_vllm_does() -> None:
    (new,) = read_page(read(capture("0.32.0/06"))).ranks
    (old,) = read_page(read(capture("0.16.0-fakeworker/02"))).ranks
    assert (new.waiting_capacity, new.waiting_deferred) == (15, 0)
    assert (old.waiting_capacity, old.waiting_deferred) == (NOT_EXPOSED, NOT_EXPOSED)


def test_token_capacity_is_only_given_where_it_is_certain() -> None:
    """0.24 and newer state it; V0 has one kind of layer; between them no label tells hybrid models apart."""
    tokens = {
        name: read_page(read(capture(name))).ranks[0].pool.tokens
        for name in ("0.8.5-V0-fakeworker/02", "0.9.2-V1-fakeworker/02", "0.23.0-fakeworker/02", "0.32.0/31")
    }
    assert list(tokens.values()) == [65 * 16, NOT_KNOWN, NOT_KNOWN, 1056]


def test_concurrency_comes_from_the_page_or_from_the_longest_request() -> None:
    facts = EngineFacts("e", max_model_len=512)
    (new,) = read_page(read(capture("0.32.0/06")), facts=facts).ranks
    (v0,) = read_page(read(capture("0.8.5-V0-fakeworker/02")), facts=facts).ranks
    assert (new.pool.max_concurrency, v0.pool.max_concurrency) == (2.0625, 1040 / 512)


def test_a_connector_is_seen_by_its_queries_and_never_guessed_before_traffic() -> None:
    before, after = read_page(read(capture("0.32.0/01"))), read_page(read(capture("0.32.0/07")))
    assert (before.kv_connector, after.kv_connector) == (NOT_KNOWN, False)
    assert read_page(read(capture("0.32.0/07")), facts=EngineFacts("e", kv_connector=True)).kv_connector is True


@pytest.mark.parametrize(
    ("name", "adapters"),
    [
        ("0.32.0/03", NOT_EXPOSED),
        ("0.32.0-lora/01", Adapters(seen=4, slots=2)),
        ("0.32.0-lora/02", Adapters(seen=4, slots=2)),
        ("0.8.5-V0-fakeworker/02", Adapters(seen=0, slots=0)),
    ],
)
def test_adapters_are_those_that_were_asked(name: str, adapters: Maybe[Adapters]) -> None:
    assert read_page(read(capture(name))).adapters == adapters
