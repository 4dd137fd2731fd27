"""Event streams: framing, order, equality with the plain answer, pings, errors, slow readers."""

from __future__ import annotations

import asyncio
import random
import time
from typing import Any

import pytest

from caudal.server.state import ServerLimits
from tests.server.harness import ANSWER, Served, Setup, in_process, on_loopback, parse_events
from tests.tiny_vocabulary import spm_metadata

USER = [{"role": "user", "content": "hi"}]


def joined(events: list[Any], index: int = 0) -> str:
    """The text of one choice."""
    choices = [c for e in events[:-1] for c in e["choices"] if c["index"] == index]
    return "".join(c["text"] if "text" in c else c["delta"].get("content", "") for c in choices)


def check_order(events: list[Any], num_choices: int = 1, *, has_usage: bool = False) -> None:
    """B41: one finish per choice, then at most one usage chunk, then [DONE]."""
    assert events[-1] == "[DONE]"
    assert "[DONE]" not in events[:-1]
    chunks = events[:-1]
    if has_usage:
        assert chunks[-1]["choices"] == []
        assert chunks[-1]["usage"]["total_tokens"] > 0
        chunks = chunks[:-1]
        assert all(chunk["usage"] is None for chunk in chunks)
    else:
        assert all("usage" not in chunk for chunk in chunks)
    assert len({(c["id"], c["created"], c["model"], c["object"]) for c in chunks}) == 1
    finished: set[int] = set()
    for chunk in chunks:
        assert len(chunk["choices"]) == 1
        choice = chunk["choices"][0]
        assert choice["index"] not in finished, "a chunk after the finish"
        if choice["finish_reason"] is not None:
            finished.add(choice["index"])
    assert finished == set(range(num_choices))


async def test_openai_client_reads_both_streams(server: Served) -> None:
    text = ""
    chat = await server.openai.chat.completions.create(
        model="tiny", messages=USER, stream=True, stream_options={"include_usage": True}
    )
    usages = []
    async for chunk in chat:
        usages.append(chunk.usage)
        for choice in chunk.choices:
            text += choice.delta.content or ""
    assert text == ANSWER
    assert [usage is not None for usage in usages] == [False] * (len(usages) - 1) + [True]
    text = ""
    completion = await server.openai.completions.create(
        model="tiny", prompt="hi", stream=True, max_tokens=200
    )
    async for part in completion:
        text += part.choices[0].text
    assert text == ANSWER


@pytest.mark.parametrize("has_usage", [False, True])
async def test_one_finish_per_choice_then_usage_then_done(app: Served, has_usage: bool) -> None:
    options = {"stream_options": {"include_usage": has_usage}}
    events = await app.events("/v1/chat/completions", {"messages": USER, **options})
    check_order(events, has_usage=has_usage)
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert events[0]["object"] == "chat.completion.chunk"
    assert joined(events) == ANSWER
    body = {"prompt": [[5], [6]], "n": 2, "max_tokens": 200, **options}
    events = await app.events("/v1/completions", body)
    check_order(events, 4, has_usage=has_usage)
    assert events[0]["object"] == "text_completion"
    assert [joined(events, i) for i in range(4)] == [ANSWER] * 4


async def test_choices_that_end_early_keep_their_own_reason(app: Served) -> None:
    """B21."""
    lengths = iter([1, 30, 3, 1])
    app.engine.script = lambda request: [5] * next(lengths)
    body = {"messages": USER, "n": 3, "max_tokens": 10}
    events = await app.events("/v1/chat/completions", body)
    check_order(events, 3)
    reasons = {
        c["index"]: c["finish_reason"]
        for e in events[:-1]
        for c in e["choices"]
        if c["finish_reason"]
    }
    assert reasons == {0: "stop", 1: "length", 2: "stop"}


async def test_continuous_usage_counts_up_in_every_chunk(app: Served) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"messages": USER, "stream_options": options, "max_tokens": 4}
    events = await app.events("/v1/chat/completions", body)
    counts = [event["usage"]["completion_tokens"] for event in events[:-1]]
    assert counts == [0, 1, 2, 3, 4, 4, 4]


STREAM_CASES: list[dict[str, Any]] = [
    {},
    {"stop": ["ld tow"]},
    {"stop": "river", "include_stop_str_in_output": True},
    {"stop": ["zzz", "the r", "town!"]},
    {"max_tokens": 5},
    {"n": 3, "seed": 1},
    {"echo": True},
    {"echo": True, "logprobs": 2},
    {"logprobs": 0, "stop": "through"},
    {"skip_special_tokens": False, "ignore_eos": True, "max_tokens": 40},
]


