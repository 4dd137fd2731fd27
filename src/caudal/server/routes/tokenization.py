"""`POST /tokenize`, `POST /detokenize` and `GET /tokenizer_info`."""

from __future__ import annotations

from caudal.errors import InvalidRequestError
from caudal.server.body import BodyDecoder
from caudal.server.conversation import prepare_chat
from caudal.server.endpoint import ApiRoute
from caudal.server.exchange import Exchange
from caudal.server.model import ServedModel
from caudal.server.prompts import check_length, check_token_ids, run_prompt_work
from caudal.server.protocol.chat import ChatCompletionRequest
from caudal.server.protocol.tokenization import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
    TokenizerInfo,
)
from caudal.server.state import AppState

_TOKENIZE = BodyDecoder(TokenizeRequest)
_DETOKENIZE = BodyDecoder(DetokenizeRequest)


async def tokenize(state: AppState, exchange: Exchange) -> None:
    """Token ids of a text or a conversation."""
    await state.turns.take()
    data = await state.read_json(exchange)
    body = _TOKENIZE.decode(data, state.unknown_fields)
    model = state.require_model(body.model)
    max_model_len = state.engine.info.max_model_len
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequestError(
            "prompt: exactly one of prompt and messages is required.",
            param="prompt",
            code="invalid_value",
        )
    if body.messages is None:
        text = body.prompt or ""
        token_ids = await run_prompt_work(
            state, len(text), lambda: _text_ids(model, body, text, max_model_len)
        )
    else:
        token_ids = await _chat_ids(state, model, body)
    token_strs = None
    if body.return_token_strs:
        token_strs = [model.tokenizer.token_text(token_id) for token_id in token_ids]
    await exchange.respond_json(
        TokenizeResponse(len(token_ids), max_model_len, token_ids, token_strs)
    )


def _text_ids(
    model: ServedModel, body: TokenizeRequest, text: str, max_model_len: int
) -> list[int]:
    check_length(model, len(text), max_model_len, "prompt")
    add_bos = False if body.add_special_tokens is False else None
    return model.tokenizer.encode(text, add_bos=add_bos, parse_special=True)


async def _chat_ids(state: AppState, model: ServedModel, body: TokenizeRequest) -> list[int]:
    chat = ChatCompletionRequest(
        messages=body.messages or [],
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        tools=body.tools,
        chat_template_kwargs=body.chat_template_kwargs,
        add_special_tokens=body.add_special_tokens,
    )
    return (await prepare_chat(state, model, chat)).token_ids


async def detokenize(state: AppState, exchange: Exchange) -> None:
    """Text of token ids."""
    await state.turns.take()
    data = await state.read_json(exchange)
    body = _DETOKENIZE.decode(data, state.unknown_fields)
    tokenizer = state.require_model(body.model).tokenizer
    check_token_ids(body.tokens, tokenizer.vocab_size, "tokens")
    text = await run_prompt_work(
        state, len(body.tokens), lambda: tokenizer.decode(body.tokens, skip_special=False)
    )
    await exchange.respond_json(DetokenizeResponse(text))


async def tokenizer_info(state: AppState, exchange: Exchange) -> None:
    """Special tokens and template of the served model."""
    model = state.require_model()
    tokenizer = model.tokenizer
    bos, eos = (
        None if token_id is None else tokenizer.token_text(token_id)
        for token_id in (tokenizer.bos_id, tokenizer.eos_id)
    )
    info = TokenizerInfo(
        tokenizer_class="CaudalTokenizer",
        bos_token=bos,
        eos_token=eos,
        add_bos_token=tokenizer.add_bos,
        model_max_length=state.engine.info.max_model_len,
        chat_template=model.chat_template.source,
    )
    await exchange.respond_json(info)


ROUTES = (
    ApiRoute(
        "POST",
        "/tokenize",
        tokenize,
        "Token ids of a text or a conversation",
        TokenizeResponse,
        request=TokenizeRequest,
        errors=(400, 404, 408, 413, 415, 503),
    ),
    ApiRoute(
        "POST",
        "/detokenize",
        detokenize,
        "Text of token ids",
        DetokenizeResponse,
        request=DetokenizeRequest,
        errors=(400, 404, 408, 413, 415, 503),
    ),
    ApiRoute(
        "GET",
        "/tokenizer_info",
        tokenizer_info,
        "Special tokens and chat template",
        TokenizerInfo,
        errors=(503,),
    ),
)
