"""Command-line flags made from configuration fields: default, help and limit are written once."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import MISSING, dataclass, fields
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

from caudal.cli.units import Parser

if TYPE_CHECKING:
    import inspect

Values = dict[type, dict[str, Any]]
"""Checked values of the flags that were given, by config and field."""


@dataclass(frozen=True, slots=True)
class Flag:
    """One option that sets `config.field`; `parse` checks the text. `parse` None: a switch."""

    name: str
    config: type
    field: str
    parse: Parser | None
    metavar: str = ""
    help: str = ""
    """Replaces the field's docstring where the command line says it differently."""
    short: str = ""
    """A second, shorter name, such as -o."""
    is_repeatable: bool = False
    """May be given several times; the field gets all values."""


@dataclass(frozen=True, slots=True)
class Positional:
    """The argument of a command."""

    name: str
    default: str | None
    help: str
    metavar: str = "MODEL"
    is_required: bool = False


def field_docstrings(config: type) -> dict[str, str]:
    """The string under each field of a dataclass, read from its source; empty without source."""
    import ast
    import inspect

    try:
        tree = ast.parse(inspect.getsource(sys.modules[config.__module__]))
    except (OSError, TypeError):
        return {}
    found: dict[str, str] = {}
    for node in tree.body:
        if not (isinstance(node, ast.ClassDef) and node.name == config.__name__):
            continue
        for statement, following in zip(node.body, node.body[1:], strict=False):
            if (
                isinstance(statement, ast.AnnAssign)
                and isinstance(statement.target, ast.Name)
                and isinstance(following, ast.Expr)
                and isinstance(following.value, ast.Constant)
                and isinstance(following.value.value, str)
            ):
                found[statement.target.id] = " ".join(following.value.value.split())
    return found


def field_default(config: type, name: str) -> Any:
    """The default of a dataclass field."""
    default = next(field.default for field in fields(config) if field.name == name)
    assert default is not MISSING, f"{config.__name__}.{name} has no default to show"
    return default


def create_command(
    run: Callable[[Any, Values], None],
    model: Positional | None,
    flags: Iterable[Flag],
    *,
    is_help: bool,
) -> Callable[..., None]:
    """A function whose signature typer turns into options.

    It parses every flag that was given and calls `run(model, {config: {field: value}})` with
    those, with None for the model if the command has no such argument; a field without its flag
    keeps the default of its config. Help texts are collected only if `is_help`, because reading
    them costs a parse of the sources.
    """
    import inspect

    flags = tuple(flags)

    def command(**given: Any) -> None:
        positional = given.pop(model.name) if model else None
        run(positional, parse_flags(flags, given))

    parameters = [_positional_parameter(model)] if model else []
    docstrings = {c: field_docstrings(c) for c in {f.config for f in flags}} if is_help else {}
    for flag in flags:
        help_text = flag.help or docstrings.get(flag.config, {}).get(flag.field, "")
        parameters.append(_flag_parameter(flag, help_text))
    command.__doc__ = run.__doc__
    command.__name__ = run.__name__
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    return command


def parse_flags(flags: Iterable[Flag], given: dict[str, Any]) -> Values:
    """Checked values of the flags that were given; raises ConfigError."""
    values: Values = {}
    for flag in flags:
        of_config = values.setdefault(flag.config, {})
        text = given[_parameter_name(flag)]
        if flag.is_repeatable and flag.parse:
            if text:
                of_config[flag.field] = tuple(flag.parse(flag.name, item) for item in text)
        elif text is not None:
            of_config[flag.field] = flag.parse(flag.name, text) if flag.parse else text
    return values


def parse_plain(
    argv: Sequence[str], model: Positional, flags: Sequence[Flag]
) -> tuple[str, Values] | None:
    """What typer would make of `argv`, or None where it may see something else in it.

    Understands `--flag value`, `--flag=value`, switches and the positional argument. Help, short
    names and every mistake are left to typer, whose import takes longer than an engine's.
    Raises ConfigError for a value out of range.
    """
    if model.default is None or not all(map(_is_plain, argv)):
        return None
    given: dict[str, Any] = dict.fromkeys(map(_parameter_name, flags))
    by_name = {flag.name: flag for flag in flags}
    positionals: list[str] = []
    rest = iter(argv)
    for word in rest:
        name, equals, value = word.partition("=")
        flag = by_name.get(name)
        if not word.startswith("-"):
            positionals.append(word)
        elif flag is not None and flag.parse is not None:
            value = value if equals else next(rest, "")
            if not value or (value.startswith("-") and not equals):
                return None
            parameter = _parameter_name(flag)
            given[parameter] = [*(given[parameter] or ()), value] if flag.is_repeatable else value
        else:
            switch = flag or by_name.get(f"--{name.removeprefix('--no-')}")
            if switch is None or switch.parse is not None or equals:
                return None
            given[_parameter_name(switch)] = flag is not None
    if len(positionals) > 1:
        return None
    return (positionals or [model.default])[0], parse_flags(flags, given)


def _is_plain(word: str) -> bool:
    """Whether every parser takes the word as it is: not empty, no lone surrogates."""
    return word != "" and (word.isascii() or word.isprintable())


def _parameter_name(flag: Flag) -> str:
    return flag.name.removeprefix("--").replace("-", "_")


def _positional_parameter(model: Positional) -> inspect.Parameter:
    import inspect

    import typer

    argument = typer.Argument(help=model.help, metavar=model.metavar)
    is_given = model.is_required or model.default
    annotation = Annotated[str if is_given else str | None, argument]  # type: ignore[valid-type]
    default = inspect.Parameter.empty if model.is_required else model.default
    return inspect.Parameter(
        model.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
    )


def _flag_parameter(flag: Flag, help_text: str) -> inspect.Parameter:
    import inspect

    import typer

    default = field_default(flag.config, flag.field)
    shown = _show_default(flag, default)
    if flag.parse is None:
        declaration = f"{flag.name}/--no-{flag.name.removeprefix('--')}"
        option = typer.Option(declaration, help=help_text + shown, show_default=False)
        annotation: Any = Annotated[bool | None, option]
    else:
        names = [flag.name, flag.short] if flag.short else [flag.name]
        option = typer.Option(
            *names, help=help_text + shown, metavar=flag.metavar, show_default=False
        )
        annotation = Annotated[list[str] | None if flag.is_repeatable else str | None, option]
    return inspect.Parameter(
        _parameter_name(flag), inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation
    )


def _show_default(flag: Flag, default: Any) -> str:
    if default is None or default == ():
        return ""
    if isinstance(default, tuple):
        return f" [default: {json.dumps(default)}]"
    if isinstance(default, bool):
        name = flag.name if default else f"--no-{flag.name.removeprefix('--')}"
        return f" [default: {name}]"
    value = default.value if isinstance(default, StrEnum) else default
    return f" [default: {value:g}]" if isinstance(value, float) else f" [default: {value}]"
