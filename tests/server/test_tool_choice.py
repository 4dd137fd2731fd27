"""What tools a model may or must call: enforcement of choices, and refusals of bad requests."""

from __future__ import annotations

import json
from typing import Any

from caudal.sampling_params import StructuralTag, StructuralTags
from tests.server.harness import ANSWER, Served, in_process
from tests.server.test_tools import CALLS, PATH, USER, both, sent_text
from tests.server.tool_models import ADD, TOOLS, function, tool_setup, written


def tags_of(served: Served) -> StructuralTags:
    outputs = served.engine.accepted[-1].sampling.structured_outputs
    assert outputs is not None
    assert outputs.structural_tags is not None
    return outputs.structural_tags


async def test_named_function_is_enforced() -> None:
    """B69"""
    choice = {"type": "function", "function": {"name": "greet"}}
    async with in_process(tool_setup("hermes", written("hermes", *CALLS))) as served:
        answer = await both(served, tools=TOOLS, tool_choice=choice)
        tags = tags_of(served)
    schema = {**TOOLS[1]["function"]["parameters"], "additionalProperties": False}
    begin = '<tool_call>\n{"name": "greet", "arguments": '
    tag = StructuralTag(begin=begin, schema=schema, end="}\n</tool_call>")
    assert tags == StructuralTags(tags=(tag,), min_passages=1, max_passages=1, separator="\n")
    assert [call["name"] for call in answer["tool_calls"]] == ["greet"]


async def test_required_enforces_one_of_the_functions() -> None:
    async with in_process(tool_setup("json", written("json", *CALLS))) as served:
        await both(served, tools=TOOLS, tool_choice="required")
        tags = tags_of(served)
        assert [tag.begin for tag in tags.tags] == [
            '{"name": "add", "arguments": ',
            '{"name": "greet", "arguments": ',
        ]
        assert (tags.trigger, tags.min_passages, tags.max_passages) == (None, 1, 16)
        await both(served, tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
        assert tags_of(served).max_passages == 1


async def test_auto_is_free_unless_a_tool_is_strict() -> None:
    strict = {**TOOLS[1], "function": {**TOOLS[1]["function"], "strict": True}}
    async with in_process(tool_setup("hermes", ANSWER)) as served:
        await served.chat(tools=TOOLS)
        assert served.engine.accepted[-1].sampling.structured_outputs is None
        await served.chat(tools=[TOOLS[0], strict])
        tags = tags_of(served)
    assert (tags.trigger, tags.min_passages) == ('<tool_call>\n{"name": "', 0)
    assert [tag.schema for tag in tags.tags] == [
        {"type": "object"},
        {**TOOLS[1]["function"]["parameters"], "additionalProperties": False},
    ]


async def test_allowed_tools_restrict_without_changing_the_prompt() -> None:
    def allowed(mode: str) -> dict[str, Any]:
        tools = [{"type": "function", "function": {"name": "add"}}]
        return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}

    text = written("hermes", *CALLS)
    async with in_process(tool_setup("hermes", text)) as served:
        await served.chat(tools=TOOLS)
        prompt = sent_text(served)
        answer = await both(served, tools=TOOLS, tool_choice=allowed("auto"))
        assert sent_text(served) == prompt
        assert [call["name"] for call in answer["tool_calls"]] == ["add"]
        assert "greet" in answer["content"]
        await both(served, tools=TOOLS, tool_choice=allowed("required"))
        assert [tag.begin[22:25] for tag in tags_of(served).tags] == ["add"]


async def test_enforced_call_follows_the_reasoning() -> None:
    text = "hm</think>\n\n" + written("thinking", CALLS[0])
    async with in_process(tool_setup("thinking", text)) as served:
        answer = await both(served, tools=TOOLS, tool_choice="required")
        tags = tags_of(served)
    assert (answer["reasoning_content"], answer["content"]) == ("hm", "")
    assert answer["tool_calls"] == [{"name": "add", "arguments": ADD}]
    outputs = served.engine.accepted[-1].sampling.structured_outputs
    assert outputs is not None and outputs.after == "</think>"
    assert (tags.trigger, tags.min_passages) == (None, 1)


