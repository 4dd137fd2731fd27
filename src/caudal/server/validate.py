"""Checks that need more than one field or the model: what msgspec's constraints cannot say."""

from __future__ import annotations

from typing import TypeVar

from caudal.errors import InvalidRequestError
from caudal.sampling_params import SamplingParams
from caudal.server.generation.plan import StreamFormat, TextRules
from caudal.server.protocol.common import MAX_LOGIT_BIASES, GenerationBody

T = TypeVar("T")


def sampling_params(
    body: GenerationBody,
    *,
    vocab_size: int,
    num_logprobs: int | None,
    num_prompt_logprobs: int | None,
) -> SamplingParams:
    """Sampling of `body`; max_tokens is set later, per prompt.

    Raises InvalidRequestError for token ids outside the vocabulary.
    """
    defaults = SamplingParams()
    return SamplingParams(
        temperature=_or(body.temperature, defaults.temperature),
        top_k=max(0, _or(body.top_k, 0)),
        top_p=_or(body.top_p, defaults.top_p),
        min_p=_or(body.min_p, defaults.min_p),
        presence_penalty=_or(body.presence_penalty, defaults.presence_penalty),
        frequency_penalty=_or(body.frequency_penalty, defaults.frequency_penalty),
        repetition_penalty=_or(body.repetition_penalty, defaults.repetition_penalty),
        logit_bias=logit_bias(body.logit_bias or {}, vocab_size),
        seed=body.seed,
        min_tokens=body.min_tokens or 0,
        ignore_eos=bool(body.ignore_eos),
        stop_token_ids=stop_token_ids(body.stop_token_ids or [], vocab_size),
        num_logprobs=num_logprobs,
        num_prompt_logprobs=num_prompt_logprobs,
    )


def _or(value: T | None, default: T) -> T:
    return default if value is None else value


def logit_bias(biases: dict[str, float], vocab_size: int) -> dict[int, float]:
    """Biases by token id. Raises InvalidRequestError naming the bad id."""
    if len(biases) > MAX_LOGIT_BIASES:
        raise InvalidRequestError(
            f"logit_bias: at most {MAX_LOGIT_BIASES} entries, got {len(biases)}.",
            param="logit_bias",
            code="invalid_value",
        )
    result: dict[int, float] = {}
    for key, bias in biases.items():
        is_number = key.isascii() and key.isdigit() and len(key) <= 10
        if not is_number or int(key) >= vocab_size:
            raise InvalidRequestError(
                f"logit_bias: {key[:64]!r} is not a token id; ids are 0 to {vocab_size - 1}.",
                param="logit_bias",
                code="invalid_value",
            )
        result[int(key)] = bias
    return result


def stop_token_ids(ids: list[int], vocab_size: int) -> tuple[int, ...]:
    """The ids, each in the vocabulary. Raises InvalidRequestError naming the bad one."""
    for token_id in ids:
        if token_id >= vocab_size:
            raise InvalidRequestError(
                f"stop_token_ids: {token_id} is not a token id; ids are 0 to {vocab_size - 1}.",
                param="stop_token_ids",
                code="invalid_value",
            )
    return tuple(dict.fromkeys(ids))


def check_min_tokens(body: GenerationBody, max_tokens: int | None) -> None:
    """Raise InvalidRequestError if min_tokens exceeds the asked (or default) max_tokens."""
    if max_tokens is not None and (body.min_tokens or 0) > max_tokens:
        raise InvalidRequestError(
            f"min_tokens: must not exceed max_tokens ({max_tokens}), got {body.min_tokens}.",
            param="min_tokens",
            code="invalid_value",
        )


def stream_format(body: GenerationBody) -> StreamFormat:
    """How to deliver. Raises InvalidRequestError for options that contradict `stream`."""
    is_stream = bool(body.stream)
    options = body.stream_options
    if options is not None and not is_stream:
        raise InvalidRequestError(
            "stream_options: only allowed with stream: true.",
            param="stream_options",
            code="invalid_value",
        )
    if is_stream and body.prompt_logprobs is not None:
        raise InvalidRequestError(
            "prompt_logprobs: not available with stream: true.",
            param="prompt_logprobs",
            code="invalid_value",
        )
    include_usage = options is not None and bool(options.include_usage)
    continuous = options is not None and bool(options.continuous_usage_stats)
    return StreamFormat(is_stream, include_usage, include_usage and continuous)


def text_rules(
    body: GenerationBody, *, echo: bool = False, shown_token_ids: frozenset[int] = frozenset()
) -> TextRules:
    """How tokens become text."""
    stop = body.stop or []
    return TextRules(
        stop=tuple(dict.fromkeys([stop] if isinstance(stop, str) else stop)),
        include_stop=bool(body.include_stop_str_in_output),
        skip_special_tokens=body.skip_special_tokens is not False,
        echo=echo,
        shown_token_ids=shown_token_ids,
    )
