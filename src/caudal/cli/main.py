"""Entry point of the `caudal` command: finds the command, loads only that, reports errors."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from caudal.errors import CaudalError, ConfigError


@dataclass(frozen=True, slots=True)
class Command:
    """Where a command lives: `module.function` is what typer registers."""

    path: tuple[str, ...]
    module: str
    function: str
    summary: str
    is_factory: bool = False
    """The function makes the command, given whether help is asked for."""


COMMANDS = (
    Command(
        ("serve",),
        "caudal.cli.serve",
        "create",
        "Serve MODEL to many users at once over the OpenAI API.",
        is_factory=True,
    ),
    Command(
        ("chat",),
        "caudal.cli.chat",
        "create",
        "Talk to a model in the terminal.",
        is_factory=True,
    ),
    Command(
        ("batch",),
        "caudal.cli.batch",
        "create",
        "Run the requests of a file without a server; resumes.",
        is_factory=True,
    ),
    Command(
        ("pull",),
        "caudal.cli.pull",
        "pull",
        "Fetch a model into the cache; print its path on standard output.",
    ),
    Command(
        ("bench", "kernels"),
        "caudal.cli.bench_kernels",
        "bench_kernels",
        "Time each kernel against this machine's measured peak.",
    ),
)

GROUPS = {"bench": "Measure this machine."}


def main(argv: list[str] | None = None) -> None:
    """Run the command line `argv` (without the program's name); always raises SystemExit.

    Exit codes: 0 done, 1 failed, 2 a flag or argument is wrong, 130 interrupted.
    """
    arguments = sys.argv[1:] if argv is None else argv
    if not arguments or (len(arguments) == 1 and arguments[0] in GROUPS):
        arguments = [*arguments, "--help"]
    try:
        code = create_app(arguments)(args=arguments, prog_name="caudal", standalone_mode=False)
    except ConfigError as error:
        _fail(str(error), 2)
    except CaudalError as error:
        _fail(str(error), 1)
    except typer.TyperException as error:
        _fail(error.format_message() + " (--help lists the options)", 2)
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(130)
    sys.exit(code if isinstance(code, int) else 0)


def _fail(message: str, code: int) -> None:
    print(f"caudal: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(code)


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
