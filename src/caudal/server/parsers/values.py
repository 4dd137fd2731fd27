"""Values of arguments that models write in other notations, as JSON text."""

from __future__ import annotations

import ast
import json
import warnings

import msgspec

from caudal.structured_output.argument_rules import type_of

_WORDS = {"True": "true", "False": "false", "None": "null"}


def json_of_text(text: str, types: frozenset[str]) -> str:
    """A value written without quotes: JSON if it is of one of `types`, else a string."""
    stripped = text.strip()
    candidate = _WORDS.get(stripped, stripped)
    try:
        value = msgspec.json.decode(candidate)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        found = None if types and not types & {"array", "object"} else json_of_literal(stripped)
        # What is no JSON is a list or an object in Python's notation, or text.
        return found if found is not None and found[0] in "[{" else _string(text)
    kind = type_of(value)
    is_number = kind == "integer" and "number" in types
    if types and kind not in types and not is_number and "string" in types:
        return _string(text)
    return candidate


def json_of_literal(text: str) -> str | None:
    """A Python literal (or JSON) as JSON; None if it is neither."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes that Python does not know
            return _dump(ast.literal_eval(text))
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        pass
    try:
        msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None
    return text


def _dump(value: object) -> str:
    """Raises TypeError or ValueError for what JSON does not know."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return text if text.isascii() or _is_unicode(text) else json.dumps(value)


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
