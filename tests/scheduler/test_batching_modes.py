"""The three batching modes differ in who may join, and in nothing else."""

from __future__ import annotations

import pytest

from caudal.config import Batching
from tests.scheduler.harness import Harness, make_prompt, make_request


def finish_order(harness: Harness) -> list[str]:
    return sorted(harness.results, key=lambda name: harness.results[name].token_times[-1])


@pytest.mark.parametrize("batching", list(Batching))
def test_every_mode_gives_the_same_tokens(batching: Batching) -> None:
    harness = Harness(batching=batching)
    for index in range(12):
        prompt = make_prompt(10 + 7 * index, index)
        harness.add(make_request(f"r{index}", prompt, max_tokens=3 + 5 * (index % 4)))
        harness.step()
    harness.run()
    harness.check_all_complete()
    harness.check_idle()


def test_serial_runs_one_request_at_a_time() -> None:
    harness = Harness(batching=Batching.SERIAL)
    harness.add(*[make_request(f"r{i}", make_prompt(20, i)) for i in range(4)])
    while harness.scheduler.has_work:
        output = harness.step()
        assert len(output.num_scheduled_tokens) <= 1
    assert finish_order(harness) == ["r0", "r1", "r2", "r3"]


def test_static_batch_takes_no_newcomer_until_its_last_request_ends() -> None:
    harness = Harness(batching=Batching.STATIC, max_num_seqs=3)
    lengths = {"a": 2, "b": 20, "c": 4, "d": 2}
    harness.add(
        *[
            make_request(name, make_prompt(20, i), max_tokens=n)
            for i, (name, n) in enumerate(lengths.items())
        ]
    )
    harness.step()
    harness.add(make_request("late", make_prompt(20, 9), max_tokens=1))
    while not harness.results["b"].is_finished:
        output = harness.step()
        assert not {"d", "late"} & set(output.num_scheduled_tokens)
    harness.run()
    assert finish_order(harness)[2] == "b"
    harness.check_all_complete()


def test_static_batch_is_completed_over_several_steps() -> None:
    """Prompts that do not fit the first step still belong to the batch."""
    harness = Harness(batching=Batching.STATIC, max_num_seqs=4, max_num_batched_tokens=64)
    harness.add(*[make_request(f"r{i}", make_prompt(50, i), max_tokens=30) for i in range(4)])
    harness.run_until(lambda: harness.scheduler.num_running == 4, 10)
    harness.run()
    harness.check_all_complete()


def test_static_batch_that_memory_cuts_short_goes_on_in_the_next() -> None:
    harness = Harness(batching=Batching.STATIC, num_blocks=20, max_num_seqs=8)
    harness.add(*[make_request(f"r{i}", make_prompt(100, i), max_tokens=60) for i in range(6)])
    harness.run()
    harness.check_all_complete()
    harness.check_idle()


def test_continuous_is_faster_than_static_is_faster_than_serial() -> None:
    times = {}
    for batching in Batching:
        harness = Harness(batching=batching, max_num_seqs=4, num_blocks=400)
        for index in range(16):
            prompt = make_prompt(20, index)
            harness.add(make_request(f"r{index}", prompt, max_tokens=5 + 40 * (index % 2)))
        harness.run()
        times[batching] = harness.now
    assert times[Batching.CONTINUOUS] < 0.9 * times[Batching.STATIC]
    assert times[Batching.STATIC] < 0.6 * times[Batching.SERIAL]
