"""The page reader: both formats, every kind of broken page, and nothing but its own error."""

from __future__ import annotations

import math
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.core import CollectorRegistry, CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics

from oomwatch.observations import SCRAPE_STATES
from oomwatch.sources.vllm.meaning import read_page
from oomwatch.sources.vllm.pages import Page, PageError, read, samples_for_recording, samples_from_recording
from tests.sources.vllm.captures import capture

OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"
USAGE = "vllm:kv_cache_usage_perc"

label_names = st.from_regex(r"[a-zA-Z_][a-zA-Z0-9_]{0,8}", fullmatch=True).filter(
    lambda name: not name.startswith("__")
)
label_values = st.text(st.characters(codec="utf-8"), max_size=20) | st.sampled_from(
    ['"', "\\", "\n", '\\"', "},{", "\\n"]
)
label_sets = st.dictionaries(label_names, label_values, max_size=4)
values = st.floats(allow_nan=False, allow_infinity=False)


class Exposes:
    def __init__(self, *families: Metric) -> None:
        self.families = families

    def collect(self) -> tuple[Metric, ...]:
        return self.families


def registry_of(*families: Metric) -> CollectorRegistry:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Exposes(*families))
    return registry


def openmetrics(*families: Metric) -> bytes:
    page = generate_openmetrics(registry_of(*families))  # type: ignore[no-untyped-call]  # the client has no types here
    assert isinstance(page, bytes)
    return page


def gauge(labels: dict[str, str], value: float) -> GaugeMetricFamily:
    family = GaugeMetricFamily(USAGE, "help", labels=list(labels))
    family.add_metric(list(labels.values()), value)
    return family


def error_of(body: bytes, content_type: str | None = None) -> PageError | None:
    """The reader's own error, or None where the page reads and means something; any other error passes through."""
    try:
        read_page(read(body, content_type))
    except PageError as error:
        return error
    return None


def refused(body: bytes, content_type: str | None = None) -> PageError:
    with pytest.raises(PageError) as caught:
        read(body, content_type)
    assert caught.value.state in SCRAPE_STATES
    return caught.value


@given(label_sets, values)
def test_any_label_value_comes_back_from_the_text_format(labels: dict[str, str], value: float) -> None:
    (sample,) = read(generate_latest(registry_of(gauge(labels, value))), "text/plain; version=0.0.4").samples
    assert (sample.name, sample.labels, sample.value) == (USAGE, labels, value)


@given(label_sets, values)
def test_any_label_value_comes_back_from_openmetrics(labels: dict[str, str], value: float) -> None:
    (sample,) = read(openmetrics(gauge(labels, value)), OPENMETRICS).samples
    assert (sample.name, sample.labels, sample.value) == (USAGE, labels, value)


@given(label_sets, values)
def test_any_label_value_comes_back_from_a_recording(labels: dict[str, str], value: float) -> None:
    page = read(generate_latest(registry_of(gauge(labels, value))))
    assert samples_from_recording(samples_for_recording(page)).samples == page.samples


@given(
    st.binary(max_size=200) | st.text(max_size=200).map(str.encode), st.sampled_from([None, "text/plain", OPENMETRICS])
)
def test_arbitrary_bytes_raise_nothing_but_the_readers_own_error(body: bytes, content_type: str | None) -> None:
    error = error_of(body, content_type)
    assert error is None or (error.state in SCRAPE_STATES and str(error))


@given(st.data())
def test_a_page_with_random_damage_raises_nothing_but_the_readers_own_error(data: st.DataObject) -> None:
    body = capture("0.8.5-V0-fakeworker/02")
    at = data.draw(st.integers(0, len(body)))
    damaged = body[:at] + data.draw(st.binary(max_size=8)) + body[at + data.draw(st.integers(0, 8)) :]
    error = error_of(damaged)
    assert error is None or (error.state in SCRAPE_STATES and str(error))


@given(st.randoms(use_true_random=False))
def test_the_order_of_lines_makes_no_difference(random: Random) -> None:
    body = capture("0.32.0/31")
    lines = body.decode().splitlines(keepends=True)
    random.shuffle(lines)
    shuffled = read("".join(lines).encode())
    assert {s.identity: s.value for s in shuffled.samples} == {s.identity: s.value for s in read(body).samples}
    assert read_page(shuffled) == read_page(read(body))


