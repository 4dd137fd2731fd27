"""The doctor's practice in a server: what it observes, and the process that thinks about it."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import time
from typing import TYPE_CHECKING

import msgspec

from caudal.diagnosis.prefix_lint import hints, lint
from caudal.diagnosis.report import Diagnosis, HostReport, Observation, ServerFacts
from caudal.errors import RequestFailedError
from caudal.metrics.reading import Aggregate, outside_kernels, share

if TYPE_CHECKING:
    from caudal.server.state import AppState

logger = logging.getLogger("caudal.server")

WINDOW_S = 60.0
"""Over which the host is looked at."""
MIN_KERNELS_S = 3.0
"""Processor time of the kernels in it, below which an idle server would only show itself."""
FRESH_S = 20.0
"""How long an answer is given again, so that dashboards do not keep a core busy."""
TIMEOUT_S = 120.0


class Practice:
    """Runs one diagnosis at a time and remembers the last. Lives on the event loop."""

    def __init__(self, state: AppState) -> None:
        self._state = state
        self._lock = asyncio.Lock()
        self._last: tuple[float, float | None, Diagnosis] | None = None

    async def diagnose(self, seconds: float | None = None) -> Diagnosis:
        """What limits the server, by the load of the last `seconds`.

        Raises UnavailableError before the engine is up, RequestFailedError.
        """
        async with self._lock:
            if self._last is not None:
                asked_s, of_seconds, diagnosis = self._last
                if of_seconds == seconds and time.monotonic() - asked_s < FRESH_S:
                    return diagnosis
            diagnosis = await _diagnose_apart(await self.observe(seconds))
            self._last = time.monotonic(), seconds, diagnosis
            return diagnosis

    async def observe(self, seconds: float | None = None) -> Observation:
        """Everything that a diagnosis looks at."""
        state = self._state
        facts = _facts(state)
        misses = await asyncio.to_thread(lint, state.load_log, facts.costs)
        return Observation(
            records=state.load_log.records(seconds),
            facts=facts,
            host=_host(state.recorder.recent(WINDOW_S), facts.num_cores),
            hints=hints(misses),
        )


def _facts(state: AppState) -> ServerFacts:
    from caudal.ops.threads import default_num_threads

    info = state.engine.info
    return ServerFacts(
        model="" if state.model is None else state.model.name,
        costs=state.engine.stats.step_costs,
        num_blocks=info.num_blocks,
        block_size=info.block_size,
        max_model_len=info.max_model_len,
        settings=info.settings,
        kv_block_bytes=info.kv_block_bytes,
        memory=info.memory_plan,
        num_threads=info.num_threads,
        num_cores=default_num_threads(),
    )


def _host(happened: Aggregate, num_cores: int) -> HostReport:
    counters = happened.counters
    is_busy = counters.get("cpu_ms.kernels", 0.0) / 1e3 >= MIN_KERNELS_S
    return HostReport(
        outside_kernels=outside_kernels(happened) if is_busy else None,
        throttled=share(counters.get("throttled_s", 0.0), happened.seconds),
        steal=share(counters.get("steal_s", 0.0), counters.get("machine_s", 0.0)),
        load_per_core=round(os.getloadavg()[0] / num_cores, 2) if is_busy else None,
    )


async def _diagnose_apart(observation: Observation) -> Diagnosis:
    """Diagnose in a process of low priority. Raises RequestFailedError."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "caudal.diagnosis"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        data = msgspec.json.encode(observation)
        out, err = await asyncio.wait_for(process.communicate(data), TIMEOUT_S)
    except TimeoutError:
        raise RequestFailedError("The diagnosis took too long.", code="diagnosis_failed") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        logger.error("a diagnosis failed: %s", err.decode("utf-8", "replace").strip())
        raise RequestFailedError("The diagnosis failed.", code="diagnosis_failed")
    return msgspec.json.decode(out, type=Diagnosis)
