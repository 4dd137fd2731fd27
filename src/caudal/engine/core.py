"""The engine: admit, schedule, execute, update; one step at a time, in one thread."""

from __future__ import annotations

import dataclasses
import logging
import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from caudal.config import EngineConfig, KVCacheDType
from caudal.engine.messages import EngineReady, EngineRequest, EngineStats, Refusal, RequestProgress
from caudal.errors import OverloadedError
from caudal.executor.interface import Executor
from caudal.executor.memory_plan import MemoryPlan, kv_block_bytes
from caudal.scheduler.admission import RefusedRequest
from caudal.scheduler.output import RequestOutput
from caudal.scheduler.request import Request, RequestStatus
from caudal.scheduler.scheduler import Scheduler
from caudal.scheduler.step_cost import StepCosts
from caudal.step_io import Interrupt, ModelRunnerOutput, SchedulerOutput

logger = logging.getLogger(__name__)

READ_SHARE = 0.5
"""Time to read a byte of the KV cache, of the time to read and convert one of the weights."""
MAX_FAILED_STEPS = 3
"""Steps that may fail as a whole, one after the other, before the engine gives up."""


class EngineCore:
    """Owns the scheduler and the executor. Not thread-safe; does no I/O."""

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor,
        clock: Callable[[], float] = time.monotonic,
        base_seed: int | None = None,
        *,
        can_interrupt: bool = False,
    ) -> None:
        """`base_seed` makes requests without a seed repeatable; None draws one.

        `can_interrupt`: `step` gets an interrupt that somebody tends, so that steps of offline work
        may take longer.
        """
        info = executor.info
        self._executor = executor
        self._clock = clock
        self._config = config
        self._scheduler = Scheduler(
            config.scheduler,
            dataclasses.replace(config.cache, num_blocks=info.memory.num_blocks),
            max_model_len=info.memory.max_model_len,
            eog_token_ids=info.eog_token_ids,
            max_num_logits=info.max_num_logits,
            vocab_size=info.model.vocab_size,
            base_seed=secrets.randbits(63) if base_seed is None else base_seed,
            can_interrupt=can_interrupt,
            costs=_guess_costs(info.memory, config.cache.block_size),
        )
        self._step_ms = dict.fromkeys(
            ("schedule", "prepare", "forward", "sample", "update", "publish"), 0.0
        )
        self._kernel_cpu_ms = 0.0
        self._num_steps = 0
        self._num_failed_in_a_row = 0
        self.was_interrupted = False
        """Whether the latest step ended early."""

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return self._scheduler.has_work

    def describe(self, model_name: str) -> EngineReady:
        """What is fixed since loading, for the server."""
        info = self._executor.info
        cache = self._config.cache
        return EngineReady(
            model_name=model_name,
            architecture=info.model.architecture,
            vocab_size=info.model.vocab_size,
            hidden_size=info.model.hidden_size,
            max_model_len=info.memory.max_model_len,
            num_blocks=info.memory.num_blocks,
            block_size=cache.block_size,
            max_num_seqs=self._config.scheduler.max_num_seqs,
            memory_plan=info.memory.as_dict(),
            isa=info.isa,
            num_threads=info.num_threads,
            load_ms=info.load_ms,
            settings=_settings(self._config),
            kv_block_bytes={
                dtype.value: kv_block_bytes(
                    info.model, dataclasses.replace(cache, kv_cache_dtype=dtype)
                )
                for dtype in KVCacheDType
            },
        )

    def prepare(self, requests: Sequence[EngineRequest]) -> list[Future[Any]]:
        """Start compiling the grammars of `requests`; returns what is not done, or has failed.

        Adding the requests before that is correct too, but holds up a step.
        """
        sampling = [request.sampling for request in requests if request.sampling.max_tokens > 0]
        forms = [form for each in sampling if (form := each.structured_outputs) is not None]
        futures = [self._executor.prepare(form) for form in forms]
        return [each for each in futures if not each.done() or each.exception() is not None]

    def add_requests(self, requests: Sequence[EngineRequest]) -> list[Refusal]:
        """Admit requests; those of one parent together or not at all. [] means all admitted."""
        now = self._clock()
        created = [
            Request(
                request_id=request.request_id,
                prompt_token_ids=request.prompt_token_ids,
                sampling=request.sampling,
                arrival_time=now,
                priority=request.priority,
                namespace=request.namespace,
                parent_id=request.parent_id,
                service=request.service,
                tenant=request.tenant,
                weight=request.weight,
                deadline=None if request.timeout_s is None else now + request.timeout_s,
            )
            for request in requests
        ]
        return [_make_refusal(refused) for refused in self._scheduler.add_requests(created, now)]

    def abort(self, request_ids: Sequence[str], *, is_answered: bool = False) -> None:
        """Free requests in any state at once; unknown ids are ignored. See Scheduler.abort."""
        self._scheduler.abort(request_ids, self._clock(), is_answered=is_answered)

    def inject_fault(self, request_id: str, after_output_tokens: int) -> None:
        """Tests only: see DebugFault."""
        self._executor.inject_fault(request_id, after_output_tokens)

    def step(self, interrupt: Interrupt | None = None) -> list[RequestOutput]:
        """One step: schedule, execute, update. Returns what changed for any request.

        `interrupt` ends it early, without a result, if it is of offline work alone.
        """
        started = time.perf_counter()
        scheduled = self._scheduler.schedule(self._clock())
        planned = time.perf_counter()
        result = self._execute(scheduled, interrupt)
        executed = time.perf_counter()
        step_ms = (executed - started) * 1e3
        outputs = self._scheduler.update_from_output(scheduled, result, self._clock(), step_ms)
        self.was_interrupted = result.is_interrupted
        parts = self._step_ms
        parts["schedule"] += (planned - started) * 1e3
        parts["prepare"] += result.prepare_ms
        parts["forward"] += result.forward_ms
        parts["sample"] += result.sample_ms
        self._kernel_cpu_ms += result.kernel_cpu_ms
        parts["update"] += (time.perf_counter() - executed) * 1e3
        self._num_steps += 1
        return outputs

    def fail_all(self, message: str) -> list[RequestOutput]:
        """End every request with an error."""
        return self._scheduler.fail_all(message, self._clock())

    def stats(self) -> EngineStats:
        """Gauges and counters now."""
        own = self._scheduler.stats()
        fields = {field.name: getattr(own, field.name) for field in dataclasses.fields(own)}
        cpu_ms = {"engine": time.process_time() * 1e3, "kernels": self._kernel_cpu_ms}
        return EngineStats(
            **fields,
            num_steps=self._num_steps,
            step_ms=dict(self._step_ms),
            cpu_ms=cpu_ms,
            step_costs=self._scheduler.cost.costs,
        )

    def progress(self) -> list[RequestProgress]:
        """How far every request is."""
        return [
            RequestProgress(
                request_id=request.request_id,
                is_running=request.status is RequestStatus.RUNNING,
                num_computed_tokens=request.num_computed_tokens,
                num_preemptions=request.num_preemptions,
            )
            for request in self._scheduler.requests
        ]

    def count_publish_ms(self, milliseconds: float) -> None:
        """Account for sending a step's outputs, which happens outside of the core."""
        self._step_ms["publish"] += milliseconds

    def check_integrity(self) -> None:
        """Raise AssertionError unless the KV bookkeeping agrees with itself."""
        self._scheduler.check_integrity()

    def _execute(
        self, scheduled: SchedulerOutput, interrupt: Interrupt | None
    ) -> ModelRunnerOutput:
        """Run the step. If it fails as a whole its requests fail, and the engine lives on."""
        try:
            result = self._executor.execute(scheduled, interrupt)
        except Exception:
            self._num_failed_in_a_row += 1
            if self._num_failed_in_a_row >= MAX_FAILED_STEPS:
                raise
            logger.exception("a step of %d requests failed", len(scheduled.num_scheduled_tokens))
            message = "the step of this request failed; the server log has the details"
            return ModelRunnerOutput(errors=dict.fromkeys(scheduled.num_scheduled_tokens, message))
        self._num_failed_in_a_row = 0
        return result


def _guess_costs(memory: MemoryPlan, block_size: int) -> StepCosts:
    """What steps may cost before any has run: weights and KV cache are read at similar rates."""
    prior = StepCosts()
    token_bytes = memory.kv_cache_bytes / (memory.num_blocks * block_size)
    share = READ_SHARE * token_bytes / memory.weights_bytes
    return dataclasses.replace(prior, context_token_ms=prior.step_ms * share)


def _settings(config: EngineConfig) -> dict[str, str | int | float | bool | None]:
    """What was decided by flag or default, for people to see."""
    return {
        **dataclasses.asdict(config.scheduler),
        **dataclasses.asdict(config.cache),
        "num_threads": config.parallel.num_threads,
    }


def _make_refusal(refused: RefusedRequest) -> Refusal:
    error = refused.error
    retry_after_s = error.retry_after_s if isinstance(error, OverloadedError) else None
    return Refusal(
        request_id=refused.request_id,
        message=error.message,
        reason=refused.reason,
        retry_after_s=retry_after_s,
        param=error.param,
        code=error.code,
    )
