"""Learns from what became of predicted waits how far they are to be trusted."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from caudal.scheduler.request import Request

MIN_WAIT_S = 0.2
"""Shorter waits are a matter of a few steps; nothing can be learnt from them."""
MAX_RATIO = 3.0
"""What takes so many times as long, or as short, counts no more than that."""
MAX_FACTOR = 2.0
MAX_UNSEEN = 0.25
"""Part of the wait that may pass between two looks; beyond it the machine was idle, or stopped."""
MAX_CANCELLED = 2
"""Clients that leave make a queue shorter in a way that says nothing about the next time."""
FORGETTING = 0.85
"""Weight of an outcome after one more."""
DOUBT = 3.0
"""Outcomes that count as much as the first belief that predictions are right as they are."""


@dataclass(slots=True)
class Promise:
    """What a refused client was told, before any correction."""

    group: Sequence[Request]
    wait_s: float
    made_at: float
    num_cancelled: int
    """All requests ever cancelled, when it was made."""
    looked_at: float


class Promises:
    """For each reason, one promise at a time is followed until it could have been kept.

    Later refusals while it is open are of the same queue and would say the same again.
    """

    def __init__(self) -> None:
        self._open: dict[str, Promise] = {}
        self._sums: dict[str, tuple[float, float]] = {}
        """Weighted log ratios of true to predicted waits, and their weights."""

    def factor(self, reason: str) -> float:
        """By what predicted waits are to be multiplied."""
        total, weight = self._sums.get(reason, (0.0, DOUBT))
        return min(MAX_FACTOR, max(1 / MAX_FACTOR, math.exp(total / weight)))

    def make(self, reason: str, promise: Promise) -> None:
        """Follow what was predicted, if nothing else is being followed."""
        if promise.wait_s >= MIN_WAIT_S and reason not in self._open:
            self._open[reason] = promise

    def to_check(self, now: float, num_cancelled: int) -> list[tuple[str, Promise]]:
        """The open ones; those of which nothing can be learnt any more are dropped.

        To be asked after each step: others may fill what has become free before the next.
        """
        found: list[tuple[str, Promise]] = []
        for reason, promise in list(self._open.items()):
            unseen_s = now - promise.looked_at
            is_spoilt = num_cancelled - promise.num_cancelled > MAX_CANCELLED
            if is_spoilt or unseen_s > MAX_UNSEEN * max(1.0, promise.wait_s):
                del self._open[reason]
            else:
                promise.looked_at = now
                found.append((reason, promise))
        return found

    def settle(self, reason: str, promise: Promise, now: float, *, is_open: bool) -> None:
        """It was looked whether the request would be let in (`is_open`)."""
        ratio = (now - promise.made_at) / promise.wait_s
        if not is_open and ratio < MAX_RATIO:
            return
        del self._open[reason]
        total, weight = self._sums.get(reason, (0.0, DOUBT))
        outcome = math.log(min(MAX_RATIO, max(1 / MAX_RATIO, ratio)))
        self._sums[reason] = (total * FORGETTING + outcome, weight * FORGETTING + 1.0)
