"""Random tensors made directly of blocks, without a file."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from caudal.weights.ggml_types import GGMLType
from tests.weights.scalar_blocks import HALF_OFFSETS, SCALAR_DECODERS


@dataclass(frozen=True)
class Blocks:
    """A tensor as `GGUFTensor` presents it."""

    name: str
    ggml_type: GGMLType
    shape: tuple[int, ...]
    data: npt.NDArray[np.uint8]


def random_blocks(ggml_type: GGMLType, rows: int, columns: int, seed: int = 0) -> Blocks:
    """Every bit pattern of the packed integers is possible; scales are ordinary numbers."""
    rng = np.random.default_rng([seed, ggml_type])
    num_blocks = rows * columns // ggml_type.block_size
    raw = rng.integers(0, 256, (num_blocks, ggml_type.block_bytes), np.uint8)
    for offset in HALF_OFFSETS.get(ggml_type, ()):
        scales = rng.normal(0, 0.02, num_blocks).astype("<f2")
        raw[:, offset : offset + 2] = scales.view(np.uint8).reshape(-1, 2)
    if ggml_type in (GGMLType.F32, GGMLType.BF16):
        values = rng.normal(0, 0.5, num_blocks).astype("<f4").view(np.uint8).reshape(-1, 4)
        raw = values[:, -ggml_type.block_bytes :]
    return Blocks("test.weight", ggml_type, (rows, columns), np.ascontiguousarray(raw).ravel())


def scalar_values(tensor: Blocks) -> npt.NDArray[np.float64]:
    """The tensor decoded one value at a time."""
    size = tensor.ggml_type.block_bytes
    raw = tensor.data.tobytes()
    decode = SCALAR_DECODERS[tensor.ggml_type]
    values = [value for i in range(0, len(raw), size) for value in decode(raw[i : i + size])]
    return np.array(values).reshape(tensor.shape)
