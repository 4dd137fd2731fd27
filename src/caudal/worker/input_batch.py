"""Persistent rows of the running requests, and the ragged batch built from them each step.

A request keeps its row from its first step until it is dropped, so a decode step is a handful
of NumPy gathers over the rows that run.

    tokens[row]       known tokens: prompt, output so far            [max_num_seqs, max_model_len]
    block_table[row]  physical blocks, in order                      [max_num_seqs, max_blocks]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from caudal.ops.interface import BatchArrays
from caudal.sampling_params import SamplingParams
from caudal.step_io import CachedRequestData, NewRequestData, SchedulerOutput
from caudal.structured_output.constraint import Constraint
from caudal.worker.sampling_table import SamplingTable


@dataclass(slots=True)
class RequestState:
    """One row: what the worker knows of a request beyond the arrays."""

    request_id: str
    row: int
    sampling: SamplingParams
    seed: int
    num_prompt_tokens: int
    num_known_tokens: int
    num_blocks: int
    token_counts: dict[int, int] | None
    """Occurrences in the output by token id, prompt ids at 0; None where no penalty needs it."""
    hidden_sum: NDArray[np.float64] | None = None  # [hidden_size]
    """Of the tokens computed so far, where the request pools; None before the first."""
    constraint: Constraint | None = None
    """What the output must look like; None where it is free."""

    @property
    def may_have_bias(self) -> bool:
        """Whether something may be added to logits: a bias, or what forbids an early end."""
        return bool(self.sampling.logit_bias) or self.sampling.min_tokens > 0

    @property
    def num_output_tokens(self) -> int:
        return self.num_known_tokens - self.num_prompt_tokens


SHARED_TOKENS = 256
"""Decoding rows whose first so many tokens lie in the same blocks attend to these together, if they
are neighbours (csrc/cpu/attention_schedule.h)."""
MAX_SHARED_QUERIES = 16
"""Tokens that such a row computes at most: its own, and those guessed."""


@dataclass(slots=True)
class StepRows:
    """The rows of one step in batch order, with their token ranges."""

    states: list[RequestState]
    rows: NDArray[np.int64]  # [num_seqs]
    starts: NDArray[np.int32]  # [num_seqs] first position computed
    counts: NDArray[np.int32]  # [num_seqs] tokens computed
    query_start_loc: NDArray[np.int32]  # [num_seqs + 1]

    @property
    def num_tokens(self) -> int:
        """Of all rows."""
        return int(self.query_start_loc[-1])


@dataclass(frozen=True, slots=True)
class _Arrangement:
    """The order of a step's rows, which the next step has too if it runs the same ones."""

    request_ids: list[str]  # as scheduled
    places: NDArray[np.intp]  # [num_seqs] of the rows in batch order
    states: list[RequestState]  # in batch order
    rows: NDArray[np.int64]  # [num_seqs]
    ones: NDArray[np.int32]  # [num_seqs] a token each
    ones_loc: NDArray[np.int32]  # [num_seqs + 1] where these begin


