"""`caudal bench serve`: latency and throughput of any OpenAI-compatible server under load."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from caudal.bench.load import LoadOptions
from caudal.bench.search import SearchOptions
from caudal.bench.statistics import Objective
from caudal.bench.suite import CACHE_NOTES, Plan, Report, measure
from caudal.bench.target import CHAT_PATH, COMPLETIONS_PATH, TargetOptions
from caudal.bench.workload import WORKLOADS, WorkloadOptions
from caudal.cli.flags import Flag, create_command
from caudal.cli.units import Parser, choice, count, nonempty, number
from caudal.errors import CaudalError, ConfigError

MAX_LEVELS = 32
FILES = ("json", "html", "png", "svg")
"""Fields of OutputOptions that are paths."""


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """Where results go besides standard output."""

    label: str | None = None
    """Title of the report."""
    json: str | None = None
    """Write everything, every request included, to this file."""
    html: str | None = None
    """Write a page with curves and tables to this file; it needs nothing else."""
    png: str | None = None
    """Write the curves as a picture to this file (needs caudal[bench])."""
    svg: str | None = None
    """Write the same picture as SVG to this file."""


def numbers(parse: Parser) -> Parser:
    """Parser of a comma-separated list of what `parse` takes."""

    def parse_all(flag: str, text: str) -> tuple[object, ...]:
        parts = [part.strip() for part in text.split(",")]
        if len(parts) > MAX_LEVELS:
            raise ConfigError(f"{flag}: at most {MAX_LEVELS} levels, got {len(parts)}")
        return tuple(parse(flag, part) for part in parts)

    return parse_all


def rate(flag: str, text: str) -> float:
    """Parser of a number of requests a second, or inf."""
    if text.lower() in ("inf", "infinity"):
        return float("inf")
    value = number(0.0001, 1_000_000)(flag, text)
    assert isinstance(value, float)
    return value


def json_object(flag: str, text: str) -> dict[str, Any]:
    """Parser of a JSON object."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{flag}: not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{flag}: must be a JSON object, got {text!r}")
    return value


_ENDPOINTS: dict[str, object] = {
    "chat": CHAT_PATH,
    "completions": COMPLETIONS_PATH,
    "/v1/chat/completions": CHAT_PATH,
    "/v1/completions": COMPLETIONS_PATH,
}

TARGET_FLAGS = (
    Flag("--url", TargetOptions, "url", nonempty, "URL", short="--base-url"),
    Flag("--api-key", TargetOptions, "api_key", nonempty, "KEY"),
    Flag("--model", TargetOptions, "model", nonempty, "NAME"),
    Flag("--endpoint", TargetOptions, "endpoint", choice(_ENDPOINTS), "API"),
    Flag("--stream", TargetOptions, "stream", None),
    Flag("--ignore-eos", TargetOptions, "ignore_eos", None),
    Flag("--temperature", TargetOptions, "temperature", number(0, 2), "X"),
    Flag("--extra-body", TargetOptions, "extra_body", json_object, "JSON"),
    Flag("--insecure", TargetOptions, "insecure", None),
    Flag("--timeout", TargetOptions, "timeout_s", number(0.1, 86_400), "S"),
)
LENGTH_FLAGS = (
    Flag("--num-prompts", WorkloadOptions, "num_prompts", count(1, 1_000_000), "N"),
    Flag("--input-len", WorkloadOptions, "input_len", count(1, 10_000_000), "N"),
    Flag("--output-len", WorkloadOptions, "output_len", count(1, 10_000_000), "N"),
    Flag("--seed", WorkloadOptions, "seed", count(0, 2**31 - 1), "N"),
)
WORKLOAD_FLAG = Flag(
    "--workload", WorkloadOptions, "workload", choice({name: name for name in WORKLOADS}), "KIND"
)
_LOAD_FLAGS = (
    WORKLOAD_FLAG,
    Flag("--jsonl", WorkloadOptions, "jsonl", nonempty, "FILE"),
    Flag("--trace", WorkloadOptions, "trace", nonempty, "FILE"),
    Flag("--trace-speed", WorkloadOptions, "trace_speed", number(0.001, 10_000), "X"),
    *LENGTH_FLAGS,
    Flag("--turns", WorkloadOptions, "turns", count(1, 1000), "N"),
    Flag("--think-time", WorkloadOptions, "think_s", number(0, 86_400), "S"),
    Flag(
        "--concurrency",
        LoadOptions,
        "concurrency",
        numbers(count(1, 100_000)),
        "N,N…",
        short="--max-concurrency",
    ),
    Flag("--rate", LoadOptions, "rate", numbers(rate), "R,R…", short="--request-rate"),
    Flag("--burstiness", LoadOptions, "burstiness", number(0.01, 1000), "X"),
    Flag("--duration", LoadOptions, "duration_s", number(0.1, 86_400), "S"),
    Flag("--drain", LoadOptions, "drain_s", number(0, 86_400), "S"),
    Flag("--warmup", LoadOptions, "warmup", count(0, 10_000), "N", short="--num-warmups"),
    Flag("--cache", LoadOptions, "cache", choice({name: name for name in CACHE_NOTES}), "STATE"),
)
_OBJECTIVE_FLAGS = (
    Flag("--ttft-ms", Objective, "ttft_ms", number(0.001, 86_400_000), "MS"),
    Flag("--tpot-ms", Objective, "tpot_ms", number(0.001, 86_400_000), "MS"),
    Flag("--e2e-ms", Objective, "e2e_ms", number(0.001, 86_400_000), "MS"),
    Flag("--goodput-search", SearchOptions, "goodput_percent", number(1, 100), "PERCENT"),
    Flag("--search-runs", SearchOptions, "max_runs", count(1, 100), "N"),
    Flag("--search-window", SearchOptions, "window_s", number(0.1, 86_400), "S"),
)
FILE_FLAGS = (
    Flag("--json", OutputOptions, "json", nonempty, "FILE"),
    Flag("--html", OutputOptions, "html", nonempty, "FILE"),
    Flag("--png", OutputOptions, "png", nonempty, "FILE"),
    Flag("--svg", OutputOptions, "svg", nonempty, "FILE"),
)
_LABEL_FLAG = Flag("--label", OutputOptions, "label", nonempty, "TEXT")
BENCH_SERVE_FLAGS = (*TARGET_FLAGS, *_LOAD_FLAGS, *_OBJECTIVE_FLAGS, _LABEL_FLAG, *FILE_FLAGS)


