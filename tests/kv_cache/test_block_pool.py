"""The pool never loses, duplicates or evicts the wrong block."""

from __future__ import annotations

import random

import pytest

from caudal.kv_cache.block_pool import BlockPool


def make_cached(pool: BlockPool, num_blocks: int) -> list[int]:
    """Unreferenced cached blocks, oldest first."""
    block_ids = pool.allocate(num_blocks)
    for block_id in block_ids:
        pool.mark_cached(block_id)
        pool.unlock(block_id)
    return block_ids


def test_fresh_pool_hands_out_blocks_in_order() -> None:
    pool = BlockPool(4, 16)
    assert pool.allocate(3) == [0, 1, 2]
    assert (pool.num_blocks_free, pool.num_blocks_held) == (1, 3)


def test_allocating_more_than_free_is_an_error_not_a_duplicate() -> None:
    pool = BlockPool(2, 16)
    pool.allocate(1)
    with pytest.raises(AssertionError):
        pool.allocate(2)


def test_block_is_free_only_after_its_last_reference() -> None:
    pool = BlockPool(2, 16)
    (block_id,) = pool.allocate(1)
    pool.lock(block_id)
    pool.unlock(block_id)
    assert pool.num_blocks_free == 1
    pool.unlock(block_id)
    assert pool.num_blocks_free == 2


def test_double_free_is_refused() -> None:
    pool = BlockPool(2, 16)
    (block_id,) = pool.allocate(1)
    pool.unlock(block_id)
    with pytest.raises(AssertionError):
        pool.unlock(block_id)


def test_cached_block_leaves_the_lru_while_referenced() -> None:
    pool = BlockPool(4, 16)
    first, second = make_cached(pool, 2)
    pool.lock(first)
    assert pool.lru_order() == [second]
    assert pool.num_blocks_available == 3
    pool.unlock(first)
    assert pool.lru_order() == [second, first]


def test_touch_makes_newest_and_ignores_held_and_free_blocks() -> None:
    pool = BlockPool(5, 16)
    first, second, third = make_cached(pool, 3)
    pool.touch(first)
    assert pool.lru_order() == [second, third, first]
    pool.lock(second)
    pool.touch(second)
    pool.touch(4)
    assert pool.lru_order() == [third, first]
    pool.check_integrity()


def test_uncached_block_becomes_free_unless_held() -> None:
    pool = BlockPool(3, 16)
    idle, held = make_cached(pool, 2)
    pool.lock(held)
    assert pool.mark_uncached(idle) is True
    assert pool.mark_uncached(held) is False
    assert pool.num_blocks_free == 2
    pool.unlock(held)
    assert pool.num_blocks_free == 3


def test_random_operations_keep_the_partition() -> None:
    rng = random.Random(0)
    pool = BlockPool(20, 16)
    held: list[int] = []
    for _ in range(3000):
        action = rng.randrange(5)
        if action == 0 and pool.num_blocks_free:
            held += pool.allocate(1)
        elif action == 1 and held:
            pool.unlock(held.pop(rng.randrange(len(held))))
        elif action == 2 and held:
            block_id = rng.choice(held)
            if not pool.is_cached(block_id):
                pool.mark_cached(block_id)
        elif action == 3 and pool.num_blocks_cached:
            if rng.random() < 0.5:
                pool.mark_uncached(pool.oldest())
            else:
                held.append(pool.oldest())
                pool.lock(held[-1])
        elif action == 4 and pool.num_blocks_cached:
            pool.touch(rng.choice(pool.lru_order()))
        pool.check_integrity()
        assert pool.num_blocks_held == len(set(held))


def test_check_integrity_sees_a_wrong_reference_count() -> None:
    pool = BlockPool(3, 16)
    (block_id,) = pool.allocate(1)
    pool.ref_counts[block_id] = 0
    with pytest.raises(AssertionError):
        pool.check_integrity()
