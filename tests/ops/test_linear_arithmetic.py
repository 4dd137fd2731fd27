"""The portable linear kernel against the arithmetic that csrc/cpu/numerics.h writes down.

All other instruction sets are compared with the portable one, bit for bit.
"""

from __future__ import annotations

import numpy as np
import pytest

from caudal import _native
from caudal.weights.dequant import dequantize
from caudal.weights.ggml_types import GGMLType
from caudal.weights.quantize import to_w4, to_w8
from tests.weights.blocks import random_blocks

ROWS, COLS, TOKENS = 21, 96, 5


def fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """float32 a * b + c; the product is exact in float64, the sum is rounded twice at worst."""
    wide = a.astype(np.float64) * b.astype(np.float64) + c.astype(np.float64)
    return wide.astype(np.float32)


def quantize(x: np.ndarray, quant_max: float) -> tuple[np.ndarray, np.ndarray]:
    """q int32 [tokens, blocks, 32] and d float32 [tokens, blocks]."""
    groups = x.reshape(len(x), -1, 32)
    absmax = np.abs(groups).max(axis=2)
    tiny = absmax < np.float32(1e-30)
    safe = np.where(tiny, np.float32(1), absmax)
    inverse = np.where(tiny, np.float32(0), np.float32(quant_max) / safe)
    q = np.rint(groups * inverse[..., None]).astype(np.int32)
    return q, np.where(tiny, np.float32(0), absmax / np.float32(quant_max))


def expected_w4(
    x: np.ndarray, planes: tuple[np.ndarray, np.ndarray, np.ndarray], quant_max: float
) -> np.ndarray:
    q, d, m = planes
    qx, dx = quantize(x, quant_max)
    acc = np.zeros((len(x), len(q)), np.float32)
    weights = q.reshape(len(q), -1, 32).astype(np.int32)
    for b in range(weights.shape[1]):
        isum = (qx[:, b] @ weights[:, b].T).astype(np.float32)
        acc = fma(isum, d[None, :, b].astype(np.float32) * dx[:, b, None], acc)
        scaled_sum = dx[:, b] * qx[:, b].sum(axis=1).astype(np.float32)
        acc = fma(m[None, :, b].astype(np.float32), scaled_sum[:, None], acc)
    return acc


def expected_w8(x: np.ndarray, q: np.ndarray, d: np.ndarray) -> np.ndarray:
    qx, dx = quantize(x, 4095)
    acc = np.zeros((len(x), len(q)), np.float32)
    weights = q.reshape(len(q), -1, 32).astype(np.int32)
    for b in range(weights.shape[1]):
        isum = (qx[:, b] @ weights[:, b].T).astype(np.float32)
        acc = fma(isum, d[None, :, b].astype(np.float32) * dx[:, b, None], acc)
    return acc


def expected_float(x: np.ndarray, weights: np.ndarray) -> np.ndarray:
    acc = np.zeros((len(x), len(weights)), np.float32)
    for k in range(x.shape[1]):
        acc = fma(weights[None, :, k], x[:, k, None], acc)
    return acc


def round_to_bf16(x: np.ndarray) -> np.ndarray:
    bits = x.view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
    return np.where(np.abs(x) < 2.0**-126, np.float32(0), rounded.view(np.float32))


def exponent_of(largest: float) -> int:
    """Brings `largest` into [0.99, 1.98)."""
    exponent = -int(np.floor(np.log2(largest)))
    return exponent if largest * 2.0**exponent < 1.98 else exponent - 1


def bf16_weights(q: np.ndarray, d: np.ndarray, m: np.ndarray | None, exponent: int) -> np.ndarray:
    """Scaled weights [rows, blocks, 32] from planes q [rows, cols], d and m [rows, blocks]."""

    def scaled(plane: np.ndarray) -> np.ndarray:
        halves = np.ldexp(plane.astype(np.float64), exponent).astype(np.float16)
        return halves.astype(np.float64)[..., None]

    exact = q.reshape(len(q), -1, 32) * scaled(d)
    halves = (exact if m is None else exact + scaled(m)).astype(np.float16)
    bits = ((halves.view(np.int16).astype(np.int32) + 4) >> 3) & 0x87FF | 0x3800
    return (bits.astype(np.uint32) << 16).view(np.float32)


