"""One choice of an answer: its text so far, why it ended, and what it cost."""

from __future__ import annotations

from collections.abc import Sequence

from caudal.metrics.server_metrics import RequestTiming
from caudal.scheduler.output import FinishReason, RequestOutput
from caudal.server.generation.plan import GenerationPlan, Prompt
from caudal.server.model import ServedModel
from caudal.server.parsers.output_parser import OutputParser
from caudal.server.parsers.parts import Part, merged
from caudal.step_io import TokenLogprobs
from caudal.tokenizer.detokenizer import DetokenizedDelta, IncrementalDetokenizer


class Choice:
    """Turns the engine's outputs of one request into text; owns its detokenizer.

    `feed` returns text that is safe to send: never part of a stop string, never half a character.
    With a parser all text goes to `parts` instead.
    """

    __slots__ = (
        "_detokenizer",
        "_include_stop",
        "_parser",
        "_stop_token_ids",
        "_unsent_prompt",
        "finish_reason",
        "index",
        "logprobs",
        "num_cached_tokens",
        "num_output_tokens",
        "parts",
        "pooled",
        "prompt",
        "prompt_logprobs",
        "request_id",
        "stop_reason",
        "texts",
        "timing",
    )

    def __init__(
        self, plan: GenerationPlan, model: ServedModel, index: int, request_id: str
    ) -> None:
        rules = plan.text
        self.index = index
        self.request_id = request_id
        self.prompt: Prompt = plan.prompts[index // plan.n]
        self.timing = RequestTiming(plan.arrival)
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None
        self.num_output_tokens = 0
        self.num_cached_tokens = 0
        self.texts: list[str] = []
        self.parts: list[Part] = []
        """Those that are not taken yet."""
        self.logprobs: list[TokenLogprobs] = []
        self.prompt_logprobs: list[TokenLogprobs] | None = None
        self.pooled: bytes | None = None
        self._unsent_prompt = self.prompt.text if rules.echo else ""
        self._include_stop = rules.include_stop
        self._parser = None if plan.output is None else OutputParser(plan.output)
        self._stop_token_ids = plan.sampling.stop_token_ids
        self._detokenizer = IncrementalDetokenizer(
            model.tokenizer,
            stop=rules.stop,
            include_stop=rules.include_stop,
            skip_special=rules.skip_special_tokens,
            initial_ids=self.prompt.token_ids,
            min_tokens=plan.sampling.min_tokens,
        )
        self._detokenizer.show_special(rules.shown_token_ids)

    @property
    def outcome(self) -> str:
        """Why the choice ended, as the chat API tells it."""
        is_stopped = self.finish_reason is FinishReason.STOP
        if is_stopped and self._parser is not None and self._parser.has_calls:
            return "tool_calls"
        return str(self.finish_reason)

    @property
    def num_reasoning_tokens(self) -> int:
        """Output tokens that the model thought with."""
        return 0 if self._parser is None else self._parser.num_reasoning_tokens

    def feed(self, output: RequestOutput) -> str:
        """Take one output; returns the text that became sendable ("" for none yet)."""
        token_ids = visible = output.new_token_ids
        reason = output.finish_reason
        if output.stop_token_id is not None and not self._include_stop:
            visible = token_ids[:-1]
        parser = self._parser
        if parser is None:
            delta = self._detokenizer.push(visible, final=reason is not None)
        else:
            delta = self._parse(parser, visible, is_last=reason is not None)
        num_new = len(token_ids)
        if delta.stopped_by is not None or (parser is not None and parser.is_done):
            # Tokens after the one that completes a stop string or the last call do not count.
            num_new = delta.num_tokens_used
            self.finish_reason = FinishReason.STOP
            self.stop_reason = delta.stopped_by
        elif reason is not None:
            self.finish_reason = reason
            self.pooled = output.pooled
            if output.stop_token_id in self._stop_token_ids:
                self.stop_reason = output.stop_token_id
        self.num_output_tokens += num_new
        if output.num_cached_tokens:
            self.num_cached_tokens = output.num_cached_tokens
        if output.logprobs is not None:
            self.logprobs.extend(output.logprobs[:num_new])
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = output.prompt_logprobs
        if self._unsent_prompt:
            prompt, self._unsent_prompt = self._unsent_prompt, ""
            return prompt + delta.text
        return delta.text

    def _parse(
        self, parser: OutputParser, token_ids: Sequence[int], *, is_last: bool
    ) -> DetokenizedDelta:
        """Token by token, so that it does not matter how many come at once; all text is parsed."""
        detokenizer = self._detokenizer
        stopped_by: str | None = None
        num_used = 0
        for token_id in token_ids:
            text, stopped_by, _ = detokenizer.push((token_id,))
            self.parts += parser.push_token(text)
            num_used += 1
            if stopped_by is not None or parser.is_done:
                break
        if is_last or stopped_by is not None or parser.is_done:
            text = ""
            if stopped_by is None and not parser.is_done:
                text, stopped_by, _ = detokenizer.push((), final=True)
            self.parts += parser.finish(text)
        return DetokenizedDelta("", stopped_by, num_used)

    def take_parts(self) -> list[Part]:
        """Parts since the last call."""
        taken, self.parts = self.parts, []
        return merged(taken)

    def take_logprobs(self) -> list[TokenLogprobs]:
        """Entries since the last call."""
        taken, self.logprobs = self.logprobs, []
        return taken
