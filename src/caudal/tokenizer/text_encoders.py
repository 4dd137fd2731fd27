"""Encoders of plain text, free of special tokens, for each kind of vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat
from typing import Protocol

import tokenizers
from tokenizers import models

from caudal.errors import ModelFileError
from caudal.tokenizer.pretokenizers import PreTokenizerSpec
from caudal.tokenizer.sentencepiece_bpe import ScoreMerger, has_exact_merges, merges_from_scores
from caudal.weights.token_bytes import SPM_SPACE, byte_characters, byte_token_value
from caudal.weights.token_vocabulary import (
    BYTE,
    CONTROL,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    Vocabulary,
)

_TEXT_BYTES = (0x09, 0x0A, 0x0D, *range(0x20, 0x7F), *range(0x80, 0xC0), *range(0xC2, 0xF1))
"""Bytes of ordinary text. Published vocabularies lack some others (control characters, lead bytes
of empty planes), and their own tokenizers drop those characters too."""

_MAX_INLINE_CHARS = 2000
"""Text that is encoded in about a millisecond is not worth waiting for another thread, which may
be long where the kernels keep all cores busy."""


class TextEncoder(Protocol):
    """Turns plain text into ids; never yields a control token."""

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text. Releases the GIL where the work is native."""


class NativeEncoder:
    """Encodes with the `tokenizers` library."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        if sum(map(len, texts)) <= _MAX_INLINE_CHARS:
            encode = self._tokenizer.encode
            return [encode(text, add_special_tokens=False).ids for text in texts]
        # This call releases the GIL and skips offsets, but runs on another thread.
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]


class SentencePieceEncoder:
    """Writes spaces as SentencePiece does and encodes with `inner`."""

    def __init__(self, inner: TextEncoder, *, add_space_prefix: bool) -> None:
        self._inner = inner
        self._prefix = SPM_SPACE if add_space_prefix else ""

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        prefix = self._prefix
        return self._inner.encode_batch([prefix + t.replace(" ", SPM_SPACE) for t in texts])


class ScoreEncoder:
    """Encodes by scores in Python: slower, for vocabularies whose scores have ties."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        pieces = _normal_ids(vocabulary)
        self._pieces = pieces
        self._merger = ScoreMerger(pieces, _scores_by_text(vocabulary, pieces))
        values = _byte_ids(vocabulary)
        self._byte_ids = [values.get(value) for value in range(256)]
        self._unknown = vocabulary.special.get("unknown")

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [self._encode(text) for text in texts]

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for piece in self._merger.split(text):
            token_id = self._pieces.get(piece)
            ids += self._fallback(piece) if token_id is None else [token_id]
        return ids

    def _fallback(self, piece: str) -> list[int]:
        ids = [self._byte_ids[value] for value in piece.encode()]
        known = [token_id for token_id in ids if token_id is not None]
        if len(known) == len(ids):
            return known
        return [] if self._unknown is None else [self._unknown]


def create_byte_level_encoder(vocabulary: Vocabulary, spec: PreTokenizerSpec) -> TextEncoder:
    """Byte-level BPE ("gpt2"). Raises ModelFileError if merges are missing or malformed."""
    pieces = _normal_ids(vocabulary)
    merges = _split_merges(vocabulary)
    characters = byte_characters()
    missing = [value for value in _TEXT_BYTES if characters[value] not in pieces]
    if missing:
        vocabulary.warnings.append(
            f"the vocabulary lacks {len(missing)} of the 256 byte tokens, the first "
            f"0x{missing[0]:02x}: characters with them are lost"
        )
    try:
        model = _bpe(pieces, merges, spec)
    except Exception:  # what the library raises for a pair outside the vocabulary
        model = _bpe(pieces, _checked_merges(vocabulary, pieces, merges), spec)
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = spec.build()
    normalizer = spec.normalizer()
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    return NativeEncoder(tokenizer)


