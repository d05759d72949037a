"""How many bytes quantised weights take.

Source: the formats of vLLM 0.32.0, `model_executor/layers/quantization/`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from simulator.yaml_file import suggestion


class QuantizationError(ValueError):
    """A quantisation that is not known or not understood. The message is one line."""


@dataclass(frozen=True)
class Quantization:
    """`bytes_per_parameter` of the linear layers, scales included; of the routed experts alone if `experts_only`."""

    name: str
    bytes_per_parameter: float
    experts_only: bool = False


_FP8 = Quantization("fp8", 1.0)
_MXFP4 = Quantization("mxfp4", 0.5 + 1 / 32, experts_only=True)  # a scale of one byte for 32 values
_NVFP4 = Quantization("nvfp4", 0.5 + 1 / 16)
_QUANTIZED = {
    "fp8": "fp8", "awq": "awq", "gptq": "gptq", "w4a16": "gptq", "int4": "gptq", "nvfp4": "nvfp4", "w8a8": "int8",
    "int8": "int8",
}  # fmt: skip


def integer_quantization(name: str, bits: int, group: int) -> Quantization:
    """`bits` a parameter, with a scale of two bytes and a zero point for each `group` of them.

    Raises `QuantizationError` for bits that no format has.
    """
    if not 1 <= bits <= 16:
        raise QuantizationError(f"quantised weights have 1 to 16 bits, got {bits}")
    return Quantization(name, bits / 8 + (2 + bits / 8) / group if group > 0 else bits / 8)


def quantization_named(name: str) -> Quantization:
    """What ``--quantization NAME`` makes of 16-bit weights, or what checkpoints of that name have usually."""
    known = {"fp8": _FP8, "mxfp4": _MXFP4, "nvfp4": _NVFP4, "int8": integer_quantization("int8", 8, -1)}
    known |= {kind: integer_quantization(kind, 4, 128) for kind in ("awq", "gptq")}
    if name not in known:
        raise QuantizationError(f"quantization {name!r} is not modelled; {suggestion(name, known)}")
    return known[name]


def quantization_of(config: Mapping[str, Any] | None) -> Quantization | None:
    """The ``quantization_config`` of a checkpoint. Raises `QuantizationError`."""
    if not config:
        return None
    if not isinstance(config, Mapping):
        raise QuantizationError(f"the quantization_config must be an object, got {config!r}")
    method = str(config.get("quant_method"))
    try:
        if method in ("awq", "gptq"):
            return integer_quantization(method, int(config.get("bits", 4)), int(config.get("group_size", 128)))
        if method == "compressed-tensors":
            return _compressed_tensors(config)
    except QuantizationError:
        raise
    except (TypeError, ValueError, OverflowError, AttributeError, KeyError, StopIteration):
        raise QuantizationError(f"the quantization_config of {method} is not understood") from None
    if method == "modelopt" or config.get("quant_algo"):
        return _NVFP4 if "FP4" in str(config.get("quant_algo", "")) else _FP8
    return quantization_named(method)


def _compressed_tensors(config: Mapping[str, Any]) -> Quantization:
    weights = next(iter(config["config_groups"].values()))["weights"]
    bits, group = int(weights["num_bits"]), int(weights.get("group_size") or -1)
    if weights.get("type") == "float":
        return _FP8 if bits == 8 else _NVFP4
    return integer_quantization("compressed-tensors", bits, group)


def quantization_in(name: str) -> Quantization | None:
    """That of a model whose name ends as those of quantised checkpoints do; None for another."""
    parts = name.lower().replace("_", "-").split("-")
    found = next((_QUANTIZED[part] for part in parts if part in _QUANTIZED), None)
    return quantization_named(found) if found else None
