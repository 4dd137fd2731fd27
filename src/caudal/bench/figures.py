"""The pictures of a measurement: throughput against latency, and latency over time."""

from __future__ import annotations

from collections.abc import Callable

from caudal.bench.charts import Axis, Panel, spread
from caudal.bench.record import FailureKind, RequestRecord
from caudal.bench.statistics import Distribution, Objective, Summary, in_flight, tokens_by_second
from caudal.bench.suite import Level, Report

CURVE_SIZE = (360, 280)
TIMELINE_SIZE = (1100, 220)
MAX_DOTS = 2500
"""More would make a page heavy; the slowest hundredth is always drawn."""


def curve_panels(report: Report) -> list[Panel]:
    """Output tokens a second against TTFT, TPOT and E2E latency; empty for a single level."""
    if len(report.levels) < 2:
        return []
    objective = report.plan.objective
    found = []
    for name, of, limit in (
        ("Time to first token, ms", _ttft, objective.ttft_ms),
        ("Time per output token, ms", _tpot, objective.tpot_ms),
        ("End to end, ms", _e2e, objective.e2e_ms),
    ):
        levels = [level for level in report.levels if of(level.summary).count]
        if levels:
            found.append(_curve(name, levels, of, limit))
    return found


def _ttft(summary: Summary) -> Distribution:
    return summary.ttft_ms


def _tpot(summary: Summary) -> Distribution:
    return summary.tpot_ms


def _e2e(summary: Summary) -> Distribution:
    return summary.e2e_ms


def _curve(
    title: str, levels: list[Level], of: Callable[[Summary], Distribution], limit: float | None
) -> Panel:
    panel = Panel(title, "output tokens per second", *CURVE_SIZE)
    throughputs = [level.summary.output_throughput for level in levels]
    values = [v for level in levels for v in (of(level.summary).p50, of(level.summary).p95)]
    x = Axis.linear(1.05 * max(throughputs), *panel.x_range, 4)
    y = Axis.for_latencies(values, *panel.y_range)
    panel.frame(x, y)
    panel.legend([("p95", "--main"), ("p50", "--other")])
    if limit is not None:
        panel.target(y, limit, f"target {limit:g}")
    in_order = sorted(levels, key=_load_order)
    for percentile, colour in (("p50", "--other"), ("p95", "--main")):
        points = [
            (x.at(level.summary.output_throughput), y.at(getattr(of(level.summary), percentile)))
            for level in in_order
        ]
        panel.path(points, colour)
        for (at_x, at_y), level in zip(points, in_order, strict=True):
            value = getattr(of(level.summary), percentile)
            hint = f"{level.load}: {level.summary.output_throughput:.1f} tok/s, {value:.1f} ms"
            panel.dot(at_x, at_y, colour, f"{hint} ({percentile})")
            if percentile == "p95":
                panel.label(at_x, at_y, _short_name(level))
    return panel


def _load_order(level: Level) -> float:
    load = level.load
    return load.rate if load.rate is not None else float(load.concurrency or 0)


def _short_name(level: Level) -> str:
    load = level.load
    return f"{load.rate:.3g}/s" if load.rate is not None else str(load.concurrency or load)


def timeline_panels(level: Level, objective: Objective) -> list[Panel]:
    """Latency of each request by the time it was meant to be sent, and the load meanwhile."""
    records = sorted(level.run.records, key=lambda record: record.intended_s)
    end_s = level.summary.duration_s or 1.0
    has_ttft = level.summary.ttft_ms.count > 0
    panels = [
        _dots("Time to first token, ms", records, end_s, _ttft_ms, objective.ttft_ms)
        if has_ttft
        else _dots("End to end, ms", records, end_s, _e2e_ms, objective.e2e_ms)
    ]
    if level.summary.tpot_ms.count:
        name = "Time per output token, ms"
        panels.append(_dots(name, records, end_s, _tpot_ms, objective.tpot_ms))
    panels.append(_load_panel(records, end_s))
    if has_ttft:
        panels.append(_throughput_panel(records, end_s))
    return panels


def _ttft_ms(record: RequestRecord) -> float | None:
    return None if record.ttft_s is None else 1e3 * record.ttft_s


def _tpot_ms(record: RequestRecord) -> float | None:
    return None if record.tpot_s is None else 1e3 * record.tpot_s


def _e2e_ms(record: RequestRecord) -> float | None:
    return 1e3 * record.e2e_s


def _dots(
    title: str,
    records: list[RequestRecord],
    end_s: float,
    value_of: Callable[[RequestRecord], float | None],
    limit: float | None,
) -> Panel:
    panel = Panel(title, "seconds after the start (intended send time)", *TIMELINE_SIZE)
    done = [(r, value) for r in records if r.is_ok and (value := value_of(r)) is not None]
    x = Axis.linear(end_s, *panel.x_range, 10)
    y = Axis.for_latencies([value for _, value in done], *panel.y_range)
    panel.frame(x, y)
    if limit is not None:
        panel.target(y, limit, f"target {limit:g}")
    slow = sorted((value for _, value in done), reverse=True)[: len(done) // 100 + 1]
    is_shown = spread(len(done), MAX_DOTS)
    for index, (record, value) in enumerate(done):
        if is_shown(index) or value >= slow[-1]:
            hint = f"at {record.intended_s:.1f} s: {value:.1f} ms"
            panel.dot(x.at(record.intended_s), y.at(value), "--main", hint, 2.5)
    failed = [r for r in records if r.failure not in (None, FailureKind.GIVEN_UP)]
    for record in failed[:MAX_DOTS]:
        hint = f"at {record.intended_s:.1f} s: {record.failure} {record.message[:80]}"
        panel.cross(x.at(record.intended_s), panel.y_range[1] + 6, hint)
    if failed:
        panel.legend([("answered", "--main"), (f"{len(failed)} failed", "--bad")])
    return panel


def _load_panel(records: list[RequestRecord], end_s: float) -> Panel:
    panel = Panel("Requests in flight", "seconds after the start", *TIMELINE_SIZE)
    steps = in_flight(records)
    x = Axis.linear(end_s, *panel.x_range, 10)
    y = Axis.linear(max((number for _, number in steps), default=1), *panel.y_range, 3)
    panel.frame(x, y)
    points, previous = [(x.at(0), y.at(0))], 0
    for when, number in steps:
        points += [(x.at(when), y.at(previous)), (x.at(when), y.at(number))]
        previous = number
    panel.area(points, "--soft")
    panel.path(points, "--main", 1.5)
    return panel


def _throughput_panel(records: list[RequestRecord], end_s: float) -> Panel:
    panel = Panel("Output tokens in each second", "seconds after the start", *TIMELINE_SIZE)
    seconds = tokens_by_second(record for record in records if record.is_ok)
    x = Axis.linear(end_s, *panel.x_range, 10)
    y = Axis.linear(max(seconds, default=1.0), *panel.y_range, 3)
    panel.frame(x, y)
    points = []
    for second, tokens in enumerate(seconds):
        last = min(second + 1.0, end_s)
        points += [(x.at(second), y.at(tokens)), (x.at(last), y.at(tokens))]
    panel.area(points, "--soft")
    panel.path(points, "--main", 1.5)
    return panel
