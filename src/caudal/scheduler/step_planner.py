"""Fills a step: decode rows, then prefill chunks up to the milliseconds that the target allows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from caudal.config import Batching, SchedulerConfig
from caudal.kv_cache.radix_cache import make_block_keys
from caudal.scheduler.background import BackgroundPolicy
from caudal.scheduler.preemption import (
    GROWTH_BLOCKS_NEW,
    GROWTH_BLOCKS_RETURNING,
    choose_victim,
    num_growth_blocks,
)
from caudal.scheduler.request import Request, RequestStatus
from caudal.scheduler.service_class import ServiceClass
from caudal.scheduler.speculation import Speculation
from caudal.scheduler.state import SchedulerState
from caudal.scheduler.step_cost import StepCostModel
from caudal.scheduler.step_plan import Ageing, StepPlan, computes_prompt_logits
from caudal.step_io import CachedRequestData, NewRequestData, SchedulerOutput

TARGET_SHARE = 0.9
"""Share of the time-per-token target that a step may be predicted to take."""


@dataclass(slots=True)
class RunningSplit:
    """The running requests by what they need in this step."""

    decoding: list[Request]
    growing: list[Request]
    """Decoding requests, background ones too, whose next token needs a new block."""
    prefilling: list[Request]
    context_reads: int
    background: list[Request]
    """Those that yield to all of the above, whatever they need."""


class StepPlanner:
    """Decides what each step computes; the moves between queues belong to the state."""

    def __init__(
        self,
        config: SchedulerConfig,
        state: SchedulerState,
        cost: StepCostModel,
        max_num_logits: int,
    ) -> None:
        self._state = state
        self._cost = cost
        self._batching = config.batching
        self._max_tokens = config.max_num_batched_tokens
        self._max_logits = max_num_logits
        self._target_ms = None if config.tpot_ms is None else config.tpot_ms * TARGET_SHARE
        self._ageing = Ageing(config.min_prefill_tokens_per_s)
        self._batch_seats = 0
        self.max_running = (
            1
            if config.batching is Batching.SERIAL
            else min(config.max_num_seqs, config.max_num_batched_tokens, max_num_logits)
        )
        """Running requests at most: each must find a token and a logits row in every step."""
        self.background = BackgroundPolicy(config, cost, self._target_ms, self.max_running)
        self.speculation = Speculation(state, cost, self.background, self._target_ms)

    def plan(self, step_id: int, now: float) -> StepPlan:
        """Choose the rows of a step, preempting and admitting as memory asks and allows."""
        output = SchedulerOutput(step_id)
        plan = StepPlan(output, self._max_tokens, self._max_logits)
        if self._state.num_background:
            self._make_way()
        split = self._make_room()
        self._add_decode_rows(plan, split)
        plan.num_blocks_promised = self._num_blocks_left(split.prefilling)
        has_backlog = self._has_backlog(split)
        if has_backlog:
            self.speculation.extend(plan, has_backlog=True)
        num_rows, num_decoding = len(plan.rows), output.num_tokens
        # Prompts get the milliseconds that decoding leaves of the target; none decode: no limit.
        # Where decoding alone takes longer than the target, they still get what ageing grants.
        plan.min_prefill_tokens = self._ageing.accrue(now, has_backlog)
        if self._target_ms is not None and split.decoding:
            plan.prefill_ms_left = self._target_ms - self._predict(plan.output)
        self._add_prefill_chunks(plan, split.prefilling, now)
        self._admit_waiting(plan, now)
        # The first token of each chunk is free: told waiting times come true more often so.
        num_chunks = len(plan.rows) - num_rows
        self._ageing.spend(output.num_tokens - num_decoding - num_chunks)
        if split.background or self._state.waiting.background.num_requests:
            self._fill_with_background(plan, split.background, now)
        if not has_backlog:
            self.speculation.extend(plan)
        output.predicted_ms = self._predict(output)
        # The worker keeps this list; ours starts anew.
        output.finished_request_ids = self._state.dropped_row_ids
        self._state.dropped_row_ids = []
        return plan

    def _split_running(self) -> RunningSplit:
        decoding: list[Request] = []
        growing: list[Request] = []
        prefilling: list[Request] = []
        background: list[Request] = []
        context_reads = 0
        for request in self._state.running.values():
            num_known = len(request.token_ids)
            if request.is_background:
                background.append(request)
                if num_known > request.num_slots and not _is_prefilling(request):
                    growing.append(request)
                continue
            if _is_prefilling(request):
                prefilling.append(request)
                continue
            decoding.append(request)
            context_reads += num_known
            if num_known > request.num_slots:
                growing.append(request)
        return RunningSplit(decoding, growing, prefilling, context_reads, background)

    def _make_room(self) -> RunningSplit:
        """Preempt one victim after another until every decode row can have its block.

        Prompts need no such care: admission promised them their blocks, and what decoding takes
        of these it gives back. A single request always fits: it was checked against the pool.
        """
        state = self._state
        while True:
            split = self._split_running()
            if len(split.growing) <= state.kv.num_blocks_available:
                return split
            state.preempt(choose_victim(state.running.values(), state.kv))

    def _make_way(self) -> None:
        """Preempt background requests while others lack a seat or blocks, also for later tokens.

        All that wait are counted, also those that the budget will not start in this step: their
        turn comes soon, and what a background request gives up stays in the prefix cache.
        """
        state, kv = self._state, self._state.kv
        background = [r for r in state.running.values() if r.is_background]
        others = [r for r in state.running.values() if not r.is_background]
        waiting = state.waiting.foreground
        num_blocks = self._num_blocks_left(others)
        if waiting.num_requests:
            num_blocks += num_growth_blocks(others, kv, GROWTH_BLOCKS_NEW)
            num_blocks += kv.blocks_for(waiting.num_tokens)
            num_blocks += waiting.num_requests * (1 + GROWTH_BLOCKS_NEW)
        while background:
            has_seats = len(state.running) + waiting.num_requests <= self.max_running
            if has_seats and num_blocks <= kv.num_blocks_available:
                return
            victim = max(background, key=_service_order)
            background.remove(victim)
            state.preempt(victim)

    def _fill_with_background(self, plan: StepPlan, background: list[Request], now: float) -> None:
        """Give what is left of the step to background requests, the urgent ones first."""
        plan.is_background_turn = True
        plan.num_blocks_reserved = plan.num_blocks_promised
        prefilling = [request for request in background if _is_prefilling(request)]
        decoding = [request for request in background if not _is_prefilling(request)]
        plan.num_blocks_promised += self._num_blocks_left(prefilling)
        foreground_ms = self._predict(plan.output) if plan.rows else None
        for service in (ServiceClass.URGENT, ServiceClass.IDLE):
            limit_ms = self.background.step_ms(service, foreground_ms)
            rows = [request for request in decoding if request.service is service]
            self._add_background_rows(plan, rows, limit_ms)
            plan.prefill_ms_left = limit_ms - self._predict(plan.output)
            plan.min_prefill_tokens = 0 if plan.rows else self._state.kv.block_size
            prompts = [request for request in prefilling if request.service is service]
            self._add_prefill_chunks(plan, prompts, now)
            self._admit_waiting(plan, now, service.end_priority)
        plan.is_background_only = foreground_ms is None and bool(plan.rows)
        plan.output.is_interruptible = plan.is_background_only and self.background.is_interruptible

    def _add_background_rows(
        self, plan: StepPlan, decoding: list[Request], limit_ms: float
    ) -> None:
        """Decode rows in order of service while the step stays within its limit."""
        kv, output = self._state.kv, plan.output
        for request in sorted(decoding, key=_service_order):
            if plan.tokens_left <= 0 or plan.logits_left <= 0:
                return
            num_known = len(request.token_ids)
            step_ms = self._cost.predict(
                output.num_decode_rows + 1,
                output.num_tokens - output.num_decode_rows,
                output.context_reads + num_known,
            )
            if plan.rows and step_ms > limit_ms:
                return
            blocks: list[int] = []
            if num_known > request.num_slots:
                if kv.num_blocks_available <= plan.num_blocks_reserved:
                    continue
                blocks = self._state.grow(request, num_known)
            plan.add_decode(request, blocks)

    def _num_blocks_left(self, requests: Sequence[Request]) -> int:
        """Blocks that requests still need for the tokens they know."""
        kv = self._state.kv
        return sum(kv.blocks_for(max(0, len(r.token_ids) - r.num_slots)) for r in requests)

    def _predict(self, output: SchedulerOutput) -> float:
        num_prefill = output.num_tokens - output.num_decode_rows
        return self._cost.predict(output.num_decode_rows, num_prefill, output.context_reads)

    def _add_decode_rows(self, plan: StepPlan, split: RunningSplit) -> None:
        decoding = split.decoding
        output = plan.output
        new_blocks = {
            r.request_id: self._state.grow(r, len(r.token_ids))
            for r in split.growing
            if not r.is_background
        }
        output.cached_requests = [
            CachedRequestData(
                r.request_id, new_blocks.get(r.request_id) or [], r.num_computed_tokens
            )
            for r in decoding
        ]
        output.num_scheduled_tokens = dict.fromkeys([r.request_id for r in decoding], 1)
        output.num_tokens = output.num_decode_rows = len(decoding)
        output.context_reads = split.context_reads
        plan.rows = decoding
        plan.counts = [1] * len(decoding)
        plan.tokens_left -= len(decoding)
        plan.logits_left -= len(decoding)

    def _has_backlog(self, split: RunningSplit) -> bool:
        """Whether prompts wait that could be computed now."""
        has_seat = len(self._state.running) < self.max_running
        num_waiting = self._state.waiting.foreground.num_requests
        return bool(split.prefilling) or (has_seat and num_waiting > 0)

    def _add_prefill_chunks(self, plan: StepPlan, prefilling: list[Request], now: float) -> None:
        """Continue prompts in order of service, after any more important waiting request."""
        kv = self._state.kv
        if len(prefilling) > 1:
            prefilling.sort(key=_service_order)
        for index, request in enumerate(prefilling):
            self._admit_waiting(plan, now, request.priority)
            num_short = self._num_short_tokens(request, prefilling[index + 1 :])
            num_tokens = self._chunk_size(request, plan, num_short)
            num_free = max(0, kv.num_blocks_available - plan.num_blocks_reserved)
            room = request.num_slots + num_free * kv.block_size
            num_tokens = min(num_tokens, room - request.num_computed_tokens)
            if num_tokens > 0:
                blocks = self._state.grow(request, request.num_computed_tokens + num_tokens)
                plan.num_blocks_promised -= len(blocks)
                plan.output.cached_requests.append(
                    CachedRequestData(request.request_id, blocks, request.num_computed_tokens)
                )
                self._add_prefill(plan, request, num_tokens)

    def _admit_waiting(self, plan: StepPlan, now: float, before_priority: float = math.inf) -> None:
        """Start waiting requests in order while seats, budgets and memory last.

        The first that memory cannot take stops the rest: nobody overtakes it for ever. Requests
        that wait for another's prefix step aside instead.
        """
        state = self._state
        if self._batching is Batching.STATIC:
            self._form_batch()
        while plan.can_prefill and len(state.running) < self._num_seats():
            request = state.waiting.peek()
            if request is None or request.priority >= before_priority:
                return
            if request.is_background:
                is_full = self._state.num_background >= self.background.max_running
                if is_full or not plan.is_background_turn:
                    return
            elif plan.is_background_turn:
                return
            block_ids, num_hit_tokens = self._match_prefix(request)
            if state.can_defer and not request.must_compute_prompt:
                found = state.deferral.find_leader(request, len(block_ids))
                if found is not None:
                    state.deferral.follow(state.waiting.park(), *found)
                    continue
            if not self._has_room(request, block_ids, plan):
                self._batch_seats = 0
                return
            request.num_computed_tokens = num_hit_tokens
            num_tokens = self._chunk_size(request, plan, 0)
            if num_tokens <= 0:
                request.num_computed_tokens = 0
                return
            self._start(plan, block_ids, num_tokens, now)

    def _form_batch(self) -> None:
        """Static batching: seats open for those waiting now, only when nothing runs."""
        if not self._state.running:
            self._batch_seats = min(len(self._state.waiting), self.max_running)

    def _num_seats(self) -> int:
        if self._batching is Batching.STATIC:
            return len(self._state.running) + self._batch_seats
        return self.max_running

    def _match_prefix(self, request: Request) -> tuple[list[int], int]:
        kv = self._state.kv
        if not kv.has_prefix_cache:
            return [], 0
        if request.block_keys is None:
            request.block_keys = make_block_keys(request.token_ids, kv.block_size)
        if request.must_compute_prompt:
            return [], 0
        return kv.match_prefix(request.namespace, request.token_ids, request.block_keys)

    def _has_room(self, request: Request, block_ids: Sequence[int], plan: StepPlan) -> bool:
        """Whether all known tokens fit beside what the running requests will need soon."""
        state = self._state
        is_returning = request.status is RequestStatus.PREEMPTED
        growth = GROWTH_BLOCKS_RETURNING if is_returning else GROWTH_BLOCKS_NEW
        num_needed = state.kv.num_blocks_needed(len(request.token_ids), block_ids)
        num_free = state.kv.num_blocks_available - plan.num_blocks_promised - num_needed
        if num_free < 0 or not state.running:
            return num_free >= 0
        keeping = (
            other
            for other in state.running.values()
            if request.is_background or not other.is_background
        )
        return num_free >= num_growth_blocks(keeping, state.kv, growth)

    def _start(self, plan: StepPlan, block_ids: list[int], num_tokens: int, now: float) -> None:
        """Give the head of the queue a row, and its first chunk."""
        state, kv = self._state, self._state.kv
        request = state.waiting.pop()
        kv.start(request.request_id, request.namespace, block_ids)
        request.num_slots = len(block_ids) * kv.block_size
        self._state.grow(request, request.num_computed_tokens + num_tokens)
        plan.num_blocks_promised += kv.blocks_for(len(request.token_ids) - request.num_slots)
        request.status = RequestStatus.RUNNING
        state.running[request.request_id] = request
        state.note_start(request, now)
        if self._batching is Batching.STATIC:
            self._batch_seats -= 1
        if state.can_defer:
            state.deferral.start(request)
        plan.output.new_requests.append(
            NewRequestData(
                request_id=request.request_id,
                token_ids=list(request.token_ids),
                num_prompt_tokens=request.num_prompt_tokens,
                sampling=request.sampling,
                seed=request.seed,
                block_ids=kv.block_ids(request.request_id),
                num_computed_tokens=request.num_computed_tokens,
            )
        )
        self._add_prefill(plan, request, num_tokens)

    def _add_prefill(self, plan: StepPlan, request: Request, num_tokens: int) -> None:
        cost_ms = self._cost.prefill_ms(num_tokens, request.num_computed_tokens)
        plan.add_prefill(request, num_tokens, cost_ms)

    def _num_short_tokens(self, request: Request, behind: Sequence[Request]) -> int:
        """Prompt tokens behind `request` that belong to much shorter prompts, as important."""
        half = request.num_tokens_left // 2
        others = [r for r in behind if r.priority <= request.priority and r.num_tokens_left <= half]
        num_tokens = sum(other.num_tokens_left for other in others)
        waiting = self._state.waiting
        if len(self._state.running) < self._num_seats():
            head = waiting.peek()
            if head is not None and head.priority <= request.priority:
                totals = waiting.totals if request.is_background else waiting.foreground
                num_tokens += totals.num_tokens if len(head.token_ids) <= half else 0
        return num_tokens

    def _chunk_size(self, request: Request, plan: StepPlan, num_short_tokens: int) -> int:
        """How many of its tokens `request` computes in this step (0: none).

        A prompt that cannot finish in this step leaves up to half of the budget to much shorter
        ones behind it, and ends its chunk at a block boundary where it can.
        """
        num_computed = request.num_computed_tokens
        left = request.num_tokens_left
        limit = min(left, plan.tokens_left)
        if computes_prompt_logits(request):
            limit = min(limit, plan.logits_left)
        elif limit == left and plan.logits_left <= 0 and not request.is_prompt_only:
            limit -= 1
        if limit <= 0:
            return 0
        size = self._cost.max_prefill_tokens(plan.prefill_ms_left, num_computed, limit)
        if size < left and num_short_tokens > 0:
            size = max((size + 1) // 2, size - num_short_tokens)
        size = max(size, min(limit, plan.min_prefill_tokens))
        if size < left:
            block_size = self._state.kv.block_size
            aligned = (num_computed + size) // block_size * block_size - num_computed
            size = aligned if aligned > 0 else size
        return size


def _is_prefilling(request: Request) -> bool:
    num_left = len(request.token_ids) - request.num_computed_tokens
    return num_left > 1 or request.is_prompt_only


def _service_order(request: Request) -> tuple[int, int]:
    return request.priority, request.arrival_index
