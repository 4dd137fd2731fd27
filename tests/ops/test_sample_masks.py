"""Sampling under masks, and of some rows of the logits only, against plain numpy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from caudal import _native
from tests.ops.test_sample import F32, make_params, pack_masks, sample

pytestmark = pytest.mark.parametrize("isa", _native.available_isas())


def masked(logits: F32, allowed: NDArray[np.bool_]) -> F32:
    """What a mask means, written plainly."""
    return np.where(allowed, logits, np.float32(-np.inf)).astype(np.float32)


def random_masks(rows: int, vocab: int) -> NDArray[np.bool_]:
    """Masks of every density, in runs as long as those of real grammars; some rows have none."""
    rng = np.random.default_rng(vocab)
    allowed = np.repeat(rng.random((rows, vocab // 7 + 1)) < 0.5, 7, axis=1)[:, :vocab]
    allowed[::5] = rng.random((len(allowed[::5]), vocab)) < 0.01
    allowed[1::5] = rng.random((len(allowed[1::5]), vocab)) < 0.99
    allowed[2::5] = True
    allowed[np.arange(rows), rng.integers(vocab, size=rows)] = True
    return allowed


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 63, 512, 1499, 5003])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_mask_acts_as_if_logits_were_minus_infinity(
    isa: str, vocab: int, temperature: float
) -> None:
    rows = 20
    logits = np.random.default_rng(1).normal(size=(rows, vocab)).astype(np.float32)
    allowed = random_masks(rows, vocab)
    changes: dict[str, Any] = {
        "temperature": temperature,
        "top_p": [1.0, 0.9] * 10,
        "top_k": [0, 0, 0, 9] * 5,
        "bias": [{0: 1.5, vocab - 1: 2.0}, {}] * 10,
        "history": [{}, {}, {vocab // 2: 3}, {}] * 5,
        "repetition_penalty": 1.3,
    }
    expected = sample("ref", masked(logits, allowed), make_params(rows, **changes))
    for num_threads in (1, 3):
        params = make_params(rows, allowed=allowed, **changes)
        result = sample(isa, logits, params, num_threads)
        assert result.token_ids.tolist() == expected.token_ids.tolist()
    assert allowed[np.arange(rows), expected.token_ids].all()


def test_a_mask_leaves_logprobs_as_they_were_before(isa: str) -> None:
    logits = np.random.default_rng(1).normal(size=(20, 1499)).astype(np.float32)
    allowed = random_masks(20, 1499)
    params = make_params(20, allowed=allowed, num_logprobs=3, temperature=[0, 1] * 10)
    result = sample(isa, logits, params)
    assert allowed[np.arange(20), result.token_ids].all()
    scored = sample(isa, logits, make_params(20, num_logprobs=3, target_ids=result.token_ids))
    for name in ("logprobs", "ranks", "top_ids", "top_logprobs"):
        np.testing.assert_array_equal(getattr(result, name), getattr(scored, name))


def test_a_row_whose_mask_allows_nothing_fails_alone(isa: str) -> None:
    logits = np.zeros((4, 100), dtype=np.float32)
    allowed = np.ones((4, 100), dtype=bool)
    allowed[1:3] = False
    result = sample(isa, logits, make_params(4, allowed=allowed, temperature=[0, 0, 1, 0]))
    assert result.token_ids.tolist() == [0, -1, -1, 0]


def test_masks_that_do_not_fit_are_refused(isa: str) -> None:
    logits = np.zeros((2, 100), dtype=np.float32)
    params = make_params(2, allowed=np.zeros((2, 100), dtype=bool))
    with pytest.raises(ValueError, match="mask_rows"):
        sample(isa, logits, replace(params, mask_rows=np.array([0, 2], np.int32)))
    with pytest.raises(ValueError, match="mask_words"):
        sample(isa, logits, replace(params, mask_words=np.zeros((2, 3), np.int32)))


@pytest.mark.parametrize("vocab", [1, 15, 16, 17, 31, 32, 33, 63, 512, 1499, 5003])
def test_best_allowed_is_the_lowest_id_of_the_largest(isa: str, vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    logits = rng.integers(-9, 9, size=(25, vocab)).astype(np.float32)  # many equals
    allowed = random_masks(20, vocab)
    rows = rng.permutation(25)[:20].astype(np.int32)
    expected = masked(logits[rows], allowed).argmax(axis=1).tolist()
    found = _native.testing.best_allowed(isa, logits, rows, pack_masks(allowed))
    assert found.tolist() == expected
    result = sample(isa, logits[rows], make_params(20, allowed=allowed, temperature=0))
    assert result.token_ids.tolist() == expected


def test_best_allowed_without_a_possible_id(isa: str) -> None:
    logits = np.full((2, 70), -np.inf, dtype=np.float32)
    logits[1] = 1.0
    rows = np.array([0, 1], np.int32)
    allowed = np.zeros((2, 70), dtype=bool)
    allowed[0] = True
    found = _native.testing.best_allowed(isa, logits, rows, pack_masks(allowed))
    assert found.tolist() == [-1, -1]
    found = _native.testing.best_allowed(isa, logits, rows, pack_masks(~allowed))
    assert found.tolist() == [-1, 0]


def test_rows_are_sampled_from_the_logits_they_name(isa: str) -> None:
    logits = np.random.default_rng(5).normal(size=(9, 700)).astype(np.float32)
    rows = np.array([7, 0, 3], np.int32)
    values: dict[str, Any] = {"temperature": [0, 1, 0.7], "num_logprobs": [2, -1, 0]}
    expected = sample(isa, logits[rows], make_params(3, **values))
    result = sample(isa, logits, make_params(3, logit_rows=rows, **values))
    for name in ("token_ids", "logprobs", "ranks", "top_ids", "top_logprobs"):
        np.testing.assert_array_equal(getattr(result, name), getattr(expected, name))


@pytest.mark.parametrize("rows", [[0, 3], [-1, 0], [1, 1]])
def test_rows_that_the_logits_do_not_have_are_refused(isa: str, rows: list[int]) -> None:
    logits = np.zeros((3, 100), dtype=np.float32)
    with pytest.raises(ValueError, match="logit_rows"):
        sample(isa, logits, make_params(2, logit_rows=rows))
    masks = pack_masks(np.ones((2, 100), dtype=bool))
    with pytest.raises(ValueError, match="logit_rows"):
        _native.testing.best_allowed(isa, logits, np.array(rows, np.int32), masks)
    with pytest.raises(ValueError, match="mask_words"):
        _native.testing.best_allowed(isa, logits, np.array([0, 1], np.int32), masks[:1])
