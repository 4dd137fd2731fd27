"""The waiting queue: by priority, then fair share, then arrival; requests may step aside."""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass

from caudal.scheduler.fair_sharing import FairShares
from caudal.scheduler.request import Request, RequestStatus


@dataclass(slots=True)
class QueueTotals:
    """Requests and their known tokens."""

    num_requests: int = 0
    num_tokens: int = 0
    num_output_allowed: int = 0
    """Output tokens that their limits still allow (only of what is counted one by one)."""

    def add(self, num_requests: int, num_tokens: int, num_output_allowed: int = 0) -> None:
        """Count some more (or, with negative numbers, fewer)."""
        self.num_requests += num_requests
        self.num_tokens += num_tokens
        self.num_output_allowed += num_output_allowed


class WaitingQueue:
    """Owns every request that has no row, in order of service.

    A heap per tenant with lazy deletion: an aborted request stays in it until it surfaces or the
    heaps are rebuilt. A parked request is in the queue (and in its totals) but not in a heap. Of
    the tenants whose first request is equally important, the one that has had least is served.
    """

    def __init__(self, shares: FairShares) -> None:
        self._shares = shares
        self._heaps: dict[str, list[tuple[int, int, Request]]] = {}
        self._next = ""
        """Tenant of the request that `peek` returned."""
        self._parked: dict[str, Request] = {}
        self._num_dead = 0
        self._by_priority: dict[tuple[str, int], QueueTotals] = {}
        self._by_tenant: dict[str, QueueTotals] = {}
        """What does not yield."""
        self.totals = QueueTotals()
        self.background = QueueTotals()
        """The part of `totals` that yields to the rest."""

    def __len__(self) -> int:
        return self.totals.num_requests

    def push(self, request: Request) -> None:
        """Queue a new or preempted request at the place that its arrival gives it."""
        if not request.is_background:
            self._shares.arrive(request, self._by_tenant)
        self._push(request)
        self._count(request, 1)

    def peek(self) -> Request | None:
        """The request to serve next, None if there is none (parked ones do not count)."""
        best: Request | None = None
        best_rank = (0, 0.0, 0)
        empty: list[str] = []
        for tenant, heap in self._heaps.items():
            request = self._first(heap)
            if request is None:
                empty.append(tenant)
                continue
            # One that has lost its row goes on before others of its priority start.
            is_returning = request.status is RequestStatus.PREEMPTED
            served = -math.inf if is_returning else self._shares.served(tenant)
            rank = (request.priority, served, request.arrival_index)
            if best is None or rank < best_rank:
                best, best_rank, self._next = request, rank, tenant
        for tenant in empty:
            del self._heaps[tenant]
        return best

    def _first(self, heap: list[tuple[int, int, Request]]) -> Request | None:
        while heap:
            request = heap[0][2]
            if not request.is_finished:
                return request
            heapq.heappop(heap)
            self._num_dead -= 1
        return None

    def _push(self, request: Request) -> None:
        heap = self._heaps.setdefault(request.tenant, [])
        heapq.heappush(heap, (request.priority, request.arrival_index, request))

    def pop(self) -> Request:
        """Take out the request that `peek` just returned."""
        request = heapq.heappop(self._heaps[self._next])[2]
        self._count(request, -1)
        return request

    def park(self) -> Request:
        """Set aside the request that `peek` just returned, until `wake`."""
        request = heapq.heappop(self._heaps[self._next])[2]
        self._parked[request.request_id] = request
        return request

    def wake(self, request: Request) -> None:
        """Put a parked request back at its place."""
        del self._parked[request.request_id]
        self._push(request)

    def remove(self, request: Request) -> None:
        """Drop a request whose status was just set to a finished one."""
        assert request.is_finished
        self._count(request, -1)
        if self._parked.pop(request.request_id, None) is not None:
            return
        self._num_dead += 1
        if self._num_dead > 64 and self._num_dead * 2 > sum(map(len, self._heaps.values())):
            for tenant, heap in list(self._heaps.items()):
                live = [entry for entry in heap if not entry[2].is_finished]
                heapq.heapify(live)
                self._heaps[tenant] = live
            self._num_dead = 0

    def ahead_of(self, newcomer: Request) -> QueueTotals:
        """What would be served before a new request, in all probability.

        Of equally important requests: all of its own tenant, and of each other tenant as many as
        it takes to bring that one level with what the newcomer's will have had.
        """
        ahead, own = QueueTotals(), QueueTotals()
        rivals: list[tuple[str, QueueTotals]] = []
        for (tenant, priority), totals in self._by_priority.items():
            if priority < newcomer.priority or (
                newcomer.is_background and priority == newcomer.priority
            ):
                ahead.add(totals.num_requests, totals.num_tokens)
            elif priority == newcomer.priority:
                if tenant == newcomer.tenant:
                    own.add(totals.num_requests, totals.num_tokens)
                else:
                    rivals.append((tenant, totals))
        ahead.add(own.num_requests, own.num_tokens)
        if rivals:
            level = self._level_at_turn(newcomer, own)
            for tenant, totals in rivals:
                self._add_rival(ahead, tenant, totals, level)
        return ahead

    def _level_at_turn(self, newcomer: Request, own: QueueTotals) -> float:
        """The counter of the newcomer's tenant when its turn comes."""
        shares = self._shares
        level = shares.served(newcomer.tenant)
        if newcomer.tenant not in self._by_tenant:
            level = max(level, shares.floor(self._by_tenant))
        return level + shares.cost(own.num_requests, own.num_tokens) / newcomer.weight

    def _add_rival(
        self, ahead: QueueTotals, tenant: str, totals: QueueTotals, level: float
    ) -> None:
        shares = self._shares
        cost = shares.cost(totals.num_requests, totals.num_tokens)
        gap = (level - shares.served(tenant)) * shares.weight(tenant)
        if gap < 0:
            return
        # Whoever is level or below is served once more before the newcomer.
        num_requests = min(totals.num_requests, int(gap / cost * totals.num_requests) + 1)
        ahead.add(num_requests, totals.num_tokens * num_requests // totals.num_requests)

    def share_of(self, newcomer: Request) -> tuple[QueueTotals, int]:
        """What of the newcomer's tenant waits, and how many tenants wait if it does."""
        own = self._by_tenant.get(newcomer.tenant)
        if own is None:
            return QueueTotals(), len(self._by_tenant) + 1
        return own, len(self._by_tenant)

    @property
    def foreground(self) -> QueueTotals:
        """What does not yield."""
        return QueueTotals(
            self.totals.num_requests - self.background.num_requests,
            self.totals.num_tokens - self.background.num_tokens,
            self.totals.num_output_allowed - self.background.num_output_allowed,
        )

    @property
    def num_parked(self) -> int:
        """Requests that have stepped aside."""
        return len(self._parked)

    def _count(self, request: Request, sign: int) -> None:
        num_known = len(request.token_ids)
        num_tokens = sign * num_known
        num_allowed = sign * (request.max_total_tokens - num_known)
        key = request.tenant, request.priority
        per_priority = self._by_priority.setdefault(key, QueueTotals())
        if request.is_background:
            part = self.background
        else:
            part = self._by_tenant.setdefault(request.tenant, QueueTotals())
        for totals in (self.totals, per_priority, part):
            totals.add(sign, num_tokens, num_allowed)
        if per_priority.num_requests == 0:
            del self._by_priority[key]
        if part is not self.background and part.num_requests == 0:
            del self._by_tenant[request.tenant]

    def check_integrity(self) -> None:
        """Raise AssertionError unless heap, parked requests and totals agree."""
        entries = [entry for heap in self._heaps.values() for entry in heap]
        live = [entry[2] for entry in entries if not entry[2].is_finished]
        live += self._parked.values()
        assert len({request.request_id for request in live}) == len(live)
        assert len(live) == self.totals.num_requests
        assert sum(r.is_background for r in live) == self.background.num_requests
        assert sum(len(request.token_ids) for request in live) == self.totals.num_tokens
        assert sum(entry[2].is_finished for entry in entries) == self._num_dead
        assert sum(totals.num_requests for totals in self._by_tenant.values()) == (
            self.foreground.num_requests
        )
