"""What a model's files tell of memory: its parameters by part, and what each layer's cache holds.

``config.json`` alone is enough; where the weights lie beside it, their size is taken from them.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from oomwatch.errors import InputError
from oomwatch.plan.quantization import Quantization, quantization

Spread = Literal["tensor", "expert", "none"]


class ModelError(InputError):
    """The model cannot be read; the text says what, where, and what to do."""


@dataclass(frozen=True)
class Part:
    """Parameters that live and are spread over ranks alike.

    ``spread`` says over which ranks: all of a tensor-parallel group, those that share the experts, or none (each rank
    has all of them). ``linear`` parameters are those that a quantization may shrink.
    """

    name: str
    parameters: int
    spread: Spread = "tensor"
    linear: bool = True


@dataclass(frozen=True)
class Cache:
    """What one layer keeps: of each token (attention), or of each request whatever its length (a state).

    Attention: ``heads`` KV heads, of which each rank has its share and one at least, ``width`` elements of keys and
    values for each head and token, ``extra`` bytes for each token besides, ``window`` tokens at most (0: all).
    A state: ``short`` elements in the model's type and ``long`` ones of ``long_bytes`` each (0: in the model's type).
    """

    kind: Literal["full", "sliding", "chunked", "state"]
    heads: int = 0
    width: int = 0
    extra: int = 0
    window: int = 0
    short: int = 0
    long: int = 0
    long_bytes: int = 0


@dataclass(frozen=True)
class Layer:
    """One decoder layer. ``widths`` are the elements for each token that its widest step holds at once: those that
    are split over tensor-parallel ranks, and those that are not."""

    parts: tuple[Part, ...]
    caches: tuple[Cache, ...]
    widths: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Model:
    """A model as far as memory goes.

    ``files_bytes`` is the size of its weights on disk, None where they are not there; ``unloaded`` are layers that are
    in the files and that vLLM loads for speculative decoding only. ``unsure`` has what the
    configuration doesn't tell; ``cache_known`` is False where that leaves out how much the cache takes.
    """

    name: str
    family: str
    layers: tuple[Layer, ...]
    embedding: Part
    head: Part | None
    encoder: Part | None
    hidden: int
    heads: int
    vocabulary: int
    dtype_bytes: int
    quantization: Quantization
    max_len: int | None
    files_bytes: int | None = None
    unloaded: int = 0
    unsure: tuple[str, ...] = ()
    cache_known: bool = True

    @property
    def parameters(self) -> int:
        return sum(part.parameters for part in self.parts())

    def parts(self) -> Iterator[Part]:
        yield self.embedding
        for layer in self.layers:
            yield from layer.parts
        if self.head is not None:
            yield self.head
        if self.encoder is not None:
            yield self.encoder

    def part_bytes(self, part: Part) -> float:
        """Bytes of a part as vLLM holds it, on all ranks together."""
        if not part.linear or part.name in self.quantization.keeps:
            return part.parameters * self.dtype_bytes
        return part.parameters * (self.quantization.bytes_per_parameter or self.dtype_bytes)

    @property
    def mixed(self) -> bool:
        """Whether its layers keep caches of more than one kind."""
        return len({cache for layer in self.layers for cache in layer.caches}) > 1

    @property
    def experts(self) -> bool:
        return any(part.spread == "expert" for part in self.parts())

    def with_sizes(self, weights: int | None, per_token: int | None) -> Model:
        """The same with the sizes that are given: bytes of the weights, and of the cache for each token of a rank."""
        model = self if weights is None else replace(self, files_bytes=weights)
        if per_token is None:
            return model
        cache = Cache("full", extra=per_token)
        first, *rest = (replace(layer, caches=()) for layer in model.layers)
        return replace(model, layers=(replace(first, caches=(cache,)), *rest), cache_known=True)


def read_model(path: Path, *, dtype: str | None = None, quantized_by: str | None = None) -> Model:
    """The model of a folder, or of a ``config.json``.

    ``dtype`` and ``quantized_by`` are vLLM's ``--dtype`` and ``--quantization``. Raises ``ModelError``.
    """
    folder, file = (path, path / "config.json") if path.is_dir() else (path.parent, path)
    config = _read_json(file)
    also = folder / "hf_quant_config.json"
    if "quantization_config" not in config and also.is_file():
        config["quantization_config"] = _read_json(also).get("quantization", {})
    model = model_of(config, name=folder.name or str(file), dtype=dtype, quantized_by=quantized_by)
    return model if path == file else replace(model, files_bytes=_files_bytes(folder))


def _read_json(file: Path) -> dict[str, object]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{file} is not there. Give a model's folder or its config.json") from None
    except OSError as error:
        raise ModelError(f"{file} cannot be read: {(error.strerror or str(error)).lower()}") from None
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{file} is no JSON: {error}") from None
    if not isinstance(content, dict):
        raise ModelError(f"{file} holds no object, so it is no model's configuration")
    return content


def _files_bytes(folder: Path) -> int | None:
    """What the checkpoint in a folder holds, by its index or by its files; None without one."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        metadata = _read_json(index).get("metadata")
        total = metadata.get("total_size") if isinstance(metadata, dict) else None
        if isinstance(total, (int, float)) and math.isfinite(total) and total > 0:
            return int(total)
    for pattern in ("model*.safetensors", "*.safetensors", "pytorch_model*.bin"):
        sizes = [file.stat().st_size for file in folder.glob(pattern) if not file.name.startswith("consolidated")]
        if sizes:
            return sum(sizes)
    return None


