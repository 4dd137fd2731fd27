"""Guessed tokens in steps: where they pay, within which budgets, and what is learnt of them."""

from __future__ import annotations

import pytest

from caudal.scheduler.output import FinishReason
from caudal.scheduler.service_class import ServiceClass
from caudal.step_io import SchedulerOutput
from tests.scheduler.harness import Harness, make_request


def run(accuracy: float, num_requests: int = 1, **options: object) -> Harness:
    """Steps take 10 ms and a little for each token, so that few rows have time for guesses."""
    options.setdefault("step_ms", lambda output: 10 + 0.3 * output.num_tokens)
    harness = Harness(draft_accuracy=accuracy, **options)  # type: ignore[arg-type]
    for index in range(num_requests):
        harness.add(make_request(f"r{index}", 20 + index, max_tokens=200, seed=index))
    harness.run()
    harness.check_all_complete()
    harness.check_idle()
    return harness


def test_right_guesses_save_steps() -> None:
    assert run(0.0).num_steps >= 200
    stats = run(1.0).scheduler.stats()
    assert run(1.0).num_steps < 60
    assert stats.num_draft_tokens == stats.num_accepted_tokens > 140
    assert stats.num_output_tokens == 200


def test_wrong_guesses_are_given_up() -> None:
    harness = run(0.01)
    stats = harness.scheduler.stats()
    assert stats.num_draft_tokens < 40
    assert harness.num_steps > 180


def test_guesses_that_are_seldom_right_pay_where_few_run() -> None:
    alone, among_many = (run(0.45, num, max_num_seqs=16) for num in (1, 16))
    tokens = [h.scheduler.stats().num_draft_tokens for h in (alone, among_many)]
    assert tokens[0] > 40
    assert tokens[1] / 16 < tokens[0] / 2


def test_guesses_pay_behind_long_contexts_which_their_row_reads_anyway() -> None:
    def step_ms(output: SchedulerOutput) -> float:
        return 2 + 0.1 * output.num_tokens + 1e-3 * output.context_reads

    harness = Harness(draft_accuracy=0.85, num_blocks=900, step_ms=step_ms, tpot_ms=None)
    for index in range(4):
        prompt = [*range(3, 40), index + 3] * 80
        harness.add(make_request(f"r{index}", prompt, max_tokens=200, seed=index))
    harness.run_until(lambda: all(len(r.token_ids) > 50 for r in harness.results.values()))
    before = harness.num_steps
    harness.run()
    harness.check_all_complete()
    assert harness.num_steps - before < 100


@pytest.mark.parametrize("num_context", [3000, 40])
def test_guesses_beside_a_waiting_prompt_pay_only_behind_long_contexts(num_context: int) -> None:
    def step_ms(output: SchedulerOutput) -> float:
        num_prefill = output.num_tokens - output.num_decode_rows
        return 4 + 0.1 * output.num_decode_rows + 0.1 * num_prefill + 1e-3 * output.context_reads

    harness = Harness(draft_accuracy=0.95, num_blocks=1600, step_ms=step_ms, tpot_ms=30.0)
    for index in range(2):
        prompt = [*range(3, 40), index + 3] * (num_context // 38 + 1)
        harness.add(make_request(f"r{index}", prompt, max_tokens=900, seed=index))
    harness.run_until(lambda: all(len(r.token_ids) > 60 for r in harness.results.values()))
    harness.add(make_request("new", 3500, max_tokens=4))
    num_drafts, lengths = 0, []
    while not harness.results["new"].token_ids:
        output = harness.step()
        num_drafts += sum(map(len, output.draft_token_ids.values()))
        lengths.append(step_ms(output))
    assert len(lengths) > 10
    assert (num_drafts > 20) == (num_context > 1000), num_drafts
    assert max(lengths[5:]) <= 30  # what prompts cost is learnt by then


def test_off_by_configuration_of_the_worker_alone() -> None:
    assert run(0.0).scheduler.stats().num_drafts == 0


def test_target_bounds_steps_with_guesses() -> None:
    lengths: list[float] = []

    def step_ms(output: object) -> float:
        lengths.append(10 + output.num_tokens)  # type: ignore[attr-defined]
        return lengths[-1]

    run(1.0, 4, step_ms=step_ms, tpot_ms=20.0)
    assert max(lengths[40:]) <= 20
    lengths.clear()
    run(1.0, 4, step_ms=step_ms, tpot_ms=None)
    assert max(lengths[20:]) > 25


def test_guesses_leave_blocks_for_known_tokens() -> None:
    harness = run(1.0, 6, num_blocks=90, max_num_seqs=6)
    assert harness.scheduler.stats().num_preemptions == 0
    assert harness.scheduler.stats().num_accepted_tokens > 200


def test_background_guesses_only_while_nobody_else_runs() -> None:
    harness = Harness(draft_accuracy=1.0)
    harness.add(make_request("batch", 20, max_tokens=400, service=ServiceClass.IDLE))
    for _ in range(12):
        harness.step()
    assert harness.scheduler.stats().num_draft_tokens > 10
    harness.add(make_request("chat", 30, max_tokens=40, priority=-1))
    harness.step()
    while not harness.results["chat"].is_finished:
        drafts = harness.step().draft_token_ids
        assert "batch" not in drafts
    harness.run()
    harness.check_all_complete()


def test_background_guesses_keep_steps_short_for_newcomers() -> None:
    def step_ms(output: SchedulerOutput) -> float:
        return 4 + 0.5 * output.num_tokens

    harness = Harness(draft_accuracy=1.0, tpot_ms=400.0, ttft_ms=200.0, step_ms=step_ms)
    for index in range(4):
        harness.add(
            make_request(f"r{index}", 20 + index, max_tokens=900, service=ServiceClass.IDLE)
        )
    for _ in range(60):
        harness.step()
    limit_ms = harness.scheduler._planner.background.step_ms(ServiceClass.IDLE, None)
    before = harness.scheduler.stats().num_draft_tokens
    lengths = [step_ms(harness.step()) for _ in range(40)]
    assert max(lengths) <= limit_ms * 1.1
    assert harness.scheduler.stats().num_draft_tokens > before + 100


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 9, 10])
def test_length_limit_is_exact(max_tokens: int) -> None:
    harness = Harness(draft_accuracy=1.0)
    harness.add(make_request("r", 33, max_tokens=max_tokens))
    harness.run()
    result = harness.results["r"]
    assert len(result.token_ids) == max_tokens
    assert result.finish_reason is FinishReason.LENGTH


def test_context_limit_is_exact() -> None:
    harness = Harness(draft_accuracy=1.0, max_model_len=60)
    harness.add(make_request("r", 33, max_tokens=500))
    harness.run()
    assert len(harness.results["r"].token_ids) == 27


def test_guesses_of_a_preempted_request_are_not_mistaken_for_computed_ones() -> None:
    """It returns with a prompt of several tokens and the guesses from before."""
    harness = Harness(draft_accuracy=1.0, num_blocks=64)
    harness.add(make_request("r", 40, max_tokens=60))
    for _ in range(6):
        harness.step()
    state = harness.scheduler._state
    request = state.running["r"]
    assert request.drafts
    before = harness.scheduler.stats()
    state.preempt(request)
    harness.step()
    after = harness.scheduler.stats()
    assert after.num_draft_tokens == before.num_draft_tokens
    harness.run()
    harness.check_complete("r")
