"""No tenant waits behind another's backlog, and nobody gains by what he did not ask for."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from caudal.scheduler.request import Request
from tests.scheduler.harness import FastHarness, Harness, make_prompt, make_request
from tests.scheduler.test_simulated_machine import machine


def backlog(tenant: str, num: int, prompt: int = 100, **options: Any) -> list[Request]:
    return [
        make_request(f"{tenant}{i}", make_prompt(prompt, i), tenant=tenant, **options)
        for i in range(num)
    ]


def make_machine(**config: Any) -> FastHarness:
    defaults = {"num_blocks": 4000, "max_num_seqs": 8, "max_num_batched_tokens": 512}
    defaults |= {"enable_prefix_caching": False}  # few of the prompts are distinct
    return FastHarness(step_ms=machine(), **{**defaults, **config})


def output_tokens(harness: Harness) -> Counter[str]:
    """Output tokens of each tenant so far."""
    tokens: Counter[str] = Counter()
    for result in harness.results.values():
        tokens[result.request.tenant] += len(result.token_ids)
    return tokens


def run_for(harness: Harness, seconds: float) -> None:
    end = harness.now + seconds
    harness.run_until(lambda: harness.now >= end, max_steps=100_000)


def first_token(harness: Harness, request: Request) -> float:
    request.arrival_time = harness.now
    harness.add(request)
    result = harness.results[request.request_id]
    harness.run_until(lambda: bool(result.token_ids), max_steps=20_000)
    return result.ttft


def test_single_request_is_not_stuck_behind_two_hundred_of_another() -> None:
    harness = make_machine()
    harness.add(*backlog("a", 200, max_tokens=40))
    run_for(harness, 0.5)
    assert harness.scheduler.num_waiting > 150
    waited = first_token(harness, make_request("b", make_prompt(100, 999), tenant="b"))
    num_left = harness.scheduler.num_waiting
    assert num_left > 130
    # At most until a few of the eight running requests have ended.
    assert waited < 1.0
    harness.run(100_000)
    assert all(result.is_finished for result in harness.results.values())


def test_tenants_share_equally_however_much_each_asks() -> None:
    harness = make_machine()
    harness.add(*backlog("a", 300, max_tokens=30))
    harness.add(*backlog("b", 120, max_tokens=30))
    run_for(harness, 5.0)
    tokens = output_tokens(harness)
    assert harness.scheduler.num_waiting > 180
    assert tokens["a"] == pytest.approx(tokens["b"], rel=0.15)


def test_long_requests_do_not_buy_a_larger_share() -> None:
    harness = make_machine()
    harness.add(*backlog("long", 100, prompt=400, max_tokens=80))
    harness.add(*backlog("short", 600, prompt=50, max_tokens=10))
    run_for(harness, 8.0)
    served = harness.scheduler._state.shares.served
    assert harness.scheduler.num_waiting > 100
    assert served("long") == pytest.approx(served("short"), rel=0.2)


def test_weights_divide_the_machine() -> None:
    harness = make_machine()
    harness.add(*backlog("a", 300, max_tokens=30, weight=3.0))
    harness.add(*backlog("b", 300, max_tokens=30))
    run_for(harness, 6.0)
    tokens = output_tokens(harness)
    assert tokens["a"] / tokens["b"] == pytest.approx(3.0, rel=0.2)


def test_idle_time_is_not_saved_up() -> None:
    """Who comes late shares equally from then on; he does not first catch up."""
    harness = make_machine()
    harness.add(*backlog("a", 400, max_tokens=30))
    run_for(harness, 3.0)
    before = output_tokens(harness)["a"]
    harness.add(*backlog("b", 400, max_tokens=30))
    run_for(harness, 4.0)
    tokens = output_tokens(harness)
    assert (tokens["a"] - before) / tokens["b"] == pytest.approx(1.0, abs=0.3)


def test_output_that_was_not_said_is_not_charged() -> None:
    harness = make_machine()
    harness.add(*backlog("a", 1, max_tokens=500))
    harness.step()
    charged = harness.scheduler._state.shares.served("a")
    harness.scheduler.abort(["a0"], harness.now)
    assert harness.scheduler._state.shares.served("a") < charged


def test_priority_comes_before_fairness() -> None:
    harness = Harness(max_num_seqs=1)
    harness.add(*backlog("a", 3, prompt=20))
    harness.add(*backlog("b", 3, prompt=20, priority=1))
    harness.run()
    ends = sorted(harness.results, key=lambda name: harness.results[name].token_times[-1])
    assert ends == ["a0", "a1", "a2", "b0", "b1", "b2"]


def test_without_tenants_requests_are_served_as_they_came() -> None:
    harness = Harness(max_num_seqs=1)
    rng = random.Random(3)
    for index in range(12):
        prompt = make_prompt(rng.randint(5, 90), index)
        harness.add(make_request(f"r{index}", prompt, max_tokens=rng.randint(1, 9)))
    harness.run()
    times = [harness.results[f"r{index}"].ttft for index in range(12)]
    assert times == sorted(times)


def test_full_queue_still_takes_a_tenant_within_its_share() -> None:
    harness = Harness(max_num_seqs=2, max_queue_requests=10)
    assert len(harness.add(*backlog("a", 30))) == 18
    assert len(harness.add(*backlog("b", 30))) == 25
    assert len(harness.add(*backlog("c", 30))) == 27
    # Nobody exceeds twice the bound, and the first still waits for its turn.
    assert harness.scheduler.num_waiting <= 20
    refused = harness.add(make_request("more", 20, tenant="a"))
    assert [refusal.reason for refusal in refused] == ["queue_requests"]
    harness.run()
    harness.check_all_complete()


def test_predicted_wait_of_a_tenant_leaves_out_what_others_will_yield() -> None:
    harness = make_machine(max_queue_ttft_s=2.0)
    harness.add(*backlog("a", 40, max_tokens=30))
    run_for(harness, 0.5)
    harness.add(*[make_request(f"x{i}", make_prompt(200, i), tenant="a") for i in range(300)])
    assert harness.add(make_request("late", make_prompt(200, 400), tenant="a")) != []
    assert harness.add(make_request("other", make_prompt(200, 401), tenant="b")) == []


@pytest.mark.parametrize("num_own", [0, 5])
def test_predicted_wait_between_tenants_is_close_to_what_happens(num_own: int) -> None:
    harness = make_machine()
    harness.add(*backlog("a", 30, max_tokens=30))
    harness.run(10_000)
    harness.add(
        *[
            make_request(f"x{i}", make_prompt(100, i + 50), tenant="a", max_tokens=30)
            for i in range(100)
        ]
    )
    run_for(harness, 1.0)
    harness.add(*backlog("b", num_own, max_tokens=30))
    probe = make_request("probe", make_prompt(100, 999), tenant="b", max_tokens=30)
    predicted = harness.scheduler._admission.predicted_ttft_ms(100, harness.scheduler._load(probe))
    assert predicted == pytest.approx(first_token(harness, probe) * 1e3, rel=0.5, abs=150)


def test_random_tenants_keep_the_queue_consistent() -> None:
    rng = random.Random(7)
    harness = Harness(max_num_seqs=4, num_blocks=40, max_model_len=300)
    for index in range(300):
        tenant = rng.choice("abc")
        request = make_request(
            f"r{index}",
            make_prompt(rng.randint(1, 120), rng.randrange(4)),
            tenant=tenant,
            weight=1.0 + (tenant == "c"),
            priority=rng.choice([0, 0, 0, 1]),
            max_tokens=rng.randint(1, 30),
            arrival_time=harness.now,
        )
        harness.add(request)
        if rng.random() < 0.1:
            harness.scheduler.abort([rng.choice(list(harness.results))], harness.now)
        harness.step()
    harness.run()
    assert all(result.is_finished for result in harness.results.values())
    harness.check_idle()
