"""`/v1/messages`: Anthropic's shapes and events, what its client makes of them, refusals."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import pytest
from anthropic import AsyncAnthropic

from caudal.config import ServerConfig
from caudal.server.state import ServerLimits
from tests.server.harness import ANSWER, MAX_MODEL_LEN, Served, Setup, in_process, on_loopback
from tests.tiny_vocabulary import bpe_metadata

PATH = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
USER: list[dict[str, Any]] = [{"role": "user", "content": "hello"}]
BILLING = "x-anthropic-billing-header: cc_version=2.1.36; cc_entrypoint=cli; cch={};"


@pytest.fixture
async def client(server: Served) -> AsyncIterator[AsyncAnthropic]:
    url = f"http://127.0.0.1:{server.port}"
    async with AsyncAnthropic(api_key="unused", base_url=url, max_retries=0) as client:
        yield client


def sent_text(served: Served) -> str:
    ids = served.engine.accepted[-1].prompt_token_ids
    return served.tokenizer.decode(ids, skip_special=False)


async def create(served: Served, **fields: Any) -> dict[str, Any]:
    response = await served.http.post(PATH, json={"messages": USER, "max_tokens": 200, **fields})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


async def events(served: Served, **fields: Any) -> list[dict[str, Any]]:
    """The events of a stream, checked for their framing."""
    body = {"messages": USER, "max_tokens": 200, "stream": True, **fields}
    response = await served.http.post(PATH, json=body)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    return parse(response.text)


def parse(text: str) -> list[dict[str, Any]]:
    assert text.endswith("\n\n")
    found = []
    for block in text[:-2].split("\n\n"):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        found.append(event)
    return found


async def test_official_client_reads_the_answer(server: Served, client: AsyncAnthropic) -> None:
    server.engine.num_cached = 7
    message = await client.messages.create(
        model="tiny",
        max_tokens=100,
        system="be brief",
        messages=[{"role": "user", "content": [{"type": "text", "text": "hello"}]}],
        stop_sequences=["zzz"],
        metadata={"user_id": "u"},
        extra_body={"temperature": 0.5, "top_k": 5, "top_p": 0.9},
    )
    assert [block.type for block in message.content] == ["text"]
    assert message.content[0].text == ANSWER  # type: ignore[union-attr]
    assert (message.role, message.type, message.model) == ("assistant", "message", "tiny")
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    assert message.id.startswith("msg_")
    sent = server.engine.accepted[0]
    assert message.usage.cache_read_input_tokens == 7
    assert message.usage.input_tokens == len(sent.prompt_token_ids) - 7
    assert message.usage.cache_creation_input_tokens == 0
    assert (sent.sampling.temperature, sent.sampling.top_k) == (0.5, 5)
    assert message._request_id is not None
    assert sent_text(server) == (
        "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


async def test_official_client_follows_the_stream(server: Served, client: AsyncAnthropic) -> None:
    server.engine.num_cached = 7
    async with client.messages.stream(
        model="tiny", max_tokens=100, messages=[{"role": "user", "content": "hello"}]
    ) as stream:
        text = "".join([part async for part in stream.text_stream])
        final = await stream.get_final_message()
    assert text == ANSWER == final.content[0].text  # type: ignore[union-attr]
    assert final.stop_reason == "end_turn"
    plain = await client.messages.create(
        model="tiny", max_tokens=100, messages=[{"role": "user", "content": "hello"}]
    )
    assert final.usage.input_tokens == plain.usage.input_tokens
    assert final.usage.cache_read_input_tokens == plain.usage.cache_read_input_tokens == 7
    assert final.usage.output_tokens == plain.usage.output_tokens


async def test_official_client_counts_tokens(server: Served, client: AsyncAnthropic) -> None:
    messages: Any = [{"role": "user", "content": "hello"}]
    counted = await client.messages.count_tokens(model="tiny", messages=messages, system="be brief")
    message = await client.messages.create(
        model="tiny", max_tokens=1, messages=messages, system="be brief"
    )
    assert counted.input_tokens == message.usage.input_tokens


async def test_beta_client_reads_the_answer(client: AsyncAnthropic) -> None:
    """It adds a query and a header of its own."""
    messages: Any = USER
    message = await client.beta.messages.create(
        model="tiny", max_tokens=50, messages=messages, betas=["x-2026-01-01"]
    )
    assert message.content[0].text == ANSWER  # type: ignore[union-attr]


async def test_events_come_in_the_documented_order(app: Served) -> None:
    found = await events(app)
    kinds = [event["type"] for event in found]
    num_deltas = kinds.count("content_block_delta")
    assert num_deltas > 5
    assert kinds == [
        "message_start",
        "content_block_start",
        "ping",
        *["content_block_delta"] * num_deltas,
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    start = found[0]["message"]
    assert (start["content"], start["stop_reason"]) == ([], None)
    assert start["usage"]["input_tokens"] > 0
    assert found[1]["content_block"] == {"type": "text", "text": ""}
    deltas = [event["delta"] for event in found if event["type"] == "content_block_delta"]
    assert {delta["type"] for delta in deltas} == {"text_delta"}
    assert "".join(delta["text"] for delta in deltas) == ANSWER


CASES: list[dict[str, Any]] = [
    {},
    {"max_tokens": 3},
    {"stop_sequences": ["old"]},
    {"stop_sequences": ["zzz", "runs"]},
    {"system": [{"type": "text", "text": "x"}]},
]


@pytest.mark.parametrize("fields", CASES)
async def test_stream_equals_the_plain_answer(app: Served, fields: dict[str, Any]) -> None:
    plain = await create(app, **fields)
    found = await events(app, **fields)
    text = "".join(e["delta"]["text"] for e in found if e["type"] == "content_block_delta")
    assert [{"type": "text", "text": text}] == plain["content"]
    assert found[-2]["delta"] == {
        "stop_reason": plain["stop_reason"],
        "stop_sequence": plain["stop_sequence"],
    }
    assert found[-2]["usage"] == plain["usage"]


async def test_reasons_to_stop(app: Served) -> None:
    assert (await create(app, max_tokens=2))["stop_reason"] == "max_tokens"
    answer = await create(app, stop_sequences=["old"])
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", "old")
    assert answer["content"][0]["text"] == "the river runs through the "


async def test_last_turn_of_the_assistant_is_continued(app: Served) -> None:
    await create(app, messages=[*USER, {"role": "assistant", "content": "the river"}])
    assert sent_text(app).endswith("<|im_start|>assistant\nthe river")
    await create(app, messages=[*USER, {"role": "assistant", "content": ""}])
    assert sent_text(app).endswith("hello<|im_end|>\n<|im_start|>assistant\n")


async def test_neighbours_of_one_role_are_one_turn(app: Served) -> None:
    turns = [
        {"role": "user", "content": "a"},
        {"role": "user", "content": [{"type": "text", "text": "b"}, {"type": "text", "text": ""}]},
        {"role": "assistant", "content": "c"},
        {"role": "user", "content": "d"},
    ]
    await create(app, messages=turns)
    assert "user\na\nb<|im_end|>\n<|im_start|>assistant\nc<|im_end|>" in sent_text(app)


@pytest.mark.parametrize("is_on", [True, False])
async def test_billing_nonce_does_not_change_the_prefix(is_on: bool) -> None:
    """B91: on by default, with an option to turn it off."""
    config = ServerConfig(port=0, normalize_client_headers=is_on)
    async with in_process(Setup(config=config)) as served:
        for nonce in ("65abc", "fa690"):
            system = [
                {"type": "text", "text": BILLING.format(nonce)},
                {"type": "text", "text": "You are an agent.", "cache_control": {"type": "x"}},
            ]
            await create(served, system=system)
        first, second = (request.prompt_token_ids for request in served.engine.accepted)
        assert (first == second) is is_on
        assert "You are an agent." in sent_text(served)


NEUTRAL: list[dict[str, Any]] = [
    {"tools": [], "tool_choice": {"type": "auto"}},
    {"thinking": {"type": "disabled"}, "service_tier": "auto"},
    {"thinking": {"type": "adaptive"}, "metadata": {"user_id": None}},
    {"system": None, "cache_control": {"type": "ephemeral"}, "banana": 1},
    {"system": "", "top_k": 0, "stop_sequences": []},
]


@pytest.mark.parametrize("fields", NEUTRAL)
async def test_values_that_ask_for_nothing_are_accepted(
    app: Served, fields: dict[str, Any]
) -> None:
    await create(app, **fields)


def turn(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(blocks)}], "max_tokens": 5}


PLAIN = {"messages": USER, "max_tokens": 5}
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"messages": USER}, "max_tokens", "required"),
    ({"max_tokens": 5}, "messages", "required"),
    ({**PLAIN, "messages": []}, "messages", "1"),
    ({**PLAIN, "messages": [{"role": "user", "content": ""}]}, "messages[0].content", "empty"),
    ({**PLAIN, "messages": [{"role": "user", "content": []}]}, "messages[0].content", "empty"),
    ({**PLAIN, "messages": [{"role": "user"}]}, "messages[0].content", "required"),
    ({**PLAIN, "messages": [{"role": "system", "content": "x"}]}, "messages[0].role", "user"),
    (
        {**PLAIN, "messages": [*USER, {"role": "assistant", "content": "x "}]},
        "messages[1].content",
        "white space",
    ),
    (turn({"type": "text"}), "messages[0].content[0]", "text"),
    (turn({"type": "text", "text": "a"}, {"type": "image"}), "messages[0].content[1]", "image"),
    (turn({"type": "tool_result", "content": "x"}), "messages[0].content[0].tool_use_id", "req"),
    (turn({"type": "tool_use", "id": "1", "name": "f"}), "messages[0].content[0]", "tool_use"),
    (
        turn({"type": "tool_result", "tool_use_id": "1", "content": [{"type": "image"}]}),
        "messages[0].content[0].content[0]",
        "image",
    ),
    (turn({"type": "document"}), "messages[0].content[0]", "document"),
    ({**PLAIN, "system": [{"type": "image"}]}, "system[0]", "image"),
    ({**PLAIN, "system": 5}, "system", "expected"),
    ({**PLAIN, "max_tokens": 0}, "max_tokens", "1"),
    ({**PLAIN, "temperature": 3}, "temperature", "2"),
    ({**PLAIN, "top_k": -1}, "top_k", "0"),
    ({**PLAIN, "top_p": 1.5}, "top_p", "1"),
    ({**PLAIN, "stop_sequences": "x"}, "stop_sequences", "array"),
    ({**PLAIN, "stop_sequences": [""]}, "stop_sequences", "1"),
    ({**PLAIN, "stop_sequences": ["x"] * 33}, "stop_sequences", "32"),
    ({**PLAIN, "metadata": {"user_id": "x" * 1025}}, "metadata.user_id", "1024"),
    ({**PLAIN, "tools": [{"type": "bash_20250124", "name": "b"}]}, "tools[0].type", "bash"),
    ({**PLAIN, "tools": [{"description": "f"}]}, "tools[0].name", "1 to 128"),
    (
        {**PLAIN, "tools": [{"name": "f", "input_schema": {"type": "array"}}]},
        "tools[0].input_schema.type",
        "object",
    ),
    ({**PLAIN, "tool_choice": {"type": "any"}}, "tool_choice", "only allowed with tools"),
    ({**PLAIN, "tool_choice": {"type": "some"}}, "tool_choice.type", "auto, any"),
    (
        {**PLAIN, "tools": [{"name": "f"}], "tool_choice": {"type": "tool"}},
        "tool_choice.name",
        "required",
    ),
    (
        {**PLAIN, "tools": [{"name": "f"}], "tool_choice": {"type": "tool", "name": "g"}},
        "tool_choice.name",
        "'g' is not among the tools",
    ),
    ({**PLAIN, "thinking": {"type": "enabled", "budget_tokens": 99}}, "thinking", "not reason"),
    ({**PLAIN, "thinking": {"type": "maybe"}}, "thinking.type", "adaptive"),
    (
        {
            **PLAIN,
            "messages": [
                *USER,
                {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f"}]},
            ],
        },
        "messages[1].content",
        "tool_result",
    ),
    ({**PLAIN, "mcp_servers": [{}]}, "mcp_servers", "not supported"),
    ({**PLAIN, "messages": [{"role": "user", "content": "the river " * 500}]}, "prompt is", "long"),
]


@pytest.mark.parametrize(("body", "field", "word"), REFUSED)
@pytest.mark.parametrize("stream", [False, True])
async def test_bad_field_is_named_in_the_family_s_shape(
    app: Served, body: dict[str, Any], field: str, word: str, stream: bool
) -> None:
    response = await app.http.post(PATH, json={**body, "stream": stream})
    assert response.status_code == 400, response.text
    answer = response.json()
    assert answer.keys() == {"type", "error"}
    assert (answer["type"], answer["error"].keys()) == ("error", {"type", "message"})
    assert answer["error"]["type"] == "invalid_request_error"
    assert answer["error"]["message"].startswith(field)
    assert word in answer["error"]["message"]
    assert app.engine.accepted == []


async def test_count_tokens_refuses_and_counts_beyond_the_context(app: Served) -> None:
    messages = [{"role": "user", "content": "the river " * 300}]
    response = await app.http.post(COUNT, json={"messages": messages})
    assert response.status_code == 200
    assert response.json()["input_tokens"] > MAX_MODEL_LEN
    response = await app.http.post(COUNT, json=turn({"type": "image"}))
    assert response.status_code == 400
    assert response.json()["type"] == "error"
    assert app.engine.accepted == []


MALFORMED = [b"", b"{", b"[]", b'"x"', b'{"messages":NaN}', b"\xff", b'{"messages":"\\ud83d"}']


@pytest.mark.parametrize("path", [PATH, COUNT])
async def test_malformed_body_keeps_the_shape(app: Served, path: str) -> None:
    for body in MALFORMED:
        response = await app.http.post(
            path, content=body, headers={"content-type": "application/json"}
        )
        assert response.status_code == 400, body
        answer = response.json()
        assert (answer["type"], answer["error"]["type"]) == ("error", "invalid_request_error")
        assert "Traceback" not in response.text


async def test_wrong_method_type_and_model_keep_the_shape(app: Served) -> None:
    expected = [
        (await app.http.get(PATH), 405, "invalid_request_error"),
        (await app.http.post(PATH, content=b"x", headers={"content-type": "text/plain"}), 415, ""),
        (await app.http.post(PATH, json={**PLAIN, "model": "claude"}), 404, "not_found_error"),
    ]
    for response, status, kind in expected:
        assert response.status_code == status
        assert response.json()["type"] == "error"
        assert response.json()["error"]["type"] == (kind or "invalid_request_error")


async def test_both_keys_open_and_a_wrong_one_keeps_the_shape() -> None:
    setup = Setup(config=ServerConfig(port=0, api_keys=("secret",)))
    async with on_loopback(setup) as served:
        url = f"http://127.0.0.1:{served.port}"
        request: Any = {"model": "tiny", "max_tokens": 5, "messages": USER}
        for arguments in ({"api_key": "secret"}, {"auth_token": "secret"}):
            async with AsyncAnthropic(base_url=url, max_retries=0, **arguments) as client:
                await client.messages.create(**request)
        async with AsyncAnthropic(base_url=url, max_retries=0, api_key="wrong") as client:
            with pytest.raises(anthropic.AuthenticationError) as caught:
                await client.messages.create(**request)
            body: Any = caught.value.body
            assert body["error"]["type"] == "authentication_error"
            assert "secret" not in str(body)


async def test_overload_and_absence_have_their_own_types(app: Served) -> None:
    app.engine.max_running = app.engine.max_waiting = 0
    response = await app.http.post(PATH, json=PLAIN)
    assert (response.status_code, response.json()["error"]["type"]) == (429, "rate_limit_error")
    assert int(response.headers["retry-after"]) >= 1
    app.engine.max_running = 1000
    app.state.is_draining = True
    response = await app.http.post(PATH, json=PLAIN)
    assert (response.status_code, response.json()["error"]["type"]) == (503, "overloaded_error")
    app.state.is_draining = False


async def test_failure_inside_the_stream_is_an_error_event(app: Served) -> None:
    """B47."""
    app.engine.fail_after = 3
    found = await events(app)
    assert found[-1] == {
        "type": "error",
        "error": {"type": "api_error", "message": found[-1]["error"]["message"]},
    }
    assert "message_stop" not in [event["type"] for event in found]
    app.engine.fail_after = None


async def test_official_client_raises_what_fails_in_a_stream() -> None:
    async with on_loopback() as served:
        served.engine.fail_after = 3
        url = f"http://127.0.0.1:{served.port}"
        async with AsyncAnthropic(api_key="x", base_url=url, max_retries=0) as client:
            request: Any = {"model": "tiny", "max_tokens": 50, "messages": USER}
            with pytest.raises(anthropic.APIStatusError, match="api_error"):
                async with client.messages.stream(**request) as stream:
                    await stream.get_final_message()


async def test_long_silence_is_filled_with_pings_of_the_family() -> None:
    setup = Setup(limits=ServerLimits(ping_interval_s=0.04))
    async with on_loopback(setup) as served:
        served.engine.step_gate.clear()
        connection = await served.raw(PATH, {**PLAIN, "stream": True})
        for _ in range(3):
            await connection.read_until(b'event: ping\ndata: {"type":"ping"}\n\n')
        served.engine.step_gate.set()
        assert b"message_stop" in await connection.read_all()
        await connection.close()


async def test_model_without_template_refuses_in_the_family_s_shape() -> None:
    metadata = bpe_metadata("smollm")
    del metadata["tokenizer.chat_template"]
    async with in_process(Setup(metadata=metadata)) as served:
        response = await served.http.post(PATH, json=PLAIN)
        assert response.status_code == 400
        assert "no usable template" in response.json()["error"]["message"]
