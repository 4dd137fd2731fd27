"""Batches that contradict themselves end in an error, never in a bad memory access."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from caudal.ops import create_backend
from caudal.ops.interface import BatchArrays
from tests.ops.tiny_forward import (
    NUM_BLOCKS,
    SPEC,
    VOCAB,
    Chunk,
    Model,
    compile_plan,
    make_batch,
    random_ids,
)

PLAN, _ = compile_plan(Model(create_backend("cpu", 2)))
GOOD = make_batch(Chunk(random_ids(20), [3, 1]), Chunk(random_ids(5), [5]))
EXPECTED = PLAN.run(GOOD).copy()


def int32(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def with_item(name: str, index: Any, value: int) -> BatchArrays:
    """GOOD with one element changed."""
    array = getattr(GOOD, name).copy()
    array[index] = value
    return replace(GOOD, **{name: array})


def large_batch(num_seqs: int, length: int) -> BatchArrays:
    return make_batch(*(Chunk(random_ids(length), [i % NUM_BLOCKS]) for i in range(num_seqs)))


CASES = {
    "negative id": (with_item("input_ids", 3, -1), "input_ids"),
    "id beyond vocabulary": (with_item("input_ids", 24, VOCAB), "input_ids"),
    "huge id": (with_item("input_ids", 0, 2**31 - 1), "input_ids"),
    "negative position": (with_item("positions", 0, -1), "positions"),
    "position beyond sequence": (with_item("positions", 19, 20), "positions"),
    "negative slot": (with_item("slot_mapping", 0, -16), "slot_mapping"),
    "slot beyond cache": (with_item("slot_mapping", 7, NUM_BLOCKS * 16), "slot_mapping"),
    "negative block": (with_item("block_tables", (0, 1), -1), "block_tables"),
    "block beyond cache": (with_item("block_tables", (1, 0), NUM_BLOCKS), "block_tables"),
    "sequence longer than its table": (with_item("seq_lens", 0, 33), "block_tables"),
    "huge sequence": (with_item("seq_lens", 0, 2**31 - 1), "block_tables"),
    "sequence shorter than its tokens": (with_item("seq_lens", 0, 19), "seq_lens"),
    "negative length": (with_item("seq_lens", 1, -5), "seq_lens"),
    "logits of a token that is not there": (with_item("logits_indices", 2, 25), "logits_indices"),
    "negative logits index": (with_item("logits_indices", 0, -1), "logits_indices"),
    "start not zero": (with_item("query_start_loc", 0, 1), "start at 0"),
    "empty sequence": (with_item("query_start_loc", 1, 0), "query_start_loc"),
    "decreasing starts": (with_item("query_start_loc", 1, 26), "query_start_loc"),
    "end too early": (with_item("query_start_loc", 2, 24), "query_start_loc"),
    "end too late": (with_item("query_start_loc", 2, 26), "query_start_loc"),
    "end far too late": (with_item("query_start_loc", 2, 2**31 - 1), "query_start_loc"),
    "no starts": (replace(GOOD, query_start_loc=int32()), "query_start_loc"),
    "fewer positions": (replace(GOOD, positions=GOOD.positions[:-1]), "positions"),
    "fewer slots": (replace(GOOD, slot_mapping=GOOD.slot_mapping[:-1]), "slot_mapping"),
    "fewer lengths": (replace(GOOD, seq_lens=int32(20)), "seq_lens"),
    "fewer tables": (replace(GOOD, block_tables=GOOD.block_tables[:1]), "block_tables"),
    "no table columns": (replace(GOOD, block_tables=np.zeros((2, 0), np.int32)), "block_tables"),
    "too many tokens": (large_batch(8, 11), "88 tokens, the plan holds 1 to 80"),
    "too many sequences": (large_batch(9, 2), "9 sequences, the plan holds 1 to 8"),
    "too many logits": (
        replace(GOOD, logits_indices=np.zeros(SPEC.max_num_logits + 1, np.int32)),
        "81 rows of logits",
    ),
    "no tokens": (
        BatchArrays(*[int32()] * 3, int32(0), int32(), np.zeros((0, 1), np.int32), int32()),
        "0 tokens",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_contradictions_are_value_errors(case: str) -> None:
    batch, message = CASES[case]
    with pytest.raises(ValueError, match=message):
        PLAN.run(batch)
    np.testing.assert_array_equal(PLAN.run(GOOD), EXPECTED, "the plan must stay usable")


@pytest.mark.parametrize("name", list(BatchArrays.__slots__))
def test_wrong_types_are_type_errors(name: str) -> None:
    array = getattr(GOOD, name)
    wide = np.zeros((*array.shape[:-1], array.shape[-1] * 2), np.int32)
    bad = [array.astype(np.int64), array.astype(np.float32), array[None], array.tolist(), None]
    if array.ndim == 1:
        bad.append(wide[::2])
    for value in bad:
        with pytest.raises(TypeError, match=name):
            PLAN.run(replace(GOOD, **{name: value}))


def test_strided_rows_of_tables_are_fine_but_not_strided_columns() -> None:
    wide = np.full((4, 7), -1, np.int32)
    wide[::2, :2] = GOOD.block_tables
    np.testing.assert_array_equal(PLAN.run(replace(GOOD, block_tables=wide[::2, :2])), EXPECTED)
    columns = np.full((2, 14), 0, np.int32)[:, ::2]
    with pytest.raises(ValueError, match="contiguous"):
        PLAN.run(replace(GOOD, block_tables=columns))
