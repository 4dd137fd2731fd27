"""Every error that Caudal raises on bad input, and how a server should answer it."""

from __future__ import annotations


class CaudalError(Exception):
    """Base of all errors raised on purpose; `str(error)` is safe to show to a user."""


class ConfigError(CaudalError):
    """A flag, environment variable or configuration field has a bad value."""


class ModelFileError(CaudalError):
    """A model file is damaged, truncated or contradicts itself; names the field or tensor."""


class UnsupportedModelError(CaudalError):
    """A well-formed model that Caudal cannot run (architecture, tensor type)."""


class ModelNotFoundError(CaudalError):
    """No model of that name or path."""


class ModelDownloadError(CaudalError):
    """A model could not be fetched or stored: network, registry, disk or checksum."""


class InsufficientMemoryError(CaudalError):
    """Weights, KV cache and scratch do not fit the available memory."""


class EngineDeadError(CaudalError):
    """The engine process ended while requests were in flight."""


class BatchFailedError(CaudalError):
    """Some requests of an offline batch failed; the others have their answers."""


class RequestError(CaudalError):
    """A request that cannot be served; becomes an OpenAI-shaped error.

    `status` is the HTTP status, `param` the request field at fault, `code` a stable
    machine-readable word.
    """

    status = 400
    error_type = "invalid_request_error"

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code


class InvalidRequestError(RequestError):
    """A field of the request is malformed or out of range (HTTP 400)."""


class ContextLengthError(RequestError):
    """The prompt leaves no room in the model's context (HTTP 400)."""

    def __init__(self, num_prompt_tokens: int, max_model_len: int, max_tokens: int | None) -> None:
        asked = "unset" if max_tokens is None else str(max_tokens)
        super().__init__(
            f"This model's maximum context length is {max_model_len} tokens, but the prompt has "
            f"{num_prompt_tokens} tokens (max_tokens: {asked}). Shorten the prompt.",
            param="prompt",
            code="context_length_exceeded",
        )


class NotFoundError(RequestError):
    """Unknown model, route or object (HTTP 404)."""

    status = 404


class AuthenticationError(RequestError):
    """Missing or wrong API key (HTTP 401)."""

    status = 401
    error_type = "authentication_error"


class OverloadedError(RequestError):
    """The queue is full; retry after `retry_after_s` seconds (HTTP 429)."""

    status = 429
    error_type = "rate_limit_error"

    def __init__(self, message: str, *, retry_after_s: float, reason: str) -> None:
        super().__init__(message, code="server_overloaded")
        self.retry_after_s = retry_after_s
        self.reason = reason


class DeadlineError(RequestError):
    """The request did not end within its own `timeout` (HTTP 504)."""

    status = 504
    error_type = "timeout_error"

    def __init__(self, timeout_s: float, where: str) -> None:
        super().__init__(
            f"timeout: the {timeout_s:g} s of this request were over {where}.",
            param="timeout",
            code="deadline_exceeded",
        )


class UnavailableError(RequestError):
    """The engine is not ready, draining or has died (HTTP 503)."""

    status = 503
    error_type = "service_unavailable"


class RequestFailedError(RequestError):
    """A single request failed inside a step; the message carries no internals (HTTP 500)."""

    status = 500
    error_type = "internal_error"
