"""Start-ups that people published: what vLLM printed, for models whose configurations are public.

Sizes are in GiB, as vLLM prints them. ``None``: not in the report. A start-up with ``pool`` tells whether blocks,
tokens and concurrency follow from the pool; one with ``total`` and the flags, whether the pool itself does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Config = Mapping[str, object]


def dense(layers: int, hidden: int, heads: int, kv: int, inner: int, vocabulary: int, **more: object) -> Config:
    base = {
        "model_type": "llama",
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "intermediate_size": inner,
        "vocab_size": vocabulary,
        "torch_dtype": "bfloat16",
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
    }
    return {**base, **more}


LLAMA2_7B = dense(32, 4096, 32, 32, 11008, 32000, max_position_embeddings=4096)
LLAMA31_8B = dense(32, 4096, 32, 8, 14336, 128256)
LLAMA33_70B = dense(80, 8192, 64, 8, 28672, 128256)
QWEN25_05B = dense(24, 896, 14, 2, 4864, 151936, tie_word_embeddings=True, max_position_embeddings=32768)
QWEN25_15B = dense(28, 1536, 12, 2, 8960, 151936, tie_word_embeddings=True, max_position_embeddings=32768)
QWEN25_7B = dense(28, 3584, 28, 4, 18944, 152064, max_position_embeddings=32768)
QWEN25_14B = dense(48, 5120, 40, 8, 13824, 152064)
QWEN3_8B = dense(36, 4096, 32, 8, 12288, 151936, head_dim=128, max_position_embeddings=40960)
PHI4 = dense(40, 5120, 40, 10, 17920, 100352, max_position_embeddings=16384)
AWQ = {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128}}
GPTQ = {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 128}}
FP8 = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
NF4 = {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}
QWEN3_30B = dense(
    48, 2048, 32, 4, 6144, 151936, model_type="qwen3_moe", head_dim=128, num_experts=128, num_experts_per_tok=8,
    moe_intermediate_size=768, max_position_embeddings=262144,
)  # fmt: skip
QWEN3_235B = dense(
    94, 4096, 64, 4, 12288, 151936, model_type="qwen3_moe", head_dim=128, num_experts=128, num_experts_per_tok=8,
    moe_intermediate_size=1536, max_position_embeddings=262144, **FP8,
)  # fmt: skip
MINIMAX_M2 = dense(
    62, 3072, 48, 8, 1536, 200064, model_type="minimax_m2", head_dim=128, num_local_experts=256, num_experts_per_tok=8,
    max_position_embeddings=196608,
)  # fmt: skip
KIMI_K2 = dense(
    61, 7168, 64, 64, 18432, 163840, model_type="kimi_k2", kv_lora_rank=512, q_lora_rank=1536, qk_rope_head_dim=64,
    qk_nope_head_dim=128, v_head_dim=128, n_routed_experts=384, n_shared_experts=1, num_experts_per_tok=8,
    moe_intermediate_size=2048, first_k_dense_replace=1,
)  # fmt: skip
GPT_OSS_20B = dense(
    24, 2880, 64, 8, 2880, 201088, model_type="gpt_oss", head_dim=64, num_local_experts=32, experts_per_token=4,
    num_experts_per_tok=4, sliding_window=128, quantization_config={"quant_method": "mxfp4"},
)  # fmt: skip
QWEN3_NEXT = dense(
    48, 2048, 16, 2, 5120, 151936, model_type="qwen3_next", head_dim=256, full_attention_interval=4, num_experts=512,
    num_experts_per_tok=10, moe_intermediate_size=512, shared_expert_intermediate_size=512, linear_num_value_heads=32,
    linear_num_key_heads=16, linear_value_head_dim=128, linear_key_head_dim=128, linear_conv_kernel_dim=4,
    max_position_embeddings=262144,
)  # fmt: skip
QWEN35_27B = {
    "model_type": "qwen3_5",
    "text_config": dense(
        64, 5120, 24, 4, 17408, 248320, model_type="qwen3_5_text", head_dim=256, full_attention_interval=4,
        linear_num_value_heads=48, linear_num_key_heads=16, linear_value_head_dim=128, linear_key_head_dim=128,
        linear_conv_kernel_dim=4, mamba_ssm_dtype="float32", max_position_embeddings=262144,
    ),
    "vision_config": {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304},
}  # fmt: skip

TINY = dense(2, 128, 4, 4, 256, 512, head_dim=32, max_position_embeddings=4096)


@dataclass(frozen=True)
class Startup:
    name: str
    source: str
    config: Config
    version: tuple[int, ...]
    device: str = "GPU"
    total: float | None = None
    weights: float | None = None
    activation: float | None = None
    non_torch: float | None = None
    graphs: float | None = None
    consumed: float | None = None
    pool: float | None = None
    blocks: int | None = None
    tokens: int | None = None
    concurrency: float | None = None
    needed: float | None = None
    flags: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name


STARTUPS = (
    Startup("tiny on CPU", "captures/0.32.0/startup-default.log", TINY, (0, 32, 0), pool=1.0, blocks=8192,
            tokens=1_048_576, concurrency=512.0, flags={"max_model_len": 2048, "block_size": 128}),
    Startup("tiny, 65 blocks", "captures/0.8.5 to 0.27.1", TINY, (0, 9, 2), tokens=1040, concurrency=2.03,
            flags={"max_model_len": 512, "num_gpu_blocks_override": 65}),
    Startup("llama-2-7b on V100", "case 007, vllm-project/vllm#2418", LLAMA2_7B, (0, 8, 5), total=15.77,
            weights=12.55, activation=0.55, pool=1.79, blocks=229, tokens=3664, concurrency=0.89,
            flags={"gpu_memory_utilization": 0.95, "max_model_len": 4096, "enforce_eager": True,
                   "max_num_batched_tokens": 4096}),
    Startup("llama-3.1-8b at 20k", "vllm-project/vllm#10517", LLAMA31_8B, (0, 6, 4), total=23.58, weights=14.99,
            activation=2.07, non_torch=0.35, pool=3.81, blocks=1952, tokens=31232, concurrency=1.56,
            flags={"gpu_memory_utilization": 0.9, "max_model_len": 20000}),
    Startup("llama-3.1-8b at 29k", "vllm-project/vllm#10517", LLAMA31_8B, (0, 6, 4), total=23.58, weights=14.99,
            activation=2.99, non_torch=0.35, pool=2.89, blocks=1478, tokens=23648, concurrency=0.82,
            flags={"gpu_memory_utilization": 0.9, "max_model_len": 29000}),
    Startup("llama-3.1-8b on A100", "a student's log of vLLM 0.3x, 2026-10", LLAMA31_8B, (0, 32, 0), device="A100",
            total=79.25, weights=15.0, consumed=15.26, pool=56.21, tokens=460496, concurrency=3.51,
            flags={"gpu_memory_utilization": 0.92, "max_model_len": 131072}),
    Startup("llama-3.3-70b at 56k", "case 128", LLAMA33_70B, (0, 8, 2), pool=3.48, tokens=91248, concurrency=1.63,
            flags={"tensor_parallel_size": 8, "max_model_len": 56000}),
    Startup("llama-3.3-70b at 116k", "case 128", LLAMA33_70B, (0, 8, 2), needed=4.43,
            flags={"tensor_parallel_size": 8, "max_model_len": 116160}),
    Startup("qwen2.5-7b on V100", "an article on V0's budget, vLLM 0.8.5", QWEN25_7B, (0, 7, 3), total=31.74,
            weights=14.25, activation=4.35, non_torch=0.09, pool=9.88,
            flags={"gpu_memory_utilization": 0.9, "max_model_len": 32768}),
    Startup("qwen2.5-7b-awq on RTX 4060", "vllm-project/vllm#13882", {**QWEN25_7B, **AWQ}, (0, 7, 3), total=8.0,
            weights=5.20, activation=1.42, non_torch=0.03,
            flags={"gpu_memory_utilization": 0.7, "max_model_len": 4096}),
    Startup("qwen2.5-7b on A100-40", "a collection of issues, vLLM 0.10.2", QWEN25_7B, (0, 10, 2), pool=17.33,
            tokens=324496, concurrency=9.90, flags={"max_model_len": 32768}),
    Startup("qwen2.5-0.5b under WSL", "a log of vLLM 0.28", QWEN25_05B, (0, 27, 1), pool=18.65, tokens=1629520,
            flags={"max_model_len": 32768}),
    Startup("qwen2.5-1.5b on Turing", "a log of vLLM 0.28", QWEN25_15B, (0, 28, 0), pool=17.36, tokens=650208,
            concurrency=158.74, flags={"max_model_len": 4096}),
    Startup("r1-distill-qwen-14b on two 4090", "vllm-project/vllm#13061", QWEN25_14B, (0, 7, 2), total=23.55,
            weights=13.95, activation=1.41, non_torch=0.25, pool=7.47, tokens=81536,
            flags={"gpu_memory_utilization": 0.98, "max_model_len": 131072, "tensor_parallel_size": 2}),
    Startup("qwen3-8b-fp8", "notes with a log of vLLM 0.10.2", {**QWEN3_8B, **FP8}, (0, 10, 2), total=23.53,
            weights=8.8, activation=1.40, non_torch=0.02, graphs=0.68, pool=8.598, tokens=62608, concurrency=61.14,
            flags={"gpu_memory_utilization": 0.8, "max_model_len": 1024}),
    Startup("qwen3-8b", "a log of vLLM 0.15", QWEN3_8B, (0, 15, 0), total=47.37, weights=15.27, activation=1.40,
            non_torch=0.03, graphs=0.54, pool=25.94, flags={"gpu_memory_utilization": 0.9}),
    Startup("phi-4-gptq on A100", "a notebook with vLLM 0.6.5", {**PHI4, **GPTQ}, (0, 6, 5), device="A100", total=79.25,
            weights=8.51, activation=0.94, non_torch=0.26, graphs=0.27, pool=2.18, blocks=715, concurrency=5.59,
            flags={"gpu_memory_utilization": 0.15, "max_model_len": 2048}),
    Startup("phi-4-bnb with LoRA", "a notebook with vLLM 0.8.2", {**PHI4, **NF4}, (0, 7, 3), pool=45.21, blocks=14815,
            concurrency=462.97, flags={"max_model_len": 512}),
    Startup("qwen3-30b-a3b-fp8 on two", "notes with vLLM 0.10.2", {**QWEN3_30B, **FP8}, (0, 10, 2), pool=25.91,
            tokens=566016, concurrency=17.27, flags={"tensor_parallel_size": 2, "max_model_len": 32768}),
    Startup("qwen3-30b-a3b on four 3090", "a log of vLLM 0.11.0", QWEN3_30B, (0, 11, 0), pool=2.31, tokens=100752,
            concurrency=1.54, flags={"tensor_parallel_size": 4, "max_model_len": 65536}),
    Startup("qwen3-coder-30b refused", "vllm-project/vllm#34076", QWEN3_30B, (0, 15, 2), needed=24.0,
            flags={"max_model_len": 262144}),
    Startup("qwen3-235b-fp8 on four H100", "vllm-project/vllm#21348", QWEN3_235B, (0, 9, 2), pool=8.11, tokens=178880,
            flags={"tensor_parallel_size": 4, "max_model_len": 40960}),
    Startup("qwen3-235b-fp8 on four RTX PRO 6000", "a blog with vLLM 0.27", QWEN3_235B, (0, 27, 1), total=95.01,
            device="RTX PRO 6000", weights=55.19, consumed=56.89, graphs=0.32, pool=27.85, tokens=621392,
            concurrency=18.96, flags={"tensor_parallel_size": 4, "gpu_memory_utilization": 0.9, "max_num_seqs": 32,
                                      "max_model_len": 32768}),
    Startup("minimax-m2.7 refused", "eugr/spark-vllm-docker#396", MINIMAX_M2, (0, 29, 1), needed=23.25,
            flags={"tensor_parallel_size": 2, "max_model_len": 196608}),
    Startup("minimax-m2.7", "eugr/spark-vllm-docker#396", MINIMAX_M2, (0, 29, 1), pool=28.74, tokens=240816,
            concurrency=1.22, flags={"tensor_parallel_size": 2, "max_model_len": 196608}),
    Startup("kimi-k2 with fp8 cache", "case 020", KIMI_K2, (0, 20, 0), pool=12.41, tokens=379392, concurrency=2.89,
            flags={"tensor_parallel_size": 4, "max_model_len": 131072, "kv_cache_dtype": "fp8", "block_size": 64}),
    Startup("gpt-oss-20b on A100", "myoceane.fr, vLLM 0.19.0", GPT_OSS_20B, (0, 19, 0), device="A100", total=79.25,
            weights=13.72, pool=36.56, flags={"gpu_memory_utilization": 0.65, "max_model_len": 131072}),
    Startup("qwen3-next-80b on two H200", "a log of vLLM 0.11.0", QWEN3_NEXT, (0, 11, 0), device="H200", total=139.81,
            weights=74.28, activation=5.58, non_torch=1.38, graphs=2.37, pool=44.59, tokens=973760, concurrency=14.77,
            flags={"tensor_parallel_size": 2, "gpu_memory_utilization": 0.9, "max_model_len": 262144}),
    Startup("qwen3.5-27b at 32k", "vllm-project/vllm#40691", QWEN35_27B, (0, 19, 0), tokens=290864, concurrency=33.04,
            flags={"max_model_len": 32768, "num_gpu_blocks_override": 1487}),
    Startup("qwen3.8-27b with fp8 cache on two 3090", "mitchross/talos-argocd-proxmox#1995", QWEN35_27B, (0, 28, 0),
            pool=4.99, blocks=208, tokens=302921, concurrency=2.31,
            flags={"tensor_parallel_size": 2, "max_model_len": 131072, "kv_cache_dtype": "fp8"}),
    Startup("qwen3.6-27b with nvfp4 cache", "case 012, vllm-project/vllm#57475", QWEN35_27B, (0, 29, 1), pool=2.97,
            tokens=150745, concurrency=1.22, flags={"max_model_len": 124000, "kv_cache_dtype": "nvfp4"}),
)  # fmt: skip
