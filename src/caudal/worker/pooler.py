"""Pools the final hidden states of prompts, for requests that want a vector instead of tokens."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from caudal.ops.interface import Backend, Plan
from caudal.step_io import Interrupt, ModelRunnerOutput, SchedulerOutput, StepInterruptedError
from caudal.worker.input_batch import InputBatch, RequestState, StepRows
from caudal.worker.row_errors import public_message

logger = logging.getLogger(__name__)


class Pooler:
    """Runs the rows that pool in a plan of their own, which has no output head.

    The plan is compiled, and its memory used, when the first such row comes.
    """

    def __init__(
        self, backend: Backend, batch: InputBatch, create_plan: Callable[[], Plan]
    ) -> None:
        """`create_plan`: hidden states [num_logits, hidden_size]; every token may be selected."""
        self._backend = backend
        self._batch = batch
        self._create_plan = create_plan
        self._plan: Plan | None = None

    def run(
        self, output: SchedulerOutput, result: ModelRunnerOutput, interrupt: Interrupt | None
    ) -> SchedulerOutput:
        """Compute the rows that pool; returns what is left of the step: `output` if none do.

        If their pass fails they fail, and the other rows go on. Raises StepInterruptedError.
        """
        if not self._batch.num_pooling:
            return output
        states = self._batch.states
        pooling: dict[str, int] = {}
        others: dict[str, int] = {}
        for request_id, count in output.num_scheduled_tokens.items():
            does_pool = states[request_id].sampling.pooling is not None
            (pooling if does_pool else others)[request_id] = count
        if not pooling:
            return output
        started, cpu_before = time.perf_counter(), time.process_time()
        try:
            self._run(replace(output, num_scheduled_tokens=pooling), result, interrupt)
        except StepInterruptedError:
            raise
        except Exception as error:
            logger.exception("%d requests that pool failed in a step", len(pooling))
            result.errors.update(dict.fromkeys(pooling, public_message(error)))
        finally:
            result.forward_ms = (time.perf_counter() - started) * 1e3
            result.kernel_cpu_ms = (time.process_time() - cpu_before) * 1e3
        return replace(output, num_scheduled_tokens=others)

    def _run(
        self, output: SchedulerOutput, result: ModelRunnerOutput, interrupt: Interrupt | None
    ) -> None:
        if self._plan is None:
            self._plan = self._create_plan()
        step = self._batch.step_rows(output)
        selected = _select_tokens(step)
        indices = np.concatenate([np.arange(part.start, part.stop) for part in selected])
        hidden = self._plan.run(self._batch.build(step, indices.astype(np.int32)), interrupt)
        position = 0
        for state, end, part in zip(step.states, step.starts + step.counts, selected, strict=True):
            rows = hidden[position : position + len(part)]
            position += len(part)
            if state.hidden_sum is None:
                state.hidden_sum = np.zeros(hidden.shape[1])
            self._backend.add_rows(rows, state.hidden_sum)
            if end == state.num_prompt_tokens:
                self._finish(state, result)

    def _finish(self, state: RequestState, result: ModelRunnerOutput) -> None:
        assert state.hidden_sum is not None
        if not np.isfinite(state.hidden_sum).all():
            message = "the model produced hidden states that are not numbers"
            result.errors[state.request_id] = message
            return
        count = state.num_prompt_tokens if state.sampling.pooling == "mean" else 1
        result.pooled[state.request_id] = (state.hidden_sum / count).astype("<f4").tobytes()


def _select_tokens(step: StepRows) -> list[range]:
    """Tokens of the step whose hidden states each row needs."""
    selected = []
    starts, counts = step.query_start_loc.tolist(), step.counts.tolist()
    for index, state in enumerate(step.states):
        begin, end = starts[index], starts[index] + counts[index]
        if state.sampling.pooling == "last":
            is_last = step.starts[index] + counts[index] == state.num_prompt_tokens
            begin = end - 1 if is_last else end
        selected.append(range(begin, end))
    return selected
