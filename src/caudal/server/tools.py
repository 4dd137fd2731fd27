"""The tools of a request: checked, and resolved to what may be called."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from caudal.errors import InvalidRequestError
from caudal.server.protocol.tools import (
    MAX_NAME_LENGTH,
    FunctionSpec,
    ToolChoice,
    ToolChoiceObject,
    ToolRef,
    ToolSpec,
)

MAX_DEPTH = 64
"""Of schemas, and of arguments in earlier messages."""
MAX_SCHEMA_VALUES = 10_000
"""In the parameters of one function."""

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")


class ToolMode(StrEnum):
    """Whether the model calls."""

    AUTO = "auto"
    REQUIRED = "required"


@dataclass(frozen=True, slots=True)
class Function:
    """A function and where the request defines it."""

    spec: FunctionSpec
    index: int


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools that the model is shown, and which of them it may or must call."""

    shown: tuple[FunctionSpec, ...]
    callable: tuple[Function, ...]
    mode: ToolMode
    max_calls: int | None = None

    @property
    def names(self) -> frozenset[str]:
        """Of the functions that may be called."""
        return frozenset(function.spec.name for function in self.callable)

    @property
    def parameters(self) -> dict[str, dict[str, Any]]:
        """Schemas of the arguments of the functions that may be called."""
        return {f.spec.name: f.spec.parameters or {} for f in self.callable}

    @property
    def is_strict(self) -> bool:
        """Whether calls that the model makes of its own accord are held to a schema."""
        return any(function.spec.strict for function in self.callable)

    def template_tools(self) -> list[dict[str, Any]]:
        """The tools as chat templates take them."""
        return [{"type": "function", "function": function_entry(spec)} for spec in self.shown]


def function_entry(spec: FunctionSpec) -> dict[str, Any]:
    """A function as models are shown it."""
    entry: dict[str, Any] = {"name": spec.name}
    if spec.description is not None:
        entry["description"] = spec.description
    entry["parameters"] = spec.parameters or {"type": "object", "properties": {}}
    return entry


def resolve_tools(
    tools: Sequence[ToolSpec] | None, choice: ToolChoice | None, *, is_parallel: bool
) -> ToolUse | None:
    """What may be called; None for nothing (no tools, or `tool_choice: "none"`).

    Raises InvalidRequestError naming the field of a chat completion request.
    """
    functions = _checked_functions(tools or [])
    if not functions:
        if choice not in (None, "none", "auto"):
            raise _error("tool_choice", "only allowed with tools")
        return None
    mode, chosen = _resolve_choice(choice, functions)
    if mode is None:
        return None
    is_single = not is_parallel or (
        isinstance(choice, ToolChoiceObject) and choice.type == "function"
    )
    shown = tuple(function.spec for function in functions)
    return ToolUse(shown, chosen, mode, 1 if is_single else None)


def _checked_functions(tools: Sequence[ToolSpec]) -> tuple[Function, ...]:
    functions: dict[str, Function] = {}
    for index, tool in enumerate(tools):
        where = f"tools[{index}]"
        if tool.type != "function":
            problem = f"tools of type {tool.type[:64]!r} are not supported; only functions are"
            raise _error(f"{where}.type", problem, code="unsupported")
        spec = tool.function
        if spec is None:
            raise _error(f"{where}.function", "this field is required")
        if _NAME.fullmatch(spec.name) is None:
            raise _error(
                f"{where}.function.name",
                f"must be 1 to {MAX_NAME_LENGTH} letters, digits, _, . and -",
            )
        if spec.name in functions:
            raise _error(f"{where}.function.name", f"{spec.name!r} is defined twice")
        _check_schema(spec.parameters or {}, f"{where}.function.parameters")
        functions[spec.name] = Function(spec, index)
    return tuple(functions.values())


def _check_schema(schema: dict[str, Any], where: str) -> None:
    kind = schema.get("type", "object")
    if kind != "object":
        raise _error(f"{where}.type", f'must be "object", got {str(kind)[:64]!r}')
    if not isinstance(schema.get("properties", {}), dict):
        raise _error(f"{where}.properties", "must be an object")
    if check_depth(schema, where) > MAX_SCHEMA_VALUES:
        raise _error(where, f"at most {MAX_SCHEMA_VALUES} values in a schema")


def check_depth(value: Any, where: str) -> int:
    """The number of values in a JSON value. Raises InvalidRequestError if it is nested absurdly."""
    num_values = 0
    level = [value]
    for _ in range(MAX_DEPTH):
        num_values += len(level)
        level = [child for value in level for child in _children(value)]
        if not level:
            return num_values
    raise _error(where, f"nested more than {MAX_DEPTH} levels deep")


def _children(value: object) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def _resolve_choice(
    choice: ToolChoice | None, functions: tuple[Function, ...]
) -> tuple[ToolMode | None, tuple[Function, ...]]:
    if isinstance(choice, ToolChoiceObject):
        return _resolve_object(choice, functions)
    if choice == "none":
        return None, ()
    if choice not in (None, "auto", "required"):
        problem = f"must be none, auto, required or an object, got {choice[:64]!r}"
        raise _error("tool_choice", problem)
    return ToolMode(choice or "auto"), functions


def _resolve_object(
    choice: ToolChoiceObject, functions: tuple[Function, ...]
) -> tuple[ToolMode, tuple[Function, ...]]:
    by_name = {function.spec.name: function for function in functions}
    if choice.type == "function":
        if choice.function is None:
            raise _error("tool_choice.function", "this field is required")
        named = _find(choice.function.name, by_name, "tool_choice.function.name")
        return ToolMode.REQUIRED, (named,)
    if choice.type != "allowed_tools":
        problem = f"must be function or allowed_tools, got {choice.type[:64]!r}"
        raise _error("tool_choice.type", problem)
    allowed = choice.allowed_tools
    if allowed is None:
        raise _error("tool_choice.allowed_tools", "this field is required")
    if allowed.mode not in ("auto", "required"):
        problem = f"must be auto or required, got {allowed.mode[:64]!r}"
        raise _error("tool_choice.allowed_tools.mode", problem)
    chosen = {
        function.spec.name: function
        for index, ref in enumerate(allowed.tools)
        for function in [_find_ref(ref, by_name, f"tool_choice.allowed_tools.tools[{index}]")]
    }
    return ToolMode(allowed.mode), tuple(chosen.values())


def _find_ref(ref: ToolRef, by_name: dict[str, Function], where: str) -> Function:
    if ref.type != "function" or ref.function is None:
        raise _error(where, "must name a function")
    return _find(ref.function.name, by_name, f"{where}.function.name")


def _find(name: str, by_name: dict[str, Function], where: str) -> Function:
    if name not in by_name:
        raise _error(where, f"{name[:64]!r} is not among the tools")
    return by_name[name]


@contextmanager
def renamed_fields(patterns: Sequence[tuple[str, str]]) -> Iterator[None]:
    """Give errors about tools the field names of another API: each (pattern, replacement)."""
    try:
        yield
    except InvalidRequestError as error:
        old = new = error.param or ""
        for pattern, replacement in patterns:
            new = re.sub(f"^{pattern}", replacement, new)
        if new != old:
            error.param = new
            error.message = new + error.message.removeprefix(old)
        raise


def _error(param: str, problem: str, *, code: str = "invalid_value") -> InvalidRequestError:
    return InvalidRequestError(f"{param}: {problem}.", param=param, code=code)
