"""Hands a model its weights, packed for the backend, one shard of them per rank."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from caudal.errors import ConfigError, ModelFileError
from caudal.ops.interface import Backend, LinearWeight, VectorWeight
from caudal.weights.dequant import dequantize
from caudal.weights.gguf import GGUFTensor


class WeightLoader:
    """Looks tensors up by their GGUF names and packs them through the backend.

    `rank` and `world_size` choose the shard; a single rank takes everything.
    """

    def __init__(
        self,
        tensors: Mapping[str, GGUFTensor],
        backend: Backend,
        *,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        if world_size != 1 or rank != 0:
            raise ConfigError(f"world_size: only 1 is supported, got rank {rank} of {world_size}")
        self._tensors = tensors
        self.backend = backend

    def has(self, name: str) -> bool:
        """Whether the model file holds `name`."""
        return name in self._tensors

    def linear(
        self, *names: str, biases: tuple[str, ...] = (), is_sensitive: bool = False
    ) -> LinearWeight:
        """The matrices `names` stacked by rows, with their biases concatenated.

        is_sensitive: see Backend.pack_linear.
        """
        bias = np.concatenate([self.array(name) for name in biases]) if biases else None
        return self.backend.pack_linear(
            [self._tensor(name) for name in names], bias, is_sensitive=is_sensitive
        )

    def vector(self, name: str) -> VectorWeight:
        """A norm weight."""
        return self.backend.pack_vector(self._tensor(name))

    def array(self, name: str) -> NDArray[np.float32]:
        """A small tensor (bias, rope factors) as float32, flattened."""
        return dequantize(self._tensor(name)).ravel()

    def _tensor(self, name: str) -> GGUFTensor:
        try:
            return self._tensors[name]
        except KeyError:
            raise ModelFileError(f"tensor {name} is missing from the model file") from None
