"""Runs the prompts of a request that wants vectors instead of text."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace

from caudal.errors import OverloadedError, RequestFailedError
from caudal.server.errors import ClientGoneError
from caudal.server.exchange import Exchange
from caudal.server.generation.choice import Choice
from caudal.server.generation.plan import GenerationPlan
from caudal.server.generation.serve import Generation, together, watch_client
from caudal.server.model import ServedModel
from caudal.server.state import AppState
from caudal.server.tenancy import for_tenant, refund


class PooledPrompts:
    """The prompts of one request, each a generation without tokens.

    They enter the engine a few at a time, so that a long list neither fills the queue nor keeps
    other clients waiting behind all of it.
    """

    def __init__(self, state: AppState, plan: GenerationPlan, model: ServedModel) -> None:
        self._state = state
        self._model = model
        self._plans = [
            replace(plan, request_id=f"{plan.request_id}-{number}", prompts=[prompt])
            for number, prompt in enumerate(plan.prompts)
        ]
        self._open: dict[int, Generation] = {}
        self._is_client_gone = False
        self.vectors = [b""] * len(plan.prompts)
        """Float32 little-endian, by prompt."""

    async def run(self) -> None:
        """Fill `vectors`. Raises what the first prompt that fails raises."""
        numbers = iter(range(len(self._plans)))
        num_workers = min(len(self._plans), max(1, self._state.engine.info.max_num_seqs // 2))
        await together(self._work(numbers) for _ in range(num_workers))

    def client_left(self) -> None:
        """Free what is in the engine, and start no more."""
        self._is_client_gone = True
        for generation in self._open.values():
            generation.client_left()

    async def _work(self, numbers: Iterator[int]) -> None:
        for number in numbers:
            if self._is_client_gone:
                raise ClientGoneError
            generation = Generation(self._state, self._plans[number], self._model)
            self._open[number] = generation
            try:
                await generation.submit()
                await generation.run(_ignore)
            finally:
                del self._open[number]
                await generation.close()
            pooled = generation.choices[0].pooled
            if pooled is None:
                raise RequestFailedError("The engine gave no vector.", code="internal_error")
            self.vectors[number] = pooled


async def serve_pooling(
    state: AppState, exchange: Exchange, model: ServedModel, plan: GenerationPlan
) -> list[bytes]:
    """The pooled hidden states of the plan's prompts, float32 little-endian, in order.

    Raises OverloadedError, UnavailableError, RequestFailedError, or ClientGoneError.
    """
    state.require_serving()
    plan = for_tenant(state, exchange, plan)
    prompts = PooledPrompts(state, plan, model)
    watcher = asyncio.create_task(watch_client(exchange, prompts))
    try:
        await prompts.run()
    except OverloadedError:
        refund(exchange, plan)
        raise
    finally:
        watcher.cancel()
    return prompts.vectors


async def _ignore(choice: Choice, text: str) -> None:
    """There is no text."""
