from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from caudal import _native
from tests.ops.paged_cache import F32, Heads, PagedCache, supported_formats

CASES = [(isa, f) for isa in _native.available_isas() for f in supported_formats(isa)]
pytestmark = pytest.mark.parametrize(("isa", "kv_format"), CASES)

LARGEST_ERROR = {"f16": 4e-6, "int8": 2e-4, "int8_tiles": 2e-4, "bf16_tiles": 2e-2}
"""Against double precision on what the cache holds; values are of order 1. With an int8 cache
queries and weights are rounded to 15 bits, with a bf16 cache to bf16.
"""

AROUND_BOUNDARIES = [
    *range(1, 71),
    *(n + d for n in (128, 256, 512, 576, 1024) for d in (-1, 0, 1)),
]

Part = tuple[int, int, int]


def run(
    isa: str, cache: PagedCache, queries: list[F32], parts: list[Part], num_threads: int = 1
) -> F32:
    """Outputs [tokens, num_heads, head_dim] of a step; queries[seq][position]."""
    heads = cache.heads
    q = np.concatenate([queries[seq][first : first + n] for seq, first, n in parts])
    out = _native.testing.attention(
        isa,
        q.reshape(len(q), -1),
        cache.batch(parts),
        cache.cache,
        0,
        heads.head_dim**-0.5,
        num_threads,
    )
    return out.reshape(len(q), heads.num_heads, heads.head_dim)


def make_queries(cache: PagedCache, seed: int = 1) -> list[F32]:
    rng = np.random.default_rng(seed)
    shape = (cache.heads.num_heads, cache.heads.head_dim)
    return [rng.normal(size=(n, *shape)).astype(np.float32) for n in cache.lengths]


def expected(cache: PagedCache, queries: list[F32], parts: list[Part]) -> NDArray[np.float64]:
    """Softmax attention in double precision on what the cache holds."""
    heads = cache.heads
    group = heads.num_heads // heads.num_kv_heads
    rows = []
    for seq, first, n in parts:
        keys, values = (
            np.repeat(x[seq].astype(np.float64), group, axis=1) for x in (cache.keys, cache.values)
        )
        for position in range(first, first + n):
            k, v = keys[: position + 1], values[: position + 1]
            scores = np.einsum("hd,khd->hk", queries[seq][position], k) * heads.head_dim**-0.5
            p = np.exp(scores - scores.max(axis=1, keepdims=True))
            rows.append(np.einsum("hk,khd->hd", p / p.sum(axis=1, keepdims=True), v))
    return np.array(rows)


def assert_right(isa: str, cache: PagedCache, parts: list[Part], num_threads: int = 1) -> None:
    queries = make_queries(cache)
    out = run(isa, cache, queries, parts, num_threads)
    limit = LARGEST_ERROR[cache.heads.kv_format]
    error = np.abs(out - expected(cache, queries, parts)).max()
    assert error < limit


def assert_same_bits(a: F32, b: F32) -> None:
    np.testing.assert_array_equal(a.view(np.uint32), b.view(np.uint32))


def test_decode_is_right_around_every_boundary(isa: str, kv_format: str) -> None:
    lengths = AROUND_BOUNDARIES
    cache = PagedCache(Heads(3, 1, 32, kv_format), lengths)
    assert_right(isa, cache, [(i, n - 1, 1) for i, n in enumerate(lengths)], num_threads=2)


@pytest.mark.parametrize("head_dim", [16, 48, 64, 80, 96, 112, 128, 144, 192, 256])
def test_every_head_size_decodes_and_prefills(isa: str, kv_format: str, head_dim: int) -> None:
    cache = PagedCache(Heads(4, 2, head_dim, kv_format), [70, 45])
    assert_right(isa, cache, [(0, 69, 1), (1, 20, 25)])


@pytest.mark.parametrize("group", range(1, 17))
def test_every_group_size_decodes_and_prefills(isa: str, kv_format: str, group: int) -> None:
    cache = PagedCache(Heads(2 * group, 2, 16, kv_format), [67, 40, 90])
    assert_right(isa, cache, [(0, 66, 1), (1, 30, 10), (2, 85, 5)], num_threads=2)


@pytest.mark.parametrize("num_queries", [1, 2, 3, 4, 5, 16, 63, 64, 65, 130])
@pytest.mark.parametrize("past", [0, 1, 15, 63, 448, 500])
def test_prefill_sees_only_the_past(isa: str, kv_format: str, num_queries: int, past: int) -> None:
    cache = PagedCache(Heads(3, 1, 16, kv_format), [past + num_queries])
    assert_right(isa, cache, [(0, past, num_queries)])


def test_rows_without_a_sequence_change_nothing(isa: str, kv_format: str) -> None:
    cache = PagedCache(Heads(2, 2, 16, kv_format), [20, 20, 20])
    queries = make_queries(cache)
    out = run(isa, cache, queries, [(0, 19, 1), (1, 5, 0), (2, 10, 10)])
    alone = run(isa, cache, queries, [(2, 10, 10)])
    assert_same_bits(out[1:], alone)


