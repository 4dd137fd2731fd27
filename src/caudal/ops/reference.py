"""The oracle: the interface of `Ops` computed at once, with NumPy in float32, for tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from caudal import _native
from caudal.config import KVCacheDType
from caudal.ops.interface import (
    BatchArrays,
    KVCacheSpec,
    Ops,
    PlanSpec,
    RawMatrix,
    SamplingArrays,
    SamplingResult,
)
from caudal.ops.raw import add_rows, as_float32
from caudal.ops.reference_cache import ReferenceKVCache, round_to_bf16
from caudal.step_io import Interrupt, StepInterruptedError

F32 = NDArray[np.float32]

_GROUP = 32
_QUANT_MAX = {"w4": 127.0, "w4 wide": 2047.0, "w8": 4095.0}
"""Largest quantised activation by weight format."""


@dataclass(frozen=True, slots=True)
class ReferenceLinear:
    """Float32 weights of stacked matrices, each with the format that the kernels would use."""

    parts: tuple[tuple[str, F32], ...]  # (format, [rows, cols])
    bias: F32 | None  # [rows]

    @property
    def cols(self) -> int:
        """Input features."""
        return int(self.parts[0][1].shape[1])


class ReferenceBackend:
    """Keeps weights as float32 and runs `forward` anew for each step."""

    def __init__(
        self,
        dequantize: Callable[[RawMatrix], F32] | None = None,
        *,
        quantizes_activations: bool = False,
        isa: str = "ref",
    ) -> None:
        """dequantize: gives a tensor's exact values; None takes what the native packing keeps,
        which for some types is rounded. quantizes_activations: round the inputs of linear ops as
        the kernels of `isa` do, so that only the order of additions differs from them.
        """
        self._runtime = _native.Runtime(isa, 1)
        self._dequantize = dequantize
        self._quantizes_activations = quantizes_activations

    @property
    def isa(self) -> str:
        """Name of the kernel set in use."""
        return "numpy"

    @property
    def num_threads(self) -> int:
        """Compute threads; NumPy's own are not counted."""
        return 1

    def pack_linear(
        self,
        parts: Sequence[RawMatrix],
        bias: F32 | None = None,
        *,
        is_sensitive: bool = False,
    ) -> ReferenceLinear:
        """Stack matrices by rows, with an optional bias [rows]."""
        return ReferenceLinear(tuple(self._unpack(part, is_sensitive) for part in parts), bias)

    def _unpack(self, part: RawMatrix, is_sensitive: bool) -> tuple[str, F32]:
        rows, cols = part.shape
        data = np.ascontiguousarray(part.data).reshape(-1)
        packed = self._runtime.pack_linear(
            [(int(part.ggml_type), rows, cols, data)], None, is_sensitive
        )
        values = self._dequantize(part) if self._dequantize else packed.unpack()
        name = packed.formats[0]
        if name in ("w4", "w8") and packed.activations == "bf16":
            return name + " bf16", round_to_bf16(values) if self._quantizes_activations else values
        return name + (" wide" if name == "w4" and packed.activations == "int12" else ""), values

    def pack_vector(self, part: RawMatrix) -> F32:
        """A norm weight or bias as float32 [size]."""
        return as_float32(part).reshape(-1)

    def kv_cache_dtype(self, asked: KVCacheDType) -> KVCacheDType:
        """f16 for AUTO; every other type as it is."""
        return KVCacheDType.F16 if asked is KVCacheDType.AUTO else asked

    def create_kv_cache(self, spec: KVCacheSpec) -> ReferenceKVCache:
        """A zeroed cache."""
        return ReferenceKVCache(spec)

    def compile(
        self, forward: Callable[[Ops], F32], spec: PlanSpec, kv_cache: ReferenceKVCache
    ) -> ReferencePlan:
        """A plan that calls `forward` in each run."""
        return ReferencePlan(forward, spec, kv_cache, self._quantizes_activations)

    def sample(self, logits: F32, params: SamplingArrays) -> SamplingResult:
        """Choose a token per row with the portable kernel."""
        return SamplingResult(*self._runtime.sample(np.ascontiguousarray(logits), params))

    def best_allowed(
        self, logits: F32, logit_rows: NDArray[np.int32], mask_words: NDArray[np.int32]
    ) -> NDArray[np.int32]:
        """See Backend.best_allowed; with the portable kernel."""
        return self._runtime.best_allowed(np.ascontiguousarray(logits), logit_rows, mask_words)

    def add_rows(self, hidden: F32, sums: NDArray[np.float64]) -> None:
        """Add the rows of `hidden` [rows, features] to `sums` [features], one after the other."""
        add_rows(hidden, sums)


@dataclass(frozen=True, slots=True)
class ReferencePlan:
    """A forward pass that is recomputed op by op."""

    forward: Callable[[Ops], F32]
    spec: PlanSpec
    kv_cache: ReferenceKVCache
    quantizes_activations: bool

    def run(self, batch: BatchArrays, interrupt: Interrupt | None = None) -> F32:
        """Run one step -> logits [num_logits, vocab]; `interrupt` may only end it before it."""
        if interrupt is not None and interrupt.is_due:
            raise StepInterruptedError
        return self.forward(
            ReferenceOps(self.spec, self.kv_cache, batch, self.quantizes_activations)
        )


