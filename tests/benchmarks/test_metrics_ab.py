"""The comparison of observed and unobserved servers reports what it measured."""

from __future__ import annotations

from urllib.request import Request, urlopen

import pytest

from benchmarks.metrics_ab import Comparison, Cost, collector, spread


def test_ratios_are_of_the_rounds_and_medians_of_them() -> None:
    found = Comparison(
        [Cost(1.02, 2.0, 100), Cost(2.0, 2.0, 100), Cost(1.01, 2.2, 100)],
        [Cost(1.0, 2.0, 100), Cost(2.0, 2.0, 100), Cost(1.0, 2.0, 100)],
    )
    summary = found.summary()
    wall, cpu, rates = summary["wall"], summary["cpu"], summary["tokens_per_s"]
    assert isinstance(wall, dict) and isinstance(cpu, dict) and isinstance(rates, dict)
    assert wall["median"] == pytest.approx(1.01) and wall["max"] == pytest.approx(1.02)
    assert cpu["median"] == 1.0 and cpu["max"] == pytest.approx(1.1)
    assert rates == {"on": pytest.approx(100 / 1.02), "off": pytest.approx(100)}


def test_one_round_has_no_spread() -> None:
    assert set(spread([1.5]).values()) == {1.5}


def test_the_collector_takes_traces() -> None:
    with collector() as url, urlopen(Request(f"{url}/v1/traces", data=b"spans")) as answer:
        assert answer.status == 200