def test_the_order_of_labels_makes_no_difference_to_a_series_identity() -> None:
    one = read(f'{USAGE}{{engine="0",model_name="m"}} 0.5\n'.encode())
    other = read(f'{USAGE}{{model_name="m",engine="0"}} 0.5\n'.encode())
    assert one.samples[0].identity == other.samples[0].identity
    assert read_page(one) == read_page(other)


def test_a_page_cut_at_any_byte_is_never_silently_partial() -> None:
    """Only a cut between two lines reads as a page; the transport's length or framing tells of that one."""
    body = capture("0.8.5-V0-fakeworker/02")
    for at in range(1, len(body)):
        if body[at - 1 : at] != b"\n":
            assert refused(body[:at]).state == "truncated"


def test_an_openmetrics_page_cut_at_any_byte_is_truncated() -> None:
    families = [gauge({"engine": "0"}, 0.5), CounterMetricFamily("vllm:num_preemptions", "help", value=3)]
    body = openmetrics(*families)
    assert {sample.name for sample in read(body, OPENMETRICS).samples} == {USAGE, "vllm:num_preemptions_total"}
    assert read(body.removesuffix(b"\n"), OPENMETRICS) == read(body, OPENMETRICS)
    for at in range(len(body) - 1):
        assert refused(body[:at], OPENMETRICS).state == "truncated"


def test_openmetrics_exemplars_and_timestamps_are_read_over() -> None:
    body = (
        b"# TYPE vllm:request_prompt_tokens histogram\n"
        b'vllm:request_prompt_tokens_bucket{engine="0",le="+Inf"} 17.0 1700000000.5 # {trace_id="a b"} 0.67 17.1\n'
        b"# EOF\n"
    )
    (sample,) = read(body, OPENMETRICS).samples
    assert sample.value == 17
    assert refused(body).state == "not_metrics"  # the text format has no exemplars


def test_two_pages_behind_each_other_are_refused() -> None:
    assert "line 1" in str(refused(b"# EOF\n# EOF\n", OPENMETRICS))


@pytest.mark.parametrize(
    "line",
    [
        '{name}{{engine="0"}} 0.5',
        '{name}{{engine="0",}} 0.5',
        '  {name} {{ engine = "0" , }}\t0.5\t1700000000000  ',
        '{name}{{engine="0"}}0.5',
        '{name}{{engine="0"}} 5e-1\r',
        '{{"{name}",engine="0"}} 0.5',
        '{{"{name}","engine"="0"}} 0.5',
    ],
)
def test_every_way_to_write_a_line_is_understood(line: str) -> None:
    (sample,) = read((line.format(name=USAGE) + "\n").encode()).samples
    assert (sample.name, sample.labels, sample.value) == (USAGE, {"engine": "0"}, 0.5)


@pytest.mark.parametrize(
    "line",
    [
        "no value",
        USAGE,
        f"{USAGE} half",
        f"{USAGE} 1_000",
        f"{USAGE} ٣",
        f'{USAGE}{{engine="0" 1',
        f"{USAGE}{{engine=0}} 1",
        f'{USAGE}{{engine="0" model_name="m"}} 1',
        f'{USAGE}{{engine="0",engine="1"}} 1',
        f'{USAGE}{{"another_name",engine="0"}} 1',
        f'{USAGE}{{engine="0"}} 1 2 3',
        '{engine="0"} 1',
        "9name 1",
    ],
)
def test_a_malformed_line_is_an_error_that_names_its_number(line: str) -> None:
    error = refused(f"# HELP x y\nother 1\n{line}\nother2 2\n".encode())
    assert error.state == "not_metrics"
    assert "line 3" in str(error)


@pytest.mark.parametrize(
    ("body", "content_type", "says"),
    [
        (b"<!DOCTYPE html><html></html>\n", "text/html; charset=utf-8", "HTML"),
        (b"\n <html></html>\n", None, "HTML"),
        (b'{"status": "ok"}\n', "application/json", "application/json"),
        (b'{"status": "ok"}\n', None, "line 1"),
        ("x 1\n".encode("utf-16"), "text/plain", "byte 0"),
        (b'x{a="\xe9"} 1\n', "text/plain", "byte 5 (line 1)"),
        (b"\x1f\x8b\x08\x00\x00\x00", "text/plain", "byte 1"),
        (b"\x00\x00\n", "text/plain", "line 1"),
    ],
)
def test_what_is_no_page_of_metrics_is_said_so(body: bytes, content_type: str | None, says: str) -> None:
    error = refused(body, content_type)
    assert error.state == "not_metrics"
    assert says in str(error)


