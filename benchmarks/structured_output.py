"""Measures what structured output costs: tokens per second of constrained and free answers.

    python benchmarks/structured_output.py [--model smollm2-135m] [--at-a-time 1,8,16] [--rounds 5]

Both kinds have the same prompts and exactly the same number of tokens, and take turns within a
round, so that a noisy machine disturbs both alike; the ratio is the median over rounds. The schema
asks for a list of objects that is longer than any answer, so every token is constrained. Prompts
that ask for such a list, with an example, are what clients send; with those that say nothing of it
the model wants another token than the schema allows in about every third place. Both kinds guess
tokens ahead, and one text repeats itself more than another: `--num-speculative-tokens 0` shows the
cost of the form alone.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.workloads import make_text
from caudal import LLM, SamplingParams
from caudal.config import SchedulerConfig
from caudal.sampling_params import StructuredOutputsParams

SCHEMA = {
    "type": "array",
    "minItems": 5_000,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 40},
            "kind": {"enum": ["river", "town", "bridge", "boat"]},
            "length": {"type": "number"},
            "count": {"type": "integer", "minimum": 0},
            "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 5},
        },
        "required": ["name", "kind", "length", "count", "tags"],
        "additionalProperties": False,
    },
}
QUESTION = (
    'Answer with a JSON array only, for example [{"name": "Old bridge", "kind": "bridge", '
    '"length": 12.5, "count": 3, "tags": ["stone", "river"]}, {"name": "Ulm", "kind": "town", '
    '"length": 4.0, "count": 1, "tags": ["old"]}]. Places: '
)
OPENINGS = {"ask for it": QUESTION, "do not": ""}
PROMPT_WORDS = 30


def measure(llm: LLM, prompts: list[str], sampling: SamplingParams) -> float:
    """Seconds for an answer to each prompt, all at once."""
    started = time.perf_counter()
    answers = llm.generate(prompts, sampling)
    seconds = time.perf_counter() - started
    for answer in answers:
        if len(answer.token_ids) != sampling.max_tokens:
            raise SystemExit(f"an answer has {len(answer.token_ids)} tokens: {answer.text[:200]!r}")
    return seconds


def main() -> None:
    """Print a table of medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--at-a-time", default="1,8,16")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--temperature", type=float, default=0.0)
    default = SchedulerConfig().num_speculative_tokens
    parser.add_argument("--num-speculative-tokens", type=int, default=default)
    args = parser.parse_args()
    scheduler = SchedulerConfig(
        ttft_ms=None, tpot_ms=None, num_speculative_tokens=args.num_speculative_tokens
    )
    llm = LLM(args.model, scheduler=scheduler)
    form = StructuredOutputsParams(json=SCHEMA)
    free = SamplingParams(
        max_tokens=args.tokens, ignore_eos=True, temperature=args.temperature, seed=1
    )
    formed = SamplingParams(
        max_tokens=args.tokens, temperature=args.temperature, seed=1, structured_outputs=form
    )
    words = random.Random(1)
    measure(llm, [make_text(words, PROMPT_WORDS)], formed)
    print("| prompts | at a time | free tok/s | constrained tok/s | constrained / free |")
    print("|---|---|---|---|---|")
    numbers = map(int, args.at_a_time.split(","))
    for number, (kind, opening) in itertools.product(numbers, OPENINGS.items()):
        seconds: dict[str, list[float]] = {"free": [], "formed": []}
        for turn in range(args.rounds):
            prompts = [make_text(words, PROMPT_WORDS) for _ in range(number)]
            order = [("free", free), ("formed", formed)]
            for name, sampling in order if turn % 2 else order[::-1]:
                # Other prompts of the same length, so that neither finds the other's prefix.
                own = [f"{name} {opening}{text}\n" for text in prompts]
                seconds[name].append(measure(llm, own, sampling))
        pairs = zip(seconds["free"], seconds["formed"], strict=True)
        ratio = statistics.median(first / second for first, second in pairs)
        speeds = [number * args.tokens / statistics.median(each) for each in seconds.values()]
        cells = kind, number, *(f"{speed:.0f}" for speed in speeds), f"{ratio:.3f}"
        print("|", " | ".join(map(str, cells)), "|", flush=True)


if __name__ == "__main__":
    main()
