"""`POST /v1/responses`."""

from __future__ import annotations

import time

from caudal.errors import InvalidRequestError
from caudal.server.body import BodyDecoder
from caudal.server.endpoint import ApiRoute
from caudal.server.errors import renamed_params
from caudal.server.exchange import Exchange
from caudal.server.generation.responses_answer import ResponsesAnswerWriter
from caudal.server.generation.serve import serve_generation
from caudal.server.protocol.chat import ROLES, ChatCompletionRequest, ChatMessage, ContentPart
from caudal.server.protocol.responses import (
    INCLUDE_LOGPROBS,
    RESPONSES_UNSUPPORTED,
    TEXT_PARTS,
    InputItem,
    InputPart,
    ResponseObject,
    ResponsesRequest,
)
from caudal.server.routes.chat import plan_chat
from caudal.server.state import AppState
from caudal.server.tenancy import with_tier

_DECODER = BodyDecoder(ResponsesRequest, RESPONSES_UNSUPPORTED)
_PARAMS = {"messages": "input", "max_tokens": "max_output_tokens"}


async def create_response(state: AppState, exchange: Exchange) -> None:
    """Answer the input."""
    arrival = time.monotonic()
    await state.turns.take()
    data = await state.read_json(exchange)
    body = _DECODER.decode(data, state.unknown_fields)
    model = state.require_model(body.model)
    state.require_serving()
    with renamed_params(_PARAMS):
        plan = await plan_chat(state, model, _chat_body(body), arrival, id_prefix="resp")
        plan = with_tier(state, exchange, plan)
        exchange.release_body(state.bodies)
        exchange.reply_headers.append((b"x-request-id", plan.request_id.encode()))
        writer = ResponsesAnswerWriter(plan, model, int(time.time()), body)
        await serve_generation(state, exchange, model, plan, writer)


def _chat_body(body: ResponsesRequest) -> ChatCompletionRequest:
    """The same request as a chat. Raises InvalidRequestError naming what it cannot say."""
    _check_text(body)
    num_top = body.top_logprobs or 0
    has_logprobs = num_top > 0 or INCLUDE_LOGPROBS in (body.include or ())
    return ChatCompletionRequest(
        messages=_messages(body),
        max_completion_tokens=body.max_output_tokens,
        stream=body.stream,
        logprobs=has_logprobs,
        top_logprobs=num_top if has_logprobs else None,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        min_p=body.min_p,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        repetition_penalty=body.repetition_penalty,
        seed=body.seed,
        stop=body.stop,
        ignore_eos=body.ignore_eos,
        priority=body.priority,
        service_tier=body.service_tier,
        timeout=body.timeout,
        cache_salt=body.cache_salt,
        chat_template_kwargs=body.chat_template_kwargs,
    )


def _check_text(body: ResponsesRequest) -> None:
    if body.text is None:
        return
    if body.text.format not in (None, {"type": "text"}):
        raise _unsupported("text.format", "not supported by this server")
    if body.text.verbosity not in (None, "medium"):
        raise _unsupported("text.verbosity", "not supported by this server")


def _messages(body: ResponsesRequest) -> list[ChatMessage]:
    messages = []
    if body.instructions:
        messages.append(ChatMessage(role="system", content=body.instructions))
    if isinstance(body.input, str):
        messages.append(ChatMessage(role="user", content=body.input))
        return messages
    for index, item in enumerate(body.input):
        messages.append(_message(item, f"input[{index}]"))
    return messages


def _message(item: InputItem, where: str) -> ChatMessage:
    if item.type != "message":
        raise _unsupported(
            where, f"items of type {item.type[:64]!r} are not supported; only messages are"
        )
    if item.role not in ROLES:
        raise InvalidRequestError(
            f"{where}.role: must be one of {', '.join(ROLES)}.",
            param=f"{where}.role",
            code="invalid_value",
        )
    content = item.content
    if isinstance(content, str):
        return ChatMessage(role=item.role, content=content)
    if not content:
        raise InvalidRequestError(
            f"{where}.content: a text or a list of text parts is required.",
            param=f"{where}.content",
            code="invalid_value",
        )
    parts = [_part(part, f"{where}.content[{index}]") for index, part in enumerate(content)]
    return ChatMessage(role=item.role, content=parts)


def _part(part: InputPart, where: str) -> ContentPart:
    if part.type not in TEXT_PARTS:
        raise _unsupported(
            where, f"parts of type {part.type[:64]!r} are not supported; this model takes text"
        )
    name = "refusal" if part.type == "refusal" else "text"
    text: str | None = getattr(part, name)
    if text is None:
        raise InvalidRequestError(
            f"{where}: a part of type {part.type} needs the field {name}.",
            param=where,
            code="invalid_value",
        )
    return ContentPart("text", text)


def _unsupported(param: str, problem: str) -> InvalidRequestError:
    return InvalidRequestError(f"{param}: {problem}.", param=param, code="unsupported")


ROUTES = (
    ApiRoute(
        "POST",
        "/v1/responses",
        create_response,
        "Answer an input, without storing anything",
        ResponseObject,
        request=ResponsesRequest,
        errors=(400, 404, 408, 413, 415, 429, 500, 503),
        is_stream=True,
        is_generation=True,
    ),
)
