"""Offline use: a model in this process, no server, no event loop."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any, cast

from caudal.config import CacheConfig, EngineConfig, ParallelConfig, SchedulerConfig, WeightsConfig
from caudal.engine.core import EngineCore
from caudal.engine.messages import EngineRequest
from caudal.errors import ContextLengthError, InvalidRequestError, RequestFailedError
from caudal.executor.uniproc import UniProcExecutor
from caudal.sampling_params import SamplingParams
from caudal.scheduler.output import FinishReason, RequestOutput
from caudal.step_io import TokenLogprobs
from caudal.tokenizer import ChatTemplate, IncrementalDetokenizer, Tokenizer
from caudal.weights.download import resolve_model
from caudal.weights.gguf import GGUFFile

Messages = Sequence[dict[str, Any]]
OFFLINE_QUEUE = 1 << 40
"""Offline work is bounded by its own list, not by admission."""


@dataclass(slots=True)
class Completion:
    """The answer to one prompt."""

    prompt_token_ids: list[int]
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    num_cached_tokens: int = 0
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)


@dataclass(slots=True)
class _Open:
    """A request in flight: its completion, and the text it still holds back."""

    completion: Completion
    detokenizer: IncrementalDetokenizer


class LLM:
    """Owns an engine in this process; calls block until every prompt is answered.

    `model` is a path to a GGUF file, a known name (`smollm2-135m`) or a hub id. Not thread-safe.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        cache: CacheConfig | None = None,
        scheduler: SchedulerConfig | None = None,
        num_threads: int | None = None,
        weights: WeightsConfig | None = None,
    ) -> None:
        path = resolve_model(str(model))
        scheduler = scheduler or SchedulerConfig(ttft_ms=None, tpot_ms=None)
        scheduler = replace(
            scheduler,
            max_queue_requests=OFFLINE_QUEUE,
            max_queue_tokens=OFFLINE_QUEUE,
            max_queue_ttft_s=float(OFFLINE_QUEUE),
        )
        config = EngineConfig(
            model_path=path,
            cache=cache or CacheConfig(),
            scheduler=scheduler,
            parallel=ParallelConfig(num_threads=num_threads),
            weights=weights or WeightsConfig(),
        )
        with GGUFFile.open(path) as gguf:
            self.tokenizer = Tokenizer.from_gguf_metadata(gguf.metadata)
            self.chat_template = ChatTemplate.from_gguf_metadata(gguf.metadata, self.tokenizer)
        executor = UniProcExecutor(config)
        self.max_model_len = executor.info.memory.max_model_len
        self._core = EngineCore(config, executor)
        self._ids = count()

    def generate(
        self,
        prompts: Sequence[str | Sequence[int]],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        stop: Sequence[str] = (),
    ) -> list[Completion]:
        """Continue each prompt (text or token ids) -> completions in the same order.

        `sampling` is one for all or one per prompt. Raises ContextLengthError for a prompt that
        leaves no room, RequestFailedError if a request fails.
        """
        if isinstance(prompts, str):
            raise InvalidRequestError("prompts: expected a list, got one string", param="prompts")
        ids = [
            self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
            for prompt in prompts
        ]
        return self._run(ids, sampling, stop)

    def chat(
        self,
        conversations: Messages | Sequence[Messages],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        stop: Sequence[str] = (),
    ) -> list[Completion]:
        """Answer one conversation, or each of several, through the model's chat template."""
        is_one = _is_conversation(conversations)
        many = cast("Sequence[Messages]", [conversations] if is_one else conversations)
        return self._run([self._render(messages) for messages in many], sampling, stop)

    def stream_chat(
        self,
        messages: Messages,
        sampling: SamplingParams | None = None,
        *,
        stop: Sequence[str] = (),
    ) -> Iterator[Completion]:
        """Answer one conversation, yielding the same growing completion after each step.

        Closing the iterator early stops the answer. Raises as `chat` does.
        """
        (completion,), open_requests = self._submit([self._render(messages)], sampling, stop)
        try:
            while open_requests:
                self._step(open_requests)
                yield completion
        finally:
            self._abort_all(open_requests)

    def _render(self, messages: Messages) -> list[int]:
        prompt = self.chat_template.render(messages, add_generation_prompt=True)
        return self.tokenizer.encode_prompt(prompt)

    def _run(
        self,
        prompts: list[list[int]],
        sampling: SamplingParams | Sequence[SamplingParams] | None,
        stop: Sequence[str],
    ) -> list[Completion]:
        completions, open_requests = self._submit(prompts, sampling, stop)
        try:
            while open_requests:
                self._step(open_requests)
        finally:
            self._abort_all(open_requests)
        return completions

    def _submit(
        self,
        prompts: list[list[int]],
        sampling: SamplingParams | Sequence[SamplingParams] | None,
        stop: Sequence[str],
    ) -> tuple[list[Completion], dict[str, _Open]]:
        """Hand every prompt to the engine, or none of them."""
        each = self._per_prompt(prompts, sampling)
        open_requests: dict[str, _Open] = {}
        completions: list[Completion] = []
        requests: list[EngineRequest] = []
        for ids, params in zip(prompts, each, strict=True):
            completion = Completion(prompt_token_ids=ids)
            request_id = f"offline-{next(self._ids)}"
            detokenizer = IncrementalDetokenizer(self.tokenizer, stop=list(stop))
            open_requests[request_id] = _Open(completion, detokenizer)
            completions.append(completion)
            request = EngineRequest(
                request_id=request_id, prompt_token_ids=ids, sampling=self._clamp(ids, params)
            )
            requests.append(request)
        for grammar in self._core.prepare(requests):
            grammar.result()
        for request in requests:
            for refusal in self._core.add_requests([request]):
                self._abort_all(open_requests)
                raise InvalidRequestError(refusal.message, param="prompt")
        return completions, open_requests

    def _step(self, open_requests: dict[str, _Open]) -> None:
        with _whole_step():
            self._deliver(self._core.step(), open_requests)

    def _deliver(self, outputs: list[RequestOutput], open_requests: dict[str, _Open]) -> None:
        """Append new tokens to their completions; close what ended or hit a stop string."""
        for output in outputs:
            entry = open_requests.get(output.request_id)
            if entry is None:
                continue
            if output.finish_reason is FinishReason.ERROR:
                raise RequestFailedError(output.error or "the request failed")
            completion = entry.completion
            is_final = output.finish_reason is not None
            completion.token_ids += output.new_token_ids
            completion.logprobs += output.logprobs or []
            completion.prompt_logprobs += output.prompt_logprobs or []
            completion.num_cached_tokens = output.num_cached_tokens
            delta = entry.detokenizer.push(output.new_token_ids, final=is_final)
            completion.text += delta.text
            completion.finish_reason = output.finish_reason
            if delta.stopped_by is not None:
                completion.finish_reason = FinishReason.STOP
                if not is_final:
                    self._core.abort([output.request_id], is_answered=True)
            if completion.finish_reason is not None:
                del open_requests[output.request_id]

    def _abort_all(self, open_requests: dict[str, _Open]) -> None:
        """Leave the engine idle: nothing of this call may outlive it."""
        self._core.abort(list(open_requests))
        while self._core.has_work:
            with _whole_step():
                self._core.step()

    def _per_prompt(
        self, prompts: list[list[int]], sampling: SamplingParams | Sequence[SamplingParams] | None
    ) -> Sequence[SamplingParams]:
        if sampling is None or isinstance(sampling, SamplingParams):
            return [sampling or SamplingParams()] * len(prompts)
        if len(sampling) != len(prompts):
            raise InvalidRequestError(
                f"sampling: got {len(sampling)} entries for {len(prompts)} prompts",
                param="sampling",
            )
        return sampling

    def _clamp(self, ids: list[int], params: SamplingParams) -> SamplingParams:
        """`params` with max_tokens that fit behind the prompt."""
        if not ids:
            raise InvalidRequestError("prompt: must hold at least one token", param="prompt")
        room = self.max_model_len - len(ids)
        if room < min(1, params.max_tokens):
            raise ContextLengthError(len(ids), self.max_model_len, params.max_tokens)
        return params if params.max_tokens <= room else _with_max_tokens(params, room)


@contextmanager
def _whole_step() -> Iterator[None]:
    """Hold Ctrl-C back until the step is over: half a step leaves schedule and rows apart."""
    is_main = threading.current_thread() is threading.main_thread()
    previous = signal.getsignal(signal.SIGINT) if is_main else None
    if previous is None:  # another thread, or a handler that Python did not install
        yield
        return
    held: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _frame: held.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
        if held:
            signal.raise_signal(signal.SIGINT)


def _with_max_tokens(params: SamplingParams, max_tokens: int) -> SamplingParams:
    fields = {name: getattr(params, name) for name in params.__struct_fields__}
    return SamplingParams(**{**fields, "max_tokens": max_tokens})


def _is_conversation(value: Messages | Sequence[Messages]) -> bool:
    return len(value) > 0 and isinstance(value[0], dict)
