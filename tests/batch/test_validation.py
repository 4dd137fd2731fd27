"""Input files: faults are named with their lines, odd but harmless files are accepted (B131)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from caudal.server.batch.input_lines import BOM, Cursor, read_lines
from caudal.server.batch.limits import MAX_LINE_BYTES
from caudal.server.batch.validation import InputReport, InputRules, validate_input
from tests.batch.harness import CHAT, COMPLETIONS, completion, jsonl, line

RULES = InputRules([CHAT, COMPLETIONS], "tiny", max_requests=1000, max_errors=20)


def validate(path: Path, content: bytes | list[Any], rules: InputRules = RULES) -> InputReport:
    file = path / "input.jsonl"
    file.write_bytes(content if isinstance(content, bytes) else jsonl(content))
    return validate_input(file, rules)


def found(report: InputReport) -> list[tuple[int | None, str, str | None]]:
    return [(error.line, error.code, error.param) for error in report.errors]


BAD_LINES: list[tuple[str, Any, str, str | None]] = [
    ("broken JSON", b'{"custom_id": "x"', "invalid_json_line", None),
    ("two values", b"{} {}", "invalid_json_line", None),
    ("an array", b"[1]", "invalid_json_line", None),
    ("a number", b"7", "invalid_json_line", None),
    ("NaN", b'{"custom_id": NaN}', "invalid_json_line", None),
    ("not UTF-8", b'{"custom_id": "\xff"}', "invalid_json_line", None),
    ("UTF-16", json.dumps(line("x")).encode("utf-16"), "invalid_json_line", None),
    ("deep nesting", b'{"a":' * 50_000, "invalid_json_line", None),
    ("no custom_id", line(...), "missing_required_parameter", "custom_id"),
    ("custom_id a number", line(7), "invalid_type", "custom_id"),
    ("custom_id empty", line(""), "invalid_custom_id", "custom_id"),
    ("custom_id long", line("x" * 600), "invalid_custom_id", "custom_id"),
    ("no method", line("x", method=...), "missing_required_parameter", "method"),
    ("GET", line("x", method="GET"), "invalid_method", "method"),
    ("no url", line("x", url=...), "missing_required_parameter", "url"),
    ("unknown url", line("x", url="/v1/files"), "invalid_url", "url"),
    ("another host", line("x", url="http://evil/v1/chat/completions"), "invalid_url", "url"),
    ("other url than the first", completion("x"), "mismatched_url", "url"),
    ("no body", line("x", body=...), "missing_required_parameter", "body"),
    ("body null", line("x", body=None), "invalid_body", "body"),
    ("body a list", line("x", body=[]), "invalid_body", "body"),
    ("stream", line("x", body={"stream": True}), "invalid_value", "body.stream"),
    ("stream a word", line("x", body={"stream": "yes"}), "invalid_value", "body.stream"),
    ("other model", line("x", body={"model": "gpt-4"}), "model_not_found", "body.model"),
    ("model a list", line("x", body={"model": [1]}), "model_not_found", "body.model"),
    ("same custom_id", line("first"), "duplicate_custom_id", "custom_id"),
]


@pytest.mark.parametrize(
    ("bad", "code", "param"), [case[1:] for case in BAD_LINES], ids=[case[0] for case in BAD_LINES]
)
def test_unusable_line_is_named_by_number_code_and_field(
    tmp_path: Path, bad: Any, code: str, param: str | None
) -> None:
    report = validate(tmp_path, [line("first"), line("second"), bad, line("last")])
    assert found(report) == [(3, code, param)]
    assert report.num_errors == 1
    assert report.errors[0].message


def test_line_too_long_is_named_and_the_next_one_is_not_lost(tmp_path: Path) -> None:
    long = line("x", body={"messages": [{"role": "user", "content": "x" * MAX_LINE_BYTES}]})
    report = validate(tmp_path, [long, line("a"), b"bad"])
    assert found(report) == [(1, "line_too_long", None), (3, "invalid_json_line", None)]
    assert report.num_requests == 3


def test_line_of_exactly_the_limit_is_accepted(tmp_path: Path) -> None:
    text = json.dumps(line("x")).encode()
    exact = text[:-1] + b" " * (MAX_LINE_BYTES - len(text)) + b"}"
    assert len(exact) == MAX_LINE_BYTES
    for end in (b"", b"\n", b"\r\n"):
        report = validate(tmp_path, exact + end)
        assert (report.num_requests, report.num_errors) == (1, 0), end
    assert validate(tmp_path, b" " + exact[:-1] + b" }").errors[0].code == "line_too_long"


@pytest.mark.parametrize("content", [b"", b"\n\n", b"  \r\n\t\n", BOM])
def test_file_without_requests_is_refused(tmp_path: Path, content: bytes) -> None:
    assert found(validate(tmp_path, content)) == [(None, "empty_file", None)]


@pytest.mark.parametrize(
    "content",
    [
        BOM + jsonl([line("a"), line("b")]),
        jsonl([line("a"), line("b")]).replace(b"\n", b"\r\n"),
        jsonl([line("a"), line("b")])[:-1],
        b"\n" + jsonl([line("a"), b"", b"  ", line("b"), b""]),
    ],
    ids=["BOM", "CRLF", "no last line break", "blank lines"],
)
def test_harmless_oddities_are_accepted(tmp_path: Path, content: bytes) -> None:
    report = validate(tmp_path, content)
    assert (report.num_requests, report.errors, report.endpoint) == (2, [], CHAT)


def test_blank_lines_count_in_line_numbers_but_not_in_requests(tmp_path: Path) -> None:
    report = validate(tmp_path, [line("a"), b"", b"", b"bad"])
    assert found(report) == [(4, "invalid_json_line", None)]
    assert report.num_requests == 2


def test_absent_null_empty_and_served_model_are_the_served_one(tmp_path: Path) -> None:
    bodies: list[dict[str, Any]] = [{}, {"model": None}, {"model": ""}, {"model": "tiny"}]
    lines = [line(str(i), body={"messages": [], **body}) for i, body in enumerate(bodies)]
    assert validate(tmp_path, lines).num_errors == 0


def test_list_of_errors_is_bounded_but_all_are_counted(tmp_path: Path) -> None:
    report = validate(tmp_path, [b"bad"] * 50)
    assert (len(report.errors), report.num_errors) == (20, 50)
    assert [error.line for error in report.errors] == list(range(1, 21))


def test_every_repetition_of_a_custom_id_is_named_with_its_first_line(tmp_path: Path) -> None:
    report = validate(tmp_path, [line("a"), line("b"), line("a"), line("c"), line("a"), b"bad"])
    assert found(report) == [
        (3, "duplicate_custom_id", "custom_id"),
        (5, "duplicate_custom_id", "custom_id"),
        (6, "invalid_json_line", None),
    ]
    assert "line 1" in report.errors[0].message


def test_too_many_requests_end_the_check_early(tmp_path: Path) -> None:
    rules = InputRules([CHAT], "tiny", max_requests=10, max_errors=5)
    report = validate(tmp_path, [line(str(i)) for i in range(50)], rules)
    assert found(report) == [(None, "too_many_requests", None)]


MEASURE = """
import resource, sys
from pathlib import Path
from caudal.server.batch.validation import InputRules, validate_input

