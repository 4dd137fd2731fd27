"""`POST /v1/completions`."""

from __future__ import annotations

import time

from msgspec.structs import replace

from caudal.errors import InvalidRequestError
from caudal.server.body import BodyDecoder
from caudal.server.endpoint import ApiRoute
from caudal.server.exchange import Exchange
from caudal.server.form import required_form
from caudal.server.generation.completion_answer import CompletionAnswerWriter
from caudal.server.generation.plan import GenerationPlan, Prompt, fit_max_tokens
from caudal.server.generation.serve import serve_generation
from caudal.server.model import ServedModel
from caudal.server.prompts import check_token_ids, encode_text, run_prompt_work, split_prompts
from caudal.server.protocol.completions import CompletionRequest, CompletionResponse
from caudal.server.protocol.unsupported import COMPLETION_UNSUPPORTED
from caudal.server.state import AppState
from caudal.server.tenancy import with_tier
from caudal.server.validate import check_min_tokens, sampling_params, stream_format, text_rules

DEFAULT_MAX_TOKENS = 16

_DECODER = BodyDecoder(CompletionRequest, COMPLETION_UNSUPPORTED)


async def create_completion(state: AppState, exchange: Exchange) -> None:
    """Continue the prompts."""
    arrival = time.monotonic()
    await state.turns.take()
    data = await state.read_json(exchange)
    body = _DECODER.decode(data, state.unknown_fields)
    model = state.require_model(body.model)
    state.require_serving()
    plan = await plan_completion(state, model, body, arrival)
    plan = with_tier(state, exchange, plan)
    exchange.release_body(state.bodies)
    exchange.reply_headers.append((b"x-request-id", plan.request_id.encode()))
    writer = CompletionAnswerWriter(plan, model, int(time.time()))
    await serve_generation(state, exchange, model, plan, writer)


def count_prompt_tokens(state: AppState, data: bytes) -> int:
    """Tokens of the prompts that `data` makes; blocks. Raises RequestError for what is refused."""
    body = _DECODER.decode(data, state.unknown_fields)
    model, max_model_len = state.require_model(body.model), state.engine.info.max_model_len
    parts = split_prompts(body.prompt)
    return sum(len(_prompt(model, body, part, max_model_len).token_ids) for part in parts)


async def plan_completion(
    state: AppState, model: ServedModel, body: CompletionRequest, arrival: float
) -> GenerationPlan:
    """What the engine shall do for `body`; other API families come here with a body they made.

    Raises InvalidRequestError or ContextLengthError naming the field of `body`.
    """
    n = body.n or 1
    _check_cross_fields(body, n)
    num_prompt_logprobs = body.prompt_logprobs
    if body.echo and body.logprobs is not None:
        num_prompt_logprobs = max(body.logprobs, num_prompt_logprobs or 0)
    sampling = sampling_params(
        body,
        vocab_size=state.engine.info.vocab_size,
        num_logprobs=body.logprobs,
        num_prompt_logprobs=num_prompt_logprobs,
    )
    sampling = replace(sampling, structured_outputs=await required_form(state, body))
    stream = stream_format(body)
    prompts = await _prompts(state, model, body)
    num_choices = len(prompts) * n
    if num_choices > state.limits.max_choices:
        raise InvalidRequestError(
            f"n: prompts × n must not exceed {state.limits.max_choices}, got {num_choices}.",
            param="n",
            code="invalid_value",
        )
    return GenerationPlan(
        request_id=state.create_request_id("cmpl"),
        arrival=arrival,
        prompts=prompts,
        n=n,
        sampling=sampling,
        text=text_rules(body, echo=bool(body.echo)),
        stream=stream,
        num_logprobs=body.logprobs,
        num_prompt_logprobs=body.prompt_logprobs,
        priority=body.priority or 0,
        namespace=body.cache_salt or "",
        service_tier=body.service_tier,
        timeout_s=body.timeout,
    )


def _check_cross_fields(body: CompletionRequest, n: int) -> None:
    if body.best_of is not None and body.best_of != n:
        raise InvalidRequestError(
            f"best_of: only supported when it equals n ({n}), got {body.best_of}.",
            param="best_of",
            code="unsupported",
        )
    max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    check_min_tokens(body, max_tokens)


async def _prompts(state: AppState, model: ServedModel, body: CompletionRequest) -> list[Prompt]:
    max_model_len = state.engine.info.max_model_len
    parts = split_prompts(body.prompt)

    def work() -> list[Prompt]:
        return [_prompt(model, body, part, max_model_len) for part in parts]

    num_chars = sum(map(len, parts))
    return await run_prompt_work(state, num_chars, work)


def _prompt(
    model: ServedModel, body: CompletionRequest, part: str | list[int], max_model_len: int
) -> Prompt:
    if isinstance(part, str):
        text = part
        token_ids = encode_text(
            model,
            part,
            max_model_len=max_model_len,
            add_special_tokens=body.add_special_tokens is not False,
        )
    else:
        token_ids = part
        check_token_ids(token_ids, model.tokenizer.vocab_size)
        text = model.tokenizer.decode(token_ids, skip_special=False) if body.echo else ""
    max_tokens = fit_max_tokens(body.max_tokens, DEFAULT_MAX_TOKENS, len(token_ids), max_model_len)
    return Prompt(token_ids, text, max_tokens)


ROUTES = (
    ApiRoute(
        "POST",
        "/v1/completions",
        create_completion,
        "Continue one or several prompts",
        CompletionResponse,
        request=CompletionRequest,
        errors=(400, 404, 408, 413, 415, 429, 500, 503),
        is_stream=True,
        is_generation=True,
    ),
)
