"""Too little memory slows requests down; it never ends, corrupts or starves them."""

from __future__ import annotations

import random
from unittest import mock

import pytest

from caudal.kv_cache.kv_cache_manager import KVCacheManager
from caudal.scheduler import step_planner
from caudal.scheduler.preemption import choose_victim, num_growth_blocks
from caudal.scheduler.request import Request, RequestStatus
from tests.scheduler.harness import Harness, make_prompt, make_request


def hold(kv: KVCacheManager, name: str, num_tokens: int, **fields: int) -> Request:
    """A request that holds blocks for so many tokens of its own."""
    request = make_request(name, num_tokens, max_tokens=100)
    for field, value in fields.items():
        setattr(request, field, value)
    request.max_total_tokens = num_tokens + 100
    kv.start(name, "", [])
    kv.allocate_slots(name, num_tokens)
    request.num_slots = kv.num_slots(name)
    return request


def make_kv() -> KVCacheManager:
    return KVCacheManager(100, 16, enable_prefix_caching=True)


def test_victim_is_the_least_important_then_the_cheapest_then_the_latest() -> None:
    kv = make_kv()
    first = hold(kv, "first", 16, arrival_index=0)
    long = hold(kv, "long", 160, arrival_index=1)
    short = hold(kv, "short", 32, arrival_index=2)
    short_late = hold(kv, "short late", 32, arrival_index=3)
    assert choose_victim([first, long, short, short_late], kv) is short_late
    assert choose_victim([first, long, short], kv) is short
    unimportant = hold(kv, "unimportant", 320, arrival_index=4, priority=1)
    assert choose_victim([first, long, short, unimportant], kv) is unimportant


def test_first_in_order_is_never_the_victim() -> None:
    kv = make_kv()
    cheap_first = hold(kv, "a", 16, arrival_index=0)
    costly = hold(kv, "b", 320, arrival_index=1)
    assert choose_victim([cheap_first, costly], kv) is costly


def test_victim_hit_before_is_spared() -> None:
    kv = make_kv()
    first = hold(kv, "first", 16, arrival_index=0)
    other = hold(kv, "other", 48, arrival_index=1)
    hit = hold(kv, "hit", 32, arrival_index=2, num_preemptions=1)
    assert choose_victim([first, other, hit], kv) is other


def test_shared_blocks_cost_nothing_to_give_up() -> None:
    kv = make_kv()
    first = hold(kv, "first", 16, arrival_index=0)
    owner = hold(kv, "owner", 160, arrival_index=1)
    kv.insert_prefix("owner", owner.token_ids, 160)
    sharer = make_request("sharer", [*owner.token_ids, 3], max_tokens=100)
    block_ids, _ = kv.match_prefix("", sharer.token_ids)
    kv.start("sharer", "", block_ids)
    kv.allocate_slots("sharer", 161)
    sharer.arrival_index = 2
    private = hold(kv, "private", 80, arrival_index=3)
    assert choose_victim([first, sharer, private], kv) is sharer


def test_growth_reserve_shrinks_towards_the_end_of_a_request() -> None:
    kv = make_kv()
    request = hold(kv, "r", 32)
    assert num_growth_blocks([request], kv, 4) == 4
    request.max_total_tokens = 34
    assert num_growth_blocks([request], kv, 4) == 1
    request.max_total_tokens = 33
    assert num_growth_blocks([request], kv, 4) == 0


@pytest.mark.parametrize("cache", [True, False])
def test_pool_of_1024_tokens_finishes_four_requests_of_512(cache: bool) -> None:
    """B109."""
    harness = Harness(num_blocks=64, enable_prefix_caching=cache)
    harness.add(*[make_request(f"r{i}", make_prompt(256, i), max_tokens=256) for i in range(4)])
    harness.run()
    harness.check_all_complete()
    harness.check_idle()


def test_preempted_request_continues_where_it_was() -> None:
    harness = Harness(num_blocks=20)
    harness.add(make_request("a", make_prompt(100, 1), max_tokens=200))
    harness.add(make_request("b", make_prompt(100, 2), max_tokens=200))
    harness.run()
    victim = harness.results["b"].request
    assert victim.num_preemptions > 0
    assert harness.results["a"].request.num_preemptions == 0
    assert harness.results["b"].last is not None
    assert harness.results["b"].last.num_preemptions == victim.num_preemptions
    harness.check_all_complete()


def test_lost_tokens_are_those_computed_again() -> None:
    harness = Harness(num_blocks=20)
    harness.add(make_request("a", make_prompt(100, 1), max_tokens=200))
    harness.add(make_request("b", make_prompt(100, 2), max_tokens=200))
    harness.run()
    stats = harness.scheduler.stats()
    needed_once = 2 * (100 + 200 - 1)
    assert stats.num_preempted_tokens == harness.worker.num_computed_in_all - needed_once
    per_request = [result.request.num_preempted_tokens for result in harness.results.values()]
    assert sum(per_request) == stats.num_preempted_tokens
    reported = [result.outputs[-1].num_preempted_tokens for result in harness.results.values()]
    assert reported == per_request
    assert stats.num_preemptions == harness.results["b"].request.num_preemptions


