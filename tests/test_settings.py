"""What files of settings share: units, and YAML with positions."""

from __future__ import annotations

import string
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic_core import PydanticCustomError

from oomwatch.settings import (
    MAX_FILE_BYTES,
    ConfigError,
    dump_yaml,
    format_duration,
    format_size,
    parse_duration,
    parse_size,
    read_secret,
    read_text,
    read_yaml,
    without_credentials,
)


@pytest.mark.parametrize(
    ("written", "seconds"),
    [
        ("15s", 15.0),
        ("1m30s", 90.0),
        ("250ms", 0.25),
        ("2h", 7200.0),
        ("1d", 86400.0),
        ("1w", 604800.0),
        ("1.5s", 1.5),
        ("1s500ms", 1.5),
        ("0.1s", 0.1),
        ("15", 15.0),
        (15, 15.0),
        (0.5, 0.5),
        (" 5s ", 5.0),
    ],
)
def test_a_duration_is_read_as_seconds(written: object, seconds: float) -> None:
    assert parse_duration(written) == seconds


@pytest.mark.parametrize("written", ["", "s", "15 s", "1s1m", "-1s", "1e3", "15sec", True, None, [], float("nan")])
def test_what_is_no_duration_is_refused(written: object) -> None:
    with pytest.raises(PydanticCustomError):
        parse_duration(written)


@pytest.mark.parametrize(
    ("written", "size"),
    [
        ("16MiB", 16 * 1024**2),
        ("16Mi", 16 * 1024**2),
        ("1.5GiB", 3 * 1024**3 // 2),
        ("80GB", 80 * 1000**3),
        ("80 GB", 80 * 1000**3),
        ("1kb", 1000),
        ("100", 100),
        ("100B", 100),
        (100, 100),
        ("9007199254740993", 9007199254740993),
    ],
)
def test_a_size_is_read_as_bytes(written: object, size: int) -> None:
    assert parse_size(written) == size


@pytest.mark.parametrize("written", ["", "MiB", "-1", "0.3B", "1.0000001kB", "1 PiBB", True, None, 0.5])
def test_what_is_no_size_is_refused(written: object) -> None:
    with pytest.raises(PydanticCustomError):
        parse_size(written)


def test_a_size_that_two_people_read_differently_is_refused() -> None:
    with pytest.raises(PydanticCustomError, match=r"GiB .* or GB"):
        parse_size("80G")


@given(st.floats(min_value=0, max_value=1e9))
def test_a_duration_survives_being_written(seconds: float) -> None:
    assert parse_duration(read_yaml(f"a: {format_duration(seconds)}", "")[0].data["a"]) == seconds


@given(st.integers(min_value=0, max_value=2**53))
def test_a_size_survives_being_written(size: int) -> None:
    assert parse_size(format_size(size)) == size


_texts = st.one_of(st.text(f"{string.printable[:95]}é\n"), st.from_regex(r"[-+.0-9eExX:_~<tfn]{1,6}", fullmatch=True))
_scalars = st.one_of(st.booleans(), st.integers(), _texts)


@given(st.dictionaries(st.text("abcdefghij", min_size=1), st.one_of(_scalars, st.lists(_scalars))))
def test_what_is_dumped_is_read_back(data: dict[str, object]) -> None:
    layer, problems = read_yaml(dump_yaml(data), "")
    assert problems == []
    assert layer.data == data


def test_positions_are_those_an_editor_shows() -> None:
    layer, _ = read_yaml("a: 1\nlist:\n  - x: 2\n    y: 3\n", "f.yaml")
    assert str(layer.where[("a",)]) == "f.yaml:1:1"
    assert str(layer.where[("list", 0)]) == "f.yaml:3:5"
    assert str(layer.where[("list", 0, "y")]) == "f.yaml:4:5"


def test_scalars_are_what_they_look_like() -> None:
    text = "{time: 1:30, day: 2024-01-01, zero: 0123, no: no, yes: true, hex: 0x1f, big: 1e3, nothing: }"
    assert read_yaml(text, "")[0].data == {
        "time": "1:30",
        "day": "2024-01-01",
        "zero": 123,
        "no": "no",
        "yes": True,
        "hex": 31,
        "big": 1000.0,
    }


def test_merge_keys_work() -> None:
    layer, problems = read_yaml("base: &b {x: 1, y: 2}\nother: {<<: *b, y: 3}\n", "f")
    assert problems == []
    assert layer.data["other"] == {"x": 1, "y": 3}


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("- a\n- b\n", "f:1: a list where keys and values are expected."),
        ("word\n", "f:1: a single value where keys and values are expected."),
        ("a: 1\nb: c: d\n", "f:2:5: not valid YAML: a second colon in one line, or the line is indented too far."),
        ("a:\n\t- b\n", "f:2:1: not valid YAML: a tab. Indent with spaces."),
        ("a: [1, 2\n", "f:2:1: not valid YAML: the text ends in the middle of a value."),
        ("a: 1\n---\nb: 2\n", "f:2:1: not valid YAML: a second document after ---. Keep one."),
        ("a: 1\nb: 2\na: 3\n", "f:3:1: a: the key is there twice, the first time in line 1. Keep one."),
        ("a: {b: 1, b: 2}\n", "f:1:11: a.b: the key is there twice, the first time in line 1. Keep one."),
        ("? [x]\n: 1\n", "f:1:3: a key must be a plain word."),
        ("a: !wrong x\n", "f:1:4: a: a tag (!wrong). Plain values only."),
        ("a: !!python/name:os.system\n", "f:1:4: a: a tag (!!python/name:os.system). Plain values only."),
        (
            "a: !!python/object/apply:os.system [ls]\n",
            "f:1:4: a: a tag (!!python/object/apply:os.system). Plain values only.",
        ),
        ("a: &a [*a]\n", "f: not usable: nested or repeated without end."),
        ("a: \x07\n", "f:1: not valid YAML: the character U+0007 is not allowed."),
        ("[" * 5000, "f: not usable: nested or repeated without end."),
    ],
)
def test_errors_of_form_are_plain_sentences_with_their_line(text: str, sentence: str) -> None:
    _, problems = read_yaml(text, "f")
    assert len(problems) == 1
    assert str(problems[0]).startswith(sentence)


