"""Offline work takes what interactive requests leave, and nothing else."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import dataclass, field
from typing import Any

import pytest

from caudal.config import SchedulerConfig
from caudal.scheduler.background import BackgroundPolicy
from caudal.scheduler.request import Request
from caudal.scheduler.service_class import ServiceClass
from caudal.scheduler.step_cost import StepCostModel
from caudal.step_io import SchedulerOutput
from tests.scheduler.harness import FastHarness, Harness, make_prompt, make_request
from tests.scheduler.test_simulated_machine import machine

IDLE, URGENT, LATE = ServiceClass.IDLE, ServiceClass.URGENT, ServiceClass.LATE
COSTS = {"step": 4.0, "row": 0.5, "token": 0.2, "context": 1.3e-4}


def background(name: str, num_tokens: int = 30, **options: Any) -> Request:
    """An idle request that shares no prefix with any other."""
    options = {"service": IDLE, "max_tokens": 200, "namespace": name, **options}
    return make_request(name, num_tokens, **options)


def person(name: str, num_tokens: int = 30, **options: Any) -> Request:
    """An interactive request that shares no prefix with any other."""
    return make_request(name, num_tokens, namespace=name, **options)


def scheduled(output: SchedulerOutput, first_letter: str) -> list[str]:
    return [name for name in output.num_scheduled_tokens if name.startswith(first_letter)]


def fill_with_background(harness: Harness, num_requests: int, **options: Any) -> None:
    for index in range(num_requests):
        harness.add(background(f"b{index}", **options))
    harness.run_until(lambda: len(harness.results["b0"].token_ids) > 3)


def settle(harness: Harness) -> None:
    """Teach the cost model what the machine's steps take."""
    harness.add(person("teacher", 300, max_tokens=100))
    harness.run()


def test_burst_finds_seats_in_the_next_step_though_background_held_all() -> None:
    harness = Harness(max_num_seqs=16, max_num_batched_tokens=512, tpot_ms=None, ttft_ms=None)
    fill_with_background(harness, 30)
    assert harness.scheduler.num_running == 14  # an eighth stays free
    for index in range(16):
        harness.add(person(f"i{index}", 20))
    output = harness.step()
    assert len(scheduled(output, "i")) == 16
    assert harness.scheduler.num_running == 16
    harness.run()
    harness.check_all_complete()
    harness.check_idle()


def test_newcomer_gets_the_blocks_of_background_requests() -> None:
    harness = Harness(num_blocks=32, max_num_batched_tokens=512, tpot_ms=None, ttft_ms=None)
    fill_with_background(harness, 10, num_tokens=60)
    harness.add(person("i", 20 * 16, max_tokens=40))
    output = harness.step()
    assert scheduled(output, "i") == ["i"]
    assert harness.results["i"].token_ids
    harness.run()
    harness.check_all_complete()


def test_growing_interactive_requests_never_lose_to_background_ones() -> None:
    harness = Harness(num_blocks=24, max_num_batched_tokens=64, tpot_ms=None, ttft_ms=None)
    for index in range(3):
        harness.add(person(f"i{index}", 30, max_tokens=80))
        harness.add(background(f"b{index}", 40, max_tokens=60))
    harness.run()
    harness.check_all_complete()
    for name, result in harness.results.items():
        assert name.startswith("b") or result.request.num_preemptions == 0
    last = max(harness.results[f"i{i}"].token_times[-1] for i in range(3))
    assert last < max(harness.results[f"b{i}"].token_times[-1] for i in range(3))


def test_waiting_background_requests_are_nobody_s_queue() -> None:
    harness = Harness(max_num_seqs=2, max_queue_requests=3, max_queue_tokens=400)
    for index in range(3):
        assert harness.add(background(f"b{index}", 100)) == []
    harness.step()
    before = harness.scheduler.stats()
    assert before.predicted_ttft_ms < 50
    for index in range(5):
        assert harness.add(person(f"i{index}", 70)) == []
    refused = harness.add(background("b9", 100))
    assert [refusal.reason for refusal in refused] == ["queue_requests"]
    stats = harness.scheduler.stats()
    assert (stats.num_background_running, stats.num_background_waiting) == (1, 2)


