"""Bad fields are refused with 400 and the field's name, before anything runs."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.harness import MAX_MODEL_LEN, MODEL, Served

USER = [{"role": "user", "content": "hi"}]
BASE = {"/v1/completions": {"prompt": "hi"}, "/v1/chat/completions": {"messages": USER}}

COMMON_BAD_FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 2.01}, "temperature"),
    ({"temperature": "1"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.5}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 1.5}, "top_k"),
    ({"top_k": 2**31}, "top_k"),
    ({"min_p": -0.01}, "min_p"),
    ({"min_p": 1.01}, "min_p"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"max_tokens": 10**30}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
    ({"presence_penalty": 2.1}, "presence_penalty"),
    ({"frequency_penalty": -2.1}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"repetition_penalty": 5e-324}, "repetition_penalty"),
    ({"seed": 2**63}, "seed"),
    ({"seed": 1.5}, "seed"),
    ({"n": 0}, "n"),
    ({"n": 129}, "n"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a", ""]}, "stop"),
    ({"stop": ["x"] * 33}, "stop"),
    ({"stop": "x" * 1025}, "stop"),
    ({"stop": 5}, "stop"),
    ({"stop_token_ids": [151645000]}, "stop_token_ids"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"stop_token_ids": ["a"]}, "stop_token_ids"),
    ({"logit_bias": {"191222": -100}}, "logit_bias"),
    ({"logit_bias": {"-1": 5}}, "logit_bias"),
    ({"logit_bias": {str(2**31): 5}}, "logit_bias"),
    ({"logit_bias": {str(2**63): 5}}, "logit_bias"),
    ({"logit_bias": {"9" * 5000: 5}}, "logit_bias"),
    ({"logit_bias": {"\u0663": 5}}, "logit_bias"),
    ({"logit_bias": {"": 5}}, "logit_bias"),
    ({"logit_bias": {"5": 101}}, "logit_bias"),
    ({"logit_bias": {"5": "x"}}, "logit_bias"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"logit_bias": {str(i): 1 for i in range(4097)}}, "logit_bias"),
    ({"prompt_logprobs": -1}, "prompt_logprobs"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ({"priority": 2**31}, "priority"),
    ({"priority": 0.5}, "priority"),
    ({"stream": "yes"}, "stream"),
    ({"stream": 1}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"ignore_eos": 1}, "ignore_eos"),
    ({"user": 5}, "user"),
    ({"cache_salt": ""}, "cache_salt"),
    ({"model": 5}, "model"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {}}},
        "response_format.json_schema.schema",
    ),
    ({"guided_regex": "("}, "guided_regex"),
    ({"service_tier": "gold"}, "service_tier"),
    ({"use_beam_search": True}, "use_beam_search"),
    ({"length_penalty": 2}, "length_penalty"),
    ({"bad_words": ["x"]}, "bad_words"),
    ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
]
COMPLETION_BAD_FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": [[1], []]}, "prompt"),
    ({"prompt": ["a", 1]}, "prompt"),
    ({"prompt": ["a", [1]]}, "prompt"),
    ({"prompt": [1, [1]]}, "prompt"),
    ({"prompt": [[1, "a"]]}, "prompt"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"prompt": {"a": 1}}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [10**6]}, "prompt"),
    ({"prompt": [2**70]}, "prompt"),
    ({"prompt": [True]}, "prompt"),
    ({"prompt": ["a"] * 1025}, "prompt"),
    ({"prompt": "", "add_special_tokens": False}, "prompt"),
    ({"prompt": ["a"] * 100, "n": 11}, "n"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": -1}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"best_of": 3}, "best_of"),
    ({"best_of": 3, "n": 2}, "best_of"),
    ({"suffix": "x"}, "suffix"),
    ({"echo": 1}, "echo"),
    ({"min_tokens": 17}, "min_tokens"),
]
CHAT_BAD_FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": None}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [5]}, "messages"),
    ({"messages": [{"content": "hi"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
    ({"messages": [*USER, {"role": "tool", "content": "x"}]}, "messages[1].tool_call_id"),
    (
        {"messages": [{"role": "assistant", "content": "x", "tool_calls": [{"id": "1"}]}]},
        "messages[0].tool_calls[0].function",
    ),
    ({"messages": [{"role": "user", "content": "x", "name": 5}]}, "messages[0].name"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"max_completion_tokens": -1}, "max_completion_tokens"),
    ({"logprobs": 5}, "logprobs"),
    ({"top_logprobs": 5}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"functions": [{}]}, "functions"),
    ({"modalities": ["audio"]}, "modalities"),
    ({"audio": {}}, "audio"),
    ({"reasoning_effort": "high"}, "reasoning_effort"),
    ({"chat_template": "{{ 1 }}"}, "chat_template"),
    ({"best_of": 2}, "best_of"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"bos_token": "x"}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": 5}, "chat_template_kwargs"),
    (
        {"continue_final_message": True, "add_generation_prompt": True},
        "continue_final_message",
    ),
]
BAD_REQUESTS = [
    *(("/v1/completions", *case) for case in COMMON_BAD_FIELDS + COMPLETION_BAD_FIELDS),
    *(("/v1/chat/completions", *case) for case in COMMON_BAD_FIELDS + CHAT_BAD_FIELDS),
    ("/tokenize", {}, "prompt"),
    ("/tokenize", {"prompt": "x", "messages": USER}, "prompt"),
    ("/tokenize", {"prompt": 5}, "prompt"),
    ("/detokenize", {}, "tokens"),
    ("/detokenize", {"tokens": [10**6]}, "tokens"),
    ("/detokenize", {"tokens": [-1]}, "tokens"),
    ("/detokenize", {"tokens": "abc"}, "tokens"),
]


@pytest.mark.parametrize("is_stream", [False, True])
async def test_bad_field_is_refused_by_name(app: Served, is_stream: bool) -> None:
    """B01, B09, B11, B19: every case of the table, with and without stream."""
    for path, fields, param in BAD_REQUESTS:
        body = {**BASE.get(path, {}), **({"stream": True} if is_stream else {}), **fields}
        if "stream_options" in fields and "stream" not in fields:
            body.pop("stream", None)
        response = await app.http.post(path, json=body)
        case = f"{path} {str(fields)[:80]}: {response.text}"
        assert response.status_code == 400, case
        assert response.headers["content-type"] == "application/json", case
        error = response.json()["error"]
        assert error["param"] == param, case
        assert error["type"] == "invalid_request_error", case
        assert param.split(".")[0].split("[")[0] in error["message"], case
        assert error.keys() == {"message", "type", "param", "code"}, case
    assert app.engine.accepted == []


async def test_bad_token_id_is_in_the_message(app: Served) -> None:
    response = await app.http.post(
        "/v1/completions", json={"prompt": "x", "logit_bias": {"99999": 5}}
    )
    assert "'99999'" in response.json()["error"]["message"]


async def test_limits_themselves_are_accepted(app: Served) -> None:
    await app.complete(
        temperature=2, top_p=1, top_k=-1, min_p=1, presence_penalty=-2, frequency_penalty=2,
        repetition_penalty=1.5, seed=-(2**63), n=2, stop=["x"] * 32, max_tokens=2, logprobs=20,
        prompt_logprobs=20, priority=-5, user="me", best_of=2, logit_bias={"5": -100, "6": 100},
        stop_token_ids=[5], min_tokens=2, ignore_eos=True, skip_special_tokens=False,
        cache_salt="s", add_special_tokens=True, include_stop_str_in_output=True,
    )  # fmt: skip
    sampling = app.engine.accepted[0].sampling
    assert sampling.top_k == 0
    assert sampling.logit_bias == {5: -100.0, 6: 100.0}
    assert app.engine.accepted[0].namespace == "s"
    assert app.engine.accepted[0].priority == -5


async def test_null_and_neutral_values_mean_the_default(app: Served) -> None:
    """B31: what asks for nothing is accepted; unknown fields are ignored."""
    await app.chat(
        temperature=None, top_p=None, n=None, stop=None, max_tokens=1, logit_bias=None, tools=[],
        tool_choice="none", response_format={"type": "text"}, service_tier="auto", store=False,
        modalities=["text"], functions=None, logprobs=False, top_logprobs=0, banana=1,
        metadata={"a": "b"}, parallel_tool_calls=True, stream=None, stream_options=None,
    )  # fmt: skip
    await app.complete(suffix="", best_of=1, max_tokens=1, echo=None, banana={"deep": [1]})
    assert app.engine.accepted[0].sampling.temperature == 1.0


async def test_unknown_field_is_logged_once_and_bounded(
    app: Served, caplog: pytest.LogCaptureFixture
) -> None:
    """B31: visible to the operator, and no way to flood the log."""
    for number in range(400):
        await app.complete(max_tokens=1, banana=1, **{f"field{number}": 1, "x" * 500: 2})
    messages = [record.getMessage() for record in caplog.records]
    assert messages.count("request field 'banana' is unknown and ignored") == 1
    assert len(messages) <= 256
    assert max(map(len, messages)) < 120


async def test_true_is_not_one_among_neutral_values(app: Served) -> None:
    response = await app.http.post("/v1/completions", json={"prompt": "x", "length_penalty": True})
    assert response.json()["error"]["param"] == "length_penalty"


async def test_whole_floats_count_as_integers(app: Served) -> None:
    answer = await app.complete(max_tokens=3.0, n=1.0, prompt=[5.0, 6.0])
    assert answer["usage"] == {
        "prompt_tokens": 2,
        "completion_tokens": 3,
        "total_tokens": 5,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


async def test_unknown_model_is_404_and_empty_is_the_served_one(app: Served) -> None:
    """B27."""
    for path, base in BASE.items():
        response = await app.http.post(path, json={**base, "model": "nope"})
        assert response.status_code == 404
        assert response.json()["error"]["code"] == "model_not_found"
        for name in ("", None, MODEL):
            response = await app.http.post(path, json={**base, "model": name, "max_tokens": 1})
            assert response.status_code == 200


async def test_unknown_path_and_wrong_method_are_json_errors(app: Served) -> None:
    """B27."""
    response = await app.http.get("/v1/nope")
    assert (response.status_code, response.json()["error"]["code"]) == (404, "not_found")
    response = await app.http.get("/v1/completions")
    assert response.status_code == 405
    assert response.headers["allow"] == "POST"
    assert response.json()["error"]["code"] == "method_not_allowed"
    response = await app.http.delete("/v1/models")
    assert response.status_code == 405


async def test_too_long_prompt_names_its_length_the_limit_and_max_tokens(app: Served) -> None:
    """B25: never truncated."""
    response = await app.http.post(
        "/v1/completions", json={"prompt": [5] * (MAX_MODEL_LEN + 3), "max_tokens": 7}
    )
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (400, "context_length_exceeded")
    for number in (MAX_MODEL_LEN + 3, MAX_MODEL_LEN, 7):
        assert str(number) in error["message"]
    body = {"messages": [{"role": "user", "content": "x y z " * MAX_MODEL_LEN}]}
    response = await app.http.post("/v1/chat/completions", json=body)
    error = response.json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")


async def test_enormous_prompt_is_refused_without_being_tokenized(app: Served) -> None:
    response = await app.http.post("/v1/completions", json={"prompt": "a b c " * 2_000_000})
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (400, "context_length_exceeded")
    assert "at least" in error["message"]


async def test_too_large_max_tokens_is_clamped_and_ends_with_length(app: Served) -> None:
    app.engine.script = lambda request: [5] * 10_000
    answer = await app.complete(prompt=[5] * (MAX_MODEL_LEN - 4), max_tokens=100)
    assert answer["usage"]["completion_tokens"] == 4
    assert answer["choices"][0]["finish_reason"] == "length"
    answer = await app.chat(min_tokens=5)
    assert answer["usage"]["total_tokens"] == MAX_MODEL_LEN


async def test_prompt_that_fills_the_context_leaves_room_for_nothing(app: Served) -> None:
    full = [5] * MAX_MODEL_LEN
    response = await app.http.post("/v1/completions", json={"prompt": full, "max_tokens": 1})
    assert response.json()["error"]["code"] == "context_length_exceeded"
    answer = await app.complete(prompt=full, max_tokens=0)
    assert answer["usage"]["total_tokens"] == MAX_MODEL_LEN
