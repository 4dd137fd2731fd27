"""Which tensors a model must have and their shapes, checked before any weight is read."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np

from caudal.config import ModelConfig
from caudal.errors import ModelFileError, UnsupportedModelError
from caudal.weights.dequant import dequantize
from caudal.weights.ggml_types import SUPPORTED_TYPES, GGMLType, supported_type_names
from caudal.weights.gguf import GGUFFile
from caudal.weights.gguf_header import quoted

_LOGGER = logging.getLogger(__name__)

EMBEDDING = "token_embd.weight"
OUTPUT = "output.weight"
ROPE_FACTORS = "rope_freqs.weight"

_VECTOR_TYPES = frozenset({GGMLType.F32, GGMLType.F16, GGMLType.BF16})
_MAX_LISTED = 5


@dataclass(frozen=True, slots=True)
class _Expected:
    shape: tuple[int, ...]
    required: bool = True


def check_tensors(gguf: GGUFFile, config: ModelConfig) -> None:
    """Check presence, shape and type of every tensor of the model that `config` describes.

    Raises ModelFileError naming missing or misshapen tensors, UnsupportedModelError for tensor
    types that Caudal does not run and for tensors that change the result but not in Caudal.
    Other unknown tensors are only logged.
    """
    expected = _expected_tensors(config)
    missing = [name for name, e in expected.items() if e.required and name not in gguf.tensors]
    if missing:
        _fail(gguf, f"{len(missing)} tensors are missing: {_listing(missing)}")
    for name, tensor in gguf.tensors.items():
        if name not in expected:
            continue
        shape = expected[name].shape
        if tensor.shape != shape:
            _fail(
                gguf,
                f"tensor {quoted(name)} has the shape {list(tensor.shape)}, expected {list(shape)}",
            )
        if tensor.ggml_type not in (SUPPORTED_TYPES if len(shape) > 1 else _VECTOR_TYPES):
            raise UnsupportedModelError(
                f"{gguf.path.name}: tensor {quoted(name)} has the type {tensor.ggml_type.name}, "
                f"which is not supported. Supported: {supported_type_names()}"
                + ("" if len(shape) > 1 else " (vectors: F32, F16, BF16)")
            )
    _check_extras(gguf, [name for name in gguf.tensors if name not in expected])
    if ROPE_FACTORS in gguf.tensors:
        _check_rope_factors(gguf)


def _expected_tensors(config: ModelConfig) -> dict[str, _Expected]:
    hidden, ffn, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    q_size, kv_size = config.num_heads * head_dim, config.num_kv_heads * head_dim
    layer: dict[str, tuple[int, ...]] = {
        "attn_norm.weight": (hidden,),
        "attn_q.weight": (q_size, hidden),
        "attn_k.weight": (kv_size, hidden),
        "attn_v.weight": (kv_size, hidden),
        "attn_output.weight": (hidden, q_size),
        "ffn_norm.weight": (hidden,),
        "ffn_gate.weight": (ffn, hidden),
        "ffn_up.weight": (ffn, hidden),
        "ffn_down.weight": (hidden, ffn),
    }
    if config.has_qkv_bias:
        layer |= {"attn_q.bias": (q_size,), "attn_k.bias": (kv_size,), "attn_v.bias": (kv_size,)}
    if config.has_qk_norm:
        layer |= {"attn_q_norm.weight": (head_dim,), "attn_k_norm.weight": (head_dim,)}
    expected = {
        EMBEDDING: _Expected((config.vocab_size, hidden)),
        "output_norm.weight": _Expected((hidden,)),
        OUTPUT: _Expected((config.vocab_size, hidden), required=not config.is_tied),
        ROPE_FACTORS: _Expected((config.rope_dim // 2,), required=False),
    }
    for index in range(config.num_layers):
        expected |= {f"blk.{index}.{name}": _Expected(shape) for name, shape in layer.items()}
    return expected


def _check_extras(gguf: GGUFFile, extras: list[str]) -> None:
    # A bias or scale that is left out gives fluent nonsense, which is worse than a refusal.
    harmful = [name for name in extras if name.endswith((".bias", ".scale"))]
    if harmful:
        raise UnsupportedModelError(
            f"{gguf.path.name}: {gguf.architecture} with {_listing(harmful)} is not supported"
        )
    if extras:
        _LOGGER.info("%s: %d unused tensors: %s", gguf.path.name, len(extras), _listing(extras))


def _check_rope_factors(gguf: GGUFFile) -> None:
    factors = dequantize(gguf.tensors[ROPE_FACTORS])
    if not (np.isfinite(factors).all() and (factors > 0).all()):
        _fail(gguf, f"tensor '{ROPE_FACTORS}' must hold finite values above 0")


def _listing(names: list[str]) -> str:
    listed = ", ".join(quoted(name) for name in names[:_MAX_LISTED])
    rest = len(names) - _MAX_LISTED
    return f"{listed} and {rest} more" if rest > 0 else listed


def _fail(gguf: GGUFFile, message: str) -> None:
    raise ModelFileError(f"{gguf.path.name}: {message}")