def test_victim_keeps_its_place_in_the_queue() -> None:
    harness = Harness(num_blocks=20, max_num_seqs=2)
    harness.add(make_request("a", make_prompt(100, 1), max_tokens=200))
    harness.add(make_request("b", make_prompt(100, 2), max_tokens=200))
    victim = harness.results["b"].request
    harness.run_until(lambda: victim.status is RequestStatus.PREEMPTED)
    harness.add(make_request("later", make_prompt(30, 3), max_tokens=5))
    harness.run()
    later = harness.results["later"].request
    assert victim.arrival_index < later.arrival_index
    assert later.first_scheduled_time is not None
    assert harness.results["b"].token_times[-1] <= later.first_scheduled_time or (
        harness.results["a"].token_times[-1] <= later.first_scheduled_time
    )
    harness.check_all_complete()


def test_important_request_is_not_preempted_for_others() -> None:
    harness = Harness(num_blocks=24)
    harness.add(make_request("low", make_prompt(100, 1), max_tokens=200, priority=5))
    harness.add(make_request("high", make_prompt(100, 2), max_tokens=200, priority=0))
    harness.run()
    assert harness.results["low"].request.num_preemptions > 0
    assert harness.results["high"].request.num_preemptions == 0


def test_no_ping_pong_between_two_requests() -> None:
    """Each preemption must be followed by real progress."""
    harness = Harness(num_blocks=24)
    harness.add(*[make_request(f"r{i}", make_prompt(120, i), max_tokens=240) for i in range(3)])
    harness.run()
    assert harness.scheduler.stats().num_preemptions <= 6
    harness.check_all_complete()


def test_half_computed_prompts_that_fill_the_pool_do_not_deadlock() -> None:
    """Several prompts larger than half of the pool, beside a stream that grows."""
    harness = Harness(num_blocks=24, max_num_batched_tokens=32, tpot_ms=8.0)
    harness.add(make_request("s", make_prompt(30, 1), max_tokens=150))
    harness.run_until(lambda: len(harness.results["s"].token_ids) > 2)
    harness.add(*[make_request(f"p{i}", make_prompt(250, 2 + i), max_tokens=60) for i in range(3)])
    harness.run(3000)
    harness.check_all_complete()


def test_blocks_promised_to_a_half_computed_prompt_are_not_given_away() -> None:
    harness = Harness(num_blocks=24, max_num_batched_tokens=32)
    harness.add(make_request("low", make_prompt(250, 1), priority=5))
    harness.step()
    harness.add(make_request("high", make_prompt(200, 2), priority=0))
    harness.run_until(lambda: bool(harness.results["low"].token_ids))
    assert not harness.results["high"].outputs
    assert harness.num_steps <= 250 // 32 + 1
    harness.run()
    harness.check_all_complete()


def test_prompt_logprobs_survive_a_preemption_half_way_through_the_prompt() -> None:
    """Those computed before it must not be sent twice."""
    harness = Harness(num_blocks=24, max_num_batched_tokens=17, max_num_seqs=4)
    harness.add(make_request("s", make_prompt(16, 1), max_tokens=300))
    harness.run_until(lambda: len(harness.results["s"].token_ids) > 2)
    with mock.patch.object(step_planner, "GROWTH_BLOCKS_NEW", 0):
        harness.add(make_request("p", make_prompt(350, 2), max_tokens=4, num_prompt_logprobs=0))
        victim = harness.results["p"].request
        harness.run_until(lambda: victim.num_preemptions == 1)
    assert victim.num_lost_tokens > 16
    assert not harness.results["p"].outputs
    harness.run()
    harness.check_all_complete()
    entries = harness.results["p"].prompt_logprobs or []
    assert [entry.token_id for entry in entries] == victim.prompt_token_ids[1:]


@pytest.mark.parametrize("share", [1.0, 0.6, 0.3])
def test_scarce_memory_slows_smoothly_and_finishes_everything(share: float) -> None:
    """B111."""
    rng = random.Random(1)
    harness = Harness(
        num_blocks=max(40, int(16 * 300 / 16 * share)),
        max_num_batched_tokens=512,
        max_num_seqs=16,
        step_ms=lambda output: 5 + 0.15 * output.num_tokens,
    )
    for index in range(40):
        prompt = make_prompt(rng.choice([20, 100, 400]), index)
        harness.add(make_request(f"r{index}", prompt, max_tokens=rng.choice([10, 80, 200])))
    num_tokens = sum(
        result.request.num_prompt_tokens + result.request.sampling.max_tokens - 1
        for result in harness.results.values()
    )
    last = 0
    while harness.scheduler.has_work:
        harness.step()
        done = sum(len(result.token_ids) for result in harness.results.values())
        assert done > last or harness.num_steps < 60 or not harness.scheduler.num_running
        last = done
    harness.check_all_complete()
    stats = harness.scheduler.stats()
    assert stats.num_finished["length"] == 40
    assert stats.num_preempted_tokens <= 0.1 * num_tokens
