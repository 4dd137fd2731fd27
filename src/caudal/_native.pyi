"""The native module: CPU kernels, packed weights, KV cache and plans.

Calls that compute release the GIL. Wrong values raise ValueError, wrong array types or layouts
TypeError. Arrays are C-contiguous.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from caudal.ops.interface import BatchArrays, SamplingArrays

_F32 = NDArray[np.float32]
_I32 = NDArray[np.int32]
_U8 = NDArray[np.uint8]
_U32 = NDArray[np.uint32]
_Sampled = tuple[_I32, _F32, _I32, _I32, _F32]
"""The fields of SamplingResult in order."""

def isa_names() -> list[str]:
    """Instruction sets in this build, best first."""

def available_isas() -> list[str]:
    """Instruction sets that this CPU and system can run, best first."""

def guess_rows(
    tokens: _I32, rows: _I32, lengths: _I32, min_match: int, max_match: int, max_guesses: int
) -> _I32:
    """How the texts tokens[row, :length] go on, as after the same tokens earlier in them.

    -> [rows, max_guesses]; -1 where the last `min_match` tokens of a text occur only once.
    """

class LinearWeight:
    """A packed matrix, or several stacked by rows. Made by Runtime.pack_linear."""

    @property
    def rows(self) -> int: ...
    @property
    def cols(self) -> int: ...
    @property
    def nbytes(self) -> int:
        """Bytes of the packed blocks, padding included."""
    @property
    def activations(self) -> str:
        """What w4 and w8 segments multiply: int8, int12 or bf16."""
    @property
    def formats(self) -> list[str]:
        """w4, w8, f16 or f32 of each segment; neighbours of one format are merged."""
    @property
    def has_bias(self) -> bool: ...
    def segments(self) -> list[tuple[str, int, _U8]]:
        """(format, rows, packed blocks) of each segment: read-only views of the weight's memory."""
    def unpack(self) -> _F32:
        """The values that the blocks stand for -> [rows, cols]."""

class Runtime:
    """Kernels of one instruction set, a number of threads, and the memory of weights."""

    def __init__(self, isa: str, num_threads: int) -> None:
        """isa: a name, or "" for the best one. Threads are shared by the whole process."""
    @property
    def isa(self) -> str: ...
    @property
    def has_tiles(self) -> bool:
        """The kernels read the tiled KV formats."""
    @property
    def has_bf16(self) -> bool:
        """The kernels multiply bf16 activations."""

    @property
    def num_threads(self) -> int: ...
    def pack_linear(
        self,
        parts: Sequence[tuple[int, int, int, _U8]],
        bias: _F32 | None = None,
        is_sensitive: bool = False,
        activations: str | None = None,
    ) -> LinearWeight:
        """Pack matrices given as (ggml type, rows, cols, raw blocks [bytes]); bias: [rows].

        activations: int8, int12, bf16 or None for the kernels' own choice.
        """
    def adopt_linear(
        self,
        segments: Sequence[tuple[str, int, _U8]],
        cols: int,
        bias: _F32 | None = None,
        is_sensitive: bool = False,
        activations: str | None = None,
    ) -> LinearWeight:
        """A weight over segments packed before, aligned to 64 bytes; keeps their memory alive."""
    def sample(self, logits: _F32, params: SamplingArrays) -> _Sampled:
        """Choose a token for each of `params.logit_rows`, which may be overwritten."""
    def best_allowed(self, logits: _F32, logit_rows: _I32, mask_words: _I32) -> _I32:
        """The largest logit [rows] of those whose bit in `mask_words` [rows, words] is set."""

class KVCache:
    """Zeroed paged KV cache of all layers; memory is committed as blocks are first used."""

    def __init__(
        self, num_layers: int, num_blocks: int, num_kv_heads: int, head_dim: int, format: str
    ) -> None: ...
    @property
    def num_blocks(self) -> int: ...
    @property
    def block_nbytes(self) -> int:
        """Bytes of one block over all layers."""
    def export_blocks(self, block_ids: _I32) -> _U8:
        """Copies of blocks -> [len(block_ids), block_nbytes]."""
    def import_blocks(self, block_ids: _I32, data: _U8) -> None:
        """Overwrite blocks with data [len(block_ids), block_nbytes]."""

class RmsNorm:
    """Weight [features] and epsilon of a norm."""

    def __init__(self, weight: _F32, eps: float) -> None: ...

class PlanShape:
    """What is fixed about a model besides its weights and its cache; inv_freq: [rope_dim / 2]."""

    vocab_size: int
    max_num_tokens: int
    max_num_seqs: int
    max_num_logits: int
    def __init__(
        self,
        num_heads: int,
        attention_scale: float,
        inv_freq: _F32,
        is_interleaved: bool,
        rope_attention_factor: float,
    ) -> None: ...

