"""Against a server of known behaviour the numbers are right."""

from __future__ import annotations

import pytest

from caudal.bench.record import FailureKind
from caudal.bench.text_report import level_table
from tests.bench.fake_server import Behaviour, FakeServer
from tests.bench.harness import run, run_against


def test_first_token_after_a_second_then_one_each_ten_milliseconds() -> None:
    """B135: the first token is no gap."""
    report = run(Behaviour(first_s=1.0, gap_s=0.01), num_prompts=8, concurrency=(8,), output_len=60)
    (level,) = report.levels
    summary = level.summary
    assert (summary.num_completed, summary.num_failed) == (8, 0)
    assert summary.num_output_tokens == 8 * 60
    assert summary.ttft_ms.p50 == pytest.approx(1000, rel=0.05)
    assert summary.tpot_ms.mean == pytest.approx(10, rel=0.1)
    assert summary.itl_ms.mean == pytest.approx(10, rel=0.1)
    assert summary.itl_ms.count == 8 * 59
    assert summary.e2e_ms.p50 == pytest.approx(1590, rel=0.05)
    assert summary.output_throughput == pytest.approx(8 * 60 / 1.59, rel=0.1)
    assert summary.request_throughput == pytest.approx(8 / 1.59, rel=0.1)
    assert summary.peak_concurrency == 8


def test_five_tokens_a_piece_count_five_for_tpot_and_one_gap_for_itl() -> None:
    behaviour = Behaviour(first_s=0.1, gap_s=0.05, tokens_per_piece=5)
    report = run(behaviour, num_prompts=4, concurrency=(4,), output_len=200)
    (level,) = report.levels
    assert level.summary.num_output_tokens == 4 * 200
    assert level.summary.itl_ms.p50 == pytest.approx(50, rel=0.1)
    # The first piece holds five tokens, the definition subtracts one: (39 × 50 ms) / 199.
    assert level.summary.tpot_ms.p50 == pytest.approx(39 * 50 / 199, rel=0.05)
    assert level.summary.tokens_per_piece == 5
    assert "a piece of output carries 5.0 tokens" in level_table(report, level)


def test_a_fifth_of_errors_is_counted_apart_and_never_as_good() -> None:
    """B137."""
    behaviour = Behaviour(gap_s=0.001, fail_every=5)
    report = run(behaviour, num_prompts=50, concurrency=(5,), output_len=8, ttft_ms=60_000)
    (level,) = report.levels
    summary = level.summary
    assert (summary.num_completed, summary.num_failed) == (40, 10)
    assert summary.failures == {"server error (5xx)": 10}
    assert summary.first_messages == {"server error (5xx)": "a failure as ordered"}
    assert summary.ttft_ms.count == 40
    assert summary.num_good == 40
    assert summary.good_share == pytest.approx(0.8)
    assert summary.num_output_tokens == 40 * 8


@pytest.mark.parametrize(
    ("fail_with", "kind"),
    [
        (429, FailureKind.REJECTED),
        (400, FailureKind.REFUSED),
        ("event", FailureKind.ERROR_EVENT),
        ("cut", FailureKind.CUT),
    ],
)
def test_failures_keep_their_kind(fail_with: int | str, kind: FailureKind) -> None:
    """B137."""
    report = run(Behaviour(fail_every=2, fail_with=fail_with), num_prompts=6, output_len=8)
    assert report.levels[0].summary.failures == {str(kind): 3}


def test_a_freeze_of_ten_seconds_at_twenty_requests_a_second_is_the_p99() -> None:
    """B139."""
    behaviour = Behaviour(freeze_on=20, freeze_s=10.0)
    report = run(behaviour, num_prompts=230, rate=(20.0,), burstiness=10.0, output_len=1)
    (level,) = report.levels
    assert level.summary.num_completed == 230
    assert level.summary.ttft_ms.p99 == pytest.approx(10_000, rel=0.05)
    assert level.summary.e2e_ms.p99 == pytest.approx(10_000, rel=0.05)
    # Four fifths of all requests came while nothing was answered: on average they waited half.
    assert level.summary.ttft_ms.p50 == pytest.approx(4_500, rel=0.2)


