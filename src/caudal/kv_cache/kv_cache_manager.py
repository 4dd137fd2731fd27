"""What the scheduler sees of the KV cache: block tables per request and prefix reuse."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from caudal.kv_cache.block_pool import BlockPool
from caudal.kv_cache.radix_cache import RadixCache, RadixNode, make_block_keys


@dataclass(slots=True, eq=False)
class BlockTable:
    """The blocks of one request, in token order."""

    namespace: str
    block_ids: list[int]
    num_inserted: int = 0
    """Leading blocks whose tokens are in the prefix tree."""
    node: RadixNode | None = None
    """Tree node of block `num_inserted - 1`; not always over this request's own block."""


@dataclass(slots=True)
class PrefixCounters:
    """Prompt tokens looked up in, and found in, the prefix cache; they only grow."""

    prefix_queries_tokens: int = 0
    prefix_hits_tokens: int = 0


class KVCacheManager:
    """Owns the block tables; hides pool and tree from the scheduler."""

    def __init__(self, num_blocks: int, block_size: int, *, enable_prefix_caching: bool) -> None:
        self.block_size = block_size
        self.counters = PrefixCounters()
        self._pool = BlockPool(num_blocks, block_size)
        self._radix = RadixCache(self._pool) if enable_prefix_caching else None
        self._tables: dict[str, BlockTable] = {}

    @property
    def has_prefix_cache(self) -> bool:
        """False: every match is empty and nothing is inserted."""
        return self._radix is not None

    @property
    def num_blocks_total(self) -> int:
        """Blocks in the pool."""
        return self._pool.num_blocks

    @property
    def num_blocks_free(self) -> int:
        """Blocks that hold nothing."""
        return self._pool.num_blocks_free

    @property
    def num_blocks_cached(self) -> int:
        """Unreferenced blocks that still hold a reusable prefix (evictable)."""
        return self._pool.num_blocks_cached

    @property
    def num_blocks_held(self) -> int:
        """Blocks referenced by requests."""
        return self._pool.num_blocks_held

    @property
    def num_blocks_available(self) -> int:
        """Blocks that `allocate_slots` can hand out: free and cached ones."""
        return self._pool.num_blocks_available

    @property
    def num_tables(self) -> int:
        """Requests with an open block table."""
        return len(self._tables)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens fill."""
        return -(-num_tokens // self.block_size)

    def match_prefix(
        self, namespace: str, token_ids: Sequence[int], block_keys: Sequence[bytes] | None = None
    ) -> tuple[list[int], int]:
        """The longest cached prefix of `token_ids`: its block ids and its length in tokens.

        At least the last token is left to compute. Takes no reference: valid until the next
        call that allocates. `block_keys` saves making the keys again.
        """
        if self._radix is None:
            return [], 0
        max_blocks = (len(token_ids) - 1) // self.block_size
        if block_keys is None:
            block_keys = make_block_keys(token_ids, self.block_size)
        block_ids = self._radix.match(namespace, block_keys, max_blocks)
        return block_ids, len(block_ids) * self.block_size

    def num_blocks_needed(self, num_tokens: int, prefix_block_ids: Sequence[int]) -> int:
        """How much `num_blocks_available` falls if a request starts with this prefix."""
        ref_counts = self._pool.ref_counts
        num_idle = sum(ref_counts[block_id] == 0 for block_id in prefix_block_ids)
        return self.blocks_for(num_tokens) - len(prefix_block_ids) + num_idle

    def start(self, request_id: str, namespace: str, prefix_block_ids: Sequence[int]) -> None:
        """Open a request's table on a prefix just returned by `match_prefix`; locks it."""
        assert request_id not in self._tables
        table = BlockTable(namespace, list(prefix_block_ids))
        for block_id in prefix_block_ids:
            self._pool.lock(block_id)
        if prefix_block_ids:
            assert self._radix is not None
            table.num_inserted = len(prefix_block_ids)
            table.node = self._radix.node_of(prefix_block_ids[-1])
        self._tables[request_id] = table

    def allocate_slots(self, request_id: str, num_tokens: int) -> list[int] | None:
        """Make the request's table cover `num_tokens` tokens; returns the appended block ids.

        None, with nothing changed, if the pool cannot provide them even by evicting.
        """
        table = self._tables[request_id]
        num_new = self.blocks_for(num_tokens) - len(table.block_ids)
        if num_new <= 0:
            return []
        pool = self._pool
        num_missing = num_new - pool.num_blocks_free
        if num_missing > 0:
            if num_missing > pool.num_blocks_cached:
                return None
            assert self._radix is not None
            self._radix.evict(num_missing)
        block_ids = pool.allocate(num_new)
        table.block_ids += block_ids
        return block_ids

    def insert_prefix(
        self, request_id: str, token_ids: Sequence[int], num_computed_tokens: int
    ) -> None:
        """Offer the full blocks of the first `num_computed_tokens` tokens for reuse.

        A block that another request cached first stays as it is; ours remains private.
        """
        radix = self._radix
        if radix is None:
            return
        table = self._tables[request_id]
        num_full = num_computed_tokens // self.block_size
        node = table.node
        if node is not None and node.parent is None:
            # What we built on was evicted: offer everything again from the root.
            table.num_inserted = 0
            node = None
        if table.num_inserted >= num_full:
            table.node = node
            return
        if node is None:
            node = radix.get_or_create_root(table.namespace)
        first = table.num_inserted
        tokens = token_ids[: num_full * self.block_size]
        for index, key in enumerate(make_block_keys(tokens, self.block_size, first), first):
            node = radix.extend(node, key, table.block_ids[index])
        table.node = node
        table.num_inserted = num_full

    def free(self, request_id: str) -> None:
        """Drop the request's table; its cached blocks stay reusable until evicted."""
        table = self._tables.pop(request_id)
        pool = self._pool
        node = table.node
        num_inserted = table.num_inserted if node is not None and node.parent is not None else 0
        # Children first: the LRU then gives up a prefix from its end.
        for index in range(len(table.block_ids) - 1, -1, -1):
            block_id = table.block_ids[index]
            pool.unlock(block_id)
            if index < num_inserted:
                assert node is not None
                if node.block_id != block_id:
                    # A copy of ours was cached by another request: as recently used as ours.
                    pool.touch(node.block_id)
                node = node.parent

    def truncate(self, request_id: str, num_tokens: int) -> list[int]:
        """Give back the slots past `num_tokens`; returns the released block ids.

        The tokens given back must not be in the prefix tree. A worker that knows the released
        blocks has to be told.
        """
        table = self._tables[request_id]
        assert num_tokens >= table.num_inserted * self.block_size
        num_keep = self.blocks_for(num_tokens)
        released = table.block_ids[num_keep:]
        del table.block_ids[num_keep:]
        for block_id in reversed(released):
            self._pool.unlock(block_id)
        return released

    def block_ids(self, request_id: str) -> list[int]:
        """A copy of the request's block table."""
        return list(self._tables[request_id].block_ids)

    def num_slots(self, request_id: str) -> int:
        """Token slots that the request's table covers."""
        return len(self._tables[request_id].block_ids) * self.block_size

    def block_ids_of(self, request_id: str, start_token: int, end_token: int) -> list[int]:
        """The blocks that hold tokens [start_token, end_token), to export or import their KV."""
        block_ids = self._tables[request_id].block_ids
        assert 0 <= start_token <= end_token <= len(block_ids) * self.block_size
        return block_ids[start_token // self.block_size : self.blocks_for(end_token)]

    def num_blocks_exclusive(self, request_id: str) -> int:
        """Blocks that no other request references: what preempting it would make available."""
        ref_counts = self._pool.ref_counts
        return sum(ref_counts[block_id] == 1 for block_id in self._tables[request_id].block_ids)

    def wasted_fraction(self, used_tokens: Iterable[tuple[str, int]]) -> float:
        """Share of the held slots without a token, given the tokens of every open request."""
        num_held = self._pool.num_blocks_held * self.block_size
        if num_held == 0:
            return 0.0
        num_unused = sum(
            len(self._tables[request_id].block_ids) * self.block_size - num_tokens
            for request_id, num_tokens in used_tokens
        )
        return num_unused / num_held

    def count_query(self, num_tokens: int, num_hit_tokens: int) -> None:
        """Count a request's lookup."""
        if self._radix is not None:
            self.counters.prefix_queries_tokens += num_tokens
            self.counters.prefix_hits_tokens += num_hit_tokens

    def check_integrity(self) -> None:
        """Raise AssertionError unless pool, tree and tables agree. O(num_blocks)."""
        self._pool.check_integrity()
        ref_counts = [0] * self._pool.num_blocks
        for table in self._tables.values():
            assert table.num_inserted <= len(table.block_ids)
            assert len(set(table.block_ids)) == len(table.block_ids)
            for block_id in table.block_ids:
                ref_counts[block_id] += 1
        assert ref_counts == self._pool.ref_counts, "reference counts do not match the tables"
        if self._radix is not None:
            self._radix.check_integrity()
        else:
            assert self._pool.num_blocks_cached == 0
