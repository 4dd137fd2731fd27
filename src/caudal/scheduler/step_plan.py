"""One step while it is being filled: its rows and what is left of each budget."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from caudal.scheduler.request import Request
from caudal.scheduler.step_cost import prompt_reads
from caudal.step_io import CachedRequestData, SchedulerOutput


@dataclass(slots=True)
class StepPlan:
    """A step's rows (decode rows first) and the budgets that bound its prefill."""

    output: SchedulerOutput
    tokens_left: int
    """Of max_num_batched_tokens."""
    logits_left: int
    """Rows of logits that the worker can still compute."""
    rows: list[Request] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    """Tokens that each row computes."""
    prefill_ms_left: float = math.inf
    min_prefill_tokens: int = 0
    """Prompt tokens that ageing grants even beyond the milliseconds."""
    num_blocks_promised: int = 0
    """Blocks that running requests still need for their known tokens."""
    num_blocks_reserved: int = 0
    """The part of those that background requests may not touch."""
    is_background_turn: bool = False
    """All others have been served: what is left goes to background requests."""
    is_background_only: bool = False
    """It has rows, and nobody waits for any of them."""
    has_prompt_logits: bool = False
    """Some row computes logits per prompt token, which the cost model does not describe."""
    num_pooling_rows: int = 0

    @property
    def can_prefill(self) -> bool:
        """Whether the budgets admit at least one more prompt token."""
        return self.tokens_left > 0 and (self.prefill_ms_left > 0 or self.min_prefill_tokens > 0)

    @property
    def is_computed_twice(self) -> bool:
        """Whether the worker makes two passes: rows that pool do not share one with the others."""
        return 0 < self.num_pooling_rows < len(self.rows)

    def add_decode(self, request: Request, block_ids: list[int]) -> None:
        """Append a row that computes one token after all it knows."""
        self.rows.append(request)
        self.counts.append(1)
        output = self.output
        output.cached_requests.append(
            CachedRequestData(request.request_id, block_ids, request.num_computed_tokens)
        )
        output.num_scheduled_tokens[request.request_id] = 1
        output.num_tokens += 1
        output.num_decode_rows += 1
        output.context_reads += len(request.token_ids)
        self.tokens_left -= 1
        self.logits_left -= 1

    def add_prefill(self, request: Request, num_tokens: int, cost_ms: float) -> None:
        """Append a row that computes `num_tokens` prompt tokens, and charge the budgets."""
        num_computed = request.num_computed_tokens
        self.rows.append(request)
        self.counts.append(num_tokens)
        output = self.output
        output.num_scheduled_tokens[request.request_id] = num_tokens
        output.num_tokens += num_tokens
        samples = request.num_tokens_left == num_tokens and not request.is_prompt_only
        if samples and num_tokens == 1:
            output.num_decode_rows += 1
            output.context_reads += num_computed + 1
        else:
            output.context_reads += prompt_reads(num_tokens, num_computed)
        self.tokens_left -= num_tokens
        self.prefill_ms_left -= cost_ms
        self.min_prefill_tokens -= num_tokens
        self.num_pooling_rows += request.sampling.pooling is not None
        if computes_prompt_logits(request):
            self.has_prompt_logits = True
            self.logits_left -= num_tokens
        elif samples:
            self.logits_left -= 1


def computes_prompt_logits(request: Request) -> bool:
    """Whether each prompt token that the request computes next needs a row of logits."""
    return (
        request.sampling.num_prompt_logprobs is not None
        and request.num_computed_tokens < request.num_prompt_tokens
    )


class Ageing:
    """Credit in prompt tokens that grows while prompts wait, whatever decoding costs."""

    def __init__(self, tokens_per_s: float) -> None:
        self._tokens_per_s = tokens_per_s
        self._credit = 0.0
        self._last_time: float | None = None

    def accrue(self, now: float, has_backlog: bool) -> int:
        """Add the time since the last call, if prompts waited throughout; whole tokens due."""
        if not has_backlog:
            self._credit = 0.0
            self._last_time = None
            return 0
        if self._last_time is not None:
            earned = self._tokens_per_s * max(0.0, now - self._last_time)
            # Credit that could not be used (no memory) must not become one huge step.
            self._credit = min(self._credit + earned, max(self._tokens_per_s, earned))
        self._last_time = now
        return int(self._credit)

    def spend(self, num_tokens: int) -> None:
        """Prompt tokens were scheduled."""
        self._credit = max(0.0, self._credit - num_tokens)
