"""Each rung is a real server; the gains printed are ratios of what was measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from caudal.bench import ladder as ladder_module
from caudal.bench.ladder import RUNGS, Ladder, LadderOptions, Rung, RungResult, climb
from caudal.bench.ladder_report import as_page, as_svg, as_text, panels, rows
from caudal.cli.flags import parse_plain
from caudal.cli.main import main
from caudal.cli.serve import MODEL, SERVE_FLAGS
from caudal.config import Batching, CacheConfig, KVCacheDType, SchedulerConfig
from caudal.errors import CaudalError
from tests.bench.fake_server import Behaviour
from tests.bench.harness import Silent, run
from tests.tiny_models import make_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ladder") / "tiny.gguf"
    return make_tiny_model(path, context_length=8192)


def test_every_rung_is_a_command_line_of_caudal_serve() -> None:
    batchings, caching, dtypes = [], [], []
    for rung in RUNGS:
        parsed = parse_plain(rung.flags, MODEL, SERVE_FLAGS)
        assert parsed is not None
        _, values = parsed
        batchings.append(values[SchedulerConfig].get("batching", Batching.CONTINUOUS))
        caching.append(values[CacheConfig].get("enable_prefix_caching", True))
        dtypes.append(values[CacheConfig].get("kv_cache_dtype", KVCacheDType.F16))
    assert batchings == [Batching.SERIAL, Batching.STATIC, *[Batching.CONTINUOUS] * 4]
    assert caching == [False, False, False, True, True, True]
    assert dtypes == [KVCacheDType.F16] * 5 + [KVCacheDType.INT8]


def test_gains_are_over_the_rung_below_and_over_the_lowest() -> None:
    results = []
    for rung, gap_s in zip(RUNGS, (0.02, 0.01, 0.005), strict=False):
        report = run(Behaviour(gap_s=gap_s), concurrency=(2,), num_prompts=4, output_len=20)
        results.append(RungResult(rung, report.levels[0], 640, is_complete=True))
    ladder = Ladder("m.gguf", LadderOptions(), (), results)
    gains = [(float(row[2][1:]), float(row[3][1:])) for row in rows(ladder)]
    assert gains[0] == (1.0, 1.0)
    assert gains[1] == pytest.approx((2.0, 2.0), rel=0.25)
    assert gains[2] == pytest.approx((2.0, 4.0), rel=0.3)
    assert "continuous batching" in as_text(ladder) and "640" in as_text(ladder)
    assert len(panels(ladder)) == 3 and as_svg(ladder).startswith("<svg ")
    assert "--batching static" in as_page(ladder)


def test_two_rungs_on_a_real_model(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ladder_module, "RUNGS", (RUNGS[2], RUNGS[5]))
    out, html, png = (tmp_path / name for name in ("l.json", "l.html", "l.png"))
    with pytest.raises(SystemExit) as ended:
        main(
            [
                *("bench", "ladder", str(model), "--quick", "--num-prompts", "6"),
                *("--concurrency", "3", "--threads", "1"),
                *("--json", str(out), "--html", str(html), "--png", str(png)),
            ]
        )
    printed = capsys.readouterr()
    assert ended.value.code == 0, printed.err
    assert "continuous batching" in printed.out and "×" in printed.out
    value = json.loads(out.read_text())
    lower, upper = value["rungs"]
    assert value["serve_flags"] == ["--threads", "1"]
    assert lower["summary"]["num_completed"] == upper["summary"]["num_completed"] == 6
    assert lower["summary"]["num_cached_tokens"] == 0 < upper["summary"]["num_cached_tokens"]
    assert upper["num_kv_tokens"] > 0
    sent = [[r["num_prompt_tokens"] for r in rung["requests"]] for rung in value["rungs"]]
    assert sorted(sent[0]) == sorted(sent[1])
    assert html.read_text().startswith("<!doctype html>") and png.exists()


def test_an_interrupted_ladder_shows_the_rungs_that_were_measured(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[str] = []
    measure = ladder_module._measure

    def interrupted(url: str, rung: Rung, *rest: Any) -> RungResult:
        if measured:
            raise KeyboardInterrupt
        measured.append(rung.name)
        return measure(url, rung, *rest)

    monkeypatch.setattr(ladder_module, "_measure", interrupted)
    ladder = climb(str(model), LadderOptions(users=2, num_prompts=2), ("--threads", "1"), Silent())
    assert ladder.was_interrupted and [r.rung.name for r in ladder.results] == measured
    assert "interrupted" in as_text(ladder) and "interrupted" in as_page(ladder)
    measured[:] = ["one"]
    with pytest.raises(KeyboardInterrupt):
        climb(str(model), LadderOptions(), (), Silent())


def test_a_server_that_does_not_start_says_why(tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + b"\0" * 100)
    with pytest.raises(CaudalError, match=r"a server did not start: .*broken\.gguf"):
        climb(str(broken), LadderOptions(quick=True), (), Silent())


def test_offline_counts_what_the_model_did(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "o.json"
    with pytest.raises(SystemExit) as ended:
        main(
            [
                *("bench", "offline", str(model), "--num-prompts", "5", "--input-len", "60"),
                *("--output-len", "7", "--json", str(out), "--threads", "1"),
            ]
        )
    printed = capsys.readouterr()
    assert ended.value.code == 0, printed.err
    value = json.loads(out.read_text())
    assert (value["num_prompts"], value["num_output_tokens"]) == (5, 35)
    assert value["num_input_tokens"] == pytest.approx(300, rel=0.2)
    assert value["prompts_per_s"] == pytest.approx(5 / value["elapsed_s"])
    assert value["output_tokens_per_s"] == pytest.approx(35 / value["elapsed_s"])
    assert "requests/s" in printed.out and "Total num output tokens:     35" in printed.out