def test_a_row_has_the_same_bits_however_it_is_computed(isa: str, kv_format: str) -> None:
    """Decode = prefill of any size = any batch = any number of threads, split or not."""
    length = 600
    cache = PagedCache(Heads(6, 2, 16, kv_format), [length, 300, 77])
    queries = make_queries(cache)
    whole = run(isa, cache, queries, [(0, 0, length)])
    for num_threads in (2, 4):
        assert_same_bits(run(isa, cache, queries, [(0, 0, length)], num_threads), whole)
    for step in (1, 2, 3, 7, 33, 64, 129):
        first = length - step * (40 // step + 1)
        for begin in range(max(0, first), length, step):
            n = min(step, length - begin)
            num_threads = 1 + begin % 3
            part = run(isa, cache, queries, [(0, begin, n)], num_threads)
            assert_same_bits(part, whole[begin : begin + n])
    for position in (0, 1, 63, 64, 65, 511, 512, 513, 599):
        parts = [(1, 299, 1), (0, position, 1), (2, 30, 40)]
        for num_threads in (1, 2):
            out = run(isa, cache, queries, parts, num_threads)
            assert_same_bits(out[1:2], whole[position : position + 1])


def test_split_contexts_merge_to_the_same_bits(isa: str, kv_format: str) -> None:
    lengths = [3000, 1025, 513, 512, 40]
    cache = PagedCache(Heads(3, 1, 16, kv_format), lengths)
    queries = make_queries(cache)
    parts = [(i, n - 1, 1) for i, n in enumerate(lengths)]
    unsplit = run(isa, cache, queries, parts, 1)
    for num_threads in (2, 3, 8):
        assert_same_bits(run(isa, cache, queries, parts, num_threads), unsplit)
    for i, part in enumerate(parts):  # alone, every long context is split
        assert_same_bits(run(isa, cache, queries, [part], 4)[0], unsplit[i])
    prefill = [(0, 2990, 10), (1, 1000, 25)]
    unsplit = run(isa, cache, queries, prefill, 1)
    for num_threads in (2, 8):
        assert_same_bits(run(isa, cache, queries, prefill, num_threads), unsplit)
    error = np.abs(unsplit - expected(cache, queries, prefill)).max()
    assert error < LARGEST_ERROR[kv_format]


def test_instruction_sets_agree_in_every_bit(isa: str, kv_format: str) -> None:
    cache = PagedCache(Heads(8, 2, 80, kv_format), [150, 530])
    queries = make_queries(cache)
    parts = [(0, 100, 50), (1, 529, 1)]
    assert_same_bits(run(isa, cache, queries, parts), run("ref", cache, queries, parts))


@pytest.mark.parametrize("garbage", [np.nan, -np.nan, np.inf, 6e4])
def test_stale_slots_do_not_leak(isa: str, kv_format: str, garbage: float) -> None:
    lengths = [1, 17, 50, 70, 127]
    parts = [(0, 0, 1), (1, 16, 1), (2, 40, 10), (3, 69, 1), (4, 50, 77)]
    clean, dirty = (
        PagedCache(Heads(3, 1, 32, kv_format), lengths, garbage=g) for g in (1.0, garbage)
    )
    queries = make_queries(clean)
    out = run(isa, dirty, queries, parts)
    assert np.all(np.isfinite(out))
    assert_same_bits(out, run(isa, clean, queries, parts))


@pytest.mark.parametrize("broken", [0, 29, 64])
def test_a_broken_token_does_not_reach_earlier_rows(isa: str, kv_format: str, broken: int) -> None:
    cache = PagedCache(Heads(3, 1, 32, kv_format), [100, 60])
    queries = make_queries(cache)
    parts = [(0, 0, 100), (1, 59, 1)]
    good = run(isa, cache, queries, parts)
    for target in ("keys", "values"):
        keys, values = cache.keys[0].copy(), cache.values[0].copy()
        (keys if target == "keys" else values)[broken] = np.nan
        with np.errstate(invalid="ignore"):
            cache.write(0, keys, values)
        out = run(isa, cache, queries, parts)
        assert_same_bits(out[:broken], good[:broken])
        assert np.all(np.isnan(out[broken:100]))
        assert_same_bits(out[100:], good[100:])
        cache.write(0, *(np.nan_to_num(x, nan=1.0) for x in (keys, values)))


def test_extreme_scores_stay_finite(isa: str, kv_format: str) -> None:
    cache = PagedCache(Heads(2, 1, 64, kv_format), [140])
    queries = [q * np.float32(3e3) for q in make_queries(cache)]
    parts = [(0, 0, 140)]
    out = run(isa, cache, queries, parts)
    assert np.abs(out).max() <= np.abs(cache.values[0]).max() * 1.001
    if kv_format == "f16":  # scores near 1e4 are rounded to 1e-3
        assert np.abs(out - expected(cache, queries, parts)).max() < 5e-3


def test_zero_queries_and_values_are_exact(isa: str, kv_format: str) -> None:
    cache = PagedCache(Heads(2, 2, 32, kv_format), [100])
    keys = cache.keys[0]
    ones = np.ones_like(keys)
    cache.write(0, keys, ones)
    zero = [np.zeros((100, 2, 32), dtype=np.float32)]
    out = run(isa, cache, zero, [(0, 60, 40)])
    np.testing.assert_allclose(out, cache.values[0][60:], atol=1e-6)
