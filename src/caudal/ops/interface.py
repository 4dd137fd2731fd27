"""The seam between model code and kernels.

A model's `forward` is run once at load with an `Ops` that records; the recorded plan is then
replayed natively for each step (one call, one entry into the thread pool). `ReferenceOps` has
the same methods and computes at once with NumPy: it is the oracle of every test.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from caudal.config import KVCacheDType
from caudal.step_io import Interrupt

Tensor: TypeAlias = Any
"""A backend's activation handle: float32 [num_tokens, features]; opaque above `ops`."""

LinearWeight: TypeAlias = Any
"""A backend's packed matrix, made by `Ops.pack_linear`."""

VectorWeight: TypeAlias = Any
"""A backend's float32 vector, made by `Ops.pack_vector`."""


@dataclass(frozen=True, slots=True)
class PackedSegment:
    """Rows of a matrix in the layout of the kernels; a weight is one or several of them."""

    format: str
    """w4, w8, f16 or f32."""
    rows: int
    blocks: NDArray[np.uint8]  # [bytes], read-only


class RawMatrix(Protocol):
    """A tensor as it lies in a model file (`weights.gguf.GGUFTensor`)."""

    @property
    def name(self) -> str: ...

    @property
    def ggml_type(self) -> int:
        """GGML type number (F32 0, F16 1, Q4_0 2, Q4_1 3, Q5_0 6, Q5_1 7, Q8_0 8, …)."""

    @property
    def shape(self) -> tuple[int, ...]:
        """(rows, columns); columns are contiguous."""

    @property
    def data(self) -> NDArray[np.uint8]:
        """The raw blocks, read-only."""


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding of a model; cos and sin are computed from this once per step."""

    inv_freq: NDArray[np.float32]  # [rope_dim / 2], scaling already applied
    interleaved: bool
    attention_factor: float = 1.0
    """Multiplies cos and sin (YaRN)."""


@dataclass(frozen=True, slots=True)
class KVCacheSpec:
    """Shape of a paged KV cache."""

    num_layers: int
    num_blocks: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: KVCacheDType
    """Never AUTO: see `Backend.kv_cache_dtype`."""


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Heads of one attention layer."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float


@dataclass(slots=True)
class BatchArrays:
    """One step's ragged batch; every array is int32 and C-contiguous.

    Sequence i owns tokens query_start_loc[i] : query_start_loc[i + 1].
    """

    input_ids: NDArray[np.int32]  # [num_tokens]
    positions: NDArray[np.int32]  # [num_tokens]
    slot_mapping: NDArray[np.int32]  # [num_tokens] block_id * block_size + offset
    query_start_loc: NDArray[np.int32]  # [num_seqs + 1]
    seq_lens: NDArray[np.int32]  # [num_seqs] KV length including this step's tokens
    block_tables: NDArray[np.int32]  # [num_seqs, >= ceil(seq_len / block_size)]
    logits_indices: NDArray[np.int32]  # [num_logits] tokens whose logits are wanted


@dataclass(slots=True)
class SamplingArrays:
    """Sampling parameters of rows of a logits matrix: each array has a value for each of them.

    The CSR pairs list per row the ids whose logit changes; empty arrays where no row needs any.
    """

    logit_rows: NDArray[np.int32]  # [rows] which row of logits, each at most once
    temperature: NDArray[np.float32]  # [rows] 0 = greedy
    top_k: NDArray[np.int32]  # [rows] <= 0 = off
    top_p: NDArray[np.float32]  # [rows]
    min_p: NDArray[np.float32]  # [rows]
    presence_penalty: NDArray[np.float32]  # [rows]
    frequency_penalty: NDArray[np.float32]  # [rows]
    repetition_penalty: NDArray[np.float32]  # [rows]
    seed: NDArray[np.uint64]  # [rows]
    position: NDArray[np.int64]  # [rows] random numbers depend on (seed, position) alone
    bias_indptr: NDArray[np.int32]  # [rows + 1]
    bias_ids: NDArray[np.int32]  # [bias_indptr[-1]]
    bias_values: NDArray[np.float32]  # added to the logit; -inf forbids
    history_indptr: NDArray[np.int32]  # [rows + 1]
    history_ids: NDArray[np.int32]  # distinct ids in prompt or output
    history_counts: NDArray[np.int32]  # occurrences in the output (0: prompt only)
    num_logprobs: NDArray[np.int32]  # [rows] -1 none, else k
    target_ids: NDArray[np.int32]  # [rows] -1: sample; >= 0: only report this id's logprob
    mask_rows: NDArray[np.int32]  # [rows] row of mask_words; -1: every id may be chosen
    mask_words: NDArray[np.int32]  # [masks, ceil(vocab / 32)] bit i % 32 of word i / 32: id i may


@dataclass(slots=True)
class SamplingResult:
    """Chosen tokens; logprobs are of the distribution before any modification."""

    token_ids: NDArray[np.int32]  # [rows] (target_ids where given); -1: row had NaN logits
    logprobs: NDArray[np.float32]  # [rows] NaN where num_logprobs < 0
    ranks: NDArray[np.int32]  # [rows]
    top_ids: NDArray[np.int32]  # [rows, max k] padded with -1
    top_logprobs: NDArray[np.float32]  # [rows, max k]


class Ops(Protocol):
    """What a model file may call. Tensors are float32 [num_tokens, features]."""

    def embed(self, table: LinearWeight) -> Tensor:
        """Rows of `table` for the step's input_ids -> [num_tokens, hidden]."""

    def rms_norm(self, x: Tensor, weight: VectorWeight, eps: float) -> Tensor:
        """x / sqrt(mean(x²) + eps) * weight, a row at a time."""

    def linear(self, x: Tensor, weight: LinearWeight, residual: Tensor | None = None) -> Tensor:
        """x @ weightᵀ (+ bias) (+ residual) -> [num_tokens, rows of weight]."""

    def rope_and_cache(
        self,
        qkv: Tensor,
        layer: int,
        q_norm: VectorWeight | None = None,
        k_norm: VectorWeight | None = None,
    ) -> Tensor:
        """Rotate q and k, write k and v to the cache of `layer`, return q.

        qkv: [num_tokens, (num_heads + 2 num_kv_heads) * head_dim], q heads, k heads, v heads.
        q_norm, k_norm: per-head RMS norm before the rotation, [head_dim].
        """

    def attention(self, q: Tensor, layer: int) -> Tensor:
        """Causal attention over the cache -> [num_tokens, num_heads * head_dim]."""

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """silu(gate) * up; gate_up: [num_tokens, 2 n] -> [num_tokens, n]."""

    def select_logits(self, x: Tensor) -> Tensor:
        """Rows `logits_indices` of x -> [num_logits, features]."""

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum over tensor-parallel ranks; identity at world size 1."""


class Plan(Protocol):
    """A compiled forward pass with its activation memory."""

    def run(self, batch: BatchArrays, interrupt: Interrupt | None = None) -> NDArray[np.float32]:
        """Run one step -> logits [num_logits, vocab], a view valid until the next run.

        Not thread-safe. Raises ValueError if the batch exceeds the plan's capacity, and
        StepInterruptedError if `interrupt` ended it; the step's KV slots then hold anything.
        """


@dataclass(frozen=True, slots=True)
class PlanSpec:
    """Everything fixed about a model that its plan needs besides the weights."""

    attention: AttentionSpec
    rope: RopeSpec
    rms_norm_eps: float
    hidden_size: int
    vocab_size: int
    max_num_tokens: int
    max_num_seqs: int
    max_num_logits: int


class Backend(Protocol):
    """A device: packs weights, owns the KV cache and the threads, compiles plans."""

    @property
    def isa(self) -> str: ...

    @property
    def num_threads(self) -> int: ...

    def pack_linear(
        self,
        parts: Sequence[RawMatrix],
        bias: NDArray[np.float32] | None = None,
        *,
        is_sensitive: bool = False,
    ) -> LinearWeight:
        """Pack one matrix, or several stacked by rows (qkv, gate + up) whose types may differ.

        is_sensitive: rounding this product's input costs the model the most; a backend that
        trades precision for speed does not do it here.
        Columns must be a multiple of 32; rows of any number.
        """

    def pack_vector(self, part: RawMatrix) -> VectorWeight:
        """A norm weight or bias as float32."""

    def kv_cache_dtype(self, asked: KVCacheDType) -> KVCacheDType:
        """What `asked` means here: never AUTO. Raises ConfigError if the backend lacks it."""

    def create_kv_cache(self, spec: KVCacheSpec) -> Any:
        """Zeroed cache (lazily committed by the OS); exports and imports blocks by id."""

    def compile(self, forward: Callable[[Ops], Tensor], spec: PlanSpec, kv_cache: Any) -> Plan:
        """Record `forward` once and plan its buffers."""

    def sample(self, logits: NDArray[np.float32], params: SamplingArrays) -> SamplingResult:
        """Choose a token for each of `params.logit_rows`, which may be overwritten."""

    def best_allowed(
        self,
        logits: NDArray[np.float32],
        logit_rows: NDArray[np.int32],
        mask_words: NDArray[np.int32],
    ) -> NDArray[np.int32]:
        """The ids [rows] that greedy rows without adjustments get under their masks.

        `logit_rows` [rows] and `mask_words` [rows, ceil(vocab / 32)] are those of SamplingArrays.
        -1 where nothing that is allowed is possible.
        """

    def add_rows(self, hidden: NDArray[np.float32], sums: NDArray[np.float64]) -> None:
        """Add the rows of `hidden` [rows, features] to `sums` [features], one after the other.

        The result depends on the order of all rows, never on how they are cut into calls.
        """


@runtime_checkable
class PackingBackend(Protocol):
    """A backend whose packed weights may be kept in a file and used where the file is mapped."""

    def packed_layout(self) -> str:
        """Names the layout; differs whenever weights packed elsewhere must not be adopted."""

    def export_linear(self, weight: LinearWeight) -> list[PackedSegment]:
        """Views of a packed matrix's memory."""

    def adopt_linear(
        self,
        segments: Sequence[PackedSegment],
        cols: int,
        bias: NDArray[np.float32] | None = None,
        *,
        is_sensitive: bool = False,
    ) -> LinearWeight:
        """The inverse: a weight over exported segments, which it keeps alive.

        Raises ValueError if sizes or alignment do not fit.
        """
