"""Qwen 2 and 2.5: Llama with biases on q, k and v, and half-split RoPE (see ModelConfig)."""

from __future__ import annotations

from caudal.models.llama import LlamaForCausalLM
from caudal.ops.interface import LinearWeight
from caudal.weights.loader import WeightLoader


class Qwen2ForCausalLM(LlamaForCausalLM):
    """Llama's forward pass over weights that carry qkv biases."""

    def load_qkv(self, loader: WeightLoader, prefix: str) -> LinearWeight:
        """The stacked q, k, v projection with its three biases stacked alike."""
        return loader.linear(
            *(f"{prefix}attn_{part}.weight" for part in "qkv"),
            biases=tuple(f"{prefix}attn_{part}.bias" for part in "qkv"),
            is_sensitive=True,
        )
