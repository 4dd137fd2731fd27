"""A step stays within its budgets, and neither decoding nor prefill starves."""

from __future__ import annotations

import pytest

from caudal.scheduler.step_plan import Ageing
from caudal.step_io import SchedulerOutput
from tests.scheduler.harness import Harness, make_prompt, make_request


def linear_ms(output: SchedulerOutput) -> float:
    """5 ms + 0.5 ms a decode row + 0.2 ms a prompt token."""
    rows = output.num_decode_rows
    return 5.0 + 0.5 * rows + 0.2 * (output.num_tokens - rows)


def chunks_of(harness: Harness, name: str) -> list[int]:
    """Tokens that `name` computes in each step until its first output."""
    chunks = []
    while not harness.results[name].token_ids:
        chunks.append(harness.step().num_scheduled_tokens.get(name, 0))
    return chunks


def test_prompt_alone_fills_the_token_budget() -> None:
    harness = Harness(max_num_batched_tokens=96, tpot_ms=1.0)
    harness.add(make_request("r", 200))
    assert chunks_of(harness, "r") == [96, 96, 8]


def test_unfinished_chunks_end_at_block_boundaries() -> None:
    harness = Harness(max_num_batched_tokens=50)
    harness.add(make_request("r", 120))
    assert chunks_of(harness, "r") == [48, 48, 24]


def test_budget_below_a_block_still_makes_progress() -> None:
    harness = Harness(max_num_batched_tokens=7, max_num_seqs=4)
    harness.add(make_request("r", 40))
    assert chunks_of(harness, "r") == [7, 7, 2, 7, 7, 2, 7, 1]


def test_decode_rows_come_first_and_prefill_fills_the_target() -> None:
    harness = Harness(step_ms=linear_ms, tpot_ms=40.0, max_num_batched_tokens=512)
    harness.add(*[make_request(f"s{i}", make_prompt(40, i), max_tokens=400) for i in range(4)])
    harness.run_until(lambda: harness.num_steps == 80)
    harness.add(make_request("new", make_prompt(1000, 9)))
    while not harness.results["new"].token_ids:
        before = harness.now
        output = harness.step()
        assert list(output.num_scheduled_tokens)[:4] == [f"s{i}" for i in range(4)]
        took_ms = (harness.now - before) * 1e3
        assert took_ms < 40.0
        if not harness.results["new"].token_ids:
            assert took_ms > 30.0, "a generous target must be used"


def test_no_target_fills_every_step() -> None:
    harness = Harness(step_ms=linear_ms, tpot_ms=None, max_num_batched_tokens=128)
    harness.add(make_request("s", 20, max_tokens=100))
    harness.run_until(lambda: len(harness.results["s"].token_ids) > 3)
    harness.add(make_request("new", make_prompt(300, 9)))
    # One token of the 128 is the stream's; the rest ends at a block boundary.
    assert chunks_of(harness, "new") == [112, 112, 76]


def test_target_that_decoding_alone_exceeds_still_lets_prompts_progress() -> None:
    rate = 64.0
    harness = Harness(step_ms=linear_ms, tpot_ms=5.0, min_prefill_tokens_per_s=rate)
    harness.add(*[make_request(f"s{i}", make_prompt(20, i), max_tokens=2000) for i in range(8)])
    harness.run_until(lambda: harness.num_steps == 150)
    started = harness.now
    harness.add(make_request("new", make_prompt(300, 9), arrival_time=harness.now))
    harness.run_until(lambda: bool(harness.results["new"].token_ids))
    assert harness.now - started < 300 / rate * 1.3
    assert harness.results["s0"].max_gap() < 0.04


def test_ageing_credit_is_whole_tokens_over_time() -> None:
    ageing = Ageing(64.0)
    assert ageing.accrue(10.0, True) == 0
    assert ageing.accrue(10.25, True) == 16
    ageing.spend(16)
    assert ageing.accrue(10.25, True) == 0


def test_ageing_grants_nothing_for_idle_time_and_never_a_huge_step() -> None:
    ageing = Ageing(64.0)
    ageing.accrue(0.0, True)
    assert ageing.accrue(100.0, False) == 0
    assert ageing.accrue(200.0, True) == 0
    for second in range(201, 210):
        assert ageing.accrue(float(second), True) <= 64


