"""`/v1/responses`: shapes, event sequences, what the official client makes of them, refusals."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from tests.server.harness import ANSWER, MAX_MODEL_LEN, Served, Setup, in_process, on_loopback

PATH = "/v1/responses"


def sent_text(served: Served) -> str:
    ids = served.engine.accepted[-1].prompt_token_ids
    return served.tokenizer.decode(ids, skip_special=False)


async def create(served: Served, **fields: Any) -> dict[str, Any]:
    response = await served.http.post(PATH, json={"input": "hi", **fields})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


async def events(served: Served, **fields: Any) -> list[dict[str, Any]]:
    """The events of a stream, checked for their framing and numbers."""
    response = await served.http.post(PATH, json={"input": "hi", "stream": True, **fields})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.text.endswith("\n\n")
    found = []
    for block in response.text[:-2].split("\n\n"):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        found.append(event)
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


async def test_official_client_reads_the_answer(server: Served) -> None:
    server.engine.num_cached = 5
    response = await server.openai.responses.create(
        model="tiny",
        input="hello",
        instructions="be brief",
        metadata={"trip": "1"},
        temperature=0.5,
        max_output_tokens=100,
        store=False,
    )
    assert response.output_text == ANSWER
    assert (response.status, response.error, response.incomplete_details) == (
        "completed",
        None,
        None,
    )
    assert response.usage is not None
    assert response.usage.input_tokens_details.cached_tokens == 5
    assert response.usage.output_tokens_details.reasoning_tokens == 0
    assert response.usage.total_tokens == (
        response.usage.input_tokens + response.usage.output_tokens
    )
    assert response.metadata == {"trip": "1"}
    assert (response.temperature, response.instructions) == (0.5, "be brief")
    assert (response.tools, response.parallel_tool_calls) == ([], True)
    assert sent_text(server) == (
        "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


async def test_official_client_follows_the_stream(server: Served) -> None:
    async with server.openai.responses.stream(model="tiny", input="hello") as stream:
        kinds = [event.type async for event in stream]
        final = await stream.get_final_response()
    assert kinds[0] == "response.created"
    assert kinds[-1] == "response.completed"
    assert final.output_text == ANSWER
    assert final.usage is not None


async def test_answer_can_be_sent_back_as_input(server: Served) -> None:
    """Stateless: the client carries the conversation."""
    first = await server.openai.responses.create(model="tiny", input="hello")
    history = [{"role": "user", "content": "hello"}, *(i.to_dict() for i in first.output)]
    await server.openai.responses.create(
        model="tiny",
        input=[*history, {"role": "user", "content": "and?"}],  # type: ignore[list-item]
    )
    assert f"assistant\n{ANSWER}<|im_end|>\n<|im_start|>user\nand?" in sent_text(server)


async def test_events_come_in_the_documented_order(app: Served) -> None:
    found = await events(app, input="hello")
    kinds = [event["type"] for event in found]
    num_deltas = kinds.count("response.output_text.delta")
    assert num_deltas > 5
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * num_deltas,
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert [e["response"]["status"] for e in found[:2]] == ["in_progress"] * 2
    assert found[0]["response"]["output"] == []
    assert found[2]["item"]["content"] == []
    text = "".join(event.get("delta", "") for event in found)
    assert text == found[-4]["text"] == found[-3]["part"]["text"] == ANSWER
    assert found[-1]["response"]["output"] == [found[-2]["item"]]
    item_id = found[2]["item"]["id"]
    assert item_id.startswith("msg_")
    for event in found[2:-1]:
        assert event.get("item_id", item_id) == item_id
        assert event.get("item", {}).get("id", item_id) == item_id
        assert event["output_index"] == 0
    ids = {event["response"]["id"] for event in found if "response" in event}
    assert len(ids) == 1 and ids.pop().startswith("resp_")


CASES: list[dict[str, Any]] = [
    {},
    {"max_output_tokens": 3},
    {"stop": "old"},
    {"include": ["message.output_text.logprobs"]},
    {"include": ["message.output_text.logprobs"], "top_logprobs": 2, "stop": ["runs"]},
    {"instructions": "x", "user": "me", "top_p": 0.5},
]


@pytest.mark.parametrize("fields", CASES)
async def test_stream_ends_with_the_plain_answer(app: Served, fields: dict[str, Any]) -> None:
    plain = await create(app, **fields)
    found = await events(app, **fields)
    last = found[-1]["response"]
    for answer in (plain, last):
        for changing in ("id", "created_at", "completed_at"):
            assert answer.pop(changing)
        answer["output"][0].pop("id")
    assert last == plain
    logprobs = [entry for event in found for entry in (event.get("logprobs") or [])]
    if fields.get("include"):
        entries = plain["output"][0]["content"][0]["logprobs"]
        assert logprobs == entries * 2  # in the deltas, and once more at the end of the text
        assert len(entries[0]["top_logprobs"]) == fields.get("top_logprobs", 0)
    else:
        assert logprobs == []


async def test_answer_cut_at_the_limit_is_incomplete(app: Served) -> None:
    answer = await create(app, max_output_tokens=3)
    assert answer["status"] == answer["output"][0]["status"] == "incomplete"
    assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
    assert answer["usage"]["output_tokens"] == 3
    assert (await events(app, max_output_tokens=3))[-1]["type"] == "response.incomplete"


async def test_answer_without_text_still_has_every_event(app: Served) -> None:
    app.engine.script = lambda request: []
    kinds = [event["type"] for event in await events(app)]
    assert "response.output_text.delta" not in kinds
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]


async def test_failure_inside_the_stream_is_a_failed_response(app: Served) -> None:
    """B47."""
    app.engine.fail_after = 3
    found = await events(app)
    assert found[-1]["type"] == "response.failed"
    assert found[-1]["response"]["status"] == "failed"
    assert found[-1]["response"]["error"]["code"] == "server_error"
    app.engine.fail_after = None


async def test_official_client_reports_a_failed_stream() -> None:
    async with on_loopback() as served:
        served.engine.fail_after = 3
        stream = await served.openai.responses.create(model="tiny", input="x", stream=True)
        last = [event async for event in stream][-1]
        assert last.type == "response.failed"
        assert last.response.error is not None


async def test_developer_and_parts_become_messages(app: Served) -> None:
    parts = [{"type": "input_text", "text": "one"}, {"type": "input_text", "text": "two"}]
    history = [
        {"role": "developer", "content": "be brief"},
        {"type": "message", "role": "user", "content": parts},
        {
            "type": "message",
            "id": "msg_1",
            "status": "completed",
            "role": "assistant",
            "content": [
                {"type": "output_text", "text": "three", "annotations": []},
                {"type": "refusal", "refusal": "no"},
            ],
        },
        {"role": "user", "content": "four"},
    ]
    await create(app, input=history)
    assert sent_text(app) == (
        "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\none\ntwo<|im_end|>\n"
        "<|im_start|>assistant\nthree\nno<|im_end|>\n<|im_start|>user\nfour<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


NEUTRAL: list[dict[str, Any]] = [
    {"tools": [], "tool_choice": "auto", "parallel_tool_calls": False},
    {"store": True, "previous_response_id": None, "background": False},
    {"reasoning": {"effort": None, "summary": None}, "truncation": "disabled"},
    {"text": {"format": {"type": "text"}, "verbosity": "medium"}},
    {"include": ["reasoning.encrypted_content"], "stream_options": {"include_obfuscation": False}},
    {"service_tier": "auto", "prompt_cache_key": "k", "safety_identifier": "s", "banana": 1},
]


@pytest.mark.parametrize("fields", NEUTRAL)
async def test_values_that_ask_for_nothing_are_accepted(
    app: Served, fields: dict[str, Any]
) -> None:
    answer = await create(app, max_output_tokens=1, **fields)
    assert answer["store"] is False


PART = {"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"input": None}, "input", "expected"),
    ({"input": []}, "input", "1"),
    ({"input": 5}, "input", "expected"),
    ({"input": [PART]}, "input[0].content[0]", "input_image"),
    ({"input": [{"role": "user", "content": []}]}, "input[0].content", "text"),
    ({"input": [{"role": "user"}]}, "input[0].content", "text"),
    ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role", "developer"),
    ({"input": [{"content": "x"}]}, "input[0].role", "developer"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]", "item_reference"),
    ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id", "required"),
    ({"input": [{"type": "function_call", "call_id": "1"}]}, "input[0].name", "required"),
    ({"input": [{"type": "function_call", "name": "f"}]}, "input[0].call_id", "required"),
    ({"input": [{"type": "function_call_output", "call_id": "1"}]}, "input[0].output", "text"),
    ({"input": [{"type": "reasoning", "summary": []}]}, "input", "message is required"),
    (
        {"input": [{"role": "user", "content": [{"type": "input_text"}]}]},
        "input[0].content[0]",
        "needs the field text",
    ),
    ({"input": "the river " * 500}, "input", str(MAX_MODEL_LEN)),
    ({"input": "x", "tools": [{"type": "web_search"}]}, "tools[0].type", "only functions"),
    ({"input": "x", "tools": [{"type": "function"}]}, "tools[0].name", "1 to 128"),
    (
        {"input": "x", "tools": [{"type": "function", "name": "f", "parameters": {"type": "x"}}]},
        "tools[0].parameters.type",
        "tools[0].parameters.type: must be",
    ),
    ({"input": "x", "tool_choice": "required"}, "tool_choice", "only allowed with tools"),
    (
        {
            "input": "x",
            "tools": [{"type": "function", "name": "f"}],
            "tool_choice": {"type": "function", "name": "g"},
        },
        "tool_choice.name",
        "'g' is not among the tools",
    ),
    (
        {
            "input": "x",
            "tools": [{"type": "function", "name": "f"}],
            "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"name": "g"}]},
        },
        "tool_choice.tools[0].name",
        "'g' is not among the tools",
    ),
    ({"input": "x", "previous_response_id": "resp_1"}, "previous_response_id", "not supported"),
    ({"input": "x", "conversation": "c"}, "conversation", "not supported"),
    ({"input": "x", "background": True}, "background", "not supported"),
    ({"input": "x", "prompt": {"id": "p"}}, "prompt", "not supported"),
    ({"input": "x", "truncation": "auto"}, "truncation", "not supported"),
    ({"input": "x", "reasoning": {"effort": "high"}}, "reasoning.effort", "not reason"),
    ({"input": "x", "text": {"format": {"type": "xml"}}}, "text.format.type", "json_schema"),
    ({"input": "x", "text": {"verbosity": "low"}}, "text.verbosity", "not supported"),
    ({"input": "x", "max_output_tokens": 0}, "max_output_tokens", "1"),
    ({"input": "x", "temperature": 2.5}, "temperature", "2"),
    ({"input": "x", "top_p": 0}, "top_p", "0"),
    ({"input": "x", "top_logprobs": 21}, "top_logprobs", "20"),
    ({"input": "x", "metadata": {str(i): "" for i in range(17)}}, "metadata", "16"),
    ({"input": "x", "metadata": {"k": "v" * 513}}, "metadata", "512"),
    ({"input": "x", "metadata": {"k": 1}}, "metadata", "expected"),
    ({"input": "x", "stop": [""]}, "stop", "1"),
    ({"input": "x", "chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "reserved"),
]


@pytest.mark.parametrize(("body", "param", "word"), REFUSED)
@pytest.mark.parametrize("stream", [False, True])
async def test_bad_field_is_named_with_its_limit(
    app: Served, body: dict[str, Any], param: str, word: str, stream: bool
) -> None:
    response = await app.http.post(PATH, json={**body, "stream": stream})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] is not None and error["param"].startswith(param)
    assert word in error["message"]
    assert app.engine.accepted == []


async def test_official_client_raises_its_own_errors(server: Served) -> None:
    with pytest.raises(openai.BadRequestError, match="previous_response_id"):
        await server.openai.responses.create(model="tiny", input="x", previous_response_id="r")
    with pytest.raises(openai.NotFoundError):
        await server.openai.responses.create(model="other", input="x")
    with pytest.raises(openai.NotFoundError):
        await server.openai.responses.retrieve("resp_1")


async def test_template_error_names_the_input(app: Served) -> None:
    from tests.tiny_vocabulary import bpe_metadata

    metadata = bpe_metadata("smollm")
    metadata["tokenizer.chat_template"] = "{{ raise_exception('roles must alternate') }}"
    async with in_process(Setup(metadata=metadata)) as served:
        response = await served.http.post(PATH, json={"input": "x"})
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, "input")
        assert "roles must alternate" in error["message"]


async def test_input_tokens_are_those_of_the_answer(server: Served) -> None:
    counted = await server.openai.responses.input_tokens.count(
        model="tiny", input="hello", instructions="be brief"
    )
    answer = await server.openai.responses.create(
        model="tiny", input="hello", instructions="be brief"
    )
    assert answer.usage is not None
    assert counted.input_tokens == answer.usage.input_tokens
    response = await server.http.post("/v1/responses/input_tokens", json={"input": 5})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "input")
