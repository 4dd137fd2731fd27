from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from caudal import _native
from caudal.ops.interface import SamplingArrays, SamplingResult

F32 = NDArray[np.float32]
ISAS = _native.available_isas()

pytestmark = pytest.mark.parametrize("isa", ISAS)


def make_params(rows: int, **values: Any) -> SamplingArrays:
    """Plain sampling at temperature 1 with seed = position = row, where `values` says no other.

    bias: per row a dict id -> value; history: per row a dict id -> count; allowed: bool
    [rows, vocab], where a row that allows everything gets no mask.
    """
    bias = [list(row.items()) for row in values.pop("bias", [{}] * rows)]
    history = [list(row.items()) for row in values.pop("history", [{}] * rows)]
    allowed = values.pop("allowed", None)
    defaults: dict[str, tuple[Any, Any]] = {
        "temperature": (1.0, np.float32),
        "logit_rows": (np.arange(rows), np.int32),
        "top_k": (0, np.int32),
        "top_p": (1.0, np.float32),
        "min_p": (0.0, np.float32),
        "presence_penalty": (0.0, np.float32),
        "frequency_penalty": (0.0, np.float32),
        "repetition_penalty": (1.0, np.float32),
        "seed": (np.arange(rows), np.uint64),
        "position": (np.arange(rows), np.int64),
        "num_logprobs": (-1, np.int32),
        "target_ids": (-1, np.int32),
    }
    arrays = {
        name: np.broadcast_to(np.asarray(values.pop(name, value)), rows).astype(dtype)
        for name, (value, dtype) in defaults.items()
    }
    assert not values
    bias_pairs = [pair for row in bias for pair in row]
    history_pairs = [pair for row in history for pair in row]
    params = SamplingArrays(
        **arrays,
        bias_indptr=np.cumsum([0, *map(len, bias)], dtype=np.int32),
        bias_ids=np.array([i for i, _ in bias_pairs], dtype=np.int32),
        bias_values=np.array([v for _, v in bias_pairs], dtype=np.float32),
        history_indptr=np.cumsum([0, *map(len, history)], dtype=np.int32),
        history_ids=np.array([i for i, _ in history_pairs], dtype=np.int32),
        history_counts=np.array([c for _, c in history_pairs], dtype=np.int32),
        mask_rows=np.full(rows, -1, np.int32),
        mask_words=np.zeros((0, 0), np.int32),
    )
    if allowed is not None:
        is_masked = ~allowed.all(axis=1)
        params.mask_rows[is_masked] = np.arange(is_masked.sum())[::-1]
        params.mask_words = pack_masks(allowed[is_masked][::-1])
    return params


def pack_masks(allowed: NDArray[np.bool_]) -> NDArray[np.int32]:
    """bool [masks, vocab] -> int32 [masks, ceil(vocab / 32)]."""
    padded = np.pad(allowed, ((0, 0), (0, -allowed.shape[1] % 32)))
    return np.packbits(padded, axis=1, bitorder="little").view(np.int32)


def sample(isa: str, logits: F32, params: SamplingArrays, num_threads: int = 1) -> SamplingResult:
    return SamplingResult(*_native.testing.sample(isa, logits.copy(), params, num_threads))


def repeat(isa: str, row: list[float] | F32, rows: int, **values: Any) -> NDArray[np.int32]:
    """Tokens drawn from the same logits `rows` times."""
    logits = np.tile(np.asarray(row, dtype=np.float32), (rows, 1))
    return sample(isa, logits, make_params(rows, seed=11, **values)).token_ids


@dataclass(frozen=True)
class Filters:
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