def expected_bf16(
    x: np.ndarray, weights: np.ndarray, exponent: int, pairs: list[tuple[int, int]]
) -> np.ndarray:
    rounded = round_to_bf16(x).reshape(len(x), -1, 32)
    acc = np.zeros((len(x), len(weights)), np.float32)
    for b in range(weights.shape[1]):
        chains = [np.zeros_like(acc), np.zeros_like(acc)]
        for pair in pairs:
            for i, k in enumerate(pair):
                chains[i] = fma(rounded[:, b, k, None], weights[None, :, b, k], chains[i])
        acc = acc + (chains[0] + chains[1])
    return acc * np.float32(2.0**-exponent)


W4_PAIRS = [(c, c + 2) for i in range(4) for c in (4 * i, 4 * i + 16, 4 * i + 1, 4 * i + 17)]
W8_PAIRS = [(k, k + 1) for k in range(0, 32, 2)]


def expected_w4_bf16(x: np.ndarray, planes: tuple[np.ndarray, ...]) -> np.ndarray:
    q, d, m = planes
    wide_d, wide_m = d.astype(np.float64), m.astype(np.float64)
    exponent = exponent_of(np.maximum(np.abs(wide_m), np.abs(15 * wide_d + wide_m)).max())
    return expected_bf16(x, bf16_weights(q, d, m, exponent), exponent, W4_PAIRS)


def expected_w8_bf16(x: np.ndarray, q: np.ndarray, d: np.ndarray) -> np.ndarray:
    exponent = exponent_of(128 * np.abs(d.astype(np.float64)).max())
    weights = bf16_weights(q, d, None, exponent)
    return expected_bf16(x, weights, exponent, W8_PAIRS)


def make(
    ggml_type: GGMLType, bias: bool = False, activations: str = "int8"
) -> tuple[_native.LinearWeight, np.ndarray]:
    """A packed random matrix and what it should compute for the inputs of `inputs`."""
    tensor = random_blocks(ggml_type, ROWS, COLS)
    values = np.arange(ROWS, dtype=np.float32) if bias else None
    parts = [(int(ggml_type), ROWS, COLS, tensor.data)]
    weight = _native.Runtime("ref", 1).pack_linear(parts, values, activations=activations)
    if weight.formats == ["w4"] and activations == "bf16":
        expected = expected_w4_bf16(inputs(), to_w4(tensor))
    elif weight.formats == ["w8"] and activations == "bf16":
        expected = expected_w8_bf16(inputs(), *to_w8(tensor))
    elif weight.formats == ["w4"]:
        expected = expected_w4(inputs(), to_w4(tensor), 2047 if activations == "int12" else 127)
    elif weight.formats == ["w8"]:
        expected = expected_w8(inputs(), *to_w8(tensor))
    else:
        expected = expected_float(inputs(), dequantize(tensor))
    return weight, expected


def inputs() -> np.ndarray:
    """Ordinary values, and blocks that are zero or tiny."""
    x = np.random.default_rng(3).standard_normal((TOKENS, COLS)).astype(np.float32)
    x[1, 32:64] = 0
    x[2, :32] = 1e-35
    x[3] *= 1e6
    return x


@pytest.mark.parametrize("activations", ["int8", "int12", "bf16"])
@pytest.mark.parametrize(
    "ggml_type", [GGMLType.Q4_0, GGMLType.Q4_1, GGMLType.Q5_0, GGMLType.Q8_0, GGMLType.F16,
                  GGMLType.F32], ids=lambda t: t.name
)  # fmt: skip
def test_portable_kernel_follows_the_written_arithmetic(
    ggml_type: GGMLType, activations: str
) -> None:
    weight, expected = make(ggml_type, activations=activations)
    np.testing.assert_array_equal(_native.testing.linear("ref", inputs(), weight), expected)


