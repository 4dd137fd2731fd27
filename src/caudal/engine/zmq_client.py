"""The asynchronous front of an engine process: submit, stream, abort, watch."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import tempfile
import time
from collections import deque
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import zmq

from caudal.config import EngineConfig
from caudal.engine.arrivals import Arrivals
from caudal.engine.child import EngineChild
from caudal.engine.messages import (
    AbortRequests,
    DebugFault,
    EngineFailed,
    EngineReady,
    EngineRequest,
    EngineStats,
    FromEngine,
    InspectRequests,
    Refusal,
    RequestProgress,
    Shutdown,
    StepResult,
    ToEngine,
)
from caudal.engine.wire import HEARTBEAT_INTERVAL_S, LaunchConfig, encode_launch
from caudal.errors import (
    EngineDeadError,
    InvalidRequestError,
    OverloadedError,
    RequestError,
    RequestFailedError,
    UnavailableError,
)
from caudal.scheduler.output import FinishReason, RequestOutput

logger = logging.getLogger(__name__)

HEARTBEAT_TIMEOUT_S = 4.0
"""Silence after which an engine counts as dead (stopped, hung)."""
STOP_TIMEOUT_S = 5.0


class OutputStream:
    """Outputs of one request in order; ends after the terminal one."""

    def __init__(self, client: ZmqEngineClient, request_id: str) -> None:
        self._client = client
        self._request_id = request_id
        self._items: deque[RequestOutput | BaseException] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._is_finished = False
        self.admission: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def put(self, item: RequestOutput | BaseException) -> None:
        """Deliver an output, or the error that ends the stream."""
        self._items.append(item)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def __aiter__(self) -> OutputStream:
        return self

    async def __anext__(self) -> RequestOutput:
        if self._is_finished and not self._items:
            raise StopAsyncIteration
        while not self._items:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        item = self._items.popleft()
        if isinstance(item, BaseException):
            self._is_finished = True
            raise item
        self._is_finished = item.finish_reason is not None
        if item.finish_reason is FinishReason.ERROR:
            raise RequestFailedError(item.error or "the request failed")
        return item

    async def aclose(self) -> None:
        """Abort the request unless it has ended."""
        if not self._is_finished:
            self._is_finished = True
            self._items.clear()
            self._client.abort([self._request_id], is_answered=True)


class ZmqEngineClient:
    """Owns the engine process and its sockets; all methods run on one event loop."""

    def __init__(self, config: EngineConfig, child: EngineChild | None = None) -> None:
        """`child`: a process that was started early; the client takes it over."""
        self._config = config
        self._child = child
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(FromEngine)
        self._streams: dict[str, OutputStream] = {}
        self._process: EngineChild | None = None
        self._sockets: tuple[zmq.Socket[bytes], zmq.Socket[bytes]] | None = None
        self._directory: str | None = None
        self._arrivals: Arrivals | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._ready: asyncio.Future[EngineReady] | None = None
        self._info: EngineReady | None = None
        self._stats = EngineStats()
        self._inspection: asyncio.Future[list[RequestProgress]] | None = None
        self._last_message = 0.0
        self._failure: str | None = None
        self.died = asyncio.Event()
        """Set when the engine ended without being asked to."""

    @property
    def is_ready(self) -> bool:
        """True once a real step has run and while the engine lives."""
        return self._info is not None

    @property
    def pid(self) -> int | None:
        """Process id of the running engine."""
        return self._process.pid if self._process else None

    @property
    def info(self) -> EngineReady:
        """What the engine said when it became ready."""
        if self._info is None:
            raise UnavailableError("the engine is not ready", code="engine_not_ready")
        return self._info

    @property
    def stats(self) -> EngineStats:
        """The latest gauges and counters."""
        return self._stats

    async def inspect(self, timeout_s: float) -> list[RequestProgress] | None:
        """See EngineClient.inspect; callers at the same time share an answer."""
        if self._inspection is None:
            if not self._try_send(InspectRequests()):
                return None
            self._inspection = asyncio.get_running_loop().create_future()
        try:
            return await asyncio.wait_for(asyncio.shield(self._inspection), timeout_s)
        except TimeoutError:
            return None

    async def start(self) -> None:
        """Launch the engine process and return at once. Also restarts after a death."""
        loop = asyncio.get_running_loop()
        self.died.clear()
        self._failure = None
        self._ready = loop.create_future()
        self._directory = tempfile.mkdtemp(prefix="caudal-")
        arrivals_path = Path(self._directory) / "arrivals"
        self._arrivals = Arrivals.create(arrivals_path)
        endpoints = [f"ipc://{self._directory}/{name}" for name in ("to", "from")]
        context = self._context = zmq.Context()
        sender: zmq.Socket[bytes] = context.socket(zmq.PUSH)
        receiver: zmq.Socket[bytes] = context.socket(zmq.PULL)
        for socket, endpoint in ((sender, endpoints[0]), (receiver, endpoints[1])):
            socket.set_hwm(0)
            socket.setsockopt(zmq.LINGER, 0)
            socket.bind(endpoint)
        self._sockets = sender, receiver
        log_level = logging.getLogger("caudal").getEffectiveLevel()
        launch = LaunchConfig(self._config, endpoints[0], endpoints[1], arrivals_path, log_level)
        process, self._child = self._child or EngineChild(), None
        process.configure(encode_launch(launch))
        self._process = process
        self._last_message = time.monotonic()
        loop.add_reader(_descriptor(receiver), self._receive)
        self._watcher = loop.create_task(self._watch(process))

    async def wait_ready(self) -> EngineReady:
        """Wait for the first real step. Raises EngineDeadError with the engine's message."""
        assert self._ready is not None, "start() comes first"
        return await asyncio.shield(self._ready)

    async def submit(self, request: EngineRequest) -> AsyncIterator[RequestOutput]:
        """See EngineClient.submit."""
        if self._info is None:
            raise UnavailableError("the engine is not ready", code="engine_not_ready")
        stream = OutputStream(self, request.request_id)
        if self._arrivals is not None and not request.service.is_background:
            self._arrivals.announce()
        if not self._try_send(request):
            raise EngineDeadError("the engine is gone")
        self._streams[request.request_id] = stream
        try:
            await stream.admission
        except asyncio.CancelledError:
            self._streams.pop(request.request_id, None)
            self.abort([request.request_id])
            raise
        return stream

    def abort(self, request_ids: list[str], *, is_answered: bool = False) -> None:
        """See EngineClient.abort; `is_answered` as in AbortRequests."""
        if request_ids:
            self._try_send(AbortRequests(request_ids=request_ids, is_answered=is_answered))

    def inject_fault(self, request_id: str, after_output_tokens: int) -> None:
        """Tests only: make a request raise inside a step after so many output tokens."""
        self._try_send(DebugFault(request_id=request_id, after_output_tokens=after_output_tokens))

    async def drain(self, timeout_s: float) -> None:
        """Wait until no request is open, at most `timeout_s`; then abort what is left."""
        deadline = time.monotonic() + timeout_s
        while self._streams and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        self.abort(list(self._streams))

    async def stop(self) -> None:
        """End the engine process; open streams end with an error."""
        process, watcher = self._process, self._watcher
        self._process = None
        if process is not None and process.returncode is None:
            self._try_send(Shutdown())
            try:
                await asyncio.wait_for(process.wait(), STOP_TIMEOUT_S)
            except TimeoutError:
                process.kill()
                await process.wait()
        if watcher is not None:
            watcher.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watcher
        self._end(EngineDeadError("the engine has been stopped"))

    def _try_send(self, message: ToEngine) -> bool:
        """False if nobody is there to take it.

        Between the end of the engine process and the moment when `_watch` hears of it the socket
        has no peer: it then refuses to send.
        """
        if self._sockets is None:
            return False
        try:
            self._sockets[0].send(self._encoder.encode(message), flags=zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def _receive(self) -> None:
        """Drain the socket: its descriptor signals edges, not levels."""
        while self._sockets is not None:
            try:
                data = self._sockets[1].recv(flags=zmq.NOBLOCK)
            except zmq.Again:
                return
            self._last_message = time.monotonic()
            if data:
                self._handle(self._decoder.decode(data))

    def _handle(self, message: Any) -> None:
        if isinstance(message, StepResult):
            self._handle_step(message)
        elif isinstance(message, EngineReady):
            self._info = message
            self._stats = EngineStats(
                num_blocks_total=message.num_blocks, num_blocks_free=message.num_blocks
            )
            if self._ready is not None and not self._ready.done():
                self._ready.set_result(message)
        elif isinstance(message, EngineFailed):
            self._failure = message.message

    def _handle_step(self, result: StepResult) -> None:
        streams = self._streams
        for request_id in result.accepted:
            stream = streams.get(request_id)
            if stream is not None and not stream.admission.done():
                stream.admission.set_result(None)
        for refusal in result.refusals:
            refused = streams.pop(refusal.request_id, None)
            if refused is not None and not refused.admission.done():
                refused.admission.set_exception(_refusal_error(refusal))
        for output in result.outputs:
            if output.finish_reason is None:
                stream = streams.get(output.request_id)
            else:
                stream = streams.pop(output.request_id, None)
            if stream is not None:
                stream.put(output)
        if result.stats is not None:
            self._stats = result.stats
        if result.progress is not None:
            self._end_inspection(result.progress)

    def _end_inspection(self, progress: list[RequestProgress]) -> None:
        inspection, self._inspection = self._inspection, None
        if inspection is not None:
            inspection.set_result(progress)

    async def _watch(self, process: EngineChild) -> None:
        """Notice an engine that exits or falls silent, and end every stream with an error."""
        exited = asyncio.ensure_future(process.wait())
        interval = HEARTBEAT_INTERVAL_S / 2
        while not exited.done():
            before = time.monotonic()
            await asyncio.wait([exited], timeout=interval)
            now = time.monotonic()
            is_loop_late = now - before > 2 * interval
            if now - self._last_message > HEARTBEAT_TIMEOUT_S and not is_loop_late:
                self._failure = f"the engine was silent for {HEARTBEAT_TIMEOUT_S:.0f} s"
                process.kill()
                await exited
        if self._process is process:
            self._receive()
            reason = self._failure or f"the engine process ended with code {process.returncode}"
            logger.error("%s", reason)
            self._process = None
            self._end(EngineDeadError(reason))
            self.died.set()

    def _end(self, error: EngineDeadError) -> None:
        """Close the sockets and end whatever still waits on this engine."""
        self._info = None
        self._end_inspection([])
        if self._ready is not None and not self._ready.done():
            self._ready.set_exception(error)
            self._ready.exception()  # marks it retrieved: nobody may be waiting
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            if stream.admission.done():
                stream.put(error)
            else:
                stream.admission.set_exception(error)
        if self._sockets is not None:
            sender, receiver = self._sockets
            self._sockets = None
            asyncio.get_running_loop().remove_reader(_descriptor(receiver))
            sender.close()
            receiver.close()
        if self._context is not None:
            self._context.term()
            self._context = None
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = self._arrivals = None


def _descriptor(socket: zmq.Socket[bytes]) -> int:
    """The file descriptor that signals (by edges) that a ZMQ socket has something."""
    descriptor = socket.getsockopt(zmq.FD)
    assert isinstance(descriptor, int)
    return descriptor


def _refusal_error(refusal: Refusal) -> RequestError:
    if refusal.retry_after_s is None:
        return InvalidRequestError(refusal.message, param=refusal.param, code=refusal.code)
    return OverloadedError(
        refusal.message, retry_after_s=refusal.retry_after_s, reason=refusal.reason
    )
