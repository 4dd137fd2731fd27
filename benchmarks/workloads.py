"""The workloads of the benchmarks: what is asked, how many at a time, how often."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

_TEXT = """
river stone light garden winter market silver window letter mountain bread music paper morning
shadow harbour engine bridge summer forest island copper ladder pocket thunder village orange
number button castle flower hunter jacket kitchen lantern mirror needle ocean planet quarter
ribbon saddle ticket umbrella valley walnut yellow anchor basket candle the a of to and in is was
for with on as by at from but not or which when while after every
"""
_WORDS = _TEXT.split()

CONCURRENCIES = (1, 2, 4, 8, 16, 32, 64)
CONTEXT_WORDS = (100, 500, 1000, 2000, 3000, 4000, 5500)


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request: the text, and exactly how many tokens to generate."""

    text: str
    num_output_tokens: int


@dataclass(frozen=True, slots=True)
class Workload:
    """A closed loop: `concurrency` clients take the next of `num_requests` until none is left."""

    name: str
    concurrency: int
    num_requests: int
    create_prompt: Callable[[random.Random, str], Prompt]
    """From (random source, shared prefix of the round) to one request."""
    num_shared_words: int = 0

    def create_prompts(self, seed: int) -> list[Prompt]:
        """The prompts of one round; another seed shares no prefix with it."""
        source = random.Random(f"{self.name}-{seed}")
        shared = make_text(source, self.num_shared_words)
        return [self.create_prompt(source, shared) for _ in range(self.num_requests)]


def make_text(source: random.Random, num_words: int) -> str:
    """Random words."""
    return " ".join(source.choice(_WORDS) for _ in range(num_words))


def _fixed(num_words: int, num_output_tokens: int) -> Callable[[random.Random, str], Prompt]:
    return lambda source, _shared: Prompt(make_text(source, num_words), num_output_tokens)


def _mixed(source: random.Random, _shared: str) -> Prompt:
    """Short and long together: where waiting for the longest of a batch costs most."""
    num_output_tokens = min(400, 20 + int(source.expovariate(1 / 90)))
    return Prompt(make_text(source, source.randint(20, 300)), num_output_tokens)


def _agent(source: random.Random, shared: str) -> Prompt:
    """A short move behind a long system prompt that every request shares."""
    return Prompt(f"{shared}\n{make_text(source, 40)}", 16)


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("single", 1, 3, _fixed(100, 128)),
        Workload("chat", 8, 16, _fixed(200, 128)),
        Workload("agents", 16, 48, _agent, num_shared_words=600),
        Workload("mixed", 16, 32, _mixed),
        Workload("prefill", 1, 3, _fixed(1500, 4)),
        Workload("long", 8, 16, _fixed(2000, 128)),
        # Points of curves (curves.py): at-N answers N at a time, context-N reads N words first.
        *(Workload(f"at-{n}", n, max(4, 2 * n), _fixed(100, 64)) for n in CONCURRENCIES),
        *(Workload(f"context-{n}", 4, 4, _fixed(n, 64)) for n in CONTEXT_WORDS),
    )
}
