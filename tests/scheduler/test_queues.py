"""The waiting queue keeps its order and its totals through aborts, parking and returns."""

from __future__ import annotations

import random

from caudal.scheduler.fair_sharing import FairShares
from caudal.scheduler.queues import QueueTotals, WaitingQueue
from caudal.scheduler.request import Request, RequestStatus
from caudal.scheduler.stats import TrafficAverages
from tests.scheduler.harness import make_request


def make_queue() -> WaitingQueue:
    return WaitingQueue(FairShares(TrafficAverages()))


def queued(queue: WaitingQueue, index: int, priority: int = 0) -> Request:
    request = make_request(f"r{index}", [3] * (index + 1), priority=priority)
    request.arrival_index = index
    queue.push(request)
    return request


def abort(queue: WaitingQueue, request: Request) -> None:
    request.status = RequestStatus.FINISHED_ABORT
    queue.remove(request)
    queue.check_integrity()


def drain(queue: WaitingQueue) -> list[str]:
    names = []
    while queue.peek() is not None:
        names.append(queue.pop().request_id)
        queue.check_integrity()
    return names


def test_order_is_priority_then_arrival() -> None:
    queue = make_queue()
    for index, priority in enumerate([1, 0, 1, -5, 0]):
        queued(queue, index, priority)
    assert drain(queue) == ["r3", "r1", "r4", "r0", "r2"]
    assert len(queue) == 0


def test_returning_request_goes_before_later_arrivals() -> None:
    queue = make_queue()
    first = queued(queue, 0)
    assert queue.peek() is first
    queue.pop()
    queued(queue, 1)
    queue.push(first)
    assert drain(queue) == ["r0", "r1"]


def test_aborted_requests_vanish_from_order_and_totals() -> None:
    queue = make_queue()
    requests = [queued(queue, index) for index in range(4)]
    abort(queue, requests[0])
    abort(queue, requests[2])
    assert (len(queue), queue.totals.num_tokens) == (2, 2 + 4)
    assert drain(queue) == ["r1", "r3"]


def test_many_aborts_do_not_pile_up_behind_a_waiting_head() -> None:
    queue = make_queue()
    queued(queue, 0)
    for index in range(1, 5000):
        abort(queue, queued(queue, index)) if index % 50 == 0 else _abort(queue, index)
    assert sum(map(len, queue._heaps.values())) < 200
    assert drain(queue) == ["r0"]


def _abort(queue: WaitingQueue, index: int) -> None:
    request = queued(queue, index)
    request.status = RequestStatus.FINISHED_ABORT
    queue.remove(request)


def test_parked_request_counts_but_is_not_served_until_woken() -> None:
    queue = make_queue()
    parked, other = queued(queue, 0), queued(queue, 1)
    assert queue.peek() is parked
    queue.park()
    assert queue.peek() is other
    assert (len(queue), queue.num_parked) == (2, 1)
    queue.wake(parked)
    assert drain(queue) == ["r0", "r1"]


def test_parked_request_can_be_aborted() -> None:
    queue = make_queue()
    parked = queued(queue, 0)
    queue.peek()
    queue.park()
    abort(queue, parked)
    assert (len(queue), queue.num_parked, queue.peek()) == (0, 0, None)


def test_ahead_counts_equal_and_better_priorities() -> None:
    queue = make_queue()
    for index, priority in enumerate([1, 0, 2, 0]):
        queued(queue, index, priority)

    def ahead_of(priority: int) -> QueueTotals:
        return queue.ahead_of(make_request("new", 5, priority=priority))

    assert ahead_of(0).num_requests == 2
    assert ahead_of(1).num_tokens == 1 + 2 + 4
    assert ahead_of(-1).num_requests == 0


def test_random_use_keeps_order_and_totals() -> None:
    rng = random.Random(0)
    queue = make_queue()
    live: dict[str, Request] = {}
    parked: list[Request] = []
    for index in range(2000):
        action = rng.random()
        head = queue.peek()
        if action < 0.4:
            request = queued(queue, index, rng.randrange(3))
            live[request.request_id] = request
        elif action < 0.55 and head is not None:
            free = [request for request in live.values() if request not in parked]
            assert head is min(free, key=lambda request: request.order)
            del live[queue.pop().request_id]
        elif action < 0.7 and head is not None:
            parked.append(queue.park())
        elif action < 0.8 and parked:
            queue.wake(parked.pop(rng.randrange(len(parked))))
        elif live:
            request = rng.choice(list(live.values()))
            if request in parked:
                parked.remove(request)
            del live[request.request_id]
            abort(queue, request)
        assert len(queue) == len(live)
