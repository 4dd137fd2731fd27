"""A small GGUF v3 writer: whole files, and single fields for hostile ones."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from caudal.weights.ggml_types import GGMLType
from caudal.weights.gguf_header import ValueType
from tests.weights.quantizers import (
    quantize,
    quantize_bf16,
    quantize_f16,
    quantize_q4_0,
    quantize_q4_1,
    quantize_q8_0,
)

__all__ = [
    "Typed",
    "pack_pair",
    "pack_preamble",
    "pack_string",
    "pack_tensor_info",
    "quantize",
    "quantize_bf16",
    "quantize_f16",
    "quantize_q4_0",
    "quantize_q4_1",
    "quantize_q8_0",
    "write_gguf",
]

_FORMATS = {
    ValueType.UINT8: "B",
    ValueType.INT8: "b",
    ValueType.UINT16: "H",
    ValueType.INT16: "h",
    ValueType.UINT32: "I",
    ValueType.INT32: "i",
    ValueType.FLOAT32: "f",
    ValueType.BOOL: "?",
    ValueType.UINT64: "Q",
    ValueType.INT64: "q",
    ValueType.FLOAT64: "d",
}
_TYPE_OF_DTYPE = {
    "u1": ValueType.UINT8,
    "i1": ValueType.INT8,
    "u2": ValueType.UINT16,
    "i2": ValueType.INT16,
    "u4": ValueType.UINT32,
    "i4": ValueType.INT32,
    "f4": ValueType.FLOAT32,
    "b1": ValueType.BOOL,
    "u8": ValueType.UINT64,
    "i8": ValueType.INT64,
    "f8": ValueType.FLOAT64,
}


@dataclass(frozen=True)
class Typed:
    """A metadata scalar written with an explicit type instead of the default one."""

    value_type: ValueType
    value: Any


def pack_string(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def pack_preamble(num_tensors: int, num_pairs: int, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_pairs)


def pack_tensor_info(name: str, dims: tuple[int, ...], ggml_type: int, offset: int) -> bytes:
    """`dims` in file order: contiguous dimension first."""
    head = pack_string(name) + struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
    return head + struct.pack("<IQ", ggml_type, offset)


def pack_pair(key: str, value: Any) -> bytes:
    """A metadata pair.

    int -> UINT32 (INT32 if negative, UINT64 if large), float -> FLOAT32, list -> array of
    strings, INT32, FLOAT32 or BOOL; NumPy arrays keep their type; `Typed` gives it.
    """
    return pack_string(key) + _pack_value(value)


def _pack_value(value: Any) -> bytes:
    if isinstance(value, Typed):
        scalar = struct.pack("<" + _FORMATS[value.value_type], value.value)
        return struct.pack("<I", value.value_type) + scalar
    if isinstance(value, (str, bytes)):
        return struct.pack("<I", ValueType.STRING) + pack_string(value)
    if isinstance(value, np.ndarray):
        tag = _TYPE_OF_DTYPE[value.dtype.str[1:]]
        return struct.pack("<IIQ", ValueType.ARRAY, tag, len(value)) + value.tobytes()
    if isinstance(value, list):
        return _pack_list(value)
    if isinstance(value, bool):
        return _pack_value(Typed(ValueType.BOOL, value))
    if isinstance(value, float):
        return _pack_value(Typed(ValueType.FLOAT32, value))
    if value < 0:
        return _pack_value(Typed(ValueType.INT32, value))
    return _pack_value(Typed(ValueType.UINT32 if value < 1 << 32 else ValueType.UINT64, value))


def _pack_list(values: list[Any]) -> bytes:
    if not values or isinstance(values[0], (str, bytes)):
        head = struct.pack("<IIQ", ValueType.ARRAY, ValueType.STRING, len(values))
        return head + b"".join(map(pack_string, values))
    dtype = {bool: np.bool_, int: np.int32, float: np.float32}[type(values[0])]
    return _pack_value(np.array(values, dtype))


def write_gguf(
    path: Path,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, tuple[GGMLType, npt.NDArray[Any]]],
    *,
    alignment: int = 32,
) -> Path:
    """Write a GGUF file of `tensors`, each (type, array).

    A float array [..., columns] is quantised to the type; a uint8 array [..., row bytes] is
    taken as raw blocks. `alignment` other than 32 is also written to the metadata.
    """
    pairs = dict(metadata)
    if alignment != 32:
        pairs["general.alignment"] = alignment
    infos: list[bytes] = []
    chunks: list[bytes] = []
    offset = 0
    for name, (ggml_type, array) in tensors.items():
        raw = array if array.dtype == np.uint8 else quantize(ggml_type, array)
        columns = raw.shape[-1] // ggml_type.block_bytes * ggml_type.block_size
        dims = (columns, *raw.shape[-2::-1])
        infos.append(pack_tensor_info(name, dims, ggml_type, offset))
        padding = -raw.nbytes % alignment
        chunks.append(raw.tobytes() + bytes(padding))
        offset += raw.nbytes + padding
    header = pack_preamble(len(tensors), len(pairs))
    header += b"".join(pack_pair(key, value) for key, value in pairs.items())
    header += b"".join(infos)
    path.write_bytes(header + bytes(-len(header) % alignment) + b"".join(chunks))
    return path
