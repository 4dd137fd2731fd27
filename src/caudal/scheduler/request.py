"""A request as the scheduler sees it: its tokens, its progress and how it will end."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

from caudal.sampling_params import SamplingParams
from caudal.scheduler.output import FinishReason
from caudal.scheduler.service_class import PRIORITY_BAND, ServiceClass
from caudal.step_io import TokenLogprobs


@dataclass(slots=True, eq=False)
class SiblingGroup:
    """What requests of one parent with the same prompt have in common."""

    num_cached_tokens: int | None = None
    """Prompt tokens cached before the first of them ran; None until then."""


class RequestStatus(IntEnum):
    """Where a request is; everything from FINISHED_STOP on is terminal."""

    WAITING = 0
    RUNNING = 1
    PREEMPTED = 2
    """Waiting again after losing its blocks."""
    FINISHED_STOP = 3
    FINISHED_LENGTH = 4
    FINISHED_ABORT = 5
    FINISHED_ERROR = 6
    FINISHED_TIMEOUT = 7


FINISHED_STATUS: dict[FinishReason, RequestStatus] = {
    FinishReason.STOP: RequestStatus.FINISHED_STOP,
    FinishReason.LENGTH: RequestStatus.FINISHED_LENGTH,
    FinishReason.ABORT: RequestStatus.FINISHED_ABORT,
    FinishReason.ERROR: RequestStatus.FINISHED_ERROR,
    FinishReason.TIMEOUT: RequestStatus.FINISHED_TIMEOUT,
}


@dataclass(slots=True, eq=False)
class Request:
    """One sequence; `n > 1` is several of these with one `parent_id`.

    The caller gives the fields up to `deadline`; the rest belongs to the scheduler.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    arrival_time: float
    """Seconds, on the clock of the scheduler's `now`."""
    priority: int = 0
    """Lower runs first. The caller's priority counts within a class: its band is added here."""
    namespace: str = ""
    parent_id: str | None = None
    service: ServiceClass = ServiceClass.INTERACTIVE
    tenant: str = ""
    """Who shares the machine fairly with others: requests of equal priority take turns by it."""
    weight: float = 1.0
    """The tenant's share of the machine, relative to that of others."""
    deadline: float | None = None
    """When the request ends with `timeout` if it has not ended before; as `arrival_time`."""

    is_background: bool = field(init=False)
    """It yields seats, blocks and time to all requests that are not."""
    status: RequestStatus = field(init=False, default=RequestStatus.WAITING)
    token_ids: list[int] = field(init=False)
    """All known tokens: prompt, then output."""
    num_prompt_tokens: int = field(init=False)
    num_computed_tokens: int = field(init=False, default=0)
    """Tokens whose KV is in the request's blocks."""
    num_cached_tokens: int = field(init=False, default=0)
    """For the API: prompt tokens cached before the request (or its first sibling) first ran."""
    num_slots: int = field(init=False, default=0)
    """Token slots of the request's block table."""
    num_preemptions: int = field(init=False, default=0)
    num_preempted_tokens: int = field(init=False, default=0)
    """Tokens that preemptions made the request compute again."""
    num_lost_tokens: int = field(init=False, default=0)
    """Computed tokens given up by the latest preemption, until readmission tells what is left."""
    siblings: SiblingGroup | None = field(init=False, default=None)
    seed: int = field(init=False, default=0)
    arrival_index: int = field(init=False, default=0)
    """Order of arrival; a preempted request keeps its place."""
    is_prompt_only: bool = field(init=False)
    """max_tokens is 0: no row of this request ever samples."""
    max_total_tokens: int = field(init=False, default=0)
    """Known tokens at which the request ends for its length."""
    stop_token_ids: frozenset[int] = field(init=False, default=frozenset())
    """The model's end-of-generation ids (unless ignored) and the request's own."""
    first_scheduled_time: float | None = field(init=False, default=None)
    has_output: bool = field(init=False, default=False)
    """A first output has left, with the queue time and the prompt logprobs."""
    is_streaming: bool = field(init=False, default=False)
    """After the first output, where further ones carry tokens only (no logprobs)."""
    prompt_logprobs: list[TokenLogprobs] | None = field(init=False, default=None)
    """Collected until the first output."""
    block_keys: list[bytes] | None = field(init=False, default=None)
    """Keys of the full blocks of the known tokens, kept while waiting."""
    drafts: list[int] = field(init=False, default_factory=list)
    """Guesses of the tokens after the known ones."""
    num_drafts_right: float = field(init=False, default=0.0)
    num_drafts_judged: float = field(init=False, default=0.0)
    """How often guesses were right lately, and how many were judged: both fade."""
    num_prepaid: float = field(init=False, default=0.0)
    """Output tokens that the tenant was charged for in advance."""

    def __post_init__(self) -> None:
        self.priority += self.service * PRIORITY_BAND
        self.is_background = self.service.is_background
        self.token_ids = list(self.prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.is_prompt_only = self.sampling.max_tokens == 0
        if self.sampling.num_prompt_logprobs is not None:
            self.prompt_logprobs = []

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_tokens_left(self) -> int:
        """Known tokens still to compute."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def num_slots_at_most(self) -> int:
        """KV slots when the request runs to its length limit (the last token needs none)."""
        return max(self.num_prompt_tokens, self.max_total_tokens - 1)

    @property
    def is_finished(self) -> bool:
        """Whether the terminal output exists."""
        return self.status >= RequestStatus.FINISHED_STOP

    @property
    def order(self) -> tuple[int, int]:
        """Sort key of service: priority, then arrival."""
        return self.priority, self.arrival_index

    @property
    def must_compute_prompt(self) -> bool:
        """Something of each prompt position is owed (logprobs, its hidden state), so none may
        come from the cache."""
        if self.has_output:
            return False
        return self.prompt_logprobs is not None or self.sampling.pooling == "mean"


def accept_tokens(
    request: Request, sampled_token_ids: list[int]
) -> tuple[list[int], FinishReason | None]:
    """Append sampled tokens to the request until one ends it; the rest is dropped.

    Returns the tokens kept and why the request ended, if it did. A stop id before `min_tokens`
    output tokens does not end the request (the sampler makes it impossible anyway).
    """
    token_ids = request.token_ids
    stop_ids = request.stop_token_ids
    min_length = request.num_prompt_tokens + request.sampling.min_tokens
    for count, token_id in enumerate(sampled_token_ids, 1):
        token_ids.append(token_id)
        length = len(token_ids)
        if token_id in stop_ids and length > min_length:
            return sampled_token_ids[:count], FinishReason.STOP
        if length >= request.max_total_tokens:
            return sampled_token_ids[:count], FinishReason.LENGTH
    return sampled_token_ids, None
