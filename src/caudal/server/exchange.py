"""One HTTP request and its answer, directly on ASGI: no per-chunk layers in between."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping, Sequence
from typing import Any, Final

import msgspec

from caudal.errors import OverloadedError, RequestError
from caudal.scheduler.service_class import ServiceClass
from caudal.server.errors import (
    BodyTimeoutError,
    ClientGoneError,
    ErrorEncoder,
    Headers,
    PayloadTooLargeError,
    UnsupportedMediaTypeError,
    error_body,
    error_headers,
)

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

MAX_DISCARDED_BYTES = 64 * 1024 * 1024
DISCARD_TIMEOUT_S = 2.0
"""How much and how long a body that is too large is read before the answer."""

SERVICE_CLASS: Final = "caudal.service_class"
"""Scope entry of a request that does not come from the network: its class in the scheduler."""

_JSON = b"application/json"
_STREAM: Headers = [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]


class BodyBudget:
    """Bytes that the bodies of all unprepared requests may hold together."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self.num_used = 0

    def take(self, num_bytes: int) -> None:
        """Reserve. Raises OverloadedError if others hold too much."""
        if self.num_used + num_bytes > self._max_bytes:
            raise OverloadedError(
                "Too many large request bodies at once.", retry_after_s=1.0, reason="bodies"
            )
        self.num_used += num_bytes

    def give_back(self, num_bytes: int) -> None:
        """Return what `take` reserved."""
        self.num_used -= num_bytes


class Exchange:
    """Reads the body, writes the answer and knows whether the client is still there."""

    __slots__ = (
        "_encode_error",
        "_num_budgeted",
        "_receive",
        "headers",
        "is_complete",
        "is_started",
        "reply_headers",
        "scope",
        "send",
        "service",
    )

    def __init__(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        encode_error: ErrorEncoder = error_body,
    ) -> None:
        self.scope = scope
        self._encode_error = encode_error
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        self._receive = receive
        self.send = send
        self.service: ServiceClass = scope.get(SERVICE_CLASS, ServiceClass.INTERACTIVE)
        self.reply_headers: Headers = []
        """Sent with whatever the answer turns out to be."""
        self._num_budgeted = 0
        self.is_started = False
        self.is_complete = False

    async def read_json(self, max_bytes: int, timeout_s: float, budget: BodyBudget) -> bytes:
        """The whole body. Raises a RequestError for a wrong type, size or pace, ClientGoneError."""
        self._check_content_type()
        declared = self.headers.get(b"content-length", b"")
        is_too_large = declared.isdigit() and (len(declared) > 18 or int(declared) > max_bytes)
        chunks: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(timeout_s):
                while not is_too_large:
                    message = await self._receive_body()
                    chunk = message.get("body", b"")
                    size += len(chunk)
                    is_too_large = size > max_bytes
                    budget.take(len(chunk))
                    self._num_budgeted += len(chunk)
                    chunks.append(chunk)
                    if not message.get("more_body", False):
                        break
        except TimeoutError:
            raise BodyTimeoutError(
                f"The request body did not arrive within {timeout_s:g} s.", code="body_timeout"
            ) from None
        if is_too_large:
            chunks.clear()
            await self.discard_body()
            raise PayloadTooLargeError(
                f"The request body is larger than {max_bytes} bytes.", code="body_too_large"
            )
        return b"".join(chunks)

    def release_body(self, budget: BodyBudget) -> None:
        """Give back what `read_json` took: the body is no longer needed."""
        budget.give_back(self._num_budgeted)
        self._num_budgeted = 0

    async def body_chunks(self, idle_timeout_s: float) -> AsyncIterator[bytes]:
        """The body as it comes, of any type and size.

        Raises BodyTimeoutError after so many seconds without data, ClientGoneError.
        """
        more_body = True
        while more_body:
            try:
                async with asyncio.timeout(idle_timeout_s):
                    message = await self._receive_body()
            except TimeoutError:
                raise BodyTimeoutError(
                    f"Nothing of the request body arrived for {idle_timeout_s:g} s.",
                    code="body_timeout",
                ) from None
            more_body = message.get("more_body", False)
            yield message.get("body", b"")

    async def _receive_body(self) -> Message:
        message = await self._receive()
        if message["type"] != "http.request":
            raise ClientGoneError
        return message

    async def discard_body(self) -> None:
        """Read on for a while: many clients only look for an answer when all is sent."""
        if b"expect" in self.headers:
            return
        size = 0
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DISCARD_TIMEOUT_S):
                more_body = True
                while more_body and size < MAX_DISCARDED_BYTES:
                    message = await self._receive_body()
                    size += len(message.get("body", b""))
                    more_body = message.get("more_body", False)

    def _check_content_type(self) -> None:
        declared = self.headers.get(b"content-type", _JSON)
        kind = declared.split(b";", 1)[0].strip().lower()
        is_json = kind == _JSON or (kind.startswith(b"application/") and kind.endswith(b"+json"))
        if not is_json or self.headers.get(b"content-encoding", b"identity") != b"identity":
            raise UnsupportedMediaTypeError(
                "The request body must be sent as uncompressed application/json.",
                code="unsupported_media_type",
            )

    async def wait_disconnect(self) -> None:
        """Return when the client has left (or the answer is complete); call after the body."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def respond(
        self,
        body: bytes,
        *,
        status: int = 200,
        content_type: bytes = _JSON,
        headers: Sequence[tuple[bytes, bytes]] = (),
    ) -> None:
        """Send a whole answer."""
        all_headers = [
            (b"content-type", content_type),
            (b"content-length", str(len(body)).encode()),
            *headers,
            *self.reply_headers,
        ]
        self.is_started = True
        await self.send({"type": "http.response.start", "status": status, "headers": all_headers})
        await self.send({"type": "http.response.body", "body": body})
        self.is_complete = True

    async def respond_json(self, value: msgspec.Struct) -> None:
        """Send `value` as JSON with status 200."""
        await self.respond(msgspec.json.encode(value))

    async def respond_error(self, error: RequestError) -> None:
        """Send `error` as a whole answer."""
        body = self._encode_error(error)
        await self.respond(body, status=error.status, headers=error_headers(error))

    async def start_stream(self, media_type: bytes) -> None:
        """Send the headers of a stream; the status is settled from here on."""
        self.is_started = True
        headers = [(b"content-type", media_type), *_STREAM, *self.reply_headers]
        await self.send({"type": "http.response.start", "status": 200, "headers": headers})

    async def start_bytes(self, num_bytes: int, content_type: bytes) -> None:
        """Send the headers of an answer of known length whose parts follow."""
        self.is_started = True
        headers = [
            (b"content-type", content_type),
            (b"content-length", str(num_bytes).encode()),
            *self.reply_headers,
        ]
        await self.send({"type": "http.response.start", "status": 200, "headers": headers})

    async def finish(self, body: bytes = b"") -> None:
        """Send the last part."""
        await self.send({"type": "http.response.body", "body": body})
        self.is_complete = True
