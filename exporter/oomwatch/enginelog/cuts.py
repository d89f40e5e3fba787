"""Lines that a container's runtime cut into several records: Docker's json-file and CRI do after 16 KiB.

A record that only goes on with a line may begin with a request's text: nothing in it is the log's own word.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import NamedTuple

STREAMS = (b"stdout", b"stderr")

_LOOK_BACK = 64  # records of other streams that may stand between two of one
_CRI = re.compile(rb"\S+ (stdout|stderr) ([FP])(?::\S*)? ")
_DOCKER = re.compile(rb'"\s*,\s*"stream"\s*:\s*"(stdout|stderr)"')  # quotes within the text are escaped
_BEFORE_STREAM = 16  # bytes in which the text's end is looked for


class Record(NamedTuple):
    """A line of a container's log file: which stream it is of, and whether the line goes on in that one's next."""

    stream: bytes
    cut: bool


def record_of(line: bytes) -> Record | None:
    """None where a line is no runtime's record."""
    if line.startswith(b'{"log"'):
        found = _DOCKER.search(line, max(0, line.rfind(b'"stream"') - _BEFORE_STREAM))
        return Record(found[1], not _ends_a_line(line[: found.start()])) if found else None
    cri = _CRI.match(line)
    return Record(cri[1], cri[2] == b"P") if cri else None


def _ends_a_line(text: bytes) -> bool:
    """Whether a JSON text ends with a line feed: what is escaped by an odd number of backslashes."""
    return text.endswith(b"n") and (len(text) - 1 - len(text[:-1].rstrip(b"\\"))) % 2 == 1


def is_cut(data: bytes, begin: int, end: int, stream: bytes, before: Collection[bytes]) -> bool:
    """Whether the last record of a stream in a part of ``data`` goes on; ``before``: the streams that did before it."""
    for _ in range(_LOOK_BACK):
        if end <= begin:
            return stream in before
        start = max(begin, data.rfind(b"\n", begin, end - 1) + 1)
        record = record_of(data[start:end])
        if record is None or record.stream == stream:
            return record is not None and record.cut
        end = start
    return False
