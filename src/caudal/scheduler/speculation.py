"""How many guessed tokens each request computes along with its own: as many as pay."""

from __future__ import annotations

import math

from caudal.scheduler.background import BackgroundPolicy
from caudal.scheduler.request import Request
from caudal.scheduler.state import SchedulerState
from caudal.scheduler.step_cost import StepCostModel, guess_reads
from caudal.scheduler.step_plan import StepPlan
from caudal.step_io import ModelRunnerOutput

PRIOR_RIGHT = 0.25
PRIOR_JUDGED = 1.0
"""Of a request whose guesses have not been judged yet: a quarter of them are right."""
FADING = 0.93
"""Weight of what was judged before, after one more step with guesses."""
MARGIN = 2.0
"""A guess must be worth so many times what it costs: costs are estimates, and a request that ends
earlier only leaves its seat empty where nobody waits for it."""
BACKLOG_SHARE = 0.5
"""Of the milliseconds that decoding leaves of a step, while prompts wait for them."""
KEPT_BLOCKS = 2
"""Free blocks per running request that guesses leave for tokens that are known to come."""


class Speculation:
    """Adds guesses to planned steps and judges them by what was sampled.

    A step that computes a guess too takes longer by a row; if the guess is right, a whole step is
    saved. Where few requests run a row costs little against a step, so guesses pay that are seldom
    right; where many run they must be right nearly always. The model's answer is the same either
    way: each token is sampled from its own row as if it had been computed alone.
    """

    def __init__(
        self,
        state: SchedulerState,
        cost: StepCostModel,
        background: BackgroundPolicy,
        target_ms: float | None,
    ) -> None:
        """Guesses keep steps within `target_ms`, and those without others within `background`."""
        self._state = state
        self._cost = cost
        self._background = background
        self._target_ms = math.inf if target_ms is None else target_ms

    def extend(self, plan: StepPlan, *, has_backlog: bool = False) -> None:
        """Give what is left of the step's budgets to the guesses of its decode rows.

        Background requests guess only among themselves: others do not wait for their guesses.
        `has_backlog`: prompts wait, and have not been planned. They get half of what is left, and
        only such guesses are computed as are worth it without what a step costs anyway: a row that
        ends earlier makes room for them.
        """
        is_shared = not plan.is_background_only
        guessing = [
            (index, request)
            for index, request in enumerate(plan.rows)
            if request.drafts
            and request.num_tokens_left == 1
            and not (is_shared and request.is_background)
        ]
        if not guessing:
            return
        output, costs = plan.output, self._cost.costs
        num_rows = output.num_decode_rows
        context = sum(len(request.token_ids) for _, request in guessing) / len(guessing)
        row_ms = costs.decode_row_ms + costs.context_token_ms * context
        guess_ms = costs.guess_ms(context)
        # What a token costs without guesses: a row, and its part of what the step costs anyway. In
        # a step with a prompt that part is small, and the prompt would wait for the guesses. What
        # background rows add to others' step does not count: they only go along.
        counts = zip(plan.rows, plan.counts, strict=True)
        num_tokens = sum(count for request, count in counts if request.is_background != is_shared)
        token_ms = row_ms + (0.0 if has_backlog else costs.step_ms / num_tokens)
        log_needed = math.log(max(1e-6, min(0.999, MARGIN * guess_ms / max(token_ms, 1e-9))))
        num_left = min(plan.tokens_left, plan.logits_left)
        limit_ms = self._target_ms
        if not is_shared:
            limit_ms = max(self._background.step_ms(r.service, None) for _, r in guessing)
        if limit_ms < math.inf:
            num_prefill = output.num_tokens - num_rows
            step_ms = self._cost.predict(num_rows, num_prefill, output.context_reads)
            left_ms = (limit_ms - step_ms) * (BACKLOG_SHARE if has_backlog else 1.0)
            num_left = min(num_left, int(left_ms / max(guess_ms, 1e-6)))
        for index, request in guessing:
            if num_left <= 0:
                return
            count = min(num_left, self._num_worth(request, log_needed))
            num_left -= self._add(plan, index, count)

    def judge(self, plan: StepPlan, result: ModelRunnerOutput) -> None:
        """Learn from what the rows sampled, and take the guesses for their next tokens.

        The first guess is judged also where it was not computed.
        """
        counters = self._state.counters
        get_sampled = result.sampled_token_ids.get
        get_drafts = result.draft_token_ids.get
        get_computed = plan.output.draft_token_ids.get
        num_rows = num_tokens = 0
        for request in plan.rows:
            sampled = get_sampled(request.request_id)
            if sampled is None:
                continue
            num_rows += 1
            num_tokens += len(sampled)
            drafts = request.drafts
            if drafts:
                num_computed = len(get_computed(request.request_id, _NONE))
                if num_computed > 0:
                    num_right = len(sampled) - 1
                    num_judged = min(num_right + 1, num_computed)
                    counters.num_drafts += 1
                    counters.num_draft_tokens += num_computed
                    counters.num_accepted_tokens += num_right
                else:
                    num_judged, num_right = 1, int(sampled[0] == drafts[0])
                request.num_drafts_judged = request.num_drafts_judged * FADING + num_judged
                request.num_drafts_right = request.num_drafts_right * FADING + num_right
            request.drafts = get_drafts(request.request_id) or _NONE
        if num_rows and self._state.waiting:
            # Who waits is told for how long from what steps are like while others wait, too.
            num_drafts = sum(map(len, plan.output.draft_token_ids.values()))
            self._state.averages.note_rows(num_rows, num_rows + num_drafts, num_tokens)

    def _num_worth(self, request: Request, log_needed: float) -> int:
        """Guesses that are right, with all before them, more often than `exp(log_needed)`."""
        share = (request.num_drafts_right + PRIOR_RIGHT) / (
            request.num_drafts_judged + PRIOR_JUDGED
        )
        num_worth = int(log_needed / math.log(min(share, 0.99)))
        most = request.max_total_tokens - len(request.token_ids) - 1
        return min(num_worth, len(request.drafts), most)

    def _add(self, plan: StepPlan, index: int, count: int) -> int:
        """Let a row compute `count` of its guesses, or as many as memory takes."""
        request, output = plan.rows[index], plan.output
        num_known = len(request.token_ids)
        if num_known + count > request.num_slots and not self._grow(plan, request, count):
            count = request.num_slots - num_known
        if count <= 0:
            return 0
        plan.counts[index] += count
        plan.tokens_left -= count
        plan.logits_left -= count
        output.num_scheduled_tokens[request.request_id] += count
        output.draft_token_ids[request.request_id] = request.drafts[:count]
        output.num_tokens += count
        output.num_decode_rows += count
        output.context_reads += guess_reads(count, num_known)
        return count

    def _grow(self, plan: StepPlan, request: Request, count: int) -> bool:
        """Take blocks for guesses only where there are plenty."""
        kv = self._state.kv
        num_kept = plan.num_blocks_promised + KEPT_BLOCKS * len(self._state.running)
        num_new = kv.blocks_for(len(request.token_ids) + count - request.num_slots)
        if kv.num_blocks_available < num_kept + num_new:
            return False
        blocks = self._state.grow(request, len(request.token_ids) + count)
        for row in plan.output.cached_requests:
            if row.request_id == request.request_id:
                row.new_block_ids = [*row.new_block_ids, *blocks]
                return True
        for new in plan.output.new_requests:
            if new.request_id == request.request_id:
                new.block_ids = [*new.block_ids, *blocks]
        return True


_NONE: list[int] = []
