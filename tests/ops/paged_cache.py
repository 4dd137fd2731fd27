"""A paged KV cache filled from plain arrays, with garbage wherever no token lies."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from caudal import _native
from caudal.ops.interface import BatchArrays

F32 = NDArray[np.float32]
BLOCK = 16


@dataclass(frozen=True)
class Heads:
    """Attention heads of a layer, and the layout of its cache (csrc/cpu/kernels.h)."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    kv_format: str = "f16"

    @property
    def is_tiled(self) -> bool:
        return self.kv_format.endswith("_tiles")

    @property
    def value_nbytes(self) -> int:
        """Bytes of one key or value component."""
        return 1 if self.kv_format.startswith("int8") else 2

    @property
    def head_nbytes(self) -> int:
        scales = 0 if self.kv_format == "f16" else 8 * BLOCK
        return 2 * BLOCK * self.head_dim * self.value_nbytes + scales


def supported_formats(isa: str) -> list[str]:
    """Layouts that the attention of an instruction set reads."""
    tiled = ["int8_tiles", "int16_tiles"] if _native.Runtime(isa, 1).has_tiles else []
    return ["f16", "int8", *tiled]


def quantize(x: F32, largest: float) -> tuple[NDArray[np.int32], F32]:
    """Integers with one scale per token and head: (values, scales [tokens, heads])."""
    absmax = np.abs(x).max(axis=-1)
    inverse = np.float32(largest) / absmax
    values = np.rint(x * inverse[..., None]).astype(np.int32)
    return values, np.asarray(absmax / np.float32(largest), dtype=np.float32)


