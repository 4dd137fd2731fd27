"""Ollama's `/api/embed`, and `/api/embeddings`, which it replaced."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import msgspec
from msgspec import Struct

from caudal.errors import InvalidRequestError
from caudal.server.body import BodyDecoder
from caudal.server.endpoint import ApiRoute, Handler
from caudal.server.exchange import Exchange
from caudal.server.generation.embedding_answer import encode_vectors
from caudal.server.generation.ollama_answer import ollama_error_body
from caudal.server.generation.pooling import serve_pooling
from caudal.server.model import ServedModel
from caudal.server.protocol.embeddings import EmbeddingRequest
from caudal.server.protocol.ollama import (
    OllamaEmbeddingsRequest,
    OllamaEmbeddingsResponse,
    OllamaEmbedRequest,
    OllamaEmbedResponse,
    OllamaErrorResponse,
)
from caudal.server.routes.embeddings import encode_in_slices, plan_embeddings
from caudal.server.routes.ollama import read_ollama_json, require_ollama_model
from caudal.server.state import AppState

_EMBED = BodyDecoder(OllamaEmbedRequest)
_EMBEDDINGS = BodyDecoder(OllamaEmbeddingsRequest)


async def ollama_embed(state: AppState, exchange: Exchange) -> None:
    """Vectors of all texts."""
    arrival = time.monotonic()
    await state.turns.take()
    body = _EMBED.decode(await read_ollama_json(state, exchange), state.unknown_fields)
    model = require_ollama_model(state, body.model)
    state.require_serving()
    parts, num_tokens = b"", 0
    if body.input:
        texts: Any = body.input
        embedding = EmbeddingRequest(input=texts, dimensions=body.dimensions or None)
        is_cut = body.truncate is not False
        parts, num_tokens = await _vectors(state, exchange, model, embedding, is_cut)
    answer = OllamaEmbedResponse(
        model=body.model or model.name,
        embeddings=[],
        total_duration=int((time.monotonic() - arrival) * 1e9),
        load_duration=0,
        prompt_eval_count=num_tokens,
    )
    empty = b'"embeddings":['
    encoded = msgspec.json.encode(answer).replace(empty, empty + parts, 1)
    await exchange.respond(encoded)


async def ollama_embeddings(state: AppState, exchange: Exchange) -> None:
    """The vector of one text."""
    await state.turns.take()
    body = _EMBEDDINGS.decode(await read_ollama_json(state, exchange), state.unknown_fields)
    model = require_ollama_model(state, body.model)
    state.require_serving()
    vector = b"[]"
    if body.prompt:
        embedding = EmbeddingRequest(input=body.prompt)
        vector, _ = await _vectors(state, exchange, model, embedding, True)
    await exchange.respond(b'{"embedding":' + vector + b"}")


async def _vectors(
    state: AppState, exchange: Exchange, model: ServedModel, body: EmbeddingRequest, is_cut: bool
) -> tuple[bytes, int]:
    """The vectors as JSON, without the brackets of their list, and the number of tokens."""
    hidden_size = state.engine.info.hidden_size
    if body.dimensions is not None and body.dimensions > hidden_size:
        raise InvalidRequestError(
            f"dimensions: this model's vectors have {hidden_size}, got {body.dimensions}.",
            param="dimensions",
            code="invalid_value",
        )
    plan = await plan_embeddings(state, model, body, time.monotonic(), is_cut=is_cut)
    exchange.release_body(state.bodies)
    exchange.reply_headers.append((b"x-request-id", plan.request_id.encode()))
    vectors = await serve_pooling(state, exchange, model, plan)
    encode = partial(encode_vectors, dimensions=body.dimensions)
    parts = await encode_in_slices(state, vectors, encode)
    return b",".join(parts), sum(len(prompt.token_ids) for prompt in plan.prompts)


def _route(
    path: str, handler: Handler, summary: str, response: type[Struct], request: type[Struct]
) -> ApiRoute:
    return ApiRoute(
        "POST",
        path,
        handler,
        summary,
        response,
        request=request,
        errors=(400, 404, 408, 413, 415, 429, 500, 503),
        failure=OllamaErrorResponse,
        encode_error=ollama_error_body,
        is_generation=True,
    )


ROUTES = (
    _route(
        "/api/embed",
        ollama_embed,
        "Vectors of texts, as Ollama",
        OllamaEmbedResponse,
        OllamaEmbedRequest,
    ),
    _route(
        "/api/embeddings",
        ollama_embeddings,
        "The vector of one text, as Ollama once did",
        OllamaEmbeddingsResponse,
        OllamaEmbeddingsRequest,
    ),
)
