"""How much batch work of a key may wait at once; its interactive limits do not count that."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from caudal.errors import InvalidRequestError, RequestError
from caudal.server.batch.records import BatchRecord, BatchStatus
from caudal.server.keys import KeyLimits
from caudal.server.model import ServedModel
from caudal.tokenizer.gguf_tokenizer import Tokenizer

PROMPT_FIELDS: Final = ("messages", "prompt", "input", "instructions", "tools", "functions")


@dataclass(frozen=True, slots=True)
class Excess:
    """What a file asks for beyond the allowance."""

    code: str
    message: str


@dataclass(frozen=True, slots=True)
class Allowance:
    """What a new batch of a key may hold beside the key's unfinished ones."""

    limits: KeyLimits
    num_requests: int
    """Of the unfinished batches, those that have not ended."""
    num_tokens: int
    """Prompt tokens of those."""
    tokenizer: Tokenizer
    count: Callable[[bytes], int]
    """Tokens of the prompt that a body makes. Raises RequestError for one that is refused."""

    @property
    def counts_tokens(self) -> bool:
        """Whether tokens are limited; counting them takes time."""
        return self.limits.max_batch_tokens is not None

    def count_tokens(self, body: bytes) -> int:
        """Tokens of a request's prompt as the model will read it, the template's included.

        A body that its endpoint will refuse counts as far as it can be read.
        """
        try:
            return self.count(body)
        except RequestError:
            return self._count_texts(body)

    def _count_texts(self, body: bytes) -> int:
        try:
            fields: dict[str, Any] = msgspec.json.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return 0
        todo: list[Any] = [fields[name] for name in PROMPT_FIELDS if name in fields]
        num_tokens = 0
        while todo:
            value = todo.pop()
            if isinstance(value, str):
                num_tokens += self._count_text(value)
            elif isinstance(value, list):
                todo += value
            elif isinstance(value, dict):
                todo += value.values()
            elif isinstance(value, int) and not isinstance(value, bool):
                num_tokens += 1  # a token id
        return num_tokens

    def _count_text(self, text: str) -> int:
        try:
            return len(self.tokenizer.encode(text, add_bos=False))
        except InvalidRequestError:
            return 0

    def excess(self, num_requests: int, num_tokens: int) -> Excess | None:
        """What is too much of a file that has so much, as far as it was read; None if it fits."""
        pairs = (
            ("request", "max_batch_requests", self.num_requests, num_requests),
            ("token", "max_batch_tokens", self.num_tokens, num_tokens),
        )
        for unit, name, num_enqueued, num_new in pairs:
            limit: int | None = getattr(self.limits, name)
            if limit is None or num_enqueued + num_new <= limit:
                continue
            advice = (
                "Split the input file."
                if num_new > limit
                else "Try again once some of your batches have ended."
            )
            return Excess(
                f"{unit}_limit_exceeded",
                f"Enqueued {unit} limit reached: {name} of this API key is {limit}, {num_enqueued} "
                f"{unit}s are enqueued and the input file has at least {num_new}. {advice}",
            )
        return None


def make_allowance(
    limits: KeyLimits,
    others: Iterable[BatchRecord],
    model: Callable[[], ServedModel],
    count: Callable[[bytes], int],
) -> Allowance | None:
    """What a key may hold beside its `others`, whose counts are of now; None: no limit.

    `count` as in Allowance.
    """
    if limits.max_batch_requests is None and limits.max_batch_tokens is None:
        return None
    num_requests = num_tokens = 0
    for record in others:
        if record.status is not BatchStatus.IN_PROGRESS or not record.num_total:
            continue
        num_left = record.num_total - record.num_completed - record.num_failed
        num_requests += num_left
        num_tokens += record.num_prompt_tokens * num_left // record.num_total
    return Allowance(limits, num_requests, num_tokens, model().tokenizer, count)
