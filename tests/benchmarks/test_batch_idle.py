"""The report on idle capacity: same users in each phase, shares and ratios as defined."""

from __future__ import annotations

from benchmarks.batch_idle import Phase, Traffic, _sum, format_report
from benchmarks.measurement import Run


def test_users_of_two_phases_differ_in_words_only() -> None:
    traffic = Traffic(2.0, 30.0, 1)
    first, second = list(traffic.arrivals(1)), list(traffic.arrivals(2))
    assert 30 < len(first) < 100
    assert [when for when, _ in first] == [when for when, _ in second]
    for (_, one), (_, other) in zip(first, second, strict=True):
        assert one.num_output_tokens == other.num_output_tokens
        assert len(one.text.split()) == len(other.text.split())
        assert one.text != other.text
    assert list(traffic.arrivals(1)) == first


def test_time_per_token_is_a_mean_per_answer() -> None:
    phase = Phase()
    phase.add(Run(num_output_tokens=5, ttft_s=[0.1], gaps_s=[0.01, 0.01, 0.02]))
    phase.add(Run(num_output_tokens=1, ttft_s=[0.2]))
    assert phase.ttft_ms == [100.0, 200.0]
    assert phase.tpot_ms == [10.0]
    assert phase.gap_ms == [10.0, 10.0, 20.0]


def test_report_compares_the_tails_and_the_idle_share() -> None:
    users = Phase([100.0], [10.0], [12.0], busy_share=0.6)
    both = Phase([110.0], [10.5], [12.0], batch_tokens_per_s=300.0)
    alone = Phase(batch_tokens_per_s=1000.0)
    report = format_report({"users": [users], "users and batch": [both], "batch": [alone]}, 1500.0)
    assert "| ratio of p99 | | 1.10 | | 1.05 | 1.00 | |" in report
    assert "leave 40% of the time idle" in report
    assert "75% of what this server's batches reach, 50% of what the machine can do" in report


def test_report_gives_no_verdict_without_idle_time_or_enough_answers() -> None:
    users = Phase([100.0] * 100, [10.0], [12.0], busy_share=0.99)
    both = Phase([110.0] * 99, [10.5], [12.0], batch_tokens_per_s=19.0)
    alone = Phase(batch_tokens_per_s=281.0)
    report = format_report({"users": [users], "users and batch": [both], "batch": [alone]}, 181.0)
    assert "Used of" not in report
    assert "too little for a verdict" in report
    assert "99 answers are too few" in report


def test_series_are_summed_over_their_labels_and_not_over_namesakes() -> None:
    page = '# HELP a x\na{part="x"} 1.5\na{part="y"} 2.0\nab 7\na_total 9\n'
    assert _sum(page, "a") == 3.5
    assert _sum(page, "ab") == 7