def expected_probabilities(row: F32, f: Filters) -> NDArray[np.float64]:
    """The distribution that the filters leave, in double precision."""
    x = row.astype(np.float64) / f.temperature
    p = np.exp(x - x.max())
    order = np.lexsort((np.arange(len(p)), -x))  # most likely first, lower id among equals
    keep = p[order] >= f.min_p
    if f.top_k > 0:
        keep &= np.arange(len(p)) < f.top_k
    p[order[~keep]] = 0
    p /= p.sum()
    before = np.cumsum(p[order]) - p[order]
    p[order[before >= f.top_p]] = 0
    return p / p.sum()


def assert_same_distribution(tokens: NDArray[np.int32], p: NDArray[np.float64]) -> None:
    """Chi-square at five sigma, over tokens that are expected at least five times."""
    counts = np.bincount(tokens, minlength=len(p))
    assert counts[p == 0].sum() == 0
    expected = p * len(tokens)
    often = expected >= 5
    assert np.all(counts[often] > 0)
    chi2 = np.sum((counts[often] - expected[often]) ** 2 / expected[often])
    freedom = max(1, int(often.sum()) - 1)
    assert chi2 < freedom + 5 * np.sqrt(2 * freedom) + 5


@pytest.mark.parametrize("vocab", [1, 2, 15, 16, 17, 511, 512, 513, 1023, 1025, 5003])
def test_greedy_finds_the_maximum_at_every_tail(isa: str, vocab: int) -> None:
    places = sorted({0, 1, vocab // 2, vocab - 2, vocab - 1} & set(range(vocab)))
    logits = np.random.default_rng(vocab).normal(size=(len(places), vocab)).astype(np.float32)
    logits[np.arange(len(places)), places] = 9
    result = sample(isa, logits, make_params(len(places), temperature=0))
    assert result.token_ids.tolist() == places


def test_greedy_takes_the_lowest_of_equal_ids(isa: str) -> None:
    logits = np.full((3, 1500), -1, dtype=np.float32)
    logits[0, [1400, 700, 701]] = 2
    logits[1, [513, 512]] = -0.5
    result = sample(isa, logits, make_params(3, temperature=0))
    assert result.token_ids.tolist() == [700, 512, 0]


@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf])
@pytest.mark.parametrize("place", [0, 700, 1498])
def test_a_broken_row_fails_alone(isa: str, bad: float, place: int) -> None:
    logits = np.random.default_rng(1).normal(size=(3, 1499)).astype(np.float32)
    logits[1, place] = bad
    for target in (-1, 5):
        params = make_params(3, temperature=[0, 1, 0], num_logprobs=2, target_ids=target)
        result = sample(isa, logits, params)
        assert result.token_ids[1] == -1
        assert np.isnan(result.logprobs[1])
        assert result.top_ids[1].tolist() == [-1, -1]
        assert np.all(result.token_ids[[0, 2]] >= 0)
        assert np.all(np.isfinite(result.logprobs[[0, 2]]))


def test_a_row_where_every_token_is_forbidden_fails(isa: str) -> None:
    everything = dict.fromkeys(range(20), -np.inf)
    logits = np.zeros((2, 20), dtype=np.float32)
    result = sample(isa, logits, make_params(2, bias=[everything, {}], temperature=[1, 0]))
    assert result.token_ids.tolist() == [-1, 0]


def test_forbidden_tokens_are_never_drawn(isa: str) -> None:
    row = np.zeros(64, dtype=np.float32)
    allowed = [3, 17, 63]
    bias = {i: -np.inf for i in range(64) if i not in allowed}
    tokens = repeat(isa, row, 300, bias=[bias] * 300)
    assert set(tokens.tolist()) == set(allowed)


