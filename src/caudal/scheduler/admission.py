"""Which requests may queue: bounded in requests, in tokens and in predicted waiting time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from caudal.config import SchedulerConfig
from caudal.errors import ContextLengthError, InvalidRequestError, OverloadedError, RequestError
from caudal.scheduler.forecast import Course, Forecaster, RunningLoad
from caudal.scheduler.promises import Promise, Promises
from caudal.scheduler.queues import QueueTotals
from caudal.scheduler.request import Request
from caudal.scheduler.stats import TrafficAverages
from caudal.scheduler.step_cost import StepCostModel

MIN_RETRY_AFTER_S = 0.05
LEFT_SHARE = 1 / 8
"""How much of a full queue must have left before it opens again."""
TTFT_LEFT_SHARE = 1 / 4
"""The same of a predicted wait: more, as an error of the prediction is a part of the whole wait."""


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

    running: RunningLoad
    waiting: QueueTotals
    ahead: QueueTotals = field(default_factory=QueueTotals)
    """The part of `waiting` that is served before the newcomer."""
    own: QueueTotals = field(default_factory=QueueTotals)
    """The part of `waiting` that is of the newcomer's tenant."""
    num_tenants: int = 1
    """Tenants with something in `waiting`, the newcomer's included."""
    now: float = 0.0
    num_cancelled: int = 0
    """Requests ever cancelled."""


class LowMark:
    """Keeps a queue that was full closed until some of it has left.

    When one more leaves is chance, when a good part has left is not: so a client can be told when
    to come back, and those who come find room for more than the first of them.
    """

    def __init__(self, bound: float, share: float) -> None:
        self._low = max(0, math.floor(bound - max(1.0, bound * share)))
        self._closed_from: int | None = None
        """The most important priority that was refused since it was last open."""

    def num_above(
        self, now: float, excess: float, request: Request, *, is_asked: bool = True
    ) -> float:
        """How much must leave before `request` may join; `excess` is what exceeds the bound.

        Requests more important than any refused one, and those that yield, are only held to the
        bound. Unless it `is_asked` for, the answer changes nothing.
        """
        if request.is_background:
            return excess
        closed_from = self._closed_from
        if excess > 0 and (closed_from is None or request.priority < closed_from):
            closed_from = request.priority
        above = excess
        if closed_from is not None and request.priority >= closed_from:
            above = max(excess, now - self._low)
            if above <= 0:
                closed_from = None
        if is_asked:
            self._closed_from = closed_from
        return above


@dataclass(frozen=True, slots=True)
class _Asked:
    """Whether the requests of one parent may join."""

    group: Sequence[Request]
    load: Load
    is_real: bool = True
    """Not only a look whether they could."""

    @property
    def first(self) -> Request:
        """They are all alike."""
        return self.group[0]


