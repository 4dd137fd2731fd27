"""Throttling and steal that nobody sees would be blamed on the model."""

from __future__ import annotations

from pathlib import Path

import pytest

from caudal.metrics.machine import Machine


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_throttling_of_the_enclosing_group_counts(tmp_path: Path) -> None:
    """A pod's quota is on its parent, not on the container's own group."""
    write(tmp_path / "proc/self/cgroup", "0::/pod/container\n")
    root = tmp_path / "sys/fs/cgroup"
    write(root / "pod/container/cpu.stat", "usage_usec 5\nnr_throttled 0\nthrottled_usec 0\n")
    write(root / "pod/cpu.stat", "usage_usec 5\nnr_throttled 7\nthrottled_usec 2500000\n")
    counters = Machine(tmp_path).read()
    assert (counters.num_throttled, counters.throttled_s) == (7, 2.5)


def test_version_one_groups_count_in_nanoseconds(tmp_path: Path) -> None:
    write(tmp_path / "proc/self/cgroup", "4:memory:/x\n2:cpu,cpuacct:/x\n")
    stat = "nr_periods 9\nnr_throttled 3\nthrottled_time 1500000000\n"
    write(tmp_path / "sys/fs/cgroup/cpu/x/cpu.stat", stat)
    counters = Machine(tmp_path).read()
    assert (counters.num_throttled, counters.throttled_s) == (3, 1.5)


def test_steal_is_a_share_of_all_time_without_counting_guests_twice(tmp_path: Path) -> None:
    write(tmp_path / "proc/stat", "cpu  100 0 100 700 0 0 0 100 50 0\ncpu0 1 2 3\n")
    counters = Machine(tmp_path).read()
    assert counters.steal_s / counters.total_s == pytest.approx(0.1)


def test_machine_that_tells_nothing_reads_as_zero(tmp_path: Path) -> None:
    counters = Machine(tmp_path).read()
    assert (counters.throttled_s, counters.steal_s, counters.total_s) == (0.0, 0.0, 0.0)
    assert counters.process_s > 0


def test_counters_of_this_machine_grow() -> None:
    machine = Machine()
    first = machine.read()
    sum(range(200_000))
    last = machine.read()
    assert last.process_s > first.process_s
    assert last.total_s >= first.total_s > 0