class Plan:
    """Ops in order, over buffers in one arena. Keeps alive what its ops refer to."""

    def __init__(
        self, runtime: Runtime, kv_cache: KVCache, shape: PlanShape, arena_nbytes: int
    ) -> None: ...
    def add_buffer(self, offset: int, features: int, is_logits: bool) -> int:
        """A buffer at a byte offset (multiple of 64) -> the id by which ops refer to it."""
    def add_embed(self, table: LinearWeight, out: int) -> None: ...
    def add_rms_norm(self, x: int, norm: RmsNorm, out: int) -> None: ...
    def add_linear(
        self,
        x: int,
        weight: LinearWeight,
        out: int,
        norm: RmsNorm | None,
        is_gated: bool,
        residual: int,
    ) -> None:
        """x is normalised, or gated, first; residual -1: none; out may be the residual."""
    def add_rope_and_cache(
        self, qkv: int, layer: int, q_norm: RmsNorm | None, k_norm: RmsNorm | None, out: int
    ) -> None: ...
    def add_attention(self, q: int, layer: int, out: int) -> None: ...
    def add_silu_mul(self, gate_up: int, out: int) -> None: ...
    def add_select(self, x: int, out: int) -> None: ...
    def finish(self, logits: int) -> None:
        """No op follows; `logits` is what run returns."""
    def run(self, batch: BatchArrays, signal: _U32 | None = None, expected: int = 0) -> _F32 | None:
        """Run one step -> logits [num_logits, vocab], a view valid until the next run.

        None if `signal` [1] was not `expected` at some moment before the last op.
        """
    def op_times(self) -> dict[str, float]:
        """Seconds that the first thread spent in each kind of op since the plan was made."""

class testing:  # noqa: N801 - a submodule
    """Single kernels of a named instruction set, for tests and benchmarks."""

    @staticmethod
    def linear(
        isa: str,
        x: _F32,
        weight: LinearWeight,
        num_threads: int = 1,
        prologue: str = "none",
        norm_weight: _F32 | None = None,
        eps: float = 0.0,
        residual: _F32 | None = None,
    ) -> _F32:
        """x: [tokens, cols]; prologue none, rms_norm or silu_mul (x: [tokens, 2 cols])."""
    @staticmethod
    def rms_norm(isa: str, x: _F32, weight: _F32, eps: float, num_threads: int = 1) -> _F32: ...
    @staticmethod
    def silu_mul(isa: str, gate_up: _F32, num_threads: int = 1) -> _F32: ...
    @staticmethod
    def embed(isa: str, input_ids: _I32, table: LinearWeight, num_threads: int = 1) -> _F32: ...
    @staticmethod
    def rope_table(
        isa: str,
        positions: _I32,
        inv_freq: _F32,
        attention_factor: float = 1.0,
        num_threads: int = 1,
    ) -> _F32:
        """cos and sin -> [tokens, 2, rope_dim / 2]."""
    @staticmethod
    def rope_and_cache(
        isa: str,
        qkv: _F32,
        batch: BatchArrays,
        cos_sin: _F32,
        cache: KVCache,
        layer: int = 0,
        is_interleaved: bool = False,
        q_norm: _F32 | None = None,
        k_norm: _F32 | None = None,
        eps: float = 0.0,
        num_threads: int = 1,
    ) -> _F32: ...
    @staticmethod
    def attention(
        isa: str,
        q: _F32,
        batch: BatchArrays,
        cache: KVCache,
        layer: int = 0,
        scale: float = 1.0,
        num_threads: int = 1,
    ) -> _F32: ...
    @staticmethod
    def shared_attention(
        batch: BatchArrays, num_heads: int, num_kv_heads: int, num_threads: int = 1
    ) -> list[tuple[int, int]]:
        """(sequences, splits of 256 tokens) of every task for sequences with blocks in common."""
    @staticmethod
    def sample(
        isa: str, logits: _F32, params: SamplingArrays, num_threads: int = 1
    ) -> _Sampled: ...
    @staticmethod
    def best_allowed(isa: str, logits: _F32, logit_rows: _I32, mask_words: _I32) -> _I32: ...
    @staticmethod
    def num_pool_threads() -> int:
        """Threads in the pool now, without the caller."""

class bench:  # noqa: N801 - a submodule
    """Timing loops; a list holds the seconds of each call, made for about `budget` seconds."""

    @staticmethod
    def peaks(isa: str, num_threads: int, budget: float, read_bytes: int) -> dict[str, float]:
        """Rates per second: int8_ops, fp32_ops, and read_bytes over a buffer of that size."""
    @staticmethod
    def linear(
        isa: str,
        format: str,
        rows: int,
        cols: int,
        num_tokens: int,
        num_threads: int,
        pool_bytes: int,
        budget: float,
    ) -> list[float]:
        """A linear over copies of a [rows, cols] matrix that fill `pool_bytes`, in turn.

        format: w4 (8-bit activations), w4 wide (12-bit), w8, f16 or f32.
        """
    @staticmethod
    def attention(
        isa: str, q: _F32, batch: BatchArrays, cache: KVCache, num_threads: int, budget: float
    ) -> list[float]:
        """Attention of each layer in turn."""
