"""GGUF v2/v3 reader: one model from one or several memory-mapped files."""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal, NoReturn, Self, TypeVar, overload

import numpy as np
import numpy.typing as npt

from caudal.errors import ModelFileError
from caudal.weights.ggml_types import GGMLType
from caudal.weights.gguf_header import (
    MAX_KEY_BYTES,
    MAX_METADATA_PAIRS,
    HeaderCursor,
    Metadata,
    quoted,
)
from caudal.weights.gguf_tensors import MAX_TENSORS, GGUFTensor, read_tensors

__all__ = ["GGMLType", "GGUFFile", "GGUFTensor"]

_MAGIC = b"GGUF"
_SUPPORTED_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_MAX_SPLITS = 1024
_SAMPLED_PAGES = 32
_SAMPLE_BYTES = 4096
_SPLIT_NAME = re.compile(r"^(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf$")

ArrayKind = Literal["str", "int", "float", "bool"]
_KIND_OF_DTYPE: dict[str, ArrayKind] = {
    "u": "int",
    "i": "int",
    "f": "float",
    "b": "bool",
}


class _Required:
    """Marks a getter without a default."""


_REQUIRED: Final = _Required()
_Scalar = TypeVar("_Scalar", int, float, str, bool)


@dataclass(frozen=True, slots=True)
class _Shard:
    """One mapped file of a model."""

    path: Path
    buffer: mmap.mmap
    metadata: Metadata
    tensors: dict[str, GGUFTensor]
    header_bytes: int


