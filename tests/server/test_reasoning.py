"""Reasoning in chat completions: taken off the answer, wherever the prompt leaves it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from caudal.config import ServerConfig
from tests.server.harness import ANSWER, in_process
from tests.server.test_tools import PATH, USER, both, sent_text
from tests.server.tool_models import TOOLS, tool_setup, written


async def test_reasoning_that_never_ends_is_all_reasoning() -> None:
    """B81: the template ends with the opening mark; both modes."""
    async with in_process(tool_setup("thinking", "hm, so " * 30)) as served:
        answer = await both(served, max_tokens=20)
    assert answer["content"] == ""
    assert "hm, so hm" in answer["reasoning_content"]
    assert answer["finish_reason"] == "length"


async def test_marks_after_the_reasoning_stay_literal() -> None:
    """B83"""
    text = "Use `<think>draft</think>` as the tag"
    async with in_process(tool_setup("thinking", f"hm\n</think>\n\n{text}")) as served:
        answer = await both(served)
        with_tools = await both(served, tools=TOOLS)
    assert answer == with_tools
    assert (answer["content"], answer["reasoning_content"]) == (text, "hm")


@pytest.mark.parametrize(
    ("answer", "content", "reasoning"),
    [
        ("<think>\nhm\n</think>\n\nYes.", "Yes.", "hm"),
        ("Yes.", "Yes.", ""),
        ("<b>Yes.</b>", "<b>Yes.</b>", ""),
        ("Yes.</think>", "Yes.</think>", ""),
    ],
)
async def test_model_decides_where_the_prompt_leaves_it_open(
    answer: str, content: str, reasoning: str
) -> None:
    async with in_process(tool_setup("undecided", answer)) as served:
        found = await both(served)
    assert (found["content"], found["reasoning_content"]) == (content, reasoning)


async def test_template_variables_switch_reasoning_off() -> None:
    async with in_process(tool_setup("thinking", ANSWER)) as served:
        for fields in (
            {"chat_template_kwargs": {"enable_thinking": False}},
            {"reasoning_effort": "none"},
        ):
            answer = await both(served, **fields)
            assert (answer["content"], answer["reasoning_content"]) == (ANSWER, "")
            assert "</think>" in sent_text(served)
        await both(served, reasoning_effort="high")
        assert sent_text(served).endswith("<think>\nhigh")


async def test_reasoning_is_left_out_if_not_wanted() -> None:
    async with in_process(tool_setup("thinking", "hm</think>Yes.")) as served:
        answer = await both(served, include_reasoning=False)
        usage = (await served.chat(include_reasoning=False))["usage"]
    assert (answer["content"], answer["reasoning_content"]) == ("Yes.", "")
    assert usage["completion_tokens_details"]["reasoning_tokens"] > 2


async def test_usage_counts_reasoning_tokens_alike_in_both_modes() -> None:
    """B45"""
    text = "hm, so\n</think>\n\nYes."
    async with in_process(tool_setup("thinking", text)) as served:
        usage = (await served.chat(n=2))["usage"]
        fields = {"n": 2, "stream_options": {"include_usage": True}}
        events = await served.events(PATH, {"messages": USER, **fields})
        num_thought = len(served.tokenizer.encode("hm, so\n</think>"))
        plain = (await served.chat(chat_template_kwargs={"enable_thinking": False}))["usage"]
    assert events[-2]["usage"] == usage
    assert abs(usage["completion_tokens_details"]["reasoning_tokens"] - 2 * num_thought) <= 2
    assert "completion_tokens_details" not in plain


async def test_reasoning_and_calls_share_an_answer() -> None:
    text = "hm\n</think>\n\nSure.\n" + written("thinking", ("add", '{"a": 1, "b": 2}'))
    async with in_process(tool_setup("thinking", text)) as served:
        answer = await both(served, tools=TOOLS)
    assert (answer["reasoning_content"], answer["content"]) == ("hm", "Sure.")
    assert [call["name"] for call in answer["tool_calls"]] == ["add"]
    assert answer["finish_reason"] == "tool_calls"


async def test_continued_answer_goes_on_where_its_message_ends() -> None:
    for prefix, content, reasoning in (
        ("<think>well", "Yes.", "hm"),
        ("Well,", "hm</think>Yes.", ""),
    ):
        messages = [*USER, {"role": "assistant", "content": prefix}]
        body = {"messages": messages, "continue_final_message": True}
        async with in_process(tool_setup("thinking", "hm</think>Yes.")) as served:
            response = await served.http.post(PATH, json=body)
        message = response.json()["choices"][0]["message"]
        assert (message["content"], message.get("reasoning_content", "")) == (content, reasoning)


async def test_earlier_reasoning_reaches_the_template_under_either_name() -> None:
    for name in ("reasoning_content", "reasoning"):
        messages: list[Any] = [*USER, {"role": "assistant", "content": "Yes.", name: "hm"}, *USER]
        async with in_process(tool_setup("thinking", ANSWER)) as served:
            await served.http.post(PATH, json={"messages": messages})
            assert "<think>hm</think>Yes.<|im_end|>" in sent_text(served)


async def test_parser_of_the_command_line_wins() -> None:
    text = "[THINK]hm[/THINK]Yes."
    for name, content in (("mistral", "Yes."), ("none", text), ("auto", text)):
        config = ServerConfig(port=0, reasoning_parser=name)
        async with in_process(tool_setup("json", text, config=config)) as served:
            assert (await both(served))["content"] == content


async def test_stop_string_and_reasoning_in_both_modes() -> None:
    """B37, B45: a stop string ends reasoning too, and nothing of it is shown."""
    text = "hm, so\n\nUser: x</think>Yes."
    async with in_process(tool_setup("thinking", text)) as served:
        answer = await both(served, stop=["\n\nUser:"])
    assert (answer["reasoning_content"], answer["content"]) == ("hm, so", "")
    assert answer["finish_reason"] == "stop"


async def test_completions_do_not_split() -> None:
    async with in_process(tool_setup("thinking", "<think>hm</think>Yes.")) as served:
        answer = await served.complete(max_tokens=200)
    assert answer["choices"][0]["text"] == "<think>hm</think>Yes."
    assert "completion_tokens_details" not in json.dumps(answer)
