"""Enforced calls by whole servers: the demo model, and a random one whose marks are special."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from anthropic import AsyncAnthropic
from ollama import AsyncClient
from openai import LengthFinishReasonError
from openai.lib.streaming.chat import ChatCompletionStreamState

from tests.server.test_real_engine import RealServer, serving
from tests.server.tool_models import TOOLS, function, tool_metadata
from tests.tiny_models import make_tiny_model

pytestmark = pytest.mark.asyncio(loop_scope="module")

ASK: list[Any] = [{"role": "user", "content": "add 1+2 and greet Bob and greet Ann"}]
UNRELATED: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
REQUIRED: dict[str, Any] = {"model": "tiny", "tools": TOOLS, "tool_choice": "required"}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(demo_model: Path) -> AsyncIterator[RealServer]:
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(2))
    async with serving(demo_model, "--max-model-len", "2048") as server:
        yield server
        await server.check_idle()


async def merged(server: RealServer, **fields: Any) -> Any:
    """The choice that a stream adds up to, by the official client."""
    state = ChatCompletionStreamState()
    async for chunk in await server.openai.chat.completions.create(stream=True, **fields):
        state.handle_chunk(chunk)
    try:
        return state.get_final_completion().choices[0]
    except LengthFinishReasonError as error:
        return error.completion.choices[0]


def calls_of(choice: Any) -> list[tuple[str, str]]:
    return [(c.function.name, c.function.arguments) for c in choice.message.tool_calls or ()]


async def both(server: RealServer, **fields: Any) -> Any:
    """The choice, the same whether it is streamed or not."""
    answer = await server.openai.chat.completions.create(**fields)
    streamed = await merged(server, **fields)
    (choice,) = answer.choices
    assert calls_of(choice) == calls_of(streamed)
    assert (choice.message.content or "") == (streamed.message.content or "")
    assert choice.finish_reason == streamed.finish_reason
    return choice


def check(calls: list[tuple[str, str]]) -> None:
    for name, arguments in calls:
        value = json.loads(arguments)
        if name == "add":
            assert value.keys() == {"a", "b"}
            assert all(type(number) is int for number in value.values())
        else:
            assert (name, value.keys()) == ("greet", {"who"})


async def test_required_always_calls(server: RealServer) -> None:
    choice = await both(server, **REQUIRED, messages=ASK, temperature=0)
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    calls = calls_of(choice)
    assert calls
    check(calls)


async def test_named_function_is_called_whatever_is_asked(server: RealServer) -> None:
    """B69"""
    named = {"type": "function", "function": {"name": "echo_probe"}}
    tools: Any = [*TOOLS, function("echo_probe", loud="boolean", times="integer")]

    async def ask(seed: int) -> None:
        answer: Any = await server.openai.chat.completions.create(
            model="tiny", messages=UNRELATED, tools=tools, tool_choice=named, seed=seed,  # type: ignore[call-overload]
        )  # fmt: skip
        (choice,) = answer.choices
        ((name, arguments),) = calls_of(choice)
        assert (name, choice.finish_reason) == ("echo_probe", "tool_calls")
        assert json.loads(arguments).keys() == {"loud", "times"}

    await asyncio.gather(*(ask(seed) for seed in range(1, 21)))


async def test_exactly_one_call_where_calls_may_not_be_parallel(server: RealServer) -> None:
    """B71"""
    fields = {**REQUIRED, "messages": ASK, "parallel_tool_calls": False, "temperature": 0}
    choice = await both(server, **fields)
    assert len(calls_of(choice)) == 1
    check(calls_of(choice))


async def test_cut_calls_end_with_length(server: RealServer) -> None:
    """B43"""
    tools = [function("write", title="string", body="string")]
    for max_tokens in (1, 10, 16, 24):
        choice = await both(
            server,
            model="tiny",
            messages=[{"role": "user", "content": "Write a long poem about rivers."}],
            tools=tools,
            tool_choice="required",
            max_tokens=max_tokens,
            temperature=0,
        )
        assert choice.finish_reason in ("length", "tool_calls")
        if choice.finish_reason == "tool_calls":
            assert all(json.loads(arguments) for _, arguments in calls_of(choice))


async def test_function_without_parameters(server: RealServer) -> None:
    """B73"""
    tools = [{"type": "function", "function": {"name": "now"}}]
    fields = {**REQUIRED, "tools": tools, "parallel_tool_calls": False}
    choice = await both(server, **fields, messages=UNRELATED, temperature=0)
    assert [(name, json.loads(arguments)) for name, arguments in calls_of(choice)] == [("now", {})]


async def test_bounds_of_an_array_are_enforced(server: RealServer) -> None:
    """B59"""
    pick = function("pick")
    pick["function"]["parameters"] = {
        "type": "object",
        "properties": {
            "colours": {
                "type": "array",
                "items": {"enum": ["red", "green", "blue"]},
                "minItems": 1,
                "maxItems": 3,
            }
        },
        "required": ["colours"],
    }

    async def ask(seed: int) -> int:
        fields: dict[str, Any] = {**REQUIRED, "tools": [pick], "parallel_tool_calls": False}
        answer = await server.openai.chat.completions.create(
            messages=UNRELATED, seed=seed, temperature=1.5, **fields
        )
        ((_, arguments),) = calls_of(answer.choices[0])
        colours = json.loads(arguments)["colours"]
        assert set(colours) <= {"red", "green", "blue"}
        return len(colours)

    lengths = await asyncio.gather(*map(ask, range(8)))
    assert set(lengths) <= {1, 2, 3}


async def test_strings_with_optional_numbers_always_parse(server: RealServer) -> None:
    """B79"""
    save = function("save", text="string")
    properties = save["function"]["parameters"]["properties"]
    properties |= {"line": {"type": "integer"}, "column": {"type": "integer"}}
    ask = [{"role": "user", "content": 'Save the text: "a {b}\nc" }'}]

    async def once(seed: int) -> None:
        fields: dict[str, Any] = {**REQUIRED, "tools": [save], "parallel_tool_calls": False}
        answer = await server.openai.chat.completions.create(
            messages=ask, seed=seed, max_tokens=100, **fields
        )
        (choice,) = answer.choices
        if choice.finish_reason == "tool_calls":
            ((_, arguments),) = calls_of(choice)
            assert "text" in json.loads(arguments)
        else:
            assert choice.finish_reason == "length"

    await asyncio.gather(*map(once, range(8)))


async def test_auto_leaves_a_plain_answer_alone(server: RealServer) -> None:
    fields: dict[str, Any] = {"model": "tiny", "messages": UNRELATED, "tools": TOOLS}
    choice = await both(server, **fields, temperature=0, max_tokens=24)
    assert choice.message.content
    assert not choice.message.tool_calls


async def test_other_families_enforce_too(server: RealServer) -> None:
    url = f"http://127.0.0.1:{server.port}"
    greet = function("greet", who="string")["function"]
    greet["parameters"]["properties"]["who"]["maxLength"] = 20
    response = await server.openai.responses.create(
        model="tiny",
        input="greet Bob",
        tools=[{"type": "function", **greet}],
        tool_choice="required",
        parallel_tool_calls=False,
    )
    check([(i.name, i.arguments) for i in response.output if i.type == "function_call"])
    assert {item.type for item in response.output} == {"function_call"}
    named: Any = {"type": "tool", "name": "greet"}
    claude: Any = [{"name": "greet", "input_schema": greet["parameters"]}]
    async with AsyncAnthropic(api_key="unused", base_url=url, max_retries=0) as client:
        message = await client.messages.create(
            model="tiny",
            max_tokens=200,
            messages=[{"role": "user", "content": "greet Bob"}],
            tools=claude,
            tool_choice=named,
        )
    assert message.stop_reason == "tool_use"
    assert [block.type for block in message.content] == ["tool_use"]
    async with AsyncClient(host=url) as ollama:
        answer = await ollama.chat("tiny", ASK, tools=TOOLS, options={"num_predict": 8})
    assert answer.message.content or answer.message.tool_calls


@pytest.mark.parametrize("family", ["mistral", "hermes", "thinking"])
async def test_random_model_is_held_to_the_format_of_its_template(
    tmp_path: Path, family: str
) -> None:
    """Marks that are control tokens are sampled as such; reasoning comes before the call."""
    metadata = tool_metadata(family)
    model = make_tiny_model(tmp_path / "tool.gguf", metadata=metadata, context_length=2048)
    tools = [function("flag", on="boolean")]
    async with serving(model) as server:
        for seed in range(2):
            choice = await both(
                server,
                **{**REQUIRED, "tools": tools},
                messages=UNRELATED,
                parallel_tool_calls=False,
                seed=seed,
                max_tokens=200,
            )
            if family == "thinking" and choice.finish_reason == "length":
                assert not choice.message.content
                continue
            assert choice.finish_reason == "tool_calls"
            ((name, arguments),) = calls_of(choice)
            assert name == "flag"
            assert type(json.loads(arguments)["on"]) is bool
            assert choice.message.content is None
        await server.check_idle()
