"""Prefix reuse: right hits only, leaf-first eviction, nothing lost when requests share."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from caudal.kv_cache.kv_cache_manager import KVCacheManager
from caudal.kv_cache.radix_cache import make_block_keys

B = 16


def make_manager(num_blocks: int = 16, *, cache: bool = True) -> KVCacheManager:
    return KVCacheManager(num_blocks, B, enable_prefix_caching=cache)


def begin(kv: KVCacheManager, name: str, tokens: list[int], namespace: str = "") -> int:
    """Start a request on what is cached and give it slots for all tokens; returns the hit."""
    block_ids, num_cached = kv.match_prefix(namespace, tokens)
    kv.start(name, namespace, block_ids)
    assert kv.allocate_slots(name, len(tokens)) is not None
    return num_cached


def compute(kv: KVCacheManager, name: str, tokens: list[int], namespace: str = "") -> int:
    num_cached = begin(kv, name, tokens, namespace)
    kv.insert_prefix(name, tokens, len(tokens))
    kv.check_integrity()
    return num_cached


def run(kv: KVCacheManager, name: str, tokens: list[int], namespace: str = "") -> int:
    """A request from start to end."""
    num_cached = compute(kv, name, tokens, namespace)
    kv.free(name)
    kv.check_integrity()
    return num_cached


def tokens_of(num_blocks: int, salt: int = 0) -> list[int]:
    return [salt * 1000 + index for index in range(num_blocks * B)]


def test_block_keys_are_exact_and_skip_the_partial_block() -> None:
    keys = make_block_keys([1, 2, 3, 4, 5], 2)
    assert keys == [make_block_keys([1, 2], 2)[0], make_block_keys([3, 4], 2)[0]]
    assert make_block_keys([1, 2, 3, 4, 5], 2, start_block=1) == keys[1:]
    assert make_block_keys([1], 2) == []
    assert make_block_keys([1, 256], 2) != make_block_keys([257, 0], 2)


def test_hit_never_covers_the_last_token() -> None:
    kv = make_manager()
    tokens = tokens_of(3)
    assert run(kv, "a", tokens) == 0
    assert run(kv, "b", tokens) == 2 * B
    assert run(kv, "c", [*tokens, 7]) == 3 * B
    assert run(kv, "d", tokens[:B]) == 0


def test_only_full_blocks_of_the_same_prefix_hit() -> None:
    kv = make_manager()
    tokens = tokens_of(3)
    run(kv, "a", tokens)
    assert run(kv, "b", [*tokens[: B + 5], -1, *tokens[B + 6 :], 0]) == B
    assert run(kv, "c", [9, *tokens]) == 0
    assert run(kv, "d", tokens[B:] + tokens[:B]) == 0


def test_namespaces_never_share() -> None:
    kv = make_manager()
    tokens = tokens_of(2)
    run(kv, "a", tokens, "one")
    assert run(kv, "b", [*tokens, 1], "two") == 0
    assert run(kv, "c", [*tokens, 1], "one") == 2 * B


def test_match_takes_no_reference_and_does_not_refresh() -> None:
    kv = make_manager(4)
    run(kv, "a", tokens_of(2, 1))
    run(kv, "b", tokens_of(2, 2))
    assert kv.match_prefix("", [*tokens_of(2, 1), 0])[1] == 2 * B
    compute(kv, "c", tokens_of(2, 3))
    assert kv.match_prefix("", [*tokens_of(2, 1), 0])[1] == 0
    assert kv.match_prefix("", [*tokens_of(2, 2), 0])[1] == 2 * B


def test_eviction_takes_the_least_recently_used_prefix_from_its_end() -> None:
    kv = make_manager(6)
    run(kv, "old", tokens_of(3, 1))
    run(kv, "new", tokens_of(3, 2))
    run(kv, "old again", [*tokens_of(3, 1)[: 2 * B + 1]])
    compute(kv, "c", tokens_of(1, 3))
    # The oldest is old's third block: the first two were used again, "new" came after it.
    assert kv.match_prefix("", [*tokens_of(3, 1), 0])[1] == 2 * B
    assert kv.match_prefix("", [*tokens_of(3, 2), 0])[1] == 3 * B
    compute(kv, "d", tokens_of(1, 4))
    assert kv.match_prefix("", [*tokens_of(3, 2), 0])[1] == 2 * B
    assert kv.match_prefix("", [*tokens_of(3, 1), 0])[1] == 2 * B


def test_blocks_in_use_are_never_evicted() -> None:
    kv = make_manager(4)
    compute(kv, "a", tokens_of(2, 1))
    run(kv, "b", tokens_of(2, 2))
    assert kv.num_blocks_available == 2
    compute(kv, "c", tokens_of(2, 3))
    assert not set(kv.block_ids("a")) & set(kv.block_ids("c"))
    assert kv.num_blocks_available == 0


def test_shortage_changes_nothing_and_evicts_nothing() -> None:
    kv = make_manager(4)
    run(kv, "a", tokens_of(2, 1))
    kv.start("b", "", [])
    before = (kv.num_blocks_free, kv.num_blocks_cached)
    assert kv.allocate_slots("b", 5 * B) is None
    assert (kv.num_blocks_free, kv.num_blocks_cached) == before
    assert kv.block_ids("b") == []
    kv.check_integrity()


def test_growth_returns_only_the_appended_blocks() -> None:
    kv = make_manager()
    kv.start("a", "", [])
    first = kv.allocate_slots("a", B)
    assert first is not None and len(first) == 1
    assert kv.allocate_slots("a", B) == []
    more = kv.allocate_slots("a", B + 1)
    assert more is not None
    assert kv.block_ids("a") == first + more
    assert kv.num_slots("a") == 2 * B


def test_needed_blocks_count_idle_prefix_blocks_once() -> None:
    kv = make_manager(4)
    run(kv, "a", tokens_of(2))
    prompt = [*tokens_of(2), 1, 2]
    block_ids, _ = kv.match_prefix("", prompt)
    needed = kv.num_blocks_needed(len(prompt), block_ids)
    before = kv.num_blocks_available
    begin(kv, "b", prompt)
    assert before - kv.num_blocks_available == needed == 3
    # Another one shares the blocks that are held now: only its own block is needed.
    assert kv.num_blocks_needed(len(prompt), block_ids) == 1


def test_concurrent_copies_of_one_block_are_freed_once_each() -> None:
    kv = make_manager(8)
    tokens = tokens_of(2)
    begin(kv, "a", tokens)
    begin(kv, "b", tokens)
    kv.insert_prefix("a", tokens, 2 * B)
    kv.insert_prefix("b", tokens, 2 * B)
    kv.check_integrity()
    kv.free("a")
    kv.check_integrity()
    kv.free("b")
    kv.check_integrity()
    assert (kv.num_blocks_free, kv.num_blocks_cached) == (6, 2)


def test_request_on_a_private_copy_still_caches_what_follows() -> None:
    """A prompt of whole blocks recomputes its last block; its output must be reusable."""
    kv = make_manager(12)
    prompt = tokens_of(2)
    run(kv, "a", prompt)
    longer = prompt + tokens_of(2, 5)
    begin(kv, "b", prompt)
    assert kv.allocate_slots("b", len(longer)) is not None
    kv.insert_prefix("b", longer, len(longer))
    kv.free("b")
    kv.check_integrity()
    assert kv.match_prefix("", [*longer, 0])[1] == 4 * B


def test_evicting_a_copied_block_does_not_break_the_request_built_on_it() -> None:
    kv = make_manager(6)
    prompt = tokens_of(2)
    run(kv, "a", prompt)
    longer = prompt + tokens_of(1, 5)
    begin(kv, "b", prompt)  # shares block 0, holds its own copy of block 1
    assert kv.allocate_slots("b", len(longer)) is not None
    kv.insert_prefix("b", longer, 3 * B)
    own = kv.block_ids("b")
    begin(kv, "c", tokens_of(3, 7)[: 2 * B + 1])  # evicts a's block 1, under b's block 2
    kv.check_integrity()
    assert not set(own) & set(kv.block_ids("c"))
    assert kv.match_prefix("", [*longer, 0])[1] == B
    kv.free("c")
    # The next offer puts b's own blocks in.
    kv.allocate_slots("b", 4 * B)
    kv.insert_prefix("b", longer + tokens_of(1, 6), 4 * B)
    kv.check_integrity()
    kv.free("b")
    kv.check_integrity()
    assert kv.match_prefix("", [*longer, 0]) == (own, 3 * B)


def test_prefix_copied_by_another_is_as_fresh_as_its_user() -> None:
    """The tree's block 1 serves b's continuation: it must not be evicted before it."""
    kv = make_manager(8)
    prompt = tokens_of(2)
    run(kv, "a", prompt)
    longer = prompt + tokens_of(1, 5)
    begin(kv, "b", prompt)
    run(kv, "other", tokens_of(1, 8))
    assert kv.allocate_slots("b", len(longer)) is not None
    kv.insert_prefix("b", longer, 3 * B)
    kv.free("b")
    kv.check_integrity()
    compute(kv, "c", tokens_of(5, 9))  # everything free, plus the oldest: "other"
    assert kv.match_prefix("", [*tokens_of(1, 8), 0])[1] == 0
    assert kv.match_prefix("", [*longer, 0])[1] == 3 * B


def test_truncate_returns_the_slots_past_the_kept_tokens() -> None:
    kv = make_manager(8)
    compute(kv, "a", tokens_of(2))
    grown = kv.allocate_slots("a", 5 * B)
    assert grown is not None
    assert kv.truncate("a", 2 * B + 1) == grown[1:]
    assert kv.num_slots("a") == 3 * B
    kv.check_integrity()
    with pytest.raises(AssertionError):
        kv.truncate("a", B)


def test_export_range_covers_exactly_the_tokens() -> None:
    kv = make_manager(8)
    begin(kv, "a", tokens_of(4))
    table = kv.block_ids("a")
    assert kv.block_ids_of("a", 0, 4 * B) == table
    assert kv.block_ids_of("a", B, 2 * B) == table[1:2]
    assert kv.block_ids_of("a", B - 1, B + 1) == table[:2]
    assert kv.block_ids_of("a", 2 * B, 2 * B) == []


def test_without_prefix_caching_nothing_is_kept() -> None:
    kv = make_manager(cache=False)
    assert run(kv, "a", tokens_of(3)) == 0
    assert run(kv, "b", tokens_of(3)) == 0
    assert (kv.num_blocks_free, kv.num_blocks_cached) == (16, 0)
    assert kv.counters.prefix_queries_tokens == 0


def test_wasted_fraction_counts_unused_slots_only() -> None:
    kv = make_manager()
    assert kv.wasted_fraction([]) == 0.0
    begin(kv, "a", tokens_of(2)[:20])
    assert kv.wasted_fraction([("a", 20)]) == pytest.approx(12 / 32)


def test_namespaces_without_blocks_are_forgotten() -> None:
    """One root per tenant that ever came would be a leak."""
    kv = make_manager(4)
    for index in range(50):
        run(kv, "a", tokens_of(2, index), f"tenant {index}")
    assert kv._radix is not None
    assert len(kv._radix._roots) <= 2


@dataclass
class Model:
    """What must be true, kept naively: contents of slots, and who holds them."""

    contents: dict[int, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    requests: dict[str, tuple[str, list[int], int]] = field(default_factory=dict)


@pytest.mark.parametrize("seed", range(8))
def test_random_sharing_never_yields_a_wrong_block(seed: int) -> None:
    rng = random.Random(seed)
    kv = make_manager(rng.choice([8, 14, 30]))
    model = Model()
    num_hits = 0
    for step in range(600):
        if rng.random() < 0.4 and len(model.requests) < 6:
            namespace = rng.choice(["", "x"])
            length = rng.randint(1, 5 * B)
            length = length // B * B or 1 if rng.random() < 0.4 else length
            tokens = [rng.randrange(2) if rng.random() < 0.02 else 0 for _ in range(length)]
            block_ids, num_cached = kv.match_prefix(namespace, tokens)
            if kv.num_blocks_needed(length, block_ids) > kv.num_blocks_available:
                continue
            for index, block_id in enumerate(block_ids):
                assert model.contents[block_id] == (namespace, tuple(tokens[: (index + 1) * B]))
            num_hits += num_cached
            kv.start(f"r{step}", namespace, block_ids)
            model.requests[f"r{step}"] = (namespace, tokens, num_cached)
            assert kv.allocate_slots(f"r{step}", length) is not None
        elif model.requests and rng.random() < 0.6:
            name = rng.choice(list(model.requests))
            namespace, tokens, computed = model.requests[name]
            if computed == len(tokens):
                tokens.append(rng.randrange(2))
                if kv.allocate_slots(name, len(tokens)) is None:
                    tokens.pop()
                    continue
            computed = rng.randint(computed + 1, len(tokens))
            table = kv.block_ids(name)
            for index in range(model.requests[name][2] // B, computed // B):
                model.contents[table[index]] = (namespace, tuple(tokens[: (index + 1) * B]))
            model.requests[name] = (namespace, tokens, computed)
            kv.insert_prefix(name, tokens, computed)
        elif model.requests:
            name = rng.choice(list(model.requests))
            kv.free(name)
            del model.requests[name]
        kv.check_integrity()
        for name, (namespace, tokens, computed) in model.requests.items():
            for index, block_id in enumerate(kv.block_ids(name)[: computed // B]):
                assert model.contents[block_id] == (namespace, tuple(tokens[: (index + 1) * B]))
    assert num_hits > 0
