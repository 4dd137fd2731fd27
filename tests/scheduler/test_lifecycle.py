"""Requests end for the right reason, exactly once, whatever happens to them and when."""

from __future__ import annotations

import pytest

from caudal.sampling_params import SamplingParams
from caudal.scheduler.output import FinishReason, RequestOutput
from caudal.scheduler.request import Request, RequestStatus, accept_tokens
from caudal.step_io import ModelRunnerOutput
from tests.scheduler.fake_worker import EOG
from tests.scheduler.harness import Harness, Result, make_prompt, make_request


def accepting(**options: object) -> Request:
    request = Request("r", [5, 6], SamplingParams(**options), 0.0)  # type: ignore[arg-type]
    request.max_total_tokens = 2 + request.sampling.max_tokens
    request.stop_token_ids = frozenset(request.sampling.stop_token_ids) | EOG
    return request


def test_stop_id_ends_the_request_and_is_kept() -> None:
    assert accept_tokens(accepting(), [9, 1]) == ([9, 1], FinishReason.STOP)


def test_tokens_after_a_stop_are_dropped() -> None:
    request = accepting(stop_token_ids=(8,))
    assert accept_tokens(request, [9, 8, 7, 7]) == ([9, 8], FinishReason.STOP)
    assert request.token_ids == [5, 6, 9, 8]


def test_tokens_past_max_tokens_are_dropped() -> None:
    request = accepting(max_tokens=3)
    assert accept_tokens(request, [9, 9, 9, 9]) == ([9, 9, 9], FinishReason.LENGTH)
    assert request.num_output_tokens == 3


def test_stop_on_the_last_token_is_a_stop() -> None:
    assert accept_tokens(accepting(max_tokens=2), [9, 1])[1] is FinishReason.STOP


def test_stop_before_min_tokens_does_not_end() -> None:
    request = accepting(min_tokens=2)
    assert accept_tokens(request, [1, 1]) == ([1, 1], None)
    assert accept_tokens(request, [1]) == ([1], FinishReason.STOP)


def result_of(harness: Harness, name: str = "r") -> Result:
    return harness.results[name]


@pytest.mark.parametrize("ignore_eos", [True, False])
def test_output_equals_the_request_alone(ignore_eos: bool) -> None:
    harness = Harness()
    harness.add(make_request("r", 70, max_tokens=60, ignore_eos=ignore_eos, seed=3))
    harness.run()
    harness.check_complete("r")
    harness.check_idle()


def test_context_limit_ends_with_length() -> None:
    harness = Harness(max_model_len=40)
    harness.add(make_request("r", 30, max_tokens=100))
    harness.run()
    assert len(result_of(harness).token_ids) == 10
    assert result_of(harness).finish_reason is FinishReason.LENGTH
    harness.check_complete("r")


def test_max_tokens_zero_computes_the_prompt_and_samples_nothing() -> None:
    harness = Harness(max_num_batched_tokens=32)
    harness.add(make_request("r", 65, max_tokens=0, num_prompt_logprobs=0))
    harness.run()
    result = result_of(harness)
    assert result.finish_reason is FinishReason.LENGTH
    assert (result.token_ids, len(result.outputs)) == ([], 1)
    assert harness.worker.num_computed_in_all == 65
    assert result.prompt_logprobs is not None
    assert [entry.token_id for entry in result.prompt_logprobs] == make_prompt(65)[1:]


def test_first_output_carries_queue_time_and_the_last_the_stop_id() -> None:
    harness = Harness(step_ms=10.0, max_num_seqs=1)
    harness.add(make_request("first", 10, max_tokens=5))
    harness.add(make_request("r", 10, max_tokens=200, ignore_eos=False))
    harness.run()
    result = result_of(harness)
    assert result.outputs[0].queue_ms == pytest.approx(50.0)
    assert {output.queue_ms for output in result.outputs[1:]} == {0.0}
    assert result.last is not None
    assert result.last.stop_token_id == result.token_ids[-1] in EOG
    assert result.outputs[0].num_prompt_tokens == 10


def test_logprobs_come_with_their_tokens() -> None:
    harness = Harness()
    harness.add(make_request("r", 10, max_tokens=5, num_logprobs=1))
    harness.run()
    for output in result_of(harness).outputs:
        assert output.logprobs is not None
        assert [entry.token_id for entry in output.logprobs] == output.new_token_ids


