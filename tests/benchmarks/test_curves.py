"""Curves: points in order, every system in the table and the picture, a drift that is seen."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from benchmarks import curves
from benchmarks.measurement import Run, Summary, summarize


def summary(tokens_per_s: float) -> Summary:
    return summarize([Run(wall_s=2.0, num_output_tokens=int(2 * tokens_per_s))])


RESULTS = {
    "at-1": {"caudal": summary(200), "peer": summary(50)},
    "at-8": {"caudal": summary(400), "peer": summary(150)},
}


def test_points_of_every_system_keep_their_place() -> None:
    points = curves.to_curves(RESULTS)
    assert points == {"caudal": [(1, 200.0), (8, 400.0)], "peer": [(1, 50.0), (8, 150.0)]}
    table = curves.format_curves(points, "at a time").splitlines()
    assert table[0] == "| at a time | caudal | peer |"
    assert table[2:] == ["| 1 | 200 | 50 |", "| 8 | 400 | 150 |"]


def test_picture_shows_every_point_without_outside_resources() -> None:
    svg = curves.draw(curves.to_curves(RESULTS), "at a time")
    root = ElementTree.fromstring(svg)
    hints = [title.text for title in root.iter("{http://www.w3.org/2000/svg}title")]
    assert hints == [
        "caudal, 1: 200 tok/s",
        "caudal, 8: 400 tok/s",
        "peer, 1: 50 tok/s",
        "peer, 8: 150 tok/s",
    ]
    assert "var(" not in svg and "href" not in svg


def test_drift_is_seen_and_noise_is_not() -> None:
    assert curves.slope_percent([1.0 + 0.001 * n for n in range(500)]) > 20
    assert curves.slope_percent([1.0 + 0.1 * (n % 2) for n in range(500)]) == pytest.approx(0)
