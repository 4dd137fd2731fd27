"""The history as a queue of work: what comes each minute, and what the machine can do in one.

The history holds no single requests, but how many came and how long they were on average. The
engine's cost model says how much of the machine's time such a request takes in a full batch:

    ms = prefill_token * computed + output * (decode_row + context_token * length + step / rows)

What comes beyond what the machine can do waits, and is carried into the next minute. That
describes hours in which more comes than goes, and heaps that last minutes; what happens within a
minute it cannot know.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from caudal.config import SchedulerConfig
from caudal.diagnosis.past import HOUR_S, Stretch, by_hour, merged
from caudal.diagnosis.report import Prediction, ServerFacts
from caudal.diagnosis.scenario import scaled, scheduler_config
from caudal.metrics.instruments import LATENCY_DETAIL_S
from caudal.scheduler.step_cost import StepCosts

BUSY_SHARE = 0.5
"""Of a minute in steps, from which it tells how long work takes."""
FULL_DEPTH = 0.5
"""Of the longest queue, from which the steps are as full as they get."""
KV_BOUND = 1.3
"""Requests of the usual length that fit the KV cache, over those that ran: less, and it is full."""
MAX_SLOWNESS = 2.0
"""Measured over predicted time (or the inverse) beyond which the costs are another machine's."""
MAX_CALIBRATION = 1.15
CALIBRATION_STEPS = 6
MAX_ERROR_PERCENT = 50.0
"""Of the reckoned TTFT, beyond which it predicts nothing."""
_P95 = 0.95
_SHARES = (1 / 8, 3 / 8, 5 / 8, 7 / 8)
"""Of a minute, in which its requests come."""


@dataclass(frozen=True, slots=True)
class Flow:
    """What comes in a minute."""

    start: int
    seconds: float
    num_requests: float
    prompt_tokens: float
    """Of a usual request."""
    computed_tokens: float
    """Of these, not found in the prefix cache."""
    output_tokens: float


@dataclass(frozen=True, slots=True)
class Backlog:
    """Flows into a server. Has the changes that remedies make."""

    flows: tuple[Flow, ...]
    scheduler: SchedulerConfig
    costs: StepCosts
    rows: float
    """Requests that share a step when it is full."""
    kv_rows: float
    """So many have room in the KV cache."""
    max_model_len: int
    enable_prefix_caching: bool

    @property
    def effective_rows(self) -> float:
        """Rows of a full step."""
        return max(1.0, min(self.rows, self.kv_rows, self.scheduler.max_num_seqs))

    def with_costs(self, factor: float) -> Backlog:
        """On a machine that takes `factor` of the time."""
        return replace(self, costs=scaled(self.costs, factor))

    def with_blocks(self, factor: float) -> Backlog:
        """With room for `factor` times the tokens."""
        is_full = self.kv_rows <= KV_BOUND * self.rows
        rows = self.rows * factor if is_full else self.rows
        return replace(self, kv_rows=self.kv_rows * factor, rows=rows)

    def with_scheduler(self, **changes: object) -> Backlog:
        """With other scheduler settings; rows grow with the seats if all were taken."""
        changed = replace(self.scheduler, **changes)  # type: ignore[arg-type]
        factor = changed.max_num_seqs / self.scheduler.max_num_seqs
        rows = self.rows * factor if factor > 1 else self.rows
        return replace(self, scheduler=changed, rows=rows)

    def thinned(self, num_servers: int) -> Backlog:
        """One of several equal servers that take turns."""
        flows = [replace(flow, num_requests=flow.num_requests / num_servers) for flow in self.flows]
        return replace(self, flows=tuple(flows))

    def smoothed(self) -> Backlog:
        """The requests of each hour at equal distances."""
        seconds: dict[int, float] = {}
        counts: dict[int, float] = {}
        for flow in self.flows:
            hour = flow.start // HOUR_S
            seconds[hour] = seconds.get(hour, 0.0) + flow.seconds
            counts[hour] = counts.get(hour, 0.0) + flow.num_requests
        flows = []
        for flow in self.flows:
            hour = flow.start // HOUR_S
            even = counts[hour] * flow.seconds / max(1e-9, seconds[hour])
            flows.append(replace(flow, num_requests=even))
        return replace(self, flows=tuple(flows))

    def answer_ms(self, flow: Flow) -> float:
        """Time of the machine that a usual answer takes in full steps."""
        costs = self.costs
        length = flow.prompt_tokens + flow.output_tokens / 2
        per_output = costs.decode_row_ms + costs.step_ms / self.effective_rows
        return (per_output + costs.context_token_ms * length) * flow.output_tokens

    def request_ms(self, flow: Flow) -> float:
        """The same of a whole request."""
        return self.costs.prefill_token_ms * flow.computed_tokens + self.answer_ms(flow)

    def load(self, flows: Sequence[Flow] | None = None) -> float:
        """Work that comes, over time that there is."""
        flows = self.flows if flows is None else flows
        seconds = sum(flow.seconds for flow in flows)
        work_ms = sum(flow.num_requests * self.request_ms(flow) for flow in flows)
        return work_ms / 1e3 / seconds if seconds else 0.0