def abort_case(state: str) -> Harness:
    """A harness whose request "r" is in the given state."""
    harness = Harness(num_blocks=20, max_num_seqs=2, max_num_batched_tokens=32)
    if state == "waiting":
        harness.add(*[make_request(f"o{i}", make_prompt(30, i + 1)) for i in range(2)])
        harness.run_until(lambda: harness.scheduler.num_running == 2)
        harness.add(make_request("r", 30))
    elif state == "prefill":
        harness.add(make_request("r", 100))
        harness.step()
        harness.step()
    elif state == "decode":
        harness.add(make_request("r", 20, max_tokens=50))
        harness.run_until(lambda: len(result_of(harness).token_ids) == 3)
    elif state == "preempted":
        harness.add(make_request("o", make_prompt(120, 1), max_tokens=190))
        harness.add(make_request("r", 120, max_tokens=190, priority=1))
        request = result_of(harness).request
        harness.run_until(lambda: request.status is RequestStatus.PREEMPTED)
    return harness


@pytest.mark.parametrize("in_flight", [False, True])
@pytest.mark.parametrize("state", ["waiting", "prefill", "decode", "preempted"])
def test_abort_frees_at_once_in_every_state(state: str, in_flight: bool) -> None:
    harness = abort_case(state)
    num_tokens = len(result_of(harness).token_ids)
    num_preemptions = result_of(harness).request.num_preemptions
    if in_flight:
        harness.step(abort_in_flight=["r"])
    else:
        harness.scheduler.abort(["r"], harness.now)
        assert "r" not in harness.scheduler._state.requests
        harness.scheduler.check_integrity()
        harness.step()
    result = result_of(harness)
    assert result.finish_reason is FinishReason.ABORT
    assert len(result.token_ids) == num_tokens
    assert result.request.num_preemptions == num_preemptions
    harness.run()
    harness.check_idle()
    assert harness.scheduler.stats().num_cancelled == 1
    for name in harness.results:
        if name != "r":
            harness.check_complete(name)


def test_abort_output_is_there_without_another_step() -> None:
    harness = Harness()
    harness.add(make_request("r", 20))
    harness.scheduler.abort(["r", "r", "unknown"], 0.0)
    assert harness.scheduler.has_work
    (output,) = harness.scheduler.take_outputs()
    assert output.finish_reason is FinishReason.ABORT
    assert harness.scheduler.take_outputs() == []
    assert not harness.scheduler.has_work


def test_id_reused_while_its_aborted_step_runs_gets_only_its_own_tokens() -> None:
    harness = Harness()
    harness.add(make_request("r", 20, max_tokens=50))
    harness.run_until(lambda: len(result_of(harness).token_ids) == 2)
    output = harness.scheduler.schedule(harness.now)
    sampled = harness.worker.execute(output)
    harness.scheduler.abort(["r"], harness.now)
    harness.collect(harness.scheduler.take_outputs())
    harness.add(make_request("r", make_prompt(40, 5), max_tokens=4))
    outputs = harness.scheduler.update_from_output(output, sampled, harness.now)
    assert outputs == []
    harness.run()
    harness.check_complete("r")


def test_failing_request_fails_alone() -> None:
    harness = Harness()
    harness.add(make_request("bad", 40), make_request("good", make_prompt(40, 1)))
    harness.worker.failing["bad"] = "it broke"
    harness.run()
    bad = result_of(harness, "bad")
    assert bad.finish_reason is FinishReason.ERROR
    assert bad.last is not None and bad.last.error == "it broke"
    harness.check_complete("good")
    harness.check_idle()


def test_failed_blocks_are_not_offered_for_reuse() -> None:
    harness = Harness()
    harness.worker.failing["bad"] = "it broke"
    harness.add(make_request("bad", 64))
    harness.run()
    harness.add(make_request("good", 64))
    harness.run()
    assert result_of(harness, "good").request.num_cached_tokens == 0


def test_row_without_a_token_is_an_error_not_a_hang() -> None:
    harness = Harness()
    harness.add(make_request("r", 10))
    output = harness.scheduler.schedule(0.0)
    harness.collect(harness.scheduler.update_from_output(output, ModelRunnerOutput(), 0.1))
    assert result_of(harness).finish_reason is FinishReason.ERROR
    assert not harness.scheduler._state.requests


def test_fail_all_ends_everything_in_every_state() -> None:
    harness = Harness(max_num_seqs=2)
    harness.add(*[make_request(f"r{i}", make_prompt(100, i)) for i in range(4)])
    harness.step()
    harness.scheduler.schedule(harness.now)
    harness.collect(harness.scheduler.fail_all("the step failed", harness.now))
    for result in harness.results.values():
        assert result.finish_reason is FinishReason.ERROR
        assert result.last is not None and result.last.error == "the step failed"
    harness.scheduler.check_integrity()
    assert harness.scheduler.stats().num_blocks_held == 0
    harness.add(make_request("later", 50))
    harness.run()
    harness.check_complete("later")


