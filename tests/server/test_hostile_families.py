"""Seeded random bodies for every API family: refusals in its own shape, answers as documented."""

from __future__ import annotations

import json
import random
from typing import Any

import msgspec
import pytest

from caudal.server.app import ROUTES
from caudal.server.endpoint import ApiRoute
from caudal.server.protocol.common import ErrorResponse
from tests.server.harness import Served, Setup, in_process

USER = [{"role": "user", "content": "hi"}]
VALID: dict[str, dict[str, Any]] = {
    "/v1/embeddings": {"input": "hi"},
    "/v1/responses": {"input": "hi", "max_output_tokens": 2},
    "/v1/messages": {"messages": USER, "max_tokens": 2},
    "/v1/messages/count_tokens": {"messages": USER},
    "/render": {"messages": USER},
    "/api/chat": {"messages": USER, "stream": False, "options": {"num_predict": 2}},
    "/api/generate": {"prompt": "hi", "stream": False, "options": {"num_predict": 2}},
    "/api/show": {"model": "tiny"},
}
BY_PATH = {route.path: route for route in ROUTES}
JSON = {"content-type": "application/json"}


def struct_of(route: ApiRoute) -> type[msgspec.Struct]:
    kind = route.request[0] if isinstance(route.request, tuple) else route.request
    assert kind is not None
    return kind


def random_value(rng: random.Random, depth: int = 0) -> Any:
    if depth < 3 and rng.random() < 0.3:
        if rng.random() < 0.5:
            return [random_value(rng, depth + 1) for _ in range(rng.randrange(4))]
        keys = ("type", "text", "role", "content", "input_text", "temperature", "stop", "x")
        return {rng.choice(keys): random_value(rng, depth + 1) for _ in range(rng.randrange(4))}
    scalars = (
        None, True, False, 0, 1, -1, 2, 2**31, 2**64, -(2**70), 0.5, 1e300, "", "a", "text", "user",
        "assistant", "input_text", "message", "json", "mean", "\x00", "é" * 2000, "<|im_end|>",
    )  # fmt: skip
    return rng.choice(scalars)


def check_refusal(route: ApiRoute, status: int, text: str, case: object) -> None:
    assert 400 <= status < 500, (case, status, text)
    refusal = msgspec.json.decode(text, type=route.failure)
    assert msgspec.to_builtins(refusal) == json.loads(text), case
    for word in ("Traceback", "Error(", "msgspec", "codec", "File "):
        assert word not in text, (case, text)


@pytest.mark.parametrize("path", VALID)
async def test_random_bodies_get_an_answer_or_a_refusal_as_documented(path: str) -> None:
    rng = random.Random(f"20260801 {path}")
    route = BY_PATH[path]
    names = [field.encode_name for field in msgspec.structs.fields(struct_of(route))]
    names += ["tools", "format", "reasoning", "thinking", "prompt", "messages", "banana"]
    statuses = set()
    async with in_process(Setup()) as served:
        for _ in range(400):
            body = {**VALID[path]}
            for _ in range(rng.randrange(3)):
                body[rng.choice(names)] = random_value(rng)
            data = json.dumps(body).encode()
            if rng.random() < 0.2:
                cut = rng.randrange(len(data))
                data = data[:cut] + bytes([rng.randrange(256)]) + data[cut + 1 :]
            response = await served.http.post(path, content=data, headers=JSON)
            statuses.add(response.status_code)
            if response.status_code != 200:
                check_refusal(route, response.status_code, response.text, data)
        await served.check_idle()
    assert statuses >= {200, 400}


@pytest.mark.parametrize("path", VALID)
async def test_deep_nesting_and_huge_numbers_are_refused(app: Served, path: str) -> None:
    names = [f.encode_name for f in msgspec.structs.fields(struct_of(BY_PATH[path]))]
    bombs = [b"[" * 90_000 + b"]" * 90_000, b'{"a":' * 90_000 + b"1" + b"}" * 90_000]
    for name in names:
        for bomb in (*bombs, b"9" * 5000, b"1e999"):
            data = json.dumps(VALID[path]).encode()[:-1] + b',"%s":%s}' % (name.encode(), bomb)
            response = await app.http.post(path, content=data, headers=JSON)
            if response.status_code != 200:  # a number may be within the limits of its field
                check_refusal(BY_PATH[path], response.status_code, response.text, (name, bomb[:9]))


@pytest.mark.parametrize("path", VALID)
async def test_answer_is_exactly_what_the_schema_says(app: Served, path: str) -> None:
    """Every field of the answer is in the struct that the schema is made from."""
    response = await app.http.post(path, json=VALID[path])
    assert response.status_code == 200, response.text
    kind = BY_PATH[path].response
    assert isinstance(kind, type)
    answer = msgspec.json.decode(response.content, type=kind)
    assert msgspec.to_builtins(answer) == response.json()


@pytest.mark.parametrize("path", ["/api/tags", "/api/ps", "/api/version"])
async def test_answer_about_models_is_what_the_schema_says(app: Served, path: str) -> None:
    response = await app.http.get(path)
    kind = BY_PATH[path].response
    assert isinstance(kind, type)
    answer = msgspec.json.decode(response.content, type=kind)
    assert msgspec.to_builtins(answer) == response.json()


async def test_schema_shows_each_family_s_errors_streams_and_alternatives(app: Served) -> None:
    schema = (await app.http.get("/openapi.json")).json()
    for path in VALID:
        operation = schema["paths"][path]["post"]
        refusal = operation["responses"]["400"]["content"]["application/json"]["schema"]
        assert refusal["$ref"].endswith("/" + BY_PATH[path].failure.__name__)
    assert BY_PATH["/v1/messages"].failure is not ErrorResponse
    media = schema["paths"]["/api/chat"]["post"]["responses"]["200"]["content"]
    assert set(media) == {"application/json", "application/x-ndjson"}
    body = schema["paths"]["/render"]["post"]["requestBody"]["content"]["application/json"]
    names = [entry["$ref"].rpartition("/")[2] for entry in body["schema"]["anyOf"]]
    assert names == ["ChatCompletionRequest", "CompletionRequest"]
    options = schema["components"]["schemas"]["OllamaOptions"]["properties"]["temperature"]
    assert {"type": "number", "minimum": 0, "maximum": 2} in options["anyOf"]
