"""Rotary-embedding frequencies of a model, with its context-extension scaling applied."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from caudal.config import ModelConfig, RopeScaling
from caudal.ops.interface import RopeSpec


def make_rope_spec(
    config: ModelConfig, freq_factors: NDArray[np.float32] | None = None
) -> RopeSpec:
    """Frequencies theta^(-2i/d), i = 0 … d/2 - 1, scaled as the model asks.

    freq_factors: per-frequency divisors [rope_dim / 2] (`rope_freqs.weight`, Llama 3).
    Source: RoFormer (arXiv 2104.09864); YaRN (arXiv 2309.00071), section 3.
    """
    exponent = np.arange(0, config.rope_dim, 2, dtype=np.float64) / config.rope_dim
    inv_freq = 1.0 / config.rope_theta**exponent
    scaling = config.rope_scaling
    attention_factor = 1.0
    if scaling.kind == "linear":
        inv_freq /= scaling.factor
    elif scaling.kind == "yarn":
        inv_freq = _yarn(inv_freq, config, scaling)
        attention_factor = scaling.attention_factor * (1.0 + 0.1 * math.log(scaling.factor))
    if freq_factors is not None:
        inv_freq /= freq_factors.astype(np.float64)
    return RopeSpec(inv_freq.astype(np.float32), config.rope_interleaved, attention_factor)


def _yarn(
    inv_freq: NDArray[np.float64], config: ModelConfig, scaling: RopeScaling
) -> NDArray[np.float64]:
    """Interpolate slow frequencies, keep fast ones, ramp between (YaRN, equations 22-23)."""
    num_context = scaling.original_context_length or config.context_length

    def dimension_of(num_rotations: float) -> float:
        turns = num_context / (num_rotations * 2 * math.pi)
        return config.rope_dim * math.log(turns) / (2 * math.log(config.rope_theta))

    low = max(math.floor(dimension_of(scaling.beta_fast)), 0)
    high = min(math.ceil(dimension_of(scaling.beta_slow)), config.rope_dim - 1)
    index = np.arange(config.rope_dim // 2, dtype=np.float64)
    ramp = np.clip((index - low) / max(high - low, 0.001), 0.0, 1.0)
    keep = (1.0 - ramp) * scaling.ext_factor
    return inv_freq / scaling.factor * (1.0 - keep) + inv_freq * keep
