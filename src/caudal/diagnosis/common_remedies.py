"""Remedies that need no single requests: settings, memory, hardware, another order of arrival."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Generic, Protocol, Self, TypeVar

from caudal.config import SchedulerConfig
from caudal.diagnosis.report import Prediction, Remedy, ServerFacts

MIN_GAIN_PERCENT = 5.0
"""Remedies that a simulation gives less are not mentioned."""
TARGET_LOAD = 0.7
"""Share of its capacity that a server should be asked for: above it queues grow quickly."""
MIN_SPARE = 0.25
"""Spare memory relative to the KV cache from which a larger one is proposed."""
SPARE_SHARE = 0.7
_MIB = 1 << 20


class Case(Protocol):
    """A load on a server; its changes return another one."""

    @property
    def scheduler(self) -> SchedulerConfig:
        """Settings."""

    def with_costs(self, factor: float) -> Self:
        """On a machine that takes `factor` of the time."""

    def with_blocks(self, factor: float) -> Self:
        """With room for `factor` times the tokens."""

    def with_scheduler(self, **changes: object) -> Self:
        """With other scheduler settings."""

    def thinned(self, num_servers: int) -> Self:
        """One of several equal servers."""

    def smoothed(self) -> Self:
        """The same requests at equal distances."""


C = TypeVar("C", bound=Case)


class Oracle(Protocol[C]):
    """Tells what a change would bring."""

    @property
    def scenario(self) -> C:
        """What happened."""

    @property
    def most_running(self) -> int:
        """Requests that ran together, at most."""

    def predict(self, scenario: C, metric: str) -> Prediction | None:
        """What `scenario` makes of a metric; None: nobody knows."""

    def refused_share(self, scenario: C) -> float | None:
        """Share of the requests that would be refused; None: nobody knows."""


class CommonRemedies(Generic[C]):
    """Makes remedies for one case, with their gain in one metric."""

    def __init__(self, predictor: Oracle[C], facts: ServerFacts, metric: str) -> None:
        self._predictor = predictor
        self._facts = facts
        self._metric = metric
        self._scenario = predictor.scenario

    def _predict(self, scenario: C) -> Prediction | None:
        return self._predictor.predict(scenario, self._metric)

    def _refused(self, scenario: C) -> str:
        share = self._predictor.refused_share(scenario)
        if share is None:
            return "how many cannot be told"
        return f"{share:.0%} of the requests would get a 429" if share >= 0.005 else "none refused"

    def _cap_queue(self) -> Iterator[Remedy]:
        config = self._scenario.scheduler
        limit_s = max(1.0, 2 * (config.ttft_ms or 500.0) / 1e3)
        if config.max_queue_ttft_s <= limit_s:
            return
        changed = self._scenario.with_scheduler(max_queue_ttft_s=limit_s)
        yield Remedy(
            "cap_queue",
            f"--max-queue-ttft {limit_s:g}",
            "refused requests",
            self._predict(changed),
            f"Refuse at once what would wait longer, with an honest Retry-After: "
            f"{self._refused(changed)}.",
        )

    def _more_seats(self) -> Iterator[Remedy]:
        config = self._scenario.scheduler
        doubled = 2 * config.max_num_seqs
        is_full = self._predictor.most_running >= config.max_num_seqs
        if not is_full or doubled > config.max_num_batched_tokens:
            return
        changed = self._scenario.with_scheduler(max_num_seqs=doubled)
        yield Remedy(
            "more_seats",
            f"--max-num-seqs {doubled}",
            "slower streams at the peak",
            self._predict(changed),
            "All seats are taken at the peak while requests wait.",
        )

    def _smooth(self) -> Iterator[Remedy]:
        yield Remedy(
            "smooth_arrivals",
            "",
            "a change in the clients",
            self._predict(self._scenario.smoothed()),
            "The same requests at equal distances, the best that spreading them can do: jitter on "
            "timers, a limit of requests in flight in each client, or /v1/batches for work that "
            "nobody waits for.",
        )

    def _quantise_kv(self) -> Iterator[Remedy]:
        sizes, dtype = self._facts.kv_block_bytes, self._facts.settings.get("kv_cache_dtype")
        own, small = sizes.get(str(dtype)), sizes.get("int8")
        if not own or not small or own <= small:
            return
        yield Remedy(
            "quantise_kv",
            "--kv-cache-dtype int8",
            "a little precision",
            self._predict(self._scenario.with_blocks(own / small)),
            f"{own / small:.1f} times the tokens in the same memory.",
        )

    def _enlarge_kv(self) -> Iterator[Remedy]:
        memory = self._facts.memory
        own = memory.get("kv_cache", 0)
        spare = memory.get("available", 0) - sum(
            memory.get(name, 0) for name in ("weights", "scratch", "kv_cache")
        )
        if own <= 0 or spare < MIN_SPARE * own:
            return
        size = min(2 * own, own + int(spare * SPARE_SHARE)) // _MIB * _MIB
        if size <= own:
            return
        yield Remedy(
            "enlarge_kv",
            f"--kv-cache-memory {size // _MIB}MiB",
            "memory",
            self._predict(self._scenario.with_blocks(size / own)),
            f"{spare / _MIB:,.0f} MiB were free when the server started.",
        )

    def _more_memory(self) -> Iterator[Remedy]:
        yield Remedy(
            "more_memory",
            "",
            "hardware",
            self._predict(self._scenario.with_blocks(2.0)),
            "A machine with twice the memory for the KV cache.",
        )

    def _hardware(self, load: float) -> Iterator[Remedy]:
        yield Remedy(
            "twice_the_cores",
            "",
            "hardware",
            self._predict(self._scenario.with_costs(0.5)),
            "A machine that computes twice as fast.",
        )
        number = max(2, math.ceil(load / TARGET_LOAD))
        yield Remedy(
            "more_servers",
            "",
            "hardware",
            self._predict(self._scenario.thinned(number)),
            f"{number} servers like this one that take turns.",
        )


def useful(remedies: list[Remedy]) -> list[Remedy]:
    """Those with a gain worth the words; without a prediction there is no telling."""
    return [
        remedy
        for remedy in remedies
        if remedy.predicted is None or remedy.predicted.gain_percent >= MIN_GAIN_PERCENT
    ]
