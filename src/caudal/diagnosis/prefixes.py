"""Prompts that could have been found in the prefix cache, and why they were not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from caudal.diagnosis.common_remedies import useful
from caudal.diagnosis.remedies import Pharmacy
from caudal.diagnosis.report import Evidence, Finding, LoadRecord, Observation, Remedy
from caudal.diagnosis.scenario import Predictor, Scenario

MIN_POSSIBLE = 0.2
"""Share of the prompt tokens that were seen before, from which a cache is worth looking at."""
MIN_USED = 0.5
"""Found share of what could have been found, below which something is wrong."""
MIN_LOST = 0.15
"""Share of the prompt tokens that an early change costs, from which it is a finding."""
_SHARED_ID = -1


def find_prefix_trouble(
    observation: Observation, records: Sequence[LoadRecord], predictor: Predictor
) -> list[Finding]:
    """Low hits: because the cache forgets, or because the prompts change early."""
    return [
        *_forgotten(observation, records, predictor),
        *_badly_ordered(observation, records, predictor),
    ]


def possible_hits(records: Sequence[LoadRecord], block_size: int) -> tuple[int, int, int]:
    """Prompt tokens, those an endless cache would have had, and those that were found."""
    seen: set[int] = set()
    num_tokens = num_possible = num_found = 0
    for record in records:
        num_tokens += record.num_prompt_tokens
        num_found += record.num_cached_tokens
        num_known = 0
        for prefix_id in record.prefix_ids:
            if prefix_id not in seen:
                break
            num_known += 1
        # The last token is always computed.
        num_possible += min(num_known, (record.num_prompt_tokens - 1) // block_size) * block_size
        seen.update(record.prefix_ids)
    return num_tokens, num_possible, num_found


def _forgotten(
    observation: Observation, records: Sequence[LoadRecord], predictor: Predictor
) -> Iterator[Finding]:
    facts = observation.facts
    num_tokens, num_possible, num_found = possible_hits(records, facts.block_size)
    if not num_tokens or num_possible / num_tokens < MIN_POSSIBLE:
        return
    if num_found / num_possible >= MIN_USED:
        return
    possible, found = num_possible / num_tokens, num_found / num_tokens
    evidence = [
        Evidence(
            "hit_rate",
            round(found, 3),
            round(possible * MIN_USED, 3),
            f"{found:.0%} of the prompt tokens were found in the cache; {possible:.0%} had been "
            "computed before.",
        )
    ]
    remedies = Pharmacy(predictor, facts, "ttft_mean_ms").for_forgotten_prefixes()
    title = "Shared prefixes are computed again"
    yield Finding("low_prefix_hits", title, "warning", evidence, remedies)


def _badly_ordered(
    observation: Observation, records: Sequence[LoadRecord], predictor: Predictor
) -> Iterator[Finding]:
    num_tokens = sum(record.num_prompt_tokens for record in records)
    for hint in observation.hints:
        share = hint.num_requests * hint.num_lost_tokens / max(1, num_tokens)
        if share < MIN_LOST:
            continue
        changed = _reordered(predictor.scenario, hint.num_lost_tokens, observation.facts.block_size)
        text = (
            f"A change at token {hint.token} of {hint.num_requests} prompts costs "
            f"{hint.share_lost:.0%} of their hits: {hint.num_lost_tokens} equal tokens behind it."
        )
        remedy = Remedy(
            "reorder_prompt",
            "",
            "a change of the prompt",
            predictor.predict(changed, "ttft_mean_ms"),
            "Put what changes (a time, a name, an id) behind what stays the same; "
            "`caudal doctor --prefixes` shows the place.",
        )
        yield Finding(
            "prefix_order",
            "Prompts change before what they share",
            "warning",
            [Evidence("lost_share", round(share, 3), MIN_LOST, text)],
            useful([remedy]),
        )


def _reordered(scenario: Scenario, num_shared_tokens: int, block_size: int) -> Scenario:
    """Every prompt that is long enough begins with the same so many tokens."""
    num_shared = num_shared_tokens // block_size
    shared = tuple(_SHARED_ID - index for index in range(num_shared))
    moved = tuple(
        replace(request, prefix_ids=shared)
        if request.num_prompt_tokens > num_shared_tokens
        else request
        for request in scenario.requests
    )
    return replace(scenario, requests=moved)
