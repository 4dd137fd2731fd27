"""Days of a slow machine: simulated request by request, remembered as minutes."""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from caudal.config import SchedulerConfig
from caudal.diagnosis.patterns import percentile
from caudal.diagnosis.report import Observation, Past
from caudal.metrics.instruments import create_latency_histogram
from caudal.metrics.reading import Aggregate, Level
from caudal.scheduler.step_cost import StepCosts
from caudal.simulation.machine import Machine, Outcome, SimulatedRequest, SimulatedResult, simulate
from caudal.step_io import SchedulerOutput
from tests.diagnosis.scenarios import Site, observe

DAY_S = 86_400
HOUR_S = 3600
NUM_BLOCKS = 600
COSTS = StepCosts(750.0, 95.0, 19.0, 0.0)
"""What an engine would have learnt of `slow_machine`."""


def slow_machine(speed: float = 1.0) -> Callable[[SchedulerOutput], float]:
    """Some eight hundred requests an hour are all that it can do; noisy, and curved in the rows."""
    noise = random.Random(0)

    def step_ms(output: SchedulerOutput) -> float:
        num_prefill = output.num_tokens - output.num_decode_rows
        exact = 750.0 + 110.0 * output.num_decode_rows**0.95 + 19.0 * num_prefill
        return exact * noise.uniform(0.9, 1.1) / speed

    return step_ms


def requests_at(times: Sequence[float]) -> list[SimulatedRequest]:
    """Short answers: a day is simulated in a second or two."""
    source = random.Random(5)
    return [
        SimulatedRequest(at, source.randint(60, 180), source.randint(6, 18)) for at in sorted(times)
    ]


def arrivals(rates_per_hour: Sequence[float], seed: int = 0) -> list[float]:
    """A Poisson process with another rate each hour."""
    source, times = random.Random(seed), []
    for hour, rate in enumerate(rates_per_hour):
        at = 0.0
        while rate and (at := at + source.expovariate(rate / HOUR_S)) < HOUR_S:
            times.append(hour * HOUR_S + at)
    return times


@dataclass
class Day:
    """A server and who asks it when."""

    requests: list[SimulatedRequest]
    scheduler: SchedulerConfig = field(
        default_factory=lambda: SchedulerConfig(
            max_num_seqs=8, ttft_ms=5_000.0, tpot_ms=None, max_queue_ttft_s=1e6
        )
    )
    speed: float = 1.0

    def run(self) -> tuple[Outcome, list[tuple[float, SchedulerOutput]]]:
        """The outcome, and the milliseconds of each step."""
        steps: list[tuple[float, SchedulerOutput]] = []
        step_ms = slow_machine(self.speed)

        def timed(output: SchedulerOutput) -> float:
            steps.append((step_ms(output), output))
            return steps[-1][0]

        machine = Machine(timed, self.scheduler, NUM_BLOCKS, 2048, prior=COSTS)
        return simulate(self.requests, machine), steps


class Minutes:
    """What the history would hold of an outcome."""

    def __init__(self, day: Day) -> None:
        outcome, steps = day.run()
        ends = [r.end_s for r in outcome.results if r.end_s is not None]
        count = int(max(ends, default=0.0)) // 60 + 1
        self._minutes = [Aggregate(seconds=60.0) for _ in range(count)]
        self._histograms = [
            {name: create_latency_histogram() for name in ("ttft", "tpot")} for _ in range(count)
        ]
        for result in outcome.results:
            self._add_result(result)
        self._add_steps(outcome, steps)
        self._add_levels(outcome.results)
        for minute, histograms in zip(self._minutes, self._histograms, strict=True):
            for name, histogram in histograms.items():
                minute.histograms[name] = {i: n for i, n in enumerate(histogram.counts) if n}

    def rows(self) -> list[tuple[int, Aggregate]]:
        return [(at * 60, minute) for at, minute in enumerate(self._minutes)]

    def _grow(self, at_s: float, name: str, by: float) -> None:
        counters = self._minutes[min(int(at_s) // 60, len(self._minutes) - 1)].counters
        counters[name] = counters.get(name, 0.0) + by

    def _add_result(self, result: SimulatedResult) -> None:
        asked = result.request
        self._grow(asked.arrival_s, "requests_received", 1)
        if result.is_refused:
            self._grow(asked.arrival_s, "rejected.queue_ttft", 1)
            return
        assert result.first_s is not None and result.end_s is not None
        assert result.ttft_s is not None and result.tpot_s is not None
        self._grow(asked.arrival_s, "prompt_tokens", asked.num_prompt_tokens)
        self._grow(result.end_s, "generation_tokens", result.num_tokens)
        self._grow(result.end_s, "finished.stop", 1)
        self._histograms[int(result.first_s) // 60]["ttft"].observe(result.ttft_s)
        self._histograms[int(result.end_s) // 60]["tpot"].observe(result.tpot_s)

    def _add_levels(self, results: Sequence[SimulatedResult]) -> None:
        """Looks every ten seconds."""
        served = [r for r in results if r.first_s is not None and r.end_s is not None]
        arrived = sorted(r.request.arrival_s for r in served)
        begun = sorted(r.first_s or 0.0 for r in served)
        ended = sorted(r.end_s or 0.0 for r in served)
        kv_used = max((r.kv_used for r in results), default=0.0)
        for at_s in range(0, 60 * len(self._minutes), 10):
            num_begun = bisect_right(begun, at_s)
            for name, value in (
                ("queue_depth", bisect_right(arrived, at_s) - num_begun),
                ("num_running", num_begun - bisect_right(ended, at_s)),
                ("num_blocks_held", kv_used * NUM_BLOCKS),
                ("num_blocks_total", NUM_BLOCKS),
            ):
                level = self._minutes[at_s // 60].levels.setdefault(name, Level())
                level.add(Level(float(value), float(value), 1))

    def _add_steps(self, outcome: Outcome, steps: list[tuple[float, SchedulerOutput]]) -> None:
        """When each step ran: one after the other, but for the time in which nothing was open."""
        now, last_end = 0.0, 0.0
        coming = sorted(outcome.results, key=lambda result: result.request.arrival_s)
        for step_ms, output in steps:
            while coming and coming[0].request.arrival_s <= now:
                last_end = max(last_end, coming.pop(0).end_s or 0.0)
            if now >= last_end - 1e-6 and coming:
                now = coming[0].request.arrival_s
            num_prefill = output.num_tokens - output.num_decode_rows
            self._grow(now, "num_steps", 1)
            self._grow(now, "step_ms.forward", step_ms)
            self._grow(now, "num_prompt_tokens", num_prefill)
            self._grow(now, "num_output_tokens", output.num_decode_rows)
            now += step_ms / 1e3


def observation_of(day: Day, rows: list[tuple[int, Aggregate]]) -> Observation:
    """What a server would hand to its doctor."""
    settings = Site([], day.scheduler, NUM_BLOCKS)
    facts = observe(settings, Day([], day.scheduler).run()[0], costs=COSTS).facts
    past = Past(seconds=DAY_S, minutes=msgspec.Raw(msgspec.msgpack.encode(rows)))
    return Observation(records=[], facts=facts, past=past)


def ttft_p95_of_hour(day: Day, start_s: int) -> float:
    """Milliseconds, of the requests whose first token came in that hour."""
    waits = [
        result.ttft_s * 1e3
        for result in day.run()[0].results
        if result.ttft_s is not None
        and result.first_s is not None
        and start_s <= result.first_s < start_s + HOUR_S
    ]
    return percentile(waits, 0.95)
