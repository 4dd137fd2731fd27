"""Checks of the vocabulary in a GGUF file's metadata, before anybody builds a tokenizer."""

from __future__ import annotations

import logging

from caudal.errors import ModelFileError
from caudal.weights.gguf import GGUFFile

_LOGGER = logging.getLogger(__name__)

_TOKENS = "tokenizer.ggml.tokens"
_SCORES = "tokenizer.ggml.scores"
_TOKEN_TYPES = "tokenizer.ggml.token_type"
_MERGES = "tokenizer.ggml.merges"

_MAX_TOKEN_TYPE = 6
"""normal 1, unknown 2, control 3, user-defined 4, unused 5, byte 6; 0 is undefined."""


def check_vocabulary(gguf: GGUFFile) -> int:
    """Check kinds and lengths of the vocabulary's arrays; return the number of tokens.

    Decodes no string. Raises ModelFileError naming the key at fault.
    """
    if gguf.array_kind(_TOKENS) != "str":
        raise ModelFileError(f"{gguf.path.name}: '{_TOKENS}' must be an array of str")
    vocab_size = gguf.array_length(_TOKENS)
    if vocab_size == 0:
        raise ModelFileError(f"{gguf.path.name}: '{_TOKENS}' is empty")
    if _SCORES in gguf.metadata:
        gguf.get_array(_SCORES, "float", length=vocab_size)
    if _TOKEN_TYPES in gguf.metadata:
        types = gguf.get_array(_TOKEN_TYPES, "int", length=vocab_size)
        if int(types.min()) < 0 or int(types.max()) > _MAX_TOKEN_TYPE:
            raise ModelFileError(
                f"{gguf.path.name}: '{_TOKEN_TYPES}' must hold 0 to {_MAX_TOKEN_TYPE}, but has "
                f"values from {types.min()} to {types.max()}"
            )
    if _MERGES in gguf.metadata and gguf.array_kind(_MERGES) != "str":
        raise ModelFileError(f"{gguf.path.name}: '{_MERGES}' must be an array of str")
    return vocab_size


def special_token_id(gguf: GGUFFile, name: str) -> int | None:
    """The id under `tokenizer.ggml.{name}_token_id`; None if absent or outside the vocabulary.

    Converters write ids such as 4294967295 for "none", so those only log a warning. Raises
    ModelFileError if the value is not an integer.
    """
    key = f"tokenizer.ggml.{name}_token_id"
    if key not in gguf.metadata:
        return None
    token_id = gguf.get_int(key)
    if 0 <= token_id < gguf.array_length(_TOKENS):
        return token_id
    _LOGGER.warning("%s: '%s' is %d, outside the vocabulary", gguf.path.name, key, token_id)
    return None