def create_sentencepiece_encoder(vocabulary: Vocabulary, *, add_space_prefix: bool) -> TextEncoder:
    """SentencePiece-style BPE ("llama"). Raises ModelFileError if there are no scores."""
    if vocabulary.scores is None:
        raise ModelFileError("tokenizer.ggml.scores is missing: the llama vocabulary needs it")
    byte_ids = _byte_ids(vocabulary)
    if len(byte_ids) < 256:
        loss = "loses" if vocabulary.special.get("unknown") is None else "becomes unknown for"
        vocabulary.warnings.append(
            f"the vocabulary lacks {256 - len(byte_ids)} of the 256 byte tokens: text outside its "
            f"pieces {loss} characters"
        )
    pieces = _normal_ids(vocabulary)
    scores = _scores_by_text(vocabulary, pieces)
    inner: TextEncoder
    if has_exact_merges(pieces, scores):
        inner = _native_sentencepiece(vocabulary, pieces, scores)
    else:
        inner = ScoreEncoder(vocabulary)
    return SentencePieceEncoder(inner, add_space_prefix=add_space_prefix)


def _native_sentencepiece(
    vocabulary: Vocabulary, pieces: dict[str, int], scores: dict[str, float]
) -> TextEncoder:
    byte_texts = {f"<0x{value:02X}>": token_id for value, token_id in _byte_ids(vocabulary).items()}
    unknown_id = vocabulary.special.get("unknown")
    unknown = None if unknown_id is None else vocabulary.tokens[unknown_id]
    extra = (
        byte_texts if unknown_id is None or unknown is None else byte_texts | {unknown: unknown_id}
    )
    model = models.BPE(
        vocab=pieces | extra,
        merges=merges_from_scores(pieces, scores),
        byte_fallback=True,
        unk_token=unknown,
        fuse_unk=False,
    )
    return NativeEncoder(tokenizers.Tokenizer(model))


def _bpe(
    pieces: dict[str, int], merges: list[tuple[str, str]], spec: PreTokenizerSpec
) -> models.BPE:
    return models.BPE(vocab=pieces, merges=merges, ignore_merges=spec.ignore_merges)


def _split_merges(vocabulary: Vocabulary) -> list[tuple[str, str]]:
    merges = vocabulary.merges
    if merges is None:
        raise ModelFileError("tokenizer.ggml.merges is missing: the gpt2 vocabulary needs it")
    num_spaces = list(map(str.count, merges, repeat(" ")))
    if num_spaces.count(1) != len(merges):
        index = next(index for index, count in enumerate(num_spaces) if count != 1)
        raise ModelFileError(
            f"tokenizer.ggml.merges: entry {index} {merges[index][:60]!r} is not two tokens"
        )
    # One split of the whole is several times faster than one per merge.
    halves = iter(" ".join(merges).split(" ")) if merges else iter(())
    return list(zip(halves, halves, strict=True))


def _checked_merges(
    vocabulary: Vocabulary, pieces: dict[str, int], merges: list[tuple[str, str]]
) -> list[tuple[str, str]]:
    """Leaves out merges that make or use a special token; plain text must never become one.

    Raises ModelFileError if a merge uses a token that the vocabulary does not have.
    """
    known = vocabulary.ids
    kept = []
    for index, (left, right) in enumerate(merges):
        for token in (left, right, left + right):
            if token not in known:
                raise ModelFileError(
                    f"tokenizer.ggml.merges: entry {index} uses {token[:60]!r}, which is no token"
                )
        if left in pieces and right in pieces and left + right in pieces:
            kept.append((left, right))
    return kept


def _normal_ids(vocabulary: Vocabulary) -> dict[str, int]:
    """Only these may come out of plain text; all others are found beforehand or never."""
    pieces = dict(vocabulary.ids)
    for index in vocabulary.ids_of_type(UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE):
        del pieces[vocabulary.tokens[index]]
    return pieces


def _scores_by_text(vocabulary: Vocabulary, pieces: dict[str, int]) -> dict[str, float]:
    assert vocabulary.scores is not None
    scores = vocabulary.scores.tolist()
    return {piece: scores[index] for piece, index in pieces.items()}


def _byte_ids(vocabulary: Vocabulary) -> dict[int, int]:
    """Id of each byte-fallback token by its value."""
    found: dict[int, int] = {}
    for index in vocabulary.ids_of_type(BYTE):
        value = byte_token_value(vocabulary.tokens[index])
        if value is None:
            shown = vocabulary.tokens[index][:60]
            raise ModelFileError(f"tokenizer.ggml.tokens: id {index} {shown!r} is typed as a byte")
        found[value] = index
    return found