def test_second_schedule_before_the_update_is_refused() -> None:
    harness = Harness()
    harness.add(make_request("r", 10))
    harness.scheduler.schedule(0.0)
    with pytest.raises(AssertionError):
        harness.scheduler.schedule(0.0)


def test_idle_scheduler_has_no_work() -> None:
    harness = Harness()
    assert not harness.scheduler.has_work
    harness.add(make_request("r", 10, max_tokens=1))
    assert harness.scheduler.has_work
    harness.step()
    assert harness.scheduler.has_work, "the worker's row has to be dropped"
    harness.step()
    harness.check_idle()


def run_drafts(harness: Harness, drafts: list[int], sampled: list[int]) -> RequestOutput:
    """One step in which a speculation hook has added drafts to the decode row of "r"."""
    scheduler, request = harness.scheduler, result_of(harness).request
    output = scheduler.schedule(harness.now)
    output.draft_token_ids = {"r": drafts}
    scheduler._state.kv.allocate_slots("r", len(request.token_ids) + len(drafts))
    request.num_slots = scheduler._state.kv.num_slots("r")
    assert scheduler._in_flight is not None
    scheduler._in_flight.counts[0] += len(drafts)
    result = ModelRunnerOutput(sampled_token_ids={"r": sampled})
    (update,) = scheduler.update_from_output(output, result, harness.now)
    scheduler.check_integrity()
    return update


def test_accepted_drafts_are_taken_and_rejected_ones_rolled_back() -> None:
    harness = Harness()
    harness.add(make_request("r", 31, max_tokens=40))
    harness.step()
    update = run_drafts(harness, [10, 11, 12], [10, 11, 13])
    assert update.new_token_ids == [10, 11, 13]
    request = result_of(harness).request
    assert request.num_computed_tokens == 34 == len(request.token_ids) - 1
    update = run_drafts(harness, [10, 11, 12], [14])
    assert update.new_token_ids == [14]
    assert request.num_computed_tokens == 35 == len(request.token_ids) - 1


def test_stop_inside_accepted_drafts_drops_the_rest() -> None:
    harness = Harness()
    harness.add(make_request("r", 30, max_tokens=40, stop_token_ids=(20,)))
    harness.step()
    update = run_drafts(harness, [10, 20, 12, 13], [10, 20, 12, 13, 14])
    assert update.new_token_ids == [10, 20]
    assert update.finish_reason is FinishReason.STOP
    assert update.stop_token_id == 20
    assert harness.scheduler.stats().num_blocks_held == 0
    # 33 tokens are known, so two blocks are reusable; the third holds dropped tokens.
    known = [*make_prompt(30), *result_of(harness).request.token_ids[30:]]
    assert len(known) == 33
    assert harness.scheduler._state.kv.match_prefix("", [*known, 3])[1] == 32


def test_dropped_tokens_of_a_draft_never_count_as_a_full_block() -> None:
    harness = Harness()
    harness.add(make_request("r", 28, max_tokens=40, stop_token_ids=(20,)))
    harness.step()
    assert run_drafts(harness, [10, 20, 12, 13], [10, 20, 12, 13, 14]).new_token_ids == [10, 20]
    known = result_of(harness).request.token_ids
    assert len(known) == 31
    assert harness.scheduler._state.kv.match_prefix("", [*known, 12, 13])[1] == 16
    assert harness.scheduler.stats().num_blocks_cached == 1


def test_unseeded_requests_get_different_repeatable_seeds() -> None:
    seeds = []
    for _ in range(2):
        harness = Harness()
        harness.add(*[make_request(f"r{i}", 10) for i in range(4)])
        seeds.append([result.request.seed for result in harness.results.values()])
    assert seeds[0] == seeds[1]
    assert len(set(seeds[0])) == 4


def test_siblings_with_one_seed_differ_and_the_first_keeps_it() -> None:
    harness = Harness()
    harness.add(*[make_request(f"r{i}", 10, seed=7, parent_id="p") for i in range(4)])
    harness.add(make_request("alone", 10, seed=7))
    seeds = [result.request.seed for result in harness.results.values()]
    assert seeds[0] == seeds[4] == 7
    assert len(set(seeds[:4])) == 4
