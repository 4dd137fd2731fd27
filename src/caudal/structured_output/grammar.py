"""What a client asked for, as a grammar in llguidance's notation; checked before it is compiled."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from caudal.errors import InvalidRequestError
from caudal.sampling_params import StructuralTag, StructuralTags, StructuredOutputsParams
from caudal.structured_output.argument_rules import python_rules, xml_rules
from caudal.structured_output.json_schema import (
    MOVED_ROOT,
    Schema,
    check_length,
    check_schema,
    find_fault,
    parse_schema,
)
from caudal.structured_output.limits import (
    MAX_CHOICE_CHARS,
    MAX_CHOICES,
    MAX_REPEAT,
    MAX_TAGS,
    MAX_WHITESPACE,
)
from caudal.structured_output.regex import check_regex
from caudal.structured_output.tags import create_tags_grammar, lead_rule

if TYPE_CHECKING:
    from llguidance import LLParserLimits

OPTIONS = '%llguidance {"no_forcing": true}\n'
"""Masks allow every way to split a forced text into tokens: forcing one would need the model's own
tokenizer, and the model knows better which split it has learnt."""

_NONE: Mapping[str, int] = MappingProxyType({})
_JSON_OPTIONS = {
    "whitespace_pattern": rf"[\x20\x0A\x0D\x09]{{1,{MAX_WHITESPACE}}}",
    "lenient": False,
    "coerce_one_of": False,
}


def parser_limits() -> LLParserLimits:
    """Bounds of compiling and of following a grammar: a mask takes about ten milliseconds."""
    from llguidance import LLParserLimits

    return LLParserLimits(max_lexer_states=50_000, step_lexer_fuel=100_000, verbose_errors=False)


def create_grammar(
    params: StructuredOutputsParams, where: str, special_ids: Mapping[str, int] = _NONE
) -> str:
    """The grammar of `params`; `special_ids` are the model's control tokens.

    Raises InvalidRequestError, beginning with `where`, for what is malformed, too large or could
    not be enforced. Faults that only compiling finds are left to `check_grammar`.
    """
    if params.grammar is not None:
        grammar = _lark_grammar(params.grammar, where)
    elif params.structural_tags is not None:
        grammar = _tags_grammar(params.structural_tags, where, special_ids)
    else:
        grammar = f"{OPTIONS}start: {_rule(params, where)}\n"
    if params.after is None:
        return grammar
    start = OPTIONS + "start: before gap @form\ngap: /[ \\n]{1,4}/ |\n"
    start += lead_rule("before", params.after, special_ids)
    parts = [{"lark_grammar": start}, {"name": "form", "lark_grammar": grammar}]
    return json.dumps({"grammars": parts})


def _rule(params: StructuredOutputsParams, where: str) -> str:
    """The right side of the rule for a form without rules of its own."""
    if params.json is not None:
        return json_rule(params.json, where)
    if params.json_object:
        return json_rule({"type": "object"}, where)
    if params.regex is not None:
        return _regex_rule(params.regex, where)
    if params.choice is not None:
        return _choice_rule(params.choice, where)
    raise InvalidRequestError(f"{where}: says nothing about the form.", code="invalid_value")


def check_grammar(params: StructuredOutputsParams, where: str) -> None:
    """Raise InvalidRequestError, beginning with `where`, for what cannot be enforced.

    Compiles the grammar without a vocabulary, so only names of special tokens stay unchecked.
    """
    error = compile_error(create_grammar(params, where))
    if error is not None:
        raise grammar_error(params, where, error)


def compile_error(grammar: str) -> str | None:
    """What the compiler finds wrong, in one line; None if nothing."""
    from llguidance import LLMatcher

    is_error, messages = LLMatcher.validate_grammar_with_warnings(grammar, limits=parser_limits())
    return short(messages[0]) if is_error else None


def grammar_error(params: StructuredOutputsParams, where: str, error: str) -> InvalidRequestError:
    """The compiler's `error` with its place: the JSON pointer of the innermost schema at fault."""
    code = "invalid_value"
    if params.json is not None:
        code = "invalid_json_schema"
        schema = check_schema(parse_schema(params.json, where), where)
        fault = find_fault(schema, lambda part: compile_error("start: " + _json_rule(part)))
        place, error = fault or ("", error)
        keyword = next((word for sign, word in _KEYWORDS if sign in error), None)
        if keyword is not None:
            place = f"{place.removesuffix('/')}/{keyword}"
        where = f"{where}: {place}" if place else where
    return InvalidRequestError(f"{where}: {error}", code=code)


