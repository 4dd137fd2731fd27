"""Norm, gate and embedding: every instruction set against NumPy, and bit-equal to each other."""

from __future__ import annotations

import numpy as np
import pytest

from caudal import _native
from caudal.weights.ggml_types import SUPPORTED_TYPES, GGMLType
from tests.weights.blocks import random_blocks

ISAS = _native.isa_names()
COLUMNS = [7, 16, 64, 100, 576]


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    if name not in _native.available_isas():
        pytest.skip(f"this CPU cannot run {name}")
    return name


def normal(*shape: int, seed: int = 0, scale: float = 1.0) -> np.ndarray:
    values = np.random.default_rng(seed).standard_normal(shape) * scale
    return values.astype(np.float32)


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    """Equal, counting all NaNs as one."""
    return np.array_equal(a, b, equal_nan=True) and bool((np.signbit(a) == np.signbit(b)).all())


@pytest.mark.parametrize("cols", COLUMNS)
def test_rms_norm_matches_float64(isa: str, cols: int) -> None:
    x, weight = normal(5, cols, scale=3), normal(cols, seed=1)
    wide = x.astype(np.float64)
    expected = wide / np.sqrt((wide**2).mean(axis=1, keepdims=True) + 1e-5) * weight
    out = _native.testing.rms_norm(isa, x, weight, 1e-5, 2)
    np.testing.assert_allclose(out, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("cols", COLUMNS)
def test_rms_norm_is_bit_equal_on_every_isa(isa: str, cols: int) -> None:
    x, weight = normal(9, cols, scale=100), normal(cols, seed=1)
    x[3] = 0
    x[4, 0] = np.inf
    x[5, 1] = np.nan
    expected = _native.testing.rms_norm("ref", x, weight, 1e-6)
    for num_threads in (1, 2):
        out = _native.testing.rms_norm(isa, x, weight, 1e-6, num_threads)
        assert np.array_equal(out, expected, equal_nan=True)


@pytest.mark.parametrize("cols", COLUMNS)
def test_silu_mul_matches_float64(isa: str, cols: int) -> None:
    gate_up = normal(5, 2 * cols, scale=8)
    gate, up = np.split(gate_up.astype(np.float64), 2, axis=1)
    out = _native.testing.silu_mul(isa, gate_up, 2)
    np.testing.assert_allclose(out, gate / (1 + np.exp(-gate)) * up, rtol=1e-6, atol=1e-30)


def test_silu_mul_is_bit_equal_on_every_isa(isa: str) -> None:
    gate_up = normal(9, 2 * 100, scale=60)
    gate_up[0, :6] = [np.inf, -np.inf, np.nan, 88.7, -88.7, 1e30]
    expected = _native.testing.silu_mul("ref", gate_up)
    assert np.isnan(expected[0, 2])
    for num_threads in (1, 2):
        out = _native.testing.silu_mul(isa, gate_up, num_threads)
        assert np.array_equal(out, expected, equal_nan=True)


@pytest.mark.parametrize("ggml_type", sorted(SUPPORTED_TYPES), ids=lambda t: t.name)
def test_embedding_rows_are_the_packed_values(isa: str, ggml_type: GGMLType) -> None:
    tensor = random_blocks(ggml_type, 50, 256)
    table = _native.Runtime("", 1).pack_linear([(int(ggml_type), 50, 256, tensor.data)])
    input_ids = np.array([0, 49, 17, 17, 3], np.int32)
    out = _native.testing.embed(isa, input_ids, table, 2)
    np.testing.assert_array_equal(out, table.unpack()[input_ids])
