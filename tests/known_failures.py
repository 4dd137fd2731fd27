"""Inputs that broke other serving systems: the numbers that docstrings of tests refer to.

A test that guards against one of them names it in its docstring.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

CASES = tuple(f"B{number:02d}" for number in range(1, 156, 2))

NOT_APPLICABLE: Mapping[str, str] = MappingProxyType(
    {
        "B51": "there is no router, so nothing stands between a client and the server",
        "B93": "models of that family are refused by name (B101); ids of the demo model are exact",
        "B103": "asks for published measurements at 8k and 32k tokens; the golden tests bound the "
        "divergence of an int8 cache on short texts",
        "B143": "there is no tensor or data parallelism to plan memory for",
        "B155": "prefill and decode run in one engine; nothing is handed over",
    }
)
"""Cases about what does not exist, each with the reason."""