def test_bias_and_residual_are_added_in_order() -> None:
    weight, product = make(GGMLType.Q4_1, bias=True)
    residual = np.random.default_rng(4).standard_normal((TOKENS, ROWS)).astype(np.float32)
    out = _native.testing.linear("ref", inputs(), weight, residual=residual)
    np.testing.assert_array_equal(out, (product + np.arange(ROWS, dtype=np.float32)) + residual)


def test_prologue_equals_the_op_that_it_replaces() -> None:
    weight, _ = make(GGMLType.Q4_1)
    norm = np.random.default_rng(5).standard_normal(COLS).astype(np.float32)
    x = inputs()
    fused = _native.testing.linear(
        "ref", x, weight, prologue="rms_norm", norm_weight=norm, eps=1e-5
    )
    apart = _native.testing.linear("ref", _native.testing.rms_norm("ref", x, norm, 1e-5), weight)
    np.testing.assert_array_equal(fused, apart)
    gate_up = np.concatenate([x, x[::-1]], axis=1)
    fused = _native.testing.linear("ref", gate_up, weight, prologue="silu_mul")
    apart = _native.testing.linear("ref", _native.testing.silu_mul("ref", gate_up), weight)
    np.testing.assert_array_equal(fused, apart)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("isa", _native.isa_names())
@pytest.mark.parametrize("ggml_type", [GGMLType.Q4_1, GGMLType.Q8_0, GGMLType.F16])
@pytest.mark.parametrize("activations", ["int8", "bf16"])
def test_a_bad_activation_spoils_its_own_row_only(
    bad: float, isa: str, ggml_type: GGMLType, activations: str
) -> None:
    skip_unless_available(isa, activations)
    weight, _ = make(ggml_type, activations=activations)
    x = inputs()
    clean = _native.testing.linear(isa, x, weight)
    x[2, 40] = bad
    out = _native.testing.linear(isa, x, weight)
    assert not np.isfinite(out[2]).any(), "a row of numbers would hide the failure"
    np.testing.assert_array_equal(np.delete(out, 2, axis=0), np.delete(clean, 2, axis=0))


def skip_unless_available(isa: str, activations: str) -> None:
    if isa not in _native.available_isas():
        pytest.skip(f"this CPU cannot run {isa}")
    if activations == "bf16" and not _native.Runtime(isa, 1).has_bf16:
        pytest.skip(f"{isa} does not multiply bf16")


@pytest.mark.parametrize("isa", ["ref", "amx"])
@pytest.mark.parametrize("scale", [2.0**-20, 2.0**-3, 2.0**9])
def test_weights_of_any_size_keep_their_precision_as_bf16(isa: str, scale: float) -> None:
    skip_unless_available(isa, "bf16")
    tensor = random_blocks(GGMLType.Q4_1, ROWS, COLS)
    halves = tensor.data.reshape(-1, GGMLType.Q4_1.block_bytes)[:, :4].copy().view(np.float16)
    blocks = tensor.data.reshape(-1, GGMLType.Q4_1.block_bytes).copy()
    blocks[:, :4] = (halves.astype(np.float32) * scale).astype(np.float16).view(np.uint8)
    weight = _native.Runtime("ref", 1).pack_linear(
        [(int(GGMLType.Q4_1), ROWS, COLS, blocks.ravel())], activations="bf16"
    )
    x = inputs()[:1]
    exact = x.astype(np.float64) @ weight.unpack().astype(np.float64).T
    out = _native.testing.linear(isa, x, weight)
    assert np.abs(out - exact).max() < 0.01 * np.abs(exact).max()


@pytest.mark.parametrize("isa", ["ref", "amx"])
def test_weights_that_are_not_finite_never_look_like_numbers(isa: str) -> None:
    skip_unless_available(isa, "bf16")
    tensor = random_blocks(GGMLType.Q8_0, ROWS, COLS)
    blocks = tensor.data.copy()
    blocks[:2] = np.array([np.inf], np.float16).view(np.uint8)
    weight = _native.Runtime("ref", 1).pack_linear(
        [(int(GGMLType.Q8_0), ROWS, COLS, blocks)], activations="bf16"
    )
    assert not np.isfinite(_native.testing.linear(isa, inputs(), weight)).any()