async def test_call_or_form_where_both_are_asked_for() -> None:
    """An answer in the form of a schema must not keep the model from calling first."""
    schema = {"type": "object", "properties": {"sum": {"type": "integer"}}}
    form = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
    async with in_process(tool_setup("hermes", written("hermes", *CALLS))) as served:
        answer = await both(served, tools=TOOLS, response_format=form)
        assert len(answer["tool_calls"]) == 2
        tags = tags_of(served)
        assert [tag.begin[:11] for tag in tags.tags] == ["<tool_call>", "<tool_call>", ""]
        assert json.loads(str(tags.tags[2].schema)) == schema
        assert (tags.trigger, tags.min_passages, tags.max_passages) == (None, 1, 1)
        await served.chat(tools=TOOLS, tool_choice="none", response_format=form)
        outputs = served.engine.accepted[-1].sampling.structured_outputs
    assert outputs is not None and json.loads(str(outputs.json)) == schema


async def test_what_cannot_be_enforced_is_dropped_unless_the_tool_is_strict() -> None:
    odd = function("add", a="integer")
    odd["function"]["parameters"]["properties"]["a"]["not"] = {"const": 3}
    odd["function"]["parameters"]["propertyNames"] = {"pattern": "a"}
    async with in_process(tool_setup("hermes", ANSWER)) as served:
        await served.chat(tools=[TOOLS[1], odd], tool_choice="required")
        plain = function("add", a="integer")["function"]["parameters"]
        assert tags_of(served).tags[1].schema == {**plain, "additionalProperties": False}
        odd["function"]["strict"] = True
        body = {"messages": USER, "tools": [TOOLS[1], odd], "tool_choice": "required"}
        response = await served.http.post(PATH, json=body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == "tools[1].function.parameters"
    assert "/propertyNames" in error["message"] or "/properties/a/not" in error["message"]


# Refusals


def deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"x": schema}}
    return schema


