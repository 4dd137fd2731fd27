"""A measurement as text: the table of `vllm bench serve`, and one line a level."""

from __future__ import annotations

from collections.abc import Iterator

from caudal.bench.statistics import Distribution, Summary
from caudal.bench.suite import CACHE_NOTES, Level, Report

WIDTH = 50
_LABEL = 40


def level_table(report: Report, level: Level) -> str:
    """One level with the labels of `vllm bench serve`; what that tool lacks stands below."""
    lines = [f"{' Serving Benchmark Result ':=^{WIDTH}}", *_counts(level)]
    for title, name, values in _latencies(level.summary):
        lines.append(f"{title:-^{WIDTH}}")
        lines += _percentiles(name, values)
    lines.append("=" * WIDTH)
    lines += [f"note: {text}" for text in notes(report, level)]
    return "\n".join(lines)


def _row(label: str, value: object) -> str:
    shown = f"{value:.2f}" if isinstance(value, float) else str(value)
    return f"{label:<{_LABEL}}{shown:<{WIDTH - _LABEL}}".rstrip()


def _counts(level: Level) -> Iterator[str]:
    summary, load = level.summary, level.load
    yield _row("Successful requests:", summary.num_completed)
    yield _row("Failed requests:", summary.num_failed)
    for kind, number in summary.failures.items():
        yield _row(f"  {kind}:", number)
    if summary.num_given_up:
        yield _row("Requests given up by this tool:", summary.num_given_up)
    if load.concurrency is not None:
        yield _row("Maximum request concurrency:", load.concurrency)
    if load.rate is not None:
        yield _row("Request rate configured (RPS):", load.rate)
    yield _row("Benchmark duration (s):", summary.duration_s)
    yield _row("Total input tokens:", summary.num_input_tokens)
    if summary.num_cached_tokens is not None:
        yield _row("Cached input tokens:", summary.num_cached_tokens)
    yield _row("Total generated tokens:", summary.num_output_tokens)
    yield _row("Request throughput (req/s):", summary.request_throughput)
    if summary.goodput is not None:
        yield _row("Request goodput (req/s):", summary.goodput)
    yield _row("Output token throughput (tok/s):", summary.output_throughput)
    yield _row("Peak output token throughput (tok/s):", summary.peak_output_throughput)
    yield _row("Peak concurrent requests:", summary.peak_concurrency)
    yield _row("Total token throughput (tok/s):", summary.total_throughput)


def _latencies(summary: Summary) -> Iterator[tuple[str, str, Distribution]]:
    yield "Time to First Token", "TTFT", summary.ttft_ms
    yield "Time per Output Token (excl. 1st token)", "TPOT", summary.tpot_ms
    yield "Inter-token Latency", "ITL", summary.itl_ms
    yield "End-to-end Latency", "E2EL", summary.e2e_ms


def _percentiles(name: str, values: Distribution) -> Iterator[str]:
    pairs = (
        ("Mean", values.mean),
        ("Median", values.p50),
        ("P90", values.p90),
        ("P95", values.p95),
        ("P99", values.p99),
    )
    for label, value in pairs:
        yield _row(f"{label} {name} (ms):", value if values.count else "-")


def notes(report: Report, level: Level) -> list[str]:
    """What a reader must know beside the numbers."""
    summary, found = level.summary, list(level.problems)
    if summary.tokens_per_piece > 1.05:
        found.append(
            f"a piece of output carries {summary.tokens_per_piece:.1f} tokens on average: TPOT is "
            "per token, ITL between pieces"
        )
    if not report.plan.target.stream:
        found.append("not streamed: no TTFT, TPOT and ITL")
    for kind, message in summary.first_messages.items():
        found.append(f"{kind}: {message}")
    if summary.num_failed:
        found.append("latencies are of complete answers only; failed requests never count as good")
    return found


def heading(report: Report) -> list[str]:
    """What was measured, and under which declared conditions."""
    load = report.plan.load
    lines = [
        f"Model:    {report.target.model} at {report.target.url}",
        f"Workload: {report.workload}; seed {report.plan.workload.seed}",
        f"Warm-up:  {report.warmup}",
        f"Cache:    {CACHE_NOTES[load.cache]}",
        f"Client:   {report.machine['cpu']}, {report.machine['num_cpus']} CPUs",
    ]
    if report.plan.objective.is_set:
        lines.append(f"Good:     {report.plan.objective}")
    if report.calibration.is_measured:
        tokens = report.calibration.tokens_per_word
        lines.append(f"Lengths:  the server counts {tokens:.2f} tokens a word of these prompts")
    return lines


SWEEP_HEAD = (
    "load", "req/s", "tok/s", "TTFT p50", "p95", "TPOT p50", "p95", "E2E p95", "good", "failed",
)  # fmt: skip


def sweep_rows(report: Report) -> list[tuple[str, ...]]:
    """A line a level, beneath `SWEEP_HEAD`; latencies in milliseconds."""
    return [_sweep_row(level) for level in report.levels]


def _sweep_row(level: Level) -> tuple[str, ...]:
    summary = level.summary
    share = summary.good_share
    return (
        str(level.load),
        f"{summary.request_throughput:.2f}",
        f"{summary.output_throughput:.1f}",
        _short(summary.ttft_ms, summary.ttft_ms.p50),
        _short(summary.ttft_ms, summary.ttft_ms.p95),
        _short(summary.tpot_ms, summary.tpot_ms.p50, 1),
        _short(summary.tpot_ms, summary.tpot_ms.p95, 1),
        _short(summary.e2e_ms, summary.e2e_ms.p95),
        "-" if share is None else f"{share:.0%}",
        str(summary.num_failed) + (" …" if level.run.was_given_up else ""),
    )


def _short(values: Distribution, value: float, digits: int = 0) -> str:
    return f"{value:.{digits}f}" if values.count else "-"


def sweep_table(report: Report) -> str:
    """All levels, a line each; latencies in milliseconds."""
    return format_table(SWEEP_HEAD, sweep_rows(report))


def format_table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """Columns as wide as they need; the first to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = []
    for row in (head, *rows):
        first, *others = (
            f"{cell:<{width}}" if not number else f"{cell:>{width}}"
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        lines.append("  ".join([first, *others]).rstrip())
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def search_outcome(report: Report) -> str:
    """The goodput search in one sentence; empty without one."""
    result = report.search
    if result is None:
        return ""
    wanted = f"{result.share:.0%} of requests keep {report.plan.objective}"
    if result.best_rate is None:
        return f"Goodput: no rate tried lets {wanted} (lowest: {result.failing_rate:.3g} req/s)"
    bound = (
        "no higher one was tried"
        if result.failing_rate is None
        else f"{result.failing_rate:.3g} does not"
    )
    runs = len(result.tried)
    return f"Goodput: {result.best_rate:.3g} req/s: {wanted}; {bound} ({runs} runs)"
