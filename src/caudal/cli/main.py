"""Entry point of the `caudal` command."""

from __future__ import annotations


def main() -> None:
    """Run the command line."""
    raise SystemExit("caudal: not wired yet")
