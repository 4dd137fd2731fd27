"""The default number of threads under affinity masks and cgroup quotas."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from caudal.ops import default_num_threads


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")


def topology(cores: list[tuple[int, int]]) -> dict[str, str]:
    """Files that place CPU i at cores[i] = (package, core)."""
    files = {}
    for cpu, (package, core) in enumerate(cores):
        folder = f"sys/devices/system/cpu/cpu{cpu}/topology"
        files[f"{folder}/physical_package_id"] = str(package)
        files[f"{folder}/core_id"] = str(core)
    return files


@pytest.fixture
def affinity(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    cpus = set(range(16))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: cpus, raising=False)
    return cpus


def test_affinity_mask_counts_not_the_machine(tmp_path: Path, affinity: set[int]) -> None:
    """B145."""
    write(tmp_path, topology([(0, core) for core in range(16)]))
    affinity -= set(range(4, 16))
    assert default_num_threads(tmp_path) == 4


def test_hyperthreads_share_a_core(tmp_path: Path, affinity: set[int]) -> None:
    write(tmp_path, topology([(cpu // 4, cpu % 4 // 2) for cpu in range(16)]))
    assert default_num_threads(tmp_path) == 8


def test_equal_core_ids_on_two_packages_are_two_cores(tmp_path: Path, affinity: set[int]) -> None:
    write(tmp_path, topology([(cpu // 8, cpu % 8) for cpu in range(16)]))
    assert default_num_threads(tmp_path) == 16


def test_without_topology_every_cpu_counts(tmp_path: Path, affinity: set[int]) -> None:
    assert default_num_threads(tmp_path) == 16


@pytest.mark.parametrize(
    ("cpu_max", "expected"),
    [("400000 100000", 4), ("765000 100000", 7), ("50000 100000", 1), ("max 100000", 16)],
)
def test_quota_v2_rounds_down_to_whole_cpus(
    tmp_path: Path, affinity: set[int], cpu_max: str, expected: int
) -> None:
    """B145."""
    write(tmp_path, {"proc/self/cgroup": "0::/app", "sys/fs/cgroup/app/cpu.max": cpu_max})
    assert default_num_threads(tmp_path) == expected


def test_parent_group_may_be_the_tighter_one(tmp_path: Path, affinity: set[int]) -> None:
    write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/slice/app",
            "sys/fs/cgroup/slice/cpu.max": "300000 100000",
            "sys/fs/cgroup/slice/app/cpu.max": "800000 100000",
        },
    )
    assert default_num_threads(tmp_path) == 3


def test_container_that_sees_only_its_own_group(tmp_path: Path, affinity: set[int]) -> None:
    write(
        tmp_path,
        {"proc/self/cgroup": "0::/docker/0123", "sys/fs/cgroup/cpu.max": "400000 100000"},
    )
    assert default_num_threads(tmp_path) == 4


def test_quota_v1(tmp_path: Path, affinity: set[int]) -> None:
    write(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/x\n3:cpu,cpuacct:/docker/0123",
            "sys/fs/cgroup/cpu,cpuacct/docker/0123/cpu.cfs_quota_us": "250000",
            "sys/fs/cgroup/cpu,cpuacct/docker/0123/cpu.cfs_period_us": "100000",
        },
    )
    assert default_num_threads(tmp_path) == 2


def test_quota_v1_minus_one_is_no_quota(tmp_path: Path, affinity: set[int]) -> None:
    write(
        tmp_path,
        {
            "proc/self/cgroup": "1:cpu:/",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
        },
    )
    assert default_num_threads(tmp_path) == 16


def test_this_machine_gets_at_least_one_thread() -> None:
    assert 1 <= default_num_threads() <= (os.cpu_count() or 1)
