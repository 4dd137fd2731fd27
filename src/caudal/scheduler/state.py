"""What the parts of the scheduler share: queues, KV cache and the moves between them."""

from __future__ import annotations

from caudal.config import Batching, CacheConfig
from caudal.kv_cache.kv_cache_manager import KVCacheManager
from caudal.scheduler.deadlines import Deadlines
from caudal.scheduler.fair_sharing import FairShares
from caudal.scheduler.prefix_deferral import PrefixDeferral
from caudal.scheduler.queues import WaitingQueue
from caudal.scheduler.request import Request, RequestStatus
from caudal.scheduler.stats import SchedulerCounters, TrafficAverages


class SchedulerState:
    """Owns every live request and where it is."""

    def __init__(self, cache: CacheConfig, batching: Batching) -> None:
        assert cache.num_blocks is not None, "the number of KV blocks must be resolved"
        self.requests: dict[str, Request] = {}
        self.running: dict[str, Request] = {}
        """Requests that hold blocks and a row, in order of admission."""
        self.num_background = 0
        """Running requests that yield to the others."""
        self.averages = TrafficAverages()
        self.shares = FairShares(self.averages)
        self.waiting = WaitingQueue(self.shares)
        self.deadlines = Deadlines()
        self.kv = KVCacheManager(
            cache.num_blocks, cache.block_size, enable_prefix_caching=cache.enable_prefix_caching
        )
        self.can_defer = cache.enable_prefix_caching and batching is Batching.CONTINUOUS
        """Waiting for another's prefix only pays where requests join at any step."""
        self.deferral = PrefixDeferral(cache.block_size)
        self.counters = SchedulerCounters()
        self.dropped_row_ids: list[str] = []
        """Rows that the worker must drop before the next step."""

    def note_start(self, request: Request, now: float) -> None:
        """A request just got its row, with `num_computed_tokens` found in the cache."""
        num_hit = request.num_computed_tokens
        counters = self.counters
        self.num_background += request.is_background
        self.shares.charge(request)
        if request.first_scheduled_time is not None:
            num_lost = max(0, request.num_lost_tokens - num_hit)
            request.num_preempted_tokens += num_lost
            counters.num_preempted_tokens += num_lost
            request.num_lost_tokens = 0
            return
        request.first_scheduled_time = now
        counters.num_prompt_tokens += request.num_prompt_tokens
        self.kv.count_query(request.num_prompt_tokens, num_hit)
        if not request.is_background:
            self.averages.note_start(request.num_prompt_tokens, num_hit)
        siblings = request.siblings
        if siblings is not None:
            # A hit that exists only because a sibling ran is no hit for the API.
            if siblings.num_cached_tokens is None:
                siblings.num_cached_tokens = num_hit
            num_hit = min(num_hit, siblings.num_cached_tokens)
        request.num_cached_tokens = num_hit

    def grow(self, request: Request, num_tokens: int) -> list[int]:
        """Slots for `num_tokens` tokens; the caller knows that the blocks are available."""
        blocks = self.kv.allocate_slots(request.request_id, num_tokens)
        assert blocks is not None
        request.num_slots += len(blocks) * self.kv.block_size
        return blocks

    def release(self, request: Request) -> None:
        """Take a running request off the machine; its cached blocks stay reusable."""
        del self.running[request.request_id]
        self.num_background -= request.is_background
        self.shares.settle(request)
        self.kv.free(request.request_id)
        request.num_slots = 0
        request.block_keys = None
        self.dropped_row_ids.append(request.request_id)
        for follower in self.deferral.stop(request):
            self.waiting.wake(follower)

    def advance_leader(self, request: Request) -> None:
        """Wake the requests that waited for what `request` has computed now."""
        for follower in self.deferral.advance(request):
            self.waiting.wake(follower)

    def remove(self, request: Request, status: RequestStatus) -> None:
        """End a request in any state: free its blocks, forget it."""
        assert not request.is_finished
        was_running = request.status is RequestStatus.RUNNING
        request.status = status
        del self.requests[request.request_id]
        if was_running:
            self.release(request)
        else:
            self.deferral.forget(request)
            self.waiting.remove(request)

    def preempt(self, request: Request) -> None:
        """Send a running request back to its place in the queue, without its blocks."""
        self.release(request)
        request.status = RequestStatus.PREEMPTED
        request.num_lost_tokens = request.num_computed_tokens
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        if request.prompt_logprobs is not None:
            request.prompt_logprobs = []
        self.counters.num_preemptions += 1
        self.waiting.push(request)

    def check_integrity(self) -> None:
        """Raise AssertionError unless queues, requests and KV cache agree."""
        self.kv.check_integrity()
        self.waiting.check_integrity()
        self.deferral.check_integrity(self.running, self.waiting.num_parked)
        assert len(self.requests) == len(self.running) + len(self.waiting)
        assert self.num_background == sum(r.is_background for r in self.running.values())
        num_slots = 0
        for request_id, request in self.running.items():
            assert self.requests[request_id] is request
            assert request.status is RequestStatus.RUNNING
            assert request.num_slots == self.kv.num_slots(request_id)
            assert request.num_computed_tokens <= request.num_slots
            assert request.num_computed_tokens <= len(request.token_ids)
            num_slots += request.num_slots
        assert self.kv.num_tables == len(self.running)
        assert bool(num_slots) == bool(self.kv.num_blocks_held)
        for request in self.requests.values():
            assert not request.is_finished
