"""Ollama's `/api/chat` and `/api/generate`."""

from __future__ import annotations

import time
from typing import Any

from msgspec import Struct

from caudal.errors import InvalidRequestError
from caudal.server.body import BodyDecoder
from caudal.server.dialect import dialect_of
from caudal.server.endpoint import ApiRoute, Handler
from caudal.server.errors import renamed_params
from caudal.server.exchange import Exchange
from caudal.server.generation.ollama_answer import (
    OllamaAnswerWriter,
    load_answer,
    ollama_error_body,
)
from caudal.server.generation.plan import GenerationPlan
from caudal.server.generation.serve import serve_generation
from caudal.server.model import ServedModel
from caudal.server.ollama_input import chat_messages
from caudal.server.protocol.chat import ChatCompletionRequest, ChatMessage
from caudal.server.protocol.common import INT32_MAX
from caudal.server.protocol.completions import CompletionRequest
from caudal.server.protocol.ollama import (
    OLLAMA_CHAT_UNSUPPORTED,
    OLLAMA_GENERATE_UNSUPPORTED,
    OLLAMA_OPTIONS_UNSUPPORTED,
    THINK_LEVELS,
    OllamaChatRequest,
    OllamaChatResponse,
    OllamaErrorResponse,
    OllamaGenerateRequest,
    OllamaGenerateResponse,
    OllamaOptions,
)
from caudal.server.protocol.structured import JsonSchemaFormat, ResponseFormat
from caudal.server.protocol.unsupported import is_neutral
from caudal.server.routes.chat import plan_chat
from caudal.server.routes.completions import plan_completion
from caudal.server.state import AppState

_CHAT = BodyDecoder(OllamaChatRequest, OLLAMA_CHAT_UNSUPPORTED)
_GENERATE = BodyDecoder(OllamaGenerateRequest, OLLAMA_GENERATE_UNSUPPORTED)

_PARAMS = {"response_format": "format", "response_format.json_schema.schema": "format"}

LATEST = ":latest"
_FORM = b"application/x-www-form-urlencoded"
DEFAULT_TEMPERATURE = 0.8
DEFAULT_TOP_K = 40
DEFAULT_TOP_P = 0.9
"""Ollama's own defaults."""


def require_ollama_model(state: AppState, name: str | None) -> ServedModel:
    """The served model by a name with or without `:latest`; raises as `require_model` does."""
    model = state.require_model()
    if name and (name == model.name + LATEST or name + LATEST == model.name):
        return model
    return state.require_model(name)


async def read_ollama_json(state: AppState, exchange: Exchange) -> bytes:
    """The body. What curl calls a form counts as JSON too, as Ollama's manual shows it, unless a
    browser sends it: there it would be a way around the rules for other sites' requests.
    """
    headers = exchange.headers
    if headers.get(b"content-type") == _FORM and b"origin" not in headers:
        headers[b"content-type"] = b"application/json"
    return await state.read_json(exchange)


async def ollama_chat(state: AppState, exchange: Exchange) -> None:
    """Answer the conversation."""
    arrival = time.monotonic()
    await state.turns.take()
    data = await read_ollama_json(state, exchange)
    body = _CHAT.decode(data, state.unknown_fields)
    model = require_ollama_model(state, body.model)
    state.require_serving()
    name = body.model or model.name
    if not body.messages:
        await exchange.respond(load_answer(name, is_chat=True))
        return
    fields = _generation_fields(body)
    fields["chat_template_kwargs"] = _thinking(state, model, body)
    messages = chat_messages(body.messages)
    chat = ChatCompletionRequest(messages=messages, tools=body.tools, **fields)
    with renamed_params(_PARAMS):
        plan = await plan_chat(state, model, chat, arrival, id_prefix="ollama")
    await _serve(state, exchange, model, plan, OllamaAnswerWriter(name, is_chat=True))


async def ollama_generate(state: AppState, exchange: Exchange) -> None:
    """Answer the prompt."""
    arrival = time.monotonic()
    await state.turns.take()
    data = await read_ollama_json(state, exchange)
    body = _GENERATE.decode(data, state.unknown_fields)
    model = require_ollama_model(state, body.model)
    state.require_serving()
    name = body.model or model.name
    if not body.prompt:
        await exchange.respond(load_answer(name, is_chat=False))
        return
    with renamed_params(_PARAMS):
        plan = await _plan_generate(state, model, body, body.prompt, arrival)
    await _serve(state, exchange, model, plan, OllamaAnswerWriter(name, is_chat=False))