@pytest.mark.parametrize("fields", STREAM_CASES)
async def test_stream_equals_the_plain_answer(app: Served, fields: dict[str, Any]) -> None:
    """B33, B45: text, reasons, usage and log-probabilities."""
    body = {"prompt": "hello", "max_tokens": 200, **fields}
    plain = await app.complete(**body)
    usage = {"stream_options": {"include_usage": True}}
    events = await app.events("/v1/completions", {**body, **usage})
    check_order(events, fields.get("n", 1), has_usage=True)
    assert events[-2]["usage"] == plain["usage"]
    for choice in plain["choices"]:
        index = choice["index"]
        parts = [c for e in events[:-1] for c in e["choices"] if c["index"] == index]
        assert joined(events, index) == choice["text"]
        assert parts[-1]["finish_reason"] == choice["finish_reason"]
        assert parts[-1]["stop_reason"] == choice["stop_reason"]
        if choice["logprobs"]:
            for name, values in choice["logprobs"].items():
                assert [v for p in parts for v in (p["logprobs"] or {name: []})[name]] == values


async def test_chat_stream_logprobs_equal_the_plain_ones(app: Served) -> None:
    body = {"messages": USER, "logprobs": True, "top_logprobs": 1, "stop": "runs"}
    plain = await app.chat(**body)
    events = await app.events("/v1/chat/completions", body)
    entries = [
        entry
        for event in events[:-1]
        for choice in event["choices"]
        for entry in (choice["logprobs"] or {"content": []})["content"]
    ]
    assert entries == plain["choices"][0]["logprobs"]["content"]
    assert joined(events) == plain["choices"][0]["message"]["content"] == "the river "


async def test_no_letter_of_a_stop_string_is_sent_early(app: Served) -> None:
    """B33, B35: near misses come out later, whole stop strings never."""
    body = {"prompt": "x", "max_tokens": 200, "stop": ["the old toys", "old town"]}
    events = await app.events("/v1/completions", body)
    sent = ""
    for event in events[:-1]:
        sent += event["choices"][0]["text"]
        assert "the river runs through the ".startswith(sent)
    assert sent == "the river runs through the "


async def test_split_characters_come_whole_and_without_empty_chunks(app: Served) -> None:
    """B39: no U+FFFD, no storm of empty chunks."""
    text = "a👩‍👩‍👧‍👦é日本"
    ids = app.tokenizer.encode(text)
    app.engine.script = lambda request: [*ids]
    events = await app.events("/v1/completions", {"prompt": "x", "max_tokens": 200})
    parts = [event["choices"][0]["text"] for event in events[:-1]]
    assert "".join(parts) == text
    assert "\ufffd" not in "".join(parts)
    assert all(parts[:-1])


async def test_bytes_that_never_complete_become_replacement_characters(app: Served) -> None:
    """B05: random tokens, always valid UTF-8, the same in both modes."""
    rng = random.Random(5)
    vocab_size = app.tokenizer.vocab_size
    for _ in range(60):
        ids = [rng.randrange(3, vocab_size) for _ in range(40)]
        app.engine.script = lambda request, ids=ids: [*ids]
        body = {"prompt": "日本語", "max_tokens": 40}
        plain = await app.complete(**body)
        events = await app.events("/v1/completions", body)
        assert joined(events) == plain["choices"][0]["text"]


async def test_text_with_line_breaks_and_quotes_stays_one_event(app: Served) -> None:
    text = 'a\n\nb"c\\d\r\n\u2028\x85 data: x'
    ids = app.tokenizer.encode(text)
    app.engine.script = lambda request: [*ids]
    events = await app.events("/v1/completions", {"prompt": "x", "max_tokens": 200})
    assert joined(events) == text