class GGUFFile:
    """A model's metadata and tensors; owns the mappings of its file or files.

    Tensor data are views of the mapping: nothing is read before it is touched. Replace a model
    file only by renaming a new one over it: cutting a mapped file short kills its readers.
    """

    def __init__(self, shards: list[_Shard]) -> None:
        self._shards = shards
        self.path = shards[0].path
        self.paths = tuple(shard.path for shard in shards)
        self._metadata = shards[0].metadata
        self._tensors = _merge_tensors(shards)

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Self:
        """Map the file at `path` and check its header; of a split model, any part will do.

        Raises ModelFileError naming the field or tensor at fault, UnsupportedModelError for an
        unknown tensor type. Allocates no more than the header's size.
        """
        first = _first_split(Path(path))
        shards = [_open_shard(first)]
        head = shards[0]
        num_splits = _split_number(head, "split.count", default=1)
        if num_splits > 1:
            shards.extend(_open_siblings(head, num_splits))
        return cls(shards)

    @property
    def metadata(self) -> Metadata:
        """Key-value pairs; string arrays decode on first access."""
        return self._metadata

    @property
    def tensors(self) -> Mapping[str, GGUFTensor]:
        """Tensors of all parts by name, in file order."""
        return self._tensors

    @property
    def architecture(self) -> str:
        """`general.architecture`. Raises ModelFileError if it is missing."""
        return self.get_str("general.architecture")

    def fingerprint(self) -> str:
        """SHA-256 of what tells this model's content from any other's.

        Sizes, the headers, 32 pages of each file, and the times of the last change: nobody can set
        `ctime` back, so a change between the pages shows too. Reading all of a file would take
        longer than loading it. Raises OSError if a file is gone.
        """
        digest = hashlib.sha256()
        for shard in self._shards:
            with shard.path.open("rb", buffering=0) as file:
                stat = os.fstat(file.fileno())
                digest.update(f"{stat.st_size} {stat.st_mtime_ns} {stat.st_ctime_ns};".encode())
                digest.update(shard.buffer[: shard.header_bytes])
                step = max(1, (stat.st_size - shard.header_bytes) // _SAMPLED_PAGES)
                for start in range(shard.header_bytes, stat.st_size, step):
                    digest.update(os.pread(file.fileno(), _SAMPLE_BYTES, start))
        return digest.hexdigest()

    def close(self) -> None:
        """Unmap. Arrays taken from this file keep its mapping alive until they are gone."""
        self._metadata = Metadata({})
        self._tensors = {}
        shards, self._shards = self._shards, []
        buffers = [shard.buffer for shard in shards]
        # The views that the shards hold must be gone before mmap agrees to close.
        shards.clear()
        for buffer in buffers:
            with contextlib.suppress(BufferError):
                buffer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def get_int(self, key: str, default: int | _Required = _REQUIRED) -> int:
        """Integer at `key`; ModelFileError if absent without default, or of another type."""
        return self._get(key, int, default)

    def get_float(self, key: str, default: float | _Required = _REQUIRED) -> float:
        """Float at `key`; ModelFileError if absent without default, or of another type."""
        return self._get(key, float, default)

    def get_str(self, key: str, default: str | _Required = _REQUIRED) -> str:
        """String at `key`; ModelFileError if absent without default, or of another type."""
        return self._get(key, str, default)

    def get_bool(self, key: str, default: bool | _Required = _REQUIRED) -> bool:
        """Boolean at `key`; ModelFileError if absent without default, or of another type."""
        return self._get(key, bool, default)

    @overload
    def get_array(
        self, key: str, kind: Literal["str"], *, length: int | None = None
    ) -> list[str]: ...

    @overload
    def get_array(
        self,
        key: str,
        kind: Literal["int", "float", "bool"],
        *,
        length: int | None = None,
    ) -> npt.NDArray[Any]: ...

    @overload
    def get_array(
        self, key: str, kind: None = None, *, length: int | None = None
    ) -> list[str] | npt.NDArray[Any]: ...

    def get_array(
        self, key: str, kind: ArrayKind | None = None, *, length: int | None = None
    ) -> list[str] | npt.NDArray[Any]:
        """Array at `key`, elements of `kind` ("str": a list; else a read-only NumPy array).

        Raises ModelFileError if the key is missing, is not an array, has elements of another
        kind, or not exactly `length` elements (when given).
        """
        actual = self.array_kind(key)
        if actual is None or kind not in (None, actual):
            expected = f"an array of {kind}" if kind else "an array"
            self._fail(f"{quoted(key)} must be {expected}, but holds {self._describe(key)}")
        found = self._metadata.array_length(key)
        if length is not None and found != length:
            self._fail(f"{quoted(key)} must have {length} elements, but has {found}")
        value = self._metadata[key]
        assert isinstance(value, (list, np.ndarray))
        return value

    def array_kind(self, key: str) -> ArrayKind | None:
        """Element kind of the array at `key`, None if it is a scalar; decodes nothing.

        Raises ModelFileError if the key is missing.
        """
        self._require(key)
        if self._metadata.is_string_array(key):
            return "str"
        value = self._metadata[key]
        return _KIND_OF_DTYPE[value.dtype.kind] if isinstance(value, np.ndarray) else None

    def array_length(self, key: str) -> int:
        """Elements of the array at `key`, without decoding it; ModelFileError if not an array."""
        self._require(key)
        length = self._metadata.array_length(key)
        if length is None:
            self._fail(f"{quoted(key)} must be an array, but holds {self._describe(key)}")
        return length

    def _get(self, key: str, kind: type[_Scalar], default: _Scalar | _Required) -> _Scalar:
        if key not in self._metadata and not isinstance(default, _Required):
            return default
        self._require(key)
        value = None if self._metadata.is_string_array(key) else self._metadata[key]
        # type() and not isinstance: a bool is an int to Python but not to GGUF.
        if type(value) is not kind:
            self._fail(f"{quoted(key)} must be {kind.__name__}, but holds {self._describe(key)}")
        return value

    def _require(self, key: str) -> None:
        if key not in self._metadata:
            self._fail(f"metadata key {quoted(key)} is missing")

    def _describe(self, key: str) -> str:
        kind = self.array_kind(key)
        if kind is not None:
            return f"an array of {kind}"
        return type(self._metadata[key]).__name__

    def _fail(self, message: str) -> NoReturn:
        raise ModelFileError(f"{self.path.name}: {message}")


def _first_split(path: Path) -> Path:
    match = _SPLIT_NAME.fullmatch(path.name)
    if match is None or int(match["number"]) <= 1:
        return path
    return _split_path(path, match, 1)


def _split_path(path: Path, match: re.Match[str], number: int) -> Path:
    return path.with_name(f"{match['stem']}-{number:05d}-of-{match['count']}.gguf")


def _open_siblings(head: _Shard, num_splits: int) -> list[_Shard]:
    """Parts 2 … `num_splits` of the model whose first part is `head`, checked to belong to it."""
    if num_splits > _MAX_SPLITS:
        raise ModelFileError(
            f"{head.path.name}: 'split.count' is {num_splits}; the limit is {_MAX_SPLITS}"
        )
    match = _SPLIT_NAME.fullmatch(head.path.name)
    if match is None or int(match["count"]) != num_splits:
        raise ModelFileError(
            f"{head.path.name}: part of a model split into {num_splits} files, which must keep "
            f"the name …-00001-of-{num_splits:05d}.gguf"
        )
    if _split_number(head, "split.no") != 0:
        raise ModelFileError(f"{head.path.name}: 'split.no' must be 0 in the first part")
    shards = []
    for number in range(2, num_splits + 1):
        shard = _open_shard(_split_path(head.path, match, number))
        found = (_split_number(shard, "split.no"), _split_number(shard, "split.count"))
        if found != (number - 1, num_splits):
            raise ModelFileError(
                f"{shard.path.name}: 'split.no' and 'split.count' are {found[0]} and {found[1]}, "
                f"expected {number - 1} and {num_splits}"
            )
        shards.append(shard)
    return shards


def _split_number(shard: _Shard, key: str, default: int | None = None) -> int:
    value = shard.metadata.get(key, default)
    if type(value) is not int:
        raise ModelFileError(f"{shard.path.name}: {quoted(key)} must be an integer, got {value!r}")
    return value


def _merge_tensors(shards: list[_Shard]) -> dict[str, GGUFTensor]:
    tensors: dict[str, GGUFTensor] = {}
    for shard in shards:
        for name, tensor in shard.tensors.items():
            if name in tensors:
                raise ModelFileError(
                    f"{shard.path.name}: tensor {quoted(name)} is also in an earlier part"
                )
            tensors[name] = tensor
    expected = _split_number(shards[0], "split.tensors.count", default=len(tensors))
    if len(shards) > 1 and expected != len(tensors):
        raise ModelFileError(
            f"{shards[0].path.name}: 'split.tensors.count' is {expected}, but the "
            f"{len(shards)} parts hold {len(tensors)} tensors"
        )
    return tensors


def _open_shard(path: Path) -> _Shard:
    buffer = _map_file(path)
    cursor = HeaderCursor(buffer, path.name)
    num_tensors, num_pairs = _read_preamble(cursor, buffer)
    metadata = _read_metadata(cursor, num_pairs)
    tensors = read_tensors(cursor, buffer, num_tensors, _alignment(cursor, metadata))
    return _Shard(path, buffer, metadata, tensors, cursor.position)


def _map_file(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size == 0:
                raise ModelFileError(f"{path.name}: the file is empty")
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ModelFileError(f"cannot read {path}: {reason}") from None


def _read_preamble(cursor: HeaderCursor, buffer: mmap.mmap) -> tuple[int, int]:
    """Check magic and version; return the numbers of tensors and of metadata pairs."""
    start = cursor.take(4, "magic")
    magic = buffer[start : start + 4]
    if magic == _MAGIC[::-1]:
        cursor.fail("big-endian GGUF files are not supported")
    if magic != _MAGIC:
        cursor.fail(f"not a GGUF file: it starts with {magic!r} instead of {_MAGIC!r}")
    version = cursor.read_u32("version")
    if version and version & 0xFFFF == 0:
        cursor.fail("big-endian GGUF files are not supported")
    if version not in _SUPPORTED_VERSIONS:
        cursor.fail(f"GGUF version {version} is not supported; versions 2 and 3 are")
    num_tensors = cursor.read_u64("number of tensors")
    num_pairs = cursor.read_u64("number of metadata pairs")
    if num_tensors > MAX_TENSORS:
        cursor.fail(f"{num_tensors} tensors declared; the limit is {MAX_TENSORS}")
    if num_pairs > MAX_METADATA_PAIRS:
        cursor.fail(f"{num_pairs} metadata pairs declared; the limit is {MAX_METADATA_PAIRS}")
    return num_tensors, num_pairs


def _read_metadata(cursor: HeaderCursor, num_pairs: int) -> Metadata:
    values: dict[str, object] = {}
    for index in range(num_pairs):
        key = cursor.read_string(f"key of metadata pair {index}", MAX_KEY_BYTES)
        if not key:
            cursor.fail(f"metadata pair {index} has an empty key")
        if key in values:
            cursor.fail(f"metadata key {quoted(key)} appears twice")
        values[key] = cursor.read_value(key)
    return Metadata(values)


def _alignment(cursor: HeaderCursor, metadata: Metadata) -> int:
    value = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if type(value) is not int or value < 1 or value & (value - 1):
        cursor.fail(f"'general.alignment' must be a power of two, got {str(value)[:80]}")
    return value
