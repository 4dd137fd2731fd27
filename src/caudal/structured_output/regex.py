"""Regular expressions of clients: their size, before anything is compiled."""

from __future__ import annotations

import re

from caudal.errors import InvalidRequestError
from caudal.structured_output.limits import MAX_NESTED_REPEAT, MAX_REGEX_CHARS, MAX_REPEAT

_TOKEN = re.compile(r"\\.|\[(?:\\.|[^\]\\])+\]|[()]|\{(\d+)(?:,(\d*))?\}|.", re.DOTALL)


def check_regex(regex: str, where: str, code: str = "invalid_value") -> None:
    """Raise InvalidRequestError, beginning with `where`, if `regex` is too large."""
    if len(regex) > MAX_REGEX_CHARS:
        raise _error(where, code, f"at most {MAX_REGEX_CHARS} characters, got {len(regex)}")
    # Per open group: the largest product of counts inside it; `last` is that of the latest atom.
    inside = [1]
    last = 1
    for match in _TOKEN.finditer(regex):
        token = match.group()
        if token == "(":
            inside.append(1)
            last = 1
        elif token == ")" and len(inside) > 1:
            last = inside.pop()
        elif match.group(1) is not None:
            last *= _count(match, where, code)
        else:
            last = 1
        inside[-1] = max(inside[-1], last)
        if last > MAX_NESTED_REPEAT:
            raise _error(
                where,
                code,
                f"repeats around each other may multiply to {MAX_NESTED_REPEAT} at most",
            )


def _count(match: re.Match[str], where: str, code: str) -> int:
    digits = max((match.group(1), match.group(2) or ""), key=lambda text: (len(text), text))
    count = int(digits) if len(digits) <= len(str(MAX_REPEAT)) else MAX_REPEAT + 1
    if count > MAX_REPEAT:
        raise _error(where, code, f"a repeat may be {MAX_REPEAT} at most, got {match.group()[:40]}")
    return max(1, count)


def _error(where: str, code: str, problem: str) -> InvalidRequestError:
    return InvalidRequestError(f"{where}: {problem}.", code=code)
