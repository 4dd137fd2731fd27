"""Tensor table of a GGUF file: parsed, and checked against the file before any view exists."""

from __future__ import annotations

import math
import mmap
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from caudal.errors import UnsupportedModelError
from caudal.weights.ggml_types import REMOVED_TYPES, GGMLType, supported_type_names
from caudal.weights.gguf_header import HeaderCursor, quoted

MAX_TENSORS = 1 << 16
MAX_DIMS = 4
MAX_NAME_BYTES = 1024


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """A tensor in a mapped file; holds no copy of its data."""

    name: str
    ggml_type: GGMLType
    shape: tuple[int, ...]
    """NumPy order: the last dimension is contiguous (ne[0] in the file)."""
    data: npt.NDArray[np.uint8]
    """Read-only view of the mapped file, `nbytes` long."""

    mapping: mmap.mmap | None = None
    """Where `data` comes from, `offset` bytes behind its start."""
    offset: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return self.data.nbytes

    def release(self) -> None:
        """Take the tensor's pages out of this process's memory; `data` reads them again."""
        if self.mapping is None or not hasattr(self.mapping, "madvise"):
            return
        start = self.offset // mmap.PAGESIZE * mmap.PAGESIZE
        self.mapping.madvise(mmap.MADV_DONTNEED, start, self.offset + self.nbytes - start)


@dataclass(frozen=True, slots=True)
class _TensorInfo:
    name: str
    ggml_type: GGMLType
    dims: tuple[int, ...]  # as in the file: contiguous dimension first
    offset: int  # from the start of the data section
    num_bytes: int


def read_tensors(
    cursor: HeaderCursor, buffer: mmap.mmap, num_tensors: int, alignment: int
) -> dict[str, GGUFTensor]:
    """The tensors that the header at `cursor` describes, by name, in file order.

    Raises ModelFileError when a tensor is malformed, repeated, overlaps another or lies outside
    the file; UnsupportedModelError for a type number that no known ggml uses.
    """
    infos: dict[str, _TensorInfo] = {}
    for index in range(num_tensors):
        info = _read_info(cursor, index, alignment)
        if info.name in infos:
            cursor.fail(f"tensor {quoted(info.name)} appears twice")
        infos[info.name] = info
    data_start = -(-cursor.position // alignment) * alignment
    _check_ranges(cursor, list(infos.values()), data_start, len(buffer))
    return {
        info.name: GGUFTensor(
            info.name,
            info.ggml_type,
            info.dims[::-1],
            np.frombuffer(buffer, np.uint8, count=info.num_bytes, offset=data_start + info.offset),
            buffer,
            data_start + info.offset,
        )
        for info in infos.values()
    }


def _read_info(cursor: HeaderCursor, index: int, alignment: int) -> _TensorInfo:
    name = cursor.read_string(f"name of tensor {index}", MAX_NAME_BYTES)
    label = f"tensor {quoted(name)}" if name else f"tensor {index}"
    num_dims = cursor.read_u32(f"{label}: number of dimensions")
    if not 1 <= num_dims <= MAX_DIMS:
        cursor.fail(f"{label} has {num_dims} dimensions; 1 to {MAX_DIMS} are possible")
    dims = cursor.read_dims(num_dims, f"{label}: dimensions")
    if 0 in dims:
        cursor.fail(f"{label} has a dimension of size 0: {list(dims)}")
    if not name:
        cursor.fail(f"{label} has an empty name")
    ggml_type = _tensor_type(cursor, cursor.read_u32(f"{label}: type"), label)
    offset = cursor.read_u64(f"{label}: offset")
    if offset % alignment:
        cursor.fail(f"{label}: offset {offset} is not a multiple of the alignment {alignment}")
    if dims[0] % ggml_type.block_size:
        cursor.fail(
            f"{label}: row length {dims[0]} is not a multiple of the {ggml_type.name} block "
            f"size {ggml_type.block_size}"
        )
    # Python integers do not overflow, so an absurd product fails the range check below.
    num_bytes = math.prod(dims) // ggml_type.block_size * ggml_type.block_bytes
    return _TensorInfo(name, ggml_type, dims, offset, num_bytes)


def _tensor_type(cursor: HeaderCursor, number: int, label: str) -> GGMLType:
    try:
        return GGMLType(number)
    except ValueError:
        pass
    name = REMOVED_TYPES.get(number)
    problem = f"type {name}, which ggml has withdrawn" if name else f"unknown type number {number}"
    raise UnsupportedModelError(
        f"{cursor.file_name}: {label} has the {problem}. Supported: {supported_type_names()}"
    )


def _check_ranges(
    cursor: HeaderCursor, infos: list[_TensorInfo], data_start: int, file_size: int
) -> None:
    previous: _TensorInfo | None = None
    for info in sorted(infos, key=lambda info: info.offset):
        end = data_start + info.offset + info.num_bytes
        if end > file_size:
            cursor.fail(
                f"tensor {quoted(info.name)} ({info.ggml_type.name}, dimensions "
                f"{list(info.dims)}) ends at byte {end}, but the file has {file_size} "
                "(truncated download?)"
            )
        if previous is not None and info.offset < previous.offset + previous.num_bytes:
            cursor.fail(f"tensors {quoted(previous.name)} and {quoted(info.name)} overlap")
        previous = info
