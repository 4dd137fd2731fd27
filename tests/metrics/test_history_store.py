"""A history that grows without bound, or is lost by a kill, is no history."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

from caudal.metrics.history_store import QUARTER_S, HistoryStore
from caudal.metrics.reading import Aggregate, Level

MINUTE = 60
MONTH_S = 30 * 86_400
BEGIN = 1_800_000_000 // QUARTER_S * QUARTER_S


def minute(number: int = 1) -> Aggregate:
    histograms = {name: {40 + number % 50: number} for name in ("ttft", "tpot", "itl", "e2e")}
    counters = {f"counter_{index}": float(number + index) for index in range(40)}
    levels = {f"level_{index}": Level(60.0, float(number), 60) for index in range(13)}
    return Aggregate(60.0, {"requests": float(number), **counters}, histograms, levels)


def total(found: dict[int, Aggregate]) -> float:
    return sum(each.counters["requests"] for each in found.values())


@pytest.mark.parametrize("step", [60, 300, 900, 3600, 86_400])
def test_every_step_finds_the_same_totals(tmp_path: Path, step: int) -> None:
    store = HistoryStore(tmp_path / "h", MONTH_S)
    for number in range(200):
        store.put(BEGIN + number * MINUTE, minute(number))
    found = store.stretches(0, step)
    assert total(found) == sum(range(200))
    assert all(start % step == 0 for start in found)
    counts = [sum(each.histograms["ttft"].values()) for each in found.values()]
    assert sum(counts) == sum(range(200))
    store.close()


def test_minute_of_a_restart_is_merged(tmp_path: Path) -> None:
    for number in (3, 4):
        store = HistoryStore(tmp_path / "h", MONTH_S)
        store.put(BEGIN, minute(number))
        store.close()
    store = HistoryStore(tmp_path / "h", MONTH_S)
    (only,) = store.stretches(0, 60).values()
    assert (only.counters["requests"], only.seconds) == (7.0, 120.0)
    store.close()


def test_size_stays_bounded(tmp_path: Path) -> None:
    """Old minutes leave as new ones come, and their pages are used again."""
    keep_s = 600 * MINUTE
    store = HistoryStore(tmp_path / "h", keep_s)
    for number in range(700):
        store.put(BEGIN + number * MINUTE, minute(number))
    size = (tmp_path / "h").stat().st_size
    for number in range(700, 1800):
        store.put(BEGIN + number * MINUTE, minute(number))
    store.close()
    assert (tmp_path / "h").stat().st_size <= size * 1.2
    with sqlite3.connect(tmp_path / "h") as connection:
        assert connection.execute("SELECT count(*) FROM minutes").fetchone()[0] == 601
    connection.close()


def test_month_is_small_and_read_at_once(tmp_path: Path) -> None:
    """What a busy month takes on the disk, from a busy day; and that quarters are what is read."""
    store = HistoryStore(tmp_path / "h", MONTH_S)
    for number in range(1440):
        store.put(BEGIN + number * MINUTE, minute(number))
    started = time.perf_counter()
    found = store.stretches(0, 3600)
    assert time.perf_counter() - started < 0.25
    assert len(found) == 24
    store.close()
    assert (tmp_path / "h").stat().st_size * 30 < 80e6


WRITER = """
import sys
from tests.metrics.test_history_store import BEGIN, MINUTE, MONTH_S, minute
from caudal.metrics.history_store import HistoryStore
from pathlib import Path
store = HistoryStore(Path(sys.argv[1]), MONTH_S)
number = 0
while True:
    store.put(BEGIN + number * MINUTE, minute(1))
    print(number, flush=True)
    number += 1
"""


def test_killed_writer_loses_no_minute_that_it_has_written(tmp_path: Path) -> None:
    root = Path(__file__).resolve().parents[2]
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path / "h")],
        stdout=subprocess.PIPE,
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
    )
    assert process.stdout is not None
    written = -1
    while written < 40:
        written = int(process.stdout.readline())
    process.send_signal(signal.SIGKILL)
    rest = process.stdout.read().split()
    process.stdout.close()
    process.wait()
    written = max([written, *map(int, rest)])
    store = HistoryStore(tmp_path / "h", MONTH_S)
    assert total(store.stretches(0, 60)) in (written + 1, written + 2)
    assert total(store.stretches(0, 900)) == total(store.stretches(0, 60))
    store.close()


def test_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(b"x" * 5000)
    with pytest.raises(sqlite3.DatabaseError):
        HistoryStore(tmp_path / "text", MONTH_S)
    with sqlite3.connect(tmp_path / "newer") as connection:
        connection.execute("PRAGMA user_version=99")
    connection.close()
    with pytest.raises(sqlite3.DatabaseError, match="version 99"):
        HistoryStore(tmp_path / "newer", MONTH_S)


def test_row_that_cannot_be_decoded_is_a_broken_file(tmp_path: Path) -> None:
    store = HistoryStore(tmp_path / "h", MONTH_S)
    store.put(BEGIN, minute())
    store.close()
    with sqlite3.connect(tmp_path / "h") as connection:
        connection.execute("UPDATE minutes SET data = x'c1'")
    connection.close()
    with pytest.raises(sqlite3.DatabaseError, match="cannot be decoded"):
        HistoryStore(tmp_path / "h", MONTH_S)
