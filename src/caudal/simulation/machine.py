"""A load on a simulated machine: the real scheduler, a step cost function, and virtual time."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from caudal.config import BLOCK_SIZE, CacheConfig, SchedulerConfig
from caudal.errors import OverloadedError
from caudal.sampling_params import SamplingParams
from caudal.scheduler.request import Request
from caudal.scheduler.scheduler import Scheduler
from caudal.scheduler.step_cost import StepCostModel, StepCosts
from caudal.step_io import ModelRunnerOutput, SchedulerOutput

StepTime = Callable[[SchedulerOutput], float]
"""Milliseconds that a step takes."""

MAX_STEPS = 200_000
_VOCAB_SIZE = 1 << 31
_EOG = 0
_ANY_TOKEN = 1
_FIRST_UNIQUE = 2


@dataclass(frozen=True, slots=True)
class SimulatedRequest:
    """One request as far as scheduling depends on it; it has no text."""

    arrival_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    max_tokens: int = 0
    """What the client allowed; below `num_output_tokens`: just those."""
    prefix_ids: tuple[int, ...] = ()
    """One per full block from the start of the prompt: equal ids stand for equal beginnings."""
    tenant: str = ""


@dataclass(slots=True)
class SimulatedResult:
    """What a request got; times in seconds of the simulation."""

    request: SimulatedRequest
    num_waiting: int = 0
    """Requests that waited when this one came."""
    num_running: int = 0
    kv_used: float = 0.0
    """Share of the KV blocks that requests held when this one came."""
    is_refused: bool = False
    retry_after_s: float = 0.0
    first_s: float | None = None
    end_s: float | None = None
    max_gap_s: float = 0.0
    """Longest time between two of its tokens."""
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    num_tokens: int = 0
    _last_s: float = field(default=0.0, repr=False)

    @property
    def ttft_s(self) -> float | None:
        """From arrival to the first token."""
        return None if self.first_s is None else self.first_s - self.request.arrival_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time of a token after the first."""
        if self.first_s is None or self.end_s is None or self.num_tokens < 2:
            return None
        return (self.end_s - self.first_s) / (self.num_tokens - 1)


@dataclass(frozen=True, slots=True)
class Machine:
    """What the engine would be started with, and how long its steps take."""

    step_ms: StepTime
    scheduler: SchedulerConfig
    num_blocks: int
    max_model_len: int
    enable_prefix_caching: bool = True
    prior: StepCosts = field(default_factory=StepCosts)
    """What the scheduler believes of the machine at first; it learns from there."""


@dataclass(slots=True)
class Outcome:
    """A load after it has run."""

    results: list[SimulatedResult]
    duration_s: float
    num_steps: int
    busy_s: float
    """Time in steps."""
    num_preemptions: int
    num_preempted_tokens: int
    prefix_queries_tokens: int
    prefix_hits_tokens: int
    costs: StepCosts
    """What the scheduler has learnt of the machine."""
    is_complete: bool
    """False: it was given up after too many steps."""


def step_time(costs: StepCosts) -> StepTime:
    """A machine that behaves exactly as the cost model says."""
    predict = StepCostModel(costs).predict

    def milliseconds(output: SchedulerOutput) -> float:
        num_prefill = output.num_tokens - output.num_decode_rows
        return predict(output.num_decode_rows, num_prefill, output.context_reads)

    return milliseconds


def simulate(
    requests: Sequence[SimulatedRequest], machine: Machine, max_steps: int = MAX_STEPS
) -> Outcome:
    """Run `requests` (ascending in arrival) to their end, or for `max_steps` steps."""
    return _Simulation(requests, machine).run(max_steps)


