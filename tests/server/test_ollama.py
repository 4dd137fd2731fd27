"""Ollama's endpoints: lines, statistics, options, names, and its official client."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from datetime import datetime
from typing import Any

import ollama
import pytest
from ollama import AsyncClient

from caudal.config import ServerConfig
from caudal.server.loading import load_served_model
from caudal.server.state import ServerLimits
from tests.server.harness import ANSWER, MAX_MODEL_LEN, Served, Setup, in_process, on_loopback
from tests.tiny_models import make_tiny_model
from tests.tiny_vocabulary import bpe_metadata

CHAT, GENERATE = "/api/chat", "/api/generate"
USER: list[dict[str, Any]] = [{"role": "user", "content": "hello"}]
BODIES: dict[str, dict[str, Any]] = {CHAT: {"messages": USER}, GENERATE: {"prompt": "hello"}}
PATHS = list(BODIES)
DURATIONS = ("total_duration", "load_duration", "prompt_eval_duration", "eval_duration")


@pytest.fixture
async def client(server: Served) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(host=f"http://127.0.0.1:{server.port}") as client:
        yield client


def sent_text(served: Served) -> str:
    ids = served.engine.accepted[-1].prompt_token_ids
    return served.tokenizer.decode(ids, skip_special=False)


def text_of(answer: dict[str, Any]) -> str:
    return str(answer["message"]["content"] if "message" in answer else answer["response"])


async def plain(served: Served, path: str, **fields: Any) -> dict[str, Any]:
    body = {**BODIES[path], "stream": False, **fields}
    response = await served.http.post(path, json=body)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/json"
    answer: dict[str, Any] = response.json()
    return answer


async def lines(served: Served, path: str, **fields: Any) -> list[dict[str, Any]]:
    """The objects of a stream, which is the default."""
    response = await served.http.post(path, json={**BODIES[path], **fields})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/x-ndjson"
    assert response.text.endswith("\n")
    return [json.loads(line) for line in response.text.splitlines()]


async def test_official_client_chats(server: Served, client: AsyncClient) -> None:
    answer = await client.chat(model="tiny", messages=USER, options={"temperature": 0.1})
    assert answer.message.content == ANSWER
    assert answer.message.role == "assistant"
    assert (answer.done, answer.done_reason, answer.model) == (True, "stop", "tiny")
    assert answer.prompt_eval_count == len(server.engine.accepted[0].prompt_token_ids)
    assert answer.eval_count is not None and answer.eval_count > 5
    stream = await client.chat(model="tiny:latest", messages=USER, stream=True)
    parts = [part async for part in stream]
    assert "".join(part.message.content or "" for part in parts) == ANSWER
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]


async def test_official_client_generates(server: Served, client: AsyncClient) -> None:
    answer = await client.generate(model="tiny", prompt="hello", system="be brief")
    assert answer.response == ANSWER
    assert sent_text(server) == (
        "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    stream = await client.generate(model="tiny", prompt="the ", raw=True, stream=True)
    assert "".join([part.response or "" async for part in stream]) == ANSWER
    assert sent_text(server) == "the "


async def test_official_client_asks_about_models(server: Served, client: AsyncClient) -> None:
    listed = (await client.list()).models[0]
    assert listed.model == "tiny:latest"
    assert listed.details is not None and listed.details.family == "llama"
    running = (await client.ps()).models[0]
    assert (running.name, running.context_length) == ("tiny:latest", MAX_MODEL_LEN)
    assert running.digest == listed.digest
    shown = await client.show("tiny")
    assert shown.template is not None and "im_start" in shown.template
    assert shown.capabilities == ["completion", "tools"]
    assert shown.modified_at is not None and shown.modified_at.tzinfo is not None
    with pytest.raises(ollama.ResponseError) as caught:
        await client.show("other")
    assert caught.value.status_code == 404


async def test_facts_come_from_the_model_file(tmp_path: Any) -> None:
    path = make_tiny_model(tmp_path / "tiny.gguf")
    async with in_process() as served:
        served.state.model = load_served_model(path, "tiny:7b")
        shown = (await served.http.post("/api/show", json={"name": "tiny:7b"})).json()
        assert shown["model_info"]["llama.context_length"] == 512
        assert shown["model_info"]["general.parameter_count"] > 100_000
        assert shown["details"]["parameter_size"].endswith("K")
        tags = (await served.http.get("/api/tags")).json()["models"]
        assert [tag["name"] for tag in tags] == ["tiny:7b"]
        assert 0 < tags[0]["size"] < path.stat().st_size
        assert len(tags[0]["digest"]) == 64
        version = (await served.http.get("/api/version")).json()
        assert version.keys() == {"version", "caudal"}
        assert all(part.isdigit() for part in version["version"].split("."))


@pytest.mark.parametrize("path", PATHS)
async def test_stream_equals_the_plain_answer(app: Served, path: str) -> None:
    for options in ({}, {"num_predict": 3}, {"stop": ["old"]}, {"stop": "river"}):
        whole = await plain(app, path, options=options)
        found = await lines(app, path, options=options)
        assert "".join(map(text_of, found)) == text_of(whole)
        assert [line["done"] for line in found] == [False] * (len(found) - 1) + [True]
        assert text_of(found[-1]) == ""
        for line in found[:-1]:
            text_key = "message" if path == CHAT else "response"
            assert line.keys() == {"model", "created_at", "done", text_key}
            datetime.fromisoformat(line["created_at"])
        same = ("model", "done_reason", "prompt_eval_count", "eval_count")
        assert [found[-1][name] for name in same] == [whole[name] for name in same]
        for name in DURATIONS:
            assert isinstance(found[-1][name], int) and found[-1][name] > 0
            assert isinstance(whole[name], int) and whole[name] > 0


async def test_durations_are_nanoseconds_that_add_up() -> None:
    async with in_process(Setup(step_s=0.01)) as served:
        answer = await plain(served, CHAT, options={"num_predict": 10})
        parts = sum(answer[name] for name in DURATIONS[1:])
        assert answer["eval_duration"] >= 9 * 0.009 * 1e9
        assert parts <= answer["total_duration"] < 5e9


@pytest.mark.parametrize("path", PATHS)
async def test_options_reach_the_sampler(app: Served, path: str) -> None:
    options = {
        "temperature": 0.3,
        "top_k": 7,
        "top_p": 0.4,
        "min_p": 0.1,
        "seed": 11,
        "num_predict": 5,
        "repeat_penalty": 1.2,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.25,
        "num_ctx": 8192,
        "num_gpu": 99,
        "banana": 1,
    }
    await plain(app, path, options=options, keep_alive="5m")
    sampling = app.engine.accepted[0].sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.3, 7, 0.4)
    assert (sampling.min_p, sampling.seed, sampling.max_tokens) == (0.1, 11, 5)
    assert sampling.repetition_penalty == 1.2
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.5, 0.25)


@pytest.mark.parametrize("limit", [None, -1, -2, 0])
async def test_without_a_limit_the_context_is_the_limit(app: Served, limit: int | None) -> None:
    for path in PATHS:
        for raw in (False, True) if path == GENERATE else (None,):
            await plain(app, path, options={"num_predict": limit, "seed": -1}, raw=raw)
            sent = app.engine.accepted[-1]
            assert sent.sampling.max_tokens == MAX_MODEL_LEN - len(sent.prompt_token_ids)
            assert sent.sampling.seed is None
            assert (sent.sampling.temperature, sent.sampling.top_k) == (0.8, 40)
            assert (sent.sampling.top_p, sent.sampling.repetition_penalty) == (0.9, 1.0)


async def test_penalty_over_no_tokens_is_none(app: Served) -> None:
    await plain(app, CHAT, options={"repeat_penalty": 1.5, "repeat_last_n": 0})
    assert app.engine.accepted[0].sampling.repetition_penalty == 1.0


@pytest.mark.parametrize("stream", [None, False, True])
async def test_request_without_a_prompt_says_that_the_model_is_loaded(
    app: Served, stream: bool | None
) -> None:
    empty: list[tuple[str, dict[str, Any]]] = [
        (CHAT, {}),
        (CHAT, {"messages": []}),
        (GENERATE, {}),
        (GENERATE, {"prompt": "", "keep_alive": 0}),
    ]
    for path, body in empty:
        response = await app.http.post(path, json={"model": "tiny", "stream": stream, **body})
        answer = response.json()
        assert (answer["done"], answer["done_reason"], text_of(answer)) == (True, "load", "")
    assert app.engine.accepted == []


async def test_model_without_template_generates_raw() -> None:
    metadata = bpe_metadata("smollm")
    del metadata["tokenizer.chat_template"]
    async with in_process(Setup(metadata=metadata)) as served:
        assert text_of(await plain(served, GENERATE)) == ANSWER
        assert sent_text(served) == "hello"
        body = {"prompt": "hello", "system": "x"}
        response = await served.http.post(GENERATE, json=body)
        assert response.status_code == 400
        assert "no usable template" in response.json()["error"]


@pytest.mark.parametrize(
    ("served_name", "names"),
    [("tiny", ["tiny", "tiny:latest", "", None]), ("m:latest", ["m", "m:latest", None])],
)
async def test_latest_may_be_written_or_not(served_name: str, names: list[str | None]) -> None:
    async with in_process() as served:
        assert served.state.model is not None
        served.state.model.name = served_name
        for name in names:
            answer = await plain(served, CHAT, model=name)
            assert answer["model"] == (name or served_name)
        for name in ("tiny:7b", "m:7b", "other", ":latest", "tiny:latest:latest"):
            for path in PATHS:
                body = {**BODIES[path], "model": name}
                response = await served.http.post(path, json=body)
                assert response.status_code == 404, name
                assert response.json().keys() == {"error"}


NEUTRAL: list[dict[str, Any]] = [
    {"format": "", "think": False, "keep_alive": -1, "options": None},
    {"format": None, "think": None, "logprobs": False, "banana": 1},
    {"options": {"mirostat": 0, "tfs_z": 1.0, "typical_p": 1, "num_keep": 4}},
]


@pytest.mark.parametrize("fields", NEUTRAL)
async def test_values_that_ask_for_nothing_are_accepted(
    app: Served, fields: dict[str, Any]
) -> None:
    await plain(app, CHAT, tools=[], **fields)
    await plain(app, GENERATE, images=[], suffix="", template="", context=[], **fields)


BOTH: list[tuple[dict[str, Any], str, str]] = [
    ({"format": "xml"}, "format", "'json' or a JSON schema"),
    ({"format": {"not": {}}}, "format", "/not"),
    ({"think": True}, "think", "not support"),
    ({"think": "high"}, "think", "not support"),
    ({"think": "huge"}, "think", "low, medium, high"),
    ({"options": {"temperature": 3}}, "options.temperature", "2"),
    ({"options": {"temperature": "hot"}}, "options.temperature", "expected"),
    ({"options": {"top_p": 0}}, "options.top_p", "0"),
    ({"options": {"num_predict": -3}}, "options.num_predict", "-2"),
    ({"options": {"num_ctx": 0}}, "options.num_ctx", "1"),
    ({"options": {"stop": ["x"] * 33}}, "options.stop", "32"),
    ({"options": {"repeat_penalty": 0}}, "options.repeat_penalty", "0"),
    ({"options": {"mirostat": 2}}, "options.mirostat", "not supported"),
    ({"options": {"typical_p": 0.5}}, "options.typical_p", "not supported"),
    ({"options": [1]}, "options", "expected"),
    ({"stream": "yes"}, "stream", "expected"),
]
CASES = [
    *[(path, *case) for path in PATHS for case in BOTH],
    (CHAT, {"tools": [{}]}, "tools[0].type", "required"),
    (CHAT, {"tools": [{"type": "function"}]}, "tools[0].function", "required"),
    (CHAT, {"messages": 5}, "messages", "expected"),
    (CHAT, {"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role", "assistant"),
    (CHAT, {"messages": [{**USER[0], "images": ["aa"]}]}, "messages[0].images", "not supported"),
    (
        CHAT,
        {"messages": [{"role": "assistant", "tool_calls": [{}]}]},
        "messages[0].tool_calls[0].function",
        "required",
    ),
    (CHAT, {"messages": [{"role": "user", "content": "the river " * 500}]}, "This model", "256"),
    (GENERATE, {"images": ["aa"]}, "images", "not supported"),
    (GENERATE, {"suffix": "x"}, "suffix", "not supported"),
    (GENERATE, {"template": "{{ .Prompt }}"}, "template", "not supported"),
    (GENERATE, {"context": [1, 2]}, "context", "not supported"),
    (GENERATE, {"raw": True, "system": "x"}, "system", "raw"),
    (GENERATE, {"prompt": 5}, "prompt", "expected"),
    (GENERATE, {"raw": True, "prompt": "the river " * 500}, "This model", "256"),
]


@pytest.mark.parametrize(("path", "fields", "start", "word"), CASES)
@pytest.mark.parametrize("stream", [False, True])
async def test_bad_field_is_named_in_the_family_s_shape(
    app: Served, path: str, fields: dict[str, Any], start: str, word: str, stream: bool
) -> None:
    response = await app.http.post(path, json={**BODIES[path], "stream": stream, **fields})
    assert response.status_code == 400, response.text
    answer = response.json()
    assert answer.keys() == {"error"}
    assert answer["error"].startswith(start)
    assert word in answer["error"]
    assert app.engine.accepted == []


@pytest.mark.parametrize("path", [*PATHS, "/api/show"])
async def test_malformed_body_keeps_the_shape(app: Served, path: str) -> None:
    for body in (b"", b"{", b"[]", b'"x"', b'{"prompt":NaN}', b"\xff", b'{"model":"\\ud83d"}'):
        response = await app.http.post(
            path, content=body, headers={"content-type": "application/json"}
        )
        assert response.status_code == 400, body
        assert response.json().keys() == {"error"}
        assert "Traceback" not in response.text


async def test_other_refusals_keep_the_shape(app: Served) -> None:
    response = await app.http.get(CHAT)
    assert (response.status_code, response.json().keys()) == (405, {"error"})
    app.engine.max_running = app.engine.max_waiting = 0
    response = await app.http.post(CHAT, json=BODIES[CHAT])
    assert (response.status_code, response.json().keys()) == (429, {"error"})
    app.engine.max_running = 1000
    async with in_process(Setup(config=ServerConfig(port=0, api_keys=("secret",)))) as served:
        for path in ("/api/tags", CHAT):
            response = await served.http.get(path)
            assert (response.status_code, response.json().keys()) == (401, {"error"})


@pytest.mark.parametrize("path", PATHS)
async def test_body_sent_by_plain_curl_is_read_but_not_a_browser_s_form(
    app: Served, path: str
) -> None:
    headers = {"content-type": "application/x-www-form-urlencoded"}
    data = json.dumps({**BODIES[path], "stream": False})
    response = await app.http.post(path, content=data, headers=headers)
    assert (response.status_code, text_of(response.json())) == (200, ANSWER)
    headers["origin"] = "https://example.com"
    response = await app.http.post(path, content=data, headers=headers)
    assert (response.status_code, response.json().keys()) == (415, {"error"})


async def test_root_answers_the_first_question_of_the_command_line(server: Served) -> None:
    for method in ("HEAD", "GET"):
        response = await server.http.request(method, "/")
        assert response.status_code == 200


@pytest.mark.parametrize("path", PATHS)
async def test_failure_inside_the_stream_is_a_last_line(app: Served, path: str) -> None:
    """B47."""
    app.engine.fail_after = 3
    found = await lines(app, path)
    assert found[-1].keys() == {"error"}
    assert not [line for line in found if line.get("done")]
    app.engine.fail_after = None


async def test_official_client_raises_what_fails_in_a_stream() -> None:
    async with on_loopback() as served:
        served.engine.fail_after = 3
        async with AsyncClient(host=f"http://127.0.0.1:{served.port}") as client:
            stream = await client.chat(model="tiny", messages=USER, stream=True)
            with pytest.raises(ollama.ResponseError):
                _ = [part async for part in stream]


async def test_silence_is_not_filled_as_readers_parse_every_line() -> None:
    setup = Setup(limits=ServerLimits(ping_interval_s=0.02))
    async with on_loopback(setup) as served:
        served.engine.step_gate.clear()
        connection = await served.raw(CHAT, BODIES[CHAT])
        head = await connection.read_until(b"\r\n\r\n")
        assert b"application/x-ndjson" in head
        served.engine.step_gate.set()
        body = await connection.read_all()
        assert b"ping" not in body
        assert b'"done":true' in body
        await connection.close()