def test_background_requests_do_not_teach_admission_about_people() -> None:
    harness = Harness()
    harness.add(person("i", 40, max_tokens=10))
    harness.run()
    averages = harness.scheduler._state.averages
    before = (averages.prompt_tokens, averages.lengths.version)
    for index in range(5):
        harness.add(background(f"b{index}", 200, max_tokens=150))
    harness.run()
    assert (averages.prompt_tokens, averages.lengths.version) == before


def test_steps_with_people_hardly_grow() -> None:
    harness = FastHarness(step_ms=machine(**COSTS), num_blocks=2000, max_num_seqs=64)
    settle(harness)
    harness.add(person("i", 50, max_tokens=400))
    for index in range(40):
        harness.add(background(f"b{index}"))
    harness.run_until(lambda: len(harness.results["i"].token_ids) > 10)
    while not harness.results["i"].is_finished:
        harness.step()
    times = harness.results["i"].token_times[100:]
    assert (times[-1] - times[0]) / (len(times) - 1) < 0.0045 * 1.08
    harness.run_until(lambda: harness.results["b0"].is_finished)


def test_urgent_requests_fill_the_target_and_idle_ones_do_not_follow() -> None:
    harness = FastHarness(step_ms=machine(**COSTS), num_blocks=2000, max_num_seqs=64, tpot_ms=30.0)
    settle(harness)
    harness.add(person("i", 50, max_tokens=300))
    for index in range(30):
        harness.add(background(f"u{index}", service=URGENT, max_tokens=400))
        harness.add(background(f"b{index}"))
    harness.run_until(lambda: len(harness.results["i"].token_ids) > 100)
    output = harness.step()
    assert len(scheduled(output, "u")) >= 25
    assert not scheduled(output, "b")
    assert 15 < output.predicted_ms < 27.5
    while not harness.results["i"].is_finished:
        harness.step()
    assert harness.results["i"].max_gap() < 0.030 * 1.1


def test_steps_without_people_stay_short_for_whoever_comes_next() -> None:
    harness = FastHarness(
        step_ms=machine(**COSTS), num_blocks=4000, max_num_seqs=128, ttft_ms=500.0
    )
    settle(harness)
    for index in range(120):
        harness.add(background(f"b{index}", 200))
    steps = [harness.step() for _ in range(400)]
    assert max(output.predicted_ms for output in steps) < 15 * 1.05
    # Far from starved: the steps are full.
    late = steps[200:]
    assert sum(output.predicted_ms for output in late) / len(late) > 12


def test_slow_machine_still_shares_steps_between_background_rows() -> None:
    costs = {"step": 150.0, "row": 10.0, "token": 8.0, "context": 6.5e-4}
    harness = FastHarness(step_ms=machine(**costs), num_blocks=4000, max_num_seqs=32)
    settle(harness)
    for index in range(20):
        harness.add(background(f"b{index}", 8))
    harness.run_until(lambda: len(harness.results["b0"].token_ids) > 40)
    assert len(scheduled(harness.step(), "b")) > 8


def test_without_targets_background_work_takes_all_it_can() -> None:
    harness = FastHarness(
        step_ms=machine(**COSTS), num_blocks=4000, max_num_seqs=64, tpot_ms=None, ttft_ms=None
    )
    harness.add(person("i", 50, max_tokens=300))
    for index in range(60):
        harness.add(background(f"b{index}"))
    harness.run_until(lambda: len(harness.results["i"].token_ids) > 50)
    assert len(scheduled(harness.step(), "b")) == 56  # seven of eight seats


def test_late_requests_run_like_people_s_but_after_them() -> None:
    harness = Harness(max_num_seqs=1)
    harness.add(background("late", service=LATE, max_tokens=5))
    harness.add(background("idle", max_tokens=5))
    harness.add(person("i", max_tokens=5, priority=2**31 - 1))
    harness.run()
    order = sorted(harness.results, key=lambda name: harness.results[name].token_times[0])
    assert order == ["i", "late", "idle"]


