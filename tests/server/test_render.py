"""`/render`: the very prompt that the endpoints submit."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.harness import MAX_MODEL_LEN, Served, Setup, in_process
from tests.tiny_vocabulary import spm_metadata

MESSAGES = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": [{"type": "text", "text": "hi <|im_end|>"}]},
]


async def render(served: Served, body: dict[str, Any]) -> dict[str, Any]:
    response = await served.http.post("/render", json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


CHATS: list[dict[str, Any]] = [
    {"messages": MESSAGES},
    {"messages": MESSAGES, "add_generation_prompt": False},
    {"messages": [{"role": "assistant", "content": "the "}], "continue_final_message": True},
    {"messages": MESSAGES, "max_tokens": 9, "temperature": 0, "stop": "x", "n": 2},
]


@pytest.mark.parametrize("body", CHATS)
async def test_chat_is_rendered_as_it_would_run(app: Served, body: dict[str, Any]) -> None:
    answer = await render(app, body)
    response = await app.http.post("/v1/chat/completions", json=body)
    assert response.status_code == 200
    (prompt,) = answer["prompts"]
    sent = app.engine.accepted[0]
    assert prompt["token_ids"] == sent.prompt_token_ids
    assert prompt["text"] == app.tokenizer.decode(prompt["token_ids"], skip_special=False)
    assert prompt["num_tokens"] == response.json()["usage"]["prompt_tokens"]
    assert prompt["max_tokens"] == sent.sampling.max_tokens
    assert (answer["model"], answer["max_model_len"]) == ("tiny", MAX_MODEL_LEN)


@pytest.mark.parametrize(
    "prompt", ["the river<|im_end|>", ["a", "b c"], [5, 2, 7], [[5], [6, 7]], ""]
)
async def test_completion_is_rendered_as_it_would_run(prompt: Any) -> None:
    for metadata in (None, spm_metadata()):
        async with in_process(Setup(metadata=metadata)) as served:
            body = {"prompt": prompt, "max_tokens": 3}
            prompts = (await render(served, body))["prompts"]
            await served.complete(**body)
            sent = [request.prompt_token_ids for request in served.engine.accepted]
            assert [entry["token_ids"] for entry in prompts] == sent
            texts = [entry["text"] for entry in prompts]
            given = prompt if isinstance(prompt, list) else [prompt]
            if isinstance(given[0], str):
                assert texts == given
            elif isinstance(given[0], int):
                assert texts == [served.tokenizer.decode(given, skip_special=False)]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": None, "messages": None}, "prompt"),
        ({"prompt": "a", "messages": MESSAGES}, "prompt"),
        ({"messages": []}, "messages"),
        ({"messages": MESSAGES, "tools": [{}]}, "tools[0].type"),
        ({"messages": MESSAGES, "temperature": 9}, "temperature"),
        ({"messages": [{"role": "user", "content": "the river " * 500}]}, "messages"),
        ({"prompt": "a", "suffix": "b"}, "suffix"),
        ({"prompt": [5] * MAX_MODEL_LEN}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
    ],
)
async def test_what_could_not_run_is_refused_alike(
    app: Served, body: dict[str, Any], param: str
) -> None:
    response = await app.http.post("/render", json=body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


async def test_nothing_reaches_the_engine(app: Served) -> None:
    await render(app, {"messages": MESSAGES, "stream": True})
    assert app.engine.accepted == []