async def test_headers_come_before_the_first_token(server: Served) -> None:
    server.engine.step_gate.clear()
    connection = await server.raw("/v1/chat/completions", {"messages": USER, "stream": True})
    head = await connection.read_until(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200")
    assert b"content-type: text/event-stream" in head
    assert b"cache-control: no-cache" in head
    assert b'"role":"assistant"' in await connection.read_until(b"\n\n")
    server.engine.step_gate.set()
    assert (await connection.read_all()).endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    await connection.close()


async def test_failure_after_five_tokens_ends_the_stream_with_an_error(server: Served) -> None:
    """B47: one error event, no [DONE], nothing raw; the request is gone."""
    server.engine.fail_after = 5
    response = await server.http.post(
        "/v1/completions", json={"prompt": "x", "stream": True, "max_tokens": 200}
    )
    events = parse_events(response.text)
    assert [set(event) for event in events[-2:]] == [set(events[0]), {"error"}]
    assert events[-1]["error"]["code"] is None or events[-1]["error"]["type"] == "internal_error"
    assert joined([*events[:-1], "[DONE]"]) == ANSWER[: len(joined([*events[:-1], "[DONE]"]))]
    server.engine.fail_after = None


async def test_one_failed_choice_ends_its_siblings(app: Served) -> None:
    app.engine.fail_after = 2
    body = {"prompt": "x", "n": 3, "stream": True, "max_tokens": 200}
    response = await app.http.post("/v1/completions", json=body)
    events = parse_events(response.text)
    assert "error" in events[-1]
    assert app.engine.stats.num_running == 0
    response = await app.http.post("/v1/completions", json={**body, "stream": False})
    assert response.status_code == 500
    assert response.json()["error"]["type"] == "internal_error"
    app.engine.fail_after = None


async def test_internal_faults_never_show_their_text(app: Served) -> None:
    def broken(request: object) -> list[int]:
        raise RuntimeError("secret path /etc/x")

    app.engine.script = broken
    for is_stream in (False, True):
        response = await app.http.post("/v1/completions", json={"prompt": "x", "stream": is_stream})
        assert response.status_code == 500
        assert "secret" not in response.text
        assert response.json()["error"]["code"] == "internal_error"
    app.engine.script = lambda request: [5]


async def test_silent_stream_gets_comments() -> None:
    async with on_loopback(Setup(limits=ServerLimits(ping_interval_s=0.04))) as served:
        served.engine.step_gate.clear()
        body = {"prompt": "x", "stream": True, "max_tokens": 3}
        connection = await served.raw("/v1/completions", body)
        for _ in range(2):
            await connection.read_until(b": ping\n\n")
        served.engine.step_gate.set()
        assert (await connection.read_all()).count(b"data: ") == 4
        await connection.close()
        await served.check_idle()


async def test_reader_that_stops_is_cut_and_stalls_nobody() -> None:
    """A full buffer blocks only its own stream, which is given up after the limit."""
    setup = Setup(limits=ServerLimits(slow_reader_s=0.4), max_model_len=1_000_000)
    async with on_loopback(setup) as served:
        served.engine.script = lambda request: [5] * 1_000_000
        served.state.limits = ServerLimits(slow_reader_s=0.4)
        body = {"prompt": "x" * 900, "echo": True, "stream": True, "max_tokens": 900_000}
        slow = [await served.raw("/v1/completions", body) for _ in range(3)]
        for connection in slow:
            await connection.read_until(b"\r\n\r\n")
            transport = connection.writer.transport
            assert isinstance(transport, asyncio.ReadTransport)
            transport.pause_reading()
        started = time.monotonic()
        answer = await served.complete(max_tokens=20)
        assert answer["usage"]["completion_tokens"] == 20
        async with asyncio.timeout(30):
            while served.engine.stats.num_running:
                await asyncio.sleep(0.02)
        assert time.monotonic() - started < 30
        assert served.state.metrics.slow_readers_cut == 3
        for connection in slow:
            await connection.close()
        served.engine.script = lambda request: [5]
        await served.check_idle()


async def test_many_streams_do_not_mix(server: Served) -> None:
    async def one(token: int) -> None:
        body = {"prompt": [token], "max_tokens": 30}
        events = await server.events("/v1/completions", body)
        text = server.tokenizer.decode([token] * 30)
        assert joined(events) == text
        check_order(events)

    server.engine.script = lambda request: request.prompt_token_ids * 30
    await asyncio.gather(*(one(token) for token in range(40, 72)))


async def test_prompt_of_a_sentencepiece_model_keeps_its_first_space() -> None:
    async with in_process(Setup(metadata=spm_metadata())) as served:
        tokenizer = served.tokenizer
        served.engine.script = lambda request: tokenizer.encode("river", add_bos=False)
        answer = await served.complete(prompt="the", max_tokens=50, echo=True)
        assert answer["choices"][0]["text"] == "the river"