def test_short_prompt_does_not_wait_for_a_long_one() -> None:
    harness = Harness(max_num_batched_tokens=128, num_blocks=600)
    harness.add(make_request("long", make_prompt(4000, 1)))
    harness.step()
    harness.add(make_request("short", make_prompt(50, 2)))
    harness.step()
    assert harness.results["short"].token_ids
    assert harness.last_output is not None
    assert harness.last_output.num_scheduled_tokens["long"] == 64


def test_long_prompt_keeps_half_of_the_budget_under_short_ones() -> None:
    harness = Harness(max_num_batched_tokens=128, num_blocks=600, max_num_seqs=32)
    harness.add(make_request("long", make_prompt(1280, 1)))
    harness.step()
    for index in range(40):
        if harness.results["long"].token_ids:
            break
        names = [f"s{index}-{i}" for i in range(3)]
        harness.add(
            *[make_request(name, make_prompt(60, 2 + index), max_tokens=1) for name in names]
        )
        harness.step()
    assert index <= 20
    assert harness.results["long"].token_ids


def test_prompts_of_equal_length_are_served_in_order() -> None:
    harness = Harness(max_num_batched_tokens=100, num_blocks=300, max_num_seqs=8)
    harness.add(*[make_request(f"r{i}", make_prompt(250, i)) for i in range(3)])
    harness.run()
    firsts = [harness.results[f"r{i}"].token_times[0] for i in range(3)]
    assert firsts == sorted(firsts) and len(set(firsts)) == 3


def test_prompt_logprobs_keep_within_the_logits_rows() -> None:
    """The fake worker counts the rows of logits in each step."""
    harness = Harness(max_num_logits=20, max_num_seqs=4)
    harness.add(make_request("s", 10, max_tokens=60))
    harness.step()
    harness.add(make_request("r", make_prompt(100, 1), num_prompt_logprobs=2))
    chunks = chunks_of(harness, "r")
    assert max(chunks) <= 19
    harness.run()
    harness.check_all_complete()
    assert len(harness.results["r"].prompt_logprobs or []) == 99


def test_prompt_logprobs_ignore_the_cache_but_fill_it() -> None:
    harness = Harness()
    harness.add(make_request("a", 64, num_prompt_logprobs=0))
    harness.run()
    harness.add(make_request("b", 64, num_prompt_logprobs=0))
    harness.run()
    assert len(harness.results["b"].prompt_logprobs or []) == 63
    harness.add(make_request("c", 64))
    harness.run()
    assert harness.results["c"].request.num_cached_tokens == 48


def test_whole_prompt_cached_recomputes_only_its_end() -> None:
    harness = Harness()
    harness.add(make_request("a", 64))
    harness.run()
    harness.add(make_request("b", 64))
    assert chunks_of(harness, "b") == [16]
    harness.run()
    harness.check_all_complete()
    assert [r.request.num_cached_tokens for r in harness.results.values()] == [0, 48]


@pytest.mark.parametrize("limit", ["max_num_seqs", "max_num_batched_tokens", "max_num_logits"])
def test_running_requests_never_exceed_what_a_step_can_take(limit: str) -> None:
    sizes = {"max_num_seqs": 30, "max_num_batched_tokens": 64, "max_num_logits": 30} | {limit: 3}
    harness = Harness(**sizes)  # type: ignore[arg-type]
    harness.add(*[make_request(f"r{i}", make_prompt(20, i), max_tokens=5) for i in range(8)])
    while harness.scheduler.has_work:
        harness.step()
        assert harness.scheduler.num_running <= 3
    harness.check_all_complete()


def test_lower_priority_value_runs_first_then_arrival() -> None:
    harness = Harness(max_num_seqs=1)
    for name, priority in [("a", 0), ("b", 5), ("c", -1), ("d", 0)]:
        harness.add(make_request(name, make_prompt(10, ord(name)), priority=priority))
    harness.run()
    finished = sorted(harness.results, key=lambda name: harness.results[name].token_times[-1])
    assert finished == ["c", "a", "d", "b"]
