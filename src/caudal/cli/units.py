"""Numbers as people write them on a command line."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable
from pathlib import Path

from caudal.errors import ConfigError

_BYTE_UNITS = {
    "": 1,
    "b": 1,
    "k": 10**3,
    "kb": 10**3,
    "kib": 2**10,
    "m": 10**6,
    "mb": 10**6,
    "mib": 2**20,
    "g": 10**9,
    "gb": 10**9,
    "gib": 2**30,
    "t": 10**12,
    "tb": 10**12,
    "tib": 2**40,
}

# As in vLLM: lower case is decimal, upper case binary, so that 32K is a context of 32,768.
_COUNT_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}

Parser = Callable[[str, str], object]
"""(flag, text) to value; raises ConfigError naming the flag and the limit."""


def parse_bytes(flag: str, text: str) -> int:
    """A positive size such as 2GiB, 500M (decimal) or 1073741824.

    Raises ConfigError for anything else.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-zA-Z]*)", text.strip())
    if match is None or match.group(2).lower() not in _BYTE_UNITS:
        raise ConfigError(f"{flag}: must be a size such as 2GiB or 500M, got {text!r}")
    size = int(float(match.group(1)) * _BYTE_UNITS[match.group(2).lower()])
    if not 0 < size < 2**63:
        raise ConfigError(f"{flag}: must be above 0 bytes and below 8 EiB, got {text!r}")
    return size


def count(minimum: int, maximum: int, *, auto: int | None = None) -> Parser:
    """Parser of whole numbers in [minimum, maximum], also as 4k or 4K; "auto" is `auto`."""

    def parse(flag: str, text: str) -> int:
        if auto is not None and text == "auto":
            return auto
        match = re.fullmatch(r"(-?\d+)([kKmMgG]?)", text.strip())
        if match is None:
            raise ConfigError(f"{flag}: must be a whole number, got {text!r}")
        value = int(match.group(1)) * _COUNT_UNITS[match.group(2)]
        if not minimum <= value <= maximum:
            raise ConfigError(f"{flag}: must be between {minimum} and {maximum}, got {text}")
        return value

    return parse


def number(minimum: float, maximum: float) -> Parser:
    """Parser of finite decimal numbers in [minimum, maximum]."""

    def parse(flag: str, text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise ConfigError(f"{flag}: must be a number, got {text!r}") from None
        if not (math.isfinite(value) and minimum <= value <= maximum):
            raise ConfigError(f"{flag}: must be between {minimum:g} and {maximum:g}, got {text}")
        return value

    return parse


def choice(values: dict[str, object]) -> Parser:
    """Parser of one of a few words, in any case."""

    def parse(flag: str, text: str) -> object:
        if text.lower() not in values:
            raise ConfigError(f"{flag}: must be one of {', '.join(values)}, got {text!r}")
        return values[text.lower()]

    return parse


def nonempty(flag: str, text: str) -> str:
    """Parser of any text but the empty one."""
    if not text:
        raise ConfigError(f"{flag}: must not be empty")
    return text


def directory(flag: str, text: str) -> Path:
    """Parser of a folder's path, which need not exist yet; ~ is the home directory."""
    nonempty(flag, text)
    path = Path(text).expanduser()
    if path.exists() and not path.is_dir():
        raise ConfigError(f"{flag}: {text} is not a directory")
    return path.absolute()


def existing_file(flag: str, text: str) -> Path:
    """Parser of the path of a file that is there; ~ is the home directory."""
    nonempty(flag, text)
    path = Path(text).expanduser()
    if not path.is_file():
        raise ConfigError(f"{flag}: there is no file {text}")
    return path.absolute()


def json_strings(flag: str, text: str) -> tuple[str, ...]:
    """Parser of a JSON list of texts."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, list) or not all(isinstance(item, str) and item for item in value):
        raise ConfigError(f'{flag}: must be a JSON list of texts, such as ["*"], got {text!r}')
    return tuple(value)


def api_key(flag: str, text: str) -> str:
    """Parser of a key; what is kept is its hash."""
    if not text.strip():
        raise ConfigError(f"{flag}: must not be empty")
    if text.startswith("sha256:"):
        if not re.fullmatch(r"sha256:[0-9a-fA-F]{64}", text):
            raise ConfigError(f"{flag}: sha256: must be followed by 64 hexadecimal digits")
        return text.lower()
    return f"sha256:{hashlib.sha256(text.encode('utf-8', 'surrogateescape')).hexdigest()}"
