"""Runs one step on one rank: rows, forward pass, sampling."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from caudal.ops.interface import Backend, Plan, SamplingResult
from caudal.step_io import Interrupt, ModelRunnerOutput, SchedulerOutput, StepInterruptedError
from caudal.structured_output.constraint import Constraint
from caudal.worker.constrained_rows import ConstrainedRows
from caudal.worker.input_batch import InputBatch, RequestState, StepRows
from caudal.worker.ngram_drafter import NgramDrafter
from caudal.worker.pooler import Pooler
from caudal.worker.row_errors import public_message
from caudal.worker.sampler import LogitsRow, make_sampling_arrays, read_logprobs, stack_masks

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _DecodeRows:
    """What the logits of a step are that computes one token of each of some free rows."""

    states: list[RequestState]
    rows: list[LogitsRow]
    indices: NDArray[np.int32]


class ModelRunner:
    """Owns the rows and the compiled plan; answers each SchedulerOutput."""

    def __init__(
        self,
        backend: Backend,
        plan: Plan,
        batch: InputBatch,
        pooler: Pooler,
        constrained: ConstrainedRows,
    ) -> None:
        self._backend = backend
        self.plan = plan
        self._batch = batch
        self._eog_token_ids = constrained.eog_token_ids
        self._pooler = pooler
        self._constrained = constrained
        self._decode_rows: _DecodeRows | None = None
        self.drafter: NgramDrafter | None = None
        self.faults: dict[str, int] = {}
        """Tests only: request id -> output tokens after which its row raises."""

    def execute(
        self, output: SchedulerOutput, interrupt: Interrupt | None = None
    ) -> ModelRunnerOutput:
        """Compute one step. A row that fails is reported in `errors` and fails alone."""
        result = ModelRunnerOutput()
        try:
            self._execute(output, result, interrupt if output.is_interruptible else None)
        except StepInterruptedError:
            result.is_interrupted = True
        return result

    def _execute(
        self, output: SchedulerOutput, result: ModelRunnerOutput, interrupt: Interrupt | None
    ) -> None:
        started = time.perf_counter()
        self._apply(output, result)
        others = self._pooler.run(output, result, interrupt)
        if others is not output:
            output, interrupt = others, None  # what has been pooled must not be computed again
        if not output.num_scheduled_tokens:
            return
        step = self._batch.step_rows(output)
        logits_rows, logits_indices = self._select_logits(step)
        self._constrained.start(logits_rows)
        arrays = self._batch.build(step, logits_indices)
        prepared, cpu_before = time.perf_counter(), time.process_time()
        result.prepare_ms = (prepared - started) * 1e3 - result.forward_ms
        try:
            logits = self.plan.run(arrays, interrupt)
        finally:
            computed, cpu_after = time.perf_counter(), time.process_time()
            result.forward_ms += (computed - prepared) * 1e3
            result.kernel_cpu_ms += (cpu_after - cpu_before) * 1e3
        if logits_rows:
            self._sample(logits_rows, logits, result)
        result.sample_ms = (time.perf_counter() - computed) * 1e3

    def _apply(self, output: SchedulerOutput, result: ModelRunnerOutput) -> None:
        """Bring the rows up to date; a request whose row cannot be made is left out."""
        self._batch.drop(output.finished_request_ids)
        for request_id in output.finished_request_ids:
            self.faults.pop(request_id, None)
        for new in output.new_requests:
            try:
                self._constrained.add(new, self._batch.add(new))
            except Exception as error:
                logger.exception("request %s could not start", new.request_id)
                result.errors[new.request_id] = public_message(error)
                del output.num_scheduled_tokens[new.request_id]
        for cached in output.cached_requests:
            self._batch.update(cached)
        self._batch.put_drafts(output.draft_token_ids)

    def _select_logits(self, step: StepRows) -> tuple[list[LogitsRow], NDArray[np.int32]]:
        """Rows whose logits are needed: the last token of a row that samples, prompt scores."""
        decoding = self._find_decode_rows(step)
        if decoding is not None:
            return decoding.rows, decoding.indices
        rows: list[LogitsRow] = []
        indices: list[int] = []
        ends = (step.starts + step.counts).tolist()
        query_ends = step.query_start_loc[1:].tolist()
        counts = step.counts.tolist()
        for state, end, count, query_end in zip(step.states, ends, counts, query_ends, strict=True):
            sampling = state.sampling
            if sampling.num_prompt_logprobs is not None:
                first, last = end - count, min(end, state.num_prompt_tokens - 1)
                targets = self._batch.tokens[state.row, first + 1 : last + 1].tolist()
                rows.extend(LogitsRow(state, target) for target in targets)
                indices.extend(range(query_end - count, query_end - count + len(targets)))
            num_guessed = end - state.num_known_tokens
            if num_guessed < 0 or sampling.max_tokens == 0:
                continue
            if num_guessed:
                guesses = self._batch.tokens[state.row, state.num_known_tokens : end].tolist()
                rows.extend(
                    LogitsRow(state, num_guessed=number, next_guess=guess)
                    for number, guess in enumerate(guesses)
                )
            rows.append(LogitsRow(state, num_guessed=num_guessed))
            indices.extend(range(query_end - 1 - num_guessed, query_end))
        return rows, np.array(indices, dtype=np.int32)

    def _find_decode_rows(self, step: StepRows) -> _DecodeRows | None:
        """The rows of a step that decodes a token of each, without any form; None for other steps.

        They are those of the last such step if it ran the same.
        """
        states = step.states
        if step.num_tokens != len(states):
            return None
        if [state.num_known_tokens for state in states] != (step.starts + 1).tolist():
            return None
        last = self._decode_rows
        if last is None or last.states is not states:
            last = None
            if all(_decodes_freely(state) for state in states):
                indices = np.arange(len(states), dtype=np.int32)
                last = _DecodeRows(states, [LogitsRow(state) for state in states], indices)
            self._decode_rows = last
        return last

    def _sample(
        self,
        rows: list[LogitsRow],
        logits: NDArray[np.float32],
        result: ModelRunnerOutput,
    ) -> None:
        self._constrained.apply()
        answer = self._draw(rows, range(len(rows)), logits)
        token_ids = answer.token_ids.tolist()
        self._draw_again(self._constrained.refuse(token_ids), rows, logits, token_ids)
        refuted: RequestState | None = None  # its further rows stand behind a wrong guess
        for index, row in enumerate(rows):
            state, sampling = row.state, row.state.sampling
            if state is refuted:
                continue
            try:
                if row.error is not None:
                    refuted = state
                    result.errors[state.request_id] = row.error
                    continue
                if row.is_prompt:
                    wanted = sampling.num_prompt_logprobs or 0
                    result.prompt_logprobs.setdefault(state.request_id, []).append(
                        read_logprobs(answer, index, wanted)
                    )
                    continue
                token_id = token_ids[index]
                self._check(state.request_id, state.num_output_tokens, token_id)
                self._batch.append_token(state, token_id)
                if state.constraint is not None:
                    self._accept(row, state.constraint, token_id, result)
                result.sampled_token_ids.setdefault(state.request_id, []).append(token_id)
                if sampling.num_logprobs is not None:
                    result.logprobs.setdefault(state.request_id, []).append(
                        read_logprobs(answer, index, sampling.num_logprobs)
                    )
                if row.is_refuted_by(token_id):
                    refuted = state
            except Exception as error:
                refuted = state
                logger.exception("request %s failed in a step", state.request_id)
                result.errors[state.request_id] = public_message(error)
        self._constrained.prepare_next()
        if self.drafter is not None:
            self.drafter.propose(rows, result)

    def _draw(
        self, rows: list[LogitsRow], places: Sequence[int], logits: NDArray[np.float32]
    ) -> SamplingResult:
        table = self._batch.sampling
        arrays = make_sampling_arrays(table, rows, places, self._eog_token_ids, logits.shape[1])
        return self._backend.sample(logits, arrays)

    def _draw_again(
        self,
        refused: list[int],
        rows: list[LogitsRow],
        logits: NDArray[np.float32],
        token_ids: list[int],
    ) -> None:
        """Replace those of `token_ids` that the form of their row has refused."""
        greedy = [place for place in refused if rows[place].state.sampling.temperature == 0]
        if greedy:
            masks = [mask for place in greedy if (mask := rows[place].mask) is not None]
            words = stack_masks(masks, logits.shape[1])
            best = self._backend.best_allowed(logits, np.array(greedy, np.int32), words)
            for place, token_id in zip(greedy, best.tolist(), strict=True):
                token_ids[place] = token_id
        random = [place for place in refused if rows[place].state.sampling.temperature > 0]
        if random:
            second = self._draw([rows[place] for place in random], random, logits)
            for place, token_id in zip(random, second.token_ids.tolist(), strict=True):
                token_ids[place] = token_id

    def _accept(
        self, row: LogitsRow, constraint: Constraint, token_id: int, result: ModelRunnerOutput
    ) -> None:
        if not row.is_accepted:
            constraint.accept(token_id)
        if constraint.is_complete and not row.state.sampling.ignore_eos:
            result.complete_request_ids.add(row.state.request_id)

    def _check(self, request_id: str, num_output_tokens: int, token_id: int) -> None:
        if token_id < 0:
            raise ArithmeticError("the model produced logits that are not numbers")
        if self.faults and num_output_tokens >= self.faults.get(request_id, 1 << 62):
            raise RuntimeError("injected fault")


def _decodes_freely(state: RequestState) -> bool:
    sampling = state.sampling
    return (
        state.constraint is None
        and sampling.num_prompt_logprobs is None
        and sampling.max_tokens > 0
    )
