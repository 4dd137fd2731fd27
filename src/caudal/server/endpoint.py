"""A route as data, and the ASGI application that runs its handler and answers its errors."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from caudal.errors import OverloadedError, UnavailableError
from caudal.server.errors import (
    ABORTED,
    ClientGoneError,
    ErrorEncoder,
    as_request_error,
    error_body,
)
from caudal.server.exchange import Exchange, Receive, Scope, Send
from caudal.server.protocol.common import ErrorResponse
from caudal.server.state import AppState
from caudal.server.tenancy import quota_of

Handler = Callable[[AppState, Exchange], Awaitable[None]]

logger = logging.getLogger("caudal.server")


@dataclass(frozen=True, slots=True)
class ApiRoute:
    """One operation: how it is reached, what runs, and how the schema describes it."""

    method: str
    path: str
    handler: Handler
    summary: str
    response: type[msgspec.Struct] | str
    """Struct of the JSON answer, or the media type of another kind of answer."""
    request: type[msgspec.Struct] | tuple[type[msgspec.Struct], ...] | None = None
    """Struct of the JSON body, or several of which it is one."""
    form: type[msgspec.Struct] | None = None
    """Struct of a multipart form instead of a JSON body."""
    query: type[msgspec.Struct] | None = None
    """Struct of the query parameters."""
    errors: tuple[int, ...] = ()
    failure: type[msgspec.Struct] = ErrorResponse
    """Struct of the answer with a status in `errors`."""
    encode_error: ErrorEncoder = error_body
    is_stream: bool = False
    """Whether the answer may also be a stream."""
    stream_media_type: str = "text/event-stream"
    is_generation: bool = False
    """Counted while it runs, so that a drain waits for it."""


class Endpoint:
    """Runs one handler. Nothing that a handler raises reaches the client as such."""

    def __init__(self, state: AppState, route: ApiRoute) -> None:
        self._state = state
        self._handler = route.handler
        self._is_generation = route.is_generation
        self._encode_error = route.encode_error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send, self._encode_error)
        self._state.num_active += self._is_generation
        self._state.metrics_of(exchange.service).requests_received += self._is_generation
        quota = quota_of(exchange) if self._is_generation else None
        entered: float | None = None
        try:
            if quota is not None:
                exchange.reply_headers += quota.headers()
                entered = quota.enter()
            await self._handler(self._state, exchange)
        except ClientGoneError:
            metrics = self._state.metrics_of(exchange.service)
            metrics.requests_cancelled += self._is_generation
        except Exception as error:
            if self._is_generation:
                self._count_refusal(error, exchange)
            await _answer_error(exchange, error)
        finally:
            if quota is not None and entered is not None:
                quota.leave(entered)
            exchange.release_body(self._state.bodies)
            self._state.num_active -= self._is_generation

    def _count_refusal(self, error: Exception, exchange: Exchange) -> None:
        rejected = self._state.metrics_of(exchange.service).requests_rejected
        if isinstance(error, OverloadedError):
            rejected.increment(error.reason)
        elif isinstance(error, UnavailableError) and error.code != ABORTED:
            rejected.increment("unavailable")


async def _answer_error(exchange: Exchange, error: Exception) -> None:
    answer = as_request_error(error)
    if exchange.is_started:
        # The status is out; leaving the answer incomplete makes the server close the connection.
        logger.error("an answer broke off: %s", answer.message)
        return
    await exchange.respond_error(answer)


def path_parameter(scope: Scope, name: str) -> str:
    """A parameter of the matched path."""
    parameters: dict[str, Any] = scope["path_params"]
    return str(parameters[name])
