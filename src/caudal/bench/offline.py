"""Throughput of a model in this process, without server or network."""

from __future__ import annotations

import time
from dataclasses import dataclass

from caudal.bench.prompts import Prompts
from caudal.bench.words import Calibration, make_words
from caudal.bench.workload import Conversation, WorkloadOptions
from caudal.config import CacheConfig, SchedulerConfig
from caudal.llm import LLM, Completion
from caudal.sampling_params import SamplingParams

WARMUP_PROMPTS = 2
WARMUP_TOKENS = 8


@dataclass(frozen=True, slots=True)
class OfflineResult:
    """One run. Tokens of the prompts count whether computed or found in the cache."""

    model: str
    workload: str
    load_s: float
    """From nothing to a model ready to run."""
    elapsed_s: float
    num_prompts: int
    num_input_tokens: int
    num_cached_tokens: int
    num_output_tokens: int

    @property
    def prompts_per_s(self) -> float:
        """Finished prompts a second."""
        return self.num_prompts / self.elapsed_s

    @property
    def output_tokens_per_s(self) -> float:
        """Generated tokens a second."""
        return self.num_output_tokens / self.elapsed_s

    @property
    def total_tokens_per_s(self) -> float:
        """Prompt and generated tokens a second."""
        return (self.num_input_tokens + self.num_output_tokens) / self.elapsed_s


@dataclass(frozen=True, slots=True)
class OfflineSpec:
    """What to run, and how."""

    model: str
    workload: WorkloadOptions
    cache: CacheConfig
    scheduler: SchedulerConfig
    num_threads: int | None = None


def run_offline(spec: OfflineSpec) -> OfflineResult:
    """All prompts at once, raw, each answered to its full length; greedy.

    Raises CaudalError (model not found, prompt longer than the context, …).
    """
    started = time.perf_counter()
    llm = LLM(spec.model, cache=spec.cache, scheduler=spec.scheduler, num_threads=spec.num_threads)
    load_s = time.perf_counter() - started
    prompts = Prompts(spec.workload, _calibrate(llm))
    num_prompts = spec.workload.num_prompts or 64
    warmup = prompts.create_warmup(WARMUP_PROMPTS, "warm-up")
    _generate(llm, warmup, WARMUP_TOKENS)
    conversations = prompts.create(num_prompts, "")
    started = time.perf_counter()
    completions = _generate(llm, conversations)
    elapsed_s = time.perf_counter() - started
    return OfflineResult(
        model=spec.model,
        workload=prompts.summary,
        load_s=load_s,
        elapsed_s=elapsed_s,
        num_prompts=num_prompts,
        num_input_tokens=sum(len(done.prompt_token_ids) for done in completions),
        num_cached_tokens=sum(done.num_cached_tokens for done in completions),
        num_output_tokens=sum(len(done.token_ids) for done in completions),
    )


def _calibrate(llm: LLM) -> Calibration:
    few, many = 10, 110
    return Calibration.fit(
        (few, len(llm.tokenizer.encode(make_words(few, "probe")))),
        (many, len(llm.tokenizer.encode(make_words(many, "probe")))),
    )


def _generate(
    llm: LLM, conversations: list[Conversation], max_tokens: int | None = None
) -> list[Completion]:
    turns = [conversation.turns[0] for conversation in conversations]
    return llm.generate(
        ["\n".join(str(message["content"]) for message in turn.messages) for turn in turns],
        [
            SamplingParams(
                max_tokens=max_tokens or turn.num_output_tokens or 128,
                temperature=0.0,
                ignore_eos=True,
            )
            for turn in turns
        ],
    )
