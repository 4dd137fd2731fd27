"""Hands a model its weights, packed for the backend, one shard of them per rank."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from caudal.errors import ConfigError, ModelFileError
from caudal.ops.interface import Backend, LinearWeight, VectorWeight
from caudal.weights.dequant import dequantize
from caudal.weights.gguf import GGUFTensor
from caudal.weights.packed_cache import PackedWeights


class WeightLoader:
    """Looks tensors up by their GGUF names and packs them through the backend.

    `rank` and `world_size` choose the shard; a single rank takes everything. `packed`: weights
    packed at an earlier start, which learns about those packed now.
    """

    def __init__(
        self,
        tensors: Mapping[str, GGUFTensor],
        backend: Backend,
        *,
        rank: int = 0,
        world_size: int = 1,
        packed: PackedWeights | None = None,
    ) -> None:
        if world_size != 1 or rank != 0:
            raise ConfigError(f"world_size: only 1 is supported, got rank {rank} of {world_size}")
        self._tensors = tensors
        self._packed = packed
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
        parts = [self._tensor(name) for name in names]
        if self._packed is not None:
            cols = parts[0].shape[-1]
            found = self._packed.find(names, cols, bias, is_sensitive=is_sensitive)
            if found is not None:
                return found
        weight = self.backend.pack_linear(parts, bias, is_sensitive=is_sensitive)
        for part in parts:
            part.release()
        if self._packed is not None:
            self._packed.keep(names, weight)
        return weight

    def vector(self, name: str) -> VectorWeight:
        """A norm weight."""
        part = self._tensor(name)
        vector = self.backend.pack_vector(part)
        part.release()
        return vector

    def array(self, name: str) -> NDArray[np.float32]:
        """A small tensor (bias, rope factors) as float32, flattened."""
        return dequantize(self._tensor(name)).ravel()

    def _tensor(self, name: str) -> GGUFTensor:
        try:
            return self._tensors[name]
        except KeyError:
            raise ModelFileError(f"tensor {name} is missing from the model file") from None
