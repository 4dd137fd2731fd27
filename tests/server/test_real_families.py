"""Every API family against the whole server, through the official clients."""

from __future__ import annotations

import asyncio
import base64
import struct
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
import pytest_asyncio
from anthropic import AsyncAnthropic
from ollama import AsyncClient

from tests.server.harness import open_request
from tests.server.test_real_engine import RealServer, serving

pytestmark = pytest.mark.asyncio(loop_scope="module")

SYSTEM = "the river runs through the old town and the people of the town " * 4
USER: list[Any] = [{"role": "user", "content": "hello"}]
GREEDY = {"temperature": 0, "max_tokens": 12}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tiny_model: Path) -> AsyncIterator[RealServer]:
    # Name lookups run in the loop's executor, whose threads here outlive a single test.
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(2))
    flags = ("--max-num-seqs", "8", "--max-num-batched-tokens", "64")
    async with serving(tiny_model, *flags) as server:
        yield server
        await server.check_idle()


async def chat_text(server: RealServer, **fields: Any) -> str:
    body = {"messages": USER, **GREEDY, **fields}
    response = await server.http.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    text: str = response.json()["choices"][0]["message"]["content"]
    return text


async def embed(server: RealServer, given: Any, **fields: Any) -> list[Any]:
    body = {"input": given, **fields}
    response = await server.http.post("/v1/embeddings", json=body)
    assert response.status_code == 200, response.text
    return [entry["embedding"] for entry in response.json()["data"]]


async def test_list_gives_each_text_the_vector_it_has_alone(server: RealServer) -> None:
    """B151: in order, and to the bit whatever shares the steps."""
    texts = [f"the river {'runs and ' * (i % 40)}{i}" for i in range(100)]
    generating = asyncio.create_task(server.complete(prompt="the", max_tokens=100))
    answer = await server.openai.embeddings.create(model="tiny", input=texts)
    await generating
    assert [entry.index for entry in answer.data] == list(range(100))
    assert len({tuple(entry.embedding) for entry in answer.data}) == 100
    for index in (0, 39, 78, 99):
        (alone,) = await embed(server, texts[index])
        assert answer.data[index].embedding == alone
        assert len(alone) == 128
        assert sum(value * value for value in alone) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("pooling", ["mean", "last"])
async def test_vector_does_not_depend_on_kind_or_encoding(server: RealServer, pooling: str) -> None:
    """B151: longer than a step, as text and as ids, as floats and as bytes."""
    text = "the river runs through the old town " * 12
    tokens = (await server.http.post("/tokenize", json={"prompt": text})).json()["tokens"]
    assert 64 < len(tokens) < 512
    (floats,) = await embed(server, text, pooling=pooling)
    (from_ids,) = await embed(server, tokens, pooling=pooling)
    (coded,) = await embed(server, [tokens], pooling=pooling, encoding_format="base64")
    assert floats == from_ids == list(struct.unpack("<128f", base64.b64decode(coded)))
    (fewer,) = await embed(server, text, pooling=pooling, dimensions=16)
    assert len(fewer) == 16
    assert fewer[0] / fewer[1] == pytest.approx(floats[0] / floats[1], rel=1e-4)


async def test_pooling_tells_texts_apart_in_two_ways(server: RealServer) -> None:
    (mean,), (last,) = [await embed(server, "the old town", pooling=p) for p in ("mean", "last")]
    assert sum(a * b for a, b in zip(mean, last, strict=True)) < 0.999


async def test_text_beyond_the_context_is_refused(server: RealServer) -> None:
    """B151."""
    with pytest.raises(openai.BadRequestError, match="512 tokens"):
        await server.openai.embeddings.create(model="tiny", input=["the river " * 600])
    assert len(await embed(server, [[5] * 512])) == 1


async def test_responses_say_what_chat_says(server: RealServer) -> None:
    expected = await chat_text(server)
    create: Any = server.openai.responses.create
    fields = {"model": "tiny", "input": "hello", "temperature": 0, "max_output_tokens": 12}
    assert (await create(**fields)).output_text == expected
    found = [event async for event in await create(**fields, stream=True)]
    assert found[-1].type == "response.incomplete"
    assert found[-1].response.output_text == expected
    deltas = [event.delta for event in found if event.type == "response.output_text.delta"]
    assert "".join(deltas) == expected


