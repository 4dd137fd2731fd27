"""Plain quantisers from float32 to every supported GGML type, for making test files.

Each takes float32 [..., columns] and returns uint8 [..., row bytes]. They follow the block
definitions, not ggml's search for the best scale: good enough for random weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from caudal.weights.ggml_types import GGMLType

F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]
Array = npt.NDArray[Any]


def _bytes(values: npt.NDArray[np.generic]) -> U8:
    return np.ascontiguousarray(values).view(np.uint8)


def _half(values: Array) -> F32:
    """Rounded to float16, so that quantising uses the scale a reader will see."""
    return values.astype(np.float16).astype(np.float32)


def _safe_divide(values: Array, scale: Array) -> Array:
    return values / np.where(scale == 0, np.float32(1), scale)


def _rows(blocks: U8, shape: tuple[int, ...]) -> U8:
    return blocks.reshape(*shape[:-1], -1)


def quantize_f32(values: F32) -> U8:
    return _bytes(values.astype("<f4"))


def quantize_f16(values: F32) -> U8:
    return _bytes(values.astype("<f2"))


def quantize_bf16(values: F32) -> U8:
    bits = values.astype("<f4").view("<u4")
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return _bytes(rounded.astype("<u2"))


def _nibbles(q: Array) -> Array:
    """[n, 32] values of 0..15 -> [n, 16]: value j low, value j + 16 high."""
    packed: Array = q[:, :16] | (q[:, 16:] << 4)
    return packed


def _fifth_bits(q: Array) -> Array:
    """[n, 32] values of 0..31 -> [n, 4]: bit 4 of value j is bit j of a little-endian word."""
    return np.packbits(q >> 4, axis=1, bitorder="little")


def _symmetric(x: F32, half_range: int) -> tuple[F32, U8]:
    """Scale from the value of largest magnitude, which maps to -half_range."""
    extreme = np.take_along_axis(x, np.abs(x).argmax(axis=1)[:, None], axis=1)
    d = _half(extreme / -half_range)
    q = np.rint(_safe_divide(x, d)) + half_range
    return d, q.clip(0, 2 * half_range - 1).astype(np.uint8)


def _affine(x: F32, levels: int) -> tuple[F32, F32, U8]:
    low = _half(x.min(axis=1, keepdims=True))
    d = _half((x.max(axis=1, keepdims=True) - low) / levels)
    q = np.rint(_safe_divide(x - low, d)).clip(0, levels).astype(np.uint8)
    return d, low, q


def quantize_q4_0(values: F32) -> U8:
    d, q = _symmetric(values.reshape(-1, 32), 8)
    return _rows(np.hstack([quantize_f16(d), _nibbles(q)]), values.shape)


def quantize_q4_1(values: F32) -> U8:
    d, m, q = _affine(values.reshape(-1, 32), 15)
    return _rows(np.hstack([quantize_f16(d), quantize_f16(m), _nibbles(q)]), values.shape)


def quantize_q5_0(values: F32) -> U8:
    d, q = _symmetric(values.reshape(-1, 32), 16)
    blocks = [quantize_f16(d), _fifth_bits(q), _nibbles(q & 15)]
    return _rows(np.hstack(blocks), values.shape)


def quantize_q5_1(values: F32) -> U8:
    d, m, q = _affine(values.reshape(-1, 32), 31)
    blocks = [quantize_f16(d), quantize_f16(m), _fifth_bits(q), _nibbles(q & 15)]
    return _rows(np.hstack(blocks), values.shape)


def quantize_q8_0(values: F32) -> U8:
    x = values.reshape(-1, 32)
    d = _half(np.abs(x).max(axis=1, keepdims=True) / 127)
    q = np.rint(_safe_divide(x, d)).clip(-127, 127).astype(np.int8)
    return _rows(np.hstack([quantize_f16(d), _bytes(q)]), values.shape)


def _k_scales(values: F32, levels: int) -> tuple[U8, U8]:
    """Head of a Q4_K or Q5_K block and its values [n, 8, 32] of 0..levels."""
    x = values.reshape(-1, 8, 32)
    low = np.minimum(x.min(axis=2), 0)
    scale = (x.max(axis=2) - low) / levels
    d = _half(scale.max(axis=1, keepdims=True) / 63)
    dmin = _half(-low.min(axis=1, keepdims=True) / 63)
    sc = np.rint(_safe_divide(scale, d)).clip(0, 63).astype(np.uint8)
    mn = np.rint(_safe_divide(-low, dmin)).clip(0, 63).astype(np.uint8)
    step = (d * sc)[:, :, None]
    offset = (dmin * mn)[:, :, None]
    q = np.rint(_safe_divide(x + offset, step)).clip(0, levels).astype(np.uint8)
    packed = np.hstack(
        [
            sc[:, :4] | ((sc[:, 4:] >> 4) << 6),
            mn[:, :4] | ((mn[:, 4:] >> 4) << 6),
            (sc[:, 4:] & 15) | ((mn[:, 4:] & 15) << 4),
        ]
    )
    return np.hstack([quantize_f16(d), quantize_f16(dmin), packed]), q


def _k_nibbles(q: Array) -> Array:
    """[n, 8, 32] -> [n, 128]: sub-block 2c in the low, 2c + 1 in the high nibbles."""
    return ((q[:, 0::2] & 15) | ((q[:, 1::2] & 15) << 4)).reshape(len(q), 128)


def quantize_q4_k(values: F32) -> U8:
    head, q = _k_scales(values, 15)
    return _rows(np.hstack([head, _k_nibbles(q)]), values.shape)


def quantize_q5_k(values: F32) -> U8:
    head, q = _k_scales(values, 31)
    weights = (1 << np.arange(8, dtype=np.uint8))[None, :, None]
    high = ((q >> 4) * weights).sum(axis=1).astype(np.uint8)
    return _rows(np.hstack([head, high, _k_nibbles(q)]), values.shape)


def quantize_q6_k(values: F32) -> U8:
    x = values.reshape(-1, 16, 16)
    scale = np.abs(x).max(axis=2) / 31
    d = _half(scale.max(axis=1, keepdims=True) / 127)
    sc = np.rint(_safe_divide(scale, d)).clip(1, 127).astype(np.int8)
    step = (d * sc)[:, :, None]
    q = (np.rint(_safe_divide(x, step)).clip(-32, 31) + 32).astype(np.uint8)
    q = q.reshape(-1, 2, 4, 32)  # half, quarter, value
    low = (q[:, :, :2] & 15) | ((q[:, :, 2:] & 15) << 4)
    shifts = np.array([0, 2, 4, 6], np.uint8)[None, None, :, None]
    high = ((q >> 4) << shifts).sum(axis=2).astype(np.uint8)
    n = len(q)
    blocks = [low.reshape(n, 128), high.reshape(n, 64), _bytes(sc), quantize_f16(d)]
    return _rows(np.hstack(blocks), values.shape)


QUANTIZERS: dict[GGMLType, Callable[[F32], U8]] = {
    GGMLType.F32: quantize_f32,
    GGMLType.F16: quantize_f16,
    GGMLType.BF16: quantize_bf16,
    GGMLType.Q4_0: quantize_q4_0,
    GGMLType.Q4_1: quantize_q4_1,
    GGMLType.Q5_0: quantize_q5_0,
    GGMLType.Q5_1: quantize_q5_1,
    GGMLType.Q8_0: quantize_q8_0,
    GGMLType.Q4_K: quantize_q4_k,
    GGMLType.Q5_K: quantize_q5_k,
    GGMLType.Q6_K: quantize_q6_k,
}


def quantize(ggml_type: GGMLType, values: npt.NDArray[np.floating]) -> U8:
    """`values` [..., columns] as raw blocks [..., row bytes]."""
    return QUANTIZERS[ggml_type](np.ascontiguousarray(values, dtype=np.float32))
