"""Which token ids end a generation, from GGUF metadata alone."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

CONTROL_TOKEN_TYPE = 3
_END_KEYS = tuple(f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))
_END_TEXTS = frozenset(
    {
        "<|im_end|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<|end|>",
        "<end_of_turn>",
        "</s>",
    }
)


def eog_token_ids(metadata: Mapping[str, object]) -> frozenset[int]:
    """End-of-generation ids: those the file names, and well-known control tokens.

    A chat model often ends its turn with another token than `eos`, so one id is not enough.
    """
    ids = {value for key in _END_KEYS if isinstance(value := metadata.get(key), int)}
    tokens = metadata.get("tokenizer.ggml.tokens")
    types = metadata.get("tokenizer.ggml.token_type")
    if isinstance(tokens, list) and isinstance(types, np.ndarray):
        control = np.flatnonzero(types[: len(tokens)] == CONTROL_TOKEN_TYPE).tolist()
        ids.update(index for index in control if tokens[index] in _END_TEXTS)
    return frozenset(ids)
