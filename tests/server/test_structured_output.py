"""Structured output through every API family of a whole server, and what is refused there."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest
import pytest_asyncio
from anthropic import AsyncAnthropic
from ollama import AsyncClient

from tests.batch.harness import BatchClient, line
from tests.server.harness import open_request, parse_events
from tests.server.test_real_engine import RealServer, serving

pytestmark = pytest.mark.asyncio(loop_scope="module")

USER: list[Any] = [{"role": "user", "content": "465564867"}]
SCHEMA = {
    "type": "object",
    "properties": {
        "town": {"enum": ["Ulm", "Oslo", "Zürich"]},
        "size": {"type": "integer", "minimum": 10, "maximum": 99},
    },
    "required": ["town", "size"],
    "additionalProperties": False,
}
JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "town", "schema": SCHEMA}}
FAMILY = "👩‍👩‍👧‍👦"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(
    tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[RealServer]:
    # Name lookups run in the loop's executor, whose threads here outlive a single test.
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(2))
    data = str(tmp_path_factory.mktemp("files"))
    async with serving(tiny_model, "--max-num-seqs", "16", "--data-dir", data) as server:
        yield server
        await server.check_idle()


async def post(server: RealServer, path: str, **fields: Any) -> Any:
    response = await server.http.post(path, json=fields)
    assert response.status_code == 200, response.text
    return response.json()


async def chat(server: RealServer, **fields: Any) -> str:
    answer = await post(server, "/v1/chat/completions", messages=USER, max_tokens=300, **fields)
    choice = answer["choices"][0]
    assert choice["finish_reason"] == "stop", choice
    text: str = choice["message"]["content"]
    return text


async def refusal(server: RealServer, path: str = "/v1/chat/completions", **fields: Any) -> Any:
    response = await server.http.post(path, json={"messages": USER, **fields})
    assert response.status_code == 400, response.text
    return response.json()["error"]


async def test_short_prompt_and_low_temperature_do_not_end_in_white_space(
    server: RealServer,
) -> None:
    """B57."""
    work = [chat(server, response_format=JSON_SCHEMA, temperature=0.1, seed=s) for s in range(30)]
    for text in await asyncio.gather(*work):
        jsonschema.validate(json.loads(text), SCHEMA)
        assert text.endswith("}")
        assert not re.search(r"\s{9}", text)


async def test_json_object_is_accepted_though_the_prompt_does_not_say_json(
    server: RealServer,
) -> None:
    """B57: a random model seldom closes its texts, so it may be cut; it is JSON so far."""
    body = {"messages": USER, "max_tokens": 60, "response_format": {"type": "json_object"}}
    answer = await post(server, "/v1/chat/completions", **body)
    assert answer["choices"][0]["message"]["content"].startswith("{")


async def test_stream_is_the_same_text_and_choices_differ(server: RealServer) -> None:
    body = {"messages": USER, "n": 3, "seed": 5, "max_tokens": 300, "response_format": JSON_SCHEMA}
    whole = await post(server, "/v1/chat/completions", **body)
    response = await server.http.post("/v1/chat/completions", json={**body, "stream": True})
    texts = ["", "", ""]
    for event in parse_events(response.text)[:-1]:
        for choice in event["choices"]:
            texts[choice["index"]] += choice["delta"].get("content") or ""
    assert texts == [choice["message"]["content"] for choice in whole["choices"]]
    for text in texts:
        jsonschema.validate(json.loads(text), SCHEMA)
    assert len(set(texts)) > 1


async def test_character_of_several_tokens_is_streamed_whole(server: RealServer) -> None:
    """B39."""
    body = {"prompt": "hi", "max_tokens": 60, "temperature": 0}
    body["structured_outputs"] = {"grammar": f'root ::= "{FAMILY}"'}
    whole = await post(server, "/v1/completions", **body, logprobs=0)
    assert whole["choices"][0]["text"] == FAMILY
    response = await server.http.post("/v1/completions", json={**body, "stream": True})
    pieces = [event["choices"][0]["text"] for event in parse_events(response.text)[:-1]]
    assert "".join(pieces) == FAMILY
    assert "\ufffd" not in "".join(pieces)
    assert pieces.count("") <= 1


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"structured_outputs": {"regex": "[a-c]{3}/\\d"}}, r"[a-c]{3}/[0-9]"),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
        ({"structured_outputs": {"json": {"const": 7}}}, "7"),
        ({"structured_outputs": {"json": '{"const": 7}'}}, "7"),
        ({"structured_outputs": {"grammar": 'start: "a" b\nb: "x" | "y"'}}, "a[xy]"),
        ({"guided_regex": "[ab]{4}"}, "[ab]{4}"),
        ({"guided_choice": ["yes", "no"]}, "yes|no"),
        ({"guided_json": {"const": "x"}}, '"x"'),
        ({"guided_grammar": 'root ::= "q" | "r"'}, "q|r"),
    ],
)
async def test_form_has_the_names_that_vllm_gives_it(
    server: RealServer, fields: dict[str, Any], pattern: str
) -> None:
    assert re.fullmatch(pattern, await chat(server, **fields))
    answer = await post(server, "/v1/completions", prompt="hi", max_tokens=40, **fields)
    assert re.fullmatch(pattern, answer["choices"][0]["text"])


async def test_clients_of_every_family_get_what_they_ask_for(server: RealServer) -> None:
    """OpenAI's, Anthropic's and Ollama's own clients."""
    parsed = await server.openai.chat.completions.create(
        model="tiny", messages=USER, response_format=JSON_SCHEMA, max_tokens=300
    )
    jsonschema.validate(json.loads(parsed.choices[0].message.content or ""), SCHEMA)
    text_format = {"type": "json_schema", "name": "town", "schema": SCHEMA, "strict": True}
    response = await server.openai.responses.create(
        model="tiny", input="hi", text={"format": text_format}, max_output_tokens=300
    )
    jsonschema.validate(json.loads(response.output_text), SCHEMA)
    assert response.text is not None
    assert response.text.format.to_dict() == text_format
    url = str(server.http.base_url)
    async with AsyncAnthropic(api_key="none", base_url=url, max_retries=0) as anthropic:
        message = await anthropic.messages.create(
            model="tiny",
            max_tokens=300,
            messages=USER,
            extra_body={"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
        )
    block = message.content[0]
    assert block.type == "text"
    jsonschema.validate(json.loads(block.text), SCHEMA)
    ollama = AsyncClient(host=url)
    answer = await ollama.chat("tiny", USER, format=SCHEMA, options={"num_predict": 300})
    jsonschema.validate(json.loads(answer.message.content or ""), SCHEMA)
    generated = await ollama.generate(
        "tiny", "hi", format={"const": ["a", 1]}, options={"num_predict": 300}
    )
    assert json.loads(generated.response) == ["a", 1]
    await ollama._client.aclose()


async def test_batch_lines_have_forms_too(server: RealServer) -> None:
    body = {"messages": USER, "max_tokens": 300, "response_format": JSON_SCHEMA}
    bad = {"messages": USER, "response_format": {"type": "json_schema", "json_schema": {
        "schema": {"not": {}}}}}  # fmt: skip
    client = BatchClient(server.http, server.openai)
    lines = [line("good", body=body), line("bad", body=bad)]
    batch = await client.wait(await client.create(lines, endpoint="/v1/chat/completions"))
    output, errors = await client.all_results(batch)
    text = output[0]["response"]["body"]["choices"][0]["message"]["content"]
    jsonschema.validate(json.loads(text), SCHEMA)
    assert "/not: the keyword" in json.dumps(errors)


@pytest.mark.parametrize("is_stream", [False, True])
async def test_schema_that_cannot_be_enforced_is_refused_by_pointer_and_keyword(
    server: RealServer, is_stream: bool
) -> None:
    """B53, B67: never 200 with free text, in no family."""
    schema = {"type": "object", "properties": {"a": {"propertyNames": {"pattern": "^a"}}}}
    wrapped = {"type": "json_schema", "json_schema": {"schema": schema}}
    error = await refusal(server, response_format=wrapped, stream=is_stream)
    assert error["param"] == "response_format"
    assert error["code"] == "invalid_json_schema"
    pointer = "/properties/a/propertyNames: the keyword 'propertyNames' is not supported"
    assert pointer in error["message"]
    body = {"model": "tiny", "stream": is_stream}
    families: dict[str, dict[str, Any]] = {
        "/v1/completions": {"prompt": "x", "guided_json": schema},
        "/v1/responses": {
            "input": "x", "text": {"format": {"type": "json_schema", "schema": schema}}
        },
        "/v1/messages": {
            "messages": USER, "max_tokens": 9,
            "output_config": {"format": {"type": "json_schema", "schema": schema}},
        },
        "/api/chat": {"messages": USER, "format": schema},
        "/api/generate": {"prompt": "x", "format": schema},
    }  # fmt: skip
    for path, fields in families.items():
        response = await server.http.post(path, json={**body, **fields})
        assert response.status_code == 400, path
        assert pointer in response.text, path


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
        ({"structured_outputs": {"banana": 1}}, "structured_outputs"),
        ({"structured_outputs": {"grammar": 'start: "a" <nope>'}}, "structured_outputs"),
        ({"structured_outputs": {"grammar": "start: start"}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs.choice"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
        ({"response_format": {"type": "grammar"}}, "response_format.type"),
        ({"guided_choice": [""]}, "guided_choice"),
    ],
)
async def test_form_that_is_malformed_is_refused_by_name(
    server: RealServer, fields: dict[str, Any], param: str
) -> None:
    for extra in ({}, {"stream": True}, {"n": 2}):
        error = await refusal(server, **fields, **extra)
        assert error["param"] == param, error


async def test_client_that_leaves_while_its_grammar_compiles_leaves_nothing(
    server: RealServer,
) -> None:
    properties = {f"property {i}": {"type": "string"} for i in range(250)}
    for index in range(8):
        schema = {"type": "object", "properties": {**properties, f"own {index}": {}}}
        body = {
            "messages": USER,
            "guided_json": schema,
            "max_tokens": 400,
            "stream": index % 2 == 0,
        }
        connection = await open_request(server.port, "/v1/chat/completions", body)
        await asyncio.sleep(0.02 * index)
        await connection.close()
    await server.check_idle()
    with pytest.raises(openai.BadRequestError):
        await server.openai.chat.completions.create(
            model="tiny", messages=USER, extra_body={"guided_regex": "["}
        )
