"""Loads on a machine whose costs the doctor does not know: it only sees what was recorded."""

from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass, field
from typing import Any

from caudal.config import CacheConfig, SchedulerConfig
from caudal.diagnosis.report import LoadRecord, Observation, ServerFacts
from caudal.diagnosis.scenario import METRICS, Scenario, served_in
from caudal.simulation.machine import Machine, Outcome, SimulatedRequest, StepTime, simulate
from caudal.step_io import SchedulerOutput

MAX_MODEL_LEN = 2048


def true_machine(seed: int = 0) -> StepTime:
    """Nothing that four coefficients describe exactly: curved in the rows, and noisy."""
    noise = random.Random(seed)

    def step_ms(output: SchedulerOutput) -> float:
        num_prefill = output.num_tokens - output.num_decode_rows
        exact = (
            3.5
            + 0.9 * output.num_decode_rows**0.9
            + 0.17 * num_prefill
            + 2e-4 * output.context_reads
        )
        return exact * noise.uniform(0.92, 1.12) * (3.0 if noise.random() < 0.003 else 1.0)

    return step_ms


@dataclass
class Site:
    """A server under a load."""

    requests: list[SimulatedRequest]
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    num_blocks: int = 6000
    enable_prefix_caching: bool = True
    max_model_len: int = MAX_MODEL_LEN

    def run(self, seed: int = 0) -> Outcome:
        return simulate(
            self.requests,
            Machine(
                true_machine(seed),
                self.scheduler,
                self.num_blocks,
                self.max_model_len,
                self.enable_prefix_caching,
            ),
        )

    def changed(self, scenario: Scenario) -> Site:
        """As a remedy would have it, still on the true machine."""
        return Site(
            list(scenario.requests),
            scenario.scheduler,
            scenario.num_blocks,
            scenario.enable_prefix_caching,
            scenario.max_model_len,
        )


def observe(site: Site, outcome: Outcome, **facts: Any) -> Observation:
    """What a server would have recorded."""
    records = [
        LoadRecord(
            arrival_s=result.request.arrival_s,
            num_prompt_tokens=result.request.num_prompt_tokens,
            num_output_tokens=result.request.num_output_tokens,
            max_tokens=result.request.max_tokens,
            num_cached_tokens=result.num_cached_tokens,
            ttft_ms=None if result.ttft_s is None else result.ttft_s * 1e3,
            tpot_ms=None if result.tpot_s is None else result.tpot_s * 1e3,
            num_waiting=result.num_waiting,
            num_running=result.num_running,
            kv_used=result.kv_used,
            num_preemptions=result.num_preemptions,
            is_refused=result.is_refused,
            prefix_ids=result.request.prefix_ids,
        )
        for result in outcome.results
    ]
    settings = dataclasses.asdict(site.scheduler) | dataclasses.asdict(CacheConfig())
    settings = {name: getattr(value, "value", value) for name, value in settings.items()}
    settings |= {"enable_prefix_caching": site.enable_prefix_caching, "kv_cache_dtype": "f16"}
    given: dict[str, Any] = {
        "costs": outcome.costs,
        "num_blocks": site.num_blocks,
        "max_model_len": site.max_model_len,
        "settings": settings,
        "kv_block_bytes": {"f16": 2048, "int8": 1088},
        "memory": {"weights": 100, "scratch": 10, "kv_cache": site.num_blocks * 2048},
        "num_threads": 2,
        "num_cores": 2,
    }
    return Observation(records=records, facts=ServerFacts(**given | facts))


def measured_gain(site: Site, scenario: Scenario, metric: str) -> float:
    """Percent, on the true machine, with other noise than was recorded."""
    before = METRICS[metric](served_in(site.run(seed=1)))
    after = METRICS[metric](served_in(site.changed(scenario).run(seed=2)))
    return (1 - after / before) * 100


def poisson(rate: float, count: int, seed: int = 0, start: float = 0.0) -> list[float]:
    source, now, times = random.Random(seed), start, []
    for _ in range(count):
        now += source.expovariate(rate)
        times.append(now)
    return times


def chats(times: list[float], seed: int = 0, max_tokens: int = 0) -> list[SimulatedRequest]:
    """Prompts of 50 to 350 tokens, answers of 20 to 180."""
    source = random.Random(seed)
    return [
        SimulatedRequest(time, source.randint(50, 350), source.randint(20, 180), max_tokens)
        for time in times
    ]


def capacity_site() -> Site:
    """Half as many again as the machine can do."""
    return Site(chats(poisson(14.0, 300)), SchedulerConfig(max_num_seqs=16))


def burst_site() -> Site:
    """Forty requests at once, and then a long while nothing."""
    times = [40.0 * burst + 0.02 * index for burst in range(5) for index in range(40)]
    return Site(chats(times), SchedulerConfig(max_num_seqs=16))


def kv_site() -> Site:
    """A load that fits the machine, but not its KV cache of 1,280 tokens."""
    return Site(chats(poisson(5.0, 250), max_tokens=600), num_blocks=80)
