"""Qwen 3: Llama with a per-head RMS norm on q and k before the rotation, half-split RoPE."""

from __future__ import annotations

from caudal.models.llama import DecoderLayer, LlamaForCausalLM
from caudal.weights.loader import WeightLoader


class Qwen3ForCausalLM(LlamaForCausalLM):
    """Llama's forward pass with head norms."""

    def load_layer(self, loader: WeightLoader, index: int) -> DecoderLayer:
        """Layer `index` with its two head norms [head_dim]."""
        layer = super().load_layer(loader, index)
        layer.q_norm = loader.vector(f"blk.{index}.attn_q_norm.weight")
        layer.k_norm = loader.vector(f"blk.{index}.attn_k_norm.weight")
        return layer
