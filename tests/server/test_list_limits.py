"""Lists in requests are bounded by themselves, not only by the size of the body."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from caudal.server.message_input import chat_request
from caudal.server.protocol.common import MAX_ALL_PARTS, MAX_PARTS, MAX_TOKEN_IDS
from caudal.server.protocol.messages import BlockParam, CountTokensRequest, MessageParam
from tests.server.harness import Served, in_process

PART = {"type": "text", "text": "x"}
INPUT_PART = {"type": "input_text", "text": "x"}


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    async with in_process() as served:
        yield served


def chat(content: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 1}


def turns(content: Any, **fields: Any) -> dict[str, Any]:
    return {**chat(content), **fields}


def result(content: Any) -> dict[str, Any]:
    return turns([{"type": "tool_result", "tool_use_id": "a", "content": content}])


CASES = [
    ("/v1/chat/completions", chat([PART] * (MAX_PARTS + 1)), "messages[0].content", MAX_PARTS),
    ("/tokenize", chat([PART] * (MAX_PARTS + 1)), "messages[0].content", MAX_PARTS),
    ("/v1/messages", turns([PART] * (MAX_PARTS + 1)), "messages[0].content", MAX_PARTS),
    ("/v1/messages", turns("x", system=[PART] * (MAX_PARTS + 1)), "system", MAX_PARTS),
    ("/v1/messages", result([PART] * (MAX_PARTS + 1)), "messages[0].content[0].content", MAX_PARTS),
    (
        "/v1/responses",
        {"input": [{"role": "user", "content": [INPUT_PART] * (MAX_PARTS + 1)}]},
        "input[0].content",
        MAX_PARTS,
    ),
    (
        "/v1/responses",
        {"input": [{"type": "reasoning", "summary": [{"text": "x"}] * (MAX_PARTS + 1)}]},
        "input[0].summary",
        MAX_PARTS,
    ),
    (
        "/v1/responses",
        {
            "input": [
                {
                    "type": "function_call_output",
                    "call_id": "a",
                    "output": [INPUT_PART] * (MAX_PARTS + 1),
                }
            ]
        },
        "input[0].output",
        MAX_PARTS,
    ),
    ("/v1/completions", {"prompt": [5] * (MAX_TOKEN_IDS + 1)}, "prompt", MAX_TOKEN_IDS),
    ("/v1/completions", {"prompt": [[5] * (MAX_TOKEN_IDS + 1)]}, "prompt", MAX_TOKEN_IDS),
    ("/v1/embeddings", {"input": [5] * (MAX_TOKEN_IDS + 1)}, "input", MAX_TOKEN_IDS),
    ("/detokenize", {"tokens": [5] * (MAX_TOKEN_IDS + 1)}, "tokens", MAX_TOKEN_IDS),
]


@pytest.mark.parametrize(("path", "body", "param", "limit"), CASES)
async def test_list_beyond_its_limit_is_named_with_it(
    served: Served, path: str, body: dict[str, Any], param: str, limit: int
) -> None:
    response = await served.http.post(path, json=body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert param in error["message"] and str(limit) in error["message"]
    assert error.get("param", param) == param


async def test_list_at_its_limit_is_refused_for_nothing_but_its_tokens(served: Served) -> None:
    response = await served.http.post("/v1/messages", json=chat([PART] * MAX_PARTS))
    assert response.json()["error"]["message"].startswith("prompt is too long")


@pytest.mark.parametrize(
    ("path", "field", "part"),
    [
        ("/v1/chat/completions", "messages", PART),
        ("/v1/messages", "messages", PART),
        ("/v1/responses", "input", INPUT_PART),
    ],
)
async def test_parts_of_all_messages_together_are_bounded(
    served: Served, path: str, field: str, part: dict[str, str]
) -> None:
    message = {"role": "user", "content": [part] * MAX_PARTS}
    body = {field: [message] * (MAX_ALL_PARTS // MAX_PARTS + 1), "max_tokens": 1}
    response = await served.http.post(path, content=json.dumps(body))
    assert response.status_code == 400
    assert f"{field}: at most {MAX_ALL_PARTS} content parts" in response.json()["error"]["message"]


def test_many_blocks_of_one_turn_are_joined_in_linear_time() -> None:
    """A long thought, and then many short ones: each of them must not copy the long one."""
    long = [BlockParam("thinking", thinking="x" * 8_000_000)]
    short = [BlockParam("thinking", thinking="y")] * 2000
    params = [MessageParam("user", "hi"), MessageParam("assistant", long)]
    params += [MessageParam("assistant", short)] * 50
    params.append(MessageParam("assistant", [BlockParam("text", "z")] * 2000))
    message = chat_request(CountTokensRequest(messages=params)).messages[-1]
    assert message.reasoning_content is not None and message.content is not None
    assert len(message.reasoning_content) == 8_000_000 + 2 * 100_000
    assert len(message.content) == 2000
