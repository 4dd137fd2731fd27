"""`/v1/completions`: shapes, choices, echo, log-probabilities, stop strings, usage."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests.server.harness import ANSWER, Served, Setup, in_process
from tests.tiny_vocabulary import bpe_metadata


async def test_openai_client_reads_the_answer(server: Served) -> None:
    answer = await server.openai.completions.create(
        model="tiny", prompt="hello", max_tokens=200, temperature=0
    )
    assert answer.object == "text_completion"
    assert answer.id.startswith("cmpl-")
    assert answer.choices[0].text == ANSWER
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len(server.tokenizer.encode(ANSWER)) + 1


async def test_default_max_tokens_is_16(app: Served) -> None:
    app.engine.script = lambda request: [5] * 100
    answer = await app.complete()
    assert answer["usage"]["completion_tokens"] == 16
    assert answer["choices"][0]["finish_reason"] == "length"


async def test_prompts_times_n_get_their_indices_in_order(app: Served) -> None:
    """B23: a prompt counts once; cached tokens are those from before the request."""
    app.engine.num_cached = 1
    app.engine.script = lambda request: [request.prompt_token_ids[0]]
    answer = await app.complete(prompt=[[5, 6], [7]], n=3, max_tokens=1)
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    texts = [choice["text"] for choice in answer["choices"]]
    assert texts[:3] == [texts[0]] * 3
    assert texts[3:] == [texts[3]] * 3
    assert texts[0] != texts[3]
    assert answer["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 6,
        "total_tokens": 9,
        "prompt_tokens_details": {"cached_tokens": 2},
    }
    requests = app.engine.accepted
    assert {request.parent_id for request in requests} == {answer["id"]}
    assert {request.num_siblings for request in requests} == {6}
    assert len({request.request_id for request in requests}) == 6


async def test_choices_get_different_but_fixed_seeds(app: Served) -> None:
    """B21."""
    await app.complete(n=3, seed=7, max_tokens=1)
    assert [request.sampling.seed for request in app.engine.accepted] == [7, 8, 9]
    app.engine.accepted.clear()
    await app.complete(n=2, seed=2**63 - 1, max_tokens=1)
    assert [request.sampling.seed for request in app.engine.accepted] == [2**63 - 1, -(2**63)]


async def test_texts_and_token_ids_are_equal_prompts(app: Served) -> None:
    ids = app.tokenizer.encode("the river")
    for prompt in ("the river", ["the river"], ids, [ids]):
        app.engine.accepted.clear()
        await app.complete(prompt=prompt, max_tokens=1)
        assert app.engine.accepted[0].prompt_token_ids == ids


async def test_empty_prompt_starts_from_bos(app: Served) -> None:
    """B01."""
    for prompt in ("", [""]):
        await app.complete(prompt=prompt, max_tokens=2)
        assert app.engine.accepted[-1].prompt_token_ids == [0]


async def test_empty_prompt_without_bos_is_refused() -> None:
    """B01."""
    metadata = bpe_metadata("smollm")
    del metadata["tokenizer.ggml.bos_token_id"]
    async with in_process(Setup(metadata=metadata)) as served:
        for prompt in ("", [""], ["x", ""]):
            response = await served.http.post("/v1/completions", json={"prompt": prompt})
            assert response.status_code == 400
            assert response.json()["error"]["param"] == "prompt"


async def test_echo_with_no_new_tokens_scores_the_prompt(app: Served) -> None:
    """B13: lm-eval's way of scoring a text."""
    text = "Your answer: Yes"
    answer = await app.complete(prompt=text, max_tokens=0, echo=True, logprobs=1)
    choice = answer["choices"][0]
    assert choice["text"] == text
    assert answer["usage"]["completion_tokens"] == 0
    assert choice["finish_reason"] == "length"
    logprobs = choice["logprobs"]
    assert "".join(logprobs["tokens"]) == text
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    assert all(math.isfinite(value) for value in logprobs["token_logprobs"][1:])
    assert [text[o:].startswith(t) for o, t in zip(
        logprobs["text_offset"], logprobs["tokens"], strict=True
    )] == [True] * len(logprobs["tokens"])  # fmt: skip


async def test_echo_puts_the_prompt_before_the_answer(app: Served) -> None:
    answer = await app.complete(prompt="hello ", echo=True, max_tokens=200)
    assert answer["choices"][0]["text"] == "hello " + ANSWER
    ids = app.tokenizer.encode("hello ")
    answer = await app.complete(prompt=ids, echo=True, max_tokens=200)
    assert answer["choices"][0]["text"] == "hello " + ANSWER


async def test_logprobs_cover_every_sampled_token_and_are_finite(app: Served) -> None:
    """B15: minus infinity never reaches JSON."""
    answer = await app.complete(prompt="hi", logprobs=3, max_tokens=4)
    logprobs = answer["choices"][0]["logprobs"]
    assert len(logprobs["tokens"]) == answer["usage"]["completion_tokens"] == 4
    assert logprobs["text_offset"] == [0, 1, 3, 9]
    for top in logprobs["top_logprobs"]:
        assert len(top) == 3
        assert min(top.values()) == -9999.0


