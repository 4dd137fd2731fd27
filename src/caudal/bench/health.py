"""Whether this tool itself kept up: a client that is late measures itself, not the server."""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import dataclass, field

from caudal.bench.statistics import Distribution

INTERVAL_S = 0.02
MAX_P99_MS = 25.0
"""Above it the client was late too often; a tenth of a second is what people notice."""
MAX_STALL_MS = 250.0
"""One stall of the client that long is worth a word."""
MAX_CPU_SHARE = 0.85
"""Of one core: the event loop has one thread."""


@dataclass(frozen=True, slots=True)
class ClientHealth:
    """How late this tool was during one level, in milliseconds."""

    lag_ms: Distribution
    """Of the event loop: how much later than due it ran a timer."""
    lateness_ms: Distribution
    """Of sending: actual minus intended time, waits for a cap on requests in flight excluded."""
    cpu_share: float
    """Of one core that this process used."""

    @property
    def problems(self) -> list[str]:
        """What to tell the user; empty if the client kept up."""
        found = []
        for name, value in (("the event loop was", self.lag_ms), ("sends were", self.lateness_ms)):
            if value.count and value.p99 > MAX_P99_MS:
                found.append(f"{name} up to {value.p99:.0f} ms late (p99; worst {value.max:.0f})")
        if not found and self.lag_ms.max > MAX_STALL_MS:
            found.append(f"it stood still for {self.lag_ms.max:.0f} ms")
        if self.cpu_share > MAX_CPU_SHARE:
            found.append(f"this process used {self.cpu_share:.0%} of a core")
        return found


@dataclass(slots=True)
class HealthMonitor:
    """Samples while entered as a task; `finish` says what it saw."""

    lateness_s: list[float] = field(default_factory=list)
    _lag_s: list[float] = field(default_factory=list)
    _started: float = field(default_factory=time.perf_counter)
    _cpu_s: float = field(default_factory=time.process_time)

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            due = time.perf_counter() + INTERVAL_S
            await asyncio.sleep(INTERVAL_S)
            self._lag_s.append(max(0.0, time.perf_counter() - due))

    def finish(self) -> ClientHealth:
        """What was seen so far."""
        wall_s = time.perf_counter() - self._started
        return ClientHealth(
            lag_ms=Distribution.of([1e3 * lag for lag in self._lag_s]),
            lateness_ms=Distribution.of([1e3 * late for late in self.lateness_s]),
            cpu_share=(time.process_time() - self._cpu_s) / wall_s if wall_s > 0 else 0.0,
        )


def describe_machine() -> dict[str, object]:
    """Where the client ran: processor and cores it may use."""
    names = []
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            names = [line.partition(":")[2].strip() for line in file if line.startswith("model n")]
    except OSError:
        pass
    return {"cpu": names[0] if names else "unknown", "num_cpus": len(os.sched_getaffinity(0))}
