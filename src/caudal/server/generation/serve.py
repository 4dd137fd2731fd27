"""Runs a generation request: submit its choices, deliver their text, and leave nothing behind."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from typing import Any, Protocol

from caudal.errors import (
    DeadlineError,
    EngineDeadError,
    OverloadedError,
    RequestError,
    RequestFailedError,
    UnavailableError,
)
from caudal.metrics.request_log import RequestRecord
from caudal.scheduler.output import FinishReason, RequestOutput
from caudal.server.errors import ABORTED, ClientGoneError, as_request_error
from caudal.server.exchange import Exchange
from caudal.server.generation.answer import AnswerWriter, usage_of
from caudal.server.generation.choice import Choice
from caudal.server.generation.plan import GenerationPlan
from caudal.server.load import note_arrivals
from caudal.server.model import ServedModel
from caudal.server.quota import Quota
from caudal.server.sse import EventStream
from caudal.server.state import AppState
from caudal.server.tenancy import for_tenant, quota_of, refund

Outputs = AsyncIterator[RequestOutput]
Deliver = Callable[[Choice, str], Awaitable[None]]


class Abandonable(Protocol):
    """Work for a client that may leave."""

    def client_left(self) -> None:
        """Free what nobody waits for any more."""


class Generation:
    """The choices of one request and their place in the engine."""

    def __init__(
        self,
        state: AppState,
        plan: GenerationPlan,
        model: ServedModel,
        quota: Quota | None = None,
    ) -> None:
        """`quota` is charged for the tokens that come out."""
        self.plan = plan
        self._state = state
        self._quota = quota
        self._open = state.generations
        self._log = state.request_log
        self._engine = state.engine
        self._metrics = state.metrics_of(plan.service)
        self._requests = plan.engine_requests()
        self._outputs: list[Outputs] = []
        self._is_client_gone = False
        self.choices = [
            Choice(plan, model, index, request.request_id)
            for index, request in enumerate(self._requests)
        ]

    async def submit(self) -> None:
        """Hand all choices to the engine, all or none.

        Raises OverloadedError or UnavailableError.
        """
        metrics = self._metrics
        load_ids = note_arrivals(self._state, self.plan, self._requests)
        try:
            self._outputs = await together(map(self._engine.submit, self._requests))
        except BaseException as error:
            is_refused = isinstance(error, OverloadedError)
            self._state.load_log.give_up(load_ids, is_refused=is_refused)
            raise
        self._open[self] = None
        for prompt in self.plan.prompts:
            metrics.prompt_tokens += len(prompt.token_ids)
            metrics.prompt_length.observe(len(prompt.token_ids))
        if self._is_client_gone:
            self._abort_open()

    async def run(self, deliver: Deliver) -> None:
        """Deliver the text of all choices until each has ended.

        Raises ClientGoneError if the client left, else the first choice's error.
        """
        pairs = zip(self.choices, self._outputs, strict=True)
        try:
            await together(self._run_choice(c, o, deliver) for c, o in pairs)
        except (RequestFailedError, EngineDeadError):
            self._metrics.requests_finished.increment(FinishReason.ERROR)
            raise

    async def _run_choice(self, choice: Choice, outputs: Outputs, deliver: Deliver) -> None:
        timing = choice.timing
        metrics = self._metrics
        clock = time.monotonic
        async for output in outputs:
            num_before = choice.num_output_tokens
            text = choice.feed(output)
            num_new = choice.num_output_tokens - num_before
            if num_new:
                timing.observe_tokens(clock(), num_new, metrics)
                metrics.generation_tokens += num_new
                if self._quota is not None:
                    self._quota.use_tokens(num_new)
            if output.queue_ms:
                timing.queue_s = output.queue_ms / 1e3
            if output.num_preemptions:
                timing.num_preemptions = output.num_preemptions
            reason = choice.finish_reason
            if reason is None:
                if text or choice.parts:
                    await deliver(choice, text)
                continue
            if output.finish_reason is None:  # ended by a stop string
                await _close(outputs)
            self._check_end(reason, output)
            metrics.observe_finished(reason, timing, clock())
            await deliver(choice, text)
            return
        if self._is_client_gone:
            raise ClientGoneError
        raise RequestFailedError("The engine ended this request early.", code="internal_error")

    def _check_end(self, reason: FinishReason, output: RequestOutput) -> None:
        if reason is FinishReason.ABORT:
            self._metrics.requests_finished.increment(reason)
            if self._is_client_gone:
                raise ClientGoneError
            raise UnavailableError("The request was aborted: shutting down.", code=ABORTED)
        if reason is FinishReason.TIMEOUT:
            self._metrics.requests_finished.increment(reason)
            has_begun = output.num_output_tokens > 0
            where = "before its end" if has_begun else "before its first token"
            raise DeadlineError(self.plan.timeout_s or 0.0, where)
        if reason is FinishReason.ERROR:
            raise RequestFailedError(output.error or "The request failed.", code="request_failed")

    def _record(self, choice: Choice) -> RequestRecord:
        """What became of a choice, now that it has ended."""
        timing, now = choice.timing, time.monotonic()
        reason: str = choice.finish_reason or FinishReason.ERROR
        if self._is_client_gone and choice.finish_reason in (None, FinishReason.ABORT):
            reason = "cancelled"
        return RequestRecord(
            request_id=choice.request_id,
            arrival=time.time() - (now - timing.arrival),
            reason=str(reason),
            num_prompt_tokens=len(choice.prompt.token_ids),
            num_cached_tokens=choice.num_cached_tokens,
            num_output_tokens=choice.num_output_tokens,
            max_tokens=choice.prompt.max_tokens,
            num_preemptions=timing.num_preemptions,
            is_batch=self.plan.service.is_background,
            queue_s=timing.queue_s,
            ttft_s=timing.first - timing.arrival if timing.first else None,
            e2e_s=(timing.finished or now) - timing.arrival,
            path=self.plan.path,
            traceparent=self.plan.traceparent,
        )

    def client_left(self) -> None:
        """Free the request in whatever state it is."""
        self._is_client_gone = True
        self._abort_open()

    def _abort_open(self) -> None:
        open_ids = [c.request_id for c in self.choices if c.finish_reason is None]
        if open_ids:
            self._engine.abort(open_ids)

    async def close(self) -> None:
        """Free what has not ended, whatever happened."""
        if self in self._open:
            del self._open[self]
            for choice in self.choices:
                self._log.add(self._record(choice))
        if not self._outputs:
            self._abort_open()
        for outputs in self._outputs:
            await _close(outputs)


async def serve_generation(
    state: AppState,
    exchange: Exchange,
    model: ServedModel,
    plan: GenerationPlan,
    writer: AnswerWriter,
) -> None:
    """Answer a validated request on `exchange`.

    Errors before the first byte are raised for the caller to answer; later ones end the stream.
    """
    state.require_serving()
    plan = for_tenant(state, exchange, plan)
    generation = Generation(state, plan, model, quota_of(exchange))
    watcher = asyncio.create_task(watch_client(exchange, generation))
    try:
        try:
            await generation.submit()
        except RequestError:
            refund(exchange, plan)
            raise
        if plan.stream.is_stream:
            await _stream(state, exchange, generation, plan, writer)
        else:
            await _respond(exchange, generation, plan, writer)
    finally:
        watcher.cancel()
        await generation.close()


async def watch_client(exchange: Exchange, work: Abandonable) -> None:
    """Tell `work` if the client leaves before its answer is complete."""
    await exchange.wait_disconnect()
    if not exchange.is_complete:
        work.client_left()


async def _respond(
    exchange: Exchange, generation: Generation, plan: GenerationPlan, writer: AnswerWriter
) -> None:
    async def keep(choice: Choice, text: str) -> None:
        choice.texts.append(text)

    await generation.run(keep)
    body = writer.response(generation.choices, usage_of(generation.choices, plan.n))
    await exchange.respond(body)


async def _stream(
    state: AppState,
    exchange: Exchange,
    generation: Generation,
    plan: GenerationPlan,
    writer: AnswerWriter,
) -> None:
    await exchange.start_stream(writer.stream_type.media_type)
    stream = EventStream(exchange, writer.stream_type)
    num_open = len(generation.choices)

    async def send(choice: Choice, text: str) -> None:
        nonlocal num_open
        if choice.finish_reason is None:
            await stream.send(writer.chunk(choice, text))
            return
        num_open -= 1
        events = writer.last_chunk(choice, text)
        if num_open:
            await stream.send(events)
            return
        usage = usage_of(generation.choices, plan.n)
        await stream.finish(events + writer.ending(generation.choices, usage))

    state.streams.add(stream)
    try:
        opening = writer.opening(generation.choices)
        if opening:
            await stream.send(opening)
        await generation.run(send)
    except ClientGoneError:
        raise
    except Exception as error:
        await stream.finish(writer.failure(as_request_error(error)))
    except asyncio.CancelledError:
        if not stream.was_cut:
            raise
        _uncancel()
        state.metrics.slow_readers_cut += 1
    finally:
        state.streams.discard(stream)


async def _close(outputs: Outputs) -> None:
    """Close an iterator early, which aborts its request; nothing happens if it has ended."""
    close = getattr(outputs, "aclose", None)
    if close is not None:
        await close()


def _uncancel() -> None:
    task = asyncio.current_task()
    if task is not None:
        task.uncancel()


async def together(work: Iterable[Coroutine[Any, Any, Any]]) -> list[Any]:
    """Results of all, in order; on the first error the others are cancelled and awaited."""
    coroutines = list(work)
    if len(coroutines) == 1:
        return [await coroutines[0]]
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
