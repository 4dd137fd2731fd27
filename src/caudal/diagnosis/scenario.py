"""A recorded load on a configuration, and what changing either would bring."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

import msgspec

from caudal.config import SchedulerConfig
from caudal.diagnosis.patterns import mean, percentile
from caudal.diagnosis.report import LoadRecord, Observation, Prediction, ServerFacts
from caudal.scheduler.step_cost import StepCosts
from caudal.simulation.machine import Machine, Outcome, SimulatedRequest, simulate, step_time

MAX_REQUESTS = 400
MAX_OUTPUT_TOKENS = 40_000
"""Of the latest requests so many are simulated: a few seconds at most for one configuration."""
MAX_LOAD = 100.0
"""More than this is not told apart: all came at one moment."""
DONE_SHARE = 0.9
"""Part of a load whose end tells how fast all of it would go; the tail runs alone."""
MIN_CALIBRATED_MS = 200.0
MAX_CALIBRATION = 1.3
CALIBRATION_STEPS = 4
CALIBRATED = 0.08
"""Relative error of the simulated TTFT that is good enough."""

Served = tuple[float | None, float | None]
"""TTFT and TPOT of a request, in milliseconds."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """What is asked, of what."""

    requests: tuple[SimulatedRequest, ...]
    scheduler: SchedulerConfig
    num_blocks: int
    max_model_len: int
    enable_prefix_caching: bool
    costs: StepCosts

    def run(self) -> Outcome:
        """Simulate it."""
        machine = Machine(
            step_ms=step_time(self.costs),
            scheduler=self.scheduler,
            num_blocks=self.num_blocks,
            max_model_len=self.max_model_len,
            enable_prefix_caching=self.enable_prefix_caching,
            prior=self.costs,
        )
        return simulate(self.requests, machine)

    def with_costs(self, factor: float) -> Scenario:
        """On a machine that takes `factor` of the time."""
        return replace(self, costs=scaled(self.costs, factor))

    def with_blocks(self, factor: float) -> Scenario:
        """With room for `factor` times the tokens."""
        return replace(self, num_blocks=max(1, int(self.num_blocks * factor)))

    def with_scheduler(self, **changes: object) -> Scenario:
        """With other scheduler settings."""
        return replace(self, scheduler=replace(self.scheduler, **changes))  # type: ignore[arg-type]

    def thinned(self, num_servers: int) -> Scenario:
        """One of several equal servers that take turns."""
        return replace(self, requests=self.requests[::num_servers])

    def limited(self, max_model_len: int) -> Scenario:
        """Answers end at the limit, and prompts that leave no room for one are refused."""
        kept = []
        for request in self.requests:
            room = max_model_len - request.num_prompt_tokens
            if room >= 1:
                num_output, limit = min(request.num_output_tokens, room), request.max_tokens
                kept.append(
                    replace(request, num_output_tokens=num_output, max_tokens=min(limit, room))
                )
        return replace(self, requests=tuple(kept), max_model_len=max_model_len)

    def smoothed(self) -> Scenario:
        """The same requests at equal distances."""
        times = [request.arrival_s for request in self.requests]
        step = (times[-1] - times[0]) / max(1, len(times) - 1)
        moved = [
            replace(request, arrival_s=times[0] + index * step)
            for index, request in enumerate(self.requests)
        ]
        return replace(self, requests=tuple(moved))

    def at_once(self) -> Scenario:
        """All requests come together, and none is refused."""
        moved = tuple(replace(request, arrival_s=0.0) for request in self.requests)
        lifted = self.with_scheduler(
            max_queue_requests=1 << 30, max_queue_tokens=1 << 40, max_queue_ttft_s=1e9
        )
        return replace(lifted, requests=moved)

    @property
    def span_s(self) -> float:
        """Time in which the requests came, with the last one's share of it."""
        times = [request.arrival_s for request in self.requests]
        count = len(times)
        return (times[-1] - times[0]) * count / (count - 1) if count > 1 else 0.0


def scaled(costs: StepCosts, factor: float) -> StepCosts:
    """Those of a machine that takes `factor` of the time."""
    return StepCosts(*(getattr(costs, each.name) * factor for each in fields(costs)))


def create_scenario(observation: Observation) -> Scenario:
    """The latest of the recorded requests on the server as it is."""
    facts = observation.facts
    return Scenario(
        requests=tuple(map(as_request, latest(observation.records))),
        scheduler=scheduler_config(facts),
        num_blocks=max(1, facts.num_blocks),
        max_model_len=facts.max_model_len,
        enable_prefix_caching=bool(facts.settings.get("enable_prefix_caching", True)),
        costs=facts.costs,
    )


def scheduler_config(facts: ServerFacts) -> SchedulerConfig:
    """The scheduler's settings among the server's."""
    names = {field.name for field in fields(SchedulerConfig)}
    own = {name: value for name, value in facts.settings.items() if name in names}
    return msgspec.convert(own, SchedulerConfig, strict=False)


def latest(records: Sequence[LoadRecord]) -> list[LoadRecord]:
    """As many of the last records as a simulation takes.

    Nobody knows how long the answers to refused requests would have been: as long as most.
    """
    num_left = MAX_OUTPUT_TOKENS
    kept: list[LoadRecord] = []
    usual = round(
        percentile([float(r.num_output_tokens) for r in records if not r.is_refused], 0.5)
    )
    for record in reversed(records):
        if record.is_refused:
            guess = max(1, min(record.max_tokens, usual))
            record = msgspec.structs.replace(record, num_output_tokens=guess)
        num_left -= record.num_output_tokens
        if num_left < 0 or len(kept) == MAX_REQUESTS:
            break
        kept.append(record)
    return kept[::-1]


