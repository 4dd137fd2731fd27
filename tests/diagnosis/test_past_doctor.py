"""The doctor misjudges a day that it knows from its minutes only, or promises what is not so."""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Callable

import msgspec
import pytest

from caudal.diagnosis.doctor import diagnose
from caudal.diagnosis.past import parse_last
from caudal.diagnosis.report import Diagnosis, Finding
from caudal.errors import InvalidRequestError
from caudal.metrics.reading import Aggregate, Level
from tests.diagnosis.days import (
    HOUR_S,
    Day,
    Minutes,
    arrivals,
    observation_of,
    requests_at,
    ttft_p95_of_hour,
)

TOLERANCE = 0.25
"""Of the measured gain."""


@functools.cache
def healthy_day() -> Day:
    """Up to half of what the machine can do."""
    return Day(requests_at(arrivals([60, 120, 240, 360, 120])))


@functools.cache
def climbing_day() -> Day:
    """Two hours with a tenth more than the machine can do."""
    return Day(requests_at(arrivals([100, 300, 850, 850, 100])))


@functools.cache
def bursty_day() -> Day:
    """Sixty requests within half a minute, once an hour, at any place within minutes."""
    starts = (600, 635, 1200, 1825, 40)
    bursts = [
        hour * HOUR_S + start + index * 0.5
        for hour, start in enumerate(starts)
        for index in range(60)
    ]
    return Day(requests_at([*arrivals([60] * 5), *bursts]))


@functools.cache
def _encoded(make: Callable[[], Day]) -> bytes:
    return msgspec.msgpack.encode(Minutes(make()).rows())


def rows_of(make: Callable[[], Day]) -> list[tuple[int, Aggregate]]:
    """A copy: a day is simulated once."""
    return msgspec.msgpack.decode(_encoded(make), type=list[tuple[int, Aggregate]])


@functools.cache
def diagnosis_of(make: Callable[[], Day]) -> Diagnosis:
    return diagnose(observation_of(make(), rows_of(make)))


@functools.cache
def measured_ms(make: Callable[[], Day], start_s: int) -> float:
    return ttft_p95_of_hour(make(), start_s)


def finding_of(make: Callable[[], Day]) -> Finding:
    (finding,) = diagnosis_of(make).findings
    return finding


def check_promise(make: Callable[[], Day], action: str, changed: Day) -> None:
    """The predicted gain against a simulation of each request of that day."""
    past = diagnosis_of(make).past
    assert past is not None and past.worst_hour is not None
    start = past.worst_hour.start
    (remedy,) = [each for each in finding_of(make).remedies if each.action == action]
    assert remedy.predicted is not None
    before = measured_ms(make, start)
    measured = (1 - ttft_p95_of_hour(changed, start) / before) * 100
    assert remedy.predicted.before == pytest.approx(before, rel=0.1)
    assert remedy.predicted.gain_percent == pytest.approx(measured, rel=TOLERANCE)


def test_a_healthy_day_has_no_findings_and_still_names_its_busiest_hour() -> None:
    diagnosis = diagnosis_of(healthy_day)
    assert diagnosis.findings == []
    past = diagnosis.past
    assert past is not None and past.note == "" and past.worst_hour is not None
    assert past.worst_hour.num_refused == 0
    assert past.num_busy_minutes > 100


def test_a_climb_over_hours_is_capacity_in_its_worst_hour_with_gains() -> None:
    diagnosis = diagnosis_of(climbing_day)
    finding = finding_of(climbing_day)
    assert (finding.id, finding.severity) == ("capacity", "critical")
    evidence = {each.metric: each.value for each in finding.evidence}
    assert evidence["load"] > 0.95 and evidence["ttft_climb"] > 2 and evidence["queue_climb"] > 2
    past = diagnosis.past
    assert past is not None and past.worst_hour is not None
    assert past.worst_hour.start // HOUR_S in (2, 3)
    assert past.worst_hour.ttft_p95_ms is not None and past.worst_hour.ttft_p95_ms > 60_000
    assert [remedy.action for remedy in finding.remedies][-2:] == [
        "twice_the_cores",
        "more_servers",
    ]
    day = climbing_day()
    check_promise(climbing_day, "twice_the_cores", dataclasses.replace(day, speed=2.0))
    check_promise(climbing_day, "more_servers", Day(day.requests[::2]))
    capped = dataclasses.replace(day.scheduler, max_queue_ttft_s=10.0)
    check_promise(climbing_day, "cap_queue", dataclasses.replace(day, scheduler=capped))


def test_a_sawtooth_over_the_day_is_bursts_with_gains() -> None:
    finding = finding_of(bursty_day)
    assert finding.id == "bursts"
    evidence = {each.metric: each.value for each in finding.evidence}
    assert evidence["episodes"] == 5 and evidence["load"] < 0.5
    assert finding.remedies[0].action == "smooth_arrivals"
    day = bursty_day()
    check_promise(bursty_day, "twice_the_cores", dataclasses.replace(day, speed=2.0))
    check_promise(bursty_day, "more_servers", Day(day.requests[::2]))


def test_one_heap_is_no_climb() -> None:
    heap = [HOUR_S + 630 + index * 0.5 for index in range(60)]
    day = Day(requests_at([*arrivals([60] * 2), *heap]))
    (finding,) = diagnose(observation_of(day, Minutes(day).rows())).findings
    assert finding.id == "bursts" and finding.evidence[0].text.startswith("Once requests waited")


