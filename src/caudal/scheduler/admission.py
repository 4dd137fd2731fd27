"""Which requests may queue: bounded in requests, in tokens and in predicted waiting time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from caudal.config import SchedulerConfig
from caudal.errors import ContextLengthError, InvalidRequestError, OverloadedError, RequestError
from caudal.scheduler.departures import Departures
from caudal.scheduler.queues import QueueTotals
from caudal.scheduler.request import Request
from caudal.scheduler.stats import TrafficAverages
from caudal.scheduler.step_cost import StepCostModel
from caudal.scheduler.step_planner import TARGET_SHARE

MIN_RETRY_AFTER_S = 0.05


@dataclass(frozen=True, slots=True)
class RefusedRequest:
    """A request that was not accepted; it leaves no trace and gets no output."""

    request_id: str
    error: RequestError

    @property
    def reason(self) -> str:
        """What was exceeded: queue_requests, queue_tokens, queue_ttft, deadline, or an error
        code."""
        if isinstance(self.error, OverloadedError):
            return self.error.reason
        return self.error.code or "invalid_request"

    @property
    def retry_after_s(self) -> float:
        """Predicted seconds until it would be accepted; 0 if it never would."""
        return self.error.retry_after_s if isinstance(self.error, OverloadedError) else 0.0


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """What a single request can never exceed."""

    max_model_len: int
    vocab_size: int
    num_kv_slots: int
    """Tokens that the whole KV cache holds."""
    block_size: int
    max_siblings: int
    """Requests of one parent: they are accepted together or not at all."""

    def check(self, request: Request) -> RequestError | None:
        """Why `request` (with its `max_total_tokens` set) can never run, None if it can."""
        sampling, num_prompt = request.sampling, request.num_prompt_tokens
        if num_prompt == 0:
            return InvalidRequestError("The prompt has no tokens.", param="prompt")
        low, high = min(request.token_ids), max(request.token_ids)
        if low < 0 or high >= self.vocab_size:
            bad = low if low < 0 else high
            return InvalidRequestError(
                f"The prompt has the token id {bad}; the vocabulary is 0 to {self.vocab_size - 1}.",
                param="prompt",
            )
        if num_prompt + min(1, sampling.max_tokens) > self.max_model_len:
            return ContextLengthError(num_prompt, self.max_model_len, sampling.max_tokens)
        num_blocks = -(-request.num_slots_at_most // self.block_size)
        if num_blocks * self.block_size > self.num_kv_slots:
            return InvalidRequestError(
                f"The prompt has {num_prompt} tokens and max_tokens is {sampling.max_tokens}, but "
                f"the KV cache of this server holds {self.num_kv_slots} tokens in all. "
                "Lower max_tokens, shorten the prompt or enlarge the KV cache.",
                param="max_tokens",
                code="kv_cache_exceeded",
            )
        return None


@dataclass(slots=True)
class Load:
    """What is on the machine, as far as a newcomer's waiting time depends on it."""

    num_running: int
    num_decode_rows: int
    context_tokens: int
    """KV positions that the decode rows attend to."""
    prefill_tokens: int
    """Prompt tokens that running requests have still to compute."""
    outputs: list[tuple[int, int]]
    """Per running request: output tokens so far, and those its limit still allows. One that only
    its limit can end has -1 tokens so far."""
    waiting: QueueTotals
    ahead: QueueTotals = field(default_factory=QueueTotals)
    """The part of `waiting` that is served before the newcomer."""
    own: QueueTotals = field(default_factory=QueueTotals)
    """The part of `waiting` that is of the newcomer's tenant."""
    num_tenants: int = 1
    """Tenants with something in `waiting`, the newcomer's included."""
    now: float = 0.0


