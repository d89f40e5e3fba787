"""What pages mean that no capture shows: several processes, odd pools, old versions, other front-ends."""

from __future__ import annotations

import pytest

from oomwatch.observations import AMBIGUOUS, IMPLAUSIBLE, NOT_EXPOSED, NOT_KNOWN, Adapters, EngineFacts
from oomwatch.sources.vllm.meaning import read_page, release
from oomwatch.sources.vllm.pages import samples_from_recording
from tests.sources.vllm.captures import reading_of


def config(engine: str = "0", **labels: object) -> str:
    pairs = ",".join(f'{name}="{value}"' for name, value in labels.items())
    return f'vllm:cache_config_info{{engine="{engine}",{pairs}}} 1'


def test_the_highest_of_several_processes_counts() -> None:
    """0.9.2 to 0.11.0 with several API servers: one series a process, those without the last step read 0."""
    reading = reading_of(
        """
        vllm:kv_cache_usage_perc{engine="0",model_name="m",pid="11"} 0
        vllm:kv_cache_usage_perc{engine="0",model_name="m",pid="12"} 0.25
        vllm:kv_cache_usage_perc{engine="0",model_name="m",pid="13"} 0
        """
    )
    assert [rank.usage for rank in reading.ranks] == [0.25]


def test_series_that_contradict_each_other_are_ambiguous_and_the_rest_is_read() -> None:
    reading = reading_of(
        """
        vllm:num_requests_running{engine="0",model_name="old"} 3
        vllm:num_requests_running{engine="0",model_name="new"} 1
        vllm:num_requests_waiting{engine="0",model_name="new"} 2
        """
    )
    (rank,) = reading.ranks
    assert (rank.running, rank.waiting, reading.model_name) == (AMBIGUOUS, 2, AMBIGUOUS)


def test_the_model_is_the_one_of_the_gauges() -> None:
    reading = reading_of(
        """
        vllm:num_requests_running{engine="0",model_name="now"} 1
        vllm:num_preemptions_total{engine="0",model_name="before"} 1
        """
    )
    assert reading.model_name == "now"


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-Inf"])
def test_a_series_that_is_no_number_is_implausible_and_the_page_says_which(value: str) -> None:
    reading = reading_of(
        f"""
        vllm:num_requests_running{{engine="0"}} {value}
        vllm:num_requests_waiting{{engine="0"}} 2
        vllm:request_success_total{{engine="0",finished_reason="stop"}} {value}
        vllm:request_success_total{{engine="0",finished_reason="length"}} 4
        """
    )
    (rank,) = reading.ranks
    assert (rank.running, rank.waiting, rank.finished) == (IMPLAUSIBLE, 2, IMPLAUSIBLE)
    assert 'not finite: vllm:num_requests_running{engine="0"} is ' in reading.error


def test_gauges_that_are_no_numbers_are_gauges_all_the_same() -> None:
    names = ("kv_cache_usage_perc", "num_requests_running", "num_requests_waiting", "num_preemptions_total")
    reading = reading_of("\n".join(f'vllm:{name}{{engine="0"}} NaN' for name in names))
    assert reading.state == "ok"
    assert reading.error.endswith(", and 1 more")


def test_the_pool_of_a_series_that_is_no_number_is_not_known() -> None:
    page = config(num_gpu_blocks=300).removesuffix("1") + 'NaN\nvllm:num_requests_running{engine="0"} 1'
    assert reading_of(page).ranks[0].pool.blocks == NOT_KNOWN


def test_ranks_come_in_order_and_each_has_its_own_ratio() -> None:
    lines = [f'vllm:kv_cache_usage_perc{{engine="{rank}"}} {rank / 20}' for rank in (10, 2, 0)]
    assert [(rank.rank, rank.usage) for rank in reading_of("\n".join(lines)).ranks] == [
        ("0", 0),
        ("2", 0.1),
        ("10", 0.5),
    ]


# --- the pool --------------------------------------------------------------------------------------------------------


def test_the_sum_over_ranks_is_divided_by_the_engines_on_the_page() -> None:
    reading = reading_of("\n".join(config(rank, num_gpu_blocks=300) for rank in "012"))
    assert [rank.pool.blocks for rank in reading.ranks] == [99, 99, 99]


@pytest.mark.parametrize("context_parallel", [1, 2, 4])
def test_the_token_capacity_does_not_tell_whose_the_blocks_are(context_parallel: int) -> None:
    """It is one rank's, shown on all, and multiplied by the ranks that share a sequence: here up to the sum's own."""
    labels = {"num_gpu_blocks": 2000, "block_size": 16, "kv_cache_size_tokens": 1000 * 16 * context_parallel}
    ranks = reading_of(config("0", **labels) + "\n" + config("1", **labels)).ranks
    assert [rank.pool.blocks for rank in ranks] == [999, 999]


