"""Tools and reasoning in the other API families: what their official clients make of them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from anthropic import AsyncAnthropic
from ollama import AsyncClient

from tests.server.harness import ANSWER, Served, in_process, on_loopback
from tests.server.tool_models import ADD, GREET, TOOLS, tool_setup, written

THOUGHT = "hm, two calls"
TEXT = "Let me see."
ANSWERS = f"{THOUGHT}\n</think>\n\n{TEXT}\n" + written("thinking", ("add", ADD), ("greet", GREET))
CUT = "hm</think>" + written("thinking", ("greet", GREET))[:-30]
FLAT: list[Any] = [{"type": "function", **tool["function"]} for tool in TOOLS]
CLAUDE: list[Any] = [
    {
        "name": tool["function"]["name"],
        "description": tool["function"]["description"],
        "input_schema": tool["function"]["parameters"],
    }
    for tool in TOOLS
]


def sent_text(served: Served) -> str:
    ids = served.engine.accepted[-1].prompt_token_ids
    return served.tokenizer.decode(ids, skip_special=False)


@asynccontextmanager
async def thinking(answer: str = ANSWERS) -> AsyncIterator[Served]:
    async with on_loopback(tool_setup("thinking", answer)) as served:
        yield served
        await served.check_idle()


# /v1/responses


async def test_responses_have_items_for_all_parts() -> None:
    async with thinking() as served:
        create = served.openai.responses.create
        response = await create(model="tiny", input="hi", tools=FLAT)
        assert [item.type for item in response.output] == [
            "reasoning", "message", "function_call", "function_call",
        ]  # fmt: skip
        reasoning, message, first, second = (item.model_dump() for item in response.output)
        assert reasoning["content"] == [{"type": "reasoning_text", "text": THOUGHT}]
        assert (response.output_text, message["status"]) == (TEXT, "completed")
        assert (first["name"], first["arguments"]) == ("add", ADD)
        assert (second["name"], second["arguments"]) == ("greet", GREET)
        assert first["call_id"] != second["call_id"]
        assert len({item["id"] for item in (reasoning, message, first, second)}) == 4
        assert response.usage is not None
        assert response.usage.output_tokens_details.reasoning_tokens > 5
        assert [tool.type for tool in response.tools] == ["function"] * 2

        finished = None
        deltas: dict[str, str] = {}
        kinds = []
        async with served.openai.responses.stream(model="tiny", input="hi", tools=FLAT) as stream:
            async for event in stream:
                kinds.append(event.type)
                data: Any = event
                if event.type.endswith(".delta"):
                    deltas[data.item_id] = deltas.get(data.item_id, "") + data.delta
                if event.type == "response.completed":
                    finished = data.response
    assert finished is not None
    items = [item.model_dump() for item in finished.output]
    wholes = [THOUGHT, TEXT, ADD, GREET]
    assert [deltas[item["id"]] for item in items] == wholes
    assert [kind for kind in kinds if kind.startswith("response.output_item")] == [
        "response.output_item.added", "response.output_item.done",
    ] * 4  # fmt: skip
    assert kinds.count("response.function_call_arguments.done") == 2
    assert kinds.count("response.reasoning_text.done") == 1
    for item in items[2:]:
        item.pop("parsed_arguments", None)
    names = ["type", "status", "name", "arguments", "content"]
    plain = [{k: v for k, v in i.model_dump().items() if k in names} for i in response.output]
    for item, whole in zip(items, plain, strict=True):
        for key, value in whole.items():
            if key != "content":
                assert item[key] == value


async def test_responses_end_incomplete_where_a_call_is_cut() -> None:
    async with thinking(CUT) as served:
        num_tokens = len(served.tokenizer.encode(CUT))
        for is_stream in (False, True):
            body = {"input": "hi", "tools": FLAT, "max_output_tokens": num_tokens}
            response = await served.http.post("/v1/responses", json={**body, "stream": is_stream})
            text = response.text.rsplit("data: ", 1)[-1]
            answer = json.loads(text)["response"] if is_stream else response.json()
            assert answer["status"] == "incomplete"
            assert [i["status"] for i in answer["output"]] == ["completed", "incomplete"]
            assert GREET.startswith(answer["output"][-1]["arguments"])


async def test_responses_items_come_back_as_input() -> None:
    async with thinking(ANSWER) as served:
        items: Any = [
            {"role": "user", "content": "hi"},
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": [
                {"type": "reasoning_text", "text": THOUGHT}]},
            {"type": "message", "role": "assistant", "content": [
                {"type": "output_text", "text": TEXT}]},
            {"type": "function_call", "call_id": "c1", "name": "add", "arguments": ADD},
            {"type": "function_call_output", "call_id": "c1", "output": "3"},
        ]  # fmt: skip
        await served.openai.responses.create(model="tiny", input=items, tools=FLAT)
        text = sent_text(served)
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
    assert f"assistant\n<think>{THOUGHT}</think>{TEXT}{call}<|im_end|>" in text
    assert "<|im_start|>tool\n3<|im_end|>" in text


async def test_responses_enforce_a_named_function() -> None:
    async with thinking("hm</think>" + written("thinking", ("greet", GREET))) as served:
        response = await served.openai.responses.create(
            model="tiny",
            input="hi",
            tools=FLAT,
            tool_choice={"type": "function", "name": "greet"},
            parallel_tool_calls=False,
        )
        outputs = served.engine.accepted[-1].sampling.structured_outputs
        assert outputs is not None and outputs.structural_tags is not None
        assert [tag.begin[22:27] for tag in outputs.structural_tags.tags] == ["greet"]
    assert response.tool_choice.model_dump() == {"type": "function", "name": "greet"}  # type: ignore[union-attr]


# /v1/messages


@asynccontextmanager
async def anthropic_client(served: Served) -> AsyncIterator[AsyncAnthropic]:
    url = f"http://127.0.0.1:{served.port}"
    async with AsyncAnthropic(api_key="unused", base_url=url, max_retries=0) as client:
        yield client


async def test_messages_have_blocks_for_all_parts() -> None:
    async with thinking() as served, anthropic_client(served) as client:
        fields: dict[str, Any] = {
            "model": "tiny",
            "max_tokens": 2000,
            "messages": [{"role": "user", "content": "hi"}],
            "tools": CLAUDE,
        }
        message = await client.messages.create(**fields)
        async with client.messages.stream(**fields) as stream:
            async for _ in stream:
                pass
            streamed = await stream.get_final_message()
    for answer in (message, streamed):
        assert answer.stop_reason == "tool_use"
        blocks: list[Any] = list(answer.content)
        assert [block.type for block in blocks] == ["thinking", "text", "tool_use", "tool_use"]
        assert (blocks[0].thinking, blocks[1].text) == (THOUGHT, TEXT)
        assert [block.name for block in blocks[2:]] == ["add", "greet"]
        assert [block.input for block in blocks[2:]] == [json.loads(ADD), json.loads(GREET)]
        assert blocks[2].id != blocks[3].id


async def test_messages_take_calls_and_results_back() -> None:
    async with thinking(ANSWER) as served, anthropic_client(served) as client:
        messages: Any = [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": THOUGHT, "signature": ""},
                {"type": "text", "text": TEXT},
                {"type": "tool_use", "id": "t1", "name": "add", "input": {"a": 1, "b": 2}},
            ]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": [
                    {"type": "text", "text": "3"}]},
                {"type": "text", "text": "go on"},
            ]},
        ]  # fmt: skip
        fields: dict[str, Any] = {"model": "tiny", "messages": messages, "tools": CLAUDE}
        await client.messages.create(max_tokens=20, **fields)
        text = sent_text(served)
        counted = await client.messages.count_tokens(**fields)
        assert counted.input_tokens == len(served.engine.accepted[-1].prompt_token_ids)
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
    assert f"assistant\n<think>{THOUGHT}</think>{TEXT}{call}<|im_end|>" in text
    assert "tool\n3<|im_end|>\n<|im_start|>user\ngo on<|im_end|>" in text


@pytest.mark.parametrize(
    ("choice", "names", "most"),
    [
        ({"type": "any"}, ["add", "greet"], 16),
        ({"type": "any", "disable_parallel_tool_use": True}, ["add", "greet"], 1),
        ({"type": "tool", "name": "greet"}, ["greet"], 1),
    ],
)
async def test_messages_enforce_the_choice(
    choice: dict[str, Any], names: list[str], most: int
) -> None:
    async with in_process(tool_setup("hermes", written("hermes", ("greet", GREET)))) as served:
        body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 200}
        fields = {"tools": CLAUDE, "tool_choice": choice}
        response = await served.http.post("/v1/messages", json={**body, **fields})
        assert response.json()["stop_reason"] == "tool_use", response.text
        outputs = served.engine.accepted[-1].sampling.structured_outputs
        assert outputs is not None and outputs.structural_tags is not None
        assert [tag.begin[22:-16] for tag in outputs.structural_tags.tags] == names
        assert outputs.structural_tags.max_passages == most


async def test_messages_show_a_cut_call_as_text() -> None:
    """An empty input would be executed; half a call must not be."""
    async with thinking(CUT) as served:
        num_tokens = len(served.tokenizer.encode(CUT))
        body = {
            "messages": [{"role": "user", "content": "hi"}],
            "max_tokens": num_tokens,
            "tools": CLAUDE,
        }
        answer = (await served.http.post("/v1/messages", json=body)).json()
    assert answer["stop_reason"] == "max_tokens"
    assert [block["type"] for block in answer["content"]] == ["thinking", "text"]
    assert answer["content"][1]["text"].startswith('greet({"who"')


async def test_thinking_can_be_switched() -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 50}
    async with in_process(tool_setup("thinking", ANSWER)) as served:
        for kind, end in (
            ("enabled", "assistant\n<think>\n"),
            ("adaptive", "assistant\n<think>\n"),
            ("disabled", "<think>\n\n</think>\n\n"),
        ):
            fields = {"thinking": {"type": kind, "budget_tokens": 1024}}
            answer = (await served.http.post("/v1/messages", json={**body, **fields})).json()
            assert sent_text(served).endswith(end)
            kind = "text" if "</think>" in end else "thinking"
            assert [block["type"] for block in answer["content"]] == [kind]


# Ollama


def ollama_client(served: Served) -> AsyncClient:
    return AsyncClient(host=f"http://127.0.0.1:{served.port}")


async def test_ollama_answers_with_whole_calls_and_thinking() -> None:
    messages = [{"role": "user", "content": "hi"}]
    async with thinking() as served, ollama_client(served) as client:
        answer = (await client.chat("tiny", messages, tools=TOOLS)).message
        parts = [
            part.message
            async for part in await client.chat("tiny", messages, tools=TOOLS, stream=True)
        ]
        generated = await client.generate("tiny", "hi", think=True)
        shown = await client.show("tiny")
    assert (answer.content, answer.thinking) == (TEXT, THOUGHT)
    calls = answer.tool_calls or []
    expected = [("add", json.loads(ADD)), ("greet", json.loads(GREET))]
    assert [(c.function.name, dict(c.function.arguments)) for c in calls] == expected
    assert "".join(part.content or "" for part in parts) == TEXT
    assert "".join(part.thinking or "" for part in parts) == THOUGHT
    calls = [call for part in parts for call in part.tool_calls or []]
    assert [(c.function.name, dict(c.function.arguments)) for c in calls] == expected
    assert generated.thinking == THOUGHT
    assert (generated.response or "").startswith(TEXT)
    assert shown.capabilities == ["completion", "tools", "thinking"]


async def test_ollama_takes_calls_and_results_back() -> None:
    call = {"function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "thinking": THOUGHT, "content": TEXT, "tool_calls": [call]},
        {"role": "tool", "tool_name": "add", "content": "3"},
    ]
    async with thinking(ANSWER) as served, ollama_client(served) as client:
        await client.chat("tiny", messages, tools=TOOLS, think=False)
        text = sent_text(served)
    written_call = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
    assert f"<think>{THOUGHT}</think>{TEXT}{written_call}<|im_end|>" in text
    assert "<|im_start|>tool\n3<|im_end|>" in text
    assert text.endswith("<think>\n\n</think>\n\n")


async def test_ollama_shows_a_cut_call_as_text() -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "tools": TOOLS}
    async with thinking(CUT) as served:
        options = {"num_predict": len(served.tokenizer.encode(CUT))}
        for is_stream in (False, True):
            fields = {"options": options, "stream": is_stream}
            response = await served.http.post("/api/chat", json={**body, **fields})
            lines = [json.loads(line)["message"] for line in response.text.splitlines()]
            content = "".join(line["content"] for line in lines)
            assert content.startswith('greet({"who"')
            assert not any("tool_calls" in line for line in lines)
