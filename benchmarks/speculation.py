"""Measures what guessed tokens give on answers in prose: two engines in turn, the same questions.

    python benchmarks/speculation.py [--model smollm2-135m] [--at-a-time 1,8,32] [--rounds 6]

Three times as many questions as run together, in the model's chat format. One engine guesses, the
other does not; within a round they take turns, and the ratio is the median over rounds. Exits with
1 if an answer differs in any token.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from caudal import LLM, SamplingParams
from caudal.config import SchedulerConfig

QUESTIONS = (
    "Why is the sky blue?",
    "Explain how a bicycle stays upright.",
    "Write a short story about a fox and a river.",
    "What should I cook with rice and eggs?",
    "Summarise the causes of the first world war.",
    "How do vaccines work?",
    "Give me five tips for learning a language.",
    "Write a poem about winter.",
    "What is the difference between a virus and a bacterium?",
    "Plan a three day trip to Rome.",
    "Write a Python function that sorts a list of dictionaries by a key.",
    "Explain recursion to a child.",
    "How does a refrigerator work?",
    "Write an email asking for a day off.",
    "What is inflation and why does it matter?",
    "Describe the water cycle.",
)
NUM_TOKENS = 128


@dataclass(frozen=True, slots=True)
class Run:
    """What one engine did in one turn."""

    seconds: float
    token_ids: list[list[int]]


def measure(llm: LLM, turn: int, number: int, sampling: SamplingParams) -> Run:
    """Answer three times `number` questions, which no other turn asks in these words."""
    asked = [f"({turn}.{index}) {QUESTIONS[index % len(QUESTIONS)]}" for index in range(3 * number)]
    started = time.perf_counter()
    answers = llm.chat([[{"role": "user", "content": text}] for text in asked], sampling)
    return Run(time.perf_counter() - started, [answer.token_ids for answer in answers])


def compare(
    engines: Sequence[LLM], number: int, temperature: float, num_rounds: int
) -> tuple[float, float, float]:
    """Tokens per second of the plain and of the guessing engine, and the median ratio."""
    seconds: list[tuple[float, float]] = []
    for turn in range(num_rounds):
        sampling = SamplingParams(
            max_tokens=NUM_TOKENS, temperature=temperature, seed=turn, ignore_eos=True
        )
        runs = {}
        for index in (0, 1) if turn % 2 else (1, 0):
            runs[index] = measure(engines[index], turn, number, sampling)
        if runs[0].token_ids != runs[1].token_ids:
            sys.exit("an answer with guesses differs from the one without")
        seconds.append((runs[0].seconds, runs[1].seconds))
    num_tokens = 3 * number * NUM_TOKENS
    plain, guessing = (
        num_tokens / statistics.median(column) for column in zip(*seconds, strict=True)
    )
    return plain, guessing, statistics.median(one / other for one, other in seconds)


def main() -> None:
    """Print a table of medians."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--at-a-time", default="1,8,32")
    parser.add_argument("--temperatures", default="0,0.7")
    parser.add_argument("--rounds", type=int, default=6)
    args = parser.parse_args()
    print("| at a time | temperature | plain tok/s | guessing tok/s | ratio |")
    print("|---|---|---|---|---|")
    for number in map(int, args.at_a_time.split(",")):
        plain = SchedulerConfig(
            ttft_ms=None, tpot_ms=None, max_num_seqs=number, num_speculative_tokens=0
        )
        guessing = replace(plain, num_speculative_tokens=8)
        engines = [LLM(args.model, scheduler=scheduler) for scheduler in (plain, guessing)]
        for temperature in map(float, args.temperatures.split(",")):
            one, other, ratio = compare(engines, number, temperature, args.rounds)
            print(
                f"| {number} | {temperature:g} | {one:.0f} | {other:.0f} | {ratio:.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
