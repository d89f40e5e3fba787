"""The rules of vLLM's start, one by one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from oomwatch.plan.memory import GIB, Device, Figure, Plan, Setup, plan
from oomwatch.plan.model import ModelError, given_sizes, model_of
from tests.plan.startups import KIMI_K2, LLAMA31_8B, QWEN3_30B, QWEN35_27B, TINY, dense

NEW = (0, 33, 0)
LLAMA = model_of(LLAMA31_8B)


def card(size: float = 80, held: float = 0, name: str = "GPU") -> Device:
    return Device(name, Figure.exact(size * GIB, "a test"), int(held * GIB))


def planned(config: Any = LLAMA31_8B, device: Device | None = None, **flags: Any) -> Plan:
    flags.setdefault("version", NEW)
    return plan(model_of(config), device or card(), Setup(**flags))


def answers(made: Plan) -> dict[str, str]:
    return {check.name.split()[0]: check.answer for check in made.checks}


class TestDefaults:
    def test_the_utilization_is_that_of_the_version(self) -> None:
        assert Setup(version=(0, 19, 0)).utilization == 0.9
        assert Setup(version=(0, 20, 2)).utilization == 0.92

    def test_a_large_card_runs_more_sequences_and_larger_batches(self) -> None:
        made = planned()
        assert (made.max_num_seqs, made.max_num_batched_tokens) == (1024, 8192)
        small = planned(device=card(24))
        assert (small.max_num_seqs, small.max_num_batched_tokens) == (256, 2048)
        assert planned(device=card(79, name="NVIDIA A100-SXM4-80GB")).max_num_seqs == 256
        assert planned(device=card(178)).max_num_batched_tokens == 16384

    def test_v0_takes_a_prompt_in_one_piece(self) -> None:
        assert planned(version=(0, 7, 3), max_model_len=20000).max_num_batched_tokens == 20000
        assert planned(version=(0, 7, 3), max_model_len=131072).max_num_batched_tokens == 2048

    def test_the_length_is_the_models(self) -> None:
        assert planned().max_model_len == 131072
        with pytest.raises(ModelError, match="give --max-model-len"):
            planned({**LLAMA31_8B, "max_position_embeddings": None})


class TestBudget:
    def test_neighbours_do_not_make_it_smaller_but_refuse_the_start(self) -> None:
        alone, beside = planned(), planned(device=card(held=20))
        assert alone.budget.pool == beside.budget.pool
        assert answers(alone)["the"] == "yes"
        assert answers(beside)["the"] == "no"
        assert beside.starts == "no"

    def test_from_0_8_to_0_9_0_they_take_from_the_pool(self) -> None:
        alone, beside = planned(version=(0, 8, 5)), planned(device=card(held=20), version=(0, 8, 5))
        assert alone.budget.pool.value - beside.budget.pool.value == 20 * GIB

    def test_graphs_are_outside_before_0_20_2(self) -> None:
        assert planned(version=(0, 17, 0)).budget.graphs in planned(version=(0, 17, 0)).budget.outside
        assert planned(version=(0, 20, 2)).budget.graphs in planned(version=(0, 20, 2)).budget.inside

    def test_eager_mode_has_none(self) -> None:
        assert planned(enforce_eager=True).budget.graphs.high == 0

    def test_a_fixed_pool_skips_the_budget(self) -> None:
        made = planned(kv_cache_memory_bytes=20 * GIB, device=card(held=20))
        assert made.budget.pool.value == made.budget.pool.high == 20 * GIB
        assert set(answers(made)) == {"one", "all"}
        with pytest.raises(ModelError, match="came with vLLM"):
            planned(kv_cache_memory_bytes=GIB, version=(0, 9, 2))

    def test_a_bar_that_crosses_the_border_leaves_it_open(self) -> None:
        assert planned(device=card(24, held=1.3)).starts != "yes"


class TestRanks:
    def test_tensor_parallelism_splits_weights_and_heads(self) -> None:
        one, four = planned(), planned(tensor_parallel_size=4)
        assert four.budget.weights.value == pytest.approx(one.budget.weights.value / 4)
        assert one.pool is not None
        assert four.pool is not None
        assert four.pool.block_bytes * 4 == one.pool.block_bytes

    def test_each_rank_has_a_head_at_least(self) -> None:
        eight, sixteen = planned(tensor_parallel_size=8), planned(tensor_parallel_size=16)
        assert eight.pool is not None
        assert sixteen.pool is not None
        assert sixteen.pool.block_bytes == eight.pool.block_bytes

    def test_heads_that_cannot_be_split_are_refused_as_vllm_does(self) -> None:
        with pytest.raises(ModelError, match="does not divide the 32 attention heads"):
            planned(tensor_parallel_size=3)

    def test_a_latent_cache_is_the_same_on_every_rank(self) -> None:
        two, eight = planned(KIMI_K2, tensor_parallel_size=2), planned(KIMI_K2, tensor_parallel_size=8)
        assert two.pool is not None
        assert eight.pool is not None
        assert eight.pool.block_bytes == two.pool.block_bytes == 61 * 576 * 2 * 16

    def test_pipeline_parallelism_splits_layers_and_the_last_stage_samples(self) -> None:
        made = planned(pipeline_parallel_size=4)
        assert made.budget.weights.value < planned().budget.weights.value / 2
        with pytest.raises(ModelError, match="more than the 32 layers"):
            planned(pipeline_parallel_size=33)

    def test_data_parallelism_spreads_experts_only(self) -> None:
        assert planned(data_parallel_size=4).budget.weights == planned().budget.weights
        spread, alone = planned(QWEN3_30B, data_parallel_size=4), planned(QWEN3_30B)
        assert spread.budget.weights.value < alone.budget.weights.value / 3


class TestPool:
    def test_half_the_bytes_make_twice_the_tokens(self) -> None:
        full, half = planned(), planned(kv_cache_dtype="fp8")
        assert full.pool is not None
        assert half.pool is not None
        assert half.pool.tokens.value == pytest.approx(2 * full.pool.tokens.value, rel=0.001)

    def test_an_unknown_type_of_cache_is_said_to_be_so(self) -> None:
        with pytest.raises(ModelError, match="--kv-cache-dtype turboquant_4bit_nc is not in this arithmetic"):
            planned(kv_cache_dtype="turboquant_4bit_nc")

    def test_a_window_bounds_what_a_long_request_holds(self) -> None:
        """Gemma 3: five layers in six look back 1,024 tokens."""
        windowed = dense(48, 3840, 16, 8, 15360, 262208, model_type="gemma3_text", sliding_window=1024, head_dim=256)
        plain = {**windowed, "sliding_window": None}
        with_windows, without = planned(windowed), planned(plain)
        disabled = planned(windowed, disable_hybrid_kv_cache_manager=True)
        assert with_windows.pool is not None
        assert without.pool is not None
        assert disabled.pool is not None
        assert with_windows.pool.concurrency.value > 3 * without.pool.concurrency.value
        assert disabled.pool.concurrency.value == pytest.approx(without.pool.concurrency.value)

    def test_a_model_of_windows_alone_is_one_group(self) -> None:
        mistral = dense(32, 4096, 32, 8, 14336, 32000, model_type="mistral", sliding_window=4096)
        made = planned(mistral)
        assert made.pool is not None
        assert made.pool.block_bytes == 32 * 8 * 256 * 2 * 16
        assert made.pool.request_bytes == (-(-(4095 + 8192) // 16) + 1) * made.pool.block_bytes

    def test_a_state_makes_blocks_as_long_as_itself(self) -> None:
        made = planned(QWEN35_27B)
        assert made.pool is not None
        assert made.pool.block_tokens == 784

    def test_the_override_replaces_the_count(self) -> None:
        made = planned(num_gpu_blocks_override=33, block_size=32, max_model_len=512)
        assert made.pool is not None
        assert made.pool.tokens.value == 1056
        assert f"{made.pool.concurrency.value:.2f}" == "2.06"


class TestGivenSizes:
    def test_weights_and_bytes_for_a_token_are_enough(self) -> None:
        model = given_sizes(16 * GIB, 128 * 1024)
        made = plan(model, card(), Setup(version=NEW, max_model_len=8192))
        assert made.pool is not None
        assert made.pool.block_bytes == 16 * 128 * 1024
        assert made.budget.weights.value == 16 * GIB

    def test_without_them_the_cache_is_not_known_and_the_start_still_judged(self) -> None:
        made = plan(given_sizes(70 * GIB, None), card(), Setup(version=NEW, max_model_len=8192))
        assert made.pool is None
        assert made.starts in {"no", "perhaps"}

    def test_they_replace_what_the_configuration_says(self) -> None:
        made = plan(LLAMA.with_sizes(8 * GIB, 64 * 1024), card(), Setup(version=NEW))
        assert made.budget.weights.value == pytest.approx(8 * GIB)
        assert made.pool is not None
        assert made.pool.block_bytes == 16 * 64 * 1024


class TestLimits:
    def test_what_fits_does_and_the_next_does_not(self) -> None:
        device = card(24)
        flags: dict[str, Any] = {"max_num_seqs": 16, "max_model_len": 8192}
        limits = planned(device=device, **flags).limits
        assert limits.max_model_len is not None
        assert 8192 < limits.max_model_len < 131072
        assert limits.smallest_utilization is not None
        for share, fits in ((limits.smallest_utilization, True), (limits.smallest_utilization - 0.01, False)):
            made = planned(device=device, gpu_memory_utilization=share, **flags)
            assert (made.starts == "yes") is fits

    def test_a_refusal_that_a_real_engine_printed(self) -> None:
        """captures/0.32.0/failure-max-model-len-too-large.log: the estimated maximum model length is 1024."""
        flags: dict[str, Any] = {"num_gpu_blocks_override": 33, "block_size": 32, "kv_cache_memory_bytes": GIB}
        refused = planned(TINY, version=(0, 32, 0), max_model_len=4096, **flags)
        assert answers(refused)["one"] == "no"
        assert refused.limits.max_model_len == 1024

    def test_the_margin_stays_free(self) -> None:
        setup = Setup(version=NEW, max_model_len=8192)
        tight, roomy = (plan(LLAMA, card(), setup, margin=size) for size in (GIB // 4, 8 * GIB))
        assert tight.limits.largest_utilization is not None
        assert roomy.limits.largest_utilization is not None
        assert tight.limits.largest_utilization > roomy.limits.largest_utilization
        assert roomy.limits.largest_utilization <= 0.9

    def test_so_many_of_the_longest_requests_fit_at_once(self) -> None:
        made = planned(max_model_len=8192)
        assert made.limits.max_num_seqs is not None
        again = planned(max_model_len=8192, max_num_seqs=made.limits.max_num_seqs)
        assert again.pool is not None
        assert again.pool.concurrency.low >= made.limits.max_num_seqs

    def test_nothing_fits_a_card_that_is_too_small(self) -> None:
        limits = planned(device=card(8)).limits
        assert (limits.max_model_len, limits.max_num_seqs, limits.largest_utilization) == (None, None, None)


def test_flags_out_of_range_are_refused() -> None:
    with pytest.raises(ModelError, match="is not above 0 and at most 1"):
        planned(gpu_memory_utilization=1.5)


def test_a_figure_is_never_outside_its_bar() -> None:
    for config in (LLAMA31_8B, QWEN3_30B, QWEN35_27B, KIMI_K2):
        for version in ((0, 6, 6), (0, 8, 5), (0, 11, 0), (0, 17, 0), NEW):
            budget = planned(config, tensor_parallel_size=8, version=version).budget
            for figure in (*budget.inside, *budget.outside, budget.pool, budget.requested):
                assert figure.low <= figure.value <= figure.high
                assert figure.source
    assert replace(Setup(version=NEW), tensor_parallel_size=2).ranks == 2
