"""`caudal bench kernels`: each kernel's speed beside what this machine can do at best."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from caudal.ops.kernel_bench import BenchSpec, KernelTiming, Peaks

_Threads = Annotated[int, typer.Option("--threads", help="Compute threads; 0 for all cores.")]
_Isa = Annotated[str, typer.Option("--isa", help="Instruction set; default: the best one here.")]
_Seconds = Annotated[float, typer.Option("--seconds", help="Time per kernel and shape.")]
_Quick = Annotated[bool, typer.Option("--quick", help="A few shapes only.")]
_Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and no table.")]

_PEAK_NAMES = {"int8_ops": "int8", "fp32_ops": "fp32", "read_bytes": "read"}


def bench_kernels(
    threads: _Threads = 0,
    isa: _Isa = "",
    seconds: _Seconds = 0.2,
    quick: _Quick = False,
    as_json: _Json = False,
) -> None:
    """Time each kernel against this machine's measured peak.

    Medians over many calls; on a shared machine the best call shows the hardware's limit.
    """
    from caudal.errors import ConfigError
    from caudal.ops import default_num_threads
    from caudal.ops.kernel_bench import BenchSpec

    if not 0 < seconds <= 60:
        raise ConfigError(f"--seconds: must be above 0 and at most 60, got {seconds:g}")
    if threads < 0:
        raise ConfigError(f"--threads: must be 0 or more, got {threads}")
    run(BenchSpec(isa, threads or default_num_threads(), seconds, quick), as_json=as_json)


def run(spec: BenchSpec, *, as_json: bool = False) -> None:
    """Measure and print a table to standard output, or one JSON object.

    Raises ConfigError if this CPU cannot run `spec.isa` or the number of threads is out of range.
    """
    from caudal.ops import create_backend
    from caudal.ops.kernel_bench import measure_kernels, measure_peaks

    isa = create_backend("cpu", spec.num_threads, spec.isa or None).isa
    peaks = measure_peaks(spec)
    timings = measure_kernels(spec)
    if as_json:
        results = [_as_dict(timing, peaks) for timing in timings]
        report = {
            "isa": isa,
            "num_threads": spec.num_threads,
            "peaks": asdict(peaks),
            "results": results,
        }
        print(json.dumps(report, indent=2))
    else:
        _print_table(isa, spec.num_threads, peaks, list(timings))


def _as_dict(timing: KernelTiming, peaks: Peaks) -> dict[str, object]:
    share, limit = timing.share_of_peak(peaks)
    return asdict(timing) | {
        "gops": timing.gops,
        "gops_best": timing.gops_best,
        "gbytes": timing.gbytes,
        "share_of_peak": share,
        "limit": limit,
    }


def _print_table(isa: str, num_threads: int, peaks: Peaks, timings: list[KernelTiming]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(
        title=f"{isa}, {num_threads} threads; peaks: int8 {peaks.int8_ops / 1e9:.0f} GOP/s, "
        f"fp32 {peaks.fp32_ops / 1e9:.0f} GFLOP/s, read {peaks.read_bytes / 1e9:.1f} GB/s"
    )
    for name in ("kernel", "shape"):
        table.add_column(name, no_wrap=True)
    for name in ("tokens", "median µs", "GOP/s", "best", "GB/s", "of peak"):
        table.add_column(name, justify="right", no_wrap=True)
    previous = ""
    for timing in timings:
        family = timing.kernel.split()[0]
        if previous not in ("", family):
            table.add_section()
        previous = family
        share, limit = timing.share_of_peak(peaks)
        table.add_row(
            timing.kernel,
            timing.shape,
            str(timing.num_tokens),
            f"{timing.median_seconds * 1e6:.1f}",
            f"{timing.gops:.0f}" if timing.num_ops else "-",
            f"{timing.gops_best:.0f}" if timing.num_ops else "-",
            f"{timing.gbytes:.1f}",
            f"{share:.0%} {_PEAK_NAMES[limit]}",
        )
    console = Console()
    if not console.is_terminal:
        console.width = 120
    console.print(table)
