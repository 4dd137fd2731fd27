"""An engine client that follows the protocol without a model: scripted tokens, real timing."""

from __future__ import annotations

import asyncio
import struct
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from caudal.engine.messages import EngineReady, EngineRequest, EngineStats, RequestProgress
from caudal.errors import (
    EngineDeadError,
    OverloadedError,
    RequestFailedError,
    UnavailableError,
)
from caudal.scheduler.output import FinishReason, RequestOutput
from caudal.step_io import TokenLogprobs

Script = Callable[[EngineRequest], list[int]]

HIDDEN_SIZE = 8


@dataclass
class _Running:
    request: EngineRequest
    tokens: deque[int]
    stream: _Stream
    num_cached: int
    num_output: int = 0
    is_first: bool = True


@dataclass
class _Stream:
    """As the real client's: one waiter, woken once per step."""

    engine: FakeEngine
    request_id: str
    items: deque[RequestOutput | Exception] = field(default_factory=deque)
    waiter: asyncio.Future[None] | None = None
    is_finished: bool = False

    def put(self, item: RequestOutput | Exception) -> None:
        self.items.append(item)
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)

    def __aiter__(self) -> _Stream:
        return self

    async def __anext__(self) -> RequestOutput:
        if self.is_finished and not self.items:
            raise StopAsyncIteration
        while not self.items:
            self.waiter = asyncio.get_running_loop().create_future()
            await self.waiter
        item = self.items.popleft()
        if isinstance(item, Exception):
            self.is_finished = True
            raise item
        self.is_finished = item.finish_reason is not None
        return item

    async def aclose(self) -> None:
        if not self.is_finished:
            self.is_finished = True
            self.items.clear()
            self.engine.abort([self.request_id])


