"""Rows and the ragged batch: positions, slots and block tables of mixed steps."""

from __future__ import annotations

import numpy as np

from caudal.sampling_params import SamplingParams
from caudal.step_io import CachedRequestData, NewRequestData, SchedulerOutput
from caudal.worker.input_batch import InputBatch
from caudal.worker.sampler import LogitsRow, make_sampling_arrays

NO_LOGITS = np.zeros(0, dtype=np.int32)
EOG = frozenset({7, 3})


def new_request(
    request_id: str,
    token_ids: list[int],
    block_ids: list[int],
    *,
    num_prompt_tokens: int | None = None,
    num_computed_tokens: int = 0,
    sampling: SamplingParams | None = None,
) -> NewRequestData:
    return NewRequestData(
        request_id=request_id,
        token_ids=token_ids,
        num_prompt_tokens=num_prompt_tokens or len(token_ids),
        sampling=sampling or SamplingParams(),
        seed=5,
        block_ids=block_ids,
        num_computed_tokens=num_computed_tokens,
    )


def test_mixed_step_of_a_decode_row_and_a_chunk() -> None:
    batch = InputBatch(max_num_seqs=4, max_model_len=64, block_size=16)
    batch.add(new_request("a", list(range(100, 118)), [9, 4], num_computed_tokens=17))
    batch.add(new_request("b", list(range(200, 240)), [2, 3, 5], num_computed_tokens=14))
    step = batch.step_rows(SchedulerOutput(step_id=1, num_scheduled_tokens={"a": 1, "b": 4}))
    arrays = batch.build(step, NO_LOGITS)
    assert arrays.input_ids.tolist() == [117, 214, 215, 216, 217]
    assert arrays.positions.tolist() == [17, 14, 15, 16, 17]
    assert arrays.slot_mapping.tolist() == [4 * 16 + 1, 2 * 16 + 14, 2 * 16 + 15, 48, 49]
    assert arrays.query_start_loc.tolist() == [0, 1, 5]
    assert arrays.seq_lens.tolist() == [18, 18]
    assert arrays.block_tables.tolist() == [[9, 4], [2, 3]]
    for name in ("input_ids", "positions", "slot_mapping", "seq_lens", "block_tables"):
        array = getattr(arrays, name)
        assert array.dtype == np.int32 and array.flags.c_contiguous, name


def test_row_is_reused_after_a_drop_and_grows_by_appended_blocks() -> None:
    batch = InputBatch(max_num_seqs=1, max_model_len=64, block_size=16)
    batch.add(new_request("a", [1] * 20, [1, 2]))
    batch.drop(["a", "never there"])
    state = batch.add(new_request("b", [5] * 16, [3], num_computed_tokens=15))
    batch.append_token(state, 77)
    batch.update(CachedRequestData("b", new_block_ids=[6], num_computed_tokens=16))
    step = batch.step_rows(SchedulerOutput(step_id=1, num_scheduled_tokens={"b": 1}))
    arrays = batch.build(step, NO_LOGITS)
    assert (arrays.input_ids.tolist(), arrays.slot_mapping.tolist()) == ([77], [6 * 16])
    assert arrays.block_tables.tolist() == [[3, 6]]


def test_ends_are_forbidden_until_min_tokens_and_bias_is_kept() -> None:
    batch = InputBatch(max_num_seqs=2, max_model_len=64, block_size=16)
    sampling = SamplingParams(min_tokens=2, stop_token_ids=(11,), logit_bias={4: 2.5})
    states = [
        batch.add(new_request("early", [1, 2, 3], [0], num_prompt_tokens=2, sampling=sampling)),
        batch.add(new_request("late", [1, 2, 3, 4], [1], num_prompt_tokens=2, sampling=sampling)),
    ]
    arrays = make_sampling_arrays(
        batch.sampling, [LogitsRow(state) for state in states], range(len(states)), EOG, 64
    )
    assert arrays.bias_indptr.tolist() == [0, 4, 5]
    assert arrays.bias_ids.tolist() == [4, 3, 7, 11, 4]
    assert arrays.bias_values.tolist() == [2.5, -np.inf, -np.inf, -np.inf, 2.5]
    assert arrays.position.tolist() == [3, 4]


