"""Tries a remedy: the recorded load on a server as it is, then on one with the remedy's flag."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from caudal.bench.load import LoadOptions
from caudal.bench.own_server import own_server
from caudal.bench.statistics import Summary
from caudal.bench.suite import Plan, Progress, measure
from caudal.bench.target import COMPLETIONS_PATH, TargetOptions
from caudal.bench.workload import WorkloadOptions
from caudal.diagnosis.report import Diagnosis, Finding, Prediction, Remedy
from caudal.diagnosis.serve_flags import with_flag
from caudal.errors import CaudalError

METRICS: dict[str, Callable[[Summary], float]] = {
    "ttft_p95_ms": lambda summary: summary.ttft_ms.p95,
    "ttft_mean_ms": lambda summary: summary.ttft_ms.mean,
    "tpot_p50_ms": lambda summary: summary.tpot_ms.p50,
}
"""The metrics of predictions, as the load generator measures them."""
DRAIN_FACTOR = 3.0
"""A run is given up after so many times the recorded time: it was overloaded to begin with."""


@dataclass(frozen=True, slots=True)
class Verification:
    """Predicted beside measured."""

    finding: str
    remedy: Remedy
    measured: Prediction
    """In the same form: what was measured without and with the flag."""
    num_failed: tuple[int, int]
    """Requests without a complete answer, refused ones included, before and after."""

    @property
    def predicted(self) -> Prediction:
        """What the diagnosis had promised."""
        assert self.remedy.predicted is not None
        return self.remedy.predicted


def choose_remedy(diagnosis: Diagnosis, action: str | None = None) -> tuple[Finding, Remedy]:
    """The remedy to try: `action`, else the flag with the greatest predicted gain of the first
    finding that has one. Raises CaudalError if there is none."""
    for finding in diagnosis.findings:
        found = [
            remedy
            for remedy in finding.remedies
            if remedy.flag and remedy.predicted is not None and remedy.predicted.metric in METRICS
        ]
        if action is not None:
            found = [remedy for remedy in found if remedy.action == action]
        if found:
            return finding, max(found, key=_gain)
    wanted = "no remedy" if action is None else f"no remedy {action!r}"
    raise CaudalError(f"there is {wanted} with a flag and a predicted gain to try")


def verify(
    model: str,
    diagnosis: Diagnosis,
    trace: bytes,
    choice: tuple[Finding, Remedy],
    progress: Progress,
) -> Verification:
    """Replay `trace` (JSON lines) against two servers of our own, one after the other.

    Of the trace those requests that the diagnosis looked at, the latest ones.
    Raises CaudalError if one does not start or answers nothing.
    """
    finding, remedy = choice
    assert remedy.predicted is not None
    flags = [*diagnosis.serve_flags]
    changed = with_flag(flags, remedy.flag)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.jsonl"
        rows = trace.splitlines(keepends=True)[-diagnosis.num_requests :]
        path.write_bytes(b"".join(rows))
        limit_s = max(1.0, diagnosis.window_s)
        before = _measure(model, flags, (path, limit_s), progress, "as it is")
        after = _measure(model, changed, (path, limit_s), progress, f"with {remedy.flag}")
    metric = METRICS[remedy.predicted.metric]
    values = metric(before), metric(after)
    gain = (1 - values[1] / values[0]) * 100 if values[0] else 0.0
    measured = Prediction(
        remedy.predicted.metric, round(values[0], 1), round(values[1], 1), round(gain, 1)
    )
    failed = tuple(each.num_failed + each.num_given_up for each in (before, after))
    return Verification(finding.id, remedy, measured, (failed[0], failed[1]))


def _measure(
    model: str, flags: Sequence[str], load: tuple[Path, float], progress: Progress, name: str
) -> Summary:
    trace, limit_s = load
    progress.start_level(f"{name}: starting")
    with own_server(model, flags) as url:
        plan = Plan(
            target=TargetOptions(url=url, endpoint=COMPLETIONS_PATH),
            workload=WorkloadOptions(trace=str(trace)),
            load=LoadOptions(
                duration_s=limit_s + 1, drain_s=DRAIN_FACTOR * limit_s + 10, cache="as-is"
            ),
        )
        report = asyncio.run(measure(plan, progress))
    (level,) = report.levels
    if not level.summary.num_completed:
        raise CaudalError(f"the server {name} answered no request")
    return level.summary


def _gain(remedy: Remedy) -> float:
    assert remedy.predicted is not None
    return remedy.predicted.gain_percent
