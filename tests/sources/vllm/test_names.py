"""The table of names covers the readings, and agrees with the pages of every version."""

from __future__ import annotations

import dataclasses
import re

from oomwatch.observations import RankReading
from oomwatch.sources.vllm.meaning import read_page, release
from oomwatch.sources.vllm.names import BY_FIELD, CONFIG_LABELS, MEANINGS, SAMPLE_NAMES, Exposed
from oomwatch.sources.vllm.pages import read
from tests.sources.vllm.captures import PAGES, name_of, version_of

FROM_LABELS = {"rank", "gpu_memory_utilization", "prefix_caching"}


def within(exposed: Exposed, version: tuple[int, int, int]) -> bool:
    def bound(text: str | None) -> tuple[int, int, int] | None:
        return release(text)

    since, until = bound(exposed.since), bound(exposed.until)
    return (since is None or since <= version) and (until is None or version <= until)


def test_each_field_of_a_reading_has_its_row_and_each_row_its_field() -> None:
    fields = {field.name for field in dataclasses.fields(RankReading)} - FROM_LABELS
    assert {meaning.field for meaning in MEANINGS if meaning.per_rank} - {"kv_connector"} == fields


def test_no_name_has_two_rows_but_where_a_label_tells_them_apart() -> None:
    names = [name for meaning in MEANINGS if meaning.select is None for name in meaning.names]
    assert len(names) == len(set(names))


def test_created_times_are_not_read() -> None:
    assert not [name for name in SAMPLE_NAMES if name.endswith("_created")]


def test_version_bounds_are_releases() -> None:
    bounds = [
        bound
        for exposed in (*CONFIG_LABELS.values(), *(e for meaning in MEANINGS for e in meaning.exposed))
        for bound in (exposed.since, exposed.until)
        if bound
    ]
    assert all(re.fullmatch(r"0\.\d+(\.\d+)?", bound) for bound in bounds)


def test_captured_pages_show_no_name_outside_its_range() -> None:
    rows = {exposed.name: exposed for meaning in MEANINGS for exposed in meaning.exposed}
    outside = {
        (name_of(page), sample.name)
        for page in PAGES
        for sample in read(page.read_bytes()).samples
        if (version := release(version_of(page))) and not within(rows[sample.name], version)
    }
    assert not outside


def test_captured_pages_show_every_label_within_its_range() -> None:
    for page in PAGES:
        version = release(version_of(page))
        assert version is not None
        for sample in read(page.read_bytes()).samples:
            if sample.name in BY_FIELD["pool"].names:
                expected = {label.name for label in CONFIG_LABELS.values() if within(label, version)}
                assert expected <= set(sample.labels), name_of(page)


def test_a_range_is_written_as_people_say_it() -> None:
    assert [
        Exposed("x", *bounds).versions for bounds in ((None, None), ("0.9", None), (None, "0.9"), ("0.8", "0.9"))
    ] == [
        "all",
        "from 0.9",
        "up to 0.9",
        "0.8 to 0.9",
    ]


def test_reading_a_page_needs_no_hint() -> None:
    assert all(read_page(read(page.read_bytes())).state != "not_vllm" for page in PAGES)
