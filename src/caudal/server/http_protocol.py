"""uvicorn's HTTP protocol with bounds on the head of a request: its size and its time."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from caudal.server.protocol.common import ErrorBody, ErrorResponse

MAX_HEAD_BYTES = 64 * 1024
"""Request line and headers together, about."""
HEAD_TIMEOUT_S = 30.0
"""Time from a head's first byte to its last."""


class BoundedHttpProtocol(HttpToolsProtocol):
    """Refuses heads that are too large or never end, before they cost memory or a connection."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._num_head_bytes = 0
        self._is_in_head = True
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_lost(self, exc: Exception | None) -> None:
        """Also stops the clock."""
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Feed the parser, unless too much has come without the end of a head."""
        if self._is_in_head:
            if self._head_timer is None:
                self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self._head_is_late)
            self._num_head_bytes += len(data)
        super().data_received(data)
        if self._is_in_head and self._num_head_bytes > MAX_HEAD_BYTES:
            self._refuse_head(431, f"The request's head is larger than {MAX_HEAD_BYTES} bytes.")

    def on_headers_complete(self) -> None:
        """Pass the request on if its head is within the bounds."""
        self._stop_timer()
        self._is_in_head, self._num_head_bytes = False, 0
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """The next byte begins a head."""
        super().on_message_complete()
        self._is_in_head = True

    def send_400_response(self, msg: str) -> None:
        """Answer what is not HTTP, in the shape of all other errors."""
        self._refuse_head(400, msg)

    def _head_is_late(self) -> None:
        self._head_timer = None
        self._refuse_head(408, f"The request's head did not arrive within {HEAD_TIMEOUT_S:g} s.")

    def _refuse_head(self, status: int, message: str) -> None:
        self._stop_timer()
        if self.transport.is_closing():
            return
        error = ErrorBody(message, "invalid_request_error", None, "invalid_http")
        body = msgspec.json.encode(ErrorResponse(error))
        phrase = {400: "Bad Request", 408: "Request Timeout", 431: "Headers Too Large"}[status]
        head = (
            f"HTTP/1.1 {status} {phrase}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        cycle = self.cycle
        is_answering = cycle is not None and cycle.response_started and not cycle.response_complete
        if not is_answering:  # else it would end up inside an answer
            self.transport.write(head.encode() + body)
        self.transport.close()

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
