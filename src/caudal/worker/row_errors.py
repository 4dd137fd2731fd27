"""What the client of a row that failed is told."""

from __future__ import annotations

from caudal.errors import CaudalError


def public_message(error: Exception) -> str:
    """Our own words, never another library's exception text."""
    if isinstance(error, ArithmeticError | CaudalError):
        return str(error)
    return "the request failed inside a step; the server log has the details"
