"""Conversion to the kernels' storage formats: exact where promised, close elsewhere."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from caudal.errors import UnsupportedModelError
from caudal.weights import quantize as quantize_module
from caudal.weights.dequant import dequantize
from caudal.weights.ggml_types import SUPPORTED_TYPES, GGMLType
from caudal.weights.quantize import storage_format, to_f16, to_f32, to_w4, to_w8
from tests.weights.blocks import Blocks, random_blocks
from tests.weights.quantizers import quantize, quantize_bf16

Array = npt.NDArray[np.generic]


def _w4_values(q: Array, d: Array, m: Array) -> npt.NDArray[np.float32]:
    groups = q.reshape(len(q), -1, 32).astype(np.float32)
    values = groups * d.astype(np.float32)[..., None] + m.astype(np.float32)[..., None]
    return values.reshape(q.shape)


def _w8_values(q: Array, d: Array) -> npt.NDArray[np.float32]:
    groups = q.reshape(len(q), -1, 32).astype(np.float32)
    return (groups * d.astype(np.float32)[..., None]).reshape(q.shape)


def _model_like(ggml_type: GGMLType, rows: int = 6, columns: int = 512) -> Blocks:
    values = np.random.default_rng(5).normal(0, 0.05, (rows, columns)).astype(np.float32)
    return Blocks("w", ggml_type, (rows, columns), quantize(ggml_type, values).ravel())


@pytest.mark.parametrize("ggml_type", [GGMLType.Q4_0, GGMLType.Q4_1], ids=lambda t: t.name)
def test_w4_of_four_bit_types_is_exact(ggml_type: GGMLType) -> None:
    tensor = random_blocks(ggml_type, 5, 256)
    q, d, m = to_w4(tensor)
    assert (q.dtype, d.dtype) == (np.dtype(np.uint8), np.dtype(np.float16))
    assert (q.shape, d.shape) == ((5, 256), (5, 8))
    assert q.max() <= 15
    np.testing.assert_array_equal(_w4_values(q, d, m), dequantize(tensor))


def test_w4_of_q4_k_only_rounds_scales_to_half() -> None:
    tensor = _model_like(GGMLType.Q4_K)
    expected = dequantize(tensor)
    # Both terms are rounded by at most 2^-11 of themselves, and neither exceeds 4 sigma here.
    error = np.abs(_w4_values(*to_w4(tensor)) - expected).max()
    assert error <= 2 * 2**-11 * 0.5
    assert error <= 0.001 * np.abs(expected).max()


@pytest.mark.parametrize("ggml_type", [GGMLType.Q8_0, GGMLType.Q5_0], ids=lambda t: t.name)
def test_w8_of_symmetric_types_is_exact(ggml_type: GGMLType) -> None:
    tensor = random_blocks(ggml_type, 5, 256)
    q, d = to_w8(tensor)
    assert (q.dtype, d.dtype) == (np.dtype(np.int8), np.dtype(np.float16))
    assert (q.shape, d.shape) == ((5, 256), (5, 8))
    np.testing.assert_array_equal(_w8_values(q, d), dequantize(tensor))


@pytest.mark.parametrize(
    "ggml_type", [GGMLType.Q5_1, GGMLType.Q5_K, GGMLType.Q6_K], ids=lambda t: t.name
)
def test_w8_requantisation_stays_within_half_a_step(ggml_type: GGMLType) -> None:
    tensor = _model_like(ggml_type)
    expected = dequantize(tensor)
    q, d = to_w8(tensor)
    step = np.repeat(d.astype(np.float32), 32, axis=1)
    assert q.min() >= -127
    # Clipping at 127 adds the rounding of the scale: 127 * 2^-11 = 0.062 steps.
    assert (np.abs(_w8_values(q, d) - expected) <= 0.57 * step).all()
    assert (np.abs(q.reshape(6, 16, 32)).max(axis=2) >= 126).all()


def test_w8_of_zeros_has_no_division_by_zero() -> None:
    tensor = Blocks("w", GGMLType.Q6_K, (2, 256), np.zeros(420, np.uint8))
    q, d = to_w8(tensor)
    assert not q.any()
    assert not d.any()


@pytest.mark.parametrize("ggml_type", sorted(SUPPORTED_TYPES), ids=lambda t: t.name)
def test_conversion_in_chunks_equals_one_piece(
    ggml_type: GGMLType, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensor = random_blocks(ggml_type, 7, 256)
    whole = (*to_w8(tensor), to_f16(tensor))
    monkeypatch.setattr(quantize_module, "_CHUNK_VALUES", 3 * 256)
    for one, other in zip(whole, (*to_w8(tensor), to_f16(tensor)), strict=True):
        np.testing.assert_array_equal(one, other)


def test_f16_and_f32_hold_the_values() -> None:
    tensor = random_blocks(GGMLType.F16, 3, 64)
    np.testing.assert_array_equal(to_f16(tensor).astype(np.float32), dequantize(tensor))
    np.testing.assert_array_equal(to_f32(tensor), dequantize(tensor))


def test_storage_formats() -> None:
    formats = {t: storage_format(t) for t in SUPPORTED_TYPES}
    assert {t.name for t, f in formats.items() if f == "w4"} == {"Q4_0", "Q4_1", "Q4_K"}
    assert {t.name for t, f in formats.items() if f == "f16"} == {"F16"}
    assert {t.name for t, f in formats.items() if f == "f32"} == {"F32", "BF16"}
    with pytest.raises(UnsupportedModelError, match="IQ2_XS"):
        storage_format(GGMLType.IQ2_XS)


@pytest.mark.parametrize(
    ("largest", "expected"),
    [(65280.0, "f16"), (65536.0, "f32"), (-65536.0, "f32"), (1e38, "f32"), (np.inf, "f16")],
)
def test_bf16_beyond_half_range_is_kept_in_f32(largest: float, expected: str) -> None:
    data = quantize_bf16(np.array([0.0, 1.5, largest, -3e-5], np.float32))
    assert storage_format(GGMLType.BF16, data) == expected


def test_bf16_in_half_range_loses_nothing() -> None:
    bits = np.arange(1 << 16, dtype="<u2")
    values = (bits.astype(np.uint32) << 16).view(np.float32)
    normal = np.isfinite(values) & (np.abs(values) < 65536) & (np.abs(values) >= 2.0**-17)
    tensor = Blocks("w", GGMLType.BF16, (1, int(normal.sum())), bits[normal].view(np.uint8))
    np.testing.assert_array_equal(to_f16(tensor)[0].astype(np.float32), values[normal])
