"""Streams: pings while nothing is sent, and an end for readers that stopped reading."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Final

from caudal.errors import RequestError
from caudal.server.errors import error_body
from caudal.server.exchange import Exchange


@dataclass(frozen=True, slots=True)
class StreamType:
    """How an API family frames its streams."""

    media_type: bytes
    ping: bytes
    """Sent when nothing else is; empty where readers know no such thing."""


SERVER_SENT_EVENTS: Final = StreamType(b"text/event-stream; charset=utf-8", b": ping\n\n")
DONE: Final = b"data: [DONE]\n\n"


def error_event(error: RequestError) -> bytes:
    """An error inside a stream whose status is already sent."""
    return b"data: " + error_body(error) + b"\n\n"


class EventStream:
    """One open stream. Its buffer is the connection's: a full one blocks `send`."""

    __slots__ = (
        "_exchange",
        "_is_finished",
        "_num_pending",
        "_num_sent",
        "_ping",
        "_send",
        "_task",
        "idle_s",
        "was_cut",
    )

    def __init__(self, exchange: Exchange, stream_type: StreamType) -> None:
        self._exchange = exchange
        self._send = exchange.send
        self._ping = stream_type.ping
        self._task = asyncio.current_task()
        self._is_finished = False
        self._num_pending = 0
        self._num_sent = 0
        self.idle_s = 0.0
        self.was_cut = False

    async def send(self, events: bytes) -> None:
        """Write whole events; waits while the reader lags a full buffer behind."""
        self._num_pending += 1
        await self._send({"type": "http.response.body", "body": events, "more_body": True})
        self._num_pending -= 1
        self._num_sent += 1

    async def finish(self, events: bytes) -> None:
        """Write the last events and end the answer."""
        self._is_finished = True
        self._num_pending += 1
        await self._exchange.finish(events)
        self._num_pending -= 1

    async def ping(self) -> None:
        """Write a sign of life, unless the stream has ended meanwhile."""
        if self._ping and not self._is_finished:
            await self.send(self._ping)

    @property
    def is_blocked(self) -> bool:
        """Whether a write waits for the reader."""
        return self._num_pending > 0

    def take_num_sent(self) -> int:
        """Writes completed since the last call."""
        num_sent, self._num_sent = self._num_sent, 0
        return num_sent

    def cut(self) -> None:
        """Give the reader up: cancel the task that serves it."""
        self.was_cut = True
        if self._task is not None:
            self._task.cancel()


class StreamRegistry:
    """Watches all open streams with a single timer, so that a token costs no timer calls."""

    def __init__(self, *, ping_interval_s: float, slow_reader_s: float) -> None:
        self._ping_interval_s = ping_interval_s
        self._slow_reader_s = slow_reader_s
        self._tick_s = min(1.0, ping_interval_s / 4, slow_reader_s / 4)
        self._streams: dict[EventStream, None] = {}
        self._pings: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self.num_cut = 0

    def __len__(self) -> int:
        return len(self._streams)

    def add(self, stream: EventStream) -> None:
        """Start watching `stream`."""
        self._streams[stream] = None
        if self._timer is None:
            self._schedule()

    def discard(self, stream: EventStream) -> None:
        """Stop watching `stream`."""
        self._streams.pop(stream, None)

    def _schedule(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._tick_s, self._tick)

    def _tick(self) -> None:
        self._timer = None
        for stream in list(self._streams):
            self._inspect(stream)
        if self._streams:
            self._schedule()

    def _inspect(self, stream: EventStream) -> None:
        if stream.take_num_sent():
            stream.idle_s = 0.0
            return
        stream.idle_s += self._tick_s
        if stream.is_blocked:
            if stream.idle_s >= self._slow_reader_s:
                self.num_cut += 1
                self.discard(stream)
                stream.cut()
        elif stream.idle_s >= self._ping_interval_s:
            stream.idle_s = 0.0
            ping = asyncio.get_running_loop().create_task(stream.ping())
            self._pings.add(ping)
            ping.add_done_callback(self._pings.discard)
