"""Names what limited a server in the hours, days or weeks that its history remembers."""

from __future__ import annotations

import math

import msgspec

from caudal.diagnosis.backlog import Backlog, PastPredictor
from caudal.diagnosis.common_remedies import CommonRemedies, useful
from caudal.diagnosis.host import find_host_trouble, report_host
from caudal.diagnosis.past import (
    HOUR_S,
    Stretch,
    by_hour,
    episodes,
    is_waiting,
    length_s,
    merged,
    unit_of,
)
from caudal.diagnosis.patterns import Shape, Trend, find_trend
from caudal.diagnosis.report import (
    Diagnosis,
    Evidence,
    Finding,
    Observation,
    Past,
    PastSummary,
    Remedy,
    ServerFacts,
    WorstHour,
)
from caudal.diagnosis.scenario import scheduler_config
from caudal.diagnosis.serve_flags import serve_flags
from caudal.metrics.reading import Aggregate

MIN_MINUTES = 12
"""With requests; fewer are no pattern."""
MIN_HOUR_REQUESTS = 12
"""Of an hour that may be called the worst."""
WAITING_FACTOR = 2.0
"""TTFT p95 of a minute over its target, from which it is one of waiting."""
MIN_WAITING = 3
"""Minutes of it; fewer may be a cold start."""
REFUSED_SHARE = 0.01
"""Of an hour's requests, from which refusing is a finding whatever the others got."""
SUSTAINED_S = 900.0
"""A time of waiting as long as this is no burst if the work exceeds the machine."""
FULL_LOAD = 0.95
KV_FULL = 0.9
KV_SHARE = 0.3
"""Of the minutes of waiting in which the KV cache was full and seats were free."""
SLOW_SHARE = 0.2
"""Of the minutes in which the median time per token was above its target."""


def diagnose_past(observation: Observation, past: Past) -> Diagnosis:
    """Look at the minutes of the history."""
    rows = msgspec.msgpack.decode(past.minutes, type=list[tuple[int, Aggregate]])
    minutes = [Stretch(start, happened) for start, happened in rows]
    busy = [minute for minute in minutes if minute.num_requests > 0]
    observed_s = sum(minute.happened.seconds for minute in minutes)
    num_requests = round(merged(minutes).num_requests)
    num_busy_minutes = math.ceil(sum(minute.happened.seconds for minute in busy) / 60)
    limit_ms = WAITING_FACTOR * _target_ms(observation.facts)
    hour = _worst_hour(minutes, limit_ms)
    if len(busy) < MIN_MINUTES or hour is None or observation.facts.num_blocks <= 0:
        note = (
            f"The history has {len(busy)} {unit_of(minutes)} with requests in this time; a pattern "
            f"needs {MIN_MINUTES}, and an hour with {MIN_HOUR_REQUESTS} requests."
        )
        summary = PastSummary(
            seconds=past.seconds,
            observed_s=round(observed_s, 1),
            num_busy_minutes=num_busy_minutes,
            worst_hour=None,
            note=note,
        )
        flags = serve_flags(observation.facts)
        return Diagnosis([], num_requests, past.seconds, serve_flags=flags, past=summary)
    examination = _Examination(observation.facts, minutes, hour)
    host = report_host(hour.happened, None)
    seen = Observation(records=[], facts=observation.facts, host=host)
    findings = [*examination.findings(), *find_host_trouble(seen)]
    findings.sort(key=lambda found: ("critical", "warning", "info").index(found.severity))
    predictor = examination.predictor
    return Diagnosis(
        findings=findings,
        num_requests=num_requests,
        window_s=float(past.seconds),
        model_error_percent=predictor.error_percent if examination.is_waiting else None,
        calibration=round(predictor.calibration, 3),
        serve_flags=serve_flags(observation.facts),
        past=PastSummary(
            seconds=past.seconds,
            observed_s=round(observed_s, 1),
            num_busy_minutes=num_busy_minutes,
            worst_hour=examination.worst_hour(),
            note=predictor.doubt if examination.is_waiting else "",
        ),
    )


def _target_ms(facts: ServerFacts) -> float:
    """Time to the first token that a server aims at."""
    return scheduler_config(facts).ttft_ms or 1000.0


def _worst_hour(minutes: list[Stretch], limit_ms: float) -> Stretch | None:
    """The hour in which most requests waited too long or were refused.

    Hours in which that was one in twenty come first; where nobody waited, it is the slowest.
    """

    def badness(hour: Stretch) -> tuple[bool, float, float]:
        ttft = hour.ttft_p95_ms or 0.0
        return ttft > limit_ms, hour.num_late(limit_ms) + hour.num_refused, ttft

    hours = [merged(hour) for hour in by_hour(minutes)]
    hours = [hour for hour in hours if hour.num_requests >= MIN_HOUR_REQUESTS]
    return max(hours, key=badness) if hours else None


