"""Builds the sampling arrays of a step's rows and reads the kernel's answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from caudal.ops.interface import SamplingArrays, SamplingResult
from caudal.sampling_params import SamplingParams
from caudal.step_io import TokenLogprobs
from caudal.worker.input_batch import RequestState
from caudal.worker.sampling_table import NOTHING, GatheredParams, SamplingTable

NEVER = -2
_NO_IDS = np.empty(0, dtype=np.int32)
_NO_VALUES = np.empty(0, dtype=np.float32)
_SECOND_DRAWS = 1 << 40


@dataclass(slots=True)
class LogitsRow:
    """One row of logits: which request, and whether it samples or scores a prompt token."""

    state: RequestState
    target_id: int = NOTHING
    """Prompt logprobs: the known next token to score."""
    num_guessed: int = 0
    """Guessed tokens between the known ones and this row's."""
    next_guess: int = NOTHING
    """What the row's token must be for the next row of the request to count; NEVER: it does not."""
    mask: NDArray[np.int32] | None = None  # [ceil(vocab / 32)]
    """A bit for every id that the form of the output allows."""
    can_only_end: bool = False
    """The form of the output allows nothing but an end, whatever `min_tokens` says."""
    is_accepted: bool = False
    """The form of the output has advanced by the row's token."""
    is_second_draw: bool = False
    """Another token must be drawn than the one that the form of the output has refused."""
    error: str | None = None
    """Why this row fails, if that is known before its token is used."""

    @property
    def is_prompt(self) -> bool:
        return self.target_id != NOTHING

    @property
    def is_checked(self) -> bool:
        """The form of the output is asked about the row's token; no mask is needed before."""
        constraint = self.state.constraint
        return constraint is not None and constraint.can_check and self.has_plain_distribution

    def is_refuted_by(self, token_id: int) -> bool:
        """Whether the row's token is another than was guessed."""
        return self.next_guess != NOTHING and self.next_guess != token_id

    @property
    def has_plain_distribution(self) -> bool:
        """The token is drawn from the softmax of the logits, or is their largest.

        So a mask changes the probability of those tokens only that it forbids, but for a factor.
        """
        sampling = self.state.sampling
        return (
            (sampling.temperature == 0 or not _has_filter(sampling))
            and sampling.num_logprobs is None
            and self.state.token_counts is None
            and not sampling.logit_bias
            and self.state.num_output_tokens >= sampling.min_tokens
        )


def make_sampling_arrays(
    table: SamplingTable,
    rows: list[LogitsRow],
    places: Sequence[int],
    eog_token_ids: frozenset[int],
    vocab_size: int,
) -> SamplingArrays:
    """Gather the parameters of `rows`, whose logits are at `places`.

    Prompt rows are scored without any modification.
    """
    params = table.gather([row.state.row for row in rows])
    num_logprobs, target_ids = _targets(rows, params)
    bias_indptr, bias_ids, bias_values = _bias_csr(rows, params, eog_token_ids)
    history_indptr, history_ids, history_counts = _history_csr(rows, params)
    mask_rows, mask_words = _masks(rows, params, vocab_size)
    temperature, top_p, min_p, presence, frequency, repetition = params.floats
    return SamplingArrays(
        logit_rows=np.array(places, dtype=np.int32),
        temperature=temperature,
        top_k=params.top_k,
        top_p=top_p,
        min_p=min_p,
        presence_penalty=presence,
        frequency_penalty=frequency,
        repetition_penalty=repetition,
        seed=params.seed,
        position=_draw_numbers(rows),
        bias_indptr=bias_indptr,
        bias_ids=bias_ids,
        bias_values=bias_values,
        history_indptr=history_indptr,
        history_ids=history_ids,
        history_counts=history_counts,
        num_logprobs=num_logprobs,
        target_ids=target_ids,
        mask_rows=mask_rows,
        mask_words=mask_words,
    )


