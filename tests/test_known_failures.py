"""Every known failure of other systems is guarded by a test, or it is said why not."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

from tests.known_failures import CASES, NOT_APPLICABLE

TESTS = Path(__file__).resolve().parent
_NAME = re.compile(r"\bB\d{2,3}\b")


def guards() -> dict[str, list[str]]:
    """Tests by the cases that their docstrings, or those of their modules, name."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    for path in TESTS.rglob("test_*.py"):
        tree = ast.parse(path.read_text("utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.Module):
                name = ""
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                name = f"::{node.name}"
            else:
                continue
            if not name or name.startswith("::test_"):
                for case in _NAME.findall(ast.get_docstring(node) or ""):
                    found[case].append(f"{path.relative_to(TESTS)}{name}")
    return found


def test_no_case_is_forgotten_and_none_is_named_that_does_not_exist() -> None:
    assert len(CASES) == 78
    found = guards()
    missing = [case for case in CASES if case not in found and case not in NOT_APPLICABLE]
    assert missing == []
    assert sorted(set(found) - set(CASES)) == []
    assert sorted(set(NOT_APPLICABLE) - set(CASES)) == []


def test_a_reason_disappears_when_there_is_a_test() -> None:
    found = guards()
    assert [case for case in NOT_APPLICABLE if case in found] == []
    assert all(len(reason) > 20 for reason in NOT_APPLICABLE.values())
