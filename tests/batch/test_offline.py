"""`caudal batch`: results are complete after any interruption, and mistakes are named."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from caudal.server.batch.offline import first_model
from tests.batch.harness import completion, jsonl, line

LONG = [completion(f"r{i}", max_tokens=50, ignore_eos=True) for i in range(400)]


class Command:
    """`caudal batch` in a folder with an input."""

    def __init__(self, model: Path, folder: Path, lines: list[Any]) -> None:
        self.input, self.output = folder / "in.jsonl", folder / "out.jsonl"
        self.errors = folder / "out.errors.jsonl"
        self.input.write_bytes(jsonl(lines))
        self._arguments = [
            *(sys.executable, "-m", "caudal", "batch", str(self.input), "-o", str(self.output)),
            *("--model", str(model), "--served-model-name", "tiny", "--kv-cache-memory", "64MiB"),
        ]

    def start(self, *extra: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*self._arguments, *extra],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *extra: str, code: int = 0) -> str:
        """What it says on standard error; it must end with `code`."""
        process = self.start(*extra)
        out, err = process.communicate(timeout=120)
        assert process.returncode == code, err
        assert out == ""
        return err

    def start_and_wait(self, num_lines: int) -> subprocess.Popen[str]:
        """Start, and return once so many answers are in the output."""
        process = self.start()
        deadline = time.monotonic() + 60
        while self.num_answers() < num_lines:
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.02)
        return process

    def num_answers(self) -> int:
        return self.output.read_bytes().count(b"\n") if self.output.exists() else 0

    def answers(self) -> list[dict[str, Any]]:
        return [json.loads(text) for text in self.output.read_text().splitlines()]

    def check_complete(self, lines: list[Any]) -> None:
        ids = [answer["custom_id"] for answer in self.answers()]
        assert len(ids) == len(set(ids))
        assert set(ids) == {item["custom_id"] for item in lines}
        assert all(answer["response"]["status_code"] == 200 for answer in self.answers())


def test_every_request_is_answered_and_failures_are_kept_apart(
    tiny_model: Path, tmp_path: Path
) -> None:
    lines = [completion(f"r{i}", model="tiny") for i in range(20)]
    bad = completion("bad", temperature=9)
    command = Command(tiny_model, tmp_path, [*lines, bad])
    said = command.run(code=1)
    assert "21 of 21 requests, 1 failed, 80 tokens" in said
    assert f"1 of 21 requests failed; see {command.errors}" in said
    command.check_complete(lines)
    (error,) = [json.loads(text) for text in command.errors.read_text().splitlines()]
    assert (error["custom_id"], error["response"]["status_code"]) == ("bad", 400)
    # The failed request is tried again; once it is gone, so is the errors file.
    command.input.write_bytes(jsonl([*lines, completion("late")]))
    said = command.run()
    assert "21 of 21 requests, 20 from an earlier run, 4 tokens" in said
    command.check_complete([*lines, completion("late")])
    assert not command.errors.exists()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_interrupted_run_goes_on_where_it_stopped(
    tiny_model: Path, tmp_path: Path, number: signal.Signals
) -> None:
    command = Command(tiny_model, tmp_path, LONG)
    process = command.start_and_wait(1)
    process.send_signal(number)
    _, said = process.communicate(timeout=30)
    num_answers = command.num_answers()
    assert 0 < num_answers < len(LONG)
    if number is signal.SIGINT:
        assert process.returncode == 130
        assert "run the same command to go on" in said
        assert "Traceback" not in said
    if number is signal.SIGKILL:
        with command.output.open("ab") as file:
            file.write(b'{"custom_id":"torn')
    said = command.run()
    assert f"{num_answers} from an earlier run" in said
    command.check_complete(LONG)


def test_lost_engine_ends_the_run_and_loses_no_answer(tiny_model: Path, tmp_path: Path) -> None:
    command = Command(tiny_model, tmp_path, LONG)
    process = command.start_and_wait(1)
    (engine,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(engine), signal.SIGKILL)
    _, said = process.communicate(timeout=30)
    assert process.returncode == 1
    assert "the engine died" in said
    assert "Traceback" not in said
    command.run()
    command.check_complete(LONG)


def test_faults_are_shown_by_file_and_line_before_anything_runs(
    tiny_model: Path, tmp_path: Path
) -> None:
    lines = [completion("a"), b"{", completion("a"), completion("b", model="gpt-4")]
    command = Command(tiny_model, tmp_path, lines)
    said = command.run(code=2)
    assert f"{command.input}:2: The line is not valid JSON" in said
    assert f"{command.input}:3: custom_id: 'a' is already used in line 1" in said
    assert f"{command.input}:4: body.model: 'gpt-4' does not exist" in said
    assert "3 faults" in said
    assert not command.output.exists()


def test_mistaken_paths_are_named(tiny_model: Path, tmp_path: Path) -> None:
    command = Command(tiny_model, tmp_path, [completion("a")])
    same = command.run("--errors", str(command.output), code=2)
    assert "must be files of their own" in same
    nowhere = command.run("-o", str(tmp_path / "none" / "out"), code=2)
    assert "cannot write" in nowhere
    command.output.write_text("precious notes\n")
    assert "line 1 is no result of a batch" in command.run(code=2)
    assert command.output.read_text() == "precious notes\n"
    command.input.unlink()
    assert "there is no file" in command.run(code=2)


def test_two_runs_never_write_one_output(tiny_model: Path, tmp_path: Path) -> None:
    command = Command(tiny_model, tmp_path, [completion("a")])
    with command.output.open("ab") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert "is being written by another run" in command.run(code=2)
    command.run()
    command.check_complete([completion("a")])


@pytest.mark.parametrize(
    ("content", "model"),
    [
        (jsonl([completion("a", model="m")]), "m"),
        (b"\n" + jsonl([completion("a", model="m"), completion("b", model="n")]), "m"),
        (jsonl([completion("a")]), None),
        (b"broken\n", None),
        (jsonl([line("a", body=[])]), None),
        (jsonl([completion("a", model=7)]), None),
        (b"", None),
    ],
)
def test_model_of_the_first_line_is_found(
    tmp_path: Path, content: bytes, model: str | None
) -> None:
    (tmp_path / "in.jsonl").write_bytes(content)
    assert first_model(tmp_path / "in.jsonl") == model
