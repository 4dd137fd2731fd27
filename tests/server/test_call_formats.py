"""Calls that are not JSON objects: XML elements, Python lists, channels; cut up in every way."""

from __future__ import annotations

import contextlib
import itertools
import json
import random

import pytest

from caudal.server.parsers.output_parser import (
    OutputParser,
    OutputRules,
    ReasoningRules,
    ToolRules,
)
from caudal.server.parsers.parts import Answer, joined
from caudal.server.parsers.reasoning import HARMONY, ReasoningState
from caudal.server.parsers.tool_formats import (
    HERMES,
    LLAMA3_JSON,
    OPENAI,
    PYTHONIC,
    QWEN3_CODER,
    ToolFormat,
    detect_tool_format,
)

PARAMETERS = {
    "add": {"properties": {"a": {"type": "integer"}, "b": {"type": "number"}}},
    "greet": {
        "properties": {
            "who": {"type": "string"},
            "loud": {"type": "boolean"},
            "tags": {"type": "array"},
            "any": {},
            "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        }
    },
}
Plain = tuple[str, str, list[tuple[str, str]]]


def make_parser(
    format: ToolFormat,
    max_calls: int | None = None,
    state: ReasoningState = ReasoningState.UNDECIDED,
) -> OutputParser:
    tools = ToolRules(format, frozenset(PARAMETERS), max_calls, PARAMETERS)
    reasoning = ReasoningRules(HARMONY, state) if format is OPENAI else None
    return OutputParser(OutputRules(reasoning, tools))


def parse(parser: OutputParser, pieces: list[str]) -> Answer:
    parts = [part for piece in pieces for part in parser.push_token(piece)]
    return joined(parts + parser.finish())


def cut(text: str, chance: random.Random) -> list[str]:
    places = sorted(chance.sample(range(len(text) + 1), chance.randint(0, min(9, len(text)))))
    return [text[a:b] for a, b in itertools.pairwise([0, *places, len(text)])]


def plain(answer: Answer) -> Plain:
    calls = [(call.name, call.arguments) for call in answer.calls]
    return answer.reasoning, answer.content, calls


def read(text: str, format: ToolFormat, max_calls: int | None = None) -> Plain:
    """(reasoning, content, calls), checked for many ways of cutting the text up."""
    whole = plain(parse(make_parser(format, max_calls), [text]))
    assert plain(parse(make_parser(format, max_calls), list(text))) == whole
    chance = random.Random(len(text))
    for _ in range(25):
        assert plain(parse(make_parser(format, max_calls), cut(text, chance))) == whole
    return whole


def values(plain: Plain) -> list[tuple[str, object]]:
    return [(name, json.loads(arguments)) for name, arguments in plain[2]]


def xml(name: str, **arguments: str) -> str:
    inner = "".join(f"<parameter={key}>\n{text}\n</parameter>\n" for key, text in arguments.items())
    return f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"


# XML


def test_elements_become_arguments_of_the_types_in_the_schema() -> None:
    text = "Let me see.\n" + xml("add", a="1", b="2.50") + "\n"
    text += xml("greet", who='1 "x"\n  <b>\\', loud="True", tags="['a', 1, None]", any="7")
    found = read(text, QWEN3_CODER)
    assert found[1] == "Let me see."
    assert values(found) == [
        ("add", {"a": 1, "b": 2.5}),
        ("greet", {"who": '1 "x"\n  <b>\\', "loud": True, "tags": ["a", 1, None], "any": 7}),
    ]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("null", None),
        ("plain", "plain"),
        ("7", "7"),
        ('{"x": 1}', '{"x": 1}'),
    ],
)
def test_value_that_may_be_text_is_text_unless_it_is_of_another_type_it_may_have(
    text: str, value: object
) -> None:
    assert values(read(xml("greet", maybe=text), QWEN3_CODER)) == [("greet", {"maybe": value})]


def test_value_of_the_wrong_type_stays_text_and_the_arguments_parse() -> None:
    assert values(read(xml("add", a="one", b=""), QWEN3_CODER)) == [("add", {"a": "one", "b": ""})]


@pytest.mark.parametrize(
    "text",
    [
        "<function=add>\n<parameter=a>\n1\n</parameter>\n</function>",
        "<tool_call><function=add><parameter=a>1</parameter></function></tool_call>",
        "<tool_call>\n<function=add>\n<parameter=a>\n1\n</function>\n</tool_call>",
        "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</tool_call>",
        "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=a>\n2\n"
        "</parameter>\n</function>",
    ],
)
def test_marks_that_models_forget_and_values_that_they_repeat_do_no_harm(text: str) -> None:
    found = read(text, QWEN3_CODER)
    assert (found[1], values(found)) == ("", [("add", {"a": 1})])


