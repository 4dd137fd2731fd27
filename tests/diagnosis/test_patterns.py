"""Shapes of series that must not be taken for each other."""

from __future__ import annotations

import math
import random

import pytest

from caudal.diagnosis.patterns import Shape, dispersion, find_trend, percentile, rank_correlation
from caudal.diagnosis.report import ServerFacts
from caudal.diagnosis.serve_flags import serve_flags, with_flag

STEADY = [100.0] * 200
CLIMB = [100.0 + 20 * index for index in range(200)]
SAW = [100.0 + 60 * (index % 40) for index in range(200)]
NOISE = random.Random(1)


def points(values: list[float], noise: float = 0.0) -> list[tuple[float, float]]:
    return [(float(i), v * NOISE.uniform(1 - noise, 1 + noise)) for i, v in enumerate(values)]


@pytest.mark.parametrize("noise", [0.0, 0.3])
@pytest.mark.parametrize(
    ("values", "shape"),
    [(STEADY, Shape.FLAT), (CLIMB, Shape.CLIMB), (SAW, Shape.SAWTOOTH)],
    ids=["steady", "climb", "sawtooth"],
)
def test_a_shape_is_recognised_through_noise(
    values: list[float], shape: Shape, noise: float
) -> None:
    assert find_trend(points(values, noise)).shape is shape


def test_a_rise_below_the_floor_is_none() -> None:
    assert find_trend(points([value / 1000 for value in CLIMB]), floor=500.0).shape is Shape.FLAT


def test_one_outlier_is_no_burst() -> None:
    assert find_trend(points([*STEADY[:100], 5000.0, *STEADY[100:]])).shape is Shape.FLAT


def test_few_points_have_no_shape() -> None:
    assert find_trend(points(CLIMB[:11])).shape is Shape.FLAT


def test_correlation_and_percentile_at_their_limits() -> None:
    assert rank_correlation([1, 2, 3, 4]) == pytest.approx(1)
    assert rank_correlation([4, 3, 2, 1]) == pytest.approx(-1)
    assert rank_correlation([2, 2, 2]) == 0
    assert rank_correlation([]) == 0
    assert percentile([], 0.5) == 0 and percentile([3.0], 0.9) == 3.0
    assert percentile([0.0, 10.0], 0.95) == pytest.approx(9.5)


def test_bursts_are_more_dispersed_than_independent_arrivals() -> None:
    source, now, independent = random.Random(2), 0.0, []
    for _ in range(400):
        now += source.expovariate(1.0)
        independent.append(now)
    assert dispersion(independent) < 1.6
    assert dispersion([math.floor(index / 20) * 20.0 for index in range(400)]) > 3
    assert dispersion([float(index) for index in range(400)]) < 0.5


def test_flags_start_an_equal_server_and_take_one_change() -> None:
    facts = ServerFacts(
        max_model_len=2048,
        settings={
            "max_num_seqs": 8,
            "tpot_ms": 50.0,
            "kv_cache_dtype": "auto",
            "enable_prefix_caching": False,
        },
        memory={"kv_cache": 1 << 20},
        num_threads=2,
    )
    flags = serve_flags(facts)
    assert "--no-enable-prefix-caching" in flags
    changed = with_flag(flags, "--enable-prefix-caching")
    assert "--no-enable-prefix-caching" not in changed and changed[-1] == "--enable-prefix-caching"
    changed = with_flag(flags, "--max-num-seqs 4")
    assert changed.count("--max-num-seqs") == 1
    assert changed[changed.index("--max-num-seqs") + 1] == "4"
    no_target = ServerFacts(settings={"tpot_ms": None})
    assert serve_flags(no_target)[:2] == ["--profile", "batch"]