def as_request(record: LoadRecord) -> SimulatedRequest:
    """What a record asks of a machine."""
    return SimulatedRequest(
        arrival_s=record.arrival_s,
        num_prompt_tokens=record.num_prompt_tokens,
        num_output_tokens=max(1, record.num_output_tokens),
        max_tokens=record.max_tokens,
        prefix_ids=record.prefix_ids,
    )


def ttft_p95(served: Sequence[Served]) -> float:
    """Milliseconds to the first token that one in twenty exceeds."""
    return percentile([ttft for ttft, _ in served if ttft is not None], 0.95)


def ttft_mean(served: Sequence[Served]) -> float:
    """Mean milliseconds to the first token."""
    return mean([ttft for ttft, _ in served if ttft is not None])


def tpot_p50(served: Sequence[Served]) -> float:
    """Median milliseconds of an output token."""
    return percentile([tpot for _, tpot in served if tpot is not None], 0.5)


METRICS: dict[str, Callable[[Sequence[Served]], float]] = {
    "ttft_p95_ms": ttft_p95,
    "ttft_mean_ms": ttft_mean,
    "tpot_p50_ms": tpot_p50,
}
"""Names as predictions have them; less is better for all."""


def served_of(records: Sequence[LoadRecord]) -> list[Served]:
    """What the recorded requests got."""
    return [(record.ttft_ms, record.tpot_ms) for record in records if not record.is_refused]


def served_in(outcome: Outcome) -> list[Served]:
    """What the simulated requests got."""
    return [
        (None if r.ttft_s is None else r.ttft_s * 1e3, None if r.tpot_s is None else r.tpot_s * 1e3)
        for r in outcome.results
        if not r.is_refused
    ]


class Predictor:
    """Simulates changes to one scenario; keeps what it has simulated."""

    def __init__(self, observation: Observation) -> None:
        self.measured = served_of(latest(observation.records))
        self._outcomes: dict[Scenario, Outcome] = {}
        self.scenario, self.calibration = self._calibrated(create_scenario(observation))

    def _calibrated(self, scenario: Scenario) -> tuple[Scenario, float]:
        """The scenario with costs scaled so that it reproduces the measured TTFT, and the factor.

        Close to its capacity a server waits twice as long for a few percent of slowness that the
        fit of the costs rightly takes for outliers. Where nobody waited there is nothing to learn.
        """
        measured = ttft_p95(self.measured)
        if measured < MIN_CALIBRATED_MS:
            return scenario, 1.0

        def error(factor: float) -> float:
            served = served_in(self.outcome(scenario.with_costs(factor)))
            return math.log(max(1e-6, ttft_p95(served)) / measured)

        best = first = error(1.0)
        factor, low, high = 1.0, 1.0 / MAX_CALIBRATION, MAX_CALIBRATION
        low, high = (1.0, high) if first < 0 else (low, 1.0)
        for _ in range(CALIBRATION_STEPS):
            if abs(best) <= CALIBRATED:
                break
            middle = math.sqrt(low * high)
            here = error(middle)
            low, high = (middle, high) if here < 0 else (low, middle)
            if abs(here) < abs(best):
                best, factor = here, middle
        return scenario.with_costs(factor), factor

    def outcome(self, scenario: Scenario) -> Outcome:
        """The simulated outcome of a scenario."""
        found = self._outcomes.get(scenario)
        if found is None:
            found = self._outcomes[scenario] = scenario.run()
        return found

    @property
    def baseline(self) -> Outcome:
        """Of the server as it is."""
        return self.outcome(self.scenario)

    @property
    def most_running(self) -> int:
        """Requests that ran together, at most."""
        return max((result.num_running for result in self.baseline.results), default=0)

    def metric(self, name: str, scenario: Scenario | None = None) -> float:
        """A metric in simulation."""
        return METRICS[name](served_in(self.outcome(scenario or self.scenario)))

    def predict(self, scenario: Scenario, metric: str) -> Prediction | None:
        """What `scenario` would make of the measured value: it changes by the simulated ratio.

        None if there is nothing to compare with.
        """
        measured = METRICS[metric](self.measured)
        before, after = self.metric(metric), self.metric(metric, scenario)
        if not (measured > 0 and before > 0) or not scenario.requests:
            return None
        ratio = after / before
        return Prediction(
            metric=metric,
            before=round(measured, 1),
            after=round(measured * ratio, 1),
            gain_percent=round((1 - ratio) * 100, 1),
        )

    def refused_share(self, scenario: Scenario) -> float:
        """Share of the requests that would be refused."""
        results = self.outcome(scenario).results
        return mean([float(result.is_refused) for result in results])

    def load(self, scenario: Scenario | None = None) -> float:
        """Work that comes, over work that the machine can do: above 1 the queue only grows.

        From how long the machine takes if all requests are there from the start.
        """
        scenario = scenario or self.scenario
        if scenario.span_s <= 0:
            return MAX_LOAD
        outcome = self.outcome(scenario.at_once())
        ends = sorted(result.end_s for result in outcome.results if result.end_s is not None)
        if not ends:
            return 0.0
        end_s = ends[min(len(ends) - 1, int(len(ends) * DONE_SHARE))]
        # When nine tenths are done the others are about halfway.
        return min(MAX_LOAD, end_s / ((1 + DONE_SHARE) / 2 * scenario.span_s))