def stack_masks(masks: Sequence[NDArray[np.int32]], vocab_size: int) -> NDArray[np.int32]:
    """[masks, ceil(vocab_size / 32)]; ids that a mask does not cover are forbidden."""
    words = np.zeros((len(masks), -(-vocab_size // 32)), dtype=np.int32)
    for place, mask in enumerate(masks):
        words[place, : len(mask)] = mask[: words.shape[1]]
    return words


def read_logprobs(result: SamplingResult, index: int, num_logprobs: int) -> TokenLogprobs:
    """Row `index` of the kernel's result as plain Python values."""
    return TokenLogprobs(
        token_id=int(result.token_ids[index]),
        logprob=float(result.logprobs[index]),
        rank=int(result.ranks[index]),
        top_ids=result.top_ids[index, :num_logprobs].tolist(),
        top_logprobs=result.top_logprobs[index, :num_logprobs].tolist(),
    )


def _has_filter(sampling: SamplingParams) -> bool:
    return sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0


def _draw_numbers(rows: list[LogitsRow]) -> NDArray[np.int64]:
    """Which random number of its seed a row takes: a position has one, and another at hand."""
    numbers = [
        row.state.num_known_tokens + row.num_guessed + row.is_second_draw * _SECOND_DRAWS
        for row in rows
    ]
    return np.array(numbers, dtype=np.int64)


def _targets(
    rows: list[LogitsRow], params: GatheredParams
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """How many logprobs each row gives, and the tokens that prompt rows score."""
    prompts = [index for index, row in enumerate(rows) if row.target_id != NOTHING]
    if not prompts:
        return params.num_logprobs, params.nothing
    num_logprobs, target_ids = params.num_logprobs.copy(), params.nothing.copy()
    for index in prompts:
        wanted = rows[index].state.sampling.num_prompt_logprobs
        num_logprobs[index] = NOTHING if wanted is None else wanted
        target_ids[index] = rows[index].target_id
    return num_logprobs, target_ids


def _bias_csr(
    rows: list[LogitsRow], params: GatheredParams, eog_token_ids: frozenset[int]
) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.float32]]:
    """Logit changes by row: logit_bias, and ends before min_tokens."""
    if not any(row.state.may_have_bias for row in rows):
        return params.no_indptr, _NO_IDS, _NO_VALUES
    indptr = params.no_indptr.copy()
    ids, values = [_NO_IDS], [_NO_VALUES]
    num_ids = 0
    for index, row in enumerate(rows):
        if not row.is_prompt:
            for part in _biases(row, eog_token_ids):
                ids.append(part[0])
                values.append(part[1])
                num_ids += len(part[0])
        indptr[index + 1] = num_ids
    return indptr, np.concatenate(ids), np.concatenate(values)


def _biases(
    row: LogitsRow, eog_token_ids: frozenset[int]
) -> list[tuple[NDArray[np.int32], NDArray[np.float32]]]:
    """Ids and what is added to their logits."""
    sampling = row.state.sampling
    parts: list[tuple[NDArray[np.int32], NDArray[np.float32]]] = []
    if sampling.logit_bias:
        ids = np.fromiter(sampling.logit_bias, dtype=np.int32)
        parts.append((ids, np.fromiter(sampling.logit_bias.values(), dtype=np.float32)))
    num_output = row.state.num_output_tokens + row.num_guessed
    if num_output < sampling.min_tokens and not row.can_only_end:
        ends = np.array(sorted({*eog_token_ids, *sampling.stop_token_ids}), dtype=np.int32)
        parts.append((ends, np.full(len(ends), -np.inf, dtype=np.float32)))
    return parts


def _masks(
    rows: list[LogitsRow], params: GatheredParams, vocab_size: int
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Per row the place of its mask, and the masks."""
    masked = [(index, row.mask) for index, row in enumerate(rows) if row.mask is not None]
    words = stack_masks([mask for _, mask in masked], vocab_size)
    if not masked:
        return params.nothing, words
    places = params.nothing.copy()
    places[[index for index, _ in masked]] = np.arange(len(masked))
    return places, words


def _history_csr(
    rows: list[LogitsRow], params: GatheredParams
) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]:
    """Ids seen by each row that has a penalty, with their occurrences in the output."""
    if all(row.state.token_counts is None for row in rows):
        return params.no_indptr, _NO_IDS, _NO_IDS
    indptr = params.no_indptr.copy()
    ids: list[int] = []
    counts: list[int] = []
    for index, row in enumerate(rows):
        seen = row.state.token_counts
        if seen is not None and not row.is_prompt:
            ids.extend(seen)
            counts.extend(seen.values())
        indptr[index + 1] = len(ids)
    return indptr, np.array(ids, dtype=np.int32), np.array(counts, dtype=np.int32)