@dataclass(frozen=True, slots=True)
class Reckoning:
    """How a backlog goes."""

    waits: tuple[tuple[float, float, float], ...]
    """(seconds since the epoch of first tokens, TTFT in ms, requests that got it)."""
    num_requests: float
    num_refused: float

    def ttft_p95_ms(self, start: int, end: int) -> float:
        """That one in twenty of the requests of that time exceeds; 0 without any."""
        within = sorted((ttft, count) for at, ttft, count in self.waits if start <= at < end)
        left = _P95 * sum(count for _, count in within)
        for ttft, count in within:
            left -= count
            if left <= 0:
                return ttft
        return within[-1][0] if within else 0.0


def reckon(backlog: Backlog) -> Reckoning:
    """Carry what is left of each minute into the next."""
    scheduler = backlog.scheduler
    waits: list[tuple[float, float, float]] = []
    queued_ms = num_refused = 0.0
    for flow in backlog.flows:
        each_ms = backlog.request_ms(flow)
        # When the last of a queue begins its answer, those before it have half of theirs to go.
        open_ms = backlog.effective_rows * backlog.answer_ms(flow) / 2
        most_ms = open_ms + min(
            scheduler.max_queue_ttft_s * 1e3, scheduler.max_queue_requests * each_ms
        )
        after_ms = max(0.0, queued_ms + flow.num_requests * each_ms - flow.seconds * 1e3)
        refused = min(flow.num_requests, max(0.0, after_ms - most_ms) / max(each_ms, 1e-9))
        after_ms = min(after_ms, most_ms)
        own_ms = backlog.costs.step_ms + backlog.costs.prefill_token_ms * flow.computed_tokens
        taken = flow.num_requests - refused
        for share in _SHARES:
            ttft_ms = max(own_ms, queued_ms + share * (after_ms - queued_ms) - open_ms)
            at_s = flow.start + share * flow.seconds + ttft_ms / 1e3
            waits.append((at_s, ttft_ms, taken / len(_SHARES)))
        num_refused += refused
        queued_ms = after_ms
    num_requests = sum(flow.num_requests for flow in backlog.flows)
    return Reckoning(tuple(waits), num_requests, num_refused)


