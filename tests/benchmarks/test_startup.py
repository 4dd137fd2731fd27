"""What a start costs: memory within the plan, processor time within reason, packing only once."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.startup import Started, measure_memory, started

MIB = 1 << 20
ABOVE_PLAN_MIB = 150 + 10
"""The aim, and what allocators differ by from run to run."""
CPU_S = 4.0
"""About four times what both processes need; a heavy import at start-up takes more."""


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("packed")


@pytest.fixture(scope="module")
def first(demo_model: Path, cache: Path) -> Iterator[Started]:
    """A server whose weights nobody has packed before, once it has kept them."""
    with started(str(demo_model), ["--packed-cache-dir", str(cache)]) as server:
        deadline = time.monotonic() + 60
        while not list(cache.glob("*.packed")) and time.monotonic() < deadline:
            time.sleep(0.05)
        yield server


def test_packing_never_holds_two_copies_of_the_weights(first: Started) -> None:
    """A second copy would be 92 MiB more; how much of the file is mapped at once differs by 25."""
    engine = first.peak_rss()[1]
    assert engine < first.planned("weights") + 110 * MIB


def test_start_needs_little_processor_time(first: Started) -> None:
    assert first.cpu_s < CPU_S


@pytest.mark.usefixtures("first")
def test_second_start_finds_the_weights_packed(demo_model: Path, cache: Path) -> None:
    with started(str(demo_model), ["--packed-cache-dir", str(cache)]) as server:
        assert "packed weights mapped" in server.log.read_text() or (
            "packed weights read" in server.log.read_text()
        )
        assert server.cpu_s < CPU_S


@pytest.mark.usefixtures("first")
def test_peak_memory_of_both_processes_stays_within_the_plan(demo_model: Path, cache: Path) -> None:
    memory = measure_memory(str(demo_model), ["--packed-cache-dir", str(cache)], kv_mib=48)
    assert memory["above"] < ABOVE_PLAN_MIB, memory
    assert memory["once"] < 150, memory
    assert memory["engine"] > memory["weights"] + memory["kv"], "the KV cache was not filled"