class LowMark:
    """Keeps a queue that was full closed until some of it has left.

    When one more leaves is chance, when an eighth has left is not: so a client can be told when to
    come back, and those who come find room for more than the first of them.
    """

    def __init__(self, bound: float) -> None:
        self._low = max(0, math.floor(bound - max(1.0, bound / 8)))
        self._closed_from: int | None = None
        """The most important priority that was refused since it was last open."""

    def num_above(self, now: float, excess: float, request: Request) -> float:
        """How much must leave before `request` may join; `excess` is what exceeds the bound.

        Requests more important than any refused one, and those that yield, are only held to the
        bound.
        """
        if request.is_background:
            return excess
        if excess > 0 and (self._closed_from is None or request.priority < self._closed_from):
            self._closed_from = request.priority
        if self._closed_from is None or request.priority < self._closed_from:
            return excess
        above = max(excess, now - self._low)
        if above <= 0:
            self._closed_from = None
        return above


class AdmissionController:
    """Refuses at once what would overfill the queue, and says when to come back.

    Requests that find a free seat do not count against the queue: the bound is on those that
    have to wait. With nothing waiting, any request that can run at all is accepted. A full queue
    opens again when an eighth of it has left.

    While several tenants wait each can fill an equal share of the queue, even one that others
    have filled; so the queue never holds more than twice its bound.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        cost: StepCostModel,
        averages: TrafficAverages,
        max_running: int,
    ) -> None:
        self._config = config
        self._cost = cost
        self._averages = averages
        self._max_running = max_running
        self._target_ms = None if config.tpot_ms is None else config.tpot_ms * TARGET_SHARE
        self._departures = Departures(averages.lengths, max_running)
        self._requests_mark = LowMark(config.max_queue_requests)
        self._tokens_mark = LowMark(config.max_queue_tokens)
        self._ttft_mark = LowMark(config.max_queue_ttft_s * 1e3)

    @property
    def max_siblings(self) -> int:
        """Requests of one parent that can be accepted together at best."""
        return self._config.max_queue_requests + self._max_running

    def check(self, group: Sequence[Request], load: Load) -> OverloadedError | None:
        """Why the requests of one parent cannot queue now, None if they can (all together)."""
        error = self._check_requests(group, load)
        if error is None and load.waiting.num_requests:
            error = self._check_tokens(group, load)
            if error is None and not group[0].is_background:
                error = self._check_ttft(group[0], load)
        return error

    def _check_requests(self, group: Sequence[Request], load: Load) -> OverloadedError | None:
        bound, num_waiting = self._config.max_queue_requests, load.waiting.num_requests
        num_free = max(0, self._max_running - load.num_running)
        num_excess = num_waiting + len(group) - num_free - bound
        num_own = load.own.num_requests + len(group)
        if _is_within_share(num_own, bound, load) and not group[0].is_background:
            return None
        num_above = self._requests_mark.num_above(num_waiting, num_excess, group[0])
        if num_above <= 0:
            return None
        return self._refuse(
            f"{num_waiting} requests are waiting and the limit is {bound}",
            "queue_requests",
            self._departures_ms(math.ceil(num_above), math.ceil(num_above), load),
        )

    def _check_tokens(self, group: Sequence[Request], load: Load) -> OverloadedError | None:
        bound, waiting = self._config.max_queue_tokens, load.waiting
        num_new = sum(len(request.token_ids) for request in group)
        num_excess = waiting.num_tokens + num_new - bound
        if _is_within_share(load.own.num_tokens + num_new, bound, load):
            return None
        num_above = self._tokens_mark.num_above(waiting.num_tokens, num_excess, group[0])
        if num_above <= 0:
            return None
        num_free = max(0, self._max_running - load.num_running)
        # Half a request more: the last to leave is rarely of just the right size.
        num_leaving = math.ceil(num_above * waiting.num_requests / waiting.num_tokens + 0.5)
        return self._refuse(
            f"{waiting.num_tokens} prompt tokens are waiting and the limit is {bound}",
            "queue_tokens",
            self._departures_ms(num_leaving, num_leaving - num_free, load),
        )

    def _check_ttft(self, request: Request, load: Load) -> OverloadedError | None:
        bound_ms = self._config.max_queue_ttft_s * 1e3
        ttft_ms = self.predicted_ttft_ms(len(request.token_ids), load)
        above_ms = self._ttft_mark.num_above(ttft_ms, ttft_ms - bound_ms, request)
        if above_ms <= 0:
            return self._check_deadline(request, ttft_ms, load)
        return self._refuse(
            f"the first token would take about {ttft_ms / 1e3:.0f} s and the limit is "
            f"{bound_ms / 1e3:g} s",
            "queue_ttft",
            above_ms,
        )

    def _check_deadline(
        self, request: Request, ttft_ms: float, load: Load
    ) -> OverloadedError | None:
        """Why `request` need not queue: it would be dropped before its first token."""
        if request.deadline is None:
            return None
        left_ms = (request.deadline - load.now) * 1e3
        if ttft_ms <= left_ms:
            return None
        return self._refuse(
            f"the first token would take about {ttft_ms / 1e3:.1f} s and the request's timeout "
            f"leaves {left_ms / 1e3:.1f} s",
            "deadline",
            ttft_ms - left_ms,
        )

    def predicted_ttft_ms(self, num_tokens: int, load: Load) -> float:
        """Predicted time to first token of a request of `num_tokens` that arrives now."""
        miss_ratio = self._averages.miss_ratio
        ms_per_token = self._prefill_ms_per_token(load)
        own_ms = num_tokens * miss_ratio * ms_per_token
        ahead_ms = (load.prefill_tokens + load.ahead.num_tokens * miss_ratio) * ms_per_token
        num_seats = load.num_running + load.ahead.num_requests + 1 - self._max_running
        return self._decode_ms(load) + max(ahead_ms, self._seats_ms(num_seats, load)) + own_ms

    def _decode_ms(self, load: Load) -> float:
        return self._cost.predict(load.num_decode_rows, 0, load.context_tokens)

    def _prefill_ms_per_token(self, load: Load) -> float:
        """Milliseconds of wall time per prompt token, in steps as the planner fills them."""
        base_ms = self._decode_ms(load)
        num_tokens = max(1, self._config.max_num_batched_tokens - load.num_decode_rows)
        if load.num_decode_rows and self._target_ms is not None:
            budget_ms = self._target_ms - base_ms
            num_tokens = self._cost.max_prefill_tokens(budget_ms, 0, num_tokens)
        step_ms = base_ms + self._cost.prefill_ms(num_tokens, 0)
        fastest = num_tokens / step_ms if step_ms > 0 else 0.0
        granted = self._config.min_prefill_tokens_per_s / 1e3
        return 1.0 / max(fastest, granted, 1e-6)

    def _seats_ms(self, num_seats: int, load: Load) -> float:
        """Predicted milliseconds until so many running requests have ended."""
        if num_seats <= 0:
            return 0.0
        averages = self._averages
        token_ms = averages.output_token_ms or self._decode_ms(load)
        mean = averages.output_tokens
        return token_ms * self._departures.steps_until(num_seats, load.outputs, mean)

    def _departures_ms(self, num_leaving: int, num_seats: int, load: Load) -> float:
        """Predicted time until `num_leaving` have left the queue, for which seats must free."""
        mean_tokens = load.waiting.num_tokens / max(1, load.waiting.num_requests)
        prefill_ms = mean_tokens * self._averages.miss_ratio * self._prefill_ms_per_token(load)
        # A seat that is free is taken when the next step is planned.
        return max(num_leaving * prefill_ms, self._seats_ms(num_seats, load)) + self._decode_ms(
            load
        )

    def _refuse(self, what: str, reason: str, wait_ms: float) -> OverloadedError:
        retry_after_s = max(MIN_RETRY_AFTER_S, wait_ms / 1e3)
        return OverloadedError(
            f"The server is busy: {what}. Retry in {retry_after_s:.1f} s.",
            retry_after_s=retry_after_s,
            reason=reason,
        )


def _is_within_share(num_own: int, bound: int, load: Load) -> bool:
    """Whether a tenant that shares the queue with others has not yet had its part of `bound`."""
    return load.num_tenants > 1 and num_own * load.num_tenants <= bound
