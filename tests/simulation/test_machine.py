"""The simulated machine agrees with arithmetic where arithmetic is possible."""

from __future__ import annotations

import pytest

from caudal.config import SchedulerConfig
from caudal.scheduler.step_cost import StepCosts
from caudal.simulation.machine import Machine, SimulatedRequest, simulate, step_time

COSTS = StepCosts(step_ms=4.0, decode_row_ms=0.5, prefill_token_ms=0.1, context_token_ms=0.0)


def machine(num_blocks: int = 1000, **config: object) -> Machine:
    scheduler = SchedulerConfig(**config)  # type: ignore[arg-type]
    return Machine(step_time(COSTS), scheduler, num_blocks, max_model_len=4096, prior=COSTS)


def test_a_request_alone_takes_what_its_steps_cost() -> None:
    outcome = simulate([SimulatedRequest(3.0, 100, 11)], machine())
    (result,) = outcome.results
    assert result.ttft_s == pytest.approx((4.0 + 100 * 0.1) / 1e3)
    assert result.tpot_s == pytest.approx(4.5 / 1e3)
    assert outcome.is_complete and outcome.num_steps == 11
    assert outcome.busy_s == pytest.approx(outcome.duration_s)


def test_answers_end_where_they_ended_however_long_they_were_allowed_to_be() -> None:
    outcome = simulate([SimulatedRequest(0.0, 20, 5, max_tokens=500)], machine())
    assert outcome.results[0].num_tokens == 5


def test_only_recorded_beginnings_are_found_in_the_cache() -> None:
    shared = (1, 2, 3)
    requests = [
        SimulatedRequest(0.0, 100, 2, prefix_ids=shared),
        SimulatedRequest(1.0, 90, 2, prefix_ids=(*shared, 4)),
        SimulatedRequest(2.0, 90, 2),
    ]
    results = simulate(requests, machine()).results
    assert [result.num_cached_tokens for result in results] == [0, 48, 0]


def test_a_cache_that_is_too_small_preempts_and_a_full_queue_refuses() -> None:
    long = [SimulatedRequest(0.0, 64, 200, max_tokens=400) for _ in range(6)]
    tight = simulate(long, machine(num_blocks=40))
    assert tight.is_complete and tight.num_preemptions > 0
    crowd = simulate(long, machine(max_num_seqs=1, max_queue_requests=2))
    assert sum(result.is_refused for result in crowd.results) == 3


def test_equal_loads_give_equal_outcomes() -> None:
    load = [SimulatedRequest(index * 0.01, 150, 20) for index in range(30)]
    first, second = (simulate(load, machine()) for _ in range(2))
    assert [r.end_s for r in first.results] == [r.end_s for r in second.results]
