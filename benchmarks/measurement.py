"""What a run of a workload gave, and how several runs become one number."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class Run:
    """One workload, once, on one system."""

    wall_s: float = 0.0
    num_output_tokens: int = 0
    num_failed: int = 0
    ttft_s: list[float] = field(default_factory=list)
    """Per request that produced a token, from the moment it was sent."""
    gaps_s: list[float] = field(default_factory=list)
    """Between consecutive pieces of an answer; the first token is not a gap."""
    first_error: str = ""

    @property
    def output_tokens_per_s(self) -> float:
        return self.num_output_tokens / self.wall_s if self.wall_s else 0.0


@dataclass(frozen=True, slots=True)
class Summary:
    """Medians over the runs of one workload on one system."""

    output_tokens_per_s: float
    wall_s: float
    ttft_p50_ms: float
    ttft_p95_ms: float
    gap_p95_ms: float
    num_failed: int


def percentile(values: Sequence[float], percent: float) -> float:
    """Nearest-rank percentile; NaN for no values."""
    if not values:
        return math.nan
    rank = math.ceil(percent / 100 * len(values))
    return sorted(values)[max(0, rank - 1)]


def summarize(runs: Sequence[Run]) -> Summary:
    """Medians of at least one run."""
    assert runs

    def median(values: Sequence[float]) -> float:
        present = [value for value in values if not math.isnan(value)]
        return statistics.median(present) if present else math.nan

    return Summary(
        output_tokens_per_s=median([run.output_tokens_per_s for run in runs]),
        wall_s=median([run.wall_s for run in runs]),
        ttft_p50_ms=median([1e3 * percentile(run.ttft_s, 50) for run in runs]),
        ttft_p95_ms=median([1e3 * percentile(run.ttft_s, 95) for run in runs]),
        gap_p95_ms=median([1e3 * percentile(run.gaps_s, 95) for run in runs]),
        num_failed=sum(run.num_failed for run in runs),
    )