def test_a_sum_that_the_ranks_cannot_share_is_ambiguous() -> None:
    reading = reading_of(config("0", num_gpu_blocks=301) + "\n" + config("1", num_gpu_blocks=301))
    assert [rank.pool.blocks for rank in reading.ranks] == [AMBIGUOUS, AMBIGUOUS]


def test_a_rank_behind_an_external_load_balancer_has_its_own_blocks() -> None:
    (rank,) = reading_of(config("3", num_gpu_blocks=300)).ranks
    assert (rank.rank, rank.pool.blocks) == ("3", 299)


@pytest.mark.parametrize("blocks", ["None", "0", "many", "-5"])
def test_blocks_that_vllm_does_not_know_are_not_known(blocks: str) -> None:
    (rank,) = reading_of(config(num_gpu_blocks=blocks) + '\nvllm:kv_cache_usage_perc{engine="0"} 0.5').ranks
    assert (rank.pool.blocks, rank.pool.used, rank.usage) == (NOT_KNOWN, NOT_KNOWN, 0.5)


def test_a_stale_series_without_blocks_gives_way_to_the_one_that_has_them() -> None:
    reading = reading_of(
        config(num_gpu_blocks="None", block_size=16) + "\n" + config(num_gpu_blocks=100, block_size=32)
    )
    assert (reading.ranks[0].pool.blocks, reading.ranks[0].pool.block_size) == (99, 32)


def test_two_sizes_for_one_rank_are_ambiguous() -> None:
    (rank,) = reading_of(config(num_gpu_blocks=100) + "\n" + config(num_gpu_blocks=200)).ranks
    assert rank.pool.blocks == AMBIGUOUS


def test_the_operators_pool_goes_before_the_pages() -> None:
    facts = EngineFacts("e", kv_pool_blocks=50)
    (rank,) = reading_of(config(num_gpu_blocks=100) + '\nvllm:kv_cache_usage_perc{engine="0"} 0.5', facts=facts).ranks
    assert (rank.pool.blocks, rank.pool.used) == (50, 25)


def test_the_rust_front_end_has_no_blocks_and_the_operator_may_tell_them() -> None:
    page = 'vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.5\nvllm:num_requests_running{engine="0"} 1'
    without, told = reading_of(page), reading_of(page, facts=EngineFacts("e", kv_pool_blocks=50))
    assert (without.state, without.ranks[0].pool.blocks, without.ranks[0].usage) == ("ok", NOT_KNOWN, 0.5)
    assert (told.ranks[0].pool.blocks, told.ranks[0].pool.used) == (50, 25)


@pytest.mark.parametrize(("used", "shown"), [(0, 0.0), (0, 1 / 65), (1, 2 / 65), (63, 64 / 65), (64, 1.0)])
@pytest.mark.parametrize("version", ["0.10.1", "0.10.1.1", "0.9.2", None])
def test_the_null_block_is_no_use_up_to_0_10_1(used: int, shown: float, version: str | None) -> None:
    page = (
        config(num_gpu_blocks=65)
        + f'\nvllm:gpu_cache_usage_perc{{engine="0"}} {shown!r}\nvllm:kv_cache_usage_perc{{engine="0"}} {shown!r}'
    )
    (rank,) = reading_of(page, version).ranks
    assert (rank.pool.blocks, rank.pool.used, rank.usage) == (64, used, used / 64)


@pytest.mark.parametrize("used", [0, 1, 33, 63, 64])
@pytest.mark.parametrize("version", ["0.10.2", None])
def test_the_null_block_is_left_out_from_0_10_2(used: int, version: str | None) -> None:
    shown = used / 64
    page = (
        config(num_gpu_blocks=65)
        + f'\nvllm:gpu_cache_usage_perc{{engine="0"}} {shown!r}\nvllm:kv_cache_usage_perc{{engine="0"}} {shown!r}'
    )
    (rank,) = reading_of(page, version).ranks
    assert (rank.pool.blocks, rank.pool.used, rank.usage) == (64, used, shown)


def test_a_ratio_that_fits_no_count_leaves_the_used_blocks_ambiguous() -> None:
    page = (
        config(num_gpu_blocks=65)
        + '\nvllm:gpu_cache_usage_perc{engine="0"} 0.42\nvllm:kv_cache_usage_perc{engine="0"} 0.42'
    )
    (rank,) = reading_of(page).ranks
    assert (rank.pool.blocks, rank.pool.used, rank.usage) == (64, AMBIGUOUS, 0.42)


