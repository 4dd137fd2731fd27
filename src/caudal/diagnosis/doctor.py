"""Names what limits a server: capacity, bursts, KV cache, slow streams, cache misses, the host."""

from __future__ import annotations

from caudal.diagnosis.host import find_host_trouble
from caudal.diagnosis.past_doctor import diagnose_past
from caudal.diagnosis.patterns import (
    MIN_POINTS,
    Shape,
    Trend,
    dispersion,
    find_trend,
    mean,
    percentile,
)
from caudal.diagnosis.prefixes import find_prefix_trouble
from caudal.diagnosis.remedies import Pharmacy
from caudal.diagnosis.report import Diagnosis, Evidence, Finding, LoadRecord, Observation
from caudal.diagnosis.scenario import Predictor, latest, served_in, ttft_p95
from caudal.diagnosis.serve_flags import serve_flags

FULL_LOAD = 0.95
"""Load from which a steady climb means too little capacity."""
KV_FULL = 0.7
"""Held share of the KV cache (at one arrival in ten, or more) that is pressure if others wait."""
WAITING_WITH_SEATS = 0.1
"""Share of arrivals that found others waiting though seats were free."""
KV_CAUSE_PERCENT = 15.0
"""What a KV cache without bounds must bring for the cache to be a cause."""
WAITING_FACTOR = 2.0
"""TTFT p95 over its target from which a wait is one, whatever its shape."""
WAITING_SHARE = 0.2
"""Share of arrivals that find others waiting."""
BURSTY = 1.6
"""Dispersion of arrivals from which they come in heaps."""
SLOWDOWN = 1.3
"""Time per token, last third over first, that counts as falling speed."""

_SEVERITIES = ("critical", "warning", "info")


def diagnose(observation: Observation) -> Diagnosis:
    """Look at everything; a second or so for each configuration that is simulated."""
    if observation.past is not None:
        return diagnose_past(observation, observation.past)
    records = latest(observation.records)
    findings: list[Finding] = []
    error: float | None = None
    calibration = 1.0
    if len(records) >= MIN_POINTS and observation.facts.num_blocks > 0:
        examination = _Examination(observation, records)
        findings += examination.saturation()
        findings += examination.slow_streams()
        findings += find_prefix_trouble(observation, records, examination.predictor)
        error = examination.model_error_percent()
        calibration = round(examination.predictor.calibration, 3)
    findings += find_host_trouble(observation)
    findings.sort(key=lambda finding: _SEVERITIES.index(finding.severity))
    return Diagnosis(
        findings=findings,
        num_requests=len(records),
        window_s=round(records[-1].arrival_s - records[0].arrival_s, 3) if records else 0.0,
        model_error_percent=error,
        calibration=calibration,
        serve_flags=serve_flags(observation.facts),
    )


