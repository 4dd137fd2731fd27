from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from numpy.typing import NDArray

from caudal import _native
from caudal.ops.interface import BatchArrays
from tests.ops.paged_cache import (
    BLOCK,
    F32,
    Heads,
    PagedCache,
    from_bf16,
    quantize,
    to_bf16,
    unpack_blocks,
)

ISAS = _native.available_isas()
pytestmark = pytest.mark.parametrize("isa", ISAS)

TABLE_ERROR = 7e-8
"""Half a unit in the last place of cos and sin, plus the error of inv_freq's product."""
HALF_MAX = 65504.0
FORMATS = ["f16", "int8", "int8_tiles", "bf16_tiles"]


def inv_freq(rope_dim: int, base: float = 10000.0) -> F32:
    return (base ** (-np.arange(0, rope_dim, 2) / rope_dim)).astype(np.float32)


@dataclass(frozen=True)
class Step:
    """Inputs of one rope_and_cache call."""

    heads: Heads
    qkv: F32  # [tokens, heads + 2 kv heads, head_dim]
    batch: BatchArrays
    cache: PagedCache
    parts: list[tuple[int, int, int]]

    def table(self, isa: str, rope_dim: int) -> F32:
        return _native.testing.rope_table(isa, self.batch.positions, inv_freq(rope_dim))


def make_step(heads: Heads, parts: list[tuple[int, int, int]], scale: float = 1.0) -> Step:
    cache = PagedCache(heads, [first + n for _, first, n in parts])
    batch = cache.batch(parts)
    shape = (len(batch.positions), heads.num_heads + 2 * heads.num_kv_heads, heads.head_dim)
    qkv = (np.random.default_rng(3).normal(size=shape) * scale).astype(np.float32)
    return Step(heads, qkv, batch, cache, parts)


def run(
    isa: str,
    step: Step,
    rope_dim: int,
    *,
    is_interleaved: bool = False,
    norms: tuple[F32, F32] | None = None,
    num_threads: int = 1,
) -> F32:
    """q [tokens, heads, head_dim]; keys and values go to the cache."""
    q = _native.testing.rope_and_cache(
        isa,
        step.qkv.reshape(len(step.qkv), -1),
        step.batch,
        step.table(isa, rope_dim),
        step.cache.cache,
        0,
        is_interleaved,
        *(norms or (None, None)),
        1e-6,
        num_threads,
    )
    return q.reshape(len(step.qkv), step.heads.num_heads, step.heads.head_dim)


def rotate(
    x: F32, positions: NDArray[np.int32], rope_dim: int, is_interleaved: bool
) -> NDArray[np.float64]:
    """x [tokens, heads, head_dim] in double precision."""
    angle = positions[:, None, None] * inv_freq(rope_dim).astype(np.float64)
    c, s = np.cos(angle), np.sin(angle)
    half = rope_dim // 2
    first = slice(0, rope_dim, 2) if is_interleaved else slice(0, half)
    second = slice(1, rope_dim, 2) if is_interleaved else slice(half, rope_dim)
    out = x.astype(np.float64)
    a, b = x[..., first].astype(np.float64), x[..., second].astype(np.float64)
    out[..., first], out[..., second] = a * c - b * s, b * c + a * s
    return out


def stored(step: Step) -> tuple[F32, F32]:
    """Keys and values [tokens, kv heads, head_dim] of the step's tokens in the cache."""
    num_blocks = step.cache.cache.num_blocks
    data = step.cache.cache.export_blocks(np.arange(num_blocks, dtype=np.int32))
    keys, values = unpack_blocks(step.heads, data)
    return keys[step.batch.slot_mapping], values[step.batch.slot_mapping]


def test_table_is_accurate_up_to_a_million(isa: str) -> None:
    positions = np.array(
        [0, 1, 2, 3, 100, 4095, 8192, 131071, 524287, 999_999, 1_048_575], dtype=np.int32
    )
    freq = inv_freq(128, 1e6)
    table = _native.testing.rope_table(isa, positions, freq, num_threads=2)
    angle = positions[:, None].astype(np.float64) * freq.astype(np.float64)
    assert np.abs(table[:, 0] - np.cos(angle)).max() < TABLE_ERROR
    assert np.abs(table[:, 1] - np.sin(angle)).max() < TABLE_ERROR