# --- the configuration -------------------------------------------------------------------------------------------

_LIMIT = 1 << 40

_DEFAULTS: Mapping[str, Mapping[str, object]] = {
    "llama": {
        "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
        "vocab_size": 32000, "max_position_embeddings": 2048, "tie_word_embeddings": False,
    },
    "mistral": {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 32000, "max_position_embeddings": 131072, "sliding_window": 4096,
        "tie_word_embeddings": False,
    },
    "qwen2": {"num_attention_heads": 32, "vocab_size": 151936, "max_position_embeddings": 32768,
              "tie_word_embeddings": False},
    "gemma3_text": {
        "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26, "num_attention_heads": 8,
        "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 262208, "max_position_embeddings": 131072,
        "sliding_window": 4096, "tie_word_embeddings": True,
    },
}  # fmt: skip
"""What the classes of transformers have for keys that a configuration within another one leaves out."""


class _Config:
    """A part of a configuration, read by the names that different models give to the same thing."""

    def __init__(self, values: Mapping[str, object], where: str = "") -> None:
        self.values = values
        self.where = where

    def number(self, *names: str, default: int | None = None) -> int:
        """The first that is there. Raises ModelError where none is and there is no default."""
        found = self.maybe(*names)
        if found is not None:
            return found
        if default is None:
            raise ModelError(f"the configuration has no {self.where}{' or '.join(names)}, so its size is not known")
        return default

    def maybe(self, *names: str) -> int | None:
        for name in names:
            value = self.values.get(name)
            if isinstance(value, bool) or value is None:
                continue
            if isinstance(value, list) and value and all(isinstance(one, int) for one in value):
                value = max(value)
            if not isinstance(value, (int, float)) or not math.isfinite(value) or not 0 <= value < _LIMIT:
                raise ModelError(f"{self.where}{name} of the configuration is {value!r}, not a number that it can be")
            return int(value)
        return None

    def positive(self, *names: str, default: int | None = None) -> int:
        value = self.number(*names, default=default)
        if value == 0:
            raise ModelError(f"{self.where}{names[0]} of the configuration is 0")
        return value

    def text(self, *names: str) -> str:
        return next((value for name in names if isinstance(value := self.values.get(name), str)), "")

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.values.get(name)
        return value if isinstance(value, bool) else default

    def listed(self, name: str) -> list[object]:
        value = self.values.get(name)
        return value if isinstance(value, list) else []

    def with_defaults(self) -> _Config:
        """With what its family's class has where a key is left out, if it is a part of a configuration."""
        defaults = _DEFAULTS.get(self.text("model_type"), {}) if self.where else {}
        return _Config({**defaults, **self.values}, self.where)

    def part(self, *names: str) -> _Config | None:
        for name in names:
            value = self.values.get(name)
            if isinstance(value, dict) and value:
                return _Config(value, f"{self.where}{name}.")
        return None