class _Examination:
    """Looks at enough requests to tell a pattern."""

    def __init__(self, observation: Observation, records: list[LoadRecord]) -> None:
        self._observation = observation
        self._records = records
        self.predictor = Predictor(observation)
        config = self.predictor.scenario.scheduler
        self._target_ttft_ms = config.ttft_ms or 1000.0
        self._target_tpot_ms = config.tpot_ms

    def model_error_percent(self) -> float | None:
        """How far the simulation of what was recorded is from what was measured."""
        measured = ttft_p95(self.predictor.measured)
        if measured <= 0:
            return None
        return round(abs(self.predictor.metric("ttft_p95_ms") / measured - 1) * 100, 1)

    def saturation(self) -> list[Finding]:
        """KV pressure, capacity, bursts: what makes requests wait.

        Where the KV cache is a cause, the rest is judged on what a larger one would leave.
        """
        found = []
        scenario = self.predictor.scenario
        ample = scenario.with_blocks(self._ample_factor())
        kv = self._kv_pressure(ample.num_blocks)
        if kv is not None:
            found.append(kv)
            points = _simulated_ttft(self.predictor, ample.num_blocks)
        else:
            points = [(r.arrival_s, r.ttft_ms) for r in self._records if r.ttft_ms is not None]
        waiting = find_trend([(r.arrival_s, float(r.num_waiting)) for r in self._records], 2.0)
        ttft = find_trend(points, self._target_ttft_ms)
        climbs = (
            Shape.CLIMB in (ttft.shape, waiting.shape)
            if kv is None
            else (ttft.shape is Shape.CLIMB)
        )
        load = self.predictor.load(ample)
        spread = dispersion([record.arrival_s for record in self._records])
        in_heaps = ttft.shape is Shape.SAWTOOTH or spread >= BURSTY
        is_kept_waiting = kv is None and self._is_kept_waiting()
        if climbs and load >= FULL_LOAD:
            found.append(self._capacity(ttft, waiting, load))
        elif (ttft.shape is not Shape.FLAT or is_kept_waiting) and in_heaps:
            found.append(self._bursts(ttft, load, spread))
        elif is_kept_waiting and load >= FULL_LOAD:
            found.append(self._capacity(ttft, waiting, load))
        return found

    def _is_kept_waiting(self) -> bool:
        """Whether TTFT is far above its target because requests find others waiting.

        By the simulation: what a server knows of its queue when requests come together is old.
        """
        if ttft_p95(self.predictor.measured) < WAITING_FACTOR * self._target_ttft_ms:
            return False
        results = self.predictor.baseline.results
        return mean([float(result.num_waiting > 0) for result in results]) >= WAITING_SHARE

    def _ample_factor(self) -> float:
        """Blocks for all seats at the longest recorded length, relative to those there are."""
        scenario, facts = self.predictor.scenario, self._observation.facts
        longest = max(r.num_prompt_tokens + r.num_output_tokens for r in scenario.requests)
        seats = min(scenario.scheduler.max_num_seqs, len(scenario.requests))
        needed = seats * (-(-longest // facts.block_size) + 8)
        return max(1.0, needed / scenario.num_blocks)

    def _kv_pressure(self, num_ample_blocks: int) -> Finding | None:
        records, scenario = self._records, self.predictor.scenario
        seats = scenario.scheduler.max_num_seqs
        # What a server knows when a request comes may be a step old; the simulation knows.
        views = (records, self.predictor.baseline.results)
        used = max(percentile([each.kv_used for each in view], 0.9) for view in views)
        blocked = max(
            mean([float(each.num_waiting > 0 and each.num_running < seats) for each in view])
            for view in views
        )
        num_preemptions = sum(record.num_preemptions for record in records)
        is_held_up = num_preemptions > 0 or blocked >= WAITING_WITH_SEATS
        if used < KV_FULL or not is_held_up or num_ample_blocks <= scenario.num_blocks:
            return None
        ample = self.predictor.predict(
            scenario.with_blocks(num_ample_blocks / scenario.num_blocks), "ttft_p95_ms"
        )
        if ample is None or ample.gain_percent < KV_CAUSE_PERCENT:
            return None
        evidence = [
            Evidence("kv_used", round(used, 3), KV_FULL, f"{used:.0%} of the KV cache is held."),
            Evidence(
                "preemptions",
                num_preemptions,
                0,
                f"{num_preemptions} times a request lost its blocks and was computed again.",
            ),
            Evidence(
                "waiting_with_free_seats",
                round(blocked, 3),
                WAITING_WITH_SEATS,
                f"At {blocked:.0%} of the arrivals others waited though seats were free.",
            ),
            Evidence(
                "gain_of_ample_kv_percent",
                ample.gain_percent,
                KV_CAUSE_PERCENT,
                f"With room for all, TTFT p95 would be {ample.after:,.0f} ms instead of "
                f"{ample.before:,.0f}.",
            ),
        ]
        remedies = Pharmacy(
            self.predictor, self._observation.facts, "ttft_p95_ms"
        ).for_kv_pressure()
        title = "The KV cache is too small for what runs together"
        return Finding("kv_pressure", title, self._severity(), evidence, remedies)

    def _capacity(self, ttft: Trend, waiting: Trend, load: float) -> Finding:
        evidence = [
            Evidence(
                "load",
                round(load, 3),
                1.0,
                f"The requests ask for {load:.0%} of what this machine can do.",
            ),
            Evidence(
                "ttft_climb",
                round(ttft.factor, 2),
                2.0,
                f"TTFT grows steadily: the last third is {ttft.factor:.1f} times the first "
                f"(rank correlation with time {ttft.correlation:.2f}).",
            ),
            Evidence(
                "queue_climb",
                round(waiting.factor, 2),
                2.0,
                f"The queue grows likewise: {waiting.factor:.1f} times.",
            ),
        ]
        remedies = Pharmacy(self.predictor, self._observation.facts, "ttft_p95_ms").for_capacity(
            load
        )
        title = "More work comes than this machine can do"
        return Finding("capacity", title, "critical", evidence, remedies)

    def _bursts(self, ttft: Trend, load: float, spread: float) -> Finding:
        p95 = ttft_p95(self.predictor.measured)
        evidence = [
            Evidence(
                "ttft_p95_ms",
                round(p95, 1),
                self._target_ttft_ms,
                f"One request in twenty waits {p95:,.0f} ms or longer for its first token.",
            ),
            Evidence(
                "load",
                round(load, 3),
                FULL_LOAD,
                f"On the whole the requests ask for {load:.0%} of what this machine can do.",
            ),
            Evidence(
                "arrival_dispersion",
                round(spread, 2),
                BURSTY,
                f"Arrivals vary {spread:.1f} times as much as independent ones would.",
            ),
        ]
        if ttft.num_teeth:
            times = "once" if ttft.num_teeth == 1 else f"{ttft.num_teeth} times"
            text = f"TTFT rises and comes back {times}: a sawtooth, no climb."
            evidence.append(Evidence("ttft_teeth", ttft.num_teeth, 2, text))
        remedies = Pharmacy(self.predictor, self._observation.facts, "ttft_p95_ms").for_bursts(load)
        title = "Requests come in bursts"
        return Finding("bursts", title, self._severity(), evidence, remedies)

    def slow_streams(self) -> list[Finding]:
        """Time per token above its target, or growing."""
        points = [(r.arrival_s, r.tpot_ms) for r in self._records if r.tpot_ms is not None]
        if len(points) < MIN_POINTS:
            return []
        trend = find_trend(points)
        median, target = percentile([ms for _, ms in points], 0.5), self._target_tpot_ms
        is_slow = target is not None and median > target
        is_falling = trend.factor >= SLOWDOWN and trend.correlation > 0.5
        if not is_slow and not is_falling:
            return []
        running = _mean_running(self._records)
        limit = target or median / trend.factor
        evidence = [
            Evidence("tpot_p50_ms", round(median, 1), limit, f"A token takes {median:.0f} ms."),
            Evidence(
                "tpot_growth",
                round(trend.factor, 2),
                SLOWDOWN,
                f"The last third takes {trend.factor:.1f} times as long as the first.",
            ),
            Evidence(
                "running",
                round(running, 1),
                0,
                f"{running:.1f} streams shared the machine on average.",
            ),
        ]
        pharmacy = Pharmacy(self.predictor, self._observation.facts, "tpot_p50_ms")
        remedies = pharmacy.for_slow_streams(limit)
        severity = "warning" if is_slow else "info"
        return [Finding("slow_streams", "Each stream is slow", severity, evidence, remedies)]

    def _severity(self) -> str:
        return (
            "critical"
            if ttft_p95(self.predictor.measured) > 4 * self._target_ttft_ms
            else ("warning")
        )


def _mean_running(records: list[LoadRecord]) -> float:
    """Streams at a time, by Little's law: the time that all took over the time that passed."""
    took_s = [(r.tpot_ms or 0.0) * max(0, r.num_output_tokens - 1) / 1e3 for r in records]
    ends = [
        r.arrival_s + (r.ttft_ms or 0.0) / 1e3 + took
        for r, took in zip(records, took_s, strict=True)
    ]
    return sum(took_s) / max(1e-3, max(ends) - records[0].arrival_s)


def _simulated_ttft(predictor: Predictor, num_blocks: int) -> list[tuple[float, float]]:
    """(arrival, TTFT in ms) with another number of blocks."""
    scenario = predictor.scenario
    outcome = predictor.outcome(scenario.with_blocks(num_blocks / scenario.num_blocks))
    served = served_in(outcome)
    kept = [result for result in outcome.results if not result.is_refused]
    return [
        (result.request.arrival_s, ttft)
        for result, (ttft, _) in zip(kept, served, strict=True)
        if ttft is not None
    ]