class _Simulation:
    """A scheduler, the requests that are still to come, and a clock."""

    def __init__(self, requests: Sequence[SimulatedRequest], machine: Machine) -> None:
        self._machine = machine
        self._scheduler = Scheduler(
            machine.scheduler,
            CacheConfig(
                num_blocks=machine.num_blocks, enable_prefix_caching=machine.enable_prefix_caching
            ),
            max_model_len=machine.max_model_len,
            eog_token_ids=frozenset({_EOG}),
            max_num_logits=max(machine.scheduler.max_num_seqs, 64),
            vocab_size=_VOCAB_SIZE,
            costs=machine.prior,
        )
        self._unique = itertools.count(_FIRST_UNIQUE)
        self._blocks: dict[int, int] = {}
        self._results = [SimulatedResult(request) for request in requests]
        self._open: dict[str, tuple[Request, SimulatedResult]] = {}
        self._now = 0.0

    def run(self, max_steps: int) -> Outcome:
        coming = [(str(index), result) for index, result in enumerate(self._results)]
        coming.sort(key=lambda item: item[1].request.arrival_s)
        coming.reverse()
        busy_s, num_steps, num_cycles = 0.0, 0, 0
        scheduler = self._scheduler
        start_s = self._now = coming[-1][1].request.arrival_s if coming else 0.0
        while (coming or scheduler.has_work) and num_cycles < max_steps:
            num_cycles += 1
            while coming and coming[-1][1].request.arrival_s <= self._now:
                self._arrive(*coming.pop())
            if not scheduler.has_work:
                if coming:
                    self._now = max(self._now, coming[-1][1].request.arrival_s)
                continue
            step_s = self._step()
            busy_s += step_s
            num_steps += step_s > 0
        stats = scheduler.stats()
        return Outcome(
            results=self._results,
            duration_s=self._now - start_s,
            num_steps=num_steps,
            busy_s=busy_s,
            num_preemptions=stats.num_preemptions,
            num_preempted_tokens=stats.num_preempted_tokens,
            prefix_queries_tokens=stats.prefix_queries_tokens,
            prefix_hits_tokens=stats.prefix_hits_tokens,
            costs=scheduler.cost.costs,
            is_complete=not coming and not scheduler.has_work,
        )

    def _arrive(self, request_id: str, result: SimulatedResult) -> None:
        asked, scheduler = result.request, self._scheduler
        num_held = scheduler.stats().num_blocks_held
        result.num_waiting, result.num_running = scheduler.num_waiting, scheduler.num_running
        result.kv_used = num_held / self._machine.num_blocks
        request = Request(
            request_id,
            self._tokens(asked),
            SamplingParams(max_tokens=max(asked.max_tokens, asked.num_output_tokens)),
            arrival_time=asked.arrival_s,
            tenant=asked.tenant,
        )
        refused = scheduler.add_requests([request], self._now)
        if refused:
            error = refused[0].error
            result.is_refused = True
            if isinstance(error, OverloadedError):
                result.retry_after_s = error.retry_after_s
            return
        self._open[request_id] = request, result

    def _tokens(self, asked: SimulatedRequest) -> list[int]:
        """Tokens that are equal where the recorded beginnings were, and nowhere else."""
        token_ids: list[int] = []
        for prefix_id in asked.prefix_ids[: asked.num_prompt_tokens // BLOCK_SIZE]:
            token_id = self._blocks.get(prefix_id)
            if token_id is None:
                token_id = self._blocks[prefix_id] = next(self._unique)
            token_ids += [token_id] * BLOCK_SIZE
        num_left = asked.num_prompt_tokens - len(token_ids)
        return token_ids + [next(self._unique)] * num_left

    def _step(self) -> float:
        """One step; returns its seconds."""
        scheduler = self._scheduler
        output = scheduler.schedule(self._now)
        result = ModelRunnerOutput()
        for request_id, num_tokens in output.num_scheduled_tokens.items():
            request, asked = self._open[request_id]
            if request.num_computed_tokens + num_tokens == len(request.token_ids):
                is_last = request.num_output_tokens + 1 >= asked.request.num_output_tokens
                result.sampled_token_ids[request_id] = [_EOG if is_last else _ANY_TOKEN]
        # A step without rows only tells the worker which ones to drop.
        step_ms = self._machine.step_ms(output) if output.num_tokens else 0.0
        self._now += step_ms / 1e3
        for each in scheduler.update_from_output(output, result, self._now, step_ms=step_ms):
            entry = self._open[each.request_id][1]
            if each.new_token_ids:
                if entry.first_s is None:
                    entry.first_s = self._now
                else:
                    entry.max_gap_s = max(entry.max_gap_s, self._now - entry._last_s)
                entry._last_s = self._now
                entry.num_tokens += len(each.new_token_ids)
            entry.num_cached_tokens = each.num_cached_tokens
            entry.num_preemptions = each.num_preemptions
            if each.finish_reason is not None:
                entry.end_s = self._now
                del self._open[each.request_id]
        return step_ms / 1e3
