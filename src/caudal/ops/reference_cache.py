"""The oracle's KV cache: plain arrays, rounded as the kernels' cache rounds."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from caudal.config import KVCacheDType
from caudal.ops.interface import KVCacheSpec

F32 = NDArray[np.float32]


class ReferenceKVCache:
    """Keys and values [layers, 2, slots, kv heads, head_dim] as float32 after rounding."""

    def __init__(self, spec: KVCacheSpec) -> None:
        self.spec = spec
        num_slots = spec.num_blocks * spec.block_size
        shape = (spec.num_layers, 2, num_slots, spec.num_kv_heads, spec.head_dim)
        self._data = np.zeros(shape, dtype=np.float32)

    def write(self, layer: int, slots: NDArray[np.int32], keys: F32, values: F32) -> None:
        """Store keys and values [num_tokens, kv heads, head_dim] at `slots`."""
        store = _STORE[self.spec.dtype]
        self._data[layer, 0, slots] = store(keys)
        self._data[layer, 1, slots] = store(values)

    def read(self, layer: int, block_table: NDArray[np.int32], num_tokens: int) -> tuple[F32, F32]:
        """Keys and values of a sequence: two [num_tokens, kv heads, head_dim]."""
        tokens = np.arange(num_tokens)
        size = self.spec.block_size
        slots = block_table[tokens // size].astype(np.int64) * size + tokens % size
        return self._data[layer, 0, slots], self._data[layer, 1, slots]

    def export_blocks(self, block_ids: NDArray[np.int32]) -> NDArray[np.uint8]:
        """The content of blocks: uint8 [blocks, bytes], to be imported by a cache of this kind."""
        blocks = self._blocks()[:, :, block_ids]
        ordered = np.ascontiguousarray(np.moveaxis(blocks, 2, 0)).reshape(len(block_ids), -1)
        return ordered.view(np.uint8)

    def import_blocks(self, block_ids: NDArray[np.int32], data: NDArray[np.uint8]) -> None:
        """Overwrite blocks with what `export_blocks` gave."""
        blocks = self._blocks()
        shape = (len(block_ids), *blocks.shape[:2], *blocks.shape[3:])
        blocks[:, :, block_ids] = np.moveaxis(data.view(np.float32).reshape(shape), 0, 2)

    def _blocks(self) -> F32:
        """A view [layers, 2, blocks, block_size, kv heads, head_dim]."""
        layers, two, _, heads, head_dim = self._data.shape
        return self._data.reshape(layers, two, -1, self.spec.block_size, heads, head_dim)


def round_f16(x: F32) -> F32:
    """x as float16 keeps it."""
    with np.errstate(over="ignore"):
        return x.astype(np.float16).astype(np.float32)


def round_int8(x: F32) -> F32:
    """x as int8 with one scale per token and head keeps it."""
    largest = np.float32(127)
    absmax = np.abs(x).max(axis=-1, keepdims=True)
    scale = absmax / largest
    inverse = largest / np.where(absmax == 0, np.float32(1), absmax)
    return np.asarray(np.rint(x * inverse) * scale, dtype=np.float32)


def round_to_bf16(x: F32) -> F32:
    """The nearest values with eight significant bits, ties to even; any shape."""
    bits = np.ascontiguousarray(x).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> 16) & np.uint32(1))) & np.uint32(0xFFFF0000)
    return rounded.view(np.float32)


_STORE: dict[KVCacheDType, Callable[[F32], F32]] = {
    KVCacheDType.F16: round_f16,
    KVCacheDType.BF16: round_to_bf16,
    KVCacheDType.INT8: round_int8,
}
