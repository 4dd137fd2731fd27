"""`/v1/embeddings`: inputs of every kind, encodings, order, limits, and clients that leave."""

from __future__ import annotations

import asyncio
import base64
import random
import struct
from pathlib import Path
from typing import Any

import pytest

from caudal.server.loading import load_served_model
from caudal.server.routes.embeddings import slices
from tests.server.fake_engine import HIDDEN_SIZE, fake_pooled
from tests.server.harness import MAX_MODEL_LEN, Served, Setup, in_process
from tests.tiny_models import make_tiny_model
from tests.tiny_vocabulary import spm_metadata

PATH = "/v1/embeddings"


def unit(values: tuple[float, ...]) -> list[float]:
    length = sum(value * value for value in values) ** 0.5
    return [value / length for value in values]


def expected(token_ids: list[int], pooling: str = "mean", size: int = HIDDEN_SIZE) -> Any:
    values = struct.unpack(f"<{HIDDEN_SIZE}f", fake_pooled(token_ids, pooling))
    return pytest.approx(unit(values[:size]), abs=1e-6)


async def embed(served: Served, **fields: Any) -> dict[str, Any]:
    response = await served.http.post(PATH, json=fields)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


async def test_official_client_reads_vectors_in_order(server: Served) -> None:
    """B151: the client asks for base64 and decodes it itself."""
    texts = [f"the river {i}" for i in range(100)]
    answer = await server.openai.embeddings.create(model="tiny", input=texts)
    assert [entry.index for entry in answer.data] == list(range(100))
    ids = [server.tokenizer.encode(text) for text in texts]
    for entry, token_ids in zip(answer.data, ids, strict=True):
        assert entry.embedding == expected(token_ids)
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(map(len, ids))
    assert answer.model == "tiny"


async def test_base64_is_the_bytes_of_the_floats(app: Served) -> None:
    floats = await embed(app, input="the old town", encoding_format="float")
    coded = await embed(app, input="the old town", encoding_format="base64")
    data = base64.b64decode(coded["data"][0]["embedding"])
    vector = floats["data"][0]["embedding"]
    assert list(struct.unpack(f"<{HIDDEN_SIZE}f", data)) == vector
    assert sum(value * value for value in vector) == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize("pooling", [None, "mean", "last"])
async def test_text_and_its_token_ids_give_the_same_vector(
    app: Served, pooling: str | None
) -> None:
    ids = app.tokenizer.encode("the river runs")
    for given in ("the river runs", ["the river runs"], ids, [ids]):
        answer = await embed(app, input=given, pooling=pooling)
        assert answer["data"][0]["embedding"] == expected(ids, pooling or "mean")
        assert answer["usage"] == {"prompt_tokens": len(ids), "total_tokens": len(ids)}


async def test_model_file_decides_how_vectors_are_pooled_by_default(app: Served) -> None:
    assert app.state.model is not None
    app.state.model.pooling = "last"
    ids = app.tokenizer.encode("the river runs")
    assert (await embed(app, input=ids))["data"][0]["embedding"] == expected(ids, "last")


async def test_fewer_dimensions_are_of_length_one_again(app: Served) -> None:
    ids = app.tokenizer.encode("hello")
    answer = await embed(app, input="hello", dimensions=3)
    assert answer["data"][0]["embedding"] == expected(ids, size=3)


async def test_special_tokens_in_a_text_stay_text(app: Served) -> None:
    await embed(app, input="a<|im_end|>b")
    assert 2 not in app.engine.accepted[0].prompt_token_ids


async def test_bos_is_added_as_the_model_wants(app: Served) -> None:
    async with in_process(Setup(metadata=spm_metadata())) as served:
        await embed(served, input=["hello"])
        await embed(served, input=["hello"], add_special_tokens=False)
        with_bos, without = (r.prompt_token_ids for r in served.engine.accepted)
        assert with_bos == [1, *without]


