"""The doctor's practice in a server: what it observes, and the process that thinks about it."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import time
from typing import TYPE_CHECKING

import msgspec

from caudal.diagnosis.host import report_host
from caudal.diagnosis.prefix_lint import hints, lint
from caudal.diagnosis.report import Diagnosis, Observation, Past, ServerFacts
from caudal.errors import NotFoundError, RequestFailedError

if TYPE_CHECKING:
    from caudal.server.state import AppState

logger = logging.getLogger("caudal.server")

WINDOW_S = 60.0
"""Over which the host is looked at."""
FRESH_S = 20.0
"""How long an answer is given again, so that dashboards do not keep a core busy."""
TIMEOUT_S = 120.0


class Practice:
    """Runs one diagnosis at a time and remembers the last. Lives on the event loop."""

    def __init__(self, state: AppState) -> None:
        self._state = state
        self._lock = asyncio.Lock()
        self._last: tuple[float, tuple[float | None, int | None], Diagnosis] | None = None

    async def diagnose(self, seconds: float | None = None, last_s: int | None = None) -> Diagnosis:
        """What limits the server, by the load of the last `seconds`.

        With `last_s`: what limited it, by the history of that time. Raises UnavailableError before
        the engine is up, NotFoundError without a history, RequestFailedError.
        """
        async with self._lock:
            if self._last is not None:
                asked_s, of, diagnosis = self._last
                if of == (seconds, last_s) and time.monotonic() - asked_s < FRESH_S:
                    return diagnosis
            observation = await (
                self.observe(seconds) if last_s is None else self._observe_past(last_s)
            )
            diagnosis = await _diagnose_apart(observation)
            self._last = time.monotonic(), (seconds, last_s), diagnosis
            return diagnosis

    async def observe(self, seconds: float | None = None) -> Observation:
        """Everything that a diagnosis of the latest requests looks at."""
        state = self._state
        facts = _facts(state)
        misses = await asyncio.to_thread(lint, state.load_log, facts.costs)
        load_per_core = round(os.getloadavg()[0] / facts.num_cores, 2)
        return Observation(
            records=state.load_log.records(seconds),
            facts=facts,
            host=report_host(state.recorder.recent(WINDOW_S), load_per_core),
            hints=hints(misses),
        )

    async def _observe_past(self, last_s: int) -> Observation:
        recorder = self._state.recorder
        keeper, facts = recorder.keeper, _facts(self._state)
        if keeper is None:
            raise NotFoundError("This server keeps no history (--no-history).", code="history_off")
        future = keeper.encoded(last_s, recorder.current_minute())
        minutes = await asyncio.wrap_future(future)
        past = Past(seconds=last_s, minutes=msgspec.Raw(minutes))
        return Observation(records=[], facts=facts, past=past)


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


async def _diagnose_apart(observation: Observation) -> Diagnosis:
    """Diagnose in a process of low priority. Raises RequestFailedError."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "caudal.diagnosis"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        data = msgspec.msgpack.encode(observation)
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