_KEYWORDS = (
    ("oneOf", "oneOf"),
    ("regex", "pattern"),
    ("Pointer", "$ref"),
    ("Invalid type", "type"),
)
"""Keywords that the compiler's messages are about."""


def short(message: str) -> str:
    """What a compiler's message says, as one sentence of bounded length."""
    lines = _POSITION.sub("", message.strip()).split("\n")
    text = ": ".join([lines[0], *(line[7:] for line in lines[1:] if line.startswith("error: "))])
    text = text.replace(MOVED_ROOT, "")[:300].rstrip(" .:")
    return f"{text or 'the grammar cannot be compiled'}."


_POSITION = re.compile(r"^at \d+\(\d+\): (?:failed to compile JSON schema: )?")


def json_rule(schema: dict[str, Any] | bool | str, where: str) -> str:
    """The right side of a rule that matches JSON of a schema given by a client."""
    return _json_rule(check_schema(parse_schema(schema, where), where))


def _json_rule(schema: Schema) -> str:
    text = json.dumps({**schema, "x-guidance": _JSON_OPTIONS})
    return f"%json {text}"


def _regex_rule(regex: str, where: str) -> str:
    from llguidance import regex_to_lark

    if not regex:
        raise InvalidRequestError(f"{where}: must not be empty.", code="invalid_value")
    check_regex(regex, where)
    one_line = regex.replace("\n", "\\n")  # a line break would end the rule
    return f"/{regex_to_lark(one_line, 'd')}/"


def _choice_rule(choices: tuple[str, ...], where: str) -> str:
    num_chars = sum(map(len, choices))
    if not 1 <= len(choices) <= MAX_CHOICES or num_chars > MAX_CHOICE_CHARS:
        raise InvalidRequestError(
            f"{where}: must be 1 to {MAX_CHOICES} texts of {MAX_CHOICE_CHARS} characters together.",
            code="invalid_value",
        )
    if not all(choices):
        raise InvalidRequestError(f"{where}: a choice must not be empty.", code="invalid_value")
    return " | ".join(map(json.dumps, dict.fromkeys(choices)))


def _lark_grammar(grammar: str, where: str) -> str:
    check_length(grammar, where)
    if "::=" in grammar:
        grammar = _from_gbnf(grammar, where)
    for count in _repeat_counts(grammar):
        if count > MAX_REPEAT:
            raise InvalidRequestError(
                f"{where}: a repeat may be {MAX_REPEAT} at most.", code="invalid_value"
            )
    # Ours come last: of several option lines the last one counts.
    return grammar + "\n" + OPTIONS


def _from_gbnf(grammar: str, where: str) -> str:
    """llama.cpp's notation, which writes rules with `::=`."""
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return any_to_lark(grammar)
    except Exception as error:  # the converter has no base class for its errors
        raise InvalidRequestError(f"{where}: {short(str(error))}", code="invalid_value") from None


def _repeat_counts(grammar: str) -> list[int]:
    found = re.findall(r"[{~]\s*(\d*)\s*(?:,|\.\.)?\s*(\d*)", grammar)
    counts = [digits for pair in found for digits in pair if digits]
    return [int(digits) if len(digits) < 10 else MAX_REPEAT + 1 for digits in counts]


def _tags_grammar(tags: StructuralTags, where: str, special_ids: Mapping[str, int]) -> str:
    if not 1 <= len(tags.tags) <= MAX_TAGS:
        raise InvalidRequestError(f"{where}: must be 1 to {MAX_TAGS} tags.", code="invalid_value")
    rules = [
        _passage_rules(f"json_{index}", tag, f"{where}[{index}]")
        for index, tag in enumerate(tags.tags)
    ]
    return OPTIONS + create_tags_grammar(tags, rules, special_ids)


def _passage_rules(name: str, tag: StructuralTag, where: str) -> list[str]:
    """The rules of what stands between `begin` and `end`."""
    if tag.syntax not in ("xml", "python"):
        return [f"{name}: {json_rule(tag.schema, where)}"]
    schema = check_schema(parse_schema(tag.schema, where), where)
    make = xml_rules if tag.syntax == "xml" else python_rules
    return make(name, schema, lambda part: json_rule(part, where))
