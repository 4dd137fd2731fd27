"""Requests past their deadline are dropped wherever they are, and never start in vain."""

from __future__ import annotations

from caudal.errors import OverloadedError
from caudal.scheduler.output import FinishReason
from tests.scheduler.harness import Harness, make_prompt, make_request


def test_queued_request_past_its_deadline_never_starts() -> None:
    harness = Harness(max_num_seqs=1, step_ms=100.0)
    harness.add(make_request("first", 20, max_tokens=30))
    harness.add(make_request("late", make_prompt(20, 1), deadline=1.0))
    harness.run()
    late = harness.results["late"]
    assert late.finish_reason is FinishReason.TIMEOUT
    assert late.token_ids == []
    assert late.request.first_scheduled_time is None
    assert late.last is not None and 1000 <= late.last.queue_ms <= 1200
    harness.check_complete("first")
    harness.check_idle()


def test_running_request_past_its_deadline_is_ended_and_freed() -> None:
    harness = Harness(step_ms=100.0)
    harness.add(make_request("r", 20, max_tokens=100, deadline=1.0))
    harness.add(make_request("other", make_prompt(20, 1), max_tokens=30))
    harness.run()
    result = harness.results["r"]
    assert result.finish_reason is FinishReason.TIMEOUT
    assert 0 < len(result.token_ids) <= 11  # one step may begin just before the deadline
    harness.check_complete("other")
    harness.check_idle()
    assert harness.scheduler.stats().num_finished["timeout"] == 1


def test_request_that_ends_in_time_is_untouched() -> None:
    harness = Harness()
    harness.add(make_request("r", 20, max_tokens=10, deadline=10.0))
    harness.run()
    harness.check_complete("r")
    harness.now = 20.0
    harness.add(make_request("next", make_prompt(20, 1), max_tokens=10))
    harness.run()
    harness.check_complete("next")


def test_request_that_cannot_start_in_time_is_refused_at_once() -> None:
    harness = Harness(max_num_seqs=1, step_ms=100.0)
    harness.add(make_request("first", 20, max_tokens=50))
    harness.run_until(lambda: harness.now > 2)
    harness.add(make_request("next", make_prompt(20, 1), max_tokens=50))
    hurried = make_request("r", make_prompt(20, 2), deadline=harness.now + 0.5)
    (refused,) = harness.add(hurried)
    assert refused.reason == "deadline"
    assert isinstance(refused.error, OverloadedError)
    assert "timeout" in refused.error.message
    patient = make_request("p", make_prompt(20, 2), deadline=harness.now + 60)
    assert harness.add(patient) == []
    harness.run()


def test_ended_requests_with_far_deadlines_do_not_pile_up() -> None:
    harness = Harness()
    for index in range(1000):
        harness.add(make_request(f"r{index}", 5, max_tokens=1, deadline=1e9))
        harness.run()
    assert len(harness.scheduler._state.deadlines) < 100


def test_sibling_past_its_deadline_takes_nothing_from_the_others() -> None:
    harness = Harness(max_num_seqs=1, step_ms=100.0)
    siblings = [
        make_request(f"s{i}", 20, parent_id="p", max_tokens=5, deadline=0.8) for i in range(3)
    ]
    assert harness.add(*siblings) == []
    harness.run()
    reasons = [harness.results[f"s{i}"].finish_reason for i in range(3)]
    assert reasons == [FinishReason.LENGTH, FinishReason.TIMEOUT, FinishReason.TIMEOUT]
    harness.check_idle()
