"""The scheduler: accepts requests, plans steps, turns what they computed into outputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import NotRequired, TypedDict, Unpack

from caudal.config import CacheConfig, SchedulerConfig
from caudal.errors import InvalidRequestError, RequestError
from caudal.scheduler.admission import AdmissionController, Load, RefusedRequest, RequestLimits
from caudal.scheduler.forecast import RunningLoad
from caudal.scheduler.output import FinishReason, RequestOutput
from caudal.scheduler.request import (
    FINISHED_STATUS,
    Request,
    RequestStatus,
    SiblingGroup,
    accept_tokens,
)
from caudal.scheduler.state import SchedulerState
from caudal.scheduler.stats import SchedulerStats
from caudal.scheduler.step_cost import StepCostModel, StepCosts
from caudal.scheduler.step_plan import StepPlan
from caudal.scheduler.step_planner import StepPlanner
from caudal.step_io import ModelRunnerOutput, SchedulerOutput


class SchedulerLimits(TypedDict):
    """What the loaded model and its memory plan allow."""

    max_model_len: int
    """Prompt + output tokens of one request."""
    eog_token_ids: frozenset[int]
    """Ids that end a generation."""
    max_num_logits: int
    """Rows of logits that one step can compute."""
    vocab_size: int
    base_seed: NotRequired[int]
    """Seeds of requests without their own are derived from it (default 0)."""
    can_interrupt: NotRequired[bool]
    """Whether a step without interactive requests ends early when one comes (default: no)."""
    costs: NotRequired[StepCosts]
    """What is known of the machine before the first step (default: a guess)."""


class Scheduler:
    """Pure, deterministic and without a clock: `now` is in seconds, on any steady clock.

    Requests past their deadline end when the next step is planned.

    A cycle is `schedule()`, running the step, `update_from_output()`. Requests may be added or
    aborted at any time, also between the two. Every accepted request gets exactly one terminal
    output.
    """

    def __init__(
        self, config: SchedulerConfig, cache: CacheConfig, **limits: Unpack[SchedulerLimits]
    ) -> None:
        assert cache.num_blocks is not None
        self._state = SchedulerState(cache, config.batching)
        self.cost = StepCostModel(limits.get("costs"))
        self._planner = StepPlanner(config, self._state, self.cost, limits["max_num_logits"])
        self._planner.background.can_interrupt = limits.get("can_interrupt", False)
        max_running = self._planner.max_running
        self._admission = AdmissionController(config, self.cost, self._state.averages, max_running)
        self._limits = RequestLimits(
            max_model_len=limits["max_model_len"],
            vocab_size=limits["vocab_size"],
            num_kv_slots=cache.num_blocks * cache.block_size,
            block_size=cache.block_size,
            max_siblings=self._admission.max_siblings,
        )
        self._eog_token_ids = limits["eog_token_ids"]
        self._base_seed = limits.get("base_seed", 0)
        self._block_size = cache.block_size
        self._num_arrived = 0
        self._num_steps = 0
        self._in_flight: StepPlan | None = None
        self._pending: list[RequestOutput] = []
        self._planned_at = 0.0
        self._step_ms: float | None = None
        """Of the step before, if the next one follows at once."""

    @property
    def has_work(self) -> bool:
        """Whether a cycle would do anything: run a row, drop one, or deliver an output."""
        state = self._state
        return bool(state.requests or self._pending or state.dropped_row_ids)

    @property
    def requests(self) -> Iterable[Request]:
        """Every request that has not ended."""
        return self._state.requests.values()

    @property
    def num_running(self) -> int:
        """Requests that hold a row and blocks."""
        return len(self._state.running)

    @property
    def num_waiting(self) -> int:
        """Requests that hold neither, preempted ones included."""
        return len(self._state.waiting)

    def add_requests(self, requests: Sequence[Request], now: float) -> list[RefusedRequest]:
        """Accept requests into the queue; those of one parent all or none.

        Returns the refused ones with their errors: OverloadedError (retry later),
        ContextLengthError or InvalidRequestError (it can never run).
        """
        refused: list[RefusedRequest] = []
        for group in _group_by_parent(requests):
            error = self._prepare(group)
            if error is None:
                load = self._load(group[0])
                load.now = now
                load.num_cancelled = self._state.counters.num_cancelled
                error = self._admission.check(group, load)
            if error is None:
                self._enqueue(group)
            else:
                refused += [RefusedRequest(request.request_id, error) for request in group]
        for refusal in refused:
            self._state.counters.count_rejected(refusal.reason)
        return refused

    def abort(self, request_ids: Sequence[str], now: float, *, is_answered: bool = False) -> None:
        """Free requests in any state at once; their terminal outputs come with the next update.

        Unknown or finished ids are ignored. `is_answered`: as far as they have come they are
        complete (a stop string), so their lengths are those of answers.
        """
        for request_id in request_ids:
            request = self._state.requests.get(request_id)
            if request is not None:
                self._state.counters.num_cancelled += 1
                self._note_length(request, is_whole=is_answered)
                self._pending.append(self._finish(request, FinishReason.ABORT, now))

    def schedule(self, now: float) -> SchedulerOutput:
        """Plan the next step; the previous one must have been updated (or failed)."""
        assert self._in_flight is None, "the previous step has not been updated"
        self._num_steps += 1
        if self._step_ms is not None:
            self._state.averages.note_step((now - self._planned_at) * 1e3, self._step_ms)
        self._planned_at = now
        for request in self._state.deadlines.take_expired(now):
            self._pending.append(self._finish(request, FinishReason.TIMEOUT, now))
        self._in_flight = self._planner.plan(self._num_steps, now)
        return self._in_flight.output

    def update_from_output(
        self,
        scheduler_output: SchedulerOutput,
        runner_output: ModelRunnerOutput,
        now: float,
        step_ms: float | None = None,
    ) -> list[RequestOutput]:
        """Apply what the step computed; returns what changed, pending outputs first.

        `step_ms` is the measured time of the step (default: the runner's own sum). Requests
        aborted while the step ran are skipped; those in `errors` fail alone.
        """
        plan = self._in_flight
        assert plan is not None and plan.output.step_id == scheduler_output.step_id
        self._in_flight = None
        if plan.is_background_only:
            self._planner.background.note_step(was_interrupted=runner_output.is_interrupted)
        if runner_output.is_interrupted:
            return self._end_interrupted(plan, runner_output, now)
        self._planner.speculation.judge(plan, runner_output)
        outputs = self.take_outputs() + self._advance_rows(plan, runner_output, now)
        self._observe(plan, runner_output, step_ms)
        self._admission.follow_promises(now, self._state.counters.num_cancelled, self._load)
        return outputs

    def take_outputs(self) -> list[RequestOutput]:
        """Terminal outputs that arose outside of a step (aborts), each given out once."""
        outputs, self._pending = self._pending, []
        return outputs

    def fail_all(self, message: str, now: float | None = None) -> list[RequestOutput]:
        """End every request with an error, as when a step failed as a whole.

        Without `now`, requests that never ran report no queue time.
        """
        self._in_flight = self._step_ms = None
        outputs = self.take_outputs()
        for request in list(self._state.requests.values()):
            outputs.append(self._finish(request, FinishReason.ERROR, now, message))
        return outputs

    def block_ids_of(self, request_id: str, start_token: int, end_token: int) -> list[int]:
        """Blocks of a running request's tokens [start_token, end_token), to export their KV."""
        return self._state.kv.block_ids_of(request_id, start_token, end_token)

    def stats(self) -> SchedulerStats:
        """Gauges and counters now; O(running requests)."""
        state, kv = self._state, self._state.kv
        load, mean_prompt = self._load(), round(state.averages.prompt_tokens)
        load.ahead = load.waiting
        used = ((name, each.num_computed_tokens) for name, each in state.running.items())
        return SchedulerStats(
            num_running=len(state.running),
            num_waiting=len(state.waiting),
            num_waiting_tokens=state.waiting.totals.num_tokens,
            num_background_running=state.num_background,
            num_background_waiting=state.waiting.background.num_requests,
            num_blocks_total=kv.num_blocks_total,
            num_blocks_free=kv.num_blocks_free,
            num_blocks_cached=kv.num_blocks_cached,
            num_blocks_held=kv.num_blocks_held,
            kv_wasted_fraction=kv.wasted_fraction(used),
            **dataclasses.asdict(kv.counters),
            **dataclasses.asdict(state.counters),
            predicted_ttft_ms=self._admission.predicted_ttft_ms(mean_prompt, load),
        )

    def check_integrity(self) -> None:
        """Raise AssertionError unless queues, tables, tree and pool agree. O(blocks)."""
        self._state.check_integrity()

    def _prepare(self, group: list[Request]) -> RequestError | None:
        """Complete the requests of one parent; the first error refuses them all."""
        if len(group) > self._limits.max_siblings:
            return InvalidRequestError(
                f"n is {len(group)}, but this server accepts at most "
                f"{self._limits.max_siblings} requests at once.",
                param="n",
            )
        seen: dict[str, None] = {}
        for request in group:
            if request.request_id in self._state.requests or request.request_id in seen:
                return InvalidRequestError(
                    f"The request id {request.request_id!r} is in use.", param="request_id"
                )
            seen[request.request_id] = None
            sampling = request.sampling
            request.max_total_tokens = min(
                request.num_prompt_tokens + sampling.max_tokens, self._limits.max_model_len
            )
            error = self._limits.check(request)
            if error is not None:
                return error
            request.stop_token_ids = frozenset(sampling.stop_token_ids)
            if not sampling.ignore_eos:
                request.stop_token_ids |= self._eog_token_ids
        return None

    def _enqueue(self, group: list[Request]) -> None:
        state = self._state
        by_prompt: dict[tuple[int, ...], SiblingGroup] = {}
        num_given: dict[int, int] = {}
        for request in group:
            request.arrival_index = self._num_arrived
            self._num_arrived += 1
            request.seed = _choose_seed(request, self._base_seed, num_given)
            if len(group) > 1:
                key = tuple(request.prompt_token_ids)
                request.siblings = by_prompt.setdefault(key, SiblingGroup())
            state.requests[request.request_id] = request
            state.waiting.push(request)
            state.deadlines.add(request, len(state.requests))

    def _end_interrupted(
        self, plan: StepPlan, result: ModelRunnerOutput, now: float
    ) -> list[RequestOutput]:
        """Nothing was computed: rows stay where they are; those that could not start end."""
        self._step_ms = None
        self._state.counters.num_interrupted_steps += 1
        running, errors = RequestStatus.RUNNING, result.errors
        failed = [r for r in plan.rows if r.request_id in errors and r.status is running]
        return self.take_outputs() + [
            self._finish(request, FinishReason.ERROR, now, errors[request.request_id])
            for request in failed
        ]

    def _advance_rows(
        self, plan: StepPlan, result: ModelRunnerOutput, now: float
    ) -> list[RequestOutput]:
        """Apply the result of each row; returns their outputs.

        The loop holds the common row itself (a decode row that goes on), as its cost is paid
        per token: `_advance` would do the same.
        """
        block_size, running = self._block_size, RequestStatus.RUNNING
        get_sampled = result.sampled_token_ids.get
        is_plain_step = not result.errors and not self._state.deferral.num_leaders
        outputs: list[RequestOutput] = []
        num_plain = 0
        for request, num_scheduled in zip(plan.rows, plan.counts, strict=True):
            # By identity, not by id: an aborted id may already be in use again.
            if request.status is not running:
                continue
            sampled = get_sampled(request.request_id)
            token_ids = request.token_ids
            num_known = len(token_ids)
            if (
                is_plain_step
                and request.is_streaming
                and num_scheduled == 1
                and sampled is not None
                and len(sampled) == 1
                and num_known + 1 < request.max_total_tokens
                and sampled[0] not in request.stop_token_ids
            ):
                token_ids.append(sampled[0])
                request.num_computed_tokens = num_known
                if num_known % block_size == 0:
                    self._state.kv.insert_prefix(request.request_id, token_ids, num_known)
                num_plain += 1
                outputs.append(
                    RequestOutput(
                        request_id=request.request_id,
                        new_token_ids=sampled,
                        num_prompt_tokens=request.num_prompt_tokens,
                        num_output_tokens=num_known + 1 - request.num_prompt_tokens,
                        num_cached_tokens=request.num_cached_tokens,
                        num_preemptions=request.num_preemptions,
                    )
                )
                continue
            output = self._advance(request, num_scheduled, result, now)
            if output is not None:
                outputs.append(output)
        self._state.counters.num_output_tokens += num_plain
        return outputs

    def _advance(
        self, request: Request, num_scheduled: int, result: ModelRunnerOutput, now: float
    ) -> RequestOutput | None:
        """Apply one row's result; returns its output, None while its prompt is not complete."""
        request_id = request.request_id
        if result.errors and request_id in result.errors:
            return self._finish(request, FinishReason.ERROR, now, result.errors[request_id])
        state = self._state
        num_before = request.num_computed_tokens
        num_known = len(request.token_ids)
        num_computed = num_before + num_scheduled
        sampled = result.sampled_token_ids.get(request_id, [])
        if num_computed > num_known:
            # Drafts: those accepted are in `sampled`, before its last token.
            num_computed = min(num_computed, num_known + max(0, len(sampled) - 1))
        request.num_computed_tokens = num_computed
        if state.deferral.num_leaders:
            state.advance_leader(request)
        if request.prompt_logprobs is not None and not request.has_output:
            request.prompt_logprobs += result.prompt_logprobs.get(request_id, ())
        kept: list[int] = []
        reason: FinishReason | None = None
        error: str | None = None
        if sampled:
            kept, reason = accept_tokens(request, sampled)
            if reason is None and request_id in result.complete_request_ids:
                reason = FinishReason.STOP
        elif num_computed >= num_known:
            reason = FinishReason.LENGTH
            if not request.is_prompt_only:
                reason, error = FinishReason.ERROR, "the step gave no token for this request"
        if num_computed // self._block_size > num_before // self._block_size:
            num_computed = min(num_computed, len(request.token_ids))
            state.kv.insert_prefix(request_id, request.token_ids, num_computed)
        if reason is not None:
            output = self._finish(request, reason, now, error)
        elif kept:
            output = self._make_output(request)
        else:
            return None
        if request.sampling.pooling is not None:
            output.pooled = result.pooled.get(request_id)
        if kept:
            output.new_token_ids = kept
            state.counters.num_output_tokens += len(kept)
            if reason is FinishReason.STOP:
                output.stop_token_id = kept[-1]
            if request.sampling.num_logprobs is not None:
                output.logprobs = result.logprobs.get(request_id, [])[: len(kept)]
        return output

    def _finish(
        self, request: Request, reason: FinishReason, now: float | None, error: str | None = None
    ) -> RequestOutput:
        """End a request in any state; returns its terminal output."""
        state = self._state
        state.remove(request, FINISHED_STATUS[reason])
        state.counters.num_finished[reason.value] += 1
        started = request.first_scheduled_time
        if reason is FinishReason.STOP or reason is FinishReason.LENGTH:
            assert now is not None and started is not None
            self._note_length(request, is_whole=True)
        output = self._make_output(request)
        output.finish_reason = reason
        output.num_preempted_tokens = request.num_preempted_tokens
        output.error = error
        if started is None and now is not None:
            output.queue_ms = (now - request.arrival_time) * 1e3
        return output

    def _note_length(self, request: Request, *, is_whole: bool) -> None:
        """Learn how long answers are; one that was broken off was going to be longer."""
        if request.num_output_tokens > 0 and not request.is_background:
            self._state.averages.lengths.add(request.num_output_tokens, is_whole=is_whole)

    def _make_output(self, request: Request) -> RequestOutput:
        output = RequestOutput(
            request_id=request.request_id,
            num_prompt_tokens=request.num_prompt_tokens,
            num_output_tokens=len(request.token_ids) - request.num_prompt_tokens,
            num_cached_tokens=request.num_cached_tokens,
            num_preemptions=request.num_preemptions,
        )
        if not request.has_output:
            request.has_output = True
            if request.first_scheduled_time is not None:
                output.queue_ms = (request.first_scheduled_time - request.arrival_time) * 1e3
            output.prompt_logprobs = request.prompt_logprobs
            request.prompt_logprobs = None
            request.is_streaming = request.sampling.num_logprobs is None
        return output

    def _observe(self, plan: StepPlan, result: ModelRunnerOutput, step_ms: float | None) -> None:
        """Teach the cost model what the step took."""
        output = plan.output
        if step_ms is None:
            step_ms = result.prepare_ms + result.forward_ms + result.sample_ms
        self._step_ms = step_ms if self._state.requests else None
        is_typical = not plan.has_prompt_logits and not plan.is_computed_twice
        if output.num_tokens > 0 and is_typical and not result.errors:
            num_prefill = output.num_tokens - output.num_decode_rows
            self.cost.observe(output.num_decode_rows, num_prefill, output.context_reads, step_ms)

    def _load(self, newcomer: Request | None = None) -> Load:
        """What the newcomer (None: some interactive request) cannot push aside."""
        state = self._state
        waiting, running = state.waiting.totals, list(state.running.values())
        if newcomer is None or not newcomer.is_background:
            waiting = state.waiting.foreground
            running = [request for request in running if not request.is_background]
        load = Load(RunningLoad.of(running), waiting)
        if newcomer is not None:
            load.ahead = state.waiting.ahead_of(newcomer)
            load.own, load.num_tenants = state.waiting.share_of(newcomer)
        return load


def _group_by_parent(requests: Sequence[Request]) -> list[list[Request]]:
    """Requests of one parent together, in order of first appearance."""
    groups: dict[tuple[bool, str], list[Request]] = {}
    for request in requests:
        has_parent = request.parent_id is not None
        key = request.parent_id if request.parent_id is not None else request.request_id
        groups.setdefault((has_parent, key), []).append(request)
    return list(groups.values())


def _choose_seed(request: Request, base_seed: int, num_given: dict[int, int]) -> int:
    """Siblings with one seed must not all say the same; the first keeps it as it is."""
    given = request.sampling.seed
    if given is None:
        return _mix(base_seed, request.arrival_index)
    ordinal = num_given.get(given, 0)
    num_given[given] = ordinal + 1
    return _mix(given, ordinal) if ordinal else given & _SEED_BITS


_SEED_BITS = (1 << 64) - 1
"""Seeds are unsigned below the scheduler; clients may give any signed one."""


def _mix(seed: int, index: int) -> int:
    """A 63-bit seed from a seed and a counter (the finaliser of SplitMix64, public domain)."""
    mask = (1 << 64) - 1
    value = (seed + (index + 1) * 0x9E3779B97F4A7C15) & mask
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & mask
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & mask
    return (value ^ (value >> 31)) >> 1
