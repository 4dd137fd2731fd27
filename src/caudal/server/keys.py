"""API keys: where they come from, who they are, and what each may use. Only hashes are kept."""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import stat
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from caudal.config import ServerConfig
from caudal.errors import ConfigError

logger = logging.getLogger("caudal.server")

MAX_KEYS = 1024
MAX_FILE_BYTES = 1024 * 1024

HASHED: Final = "sha256:"
"""Begins a key that is given by its hash, in hexadecimal."""

_HEX_DIGEST = re.compile(r"[0-9a-fA-F]{64}")

_Limit = Annotated[int, Meta(ge=1, le=2**53)]


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """What the holder of a key may use; None: no limit of its own."""

    max_concurrency: int | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    weight: float = 1.0
    """Share of the machine relative to other keys, while several wait."""
    min_priority: int | None = None
    """The most urgent `priority` that the key may ask for."""
    max_batch_requests: int | None = None
    """Requests of offline batches that have not ended, beside the limits above."""
    max_batch_tokens: int | None = None
    """Prompt tokens of those."""
    max_batches: int | None = None
    """Batches that have not ended."""


@dataclass(frozen=True, slots=True)
class ApiKey:
    """One key: who holds it, the SHA-256 of its text, and its limits."""

    owner: str
    """Names the holder; with a name in the file the key can change and its files stay."""
    digest: bytes
    limits: KeyLimits = field(default_factory=KeyLimits)


class _Entry(msgspec.Struct, forbid_unknown_fields=True):
    key: str | None = None
    key_sha256: str | None = None
    name: Annotated[str, Meta(min_length=1, max_length=128)] | None = None
    max_concurrency: _Limit | None = None
    requests_per_minute: _Limit | None = None
    tokens_per_minute: _Limit | None = None
    weight: Annotated[float, Meta(ge=0.001, le=1000)] = 1.0
    min_priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] = 0
    max_batch_requests: _Limit | None = None
    max_batch_tokens: _Limit | None = None
    max_batches: _Limit | None = None


class _File(msgspec.Struct, forbid_unknown_fields=True):
    keys: list[_Entry]


class KeyRing:
    """The keys that open this server; without any, everybody may pass."""

    def __init__(self, keys: Sequence[ApiKey] = ()) -> None:
        self._keys = tuple(keys)
        self._by_owner: Mapping[str, ApiKey] = {key.owner: key for key in keys}

    def __len__(self) -> int:
        return len(self._keys)

    def find(self, candidates: Iterable[bytes]) -> ApiKey | None:
        """The key that one of the given texts is.

        Every key is compared with every text, in constant time each: the time tells nothing about
        which one was right, nor how much of it.
        """
        found: ApiKey | None = None
        digests = [hashlib.sha256(text).digest() for text in candidates]
        for key in self._keys:
            for digest in digests:
                if hmac.compare_digest(digest, key.digest):
                    found = key
        return found

    def limits_of(self, owner: str) -> KeyLimits:
        """Limits of the key that `owner` holds; none for anybody else."""
        key = self._by_owner.get(owner)
        return KeyLimits() if key is None else key.limits

    def replace(self, other: KeyRing) -> None:
        """Take over the keys of `other`; those that it has not are refused from now on."""
        self._keys, self._by_owner = other._keys, other._by_owner


def hashed(key: str) -> str:
    """How a key is kept in a configuration; a hash stays as it is."""
    return key if key.startswith(HASHED) else HASHED + hashlib.sha256(key.encode()).hexdigest()


def load_keys(config: ServerConfig) -> KeyRing:
    """The keys of `config` and of its file. Raises ConfigError naming the place at fault."""
    keys = [_plain_key(text, "--api-key") for text in config.api_keys]
    if config.api_key_file is not None:
        keys += _read_file(config.api_key_file)
    for what in ("digest", "owner"):
        seen: set[Any] = set()
        for key in keys:
            if getattr(key, what) in seen and what == "owner":
                raise ConfigError(f"--api-key-file: the name {key.owner!r} is given twice")
            seen.add(getattr(key, what))
        if len(seen) < len(keys):
            raise ConfigError("--api-key, --api-key-file: a key is given twice")
    if len(keys) > MAX_KEYS:
        raise ConfigError(f"--api-key-file: at most {MAX_KEYS} keys, got {len(keys)}")
    return KeyRing(keys)


def _plain_key(text: str, where: str) -> ApiKey:
    digest = _digest(text, where)
    return ApiKey(digest.hex(), digest)


def _digest(text: str, where: str) -> bytes:
    """The hash of a key's text, or the one that it gives. Raises ConfigError."""
    if not text.strip():
        raise ConfigError(f"{where}: a key must not be empty")
    if not text.startswith(HASHED):
        return hashlib.sha256(text.encode()).digest()
    if not _HEX_DIGEST.fullmatch(text.removeprefix(HASHED)):
        raise ConfigError(f"{where}: {HASHED} must be followed by 64 hexadecimal digits")
    return bytes.fromhex(text.removeprefix(HASHED))


def _read_file(path: Path) -> list[ApiKey]:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
            mode = stat.S_IMODE(path.stat().st_mode)
    except OSError as error:
        raise ConfigError(f"--api-key-file: cannot read {path}: {error.strerror}") from None
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError(f"--api-key-file: {path} is larger than {MAX_FILE_BYTES} bytes")
    try:
        text = data.decode()
    except UnicodeDecodeError:
        raise ConfigError(f"--api-key-file: {path} is not UTF-8") from None
    if path.suffix in (".toml", ".json"):
        keys = [
            _entry_key(e, f"--api-key-file: keys[{i}]") for i, e in enumerate(_parse(path, text))
        ]
    else:
        keys = _line_keys(text)
    if not keys:
        raise ConfigError(f"--api-key-file: {path} holds no key")
    if mode & 0o077:
        logger.warning("%s can be read by other users of this machine", path)
    return keys


def _line_keys(text: str) -> list[ApiKey]:
    """One key a line; blank lines and those that begin with # do not count."""
    lines = enumerate(map(str.strip, text.splitlines()), 1)
    return [
        _plain_key(line, f"--api-key-file: line {number}")
        for number, line in lines
        if line and not line.startswith("#")
    ]


def _parse(path: Path, text: str) -> list[_Entry]:
    decode = msgspec.toml.decode if path.suffix == ".toml" else msgspec.json.decode
    try:
        return decode(text, type=_File).keys
    except (msgspec.DecodeError, RecursionError) as error:
        raise ConfigError(f"--api-key-file: {path}: {error}") from None


def _entry_key(entry: _Entry, where: str) -> ApiKey:
    if (entry.key is None) == (entry.key_sha256 is None):
        raise ConfigError(f"{where}: needs either key or key_sha256")
    text = HASHED + entry.key_sha256 if entry.key_sha256 is not None else entry.key or ""
    digest = _digest(text, f"{where}.{'key' if entry.key_sha256 is None else 'key_sha256'}")
    limits = KeyLimits(
        entry.max_concurrency,
        entry.requests_per_minute,
        entry.tokens_per_minute,
        entry.weight,
        entry.min_priority,
        entry.max_batch_requests,
        entry.max_batch_tokens,
        entry.max_batches,
    )
    return ApiKey(digest.hex() if entry.name is None else f"name:{entry.name}", digest, limits)
