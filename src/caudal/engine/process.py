"""The engine process: ZMQ in, steps, ZMQ out. Started by ZmqEngineClient with a LaunchConfig."""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import threading
import time
from concurrent.futures import Future
from typing import Any

import msgspec
import zmq

from caudal.config import EngineConfig
from caudal.engine.arrivals import Arrivals
from caudal.engine.core import EngineCore
from caudal.engine.messages import (
    AbortRequests,
    DebugFault,
    EngineFailed,
    EngineRequest,
    FromEngine,
    InspectRequests,
    Shutdown,
    StepResult,
    ToEngine,
)
from caudal.engine.preparation import POLL_MS, Preparations
from caudal.engine.wire import HEARTBEAT_INTERVAL_S, decode_launch
from caudal.errors import CaudalError
from caudal.executor.uniproc import UniProcExecutor
from caudal.scheduler.output import FinishReason, RequestOutput

logger = logging.getLogger(__name__)

IDLE_CHECK_AFTER_MS = 1000
"""Idle time after which the KV bookkeeping is checked, once per idle period."""
ANNOUNCED_TIMEOUT_S = 0.02
"""A request that has not come so long after it was announced is not waited for."""
STATS_INTERVAL_S = 0.1
"""Gauges travel with a step's outputs at most this often, and when work ends."""


