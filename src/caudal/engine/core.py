"""The engine: admit, schedule, execute, update; one step at a time, in one thread."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from caudal.config import EngineConfig
from caudal.engine.messages import EngineRequest, Refusal
from caudal.executor.interface import Executor
from caudal.scheduler.output import RequestOutput
from caudal.scheduler.scheduler import Scheduler


class EngineCore:
    """Owns the scheduler and the executor. Not thread-safe; does no I/O."""

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        info = executor.info
        self._executor = executor
        self._clock = clock
        self._config = config
        self.scheduler = Scheduler(
            config.scheduler,
            replace(config.cache, num_blocks=info.memory.num_blocks),
            max_model_len=info.memory.max_model_len,
            eog_token_ids=info.eog_token_ids,
            max_num_logits=info.max_num_logits,
            vocab_size=info.model.vocab_size,
        )
        self._step_ms = dict.fromkeys(
            ("schedule", "prepare", "forward", "sample", "update", "publish"), 0.0
        )
        self._num_steps = 0

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return self.scheduler.has_work

    def add_requests(self, requests: list[EngineRequest]) -> list[Refusal]:
        """Admit `requests` together or refuse them together; [] means admitted."""
        raise NotImplementedError

    def step(self) -> list[RequestOutput]:
        """One step: schedule, execute, update. Returns what changed for any request."""
        started = time.perf_counter()
        scheduled = self.scheduler.schedule(self._clock())
        planned = time.perf_counter()
        result = self._executor.execute(scheduled)
        executed = time.perf_counter()
        step_ms = (executed - started) * 1e3
        outputs = self.scheduler.update_from_output(
            scheduled, result, self._clock(), step_ms=step_ms
        )
        parts = self._step_ms
        parts["schedule"] += (planned - started) * 1e3
        parts["prepare"] += result.prepare_ms
        parts["forward"] += result.forward_ms
        parts["sample"] += result.sample_ms
        parts["update"] += (time.perf_counter() - executed) * 1e3
        self._num_steps += 1
        return outputs
