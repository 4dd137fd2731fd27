"""The prefix tree: which computed blocks hold the KV of which token prefixes."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from caudal.kv_cache.block_pool import BlockPool


def make_block_keys(token_ids: Sequence[int], block_size: int, start_block: int = 0) -> list[bytes]:
    """Exact keys of the full blocks from `start_block` on: the token ids as int32 bytes."""
    start = start_block * block_size
    raw = array("i", token_ids[start:] if start else token_ids).tobytes()
    width = block_size * 4
    return [raw[at : at + width] for at in range(0, len(raw) - width + 1, width)]


class RadixNode:
    """One cached block: its tokens follow those of its ancestors.

    A root (one per namespace) has no block. `parent` turns None when the node leaves the tree,
    so that a request still pointing at it notices.
    """

    __slots__ = ("block_id", "children", "key", "namespace", "parent")

    def __init__(self, parent: RadixNode | None, key: bytes, block_id: int, namespace: str) -> None:
        self.parent = parent
        self.key = key
        self.block_id = block_id
        self.namespace = namespace
        self.children: dict[bytes, RadixNode] = {}


class RadixCache:
    """Owns the tree and decides what is evicted; the blocks belong to the pool.

    A request that holds a node's block normally holds all ancestors too and releases children
    first, so the pool's oldest block is a leaf. The exception is a request that computed its
    own copy of a cached block: it extends the cached node without holding it. Evicting such a
    node takes its descendants out of the tree; those still held stay valid, private blocks.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._roots: dict[str, RadixNode] = {}
        self._nodes: list[RadixNode | None] = [None] * pool.num_blocks

    def match(self, namespace: str, block_keys: Sequence[bytes], max_blocks: int) -> list[int]:
        """Block ids of the longest cached prefix, at most `max_blocks`; takes no reference."""
        block_ids: list[int] = []
        node = self._roots.get(namespace)
        if node is None:
            return block_ids
        for key in block_keys[:max_blocks]:
            node = node.children.get(key)
            if node is None:
                break
            block_ids.append(node.block_id)
        return block_ids

    def node_of(self, block_id: int) -> RadixNode:
        """The node of a cached block."""
        node = self._nodes[block_id]
        assert node is not None
        return node

    def get_or_create_root(self, namespace: str) -> RadixNode:
        """The root of a namespace; the caller adds a child at once (empty roots are dropped)."""
        root = self._roots.get(namespace)
        if root is None:
            root = self._roots[namespace] = RadixNode(None, b"", -1, namespace)
        return root

    def extend(self, node: RadixNode, key: bytes, block_id: int) -> RadixNode:
        """The child of `node` for `key`: the existing one, else a new one over `block_id`."""
        child = node.children.get(key)
        if child is None:
            child = node.children[key] = RadixNode(node, key, block_id, node.namespace)
            self._nodes[block_id] = child
            self._pool.mark_cached(block_id)
        return child

    def evict(self, num_blocks: int) -> None:
        """Free at least `num_blocks` unreferenced cached blocks, least recently used first."""
        while num_blocks > 0:
            num_blocks -= self._remove_subtree(self.node_of(self._pool.oldest()))

    def _remove_subtree(self, node: RadixNode) -> int:
        """Take `node` and its descendants out of the tree; returns how many blocks got free."""
        parent = node.parent
        assert parent is not None
        del parent.children[node.key]
        if parent.parent is None and not parent.children:
            del self._roots[parent.namespace]
        num_freed = 0
        stack = [node]
        while stack:
            lost = stack.pop()
            stack.extend(lost.children.values())
            lost.parent = None
            lost.children = {}
            self._nodes[lost.block_id] = None
            num_freed += self._pool.mark_uncached(lost.block_id)
        return num_freed

    def check_integrity(self) -> None:
        """Raise AssertionError unless tree, node index and pool flags agree. O(num_blocks)."""
        reached = bytearray(self._pool.num_blocks)
        stack: list[RadixNode] = []
        for namespace, root in self._roots.items():
            assert root.parent is None and root.block_id == -1 and root.namespace == namespace
            assert root.children, f"namespace {namespace!r} keeps an empty root"
            stack.append(root)
        while stack:
            node = stack.pop()
            for key, child in node.children.items():
                assert child.parent is node and child.key == key
                assert not reached[child.block_id], f"block {child.block_id} is in the tree twice"
                reached[child.block_id] = 1
                assert self._nodes[child.block_id] is child
                stack.append(child)
        for block_id, node_or_none in enumerate(self._nodes):
            assert bool(reached[block_id]) == (node_or_none is not None)
            assert bool(reached[block_id]) == self._pool.is_cached(block_id)