class FakeEngine:
    """Steps all running requests together every `step_s`; queues above `max_running`."""

    def __init__(
        self,
        *,
        script: Script,
        vocab_size: int,
        eos_id: int,
        max_model_len: int = 512,
        step_s: float = 0.0,
    ) -> None:
        self.script = script
        self.eos_id = eos_id
        self.step_s = step_s
        self.max_running = 1_000_000
        self.max_waiting = 1_000_000
        self.fail_after: int | None = None
        self.start_error: str | None = None
        self.admission_gate = asyncio.Event()
        self.admission_gate.set()
        self.step_gate = asyncio.Event()
        self.step_gate.set()
        self.accepted: list[EngineRequest] = []
        self.aborted: list[str] = []
        self.started_ids: list[str] = []
        self.num_cached = 0
        self.num_steps = 0
        self._waiting: dict[str, _Running] = {}
        self._running: dict[str, _Running] = {}
        self._stepper: asyncio.Task[None] | None = None
        self._work = asyncio.Event()
        self._ready = asyncio.Event()
        self._is_dead = False
        self.is_stopped = False
        self._info = EngineReady(
            model_name="tiny",
            architecture="llama",
            vocab_size=vocab_size,
            hidden_size=HIDDEN_SIZE,
            max_model_len=max_model_len,
            num_blocks=64,
            block_size=16,
            max_num_seqs=8,
            memory_plan={},
            isa="ref",
            num_threads=1,
            load_ms=1.0,
        )

    @property
    def is_ready(self) -> bool:
        return self._ready.is_set() and not self._is_dead

    @property
    def info(self) -> EngineReady:
        if not self.is_ready:
            raise UnavailableError("not ready")
        return self._info

    @property
    def stats(self) -> EngineStats:
        return EngineStats(
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            num_blocks_total=64,
            num_blocks_held=len(self._running),
            num_blocks_free=64 - len(self._running),
            num_steps=self.num_steps,
            step_ms={"forward": 12.5 * self.num_steps},
        )

    async def inspect(self, timeout_s: float) -> list[RequestProgress] | None:
        return [
            RequestProgress(
                request_id=request_id,
                is_running=request_id in self._running,
                num_computed_tokens=len(entry.request.prompt_token_ids) + entry.num_output,
            )
            for request_id, entry in (*self._running.items(), *self._waiting.items())
        ]

    async def start(self) -> None:
        self._stepper = asyncio.get_running_loop().create_task(self._run())

    def become_ready(self) -> None:
        self._ready.set()

    async def wait_ready(self) -> EngineReady:
        if self.start_error is not None:
            raise EngineDeadError(self.start_error)
        await self._ready.wait()
        return self._info

    async def submit(self, request: EngineRequest) -> AsyncIterator[RequestOutput]:
        stream = _Stream(self, request.request_id)
        tokens = deque(self.script(request)[: request.sampling.max_tokens])
        entry = _Running(request, tokens, stream, self.num_cached)
        self._waiting[request.request_id] = entry
        try:
            await self.admission_gate.wait()
        except asyncio.CancelledError:
            self.abort([request.request_id])
            raise
        if self._is_dead:
            raise EngineDeadError("dead")
        num_open = len(self._waiting) + len(self._running)
        if request.num_siblings <= num_open and num_open > self.max_running + self.max_waiting:
            self._waiting.pop(request.request_id, None)
            raise OverloadedError("queue full", retry_after_s=2.3, reason="queue_requests")
        self.accepted.append(request)
        self._work.set()
        return stream

    def abort(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            entry = self._waiting.pop(request_id, None) or self._running.pop(request_id, None)
            if entry is not None:
                self.aborted.append(request_id)
                entry.stream.put(
                    RequestOutput(request_id=request_id, finish_reason=FinishReason.ABORT)
                )

    async def drain(self, timeout_s: float) -> None:
        async with asyncio.timeout(timeout_s + 60):
            deadline = asyncio.get_running_loop().time() + timeout_s
            while self._waiting or self._running:
                if asyncio.get_running_loop().time() > deadline:
                    self.abort([*self._waiting, *self._running])
                await asyncio.sleep(0.005)

    async def stop(self) -> None:
        self.is_stopped = True
        if self._stepper is not None:
            self._stepper.cancel()
        self.die()

    def die(self) -> None:
        """The process is gone: every open stream ends with an error."""
        self._is_dead = True
        for entry in [*self._waiting.values(), *self._running.values()]:
            entry.stream.put(EngineDeadError("the engine process ended with code -9"))
        self._waiting.clear()
        self._running.clear()

    async def _run(self) -> None:
        while True:
            await self._work.wait()
            await self.step_gate.wait()
            await asyncio.sleep(self.step_s)
            self._step()
            if not (self._waiting or self._running):
                self._work.clear()

    def _step(self) -> None:
        self.num_steps += 1
        for request_id in list(self._waiting):
            if len(self._running) < self.max_running:
                self._running[request_id] = self._waiting.pop(request_id)
                self.started_ids.append(request_id)
        for request_id, entry in list(self._running.items()):
            item = self._advance(entry)
            if isinstance(item, Exception) or item.finish_reason is not None:
                del self._running[request_id]
            entry.stream.put(item)

    def _advance(self, entry: _Running) -> RequestOutput | Exception:
        sampling = entry.request.sampling
        if self.fail_after is not None and entry.num_output >= self.fail_after:
            return RequestFailedError("The request failed inside a step.")
        output = RequestOutput(
            request_id=entry.request.request_id,
            num_prompt_tokens=len(entry.request.prompt_token_ids),
            num_cached_tokens=entry.num_cached,
            queue_ms=1.5 if entry.is_first else 0.0,
        )
        if entry.is_first and sampling.num_prompt_logprobs is not None:
            output.prompt_logprobs = [
                fake_logprobs(i, sampling.num_prompt_logprobs)
                for i in entry.request.prompt_token_ids[1:]
            ]
        entry.is_first = False
        if sampling.max_tokens == 0:
            output.finish_reason = FinishReason.LENGTH
            if sampling.pooling is not None:
                output.pooled = fake_pooled(entry.request.prompt_token_ids, sampling.pooling)
            return output
        token = entry.tokens.popleft() if entry.tokens else self.eos_id
        output.new_token_ids = [token]
        entry.num_output += 1
        output.num_output_tokens = entry.num_output
        if sampling.num_logprobs is not None:
            output.logprobs = [fake_logprobs(token, sampling.num_logprobs)]
        is_eos = token == self.eos_id and not sampling.ignore_eos
        if is_eos or token in sampling.stop_token_ids:
            output.finish_reason = FinishReason.STOP
            output.stop_token_id = token
        elif entry.num_output >= sampling.max_tokens:
            output.finish_reason = FinishReason.LENGTH
        return output


def fake_pooled(token_ids: list[int], pooling: str) -> bytes:
    """A vector that depends on the tokens and on how they are pooled."""
    ids = token_ids if pooling == "mean" else token_ids[-1:]
    values = [sum((i + 1) % (k + 3) for i in ids) / len(ids) for k in range(HIDDEN_SIZE)]
    return struct.pack(f"<{HIDDEN_SIZE}f", *values)


def fake_logprobs(token_id: int, num_top: int) -> TokenLogprobs:
    """The token itself is the most likely one; the last alternative is impossible."""
    ids = [token_id, *(i for i in range(3, 4 + num_top) if i != token_id)][:num_top]
    logprobs = [-0.25 - rank for rank in range(len(ids))]
    if num_top > 1:
        logprobs[-1] = float("-inf")
    return TokenLogprobs(token_id, -0.25, 1, ids, logprobs)
