"""How many bytes a parameter takes after quantization, and which parts a quantization leaves alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Quantization:
    """``bytes_per_parameter`` is with scales; None: not quantized. ``keeps`` are the parts that stay as they are."""

    name: str
    bytes_per_parameter: float | None
    keeps: frozenset[str] = frozenset()
    sure: bool = True


_FP8_BLOCKS = 1 + 4 / (128 * 128)  # a float32 scale for 128 x 128 parameters
_MXFP4 = 0.5 + 1 / 32
_NVFP4 = 0.5 + 1 / 16
_NF4 = 0.5 + 1 / 64 + 4 / (64 * 256)  # bitsandbytes, nested: a byte for 64, and a float32 for 256 of those
_BY_NAME: Mapping[str, float] = {
    "fp8": _FP8_BLOCKS,
    "fbgemm_fp8": 1.0,
    "ptpc_fp8": 1.0,
    "modelopt": 1.0,
    "modelopt_fp4": _NVFP4,
    "modelopt_mxfp8": 1 + 1 / 32,
    "nvfp4": _NVFP4,
    "mxfp4": _MXFP4,
    "mxfp8": 1 + 1 / 32,
    "bitsandbytes": _NF4,
    "experts_int8": 1.0,
    "int8": 1.0,
}


def grouped(bits: int, group: int) -> float:
    """Integers of ``bits`` with a 16-bit scale and a zero point for each group (AWQ, GPTQ, compressed-tensors)."""
    return bits / 8 if group <= 0 else (bits + (16 + bits) / group) / 8


def quantization(whole: Mapping[str, object], text: Mapping[str, object], flag: str | None) -> Quantization:
    """From a configuration's ``quantization_config``, else from vLLM's ``--quantization``."""
    found = whole.get("quantization_config") or text.get("quantization_config") or whole.get("compression_config")
    if isinstance(found, dict) and found:
        return _of(found)
    if flag is None or flag == "none":
        return Quantization("none", None)
    if flag in ("awq", "awq_marlin", "gptq", "gptq_marlin"):
        return Quantization(flag, grouped(4, 128))
    return Quantization(flag, _BY_NAME.get(flag), keeps=_only_experts(flag), sure=flag in _BY_NAME)


def _only_experts(method: str) -> frozenset[str]:
    return frozenset({"attention", "mlp", "mixer"}) if method in ("mxfp4", "experts_int8") else frozenset()


def _of(config: Mapping[str, object]) -> Quantization:
    method = str(config.get("quant_method") or config.get("quant_algo") or "").lower()
    keeps = _only_experts(method) | _left_alone(config)
    if method in ("awq", "gptq", "auto-round", "awq_marlin", "gptq_marlin"):
        bits, group = _int(config.get("bits") or config.get("w_bit"), 4), _int(config.get("group_size", 128), 0)
        return Quantization(f"{method}, {bits} bits", grouped(bits, group), keeps)
    if method == "bitsandbytes":
        eight = config.get("load_in_8bit") is True
        return Quantization(f"bitsandbytes, {8 if eight else 4} bits", 1.0 if eight else _NF4, keeps)
    if method == "compressed-tensors" or "config_groups" in config:
        return _compressed(config, method or "compressed-tensors", keeps)
    algorithm = str(config.get("quant_algo") or "").lower()
    for name in (algorithm, method):
        if "nvfp4" in name or ("fp4" in name and "mx" not in name):
            return Quantization("nvfp4", _NVFP4, keeps)
        if "fp8" in name:
            return Quantization("fp8", _FP8_BLOCKS if config.get("weight_block_size") else 1.0, keeps)
    known = _BY_NAME.get(method)
    return Quantization(method or "unknown", known, keeps, sure=known is not None)


def _compressed(config: Mapping[str, object], name: str, keeps: frozenset[str]) -> Quantization:
    """The widest of its groups counts: most have one."""
    groups = config.get("config_groups")
    sizes = []
    for one in groups.values() if isinstance(groups, dict) else ():
        weights = one.get("weights") if isinstance(one, dict) else None
        if isinstance(weights, dict):
            bits, group = _int(weights.get("num_bits"), 8), _int(weights.get("group_size"), 0)
            floats = str(weights.get("type")) == "float"
            sizes.append((_NVFP4 if group == 16 else _MXFP4) if floats and bits == 4 else grouped(bits, group))
    return Quantization(name, max(sizes) if sizes else None, keeps, sure=bool(sizes))


def _left_alone(config: Mapping[str, object]) -> frozenset[str]:
    """The parts that a list of exceptions names for all layers; exceptions for single layers are not counted."""
    names = ("ignore", "modules_to_not_convert", "exclude_modules", "ignored_layers")
    listed = [str(one) for name in names for one in _list(config.get(name))]
    words = {
        "attention": ("self_attn", "attention"),
        "mixer": ("linear_attn", "mamba", "mixer"),
        "mlp": ("shared_expert",),
    }
    about = {part: [one for one in listed if any(word in one for word in those)] for part, those in words.items()}
    many = 8  # so many single layers are all of them, or nearly
    return frozenset(part for part, those in about.items() if len(those) >= many or any(map(_of_all_layers, those)))


def _of_all_layers(exception: str) -> bool:
    return "*" in exception or exception.startswith("re:") or not any(letter.isdigit() for letter in exception)


def _list(value: object) -> list[object]:
    return value if isinstance(value, list) else []


def _int(value: object, default: int) -> int:
    return (
        int(value) if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < 1e6 else default
    )
