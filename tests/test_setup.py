"""Setting up: what the machine lacks is said in one line before anything is installed."""

from __future__ import annotations

import importlib.util
import shutil
import sys
import sysconfig
from pathlib import Path

import pytest

from tools import check_python

ROOT = Path(__file__).resolve().parent.parent


def test_a_complete_machine_has_no_problem() -> None:
    assert check_python.find_problem() is None


def test_old_python_is_named_with_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 10, 4))
    assert check_python.find_problem() == (
        "Python 3.11 or newer is needed, this is 3.10.4 (choose one with PYTHON=...)"
    )


def test_missing_venv_headers_and_compiler_are_told_apart(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(importlib.util, "find_spec", lambda _name: None)
        assert "python3-venv" in (check_python.find_problem() or "")
    with monkeypatch.context() as patch:
        patch.setattr(sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
        assert "python3-dev" in (check_python.find_problem() or "")
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "which", lambda _name: None)
        assert "g++" in (check_python.find_problem() or "")


def test_continuous_integration_runs_make_test() -> None:
    script = ROOT / ".ci" / "run"
    assert script.stat().st_mode & 0o111
    assert script.read_text("utf-8").rstrip().endswith("exec make test")