def test_table_covers_every_quadrant(isa: str) -> None:
    freq = np.linspace(0, 2, 101, dtype=np.float32)
    table = _native.testing.rope_table(isa, np.arange(40, dtype=np.int32), freq)
    angle = np.arange(40)[:, None] * freq.astype(np.float64)
    assert np.abs(table[:, 0] - np.cos(angle)).max() < TABLE_ERROR
    assert np.abs(table[:, 1] - np.sin(angle)).max() < TABLE_ERROR


def test_attention_factor_scales_cos_and_sin(isa: str) -> None:
    positions = np.arange(5, dtype=np.int32)
    plain, scaled = (
        _native.testing.rope_table(isa, positions, inv_freq(32), factor) for factor in (1.0, 1.25)
    )
    np.testing.assert_allclose(scaled, plain * 1.25, rtol=2e-7, atol=1e-12)


@pytest.mark.parametrize("is_interleaved", [False, True])
@pytest.mark.parametrize(
    ("head_dim", "rope_dim"),
    [(64, 64), (128, 128), (80, 80), (80, 32), (96, 48), (256, 256), (16, 16), (64, 20)],
)
def test_rotation_matches_double_precision(
    isa: str, head_dim: int, rope_dim: int, is_interleaved: bool
) -> None:
    step = make_step(Heads(3, 1, head_dim), [(0, 0, 20), (1, 77, 1), (2, 30, 5)])
    q = run(isa, step, rope_dim, is_interleaved=is_interleaved, num_threads=2)
    positions = step.batch.positions
    expected = rotate(step.qkv[:, :3], positions, rope_dim, is_interleaved)
    assert np.abs(q - expected).max() < 2e-6
    keys, values = stored(step)
    expected = rotate(step.qkv[:, 3:4], positions, rope_dim, is_interleaved)
    np.testing.assert_allclose(keys, expected, rtol=6e-4, atol=1e-6)
    np.testing.assert_array_equal(values, step.qkv[:, 4:].astype(np.float16))


def test_norms_come_before_the_rotation(isa: str) -> None:
    step = make_step(Heads(4, 2, 64), [(0, 5, 9)], scale=30.0)
    rng = np.random.default_rng(0)
    q_norm, k_norm = rng.uniform(0.5, 2, size=(2, 64)).astype(np.float32)
    q = run(isa, step, 64, norms=(q_norm, k_norm))

    def norm(x: F32, weight: F32) -> F32:
        mean = np.mean(x.astype(np.float64) ** 2, axis=-1, keepdims=True)
        return np.asarray(x / np.sqrt(mean + 1e-6) * weight, dtype=np.float32)

    positions = step.batch.positions
    expected = rotate(norm(step.qkv[:, :4], q_norm), positions, 64, False)
    np.testing.assert_allclose(q, expected, rtol=1e-5, atol=2e-6)
    expected = rotate(norm(step.qkv[:, 4:6], k_norm), positions, 64, False)
    np.testing.assert_allclose(stored(step)[0], expected, rtol=6e-4, atol=1e-5)


@pytest.mark.parametrize("kv_format", ["int8", "int8_tiles"])
@pytest.mark.parametrize("head_dim", [16, 64, 80, 256])
def test_integer_error_is_half_a_step_of_the_scale(isa: str, kv_format: str, head_dim: int) -> None:
    largest = 127
    step = make_step(Heads(2, 2, head_dim, kv_format), [(0, 0, 33), (1, 60, 1)])
    run(isa, step, head_dim)
    keys, values = stored(step)
    rotated = rotate(step.qkv[:, 2:4], step.batch.positions, head_dim, False)
    for got, expected in ((keys, rotated), (values, step.qkv[:, 4:])):
        limit = np.abs(expected).max(axis=-1, keepdims=True) / (2 * largest) + 1e-5
        assert np.all(np.abs(got - expected) <= limit)
    quantized, scales = quantize(step.qkv[:, 4:], largest)
    np.testing.assert_allclose(values, quantized * scales[..., None], rtol=1e-6)


def test_bf16_cache_rounds_to_nearest(isa: str) -> None:
    step = make_step(Heads(2, 2, 80, "bf16_tiles"), [(0, 0, 33), (1, 60, 1)])
    run(isa, step, 80)
    keys, values = stored(step)
    rotated = rotate(step.qkv[:, 2:4], step.batch.positions, 80, False)
    np.testing.assert_allclose(keys, rotated, rtol=2**-8 * 1.001, atol=1e-6)
    np.testing.assert_array_equal(values, from_bf16(to_bf16(step.qkv[:, 4:])))


