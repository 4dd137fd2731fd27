"""Reports: labels that users know, files that programs can read, pages that stand alone."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import xml.etree.ElementTree
from html.parser import HTMLParser
from pathlib import Path

import pytest

from caudal.bench.charts import Axis, log_ticks, nice_ticks, resolve_colours
from caudal.bench.figures import curve_panels, timeline_panels
from caudal.bench.json_report import write_json
from caudal.bench.page import report_page
from caudal.bench.picture import check_available, compose, report_rows, report_svg, write_png
from caudal.bench.record import RequestRecord
from caudal.bench.statistics import Distribution, Objective, summarize
from caudal.bench.suite import Report
from caudal.bench.text_report import level_table, sweep_table
from caudal.cli.main import main
from caudal.errors import CaudalError
from tests.bench.fake_server import Behaviour, FakeServer
from tests.bench.harness import run

VLLM_LABELS = """Successful requests: Failed requests: Benchmark duration (s): Total input tokens:
Total generated tokens: Request throughput (req/s): Request goodput (req/s):
Output token throughput (tok/s): Peak output token throughput (tok/s): Peak concurrent requests:
Total token throughput (tok/s): Mean TTFT (ms): Median TTFT (ms): P99 TTFT (ms): Mean TPOT (ms):
Median TPOT (ms): P99 TPOT (ms): Mean ITL (ms): Median ITL (ms): P99 ITL (ms): Mean E2EL (ms):
Median E2EL (ms): P99 E2EL (ms):"""


@pytest.fixture(scope="module")
def report() -> Report:
    return run(
        Behaviour(gap_s=0.001, fail_every=7, cached_tokens=3),
        rate=(40.0, 80.0, float("inf")),
        num_prompts=12,
        output_len=6,
        ttft_ms=500.0,
    )


def test_the_table_has_the_labels_of_vllm_bench_serve(report: Report) -> None:
    table = level_table(report, report.levels[0])
    wanted = re.findall(r"[A-Z][^:]*:", " ".join(VLLM_LABELS.split()))
    assert len(wanted) == 23
    found = {line.split(":")[0] + ":" for line in table.splitlines() if ":" in line}
    assert set(wanted) <= found
    assert "server error (5xx): a failure as ordered" in table
    assert len(sweep_table(report).splitlines()) == 5


def test_json_holds_every_request_and_no_key(report: Report, tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    write_json(report, path)
    text = path.read_text()
    value = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert "api_key" not in text
    assert value["format"] == "caudal-bench/1"
    assert value["levels"][2]["load"]["rate"] == "inf"
    for level in value["levels"]:
        assert len(level["requests"]) == 12
        done = [request for request in level["requests"] if request["ok"]]
        assert len(done) == level["summary"]["num_completed"]
        assert all(len(request["chunk_s"]) == 6 and request["ttft_s"] > 0 for request in done)
        mean = sum(request["ttft_s"] for request in done) / len(done)
        assert level["summary"]["ttft_ms"]["mean"] == pytest.approx(1e3 * mean, rel=0.01)


class Checker(HTMLParser):
    """Notes tags that are never closed, and everything that would need a network."""

    VOID = {"meta", "circle", "line", "rect"}

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.foreign: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in self.VOID:
            self.open.append(tag)
        if tag in ("script", "link", "img", "iframe"):
            self.foreign.append(tag)
        self.foreign += [name for name, _ in attrs if name in ("src", "href", "xlink:href")]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag


def test_the_page_stands_alone_and_is_well_formed(report: Report) -> None:
    page = report_page(report)
    checker = Checker()
    checker.feed(page)
    assert checker.open == [] and checker.foreign == []
    assert "url(" not in page and "@import" not in page
    assert "prefers-color-scheme:dark" in page
    assert page.count("<svg") == len(curve_panels(report)) + 4 * 3


def test_what_a_server_says_cannot_break_out_of_the_page() -> None:
    report = run(
        Behaviour(models=("<script>alert(1)</script>",), fail_every=1), num_prompts=2, output_len=3
    )
    page = report_page(report)
    assert "<script" not in page and "&lt;script&gt;" in page


def test_pictures_are_drawn_without_variables(report: Report, tmp_path: Path) -> None:
    svg = compose("a < b & c", ["line"], report_rows(report))
    xml.etree.ElementTree.fromstring(svg)
    assert "var(" not in svg
    path = tmp_path / "r.png"
    write_png(report_svg(report), path)
    assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 20_000


def test_a_missing_renderer_is_explained_before_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "resvg_py", None)
    with pytest.raises(CaudalError, match=r"--png: needs .*caudal\[bench\]"):
        check_available()


def test_a_level_without_an_answer_can_still_be_drawn() -> None:
    report = run(Behaviour(fail_every=1), concurrency=(1, 2), num_prompts=3, output_len=3)
    assert "<h1>" in report_page(report)
    assert timeline_panels(report.levels[0], Objective())[0].marks
    assert "Mean TTFT (ms):                         -" in level_table(report, report.levels[0])


@pytest.mark.parametrize("high", [0.003, 0.9, 1.0, 7.0, 99.0, 100.0, 12345.0])
def test_ticks_are_few_and_cover(high: float) -> None:
    ticks = nice_ticks(high)
    assert ticks[0] == 0 and ticks[-1] >= high * 0.999 and 3 <= len(ticks) <= 8
    ticks = log_ticks(high / 70, high)
    assert ticks[0] <= high / 70 and ticks[-1] >= high


def test_axes_keep_outliers_inside_and_turn_logarithmic_for_them() -> None:
    axis = Axis.for_latencies([10.0, 11.0, 12.0, 900.0], 100, 0)
    assert axis.is_log and 0 <= axis.at(900.0) < axis.at(10.0) <= 100
    assert not Axis.for_latencies([0.01, 10.0, 11.0, 12.0], 100, 0).is_log
    assert Axis.for_latencies([], 100, 0).at(5.0) == 0
    assert "var(--grid)" not in resolve_colours('stroke="var(--grid)"')


def test_percentiles_are_interpolated_as_numpy_does() -> None:
    values = Distribution.of([1.0, 2.0, 3.0, 4.0])
    assert (values.p50, values.p90, values.mean, values.max) == (2.5, 3.7, 2.5, 4.0)
    assert Distribution.of([]).count == 0


def test_single_tokens_have_no_tpot_and_meet_any_limit_on_it() -> None:
    record = RequestRecord(0, 0, 1.0, first_s=1.2, last_s=1.2, end_s=1.3, num_output_tokens=1)
    assert record.tpot_s is None and record.ttft_s == pytest.approx(0.2)
    assert Objective(tpot_ms=0.1).is_met(record)
    assert not Objective(ttft_ms=199.0).is_met(record)
    assert not Objective(e2e_ms=299.0).is_met(record)
    assert summarize([record], 2.0, Objective(ttft_ms=300.0)).goodput == 0.5


def run_command(*argv: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["bench", "serve", *argv])
    return int(ended.value.code or 0)


def test_the_command_measures_and_writes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ("r.html", "r.png", "r.json", "r.svg")
    html, png, out, svg = (tmp_path / name for name in names)
    with FakeServer(Behaviour(gap_s=0.001)) as server:
        code = run_command(
            *("--url", server.url, "--max-concurrency", "2,4", "--num-prompts", "6"),
            *("--output-len", "4", "--html", str(html), "--png", str(png), "--json", str(out)),
            *("--svg", str(svg)),
            *("--extra-body", '{"user": "me"}', "--label", "A label", "--endpoint", "completions"),
        )
        assert server.bodies[-1]["user"] == "me" and "prompt" in server.bodies[-1]
    printed = capsys.readouterr()
    assert code == 0, printed.err
    assert "Serving Benchmark Result" in printed.out and "E2E p95" in printed.out
    assert "warm-up: 4 requests" in printed.err and "4 users: 6 answers" in printed.err
    assert "<h1>A label</h1>" in html.read_text()
    assert json.loads(out.read_text())["plan"]["label"] == "A label"
    assert png.exists() and svg.read_text().startswith("<svg ")


@pytest.mark.parametrize(
    ("argv", "code", "complaint"),
    [
        (["--url", "http://127.0.0.1:9"], 1, "cannot reach http://127.0.0.1:9/v1"),
        (["--concurrency", "0"], 2, "--concurrency: must be between 1 and 100000, got 0"),
        (["--rate", "1,x"], 2, "--rate: must be a number, got 'x'"),
        (["--rate", "0"], 2, "--rate: must be between 0.0001"),
        (["--extra-body", "[1]"], 2, "--extra-body: must be a JSON object"),
        (["--json", "/nowhere/r.json"], 2, "--json: there is no folder /nowhere"),
        (["--workload", "tea"], 2, "--workload: must be one of chat, agents"),
        (["--goodput-search", "101"], 2, "--goodput-search: must be between 1 and 100"),
    ],
)
def test_wrong_flags_are_named(
    argv: list[str], code: int, complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(*argv) == code
    assert complaint in capsys.readouterr().err


def test_the_command_fails_if_nothing_was_answered(capsys: pytest.CaptureFixture[str]) -> None:
    with FakeServer(Behaviour(fail_every=1)) as server:
        assert run_command("--url", server.url, "--num-prompts", "2", "--warmup", "0") == 1
    assert "no request was answered" in capsys.readouterr().err


def test_an_interrupt_keeps_the_levels_that_had_ended() -> None:
    with FakeServer(Behaviour(gap_s=0.01)) as server:
        command = [sys.executable, "-m", "caudal", "bench", "serve", "--url", server.url]
        command += ["--warmup", "0", "--num-prompts", "40", "--output-len", "50"]
        process = subprocess.Popen(
            [*command, "--concurrency", "40,1"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith("40 users:"):
                break
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "interrupted" in err and "Traceback" not in err
    assert out.count("Serving Benchmark Result") == 1
