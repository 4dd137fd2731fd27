"""`POST /v1/messages` and `POST /v1/messages/count_tokens`."""

from __future__ import annotations

import time

from caudal.errors import InvalidRequestError
from caudal.server.body import BodyDecoder
from caudal.server.conversation import prepare_chat
from caudal.server.dialect import dialect_of
from caudal.server.endpoint import ApiRoute
from caudal.server.errors import renamed_params
from caudal.server.exchange import Exchange
from caudal.server.generation.messages_answer import MessagesAnswerWriter, message_error_body
from caudal.server.generation.serve import serve_generation
from caudal.server.message_input import FIELDS, chat_request
from caudal.server.model import ServedModel
from caudal.server.protocol.messages import (
    MESSAGES_UNSUPPORTED,
    CountTokensRequest,
    CountTokensResponse,
    MessageErrorResponse,
    MessageResponse,
    MessagesRequest,
)
from caudal.server.protocol.structured import JsonSchemaFormat, ResponseFormat
from caudal.server.routes.chat import plan_chat
from caudal.server.state import AppState
from caudal.server.tools import renamed_fields

_PARAMS = {
    "response_format": "output_config.format",
    "response_format.json_schema.schema": "output_config.format.schema",
}
_DECODER = BodyDecoder(MessagesRequest, MESSAGES_UNSUPPORTED)
_COUNT_DECODER = BodyDecoder(CountTokensRequest, MESSAGES_UNSUPPORTED)


async def create_message(state: AppState, exchange: Exchange) -> None:
    """Answer the conversation."""
    arrival = time.monotonic()
    await state.turns.take()
    data = await state.read_json(exchange)
    body = _DECODER.decode(data, state.unknown_fields)
    model = state.require_model(body.model)
    state.require_serving()
    chat = chat_request(body)
    chat.response_format = _response_format(body)
    chat.max_tokens = body.max_tokens
    chat.stop = body.stop_sequences
    chat.stream = body.stream
    chat.temperature = body.temperature
    chat.top_k = body.top_k
    chat.top_p = body.top_p
    _check_thinking(state, model, body)
    with renamed_params(_PARAMS), renamed_fields(FIELDS):
        plan = await plan_chat(state, model, chat, arrival, id_prefix="msg")
    exchange.release_body(state.bodies)
    exchange.reply_headers.append((b"request-id", plan.request_id.encode()))
    await serve_generation(state, exchange, model, plan, MessagesAnswerWriter(plan, model))


async def count_message_tokens(state: AppState, exchange: Exchange) -> None:
    """Tokens of the prompt that the conversation would make."""
    await state.turns.take()
    data = await state.read_json(exchange)
    body = _COUNT_DECODER.decode(data, state.unknown_fields)
    model = state.require_model(body.model)
    with renamed_fields(FIELDS):
        chat = await prepare_chat(state, model, chat_request(body))
    await exchange.respond_json(CountTokensResponse(len(chat.token_ids)))


def _check_thinking(state: AppState, model: ServedModel, body: MessagesRequest) -> None:
    if body.thinking is None or body.thinking.type != "enabled":
        return
    if dialect_of(state.config, model).reasoning is None:
        raise _error("thinking", "this model does not reason", code="unsupported")


def _response_format(body: MessagesRequest) -> ResponseFormat | None:
    config = body.output_config
    value = body.output_format if config is None or config.format is None else config.format
    if value is None:
        return None
    if value.type != "json_schema":
        raise _error("output_config.format.type", "must be json_schema")
    return ResponseFormat(type=value.type, json_schema=JsonSchemaFormat(schema=value.schema))


def _error(param: str, problem: str, *, code: str = "invalid_value") -> InvalidRequestError:
    return InvalidRequestError(f"{param}: {problem}.", param=param, code=code)


ROUTES = (
    ApiRoute(
        "POST",
        "/v1/messages",
        create_message,
        "Answer a conversation, in Anthropic's shape",
        MessageResponse,
        request=MessagesRequest,
        errors=(400, 404, 408, 413, 415, 429, 500, 503),
        failure=MessageErrorResponse,
        encode_error=message_error_body,
        is_stream=True,
        is_generation=True,
    ),
    ApiRoute(
        "POST",
        "/v1/messages/count_tokens",
        count_message_tokens,
        "Count the tokens of a conversation",
        CountTokensResponse,
        request=CountTokensRequest,
        errors=(400, 404, 408, 413, 415, 503),
        failure=MessageErrorResponse,
        encode_error=message_error_body,
    ),
)
