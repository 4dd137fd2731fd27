"""`caudal bench kernels`: what it prints is complete, and its arithmetic is right."""

from __future__ import annotations

import json

import pytest

from caudal import _native
from caudal.cli.bench_kernels import bench_kernels, run
from caudal.errors import ConfigError
from caudal.ops.kernel_bench import BenchSpec, KernelTiming, Peaks, measure_peaks

PEAKS = Peaks(int8_ops=100e9, fp32_ops=10e9, read_bytes=20e9)


def timing(num_ops: float, num_bytes: float) -> KernelTiming:
    return KernelTiming("linear w4", "1 x 32", 1, 2.0, 1.0, num_ops, num_bytes, "int8_ops")


def test_rates_are_per_second_of_the_median() -> None:
    assert timing(60e9, 8e9).gops == 30
    assert timing(60e9, 8e9).gops_best == 60
    assert timing(60e9, 8e9).gbytes == 4


def test_share_names_the_nearer_limit() -> None:
    assert timing(60e9, 8e9).share_of_peak(PEAKS) == (0.3, "int8_ops")
    assert timing(60e9, 36e9).share_of_peak(PEAKS) == (0.9, "read_bytes")


@pytest.mark.parametrize("isa", _native.available_isas())
def test_every_instruction_set_has_its_own_peaks(isa: str) -> None:
    peaks = measure_peaks(BenchSpec(isa, num_threads=2, seconds=0.001, is_quick=True))
    assert min(peaks.int8_ops, peaks.fp32_ops, peaks.read_bytes) > 1e7


def test_json_report_holds_every_kernel(capsys: pytest.CaptureFixture[str]) -> None:
    run(BenchSpec(num_threads=2, seconds=0.001, is_quick=True), as_json=True)
    report = json.loads(capsys.readouterr().out)
    assert report["isa"] == _native.available_isas()[0]
    kernels = {result["kernel"] for result in report["results"]}
    assert {"linear w4", "linear w4 wide", "linear w8", "linear f16"} <= kernels
    assert {"attention f16 decode", "attention int8 prefill", "sample greedy"} <= kernels
    for result in report["results"]:
        assert 0 < result["best_seconds"] <= result["median_seconds"]
        assert result["share_of_peak"] > 0


def test_table_fits_when_the_output_is_piped(capsys: pytest.CaptureFixture[str]) -> None:
    run(BenchSpec(num_threads=1, seconds=0.001, is_quick=True))
    out = capsys.readouterr().out
    assert "of peak" in out and "attention int8 decode" in out
    assert max(map(len, out.splitlines())) <= 120


def test_wrong_flags_are_refused_with_the_limit() -> None:
    with pytest.raises(ConfigError, match="--seconds: must be above 0 and at most 60"):
        bench_kernels(seconds=0)
    with pytest.raises(ConfigError, match="--threads: must be 0 or more"):
        bench_kernels(threads=-1)
    with pytest.raises(ConfigError, match="unknown instruction set 'sse9'"):
        bench_kernels(isa="sse9")
