"""The CPU backend: packs weights natively and records models as native plans."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from caudal import _native
from caudal.config import ActivationDType, KVCacheDType
from caudal.errors import ConfigError
from caudal.ops.cpu_recorder import CpuOps
from caudal.ops.interface import (
    BatchArrays,
    KVCacheSpec,
    PackedSegment,
    PlanSpec,
    RawMatrix,
    SamplingArrays,
    SamplingResult,
)
from caudal.ops.raw import add_rows, as_float32
from caudal.step_io import Interrupt, StepInterruptedError

logger = logging.getLogger(__name__)

BLOCK_SIZE = 16
"""Tokens per KV block in the kernels' layout."""


def kv_block_bytes(spec: KVCacheSpec) -> int:
    """Bytes of one KV block over all layers; int8 has a float32 scale per token and head."""
    per_token = spec.head_dim + 4 if spec.dtype is KVCacheDType.INT8 else 2 * spec.head_dim
    return spec.num_layers * spec.num_kv_heads * 2 * spec.block_size * per_token


class CpuPlan:
    """A compiled forward pass; `run` enters the thread pool once for the whole step."""

    def __init__(self, native: _native.Plan) -> None:
        self._native = native

    def run(self, batch: BatchArrays, interrupt: Interrupt | None = None) -> NDArray[np.float32]:
        """Run one step -> logits [num_logits, vocab], a view valid until the next run.

        Releases the GIL. Not thread-safe. Raises ValueError if the batch exceeds the plan's
        capacity, contradicts itself or names tokens, slots or blocks that do not exist; TypeError
        if an array is not int32 or not contiguous; StepInterruptedError, at most an operation
        after `interrupt` became due.
        """
        if interrupt is None:
            logits = self._native.run(batch)
        else:
            logits = self._native.run(batch, interrupt.signal, interrupt.expected)
        if logits is None:
            raise StepInterruptedError
        return logits

    def op_times(self) -> dict[str, float]:
        """Seconds spent in each kind of op since the plan was made."""
        return self._native.op_times()


