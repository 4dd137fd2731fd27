"""Every instruction set's linear kernel equals the portable one, bit for bit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pytest

from caudal import _native
from caudal.weights.ggml_types import GGMLType
from tests.weights.blocks import random_blocks

F32 = npt.NDArray[np.float32]


class Kind(NamedTuple):
    """A file type, and the rounding of what it multiplies."""

    ggml_type: GGMLType
    activations: str = "int8"

    @property
    def name(self) -> str:
        return f"{self.ggml_type.name} {self.activations}"


NARROW, WIDE, BF16 = (Kind(GGMLType.Q4_1, name) for name in ("int8", "int12", "bf16"))
FORMATS = [NARROW, WIDE, BF16, Kind(GGMLType.Q8_0), Kind(GGMLType.Q8_0, "bf16"),
           Kind(GGMLType.F16), Kind(GGMLType.F32)]  # fmt: skip
"""One file type for each of the packed formats w4 and w8 (in all ways), f16 and f32."""
QUANTISED = FORMATS[:5]


@pytest.fixture(params=[name for name in _native.isa_names() if name != "ref"])
def isa(request: pytest.FixtureRequest) -> str:
    """Each instruction set of this build; a skip says which ones this CPU lacks."""
    name = str(request.param)
    if name not in _native.available_isas():
        pytest.skip(f"this CPU cannot run {name}")
    return name


@dataclass(frozen=True)
class Case:
    """One linear and its inputs."""

    weight: _native.LinearWeight
    x: F32
    prologue: str = "none"
    norm_weight: F32 | None = None
    residual: F32 | None = None

    def run(self, isa: str, num_threads: int = 2, num_tokens: int | None = None) -> F32:
        """The first `num_tokens` rows, or all -> [tokens, rows of weight]."""
        if self.weight.activations == "bf16" and not _native.Runtime(isa, 1).has_bf16:
            pytest.skip(f"{isa} does not multiply bf16")
        residual = None if self.residual is None else self.residual[:num_tokens]
        return _native.testing.linear(
            isa, self.x[:num_tokens], self.weight, num_threads, self.prologue,
            self.norm_weight, 1e-5, residual,
        )  # fmt: skip


def pack(types: list[Kind], rows: list[int], cols: int, bias: bool = False) -> _native.LinearWeight:
    """Random matrices of `cols` columns, stacked by rows; the first says what they multiply."""
    parts = [
        (int(ggml_type), count, cols, random_blocks(ggml_type, count, cols, seed).data)
        for seed, ((ggml_type, *_), count) in enumerate(zip(types, rows, strict=True))
    ]
    values = activations(1, sum(rows))[0] if bias else None
    return _native.Runtime("ref", 1).pack_linear(parts, values, activations=types[0].activations)


def activations(num_tokens: int, cols: int) -> F32:
    """Gaussian values with a few outliers, as in real models."""
    rng = np.random.default_rng([num_tokens, cols])
    x = rng.standard_normal((num_tokens, cols)).astype(np.float32)
    x[rng.random(x.shape) < 0.01] *= 20
    return x


def assert_same_bits(actual: F32, expected: F32) -> None:
    np.testing.assert_array_equal(actual.view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("ggml_type", FORMATS, ids=lambda t: t.name)
def test_token_count_never_changes_a_row(isa: str, ggml_type: Kind) -> None:
    case = Case(pack([ggml_type], [40], 96), activations(50, 96))
    expected = case.run("ref")
    for num_tokens in range(1, 51):
        assert_same_bits(case.run(isa, 2, num_tokens), expected[:num_tokens])


@pytest.mark.parametrize("ggml_type", FORMATS, ids=lambda t: t.name)
@pytest.mark.parametrize("cols", [32, 64, 96, 288, 544, 1056])
def test_any_number_of_blocks(isa: str, ggml_type: Kind, cols: int) -> None:
    for num_tokens in (1, 2, 3, 7, 13, 16):
        case = Case(pack([ggml_type], [16], cols), activations(num_tokens, cols))
        assert_same_bits(case.run(isa), case.run("ref"))


@pytest.mark.parametrize("ggml_type", FORMATS, ids=lambda t: t.name)
def test_rows_that_do_not_fill_a_group(isa: str, ggml_type: Kind) -> None:
    for rows in (1, 7, 8, 9, 15, 17, 31, 33, 49, 100):
        weight = pack([ggml_type], [rows], 64, bias=True)
        residual = activations(12, rows)
        case = Case(weight, activations(12, 64), residual=residual)
        expected = case.run("ref")
        for num_tokens in (1, 2, 5, 12):
            assert_same_bits(case.run(isa, 2, num_tokens), expected[:num_tokens])


@pytest.mark.parametrize("ggml_type", FORMATS, ids=lambda t: t.name)
@pytest.mark.parametrize("num_threads", [1, 2, 3, 5])
def test_thread_count_never_changes_a_result(isa: str, ggml_type: Kind, num_threads: int) -> None:
    case = Case(pack([ggml_type], [150], 64), activations(300, 64))
    assert_same_bits(case.run(isa, num_threads), case.run("ref"))


@pytest.mark.parametrize("prologue", ["rms_norm", "silu_mul"])
@pytest.mark.parametrize("ggml_type", FORMATS, ids=lambda t: t.name)
def test_prologue_is_bit_equal(isa: str, ggml_type: Kind, prologue: str) -> None:
    cols = 608
    width = 2 * cols if prologue == "silu_mul" else cols
    norm = activations(1, cols)[0] if prologue == "rms_norm" else None
    case = Case(pack([ggml_type], [20], cols), activations(21, width), prologue, norm)
    expected = case.run("ref")
    for num_tokens in (1, 3, 4, 21):
        assert_same_bits(case.run(isa, 2, num_tokens), expected[:num_tokens])


@pytest.mark.parametrize("prologue", ["none", "rms_norm"])
@pytest.mark.parametrize("first", [NARROW, WIDE, BF16], ids=lambda t: t.name)
def test_segments_of_mixed_formats_share_one_call(isa: str, prologue: str, first: Kind) -> None:
    types = [first, *map(Kind, (GGMLType.Q8_0, GGMLType.F16, GGMLType.F32, GGMLType.Q4_1))]
    norm = activations(1, 128)[0] if prologue == "rms_norm" else None
    weight = pack(types, [19, 33, 5, 40, 23], 128, bias=True)
    residual = activations(37, weight.rows)
    case = Case(weight, activations(37, 128), prologue, norm, residual)
    expected = case.run("ref")
    for num_tokens in (1, 2, 9, 37):
        assert_same_bits(case.run(isa, 2, num_tokens), expected[:num_tokens])


@pytest.mark.parametrize("kind", QUANTISED, ids=lambda t: t.name)
@pytest.mark.parametrize("byte", [0x00, 0xFF, 0x7F, 0x80])
def test_largest_products_do_not_overflow(isa: str, kind: Kind, byte: int) -> None:
    ggml_type = kind.ggml_type
    tensor = random_blocks(ggml_type, 16, 64)
    raw = tensor.data.reshape(-1, ggml_type.block_bytes).copy()
    raw[:, ggml_type.block_bytes - (16 if ggml_type == GGMLType.Q4_1 else 32) :] = byte
    weight = _native.Runtime("ref", 1).pack_linear(
        [(int(ggml_type), 16, 64, raw.ravel())], activations=kind.activations
    )
    x = np.full((20, 64), 3.5, np.float32)
    x[1::2] *= -1
    case = Case(weight, x)
    assert_same_bits(case.run(isa), case.run("ref"))


@pytest.mark.parametrize("ggml_type", QUANTISED, ids=lambda t: t.name)
def test_blocks_of_extreme_magnitude_round_alike(isa: str, ggml_type: Kind) -> None:
    scales = np.float32([0, 1e-44, 1e-38, 1e-31, 9.9e-31, 1.1e-30, 1e-20, 1, 1e20, 1e36])
    x = np.repeat(scales, 32)[None, :] * activations(18, 320)
    case = Case(pack([ggml_type], [16], 320), np.ascontiguousarray(x, np.float32))
    assert_same_bits(case.run(isa), case.run("ref"))


@pytest.mark.parametrize(("kind", "largest"), [(NARROW, 127), (WIDE, 2047)])
def test_values_halfway_between_two_integers_round_to_even(
    isa: str, kind: Kind, largest: int
) -> None:
    x = np.zeros((16, 32), np.float32)
    x[:, 0] = largest
    x[:, 1:] = np.arange(31, dtype=np.float32) - 15.5
    case = Case(pack([kind], [16], 32), x)
    assert_same_bits(case.run(isa), case.run("ref"))
