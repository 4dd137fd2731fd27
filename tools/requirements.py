"""Prints requirements from pyproject.toml: those of the package, of `build`, or of an extra.

Lets the Makefile install dependencies without building the native module first.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

BUILD_PROGRAMS = ("cmake>=3.26", "ninja>=1.11")
"""Added to the build requirements: without build isolation nothing else provides them."""


def read_requirements(pyproject: Path, group: str | None) -> list[str]:
    """Requirements of `group` (an extra, or "build"), or of the package itself for None.

    Raises KeyError for an unknown extra.
    """
    data = tomllib.loads(pyproject.read_text(encoding="utf-8"))
    if group is None:
        return list(data["project"]["dependencies"])
    if group == "build":
        return [*data["build-system"]["requires"], *BUILD_PROGRAMS]
    return list(data["project"]["optional-dependencies"][group])


def main(argv: list[str]) -> None:
    pyproject = Path(__file__).resolve().parent.parent / "pyproject.toml"
    for requirement in read_requirements(pyproject, argv[0] if argv else None):
        print(requirement)


if __name__ == "__main__":
    main(sys.argv[1:])
