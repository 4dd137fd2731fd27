"""The only door to kernels: backends behind the interface in `caudal.ops.interface`."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from caudal.config import ActivationDType
from caudal.errors import ConfigError
from caudal.ops.interface import Backend, RawMatrix
from caudal.ops.threads import default_num_threads

__all__ = ["create_backend", "default_num_threads"]


def create_backend(
    name: str = "cpu",
    num_threads: int | None = None,
    isa: str | None = None,
    *,
    activations: ActivationDType = ActivationDType.AUTO,
    dequantize: Callable[[RawMatrix], NDArray[np.float32]] | None = None,
) -> Backend:
    """The backend `name`: cpu (native kernels) or reference (NumPy, the oracle of tests).

    num_threads: None for `default_num_threads()`. isa: a kernel set by name, None for the best
    that this CPU runs. activations: cpu only. dequantize: reference only, see `ReferenceBackend`.
    Raises ConfigError for an unknown backend, an instruction set that is unknown or that this CPU
    lacks, activations that it cannot multiply, or a number of threads out of range.
    """
    if name == "cpu":
        from caudal.ops.cpu import CpuBackend

        threads = default_num_threads() if num_threads is None else num_threads
        return CpuBackend(threads, isa, activations)
    if name == "reference":
        from caudal.ops.reference import ReferenceBackend

        return ReferenceBackend(dequantize)
    raise ConfigError(f"unknown backend {name!r}; known: cpu, reference")
