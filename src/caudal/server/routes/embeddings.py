"""`POST /v1/embeddings`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple, cast

from caudal.errors import InvalidRequestError
from caudal.sampling_params import Pooling, SamplingParams
from caudal.server.body import BodyDecoder
from caudal.server.endpoint import ApiRoute
from caudal.server.exchange import Exchange
from caudal.server.generation.embedding_answer import embedding_response, encode_embeddings
from caudal.server.generation.plan import GenerationPlan, Prompt
from caudal.server.generation.pooling import serve_pooling
from caudal.server.model import ServedModel
from caudal.server.prompts import check_length, check_token_ids, run_prompt_work, split_prompts
from caudal.server.protocol.embeddings import (
    EMBEDDING_UNSUPPORTED,
    ENCODING_FORMATS,
    MAX_INPUTS,
    POOLINGS,
    EmbeddingRequest,
    EmbeddingResponse,
)
from caudal.server.state import AppState

_DECODER = BodyDecoder(EmbeddingRequest, EMBEDDING_UNSUPPORTED)

SLICE_CHARS = 65_536
"""Texts (or token ids) that are tokenized in one go."""
SLICE_BYTES = 262_144
"""Vectors that are encoded in one go."""
INLINE_BYTES = 32_768
"""Answers of up to so many bytes of vectors are encoded on the event loop."""


async def create_embeddings(state: AppState, exchange: Exchange) -> None:
    """Vectors of the inputs."""
    arrival = time.monotonic()
    await state.turns.take()
    data = await state.read_json(exchange)
    body = _DECODER.decode(data, state.unknown_fields)
    model = state.require_model(body.model)
    state.require_serving()
    _check(body, state.engine.info.hidden_size)
    plan = await plan_embeddings(state, model, body, arrival)
    exchange.release_body(state.bodies)
    exchange.reply_headers.append((b"x-request-id", plan.request_id.encode()))
    vectors = await serve_pooling(state, exchange, model, plan)
    await exchange.respond(await _answer(state, model, body, plan, vectors))


def count_prompt_tokens(state: AppState, data: bytes) -> int:
    """Tokens of the inputs of `data`; blocks. Raises RequestError for what is refused."""
    body = _DECODER.decode(data, state.unknown_fields)
    model, length = state.require_model(body.model), _Length(state.engine.info.max_model_len, False)
    parts = split_prompts(body.input, param="input", max_prompts=MAX_INPUTS)
    return sum(len(prompt.token_ids) for prompt in _prompts(model, body, parts, 0, length))


def _check(body: EmbeddingRequest, hidden_size: int) -> None:
    for name, value, allowed in (
        ("encoding_format", body.encoding_format, ENCODING_FORMATS),
        ("pooling", body.pooling, POOLINGS),
    ):
        if value is not None and value not in allowed:
            raise _error(name, f"{value[:64]!r} is not one of {', '.join(allowed)}")
    if body.dimensions is not None and body.dimensions > hidden_size:
        raise _error(
            "dimensions", f"this model's vectors have {hidden_size}, got {body.dimensions}"
        )


async def plan_embeddings(
    state: AppState,
    model: ServedModel,
    body: EmbeddingRequest,
    arrival: float,
    *,
    is_cut: bool = False,
) -> GenerationPlan:
    """The inputs as prompts without tokens to generate.

    Raises InvalidRequestError for inputs that are empty, or too long unless `is_cut`: then only
    as much of each is used as fits.
    """
    parts = split_prompts(body.input, param="input", max_prompts=MAX_INPUTS)
    max_model_len = state.engine.info.max_model_len
    prompts: list[Prompt] = []
    for start, stop in slices([len(part) for part in parts], SLICE_CHARS):
        taken = parts[start:stop]
        if is_cut:
            longest = max_model_len * model.max_token_bytes
            taken = [part[:longest] for part in taken]
        work = partial(_prompts, model, body, taken, start, _Length(max_model_len, is_cut))
        prompts += await run_prompt_work(state, sum(map(len, parts[start:stop])), work)
    pooling = cast("Pooling", body.pooling or model.pooling)
    return GenerationPlan(
        request_id=state.create_request_id("embd"),
        arrival=arrival,
        prompts=prompts,
        n=1,
        sampling=SamplingParams(max_tokens=0, pooling=pooling),
        priority=body.priority or 0,
        namespace=body.cache_salt or "",
        service_tier=body.service_tier,
        timeout_s=body.timeout,
    )


def slices(sizes: Sequence[int], max_size: int) -> Iterator[tuple[int, int]]:
    """Consecutive ranges whose sizes add up to `max_size` at most, or that hold a single item.

    A list is worked off in slices, so that the work of other requests comes in between.
    """
    start = total = 0
    for index, size in enumerate(sizes):
        if total and total + size > max_size:
            yield start, index
            start, total = index, 0
        total += size
    yield start, len(sizes)


class _Length(NamedTuple):
    """How long an input may be, and whether a longer one is cut or refused."""

    max_tokens: int
    is_cut: bool


def _prompts(
    model: ServedModel,
    body: EmbeddingRequest,
    parts: Sequence[str | list[int]],
    first_index: int,
    length: _Length,
) -> list[Prompt]:
    texts = [part for part in parts if isinstance(part, str)]
    for text in texts if not length.is_cut else ():
        check_length(model, len(text), length.max_tokens, "input")
    add_bos = False if body.add_special_tokens is False else None
    encoded = iter(model.tokenizer.encode_batch(texts, add_bos=add_bos, param="input"))
    prompts = []
    for index, part in enumerate(parts, first_index):
        where = f"input[{index}]" if isinstance(body.input, list) else "input"
        if isinstance(part, str):
            token_ids = next(encoded)
        else:
            token_ids = part
            check_token_ids(token_ids, model.tokenizer.vocab_size, "input")
        if not part or not token_ids:
            raise _error("input", "must not be empty", where)
        if length.is_cut:
            token_ids = token_ids[: length.max_tokens]
        if len(token_ids) > length.max_tokens:
            raise InvalidRequestError(
                f"{where}: has {len(token_ids)} tokens, but this model's maximum context length "
                f"is {length.max_tokens} tokens. Shorten the text.",
                param="input",
                code="context_length_exceeded",
            )
        prompts.append(Prompt(token_ids, "", 0))
    return prompts


def _error(param: str, problem: str, where: str | None = None) -> InvalidRequestError:
    return InvalidRequestError(f"{where or param}: {problem}.", param=param, code="invalid_value")


async def _answer(
    state: AppState,
    model: ServedModel,
    body: EmbeddingRequest,
    plan: GenerationPlan,
    vectors: Sequence[bytes],
) -> bytes:
    encode = partial(
        encode_embeddings,
        dimensions=body.dimensions,
        is_base64=body.encoding_format == "base64",
    )
    parts = await encode_in_slices(state, vectors, encode)
    num_tokens = sum(len(prompt.token_ids) for prompt in plan.prompts)
    return embedding_response(parts, model=model.name, num_tokens=num_tokens)


async def encode_in_slices(
    state: AppState,
    vectors: Sequence[bytes],
    encode: Callable[[Sequence[bytes], int], bytes],
) -> list[bytes]:
    """`encode(some vectors, index of the first)` for all of them, off the loop if they are many."""
    loop = asyncio.get_running_loop()
    parts: list[bytes] = []
    is_short = sum(map(len, vectors)) <= INLINE_BYTES
    for start, stop in slices([len(vector) for vector in vectors], SLICE_BYTES):
        work = partial(encode, vectors[start:stop], start)
        parts.append(work() if is_short else await loop.run_in_executor(state.pool, work))
    return parts


ROUTES = (
    ApiRoute(
        "POST",
        "/v1/embeddings",
        create_embeddings,
        "Vectors of texts",
        EmbeddingResponse,
        request=EmbeddingRequest,
        errors=(400, 404, 408, 413, 415, 429, 500, 503),
        is_generation=True,
    ),
)
