"""Fairness in a burst: bounds the synchronous work that one pass of the event loop can hold."""

from __future__ import annotations

import asyncio
from collections import deque


class Turns:
    """Hands out at most `per_pass` turns per pass of the event loop, first come first served.

    Without it a thousand requests that arrive together would all be parsed and tokenized within
    a single pass, and a probe that arrives just after them would wait for the lot.
    """

    def __init__(self, per_pass: int) -> None:
        self._per_pass = per_pass
        self._num_used = 0
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._is_scheduled = False

    async def take(self) -> None:
        """Wait for a turn; returns at once while the current pass has turns left."""
        if self._num_used < self._per_pass and not self._waiting:
            self._num_used += 1
            self._schedule()
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        self._schedule()
        await turn

    def _schedule(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._next_pass)

    def _next_pass(self) -> None:
        self._is_scheduled = False
        self._num_used = 0
        while self._waiting and self._num_used < self._per_pass:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                self._num_used += 1
        if self._waiting or self._num_used:
            self._schedule()