@pytest.mark.parametrize("broken", [np.nan, np.inf, -3.4e38])
def test_a_broken_value_makes_the_key_of_a_bf16_cache_nan(isa: str, broken: float) -> None:
    step = make_step(Heads(2, 2, 32, "bf16_tiles"), [(0, 0, 3)])
    step.qkv[1, 5, 7] = broken
    run(isa, step, 32)
    keys, values = stored(step)
    assert np.isnan(keys[1, 1]).any()
    assert np.isfinite(values).all()
    assert np.isfinite(np.delete(keys.reshape(6, -1), 3, axis=0)).all()


@pytest.mark.parametrize("kv_format", FORMATS)
def test_only_the_slots_of_the_step_change(isa: str, kv_format: str) -> None:
    heads = Heads(2, 1, 32, kv_format)
    step = make_step(heads, [(0, 19, 1), (1, 2, 3)])
    every_block = np.arange(step.cache.cache.num_blocks, dtype=np.int32)
    pattern = np.random.default_rng(1).integers(
        0, 255, (len(every_block), heads.head_nbytes), dtype=np.uint8
    )
    step.cache.cache.import_blocks(every_block, pattern)
    run(isa, step, 32)
    after = step.cache.cache.export_blocks(every_block)
    is_used = np.zeros(len(every_block) * BLOCK, dtype=bool)
    is_used[step.batch.slot_mapping] = True
    for before_part, after_part in zip(
        unpack_blocks(heads, pattern), unpack_blocks(heads, after), strict=True
    ):
        np.testing.assert_array_equal(before_part[~is_used], after_part[~is_used])
    changed = (pattern != after).sum()
    per_token = 2 * heads.head_nbytes // 32
    assert changed <= per_token * int(is_used.sum())


@pytest.mark.parametrize("kv_format", FORMATS)
def test_bits_do_not_depend_on_isa_threads_or_batch(isa: str, kv_format: str) -> None:
    heads = Heads(3, 1, 80, kv_format)
    norms = (np.full(80, 1.1, dtype=np.float32), np.full(80, 0.9, dtype=np.float32))
    parts = [(0, 0, 37), (1, 40, 1)]
    steps = [make_step(heads, parts) for _ in range(3)]
    expected = run("ref", steps[0], 80, norms=norms)
    for num_threads, step in enumerate(steps[1:], start=1):
        q = run(isa, step, 80, norms=norms, num_threads=num_threads)
        np.testing.assert_array_equal(q, expected)
        for got, want in zip(stored(step), stored(steps[0]), strict=True):
            np.testing.assert_array_equal(got, want)
    alone = make_step(heads, [(0, 40, 1)])
    single = Step(heads, steps[0].qkv[37:], alone.batch, alone.cache, alone.parts)
    np.testing.assert_array_equal(run(isa, single, 80, norms=norms), expected[37:])
    for got, want in zip(stored(single), stored(steps[0]), strict=True):
        np.testing.assert_array_equal(got, want[37:])


def test_halves_saturate_instead_of_overflowing(isa: str) -> None:
    step = make_step(Heads(1, 1, 16), [(0, 0, 2)])
    step.qkv[0, 1:] = 1e6
    step.qkv[1, 1:] = -1e6
    run(isa, step, 16)
    keys, values = stored(step)
    assert keys[0].max() == values[0].min() == HALF_MAX
    assert values[1].max() == -HALF_MAX


@pytest.mark.parametrize("kv_format", FORMATS)
@pytest.mark.parametrize("bad", [np.nan, -np.nan])
def test_nan_stays_visible_and_alone(isa: str, kv_format: str, bad: float) -> None:
    step = make_step(Heads(1, 1, 32, kv_format), [(0, 0, 3)])
    step.qkv[1, 1:, 7] = bad
    run(isa, step, 32)
    keys, values = stored(step)
    assert np.isnan(keys[1]).any()
    assert np.isnan(values[1]).any() or kv_format == "bf16_tiles"  # whose keys say it
    for part in (keys, values):
        assert np.isfinite(part[[0, 2]]).all()


def test_zero_keys_are_stored_as_zero(isa: str) -> None:
    step = make_step(Heads(1, 1, 32, "int8"), [(0, 0, 2)])
    step.qkv[:, 1:] = 0
    run(isa, step, 32)
    for part in stored(step):
        assert not part.any()