@dataclass(frozen=True, slots=True)
class ReferenceOps:
    """`Ops` of one step; tensors are float32 arrays [num_tokens, features]."""

    spec: PlanSpec
    kv_cache: ReferenceKVCache
    batch: BatchArrays
    quantizes_activations: bool = False

    def embed(self, table: ReferenceLinear) -> F32:
        """Rows of `table` for the step's input_ids."""
        _, values = table.parts[0]
        return values[self.batch.input_ids]

    def rms_norm(self, x: F32, weight: F32, eps: float) -> F32:
        """x / sqrt(mean(x²) + eps) * weight, a row at a time (arXiv 1910.07467)."""
        mean = np.mean(np.square(x), axis=-1, keepdims=True, dtype=np.float32)
        return np.asarray(x / np.sqrt(mean + np.float32(eps)) * weight, dtype=np.float32)

    def linear(self, x: F32, weight: ReferenceLinear, residual: F32 | None = None) -> F32:
        """x @ weightᵀ (+ bias) (+ residual)."""
        columns = []
        for weight_format, values in weight.parts:
            inputs = round_inputs(x, weight_format) if self.quantizes_activations else x
            columns.append(inputs @ values.T)
        out = np.concatenate(columns, axis=1)
        if weight.bias is not None:
            out = out + weight.bias
        return out if residual is None else out + residual

    def rope_and_cache(
        self, qkv: F32, layer: int, q_norm: F32 | None = None, k_norm: F32 | None = None
    ) -> F32:
        """Rotate q and k, write k and v to the cache of `layer`, return q."""
        heads = self.spec.attention
        num_tokens = len(qkv)
        split = qkv.reshape(num_tokens, -1, heads.head_dim)
        q, k, v = np.split(split, [heads.num_heads, heads.num_heads + heads.num_kv_heads], axis=1)
        if q_norm is not None:
            q = self.rms_norm(q, q_norm, self.spec.rms_norm_eps)
        if k_norm is not None:
            k = self.rms_norm(k, k_norm, self.spec.rms_norm_eps)
        self.kv_cache.write(layer, self.batch.slot_mapping, self._rotate(k), v)
        return self._rotate(q).reshape(num_tokens, -1)

    def _rotate(self, x: F32) -> F32:
        """x: [num_tokens, heads, head_dim]; features beyond rope_dim pass (arXiv 2104.09864)."""
        rope = self.spec.rope
        half = len(rope.inv_freq)
        angles = self.batch.positions[:, None].astype(np.float32) * rope.inv_freq
        factor = np.float32(rope.attention_factor)
        cos, sin = np.cos(angles)[:, None] * factor, np.sin(angles)[:, None] * factor
        out = x.copy()
        rotated = out[..., : 2 * half]
        if rope.interleaved:
            a, b = x[..., 0 : 2 * half : 2], x[..., 1 : 2 * half : 2]
            rotated[..., 0::2], rotated[..., 1::2] = a * cos - b * sin, a * sin + b * cos
        else:
            a, b = x[..., :half], x[..., half : 2 * half]
            rotated[..., :half], rotated[..., half:] = a * cos - b * sin, a * sin + b * cos
        return out

    def attention(self, q: F32, layer: int) -> F32:
        """Causal attention over the cache; query heads share the kv head of their group."""
        heads = self.spec.attention
        group = heads.num_heads // heads.num_kv_heads
        queries = q.reshape(len(q), heads.num_kv_heads, group, heads.head_dim)
        out = np.empty_like(queries)
        starts = self.batch.query_start_loc
        for seq, seq_len in enumerate(self.batch.seq_lens.tolist()):
            begin, end = int(starts[seq]), int(starts[seq + 1])
            keys, values = self.kv_cache.read(layer, self.batch.block_tables[seq], seq_len)
            scores = np.einsum("qhgd,khd->hgqk", queries[begin:end], keys) * heads.scale
            last_key = np.arange(seq_len - (end - begin), seq_len)
            scores[:, :, np.arange(seq_len) > last_key[:, None]] = -np.inf
            weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
            weights /= weights.sum(axis=-1, keepdims=True)
            out[begin:end] = np.einsum("hgqk,khd->qhgd", weights, values)
        return out.reshape(len(q), -1)

    def silu_mul(self, gate_up: F32) -> F32:
        """silu(gate) * up (arXiv 2002.05202)."""
        gate, up = np.split(gate_up, 2, axis=1)
        with np.errstate(over="ignore"):
            return np.asarray(gate / (1 + np.exp(-gate)) * up, dtype=np.float32)

    def select_logits(self, x: F32) -> F32:
        """Rows `logits_indices` of x."""
        return x[self.batch.logits_indices]

    def all_reduce(self, x: F32) -> F32:
        """Identity: one rank."""
        return x


def round_inputs(x: F32, weight_format: str) -> F32:
    """x [tokens, features] as the kernels of that format round it."""
    if weight_format.endswith("bf16"):
        return round_to_bf16(x)
    quant_max = _QUANT_MAX.get(weight_format)
    return x if quant_max is None else round_activations(x, quant_max)


def round_activations(x: F32, quant_max: float) -> F32:
    """x [tokens, features] rounded to integers of at most `quant_max` per 32 values, and scaled
    back: what the w4 (127 or 2047) and w8 (4095) kernels multiply. Definition: csrc/cpu/numerics.h.
    """
    groups = x.reshape(len(x), -1, _GROUP)
    absmax = np.abs(groups).max(axis=-1, keepdims=True)
    is_tiny = absmax < np.float32(1e-30)
    safe = np.where(is_tiny, np.float32(1), absmax)
    rounded = np.rint(groups * (np.float32(quant_max) / safe))
    scaled = rounded * np.where(is_tiny, np.float32(0), absmax / np.float32(quant_max))
    return np.asarray(scaled, dtype=np.float32).reshape(x.shape)
