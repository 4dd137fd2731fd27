"""What the machine withholds: cgroup throttling and steal time, from the kernel's own counters."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

_STEAL, _GUEST = 7, 8
"""Columns of the line `cpu` in /proc/stat: steal, and the first that others include."""


@dataclass(frozen=True, slots=True)
class MachineCounters:
    """Seconds since some moment; they only grow. Zero where the kernel does not tell."""

    throttled_s: float = 0.0
    """Time that the cgroup's CPU quota held processes back."""
    num_throttled: int = 0
    """Quota periods in which it did."""
    steal_s: float = 0.0
    """Processor time that the hypervisor gave to others, over all processors."""
    total_s: float = 0.0
    """Processor time that passed, over all processors."""
    process_s: float = 0.0
    """Processor time of this process."""


class Machine:
    """Reads the counters; finds once where they are."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._stat = root / "proc/stat"
        self._cgroups = _cpu_stat_files(root)
        self._tick_s = 1.0 / os.sysconf("SC_CLK_TCK")

    def read(self) -> MachineCounters:
        """The counters now; takes some tens of microseconds."""
        num_throttled, throttled_s = 0, 0.0
        for path in self._cgroups:
            fields = _fields(path)
            seconds = fields.get("throttled_usec", 0) / 1e6 or fields.get("throttled_time", 0) / 1e9
            if seconds >= throttled_s:
                num_throttled, throttled_s = fields.get("nr_throttled", 0), seconds
        times = self._processor_times()
        return MachineCounters(
            throttled_s=throttled_s,
            num_throttled=num_throttled,
            steal_s=times[_STEAL] * self._tick_s if len(times) > _STEAL else 0.0,
            total_s=sum(times[:_GUEST]) * self._tick_s,
            process_s=time.process_time(),
        )

    def _processor_times(self) -> list[int]:
        try:
            with self._stat.open() as file:
                return [int(word) for word in file.readline().split()[1:]]
        except (OSError, ValueError):
            return []


def _cpu_stat_files(root: Path) -> list[Path]:
    """`cpu.stat` of the process' cgroup and of those around it: any may have the quota."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        lines = []
    found: list[Path] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        base = root / "sys/fs/cgroup" / ("cpu" if controllers else "")
        folder = base / path.lstrip("/")
        for candidate in (folder, *folder.parents):
            if candidate.is_relative_to(base) and "nr_throttled" in _fields(candidate / "cpu.stat"):
                found.append(candidate / "cpu.stat")
    return list(dict.fromkeys(found))


def _fields(path: Path) -> dict[str, int]:
    """Lines of a name and a number."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return {}
    pairs = [line.split() for line in lines]
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}
