"""Runs an in-process engine on token ids and collects what each request produced."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from caudal.config import CacheConfig, EngineConfig, ParallelConfig, SchedulerConfig
from caudal.engine.core import EngineCore
from caudal.engine.messages import EngineRequest
from caudal.executor.uniproc import UniProcExecutor
from caudal.sampling_params import SamplingParams
from caudal.scheduler.output import FinishReason, RequestOutput
from caudal.step_io import TokenLogprobs

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, num_logprobs=0)


@dataclass
class Result:
    """All outputs of one request, joined."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    error: str | None = None
    pooled: bytes | None = None

    def add(self, output: RequestOutput) -> None:
        assert self.finish_reason is None, "a second terminal output"
        self.token_ids += output.new_token_ids
        self.logprobs += output.logprobs or []
        self.prompt_logprobs += output.prompt_logprobs or []
        self.finish_reason = output.finish_reason
        self.num_cached_tokens = output.num_cached_tokens
        self.num_preemptions = output.num_preemptions
        self.error = output.error
        self.pooled = output.pooled

    def exact(self) -> tuple[list[int], list[float]]:
        """What bit-equality compares: the ids, and the float32 logprob of each."""
        return self.token_ids, [entry.logprob for entry in self.logprobs]


class Harness:
    """An EngineCore with integrity checks after each step."""

    def __init__(
        self,
        model: Path,
        *,
        cache: CacheConfig | None = None,
        scheduler: SchedulerConfig | None = None,
        num_threads: int | None = None,
    ) -> None:
        self.config = EngineConfig(
            model_path=model,
            cache=cache or CacheConfig(num_blocks=2048),
            scheduler=scheduler or SchedulerConfig(tpot_ms=None, ttft_ms=None),
            parallel=ParallelConfig(num_threads=num_threads),
        )
        self.executor = UniProcExecutor(self.config)
        self.core = EngineCore(self.config, self.executor)
        self.results: dict[str, Result] = {}
        self.num_steps = 0

    def add(
        self, request_id: str, token_ids: Sequence[int], sampling: SamplingParams = GREEDY
    ) -> None:
        request = EngineRequest(
            request_id=request_id, prompt_token_ids=list(token_ids), sampling=sampling
        )
        assert self.core.add_requests([request]) == []
        self.results[request_id] = Result()

    def step(self) -> None:
        for output in self.core.step():
            self.results[output.request_id].add(output)
        self.core.check_integrity()
        self.num_steps += 1

    def run(self, max_steps: int = 100_000) -> None:
        for _ in range(max_steps):
            if not self.core.has_work:
                return
            self.step()
        raise AssertionError("the engine never became idle")

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingParams = GREEDY
    ) -> list[Result]:
        """Run `prompts` together, in order."""
        first = len(self.results)
        ids = [f"r{first + index}" for index in range(len(prompts))]
        for request_id, prompt in zip(ids, prompts, strict=True):
            self.add(request_id, prompt, sampling)
        self.run()
        return [self.results[request_id] for request_id in ids]
