"""The documents mention what exists: flags, files, commands."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from caudal.cli import chat, serve
from caudal.cli.flags import Flag, field_default
from caudal.cli.main import COMMANDS

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = sorted(
    [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").glob("*.md")]
)
FOREIGN_FLAGS = {
    "--strict",
    *("--tasks", "--limit", "--include_path", "--apply_chat_template", "--num_fewshot"),
    *("--model_args", "--batch_size"),
    *("--no-kv-unified", "--no-repack"),
}
"""Of other programs that the documents mention: mypy, lm_eval, llama-server."""


def names_of(flags: tuple[Flag, ...]) -> set[str]:
    switches = {f"--no-{flag.name.removeprefix('--')}" for flag in flags if flag.parse is None}
    return {flag.name for flag in flags} | switches


def known_flags() -> set[str]:
    known = names_of(serve.SERVE_FLAGS) | names_of(chat.CHAT_FLAGS) | FOREIGN_FLAGS
    scripts = [*(ROOT / "benchmarks").glob("*.py"), *(ROOT / "tools").glob("*.py")]
    for path in [*scripts, *(ROOT / "src/caudal/cli").glob("*.py")]:
        known |= set(re.findall(r'"(--[a-z][a-z-]+)"', path.read_text("utf-8")))
    return known | {"--help", "--version"}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_documents_mention_only_flags_that_exist(document: Path) -> None:
    mentioned = set(re.findall(r"(?<![\w-])--[a-z][a-z_-]+", document.read_text("utf-8")))
    assert mentioned - known_flags() == set()


def test_readme_explains_every_flag_of_serve() -> None:
    text = (ROOT / "README.md").read_text("utf-8")
    for flag in serve.SERVE_FLAGS:
        names = {flag.name, f"--no-{flag.name.removeprefix('--')}"}
        assert any(f"`{name}`" in text for name in names), f"{flag.name} is not in the README"


def test_readme_shows_the_defaults_of_the_configuration() -> None:
    """The table repeats defaults for people; this keeps them true."""
    text = (ROOT / "README.md").read_text("utf-8")
    rows = dict(re.findall(r"^\| `(--[a-z-]+)` \| ([^|]*) \|", text, re.MULTILINE))
    for flag in serve.SERVE_FLAGS:
        default = field_default(flag.config, flag.field)
        if isinstance(default, int | float) and not isinstance(default, bool) and default:
            assert float(rows[flag.name].replace(",", "")) == default, flag.name


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_documents_name_only_files_that_exist(document: Path) -> None:
    text = document.read_text("utf-8")
    paths = set(re.findall(r"`((?:src|docs|tests|tools|benchmarks|csrc)/[\w./-]+\w)`", text))
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_documents_mention_only_commands_that_exist() -> None:
    known = {command.path[0] for command in COMMANDS}
    for document in DOCUMENTS:
        for word in re.findall(r"`caudal ([a-z]+)", document.read_text("utf-8")):
            assert word in known, f"{document.name}: caudal {word}"


def test_architecture_stays_short() -> None:
    document = ROOT / "docs" / "architecture.md"
    assert len(document.read_text("utf-8").splitlines()) <= 120


def members_by_class() -> dict[str, set[str]]:
    """Methods and annotated fields of every class of the package, bases not followed."""
    found: dict[str, set[str]] = {}
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ClassDef):
                members = found.setdefault(node.name, set())
                for item in node.body:
                    if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef):
                        members.add(item.name)
                    elif isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
                        members.add(item.target.id)
    return found


def test_architecture_names_only_methods_that_exist() -> None:
    """The trace of a request is worth its lines only while every name in it can be found."""
    text = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    members = members_by_class()
    named = set(re.findall(r"\b([A-Z][A-Za-z]+)\.(_?[a-z]\w*)", text))
    known = {(name, member) for name, member in named if member in members.get(name, ())}
    assert len(known) >= 20
    assert named - known == set()
