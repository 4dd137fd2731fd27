"""Levels, searches and declared conditions, against a server that keeps what it was asked."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from caudal.bench.health import HealthMonitor
from caudal.bench.load import Load
from caudal.bench.record import FailureKind
from caudal.bench.search import SearchOptions, SearchResult, search_rate
from caudal.bench.suite import Plan
from caudal.bench.text_report import search_outcome
from caudal.errors import CaudalError, ConfigError
from tests.bench.fake_server import Behaviour, FakeServer
from tests.bench.harness import make_plan, run, run_against


def openings(bodies: list[dict[str, Any]]) -> list[list[str]]:
    return [body["messages"][0]["content"].split() for body in bodies]


def test_each_level_of_a_sweep_asks_the_same_but_for_its_cold_beginning() -> None:
    with FakeServer(Behaviour()) as server:
        report = run_against(server, concurrency=(1, 1), num_prompts=5, output_len=3)
        words = openings(server.bodies[2:])
    assert [str(level.load) for level in report.levels] == ["1 user", "1 user"]
    assert [text[8:] for text in words[:5]] == [text[8:] for text in words[5:]]
    assert len({tuple(text[:8]) for text in words}) == 10


def test_a_second_measurement_finds_nothing_of_the_first_in_the_cache() -> None:
    with FakeServer(Behaviour()) as server:
        run_against(server, num_prompts=3, output_len=3)
        run_against(server, num_prompts=3, output_len=3)
        words = openings(server.bodies)
    measured = [tuple(text[:8]) for text in words if len(text) not in (10, 110)]
    assert len(set(measured)) == len(measured) == 6


def test_a_warm_level_was_asked_exactly_the_same_before() -> None:
    with FakeServer(Behaviour()) as server:
        run_against(server, num_prompts=4, output_len=3, cache="warm", concurrency=(2,))
        bodies = server.bodies[2:]
    assert [body["max_tokens"] for body in bodies] == [1] * 4 + [3] * 4
    first, second = (sorted(map(str, openings(part))) for part in (bodies[:4], bodies[4:]))
    assert first == second


def test_warm_up_is_declared_and_has_prompts_of_its_own() -> None:
    with FakeServer(Behaviour()) as server:
        report = run_against(server, num_prompts=3, output_len=3, warmup=2, cache="as-is")
        texts = [" ".join(words) for words in openings(server.bodies[2:])]
    assert report.warmup.startswith("2 requests")
    assert len(texts) == 5 == len(set(texts))
    assert len(report.levels[0].run.records) == 3


def test_turns_carry_what_was_said_and_count_from_the_end_of_thinking() -> None:
    behaviour = Behaviour(first_s=0.05)
    with FakeServer(behaviour) as server:
        report = run_against(
            server, workload="multi-turn", num_prompts=2, turns=3, think_s=0.1, output_len=3
        )
        bodies = server.bodies[2:]
    assert sorted(len(body["messages"]) for body in bodies) == [1, 1, 3, 3, 5, 5]
    longest = max(bodies, key=lambda body: len(body["messages"]))["messages"]
    assert [m["role"] for m in longest] == ["user", "assistant"] * 2 + ["user"]
    assert longest[1]["content"].strip() == "wörd wörd wörd"
    records = report.levels[0].run.records
    assert [record.turn for record in records if record.conversation == 0] == [0, 1, 2]
    assert report.levels[0].summary.ttft_ms.max < 100 + 50


def test_a_trace_is_replayed_at_its_times(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("timestamp,input,output\n0,50,2\n0.3,60,3\n0.35,70,4\n")
    with FakeServer(Behaviour(tokens_per_word=1, overhead_tokens=0)) as server:
        report = run_against(server, trace=str(path))
    records = report.levels[0].run.records
    assert [record.intended_s for record in records] == pytest.approx([0, 0.3, 0.35])
    assert [record.num_prompt_tokens for record in records] == [50, 60, 70]
    assert sorted(record.num_output_tokens or 0 for record in records) == [2, 3, 4]


def test_duration_ends_the_sending_and_awaits_what_is_in_flight() -> None:
    for options in ({"concurrency": (3,)}, {"rate": (30.0,)}):
        report = run(Behaviour(first_s=0.2), duration_s=0.5, output_len=2, **options)
        summary = report.levels[0].summary
        assert 0.4 < summary.duration_s < 1.0
        assert summary.num_failed == 0 < summary.num_completed
        assert max(record.intended_s for record in report.levels[0].run.records) <= 0.5


def test_a_timeout_is_a_failure_of_its_own_kind() -> None:
    report = run(Behaviour(gap_s=0.2), num_prompts=2, output_len=10, timeout_s=0.7)
    assert report.levels[0].summary.failures == {str(FailureKind.TIMEOUT): 2}


@pytest.mark.parametrize("capacity", [0.7, 12.0, 333.0])
def test_the_search_brackets_the_capacity(capacity: float) -> None:
    async def run_at(rate: float) -> tuple[float, bool]:
        return (1.0, True) if rate <= capacity else (0.3, False)

    options = SearchOptions(goodput_percent=90, max_runs=20)
    result = asyncio.run(search_rate(options, 5.0, run_at))
    assert result.best_rate is not None and result.failing_rate is not None
    assert result.best_rate <= capacity < result.failing_rate <= 1.08 * result.best_rate


def test_the_search_is_bounded_even_if_nothing_ever_fails_or_passes() -> None:
    async def always(rate: float) -> tuple[float, bool]:
        return 1.0, True

    async def never(rate: float) -> tuple[float, bool]:
        return 0.0, False

    options = SearchOptions(goodput_percent=95, max_runs=6)
    assert len(asyncio.run(search_rate(options, 1.0, always)).tried) == 6
    result = asyncio.run(search_rate(options, 1.0, never))
    assert result.best_rate is None and len(result.tried) == 6


def test_goodput_of_a_server_with_four_seats_is_found() -> None:
    """Four seats of 0.1 s are 40 requests a second at most."""
    report = run(
        Behaviour(first_s=0.1, seats=4),
        output_len=1,
        input_len=5,
        ttft_ms=250,
        rate=(16.0,),
        goodput_percent=90.0,
        window_s=0.7,
        max_runs=5,
    )
    result = report.search
    assert result is not None and result.best_rate is not None
    assert 16 <= result.best_rate <= 64
    assert result.failing_rate is not None and result.failing_rate <= 128
    assert "90% of requests keep TTFT ≤ 250 ms" in search_outcome(report)
    failed = [
        level for level, tried in zip(report.levels, result.tried, strict=True) if not tried[2]
    ]
    assert all((level.summary.good_share or 0) < 0.9 or level.run.was_given_up for level in failed)


def test_a_run_that_cannot_pass_any_more_is_given_up() -> None:
    started = time.perf_counter()
    report = run(
        Behaviour(late_s=20.0),
        output_len=1,
        num_prompts=40,
        ttft_ms=100,
        rate=(100.0,),
        goodput_percent=90.0,
        max_runs=1,
    )
    assert time.perf_counter() - started < 8
    (level,) = report.levels
    assert level.run.was_given_up
    assert level.summary.num_given_up > 0 and level.summary.num_failed == 0
    assert report.search is not None and report.search.best_rate is None


def test_outcomes_are_told_even_where_nothing_passed() -> None:
    result = SearchResult(0.9)
    result.note(2.0, 0.1, False)
    assert (result.best_rate, result.failing_rate) == (None, 2.0)
    assert result.next_rate() == 1.0


async def test_a_client_that_blocks_itself_is_reported() -> None:
    monitor = HealthMonitor()
    task = asyncio.create_task(monitor.run())
    for _ in range(8):
        await asyncio.sleep(0.03)
        time.sleep(0.06)
    task.cancel()
    (problem, *_) = monitor.finish().problems
    assert "event loop was up to" in problem
    quiet = HealthMonitor(lateness_s=[0.5])
    assert "sends were up to 500 ms late" in quiet.finish().problems[0]


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"goodput_percent": 90.0}, "--goodput-search: needs"),
        ({"rate": (1.0,), "concurrency": (1, 2)}, "--concurrency: with --rate"),
        ({"trace": "x", "rate": (1.0,)}, "--trace: brings its own arrivals"),
        ({"stream": False, "ttft_ms": 5.0}, "--ttft-ms, --tpot-ms: cannot be seen"),
        ({"jsonl": "x", "trace": "x"}, "--jsonl, --trace: only one"),
    ],
)
def test_contradictions_are_refused_before_anything_is_sent(
    options: dict[str, Any], complaint: str
) -> None:
    with FakeServer(Behaviour()) as server:
        with pytest.raises(ConfigError, match=complaint):
            run_against(server, **options)
        assert server.bodies == []


def test_loads_of_a_plan() -> None:
    assert Plan().loads() == [Load(concurrency=8)]
    assert [load.rate for load in make_plan("x", rate=(1.0, 2.0)).loads()] == [1.0, 2.0]
    capped = make_plan("x", rate=(1.0,), concurrency=(3,)).loads()
    assert [str(load) for load in capped] == ["1 req/s, ≤ 3 in flight"]


@pytest.mark.parametrize(
    ("behaviour", "options", "complaint"),
    [
        (Behaviour(api_key="k"), {}, "--api-key: .* refuses it: wrong key"),
        (Behaviour(api_key="k"), {"api_key": "other"}, "--api-key: .* refuses it: wrong key"),
        (Behaviour(), {"model": "gone"}, "--model: .* serves fake, not gone: there is no model"),
        (Behaviour(refuses=("messages",)), {}, "HTTP 400: unknown field messages"),
        (Behaviour(models=()), {}, "does not list its models: name one with --model"),
    ],
)
def test_a_wrong_key_or_model_is_said_clearly(
    behaviour: Behaviour, options: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(CaudalError, match=complaint):
        run(behaviour, **options)


@pytest.mark.parametrize(
    ("url", "complaint"),
    [
        ("http://127.0.0.1:9", "cannot reach http://127.0.0.1:9/v1: Connection refused"),
        ("ftp://host", "--url: must look like"),
        ("http://", "--url: must look like"),
        ("http://host:port", "--url: must look like"),
        ("{}/nowhere", "models answers HTTP 404; is this an OpenAI-compatible server"),
    ],
)
def test_a_wrong_address_is_said_clearly(url: str, complaint: str) -> None:
    with FakeServer(Behaviour()) as server, pytest.raises(CaudalError, match=complaint):
        run_against(server, url=url.format(server.url))


@pytest.mark.parametrize("ending", ["", "/", "/v1", "/v1/", "/v1/chat/completions"])
def test_addresses_are_taken_as_people_write_them(ending: str) -> None:
    with FakeServer(Behaviour()) as server:
        url = server.url.removeprefix("http://") + ending
        report = run_against(server, url=url, num_prompts=1, output_len=3)
    assert report.levels[0].summary.num_completed == 1
