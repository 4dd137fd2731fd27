"""The queue is bounded, refusals are immediate and honest, and what can never run is said so."""

from __future__ import annotations

import math
from typing import Any

import pytest

from caudal.errors import ContextLengthError, InvalidRequestError, OverloadedError
from caudal.scheduler.admission import RefusedRequest
from caudal.scheduler.request import Request
from caudal.step_io import SchedulerOutput
from tests.scheduler.harness import FastHarness, Harness, make_prompt, make_request


def linear_ms(output: SchedulerOutput) -> float:
    rows = output.num_decode_rows
    return 5.0 + 0.5 * rows + 0.2 * (output.num_tokens - rows)


def requests(num: int, start: int = 0, **options: Any) -> list[Request]:
    return [make_request(f"r{i}", make_prompt(20, i), **options) for i in range(start, start + num)]


def error_of(refused: list[RefusedRequest]) -> Exception:
    assert refused
    return refused[0].error


def test_queue_cap_refuses_the_excess_and_leaves_the_accepted_alone() -> None:
    harness = Harness(max_num_seqs=4, max_queue_requests=8)
    refused = harness.add(*requests(50))
    assert len(refused) == 50 - 8 - 4
    assert {refusal.reason for refusal in refused} == {"queue_requests"}
    harness.run()
    harness.check_all_complete()
    assert len(harness.results) == 12
    assert harness.scheduler.stats().num_rejected == {"queue_requests": 38}


def test_free_seats_do_not_count_as_queue() -> None:
    harness = Harness(max_num_seqs=8, max_queue_requests=0)
    assert len(harness.add(*requests(10))) == 2
    harness.step()
    assert len(harness.add(*requests(1, start=20))) == 1


def test_four_siblings_count_four_and_come_all_or_none() -> None:
    harness = Harness(max_num_seqs=1, max_queue_requests=5)
    assert harness.add(*requests(3)) == []
    refused = harness.add(*requests(4, start=10, parent_id="p"))
    assert [refusal.request_id for refusal in refused] == ["r10", "r11", "r12", "r13"]
    assert harness.scheduler.num_waiting == 3
    assert harness.add(*requests(3, start=20, parent_id="q")) == []


def test_more_siblings_than_could_ever_queue_is_a_bad_request() -> None:
    harness = Harness(max_num_seqs=1, max_queue_requests=3)
    error = error_of(harness.add(*requests(5, parent_id="p")))
    assert isinstance(error, InvalidRequestError) and error.param == "n"


def test_refused_sibling_refuses_its_parent() -> None:
    harness = Harness(max_model_len=100)
    good = make_request("a", 20, parent_id="p")
    bad = make_request("b", make_prompt(200), parent_id="p")
    assert len(harness.add(good, bad)) == 2
    assert not harness.scheduler.has_work


def test_token_bound_refuses_once_something_waits() -> None:
    harness = Harness(max_queue_tokens=100, num_blocks=400)
    assert harness.add(make_request("large", make_prompt(300, 1))) == []
    refused = harness.add(make_request("next", make_prompt(50, 2)))
    assert [refusal.reason for refusal in refused] == ["queue_tokens"]
    assert refused[0].retry_after_s > 0


def test_predicted_wait_bound_refuses_with_the_excess_as_retry_time() -> None:
    harness = Harness(max_queue_ttft_s=1.0, max_num_seqs=64, num_blocks=4000, step_ms=linear_ms)
    harness.add(*requests(8, max_tokens=2))
    harness.run()
    refused: list[RefusedRequest] = []
    for index in range(100):
        refused = harness.add(make_request(f"w{index}", make_prompt(400, 50 + index)))
        if refused:
            break
    assert [refusal.reason for refusal in refused] == ["queue_ttft"]
    # 0.2 ms a token: about 12 prompts of 400 tokens a second.
    assert 9 <= index <= 15
    assert 0 < refused[0].retry_after_s < 0.5


@pytest.mark.parametrize("num_streams", [0, 4])
def test_predicted_ttft_is_close_to_what_happens(num_streams: int) -> None:
    harness = FastHarness(
        max_num_seqs=32,
        num_blocks=4000,
        step_ms=linear_ms,
        max_num_batched_tokens=512,
        enable_prefix_caching=False,
    )
    harness.add(*requests(max(1, num_streams), max_tokens=5 if num_streams == 0 else 3000))
    harness.run_until(lambda: harness.num_steps >= 200 or not harness.scheduler.has_work)
    for index in range(10):
        harness.add(
            make_request(f"w{index}", make_prompt(700, 50 + index), arrival_time=harness.now)
        )
    load = harness.scheduler._load()
    load.ahead = load.waiting
    predicted = harness.scheduler._admission.predicted_ttft_ms(700, load)
    harness.add(make_request("probe", make_prompt(700, 99), arrival_time=harness.now))
    harness.run_until(lambda: bool(harness.results["probe"].token_ids))
    assert predicted == pytest.approx(harness.results["probe"].ttft * 1e3, rel=0.1)


