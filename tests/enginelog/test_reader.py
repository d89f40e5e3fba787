"""Lines are found in any stream of bytes; nothing of their text leaves."""

import io
import json
import random
from collections.abc import Callable
from dataclasses import asdict

import pytest

from oomwatch.enginelog.events import Budget, Entry, Origin, Ready, Refused, from_plain, plain
from oomwatch.enginelog.reader import LONGEST_LINE, Reader, parse, read

POOL = b"(EngineCore_DP1 pid=77) INFO 11-30 09:00:01 [x.py:1] GPU KV cache size: 1,040 tokens\n"
REFUSED = (
    b"(VllmWorker rank=3 pid=3302) ERROR 11-01 00:30:20 [multiproc_executor.py:488] ValueError: Free memory on device "
    b"(31.44/47.38 GiB) on startup is less than desired GPU memory utilization (0.95, 45.01 GiB).\n"
)


@pytest.mark.parametrize(
    ("prefix", "origin"),
    [
        ("(APIServer pid=1) INFO 11-30 09:00:00 [x.py:1] ", Origin("api_server", 1)),
        ("(ApiServer_1 pid=2) INFO 11-30 09:00:00 [x.py:1] ", Origin("api_server", 2)),
        ("(EngineCore pid=3) INFO 11-30 09:00:00 [x.py:1] ", Origin("engine_core", 3)),
        ("(EngineCore_DP2 pid=4) INFO 11-30 09:00:00 [x.py:1] ", Origin("engine_core", 4, "2")),
        ("(EngineCore_1 pid=5) INFO 11-30 09:00:00 [x.py:1] ", Origin("engine_core", 5, "1")),
        ("(Worker_TP1 pid=6) INFO 11-30 09:00:00 [x.py:1] ", Origin("worker", 6, "0", "TP1")),
        ("(Worker_DP1_PP0_TP1_EP1 pid=7) INFO 11-30 09:00:00 [x.py:1] ", Origin("worker", 7, "1", "PP0_TP1")),
        ("(VllmWorker rank=3 pid=8) INFO 11-30 09:00:00 [x.py:1] ", Origin("worker", 8, "0", "3")),
        ("(VllmWorkerProcess pid=9) INFO 11-30 09:00:00 x.py:1] ", Origin("worker", 9)),
        ("(RayWorkerWrapper pid=10, ip=10.0.0.2) INFO 11-30 09:00:00 [x.py:1] ", Origin("worker", 10)),
        ("INFO 11-30 09:00:00 [x.py:1] ", Origin()),
        ("", Origin()),
    ],
)
def test_a_prefix_tells_the_process_and_its_rank(prefix: str, origin: Origin) -> None:
    entry = parse(f"{prefix}Application startup complete.".encode())
    assert entry is not None
    assert entry.origin == origin
    assert entry.clock == (None if not prefix else 334 * 86400 + 9 * 3600)


def test_a_stream_in_any_pieces_says_the_same() -> None:
    text = b"noise\n" * 50 + POOL + b"\xff\xfe\x00 broken \x80 text\n" + REFUSED + b"x" * 3000 + b"\n" + POOL
    whole = list(read(io.BytesIO(text)))
    assert len(whole) == 3
    for seed in range(20):
        pieces, reader = random.Random(seed), Reader()
        got: list[Entry] = []
        at = 0
        while at < len(text):
            step = pieces.choice((1, 7, 100, 5000))
            got += reader.feed(text[at : at + step])
            at += step
        assert [*got, *reader.finish()] == whole


def test_a_last_line_without_an_end_counts_when_the_stream_ends() -> None:
    reader = Reader()
    assert list(reader.feed(POOL.rstrip())) == []
    assert len(list(reader.finish())) == 1


def test_a_line_of_megabytes_is_read_at_its_beginning_and_hides_nothing_after_it() -> None:
    long = b"INFO " + b"prompt words " * 400_000 + b"\n"
    reader = Reader()
    got: list[Entry] = []
    for at in range(0, len(long), 65536):
        got += reader.feed(long[at : at + 65536])
        assert len(reader._rest) <= LONGEST_LINE
    got += reader.feed(REFUSED)
    assert [entry.event.name for entry in got] == ["refused"]
    assert [e.event.name for e in read(io.BytesIO(POOL.rstrip() + b" " * 3_000_000 + b"\n" + POOL))] == ["kv_pool"] * 2


def test_json_of_a_logger_is_read_like_its_message() -> None:
    message = REFUSED.decode().strip().replace('"', '\\"')
    entry = parse(f'{{"timestamp": "2026-11-30T09:00:00Z", "level": "error", "message": "{message}"}}\n'.encode())
    assert entry is not None
    assert entry == parse(REFUSED)
    trace = "Traceback\nValueError: No available memory for the cache blocks."
    found = parse(json.dumps({"message": "boom", "exc_info": trace}).encode())
    assert found is not None
    assert found.event == Refused("no_room")


def test_utf_16_that_windows_writes_is_read() -> None:
    text = (POOL + REFUSED).decode().replace("\n", "\r\n")
    assert [e.event for e in read(io.BytesIO(text.encode("utf-16")))] == [
        e.event for e in read(io.BytesIO(POOL + REFUSED))
    ]


