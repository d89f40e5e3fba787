"""What a model's files tell: parameters, caches, quantization; and how what is wrong with them is said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oomwatch.plan.memory import GIB, Device, Figure, Setup, plan
from oomwatch.plan.memory import weights as plan_weights
from oomwatch.plan.model import Model, ModelError, kinds, model_of, read_model
from tests.plan.startups import (
    AWQ,
    GPT_OSS_20B,
    KIMI_K2,
    LLAMA2_7B,
    LLAMA31_8B,
    LLAMA33_70B,
    QWEN3_8B,
    QWEN3_30B,
    QWEN3_235B,
    QWEN3_NEXT,
    QWEN25_05B,
    QWEN25_7B,
    dense,
)

BILLION = 1e9
DEEPSEEK_V3 = dense(
    61, 7168, 128, 128, 18432, 129280, model_type="deepseek_v3", kv_lora_rank=512, q_lora_rank=1536,
    qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128, n_routed_experts=256, n_shared_experts=1,
    num_experts_per_tok=8, moe_intermediate_size=2048, first_k_dense_replace=3,
)  # fmt: skip
JAMBA = dense(
    32, 4096, 32, 8, 14336, 65536, model_type="jamba", attn_layer_period=8, attn_layer_offset=4, expert_layer_period=2,
    expert_layer_offset=1, num_experts=16, num_experts_per_tok=2, mamba_d_state=16, mamba_d_conv=4, mamba_expand=2,
    mamba_dt_rank=256,
)  # fmt: skip


@pytest.mark.parametrize(
    ("config", "billions"),
    [
        (LLAMA2_7B, 6.74),
        (LLAMA31_8B, 8.03),
        (LLAMA33_70B, 70.6),
        (QWEN25_05B, 0.494),
        (QWEN25_7B, 7.62),
        (QWEN3_8B, 8.19),
        (QWEN3_30B, 30.5),
        (QWEN3_235B, 235.1),
        (QWEN3_NEXT, 79.7),
        (GPT_OSS_20B, 20.9),
        (DEEPSEEK_V3, 671.0),
        (KIMI_K2, 1026.0),
        (JAMBA, 51.6),
    ],
)
def test_the_count_of_parameters_is_the_published_one(config: Any, billions: float) -> None:
    assert model_of(config).parameters / BILLION == pytest.approx(billions, rel=0.01)


def weights(model: Model) -> float:
    return sum(model.part_bytes(part) for part in model.parts())


class TestQuantization:
    @pytest.mark.parametrize(
        ("config", "of_plain"),
        [
            (AWQ, 0.26),
            ({"quantization_config": {"quant_method": "fp8"}}, 0.5),
            ({"quantization_config": {"quant_method": "gptq", "bits": 8, "group_size": -1}}, 0.5),
            ({"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}, 0.28),
            ({"quantization_config": {"quant_algo": "FP8"}}, 0.5),
            (
                {
                    "quantization_config": {
                        "quant_method": "compressed-tensors",
                        "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "int", "group_size": 32}}},
                    }
                },
                0.29,
            ),
        ],
    )
    def test_linear_layers_shrink_and_the_vocabulary_does_not(self, config: Any, of_plain: float) -> None:
        plain, small = model_of(LLAMA33_70B), model_of({**LLAMA33_70B, **config})
        vocabulary = 2 * 2 * 128256 * 8192
        assert (weights(small) - vocabulary) / (weights(plain) - vocabulary) == pytest.approx(of_plain, abs=0.01)

    def test_mxfp4_is_for_experts_alone(self) -> None:
        """The checkpoint of gpt-oss-20b has 13.8 GB."""
        assert weights(model_of(GPT_OSS_20B)) / 1e9 == pytest.approx(13.8, rel=0.01)

    def test_exceptions_for_a_whole_part_are_kept(self) -> None:
        kept = {"quant_method": "fp8", "ignored_layers": [f"model.layers.{n}.self_attn.q_proj" for n in range(80)]}
        small = model_of({**LLAMA33_70B, "quantization_config": kept})
        assert "attention" in small.quantization.keeps

    def test_the_flag_says_it_where_the_configuration_does_not(self) -> None:
        assert weights(model_of(LLAMA31_8B, quantized_by="fp8")) < 0.65 * weights(model_of(LLAMA31_8B))

    def test_an_unknown_one_is_not_guessed(self) -> None:
        model = model_of({**LLAMA31_8B, "quantization_config": {"quant_method": "exl3"}})
        assert not model.quantization.sure


class TestCaches:
    def test_layers_are_told_by_their_kind(self) -> None:
        assert kinds(model_of(LLAMA31_8B)) == (("full attention", 32),)
        assert kinds(model_of(GPT_OSS_20B)) == (("sliding window of 128 tokens", 12), ("full attention", 12))
        assert kinds(model_of(JAMBA)) == (("state", 28), ("full attention", 4))
        assert kinds(model_of(QWEN3_NEXT)) == (("state", 36), ("full attention", 12))

    def test_a_window_that_is_switched_off_is_none(self) -> None:
        assert kinds(model_of({**QWEN25_7B, "sliding_window": 131072, "use_sliding_window": False})) == (
            ("full attention", 28),
        )

    def test_layer_types_decide_where_they_are_listed(self) -> None:
        listed = ["sliding_attention", "full_attention"] * 16
        assert kinds(model_of({**LLAMA31_8B, "layer_types": listed, "sliding_window": 1024})) == (
            ("sliding window of 1,024 tokens", 16),
            ("full attention", 16),
        )

    def test_layers_that_share_a_cache_have_none(self) -> None:
        assert kinds(model_of({**LLAMA31_8B, "num_kv_shared_layers": 20})) == (("full attention", 12),)

    def test_nemotrons_pattern(self) -> None:
        config = dense(
            8, 4096, 32, 8, 21504, 131072, model_type="nemotron_h", hybrid_override_pattern="M-M*-M-M",
            mamba_num_heads=128, mamba_head_dim=64, ssm_state_size=128, n_groups=8, conv_kernel=4,
        )  # fmt: skip
        assert kinds(model_of(config)) == (("state", 4), ("full attention", 1))

    def test_an_attention_that_is_not_in_this_arithmetic_says_so(self) -> None:
        model = model_of({**DEEPSEEK_V3, "compress_ratios": [4, 128]})
        assert not model.cache_known
        assert "--kv-bytes-per-token" in model.unsure[0]


class TestLeftOut:
    """Configurations within another one leave out what their class has by itself."""

    def test_gemma_3(self) -> None:
        text = {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34,
                "sliding_window": 1024}  # fmt: skip
        vision = {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27}
        model = model_of({"model_type": "gemma3", "text_config": text, "vision_config": vision})
        assert model.parameters / BILLION == pytest.approx(4.3, rel=0.02)
        assert kinds(model) == (("sliding window of 1,024 tokens", 29), ("full attention", 5))
        assert model.max_len == 131072

    def test_llava(self) -> None:
        text = {"model_type": "llama", "vocab_size": 32064, "max_position_embeddings": 4096}
        model = model_of({"model_type": "llava", "text_config": text, "tie_word_embeddings": False})
        assert model.parameters / BILLION == pytest.approx(6.74, rel=0.01)

    def test_the_embeddings_of_a_model_are_its_head_where_nothing_is_said(self) -> None:
        """As in transformers' base class: models that keep both say so."""
        silent = {name: value for name, value in LLAMA31_8B.items() if name != "tie_word_embeddings"}
        assert model_of(silent).head is None

    def test_layers_for_speculation_are_in_the_files_and_not_in_memory(self, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text(json.dumps({**DEEPSEEK_V3, "num_nextn_predict_layers": 1}))
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": 685e9 * 2}}))
        model = read_model(tmp_path)
        loaded = plan_weights(model, Setup(version=(0, 33, 0))).value
        assert loaded / (685e9 * 2) == pytest.approx(671 / 685, rel=0.005)


class TestFiles:
    def test_weights_beside_the_configuration_are_taken_by_their_index(self, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text(json.dumps(LLAMA31_8B))
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": 16_060_522_496}}))
        assert read_model(tmp_path).files_bytes == 16_060_522_496

    def test_or_by_their_size(self, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text(json.dumps(LLAMA31_8B))
        (tmp_path / "model.safetensors").write_bytes(b"x" * 1000)
        assert read_model(tmp_path).files_bytes == 1000
        assert read_model(tmp_path / "config.json").files_bytes is None

    def test_modelopt_keeps_its_quantization_in_a_file_of_its_own(self, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text(json.dumps(LLAMA31_8B))
        (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "NVFP4"}}))
        assert read_model(tmp_path).quantization.name == "nvfp4"

    @pytest.mark.parametrize(
        ("content", "said"),
        [
            (None, "is not there"),
            ("{", "is no JSON"),
            ("[" * 100_000, "is no JSON"),
            ("[]", "holds no object"),
            ("{}", "has no num_hidden_layers"),
            (json.dumps({**LLAMA31_8B, "hidden_size": "big"}), "hidden_size of the configuration is 'big'"),
            (json.dumps({**LLAMA31_8B, "hidden_size": 0}), "hidden_size of the configuration is 0"),
            (json.dumps({**LLAMA31_8B, "num_hidden_layers": -1}), "is -1"),
            (json.dumps({**LLAMA31_8B, "num_hidden_layers": 10**9}), "which no model has"),
            (json.dumps({**LLAMA31_8B, "layer_types": ["full_attention"]}), "the kind of 1 layers and has 32"),
        ],
    )
    def test_what_is_wrong_is_said(self, tmp_path: Path, content: str | None, said: str) -> None:
        if content is not None:
            (tmp_path / "config.json").write_text(content)
        with pytest.raises(ModelError, match=said.replace("(", r"\(")):
            read_model(tmp_path)


CARD = Device("GPU", Figure.exact(80 * GIB, "a test"))
_VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(-5, 10**6), st.floats(), st.text(max_size=5),
    st.lists(st.integers(), max_size=3),
)  # fmt: skip


@settings(max_examples=40, deadline=None)
@given(st.dictionaries(st.sampled_from(sorted({**DEEPSEEK_V3, **QWEN3_NEXT, **JAMBA})), _VALUES, max_size=4))
def test_whatever_a_configuration_holds_it_is_read_or_refused(changed: dict[str, Any]) -> None:
    for base in (DEEPSEEK_V3, QWEN3_NEXT, JAMBA):
        config = {**base, **changed, "num_hidden_layers": 8}
        try:
            made = plan(model_of(config), CARD, Setup(version=(0, 33, 0), max_model_len=4096))
        except ModelError:
            continue
        assert weights(made.model) >= 0
        assert made.starts in ("yes", "perhaps", "no")
