"""Records a model's forward pass, fuses what the kernels can fuse, and builds a native plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from caudal import _native
from caudal.ops.buffer_plan import Lifetime, place_buffers
from caudal.ops.interface import PlanSpec

_FLOAT_NBYTES = 4
_NO_BUFFER = -1


@dataclass(frozen=True, slots=True)
class CpuTensor:
    """Handle of an activation: float32 [tokens, features], or [logits rows, features]."""

    index: int
    features: int
    is_logits: bool


BufferIds: TypeAlias = Callable[[CpuTensor], int]


@dataclass(slots=True)
class _Step:
    """One native op: the tensors it reads, the one it writes, and how it joins the plan."""

    reads: tuple[CpuTensor, ...]
    out: CpuTensor
    emit: Callable[[_native.Plan, BufferIds], None]
    in_place_of: CpuTensor | None = None
    """A residual whose memory the output may take over."""


@dataclass(slots=True)
class _Prologue:
    """What a linear op can do to its input by itself: normalise or gate."""

    source: CpuTensor
    norm: _native.RmsNorm | None = None
    is_gated: bool = False


@dataclass(slots=True)
class CpuOps:
    """The `Ops` that records. Results are handles; nothing is computed until the plan runs.

    rms_norm and silu_mul go into the linear ops that read them; they become ops of their own only
    where something else reads the result.
    """

    spec: PlanSpec
    _steps: list[_Step] = field(default_factory=list)
    _prologues: dict[int, _Prologue] = field(default_factory=dict)
    """By the index of the tensor that the prologue would make."""
    _num_tensors: int = 0

    def embed(self, table: _native.LinearWeight) -> CpuTensor:
        """Rows of `table` for the step's input_ids -> [num_tokens, hidden]."""
        out = self._new(table.cols, is_logits=False)
        self._add((), out, lambda plan, ids: plan.add_embed(table, ids(out)))
        return out

    def rms_norm(self, x: CpuTensor, weight: NDArray[np.float32], eps: float) -> CpuTensor:
        """x / sqrt(mean(x²) + eps) * weight, a row at a time."""
        _require(weight.size == x.features, f"rms_norm: {weight.size} weights, {x.features} values")
        norm = _native.RmsNorm(weight, eps)
        out = self._new(x.features, x.is_logits)
        self._prologues[out.index] = _Prologue(x, norm=norm)
        self._add((x,), out, lambda plan, ids: plan.add_rms_norm(ids(x), norm, ids(out)))
        return out

    def silu_mul(self, gate_up: CpuTensor) -> CpuTensor:
        """silu(gate) * up; gate_up: [num_tokens, 2 n] -> [num_tokens, n]."""
        _require(gate_up.features % 2 == 0, f"silu_mul: {gate_up.features} features are odd")
        out = self._new(gate_up.features // 2, gate_up.is_logits)
        self._prologues[out.index] = _Prologue(gate_up, is_gated=True)
        self._add((gate_up,), out, lambda plan, ids: plan.add_silu_mul(ids(gate_up), ids(out)))
        return out

    def linear(
        self, x: CpuTensor, weight: _native.LinearWeight, residual: CpuTensor | None = None
    ) -> CpuTensor:
        """x @ weightᵀ (+ bias) (+ residual) -> [num_tokens, rows of weight]."""
        _require(x.features == weight.cols, f"linear: {x.features} values, {weight.cols} columns")
        out = self._new(weight.rows, x.is_logits)
        prologue = self._prologues.get(x.index, _Prologue(x))
        source = prologue.source
        reads = (source,) if residual is None else (source, residual)
        self._add(
            reads,
            out,
            lambda plan, ids: plan.add_linear(
                ids(source),
                weight,
                ids(out),
                prologue.norm,
                prologue.is_gated,
                _NO_BUFFER if residual is None else ids(residual),
            ),
            in_place_of=residual if residual != source else None,
        )
        return out

    def rope_and_cache(
        self,
        qkv: CpuTensor,
        layer: int,
        q_norm: NDArray[np.float32] | None = None,
        k_norm: NDArray[np.float32] | None = None,
    ) -> CpuTensor:
        """Rotate q and k, write k and v to the cache of `layer`, return q."""
        heads, eps = self.spec.attention, self.spec.rms_norm_eps
        features = (heads.num_heads + 2 * heads.num_kv_heads) * heads.head_dim
        _require(qkv.features == features, f"rope: {qkv.features} features, {features} needed")
        norm_q = None if q_norm is None else _native.RmsNorm(q_norm, eps)
        norm_k = None if k_norm is None else _native.RmsNorm(k_norm, eps)
        out = self._new(heads.num_heads * heads.head_dim, is_logits=False)
        self._add(
            (qkv,),
            out,
            lambda plan, ids: plan.add_rope_and_cache(ids(qkv), layer, norm_q, norm_k, ids(out)),
        )
        return out

    def attention(self, q: CpuTensor, layer: int) -> CpuTensor:
        """Causal attention over the cache -> [num_tokens, num_heads * head_dim]."""
        out = self._new(q.features, is_logits=False)
        self._add((q,), out, lambda plan, ids: plan.add_attention(ids(q), layer, ids(out)))
        return out

    def select_logits(self, x: CpuTensor) -> CpuTensor:
        """Rows `logits_indices` of x -> [num_logits, features]."""
        out = self._new(x.features, is_logits=True)
        self._add((x,), out, lambda plan, ids: plan.add_select(ids(x), ids(out)))
        return out

    def all_reduce(self, x: CpuTensor) -> CpuTensor:
        """Sum over tensor-parallel ranks; there is one."""
        return x

    def build(
        self, logits: object, runtime: _native.Runtime, kv_cache: _native.KVCache
    ) -> _native.Plan:
        """The native plan of what was recorded; `logits` is what the model returned.

        Raises ValueError if shapes do not fit each other or the cache.
        """
        result = cast(CpuTensor, logits)
        steps = self._needed_steps(result)
        storage = _share_storage(steps)
        lifetimes = self._lifetimes(steps, storage, result)
        offsets, arena_nbytes = place_buffers(list(lifetimes.values()))
        offset_of = dict(zip(lifetimes, offsets, strict=True))
        plan = _native.Plan(runtime, kv_cache, self._native_shape(), arena_nbytes)
        buffer_ids: dict[int, int] = {}

        def buffer_id(tensor: CpuTensor) -> int:
            if tensor.index not in buffer_ids:
                offset = offset_of[storage[tensor.index]]
                added = plan.add_buffer(offset, tensor.features, tensor.is_logits)
                buffer_ids[tensor.index] = added
            return buffer_ids[tensor.index]

        for step in steps:
            step.emit(plan, buffer_id)
        plan.finish(buffer_id(result))
        return plan

    def _new(self, features: int, is_logits: bool) -> CpuTensor:
        self._num_tensors += 1
        return CpuTensor(self._num_tensors - 1, features, is_logits)

    def _add(
        self,
        reads: tuple[CpuTensor, ...],
        out: CpuTensor,
        emit: Callable[[_native.Plan, BufferIds], None],
        in_place_of: CpuTensor | None = None,
    ) -> None:
        self._steps.append(_Step(reads, out, emit, in_place_of))

    def _needed_steps(self, result: CpuTensor) -> list[_Step]:
        """Without norms and gates that every reader has taken over."""
        needed = []
        wanted = {result.index}
        for step in reversed(self._steps):
            is_optional = step.out.index in self._prologues
            if is_optional and step.out.index not in wanted:
                continue
            wanted.update(tensor.index for tensor in step.reads)
            needed.append(step)
        return needed[::-1]

    def _lifetimes(
        self, steps: list[_Step], storage: dict[int, int], result: CpuTensor
    ) -> dict[int, Lifetime]:
        """Of each storage, in steps; the result lives to the end."""
        lifetimes: dict[int, Lifetime] = {}
        for position, step in enumerate(steps):
            for tensor in (*step.reads, step.out):
                key = storage[tensor.index]
                nbytes = tensor.features * self._num_rows(tensor) * _FLOAT_NBYTES
                known = lifetimes.get(key, Lifetime(0, position, position))
                lifetimes[key] = Lifetime(max(known.nbytes, nbytes), known.first, position)
        key = storage[result.index]
        last = lifetimes[key]
        lifetimes[key] = Lifetime(last.nbytes, last.first, len(steps))
        return lifetimes

    def _num_rows(self, tensor: CpuTensor) -> int:
        return self.spec.max_num_logits if tensor.is_logits else self.spec.max_num_tokens

    def _native_shape(self) -> _native.PlanShape:
        rope, heads = self.spec.rope, self.spec.attention
        inv_freq = np.ascontiguousarray(rope.inv_freq, dtype=np.float32)
        shape = _native.PlanShape(
            heads.num_heads, heads.scale, inv_freq, rope.interleaved, rope.attention_factor
        )
        shape.vocab_size = self.spec.vocab_size
        shape.max_num_tokens = self.spec.max_num_tokens
        shape.max_num_seqs = self.spec.max_num_seqs
        shape.max_num_logits = self.spec.max_num_logits
        return shape


def _share_storage(steps: list[_Step]) -> dict[int, int]:
    """Storage of each tensor, named by the first tensor in it.

    A linear's output takes over its residual's memory if nothing reads the residual later.
    """
    last_read = {tensor.index: i for i, step in enumerate(steps) for tensor in step.reads}
    storage: dict[int, int] = {}
    for position, step in enumerate(steps):
        residual = step.in_place_of
        if residual is not None and last_read[residual.index] == position:
            storage[step.out.index] = storage[residual.index]
        else:
            storage[step.out.index] = step.out.index
    return storage


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)
