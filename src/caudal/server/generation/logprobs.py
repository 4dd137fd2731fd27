"""Log-probabilities in the shapes of the two APIs and of vLLM's `prompt_logprobs`."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from caudal.server.model import ServedModel
from caudal.server.protocol.chat import ChatLogprobs, ChatTokenLogprob, ChatTopLogprob
from caudal.server.protocol.common import PromptLogprob
from caudal.server.protocol.completions import CompletionLogprobs
from caudal.step_io import TokenLogprobs

LOWEST = -9999.0
"""Stands for minus infinity, which JSON cannot write."""


def finite(logprob: float) -> float:
    """`logprob` within what JSON and its readers can hold; NaN counts as impossible."""
    return logprob if logprob >= LOWEST else LOWEST


def chat_logprobs(
    model: ServedModel, entries: Sequence[TokenLogprobs], num_top: int
) -> ChatLogprobs:
    """The chat shape: `num_top` alternatives at each token."""
    token_bytes = model.tokenizer.token_bytes
    content = [
        ChatTokenLogprob(
            token=model.tokenizer.token_text(entry.token_id),
            logprob=finite(entry.logprob),
            bytes=list(token_bytes(entry.token_id)),
            top_logprobs=[
                ChatTopLogprob(model.tokenizer.token_text(i), finite(logprob), list(token_bytes(i)))
                for i, logprob in zip(
                    entry.top_ids[:num_top], entry.top_logprobs[:num_top], strict=True
                )
            ],
        )
        for entry in entries
    ]
    return ChatLogprobs(content)


class CompletionLogprobsWriter:
    """The legacy shape, in parts: offsets go on from one part to the next."""

    def __init__(self, model: ServedModel, num_top: int) -> None:
        self._model = model
        self._num_top = num_top
        self._offset = 0

    def write(
        self, entries: Sequence[TokenLogprobs], *, first_token_id: int | None = None
    ) -> CompletionLogprobs:
        """One part; `first_token_id` puts a token without a log-probability in front."""
        offsets: list[int] = []
        tokens: list[str] = []
        logprobs: list[float | None] = []
        tops: list[dict[str, float] | None] = []
        if first_token_id is not None:
            text = self._token_text(first_token_id)
            tokens.append(text)
            offsets.append(self._offset)
            logprobs.append(None)
            tops.append(None)
            self._offset += len(text)
        for entry in entries:
            text = self._token_text(entry.token_id)
            tokens.append(text)
            offsets.append(self._offset)
            logprobs.append(finite(entry.logprob))
            tops.append(self._top(entry, text))
            self._offset += len(text)
        return CompletionLogprobs(offsets, logprobs, tokens, tops)

    def _top(self, entry: TokenLogprobs, text: str) -> dict[str, float]:
        pairs = zip(
            entry.top_ids[: self._num_top], entry.top_logprobs[: self._num_top], strict=True
        )
        top = {self._token_text(i): finite(logprob) for i, logprob in pairs}
        top.setdefault(text, finite(entry.logprob))
        return top

    def _token_text(self, token_id: int) -> str:
        """Text of a token; bytes that are no characters are written out, so that keys differ."""
        data = self._model.tokenizer.token_bytes(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def prompt_logprobs(
    model: ServedModel, entries: Sequence[TokenLogprobs], num_top: int
) -> msgspec.Raw:
    """vLLM's shape as encoded JSON: null for the first token, then candidates by token id.

    Encoded entry by entry, so that a long prompt never exists as millions of objects.
    """
    encode = msgspec.json.Encoder().encode
    parts = [b"null"]
    for entry in entries:
        candidates = {
            str(token_id): PromptLogprob(
                finite(logprob), rank, model.tokenizer.token_text(token_id)
            )
            for rank, (token_id, logprob) in enumerate(
                zip(entry.top_ids[:num_top], entry.top_logprobs[:num_top], strict=True), start=1
            )
        }
        own = str(entry.token_id)
        if own not in candidates:
            candidates[own] = PromptLogprob(
                finite(entry.logprob), entry.rank, model.tokenizer.token_text(entry.token_id)
            )
        parts.append(encode(candidates))
    return msgspec.Raw(b"[" + b",".join(parts) + b"]")
