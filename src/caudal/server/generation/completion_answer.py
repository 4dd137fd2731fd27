"""Answers of `/v1/completions`."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from caudal.errors import RequestError
from caudal.server.generation.answer import ChunkFrame, usage_so_far
from caudal.server.generation.choice import Choice
from caudal.server.generation.logprobs import CompletionLogprobsWriter, prompt_logprobs
from caudal.server.generation.plan import GenerationPlan
from caudal.server.model import ServedModel
from caudal.server.protocol.common import Usage
from caudal.server.protocol.completions import CompletionLogprobs
from caudal.server.sse import DONE, SERVER_SENT_EVENTS, error_event

_encode = msgspec.json.encode


class _ChoiceBody(msgspec.Struct, omit_defaults=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | None
    prompt_logprobs: msgspec.Raw | None = None


class _ResponseBody(msgspec.Struct, omit_defaults=True):
    id: str
    object: str
    created: int
    model: str
    choices: list[_ChoiceBody]
    usage: Usage
    service_tier: str | None = None


class CompletionAnswerWriter:
    """Implements AnswerWriter for text completions."""

    stream_type = SERVER_SENT_EVENTS

    def __init__(self, plan: GenerationPlan, model: ServedModel, created: int) -> None:
        self._plan = plan
        self._model = model
        self._created = created
        self._writers: dict[int, CompletionLogprobsWriter] = {}
        self._continuous = plan.stream.continuous_usage
        self._is_plain = plan.num_logprobs is None and not self._continuous
        has_usage = plan.stream.include_usage
        self._frame = ChunkFrame(
            plan.request_id,
            "text_completion",
            created,
            model.name,
            usage=has_usage,
            tier=plan.service_tier,
        )
        tail = b',"logprobs":null,"finish_reason":null}],"usage":null}\n\n'
        self._plain_tail = tail if has_usage else tail.replace(b',"usage":null', b"")
        self._plain_heads = [
            self._frame.head + b'{"index":%d,"text":' % index
            for index in range(len(plan.prompts) * plan.n)
        ]

    def opening(self, choices: Sequence[Choice]) -> bytes:
        """Nothing: the first chunk brings text."""
        return b""

    def chunk(self, choice: Choice, text: str) -> bytes:
        """See AnswerWriter.chunk."""
        if self._is_plain:
            return self._plain_heads[choice.index] + _encode(text) + self._plain_tail
        return self._event(choice, text, finish=None)

    def last_chunk(self, choice: Choice, text: str) -> bytes:
        """See AnswerWriter.last_chunk."""
        return self._event(choice, text, finish=str(choice.finish_reason))

    def _event(self, choice: Choice, text: str, finish: str | None) -> bytes:
        body = _ChoiceBody(choice.index, text, self._logprobs(choice), finish, choice.stop_reason)
        return self._frame.event(_encode(body), usage_so_far(choice) if self._continuous else None)

    def ending(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        """See AnswerWriter.ending."""
        return (self._frame.event(b"", usage) if self._plan.stream.include_usage else b"") + DONE

    def failure(self, error: RequestError) -> bytes:
        """See AnswerWriter.failure."""
        return error_event(error)

    def response(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        """See AnswerWriter.response."""
        bodies = [self._whole(choice) for choice in choices]
        plan = self._plan
        body = _ResponseBody(
            plan.request_id, "text_completion", self._created, self._model.name, bodies, usage
        )
        body.service_tier = plan.service_tier
        return _encode(body)

    def _whole(self, choice: Choice) -> _ChoiceBody:
        body = _ChoiceBody(
            choice.index,
            "".join(choice.texts),
            self._logprobs(choice),
            str(choice.finish_reason),
            choice.stop_reason,
        )
        num_top = self._plan.num_prompt_logprobs
        if num_top is not None:
            body.prompt_logprobs = prompt_logprobs(
                self._model, choice.prompt_logprobs or [], num_top
            )
        return body

    def _logprobs(self, choice: Choice) -> CompletionLogprobs | None:
        """Entries not yet written; an echoed prompt's come first."""
        num_top = self._plan.num_logprobs
        if num_top is None:
            return None
        entries = choice.take_logprobs()
        writer = self._writers.get(choice.index)
        if writer is not None:
            return writer.write(entries)
        writer = self._writers[choice.index] = CompletionLogprobsWriter(self._model, num_top)
        if not self._plan.text.echo:
            return writer.write(entries)
        return writer.write(
            [*(choice.prompt_logprobs or []), *entries], first_token_id=choice.prompt.token_ids[0]
        )
