"""Gauges and counters of the scheduler."""

from __future__ import annotations

from dataclasses import dataclass, field

from caudal.scheduler.answer_lengths import AnswerLengths
from caudal.scheduler.output import FinishReason


@dataclass(slots=True)
class SchedulerCounters:
    """Counts since the start; they only grow."""

    num_preemptions: int = 0
    num_preempted_tokens: int = 0
    """Tokens computed again because of preemptions."""
    num_rejected: dict[str, int] = field(default_factory=dict)
    num_cancelled: int = 0
    num_finished: dict[str, int] = field(
        default_factory=lambda: {reason.value: 0 for reason in FinishReason}
    )
    num_prompt_tokens: int = 0
    """Of requests that have started."""
    num_output_tokens: int = 0
    num_interrupted_steps: int = 0
    """Steps of offline work that ended early for a newcomer."""
    num_drafts: int = 0
    """Rows that computed guessed tokens."""
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    """Guessed tokens that were right."""

    def count_rejected(self, reason: str) -> None:
        """Count one refused request."""
        self.num_rejected[reason] = self.num_rejected.get(reason, 0) + 1


AVERAGE_RATE = 0.1
"""Weight of the newest request in the running averages."""


MAX_STRETCH = 2.0
"""A longer pause between two steps is a hiccup."""


@dataclass(slots=True)
class TrafficAverages:
    """Running averages over recent requests, from which admission predicts waiting times."""

    prompt_tokens: float = 0.0
    """Length of a prompt; 0 before any request has started."""
    miss_ratio: float = 1.0
    """Share of a prompt that has to be computed."""
    stretch: float = 1.0
    """Time from step to step, over the time that the step itself was measured to take."""
    tokens_per_row: float = 1.0
    """Tokens that a row gets from a step in which it decodes: more than one by right guesses."""
    width: float = 1.0
    """Tokens that it computes for that."""
    lengths: AnswerLengths = field(default_factory=AnswerLengths)

    def note_start(self, num_prompt_tokens: int, num_hit_tokens: int) -> None:
        """A request has started, with part of its prompt cached."""
        rate = AVERAGE_RATE if self.prompt_tokens else 1.0
        self.prompt_tokens += rate * (num_prompt_tokens - self.prompt_tokens)
        missed = 1.0 - num_hit_tokens / num_prompt_tokens
        self.miss_ratio += AVERAGE_RATE * (missed - self.miss_ratio)

    def note_rows(self, num_rows: int, num_computed: int, num_tokens: int) -> None:
        """Rows have decoded: `num_computed` tokens for `num_tokens` that are known now."""
        self.tokens_per_row += AVERAGE_RATE * (num_tokens / num_rows - self.tokens_per_row)
        self.width += AVERAGE_RATE * (num_computed / num_rows - self.width)

    def note_step(self, cycle_ms: float, step_ms: float) -> None:
        """A step was followed by another one after `cycle_ms`."""
        if step_ms > 0:
            stretch = min(MAX_STRETCH, max(1.0, cycle_ms / step_ms))
            self.stretch += AVERAGE_RATE * (stretch - self.stretch)


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """What the scheduler contributes to the engine's stats, under the same field names."""

    num_running: int
    num_waiting: int
    num_waiting_tokens: int
    num_background_running: int
    num_background_waiting: int
    num_blocks_total: int
    num_blocks_free: int
    num_blocks_cached: int
    num_blocks_held: int
    kv_wasted_fraction: float
    num_preemptions: int
    num_preempted_tokens: int
    prefix_queries_tokens: int
    prefix_hits_tokens: int
    num_rejected: dict[str, int]
    num_cancelled: int
    num_interrupted_steps: int
    num_finished: dict[str, int]
    num_prompt_tokens: int
    num_output_tokens: int
    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    predicted_ttft_ms: float
