"""The requests of lm-eval's `local-completions`, as recorded from an unmodified run of 0.4.13.

`docs/evaluating.md` has the command; this guards what it needs: remote tokenization, and scores of
given texts (echo with log-probabilities) that are those of the model itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from caudal import LLM, SamplingParams
from tests.server.test_real_engine import RealServer, serving

pytestmark = pytest.mark.asyncio(loop_scope="module")

QUESTIONS = ("The river runs through the", "Two plus two equals", "Grüße aus")
CHOICES = (" old town", " four", " 日本 🐟")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tiny_model: Path) -> AsyncIterator[RealServer]:
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(2))
    async with serving(tiny_model) as server:
        yield server
        await server.check_idle()


async def encode(server: RealServer, text: str) -> list[int]:
    body = {"prompt": text, "add_special_tokens": False}
    response = await server.http.post("/tokenize", json=body)
    assert response.status_code == 200, response.text
    ids: list[int] = response.json()["tokens"]
    return ids


async def score(server: RealServer, prompts: Sequence[list[int]]) -> list[dict[str, Any]]:
    """The choices of one request, by index."""
    body = {
        "model": "tiny",
        "prompt": list(prompts),
        "temperature": 0,
        "max_tokens": 1,
        "logprobs": 1,
        "seed": 1234,
        "echo": True,
    }
    response = await server.http.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    return sorted(response.json()["choices"], key=lambda choice: choice["index"])


def likelihood(choice: dict[str, Any], num_context: int) -> tuple[float, bool]:
    """Of what follows the context, without the sampled token; and whether greedy gives it."""
    given = choice["logprobs"]["token_logprobs"][num_context:-1]
    best = [max(top.values()) for top in choice["logprobs"]["top_logprobs"][num_context:-1]]
    return sum(given), given == best


async def test_harness_finds_the_remote_tokenizer(server: RealServer) -> None:
    info = (await server.http.get("/tokenizer_info")).json()
    assert isinstance(info["eos_token"], str)
    assert len(await encode(server, info["eos_token"])) == 1
    assert info["model_max_length"] == 512
    assert info["chat_template"] is None or "{%" in info["chat_template"]
    ids = await encode(server, QUESTIONS[0])
    answer = await server.http.post("/detokenize", json={"tokens": ids})
    assert answer.json() == {"prompt": QUESTIONS[0]}


async def test_likelihoods_are_those_of_the_model_whatever_the_batch_size(
    server: RealServer, tiny_model: Path
) -> None:
    """B13, B15: to the bit those of the model in this process, one by one or together."""
    pairs = [(question, choice) for question in QUESTIONS for choice in CHOICES]
    prompts = [await encode(server, question + choice) for question, choice in pairs]
    contexts = [len(await encode(server, question)) for question, _ in pairs]
    together = await score(server, prompts)
    model = LLM(tiny_model, num_threads=1)
    sampling = SamplingParams(max_tokens=0, num_prompt_logprobs=1)
    for number, offline in enumerate(model.generate(prompts, sampling)):
        (alone,) = await score(server, [prompts[number]])
        positions = offline.prompt_logprobs[contexts[number] - 1 :]
        expected = sum(position.logprob for position in positions)
        is_greedy = all(position.rank == 1 for position in positions)
        for choice in (alone, together[number]):
            assert choice["logprobs"]["token_logprobs"][0] is None
            assert likelihood(choice, contexts[number]) == (expected, is_greedy)


async def test_continuation_of_the_greedy_answer_counts_as_greedy(
    server: RealServer, tiny_model: Path
) -> None:
    context = await encode(server, QUESTIONS[0])
    sampling = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    (greedy,) = LLM(tiny_model, num_threads=1).generate([context], sampling)
    for token_ids, is_greedy in ((greedy.token_ids, True), (greedy.token_ids[::-1], False)):
        (choice,) = await score(server, [context + token_ids])
        assert likelihood(choice, len(context))[1] is is_greedy


async def test_generation_until_a_text_ends_there(server: RealServer) -> None:
    body = {
        "prompt": [await encode(server, question) for question in QUESTIONS],
        "model": "tiny",
        "max_tokens": 16,
        "temperature": 0,
        "stop": ["\n", "<|im_end|>"],
        "seed": 1234,
    }
    response = await server.http.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    choices = response.json()["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2]
    assert not any("\n" in choice["text"] for choice in choices)
