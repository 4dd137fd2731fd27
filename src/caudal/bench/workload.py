"""What is asked: conversations made from a seed, the same at every level of load."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from caudal.bench.words import Calibration, TextSource

Message = dict[str, Any]
"""`role` and `content`, as in the OpenAI API."""

LADDER = "ladder"
"""The workload of `caudal bench ladder`: something for each rung to show on."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One question within a conversation."""

    messages: tuple[Message, ...]
    """Added to what has been said so far."""
    num_output_tokens: int | None
    think_s: float = 0.0
    """Between the previous answer and this question."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns that one user asks one after the other; most have a single turn."""

    turns: tuple[Turn, ...]
    start_s: float | None = None
    """Recorded arrival, for the replay of a trace."""


@dataclass(frozen=True, slots=True)
class WorkloadOptions:
    """What is asked, and how often."""

    workload: str = "chat"
    """chat, agents (shared system prompt), mixed (lengths), long (prompts), batch or multi-turn."""
    jsonl: str | None = None
    """Take the requests from this file instead: one JSON object a line with messages or prompt,
    and optionally max_tokens."""
    trace: str | None = None
    """Replay recorded arrivals instead: CSV with timestamp, input and output tokens."""
    trace_speed: float = 1.0
    """Replay the trace so many times as fast."""
    num_prompts: int | None = None
    """Requests (for multi-turn: conversations) per level; unset: 64, or all of the file."""
    input_len: int | None = None
    """Prompt tokens of a request, instead of the workload's."""
    output_len: int | None = None
    """Output tokens of a request, instead of the workload's."""
    turns: int = 4
    """Turns of a multi-turn conversation."""
    think_s: float = 2.0
    """Mean think time between turns in seconds, exponentially distributed."""
    seed: int = 0
    """Seed of prompts and arrivals; the same seed asks the same at every level."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a kind of workload makes its requests; lengths in tokens."""

    summary: str
    input_tokens: Callable[[random.Random], int]
    output_tokens: Callable[[random.Random], int]
    num_shared_tokens: int = 0
    """Length of the system prompt that all requests share."""
    is_multi_turn: bool = False


def _fixed(value: int) -> Callable[[random.Random], int]:
    return lambda _source: value


def _skewed(minimum: int, mean_more: int, maximum: int) -> Callable[[random.Random], int]:
    """Many short, few long: where waiting for the longest of a batch costs most."""
    return lambda source: min(maximum, minimum + int(source.expovariate(1 / mean_more)))


def _mostly(
    value: Callable[[random.Random], int], rare: int, one_in: int
) -> Callable[[random.Random], int]:
    return lambda source: rare if source.randrange(one_in) == 0 else value(source)


def _between(low: int, high: int) -> Callable[[random.Random], int]:
    return lambda source: source.randint(low, high)


RECIPES = {
    "chat": Recipe("200 tokens in, 128 out", _fixed(200), _fixed(128)),
    "agents": Recipe(
        "40 tokens in behind a shared system prompt of 600, 16 out",
        _fixed(40),
        _fixed(16),
        num_shared_tokens=600,
    ),
    "mixed": Recipe(
        "20 to 300 tokens in, 20 to 400 out, most of them short",
        _between(20, 300),
        _skewed(20, 90, 400),
    ),
    "long": Recipe("2,000 tokens in, 128 out", _fixed(2000), _fixed(128)),
    "batch": Recipe("100 tokens in, 100 out", _fixed(100), _fixed(100)),
    "multi-turn": Recipe(
        "conversations of several turns: 100 tokens in and 64 out each, think time between",
        _fixed(100),
        _fixed(64),
        is_multi_turn=True,
    ),
    LADDER: Recipe(
        "a shared system prompt of 300 tokens; 20 to 200 tokens in, one in eight 1,200; 16 to 200 "
        "out, most of them short",
        _mostly(_between(20, 200), 1200, 8),
        _skewed(16, 50, 200),
        num_shared_tokens=300,
    ),
}
WORKLOADS = tuple(name for name in RECIPES if name != LADDER)

DEFAULT_NUM_PROMPTS = 64


def create_conversations(
    options: WorkloadOptions, num_conversations: int, calibration: Calibration, salt: str
) -> list[Conversation]:
    """The conversations of a workload; another `salt` only replaces the first words of each.

    Equal arguments give equal conversations, and the first n are the same whatever the number.
    """
    recipe = RECIPES[options.workload]
    made = []
    shared = ""
    if recipe.num_shared_tokens:
        source = TextSource(random.Random(f"shared {options.seed}"), calibration)
        shared = source.text(recipe.num_shared_tokens, salt)
    for index in range(num_conversations):
        lengths = random.Random(f"{options.workload} {options.seed} {index}")
        texts = TextSource(random.Random(f"text {options.seed} {index}"), calibration)
        own_salt = "" if shared or not salt else f"{salt} {index}"
        made.append(_create_conversation(options, lengths, texts, (shared, own_salt)))
    return made


def _create_conversation(
    options: WorkloadOptions, lengths: random.Random, texts: TextSource, opening: tuple[str, str]
) -> Conversation:
    """`opening` is the shared system prompt and the salt of the first message."""
    recipe, (shared, salt) = RECIPES[options.workload], opening
    system: list[Message] = [{"role": "system", "content": shared}] if shared else []
    turns: list[Turn] = []
    for number in range(options.turns if recipe.is_multi_turn else 1):
        num_input = recipe.input_tokens(lengths)
        num_output = recipe.output_tokens(lengths)
        think_s = lengths.expovariate(1.0) * options.think_s
        text = texts.text(options.input_len or num_input, "" if number else salt)
        question: Message = {"role": "user", "content": text}
        turns.append(
            Turn(
                messages=(*([] if number else system), question),
                num_output_tokens=options.output_len or num_output,
                think_s=think_s if number else 0.0,
            )
        )
    return Conversation(tuple(turns))
