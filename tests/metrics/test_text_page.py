"""A page that Prometheus reads otherwise than it was meant; a scrape that stalls every stream."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from types import FrameType

import pytest
from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from caudal.engine.messages import EngineStats
from caudal.metrics import text_page
from caudal.metrics.exposition import Exposition
from caudal.metrics.server_metrics import ServerMetrics
from tests.metrics.test_catalogue import Source

HOSTILE = 'a "quoted\\ 100% {name}\n'


class BusySource(Source):
    """A server with numbers of every kind, and a model with a name that needs escaping."""

    def __init__(self) -> None:
        self.metrics = ServerMetrics()
        self.batch_metrics = ServerMetrics()
        self.engine_gauges = EngineStats(  # type: ignore[assignment]
            num_waiting=3,
            num_blocks_total=7,
            num_blocks_held=2,
            prefix_queries_tokens=10**15,
            kv_wasted_fraction=1e-9,
            step_ms={"forward": 1.5e10, "surprise": 2.0},
            cpu_ms={"engine": 0.1},
        )
        self.model_labels = {"model_name": HOSTILE, "architecture": "", "quantization": "q"}
        for index in range(2_000):
            self.metrics.time_to_first_token.observe(index * 0.003)
            self.metrics.prompt_length.observe(index * 3)
        self.metrics.requests_rejected.increment(HOSTILE, 3)


class _Parsed(Collector):
    """Families read from a page."""

    def __init__(self, page: str) -> None:
        self._page = page

    def collect(self) -> Iterator[Metric]:
        for family in text_string_to_metric_families(self._page):
            if family.name.endswith("_info"):
                family.type = "gauge"
            yield family


@pytest.mark.parametrize("source", [Source(), BusySource()], ids=["idle", "busy"])
@pytest.mark.parametrize("compat", ["none", "vllm"])
def test_the_page_is_byte_for_byte_what_the_library_writes(source: Source, compat: str) -> None:
    page = Exposition(source, compat).render()
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Parsed(page.decode()))
    assert generate_latest(registry) == page


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0.0"),
        (12, "12.0"),
        (True, "1.0"),
        (0.1, "0.1"),
        (1e-7, "1e-07"),
        (999_999, "999999.0"),
        (1_000_000, "1e+06"),
        (123_456_789, "1.23456789e+08"),
        (-5, "-5.0"),
        (math.inf, "+Inf"),
        (-math.inf, "-Inf"),
        (math.nan, "NaN"),
    ],
)
def test_numbers_are_written_as_go_writes_them(value: float, text: str) -> None:
    assert text_page.number(value) == text


def test_a_model_that_comes_later_is_named_from_then_on() -> None:
    source = Source()
    source.model_labels = {"model_name": "", "architecture": "", "quantization": ""}
    exposition = Exposition(source, "vllm")
    assert b'vllm:num_requests_running{engine="0",model_name=""} ' in exposition.render()
    source.model_labels = {"model_name": "late", "architecture": "a", "quantization": "q"}
    page = exposition.render()
    assert b'vllm:num_requests_running{engine="0",model_name="late"} ' in page
    assert b'model_name=""' not in page


def num_calls(work: Callable[[], object]) -> Counter[str]:
    """Calls of Python functions and of built-in ones."""
    seen: Counter[str] = Counter()

    def count(_frame: FrameType, event: str, _argument: object) -> None:
        seen[event] += 1

    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
    return seen


def test_a_scrape_writes_numbers_and_puts_no_names_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By the work that it does: a clock would tell more about the machine."""
    exposition = Exposition(BusySource(), "vllm")
    num_lines = exposition.render().count(b"\n")
    made: list[str] = []
    sample = text_page.sample

    def note(name: str, labels: text_page.Labels) -> str:
        made.append(name)
        return sample(name, labels)

    monkeypatch.setattr(text_page, "sample", note)
    again = num_calls(exposition.render)
    assert made == []
    # The library's own renderer makes some twenty calls a line.
    assert again["call"] + again["c_call"] < 3 * num_lines


def test_a_scrape_with_other_numbers_takes_no_more_work() -> None:
    source = BusySource()
    exposition = Exposition(source, "vllm")
    exposition.render()
    before = num_calls(exposition.render).total()
    for index in range(5_000):
        source.metrics.inter_token_latency.observe(index * 1e-5)
    assert num_calls(exposition.render).total() < before * 1.2
