"""What a user sees of a download."""

from __future__ import annotations

import io

import pytest

from caudal.weights.progress import BarProgress, LineProgress, create_progress


def test_lines_are_few_and_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("caudal.weights.progress.time.monotonic", lambda: now[0])
    stream = io.StringIO()
    progress = LineProgress(stream)
    progress.begin("pulling x", 10_000_000, done_bytes=1_000_000)
    for _ in range(9):
        now[0] += 1.0
        progress.advance(1_000_000)
    progress.end()
    assert stream.getvalue().splitlines() == [
        "pulling x: 1.0 of 10.0 MB",
        "pulling x: 6.0 of 10.0 MB",
        "pulling x: 10.0 of 10.0 MB",
    ]


def test_unknown_size_is_not_invented() -> None:
    stream = io.StringIO()
    LineProgress(stream).begin("pulling x", None)
    assert stream.getvalue() == "pulling x: 0.0 MB\n"


def test_no_terminal_means_plain_lines(capsys: pytest.CaptureFixture[str]) -> None:
    progress = create_progress()
    progress.begin("pulling x", 1_000_000)
    progress.note("waiting")
    captured = capsys.readouterr()
    assert captured.err == "pulling x: 0.0 of 1.0 MB\nwaiting\n"
    assert captured.out == ""


def test_bar_can_be_ended_twice_and_reused(capsys: pytest.CaptureFixture[str]) -> None:
    progress = BarProgress()
    for label in ("one", "two"):
        progress.begin(label, 10, done_bytes=5)
        progress.advance(5)
        progress.end()
        progress.end()
    errors = capsys.readouterr().err
    assert "one" in errors
    assert "two" in errors
