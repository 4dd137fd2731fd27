"""How a diagnosis looks in a terminal."""

from __future__ import annotations

import time

from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table

from caudal.bench.verify import Verification
from caudal.diagnosis.report import Diagnosis, Finding, PastSummary, Prediction
from caudal.server.protocol.diagnosis import PrefixReport

_COLOURS = {"critical": "bold red", "warning": "bold yellow", "info": "bold cyan"}
_UNITS = {"ttft_p95_ms": "TTFT p95", "ttft_mean_ms": "TTFT mean", "tpot_p50_ms": "TPOT p50"}
MAX_TEXT = 60


def print_diagnosis(diagnosis: Diagnosis) -> None:
    """Each finding with its evidence and remedies."""
    console = Console()
    past = diagnosis.past
    error = diagnosis.model_error_percent
    what = "them" if past is None else "the worst hour"
    told = "" if error is None else f"; a simulation of {what} is {error:.0f} % off"
    span_s = diagnosis.window_s if past is None else past.observed_s
    recorded = "" if past is None else " of the history"
    console.print(
        f"{diagnosis.num_requests:,} requests in {_duration(span_s)}{recorded}{told}", style="dim"
    )
    if past is not None:
        _print_past(console, past)
        if past.worst_hour is None:
            return
    if not diagnosis.findings:
        console.print("Nothing limits this server noticeably.", style="green")
    for finding in diagnosis.findings:
        _print_finding(console, finding)


def _duration(seconds: float) -> str:
    if seconds < 2 * 3600:
        return f"{seconds:,.0f} s"
    return f"{seconds / 3600:,.1f} h"


def _print_past(console: Console, past: PastSummary) -> None:
    """When it was worst, in this machine's time zone, and why nothing more can be said."""
    hour = past.worst_hour
    if hour is not None:
        begins = time.strftime("%a %d %b, %H:%M", time.localtime(hour.start))
        ends = time.strftime("%H:%M", time.localtime(hour.start + 3600))
        refused = f", {hour.num_refused:,} refused" if hour.num_refused else ""
        ttft = "" if hour.ttft_p95_ms is None else f", TTFT p95 {hour.ttft_p95_ms:,.0f} ms"
        load = "" if hour.load is None else f", load {hour.load:.0%}"
        console.print(
            f"Worst hour: {begins}–{ends}: {hour.num_requests:,} requests{refused}{ttft}, "
            f"{hour.queue_depth:,.1f} waiting on average, KV {hour.kv_used:.0%}{load}"
        )
    if past.note:
        console.print(past.note, style="yellow")


def _print_finding(console: Console, finding: Finding) -> None:
    colour = _COLOURS.get(finding.severity, "bold")
    console.print(f"\n[{colour}]{finding.severity}[/]  [bold]{escape(finding.title)}[/]")
    for evidence in finding.evidence:
        console.print(Padding(f"• {escape(evidence.text)}", (0, 0, 0, 2)))
    if not finding.remedies:
        return
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("remedy", "flag", "costs", "predicted", "gain"):
        table.add_column(name, justify="right" if name == "gain" else "left")
    for remedy in finding.remedies:
        predicted = remedy.predicted
        table.add_row(
            escape(remedy.action),
            f"[cyan]{escape(remedy.flag)}[/]",
            escape(remedy.cost),
            "" if predicted is None else _change(predicted),
            "" if predicted is None else f"[green]{predicted.gain_percent:.0f} %[/]",
        )
        table.add_row("", "", f"[dim]{escape(remedy.text)}[/]")
    console.print(Padding(table, (1, 0, 0, 2)))


def _change(prediction: Prediction) -> str:
    name = _UNITS.get(prediction.metric, prediction.metric)
    unit = " ms" if prediction.metric.endswith("_ms") else ""
    return f"{name} {prediction.before:,.4g} → {prediction.after:,.4g}{unit}"


def print_verification(found: Verification) -> None:
    """Predicted beside measured."""
    console = Console()
    console.print(f"\n[bold]{escape(found.remedy.action)}[/]  {escape(found.remedy.flag)}")
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("", "before → after", "gain"):
        table.add_column(name, justify="right" if name == "gain" else "left")
    for name, each in (("predicted", found.predicted), ("measured", found.measured)):
        table.add_row(name, _change(each), f"{each.gain_percent:.0f} %")
    console.print(Padding(table, (0, 0, 0, 2)))
    before, after = found.num_failed
    if before or after:
        console.print(f"  requests without a complete answer: {before} → {after}", style="dim")


def print_prefixes(report: PrefixReport) -> None:
    """Losses by cause, then the latest requests."""
    console = Console()
    if not report.is_enabled:
        console.print("This server remembers no prompts (--no-prefix-lint).")
        return
    share = report.cached_tokens / report.prompt_tokens if report.prompt_tokens else 0.0
    console.print(
        f"{report.num_requests} of your requests, {report.prompt_tokens:,} prompt tokens: "
        f"{share:.0%} found in the cache, {report.lost_tokens:,} computed again for "
        f"{report.lost_ms:,.0f} ms"
    )
    for pattern in report.patterns:
        console.print(
            f"\n[bold yellow]{escape(pattern.advice)}[/]\n  {pattern.reason} at token "
            f"{pattern.token} (block {pattern.block}) of {pattern.num_requests} requests; "
            f"{pattern.lost_tokens:,} tokens, {pattern.lost_ms:,.0f} ms"
        )
        if pattern.changed or pattern.neighbour_changed:
            console.print(
                f"  was {_quote(pattern.neighbour_changed)}, is {_quote(pattern.changed)}"
            )
    if report.requests:
        console.print(_requests(report))


def _requests(report: PrefixReport) -> Padding:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("age", "prompt", "cached", "token", "lost", "ms"):
        table.add_column(name, justify="right", no_wrap=True, min_width=6)
    table.add_column("reason", no_wrap=True, min_width=12)
    for name in ("from there on", "before it was"):
        table.add_column(name, no_wrap=True, overflow="ellipsis", ratio=1)
    for miss in report.requests:
        table.add_row(
            *(f"{miss.age_s:.0f} s", str(miss.prompt_tokens), str(miss.cached_tokens)),
            *(str(miss.token), str(miss.lost_tokens), f"{miss.lost_ms:.1f}"),
            *(miss.reason, _quote(miss.text), _quote(miss.neighbour_text)),
        )
    return Padding(table, (1, 0, 0, 0))


def _quote(text: str) -> str:
    """One line of text that may hold anything, control characters included."""
    plain = "".join(each if each.isprintable() else " " for each in text)
    return f"«{escape(plain[:MAX_TEXT])}»" if plain else ""