async def _serve(
    state: AppState,
    exchange: Exchange,
    model: ServedModel,
    plan: GenerationPlan,
    writer: OllamaAnswerWriter,
) -> None:
    exchange.release_body(state.bodies)
    exchange.reply_headers.append((b"x-request-id", plan.request_id.encode()))
    await serve_generation(state, exchange, model, plan, writer)


async def _plan_generate(
    state: AppState, model: ServedModel, body: OllamaGenerateRequest, prompt: str, arrival: float
) -> GenerationPlan:
    """Through the template, or raw: when asked for, and for models that have no template."""
    fields = _generation_fields(body)
    kwargs = _thinking(state, model, body)
    if body.raw and body.system:
        raise InvalidRequestError(
            "system: cannot be combined with raw: true.", param="system", code="invalid_value"
        )
    if body.raw or (model.chat_template.error is not None and not body.system):
        fields["max_tokens"] = fields["max_tokens"] or INT32_MAX
        completion = CompletionRequest(prompt=prompt, **fields)
        return await plan_completion(state, model, completion, arrival)
    messages = [ChatMessage(role="user", content=prompt)]
    if body.system:
        messages.insert(0, ChatMessage(role="system", content=body.system))
    chat = ChatCompletionRequest(messages=messages, chat_template_kwargs=kwargs, **fields)
    return await plan_chat(state, model, chat, arrival, id_prefix="ollama")


def _thinking(
    state: AppState, model: ServedModel, body: OllamaChatRequest | OllamaGenerateRequest
) -> dict[str, Any] | None:
    """What templates that can switch reasoning look for. Raises InvalidRequestError for models
    that cannot reason, and for levels that do not exist."""
    think = body.think
    if think is None:
        return None
    if isinstance(think, str) and think not in THINK_LEVELS:
        raise InvalidRequestError(
            f"think: must be true, false or one of {', '.join(THINK_LEVELS)}.",
            param="think",
            code="invalid_value",
        )
    if think and dialect_of(state.config, model).reasoning is None:
        raise InvalidRequestError(
            f"think: {model.name!r} does not support thinking.", param="think", code="unsupported"
        )
    kwargs: dict[str, Any] = {"enable_thinking": bool(think)}
    if isinstance(think, str):
        kwargs["reasoning_effort"] = think
    return kwargs


def _generation_fields(body: OllamaChatRequest | OllamaGenerateRequest) -> dict[str, Any]:
    """The options under the names of a GenerationBody."""
    options = body.options or OllamaOptions()
    for name, neutral in OLLAMA_OPTIONS_UNSUPPORTED.items():
        if not is_neutral(getattr(options, name), neutral):
            raise _unsupported(f"options.{name}")
    limit = options.num_predict
    return {
        "response_format": _response_format(body.format),
        "stream": body.stream is not False,
        "max_tokens": limit if limit is not None and limit > 0 else None,
        "temperature": _or(options.temperature, DEFAULT_TEMPERATURE),
        "top_k": _or(options.top_k, DEFAULT_TOP_K),
        "top_p": _or(options.top_p, DEFAULT_TOP_P),
        "min_p": options.min_p,
        "seed": None if options.seed == -1 else options.seed,
        "stop": options.stop,
        "repetition_penalty": None if options.repeat_last_n == 0 else options.repeat_penalty,
        "presence_penalty": options.presence_penalty,
        "frequency_penalty": options.frequency_penalty,
    }


def _response_format(value: Any) -> ResponseFormat | None:
    if value is None or value == "":
        return None
    if value == "json":
        return ResponseFormat(type="json_object")
    if isinstance(value, str):
        raise InvalidRequestError(
            "format: must be 'json' or a JSON schema.", param="format", code="invalid_value"
        )
    return ResponseFormat(type="json_schema", json_schema=JsonSchemaFormat(schema=value))


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def _unsupported(param: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"{param}: not supported by this server.", param=param, code="unsupported"
    )


def _route(
    path: str,
    handler: Handler,
    summary: str,
    response: type[Struct],
    body: BodyDecoder[Any],
) -> ApiRoute:
    return ApiRoute(
        "POST",
        path,
        handler,
        summary,
        response,
        request=body.body_type,
        errors=(400, 404, 408, 413, 415, 429, 500, 503),
        failure=OllamaErrorResponse,
        encode_error=ollama_error_body,
        is_stream=True,
        stream_media_type="application/x-ndjson",
        is_generation=True,
    )


ROUTES = (
    _route("/api/chat", ollama_chat, "Answer a conversation, as Ollama", OllamaChatResponse, _CHAT),
    _route(
        "/api/generate",
        ollama_generate,
        "Answer a prompt, as Ollama",
        OllamaGenerateResponse,
        _GENERATE,
    ),
)
