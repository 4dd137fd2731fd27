"""The lint finds the place where prompts part, the reason, and the price."""

from __future__ import annotations

import itertools
import random

import pytest

from caudal.diagnosis.load_log import Arrival, End, LoadLog, Occupancy
from caudal.diagnosis.prefix_lint import Miss, Reason, common_runs, hints, lint, patterns
from caudal.scheduler.step_cost import StepCosts

COSTS = StepCosts(step_ms=1.0, decode_row_ms=1.0, prefill_token_ms=0.5, context_token_ms=0.0)
SOURCE = random.Random(3)
SYSTEM = [SOURCE.randrange(1000) for _ in range(640)]
_ids = itertools.count()


def ask(
    log: LoadLog,
    token_ids: list[int],
    num_cached: int = 0,
    *,
    at: float = 0.0,
    owner: str = "",
    ends: bool = True,
) -> str:
    request_id = f"r{next(_ids)}"
    arrival = Arrival(request_id, at, owner, "", len(token_ids), 50)
    log.arrive(arrival, token_ids, Occupancy(2, 3, 0.25))
    if ends:
        log.finish(request_id, End(10, num_cached, 0, 0.0, 100.0, 20.0, 300.0))
    return request_id


def last(log: LoadLog, owner: str | None = None) -> Miss:
    return lint(log, COSTS, owner)[-1]


def stamped(stamp: int) -> list[int]:
    """Twelve tokens, a time of three, and a system prompt that never changes."""
    return [*range(2000, 2012), stamp, stamp + 1, stamp + 2, *SYSTEM]


def test_a_timestamp_in_front_of_the_system_prompt_is_found() -> None:
    log = LoadLog()
    for minute in range(10):
        ask(log, stamped(3000 + 10 * minute), at=float(minute))
    miss = last(log)
    assert (miss.token, miss.block, miss.reason) == (12, 0, Reason.CHANGED)
    assert miss.changed == miss.neighbour_changed == (12, 15)
    assert miss.num_stable_tokens == 640
    # The twelve tokens before the time would fill up a block, too.
    assert miss.num_lost_tokens == (12 + 640) // 16 * 16
    assert miss.lost_ms == pytest.approx(0.5 * miss.num_lost_tokens)
    (pattern,) = patterns(lint(log, COSTS))
    assert len(pattern.misses) == 9 and pattern.share_lost > 0.95
    (hint,) = hints(lint(log, COSTS))
    assert hint.token == 12 and hint.num_requests == 9


def test_what_the_cache_forgot_is_told_from_what_was_never_there() -> None:
    log = LoadLog()
    ask(log, [*SYSTEM, 1, 2, 3])
    assert last(log).reason is Reason.NEVER_CACHED
    ask(log, [*SYSTEM, 7, 8, 9], num_cached=64, at=5.0)
    miss = last(log)
    assert (miss.reason, miss.token, miss.num_lost_tokens) == (Reason.EVICTED, 64, 640 - 64)
    ask(log, [SOURCE.randrange(5000, 6000) for _ in range(100)], at=6.0)
    assert last(log).reason is Reason.NEVER_CACHED


def test_a_neighbour_in_flight_is_no_eviction() -> None:
    log = LoadLog()
    ask(log, SYSTEM, at=0.0)
    ask(log, [*SYSTEM, *range(20)], num_cached=0, at=0.05)
    assert last(log).reason is Reason.NOT_COMPUTED


def test_conversations_that_grow_are_no_loss() -> None:
    log = LoadLog()
    ask(log, SYSTEM)
    ask(log, SYSTEM + list(range(200)), num_cached=640, at=9.0)
    miss = last(log)
    assert (miss.reason, miss.token, miss.num_lost_tokens) == (Reason.EXTENDED, 640, 0)
    ask(log, SYSTEM, num_cached=624, at=10.0)
    assert last(log).reason is Reason.WHOLE
    assert patterns(lint(log, COSTS)) == []


def test_different_questions_behind_one_prompt_are_no_loss() -> None:
    log = LoadLog()
    for number in range(4):
        ask(log, SYSTEM + [9000 + number] * 30, num_cached=640 if number else 0, at=float(number))
    assert last(log).reason is Reason.CHANGED and last(log).token == 640
    assert patterns(lint(log, COSTS)) == []


def test_owners_see_and_match_only_their_own() -> None:
    log = LoadLog()
    ask(log, SYSTEM, owner="a")
    ask(log, SYSTEM, owner="b", at=1.0)
    assert [miss.entry.arrival.owner for miss in lint(log, COSTS, "b")] == ["b"]
    assert last(log, "b").reason is Reason.NEVER_CACHED
    assert last(log, "b").neighbour is None


def test_memory_is_bounded_and_what_is_forgotten_is_no_neighbour() -> None:
    log = LoadLog(max_entries=50, max_tokens=10_000)
    for number in range(300):
        ask(log, [number, *SYSTEM[:499]], at=float(number), ends=number % 3 != 0)
    assert len(log) <= 20 and log.num_tokens <= 10_000
    assert len(log._open) <= 20 and len(log._by_prefix) <= 20 * 31
    assert len(lint(log, COSTS)) <= 20
    ask(log, [5] * 20_000)
    assert len(log) == 0 and log.num_tokens == 0 and not log._by_prefix and not log._latest


def test_without_prompts_the_load_is_still_recorded() -> None:
    log = LoadLog(remember_prompts=False)
    ask(log, SYSTEM, num_cached=32)
    (record,) = log.records()
    assert (record.num_prompt_tokens, record.num_cached_tokens) == (640, 32)
    assert record.prefix_ids == () and record.num_waiting == 2
    assert lint(log, COSTS) == [] and log.num_tokens == 0


def test_records_number_beginnings_and_count_refusals() -> None:
    log = LoadLog()
    ask(log, SYSTEM[:48], at=3.0)
    ask(log, SYSTEM[:32] + [1] * 16, at=1.0)
    refused = ask(log, SYSTEM, at=4.0, ends=False)
    gone = ask(log, SYSTEM, at=5.0, ends=False)
    log.give_up([refused], is_refused=True)
    log.give_up([gone], is_refused=False)
    log.give_up(["unheard of"], is_refused=True)
    first, second, third = log.records()
    assert [first.arrival_s, second.arrival_s] == [1.0, 3.0]
    assert first.prefix_ids[:2] == second.prefix_ids[:2] == (0, 1)
    assert first.prefix_ids[2] != second.prefix_ids[2]
    assert third.is_refused and not second.is_refused


@pytest.mark.parametrize("seed", range(20))
def test_common_runs_are_equal_and_in_order(seed: int) -> None:
    from array import array

    source = random.Random(seed)
    parts = [[source.randrange(50) for _ in range(source.randrange(1, 90))] for _ in range(4)]
    ours = array("i", parts[0] + parts[1] + parts[2])
    theirs = array("i", parts[2] + parts[0] + parts[3] + parts[1])
    end = 0
    for at, place, length in common_runs(ours, theirs, 0):
        assert at >= end and ours[at : at + length] == theirs[place : place + length]
        end = at + length


def test_times_that_part_at_different_digits_are_one_pattern() -> None:
    log = LoadLog()
    for number in range(8):
        ask(log, [1, 2, 3, number // 4, number % 4, *SYSTEM], at=float(number))
    (pattern,) = patterns(lint(log, COSTS))
    assert len(pattern.misses) == 7 and pattern.token == 3