def model_of(
    config: Mapping[str, object], *, name: str = "model", dtype: str | None = None, quantized_by: str | None = None
) -> Model:
    """The model that a configuration describes. Raises ``ModelError`` where a size that matters is missing."""
    whole = _Config(config)
    text = whole.part("text_config", "llm_config", "language_config", "thinker_config") or whole
    text = (text.part("text_config") or text).with_defaults()
    count = text.positive("num_hidden_layers", "n_layer", "num_layers", "n_layers")
    if count > 10_000:
        raise ModelError(f"the configuration has {count} layers, which no model has")
    hidden = text.positive("hidden_size", "n_embd", "d_model")
    vocabulary = text.positive("vocab_size", "padded_vocab_size", default=whole.number("vocab_size", default=0) or None)
    tied = text.flag("tie_word_embeddings", whole.flag("tie_word_embeddings", True))
    shape = _Shape(text, hidden, count)
    encoder = _encoder(whole)
    unsure = list(shape.unsure)
    if encoder is not None:
        unsure.append("its encoder for images or sound is counted roughly, and so is what that takes while it profiles")
    architectures = whole.listed("architectures")
    return Model(
        name=name,
        family=str(architectures[0]) if architectures else text.text("model_type") or "unknown",
        layers=tuple(shape.layer(index) for index in range(count)),
        embedding=Part("embedding", _padded(vocabulary) * hidden, linear=False),
        head=None if tied else Part("head", _padded(vocabulary) * hidden, linear=False),
        encoder=encoder,
        hidden=hidden,
        heads=shape.heads,
        vocabulary=vocabulary,
        dtype_bytes=_dtype_bytes(dtype or text.text("dtype", "torch_dtype") or whole.text("dtype", "torch_dtype")),
        quantization=quantization(whole.values, text.values, quantized_by),
        max_len=_longest(text),
        unloaded=min(text.number("num_nextn_predict_layers", "mtp_num_hidden_layers", default=0), count),
        unsure=tuple(unsure),
        cache_known=shape.cache_known,
    )


def _padded(vocabulary: int) -> int:
    return math.ceil(vocabulary / 64) * 64  # vllm/model_executor/layers/vocab_parallel_embedding.py pads to 64


def _dtype_bytes(name: str) -> int:
    """vLLM's ``--dtype auto`` turns float32 into half of it."""
    return 4 if name == "float" else 2


