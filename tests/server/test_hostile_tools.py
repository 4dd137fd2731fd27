"""Tools, calls and results of every malformed kind, in all families: never a 500."""

from __future__ import annotations

import random
from typing import Any

from tests.server.harness import Served, in_process
from tests.server.test_output_parser import random_answer
from tests.server.tool_models import TOOLS, tool_setup

VALUES: list[Any] = [
    *(None, True, False, 0, -1, 1.5, 2**63, "", "x", "add", "object", "string", "auto", "required"),
    *("function", "tool", "any", "\x00", "日本語", "<|im_end|>", "[TOOL_CALLS]", "{", '{"a": 1}'),
    *([], {}, [[]], [{}], {"type": "object"}, {"type": ["object", "null"]}, {"$ref": "#"}),
    *({"$ref": "#/$defs/x"}, {"enum": []}, {"anyOf": []}, {"pattern": "("}, {"pattern": "(?=a)"}),
    *({"minimum": 5, "maximum": 1}, {"minItems": 10**9}, {"type": "object", "properties": 5}),
    *({"type": "object", "required": "x"}, {"type": "object", "required": ["nope"]}, {"not": {}}),
    {"type": "object", "properties": {"a": {"$ref": "#"}}},
    {"name": "add"},
    {"name": "nope"},
    {"type": "function", "function": {"name": "add"}},
    {"type": "function", "name": "add"},
]

MESSAGES: list[Any] = [
    {"role": "user", "content": "hi"},
    {
        "role": "assistant",
        "content": None,
        "reasoning_content": "hm",
        "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
        ],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "3"},
]
CLAUDE: list[Any] = [
    {"role": "user", "content": "hi"},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "hm", "signature": ""},
            {"type": "tool_use", "id": "c1", "name": "add", "input": {"a": 1}},
        ],
    },
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "3"}]},
]
ITEMS: list[Any] = [
    {"role": "user", "content": "hi"},
    {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]},
    {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a": 1}'},
    {"type": "function_call_output", "call_id": "c1", "output": "3"},
]
FLAT: list[Any] = [{"type": "function", **tool["function"]} for tool in TOOLS]
SCHEMAS: list[Any] = [
    {"name": tool["name"], "input_schema": tool["parameters"], "description": "x"} for tool in FLAT
]
BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": MESSAGES, "tools": TOOLS, "tool_choice": "required"}),
    (
        "/v1/chat/completions",
        {
            "messages": MESSAGES,
            "tools": TOOLS,
            "tool_choice": {"type": "function", "function": {"name": "add"}},
            "parallel_tool_calls": False,
            "reasoning_effort": "none",
        },
    ),
    (
        "/v1/messages",
        {
            "messages": CLAUDE,
            "max_tokens": 50,
            "tools": SCHEMAS,
            "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
            "thinking": {"type": "disabled"},
        },
    ),
    (
        "/v1/responses",
        {
            "input": ITEMS,
            "tools": FLAT,
            "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"name": "add"}]},
        },
    ),
    (
        "/api/chat",
        {
            "messages": [
                MESSAGES[0],
                {
                    "role": "assistant",
                    "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1}}}],
                },
                {"role": "tool", "tool_name": "add", "content": "3"},
            ],
            "tools": TOOLS,
            "think": False,
        },
    ),
]


def mutated(value: Any, chance: random.Random) -> Any:
    """A copy of `value` in which one place is something else."""
    if isinstance(value, dict) and value and chance.random() < 0.85:
        key = chance.choice(list(value))
        if chance.random() < 0.1:
            return {k: v for k, v in value.items() if k != key}
        return {**value, key: mutated(value[key], chance)}
    if isinstance(value, list) and value and chance.random() < 0.85:
        place = chance.randrange(len(value))
        return [*value[:place], mutated(value[place], chance), *value[place + 1 :]]
    return chance.choice(VALUES)


async def probe(served: Served, chance: random.Random) -> int:
    path, body = chance.choice(BODIES)
    for _ in range(chance.randint(1, 2)):
        body = mutated(body, chance)
    if isinstance(body, dict):
        body["stream"] = chance.random() < 0.5
    response = await served.http.post(path, json=body)
    assert response.status_code < 500, (path, body, response.text)
    assert "Traceback" not in response.text
    if response.status_code == 200:
        assert '"error":' not in response.text.replace('"error":null', ""), (body, response.text)
    return response.status_code


async def test_malformed_tools_never_cause_a_500() -> None:
    statuses: set[int] = set()
    for seed, family in enumerate(["hermes", "mistral", "json", "thinking"]):
        chance = random.Random(seed)
        answer = random_answer(chance)
        async with in_process(tool_setup(family, answer)) as served:
            for _ in range(150):
                statuses.add(await probe(served, chance))
            await served.check_idle()
    assert statuses >= {200, 400}