@pytest.mark.parametrize(
    "filters",
    [
        Filters(),
        Filters(temperature=0.5),
        Filters(temperature=3.0),
        Filters(top_k=5),
        Filters(top_k=39),
        Filters(top_k=40),
        Filters(top_k=1000),
        Filters(top_p=0.5),
        Filters(top_p=0.9),
        Filters(top_p=0.01),
        Filters(min_p=0.3),
        Filters(temperature=0.7, top_k=20, top_p=0.8, min_p=0.1),
        Filters(temperature=2.0, top_k=10, top_p=0.95),
    ],
    ids=str,
)
def test_tokens_follow_the_filtered_distribution(isa: str, filters: Filters) -> None:
    rows = 4000
    row = np.random.default_rng(5).normal(size=40).astype(np.float32)
    tokens = repeat(
        isa,
        row,
        rows,
        temperature=filters.temperature,
        top_k=filters.top_k,
        top_p=filters.top_p,
        min_p=filters.min_p,
    )
    assert_same_distribution(tokens, expected_probabilities(row, filters))


@pytest.mark.parametrize("spread", [0.1, 1.0, 4.0])
@pytest.mark.parametrize("filters", [Filters(top_k=50), Filters(top_p=0.9), Filters(min_p=0.05)])
def test_large_vocabulary_draws_only_what_is_kept(
    isa: str, spread: float, filters: Filters
) -> None:
    vocab, rows = 5003, 60
    logits = np.random.default_rng(3).normal(size=(rows, vocab)) * spread
    logits = logits.astype(np.float32)
    params = make_params(rows, top_k=filters.top_k, top_p=filters.top_p, min_p=filters.min_p)
    tokens = sample(isa, logits, params).token_ids
    for row, token in zip(logits, tokens, strict=True):
        assert expected_probabilities(row, filters)[token] > 0


def test_top_k_keeps_exactly_k_of_equal_logits(isa: str) -> None:
    row = np.zeros(2000, dtype=np.float32)
    row[[5, 900]] = 1
    tokens = repeat(isa, row, 500, top_k=6, temperature=10.0)
    assert set(tokens.tolist()) == {0, 1, 2, 3, 5, 900}


def test_top_p_stops_at_the_token_that_reaches_the_share(isa: str) -> None:
    row = np.log(np.array([0.1, 0.4, 0.3, 0.2], dtype=np.float32))
    assert set(repeat(isa, row, 400, top_p=0.69).tolist()) == {1, 2}
    assert set(repeat(isa, row, 400, top_p=0.71).tolist()) == {1, 2, 3}
    equal = np.zeros(1000, dtype=np.float32)
    assert set(repeat(isa, equal, 400, top_p=0.0035).tolist()) == {0, 1, 2, 3}


def test_top_p_is_a_share_of_what_top_k_left(isa: str) -> None:
    row = np.log(np.array([0.25, 0.25, 0.2, 0.15, 0.15], dtype=np.float32))
    assert set(repeat(isa, row, 300, top_k=3, top_p=0.7).tolist()) == {0, 1}
    assert set(repeat(isa, row, 300, top_p=0.7).tolist()) == {0, 1, 2}


@pytest.mark.parametrize(
    "values", [{"top_k": 1}, {"top_p": 0.0}, {"temperature": 1e-9}, {"temperature": -1.0}]
)
def test_degenerate_settings_are_greedy(isa: str, values: dict[str, float]) -> None:
    logits = np.random.default_rng(8).normal(size=(50, 700)).astype(np.float32)
    logits[:, 300:310] = logits.max()
    tokens = sample(isa, logits, make_params(50, **values)).token_ids
    assert tokens.tolist() == logits.argmax(axis=1).tolist()


def adjusted(row: F32, bias: dict[int, float], history: dict[int, int], penalties: F32) -> F32:
    presence, frequency, repetition = penalties
    x = row.copy()
    for i, count in history.items():
        x[i] = x[i] / repetition if x[i] > 0 else x[i] * repetition
        x[i] -= frequency * np.float32(count)
        if count > 0:
            x[i] -= presence
    for i, value in bias.items():
        x[i] += np.float32(value)
    return x