class InputBatch:
    """Owns the rows; `apply` brings them up to date, `build` makes one step's arrays."""

    def __init__(self, max_num_seqs: int, max_model_len: int, block_size: int) -> None:
        max_blocks = -(-max_model_len // block_size) + 1
        self.block_size = block_size
        self.tokens = np.zeros((max_num_seqs, max_model_len + 1), dtype=np.int32)
        self.block_table = np.zeros((max_num_seqs, max_blocks), dtype=np.int32)
        self.num_computed = np.zeros(max_num_seqs, dtype=np.int32)
        self.states: dict[str, RequestState] = {}
        self.sampling = SamplingTable(max_num_seqs)
        self.num_pooling = 0
        """Rows that pool hidden states."""
        self._last: _Arrangement | None = None
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))

    def drop(self, request_ids: Sequence[str]) -> None:
        """Free the rows of `request_ids`; ids without a row are ignored."""
        for request_id in request_ids:
            state = self.states.pop(request_id, None)
            if state is not None:
                self._last = None
                self._free_rows.append(state.row)
                self.num_pooling -= state.sampling.pooling is not None

    def add(self, data: NewRequestData) -> RequestState:
        """Give a new (or returning) request a row."""
        self._last = None
        row = self._free_rows.pop()
        num_known, num_blocks = len(data.token_ids), len(data.block_ids)
        self.tokens[row, :num_known] = data.token_ids
        self.block_table[row, :num_blocks] = data.block_ids
        self.num_computed[row] = data.num_computed_tokens
        state = RequestState(
            request_id=data.request_id,
            row=row,
            sampling=data.sampling,
            seed=data.seed,
            num_prompt_tokens=data.num_prompt_tokens,
            num_known_tokens=num_known,
            num_blocks=num_blocks,
            token_counts=_count_tokens(data),
        )
        self.states[data.request_id] = state
        self.sampling.put(row, data.sampling, data.seed)
        self.num_pooling += data.sampling.pooling is not None
        return state

    def update(self, data: CachedRequestData) -> None:
        """Append blocks and set the computed length of a known row."""
        state = self.states[data.request_id]
        self.num_computed[state.row] = data.num_computed_tokens
        if data.new_block_ids:
            end = state.num_blocks + len(data.new_block_ids)
            self.block_table[state.row, state.num_blocks : end] = data.new_block_ids
            state.num_blocks = end

    def put_drafts(self, drafts: Mapping[str, Sequence[int]]) -> None:
        """Write guessed tokens behind the known ones, for this step only."""
        for request_id, token_ids in drafts.items():
            state = self.states[request_id]
            begin = state.num_known_tokens
            self.tokens[state.row, begin : begin + len(token_ids)] = token_ids

    def append_token(self, state: RequestState, token_id: int) -> None:
        """Record a sampled token as known."""
        self.tokens[state.row, state.num_known_tokens] = token_id
        state.num_known_tokens += 1
        if state.token_counts is not None:
            state.token_counts[token_id] = state.token_counts.get(token_id, 0) + 1

    def step_rows(self, output: SchedulerOutput) -> StepRows:
        """The rows that `output` runs, those beside each other that attention takes together."""
        request_ids = list(output.num_scheduled_tokens)
        scheduled = list(output.num_scheduled_tokens.values())
        most = max(scheduled)
        arranged = self._last
        if arranged is None or most > MAX_SHARED_QUERIES or arranged.request_ids != request_ids:
            arranged = self._arrange(request_ids, scheduled)
            self._last = arranged if most <= MAX_SHARED_QUERIES else None
        rows, counts, query_start_loc = arranged.rows, arranged.ones, arranged.ones_loc
        if most > 1:
            counts = np.array(scheduled, dtype=np.int32)[arranged.places]
            query_start_loc = np.zeros(len(rows) + 1, dtype=np.int32)
            np.cumsum(counts, out=query_start_loc[1:])
        return StepRows(arranged.states, rows, self.num_computed[rows], counts, query_start_loc)

    def build(self, step: StepRows, logits_indices: NDArray[np.int32]) -> BatchArrays:
        """The ragged batch of `step`."""
        num_tokens = step.num_tokens
        if num_tokens == len(step.rows):  # one token a row: the common decode step
            token_rows, positions = step.rows, step.starts
        else:
            token_rows = np.repeat(step.rows, step.counts)
            shift = step.starts - step.query_start_loc[:-1]
            positions = np.arange(num_tokens, dtype=np.int32) + np.repeat(shift, step.counts)
        seq_lens = step.starts + step.counts
        max_blocks = -(-int(seq_lens.max()) // self.block_size)
        blocks = self.block_table[token_rows, positions // self.block_size]
        return BatchArrays(
            input_ids=self.tokens[token_rows, positions],
            positions=positions,
            slot_mapping=blocks * self.block_size + positions % self.block_size,
            query_start_loc=step.query_start_loc,
            seq_lens=seq_lens,
            block_tables=self.block_table[step.rows, :max_blocks],
            logits_indices=logits_indices,
        )

    def _arrange(self, request_ids: list[str], scheduled: list[int]) -> _Arrangement:
        """Decoding rows with a block in common side by side, then prompts."""
        states = [self.states[request_id] for request_id in request_ids]
        rows = np.fromiter((state.row for state in states), dtype=np.int64, count=len(states))
        last_shared = SHARED_TOKENS // self.block_size - 1
        places = np.arange(len(rows))
        if len(states) > 2 and last_shared < self.block_table.shape[1]:
            is_prompt = np.array(scheduled) > MAX_SHARED_QUERIES
            places = np.lexsort((self.block_table[rows, last_shared], is_prompt))
        return _Arrangement(
            request_ids,
            places,
            states=[states[index] for index in places],
            rows=rows[places],
            ones=np.ones(len(rows), dtype=np.int32),
            ones_loc=np.arange(len(rows) + 1, dtype=np.int32),
        )


def _count_tokens(data: NewRequestData) -> dict[int, int] | None:
    sampling = data.sampling
    if (
        sampling.presence_penalty == 0
        and sampling.frequency_penalty == 0
        and sampling.repetition_penalty == 1
    ):
        return None
    counts = dict.fromkeys(data.token_ids[: data.num_prompt_tokens], 0)
    for token_id in data.token_ids[data.num_prompt_tokens :]:
        counts[token_id] = counts.get(token_id, 0) + 1
    return counts
