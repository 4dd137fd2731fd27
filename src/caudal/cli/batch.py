"""`caudal batch`: the requests of a file through a model in this process group, no server."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from caudal.cli.flags import Flag, Positional, create_command
from caudal.cli.serve import DEFAULT_MODEL, MODEL_FLAGS, configure_logging
from caudal.cli.units import count, nonempty
from caudal.config import (
    CacheConfig,
    EngineConfig,
    ParallelConfig,
    SchedulerConfig,
    ServerConfig,
    WeightsConfig,
)
from caudal.errors import BatchFailedError, ConfigError

if TYPE_CHECKING:
    from caudal.server.batch.offline import OfflineSpec


@dataclass(frozen=True, slots=True)
class BatchOptions:
    """Choices of the command itself."""

    output: str | None = None
    """Where answers go, a line each; unset: INPUT with .output.jsonl. What it holds is kept and
    not run again."""
    errors: str | None = None
    """Where failed requests go, written anew in each run; unset: the output with .errors.jsonl."""
    model: str | None = None
    """A known name, a hub id, or the path of a GGUF file; unset: what the first line names, else
    smollm2-135m."""


BATCH_FLAGS = (
    Flag("--output", BatchOptions, "output", nonempty, "FILE", short="-o"),
    Flag("--errors", BatchOptions, "errors", nonempty, "FILE"),
    Flag("--model", BatchOptions, "model", nonempty, "MODEL"),
    Flag("--served-model-name", ServerConfig, "served_model_name", nonempty, "NAME"),
    Flag("--max-num-seqs", SchedulerConfig, "max_num_seqs", count(1, 4096), "N"),
    *MODEL_FLAGS,
)

INPUT = Positional(
    "input", None, "Requests in OpenAI's batch format, one JSON object a line.", "INPUT", True
)

SHOWN_ERRORS = 20


def batch(input_file: str, values: dict[type, dict[str, Any]]) -> None:
    """Run the requests of a file without a server; resumes.

    Exit codes: 0 all answered, 1 some failed, 2 the input is not usable, 130 interrupted.
    """
    from caudal.cli.batch_progress import BatchProgress
    from caudal.server.batch.offline import run_offline
    from caudal.weights.download import resolve_model

    configure_logging("warning")
    spec, model = _create_spec(Path(input_file), values)
    scheduler = offline_scheduler(values[SchedulerConfig])
    num_requests = _check_input(spec)
    engine = EngineConfig(
        model_path=resolve_model(model),
        cache=CacheConfig(**values[CacheConfig]),
        scheduler=scheduler,
        parallel=ParallelConfig(**values[ParallelConfig]),
        weights=WeightsConfig(**values[WeightsConfig]),
    )
    with BatchProgress() as shown:
        try:
            progress = run_offline(spec, num_requests, engine, shown.update)
        except KeyboardInterrupt:
            shown.close()
            _say(f"{shown.summary()}; run the same command to go on")
            raise
    _say(f"{shown.summary()}; answers in {spec.output}")
    if progress.num_failed:
        raise BatchFailedError(
            f"{progress.num_failed} of {progress.num_total} requests failed; see {spec.errors}"
        )


def _create_spec(path: Path, values: dict[type, dict[str, Any]]) -> tuple[OfflineSpec, str]:
    """What to run, and the model to load. Raises ConfigError."""
    from caudal.server.batch.offline import OfflineSpec, first_model

    options = BatchOptions(**values[BatchOptions])
    if not path.is_file():
        raise ConfigError(f"INPUT: there is no file {path}")
    output = Path(options.output) if options.output else path.with_suffix(".output.jsonl")
    errors = Path(options.errors) if options.errors else output.with_suffix(".errors.jsonl")
    if len({path.resolve(), output.resolve(), errors.resolve()}) < 3:
        raise ConfigError("--output, --errors: must be files of their own")
    model = options.model or first_model(path) or DEFAULT_MODEL
    name = ServerConfig(**values[ServerConfig]).served_model_name or model
    return OfflineSpec(input=path, output=output, errors=errors, model_name=name), model


def _check_input(spec: OfflineSpec) -> int:
    """The number of requests. Shows the first faults and raises ConfigError if there are any."""
    report = spec.validate(SHOWN_ERRORS)
    for fault in report.errors:
        where = f"{spec.input}:{fault.line}" if fault.line else str(spec.input)
        _say(f"{where}: {fault.message}")
    if report.num_errors:
        raise ConfigError(f"INPUT: {report.num_errors} faults in {spec.input}; nothing was run")
    return report.num_requests


def offline_scheduler(values: dict[str, Any]) -> SchedulerConfig:
    """No latency targets, and a queue that admission never closes."""
    unlimited = 1 << 40
    config = SchedulerConfig(
        ttft_ms=None,
        tpot_ms=None,
        max_queue_requests=unlimited,
        max_queue_tokens=unlimited,
        max_queue_ttft_s=float(unlimited),
        **values,
    )
    if config.max_num_batched_tokens < config.max_num_seqs:
        raise ConfigError(
            f"--max-num-seqs: must be at most {config.max_num_batched_tokens}, "
            f"got {config.max_num_seqs}"
        )
    return config


def _say(text: str) -> None:
    print(text, file=sys.stderr)


def create(is_help: bool) -> Callable[..., None]:
    """The command for typer."""
    return create_command(batch, INPUT, BATCH_FLAGS, is_help=is_help)
