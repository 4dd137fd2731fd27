"""Packing of every tensor type against the NumPy definition of the formats."""

from __future__ import annotations

import numpy as np
import pytest

from caudal import _native
from caudal.weights.dequant import dequantize
from caudal.weights.ggml_types import SUPPORTED_TYPES, GGMLType
from caudal.weights.quantize import storage_format, to_f16, to_w4, to_w8
from tests.weights.blocks import Blocks, random_blocks

TYPES = sorted(SUPPORTED_TYPES)
RUNTIME = _native.Runtime("", 2)


def pack(*tensors: Blocks, runtime: _native.Runtime = RUNTIME) -> _native.LinearWeight:
    return runtime.pack_linear([(int(t.ggml_type), *t.shape, t.data) for t in tensors])


def expected_values(tensor: Blocks) -> np.ndarray:
    """What the storage format keeps of the tensor."""
    kind = storage_format(tensor.ggml_type, tensor.data)
    if kind == "w4":
        q, d, m = to_w4(tensor)
        scale, offset = (np.repeat(plane.astype(np.float32), 32, axis=1) for plane in (d, m))
        return q * scale + offset
    if kind == "w8":
        q, d = to_w8(tensor)
        return q * np.repeat(d.astype(np.float32), 32, axis=1)
    return to_f16(tensor).astype(np.float32) if kind == "f16" else dequantize(tensor)


@pytest.mark.parametrize("ggml_type", TYPES, ids=lambda t: t.name)
@pytest.mark.parametrize("rows", [1, 16, 35])
def test_packed_values_equal_the_definition(ggml_type: GGMLType, rows: int) -> None:
    tensor = random_blocks(ggml_type, rows, 512)
    weight = pack(tensor)
    assert weight.formats == [storage_format(ggml_type, tensor.data)]
    np.testing.assert_array_equal(weight.unpack(), expected_values(tensor))


@pytest.mark.parametrize("ggml_type", TYPES, ids=lambda t: t.name)
def test_random_bytes_pack_like_the_definition(ggml_type: GGMLType) -> None:
    """Scales are any bit pattern: denormal, infinite, NaN, overflowing once multiplied."""
    size = 64 * 512 // ggml_type.block_size * ggml_type.block_bytes
    data = np.random.default_rng(1).integers(0, 256, size, dtype=np.uint8)
    tensor = Blocks("t", ggml_type, (64, 512), data)
    with np.errstate(invalid="ignore", over="ignore"):
        np.testing.assert_array_equal(pack(tensor).unpack(), expected_values(tensor))


def test_stacked_matrices_of_different_types_keep_their_rows() -> None:
    types = (GGMLType.Q4_1, GGMLType.Q4_0, GGMLType.Q8_0, GGMLType.F16, GGMLType.Q4_K)
    tensors = [
        random_blocks(t, rows, 256) for t, rows in zip(types, (5, 20, 16, 3, 7), strict=True)
    ]
    weight = pack(*tensors)
    assert weight.formats == ["w4", "w8", "f16", "w4"], "only neighbours of one format merge"
    expected = np.concatenate([expected_values(t) for t in tensors])
    np.testing.assert_array_equal(weight.unpack(), expected)


def test_bfloat16_beyond_float16_becomes_float32() -> None:
    tensor = random_blocks(GGMLType.BF16, 4, 64)
    values = tensor.data.view("<u2").copy()
    values[70] = 0x4780  # 65536
    tensor = Blocks("t", GGMLType.BF16, (4, 64), values.view(np.uint8))
    weight = pack(tensor)
    assert weight.formats == ["f32"]
    np.testing.assert_array_equal(weight.unpack(), dequantize(tensor))


def test_packing_is_the_same_on_any_number_of_threads() -> None:
    tensor = random_blocks(GGMLType.Q6_K, 999, 256)
    results = [pack(tensor, runtime=_native.Runtime("", n)).unpack() for n in (1, 2, 5)]
    assert all(np.array_equal(result, results[0]) for result in results)


