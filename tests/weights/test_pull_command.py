"""`caudal pull` as a user runs it."""

from __future__ import annotations

from pathlib import Path

import pytest

from caudal.cli.main import main
from tests.tiny_models import make_tiny_model


def _pull(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(["pull", *arguments])
    code = caught.value.code
    assert isinstance(code, int)
    return code


def test_path_goes_to_stdout_and_the_rest_to_stderr(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = make_tiny_model(tmp_path / "tiny.gguf", "qwen3")
    assert _pull(str(tmp_path)) == 0
    captured = capsys.readouterr()
    assert captured.out == f"{path}\n"
    assert captured.err.startswith("Tiny qwen3: qwen3, 2 layers, ")


def test_unknown_model_fails_with_the_known_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert _pull("no-such-model") == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Known models: smollm2-135m" in captured.err


def test_damaged_file_fails_naming_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = make_tiny_model(tmp_path / "tiny.gguf")
    path.write_bytes(path.read_bytes()[:-1000])
    assert _pull(str(path)) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "tiny.gguf: tensor 'output.weight'" in captured.err
