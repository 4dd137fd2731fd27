"""The ladder as a table, a page, a picture and JSON: each rung's gain over the one below."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from html import escape
from pathlib import Path
from typing import Any

from caudal.bench.charts import MARGIN_RIGHT, Axis, Panel
from caudal.bench.json_report import level_as_json, tidy
from caudal.bench.ladder import Ladder, RungResult
from caudal.bench.page import figures, page, readable, table
from caudal.bench.picture import compose
from caudal.bench.suite import INCOMPLETE
from caudal.bench.text_report import format_table

HEAD = (
    "rung", "tok/s", "gain", "total", "req/s", "TTFT p50", "p95", "ITL p99", "E2E p95", "cached",
    "KV tokens", "failed",
)  # fmt: skip
_SIZE = (1100, 250)
_NAMES = 210
"""Pixels for the names of rungs."""


def rows(ladder: Ladder) -> list[tuple[str, ...]]:
    """A line a rung beneath `HEAD`; `gain` is over the rung below, `total` over the lowest."""
    found = []
    for index, result in enumerate(ladder.results):
        below = ladder.results[max(0, index - 1)]
        found.append(_row(result, _ratio(result, below), _ratio(result, ladder.results[0])))
    return found


def _row(result: RungResult, gain: str, total: str) -> tuple[str, ...]:
    summary = result.level.summary
    cached = summary.num_cached_tokens or 0
    share = cached / summary.num_input_tokens if summary.num_input_tokens else 0.0
    return (
        _name(result),
        f"{result.throughput:.1f}",
        gain,
        total,
        f"{summary.request_throughput:.2f}",
        f"{summary.ttft_ms.p50:.0f}",
        f"{summary.ttft_ms.p95:.0f}",
        f"{summary.itl_ms.p99:.0f}",
        f"{summary.e2e_ms.p95:.0f}",
        f"{share:.0%}",
        "-" if result.num_kv_tokens is None else f"{result.num_kv_tokens:,}",
        str(summary.num_failed),
    )


def _name(result: RungResult) -> str:
    return result.rung.name + ("" if result.is_complete else " *")


def _ratio(result: RungResult, other: RungResult) -> str:
    return f"×{result.throughput / other.throughput:.2f}" if other.throughput else "-"


def notes(ladder: Ladder) -> list[str]:
    """What a reader must know beside the numbers."""
    found = []
    if ladder.was_interrupted:
        found.append("interrupted: the rungs above have not been measured")
    if not all(result.is_complete for result in ladder.results):
        limit = ladder.options.limit_s
        found.append(
            f"* sending stopped after {limit:g} s and waiting after {2 * limit:g} s; its numbers "
            "are of a part of the work"
        )
    for result in ladder.results:
        # The star says that already.
        problems = [text for text in result.level.problems if text != INCOMPLETE]
        found += [f"{result.rung.name}: {text}" for text in problems]
    return found


def as_text(ladder: Ladder) -> str:
    """The table and what each rung is for. Latencies in milliseconds."""
    lines = [
        f"Model:    {ladder.model}",
        f"Work:     {ladder.workload}",
        f"Machine:  {ladder.machine['cpu']}, {ladder.machine['num_cpus']} CPUs",
        "",
        format_table(HEAD, rows(ladder)),
        "",
    ]
    width = max(len(result.rung.name) for result in ladder.results)
    lines += [f"{result.rung.name:<{width}}  {result.rung.gains}" for result in ladder.results]
    return "\n".join([*lines, *(f"note: {text}" for text in notes(ladder))])


def panels(ladder: Ladder) -> list[Panel]:
    """Throughput, waiting for the first token, and the worst gaps between tokens, by rung."""
    return [
        _bars(ladder, "Output tokens per second", lambda result: result.throughput),
        _bars(
            ladder,
            "Time to first token, p95, ms (less is better)",
            lambda result: result.level.summary.ttft_ms.p95,
        ),
        _bars(
            ladder,
            "Gap between tokens, p99, ms (less is better)",
            lambda result: result.level.summary.itl_ms.p99,
        ),
    ]


def _bars(ladder: Ladder, title: str, value_of: Callable[[RungResult], float]) -> Panel:
    panel = Panel(title, "", *_SIZE)
    panel.heading(title)
    values = [value_of(result) for result in ladder.results]
    axis = Axis.linear(max(values), _NAMES, panel.width - MARGIN_RIGHT - 130)
    step = (panel.height - 50) / len(values)
    previous = 0.0
    for index, (result, value) in enumerate(zip(ladder.results, values, strict=True)):
        top = 36 + index * step
        middle = top + step / 2 + 2
        panel.text(_NAMES - 10, middle, _name(result), "--text", "end")
        panel.bar(_NAMES, top + 3, axis.at(value) - _NAMES, step - 9, "--main")
        shown = f"{value:,.1f}" if value < 1000 else f"{value:,.0f}"
        panel.text(axis.at(value) + 8, middle, shown, "--text")
        if index and previous:
            at = axis.at(value) + 18 + 7 * len(shown)
            panel.text(at, middle, f"×{value / previous:.2f}", "--muted")
        previous = value
    return panel


def as_page(ladder: Ladder) -> str:
    """A page that needs nothing else."""
    title = f"The ladder: {Path(ladder.model).name} on this machine"
    gains = "".join(
        f"<dt>{escape(result.rung.name)}</dt><dd>{escape(result.rung.gains)}<br>"
        f"<code>{escape(' '.join((*result.rung.flags, *ladder.serve_flags)))}</code></dd>"
        for result in ladder.results
    )
    warnings = "".join(f'<p class="warn">{escape(text)}</p>' for text in notes(ladder))
    body = (
        f'<h1>{escape(title)}</h1><p class="sub">{escape(ladder.workload)} · '
        f"{escape(str(ladder.machine['cpu']))}, {ladder.machine['num_cpus']} CPUs · "
        f"{escape(readable(ladder.started))}</p>{figures(panels(ladder), 'wide')}"
        f"<h2>Numbers</h2><p>× is over the rung below, total over the lowest. Latencies in ms.</p>"
        f"{table(HEAD, rows(ladder))}{warnings}<h2>Rungs</h2><dl>{gains}</dl>"
    )
    return page(title, body)


def as_json(ladder: Ladder) -> dict[str, Any]:
    """Every rung with every request."""
    results = []
    for result in ladder.results:
        fields = dataclasses.asdict(result.rung) | level_as_json(result.level)
        fields |= {"num_kv_tokens": result.num_kv_tokens, "is_complete": result.is_complete}
        results.append(fields)
    return {
        "format": "caudal-ladder/1",
        "started": ladder.started,
        "model": ladder.model,
        "workload": ladder.workload,
        "machine": ladder.machine,
        "serve_flags": list(ladder.serve_flags),
        "rungs": results,
    }


def write_json(ladder: Ladder, path: Path) -> None:
    """Raises OSError."""
    path.write_text(json.dumps(tidy(as_json(ladder)), indent=1) + "\n", encoding="utf-8")


def write_page(ladder: Ladder, path: Path) -> None:
    """Raises OSError."""
    path.write_text(as_page(ladder), encoding="utf-8")


def as_svg(ladder: Ladder) -> str:
    """The panels as one picture."""
    title = f"The same work, one technique after the other: {Path(ladder.model).name}"
    lines = [
        ladder.workload,
        f"{ladder.machine['cpu']}, {ladder.machine['num_cpus']} CPUs · × is against the line above",
        *(text for text in notes(ladder) if text.startswith("*")),
    ]
    return compose(title, lines, [[panel] for panel in panels(ladder)])