rules = InputRules([sys.argv[1]], "tiny", max_requests=10**6, max_errors=5)
for file in sys.argv[2:]:
    report = validate_input(Path(file), rules)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(report.num_requests, report.num_errors, peak)
"""


def test_memory_stays_flat_at_a_hundred_thousand_lines(tmp_path: Path) -> None:
    content = {"messages": [{"role": "user", "content": "x" * 1000}]}
    files = []
    for num_lines in (1_000, 100_000):
        files.append(tmp_path / f"{num_lines}.jsonl")
        with files[-1].open("w") as out:
            text = json.dumps(line("request-NUMBER", body=content)) + "\n"
            out.writelines(text.replace("NUMBER", str(i)) for i in range(num_lines))
    assert files[1].stat().st_size > 100_000_000
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, CHAT, *map(str, files)],
        capture_output=True,
        text=True,
        check=True,
    )
    few, many = [[int(word) for word in row.split()] for row in done.stdout.splitlines()]
    assert (few[:2], many[:2]) == ([1_000, 0], [100_000, 0])
    assert many[2] - few[2] < 4_000  # kB


def test_reading_in_pieces_gives_the_same_lines_as_at_once(tmp_path: Path) -> None:
    file = tmp_path / "input.jsonl"
    content = BOM + jsonl([line("a"), b"", line("b"), line("c" * 500), b"  ", line("d")])[:-1]
    file.write_bytes(content)
    whole, _ = read_lines(file, Cursor(), max_lines=100, max_bytes=10**9)
    assert [(item.number, item.ordinal) for item in whole] == [(1, 0), (3, 1), (4, 2), (6, 3)]
    for max_lines, max_bytes in ((1, 10**9), (2, 10**9), (100, 1), (100, 300)):
        pieces, cursor = [], Cursor()
        while True:
            piece, cursor = read_lines(file, cursor, max_lines=max_lines, max_bytes=max_bytes)
            if not piece:
                break
            pieces += piece
        assert pieces == whole
    assert cursor.offset == len(content)
