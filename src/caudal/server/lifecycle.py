"""From start to exit: readiness, signals, drain, and what happens when the engine dies."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from caudal.engine.client import EngineClient
from caudal.errors import CaudalError, EngineDeadError
from caudal.server.signals import StopRequests
from caudal.server.state import AppState

logger = logging.getLogger("caudal.server")


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """How often a dead engine is started again before the server gives up."""

    max_restarts: int = 2
    backoff_s: float = 0.5
    """Wait before the first restart; doubled for each further one."""
    reset_after_s: float = 600.0
    """Healthy time after which the count starts anew."""
    poll_s: float = 0.1


class Lifecycle:
    """Decides when the server stops, and with which exit code. Runs on the server's loop."""

    def __init__(
        self,
        state: AppState,
        create_engine: Callable[[], EngineClient],
        stop: StopRequests,
        policy: RestartPolicy | None = None,
    ) -> None:
        self._state = state
        self._create_engine = create_engine
        self._policy = policy or RestartPolicy()
        self._stop = stop
        self._num_restarts = 0
        self._last_start = time.monotonic()

    async def run(self, announce: Callable[[], None]) -> int:
        """Serve until asked to stop or until the engine is lost; returns the exit code."""
        supervisor = asyncio.create_task(self._supervise(announce))
        stop = asyncio.create_task(self._stop.asked.wait())
        try:
            await asyncio.wait({supervisor, stop}, return_when=asyncio.FIRST_COMPLETED)
            if supervisor.done():
                self._state.is_draining = True
                return supervisor.result()
        finally:
            for task in (supervisor, stop):
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
        logger.info("stopping: running requests may finish; signal again to end at once")
        self._state.is_draining = True
        await self._drain()
        return 0

    async def _supervise(self, announce: Callable[[], None]) -> int:
        """Wait for the engine, watch it, restart it. Returns the exit code when it is lost."""
        try:
            await self._state.engine.wait_ready()
        except CaudalError as error:
            logger.error("%s", error)
            return 1
        announce()
        while True:
            await asyncio.sleep(self._policy.poll_s)
            if self._state.engine.is_ready:
                continue
            if not await self._restart():
                logger.error("the engine keeps dying; giving up")
                return 1

    async def _restart(self) -> bool:
        """Start engines until one is ready; False when the policy allows no more."""
        policy = self._policy
        if time.monotonic() - self._last_start > policy.reset_after_s:
            self._num_restarts = 0
        while self._num_restarts < policy.max_restarts:
            wait_s = policy.backoff_s * 2**self._num_restarts
            self._num_restarts += 1
            self._state.metrics.engine_restarts += 1
            logger.error("the engine died; restarting it in %.1f s", wait_s)
            await self._state.engine.stop()
            await asyncio.sleep(wait_s)
            self._state.engine = engine = self._create_engine()
            self._last_start = time.monotonic()
            try:
                await engine.start()
                await engine.wait_ready()
            except EngineDeadError as error:
                logger.error("%s", error)
                continue
            logger.warning("the engine is ready again")
            return True
        return False

    async def _drain(self) -> None:
        """Let running requests finish within the time limit, unless told to stop at once."""
        work = asyncio.create_task(self._finish_requests())
        hurry = asyncio.create_task(self._stop.now.wait())
        await asyncio.wait({work, hurry}, return_when=asyncio.FIRST_COMPLETED)
        for task in (work, hurry):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def _finish_requests(self) -> None:
        state = self._state
        await state.close_batches()
        deadline = time.monotonic() + state.config.drain_timeout_s
        await state.engine.drain(state.config.drain_timeout_s)
        # Answers whose requests have ended may still be on their way out.
        while state.num_active and time.monotonic() < deadline + 1.0:
            await asyncio.sleep(0.02)
