"""The doctor names what a server suffers from, and what it promises comes true."""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Callable

import msgspec
import pytest

from caudal.config import SchedulerConfig
from caudal.diagnosis.doctor import diagnose
from caudal.diagnosis.report import (
    Diagnosis,
    Finding,
    HostReport,
    LoadRecord,
    Observation,
    ReorderHint,
)
from caudal.diagnosis.scenario import Predictor, Scenario
from caudal.simulation.machine import SimulatedRequest
from tests.diagnosis.scenarios import (
    Site,
    burst_site,
    capacity_site,
    chats,
    kv_site,
    measured_gain,
    observe,
    poisson,
)

TOLERANCE = 0.25
"""Of the measured gain."""


@functools.cache
def examine(make: Callable[[], Site]) -> tuple[Site, Observation, Diagnosis]:
    """A saturated server and what the doctor says; each takes seconds, so it is asked once."""
    site = make()
    observation = observe(site, site.run())
    return site, observation, diagnose(observation)


def findings_of(site: Site) -> tuple[dict[str, Finding], Observation]:
    observation = observe(site, site.run())
    return {finding.id: finding for finding in diagnose(observation).findings}, observation


def check_promise(site: Site, scenario: Scenario, observation: Observation) -> None:
    predicted = Predictor(observation).predict(scenario, "ttft_p95_ms")
    assert predicted is not None
    measured = measured_gain(site, scenario, "ttft_p95_ms")
    assert predicted.gain_percent == pytest.approx(measured, rel=TOLERANCE)


def test_more_work_than_the_machine_can_do_is_named_capacity() -> None:
    site, observation, diagnosis = examine(capacity_site)
    found = {finding.id: finding for finding in diagnosis.findings}
    assert list(found) == ["capacity"]
    assert found["capacity"].severity == "critical"
    actions = [remedy.action for remedy in found["capacity"].remedies]
    assert actions == ["cap_queue", "twice_the_cores", "more_servers"]
    scenario = Predictor(observation).scenario
    check_promise(site, scenario.with_scheduler(max_queue_ttft_s=1.0), observation)


def test_heaps_of_requests_are_named_bursts() -> None:
    site, observation, diagnosis = examine(burst_site)
    found = {finding.id: finding for finding in diagnosis.findings}
    assert list(found) == ["bursts"]
    first = found["bursts"].remedies[0]
    assert first.action == "smooth_arrivals" and first.predicted is not None
    scenario = Predictor(observation).scenario
    check_promise(site, scenario.with_scheduler(max_num_seqs=32), observation)
    check_promise(site, scenario.smoothed(), observation)


def test_a_small_kv_cache_is_named_kv_pressure_and_nothing_else() -> None:
    site, observation, diagnosis = examine(kv_site)
    found = {finding.id: finding for finding in diagnosis.findings}
    assert list(found) == ["kv_pressure"]
    remedies = {remedy.action: remedy for remedy in found["kv_pressure"].remedies}
    assert list(remedies) == ["limit_context", "quantise_kv", "more_memory"]
    assert remedies["quantise_kv"].flag == "--kv-cache-dtype int8"
    scenario = Predictor(observation).scenario
    check_promise(site, scenario.with_blocks(2048 / 1088), observation)
    limit = int(remedies["limit_context"].flag.split()[1])
    predicted = remedies["limit_context"].predicted
    assert predicted is not None
    measured = measured_gain(site, scenario.limited(limit), "ttft_p95_ms")
    # A tenth of a long queue is a small difference of two noisy numbers.
    assert predicted.gain_percent == pytest.approx(measured, rel=TOLERANCE, abs=8)


@pytest.mark.parametrize("rate", [1.0, 3.0, 6.0])
def test_a_healthy_server_has_no_findings(rate: float) -> None:
    assert findings_of(Site(chats(poisson(rate, 100))))[0] == {}


@pytest.mark.parametrize("make", [capacity_site, burst_site, kv_site])
def test_the_simulation_reproduces_what_was_recorded(make: Callable[[], Site]) -> None:
    error = examine(make)[2].model_error_percent
    assert error is not None and error < 25


def test_streams_beyond_their_target_are_slow() -> None:
    target = dataclasses.replace(SchedulerConfig(), tpot_ms=20.0, ttft_ms=60_000.0)
    site = Site([SimulatedRequest(0.05 * index, 20, 300) for index in range(40)], target)
    found, observation = findings_of(site)
    assert "slow_streams" in found
    (remedy, *_) = found["slow_streams"].remedies
    assert remedy.action == "cap_concurrency" and remedy.predicted is not None
    seats = int(remedy.flag.split()[1])
    changed = Predictor(observation).scenario.with_scheduler(max_num_seqs=seats)
    measured = measured_gain(site, changed, "tpot_p50_ms")
    assert remedy.predicted.gain_percent == pytest.approx(measured, rel=TOLERANCE)


def agents(count: int, num_groups: int) -> list[SimulatedRequest]:
    """Short moves behind one of several system prompts of 640 tokens."""
    times = poisson(2.0, count)
    return [
        SimulatedRequest(
            time, 680, 10, prefix_ids=tuple(100 * (index % num_groups) + b for b in range(40))
        )
        for index, time in enumerate(times)
    ]


