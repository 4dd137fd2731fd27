"""Ollama's requests about a store of models. There is none: a server serves one model."""

from __future__ import annotations

from caudal.errors import InvalidRequestError
from caudal.server.body import BodyDecoder
from caudal.server.endpoint import ApiRoute, Handler
from caudal.server.exchange import Exchange
from caudal.server.generation.ollama_answer import ollama_error_body
from caudal.server.protocol.ollama import OllamaErrorResponse, OllamaStatus, OllamaStoreRequest
from caudal.server.routes.ollama import read_ollama_json, require_ollama_model
from caudal.server.state import AppState

_PULL = BodyDecoder(OllamaStoreRequest)


async def ollama_pull(state: AppState, exchange: Exchange) -> None:
    """The served model is there; programs ask for it before they use it. All others are a 404."""
    await state.turns.take()
    body = _PULL.decode(await read_ollama_json(state, exchange), state.unknown_fields)
    require_ollama_model(state, body.model or body.name)
    is_plain = body.stream is False
    await exchange.respond(
        b'{"status":"success"}' + (b"" if is_plain else b"\n"),
        content_type=b"application/json" if is_plain else b"application/x-ndjson",
    )


async def ollama_refuse(state: AppState, exchange: Exchange) -> None:
    """Nothing can be made, copied, sent or deleted."""
    await state.turns.take()
    await read_ollama_json(state, exchange)
    raise InvalidRequestError(
        "This server serves one model, chosen when it is started; models can neither be made nor "
        "copied, sent or deleted.",
        code="unsupported",
    )


def _route(method: str, path: str, handler: Handler, summary: str) -> ApiRoute:
    return ApiRoute(
        method,
        path,
        handler,
        summary,
        OllamaStatus,
        request=OllamaStoreRequest,
        errors=(400, 404, 408, 413, 415, 503),
        failure=OllamaErrorResponse,
        encode_error=ollama_error_body,
        is_stream=handler is ollama_pull,
        stream_media_type="application/x-ndjson",
    )


ROUTES = (
    _route("POST", "/api/pull", ollama_pull, "See that the served model is there, as Ollama"),
    *(
        _route(method, path, ollama_refuse, "Refused: there is no store of models")
        for method, path in (
            ("POST", "/api/create"),
            ("POST", "/api/copy"),
            ("POST", "/api/push"),
            ("DELETE", "/api/delete"),
        )
    ),
)
