"""The waiting queue: by priority, then arrival, with requests that step aside for a while."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from caudal.scheduler.request import Request


@dataclass(slots=True)
class QueueTotals:
    """Requests and their known tokens."""

    num_requests: int = 0
    num_tokens: int = 0


class WaitingQueue:
    """Owns every request that has no row, in order of service.

    A heap with lazy deletion: an aborted request stays in it until it surfaces or the heap is
    rebuilt. A parked request is in the queue (and in its totals) but not in the heap.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Request]] = []
        self._parked: dict[str, Request] = {}
        self._num_dead = 0
        self._by_priority: dict[int, QueueTotals] = {}
        self.totals = QueueTotals()
        self.background = QueueTotals()
        """The part of `totals` that yields to the rest."""

    def __len__(self) -> int:
        return self.totals.num_requests

    def push(self, request: Request) -> None:
        """Queue a new or preempted request at the place that its arrival gives it."""
        heapq.heappush(self._heap, (request.priority, request.arrival_index, request))
        self._count(request, 1)

    def peek(self) -> Request | None:
        """The request to serve next, None if there is none (parked ones do not count)."""
        heap = self._heap
        while heap:
            request = heap[0][2]
            if not request.is_finished:
                return request
            heapq.heappop(heap)
            self._num_dead -= 1
        return None

    def pop(self) -> Request:
        """Take out the request that `peek` just returned."""
        request = heapq.heappop(self._heap)[2]
        self._count(request, -1)
        return request

    def park(self) -> Request:
        """Set aside the request that `peek` just returned, until `wake`."""
        request = heapq.heappop(self._heap)[2]
        self._parked[request.request_id] = request
        return request

    def wake(self, request: Request) -> None:
        """Put a parked request back at its place."""
        del self._parked[request.request_id]
        heapq.heappush(self._heap, (request.priority, request.arrival_index, request))

    def remove(self, request: Request) -> None:
        """Drop a request whose status was just set to a finished one."""
        assert request.is_finished
        self._count(request, -1)
        if self._parked.pop(request.request_id, None) is not None:
            return
        self._num_dead += 1
        if self._num_dead > 64 and self._num_dead * 2 > len(self._heap):
            self._heap = [entry for entry in self._heap if not entry[2].is_finished]
            heapq.heapify(self._heap)
            self._num_dead = 0

    def ahead_of(self, priority: int) -> QueueTotals:
        """What would be served before a new request of `priority`."""
        ahead = QueueTotals()
        for other, totals in self._by_priority.items():
            if other <= priority:
                ahead.num_requests += totals.num_requests
                ahead.num_tokens += totals.num_tokens
        return ahead

    @property
    def foreground(self) -> QueueTotals:
        """What does not yield."""
        return QueueTotals(
            self.totals.num_requests - self.background.num_requests,
            self.totals.num_tokens - self.background.num_tokens,
        )

    @property
    def num_parked(self) -> int:
        """Requests that have stepped aside."""
        return len(self._parked)

    def _count(self, request: Request, sign: int) -> None:
        num_tokens = sign * len(request.token_ids)
        per_priority = self._by_priority.setdefault(request.priority, QueueTotals())
        affected = [self.totals, per_priority]
        if request.is_background:
            affected.append(self.background)
        for totals in affected:
            totals.num_requests += sign
            totals.num_tokens += num_tokens
        if per_priority.num_requests == 0:
            del self._by_priority[request.priority]

    def check_integrity(self) -> None:
        """Raise AssertionError unless heap, parked requests and totals agree."""
        live = [entry[2] for entry in self._heap if not entry[2].is_finished]
        live += self._parked.values()
        assert len({request.request_id for request in live}) == len(live)
        assert len(live) == self.totals.num_requests
        assert sum(r.is_background for r in live) == self.background.num_requests
        assert sum(len(request.token_ids) for request in live) == self.totals.num_tokens
        assert sum(entry[2].is_finished for entry in self._heap) == self._num_dead
