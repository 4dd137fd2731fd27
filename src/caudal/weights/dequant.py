"""NumPy reference dequantisation of every supported tensor type to float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
import numpy.typing as npt

from caudal.errors import UnsupportedModelError
from caudal.weights.ggml_types import GGMLType, supported_type_names

F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]


class RawTensor(Protocol):
    """What this module needs of a `GGUFTensor`."""

    @property
    def name(self) -> str: ...

    @property
    def ggml_type(self) -> GGMLType: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def data(self) -> U8: ...


def dequantize(tensor: RawTensor) -> F32:
    """The values of `tensor`: float32 of its shape, freshly allocated.

    Formats: the block structs of ggml (`ggml-common.h`), described at each decoder here.
    Raises UnsupportedModelError for a type that Caudal does not run.
    """
    decode = _DECODERS.get(tensor.ggml_type)
    if decode is None:
        raise UnsupportedModelError(
            f"tensor {tensor.name} has the unsupported type {tensor.ggml_type.name}. "
            f"Supported: {supported_type_names()}"
        )
    # Damaged scales may be infinite or NaN; the values then are too, without a warning each.
    with np.errstate(invalid="ignore", over="ignore"):
        return decode(raw_blocks(tensor)).reshape(tensor.shape)


def raw_blocks(tensor: RawTensor) -> U8:
    """The blocks of `tensor`: uint8 [num_blocks, bytes per block], a view."""
    return tensor.data.reshape(-1, tensor.ggml_type.block_bytes)


def half(blocks: U8, offset: int) -> F32:
    """The float16 at byte `offset` of each block, as float32 [num_blocks, 1]."""
    return np.ascontiguousarray(blocks[:, offset : offset + 2]).view("<f2").astype(np.float32)


def nibbles(packed: U8) -> U8:
    """uint8 [..., n] -> [..., 2n]: the n low nibbles, then the n high ones."""
    return np.concatenate([packed & 15, packed >> 4], axis=-1)


def fifth_bits(packed: U8) -> U8:
    """uint8 [num_blocks, 4] -> [num_blocks, 32]: 16 where bit j of the 32-bit word is set."""
    return np.unpackbits(packed, axis=1, bitorder="little") * np.uint8(16)


def q5_values(blocks: U8, offset: int) -> U8:
    """Values 0 … 31 of Q5_0 and Q5_1 blocks whose high bits start at byte `offset`."""
    values = nibbles(blocks[:, offset + 4 : offset + 20])
    return values | fifth_bits(blocks[:, offset : offset + 4])


def k_scales(blocks: U8) -> tuple[U8, U8]:
    """Six-bit scales and minima of Q4_K and Q5_K blocks: two uint8 [num_blocks, 8].

    Bytes 4 … 15 of a block; s = scale, m = minimum, numbers are sub-blocks:

        byte  4+j   (j < 4)   [ s(j+4) bits 5..4 | s(j) bits 5..0 ]
        byte  8+j             [ m(j+4) bits 5..4 | m(j) bits 5..0 ]
        byte 12+j             [ m(j+4) bits 3..0 | s(j+4) bits 3..0 ]
    """
    first, second, third = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = np.concatenate([first & 63, (third & 15) | ((first >> 6) << 4)], axis=1)
    minima = np.concatenate([second & 63, (third >> 4) | ((second >> 6) << 4)], axis=1)
    return scales, minima


def k_nibbles(packed: U8) -> U8:
    """uint8 [num_blocks, 128] -> [num_blocks, 8, 32].

    Each 32 bytes hold two sub-blocks: the even one in the low nibbles, the odd one in the high.
    """
    return nibbles(packed.reshape(-1, 4, 32)).reshape(-1, 8, 32)


def q5_k_values(blocks: U8) -> U8:
    """Values 0 … 31 of Q5_K blocks: uint8 [num_blocks, 8, 32]; sub-block i has high bit i."""
    shifts = np.arange(8, dtype=np.uint8).reshape(1, 8, 1)
    high = (blocks[:, 16:48].reshape(-1, 1, 32) >> shifts) & np.uint8(1)
    return k_nibbles(blocks[:, 48:176]) | high * np.uint8(16)


def q6_k_values(blocks: U8) -> npt.NDArray[np.int8]:
    """Values -32 … 31 of Q6_K blocks: int8 [num_blocks, 16, 16], 16 values to a scale.

    A block is two halves of 128 values. Within a half, quarter t holds values 32t … 32t+31:

        low 4 bits   ql[64 bytes]: quarters 0, 1 in the low nibbles, 2, 3 in the high nibbles
        high 2 bits  qh[32 bytes]: bits 2t+1..2t belong to quarter t
    """
    low = nibbles(blocks[:, :128].reshape(-1, 2, 64)).reshape(-1, 2, 4, 32)
    shifts = np.array([0, 2, 4, 6], np.uint8).reshape(1, 1, 4, 1)
    high = (blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts) & 3
    values = (low | (high << 4)).astype(np.int8) - np.int8(32)
    return values.reshape(-1, 16, 16)


def _f32(blocks: U8) -> F32:
    """[ float32 ]"""
    return np.ascontiguousarray(blocks).view("<f4").astype(np.float32, copy=True)


def _f16(blocks: U8) -> F32:
    """[ float16 ]"""
    return half(blocks, 0)


def _bf16(blocks: U8) -> F32:
    """[ upper half of a float32 ]"""
    bits = np.ascontiguousarray(blocks).view("<u2").astype(np.uint32)
    return (bits << 16).view(np.float32)


def _q4_0(blocks: U8) -> F32:
    """[ d f16 | q 16 bytes ]: d * (q - 8); byte j has value j low and value j+16 high."""
    return half(blocks, 0) * (nibbles(blocks[:, 2:]).astype(np.float32) - 8)


def _q4_1(blocks: U8) -> F32:
    """[ d f16 | m f16 | q 16 bytes ]: d * q + m; nibbles as in Q4_0."""
    return half(blocks, 0) * nibbles(blocks[:, 4:]) + half(blocks, 2)


def _q5_0(blocks: U8) -> F32:
    """[ d f16 | high bits 4 bytes | q 16 bytes ]: d * (q - 16)."""
    return half(blocks, 0) * (q5_values(blocks, 2).astype(np.float32) - 16)


def _q5_1(blocks: U8) -> F32:
    """[ d f16 | m f16 | high bits 4 bytes | q 16 bytes ]: d * q + m."""
    return half(blocks, 0) * q5_values(blocks, 4) + half(blocks, 2)


def _q8_0(blocks: U8) -> F32:
    """[ d f16 | q int8 x 32 ]: d * q."""
    return half(blocks, 0) * blocks[:, 2:].view(np.int8)


def _k_affine(blocks: U8, values: U8) -> F32:
    scales, minima = k_scales(blocks)
    d = (half(blocks, 0) * scales)[:, :, None]
    m = (half(blocks, 2) * minima)[:, :, None]
    return d * values - m


def _q4_k(blocks: U8) -> F32:
    """[ d f16 | dmin f16 | scales 12 bytes | q 128 bytes ]: d * s(i) * q - dmin * m(i)."""
    return _k_affine(blocks, k_nibbles(blocks[:, 16:144]))


def _q5_k(blocks: U8) -> F32:
    """[ d f16 | dmin f16 | scales 12 | high bits 32 | q 128 ]: d * s(i) * q - dmin * m(i)."""
    return _k_affine(blocks, q5_k_values(blocks))


def q6_k_scales(blocks: U8) -> F32:
    """Scales d * s(i) of Q6_K blocks: float32 [num_blocks, 16]."""
    return half(blocks, 208) * blocks[:, 192:208].view(np.int8)


def _q6_k(blocks: U8) -> F32:
    """[ ql 128 bytes | qh 64 bytes | s int8 x 16 | d f16 ]: d * s(i) * q."""
    return q6_k_scales(blocks)[:, :, None] * q6_k_values(blocks)


_DECODERS: dict[GGMLType, Callable[[U8], F32]] = {
    GGMLType.F32: _f32,
    GGMLType.F16: _f16,
    GGMLType.BF16: _bf16,
    GGMLType.Q4_0: _q4_0,
    GGMLType.Q4_1: _q4_1,
    GGMLType.Q5_0: _q5_0,
    GGMLType.Q5_1: _q5_1,
    GGMLType.Q8_0: _q8_0,
    GGMLType.Q4_K: _q4_k,
    GGMLType.Q5_K: _q5_k,
    GGMLType.Q6_K: _q6_k,
}
