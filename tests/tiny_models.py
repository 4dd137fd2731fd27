"""Complete GGUF models with tiny random weights, made in a few milliseconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from caudal.weights.ggml_types import GGMLType
from tests.tiny_vocabulary import bpe_metadata, spm_metadata
from tests.weights.gguf_writer import write_gguf

Tensors = dict[str, tuple[GGMLType, npt.NDArray[Any]]]


@dataclass(frozen=True)
class TinyModelSpec:
    """What a tiny model looks like; every field is an override of `make_tiny_model`.

    K-quantised linears need `hidden`, `ffn` and `num_heads * head_dim` divisible by 256.
    """

    arch: str = "llama"
    seed: int = 0
    num_layers: int = 2
    hidden: int = 128
    ffn: int = 256
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    context_length: int = 512
    rope_theta: float = 10_000.0
    rms_norm_eps: float = 1e-5
    linear_type: GGMLType = GGMLType.Q4_1
    embedding_type: GGMLType = GGMLType.Q8_0
    output_type: GGMLType = GGMLType.Q8_0
    tied: bool = False
    logit_std: float = 2.0
    tokenizer: str = "gpt2"
    """gpt2 (byte-level BPE) or llama (SentencePiece-style)."""
    pre: str = "smollm"
    num_merges: int = 100
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Added last; a value of None removes the key."""
    tensors: Mapping[str, tuple[GGMLType, npt.NDArray[Any]] | None] = field(default_factory=dict)
    """Added last; a value of None removes the tensor."""


def make_tiny_model(path: Path, arch: str = "llama", seed: int = 0, **overrides: Any) -> Path:
    """Write a random model of `arch` (llama, qwen2 or qwen3) to `path` and return it.

    `overrides` are fields of `TinyModelSpec`. Logits have a standard deviation of about
    `logit_std`, so greedy ties are improbable. Equal arguments give equal files.
    """
    spec = TinyModelSpec(arch=arch, seed=seed, **overrides)
    vocabulary = _vocabulary(spec)
    pairs = _hyper_parameters(spec) | vocabulary | dict(spec.metadata)
    tensors = _tensors(spec, vocab_size=len(vocabulary["tokenizer.ggml.tokens"]))
    tensors |= spec.tensors  # type: ignore[arg-type]
    return write_gguf(
        path,
        {key: value for key, value in pairs.items() if value is not None},
        {name: tensor for name, tensor in tensors.items() if tensor is not None},
    )


def _vocabulary(spec: TinyModelSpec) -> dict[str, Any]:
    if spec.tokenizer == "llama":
        return spm_metadata(spec.num_merges)
    return bpe_metadata(spec.pre, spec.num_merges)


def _hyper_parameters(spec: TinyModelSpec) -> dict[str, Any]:
    values = {
        "block_count": spec.num_layers,
        "context_length": spec.context_length,
        "embedding_length": spec.hidden,
        "feed_forward_length": spec.ffn,
        "attention.head_count": spec.num_heads,
        "attention.head_count_kv": spec.num_kv_heads,
        "attention.key_length": spec.head_dim,
        "attention.value_length": spec.head_dim,
        "attention.layer_norm_rms_epsilon": spec.rms_norm_eps,
        "rope.freq_base": spec.rope_theta,
        "rope.dimension_count": spec.head_dim,
    }
    return {
        "general.architecture": spec.arch,
        "general.name": f"Tiny {spec.arch}",
        **{f"{spec.arch}.{key}": value for key, value in values.items()},
    }


def _tensors(spec: TinyModelSpec, vocab_size: int) -> Tensors:
    rng = np.random.default_rng(spec.seed)

    def matrix(kind: GGMLType, rows: int, columns: int, gain: float) -> Any:
        """Maps unit-variance inputs to outputs of standard deviation `gain`."""
        return kind, rng.normal(0, gain / np.sqrt(columns), (rows, columns)).astype(np.float32)

    def vector(size: int, mean: float, std: float) -> Any:
        return GGMLType.F32, rng.normal(mean, std, size).astype(np.float32)

    hidden, ffn, linear = spec.hidden, spec.ffn, spec.linear_type
    q_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    tensors: Tensors = {
        "token_embd.weight": matrix(spec.embedding_type, vocab_size, hidden, spec.logit_std)
    }
    for layer in range(spec.num_layers):
        block = {
            "attn_norm.weight": vector(hidden, 1.0, 0.1),
            # Scores of standard deviation 2: attention picks tokens instead of averaging all.
            "attn_q.weight": matrix(linear, q_size, hidden, 1.4),
            "attn_k.weight": matrix(linear, kv_size, hidden, 1.4),
            "attn_v.weight": matrix(linear, kv_size, hidden, 1.0),
            # Outweighs the embedding in the residual stream, or tied models echo their input.
            "attn_output.weight": matrix(linear, hidden, q_size, 1.5),
            "ffn_norm.weight": vector(hidden, 1.0, 0.1),
            "ffn_gate.weight": matrix(linear, ffn, hidden, 1.5),
            "ffn_up.weight": matrix(linear, ffn, hidden, 1.5),
            "ffn_down.weight": matrix(linear, hidden, ffn, 1.5),
        }
        if spec.arch == "qwen2":
            block["attn_q.bias"] = vector(q_size, 0.0, 0.3)
            block["attn_k.bias"] = vector(kv_size, 0.0, 0.3)
            block["attn_v.bias"] = vector(kv_size, 0.0, 0.3)
        if spec.arch == "qwen3":
            block["attn_q_norm.weight"] = vector(spec.head_dim, 1.2, 0.1)
            block["attn_k_norm.weight"] = vector(spec.head_dim, 1.2, 0.1)
        tensors |= {f"blk.{layer}.{name}": tensor for name, tensor in block.items()}
    tensors["output_norm.weight"] = vector(hidden, 1.0, 0.1)
    if not spec.tied:
        tensors["output.weight"] = matrix(spec.output_type, vocab_size, hidden, spec.logit_std)
    return tensors
