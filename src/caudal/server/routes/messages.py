"""`POST /v1/messages` and `POST /v1/messages/count_tokens`."""

from __future__ import annotations

import time
from collections.abc import Sequence

from caudal.errors import InvalidRequestError
from caudal.server.body import BodyDecoder
from caudal.server.conversation import prepare_chat
from caudal.server.endpoint import ApiRoute
from caudal.server.errors import renamed_params
from caudal.server.exchange import Exchange
from caudal.server.generation.messages_answer import MessagesAnswerWriter, message_error_body
from caudal.server.generation.serve import serve_generation
from caudal.server.protocol.chat import ChatCompletionRequest, ChatMessage, ContentPart
from caudal.server.protocol.messages import (
    MESSAGES_UNSUPPORTED,
    TURN_ROLES,
    CountTokensRequest,
    CountTokensResponse,
    MessageErrorResponse,
    MessageParam,
    MessageResponse,
    MessagesRequest,
    TextBlockParam,
)
from caudal.server.protocol.structured import JsonSchemaFormat, ResponseFormat
from caudal.server.routes.chat import plan_chat
from caudal.server.state import AppState

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
    chat = _chat_body(body)
    chat.response_format = _response_format(body)
    chat.max_tokens = body.max_tokens
    chat.stop = body.stop_sequences
    chat.stream = body.stream
    chat.temperature = body.temperature
    chat.top_k = body.top_k
    chat.top_p = body.top_p
    with renamed_params(_PARAMS):
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
    chat = await prepare_chat(state, model, _chat_body(body))
    await exchange.respond_json(CountTokensResponse(len(chat.token_ids)))


def _chat_body(body: CountTokensRequest) -> ChatCompletionRequest:
    """The conversation as a chat. Raises InvalidRequestError naming what it cannot say."""
    messages: list[ChatMessage] = []
    system = _parts(body.system or [], "system")
    if system:
        messages.append(ChatMessage(role="system", content=system))
    messages += _turns(body.messages)
    is_continued = messages[-1].role == "assistant"
    if is_continued:
        _check_continued(messages[-1], f"messages[{len(body.messages) - 1}].content")
    return ChatCompletionRequest(messages=messages, continue_final_message=is_continued)


def _response_format(body: MessagesRequest) -> ResponseFormat | None:
    config = body.output_config
    value = body.output_format if config is None or config.format is None else config.format
    if value is None:
        return None
    if value.type != "json_schema":
        raise _error("output_config.format.type", "must be json_schema")
    return ResponseFormat(type=value.type, json_schema=JsonSchemaFormat(schema=value.schema))


def _turns(params: Sequence[MessageParam]) -> list[ChatMessage]:
    """Neighbours of one role joined; an empty last turn of the assistant begins nothing."""
    turns: list[tuple[str, list[ContentPart]]] = []
    for index, param in enumerate(params):
        where = f"messages[{index}]"
        if param.role not in TURN_ROLES:
            raise _error(
                f"{where}.role", f"must be one of {', '.join(TURN_ROLES)}, got {param.role[:64]!r}"
            )
        parts = _parts(param.content, f"{where}.content")
        is_last = index == len(params) - 1
        if not parts and not (is_last and index > 0 and param.role == "assistant"):
            raise _error(f"{where}.content", "must not be empty")
        if turns and turns[-1][0] == param.role:
            turns[-1][1].extend(parts)
        elif parts:
            turns.append((param.role, parts))
    return [ChatMessage(role=role, content=parts) for role, parts in turns]


def _parts(content: str | Sequence[TextBlockParam], where: str) -> list[ContentPart]:
    """The texts that are not empty."""
    if isinstance(content, str):
        return [ContentPart("text", content)] if content else []
    parts = []
    for index, block in enumerate(content):
        place = f"{where}[{index}]"
        if block.type != "text":
            problem = f"blocks of type {block.type[:64]!r} are not supported; this model takes text"
            raise _error(place, problem, code="unsupported")
        if block.text is None:
            raise _error(place, "a text block needs the field text")
        if block.text:
            parts.append(ContentPart("text", block.text))
    return parts


def _check_continued(message: ChatMessage, where: str) -> None:
    assert isinstance(message.content, list)
    text = message.content[-1].text or ""
    if text != text.rstrip():
        raise _error(where, "the assistant's last turn must not end in white space")


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