def test_a_small_text_cannot_become_a_huge_one() -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 12)]
    _, problems = read_yaml("\n".join(lines), "f")
    assert [str(problem) for problem in problems] == ["f: not usable: nested or repeated without end."]


def test_a_file_that_cannot_be_read_is_an_error_that_says_why(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere.yaml: cannot be read: no such file or directory\."):
        read_text(tmp_path / "nowhere.yaml")
    with pytest.raises(ConfigError, match="is a directory"):
        read_text(tmp_path)
    latin = tmp_path / "latin.yaml"
    latin.write_bytes(b"a: 1\nb: \xe9\n")
    with pytest.raises(ConfigError, match=r"latin.yaml:2: not UTF-8 text\."):
        read_text(latin)
    large = tmp_path / "large.yaml"
    large.write_bytes(b"#" * (MAX_FILE_BYTES + 1))
    with pytest.raises(ConfigError, match="larger than 1MiB"):
        read_text(large)


def test_a_byte_order_mark_is_no_part_of_the_text(tmp_path: Path) -> None:
    (tmp_path / "bom.yaml").write_bytes(b"\xef\xbb\xbfa: 1\n")
    assert read_text(tmp_path / "bom.yaml") == "a: 1\n"


def test_a_secret_is_the_line_without_its_end(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_bytes(b"s3cret \r\n")
    assert read_secret(file) == "s3cret "


@pytest.mark.parametrize(
    ("content", "why"), [(b"", "empty"), (b" \n", "empty"), (b"a\nb\n", "more than one line"), (b"\xff", "not UTF-8")]
)
def test_a_secret_that_cannot_be_sent_is_refused(tmp_path: Path, content: bytes, why: str) -> None:
    (tmp_path / "token").write_bytes(content)
    with pytest.raises(ValueError, match=why):
        read_secret(tmp_path / "token")


def test_credentials_in_a_url_are_masked() -> None:
    assert without_credentials("http://u:p@h:1/x?token=t") == "http://<secret>@h:1/x?<secret>"
    assert without_credentials("http://h/x") == "http://h/x"
