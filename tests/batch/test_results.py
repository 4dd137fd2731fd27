"""Result files after a crash: what is whole counts, what is not runs again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from caudal.server.batch.dispatch import Reply
from caudal.server.batch.records import TokenUsage
from caudal.server.batch.results import (
    ResultError,
    ResultFiles,
    add_usage,
    error_line,
    response_line,
    result_id,
)

TOKEN = "0123456789abcdef"
BODY = (
    b'{"usage":{"prompt_tokens":5,"completion_tokens":2,'
    b'"prompt_tokens_details":{"cached_tokens":1}}}'
)


def answer(ordinal: int, token: str = TOKEN) -> bytes:
    return response_line(result_id(token, ordinal), f"r{ordinal}", Reply(200, "x", BODY))


def failure(ordinal: int) -> bytes:
    return error_line(result_id(TOKEN, ordinal), f"r{ordinal}", ResultError("code", "why"))


def reopen(path: Path, num_requests: int = 10) -> ResultFiles:
    files = ResultFiles(path / "output", path / "errors", TOKEN, num_requests)
    files.recover()
    return files


def ended(files: ResultFiles) -> list[int]:
    return [i for i in range(files.num_requests) if i in files.done]


def test_nothing_yet_is_nothing_done(tmp_path: Path) -> None:
    files = reopen(tmp_path)
    assert (ended(files), files.sizes()) == ([], (0, 0))


def test_lines_of_both_files_are_counted_after_a_restart(tmp_path: Path) -> None:
    files = reopen(tmp_path)
    files.append(answer(0) + answer(7), failure(3))
    files.sync()
    files = reopen(tmp_path)
    assert ended(files) == [0, 3, 7]
    assert (files.num_completed, files.num_failed) == (2, 1)
    assert files.usage == TokenUsage(num_input=10, num_cached=2, num_output=4)


@pytest.mark.parametrize("num_cut", [1, 2, 30, 200])
def test_torn_last_line_is_cut_off_and_written_again(tmp_path: Path, num_cut: int) -> None:
    reopen(tmp_path).append(answer(0) + answer(1), b"")
    output = tmp_path / "output"
    output.write_bytes(output.read_bytes()[:-num_cut])
    files = reopen(tmp_path)
    assert ended(files) == [0]
    files.append(answer(1), b"")
    assert output.read_bytes() == answer(0) + answer(1)


@pytest.mark.parametrize(
    "garbage",
    [
        b"\0" * 4096,
        b"\0" * 4095 + b"\n",
        b"{}\n",
        b'{"id":"batch_req_x"}\n',
        answer(2, token="f" * 16),
        answer(99),
        answer(0),
        b"[" * 100_000 + b"\n",
        b"\xff\xfe\n",
    ],
    ids=[
        "zeros",
        "zeros and a break",
        "no id",
        "short id",
        "other",
        "beyond",
        "twice",
        "deep",
        "no",
    ],
)
def test_what_a_power_failure_leaves_behind_the_last_sync_is_cut_off(
    tmp_path: Path, garbage: bytes
) -> None:
    reopen(tmp_path).append(answer(0), failure(4))
    for name in ("output", "errors"):
        with (tmp_path / name).open("ab") as file:
            file.write(garbage + answer(5))
    files = reopen(tmp_path)
    assert ended(files) == [0, 4]
    assert files.sizes() == (len(answer(0)), len(failure(4)))


def test_empty_result_files_are_deleted_at_the_end(tmp_path: Path) -> None:
    files = reopen(tmp_path)
    files.append(b"", failure(1))
    (tmp_path / "output").touch()
    assert files.sizes() == (0, len(failure(1)))
    assert not (tmp_path / "output").exists()


def test_files_in_doubt_refuse_all_further_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = reopen(tmp_path)

    def fail(_descriptor: int, _data: bytes) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("caudal.server.batch.results._write_all", fail)
        with pytest.raises(OSError, match="No space"):
            files.append(answer(0), b"")
    for call in (lambda: files.append(answer(1), b""), files.sync, files.sizes):
        with pytest.raises(OSError, match="earlier write"):
            call()
    assert ended(reopen(tmp_path)) == []


def test_result_lines_have_the_shape_of_openai() -> None:
    good, bad = json.loads(answer(1)), json.loads(failure(2))
    assert set(good) == set(bad) == {"id", "custom_id", "response", "error"}
    assert good["id"] == f"batch_req_{TOKEN}00000001"
    assert set(good["response"]) == {"status_code", "request_id", "body"}
    assert (good["error"], bad["response"]) == (None, None)
    assert bad["error"] == {"code": "code", "message": "why"}


def test_line_stays_one_line_whatever_the_model_says() -> None:
    text = "".join(map(chr, range(0x3000))) + "\U0001f600"
    body = json.dumps({"text": text}, ensure_ascii=False).encode()
    data = response_line(result_id(TOKEN, 1), text, Reply(200, "x", body)).decode()
    assert len(data.splitlines()) == 1
    assert data.endswith("}\n")
    decoded = json.loads(data)
    assert (decoded["custom_id"], decoded["response"]["body"]["text"]) == (text, text)


def test_usage_of_answers_without_one_counts_as_nothing() -> None:
    usage = TokenUsage()
    for body in (b"{}", b"[]", b"nonsense", b'{"usage":null}', b'{"usage":{}}'):
        add_usage(usage, body)
    add_usage(usage, b'{"usage":{"prompt_tokens":3}}')
    assert usage == TokenUsage(num_input=3)
