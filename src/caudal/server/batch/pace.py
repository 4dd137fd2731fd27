"""How many batch requests are in flight, whose turn it is, and how hard they may press."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass, field

from caudal.engine.client import EngineClient
from caudal.scheduler.service_class import ServiceClass

LOOKAHEAD = 8
"""Requests in flight beyond those that the engine runs: it always finds one waiting, but never
many. An engine that has no time to spare starts none of them, so no more are sent."""
GRACE_SHARE = 0.1
"""Part of the window in which a batch just uses what is idle."""
LATE_SHARE = 0.25
"""Part of the window, at its end, in which a batch that is behind counts as interactive."""
MARGIN = 1.25
"""A batch is on time if its speed lately is so many times what it needs."""
RELAXED_MARGIN = 2.0
"""What lets an urgent batch relax again; the gap keeps it from swinging."""
MIN_MEMORY_S = 5.0
MAX_MEMORY_S = 600.0


class Speed:
    """Requests per second, over about the last `memory_s` seconds."""

    def __init__(self, memory_s: float, now: float) -> None:
        self._memory_s = memory_s
        self._start = self._last = now
        self._recent = 0.0

    def add(self, now: float) -> None:
        """A request has ended."""
        self._decay(now)
        self._recent += 1.0

    def per_s(self, now: float) -> float:
        """The speed; 0 before anything has ended."""
        self._decay(now)
        seen_s = self._memory_s * (1 - math.exp(-(now - self._start) / self._memory_s))
        return self._recent / max(seen_s, 1e-3)

    def _decay(self, now: float) -> None:
        self._recent *= math.exp((self._last - now) / self._memory_s)
        self._last = now


def memory_s(window_s: float) -> float:
    """How far back the speed of a batch with that window looks."""
    return min(MAX_MEMORY_S, max(MIN_MEMORY_S, window_s / 20))


def choose_service(
    current: ServiceClass, *, num_left: int, speed: float, elapsed_s: float, left_s: float
) -> ServiceClass:
    """The class of a batch's next requests, from its speed and the speed that it needs."""
    window_s = elapsed_s + left_s
    if num_left == 0 or elapsed_s < GRACE_SHARE * window_s:
        return ServiceClass.IDLE
    needed = num_left / max(left_s, 1e-3)
    margin = MARGIN if current is ServiceClass.IDLE else RELAXED_MARGIN
    if speed >= margin * needed:
        return ServiceClass.IDLE
    if current is not ServiceClass.LATE:
        is_late = left_s <= LATE_SHARE * window_s and speed < needed
        return ServiceClass.LATE if is_late else ServiceClass.URGENT
    return ServiceClass.LATE


@dataclass(slots=True, eq=False)
class Customer:
    """Somebody who asks for slots: one batch."""

    owner: str
    service: ServiceClass = ServiceClass.IDLE
    last_turn: int = 0


class Place:
    """A place in flight, held until it is released."""

    def __init__(self, slots: Slots, service: ServiceClass) -> None:
        self._slots: Slots | None = slots
        self.service = service
        slots.count(service, 1)

    def change(self, service: ServiceClass) -> None:
        """Hold a place of another class instead, whether one is free or not."""
        if self._slots is not None:
            self._slots.count(self.service, -1)
            self._slots.count(service, 1)
            self.service = service

    def release(self) -> None:
        """Give the place back; a second call does nothing."""
        slots, self._slots = self._slots, None
        if slots is not None:
            slots.count(self.service, -1)
            slots.refresh()


@dataclass(slots=True)
class _Waiting:
    customer: Customer
    turn: asyncio.Future[Place] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class Slots:
    """Hands out places in flight: the most pressing class first, then owner by owner.

    The number of places follows what the engine runs, see LOOKAHEAD. Call `refresh` now and then:
    the engine's numbers change without notice.
    """

    def __init__(self, get_engine: Callable[[], EngineClient]) -> None:
        self._get_engine = get_engine
        self._waiting: list[_Waiting] = []
        self._owner_turns: dict[str, int] = {}
        self._num_turns = 0
        self.num_background = 0
        """Requests in flight that yield to interactive ones."""
        self.num_late = 0
        """Requests in flight that count as interactive ones."""

    async def take(self, customer: Customer) -> Place:
        """Wait for a place of the customer's class."""
        waiting = _Waiting(customer)
        self._waiting.append(waiting)
        self.refresh()
        try:
            return await waiting.turn
        except asyncio.CancelledError:
            if waiting in self._waiting:
                self._waiting.remove(waiting)
            elif not waiting.turn.cancelled():
                waiting.turn.result().release()
            raise

    def refresh(self) -> None:
        """Hand out what is free."""
        while True:
            ready = [w for w in self._waiting if self._has_room(w.customer.service)]
            if not ready:
                return
            first = min(ready, key=self._rank)
            service = first.customer.service
            self._waiting.remove(first)
            if first.turn.done():
                continue
            self._num_turns += 1
            self._owner_turns[first.customer.owner] = self._num_turns
            first.customer.last_turn = self._num_turns
            first.turn.set_result(Place(self, service))

    def count(self, service: ServiceClass, by: int) -> None:
        """Account for a place that is taken (1) or given back (-1)."""
        if service is ServiceClass.LATE:
            self.num_late += by
        else:
            self.num_background += by

    def _rank(self, waiting: _Waiting) -> tuple[int, int, int]:
        customer = waiting.customer
        return customer.service, self._owner_turns.get(customer.owner, 0), customer.last_turn

    def _has_room(self, service: ServiceClass) -> bool:
        engine = self._get_engine()
        if not engine.is_ready:
            return False
        max_num_seqs = engine.info.max_num_seqs
        if service is ServiceClass.LATE:
            return self.num_late < max(1, max_num_seqs // 2)
        running = engine.stats.num_background_running
        return self.num_background < min(max_num_seqs, running) + LOOKAHEAD
