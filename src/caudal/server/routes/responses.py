"""`POST /v1/responses` and `POST /v1/responses/input_tokens`."""

from __future__ import annotations

import time

from caudal.errors import InvalidRequestError
from caudal.server.body import BodyDecoder
from caudal.server.conversation import count_chat_tokens, prepare_chat
from caudal.server.endpoint import ApiRoute
from caudal.server.errors import renamed_params
from caudal.server.exchange import Exchange
from caudal.server.generation.responses_answer import ResponsesAnswerWriter
from caudal.server.generation.serve import serve_generation
from caudal.server.protocol.chat import ChatCompletionRequest
from caudal.server.protocol.responses import (
    INCLUDE_LOGPROBS,
    RESPONSES_UNSUPPORTED,
    InputTokens,
    ResponseObject,
    ResponsesRequest,
)
from caudal.server.protocol.structured import JsonSchemaFormat, ResponseFormat
from caudal.server.response_input import chat_messages, chat_tool_choice, chat_tools
from caudal.server.routes.chat import plan_chat
from caudal.server.state import AppState
from caudal.server.tenancy import with_tier
from caudal.server.tools import renamed_fields

FORMAT_PARAMS = {
    "response_format": "text.format",
    "response_format.type": "text.format.type",
    "response_format.json_schema.schema": "text.format.schema",
}
_DECODER = BodyDecoder(ResponsesRequest, RESPONSES_UNSUPPORTED)
_PARAMS = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    **FORMAT_PARAMS,
}
_FIELDS = (
    (r"(tools\[\d+\])\.function", r"\1"),
    (r"tool_choice\.(?:function|allowed_tools)\.", "tool_choice."),
    (r"(tool_choice\.tools\[\d+\])\.function", r"\1"),
    (r"tool_choice\.function", "tool_choice.name"),
    (r"tool_choice\.allowed_tools", "tool_choice.tools"),
)


async def create_response(state: AppState, exchange: Exchange) -> None:
    """Answer the input."""
    arrival = time.monotonic()
    await state.turns.take()
    data = await state.read_json(exchange)
    body = _DECODER.decode(data, state.unknown_fields)
    model = state.require_model(body.model)
    state.require_serving()
    with renamed_params(_PARAMS), renamed_fields(_FIELDS):
        plan = await plan_chat(state, model, _chat_body(body), arrival, id_prefix="resp")
        plan = with_tier(state, exchange, plan)
        exchange.release_body(state.bodies)
        exchange.reply_headers.append((b"x-request-id", plan.request_id.encode()))
        writer = ResponsesAnswerWriter(plan, model, int(time.time()), body)
        await serve_generation(state, exchange, model, plan, writer)


async def count_input_tokens(state: AppState, exchange: Exchange) -> None:
    """Tokens of the prompt that the input would make."""
    await state.turns.take()
    data = await state.read_json(exchange)
    body = _DECODER.decode(data, state.unknown_fields)
    model = state.require_model(body.model)
    with renamed_params(_PARAMS), renamed_fields(_FIELDS):
        chat = await prepare_chat(state, model, _chat_body(body))
    await exchange.respond_json(InputTokens("response.input_tokens", len(chat.token_ids)))


def count_prompt_tokens(state: AppState, data: bytes) -> int:
    """Tokens of the prompt that `data` makes; blocks. Raises RequestError for what is refused."""
    body = _DECODER.decode(data, state.unknown_fields)
    return count_chat_tokens(state, state.require_model(body.model), _chat_body(body))


def _chat_body(body: ResponsesRequest) -> ChatCompletionRequest:
    """The same request as a chat. Raises InvalidRequestError naming what it cannot say."""
    response_format = _response_format(body)
    num_top = body.top_logprobs or 0
    has_logprobs = num_top > 0 or INCLUDE_LOGPROBS in (body.include or ())
    return ChatCompletionRequest(
        messages=chat_messages(body),
        tools=chat_tools(body.tools),
        tool_choice=chat_tool_choice(body.tool_choice),
        parallel_tool_calls=body.parallel_tool_calls,
        reasoning_effort=body.reasoning.effort if body.reasoning else None,
        response_format=response_format,
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


def _response_format(body: ResponsesRequest) -> ResponseFormat | None:
    """`text.format`, which has the fields of chat's `json_schema` beside its type."""
    if body.text is None:
        return None
    if body.text.verbosity not in (None, "medium"):
        raise _unsupported("text.verbosity", "not supported by this server")
    value = body.text.format
    if value is None:
        return None
    schema = JsonSchemaFormat(name=value.name, schema=value.schema, strict=value.strict)
    return ResponseFormat(type=value.type, json_schema=schema)


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
    ApiRoute(
        "POST",
        "/v1/responses/input_tokens",
        count_input_tokens,
        "Count the tokens of an input",
        InputTokens,
        request=ResponsesRequest,
        errors=(400, 404, 408, 413, 415, 503),
    ),
)
