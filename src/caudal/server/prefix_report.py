"""Puts what the prefix lint found into words, with the text of the caller's own requests."""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence

from caudal.config import BLOCK_SIZE
from caudal.diagnosis.prefix_lint import Miss, Pattern, Reason, patterns
from caudal.server.protocol.diagnosis import PrefixMiss, PrefixPattern, PrefixReport
from caudal.tokenizer.gguf_tokenizer import Tokenizer

SHOWN_TOKENS = 24
CONTEXT_TOKENS = 8
MAX_PATTERNS = 10


def make_prefix_report(
    misses: Sequence[Miss], tokenizer: Tokenizer, limit: int, *, is_enabled: bool
) -> PrefixReport:
    """The report on `misses`, which all belong to one owner."""
    found = patterns(misses)
    now = time.monotonic()
    return PrefixReport(
        is_enabled=is_enabled,
        num_requests=len(misses),
        prompt_tokens=sum(len(miss.entry.tokens) for miss in misses),
        cached_tokens=sum(miss.entry.end.num_cached_tokens for miss in misses if miss.entry.end),
        lost_tokens=sum(miss.num_lost_tokens for miss in misses),
        lost_ms=round(sum(miss.lost_ms for miss in misses), 1),
        patterns=[_pattern(pattern, tokenizer) for pattern in found[:MAX_PATTERNS]],
        requests=[_miss(miss, tokenizer, now) for miss in reversed(misses[-limit:])],
    )


def _pattern(pattern: Pattern, tokenizer: Tokenizer) -> PrefixPattern:
    latest = pattern.misses[-1]
    neighbour = latest.neighbour
    (start, end), (other_start, other_end) = latest.changed, latest.neighbour_changed
    own = latest.entry.tokens
    changed = _text(tokenizer, own, start, end)
    stable = _text(tokenizer, own, end, end + SHOWN_TOKENS) if latest.num_stable_tokens else ""
    return PrefixPattern(
        token=pattern.token,
        block=pattern.token // BLOCK_SIZE,
        reason=pattern.reason,
        num_requests=len(pattern.misses),
        lost_tokens=pattern.num_lost_tokens,
        share_lost=round(pattern.share_lost, 4),
        lost_ms=round(pattern.lost_ms, 1),
        changed=changed,
        neighbour_changed=_text(
            tokenizer, array("i") if neighbour is None else neighbour.tokens, other_start, other_end
        ),
        stable=stable,
        advice=_advice(pattern, changed),
    )


def _advice(pattern: Pattern, changed: str) -> str:
    share, latest = f"{pattern.share_lost:.0%}", pattern.misses[-1]
    if pattern.reason is Reason.EVICTED:
        return (
            f"The cache had forgotten {share} of these prompts: a larger KV cache "
            "(--kv-cache-memory), or --kv-cache-dtype int8, would keep them."
        )
    if pattern.reason is Reason.NOT_COMPUTED:
        return (
            f"{share} of these prompts was being computed for another request just then; send the "
            "first of a group a moment before the others."
        )
    what = f"«{changed.strip()}»" if changed.strip() else "what comes between"
    return (
        f"A change at token {pattern.token} ({what}) costs you {share} of the hits: move it behind "
        f"the {latest.num_stable_tokens} tokens that follow it unchanged."
    )


def _miss(miss: Miss, tokenizer: Tokenizer, now: float) -> PrefixMiss:
    own, at = miss.entry.tokens, miss.token
    neighbour = miss.neighbour
    end = miss.entry.end
    return PrefixMiss(
        age_s=round(now - miss.entry.arrival.arrival_s, 1),
        prompt_tokens=len(own),
        cached_tokens=0 if end is None else end.num_cached_tokens,
        token=at,
        block=miss.block,
        reason=miss.reason,
        lost_tokens=miss.num_lost_tokens,
        lost_ms=round(miss.lost_ms, 2),
        before=_text(tokenizer, own, max(0, at - CONTEXT_TOKENS), at),
        text=_text(tokenizer, own, at, at + SHOWN_TOKENS),
        neighbour_text=""
        if neighbour is None
        else _text(tokenizer, neighbour.tokens, at, at + SHOWN_TOKENS),
    )


def _text(tokenizer: Tokenizer, tokens: array[int], start: int, end: int) -> str:
    """The text of some tokens, marks included; the first of them if they are many."""
    ids = tokens[start : min(end, start + SHOWN_TOKENS)].tolist()
    return tokenizer.decode(ids, skip_special=False) if ids else ""