def test_v0_has_no_null_block() -> None:
    (rank,) = reading_of(
        """
        vllm:cache_config_info{block_size="16",num_cpu_blocks="2048",num_gpu_blocks="1000"} 1
        vllm:gpu_cache_usage_perc{model_name="m"} 0.25
        vllm:num_requests_swapped{model_name="m"} 3
        """,
        "0.6.2",
    ).ranks
    assert (rank.rank, rank.pool.blocks, rank.pool.used, rank.pool.tokens) == ("0", 1000, 250, 16000)
    assert rank.swapped == 3


@pytest.mark.parametrize(
    ("shown", "read"), [("1.0000000001", 1), ("-2.2e-16", 0), ("1.2", IMPLAUSIBLE), ("-0.1", IMPLAUSIBLE)]
)
def test_a_ratio_outside_0_to_1_is_rounding_or_implausible(shown: str, read: object) -> None:
    assert reading_of(f'vllm:kv_cache_usage_perc{{engine="0"}} {shown}').ranks[0].usage == read


# --- connectors, sleep, lengths --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "line",
    [
        'vllm:external_prefix_cache_queries_total{engine="0"} 5',
        'vllm:nixl_num_kv_expired_reqs_total{engine="0"} 0\nvllm:nixl_num_failed_transfers_total{engine="0"} 0',
        'vllm:num_requests_kv_fetch_by_stage{engine="0",stage="in_progress"} 0',
        config(num_gpu_blocks=10, kv_offloading_size="8.0"),
    ],
)
@pytest.mark.parametrize("told", [None, False, True])
def test_a_connector_that_shows_on_the_page_is_there_whatever_we_were_told(line: str, told: bool | None) -> None:
    assert reading_of(line, facts=EngineFacts("e", kv_connector=told)).kv_connector is True


@pytest.mark.parametrize("told", [False, True])
@pytest.mark.parametrize("queries", ["", 'vllm:external_prefix_cache_queries_total{engine="0"} 0\n'])
def test_where_none_shows_it_is_as_we_were_told(queries: str, told: bool) -> None:
    page = queries + 'vllm:prompt_tokens_total{engine="0"} 9'
    assert reading_of(page, facts=EngineFacts("e", kv_connector=told)).kv_connector is told


def test_prompts_without_external_queries_tell_that_there_is_no_connector() -> None:
    queries = 'vllm:external_prefix_cache_queries_total{engine="0"} 0\n'
    assert reading_of(queries + 'vllm:prompt_tokens_total{engine="0"} 0').kv_connector == NOT_KNOWN
    assert reading_of(queries + 'vllm:prompt_tokens_total{engine="0"} 9').kv_connector is False
    assert reading_of('vllm:prompt_tokens_total{engine="0"} 9').kv_connector == NOT_KNOWN


def test_expired_requests_of_several_connectors_add_up() -> None:
    (rank,) = reading_of(
        'vllm:nixl_num_kv_expired_reqs_total{engine="0"} 2\nvllm:mooncake_num_kv_expired_reqs_total{engine="0"} 3'
    ).ranks
    assert rank.kv_expired == 5


@pytest.mark.parametrize("level", ["awake", "weights_offloaded", "discard_all"])
def test_the_sleep_level_is_the_state_that_reads_1(level: str) -> None:
    states = ("awake", "weights_offloaded", "discard_all")
    lines = [f'vllm:engine_sleep_state{{engine="0",sleep_state="{s}"}} {int(s == level)}' for s in states]
    assert reading_of("\n".join(lines)).ranks[0].sleep_level == level


def test_a_rank_that_is_not_awake_and_in_no_state_is_paused() -> None:
    """Sleep level 0: vLLM's states are those of memory, and it keeps its own."""
    states = ("awake", "weights_offloaded", "discard_all")
    lines = [f'vllm:engine_sleep_state{{engine="0",sleep_state="{state}"}} 0' for state in states]
    assert reading_of("\n".join(lines)).ranks[0].sleep_level == "paused"
    assert reading_of("\n".join(lines[1:])).ranks[0].sleep_level == AMBIGUOUS


def adapters(running: str, slots: object = 4, waiting: str = "", value: float = 1.8e9) -> str:
    labels = f'max_lora="{slots}",running_lora_adapters="{running}",waiting_lora_adapters="{waiting}"'
    return f"vllm:lora_requests_info{{{labels}}} {value}"


def test_each_adapter_that_ever_ran_counts_once() -> None:
    """vLLM leaves the series of each set that ever ran together on the page."""
    page = [adapters(""), adapters("acme", waiting="initech"), adapters("globex,acme", value=1.9e9), adapters("hooli")]
    assert reading_of("\n".join(page)).adapters == Adapters(seen=3, slots=4)


