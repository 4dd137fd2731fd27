"""The choice of kernels, and that the stub file tells the truth about the native module."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

import pytest

import caudal
from caudal import _native
from caudal.errors import ConfigError
from caudal.ops import create_backend

STUB = Path(caudal.__file__).parent / "_native.pyi"


def test_portable_kernels_are_always_there() -> None:
    assert _native.available_isas()[-1] == "ref"
    assert set(_native.available_isas()) <= set(_native.isa_names())


def test_best_kernels_are_the_default() -> None:
    """B149: by the capability score, which measurements have ordered."""
    assert create_backend(num_threads=1).isa == _native.available_isas()[0]


@pytest.mark.parametrize("isa", _native.isa_names())
def test_forced_isa_is_used_or_refused_with_a_reason(isa: str) -> None:
    if isa in _native.available_isas():
        assert create_backend(num_threads=1, isa=isa).isa == isa
    else:
        with pytest.raises(ConfigError, match="not supported by this CPU"):
            create_backend(num_threads=1, isa=isa)


def test_unknown_isa_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"unknown instruction set 'sse9' \(available: .*ref\)"):
        create_backend(num_threads=1, isa="sse9")


def test_unknown_backend_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown backend 'gpu'"):
        create_backend("gpu")


def parameters(arguments: ast.arguments) -> list[str]:
    """Names, those with a default marked "="."""
    first_default = len(arguments.args) - len(arguments.defaults)
    names = [argument.arg for argument in arguments.args]
    return [name + ("=" if i >= first_default else "") for i, name in enumerate(names)]


def stub_members(body: list[ast.stmt], prefix: str = "") -> dict[str, list[str] | None]:
    """Dotted name -> parameter names (None: no function) of what a stub declares."""
    members: dict[str, list[str] | None] = {}
    for node in body:
        if isinstance(node, ast.ClassDef):
            members[prefix + node.name] = None
            members |= stub_members(node.body, f"{prefix}{node.name}.")
        elif isinstance(node, ast.FunctionDef):
            decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
            is_property = "property" in decorators
            members[prefix + node.name] = None if is_property else parameters(node.args)
        elif isinstance(node, ast.AnnAssign) and prefix:
            members[prefix + ast.unparse(node.target)] = None
    return members


def native_parameters(function: object) -> list[str]:
    """Parameter names of a bound function, those with a default marked "="."""
    signatures = function.__nb_signature__  # type: ignore[attr-defined]
    assert len(signatures) == 1, "overloads are not expected"
    text = re.sub(r"ndarray\[[^]]*]", "ndarray", re.sub(r"\\\d+", "None", signatures[0][0]))
    return parameters(ast.parse(text + ": ...").body[0].args)  # type: ignore[attr-defined]


def native_members(owner: object, prefix: str = "") -> dict[str, list[str] | None]:
    members: dict[str, list[str] | None] = {}
    for name, value in vars(owner).items():
        if name.startswith("_") and name != "__init__":
            continue
        if inspect.isclass(value) or inspect.ismodule(value):
            members[prefix + name] = None
            members |= native_members(value, f"{prefix}{name}.")
        elif hasattr(value, "__nb_signature__"):
            members[prefix + name] = native_parameters(value)
        else:
            members[prefix + name] = None
    return members


def test_stub_declares_exactly_what_the_module_offers() -> None:
    declared = stub_members(ast.parse(STUB.read_text()).body)
    offered = native_members(_native)
    for name in [name for name in offered if name.endswith(".__init__")]:
        if name not in declared:
            del offered[name]
    assert declared == offered