def test_penalties_and_bias_change_the_right_logits(isa: str) -> None:
    rng = np.random.default_rng(21)
    rows, vocab = 40, 60
    logits = rng.normal(size=(rows, vocab)).astype(np.float32)
    penalties = rng.uniform([-1, -0.5, 0.7], [2, 1, 1.8], size=(rows, 3)).astype(np.float32)
    ids = [rng.permutation(vocab)[:30].tolist() for _ in range(rows)]
    history = [{i: int(rng.integers(0, 4)) for i in row} for row in ids]
    bias = [{i: float(rng.normal()) for i in row[:10]} for row in ids]
    params = make_params(
        rows,
        temperature=0,
        presence_penalty=penalties[:, 0],
        frequency_penalty=penalties[:, 1],
        repetition_penalty=penalties[:, 2],
        history=history,
        bias=bias,
        num_logprobs=1,
    )
    result = sample(isa, logits, params)
    expected = [
        int(adjusted(*row).argmax()) for row in zip(logits, bias, history, penalties, strict=True)
    ]
    assert result.token_ids.tolist() == expected
    assert result.token_ids.tolist() != logits.argmax(axis=1).tolist()
    assert result.top_ids[:, 0].tolist() == logits.argmax(axis=1).tolist()


def test_presence_spares_tokens_that_only_the_prompt_has(isa: str) -> None:
    row = np.array([1.0, 0.9, 0.0], dtype=np.float32)[None]
    for count, expected in ((0, 0), (1, 1)):
        params = make_params(1, temperature=0, presence_penalty=0.5, history=[{0: count}])
        assert sample(isa, row, params).token_ids.tolist() == [expected]


def test_logprobs_are_of_the_unmodified_distribution(isa: str) -> None:
    rng = np.random.default_rng(2)
    rows, vocab, k = 12, 3001, 20
    logits = (rng.normal(size=(rows, vocab)) * 3).astype(np.float32)
    params = make_params(
        rows,
        temperature=0.3,
        top_k=1,
        repetition_penalty=1.5,
        history=[{int(logits[i].argmax()): 2} for i in range(rows)],
        bias=[{7: 30.0, 8: -np.inf}] * rows,
        num_logprobs=k,
    )
    result = sample(isa, logits, params)
    x = logits.astype(np.float64)
    logprobs = (
        x
        - np.log(np.exp(x - x.max(1, keepdims=True)).sum(1, keepdims=True))
        - x.max(1, keepdims=True)
    )
    assert result.token_ids.tolist() == [7] * rows
    np.testing.assert_allclose(result.logprobs, logprobs[:, 7], atol=2e-6, rtol=1e-6)
    order = np.argsort(-x, axis=1, kind="stable")[:, :k]
    assert result.top_ids.tolist() == order.tolist()
    top = np.take_along_axis(logprobs, order, axis=1)
    np.testing.assert_allclose(result.top_logprobs, top, atol=2e-6, rtol=1e-6)
    assert result.ranks.tolist() == (1 + (x > x[:, 7:8]).sum(axis=1)).tolist()


def test_ranks_of_equal_logits_differ_by_id(isa: str) -> None:
    logits = np.zeros((4, 40), dtype=np.float32)
    logits[:, 20] = 1
    targets = [20, 0, 19, 39]
    result = sample(isa, logits, make_params(4, target_ids=targets, num_logprobs=5))
    assert result.ranks.tolist() == [1, 2, 21, 40]
    assert result.top_ids[0].tolist() == [20, 0, 1, 2, 3]


def test_logprobs_stay_finite_for_extreme_logits(isa: str) -> None:
    logits = np.zeros((3, 33), dtype=np.float32)
    logits[0, 3], logits[1, :], logits[2, 5] = 1e4, -3e38, 3e38
    result = sample(isa, logits, make_params(3, target_ids=[9, 9, 5], num_logprobs=0))
    expected = [-1e4, -np.log(33), 0.0]
    np.testing.assert_allclose(result.logprobs, expected, rtol=1e-6, atol=1e-6)


