"""On an overloaded machine a refused client is told truly when it would be let in."""

from __future__ import annotations

import random
import statistics
from typing import Any

import pytest

from caudal.scheduler.admission import RefusedRequest
from caudal.scheduler.request import Request
from caudal.step_io import ModelRunnerOutput
from tests.scheduler.fake_worker import EOG
from tests.scheduler.harness import FastHarness, make_prompt, make_request
from tests.scheduler.test_simulated_machine import machine

END_TOKEN = next(iter(EOG))


class Crowd:
    """Requests of many sizes whose answers end by themselves, where nobody knows in advance."""

    def __init__(self, seed: int, **config: Any) -> None:
        self._rng = random.Random(seed)
        self._lengths: dict[str, int] = {}
        self.pause = 0.0
        """Time between two steps, over that of the step."""
        self.harness = FastHarness(
            step_ms=machine(),
            num_blocks=4000,
            max_model_len=20_000,
            max_num_batched_tokens=512,
            enable_prefix_caching=False,
            **config,
        )

    def arrive(self) -> list[RefusedRequest]:
        """One more; returns its refusal, if any."""
        request = self.make(self._rng.randint(20, 400))
        self._lengths[request.request_id] = self._rng.randint(20, 200)
        return self.harness.add(request)

    def make(self, num_prompt: int) -> Request:
        number = len(self._lengths)
        return make_request(
            f"r{number}",
            make_prompt(num_prompt, number),
            max_tokens=1000,
            ignore_eos=False,
            arrival_time=self.harness.now,
        )

    def step(self) -> None:
        harness = self.harness
        output, result = harness.scheduler.schedule(harness.now), ModelRunnerOutput()
        for request_id, num_tokens in output.num_scheduled_tokens.items():
            request = harness.results[request_id].request
            if request.num_computed_tokens + num_tokens == len(request.token_ids):
                is_last = request.num_output_tokens + 1 >= self._lengths[request_id]
                result.sampled_token_ids[request_id] = [END_TOKEN if is_last else 9]
        step_ms = harness.step_ms(output)
        harness.now += (1 + self.pause) * step_ms / 1e3
        harness.collect(harness.scheduler.update_from_output(output, result, harness.now, step_ms))

    def would_admit(self, num_prompt: int) -> bool:
        """Whether a request like the refused one would be let in now; it is not added."""
        probe = self.make(num_prompt)
        probe.max_total_tokens = num_prompt + 1000
        scheduler = self.harness.scheduler
        load = scheduler._load(probe)
        load.now = self.harness.now
        return scheduler._admission.check([probe], load) is None

    def measure_burst(self) -> float:
        """Seconds told over seconds that it took, when a crowd comes to an idle machine."""
        harness, refused = self.harness, list[RefusedRequest]()
        due = harness.now
        while not refused:
            while due <= harness.now and not refused:  # they come while a step runs, too
                refused = self.arrive()
                due += 0.0015
            if not refused:
                self.step()
        started = harness.now
        while not self.would_admit(75):
            self.step()
        waited_s = harness.now - started
        while harness.scheduler.has_work:
            self.step()
        return refused[0].retry_after_s / waited_s

    def measure(self, num_samples: int) -> list[float]:
        """Seconds told over seconds that it took, at each time the queue had filled up."""
        ratios: list[float] = []
        while len(ratios) < num_samples:
            refused: list[RefusedRequest] = []
            while not refused:
                num_prompt = self._rng.randint(20, 400)
                request = self.make(num_prompt)
                self._lengths[request.request_id] = self._rng.randint(20, 200)
                refused = self.harness.add(request)
            started = self.harness.now
            while not self.would_admit(num_prompt):
                self.step()
            ratios.append(refused[0].retry_after_s / (self.harness.now - started))
        return ratios


@pytest.mark.parametrize(
    "config",
    [{"max_queue_requests": 100}, {"max_queue_tokens": 20_000}, {"max_queue_ttft_s": 10.0}],
    ids=["requests", "tokens", "ttft"],
)
def test_retry_after_turns_out_true_within_thirty_percent(config: dict[str, Any]) -> None:
    """Waits of about a second, that is, of some twelve to thirty ends of random answers."""
    crowd = Crowd(1, max_num_seqs=16, **config)
    # The first fillings teach how long answers are and what a step costs.
    ratios = crowd.measure(34)[10:]
    assert statistics.median(ratios) == pytest.approx(1.0, abs=0.15)
    num_true = sum(0.7 <= ratio <= 1.3 for ratio in ratios)
    assert num_true >= 0.75 * len(ratios), sorted(ratios)


@pytest.mark.parametrize(
    "config",
    [
        {"max_num_seqs": 64, "max_queue_requests": 64},
        {"max_num_seqs": 16, "max_queue_requests": 16},
        {"max_num_seqs": 64, "max_queue_tokens": 20_000},
        {"max_num_seqs": 64, "max_queue_ttft_s": 8.0},
    ],
    ids=["requests", "few seats", "tokens", "ttft"],
)
def test_refusal_in_a_burst_does_not_tell_twice_the_time(config: dict[str, Any]) -> None:
    """Nearly all seats are free and no answer has begun: nothing is as it was on average."""
    crowd = Crowd(4, **config)
    crowd.measure_burst()  # teaches how long answers are and what a step costs
    ratios = [crowd.measure_burst() for _ in range(5)]
    assert statistics.median(ratios) == pytest.approx(1.0, abs=0.25)
    assert sum(0.7 <= ratio <= 1.3 for ratio in ratios) >= 4, ratios


def test_machine_that_is_slower_than_its_steps_tells_is_told_true_in_the_end() -> None:
    """Whatever makes it so: the first waits are told far too short."""
    crowd = Crowd(5, max_num_seqs=16, max_queue_requests=100)
    crowd.pause = 3.0
    ratios = crowd.measure(40)
    assert max(ratios[:2]) < 0.6
    assert statistics.median(ratios[20:]) == pytest.approx(1.0, abs=0.15)


def test_looking_whether_a_queue_has_opened_does_not_open_it() -> None:
    crowd = Crowd(6, max_num_seqs=4, max_queue_requests=16)
    while not crowd.arrive():
        pass
    admission = crowd.harness.scheduler._admission
    before = admission._requests_mark._closed_from
    while not crowd.would_admit(20):
        crowd.step()
        assert admission._requests_mark._closed_from == before


def test_full_queue_opens_again_for_many_at_once() -> None:
    """Else everybody who was refused comes back for the one place that became free."""
    crowd = Crowd(2, max_num_seqs=16, max_queue_requests=80)
    crowd.measure(2)
    num_admitted = 0
    while not crowd.arrive():
        num_admitted += 1
    assert num_admitted >= 8


def test_urgent_request_does_not_wait_until_a_full_queue_has_drained() -> None:
    crowd = Crowd(3, max_num_seqs=4, max_queue_requests=16)
    while not crowd.arrive():
        pass
    while crowd.harness.scheduler.num_waiting > 15:
        crowd.step()
    assert not crowd.would_admit(50)
    urgent = crowd.make(50)
    urgent.priority = -1
    assert crowd.harness.add(urgent) == []
