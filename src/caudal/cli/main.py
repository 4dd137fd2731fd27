"""Entry point of the `caudal` command: finds the command, loads only that, reports errors."""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass

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
    plain_function: str = ""
    """Runs the command without typer if its words are plain; tells whether they were."""


COMMANDS = (
    Command(
        ("serve",),
        "caudal.cli.serve",
        "create",
        "Serve MODEL to many users at once over the OpenAI API.",
        is_factory=True,
        plain_function="run_plain",
    ),
    Command(
        ("chat",),
        "caudal.cli.chat",
        "create",
        "Talk to a model in the terminal.",
        is_factory=True,
    ),
    Command(
        ("top",),
        "caudal.cli.top",
        "create",
        "Watch a server's live numbers in the terminal.",
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
        ("doctor",),
        "caudal.cli.doctor",
        "create",
        "Say what limits a server, what would help, and how much.",
        is_factory=True,
    ),
    Command(
        ("bench", "serve"),
        "caudal.cli.bench_serve",
        "create",
        "Measure an OpenAI-compatible server under load.",
        is_factory=True,
    ),
    Command(
        ("bench", "offline"),
        "caudal.cli.bench_offline",
        "create",
        "Throughput of a model in this process, without a server.",
        is_factory=True,
    ),
    Command(
        ("bench", "ladder"),
        "caudal.cli.bench_ladder",
        "create",
        "What each serving technique buys on this machine.",
        is_factory=True,
    ),
    Command(
        ("bench", "kernels"),
        "caudal.cli.bench_kernels",
        "bench_kernels",
        "Time each kernel against this machine's measured peak.",
    ),
)

GROUPS = {"bench": "Measure servers and this machine."}


def main(argv: list[str] | None = None) -> None:
    """Run the command line `argv` (without the program's name); always raises SystemExit.

    Exit codes: 0 done, 1 failed, 2 a flag or argument is wrong, 130 interrupted.
    """
    arguments = sys.argv[1:] if argv is None else argv
    if not arguments or (len(arguments) == 1 and arguments[0] in GROUPS):
        arguments = [*arguments, "--help"]
    try:
        code = run_command(arguments)
    except ConfigError as error:
        _fail(str(error), 2)
    except CaudalError as error:
        _fail(str(error), 1)
    except KeyboardInterrupt:
        sys.exit(130)
    sys.exit(code)


def run_command(arguments: list[str]) -> int:
    """Run the command that `arguments` name, if possible without typer; returns the exit code."""
    for command in COMMANDS:
        if command.plain_function and arguments[0] == command.path[0]:
            run_plain = getattr(importlib.import_module(command.module), command.plain_function)
            if run_plain(arguments[1:]):
                return 0
    from caudal.cli.typer_app import run_app

    return run_app(arguments)


def _fail(message: str, code: int) -> None:
    print(f"caudal: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(code)
