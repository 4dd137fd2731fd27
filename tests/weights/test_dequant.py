"""Dequantisation against scalar decoders written from the format definitions."""

from __future__ import annotations

import numpy as np
import pytest

from caudal.errors import UnsupportedModelError
from caudal.weights.dequant import dequantize
from caudal.weights.ggml_types import SUPPORTED_TYPES, GGMLType
from tests.weights.blocks import Blocks, random_blocks, scalar_values
from tests.weights.quantizers import QUANTIZERS, quantize
from tests.weights.scalar_blocks import SCALAR_DECODERS

ALL_TYPES = sorted(SUPPORTED_TYPES)

MAX_RMS_ERROR = {
    GGMLType.F32: 0.0,
    GGMLType.F16: 3e-4,
    GGMLType.BF16: 3e-3,
    GGMLType.Q8_0: 0.01,
    GGMLType.Q6_K: 0.03,
    GGMLType.Q5_0: 0.06,
    GGMLType.Q5_1: 0.05,
    GGMLType.Q5_K: 0.05,
    GGMLType.Q4_0: 0.12,
    GGMLType.Q4_1: 0.1,
    GGMLType.Q4_K: 0.1,
}
"""For values of standard deviation 1, quantised by the tests' plain quantisers."""


def test_every_supported_type_has_an_oracle() -> None:
    assert set(SCALAR_DECODERS) == set(QUANTIZERS) == set(MAX_RMS_ERROR) == SUPPORTED_TYPES


@pytest.mark.parametrize("ggml_type", ALL_TYPES, ids=lambda t: t.name)
def test_values_equal_the_scalar_decoder(ggml_type: GGMLType) -> None:
    tensor = random_blocks(ggml_type, rows=3, columns=512)
    values = dequantize(tensor)
    assert values.dtype == np.float32
    assert values.shape == (3, 512)
    np.testing.assert_allclose(values, scalar_values(tensor), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("ggml_type", ALL_TYPES, ids=lambda t: t.name)
def test_round_trip_error_is_that_of_the_type(ggml_type: GGMLType) -> None:
    values = np.random.default_rng(1).normal(0, 1, (4, 512)).astype(np.float32)
    raw = quantize(ggml_type, values)
    restored = dequantize(Blocks("w", ggml_type, values.shape, raw.ravel()))
    error = float(np.sqrt(np.mean((restored - values) ** 2)))
    assert error <= MAX_RMS_ERROR[ggml_type]


def test_q4_0_block_by_hand() -> None:
    block = np.zeros(18, np.uint8)
    block[:2] = np.array([0.5], "<f2").view(np.uint8)
    block[2] = 0xF0  # value 0 is 0 - 8, value 16 is 15 - 8
    block[17] = 0x9A  # value 15 is 10 - 8, value 31 is 9 - 8
    values = dequantize(Blocks("w", GGMLType.Q4_0, (1, 32), block))[0]
    assert values[[0, 16, 15, 31]].tolist() == [-4.0, 3.5, 1.0, 0.5]
    assert values[1] == -4.0


def test_q5_1_high_bits_by_hand() -> None:
    block = np.zeros(24, np.uint8)
    block[:4] = np.array([1.0, -2.0], "<f2").view(np.uint8)
    block[4:8] = [0x01, 0x00, 0x00, 0x80]  # fifth bit of values 0 and 31
    values = dequantize(Blocks("w", GGMLType.Q5_1, (1, 32), block))[0]
    assert values[0] == values[31] == 14.0
    assert (values[1:31] == -2.0).all()


def test_q6_k_zero_point_by_hand() -> None:
    block = np.zeros(210, np.uint8)
    block[192:208] = 1
    block[208:] = np.array([1.0], "<f2").view(np.uint8)
    values = dequantize(Blocks("w", GGMLType.Q6_K, (1, 256), block))
    assert (values == -32.0).all()


@pytest.mark.parametrize("ggml_type", ALL_TYPES, ids=lambda t: t.name)
def test_damaged_scales_give_no_exception(ggml_type: GGMLType) -> None:
    raw = np.full(4 * ggml_type.block_bytes, 0xFF, np.uint8)
    values = dequantize(Blocks("w", ggml_type, (1, 4 * ggml_type.block_size), raw))
    assert values.shape == (1, 4 * ggml_type.block_size)


def test_unsupported_type_is_refused_by_name() -> None:
    tensor = Blocks("blk.0.ffn_up.weight", GGMLType.IQ4_XS, (1, 256), np.zeros(136, np.uint8))
    with pytest.raises(UnsupportedModelError, match=r"blk\.0\.ffn_up\.weight.*IQ4_XS"):
        dequantize(tensor)
