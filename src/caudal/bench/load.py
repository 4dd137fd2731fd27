"""How requests arrive: a closed loop of users, or arrivals that wait for nobody."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from caudal.bench.workload import Conversation


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How requests arrive at each level, and what is declared about the server's state."""

    concurrency: tuple[int, ...] | None = None
    """Closed loop: so many users, each asking again once answered; a list is a sweep. With --rate:
    most requests in flight."""
    rate: tuple[float, ...] | None = None
    """Open loop: requests a second, whether or not earlier ones are answered; a list is a sweep,
    inf sends all at once."""
    burstiness: float = 1.0
    """Shape of the gamma-distributed gaps: 1 is a Poisson process, below 1 bursty, above 1 even."""
    duration_s: float | None = None
    """Stop sending after so many seconds; what is in flight is still awaited."""
    drain_s: float | None = None
    """After --duration, give up so many seconds later what is still in flight."""
    warmup: int = 4
    """Requests before the measurement, with prompts of their own; not counted."""
    cache: str = "cold"
    """Prefix cache: cold (each level's prompts begin with words never sent before), warm (each
    level's prompts are sent once before), as-is (neither)."""


@dataclass(frozen=True, slots=True)
class Load:
    """One level."""

    concurrency: int | None = None
    """Users of a closed loop; with a rate, the most conversations in flight."""
    rate: float | None = None
    """Arrivals a second; None: closed loop, unless the conversations have recorded starts."""
    burstiness: float = 1.0
    duration_s: float | None = None
    is_trace: bool = False

    @property
    def is_open(self) -> bool:
        """Whether arrivals wait for nobody."""
        return self.rate is not None or self.is_trace

    def __str__(self) -> str:
        if self.is_trace:
            return "trace"
        if self.rate is None:
            return f"{self.concurrency} user{'s' if self.concurrency != 1 else ''}"
        cap = f", ≤ {self.concurrency} in flight" if self.concurrency else ""
        return f"{self.rate:g} req/s{cap}"


def arrival_times(load: Load, conversations: list[Conversation], seed: int) -> list[float]:
    """Seconds after the start at which each conversation begins, ascending.

    The gaps are those of one seeded process, scaled by the rate: each level sees the same bursts.
    """
    if load.is_trace:
        return [conversation.start_s or 0.0 for conversation in conversations]
    assert load.rate is not None
    if math.isinf(load.rate):
        return [0.0] * len(conversations)
    source, now, times = random.Random(f"arrivals {seed}"), 0.0, []
    for _ in conversations:
        now += source.gammavariate(load.burstiness, 1 / load.burstiness) / load.rate
        times.append(now)
    return times