class PastPredictor:
    """Reckons with changes to what the history holds, in one of its hours."""

    def __init__(self, minutes: Sequence[Stretch], facts: ServerFacts, hour: Stretch) -> None:
        self._hour = hour
        busy = [m for m in minutes if m.busy_ms >= BUSY_SHARE * 1e3 * m.happened.seconds]
        self.slowness = _slowness(busy, facts)
        self.scenario = _create_backlog(minutes, busy, facts, self.slowness)
        self.most_running = round(max((m.most_running for m in minutes), default=0))
        self._reckoned: dict[Backlog, Reckoning] = {}
        self._measured_ms = hour.ttft_p95_ms or 0.0
        if self._measured_ms >= LATENCY_DETAIL_S[-1] * 1e3:
            # The history counts no longer waits: it was this or more.
            self._measured_ms = max(self._measured_ms, self._ttft(self.scenario))
        factor = self._calibrated()
        self.scenario = self.scenario.with_costs(factor)
        self.calibration = self.slowness * factor
        """By which the engine's costs were multiplied in all."""

    def _calibrated(self) -> float:
        """Factor of the costs with which the reckoned TTFT comes closest to the measured one.

        Near its capacity a queue is twice as long for a few percent of slowness.
        """
        first = self._ttft(self.scenario)
        if self._measured_ms <= 0 or first <= 0:
            return 1.0
        low, high = (
            (1.0, MAX_CALIBRATION) if first < self._measured_ms else (1 / MAX_CALIBRATION, 1.0)
        )
        best, best_error = 1.0, abs(math.log(first / self._measured_ms))
        for _ in range(CALIBRATION_STEPS):
            middle = math.sqrt(low * high)
            reckoned = self._ttft(self.scenario.with_costs(middle))
            low, high = (middle, high) if reckoned < self._measured_ms else (low, middle)
            error = abs(math.log(max(1e-6, reckoned) / self._measured_ms))
            if error < best_error:
                best, best_error = middle, error
        return best

    @property
    def error_percent(self) -> float | None:
        """How far the reckoned TTFT of the hour is from the measured one; None: none measured."""
        if self._measured_ms <= 0:
            return None
        return round(abs(self._ttft(self.scenario) / self._measured_ms - 1) * 100, 1)

    @property
    def doubt(self) -> str:
        """Why nothing can be predicted; empty: it can."""
        if not 1 / MAX_SLOWNESS <= self.slowness <= MAX_SLOWNESS:
            return (
                "The costs that the engine has learnt now do not describe what was recorded "
                "(another model, other threads?): no gains can be predicted from the history."
            )
        error = self.error_percent
        if error is None or error > MAX_ERROR_PERCENT:
            return (
                "The minutes of the history do not explain the waiting: it came about within "
                "them. No gains can be predicted from them; ask while it lasts (caudal doctor "
                "without --last), when single requests are known."
            )
        return ""

    def predict(self, scenario: Backlog, metric: str) -> Prediction | None:
        """What a change would make of the TTFT measured in that hour; None if in doubt."""
        before = self._ttft(self.scenario)
        if metric != "ttft_p95_ms" or self.doubt or before <= 0:
            return None
        ratio = self._ttft(scenario) / before
        return Prediction(
            metric=metric,
            before=round(self._measured_ms, 1),
            after=round(self._measured_ms * ratio, 1),
            gain_percent=round((1 - ratio) * 100, 1),
        )

    def refused_share(self, scenario: Backlog) -> float | None:
        """Share of all requests that would be refused; None if in doubt."""
        if self.doubt:
            return None
        reckoned = self._reckon(scenario)
        return reckoned.num_refused / max(1.0, reckoned.num_requests)

    def load(self, minutes: Sequence[Stretch], scenario: Backlog | None = None) -> float:
        """Work that came in these minutes, over what the machine can do."""
        scenario = scenario or self.scenario
        starts = {minute.start for minute in minutes}
        return scenario.load([flow for flow in scenario.flows if flow.start in starts])

    def _ttft(self, scenario: Backlog) -> float:
        start = self._hour.start // HOUR_S * HOUR_S
        return self._reckon(scenario).ttft_p95_ms(start, start + HOUR_S)

    def _reckon(self, scenario: Backlog) -> Reckoning:
        found = self._reckoned.get(scenario)
        if found is None:
            found = self._reckoned[scenario] = reckon(scenario)
        return found


def _slowness(busy: Sequence[Stretch], facts: ServerFacts) -> float:
    """Measured time of the steps over what their costs come to; 1 where nothing was measured."""
    costs, whole = facts.costs, merged(busy)
    computed = whole.count("num_prompt_tokens") - whole.count("prefix_hits_tokens")
    computed += whole.count("num_preempted_tokens")
    output = whole.count("num_output_tokens")
    prompt, answer = whole.usual_lengths()
    length = prompt + answer / 2
    predicted = costs.step_ms * whole.count("num_steps")
    predicted += costs.prefill_token_ms * max(0.0, computed)
    predicted += (costs.decode_row_ms + costs.context_token_ms * length) * output
    return whole.busy_ms / predicted if predicted > 0 and whole.busy_ms > 0 else 1.0


def _create_backlog(
    minutes: Sequence[Stretch], busy: Sequence[Stretch], facts: ServerFacts, slowness: float
) -> Backlog:
    config = scheduler_config(facts)
    whole = merged(minutes)
    flows = [flow for hour in by_hour(minutes) for flow in _flows(hour, whole)]
    deepest = max((minute.queue_depth for minute in busy), default=0.0)
    full = merged([minute for minute in busy if minute.queue_depth >= FULL_DEPTH * deepest])
    steps = full.count("num_steps")
    rows = full.count("num_output_tokens") / steps if steps else float(config.max_num_seqs)
    kv_rows = facts.num_blocks * facts.block_size / max(1.0, sum(whole.usual_lengths()))
    return Backlog(
        flows=tuple(flows),
        scheduler=config,
        costs=facts.costs,
        rows=max(1.0, rows),
        kv_rows=max(1.0, kv_rows),
        max_model_len=facts.max_model_len,
        enable_prefix_caching=bool(facts.settings.get("enable_prefix_caching", True)),
    ).with_costs(slowness)


def _flows(hour: Sequence[Stretch], whole: Stretch) -> list[Flow]:
    """An hour's minutes, with the lengths that were usual in that hour."""
    own = merged(hour)
    usual = own if own.num_ended >= 1 else whole
    queries = usual.count("prefix_queries_tokens")
    missed = 1 - usual.count("prefix_hits_tokens") / queries if queries else 1.0
    prompt, output = usual.usual_lengths()
    return [
        Flow(m.start, m.happened.seconds, m.num_requests, prompt, prompt * missed, output)
        for m in hour
    ]
