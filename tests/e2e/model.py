"""Writes a tiny random Llama checkpoint with its tokenizer, in the format that vLLM loads. Needs nothing but Python.

Two layers, hidden size 128, 459,392 bfloat16 parameters: 32 tokens of KV cache take 32 KiB. Its answers mean nothing.
"""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import struct
from array import array
from collections.abc import Iterator
from pathlib import Path

VOCABULARY = 512
HIDDEN = 128
INTERMEDIATE = 256
LAYERS = 2
HEADS = 4
MAX_POSITIONS = 4096
SPECIAL_TOKENS = ("<s>", "</s>", "<pad>")
FIRST_BYTE_TOKEN = len(SPECIAL_TOKENS)
BYTE_TOKENS = 256
CHAT_TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"


def ensure_tiny_model(folder: Path) -> Path:
    """The checkpoint's folder, written now unless it is there; a half-written one never carries the final name."""
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = folder.with_name(f"{folder.name}.{os.getpid()}")
    unfinished.mkdir()
    try:
        write_tiny_model(unfinished)
        unfinished.rename(folder)
    except OSError:
        # Another process was faster: its checkpoint is the same.
        if not folder.is_dir():
            raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def write_tiny_model(folder: Path) -> None:
    """Writes configuration, weights (the same in every run) and tokenizer into an existing folder."""
    _write_json(folder / "config.json", _config())
    _write_json(folder / "generation_config.json", {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2})
    _write_json(folder / "tokenizer.json", _tokenizer())
    _write_json(folder / "tokenizer_config.json", _tokenizer_config())
    _write_safetensors(folder / "model.safetensors")


def _config() -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "head_dim": HIDDEN // HEADS,
        "max_position_embeddings": MAX_POSITIONS,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
    }


def _tokenizer_config() -> dict[str, object]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": MAX_POSITIONS,
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "chat_template": CHAT_TEMPLATE,
    }


def _tokenizer() -> dict[str, object]:
    """A byte-level tokenizer without merges: one token for each byte."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    vocabulary = {token: number for number, token in enumerate([*SPECIAL_TOKENS, *_byte_alphabet()])}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": number,
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for number, token in enumerate(SPECIAL_TOKENS)
        ],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocabulary,
            "merges": [],
        },
    }


def _byte_alphabet() -> list[str]:
    """The character that stands for each byte in byte-level BPE: itself if it prints, else one from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    substitutes = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(substitutes)) for byte in range(BYTE_TOKENS)]


def _tensors() -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "model.embed_tokens.weight", (VOCABULARY, HIDDEN)
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        for projection in ("q_proj", "k_proj", "v_proj", "o_proj"):
            yield f"{prefix}.self_attn.{projection}.weight", (HIDDEN, HIDDEN)
        yield f"{prefix}.mlp.gate_proj.weight", (INTERMEDIATE, HIDDEN)
        yield f"{prefix}.mlp.up_proj.weight", (INTERMEDIATE, HIDDEN)
        yield f"{prefix}.mlp.down_proj.weight", (HIDDEN, INTERMEDIATE)
        yield f"{prefix}.input_layernorm.weight", (HIDDEN,)
        yield f"{prefix}.post_attention_layernorm.weight", (HIDDEN,)
    yield "model.norm.weight", (HIDDEN,)
    yield "lm_head.weight", (VOCABULARY, HIDDEN)


def _write_safetensors(path: Path) -> None:
    """The safetensors layout: length of the header, the header as JSON, then the tensors one after the other."""
    source = random.Random(0)
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    body = bytearray()
    for name, shape in _tensors():
        start = len(body)
        body += _bfloat16(source, math.prod(shape), is_norm=len(shape) == 1)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [start, len(body)]}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    path.write_bytes(struct.pack("<Q", len(encoded)) + encoded + body)


def _bfloat16(source: random.Random, count: int, *, is_norm: bool) -> bytes:
    """`count` ones for a norm, else normal values of deviation 0.02: bfloat16 is the upper half of a float32."""
    values = array("f", [1.0] * count if is_norm else [source.gauss(0.0, 0.02) for _ in range(count)])
    return array("H", array("H", values.tobytes())[1::2]).tobytes()


def _write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
