"""Errors as HTTP answers: the one place where an exception becomes a status and a body."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterator, Mapping

import msgspec

from caudal.errors import (
    AuthenticationError,
    CaudalError,
    EngineDeadError,
    OverloadedError,
    RequestError,
    RequestFailedError,
    UnavailableError,
)
from caudal.server.protocol.common import ErrorBody, ErrorResponse

Headers = list[tuple[bytes, bytes]]
ErrorEncoder = Callable[[RequestError], bytes]
"""Makes the body of an error in the shape of one API family."""

logger = logging.getLogger("caudal.server")

ABORTED = "aborted"
"""Code of a request that ran and was ended by the server's stop."""

CLOSE: Headers = [(b"connection", b"close")]
_INTERNAL = "The server failed to handle this request."
_ENGINE_DEAD = "The engine stopped while it ran this request; try again in a moment."


class PayloadTooLargeError(RequestError):
    """The body exceeds the limit (HTTP 413)."""

    status = 413


class MethodNotAllowedError(RequestError):
    """The route exists, but not for this method (HTTP 405)."""

    status = 405


class ConflictError(RequestError):
    """The object is not in a state that allows this (HTTP 409)."""

    status = 409


class UnsupportedMediaTypeError(RequestError):
    """The body is not JSON (HTTP 415)."""

    status = 415


class HeadTooLargeError(RequestError):
    """The request has too many headers (HTTP 431)."""

    status = 431


class BodyTimeoutError(RequestError):
    """The client did not send its body in time (HTTP 408)."""

    status = 408


class ClientGoneError(Exception):
    """The client left; there is nobody to answer."""


def as_request_error(error: Exception) -> RequestError:
    """What to tell the client about `error`; internals go to the log, never into the answer."""
    if isinstance(error, RequestError):
        return error
    if isinstance(error, EngineDeadError):
        return UnavailableError(_ENGINE_DEAD, code="engine_dead")
    if not isinstance(error, CaudalError):
        logger.error("unhandled error in a request", exc_info=error)
    return RequestFailedError(_INTERNAL, code="internal_error")


def error_body(error: RequestError) -> bytes:
    """The JSON body of `error` in OpenAI's shape."""
    body = ErrorBody(error.message, error.error_type, error.param, error.code)
    return msgspec.json.encode(ErrorResponse(body))


@contextlib.contextmanager
def renamed_params(names: Mapping[str, str]) -> Iterator[None]:
    """Give errors from inside the field names of another API (`param` → `names[param]`)."""
    try:
        yield
    except RequestError as error:
        old = error.param or ""
        new = error.param = names.get(old, error.param)
        if new is not None and error.message.startswith(f"{old}:"):
            error.message = new + error.message.removeprefix(old)
        raise


def error_headers(error: RequestError) -> Headers:
    """Headers that go with the status of `error`."""
    if isinstance(error, OverloadedError):
        headers = [(b"retry-after", str(retry_after_s(error)).encode())]
        if math.isfinite(error.retry_after_s):
            # Whole seconds are coarse; OpenAI's clients look for this first.
            wait_ms = str(math.ceil(error.retry_after_s * 1e3)).encode()
            headers.append((b"retry-after-ms", wait_ms))
        return headers
    if isinstance(error, UnavailableError):
        return [(b"retry-after", b"1")]
    if isinstance(error, AuthenticationError):
        return [(b"www-authenticate", b"Bearer")]
    if isinstance(error, PayloadTooLargeError | BodyTimeoutError | HeadTooLargeError):
        return CLOSE
    return []


def retry_after_s(error: OverloadedError) -> int:
    """Whole seconds, at least one."""
    if not math.isfinite(error.retry_after_s):
        return 60
    return max(1, math.ceil(error.retry_after_s))
