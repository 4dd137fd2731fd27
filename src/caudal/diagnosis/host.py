"""What the machine around the server costs: overhead, throttling, steal, too many threads."""

from __future__ import annotations

import math
from collections.abc import Iterator

from caudal.diagnosis.report import (
    Evidence,
    Finding,
    HostReport,
    Observation,
    Prediction,
    Remedy,
)
from caudal.metrics.reading import Aggregate, outside_kernels, share

MAX_OUTSIDE_KERNELS = 0.25
MAX_THROTTLED = 0.02
MAX_STEAL = 0.05
MAX_LOAD_PER_CORE = 1.5
"""Runnable threads per core; the server's own keep it at about one."""
MIN_KERNELS_S = 3.0
"""Processor time of the kernels, below which an idle server would only show itself."""


def report_host(happened: Aggregate, load_per_core: float | None) -> HostReport:
    """The host in a stretch of time."""
    counters = happened.counters
    is_busy = counters.get("cpu_ms.kernels", 0.0) / 1e3 >= MIN_KERNELS_S
    return HostReport(
        outside_kernels=outside_kernels(happened) if is_busy else None,
        throttled=share(counters.get("throttled_s", 0.0), happened.seconds),
        steal=share(counters.get("steal_s", 0.0), counters.get("machine_s", 0.0)),
        load_per_core=load_per_core if is_busy else None,
    )


def find_host_trouble(observation: Observation) -> list[Finding]:
    """Everything that takes time from the kernels."""
    return [
        *_outside_kernels(observation),
        *_throttled(observation),
        *_stolen(observation),
        *_oversubscribed(observation),
    ]


def _time_gain(share: float) -> Prediction:
    """A step that takes 1 would take 1 - share."""
    return Prediction("step_time", 1.0, round(1 - share, 3), round(share * 100, 1))


def _outside_kernels(observation: Observation) -> Iterator[Finding]:
    lost = observation.host.outside_kernels
    if lost is None or lost <= MAX_OUTSIDE_KERNELS:
        return
    text = f"{lost:.0%} of the step time is not spent in the kernels."
    yield Finding(
        "cpu_outside_kernels",
        "Steps spend their time outside of the kernels",
        "warning",
        [Evidence("outside_kernels", round(lost, 3), MAX_OUTSIDE_KERNELS, text)],
        [
            Remedy(
                "leave_a_core_to_the_server",
                f"--threads {max(1, observation.facts.num_threads - 1)}",
                "compute threads",
                None,
                "Scheduling, sampling and HTTP wait for a core that computes; worth a try with "
                "small models and many short requests.",
            ),
            Remedy(
                "larger_model",
                "",
                "quality for speed, the other way",
                _time_gain(lost / 2),
                "The overhead of a step is constant: a model twice as large halves its share.",
            ),
        ],
    )


def _throttled(observation: Observation) -> Iterator[Finding]:
    lost = observation.host.throttled
    if lost is None or lost <= MAX_THROTTLED:
        return
    facts = observation.facts
    text = f"The CPU quota held the server back for {lost:.0%} of the time."
    remedies = []
    if facts.num_threads > 1:
        remedies.append(
            Remedy(
                "fewer_threads",
                f"--threads {facts.num_threads - 1}",
                "nothing while throttled",
                None,
                "Threads above the quota stop all others at the next barrier.",
            )
        )
    remedies.append(
        Remedy(
            "raise_quota",
            "",
            "processor time",
            _time_gain(min(0.95, lost)),
            "Raise the CPU limit of the container by at least that share, or remove it.",
        )
    )
    severity = "critical" if lost > 0.2 else "warning"
    evidence = [Evidence("throttled", round(lost, 3), MAX_THROTTLED, text)]
    yield Finding("throttled", "The CPU quota stops the server", severity, evidence, remedies)


def _stolen(observation: Observation) -> Iterator[Finding]:
    lost = observation.host.steal
    if lost is None or lost <= MAX_STEAL:
        return
    text = f"The hypervisor gave {lost:.0%} of the processors' time to other machines."
    yield Finding(
        "steal",
        "Other virtual machines take processor time",
        "warning",
        [Evidence("steal", round(lost, 3), MAX_STEAL, text)],
        [
            Remedy(
                "dedicated_cores",
                "",
                "hardware",
                _time_gain(min(0.95, lost)),
                "A machine with dedicated cores, or a host with fewer neighbours.",
            )
        ],
    )


def _oversubscribed(observation: Observation) -> Iterator[Finding]:
    facts, load = observation.facts, observation.host.load_per_core
    evidence, remedies = [], []
    if facts.num_threads > facts.num_cores:
        threads, cores = facts.num_threads, facts.num_cores
        # Equal parts on fewer cores take whole rounds; every barrier waits for the last one.
        rounds = math.ceil(threads / cores) * cores / threads
        evidence.append(
            Evidence(
                "threads",
                threads,
                cores,
                f"{threads} compute threads share {cores} cores.",
            )
        )
        remedies.append(
            Remedy(
                "fewer_threads",
                f"--threads {cores}",
                "nothing",
                _time_gain(1 - 1 / rounds),
                "One thread a core; the gain is the least there is, each switch between threads "
                "comes on top.",
            )
        )
    if load is not None and load > MAX_LOAD_PER_CORE:
        text = f"{load:.1f} threads want each core."
        evidence.append(Evidence("load_per_core", round(load, 2), MAX_LOAD_PER_CORE, text))
        remedies.append(
            Remedy(
                "move_neighbours",
                "",
                "a machine of its own",
                _time_gain(min(0.9, 1 - 1 / load)),
                "Other programs compete for the cores; keep them away (cpuset, nice, another "
                "machine).",
            )
        )
    if evidence:
        title = "More threads than cores"
        yield Finding("oversubscribed", title, "warning", evidence, remedies)
