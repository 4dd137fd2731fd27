"""How many compute threads this process may use without taking turns with itself."""

from __future__ import annotations

import os
from pathlib import Path

_ROOT = Path("/")


def default_num_threads(root: Path = _ROOT) -> int:
    """Physical cores in the affinity mask, at most the whole CPUs of the cgroup quota, at least 1.

    Two threads on one core's hyperthreads slow each other down, and threads above a quota are
    stopped in turns, which stalls every barrier. `root` is where /sys and /proc are looked up.
    """
    cores = _physical_cores(root, _affinity())
    quota = _cgroup_quota(root)
    return max(1, cores if quota is None else min(cores, int(quota)))


def _affinity() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return set(os.sched_getaffinity(0))
    return set(range(os.cpu_count() or 1))


def _physical_cores(root: Path, cpus: set[int]) -> int:
    """Distinct (package, core) pairs of `cpus`; a CPU without topology counts as a core."""
    cores = set()
    for cpu in cpus:
        topology = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
        package = _read(topology / "physical_package_id")
        core = _read(topology / "core_id")
        cores.add((package, core) if package and core else (str(cpu),))
    return len(cores)


def _cgroup_quota(root: Path) -> float | None:
    """CPUs that the tightest cgroup (v1 or v2) from this process to the root allows."""
    quotas = []
    for line in (_read(root / "proc/self/cgroup") or "").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":
            for mount in ("sys/fs/cgroup", "sys/fs/cgroup/unified"):
                quotas += [_quota_v2(group) for group in _ancestors(root / mount, path)]
        elif "cpu" in controllers.split(","):
            for mount in (f"sys/fs/cgroup/{controllers}", "sys/fs/cgroup/cpu"):
                quotas += [_quota_v1(group) for group in _ancestors(root / mount, path)]
    return min((quota for quota in quotas if quota is not None), default=None)


def _ancestors(mount: Path, path: str) -> list[Path]:
    """The cgroup's folder and those above it up to `mount`.

    Inside a container the path may be the host's and lead nowhere; `mount` itself then is the
    container's own group.
    """
    parts = [part for part in path.split("/") if part and part != ".."]
    return [mount.joinpath(*parts[:count]) for count in range(len(parts), -1, -1)]


def _quota_v2(group: Path) -> float | None:
    """cpu.max: "<quota or max> <period>" in microseconds."""
    fields = (_read(group / "cpu.max") or "").split()
    if len(fields) != 2 or fields[0] == "max":
        return None
    return int(fields[0]) / int(fields[1])


def _quota_v1(group: Path) -> float | None:
    quota = int(_read(group / "cpu.cfs_quota_us") or -1)
    period = int(_read(group / "cpu.cfs_period_us") or 0)
    return quota / period if quota > 0 and period > 0 else None


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return None