async def test_prefix_counts_as_cached_in_every_family(server: RealServer) -> None:
    """B91, B123: each family's own words for it."""
    anthropic = AsyncAnthropic(api_key="x", base_url=str(server.http.base_url), max_retries=0)
    async with anthropic:
        usages = []
        for nonce in ("65abc", "fa690"):
            system = f"x-anthropic-billing-header: cc_version=2; cch={nonce};\n{SYSTEM}"
            message = await anthropic.messages.create(
                model="tiny", max_tokens=2, system=system, messages=USER
            )
            usages.append(message.usage)
    first, second = usages
    assert first.cache_read_input_tokens == 0
    assert second.cache_read_input_tokens is not None
    assert second.cache_read_input_tokens > 0.8 * first.input_tokens
    assert second.input_tokens + second.cache_read_input_tokens == first.input_tokens
    create: Any = server.openai.responses.create
    for is_cached in (False, True):
        answer = await create(
            model="tiny", instructions="y" + SYSTEM, input="hello", max_output_tokens=2
        )
        assert (answer.usage.input_tokens_details.cached_tokens > 0) is is_cached


async def test_messages_say_what_chat_says(server: RealServer) -> None:
    expected = await chat_text(server)
    anthropic = AsyncAnthropic(api_key="x", base_url=str(server.http.base_url), max_retries=0)
    async with anthropic:
        fields: Any = {"model": "tiny", "max_tokens": 12, "messages": USER}
        fields["extra_body"] = {"temperature": 0}
        message: Any = await anthropic.messages.create(**fields)
        assert message.content[0].text == expected
        async with anthropic.messages.stream(**fields) as stream:
            assert "".join([text async for text in stream.text_stream]) == expected
            streamed: Any = (await stream.get_final_message()).usage
        assert streamed.output_tokens == message.usage.output_tokens
        counted = await anthropic.messages.count_tokens(model="tiny", messages=USER)
        for usage in (message.usage, streamed):
            assert usage.input_tokens + usage.cache_read_input_tokens == counted.input_tokens


async def test_ollama_says_what_chat_says(server: RealServer) -> None:
    expected = await chat_text(server)
    options = {"temperature": 0, "num_predict": 12}
    async with AsyncClient(host=str(server.http.base_url)) as client:
        answer = await client.chat(model="tiny", messages=USER, options=options)
        assert answer.message.content == expected
        assert (answer.done_reason, answer.eval_count) == ("length", 12)
        stream = await client.chat(model="tiny", messages=USER, options=options, stream=True)
        assert "".join([part.message.content or "" async for part in stream]) == expected
        generated = await client.generate(model="tiny", prompt="hello", options=options)
        assert generated.response == expected
        raw = await client.generate(model="tiny", prompt="the", raw=True, options=options)
        whole = await server.complete(**GREEDY)
        assert raw.response == whole["choices"][0]["text"]
        assert (raw.prompt_eval_count, raw.eval_count) == (
            whole["usage"]["prompt_tokens"],
            whole["usage"]["completion_tokens"],
        )
        details = (await client.show("tiny")).details
        assert details is not None and details.quantization_level is not None


async def test_rendered_prompt_is_what_runs(server: RealServer) -> None:
    rendered = (await server.http.post("/render", json={"messages": USER})).json()["prompts"][0]
    answer = await server.complete(prompt=rendered["token_ids"], **GREEDY)
    assert answer["choices"][0]["text"] == await chat_text(server)
    assert rendered["text"].endswith("<|im_start|>assistant\n")


async def test_lost_clients_free_everything_in_every_family(server: RealServer) -> None:
    """B49."""
    long = {"messages": USER, "max_tokens": 450, "stream": True}
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("/v1/embeddings", {"input": ["the river runs " * 80] * 200}),
        ("/v1/responses", {"input": "hello", "stream": True}),
        ("/v1/messages", long),
        ("/v1/messages", {**long, "stream": False}),
        ("/api/chat", {"messages": USER}),
        ("/api/generate", {"prompt": "hello", "stream": False}),
    ]
    for delay in (0.0, 0.05, 0.2):
        connections = await asyncio.gather(
            *(open_request(server.port, path, body) for path, body in bodies * 2)
        )
        await asyncio.sleep(delay)
        for connection in connections:
            await connection.close()
        await server.check_idle()
