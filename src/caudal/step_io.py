"""What the scheduler tells a worker for one step, and what the worker answers.

These types sit below every package so that workers never import the scheduler: in a parallel
run a rank receives nothing but `SchedulerOutput`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from caudal.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class Interrupt:
    """What ends a step early: the signal, which another process may write, is not as expected."""

    signal: NDArray[np.uint32]
    """[1]"""
    expected: int

    @property
    def is_due(self) -> bool:
        """Whether the step shall end now."""
        return int(self.signal[0]) != self.expected


class StepInterruptedError(Exception):
    """A forward pass ended early; it may be run again, to the same result."""


@dataclass(slots=True)
class NewRequestData:
    """Everything a worker needs to create a row; also sent when a preempted request returns."""

    request_id: str
    token_ids: list[int]
    """All known tokens: the prompt, then any output from before a preemption."""
    num_prompt_tokens: int
    sampling: SamplingParams
    seed: int
    block_ids: list[int]
    num_computed_tokens: int
    """Tokens whose KV is already in the blocks (prefix hit)."""


@dataclass(slots=True)
class CachedRequestData:
    """The change to a row that the worker already has."""

    request_id: str
    new_block_ids: list[int]
    """Blocks appended to the row's block table."""
    num_computed_tokens: int


@dataclass(slots=True)
class SchedulerOutput:
    """One step: which rows compute how many tokens.

    The row order of `num_scheduled_tokens` is the batch order. A row samples when
    num_computed_tokens + num_scheduled_tokens reaches the end of its known tokens
    (and its max_tokens is above 0), and once more after each guessed token.
    """

    step_id: int
    new_requests: list[NewRequestData] = field(default_factory=list)
    cached_requests: list[CachedRequestData] = field(default_factory=list)
    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)
    finished_request_ids: list[str] = field(default_factory=list)
    """Rows to drop before the step: finished, aborted or preempted since the last step."""
    draft_token_ids: dict[str, list[int]] = field(default_factory=dict)
    """Guessed tokens per request, which its row computes after its known tokens."""
    num_tokens: int = 0
    """Sum of `num_scheduled_tokens`."""
    num_decode_rows: int = 0
    """Tokens that decode: one of each row that samples, and its guessed tokens."""
    context_reads: float = 0.0
    """KV positions that its tokens attend to, as decoding rows' (see StepCostModel)."""
    predicted_ms: float = 0.0
    is_interruptible: bool = False
    """Nobody waits for its rows: it may end early, without a result, for somebody who comes."""


@dataclass(slots=True)
class TokenLogprobs:
    """Log-probabilities (natural log, unmodified distribution) at one position."""

    token_id: int
    logprob: float
    rank: int
    """1 for the most likely token."""
    top_ids: list[int]
    top_logprobs: list[float]


@dataclass(slots=True)
class ModelRunnerOutput:
    """What one step computed; requests are looked up by id."""

    sampled_token_ids: dict[str, list[int]] = field(default_factory=dict)
    """Rows that sampled; those whose guesses were right have several tokens."""
    draft_token_ids: dict[str, list[int]] = field(default_factory=dict)
    """Guesses of how rows that sampled go on, for the next step."""
    logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)
    prompt_logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)
    """Entries for the prompt positions whose *next* token's logprob this step gave."""
    complete_request_ids: set[str] = field(default_factory=set)
    """Rows that end with this step's token: the form of their output allows no other."""
    pooled: dict[str, bytes] = field(default_factory=dict)
    """Hidden states [hidden_size], float32 little-endian, of complete rows that pool."""
    errors: dict[str, str] = field(default_factory=dict)
    """Rows that failed; they fail alone."""
    is_interrupted: bool = False
    """The step ended early: rows have what was new of them, and nothing was computed."""
    prepare_ms: float = 0.0
    forward_ms: float = 0.0
    sample_ms: float = 0.0
    kernel_cpu_ms: float = 0.0
    """Processor time of all threads during the forward pass."""
