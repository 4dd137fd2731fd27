"""The tokens of a model as the grammar engine needs them: bytes, ends and what is not text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from caudal.weights.gguf import GGUFFile
from caudal.weights.token_bytes import raw_token_bytes
from caudal.weights.token_vocabulary import CONTROL, UNKNOWN, UNUSED, Vocabulary, read_vocabulary

if TYPE_CHECKING:
    from llguidance import LLTokenizer

_DIGITS = b"0123456789"


class GrammarVocabulary:
    """Immutable after construction and shared by all requests of a model."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.token_bytes = _all_token_bytes(vocabulary)
        self.vocab_size = len(self.token_bytes)
        self.num_words = -(-self.vocab_size // 32)
        """32-bit words of a mask."""
        self.eog_ids = vocabulary.eog_ids
        # Whatever ends a generation must not be allowed as text.
        special = {*vocabulary.ids_of_type(CONTROL, UNKNOWN, UNUSED), *self.eog_ids}
        control = {*vocabulary.ids_of_type(CONTROL), *self.eog_ids}
        self.special_ids = {vocabulary.tokens[index]: index for index in sorted(control)}
        self.tokenizer = _create_tokenizer(self.token_bytes, sorted(special), sorted(self.eog_ids))
        self.without_digits = ~_make_mask(
            [index for index, raw in enumerate(self.token_bytes) if raw[:1] in _digit_set],
            self.num_words,
        )
        """Mask of all tokens but those that begin with a digit."""  # int32 [num_words]

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, object]) -> GrammarVocabulary:
        """Build from `tokenizer.ggml.*` keys."""
        return cls(read_vocabulary(metadata))

    @classmethod
    def from_file(cls, path: Path) -> GrammarVocabulary:
        """Build from a GGUF file; takes about half a second for 50,000 tokens."""
        with GGUFFile.open(path) as gguf:
            return cls.from_metadata(gguf.metadata)


_digit_set = frozenset(bytes([digit]) for digit in _DIGITS)


class _TokenizerSpec:
    """What LLTokenizer reads of a tokenizer that is no Hugging Face one."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokens: Sequence[bytes], special_ids: list[int], eos_id: int) -> None:
        self.tokens = tokens
        self.special_token_ids = special_ids
        self.eos_token_id = eos_id

    def __call__(self, text: bytes | str) -> list[int]:
        """Tokens of a forced text; never wanted, because grammars are compiled without forcing."""
        raise AssertionError("grammars are compiled without forced tokens")


def _create_tokenizer(
    tokens: Sequence[bytes], special_ids: list[int], eos_ids: list[int]
) -> LLTokenizer:
    from llguidance import LLTokenizer

    spec = _TokenizerSpec(tokens, special_ids, eos_ids[0])
    return LLTokenizer(spec, n_vocab=len(tokens), eos_token=eos_ids)  # type: ignore[arg-type]


def _all_token_bytes(vocabulary: Vocabulary) -> list[bytes]:
    is_byte_level = vocabulary.model == "gpt2"
    return [
        raw_token_bytes(token, kind, is_byte_level=is_byte_level)
        for token, kind in zip(vocabulary.tokens, vocabulary.types.tolist(), strict=True)
    ]


def _make_mask(ids: list[int], num_words: int) -> NDArray[np.int32]:
    bits = np.zeros(num_words * 32, dtype=np.uint8)
    bits[ids] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)
