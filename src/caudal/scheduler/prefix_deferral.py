"""Lets a request wait for a prefix that another request is computing right now."""

from __future__ import annotations

from dataclasses import dataclass, field

from caudal.scheduler.request import Request

MIN_SHARED_BLOCKS = 2
"""Blocks that waiting must save; for less, a step's delay costs more than it brings."""


@dataclass(slots=True, eq=False)
class Leader:
    """A request that is computing its prompt, and who waits for what part of it."""

    request: Request
    block_keys: list[bytes]
    followers: dict[str, tuple[int, Request]] = field(default_factory=dict)
    """Request id -> (tokens the leader must have computed, the follower)."""


class PrefixDeferral:
    """Knows the prompts being computed and the requests parked behind them.

    Only requests with the same first block are compared. A follower is released when the
    leader has computed what they share or stops computing for whatever reason, so it waits no
    longer than computing the same tokens itself would have taken; followers rank behind their
    leader, whose prefill therefore is served at least as early as theirs would be.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._by_first_block: dict[tuple[str, bytes], list[Leader]] = {}
        self._leaders: dict[str, Leader] = {}
        self._leader_of: dict[str, Leader] = {}

    def start(self, request: Request) -> None:
        """`request` begins to compute its known tokens (its `block_keys` are made)."""
        keys = request.block_keys
        if not keys:
            return
        leader = Leader(request, keys)
        self._leaders[request.request_id] = leader
        self._by_first_block.setdefault((request.namespace, keys[0]), []).append(leader)

    def find_leader(self, request: Request, num_matched_blocks: int) -> tuple[Leader, int] | None:
        """Whom to wait for, and until how many of its tokens are computed; None: do not wait.

        `num_matched_blocks` is what the cache holds of the request's prompt already.
        """
        keys = request.block_keys
        if not keys:
            return None
        num_usable = (len(request.token_ids) - 1) // self._block_size
        best: Leader | None = None
        best_shared = num_matched_blocks + MIN_SHARED_BLOCKS - 1
        for leader in self._by_first_block.get((request.namespace, keys[0]), ()):
            if leader.request.priority > request.priority:
                continue
            shared = _num_shared(keys, leader.block_keys, num_usable)
            is_ahead = leader.request.num_computed_tokens < shared * self._block_size
            if shared > best_shared and is_ahead:
                best, best_shared = leader, shared
        return None if best is None else (best, best_shared * self._block_size)

    def follow(self, request: Request, leader: Leader, num_tokens: int) -> None:
        """Record that `request` waits until the leader has computed `num_tokens`."""
        leader.followers[request.request_id] = (num_tokens, request)
        self._leader_of[request.request_id] = leader

    def advance(self, request: Request) -> list[Request]:
        """The leader has computed (and cached) more; returns the followers now released."""
        leader = self._leaders.get(request.request_id)
        if leader is None:
            return []
        if request.num_tokens_left <= 0:
            return self.stop(request)
        computed = request.num_computed_tokens
        ready = [who for needed, who in leader.followers.values() if needed <= computed]
        for follower in ready:
            self.forget(follower)
        return ready

    def stop(self, request: Request) -> list[Request]:
        """The request computes no more (done, preempted or gone); returns all its followers."""
        leader = self._leaders.pop(request.request_id, None)
        if leader is None:
            return []
        key = (request.namespace, leader.block_keys[0])
        leaders = self._by_first_block[key]
        leaders.remove(leader)
        if not leaders:
            del self._by_first_block[key]
        followers = [who for _, who in leader.followers.values()]
        for follower in followers:
            self.forget(follower)
        return followers

    def forget(self, request: Request) -> None:
        """`request` waits for nobody (any more)."""
        leader = self._leader_of.pop(request.request_id, None)
        if leader is not None:
            del leader.followers[request.request_id]

    @property
    def num_leaders(self) -> int:
        """Requests that are computing their prompts."""
        return len(self._leaders)

    def check_integrity(self, running: dict[str, Request], num_parked: int) -> None:
        """Raise AssertionError unless every parked request has a leader that computes."""
        assert len(self._leader_of) == num_parked
        assert sum(len(leader.followers) for leader in self._leaders.values()) == num_parked
        for request_id, leader in self._leaders.items():
            assert running.get(request_id) is leader.request
            assert leader.request.num_tokens_left > 0
            for needed, _ in leader.followers.values():
                assert leader.request.num_computed_tokens < needed


def _num_shared(keys: list[bytes], others: list[bytes], limit: int) -> int:
    limit = min(limit, len(keys), len(others))
    if keys[:limit] == others[:limit]:
        return limit
    for index in range(limit):
        if keys[index] != others[index]:
            return index
    return limit
