"""Memory pressure: whom to preempt, and when there is room to (re)admit."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from caudal.kv_cache.kv_cache_manager import KVCacheManager
from caudal.scheduler.request import Request

GROWTH_BLOCKS_NEW = 4
"""Free blocks per running request that admitting a new request leaves for growth."""
GROWTH_BLOCKS_RETURNING = 8
"""The same for a preempted request: else it would soon be preempted again."""


def choose_victim(running: Collection[Request], kv: KVCacheManager) -> Request:
    """The request to preempt: background, then least important, cheapest to recompute, latest.

    What it would recompute are the blocks that only it references: shared ones stay cached.
    Earlier preemptions raise the cost, so the same request is not hit again and again. The
    first in order of service is exempt: it always advances, hence all do in the end.
    """
    exempt = min(running, key=lambda request: request.order)

    def rank(request: Request) -> tuple[bool, bool, int, int, int]:
        num_blocks = kv.num_blocks_exclusive(request.request_id)
        cost = num_blocks * (1 + request.num_preemptions)
        is_useful = num_blocks > 0
        return (
            request.is_background,
            is_useful,
            request.priority,
            -cost,
            request.arrival_index,
        )

    return max((request for request in running if request is not exempt), key=rank)


def num_growth_blocks(running: Iterable[Request], kv: KVCacheManager, most_each: int) -> int:
    """Blocks to leave for the running requests: `most_each`, less where the end is closer."""
    return sum(
        min(most_each, kv.blocks_for(request.num_slots_at_most - request.num_slots))
        for request in running
    )