def test_priority_counts_within_a_class_only() -> None:
    harness = Harness(max_num_seqs=1)
    harness.add(person("low", priority=2**31 - 1, max_tokens=2))
    harness.add(background("first", priority=-(2**31), max_tokens=2))
    harness.add(background("second", priority=5, max_tokens=2))
    harness.add(background("urgent", priority=7, service=URGENT, max_tokens=2))
    harness.run()
    order = sorted(harness.results, key=lambda name: harness.results[name].token_times[0])
    assert order == ["low", "urgent", "first", "second"]


@pytest.mark.parametrize("service", list(ServiceClass))
def test_any_class_alone_gets_the_whole_machine(service: ServiceClass) -> None:
    harness = Harness(num_blocks=14, max_num_batched_tokens=48, tpot_ms=3.0, ttft_ms=10.0)
    for index in range(8):
        harness.add(background(f"b{index}", 50, service=service, max_tokens=60))
    harness.run()
    harness.check_all_complete()
    harness.check_idle()


def policy(ttft_ms: float | None, tpot_ms: float | None) -> BackgroundPolicy:
    config = SchedulerConfig(ttft_ms=ttft_ms, tpot_ms=tpot_ms)
    return BackgroundPolicy(config, StepCostModel(), tpot_ms, 64)


def test_limits_of_steps_follow_the_targets() -> None:
    chat = policy(500.0, 50.0)
    assert chat.step_ms(IDLE, 20.0) == pytest.approx(20.2)
    assert chat.step_ms(URGENT, 20.0) == 50.0
    assert chat.step_ms(URGENT, 60.0) == pytest.approx(60.6)
    assert chat.step_ms(IDLE, None) == 15.0
    assert chat.step_ms(URGENT, None) == 50.0
    assert policy(20.0, 50.0).step_ms(IDLE, None) == pytest.approx(2 * 5.5)  # the prior's row
    assert policy(None, None).step_ms(IDLE, 20.0) == math.inf
    assert policy(None, None).step_ms(IDLE, None) == math.inf
    assert chat.max_running == 56
    assert BackgroundPolicy(SchedulerConfig(), StepCostModel(), None, 1).max_running == 1


def test_steps_that_can_be_interrupted_grow_and_shrink_when_they_are() -> None:
    limits = policy(500.0, 50.0)
    limits.can_interrupt = True
    assert limits.is_interruptible
    assert limits.step_ms(IDLE, None) == 15.0
    for _ in range(50):
        limits.note_step(was_interrupted=False)
    assert limits.step_ms(IDLE, None) == 50.0
    for expected in (25.0, 15.0, 15.0):
        assert limits.is_interruptible
        limits.note_step(was_interrupted=True)
        assert limits.step_ms(IDLE, None) == expected
    assert not limits.is_interruptible  # one step must come to its end
    limits.note_step(was_interrupted=False)
    assert limits.is_interruptible


@pytest.mark.parametrize("ttft_ms", [500.0, None])
def test_nothing_is_interrupted_unless_somebody_tends_it(ttft_ms: float | None) -> None:
    limits = policy(ttft_ms, 50.0)
    limits.can_interrupt = ttft_ms is None
    before = limits.step_ms(IDLE, None)
    for _ in range(50):
        limits.note_step(was_interrupted=False)
    assert not limits.is_interruptible
    assert limits.step_ms(IDLE, None) == before


def test_only_steps_that_nobody_waits_for_can_be_interrupted() -> None:
    harness = Harness(can_interrupt=True)
    harness.add(person("i", max_tokens=12), background("b0", max_tokens=30), background("b1"))
    while harness.scheduler.has_work:
        output = harness.step()
        assert output.is_interruptible == (scheduled(output, "i") == [] and output.num_tokens > 0)
    harness.check_all_complete()


