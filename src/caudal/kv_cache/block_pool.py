"""The physical KV blocks: reference counts, a free stack and an LRU of reusable blocks."""

from __future__ import annotations


class BlockPool:
    """Owns which blocks are free, cached (unreferenced but reusable) or held.

    Every operation is O(1). The LRU is a doubly linked list threaded through two arrays, with
    one sentinel at index `num_blocks`:  sentinel <-> oldest <-> ... <-> newest <-> sentinel
    """

    __slots__ = (
        "_free",
        "_is_cached",
        "_next",
        "_prev",
        "_sentinel",
        "block_size",
        "num_blocks",
        "num_blocks_cached",
        "ref_counts",
    )

    def __init__(self, num_blocks: int, block_size: int) -> None:
        assert num_blocks > 0 and block_size > 0
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.ref_counts = [0] * num_blocks
        self.num_blocks_cached = 0
        self._is_cached = bytearray(num_blocks)
        # Popped from the end: a fresh pool hands out 0, 1, 2 ...
        self._free = list(range(num_blocks - 1, -1, -1))
        self._sentinel = num_blocks
        self._prev = [-1] * num_blocks + [num_blocks]
        self._next = [-1] * num_blocks + [num_blocks]

    @property
    def num_blocks_free(self) -> int:
        """Blocks without references or content worth keeping."""
        return len(self._free)

    @property
    def num_blocks_available(self) -> int:
        """Blocks that an allocation can get: free ones and evictable ones."""
        return len(self._free) + self.num_blocks_cached

    @property
    def num_blocks_held(self) -> int:
        """Blocks that at least one request references."""
        return self.num_blocks - len(self._free) - self.num_blocks_cached

    def allocate(self, num_blocks: int) -> list[int]:
        """Take free blocks, each with one reference; the caller has evicted enough before."""
        free = self._free
        assert num_blocks <= len(free)
        block_ids = []
        for _ in range(num_blocks):
            block_id = free.pop()
            self.ref_counts[block_id] = 1
            block_ids.append(block_id)
        return block_ids

    def lock(self, block_id: int) -> None:
        """Add a reference to a cached or held block."""
        if self.ref_counts[block_id] == 0:
            assert self._is_cached[block_id]
            self._unlink(block_id)
        self.ref_counts[block_id] += 1

    def unlock(self, block_id: int) -> None:
        """Drop a reference; the last one makes the block the newest of the LRU, or free."""
        count = self.ref_counts[block_id] - 1
        assert count >= 0
        self.ref_counts[block_id] = count
        if count == 0:
            if self._is_cached[block_id]:
                self._link_newest(block_id)
            else:
                self._free.append(block_id)

    def is_cached(self, block_id: int) -> bool:
        """True if the prefix tree reaches this block, referenced or not."""
        return bool(self._is_cached[block_id])

    def mark_cached(self, block_id: int) -> None:
        """The prefix tree now reaches this held block."""
        assert self.ref_counts[block_id] > 0 and not self._is_cached[block_id]
        self._is_cached[block_id] = 1

    def mark_uncached(self, block_id: int) -> bool:
        """The prefix tree lost this block; returns True if that made it free."""
        assert self._is_cached[block_id]
        self._is_cached[block_id] = 0
        if self.ref_counts[block_id]:
            return False
        self._unlink(block_id)
        self._free.append(block_id)
        return True

    def touch(self, block_id: int) -> None:
        """Make an unreferenced cached block the newest; no effect on a held one."""
        if self.ref_counts[block_id] == 0 and self._is_cached[block_id]:
            self._unlink(block_id)
            self._link_newest(block_id)

    def oldest(self) -> int:
        """The least recently used evictable block; there must be one."""
        block_id = self._next[self._sentinel]
        assert block_id != self._sentinel
        return block_id

    def _link_newest(self, block_id: int) -> None:
        last = self._prev[self._sentinel]
        self._next[last] = block_id
        self._prev[block_id] = last
        self._next[block_id] = self._sentinel
        self._prev[self._sentinel] = block_id
        self.num_blocks_cached += 1

    def _unlink(self, block_id: int) -> None:
        before, after = self._prev[block_id], self._next[block_id]
        self._next[before] = after
        self._prev[after] = before
        self._prev[block_id] = self._next[block_id] = -1
        self.num_blocks_cached -= 1

    def lru_order(self) -> list[int]:
        """Unreferenced cached blocks, oldest first (walks the list; for checks and tests)."""
        order = []
        block_id = self._next[self._sentinel]
        while block_id != self._sentinel:
            order.append(block_id)
            assert self._prev[self._next[block_id]] == block_id
            block_id = self._next[block_id]
        return order

    def check_integrity(self) -> None:
        """Raise AssertionError unless free, cached and held partition the pool. O(num_blocks)."""
        order = self.lru_order()
        assert len(order) == self.num_blocks_cached
        assert len(set(order)) == len(order)
        assert len(set(self._free)) == len(self._free)
        in_lru = bytearray(self.num_blocks)
        for block_id in order:
            in_lru[block_id] = 1
        for block_id in self._free:
            assert not in_lru[block_id], f"block {block_id} is both free and cached"
            assert self.ref_counts[block_id] == 0 and not self._is_cached[block_id]
        for block_id, count in enumerate(self.ref_counts):
            assert count >= 0
            assert bool(in_lru[block_id]) == bool(count == 0 and self._is_cached[block_id])
        num_held = sum(count > 0 for count in self.ref_counts)
        assert num_held + len(order) + len(self._free) == self.num_blocks
