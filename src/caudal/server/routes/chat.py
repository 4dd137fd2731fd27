"""`POST /v1/chat/completions`."""

from __future__ import annotations

import time

from msgspec.structs import replace

from caudal.errors import ContextLengthError, InvalidRequestError
from caudal.sampling_params import StructuredOutputsParams
from caudal.server.body import BodyDecoder
from caudal.server.conversation import PreparedChat, count_chat_tokens, prepare_chat
from caudal.server.endpoint import ApiRoute
from caudal.server.exchange import Exchange
from caudal.server.form import check_form, form_of_chat, required_form
from caudal.server.generation.chat_answer import ChatAnswerWriter
from caudal.server.generation.plan import GenerationPlan, Prompt, fit_max_tokens
from caudal.server.generation.serve import serve_generation
from caudal.server.model import ServedModel
from caudal.server.parsers.output_parser import OutputRules
from caudal.server.protocol.chat import ChatCompletionRequest, ChatCompletionResponse
from caudal.server.protocol.unsupported import CHAT_UNSUPPORTED
from caudal.server.state import AppState
from caudal.server.tenancy import with_tier
from caudal.server.tool_constraint import with_calls
from caudal.server.validate import check_min_tokens, sampling_params, stream_format, text_rules

_DECODER = BodyDecoder(ChatCompletionRequest, CHAT_UNSUPPORTED)


async def create_chat_completion(state: AppState, exchange: Exchange) -> None:
    """Answer the conversation."""
    arrival = time.monotonic()
    await state.turns.take()
    data = await state.read_json(exchange)
    body = _DECODER.decode(data, state.unknown_fields)
    model = state.require_model(body.model)
    state.require_serving()
    plan = await plan_chat(state, model, body, arrival)
    plan = with_tier(state, exchange, plan)
    exchange.release_body(state.bodies)
    exchange.reply_headers.append((b"x-request-id", plan.request_id.encode()))
    writer = ChatAnswerWriter(plan, model, int(time.time()))
    await serve_generation(state, exchange, model, plan, writer)


def count_prompt_tokens(state: AppState, data: bytes) -> int:
    """Tokens of the prompt that `data` makes; blocks. Raises RequestError for what is refused."""
    body = _DECODER.decode(data, state.unknown_fields)
    return count_chat_tokens(state, state.require_model(body.model), body)


async def plan_chat(
    state: AppState,
    model: ServedModel,
    body: ChatCompletionRequest,
    arrival: float,
    *,
    id_prefix: str = "chatcmpl",
) -> GenerationPlan:
    """What the engine shall do for `body`; other API families come here with a body they made.

    Raises InvalidRequestError or ContextLengthError naming the field of `body`.
    """
    max_tokens = _max_tokens(body)
    check_min_tokens(body, max_tokens)
    num_logprobs = _num_logprobs(body)
    sampling = sampling_params(
        body,
        vocab_size=state.engine.info.vocab_size,
        num_logprobs=num_logprobs,
        num_prompt_logprobs=body.prompt_logprobs,
    )
    stream = stream_format(body)
    form = await required_form(state, body)
    chat = await prepare_chat(state, model, body)
    form, output = await _form_and_output(state, chat, form)
    sampling = replace(sampling, structured_outputs=form)
    return GenerationPlan(
        request_id=state.create_request_id(id_prefix),
        arrival=arrival,
        prompts=[_prompt(chat, max_tokens, state.engine.info.max_model_len)],
        n=body.n or 1,
        sampling=sampling,
        text=text_rules(body, shown_token_ids=chat.shown_token_ids),
        output=output,
        stream=stream,
        num_logprobs=num_logprobs,
        num_prompt_logprobs=body.prompt_logprobs,
        priority=body.priority or 0,
        namespace=body.cache_salt or "",
        service_tier=body.service_tier,
        timeout_s=body.timeout,
    )


async def _form_and_output(
    state: AppState, chat: PreparedChat, form: StructuredOutputsParams | None
) -> tuple[StructuredOutputsParams | None, OutputRules | None]:
    """The form of the whole answer, calls included, and what its parser looks for."""
    with_tools = chat.constraint
    if with_tools is None and form is not None:
        with_tools = with_calls(form, chat.tools, chat.output)
    if with_tools is not None:
        await check_form(state, with_tools, "tools")
        return with_tools, chat.output
    return (None, chat.output) if form is None else form_of_chat(form, chat.output)


def _max_tokens(body: ChatCompletionRequest) -> int | None:
    """The newer name wins. Raises InvalidRequestError for 0: a chat answer has a token."""
    for name in ("max_completion_tokens", "max_tokens"):
        value: int | None = getattr(body, name)
        if value == 0:
            raise InvalidRequestError(
                f"{name}: must be at least 1.", param=name, code="invalid_value"
            )
        if value is not None:
            return value
    return None


def _num_logprobs(body: ChatCompletionRequest) -> int | None:
    if body.logprobs:
        return body.top_logprobs or 0
    if body.top_logprobs:
        raise InvalidRequestError(
            "top_logprobs: needs logprobs: true.", param="top_logprobs", code="invalid_value"
        )
    return None


def _prompt(chat: PreparedChat, max_tokens: int | None, max_model_len: int) -> Prompt:
    try:
        fitted = fit_max_tokens(max_tokens, None, len(chat.token_ids), max_model_len)
    except ContextLengthError as error:
        error.param = "messages"
        raise
    return Prompt(chat.token_ids, chat.text, fitted)


ROUTES = (
    ApiRoute(
        "POST",
        "/v1/chat/completions",
        create_chat_completion,
        "Answer a conversation",
        ChatCompletionResponse,
        request=ChatCompletionRequest,
        errors=(400, 404, 408, 413, 415, 429, 500, 503),
        is_stream=True,
        is_generation=True,
    ),
)
