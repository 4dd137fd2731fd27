"""`POST /render`: what a completion or chat request would make the model read."""

from __future__ import annotations

import time

import msgspec

from caudal.errors import InvalidRequestError
from caudal.server.body import BodyDecoder
from caudal.server.endpoint import ApiRoute
from caudal.server.exchange import Exchange
from caudal.server.generation.plan import GenerationPlan, Prompt
from caudal.server.model import ServedModel
from caudal.server.prompts import run_prompt_work, split_prompts
from caudal.server.protocol.chat import ChatCompletionRequest
from caudal.server.protocol.completions import CompletionRequest
from caudal.server.protocol.render import RenderedPromptBody, RenderResponse
from caudal.server.protocol.unsupported import CHAT_UNSUPPORTED, COMPLETION_UNSUPPORTED
from caudal.server.routes.chat import plan_chat
from caudal.server.routes.completions import plan_completion
from caudal.server.state import AppState

_CHAT = BodyDecoder(ChatCompletionRequest, CHAT_UNSUPPORTED)
_COMPLETION = BodyDecoder(CompletionRequest, COMPLETION_UNSUPPORTED)
_NULL = msgspec.Raw(b"null")


class _Kind(msgspec.Struct):
    messages: msgspec.Raw = _NULL
    prompt: msgspec.Raw = _NULL


_decode_kind = msgspec.json.Decoder(_Kind).decode


async def render(state: AppState, exchange: Exchange) -> None:
    """The exact text and token ids; refuses what the endpoint itself would refuse."""
    arrival = time.monotonic()
    await state.turns.take()
    data = await state.read_json(exchange)
    if _is_chat(data):
        chat = _CHAT.decode(data, state.unknown_fields)
        model = state.require_model(chat.model)
        plan = await plan_chat(state, model, chat, arrival)
        texts = [prompt.text for prompt in plan.prompts]
    else:
        completion = _COMPLETION.decode(data, state.unknown_fields)
        model = state.require_model(completion.model)
        plan = await plan_completion(state, model, completion, arrival)
        texts = await _completion_texts(state, model, completion, plan)
    prompts = [_body(text, prompt) for text, prompt in zip(texts, plan.prompts, strict=True)]
    max_model_len = state.engine.info.max_model_len
    await exchange.respond_json(RenderResponse(model.name, max_model_len, prompts))


def _is_chat(data: bytes) -> bool:
    """Raises InvalidRequestError if the body is of neither kind, or of both."""
    try:
        kind = _decode_kind(data)
    except (msgspec.DecodeError, RecursionError):
        return True  # its decoder will say what is wrong with the body
    is_chat = bytes(kind.messages) != b"null"
    if is_chat == (bytes(kind.prompt) != b"null"):
        raise InvalidRequestError(
            "prompt: exactly one of prompt and messages is required.",
            param="prompt",
            code="invalid_value",
        )
    return is_chat


async def _completion_texts(
    state: AppState, model: ServedModel, body: CompletionRequest, plan: GenerationPlan
) -> list[str]:
    """Prompts given as token ids are written out, special tokens included."""
    parts = split_prompts(body.prompt)

    def work() -> list[str]:
        decode = model.tokenizer.decode
        return [
            part if isinstance(part, str) else decode(prompt.token_ids, skip_special=False)
            for part, prompt in zip(parts, plan.prompts, strict=True)
        ]

    return await run_prompt_work(state, sum(map(len, parts)), work)


def _body(text: str, prompt: Prompt) -> RenderedPromptBody:
    return RenderedPromptBody(text, prompt.token_ids, len(prompt.token_ids), prompt.max_tokens)


ROUTES = (
    ApiRoute(
        "POST",
        "/render",
        render,
        "What a chat or completion request would make the model read",
        RenderResponse,
        request=(ChatCompletionRequest, CompletionRequest),
        errors=(400, 404, 408, 413, 415, 503),
    ),
)
