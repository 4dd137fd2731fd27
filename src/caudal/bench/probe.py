"""First contact: is there a server, does it take the key and the model, how does it count."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from typing import Any

import aiohttp

from caudal.bench.client import CONNECT_TIMEOUT_S, Clock, error_message, send_request
from caudal.bench.record import FailureKind, RequestRecord
from caudal.bench.target import Target, TargetOptions, parse_url
from caudal.bench.words import Calibration, make_words
from caudal.errors import CaudalError, ConfigError

SHORT_PROBE, LONG_PROBE = 10, 110
"""Words."""
PROBE_OUTPUT_TOKENS = 2


async def connect(
    session: aiohttp.ClientSession, options: TargetOptions
) -> tuple[Target, Calibration]:
    """A target that has answered two requests, and how it counts tokens.

    Raises CaudalError saying what to change: address, key, model or endpoint.
    """
    base_url = parse_url(options.url)
    models = await _list_models(session, base_url, options)
    model = options.model or (models[0] if models else None)
    if model is None:
        raise CaudalError(f"{base_url} does not list its models: name one with --model")
    target = Target(base_url, model, options)
    first_failure: RequestRecord | None = None
    # Fields that not every server knows are left out one by one.
    for ignore_eos, stream_options in ((True, True), (False, True), (False, False)):
        target = replace(
            target, accepts_ignore_eos=ignore_eos, accepts_stream_options=stream_options
        )
        record = await _probe(session, target, SHORT_PROBE)
        if record.is_ok:
            return target, await _calibrate(session, target, record)
        first_failure = first_failure or record
        if record.status not in (400, 422):
            break
    assert first_failure is not None
    raise _explain(first_failure, target, models)


async def _calibrate(
    session: aiohttp.ClientSession, target: Target, short: RequestRecord
) -> Calibration:
    long = await _probe(session, target, LONG_PROBE)
    return Calibration.fit(
        (SHORT_PROBE, short.num_prompt_tokens), (LONG_PROBE, long.num_prompt_tokens)
    )


async def _probe(session: aiohttp.ClientSession, target: Target, num_words: int) -> RequestRecord:
    record = RequestRecord(0, 0, 0.0)
    message = {"role": "user", "content": make_words(num_words, "probe")}
    body = target.body([message], PROBE_OUTPUT_TOKENS)
    await send_request(session, target, body, record, Clock())
    return record


async def _list_models(
    session: aiohttp.ClientSession, base_url: str, options: TargetOptions
) -> list[str]:
    try:
        timeout = aiohttp.ClientTimeout(total=CONNECT_TIMEOUT_S)
        async with session.get(f"{base_url}/models", timeout=timeout) as response:
            status, body = response.status, await response.read()
    except TimeoutError:
        raise CaudalError(f"--url: {base_url} gave no answer in {CONNECT_TIMEOUT_S:g} s") from None
    except (aiohttp.ClientError, OSError) as error:
        raise CaudalError(
            f"--url: cannot reach {base_url}: {_reason(error)}; is the server running?"
        ) from None
    if status in (401, 403):
        raise CaudalError(f"--api-key: {base_url} refuses it: {error_message(body)}")
    if status != 200:
        if options.model:
            return []
        raise CaudalError(
            f"--url: {base_url}/models answers HTTP {status}; is this an OpenAI-compatible "
            "server? If it only does not list its models, name one with --model"
        )
    return _parse_models(base_url, body)


def _reason(error: Exception) -> str:
    number = getattr(error, "errno", None)
    return os.strerror(number) if number and number > 0 else str(error) or type(error).__name__


def _parse_models(base_url: str, body: bytes) -> list[str]:
    try:
        listed: Any = json.loads(body)["data"]
        return [str(model["id"]) for model in listed]
    except (ValueError, LookupError, TypeError):
        raise CaudalError(f"--url: {base_url}/models does not answer as OpenAI does") from None


def _explain(record: RequestRecord, target: Target, models: list[str]) -> CaudalError:
    """What a failed first request means for whoever typed the command."""
    said = record.message
    if record.status in (401, 403):
        return CaudalError(f"--api-key: {target.base_url} refuses it: {said}")
    if models and target.model not in models:
        known = ", ".join(models[:10])
        return ConfigError(f"--model: {target.base_url} serves {known}, not {target.model}: {said}")
    if record.status == 404:
        return CaudalError(f"--endpoint: {target.url} answers HTTP 404: {said}")
    if record.failure is FailureKind.CONNECTION:
        return CaudalError(f"--url: cannot reach {target.url}: {said}")
    status = f"HTTP {record.status}: " if record.status and record.status != 200 else ""
    return CaudalError(f"{target.url} cannot be measured: {status}{said or record.failure}")
