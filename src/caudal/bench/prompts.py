"""The conversations of each level: from a recipe, a file of requests or a trace."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

from caudal.bench.load import Load
from caudal.bench.sources import create_replay, read_jsonl, read_trace, salted
from caudal.bench.words import Calibration
from caudal.bench.workload import (
    DEFAULT_NUM_PROMPTS,
    RECIPES,
    Conversation,
    WorkloadOptions,
    create_conversations,
)
from caudal.errors import ConfigError

CLOSED_LOOP_REQUESTS_PER_S = 50
"""Prompts prepared for a closed loop that is bounded by time alone."""
MAX_PREPARED = 20_000
_WARMUP_SEED = 7_654_321


class Prompts:
    """Makes the same conversations for every level, but for the salt. Raises ConfigError."""

    def __init__(self, options: WorkloadOptions, calibration: Calibration) -> None:
        if options.jsonl and options.trace:
            raise ConfigError("--jsonl, --trace: only one of them")
        self._options = options
        self._calibration = calibration
        self._requests = read_jsonl(options) if options.jsonl else []
        self._rows = read_trace(options) if options.trace else []

    @property
    def is_trace(self) -> bool:
        """Whether conversations bring their own arrival times."""
        return bool(self._rows)

    @property
    def summary(self) -> str:
        """What is asked, in words."""
        options = self._options
        if options.jsonl:
            return f"{len(self._requests)} requests of {options.jsonl}"
        if options.trace:
            return f"{len(self._rows)} requests at the times of {options.trace}"
        lengths = [
            f"{value} tokens {name}"
            for name, value in (("in", options.input_len), ("out", options.output_len))
            if value is not None
        ]
        changed = f"; here {' and '.join(lengths)}" if lengths else ""
        return f"{options.workload}: {RECIPES[options.workload].summary}{changed}"

    def num_for(self, load: Load) -> int:
        """Conversations of one level."""
        known = len(self._requests) or len(self._rows)
        if known or self._options.num_prompts:
            return known or self._options.num_prompts or 0
        if load.duration_s is None:
            return DEFAULT_NUM_PROMPTS
        if load.rate is None or math.isinf(load.rate):
            wanted = CLOSED_LOOP_REQUESTS_PER_S * load.duration_s
        else:
            mean = load.rate * load.duration_s
            # Enough arrivals to fill the time even if this seed's gaps are short.
            wanted = mean + 6 * math.sqrt(mean / min(1.0, load.burstiness)) + 8
        return min(MAX_PREPARED, math.ceil(wanted))

    def create(self, num_conversations: int, salt: str) -> list[Conversation]:
        """The first so many; files are repeated from their start if they are too short."""
        if self._rows:
            rows = self._rows[:num_conversations]
            return create_replay(self._options, rows, self._calibration, salt)
        if self._requests:
            chosen = itertools.islice(itertools.cycle(self._requests), num_conversations)
            return [
                salted(request, f"{salt} {index}" if salt else "")
                for index, request in enumerate(chosen)
            ]
        return create_conversations(self._options, num_conversations, self._calibration, salt)

    def create_warmup(self, num_conversations: int, salt: str) -> list[Conversation]:
        """Of the same kind, but never those that are measured; all start at once."""
        other = replace(self._options, seed=self._options.seed + _WARMUP_SEED)
        if self._rows or self._requests:
            made = self.create(num_conversations, salt)
            return [replace(conversation, start_s=None) for conversation in made]
        return create_conversations(other, num_conversations, self._calibration, salt)


def primers(conversations: list[Conversation]) -> list[Conversation]:
    """Opening questions with one token of answer each: they fill the server's prefix cache."""
    return [
        Conversation((replace(conversation.turns[0], num_output_tokens=1),))
        for conversation in conversations
    ]
