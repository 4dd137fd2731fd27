"""The installed version."""

from __future__ import annotations

from importlib import metadata


def caudal_version() -> str:
    """Version of the installed package; "unknown" when run from a source tree."""
    try:
        return metadata.version("caudal")
    except metadata.PackageNotFoundError:
        return "unknown"