def test_function_without_parameters_has_empty_arguments() -> None:
    assert read(xml("add"), QWEN3_CODER)[2] == [("add", "{}")]


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>\n<function=other>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>",
        "<tool_call>\nadd(1)",
        "<function=add",
        "<function=add> and so on",
        "<tool_call>",
        "a <b> c < d",
        "</tool_call>",
        "<tool_call><tool_call>x",
    ],
)
def test_what_only_looks_like_an_element_is_content_to_the_character(text: str) -> None:
    assert read(text, QWEN3_CODER) == ("", text, [])


def test_text_parameter_arrives_before_it_is_whole() -> None:
    parser = make_parser(QWEN3_CODER)
    begin = xml("greet", who="Hello Bob").partition(" Bob")[0]
    parts = parser.push_token(begin)
    assert joined(parts).calls[0].arguments == '{"who": "Hello'


def test_call_that_is_cut_is_not_complete() -> None:
    parser = make_parser(QWEN3_CODER)
    answer = parse(parser, [xml("greet", who="Bob").partition("</function>")[0]])
    assert answer.calls[0].arguments == '{"who": "Bob"'
    assert not parser.has_calls


# Python


def test_python_list_becomes_calls() -> None:
    text = "[add(a=1, b=-2.5e3), greet(who='it\\'s \"x\"\\n', loud=True, tags=['a', (1, None)])]"
    found = read(text, PYTHONIC)
    assert values(found) == [
        ("add", {"a": 1, "b": -2500.0}),
        ("greet", {"who": 'it\'s "x"\n', "loud": True, "tags": ["a", [1, None]]}),
    ]
    assert found[1] == ""
    wrapped = f"Well.\n<|python_start|>{text}<|python_end|>"
    assert read(wrapped, PYTHONIC) == ("", "Well.", found[2])


@pytest.mark.parametrize(
    ("literal", "value"),
    [
        ('""', ""),
        ("''", ""),
        ('"""a "b"\nc"""', 'a "b"\nc'),
        (r'"\x41\u00e9\U0001f600\101\q\/"', "A\u00e9\U0001f600A\\q/"),
        (r'"\ud83d\ude00"', "\U0001f600"),
        ('"a, b) c]"', "a, b) c]"),
        ("{'k': [1, {'x': 'y)'}], 'n': None}", {"k": [1, {"x": "y)"}], "n": None}),
        ("true", True),
        ("[null, false]", [None, False]),
        ("0x10", 16),
        ("r'\\d'", "\\d"),
        ("[]", []),
    ],
)
def test_python_literals_become_json(literal: str, value: object) -> None:
    assert values(read(f"[greet(any={literal})]", PYTHONIC)) == [("greet", {"any": value})]


@pytest.mark.parametrize(
    "text",
    [
        "[1, 2, 3]",
        "[link](http://x.y)",
        "[other(a=1)]",
        "[add(1, 2)]",
        "[add(a==1)]",
        "[]",
        "[add",
        "[add(a",
        "plain [add(a=1)]",
        "",
        " [",
        "add(a=1)",
    ],
)
def test_what_is_no_list_of_calls_is_content_to_the_character(text: str) -> None:
    assert read(text, PYTHONIC) == ("", text, [])


@pytest.mark.parametrize(
    "text",
    ["[add(a=b)]", "[add(a=1 2)]", "[greet(who='x' + 'y')]", "[add(a=1, 5)]", "[add(a={1}, b=2)]"],
)
def test_python_that_is_no_literal_stays_with_the_call_and_does_not_count(text: str) -> None:
    found = read(text, PYTHONIC)
    assert found[1] == ""
    assert len(found[2]) == 1
    with pytest.raises(ValueError, match=r"."):
        json.loads(found[2][0][1])


def test_depth_and_size_of_python_values_are_bounded() -> None:
    deep = "[" * 5000
    assert read(f"[add(a={deep}", PYTHONIC)[2][0][0] == "add"
    assert read(f"[add(a={'-' * 5000}1)]", PYTHONIC)[2][0][0] == "add"


# Channels


def test_channels_are_told_apart() -> None:
    text = (
        "<|channel|>analysis<|message|>Add them.<|end|>"
        "<|start|>assistant<|channel|>commentary<|message|>One moment.<|end|>"
        "<|start|>assistant<|channel|>commentary to=functions.add <|constrain|>json<|message|>"
        '{"a": 1, "b": 2}<|call|>'
    )
    found = read(text, OPENAI)
    assert found == ("Add them.", "One moment.", [("add", '{"a": 1, "b": 2}')])
    final = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>"
    assert read(final + "Yes {1}.<|return|>", OPENAI) == ("Hm.", "Yes {1}.", [])