def test_retry_time_is_when_it_would_fit() -> None:
    """Coming back after the given time (and a little) succeeds; the time is not absurd."""
    harness = Harness(max_num_seqs=4, max_queue_requests=8, step_ms=linear_ms)
    harness.add(*requests(12, max_tokens=40))
    harness.run_until(lambda: any(result.is_finished for result in harness.results.values()))
    harness.add(*requests(8, start=30, max_tokens=40))
    refused = harness.add(*requests(1, start=50))
    assert isinstance(error_of(refused), OverloadedError)
    retry_at = harness.now + refused[0].retry_after_s
    harness.run_until(lambda: harness.now >= retry_at + 0.1 * refused[0].retry_after_s)
    assert harness.add(*requests(1, start=60)) == []
    assert refused[0].retry_after_s < 3.0
    assert f"{refused[0].retry_after_s:.1f} s" in str(refused[0].error)


def test_retry_time_exists_before_anything_was_measured() -> None:
    harness = Harness(max_num_seqs=1, max_queue_requests=1)
    harness.add(*requests(2))
    (refused,) = harness.add(*requests(1, start=5))
    assert 0 < refused.retry_after_s < math.inf


def test_waiting_less_important_requests_do_not_delay_the_prediction() -> None:
    harness = Harness(max_queue_ttft_s=0.5, num_blocks=4000, max_num_seqs=64)
    for index in range(40):
        harness.add(make_request(f"w{index}", make_prompt(400, index), priority=5))
    assert harness.add(make_request("late", make_prompt(400, 60), priority=5)) != []
    assert harness.add(make_request("urgent", make_prompt(400, 61), priority=0)) == []


def test_cached_prompts_make_the_predicted_wait_shorter() -> None:
    harness = Harness(num_blocks=400, step_ms=linear_ms)
    prompt = make_prompt(320, 1)
    harness.add(make_request("cold", prompt, max_tokens=1))
    harness.run()
    before = harness.scheduler.stats().predicted_ttft_ms
    for index in range(20):
        harness.add(make_request(f"r{index}", prompt, max_tokens=1))
        harness.run()
    assert harness.scheduler.stats().predicted_ttft_ms < 0.5 * before


@pytest.mark.parametrize("max_tokens", [0, 1, 50])
def test_prompt_that_fills_the_context_is_named_with_its_limit(max_tokens: int) -> None:
    harness = Harness(max_model_len=100)
    at_limit = 100 if max_tokens == 0 else 99
    assert harness.add(make_request("fits", at_limit, max_tokens=max_tokens)) == []
    error = error_of(harness.add(make_request("r", at_limit + 1, max_tokens=max_tokens)))
    assert isinstance(error, ContextLengthError)
    assert "100" in str(error) and str(at_limit + 1) in str(error)
    harness.run()
    harness.check_all_complete()


def test_request_that_the_whole_pool_cannot_hold_is_named_with_its_limit() -> None:
    harness = Harness(num_blocks=10)
    assert harness.add(make_request("fits", make_prompt(100), max_tokens=61)) == []
    refused = harness.add(make_request("r", make_prompt(100), max_tokens=62))
    error = error_of(refused)
    assert isinstance(error, InvalidRequestError)
    assert "160 tokens" in str(error) and error.param == "max_tokens"
    assert (refused[0].reason, refused[0].retry_after_s) == ("kv_cache_exceeded", 0.0)
    harness.run()
    harness.check_all_complete()


@pytest.mark.parametrize("prompt", [[], [-1], [3, 50], [2**40]])
def test_impossible_prompts_are_refused(prompt: list[int]) -> None:
    harness = Harness()
    error = error_of(harness.add(make_request("r", prompt)))
    assert isinstance(error, InvalidRequestError) and error.param == "prompt"


def test_id_in_use_is_refused_and_its_owner_unharmed() -> None:
    harness = Harness()
    harness.add(make_request("r", 20))
    twin = make_request("r", 30)
    assert isinstance(error_of(harness.scheduler.add_requests([twin], 0.0)), InvalidRequestError)
    both = [make_request("x", 20, parent_id="p"), make_request("x", 20, parent_id="p")]
    assert len(harness.scheduler.add_requests(both, 0.0)) == 2
    harness.run()
    harness.check_complete("r")


def test_anything_that_can_run_is_accepted_when_nothing_waits() -> None:
    """An idle server must not refuse a prompt for being slow alone."""
    harness = Harness(max_queue_ttft_s=0.001, max_queue_tokens=10, num_blocks=200)
    assert harness.add(make_request("r", 2000)) == []
    harness.run()
    harness.check_complete("r")