def test_target_rows_report_only_that_id(isa: str) -> None:
    logits = np.random.default_rng(4).normal(size=(3, 50)).astype(np.float32)
    params = make_params(3, target_ids=[49, -1, 0], num_logprobs=[0, -1, 2], temperature=0)
    result = sample(isa, logits, params)
    assert result.token_ids.tolist() == [49, int(logits[1].argmax()), 0]
    assert np.isnan(result.logprobs).tolist() == [False, True, False]
    assert result.top_ids[:2].tolist() == [[-1, -1]] * 2
    assert result.top_ids[2].tolist() == np.argsort(-logits[2])[:2].tolist()


def test_fewer_tokens_than_wanted_logprobs_are_padded(isa: str) -> None:
    logits = np.array([[0.0, 1.0, -np.inf]], dtype=np.float32)
    result = sample(isa, logits, make_params(1, num_logprobs=3, target_ids=0))
    assert result.top_ids.tolist() == [[1, 0, -1]]
    assert np.isnan(result.top_logprobs[0]).tolist() == [False, False, True]


def mixed_params(rows: int) -> dict[str, Any]:
    rng = np.random.default_rng(6)
    return {
        "temperature": rng.choice([0.0, 0.7, 1.0, 1.5], rows),
        "top_k": rng.choice([0, 1, 40, 300], rows),
        "top_p": rng.choice([1.0, 0.95, 0.5], rows),
        "min_p": rng.choice([0.0, 0.02], rows),
        "num_logprobs": rng.choice([-1, 0, 5], rows),
        "seed": rng.integers(0, 2**63, rows),
    }


def test_a_row_does_not_depend_on_batch_threads_or_instruction_set(isa: str) -> None:
    rows, vocab = 48, 3001
    logits = (np.random.default_rng(9).normal(size=(rows, vocab)) * 2).astype(np.float32)
    values = mixed_params(rows)
    expected = sample("ref", logits, make_params(rows, **values))
    for num_threads in (1, 2):
        result = sample(isa, logits, make_params(rows, **values), num_threads)
        for field in ("token_ids", "logprobs", "ranks", "top_ids", "top_logprobs"):
            np.testing.assert_array_equal(getattr(result, field), getattr(expected, field))
    for i in range(0, rows, 7):
        one = {name: value[i : i + 1] for name, value in values.items()}
        alone = sample(isa, logits[i : i + 1], make_params(1, position=i, **one))
        assert alone.token_ids[0] == expected.token_ids[i]


def test_draws_of_neighbouring_seeds_and_positions_are_independent(isa: str) -> None:
    row, n = np.zeros(64, dtype=np.float32), 4096
    logits = np.tile(row, (n, 1))
    by_position = sample(isa, logits, make_params(n, seed=0)).token_ids
    by_seed = sample(isa, logits, make_params(n, position=0)).token_ids
    for tokens in (by_position, by_seed):
        assert_same_distribution(tokens, np.full(64, 1 / 64))
        pairs = (tokens[:-1] // 8) * 8 + tokens[1:] // 8
        assert_same_distribution(pairs, np.full(64, 1 / 64))
    assert abs(np.corrcoef(by_position, by_seed)[0, 1]) < 0.08


def test_the_same_seed_and_position_repeat(isa: str) -> None:
    row = np.random.default_rng(1).normal(size=500).astype(np.float32)
    assert len(set(repeat(isa, row, 20, position=3).tolist())) == 1
    assert len(set(repeat(isa, row, 20).tolist())) > 5


def test_a_vocabulary_beyond_the_scratch_memory_fails_instead_of_overrunning(isa: str) -> None:
    logits = np.zeros((1, 600_000), dtype=np.float32)
    assert sample(isa, logits, make_params(1, top_k=50)).token_ids.tolist() == [-1]
    fits = np.zeros((1, 300_000), dtype=np.float32)
    assert 0 <= sample(isa, fits, make_params(1, top_k=50)).token_ids[0] < 50
