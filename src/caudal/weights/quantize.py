"""Conversion of GGML tensors to the formats that kernels store: w4, w8, f16, f32.

These are the reference; the native module has its own packing of the types it knows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from caudal.errors import UnsupportedModelError
from caudal.weights.dequant import (
    RawTensor,
    dequantize,
    half,
    k_nibbles,
    k_scales,
    nibbles,
    q5_values,
    raw_blocks,
)
from caudal.weights.ggml_types import GGMLType, supported_type_names

F16 = npt.NDArray[np.float16]
F32 = npt.NDArray[np.float32]
I8 = npt.NDArray[np.int8]
U8 = npt.NDArray[np.uint8]

StorageFormat = Literal["w4", "w8", "f16", "f32"]

GROUP = 32
"""Values that share a scale in w4 and w8."""

_CHUNK_VALUES = 1 << 22
"""Values converted at a time, so that float32 copies stay small beside the weights."""

_BF16_CHUNK = 1 << 24
_BF16_ABOVE_F16 = 0x4780  # 65536.0: the first bfloat16 beyond float16's 65504
_BF16_INF = 0x7F80

_FORMATS: dict[GGMLType, StorageFormat] = {
    GGMLType.F32: "f32",
    GGMLType.F16: "f16",
    GGMLType.Q4_0: "w4",
    GGMLType.Q4_1: "w4",
    GGMLType.Q4_K: "w4",
    GGMLType.Q5_0: "w8",
    GGMLType.Q5_1: "w8",
    GGMLType.Q8_0: "w8",
    GGMLType.Q5_K: "w8",
    GGMLType.Q6_K: "w8",
}


@dataclass(frozen=True, slots=True)
class _RowSlice:
    """Some rows of a tensor."""

    name: str
    ggml_type: GGMLType
    shape: tuple[int, ...]
    data: U8


def storage_format(ggml_type: GGMLType, data: U8 | None = None) -> StorageFormat:
    """The kernel format that holds a tensor of `ggml_type` whose raw bytes are `data`.

    BF16 becomes f16 if no finite value is beyond float16's range (65504), else f32; without
    `data` it is f32. Down to 2^-17 float16 holds every bfloat16 exactly; below, the error is at
    most 2^-25, which is rounding next to any weight that matters.
    Raises UnsupportedModelError for other types that Caudal does not run.
    """
    if ggml_type is GGMLType.BF16:
        return "f16" if data is not None and _fits_f16(data) else "f32"
    if ggml_type not in _FORMATS:
        raise UnsupportedModelError(
            f"unsupported tensor type {ggml_type.name}. Supported: {supported_type_names()}"
        )
    return _FORMATS[ggml_type]


def to_w4(tensor: RawTensor) -> tuple[U8, F16, F16]:
    """A Q4_0, Q4_1 or Q4_K matrix as q (0 … 15), d, m with value = d * q + m.

    Shapes: q uint8 [rows, cols], d and m float16 [rows, cols / 32]. Exact for Q4_0 (m = -8 d)
    and Q4_1; for Q4_K the products d * s and -dmin * m are rounded to float16.
    """
    rows, cols = tensor.shape
    q = np.empty((rows, cols), np.uint8)
    d = np.empty((rows, cols // GROUP), np.float16)
    m = np.empty_like(d)
    convert = {GGMLType.Q4_0: _w4_q4_0, GGMLType.Q4_1: _w4_q4_1, GGMLType.Q4_K: _w4_q4_k}
    for part, chunk in _row_chunks(tensor):
        values, scale, offset = convert[tensor.ggml_type](raw_blocks(chunk))
        q[part] = values.reshape(-1, cols)
        d[part] = _to_half(scale).reshape(-1, cols // GROUP)
        m[part] = _to_half(offset).reshape(-1, cols // GROUP)
    return q, d, m


def to_w8(tensor: RawTensor) -> tuple[I8, F16]:
    """A matrix of any supported type as q (int8) and d with value = d * q.

    Shapes: q int8 [rows, cols], d float16 [rows, cols / 32]. Exact for Q8_0 and Q5_0; other
    types are quantised anew, 32 values to a scale of absmax / 127.
    """
    rows, cols = tensor.shape
    q = np.empty((rows, cols), np.int8)
    d = np.empty((rows, cols // GROUP), np.float16)
    convert = {GGMLType.Q8_0: _w8_q8_0, GGMLType.Q5_0: _w8_q5_0}.get(tensor.ggml_type)
    for part, chunk in _row_chunks(tensor):
        values, scale = convert(raw_blocks(chunk)) if convert else _requantize(dequantize(chunk))
        q[part] = values.reshape(-1, cols)
        d[part] = _to_half(scale).reshape(-1, cols // GROUP)
    return q, d


def to_f16(tensor: RawTensor) -> F16:
    """The values of a matrix rounded to float16 [rows, cols]."""
    values = np.empty(tensor.shape, np.float16)
    for part, chunk in _row_chunks(tensor):
        values[part] = _to_half(dequantize(chunk))
    return values


def to_f32(tensor: RawTensor) -> F32:
    """The values of a tensor as float32 of its shape."""
    return dequantize(tensor)


def _row_chunks(tensor: RawTensor) -> Iterator[tuple[slice, _RowSlice]]:
    rows, cols = tensor.shape
    row_bytes = cols // tensor.ggml_type.block_size * tensor.ggml_type.block_bytes
    step = max(1, _CHUNK_VALUES // cols)
    for first in range(0, rows, step):
        last = min(first + step, rows)
        data = tensor.data[first * row_bytes : last * row_bytes]
        yield (
            slice(first, last),
            _RowSlice(tensor.name, tensor.ggml_type, (last - first, cols), data),
        )


def _to_half(values: F32) -> F16:
    # Only a damaged file has scales beyond float16; they become infinite, as in the file's own.
    with np.errstate(over="ignore", invalid="ignore"):
        return values.astype(np.float16)


def _fits_f16(data: U8) -> bool:
    bits = np.ascontiguousarray(data).view("<u2")
    for first in range(0, len(bits), _BF16_CHUNK):
        magnitude = bits[first : first + _BF16_CHUNK] & np.uint16(0x7FFF)
        if bool(((magnitude >= _BF16_ABOVE_F16) & (magnitude < _BF16_INF)).any()):
            return False
    return True


def _w4_q4_0(blocks: U8) -> tuple[U8, F32, F32]:
    d = half(blocks, 0)
    return nibbles(blocks[:, 2:]), d, -8 * d


def _w4_q4_1(blocks: U8) -> tuple[U8, F32, F32]:
    return nibbles(blocks[:, 4:]), half(blocks, 0), half(blocks, 2)


def _w4_q4_k(blocks: U8) -> tuple[U8, F32, F32]:
    scales, minima = k_scales(blocks)
    return k_nibbles(blocks[:, 16:144]), half(blocks, 0) * scales, -half(blocks, 2) * minima


def _w8_q8_0(blocks: U8) -> tuple[I8, F32]:
    return blocks[:, 2:].view(np.int8), half(blocks, 0)


def _w8_q5_0(blocks: U8) -> tuple[I8, F32]:
    return q5_values(blocks, 2).astype(np.int8) - np.int8(16), half(blocks, 0)


def _requantize(values: F32) -> tuple[I8, F32]:
    groups = values.reshape(-1, GROUP)
    largest = np.abs(groups).max(axis=1, keepdims=True)
    # The scale as it will be stored, so that rounding it does not bias the values.
    d = _to_half(largest / np.float32(127)).astype(np.float32)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        q = np.rint(groups / np.where(d == 0, np.float32(1), d)).clip(-127, 127)
        return np.nan_to_num(q).astype(np.int8), d