def test_a_cache_that_is_off_is_low_prefix_hits() -> None:
    site = Site(agents(60, 2), enable_prefix_caching=False)
    found, observation = findings_of(site)
    remedy = found["low_prefix_hits"].remedies[0]
    assert remedy.flag == "--enable-prefix-caching" and remedy.predicted is not None
    changed = dataclasses.replace(Predictor(observation).scenario, enable_prefix_caching=True)
    measured = measured_gain(site, changed, "ttft_mean_ms")
    assert remedy.predicted.gain_percent == pytest.approx(measured, rel=TOLERANCE)


def test_a_cache_too_small_for_all_system_prompts_is_low_prefix_hits() -> None:
    found, _ = findings_of(Site(agents(80, 6), num_blocks=150))
    assert "--kv-cache-dtype int8" in [r.flag for r in found["low_prefix_hits"].remedies]


def test_a_change_early_in_all_prompts_is_a_finding_with_its_gain() -> None:
    site = Site([dataclasses.replace(r, prefix_ids=()) for r in agents(60, 1)])
    hint = ReorderHint(
        token=12, num_requests=60, num_lost_tokens=640, share_lost=0.94, lost_ms=100.0
    )
    seen = observe(site, site.run())
    observation = Observation(records=seen.records, facts=seen.facts, hints=[hint])
    (finding,) = diagnose(observation).findings
    assert finding.id == "prefix_order" and "token 12" in finding.evidence[0].text
    predicted = finding.remedies[0].predicted
    assert predicted is not None
    measured = measured_gain(
        site,
        dataclasses.replace(Predictor(seen).scenario, requests=tuple(agents(60, 1))),
        "ttft_mean_ms",
    )
    assert predicted.gain_percent == pytest.approx(measured, rel=TOLERANCE)


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        (HostReport(outside_kernels=0.4), ["cpu_outside_kernels"]),
        (HostReport(throttled=0.1), ["throttled"]),
        (HostReport(steal=0.2), ["steal"]),
        (HostReport(load_per_core=4.0), ["oversubscribed"]),
        (HostReport(outside_kernels=0.1, throttled=0.0, steal=0.01, load_per_core=1.0), []),
        (HostReport(), []),
    ],
)
def test_what_the_host_takes_is_named(host: HostReport, expected: list[str]) -> None:
    quiet = observe(Site([]), Site(chats([0.0])).run())
    observation = Observation(records=[], facts=quiet.facts, host=host)
    assert [finding.id for finding in diagnose(observation).findings] == expected


def test_more_threads_than_cores_are_named_with_the_flag() -> None:
    seen = observe(Site([]), Site(chats([0.0])).run(), num_threads=3, num_cores=2)
    (finding,) = diagnose(Observation(records=[], facts=seen.facts)).findings
    assert finding.id == "oversubscribed"
    assert finding.remedies[0].flag == "--threads 2"
    assert finding.remedies[0].predicted is not None
    assert finding.remedies[0].predicted.gain_percent == pytest.approx(25.0)


@pytest.mark.parametrize("count", [0, 1, 2, 11])
def test_few_requests_are_no_evidence(count: int) -> None:
    site = Site(chats([0.0] * count))
    assert diagnose(observe(site, site.run())).findings == []


@pytest.mark.parametrize("seed", range(12))
def test_whatever_was_recorded_is_diagnosed(seed: int) -> None:
    """Loads that no server would have recorded so: nothing may raise, every number is finite."""
    source = random.Random(seed)

    def some(high: float) -> float | None:
        return source.choice([None, 0.0, source.uniform(0, high)])

    records = [
        LoadRecord(
            arrival_s=source.choice([0.0, source.uniform(0, 30)]),
            num_prompt_tokens=source.randint(1, 300),
            num_output_tokens=source.choice([0, 1, source.randint(0, 60)]),
            max_tokens=source.randint(0, 80),
            num_cached_tokens=source.randint(0, 300),
            ttft_ms=some(9000),
            tpot_ms=some(200),
            num_waiting=source.randint(0, 50),
            num_running=source.randint(0, 8),
            kv_used=source.uniform(0, 1),
            num_preemptions=source.randint(0, 2),
            is_refused=source.random() < 0.3,
            prefix_ids=tuple(range(source.randint(0, 25))),
        )
        for _ in range(source.choice([12, 13, 60]))
    ]
    records.sort(key=lambda record: record.arrival_s)
    seen = observe(Site([], num_blocks=source.choice([1, 20, 400])), Site(chats([0.0])).run())
    diagnosis = diagnose(Observation(records=records, facts=seen.facts))
    encoded = msgspec.json.encode(diagnosis)
    assert msgspec.json.decode(encoded, type=Diagnosis) == diagnosis
    for name in (b"predicted", b"model_error_percent", b"past"):
        encoded = encoded.replace(b'"%s":null' % name, b"")
    assert b"null" not in encoded


def test_one_heap_that_is_still_waiting_is_named_bursts() -> None:
    """No climb, for nothing has come since; and no sawtooth, for it has not come back."""
    times = [float(index) for index in range(14)] + [14.0] * 50
    found, _ = findings_of(Site(chats(times), SchedulerConfig(max_num_seqs=4)))
    assert list(found) == ["bursts"]


def test_long_prompts_alone_are_no_saturation() -> None:
    """Their first token takes seconds because reading them does; nobody is in their way."""
    site = Site([SimulatedRequest(20.0 * i, 8000, 10) for i in range(20)], max_model_len=10_000)
    assert findings_of(site)[0] == {}