def test_adapters_are_counted_whatever_the_values_of_several_api_servers_add_up_to() -> None:
    assert reading_of(adapters("acme", value=3.6e9) + "\n" + adapters("globex", value=1.8e9)).adapters == Adapters(2, 4)


def test_rays_spelling_of_adapters_is_understood() -> None:
    spelled = adapters("acme").replace("vllm:", "ray_vllm_")
    assert reading_of(spelled).adapters == Adapters(seen=1, slots=4)


def test_a_page_without_the_series_of_adapters_tells_nothing_of_them() -> None:
    assert reading_of("vllm:num_requests_running 1").adapters == NOT_EXPOSED


def test_v0_without_lora_has_no_slot() -> None:
    assert reading_of(adapters("", slots=0)).adapters == Adapters(seen=0, slots=0)


@pytest.mark.parametrize("slots", ["None", "", "-1", "9" * 5000])
def test_adapters_without_a_number_of_slots_are_not_known(slots: str) -> None:
    assert reading_of(adapters("acme", slots=slots)).adapters == NOT_KNOWN


def test_of_two_numbers_of_slots_the_larger_one_counts() -> None:
    """After a restart over an old PROMETHEUS_MULTIPROC_DIR the former label sets stay beside the present ones."""
    assert reading_of(adapters("acme", slots=2) + "\n" + adapters("acme", slots=8)).adapters == Adapters(1, 8)


def test_an_incomplete_histogram_is_not_taken_for_a_whole_one() -> None:
    (rank,) = reading_of('vllm:request_prompt_tokens_bucket{engine="0",le="100.0"} 3').ranks
    assert (rank.prompt_lengths, rank.generation_lengths) == (IMPLAUSIBLE, NOT_EXPOSED)


# --- whose page is it ------------------------------------------------------------------------------------------------


def test_another_exporters_page_is_not_taken_for_vllm_without_statistics() -> None:
    page = "# TYPE node_load1 gauge\nnode_load1 0.3\nprocess_start_time_seconds 1.7e9"
    reading = reading_of(page)
    assert (reading.state, reading.ranks) == ("not_vllm", ())
    assert "port" in reading.error
    assert reading_of(page, version="0.32.0").state == "stats_disabled"


def test_an_empty_page_of_a_server_that_told_its_version_has_statistics_off() -> None:
    """With several API servers and no statistics the page may hold nothing at all."""
    assert (reading_of("", "0.32.0").state, reading_of("").state) == ("stats_disabled", "not_vllm")


def test_declared_families_without_a_series_are_no_traffic_yet() -> None:
    assert reading_of("# TYPE vllm:num_requests_running gauge").state == "no_traffic_yet"


def test_ray_serves_spelling_and_replicas_are_told_apart() -> None:
    reading = reading_of(
        """
        ray_vllm_kv_cache_usage_perc{engine="0",model_name="m",ReplicaId="a",WorkerId="1"} 0.25
        ray_vllm_kv_cache_usage_perc{engine="0",model_name="m",ReplicaId="b",WorkerId="2"} 0.5
        ray_vllm_num_preemptions_total{engine="0",model_name="m",ReplicaId="b",WorkerId="2"} 7
        """
    )
    assert [(rank.rank, rank.usage, rank.preemptions) for rank in reading.ranks] == [
        ("a/0", 0.25, NOT_EXPOSED),
        ("b/0", 0.5, 7),
    ]


def test_one_ray_replica_keeps_vllms_rank() -> None:
    (rank,) = reading_of('vllm_num_requests_running{engine="1",ReplicaId="a"} 2').ranks
    assert (rank.rank, rank.running) == ("1", 2)


def test_a_recording_in_short_is_enough() -> None:
    page = samples_from_recording({'vllm:kv_cache_usage_perc{engine="0",model_name="m"}': 0.42})
    assert read_page(page).ranks[0].usage == 0.42


@pytest.mark.parametrize(
    ("version", "numbers"),
    [
        ("0.32.0", (0, 32, 0)),
        ("0.10.2.post1", (0, 10, 2)),
        ("0.32.0+cpu", (0, 32, 0)),
        ("v0.9", (0, 9, 0)),
        ("0.10.2rc1", None),
        ("0.1.dev1+g123abc", None),
        ("0.0.0", None),
        ("main", None),
        ("", None),
        (None, None),
    ],
)
def test_versions_that_do_not_tell_the_release_are_not_trusted(version: str | None, numbers: object) -> None:
    assert release(version) == numbers