async def test_logprobs_zero_gives_only_the_sampled_token(app: Served) -> None:
    answer = await app.complete(prompt="hi", logprobs=0, max_tokens=1)
    logprobs = answer["choices"][0]["logprobs"]
    assert logprobs["top_logprobs"] == [{logprobs["tokens"][0]: -0.25}]


async def test_partial_characters_have_distinct_names_in_logprobs(app: Served) -> None:
    euro = app.tokenizer.encode("€")
    app.engine.script = lambda request: [*euro]
    answer = await app.complete(logprobs=1, max_tokens=3)
    choice = answer["choices"][0]
    assert choice["text"] == "€"
    assert choice["logprobs"]["tokens"] == ["bytes:\\xe2", "bytes:\\x82", "bytes:\\xac"]


@pytest.mark.parametrize("num_top", [0, 9, 20])
async def test_prompt_logprobs_within_the_limit_work(app: Served, num_top: int) -> None:
    """B19."""
    answer = await app.complete(prompt=[5, 6, 7], prompt_logprobs=num_top, max_tokens=1)
    entries = answer["choices"][0]["prompt_logprobs"]
    assert entries[0] is None
    assert [len(entry) for entry in entries[1:]] == [max(1, num_top)] * 2
    own = entries[1]["6"]
    assert own["rank"] == 1
    assert own["decoded_token"] == app.tokenizer.token_text(6)
    assert all(c["logprob"] >= -9999 for entry in entries[1:] for c in entry.values())


async def test_prompt_logprobs_of_a_long_prompt_stay_small() -> None:
    """B19: 3,000 tokens × 20 candidates as encoded bytes, not as millions of objects."""
    async with in_process(Setup(max_model_len=4096)) as served:
        answer = await served.complete(prompt=[5] * 3000, prompt_logprobs=20, max_tokens=1)
        assert len(answer["choices"][0]["prompt_logprobs"]) == 3000


STOP_CASES: list[tuple[dict[str, Any], str, str | None]] = [
    ({"stop": "ld tow"}, "the river runs through the o", "ld tow"),
    ({"stop": ["zzz", " old"]}, "the river runs through the", " old"),
    (
        {"stop": " old", "include_stop_str_in_output": True},
        "the river runs through the old",
        " old",
    ),
    ({"stop": ["river", "ver r"]}, "the ", "river"),
    ({"stop": "zzz"}, ANSWER, None),
]


@pytest.mark.parametrize(("fields", "text", "stop"), STOP_CASES)
async def test_stop_string_ends_the_text_and_frees_the_request(
    app: Served, fields: dict[str, Any], text: str, stop: str | None
) -> None:
    """B33, B35: matched across token boundaries; the engine stops computing."""
    answer = await app.complete(max_tokens=200, **fields)
    choice = answer["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (text, "stop")
    assert choice["stop_reason"] == stop
    if stop is not None:
        assert app.engine.aborted == [answer["id"]]


async def test_usage_with_a_stop_string_counts_tokens_up_to_the_match(app: Served) -> None:
    """B45."""
    answer = await app.complete(max_tokens=200, stop="river", logprobs=0)
    assert answer["usage"]["completion_tokens"] == 3
    assert answer["choices"][0]["logprobs"]["tokens"] == ["t", "he", " river"]


async def test_stop_token_is_named_and_not_shown(app: Served) -> None:
    river = app.tokenizer.encode(" river")[0]
    answer = await app.complete(max_tokens=200, stop_token_ids=[river])
    choice = answer["choices"][0]
    assert (choice["text"], choice["stop_reason"]) == ("the", river)
    answer = await app.complete(
        max_tokens=200, stop_token_ids=[river], include_stop_str_in_output=True
    )
    assert answer["choices"][0]["text"] == "the river"


async def test_end_of_generation_is_neither_shown_nor_named(app: Served) -> None:
    answer = await app.complete(max_tokens=200, skip_special_tokens=False)
    choice = answer["choices"][0]
    assert (choice["text"], choice["stop_reason"]) == (ANSWER, None)


async def test_ignore_eos_runs_to_max_tokens(app: Served) -> None:
    """B29."""
    answer = await app.complete(max_tokens=100, ignore_eos=True)
    assert answer["usage"]["completion_tokens"] == 100
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["choices"][0]["text"] == ANSWER


async def test_cached_tokens_are_always_reported(app: Served) -> None:
    """B123."""
    assert (await app.complete())["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    app.engine.num_cached = 1
    assert (await app.complete())["usage"]["prompt_tokens_details"] == {"cached_tokens": 1}


async def test_long_prompt_is_tokenized_beside_the_event_loop() -> None:
    async with in_process(Setup(max_model_len=8192)) as served:
        text = "the river runs " * 400
        answer = await served.complete(prompt=text, max_tokens=1)
        expected = served.tokenizer.encode(text)
        assert answer["usage"]["prompt_tokens"] == len(expected)
        assert served.engine.accepted[0].prompt_token_ids == expected


async def test_special_tokens_written_in_a_raw_prompt_count(app: Served) -> None:
    """B89: the caller of raw completions owns the whole prompt."""
    await app.complete(prompt="a<|im_end|>", max_tokens=1)
    assert app.engine.accepted[0].prompt_token_ids[-1] == 2