def test_newcomer_is_in_the_step_after_an_interruption() -> None:
    harness = Harness(can_interrupt=True)
    fill_with_background(harness, 6)
    harness.worker.interrupts = lambda: True
    before = harness.scheduler.stats().num_output_tokens
    harness.step()
    stats = harness.scheduler.stats()
    assert (stats.num_interrupted_steps, stats.num_output_tokens) == (1, before)
    harness.add(person("i", 20))
    assert scheduled(harness.step(), "i") == ["i"]
    harness.run()  # though each step is interrupted that may be
    harness.check_all_complete()
    harness.check_idle()


def test_interrupted_steps_do_not_teach_what_steps_take() -> None:
    harness = Harness(can_interrupt=True, step_ms=10.0)
    fill_with_background(harness, 6)
    before = harness.scheduler.cost.costs
    harness.worker.interrupts = lambda: True
    harness.step_ms = lambda _: 0.1
    for _ in range(3):
        harness.step()
    assert harness.scheduler.cost.costs == before


@dataclass
class Traffic:
    """People who come at random, and a batch that always has more to do."""

    rate_per_s: float
    with_people: bool = True
    with_batch: bool = True
    seconds: float = 40.0
    harness: FastHarness = field(init=False)
    busy_s: float = 0.0
    num_made: int = 0
    open: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.harness = FastHarness(
            step_ms=machine(**COSTS),
            num_blocks=4000,
            max_num_batched_tokens=512,
            max_num_seqs=64,
        )

    def run(self) -> Traffic:
        rng, harness = random.Random(1), self.harness
        arrivals, now = [], 0.0
        while self.with_people and now < self.seconds:
            now += rng.expovariate(self.rate_per_s)
            arrivals.append((now, rng.randint(50, 300), rng.randint(40, 120)))
        for when, num_prompt, num_output in arrivals:
            self._advance(when)
            name = f"i{len(harness.results)}"
            harness.add(person(name, num_prompt, max_tokens=num_output, arrival_time=when))
        self._advance(self.seconds)
        return self

    def _advance(self, until: float) -> None:
        harness = self.harness
        while harness.now < until:
            if self.with_batch:
                self._refill()
            if not harness.scheduler.has_work:
                harness.now = until
                return
            before = harness.now
            harness.step()
            self.busy_s += harness.now - before

    def _refill(self) -> None:
        """As the batch runner does: always a few more than the engine runs."""
        self.open = [name for name in self.open if not self.harness.results[name].is_finished]
        running = self.harness.scheduler.stats().num_background_running
        while len(self.open) < min(64, running) + 8:
            name = f"b{self.num_made}"
            self.num_made += 1
            prompt = make_prompt(100 + self.num_made * 37 % 200)
            self.harness.add(background(name, prompt, max_tokens=64))  # type: ignore[arg-type]
            self.open.append(name)

    def people(self) -> tuple[float, float]:
        """99th percentiles of time to first token and of gaps, in ms."""
        done = [r for name, r in self.harness.results.items() if name[0] == "i" and r.is_finished]
        gaps = [b - a for r in done for a, b in itertools.pairwise(r.token_times)]
        return percentile([r.ttft for r in done]), percentile(gaps)

    def batch_tokens_per_s(self) -> float:
        results = self.harness.results.items()
        num_tokens = sum(len(result.token_ids) for name, result in results if name[0] == "b")
        return num_tokens / self.harness.now


def percentile(values: list[float]) -> float:
    return sorted(values)[math.ceil(0.99 * len(values)) - 1] * 1e3


def test_batch_lives_on_idle_capacity_and_people_hardly_notice() -> None:
    """The benchmark of the same claim, on a simulated machine."""
    alone = Traffic(1.5, with_people=False).run().batch_tokens_per_s()
    quiet = Traffic(1.5, with_batch=False).run()
    shared = Traffic(1.5).run()
    idle_share = 1 - quiet.busy_s / quiet.harness.now
    assert 0.2 < idle_share < 0.8
    (ttft, gap), (ttft_shared, gap_shared) = quiet.people(), shared.people()
    assert gap_shared < 1.1 * gap
    # One background step of 15 ms at most is in a newcomer's way.
    assert ttft_shared < ttft + 15 * 1.1
    assert shared.batch_tokens_per_s() > 0.7 * idle_share * alone
