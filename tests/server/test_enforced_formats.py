"""Calls in formats other than JSON: enforced, repeated, and in a server."""

from __future__ import annotations

import json
import random

import pytest
from jsonschema import Draft202012Validator

from caudal.config import ServerConfig
from caudal.server.parsers.output_parser import (
    OutputParser,
    OutputRules,
    ToolRules,
)
from caudal.server.parsers.tool_formats import (
    HERMES,
    OPENAI,
    PYTHONIC,
    QWEN3_CODER,
    ToolFormat,
)
from caudal.server.protocol.tools import FunctionSpec
from caudal.server.tool_constraint import call_constraint
from caudal.server.tools import Function, ToolMode, ToolUse
from tests.server.harness import in_process
from tests.server.test_call_formats import PARAMETERS, Plain, cut, parse, plain, read, xml
from tests.server.test_tools import both, sent_text
from tests.server.tool_models import TOOLS, tool_setup
from tests.structured_output.walker import random_text

# Repetitions


def read_until_repeat(text: str, format: ToolFormat = HERMES) -> Plain:
    def make() -> OutputParser:
        rules = ToolRules(format, frozenset(PARAMETERS), None, PARAMETERS, ends_at_repeat=True)
        return OutputParser(OutputRules(None, rules))

    whole = plain(parse(make(), [text]))
    assert plain(parse(make(), list(text))) == whole
    chance = random.Random(len(text))
    for _ in range(25):
        assert plain(parse(make(), cut(text, chance))) == whole
    return whole


def hermes(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>\n'


def test_enforced_calls_end_when_one_is_repeated() -> None:
    first, second = ("add", '{"a": 1, "b": 2}'), ("add", '{"a": 1, "b": 3}')
    text = hermes(*first) + hermes(*second) + hermes(*first) + hermes("greet", "{}")
    assert read_until_repeat(text)[2] == [first, second]
    cut_off = text[: text.rindex('": 2}')]
    assert read_until_repeat(cut_off)[2][:2] == [first, second]


def test_enforced_calls_in_other_formats_end_when_one_is_repeated() -> None:
    text = xml("add", a="1") + "\n" + xml("greet") + "\n" + xml("greet") + xml("add", b="1")
    expected = [("add", '{"a": 1}'), ("greet", "{}")]
    assert read_until_repeat(text, QWEN3_CODER)[2] == expected
    listed = "[add(a=1), greet(), greet(), add(b=1)]"
    assert read_until_repeat(listed, PYTHONIC)[2] == expected


def test_calls_of_the_models_own_accord_may_be_equal() -> None:
    text = hermes("add", "{}") * 3
    assert len(read(text, HERMES)[2]) == 3


# Enforced, and in a server


SPECS = {
    "add": {"properties": {"a": {"type": "integer"}, "b": {"type": "boolean"}}, "required": ["a"]},
    "pick": {"properties": {"kind": {"enum": ["x", "y z"]}, "many": {"type": "array"}}},
    "now": {},
}


def tool_use(mode: ToolMode, *, is_strict: bool = False) -> ToolUse:
    functions = tuple(
        Function(FunctionSpec(name=name, parameters=schema or None, strict=is_strict), index)
        for index, (name, schema) in enumerate(SPECS.items())
    )
    return ToolUse(tuple(f.spec for f in functions), functions, mode)


@pytest.mark.parametrize("format", [QWEN3_CODER, PYTHONIC, OPENAI], ids=lambda each: each.name)
def test_whatever_is_enforced_is_read_back_as_calls(format: ToolFormat) -> None:
    tools = tool_use(ToolMode.REQUIRED)
    form = call_constraint(tools, format, None)
    assert form is not None
    names = set()
    for seed in range(20):
        text = random_text(form, seed)
        rules = ToolRules(format, tools.names, None, tools.parameters)
        parser = OutputParser(OutputRules(None, rules))
        answer = parse(parser, [text])
        assert answer.content == "", text
        assert parser._tools is not None
        assert parser._tools.num_complete_calls == len(answer.calls) >= 1
        for call in answer.calls:
            Draft202012Validator({"type": "object", **SPECS[call.name]}).validate(
                json.loads(call.arguments)
            )
            names.add(call.name)
    assert names == set(SPECS)


def test_strict_calls_are_held_to_their_schema_where_a_mark_begins_them() -> None:
    strict = tool_use(ToolMode.AUTO, is_strict=True)
    triggers = {}
    for format in (QWEN3_CODER, OPENAI):
        form = call_constraint(strict, format, None)
        assert form is not None
        assert form.structural_tags is not None
        triggers[format.name] = form.structural_tags.trigger
    assert triggers["qwen3_coder"] == "<tool_call>\n<function="
    assert call_constraint(strict, PYTHONIC, None) is None


FAMILIES = {
    "qwen3_coder": "Let me see.\n" + xml("add", a="1", b="2") + "\n" + xml("greet", who="Bob"),
    "pythonic": "[add(a=1, b=2), greet(who='Bob')]",
    "openai": "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary "
    'to=functions.add<|message|>{"a": 1, "b": 2}<|call|>',
}


@pytest.mark.parametrize("family", FAMILIES)
async def test_server_sees_the_format_from_the_template(family: str) -> None:
    async with in_process(tool_setup(family, FAMILIES[family])) as served:
        answer = await both(served, tools=TOOLS)
        forced = await both(served, tools=TOOLS, tool_choice="required")
    calls = [(call["name"], json.loads(call["arguments"])) for call in answer["tool_calls"]]
    expected = [("add", {"a": 1, "b": 2}), ("greet", {"who": "Bob"})]
    assert calls == expected[: len(calls)]
    assert len(calls) == (1 if family == "openai" else 2)
    assert answer["finish_reason"] == forced["finish_reason"] == "tool_calls"
    assert answer["reasoning_content"] == ("Hm." if family == "openai" else "")
    assert answer["content"] == ("Let me see." if family == "qwen3_coder" else "")


async def test_channels_are_taken_off_answers_without_tools() -> None:
    text = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Hi"
    async with in_process(tool_setup("openai", text)) as served:
        answer = await both(served)
    assert (answer["content"], answer["reasoning_content"]) == ("Hi", "Hm.")


@pytest.mark.parametrize("name", ["qwen3_coder", "pythonic", "openai"])
async def test_template_without_tools_shows_calls_in_the_chosen_format(name: str) -> None:
    arguments = '{"who": "Bob", "loud": true}'
    call = {"id": "x", "type": "function", "function": {"name": "greet", "arguments": arguments}}
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "x", "content": "done"},
    ]
    config = ServerConfig(tool_call_parser=name)
    async with in_process(tool_setup("json", "ok", config=config)) as served:
        await served.chat(messages=messages, tools=TOOLS)
        text = sent_text(served)
    written = {
        "qwen3_coder": "<parameter=who>\nBob\n</parameter>\n<parameter=loud>\ntrue\n",
        "pythonic": "[greet(who='Bob', loud=True)]",
        "openai": f"to=functions.greet <|constrain|>json<|message|>{arguments}<|call|>",
    }
    assert written[name] in text
