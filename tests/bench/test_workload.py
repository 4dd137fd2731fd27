"""Every level is asked the same, and what is declared about the cache is true."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest

from caudal.bench.load import Load, arrival_times
from caudal.bench.prompts import Prompts, primers
from caudal.bench.sources import read_trace
from caudal.bench.words import NUM_SALT_WORDS, Calibration
from caudal.bench.workload import WORKLOADS, Conversation, WorkloadOptions
from caudal.errors import ConfigError


def make(salt: str = "", number: int = 6, **options: object) -> list[Conversation]:
    return Prompts(WorkloadOptions(**options), Calibration()).create(number, salt)


def texts(conversation: Conversation) -> list[str]:
    return [m["content"] for turn in conversation.turns for m in turn.messages]


def lengths(conversations: list[Conversation]) -> list[tuple[int, int | None]]:
    return [
        (len(text.split()), turn.num_output_tokens)
        for conversation in conversations
        for turn in conversation.turns
        for text in (message["content"] for message in turn.messages)
    ]


@pytest.mark.parametrize("workload", WORKLOADS)
def test_the_same_seed_asks_the_same_and_another_does_not(workload: str) -> None:
    assert make(workload=workload) == make(workload=workload)
    assert make(workload=workload, number=3) == make(workload=workload)[:3]
    assert make(workload=workload, seed=1) != make(workload=workload)


@pytest.mark.parametrize("workload", WORKLOADS)
def test_another_salt_changes_the_first_words_and_no_length(workload: str) -> None:
    one, other = make("run 0", workload=workload), make("run 1", workload=workload)
    assert lengths(one) == lengths(other)
    for left, right in zip(one, other, strict=True):
        first_left, first_right = texts(left)[0].split(), texts(right)[0].split()
        assert first_left[:NUM_SALT_WORDS] != first_right[:NUM_SALT_WORDS]
        assert first_left[NUM_SALT_WORDS:] == first_right[NUM_SALT_WORDS:]
        assert texts(left)[1:] == texts(right)[1:]


def test_cold_requests_share_no_beginning_except_a_system_prompt() -> None:
    openings = {texts(conversation)[0][:40] for conversation in make("x", 200, workload="chat")}
    assert len(openings) == 200
    shared = {texts(conversation)[0] for conversation in make("x", 200, workload="agents")}
    assert len(shared) == 1


def test_workloads_have_the_shape_that_their_names_promise() -> None:
    assert lengths(make(workload="chat")) == [(200, 128)] * 6
    assert lengths(make(workload="long", number=2)) == [(2000, 128)] * 2
    mixed = [output or 0 for _, output in lengths(make(workload="mixed", number=400))]
    assert min(mixed) >= 20 and max(mixed) <= 400
    assert statistics.median(mixed) < statistics.mean(mixed) - 10
    (conversation,) = make(workload="multi-turn", number=1, turns=3)
    assert len(conversation.turns) == 3
    assert conversation.turns[0].think_s == 0 < conversation.turns[1].think_s


def test_lengths_can_be_set_and_follow_the_calibration() -> None:
    calibration = Calibration(tokens_per_word=2.0, num_template_tokens=20, is_measured=True)
    options = WorkloadOptions(input_len=220, output_len=5)
    conversations = Prompts(options, calibration).create(3, "")
    assert lengths(conversations) == [(100, 5)] * 3


def test_calibration_ignores_what_is_no_count_of_tokens() -> None:
    assert Calibration.fit((10, 37), (110, 237)) == Calibration(2.0, 17.0, is_measured=True)
    assert not Calibration.fit((10, 5), (110, 5)).is_measured
    assert not Calibration.fit((10, None), (110, 5)).is_measured


def test_priming_asks_each_opening_once_for_one_token() -> None:
    primed = primers(make(workload="multi-turn", number=2))
    assert [len(conversation.turns) for conversation in primed] == [1, 1]
    assert {turn.num_output_tokens for c in primed for turn in c.turns} == {1}


def test_arrivals_are_a_poisson_process_that_scales_with_the_rate() -> None:
    conversations = make(number=4000, input_len=1)
    slow = arrival_times(Load(rate=1.0), conversations, seed=3)
    fast = arrival_times(Load(rate=4.0), conversations, seed=3)
    assert fast == pytest.approx([time / 4 for time in slow])
    gaps = [b - a for a, b in zip([0.0, *slow], slow, strict=False)]
    assert statistics.mean(gaps) == pytest.approx(1.0, rel=0.05)
    assert statistics.stdev(gaps) == pytest.approx(1.0, rel=0.07)


@pytest.mark.parametrize(("burstiness", "variation"), [(0.25, 2.0), (16.0, 0.25)])
def test_burstiness_is_the_shape_of_gamma_gaps(burstiness: float, variation: float) -> None:
    times = arrival_times(
        Load(rate=2.0, burstiness=burstiness), make(number=6000, input_len=1), seed=1
    )
    gaps = [b - a for a, b in zip([0.0, *times], times, strict=False)]
    assert statistics.mean(gaps) == pytest.approx(0.5, rel=0.1)
    assert statistics.stdev(gaps) / statistics.mean(gaps) == pytest.approx(variation, rel=0.1)


def test_an_infinite_rate_sends_all_at_once() -> None:
    assert arrival_times(Load(rate=float("inf")), make(number=3), seed=0) == [0, 0, 0]


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def test_jsonl_takes_messages_prompts_and_batch_lines(tmp_path: Path) -> None:
    lines = [
        {"prompt": "one", "max_tokens": 3},
        {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "two"}]},
        {"custom_id": "a", "body": {"messages": [{"role": "user", "content": [
            {"type": "text", "text": "three"}]}], "max_completion_tokens": 5}},
    ]  # fmt: skip
    path = write(tmp_path / "r.jsonl", "\n".join(map(json.dumps, lines)) + "\n\n")
    prompts = Prompts(WorkloadOptions(jsonl=path), Calibration())
    plain = prompts.create(3, "")
    assert [c.turns[0].num_output_tokens for c in plain] == [3, None, 5]
    assert texts(plain[1]) == ["s", "two"]
    cold = prompts.create(3, "salt")
    assert texts(cold[0])[0].endswith("\none") and len(texts(cold[0])[0]) > 20
    assert cold[2].turns[0].messages[0]["content"][1] == {"type": "text", "text": "three"}
    assert prompts.create(3, "pepper") != cold


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{", "not JSON"),
        ("[]", "must be a JSON object"),
        ('{"x": 1}', "needs messages"),
        ('{"prompt": ""}', "needs messages"),
        ('{"messages": [{"content": 1}]}', "needs messages"),
        ('{"prompt": "a", "max_tokens": 0}', "max_tokens must be"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, complaint: str) -> None:
    path = write(tmp_path / "r.jsonl", '{"prompt": "fine"}\n' + line)
    with pytest.raises(ConfigError, match=f"--jsonl: .*r.jsonl:2: .*{complaint}"):
        Prompts(WorkloadOptions(jsonl=path), Calibration())


@pytest.mark.parametrize(
    "text",
    [
        "timestamp,input,output\n10,30,3\n12.5,40,4\n",
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,30,3\n2023-11-16 18:15:49.1805901,40,4\n",
        "Timestamp,Model,Request tokens,Response tokens\n12.5,m,40,4\n10,m,30,3\n",
    ],
)
def test_recorded_traces_are_understood(tmp_path: Path, text: str) -> None:
    path = write(tmp_path / "t.csv", text)
    rows = read_trace(WorkloadOptions(trace=path, trace_speed=2.0))
    assert [row[0] for row in rows] == pytest.approx([0.0, 1.25])
    assert [row[1:3] for row in rows] == [(30, 3), (40, 4)]
    made = Prompts(WorkloadOptions(trace=path), Calibration()).create(2, "s")
    assert [conversation.start_s for conversation in made] == pytest.approx([0.0, 2.5])
    assert lengths(made) == [(30, 3), (40, 4)]


def test_traces_of_json_lines_have_milliseconds(tmp_path: Path) -> None:
    row = {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [1]}
    path = write(
        tmp_path / "t.jsonl", json.dumps(row) + "\n" + json.dumps({**row, "timestamp": 30482})
    )
    rows = read_trace(WorkloadOptions(trace=path))
    assert [row[:3] for row in rows] == [(0.0, 6955, 52), (3.0, 6955, 52)]


def test_recorded_beginnings_are_shared_again(tmp_path: Path) -> None:
    rows = [
        {"timestamp": 0, "input_length": 70, "output_length": 5, "hash_ids": [7, 8, 1]},
        {"timestamp": 5, "input_length": 80, "output_length": 5, "hash_ids": [7, 8, 2]},
        {"timestamp": 9, "input_length": 40, "output_length": 5, "hash_ids": [3, 4]},
    ]
    text = "\n".join(json.dumps({**row, "block_size": 16}) for row in rows)
    options = WorkloadOptions(trace=write(tmp_path / "t.jsonl", text))
    for salt in ("", "s"):
        made = Prompts(options, Calibration()).create(3, salt)
        first, second, third = (c.turns[0].messages[0]["content"].split() for c in made)
        assert first[:32] == second[:32] and first[32:48] != second[32:48]
        assert (len(first), len(second), len(third)) == (70, 80, 40)
        assert third[:16] != first[:16]


@pytest.mark.parametrize(
    ("change", "complaint"),
    [({"hash_ids": ["a"]}, "hash_ids must be"), ({"block_size": 0}, "block_size must be")],
)
def test_bad_beginnings_are_named(
    tmp_path: Path, change: dict[str, object], complaint: str
) -> None:
    row = {"timestamp": 0, "input_length": 70, "output_length": 5, "hash_ids": [7], **change}
    path = write(tmp_path / "t.jsonl", json.dumps(row))
    with pytest.raises(ConfigError, match=complaint):
        read_trace(WorkloadOptions(trace=path))


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("timestamp,input,output\n", "has no requests"),
        ("when,input,output\n1,2,3\n", "t.csv:2: no column timestamp"),
        ("timestamp,input,output\n1,2\n", "t.csv:2: no column output"),
        ("timestamp,input,output\nx,2,3\n", "t.csv:2: timestamp must be"),
        ("timestamp,input,output\n1,-2,3\n", "t.csv:2: input must be"),
        ("timestamp,input,output\n1,2,nan\n", "t.csv:2: output must be"),
    ],
)
def test_a_bad_trace_is_named(tmp_path: Path, text: str, complaint: str) -> None:
    path = write(tmp_path / "t.csv", text)
    with pytest.raises(ConfigError, match=complaint):
        read_trace(WorkloadOptions(trace=path))


def test_missing_files_are_named() -> None:
    for name in ("jsonl", "trace"):
        with pytest.raises(ConfigError, match=f"--{name}: cannot read /nowhere"):
            Prompts(WorkloadOptions(**{name: "/nowhere"}), Calibration())