def one(**fields: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": {"name": "f", **fields}}]}


def choose(**fields: Any) -> dict[str, Any]:
    return {"tools": TOOLS, "tool_choice": fields}


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"tools": {}}, "tools", "array"),
    ({"tools": [5]}, "tools", "object"),
    ({"tools": [{}]}, "tools[0].type", "required"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type", "only functions"),
    ({"tools": [{"type": "function"}]}, "tools[0].function", "required"),
    ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name", "required"),
    ({"tools": TOOLS * 65}, "tools", "length <= 128"),
    ({"tools": [*TOOLS, TOOLS[0]]}, "tools[2].function.name", "twice"),
    (one(name=""), "tools[0].function.name", "1 to 128"),
    (one(name="a b"), "tools[0].function.name", "1 to 128"),
    (one(name="a\n"), "tools[0].function.name", "1 to 128"),
    (one(name="x" * 129), "tools[0].function.name", "1 to 128"),
    (one(name=5), "tools[0].function.name", "str"),
    (one(description=5), "tools[0].function.description", "str"),
    (one(strict="yes"), "tools[0].function.strict", "bool"),
    (one(parameters=[]), "tools[0].function.parameters", "object"),
    (one(parameters={"type": "array"}), "tools[0].function.parameters.type", "object"),
    (one(parameters={"properties": []}), "tools[0].function.parameters.properties", "object"),
    (one(parameters=deep(40)), "tools[0].function.parameters", "64 levels"),
    (one(parameters={"enum": [1] * 10_001}), "tools[0].function.parameters", "10000"),
    ({"tool_choice": "required"}, "tool_choice", "only allowed with tools"),
    ({"tools": [], "tool_choice": {"type": "function"}}, "tool_choice", "only allowed"),
    ({"tools": TOOLS, "tool_choice": "maybe"}, "tool_choice", "none, auto, required"),
    ({"tools": TOOLS, "tool_choice": 5}, "tool_choice", "str"),
    (choose(type="custom"), "tool_choice.type", "allowed_tools"),
    (choose(type="function"), "tool_choice.function", "required"),
    (choose(type="function", function={}), "tool_choice.function.name", "required"),
    (
        choose(type="function", function={"name": "nope"}),
        "tool_choice.function.name",
        "'nope' is not among the tools",
    ),
    (choose(type="allowed_tools"), "tool_choice.allowed_tools", "required"),
    (
        choose(type="allowed_tools", allowed_tools={"mode": "x", "tools": [{}]}),
        "tool_choice.allowed_tools.mode",
        "auto or required",
    ),
    (
        choose(type="allowed_tools", allowed_tools={"mode": "auto", "tools": [{}]}),
        "tool_choice.allowed_tools.tools",
        "name a function",
    ),
    ({"tools": TOOLS, "parallel_tool_calls": "no"}, "parallel_tool_calls", "bool"),
    ({"reasoning_effort": "huge"}, "reasoning_effort", "minimal"),
    ({"messages": [{"role": "user", "content": "x", "tool_calls": [
        {"function": {"name": "f"}}]}]}, "messages[0].tool_calls", "assistant"),
    ({"messages": [{"role": "user", "content": "x", "tool_call_id": "1"}]},
     "messages[0].tool_call_id", "tool"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"type": "x", "function": {
        "name": "f"}}]}]}, "messages[0].tool_calls[0].type", "function"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"function": {
        "name": "f", "arguments": 5}}]}]}, "messages[0].tool_calls[0].function.arguments", "str"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"function": {
        "name": "f", "arguments": '{"x":' * 70 + "1" + "}" * 70}}]}]},
     "messages[0].tool_calls[0].function.arguments", "64 levels"),
    ({"messages": [{"role": "assistant", "content": None}]}, "messages[0].content", "text"),
    ({"messages": [{"role": "tool", "tool_call_id": "1"}]}, "messages[0].content", "text"),
]  # fmt: skip


async def test_bad_tools_are_refused_by_name() -> None:
    async with in_process(tool_setup("hermes", ANSWER)) as served:
        for fields, param, problem in REFUSED:
            for is_stream in (False, True):
                body = {"messages": USER, "stream": is_stream, **fields}
                response = await served.http.post(PATH, json=body)
                case = f"{str(fields)[:90]}: {response.text}"
                assert response.status_code == 400, case
                error = response.json()["error"]
                assert (error["param"] or "").startswith(param), case
                assert problem in error["message"], case
        await served.check_idle()


async def test_lone_surrogate_in_arguments_is_refused() -> None:
    """B03"""
    body = {"messages": [{"role": "assistant", "tool_calls": [
        {"function": {"name": "f", "arguments": '{"a": "\\ud83d"}'}}]}]}  # fmt: skip
    async with in_process(tool_setup("hermes", ANSWER)) as served:
        for is_stream in (False, True):
            response = await served.http.post(PATH, json={**body, "stream": is_stream})
            assert response.status_code == 400, response.text
            assert response.json()["error"]["param"] == "messages"


async def test_prompt_of_tools_counts_against_the_context() -> None:
    tools = [function(f"f{n}", **{f"p{k}": "string" for k in range(30)}) for n in range(100)]
    async with in_process(tool_setup("hermes", ANSWER)) as served:
        response = await served.http.post(PATH, json={"messages": USER, "tools": tools})
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "context_length_exceeded"


async def test_tokenize_and_render_count_the_tools() -> None:
    body = {"messages": USER, "tools": TOOLS}
    async with in_process(tool_setup("hermes", ANSWER)) as served:
        rendered = (await served.http.post("/render", json=body)).json()["prompts"][0]
        tokenized = (await served.http.post("/tokenize", json=body)).json()
        await served.chat(tools=TOOLS)
        assert sent_text(served) == rendered["text"]
    assert tokenized["tokens"] == rendered["token_ids"]