def test_a_cap_on_requests_in_flight_cannot_hide_a_freeze() -> None:
    behaviour = Behaviour(freeze_on=20, freeze_s=1.0)
    options = {"num_prompts": 160, "rate": (100.0,), "burstiness": 10.0, "output_len": 1}
    report = run(behaviour, concurrency=(4,), **options)
    (level,) = report.levels
    assert level.summary.peak_concurrency <= 4
    assert level.summary.ttft_ms.p99 == pytest.approx(1000, rel=0.15)


def test_a_closed_loop_sees_a_freeze_only_as_often_as_it_has_users() -> None:
    """Why the open loop exists; the other half of the lesson in docs/measuring.md."""
    behaviour = Behaviour(first_s=0.01, freeze_on=40, freeze_s=0.5)
    report = run(behaviour, num_prompts=300, concurrency=(2,), output_len=1)
    slow = [record for record in report.levels[0].run.records if record.e2e_s > 0.4]
    assert 1 <= len(slow) <= 2
    assert report.levels[0].summary.ttft_ms.p95 < 100


def test_answers_without_streaming_have_a_total_time_only() -> None:
    report = run(Behaviour(first_s=0.2), num_prompts=3, stream=False, output_len=9)
    summary = report.levels[0].summary
    assert (summary.ttft_ms.count, summary.tpot_ms.count, summary.itl_ms.count) == (0, 0, 0)
    assert summary.e2e_ms.p50 == pytest.approx(200, rel=0.15)
    assert summary.num_output_tokens == 27
    assert "not streamed" in level_table(report, report.levels[0])


def test_without_usage_pieces_are_counted_and_the_report_says_so() -> None:
    report = run(Behaviour(has_usage=False), num_prompts=3, output_len=9)
    (level,) = report.levels
    assert level.summary.num_output_tokens == 27
    assert not report.calibration.is_measured
    assert any("3 answers came without usage" in text for text in level.problems)


@pytest.mark.parametrize("refuses", [("ignore_eos",), ("ignore_eos", "stream_options")])
def test_fields_that_a_server_refuses_are_left_out(refuses: tuple[str, ...]) -> None:
    with FakeServer(Behaviour(refuses=refuses)) as server:
        report = run_against(server, num_prompts=2, output_len=4)
        assert report.levels[0].summary.num_completed == 2
        assert not set(refuses) & set(server.bodies[-1])


def test_cached_tokens_are_reported_only_if_the_server_tells_them() -> None:
    told = run(Behaviour(cached_tokens=16), num_prompts=3, output_len=2)
    assert told.levels[0].summary.num_cached_tokens == 48
    assert "Cached input tokens:                    48" in level_table(told, told.levels[0])
    untold = run(Behaviour(), num_prompts=3, output_len=2)
    assert untold.levels[0].summary.num_cached_tokens is None
    assert "Cached" not in level_table(untold, untold.levels[0])


def test_prompts_have_the_wanted_length_in_the_tokens_of_the_server() -> None:
    behaviour = Behaviour(tokens_per_word=3, overhead_tokens=20)
    report = run(behaviour, num_prompts=4, input_len=200, output_len=2)
    assert report.calibration.tokens_per_word == 3
    prompts = [record.num_prompt_tokens for record in report.levels[0].run.records]
    assert prompts == [200] * 4


def test_carriage_returns_and_raw_prompts_are_understood() -> None:
    behaviour = Behaviour(line_end="\r\n")
    report = run(behaviour, num_prompts=2, output_len=5, endpoint="/completions")
    assert report.levels[0].summary.num_output_tokens == 10
    assert report.levels[0].summary.itl_ms.count == 8
