"""Random workloads: every step is consistent, every accepted request ends exactly once."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest

from caudal.config import Batching
from caudal.sampling_params import SamplingParams
from caudal.scheduler import step_planner
from caudal.scheduler.output import FinishReason
from caudal.scheduler.request import Request
from caudal.scheduler.service_class import ServiceClass
from tests.scheduler.fake_worker import VOCAB_SIZE, expected_output
from tests.scheduler.harness import BLOCK_SIZE, Harness, make_prompt


@dataclass
class Workload:
    """A seeded stream of arrivals and departures."""

    rng: random.Random
    num_groups: int
    max_prompt: int
    services: list[ServiceClass]
    num_made: int = 0

    def sampling(self) -> SamplingParams:
        rng = self.rng
        return SamplingParams(
            max_tokens=rng.choice([0, 1, 2, 5, 17, 40, 80]),
            min_tokens=rng.choice([0, 0, 3]),
            ignore_eos=rng.random() < 0.5,
            stop_token_ids=(7,) if rng.random() < 0.2 else (),
            seed=rng.choice([None, None, 7]),
            num_logprobs=rng.choice([None, None, 1]),
            num_prompt_logprobs=1 if rng.random() < 0.15 else None,
        )

    def prompt(self) -> list[int]:
        """Often shares a prefix with others, of any length, also a whole prompt."""
        rng = self.rng
        length = rng.randint(1, self.max_prompt)
        if rng.random() < 0.2:
            length = max(1, length // BLOCK_SIZE) * BLOCK_SIZE
        if rng.random() < 0.3:
            return [rng.randrange(3, VOCAB_SIZE) for _ in range(length)]
        shared = make_prompt(self.max_prompt, salt=rng.randrange(2))
        num_shared = rng.randint(0, length)
        return shared[:num_shared] + [
            rng.randrange(3, VOCAB_SIZE) for _ in range(length - num_shared)
        ]

    def group(self, now: float) -> list[Request]:
        """One request, or several siblings."""
        rng = self.rng
        num_siblings = rng.choice([1, 1, 1, 2, 4])
        name = f"r{self.num_made}"
        self.num_made += 1
        sampling, prompt = self.sampling(), self.prompt()
        namespace, priority = rng.choice(["", "", "tenant"]), rng.choice([0, 0, 0, -1, 3])
        service = rng.choice(self.services)
        return [
            Request(
                f"{name}-{index}",
                list(prompt),
                sampling,
                now,
                priority,
                namespace,
                name if num_siblings > 1 else None,
                service,
            )
            for index in range(num_siblings)
        ]


def check_result(harness: Harness, request_id: str) -> None:
    """Ended once, with the tokens (or a prefix of them) that it would have alone."""
    result = harness.results[request_id]
    request, sampling = result.request, result.request.sampling
    assert result.is_finished, f"{request_id} got no terminal output"
    expected = expected_output(
        request.prompt_token_ids, request.namespace, sampling, request.seed, harness.max_model_len
    )
    if result.finish_reason in (FinishReason.ABORT, FinishReason.ERROR):
        assert result.token_ids == expected.token_ids[: len(result.token_ids)]
        return
    assert result.token_ids == expected.token_ids
    assert result.finish_reason == expected.finish_reason
    assert result.last is not None
    assert result.last.num_preemptions == request.num_preemptions
    stop_id = expected.token_ids[-1] if expected.finish_reason == "stop" else None
    assert result.last.stop_token_id == stop_id
    if sampling.num_prompt_logprobs is None:
        assert result.prompt_logprobs is None
    else:
        assert result.prompt_logprobs is not None
        got = [entry.token_id for entry in result.prompt_logprobs]
        assert got == request.prompt_token_ids[1:]


MIXED = [*[ServiceClass.INTERACTIVE] * 3, *ServiceClass, ServiceClass.IDLE]

SHAPES: dict[str, dict[str, Any]] = {
    "tiny pool": {"num_blocks": 12},
    "tiny pool, small steps": {"num_blocks": 10, "max_num_batched_tokens": 24},
    "tiny pool, no cache": {"num_blocks": 12, "enable_prefix_caching": False},
    "few logits": {"num_blocks": 24, "max_num_logits": 5, "max_num_seqs": 5},
    "roomy": {"num_blocks": 200, "max_num_seqs": 32},
    "tight target": {"num_blocks": 40, "tpot_ms": 6.0},
    "no target": {"num_blocks": 40, "tpot_ms": None},
    "short queue": {"num_blocks": 16, "max_queue_requests": 6},
    "static": {"num_blocks": 20, "batching": Batching.STATIC},
    "serial": {"num_blocks": 20, "batching": Batching.SERIAL},
    "no reserve": {"num_blocks": 12, "has_reserve": False},
    "no reserve, no cache": {
        "num_blocks": 10,
        "has_reserve": False,
        "enable_prefix_caching": False,
    },
    "guesses": {"num_blocks": 60, "draft_accuracy": 0.8},
    "guesses, tiny pool": {"num_blocks": 12, "draft_accuracy": 0.9},
    "guesses, no cache": {"num_blocks": 14, "draft_accuracy": 0.8, "enable_prefix_caching": False},
    "guesses, few logits": {
        "num_blocks": 40,
        "draft_accuracy": 0.9,
        "max_num_logits": 6,
        "max_num_seqs": 5,
    },
    "guesses, tight target": {"num_blocks": 40, "draft_accuracy": 0.8, "tpot_ms": 6.0},
    "guesses, background": {"num_blocks": 30, "draft_accuracy": 0.7, "services": MIXED},
    "guesses, static": {"num_blocks": 40, "draft_accuracy": 0.8, "batching": Batching.STATIC},
    "background": {"num_blocks": 40, "services": MIXED},
    "background, tiny pool": {"num_blocks": 12, "services": MIXED},
    "background, roomy": {"num_blocks": 200, "max_num_seqs": 32, "services": MIXED},
    "background, tight targets": {
        "num_blocks": 40,
        "tpot_ms": 6.0,
        "ttft_ms": 40.0,
        "services": MIXED,
    },
    "background, no targets": {
        "num_blocks": 24,
        "tpot_ms": None,
        "ttft_ms": None,
        "services": MIXED,
    },
    "background, few logits": {
        "num_blocks": 24,
        "max_num_logits": 5,
        "max_num_seqs": 5,
        "services": MIXED,
    },
    "background, no reserve": {"num_blocks": 12, "has_reserve": False, "services": MIXED},
    "background, no cache": {
        "num_blocks": 14,
        "enable_prefix_caching": False,
        "services": MIXED,
    },
    "background, static": {"num_blocks": 20, "batching": Batching.STATIC, "services": MIXED},
    "background, serial": {"num_blocks": 20, "batching": Batching.SERIAL, "services": MIXED},
    "background only": {"num_blocks": 16, "services": [ServiceClass.URGENT, ServiceClass.IDLE]},
    "interrupted": {"num_blocks": 40, "services": MIXED, "interrupted_share": 0.3},
    "interrupted, tiny pool": {"num_blocks": 12, "services": MIXED, "interrupted_share": 0.3},
    "interrupted, always": {"num_blocks": 30, "services": MIXED, "interrupted_share": 1.0},
    "interrupted, guesses": {
        "num_blocks": 30,
        "draft_accuracy": 0.8,
        "services": [ServiceClass.IDLE],
        "interrupted_share": 0.4,
    },
    "no reserve, static": {"num_blocks": 12, "has_reserve": False, "batching": Batching.STATIC},
}


def run_fuzz(shape: dict[str, Any], seed: int) -> Harness:
    """Run a workload to its end; without a reserve for growth, preemption is frequent."""
    options = dict(shape)
    if options.pop("has_reserve", True):
        return run_workload(options, seed)
    with (
        mock.patch.object(step_planner, "GROWTH_BLOCKS_NEW", 0),
        mock.patch.object(step_planner, "GROWTH_BLOCKS_RETURNING", 0),
    ):
        return run_workload(options, seed)


def run_workload(shape: dict[str, Any], seed: int) -> Harness:
    rng = random.Random(seed)
    noise = random.Random(seed + 1)
    services = shape.pop("services", [ServiceClass.INTERACTIVE])
    interrupted_share = shape.pop("interrupted_share", None)
    harness = Harness(
        max_model_len=150,
        step_ms=lambda output: (2 + 0.05 * output.num_tokens) * noise.uniform(0.9, 1.2),
        can_interrupt=interrupted_share is not None,
        **({"max_num_seqs": 8, "max_num_batched_tokens": 64} | shape),
    )
    harness.worker.interrupts = lambda: rng.random() < (interrupted_share or 0.0)
    workload = Workload(rng, num_groups=40, max_prompt=100, services=services)
    num_steps_bound = 0
    while workload.num_made < workload.num_groups or harness.scheduler.has_work:
        live = [name for name, result in harness.results.items() if not result.is_finished]
        while workload.num_made < workload.num_groups and rng.random() < 0.4:
            group = workload.group(harness.now)
            refused = harness.add(*group)
            assert len(refused) in (0, len(group)), "siblings were split"
            num_steps_bound += 400 * len(group)
            if rng.random() < 0.05:
                harness.worker.failing[group[0].request_id] = "injected"
        if live and rng.random() < 0.05:
            harness.scheduler.abort([rng.choice(live), "unknown"], harness.now)
            harness.scheduler.check_integrity()
        in_flight = [rng.choice(live)] if live and rng.random() < 0.05 else None
        harness.step(abort_in_flight=in_flight)
        harness.check_cached_contents()
        assert harness.num_steps < num_steps_bound + 500, "starvation"
    return harness


CASES = [(name, seed) for name in SHAPES for seed in range(3 if "services" in SHAPES[name] else 6)]


@pytest.mark.parametrize(("name", "seed"), CASES)
def test_random_workload_keeps_every_invariant(name: str, seed: int) -> None:
    harness = run_fuzz(SHAPES[name], seed)
    for request_id in harness.results:
        check_result(harness, request_id)
    harness.check_idle()
    finished = sum(harness.scheduler.stats().num_finished.values())
    assert finished == len(harness.results)


def test_fuzz_reaches_the_hard_cases() -> None:
    """A fuzz that never preempts, hits or aborts would prove nothing."""
    stats = [run_fuzz(SHAPES["no reserve"], seed).scheduler.stats() for seed in range(6)]
    assert sum(s.num_preemptions for s in stats) > 10
    assert sum(s.prefix_hits_tokens for s in stats) > 500
    assert sum(s.num_cancelled for s in stats) > 5
    assert sum(s.num_finished["error"] for s in stats) > 0
    stats = [run_fuzz(SHAPES["guesses, tiny pool"], seed).scheduler.stats() for seed in range(6)]
    assert sum(s.num_preemptions for s in stats) > 0
    num_right = sum(s.num_accepted_tokens for s in stats)
    assert 50 < num_right < sum(s.num_draft_tokens for s in stats)
    stats = [run_fuzz(SHAPES["interrupted, tiny pool"], seed).scheduler.stats() for seed in (0, 1)]
    assert sum(s.num_interrupted_steps for s in stats) > 20


def test_same_inputs_give_the_same_steps() -> None:
    runs = [run_fuzz(SHAPES["no reserve"], 3) for _ in range(2)]
    traces = [
        [(name, result.token_times, result.request.num_preemptions) for name, result in r.items()]
        for r in (run.results for run in runs)
    ]
    assert traces[0] == traces[1]
