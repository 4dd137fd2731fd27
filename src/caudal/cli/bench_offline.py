"""`caudal bench offline`: throughput of a model in this process."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from caudal.bench.workload import WorkloadOptions
from caudal.cli.bench_serve import LENGTH_FLAGS, WORKLOAD_FLAG, OutputOptions, check_outputs
from caudal.cli.flags import Flag, create_command
from caudal.cli.serve import MODEL, MODEL_FLAGS
from caudal.cli.units import count, nonempty
from caudal.config import CacheConfig, ParallelConfig, SchedulerConfig
from caudal.errors import CaudalError

OFFLINE_FLAGS = (
    WORKLOAD_FLAG,
    *LENGTH_FLAGS,
    Flag("--max-num-seqs", SchedulerConfig, "max_num_seqs", count(1, 4096), "N"),
    *MODEL_FLAGS,
    Flag("--json", OutputOptions, "json", nonempty, "FILE", "Write the numbers to this file."),
)


def bench_offline(model: str, values: dict[type, dict[str, Any]]) -> None:
    """Throughput of a model in this process: all prompts at once, no server."""
    from caudal.bench.offline import OfflineSpec, run_offline
    from caudal.cli.batch import offline_scheduler

    output = OutputOptions(**values[OutputOptions])
    check_outputs(output)
    workload = WorkloadOptions(**values[WorkloadOptions])
    spec = OfflineSpec(
        model=model,
        workload=workload,
        cache=CacheConfig(**values[CacheConfig]),
        scheduler=offline_scheduler(values[SchedulerConfig]),
        num_threads=ParallelConfig(**values[ParallelConfig]).num_threads,
    )
    print(f"{workload.num_prompts or 64} prompts, then the numbers", file=sys.stderr)
    result = run_offline(spec)
    print(f"Model:                       {result.model}, loaded in {result.load_s:.2f} s")
    print(f"Workload:                    {result.workload}; 2 prompts of warm-up not counted")
    print(
        f"Throughput:                  {result.prompts_per_s:.2f} requests/s, "
        f"{result.total_tokens_per_s:.2f} total tokens/s, "
        f"{result.output_tokens_per_s:.2f} output tokens/s"
    )
    print(f"Total num prompt tokens:     {result.num_input_tokens}")
    print(f"  of them found in cache:    {result.num_cached_tokens}")
    print(f"Total num output tokens:     {result.num_output_tokens}")
    print(f"Elapsed time (s):            {result.elapsed_s:.2f}")
    if output.json:
        _write(result, Path(output.json))


def _write(result: Any, path: Path) -> None:
    fields = dataclasses.asdict(result)
    for name in ("prompts_per_s", "output_tokens_per_s", "total_tokens_per_s"):
        fields[name] = getattr(result, name)
    try:
        path.write_text(json.dumps(fields, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise CaudalError(f"cannot write {path}: {error}") from None


def create(is_help: bool) -> Callable[..., None]:
    """The command for typer."""
    return create_command(bench_offline, MODEL, OFFLINE_FLAGS, is_help=is_help)