class AdmissionController:
    """Refuses at once what would overfill the queue, and says when to come back.

    Requests that find a free seat do not count against the queue: the bound is on those that
    have to wait. With nothing waiting, any request that can run at all is accepted. A full queue
    opens again when a part of it has left.

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
        self._averages = averages
        self._max_running = max_running
        self._forecaster = Forecaster(config, cost, averages, max_running)
        self._requests_mark = LowMark(config.max_queue_requests, LEFT_SHARE)
        self._tokens_mark = LowMark(config.max_queue_tokens, LEFT_SHARE)
        self._ttft_mark = LowMark(config.max_queue_ttft_s * 1e3, TTFT_LEFT_SHARE)
        self._promises = Promises()

    @property
    def max_siblings(self) -> int:
        """Requests of one parent that can be accepted together at best."""
        return self._config.max_queue_requests + self._max_running

    def check(self, group: Sequence[Request], load: Load) -> OverloadedError | None:
        """Why the requests of one parent cannot queue now, None if they can (all together)."""
        asked = _Asked(group, load)
        error = self._check_requests(asked)
        if error is None and load.waiting.num_requests:
            error = self._check_tokens(asked)
            if error is None and not group[0].is_background:
                error = self._check_ttft(asked)
        return error

    def follow_promises(
        self, now: float, num_cancelled: int, load_of: Callable[[Request], Load]
    ) -> None:
        """See which refused requests would be let in now, and learn from when that is."""
        for reason, promise in self._promises.to_check(now, num_cancelled):
            asked = _Asked(promise.group, load_of(promise.group[0]), is_real=False)
            is_open = self._requests_above(asked) <= 0
            if is_open and asked.load.waiting.num_requests:
                is_open = self._tokens_above(asked) <= 0
                if is_open and not asked.first.is_background:
                    is_open = self._ttft_above_ms(asked)[0] <= 0
            self._promises.settle(reason, promise, now, is_open=is_open)

    def _requests_above(self, asked: _Asked) -> float:
        bound, load = self._config.max_queue_requests, asked.load
        num_own = load.own.num_requests + len(asked.group)
        if _is_within_share(num_own, bound, load) and not asked.first.is_background:
            return 0.0
        # Those that find a seat do not wait for one: only ends make this fewer, starts do not.
        num_free = max(0, self._max_running - load.running.num_running)
        num_queued = load.waiting.num_requests - num_free
        num_excess = num_queued + len(asked.group) - bound
        return self._requests_mark.num_above(
            num_queued, num_excess, asked.first, is_asked=asked.is_real
        )

    def _check_requests(self, asked: _Asked) -> OverloadedError | None:
        num_above, load = self._requests_above(asked), asked.load
        if num_above <= 0:
            return None
        bound = self._config.max_queue_requests
        return self._refuse(
            asked,
            f"{load.waiting.num_requests} requests are waiting and the limit is {bound}",
            "queue_requests",
            self._course(load).when_ended(math.ceil(num_above)),
        )

    def _tokens_above(self, asked: _Asked) -> float:
        bound, load = self._config.max_queue_tokens, asked.load
        num_new = sum(len(request.token_ids) for request in asked.group)
        if _is_within_share(load.own.num_tokens + num_new, bound, load):
            return 0.0
        num_waiting = load.waiting.num_tokens
        return self._tokens_mark.num_above(
            num_waiting, num_waiting + num_new - bound, asked.first, is_asked=asked.is_real
        )

    def _check_tokens(self, asked: _Asked) -> OverloadedError | None:
        num_above, load = self._tokens_above(asked), asked.load
        if num_above <= 0:
            return None
        # A prompt leaves the queue as a whole when it is begun, so as much is under way at the end
        # as now, except for prompts that are longer than others: those share with shorter ones.
        course, running = self._course(load), load.running
        num_leaving = num_above * self._averages.miss_ratio
        num_longer = max(0.0, running.prefill_tokens - running.num_prefilling * course.mean_prompt)
        bound = self._config.max_queue_tokens
        return self._refuse(
            asked,
            f"{load.waiting.num_tokens} prompt tokens are waiting and the limit is {bound}",
            "queue_tokens",
            course.when_computed(num_leaving + min(num_longer, num_leaving)),
        )

    def _ttft_above_ms(self, asked: _Asked) -> tuple[float, float]:
        """Milliseconds above the mark, and the predicted time to the first token."""
        request = asked.first
        ttft_ms = self.predicted_ttft_ms(len(request.token_ids), asked.load)
        excess_ms = ttft_ms - self._config.max_queue_ttft_s * 1e3
        above_ms = self._ttft_mark.num_above(ttft_ms, excess_ms, request, is_asked=asked.is_real)
        return above_ms, ttft_ms

    def _check_ttft(self, asked: _Asked) -> OverloadedError | None:
        above_ms, ttft_ms = self._ttft_above_ms(asked)
        if above_ms <= 0:
            return self._check_deadline(asked, ttft_ms)
        return self._refuse(
            asked,
            f"the first token would take about {ttft_ms / 1e3:.0f} s and the limit is "
            f"{self._config.max_queue_ttft_s:g} s",
            "queue_ttft",
            above_ms,
        )

    def _check_deadline(self, asked: _Asked, ttft_ms: float) -> OverloadedError | None:
        """Why a request need not queue: it would be dropped before its first token."""
        deadline = asked.first.deadline
        if deadline is None:
            return None
        left_ms = (deadline - asked.load.now) * 1e3
        if ttft_ms <= left_ms:
            return None
        return self._refuse(
            asked,
            f"the first token would take about {ttft_ms / 1e3:.1f} s and the request's timeout "
            f"leaves {left_ms / 1e3:.1f} s",
            "deadline",
            ttft_ms - left_ms,
        )

    def predicted_ttft_ms(self, num_tokens: int, load: Load) -> float:
        """Predicted time to first token of a request of `num_tokens` that arrives now."""
        num_missing = (load.ahead.num_tokens + num_tokens) * self._averages.miss_ratio
        return self._course(load).when_computed(load.running.prefill_tokens + num_missing)

    def _course(self, load: Load) -> Course:
        """The future of the machine while requests like the waiting ones come."""
        averages, waiting = self._averages, load.waiting
        mean_prompt, mean_output = averages.prompt_tokens, math.inf
        if waiting.num_requests:
            mean_prompt = waiting.num_tokens / waiting.num_requests
            mean_output = waiting.num_output_allowed / waiting.num_requests
        mean_prompt *= averages.miss_ratio
        return self._forecaster.course(load.running, mean_prompt, mean_output)

    def _refuse(self, asked: _Asked, what: str, reason: str, wait_ms: float) -> OverloadedError:
        load, wait_s = asked.load, wait_ms / 1e3
        if reason != "deadline":  # its time only runs out
            promise = Promise(asked.group, wait_s, load.now, load.num_cancelled, load.now)
            self._promises.make(reason, promise)
            wait_s *= self._promises.factor(reason)
        retry_after_s = max(MIN_RETRY_AFTER_S, wait_s)
        return OverloadedError(
            f"The server is busy: {what}. Retry in {retry_after_s:.1f} s.",
            retry_after_s=retry_after_s,
            reason=reason,
        )


def _is_within_share(num_own: int, bound: int, load: Load) -> bool:
    """Whether a tenant that shares the queue with others has not yet had its part of `bound`."""
    return load.num_tenants > 1 and num_own * load.num_tenants <= bound