QUOTED = [
    "INFO 11-30 09:00:00 [logger.py:43] Received request cmpl-1: prompt: 'EngineCore failed to start.', params: x",
    'INFO 11-30 09:00:00 [logger.py:43] Received request cmpl-1: prompt: "Available KV cache memory: 9 GiB", params: x',
    (
        "INFO 11-30 09:00:00 [logger.py:43] Received request cmpl-1: prompt: 'OutOfMemoryError(\"CUDA out of memory. "
        "Tried to allocate 1.00 GiB'"
    ),
    "ERROR 11-30 09:00:00 [x.py:1] the prompt 'an Error( CUDA error: out of memory' was refused",
    '{"message": "Received request cmpl-1: prompt: \'Application startup complete.\'"}',
    '{"prompt": "Application startup complete."}',
]


@pytest.mark.parametrize("line", QUOTED)
def test_what_a_request_says_is_not_taken_for_the_log_s_own_word(line: str) -> None:
    assert parse(line.encode()) is None


PROMPT = "INFO 11-30 09:00:00 [logger.py:43] Received request cmpl-1: prompt: '" + "x" * 16_000


def docker(text: str, stream: str = "stderr") -> str:
    return json.dumps({"log": text, "stream": stream, "time": "2026-11-30T09:00:00Z"}, separators=(",", ":")) + "\n"


def cri(text: str, stream: str = "stderr") -> str:
    tag = "F" if text.endswith("\n") else "P"
    return f"2026-11-30T09:00:00.123456789Z {stream} {tag} " + text.removesuffix("\n") + "\n"


@pytest.mark.parametrize("record", [docker, cri])
def test_what_a_request_says_is_not_the_log_s_own_word_where_its_line_was_cut_either(
    record: Callable[..., str],
) -> None:
    text = (
        record(PROMPT)
        + record(POOL.decode(), "stdout")
        + record(REFUSED.decode().rstrip())
        + record(POOL.decode(), "stdout")
        + record(REFUSED.decode())
        + record(REFUSED.decode())
    ).encode()
    assert [entry.event.name for entry in read(io.BytesIO(text))] == ["kv_pool", "kv_pool", "refused"]
    for size in (7, 1000, 16_100, 40_000):
        reader = Reader()
        got = [entry.event.name for at in range(0, len(text), size) for entry in reader.feed(text[at : at + size])]
        assert got == ["kv_pool", "kv_pool", "refused"], size


def test_a_text_that_ends_like_an_escaped_line_feed_is_cut_all_the_same() -> None:
    text = docker(PROMPT + "\\n") + docker(REFUSED.decode()) + docker(POOL.decode())
    assert [entry.event.name for entry in read(io.BytesIO(text.encode()))] == ["kv_pool"]


SECRET = "sk-f00dcafe"


def test_no_text_of_a_line_leaves() -> None:
    lines = [
        (
            f"INFO 11-30 09:00:00 [api_server.py:1] args: Namespace(api_key='{SECRET}', max_model_len=512, "
            f"model='{SECRET}')"
        ),
        f"INFO 11-30 09:00:00 [{SECRET}.py:1] non-default args: {{'api_key': '{SECRET}', 'max_model_len': 4096}}",
        f"({SECRET} pid=7) ERROR 11-30 09:00:00 [x.py:1] EngineCore failed to start. {SECRET}",
        f"INFO 11-30 09:00:00 [x.py:1] Initializing a V1 LLM engine (v0.9.0+{SECRET}) with config: model='{SECRET}'",
        f"Worker proc {SECRET} died unexpectedly (exit code: -9), {SECRET}",
        f'  File "/home/{SECRET}/x.py", line 1, in load_model',
        f"ValueError: No available memory for the cache blocks. {SECRET}",
    ]
    for line in lines:
        entry = parse(line.encode())
        assert entry is not None, line
        assert SECRET not in repr(asdict(entry))


@pytest.mark.parametrize("line", [POOL, REFUSED, b"Application startup complete."])
def test_an_entry_as_plain_data_comes_back_the_same(line: bytes) -> None:
    entry = parse(line)
    assert entry is not None
    back = from_plain(entry.event.name, plain(entry))
    assert back == Entry(entry.event, entry.origin)


def test_plain_data_of_a_newer_version_is_read_as_far_as_it_is_known() -> None:
    assert from_plain("something_new", {"bytes": 1}) is None
    assert from_plain("ready", {"server": True, "mood": "good"}) == Entry(Ready(server=True))


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("budget", {"weights": "14 GiB"}, "weights has to be of type int"),
        ("budget", {"weights": True}, "weights has to be of type int"),
        ("refused", {"reason": SECRET}, "reason has a value that is not known"),
        ("refused", {}, "incomplete"),
        ("start", {"version": SECRET}, "version has a value"),
        ("ready", {"from_rank": SECRET}, "rank has a value"),
    ],
)
def test_plain_data_that_cannot_be_an_entry_is_refused(name: str, data: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        from_plain(name, data)


def test_negative_sizes_are_kept() -> None:
    entry = parse(b"INFO 11-30 09:00:00 [x.py:1] Available KV cache memory: -1.50 GiB")
    assert entry is not None
    assert entry.event == Budget(kv_pool=-3 * 2**29)
