"""Scalar decoders of one block each, written from the block definitions: the tests' oracle."""

from __future__ import annotations

import struct
from collections.abc import Callable

from caudal.weights.ggml_types import GGMLType


def _half(block: bytes, offset: int) -> float:
    value: float = struct.unpack_from("<e", block, offset)[0]
    return value


def f32(block: bytes) -> list[float]:
    return list(struct.unpack("<f", block))


def f16(block: bytes) -> list[float]:
    return [_half(block, 0)]


def bf16(block: bytes) -> list[float]:
    return list(struct.unpack("<f", b"\0\0" + block))


def q4_0(block: bytes) -> list[float]:
    d, values = _half(block, 0), [0.0] * 32
    for j in range(16):
        values[j] = d * ((block[2 + j] & 0x0F) - 8)
        values[j + 16] = d * ((block[2 + j] >> 4) - 8)
    return values


def q4_1(block: bytes) -> list[float]:
    d, m, values = _half(block, 0), _half(block, 2), [0.0] * 32
    for j in range(16):
        values[j] = d * (block[4 + j] & 0x0F) + m
        values[j + 16] = d * (block[4 + j] >> 4) + m
    return values


def _five_bits(block: bytes, high_offset: int) -> list[int]:
    high = int.from_bytes(block[high_offset : high_offset + 4], "little")
    low = block[high_offset + 4 :]
    values = [0] * 32
    for j in range(16):
        values[j] = (low[j] & 0x0F) + 16 * (high >> j & 1)
        values[j + 16] = (low[j] >> 4) + 16 * (high >> (j + 16) & 1)
    return values


def q5_0(block: bytes) -> list[float]:
    return [_half(block, 0) * (q - 16) for q in _five_bits(block, 2)]


def q5_1(block: bytes) -> list[float]:
    return [_half(block, 0) * q + _half(block, 2) for q in _five_bits(block, 4)]


def q8_0(block: bytes) -> list[float]:
    return [_half(block, 0) * q for q in struct.unpack_from("<32b", block, 2)]


def _scale_and_minimum(scales: bytes, j: int) -> tuple[int, int]:
    if j < 4:
        return scales[j] & 63, scales[j + 4] & 63
    scale = (scales[j + 4] & 0x0F) + 16 * (scales[j - 4] >> 6)
    minimum = (scales[j + 4] >> 4) + 16 * (scales[j] >> 6)
    return scale, minimum


def q4_k(block: bytes) -> list[float]:
    d, dmin, values = _half(block, 0), _half(block, 2), []
    for j in range(8):
        scale, minimum = _scale_and_minimum(block[4:16], j)
        for i in range(32):
            byte = block[16 + 32 * (j // 2) + i]
            q = byte >> 4 if j % 2 else byte & 0x0F
            values.append(d * scale * q - dmin * minimum)
    return values


def q5_k(block: bytes) -> list[float]:
    d, dmin, values = _half(block, 0), _half(block, 2), []
    for j in range(8):
        scale, minimum = _scale_and_minimum(block[4:16], j)
        for i in range(32):
            byte = block[48 + 32 * (j // 2) + i]
            q = byte >> 4 if j % 2 else byte & 0x0F
            q += 16 * (block[16 + i] >> j & 1)
            values.append(d * scale * q - dmin * minimum)
    return values


def q6_k(block: bytes) -> list[float]:
    d, values = _half(block, 208), [0.0] * 256
    scales = struct.unpack_from("<16b", block, 192)
    for half in range(2):
        for i in range(32):
            high = block[128 + 32 * half + i]
            first, second = block[64 * half + i], block[64 * half + 32 + i]
            quarters = [
                (first & 0x0F) + 16 * (high & 3),
                (second & 0x0F) + 16 * (high >> 2 & 3),
                (first >> 4) + 16 * (high >> 4 & 3),
                (second >> 4) + 16 * (high >> 6 & 3),
            ]
            for quarter, q in enumerate(quarters):
                index = 128 * half + 32 * quarter + i
                values[index] = d * scales[index // 16] * (q - 32)
    return values


SCALAR_DECODERS: dict[GGMLType, Callable[[bytes], list[float]]] = {
    GGMLType.F32: f32,
    GGMLType.F16: f16,
    GGMLType.BF16: bf16,
    GGMLType.Q4_0: q4_0,
    GGMLType.Q4_1: q4_1,
    GGMLType.Q5_0: q5_0,
    GGMLType.Q5_1: q5_1,
    GGMLType.Q8_0: q8_0,
    GGMLType.Q4_K: q4_k,
    GGMLType.Q5_K: q5_k,
    GGMLType.Q6_K: q6_k,
}

HALF_OFFSETS: dict[GGMLType, tuple[int, ...]] = {
    GGMLType.F16: (0,),
    GGMLType.Q4_0: (0,),
    GGMLType.Q4_1: (0, 2),
    GGMLType.Q5_0: (0,),
    GGMLType.Q5_1: (0, 2),
    GGMLType.Q8_0: (0,),
    GGMLType.Q4_K: (0, 2),
    GGMLType.Q5_K: (0, 2),
    GGMLType.Q6_K: (208,),
}
"""Where a block has float16 fields."""
