"""A two-layer decoder of random weights, written against `Ops`, and batches for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from caudal.config import KVCacheDType
from caudal.errors import ConfigError
from caudal.ops.interface import (
    AttentionSpec,
    Backend,
    BatchArrays,
    KVCacheSpec,
    Ops,
    Plan,
    PlanSpec,
    RopeSpec,
    Tensor,
)
from caudal.weights.ggml_types import GGMLType
from tests.weights.blocks import Blocks
from tests.weights.quantizers import quantize

HIDDEN, FFN, HEADS, KV_HEADS, HEAD_DIM, VOCAB, LAYERS = 64, 96, 4, 2, 16, 100, 2
NUM_BLOCKS, BLOCK_SIZE = 24, 16
EPS = 1e-5

SPEC = PlanSpec(
    attention=AttentionSpec(HEADS, KV_HEADS, HEAD_DIM, HEAD_DIM**-0.5),
    rope=RopeSpec((10000.0 ** (-np.arange(0, HEAD_DIM, 2) / HEAD_DIM)).astype(np.float32), False),
    rms_norm_eps=EPS,
    hidden_size=HIDDEN,
    vocab_size=VOCAB,
    max_num_tokens=80,
    max_num_seqs=8,
    max_num_logits=80,
)


@dataclass
class Model:
    """Packed weights of one backend; equal arguments give equal weights."""

    backend: Backend
    linear_type: GGMLType = GGMLType.Q4_1
    down_type: GGMLType | None = None
    """Of the projection behind the gates, if it is another."""
    ffn_size: int = FFN
    has_bias: bool = False
    has_qk_norm: bool = False
    seed: int = 0
    layers: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)
        self.embedding = self.linear((VOCAB, HIDDEN), kind=GGMLType.Q8_0)
        kv_size = KV_HEADS * HEAD_DIM
        for _ in range(LAYERS):
            sizes = [(HEADS * HEAD_DIM, HIDDEN), (kv_size, HIDDEN), (kv_size, HIDDEN)]
            self.layers.append({
                "attn_norm": self.vector(HIDDEN),
                "qkv": self.linear(*sizes, has_bias=self.has_bias),
                "q_norm": self.vector(HEAD_DIM) if self.has_qk_norm else None,
                "k_norm": self.vector(HEAD_DIM) if self.has_qk_norm else None,
                "output": self.linear((HIDDEN, HEADS * HEAD_DIM)),
                "ffn_norm": self.vector(HIDDEN),
                "gate_up": self.linear((self.ffn_size, HIDDEN), (self.ffn_size, HIDDEN)),
                "down": self.linear((HIDDEN, self.ffn_size), kind=self.down_type),
            })  # fmt: skip
        self.output_norm = self.vector(HIDDEN)
        self.lm_head = self.linear((VOCAB, HIDDEN), kind=GGMLType.F16)

    def linear(
        self, *shapes: tuple[int, int], kind: GGMLType | None = None, has_bias: bool = False
    ) -> Any:
        kind = kind or self.linear_type
        parts = []
        for rows, cols in shapes:
            values = self.rng.normal(0, 1.4 / np.sqrt(cols), (rows, cols)).astype(np.float32)
            parts.append(Blocks("w", kind, (rows, cols), quantize(kind, values).ravel()))
        num_rows = sum(rows for rows, _ in shapes)
        bias = self.rng.normal(0, 0.5, num_rows).astype(np.float32) if has_bias else None
        # Sensitive, so that all instruction sets round activations alike.
        return self.backend.pack_linear(parts, bias, is_sensitive=True)

    def vector(self, size: int) -> Any:
        values = self.rng.normal(1, 0.2, size).astype(np.float32)
        return self.backend.pack_vector(
            Blocks("norm", GGMLType.F32, (size,), values.view(np.uint8))
        )

    def forward(self, ops: Ops) -> Tensor:
        x = ops.embed(self.embedding)
        for index, layer in enumerate(self.layers):
            qkv = ops.linear(ops.rms_norm(x, layer["attn_norm"], EPS), layer["qkv"])
            q = ops.rope_and_cache(qkv, index, layer["q_norm"], layer["k_norm"])
            x = ops.all_reduce(ops.linear(ops.attention(q, index), layer["output"], residual=x))
            gate_up = ops.linear(ops.rms_norm(x, layer["ffn_norm"], EPS), layer["gate_up"])
            x = ops.linear(ops.silu_mul(gate_up), layer["down"], residual=x)
        return ops.linear(ops.rms_norm(ops.select_logits(x), self.output_norm, EPS), self.lm_head)


def kv_spec(dtype: KVCacheDType = KVCacheDType.F16) -> KVCacheSpec:
    return KVCacheSpec(LAYERS, NUM_BLOCKS, KV_HEADS, HEAD_DIM, BLOCK_SIZE, dtype)


def supported(backend: Backend, asked: KVCacheDType) -> KVCacheDType:
    """The cache type that `asked` means; skips the test where the kernels lack it."""
    try:
        return backend.kv_cache_dtype(asked)
    except ConfigError:
        pytest.skip("this CPU lacks the kernels")


def compile_plan(
    model: Model,
    forward: Callable[[Ops], Tensor] | None = None,
    *,
    dtype: KVCacheDType = KVCacheDType.F16,
    rope: RopeSpec | None = None,
) -> tuple[Plan, Any]:
    """The plan of the model (or of `forward`) and its KV cache."""
    cache = model.backend.create_kv_cache(kv_spec(dtype))
    spec = SPEC if rope is None else replace(SPEC, rope=rope)
    return model.backend.compile(forward or model.forward, spec, cache), cache


@dataclass
class Chunk:
    """Tokens of one sequence of a batch: ids start : start + count of `ids` are computed."""

    ids: Sequence[int]
    blocks: Sequence[int]
    start: int = 0
    count: int | None = None


def make_batch(*sequences: Chunk, logits: Sequence[int] | None = None) -> BatchArrays:
    """A step's arrays; logits of every token unless `logits` lists some."""
    ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    starts = [0]
    seq_lens = []
    width = max(len(s.blocks) for s in sequences)
    tables = np.zeros((len(sequences), width), np.int32)
    for row, seq in enumerate(sequences):
        end = len(seq.ids) if seq.count is None else seq.start + seq.count
        for position in range(seq.start, end):
            ids.append(seq.ids[position])
            positions.append(position)
            slots.append(seq.blocks[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE)
        starts.append(len(ids))
        seq_lens.append(end)
        tables[row, : len(seq.blocks)] = seq.blocks
    wanted = range(len(ids)) if logits is None else logits
    arrays = (np.array(a, np.int32) for a in (ids, positions, slots, starts, seq_lens))
    return BatchArrays(*arrays, tables, np.array(wanted, np.int32))


def random_ids(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, length).tolist()