def test_only_line_feeds_end_lines() -> None:
    (sample,) = read(f'{USAGE}{{engine="0",model_name="a\u2028b\x0bc\x85d"}} 1\n'.encode()).samples
    assert sample.labels["model_name"] == "a\u2028b\x0bc\x85d"


@pytest.mark.parametrize("value", ["NaN", "nan", "+Inf", "-Inf", "Inf"])
def test_a_value_that_is_no_number_sets_only_its_own_series_apart(value: str) -> None:
    page = read(f'{USAGE}{{engine="0"}} {value}\n{USAGE}{{engine="0"}} {value}\n{USAGE}{{engine="1"}} 0.5\n'.encode())
    assert [sample.labels["engine"] for sample in page.samples] == ["1"]
    assert [sample.labels["engine"] for sample in page.not_finite] == ["0"]


def test_of_adapters_a_value_that_is_no_number_keeps_no_name() -> None:
    assert "acme" not in repr(read(f"{of_adapters('acme', math.nan)}\n".encode()))


def test_a_series_with_two_values_is_refused_in_whatever_order_its_labels_come() -> None:
    error = refused(f'{USAGE}{{engine="0",model_name="m"}} 1\n{USAGE}{{model_name="m",engine="0"}} 0.5\n'.encode())
    assert error.state == "duplicate_series"
    assert "1 and 0.5" in str(error)


def test_the_same_series_with_the_same_value_counts_once() -> None:
    assert len(read(f'{USAGE}{{engine="0"}} 1\n{USAGE}{{engine="0"}} 1\n'.encode()).samples) == 1


def test_series_of_others_are_read_over_and_created_times_never_read() -> None:
    page = read(
        b"vllm:num_preemptions_created 1.7e9\nvllm:num_preemptions_total 4.0\nsomething_else 1\nsomething_else 2\n"
    )
    assert [sample.name for sample in page.samples] == ["vllm:num_preemptions_total"]
    assert page.of_vllm


def of_adapters(running: str, value: float = 1.8e9) -> str:
    return f'vllm:lora_requests_info{{max_lora="4",running_lora_adapters="{running}",waiting_lora_adapters=""}} {value}'


def test_names_of_adapters_end_in_the_reader() -> None:
    page = read(f"{of_adapters('acme')}\n{of_adapters('acme,globex')}\n".encode())
    assert "acme" not in repr(page)
    assert samples_for_recording(page) == {'vllm:lora_requests_info{max_lora="4",adapters="2"}': 1.0}


def test_a_recording_tells_as_much_of_adapters_as_the_page_with_their_names_or_without() -> None:
    live = read(f"{of_adapters('acme')}\n{of_adapters('acme,globex')}\n".encode())
    with_names = samples_from_recording({of_adapters(names).rpartition(" ")[0]: 1.8e9 for names in ("acme,globex", "")})
    assert samples_from_recording(samples_for_recording(live)).samples == live.samples == with_names.samples


@pytest.mark.parametrize("broken", [of_adapters("acme") + " x", of_adapters('acme",max_lora="1')])
def test_no_error_tells_the_name_of_an_adapter(broken: str) -> None:
    assert "acme" not in str(refused(f"{broken}\n".encode()))
    with pytest.raises(PageError) as caught:
        samples_from_recording({broken: 1.8e9})
    assert "acme" not in str(caught.value)


def test_an_empty_page_has_nothing_and_is_no_error() -> None:
    assert read(b"") == Page()


def test_a_recording_with_a_broken_key_is_refused() -> None:
    with pytest.raises(PageError, match="this is no series"):
        samples_from_recording({'vllm:kv_cache_usage_perc{engine="0"': 0.5})


def test_a_recording_keeps_what_a_later_version_added_out_of_the_way() -> None:
    page = samples_from_recording({"vllm:added_in_another_version": 1.0, "vllm:num_requests_running": 2.0})
    assert samples_for_recording(page) == {"vllm:num_requests_running": 2.0}