def pack_tiles(heads: Heads, keys: F32, values: F32) -> list[NDArray[np.generic]]:
    """Parts of the tiled formats: planes of keys, planes of values, scales of both."""
    num_blocks = len(keys) // BLOCK
    groups = {
        "keys": (num_blocks, BLOCK, heads.num_kv_heads, heads.head_dim // 4, 4),
        "values": (num_blocks, BLOCK // 4, 4, heads.num_kv_heads, heads.head_dim),
    }
    orders = {"keys": (0, 2, 3, 1, 4), "values": (0, 3, 1, 4, 2)}
    planes: list[NDArray[np.generic]] = []
    scales: list[NDArray[np.generic]] = []
    for name, x in (("keys", keys), ("values", values)):
        quant, scale = quantize(x, 127.0 if heads.value_nbytes == 1 else 32512.0)
        high = quant if heads.value_nbytes == 1 else (quant + 128) >> 8
        for byte in [high, quant - 256 * high][: heads.value_nbytes]:
            planes.append(byte.astype(np.int8).reshape(groups[name]).transpose(orders[name]))
        scales.append(scale.reshape(num_blocks, BLOCK, heads.num_kv_heads).transpose(0, 2, 1))
    return [*planes, *scales]


def unpack_tiles(heads: Heads, per_head: NDArray[np.uint8]) -> tuple[F32, F32]:
    """The opposite, from [blocks, kv heads, head bytes]: [blocks, 16, kv heads, head_dim] each."""
    plane = BLOCK * heads.head_dim
    num_blocks = len(per_head)
    count = heads.value_nbytes
    raw = np.ascontiguousarray(per_head[..., : 2 * count * plane]).view(np.int8).astype(np.int32)
    planes = raw.reshape(num_blocks, heads.num_kv_heads, 2, count, plane)
    integers = planes[..., 0, :] if count == 1 else 256 * planes[..., 0, :] + planes[..., 1, :]
    lead = (num_blocks, heads.num_kv_heads)
    k = integers[:, :, 0].reshape(*lead, heads.head_dim // 4, BLOCK, 4).transpose(0, 3, 1, 2, 4)
    v = integers[:, :, 1].reshape(*lead, BLOCK // 4, heads.head_dim, 4).transpose(0, 2, 4, 1, 3)
    shape = (num_blocks, BLOCK, heads.num_kv_heads, heads.head_dim)
    scales = np.ascontiguousarray(per_head[..., 2 * count * plane :]).view(np.float32)
    k_scale, v_scale = (
        scales[..., begin : begin + BLOCK].transpose(0, 2, 1)[..., None] for begin in (0, BLOCK)
    )
    with np.errstate(invalid="ignore", over="ignore"):
        keys = (k.reshape(shape) * k_scale).astype(np.float32)
        values = (v.reshape(shape) * v_scale).astype(np.float32)
    return keys, values


def pack_blocks(heads: Heads, keys: F32, values: F32) -> NDArray[np.uint8]:
    """keys and values [tokens, kv heads, head_dim], tokens a multiple of 16, in the layout of
    csrc/cpu/kernels.h -> [blocks, kv heads * head bytes]."""
    num_blocks, head_dim = len(keys) // BLOCK, heads.head_dim
    shape = (num_blocks, BLOCK, heads.num_kv_heads, head_dim)
    parts: list[NDArray[np.generic]]
    if heads.is_tiled:
        parts = pack_tiles(heads, keys, values)
    elif heads.kv_format == "int8":
        (k, k_scale), (v, v_scale) = quantize(keys, 127.0), quantize(values, 127.0)
        scale_shape = (num_blocks, BLOCK, heads.num_kv_heads)
        parts = [
            k.astype(np.int8).reshape(*shape[:3], head_dim // 2, 2).transpose(0, 2, 3, 1, 4),
            v.astype(np.int8)
            .reshape(num_blocks, BLOCK // 2, 2, *shape[2:])
            .transpose(0, 3, 1, 4, 2),
            k_scale.reshape(scale_shape).transpose(0, 2, 1),
            v_scale.reshape(scale_shape).transpose(0, 2, 1),
        ]
    else:
        k16, v16 = (x.astype(np.float16).reshape(shape) for x in (keys, values))
        parts = [k16.transpose(0, 2, 3, 1), v16.transpose(0, 2, 1, 3)]
    flat = [
        np.ascontiguousarray(part).view(np.uint8).reshape(num_blocks, heads.num_kv_heads, -1)
        for part in parts
    ]
    return np.concatenate(flat, axis=2).reshape(num_blocks, -1)


def unpack_blocks(heads: Heads, data: NDArray[np.uint8]) -> tuple[F32, F32]:
    """The opposite of pack_blocks: keys and values [tokens, kv heads, head_dim] as stored."""
    num_blocks, head_dim = len(data), heads.head_dim
    per_head = data.reshape(num_blocks, heads.num_kv_heads, heads.head_nbytes)
    shape = (num_blocks * BLOCK, heads.num_kv_heads, head_dim)
    if heads.is_tiled:
        keys, values = unpack_tiles(heads, per_head)
        return keys.reshape(shape), values.reshape(shape)
    half = BLOCK * head_dim * heads.value_nbytes
    raw_k, raw_v = (
        np.ascontiguousarray(per_head[..., begin : begin + half]) for begin in (0, half)
    )
    if heads.kv_format == "int8":
        scales = np.ascontiguousarray(per_head[..., 2 * half :]).view(np.float32)
        k8 = raw_k.view(np.int8).reshape(num_blocks, -1, head_dim // 2, BLOCK, 2)
        v8 = raw_v.view(np.int8).reshape(num_blocks, -1, BLOCK // 2, head_dim, 2)
        k = k8.transpose(0, 3, 1, 2, 4).reshape(num_blocks, BLOCK, -1, head_dim)
        v = v8.transpose(0, 2, 4, 1, 3).reshape(num_blocks, BLOCK, -1, head_dim)
        k_scale, v_scale = (
            scales[..., begin : begin + BLOCK].transpose(0, 2, 1)[..., None] for begin in (0, BLOCK)
        )
        with np.errstate(invalid="ignore", over="ignore"):
            keys, values = k * k_scale, v * v_scale
    else:
        k16 = raw_k.view(np.float16).reshape(num_blocks, -1, head_dim, BLOCK)
        v16 = raw_v.view(np.float16).reshape(num_blocks, -1, BLOCK, head_dim)
        keys = k16.transpose(0, 3, 1, 2).astype(np.float32)
        values = v16.transpose(0, 2, 1, 3).astype(np.float32)
    return keys.reshape(shape), values.reshape(shape)


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


class PagedCache:
    """One layer whose sequences lie in shuffled blocks; every other slot holds `garbage`."""

    def __init__(
        self, heads: Heads, lengths: list[int], seed: int = 0, garbage: float = float("nan")
    ) -> None:
        rng = np.random.default_rng(seed)
        self.heads = heads
        self.lengths = lengths
        counts = [ceil_div(n, BLOCK) for n in lengths]
        ids = rng.permutation(sum(counts) + 3).astype(np.int32)
        self.cache = _native.KVCache(
            1, len(ids), heads.num_kv_heads, heads.head_dim, heads.kv_format
        )
        ends = np.cumsum([0, *counts])
        self.tables = [ids[a:b] for a, b in pairwise(ends)]
        self.keys: list[F32] = []
        self.values: list[F32] = []
        self._garbage = np.float32(garbage)
        for i, n in enumerate(lengths):
            shape = (2, n, heads.num_kv_heads, heads.head_dim)
            keys, values = rng.normal(size=shape).astype(np.float32)
            self.keys.append(keys)
            self.values.append(values)
            self.write(i, keys, values)
        self._fill(ids[ends[-1] :])

    def write(self, seq: int, keys: F32, values: F32) -> None:
        """Store a sequence; slots after its end get garbage."""
        padding = ((0, -len(keys) % BLOCK), (0, 0), (0, 0))
        padded = [np.pad(x, padding, constant_values=self._garbage) for x in (keys, values)]
        with np.errstate(invalid="ignore"):
            data = pack_blocks(self.heads, *padded)
        self.cache.import_blocks(self.tables[seq], data)
        stored = unpack_blocks(self.heads, self.cache.export_blocks(self.tables[seq]))
        self.keys[seq : seq + 1], self.values[seq : seq + 1] = ([x[: len(keys)]] for x in stored)

    def _fill(self, ids: NDArray[np.int32]) -> None:
        shape = (len(ids) * BLOCK, self.heads.num_kv_heads, self.heads.head_dim)
        blocks = np.full(shape, self._garbage, dtype=np.float32)
        with np.errstate(invalid="ignore"):
            self.cache.import_blocks(ids, pack_blocks(self.heads, blocks, blocks))

    def batch(self, parts: list[tuple[int, int, int]]) -> BatchArrays:
        """A step of (sequence, first query position, number of queries) each."""
        num_queries = [n for _, _, n in parts]
        seq_lens = [first + n for _, first, n in parts]
        positions = np.concatenate([np.arange(first, first + n) for _, first, n in parts])
        width = max(map(len, self.tables))
        tables = [np.pad(self.tables[seq], (0, width - len(self.tables[seq]))) for seq, *_ in parts]
        sequences = np.repeat([seq for seq, *_ in parts], num_queries)
        slots = [
            int(self.tables[s][p // BLOCK]) * BLOCK + p % BLOCK
            for s, p in zip(sequences, positions, strict=True)
        ]
        return BatchArrays(
            input_ids=np.zeros(len(positions), dtype=np.int32),
            positions=positions.astype(np.int32),
            slot_mapping=np.array(slots, dtype=np.int32),
            query_start_loc=np.cumsum([0, *num_queries], dtype=np.int32),
            seq_lens=np.array(seq_lens, dtype=np.int32),
            block_tables=np.array(tables, dtype=np.int32),
            logits_indices=np.zeros(0, dtype=np.int32),
        )