class EngineProcess:
    """Owns the sockets of the engine's side and runs the core until told to stop."""

    def __init__(self, request_endpoint: str, output_endpoint: str, arrivals: Arrivals) -> None:
        self._context = zmq.Context()
        self._requests: zmq.Socket[bytes] = self._context.socket(zmq.PULL)
        self._outputs: zmq.Socket[bytes] = self._context.socket(zmq.PUSH)
        for socket in (self._requests, self._outputs):
            socket.set_hwm(0)
        self._requests.connect(request_endpoint)
        self._outputs.connect(output_endpoint)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
        self._groups: dict[str, list[EngineRequest]] = {}
        self._arrivals = arrivals
        self._preparations = Preparations()
        self._announced: list[Future[Any]] = []
        """Grammars that interrupt steps of offline work when they are done."""
        self._result = StepResult()
        self._stats_due = 0.0
        self._is_stopping = False
        threading.Thread(
            target=_send_heartbeats,
            args=(self._context, output_endpoint, os.getppid()),
            daemon=True,
        ).start()

    def run(self, config: EngineConfig) -> int:
        """Load, serve until Shutdown, and return the exit code."""
        try:
            executor = UniProcExecutor(config)
            core = EngineCore(config, executor, can_interrupt=True)
            self._send(core.describe(config.model_path.name))
            # Everything made so far stays: keep the collector from walking it between steps.
            gc.freeze()
            gc.enable()
            self._serve(core)
        except Exception as error:
            is_known = isinstance(error, CaudalError)
            if not is_known:
                logger.exception("the engine failed")
            self._send(EngineFailed(message=str(error) if is_known else repr(error)))
            self._outputs.close(linger=1000)
            return 1
        executor.shutdown()
        self._outputs.close(linger=1000)
        return 0

    def _serve(self, core: EngineCore) -> None:
        is_checked = True
        while True:
            self._receive(core, wait_ms=0 if core.has_work else IDLE_CHECK_AFTER_MS)
            if self._is_stopping:
                self._result.outputs.extend(core.fail_all("the engine is shutting down"))
                self._publish(core)
                return
            if core.has_work:
                is_checked = False
                self._result.outputs.extend(core.step(self._arrivals.interrupt()))
            elif not self._result.accepted and not self._result.refusals and not is_checked:
                core.check_integrity()
                is_checked = True
            self._publish(core)

    def _receive(self, core: EngineCore, wait_ms: int) -> None:
        """Handle every message that is there; wait for the first one while idle."""
        if self._preparations:
            wait_ms = min(wait_ms, POLL_MS)
        if wait_ms and not self._requests.poll(wait_ms) and not self._preparations:
            return
        self._handle_messages(core)
        if core.was_interrupted:
            self._await_announced(core)
        if self._preparations:
            groups, refusals = self._preparations.take()
            self._result.refusals.extend(refusals)
            for group in groups:
                self._admit(core, group)
        if self._result.accepted or self._result.refusals or self._result.progress is not None:
            self._publish(core)  # admission is answered before the step, not after it

    def _await_announced(self, core: EngineCore) -> None:
        """A step made way for requests: they come in a moment, unless something got lost."""
        deadline = time.monotonic() + ANNOUNCED_TIMEOUT_S
        while self._arrivals.num_pending:
            if time.monotonic() > deadline:
                self._arrivals.forget_pending()
                return
            self._requests.poll(POLL_MS)
            self._handle_messages(core)

    def _handle_messages(self, core: EngineCore) -> None:
        for future in [future for future in self._announced if future.done()]:
            self._announced.remove(future)
            self._arrivals.take()
        while True:
            try:
                message = self._decoder.decode(self._requests.recv(flags=zmq.NOBLOCK))
            except zmq.Again:
                return
            if isinstance(message, EngineRequest):
                if not message.service.is_background:
                    self._arrivals.take()
                self._add(core, message)
            elif isinstance(message, AbortRequests):
                self._abort(core, message)
            elif isinstance(message, InspectRequests):
                self._result.progress = core.progress()
            elif isinstance(message, DebugFault):
                core.inject_fault(message.request_id, message.after_output_tokens)
            elif isinstance(message, Shutdown):
                self._is_stopping = True

    def _add(self, core: EngineCore, request: EngineRequest) -> None:
        """Admit a request once all its siblings are here."""
        group = [request]
        if request.parent_id is not None and request.num_siblings > 1:
            group = self._groups.setdefault(request.parent_id, [])
            group.append(request)
            if len(group) < request.num_siblings:
                return
            del self._groups[request.parent_id]
        futures = core.prepare(group)
        if futures:
            self._preparations.add(group, futures)
            if not request.service.is_background:
                self._announced += futures
                for future in futures:
                    future.add_done_callback(lambda _: self._arrivals.announce())
        else:
            self._admit(core, group)

    def _admit(self, core: EngineCore, group: list[EngineRequest]) -> None:
        refusals = core.add_requests(group)
        if refusals:
            self._result.refusals.extend(refusals)
        else:
            self._result.accepted.extend(member.request_id for member in group)

    def _abort(self, core: EngineCore, message: AbortRequests) -> None:
        """Requests whose grammar is still being compiled end as those that wait for a step do."""
        for request in self._preparations.discard(message.request_ids):
            self._result.accepted.append(request.request_id)
            end = RequestOutput(
                request_id=request.request_id,
                finish_reason=FinishReason.ABORT,
                num_prompt_tokens=len(request.prompt_token_ids),
            )
            self._result.outputs.append(end)
        core.abort(message.request_ids, is_answered=message.is_answered)

    def _publish(self, core: EngineCore) -> None:
        result = self._result
        now = time.monotonic()
        if now >= self._stats_due or not core.has_work:
            self._stats_due = now + STATS_INTERVAL_S
            result.stats = core.stats()
        has_told = result.stats is not None or result.progress is not None
        if result.outputs or result.accepted or result.refusals or has_told:
            self._send(result)
            self._result = StepResult()
        core.count_publish_ms((time.monotonic() - now) * 1e3)

    def _send(self, message: FromEngine) -> None:
        self._outputs.send(self._encoder.encode(message))


def _send_heartbeats(context: zmq.Context[zmq.Socket[bytes]], endpoint: str, parent: int) -> None:
    """Say «alive» each second, also during a long step; end the process with its parent."""
    socket = context.socket(zmq.PUSH)
    socket.setsockopt(zmq.LINGER, 0)
    socket.connect(endpoint)
    while True:
        socket.send(b"")
        time.sleep(HEARTBEAT_INTERVAL_S)
        if os.getppid() != parent:
            os._exit(1)


def main() -> int:
    """Read the LaunchConfig from standard input and serve; nothing there is no order to run."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the server decides when the engine ends
    data = sys.stdin.buffer.read()
    if not data:
        return 0
    launch = decode_launch(data)
    logging.basicConfig(level=launch.log_level, format="%(levelname)s %(name)s: %(message)s")
    arrivals = Arrivals(launch.arrivals_path)
    process = EngineProcess(launch.request_endpoint, launch.output_endpoint, arrivals)
    return process.run(launch.engine)