class _Examination:
    """Looks at minutes enough to tell a pattern."""

    def __init__(self, facts: ServerFacts, minutes: list[Stretch], hour: Stretch) -> None:
        config = scheduler_config(facts)
        self._facts = facts
        self._minutes = minutes
        self._hour = hour
        self._target_ms = _target_ms(facts)
        self._target_tpot_ms = config.tpot_ms
        self._seats = config.max_num_seqs
        self._unit = unit_of(minutes)
        self._limit_ms = WAITING_FACTOR * self._target_ms
        self._waiting = [minute for minute in minutes if is_waiting(minute, self._limit_ms)]
        self._episodes = episodes(minutes, self._limit_ms)
        self._longest = max(self._episodes, key=length_s, default=[])
        self.predictor = PastPredictor(minutes, facts, hour)
        self._pharmacy = _Pharmacy(self.predictor, facts, "ttft_p95_ms")

    @property
    def is_waiting(self) -> bool:
        """Whether there was an hour in which one in twenty waited too long, or was refused."""
        hour = self._hour
        is_late = (hour.ttft_p95_ms or 0.0) > self._limit_ms
        is_refusing = hour.num_refused >= REFUSED_SHARE * hour.num_requests
        has_cause = is_late or (hour.num_refused > 0 and is_refusing)
        return has_cause and len(self._waiting) >= MIN_WAITING

    def worst_hour(self) -> WorstHour:
        """In numbers."""
        hour = self._hour
        start = hour.start // HOUR_S * HOUR_S
        within = [m for m in self._minutes if start <= m.start < start + HOUR_S]
        return WorstHour(
            start=start,
            num_requests=round(hour.num_requests),
            num_refused=round(hour.num_refused),
            ttft_p95_ms=hour.ttft_p95_ms,
            queue_depth=round(hour.queue_depth, 1),
            kv_used=round(hour.kv_used, 3),
            load=round(self.predictor.load(within), 3),
        )

    def findings(self) -> list[Finding]:
        """Saturation and slow streams."""
        found: list[Finding] = []
        if self.is_waiting:
            found += self._saturation()
        return [*found, *self._slow_streams()]

    def _saturation(self) -> list[Finding]:
        """Where the KV cache is a cause, the rest is judged on what a larger one would leave."""
        found, scenario = [], self.predictor.scenario
        kv = self._kv_pressure()
        if kv is not None:
            found.append(kv)
            scenario = scenario.with_blocks(1e3)
        load = self.predictor.load(self._longest, scenario)
        is_sustained = length_s(self._longest) >= SUSTAINED_S and load >= FULL_LOAD
        ttft, queue = self._trends(self._minutes)
        climbs = Shape.CLIMB in (ttft.shape, queue.shape) and load >= FULL_LOAD
        if is_sustained or climbs:
            found.append(self._capacity(load))
        elif kv is None:
            found.append(self._bursts())
        return found

    def _trends(self, minutes: list[Stretch]) -> tuple[Trend, Trend]:
        """Of TTFT and of the queue."""
        ttft = [(float(m.start), m.ttft_p95_ms) for m in minutes]
        known = [(at, value) for at, value in ttft if value is not None]
        queue = [(float(m.start), m.queue_depth) for m in minutes]
        return find_trend(known, self._target_ms), find_trend(queue, 2.0)

    def _kv_pressure(self) -> Finding | None:
        waiting = self._waiting
        full = [m for m in waiting if m.kv_used >= KV_FULL and m.most_running < self._seats]
        if len(full) < KV_SHARE * len(waiting):
            return None
        num_preemptions = round(merged(self._minutes).count("num_preemptions"))
        evidence = [
            Evidence(
                "kv_full_minutes",
                len(full),
                round(KV_SHARE * len(waiting), 1),
                f"In {len(full)} of the {len(waiting)} {self._unit} in which requests waited, the "
                "KV cache was full and seats were free.",
            ),
            Evidence(
                "preemptions",
                num_preemptions,
                0,
                f"{num_preemptions} times a request lost its blocks and was computed again.",
            ),
            *self._in_the_worst_hour(),
        ]
        title = "The KV cache is too small for what runs together"
        return Finding(
            "kv_pressure", title, self._severity(), evidence, self._pharmacy.for_kv_pressure()
        )

    def _capacity(self, load: float) -> Finding:
        longest = self._longest
        peak = max(range(len(longest)), key=lambda index: longest[index].queue_depth)
        ttft, queue = self._trends(self._minutes)
        if Shape.CLIMB not in (ttft.shape, queue.shape):
            ttft, queue = self._trends(longest[: peak + 1])
        evidence = [
            Evidence(
                "load",
                round(load, 3),
                1.0,
                f"For {length_s(longest) / 60:,.0f} minutes on end the requests asked for "
                f"{load:.0%} of what this machine can do.",
            )
        ]
        for name, trend in (("TTFT", ttft), ("The queue", queue)):
            if trend.shape is Shape.CLIMB:
                text = (
                    f"{name} grew steadily: its last third is {trend.factor:.1f} times its first "
                    f"(rank correlation with time {trend.correlation:.2f})."
                )
                metric = f"{name.removeprefix('The ').lower()}_climb"
                evidence.append(Evidence(metric, round(trend.factor, 2), 2.0, text))
        evidence += self._in_the_worst_hour()
        title = "More work came than this machine can do"
        remedies = self._pharmacy.for_capacity(load)
        return Finding("capacity", title, "critical", evidence, remedies)

    def _bursts(self) -> Finding:
        num_times, num_waiting = len(self._episodes), len(self._waiting)
        load = self.predictor.load(self._minutes)
        minutes = f"{length_s(self._longest) / 60:,.0f} minutes"
        told = f"Once requests waited, for {minutes}, and it passed: a heap, no climb."
        if num_times > 1:
            told = (
                f"{num_times:,} times the waiting rose and came back, for {minutes} at most "
                f"({num_waiting:,} {self._unit} in all): a sawtooth, no climb."
            )
        evidence = [
            Evidence("episodes", num_times, 2, told),
            Evidence(
                "load",
                round(load, 3),
                FULL_LOAD,
                f"On the whole the requests asked for {load:.0%} of what this machine can do.",
            ),
            *self._in_the_worst_hour(),
        ]
        title = "Requests came in bursts"
        remedies = self._pharmacy.for_bursts(load)
        return Finding("bursts", title, self._severity(), evidence, remedies)

    def _in_the_worst_hour(self) -> list[Evidence]:
        hour = self._hour
        ttft = hour.ttft_p95_ms or 0.0
        refused = f", {hour.num_refused:,.0f} of them refused" if hour.num_refused else ""
        return [
            Evidence(
                "worst_hour_ttft_p95_ms",
                round(ttft, 1),
                self._target_ms,
                f"In the worst hour {hour.num_requests:,.0f} requests came{refused}; one in twenty "
                f"waited {ttft:,.0f} ms or longer for its first token.",
            )
        ]

    def _slow_streams(self) -> list[Finding]:
        target = self._target_tpot_ms
        known = [(m, m.tpot_p50_ms) for m in self._minutes]
        paces = [pace for _, pace in known if pace is not None]
        if target is None or not paces:
            return []
        slow = [pace for pace in paces if pace > target]
        if len(slow) < SLOW_SHARE * len(paces):
            return []
        worst = max(slow)
        evidence = [
            Evidence(
                "slow_minutes",
                len(slow),
                round(SLOW_SHARE * len(paces), 1),
                f"In {len(slow):,} of {len(paces):,} {self._unit} the median time per token was "
                f"above {target:g} ms; at worst {worst:,.0f} ms.",
            )
        ]
        remedies = [
            Remedy(
                "twice_the_cores",
                "",
                "hardware",
                None,
                "A machine that computes twice as fast; fewer streams at a time (--max-num-seqs) "
                "is the cheaper way, its gain is known while it lasts (caudal doctor).",
            )
        ]
        return [Finding("slow_streams", "Each stream was slow", "warning", evidence, remedies)]

    def _severity(self) -> str:
        return "critical" if (self._hour.ttft_p95_ms or 0.0) > 4 * self._target_ms else "warning"


class _Pharmacy(CommonRemedies[Backlog]):
    """Makes remedies for the history; knows no single requests."""

    def for_capacity(self, load: float) -> list[Remedy]:
        """More work came than the machine can do."""
        return useful([*self._more_seats(), *self._cap_queue(), *self._hardware(load)])

    def for_bursts(self, load: float) -> list[Remedy]:
        """Work came in heaps that the machine can do on the whole."""
        return useful(
            [
                *self._smooth(),
                *self._more_seats(),
                *self._cap_queue(),
                *self._hardware(max(load, 1.0)),
            ]
        )

    def for_kv_pressure(self) -> list[Remedy]:
        """The KV cache was too small for what ran together."""
        return useful([*self._quantise_kv(), *self._enlarge_kv(), *self._more_memory()])