def bench_serve(_none: None, values: dict[type, dict[str, Any]]) -> None:
    """Measure an OpenAI-compatible server under load.

    Exit codes: 0 measured, 1 no request was answered or the server cannot be measured, 2 a flag
    is wrong, 130 interrupted.
    """
    from caudal.cli.bench_progress import BenchProgress

    output = OutputOptions(**values[OutputOptions])
    check_outputs(output)
    plan = Plan(
        target=TargetOptions(**values[TargetOptions]),
        workload=WorkloadOptions(**values[WorkloadOptions]),
        load=LoadOptions(**values[LoadOptions]),
        objective=Objective(**values[Objective]),
        search=SearchOptions(**values[SearchOptions]),
        label=output.label or "",
    )
    with BenchProgress() as progress:
        report = asyncio.run(measure(plan, progress))
    print_report(report)
    write_report(report, output)
    if report.was_interrupted:
        print("interrupted; the levels that had ended are above", file=sys.stderr)
        raise KeyboardInterrupt
    if not any(level.summary.num_completed for level in report.levels):
        raise CaudalError("no request was answered; the reasons are above")


def print_report(report: Report) -> None:
    """The table of each level, and of all levels if there are several."""
    from caudal.bench.text_report import heading, level_table, search_outcome, sweep_table

    print("\n".join(heading(report)))
    for level in report.levels:
        print(f"\n{level.load}")
        print(level_table(report, level))
    if len(report.levels) > 1:
        print("\nLatencies in ms\n" + sweep_table(report))
    if outcome := search_outcome(report):
        print("\n" + outcome)


def check_outputs(output: OutputOptions) -> None:
    """Raise CaudalError now rather than after minutes of measuring."""
    from caudal.bench.picture import check_available

    for name in FILES:
        text = getattr(output, name)
        if text is not None and not Path(text).absolute().parent.is_dir():
            raise ConfigError(f"--{name}: there is no folder {Path(text).absolute().parent}")
    if output.png:
        check_available()


def write_report(report: Report, output: OutputOptions) -> None:
    """Write the files that were asked for. Raises CaudalError."""
    from caudal.bench.json_report import write_json
    from caudal.bench.page import write_page
    from caudal.bench.picture import report_svg

    write_files(report, output, Writers(write_json, write_page, report_svg))


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Writers(Generic[T]):
    """How results become files."""

    json: Callable[[T, Path], None]
    html: Callable[[T, Path], None]
    svg: Callable[[T], str]
    """The picture."""


def write_files(result: T, output: OutputOptions, writers: Writers[T]) -> None:
    """Write the files that were asked for. Raises CaudalError."""
    from caudal.bench.picture import write_png

    def write(name: str, path: Path) -> None:
        if name == "svg":
            path.write_text(writers.svg(result) + "\n", encoding="utf-8")
        elif name == "png":
            write_png(writers.svg(result), path)
        else:
            (writers.json if name == "json" else writers.html)(result, path)

    for name in FILES:
        path = getattr(output, name)
        if path is None:
            continue
        try:
            write(name, Path(path))
        except OSError as error:
            raise CaudalError(f"cannot write {path}: {error}") from None
        print(f"written: {path}", file=sys.stderr)


def create(is_help: bool) -> Callable[..., None]:
    """The command for typer."""
    return create_command(bench_serve, None, BENCH_SERVE_FLAGS, is_help=is_help)
