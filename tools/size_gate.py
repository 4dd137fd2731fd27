"""Checks the size limits of files, classes and functions, and prints lines per package.

A hard limit always fails. A soft limit fails unless `tools/size_allow.txt` lists the place with a
reason; an entry that is no longer needed fails too, so the list can only shrink by itself.
"""

from __future__ import annotations

import argparse
import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PYTHON_ROOTS = ("src", "tests", "tools", "benchmarks")
CPP_ROOT = "csrc"
CPP_SUFFIXES = (".cpp", ".cc", ".h", ".hpp", ".inc")


@dataclass(frozen=True, slots=True)
class Limit:
    """Lines (or parameters) of one kind: above `soft` needs a reason, above `hard` fails."""

    what: str
    soft: int
    hard: int


PYTHON_FILE = Limit("file", 500, 800)
PYTHON_FUNCTION = Limit("function", 50, 100)
PYTHON_CLASS = Limit("class", 400, 400)
PYTHON_PARAMETERS = Limit("parameters", 6, 6)
CPP_FILE = Limit("file", 800, 800)


@dataclass(frozen=True, slots=True)
class Finding:
    """Something above its soft limit; `place` is a path, or path::qualified.name."""

    place: str
    limit: Limit
    size: int

    @property
    def is_hard(self) -> bool:
        return self.size > self.limit.hard

    def __str__(self) -> str:
        bound = self.limit.hard if self.is_hard else self.limit.soft
        return f"{self.place}: {self.limit.what} is {self.size}, limit {bound}"


def check_python(place: str, source: str) -> Iterator[Finding]:
    """Findings of one Python file; raises SyntaxError when it does not parse."""
    yield from _above(place, PYTHON_FILE, _num_lines(source))
    yield from _check_body(place + "::", ast.parse(source).body, is_class_body=False)


def check_cpp(place: str, source: str) -> Iterator[Finding]:
    """Findings of one C++ file (its length)."""
    yield from _above(place, CPP_FILE, _num_lines(source))


def _check_body(prefix: str, body: list[ast.stmt], *, is_class_body: bool) -> Iterator[Finding]:
    for node in body:
        if isinstance(node, ast.ClassDef):
            place = prefix + node.name
            yield from _above(place, PYTHON_CLASS, _span(node))
            yield from _check_body(place + ".", node.body, is_class_body=True)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            place = prefix + node.name
            yield from _above(place, PYTHON_FUNCTION, _span(node))
            yield from _above(place, PYTHON_PARAMETERS, _num_parameters(node, is_class_body))
            yield from _check_body(place + ".", node.body, is_class_body=False)
        elif isinstance(node, ast.If | ast.Try | ast.With):
            nested = [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt)]
            yield from _check_body(prefix, nested, is_class_body=is_class_body)


def _above(place: str, limit: Limit, size: int) -> Iterator[Finding]:
    if size > limit.soft:
        yield Finding(place, limit, size)


def _num_lines(source: str) -> int:
    return len(source.splitlines())


def _span(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    assert node.end_lineno is not None
    return node.end_lineno - node.lineno + 1


def _num_parameters(node: ast.FunctionDef | ast.AsyncFunctionDef, is_method: bool) -> int:
    arguments = node.args
    count = len(arguments.posonlyargs) + len(arguments.args) + len(arguments.kwonlyargs)
    count += (arguments.vararg is not None) + (arguments.kwarg is not None)
    is_static = any(isinstance(d, ast.Name) and d.id == "staticmethod" for d in node.decorator_list)
    return count - 1 if is_method and not is_static else count


def iter_sources(root: Path) -> Iterator[tuple[str, Path]]:
    """(path relative to `root`, file) of every source file under the gate, sorted."""
    for folder in PYTHON_ROOTS:
        for path in sorted((root / folder).rglob("*.py")):
            yield path.relative_to(root).as_posix(), path
    for path in sorted((root / CPP_ROOT).rglob("*")):
        if path.suffix in CPP_SUFFIXES:
            yield path.relative_to(root).as_posix(), path


def find_all(root: Path) -> list[Finding]:
    """Everything above a soft limit in the tree at `root`."""
    findings: list[Finding] = []
    for place, path in iter_sources(root):
        check = check_python if path.suffix == ".py" else check_cpp
        findings.extend(check(place, path.read_text(encoding="utf-8")))
    return findings


def read_allow_list(text: str) -> dict[str, str]:
    """`place  # reason` lines as {place: reason}; raises ValueError for a line without a reason."""
    allowed: dict[str, str] = {}
    for line in text.splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        place, _, reason = line.partition("#")
        if not reason.strip():
            raise ValueError(f"allow list: no reason given for {line.strip()!r}")
        allowed[place.strip()] = reason.strip()
    return allowed


def judge(findings: list[Finding], allowed: dict[str, str]) -> list[str]:
    """One message for each failure: what is too large, and which allowances are stale."""
    failures = [str(f) for f in findings if f.is_hard or f.place not in allowed]
    places = {f.place for f in findings}
    failures += [f"{p}: allowed, but within its limits now" for p in allowed if p not in places]
    return failures


def package_of(place: str) -> str:
    """The group that a file's lines count for: src/caudal/x/…, csrc/…, else the top folder."""
    parts = place.split("/")
    if parts[:2] == ["src", "caudal"]:
        return "/".join(parts[:3]) if len(parts) > 3 else "src/caudal"
    return parts[0]


def count_lines(root: Path) -> dict[str, int]:
    """Lines per package."""
    totals: dict[str, int] = {}
    for place, path in iter_sources(root):
        lines = _num_lines(path.read_text(encoding="utf-8"))
        totals[package_of(place)] = totals.get(package_of(place), 0) + lines
    return totals


def count_delta(root: Path, base: str) -> dict[str, int]:
    """Lines added minus removed per package since the commit `base`; empty without git."""
    command = ["git", "-C", str(root), "diff", "--numstat", "--no-renames", base, "--"]
    done = subprocess.run([*command, *PYTHON_ROOTS, CPP_ROOT], capture_output=True, text=True)
    delta: dict[str, int] = {}
    for line in done.stdout.splitlines() if done.returncode == 0 else ():
        added, removed, place = line.split("\t")
        if added.isdigit() and place.endswith((".py", *CPP_SUFFIXES)):
            change = int(added) - int(removed)
            delta[package_of(place)] = delta.get(package_of(place), 0) + change
    return delta


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parent.parent)
    parser.add_argument("--base", default="HEAD~1", help="commit that the deltas refer to")
    options = parser.parse_args(argv)

    totals, delta = count_lines(options.root), count_delta(options.root, options.base)
    for package, lines in sorted(totals.items()):
        change = f"{delta[package]:+d}" if package in delta else ""
        print(f"{package:28} {lines:6d} {change}".rstrip())
    print(f"{'total':28} {sum(totals.values()):6d}")

    allow_file = options.root / "tools" / "size_allow.txt"
    allowed = read_allow_list(allow_file.read_text("utf-8")) if allow_file.exists() else {}
    failures = judge(find_all(options.root), allowed)
    for failure in failures:
        print(f"size gate: {failure}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