def test_a_day_that_is_half_recorded_is_judged_by_what_there_is() -> None:
    day, rows = climbing_day(), rows_of(climbing_day)
    del rows[20:60]
    diagnosis = diagnose(observation_of(day, rows))
    assert [finding.id for finding in diagnosis.findings] == ["capacity"]
    assert diagnosis.past is not None and diagnosis.past.observed_s == len(rows) * 60


def test_waiting_that_minutes_do_not_explain_gets_remedies_without_numbers() -> None:
    """Heaps within minutes: few requests a minute, each of which waits."""
    day, rows = healthy_day(), rows_of(healthy_day)
    for _, minute in rows:
        late = {bucket + 60: count for bucket, count in minute.histograms["ttft"].items()}
        minute.histograms["ttft"] = {min(bucket, 160): count for bucket, count in late.items()}
    diagnosis = diagnose(observation_of(day, rows))
    assert diagnosis.past is not None and "ask while it lasts" in diagnosis.past.note
    (finding,) = diagnosis.findings
    assert finding.remedies
    assert all(remedy.predicted is None for remedy in finding.remedies)


def test_a_history_of_another_machine_predicts_nothing() -> None:
    day, rows = climbing_day(), rows_of(climbing_day)
    for _, minute in rows:
        minute.counters = {
            name: value * (5 if name.startswith("step_ms") else 1)
            for name, value in minute.counters.items()
        }
    diagnosis = diagnose(observation_of(day, rows))
    assert diagnosis.past is not None and "do not describe" in diagnosis.past.note
    assert all(r.predicted is None for finding in diagnosis.findings for r in finding.remedies)


def test_a_full_kv_cache_with_free_seats_is_kv_pressure() -> None:
    day, rows = climbing_day(), rows_of(climbing_day)
    for _, minute in rows:
        for name in ("num_blocks_held", "num_blocks_total"):
            minute.levels[name] = Level(600.0, 600.0, 1)
        minute.levels["num_running"] = Level(5.0, 5.0, 1)
    seen = observation_of(day, rows)
    facts = msgspec.structs.replace(seen.facts, num_blocks=42)
    diagnosis = diagnose(msgspec.structs.replace(seen, facts=facts))
    found = {each.id: each for each in diagnosis.findings}
    assert "quantise_kv" in [remedy.action for remedy in found["kv_pressure"].remedies]


def test_refusing_is_a_finding_though_the_others_are_served_well() -> None:
    day, rows = healthy_day(), rows_of(healthy_day)
    for _, minute in rows[120:200]:
        minute.counters["requests_received"] = minute.counters.get("requests_received", 0.0) + 30
        minute.counters["rejected.queue_ttft"] = 20.0
    (finding,) = diagnose(observation_of(day, rows)).findings
    assert finding.id == "capacity"
    assert "of them refused" in finding.evidence[-1].text


@pytest.mark.parametrize("count", [0, 1, 11])
def test_too_short_a_history_says_so(count: int) -> None:
    rows = rows_of(climbing_day)[:count]
    diagnosis = diagnose(observation_of(climbing_day(), rows))
    assert diagnosis.findings == []
    assert diagnosis.past is not None and "a pattern needs 12" in diagnosis.past.note


@pytest.mark.parametrize("seed", range(8))
def test_whatever_was_recorded_is_diagnosed(seed: int) -> None:
    """Minutes that no server would have recorded so."""
    source = random.Random(seed)
    names = (
        *("requests_received", "finished.stop", "rejected.queue_ttft", "prompt_tokens"),
        *("generation_tokens", "num_steps", "step_ms.forward", "num_output_tokens"),
        *("num_prompt_tokens", "prefix_hits_tokens", "prefix_queries_tokens", "cpu_ms.kernels"),
        *("throttled_s", "steal_s", "machine_s", "cpu_ms.engine"),
    )
    rows = []
    for at in range(source.choice([13, 200])):
        counters = {name: source.choice([0.0, 1.0, 1e5]) for name in names if source.random() < 0.7}
        levels = {"queue_depth": Level(9.0, 9.0, 1)} if source.random() < 0.5 else {}
        ttft = {source.randrange(170): source.randint(1, 9)}
        seconds = source.choice([0.0, 0.5, 60.0])
        rows.append((at * 60, Aggregate(seconds, counters, {"ttft": ttft}, levels)))
    encoded = msgspec.json.encode(diagnose(observation_of(healthy_day(), rows)))
    assert b"NaN" not in encoded and b"Infinity" not in encoded


@pytest.mark.parametrize(
    ("text", "seconds"), [("10m", 600), ("90m", 5400), ("24h", 86_400), ("30d", 2_592_000)]
)
def test_times_are_understood(text: str, seconds: int) -> None:
    assert parse_last(text) == seconds


@pytest.mark.parametrize("text", ["", "24", "9m", "31d", "1w", "0h", "-1h", "1.5h", "999999d", "h"])
def test_bad_times_are_named_with_their_limits(text: str) -> None:
    with pytest.raises(InvalidRequestError, match="between 10m and 30d"):
        parse_last(text)