def test_padding_rows_are_accounted_for() -> None:
    assert pack(random_blocks(GGMLType.Q4_1, 17, 64)).nbytes == 2 * 2 * 320 + 64
    assert pack(random_blocks(GGMLType.Q8_0, 16, 64)).nbytes == 2 * 544 + 64


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ((9, 16, 32, 36 * 16), "type 9 cannot be packed"),
        ((3, 16, 48, 20 * 16), "48 columns, not a multiple of 32"),
        ((12, 1, 128, 72), "128 columns, not a multiple of 256"),
        ((3, 16, 32, 20 * 16 - 1), "319 bytes instead of 320"),
        ((3, 0, 32, 0), "0 rows"),
        ((3, -1, 32, 0), "-1 rows"),
        ((3, 1, 0, 0), "0 columns"),
        ((3, 2**62, 32, 20), "rows"),
        ((3, 1, 2**40, 20), "columns"),
    ],
)
def test_contradicting_sizes_are_refused(part: tuple[int, int, int, int], message: str) -> None:
    ggml_type, rows, cols, num_bytes = part
    with pytest.raises(ValueError, match=message):
        RUNTIME.pack_linear([(ggml_type, rows, cols, np.zeros(num_bytes, np.uint8))])


def test_nothing_to_pack_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        RUNTIME.pack_linear([])


def test_stacked_matrices_must_share_their_columns() -> None:
    parts = [random_blocks(GGMLType.Q4_1, 16, cols) for cols in (32, 64)]
    with pytest.raises(ValueError, match="differs in columns"):
        pack(*parts)


def test_bias_needs_one_value_per_row() -> None:
    tensor = random_blocks(GGMLType.F32, 16, 32)
    with pytest.raises(ValueError, match="bias"):
        RUNTIME.pack_linear([(0, 16, 32, tensor.data)], np.zeros(15, np.float32))


def aligned(blocks: np.ndarray, offset: int = 0) -> np.ndarray:
    """A copy of `blocks` at an address `offset` bytes above a multiple of 64."""
    memory = np.zeros(blocks.size + 128, np.uint8)
    start = -memory.ctypes.data % 64 + offset
    memory[start : start + blocks.size] = blocks
    return memory[start : start + blocks.size]


def test_adopted_segments_are_the_weight_they_came_from_and_outlive_their_owner() -> None:
    tensors = [random_blocks(t, 33, 256) for t in (GGMLType.Q4_1, GGMLType.Q8_0, GGMLType.F16)]
    packed = pack(*tensors)
    values = packed.unpack()
    segments = [(name, rows, aligned(blocks)) for name, rows, blocks in packed.segments()]
    assert not packed.segments()[0][2].flags.writeable
    bias = np.arange(99, dtype=np.float32)
    adopted = RUNTIME.adopt_linear(segments, 256, bias, activations="int12")
    del segments, packed
    assert (adopted.rows, adopted.cols, adopted.formats) == (99, 256, ["w4", "w8", "f16"])
    assert adopted.has_bias
    assert adopted.activations == "int12"
    np.testing.assert_array_equal(adopted.unpack(), values)


def with_exponent(blocks: np.ndarray, exponent: int) -> np.ndarray:
    copy = aligned(blocks)
    copy[-64:-60] = np.array([exponent], np.int32).view(np.uint8)
    return copy


def test_segments_that_do_not_fit_are_refused_before_a_kernel_reads_them() -> None:
    (name, rows, blocks) = pack(random_blocks(GGMLType.Q8_0, 16, 64)).segments()[0]
    good = aligned(blocks)
    for segments, cols, message in (
        ([], 64, "at least one"),
        ([("w5", rows, good)], 64, "unknown weight format w5"),
        ([(name, rows, good)], 65, "cols"),
        ([(name, rows, good)], 128, "size does not fit"),
        ([(name, rows + 16, good)], 64, "size does not fit"),
        ([(name, 0, good)], 64, "rows"),
        ([(name, rows, good[:-1])], 64, "size does not fit"),
        ([(name, rows, aligned(blocks, 8))], 64, "aligned"),
        ([(name, rows, with_exponent(blocks, 65))], 64, "exponent is 65"),
    ):
        with pytest.raises(ValueError, match=message):
            RUNTIME.adopt_linear(segments, cols)
