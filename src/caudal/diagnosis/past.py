"""What the history tells of a stretch of time, minute by minute and hour by hour."""

from __future__ import annotations

import re
import statistics
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from caudal.errors import InvalidRequestError
from caudal.metrics.history_store import QUARTER_S
from caudal.metrics.instruments import LATENCY_DETAIL_S
from caudal.metrics.reading import Aggregate, percentiles_ms

MINUTE_S = 60
HOUR_S = 3600
MIN_LAST_S, MAX_LAST_S = 600, 30 * 86_400
MAX_GAP_S = 180
"""Calm that does not end a time of waiting."""

_UNITS_S = {"m": 60, "h": 3600, "d": 86_400}
_QUEUE_REASONS = ("queue_requests", "queue_tokens", "queue_ttft", "deadline")


def parse_last(text: str) -> int:
    """Seconds of `90m`, `24h` or `7d`. Raises InvalidRequestError naming the limits."""
    found = re.fullmatch(r"([1-9][0-9]{0,5})([mhd])", text)
    seconds = int(found[1]) * _UNITS_S[found[2]] if found else 0
    if not MIN_LAST_S <= seconds <= MAX_LAST_S:
        raise InvalidRequestError(
            "last: must be a time between 10m and 30d, such as 90m, 24h or 7d.",
            param="last",
            code="invalid_value",
        )
    return seconds


@dataclass(frozen=True, slots=True)
class Stretch:
    """A minute, or several as one."""

    start: int
    """Seconds since the epoch."""
    happened: Aggregate

    @property
    def num_requests(self) -> float:
        """That came; refused ones included."""
        return self.happened.counters.get("requests_received", 0.0)

    @property
    def num_refused(self) -> float:
        """Of these, for want of capacity."""
        counters = self.happened.counters
        return sum(counters.get(f"rejected.{reason}", 0.0) for reason in _QUEUE_REASONS)

    @property
    def num_ended(self) -> float:
        """Answers that came to their end."""
        counters = self.happened.counters
        return counters.get("finished.stop", 0.0) + counters.get("finished.length", 0.0)

    @property
    def ttft_p95_ms(self) -> float | None:
        """None: no first token in that time."""
        return percentiles_ms(self.happened.histograms.get("ttft"))[1]

    def num_late(self, limit_ms: float) -> int:
        """First tokens that took longer than that, to the width of a bucket."""
        first = bisect_left(LATENCY_DETAIL_S, limit_ms / 1e3) + 1
        counts = self.happened.histograms.get("ttft", {})
        return sum(count for bucket, count in counts.items() if bucket >= first)

    @property
    def tpot_p50_ms(self) -> float | None:
        """None: no answer of two tokens ended in that time."""
        return percentiles_ms(self.happened.histograms.get("tpot"))[0]

    @property
    def busy_ms(self) -> float:
        """Time in steps."""
        return self.happened.total("step_ms")

    @property
    def queue_depth(self) -> float:
        """Mean number of requests that waited."""
        level = self.happened.levels.get("queue_depth")
        return 0.0 if level is None else level.mean

    @property
    def most_running(self) -> float:
        """Greatest number of requests in the batch."""
        level = self.happened.levels.get("num_running")
        return 0.0 if level is None else level.greatest

    @property
    def kv_used(self) -> float:
        """Greatest share of the KV blocks that requests held."""
        held = self.happened.levels.get("num_blocks_held")
        total = self.happened.levels.get("num_blocks_total")
        if held is None or total is None or not total.greatest:
            return 0.0
        return held.greatest / total.greatest

    def usual_lengths(self) -> tuple[float, float]:
        """Mean tokens of an accepted prompt and of an answer."""
        num_accepted = max(1.0, self.num_requests - self.num_refused)
        num_ended = max(1.0, self.num_ended)
        return self.count("prompt_tokens") / num_accepted, self.count(
            "generation_tokens"
        ) / num_ended

    def count(self, name: str) -> float:
        """How much a counter grew."""
        return self.happened.counters.get(name, 0.0)


def merged(stretches: Sequence[Stretch]) -> Stretch:
    """Several as one, which begins with the first."""
    whole = Aggregate()
    for stretch in stretches:
        whole.add(stretch.happened)
    return Stretch(stretches[0].start if stretches else 0, whole)


def by_hour(minutes: Sequence[Stretch]) -> list[list[Stretch]]:
    """Full hours of the clock, those without a minute left out."""
    hours: dict[int, list[Stretch]] = {}
    for minute in minutes:
        hours.setdefault(minute.start // HOUR_S, []).append(minute)
    return [hours[hour] for hour in sorted(hours)]


def usual_step_s(minutes: Sequence[Stretch]) -> float:
    """From the beginning of one to that of the next: the median; 0 for fewer than two."""
    steps = [after.start - before.start for before, after in pairwise(minutes)]
    return statistics.median(steps) if steps else 0.0


def unit_of(minutes: Sequence[Stretch]) -> str:
    """What the stretches are called."""
    return "quarters of an hour" if usual_step_s(minutes) >= QUARTER_S else "minutes"


def is_waiting(minute: Stretch, limit_ms: float) -> bool:
    """Whether its requests waited longer than that, or were refused for want of capacity."""
    return (minute.ttft_p95_ms or 0.0) > limit_ms or minute.num_refused > 0


def episodes(minutes: Sequence[Stretch], limit_ms: float) -> list[list[Stretch]]:
    """Times of waiting, with the calm minutes within; short calm does not part them."""
    found: list[list[Stretch]] = []
    gap_s = max(MAX_GAP_S, 2 * usual_step_s(minutes))
    calm: list[Stretch] = []
    for minute in minutes:
        if not is_waiting(minute, limit_ms):
            calm.append(minute)
            continue
        if found and minute.start - found[-1][-1].start <= gap_s:
            found[-1] += [*calm, minute]
        else:
            found.append([minute])
        calm = []
    return found


def length_s(episode: Sequence[Stretch]) -> float:
    """From the beginning of its first minute to the end of its last."""
    last = episode[-1]
    return last.start + max(MINUTE_S, last.happened.seconds) - episode[0].start
