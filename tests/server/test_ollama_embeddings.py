"""Ollama's vectors, its store that does not exist, and what other clients ask about models."""

from __future__ import annotations

import struct
from collections.abc import AsyncIterator
from typing import Any

import ollama
import pytest
from anthropic import AsyncAnthropic
from ollama import AsyncClient

from tests.server.fake_engine import HIDDEN_SIZE, fake_pooled
from tests.server.harness import MAX_MODEL_LEN, Served

EMBED, EMBEDDINGS = "/api/embed", "/api/embeddings"


@pytest.fixture
async def client(server: Served) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(host=f"http://127.0.0.1:{server.port}") as client:
        yield client


def expected(token_ids: list[int], size: int = HIDDEN_SIZE) -> Any:
    values = struct.unpack(f"<{HIDDEN_SIZE}f", fake_pooled(token_ids, "mean"))[:size]
    length = sum(value * value for value in values) ** 0.5
    return pytest.approx([value / length for value in values], abs=1e-6)


async def test_official_client_reads_vectors_in_order(server: Served, client: AsyncClient) -> None:
    texts = [f"the river {i}" for i in range(20)]
    answer = await client.embed(model="tiny", input=texts)
    ids = [server.tokenizer.encode(text) for text in texts]
    for vector, token_ids in zip(answer.embeddings, ids, strict=True):
        assert vector == expected(token_ids)
    assert answer.prompt_eval_count == sum(map(len, ids))
    assert answer.total_duration is not None and answer.total_duration > 0
    single = await client.embed(model="tiny:latest", input=texts[0], dimensions=3)
    assert single.embeddings == [expected(ids[0], 3)]
    former = await client.embeddings(model="tiny", prompt=texts[1])
    assert former.embedding == expected(ids[1])


async def test_nothing_to_embed_only_says_that_the_model_is_loaded(app: Served) -> None:
    bodies: list[dict[str, Any]] = [{}, {"input": None}, {"input": ""}, {"input": []}]
    for body in bodies:
        answer = (await app.http.post(EMBED, json=body)).json()
        assert (answer["model"], answer["embeddings"]) == ("tiny", [])
    response = await app.http.post(EMBEDDINGS, json={"prompt": ""})
    assert response.json() == {"embedding": []}
    assert app.engine.accepted == []


async def test_long_text_is_cut_unless_that_is_not_wanted(app: Served) -> None:
    text = "the river runs " * 2000
    answer = (await app.http.post(EMBED, json={"input": [text, "x"], "dimensions": 0})).json()
    ids = app.tokenizer.encode(text)[:MAX_MODEL_LEN]
    assert answer["embeddings"][0] == expected(ids)
    assert answer["prompt_eval_count"] == MAX_MODEL_LEN + 1
    response = await app.http.post(EMBEDDINGS, json={"prompt": text})
    assert response.json()["embedding"] == expected(ids)
    response = await app.http.post(EMBED, json={"input": text, "truncate": False})
    assert response.status_code == 400
    assert str(MAX_MODEL_LEN) in response.json()["error"]


@pytest.mark.parametrize(
    ("body", "status", "start"),
    [
        ({"input": 5}, 400, "input"),
        ({"input": [5]}, 400, "input"),
        ({"input": ["x", ""]}, 400, "input"),
        ({"input": ["x"] * 3000}, 400, "input"),
        ({"input": "x", "dimensions": 10**6}, 400, "dimensions"),
        ({"input": "x", "dimensions": -1}, 400, "dimensions"),
        ({"input": "x", "model": "other"}, 404, "The model"),
    ],
)
async def test_bad_field_is_named_in_the_family_s_shape(
    app: Served, body: dict[str, Any], status: int, start: str
) -> None:
    response = await app.http.post(EMBED, json=body)
    assert response.status_code == status, response.text
    assert response.json()["error"].startswith(start)
    assert app.engine.accepted == []


async def test_served_model_can_be_pulled_and_nothing_else_be_stored(
    server: Served, client: AsyncClient
) -> None:
    assert (await client.pull("tiny")).status == "success"
    parts = [part async for part in await client.pull("tiny:latest", stream=True)]
    assert [part.status for part in parts] == ["success"]
    with pytest.raises(ollama.ResponseError, match="other") as caught:
        await client.pull("other")
    assert caught.value.status_code == 404
    calls = (
        client.create(model="new", from_="tiny"),
        client.copy("tiny", "new"),
        client.push("tiny"),
        client.delete("tiny"),
    )
    for call in calls:
        with pytest.raises(ollama.ResponseError, match="serves one model") as caught:
            await call
        assert caught.value.status_code == 400


async def test_unknown_path_has_the_shape_of_its_family(app: Served) -> None:
    for path, shape in (("/api/nope", str), ("/v1/nope", dict), ("/v1/messages/batches", dict)):
        response = await app.http.post(path, json={})
        assert response.status_code == 404
        assert isinstance(response.json()["error"], shape)
        assert (response.json().get("type") == "error") is path.startswith("/v1/messages")


async def test_models_are_listed_for_the_anthropic_and_openai_clients(server: Served) -> None:
    base_url = f"http://127.0.0.1:{server.port}"
    async with AsyncAnthropic(api_key="x", base_url=base_url, max_retries=0) as anthropic:
        (listed,) = [model async for model in anthropic.models.list()]
        assert (listed.id, listed.type, listed.display_name) == ("tiny", "model", "tiny")
        assert listed.created_at.tzinfo is not None
        assert await anthropic.models.retrieve("tiny") == listed
    assert (await server.openai.models.retrieve("tiny")).id == "tiny"
