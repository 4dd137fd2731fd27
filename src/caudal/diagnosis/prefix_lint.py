"""Where prompts stopped matching what was cached, why, what it cost, and how to reorder them."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from caudal.config import BLOCK_SIZE
from caudal.diagnosis.load_log import Entry, LoadLog
from caudal.diagnosis.report import ReorderHint
from caudal.scheduler.step_cost import StepCostModel, StepCosts

SHINGLE = 16
"""Tokens that must agree for two places to count as the same text."""
MIN_RUN = 2 * BLOCK_SIZE
"""Shorter equal stretches would hardly fill a block where they are."""
MAX_LINTED = 256
"""Latest requests that are looked at."""
_BYTES = 4


class Reason(StrEnum):
    """Why a prefix stopped matching."""

    WHOLE = "whole"
    """It did not: all that can be reused was."""
    EXTENDED = "extended"
    """The neighbour ended there, and this prompt goes on."""
    CHANGED = "changed"
    """The prompts differ there."""
    EVICTED = "evicted"
    """The cache had forgotten it."""
    NOT_COMPUTED = "not_computed"
    """The neighbour was still being computed."""
    NEVER_CACHED = "never_cached"
    """No earlier request begins like it."""


@dataclass(frozen=True, slots=True)
class Miss:
    """What became of one prompt in the prefix cache."""

    entry: Entry
    neighbour: Entry | None
    token: int
    """Where matching stopped."""
    reason: Reason
    num_lost_tokens: int = 0
    """That the neighbour had computed and that were computed again."""
    lost_ms: float = 0.0
    changed: tuple[int, int] = (0, 0)
    """[start, end) of what changed, in this prompt's tokens."""
    neighbour_changed: tuple[int, int] = (0, 0)
    """The same in the neighbour's."""
    num_stable_tokens: int = 0
    """Equal tokens behind the change."""

    @property
    def block(self) -> int:
        """The first block that was not found."""
        return self.token // BLOCK_SIZE


@dataclass(frozen=True, slots=True)
class Pattern:
    """Misses with one cause."""

    token: int
    """The first place at which one of its prompts stopped matching."""
    reason: Reason
    misses: tuple[Miss, ...]

    @property
    def num_lost_tokens(self) -> int:
        """Of all its requests."""
        return sum(miss.num_lost_tokens for miss in self.misses)

    @property
    def share_lost(self) -> float:
        """Of the prompt tokens of its requests."""
        total = sum(len(miss.entry.tokens) for miss in self.misses)
        return self.num_lost_tokens / total if total else 0.0

    @property
    def lost_ms(self) -> float:
        """Of all its requests."""
        return sum(miss.lost_ms for miss in self.misses)


def lint(log: LoadLog, costs: StepCosts, owner: str | None = None) -> list[Miss]:
    """What became of the latest prompts of `owner` (None: of all), oldest first."""
    entries = [
        entry
        for entry in log.entries()
        if entry.end is not None
        and len(entry.tokens)
        and entry.arrival.is_lintable
        and (owner is None or entry.arrival.owner == owner)
    ]
    cost = StepCostModel(costs)
    return [_examine(entry, log.entry(entry.neighbour), cost) for entry in entries[-MAX_LINTED:]]


def patterns(misses: Sequence[Miss]) -> list[Pattern]:
    """Losses with one cause, the most expensive first."""
    groups: dict[tuple[Reason, bytes], list[Miss]] = {}
    for miss in misses:
        if miss.num_lost_tokens:
            stable = miss.entry.tokens[miss.changed[1] : miss.changed[1] + SHINGLE].tobytes()
            kind = stable if miss.reason is Reason.CHANGED else b""
            groups.setdefault((miss.reason, kind), []).append(miss)
    found = [
        Pattern(min(miss.token for miss in group), reason, tuple(group))
        for (reason, _), group in groups.items()
    ]
    return sorted(found, key=lambda pattern: -pattern.num_lost_tokens)


