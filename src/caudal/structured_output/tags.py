"""The grammar of free text with constrained passages, such as tool calls."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence

from caudal.errors import InvalidRequestError
from caudal.sampling_params import StructuralTags

_MAX_PASSAGES = 1_000


def create_tags_grammar(
    tags: StructuralTags, rules: Sequence[list[str]], special_ids: Mapping[str, int]
) -> str:
    """Rules from `start` on; `rules` are those of the schema of each tag, from `json_INDEX` on.

    A text in `special_ids` means the control token of that id: plain text never becomes one.
    Raises InvalidRequestError for counts or triggers that contradict each other.
    """
    _check(tags)
    if tags.trigger is None:
        lines = _passages_only(tags, special_ids)
        cut = 0
    else:
        lines = _text_with_passages(tags, tags.trigger, special_ids)
        cut = len(tags.trigger)
    for index, (tag, own) in enumerate(zip(tags.tags, rules, strict=True)):
        begin = _literal(tag.begin[cut:], special_ids)
        lines.append(f"tag_{index}: {begin} json_{index} {_literal(tag.end, special_ids)}")
        lines += own
    return "\n".join(lines) + "\n"


def _check(tags: StructuralTags) -> None:
    most = tags.max_passages
    if not 0 <= tags.min_passages <= _MAX_PASSAGES or not 1 <= (most or 1) <= _MAX_PASSAGES:
        raise _error(f"passages: counts must be at most {_MAX_PASSAGES}")
    if most == 0 or (most is not None and most < tags.min_passages):
        raise _error("max_passages: must be at least 1 and min_passages")
    trigger = tags.trigger
    if trigger is not None and not (
        trigger and all(tag.begin.startswith(trigger) for tag in tags.tags)
    ):
        raise _error("trigger: must be text with which every begin starts")


def _passages_only(tags: StructuralTags, special_ids: Mapping[str, int]) -> list[str]:
    least, most = tags.min_passages, tags.max_passages
    following = f"({_literal(tags.separator, special_ids)} passage)"
    others = _times(following, max(0, least - 1), None if most is None else most - 1)
    some = f"passage {others}"
    return [f"start: {some}" if least else f"start: ({some})?", _any_tag(tags)]


def _text_with_passages(
    tags: StructuralTags, trigger: str, special_ids: Mapping[str, int]
) -> list[str]:
    least, most = tags.min_passages, tags.max_passages
    start = f"{_times('call', least, None)} TEXT"
    if most is not None:
        start = _times("call", most, most)
        if least < most:
            start += f" | {_times('call', least, most - 1)} TEXT"
    lead = lead_rule("head", trigger, special_ids)
    return [f"start: {start}", lead, "call: head passage", _any_tag(tags)]


def lead_rule(name: str, end: str, special_ids: Mapping[str, int]) -> str:
    """A rule `name` for free text that ends with the first `end`; TEXT is any text."""
    text = "TEXT: /(.|\\n)*/\n"
    if any(special in end for special in special_ids):
        return f"{text}{name}: TEXT {_literal(end, special_ids)}\n"
    return f"{text}{name}[lazy]: TEXT {json.dumps(end)}\n"


def _times(symbol: str, least: int, most: int | None) -> str:
    if most == 0:
        return ""
    return f"{symbol}{{{least},{'' if most is None else most}}}"


def _any_tag(tags: StructuralTags) -> str:
    return "passage: " + " | ".join(f"tag_{index}" for index in range(len(tags.tags)))


def _literal(text: str, special_ids: Mapping[str, int]) -> str:
    """`text` as symbols of a rule: quoted, but for control tokens."""
    if not text:
        return ""
    special = sorted((name for name in special_ids if name in text), key=len, reverse=True)
    if not special:
        return json.dumps(text)
    parts = re.split("(" + "|".join(map(re.escape, special)) + ")", text)
    symbols = (
        f"<[{special_ids[part]}]>" if part in special_ids else json.dumps(part)
        for part in parts
        if part
    )
    return " ".join(symbols)


def _error(problem: str) -> InvalidRequestError:
    return InvalidRequestError(f"structural_tags: {problem}.", code="invalid_value")