def test_penalties_count_output_and_remember_prompt() -> None:
    batch = InputBatch(max_num_seqs=1, max_model_len=64, block_size=16)
    sampling = SamplingParams(repetition_penalty=1.2)
    state = batch.add(new_request("a", [8, 9, 8], [0], num_prompt_tokens=2, sampling=sampling))
    batch.append_token(state, 8)
    arrays = make_sampling_arrays(batch.sampling, [LogitsRow(state)], [0], EOG, 64)
    assert dict(zip(arrays.history_ids, arrays.history_counts, strict=True)) == {8: 2, 9: 0}


def test_prompt_rows_are_scored_without_any_modification() -> None:
    batch = InputBatch(max_num_seqs=1, max_model_len=64, block_size=16)
    sampling = SamplingParams(
        min_tokens=5, logit_bias={1: 9.0}, presence_penalty=1.0, num_prompt_logprobs=3
    )
    state = batch.add(new_request("a", [8, 9], [0], sampling=sampling))
    arrays = make_sampling_arrays(
        batch.sampling, [LogitsRow(state, target_id=9), LogitsRow(state)], [0, 1], EOG, 64
    )
    assert arrays.bias_indptr.tolist() == [0, 0, 3]
    assert arrays.history_indptr.tolist() == [0, 0, 2]
    assert arrays.target_ids.tolist() == [9, -1]
    assert arrays.num_logprobs.tolist() == [3, -1]


def test_rows_behind_one_prompt_are_neighbours_and_prompts_come_last() -> None:
    batch = InputBatch(max_num_seqs=8, max_model_len=400, block_size=16)
    first, second = list(range(10, 26)), list(range(40, 56))
    for request_id, shared in zip("abcde", (first, second, first, second, first), strict=True):
        own = 100 + ord(request_id)
        blocks = [*shared, own]
        batch.add(new_request(request_id, [1] * 260, blocks, num_computed_tokens=259))
    batch.add(new_request("p", [1] * 40, [200, 201, 202]))
    scheduled = {"a": 1, "b": 1, "p": 40, "c": 1, "d": 1, "e": 1}
    step = batch.step_rows(SchedulerOutput(step_id=1, num_scheduled_tokens=scheduled))
    assert [state.request_id for state in step.states] == ["a", "c", "e", "b", "d", "p"]
    assert step.query_start_loc.tolist() == [0, 1, 2, 3, 4, 5, 45]
    assert step.starts.tolist() == [259] * 5 + [0]


def test_rows_that_stay_are_arranged_once_and_others_anew() -> None:
    batch = InputBatch(max_num_seqs=3, max_model_len=64, block_size=16)
    for request_id, blocks in (("a", [0]), ("b", [1])):
        batch.add(new_request(request_id, [1, 2, 3], blocks, num_computed_tokens=2))
    decode = SchedulerOutput(step_id=1, num_scheduled_tokens={"a": 1, "b": 1})
    first = batch.step_rows(decode)
    batch.update(CachedRequestData("a", new_block_ids=[], num_computed_tokens=3))
    second = batch.step_rows(decode)
    assert second.states is first.states
    assert second.starts.tolist() == [3, 2]
    guessed = SchedulerOutput(step_id=2, num_scheduled_tokens={"a": 3, "b": 1})
    third = batch.step_rows(guessed)
    assert third.states is first.states
    assert (third.counts.tolist(), third.query_start_loc.tolist()) == ([3, 1], [0, 3, 4])
    batch.drop(["a"])
    returned = batch.add(new_request("a", [1, 2, 3, 4], [2], num_computed_tokens=3))
    assert batch.step_rows(decode).states[0] is returned


def test_parameters_are_gathered_anew_when_a_row_changes_hands() -> None:
    batch = InputBatch(max_num_seqs=1, max_model_len=64, block_size=16)
    temperatures = []
    for request_id, temperature in (("a", 0.5), ("b", 0.25)):
        sampling = SamplingParams(temperature=temperature)
        state = batch.add(new_request(request_id, [1, 2], [0], sampling=sampling))
        arrays = make_sampling_arrays(batch.sampling, [LogitsRow(state)], [0], EOG, 64)
        temperatures += arrays.temperature.tolist()
        batch.drop([request_id])
    assert temperatures == [0.5, 0.25]