class CpuBackend:
    """Owns the choice of kernels and the number of threads; weights are packed into its memory."""

    def __init__(
        self,
        num_threads: int,
        isa: str | None = None,
        activations: ActivationDType = ActivationDType.AUTO,
    ) -> None:
        """activations: AUTO for the kernels' own choice.

        Raises ConfigError if `isa` cannot run here or multiply `activations`, or if `num_threads`
        is out of range.
        """
        try:
            self._runtime = _native.Runtime(isa or "", num_threads)
        except ValueError as error:
            raise ConfigError(str(error)) from None
        if activations is ActivationDType.BF16 and not self._runtime.has_bf16:
            raise ConfigError(f"activation dtype bf16: the {self.isa} kernels do not have it")
        self._activations = activations
        logger.info("kernels: %s, %d threads", self.isa, self.num_threads)
        if self.isa == "ref":
            logger.warning("the portable kernels are in use: correct, but many times slower")

    @property
    def isa(self) -> str:
        """Name of the kernel set in use."""
        return self._runtime.isa

    @property
    def num_threads(self) -> int:
        """Compute threads, the caller included."""
        return self._runtime.num_threads

    def pack_linear(
        self,
        parts: Sequence[RawMatrix],
        bias: NDArray[np.float32] | None = None,
        *,
        is_sensitive: bool = False,
    ) -> _native.LinearWeight:
        """Pack one matrix, or several stacked by rows, with an optional bias [rows].

        is_sensitive: 4-bit weights meet 12-bit activations even where 8 bits are faster.
        Raises ValueError if a type is unknown, or sizes do not fit each other.
        """
        matrices = []
        for part in parts:
            rows, cols = part.shape
            data = np.ascontiguousarray(part.data).reshape(-1)
            matrices.append((int(part.ggml_type), rows, cols, data))
        if bias is not None:
            bias = np.ascontiguousarray(bias, dtype=np.float32)
        return self._runtime.pack_linear(
            matrices, bias, is_sensitive, self._activations_of(is_sensitive)
        )

    def _activations_of(self, is_sensitive: bool) -> str | None:
        """The kernels' name; None for their own choice."""
        if self._activations is ActivationDType.AUTO:
            return None
        if self._activations is ActivationDType.INT8 and is_sensitive:
            return str(ActivationDType.INT12)
        return str(self._activations)

    def packed_layout(self) -> str:
        """Instruction set and checksum of the native module: only it knows its layout."""
        code = Path(_native.__file__).read_bytes()
        return f"{self.isa}-{hashlib.sha256(code).hexdigest()}"

    def export_linear(self, weight: _native.LinearWeight) -> list[PackedSegment]:
        """Views of the weight's memory."""
        return [PackedSegment(*segment) for segment in weight.segments()]

    def adopt_linear(
        self,
        segments: Sequence[PackedSegment],
        cols: int,
        bias: NDArray[np.float32] | None = None,
        *,
        is_sensitive: bool = False,
    ) -> _native.LinearWeight:
        """A weight over exported segments, used where they lie.

        Raises ValueError if sizes or alignment do not fit.
        """
        packed = [(s.format, s.rows, s.blocks) for s in segments]
        return self._runtime.adopt_linear(
            packed, cols, bias, is_sensitive, self._activations_of(is_sensitive)
        )

    def pack_vector(self, part: RawMatrix) -> NDArray[np.float32]:
        """A norm weight or bias as float32 [size]."""
        return as_float32(part).reshape(-1)

    def create_kv_cache(self, spec: KVCacheSpec) -> _native.KVCache:
        """A zeroed cache; memory is committed as blocks are first used.

        Raises ConfigError if the kernels do not support the shape, MemoryError if the system
        refuses the address space.
        """
        if spec.block_size != BLOCK_SIZE:
            raise ConfigError(f"block_size: the kernels need {BLOCK_SIZE}, got {spec.block_size}")
        try:
            return _native.KVCache(
                spec.num_layers,
                spec.num_blocks,
                spec.num_kv_heads,
                spec.head_dim,
                self._kv_format(spec.dtype),
            )
        except ValueError as error:
            raise ConfigError(str(error)) from None

    def kv_cache_dtype(self, asked: KVCacheDType) -> KVCacheDType:
        """What `asked` means on this CPU: AUTO is bf16 with a tile unit, else f16.

        Raises ConfigError for bf16 without a tile unit.
        """
        if asked is KVCacheDType.AUTO:
            return KVCacheDType.BF16 if self._has_tile_unit else KVCacheDType.F16
        if asked is KVCacheDType.BF16 and not self._runtime.has_tiles:
            raise ConfigError(
                f"kv_cache_dtype: bf16 needs a CPU with AMX, and the kernels here are {self.isa}; "
                "use f16 or int8"
            )
        return asked

    @property
    def _has_tile_unit(self) -> bool:
        return self._runtime.has_tiles and self.isa != "ref"

    def _kv_format(self, dtype: KVCacheDType) -> str:
        """The layout that the kernels read fastest; see csrc/cpu/kernels.h."""
        is_tiled = dtype is KVCacheDType.BF16 or (
            dtype is KVCacheDType.INT8 and self._has_tile_unit
        )
        return f"{dtype}_tiles" if is_tiled else str(dtype)

    def compile(
        self,
        forward: Callable[[CpuOps], object],
        spec: PlanSpec,
        kv_cache: _native.KVCache,
    ) -> CpuPlan:
        """Record `forward` once, fuse, place the buffers and build the native plan.

        Raises ValueError if shapes within the model do not fit each other.
        """
        ops = CpuOps(spec)
        logits = forward(ops)
        return CpuPlan(ops.build(logits, self._runtime, kv_cache))

    def sample(self, logits: NDArray[np.float32], params: SamplingArrays) -> SamplingResult:
        """Choose a token for each of `params.logit_rows`, which may be overwritten.

        Raises ValueError if the arrays of `params` do not fit the logits or each other.
        """
        return SamplingResult(*self._runtime.sample(logits, params))

    def best_allowed(
        self,
        logits: NDArray[np.float32],
        logit_rows: NDArray[np.int32],
        mask_words: NDArray[np.int32],
    ) -> NDArray[np.int32]:
        """See Backend.best_allowed; takes a few microseconds a row where little is allowed."""
        return self._runtime.best_allowed(logits, logit_rows, mask_words)

    def add_rows(self, hidden: NDArray[np.float32], sums: NDArray[np.float64]) -> None:
        """Add the rows of `hidden` [rows, features] to `sums` [features], one after the other."""
        add_rows(hidden, sums)
