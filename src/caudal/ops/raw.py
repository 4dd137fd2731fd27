"""NumPy work that both backends share: raw float tensors, sums of rows."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from caudal.ops.interface import RawMatrix

_F32, _F16, _BF16 = 0, 1, 30


def as_float32(part: RawMatrix) -> NDArray[np.float32]:
    """The values of an F32, F16 or BF16 tensor, a new array of its shape.

    Raises ValueError for any other type: norm weights and biases are never quantised.
    """
    data = np.ascontiguousarray(part.data).reshape(-1)
    if part.ggml_type == _F32:
        values = data.view("<f4").astype(np.float32)
    elif part.ggml_type == _F16:
        values = data.view("<f2").astype(np.float32)
    elif part.ggml_type == _BF16:
        values = (data.view("<u2").astype(np.uint32) << np.uint32(16)).view(np.float32)
    else:
        raise ValueError(f"tensor {part.name}: expected F32, F16 or BF16, got {part.ggml_type!r}")
    return values.reshape(part.shape)


def add_rows(hidden: NDArray[np.float32], sums: NDArray[np.float64]) -> None:
    """See Backend.add_rows. Not `hidden.sum(axis=0)`: its order depends on the number of rows."""
    for row in hidden:
        sums += row
