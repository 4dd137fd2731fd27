"""Sequences that begin with the same blocks attend to these together."""

from __future__ import annotations

import numpy as np
import pytest

from caudal import _native
from tests.ops.paged_cache import BLOCK, Heads, PagedCache, supported_formats
from tests.ops.test_attention import Part, assert_right, assert_same_bits, make_queries, run

CASES = [(isa, f) for isa in _native.available_isas() for f in supported_formats(isa)]
SPLIT = 256


def make_cache(heads: Heads, lengths: list[int], num_shared: int) -> PagedCache:
    """All but the last sequence share the first `num_shared` tokens."""
    cache = PagedCache(heads, lengths)
    for seq in range(1, len(lengths) - 1):
        cache.share(0, seq, num_shared // BLOCK)
    return cache


def last_tokens(lengths: list[int]) -> list[Part]:
    return [(seq, n - 1, 1) for seq, n in enumerate(lengths)]


@pytest.mark.parametrize(("isa", "kv_format"), CASES)
@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim"), [(9, 3, 64), (4, 4, 48), (8, 1, 128)]
)
def test_shared_blocks_change_no_bits(
    isa: str, kv_format: str, num_threads: int, num_heads: int, num_kv_heads: int, head_dim: int
) -> None:
    lengths = [SPLIT * 2 + n for n in (0, 1, 40, 300, 17, 256, 5, 90, 33, 200, 12, 600)]
    cache = make_cache(Heads(num_heads, num_kv_heads, head_dim, kv_format), lengths, 2 * SPLIT)
    parts = last_tokens(lengths)
    batch = cache.batch(parts)
    shared = _native.testing.shared_attention(batch, num_heads, num_kv_heads, num_threads)
    assert {sequences for sequences, _ in shared} == {len(lengths) - 1}
    assert sum(splits for _, splits in shared) == 2
    queries = make_queries(cache)
    together = run(isa, cache, queries, parts, num_threads)
    for row, part in enumerate(parts):
        assert_same_bits(together[row : row + 1], run(isa, cache, queries, [part]))
    assert_right(isa, cache, parts, num_threads)


@pytest.mark.parametrize(("isa", "kv_format"), CASES)
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(9, 3, 64), (8, 1, 32)])
def test_several_queries_a_sequence_change_no_bits(
    isa: str, kv_format: str, num_heads: int, num_kv_heads: int, head_dim: int
) -> None:
    """Guessed tokens; of one sequence they reach back into a split that others share."""
    counts = [1, 9, 3, 16, 1, 2, 5, 9, 4]
    lengths = [SPLIT * 2 + n for n in (20, 9, 40, 300, 17, 256, 4, 90, 600)]
    cache = make_cache(Heads(num_heads, num_kv_heads, head_dim, kv_format), lengths, 2 * SPLIT)
    parts = [(seq, n - k, k) for seq, (n, k) in enumerate(zip(lengths, counts, strict=True))]
    shared = _native.testing.shared_attention(cache.batch(parts), num_heads, num_kv_heads, 2)
    # Rows of a task are bounded; the seventh sequence sees one whole split less.
    assert sum(queries for queries, _ in shared) > sum(counts) / 2
    queries = make_queries(cache)
    together = run(isa, cache, queries, parts, 2)
    alone = [run(isa, cache, queries, [part]) for part in parts]
    assert_same_bits(together, np.concatenate(alone))
    assert_right(isa, cache, parts, 2)


def test_only_neighbours_with_a_whole_split_in_common_share() -> None:
    heads = Heads(9, 3, 16)
    lengths = [700, 600, 513, 700, 400]
    cache = make_cache(heads, lengths, SPLIT + BLOCK)
    parts = last_tokens(lengths)
    assert _native.testing.shared_attention(cache.batch(parts), 9, 3) == [(4, 1)]
    prefill = [parts[0], (1, 500, 100), *parts[2:]]
    assert _native.testing.shared_attention(cache.batch(prefill), 9, 3) == []
    few = make_cache(heads, lengths, SPLIT - BLOCK)
    assert _native.testing.shared_attention(few.batch(parts), 9, 3) == []


def test_many_sequences_are_cut_into_tasks_of_bounded_rows() -> None:
    heads = Heads(9, 3, 16)
    lengths = [300 + n for n in range(101)]
    cache = make_cache(heads, lengths, SPLIT)
    shared = _native.testing.shared_attention(cache.batch(last_tokens(lengths)), 9, 3)
    assert sorted(shared) == [(36, 1), (64, 1)]


@pytest.mark.parametrize("isa", _native.available_isas())
def test_two_groups_share_apart(isa: str) -> None:
    heads = Heads(6, 2, 32)
    lengths = [300, 310, 320, 330, 600, 610, 620, 630, 640]
    cache = PagedCache(heads, lengths)
    for seq in (1, 2, 3):
        cache.share(0, seq, SPLIT // BLOCK)
    for seq in (5, 6, 7, 8):
        cache.share(4, seq, 2 * SPLIT // BLOCK)
    parts = last_tokens(lengths)
    batch = cache.batch(parts)
    assert sorted(_native.testing.shared_attention(batch, 6, 2)) == [(4, 1), (5, 2)]
    queries = make_queries(cache)
    together = run(isa, cache, queries, parts, 2)
    alone = [run(isa, cache, queries, [part]) for part in parts]
    assert_same_bits(together, np.concatenate(alone))
