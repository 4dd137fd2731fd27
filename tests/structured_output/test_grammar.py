"""Regular expressions, choices, grammars and tagged passages; and their limits."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from caudal.errors import InvalidRequestError
from caudal.sampling_params import (
    CallSyntax,
    StructuralTag,
    StructuralTags,
    StructuredOutputsParams,
)
from caudal.structured_output.constraint import ConstraintError
from caudal.structured_output.grammar import check_grammar
from caudal.structured_output.number_runs import NumberRuns
from tests.structured_output.walker import (
    KINDS,
    allowed_ids,
    can_follow,
    compile_form,
    feed,
    random_text,
    vocabulary,
)

FAMILY = "👩‍👩‍👧‍👦"


def tag(name: str, **properties: Any) -> StructuralTag:
    schema = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    return StructuralTag(begin=f"<call>{name} ", schema=schema, end="</call>")


TAGS = (tag("add", a={"type": "integer"}), tag("greet", who={"enum": ["Ann", "Bob"]}))
CALL = re.compile(r"<call>(add|greet) (\{.*?\})</call>", re.DOTALL)


def passages(**fields: Any) -> StructuredOutputsParams:
    return StructuredOutputsParams(structural_tags=StructuralTags(tags=TAGS, **fields))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "regex", ["[a-z]{3}/\\d{2}", "^abc$", "a\nb|c", "(yes|no)( please)?", "[^x]{1,4}", "(?i)hey"]
)
def test_whole_output_matches_the_regular_expression(regex: str, kind: str) -> None:
    for seed in range(10):
        text = random_text(StructuredOutputsParams(regex=regex), seed, kind=kind)
        assert re.fullmatch(regex, text), text


@pytest.mark.parametrize("kind", KINDS)
def test_choice_with_any_characters_is_given_as_it_is(kind: str) -> None:
    choices = ("yes", 'no "q"\n\\', "a\u0001\x7f", FAMILY, "<|im_end|>", "/x/")
    seen = {random_text(StructuredOutputsParams(choice=choices), seed, kind=kind)
            for seed in range(60)}  # fmt: skip
    assert seen == set(choices)


@pytest.mark.parametrize(
    ("grammar", "expected"),
    [
        ('start: "a" b+\nb: "x" | "y"', r"a[xy]+"),
        (f'root ::= "{FAMILY}"', FAMILY),
        ('root ::= item ("," item)*\nitem ::= [0-9]+', r"\d+(,\d+)*"),
        ('start: %json {"type": "boolean"}', r"true|false"),
        ('%llguidance {"no_forcing": false}\nstart: "abc"', "abc"),
    ],
)
def test_grammar_in_either_notation_is_followed(grammar: str, expected: str) -> None:
    for seed in range(5):
        assert re.fullmatch(expected, random_text(StructuredOutputsParams(grammar=grammar), seed))


@pytest.mark.parametrize(
    "params",
    [
        StructuredOutputsParams(),
        StructuredOutputsParams(regex="("),
        StructuredOutputsParams(regex=""),
        StructuredOutputsParams(regex="a" * 5_000),
        StructuredOutputsParams(regex="a{100000}"),
        StructuredOutputsParams(regex="((a{50}){50}b){50}"),
        StructuredOutputsParams(choice=()),
        StructuredOutputsParams(choice=("a", "")),
        StructuredOutputsParams(choice=("a",) * 1_001),
        StructuredOutputsParams(grammar="start: nowhere"),
        StructuredOutputsParams(grammar="root ::= nowhere"),
        StructuredOutputsParams(grammar="start: " + "(" * 20_000),
        StructuredOutputsParams(grammar='start: "a"{1,1000000}'),
        StructuredOutputsParams(grammar="x" * 140_000),
        passages(max_passages=0),
        passages(trigger="<tool>"),
        passages(min_passages=2, max_passages=1),
    ],
    ids=lambda params: repr(params)[:60],
)
def test_form_that_is_malformed_or_too_large_is_refused(params: StructuredOutputsParams) -> None:
    with pytest.raises(InvalidRequestError, match=r"^(here|structural_tags)"):
        check_grammar(params, "here")


@pytest.mark.parametrize(
    "params",
    [
        StructuredOutputsParams(grammar='start: "a" <nope>'),
        StructuredOutputsParams(grammar="start: start"),
        StructuredOutputsParams(json={"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}),
    ],
)
def test_form_that_no_output_can_have_is_refused(params: StructuredOutputsParams) -> None:
    with pytest.raises(InvalidRequestError, match=r"^structured_outputs: "):
        compile_form(params)


def test_enforced_passages_are_as_many_as_allowed() -> None:
    for seed in range(20):
        one = random_text(passages(min_passages=1, max_passages=1), seed)
        assert CALL.fullmatch(one), one
        some = random_text(passages(min_passages=2, max_passages=3, separator=";\n"), seed)
        parts = some.split(";\n")
        assert 2 <= len(parts) <= 3
        for part in parts:
            found = CALL.fullmatch(part)
            assert found, part
            assert json.loads(found.group(2)).keys() <= {"a", "who"}


def test_free_text_is_free_until_the_trigger() -> None:
    constraint = compile_form(passages(trigger="<call>", max_passages=2))
    feed(constraint, "I see: <b> 1 < 2, <call")
    assert can_follow(constraint, "x")
    feed(constraint, ">")
    assert not can_follow(constraint, "x")
    feed(constraint, 'add {"a": 12}</call> and then <call>greet {"who":"Ann"}</call>')
    eog = sorted(vocabulary("gpt2").eog_ids)
    assert allowed_ids(constraint) == eog


def test_control_token_as_trigger_is_the_token_and_not_its_text() -> None:
    mark = "<|im_start|>"
    tags = (StructuralTag(begin=mark + "x", schema=True),)
    form = StructuredOutputsParams(
        structural_tags=StructuralTags(tags=tags, min_passages=1, max_passages=1)
    )
    token_id = vocabulary("gpt2").token_bytes.index(mark.encode())
    assert allowed_ids(compile_form(form)) == [token_id]


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ({"json": {"type": "integer"}}, "12"),
        ({"regex": "[a-z]{3}"}, "abc"),
        ({"choice": ("yes", "no")}, "yes"),
        ({"grammar": 'start: "a" b\nb: "x"'}, "ax"),
    ],
)
def test_reasoning_comes_before_a_form(form: dict[str, Any], text: str) -> None:
    constraint = compile_form(StructuredOutputsParams(**form, after="</think>"))
    feed(constraint, "hm, {1} </thin ")
    assert can_follow(constraint, "k")
    feed(constraint, "</think>\n")
    assert not can_follow(constraint, "!")
    feed(constraint, text)


def test_token_outside_the_form_fails_the_constraint() -> None:
    constraint = compile_form(StructuredOutputsParams(choice=("yes",)))
    with pytest.raises(ConstraintError):
        feed(constraint, "n")


def test_end_of_generation_written_as_text_is_not_allowed_in_a_json_string() -> None:
    """B65: any token that ends a generation ends the request, so it must not come earlier."""
    for kind in KINDS:
        constraint = compile_form(StructuredOutputsParams(json_object=True), kind)
        feed(constraint, '{"a', kind)
        assert not vocabulary(kind).eog_ids & set(allowed_ids(constraint, kind))


@pytest.mark.parametrize(
    ("pieces", "counts", "trigger"),
    [
        ((b'{"a": "123456", "b\\"1": 12', b"345", b"}"), (2, 5, 0), None),
        ((b"12", b"34", b".5e", b"7"), (2, 4, 0, 1), None),
        ((b"123", b"<t>", b'{"a": 12', b"34}", b"567", b"<t>[1"), (0, 0, 2, 0, 0, 1), b"<t>"),
        ((b'{"name": "', b'x1", "a": 22', b"}", b"33"), (0, 2, 0, 0), b'{"name": "'),
    ],
)
def test_digits_of_numbers_are_counted_but_not_those_of_texts(
    pieces: tuple[bytes, ...], counts: tuple[int, ...], trigger: bytes | None
) -> None:
    runs = NumberRuns(trigger)
    for piece, count in zip(pieces, counts, strict=True):
        runs.push(piece)
        assert runs.digits == count, piece


ARGUMENTS = {
    "type": "object",
    "properties": {
        "who": {"type": "string"},
        "kind": {"type": "string", "enum": ["a b", "<c>"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
        "maybe": {"$ref": "#/$defs/flag"},
    },
    "required": ["kind", "count"],
    "$defs": {"flag": {"type": "boolean"}},
}


def call_form(syntax: CallSyntax, schema: dict[str, Any]) -> StructuredOutputsParams:
    begin, end = ("<f>\n", "</f>") if syntax == "xml" else ("f(", ")")
    passage = StructuralTag(begin=begin, schema=schema, end=end, syntax=syntax)
    tags = StructuralTags(tags=(passage,), min_passages=1, max_passages=1)
    return StructuredOutputsParams(structural_tags=tags)


@pytest.mark.parametrize("kind", KINDS)
def test_arguments_as_elements_have_the_names_and_types_of_the_schema(kind: str) -> None:
    form = call_form("xml", ARGUMENTS)
    constraint = compile_form(form, kind)
    text = "<f>\n<parameter=who>\nany <text>\n\n</parameter>\n<parameter=kind>\n<c>\n</parameter>\n"
    feed(constraint, f"{text}<parameter=count>\n12\n</parameter>\n", kind)
    assert can_follow(constraint, "</f>", kind) or can_follow(constraint, "<parameter", kind)
    feed(constraint, "<parameter=maybe>\ntrue\n</parameter>\n</f>", kind)
    for wrong in ("<parameter=count>", "</f>", "<parameter=who>\nx\n</parameter>\n</f>"):
        with pytest.raises(ConstraintError):
            feed(compile_form(form, kind), f"<f>\n{wrong}", kind)


def test_arguments_in_python_are_separated_whichever_are_left_out() -> None:
    form = call_form("python", ARGUMENTS)
    for right in (
        'f(kind="a b", count=1)',
        'f(who="x\\n", kind="<c>", count=12)',
        'f(kind="a b", count=1, maybe=true)',
    ):
        feed(compile_form(form), right)
    for wrong in ("f(, ", "f(count", 'f(kind="a b")', 'f(kind="a b"count', 'f(who="x")'):
        with pytest.raises(ConstraintError):
            feed(compile_form(form), wrong)
    optional = {"type": "object", "properties": {"a": {"const": 1}, "b": {"const": 2}}}
    for right in ("f()", "f(a=1)", "f(b=2)", "f(a=1, b=2)"):
        feed(compile_form(call_form("python", optional)), right)


@pytest.mark.parametrize("syntax", ["xml", "python"])
def test_function_that_names_no_arguments_takes_any(syntax: CallSyntax) -> None:
    form = call_form(syntax, {"type": "object"})
    feed(compile_form(form), "<f>\n</f>" if syntax == "xml" else "f()")
    some = "<f>\n<parameter=a>\nx\n</parameter>\n</f>" if syntax == "xml" else 'f(a=[1], b="x")'
    feed(compile_form(form), some)


def test_names_that_cannot_be_written_are_refused() -> None:
    for syntax, key in (("xml", "a>b"), ("python", "a-b")):
        schema = {"properties": {key: {"type": "integer"}}, "required": [key]}
        with pytest.raises(InvalidRequestError, match="cannot write"):
            check_grammar(call_form(syntax, schema), "tools")  # type: ignore[arg-type]
