"""Requests wait for a prefix that is being computed, and never for longer than it takes."""

from __future__ import annotations

import pytest

from caudal.config import Batching
from caudal.kv_cache.radix_cache import make_block_keys
from caudal.scheduler.output import FinishReason
from caudal.scheduler.prefix_deferral import PrefixDeferral
from caudal.scheduler.request import Request
from tests.scheduler.harness import Harness, make_prompt, make_request

SYSTEM = make_prompt(320, 1)


def agents(num: int) -> list[Request]:
    return [
        make_request(f"a{i}", SYSTEM + make_prompt(20, 10 + i), max_tokens=4) for i in range(num)
    ]


def test_shared_prefix_of_simultaneous_requests_is_computed_once() -> None:
    harness = Harness(max_num_batched_tokens=512, num_blocks=400)
    harness.add(*agents(16))
    harness.run()
    decoded = 16 * 3
    assert harness.worker.num_computed_in_all == 340 + 15 * 20 + decoded
    harness.check_all_complete()


def test_followers_start_as_soon_as_the_shared_part_is_there() -> None:
    """Not only when the leader, whose own prompt is much longer, is done."""
    harness = Harness(max_num_batched_tokens=160, num_blocks=400)
    harness.add(make_request("leader", SYSTEM + make_prompt(2000, 2)))
    harness.add(make_request("follower", SYSTEM + make_prompt(20, 3)))
    harness.run_until(lambda: bool(harness.results["follower"].token_ids))
    assert harness.num_steps <= 4
    assert not harness.results["leader"].token_ids
    assert harness.results["follower"].request.num_cached_tokens == 320


def test_unrelated_requests_are_not_held_up() -> None:
    harness = Harness(max_num_batched_tokens=512, num_blocks=400)
    harness.add(*agents(3))
    harness.add(make_request("other", make_prompt(50, 9)))
    output = harness.step()
    assert list(output.num_scheduled_tokens) == ["a0", "other"]
    assert harness.scheduler.num_waiting == 2


def test_short_overlap_is_not_worth_waiting() -> None:
    harness = Harness(max_num_batched_tokens=512)
    harness.add(make_request("a", SYSTEM[:16] + make_prompt(60, 2)))
    harness.add(make_request("b", SYSTEM[:16] + make_prompt(60, 3)))
    assert list(harness.step().num_scheduled_tokens) == ["a", "b"]


def test_what_is_cached_already_is_not_waited_for() -> None:
    harness = Harness(max_num_batched_tokens=512, num_blocks=400)
    harness.add(make_request("warm", SYSTEM))
    harness.run()
    harness.add(*agents(4))
    assert len(harness.step().num_scheduled_tokens) == 4


@pytest.mark.parametrize("how", ["abort", "abort in flight", "error"])
def test_followers_go_on_when_their_leader_is_gone(how: str) -> None:
    harness = Harness(max_num_batched_tokens=64, num_blocks=400)
    harness.add(*agents(4))
    harness.step()
    assert harness.scheduler.num_running == 1
    if how == "abort":
        harness.scheduler.abort(["a0"], harness.now)
    elif how == "abort in flight":
        harness.step(abort_in_flight=["a0"])
    else:
        harness.worker.failing["a0"] = "broken"
        harness.step()
    output = harness.step()
    assert output.num_tokens > 0
    harness.run()
    for name in ("a1", "a2", "a3"):
        harness.check_complete(name)
    assert harness.results["a0"].finish_reason in (FinishReason.ABORT, FinishReason.ERROR)


def test_aborted_follower_is_forgotten() -> None:
    harness = Harness(max_num_batched_tokens=64, num_blocks=400)
    harness.add(*agents(3))
    harness.step()
    harness.scheduler.abort(["a1"], harness.now)
    harness.scheduler.check_integrity()
    harness.run()
    harness.check_complete("a2")
    harness.check_idle()


def test_important_request_does_not_wait_for_an_unimportant_one() -> None:
    harness = Harness(max_num_batched_tokens=64, num_blocks=400)
    harness.add(make_request("low", SYSTEM, priority=3))
    harness.step()
    harness.add(make_request("high", SYSTEM, priority=0))
    assert harness.step().num_scheduled_tokens["high"] > 0


def test_nobody_waits_for_what_a_leader_has_already_computed() -> None:
    """Its blocks may have left the cache; it will not compute them again."""
    deferral = PrefixDeferral(16)
    leader, follower = make_request("a", 100), make_request("b", 100)
    for request in (leader, follower):
        request.block_keys = make_block_keys(request.token_ids, 16)
    deferral.start(leader)
    found = deferral.find_leader(follower, 0)
    assert found is not None and found[1] == 96
    leader.num_computed_tokens = 96
    assert deferral.find_leader(follower, 0) is None


def test_namespaces_do_not_wait_for_each_other() -> None:
    harness = Harness(max_num_batched_tokens=512, num_blocks=400)
    harness.add(make_request("a", SYSTEM, namespace="x"), make_request("b", SYSTEM, namespace="y"))
    assert "b" in harness.step().num_scheduled_tokens


def test_many_followers_behind_many_leaders_all_finish() -> None:
    harness = Harness(max_num_batched_tokens=96, num_blocks=60, max_num_seqs=6)
    for group in range(3):
        system = make_prompt(200, 20 + group)
        for index in range(6):
            prompt = system[: 200 - 30 * index] + make_prompt(30, 40 + index)
            harness.add(make_request(f"g{group}-{index}", prompt, max_tokens=20))
    harness.run()
    harness.check_all_complete()
    harness.check_idle()


@pytest.mark.parametrize("batching", [Batching.STATIC, Batching.SERIAL])
def test_other_batching_modes_do_not_defer(batching: Batching) -> None:
    harness = Harness(batching=batching, num_blocks=400, max_num_batched_tokens=512)
    harness.add(*agents(3))
    output = harness.step()
    assert len(output.num_scheduled_tokens) == (3 if batching is Batching.STATIC else 1)
    harness.run()
    harness.check_all_complete()


def test_siblings_count_their_prompt_once_and_report_no_hit_among_themselves() -> None:
    harness = Harness(max_num_batched_tokens=512, num_blocks=400)
    harness.add(*[make_request(f"c{i}", SYSTEM, parent_id="p", seed=i) for i in range(3)])
    harness.run()
    assert [r.request.num_cached_tokens for r in harness.results.values()] == [0, 0, 0]
    assert {output.num_cached_tokens for output in harness.results["c2"].outputs} == {0}
    # 304 of the 320 tokens are computed once, the last block by each.
    assert harness.worker.num_computed_in_all == 304 + 3 * (16 + 7)
    assert harness.scheduler.stats().prefix_hits_tokens == 2 * 304


def test_siblings_report_what_was_cached_before_their_parent() -> None:
    harness = Harness(max_num_batched_tokens=512, num_blocks=400)
    harness.add(make_request("before", SYSTEM[:100]))
    harness.run()
    harness.add(*[make_request(f"c{i}", SYSTEM, parent_id="p") for i in range(3)])
    harness.run()
    assert [harness.results[f"c{i}"].request.num_cached_tokens for i in range(3)] == [96] * 3


def test_preemption_does_not_change_the_reported_hit() -> None:
    harness = Harness(num_blocks=20)
    harness.add(make_request("a", make_prompt(100, 1), max_tokens=200))
    harness.add(make_request("b", make_prompt(100, 2), max_tokens=200))
    harness.run()
    assert harness.results["b"].request.num_preemptions > 0
    assert harness.results["b"].request.num_cached_tokens == 0
