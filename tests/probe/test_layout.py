"""The file between the probe and the daemon: the same in both, and harmless whatever it holds."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oomwatch import probe_layout as layout
from oomwatch.probe_layout import Absence, LayoutError, TornReadError, decode, encode

REPOSITORY = Path(__file__).parents[2]
LARGEST = (1 << 63) - 1


def test_the_daemon_reads_with_the_module_that_the_probe_writes_with() -> None:
    assert Path(layout.__file__).read_bytes() == (REPOSITORY / "probe/oomwatch_probe/layout.py").read_bytes()


def test_the_names_are_unique() -> None:
    assert len(set(layout.NUMBERS) | set(layout.TEXTS)) == len(layout.NUMBERS) + len(layout.TEXTS)


@given(
    st.dictionaries(st.sampled_from(layout.NUMBERS), st.integers(0, LARGEST) | st.sampled_from(Absence)),
    st.integers(0, LARGEST),
)
def test_what_was_written_is_read(numbers: dict[str, int | Absence], sequence: int) -> None:
    data = encode(sequence, numbers, {})
    assert len(data) == layout.FILE_SIZE
    report = decode(data)
    assert report.sequence == sequence
    assert report.numbers == {name: numbers.get(name, Absence.NOT_YET) for name in layout.NUMBERS}


def test_a_reason_is_no_number() -> None:
    report = decode(encode(0, {"ooms": 4, "alloc_retries": Absence.FAILED}, {}))
    assert report.numbers["ooms"] == Absence.FAILED.value
    assert report.numbers["alloc_retries"] is Absence.FAILED


def test_numbers_that_cannot_be_are_held_to_the_nearest_that_can() -> None:
    report = decode(encode(0, {"allocated_bytes": 1 << 70, "reserved_bytes": -5}, {}))
    assert (report.numbers["allocated_bytes"], report.numbers["reserved_bytes"]) == (LARGEST, 0)


@given(st.text())
def test_a_text_is_cut_between_characters(text: str) -> None:
    read = decode(encode(0, {}, {"probe_version": text})).texts["probe_version"]
    whole = text.encode("utf-8", "replace").decode().rstrip("\0")
    assert whole.startswith(read)
    assert read == whole or len(read.encode()) > layout.TEXTS["probe_version"] - 4


def test_a_name_that_the_layout_does_not_have_is_refused() -> None:
    with pytest.raises(KeyError, match="alocated_bytes"):
        encode(0, {"alocated_bytes": 1}, {})
    with pytest.raises(KeyError, match="notes"):
        encode(0, {}, {"notes": ""})


@given(st.binary(max_size=2 * layout.FILE_SIZE))
def test_any_other_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(LayoutError):
        decode(data)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "not a file of oomwatch's probe"),
        (b"\x7fELF" + bytes(4092), "not a file of oomwatch's probe"),
        (encode(1, {}, {})[:20], "cut off after 20 of 4096 bytes"),
        (encode(1, {}, {})[:4000], "4000 bytes"),
        (encode(1, {}, {}) + b"\0", "4097 bytes"),
        (layout.MAGIC + struct.pack("<I", layout.VERSION + 1) + bytes(4084), "layout version 2"),
    ],
)
def test_a_file_that_is_no_report_says_what_is_wrong(data: bytes, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        decode(data)


@given(st.integers(17, 24 + 8 * len(layout.NUMBERS)))
def test_a_read_in_the_middle_of_a_write_is_seen(cut: int) -> None:
    """The beginning of one write and the rest of another; they differ from the checksum on."""
    before = encode(1, dict.fromkeys(layout.NUMBERS, 1), {})
    after = encode(2, dict.fromkeys(layout.NUMBERS, (1 << 62) + 1), {})
    with pytest.raises(TornReadError):
        decode(after[:cut] + before[cut : layout.FILE_SIZE])


def test_an_absence_of_a_later_layout_is_an_absence() -> None:
    data = encode(0, {"ooms": 77}, {})
    number = struct.pack("<q", 77)
    assert data.count(number) == 1
    body = data[24:-2216].replace(number, struct.pack("<q", -77))
    later = data[:16] + struct.pack("<I4x", zlib.crc32(body)) + body + data[-2216:]
    assert decode(later).numbers["ooms"] is Absence.NOT_PROVIDED


def test_processes_of_several_containers_have_files_of_their_own() -> None:
    assert layout.file_name(4026531836, 1, 77) == "probe-4026531836-1-77.oomwatch"
    assert layout.file_name(4026532001, 1, 77) != layout.file_name(4026531836, 1, 77)
