"""Reads a model's hyper-parameters from GGUF metadata and checks them against its tensors."""

from __future__ import annotations

from typing import NoReturn

import numpy as np

from caudal.config import ModelConfig, RopeScaling
from caudal.errors import ModelFileError, UnsupportedModelError
from caudal.weights.gguf import GGUFFile
from caudal.weights.gguf_header import quoted
from caudal.weights.tensor_layout import EMBEDDING, OUTPUT, ROPE_FACTORS, check_tensors
from caudal.weights.vocabulary import check_vocabulary

KNOWN_ARCHITECTURES = ("llama", "qwen2", "qwen3")

_MAX_LAYERS = 1024
_MAX_HEADS = 1024
_MAX_HEAD_DIM = 1024
_MAX_SIZE = 1 << 20
_MAX_CONTEXT = 1 << 26
_MAX_RATIO = 1e6
_TINY = 1e-12
_SCALING_KINDS = ("none", "linear", "yarn")
_COLUMN_MULTIPLE = 32
"""Kernels quantise activations in groups of 32."""


def read_model_config(gguf: GGUFFile) -> ModelConfig:
    """The hyper-parameters of the model in `gguf`, consistent with its vocabulary and tensors.

    Reads no weights. Raises UnsupportedModelError for an unknown architecture (listing the known
    ones), tensor type or rope scaling; ModelFileError for a missing or contradictory value.
    """
    architecture = gguf.architecture
    if architecture not in KNOWN_ARCHITECTURES:
        raise UnsupportedModelError(
            f"{gguf.path.name}: architecture {quoted(architecture)} is not supported; known: "
            f"{', '.join(KNOWN_ARCHITECTURES)}"
        )
    config = _Reader(gguf).read()
    check_tensors(gguf, config)
    return config


