"""Models, tokenization, version, metrics, authentication and the schema."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from caudal.config import ServerConfig
from tests.server.harness import ANSWER, MAX_MODEL_LEN, MODEL, Served, Setup, in_process


async def test_model_card_has_length_architecture_and_warnings(app: Served) -> None:
    """B95: anything odd about the tokenizer is visible."""
    app.tokenizer.warnings.append("unknown pre-tokenizer 'x'")
    listing = (await app.http.get("/v1/models")).json()
    assert listing["object"] == "list"
    card = listing["data"][0]
    assert (card["id"], card["object"], card["max_model_len"]) == (MODEL, "model", MAX_MODEL_LEN)
    assert card["metadata"]["architecture"] == "llama"
    assert card["metadata"]["quantization"] == "F32"
    assert "unknown pre-tokenizer 'x'" in card["metadata"]["warnings"]
    assert (await app.http.get(f"/v1/models/{MODEL}")).json() == card
    assert [model.id async for model in app.openai.models.list()] == [MODEL]


async def test_unknown_model_card_is_404(app: Served) -> None:
    for name in ("nope", "a/b", "%ff"):
        response = await app.http.get(f"/v1/models/{name}")
        assert response.status_code == 404
        assert response.json()["error"]["code"] == "model_not_found"


async def test_tokenize_and_detokenize_are_inverse(app: Served) -> None:
    text = "the river <|im_end|> 日本"
    body = {"prompt": text, "return_token_strs": True}
    tokens = (await app.http.post("/tokenize", json=body)).json()
    assert tokens["count"] == len(tokens["tokens"]) == len(tokens["token_strs"])
    assert tokens["max_model_len"] == MAX_MODEL_LEN
    assert 2 in tokens["tokens"]
    response = await app.http.post("/detokenize", json={"tokens": tokens["tokens"]})
    assert response.json() == {"prompt": text}
    assert (await app.http.post("/detokenize", json={"tokens": []})).json() == {"prompt": ""}
    empty = (await app.http.post("/tokenize", json={"prompt": ""})).json()
    assert (empty["count"], empty["token_strs"]) == (0, None)


async def test_tokenize_of_messages_is_what_chat_sends(app: Served) -> None:
    messages = [{"role": "user", "content": "hi<|im_end|>"}]
    response = await app.http.post("/tokenize", json={"messages": messages})
    await app.http.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 1})
    assert app.engine.accepted[0].prompt_token_ids == response.json()["tokens"]


async def test_version_and_request_id_are_told(app: Served) -> None:
    assert isinstance((await app.http.get("/version")).json()["version"], str)
    response = await app.http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1})
    assert response.headers["x-request-id"] == response.json()["id"]


async def scrape(served: Served) -> dict[str, float]:
    response = await served.http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    samples = {}
    for family in text_string_to_metric_families(response.text):
        for sample in family.samples:
            labels = ",".join(f"{k}={v}" for k, v in sample.labels.items())
            samples[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return samples


async def test_series_exist_from_the_start_and_count(app: Served) -> None:
    """B125, B127."""
    before = await scrape(app)
    await app.complete(max_tokens=5)
    await app.events("/v1/completions", {"prompt": "x", "max_tokens": 200, "stop": "river"})
    after = await scrape(app)
    assert before.keys() == after.keys()

    def grown(name: str) -> float:
        return after[name] - before[name]

    assert grown("caudal_generation_tokens_total") == 5 + 3
    assert grown("caudal_prompt_tokens_total") == 3
    assert grown("caudal_requests_finished_total{reason=length}") == 1
    assert grown("caudal_requests_finished_total{reason=stop}") == 1
    assert grown("caudal_time_to_first_token_seconds_count") == 2
    assert grown("caudal_inter_token_latency_seconds_count") == 4 + 2
    assert grown("caudal_time_per_output_token_seconds_count") == 2
    assert grown("caudal_e2e_request_latency_seconds_count") == 2
    assert grown("caudal_request_queue_time_seconds_sum") == pytest.approx(0.003)
    assert grown("caudal_step_time_seconds_total{part=forward}") > 0
    assert after["caudal_engine_ready"] == 1
    assert after["caudal_kv_blocks"] == 64
    assert after["caudal_num_requests_running"] == 0


async def test_two_servers_in_a_process_keep_their_counts_apart(app: Served) -> None:
    await app.complete(max_tokens=5)
    async with in_process() as other:
        assert (await scrape(other))["caudal_generation_tokens_total"] == 0
        assert (await scrape(app))["caudal_generation_tokens_total"] == 5


@pytest.mark.parametrize(
    "header",
    [
        None,
        "Bearer wrong",
        "Bearer",
        "Bearer  ",
        "Basic secret",
        "secret",
        "Bearer secretx",
        "\xff",
    ],
)
async def test_requests_without_the_key_are_401(header: str | None) -> None:
    async with in_process(Setup(config=ServerConfig(port=0, api_keys=("secret",)))) as served:
        headers = httpx.Headers({} if header is None else {"authorization": header}, "latin-1")
        for method, path in (
            ("POST", "/v1/completions"),
            ("GET", "/v1/models"),
            ("GET", "/metrics"),
            ("GET", "/openapi.json"),
            ("POST", "/tokenize"),
            ("GET", "/nope"),
        ):
            response = await served.http.request(method, path, headers=headers)
            assert response.status_code == 401, path
            assert response.json()["error"]["code"] == "invalid_api_key"
            assert response.headers["www-authenticate"] == "Bearer"
            assert "secret" not in response.text
        for path in ("/live", "/ready", "/health"):
            assert (await served.http.get(path)).status_code == 200


async def test_the_key_opens_every_route() -> None:
    async with in_process(Setup(config=ServerConfig(port=0, api_keys=("schlüssel",)))) as served:
        served.http.headers = httpx.Headers([(b"authorization", "bearer schlüssel".encode())])
        answer = await served.complete(max_tokens=200)
        assert answer["choices"][0]["text"] == ANSWER
        schema = (await served.http.get("/openapi.json")).json()
        assert schema["security"] == [{"bearer": []}, {"x-api-key": []}]
        for headers, status in (
            ([(b"x-api-key", "schlüssel".encode())], 200),
            ([(b"x-api-key", b"wrong")], 401),
            ([(b"x-api-key", "schlüssel".encode()), (b"authorization", b"Bearer x")], 200),
        ):
            served.http.headers = httpx.Headers(headers)
            assert (await served.http.get("/v1/models")).status_code == status


async def test_no_cross_origin_headers_by_default(app: Served) -> None:
    response = await app.http.get("/v1/models", headers={"origin": "https://example.com"})
    assert not [name for name in response.headers if name.startswith("access-control")]


def references(value: Any) -> set[str]:
    if isinstance(value, dict):
        own = {value["$ref"]} if isinstance(value.get("$ref"), str) else set()
        return own.union(*(references(item) for item in value.values()))
    if isinstance(value, list):
        return set().union(*(references(item) for item in value))
    return set()


PATHS = {
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/embeddings",
    "/v1/responses",
    "/v1/responses/input_tokens",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/",
    "/api/chat",
    "/api/generate",
    "/api/embed",
    "/api/embeddings",
    "/api/pull",
    "/api/create",
    "/api/copy",
    "/api/push",
    "/api/delete",
    "/api/tags",
    "/api/show",
    "/api/ps",
    "/api/version",
    "/v1/models",
    "/v1/models/{model_id}",
    "/v1/files",
    "/v1/files/{file_id}",
    "/v1/files/{file_id}/content",
    "/v1/batches",
    "/v1/batches/{batch_id}",
    "/v1/batches/{batch_id}/cancel",
    "/render",
    "/tokenize",
    "/detokenize",
    "/tokenizer_info",
    "/live",
    "/ready",
    "/health",
    "/version",
    "/metrics",
    "/caudal/doctor",
    "/caudal/prefixes",
    "/caudal/trace",
    "/caudal/live",
    "/caudal/requests",
    "/caudal/history",
    "/dashboard",
    "/dashboard/",
    "/dashboard/{name}",
}


async def test_schema_describes_every_operation_and_limit(app: Served) -> None:
    schema = (await app.http.get("/openapi.json")).json()
    assert schema["openapi"].startswith("3.1")
    assert set(schema["paths"]) == PATHS
    components = schema["components"]["schemas"]
    for reference in references(schema):
        assert reference.removeprefix("#/components/schemas/") in components
    request = components["CompletionRequest"]
    assert request["required"] == ["prompt"]
    assert {"type": "number", "minimum": 0, "maximum": 2} in request["properties"]["temperature"][
        "anyOf"
    ]
    operation = schema["paths"]["/v1/completions"]["post"]
    assert "text/event-stream" in operation["responses"]["200"]["content"]
    assert set(operation["responses"]) >= {"200", "400", "404", "413", "415", "429", "500", "503"}
    parameters = schema["paths"]["/v1/models/{model_id}"]["get"]["parameters"]
    assert [(p["name"], p["in"], p["required"]) for p in parameters] == [("model_id", "path", True)]