def _longest(text: _Config) -> int | None:
    longest = text.maybe("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "model_max_length")
    scaling = text.part("rope_scaling", "rope_parameters")
    if longest is None or scaling is None:
        return longest
    kind = scaling.text("rope_type", "type")
    factor = scaling.values.get("factor")
    original = scaling.maybe("original_max_position_embeddings")
    # llama3's and longrope's lengths have the factor in them already (vllm/config/model.py); so has yarn's where it
    # says what it was before, in newer configurations.
    if kind in ("yarn", "linear", "dynamic") and isinstance(factor, (int, float)) and 1 < factor < 1000:
        return int((original or longest) * factor)
    return longest


def _encoder(whole: _Config) -> Part | None:
    """The parameters of an encoder for images or sound, from its depth and widths."""
    total = 0
    for name in ("vision_config", "audio_config"):
        part = whole.part(name)
        if part is None:
            continue
        depth = part.maybe("depth", "num_hidden_layers", "layers", "encoder_layers") or 0
        width = part.maybe("hidden_size", "embed_dim", "width", "d_model") or 0
        inner = part.maybe("intermediate_size", "encoder_ffn_dim") or 4 * width
        total += depth * (4 * width * width + 2 * width * inner)
    return Part("encoder", total, linear=False) if total else None


# --- layers ------------------------------------------------------------------------------------------------------

_GATED = 3  # gate, up and down
_PLAIN = 2
_PLAIN_MLP = (
    "gpt2", "gptj", "gpt_neox", "opt", "bloom", "falcon", "phi", "starcoder2", "gpt_bigcode", "mpt", "nemotron",
    "nemotron_h", "codegen", "stablelm_epoch",
)  # fmt: skip


def _letters(pattern: str) -> list[str]:
    """Of a ``hybrid_override_pattern`` one for each layer: Mamba, attention, MLP or experts."""
    return [letter for letter in pattern if letter in "M*-E"]


class _Shape:
    """The layers of a text model."""

    def __init__(self, text: _Config, hidden: int, count: int) -> None:
        self.text = text
        self.hidden = hidden
        self.count = count
        self.kind = text.text("model_type")
        self.unsure: list[str] = []
        self.cache_known = True
        self.heads = text.maybe("num_attention_heads", "n_head", "num_heads") or 0
        if not self.heads and not self._all_mamba():
            self.heads = text.positive("num_attention_heads")
        self.kv_heads = text.maybe("num_key_value_heads", "num_kv_heads", "multi_query_group_num")
        if self.kv_heads is None:
            self.kv_heads = 1 if text.flag("multi_query") else self.heads
        self.head_dim = text.maybe("head_dim", "attention_head_dim", "kv_channels") or (
            hidden // self.heads if self.heads else 0
        )
        self.inner = self._inner()
        self.types = self._types()
        if any(name in text.values for name in ("compress_ratios", "compress_rates")):
            self.cache_known = False
            self.unsure.append("its compressed attention is not in this arithmetic: give --kv-bytes-per-token")

    def _all_mamba(self) -> bool:
        return self.kind in ("mamba", "mamba2", "falcon_mamba")

    def _inner(self) -> int:
        return self.text.number("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", default=4 * self.hidden)

    # The kind of each layer ------------------------------------------------------------------------------------

    def _types(self) -> list[str]:
        """What each layer mixes tokens by: ``full``, ``sliding``, ``chunked``, a kind of state, or ``none``."""
        text, every = self.text, range(self.count)
        if self._all_mamba():
            return ["mamba2" if self.kind == "mamba2" else "mamba"] * self.count
        if pattern := text.text("hybrid_override_pattern"):
            names = {"M": "mamba2", "*": "full"}
            found = [names.get(letter, "none") for letter in _letters(pattern)]
        elif listed := [str(one) for one in text.listed("layer_types") or text.listed("layers_block_type")]:
            found = [self._named(one) for one in listed]
        elif (linear := text.part("linear_attn_config")) is not None:
            attention = {one for one in linear.listed("full_attn_layers") if isinstance(one, int)}
            found = ["full" if index + 1 in attention else "kda" for index in every]
        elif kinds := text.listed("attn_type_list"):
            found = ["full" if one == 1 else "linear_attention" for one in kinds]
        elif (period := text.maybe("full_attention_interval")) is not None:
            found = ["full" if (index + 1) % max(1, period) == 0 else "linear_attention" for index in every]
        elif (period := text.maybe("attn_layer_period")) is not None:
            offset = text.number("attn_layer_offset", default=0)
            found = ["full" if index % max(1, period) == offset else "mamba" for index in every]
        elif text.listed("attn_layer_indices"):
            attention = {one for one in text.listed("attn_layer_indices") if isinstance(one, int)}
            found = ["full" if index in attention else "mamba2" for index in every]
        elif self.kind == "falcon_h1":
            found = ["full+mamba2"] * self.count
        else:
            found = self._by_window()
        if len(found) < self.count:
            raise ModelError(f"the configuration names the kind of {len(found)} layers and has {self.count}")
        return found[: self.count]

    def _named(self, name: str) -> str:
        if "mamba" in name:
            return "mamba2" if self.text.maybe("mamba_n_heads", "mamba_num_heads") else "mamba"
        if "linear" in name or "conv" in name:
            return "linear_attention" if "linear" in name else "conv"
        if "sliding" in name or "local" in name:
            return "sliding"
        return "chunked" if "chunked" in name else "full"

    def _by_window(self) -> list[str]:
        text, every = self.text, range(self.count)
        window = text.maybe("sliding_window", "sliding_window_size")
        if text.maybe("attention_chunk_size") and self.kind.startswith("llama4"):
            return ["full" if (index + 1) % 4 == 0 else "chunked" for index in every]
        if not window or not text.flag("use_sliding_window", True):
            return ["full"] * self.count
        period = text.maybe("sliding_window_pattern", "_sliding_window_pattern")
        if period is None and self.kind in ("gemma2", "gpt_oss"):
            return ["sliding" if index % 2 == 0 else "full" for index in every]
        if period is None and self.kind.startswith("gemma3"):
            period = 6
        if period is None and self.kind.startswith("cohere2"):
            period = 4
        if period:
            return ["full" if (index + 1) % period == 0 else "sliding" for index in every]
        return ["sliding"] * self.count

    # One layer -------------------------------------------------------------------------------------------------

    def layer(self, index: int) -> Layer:
        mixer_parts: list[Part] = []
        caches: list[Cache] = []
        widths: list[tuple[int, int]] = []
        for kind in self.types[index].split("+"):
            match kind:
                case "full" | "sliding" | "chunked":
                    parts, cache, width = self._attention(index, kind)
                case "none":
                    continue
                case _:
                    parts, cache, width = self._state(kind)
            mixer_parts += parts
            caches += [] if cache is None else [cache]
            widths.append(width)
        mlp_parts, mlp_widths = self._mlp(index)
        return Layer((*mixer_parts, *mlp_parts), tuple(caches), (*widths, *mlp_widths))

    def _attention(
        self, index: int, kind: Literal["full", "sliding", "chunked"]
    ) -> tuple[list[Part], Cache | None, tuple[int, int]]:
        text, hidden = self.text, self.hidden
        latent = text.maybe("kv_lora_rank")
        if latent:
            return self._latent(latent)
        heads, kv_heads, head_dim = self.heads, self.kv_heads or self.heads, self.head_dim
        value_dim = text.maybe("v_head_dim") or head_dim
        if kind == "full":  # Gemma 4 has wider and fewer heads where it looks at everything
            head_dim = text.maybe("global_head_dim") or head_dim
            value_dim = text.maybe("global_head_dim") or value_dim
            kv_heads = text.maybe("num_global_key_value_heads") or kv_heads
        gate = (
            2 if text.flag("attn_output_gate", self.kind in ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")) else 1
        )
        shares = self._shares_cache(index)
        query = hidden * heads * head_dim * gate + heads * value_dim * hidden
        keys = 0 if shares else hidden * kv_heads * (head_dim + value_dim)
        wide = heads * head_dim * (gate + 1) + kv_heads * (head_dim + value_dim)
        window = {
            "full": None,
            "sliding": text.maybe("sliding_window", "sliding_window_size"),
            "chunked": text.maybe("attention_chunk_size"),
        }[kind]
        cache = None if shares else Cache(kind, kv_heads, head_dim + value_dim, window=window or 0)
        return [Part("attention", query + keys)], cache, (wide, 3 * hidden)

    def _shares_cache(self, index: int) -> bool:
        """Gemma 3n and 4: the last layers use the cache of earlier ones."""
        shared = self.text.maybe("num_kv_shared_layers") or 0
        return index >= self.count - shared

    def _latent(self, latent: int) -> tuple[list[Part], Cache, tuple[int, int]]:
        """Multi-head latent attention: one latent vector for all heads (vLLM 0.7.1 and newer keep only that)."""
        text, hidden, heads = self.text, self.hidden, self.heads
        rope, plain = text.number("qk_rope_head_dim", default=64), text.number("qk_nope_head_dim", default=128)
        value = text.number("v_head_dim", default=128)
        low = text.maybe("q_lora_rank")
        query = heads * (rope + plain) * (low or hidden)
        parts = [
            Part("attention", query + latent * heads * (plain + value) + heads * value * hidden),
            Part("attention", hidden * (latent + rope) + hidden * (low or 0), spread="none"),
        ]
        index_dim = text.maybe("index_head_dim") if text.maybe("index_topk") else None
        extra = 0
        if index_dim:  # DeepSeek 3.2's indexer keeps fp8 keys of its own and a scale for every 128
            extra = index_dim + 4 * math.ceil(index_dim / 128)
            index_heads = text.number("index_n_heads", default=64)
            parts.append(
                Part("attention", index_heads * index_dim * (low or hidden) + hidden * index_dim, spread="none")
            )
        wide = heads * (2 * (rope + plain) + 2 * value)
        return parts, Cache(kind="full", heads=1, width=latent + rope, extra=extra), (wide, 3 * hidden)

    def _state(self, kind: str) -> tuple[list[Part], Cache, tuple[int, int]]:
        """Layers that keep one state for each request (vllm/model_executor/layers/mamba/mamba_utils.py)."""
        text, hidden = self.text, self.hidden
        if kind == "conv":
            length = text.number("conv_L_cache", default=3)
            return (
                [Part("mixer", 4 * hidden * hidden)],
                Cache("state", short=hidden * (length - 1)),
                (3 * hidden, hidden),
            )
        if kind == "mamba":
            inner = text.maybe("mamba_d_inner") or text.number("mamba_expand", "expand", default=2) * hidden
            size = text.number("mamba_d_state", "state_size", default=16)
            kernel = text.number("mamba_d_conv", "conv_kernel", default=4)
            rank = text.maybe("mamba_dt_rank", "time_step_rank") or math.ceil(hidden / 16)
            count = 3 * hidden * inner + inner * (2 * rank + 3 * size + kernel)
            return (
                [Part("mixer", count)],
                Cache("state", short=inner * (kernel - 1), long=inner * size),
                (4 * inner, hidden),
            )
        if kind == "mamba2":
            return self._mamba2()
        return self._delta()

    def _mamba2(self) -> tuple[list[Part], Cache, tuple[int, int]]:
        text, hidden = self.text, self.hidden
        heads = text.maybe("mamba_n_heads", "mamba_num_heads", "num_heads")
        inner = text.maybe("mamba_d_ssm", "mamba_d_inner")
        head_dim = text.maybe("mamba_d_head", "mamba_head_dim", "head_dim") or 64
        if heads is None:
            heads = (inner or text.number("mamba_expand", "expand", default=2) * hidden) // head_dim
        inner = inner or heads * head_dim
        size = text.number("mamba_d_state", "ssm_state_size", "state_size", default=128)
        groups = text.number("mamba_n_groups", "n_groups", default=1)
        kernel = text.number("mamba_d_conv", "conv_kernel", default=4)
        channels = inner + 2 * groups * size
        count = hidden * (inner + channels + heads) + inner * hidden + channels * kernel
        wide = 4 if self.kind == "nemotron_h" else 0  # its states are float32 by default
        cache = Cache("state", short=channels * (kernel - 1), long=heads * head_dim * size, long_bytes=wide)
        return [Part("mixer", count)], cache, (2 * (inner + channels), hidden)

    def _delta(self) -> tuple[list[Part], Cache, tuple[int, int]]:
        """Gated delta nets (Qwen3-Next and newer), Kimi's linear attention, and lightning attention (MiniMax-01)."""
        text, hidden = self.text, self.hidden
        own = text.part("linear_attn_config")
        if own is not None:
            heads = own.positive("num_heads")
            dim = own.positive("head_dim")
            kernel = own.number("short_conv_kernel_size", default=4)
            count = 4 * hidden * heads * dim + 2 * dim * (hidden + heads * dim)
            cache = Cache("state", short=3 * heads * dim * (kernel - 1), long=heads * dim * dim, long_bytes=4)
            return [Part("mixer", count)], cache, (8 * heads * dim, hidden)
        if text.maybe("linear_num_value_heads") is None:
            dim = self.head_dim
            count = 5 * hidden * self.heads * dim
            return (
                [Part("mixer", count)],
                Cache("state", long=self.heads * dim * dim, long_bytes=4),
                (6 * self.heads * dim, hidden),
            )
        keys = text.number("linear_num_key_heads") * text.number("linear_key_head_dim")
        value_heads, value_dim = text.number("linear_num_value_heads"), text.number("linear_value_head_dim")
        values = value_heads * value_dim
        kernel = text.number("linear_conv_kernel_dim", default=4)
        count = hidden * (2 * keys + 2 * values + 2 * value_heads) + values * hidden + (2 * keys + values) * kernel
        cache = Cache(
            "state",
            short=(2 * keys + values) * (kernel - 1),
            long=value_heads * value_dim * text.number("linear_key_head_dim"),
            long_bytes=4 if text.text("mamba_ssm_dtype") == "float32" else 0,
        )
        return [Part("mixer", count)], cache, (2 * (2 * keys + 2 * values), hidden)

    def _mlp(self, index: int) -> tuple[list[Part], list[tuple[int, int]]]:
        text, hidden = self.text, self.hidden
        if pattern := text.text("hybrid_override_pattern"):
            letter = _letters(pattern)[index]
            if letter in "M*":
                return [], []
            if letter == "-":
                return self._dense(self.inner)
        elif self._all_mamba() or (self.kind.startswith("mamba") and not self.text.maybe("intermediate_size")):
            return [], []
        experts = text.maybe("n_routed_experts", "num_local_experts", "num_experts", "moe_num_experts")
        if not experts or not self._is_sparse(index):
            return self._dense(self._dense_inner())
        each = text.maybe("moe_intermediate_size", "expert_ffn_hidden_size", "ffn_hidden_size") or self.inner
        chosen = text.number("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", default=1)
        matrices = self._matrices()
        parts = [
            Part("experts", experts * matrices * hidden * each, spread="expert"),
            Part("router", experts * hidden, spread="none", linear=False),
        ]
        shared = text.maybe("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size")
        if shared is None:
            shared = (text.maybe("n_shared_experts", "num_shared_experts", "num_shared_expert") or 0) * each
        if shared:
            parts.append(Part("mlp", matrices * hidden * shared))
        # vLLM's fused experts hold each token once for every expert that it goes to (fused_moe.py).
        return parts, [(chosen * 3 * each, (chosen + 2) * hidden)]

    def _is_sparse(self, index: int) -> bool:
        text = self.text
        if index < text.number("first_k_dense_replace", "moe_layer_start_index", default=0):
            return False
        if index in text.listed("mlp_only_layers"):
            return False
        if listed := text.listed("moe_layers"):
            return index in listed
        if (period := text.maybe("expert_layer_period")) is not None:
            return index % max(1, period) == text.number("expert_layer_offset", default=0)
        step = text.number("decoder_sparse_step", "interleave_moe_layer_step", "moe_layer_freq", default=1)
        return step <= 1 or (index + 1) % step == 0

    def _dense_inner(self) -> int:
        return self.text.maybe("intermediate_size_mlp") or self.inner

    def _dense(self, inner: int) -> tuple[list[Part], list[tuple[int, int]]]:
        matrices = self._matrices()
        return [Part("mlp", matrices * self.hidden * inner)], [(matrices * inner, 3 * self.hidden)]

    def _matrices(self) -> int:
        return _PLAIN if self.kind in _PLAIN_MLP else _GATED


def given_sizes(weights: int, bytes_per_token: int | None, name: str = "given") -> Model:
    """A model of which only the size of its weights, and perhaps of its cache for each token, is known."""
    return Model(
        name=name,
        family="given sizes",
        layers=(Layer((), (Cache("full", extra=bytes_per_token or 0),), ()),),
        embedding=Part("embedding", 0, linear=False),
        head=None,
        encoder=None,
        hidden=0,
        heads=0,
        vocabulary=0,
        dtype_bytes=2,
        quantization=Quantization("none", None),
        max_len=None,
        files_bytes=weights,
        unsure=("what a pass takes is guessed, as no configuration tells",),
        cache_known=bytes_per_token is not None,
    )


def kinds(model: Model) -> Sequence[tuple[str, int]]:
    """How many layers keep which kind of cache, for people: ``("sliding window of 4,096", 21)``."""
    return tuple(Counter(_kind(cache) for layer in model.layers for cache in layer.caches).items())


def _kind(cache: Cache) -> str:
    return {
        "full": "full attention",
        "sliding": f"sliding window of {cache.window:,} tokens",
        "chunked": f"chunks of {cache.window:,} tokens",
        "state": "state",
    }[cache.kind]
