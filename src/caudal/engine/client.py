"""What the server needs of an engine; the ZMQ client and test doubles implement it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

from caudal.engine.messages import EngineReady, EngineRequest, EngineStats, RequestProgress
from caudal.scheduler.output import RequestOutput


class EngineClient(Protocol):
    """Asynchronous front of one engine, used from one event loop."""

    @property
    def is_ready(self) -> bool:
        """True once a real step has run and while the engine lives."""

    @property
    def info(self) -> EngineReady:
        """What the engine said when it became ready; raises UnavailableError before."""

    @property
    def stats(self) -> EngineStats:
        """The latest gauges and counters."""

    async def inspect(self, timeout_s: float) -> list[RequestProgress] | None:
        """How far every request is; None if the engine does not answer in time."""

    async def start(self) -> None:
        """Launch the engine; returns at once (await `wait_ready`)."""

    async def wait_ready(self) -> EngineReady:
        """Wait for the first step. Raises EngineDeadError with the engine's message."""

    async def submit(self, request: EngineRequest) -> AsyncIterator[RequestOutput]:
        """Hand a request over and wait for admission.

        Returns an iterator of outputs that ends after the terminal one. Raises OverloadedError
        (429) or UnavailableError (503) before anything ran; the iterator raises EngineDeadError
        if the engine dies and RequestFailedError if the request fails. Closing the iterator
        early (aclose) aborts the request.
        """

    def abort(self, request_ids: list[str]) -> None:
        """Free requests in any state; unknown ids are ignored. Their iterators end (abort)."""

    async def drain(self, timeout_s: float) -> None:
        """Let running requests finish for so long, then abort them."""

    async def stop(self) -> None:
        """End the engine process; open iterators end with an error."""
