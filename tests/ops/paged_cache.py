"""A paged KV cache filled from plain arrays, with garbage wherever no token lies."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

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
        scales = 8 * BLOCK if self.kv_format.startswith("int") else 0
        return 2 * BLOCK * self.head_dim * self.value_nbytes + scales


def supported_formats(isa: str) -> list[str]:
    """Layouts that the attention of an instruction set reads."""
    tiled = ["int8_tiles", "bf16_tiles"] if _native.Runtime(isa, 1).has_tiles else []
    return ["f16", "int8", *tiled]


def quantize(x: F32, largest: float) -> tuple[NDArray[np.int32], F32]:
    """Integers with one scale per token and head: (values, scales [tokens, heads])."""
    absmax = np.abs(x).max(axis=-1)
    inverse = np.float32(largest) / absmax
    values = np.rint(x * inverse[..., None]).astype(np.int32)
    return values, np.asarray(absmax / np.float32(largest), dtype=np.float32)


def pack_int8(heads: Heads, keys: F32, values: F32) -> list[NDArray[np.generic]]:
    """Keys [blocks, heads, head_dim / n, 16, n], values [blocks, heads, 16 / n, head_dim, n], and
    the scales of both; n is 4 in tiles, else 2."""
    n = 4 if heads.is_tiled else 2
    lead = (len(keys) // BLOCK, BLOCK, heads.num_kv_heads)
    (k, k_scale), (v, v_scale) = quantize(keys, 127.0), quantize(values, 127.0)
    return [
        k.astype(np.int8).reshape(*lead, heads.head_dim // n, n).transpose(0, 2, 3, 1, 4),
        v.astype(np.int8)
        .reshape(lead[0], BLOCK // n, n, heads.num_kv_heads, heads.head_dim)
        .transpose(0, 3, 1, 4, 2),
        k_scale.reshape(lead).transpose(0, 2, 1),
        v_scale.reshape(lead).transpose(0, 2, 1),
    ]


def unpack_grouped(heads: Heads, k: NDArray[Any], v: NDArray[Any], n: int) -> tuple[F32, F32]:
    """The opposite for keys and values: [blocks, 16, kv heads, head_dim] each."""
    lead = (len(k), heads.num_kv_heads)
    keys = k.reshape(*lead, heads.head_dim // n, BLOCK, n).transpose(0, 3, 1, 2, 4)
    values = v.reshape(*lead, BLOCK // n, heads.head_dim, n).transpose(0, 2, 4, 1, 3)
    shape = (lead[0], BLOCK, heads.num_kv_heads, heads.head_dim)
    return keys.reshape(shape).astype(np.float32), values.reshape(shape).astype(np.float32)


def to_bf16(x: F32) -> NDArray[np.uint16]:
    """Nearest even; NaN stays NaN."""
    bits = np.ascontiguousarray(x).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(x), 0x7FC0, rounded).astype(np.uint16)


def from_bf16(x: NDArray[np.uint16]) -> F32:
    return (x.astype(np.uint32) << 16).view(np.float32)


def pack_blocks(heads: Heads, keys: F32, values: F32) -> NDArray[np.uint8]:
    """keys and values [tokens, kv heads, head_dim], tokens a multiple of 16, in the layout of
    csrc/cpu/kernels.h -> [blocks, kv heads * head bytes]."""
    num_blocks, head_dim = len(keys) // BLOCK, heads.head_dim
    shape = (num_blocks, BLOCK, heads.num_kv_heads, head_dim)
    parts: list[NDArray[np.generic]]
    if heads.kv_format.startswith("int8"):
        parts = pack_int8(heads, keys, values)
    elif heads.kv_format == "bf16_tiles":
        # Values are finite: a broken one shows in its key.
        is_broken = ~np.isfinite(values)
        k16 = to_bf16(np.where(is_broken.any(axis=-1, keepdims=True), np.float32("nan"), keys))
        v16 = to_bf16(np.where(is_broken, np.float32(0), values))
        parts = [
            k16.reshape(*shape[:3], head_dim // 2, 2).transpose(0, 2, 3, 1, 4),
            v16.reshape(num_blocks, BLOCK // 2, 2, *shape[2:]).transpose(0, 3, 1, 4, 2),
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
    half = BLOCK * head_dim * heads.value_nbytes
    raw_k, raw_v = (
        np.ascontiguousarray(per_head[..., begin : begin + half]) for begin in (0, half)
    )
    if heads.kv_format.startswith("int8"):
        n = 4 if heads.is_tiled else 2
        keys, values = unpack_grouped(heads, raw_k.view(np.int8), raw_v.view(np.int8), n)
        scales = np.ascontiguousarray(per_head[..., 2 * half :]).view(np.float32)
        k_scale, v_scale = (
            scales[..., begin : begin + BLOCK].transpose(0, 2, 1)[..., None] for begin in (0, BLOCK)
        )
        with np.errstate(invalid="ignore", over="ignore"):
            keys, values = keys * k_scale, values * v_scale
    elif heads.kv_format == "bf16_tiles":
        k32, v32 = (from_bf16(raw.view(np.uint16)) for raw in (raw_k, raw_v))
        keys, values = unpack_grouped(heads, k32, v32, 2)
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

    def share(self, source: int, seq: int, num_blocks: int) -> None:
        """Let `seq` begin with the first blocks of `source`."""
        num_tokens = num_blocks * BLOCK
        self.tables[seq] = np.concatenate(
            [self.tables[source][:num_blocks], self.tables[seq][num_blocks:]]
        )
        for stored in (self.keys, self.values):
            stored[seq][:num_tokens] = stored[source][:num_tokens]

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
