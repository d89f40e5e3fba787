"""Writes a block of Prometheus' storage at once: text for promtool would be tens of gigabytes here.

The formats are those of Prometheus' documentation, tsdb/docs/format: chunks of 120 samples in XOR encoding, and the
index in version 2. Samples are a minute apart without a gap, which is all that a benchmark needs.
"""

from __future__ import annotations

import json
import struct
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from benchmarks.detection.jit import jit

STEP_MS = 60_000
PER_CHUNK = 120
ULID = "01ARZ3NDEKTSV4RRFFQ69G5FAV"
Labels = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Encoded:
    """The chunks of one course of values, each with its length, encoding and checksum, as they lie in a file."""

    chunks: tuple[bytes, ...]


def encode(values: Sequence[float], begin_ms: int) -> Encoded:
    """A course of values from ``begin_ms`` on, one a minute; as many as fill whole chunks."""
    found = []
    for first in range(0, len(values), PER_CHUNK):
        data = _xor(values[first : first + PER_CHUNK], begin_ms + first * STEP_MS)
        framed = b"\x01" + data
        found.append(_uvarint(len(data)) + framed + _checksum(framed))
    return Encoded(tuple(found))


def write(folder: Path, series: Mapping[Labels, Encoded], begin_ms: int) -> None:
    """The block with these series, in ``folder``, the storage of a server that does not run yet."""
    block = folder / ULID
    (block / "chunks").mkdir(parents=True)
    ordered = sorted(series)
    places = _write_chunks(block / "chunks" / "000001", [series[labels] for labels in ordered])
    (block / "index").write_bytes(_index(ordered, places, begin_ms))
    chunks = len(places[0])
    end_ms = begin_ms + chunks * PER_CHUNK * STEP_MS
    meta = {
        "ulid": ULID,
        "minTime": begin_ms,
        "maxTime": end_ms,
        "stats": {
            "numSamples": len(ordered) * chunks * PER_CHUNK,
            "numSeries": len(ordered),
            "numChunks": len(ordered) * chunks,
        },
        "compaction": {"level": 1, "sources": [ULID]},
        "version": 1,
    }
    (block / "meta.json").write_text(json.dumps(meta), encoding="utf-8")


def _write_chunks(path: Path, courses: Sequence[Encoded]) -> list[list[int]]:
    """The place of each chunk of each series."""
    places: list[list[int]] = []
    at = 8
    with path.open("wb") as file:
        file.write(bytes.fromhex("85BD40DD01000000"))
        for course in courses:
            places.append([])
            for chunk in course.chunks:
                places[-1].append(at)
                file.write(chunk)
                at += len(chunk)
    return places


def _index(ordered: Sequence[Labels], places: Sequence[Sequence[int]], begin_ms: int) -> bytes:
    symbols = sorted({text for labels in ordered for pair in labels for text in pair})
    numbers = {text: number for number, text in enumerate(symbols)}
    out = bytearray(bytes.fromhex("BAAAD70002"))
    symbols_at = len(out)
    out += _section(struct.pack(">I", len(symbols)) + b"".join(_text(text) for text in symbols))
    postings: dict[tuple[str, str], list[int]] = defaultdict(list)
    _align(out, 16)
    series_at = len(out)
    for labels, chunks in zip(ordered, places, strict=True):
        _align(out, 16)
        number = len(out) // 16
        for pair in (("", ""), *labels):
            postings[pair].append(number)
        content = _series(labels, chunks, numbers, begin_ms)
        out += _uvarint(len(content)) + content + _checksum(content)
    starts = {}
    _align(out, 4)
    postings_at = len(out)
    for pair in sorted(postings):
        _align(out, 4)
        starts[pair] = len(out)
        entries = postings[pair]
        out += _section(struct.pack(f">I{len(entries)}I", len(entries), *entries))
    table_at = len(out)
    rows = b"".join(
        _uvarint(2) + _text(name) + _text(value) + _uvarint(at) for (name, value), at in sorted(starts.items())
    )
    out += _section(struct.pack(">I", len(starts)) + rows)
    # Label indices are of version 1: none.
    toc = struct.pack(">6Q", symbols_at, series_at, postings_at, postings_at, postings_at, table_at)
    return bytes(out) + toc + _checksum(toc)


def _series(labels: Labels, chunks: Sequence[int], numbers: Mapping[str, int], begin_ms: int) -> bytes:
    parts = [_uvarint(len(labels))]
    parts += [_uvarint(numbers[name]) + _uvarint(numbers[value]) for name, value in labels]
    length = (PER_CHUNK - 1) * STEP_MS
    parts += [_uvarint(len(chunks)), _varint(begin_ms), _uvarint(length), _uvarint(chunks[0])]
    for before, at in pairwise(chunks):
        parts += [_uvarint(STEP_MS), _uvarint(length), _varint(at - before)]
    return b"".join(parts)


def _xor(values: Sequence[float], begin_ms: int) -> bytes:
    bits = "".join(_bits(values))
    padded = bits + "0" * (-len(bits) % 8)
    head = struct.pack(">H", len(values)) + _varint(begin_ms) + struct.pack(">d", values[0])
    return head + _uvarint(STEP_MS) + int(padded, 2).to_bytes(len(padded) // 8, "big")


def _bits(values: Sequence[float]) -> Iterator[str]:
    """Everything after the first value and the first difference of times; no later difference differs from it."""
    before = _as_int(values[0])
    leading = trailing = -1
    for number, value in enumerate(values[1:]):
        if number:
            yield "0"
        now = _as_int(value)
        differing, before = before ^ now, now
        if not differing:
            yield "0"
            continue
        new_leading, new_trailing = min(64 - differing.bit_length(), 31), (differing & -differing).bit_length() - 1
        if 0 <= leading <= new_leading and trailing <= new_trailing:
            yield f"10{differing >> trailing:0{64 - leading - trailing}b}"
            continue
        leading, trailing = new_leading, new_trailing
        size = 64 - leading - trailing
        yield f"11{leading:05b}{size % 64:06b}{differing >> trailing:0{size}b}"


def _as_int(value: float) -> int:
    return int.from_bytes(struct.pack(">d", value), "big")


def _section(content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + content + _checksum(content)


def _align(out: bytearray, size: int) -> None:
    out += b"\0" * (-len(out) % size)


def _text(text: str) -> bytes:
    plain = text.encode()
    return _uvarint(len(plain)) + plain


def _uvarint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def _varint(number: int) -> bytes:
    return _uvarint(number << 1 if number >= 0 else (-number << 1) - 1)


def _checksum(content: bytes) -> bytes:
    """CRC-32C, the last byte last."""
    return struct.pack(">I", int(_crc(np.frombuffer(content, dtype=np.uint8), _TABLE)))


def _table() -> np.ndarray:
    table = np.zeros(256, dtype=np.uint32)
    for number in range(256):
        crc = number
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
        table[number] = crc
    return table


@jit
def _crc(content: np.ndarray, table: np.ndarray) -> int:
    crc = np.uint32(0xFFFFFFFF)
    for byte in content:
        crc = table[(crc ^ byte) & np.uint32(0xFF)] ^ (crc >> np.uint32(8))
    return int(crc ^ np.uint32(0xFFFFFFFF))


_TABLE = _table()
