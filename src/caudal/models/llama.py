"""Llama family (Llama 1-3, Mistral, SmolLM2): pre-norm decoder with GQA, RoPE and SwiGLU."""

from __future__ import annotations

from dataclasses import dataclass

from caudal.config import ModelConfig
from caudal.models.rope import make_rope_spec
from caudal.ops.interface import LinearWeight, Ops, RopeSpec, Tensor, VectorWeight
from caudal.weights.loader import WeightLoader


@dataclass(slots=True)
class DecoderLayer:
    """Weights of one layer; qkv and gate_up are stacked so that each is one product."""

    attn_norm: VectorWeight
    qkv: LinearWeight
    attn_output: LinearWeight
    ffn_norm: VectorWeight
    gate_up: LinearWeight
    ffn_down: LinearWeight
    q_norm: VectorWeight | None = None
    k_norm: VectorWeight | None = None


class LlamaForCausalLM:
    """Owns the packed weights; `forward` is the whole model."""

    def __init__(self, config: ModelConfig, loader: WeightLoader) -> None:
        self.config = config
        self.embedding = loader.linear("token_embd.weight")
        self.layers = [self.load_layer(loader, index) for index in range(config.num_layers)]
        self.output_norm = loader.vector("output_norm.weight")
        self.lm_head = self.embedding if config.is_tied else loader.linear("output.weight")
        factors = loader.array("rope_freqs.weight") if loader.has("rope_freqs.weight") else None
        self.rope: RopeSpec = make_rope_spec(config, factors)

    def load_layer(self, loader: WeightLoader, index: int) -> DecoderLayer:
        """Weights of layer `index`; families with head norms override this."""
        prefix = f"blk.{index}."
        return DecoderLayer(
            attn_norm=loader.vector(prefix + "attn_norm.weight"),
            qkv=self.load_qkv(loader, prefix),
            attn_output=loader.linear(prefix + "attn_output.weight"),
            ffn_norm=loader.vector(prefix + "ffn_norm.weight"),
            gate_up=loader.linear(prefix + "ffn_gate.weight", prefix + "ffn_up.weight"),
            ffn_down=loader.linear(prefix + "ffn_down.weight", is_sensitive=True),
        )

    def load_qkv(self, loader: WeightLoader, prefix: str) -> LinearWeight:
        """The stacked q, k, v projection."""
        names = (f"{prefix}attn_{part}.weight" for part in "qkv")
        return loader.linear(*names, is_sensitive=True)

    def forward(self, ops: Ops) -> Tensor:
        """One step over the ragged batch -> logits [num_logits, vocab_size]."""
        return ops.linear(self.hidden_states(ops), self.lm_head)

    def hidden_states(self, ops: Ops) -> Tensor:
        """All but the output head -> final normed hidden states [num_logits, hidden_size]."""
        eps = self.config.rms_norm_eps
        x = ops.embed(self.embedding)
        for index, layer in enumerate(self.layers):
            h = ops.rms_norm(x, layer.attn_norm, eps)
            qkv = ops.linear(h, layer.qkv)
            q = ops.rope_and_cache(qkv, index, layer.q_norm, layer.k_norm)
            h = ops.attention(q, index)
            if layer is self.layers[-1]:
                # No later layer needs the other rows.
                h, x = ops.select_logits(h), ops.select_logits(x)
            x = ops.all_reduce(ops.linear(h, layer.attn_output, residual=x))
            h = ops.rms_norm(x, layer.ffn_norm, eps)
            h = ops.silu_mul(ops.linear(h, layer.gate_up))
            x = ops.all_reduce(ops.linear(h, layer.ffn_down, residual=x))
        return ops.rms_norm(x, self.output_norm, eps)
