"""The import direction of the package, and what importing it may not cost."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parent.parent / "src" / "caudal"

LAYERS = (
    "cli",
    "bench",
    "server",
    "diagnosis",
    "llm",
    "tokenizer",
    "engine",
    "simulation",
    "scheduler",
    "kv_cache",
    "executor",
    "worker",
    "structured_output",
    "models",
    "weights",
    "ops",
    "metrics",
)
"""Top to bottom: a module imports only from its own layer and those after it."""

LEAVES = ("config", "errors", "sampling_params", "step_io")
"""Below all layers; they import only each other."""

NATIVE = "_native"
"""The compiled module; `ops` is its only door."""

FORBIDDEN_PACKAGES = ("torch", "transformers")


def layer_of(module: str) -> str:
    """The layer, leaf or special module that a dotted name under caudal belongs to."""
    parts = module.split(".")
    if len(parts) == 1:
        return "caudal"
    return "cli" if parts[1] == "__main__" else parts[1]


def imported_modules(source: str) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of each import at any depth, also under TYPE_CHECKING."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide the direction"
            assert node.module is not None
            if node.module == "caudal":
                # `from caudal import config` names a module, `from caudal import LLM` the facade.
                for alias in node.names:
                    is_module = alias.name in (*LAYERS, *LEAVES, NATIVE)
                    yield node.lineno, f"caudal.{alias.name if is_module else 'llm'}"
            else:
                yield node.lineno, node.module


def violations(module: str, source: str) -> list[str]:
    """Imports in `module` that point upwards or leave the known layers."""
    own, found = layer_of(module), []
    for line, target in imported_modules(source):
        if target.split(".")[0] in FORBIDDEN_PACKAGES:
            found.append(f"{module}:{line} imports {target}")
        if target.split(".")[0] != "caudal":
            continue
        other = layer_of(target)
        if not _may_import(own, other):
            found.append(f"{module}:{line} ({own}) imports {target} ({other})")
    return found


def _may_import(own: str, other: str) -> bool:
    if other in LEAVES or own == other:
        return True
    if other == NATIVE:
        return own == "ops"
    if other not in LAYERS or own in LEAVES:
        return False
    # The package root exposes the facade, lazily.
    if own == "caudal":
        return other == "llm"
    return LAYERS.index(own) < LAYERS.index(other)


def all_modules() -> list[tuple[str, Path]]:
    found = []
    for path in sorted(SOURCE.rglob("*.py")):
        parts = ("caudal", *path.relative_to(SOURCE).with_suffix("").parts)
        found.append((".".join(p for p in parts if p != "__init__"), path))
    return found


@pytest.mark.parametrize(("module", "path"), all_modules(), ids=[m for m, _ in all_modules()])
def test_module_imports_only_from_below(module: str, path: Path) -> None:
    assert layer_of(module) in (*LAYERS, *LEAVES, "caudal"), f"{module} is in no known layer"
    assert violations(module, path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("caudal.ops.cpu", "from caudal.models import llama"),
        ("caudal.config", "import caudal.scheduler.core"),
        ("caudal.engine.core", "from caudal import LLM"),
        ("caudal.worker.x", "def f():\n    from caudal.scheduler.output import RequestOutput"),
        (
            "caudal.kv_cache.x",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import caudal.engine.core",
        ),
        ("caudal.engine.core", "import torch"),
        ("caudal.metrics.x", "import caudal.unheard_of"),
        ("caudal.worker.x", "from caudal import _native"),
    ],
)
def test_checker_sees_an_upward_or_forbidden_import(module: str, source: str) -> None:
    assert len(violations(module, source)) == 1


def test_command_line_starts_without_the_heavy_packages() -> None:
    """`caudal --help` and errors in flags must not pay for NumPy, the server or the kernels."""
    heavy = (
        "typer",
        "numpy",
        "starlette",
        "uvicorn",
        "tokenizers",
        "zmq",
        "caudal.llm",
        "caudal.ops.cpu",
    )
    code = (
        "import sys, caudal.cli.main, caudal.cli.serve;"
        f"print([m for m in {heavy!r} if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_server_is_ready_without_the_packages_that_it_rarely_needs() -> None:
    """Each of these takes from 30 to 300 ms of every start; they are loaded on first use."""
    heavy = ("typer", "rich", "starlette", "pydantic", "huggingface_hub", "prometheus_client")
    code = (
        "import sys, caudal.cli.serve, caudal.weights.download, caudal.engine.zmq_client;"
        "import caudal.server.lifecycle, caudal.server.app, caudal.server.http_server;"
        "import caudal.server.loading, caudal.engine.process;"
        f"print([m for m in {heavy!r} if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
