"""Drives a scheduler with a fake worker and collects what each request got."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from caudal.config import CacheConfig, SchedulerConfig
from caudal.sampling_params import SamplingParams
from caudal.scheduler.admission import RefusedRequest
from caudal.scheduler.output import FinishReason, RequestOutput
from caudal.scheduler.request import Request
from caudal.scheduler.scheduler import Scheduler
from caudal.step_io import ModelRunnerOutput, SchedulerOutput, TokenLogprobs
from tests.scheduler.fake_worker import (
    EOG,
    VOCAB_SIZE,
    FakeWorker,
    WorkerLimits,
    expected_output,
    root_tag,
)

BLOCK_SIZE = 16

CostFunction = Callable[[SchedulerOutput], float]


def make_prompt(num_tokens: int, salt: int = 0) -> list[int]:
    """Tokens without a period shorter than the prompt; differs from the first one on by salt."""
    return [(salt * 7 + i * i + i // 3) % (VOCAB_SIZE - 3) + 3 for i in range(num_tokens)]


def make_request(request_id: str, prompt: list[int] | int, **options: Any) -> Request:
    """A greedy-looking request: `options` are SamplingParams or Request fields."""
    fields = (
        *("arrival_time", "priority", "namespace", "parent_id", "service"),
        *("tenant", "weight", "deadline"),
    )
    own = {name: options.pop(name) for name in fields if name in options}
    options.setdefault("max_tokens", 8)
    options.setdefault("ignore_eos", True)
    token_ids = make_prompt(prompt) if isinstance(prompt, int) else prompt
    own.setdefault("arrival_time", 0.0)
    return Request(request_id, token_ids, SamplingParams(**options), **own)


def constant_ms(step_ms: float) -> CostFunction:
    return lambda _: step_ms


@dataclass
class Result:
    """All outputs of one request, added up."""

    request: Request
    outputs: list[RequestOutput] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    token_times: list[float] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] | None = None
    last: RequestOutput | None = None

    @property
    def finish_reason(self) -> FinishReason | None:
        return None if self.last is None else self.last.finish_reason

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def ttft(self) -> float:
        return self.token_times[0] - self.request.arrival_time

    def max_gap(self) -> float:
        times = self.token_times
        return max(after - before for before, after in itertools.pairwise(times))

    def add(self, output: RequestOutput, now: float) -> None:
        assert not self.is_finished, f"{output.request_id}: output after the terminal one"
        self.outputs.append(output)
        self.last = output
        self.token_ids += output.new_token_ids
        self.token_times += [now] * len(output.new_token_ids)
        assert output.num_output_tokens == len(self.token_ids)
        assert output.num_prompt_tokens == self.request.num_prompt_tokens
        if output.prompt_logprobs is not None:
            assert self.prompt_logprobs is None, "prompt logprobs were sent twice"
            self.prompt_logprobs = output.prompt_logprobs


class Harness:
    """One scheduler, one fake worker, a clock that a cost function moves."""

    def __init__(
        self,
        *,
        num_blocks: int = 256,
        max_model_len: int = 4096,
        max_num_logits: int = 64,
        enable_prefix_caching: bool = True,
        step_ms: CostFunction | float = 10.0,
        **config: Any,
    ) -> None:
        draft_accuracy = config.pop("draft_accuracy", 0.0)
        can_interrupt = config.pop("can_interrupt", False)
        config.setdefault("max_num_seqs", 16)
        config.setdefault("max_num_batched_tokens", 256)
        self.config = SchedulerConfig(**config)
        self.max_model_len = max_model_len
        cache = CacheConfig(num_blocks=num_blocks, enable_prefix_caching=enable_prefix_caching)
        self.scheduler = Scheduler(
            self.config,
            cache,
            max_model_len=max_model_len,
            eog_token_ids=EOG,
            max_num_logits=max_num_logits,
            vocab_size=VOCAB_SIZE,
            can_interrupt=can_interrupt,
        )
        limits = WorkerLimits(
            self.config.max_num_batched_tokens,
            self.config.max_num_seqs,
            max_num_logits,
            max_model_len,
        )
        self.worker = FakeWorker(num_blocks, BLOCK_SIZE, limits)
        self.worker.draft_accuracy = draft_accuracy
        self.step_ms: CostFunction = step_ms if callable(step_ms) else constant_ms(step_ms)
        self.now = 0.0
        self.num_steps = 0
        self.results: dict[str, Result] = {}
        self.last_output: SchedulerOutput | None = None

    def add(self, *requests: Request) -> list[RefusedRequest]:
        for request in requests:
            self.worker.namespaces[request.request_id] = request.namespace
        refused = self.scheduler.add_requests(requests, self.now)
        refused_ids = [refusal.request_id for refusal in refused]
        for request in requests:
            if request.request_id not in refused_ids:
                self.results[request.request_id] = Result(request)
        return refused

    def step(self, *, abort_in_flight: list[str] | None = None) -> SchedulerOutput:
        """One cycle with all checks; `abort_in_flight` arrive while the step runs."""
        output = self.scheduler.schedule(self.now)
        self.scheduler.check_integrity()
        result = self.worker.execute(output)
        step_ms = self.step_ms(output)
        if abort_in_flight:
            self.scheduler.abort(abort_in_flight, self.now)
            self.scheduler.check_integrity()
        self.now += step_ms / 1e3
        self.num_steps += 1
        outputs = self.scheduler.update_from_output(output, result, self.now, step_ms=step_ms)
        self.scheduler.check_integrity()
        self.collect(outputs)
        self.last_output = output
        return output

    def collect(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            self.results[output.request_id].add(output, self.now)

    def check_cached_contents(self) -> None:
        """Every block that the prefix tree offers holds what its place in the tree says."""
        radix = self.scheduler._state.kv._radix
        if radix is None:
            return
        stack = [(root, root_tag(namespace)) for namespace, root in radix._roots.items()]
        while stack:
            node, tag = stack.pop()
            for key, child in node.children.items():
                end = tag
                for offset, token_id in enumerate(array("i", key)):
                    end = hash((end, token_id))
                    slot = child.block_id * BLOCK_SIZE + offset
                    assert self.worker.slots[slot] == end, "the tree offers wrong content"
                stack.append((child, end))

    def run(self, max_steps: int = 10_000) -> None:
        """Step until there is nothing to do; every step must compute something."""
        for _ in range(max_steps):
            if not self.scheduler.has_work:
                return
            had_requests = self.scheduler.num_running + self.scheduler.num_waiting > 0
            output = self.step()
            has_requests = self.scheduler.num_running + self.scheduler.num_waiting > 0
            is_needed = had_requests and has_requests  # else the deadlines of all have passed
            assert output.num_tokens > 0 or not is_needed, "a step computed nothing"
        raise AssertionError(f"not finished after {max_steps} steps")

    def run_until(self, condition: Callable[[], bool], max_steps: int = 1000) -> None:
        for _ in range(max_steps):
            if condition():
                return
            self.step()
        raise AssertionError(f"condition not met after {max_steps} steps")

    def check_complete(self, request_id: str) -> None:
        """The request ended by itself, with exactly the tokens it has when alone."""
        result = self.results[request_id]
        request = result.request
        expected = expected_output(
            request.prompt_token_ids,
            request.namespace,
            request.sampling,
            request.seed,
            self.max_model_len,
        )
        assert result.finish_reason == expected.finish_reason
        assert result.token_ids == expected.token_ids

    def check_all_complete(self) -> None:
        for request_id in self.results:
            self.check_complete(request_id)

    def check_idle(self) -> None:
        """Nothing is held any more."""
        stats = self.scheduler.stats()
        assert stats.num_running == stats.num_waiting == stats.num_waiting_tokens == 0
        assert stats.num_blocks_held == 0
        assert stats.num_blocks_free + stats.num_blocks_cached == stats.num_blocks_total
        assert not self.worker.rows
        assert not self.scheduler.has_work


class FastHarness(Harness):
    """Without the checks of every step, for long runs."""

    def step(self, *, abort_in_flight: list[str] | None = None) -> SchedulerOutput:
        output = self.scheduler.schedule(self.now)
        result = ModelRunnerOutput()
        for request_id, num_tokens in output.num_scheduled_tokens.items():
            request = self.results[request_id].request
            if request.num_computed_tokens + num_tokens == len(request.token_ids):
                result.sampled_token_ids[request_id] = [9]
        step_ms = self.step_ms(output)
        self.now += step_ms / 1e3
        self.num_steps += 1
        self.collect(self.scheduler.update_from_output(output, result, self.now, step_ms=step_ms))
        return output