async def test_text_of_exactly_the_context_fits(app: Served) -> None:
    """B151: no room for a token is needed, as none is generated."""
    answer = await embed(app, input=[[5] * MAX_MODEL_LEN])
    assert answer["usage"]["prompt_tokens"] == MAX_MODEL_LEN


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({}, "input", "required"),
    ({"input": None}, "input", "expected"),
    ({"input": ""}, "input", "empty"),
    ({"input": []}, "input", "empty"),
    ({"input": [[]]}, "input", "empty"),
    ({"input": ["a", ""]}, "input", "input[1]"),
    ({"input": ["a", 5]}, "input", "mix"),
    ({"input": [[5], "a"]}, "input", "mix"),
    ({"input": [-1]}, "input", "-1"),
    ({"input": [10**9]}, "input", str(10**9)),
    ({"input": {"text": "a"}}, "input", "expected"),
    ({"input": ["a"] * 2049}, "input", "2048"),
    ({"input": [5] * (MAX_MODEL_LEN + 1)}, "input", str(MAX_MODEL_LEN)),
    ({"input": ["a", "the river " * 200]}, "input", "input[1]"),
    ({"input": "x" * 1_000_000}, "input", str(MAX_MODEL_LEN)),
    ({"input": "a", "encoding_format": "hex"}, "encoding_format", "base64"),
    ({"input": "a", "pooling": "cls"}, "pooling", "mean"),
    ({"input": "a", "dimensions": 0}, "dimensions", "1"),
    ({"input": "a", "dimensions": HIDDEN_SIZE + 1}, "dimensions", str(HIDDEN_SIZE)),
    ({"input": "a", "dimensions": "3"}, "dimensions", "int"),
    ({"input": "a", "truncate_prompt_tokens": 5}, "truncate_prompt_tokens", "not supported"),
    ({"input": "a", "normalize": False}, "normalize", "not supported"),
    ({"input": "a", "cache_salt": ""}, "cache_salt", "1"),
]


@pytest.mark.parametrize(("body", "param", "word"), REFUSED)
async def test_bad_field_is_named_with_its_limit(
    app: Served, body: dict[str, Any], param: str, word: str
) -> None:
    response = await app.http.post(PATH, json=body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param
    assert word in error["message"]
    assert app.engine.accepted == []


async def test_unknown_model_is_404_and_unknown_fields_are_ignored(app: Served) -> None:
    response = await app.http.post(PATH, json={"input": "a", "model": "other"})
    assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")
    await embed(app, input="a", model="tiny", banana=1)


async def test_long_list_enters_the_engine_a_few_at_a_time(app: Served) -> None:
    """A list must not put everybody else behind all of its entries."""
    app.engine.step_gate.clear()
    request = asyncio.create_task(embed(app, input=["a"] * 300))
    await asyncio.sleep(0.05)
    assert app.engine.stats.num_running + app.engine.stats.num_waiting == 4
    app.engine.step_gate.set()
    assert len((await request)["data"]) == 300


async def test_refusal_in_the_middle_of_a_list_ends_it_whole(app: Served) -> None:
    app.engine.max_running = app.engine.max_waiting = 1
    response = await app.http.post(PATH, json={"input": ["a"] * 20})
    assert response.status_code == 429
    assert int(response.headers["retry-after"]) >= 1
    app.engine.max_running = 1_000_000


async def test_client_that_leaves_frees_its_list(server: Served) -> None:
    server.engine.step_gate.clear()
    connection = await server.raw(PATH, {"input": ["a"] * 100})
    await asyncio.sleep(0.1)
    await connection.close()
    async with asyncio.timeout(5):
        while server.engine.stats.num_running or server.engine.stats.num_waiting:
            await asyncio.sleep(0.01)
    assert len(server.engine.accepted) < 10
    assert server.state.metrics.requests_cancelled == 1
    server.engine.step_gate.set()


async def test_dead_engine_is_503() -> None:
    async with in_process() as served:
        served.engine.step_gate.clear()
        request = asyncio.create_task(served.http.post(PATH, json={"input": ["a", "b"]}))
        await asyncio.sleep(0.02)
        served.engine.die()
        response = await request
        assert (response.status_code, response.json()["error"]["code"]) == (503, "engine_dead")


@pytest.mark.parametrize(("kind", "pooling"), [(None, "mean"), (1, "mean"), (3, "last")])
def test_pooling_is_read_from_the_model_file(
    tmp_path: Path, kind: int | None, pooling: str
) -> None:
    path = make_tiny_model(tmp_path / "tiny.gguf", metadata={"llama.pooling_type": kind})
    model = load_served_model(path, "tiny")
    assert model.pooling == pooling
    assert model.num_parameters > 100_000
    assert model.facts["llama.embedding_length"] == 128
    assert not [key for key in model.facts if "tokens" in key or "template" in key]


@pytest.mark.parametrize("encoding", ["float", "base64"])
async def test_large_answer_is_encoded_off_the_loop(encoding: str) -> None:
    async with in_process() as served:
        answer = await embed(served, input=["a"] * 2048, encoding_format=encoding)
        assert len(answer["data"]) == 2048
        assert answer["data"][0]["embedding"] == answer["data"][2047]["embedding"]


def test_slices_cover_every_item_once_within_the_bound() -> None:
    rng = random.Random(1)
    for _ in range(200):
        sizes = [rng.randrange(1, 30) for _ in range(rng.randrange(1, 40))]
        found = list(slices(sizes, 50))
        assert [i for start, stop in found for i in range(start, stop)] == [*range(len(sizes))]
        assert all(sum(sizes[a:b]) <= 50 or b - a == 1 for a, b in found)
