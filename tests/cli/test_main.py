"""The command as a user runs it: help, version, and one line for every mistake."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from caudal.cli import main
from caudal.errors import CaudalError, ConfigError

SOURCE = Path(__file__).resolve().parents[2] / "src"


def run(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "caudal", *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(SOURCE), "COLUMNS": "200"},
    )


def test_help_lists_every_command_with_its_summary() -> None:
    done = run("--help")
    assert done.returncode == 0
    for command in main.COMMANDS:
        assert command.path[0] in done.stdout
        if len(command.path) == 1:
            assert command.summary in done.stdout


def test_no_arguments_show_the_help_instead_of_an_error() -> None:
    assert run().stdout == run("--help").stdout


@pytest.mark.parametrize("command", main.COMMANDS, ids=lambda c: " ".join(c.path))
def test_every_command_loads_and_explains_itself(command: main.Command) -> None:
    done = run(*command.path, "--help")
    assert done.returncode == 0, done.stderr
    assert command.summary in done.stdout


def test_serve_help_shows_documented_defaults() -> None:
    text = " ".join(run("serve", "--help").stdout.split())
    assert "--port N Port to listen on; 0 picks a free one. [default: 8000]" in text
    assert "[default: smollm2-135m]" in text
    assert "--enable-prefix-caching / --no-enable-prefix-caching" in text
    assert "[default: --enable-prefix-caching]" in text


def test_version_is_printed() -> None:
    done = run("--version")
    assert done.returncode == 0
    assert done.stdout.startswith("caudal ")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("serve", "--port", "99999"), "--port: must be between 0 and 65535, got 99999"),
        (("serve", "--hots", "x"), "No such option: --hots"),
        (("serve", "--port"), "--port"),
        (("serve", "a", "b"), "b"),
        (("sevre",), "sevre"),
        (("chat", "--temperature", "9"), "--temperature: must be between 0 and 2, got 9"),
        (("chat", "--url", "ftp://x"), "--url: must look like"),
    ],
)
def test_wrong_argument_is_one_line_and_exit_code_2(arguments: tuple[str, ...], named: str) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("caudal: ")
    assert len(done.stderr.splitlines()) == 1
    assert named in done.stderr


def test_unknown_model_is_one_line_and_not_a_traceback() -> None:
    done = run("serve", "no-such-model-anywhere.gguf", "--port", "0")
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert "no-such-model-anywhere.gguf" in done.stderr


@pytest.mark.parametrize(
    ("error", "code"),
    [(ConfigError("bad\nflag"), 2), (CaudalError("broken"), 1), (KeyboardInterrupt(), 130)],
)
def test_typed_errors_become_one_line_and_an_exit_code(
    error: BaseException,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(_argv: list[str]) -> None:
        raise error

    monkeypatch.setattr(main, "run_command", fail)
    with pytest.raises(SystemExit) as caught:
        main.main(["serve"])
    assert caught.value.code == code
    said = capsys.readouterr().err
    assert len(said.splitlines()) == (0 if code == 130 else 1)
    assert "Traceback" not in said


def test_an_unexpected_error_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hiding a bug behind one friendly line would cost the person who has to fix it."""

    def fail(_argv: list[str]) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(main, "run_command", fail)
    with pytest.raises(ZeroDivisionError):
        main.main(["serve"])
