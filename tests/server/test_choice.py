"""A choice with a parser: however many tokens come at once, the same parts and counts."""

from __future__ import annotations

import random

import pytest

from caudal.sampling_params import SamplingParams
from caudal.scheduler.output import FinishReason, RequestOutput
from caudal.server.generation.choice import Choice
from caudal.server.generation.plan import GenerationPlan, Prompt, TextRules
from caudal.server.model import ServedModel
from caudal.server.parsers.output_parser import OutputRules, ReasoningRules, ToolRules
from caudal.server.parsers.parts import CallStart, Part, joined
from caudal.server.parsers.reasoning import THINK, ReasoningState
from caudal.server.parsers.tool_formats import TOOL_FORMATS
from tests.server.harness import make_model
from tests.server.test_output_parser import NAMES, random_answer
from tests.server.tool_models import tool_metadata

Result = tuple[str, str, list[tuple[str, str]], str, int, int]


def plan_for(rules: OutputRules, stop: tuple[str, ...]) -> GenerationPlan:
    return GenerationPlan(
        request_id="r",
        arrival=0.0,
        prompts=[Prompt([5, 6], "x", 1000)],
        n=1,
        sampling=SamplingParams(),
        text=TextRules(stop=stop, shown_token_ids=frozenset(range(356, 360))),
        output=rules,
    )


def run(model: ServedModel, plan: GenerationPlan, groups: list[list[int]]) -> Result:
    choice = Choice(plan, model, 0, "r")
    parts: list[Part] = []
    for number, group in enumerate(groups):
        output = RequestOutput(request_id="r", new_token_ids=group)
        if number == len(groups) - 1:
            output.finish_reason = FinishReason.STOP
        assert choice.feed(output) == ""
        parts += choice.take_parts()
        if choice.finish_reason is not None:
            break
    starts = [part.index for part in parts if isinstance(part, CallStart)]
    assert starts == list(range(len(starts)))
    answer = joined(parts)
    calls = [(call.name, call.arguments) for call in answer.calls]
    counts = choice.num_output_tokens, choice.num_reasoning_tokens
    return answer.reasoning, answer.content, calls, choice.outcome, *counts


def grouped(ids: list[int], chance: random.Random) -> list[list[int]]:
    groups = []
    while ids:
        size = chance.randint(1, 7)
        groups.append(ids[:size])
        ids = ids[size:]
    return groups or [[]]


@pytest.mark.parametrize("name", ["hermes", "llama3_json", "mistral", "json"])
def test_tokens_come_in_any_groups(name: str) -> None:
    """B45: random answers, tokenised at random, in random groups; with stop strings and limits."""
    model = make_model(tool_metadata(name))
    for seed in range(120):
        chance = random.Random(seed)
        text = random_answer(chance)
        reasoning = ReasoningRules(THINK, chance.choice(list(ReasoningState)))
        tools = ToolRules(TOOL_FORMATS[name], NAMES, chance.choice([None, 1]))
        rules = OutputRules(chance.choice([None, reasoning]), tools)
        plan = plan_for(rules, chance.choice([(), ("text",), ("}}", "x" * 7)]))
        one_by_one = split_tokens(model, text, chance)
        expected = run(model, plan, [[token_id] for token_id in one_by_one] or [[]])
        for _ in range(3):
            assert run(model, plan, grouped(one_by_one, chance)) == expected, text
        other = run(model, plan, [[i] for i in split_tokens(model, text, chance)] or [[]])
        if not plan.text.stop:
            assert other[:4] == expected[:4], text


def split_tokens(model: ServedModel, text: str, chance: random.Random) -> list[int]:
    """Ids of `text`, cut at random places before it is tokenised, so that words fall apart."""
    ids: list[int] = []
    while text:
        size = chance.randint(1, 12)
        ids += model.tokenizer.encode(text[:size], parse_special=True)
        text = text[size:]
    return ids