def test_recipient_may_come_before_the_channel() -> None:
    text = ' to=functions.add<|channel|>commentary json<|message|>{"a": 1}'
    assert read(text, OPENAI) == ("", "", [("add", '{"a": 1}')])


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("Just text", "Just text"),
        ("assistant is a word", "assistant is a word"),
        ("<|channel|>commentary to=functions.other<|message|>{}", "{}"),
        ("<|channel|>commentary to=functions.add<|message|>[1]", "[1]"),
        ("<|channel|>commentary to=functions.add<|message|>", ""),
        ("<|channel|>fin", ""),
        ("<|channel|>" + "x" * 2000, "<|channel|>" + "x" * 2000),
        ("", ""),
    ],
)
def test_channel_that_holds_no_call_is_content(text: str, content: str) -> None:
    assert read(text, OPENAI)[1:] == (content, [])


def test_tokens_of_analysis_count_as_reasoning() -> None:
    parser = make_parser(OPENAI)
    for piece in ("<|channel|>", "analysis", "<|message|>", "a", "b", "<|end|>", "<|start|>"):
        parser.push_token(piece)
    assert parser.num_reasoning_tokens == 6


def test_answer_goes_on_where_the_prompt_has_begun_reasoning() -> None:
    parser = make_parser(OPENAI, state=ReasoningState.REASONING)
    answer = parse(parser, ["Hm.<|end|>", "<|start|>assistant<|channel|>final<|message|>Yes"])
    assert plain(answer) == ("Hm.", "Yes", [])


# All


WORDS = {
    QWEN3_CODER: [
        *("<tool_call>", "</tool_call>", "<function=add>", "<function=greet>", "</function>"),
        *("<parameter=a>", "<parameter=who>", "</parameter>", "\n", "\r\n", "1", '"', "\\", "<"),
        *("text", "<function=", "<parameter=", ">", "é", "[1]"),
    ],
    PYTHONIC: [
        *("[", "]", "add(", "greet(", ")", "a=", "who=", ",", " ", "'", '"', "'''", "\\", "x4"),
        *("1", "None", "{", "}", "(", "<|python_start|>", "<|python_end|>", "\\u00", "é", "="),
    ],
    OPENAI: [
        *("<|channel|>", "<|message|>", "<|end|>", "<|start|>", "<|call|>", "<|constrain|>"),
        *("assistant", "analysis", "final", "commentary", " to=functions.add", "{", "}", '"a"'),
        *(":", "1", " ", "text", "<|", "é"),
    ],
}
CALL_START = ["<|channel|>commentary to=functions.add<|message|>", '{"a": ']


@pytest.mark.parametrize("format", WORDS, ids=lambda format: format.name)
@pytest.mark.parametrize("max_calls", [None, 1])
def test_pieces_never_change_the_answer_and_nonsense_never_raises(
    format: ToolFormat, max_calls: int | None
) -> None:
    chance = random.Random(7)
    num_calls = 0
    starts = {
        QWEN3_CODER: ["<tool_call>", "<function=add>"],
        PYTHONIC: ["[", "add("],
        OPENAI: CALL_START,
    }
    for _ in range(600):
        words = chance.choices(WORDS[format], k=chance.randint(1, 14))
        text = "".join([*starts[format][: chance.randint(0, 2)], *words])
        whole = plain(parse(make_parser(format, max_calls), [text]))
        assert plain(parse(make_parser(format, max_calls), list(text))) == whole, text
        for _ in range(3):
            assert plain(parse(make_parser(format, max_calls), cut(text, chance))) == whole, text
        num_calls += len(whole[2])
    assert num_calls > 5


@pytest.mark.parametrize("format", [QWEN3_CODER, PYTHONIC], ids=lambda format: format.name)
def test_complete_calls_have_arguments_that_parse(format: ToolFormat) -> None:
    chance = random.Random(11)
    for _ in range(600):
        words = chance.choices(WORDS[format], k=chance.randint(1, 14))
        start = "<function=greet>" if format is QWEN3_CODER else "[greet("
        parser = make_parser(format)
        answer = parse(parser, [start + "".join(words)])
        parsed = 0
        for call in answer.calls:
            with contextlib.suppress(ValueError):
                parsed += isinstance(json.loads(call.arguments), dict)
        assert parsed >= parser._tools.num_complete_calls  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("source", "format"),
    [
        ("<tool_call>\n<function=f>\n<parameter=p>", QWEN3_CODER),
        ("[func_name1(params_name1=params_value1, …), func_name2(params)]", PYTHONIC),
        ("<|start|>assistant<|channel|>analysis<|message|>", OPENAI),
        ("<tool_call> json", HERMES),
        ("<|python_tag|>", LLAMA3_JSON),
    ],
)
def test_format_is_seen_from_the_template(source: str, format: ToolFormat) -> None:
    assert detect_tool_format(source) is format