class _Reader:
    """Reads the keys of one architecture, each within its range."""

    def __init__(self, gguf: GGUFFile) -> None:
        self._gguf = gguf
        self._prefix = gguf.architecture

    def read(self) -> ModelConfig:
        gguf = self._gguf
        if self._int("expert_count", 0, _MAX_SIZE, default=0) > 0:
            raise UnsupportedModelError(
                f"{gguf.path.name}: mixture-of-experts models are not supported"
            )
        num_layers = self._int("block_count", 1, _MAX_LAYERS)
        hidden_size = self._int("embedding_length", 1, _MAX_SIZE)
        intermediate_size = self._int("feed_forward_length", 1, _MAX_SIZE)
        num_heads, num_kv_heads, head_dim = self._heads(hidden_size)
        for key, columns in (
            ("embedding_length", hidden_size),
            ("feed_forward_length", intermediate_size),
            ("attention.head_count x attention.key_length", num_heads * head_dim),
        ):
            if columns % _COLUMN_MULTIPLE:
                raise UnsupportedModelError(
                    f"{gguf.path.name}: {key} is {columns}, not a multiple of {_COLUMN_MULTIPLE}"
                )
        rope_dim = self._int("rope.dimension_count", 2, head_dim, default=head_dim)
        if rope_dim % 2:
            self._fail("rope.dimension_count", f"must be even, got {rope_dim}")
        context_length = self._int("context_length", 1, _MAX_CONTEXT)
        return ModelConfig(
            architecture=self._prefix,
            name=gguf.get_str("general.name", self._prefix),
            num_layers=num_layers,
            hidden_size=hidden_size,
            intermediate_size=intermediate_size,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            vocab_size=self._vocab_size(),
            context_length=context_length,
            rms_norm_eps=self._float("attention.layer_norm_rms_epsilon", _TINY, 1.0),
            rope_theta=self._float("rope.freq_base", 2.0, 1e12, default=10_000.0),
            rope_dim=rope_dim,
            rope_interleaved=self._prefix == "llama",
            rope_scaling=self._rope_scaling(context_length),
            has_qkv_bias=self._prefix == "qwen2",
            has_qk_norm=self._prefix == "qwen3",
            is_tied=OUTPUT not in gguf.tensors,
        )

    def _heads(self, hidden_size: int) -> tuple[int, int, int]:
        num_heads = self._int("attention.head_count", 1, _MAX_HEADS)
        num_kv_heads = self._int("attention.head_count_kv", 1, num_heads, default=num_heads)
        if num_heads % num_kv_heads:
            self._fail(
                "attention.head_count",
                f"is {num_heads}, not a multiple of the {num_kv_heads} key-value heads",
            )
        if self._has("attention.key_length"):
            head_dim = self._int("attention.key_length", 2, _MAX_HEAD_DIM)
        else:
            if hidden_size % num_heads:
                self._fail(
                    "embedding_length", f"is {hidden_size}, not a multiple of {num_heads} heads"
                )
            head_dim = hidden_size // num_heads
        if head_dim % 2 or not 2 <= head_dim <= _MAX_HEAD_DIM:
            self._fail(
                "attention.key_length", f"must be even and at most {_MAX_HEAD_DIM}, got {head_dim}"
            )
        value_dim = self._int("attention.value_length", 1, _MAX_HEAD_DIM, default=head_dim)
        if value_dim != head_dim:
            raise UnsupportedModelError(
                f"{self._gguf.path.name}: heads with {head_dim} key and {value_dim} value "
                "dimensions are not supported"
            )
        return num_heads, num_kv_heads, head_dim

    def _vocab_size(self) -> int:
        num_tokens = check_vocabulary(self._gguf)
        embedding = self._gguf.tensors.get(EMBEDDING)
        if embedding is not None and embedding.shape[0] != num_tokens:
            raise ModelFileError(
                f"{self._gguf.path.name}: 'tokenizer.ggml.tokens' has {num_tokens} tokens, but "
                f"tensor '{EMBEDDING}' has {embedding.shape[0]} rows"
            )
        return num_tokens

    def _rope_scaling(self, context_length: int) -> RopeScaling:
        key = "rope.scaling.type"
        factor = self._float("rope.scaling.factor", 0.0, _MAX_RATIO, default=0.0)
        # As in llama.cpp: a factor without a type is linear scaling, a factor of 0 is none.
        kind = self._gguf.get_str(self._key(key), "linear")
        if kind not in _SCALING_KINDS:
            raise UnsupportedModelError(
                f"{self._gguf.path.name}: '{self._key(key)}' {quoted(kind)} is not supported; "
                f"known: {', '.join(_SCALING_KINDS)}, and Llama 3's '{ROPE_FACTORS}'"
            )
        if kind != "none" and factor > 0:
            if kind == "yarn":
                return self._yarn(factor, context_length)
            return RopeScaling(kind=kind, factor=factor)
        return RopeScaling(kind="llama3" if ROPE_FACTORS in self._gguf.tensors else "none")

    def _yarn(self, factor: float, context_length: int) -> RopeScaling:
        plain = RopeScaling()
        scaling = RopeScaling(
            kind="yarn",
            factor=factor,
            original_context_length=self._int(
                "rope.scaling.original_context_length", 1, _MAX_CONTEXT, default=context_length
            ),
            attention_factor=self._float(
                self._first_of("rope.scaling.yarn_attn_factor", "rope.scaling.attn_factor"),
                _TINY,
                _MAX_RATIO,
                default=plain.attention_factor,
            ),
            beta_fast=self._float(
                "rope.scaling.yarn_beta_fast", _TINY, _MAX_RATIO, default=plain.beta_fast
            ),
            beta_slow=self._float(
                "rope.scaling.yarn_beta_slow", _TINY, _MAX_RATIO, default=plain.beta_slow
            ),
            ext_factor=self._float(
                "rope.scaling.yarn_ext_factor", 0.0, 1.0, default=plain.ext_factor
            ),
        )
        if scaling.beta_fast <= scaling.beta_slow:
            self._fail(
                "rope.scaling.yarn_beta_fast",
                f"is {scaling.beta_fast}, not above yarn_beta_slow {scaling.beta_slow}",
            )
        return scaling

    def _key(self, name: str) -> str:
        return f"{self._prefix}.{name}"

    def _first_of(self, name: str, alternative: str) -> str:
        """`name`, or `alternative` if only that is in the file."""
        return name if self._has(name) else alternative

    def _has(self, name: str) -> bool:
        return self._key(name) in self._gguf.metadata

    def _int(self, name: str, low: int, high: int, *, default: int | None = None) -> int:
        if default is not None and not self._has(name):
            return default
        key = self._key(name)
        if key in self._gguf.metadata and self._gguf.array_kind(key) == "int":
            value = self._uniform(name)
        else:
            value = self._gguf.get_int(key)
        if not low <= value <= high:
            self._fail(name, f"must be {low} to {high}, got {value}")
        return value

    def _uniform(self, name: str) -> int:
        """A value given once per layer, which must be the same for all."""
        values = self._gguf.get_array(self._key(name), "int")
        if len(values) == 0:
            self._fail(name, "is an empty array")
        if not bool(np.all(values == values[0])):
            raise UnsupportedModelError(
                f"{self._gguf.path.name}: '{self._key(name)}' differs between layers, which is "
                "not supported"
            )
        return int(values[0])

    def _float(self, name: str, low: float, high: float, *, default: float | None = None) -> float:
        if default is not None and not self._has(name):
            return default
        value = self._gguf.get_float(self._key(name))
        if not low <= value <= high:  # false for NaN too
            self._fail(name, f"must be {low:g} to {high:g}, got {value}")
        return value

    def _fail(self, name: str, message: str) -> NoReturn:
        raise ModelFileError(f"{self._gguf.path.name}: '{self._key(name)}' {message}")
