"""`caudal bench ladder`: what each serving technique buys on this machine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from caudal.bench.ladder import LadderOptions, climb
from caudal.cli.bench_serve import (
    FILE_FLAGS,
    OutputOptions,
    Writers,
    check_outputs,
    write_files,
)
from caudal.cli.flags import Flag, create_command
from caudal.cli.serve import MODEL, MODEL_FLAGS
from caudal.cli.units import count, number
from caudal.config import CacheConfig, ParallelConfig, SchedulerConfig
from caudal.errors import CaudalError

_PASSED_ON = ("--max-model-len", "--kv-cache-memory", "--threads")

LADDER_FLAGS = (
    Flag("--quick", LadderOptions, "quick", None),
    Flag("--concurrency", LadderOptions, "users", count(1, 4096), "N", short="--max-concurrency"),
    Flag("--num-prompts", LadderOptions, "num_prompts", count(1, 100_000), "N"),
    Flag("--duration", LadderOptions, "rung_s", number(1, 86_400), "S"),
    Flag("--seed", LadderOptions, "seed", count(0, 2**31 - 1), "N"),
    *(flag for flag in MODEL_FLAGS if flag.name in _PASSED_ON),
    *FILE_FLAGS,
)


def bench_ladder(model: str, values: dict[type, dict[str, Any]]) -> None:
    """The same work under one serving technique after the other.

    Starts a server of its own for each: serial, static batching, continuous batching, prefix
    cache, prefill in a time budget, INT8 KV cache. The same options and prompts for all.
    """
    from caudal.bench.ladder_report import as_svg, as_text, write_json, write_page
    from caudal.cli.bench_progress import BenchProgress
    from caudal.weights.download import resolve_model

    output = OutputOptions(**values[OutputOptions])
    check_outputs(output)
    options = LadderOptions(**values[LadderOptions])
    path = resolve_model(model)
    with BenchProgress() as progress:
        ladder = climb(str(path), options, _serve_flags(values), progress)
    print(as_text(ladder))
    write_files(ladder, output, Writers(write_json, write_page, as_svg))
    if ladder.was_interrupted:
        raise KeyboardInterrupt
    if not all(result.level.summary.num_completed for result in ladder.results):
        raise CaudalError("a rung answered no request; the reasons are above")


def _serve_flags(values: dict[type, dict[str, Any]]) -> tuple[str, ...]:
    """The given flags of the engine, as words for `caudal serve`."""
    words: list[str] = []
    for name, config, field in (
        ("--max-model-len", SchedulerConfig, "max_model_len"),
        ("--kv-cache-memory", CacheConfig, "kv_cache_memory_bytes"),
        ("--threads", ParallelConfig, "num_threads"),
    ):
        value = values[config].get(field)
        if value is not None:
            words += [name, str(value)]
    return tuple(words)


def create(is_help: bool) -> Callable[..., None]:
    """The command for typer."""
    return create_command(bench_ladder, MODEL, LADDER_FLAGS, is_help=is_help)
