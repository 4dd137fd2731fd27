"""Remembers which requests must have ended by when."""

from __future__ import annotations

import heapq

from caudal.scheduler.request import Request


class Deadlines:
    """A heap of deadlines; requests that end before theirs are dropped now and then."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Request]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, request: Request, num_live: int) -> None:
        """Watch `request` if it has a deadline; `num_live` bounds how many ended ones are kept."""
        if request.deadline is None:
            return
        heapq.heappush(self._heap, (request.deadline, request.arrival_index, request))
        if len(self._heap) > 64 + 2 * num_live:
            self._heap = [entry for entry in self._heap if not entry[2].is_finished]
            heapq.heapify(self._heap)

    def take_expired(self, now: float) -> list[Request]:
        """Requests that have not ended though their deadline has come, earliest first."""
        expired: list[Request] = []
        while self._heap and self._heap[0][0] <= now:
            request = heapq.heappop(self._heap)[2]
            if not request.is_finished:
                expired.append(request)
        return expired
