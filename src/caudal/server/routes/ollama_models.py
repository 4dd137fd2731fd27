"""What Ollama's clients ask about models: `/api/tags`, `/api/show`, `/api/ps`, `/api/version`."""

from __future__ import annotations

import hashlib
from typing import Final

from msgspec import Struct

from caudal.server.body import BodyDecoder
from caudal.server.dialect import dialect_of
from caudal.server.endpoint import ApiRoute, Handler
from caudal.server.exchange import Exchange
from caudal.server.generation.ollama_answer import ollama_error_body, rfc3339
from caudal.server.model import ServedModel
from caudal.server.protocol.ollama import (
    OllamaDetails,
    OllamaErrorResponse,
    OllamaModel,
    OllamaModelCard,
    OllamaModelList,
    OllamaRunningList,
    OllamaRunningModel,
    OllamaShowRequest,
    OllamaVersion,
)
from caudal.server.routes.ollama import LATEST, read_ollama_json, require_ollama_model
from caudal.server.state import AppState
from caudal.server.version import caudal_version

OLLAMA_API_VERSION: Final = "0.6.4"
"""Clients that need a newer API than this one ask for a higher version."""

NEVER: Final = "9999-12-31T23:59:59Z"

_SHOW = BodyDecoder(OllamaShowRequest)


async def root(state: AppState, exchange: Exchange) -> None:
    """That a server is here: Ollama's command line asks before anything else."""
    await exchange.respond(b"Caudal is running\n", content_type=b"text/plain")


async def ollama_tags(state: AppState, exchange: Exchange) -> None:
    """The served model."""
    await exchange.respond_json(OllamaModelList([_model(state.require_model())]))


async def ollama_running(state: AppState, exchange: Exchange) -> None:
    """The served model, which stays loaded."""
    model = _model(state.require_model())
    running = OllamaRunningModel(
        name=model.name,
        model=model.model,
        size=model.size,
        digest=model.digest,
        details=model.details,
        expires_at=NEVER,
        size_vram=0,
        context_length=state.engine.info.max_model_len,
    )
    await exchange.respond_json(OllamaRunningList([running]))


async def ollama_show(state: AppState, exchange: Exchange) -> None:
    """What the model file says about itself."""
    await state.turns.take()
    data = await read_ollama_json(state, exchange)
    body = _SHOW.decode(data, state.unknown_fields)
    model = require_ollama_model(state, body.model or body.name)
    card = OllamaModelCard(
        modelfile=f"FROM {model.name}\n",
        parameters="",
        template=model.chat_template.source or "",
        details=_details(model),
        model_info={**model.facts, "general.parameter_count": model.num_parameters},
        capabilities=_capabilities(state, model),
        modified_at=rfc3339(model.created),
    )
    await exchange.respond_json(card)


def _capabilities(state: AppState, model: ServedModel) -> list[str]:
    if model.chat_template.error is not None:
        return ["completion"]
    dialect = dialect_of(state.config, model)
    return ["completion", "tools", *(["thinking"] if dialect.reasoning else [])]


async def ollama_version(state: AppState, exchange: Exchange) -> None:
    """Which API this is, and which server."""
    await exchange.respond_json(OllamaVersion(OLLAMA_API_VERSION, caudal_version()))


def _model(model: ServedModel) -> OllamaModel:
    name = model.name if ":" in model.name.rpartition("/")[2] else model.name + LATEST
    identity = (model.name, model.architecture, model.quantization, str(model.num_bytes))
    return OllamaModel(
        name=name,
        model=name,
        modified_at=rfc3339(model.created),
        size=model.num_bytes,
        digest=hashlib.sha256("\n".join(identity).encode()).hexdigest(),
        details=_details(model),
    )


def _details(model: ServedModel) -> OllamaDetails:
    return OllamaDetails(
        parent_model="",
        format="gguf",
        family=model.architecture,
        families=[model.architecture],
        parameter_size=_size(model.num_parameters),
        quantization_level=model.quantization,
    )


def _size(num_parameters: int) -> str:
    for unit, letter in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if num_parameters >= unit:
            return f"{num_parameters / unit:.2f}{letter}"
    return str(num_parameters)


def _get(path: str, handler: Handler, summary: str, response: type[Struct]) -> ApiRoute:
    return ApiRoute(
        "GET",
        path,
        handler,
        summary,
        response,
        errors=(503,),
        failure=OllamaErrorResponse,
        encode_error=ollama_error_body,
    )


ROUTES = (
    ApiRoute("GET", "/", root, "Is a server here?", "text/plain"),
    _get("/api/tags", ollama_tags, "The served model, as Ollama", OllamaModelList),
    _get("/api/ps", ollama_running, "The loaded model, as Ollama", OllamaRunningList),
    _get("/api/version", ollama_version, "Version of Ollama's API", OllamaVersion),
    ApiRoute(
        "POST",
        "/api/show",
        ollama_show,
        "What the model file says about itself, as Ollama",
        OllamaModelCard,
        request=OllamaShowRequest,
        errors=(400, 404, 408, 413, 415, 503),
        failure=OllamaErrorResponse,
        encode_error=ollama_error_body,
    ),
)
