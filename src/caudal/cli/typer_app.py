"""The typer application: every command line that is not run without it."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Annotated, Any

import typer

from caudal.cli.main import COMMANDS, GROUPS, Command
from caudal.errors import ConfigError


def run_app(argv: list[str]) -> int:
    """Run `argv` and return the exit code. Raises ConfigError for what typer refuses."""
    try:
        code = create_app(argv)(args=argv, prog_name="caudal", standalone_mode=False)
    except typer.TyperException as error:
        raise ConfigError(error.format_message() + " (--help lists the options)") from None
    except typer.Abort:
        raise KeyboardInterrupt from None
    return code if isinstance(code, int) else 0


def create_app(argv: list[str]) -> typer.Typer:
    """The command line for `argv`: the command it names is imported, the others are summaries."""
    app = typer.Typer(
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        help=_main.__doc__,
    )
    app.callback()(_main)
    groups = {
        name: typer.Typer(rich_markup_mode=None, help=summary) for name, summary in GROUPS.items()
    }
    for name, group in groups.items():
        app.add_typer(group, name=name)
    words = tuple(word for word in argv if not word.startswith("-"))
    for command in COMMANDS:
        parent = groups[command.path[0]] if len(command.path) > 1 else app
        is_named = words[: len(command.path)] == command.path
        function = _load(command, argv) if is_named else _stub
        parent.command(command.path[-1], help=command.summary)(function)
    return app


def _load(command: Command, argv: list[str]) -> Callable[..., None]:
    function: Callable[..., Any] = getattr(
        importlib.import_module(command.module), command.function
    )
    created: Callable[..., None] = function("--help" in argv) if command.is_factory else function
    return created


def _stub() -> None:
    """Stands for a command that `argv` does not name; only its summary is ever used."""


def _show_version(is_asked: bool) -> None:
    if is_asked:
        from importlib.metadata import PackageNotFoundError, version

        try:
            print(f"caudal {version('caudal')}")
        except PackageNotFoundError:
            print("caudal (not installed)")
        raise typer.Exit


def _main(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version.", callback=_show_version, is_eager=True),
    ] = False,
) -> None:
    """Serves open-weights language models to many users at once."""