def hints(misses: Sequence[Miss]) -> list[ReorderHint]:
    """What a diagnosis needs to know of changes early in prompts."""
    return [
        ReorderHint(
            token=pattern.token,
            num_requests=len(pattern.misses),
            num_lost_tokens=pattern.num_lost_tokens // len(pattern.misses),
            share_lost=round(pattern.share_lost, 3),
            lost_ms=round(pattern.lost_ms / len(pattern.misses), 2),
        )
        for pattern in patterns(misses)
        if pattern.reason is Reason.CHANGED
    ]


def _examine(entry: Entry, neighbour: Entry | None, cost: StepCostModel) -> Miss:
    assert entry.end is not None
    num_cached = entry.end.num_cached_tokens
    reusable = (len(entry.tokens) - 1) // BLOCK_SIZE * BLOCK_SIZE
    shared = min(entry.num_shared_blocks * BLOCK_SIZE, reusable)
    if num_cached >= reusable:
        return Miss(entry, neighbour, num_cached, Reason.WHOLE)
    if num_cached < shared and neighbour is not None:
        reason = Reason.EVICTED if _was_computed(neighbour, entry) else Reason.NOT_COMPUTED
        lost = shared - num_cached
        lost_ms = cost.prefill_ms(lost, num_cached)
        return Miss(entry, neighbour, num_cached, reason, lost, lost_ms)
    if neighbour is None or not len(neighbour.tokens):
        return Miss(entry, None, num_cached, Reason.NEVER_CACHED)
    at = _first_difference(entry.tokens, neighbour.tokens)
    if at >= len(neighbour.tokens) or at < num_cached:
        # What was said since (an answer, a longer conversation) may have been found, too.
        return Miss(entry, neighbour, max(at, num_cached), Reason.EXTENDED)
    return _examine_change(entry, neighbour, at, cost)


def _examine_change(entry: Entry, neighbour: Entry, at: int, cost: StepCostModel) -> Miss:
    """Both go on differently; what is equal again behind it could have been shared."""
    runs = common_runs(entry.tokens, neighbour.tokens, at)
    stable = sum(length for _, _, length in runs)
    if not runs:
        reason = Reason.CHANGED if at >= BLOCK_SIZE else Reason.NEVER_CACHED
        return Miss(entry, neighbour, at, reason)
    start, other_start, _ = runs[0]
    lost = (at % BLOCK_SIZE + stable) // BLOCK_SIZE * BLOCK_SIZE
    return Miss(
        entry,
        neighbour,
        at,
        Reason.CHANGED,
        lost,
        cost.prefill_ms(lost, at // BLOCK_SIZE * BLOCK_SIZE),
        (at, start),
        (at, other_start),
        stable,
    )


def _was_computed(neighbour: Entry, entry: Entry) -> bool:
    """Whether the neighbour's prompt was complete before this request started."""
    if neighbour.end is None or neighbour.end.ttft_ms is None or entry.end is None:
        return False
    started_s = entry.arrival.arrival_s + entry.end.queue_ms / 1e3
    return neighbour.arrival.arrival_s + neighbour.end.ttft_ms / 1e3 <= started_s


def _first_difference(ours: array[int], theirs: array[int]) -> int:
    limit = min(len(ours), len(theirs))
    at, step = 0, 256
    while at < limit and ours[at : at + step] == theirs[at : at + step]:
        at += step
    at = min(at, limit)
    while at < limit and ours[at] == theirs[at]:
        at += 1
    return at


def common_runs(ours: array[int], theirs: array[int], start: int) -> list[tuple[int, int, int]]:
    """Stretches behind `start` that both have: (our place, their place, length), in our order.

    Greedy, by shingles: linear in the length of both.
    """
    width = SHINGLE * _BYTES
    own, other = ours.tobytes(), theirs.tobytes()
    places: dict[bytes, int] = {}
    for at in range(start, len(theirs) - SHINGLE + 1):
        places.setdefault(other[at * _BYTES : at * _BYTES + width], at)
    runs = []
    at = start
    while at <= len(ours) - SHINGLE:
        place = places.get(own[at * _BYTES : at * _BYTES + width])
        if place is None:
            at += 1
            continue
        length = SHINGLE
        limit = min(len(ours) - at, len(theirs) - place)
        while length < limit and ours[at + length] == theirs[place + length]:
            length += 1
        if length >= MIN_RUN:
            runs.append((at, place, length))
        at += length
    return runs
